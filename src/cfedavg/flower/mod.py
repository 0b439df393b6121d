"""The client mod, which makes an unchanged Flower client send compressed updates with error feedback.

The mod updates the node's model copy, and gives the model to the app as the arrays that the app expects. The
mod takes the trained arrays from the app's reply, and sends the compressed update instead. The residual and
the model copy are on the node's disk, since Flower handles every message in a new process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.logger import log

from cfedavg.algorithm import local_update
from cfedavg.channel import Channel, TooLarge
from cfedavg.compress import Stage, parse
from cfedavg.core.arrays import Array, norm2
from cfedavg.core.errors import Busy, InputError, NotFinite
from cfedavg.core.parts import Part
from cfedavg.federate import client as machine
from cfedavg.federate.client import MOST_FACTS, Client, NeedWhole, Outdated, Refuse, Resend, Uplink
from cfedavg.federate.client_store import ClientStore
from cfedavg.federate.protocol import Request, Stamp, object_to_stamp
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.versions import Broadcast, unpack
from cfedavg.feedback import FEEDBACKS, Feedback
from cfedavg.flower import messages
from cfedavg.flower.array_layout import Form
from cfedavg.flower.messages import Order, ReplyRecord, read_number, refuse
from cfedavg.wire import WireError

STEPS = "local-steps"  # the metric by which a client reports K_i
MOST_METRICS = MOST_FACTS - 1024  # the most bytes of an app's metrics among the facts


def compressed(
    message: Message, context: Context, call_next: ClientAppCallable, *, own: Collection[type[Part]] = ()
) -> Message:
    """Compress the updates that a client app sends: `ClientApp(mods=[compressed])`.

    Messages from other strategies than CFedAvg pass unchanged. The node keeps its residual in the folder
    `state-dir` of its --node-config, else in $CFEDAVG_STATE, else in Flower's own folder. A client that
    reports the metric `local-steps` may do any number of local steps.

    The server names the compressor and the feedback, and the mod imports no code for these names. If the
    server names classes of your own, list them: `mods=[partial(compressed, own=[MySelector])]`.
    """
    try:
        order = messages.read_order(message)
    except InputError as error:
        return refuse(messages.OTHER_VERSION, str(error), message)
    if order is None:
        return call_next(message, context)
    try:
        return _Exchange(message, context, order, own).reply(call_next)
    except Busy as error:  # a restarted server may ask again while the node still works
        return refuse(messages.BUSY, str(error), message)
    except InputError as error:
        return refuse(messages.BAD_STATE, str(error), message)


def state_folder(context: Context) -> Path:
    """Return the folder in which a node keeps its residuals and model copies."""
    named = context.node_config.get("state-dir") or os.environ.get("CFEDAVG_STATE")
    if named:
        return Path(str(named))
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "cfedavg"


class _Exchange:
    """One request, to train or to evaluate, from its arrival to the reply."""

    def __init__(self, message: Message, context: Context, order: Order, own: Collection[type[Part]]) -> None:
        self.message, self.context, self.order, self.own = message, context, order, own
        self.form = Form.from_text(order.form)
        layout = self.form.layout
        self.replica = ModelReplica(layout, rounds_values=order.copy == "int16")
        self.body = messages.read_body(message.content, order)
        whole = self.form.short_bytes if self.replica.rounds_values else self.form.whole_bytes
        if len(self.body.whole) != whole:
            found = len(self.body.whole)
            raise InputError(f"the request is damaged: {whole} bytes must travel whole, {found} do")
        if not order.copy and len(self.body.broadcast) != 4 * layout.d:
            raise InputError("the request is damaged: its model has another length")
        folder = state_folder(context)
        self.store = ClientStore(folder, order.federation, order.client, layout, self.replica.dtype)

    def reply(self, call_next: ClientAppCallable) -> Message:
        """Return the reply to the request.

        An InputError of the app becomes a RuntimeError: here, InputError means a bad disk or request.
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
        """The broadcast that updates the model copy, or None if broadcasts are not compressed."""
        try:
            return unpack(self.body.broadcast) if self.order.copy else None
        except WireError as error:
            raise InputError(f"the request is damaged: {error}") from None

    @property
    def request(self) -> Request:
        return self.order.request(self.broadcast)

    def _refuse(self, action: Refuse | NeedWhole) -> Message:
        if isinstance(action, Refuse):
            return refuse(messages.REFUSED, action.why, self.message)
        why = "this node's copy of the model cannot follow the broadcast"
        return refuse(messages.NEED_WHOLE, why, self.message)

    def _give_model(self, client: Client | None) -> Array:
        """Put the model's arrays into the request for the app, remove the order, and return the vector x."""
        if client is None or client.copy is None or not self.order.copy:
            x = np.frombuffer(self.body.broadcast, np.float32)
        else:
            x = self.replica.model(client.copy.w)
        whole = self.form.lengthen(self.body.whole) if self.replica.rounds_values else self.body.whole
        content = self.message.content
        content[self.order.arrays] = messages.make_record(self.form.join(x, whole))
        del content[messages.OURS]
        return x

    def _evaluate(self, run_app: Callable[[], Message]) -> Message:
        """Return the app's evaluation of the present model, with the version of this node's model copy."""
        if self.broadcast is None:
            self._give_model(None)
            return run_app()
        if why := object_to_stamp(Stamp(self.broadcast.version.generation, 1), time.time()):
            return refuse(messages.FORGED, why, self.message)
        with self.store.lock():
            before = self.store.load()
            client, action = machine.catch_up(before, self.broadcast, self.replica)
            if client.copy is not before.copy:  # so the next request need not carry the copy again
                self.store.save(client)
        if client.copy is None or isinstance(action, Refuse | NeedWhole):
            return self._refuse(action if isinstance(action, Refuse) else NeedWhole())
        self._give_model(client)
        evaluated = run_app()
        if not evaluated.has_error():
            evaluated.content[messages.OURS] = ConfigRecord({"version": list(client.copy.version)})
        return evaluated

    def _train(self, run_app: Callable[[], Message]) -> Message:
        try:
            self.uplink = Uplink(self._make_channel(), self.order.number, self.order.seed)
        except InputError as error:
            return refuse(messages.UNKNOWN_PART, str(error), self.message)
        if why := object_to_stamp(self.request.stamp, time.time()):
            return refuse(messages.FORGED, why, self.message)
        kept = self.store.load()
        client, action = self._receive(kept)
        if client.forgotten > kept.forgotten:
            log(WARNING, "the server was restored from a backup, and has lost updates that this node sent")
        if isinstance(action, Outdated):
            log(WARNING, "this node's residual is from an old copy of its disk: it starts again without one")
            client, action = self._receive(self.store.fresh(kept.copy))
        if isinstance(action, Resend):
            return self._pack_reply(client, action.message)
        if isinstance(action, Refuse | NeedWhole):
            return self._refuse(action)
        x = self._give_model(client)
        trained = run_app()
        return trained if trained.has_error() else self._send(client, x, trained)

    def _make_channel(self) -> Channel:
        """Return the channel that the order names; raise InputError for a part unknown to this node."""
        stages = [part for part in self.own if issubclass(part, Stage)]
        feedbacks = [part for part in self.own if issubclass(part, Feedback)]
        feedback = FEEDBACKS.parse(self.order.feedback, trust=False, own=feedbacks)
        return Channel(parse(self.order.compressor, trust=False, own=stages), feedback, self.form.layout)

    def _receive(self, client: Client) -> tuple[Client, Any]:
        with self.store.naming_damage():  # the last answer is decoded only here
            return machine.receive(client, self.request, self.uplink, self.replica)

    def _send(self, client: Client, x: Array, trained: Message) -> Message:
        """Store the client's state after training from `x`; return the reply with the compressed update."""
        facts = read_facts(trained)
        if why := object_to_model(trained, self.form):
            return refuse(messages.OTHER_MODEL, why, self.message)
        if why := object_to_metrics(facts, self.order.update):
            return refuse(messages.BAD_METRICS, why, self.message)
        ((name, record),) = trained.content.array_records.items()
        x_K, whole = self.form.split({name: array.numpy() for name, array in record.items()})
        whole = self.form.shorten(whole) if self.uplink.channel.compressor.rounds_values else whole
        g = local_update(x, x_K, facts["K"], self.order.update)
        facts |= {"g2": norm2(g), "arrays": name}
        sender = replace(self.uplink, max_norm=self.order.max_norm, facts=facts, whole=whole)
        try:
            client, sent = self._make_answer(client, g, sender)
        except NotFinite:
            why = "the update, with the residual added, holds NaN or Inf"
            return refuse(messages.NOT_FINITE, why, self.message)
        except TooLarge as error:
            why = f"{error}: the update, with the residual, is too large"
            return refuse(messages.TOO_LARGE, why, self.message)
        self.store.save(client)
        return self._pack_reply(client, sent)

    def _make_answer(self, client: Client, g: Array, sender: Uplink) -> tuple[Client, bytes]:
        """Return the next state and the message; drop a residual that alone is too large to ever be sent.

        If the server mirrors the feedback's memory, keep the residual and raise TooLarge or NotFinite.
        """
        try:
            return machine.make_answer(client, self.request, g, sender)
        except (TooLarge, NotFinite):
            mirrored = self.uplink.channel.feedback.mirrors_clients
            if mirrored or sender.can_send(client.memory, self.request.t):
                raise
        log(WARNING, "this node's residual is too large to be ever sent: it starts again without one")
        client, _ = self._receive(self.store.fresh(client.copy))
        return machine.make_answer(client, self.request, g, sender)

    def _pack_reply(self, client: Client, sent: bytes) -> Message:
        reply = ReplyRecord(self.request.stamp, client.incarnation, sent)
        return messages.pack_reply(reply, self.message)


def read_facts(trained: Message) -> dict[str, Any]:
    """Return the metrics that the app reports, and the local steps K and the loss found in them."""
    records = {name: dict(record) for name, record in trained.content.metric_records.items()}
    merged: dict[str, Any] = {key: value for record in records.values() for key, value in record.items()}
    loss = next((merged[key] for key in ("train_loss", "train-loss", "loss") if key in merged), None)
    return {"metrics": records, "K": read_number(merged.get(STEPS)), "loss": read_number(loss)}


def object_to_model(trained: Message, form: Form) -> str:
    """Return why the model in a reply cannot be compressed, or an empty string if it can."""
    records = list(trained.content.array_records.values())
    if len(records) != 1:
        return f"the client app replied with {len(records)} ArrayRecords: exactly one is needed"
    found = form.difference({name: array.numpy() for name, array in records[0].items()})
    return f"the client app replied with another model: {found}" if found else ""


def object_to_metrics(facts: dict[str, Any], update: str) -> str:
    """Return what is wrong with the metrics of a reply, or an empty string if nothing is wrong."""
    if update == "mean" and not (facts["K"] or 0) > 0:
        return f"update = 'mean' needs the metric {STEPS!r}, the number of local steps, above 0"
    if (size := len(json.dumps(facts["metrics"]))) > MOST_METRICS:
        return f"the metrics of the client app take {size:,} bytes: at most {MOST_METRICS:,} travel"
    return ""
