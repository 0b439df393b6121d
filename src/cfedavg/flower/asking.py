"""The requests of a round: whom to ask, and the model, packed, with an order for each of them."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from cfedavg.errors import InputError
from cfedavg.federation.server import request_of
from cfedavg.flower.averaging import Round
from cfedavg.flower.form import Form
from cfedavg.flower.nodes import Node, Numbers, online, wait_for
from cfedavg.flower.policy import RoundPolicy
from cfedavg.flower.records import Order, flat, ordered, packed
from cfedavg.flower.state import FederationState
from cfedavg.flower.uplink import UplinkOptions


class Asking:
    """Every node that it meets has a number then, in `numbers`."""

    def __init__(
        self,
        grid: Grid,
        form: Form,
        federation: str,
        numbers: Numbers,
        policy: RoundPolicy,
        uplink: UplinkOptions,
    ) -> None:
        self.grid, self.form, self.federation = grid, form, federation
        self.numbers, self.policy, self.uplink = numbers, policy, uplink

    def own(self, now: Round, train_config: ConfigRecord) -> list[Message]:
        """To as many nodes as are needed, and some more; the model is not packed yet."""
        nodes = wait_for(self.grid, self.numbers, self.policy)
        now.needed = self.policy.count_needed(len(nodes))
        config = ConfigRecord({**train_config, "server-round": now.server_round})
        content = RecordDict({"arrays": now.arrays, "config": config})
        chosen = self.policy.choose(nodes, self.uplink.seed, now.server_round - 1)
        return [Message(content, dst_node_id=node.id, message_type=MessageType.TRAIN) for node in chosen]

    def packed(self, now: Round, messages: Iterable[Message], state: FederationState) -> list[Message]:
        """Those to nodes that are there, with the model packed, an order, and the round's time to live."""
        known = {node.id: node for node in online(self.grid, self.numbers)}
        model = packed(state.server.x, state.whole)
        size, made = sum(len(array.data) for array in model.values()), []
        for message in messages:
            node = known.get(message.metadata.dst_node_id)
            if node is None:
                continue
            now.nodes[node.id] = node
            order = self._order(node, _name_of_model(message, now.arrays), state, now.max_norm)
            now.down_bytes += size + order.size
            now.requests[node.id] = Message(
                ordered(message.content, model, order),
                dst_node_id=node.id,
                message_type=message.metadata.message_type,
                group_id=str(now.server_round),
                ttl=self.policy.deadline,
            )
            made.append(now.requests[node.id])
        return made

    def _order(self, node: Node, arrays: str, state: FederationState, max_norm: float) -> Order:
        uplink, request = self.uplink, request_of(state.server, node.identity)
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
            compressor=str(uplink.compressor),
            feedback=str(uplink.feedback),
            update=uplink.update,
            seed=uplink.seed,
            max_norm=max_norm,
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
