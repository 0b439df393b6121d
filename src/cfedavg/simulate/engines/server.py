"""The server's part of a round apart from the average of updates: buffers, broadcast, downloads, metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from cfedavg.algorithm import ServerMemory
from cfedavg.core.arrays import norm2
from cfedavg.core.errors import Diverged, NotFinite
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Record, Reply, finite, residual_norms, summarise
from cfedavg.simulate.downloads import Count, Download, Downloads, Start
from cfedavg.simulate.engines.traffic import Statistics, dense_bytes
from cfedavg.simulate.local import Vectors
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import Residuals
from cfedavg.simulate.state import State
from cfedavg.wire import measure

Broadcast = tuple[Collection[int], float]  # clients that held a model copy before; |x - w|^2 afterwards


def weighted_mean(vectors: Sequence[Tensor], weights: Sequence[float], otherwise: Tensor) -> Tensor:
    """Return the weighted mean of buffers, summed in client order; `otherwise` if there are no buffers."""
    if not vectors or not len(otherwise):
        return otherwise
    total = torch.zeros_like(otherwise)
    for vector, weight in zip(vectors, weights, strict=True):
        total += vector.to(total) * weight
    return total / sum(weights)


def _statistics(plan: Plan, vectors: Vectors) -> Statistics:
    """Return the rounding and byte count of the buffers that the server sends to clients."""
    return Statistics(vectors.buffer_layout, plan.compressor_down)


def first_state(plan: Plan, vectors: Vectors) -> State:
    """Return the state before the first round, made from the model's parameters and buffers."""
    x, b = vectors.read()
    downlink, memory = plan.downlink(vectors.layout), plan.aggregator.init(x)
    b = _statistics(plan, vectors).travel(b)
    if downlink is None:
        return State(0, x, b, memory=memory)
    w = downlink.make(x)
    return State(0, x, b, memory=memory, w=w, downloads=Downloads.none(w))


def next_state(
    plan: Plan,
    vectors: Vectors,
    state: State,
    average: tuple[Tensor, Tensor, ServerMemory],
    arrived: list[int],
    residuals: Residuals,
) -> State:
    """Return the state after a round that produced `average` = (x, b, memory), with the next broadcast.

    If the model or the server's memory is not finite, raise Diverged with the clients in `arrived`.
    """
    x, b, memory = average
    if not bool(torch.isfinite(x).all()):
        raise Diverged(state.t, arrived, "the model made from the updates")
    if not all(bool(torch.isfinite(each).all()) for each in memory.vectors().values()):
        raise Diverged(state.t, arrived, "the memory of the server optimiser or the feedback")
    z, eta_sum = _next_iterate(plan, state)
    after = State(state.t + 1, x, _statistics(plan, vectors).travel(b), residuals, z, eta_sum, memory)
    downlink = plan.downlink(vectors.layout)
    if downlink is None:
        return after
    assert state.w is not None
    assert state.downloads is not None
    try:
        payload, w_next = downlink.send(x, state.w, plan.broadcast_key(state.t), state.t)
    except NotFinite:  # x and w are finite, but x - w overflows
        raise Diverged(state.t, arrived, "the broadcast x - w") from None
    length, most = measure(payload.numpy(), vectors.layout)[0], downlink.size(state.w)
    downloads = state.downloads.after(state.t, state.w, w_next, length, arrived, most)
    return replace(after, w=w_next, downloads=downloads)


def _next_iterate(plan: Plan, state: State) -> tuple[tuple[Tensor, Tensor] | None, float]:
    """Return the iterate z of Theorem 2 and the sum of rates; z is a random x_t, drawn with weight eta_L."""
    if not plan.config.sample_iterate:
        return None, 0.0
    eta_sum = state.eta_sum + plan.rates.eta_local(state.t)
    keep = plan.keeps_iterate(state.t, eta_sum)
    return (state.x, state.b) if keep else state.z, eta_sum


def count_downloads(plan: Plan, vectors: Vectors, state: State, start: Start) -> dict[int, Count]:
    """Return for each sampled client a function that counts its download: model, buffers, shared feedback."""
    layout, shared = vectors.layout, plan.feedback.broadcast(state.memory.feedback)
    beside = _statistics(plan, vectors).bytes(state.b)
    beside += 0 if shared is None else dense_bytes(shared, layout)
    sampled, downlink = plan.sampled(state.t), plan.downlink(layout)
    if downlink is None:
        whole = Download("whole", 0, dense_bytes(state.x, layout) + beside)
        return dict.fromkeys(sampled, lambda: whole)
    assert state.downloads is not None

    def add(count: Count) -> Download:
        found = count()
        return found._replace(bytes=found.bytes + beside)

    counts = state.downloads.count(state.t, sampled, state.w, downlink, start)
    return {i: partial(add, count) for i, count in counts.items()}


def measure_broadcast(state: State, after: State) -> Broadcast | None:
    """Return what the metrics report of a compressed broadcast; None if the whole model is broadcast."""
    if state.downloads is None:
        return None
    return state.downloads.held.keys(), norm2(after.x - after.broadcast)


@dataclass
class RankRound:
    """The round of one rank's clients: what the clients sent, and what the metrics report."""

    clients: list[int] = field(default_factory=list)
    payloads: list[tuple[list[int], Payload]] = field(default_factory=list)  # each with its clients
    buffers: list[Tensor] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)  # with 0 bytes; `counts` has the bytes
    counts: list[Callable[[], list[int]] | list[int]] = field(default_factory=list)
    g_sum: Tensor | None = None
    norms2: list[float] = field(default_factory=list)  # squared norms of this rank's residuals
    diverged: list[int] = field(default_factory=list)

    def bytes(self) -> list[int]:
        """Return the bytes that each client sent, in order; wait until all bytes are counted."""
        found = [each() if callable(each) else each for each in self.counts]
        return [n for block in found for n in block]


def record_ranks(
    plan: Plan,
    statistics: Statistics,
    d: int,
    parts: Sequence[RankRound],
    broadcast: Broadcast | None,
    counts: Mapping[int, Count],
) -> Record:
    """Return the round's row of metrics from all ranks' parts; wait until all bytes are counted."""
    replies = [
        replace(reply, up_bytes=up + statistics.bytes(b))
        for part in parts
        for reply, up, b in zip(part.replies, part.bytes(), part.buffers, strict=True)
    ]
    replies.sort(key=lambda reply: reply.client)
    sums = [part.g_sum for part in parts if part.g_sum is not None]
    total = sum((each.to(sums[0].device) for each in sums[1:]), sums[0]) if sums else None
    mean_g2 = norm2(total / len(replies)) if total is not None else 0.0
    downloads = {client: count() for client, count in counts.items()}
    norms2 = (n for part in parts for n in part.norms2)
    return record_round(plan, d, replies, mean_g2, norms2, broadcast, downloads)


def record_round(
    plan: Plan,
    d: int,
    replies: Sequence[Reply],
    mean_g2: float,
    norms2: Iterable[float],
    broadcast: Broadcast | None,
    downloads: Mapping[int, Download],
) -> Record:
    """Return a round's row of metrics; `replies` are in client order, `mean_g2` is |mean g_i|^2."""
    row = summarise(replies, len(downloads) - len(replies), d, mean_g2)
    row["downlink_bytes"] = sum(each.bytes for each in downloads.values())
    if broadcast is not None:
        held, gap2 = broadcast
        row["first_download_bytes"] = sum(each.bytes for i, each in downloads.items() if i not in held)
        row["downlink_messages"] = sum(each.messages for each in downloads.values())
        row["whole_downloads"] = sum(each.kind == "whole" for each in downloads.values())
        row["copy_gap_norm2"] = finite(gap2)
    row |= residual_norms(norms2, plan.m)
    took = {reply.client: (reply.K, reply.up_bytes) for reply in replies}
    # The round ends when the slowest client's reply arrives.
    row["simulated_seconds"] = (
        None
        if not plan.timed
        else max(plan.link.seconds(i, *took.get(i, (0, 0)), each.bytes) for i, each in downloads.items())
    )
    return row
