"""The sizes of blocks: a block whose clients end one by one shrinks to few sizes, each a step to compile.

A step of c clients costs max(c, floor): below `floor` clients it takes as long as with `floor`. A block
shrinks from size n to c < n when c clients or fewer are still busy. Each size costs a compilation, so a size
is chosen only if it saves a part of the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

MOST = 5  # sizes of blocks; each needs a step of its own
WORTH = 0.05  # a further size must save this part of what the steps of a round cost


def busy_times(blocks: Iterable[Sequence[int]]) -> np.ndarray:
    """Return an array whose entry a is the number of steps in which exactly `a` clients of a block are busy.

    `blocks` gives the steps of the clients of each block.

    >>> busy_times([[5, 2, 2]]).tolist()
    [0, 3, 0, 2]
    """
    ordered = [np.sort(np.asarray(steps, np.int64))[::-1] for steps in blocks]
    times = np.zeros(1 + max(map(len, ordered), default=0), np.int64)
    for steps in ordered:
        times[1 : 1 + len(steps)] += steps - np.append(steps[1:], 0)
    return times


def choose_sizes(times: np.ndarray, floor: int) -> tuple[int, ...]:
    """Return the sizes to which a block shrinks, largest first; the block itself has the first size.

    `times` is what `busy_times` returns. Each size is the one that saves most beside those before it.

    >>> choose_sizes(busy_times([[100, 100, 100, 9, 9, 9]]), 1)
    (6, 3)
    >>> choose_sizes(busy_times([[100, 100, 100, 9, 9, 9]]), 6)
    (6,)
    """
    n, until = len(times) - 1, np.cumsum(times)
    sizes = [n]
    costs = np.maximum(np.arange(n + 1), floor)
    while len(sizes) < MOST:
        above = np.array([min(size for size in sizes if size >= a) for a in range(n + 1)])
        below = np.array([max((size for size in sizes if size < a), default=0) for a in range(n + 1)])
        # A new size `a` takes over the steps in which more than `below` and at most `a` clients are busy.
        saved = (costs[above] - costs) * (until - until[below])
        best = int(saved.argmax())
        if saved[best] <= WORTH * (costs[above] * times).sum():
            break
        sizes = sorted([*sizes, best], reverse=True)
    return tuple(sizes)


def fit(busy: int, sizes: Sequence[int]) -> int:
    """Return the smallest of `sizes`, largest first, that is at least `busy`.

    >>> fit(7, (20, 8, 2))
    8
    """
    return min(size for size in sizes if size >= busy)


def halve(n: int) -> list[int]:
    """Return n, n/2, n/4, ... (each rounded up), down to 1: sizes for blocks that begin with fewer clients.

    >>> halve(10)
    [10, 5, 3, 2, 1]
    """
    found = [n]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found
