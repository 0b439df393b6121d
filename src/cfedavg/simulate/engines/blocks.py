"""The fast engine: it trains blocks of clients, and several processes (ranks) can divide the clients.

A round runs the same algorithm as a round of the reference engine. Both engines call the same functions of
`algorithm` and `channel`; this engine calls them once for a whole block of clients. If residuals do not stay
on the device, threads move them while a round trains. On a GPU, threads count the bytes of one round while
the next round trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfedavg.algorithm import Weighted, local_update
from cfedavg.core.arrays import norm2, norms2
from cfedavg.core.errors import Diverged, NotFinite
from cfedavg.core.keys import Purpose
from cfedavg.core.run_files import Record, Reply, ResidualNorms
from cfedavg.simulate.cpu.replacements import FastLayers, join_layers
from cfedavg.simulate.downloads import Count
from cfedavg.simulate.engines.partners import busy_clients
from cfedavg.simulate.engines.rank_round import Messages, RankRound
from cfedavg.simulate.engines.ranks import RankCommands, Ranks, obey
from cfedavg.simulate.engines.reference import Broadcast, Engine
from cfedavg.simulate.engines.requests import Correction, Request, Start, Trained
from cfedavg.simulate.engines.traffic import CountingThreads
from cfedavg.simulate.engines.trainers import Sequential, Trainer
from cfedavg.simulate.engines.trial import takes_channels_last
from cfedavg.simulate.local import EvaluatedBatches, Vectors, channels_last, summarise_batches
from cfedavg.simulate.mover import Mover
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import Residuals
from cfedavg.simulate.state import State
from cfedavg.simulate.vectorised.batches import read_all
from cfedavg.task import Batch, Samples, Task

THREADS = 4  # that count bytes
# Gives the residuals and the c_i of some clients, a row for each; None for what clients do not keep.
Memories = Callable[[Sequence[int]], tuple[Tensor | None, Tensor | None]]


class BlockEngine(Engine):
    """An engine that trains blocks of clients. Rank 0 calls `round`; the other ranks call `serve`."""

    def __init__(
        self,
        plan: Plan,
        task: Task,
        device: torch.device,
        make_trainer: Callable[[Vectors, Callable[[Batch], Batch]], Trainer],
        messages: Path | None = None,
        ranks: Ranks | None = None,
        read: Callable[[Samples], Any] | None = None,
    ) -> None:
        """Set up the engine; `read` returns a data set on the device (for the test set on a GPU)."""
        self.ranks = ranks or Ranks()
        super().__init__(plan, task, device, messages, self.ranks.rank)
        if takes_channels_last(task, self.dtype):
            model: Any = self.vectors.model
            model.to(memory_format=torch.channels_last)
            self._prepare = channels_last
        self.trainer = make_trainer(self.vectors, self._prepare)
        self._fast = isinstance(self.trainer, Sequential) and self.trainer.fast
        if self._fast:
            join_layers(self.vectors.model)
        # A GPU leaves the processor free to count; on a CPU, counting threads would slow training down.
        self._threads = CountingThreads(THREADS) if device.type == "cuda" else None
        self.behind = 1 if self._threads else 0
        half = plan.config.residual_precision == "bf16"
        self.mover = Mover(device, plan.clients_per_round, torch.bfloat16 if half else self.dtype)
        self.commands = RankCommands(self.ranks)
        self._together = plan.m  # how many clients' updates are compressed at once
        self._read = read or partial(read_all, device=device, dtype=self.dtype)
        self._request: Request | None = None  # of the round that begins
        self._memories: Memories = lambda some: (None, None)  # of the clients of that round

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        """Run a round on all ranks; return the new state and a function that gives the row of metrics.

        The function waits for the threads that count bytes.
        """
        with self._setting():
            self.ledger.open(state.t)
            self.commands.send("round", state)
            residuals, mine = self._clients(state)
            parts = self.commands.collect(mine)
            _raise_first(state.t, parts)
            state_next = self._aggregate(state, parts, residuals)
        counts = self._count_downloads(state, self._threads.submit if self._threads else cache)
        broadcast = self._measure_broadcast(state, state_next)
        return state_next, partial(self._record_ranks, parts, broadcast, counts)

    def request(self, state: State) -> Request:
        """Return the local work of this rank's clients in the round that `round` runs next.

        From then on, threads count the bytes of the round before.
        """
        if self._threads:
            self._threads.begin()
        clients = self.ranks.own(busy_clients(self.plan, state.t))
        self._memories = self._fetch(state, clients)
        start, correction = self._start(state, self._memories), self._correct(state, self._memories)
        self._request = Request(self.plan, self.task, state.t, start, state.b, clients, correction)
        return self._request

    def _fetch(self, state: State, clients: list[int]) -> Memories:
        """Begin to read what these clients keep; return a function that gives it."""
        if not self.row.length:
            return lambda some: (None, None)
        rows = self.mover.fetch(state.residuals, clients, state.x.new_zeros(self.row.length))
        return lambda some: self.row.split(rows(some))

    def _clients(self, state: State) -> tuple[Residuals, RankRound]:
        """Run the round of this rank's clients; return this rank's new residuals and what clients sent."""
        plan, mine = self.plan, RankRound()
        request, self._request = self._request or self.request(state), None
        kept: dict[int, Tensor] = {}
        for block in self.trainer.train(request):
            done = 0
            while done < len(block.clients):
                piece = block.part(done, done + self._together)
                n = len(piece.clients)
                try:
                    kept |= self._compress(state, self._memories, piece, mine)
                    done += n
                    continue
                except torch.OutOfMemoryError:
                    pass  # the tensors of the failed attempt are freed only after this line
                if n == 1:
                    self.trainer.shrink()
                self._together = -(-n // 2) if n > 1 else plan.m
        residuals = state.residuals
        if self.row.length and not mine.diverged:
            residuals = self.mover.update(residuals, kept)
        mine.norms = residuals.norms2.sums
        return residuals, mine

    def _start(self, state: State, memories: Memories) -> Start:
        """Return a function that gives clients their starting points.

        A starting point is the broadcast model; some kinds of feedback move it for each client.
        """
        feedback, shared = self.plan.feedback, self._shared(state)
        if not feedback.moves_start:
            return lambda clients: state.broadcast
        return lambda clients: feedback.start(state.broadcast, memories(clients)[0], shared)

    def _correct(self, state: State, memories: Memories) -> Correction | None:
        """Return a function that gives clients' c - c_i; None if there are no control variates."""
        if state.control is None:
            return None
        return lambda clients: self.control.correct(state, memories(clients)[1])

    def _compress(
        self, state: State, memories: Memories, block: Trained, mine: RankRound
    ) -> dict[int, Tensor]:
        """Compress the block's updates (lines 10 to 15 of Algorithm 1); return the clients' next memories.

        Add what the clients send to `mine`. If a reply is lost, its payload goes back into the client's
        memory.
        """
        plan, t, clients = self.plan, state.t, block.clients
        g = local_update(block.x_0, block.x_K, self._divisors(t, block))
        K = torch.tensor(block.K, device=self.device)[:, None]
        (e, c_i), loss = memories(clients), block.loss.tolist()
        bad = {i for i in range(len(clients)) if not math.isfinite(loss[i])}
        try:
            words = partial(self._keys, t, clients)
            made = self._channel(state).send(g, e, words(Purpose.SELECT), t, shared=self._shared(state))
            control = self.control.send(state, c_i, block.x_0, block.x_K, K, words)
        except NotFinite as error:
            bad |= set(error.rows)
        if bad:
            mine.diverged += [clients[i] for i in sorted(bad)]
            return {}
        g2, p2, noise2 = (norms2(each) for each in (g, made.p, made.left))
        lost, counts = [plan.lost(t, i) for i in clients], made.payload.counts()
        if control is not None:
            counts = [sum(both) for both in zip(counts, control.payload.counts(), strict=True)]
        kept, after = dict[int, Tensor](), self._next_rows(made, control, lost)
        if after is not None:
            stays = state.residuals.lives_on(self.device)
            kept = self._kept(t, clients, after, copies=stays)  # else the mover copies rows
        g_sum = g.double().sum(0) + (0 if mine.g_sum is None else mine.g_sum)
        # The lines below allocate little memory: if memory ran out, the block would be delivered twice.
        b_sent, counted = self.buffers_up.transmit(block.b_K), (self.ledger, self._threads)
        mine.updates.add(t, clients, made.payload, *counted, travels=self.ranks.size > 1)
        if control is not None:
            mine.controls.add(t, clients, control.payload, *counted, travels=self.ranks.size > 1)
        mine.buffers += list(b_sent)
        mine.g_sum = g_sum
        mine.replies += [
            Reply(client, block.K[i], loss[i], g2[i], p2[i], noise2[i], counts[i], 0, lost[i])
            for i, client in enumerate(clients)
        ]
        return kept

    def _divisors(self, t: int, block: Trained) -> Tensor | None:
        """Return the numbers by which clients divide their updates, with shape (n, 1); None: by none."""
        found = [each for K in block.K if (each := self.plan.divisor(t, K)) is not None]
        return torch.tensor(found, device=self.device, dtype=self.dtype)[:, None] if found else None

    def _aggregate(self, state: State, parts: Sequence[RankRound], residuals: Residuals) -> State:
        """Return the state after the round; the payloads of all ranks are added up in client order."""
        replies = [reply for part in parts for reply in part.replies]
        weight = {r.client: 0.0 if r.lost else self.plan.weight(r.client) for r in replies}
        payloads = self._sort(weight, [part.updates for part in parts])
        controls = self._sort(weight, [part.controls for part in parts])
        pairs = [pair for part in parts for pair in zip(part.replies, part.buffers, strict=True)]
        pairs = sorted((pair for pair in pairs if not pair[0].lost), key=lambda pair: pair[0].client)
        buffers = [(b, weight[reply.client]) for reply, b in pairs]
        arrived = [reply.client for reply, _ in pairs]
        return self._next_state(state, payloads, controls, buffers, arrived, residuals)

    def _sort(self, weight: Mapping[int, float], parts: Sequence[Messages]) -> Iterator[Weighted]:
        """Yield the payloads of all ranks on this device, in client order, with the clients' weights."""

        def here(array: Tensor | np.ndarray) -> Tensor:
            return array if isinstance(array, Tensor) else torch.from_numpy(array).to(self.device)

        blocks = sorted((block for part in parts for block in part.payloads), key=lambda block: block[0])
        for clients, payload in blocks:
            yield payload.map(here), [weight[i] for i in clients]

    def _record_ranks(
        self, parts: Sequence[RankRound], broadcast: Broadcast | None, counts: Mapping[int, Count]
    ) -> Record:
        """Wait until all bytes are counted, then return the row of metrics over the clients of all ranks."""
        replies = [
            replace(reply, up_bytes=up + self.buffers_up.bytes(b))
            for part in parts
            for reply, up, b in zip(part.replies, part.bytes(), part.buffers, strict=True)
        ]
        replies.sort(key=lambda reply: reply.client)
        sums = [part.g_sum for part in parts if part.g_sum is not None]
        total = sum((each.to(sums[0].device) for each in sums[1:]), sums[0]) if sums else None
        mean_g2 = norm2(total / len(replies)) if total is not None else 0.0
        norms = ResidualNorms(*map(sum, zip(*(part.norms for part in parts), strict=True)))
        return self._record(replies, mean_g2, norms, broadcast, counts)

    def evaluate(self, state: State) -> Record:
        self.commands.send("evaluate", state)
        parts = self.commands.collect(self._evaluate_share(state))
        _raise_first(state.t, parts)
        return summarise_batches(self.task, parts)

    def _evaluate_share(self, state: State) -> EvaluatedBatches:
        with FastLayers() if self._fast else nullcontext():
            return self._evaluate(state, self._task_on_device, self.ranks.rank, self.ranks.size)

    @cached_property
    def _task_on_device(self) -> Task:
        """Return the task; if the device is a GPU, a test set that never changes is copied to it once."""
        if self.device.type == "cpu" or not getattr(self.task.test, "fixed", False):
            return self.task
        return replace(self.task, test=self._read(self.task.test))

    @contextmanager
    def _setting(self) -> Iterator[None]:
        """Inside `with`, compute the same bits every time; on a CPU, use one thread in each rank."""
        threads = torch.get_num_threads()
        with super()._setting():
            if self.device.type == "cpu":
                torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def begin(self, state: State) -> State:
        """Send each rank the residuals of its clients; return the state with rank 0's residuals."""
        return self.commands.begin(state, self.plan.m)

    def checkpoint(self, state: State, save: Callable[[State], None]) -> None:
        """Save the state with the residuals of all ranks."""
        self.commands.send("residuals", state)
        parts = self.commands.collect(state.residuals)
        _raise_first(state.t, parts)
        save(replace(state, residuals=state.residuals.merge(parts)) if len(parts) > 1 else state)
        state.residuals.settle()
        self.commands.send("settle", state)

    def close(self) -> None:
        """End the other ranks, the threads that count bytes, and those that move residuals."""
        try:
            self.commands.dismiss()
        finally:
            self._end_threads()

    def _end_threads(self) -> None:
        if self._threads:
            self._threads.close()
        self.mover.close()

    def serve(self) -> State:
        """Carry out rank 0's commands until rank 0 ends this rank; return the last state received."""
        try:
            return obey(self.ranks, self.start(), self._compute)
        finally:
            self._end_threads()

    def _compute(self, command: str, state: State) -> tuple[Any, Residuals]:
        """Run the command `round` or `evaluate`; return the result for rank 0 and the new residuals."""
        if command == "evaluate":
            return self._evaluate_share(state), state.residuals
        with self._setting():
            after, mine = self._clients(state)
        mine.make_portable()
        return mine, after


def _raise_first(t: int, parts: Sequence[Any]) -> None:
    """Raise the first error in the ranks' results `parts`; else, if clients diverged, raise Diverged."""
    for part in parts:
        if isinstance(part, Exception):
            raise part
    if diverged := sorted(i for part in parts if isinstance(part, RankRound) for i in part.diverged):
        raise Diverged(t, diverged, "the loss or the update")
