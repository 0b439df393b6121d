"""The reference engine: one client after another, as the pseudocode has it. The oracle of the fast ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from cfedavg.algorithm import local_update
from cfedavg.core.arrays import norm2
from cfedavg.core.errors import Diverged, NotFinite
from cfedavg.core.keys import Purpose, key, signed
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Record, Reply, residual_norms, summarise
from cfedavg.simulate.engines.common import (
    PRECISIONS,
    Ended,
    broadcast_of,
    count_downloads,
    download_columns,
    explained,
    first_state,
    guarded_batches,
    guarded_loss,
    model_of,
    next_state,
    reproducible,
    seed_generators,
    server_step,
    simulated_seconds,
    weighted_mean,
)
from cfedavg.simulate.engines.ledger import Ledger
from cfedavg.simulate.engines.statistics import Statistics
from cfedavg.simulate.evaluate import evaluate
from cfedavg.simulate.local import Vectors, after, batches, local_steps, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import Residuals, stochastic_bf16
from cfedavg.simulate.state import State
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
        self.up = Statistics(self.vectors.buffer_layout, plan.compressor)

    def start(self) -> State:
        return first_state(self.plan, self.vectors)

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
            residuals = self._residuals_after(state, sent)
            b_next = weighted_mean([s.b for s in arrived], weights, state.b)
            ended = Ended(x_next, b_next, memory, [s.reply.client for s in arrived])
            after = next_state(plan, self.vectors, state, ended, residuals)
        counts = count_downloads(plan, self.vectors, state, cache)
        downloads = {i: count() for i, count in counts.items()}
        record = summarise(
            [s.reply for s in sent], len(sampled) - len(sent), self.layout.d, _mean_norm2([s.g for s in sent])
        )
        record |= download_columns(broadcast_of(state, after), downloads)
        record |= residual_norms(residuals.norms2.values(), plan.m)
        took = {s.reply.client: (s.reply.K, s.reply.up_bytes) for s in sent}
        down = {i: each.bytes for i, each in downloads.items()}
        record["simulated_seconds"] = simulated_seconds(plan, took, down)
        return after, lambda: record

    def _residuals_after(self, state: State, sent: list[Sent]) -> Residuals:
        if not self.plan.feedback.keeps_client_memory:
            return state.residuals
        kept = {s.reply.client: s.memory for s in sent if s.memory is not None}
        return state.residuals.updated({i: self._kept(state.t, i, memory) for i, memory in kept.items()})

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
        x_0 = plan.feedback.start(state.broadcast, memory, shared)
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
        b_sent = self.up.travel(b_K)
        up = self.ledger.replies(t, [client], made.payload)[0] + self.up.bytes(b_sent)
        sizes = norm2(g), norm2(made.p), norm2(made.left), sum(made.payload.counts())
        reply = Reply(client, work.K, loss, *sizes, up, lost)
        return Sent(made.payload, b_sent, g, after_loss, reply)

    def _kept(self, t: int, client: int, memory: Tensor) -> Tensor:
        """The client's next memory, as it is stored."""
        if self.plan.config.residual_precision == "full":
            return memory
        word = signed(key(self.plan.config.seed, t, client, Purpose.RESIDUAL))
        return stochastic_bf16(memory, torch.tensor(word, device=self.device))

    def evaluate(self, state: State) -> Record:
        self.vectors.write(state.broadcast, state.b)
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
