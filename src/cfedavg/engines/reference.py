"""The reference engine: one client after another, as the pseudocode has it. The oracle of the fast ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cfedavg.algorithm import average, feed_back, local_update, server_update
from cfedavg.engines.ledger import Ledger, dense_bytes
from cfedavg.errors import Diverged, InputError, NotFinite
from cfedavg.evaluate import evaluate
from cfedavg.keys import Purpose, key, signed
from cfedavg.layout import Layout
from cfedavg.local import Vectors, after, batches, local_sgd, to_device
from cfedavg.metrics import Record, Reply, summarise
from cfedavg.payload import Payload
from cfedavg.plan import Plan
from cfedavg.residuals import stochastic_bf16
from cfedavg.state import State, norm2
from cfedavg.task import Task

PRECISIONS = {"float32": torch.float32, "float64": torch.float64}


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

    def __init__(self, plan: Plan, task: Task, device: torch.device, messages: Path | None = None) -> None:
        self.plan, self.task, self.device = plan, task, device
        self.dtype = PRECISIONS[plan.config.precision]
        self.vectors = Vectors(copy.deepcopy(task.model).to(device, self.dtype))
        self.layout, self.identity = self.vectors.layout, self.vectors.identity()
        self.ledger = Ledger(self.layout, messages)

    def start(self) -> State:
        x, b = self.vectors.read()
        return State(0, x, b)

    def round(self, state: State) -> tuple[State, Record]:
        plan, t = self.plan, state.t
        sampled = plan.sampled(t)
        with _reproducible(self.device):
            sent = self._clients(state, [i for i in sampled if plan.steps.at(t, i) > 0])
            arrived = [s for s in sent if not s.reply.lost]
            weights = [plan.weight(s.reply.client) for s in arrived]
            applied = zip((s.payload for s in arrived), weights, strict=True)
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
        record["error_norm2"] = residuals.mean_norm2(plan.m)
        record["simulated_seconds"] = self._seconds(sent, sampled, down)
        z, eta_sum = self._iterate(state)
        b_next = _weighted_mean([s.b for s in arrived], weights, state.b)
        return State(t + 1, x_next, b_next, residuals, z, eta_sum), record

    def _clients(self, state: State, clients: list[int]) -> list[Sent]:
        """Every client's round; if some diverge, the error names them all."""
        sent, diverged = [], []
        for client in clients:
            try:
                sent.append(self._client(state, client))
            except NotFinite:
                diverged.append(client)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise InputError(
                    f"--batch-size leaves client {client} a last batch of one sample, from which BatchNorm "
                    "cannot take a variance: choose another size, or a model with GroupNorm"
                ) from None
        if diverged:
            raise Diverged(state.t, diverged, "the loss or the update")
        return sent

    def _client(self, state: State, client: int) -> Sent:
        """Lines 5 to 15 for one client. A reply that gets lost goes back into the residual whole."""
        plan, t = self.plan, state.t
        config = plan.config
        self.vectors.write(state.x, state.b)
        self._seed(t, client)
        data = batches(self.task.clients[client], config.batch_size, config.seed, t, client)
        work = local_sgd(
            self.vectors.model,
            self.task.loss,
            (to_device(batch, self.device, self.dtype) for batch in data),
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

    def _seed(self, t: int, client: int) -> None:
        """Dropout and the like draw from torch's generators: keyed by round and client, on this device."""
        word = signed(key(self.plan.config.seed, t, client, Purpose.DROPOUT))
        torch.default_generator.manual_seed(word)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(word)

    @property
    def _b_layout(self) -> Layout:
        return self.vectors.buffer_layout

    def _seconds(self, sent: list[Sent], sampled: list[int], down: int) -> float | None:
        """Simulated seconds: the round ends when the slowest client's reply is there."""
        if not self.plan.timed:
            return None
        replies = {s.reply.client: (s.reply.K, s.reply.up_bytes) for s in sent}
        link = self.plan.link
        return max(link.seconds(i, *replies.get(i, (0, 0)), down) for i in sampled)

    def _iterate(self, state: State) -> tuple[tuple[Tensor, Tensor] | None, float]:
        """z of Theorem 2: the iterates so far, each with probability proportional to its eta_L."""
        if not self.plan.config.sample_iterate:
            return None, 0.0
        eta_sum = state.eta_sum + self.plan.rates.eta_local(state.t)
        keep = self.plan.keeps_iterate(state.t, eta_sum)
        return (state.x, state.b) if keep else state.z, eta_sum

    def evaluate(self, state: State) -> Record:
        self.vectors.write(state.x, state.b)
        with _reproducible(self.device):
            self._seed(state.t, self.plan.m)  # for a metric that draws; no client has this number
            return evaluate(self.vectors.model, self.task, self.device, self.dtype)

    def model_at(self, x: Tensor, b: Tensor) -> nn.Module:
        self.vectors.write(x, b)
        return copy.deepcopy(self.vectors.model).cpu()


def _mean_norm2(g: list[Tensor]) -> float:
    """|mean g_i|^2."""
    if not g:
        return 0.0
    total = torch.zeros_like(g[0])
    for each in g:
        total += each
    return norm2(total / len(g))


def _weighted_mean(vectors: list[Tensor], weights: list[float], otherwise: Tensor) -> Tensor:
    """The mean of the buffers that arrived, in client order; without any, the old ones."""
    if not vectors or not len(otherwise):
        return otherwise
    total = torch.zeros_like(otherwise)
    for vector, weight in zip(vectors, weights, strict=True):
        total += vector * weight
    return total / sum(weights)


@contextmanager
def _reproducible(device: torch.device) -> Iterator[None]:
    """The same bits every time: no TF32, no kernels chosen by timing; the user's generators are put back."""
    devices = [device] if device.type == "cuda" else []
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    with torch.random.fork_rng(devices=devices), flags:
        yield
