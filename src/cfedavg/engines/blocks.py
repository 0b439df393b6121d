"""The fast engine: local work by a trainer, in blocks of clients; clients shared out among ranks.

What a round does is what the reference engine does, client by client; here blocks go through the same
functions of `algorithm`, residuals stay on the device, and bytes are counted while the device goes on.
"""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg.algorithm import average, feed_back, local_update, server_update
from cfedavg.engines.base import Trained, Trainer
from cfedavg.engines.common import (
    PRECISIONS,
    model_of,
    next_iterate,
    reproducible,
    seed_generators,
    simulated_seconds,
    weighted_mean,
)
from cfedavg.engines.ledger import Ledger, dense_bytes
from cfedavg.engines.probes import takes_channels_last
from cfedavg.engines.ranks import Ranks
from cfedavg.errors import Diverged, InputError, NotFinite
from cfedavg.evaluate import Part, evaluate_batches, summary
from cfedavg.keys import Purpose, keys
from cfedavg.local import Vectors, channels_last
from cfedavg.metrics import Record, Reply, summarise
from cfedavg.payload import Payload
from cfedavg.plan import Plan
from cfedavg.residuals import InMemory, Residuals, stochastic_bf16
from cfedavg.stack.pool import whole
from cfedavg.state import State
from cfedavg.task import Batch, Task
from cfedavg.tensors import norm2, rows_norms2

COUNTERS = 4  # threads that count bytes


@dataclass
class Sent:
    """What the clients of one rank sent in a round, and what is reported of them."""

    clients: list[int] = field(default_factory=list)
    payloads: list[tuple[list[int], Payload]] = field(default_factory=list)  # with whose they are
    buffers: list[Tensor] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)  # without bytes
    counts: list[Future[list[int]] | list[int]] = field(default_factory=list)
    g_sum: Tensor | None = None
    norms2: list[float] = field(default_factory=list)  # of all residuals of this rank
    diverged: list[int] = field(default_factory=list)

    def bytes(self) -> list[int]:
        """Of every client, in order; waits for those that are still being counted."""
        found = [each.result() if isinstance(each, Future) else each for each in self.counts]
        return [n for block in found for n in block]


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
        self._counters = ThreadPoolExecutor(COUNTERS) if device.type == "cuda" else None
        self.behind = 1 if self._counters else 0
        self._waiting = False  # for the answers of the other ranks

    def start(self) -> State:
        x, b = self.vectors.read()
        return State(0, x, b)

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        plan, t = self.plan, state.t
        sampled = plan.sampled(t)
        with self._setting():
            self.ledger.open(t)
            self._tell("round", state)
            residuals, sent = self._part(state)
            parts = self._answers(sent)
            _raise(t, parts)
            x_next, b_next = self._combined(state, parts)
        if not bool(torch.isfinite(x_next).all()):
            arrived = sorted(reply.client for part in parts for reply in part.replies if not reply.lost)
            raise Diverged(t, arrived, "the model made from the updates")
        z, eta_sum = next_iterate(plan, state)
        down = dense_bytes(state.x, self.layout) + dense_bytes(state.b, self.vectors.buffer_layout)
        record = lambda: self._record(parts, sampled, down)  # noqa: E731
        return State(t + 1, x_next, b_next, residuals, z, eta_sum), record

    def _part(self, state: State) -> tuple[Residuals, Sent]:
        """The round of the clients of this rank, and its residuals after it."""
        plan, t, sent = self.plan, state.t, Sent()
        busy = (i for i in plan.sampled(t) if plan.steps.at(t, i) > 0)
        mine = self.ranks.mine(busy)
        kept: dict[int, Tensor] = {}
        for block in self.trainer.train(t, state.x, state.b, mine):
            kept |= self._block(state, block, sent)
        residuals = state.residuals
        if plan.config.error_feedback and not sent.diverged:
            residuals = residuals.updated(kept)
        sent.norms2 = list(residuals.norms2.values())
        return residuals, sent

    def _block(self, state: State, block: Trained, sent: Sent) -> dict[int, Tensor]:
        """Lines 10 to 15 for a block; a reply that gets lost goes back into the residual whole."""
        plan, t, n = self.plan, state.t, len(block.clients)
        K = torch.tensor(block.K, device=self.device)[:, None]
        g = local_update(state.x, block.x_K, K, plan.rates.update)
        e = torch.stack([state.residuals.get(i, state.x) for i in block.clients])
        loss = block.loss.tolist()
        bad = {i for i in range(n) if not math.isfinite(loss[i])}
        try:
            words = self._keys(t, block.clients, Purpose.SELECT)
            payload, e_next = feed_back(g, e, plan.compressor, words, self.layout)
        except NotFinite as error:
            bad |= set(error.rows)
        if bad:
            sent.diverged += [block.clients[i] for i in sorted(bad)]
            return {}
        p = e.add_(g)
        g2, p2, noise2 = (rows_norms2(each) for each in (g, p, e_next))
        lost = [plan.lost(t, i) for i in block.clients]
        counts = payload.counts()
        sent.replies += [
            Reply(client, block.K[i], loss[i], g2[i], p2[i], noise2[i], counts[i], 0, lost[i])
            for i, client in enumerate(block.clients)
        ]
        self._deliver(t, block, payload, sent)
        sent.g_sum = g.double().sum(0) + (0 if sent.g_sum is None else sent.g_sum)
        if any(lost):
            e_next = torch.where(torch.tensor(lost, device=self.device)[:, None], p, e_next)
        return self._kept(t, block.clients, e_next)

    def _deliver(self, t: int, block: Trained, payload: Payload, sent: Sent) -> None:
        """Hands the payloads on: to the server's side of this process, or to rank 0; and has them counted."""
        plain = payload.numpy()
        if self._counters is None:
            sent.counts.append(self.ledger.replies(t, block.clients, plain))
        else:
            each = list(zip(block.clients, plain.clients(), strict=True))
            share = -(-len(each) // COUNTERS)
            for start in range(0, len(each), share):
                sent.counts.append(self._counters.submit(self._count, t, each[start : start + share]))
        sent.clients += block.clients
        if self.ranks.size == 1:
            sent.payloads.append((block.clients, payload))
        else:
            sent.payloads += [([i], one) for i, one in zip(block.clients, plain.clients(), strict=True)]
        sent.buffers += list(block.b_K)

    def _count(self, t: int, each: list[tuple[int, Payload]]) -> list[int]:
        return [n for client, one in each for n in self.ledger.replies(t, [client], one)]

    def _kept(self, t: int, clients: list[int], e_next: Tensor) -> dict[int, Tensor]:
        """The next residuals, as they are stored: each by itself, so that none keeps the block alive."""
        if self.plan.config.residual_precision == "full":
            return {client: e.clone() for client, e in zip(clients, e_next, strict=True)}
        words = self._keys(t, clients, Purpose.RESIDUAL)
        return {i: stochastic_bf16(e, word) for i, e, word in zip(clients, e_next, words, strict=True)}

    def _keys(self, t: int, clients: list[int], purpose: Purpose) -> Tensor:
        words = keys(self.plan.config.seed, t, np.array(clients, np.int64), int(purpose))
        return torch.from_numpy(words).to(self.device)

    def _combined(self, state: State, parts: Sequence[Sent]) -> tuple[Tensor, Tensor]:
        """Lines 17 to 19: what arrived, summed in the order of the clients' numbers."""
        replies = [reply for part in parts for reply in part.replies]
        weight = {r.client: 0.0 if r.lost else self.plan.weight(r.client) for r in replies}
        blocks = sorted((block for part in parts for block in part.payloads), key=lambda block: block[0])
        weighted = ((payload.map(self._tensor), [weight[i] for i in owners]) for owners, payload in blocks)
        x_next = server_update(state.x, average(state.x, weighted), self.plan.rates.eta)
        buffers = sorted(
            (pair for part in parts for pair in zip(part.clients, part.buffers, strict=True)),
            key=lambda pair: pair[0],
        )
        arrived = [(b, weight[i]) for i, b in buffers if weight[i]]
        return x_next, weighted_mean([b for b, _ in arrived], [w for _, w in arrived], state.b)

    def _tensor(self, array: Tensor | np.ndarray) -> Tensor:
        return array if isinstance(array, Tensor) else torch.from_numpy(array).to(self.device)

    def _record(self, parts: Sequence[Sent], sampled: list[int], down: int) -> Record:
        """The round's line; waits until all messages are counted."""
        up_b = self._buffer_bytes
        replies = [
            replace(reply, up_bytes=up + up_b)
            for part in parts
            for reply, up in zip(part.replies, part.bytes(), strict=True)
        ]
        replies.sort(key=lambda reply: reply.client)
        sums = [part.g_sum.to(self.device) for part in parts if part.g_sum is not None]
        mean_g2 = norm2(sum(sums[1:], sums[0]) / len(replies)) if sums else 0.0
        record = summarise(replies, len(sampled) - len(replies), self.layout.d, mean_g2)
        record["downlink_bytes"] = down * len(sampled)
        record["error_norm2"] = math.fsum(n for part in parts for n in part.norms2) / self.plan.m
        took = {reply.client: (reply.K, reply.up_bytes) for reply in replies}
        record["simulated_seconds"] = simulated_seconds(self.plan, took, sampled, down)
        return record

    @cached_property
    def _buffer_bytes(self) -> int:
        """What a client's buffers add to its reply."""
        return dense_bytes(self.start().b, self.vectors.buffer_layout)

    def evaluate(self, state: State) -> Record:
        self._tell("evaluate", state)
        parts = self._answers(self._evaluate(state.t, state.x, state.b))
        _raise(state.t, parts)
        return summary(self.task, parts)

    def _evaluate(self, t: int, x: Tensor, b: Tensor) -> Part:
        """The batches of the test set that are this rank's."""
        self.vectors.write(x, b)
        with self._setting():
            seed_generators(self.device, self.plan.config.seed, t, self.plan.m)  # no client has this number
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

    # What follows is for several ranks: rank 0 tells, the others do.

    def begin(self, state: State) -> State:
        """Rank 0 has a state with everybody's residuals; each rank keeps those of its own clients."""
        parts = []
        if self.ranks.size > 1:
            shares = [range(rank, self.plan.m, self.ranks.size) for rank in range(self.ranks.size)]
            parts = [state.residuals.only(share) for share in shares]
        with self.ranks.together():
            self._tell("begin", state)
            if self.ranks.size > 1:
                self.ranks.deal(parts)
        return replace(state, residuals=parts[0]) if parts else state

    def checkpoint(self, state: State, save: Callable[[State], None]) -> None:
        """Saves the state with everybody's residuals."""
        self._tell("collect", state)
        parts = self._answers(state.residuals)
        save(replace(state, residuals=state.residuals.merged(parts)) if len(parts) > 1 else state)
        state.residuals.settled()
        self._tell("settled", state)

    def close(self) -> None:
        """Sends the other ranks home."""
        try:
            with self.ranks.together():
                self._tell("stop", None)
                self._answers(None)  # everyone has heard it, so that connections may be closed
        finally:
            if self._counters:
                self._counters.shutdown()

    def _tell(self, command: str, state: State | None) -> None:
        if self.ranks.size == 1:
            return
        with self.ranks.together():
            if self._waiting:  # a round was broken off: the answers are still to come, and nobody needs them
                self._answers(None)
            self.ranks.share((command, state and state.t))
            if command in ("round", "evaluate"):
                assert state is not None
                self.ranks.share_tensor(state.x)
                self.ranks.share_tensor(state.b)
            self._waiting = command in ("round", "evaluate", "collect")

    def _answers(self, mine: Any) -> list[Any]:
        with self.ranks.together():
            found = self.ranks.gather(mine)
            self._waiting = False
        return found

    def serve(self) -> State:
        """What a rank other than 0 does: what it is told, until it is sent home; the last state it saw."""
        state, residuals = self.start(), dict[int, Residuals]()
        while True:
            command, t = self.ranks.share()
            if command == "stop":
                self.ranks.gather(None)
                return state
            if command == "begin":
                residuals = {t: self.ranks.deal()}
            elif command == "collect":
                self.ranks.gather(residuals[t])
            elif command == "settled":
                residuals[t].settled()
            else:
                x, b = self.ranks.share_tensor(state.x.clone()), self.ranks.share_tensor(state.b.clone())
                state = State(t, x, b, residuals.get(t, InMemory()))
                self.ranks.gather(self._obeyed(command, state, residuals))

    def _obeyed(self, command: str, state: State, residuals: dict[int, Residuals]) -> Any:
        """The answer to a command; an error is one too. Residuals of this round and the last are kept."""
        try:
            if command == "evaluate":
                return self._evaluate(state.t, state.x, state.b)
            with self._setting():
                after, sent = self._part(state)
            sent.counts, sent.buffers = [sent.bytes()], [b.cpu().clone() for b in sent.buffers]
            sent.g_sum = None if sent.g_sum is None else sent.g_sum.cpu()
            residuals[state.t + 1] = after
            residuals.pop(state.t - 1, None)
            return sent
        except Exception as error:
            return _portable(error)


def _portable(error: Exception) -> Exception:
    """The error, fit to be sent: itself if pickle gives it back, else its words; a bug with where it was."""
    if not isinstance(error, InputError):
        error.add_note("on another rank: " + "".join(traceback.format_exception(error)))
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # whatever a class of somebody else's does
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _raise(t: int, parts: Sequence[Any]) -> None:
    """What went wrong on some rank goes wrong here."""
    for part in parts:
        if isinstance(part, Exception):
            raise part
    if diverged := sorted(i for part in parts if isinstance(part, Sent) for i in part.diverged):
        raise Diverged(t, diverged, "the loss or the update")
