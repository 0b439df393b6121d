"""What the clients of one rank send in a round, and the counts of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

from torch import Tensor

from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Reply, ResidualNorms
from cfedavg.simulate.engines.traffic import CONTROL, CountingThreads, Ledger


@dataclass
class Messages:
    """The messages of one kind that a rank's clients sent in a round."""

    kind: str = ""  # see `Ledger.count`
    payloads: list[tuple[list[int], Payload]] = field(default_factory=list)  # each with its clients
    counts: list[Callable[[], list[int]] | list[int]] = field(default_factory=list)

    def add(
        self,
        t: int,
        clients: list[int],
        payload: Payload,
        ledger: Ledger,
        threads: CountingThreads | None,
        *,
        travels: bool,
    ) -> None:
        """Add what a block of clients sends, and count its bytes, here or in threads.

        If it `travels` to another rank, each client's payload is copied to the memory of the host.
        """
        known = ledger.known_bytes(payload)
        each: list[tuple[int, Payload]] = []
        if travels or known is None:
            each += zip(clients, payload.numpy().clients(), strict=True)
        count = partial(self._count, t, ledger)
        if known is not None:
            self.counts.append(known)
        elif threads is None:
            self.counts.append(count(each))
        else:
            share = -(-len(each) // threads.size)
            for start in range(0, len(each), share):
                self.counts.append(threads.submit(partial(count, each[start : start + share])))
        self.payloads += [([client], one) for client, one in each] if travels else [(clients, payload)]

    def _count(self, t: int, ledger: Ledger, each: list[tuple[int, Payload]]) -> list[int]:
        return [ledger.count(t, client, payload, self.kind) for client, payload in each]

    def bytes(self) -> list[int]:
        """Return the bytes of each client's message; wait for threads that count."""
        found = [each() if callable(each) else each for each in self.counts]
        return [n for block in found for n in block]


@dataclass
class RankRound:
    """One round of one rank's clients: what the clients sent, and their figures for the metrics."""

    updates: Messages = field(default_factory=Messages)
    controls: Messages = field(default_factory=partial(Messages, CONTROL))  # changes of c_i
    buffers: list[Tensor] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)  # with 0 bytes; `bytes` returns the bytes
    g_sum: Tensor | None = None
    norms: ResidualNorms = field(default_factory=ResidualNorms)  # of this rank's residuals
    diverged: list[int] = field(default_factory=list)

    def bytes(self) -> list[int]:
        """Return the bytes that each client sent, in the order of `replies`; wait for threads that count."""
        return [sum(sizes) for sizes in zip_longest(self.updates.bytes(), self.controls.bytes(), fillvalue=0)]

    def make_portable(self) -> None:
        """Wait for threads that count, and move what pickle sends to rank 0 to the memory of the host."""
        for messages in (self.updates, self.controls):
            messages.counts = [messages.bytes()]
        self.buffers = [b.cpu().clone() for b in self.buffers]
        self.g_sum = None if self.g_sum is None else self.g_sum.cpu()
