"""A cell of a sweep: how it is measured, and the sealed file of what it gave."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfedavg.core.config import Config, renew
from cfedavg.core.errors import CannotResume, Diverged, InputError
from cfedavg.core.files import read_file, write_atomic
from cfedavg.core.run_files import METRICS, Record, read_rows
from cfedavg.simulate.run import Observer, run

# The columns that a cell keeps; bytes and counts are whole numbers and stay exact.
COLUMNS = (
    "train_loss", "test_loss", "test_accuracy", "client_accuracy_min", "uplink_bytes", "model_sizes_sent",
    "delta_norm2", "delta_norm", "error_norm2", "error_norm", "alpha", "snr_min", "local_steps_mean",
    "simulated_seconds",
)  # fmt: skip
CELLS = "cells"  # the folder of the sealed files
# How and where a cell is run. Two cells that differ only in these are the same cell.
MACHINE = {"data_dir", "device", "engine", "workers", "precision", "residuals", "checkpoint_every"}
_PARTS = ("name", "made", "settings", "values")
_NUMBER = (int, float, type(None))  # null where nothing was measured, or the number was infinite

Settings = dict[str, Any]


@dataclass(frozen=True)
class SealedCell:
    """A finished cell: its settings, the values measured, and by which program and machine it was made."""

    name: str
    settings: Settings
    values: dict[str, Any]
    made: dict[str, Any]

    @property
    def diverged(self) -> bool:
        """Whether the run left the finite numbers; its columns end before."""
        return "diverged" in self.values


class DamagedCell(InputError):
    """A cell's file that is not as it was written, or lacks values that its study needs."""


class Study:
    """What a sweep runs: cells, how to measure one, and a figure and a table of them. A Grid is one."""

    name: str
    title: str
    seeds: tuple[int, ...]
    note: str = ""  # on all cells, under the figure

    def cells(self, seeds: Iterable[int]) -> dict[str, Settings]:
        """Return the settings of every cell, by name."""
        raise NotImplementedError

    def measure(self, name: str, settings: Settings, folder: Path, observer: Observer) -> dict[str, Any]:
        """Return the values of a cell. In `folder`, it may leave what it needs to go on after a stop."""
        raise NotImplementedError

    def figure(self, found: Mapping[str, SealedCell], note: str) -> bytes:
        """Draw the cells that there are, as PNG."""
        raise NotImplementedError

    def table(self, found: Mapping[str, SealedCell]) -> list[list[str]]:
        """Return the numbers behind the figure, a header first."""
        raise NotImplementedError

    def device(self) -> str:
        """Return the device that measures."""
        return "cpu"

    def missing_values(self, cell: SealedCell) -> list[str]:
        """Return the names of the values that the study needs and a cell of another version lacks."""
        return []


def config_settings(config: Config) -> Settings:
    """Return a configuration as a cell keeps it: what decides the result, and the precision."""
    left_out = MACHINE - {"precision"}
    table = dataclasses.asdict(config).items()
    return {name: value for name, value in table if value is not None and name not in left_out}


def train_cell(config: Config, folder: Path, observer: Observer) -> dict[str, Any]:
    """Train in a folder, continuing what is there, and return the columns of all rounds."""
    diverged = {}
    try:
        rows = _train(config, folder, observer)
    except Diverged as error:  # a result too
        rows, diverged = read_rows(folder / METRICS), {"diverged": str(error)}
    known = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    return {name: [round_value(row.get(name)) for row in rows] for name in known} | diverged


def _train(config: Config, folder: Path, observer: Observer) -> list[Record]:
    try:
        return run(config, out=folder, resume=folder.exists(), observer=observer, draw=False).rows
    except CannotResume as error:
        observer.say(f"{folder.name} is done again from its first round ({error})")
        shutil.rmtree(folder)
        return run(config, out=folder, observer=observer, draw=False).rows


def write_cell(folder: Path, cell: SealedCell) -> Path:
    """Write a cell into a folder, one column a line, so that a change shows in a diff."""
    path = folder / f"{cell.name}.json"
    table = {part: getattr(cell, part) for part in _PARTS}
    lines = [f"  {json.dumps(key)}: {_text(value)}" for key, value in cell.values.items()]
    heads = [f' "{part}": {_text(table[part])}' for part in _PARTS[:-1]]
    text = ",\n".join([*heads, f' "seal": "{_seal(table)}"', ' "values": {\n' + ",\n".join(lines) + "\n }"])
    write_atomic(path, f"{{\n{text}\n}}\n".encode())
    return path


def read_cell(path: Path) -> SealedCell:
    """Read a cell; raise DamagedCell if it is not as it was written."""
    try:
        table = json.loads(read_file(path))
        settings = table["settings"]
        if "dataset" in settings:  # a run's settings are options, which may have old names
            settings = renew(settings)
        cell = SealedCell(table["name"], settings, table["values"], table["made"])
        whole = table["seal"] == _seal({part: table[part] for part in _PARTS}) and cell.name == path.stem
        whole = whole and _is_usable(cell)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise DamagedCell(f"{path} is damaged")
    return cell


def read_cells(folder: Path) -> dict[str, SealedCell]:
    """Read every cell in a folder, by name."""
    return {cell.name: cell for cell in map(read_cell, sorted(folder.glob("*.json")))}


def _is_usable(cell: SealedCell) -> bool:
    """Whether a cell holds what figures and tables ask every cell for; a seal does not say that."""
    made, settings = cell.made, cell.settings
    is_value = _is_column if "dataset" in settings else _holds_numbers
    return (
        isinstance(made["seconds"], int | float)
        and all(isinstance(made[key], str) for key in ("version", "hardware"))
        and type(settings["seed"]) is int
        and type(settings.get("rounds", 0)) is int
        and all(
            isinstance(value, str) if key == "diverged" else is_value(value)
            for key, value in cell.values.items()
        )
    )


def _is_column(value: Any) -> bool:
    """Whether a value is a number for each round, as a run has them."""
    return isinstance(value, list) and all(isinstance(each, _NUMBER) for each in value)


def _holds_numbers(value: Any) -> bool:
    """Whether a value is numbers in lists and tables of any shape, as a study of its own has them."""
    if isinstance(value, list | dict):
        return all(map(_holds_numbers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _NUMBER)


def is_same(found: Settings, wanted: Settings) -> bool:
    """Whether two settings are those of one cell: where and how it was computed does not matter."""
    left, right = ({k: v for k, v in each.items() if k not in MACHINE} for each in (found, wanted))
    return left == right


def is_beginning(found: Settings, wanted: Settings) -> bool:
    """Whether settings are those of the wanted cell, or of its first rounds."""
    rounds = found.get("rounds", 0)
    cut = {"rounds": rounds} if "dataset" in wanted and rounds <= wanted["rounds"] else {}
    return is_same(found, wanted | cut)


def round_value(value: float | None) -> float | None:
    """Round to six digits, which is more than any figure shows and half the bytes; infinity becomes None.

    >>> round_value(0.123456789), round_value(582026), round_value(None), round_value(math.inf)
    (0.123457, 582026, None, None)
    """
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _seal(table: dict[str, Any]) -> str:
    plain = json.dumps(table, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]
