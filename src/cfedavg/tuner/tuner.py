"""`tune`: choose compressors, local work and rates for a budget, by a search within a stated time."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cfedavg.callbacks.notebook import is_watched
from cfedavg.callbacks.progress import Board, make_console
from cfedavg.core.config import Config, read_config
from cfedavg.core.errors import InputError, show
from cfedavg.core.files import exists, lock_folder, make_folder, write_atomic
from cfedavg.core.run_files import CONFIG, METRICS, check_same
from cfedavg.report import check_drawing
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.workers import compile_coders_beside
from cfedavg.task import Task
from cfedavg.tuner.budget import Budget
from cfedavg.tuner.holdout import hold_out
from cfedavg.tuner.record import NAME, Record
from cfedavg.tuner.result import Tuned
from cfedavg.tuner.search import Search
from cfedavg.tuner.space import check_kept, list_dimensions

MINUTES = 10.0  # of a search, if nothing else is said


def tune(
    config: Config,
    task: Task | None = None,
    *,
    budget: str | None = None,
    minutes: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    keep: Sequence[str] | None = None,
    validation: Any = None,
    progress: bool | None = None,
) -> Tuned:
    """Choose the compressors, the local work and the rates with which a budget buys the most.

    `config` is the default: the search starts from it, keeps it as a candidate to the end, and returns it if
    nothing beats it. `budget` is what the whole training may spend: bytes of all clients in both directions,
    first downloads included ("10MB"), or simulated time ("30min"; `config` then has a `link`). The search
    takes about `minutes` or less, by default 10. Fields in `keep` stay as they are.

    Candidates are compared on samples held out of the clients' data, a tenth of each client's, or on
    `validation` if it is given; the test set is not used. With `out`, the search is written to that folder;
    with `resume`, the search in that folder goes on: with `minutes` for so many more minutes, otherwise for
    the time that it has left. `progress` is that of `run`.
    """
    if progress not in (None, True, False):
        raise InputError(f"tune: `progress` must be True, False or None, got {show(progress)}")
    board = Board(make_console()) if (is_watched() if progress is None else progress) else None
    return tune_with(
        board, config, task, budget=budget, minutes=minutes, out=out, resume=resume, keep=keep,
        validation=validation,
    )  # fmt: skip


def tune_with(
    board: Board | None,
    config: Config,
    task: Task | None,
    *,
    budget: str | None,
    minutes: float | None,
    out: str | Path | None,
    resume: bool,
    keep: Sequence[str] | None,
    validation: Any = None,
) -> Tuned:
    """Do what `tune` does, and show the progress on `board`."""
    began = time.monotonic()
    _check_arguments(config, task, out, resume, minutes, keep)
    asked = None if budget is None else Budget.parse(budget)
    check_drawing()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        known = Record.read(folder) if resume and exists(folder / NAME) else None
        record = _continue(known, asked, minutes, keep, folder) if known else _new(asked, minutes, keep)
        config, task, stored = _prepare(config, task)
        _check_search(config, task, record)
        stack.enter_context(_open(folder, stored, known))
        stack.enter_context(compile_coders_beside())
        search = Search(config, hold_out(task, config.seed, validation), folder, record, began, board)
        tuned = search.run()
        tuned.write(folder, stored.replace(**tuned.chosen.changes, rounds=tuned.config.rounds))
    return dataclasses.replace(tuned, path=None if out is None else folder)


def _check_arguments(
    config: object, task: object, out: object, resume: object, minutes: object, keep: Any
) -> None:
    if not isinstance(config, Config):
        raise InputError(f"tune: `config` must be a Config, got {type(config).__name__}")
    if task is not None and not isinstance(task, Task):
        raise InputError(f"tune: `task` must be a Task, got {type(task).__name__}")
    if out is not None and not isinstance(out, str | Path):
        raise InputError(f"tune: `out` must be the path of a folder, got {show(out)}")
    if not isinstance(resume, bool):
        raise InputError(f"tune: `resume` must be True or False, got {show(resume)}")
    if resume and out is None:
        raise InputError("tune: `resume` needs `out`, the folder of the search to continue")
    is_number = isinstance(minutes, int | float) and not isinstance(minutes, bool) and 0 < minutes < math.inf
    if minutes is not None and not is_number:
        raise InputError(f"`minutes` must be a number above 0, got {show(minutes)}")
    if keep is not None:
        check_kept(keep)


def _new(budget: Budget | None, minutes: float | None, keep: Sequence[str] | None) -> Record:
    if budget is None:
        raise InputError("a search needs a `budget`: bytes such as 10MB, or simulated time such as 30min")
    return Record(budget, MINUTES if minutes is None else minutes, sorted(keep or ()))


def _continue(
    known: Record, budget: Budget | None, minutes: float | None, keep: Sequence[str] | None, folder: Path
) -> Record:
    """Return the record of a search that goes on; raise InputError if it is asked for another search."""
    known.check_same(budget, None if keep is None else sorted(keep), folder)
    return known if minutes is None else dataclasses.replace(known, minutes=known.seconds / 60 + minutes)


def _prepare(config: Config, task: Task | None) -> tuple[Config, Task, Config]:
    """Return the configuration, the task, and the configuration that is written into the folder.

    A task from Python has no name that a file could hold: there, data and model become remarks.
    """
    if task is not None:
        config = dataclasses.replace(config, clients=len(task.clients))
        kind = type(task.model).__name__
        return config, task, config.for_task(task.name, kind, task.prints, len(task.clients))
    from cfedavg.data.tasks import build_task  # imports packages that only named data sets need

    task = build_task(config)
    config = config.with_clients(len(task.clients))
    return config, task, config


def _check_search(config: Config, task: Task, record: Record) -> None:
    """Raise InputError if the configuration is invalid for the task, or cannot be tuned."""
    Plan(config, task)
    record.budget.check(config)
    list_dimensions(config, record.keep)
    if config.deadline is not None and config.steps_per_second is None:
        raise InputError("`deadline` needs `steps_per_second`, the speed of the simulated clients")


@contextmanager
def _open(folder: Path, stored: Config, known: Record | None) -> Iterator[None]:
    """Make the folder of a search, and lock it during the `with` block."""
    for name, what in ((NAME, "a search"), (METRICS, "a run")):
        if exists(folder / name) and not known:
            hint = "set `resume` or choose another folder" if name == NAME else "choose another folder"
            raise InputError(f"`out`: {folder} holds {what} already; {hint}")
    if known:
        check_same(read_config(folder / CONFIG), stored, folder)
    make_folder(folder, "`out`")
    with lock_folder(folder, f"`out`: another search is writing to {folder} right now"):
        write_atomic(folder / CONFIG, stored.to_toml().encode())
        yield
