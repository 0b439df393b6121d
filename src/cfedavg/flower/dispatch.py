"""The requests of a round: whom to ask, an order and a load for each node, and replies by a deadline."""

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

POLL = 0.3  # seconds between two looks for replies
PATIENCE = 1.0  # seconds between two looks for nodes


def list_online(grid: Grid, numbers: Numbers) -> list[Node]:
    """Return the nodes that are online, by number. New identities get numbers in the order of their names.

    Without authentication a node has another key, and so is another node, after every restart.
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
    """Return a key by which node 2 comes before node 10.

    >>> sorted(["node10", "node2"], key=_sort_key)
    ['node2', 'node10']
    """
    return [(int(digits or 0), letters) for letters, digits in re.findall(r"(\D*)(\d*)", name)]


@dataclass(frozen=True)
class Channels:
    """How updates and the model travel: the server decides, and each request says so."""

    compressor: Compressor
    compressor_down: Compressor
    feedback: Feedback
    update: str  # "sum" or "mean": line 10 or line 11 of Algorithm 1
    seed: int  # of all random draws

    def downlink(self, layout: Layout) -> Downlink | None:
        """Return the server's way to the clients; None where it broadcasts the whole model."""
        return make_downlink(self.compressor_down, layout)

    def replica(self, layout: Layout) -> ModelReplica | None:
        """Return how copies of the model are kept; None where there are none."""
        return ModelReplica(layout, down.rounds) if (down := self.downlink(layout)) else None


@dataclass
class Dispatcher:
    """Asks nodes and brings their replies. Every node that it meets gets a number in `numbers`."""

    grid: Grid
    form: Form
    federation: str
    numbers: Numbers
    policy: RoundPolicy
    channels: Channels
    told: dict[str, Version] = field(default_factory=dict)  # the version that a node said it holds

    def wait_for_nodes(self) -> list[Node]:
        """Return the nodes that are online, once the policy lets a round start with them."""
        policy, told = self.policy, -1
        end, least = time.monotonic() + policy.deadline, policy.min_nodes
        while not policy.can_start(len(nodes := list_online(self.grid, self.numbers))):
            if len(nodes) != told:
                log(INFO, "waiting for nodes: %d of %d are online", len(nodes), least)
                told = len(nodes)
            if time.monotonic() > end:
                raise InputError(
                    f"`min_nodes` is {least}, but only {len(nodes)} nodes came online within "
                    f"{policy.deadline:g} s: start more, or ask for less"
                )
            time.sleep(PATIENCE)
        return nodes

    def sample(self, now: Round, train_config: ConfigRecord) -> list[Message]:
        """Return messages to as many nodes as are needed, and some more; the model is not packed yet."""
        nodes = self.wait_for_nodes()
        now.needed = self.policy.count_needed(len(nodes))
        config = ConfigRecord({**train_config, "server-round": now.server_round})
        content = RecordDict({"arrays": now.arrays, "config": config})
        chosen = self.policy.choose(nodes, self.channels.seed, now.server_round - 1)
        return [Message(content, dst_node_id=node.id, message_type=MessageType.TRAIN) for node in chosen]

    def pack(self, now: Round, messages: Iterable[Message], state: FederationState) -> list[Message]:
        """Return the requests to nodes that are online, each with a load, an order, and a time to live."""
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
        """Return the version of the model that a node is known to hold."""
        return find_held_version(state.server, identity, self.told.get(identity))

    def exchange(
        self, now: Round, messages: list[Message], state: FederationState
    ) -> Iterator[tuple[Node, Message]]:
        """Send the requests, and yield each reply that comes by the deadline, with the node that was asked.

        A node whose copy cannot follow, since its disk is an older one, say, gets the whole model at once.
        An error need not say whose it is, so a reply is matched by the message that it replies to.
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
        """Send messages; return the nodes asked, by Flower's id of the message."""
        names = list(self.grid.push_messages(messages)) if messages else []
        pairs = zip(names, messages, strict=True)
        return {name: message.metadata.dst_node_id for name, message in pairs if name}

    def _make_request(
        self, now: Round, node: Node, state: FederationState, download: NodeDownload
    ) -> Message:
        """Return the message to a node, and note what the node downloads."""
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
    """Return the name of the record in which a strategy sends the model that it was given."""
    names = [
        name
        for name, record in message.content.array_records.items()
        if record is model
        or (list(record) == list(model) and all(record[name].data == model[name].data for name in model))
    ]
    if len(names) != 1:
        raise InputError(
            "the inner strategy must send each client the model that it was given, as one ArrayRecord"
        )
    return names[0]
