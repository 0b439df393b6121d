"""The coordinates that a key draws, compiled: equal to those of `core.keys`, the oracle."""

from __future__ import annotations

import numpy as np

from cfedavg.core.kernel import Int, kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)


def drawn(key: int, keep: int, d: int) -> np.ndarray:
    """The coordinates j < d for which bits53(key, j) < keep, increasing.

    >>> drawn(0, 2**52, 10)
    array([1, 2, 4, 5, 6, 8])
    """
    mean = d * keep / 2**53
    room = int(mean + 6 * np.sqrt(mean)) + 1  # nearly always enough
    indices = np.empty(room, np.int64)
    n = draw(key, keep, d, indices)
    if n > room:
        indices = np.empty(n, np.int64)
        draw(key, keep, d, indices)
    return indices[:n]


@kernel
def draw(key: Int, keep: Int, d: Int, indices: np.ndarray) -> Int:
    """Fills `indices` with the coordinates j < d for which bits53(key, j) < keep; how many there are."""
    word, n = np.uint64(key), 0
    for j in range(d):
        word += GOLDEN
        z = (word ^ (word >> np.uint64(30))) * MIX_1
        z = (z ^ (z >> np.uint64(27))) * MIX_2
        z ^= z >> np.uint64(31)
        if np.int64(z >> np.uint64(11)) < keep:
            if n < len(indices):
                indices[n] = j
            n += 1
    return n
