"""What is written down of a round: a line for all, as in a simulation, and a line for each node asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cfedavg.flower.nodes import Node
from cfedavg.flower.parcel import number
from cfedavg.flower.state import FederationState, note_of
from cfedavg.flower.taking import Taken
from cfedavg.metrics import Record, summarise

_UNITS = 1074  # every float is a whole number of 2^-1074


class Outcome(NamedTuple):
    """What came of a request: replied, late, lost, or the cause of a rejection; when, in how many bytes."""

    what: str
    why: str
    seconds: float | None
    bytes: int


class Residuals:
    """The mean norms of all residuals. The sums are exact, so that a round only changes what it hears of."""

    def __init__(self, norms2: Iterable[float | None]) -> None:
        self._norms2 = self._norms = 0  # in units
        for each in norms2:
            self.change(None, each)

    def change(self, before: float | None, after: float | None) -> None:
        """What one client says now, instead of what it said before."""
        for norm2, sign in ((before, -1), (after, 1)):
            if norm2 is not None:
                self._norms2 += sign * _in_units(norm2)
                self._norms += sign * _in_units(math.sqrt(norm2))

    def columns(self, m: int) -> Record:
        """As `metrics.residual_norms` has them, of m clients."""
        return {
            "error_norm2": self._norms2 / 2**_UNITS / m,
            "error_norm": self._norms / 2**_UNITS / m,
        }


def _in_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_UNITS + 1 - denominator.bit_length())


def round_row(
    t: int, taken: Sequence[Taken], outcomes: Mapping[str, Outcome], d: int, residuals: Record
) -> Record:
    """The columns of a simulation's line, as far as a server can know them, and how the nodes fared."""
    found = summarise([each.reply for each in taken], 0 if taken else 1, d, mean_g2=0.0)
    if not all(each.K for each in taken):  # unchanged clients do not say how many steps they did
        found |= dict.fromkeys(("local_steps_min", "local_steps_mean", "local_steps_max"))
    known = {name: None if _unknown(value) else value for name, value in found.items()}
    counted = Counter(outcome.what for outcome in outcomes.values())
    return {
        "round": t,
        **known,
        "uplink_bytes": sum(outcome.bytes for outcome in outcomes.values()),
        "clients": len(outcomes),
        "lost": len(outcomes) - len(taken),
        **residuals,
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
    after: FederationState,
) -> list[Record]:
    """A line for each node that was asked; `age` is for how many rounds nothing of it went into the model."""
    rows = []
    for node in nodes:
        outcome, reply = outcomes[node.identity], taken.get(node.identity)
        known = after.clients.get(node.identity)
        note = note_of(known) if known else None
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
                "residual_norm": None
                if note is None or note.residual2 is None
                else math.sqrt(note.residual2),
                "age": None if note is None else t - note.heard,
                "incarnation": known.incarnations if known else 0,
            }
        )
    return rows


def columns_of(metrics: Mapping[str, Any], prefix: str, *known: str) -> Record:
    """Return the numbers of an evaluation, by names that begin with the prefix or with one of `known`.

    A report refuses a name that cannot be printed, so it becomes no column.
    """
    found = {name: number(value) for name, value in metrics.items()}
    return {
        name if name.startswith((prefix, *known)) else prefix + name: value
        for name, value in found.items()
        if value is not None and name.isprintable()
    }
