"""What is written down of a round: a line for all, as in a simulation, and a line for each node asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cfedavg.federation.store import Served
from cfedavg.flower.nodes import Node
from cfedavg.flower.parcel import number
from cfedavg.flower.taking import Taken
from cfedavg.metrics import Record, residual_norms, summarise


class Outcome(NamedTuple):
    """What came of a request: replied, late, lost, or the cause of a rejection; when, in how many bytes."""

    what: str
    why: str
    seconds: float | None
    bytes: int


def round_row(
    t: int, taken: Sequence[Taken], outcomes: Mapping[str, Outcome], d: int, after: Served
) -> Record:
    """The columns of a simulation's line, as far as a server can know them, and how the nodes fared."""
    found = summarise([each.reply for each in taken], 0 if taken else 1, d, mean_g2=0.0)
    if not all(each.K for each in taken):  # unchanged clients do not say how many steps they did
        found |= dict.fromkeys(("local_steps_min", "local_steps_mean", "local_steps_max"))
    known = {name: None if _unknown(value) else value for name, value in found.items()}
    residuals = [value for value in map(number, after.facts["residuals"].values()) if value is not None]
    counted = Counter(outcome.what for outcome in outcomes.values())
    return {
        "round": t,
        **known,
        "uplink_bytes": sum(outcome.bytes for outcome in outcomes.values()),
        "clients": len(outcomes),
        "lost": len(outcomes) - len(taken),
        **residual_norms(residuals, max(1, len(after.facts["numbers"]))),
        "simulated_seconds": None,
        "outcomes": dict(sorted(counted.items())),
    }


def _unknown(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def node_rows(
    t: int,
    nodes: Iterable[Node],
    outcomes: Mapping[str, Outcome],
    taken: Mapping[str, Taken],
    after: Served,
) -> list[Record]:
    """A line for each node that was asked; `age` is for how many rounds nothing of it went into the model."""
    rows = []
    for node in nodes:
        outcome, reply = outcomes[node.identity], taken.get(node.identity)
        heard = after.facts["heard"].get(node.identity)
        residual2 = number(after.facts["residuals"].get(node.identity))
        rows.append(
            {
                "round": t,
                "node": node.name,
                "number": node.number,
                "identity": node.identity[:16],
                "outcome": outcome.what,
                "why": outcome.why,
                "applied": reply is not None,
                "seconds": outcome.seconds,
                "up_bytes": outcome.bytes,
                "K": reply.K if reply else None,
                "residual_norm": None if residual2 is None else math.sqrt(residual2),
                "age": None if heard is None else t - heard,
                "incarnation": len(after.met.get(node.identity, [])),
            }
        )
    return rows


def columns_of(metrics: Mapping[str, Any], prefix: str, *known: str) -> Record:
    """The numbers of an evaluation, with names that begin with the prefix, or with another that is known."""
    found = {name: number(value) for name, value in metrics.items()}
    return {
        name if name.startswith((prefix, *known)) else prefix + name: value
        for name, value in found.items()
        if value is not None
    }
