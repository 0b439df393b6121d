"""The timetable of a block: which clients step together, and with which samples.

Each client goes through its own batches in the order of `local.batches`. Clients are independent within a
round, so a client may wait for others: a turn is one step of clients whose next batches fit together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cfedavg.core.keys import Purpose, bits, keys

_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Turn:
    """One step that `clients` of the block take together, on batches of `width` rows.

    If `clients` is an integer n, the first n clients of the block step. `k` is the number of each client's
    own step. Only the first `sizes` rows of each client's batch count; if `sizes` is None, all rows count.
    """

    clients: np.ndarray | int
    k: np.ndarray
    width: int
    sizes: np.ndarray | None
    active: int  # how many of the first clients still have steps to do; the others are idle


@dataclass(frozen=True)
class Timetable:
    """The turns of a block whose clients are sorted by their number of steps, most first."""

    clients: Sequence[int]
    samples: np.ndarray  # number of samples of each client
    steps: np.ndarray  # K_i of each client
    batch_size: int
    seed: int
    t: int

    @cached_property
    def per_epoch(self) -> np.ndarray:
        return -(-self.samples // self.batch_size)

    def size(self, k: np.ndarray, c: np.ndarray | slice) -> np.ndarray:
        """Return the batch sizes of the clients `c` in their steps `k`."""
        left = self.samples[c] - k % self.per_epoch[c] * self.batch_size
        found: np.ndarray = np.minimum(left, self.batch_size)
        return found

    @cached_property
    def uniform(self) -> bool:
        """Return whether all clients have equally many samples: then short batches come in the same step."""
        return bool((self.samples == self.samples[0]).all())

    def together(self) -> Iterator[Turn]:
        """Yield turns of all clients; shorter batches are filled up with rows that do not count."""
        n = len(self.clients)
        for k in range(int(self.steps[0])):
            active = int((self.steps > k).sum())
            running = rounded_up(active, n)
            sizes = self.size(np.full(running, k), slice(running))
            if self.uniform:
                yield Turn(running, np.full(running, k), int(sizes[0]), None, active)
            else:
                width = min(self.batch_size, int(self.samples.max()))
                full = bool((sizes[:active] == width).all())
                yield Turn(running, np.full(running, k), width, None if full else sizes, active)

    def apart(self) -> Iterator[Turn]:
        """Yield turns of clients whose next batches have the same size; the other clients wait."""
        if self.uniform:
            yield from self.together()
            return
        done = np.zeros(len(self.clients), np.int64)
        while (left := np.flatnonzero(done < self.steps)).size:
            sizes = self.size(done[left], left)
            width = np.bincount(sizes).argmax()
            group = left[sizes == width]
            yield Turn(group, done[group], int(width), None, len(group))
            done[group] += 1

    def rows(self, device: torch.device) -> Rows:
        return Rows(self, device)


class Rows:
    """The sample numbers of every batch, on the device, computed for one stretch of steps at a time."""

    def __init__(self, timetable: Timetable, device: torch.device) -> None:
        self.timetable, self.device = timetable, device
        n, most = len(timetable.clients), int(timetable.samples.max())
        epochs = max(1, 2**24 // (n * most))  # how many fit into one table
        self.length = max(
            1, min(2**24 // (n * timetable.batch_size), epochs * int(timetable.per_epoch.min()))
        )
        self.start, self.table = -1, torch.empty(0)

    def at(self, turn: Turn) -> Tensor:
        """Return the sample numbers (clients, width) of each batch; past a batch's size, any numbers."""
        if isinstance(turn.clients, int):
            step = int(turn.k[0])
            return self._stretch(step)[step - self.start, : turn.clients, : turn.width]
        k, c = (torch.from_numpy(each).to(self.device) for each in (turn.k, turn.clients))
        found = torch.empty(len(k), turn.width, dtype=torch.int64, device=self.device)
        for start in sorted({int(step) // self.length * self.length for step in turn.k}):
            here = (k >= start) & (k < start + self.length)
            found[here] = self._stretch(start)[k[here] - start, c[here], : turn.width]
        return found

    def _stretch(self, k: int) -> Tensor:
        """Return the table of the stretch of steps that contains step `k`."""
        start = k // self.length * self.length
        if start != self.start:
            last = int(self.timetable.steps.max())
            self.start, self.table = start, self._table(start, min(start + self.length, last))
        return self.table

    def _table(self, start: int, stop: int) -> Tensor:
        """Return sample numbers (steps, clients, batch); a finished client's numbers are not read."""
        table = self.timetable
        last = np.maximum(table.steps - 1, 0) // table.per_epoch
        first, final = (np.minimum(k // table.per_epoch, last) for k in (start, stop - 1))
        orders = self._orders(first, final)
        samples, per_epoch = self._here(table.samples), self._here(table.per_epoch)
        k = torch.arange(start, stop, device=self.device)[:, None]
        epoch, batch = torch.minimum(k // per_epoch, self._here(last)), k % per_epoch
        width = torch.arange(min(table.batch_size, orders.shape[1]), device=self.device)
        place = torch.minimum(batch[..., None] * table.batch_size + width, samples[:, None] - 1)
        row = self._here(np.cumsum(final - first + 1) - (final - first + 1) - first) + epoch
        return orders.view(-1)[row[..., None] * orders.shape[1] + place]

    def _orders(self, first: np.ndarray, final: np.ndarray) -> Tensor:
        """Return (epochs, samples): the order of samples in each epoch of client 0, then of client 1, ...

        The epochs of a client go from its `first` to its `final` epoch. The order is that of `permutation`.
        """
        table, batch = self.timetable, int(Purpose.BATCH)
        counts = final - first + 1
        owner = np.repeat(np.arange(len(counts)), counts)
        epoch = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        clients = keys(table.seed, table.t, np.asarray(table.clients, np.int64)[owner], batch)
        words = self._here(keys(clients, epoch, 0, batch))
        row = torch.arange(int(table.samples.max()), device=self.device)
        # Numbers of samples that a client lacks come last; the sort is stable, so also if a draw is _LAST.
        draws = torch.where(row < self._here(table.samples[owner])[:, None], bits(words[:, None], row), _LAST)
        return draws.sort(dim=-1, stable=True).indices

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def rounded_up(active: int, n: int) -> int:
    """Return the least of n, n/2, n/4, ... that is at least `active`, so that few sizes are compiled."""
    while active <= -(-n // 2) < n:
        n = -(-n // 2)
    return n
