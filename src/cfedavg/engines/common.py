"""What every engine needs beside the algorithm: numbers that come out the same again, time, averages."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cfedavg.algorithm import ServerMemory
from cfedavg.engines.ledger import dense_bytes
from cfedavg.errors import Diverged, InputError
from cfedavg.keys import Purpose, key, signed
from cfedavg.layout import Layout
from cfedavg.local import Vectors
from cfedavg.payload import Payload
from cfedavg.plan import Plan
from cfedavg.state import State
from cfedavg.task import Batch, Loss, Task, guarded

PRECISIONS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "tf32": torch.float32,
    "bf16": torch.float32,
}


@contextmanager
def reproducible(device: torch.device, precision: str = "float32") -> Iterator[None]:
    """The same bits every time: no kernels chosen by timing, TF32 only if asked for.

    The user's generators and settings are put back.
    """
    devices = [device] if device.type == "cuda" else []
    tf32 = precision in ("tf32", "bf16")
    flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32)
    before = torch.backends.cuda.matmul.allow_tf32
    with torch.random.fork_rng(devices=devices), flags:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def seed_generators(device: torch.device, seed: int, t: int, client: int) -> None:
    """Dropout and the like draw from torch's generators: keyed by round and client, on this device."""
    word = signed(key(seed, t, client, Purpose.DROPOUT))
    torch.default_generator.manual_seed(word)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(word)


def explained(error: ValueError, client: int) -> ValueError:
    """What torch says of a batch of one sample under BatchNorm, as a sentence that helps."""
    if "more than 1 value per channel" not in str(error):
        return error
    return InputError(
        f"`batch_size` leaves client {client} a last batch of one sample, from which BatchNorm "
        "cannot take a variance: choose another size, or a model with GroupNorm"
    )


def guarded_loss(task: Task, client: int) -> Loss:
    """The task's loss; an error in it names the client."""
    return guarded(task.loss, f"Task.loss fails on a batch of client {client}")


def guarded_batches(data: Iterator[Batch], client: int) -> Iterator[Batch]:
    """The same batches; an error in one names the client."""
    take = guarded(lambda: next(data), f"Task.clients[{client}] gives no batch")
    while True:
        yield take()


def model_of(blank: nn.Module, x: Tensor, b: Tensor) -> nn.Module:
    """A copy of the blank model, on the CPU, with these parameters and buffers."""
    vectors = Vectors(copy.deepcopy(blank))
    vectors.write(x, b)
    return vectors.model.cpu()


def weighted_mean(vectors: Sequence[Tensor], weights: Sequence[float], otherwise: Tensor) -> Tensor:
    """The mean of the buffers that arrived, in client order; without any, the old ones."""
    if not vectors or not len(otherwise):
        return otherwise
    total = torch.zeros_like(otherwise)
    for vector, weight in zip(vectors, weights, strict=True):
        total += vector.to(total) * weight
    return total / sum(weights)


def simulated_seconds(
    plan: Plan, replies: Mapping[int, tuple[int, int]], sampled: Sequence[int], down: int
) -> float | None:
    """The round ends when the slowest client's reply is there. `replies` are (K, bytes) by client."""
    if not plan.timed:
        return None
    return max(plan.link.seconds(i, *replies.get(i, (0, 0)), down) for i in sampled)


def server_step(
    plan: Plan, state: State, payloads: Iterable[tuple[Payload, Sequence[float]]]
) -> tuple[Tensor, ServerMemory]:
    """Lines 17 to 19 with the rates of the plan: x and the server's memory after the round."""
    rates = plan.rates
    return plan.aggregator.step(
        state.x,
        state.memory,
        payloads,
        everyone=plan.everyone,
        eta=rates.eta,
        scale=rates.scale,
        t=state.t,
    )


def check_finite(t: int, x_next: Tensor, memory: ServerMemory, arrived: list[int]) -> None:
    """Raise Diverged if the model, or what the server remembers, has left the finite numbers."""
    if not bool(torch.isfinite(x_next).all()):
        raise Diverged(t, arrived, "the model made from the updates")
    if not all(bool(torch.isfinite(each).all()) for each in memory.vectors().values()):
        raise Diverged(t, arrived, "what the server optimiser or the feedback remembers")


def broadcast_bytes(plan: Plan, state: State, layout: Layout, buffer_layout: Layout) -> int:
    """What one client downloads: the model, its buffers, and what the feedback shares."""
    shared = plan.feedback.broadcast(state.memory.feedback)
    extra = 0 if shared is None else dense_bytes(shared, layout)
    return dense_bytes(state.x, layout) + dense_bytes(state.b, buffer_layout) + extra


def next_iterate(plan: Plan, state: State) -> tuple[tuple[Tensor, Tensor] | None, float]:
    """z of Theorem 2: the iterates so far, each with probability proportional to its eta_L."""
    if not plan.config.sample_iterate:
        return None, 0.0
    eta_sum = state.eta_sum + plan.rates.eta_local(state.t)
    keep = plan.keeps_iterate(state.t, eta_sum)
    return (state.x, state.b) if keep else state.z, eta_sum
