"""The reference engine: one client after another, as in the pseudocode. Tests compare other engines to it."""

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
from cfedavg.core.run_files import Record, Reply
from cfedavg.simulate.engines import server, trainer
from cfedavg.simulate.engines.traffic import Ledger, Statistics
from cfedavg.simulate.evaluate import evaluate
from cfedavg.simulate.local import (
    PRECISIONS,
    Vectors,
    after,
    batches,
    local_steps,
    model_of,
    reproducible,
    seed_generators,
    to_device,
)  # fmt: skip
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import stochastic_bf16
from cfedavg.simulate.state import State
from cfedavg.task import Task


@dataclass(frozen=True)
class ClientRound:
    """One client's round: what the client sent and kept, and what the metrics report."""

    payload: Payload
    b: Tensor
    g: Tensor
    memory: Tensor | None  # the feedback's memory after the round
    reply: Reply


class ReferenceEngine:
    """An engine that runs the clients of a round one after another on one device."""

    behind = 0

    def __init__(self, plan: Plan, task: Task, device: torch.device, messages: Path | None = None) -> None:
        self.plan, self.task, self.device = plan, task, device
        self.dtype = PRECISIONS[plan.config.precision]
        self.vectors = Vectors(copy.deepcopy(task.model).to(device, self.dtype))
        self._blank = copy.deepcopy(self.vectors.model)  # models for the user are copies of this
        self.layout, self.identity = self.vectors.layout, self.vectors.identity()
        self.ledger = Ledger(self.layout, messages)
        self.channel = plan.channel(self.layout)
        self.up = Statistics(self.vectors.buffer_layout, plan.compressor)

    def start(self) -> State:
        return server.first_state(self.plan, self.vectors)

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        """Run lines 3 to 19 of Algorithm 1 in the order of the pseudocode."""
        plan, rates, t = self.plan, self.plan.rates, state.t
        self.ledger.open(t)
        with reproducible(self.device, plan.config.precision):
            sent = self._clients(state, [i for i in plan.sampled(t) if plan.steps.at(t, i) > 0])
            arrived = [each for each in sent if not each.reply.lost]
            weights = [plan.weight(each.reply.client) for each in arrived]
            payloads = ((each.payload, [weight]) for each, weight in zip(arrived, weights, strict=True))
            x_next, memory = plan.aggregator.step(
                state.x, state.memory, payloads, everyone=plan.everyone, eta=rates.eta, scale=rates.scale, t=t
            )
            residuals = state.residuals
            if plan.feedback.keeps_client_memory:
                kept = {each.reply.client: each.memory for each in sent if each.memory is not None}
                residuals = residuals.update({i: self._kept(t, i, memory) for i, memory in kept.items()})
            b_next = server.weighted_mean([each.b for each in arrived], weights, state.b)
            names = [each.reply.client for each in arrived]
            state_next = server.next_state(
                plan, self.vectors, state, (x_next, b_next, memory), names, residuals
            )
        counts = server.count_downloads(plan, self.vectors, state, cache)
        downloads = {i: count() for i, count in counts.items()}
        replies, mean_g2 = [each.reply for each in sent], _mean_norm2([each.g for each in sent])
        broadcast, norms2 = server.measure_broadcast(state, state_next), residuals.norms2.values()
        row = server.record_round(plan, self.layout.d, replies, mean_g2, norms2, broadcast, downloads)
        return state_next, lambda: row

    def _clients(self, state: State, clients: list[int]) -> list[ClientRound]:
        """Run every client's round; if clients diverge, raise one error that names all of them."""
        sent, diverged = [], []
        for client in clients:
            try:
                sent.append(self._client(state, client))
            except NotFinite:
                diverged.append(client)
            except ValueError as error:
                raise trainer.explain_one_sample(error, client) from error.__cause__
        if diverged:
            raise Diverged(state.t, diverged, "the loss or the update")
        return sent

    def _client(self, state: State, client: int) -> ClientRound:
        """Run lines 5 to 15 of Algorithm 1 for a client; a lost reply goes back into the client's memory."""
        plan, t = self.plan, state.t
        config, shared = plan.config, plan.feedback.broadcast(state.memory.feedback)
        memory = state.residuals.get(client, state.x) if plan.feedback.keeps_client_memory else None
        x_0 = plan.feedback.start(state.broadcast, memory, shared)
        self.vectors.write(x_0, state.b)
        seed_generators(self.device, config.seed, t, client)
        data = batches(self.task.clients[client], config.batch_size, config.seed, t, client)
        work = local_steps(
            self.vectors.model,
            trainer.guard_loss(self.task, client),
            (to_device(batch, self.device, self.dtype) for batch in trainer.guard_batches(data, client)),
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
        after_loss = self.channel.feedback.restore(made.memory, made.payload) if lost else made.memory
        b_sent = self.up.travel(b_K)
        up = self.ledger.replies(t, [client], made.payload)[0] + self.up.bytes(b_sent)
        sizes = norm2(g), norm2(made.p), norm2(made.left), sum(made.payload.counts())
        reply = Reply(client, work.K, loss, *sizes, up, lost)
        return ClientRound(made.payload, b_sent, g, after_loss, reply)

    def _kept(self, t: int, client: int, memory: Tensor) -> Tensor:
        """Return the client's next memory in the precision of stored residuals."""
        if self.plan.config.residual_precision == "full":
            return memory
        word = signed(key(self.plan.config.seed, t, client, Purpose.RESIDUAL))
        return stochastic_bf16(memory, torch.tensor(word, device=self.device))

    def evaluate(self, state: State) -> Record:
        self.vectors.write(state.broadcast, state.b)
        with reproducible(self.device, self.plan.config.precision):
            # The metric may draw random numbers; no client has the number m.
            seed_generators(self.device, self.plan.config.seed, state.t, self.plan.m)
            return evaluate(self.vectors.model, self.task, self.device, self.dtype)

    def begin(self, state: State) -> State:
        return state

    def checkpoint(self, state: State, save: Callable[[State], None]) -> None:
        save(state)

    def close(self) -> None:
        """Do nothing: this engine has no threads or ranks."""

    def model_at(self, x: Tensor, b: Tensor) -> nn.Module:
        return model_of(self._blank, x, b)


def _mean_norm2(g: list[Tensor]) -> float:
    """Return |mean g_i|^2 of the clients' updates g_i; 0 if there are none."""
    if not g:
        return 0.0
    total = torch.zeros_like(g[0])
    for each in g:
        total += each
    return norm2(total / len(g))
