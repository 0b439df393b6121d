"""Sums and the k largest entries, with the same bits for NumPy and torch, on a CPU and on a GPU.

`find_largest` does on one core what torch.topk does, many times as fast. It compares magnitudes by their
bits: read as integers, these have the same order. `find_bound` counts a sample of the entries in bins, by
their leading bits. From the counts it computes a bound, a magnitude that somewhat more than k entries should
reach. `collect` finds the entries that reach the bound. If these are fewer than k, `find_bound` computes a
lower bound, at last one from all entries. `pick` selects the k largest of the found entries by a radix
select. The bits of NaN and infinity are larger than those of all finite numbers, so `pick` finds them too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cfedavg.core.arrays import Array, cast, copy, module_of
from cfedavg.core.kernels import Int, kernel

BINS = 13  # the number of leading bits that decide an entry's bin
LINE = 16  # entries that are sampled together: a cache line
SAMPLES = 256  # the number of lines that are sampled
DIGIT = 11  # the bits of one step of the radix select
_BITS: dict[Any, Any] = {np.dtype(np.float32): np.uint32, np.dtype(np.float64): np.uint64}
_INFINITY = {dtype: int(np.array(np.inf, dtype).view(bits)) for dtype, bits in _BITS.items()}


def normalise_rows(magnitude: Array) -> Array:
    """Divide each row of magnitudes by its largest, so that squares do not overflow; return float64."""
    xp = module_of(magnitude)
    top = cast(xp.amax(magnitude, axis=-1, keepdims=True), "float64")
    return cast(magnitude, "float64") / xp.where(top > 0, top, 1.0)


def squared_norms(p: Array) -> Array:
    """Return the squared norm of each row, with the same bits on every device."""
    return row_sums(module_of(p).square(cast(p, "float64")))


def row_sums(values: Array) -> Array:
    """Return the sums over the last axis, with the same bits on every device.

    The sums of NumPy and torch depend in their last bits on the device and on the number of threads and rows.
    Here a row is cut at the largest power of two below its length, the second piece is added to the first,
    and so on until one number is left. So the order of additions depends on the length of a row only, and
    zeros at the end of a row do not change the sum.
    """
    while (width := values.shape[-1]) > 1:
        half = 1 << (width - 1).bit_length() - 1
        folded, alone = values[..., : width - half] + values[..., half:], values[..., width - half : half]
        values = module_of(values).concatenate([folded, alone], -1) if alone.shape[-1] else folded
    return values[..., 0]


def prefix_sums(values: Array) -> Array:
    """Return the cumulative sums over the last axis, with the same bits on every device.

    Neighbours are added to pairs. The cumulative sums of the pairs are entries 1, 3, 5 and so on of the
    result. Each entry between them is the entry before it plus one value.
    """
    if (width := values.shape[-1]) < 2:
        return values
    pairs, sums = prefix_sums(values[..., : width - 1 : 2] + values[..., 1::2]), copy(values)
    sums[..., 1::2] = pairs
    sums[..., 2::2] += pairs[..., : (width - 1) // 2]
    return sums


def find_largest(values: np.ndarray, k: int) -> tuple[np.ndarray, bool]:
    """Return the indices of the k largest magnitudes in increasing order, and whether all values are finite.

    Of equal magnitudes, those at lower indices are taken first.

    >>> find_largest(np.array([3.0, -1.0, 4.0, 1.0, -4.0], np.float32), 2)
    (array([2, 4]), True)
    """
    d, bits = len(values), values.view(_BITS[values.dtype])
    width = 8 * values.itemsize - 1  # without the sign
    found, n = np.empty(d + 8, np.int64), 0
    for stride, slack in ((max(d // SAMPLES, LINE), 1), (max(d // SAMPLES, LINE), 2), (LINE, 1)):
        bound = find_bound(bits, k, stride, slack, width)
        magnitude: Any = np.array(bound, bits.dtype).view(values.dtype)[()]  # the number of these bits
        n = collect(values, magnitude, found)
        if n >= k:
            break
    indices = np.empty(k, np.int64)
    top = pick(bits, found[:n], width, indices)
    return indices, top < _INFINITY[values.dtype]


@kernel
def find_bound(bits: np.ndarray, k: Int, stride: Int, slack: Int, width: Int) -> Int:
    """Return a bound, the bits of a magnitude that at least k entries reach; `bits` are those of the entries.

    If `stride` is LINE, all entries are counted and the bound is certain. Otherwise LINE of every `stride`
    entries are counted, and fewer than k entries may reach the bound. A larger `slack` gives a lower bound,
    which is safer. `width` is the number of bits of an entry without the sign.
    """
    d, seen, shift = len(bits), 0, np.uint8(width - BINS)
    leading = np.empty((d // stride + 1) * LINE, np.int32)
    for start in range(0, d, stride):  # a separate loop from the counting, so that memory is read ahead
        for i in range(start, min(start + LINE, d)):
            leading[seen] = np.int64(bits[i] >> shift) & ((1 << BINS) - 1)
            seen += 1
    bins = np.zeros(1 << BINS, np.int32)
    for i in range(seen):
        bins[leading[i]] += 1
    share = k * seen / d
    wanted = k if seen == d else slack * (int(share + 3 * np.sqrt(share)) + 4)
    edge = 1 << BINS
    while edge > 0 and wanted > 0:
        edge -= 1
        wanted -= bins[edge]
    return edge << (width - BINS)


@kernel
def collect(values: np.ndarray, bound: float, found: np.ndarray) -> Int:
    """Fill `found` with the indices of entries whose magnitude is not below `bound`; return their number.

    `found` must have room for 8 more indices than there are entries.
    """
    d, n = len(values), 0
    reached = np.zeros(d // 8 * 8 + 8, np.uint8)
    for i in range(d):  # a separate loop, so that the compiler uses vector instructions
        reached[i] = not (abs(values[i]) < bound)  # "not below", so that NaN counts
    eights = reached.view(np.uint64)
    for eight in range(len(eights)):
        if eights[eight]:
            for i in range(8 * eight, 8 * eight + 8):
                found[n] = i  # overwritten next if reached[i] is 0; a branch would be slower
                n += reached[i]
    return n


@kernel
def pick(bits: np.ndarray, found: np.ndarray, width: Int, indices: np.ndarray) -> Int:
    """Fill `indices` with those of `found` that have the largest magnitudes; return the largest's bits.

    `found` holds indices of entries, whose bits are in `bits`. `width` is the number of bits without the
    sign. Of equal magnitudes, those at lower indices are taken first.
    """
    magnitudes, top = np.empty(len(found), np.int64), 0
    for i in range(len(found)):
        magnitudes[i] = np.int64(bits[found[i]]) & ((1 << width) - 1)
        top = max(top, magnitudes[i])
    smallest, wanted, below = 0, len(indices), width
    # The k-th largest magnitude is known down to bit `below`. Of the entries with the same bits down to
    # there, the `wanted` largest belong to the k largest.
    while below > 0:
        digit = min(DIGIT, below)
        below -= digit
        bins = np.zeros(1 << DIGIT, np.int64)
        for m in magnitudes:
            if m >> (below + digit) == smallest >> (below + digit):
                bins[(m >> below) & ((1 << digit) - 1)] += 1
        edge = (1 << digit) - 1
        while wanted > bins[edge]:
            wanted -= bins[edge]
            edge -= 1
        smallest |= edge << below
    n = 0
    for i in range(len(found)):
        if magnitudes[i] > smallest or (magnitudes[i] == smallest and wanted > 0):
            wanted -= magnitudes[i] == smallest
            indices[n] = found[i]
            n += 1
    return top
