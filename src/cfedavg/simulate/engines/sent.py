"""What the clients of a round sent: gathered from all ranks, averaged, and summed up in a line of metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfedavg.algorithm import ServerMemory
from cfedavg.core.arrays import norm2
from cfedavg.core.errors import Diverged
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Record, Reply, residual_norms, summarise
from cfedavg.simulate.downloads import Count
from cfedavg.simulate.engines.common import (
    Broadcast,
    download_columns,
    server_step,
    simulated_seconds,
    weighted_mean,
)
from cfedavg.simulate.engines.statistics import Statistics
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import State


@dataclass
class Sent:
    """What the clients of one rank sent in a round, and what is reported of them."""

    clients: list[int] = field(default_factory=list)
    payloads: list[tuple[list[int], Payload]] = field(default_factory=list)  # with whose they are
    buffers: list[Tensor] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)  # without bytes
    counts: list[Callable[[], list[int]] | list[int]] = field(default_factory=list)
    g_sum: Tensor | None = None
    norms2: list[float] = field(default_factory=list)  # of all residuals of this rank
    diverged: list[int] = field(default_factory=list)

    def bytes(self) -> list[int]:
        """Of every client, in order; waits for those that are still being counted."""
        found = [each() if callable(each) else each for each in self.counts]
        return [n for block in found for n in block]


def combined(plan: Plan, state: State, parts: Sequence[Sent]) -> tuple[Tensor, Tensor, ServerMemory]:
    """Lines 17 to 19: x, b and the server's memory after the round, from what arrived in client order."""
    replies = [reply for part in parts for reply in part.replies]
    weight = {r.client: 0.0 if r.lost else plan.weight(r.client) for r in replies}
    blocks = sorted((block for part in parts for block in part.payloads), key=lambda block: block[0])

    def here(array: Tensor | np.ndarray) -> Tensor:
        return array if isinstance(array, Tensor) else torch.from_numpy(array).to(state.x.device)

    weighted = ((payload.map(here), [weight[i] for i in owners]) for owners, payload in blocks)
    x_next, memory = server_step(plan, state, weighted)
    pairs = (pair for part in parts for pair in zip(part.clients, part.buffers, strict=True))
    arrived = [(b, weight[i]) for i, b in sorted(pairs, key=lambda pair: pair[0]) if weight[i]]
    b_next = weighted_mean([b for b, _ in arrived], [w for _, w in arrived], state.b)
    return x_next, b_next, memory


def record(
    plan: Plan,
    statistics: Statistics,
    d: int,
    parts: Sequence[Sent],
    broadcast: Broadcast | None,
    counts: Mapping[int, Count],
) -> Record:
    """The round's line; waits until all messages and downloads are counted."""
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
    found = summarise(replies, len(downloads) - len(replies), d, mean_g2)
    found |= download_columns(broadcast, downloads)
    found |= residual_norms((n for part in parts for n in part.norms2), plan.m)
    took = {reply.client: (reply.K, reply.up_bytes) for reply in replies}
    down = {client: each.bytes for client, each in downloads.items()}
    found["simulated_seconds"] = simulated_seconds(plan, took, down)
    return found


def raise_first(t: int, parts: Sequence[Any]) -> None:
    """What went wrong on some rank goes wrong here."""
    for part in parts:
        if isinstance(part, Exception):
            raise part
    if diverged := sorted(i for part in parts if isinstance(part, Sent) for i in part.diverged):
        raise Diverged(t, diverged, "the loss or the update")
