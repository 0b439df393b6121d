"""Keyed random numbers: every draw is a pure function of (seed, round, client, purpose, coordinate).

A key is a 64-bit integer. The draw for coordinate j is output j (counted from 0) of the random generator
splitmix64, seeded with the key. So a draw is the same in NumPy, in torch on a CPU or GPU, in any order, and
after a resume. A client without torch draws the same numbers.

The same code works for NumPy and torch, since in both an int64 product wraps around on overflow. int64 has
no unsigned shift, so the code shifts and then masks off the copies of the sign bit.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from cfedavg.core.arrays import cast, place

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_PART = 8192  # coordinates whose draws are computed together: the intermediate arrays stay in the cache
# The same constants as unsigned integers for compiled code, where a Python integer would be signed.
_GOLDEN_WORD, _MIX_1_WORD, _MIX_2_WORD = np.uint64(_GOLDEN), np.uint64(_MIX_1), np.uint64(_MIX_2)


class Purpose(IntEnum):
    """What a random draw is for. Draws for different purposes are independent. Never change these numbers."""

    INIT = 0
    SAMPLE = 1
    BATCH = 2
    SELECT = 3
    ROUND = 4
    STEPS = 5
    LOSS = 6
    SPEED = 7
    UPLINK = 8
    DOWNLINK = 9
    LATENCY = 10
    ITERATE = 11
    PARTITION = 12
    DROPOUT = 13
    RESIDUAL = 14
    BROADCAST = 15
    LINK = 16
    WAIT = 17
    CONTROL = 18
    CONTROL_BROADCAST = 19
    CANDIDATE = 20
    HELD_OUT = 21


def signed(word: int) -> int:
    """Return the signed integer with the same 64 bits as `word`; int64 arrays hold keys in this form."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mix_word(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _WORD
    z = ((z ^ (z >> 27)) * _MIX_2) & _WORD
    return z ^ (z >> 31)


def key(seed: int, t: int, client: int, purpose: Purpose) -> int:
    """Return the key for the draws of one purpose and one client in round t.

    >>> key(0, 0, 0, Purpose.BATCH) == key(0, 0, 0, Purpose.SELECT)
    False
    """
    word = 0
    for part in (seed, t, client, int(purpose)):
        word = _mix_word(((word ^ (part & _WORD)) + _GOLDEN) & _WORD)
    return word


def keys(*parts: Any) -> Any:
    """Return many keys as an int64 array; the arguments are those of `key`, but may be arrays (broadcast).

    >>> int(keys(0, 0, np.arange(3), int(Purpose.BATCH))[2]) == signed(key(0, 0, 2, Purpose.BATCH))
    True
    """
    word = np.zeros(1, np.int64)
    for part in parts:
        word = bits(word ^ (signed(part) if isinstance(part, int) else part), np.zeros(1, np.int64))
    return word


def bits(word: Any, coordinates: Any) -> Any:
    """Return 64 random bits (as int64) for each entry of `coordinates`, an int64 array.

    `word` is the key: an integer that `signed` returned, or an int64 array of keys (broadcast).
    """
    z = (coordinates + 1) * signed(_GOLDEN) + word
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * signed(_MIX_1)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * signed(_MIX_2)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def derive(words: Any, purpose: Purpose) -> Any:
    """Derive a new key for `purpose` from each key in `words`, an int64 array or one integer."""
    if isinstance(words, int):
        return signed(_mix_word((words + (int(purpose) + 1) * _GOLDEN) & _WORD))
    return bits(words, words * 0 + int(purpose))


def bits53(word: Any, coordinates: Any) -> Any:
    """Return a random integer from 0 to 2**53 - 1 for each coordinate: the upper 53 bits of `bits`."""
    return (bits(word, coordinates) >> 11) & ((1 << 53) - 1)


def normals(word: Any, coordinates: Any) -> Any:
    """Return a number for each coordinate, nearly from the standard normal distribution.

    A draw lies between two of 4,097 quantiles; all numbers between two quantiles are equally likely. So the
    numbers are the same in NumPy and torch, whose logarithms differ in the last bit. The variance is 1.002.
    """
    draws, table = bits53(word, coordinates), place(_quantiles(), coordinates)
    cell, below = draws >> 41, table[draws >> 41]
    share = cast(draws - (cell << 41), "float64") / 2.0**41
    return below + share * (table[cell + 1] - below)


@cache
def _quantiles() -> np.ndarray:
    normal = NormalDist()
    shares = [1 / 16384, *(i / 4096 for i in range(1, 4096)), 1 - 1 / 16384]
    return np.array([normal.inv_cdf(share) for share in shares])


def uniform(word: int, n: int) -> np.ndarray:
    """Return n uniform numbers in [0, 1) as float64: the draws of the key `word` for coordinates 0 .. n-1."""
    draws: np.ndarray = bits53(signed(word), np.arange(n, dtype=np.int64)) / 2.0**53
    return draws


def permutation(word: int, n: int) -> np.ndarray:
    """Return a random permutation of 0 .. n-1: the coordinates sorted by their random bits.

    >>> sorted(permutation(key(0, 0, 0, Purpose.BATCH), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(bits(signed(word), np.arange(n, dtype=np.int64)), kind="stable")


def sample(word: int, k: int, n: int) -> np.ndarray:
    """Return the first k numbers of `permutation(word, n)` in increasing order, without a sort of all n.

    >>> word = key(0, 0, 0, Purpose.SAMPLE)
    >>> sample(word, 3, 50).tolist() == sorted(permutation(word, 50)[:3].tolist())
    True
    """
    parts = (np.arange(start, min(n, start + _PART), dtype=np.int64) for start in range(0, n, _PART))
    draws = np.concatenate([bits(signed(word), part) for part in parts])
    last = np.partition(draws, k - 1)[k - 1]
    below, equal = np.flatnonzero(draws < last), np.flatnonzero(draws == last)
    return np.sort(np.concatenate([below, equal[: k - len(below)]]))


def draw_coordinates(key: int, keep: int, d: int) -> np.ndarray:
    """Draw each coordinate from 0 to d - 1 with probability keep / 2**53; return the drawn ones, sorted.

    Coordinate j is drawn if bits53(key, j) < keep.

    >>> draw_coordinates(0, 2**52, 10)
    array([1, 2, 4, 5, 6, 8])
    """
    mean = d * keep / 2**53
    room = int(mean + 6 * np.sqrt(mean)) + 1  # nearly always enough
    indices = np.empty(room, np.int64)
    n = draw_into(key, keep, d, indices)
    if n > room:
        indices = np.empty(n, np.int64)
        draw_into(key, keep, d, indices)
    return indices[:n]


def draw_into(key: int, keep: int, d: int, indices: np.ndarray) -> int:
    """Write the coordinates that `draw_coordinates` returns into `indices`; return how many were drawn.

    If more are drawn than `indices` has room for, the last ones are counted but not written.
    """
    return int(_compile_draw()(key, keep, d, indices))


@cache
def _compile_draw() -> Callable[..., int]:
    # Here, since numba takes long to start where it is needed.
    from cfedavg.core.kernels import is_plain, kernel

    compiled = kernel(_draw)
    return _draw_by_numpy if is_plain(compiled) else compiled


def _draw_by_numpy(key: int, keep: int, d: int, indices: np.ndarray) -> int:
    n = 0
    for start in range(0, d, _PART):
        draws = bits53(signed(key), np.arange(start, min(d, start + _PART), dtype=np.int64))
        drawn = start + np.flatnonzero(draws < keep)
        indices[n : n + len(drawn)] = drawn[: max(len(indices) - n, 0)]
        n += len(drawn)
    return n


# The body of `draw_into`, in unsigned integers for the compiler; tests compare it with `bits53`.
def _draw(key: Any, keep: Any, d: Any, indices: np.ndarray) -> Any:
    word, n = np.uint64(key), 0
    for j in range(d):
        word += _GOLDEN_WORD
        z = (word ^ (word >> np.uint64(30))) * _MIX_1_WORD
        z = (z ^ (z >> np.uint64(27))) * _MIX_2_WORD
        z ^= z >> np.uint64(31)
        if np.int64(z >> np.uint64(11)) < keep:
            if n < len(indices):
                indices[n] = j
            n += 1
    return n
