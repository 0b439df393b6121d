"""Quantisers: how the selected values are encoded. Error feedback keeps the rounding errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from cfedavg.compress.blocks import Blocks
from cfedavg.compress.compressor import Quantiser
from cfedavg.compress.numerics import normalise_rows, prefix_sums, row_sums
from cfedavg.core.arrays import (
    LARGEST_BF16,
    Array,
    arange,
    by_tiles,
    cast,
    module_of,
    sort_rows,
    sqrt,
    to_bf16,
    to_single,
)
from cfedavg.core.parts import argument
from cfedavg.core.payload import Floats, Levels

# The SNR of a single value, whose only error is the rounding of its scale to float32: 2^48, less 2 bits for
# the arithmetic around it.
ONE_SCALE = 2.0**46
_block = partial(argument, "from 1 to 2^31 - 1", lambda block: 1 <= block < 2**31, 256, integer=True)


@dataclass(frozen=True)
class FP32(Quantiser):
    """32-bit floating point: exact for a float32 model, correctly rounded for a float64 model.

    >>> from cfedavg.compress import TopK, decompress
    >>> decompress((TopK(0.5) >> FP32()).compress(np.array([0.1, -0.7]), key=0)).tolist()
    [[0.0, -0.699999988079071]]
    """

    name: ClassVar[str] = "fp32"
    rounds_values: ClassVar[bool] = False

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        return Floats(to_single(values), "fp32")

    def gamma(self, n: int) -> float:
        return 2.0**48


@dataclass(frozen=True)
class BF16(Quantiser):
    """bf16, the upper 16 bits of a float32, correctly rounded: the relative error is at most 2^-8.

    >>> from cfedavg.compress import TopK, decompress
    >>> decompress((TopK(0.5) >> BF16()).compress(np.array([0.1, -0.7]), key=0)).tolist()
    [[0.0, -0.69921875]]
    """

    name: ClassVar[str] = "bf16"

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        # The largest float32 numbers would round to infinity; they become the largest bf16 number instead.
        return Floats(to_bf16(to_single(values).clip(-LARGEST_BF16, LARGEST_BF16)), "bf16")

    def gamma(self, n: int) -> float:
        return 2.0**16


@dataclass(frozen=True)
class IntBlocks(Quantiser):
    """Integers of `bits` bits, times a float32 scale for each block of `block` values.

    The integers are from -top to top, where top = 2^(bits - 1) - 1. Rounding changes a value by at most half
    a scale, and by at most the value itself. In the worst block, one value is large and all others are half a
    scale. So the SNR is gamma = 1 + 4 top^2 / (block - 1).

    >>> from cfedavg.compress import Everything, decompress
    >>> compressor = Everything() >> IntBlocks(3)  # as a text: int3(256); top is 3
    >>> decompress(compressor.compress(np.array([0.75, -1.0, 3.0]), key=0)).tolist()
    [[1.0, -1.0, 3.0]]
    """

    bits: int = argument("from 3 to 8", lambda bits: 3 <= bits <= 8, integer=True)
    block: int = _block()

    def __str__(self) -> str:
        return f"int{self.bits}({self.block})"

    @property
    def top(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        grid = Blocks(offsets, self.block)
        exact, xp = cast(values, "float64"), module_of(values)
        scales = to_single(xp.amax(abs(grid.pack(exact)), axis=-1) / self.top)
        steps = _ratio(exact, grid.spread(cast(scales, "float64")))
        levels = steps.round().clip(-self.top, self.top)
        return Levels(cast(levels, "int8"), scales, self.block, self.top)

    def gamma(self, n: int) -> float:
        others = min(n, self.block) - 1
        return 1 + 4 * self.top**2 / others if others > 0 else ONE_SCALE


@dataclass(frozen=True)
class TwoLevels(Quantiser):
    """The sign of each value times the better of two magnitudes for each block of `block` values: 2 bits.

    The two magnitudes have the least squared error: the block is sorted by magnitude and cut in two, and the
    means of both parts are sent. Of all cuts, the best is taken.

    Let a_1 >= a_2 >= ... be the magnitudes of n values, and T the largest of (a_1 + ... + a_k)^2 / k. The
    error is at most |a|^2 - T. As a_1 + ... + a_k <= sqrt(T k), majorisation gives |a|^2 <= T (1 + s), where
    1 + s = 1 + ln((4 n - 1) / 3) / 4 >= sum_i (sqrt(i) - sqrt(i - 1))^2. So gamma = 1 + 1 / s.

    >>> from cfedavg.compress import Everything, decompress
    >>> compressor = Everything() >> TwoLevels()  # as a text: int2
    >>> decompress(compressor.compress(np.array([1.0, -2.0, 8.0, -9.0, 7.0]), key=0)).tolist()
    [[1.5, -1.5, 8.0, -8.0, 8.0]]
    """

    name: ClassVar[str] = "int2"
    block: int = _block()

    def __str__(self) -> str:
        return f"int2({self.block})"

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        grid, xp = Blocks(offsets, self.block), module_of(values)
        magnitude = abs(cast(values, "float64"))
        scales = to_single(by_tiles(two_means, grid.pack(magnitude), grid.lengths()[:, None]))
        middle = cast(scales, "float64").sum(-1) / 2
        levels = xp.where(magnitude > grid.spread(middle), 2, 1)
        levels = cast(xp.where(values < 0, -levels, levels), "int8")
        return Levels(levels, scales.reshape(-1), self.block, 2, per_level=True)

    def gamma(self, n: int) -> float:
        n = min(n, self.block)
        if n <= 2:
            return ONE_SCALE
        return 1 + 4 / math.log((4 * n - 1) / 3)


@dataclass(frozen=True)
class Sign(Quantiser):
    """The sign of each value and, for each client, one scale: the mean magnitude of its values.

    If a client sends n values, the SNR is gamma = n / (n - 1).

    >>> from cfedavg.compress import TopK, decompress
    >>> decompress((TopK(0.5) >> Sign()).compress(np.array([0.5, -1.0, 3.0, 1.0]), key=0)).tolist()
    [[0.0, -2.0, 2.0, 0.0]]
    """

    name: ClassVar[str] = "sign"

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        grid = Blocks(offsets, 0)
        scales = row_sums(grid.pack(abs(cast(values, "float64")))) / grid.counts[grid.counts > 0]
        levels = module_of(values).where(values < 0, -1, 1)
        return Levels(cast(levels, "int8"), to_single(scales), 0, 1)

    def gamma(self, n: int) -> float:
        return n / (n - 1) if n > 1 else ONE_SCALE


@dataclass(frozen=True)
class QSGD(Quantiser):
    """Random rounding of each value to a multiple of norm / s, where norm is that of the value's block.

    For a block v of n values, unbiased QSGD has E|C(v)|^2 = beta |v|^2 with a beta that depends on v. If
    beta > 2, this violates Definition 1. So here C(v) is divided by beta, the best factor:
    E|C(v)/beta - v|^2 = (1 - 1/beta) |v|^2. The scale that is sent for a block includes this factor. The SNR
    is that of the worst block, which has beta - 1 <= min(n / (4 s^2), sqrt(n) / s).

    >>> from cfedavg.compress import Everything
    >>> payload = (Everything() >> QSGD(4)).compress(np.array([3.0, 0.0, -4.0]), key=1)
    >>> payload.values.levels.tolist()  # 3/5 and -4/5 of the norm, in quarters
    [2, 0, -4]
    """

    name: ClassVar[str] = "qsgd"
    s: int = argument("from 1 to 32767", lambda s: 1 <= s <= 32767, integer=True)
    block: int = _block()

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        grid, magnitude, xp = Blocks(offsets, self.block), abs(cast(values, "float64")), module_of(values)
        packed = grid.pack(magnitude)
        norm = xp.amax(packed, axis=-1) * sqrt(row_sums(xp.square(normalise_rows(packed))))
        ratio = _ratio(self.s * magnitude, grid.spread(norm)).clip(max=self.s)
        levels = xp.floor(ratio + grid.draws(keys)).clip(max=self.s)
        fraction = ratio - xp.floor(ratio)
        beta_s2 = self.s**2 + row_sums(grid.pack(fraction * (1 - fraction)))
        levels = cast(xp.where(values < 0, -levels, levels), "int8" if self.s <= 127 else "int16")
        return Levels(levels, to_single(self.s * norm / beta_s2), self.block, self.s)

    def gamma(self, n: int) -> float:
        n = min(n, self.block)
        return 1 + 1 / min(n / (4 * self.s**2), math.sqrt(n) / self.s) if n > 1 else ONE_SCALE


def _ratio(values: Array, scales: Array) -> Array:
    """Return values / scales, where 0 / 0 gives 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return module_of(values).nan_to_num(values / scales, nan=0.0)


def two_means(blocks: Array, n: Array) -> Array:
    """Return the means of the smaller and the larger magnitudes of each row, for the least squared error.

    Row i holds n[i, 0] magnitudes and then zeros. The squared error of a cut is that of the whole row less
    S^2 / n for each of the two groups, where S is the sum of its n magnitudes.
    """
    xp, place = module_of(blocks), arange(blocks.shape[1], blocks)
    descending = xp.flip(sort_rows(normalise_rows(blocks)), (-1,))  # zeros at the end change no sum
    above = prefix_sums(descending)
    below = (above[:, -1:] - above).clip(min=0)
    gain = xp.square(above) / (place + 1) + xp.square(below) / (n - place - 1).clip(min=1)
    cut = xp.where(place < n, gain, -1.0).argmax(axis=-1)[:, None]
    high = row_sums(xp.where(place <= cut, descending, 0.0)) / (cut + 1)[:, 0]
    low = row_sums(xp.where(place > cut, descending, 0.0)) / (n - cut - 1).clip(min=1)[:, 0]
    low = xp.where((cut + 1 < n)[:, 0], low, high)  # one group, such as a single number
    return xp.stack([low, high], -1) * cast(xp.amax(blocks, axis=-1), "float64")[:, None]
