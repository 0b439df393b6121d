"""A set of n cells out of `size`, as the gaps between them, at the entropy of a uniform set or below."""

from __future__ import annotations

import numpy as np

from cfedavg.core.kernel import Int, kernel
from cfedavg.wire.coder import Coder, put_number, take_number
from cfedavg.wire.table import FIRST, SEEN, make, make_jumps, put_symbol, renew, take_symbol

STEPS = 16  # symbols of a gap: its number of steps, up to 14; 15 says that more follow after 15 steps
JUMPS = 4  # bits of a share at which the decoder looks first
TRUST = 256  # how many gaps the first table is worth against those seen


@kernel
def step_of(size: Int, n: Int) -> Int:
    """Gaps are counted in steps of 2^step cells: a quarter to a half of the mean gap."""
    step = 0
    while (size // n) >> (step + 2):
        step += 1
    return step


@kernel
def expect(counts: np.ndarray, size: Int, n: Int, step: Int) -> None:
    """The counts of TRUST gaps if the n cells lie anywhere: each step ends a gap with the same chance."""
    while size >> 31:  # keeps the products below 2^63
        size = size >> 1
        n = min((n + 1) >> 1, size)
    empty = ((size - n) << 30) // size
    for _ in range(step):
        empty = (empty * empty) >> 30
    left = TRUST * SEEN << 30
    for s in range(STEPS - 1):
        further = (left >> 30) * empty
        counts[s] = max((left - further) >> 30, 1)
        left = further
    counts[STEPS - 1] = max(left >> 30, 1)


@kernel
def put_gaps(words: np.ndarray, coder: Coder, cells: np.ndarray, size: Int) -> Coder:
    """Encodes cells, which are increasing and below `size`; the decoder knows how many there are."""
    n = len(cells)
    if n == 0 or n == size:
        return coder
    step = step_of(size, n)
    counts, sums = np.empty(STEPS, np.int64), np.empty(STEPS + 1, np.int64)
    expect(counts, size, n, step)
    make(counts, sums)
    following, due = 0, FIRST
    for i in range(n):
        gap = cells[i] - following
        following = cells[i] + 1
        steps = gap >> step
        while steps >= STEPS - 1:
            coder = put_symbol(words, coder, sums, STEPS - 1)
            counts[STEPS - 1] += SEEN
            steps -= STEPS - 1
        coder = put_symbol(words, coder, sums, steps)
        counts[steps] += SEEN
        coder = put_number(words, coder, gap & ((1 << step) - 1), step)
        if i + 1 == due:
            due = renew(counts, sums, due)
    return coder


@kernel
def take_gaps(words: np.ndarray, coder: Coder, cells: np.ndarray, size: Int) -> tuple[bool, Coder]:
    """Fills `cells` with what put_gaps has encoded; says whether all of them lie below `size`."""
    n = len(cells)
    if n == 0 or n == size:
        for i in range(n):
            cells[i] = i
        return True, coder
    step = step_of(size, n)
    counts, sums, jump = (
        np.empty(STEPS, np.int64),
        np.empty(STEPS + 1, np.int64),
        np.empty(1 << JUMPS, np.uint8),
    )
    expect(counts, size, n, step)
    make(counts, sums)
    make_jumps(sums, jump, JUMPS)
    following, due = 0, FIRST
    for i in range(n):
        symbol, coder = take_symbol(words, coder, sums, jump, JUMPS)
        counts[symbol] += SEEN
        while symbol == STEPS - 1:
            following += (STEPS - 1) << step
            if following >= size:
                return False, coder
            symbol, coder = take_symbol(words, coder, sums, jump, JUMPS)
            counts[symbol] += SEEN
        rest, coder = take_number(words, coder, step)
        cells[i] = following + (symbol << step) + rest
        following = cells[i] + 1
        if following > size:
            return False, coder
        if i + 1 == due:
            due = renew(counts, sums, due)
            make_jumps(sums, jump, JUMPS)
    return True, coder
