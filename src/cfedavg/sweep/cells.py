"""Cells, the runs of a sweep: their files of results, and what figures and tables show of them.

A cell's file is sealed: it holds a checksum of its content.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfedavg.callbacks import Callback
from cfedavg.core.config import Config, renew
from cfedavg.core.errors import CannotResume, Diverged, InputError
from cfedavg.core.files import read_file, write_atomic
from cfedavg.core.run_files import METRICS, Record, read_rows
from cfedavg.core.units import format_bytes, format_metric
from cfedavg.report.figures import Figure
from cfedavg.report.panels import Lines, Panel, Pen
from cfedavg.report.runs import Group, Run
from cfedavg.report.table import measure_spread
from cfedavg.simulate.result import Result
from cfedavg.simulate.run import run
from cfedavg.simulate.steps import Steps, finish

# The metrics of each round that a cell keeps. Bytes and counts are integers and are not rounded.
COLUMNS = (
    "train_loss", "test_loss", "test_accuracy", "client_accuracy_min", "uplink_bytes", "model_sizes_sent",
    "total_bytes", "first_download_bytes", "delta_norm2", "delta_norm", "error_norm2", "error_norm",
    "alpha", "snr_min", "local_steps_mean", "simulated_seconds",
)  # fmt: skip
NOTHING = "–"  # in a table, where there is no number
CELLS = "cells"  # the folder of the sealed files
# Fields that say how and where a cell is run. Cells that differ only in these fields are the same cell.
MACHINE = {"data_dir", "device", "engine", "workers", "precision", "residuals", "checkpoint_every"}
_PARTS = ("name", "made", "settings", "values")
_NUMBER = (int, float, type(None))  # None: not measured, or not finite

Settings = dict[str, Any]


@dataclass(frozen=True)
class SealedCell:
    """A finished cell: settings, measured values, and how it was `made` (command, versions, hardware)."""

    name: str
    settings: Settings
    values: dict[str, Any]
    made: dict[str, Any]

    @property
    def diverged(self) -> bool:
        """Whether the run reached NaN or infinity; its metrics end before that round."""
        return "diverged" in self.values


Found = Mapping[str, SealedCell]  # finished cells by name


class DamagedCell(InputError):
    """An error: a cell's file was changed after it was written, or lacks values that its study needs."""


class Study:
    """The base class of a study, which lists cells (runs), measures them, and makes a figure and a table."""

    name: str
    title: str
    seeds: tuple[int, ...]
    note: str = ""  # a text about all cells, shown under the figure

    def cells(self, seeds: Iterable[int]) -> dict[str, Settings]:
        """Return the settings of every cell, for each of `seeds`, by the cell's name."""
        raise NotImplementedError

    def config(self, name: str, settings: Settings) -> Config | None:
        """Return the configuration of a cell that may train side by side with others; None if it may not.

        Such a cell then trains with this configuration, and `measure` is not called.
        """
        return None

    def measure(self, name: str, settings: Settings, folder: Path, callback: Callback) -> dict[str, Any]:
        """Run the cell `name` in `folder`, or resume it after a stop; return its measured values."""
        raise NotImplementedError

    def figure(self, found: Found, note: str) -> Figure:
        """Return a figure of the cells in `found`, with `note` under the figure."""
        raise NotImplementedError

    def panels(self, found: Found) -> list[tuple[Panel, Lines]]:
        """Return the panels of the figure, whose numbers a CSV file shows; none if it has no such panels."""
        return []

    def table(self, found: Found) -> list[list[str]]:
        """Return the figure's numbers as rows of a table; the first row is the header."""
        raise NotImplementedError

    def device(self) -> str:
        """Return the device on which cells are measured."""
        return "cpu"

    def missing_values(self, cell: SealedCell) -> list[str]:
        """Return the names of values that the study needs but `cell`, made by an older version, lacks."""
        return []


def config_settings(config: Config) -> Settings:
    """Return the fields of `config` that a cell stores: `precision`, and those that decide the result."""
    left_out = MACHINE - {"precision"}
    if config.guard != "adapt":  # it changes nothing, and cells of older versions have no such field
        left_out |= {"guard"}
    table = dataclasses.asdict(config).items()
    return {name: value for name, value in table if value is not None and name not in left_out}


def train_cell(config: Config, folder: Path, callback: Callback) -> dict[str, Any]:
    """Train in `folder`, or resume the run that is there; return for each metric the list of its values."""
    return finish(steps_of_cell(config, folder, callback, None))


def steps_of_cell(
    config: Config, folder: Path, callback: Callback, beside: Callable[..., Steps[Result]] | None
) -> Steps[dict[str, Any]]:
    """Do what `train_cell` does; `beside` runs the cell side by side with others, with pauses."""
    diverged = {}
    try:
        try:
            rows = yield from _rows(config, folder, callback, beside)
        except CannotResume as error:
            callback.on_message(f"{folder.name} is done again from its first round ({error})")
            shutil.rmtree(folder)
            rows = yield from _rows(config, folder, callback, beside)
    except Diverged as error:  # divergence is a result too
        rows, diverged = read_rows(folder / METRICS), {"diverged": str(error)}
    known = [name for name in COLUMNS if any(row.get(name) is not None for row in rows)]
    return {name: [round_value(row.get(name)) for row in rows] for name in known} | diverged


def _rows(
    config: Config, folder: Path, callback: Callback, beside: Callable[..., Steps[Result]] | None
) -> Steps[list[Record]]:
    """Run a cell, alone or side by side with others; return its rows of metrics."""
    how: dict[str, Any] = {"out": folder, "resume": folder.exists(), "callbacks": [callback]}
    if beside is None:
        return run(config, **how, draw=False, progress=False).rows
    return (yield from beside(config, **how)).rows


# Files


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
    """Return whether a cell has the fields and types that figures need; the checksum does not show this."""
    made, settings = cell.made, cell.settings
    is_value = _is_column if "dataset" in settings else _holds_numbers
    return (
        isinstance(made["seconds"], int | float)
        and all(isinstance(made[key], str) for key in ("version", "hardware"))
        and type(settings["seed"]) is int
        and type(settings.get("rounds", 0)) is int
        and isinstance(cell.values.get("diverged", ""), str)
        and all(is_value(value) for key, value in cell.values.items() if key != "diverged")
    )


def _is_column(value: Any) -> bool:
    """Return whether a value is a list in which every entry is a number or None."""
    return isinstance(value, list) and all(isinstance(each, _NUMBER) for each in value)


def _holds_numbers(value: Any) -> bool:
    """Return whether a value is a number, None, or a list or dict of such values, also nested."""
    if isinstance(value, list | dict):
        return all(map(_holds_numbers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _NUMBER)


def is_same(found: Settings, wanted: Settings) -> bool:
    """Return whether two settings describe the same cell; fields about the machine (`MACHINE`) may differ."""
    left, right = ({k: v for k, v in each.items() if k not in MACHINE} for each in (found, wanted))
    return left == right


def is_beginning(found: Settings, wanted: Settings) -> bool:
    """Return whether `found` describes the same cell as `wanted`, with as many rounds or fewer."""
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


# Figures and tables


def fill_panel(panel: Panel, lines: Sequence[tuple[str, Sequence[SealedCell], Pen]]) -> tuple[Panel, Lines]:
    """Return a panel and its curves: for each line the mean over seeds, and each diverged seed alone.

    The curve of a diverged seed ends with a cross.
    """
    drawn: list[tuple[Group, Pen]] = []
    for label, cells, pen in lines:
        if whole := tuple(_as_run(cell, label) for cell in cells if not cell.diverged):
            drawn.append((Group(label, whole), pen))
        alone = [Group(label, (_as_run(cell, label),)) for cell in cells if cell.diverged]
        drawn += [(group, dataclasses.replace(pen, crossed=True)) for group in alone]
    return (panel if drawn else dataclasses.replace(panel, empty="not run yet")), drawn


def _as_run(cell: SealedCell, label: str) -> Run:
    """Return a cell as a Run, as the report reads it: a row for each round, with a client's uplink bytes."""
    config = Config.from_dict(cell.settings, cell.name, trust=True)  # safe: drawing imports no class
    columns = {key: values for key, values in cell.values.items() if isinstance(values, list)}
    sent = columns.get("uplink_bytes", [])
    columns["client_bytes"] = [None if each is None else each / config.clients for each in sent]
    lines = itertools.zip_longest(*columns.values())
    rows = [{"round": t} | dict(zip(columns, values, strict=True)) for t, values in enumerate(lines)]
    return Run(Path(cell.name), config, rows, label)


def count_cells(cells: Sequence[SealedCell]) -> str:
    """Return the number of cells (seeds) as text, and the number of diverged cells if there are any."""
    diverged = sum(cell.diverged for cell in cells)
    return f"{len(cells)}" + (f", {diverged} diverged" if diverged else "")


def count_rounds(cells: Sequence[SealedCell]) -> str:
    """Return the cells' number of rounds as text: "20", or "10 to 20" if the cells differ."""
    return _show_range({len(cell.values.get("uplink_bytes") or ()) for cell in cells})


def describe_seeds(counts: Iterable[int]) -> str:
    """Return words for a subtitle: how many seeds a line has; `counts` has a number for each line.

    >>> describe_seeds([3, 0, 2]), describe_seeds([1, 1]), describe_seeds([0])
    ('mean of 2 to 3 seeds, shaded from the lowest to the highest', 'one seed', '')
    """
    some = set(counts) - {0}
    if some <= {1}:
        return "one seed" if some else ""
    return f"mean of {_show_range(some)} seeds, shaded from the lowest to the highest"


def _show_range(counts: set[int]) -> str:
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def summarise_cells(cells: Sequence[SealedCell], columns: Sequence[str]) -> list[str]:
    """Return texts for a table: rounds, last values of metrics (mean ± spread), a client's uplink bytes."""
    if not cells:
        return [NOTHING] * (len(columns) + 2)
    texts = [count_rounds(cells)]
    for name in columns:
        known = [[value for value in cell.values.get(name, ()) if value is not None] for cell in cells]
        spread = measure_spread([own[-1] for own in known if own])
        texts.append(format_metric(name, spread.mean, spread.std) if spread else NOTHING)
    sent = [
        math.fsum(filter(None, cell.values.get("uplink_bytes") or ())) / cell.settings["clients"]
        for cell in cells
    ]
    return [*texts, format_bytes(statistics.fmean(sent))]


def write_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown.

    >>> print(write_markdown([["p", "line", "seeds"], ["10", "a|b", "3"]]), end="")
    | p | line | seeds |
    | ---: | :--- | ---: |
    | 10 | a\\|b | 3 |
    """
    rule = [":---" if name == "line" else "---:" for name in rows[0]]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [cells[0], rule, *cells[1:]])
