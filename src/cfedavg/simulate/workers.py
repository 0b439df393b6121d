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
from cfedavg.simulate.engines import BlockEngine, Ranks, choose_device, choose_engine
from cfedavg.simulate.engines.choice import is_small
from cfedavg.simulate.engines.ranks import RankLost
from cfedavg.simulate.local import after, batches, local_steps, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import State
from cfedavg.task import Task

WORTH = 20.0  # seconds that a run must take on one core before more processes are started by themselves
MOST = 8  # of them
KNOWN = 10.0  # seconds within which the end of a process is known, once its connection is lost
PULSE = 1.0  # seconds between two signs of life of a worker
# Seconds without a sign of life after which a worker is named. It gives them from a thread of its own while
# it computes, so that only a stopped or hung process is silent for so long, or a very busy machine.
SILENCE = 30.0
FOLLOWED = 75  # exit status of a worker that ends since another process has ended


def number(config: Config, plan: Plan, task: Task, *, own: bool) -> int:
    """How many processes a run gets: as many as asked for, else one for each core if it pays.

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
    if config.engine == "auto" and is_small(task.model):
        return 1
    steps = plan.steps.mean * plan.clients_per_round * config.rounds
    return cores if _seconds_a_step(config, task) * steps > WORTH else 1


def _seconds_a_step(config: Config, task: Task) -> float:
    """Of the second of two steps, which is as long as all the others."""
    model, cpu = copy.deepcopy(task.model), torch.device("cpu")
    data = list(islice(batches(task.clients[0], config.batch_size, 0, 0, 0), 2))
    seconds = 0.0
    for batch in data:
        began = time.perf_counter()
        local_steps(model, task.loss, [to_device(batch, cpu, torch.float32)], SGD(), 0.0, after(1))
        seconds = time.perf_counter() - began
    return seconds


@contextmanager
def team(
    config: Config, task: Task | None, size: int, messages: Path | None, say: Callable[[str], None]
) -> Iterator[Ranks]:
    """The ranks of a run as rank 0 sees them; the others are started, and ended, here.

    A second Ctrl-C kills them, so that nobody waits for one that is stopped. `say` hears of silent ones.
    """
    if size == 1:
        yield Ranks()
        return
    with tempfile.TemporaryDirectory(prefix="cfedavg-ranks-") as path, ExitStack() as stack:
        folder, processes = Path(path), list[BaseProcess]()
        stack.push(lambda error, *_: _end(processes, 5.0 if error is None else 0.0))
        stack.enter_context(watch_second_stop(lambda number: _kill(processes)))
        job = _packed(config, task, messages)
        for rank in range(1, size):
            with nullcontext() if task else _no_script():
                _start(processes, rank, size, folder, job)
        stack.enter_context(_silence_named(processes, folder, say))
        try:
            _await(processes, folder)
            ranks = _joined(0, size, folder)
            stack.callback(ranks.close)  # first of all: whoever still listens then knows that it is over
            yield ranks
        except RankLost as error:
            raise _named(error, processes) from None


def _packed(*job: Any) -> bytes:
    """By value: multiprocessing itself would keep a file open for every tensor, and so for every client."""
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"`workers`: the task cannot be sent to another process ({error})") from None


def _start(processes: list[BaseProcess], rank: int, size: int, folder: Path, job: bytes) -> None:
    """Starts a worker and adds it to the others, both or neither: an interrupt must find it to end it."""
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(os.getpid(), rank, size, folder, job), daemon=True, name=f"rank {rank}"
    )
    # Python would look for the modules of a new process in the current folder before it looks elsewhere.
    with _variable("PYTHONSAFEPATH", "1"), _interrupts_held():
        process.start()
        processes.append(process)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment meanwhile."""
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
    """What is started meanwhile does not run the user's script again, as it would to find a class of it.

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
    """Signals come later for this process, and never for one that is started meanwhile: see `_work`."""
    with defer_stops():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            resource_tracker.ensure_running()  # lets some through again
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _silence_named(processes: list[BaseProcess], folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Within it, a worker that shows no sign of life is named, and again when it does."""
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
    """Counts beats, not time: a laptop that slept, or Ctrl-Z, makes nobody silent."""
    pulses, missed = dict[str, float](), dict[str, int]()
    limit = SILENCE / PULSE
    while not over.wait(PULSE):
        for process in processes:
            name, who = process.name, f"{process.name} (process {process.pid})"
            pulse = _modified(folder / f"pulse of {name}")
            beats = missed.get(name, 0)
            missed[name] = beats + 1 if pulse == pulses.get(name, 0.0) else 0
            pulses[name] = pulse
            if beats < limit <= missed[name]:
                say(f"{who} has been silent for {SILENCE:g} s: stopped, or hung? Ctrl-C twice ends the run")
            elif beats >= limit and not missed[name]:
                say(f"{who} is there again, after {beats * PULSE:g} s")


def _modified(path: Path) -> float:
    """When a file was written last; 0 if it is not there yet."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _await(processes: list[BaseProcess], folder: Path) -> None:
    """Waits until all are about to join. Joining itself cannot be broken off, this can."""
    while not all((folder / process.name).exists() for process in processes):
        if any(process.exitcode is not None for process in processes):
            if (problem := folder / "problem").exists():
                raise InputError(
                    f"`workers`: another process cannot read the task ({problem.read_text()}): "
                    "define its classes and functions in a module that can be imported"
                )
            raise RankLost("a process that did not start")
        time.sleep(0.01)


def _joined(rank: int, size: int, folder: Path) -> Ranks:
    """Member of a group on this machine, which nobody outside can reach."""
    with _variable("GLOO_SOCKET_IFNAME", "lo"):
        return Ranks(rank, size, FileStore(str(folder / "store"), size))


def _work(parent: int, rank: int, size: int, folder: Path, job: bytes) -> None:
    """A process other than the first: serves rank 0 until it is sent home, or until rank 0 is gone."""
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)  # whoever sends it to all, rank 0 hears it, and decides
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
        serve(config, task, _joined(rank, size, folder), messages)
    except InputError:
        os._exit(FOLLOWED)  # rank 0 says what there is to say: a rank is lost, or it has the same error
    leave(0)


def _watch(parent: int, pulse: Path) -> None:
    """Shows that this process lives, and ends it after its parent."""
    while os.getppid() == parent:
        with suppress(OSError):
            pulse.touch()
        time.sleep(PULSE)
    os._exit(1)


def serve(
    config: Config, task: Task | None, ranks: Ranks, messages: Path | None
) -> tuple[BlockEngine, State]:
    """A rank other than 0, from its start to its end."""
    if task is None:
        from cfedavg.data.tasks import build_task

        task = build_task(config)
    engine = choose_engine(config, Plan(config, task), task, messages, ranks)
    assert isinstance(engine, BlockEngine)
    try:
        return engine, engine.serve()
    finally:
        ranks.close()


def _named(error: RankLost, processes: list[BaseProcess]) -> RankLost:
    """Says which rank it was, and how the run goes on."""
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
    """Waits some seconds for those that were sent home; the others are ended."""
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
