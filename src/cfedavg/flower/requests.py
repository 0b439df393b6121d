"""A request on its way from the server to a client: choose nodes, pack the model, send, collect replies.

A request holds an order (the server's instructions) and a body (the bytes from which a client makes the
model). A short body is a field of the order, because Flower sends an array in extra requests, whose signed
headers alone are longer than a client's reply. A long body is an array, because Flower stores an array only
once for all nodes that get the same body.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from numpy.typing import NDArray

from cfedavg.core.errors import InputError
from cfedavg.federate.protocol import Broadcast, Mark, Request, Stamp, Version
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.server import find_held_version, make_request
from cfedavg.flower import replies
from cfedavg.flower.array_layout import Body, Form
from cfedavg.flower.federation_state import FederationState, Node
from cfedavg.flower.nodes import OnlineNodes
from cfedavg.flower.options import Parts, RoundPolicy
from cfedavg.flower.replies import OURS, Rejected, ReplyValidator, measure_reply
from cfedavg.flower.rounds import Download, Load, Outcome, Round

POLL = 0.3  # seconds between two checks for replies
PATIENCE = 1.0  # seconds between two checks for nodes


def make_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return a Flower ArrayRecord with a copy of each array."""
    return ArrayRecord({name: Array(np.array(array)) for name, array in arrays.items()})


@dataclass(frozen=True)
class Order:
    """The server's instructions to a client, besides the model and the user's own configuration."""

    federation: str
    folder: str  # in a simulation: the server's folder, which also holds the clients' states; else empty
    client: str  # the node's identity: see `OnlineNodes`
    number: int  # of the client; it determines the client's random draws
    generation: int  # with `stamp`: the stamp that names this request
    stamp: int
    t: int
    mark: list[int]  # names the client's last aggregated reply; empty if there is none
    form: str
    arrays: str  # the name of the record with the model
    compressor: str
    feedback: str
    update: str
    seed: int
    max_norm: float  # of a payload; infinite if there is no bound
    copy: str  # the dtype of the clients' model copies; empty if broadcasts are not compressed
    body: bytes  # empty if the body is an array

    @property
    def size(self) -> int:
        """The order's bytes in a deployment, without the body: one for each character, eight for a number."""
        values = [getattr(self, item.name) for item in fields(self) if item.name not in ("body", "folder")]
        return sum(
            len(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, list) else 8
            for value in values
        )

    def request(self, broadcast: Broadcast | None) -> Request:
        """Return the protocol's Request, made from this order and `broadcast`."""
        mark = Mark(Stamp(*self.mark[:2]), *self.mark[2:]) if self.mark else None
        return Request(Stamp(self.generation, self.stamp), self.t, mark, broadcast)


def read_order(message: Message) -> Order | None:
    """Return the server's order in a message, or None if there is none.

    Raise InputError if the order has the fields of another version of cfedavg.
    """
    record = message.content.config_records.get(OURS)
    if not record:
        return None
    if record.keys() != {item.name for item in fields(Order)}:
        raise InputError("server and node have different cfedavg versions: install the same version on both")
    return Order(**dict(record))  # type: ignore[arg-type]


def read_body(content: RecordDict, order: Order) -> Body:
    """Return the body of a request, which is in the order or an array; raise InputError if it is damaged."""
    if order.body:
        return Body.unpack(order.body)
    record: Mapping[str, Array] = content.array_records.get(order.arrays, {})
    if set(record) != {"body"}:
        raise InputError("the request is damaged: the body with the model is missing")
    return Body.unpack(record["body"].numpy().tobytes())


@dataclass
class Dispatcher:
    """The sender of requests and receiver of replies."""

    grid: Grid
    nodes: OnlineNodes
    folder: str  # the federation's folder, absolute
    form: Form
    replica: ModelReplica | None
    federation: str
    policy: RoundPolicy
    parts: Parts
    reported: dict[str, Version] = field(default_factory=dict)  # of each node's model copy, by its last reply

    def sample(self, now: Round, train_config: ConfigRecord) -> list[Message]:
        """Choose the nodes that train in round `now`, and return a message with the model to each node.

        `pack` later replaces the model in the messages by packed bytes.
        """
        nodes = self._wait_for_nodes()
        now.needed = self.policy.count_needed(len(nodes))
        config = ConfigRecord({**train_config, "server-round": now.server_round})
        content = RecordDict({"arrays": now.arrays, "config": config})
        chosen = self.policy.choose(nodes, self.parts.seed, now.server_round - 1)
        return [Message(content, dst_node_id=node.id, message_type=MessageType.TRAIN) for node in chosen]

    def _wait_for_nodes(self) -> list[Node]:
        """Wait until enough nodes are online for the policy to start a round; return the online nodes."""
        policy, logged = self.policy, -1
        end, least = time.monotonic() + policy.deadline, policy.min_nodes
        while True:
            self.nodes.identify(MessageType.TRAIN, policy.deadline)
            if policy.can_start(len(nodes := self.nodes.find())):
                return nodes
            if len(nodes) != logged:
                log(INFO, "waiting for nodes: %d of %d are online", len(nodes), least)
                logged = len(nodes)
            if time.monotonic() > end:
                raise InputError(
                    f"`min_nodes` is {least}, but only {len(nodes)} nodes came online within "
                    f"{policy.deadline:g} s. Start more nodes, or lower `min_nodes`."
                )
            time.sleep(PATIENCE)

    def pack(self, now: Round, messages: Iterable[Message], state: FederationState) -> list[Message]:
        """Turn each message to an online node into a request, with the packed model and the order."""
        wanted, made = list(messages), []
        if wanted:
            self.nodes.identify(wanted[0].metadata.message_type, self.policy.deadline)
        known = {node.id: node for node in self.nodes.find()}
        for message in wanted:
            node = known.get(message.metadata.dst_node_id)
            if node is None:
                continue
            now.nodes[node.id], now.wanted[node.id] = node, message
            held = self.find_version(state, node.identity)
            is_known = node.identity in state.clients or node.identity in self.reported
            is_first = held is None and not is_known
            made.append(self._make_request(now, node, state, now.loads.load_for(held), is_first=is_first))
        now.needed = now.needed or len(now.nodes)  # a strategy may ask one node twice
        return made

    def find_version(self, state: FederationState, identity: str) -> Version | None:
        """Return the version of the model copy that the node `identity` holds, or None if it is unknown."""
        return find_held_version(state.server, identity, self.reported.get(identity))

    def exchange(
        self, now: Round, messages: list[Message], state: FederationState
    ) -> Iterator[tuple[Node, Message]]:
        """Send the requests, and yield each reply that comes by the deadline, with the node that was asked.

        If a broadcast does not fit a node's model copy, the node gets the whole model at once. An error reply
        can lack the id of its node. So the id of the request tells which node a reply is from.
        """
        end, again = time.monotonic() + self.policy.deadline, set[int]()
        waiting = self._push(messages)
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                asked = waiting.pop(reply.metadata.reply_to_message_id, None)
                if asked is None:
                    continue
                needs_whole = reply.has_error() and reply.error.code == replies.NEED_WHOLE
                if not needs_whole or asked in again:
                    yield now.nodes[asked], reply
                    continue
                again.add(asked)
                whole = now.loads.load_for(None)
                waiting |= self._push([self._make_request(now, now.nodes[asked], state, whole)])
            if time.monotonic() > end:
                return
            if waiting:
                time.sleep(POLL)

    def collect(
        self, now: Round, messages: list[Message], state: FederationState, validator: ReplyValidator
    ) -> None:
        """Send the requests, accept replies until the policy ends the round, note how each request ended."""
        asked = {node.identity for node in now.nodes.values()}
        for node, reply in self.exchange(now, messages, state):
            facts = time.monotonic() - now.began, measure_reply(reply)
            try:
                now.taken[node.identity] = validator.take(reply, node, state.server, asked, now.taken)
                now.outcomes[node.identity] = Outcome("replied", "", *facts)
            except Rejected as rejected:
                why = str(rejected)
                if rejected.cause == replies.FAILED and node.identity not in state.clients:
                    why += f"; does the node's ClientApp have {replies.MODS}?"
                if node.identity not in now.taken:  # else asked twice, and its other reply is accepted
                    now.outcomes[node.identity] = Outcome(rejected.cause, why, *facts)
                log(WARNING, "%s: %s (%s)", node.name, rejected.cause, why)
            if self.policy.has_enough(len(now.taken), now.needed):
                break
        now.online = {node.identity for node in self.nodes.find()}
        enough = self.policy.has_enough(len(now.taken), now.needed)
        for node in now.nodes.values():
            online = node.identity in now.online
            missing = self.policy.classify_missing(is_online=online, has_enough=enough)
            now.outcomes.setdefault(node.identity, Outcome(*missing, None, 0))

    def _push(self, messages: list[Message]) -> dict[str, int]:
        """Send `messages`; return a dict from the id of each message to the id of its node."""
        names = list(self.grid.push_messages(messages)) if messages else []
        pairs = zip(names, messages, strict=True)
        return {name: message.metadata.dst_node_id for name, message in pairs if name}

    def _make_request(
        self, now: Round, node: Node, state: FederationState, load: Load, *, is_first: bool = False
    ) -> Message:
        """Return the request to `node`, and note in `now` what the node downloads.

        The request is the strategy's message, in which `load`, the packed model, replaces the model, and to
        which the order is added.
        """
        wanted, order = now.wanted[node.id], self._make_order(now, node, state, load)
        now.downloads.setdefault(node.id, []).append(Download(load, load.size + order.size, is_first))
        content = {name: record for name, record in wanted.content.items() if name != order.arrays}
        if load.arrays is not None:
            content[order.arrays] = load.arrays
        now.requests[node.id] = Message(
            RecordDict({**content, OURS: ConfigRecord(asdict(order))}),
            dst_node_id=node.id,
            message_type=wanted.metadata.message_type,
            group_id=str(now.server_round),
            ttl=self.policy.deadline,
        )
        return now.requests[node.id]

    def _make_order(self, now: Round, node: Node, state: FederationState, load: Load) -> Order:
        request = make_request(state.server, node.identity)
        mark = request.mark
        return Order(
            federation=self.federation,
            folder=self.folder if self.nodes.simulated else "",
            client=node.identity,
            number=node.number,
            generation=request.stamp.generation,
            stamp=request.stamp.number,
            t=request.t,
            mark=[*mark.stamp, mark.incarnation, mark.digest] if mark else [],
            form=self.form.text,
            arrays=_find_model(now.wanted[node.id], now.arrays),
            compressor=str(now.compressor),
            feedback=str(self.parts.feedback),
            update=self.parts.update,
            seed=self.parts.seed,
            max_norm=now.max_norm,
            copy=self.replica.dtype if self.replica else "",
            body=load.within,
        )


def _find_model(message: Message, model: ArrayRecord) -> str:
    """Return the name of the ArrayRecord with `model` in the strategy's `message`."""
    names = [
        name
        for name, record in message.content.array_records.items()
        if record is model
        or (list(record) == list(model) and all(record[name].data == model[name].data for name in model))
    ]
    if len(names) != 1:
        raise InputError(
            "the inner strategy must send each client the model in one ArrayRecord, "
            f"got {len(names)} ArrayRecords with the model"
        )
    return names[0]
