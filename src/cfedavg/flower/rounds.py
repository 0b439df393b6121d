"""One round: the nodes asked, their downloads, the outcomes of their requests, and the rows for the files.

The row of a round has a simulation's columns, as far as a server knows them. Each node asked has its own row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.common.logger import log

from cfedavg.core.run_files import Record, summarise
from cfedavg.federate.replica import Broadcaster, ModelReplica, PackedBroadcast
from cfedavg.federate.versions import Version
from cfedavg.flower.array_layout import Form
from cfedavg.flower.federation_state import FederationState, Node
from cfedavg.flower.messages import Body, Load, read_number
from cfedavg.flower.reply_validation import TakenReply
from cfedavg.flower.round_policy import Claims

_UNITS = 1074  # every float is an integer times 2^-1074


class NodeDownload(NamedTuple):
    """The download of one node: the packed body, the broadcast's kind and messages, and the bytes."""

    load: Load
    kind: str  # "chain", "changes" or "whole"
    messages: int
    bytes: int
    is_first: bool  # whether the server knows of no earlier download


class Loads:
    """The packed bodies that give nodes the model of `state`: one load for each version that nodes hold."""

    def __init__(self, form: Form, replica: ModelReplica | None, state: FederationState) -> None:
        primary = state.server.primary
        self._whole = form.shorten(state.whole) if replica and replica.rounds_values else state.whole
        self._broadcaster = Broadcaster(primary, replica) if primary and replica else None
        self._model = PackedBroadcast("whole", 0, b"" if self._broadcaster else state.server.x.tobytes())
        self._made: dict[PackedBroadcast, Load] = {}

    def load_for(self, held: Version | None, *, is_first: bool) -> NodeDownload:
        """Return the download of a node that holds version `held`; the whole model if `held` is None."""
        packed = self._broadcaster.broadcast_to(held) if self._broadcaster else self._model
        if packed not in self._made:
            self._made[packed] = Load(Body(packed.data, self._whole))
        load = self._made[packed]
        return NodeDownload(load, packed.kind, packed.messages, load.size, is_first)


class Outcome(NamedTuple):
    """How a request ended (replied, late, lost, or why rejected), with the reason, time and size."""

    what: str
    why: str
    seconds: float | None
    bytes: int


@dataclass
class Round:
    """A round in progress: the nodes asked, the number of replies needed, and the outcomes."""

    server_round: int  # as Flower counts, from 1
    arrays: ArrayRecord
    began: float
    nodes: dict[int, Node] = field(default_factory=dict)  # those asked, by Flower's id
    wanted: dict[int, Message] = field(default_factory=dict)  # the strategy's message to each
    requests: dict[int, Message] = field(default_factory=dict)  # the request sent to each
    loads: Loads | None = None
    downloads: dict[int, list[NodeDownload]] = field(default_factory=dict)  # two if a model copy did not fit
    max_norm: float = math.inf
    before: Claims = field(default_factory=Claims)  # of earlier rounds
    needed: int = 0
    taken: dict[str, TakenReply] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    online: set[str] = field(default_factory=set)  # the nodes online at the round's end
    train_metrics: MetricRecord | None = None  # as the inner strategy aggregated them

    @property
    def in_order(self) -> list[TakenReply]:
        """The replies sorted by node number, so that their sum does not depend on when they arrive."""
        return sorted(self.taken.values(), key=lambda taken: taken.node.number)

    @property
    def claims(self) -> Claims:
        """The claims of the replies `in_order`, capped so that no single client decides the model."""
        taken = self.in_order
        steps, samples = [each.K or 0.0 for each in taken], [each.samples or 0.0 for each in taken]
        return Claims(steps, samples).cap(self.before)

    def make_void(self, why: str) -> None:
        """Keep all replies out of the model, and note the reason `why`."""
        log(WARNING, why)
        for who in self.taken:
            self.outcomes[who] = self.outcomes[who]._replace(why=why)
        self.taken.clear()

    def leave_out(self, who: str, cause: str, why: str) -> None:
        """Reject the taken reply of node `who` after a comparison with the other replies."""
        log(WARNING, "%s: %s (%s)", self.taken.pop(who).node.name, cause, why)
        self.outcomes[who] = self.outcomes[who]._replace(what=cause, why=why)


class Residuals:
    """The mean norms of all residuals. The sums are exact, so a round need not add all residuals again."""

    def __init__(self, norms2: Iterable[float | None]) -> None:
        self._norms2 = self._norms = 0  # in units of 2^-1074
        for each in norms2:
            self.change(None, each)

    def change(self, before: float | None, after: float | None) -> None:
        """Replace one client's |residual|^2 `before` by `after`; None means that it is unknown."""
        for norm2, sign in ((before, -1), (after, 1)):
            if norm2 is not None:
                self._norms2 += sign * _in_units(norm2)
                self._norms += sign * _in_units(math.sqrt(norm2))

    def columns(self, m: int) -> Record:
        """Return the means over `m` clients, as columns of a row."""
        totals = {"error_norm2": self._norms2, "error_norm": self._norms}
        return {name: total / 2**_UNITS / m for name, total in totals.items()}


def _in_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator << (_UNITS + 1 - denominator.bit_length())


def make_round_row(now: Round, d: int, residuals: Record, gap2: float | None) -> Record:
    """Return the row of a round; `gap2` is |x - model copy|^2, or None if clients keep no model copy."""
    taken = now.in_order
    found = summarise([each.reply for each in taken], 0 if taken else 1, d, mean_g2=0.0)
    if not all(each.K for each in taken):  # an unchanged client does not report its local steps
        found |= dict.fromkeys(("local_steps_min", "local_steps_mean", "local_steps_max"))
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value):
            found[name] = None
    up = sum(outcome.bytes for outcome in now.outcomes.values())
    counted = Counter(outcome.what for outcome in now.outcomes.values())
    return {
        "round": now.server_round - 1,
        **found,
        "uplink_bytes": up,
        "clients": len(now.outcomes),
        "lost": len(now.outcomes) - len(taken),
        **residuals,
        "simulated_seconds": None,
        "outcomes": dict(sorted(counted.items())),
        **_download_columns([each for of_node in now.downloads.values() for each in of_node], up, gap2),
    }


def _download_columns(downloads: Sequence[NodeDownload], up_bytes: int, gap2: float | None) -> Record:
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


def make_node_row(node: Node, now: Round, version: Version | None, after: FederationState) -> Record:
    """Return the row of a node; `age` is the number of rounds since the node's last update in the model."""
    outcome, reply = now.outcomes[node.identity], now.taken.get(node.identity)
    known, downloads = after.clients.get(node.identity), now.downloads[node.id]
    residual2, t = known.note.residual2 if known else None, now.server_round - 1
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
        "age": t - known.note.heard if known else None,
        "incarnation": known.incarnations if known else 0,
    }


def make_columns(metrics: Mapping[str, Any], prefix: str, *known: str) -> Record:
    """Return an evaluation's numbers as columns of a row.

    A name gets `prefix`, unless it begins with `prefix` or one of `known`. A name that cannot be printed
    becomes no column, since a report would refuse the name.
    """
    found = {name: read_number(value) for name, value in metrics.items()}
    return {
        name if name.startswith((prefix, *known)) else prefix + name: value
        for name, value in found.items()
        if value is not None and name.isprintable()
    }
