"""The files in a run's folder: their names, the rows of metrics, and the options that a resume may change.

A simulation and a federation write the same files.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cfedavg.core.config import OPTIONS, OWN, Config, fields_where
from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file, report_failure

CONFIG, METRICS, CHECKPOINT = "config.toml", "metrics.jsonl", "checkpoint.safetensors"
MODEL = "model.safetensors"  # the model that the clients hold at the end
SERVER_MODEL = "server_model.safetensors"  # the server's model, which differs if the broadcast is compressed
RESIDUALS = "residuals"
FEDERATION = "federation.txt"  # the name by which clients know a federation; a simulation has no such file

CLOCK = "seconds"  # the only column that differs between two runs with equal options
_TOTALS = ("uplink_bytes", "downlink_bytes", CLOCK)
_UNITS = 1074  # every float is an integer times 2^-1074

Record = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """What one client's reply adds to the metrics of a round; K is the number of local steps.

    g is the client's update, p is g plus the residual, and C(p) is what the client sends of p. The fields
    g2, p2 and noise2 are the squared norms |g|^2, |p|^2 and |p - C(p)|^2.
    """

    client: int
    K: int
    loss: float
    g2: float
    p2: float
    noise2: float
    coordinates: int
    up_bytes: int
    lost: bool

    @property
    def snr(self) -> float:
        """The measured signal-to-noise ratio |p|^2 / |p - C(p)|^2."""
        return self.p2 / self.noise2 if self.noise2 else math.inf


def summarise(replies: Sequence[Reply], abstained: int, d: int, mean_g2: float) -> Record:
    """Return those metrics of a round that come from the clients' replies, for a model of d parameters.

    `abstained` is the number of clients that did no local step and sent nothing. They count in the metric
    `clients` and in those of local steps. `mean_g2` is the squared norm of the mean of all updates g.
    """
    n = len(replies)
    steps = [r.K for r in replies] + [0] * abstained
    snr = [r.snr for r in replies]
    sent = sum(r.coordinates for r in replies)
    delta_norm2 = math.fsum(r.g2 for r in replies) / n if n else None
    return {
        "train_loss": math.fsum(r.loss * r.K for r in replies) / sum(steps) if n else None,
        "uplink_bytes": sum(r.up_bytes for r in replies),
        "coordinates_sent": sent,
        "model_sizes_sent": sent / (d * len(steps)),
        "delta_norm2": delta_norm2,
        "delta_norm": math.fsum(math.sqrt(r.g2) for r in replies) / n if n else None,
        "left_norm": math.fsum(math.sqrt(r.noise2) for r in replies) / n if n else None,
        "alpha": finite(delta_norm2 / mean_g2) if delta_norm2 and mean_g2 else None,
        "snr_min": finite(min(snr, default=math.inf)),
        "snr_mean": finite(math.fsum(each / n for each in snr) if n else math.inf),
        "local_steps_min": min(steps),
        "local_steps_mean": sum(steps) / len(steps),
        "local_steps_max": max(steps),
        "clients": len(steps),
        "lost": sum(r.lost for r in replies),
    }


class ResidualNorms(NamedTuple):
    """The sums of the clients' residual norms and of their squares, as exact multiples of 2^-1074.

    Every float is such a multiple. So a round replaces the terms of its clients, and need not add the terms
    of all clients again. Norms that are infinite are counted.

    >>> ResidualNorms().add([4.0, 16.0]).columns(m=4)
    {'error_norm2': 5.0, 'error_norm': 1.5}
    """

    squares: int = 0
    norms: int = 0
    infinite: int = 0

    def add(self, norms2: Iterable[float | None], sign: int = 1) -> ResidualNorms:
        """Return the sums with these squared norms; `sign` -1 takes them out, None is an unknown norm."""
        squares, norms, infinite = self
        for norm2 in norms2:
            if norm2 == math.inf:
                infinite += sign
            elif norm2 is not None:
                squares += sign * _in_units(norm2)
                norms += sign * _in_units(math.sqrt(norm2))
        return ResidualNorms(squares, norms, infinite)

    def columns(self, m: int) -> Record:
        """Return the means over m clients as columns of metrics; clients without a residual have norm 0."""
        totals = {"error_norm2": self.squares, "error_norm": self.norms}
        return {name: math.inf if self.infinite else total / 2**_UNITS / m for name, total in totals.items()}


def _in_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_UNITS + 1 - denominator.bit_length())


def is_number(value: Any) -> bool:
    """Return whether a value parsed from JSON is None or a number that a float can hold.

    >>> [is_number(value) for value in (1, 0.5, None, True, "1", 10**400)]
    [True, True, True, False, False, False]
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1000  # a much larger integer exceeds the range of floats
    return value is None or isinstance(value, float)


def finite(value: float) -> float | None:
    """Return the value, or None if it is infinite or NaN, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def read_rows(path: Path) -> list[Record]:
    """Return the rows of a metrics file up to the first line that is not a JSON object; [] without a file."""
    rows: list[Record] = []
    text = ""
    with report_failure(f"cannot read {path}"), suppress(FileNotFoundError):
        text = read_file(path).decode(errors="replace")
    for line in text.split("\n"):
        try:
            row = json.loads(line, parse_float=_parse_finite, parse_constant=_parse_finite)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict):
            break
        rows.append(row)
    return rows


def _parse_finite(text: str) -> float:
    """Return the number in a text; raise ValueError if it is infinite or NaN."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def are_usable(rows: list[Record]) -> bool:
    """Return whether rows of metrics have all columns that a resumed run needs, with the right types."""
    try:
        checksum_rows(rows)
    except RecursionError:  # lists nested so deep that they can be read but not written
        return False
    return all(map(_is_usable, rows)) and len({tuple(row.get("rate_conditions", ())) for row in rows}) < 2


def _is_usable(row: Record) -> bool:
    conditions = row.get("rate_conditions", {})
    return (
        all(is_number(row.get(name, "")) for name in (*_TOTALS, "snr_min", "alpha"))
        and all(row[name] is not None for name in _TOTALS)
        and is_number(row.get("first_download_bytes"))
        and isinstance(conditions, dict)
        and all(
            isinstance(each, dict)
            and isinstance(each.get("holds"), bool)
            and is_number(each.get("ratio", ""))
            for each in conditions.values()
        )
    )


def checksum_rows(rows: list[Record], before: int = 0) -> int:
    """Return the CRC-32 of rows of metrics; `before` is the checksum of all earlier rows.

    The column `seconds` is left out, so that two equal runs write the same checkpoint, byte for byte.
    """
    for row in rows:
        before = zlib.crc32(format_row({**row, CLOCK: 0}).encode(), before)
    return before


def format_row(row: Record) -> str:
    """Return a row of metrics as a line of JSON; raise ValueError if the row contains NaN or Inf."""
    return json.dumps(row, allow_nan=False) + "\n"


def check_same(old: Config, new: Config, path: Path) -> None:
    """Raise InputError if `new` differs from `old` in a field that a resume must not change.

    `old` is the configuration of the run in the folder `path`.
    """
    if old.dataset == f"{OWN})":  # written before tasks had fingerprints
        old = dataclasses.replace(old, dataset=new.dataset, model=new.model)
    for name, before, now in _find_changes(vars(old), new):
        if name in ("dataset", "model") and not (old.names_task and new.names_task):
            raise InputError(
                f"cannot resume: the run in {path} has another task: its {name} is {before}, "
                f"not {now}; give the task of that run, or start another run"
            )
        raise InputError(
            f"cannot resume: `{name}` is {now}, but the run in {path} has {before}; "
            "leave the option out or start another run"
        )


def fixed_options(config: Config) -> dict[str, Any]:
    """Return the fields of a configuration that a resume must not change."""
    fixed = {*fields_where(lambda known: not known.may_change)}
    if config.schedule.strip().startswith(("corollary1", "corollary3")):
        fixed.add("rounds")  # under these schedules the number of rounds decides the learning rate
    return {name: getattr(config, name) for name in OPTIONS if name in fixed and config.uses(name)}


def check_options(before: dict[str, Any], config: Config, file: Path) -> None:
    """Raise InputError if the configuration in `file` was edited after the checkpoint was written.

    `before` holds the options as the checkpoint stores them.
    """
    for name, old, now in _find_changes(before, config):
        raise InputError(
            f"cannot resume: {file} was changed after the checkpoint was written: "
            f"{name} is {now}, and was {old}; restore the old value or start another run"
        )


def _find_changes(before: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield name, old value and new value of each changed field that a resume must not change."""
    for name, now in fixed_options(config).items():
        if name in before and before[name] != now:
            old, new = ("none" if value is None else repr(value) for value in (before[name], now))
            yield name, old, new
