"""Several processes for one run: started by this module on one machine, or by torchrun on many machines."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from cfedavg.core.config import PARTS, Config
from cfedavg.core.errors import InputError
from cfedavg.core.files import write_atomic
from cfedavg.core.interrupts import defer_stops, leave, watch_second_stop
from cfedavg.core.system import STOPS, block_stops, count_cores, unblock_stops
from cfedavg.optimise.local import SGD
from cfedavg.simulate import engines
from cfedavg.simulate.engines import BlockEngine, RankLost, Ranks, choose_device, choose_engine
from cfedavg.simulate.local import after, batches, local_steps, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import State
from cfedavg.task import Task
from cfedavg.wire import needs_compiling

WORTH = 20.0  # if a run takes more seconds than this on one core, more processes are started unasked
MOST = 8  # at most so many processes are started unasked
KNOWN = 10.0  # seconds to wait for the exit status of a process after its connection is lost
PULSE = 1.0  # seconds between two signs of life of a worker
# Seconds without a sign of life after which the user is told of a worker. A worker gives signs of life from a
# thread of its own, also while it computes. So a silent worker is stopped, hung, or on a very busy machine.
SILENCE = 30.0
FOLLOWED = 75  # exit status of a worker that ends because another process has ended
T = TypeVar("T")


def choose_size(config: Config, plan: Plan, task: Task, *, own: bool) -> int:
    """Return the number of processes of a run: `workers` if set, else one for each core if that is faster.

    A task made in Python (`own`), or a class of the user's script, stays in the process that made it, unless
    `workers` is set.
    """
    if config.workers > 1 and config.engine == "reference":
        raise InputError(
            "the engine `reference` runs in one process: leave out `workers`, or take another engine"
        )
    if config.workers > 1 and sys.platform == "win32":
        raise InputError(
            f"`workers` must be left out on Windows, where a run has one process, got {config.workers}"
        )
    if config.workers:
        return config.workers
    cores = min(count_cores(), plan.clients_per_round, MOST)
    own |= bool(_list_script_names(config))
    alone = own or cores < 2 or sys.platform == "win32" or config.engine in ("reference", "batched")
    if alone or choose_device(config.device).type != "cpu":
        return 1
    if config.engine == "auto" and engines.is_small(task.model):
        return 1
    steps = plan.steps.mean * plan.clients_per_round * config.rounds
    return cores if _seconds_a_step(config, task) * steps > WORTH else 1


def _list_script_names(config: Config) -> list[str]:
    """Return the names of the classes and functions of the user's script that a configuration names."""
    texts = (str(getattr(config, field)) for field in PARTS)
    return [name for text in texts for name in re.findall(r"\b__main__:(\w+)", text)]


def _seconds_a_step(config: Config, task: Task) -> float:
    """Return the seconds of a local step: run two and time the second, because the first is slower."""
    model, cpu = copy.deepcopy(task.model), torch.device("cpu")
    data = list(islice(batches(task.clients[0], config.batch_size, 0, 0, 0), 2))
    seconds = 0.0
    for batch in data:
        began = time.perf_counter()
        local_steps(model, task.loss, [to_device(batch, cpu, torch.float32)], SGD(), 0.0, after(1))
        seconds = time.perf_counter() - began
    return seconds


@contextmanager
def compile_coders_beside() -> Iterator[None]:
    """Inside `with`, another process compiles the message coders, if their machine code is not on disk.

    The process fills the cache on disk while this process prepares the run. A coder that is needed earlier is
    compiled in this process too.
    """
    if not needs_compiling():
        yield
        return
    code = "from cfedavg.wire import compile_coders; compile_coders()"
    # -P: modules of the current folder must not take the place of installed ones.
    command, nothing = [sys.executable, "-P", "-c", code], subprocess.DEVNULL
    try:
        process = subprocess.Popen(
            command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )
    except (OSError, TypeError):  # Python is embedded, or the system starts no process: this one compiles
        yield
        return
    try:
        yield
    finally:
        process.kill()
        process.wait()


def join_torchrun(config: Config, task: Task, messages: Path | None) -> Ranks | None:
    """Join and return torchrun's group of ranks; return None outside torchrun.

    Raise InputError if options or data differ between the ranks.
    """
    ranks = Ranks.from_environment()
    if ranks is None:
        return None
    try:
        own = engines.describe_run(config, task) | {"`messages`": "given" if messages else "none"}
        engines.check_same(ranks, own)
        if config.workers > 1:
            raise InputError("`workers` must be left out under torchrun, which sets the number of processes")
    except InputError:
        ranks.close()
        raise
    return ranks


@contextmanager
def start_workers(
    config: Config, task: Task, messages: Path | None, say: Callable[[str], None], *, own: bool
) -> Iterator[Ranks]:
    """Start worker processes, the other ranks; yield the group of ranks as rank 0 sees it; end the workers.

    A second Ctrl-C kills the workers, so that rank 0 does not wait for a stopped worker. `say` gets sentences
    about silent workers. A task made in Python (`own`) is sent to the workers; otherwise each worker
    builds the task from `config`.
    """
    size = choose_size(config, Plan(config, task), task, own=own)
    if size == 1:
        yield Ranks()
        return
    try:  # pickled by value: multiprocessing would keep a file open for every client's tensors
        job = pickle.dumps((config, task if own else None, messages))
    except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"`workers`: the task cannot be sent to another process ({error}); leave out `workers`"
        ) from None
    with tempfile.TemporaryDirectory(prefix="cfedavg-ranks-") as path, ExitStack() as stack:
        folder, processes = Path(path), list[BaseProcess]()
        stack.push(lambda error, *_: _end(processes, 5.0 if error is None else 0.0))
        stack.enter_context(watch_second_stop(lambda _: _kill(processes)))
        # A worker must not run the user's script again: a script that calls `run` at its top level would
        # start processes without end. A worker needs the script only for a task or a class made there.
        needs_script = own or _list_script_names(config)
        script = sys.modules["__main__"] if needs_script else ModuleType("__main__")
        for rank in range(1, size):
            with _entry(sys.modules, "__main__", script):
                _start(processes, rank, size, folder, job)
        over = threading.Event()
        listener = threading.Thread(target=_listen, args=(processes, folder, say, over), daemon=True)
        listener.start()
        stack.callback(listener.join)
        stack.callback(over.set)
        try:
            _await(processes, folder)
            ranks = _join(0, size, folder)
            stack.callback(ranks.close)  # at the end this runs first: a rank that still listens then ends
            yield ranks
        except RankLost as error:
            raise _name_lost(error, processes) from None


def _start(processes: list[BaseProcess], rank: int, size: int, folder: Path, job: bytes) -> None:
    """Start a worker and add it to `processes`.

    Delay interrupts meanwhile: an interrupt ends the workers in `processes`, and would miss the new one.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(os.getpid(), rank, size, folder, job), daemon=True, name=f"rank {rank}"
    )
    # Without this variable, a new process would import modules from the current folder first.
    with _entry(os.environ, "PYTHONSAFEPATH", "1"), defer_stops():
        before = block_stops()  # a new process inherits it (see `_work`)
        try:
            resource_tracker.ensure_running()  # unblocks some signals
            block_stops()
            process.start()
            processes.append(process)
        finally:
            unblock_stops(before)


@contextmanager
def _entry(table: MutableMapping[str, T], name: str, value: T) -> Iterator[None]:
    """Set an entry of `table` inside `with`, and restore the old entry afterwards."""
    before = table.get(name)
    table[name] = value
    try:
        yield
    finally:
        if before is None:
            del table[name]
        else:
            table[name] = before


def _listen(
    processes: list[BaseProcess], folder: Path, say: Callable[[str], None], over: threading.Event
) -> None:
    """Tell the user when a worker shows no sign of life, and when the worker is back.

    Silence is counted in checks, not in seconds: otherwise all workers would seem silent after a laptop's
    sleep.
    """
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
    """Wait until all workers are about to join the group: this wait can be interrupted, joining cannot."""
    while not all((folder / process.name).exists() for process in processes):
        if any(process.exitcode is not None for process in processes):
            if (problem := folder / "problem").exists():
                raise InputError(
                    "`workers`: another process cannot read the task or the configuration "
                    f"({problem.read_bytes().decode()}): define their classes and functions in a module that "
                    "can be imported"
                )
            raise RankLost("a process of the run did not start")
        time.sleep(0.01)


def _join(rank: int, size: int, folder: Path) -> Ranks:
    """Join the group of ranks on this machine; no other machine can reach the group."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with _entry(os.environ, "GLOO_SOCKET_IFNAME", loopback):
        return Ranks(rank, size, FileStore(str(folder / "store"), size))


def _work(parent: int, rank: int, size: int, folder: Path, job: bytes) -> None:
    """Serve rank 0 in this worker process until rank 0 ends the worker or is gone."""
    for stop in STOPS:
        signal.signal(stop, signal.SIG_IGN)  # rank 0 gets the signal too, and decides whether to stop
    pulse = folder / f"pulse of rank {rank}"
    threading.Thread(target=_watch, args=(parent, pulse), daemon=True).start()
    torch.set_num_threads(1)
    try:
        config, task, messages = pickle.loads(job)
        for name in _list_script_names(config):
            getattr(sys.modules["__main__"], name)
    except Exception as error:
        write_atomic(folder / "problem", str(error).encode())
        os._exit(FOLLOWED)
    try:
        (folder / f"rank {rank}").touch()
        serve(config, task, _join(rank, size, folder), messages)
    except InputError:
        os._exit(FOLLOWED)  # rank 0 reports the error: rank 0 has lost a rank, or has the same error
    leave(0)


def _watch(parent: int, pulse: Path) -> None:
    """Touch the file `pulse` again and again, as a sign of life; end this process when its parent ends."""
    while os.getppid() == parent:
        with suppress(OSError):
            pulse.touch()
        time.sleep(PULSE)
    os._exit(1)


def serve(
    config: Config, task: Task | None, ranks: Ranks, messages: Path | None
) -> tuple[BlockEngine, State]:
    """Run a rank other than 0 until rank 0 ends it; return the rank's engine and last state."""
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
    """Return an error that says which rank was lost, and how to continue the run."""
    until = time.monotonic() + KNOWN
    while not (gone := [p for p in processes if p.exitcode not in (None, FOLLOWED)]):
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    who = ", ".join(f"{p.name} (process {p.pid}, exit status {p.exitcode})" for p in gone)
    return RankLost(
        f"{f'lost {who}' if gone else error}: the run stops. "
        "What was done up to the last checkpoint is kept; "
        "set `resume` to go on from there, with any number of `workers`"
    )


def _end(processes: list[BaseProcess], patience: float) -> None:
    """Wait at most `patience` seconds for the workers to end, then kill the rest."""
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
