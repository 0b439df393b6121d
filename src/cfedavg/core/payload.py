"""Payload: what a block of clients sends. Which coordinates, and what values.

The arrays are torch tensors for the compressor and NumPy arrays for the wire; the code here serves both. bf16
travels as its bit pattern in int16, since NumPy has no such type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

Array = Any  # a torch.Tensor or a numpy.ndarray


@dataclass(frozen=True)
class Floats:
    """Values as floating point numbers; `data` holds bit patterns (int16) when `dtype` is "bf16"."""

    data: Array
    dtype: str  # "fp32", "fp64" or "bf16"


@dataclass(frozen=True)
class Levels:
    """Values as small integers times a float32 scale: value j of a client is levels[j] * scales[j // block].

    |level| <= top. Each client starts a new block; a block of 0 means one block a client.
    """

    levels: Array  # int8 or int16
    scales: Array  # float32, ceil(k / block) of them for a client that sends k values
    block: int
    top: int


@dataclass(frozen=True)
class Mask:
    """Coordinates drawn from a key: j is kept where bits53(key, j) < keep. The receiver draws them again."""

    keys: Array  # int64, one a client
    keep: int  # of 2**53


@dataclass(frozen=True)
class Payload:
    """What n clients send of their vectors of length d.

    Client c's values are those at offsets[c]:offsets[c+1], since k differs between clients. `indices`
    are the coordinates in increasing order within a client, None where all d are sent.
    """

    d: int
    offsets: Array  # int64, n + 1
    indices: Array | None  # int64
    values: Floats | Levels
    mask: Mask | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def counts(self) -> list[int]:
        """Return how many coordinates each client sends."""
        return [end - start for start, end in pairwise(self.offsets.tolist())]

    def map(self, convert: Callable[[Array], Array]) -> Payload:
        """Return a payload with every array converted."""
        values: Floats | Levels
        if isinstance(self.values, Floats):
            values = replace(self.values, data=convert(self.values.data))
        else:
            values = replace(
                self.values, levels=convert(self.values.levels), scales=convert(self.values.scales)
            )
        mask = replace(self.mask, keys=convert(self.mask.keys)) if self.mask else None
        indices = None if self.indices is None else convert(self.indices)
        return Payload(self.d, convert(self.offsets), indices, values, mask)

    def numpy(self) -> Payload:
        """Return a payload of NumPy arrays in main memory, as the wire reads it."""
        return self.map(lambda array: array.cpu().numpy() if hasattr(array, "cpu") else array)

    def clients(self) -> Iterator[Payload]:
        """Yield one payload for each client of the block."""
        block_start = 0
        for c, (start, end) in enumerate(pairwise(self.offsets.tolist())):
            values: Floats | Levels
            if isinstance(self.values, Floats):
                values = replace(self.values, data=self.values.data[start:end])
            else:
                block_end = block_start + blocks(end - start, self.values.block)
                scales = self.values.scales[block_start:block_end]
                values = replace(self.values, levels=self.values.levels[start:end], scales=scales)
                block_start = block_end
            yield Payload(
                self.d,
                self.offsets[c : c + 2] - start,
                None if self.indices is None else self.indices[start:end],
                values,
                replace(self.mask, keys=self.mask.keys[c : c + 1]) if self.mask else None,
            )


def blocks(k: int, block: int) -> int:
    """Return how many scales k values of one client need."""
    return -(-k // block) if block else min(k, 1)
