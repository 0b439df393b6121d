"""The batches of a block of clients: which clients step together, on which samples, and the samples.

Each client goes through its own batches in the order of `local.batches`. Clients are independent within a
round, so a client may wait for others: a turn is one step of clients whose next batches fit together.
Samples are copied to the device once, then read in any order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cfedavg.core.errors import ShapesDiffer, summarise_error
from cfedavg.core.keys import Purpose, bits, keys
from cfedavg.core.tensors import free_memory
from cfedavg.simulate.local import to_device
from cfedavg.simulate.vectorised.sizes import fit
from cfedavg.task import Batch, Samples

_LAST = torch.iinfo(torch.int64).max
_SHARE = 4  # samples may take a quarter of the free memory


@dataclass(frozen=True)
class Turn:
    """One step that some clients of the block take together, each on a batch of `width` rows.

    `clients` are places in the block; an integer n means the first n places. `k` holds the number of each
    client's own step. With `masked`, only the first rows of a client's batch may count (see `Rows.valid`),
    else all rows count. `active` is the number of first clients that still have steps to do; the others are
    idle. If `active` is None, no client is ever idle.
    """

    clients: np.ndarray | int
    k: np.ndarray
    width: int
    masked: bool
    active: int | None


@dataclass(frozen=True)
class Timetable:
    """The turns of a block whose clients are sorted by their number of steps, most first."""

    clients: Sequence[int]
    samples: np.ndarray  # number of samples of each client
    steps: np.ndarray  # K_i of each client
    batch_size: int
    seeds: np.ndarray  # the seed of each client's run, as `signed` returns it
    rounds: np.ndarray  # the round t of each client's run

    @cached_property
    def per_epoch(self) -> np.ndarray:
        return -(-self.samples // self.batch_size)

    def size(self, k: np.ndarray, c: np.ndarray | slice) -> np.ndarray:
        """Return the batch size of each client in `c`; `k` holds the number of each client's step."""
        left = self.samples[c] - k % self.per_epoch[c] * self.batch_size
        found: np.ndarray = np.minimum(left, self.batch_size)
        return found

    @cached_property
    def uniform(self) -> bool:
        """Return whether all clients have equally many samples, and so short batches in the same steps."""
        return bool((self.samples == self.samples[0]).all())

    def together(self, sizes: Sequence[int]) -> Iterator[Turn]:
        """Yield turns in which all unfinished clients step; rows that do not count fill up short batches.

        The block shrinks to one of `sizes`. If clients differ, all turns of a size ask for the same kind of
        step, also those in which all rows count or no client is idle: each kind is compiled.
        """
        busy = len(self.clients) - np.searchsorted(self.steps[::-1], np.arange(self.steps[0]), "right")
        ragged = bool((self.steps != self.steps[0]).any())
        most = min(self.batch_size, int(self.samples.max()))
        for step, active in enumerate(busy.tolist()):
            running = fit(active, sizes)
            k = np.full(running, step)
            width = int(self.size(k[:1], slice(1))[0]) if self.uniform else most
            yield Turn(running, k, width, not self.uniform, active if ragged else None)

    def apart(self) -> Iterator[Turn]:
        """Yield turns of those clients whose next batches have the same size; the other clients wait."""
        done = np.zeros(len(self.clients), np.int64)
        while (left := np.flatnonzero(done < self.steps)).size:
            sizes = self.size(done[left], left)
            width = np.bincount(sizes).argmax()
            group = left[sizes == width]
            yield Turn(group, done[group], int(width), False, None)
            done[group] += 1


class Rows:
    """The sample numbers of every batch, on the device, computed for some consecutive steps at a time."""

    def __init__(self, timetable: Timetable, device: torch.device) -> None:
        self.timetable, self.device = timetable, device
        n, most = len(timetable.clients), int(timetable.samples.max())
        epochs = max(1, 2**24 // (n * most))  # how many fit into one table
        self.length = max(
            1, min(2**24 // (n * timetable.batch_size), epochs * int(timetable.per_epoch.min()))
        )
        self.start, self.table = -1, torch.empty(0)
        self._columns = torch.arange(timetable.batch_size, device=device)
        self._samples, self._per_epoch, self._steps = map(
            self._here, (timetable.samples, timetable.per_epoch, timetable.steps)
        )

    def at(self, turn: Turn) -> Tensor:
        """Return a tensor of shape (clients, width): the sample numbers in each client's batch.

        If a batch has fewer samples than `width`, the numbers after its last sample are arbitrary.
        """
        if isinstance(turn.clients, int):
            step = int(turn.k[0])
            return self._stretch(step)[step - self.start, : turn.clients, : turn.width]
        k, c = (torch.from_numpy(each).to(self.device) for each in (turn.k, turn.clients))
        found = torch.empty(len(k), turn.width, dtype=torch.int64, device=self.device)
        for start in sorted({int(step) // self.length * self.length for step in turn.k}):
            here = (k >= start) & (k < start + self.length)
            found[here] = self._stretch(start)[k[here] - start, c[here], : turn.width]
        return found

    def valid(self, turn: Turn) -> Tensor:
        """Return which rows count in each batch of a turn; this waits for no device."""
        assert isinstance(turn.clients, int)
        samples, per_epoch = self._samples[: turn.clients], self._per_epoch[: turn.clients]
        left = samples - int(turn.k[0]) % per_epoch * self.timetable.batch_size
        return self._columns[: turn.width] < left[:, None]

    def active(self, turn: Turn) -> Tensor:
        """Return which of the first clients, those of a turn, are not idle."""
        assert isinstance(turn.clients, int)
        return self._steps[: turn.clients] > int(turn.k[0])

    def _stretch(self, k: int) -> Tensor:
        """Return the sample numbers of step `k` and of the steps that are computed together with it."""
        start = k // self.length * self.length
        if start != self.start:
            last = int(self.timetable.steps.max())
            self.start, self.table = start, self._table(start, min(start + self.length, last))
        return self.table

    def _table(self, start: int, stop: int) -> Tensor:
        """Return a tensor of shape (steps, clients, batch size): the sample numbers in each batch.

        The steps are `start` to `stop - 1`. After a client's last step, its numbers are arbitrary.
        """
        table = self.timetable
        last = np.maximum(table.steps - 1, 0) // table.per_epoch
        first, final = (np.minimum(k // table.per_epoch, last) for k in (start, stop - 1))
        orders = self._orders(first, final)
        samples, per_epoch = self._samples, self._per_epoch
        k = torch.arange(start, stop, device=self.device)[:, None]
        epoch, batch = torch.minimum(k // per_epoch, self._here(last)), k % per_epoch
        width = torch.arange(min(table.batch_size, orders.shape[1]), device=self.device)
        place = torch.minimum(batch[..., None] * table.batch_size + width, samples[:, None] - 1)
        row = self._here(np.cumsum(final - first + 1) - (final - first + 1) - first) + epoch
        return orders.view(-1)[row[..., None] * orders.shape[1] + place]

    def _orders(self, first: np.ndarray, final: np.ndarray) -> Tensor:
        """Return a tensor of shape (epochs, samples); each row is the order of samples in one epoch.

        First come the epochs of client 0, then those of client 1, and so on. A client's epochs go from its
        `first` to its `final` epoch, both included. The order is the one that `permutation` gives.
        """
        table, batch = self.timetable, int(Purpose.BATCH)
        counts = final - first + 1
        owner = np.repeat(np.arange(len(counts)), counts)
        epoch = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - first, counts)
        clients = keys(table.seeds, table.rounds, np.asarray(table.clients, np.int64), batch)
        words = self._here(keys(clients[owner], epoch, 0, batch))
        row = torch.arange(int(table.samples.max()), device=self.device)
        # Sample numbers that a client lacks come last, even if a draw equals _LAST: the sort is stable.
        draws = torch.where(row < self._here(table.samples[owner])[:, None], bits(words[:, None], row), _LAST)
        return draws.sort(dim=-1, stable=True).indices

    def _here(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


class Resident:
    """A source of samples that are on the device.

    `places[c, i]` is the place in `tree` of sample i of the client at place c of the block.
    """

    def __init__(self, tree: Any, places: Tensor) -> None:
        self.tree, self.places = tree, places

    def gather(self, rows: Tensor, clients: np.ndarray | int) -> Batch:
        """Return one batch for each client; a row of `rows` holds the sample numbers of a client's batch.

        `clients` are places in the block; an integer n means the first n places.
        """
        some = slice(clients) if isinstance(clients, int) else torch.from_numpy(clients)
        at = self.places[some].gather(1, rows).reshape(-1)
        return tree_map(lambda leaf: leaf.index_select(0, at).unflatten(0, tuple(rows.shape)), self.tree)


class Hosted:
    """A source that reads samples anew for every batch, because augmented samples change."""

    def __init__(self, clients: Sequence[Samples], device: torch.device, dtype: torch.dtype) -> None:
        self.clients, self.device, self.dtype = clients, device, dtype

    def gather(self, rows: Tensor, clients: np.ndarray | int) -> Batch:
        """Return one batch for each client; the arguments are those of `Resident.gather`."""
        some = range(clients) if isinstance(clients, int) else clients
        each = [self.clients[c].batch(at) for c, at in zip(some, rows.cpu().numpy(), strict=True)]
        return to_device(_join(torch.stack, each), self.device, self.dtype)


class Pool:
    """The samples of clients. Samples with the attribute `fixed` stay on the device.

    Fixed samples may also have the attributes `whole` and `rows`: they are the samples of the larger data set
    `whole` with the numbers `rows`. Then the device holds `whole`, once for all clients that share it, also
    clients of different runs. If memory is short, the least recently used data sets are dropped.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._kept: OrderedDict[int, tuple[Samples, Any]] = OrderedDict()  # by id, which needs the data set
        self._bytes, self._room = 0, free_memory(device) // _SHARE
        self._last: tuple[Sequence[Samples], Resident | Hosted] | None = None

    def block(self, clients: Sequence[Samples]) -> Resident | Hosted:
        """Return a source of samples for a block of these clients, in this order."""
        if self._last is not None and _are_same(self._last[0], clients):
            return self._last[1]
        self._last = None  # frees the last block first
        fixed = all(getattr(each, "fixed", False) for each in clients)
        source = self._resident(clients) if fixed else Hosted(clients, self.device, self.dtype)
        self._last = (clients, source)
        return source

    def read(self, samples: Samples) -> Any:
        """Return all of a fixed data set as one batch on the device."""
        name = id(samples)
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name][1]
        tree = read_all(samples, self.device, self.dtype)
        self._kept[name] = (samples, tree)
        self._bytes += _size(tree)
        while self._bytes > self._room and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1][1])
        return tree

    def clear(self) -> None:
        """Drop all samples from the device."""
        self._kept.clear()
        self._bytes, self._last = 0, None

    def _resident(self, clients: Sequence[Samples]) -> Resident:
        """Return a source that reads from the device; several data sets are concatenated there."""
        parts = [_part_of(each) for each in clients]
        larger = {
            id(whole): whole for each, (whole, _) in zip(clients, parts, strict=True) if whole is not each
        }
        if any(self._size(whole) > self._room for whole in larger.values()):
            parts = [_all_of(each) for each in clients]
        wholes = {id(whole): whole for whole, _ in parts}
        start = dict(zip(wholes, np.cumsum([0, *map(len, wholes.values())]), strict=False))
        places = np.zeros((len(clients), max(map(len, clients))), np.int64)
        for mine, (whole, rows) in zip(places, parts, strict=True):
            mine[: len(rows)] = start[id(whole)] + rows
        trees = [self.read(whole) for whole in wholes.values()]
        tree = trees[0] if len(trees) == 1 else _join(torch.cat, trees)
        return Resident(tree, torch.from_numpy(places).to(self.device))

    def _size(self, whole: Samples) -> int:
        """Return how many bytes a data set would take on the device; 0 if the device holds it."""
        if id(whole) in self._kept:
            return 0
        return len(whole) * _size(to_device(whole.batch(np.arange(1)), torch.device("cpu"), self.dtype))


def _part_of(samples: Samples) -> tuple[Samples, np.ndarray]:
    """Return the larger data set to which samples belong, and their numbers in it."""
    whole = getattr(samples, "whole", None)
    return _all_of(samples) if whole is None else (whole, samples.rows)  # type: ignore[attr-defined]


def _all_of(samples: Samples) -> tuple[Samples, np.ndarray]:
    """Return a data set and the numbers of all its samples."""
    return samples, np.arange(len(samples))


def _are_same(one: Sequence[Samples], other: Sequence[Samples]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _join(join: Callable[[list[Tensor]], Tensor], trees: Sequence[Any]) -> Any:
    """Join the data of several clients, tensor by tensor; raise ShapesDiffer if shapes do not fit."""
    try:
        return tree_map(lambda *leaves: join(list(leaves)), *trees)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise ShapesDiffer(f"the clients' batches differ in shape ({summarise_error(error)})") from None


def read_all(samples: Samples, device: torch.device, dtype: torch.dtype) -> Any:
    """Return all of `samples` as one batch on the device."""
    return to_device(samples.batch(np.arange(len(samples))), device, dtype)


def _size(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree))
