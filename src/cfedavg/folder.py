"""A run's folder: config.toml, metrics.jsonl, a checkpoint, and residuals that live on disk.

They are in step with each other whatever happens.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cfedavg.config import OPTIONS, OWN, Config, read_config
from cfedavg.errors import CannotResume, InputError
from cfedavg.files import locked, make_folder, read_file, sync, write_atomic
from cfedavg.metrics import Record, is_number
from cfedavg.residuals import InMemory, OnDisk, sweep
from cfedavg.state import State, Vouched, load, save

CONFIG, METRICS, CHECKPOINT = "config.toml", "metrics.jsonl", "checkpoint.safetensors"
MODEL = "model.safetensors"  # at the end: what the clients hold
SERVER_MODEL = "server_model.safetensors"  # the server's own, where the broadcast is compressed
RESIDUALS = "residuals"
FEDERATION = "federation.txt"  # only a real one has it: its name, by which clients know it

CLOCK = "seconds"  # the one column that two equal runs do not share


class Folder:
    """Rows are appended as rounds end; a checkpoint vouches for the rows before it, and only for those.

    One run at a time writes to a folder: it holds a lock for as long as the `with` lasts.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.residuals = path, path / RESIDUALS
        self._lock = ExitStack()
        self._rows, self._options = 0, dict[str, Any]()

    def __enter__(self) -> Folder:
        make_folder(self.path, "`out`")
        self._lock.enter_context(locked(self.path, f"`out`: another run is writing to {self.path} right now"))
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def begin(
        self, config: Config, identity: int, start: State, *, resume: bool
    ) -> tuple[State, list[Record]]:
        """Where to start from: the last checkpoint if there is one to resume, else `start` with no rows."""
        begun = (self.path / CHECKPOINT).exists() or bool(read_rows(self.path / METRICS))
        if (self.path / FEDERATION).exists():
            raise InputError(f"`out`: {self.path} holds a federation: choose another folder for a simulation")
        if begun and not resume:
            raise InputError(f"`out`: {self.path} holds a run already; set `resume` or choose another folder")
        state, rows = start, list[Record]()
        if begun:
            if not (self.path / CONFIG).exists():
                raise CannotResume(f"{self.path / CONFIG} is missing, so the run cannot go on")
            old = _config_of(self.path)
            check_same(old, config, self.path)
            self._check_checkpoint(old)
        if begun and (self.path / CHECKPOINT).exists():
            state, rows = self._restore(config, identity, start)
            if state.t > config.rounds:
                raise InputError(
                    f"cannot resume: `rounds` is {config.rounds}, "
                    f"but the run in {self.path} has done {state.t}"
                )
        # Nothing was changed up to here, so that a refused resume leaves everything as it was.
        sweep(self.residuals, state.residuals)
        residuals = start.residuals.adopted(state.residuals, start.x)
        write_atomic(self.path / CONFIG, config.to_toml().encode())
        self.rewrite(rows)
        self._options = fixed_options(config)
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

    def _restore(self, config: Config, identity: int, like: State) -> tuple[State, list[Record]]:
        """The last checkpoint and the rows before it; later rows go, since their rounds run again."""
        state, vouched = load(self.path / CHECKPOINT, identity, like, self.residuals, config.clients)
        if vouched:
            check_options(vouched.options, config, self.path / CONFIG)
        if isinstance(state.residuals, OnDisk):
            state.residuals.check()
        rows = read_rows(self.path / METRICS)[: state.t]
        if len(rows) != state.t or any(row.get("round") != t for t, row in enumerate(rows)):
            raise CannotResume(
                f"{self.path / METRICS} does not hold rounds 0 to {state.t - 1}, "
                "which the checkpoint needs; start again"
            )
        if not _are_usable(rows) or (vouched and vouched.rows != checksum_of(rows)):
            raise CannotResume(
                f"{self.path / METRICS} was changed after the checkpoint was written; "
                "put it back, or start again in another folder"
            )
        return state, rows

    def append(self, row: Record) -> None:
        try:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(as_line(row))
            self._rows = checksum_of([row], self._rows)
        except OSError as error:
            raise InputError(f"`out`: cannot write {self.path / METRICS} ({error.strerror})") from None

    def rewrite(self, rows: list[Record]) -> None:
        write_atomic(self.path / METRICS, "".join(map(as_line, rows)).encode())
        self._rows = checksum_of(rows)

    def checkpoint(self, state: State, identity: int) -> None:
        # The rows and residuals first, then the checkpoint that vouches for them.
        try:
            sync(self.path / METRICS)
        except OSError as error:
            raise InputError(f"`out`: cannot write {self.path / METRICS} ({error.strerror})") from None
        state.residuals.flush()
        save(state, self.path / CHECKPOINT, identity, Vouched(self._rows, self._options))
        state.residuals.settled()
        if isinstance(state.residuals, InMemory):
            sweep(self.residuals, state.residuals)  # of a run that was on disk until its last checkpoint


def read_rows(path: Path) -> list[Record]:
    """The rows of a metrics file up to the first that is not whole."""
    rows: list[Record] = []
    try:
        lines = read_file(path).decode(errors="replace").split("\n")
    except FileNotFoundError:
        return rows
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from None
    for line in lines:
        try:
            row = json.loads(line, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def _finite(text: str) -> float:
    """JSON proper has no infinity: `as_line` could not write it again."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def _are_usable(rows: list[Record]) -> bool:
    """Whether rows have what the rest of their run will ask for; those of another program may not."""
    try:
        checksum_of(rows)
    except RecursionError:  # lists in lists, as deep as they could just be read
        return False
    return all(map(_is_usable, rows)) and len({tuple(row.get("rate_conditions", ())) for row in rows}) < 2


def _is_usable(row: Record) -> bool:
    conditions = row.get("rate_conditions", {})
    return (
        all(is_number(row.get(name, "")) for name in (*_TOTALS, "snr_min", "alpha"))
        and all(row[name] is not None for name in _TOTALS)
        and is_number(row.get("first_download_bytes"))
        and isinstance(conditions, dict)
        and all(isinstance(each, dict) and _is_condition(each) for each in conditions.values())
    )


_TOTALS = ("uplink_bytes", "downlink_bytes", CLOCK)


def _is_condition(found: Record) -> bool:
    return isinstance(found.get("holds"), bool) and is_number(found.get("ratio", ""))


def checksum_of(rows: list[Record], before: int = 0) -> int:
    """CRC-32 of rows that follow those of checksum `before`, without the clock's readings.

    So two equal runs have the same checkpoint to the byte.
    """
    for row in rows:
        before = zlib.crc32(as_line({**row, CLOCK: 0}).encode(), before)
    return before


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
        old = dataclasses.replace(old, dataset=new.dataset, model=new.model)
    for name, now in fixed_options(new).items():
        if (before := getattr(old, name)) == now:
            continue
        if name in ("dataset", "model") and not (old.is_named and new.is_named):
            raise InputError(
                f"cannot resume: the run in {path} has another task: its {name} is {_said(before)}, "
                f"not {_said(now)}; give the task it was made with, or start another run"
            )
        raise InputError(
            f"cannot resume: `{name}` is {_said(now)}, but the run in {path} has {_said(before)}; "
            "leave it out or start another run"
        )


def fixed_options(config: Config) -> dict[str, Any]:
    """The fields of a configuration that a resume must not change."""
    fixed = [name for name, known in OPTIONS.items() if not known.may_change or _horizon(name, config)]
    return {name: getattr(config, name) for name in fixed if config.says(name)}


def check_options(before: dict[str, Any], config: Config, file: Path) -> None:
    """Refuse a configuration that was edited in its file after the checkpoint was written."""
    for name, now in fixed_options(config).items():
        if name in before and before[name] != now:
            raise InputError(
                f"cannot resume: {file} was changed after the checkpoint was written: "
                f"{name} is {_said(now)}, and was {_said(before[name])}; put it back or start another run"
            )


def _said(value: object) -> str:
    return "none" if value is None else repr(value)


def _horizon(name: str, config: Config) -> bool:
    """Whether the number of rounds decides the learning rate."""
    return name == "rounds" and config.schedule.strip().startswith(("corollary1", "corollary3"))
