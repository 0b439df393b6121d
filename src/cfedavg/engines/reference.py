"""The reference engine: one client after another, as the pseudocode has it. The oracle of the fast ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cfedavg.algorithm import average, feed_back, local_update, server_update
from cfedavg.engines.common import (
    PRECISIONS,
    explained,
    guarded_batches,
    guarded_loss,
    model_of,
    next_iterate,
    reproducible,
    seed_generators,
    simulated_seconds,
    weighted_mean,
)
from cfedavg.engines.ledger import Ledger, dense_bytes
from cfedavg.errors import Diverged, NotFinite
from cfedavg.evaluate import evaluate
from cfedavg.keys import Purpose, key, signed
from cfedavg.layout import Layout
from cfedavg.local import Vectors, after, batches, local_sgd, to_device
from cfedavg.metrics import Record, Reply, residual_norms, summarise
from cfedavg.payload import Payload
from cfedavg.plan import Plan
from cfedavg.residuals import stochastic_bf16
from cfedavg.state import State
from cfedavg.task import Task
from cfedavg.tensors import norm2


@dataclass(frozen=True)
class Sent:
    """A client's round: what it sent, what it kept, and what is reported of it."""

    payload: Payload
    b: Tensor
    g: Tensor
    e_next: Tensor
    reply: Reply


class ReferenceEngine:
    """Runs the clients of a round one after another on one device."""

    behind = 0

    def __init__(self, plan: Plan, task: Task, device: torch.device, messages: Path | None = None) -> None:
        self.plan, self.task, self.device = plan, task, device
        self.dtype = PRECISIONS[plan.config.precision]
        self.vectors = Vectors(copy.deepcopy(task.model).to(device, self.dtype))
        self._blank = copy.deepcopy(self.vectors.model)  # what a user gets is made of it
        self.layout, self.identity = self.vectors.layout, self.vectors.identity()
        self.ledger = Ledger(self.layout, messages)

    def start(self) -> State:
        x, b = self.vectors.read()
        return State(0, x, b)

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        plan, t = self.plan, state.t
        sampled = plan.sampled(t)
        self.ledger.open(t)
        with reproducible(self.device, self.plan.config.precision):
            sent = self._clients(state, [i for i in sampled if plan.steps.at(t, i) > 0])
            arrived = [s for s in sent if not s.reply.lost]
            weights = [plan.weight(s.reply.client) for s in arrived]
            applied = ((s.payload, [weight]) for s, weight in zip(arrived, weights, strict=True))
            delta_tilde = average(state.x, applied)
            x_next = server_update(state.x, delta_tilde, plan.rates.eta)
        if not bool(torch.isfinite(x_next).all()):
            raise Diverged(t, [s.reply.client for s in arrived], "the model made from the updates")
        residuals = state.residuals
        if plan.config.error_feedback:
            residuals = residuals.updated({s.reply.client: self._kept(t, s) for s in sent})
        down = dense_bytes(state.x, self.layout) + dense_bytes(state.b, self._b_layout)
        record = summarise(
            [s.reply for s in sent], len(sampled) - len(sent), self.layout.d, _mean_norm2([s.g for s in sent])
        )
        record["downlink_bytes"] = down * len(sampled)
        record |= residual_norms(residuals.norms2.values(), plan.m)
        took = {s.reply.client: (s.reply.K, s.reply.up_bytes) for s in sent}
        record["simulated_seconds"] = simulated_seconds(plan, took, sampled, down)
        z, eta_sum = next_iterate(plan, state)
        b_next = weighted_mean([s.b for s in arrived], weights, state.b)
        return State(t + 1, x_next, b_next, residuals, z, eta_sum), lambda: record

    def _clients(self, state: State, clients: list[int]) -> list[Sent]:
        """Every client's round; if some diverge, the error names them all."""
        sent, diverged = [], []
        for client in clients:
            try:
                sent.append(self._client(state, client))
            except NotFinite:
                diverged.append(client)
            except ValueError as error:
                raise explained(error, client) from error.__cause__
        if diverged:
            raise Diverged(state.t, diverged, "the loss or the update")
        return sent

    def _client(self, state: State, client: int) -> Sent:
        """Lines 5 to 15 for one client. A reply that gets lost goes back into the residual whole."""
        plan, t = self.plan, state.t
        config = plan.config
        self.vectors.write(state.x, state.b)
        seed_generators(self.device, config.seed, t, client)
        data = batches(self.task.clients[client], config.batch_size, config.seed, t, client)
        work = local_sgd(
            self.vectors.model,
            guarded_loss(self.task, client),
            (to_device(batch, self.device, self.dtype) for batch in guarded_batches(data, client)),
            plan.rates.eta_local(t),
            after(plan.steps.at(t, client)),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )
        x_K, b_K = self.vectors.read()
        g = local_update(state.x, x_K, work.K, plan.rates.update)
        e = state.residuals.get(client, state.x)
        payload, e_next = feed_back(g, e, plan.compressor, plan.key(t, client), self.layout)
        loss = float(work.loss)
        if not math.isfinite(loss):
            raise NotFinite([client])
        lost = plan.lost(t, client)
        up = self.ledger.replies(t, [client], payload)[0] + dense_bytes(b_K, self._b_layout)
        reply = Reply(
            client, work.K, loss, norm2(g), norm2(g + e), norm2(e_next), sum(payload.counts()), up, lost
        )
        return Sent(payload, b_K, g, g + e if lost else e_next, reply)

    def _kept(self, t: int, sent: Sent) -> Tensor:
        """The client's next residual, as it is stored."""
        if self.plan.config.residual_precision == "full":
            return sent.e_next
        word = signed(key(self.plan.config.seed, t, sent.reply.client, Purpose.RESIDUAL))
        return stochastic_bf16(sent.e_next, torch.tensor(word, device=self.device))

    @property
    def _b_layout(self) -> Layout:
        return self.vectors.buffer_layout

    def evaluate(self, state: State) -> Record:
        self.vectors.write(state.x, state.b)
        with reproducible(self.device, self.plan.config.precision):
            # For a metric that draws; no client has this number.
            seed_generators(self.device, self.plan.config.seed, state.t, self.plan.m)
            return evaluate(self.vectors.model, self.task, self.device, self.dtype)

    def begin(self, state: State) -> State:
        return state

    def checkpoint(self, state: State, save: Callable[[State], None]) -> None:
        save(state)

    def close(self) -> None:
        """Nothing to close."""

    def model_at(self, x: Tensor, b: Tensor) -> nn.Module:
        return model_of(self._blank, x, b)


def _mean_norm2(g: list[Tensor]) -> float:
    """|mean g_i|^2."""
    if not g:
        return 0.0
    total = torch.zeros_like(g[0])
    for each in g:
        total += each
    return norm2(total / len(g))
