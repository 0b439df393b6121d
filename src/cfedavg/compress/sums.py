"""What selectors and quantisers share: sums with the same bits on every device, and blocks of values."""

from __future__ import annotations

import math
from functools import cached_property

from cfedavg.core import keys as keyed
from cfedavg.core.arrays import Array, arange, cast, copy, extremes, module_of, repeat, zeros
from cfedavg.core.errors import NotFinite
from cfedavg.core.parts import check_argument


def unit_of(magnitude: Array) -> Array:
    """Return magnitudes in float64, divided by the largest of their row so that squares do not overflow."""
    xp = module_of(magnitude)
    largest = cast(xp.amax(magnitude, axis=-1, keepdims=True), "float64")
    return cast(magnitude, "float64") / xp.where(largest > 0, largest, 1.0)


def row_sums(values: Array) -> Array:
    """Return the sums over the last axis, with the same bits on every device.

    A row is folded in two at a power of two until one number is left. The sums of NumPy and torch depend in
    their last bits on the device and on the number of threads and rows. Here the order of additions depends
    on the length of a row only, and zeros at the end of a row do not change the sum.
    """
    while (width := values.shape[-1]) > 1:
        half = 1 << (width - 1).bit_length() - 1
        folded, alone = values[..., : width - half] + values[..., half:], values[..., width - half : half]
        values = module_of(values).concatenate([folded, alone], -1) if alone.shape[-1] else folded
    return values[..., 0]


def prefix_sums(values: Array) -> Array:
    """Return the cumulative sums over the last axis, with the same bits on every device.

    Entries 1, 3, 5 ... are the cumulative sums of pairs. Every other entry is the one before it plus a value.
    """
    if (width := values.shape[-1]) < 2:
        return values
    pairs, sums = prefix_sums(values[..., : width - 1 : 2] + values[..., 1::2]), copy(values)
    sums[..., 1::2] = pairs
    sums[..., 2::2] += pairs[..., : (width - 1) // 2]
    return sums


def offsets_of(counts: Array) -> Array:
    """Return the offset of each client's first value, and the total, given the clients' counts of values."""
    return module_of(counts).concatenate([zeros(1, counts), counts.cumsum(0)])


def client_of_value(offsets: Array) -> Array:
    """Return, for each value, the row of its client in the block."""
    return repeat(offsets[1:] - offsets[:-1])


def check_comp(comp: float) -> None:
    """Raise InputError if `comp` is not in [0, 1)."""
    rule = "the fraction NOT sent (0.99 sends 1%), from 0 to below 1"
    check_argument("comp", comp, rule, lambda comp: 0 <= comp < 1)


def check_block(block: int) -> None:
    """Raise InputError if `block`, the number of values of a block, is not from 1 to 2^31 - 1."""
    check_argument("block", block, "from 1 to 2^31 - 1", lambda block: 1 <= block < 2**31, integer=True)


def check_finite(p: Array) -> None:
    """Raise NotFinite with the rows of p, shape (n, d), that hold NaN or Inf."""
    # Looking only at the minimum and maximum is thirty times as fast on a CPU as looking at each number.
    if math.prod(p.shape) and not all(map(math.isfinite, extremes(p))):
        rows = module_of(p).isfinite(p).all(-1).tolist()
        raise NotFinite([row for row, finite in enumerate(rows) if not finite])


class Blocks:
    """Groups of values that share a scale. The values of all clients lie in a 1-D array, client after client.

    If all clients have equally many values, as without a selector, the array is reshaped to a matrix; else
    indices are computed.
    """

    def __init__(self, offsets: Array, block: int) -> None:
        self.offsets, self.counts = offsets, offsets[1:] - offsets[:-1]
        least, most = (int(self.counts.min()), int(self.counts.max())) if len(self.counts) else (0, 1)
        most = max(1, most)
        self.width = min(block, most) if block else most
        self.per_client = (self.counts + self.width - 1) // self.width
        self.total = int(self.per_client.sum())
        self.each = most if least == most else None  # the values of each client, if all have equally many

    def pack(self, values: Array) -> Array:
        """Return the values as a matrix with a row for each block; zeros fill up a short block."""
        if self.each is not None:
            rows = values.reshape(-1, self.each)
            if missing := -self.each % self.width:
                rows = module_of(rows).concatenate([rows, zeros((len(rows), missing), rows)], -1)
            return rows.reshape(self.total, self.width)
        matrix = zeros(self.total * self.width, values)
        matrix[self._of_value * self.width + self._position % self.width] = values
        return matrix.reshape(self.total, self.width)

    def spread(self, of_block: Array) -> Array:
        """Return an array with an entry for each value: the entry of `of_block` for the value's block."""
        if self.each is not None:
            rows = of_block.reshape(len(self.counts), -1, 1)
            shape = (*rows.shape[:2], self.width)
            spread = module_of(rows).broadcast_to(rows, shape).reshape(len(rows), -1)
            return spread[:, : self.each].reshape(-1)
        return of_block[self._of_value]

    def draws(self, keys: Array) -> Array:
        """Return a pseudo-random number in [0, 1) for each value, drawn from its client's key."""
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
