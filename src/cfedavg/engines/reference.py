"""The reference engine: one client after another, as the pseudocode has it. The oracle of the fast ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cfedavg.algorithm import local_update
from cfedavg.arrays import norm2
from cfedavg.engines.common import (
    PRECISIONS,
    broadcast_bytes,
    check_finite,
    explained,
    guarded_batches,
    guarded_loss,
    model_of,
    next_iterate,
    reproducible,
    seed_generators,
    server_step,
    simulated_seconds,
    weighted_mean,
)
from cfedavg.engines.ledger import Ledger, dense_bytes
from cfedavg.errors import Diverged, NotFinite
from cfedavg.evaluate import evaluate
from cfedavg.keys import Purpose, key, signed
from cfedavg.layout import Layout
from cfedavg.local import Vectors, after, batches, local_steps, to_device
from cfedavg.metrics import Record, Reply, residual_norms, summarise
from cfedavg.payload import Payload
from cfedavg.plan import Plan
from cfedavg.residuals import stochastic_bf16
from cfedavg.state import State
from cfedavg.task import Task


@dataclass(frozen=True)
class Sent:
    """A client's round: what it sent, what it kept, and what is reported of it."""

    payload: Payload
    b: Tensor
    g: Tensor
    memory: Tensor | None  # of the feedback, after the round
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
        self.channel = plan.channel(self.layout)

    def start(self) -> State:
        x, b = self.vectors.read()
        return State(0, x, b, memory=self.plan.aggregator.init(x))

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        plan, t = self.plan, state.t
        sampled = plan.sampled(t)
        self.ledger.open(t)
        with reproducible(self.device, self.plan.config.precision):
            sent = self._clients(state, [i for i in sampled if plan.steps.at(t, i) > 0])
            arrived = [s for s in sent if not s.reply.lost]
            weights = [plan.weight(s.reply.client) for s in arrived]
            applied = ((s.payload, [weight]) for s, weight in zip(arrived, weights, strict=True))
            x_next, memory = server_step(plan, state, applied)
        check_finite(t, x_next, memory, [s.reply.client for s in arrived])
        residuals = state.residuals
        if plan.feedback.keeps_client_memory:
            kept = {s.reply.client: s.memory for s in sent if s.memory is not None}
            residuals = residuals.updated({i: self._kept(t, i, memory) for i, memory in kept.items()})
        down = broadcast_bytes(plan, state, self.layout, self._b_layout)
        record = summarise(
            [s.reply for s in sent], len(sampled) - len(sent), self.layout.d, _mean_norm2([s.g for s in sent])
        )
        record["downlink_bytes"] = down * len(sampled)
        record |= residual_norms(residuals.norms2.values(), plan.m)
        took = {s.reply.client: (s.reply.K, s.reply.up_bytes) for s in sent}
        record["simulated_seconds"] = simulated_seconds(plan, took, sampled, down)
        z, eta_sum = next_iterate(plan, state)
        b_next = weighted_mean([s.b for s in arrived], weights, state.b)
        return State(t + 1, x_next, b_next, residuals, z, eta_sum, memory), lambda: record

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
        """Lines 5 to 15 for one client. What gets lost is restored by the feedback."""
        plan, t = self.plan, state.t
        config, shared = plan.config, plan.feedback.broadcast(state.memory.feedback)
        kept = plan.feedback.keeps_client_memory
        memory = state.residuals.get(client, state.x) if kept else None
        x_0 = plan.feedback.start(state.x, memory, shared)
        self.vectors.write(x_0, state.b)
        seed_generators(self.device, config.seed, t, client)
        data = batches(self.task.clients[client], config.batch_size, config.seed, t, client)
        work = local_steps(
            self.vectors.model,
            guarded_loss(self.task, client),
            (to_device(batch, self.device, self.dtype) for batch in guarded_batches(data, client)),
            plan.local_optimiser,
            plan.rates.eta_local(t),
            after(plan.steps.at(t, client)),
        )
        x_K, b_K = self.vectors.read()
        g = local_update(x_0, x_K, work.K, plan.rates.update)
        made = self.channel.send(g, memory, plan.key(t, client), t, shared=shared)
        loss = float(work.loss)
        if not math.isfinite(loss):
            raise NotFinite([client])
        lost = plan.lost(t, client)
        after_loss = self.channel.restore(made.memory, made.payload) if lost else made.memory
        up = self.ledger.replies(t, [client], made.payload)[0] + dense_bytes(b_K, self._b_layout)
        sizes = norm2(g), norm2(made.p), norm2(made.left), sum(made.payload.counts())
        reply = Reply(client, work.K, loss, *sizes, up, lost)
        return Sent(made.payload, b_K, g, after_loss, reply)

    def _kept(self, t: int, client: int, memory: Tensor) -> Tensor:
        """The client's next memory, as it is stored."""
        if self.plan.config.residual_precision == "full":
            return memory
        word = signed(key(self.plan.config.seed, t, client, Purpose.RESIDUAL))
        return stochastic_bf16(memory, torch.tensor(word, device=self.device))

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
