"""The client mod: an unchanged Flower client, of any framework, sends compressed updates with error feedback.

It brings its copy of the model up to date, gives it to the app as the arrays that the app knows, takes the
trained ones from its reply, and sends what the protocol says instead. Residual and copy live on the node's
disk, since every message is a process of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from functools import cached_property
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, MessageType
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.logger import log

from cfedavg.algorithm import local_update
from cfedavg.channel import Channel, TooLarge
from cfedavg.compress import Stage, parse
from cfedavg.core.arrays import Array, norm2
from cfedavg.core.errors import Busy, InputError, NotFinite
from cfedavg.core.parts import Part
from cfedavg.federate.broadcast_format import unpack
from cfedavg.federate.client import (
    Client,
    Evaluate,
    NeedWhole,
    Outdated,
    Refuse,
    Resend,
    answer,
    catch_up,
    receive,
)
from cfedavg.federate.client_store import ClientStore
from cfedavg.federate.protocol import Request, Stamp, forged
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.uplink import Uplink
from cfedavg.federate.versions import Broadcast
from cfedavg.feedback import FEEDBACKS, Feedback
from cfedavg.flower.app_reply import object_to_metrics, object_to_model, read_facts
from cfedavg.flower.array_layout import Form
from cfedavg.flower.client_message import Packing
from cfedavg.flower.records import (
    BAD_METRICS,
    BAD_STATE,
    BUSY,
    FORGED,
    NEED_WHOLE,
    NOT_FINITE,
    OTHER_MODEL,
    OTHER_VERSION,
    REFUSED,
    TOO_LARGE,
    UNKNOWN_PART,
    Answer,
    Order,
    answered,
    body_of,
    open_model,
    order_of,
    refused,
    tell_version,
)
from cfedavg.wire import WireError


def compressed(
    message: Message, context: Context, call_next: ClientAppCallable, *, own: Collection[type[Part]] = ()
) -> Message:
    """The mod: `ClientApp(mods=[compressed])`. Messages that are not from our strategy pass unchanged.

    The node keeps its residual in the folder `state-dir` of its --node-config, or in $CFEDAVG_STATE, or in
    Flower's own folder. A client that reports the metric `local-steps` may do as many as it likes.

    The server names compressor and feedback, and nothing is imported for their texts. Classes of your own
    that it may name are in `own`: `mods=[partial(compressed, own=[MySelector])]`.
    """
    try:
        order = order_of(message)
    except InputError as error:
        return refused(OTHER_VERSION, str(error), message)
    if order is None:
        return call_next(message, context)
    try:
        return _Request(message, context, order, own).reply(call_next)
    except Busy as error:  # a server that was quickly back asks again while the node is still at it
        return refused(BUSY, str(error), message)
    except InputError as error:
        return refused(BAD_STATE, str(error), message)


def _channel(order: Order, form: Form, own: Collection[type[Part]]) -> Channel:
    """The channel that an order names, by parts that are known here; InputError if it names others."""
    stages = [part for part in own if issubclass(part, Stage)]
    feedbacks = [part for part in own if issubclass(part, Feedback)]
    return Channel(
        parse(order.compressor, trust=False, own=stages),
        FEEDBACKS.parse(order.feedback, trust=False, own=feedbacks),
        form.layout,
    )


def state_folder(context: Context) -> Path:
    """Where a node keeps its residuals."""
    named = context.node_config.get("state-dir") or os.environ.get("CFEDAVG_STATE")
    if named:
        return Path(str(named))
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "cfedavg"


class _Request:
    """One request, to train or to evaluate, from its arrival to the reply."""

    def __init__(self, message: Message, context: Context, order: Order, own: Collection[type[Part]]) -> None:
        self.message, self.context, self.order, self.own = message, context, order, own
        self.form = Form.from_text(order.form)
        self.replica = ModelReplica(self.form.layout, rounds=order.copy == "int16")
        self.body = body_of(message.content, order)
        self._check_body()
        self.store = ClientStore(
            state_folder(context), order.federation, order.client, self.form.layout, self.replica.dtype
        )

    def _check_body(self) -> None:
        """Raise InputError unless the parts of the body have the lengths that the model asks for."""
        whole = self.form.short_bytes if self.replica.rounds else self.form.whole_bytes
        if len(self.body.whole) != whole:
            raise InputError(
                f"the request is damaged: {whole} bytes must travel whole, {len(self.body.whole)} do"
            )
        if not self.order.copy and len(self.body.broadcast) != 4 * self.form.layout.d:
            raise InputError("the request is damaged: its model has another length")

    def reply(self, call_next: ClientAppCallable) -> Message:
        """Return what goes back. InputError is of the disk or of the request; the app's own is another."""

        def run_app() -> Message:
            try:
                return call_next(self.message, self.context)
            except InputError as error:
                raise RuntimeError(str(error)) from error

        if self.message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return self._evaluate(run_app)
        with self.store.locked():
            return self._train(run_app)

    @cached_property
    def broadcast(self) -> Broadcast | None:
        """What leads to the present copy of the model; None where the model itself has come."""
        try:
            return unpack(self.body.broadcast) if self.order.copy else None
        except WireError as error:
            raise InputError(f"the request is damaged: {error}") from None

    @property
    def request(self) -> Request:
        return self.order.request(self.broadcast)

    def _open(self, x: Array) -> None:
        """Give the app its model: x, and what travels whole."""
        whole = self.form.lengthen(self.body.whole) if self.replica.rounds else self.body.whole
        open_model(self.message.content, self.order, self.form.join(x, whole))
        self.x = x

    def _evaluate(self, run_app: Callable[[], Message]) -> Message:
        """Let the app evaluate the present model, and say which version of it this node holds."""
        if self.broadcast is None:
            self._open(np.frombuffer(self.body.broadcast, np.float32))
            return run_app()
        if why := forged(Stamp(self.broadcast.version.generation, 1), time.time()):
            return refused(FORGED, why, self.message)
        with self.store.locked():
            client, action = self._caught_up(self.broadcast)
        if isinstance(action, Refuse):
            return refused(REFUSED, action.why, self.message)
        if client.copy is None or isinstance(action, NeedWhole):
            return self._need_whole()
        self._open(self.replica.model(client.copy.w))
        evaluated = run_app()
        if not evaluated.has_error():
            tell_version(evaluated, client.copy.version)
        return evaluated

    def _caught_up(self, broadcast: Broadcast) -> tuple[Client, Evaluate | Refuse | NeedWhole]:
        """Bring the copy up to date and store it, so that the next request need not carry it again."""
        before = self.store.load()
        client, action = catch_up(before, broadcast, self.replica)
        if client.copy is not before.copy:
            self.store.save(client)
        return client, action

    def _need_whole(self) -> Message:
        return refused(NEED_WHOLE, "this node's copy of the model cannot follow the broadcast", self.message)

    def _train(self, run_app: Callable[[], Message]) -> Message:
        try:
            self.uplink = Uplink(
                _channel(self.order, self.form, self.own), self.order.number, self.order.seed
            )
        except InputError as error:
            return refused(UNKNOWN_PART, str(error), self.message)
        if why := forged(self.request.stamp, time.time()):
            return refused(FORGED, why, self.message)
        kept = self.store.load()
        client, action = self._received(kept)
        if client.forgotten > kept.forgotten:
            log(WARNING, "the server was restored from a backup, and has lost updates that this node sent")
        if isinstance(action, Outdated):
            log(WARNING, "this node's residual is from an old copy of its disk: it starts again without one")
            client, action = self._received(self.store.fresh(kept.copy))
        if isinstance(action, Resend):
            return self._answer(client, action.message)
        if isinstance(action, Refuse):
            return refused(REFUSED, action.why, self.message)
        if isinstance(action, NeedWhole):
            return self._need_whole()
        self._open(self._model(client))
        trained = run_app()
        return trained if trained.has_error() else self._sent(client, trained)

    def _model(self, client: Client) -> Array:
        """The model that the app trains."""
        if client.copy is None or not self.order.copy:
            return np.frombuffer(self.body.broadcast, np.float32)
        return self.replica.model(client.copy.w)

    def _received(self, client: Client) -> tuple[Client, Any]:
        with self.store.naming_damage():  # the last answer is decoded only here
            return receive(client, self.request, Packing(self.uplink), self.replica)

    def _sent(self, client: Client, trained: Message) -> Message:
        """The answer after the local work: stored first, then sent."""
        facts = read_facts(trained)
        if why := object_to_model(trained, self.form):
            return refused(OTHER_MODEL, why, self.message)
        if why := object_to_metrics(facts, self.order.update):
            return refused(BAD_METRICS, why, self.message)
        ((name, record),) = trained.content.array_records.items()
        x_K, whole = self.form.split({name: array.numpy() for name, array in record.items()})
        whole = self.form.shorten(whole) if self.uplink.channel.compressor.rounds else whole
        g = local_update(self.x, x_K, facts["K"], self.order.update)
        facts |= {"g2": norm2(g), "arrays": name}
        packing = Packing(self.uplink, self.order.max_norm, facts, whole)
        try:
            client, sent = self._answered(client, g, packing)
        except NotFinite:
            return refused(NOT_FINITE, "the update, with the residual added, holds NaN or Inf", self.message)
        except TooLarge as error:
            return refused(TOO_LARGE, f"{error}: the update, with the residual, is too large", self.message)
        self.store.save(client)
        return self._answer(client, sent)

    def _answered(self, client: Client, g: Array, packing: Packing) -> tuple[Client, bytes]:
        """A residual that is too large by itself would be so for ever: the node starts again without it.

        Not so where the server has the same memory: it would go on with it.
        """
        try:
            return answer(client, self.request, g, packing)
        except (TooLarge, NotFinite):
            shared = self.uplink.channel.feedback.mirrors_clients
            if shared or packing.fits(client.memory, self.request):
                raise
        log(WARNING, "this node's residual is too large to be ever sent: it starts again without one")
        client, _ = self._received(self.store.fresh(client.copy))
        return answer(client, self.request, g, packing)

    def _answer(self, client: Client, sent: bytes) -> Message:
        return answered(Answer(self.request.stamp, client.incarnation, sent), self.message)
