"""The coder of coordinates that may lie anywhere. docs/wire.md specifies the format.

An update of a neural network is close to an outer product: some units (rows of a weight matrix) and some
inputs (columns) have many large entries, others none. So the coder sees each tensor as a matrix, sorts its
rows, its columns or both into density bands (see `sets`), and first writes their bands. A block is the part
of the tensor where the rows of one band and the columns of one band meet. Each block is written as the number
of its sent coordinates and their gaps. If bands cost more bits than they save, the whole tensor is one block.
"""

from __future__ import annotations

import math

from cfedavg.core.kernels import WORD64, Int, helper, int64, integers, kernel, table, uint64, zero_words
from cfedavg.wire import coder as rc
from cfedavg.wire import sets
from cfedavg.wire.coder import Array, Coder
from cfedavg.wire.sets import BANDS, BY_COLUMNS, BY_ROWS, FINE, OTHER_NUMBER

# Multiply a power of two by this number, modulo 2^64: the top six bits of the product are different for each
# of the 64 powers. BIT_AT maps these six bits to the exponent.
ONE, SIX_BITS = uint64(1), uint64(58)
DE_BRUIJN = uint64(0x03F79D71B4CB0A89)
BIT_AT = table(sorted(range(64), key=lambda bit: (int(DE_BRUIJN) << bit & (2**64 - 1)) >> 58))


@kernel
def are_increasing(indices: Array, d: int) -> bool:
    """Return whether `indices` increase strictly and lie from 0 to d - 1, as `encode_indices` needs."""
    before = -1
    for i in range(len(indices)):
        if indices[i] <= before:
            return False
        before = indices[i]
    return bool(before < d)


@kernel
def encode_indices(words: Array, indices: Array, d: Int, shapes: Array) -> Int:
    """Encode strictly increasing indices below d into `words`; return the number of words.

    `shapes` holds the rows, columns and depth of each tensor (see Matrices).
    """
    coder = rc.put_number(words, rc.START, 1, 1)
    of_tensors, of_blocks = integers(rc.COUNT_CONTEXTS, rc.EVEN), integers(rc.COUNT_CONTEXTS, rc.EVEN)
    start, a = int64(0), 0
    for shape in shapes:
        end, b = start + shape[0] * shape[1] * shape[2], a
        while b < len(indices) and indices[b] < end:
            b += 1
        coder = rc.put_count(words, coder, of_tensors, b - a)
        if b > a:
            coder = put_tensor(words, coder, of_blocks, indices[a:b], start, shape)
        start, a = end, b
    bits = 32.0 * coder[0] + 64.0 - math.log2(coder[2])  # encoded so far, approximately
    if bits < sets.cost_of_set(d, len(indices)):
        return rc.finish(words, coder)
    coder = rc.put_number(words, rc.START, 0, 1)
    return rc.finish(words, sets.put_gaps(words, coder, indices, 0, d))


@helper
def put_tensor(
    words: Array, coder: Coder, contexts: Array, indices: Array, start: Int, shape: Array
) -> Coder:
    """Encode `indices`, the sent coordinates of one tensor. The first coordinate of the tensor is `start`."""
    rows, columns, depth = shape[0], shape[1], shape[2]
    if rows * columns == 1:
        return sets.put_gaps(words, coder, indices, start, depth)
    row, column, inner = locate(indices, start, columns, depth)
    row_bands, row_sizes = sets.assign_bands(row, rows)
    column_bands, column_sizes = sets.assign_bands(column, columns)
    sent = count_sent(row, column, row_bands, column_bands)
    mode = sets.choose_mode(row_sizes, column_sizes, sent, depth)
    coder = rc.put_number(words, coder, mode, 2)
    if mode == 0:
        return sets.put_gaps(words, coder, indices, start, rows * columns * depth)
    if mode & BY_ROWS:
        coder = sets.put_bands(words, coder, row_bands)
    else:
        row_bands = integers(rows, 1)
    if mode & BY_COLUMNS:
        coder = sets.put_bands(words, coder, column_bands)
    else:
        column_bands = integers(columns, 1)
    return put_blocks(words, coder, contexts, row, column, inner, row_bands, column_bands, depth)


@helper
def locate(indices: Array, start: Int, columns: Int, depth: Int) -> tuple[Array, Array, Array]:
    """Return the row, column and depth of each index. The tensor (rows, columns, depth) begins at `start`."""
    n = len(indices)
    row, column, inner = integers(n, 0), integers(n, 0), integers(n, 0)
    current, row_start, width = 0, start, columns * depth
    for i in range(n):
        while indices[i] >= row_start + width:  # faster than a division
            current, row_start = current + 1, row_start + width
        row[i] = current
        offset = indices[i] - row_start
        at = offset // depth if depth > 1 else offset
        column[i], inner[i] = at, offset - at * depth
    return row, column, inner


@helper
def count_sent(row: Array, column: Array, row_bands: Array, column_bands: Array) -> Array:
    """Return the number of sent coordinates in each block.

    Sent coordinate i lies in row[i] and column[i]. Block x * BANDS + y is where row band x and column band y
    meet.
    """
    sent: Array = integers(BANDS * BANDS, 0)
    for i in range(len(row)):
        sent[row_bands[row[i]] * BANDS + column_bands[column[i]]] += 1
    return sent


@helper
def put_blocks(
    words: Array, coder: Coder, contexts: Array,
    row: Array, column: Array, inner: Array, row_bands: Array, column_bands: Array, depth: Int,
) -> Coder:  # fmt: skip
    """Encode each block: the number of its sent coordinates, then their positions in the block."""
    sent = count_sent(row, column, row_bands, column_bands)
    _, row_sizes, _, row_ranks = sets.sort_lines(row_bands)
    _, column_sizes, _, column_ranks = sets.sort_lines(column_bands)
    ends, positions = sets.find_starts(sent), integers(len(row), 0)
    for i in range(len(row)):
        y = column_bands[column[i]]
        block = row_bands[row[i]] * BANDS + y
        cell = row_ranks[row[i]] * column_sizes[y] + column_ranks[column[i]]
        positions[ends[block]] = cell * depth + inner[i]
        ends[block] += 1
    for x in range(1, BANDS):
        for y in range(1, BANDS):
            size = row_sizes[x] * column_sizes[y] * depth
            if size:
                n, end = sent[x * BANDS + y], ends[x * BANDS + y]
                coder = rc.put_count(words, coder, contexts, n)
                coder = sets.put_gaps(words, coder, positions[end - n : end], 0, size)
    return coder


@kernel
def decode_indices(words: Array, indices: Array, d: Int, shapes: Array) -> tuple[Int, Int]:
    """Fill `indices` with what `encode_indices` encoded.

    Return FINE or a fault (BEYOND or OTHER_NUMBER), and the number of words read.
    """
    by_tensor, coder = rc.take_number(words, rc.start_decoding(words), 1)
    if not by_tensor:
        fault, coder = sets.take_gaps(words, coder, indices, d)
        return fault, coder[0]
    of_tensors, of_blocks = integers(rc.COUNT_CONTEXTS, rc.EVEN), integers(rc.COUNT_CONTEXTS, rc.EVEN)
    start, a = int64(0), 0
    for shape in shapes:
        size = shape[0] * shape[1] * shape[2]
        n, coder = rc.take_count(words, coder, of_tensors)
        if n > min(size, len(indices) - a):
            return OTHER_NUMBER, coder[0]
        if n:
            fault, coder = take_tensor(words, coder, of_blocks, indices[a : a + n], shape)
            if fault:
                return fault, coder[0]
            for i in range(a, a + n):
                indices[i] += start
        start, a = start + size, a + n
    return FINE if a == len(indices) else OTHER_NUMBER, coder[0]


@helper
def take_tensor(
    words: Array, coder: Coder, contexts: Array, positions: Array, shape: Array
) -> tuple[Int, Coder]:
    """Fill `positions` with the sent coordinates of one tensor, counted from the tensor's start.

    Return FINE or a fault (BEYOND or OTHER_NUMBER), and the next `coder`.
    """
    rows, columns, depth = shape[0], shape[1], shape[2]
    mode = 0
    if rows * columns > 1:
        mode, coder = rc.take_number(words, coder, 2)
    if mode == 0:
        return sets.take_gaps(words, coder, positions, rows * columns * depth)
    row_bands, column_bands = integers(rows, 1), integers(columns, 1)
    if mode & BY_ROWS:
        row_bands, coder = sets.take_bands(words, coder, rows)
    if mode & BY_COLUMNS:
        column_bands, coder = sets.take_bands(words, coder, columns)
    return take_blocks(words, coder, contexts, positions, row_bands, column_bands, depth)


@helper
def take_blocks(
    words: Array, coder: Coder, contexts: Array, positions: Array,
    row_bands: Array, column_bands: Array, depth: Int,
) -> tuple[Int, Coder]:  # fmt: skip
    """Decode all blocks of one tensor; fill `positions` with the sent coordinates in increasing order.

    Return FINE or a fault (BEYOND or OTHER_NUMBER), and the next `coder`.
    """
    row_order, row_sizes, row_starts, _ = sets.sort_lines(row_bands)
    column_order, column_sizes, column_starts, _ = sets.sort_lines(column_bands)
    columns = len(column_bands)
    sent = zero_words((len(row_bands) * columns * depth + 63) // 64)  # a bit for each coordinate
    a = 0
    for x in range(1, BANDS):
        for y in range(1, BANDS):
            size = row_sizes[x] * column_sizes[y] * depth
            if size == 0:
                continue
            n, coder = rc.take_count(words, coder, contexts)
            if n > min(size, len(positions) - a):
                return OTHER_NUMBER, coder
            block = positions[a : a + n]
            fault, coder = sets.take_gaps(words, coder, block, size)
            if fault:
                return fault, coder
            row, row_first, width = row_starts[x], 0, column_sizes[y] * depth
            for i in range(n):
                while block[i] >= row_first + width:
                    row, row_first = row + 1, row_first + width
                inner = block[i] - row_first
                column = inner // depth if depth > 1 else inner
                inner -= column * depth
                column = column_order[column_starts[y] + column]
                position = (row_order[row] * columns + column) * depth + inner
                sent[position >> 6] |= ONE << uint64(position & 63)
            a += n
    if a < len(positions):
        return OTHER_NUMBER, coder
    list_ones(sent, positions)
    return FINE, coder


@helper
def list_ones(bits: Array, found: Array) -> None:
    """Fill `found` with the positions of the 1 bits in `bits`, in increasing order."""
    n = 0
    for i in range(len(bits)):
        word = bits[i]
        while word:
            lowest = word & (~word + ONE)
            found[n] = (i << 6) + BIT_AT[((lowest * DE_BRUIJN) & WORD64) >> SIX_BITS]
            n += 1
            word ^= lowest
