"""Tables of results, with a row for each group of runs or each node, and a headline of one sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cfedavg.core import units
from cfedavg.core.units import format_bytes, format_factor
from cfedavg.report.groups import Group, find_baseline, group_runs
from cfedavg.report.panels import BLUE, ORANGE, PLAIN, SKY, VERMILION
from cfedavg.report.read import Run, choose_metric, get_column

_UNKNOWN, _AGAINST = "–", "vs. baseline"
_TOTALS = ("total_bytes", "uplink_bytes", "downlink_bytes", "first_download_bytes", "simulated_seconds")
Record = dict[str, Any]

# The possible outcomes of a request to a node, each with its colour, from best to worst.
OUTCOMES = {
    "in the model": BLUE,
    "replied, round void": SKY,
    "late": ORANGE,
    "lost": PLAIN,
    "rejected": VERMILION,
}
_NODE_HEADER = ["node", "asked", *OUTCOMES, "uplink", "K", "residual", "age", "incarnation"]
_MOST_REASONS, _MOST_NAMES = 12, 6


class Spread(NamedTuple):
    """The mean and the sample standard deviation over `n` seeds; `std` is None if `n` is 1."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """One row of the summary. Bytes and times are means over the seeds; None means unknown."""

    label: str
    metric: str
    final: Spread | None
    best: Spread | None
    rounds: tuple[int, int]  # the fewest and the most over the seeds
    total_bytes: float | None
    uplink_bytes: float | None
    downlink_bytes: float | None
    first_download_bytes: float | None  # a part of downlink_bytes
    ratio: float | None  # total bytes of `against` / total bytes of this row
    against: str
    simulated_seconds: float | None
    seeds: tuple[int, ...]


def summary(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of the summary, one for each group of runs that differ only in their seed."""
    return summarise(group_runs(runs), choose_metric(runs))


def summarise(groups: Sequence[Group], metric: str) -> list[Row]:
    return [_summarise_group(group, find_baseline(group, groups), metric) for group in groups]


def _summarise_group(group: Group, base: Group, metric: str) -> Row:
    columns = [get_column(run, metric) for run in group.runs]
    values = [known for column in columns if len(known := column[np.isfinite(column)])]
    best = np.min if units.lower_is_better(metric) else np.max
    rounds = [len(run.rows) for run in group.runs]
    base_total, totals = _total(base, "total_bytes"), {key: _total(group, key) for key in _TOTALS}
    total = totals["total_bytes"]
    return Row(
        label=group.label,
        metric=metric,
        final=_spread([float(v[-1]) for v in values]),
        best=_spread([float(best(v)) for v in values]),
        rounds=(min(rounds), max(rounds)),
        ratio=base_total / total if base_total and total else None,
        against=base.label,
        seeds=group.seeds,
        **totals,
    )


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(float(np.mean(values)), std, len(values))


def _total(group: Group, key: str) -> float | None:
    """Return the total of a column over rounds, as a mean over the seeds; None if any value is unknown."""
    totals = [get_column(run, key).sum() for run in group.runs if run.rows]
    mean = float(np.mean(totals)) if totals else float("nan")
    return mean if np.isfinite(mean) else None


def tabulate(rows: Sequence[Row]) -> list[list[str]]:
    """Return the summary as rows of text, the header first, without columns that have no known value."""
    metric = units.spell_out(rows[0].metric) if rows else "metric"
    header = ["run", metric, "total", _AGAINST, "up", "down", "first downloads", "rounds", "best"]
    header += ["simulated time", "seeds"]
    lines = [_cells(row) for row in rows]
    if len(rows) == 1:  # nothing to compare with
        lines[0][header.index(_AGAINST)] = _UNKNOWN
    kept = [i for i in range(len(header)) if i < 2 or any(line[i] != _UNKNOWN for line in lines)]
    return [[line[i] for i in kept] for line in [header, *lines]]


def _cells(row: Row) -> list[str]:
    def metric(value: Spread | None) -> str:
        if value is None:
            return _UNKNOWN
        missing = f" ({value.n} of {len(row.seeds)} seeds)" if value.n < len(row.seeds) else ""
        return units.format_metric(row.metric, value.mean, value.std) + missing

    sizes = (row.total_bytes, row.uplink_bytes, row.downlink_bytes, row.first_download_bytes)
    total, *parts = (_UNKNOWN if size is None else format_bytes(size) for size in sizes)
    low, high = row.rounds
    ratio = _UNKNOWN if row.ratio is None else format_factor(row.ratio)
    if row.ratio is not None and row.against == row.label:
        ratio = "baseline"
    return [
        row.label,
        metric(row.final),
        total,
        ratio,
        *parts,
        str(high) if low == high else f"{low}–{high}",
        metric(row.best),
        _UNKNOWN if row.simulated_seconds is None else units.format_time(row.simulated_seconds),
        f"n = {len(row.seeds)} ({', '.join(map(str, row.seeds[:6]))}{'…' if len(row.seeds) > 6 else ''})",
    ]


def make_headline(rows: Sequence[Row]) -> str:
    """Return one sentence about the best row: the one that saves most bytes and loses at most 1%.

    If every row loses more against its baseline, the row that loses least is the best.
    """
    compared = [row for row in rows if row.final and row.ratio and row.against != row.label]
    if not compared:
        return _headline_alone(rows)
    by_label = {row.label: row for row in rows}
    losses = [_loss_against(row, by_label[row.against]) for row in compared]
    near = [row for row, loss in zip(compared, losses, strict=True) if loss <= 0.01]
    row = max(near, key=lambda row: row.ratio or 0) if near else compared[losses.index(min(losses))]
    base = next(other for other in rows if other.label == row.against)
    sent = format_factor(row.ratio or 1)
    sent = "as many bytes as" if sent == units.SAME else f"{sent} bytes than"
    theirs = f" ({_final(base)})" if base.final else ""
    rounds = "" if row.rounds == base.rounds else f", in {row.rounds[1]} against {base.rounds[1]} rounds"
    return f"{row.label}: {_final(row)} with {sent} {base.label}{theirs}{rounds}"


def _loss_against(row: Row, base: Row) -> float:
    """Return how much worse the final metric is than the baseline's; absolute for shares, else relative."""
    if row.final is None or base.final is None:
        return float("inf")
    worse = base.final.mean - row.final.mean
    worse = -worse if units.lower_is_better(row.metric) else worse
    return worse if units.is_share(row.metric) else worse / (abs(base.final.mean) or 1)


def _headline_alone(rows: Sequence[Row]) -> str:
    row = next((row for row in rows if row.final), None)
    if row is None:
        return "Nothing has been evaluated yet"
    sent = f" and {format_bytes(row.total_bytes)} up and down" if row.total_bytes is not None else ""
    rounds = f"{row.rounds[1]} round{'s' if row.rounds[1] != 1 else ''}"
    return f"{row.label}: {_final(row)} after {rounds}{sent}"


def _final(row: Row) -> str:
    assert row.final is not None
    text = units.format_metric(row.metric, row.final.mean)
    return text if units.is_share(row.metric) else f"{units.spell_out(row.metric)} {text}"


def classify(row: Record) -> str:
    """Return which of `OUTCOMES` a row of nodes.jsonl has; an unknown outcome counts as rejected."""
    if row.get("applied"):
        return "in the model"
    words = {"replied": "replied, round void", "late": "late", "lost": "lost"}
    return words.get(row["outcome"], "rejected")


def group_by_node(rows: Sequence[Record]) -> dict[int, list[Record]]:
    """Return the rows of each node, sorted by round; the keys are node numbers in increasing order."""
    found: dict[int, list[Record]] = {}
    for row in sorted(rows, key=lambda row: (row["number"], row["round"])):
        found.setdefault(row["number"], []).append(row)
    return found


def tabulate_nodes(rows: Sequence[Record]) -> list[list[str]]:
    """Return a row of text for each node, the header first; residual, age, incarnation are the last known."""
    return [_NODE_HEADER, *(_node_cells(own) for own in group_by_node(rows).values())]


def _node_cells(own: Sequence[Record]) -> list[str]:
    def last(name: str, form: str) -> str:
        values = [row[name] for row in own if row.get(name) is not None]
        return format(values[-1], form) if values else "none"

    counts = Counter(map(classify, own))
    steps = sorted({row["K"] for row in own if row.get("K") is not None})
    return [
        own[-1]["node"],
        str(len(own)),
        *(str(counts[name]) for name in OUTCOMES),
        format_bytes(sum(row.get("up_bytes") or 0 for row in own)),
        " to ".join(f"{K:g}" for K in dict.fromkeys((steps[0], steps[-1]))) if steps else "not said",
        last("residual_norm", ".4g"),
        last("age", ",.0f"),
        last("incarnation", ",.0f"),
    ]


def list_reasons(rows: Sequence[Record]) -> list[str]:
    """Return a sentence for each reason why replies are not in the model, the most frequent first."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        if not row.get("applied"):
            what = "round void" if row["outcome"] == "replied" else row["outcome"]
            found.setdefault(f"{what} ({row['why']})" if row.get("why") else str(what), []).append(row)
    in_order = sorted(found.items(), key=lambda item: -len(item[1]))
    reasons = [_describe_reason(why, own) for why, own in in_order[:_MOST_REASONS]]
    more = sum(len(own) for _, own in in_order[_MOST_REASONS:])
    return reasons + ([f"{more} more, for other reasons"] if more else [])


def _describe_reason(why: str, own: Sequence[Record]) -> str:
    """Return a text such as `rounds 1 to 2: lost, node2 3 times, node1`; rounds count from 1."""
    first, last = (each(row["round"] for row in own) + 1 for each in (min, max))
    when = f"round {first}" if first == last else f"rounds {first} to {last}"
    nodes = Counter(row["node"] for row in own)
    names = [name if n == 1 else f"{name} {n} times" for name, n in nodes.most_common(_MOST_NAMES)]
    more = len(nodes) - len(names)
    others = f" and {more} more node{'s' if more > 1 else ''}" if more else ""
    return f"{when}: {why}, {', '.join(names)}{others}"
