"""From the replies of a round to the next model: CFedAvg's own average, or that of a strategy within."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from logging import WARNING
from typing import ClassVar, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from cfedavg.algorithm import Aggregator, ServerMemory
from cfedavg.compress import decompress
from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.payload import Payload
from cfedavg.flower import strategy_state as memory
from cfedavg.flower.array_layout import Form
from cfedavg.flower.loads import Loads, NodeDownload
from cfedavg.flower.nodes import Node
from cfedavg.flower.norms import Claims
from cfedavg.flower.reply_validation import Taken, with_samples

Rate = float | Callable[[int], float]
_REMEDY = "lower the rate, or set max_norm"
LARGEST = 1e36  # of a model's numbers: a copy of it, and the way from one model to another, stay finite


class Outcome(NamedTuple):
    """What came of a request: replied, late, lost, or the cause of a rejection; when, in how many bytes."""

    what: str
    why: str
    seconds: float | None
    bytes: int


class Model(NamedTuple):
    """What a round changes: x, the part of the model that travels whole, and what the server remembers."""

    x: NDArray[np.float32]
    whole: bytes
    memory: ServerMemory


@dataclass
class Round:
    """One round under way: who was asked, how many are needed, what came of it."""

    server_round: int  # as Flower counts, from 1
    arrays: ArrayRecord
    began: float
    nodes: dict[int, Node] = field(default_factory=dict)  # those asked, by Flower's number
    wanted: dict[int, Message] = field(default_factory=dict)  # what a strategy wants to send them
    requests: dict[int, Message] = field(default_factory=dict)  # what they were sent
    loads: Loads | None = None
    downloads: dict[int, list[NodeDownload]] = field(default_factory=dict)  # twice where a copy did not fit
    max_norm: float = math.inf
    before: Claims = field(default_factory=Claims)  # of the rounds before
    needed: int = 0
    taken: dict[str, Taken] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    online: set[str] = field(default_factory=set)  # who was there when it ended
    train_metrics: MetricRecord | None = None  # as a strategy within aggregated them

    def add_download(self, node: int, download: NodeDownload) -> None:
        """Note what a node has to download."""
        self.downloads.setdefault(node, []).append(download)

    def join_downloads(self, other: Round) -> None:
        """Add what nodes downloaded to evaluate."""
        for node, each in other.downloads.items():
            self.downloads[node] = self.downloads.get(node, []) + each

    @property
    def in_order(self) -> list[Taken]:
        """By number, whenever they came: the same sum, bit for bit."""
        return sorted(self.taken.values(), key=lambda taken: taken.node.number)

    @property
    def claims(self) -> Claims:
        """Of the replies in order, none too large: no client makes itself the model of all."""
        taken = self.in_order
        steps, samples = [each.K or 0.0 for each in taken], [each.samples or 0.0 for each in taken]
        return Claims(steps, samples).cap(self.before)

    def is_void(self, why: str) -> None:
        """Nothing of it goes into the model; of those who replied it is said why."""
        log(WARNING, why)
        for who in self.taken:
            self.outcomes[who] = self.outcomes[who]._replace(why=why)
        self.taken.clear()

    def leave_out(self, who: str, cause: str, why: str) -> None:
        """A reply that was taken, and is rejected in the light of the others."""
        log(WARNING, "%s: %s (%s)", self.taken.pop(who).node.name, cause, why)
        self.outcomes[who] = self.outcomes[who]._replace(what=cause, why=why)


def _object_to(x: NDArray[np.float32], whole: bytes, form: Form) -> str:
    """Return why a model cannot be the next one; empty if it can."""
    if not np.isfinite(x).all() or not form.is_finite(whole):
        return f"the model made from the replies is NaN or infinite: {_REMEDY}"
    largest = float(np.abs(x).max(initial=0))
    if largest > LARGEST:
        return f"the model made from the replies holds {largest:.3g}, above {LARGEST:g}: {_REMEDY}"
    return ""


@dataclass(frozen=True)
class Alone:
    """Lines 17 to 19 of Algorithm 1."""

    form: Form
    aggregator: Aggregator
    eta: Rate | None
    by_steps: bool  # whether updates were divided by K
    by_samples: bool

    def combined(self, now: Round, model: Model, everyone: int) -> Model:
        taken = now.in_order
        weights = now.claims.samples if self.by_samples else [1.0] * len(taken)
        if not any(weights):
            now.is_void("nobody has an example")
            return model
        pairs = ((each.payload, [weight]) for each, weight in zip(taken, weights, strict=True))
        x_next, memory = self._step(now, model, pairs, everyone)
        whole_next = self.form.mean_whole([each.whole for each in taken], weights)
        if why := _object_to(x_next, whole_next, self.form):
            now.is_void(why)
            return model
        if not all(np.isfinite(each).all() for each in memory.vectors().values()):
            now.is_void("the server optimiser or the feedback would remember NaN or Inf")
            return model
        return Model(x_next, whole_next, memory)

    def _step(
        self, now: Round, model: Model, payloads: Iterable[tuple[Payload, list[float]]], everyone: int
    ) -> tuple[NDArray[np.float32], ServerMemory]:
        K, t = self._mean_steps(now), now.server_round - 1
        optimiser = self.aggregator.optimiser
        rate = self.eta(t) if callable(self.eta) else self.eta
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks at what comes of it
            return self.aggregator.step(
                model.x,
                model.memory,
                payloads,
                everyone=float(everyone),
                eta=optimiser.default_rate(K) if rate is None else float(rate),  # NumPy's would make float64
                scale=optimiser.scale(K),
                t=t,
            )

    def _mean_steps(self, now: Round) -> float:
        """What updates were divided by, on average."""
        if not self.by_steps:
            return 1.0
        steps = [each or 1.0 for each in now.claims.steps]
        return sum(steps) / len(steps)


@dataclass(frozen=True)
class Through:
    """A strategy within gets what it would have got: a trained model and metrics from each client."""

    form: Form
    inner: Strategy
    by_samples: ClassVar[bool] = False  # the strategy may weigh by them, and need not

    def combined(self, now: Round, model: Model, everyone: int) -> Model:
        before = memory.snapshot(self.inner)
        pairs = zip(now.in_order, now.claims.samples, strict=True)
        made = self._made(now, [self._plain(each, samples, now, model.x) for each, samples in pairs])
        if made and (found := memory.spoilt(self.inner, before)):
            now.is_void(f"the inner strategy would remember NaN or Inf, in {found!r}")
            made = None
        if made is None:  # void: nothing of the round may stay, in what it remembers either
            memory.put_back(self.inner, before)
            return model
        return Model(*made, model.memory)

    def _made(self, now: Round, replies: list[Message]) -> tuple[NDArray[np.float32], bytes] | None:
        """What the strategy makes of the replies; None, and the round is void, if that cannot be used."""
        arrays = self._aggregated(now, replies)
        if arrays is None:
            return None
        found = {name: array.numpy() for name, array in arrays.items()}
        if wrong := self.form.difference(found, kinds=False):
            raise InputError(f"the inner strategy made another model: {wrong}")
        x_next, whole_next = self.form.split(found)
        if why := _object_to(x_next, whole_next, self.form):
            now.is_void(why)
            return None
        return x_next, whole_next

    def _aggregated(self, now: Round, replies: list[Message]) -> ArrayRecord | None:
        try:
            arrays, metrics = self.inner.aggregate_train(now.server_round, replies)
        except Exception as error:  # the clients would say the same again: only another round helps
            now.is_void(f"the inner strategy failed: {summarise_error(error)}")
            return None
        now.train_metrics = metrics
        if arrays is None:
            now.is_void(f"the inner strategy made no model of {len(replies)} replies")
        return arrays

    def _plain(self, taken: Taken, samples: float, now: Round, x: NDArray[np.float32]) -> Message:
        arrays = self.form.join(x + decompress(taken.payload)[0], taken.whole)
        model = ArrayRecord({name: Array(np.array(array)) for name, array in arrays.items()})
        too_many = samples < (taken.samples or 0.0)
        metrics = with_samples(taken.metrics, samples) if too_many else taken.metrics
        content = RecordDict({**metrics, taken.arrays: model})
        return Message(content, reply_to=now.requests[taken.node.id])


Averaging = Alone | Through
