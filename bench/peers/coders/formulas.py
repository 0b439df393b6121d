"""What GRACE and STC send for k of d coordinates: GRACE's two arrays, and STC's Golomb code.

GRACE (Xu et al., 2021) sends for top-k an int64 index and a float32 value for each coordinate. STC (Sattler
et al., 2019) sends signs with one mean; distances between coordinates are written in Golomb's code, whose
parameter follows from the share p = k / d of the coordinates that are sent:

    b = 1 + floor(log2(log(phi - 1) / log(1 - p))),  phi = (sqrt(5) + 1) / 2,
    bits of a position on average = b + 1 / (1 - (1 - p)^(2^b)).
"""

from __future__ import annotations

import math

import numpy as np

MEAN = 32  # bits of STC's mean


def count_grace(k: int) -> int:
    """Return the bytes of GRACE's message of k coordinates.

    >>> count_grace(5820)
    69840
    """
    return (8 + 4) * k


def golomb_parameter(d: int, k: int) -> int:
    """Return b: the lowest b bits of a distance are copied, the rest is written in unary.

    >>> golomb_parameter(100, 1), golomb_parameter(582_026, 5820), golomb_parameter(4, 3)
    (6, 6, 0)
    """
    phi = (math.sqrt(5) + 1) / 2
    share = k / d
    return max(0, 1 + math.floor(math.log2(math.log(phi - 1) / math.log(1 - share)))) if share < 1 else 0


def count_stc(d: int, k: int) -> float:
    """Return the bytes that STC's formula expects: positions, a bit for each sign, and the mean.

    >>> round(8 * (count_stc(582_026, 5820) - 4) / 5820 - 1, 2)
    8.11
    """
    b = golomb_parameter(d, k)
    position = b + 1 / (1 - (1 - k / d) ** (2**b))
    return (k * (position + 1) + MEAN) / 8


def encode_golomb(indices: np.ndarray, d: int) -> np.ndarray:
    """Return the bits of increasing indices below d: for each, its distance from the one before, less 1."""
    b = golomb_parameter(d, len(indices))
    distances = np.diff(indices, prepend=-1) - 1
    ones = distances >> b
    ends = np.cumsum(ones + 1 + b)  # of each code word: some ones, a zero, b bits
    bits = np.ones(int(ends[-1]) if len(ends) else 0, np.uint8)
    bits[ends - b - 1] = 0
    for place in range(b):
        bits[ends - 1 - place] = distances >> place & 1
    return bits


def decode_golomb(bits: np.ndarray, d: int, k: int) -> np.ndarray:
    """Return the indices that `encode_golomb` was given."""
    b, at, index, found = golomb_parameter(d, k), 0, -1, []
    zeros = np.flatnonzero(bits == 0)
    for _ in range(k):
        zero = int(zeros[np.searchsorted(zeros, at)])
        rest = int("".join(map(str, bits[zero + 1 : zero + 1 + b])) or "0", 2)
        index += ((zero - at) << b) + rest + 1
        found.append(index)
        at = zero + 1 + b
    return np.array(found, np.int64)


def measure_stc(indices: np.ndarray, d: int) -> int:
    """Return the bytes of STC's message of these coordinates, in whole bytes."""
    return math.ceil((len(encode_golomb(indices, d)) + len(indices) + MEAN) / 8)
