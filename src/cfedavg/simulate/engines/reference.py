"""The reference engine: one client after another, as in the pseudocode. Tests compare other engines to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from cfedavg.algorithm import local_update
from cfedavg.core.arrays import norm2
from cfedavg.core.errors import Diverged, NotFinite
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Record, Reply
from cfedavg.simulate.engines.engine import Engine
from cfedavg.simulate.engines.trainers import train_client
from cfedavg.simulate.state import State


class ClientRound(NamedTuple):
    """One client's round: what the client sent and kept, and what the metrics report."""

    payload: Payload
    b: Tensor
    g: Tensor
    memory: Tensor | None  # the feedback's memory after the round
    reply: Reply


class ReferenceEngine(Engine):
    """An engine that runs the clients of a round one after another on one device."""

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        """Run lines 3 to 19 of Algorithm 1 in the order of the pseudocode."""
        plan, t = self.plan, state.t
        self.ledger.open(t)
        with self._setting():
            sent = self._clients(state, [i for i in plan.sampled(t) if plan.steps.at(t, i) > 0])
            residuals = state.residuals
            if plan.feedback.keeps_client_memory:
                memories = {each.reply.client: each.memory for each in sent if each.memory is not None}
                residuals = residuals.update(self._kept(t, list(memories), memories.values()))
            arrived = {each.reply.client: each for each in sent if not each.reply.lost}
            payloads = [(each.payload, [plan.weight(i)]) for i, each in arrived.items()]
            buffers = [(each.b, plan.weight(i)) for i, each in arrived.items()]
            state_next = self._next_state(state, payloads, buffers, list(arrived), residuals)
        counts, broadcast = self._count_downloads(state, cache), self._measure_broadcast(state, state_next)
        replies, mean_g2 = [each.reply for each in sent], _mean_norm2([each.g for each in sent])
        row = self._record(replies, mean_g2, residuals.norms2.values(), broadcast, counts)
        return state_next, lambda: row

    def _clients(self, state: State, clients: list[int]) -> list[ClientRound]:
        """Run every client's round; if clients diverge, raise one error that names all of them."""
        sent, diverged = [], []
        for client in clients:
            try:
                sent.append(self._client(state, client))
            except NotFinite:
                diverged.append(client)
        if diverged:
            raise Diverged(state.t, diverged, "the loss or the update")
        return sent

    def _client(self, state: State, client: int) -> ClientRound:
        """Run lines 5 to 15 of Algorithm 1 for a client; a lost reply goes back into the client's memory."""
        plan, t, shared = self.plan, state.t, self._shared(state)
        memory = state.residuals.get(client, state.x) if plan.feedback.keeps_client_memory else None
        x_0 = plan.feedback.start(state.broadcast, memory, shared)
        trained = train_client(plan, self.task, self.vectors, t, x_0, state.b, client)
        (K,), x_K, loss = trained.K, trained.x_K[0], float(trained.loss)
        g = local_update(x_0, x_K, K, plan.rates.update)
        made = self.channel.send(g, memory, plan.key(t, client), t, shared=shared)
        if not math.isfinite(loss):
            raise NotFinite([client])
        lost = plan.lost(t, client)
        memory_next = self.channel.restore(made.memory, made.payload) if lost else made.memory
        b_sent = self.buffers_up.transmit(trained.b_K[0])
        up = self.ledger.replies(t, [client], made.payload)[0] + self.buffers_up.bytes(b_sent)
        sizes = norm2(g), norm2(made.p), norm2(made.left), sum(made.payload.counts())
        return ClientRound(made.payload, b_sent, g, memory_next, Reply(client, K, loss, *sizes, up, lost))


def _mean_norm2(g: list[Tensor]) -> float:
    """Return |mean g_i|^2 of the clients' updates g_i; 0 if there are none."""
    if not g:
        return 0.0
    total = torch.zeros_like(g[0])
    for each in g:
        total += each
    return norm2(total / len(g))
