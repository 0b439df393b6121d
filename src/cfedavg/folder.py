"""A run's folder: config.toml, metrics.jsonl, a checkpoint, and residuals that live on disk.

They are in step with each other whatever happens.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path

from cfedavg.config import OWN, Config, flag, read_config
from cfedavg.errors import CannotResume, InputError
from cfedavg.files import locked, make_folder, sync, write_atomic
from cfedavg.metrics import Record
from cfedavg.residuals import InMemory, OnDisk, sweep
from cfedavg.state import State, load, save

CONFIG, METRICS, CHECKPOINT = "config.toml", "metrics.jsonl", "checkpoint.safetensors"
MODEL = "model.safetensors"  # at the end
RESIDUALS = "residuals"
FEDERATION = "federation.txt"  # only a real one has it: its name, by which clients know it

# What may change when a run goes on; everything else decides the result.
MAY_CHANGE = {"data_dir", "rounds", "device", "checkpoint_every", "residuals", "workers"}


class Folder:
    """Rows are appended as rounds end; a checkpoint vouches for the rows before it, and only for those.

    One run at a time writes to a folder: it holds a lock for as long as the `with` lasts.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.residuals = path, path / RESIDUALS
        self._lock = ExitStack()

    def __enter__(self) -> Folder:
        make_folder(self.path, "--out")
        self._lock.enter_context(locked(self.path, f"--out: another run is writing to {self.path} right now"))
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def begin(
        self, config: Config, identity: int, start: State, *, resume: bool
    ) -> tuple[State, list[Record]]:
        """Where to start from: the last checkpoint if there is one to resume, else `start` with no rows."""
        begun = (self.path / CHECKPOINT).exists() or bool(read_rows(self.path / METRICS))
        if (self.path / FEDERATION).exists():
            raise InputError(f"--out: {self.path} holds a federation: choose another folder for a simulation")
        if begun and not resume:
            raise InputError(f"--out: {self.path} holds a run already; add --resume or choose another folder")
        state, rows = start, list[Record]()
        if begun:
            if not (self.path / CONFIG).exists():
                raise CannotResume(f"{self.path / CONFIG} is missing, so the run cannot go on")
            old = _config_of(self.path)
            check_same(old, config, self.path)
            self._check_checkpoint(old)
        if begun and (self.path / CHECKPOINT).exists():
            state, rows = self._restore(identity, start)
            if state.t > config.rounds:
                raise InputError(
                    f"--resume: --rounds is {config.rounds}, but the run in {self.path} has done {state.t}"
                )
        # Nothing was changed up to here, so that a refused resume leaves everything as it was.
        sweep(self.residuals, state.residuals)
        residuals = start.residuals.adopted(state.residuals, start.x)
        write_atomic(self.path / CONFIG, config.to_toml().encode())
        self.rewrite(rows)
        return dataclasses.replace(state, residuals=residuals), rows

    def _check_checkpoint(self, config: Config) -> None:
        """A run that has got far enough has one; started again, it would lose what it has."""
        done, every = len(read_rows(self.path / METRICS)), config.checkpoint_every
        far = (self.path / MODEL).exists() or 0 < every < done
        if far and not (self.path / CHECKPOINT).exists():
            raise CannotResume(
                f"{self.path / CHECKPOINT} is missing, so the run of {done} rounds cannot go on; "
                "choose another folder to start again"
            )

    def _restore(self, identity: int, like: State) -> tuple[State, list[Record]]:
        """The last checkpoint and the rows before it; later rows go, since their rounds run again."""
        state = load(self.path / CHECKPOINT, identity, like, self.residuals)
        if isinstance(state.residuals, OnDisk):
            state.residuals.check()
        rows = read_rows(self.path / METRICS)[: state.t]
        if [row.get("round") for row in rows] != list(range(state.t)):
            raise CannotResume(
                f"{self.path / METRICS} does not hold rounds 0 to {state.t - 1}, "
                "which the checkpoint needs; start again"
            )
        return state, rows

    def append(self, row: Record) -> None:
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(as_line(row))
        except OSError as error:
            raise InputError(f"--out: cannot write {self.path / METRICS} ({error.strerror})") from None

    def rewrite(self, rows: list[Record]) -> None:
        write_atomic(self.path / METRICS, "".join(map(as_line, rows)).encode())

    def checkpoint(self, state: State, identity: int) -> None:
        # The rows and residuals first, then the checkpoint that vouches for them.
        try:
            sync(self.path / METRICS)
        except OSError as error:
            raise InputError(f"--out: cannot write {self.path / METRICS} ({error.strerror})") from None
        state.residuals.flush()
        save(state, self.path / CHECKPOINT, identity)
        state.residuals.settled()
        if isinstance(state.residuals, InMemory):
            sweep(self.residuals, state.residuals)  # of a run that was on disk until its last checkpoint


def read_rows(path: Path) -> list[Record]:
    """The rows of a metrics file up to the first that is not whole."""
    rows: list[Record] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def as_line(row: Record) -> str:
    """A row as it stands in the file: JSON proper, which has no NaN."""
    return json.dumps(row, allow_nan=False) + "\n"


def _config_of(path: Path) -> Config:
    try:
        return read_config(path / CONFIG)
    except InputError as error:
        raise CannotResume(str(error)) from None


def check_same(old: Config, new: Config, path: Path) -> None:
    """Whether a run of one configuration may go on with another."""
    if old.dataset == f"{OWN})":  # written before tasks had fingerprints
        unsaid = [item.name for item in dataclasses.fields(Config) if not new.says(item.name)]
        old = dataclasses.replace(old, **{name: getattr(new, name) for name in ("dataset", "model", *unsaid)})
    for item in dataclasses.fields(Config):
        before, now = getattr(old, item.name), getattr(new, item.name)
        if before == now or (item.name in MAY_CHANGE and not _horizon(item.name, new)):
            continue
        if item.name in ("dataset", "model") and not (old.is_named and new.is_named):
            raise InputError(
                f"--resume: the run in {path} has another task: its {item.name} is {_said(before)}, "
                f"not {_said(now)}; give the task it was made with, or start another run"
            )
        raise InputError(
            f"--resume: {flag(item.name)} is {_said(now)}, but the run in {path} has {_said(before)}; "
            "leave it out or start another run"
        )


def _said(value: object) -> str:
    return "none" if value is None else repr(value)


def _horizon(name: str, config: Config) -> bool:
    """Whether the number of rounds decides the learning rate."""
    return name == "rounds" and config.schedule.strip().startswith(("corollary1", "corollary3"))
