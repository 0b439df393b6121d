"""Several processes for one run: started here on one machine, or by torchrun on many."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.files import write_atomic
from cfedavg.core.interrupts import STOPS, defer_stops, leave, watch_second_stop
from cfedavg.optimise.local import SGD
from cfedavg.simulate import engines
from cfedavg.simulate.engines import BlockEngine, RankLost, Ranks, choose_device, choose_engine
from cfedavg.simulate.local import after, batches, local_steps, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import State
from cfedavg.task import Task

WORTH = 20.0  # seconds that a run must take on one core before more processes are started unasked
MOST = 8  # processes started unasked
KNOWN = 10.0  # seconds to wait for the exit status of a process after its connection is lost
PULSE = 1.0  # seconds between two signs of life of a worker
# Seconds without a sign of life after which a worker is named. It gives them from a thread of its own while
# it computes, so that only a stopped or hung process is silent for so long, or a very busy machine.
SILENCE = 30.0
FOLLOWED = 75  # exit status of a worker that ends since another process has ended


def choose_size(config: Config, plan: Plan, task: Task, *, own: bool) -> int:
    """Return how many processes a run gets: as many as asked for, else one for each core if it pays.

    A task made in Python (`own`) stays in the process that made it unless workers are asked for.
    """
    if config.workers > 1 and config.engine == "reference":
        raise InputError(
            "`engine` reference runs in one process: leave out `workers`, or take another engine"
        )
    if config.workers:
        return config.workers
    cores = min(len(os.sched_getaffinity(0)), plan.clients_per_round, MOST)
    alone = own or cores < 2 or config.engine in ("reference", "batched")
    if alone or choose_device(config.device).type != "cpu":
        return 1
    if config.engine == "auto" and engines.is_small(task.model):
        return 1
    steps = plan.steps.mean * plan.clients_per_round * config.rounds
    return cores if _seconds_a_step(config, task) * steps > WORTH else 1


def _seconds_a_step(config: Config, task: Task) -> float:
    """Return the seconds of the second of two steps; the first is slower."""
    model, cpu = copy.deepcopy(task.model), torch.device("cpu")
    data = list(islice(batches(task.clients[0], config.batch_size, 0, 0, 0), 2))
    seconds = 0.0
    for batch in data:
        began = time.perf_counter()
        local_steps(model, task.loss, [to_device(batch, cpu, torch.float32)], SGD(), 0.0, after(1))
        seconds = time.perf_counter() - began
    return seconds


def join_torchrun(config: Config, task: Task, messages: Path | None) -> Ranks | None:
    """Join torchrun's group if there is one; raise InputError if its ranks differ in what to run."""
    ranks = Ranks.from_environment()
    if ranks is None:
        return None
    try:
        own = engines.facts(config, task) | {"`messages`": "given" if messages else "none"}
        engines.check_same(ranks, own)
        if config.workers > 1:
            raise InputError("`workers`: torchrun has set the number of processes; leave it out")
    except InputError:
        ranks.close()
        raise
    return ranks


@contextmanager
def start_workers(
    config: Config, task: Task | None, size: int, messages: Path | None, say: Callable[[str], None]
) -> Iterator[Ranks]:
    """Start the other ranks, yield the group as rank 0 sees it, and end them.

    A second Ctrl-C kills them, so that nobody waits for a stopped one. `say` is told of silent ones.
    """
    if size == 1:
        yield Ranks()
        return
    with tempfile.TemporaryDirectory(prefix="cfedavg-ranks-") as path, ExitStack() as stack:
        folder, processes = Path(path), list[BaseProcess]()
        stack.push(lambda error, *_: _end(processes, 5.0 if error is None else 0.0))
        stack.enter_context(watch_second_stop(lambda _: _kill(processes)))
        job = _pack(config, task, messages)
        for rank in range(1, size):
            with nullcontext() if task else _no_script():
                _start(processes, rank, size, folder, job)
        stack.enter_context(_name_silent(processes, folder, say))
        try:
            _await(processes, folder)
            ranks = _join(0, size, folder)
            stack.callback(ranks.close)  # first of all: whoever still listens then knows that it is over
            yield ranks
        except RankLost as error:
            raise _name_lost(error, processes) from None


def _pack(*job: Any) -> bytes:
    """Pickle by value: multiprocessing would keep a file open for every tensor, so for every client."""
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"`workers`: the task cannot be sent to another process ({error})") from None


def _start(processes: list[BaseProcess], rank: int, size: int, folder: Path, job: bytes) -> None:
    """Start a worker and add it to the list, uninterrupted: an interrupt must find it to end it."""
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(os.getpid(), rank, size, folder, job), daemon=True, name=f"rank {rank}"
    )
    # Python would look for the modules of a new process in the current folder before it looks elsewhere.
    with _variable("PYTHONSAFEPATH", "1"), _interrupts_held():
        process.start()
        processes.append(process)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment inside `with`."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _no_script() -> Iterator[None]:
    """Keep processes started inside `with` from running the user's script again.

    A script that calls `run` at its top level would start processes without end.
    """
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay signals for this process; block them for one that is started inside `with` (see `_work`)."""
    with defer_stops():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            resource_tracker.ensure_running()  # lets some through again
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _name_silent(processes: list[BaseProcess], folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Inside `with`, name a worker that shows no sign of life, and say when it is back."""
    over = threading.Event()
    listener = threading.Thread(target=_listen, args=(processes, folder, say, over), daemon=True)
    listener.start()
    try:
        yield
    finally:
        over.set()
        listener.join()


def _listen(
    processes: list[BaseProcess], folder: Path, say: Callable[[str], None], over: threading.Event
) -> None:
    """Watch the signs of life. Count beats, not time: a laptop that slept makes nobody silent."""
    pulses, missed = dict[str, float](), dict[str, int]()
    limit = SILENCE / PULSE
    while not over.wait(PULSE):
        for process in processes:
            name, who = process.name, f"{process.name} (process {process.pid})"
            pulse = 0.0  # until the worker has written its file
            with suppress(OSError):
                pulse = (folder / f"pulse of {name}").stat().st_mtime
            beats = missed.get(name, 0)
            missed[name] = beats + 1 if pulse == pulses.get(name, 0.0) else 0
            pulses[name] = pulse
            if beats < limit <= missed[name]:
                say(f"{who} has been silent for {SILENCE:g} s: stopped, or hung? Ctrl-C twice ends the run")
            elif beats >= limit and not missed[name]:
                say(f"{who} is there again, after {beats * PULSE:g} s")


def _await(processes: list[BaseProcess], folder: Path) -> None:
    """Wait until all are about to join. Joining cannot be interrupted, this can."""
    while not all((folder / process.name).exists() for process in processes):
        if any(process.exitcode is not None for process in processes):
            if (problem := folder / "problem").exists():
                raise InputError(
                    f"`workers`: another process cannot read the task ({problem.read_text()}): "
                    "define its classes and functions in a module that can be imported"
                )
            raise RankLost("a process that did not start")
        time.sleep(0.01)


def _join(rank: int, size: int, folder: Path) -> Ranks:
    """Join the group on this machine, which nobody outside can reach."""
    with _variable("GLOO_SOCKET_IFNAME", "lo"):
        return Ranks(rank, size, FileStore(str(folder / "store"), size))


def _work(parent: int, rank: int, size: int, folder: Path, job: bytes) -> None:
    """Serve rank 0 in another process until rank 0 ends it or is gone."""
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)  # rank 0 gets it too, and decides
    pulse = folder / f"pulse of rank {rank}"
    threading.Thread(target=_watch, args=(parent, pulse), daemon=True).start()
    torch.set_num_threads(1)
    try:
        config, task, messages = pickle.loads(job)
    except Exception as error:
        write_atomic(folder / "problem", str(error).encode())
        os._exit(FOLLOWED)
    try:
        (folder / f"rank {rank}").touch()
        serve(config, task, _join(rank, size, folder), messages)
    except InputError:
        os._exit(FOLLOWED)  # rank 0 reports it: a rank is lost, or it has the same error
    leave(0)


def _watch(parent: int, pulse: Path) -> None:
    """Show that this process lives, and end it after its parent."""
    while os.getppid() == parent:
        with suppress(OSError):
            pulse.touch()
        time.sleep(PULSE)
    os._exit(1)


def serve(
    config: Config, task: Task | None, ranks: Ranks, messages: Path | None
) -> tuple[BlockEngine, State]:
    """Run a rank other than 0 from its start to its end; return its engine and last state."""
    if task is None:
        from cfedavg.data.tasks import build_task

        task = build_task(config)
    engine = choose_engine(config, Plan(config, task), task, messages, ranks)
    assert isinstance(engine, BlockEngine)
    try:
        return engine, engine.serve()
    finally:
        ranks.close()


def _name_lost(error: RankLost, processes: list[BaseProcess]) -> RankLost:
    """Return an error that says which rank was lost, and how to go on."""
    until = time.monotonic() + KNOWN
    while not (gone := [p for p in processes if p.exitcode not in (None, FOLLOWED)]):
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    who = ", ".join(f"{p.name} (process {p.pid}, exit status {p.exitcode})" for p in gone) or str(error)
    return RankLost(
        f"lost {who}: the run stops. What was done up to the last checkpoint is kept; "
        "set `resume` to go on from there, with any number of `workers`"
    )


def _end(processes: list[BaseProcess], patience: float) -> None:
    """Wait some seconds for the workers to end, then kill the rest."""
    until = time.monotonic() + patience
    with defer_stops():
        for process in processes:
            process.join(max(0.1, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
