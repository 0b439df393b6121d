"""How the nodes of a federation fared: what became of each request, in words and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cfedavg.core.units import format_bytes
from cfedavg.report.pens import BLUE, ORANGE, PLAIN, SKY, VERMILION

Record = dict[str, Any]

# What became of a request, with its colour, the best first.
OUTCOMES = {
    "in the model": BLUE,
    "replied, round void": SKY,
    "late": ORANGE,
    "lost": PLAIN,
    "rejected": VERMILION,
}
_HEADER = ["node", "asked", *OUTCOMES, "uplink", "K", "residual", "age", "incarnation"]
_REASONS, _NAMES = 12, 6  # as many as one reads


def outcome(row: Record) -> str:
    """One of OUTCOMES, from a line of nodes.jsonl; any other word there is the cause of a rejection."""
    if row.get("applied"):
        return "in the model"
    words = {"replied": "replied, round void", "late": "late", "lost": "lost"}
    return words.get(row["outcome"], "rejected")


def by_node(rows: Sequence[Record]) -> dict[int, list[Record]]:
    """The rows of each node, in the order of their numbers."""
    found: dict[int, list[Record]] = {}
    for row in sorted(rows, key=lambda row: (row["number"], row["round"])):
        found.setdefault(row["number"], []).append(row)
    return found


def as_text(rows: Sequence[Record]) -> list[list[str]]:
    """A line for each node, a header first; residual, age and incarnation are the last that are known."""
    return [_HEADER, *(_line(own) for own in by_node(rows).values())]


def _line(own: Sequence[Record]) -> list[str]:
    counts = Counter(map(outcome, own))
    return [
        own[-1]["node"],
        str(len(own)),
        *(str(counts[name]) for name in OUTCOMES),
        format_bytes(sum(row.get("up_bytes") or 0 for row in own)),
        _steps([row["K"] for row in own if row.get("K") is not None]),
        _last(own, "residual_norm", ".4g"),
        _last(own, "age", ",.0f"),
        _last(own, "incarnation", ",.0f"),
    ]


def reasons(rows: Sequence[Record]) -> list[str]:
    """Why requests came to nothing, the most frequent reason first; empty if none did."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        if not row.get("applied"):
            found.setdefault(_reason(row), []).append(row)
    in_order = sorted(found.items(), key=lambda item: -len(item[1]))
    said = [f"{_when(own)}: {why}, {_whose(own)}" for why, own in in_order[:_REASONS]]
    more = sum(len(own) for _, own in in_order[_REASONS:])
    return said + ([f"{more} more, for other reasons"] if more else [])


def _when(own: Sequence[Record]) -> str:
    """Counted from 1, as in the pictures."""
    first, last = (each(row["round"] for row in own) + 1 for each in (min, max))
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def _whose(own: Sequence[Record]) -> str:
    """`node2 3 times, node1 and 5 more nodes`."""
    nodes = Counter(row["node"] for row in own)
    names = [name if times == 1 else f"{name} {times} times" for name, times in nodes.most_common(_NAMES)]
    more = len(nodes) - len(names)
    return ", ".join(names) + (f" and {more} more node{'s' if more > 1 else ''}" if more else "")


def _reason(row: Record) -> str:
    what = "round void" if row["outcome"] == "replied" else row["outcome"]
    return f"{what} ({row['why']})" if row.get("why") else str(what)


def _steps(values: Sequence[int]) -> str:
    if not values:
        return "not said"
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _last(own: Sequence[Record], name: str, form: str) -> str:
    values = [row[name] for row in own if row.get(name) is not None]
    return format(values[-1], form) if values else "none"
