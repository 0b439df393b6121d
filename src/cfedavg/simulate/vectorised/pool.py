"""The clients' samples on the device: copied to the device once, then read in any order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from cfedavg.core.errors import ShapesDiffer, summarise_error
from cfedavg.core.tensors import free_memory
from cfedavg.simulate.local import to_device
from cfedavg.task import Batch, Samples

_SHARE = 4  # samples may take a quarter of the free memory


class Source(Protocol):
    """A source of the samples of a block of clients."""

    def gather(self, rows: Tensor, clients: np.ndarray | None = None) -> Batch:
        """Return a batch of b samples for each of n clients; `rows` (n, b) are numbers of samples.

        `clients` are places in the block; None means the first n clients of the block.
        """


class Resident:
    """A source of samples on the device; the samples of all clients are concatenated."""

    def __init__(self, tree: Any, starts: Tensor) -> None:
        self.tree, self.starts = tree, starts

    def gather(self, rows: Tensor, clients: np.ndarray | None = None) -> Batch:
        starts = self.starts[: len(rows)] if clients is None else self.starts[torch.from_numpy(clients)]
        at = (rows + starts[:, None]).reshape(-1)
        return tree_map(lambda leaf: leaf.index_select(0, at).unflatten(0, tuple(rows.shape)), self.tree)


class Hosted:
    """A source that reads samples anew for every batch, as augmented samples need."""

    def __init__(self, clients: Sequence[Samples], device: torch.device, dtype: torch.dtype) -> None:
        self.clients, self.device, self.dtype = clients, device, dtype

    def gather(self, rows: Tensor, clients: np.ndarray | None = None) -> Batch:
        some = np.arange(len(rows)) if clients is None else clients
        each = [self.clients[c].batch(at) for c, at in zip(some, rows.cpu().numpy(), strict=True)]
        return to_device(_join(torch.stack, each), self.device, self.dtype)


class Pool:
    """The samples of all clients. Samples with the attribute `fixed` stay on the device.

    If memory is short, the least recently used samples are dropped from the device.
    """

    def __init__(self, clients: Sequence[Samples], device: torch.device, dtype: torch.dtype) -> None:
        self.clients, self.device, self.dtype = clients, device, dtype
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._bytes, self._room = 0, free_memory(device) // _SHARE
        self._last: tuple[list[int], Source] | None = None

    def block(self, clients: list[int]) -> Source:
        """Return a source of the samples of `clients`, in this order."""
        if self._last is not None and self._last[0] == clients:
            return self._last[1]
        self._last = None  # frees the last block first
        source: Source
        if all(getattr(self.clients[i], "fixed", False) for i in clients):
            trees = [self._resident(i) for i in clients]
            sizes = [0, *(len(self.clients[i]) for i in clients[:-1])]
            source = Resident(_join(torch.cat, trees), torch.from_numpy(np.cumsum(sizes)).to(self.device))
        else:
            source = Hosted([self.clients[i] for i in clients], self.device, self.dtype)
        self._last = (clients, source)
        return source

    def _resident(self, client: int) -> Any:
        if client in self._kept:
            self._kept.move_to_end(client)
            return self._kept[client]
        tree = whole(self.clients[client], self.device, self.dtype)
        self._kept[client] = tree
        self._bytes += _size(tree)
        while self._bytes > self._room and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return tree

    def clear(self) -> None:
        """Drop all samples from the device."""
        self._kept.clear()
        self._bytes, self._last = 0, None


def _join(join: Callable[[list[Tensor]], Tensor], trees: Sequence[Any]) -> Any:
    """Return the data of several clients joined into one tree; raise ShapesDiffer if shapes do not fit."""
    try:
        return tree_map(lambda *leaves: join(list(leaves)), *trees)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        raise ShapesDiffer(f"the clients' batches differ in shape ({summarise_error(error)})") from None


def whole(samples: Samples, device: torch.device, dtype: torch.dtype) -> Any:
    """Return all of `samples` as one batch on the device."""
    return to_device(samples.batch(np.arange(len(samples))), device, dtype)


def _size(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree))
