"""The fast engine: a trainer does the local work in blocks of clients, and ranks share the clients.

A round computes what a round of the reference engine computes, by the same functions of `algorithm` and
`channel`, but for whole blocks. Residuals stay on the device; bytes are counted while the device trains.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg.algorithm import ServerMemory, local_update
from cfedavg.core.arrays import rows_norms2
from cfedavg.core.errors import Diverged, NotFinite
from cfedavg.core.keys import Purpose, keys
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Record, Reply
from cfedavg.simulate.engines import server
from cfedavg.simulate.engines.ranks import RankCommands, Ranks, obey
from cfedavg.simulate.engines.server import RankRound
from cfedavg.simulate.engines.traffic import Counters, Ledger, Statistics
from cfedavg.simulate.engines.trainer import Start, Trained, Trainer
from cfedavg.simulate.engines.trial import takes_channels_last
from cfedavg.simulate.evaluate import EvaluatedBatches, evaluate_batches, summarise_batches
from cfedavg.simulate.local import (
    PRECISIONS,
    Vectors,
    channels_last,
    model_of,
    reproducible,
    seed_generators,
)  # fmt: skip
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import Residuals, stochastic_bf16
from cfedavg.simulate.state import State
from cfedavg.simulate.vectorised.pool import whole
from cfedavg.task import Batch, Task

COUNTERS = 4  # threads that count bytes


class BlockEngine:
    """An engine that runs rounds with a trainer. Rank 0 runs the rounds; other ranks run `serve`."""

    def __init__(
        self,
        plan: Plan,
        task: Task,
        device: torch.device,
        make_trainer: Callable[[Vectors, Callable[[Batch], Batch]], Trainer],
        messages: Path | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.plan, self.task, self.device, self.ranks = plan, task, device, ranks or Ranks()
        self.dtype = PRECISIONS[plan.config.precision]
        model: Any = copy.deepcopy(task.model).to(device, self.dtype)
        self._blank = copy.deepcopy(model)  # untrained; models for the user are copies of this model
        last = takes_channels_last(task, self.dtype)
        self.vectors = Vectors(model.to(memory_format=torch.channels_last) if last else model)
        self._prepare: Callable[[Batch], Batch] = channels_last if last else lambda batch: batch
        self.layout, self.identity = self.vectors.layout, self.vectors.identity()
        self.ledger = Ledger(self.layout, messages, owner=self.ranks.rank == 0)
        self.trainer = make_trainer(self.vectors, self._prepare)
        # A GPU leaves the processor free to count; on a CPU, counting threads would slow training down.
        self._counters = Counters(COUNTERS) if device.type == "cuda" else None
        self.behind = 1 if self._counters else 0
        self.commands = RankCommands(self.ranks)
        self.channel = plan.channel(self.layout)
        self.up = Statistics(self.vectors.buffer_layout, plan.compressor)
        self._together = plan.m  # how many clients' updates are compressed at once

    def start(self) -> State:
        return server.first_state(self.plan, self.vectors)

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        """Run a round on all ranks; the returned function waits for threads that count bytes."""
        plan, t = self.plan, state.t
        with self._setting():
            self.ledger.open(t)
            self.commands.send("round", state)
            residuals, mine = self._clients(state)
            parts = self.commands.collect(mine)
            _raise_first(t, parts)
            arrived = sorted(reply.client for part in parts for reply in part.replies if not reply.lost)
            average = self._average(state, parts)
            state_next = server.next_state(plan, self.vectors, state, average, arrived, residuals)
        begin = cache if self._counters is None else self._counters.hand_in
        counts = server.count_downloads(plan, self.vectors, state, begin)
        broadcast = server.measure_broadcast(state, state_next)
        return state_next, partial(
            server.record_ranks, plan, self.up, self.layout.d, parts, broadcast, counts
        )

    def _clients(self, state: State) -> tuple[Residuals, RankRound]:
        """Run the round of this rank's clients; return the residuals afterwards and what clients sent."""
        plan, t, mine = self.plan, state.t, RankRound()
        if self._counters:
            self._counters.begin()
        clients = self.ranks.mine(i for i in plan.sampled(t) if plan.steps.at(t, i) > 0)
        kept: dict[int, Tensor] = {}
        for block in self.trainer.train(t, self._start(state), state.b, clients):
            done = 0
            while done < len(block.clients):
                piece = block.part(done, done + self._together)
                n = len(piece.clients)
                try:
                    kept |= self._compress(state, piece, mine)
                    done += n
                    continue
                except torch.OutOfMemoryError:
                    pass  # the tensors of the failed attempt are freed only after this line
                if n == 1:
                    self.trainer.shrink()
                self._together = -(-n // 2) if n > 1 else plan.m
        residuals = state.residuals
        if plan.feedback.keeps_client_memory and not mine.diverged:
            residuals = residuals.update(kept)
        mine.norms2 = list(residuals.norms2.values())
        return residuals, mine

    def _start(self, state: State) -> Start:
        """Return a function that gives starting points: the broadcast model, which the feedback may move."""
        feedback, shared = self.plan.feedback, self._shared(state)
        if not feedback.moves_start:
            return lambda clients: state.broadcast
        return lambda clients: feedback.start(state.broadcast, self._memory(state, clients), shared)

    def _memory(self, state: State, clients: list[int]) -> Tensor | None:
        """Return the feedback's memory of these clients, a row for each; None if it keeps no memory."""
        if not self.plan.feedback.keeps_client_memory:
            return None
        return torch.stack([state.residuals.get(i, state.x) for i in clients])

    def _shared(self, state: State) -> Tensor | None:
        return self.plan.feedback.broadcast(state.memory.feedback)

    def _compress(self, state: State, block: Trained, mine: RankRound) -> dict[int, Tensor]:
        """Run lines 10 to 15 of Algorithm 1 for a block, and return the clients' next memories.

        The feedback puts a lost reply back into the client's memory.
        """
        plan, t, clients = self.plan, state.t, block.clients
        K = torch.tensor(block.K, device=self.device)[:, None]
        g = local_update(block.x_0, block.x_K, K, plan.rates.update)
        memory, loss = self._memory(state, clients), block.loss.tolist()
        bad = {i for i in range(len(clients)) if not math.isfinite(loss[i])}
        try:
            words = self._keys(t, clients, Purpose.SELECT)
            made = self.channel.send(g, memory, words, t, shared=self._shared(state))
        except NotFinite as error:
            bad |= set(error.rows)
        if bad:
            mine.diverged += [clients[i] for i in sorted(bad)]
            return {}
        g2, p2, noise2 = (rows_norms2(each) for each in (g, made.p, made.left))
        lost, counts = [plan.lost(t, i) for i in clients], made.payload.counts()
        kept: dict[int, Tensor] = {}
        if memory is not None:
            after: Tensor = made.memory
            if any(lost):
                rows = torch.tensor(lost, device=self.device)[:, None]
                after = torch.where(rows, self.channel.feedback.restore(made.memory, made.payload), after)
            kept = self._kept(t, clients, after)
        g_sum = g.double().sum(0) + (0 if mine.g_sum is None else mine.g_sum)
        # The lines below allocate little memory: if memory ran out, the block would be delivered twice.
        self._deliver(t, block, made.payload, mine)
        mine.g_sum = g_sum
        mine.replies += [
            Reply(client, block.K[i], loss[i], g2[i], p2[i], noise2[i], counts[i], 0, lost[i])
            for i, client in enumerate(clients)
        ]
        return kept

    def _deliver(self, t: int, block: Trained, payload: Payload, mine: RankRound) -> None:
        """Add the block's payloads to this rank's round `mine`; count their bytes here or in threads."""
        known, travels = self.ledger.known(payload), self.ranks.size > 1
        b_sent = self.up.travel(block.b_K)
        each: list[tuple[int, Payload]] = []
        if travels or known is None:
            each += zip(block.clients, payload.numpy().clients(), strict=True)
        if known is not None:
            mine.counts.append(known)
        elif self._counters is None:
            mine.counts.append(self._count(t, each))
        else:
            share = -(-len(each) // self._counters.threads)
            for start in range(0, len(each), share):
                part = partial(self._count, t, each[start : start + share])
                mine.counts.append(self._counters.hand_in(part))
        mine.clients += block.clients
        mine.payloads += [([client], one) for client, one in each] if travels else [(block.clients, payload)]
        mine.buffers += list(b_sent)

    def _count(self, t: int, each: list[tuple[int, Payload]]) -> list[int]:
        return [n for client, one in each for n in self.ledger.replies(t, [client], one)]

    def _average(self, state: State, parts: Sequence[RankRound]) -> tuple[Tensor, Tensor, ServerMemory]:
        """Run lines 17 to 19 of Algorithm 1 in client order; return the next x, b and server memory."""
        plan, rates, t = self.plan, self.plan.rates, state.t
        replies = [reply for part in parts for reply in part.replies]
        weight = {r.client: 0.0 if r.lost else plan.weight(r.client) for r in replies}
        blocks = sorted((block for part in parts for block in part.payloads), key=lambda block: block[0])

        def here(array: Tensor | np.ndarray) -> Tensor:
            return array if isinstance(array, Tensor) else torch.from_numpy(array).to(state.x.device)

        payloads = ((payload.map(here), [weight[i] for i in clients]) for clients, payload in blocks)
        x_next, memory = plan.aggregator.step(
            state.x, state.memory, payloads, everyone=plan.everyone, eta=rates.eta, scale=rates.scale, t=t
        )
        pairs = (pair for part in parts for pair in zip(part.clients, part.buffers, strict=True))
        arrived = [(b, weight[i]) for i, b in sorted(pairs, key=lambda pair: pair[0]) if weight[i]]
        b_next = server.weighted_mean([b for b, _ in arrived], [w for _, w in arrived], state.b)
        return x_next, b_next, memory

    def _kept(self, t: int, clients: list[int], memory: Tensor) -> dict[int, Tensor]:
        """Return the clients' next memories to store, as copies, which do not keep the block in memory."""
        if self.plan.config.residual_precision == "full":
            return {client: row.clone() for client, row in zip(clients, memory, strict=True)}
        words = self._keys(t, clients, Purpose.RESIDUAL)
        return {i: stochastic_bf16(row, word) for i, row, word in zip(clients, memory, words, strict=True)}

    def _keys(self, t: int, clients: list[int], purpose: Purpose) -> Tensor:
        words = keys(self.plan.config.seed, t, np.array(clients, np.int64), int(purpose))
        return torch.from_numpy(words).to(self.device)

    def evaluate(self, state: State) -> Record:
        self.commands.send("evaluate", state)
        parts = self.commands.collect(self._evaluate(state))
        _raise_first(state.t, parts)
        return summarise_batches(self.task, parts)

    def _evaluate(self, state: State) -> EvaluatedBatches:
        """Evaluate this rank's batches of the test set."""
        self.vectors.write(state.broadcast, state.b)
        with self._setting():
            # The metric may draw random numbers; no client has the number m.
            seed_generators(self.device, self.plan.config.seed, state.t, self.plan.m)
            where, share = (self.device, self.dtype), (self.ranks.rank, self.ranks.size)
            return evaluate_batches(self.vectors.model, self._judge, *where, *share, self._prepare)

    @cached_property
    def _judge(self) -> Task:
        """Return the task; on a GPU, with its test set on the device if the test set is fixed."""
        if self.device.type == "cpu" or not getattr(self.task.test, "fixed", False):
            return self.task
        return replace(self.task, test=whole(self.task.test, self.device, self.dtype))

    def model_at(self, x: Tensor, b: Tensor) -> nn.Module:
        return model_of(self._blank, x, b)

    @contextmanager
    def _setting(self) -> Iterator[None]:
        """Inside `with`, compute the same bits every time; on a CPU with one thread for each rank."""
        threads = torch.get_num_threads()
        with reproducible(self.device, self.plan.config.precision):
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
        save(replace(state, residuals=state.residuals.merge(parts)) if len(parts) > 1 else state)
        state.residuals.settle()
        self.commands.send("settle", state)

    def close(self) -> None:
        """End the other ranks and the threads that count bytes."""
        try:
            self.commands.dismiss()
        finally:
            if self._counters:
                self._counters.close()

    def serve(self) -> State:
        """Carry out rank 0's commands until rank 0 ends this rank; return the last state received."""
        return obey(self.ranks, self.start(), self._compute)

    def _compute(self, command: str, state: State) -> tuple[Any, Residuals]:
        """Run the command `round` or `evaluate`; return the result for rank 0 and the residuals after it."""
        if command == "evaluate":
            return self._evaluate(state), state.residuals
        with self._setting():
            after, mine = self._clients(state)
        mine.counts, mine.buffers = [mine.bytes()], [b.cpu().clone() for b in mine.buffers]
        mine.g_sum = None if mine.g_sum is None else mine.g_sum.cpu()
        return mine, after


def _raise_first(t: int, parts: Sequence[Any]) -> None:
    """Raise the first error of any rank, or Diverged with all clients that diverged on any rank."""
    for part in parts:
        if isinstance(part, Exception):
            raise part
    if diverged := sorted(i for part in parts if isinstance(part, RankRound) for i in part.diverged):
        raise Diverged(t, diverged, "the loss or the update")
