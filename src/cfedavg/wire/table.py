"""Symbols that are coded with a table of frequencies, which is made anew from time to time from those seen.

A table has room for up to 256 symbols. `counts` says how often each has come, in units of SEEN; `sums`
are the frequencies added up, from 0 to TOTAL, so that symbol s has the share from sums[s] to sums[s + 1].
`jump` says at which symbol to start looking for a share when decoding.
"""

from __future__ import annotations

import numpy as np

from cfedavg.core.kernel import Int, kernel
from cfedavg.wire.coder import Coder, narrow, widen

BITS = 16
TOTAL = 1 << BITS
SEEN = 32  # what a symbol that has come counts, against 1 for one that has not
FIRST, LONGEST = 16, 128  # symbols until a table is made anew: at first, then twice as many, at most


@kernel
def make(counts: np.ndarray, sums: np.ndarray) -> None:
    """The frequencies: in proportion to the counts, at least 1, the last symbol takes what is left."""
    n, total = len(counts), 0
    for s in range(n):
        total += counts[s]
    share = ((TOTAL - n) << 32) // total
    sums[0] = 0
    for s in range(n - 1):
        sums[s + 1] = sums[s] + 1 + ((counts[s] * share) >> 32)
    sums[n] = TOTAL


@kernel
def make_jumps(sums: np.ndarray, jump: np.ndarray, bits: Int) -> None:
    """For each of 2^bits parts of TOTAL, the symbol in whose share the part begins."""
    shift = BITS - bits
    for i in range(1 << bits):
        jump[i] = 0
    for s in range(len(sums) - 1):  # the first part that begins in the share of s or of a later symbol
        part = (sums[s] + (1 << shift) - 1) >> shift
        if part < 1 << bits:
            jump[part] = s
    for i in range(1, 1 << bits):
        jump[i] = max(jump[i], jump[i - 1])


@kernel
def count(counts: np.ndarray, symbol: Int) -> None:
    """Notes that a symbol has come, and that its neighbours are more likely too."""
    counts[symbol] += SEEN
    if symbol > 0:
        counts[symbol - 1] += SEEN // 2
    if symbol + 1 < len(counts):
        counts[symbol + 1] += SEEN // 2


@kernel
def renew(counts: np.ndarray, sums: np.ndarray, due: Int) -> Int:
    """Makes the table anew when `due` symbols have come, and forgets a little; when to do it again."""
    make(counts, sums)
    if due < LONGEST:
        return 2 * due
    for s in range(len(counts)):
        counts[s] = max(counts[s] - (counts[s] >> 2), 1)
    return due + LONGEST


@kernel
def put_symbol(words: np.ndarray, coder: Coder, sums: np.ndarray, symbol: Int) -> Coder:
    """Encodes a symbol."""
    unit = coder[2] >> np.uint64(BITS)
    below = np.uint64(sums[symbol])
    return narrow(words, coder, unit * below, unit * (np.uint64(sums[symbol + 1]) - below))


@kernel
def take_symbol(
    words: np.ndarray, coder: Coder, sums: np.ndarray, jump: np.ndarray, bits: Int
) -> tuple[Int, Coder]:
    """Decodes what put_symbol has encoded; `jump` is of 2^bits parts."""
    position, code, span = coder
    unit = span >> np.uint64(BITS)
    share = np.int64(min(code // unit, np.uint64(TOTAL - 1)))
    symbol = np.int64(jump[share >> (BITS - bits)])
    while sums[symbol + 1] <= share:
        symbol += 1
    below = np.uint64(sums[symbol])
    width = np.uint64(sums[symbol + 1]) - below
    return symbol, widen(words, position, code - unit * below, unit * width)
