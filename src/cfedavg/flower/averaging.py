"""From the replies of a round to the next model: CFedAvg's own average, or that of a strategy within."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from logging import WARNING

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from cfedavg.algorithm import average, server_update
from cfedavg.compress import decompress
from cfedavg.errors import InputError, first_line, rows_in_words
from cfedavg.flower.form import Form
from cfedavg.flower.nodes import Node
from cfedavg.flower.rows import Outcome
from cfedavg.flower.taking import Taken

Rate = float | Callable[[int], float]
Model = tuple[Tensor, bytes]  # x, and what travels whole


@dataclass
class Round:
    """One round under way: who was asked, how many are needed, what came of it."""

    server_round: int  # as Flower counts, from 1
    arrays: ArrayRecord
    began: float
    nodes: dict[int, Node] = field(default_factory=dict)  # those asked, by Flower's number
    requests: dict[int, Message] = field(default_factory=dict)  # and what they were sent
    needed: int = 0
    down_bytes: int = 0
    taken: dict[str, Taken] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def in_order(self) -> list[Taken]:
        """By number, whenever they came: the same sum, bit for bit."""
        return sorted(self.taken.values(), key=lambda taken: taken.node.number)

    def is_void(self, why: str) -> None:
        """Nothing of it goes into the model; of those who replied it is said why."""
        log(WARNING, why)
        for who in self.taken:
            self.outcomes[who] = self.outcomes[who]._replace(why=why)
        self.taken.clear()

    def diverged(self) -> InputError:
        """The clients would answer again what they have answered, so that only a bound helps."""
        clients = rows_in_words([each.node.number for each in self.in_order], "client")
        return InputError(
            f"round {self.server_round}: the model made from the updates of {clients} is NaN or "
            "infinite; resume with max_norm, which leaves out what is too large, or start again with a "
            "lower rate"
        )


@dataclass(frozen=True)
class Alone:
    """Lines 17 to 19 of Algorithm 1."""

    form: Form
    eta: Rate | None
    by_steps: bool  # without an eta: the mean K
    by_samples: bool

    def combined(self, now: Round, x: Tensor, whole: bytes) -> Model:
        taken = now.in_order
        weights = [(each.samples or 0.0) if self.by_samples else 1.0 for each in taken]
        if not any(weights):
            now.is_void("nobody has an example")
            return x, whole
        pairs = ((each.payload, [weight]) for each, weight in zip(taken, weights, strict=True))
        x_next = server_update(x, average(x, pairs), self._eta(now.server_round - 1, taken))
        whole_next = self.form.mean_whole([each.whole for each in taken], weights)
        if not bool(torch.isfinite(x_next).all()) or not self.form.is_finite(whole_next):
            raise now.diverged()
        return x_next, whole_next

    def _eta(self, t: int, taken: list[Taken]) -> float:
        if self.eta is not None:
            return self.eta(t) if callable(self.eta) else self.eta
        steps = [each.K or 1.0 for each in taken]
        return sum(steps) / len(steps) if self.by_steps else 1.0


@dataclass(frozen=True)
class Through:
    """A strategy within gets what it would have got: a trained model and metrics from each client."""

    form: Form
    inner: Strategy
    result: Result

    def combined(self, now: Round, x: Tensor, whole: bytes) -> Model:
        arrays = self._aggregated(now, [self._plain(each, now, x) for each in now.in_order])
        if arrays is None:
            return x, whole
        found = {name: array.numpy() for name, array in arrays.items()}
        if wrong := self.form.difference(found, kinds=False):
            raise InputError(f"the inner strategy made another model: {wrong}")
        x_next, whole_next = self.form.split(found)
        if not np.isfinite(x_next).all() or not self.form.is_finite(whole_next):
            raise now.diverged()
        return torch.from_numpy(x_next), whole_next

    def _aggregated(self, now: Round, replies: list[Message]) -> ArrayRecord | None:
        try:
            arrays, metrics = self.inner.aggregate_train(now.server_round, replies)
        except Exception as error:  # the clients would say the same again: only another round helps
            now.is_void(f"the inner strategy failed: {first_line(error)}")
            return None
        if metrics is not None:
            self.result.train_metrics_clientapp[now.server_round] = metrics
        if arrays is None:
            now.is_void(f"the inner strategy made no model of {len(replies)} replies")
        return arrays

    def _plain(self, taken: Taken, now: Round, x: Tensor) -> Message:
        arrays = self.form.join((x + decompress(taken.payload)[0]).numpy(), taken.whole)
        model = ArrayRecord({name: Array(np.array(array)) for name, array in arrays.items()})
        content = RecordDict({**taken.metrics, taken.arrays: model})
        return Message(content, reply_to=now.requests[taken.node.id])
