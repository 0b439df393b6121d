"""The coder for the set of sent coordinates: it groups rows and columns of each tensor by density.

An update of a neural network is close to an outer product: some units (rows of a weight matrix) and some
inputs (columns) have many large entries, others none. So the coder sees each tensor as a matrix of rows x
columns. Every cell of the matrix is a run of `group` coordinates. The coder sorts the rows, the columns or
both into classes of density: by the number of their coordinates that are sent. The message first lists the
classes. A block is the set of cells in one class of rows and one class of columns. Each block is written as
a count and that many gaps. If the classes cost more bits than they save, the tensor or the whole vector is
one block. docs/wire.md specifies the format.
"""

from __future__ import annotations

import numpy as np

from cfedavg.core.arrays import Int, kernel
from cfedavg.wire import coder as rc
from cfedavg.wire import sets
from cfedavg.wire.coder import Coder
from cfedavg.wire.sets import BY_COLUMNS, BY_ROWS, CLASSES

FINE, BEYOND, OTHER_NUMBER = range(3)  # a decoder's result: no fault, an index too large, a wrong count
# A power of two times this number has top six bits that no other power of two gives. BIT_AT maps these six
# bits to the exponent.
DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
BIT_AT = np.zeros(64, np.int64)
for _bit in range(64):
    BIT_AT[(int(DE_BRUIJN) << _bit & (2**64 - 1)) >> 58] = _bit


@kernel
def are_increasing(indices: np.ndarray, d: int) -> bool:
    """Return whether `indices` increase strictly and lie from 0 to d - 1, as `encode_indices` needs."""
    before = -1
    for i in range(len(indices)):
        if indices[i] <= before:
            return False
        before = indices[i]
    return bool(before < d)


@kernel
def encode_indices(words: np.ndarray, indices: np.ndarray, d: Int, shapes: np.ndarray) -> Int:
    """Encode strictly increasing indices below d into `words`; return the number of words.

    `shapes` holds rows, columns and coordinates per cell of each tensor.
    """
    coder = rc.put_number(words, rc.start_encoding(), 1, 1)
    tensor_counts, block_counts = rc.new_contexts(rc.COUNT_CONTEXTS), rc.new_contexts(rc.COUNT_CONTEXTS)
    start, a = np.int64(0), 0
    for t in range(len(shapes)):
        shape = shapes[t]
        size = shape[0] * shape[1] * shape[2]
        b = a
        while b < len(indices) and indices[b] < start + size:
            b += 1
        coder = rc.put_count(words, coder, tensor_counts, b - a)
        if b > a:
            coder = put_tensor(words, coder, block_counts, indices[a:b], start, shape)
        start, a = start + size, b
    if rc.bits_so_far(coder) < sets.cost_of_set(d, len(indices)):
        return rc.finish(words, coder)
    coder = rc.put_number(words, rc.start_encoding(), 0, 1)
    return rc.finish(words, sets.put_gaps(words, coder, indices, d))


@kernel
def put_tensor(
    words: np.ndarray, coder: Coder, contexts: np.ndarray, indices: np.ndarray, start: Int, shape: np.ndarray
) -> Coder:
    """Encode the sent coordinates of one tensor, whose first coordinate is `start`; return the coder."""
    rows, columns, group = shape[0], shape[1], shape[2]
    cells, row, column = locate(indices, start, columns, group)
    if rows * columns == 1:
        return sets.put_gaps(words, coder, cells, group)
    row_class, column_class = classes_of(row, rows), classes_of(column, columns)
    table = count_blocks(row, column, row_class, column_class)
    mode = sets.choose_mode(sets.sizes_of(row_class), sets.sizes_of(column_class), table, group)
    coder = rc.put_number(words, coder, mode, 2)
    if mode == 0:
        return sets.put_gaps(words, coder, cells, rows * columns * group)
    if mode & BY_ROWS:
        coder = sets.put_classes(words, coder, row_class)
    else:
        row_class = np.ones(rows, np.int64)
    if mode & BY_COLUMNS:
        coder = sets.put_classes(words, coder, column_class)
    else:
        column_class = np.ones(columns, np.int64)
    return put_blocks(words, coder, contexts, cells, row, column, row_class, column_class, group)


@kernel
def locate(
    indices: np.ndarray, start: Int, columns: Int, group: Int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the offset, the row and the column of each index in the tensor that begins at `start`."""
    n = len(indices)
    cells, row, column = np.empty(n, np.int64), np.empty(n, np.int32), np.empty(n, np.int32)
    current, row_start, width = 0, 0, columns * group
    for i in range(n):
        cells[i] = indices[i] - start
        while cells[i] >= row_start + width:  # faster than a division
            current, row_start = current + 1, row_start + width
        row[i] = current
        column[i] = (cells[i] - row_start) // group if group > 1 else cells[i] - row_start
    return cells, row, column


@kernel
def classes_of(where: np.ndarray, n: Int) -> np.ndarray:
    """Return the classes of density of n rows or columns; `where` is the row or column of each coordinate."""
    counts = np.zeros(n, np.int64)
    for i in range(len(where)):
        counts[where[i]] += 1
    return sets.classify(counts, len(where))


@kernel
def count_blocks(
    row: np.ndarray, column: np.ndarray, row_class: np.ndarray, column_class: np.ndarray
) -> np.ndarray:
    """Return how many sent coordinates each block has: the cells of a row class and a column class."""
    table = np.zeros(CLASSES * CLASSES, np.int64)
    for i in range(len(row)):
        table[row_class[row[i]] * CLASSES + column_class[column[i]]] += 1
    return table


@kernel
def put_blocks(
    words: np.ndarray,
    coder: Coder,
    contexts: np.ndarray,
    cells: np.ndarray,
    row: np.ndarray,
    column: np.ndarray,
    row_class: np.ndarray,
    column_class: np.ndarray,
    group: Int,
) -> Coder:
    """Encode each block: the number of its sent coordinates, then their places in the block."""
    table = count_blocks(row, column, row_class, column_class)
    row_rank, column_rank = sets.ranks_of(row_class), sets.ranks_of(column_class)
    row_sizes, column_sizes = sets.sizes_of(row_class), sets.sizes_of(column_class)
    place, columns = sets.starts_of(table), len(column_class)
    sorted_cells = np.empty(len(cells), np.int64)
    for i in range(len(cells)):
        y = column_class[column[i]]
        block = row_class[row[i]] * CLASSES + y
        inner = cells[i] - (row[i] * columns + column[i]) * group
        cell = row_rank[row[i]] * column_sizes[y] + column_rank[column[i]]
        sorted_cells[place[block]] = cell * group + inner
        place[block] += 1
    for x in range(1, CLASSES):
        for y in range(1, CLASSES):
            size = row_sizes[x] * column_sizes[y] * group
            if size:
                n, end = table[x * CLASSES + y], place[x * CLASSES + y]
                coder = rc.put_count(words, coder, contexts, n)
                coder = sets.put_gaps(words, coder, sorted_cells[end - n : end], size)
    return coder


@kernel
def decode_indices(words: np.ndarray, indices: np.ndarray, d: Int, shapes: np.ndarray) -> tuple[Int, Int]:
    """Decode a message's indices into `indices`; return FINE, BEYOND or OTHER_NUMBER, and the words read."""
    by_tensor, coder = rc.take_number(words, rc.start_decoding(words), 1)
    if not by_tensor:
        inside, coder = sets.take_gaps(words, coder, indices, d)
        return FINE if inside else BEYOND, coder[0]
    tensor_counts, block_counts = rc.new_contexts(rc.COUNT_CONTEXTS), rc.new_contexts(rc.COUNT_CONTEXTS)
    start, a = np.int64(0), 0
    for t in range(len(shapes)):
        shape = shapes[t]
        size = shape[0] * shape[1] * shape[2]
        n, coder = rc.take_count(words, coder, tensor_counts)
        if n > min(size, len(indices) - a):
            return OTHER_NUMBER, coder[0]
        if n:
            found, coder = take_tensor(words, coder, block_counts, indices[a : a + n], shape)
            if found != FINE:
                return found, coder[0]
            for i in range(a, a + n):
                indices[i] += start
        start, a = start + size, a + n
    return FINE if a == len(indices) else OTHER_NUMBER, coder[0]


@kernel
def take_tensor(
    words: np.ndarray, coder: Coder, contexts: np.ndarray, cells: np.ndarray, shape: np.ndarray
) -> tuple[Int, Coder]:
    """Decode one tensor's coordinates into `cells`, as offsets in the tensor; return result and coder."""
    rows, columns, group = shape[0], shape[1], shape[2]
    mode = 0
    if rows * columns > 1:
        mode, coder = rc.take_number(words, coder, 2)
    if mode == 0:
        inside, coder = sets.take_gaps(words, coder, cells, rows * columns * group)
        return FINE if inside else BEYOND, coder
    row_class, column_class = np.ones(rows, np.int64), np.ones(columns, np.int64)
    if mode & BY_ROWS:
        row_class, coder = sets.take_classes(words, coder, rows)
    if mode & BY_COLUMNS:
        column_class, coder = sets.take_classes(words, coder, columns)
    return take_blocks(words, coder, contexts, cells, row_class, column_class, group)


@kernel
def take_blocks(
    words: np.ndarray,
    coder: Coder,
    contexts: np.ndarray,
    cells: np.ndarray,
    row_class: np.ndarray,
    column_class: np.ndarray,
    group: Int,
) -> tuple[Int, Coder]:
    """Decode the blocks of one tensor into `cells`, as increasing offsets; return result and coder."""
    row_sizes, column_sizes = sets.sizes_of(row_class), sets.sizes_of(column_class)
    row_order, column_order = sets.order_of(row_class), sets.order_of(column_class)
    row_start, column_start = sets.starts_of(row_sizes), sets.starts_of(column_sizes)
    columns = len(column_class)
    sent = np.zeros((len(row_class) * columns * group + 63) // 64, np.uint64)
    a = 0
    for x in range(1, CLASSES):
        for y in range(1, CLASSES):
            size = row_sizes[x] * column_sizes[y] * group
            if size == 0:
                continue
            n, coder = rc.take_count(words, coder, contexts)
            if n > min(size, len(cells) - a):
                return OTHER_NUMBER, coder
            block = cells[a : a + n]
            inside, coder = sets.take_gaps(words, coder, block, size)
            if not inside:
                return BEYOND, coder
            row, row_first, width = row_start[x], 0, column_sizes[y] * group
            for i in range(n):
                while block[i] >= row_first + width:
                    row, row_first = row + 1, row_first + width
                inner = block[i] - row_first
                column = inner // group if group > 1 else inner
                inner -= column * group
                column = column_order[column_start[y] + column]
                cell = (row_order[row] * columns + column) * group + inner
                sent[cell >> 6] |= np.uint64(1) << np.uint64(cell & 63)
            a += n
    if a < len(cells):
        return OTHER_NUMBER, coder
    list_marked(sent, cells)
    return FINE, coder


@kernel
def list_marked(bits: np.ndarray, found: np.ndarray) -> None:
    """Fill `found` with the positions of the 1 bits in `bits`, in increasing order."""
    n = 0
    for i in range(len(bits)):
        word = bits[i]
        while word:
            lowest = word & (~word + np.uint64(1))
            found[n] = (i << 6) + BIT_AT[(lowest * DE_BRUIJN) >> np.uint64(58)]
            n += 1
            word ^= lowest
