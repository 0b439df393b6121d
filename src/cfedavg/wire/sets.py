"""Two ways to write a set of cells: as gaps, and with the rows and columns of a tensor sorted into classes.

Gaps cost the entropy of a uniform set or less. Classes sort rows or columns by how many of their coordinates
are sent, so that dense parts of a tensor come together.
"""

from __future__ import annotations

import math

import numpy as np

from cfedavg.core.kernel import Int, kernel
from cfedavg.wire import coder as rc
from cfedavg.wire.coder import Coder

STEPS = 16  # symbols of a gap: its number of steps, up to 14; 15 says that more follow after 15 steps
JUMPS = 4  # bits of a share at which the decoder looks first
TRUST = 256  # how many gaps the first table is worth against those seen

# Class 0 sends nothing. The mean of the others divides them: below half of it, below it, below twice it.
CLASSES = 5
BY_ROWS, BY_COLUMNS = 1, 2  # what of a tensor is in classes; the sum for both


@kernel
def step_of(size: Int, n: Int) -> Int:
    """Return `step`: gaps are counted in steps of 2^step cells, a quarter to a half of the mean gap."""
    step = 0
    while (size // n) >> (step + 2):
        step += 1
    return step


@kernel
def expect_counts(counts: np.ndarray, size: Int, n: Int, step: Int) -> None:
    """Set the counts of TRUST gaps between n random cells: each step ends a gap with the same chance."""
    while size >> 31:  # keeps the products below 2^63
        size = size >> 1
        n = min((n + 1) >> 1, size)
    empty = ((size - n) << 30) // size
    for _ in range(step):
        empty = (empty * empty) >> 30
    left = TRUST * rc.SEEN << 30
    for s in range(STEPS - 1):
        further = (left >> 30) * empty
        counts[s] = max((left - further) >> 30, 1)
        left = further
    counts[STEPS - 1] = max(left >> 30, 1)


@kernel
def put_gaps(words: np.ndarray, coder: Coder, cells: np.ndarray, size: Int) -> Coder:
    """Encode cells, which are increasing and below `size`; the decoder knows their number."""
    n = len(cells)
    if n == 0 or n == size:
        return coder
    step = step_of(size, n)
    counts, sums = np.empty(STEPS, np.int64), np.empty(STEPS + 1, np.int64)
    expect_counts(counts, size, n, step)
    rc.make_sums(counts, sums)
    following, due = 0, rc.FIRST
    for i in range(n):
        gap = cells[i] - following
        following = cells[i] + 1
        steps = gap >> step
        while steps >= STEPS - 1:
            coder = rc.put_symbol(words, coder, sums, STEPS - 1)
            counts[STEPS - 1] += rc.SEEN
            steps -= STEPS - 1
        coder = rc.put_symbol(words, coder, sums, steps)
        counts[steps] += rc.SEEN
        coder = rc.put_number(words, coder, gap & ((1 << step) - 1), step)
        if i + 1 == due:
            due = rc.rebuild(counts, sums, due)
    return coder


@kernel
def take_gaps(words: np.ndarray, coder: Coder, cells: np.ndarray, size: Int) -> tuple[bool, Coder]:
    """Fill `cells` with what put_gaps has encoded; return whether all of them lie below `size`."""
    n = len(cells)
    if n == 0 or n == size:
        for i in range(n):
            cells[i] = i
        return True, coder
    step = step_of(size, n)
    counts, sums = np.empty(STEPS, np.int64), np.empty(STEPS + 1, np.int64)
    jump = np.empty(1 << JUMPS, np.uint8)
    expect_counts(counts, size, n, step)
    rc.make_sums(counts, sums)
    rc.make_jumps(sums, jump, JUMPS)
    following, due = 0, rc.FIRST
    for i in range(n):
        symbol, coder = rc.take_symbol(words, coder, sums, jump, JUMPS)
        counts[symbol] += rc.SEEN
        while symbol == STEPS - 1:
            following += (STEPS - 1) << step
            if following >= size:
                return False, coder
            symbol, coder = rc.take_symbol(words, coder, sums, jump, JUMPS)
            counts[symbol] += rc.SEEN
        rest, coder = rc.take_number(words, coder, step)
        cells[i] = following + (symbol << step) + rest
        following = cells[i] + 1
        if following > size:
            return False, coder
        if i + 1 == due:
            due = rc.rebuild(counts, sums, due)
            rc.make_jumps(sums, jump, JUMPS)
    return True, coder


@kernel
def classify(counts: np.ndarray, n: Int) -> np.ndarray:
    """Return the class of each row or column; their counts add up to n."""
    classes = np.empty(len(counts), np.int64)
    used = 0
    for count in counts:
        used += count > 0
    for i in range(len(counts)):
        share = counts[i] * used  # is to n as the count is to the mean
        classes[i] = 0 if share == 0 else 1 + (2 * share >= n) + (share >= n) + (share >= 2 * n)
    return classes


@kernel
def sizes_of(classes: np.ndarray) -> np.ndarray:
    """Return how many members each class has."""
    sizes = np.zeros(CLASSES, np.int64)
    for kind in classes:
        sizes[kind] += 1
    return sizes


@kernel
def starts_of(sizes: np.ndarray) -> np.ndarray:
    """Return where each class begins if one follows the other."""
    starts, total = np.empty(len(sizes), np.int64), 0
    for i in range(len(sizes)):
        starts[i] = total
        total += sizes[i]
    return starts


@kernel
def order_of(classes: np.ndarray) -> np.ndarray:
    """Return the rows or columns, one class after the other."""
    place, order = starts_of(sizes_of(classes)), np.empty(len(classes), np.int64)
    for i in range(len(classes)):
        order[place[classes[i]]] = i
        place[classes[i]] += 1
    return order


@kernel
def ranks_of(classes: np.ndarray) -> np.ndarray:
    """Return, for each row or column, how many of its class come before it."""
    seen, ranks = np.zeros(CLASSES, np.int64), np.empty(len(classes), np.int64)
    for i in range(len(classes)):
        ranks[i] = seen[classes[i]]
        seen[classes[i]] += 1
    return ranks


@kernel
def cost_of_set(size: Int, n: Int) -> float:
    """Return about the bits of n cells out of `size`."""
    if n <= 0 or n >= size:
        return 0.0
    rest = size - n
    bits: float = n * math.log2(size / n) + rest * math.log2(size / rest)
    return bits


@kernel
def cost_of_classes(sizes: np.ndarray) -> float:
    """Return about the bits of a sequence with so many members of each class."""
    total, bits = sizes.sum(), 16.0
    for size in sizes:
        if size:
            bits += size * math.log2(total / size)
    return bits


@kernel
def choose_mode(rows: np.ndarray, columns: np.ndarray, table: np.ndarray, group: Int) -> Int:
    """Return whether the classes of rows, of columns or of both are worth their bits.

    `rows` and `columns` are the sizes of the classes, `table` how many coordinates each block sends.
    """
    all_rows, all_columns, n = rows.sum(), columns.sum(), table.sum()
    by_rows, by_columns = cost_of_classes(rows), cost_of_classes(columns)
    both = by_rows + by_columns
    for x in range(1, CLASSES):
        in_rows, in_columns = 0, 0
        for y in range(1, CLASSES):
            both += 8 + cost_of_set(rows[x] * columns[y] * group, table[x * CLASSES + y])
            in_rows += table[x * CLASSES + y]
            in_columns += table[y * CLASSES + x]
        by_rows += 8 + cost_of_set(rows[x] * all_columns * group, in_rows)
        by_columns += 8 + cost_of_set(all_rows * columns[x] * group, in_columns)
    best = min(cost_of_set(all_rows * all_columns * group, n), by_rows, by_columns, both)
    if best == both:
        return BY_ROWS | BY_COLUMNS
    return BY_ROWS if best == by_rows else BY_COLUMNS if best == by_columns else 0


@kernel
def put_classes(words: np.ndarray, coder: Coder, classes: np.ndarray) -> Coder:
    """Encode each class as bits (is it 0? 1? 2? 3?), in the context of the class before it."""
    contexts = rc.new_contexts(CLASSES * (CLASSES - 1))
    before = 0
    for kind in classes:
        for i in range(min(kind + 1, CLASSES - 1)):
            coder = rc.put_bit(words, coder, contexts, before * (CLASSES - 1) + i, 1 if i == kind else 0)
        before = kind
    return coder


@kernel
def take_classes(words: np.ndarray, coder: Coder, n: Int) -> tuple[np.ndarray, Coder]:
    """Decode what put_classes has encoded."""
    classes = np.empty(n, np.int64)
    contexts = rc.new_contexts(CLASSES * (CLASSES - 1))
    before = 0
    for i in range(n):
        kind, bit = -1, 0
        while not bit and kind < CLASSES - 2:
            kind += 1
            bit, coder = rc.take_bit(words, coder, contexts, before * (CLASSES - 1) + kind)
        before = kind if bit else CLASSES - 1
        classes[i] = before
    return classes, coder
