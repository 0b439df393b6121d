"""Several processes for one run: started here on one machine, or by torchrun on many."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from cfedavg.config import Config
from cfedavg.engines import BlockEngine, Ranks, choose_device, choose_engine
from cfedavg.engines.choice import SMALL
from cfedavg.engines.ranks import RankLost
from cfedavg.errors import InputError
from cfedavg.layout import Layout
from cfedavg.local import after, batches, local_sgd, to_device
from cfedavg.plan import Plan
from cfedavg.state import State
from cfedavg.task import Task

WORTH = 20.0  # seconds that a run must take on one core before more processes are started by themselves
MOST = 8  # of them


def number(config: Config, plan: Plan, task: Task, *, own: bool) -> int:
    """How many processes a run gets: as many as asked for, else one for each core if it pays.

    A task made in Python (`own`) stays in the process that made it unless workers are asked for.
    """
    if config.workers:
        return config.workers
    cores = min(len(os.sched_getaffinity(0)), plan.clients_per_round, MOST)
    alone = own or cores < 2 or config.engine in ("reference", "batched")
    if alone or choose_device(config.device).type != "cpu":
        return 1
    if config.engine == "auto" and Layout.of(task.model).d <= SMALL:
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
        local_sgd(model, task.loss, [to_device(batch, cpu, torch.float32)], 0.0, after(1))
        seconds = time.perf_counter() - began
    return seconds


@contextmanager
def team(config: Config, task: Task | None, size: int, messages: Path | None) -> Iterator[Ranks]:
    """The ranks of a run as rank 0 sees them; the others are started, and ended, here."""
    if size == 1:
        yield Ranks()
        return
    with tempfile.TemporaryDirectory(prefix="cfedavg-ranks-") as folder:
        store = str(Path(folder) / "store")
        processes = [_start(rank, size, store, config, task, messages) for rank in range(1, size)]
        try:
            yield _joined(0, size, store)
        except RankLost as error:
            raise _named(error, processes) from None
        finally:
            _end(processes)


def _start(
    rank: int, size: int, store: str, config: Config, task: Task | None, messages: Path | None
) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(
        target=_work, args=(rank, size, store, config, task, messages), daemon=True, name=f"rank {rank}"
    )
    try:
        process.start()
    except (AttributeError, TypeError, ValueError) as error:  # what pickle raises, and more
        raise InputError(f"--workers: the task cannot be sent to another process ({error})") from None
    return process


def _joined(rank: int, size: int, store: str) -> Ranks:
    """Member of a group on this machine, which nobody outside can reach."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return Ranks(rank, size, FileStore(store, size))


def _work(rank: int, size: int, store: str, config: Config, task: Task | None, messages: Path | None) -> None:
    """A process other than the first: serves rank 0 until it is sent home, or until rank 0 is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it, and decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    try:
        serve(config, task, _joined(rank, size, store), messages)
    except RankLost:
        os._exit(1)  # rank 0 has said what there is to say


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
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
    time.sleep(0.5)  # its end may be known a moment later than its silence
    gone = [p for p in processes if p.exitcode is not None]
    who = ", ".join(f"{p.name} (process {p.pid}, exit status {p.exitcode})" for p in gone) or str(error)
    return RankLost(
        f"lost {who}: the run stops. What was done up to the last checkpoint is kept; "
        "add --resume to go on from there, with any number of --workers"
    )


def _end(processes: list[BaseProcess]) -> None:
    """Waits a while for those that were sent home; the others are ended."""
    until = time.monotonic() + 5
    for process in processes:
        process.join(max(0.1, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
