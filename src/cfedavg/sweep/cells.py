"""Cells, the runs of a sweep: how a cell is measured, and the file of its results with a checksum (seal)."""

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

# The metrics of each round that a cell keeps. Bytes and counts are integers and are not rounded.
COLUMNS = (
    "train_loss", "test_loss", "test_accuracy", "client_accuracy_min", "uplink_bytes", "model_sizes_sent",
    "delta_norm2", "delta_norm", "error_norm2", "error_norm", "alpha", "snr_min", "local_steps_mean",
    "simulated_seconds",
)  # fmt: skip
CELLS = "cells"  # the folder of the sealed files
# Fields that say how and where a cell is run. Cells that differ only in these fields are the same cell.
MACHINE = {"data_dir", "device", "engine", "workers", "precision", "residuals", "checkpoint_every"}
_PARTS = ("name", "made", "settings", "values")
_NUMBER = (int, float, type(None))  # None: not measured, or not finite

Settings = dict[str, Any]


@dataclass(frozen=True)
class SealedCell:
    """A finished cell: its settings, its measured values, and its command, versions and hardware (`made`)."""

    name: str
    settings: Settings
    values: dict[str, Any]
    made: dict[str, Any]

    @property
    def diverged(self) -> bool:
        """Whether the run reached NaN or infinity; its metrics end before that round."""
        return "diverged" in self.values


class DamagedCell(InputError):
    """An error: a cell's file was changed after it was written, or lacks values that its study needs."""


class Study:
    """The base class of what a sweep runs: cells, how to measure a cell, and their figure and table."""

    name: str
    title: str
    seeds: tuple[int, ...]
    note: str = ""  # a text about all cells, shown under the figure

    def cells(self, seeds: Iterable[int]) -> dict[str, Settings]:
        """Return the settings of every cell, by name."""
        raise NotImplementedError

    def measure(self, name: str, settings: Settings, folder: Path, observer: Observer) -> dict[str, Any]:
        """Run a cell and return its values; `folder` may hold files to resume the cell after a stop."""
        raise NotImplementedError

    def figure(self, found: Mapping[str, SealedCell], note: str) -> bytes:
        """Return a PNG figure of the cells in `found`, with `note` under the figure."""
        raise NotImplementedError

    def table(self, found: Mapping[str, SealedCell]) -> list[list[str]]:
        """Return the figure's numbers as rows of a table; the first row is the header."""
        raise NotImplementedError

    def device(self) -> str:
        """Return the device on which cells are measured."""
        return "cpu"

    def missing_values(self, cell: SealedCell) -> list[str]:
        """Return the names of values that the study needs and that `cell`, of another version, lacks."""
        return []


def config_settings(config: Config) -> Settings:
    """Return the fields of `config` that a cell stores: those that decide the result, and `precision`."""
    left_out = MACHINE - {"precision"}
    table = dataclasses.asdict(config).items()
    return {name: value for name, value in table if value is not None and name not in left_out}


def train_cell(config: Config, folder: Path, observer: Observer) -> dict[str, Any]:
    """Train in `folder`, resuming a run that is there; return each metric as a list over all rounds."""
    diverged = {}
    try:
        rows = _train(config, folder, observer)
    except Diverged as error:  # divergence is a result too
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
    """Write a cell to a file in `folder`, one metric per line so that diffs are short; return the path."""
    path = folder / f"{cell.name}.json"
    table = {part: getattr(cell, part) for part in _PARTS}
    lines = [f"  {json.dumps(key)}: {_text(value)}" for key, value in cell.values.items()]
    heads = [f' "{part}": {_text(table[part])}' for part in _PARTS[:-1]]
    text = ",\n".join([*heads, f' "seal": "{_seal(table)}"', ' "values": {\n' + ",\n".join(lines) + "\n }"])
    write_atomic(path, f"{{\n{text}\n}}\n".encode())
    return path


def read_cell(path: Path) -> SealedCell:
    """Return the cell in a file; raise DamagedCell if the file was changed after it was written."""
    try:
        table = json.loads(read_file(path))
        settings = table["settings"]
        if "dataset" in settings:  # the settings of a run: fields may have old names
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
    """Return all cells in a folder, by name."""
    return {cell.name: cell for cell in map(read_cell, sorted(folder.glob("*.json")))}


def _is_usable(cell: SealedCell) -> bool:
    """Return whether a cell has the fields and types that figures need, which the seal does not check."""
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
    """Return whether a value is a list of numbers or None, one for each round of a run."""
    return isinstance(value, list) and all(isinstance(each, _NUMBER) for each in value)


def _holds_numbers(value: Any) -> bool:
    """Return whether a value is a number or None, or a list or dict of such values, nested or not."""
    if isinstance(value, list | dict):
        return all(map(_holds_numbers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _NUMBER)


def is_same(found: Settings, wanted: Settings) -> bool:
    """Return whether two settings are of the same cell; fields about the machine (`MACHINE`) do not count."""
    left, right = ({k: v for k, v in each.items() if k not in MACHINE} for each in (found, wanted))
    return left == right


def is_beginning(found: Settings, wanted: Settings) -> bool:
    """Return whether `found` are the settings of the wanted cell, or of the same cell with fewer rounds."""
    rounds = found.get("rounds", 0)
    cut = {"rounds": rounds} if "dataset" in wanted and rounds <= wanted["rounds"] else {}
    return is_same(found, wanted | cut)


def round_value(value: float | None) -> float | None:
    """Return a number rounded to six significant digits, for small files; NaN and infinity become None.

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
