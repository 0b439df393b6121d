"""Sums that are added in the same order everywhere, and what else the stages of a compressor share."""

from __future__ import annotations

import math
from functools import cached_property

from cfedavg.core import keys as keyed
from cfedavg.core.arrays import Array, arange, cast, copy, extremes, module_of, repeat, zeros
from cfedavg.core.errors import InputError, NotFinite

INFINITE = math.inf


def unit_of(magnitude: Array) -> Array:
    """In float64 and divided by the largest of the row, so that no square overflows or vanishes."""
    xp = module_of(magnitude)
    largest = cast(xp.amax(magnitude, axis=-1, keepdims=True), "float64")
    return cast(magnitude, "float64") / xp.where(largest > 0, largest, 1.0)


def row_sums(values: Array) -> Array:
    """Sums over the last axis by folding it in two, at a power of two, until one number is left.

    A library's own sum splits a row by device, number of threads and number of rows, so its last bits
    differ; here every row is added in the same order everywhere, and zeros at its end do not change that.
    """
    while (width := values.shape[-1]) > 1:
        half = 1 << (width - 1).bit_length() - 1
        folded, alone = values[..., : width - half] + values[..., half:], values[..., width - half : half]
        values = module_of(values).concatenate([folded, alone], -1) if alone.shape[-1] else folded
    return values[..., 0]


def prefix_sums(values: Array) -> Array:
    """Cumulative sums over the last axis, added in the same order everywhere, for the same reason.

    Those of neighbours taken together are every second one; the others lack just one value.
    """
    if (width := values.shape[-1]) < 2:
        return values
    pairs, sums = prefix_sums(values[..., : width - 1 : 2] + values[..., 1::2]), copy(values)
    sums[..., 1::2] = pairs
    sums[..., 2::2] += pairs[..., : (width - 1) // 2]
    return sums


def offsets_of(counts: Array) -> Array:
    """Where each client's values start, and where the last one's end."""
    return module_of(counts).concatenate([zeros(1, counts), counts.cumsum(0)])


def client_of_value(offsets: Array) -> Array:
    """Which client of the block each value belongs to."""
    return repeat(offsets[1:] - offsets[:-1])


def is_whole(value: object, low: int, high: int) -> bool:
    """Whether a value is a whole number from `low` to `high`; to Python, True is one too."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_comp(comp: float) -> None:
    if isinstance(comp, bool) or not (isinstance(comp, int | float) and 0 <= comp < 1):
        raise InputError(f"comp = {comp} must lie in [0, 1): the fraction NOT sent (0.99 sends 1%)")


def check_block(block: int) -> None:
    if not is_whole(block, 1, 2**31 - 1):
        raise InputError(f"block = {block} must be a whole number from 1 to 2^31 - 1")


def check_finite(p: Array) -> None:
    """Raises NotFinite, which names the rows, if p (n, d) holds NaN or Inf."""
    # The extremes tell it, thirty times as fast on a CPU as looking at each number.
    if math.prod(p.shape) and not all(map(math.isfinite, extremes(p))):
        rows = module_of(p).isfinite(p).all(-1).tolist()
        raise NotFinite([row for row, finite in enumerate(rows) if not finite])


class Blocks:
    """The blocks of each client's values, which lie in one row, client after client.

    Where all clients have as many, as without a selector, the row is a matrix and needs no indices.
    """

    def __init__(self, offsets: Array, block: int) -> None:
        self.offsets, self.counts = offsets, offsets[1:] - offsets[:-1]
        least, most = (int(self.counts.min()), int(self.counts.max())) if len(self.counts) else (0, 1)
        most = max(1, most)
        self.width = min(block, most) if block else most
        self.per_client = (self.counts + self.width - 1) // self.width
        self.total = int(self.per_client.sum())
        self.each = most if least == most else None  # values of a client, where all have as many

    def pack(self, values: Array) -> Array:
        """(blocks, width), zeros where a block is not full."""
        if self.each is not None:
            return self._padded(values.reshape(-1, self.each)).reshape(self.total, self.width)
        matrix = zeros(self.total * self.width, values)
        matrix[self._of_value * self.width + self._position % self.width] = values
        return matrix.reshape(self.total, self.width)

    def _padded(self, rows: Array) -> Array:
        """The rows with zeros behind them, so that a client's blocks are all full."""
        assert self.each is not None
        missing = -self.each % self.width
        if not missing:
            return rows
        return module_of(rows).concatenate([rows, zeros((len(rows), missing), rows)], -1)

    def spread(self, of_block: Array) -> Array:
        """A number of each block, for each of its values."""
        if self.each is not None:
            rows = of_block.reshape(len(self.counts), -1, 1)
            shape = (*rows.shape[:2], self.width)
            spread = module_of(rows).broadcast_to(rows, shape).reshape(len(rows), -1)
            return spread[:, : self.each].reshape(-1)
        return of_block[self._of_value]

    def draws(self, keys: Array) -> Array:
        """Keyed draws in [0, 1), one for each value."""
        if self.each is not None:
            drawn = keyed.bits53(keys[:, None], arange(self.each, keys)).reshape(-1)
        else:
            drawn = keyed.bits53(keys[self._client], self._position)
        return cast(drawn, "float64") / 2.0**53

    @cached_property
    def _client(self) -> Array:
        return client_of_value(self.offsets)

    @cached_property
    def _position(self) -> Array:
        return arange(len(self._client), self.offsets) - self.offsets[self._client]

    @cached_property
    def _of_value(self) -> Array:
        return offsets_of(self.per_client)[self._client] + self._position // self.width
