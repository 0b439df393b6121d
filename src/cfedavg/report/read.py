"""Reading of run folders: the configuration, and one row of metrics for each round."""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cfedavg.core.config import Config, read_config
from cfedavg.core.errors import InputError
from cfedavg.core.files import exists, read_file
from cfedavg.core.run_files import CONFIG, METRICS, is_number
from cfedavg.core.units import is_share

NODES = "nodes.jsonl"

# The columns that pictures and tables need as numbers; a row may hold others of any type.
_NUMBERS = {
    "train_loss", "uplink_bytes", "downlink_bytes", "total_bytes", "first_download_bytes", "delta_norm2",
    "error_norm2", "alpha", "snr_min", "simulated_seconds", "client_accuracy_min", "client_accuracy_mean",
    "up_bytes", "K", "residual_norm", "age", "incarnation",
}  # fmt: skip
_LARGEST = 1e100  # larger numbers may overflow when they are added or drawn


@dataclass(frozen=True)
class Run:
    """The contents of a run folder; `rows` holds the metrics of each round, in order.

    A federation also has `nodes`: a row for each request to a node, sorted by round and node number.
    """

    path: Path
    config: Config
    rows: list[dict[str, Any]]
    label: str
    nodes: list[dict[str, Any]] = field(default_factory=list)


def read_run(path: Path) -> Run:
    """Return the run in a folder; raise InputError if a file is missing or malformed."""
    if not (exists(path) and path.is_dir()):
        why = "it is a file" if exists(path) else "there is no such folder"
        raise InputError(f"{path} is not a run folder: {why}")
    for name in (CONFIG, METRICS):
        if not (path / name).is_file():
            inside = sorted(str(each.parent) for each in path.glob(f"*/{CONFIG}"))
            hint = f"; runs in it are {', '.join(inside[:5])}" if inside else ""
            raise InputError(f"{path} is not a run folder: it has no {name}{hint}")
    config = read_config(path / CONFIG)
    nodes = _read_nodes(path / NODES) if exists(path / NODES) else []
    return Run(path, config, _read_metrics(path / METRICS), " ".join(config.compressor.split()), nodes)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows sorted by round. If a resumed run wrote a round twice, the later row counts."""
    found = {}
    for _, row in _read_rows(path):
        up, down = row.get("uplink_bytes"), row.get("downlink_bytes")
        if up is not None and down is not None:
            row.setdefault("total_bytes", up + down)  # version 0.5 wrote no total
        found[row["round"]] = row
    return [found[t] for t in sorted(found)]


def _read_nodes(path: Path) -> list[dict[str, Any]]:
    found = {}
    for where, row in _read_rows(path):
        for name, kind in (("number", int), ("node", str), ("outcome", str)):
            if type(row.get(name)) is not kind:
                raise InputError(
                    f"{where}: {name!r} must be of type {kind.__name__}, got {reprlib.repr(row.get(name))}"
                )
        found[row["round"], row["number"]] = row
    return [found[key] for key in sorted(found)]


def _read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a file, after a text that names the file and line."""
    try:
        *lines, last = read_file(path).split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from None
    for n, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}, line {n}", _parse(line, f"{path}, line {n}")
    if last.strip():  # no newline: the run is still writing this line, or was killed then
        with contextlib.suppress(InputError):
            yield str(path), _parse(last, "")


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise InputError(f"{where} is not a JSON object")
    if type(row.get("round")) is not int or not 0 <= row["round"] < 2**53:
        raise InputError(
            f"{where}: 'round' must be an integer from 0 to 2^53 - 1, got {reprlib.repr(row.get('round'))}"
        )
    for name, value in row.items():
        if not name.isprintable():
            raise InputError(f"{where}: every name must be printable, got {reprlib.repr(name)}")
        if name in _NUMBERS or name.startswith(("test_", "client_")):
            if not is_number(value):
                raise InputError(
                    f"{where}: {reprlib.repr(name)} must be a number or null, got {reprlib.repr(value)}"
                )
            row[name] = _limit(value)
    return row


def _limit(value: float | None) -> float | None:
    """Return the number, or None if its magnitude is too large to draw, or 0 if it is too small.

    >>> _limit(0.5), _limit(-1e300), _limit(1e-300), _limit(None)
    (0.5, None, 0.0, None)
    """
    if value is None or not abs(value) < _LARGEST:
        return None
    return 0.0 if 0 < abs(value) < 1 / _LARGEST else value


def get_column(run: Run, key: str) -> NDArray[np.float64]:
    """Return a column of the metrics, a value for each row; NaN if the value is missing, null or infinite."""
    values = np.array([row.get(key) for row in run.rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def choose_metric(runs: Sequence[Run]) -> str:
    """Return the name of the main metric: a `test_<name>` column that all evaluated runs share.

    An accuracy is preferred, a loss comes last. If there is none, return a shared `client_<name>`, which the
    clients of a federation evaluate.
    """
    for prefix in ("test_", "client_"):
        if (names := list_metrics(runs, prefix)) and (
            shared := [key for key in names[0] if all(key in own for own in names)]
        ):
            return prefer_metric(shared)
    return "test_loss" if any(run.rows for run in runs) else "test_accuracy"


def list_metrics(runs: Sequence[Run], prefix: str) -> list[list[str]]:
    """Return the names of each run's columns that start with `prefix`; runs without any are left out."""
    every = [dict.fromkeys(key for row in run.rows for key in row) for run in runs]
    found = [[key for key in own if key.startswith(prefix)] for own in every]
    return [names for names in found if names]


def prefer_metric(names: Sequence[str]) -> str:
    """Return the first accuracy, else the first metric that is no loss, else the first loss."""
    return min(names, key=lambda name: (not is_share(name), name.endswith("loss")))
