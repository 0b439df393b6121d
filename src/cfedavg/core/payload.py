"""Payload: what a block of clients sends, which is coordinates and their values.

A compressor makes payloads of torch tensors or NumPy arrays; the wire format reads NumPy arrays. bf16 numbers
are held as bit patterns in int16, since NumPy has no bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from cfedavg.core.arrays import Array


@dataclass(frozen=True)
class Floats:
    """Values as floating point numbers; if `dtype` is "bf16", `data` holds the bit patterns in int16."""

    data: Array
    dtype: str  # "fp32", "fp64" or "bf16"

    def map(self, convert: Callable[[Array], Array]) -> Floats:
        """Return the values with the function `convert` applied to the array."""
        return replace(self, data=convert(self.data))


@dataclass(frozen=True)
class Levels:
    """Values as integers times float32 scales: value j of a client is levels[j] * scales[j // block].

    A level is from -top to top. Each client starts a new block. If `block` is 0, each client has one block.
    """

    levels: Array  # int8 or int16
    scales: Array  # float32; a client that sends k values has ceil(k / block) scales
    block: int
    top: int

    def map(self, convert: Callable[[Array], Array]) -> Levels:
        """Return the values with the function `convert` applied to both arrays."""
        return replace(self, levels=convert(self.levels), scales=convert(self.scales))


@dataclass(frozen=True)
class Mask:
    """Coordinates drawn from a key: j is sent if bits53(key, j) < keep. The receiver repeats the draw."""

    keys: Array  # int64, one for each client
    keep: int  # the share of coordinates sent, times 2**53


@dataclass(frozen=True)
class Payload:
    """The coordinates and values that n clients send of their vectors of length d.

    The values of client c are values[offsets[c]:offsets[c+1]], since clients differ in the number of values.
    `indices` holds each client's coordinates in increasing order; None if all d coordinates are sent.
    """

    d: int
    offsets: Array  # int64, n + 1 of them
    indices: Array | None  # int64
    values: Floats | Levels
    mask: Mask | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def counts(self) -> list[int]:
        """Return the number of coordinates that each client sends."""
        return [end - start for start, end in pairwise(self.offsets.tolist())]

    def map(self, convert: Callable[[Array], Array]) -> Payload:
        """Return the payload with the function `convert` applied to every array."""
        mask = replace(self.mask, keys=convert(self.mask.keys)) if self.mask else None
        indices = None if self.indices is None else convert(self.indices)
        return Payload(self.d, convert(self.offsets), indices, self.values.map(convert), mask)

    def numpy(self) -> Payload:
        """Return the payload with NumPy arrays in main memory, as the wire format needs them."""
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
    """Return the number of scales that k values of one client need, with `block` values a scale."""
    return -(-k // block) if block else min(k, 1)
