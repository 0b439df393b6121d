"""The runs that a report compares: the contents of run folders, groups of runs, and curves over rounds."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cfedavg.core.config import Config, read_config
from cfedavg.core.errors import InputError
from cfedavg.core.files import exists, read_file
from cfedavg.core.run_files import CONFIG, METRICS, Record, is_number
from cfedavg.core.units import is_share

NODES = "nodes.jsonl"

# The columns that pictures and tables need as numbers; a row may hold others of any type.
_NUMBERS = {
    "train_loss", "uplink_bytes", "downlink_bytes", "total_bytes", "first_download_bytes", "delta_norm2",
    "error_norm2", "alpha", "snr_min", "seconds", "simulated_seconds", "client_accuracy_min",
    "client_accuracy_mean", "up_bytes", "K", "residual_norm", "age", "incarnation",
}  # fmt: skip
_LARGEST = 1e100  # larger numbers may overflow when they are added or drawn


@dataclass(frozen=True)
class Run:
    """The contents of a run folder; `rows` holds the metrics of each round, in order.

    A federation also has `nodes`: a row for each request to a node, sorted by round and node number.
    """

    path: Path
    config: Config
    rows: list[Record]
    label: str
    nodes: list[Record] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed: one line of a picture and one row of a table."""

    label: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.config.seed for run in self.runs)

    @property
    def is_uncompressed(self) -> bool:
        """Whether the runs compress neither updates nor broadcasts."""
        return self.config.compressor.strip() == self.config.compressor_down.strip() == "none"


class Curve(NamedTuple):
    """A curve: at each x the mean, the lowest and the highest value over the seeds."""

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def make_curve(group: Group, x: str, y: str) -> Curve:
    """Return the curve of column `y` over `x`, with a point for each round that all seeds have.

    `x` is "rounds", or a column whose values are added up over the rounds.
    """
    points = [own for run in group.runs if (own := _list_points(run, x, y))]
    shared = sorted(set.intersection(*map(set, points))) if points else []
    if not shared:
        return Curve(*np.empty((4, 0)))
    values = np.array([[own[t] for t in shared] for own in points])
    ys = values[:, :, 1]
    return Curve(values[:, :, 0].mean(0), ys.mean(0), ys.min(0), ys.max(0))


def _list_points(run: Run, x: str, y: str) -> dict[int, tuple[float, float]]:
    """Return the point (x, y) of each round in which both are known; x and y are as in `make_curve`."""
    rounds = get_column(run, "round")
    # After an unknown number (NaN), all later sums are unknown.
    xs = rounds + 1 if x == "rounds" else np.cumsum(get_column(run, x))
    ys = get_column(run, y)
    known = np.isfinite(xs) & np.isfinite(ys)
    return {int(t): (a, b) for t, a, b in zip(rounds[known], xs[known], ys[known], strict=True)}


def get_column(run: Run, key: str) -> NDArray[np.float64]:
    """Return a column of the metrics, a value for each row; NaN if the value is missing, null or infinite.

    The column `time` holds the simulated seconds of each round; in a federation the real ones.
    """
    if key == "time":
        key = "seconds" if run.nodes else "simulated_seconds"
    values = np.array([row.get(key) for row in run.rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def choose_metric(runs: Sequence[Run]) -> str:
    """Return the name of the main metric: a column `test_<name>` that all evaluated runs have.

    Of several, choose an accuracy first and a loss last. If there is no such column, choose a column
    `client_<name>`, which the clients of a federation evaluate.
    """
    for prefix in ("test_", "client_"):
        if (names := list_metrics(runs, prefix)) and (
            shared := [key for key in names[0] if all(key in own for own in names)]
        ):
            return prefer_metric(shared)
    return "test_loss" if any(run.rows for run in runs) else "test_accuracy"


def list_metrics(runs: Sequence[Run], prefix: str) -> list[list[str]]:
    """Return for each run the names of its columns that start with `prefix`; leave out runs without any."""
    every = [dict.fromkeys(key for row in run.rows for key in row) for run in runs]
    found = [[key for key in own if key.startswith(prefix)] for own in every]
    return [names for names in found if names]


def prefer_metric(names: Sequence[str]) -> str:
    """Return the first accuracy, else the first metric that is no loss, else the first loss."""
    return min(names, key=lambda name: (not is_share(name), name.endswith("loss")))


# Reading


def read_run(path: Path) -> Run:
    """Return the run in a folder; raise InputError if a file is missing or malformed."""
    if not (exists(path) and path.is_dir()):
        why = "it is a file" if exists(path) else "there is no such folder"
        raise InputError(f"{path} is not a run folder: {why}")
    for name in (CONFIG, METRICS):
        if not (path / name).is_file():
            inside = sorted(str(each.parent) for each in path.glob(f"*/{CONFIG}"))
            hint = f"; give the run folders in it, such as {', '.join(inside[:5])}" if inside else ""
            raise InputError(f"{path} is not a run folder: it has no {name}{hint}")
    config, nodes = read_config(path / CONFIG), list[Record]()
    if exists(path / NODES):
        nodes = _read_rows(path / NODES, ("round", "number"), {"number": int, "node": str, "outcome": str})
    return Run(path, config, _read_rows(path / METRICS), " ".join(config.compressor.split()), nodes)


def _read_rows(
    path: Path, key: Sequence[str] = ("round",), types: Mapping[str, type] | None = None
) -> list[Record]:
    """Return the rows of a JSON Lines file, sorted by the columns in `key`.

    `types` gives the columns, beside `round`, that a row must have, with their types. If a resumed run wrote
    two rows with the same key, the later row counts.
    """
    try:
        *lines, last = read_file(path).split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from None
    found = {}
    for n, line in enumerate([*lines, last], 1):
        try:
            row = _parse(line, f"{path}, line {n}", types or {}) if line.strip() else None
        except InputError:
            if n <= len(lines):
                raise
            break  # no newline: the run is still writing this line, or was killed then
        if row:
            found[tuple(row[name] for name in key)] = row
    return [found[each] for each in sorted(found)]


def _parse(line: bytes, where: str, types: Mapping[str, type]) -> Record:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise InputError(f"{where} is not a JSON object")
    for name, value in {**dict.fromkeys(("round", *types)), **row}.items():
        rule = ""
        if name == "round" and (type(value) is not int or not 0 <= value < 2**53):
            rule = "an integer from 0 to 2^53 - 1"
        elif name in types and type(value) is not types[name]:
            rule = f"of type {types[name].__name__}"
        elif name in _NUMBERS or name.startswith(("test_", "client_")):
            rule = "" if is_number(value) else "a number or null"
            row[name] = value if rule else _limit(value)
        if rule:
            raise InputError(f"{where}: {reprlib.repr(name)} must be {rule}, got {reprlib.repr(value)}")
        if not name.isprintable():
            raise InputError(f"{where}: each column's name must be printable, got {reprlib.repr(name)}")
    if row.get("uplink_bytes") is not None and row.get("downlink_bytes") is not None:
        row.setdefault("total_bytes", row["uplink_bytes"] + row["downlink_bytes"])  # not in version 0.5
    return row


def _limit(value: float | None) -> float | None:
    """Return the number; None if its magnitude is too large to draw, 0 if its magnitude is too small.

    >>> _limit(0.5), _limit(-1e300), _limit(1e-300), _limit(None)
    (0.5, None, 0.0, None)
    """
    if value is None or not abs(value) < _LARGEST:
        return None
    return 0.0 if 0 < abs(value) < 1 / _LARGEST else value
