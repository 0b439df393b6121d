"""What is written down of a round: a line for all, as in a simulation, and a line for each node asked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cfedavg.core.run_files import Record, summarise
from cfedavg.federate.versions import Version
from cfedavg.flower.averaging import Outcome, Round
from cfedavg.flower.client_message import number
from cfedavg.flower.federation_state import FederationState, note_of
from cfedavg.flower.loads import NodeDownload
from cfedavg.flower.nodes import Node
from cfedavg.flower.reply_validation import Taken

_UNITS = 1074  # every float is a whole number of 2^-1074


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


def download_columns(downloads: Sequence[NodeDownload], up_bytes: int, gap2: float | None) -> Record:
    """The columns of what came down, as in a simulation; `gap2` is |x - w|^2, None without a copy."""
    down = sum(each.bytes for each in downloads)
    found: Record = {"downlink_bytes": down, "total_bytes": up_bytes + down}
    if gap2 is None:
        return found
    return found | {
        "first_download_bytes": sum(each.bytes for each in downloads if each.is_first),
        "downlink_messages": sum(each.messages for each in downloads),
        "whole_downloads": sum(each.kind == "whole" for each in downloads),
        "copy_gap_norm2": gap2,
    }


def node_rows(
    t: int, now: Round, versions: Mapping[str, Version | None], after: FederationState
) -> list[Record]:
    """A line for each node that was asked to train."""
    return [_node_row(t, node, now, versions[node.identity], after) for node in now.nodes.values()]


def _node_row(t: int, node: Node, now: Round, version: Version | None, after: FederationState) -> Record:
    """`age` is for how many rounds nothing of the node went into the model."""
    outcome, reply = now.outcomes[node.identity], now.taken.get(node.identity)
    known, downloads = after.clients.get(node.identity), now.downloads[node.id]
    note = note_of(known) if known else None
    residual2 = note.residual2 if note else None
    return {
        "round": t,
        "node": node.name,
        "number": node.number,
        "identity": node.identity[:16],
        "outcome": outcome.what,
        "why": outcome.why,
        "applied": reply is not None,
        "seconds": outcome.seconds,
        "up_bytes": outcome.bytes,
        "down_bytes": sum(each.bytes for each in downloads),
        "download": " + ".join(each.kind for each in downloads),
        "version": None if version is None else str(version),
        "K": reply.K if reply else None,
        "residual_norm": None if residual2 is None else math.sqrt(residual2),
        "age": None if note is None else t - note.heard,
        "incarnation": known.incarnations if known else 0,
    }


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
