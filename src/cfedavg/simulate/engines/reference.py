"""The base class of engines, which has the server's part of a round; and the reference engine.

The reference engine runs one client after another, as in the pseudocode of Algorithm 1. Tests compare the
other engines with the reference engine.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg.algorithm import Weighted, local_update
from cfedavg.channel import Channel, Outgoing
from cfedavg.core.arrays import norm2
from cfedavg.core.errors import Diverged, NotFinite
from cfedavg.core.keys import Purpose, keys
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Record, Reply, ResidualNorms, finite, summarise
from cfedavg.feedback import Feedback
from cfedavg.simulate.downloads import Count, Download, Downloads, Start
from cfedavg.simulate.engines.control import SimulatedControl
from cfedavg.simulate.engines.requests import Request
from cfedavg.simulate.engines.traffic import CONTROL, BufferChannel, Ledger, dense_bytes
from cfedavg.simulate.engines.trainers import train_client
from cfedavg.simulate.local import (
    PRECISIONS,
    EvaluatedBatches,
    Vectors,
    evaluate_batches,
    model_of,
    reproducible,
    seed_generators,
    summarise_batches,
)
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import InMemory, MemoryRow, Residuals, stochastic_bf16
from cfedavg.simulate.state import State
from cfedavg.task import Batch, Task

Broadcast = tuple[Collection[int], float]  # clients that held a model copy before; |x - w|^2 afterwards


class Engine(ABC):
    """An engine runs rounds: a round takes a state and returns a new state and a row of metrics."""

    behind = 0  # how many rounds later a row of metrics may be ready, so that training need not wait

    def __init__(
        self, plan: Plan, task: Task, device: torch.device, messages: Path | None = None, rank: int = 0
    ) -> None:
        self.plan, self.task, self.device = plan, task, device
        self.dtype = PRECISIONS[plan.config.precision]
        self._blank = copy.deepcopy(task.model).to(device, self.dtype)  # models for the user are copies of it
        self.vectors = Vectors(copy.deepcopy(self._blank))
        self.layout = self.vectors.layout
        self.identity = self.vectors.identity()  # a checksum of the model, which a checkpoint must match
        self.ledger = Ledger(self.layout, messages, opened=rank > 0)
        self.downlink = plan.downlink(self.layout)
        self.control, d = SimulatedControl(plan, self.layout, self.downlink), self.layout.d
        kept = plan.feedback.keeps_client_memory, plan.local_optimiser.needs_correction
        self.row = MemoryRow(*(d if each else 0 for each in kept))
        self.buffers_up = BufferChannel(self.vectors.buffer_layout, plan.compressor)
        self.buffers_down = BufferChannel(self.vectors.buffer_layout, plan.compressor_down)
        self._prepare: Callable[[Batch], Batch] = lambda batch: batch  # converts a batch for the model

    def start(self) -> State:
        """Return the state before the first round, made from the model's parameters and buffers."""
        x, b = self.vectors.read()
        b, residuals = self.buffers_down.transmit(b), InMemory(row=self.row)
        memory, control = self.plan.aggregator.init(x), self.control.start(x)
        first = State(0, x, b, residuals, memory=memory, control=control)
        if self.downlink is None:
            return first
        w = self.downlink.make(x)
        return replace(first, w=w, downloads=Downloads.none(w))

    @abstractmethod
    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        """Run a round of Algorithm 1; return the new state and a function that gives the row of metrics.

        The function may wait until all bytes are counted.
        """

    def request(self, state: State) -> Request | None:
        """Return the local work of the round that `round` runs next; None if the engine does not share it."""
        return None

    def evaluate(self, state: State) -> Record:
        """Evaluate the model that clients hold; return the test columns of a row of metrics."""
        return summarise_batches(self.task, [self._evaluate(state, self.task)])

    def begin(self, state: State) -> State:
        """Prepare a run that starts from `state`; return the state to give to the first `round`."""
        return state

    def checkpoint(self, state: State, save: Callable[[State], None]) -> None:
        """Call `save` with the whole state: `state` and the residuals that other ranks keep."""
        save(state)

    def close(self) -> None:  # noqa: B027
        """End the engine's threads and the other ranks; call this at the end of the run."""

    def model_at(self, x: Tensor, b: Tensor) -> nn.Module:
        """Return a copy of the user's model on the CPU, with parameters `x` and buffers `b`."""
        return model_of(self._blank, x, b)

    def _channel(self, state: State) -> Channel:
        """Return the channel of the round that starts from `state`."""
        return self.plan.channel(self.layout, state.doublings)

    def _setting(self) -> AbstractContextManager[None]:
        return reproducible(self.device, self.plan.config.precision)

    def _shared(self, state: State) -> Tensor | None:
        """Return the vector that the feedback broadcasts to all clients; None if there is no such vector."""
        shared: Tensor | None = self.plan.feedback.broadcast(state.memory.feedback)
        return shared

    def _kept(
        self, t: int, clients: list[int], memories: Iterable[Tensor], *, copies: bool = True
    ) -> dict[int, Tensor]:
        """Return copies of the clients' next memories, in `residual_precision`.

        A row that is not copied would keep its whole block in memory. Without `copies`, rows are not copied.
        """
        if self.plan.config.residual_precision == "full":
            rows = (row.clone() if copies else row for row in memories)
            return dict(zip(clients, rows, strict=True))
        words = self._keys(t, clients, Purpose.RESIDUAL)
        return {i: stochastic_bf16(row, word) for i, row, word in zip(clients, memories, words, strict=True)}

    def _keys(self, t: int, clients: list[int], purpose: Purpose) -> Tensor:
        words = keys(self.plan.config.seed, t, np.array(clients, np.int64), int(purpose))
        return torch.from_numpy(words).to(self.device)

    def _next_state(
        self,
        state: State,
        payloads: Iterable[Weighted],
        controls: Iterable[Weighted],
        buffers: Sequence[tuple[Tensor, float]],
        arrived: list[int],
        residuals: Residuals,
    ) -> State:
        """Run the server's part of a round: lines 17 to 19 of Algorithm 1 and the broadcast.

        `payloads`, `controls` (changes of c_i) and `buffers` come with the clients' weights in the average.
        `arrived` are the clients whose replies arrived. Raise Diverged, with these clients, if the model or
        the server's memory is not finite.
        """
        plan, t = self.plan, state.t
        x, memory = plan.aggregator.step(
            state.x, state.memory, payloads, everyone=plan.everyone, eta=plan.rates.eta,
            scale=plan.scale(t, arrived), t=t,
        )  # fmt: skip
        if not bool(torch.isfinite(x).all()):
            raise Diverged(t, arrived, "the model made from the updates")
        if not all(bool(torch.isfinite(each).all()) for each in memory.vectors().values()):
            raise Diverged(t, arrived, "the memory of the server optimiser or the feedback")
        z, eta_sum = None, 0.0
        if plan.config.sample_iterate:  # z of Theorem 2 is a random x_t, drawn with weight eta_L
            eta_sum = state.eta_sum + plan.rates.eta_local(t)
            z = (state.x, state.b) if plan.keeps_iterate(t, eta_sum) else state.z
        b = self.buffers_down.transmit(_mean_buffers(buffers, state.b))
        control = self.control.receive(state, controls, arrived)
        after = State(t + 1, x, b, residuals, z, eta_sum, memory, control=control)
        if self.downlink is None or state.w is None or state.downloads is None:
            return after
        key = plan.broadcast_key(t)
        try:
            w, downloads = state.downloads.send(self.downlink, x, state.w, key, t, arrived)
        except NotFinite:  # x and w are finite, but x - w overflows
            raise Diverged(t, arrived, "the broadcast (the model minus the clients' copy)") from None
        return replace(after, w=w, downloads=downloads)

    def _next_rows(self, made: Outgoing, control: Outgoing | None, lost: list[bool]) -> Tensor | None:
        """Return what the clients keep: residual and c_i; None if they keep neither.

        The payloads of a lost reply go back into the client's memories.
        """
        e = _settle(self.plan.feedback, made, lost)
        variates = self.control.variates
        c_i = (
            None if variates is None or control is None else _settle(variates.channel.feedback, control, lost)
        )
        return self.row.join(e, c_i)

    def _count_downloads(self, state: State, start: Start) -> dict[int, Count]:
        """Return, for each sampled client, a function that counts what the client downloads.

        This is the model (or changes of it), the buffers, the vector that the feedback broadcasts, and c (or
        changes of it). `start` starts a count, for example in a thread.
        """
        shared, control, t = self._shared(state), state.control, state.t
        beside = self.buffers_down.bytes(state.b)
        beside += 0 if shared is None else dense_bytes(shared, self.layout)
        counts = self._count_vector(t, state.broadcast, state.downloads, start)
        more = self._count_vector(t, control.c, control.downloads, start) if control else {}

        def add(client: int) -> Download:
            found, extra = counts[client](), more[client]().bytes if more else 0
            return found._replace(bytes=found.bytes + extra + beside)

        return {client: partial(add, client) for client in counts}

    def _count_vector(self, t: int, w: Tensor, downloads: Downloads | None, start: Start) -> dict[int, Count]:
        """Return, for each sampled client, a function that counts the download of the vector w.

        `downloads` records which client holds which version; None if each gets the whole vector.
        """
        sampled = self.plan.sampled(t)
        if self.downlink is None or downloads is None:
            whole = Download("whole", 0, dense_bytes(w, self.layout))
            return dict.fromkeys(sampled, lambda: whole)
        return downloads.count(t, sampled, w, self.downlink, start)

    def _measure_broadcast(self, state: State, after: State) -> Broadcast | None:
        """Return the metrics' figures of a compressed broadcast; None if the whole model is broadcast."""
        if state.downloads is None:
            return None
        return state.downloads.held.keys(), norm2(after.x - after.broadcast)

    def _record(
        self,
        replies: Sequence[Reply],
        mean_g2: float,
        norms: ResidualNorms,
        broadcast: Broadcast | None,
        counts: Mapping[int, Count],
    ) -> Record:
        """Return a round's row of metrics; `replies` are in client order, `counts` give the downloads.

        `mean_g2` is the squared norm of the mean update, `norms` are the sums of the residual norms.
        """
        plan, downloads = self.plan, {client: count() for client, count in counts.items()}
        row = summarise(replies, len(downloads) - len(replies), self.layout.d, mean_g2)
        row["downlink_bytes"] = sum(each.bytes for each in downloads.values())
        if broadcast is not None:
            held, gap2 = broadcast
            row["first_download_bytes"] = sum(each.bytes for i, each in downloads.items() if i not in held)
            row["downlink_messages"] = sum(each.messages for each in downloads.values())
            row["whole_downloads"] = sum(each.kind == "whole" for each in downloads.values())
            row["copy_gap_norm2"] = finite(gap2)
        row |= norms.columns(plan.m)
        took = {reply.client: (reply.K, reply.up_bytes) for reply in replies}
        # The round ends when the slowest client's reply arrives.
        row["simulated_seconds"] = (
            None
            if not plan.timed
            else max(plan.link.seconds(i, *took.get(i, (0, 0)), each.bytes) for i, each in downloads.items())
        )
        return row

    def _evaluate(self, state: State, task: Task, first: int = 0, every: int = 1) -> EvaluatedBatches:
        """Evaluate the model that clients hold, on the task's test batches `first`, `first + every`, ..."""
        self.vectors.write(state.broadcast, state.b)
        with self._setting():
            # The metric may draw random numbers. No client has the number m, so this seed is not used twice.
            seed_generators(self.device, self.plan.config.seed, state.t, self.plan.m)
            where = self.device, self.dtype
            return evaluate_batches(self.vectors.model, task, *where, first, every, self._prepare)


def _mean_buffers(buffers: Sequence[tuple[Tensor, float]], otherwise: Tensor) -> Tensor:
    """Return the mean of pairs (buffers, weight), summed in their order; `otherwise` if there are none."""
    if not buffers or not len(otherwise):
        return otherwise
    total = torch.zeros_like(otherwise)
    for b, weight in buffers:
        total += b.to(total) * weight
    return total / sum(weight for _, weight in buffers)


def _settle(feedback: Feedback, made: Outgoing, lost: list[bool]) -> Tensor | None:
    """Return the clients' next memories; the payload of a lost reply goes back into its client's memory."""
    memory: Tensor | None = made.memory
    if memory is None or not any(lost):
        return memory
    rows = torch.tensor(lost, device=memory.device).reshape(*memory.shape[:-1], 1)
    return torch.where(rows, feedback.restore(memory, made.payload), memory)


class ClientRound(NamedTuple):
    """One client's round: what the client sent and kept, and its figures for the metrics."""

    payload: Payload
    control: Payload | None  # the change of c_i
    b: Tensor
    g: Tensor
    memory: Tensor | None  # what the client keeps after the round: residual and c_i
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
            if self.row.length:
                memories = {each.reply.client: each.memory for each in sent if each.memory is not None}
                residuals = residuals.update(self._kept(t, list(memories), memories.values()))
            arrived = {each.reply.client: each for each in sent if not each.reply.lost}
            payloads = [(each.payload, [plan.weight(i)]) for i, each in arrived.items()]
            also = [(each.control, [plan.weight(i)]) for i, each in arrived.items()]
            controls = [(control, weight) for control, weight in also if control is not None]
            buffers = [(each.b, plan.weight(i)) for i, each in arrived.items()]
            state_next = self._next_state(state, payloads, controls, buffers, list(arrived), residuals)
        counts, broadcast = self._count_downloads(state, cache), self._measure_broadcast(state, state_next)
        replies, mean_g2 = [each.reply for each in sent], _mean_norm2([each.g for each in sent])
        row = self._record(replies, mean_g2, residuals.norms2.sums, broadcast, counts)
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
        """Run lines 5 to 15 of Algorithm 1 for a client.

        If the reply is lost, its payload goes back into the client's memory.
        """
        plan, t, shared = self.plan, state.t, self._shared(state)
        e, c_i = self._memories(state, client)
        x_0 = plan.feedback.start(state.broadcast, e, shared)
        correction = self.control.correct(state, c_i)
        trained = train_client(plan, self.task, self.vectors, t, x_0, state.b, client, correction=correction)
        (K,), x_K, loss = trained.K, trained.x_K[0], float(trained.loss)
        g = local_update(x_0, x_K, plan.divisor(t, K))
        made = self._channel(state).send(g, e, plan.key(t, client), t, shared=shared)
        control = self.control.send(state, c_i, x_0, x_K, K, partial(plan.key, t, client))
        if not math.isfinite(loss):
            raise NotFinite([client])
        lost, b_sent = plan.lost(t, client), self.buffers_up.transmit(trained.b_K[0])
        memory = self._next_rows(made, control, [lost])
        up = self.ledger.count(t, client, made.payload) + self.buffers_up.bytes(b_sent)
        sent = sum(made.payload.counts())
        if control is not None:
            up += self.ledger.count(t, client, control.payload, CONTROL)
            sent += sum(control.payload.counts())
        reply = Reply(client, K, loss, norm2(g), norm2(made.p), norm2(made.left), sent, up, lost)
        return ClientRound(made.payload, control and control.payload, b_sent, g, memory, reply)

    def _memories(self, state: State, client: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the client's residual and c_i; None for what clients do not keep."""
        return self.row.split(state.residuals.get(client, state.x.new_zeros(self.row.length)))


def _mean_norm2(g: list[Tensor]) -> float:
    """Return the squared norm of the mean of the clients' updates `g`; 0 if there are none."""
    if not g:
        return 0.0
    total = torch.zeros_like(g[0])
    for each in g:
        total += each
    return norm2(total / len(g))
