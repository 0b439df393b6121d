"""The requests of a round: whom to ask, and for each an order and what leads it to the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from cfedavg.core.errors import InputError
from cfedavg.federate.server import held_version, request_of
from cfedavg.federate.versions import Version
from cfedavg.flower.array_layout import Form
from cfedavg.flower.averaging import Round
from cfedavg.flower.channels import Channels
from cfedavg.flower.federation_state import FederationState
from cfedavg.flower.loads import Loads, NodeDownload
from cfedavg.flower.nodes import Exchange, Node, Numbers, online, wait_for
from cfedavg.flower.records import NEED_WHOLE, Order, flat, ordered
from cfedavg.flower.round_policy import RoundPolicy


class Asking:
    """Every node that it meets has a number then, in `numbers`."""

    def __init__(
        self,
        grid: Grid,
        form: Form,
        federation: str,
        numbers: Numbers,
        policy: RoundPolicy,
        channels: Channels,
    ) -> None:
        self.grid, self.form, self.federation = grid, form, federation
        self.numbers, self.policy, self.channels = numbers, policy, channels
        self.told: dict[str, Version] = {}  # the version that a node said it holds, where it did

    def own(self, now: Round, train_config: ConfigRecord) -> list[Message]:
        """To as many nodes as are needed, and some more; the model is not packed yet."""
        nodes = wait_for(self.grid, self.numbers, self.policy)
        now.needed = self.policy.count_needed(len(nodes))
        config = ConfigRecord({**train_config, "server-round": now.server_round})
        content = RecordDict({"arrays": now.arrays, "config": config})
        chosen = self.policy.choose(nodes, self.channels.seed, now.server_round - 1)
        return [Message(content, dst_node_id=node.id, message_type=MessageType.TRAIN) for node in chosen]

    def packed(self, now: Round, messages: Iterable[Message], state: FederationState) -> list[Message]:
        """Those to nodes that are there, with what they need of the model, an order, and a time to live."""
        known = {node.id: node for node in online(self.grid, self.numbers)}
        now.loads = loads = Loads(self.form, self.channels, state)
        made = []
        for message in messages:
            node = known.get(message.metadata.dst_node_id)
            if node is None:
                continue
            now.nodes[node.id], now.wanted[node.id] = node, message
            held = self.held(state, node.identity)
            first = held is None and node.identity not in state.clients and node.identity not in self.told
            made.append(self._request(now, node, state, loads.load_for(held, is_first=first)))
        return made

    def held(self, state: FederationState, identity: str) -> Version | None:
        """Return the version of the model that a node is known to hold."""
        return held_version(state.server, identity, self.told.get(identity))

    def answers(
        self, now: Round, messages: list[Message], state: FederationState
    ) -> Iterator[tuple[Node, Message]]:
        """Send, and yield the replies that come by the deadline.

        A node whose copy cannot follow, since its disk is an older one, say, gets the whole model at once.
        """
        exchange, again = Exchange(self.grid, messages, self.policy.deadline), set[int]()
        for node_id, reply in exchange.replies():
            needs_whole = reply.has_error() and reply.error.code == NEED_WHOLE
            if not needs_whole or node_id in again or now.loads is None:
                yield now.nodes[node_id], reply
                continue
            again.add(node_id)
            whole = now.loads.load_for(None, is_first=False)
            exchange.send([self._request(now, now.nodes[node_id], state, whole)])

    def _request(self, now: Round, node: Node, state: FederationState, download: NodeDownload) -> Message:
        """Make the message to a node, and note what it downloads."""
        message = now.wanted[node.id]
        order = self._order(node, _name_of_model(message, now.arrays), state, now.max_norm, download)
        now.add_download(node.id, download._replace(bytes=download.bytes + order.size))
        now.requests[node.id] = Message(
            ordered(message.content, download.load, order),
            dst_node_id=node.id,
            message_type=message.metadata.message_type,
            group_id=str(now.server_round),
            ttl=self.policy.deadline,
        )
        return now.requests[node.id]

    def _order(
        self, node: Node, arrays: str, state: FederationState, max_norm: float, download: NodeDownload
    ) -> Order:
        channels, request = self.channels, request_of(state.server, node.identity)
        replica = channels.replica(self.form.layout)
        return Order(
            federation=self.federation,
            client=node.identity,
            number=node.number,
            generation=request.stamp.generation,
            stamp=request.stamp.number,
            t=request.t,
            mark=flat(request.mark),
            form=self.form.text,
            arrays=arrays,
            compressor=str(channels.compressor),
            feedback=str(channels.feedback),
            update=channels.update,
            seed=channels.seed,
            max_norm=max_norm,
            copy=replica.dtype if replica else "",
            body=download.load.within,
        )


def _name_of_model(message: Message, model: ArrayRecord) -> str:
    """Under which the app expects it."""
    records = message.content.array_records
    names = [name for name, record in records.items() if _same(record, model)]
    if len(names) != 1:
        raise InputError(
            "the inner strategy must send each client the model that it was given, as one ArrayRecord"
        )
    return names[0]


def _same(record: ArrayRecord, model: ArrayRecord) -> bool:
    """Whether a strategy sends the model that it was given."""
    if record is model:
        return True
    return list(record) == list(model) and all(record[name].data == model[name].data for name in model)
