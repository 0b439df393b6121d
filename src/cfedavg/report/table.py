"""The outcome in numbers: one row for each group of runs, and one sentence over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cfedavg.core.units import (
    SAME,
    format_bytes,
    format_factor,
    format_metric,
    format_time,
    is_share,
    lower_is_better,
    spell_out,
)
from cfedavg.report.groups import Group, baseline, group_runs
from cfedavg.report.read import Run, column, metric_name

_AGAINST = "vs. baseline"


class Spread(NamedTuple):
    """Mean and sample standard deviation over n seeds; one seed has no deviation."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """One line of the summary. Bytes and times are means over the seeds; None is "not known"."""

    label: str
    metric: str
    final: Spread | None
    best: Spread | None
    rounds: tuple[int, int]  # fewest and most of the seeds
    total_bytes: float | None
    uplink_bytes: float | None
    downlink_bytes: float | None
    first_download_bytes: float | None  # a part of downlink_bytes
    ratio: float | None  # total bytes of `against` / total bytes of this row
    against: str
    simulated_seconds: float | None
    seeds: tuple[int, ...]


def summary(runs: Sequence[Run]) -> list[Row]:
    """What came out of the runs, those that differ only in their seed taken together."""
    return summarise(group_runs(runs), metric_name(runs))


def summarise(groups: Sequence[Group], metric: str) -> list[Row]:
    return [_row(group, baseline(group, groups), metric) for group in groups]


def _row(group: Group, base: Group, metric: str) -> Row:
    values = [v for run in group.runs if len(v := _known(column(run, metric)))]
    best = np.min if lower_is_better(metric) else np.max
    rounds = [len(run.rows) for run in group.runs]
    total, base_total = _total(group, "total_bytes"), _total(base, "total_bytes")
    return Row(
        label=group.label,
        metric=metric,
        final=_spread([float(v[-1]) for v in values]),
        best=_spread([float(best(v)) for v in values]),
        rounds=(min(rounds), max(rounds)),
        total_bytes=total,
        uplink_bytes=_total(group, "uplink_bytes"),
        downlink_bytes=_total(group, "downlink_bytes"),
        first_download_bytes=_total(group, "first_download_bytes"),
        ratio=base_total / total if base_total and total else None,
        against=base.label,
        simulated_seconds=_total(group, "simulated_seconds"),
        seeds=group.seeds,
    )


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values)]


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(float(np.mean(values)), std, len(values))


def _total(group: Group, key: str) -> float | None:
    """The mean over the seeds of a run's total; not known if a round of it is not known."""
    totals = [column(run, key).sum() for run in group.runs if run.rows]
    mean = float(np.mean(totals)) if totals else float("nan")
    return mean if np.isfinite(mean) else None


def as_text(rows: Sequence[Row]) -> list[list[str]]:
    """The table for people, a header first; columns in which nothing is known are left out."""
    metric = spell_out(rows[0].metric) if rows else "metric"
    header = ["run", metric, "total", _AGAINST, "up", "down", "first downloads", "rounds", "best"]
    header += ["simulated time", "seeds"]
    lines = [_cells(row) for row in rows]
    if len(rows) == 1:  # nothing to compare with
        lines[0][header.index(_AGAINST)] = "–"
    kept = [i for i in range(len(header)) if i < 2 or any(line[i] != "–" for line in lines)]
    return [[line[i] for i in kept] for line in [header, *lines]]


def _cells(row: Row) -> list[str]:
    low, high = row.rounds
    return [
        row.label,
        _metric_text(row, row.final),
        _bytes_text(row.total_bytes),
        "–" if row.ratio is None else "baseline" if row.against == row.label else format_factor(row.ratio),
        _bytes_text(row.uplink_bytes),
        _bytes_text(row.downlink_bytes),
        _bytes_text(row.first_download_bytes),
        str(high) if low == high else f"{low}–{high}",
        _metric_text(row, row.best),
        "–" if row.simulated_seconds is None else format_time(row.simulated_seconds),
        f"n = {len(row.seeds)} ({_few(row.seeds)})" if len(row.seeds) > 1 else f"n = 1 ({row.seeds[0]})",
    ]


def _bytes_text(value: float | None) -> str:
    return "–" if value is None else format_bytes(value)


def _metric_text(row: Row, value: Spread | None) -> str:
    if value is None:
        return "–"
    missing = f" ({value.n} of {len(row.seeds)} seeds)" if value.n < len(row.seeds) else ""
    return format_metric(row.metric, value.mean, value.std) + missing


def _few(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds[:6])) + ("…" if len(seeds) > 6 else "")


def headline(rows: Sequence[Row]) -> str:
    """The outcome in words: the row that saves most of those that lose little."""
    compared = [row for row in rows if row.final and row.ratio and row.against != row.label]
    if not compared:
        return _alone(rows)
    row = _pick(compared, {row.label: row for row in rows})
    base = next(other for other in rows if other.label == row.against)
    sent = format_factor(row.ratio or 1)
    sent = "as many bytes as" if sent == SAME else f"{sent} bytes than"
    theirs = f" ({_value(base)})" if base.final else ""
    rounds = "" if row.rounds == base.rounds else f", in {row.rounds[1]} against {base.rounds[1]} rounds"
    return f"{row.label}: {_value(row)} with {sent} {base.label}{theirs}{rounds}"


def _pick(rows: Sequence[Row], by_label: dict[str, Row]) -> Row:
    """Most saved among those within a hundredth of their baseline; else the best there is."""
    near = [row for row in rows if _loss_against(row, by_label[row.against]) <= 0.01]
    if near:
        return max(near, key=lambda row: row.ratio or 0)
    return min(rows, key=lambda row: _loss_against(row, by_label[row.against]))


def _loss_against(row: Row, base: Row) -> float:
    """How much worse the final metric is: in points for a share, relative for anything else."""
    if row.final is None or base.final is None:
        return float("inf")
    worse = base.final.mean - row.final.mean
    worse = -worse if lower_is_better(row.metric) else worse
    return worse if is_share(row.metric) else worse / (abs(base.final.mean) or 1)


def _alone(rows: Sequence[Row]) -> str:
    row = next((row for row in rows if row.final), None)
    if row is None:
        return "Nothing has been evaluated yet"
    sent = f" and {format_bytes(row.total_bytes)} up and down" if row.total_bytes is not None else ""
    rounds = f"{row.rounds[1]} round{'s' if row.rounds[1] != 1 else ''}"
    return f"{row.label}: {_value(row)} after {rounds}{sent}"


def _value(row: Row) -> str:
    assert row.final is not None
    text = format_metric(row.metric, row.final.mean)
    return text if is_share(row.metric) else f"{spell_out(row.metric)} {text}"
