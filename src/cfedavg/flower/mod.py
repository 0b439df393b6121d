"""The client mod, which makes an unchanged Flower client send compressed updates with error feedback.

The mod updates the node's model copy, and gives the model to the app as the arrays that the app expects. The
mod takes the trained arrays from the app's reply, and sends the compressed update instead. The residual and
the model copy are on the node's disk, since Flower handles every message in a new process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.logger import log

from cfedavg.algorithm import local_update
from cfedavg.channel import Channel, TooLarge
from cfedavg.compress import Stage, parse
from cfedavg.core.arrays import Array, cast_like, norm2
from cfedavg.core.errors import Busy, InputError, NotFinite
from cfedavg.core.parts import Part
from cfedavg.federate import client as machine
from cfedavg.federate.client import MOST_FACTS, Client, NeedWhole, Outdated, Refuse, Resend, Uplink
from cfedavg.federate.protocol import Broadcast, Request, Stamp, find_fault_in_stamp, unpack
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.stores import ClientStore
from cfedavg.feedback import FEEDBACKS, Feedback
from cfedavg.flower import replies
from cfedavg.flower.array_layout import Form
from cfedavg.flower.nodes import answer_question, is_question, state_folder
from cfedavg.flower.replies import OURS, ReplyRecord, pack_reply, read_number
from cfedavg.flower.requests import Order, make_record, read_body, read_order
from cfedavg.wire import WireError

STEPS = "local-steps"  # the metric by which a client app reports its number of local steps
LENGTH = "step-length"  # and FedNova's normaliser of these steps, if it is not their number
MOST_METRICS = MOST_FACTS - 1024  # the most bytes of an app's metrics; other facts need the rest


def compressed(
    message: Message, context: Context, call_next: ClientAppCallable, *, own: Collection[type[Part]] = ()
) -> Message:
    """Compress the updates that a client app sends: `ClientApp(mods=[compressed])`.

    Messages from other strategies than CFedAvg pass unchanged. The node keeps its residual in the folder
    `state-dir` of its --node-config, else in $CFEDAVG_STATE. If neither is set, the residual is in Flower's
    own folder, and that of a simulated client in the server's folder. The app may report its number of local
    steps as the metric `local-steps`; `update` "mean" and "fednova" need this metric. With "fednova", an app
    whose optimiser has momentum also reports the normaliser of its steps, as `step-length`.

    The server names the compressor and the feedback. For safety, the mod never imports code that a server
    names. If the server uses classes of your own, list them: `mods=[partial(compressed, own=[MySelector])]`.
    """
    if is_question(message):
        return answer_question(message, context)
    try:
        order = read_order(message)
    except InputError as error:
        return _refuse(replies.OTHER_VERSION, error, message)
    if order is None:
        return call_next(message, context)
    try:
        return _Exchange(message, context, order, own).reply(call_next)
    except _Refusal as refusal:
        return _refuse(refusal.code, refusal, message)
    except Busy as error:  # a restarted server may ask again while the node still works
        return _refuse(replies.BUSY, error, message)
    except InputError as error:
        return _refuse(replies.BAD_STATE, error, message)


class _Refusal(Exception):
    """The error of a node that sends an error code and the reason to the server instead of an update."""

    def __init__(self, code: int, why: object) -> None:
        super().__init__(str(why))
        self.code = code


def _refuse(code: int, why: Exception, request: Message) -> Message:
    log(WARNING, "this node sends no update: %s", why)
    return Message(Error(code, str(why)), reply_to=request)


class _Exchange:
    """The handling of one request, to train or to evaluate, from its arrival to the reply."""

    def __init__(self, message: Message, context: Context, order: Order, own: Collection[type[Part]]) -> None:
        self.message, self.context, self.order, self.own = message, context, order, own
        self.form = Form.from_text(order.form)
        layout = self.form.layout
        self.replica = ModelReplica(layout, rounds_values=order.copy == "int16")
        self.body = read_body(message.content, order)
        size, found = self.form.count_bytes(short=self.replica.rounds_values), len(self.body.uncompressed)
        if found != size:
            raise InputError(
                f"the request is damaged: its uncompressed arrays must have {size} bytes, got {found}"
            )
        if not order.copy and len(self.body.broadcast) != 4 * layout.d:
            raise InputError(f"the request is damaged: its vector x must have {layout.d} float32 values")
        folder = state_folder(context, order.federation, order.folder)
        self.store = ClientStore(folder, order.federation, order.client, layout, self.replica.dtype)

    def reply(self, call_next: ClientAppCallable) -> Message:
        """Return the reply to the request.

        An InputError that the app raises becomes a RuntimeError, because the mod reports an InputError as a
        damaged state of the node.
        """

        def run_app() -> Message:
            try:
                return call_next(self.message, self.context)
            except InputError as error:
                raise RuntimeError(str(error)) from error

        if self.message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return self._evaluate(run_app)
        with self.store.lock():
            return self._train(run_app)

    @cached_property
    def broadcast(self) -> Broadcast | None:
        """The broadcast that updates this node's model copy, or None if broadcasts are not compressed."""
        try:
            return unpack(self.body.broadcast) if self.order.copy else None
        except WireError as error:
            raise InputError(f"the request is damaged: {error}") from None

    @property
    def request(self) -> Request:
        return self.order.request(self.broadcast)

    def _check(self, action: Any) -> None:
        """Raise _Refusal if `action`, the decision of the protocol, is to send no update."""
        if isinstance(action, Refuse):
            raise _Refusal(replies.REFUSED, action.why)
        if isinstance(action, NeedWhole):
            raise _Refusal(replies.NEED_WHOLE, "the broadcast does not fit this node's model copy")

    def _give_model(self, client: Client | None, feedback: Feedback | None = None) -> Array:
        """Put the model's arrays into the request, and remove the server's order, as the app expects.

        Return the vector x of the compressed arrays. If the app trains, `feedback` may move x.
        """
        if client is None or client.copy is None or not self.order.copy:
            x = np.frombuffer(self.body.broadcast, np.float32)
        else:
            x = self.replica.model(client.copy.w)
        if client is not None and feedback is not None:
            x = cast_like(feedback.start(x, client.memory, None), x)
        uncompressed = self.form.unpack(self.body.uncompressed, short=self.replica.rounds_values)
        content = self.message.content
        content[self.order.arrays] = make_record(self.form.join(x, uncompressed))
        del content[OURS]
        return x

    def _evaluate(self, run_app: Callable[[], Message]) -> Message:
        """Let the app evaluate the model; add the version of this node's model copy to the app's reply."""
        if self.broadcast is None:
            self._give_model(None)
            return run_app()
        if why := find_fault_in_stamp(Stamp(self.broadcast.version.generation, 1), time.time()):
            raise _Refusal(replies.FORGED, why)
        with self.store.lock():
            before = self.store.load()
            client, action = machine.catch_up(before, self.broadcast, self.replica)
            if client.copy is not before.copy:  # store it: the next request need not update it again
                self.store.save(client)
        self._check(action)
        self._give_model(client)
        evaluated = run_app()
        if client.copy is not None and not evaluated.has_error():
            evaluated.content[OURS] = ConfigRecord({"version": list(client.copy.version)})
        return evaluated

    def _train(self, run_app: Callable[[], Message]) -> Message:
        try:
            self.uplink = Uplink(self._make_channel(), self.order.number, self.order.seed)
        except InputError as error:
            raise _Refusal(replies.UNKNOWN_PART, error) from None
        if why := find_fault_in_stamp(self.request.stamp, time.time()):
            raise _Refusal(replies.FORGED, why)
        kept = self.store.load()
        client, action = self._receive(kept)
        if client.forgotten > kept.forgotten:
            log(WARNING, "the server was restored from a backup, and has lost updates that this node sent")
        if isinstance(action, Outdated):
            log(WARNING, "this node's residual is from an old copy of its disk: the residual is dropped")
            client, action = self._receive(self.store.fresh(kept.copy))
        self._check(action)
        if isinstance(action, Resend):
            return self._pack_reply(client, action.message)
        x = self._give_model(client, self.uplink.channel.feedback)
        trained = run_app()
        return trained if trained.has_error() else self._send(client, x, trained)

    def _make_channel(self) -> Channel:
        """Return the channel with the compressor and the feedback that the server names.

        Raise InputError if this node does not know one of them.
        """
        stages = [part for part in self.own if issubclass(part, Stage)]
        feedbacks = [part for part in self.own if issubclass(part, Feedback)]
        feedback = FEEDBACKS.parse(self.order.feedback, trust=False, own=feedbacks)
        return Channel(parse(self.order.compressor, trust=False, own=stages), feedback, self.form.layout)

    def _receive(self, client: Client) -> tuple[Client, Any]:
        with self.store.naming_damage():  # the stored last reply is decoded only here
            return machine.receive(client, self.request, self.uplink, self.replica)

    def _send(self, client: Client, x: Array, trained: Message) -> Message:
        """Compress the update from `x` to the trained model, store the client's state, return the reply."""
        name, arrays = self._read_model(trained)
        facts = self._read_facts(trained)
        x_K, uncompressed = self.form.split(arrays)
        g = local_update(x, x_K, None if self.order.update == "sum" else facts.get("divisor", facts["K"]))
        sender = replace(
            self.uplink,
            max_norm=self.order.max_norm,
            facts=facts | {"g2": norm2(g), "arrays": name},
            uncompressed=self.form.pack(uncompressed, short=self.uplink.channel.compressor.rounds_values),
        )
        try:
            client, sent = self._make_answer(client, g, sender)
        except NotFinite:
            why = "the update, with the residual added, holds NaN or Inf"
            raise _Refusal(replies.NOT_FINITE, why) from None
        except TooLarge as error:
            why = f"{error}: the update, with the residual, is too large"
            raise _Refusal(replies.TOO_LARGE, why) from None
        self.store.save(client)
        return self._pack_reply(client, sent)

    def _read_model(self, trained: Message) -> tuple[str, dict[str, Any]]:
        """Return the trained model in the app's reply: the name of its ArrayRecord, and its arrays.

        Raise _Refusal if names, shapes or dtypes of the arrays are not those of the model.
        """
        records = trained.content.array_records
        if len(records) != 1:
            why = f"the client app replied with {len(records)} ArrayRecords: exactly one is needed"
            raise _Refusal(replies.OTHER_MODEL, why)
        ((name, record),) = records.items()
        arrays = {name: array.numpy() for name, array in record.items()}
        if found := self.form.difference(arrays):
            raise _Refusal(replies.OTHER_MODEL, f"the client app replied with another model: {found}")
        return name, arrays

    def _read_facts(self, trained: Message) -> dict[str, Any]:
        """Return what the app reports: its metrics, the number of local steps K, and the training loss.

        Raise _Refusal if the metrics are too large, or if the needed metric `local-steps` is missing.
        """
        records = {name: dict(record) for name, record in trained.content.metric_records.items()}
        merged: dict[str, Any] = {key: value for record in records.values() for key, value in record.items()}
        loss = next((merged[key] for key in ("train_loss", "train-loss", "loss") if key in merged), None)
        K, size = read_number(merged.get(STEPS)), len(json.dumps(records))
        if self.order.update != "sum" and not (K or 0) > 0:
            update = self.order.update
            why = f"update = {update!r} needs the metric {STEPS!r}, the number of local steps, above 0"
            raise _Refusal(replies.BAD_METRICS, why)
        if size > MOST_METRICS:
            why = f"the metrics of the client app take {size:,} bytes: at most {MOST_METRICS:,} are allowed"
            raise _Refusal(replies.BAD_METRICS, why)
        facts = {"metrics": records, "K": K, "loss": read_number(loss)}
        length = read_number(merged.get(LENGTH))
        if self.order.update == "fednova" and (length or 0) > 0:
            facts["divisor"] = length
        return facts

    def _make_answer(self, client: Client, g: Array, sender: Uplink) -> tuple[Client, bytes]:
        """Return the client's next state, and the message with the update and the residual.

        Raise TooLarge or NotFinite if the update cannot be sent. If the residual alone is too large to ever
        be sent, drop the residual. But keep it if the server has a sum of all clients' feedback memories.
        """
        try:
            return machine.make_answer(client, self.request, g, sender)
        except (TooLarge, NotFinite):
            mirrored = self.uplink.channel.feedback.mirrors_clients
            if mirrored or sender.can_send(client.memory, self.request.t):
                raise
        log(WARNING, "this node's residual is too large to ever be sent: the residual is dropped")
        client, _ = self._receive(self.store.fresh(client.copy))
        return machine.make_answer(client, self.request, g, sender)

    def _pack_reply(self, client: Client, sent: bytes) -> Message:
        return pack_reply(ReplyRecord(self.request.stamp, client.incarnation, sent), self.message)
