"""The requests of a round: choose nodes, send each node its request, and collect replies by a deadline."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from cfedavg.channel import Downlink, make_downlink
from cfedavg.compress import Compressor
from cfedavg.core.errors import InputError
from cfedavg.core.layout import Layout
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.server import find_held_version, make_request
from cfedavg.federate.versions import Version
from cfedavg.feedback import Feedback
from cfedavg.flower.array_layout import Form
from cfedavg.flower.federation_state import FederationState, Node, Numbers
from cfedavg.flower.messages import NEED_WHOLE, Order, in_a_line, pack_request
from cfedavg.flower.round_policy import RoundPolicy
from cfedavg.flower.rounds import Loads, NodeDownload, Round

POLL = 0.3  # seconds between two checks for replies
PATIENCE = 1.0  # seconds between two checks for nodes


def list_online(grid: Grid, numbers: Numbers) -> list[Node]:
    """Return the online nodes, sorted by number. New nodes get numbers in the order of their names.

    Without authentication, a node has a new key after every restart, and so counts as a new node.
    """
    found = {}
    for info in grid.get_nodes():
        identity = hashlib.sha256(info.public_key or str(info.node_id).encode()).hexdigest()
        found[identity] = (info.node_id, in_a_line(info.name))
    new = [(_sort_key(name), identity) for identity, (_, name) in found.items() if identity not in numbers]
    for _, identity in sorted(new):
        numbers.of(identity)
    nodes = [Node(node, who, numbers.of(who), name or who[:8]) for who, (node, name) in found.items()]
    return sorted(nodes, key=lambda node: node.number)


def _sort_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "node2" before "node10".

    >>> sorted(["node10", "node2"], key=_sort_key)
    ['node2', 'node10']
    """
    return [(int(digits or 0), letters) for letters, digits in re.findall(r"(\D*)(\d*)", name)]


@dataclass(frozen=True)
class Channels:
    """The server's options for updates and broadcasts; each request holds those that a client needs."""

    compressor: Compressor
    compressor_down: Compressor
    feedback: Feedback
    update: str  # "sum" or "mean": line 10 or line 11 of Algorithm 1
    seed: int  # of all random draws

    def downlink(self, layout: Layout) -> Downlink | None:
        """Return the channel that compresses broadcasts, or None if the whole model is broadcast."""
        return make_downlink(self.compressor_down, layout)

    def replica(self, layout: Layout) -> ModelReplica | None:
        """Return the operations on clients' model copies, or None if the whole model is broadcast."""
        return ModelReplica(layout, down.rounds_values) if (down := self.downlink(layout)) else None


@dataclass
class Dispatcher:
    """The sender of requests and receiver of replies. Every online node gets a number in `numbers`."""

    grid: Grid
    form: Form
    federation: str
    numbers: Numbers
    policy: RoundPolicy
    channels: Channels
    told: dict[str, Version] = field(default_factory=dict)  # the model version that each node reported

    def wait_for_nodes(self) -> list[Node]:
        """Wait until the policy lets a round start with the online nodes, and return these nodes."""
        policy, told = self.policy, -1
        end, least = time.monotonic() + policy.deadline, policy.min_nodes
        while not policy.can_start(len(nodes := list_online(self.grid, self.numbers))):
            if len(nodes) != told:
                log(INFO, "waiting for nodes: %d of %d are online", len(nodes), least)
                told = len(nodes)
            if time.monotonic() > end:
                raise InputError(
                    f"`min_nodes` is {least}, but only {len(nodes)} nodes came online within "
                    f"{policy.deadline:g} s. Start more nodes, or lower `min_nodes`."
                )
            time.sleep(PATIENCE)
        return nodes

    def sample(self, now: Round, train_config: ConfigRecord) -> list[Message]:
        """Choose nodes to train, and return a message to each; `pack` replaces the model in the messages."""
        nodes = self.wait_for_nodes()
        now.needed = self.policy.count_needed(len(nodes))
        config = ConfigRecord({**train_config, "server-round": now.server_round})
        content = RecordDict({"arrays": now.arrays, "config": config})
        chosen = self.policy.choose(nodes, self.channels.seed, now.server_round - 1)
        return [Message(content, dst_node_id=node.id, message_type=MessageType.TRAIN) for node in chosen]

    def pack(self, now: Round, messages: Iterable[Message], state: FederationState) -> list[Message]:
        """Return a request for each message to an online node, with the packed model and the order."""
        known = {node.id: node for node in list_online(self.grid, self.numbers)}
        now.loads = Loads(self.form, self.channels.replica(self.form.layout), state)
        made = []
        for message in messages:
            node = known.get(message.metadata.dst_node_id)
            if node is None:
                continue
            now.nodes[node.id], now.wanted[node.id] = node, message
            held = self.find_version(state, node.identity)
            first = held is None and node.identity not in state.clients and node.identity not in self.told
            made.append(self._make_request(now, node, state, now.loads.load_for(held, is_first=first)))
        return made

    def find_version(self, state: FederationState, identity: str) -> Version | None:
        """Return the model version that a node is known to hold, or None if none is known."""
        return find_held_version(state.server, identity, self.told.get(identity))

    def exchange(
        self, now: Round, messages: list[Message], state: FederationState
    ) -> Iterator[tuple[Node, Message]]:
        """Send the requests, and yield each reply that comes by the deadline, with the node that was asked.

        If a node's model copy cannot follow the broadcast, the node gets the whole model at once. An error
        reply can lack its node's id, so each reply is matched by the id of its request.
        """
        end, again = time.monotonic() + self.policy.deadline, set[int]()
        waiting = self._push(messages)
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                asked = waiting.pop(reply.metadata.reply_to_message_id, None)
                if asked is None:
                    continue
                needs_whole = reply.has_error() and reply.error.code == NEED_WHOLE
                if not needs_whole or asked in again or now.loads is None:
                    yield now.nodes[asked], reply
                    continue
                again.add(asked)
                whole = now.loads.load_for(None, is_first=False)
                waiting |= self._push([self._make_request(now, now.nodes[asked], state, whole)])
            if time.monotonic() > end:
                return
            if waiting:
                time.sleep(POLL)

    def _push(self, messages: list[Message]) -> dict[str, int]:
        """Send `messages`; return the id of the node asked for each message id of Flower's."""
        names = list(self.grid.push_messages(messages)) if messages else []
        pairs = zip(names, messages, strict=True)
        return {name: message.metadata.dst_node_id for name, message in pairs if name}

    def _make_request(
        self, now: Round, node: Node, state: FederationState, download: NodeDownload
    ) -> Message:
        """Return the request to `node`, and note in `now` what the node downloads."""
        message = now.wanted[node.id]
        order = self._make_order(now, node, state, download)
        download = download._replace(bytes=download.bytes + order.size)
        now.downloads.setdefault(node.id, []).append(download)
        now.requests[node.id] = Message(
            pack_request(message.content, download.load, order),
            dst_node_id=node.id,
            message_type=message.metadata.message_type,
            group_id=str(now.server_round),
            ttl=self.policy.deadline,
        )
        return now.requests[node.id]

    def _make_order(self, now: Round, node: Node, state: FederationState, download: NodeDownload) -> Order:
        channels, request = self.channels, make_request(state.server, node.identity)
        replica, mark = channels.replica(self.form.layout), request.mark
        return Order(
            federation=self.federation,
            client=node.identity,
            number=node.number,
            generation=request.stamp.generation,
            stamp=request.stamp.number,
            t=request.t,
            mark=[*mark.stamp, mark.incarnation, mark.digest] if mark else [],
            form=self.form.text,
            arrays=_find_model(now.wanted[node.id], now.arrays),
            compressor=str(channels.compressor),
            feedback=str(channels.feedback),
            update=channels.update,
            seed=channels.seed,
            max_norm=now.max_norm,
            copy=replica.dtype if replica else "",
            body=download.load.within,
        )


def _find_model(message: Message, model: ArrayRecord) -> str:
    """Return the name of the ArrayRecord in which the strategy's `message` holds `model`."""
    names = [
        name
        for name, record in message.content.array_records.items()
        if record is model
        or (list(record) == list(model) and all(record[name].data == model[name].data for name in model))
    ]
    if len(names) != 1:
        raise InputError(
            f"the inner strategy must send each client the model in one ArrayRecord, got {len(names)} of them"
        )
    return names[0]
