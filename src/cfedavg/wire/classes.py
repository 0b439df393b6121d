"""Rows and columns of a tensor in classes, by how many of their coordinates are sent."""

from __future__ import annotations

import math

import numpy as np

from cfedavg.core.kernel import Int, kernel
from cfedavg.wire.coder import Coder, new_contexts, put_bit, take_bit

# Class 0 sends nothing. The mean of the others divides them: below half of it, below it, below twice it.
CLASSES = 5
BY_ROWS, BY_COLUMNS = 1, 2  # what of a tensor is in classes; the sum for both


@kernel
def classify(counts: np.ndarray, n: Int) -> np.ndarray:
    """The class of each row or column whose counts add up to n."""
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
    """How many there are of each class."""
    sizes = np.zeros(CLASSES, np.int64)
    for kind in classes:
        sizes[kind] += 1
    return sizes


@kernel
def starts_of(sizes: np.ndarray) -> np.ndarray:
    """Where each class begins if one follows the other."""
    starts, total = np.empty(len(sizes), np.int64), 0
    for i in range(len(sizes)):
        starts[i] = total
        total += sizes[i]
    return starts


@kernel
def order_of(classes: np.ndarray) -> np.ndarray:
    """The rows or columns, one class after the other."""
    place, order = starts_of(sizes_of(classes)), np.empty(len(classes), np.int64)
    for i in range(len(classes)):
        order[place[classes[i]]] = i
        place[classes[i]] += 1
    return order


@kernel
def ranks_of(classes: np.ndarray) -> np.ndarray:
    """For each row or column, how many of its class come before it."""
    seen, ranks = np.zeros(CLASSES, np.int64), np.empty(len(classes), np.int64)
    for i in range(len(classes)):
        ranks[i] = seen[classes[i]]
        seen[classes[i]] += 1
    return ranks


@kernel
def cost_of_set(size: Int, n: Int) -> float:
    """About the bits of n cells out of `size`."""
    if n <= 0 or n >= size:
        return 0.0
    rest = size - n
    bits: float = n * math.log2(size / n) + rest * math.log2(size / rest)
    return bits


@kernel
def cost_of_classes(sizes: np.ndarray) -> float:
    """About the bits of a sequence with so many of each class."""
    total, bits = sizes.sum(), 16.0
    for size in sizes:
        if size:
            bits += size * math.log2(total / size)
    return bits


@kernel
def choose(rows: np.ndarray, columns: np.ndarray, table: np.ndarray, group: Int) -> Int:
    """Whether the classes of rows, columns or both are worth their bits.

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
    """Each class as the answers to: is it 0? 1? 2? 3?, in the context of the class before it."""
    contexts = new_contexts(CLASSES * (CLASSES - 1))
    before = 0
    for kind in classes:
        for i in range(min(kind + 1, CLASSES - 1)):
            coder = put_bit(words, coder, contexts, before * (CLASSES - 1) + i, 1 if i == kind else 0)
        before = kind
    return coder


@kernel
def take_classes(words: np.ndarray, coder: Coder, n: Int) -> tuple[np.ndarray, Coder]:
    """Decodes what put_classes has encoded."""
    classes = np.empty(n, np.int64)
    contexts = new_contexts(CLASSES * (CLASSES - 1))
    before = 0
    for i in range(n):
        kind, bit = -1, 0
        while not bit and kind < CLASSES - 2:
            kind += 1
            bit, coder = take_bit(words, coder, contexts, before * (CLASSES - 1) + kind)
        before = kind if bit else CLASSES - 1
        classes[i] = before
    return classes, coder
