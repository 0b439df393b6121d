"""Two parts of the coder for sets of cells: gaps between cells, and classes of density of rows and columns.

Gaps take at most about the entropy of a uniform set. Classes of density group the rows or columns of a tensor
by the number of their coordinates that are sent, so that each group is evenly dense.
"""

from __future__ import annotations

import math

import numpy as np

from cfedavg.core.arrays import Int, kernel
from cfedavg.wire import coder as rc
from cfedavg.wire.coder import Coder

STEPS = 16  # symbols: 0 to 14 end a gap after so many steps; 15 is 15 steps, and the gap goes on
JUMPS = 4  # the decoder's table `jump` has 2^JUMPS entries
TRUST = 256  # the weight of the first table, as a number of gaps

# Rows or columns of class 0 send nothing. Let m be the mean number of coordinates that the others send.
# Class 1 sends below m / 2, class 2 below m, class 3 below 2 m, class 4 at least 2 m.
CLASSES = 5
BY_ROWS, BY_COLUMNS = 1, 2  # modes: rows or columns have classes; 3 for both, 0 for none


@kernel
def step_of(size: Int, n: Int) -> Int:
    """Return `step`: gaps between n of `size` cells are counted in steps of 2^step cells.

    A step is a quarter to a half of the mean gap, and at least one cell.
    """
    step = 0
    while (size // n) >> (step + 2):
        step += 1
    return step


@kernel
def expect_counts(counts: np.ndarray, size: Int, n: Int, step: Int) -> None:
    """Set `counts` to the symbol counts expected of TRUST gaps between n random cells out of `size`."""
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
    """Encode increasing cells below `size`, as gaps. The decoder must know the number of cells."""
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
    """Decode gaps into `cells`; return whether all cells are below `size`, and the coder."""
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
    """Return the class of density of each row or column.

    `counts` holds the number of sent coordinates of each; n is the sum of `counts`.
    """
    classes = np.empty(len(counts), np.int64)
    used = 0
    for count in counts:
        used += count > 0
    for i in range(len(counts)):
        share = counts[i] * used  # share / n is the count divided by the mean of the counts above 0
        classes[i] = 0 if share == 0 else 1 + (2 * share >= n) + (share >= n) + (share >= 2 * n)
    return classes


@kernel
def sizes_of(classes: np.ndarray) -> np.ndarray:
    """Return the number of rows or columns in each class of density."""
    sizes = np.zeros(CLASSES, np.int64)
    for kind in classes:
        sizes[kind] += 1
    return sizes


@kernel
def starts_of(sizes: np.ndarray) -> np.ndarray:
    """Return where each class begins in a list sorted by class, given the sizes of the classes."""
    starts, total = np.empty(len(sizes), np.int64), 0
    for i in range(len(sizes)):
        starts[i] = total
        total += sizes[i]
    return starts


@kernel
def order_of(classes: np.ndarray) -> np.ndarray:
    """Return the numbers of the rows or columns, sorted by class of density."""
    place, order = starts_of(sizes_of(classes)), np.empty(len(classes), np.int64)
    for i in range(len(classes)):
        order[place[classes[i]]] = i
        place[classes[i]] += 1
    return order


@kernel
def ranks_of(classes: np.ndarray) -> np.ndarray:
    """Return, for each row or column, the number of earlier ones in the same class of density."""
    seen, ranks = np.zeros(CLASSES, np.int64), np.empty(len(classes), np.int64)
    for i in range(len(classes)):
        ranks[i] = seen[classes[i]]
        seen[classes[i]] += 1
    return ranks


@kernel
def cost_of_set(size: Int, n: Int) -> float:
    """Return the approximate number of bits that a set of n out of `size` cells takes."""
    if n <= 0 or n >= size:
        return 0.0
    rest = size - n
    bits: float = n * math.log2(size / n) + rest * math.log2(size / rest)
    return bits


@kernel
def cost_of_classes(sizes: np.ndarray) -> float:
    """Return the approximate number of bits that the list of classes takes; `sizes` are the class sizes."""
    total, bits = sizes.sum(), 16.0
    for size in sizes:
        if size:
            bits += size * math.log2(total / size)
    return bits


@kernel
def choose_mode(rows: np.ndarray, columns: np.ndarray, table: np.ndarray, group: Int) -> Int:
    """Return the mode that takes the fewest bits: BY_ROWS, BY_COLUMNS, their sum, or 0 for no classes.

    `rows` and `columns` are the sizes of the classes; `table` holds the sent coordinates of each block.
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
    """Encode each class as bits (is the class 0? 1? 2? 3?), with contexts chosen by the previous class."""
    contexts = rc.new_contexts(CLASSES * (CLASSES - 1))
    before = 0
    for kind in classes:
        for i in range(min(kind + 1, CLASSES - 1)):
            coder = rc.put_bit(words, coder, contexts, before * (CLASSES - 1) + i, 1 if i == kind else 0)
        before = kind
    return coder


@kernel
def take_classes(words: np.ndarray, coder: Coder, n: Int) -> tuple[np.ndarray, Coder]:
    """Decode n classes that `put_classes` encoded; return the classes and the coder."""
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
