"""The averaging of a round's replies, by CFedAvg or by a wrapped strategy, and the model's evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import ClassVar, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from cfedavg.algorithm import Aggregator, ServerMemory
from cfedavg.compress import decompress
from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.run_files import Record
from cfedavg.flower import reply_validation, strategy_state
from cfedavg.flower.array_layout import Form
from cfedavg.flower.dispatch import Dispatcher
from cfedavg.flower.federation_state import FederationState, Node
from cfedavg.flower.messages import make_record, take_version
from cfedavg.flower.reply_validation import TakenReply
from cfedavg.flower.rounds import Round, make_columns
from cfedavg.wire import WireError

Rate = float | Callable[[int], float]
EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
_REMEDY = "lower the rate, or set max_norm"
LARGEST = 1e36  # the largest value of a model: its replicas, and differences of two models, stay finite


class Model(NamedTuple):
    """What a round changes: the vector x, the bytes of the uncompressed arrays, and the server's memory."""

    x: NDArray[np.float32]
    whole: bytes
    memory: ServerMemory


def _object_to_model(x: NDArray[np.float32], whole: bytes, form: Form) -> str:
    """Return why `x` and `whole` cannot be the next model, or an empty string if they can."""
    if not np.isfinite(x).all() or not form.is_finite(whole):
        return f"the model made from the replies is NaN or infinite: {_REMEDY}"
    largest = float(np.abs(x).max(initial=0))
    if largest > LARGEST:
        return f"the model made from the replies holds {largest:.3g}, above {LARGEST:g}: {_REMEDY}"
    return ""


@dataclass(frozen=True)
class OwnAverage:
    """The average of CFedAvg itself: lines 17 to 19 of Algorithm 1."""

    form: Form
    aggregator: Aggregator
    eta: Rate | None
    by_steps: bool  # whether clients divided their updates by K, their local steps
    by_samples: bool

    def combine(self, now: Round, model: Model, everyone: int) -> Model:
        """Return the next model; if the replies make no valid model, void the round and return `model`."""
        taken = now.in_order
        weights = now.claims.samples if self.by_samples else [1.0] * len(taken)
        if not any(weights):
            now.make_void("nobody has an example")
            return model
        x_next, memory = self._step(now, model, taken, weights, everyone)
        whole_next = self.form.mean_whole([each.whole for each in taken], weights)
        why = _object_to_model(x_next, whole_next, self.form)
        if not why and not all(np.isfinite(each).all() for each in memory.vectors().values()):
            why = "the server optimiser or the feedback would remember NaN or Inf"
        if why:
            now.make_void(why)
            return model
        return Model(x_next, whole_next, memory)

    def _step(
        self, now: Round, model: Model, taken: list[TakenReply], weights: Sequence[float], everyone: int
    ) -> tuple[NDArray[np.float32], ServerMemory]:
        K, t, optimiser = 1.0, now.server_round - 1, self.aggregator.optimiser
        if self.by_steps:  # K is the mean number by which updates were divided
            steps = [each or 1.0 for each in now.claims.steps]
            K = sum(steps) / len(steps)
        rate = self.eta(t) if callable(self.eta) else self.eta
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks the result
            return self.aggregator.step(
                model.x,
                model.memory,
                ((each.payload, [weight]) for each, weight in zip(taken, weights, strict=True)),
                everyone=float(everyone),
                eta=optimiser.default_rate(K) if rate is None else float(rate),  # so x stays float32
                scale=optimiser.scale(K),
                t=t,
            )


@dataclass(frozen=True)
class WrappedAverage:
    """The average of a wrapped strategy. The strategy gets each client's model and metrics, uncompressed."""

    form: Form
    inner: Strategy
    by_samples: ClassVar[bool] = False  # replies need not report samples

    def combine(self, now: Round, model: Model, everyone: int) -> Model:
        """Return the next model; if the strategy makes no valid model, void the round and return `model`."""
        before = strategy_state.take_snapshot(self.inner)
        pairs = zip(now.in_order, now.claims.samples, strict=True)
        made = self._aggregate(now, [self._restore_reply(*pair, now, model.x) for pair in pairs])
        if made and (found := strategy_state.find_spoilt(self.inner, before)):
            now.make_void(f"the inner strategy would remember NaN or Inf, in {found!r}")
            made = None
        if made is None:  # the strategy must forget a void round
            strategy_state.roll_back(self.inner, before)
            return model
        return Model(*made, model.memory)

    def _aggregate(self, now: Round, replies: list[Message]) -> tuple[NDArray[np.float32], bytes] | None:
        """Return the strategy's average of the replies; if it is invalid, void the round and return None."""
        try:
            arrays, metrics = self.inner.aggregate_train(now.server_round, replies)
        except Exception as error:  # a retry would get the same replies: go on with another round
            now.make_void(f"the inner strategy failed: {summarise_error(error)}")
            return None
        now.train_metrics = metrics
        if arrays is None:
            now.make_void(f"the inner strategy made no model of {len(replies)} replies")
            return None
        found = {name: array.numpy() for name, array in arrays.items()}
        if wrong := self.form.difference(found, kinds=False):
            raise InputError(f"the inner strategy must make a model of the same arrays: {wrong}")
        x_next, whole_next = self.form.split(found)
        if why := _object_to_model(x_next, whole_next, self.form):
            now.make_void(why)
            return None
        return x_next, whole_next

    def _restore_reply(
        self, taken: TakenReply, samples: float, now: Round, x: NDArray[np.float32]
    ) -> Message:
        """Return the reply, with a whole model, that a client without the mod would have sent."""
        model = make_record(self.form.join(x + decompress(taken.payload)[0], taken.whole))
        metrics = taken.metrics
        if samples < (taken.samples or 0.0):
            metrics = reply_validation.cap_samples(metrics, samples)
        content = RecordDict({**metrics, taken.arrays: model})
        return Message(content, reply_to=now.requests[taken.node.id])


Averaging = OwnAverage | WrappedAverage


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of models: each method adds metrics to `result` and returns the metrics as columns."""

    function: EvaluateFunction | None
    config: ConfigRecord  # sent to the clients
    dispatcher: Dispatcher
    result: Result

    def evaluate_here(self, server_round: int, arrays: ArrayRecord) -> Record:
        """Evaluate `arrays` on the server with the app's own function; return the metrics as columns."""
        found = self.function(server_round, arrays) if self.function else None
        if found is None:
            return {}
        self.result.evaluate_metrics_serverapp[server_round] = found
        return make_columns(found, "test_", "client_")

    def ask_clients(self, inner: Strategy, now: Round, arrays: ArrayRecord, state: FederationState) -> Record:
        """Let the clients that the inner strategy chooses evaluate `arrays`; return metrics as columns."""
        asked = Round(now.server_round, arrays, now.began, max_norm=now.max_norm)
        wanted = inner.configure_evaluate(now.server_round, arrays, self.config, self.dispatcher.grid)
        messages = self.dispatcher.pack(asked, wanted, state)
        replies = list(self.dispatcher.exchange(asked, messages, state)) if messages else []
        for node_id, each in asked.downloads.items():
            now.downloads[node_id] = now.downloads.get(node_id, []) + each
        for node, reply in replies:
            if (version := take_version(reply)) is not None:
                self.dispatcher.told[node.identity] = version
        alike = _leave_out_odd_ones(replies, asked)
        try:
            found = inner.aggregate_evaluate(now.server_round, alike)
        except Exception as error:  # the round stays valid
            log(WARNING, "nothing is known of the clients' evaluation: %s", summarise_error(error))
            return {}
        if found is not None:
            self.result.evaluate_metrics_clientapp[now.server_round] = found
        return make_columns(found, "client_") if found else {}


def _leave_out_odd_ones(replies: list[tuple[Node, Message]], asked: Round) -> list[Message]:
    """Return the evaluation replies, except those with invalid or unusual metrics; log what is wrong.

    A strategy may log an error's reason unchanged, so the reason is made one printable line.
    """
    wrong = {node: why for node, reply in replies if (why := _object_to_metrics(reply))}
    kinds = {
        node: reply_validation.describe_kind(reply.content.metric_records)
        for node, reply in replies
        if node not in wrong
    }
    wrong = reply_validation.find_odd_ones(kinds, asked.server_round) | wrong
    for node, why in wrong.items():
        log(WARNING, "%s: left out of the evaluation (%s)", node.name, why)
    found = []
    for node, reply in replies:
        if reply.has_error():
            error = Error(reply.error.code, reply_validation.read_reason(reply))
            found.append(Message(error, reply_to=asked.requests[node.id]))
        elif node not in wrong:
            found.append(reply)
    return found


def _object_to_metrics(reply: Message) -> str:
    """Return what is wrong with an evaluation reply, or an empty string if nothing is wrong."""
    if reply.has_error():
        return reply_validation.read_reason(reply) or "it failed"
    try:
        reply_validation.check_metrics(reply.content.metric_records)
    except WireError as error:
        return str(error)
    return ""
