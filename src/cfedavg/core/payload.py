"""Payload: the coordinates and values that one or more clients (a block) send.

A compressor makes payloads of torch tensors or NumPy arrays; the wire format reads NumPy arrays. bf16 numbers
are held as bit patterns in int16, since NumPy has no bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from cfedavg.core.arrays import Array, to_numpy
from cfedavg.core.bases import Factors, Rotation


@dataclass(frozen=True)
class Floats:
    """Values as floating point numbers; if `dtype` is "bf16", `data` holds their bit patterns as int16."""

    data: Array
    dtype: str  # "fp32", "fp64" or "bf16"

    def map(self, convert: Callable[[Array], Array]) -> Floats:
        """Return the values with the function `convert` applied to the array."""
        return replace(self, data=convert(self.data))


@dataclass(frozen=True)
class Levels:
    """Values as integer levels times float32 scales, one scale for each `block` values of a client.

    Value j of a client is level[j] * scale[j // block], of this client's levels and scales. If `block` is 0,
    a client has one scale for all its values. A level is an integer from -top to top.

    With `per_level`, each block has `top` scales, one for each magnitude 1 to top, and value j of a client is
    sign(level[j]) * scale[j // block, |level[j]| - 1]. A level is then never 0.
    """

    levels: Array  # int8 or int16
    scales: Array  # float32, `count_scales(k)` of them for a client that sends k values
    block: int
    top: int
    per_level: bool = False

    def count_scales(self, k: int) -> int:
        """Return the number of scales of a client that sends k values."""
        return blocks(k, self.block) * (self.top if self.per_level else 1)

    def map(self, convert: Callable[[Array], Array]) -> Levels:
        """Return the values with the function `convert` applied to both arrays."""
        return replace(self, levels=convert(self.levels), scales=convert(self.scales))


@dataclass(frozen=True)
class Mask:
    """Coordinates drawn by a key: j is sent if bits53(key, j) < keep. The receiver repeats the draw."""

    keys: Array  # int64, one for each client
    keep: int  # the share of coordinates sent, times 2**53


@dataclass(frozen=True)
class Payload:
    """The coordinates and values that n clients send; each client compresses a vector of length d.

    The values of all clients stand one after another: those of client c are values[offsets[c]:offsets[c+1]].
    `indices` holds the coordinates of these values, in increasing order for each client. It is None if every
    client sends all d coordinates.
    """

    d: int
    offsets: Array  # int64, n + 1 of them
    indices: Array | None  # int64
    values: Floats | Levels
    mask: Mask | None = None
    basis: Rotation | Factors | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def counts(self) -> list[int]:
        """Return the number of values that each client sends."""
        return [end - start for start, end in pairwise(self.offsets.tolist())]

    def map(self, convert: Callable[[Array], Array]) -> Payload:
        """Return the payload with the function `convert` applied to every array."""
        mask = replace(self.mask, keys=convert(self.mask.keys)) if self.mask else None
        indices = None if self.indices is None else convert(self.indices)
        basis = self.basis and self.basis.map(convert)
        return Payload(self.d, convert(self.offsets), indices, self.values.map(convert), mask, basis)

    def numpy(self) -> Payload:
        """Return the payload with NumPy arrays in main memory, as the wire format needs them."""
        return self.map(to_numpy)

    def clients(self) -> Iterator[Payload]:
        """Yield one payload for each client of the block."""
        scales_start = 0
        for c, (start, end) in enumerate(pairwise(self.offsets.tolist())):
            values: Floats | Levels
            if isinstance(self.values, Floats):
                values = replace(self.values, data=self.values.data[start:end])
            else:
                scales_end = scales_start + self.values.count_scales(end - start)
                scales = self.values.scales[scales_start:scales_end]
                values = replace(self.values, levels=self.values.levels[start:end], scales=scales)
                scales_start = scales_end
            yield Payload(
                self.d,
                self.offsets[c : c + 2] - start,
                None if self.indices is None else self.indices[start:end],
                values,
                replace(self.mask, keys=self.mask.keys[c : c + 1]) if self.mask else None,
                self.basis and self.basis.of_client(c),
            )


def blocks(k: int, block: int) -> int:
    """Return how many scales a client needs for k values if `block` values share a scale (0: all values)."""
    return -(-k // block) if block else min(k, 1)
