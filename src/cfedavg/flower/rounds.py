"""One round: the nodes asked, their downloads, the outcomes of their requests, and the rows of metrics.

The row of a round has a simulation's columns, as far as a server knows them. Each node asked has its own row.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, NamedTuple, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.common.logger import log

from cfedavg.compress import Compressor
from cfedavg.core.run_files import Record, summarise
from cfedavg.federate.protocol import Version
from cfedavg.federate.replica import Broadcaster, ModelReplica, PackedBroadcast
from cfedavg.flower.array_layout import Body, Form
from cfedavg.flower.federation_state import FederationState, Node
from cfedavg.flower.options import Claims
from cfedavg.flower.replies import CAUSES, REFUSED, TakenReply, as_list, in_a_line, read_number

SHORT = 32_768  # the most bytes of a body that is a field of the order
Who = TypeVar("Who")


class Load:
    """The packed model in a request, made once for all nodes that get the same bytes.

    `within`: the bytes, if there are at most SHORT. Otherwise, `arrays` holds the bytes.
    """

    def __init__(self, packed: PackedBroadcast, uncompressed: bytes) -> None:
        self.kind, self.messages = packed.kind, packed.messages
        data = Body(packed.data, uncompressed).pack()
        self.size = len(data)
        self.within = data if len(data) <= SHORT else b""
        self.arrays = None if self.within else ArrayRecord({"body": Array(np.frombuffer(data, np.uint8))})


class Loads:
    """The packed models that bring nodes to the model of `state`.

    Nodes whose model copies have the same version share one `Load`.
    """

    def __init__(self, form: Form, replica: ModelReplica | None, state: FederationState) -> None:
        primary = state.server.primary
        self._uncompressed = form.pack(state.uncompressed, short=bool(replica and replica.rounds_values))
        self._broadcaster = Broadcaster(primary, replica) if primary and replica else None
        self._model = PackedBroadcast("whole", 0, b"" if self._broadcaster else state.server.x.tobytes())
        self._made: dict[PackedBroadcast, Load] = {}

    def load_for(self, held: Version | None) -> Load:
        """Return what brings a node from version `held` to the present model; if None, the whole model."""
        packed = self._broadcaster.broadcast_to(held) if self._broadcaster else self._model
        if packed not in self._made:
            self._made[packed] = Load(packed, self._uncompressed)
        return self._made[packed]


class Download(NamedTuple):
    """What a node downloads in a request: the packed model `load`; `bytes` also counts the order."""

    load: Load
    bytes: int
    is_first: bool  # whether the server knows of no earlier download


class Outcome(NamedTuple):
    """How a request ended.

    `what`: replied, late, lost, or the cause of a rejection. `why`: the reason. `seconds`: the time from the
    start of the round to the reply. `bytes`: the size of the reply's message.
    """

    what: str
    why: str
    seconds: float | None
    bytes: int


@dataclass
class Round:
    """A round in progress: the nodes asked, the number of replies needed, and the outcomes."""

    server_round: int  # as Flower counts, from 1
    arrays: ArrayRecord
    loads: Loads
    began: float
    max_norm: float
    compressor: Compressor  # of the updates
    before: Claims = field(default_factory=Claims)  # of earlier rounds
    needed: int = 0
    nodes: dict[int, Node] = field(default_factory=dict)  # the nodes asked, by Flower's id
    wanted: dict[int, Message] = field(default_factory=dict)  # the strategy's message to each node
    requests: dict[int, Message] = field(default_factory=dict)  # the request sent to each node
    downloads: dict[int, list[Download]] = field(default_factory=dict)  # two if a node's copy did not fit
    taken: dict[str, TakenReply] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    online: set[str] = field(default_factory=set)  # the nodes online at the round's end

    @property
    def in_order(self) -> list[TakenReply]:
        """The accepted replies by client number, so that their sum does not depend on when they arrive."""
        return sorted(self.taken.values(), key=lambda taken: taken.node.number)

    @property
    def claims(self) -> Claims:
        """The local steps (or their lengths) and examples that clients claim, in the order of `in_order`.

        Claims are capped, so that no single client decides the model.
        """
        taken = self.in_order
        steps = [each.divisor or 0.0 for each in taken]
        samples = [each.samples or 0.0 for each in taken]
        return Claims(steps, samples).cap(self.before)

    def make_void(self, why: str) -> None:
        """Discard all replies, so that the round does not change the model, and note the reason `why`."""
        log(WARNING, why)
        for who in self.taken:
            self.outcomes[who] = self.outcomes[who]._replace(why=why)
        self.taken.clear()

    def leave_out(self, who: str, cause: str, why: str) -> None:
        """Reject the accepted reply of node `who`, because it is too unlike the other replies."""
        log(WARNING, "%s: %s (%s)", self.taken.pop(who).node.name, cause, why)
        self.outcomes[who] = self.outcomes[who]._replace(what=cause, why=why)


class ServerAge:
    """The nodes that refused or replied since the start: they show if the server's state is an older copy."""

    def __init__(self) -> None:
        self.ahead, self.in_step = set[str](), set[str]()  # nodes that have refused; that have replied

    def is_older(self, now: Round, in_model: Collection[str], everyone: int) -> bool:
        """Return whether enough nodes have refused requests to prove that the state is an older copy.

        A node that took part in later rounds refuses the requests of an older copy; other nodes reply. One
        node may be wrong, or may lie under a new name in each round. So at least two online nodes must have
        refused (one, if `everyone`, the number of nodes, is 1). Also, more nodes must have refused than
        replied. Both are counted among the nodes `in_model`, whose updates were aggregated. If none of these
        has replied, both may instead be counted among all nodes.
        """
        self.in_step |= {who for who, outcome in now.outcomes.items() if outcome.what == "replied"}
        refused = {who for who, outcome in now.outcomes.items() if outcome.what == CAUSES[REFUSED]}
        self.ahead = (refused | self.ahead & now.online) - self.in_step
        known = {who for who in self.ahead | self.in_step if who in in_model}
        groups = [known] if known & self.in_step else [known, self.ahead | self.in_step]
        least = min(2, everyone)
        return any(len(group & self.ahead) >= max(least, len(group & self.in_step) + 1) for group in groups)


def make_round_row(now: Round, d: int, residuals: Record, gap2: float | None) -> Record:
    """Return a round's row of metrics.

    `d`: the number of values that a client compresses. `residuals`: the columns of the residual norms.
    `gap2`: |x - model copy|^2, or None if clients keep no model copy.
    """
    taken, outcomes = now.in_order, now.outcomes.values()
    found = summarise([each.reply for each in taken], 0 if taken else 1, d, mean_g2=0.0)
    if not all(each.K for each in taken):  # an unchanged client does not report its local steps
        found |= dict.fromkeys(("local_steps_min", "local_steps_mean", "local_steps_max"))
    for name, value in found.items():
        if isinstance(value, float) and not math.isfinite(value):
            found[name] = None
    downloads = [each for of_node in now.downloads.values() for each in of_node]
    up, down = sum(each.bytes for each in outcomes), sum(each.bytes for each in downloads)
    row = {
        "round": now.server_round - 1,
        **found,
        "uplink_bytes": up,
        "clients": len(outcomes),
        "lost": len(outcomes) - len(taken),
        **residuals,
        "simulated_seconds": None,
        "outcomes": dict(sorted(Counter(each.what for each in outcomes).items())),
        "downlink_bytes": down,
        "total_bytes": up + down,
    }
    if gap2 is not None:
        row |= {
            "first_download_bytes": sum(each.bytes for each in downloads if each.is_first),
            "downlink_messages": sum(each.load.messages for each in downloads),
            "whole_downloads": sum(each.load.kind == "whole" for each in downloads),
            "copy_gap_norm2": gap2,
        }
    return row


def make_node_row(node: Node, now: Round, version: Version | None, after: FederationState) -> Record:
    """Return a node's row of metrics for the round `now`; `version` is that of its model copy.

    The column `age` is the number of rounds since the node's last aggregated update.
    """
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
        "download": " + ".join(each.load.kind for each in downloads),
        "version": None if version is None else str(version),
        "K": reply.K if reply else None,
        "residual_norm": None if residual2 is None else math.sqrt(residual2),
        "age": t - known.note.heard if known else None,
        "incarnation": known.incarnations if known else 0,
    }


def describe_kind(metrics: Mapping[str, MetricRecord], arrays: str = "") -> frozenset[str]:
    """Return the kind of a reply: the names of its records and metrics, with the lengths of lists.

    Only replies of the same kind can be averaged. A metric that is NaN or Inf makes another kind, since the
    mean over all replies would not be finite.
    """
    found = {f"the ArrayRecord {arrays!r}"} if arrays else set()
    for name, record in metrics.items():
        where = "" if name == "metrics" else f" in {name!r}"
        found.add(f"the MetricRecord {name!r}")
        for key, value in record.items():
            values = as_list(value)
            kind = f"the list {key!r} of {len(values)}" if isinstance(value, list) else f"the number {key!r}"
            found.add(kind + ("" if all(map(math.isfinite, values)) else " (not finite)") + where)
    return frozenset(found)


def find_odd_ones(kinds: Mapping[Who, frozenset[str]], turn: int) -> dict[Who, str]:
    """Return the nodes whose kind of reply differs from the most common kind, and how each differs.

    `kinds`: the kind of each node's reply, from `describe_kind`. A strategy cannot average replies of
    different kinds. If several kinds are equally common, the number `turn` selects one of them.
    """
    counted = Counter(kinds.values())
    most = max(counted.values(), default=0)
    common = sorted((kind for kind, count in counted.items() if count == most), key=sorted)
    usual = common[turn % len(common)] if common else frozenset()
    found = {}
    for who, kind in kinds.items():
        if kind != usual:
            parts = [f"lacks {each}" for each in sorted(usual - kind)[:1]]
            parts += [f"has {each}" for each in sorted(kind - usual)[:1]]
            found[who] = in_a_line(f"it {' and '.join(parts)}, unlike other nodes")
    return found


def make_columns(metrics: Mapping[str, Any], prefix: str, *known: str) -> Record:
    """Return the numbers of an evaluation as columns of a row of metrics.

    `prefix` is put before each metric's name, unless the name begins with `prefix` or one of `known`. A
    metric whose name cannot be printed is left out, since a report would refuse the name.
    """
    found = {name: read_number(value) for name, value in metrics.items()}
    return {
        name if name.startswith((prefix, *known)) else prefix + name: value
        for name, value in found.items()
        if value is not None and name.isprintable()
    }


def describe_row(row: Record) -> str:
    """Return a summary of a round's row of metrics in words, for the log."""
    parts = [f"{row['clients'] - row['lost']} of {row['clients']} taken"]
    parts += [f"{cause} {count}" for cause, count in row["outcomes"].items() if cause != "replied"]
    parts.append(f"{row['uplink_bytes']:,} bytes up, {row['downlink_bytes']:,} down")
    if "test_accuracy" in row:
        parts.append(f"accuracy {row['test_accuracy']:.2%}")
    return ", ".join(parts)
