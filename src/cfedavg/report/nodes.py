"""How the nodes of a federation fared: what became of each request, in words and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from cfedavg.report.pens import BLUE, ORANGE, PLAIN, SKY, VERMILION
from cfedavg.units import in_bytes

Record = dict[str, Any]

# What became of a request, with its colour, the best first.
OUTCOMES = {
    "in the model": BLUE,
    "replied, round void": SKY,
    "late": ORANGE,
    "lost": PLAIN,
    "rejected": VERMILION,
}
_HEADER = [
    "node", "asked", "in the model", "late", "lost", "rejected", "uplink", "K", "residual", "age",
    "incarnation",
]  # fmt: skip


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
        str(counts["in the model"]),
        str(counts["late"]),
        str(counts["lost"]),
        _rejected(own),
        in_bytes(sum(row.get("up_bytes") or 0 for row in own)),
        _steps([row["K"] for row in own if row.get("K") is not None]),
        _last(own, "residual_norm"),
        _last(own, "age"),
        _last(own, "incarnation"),
    ]


def _rejected(own: Sequence[Record]) -> str:
    """How often, and for which causes."""
    causes = Counter(row["outcome"] for row in own if outcome(row) == "rejected")
    return ", ".join(f"{count} ({cause})" for cause, count in causes.most_common()) or "0"


def _steps(values: Sequence[int]) -> str:
    if not values:
        return "not said"
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _last(own: Sequence[Record], name: str) -> str:
    values = [row[name] for row in own if row.get(name) is not None]
    return f"{values[-1]:.4g}" if values else "none"
