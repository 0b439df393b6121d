"""The files of a run's folder that everyone reads: their names, the rows of metrics, and what may change.

A simulation and a federation write the same files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

from cfedavg.core.config import OPTIONS, OWN, Config
from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file
from cfedavg.core.metrics import Record, is_number

CONFIG, METRICS, CHECKPOINT = "config.toml", "metrics.jsonl", "checkpoint.safetensors"
MODEL = "model.safetensors"  # at the end: what the clients hold
SERVER_MODEL = "server_model.safetensors"  # the server's own, where the broadcast is compressed
RESIDUALS = "residuals"
FEDERATION = "federation.txt"  # only a real one has it: its name, by which clients know it

CLOCK = "seconds"  # the one column that two equal runs do not share


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


def are_usable(rows: list[Record]) -> bool:
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
