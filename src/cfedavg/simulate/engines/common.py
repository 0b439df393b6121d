"""What every engine needs beside the algorithm: numbers that come out the same again, time, averages."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cfedavg.algorithm import ServerMemory
from cfedavg.core.arrays import norm2
from cfedavg.core.errors import Diverged, InputError, NotFinite
from cfedavg.core.keys import Purpose, key, signed
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Record, finite
from cfedavg.simulate.downloads import Count, Download, Downloads, Start
from cfedavg.simulate.engines.ledger import dense_bytes
from cfedavg.simulate.engines.statistics import Statistics
from cfedavg.simulate.local import Vectors
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import Residuals
from cfedavg.simulate.state import State
from cfedavg.task import Batch, Loss, Task, wrap_errors
from cfedavg.wire import measure

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
    return wrap_errors(task.loss, f"Task.loss fails on a batch of client {client}")


def guarded_batches(data: Iterator[Batch], client: int) -> Iterator[Batch]:
    """The same batches; an error in one names the client."""
    take = wrap_errors(lambda: next(data), f"Task.clients[{client}] gives no batch")
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
    plan: Plan, replies: Mapping[int, tuple[int, int]], down: Mapping[int, int]
) -> float | None:
    """The round ends when the slowest client's reply is there.

    `replies` are (K, bytes) by client, `down` the bytes that each sampled client downloads.
    """
    if not plan.timed:
        return None
    return max(plan.link.seconds(i, *replies.get(i, (0, 0)), length) for i, length in down.items())


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


def first_state(plan: Plan, vectors: Vectors) -> State:
    """Return the state before the first round, from the model's parameters and buffers."""
    x, b = vectors.read()
    downlink, memory = plan.downlink(vectors.layout), plan.aggregator.init(x)
    b = down_statistics(plan, vectors).travel(b)
    if downlink is None:
        return State(0, x, b, memory=memory)
    w = downlink.first(x)
    return State(0, x, b, memory=memory, w=w, downloads=Downloads.none(w))


def down_statistics(plan: Plan, vectors: Vectors) -> Statistics:
    """Return how running statistics travel to the clients."""
    return Statistics(vectors.buffer_layout, plan.compressor_down)


class Ended(NamedTuple):
    """What the server knows at the end of a round."""

    x: Tensor
    b: Tensor
    memory: ServerMemory
    arrived: list[int]  # the clients whose replies did


def next_state(plan: Plan, vectors: Vectors, state: State, ended: Ended, residuals: Residuals) -> State:
    """Return the state after a round, with the copy that its broadcast leads to."""
    check_finite(state.t, ended.x, ended.memory, ended.arrived)
    z, eta_sum = next_iterate(plan, state)
    b = down_statistics(plan, vectors).travel(ended.b)
    after = State(state.t + 1, ended.x, b, residuals, z, eta_sum, ended.memory)
    downlink = plan.downlink(vectors.layout)
    if downlink is None:
        return after
    assert state.w is not None
    assert state.downloads is not None
    try:
        made = downlink.send(ended.x, state.w, plan.broadcast_key(state.t), state.t)
    except NotFinite:  # x and w are finite, and so far apart that x - w is not
        raise Diverged(state.t, ended.arrived, "the broadcast x - w") from None
    length = measure(made.payload.numpy(), vectors.layout)[0]
    most = downlink.size(state.w)
    downloads = state.downloads.after(state.t, state.w, made.memory, length, ended.arrived, most)
    return replace(after, w=made.memory, downloads=downloads)


def count_downloads(plan: Plan, vectors: Vectors, state: State, start: Start) -> dict[int, Count]:
    """Begin to count what each sampled client downloads: the model or what it missed of it, and the rest."""
    layout, shared = vectors.layout, plan.feedback.broadcast(state.memory.feedback)
    beside = down_statistics(plan, vectors).bytes(state.b) + (
        0 if shared is None else dense_bytes(shared, layout)
    )
    sampled, downlink = plan.sampled(state.t), plan.downlink(layout)
    if downlink is None:
        whole = Download("whole", 0, dense_bytes(state.x, layout) + beside)
        return dict.fromkeys(sampled, lambda: whole)
    assert state.downloads is not None
    counts = state.downloads.count(state.t, sampled, state.w, downlink, start)
    return {i: partial(_with_more, count, beside) for i, count in counts.items()}


def _with_more(count: Count, more: int) -> Download:
    found = count()
    return found._replace(bytes=found.bytes + more)


class Broadcast(NamedTuple):
    """A compressed broadcast: who held a copy before it, and |x - w|^2 after it."""

    held: Collection[int]
    gap2: float


def broadcast_of(state: State, after: State) -> Broadcast | None:
    """Return what is reported of the broadcast between two states; None where the model travels whole."""
    if state.downloads is None:
        return None
    return Broadcast(state.downloads.held.keys(), norm2(after.x - after.broadcast))


def download_columns(broadcast: Broadcast | None, downloads: Mapping[int, Download]) -> Record:
    """The columns of what came down; of a compressed broadcast also how, and how far its copy is from x."""
    found: Record = {"downlink_bytes": sum(each.bytes for each in downloads.values())}
    if broadcast is None:
        return found
    return found | {
        "first_download_bytes": sum(each.bytes for i, each in downloads.items() if i not in broadcast.held),
        "downlink_messages": sum(each.messages for each in downloads.values()),
        "whole_downloads": sum(each.kind == "whole" for each in downloads.values()),
        "copy_gap_norm2": finite(broadcast.gap2),
    }


def next_iterate(plan: Plan, state: State) -> tuple[tuple[Tensor, Tensor] | None, float]:
    """z of Theorem 2: the iterates so far, each with probability proportional to its eta_L."""
    if not plan.config.sample_iterate:
        return None, 0.0
    eta_sum = state.eta_sum + plan.rates.eta_local(state.t)
    keep = plan.keeps_iterate(state.t, eta_sum)
    return (state.x, state.b) if keep else state.z, eta_sum
