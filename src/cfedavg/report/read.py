"""A run folder as data: its configuration and one row of numbers for each round."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cfedavg.config import Config, read_config
from cfedavg.errors import InputError
from cfedavg.units import is_share

CONFIG, METRICS, NODES = "config.toml", "metrics.jsonl", "nodes.jsonl"

# What pictures and table are made of; a row may hold more, of any type.
_NUMBERS = {
    "train_loss", "uplink_bytes", "downlink_bytes", "delta_norm2", "error_norm2", "alpha", "snr_min",
    "simulated_seconds", "client_accuracy_min", "client_accuracy_mean", "up_bytes", "K", "residual_norm",
    "age", "incarnation",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a run folder holds; `rows` are in the order of their rounds.

    A federation has `nodes` too: a row for each node asked in a round, by round and number.
    """

    path: Path
    config: Config
    rows: list[dict[str, Any]]
    label: str
    nodes: list[dict[str, Any]] = field(default_factory=list)


def read_run(path: Path) -> Run:
    """The run in a folder; InputError says in one sentence what is missing or malformed."""
    if not path.is_dir():
        why = "it is a file" if path.exists() else "there is no such folder"
        raise InputError(f"{path} is not a run folder: {why}")
    for name in (CONFIG, METRICS):
        if not (path / name).is_file():
            inside = sorted(str(each.parent) for each in path.glob(f"*/{CONFIG}"))
            hint = f"; runs in it are {', '.join(inside[:5])}" if inside else ""
            raise InputError(f"{path} is not a run folder: it has no {name}{hint}")
    config = read_config(path / CONFIG)
    nodes = _read_nodes(path / NODES) if (path / NODES).is_file() else []
    return Run(path, config, _read_metrics(path / METRICS), " ".join(config.compressor.split()), nodes)


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    # A run that resumes from its checkpoint may write a round again: the later one counts.
    by_round = {row["round"]: row for _, row in _read_rows(path)}
    return [by_round[t] for t in sorted(by_round)]


def _read_nodes(path: Path) -> list[dict[str, Any]]:
    found = {}
    for where, row in _read_rows(path):
        for name, kind in (("number", int), ("node", str), ("outcome", str)):
            if type(row.get(name)) is not kind:
                raise InputError(f"{where} has {row.get(name)!r} for {name!r}: it is not a node's row")
        found[row["round"], row["number"]] = row
    return [found[key] for key in sorted(found)]


def _read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of a file with where it stands."""
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from None
    for n, line in enumerate(lines, 1):
        if line.strip():
            yield f"{path}, line {n}", _parse(line, f"{path}, line {n}")
    if last.strip():  # no newline yet: the run is writing this line, or died while it was
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
        raise InputError(f"{where} has no whole number `round`, which counts from 0")
    for name, value in row.items():
        if (name in _NUMBERS or name.startswith(("test_", "client_"))) and not _is_number(value):
            raise InputError(f"{where} has {value!r} for {name!r}: it must be a number or null")
    return row


def _is_number(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1000  # a larger one has no float
    return value is None or isinstance(value, float)


def column(run: Run, key: str) -> NDArray[np.float64]:
    """One number of each row; NaN where it is missing, null or infinite."""
    values = np.array([row.get(key) for row in run.rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def metric_name(runs: Sequence[Run]) -> str:
    """The `test_<name>` that all runs share which have any; a loss, if they share nothing better.

    A federation may have only what its clients evaluate, `client_<name>`.
    """
    for prefix in ("test_", "client_"):
        if (names := evaluated(runs, prefix)) and (
            shared := [key for key in names[0] if all(key in own for own in names)]
        ):
            return best_of(shared)
    return "test_loss" if any(run.rows for run in runs) else "test_accuracy"


def evaluated(runs: Sequence[Run], prefix: str) -> list[list[str]]:
    """The names in the rows of each run that begin so; runs without any are left out."""
    every = [dict.fromkeys(key for row in run.rows for key in row) for run in runs]
    found = [[key for key in own if key.startswith(prefix)] for own in every]
    return [names for names in found if names]


def best_of(names: Sequence[str]) -> str:
    """The metric that people want to see: an accuracy, else whatever is no loss."""
    return min(names, key=lambda name: (not is_share(name), name.endswith("loss")))  # the first of equals
