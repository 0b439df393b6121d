"""The k entries of largest magnitude, exactly, on one core: what torch.topk does, many times as fast.

The bits of a magnitude, read as an integer, order like the magnitudes. A few entries, and if need be all,
are counted into bins by their leading bits; that gives a bound which at least k entries reach. One pass
over all collects those, and a radix select among them finds the k-th largest. NaN and infinity are larger
than all other bits, so they are found on the way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cfedavg.kernel import Int, kernel

BINS = 13  # leading bits by which entries are counted
LINE = 16  # entries that are sampled together, and skipped together
SAMPLES = 512  # lines that are sampled
DIGIT = 11  # bits that the radix select looks at together
_BITS: dict[Any, Any] = {np.dtype(np.float32): np.uint32, np.dtype(np.float64): np.uint64}
_INFINITY = {dtype: int(np.array(np.inf, dtype).view(bits)) for dtype, bits in _BITS.items()}


def largest(values: np.ndarray, k: int) -> tuple[np.ndarray, bool]:
    """The indices of the k largest magnitudes, increasing, ties to the lowest; and whether all are finite.

    >>> largest(np.array([3.0, -1.0, 4.0, 1.0, -4.0], np.float32), 2)
    (array([2, 4]), True)
    """
    d, bits = len(values), values.view(_BITS[values.dtype])
    width = 8 * values.itemsize - 1  # without the sign
    found = np.empty(min(d, 2 * k + 4096) + 2 * LINE, np.int64)
    bound = bound_of(bits, k, max(d // SAMPLES, LINE), width)
    n = collect(values, _magnitude(bound, values.dtype), found)
    if n < k:  # the sample was not like the others
        found = np.empty(d + 2 * LINE, np.int64)
        n = collect(values, _magnitude(bound_of(bits, k, LINE, width), values.dtype), found)
    indices = np.empty(k, np.int64)
    top = pick(bits, found[:n], width, indices)
    return indices, top < _INFINITY[values.dtype]


def _magnitude(bits: int, dtype: np.dtype) -> Any:
    """The number that has these bits."""
    return np.array(bits, _BITS[dtype]).view(dtype)[()]


@kernel
def bound_of(bits: np.ndarray, k: Int, stride: Int, width: Int) -> Int:
    """A magnitude that k entries reach, as bits: surely if all are counted, else if the others are alike."""
    bins, seen = np.zeros(1 << BINS, np.int64), 0
    for start in range(0, len(bits), stride):
        for i in range(start, min(start + LINE, len(bits))):
            bins[np.int64(bits[i] >> np.uint8(width - BINS)) & ((1 << BINS) - 1)] += 1
            seen += 1
    share = k * seen / len(bits)
    wanted = k if seen == len(bits) else int(share + 3 * np.sqrt(share)) + 4
    edge = 1 << BINS
    while edge > 0 and wanted > 0:
        edge -= 1
        wanted -= bins[edge]
    return edge << (width - BINS)


@kernel
def collect(values: np.ndarray, bound: float, found: np.ndarray) -> Int:
    """Fills `found` with the entries not below the bound; how many there are, or -1 if there is no room."""
    lines, n = len(values) // LINE, 0
    hits = np.empty(lines, np.uint8)
    for line in range(lines):  # a loop of its own and of fixed length: a few vector instructions
        here = 0
        for i in range(line * LINE, line * LINE + LINE):
            here += not (abs(values[i]) < bound)  # "not below", so that NaN counts
        hits[line] = here
    for line in range(lines):
        if hits[line]:
            if n + 2 * LINE > len(found):
                return -1
            for i in range(line * LINE, line * LINE + LINE):
                found[n] = i  # overwritten unless it counts: a branch would often be guessed wrong
                n += not (abs(values[i]) < bound)
    for i in range(lines * LINE, len(values)):
        found[n] = i
        n += not (abs(values[i]) < bound)
    return n


@kernel
def pick(bits: np.ndarray, found: np.ndarray, width: Int, indices: np.ndarray) -> Int:
    """Fills `indices` with the largest of the entries found, ties to the lowest; the bits of the largest."""
    magnitudes, top = np.empty(len(found), np.int64), 0
    for i in range(len(found)):
        magnitudes[i] = np.int64(bits[found[i]]) & ((1 << width) - 1)
        top = max(top, magnitudes[i])
    smallest, wanted, below = 0, len(indices), width
    while below > 0:  # of the k-th largest the bits above `below` are known, and `wanted` of those are taken
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
