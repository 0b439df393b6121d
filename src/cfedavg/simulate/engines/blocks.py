"""The fast engine: local work by a trainer, in blocks of clients; clients shared out among ranks.

What a round does is what the reference engine does, client by client; here blocks go through the same
functions of `algorithm`, residuals stay on the device, and bytes are counted while the device trains.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg.algorithm import local_update
from cfedavg.channel import Outgoing
from cfedavg.core.arrays import rows_norms2
from cfedavg.core.errors import NotFinite
from cfedavg.core.keys import Purpose, keys
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Record, Reply
from cfedavg.simulate.downloads import Count
from cfedavg.simulate.engines.base import Start, Trained, Trainer
from cfedavg.simulate.engines.common import (
    PRECISIONS,
    Ended,
    broadcast_of,
    count_downloads,
    first_state,
    model_of,
    next_state,
    reproducible,
    seed_generators,
)
from cfedavg.simulate.engines.counters import Counters
from cfedavg.simulate.engines.ledger import Ledger
from cfedavg.simulate.engines.probes import takes_channels_last
from cfedavg.simulate.engines.rank_commands import Crew, serve
from cfedavg.simulate.engines.ranks import Ranks
from cfedavg.simulate.engines.sent import Sent, combined, raise_first, record
from cfedavg.simulate.engines.statistics import Statistics
from cfedavg.simulate.evaluate import Part, evaluate_batches, summary
from cfedavg.simulate.local import Vectors, channels_last
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import Residuals, stochastic_bf16
from cfedavg.simulate.state import State
from cfedavg.simulate.vectorised.pool import whole
from cfedavg.task import Batch, Task

COUNTERS = 4  # threads that count bytes


class BlockEngine:
    """Runs rounds with a trainer. With several ranks, this is rank 0, and `serve` runs on the others."""

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
        self._blank = copy.deepcopy(model)  # what a user gets is made of it: no traces of training
        last = takes_channels_last(task, self.dtype)
        self.vectors = Vectors(model.to(memory_format=torch.channels_last) if last else model)
        self._prepare = channels_last if last else _as_it_is
        self.layout, self.identity = self.vectors.layout, self.vectors.identity()
        self.ledger = Ledger(self.layout, messages, owner=self.ranks.rank == 0)
        self.trainer = make_trainer(self.vectors, self._prepare)
        # A GPU leaves the processor free to count; a CPU has better things to do at the same time.
        self._counters = Counters(COUNTERS) if device.type == "cuda" else None
        self.behind = 1 if self._counters else 0
        self.crew = Crew(self.ranks)
        self.channel = plan.channel(self.layout)
        self.up = Statistics(self.vectors.buffer_layout, plan.compressor)
        self._together = plan.m  # clients whose updates are compressed at once

    def start(self) -> State:
        return first_state(self.plan, self.vectors)

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        plan, t = self.plan, state.t
        with self._setting():
            self.ledger.open(t)
            self.crew.tell("round", state)
            residuals, sent = self._part(state)
            parts = self.crew.answers(sent)
            raise_first(t, parts)
            x_next, b_next, memory = combined(plan, state, parts)
            arrived = sorted(reply.client for part in parts for reply in part.replies if not reply.lost)
            ended = Ended(x_next, b_next, memory, arrived)
            after = next_state(plan, self.vectors, state, ended, residuals)
        counts = count_downloads(plan, self.vectors, state, self._begin_count)
        return after, partial(record, plan, self.up, self.layout.d, parts, broadcast_of(state, after), counts)

    def _begin_count(self, count: Count) -> Count:
        """Have downloads counted by threads, or when the result is asked for."""
        return cache(count) if self._counters is None else self._counters.hand_in(count)

    def _part(self, state: State) -> tuple[Residuals, Sent]:
        """The round of the clients of this rank, and its residuals after it."""
        plan, t, sent = self.plan, state.t, Sent()
        if self._counters:
            self._counters.begin()
        busy = (i for i in plan.sampled(t) if plan.steps.at(t, i) > 0)
        mine = self.ranks.mine(busy)
        kept: dict[int, Tensor] = {}
        for block in self.trainer.train(t, self._start(state), state.b, mine):
            kept |= self._pieces(state, block, sent)
        residuals = state.residuals
        if plan.feedback.keeps_client_memory and not sent.diverged:
            residuals = residuals.updated(kept)
        sent.norms2 = list(residuals.norms2.values())
        return residuals, sent

    def _start(self, state: State) -> Start:
        """Where clients begin: at the broadcast model, unless their feedback moves them."""
        feedback, shared = self.plan.feedback, self._shared(state)
        if not feedback.moves_start:
            return lambda clients: state.broadcast
        return lambda clients: feedback.start(state.broadcast, self._memory(state, clients), shared)

    def _memory(self, state: State, clients: list[int]) -> Tensor | None:
        """What the feedback remembers of these clients, a row for each."""
        if not self.plan.feedback.keeps_client_memory:
            return None
        return torch.stack([state.residuals.get(i, state.x) for i in clients])

    def _shared(self, state: State) -> Tensor | None:
        return self.plan.feedback.broadcast(state.memory.feedback)

    def _pieces(self, state: State, block: Trained, sent: Sent) -> dict[int, Tensor]:
        """Lines 10 to 15 for a block, in pieces that memory has room for."""
        kept: dict[int, Tensor] = {}
        done = 0
        while done < len(block.clients):
            piece = block.part(done, done + self._together)
            n = len(piece.clients)
            try:
                kept |= self._block(state, piece, sent)
                done += n
                continue
            except torch.OutOfMemoryError:
                pass  # only after this line are the tensors of the attempt gone
            if n == 1:
                self.trainer.shrink()
            self._together = -(-n // 2) if n > 1 else self.plan.m
        return kept

    def _block(self, state: State, block: Trained, sent: Sent) -> dict[int, Tensor]:
        """Lines 10 to 15; what gets lost is restored by the feedback."""
        plan, t, n = self.plan, state.t, len(block.clients)
        K = torch.tensor(block.K, device=self.device)[:, None]
        g = local_update(block.x_0, block.x_K, K, plan.rates.update)
        memory, loss = self._memory(state, block.clients), block.loss.tolist()
        bad = {i for i in range(n) if not math.isfinite(loss[i])}
        try:
            words = self._keys(t, block.clients, Purpose.SELECT)
            made = self.channel.send(g, memory, words, t, shared=self._shared(state))
        except NotFinite as error:
            bad |= set(error.rows)
        if bad:
            sent.diverged += [block.clients[i] for i in sorted(bad)]
            return {}
        g2, p2, noise2 = (rows_norms2(each) for each in (g, made.p, made.left))
        lost = [plan.lost(t, i) for i in block.clients]
        counts = made.payload.counts()
        kept = self._kept(t, block.clients, self._after_losses(made, lost)) if memory is not None else {}
        g_sum = g.double().sum(0) + (0 if sent.g_sum is None else sent.g_sum)
        # What has been handed on stays so: from here on no memory of any size is asked for.
        self._deliver(t, block, made.payload, sent)
        sent.g_sum = g_sum
        sent.replies += [
            Reply(client, block.K[i], loss[i], g2[i], p2[i], noise2[i], counts[i], 0, lost[i])
            for i, client in enumerate(block.clients)
        ]
        return kept

    def _deliver(self, t: int, block: Trained, payload: Payload, sent: Sent) -> None:
        """Hands the payloads on: to the server's side of this process, or to rank 0; and has them counted."""
        known, travels = self.ledger.known(payload), self.ranks.size > 1
        b_sent = self.up.travel(block.b_K)
        each: list[tuple[int, Payload]] = []
        if travels or known is None:
            each += zip(block.clients, payload.numpy().clients(), strict=True)
        if known is None:
            self._have_counted(t, each, sent)
        else:
            sent.counts.append(known)
        sent.clients += block.clients
        sent.payloads += [([client], one) for client, one in each] if travels else [(block.clients, payload)]
        sent.buffers += list(b_sent)

    def _have_counted(self, t: int, each: list[tuple[int, Payload]], sent: Sent) -> None:
        """At once, or by threads while the next round trains."""
        if self._counters is None:
            sent.counts.append(self._count(t, each))
            return
        share = -(-len(each) // self._counters.threads)
        for start in range(0, len(each), share):
            part = partial(self._count, t, each[start : start + share])
            sent.counts.append(self._counters.hand_in(part))

    def _count(self, t: int, each: list[tuple[int, Payload]]) -> list[int]:
        return [n for client, one in each for n in self.ledger.replies(t, [client], one)]

    def _after_losses(self, made: Outgoing, lost: list[bool]) -> Tensor:
        """The memories after the round."""
        memory: Tensor = made.memory
        if not any(lost):
            return memory
        rows = torch.tensor(lost, device=self.device)[:, None]
        restored: Tensor = self.channel.restore(made.memory, made.payload)
        return torch.where(rows, restored, memory)

    def _kept(self, t: int, clients: list[int], memory: Tensor) -> dict[int, Tensor]:
        """The next memories, as they are stored: each by itself, so that none keeps the block alive."""
        if self.plan.config.residual_precision == "full":
            return {client: row.clone() for client, row in zip(clients, memory, strict=True)}
        words = self._keys(t, clients, Purpose.RESIDUAL)
        return {i: stochastic_bf16(row, word) for i, row, word in zip(clients, memory, words, strict=True)}

    def _keys(self, t: int, clients: list[int], purpose: Purpose) -> Tensor:
        words = keys(self.plan.config.seed, t, np.array(clients, np.int64), int(purpose))
        return torch.from_numpy(words).to(self.device)

    def evaluate(self, state: State) -> Record:
        self.crew.tell("evaluate", state)
        parts = self.crew.answers(self._evaluate(state))
        raise_first(state.t, parts)
        return summary(self.task, parts)

    def _evaluate(self, state: State) -> Part:
        """The batches of the test set that are this rank's."""
        self.vectors.write(state.broadcast, state.b)
        with self._setting():
            # No client has this number.
            seed_generators(self.device, self.plan.config.seed, state.t, self.plan.m)
            where, share = (self.device, self.dtype), (self.ranks.rank, self.ranks.size)
            return evaluate_batches(self.vectors.model, self._judge, *where, *share, self._prepare)

    @cached_property
    def _judge(self) -> Task:
        """The task with its test set on the device."""
        if self.device.type == "cpu" or not getattr(self.task.test, "fixed", False):
            return self.task
        return replace(self.task, test=whole(self.task.test, self.device, self.dtype))

    def model_at(self, x: Tensor, b: Tensor) -> nn.Module:
        return model_of(self._blank, x, b)

    @contextmanager
    def _setting(self) -> Iterator[None]:
        """The same bits every time. On a CPU each rank has one thread, so their number changes nothing."""
        threads = torch.get_num_threads()
        with reproducible(self.device, self.plan.config.precision):
            if self.device.type == "cpu":
                torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def begin(self, state: State) -> State:
        """Rank 0 has a state with everybody's residuals; each rank keeps those of its own clients."""
        return self.crew.begin(state, self.plan.m)

    def checkpoint(self, state: State, save: Callable[[State], None]) -> None:
        """Saves the state with everybody's residuals."""
        self.crew.tell("collect", state)
        parts = self.crew.answers(state.residuals)
        save(replace(state, residuals=state.residuals.merged(parts)) if len(parts) > 1 else state)
        state.residuals.settled()
        self.crew.tell("settled", state)

    def close(self) -> None:
        """Sends the other ranks home."""
        try:
            self.crew.dismiss()
        finally:
            if self._counters:
                self._counters.close()

    def serve(self) -> State:
        """What a rank other than 0 does, until it is sent home; the last state that it saw."""
        return serve(self.ranks, self.start(), self._answer)

    def _answer(self, command: str, state: State) -> tuple[Any, Residuals]:
        """To a command of rank 0: what it asks for, and the residuals after it."""
        if command == "evaluate":
            return self._evaluate(state), state.residuals
        with self._setting():
            after, sent = self._part(state)
        sent.counts, sent.buffers = [sent.bytes()], [b.cpu().clone() for b in sent.buffers]
        sent.g_sum = None if sent.g_sum is None else sent.g_sum.cpu()
        return sent, after


def _as_it_is(batch: Batch) -> Batch:
    return batch
