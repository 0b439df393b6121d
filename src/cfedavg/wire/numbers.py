"""The values that travel, as bits: a sign and a magnitude of up to 15 bits each.

In a layer that follows a ReLU the sign of an update is mostly that of its unit, so a sign is coded in the
context of the row of its coordinate. The magnitudes kept by top-k crowd just above the smallest one, so
what is coded is by how much they exceed it: the leading bits as a symbol of a table, which learns how they
are distributed, the others as they are.
"""

from __future__ import annotations

import numpy as np

from cfedavg.core.kernel import Int, kernel
from cfedavg.wire.coder import (
    finish,
    new_contexts,
    put_bit,
    put_number,
    start_decoding,
    start_encoding,
    take_bit,
    take_number,
)
from cfedavg.wire.table import FIRST, count, make, make_jumps, put_symbol, renew, take_symbol

MAGNITUDE = 15  # bits of a magnitude; the sign is the bit above them
MASK = (1 << MAGNITUDE) - 1
LEADING = 8  # bits of a symbol, at most
JUMPS = 7  # bits of a share at which the decoder looks first
FINE, TOO_LARGE = range(2)  # what a decoder finds


@kernel
def bit_length(number: Int) -> Int:
    length = 0
    while number >> length:
        length += 1
    return length


@kernel
def row_at(ends: np.ndarray, row: Int, index: Int) -> Int:
    """The row of a coordinate, which is `row` or a later one; row i ends before coordinate ends[i]."""
    while index >= ends[row]:
        row += 1
    return row


@kernel
def new_table(symbols: Int) -> tuple[np.ndarray, np.ndarray]:
    """The counts and the sums of a table that knows nothing."""
    counts, sums = np.ones(symbols, np.int64), np.empty(symbols + 1, np.int64)
    make(counts, sums)
    return counts, sums


@kernel
def encode_numbers(
    words: np.ndarray,
    numbers: np.ndarray,
    indices: np.ndarray,
    ends: np.ndarray,
    zero_has_sign: bool,
    largest: Int,
) -> Int:
    """How many words the numbers take, which are magnitudes with the sign above them; 0 if one is too large.

    `indices` are their coordinates, empty where all are sent. A zero has no sign, unless it is a float
    or there is nothing else.
    """
    lowest, highest = MASK, 0
    for i in range(len(numbers)):
        lowest, highest = min(lowest, numbers[i] & MASK), max(highest, numbers[i] & MASK)
    if highest > largest:
        return 0
    coder = put_number(words, start_encoding(), lowest, MAGNITUDE)
    coder = put_number(words, coder, highest - lowest, MAGNITUDE)
    copied = max(bit_length(highest - lowest) - LEADING, 0)
    counts, sums = new_table(((highest - lowest) >> copied) + 1)
    signs = new_contexts(len(ends))
    zero_has_sign |= highest == 0
    row, due = 0, FIRST
    for i in range(len(numbers)):
        magnitude: Int = np.int64(numbers[i] & MASK)
        symbol = (magnitude - lowest) >> copied
        coder = put_symbol(words, coder, sums, symbol)
        count(counts, symbol)
        coder = put_number(words, coder, (magnitude - lowest) & ((1 << copied) - 1), copied)
        row = row_at(ends, row, indices[i] if len(indices) else i)
        if magnitude or zero_has_sign:
            coder = put_bit(words, coder, signs, row, np.int64(numbers[i] >> MAGNITUDE))
        if i + 1 == due:
            due = renew(counts, sums, due)
    return finish(words, coder)


@kernel
def decode_numbers(
    words: np.ndarray,
    numbers: np.ndarray,
    indices: np.ndarray,
    ends: np.ndarray,
    zero_has_sign: bool,
    largest: Int,
) -> tuple[Int, Int]:
    """Fills `numbers`, none above `largest`, with what was encoded; what was found, and the words read."""
    lowest, coder = take_number(words, start_decoding(words), MAGNITUDE)
    spread, coder = take_number(words, coder, MAGNITUDE)
    if lowest + spread > largest:
        return TOO_LARGE, coder[0]
    copied = max(bit_length(spread) - LEADING, 0)
    counts, sums = new_table((spread >> copied) + 1)
    jump = np.empty(1 << JUMPS, np.uint8)
    make_jumps(sums, jump, JUMPS)
    signs = new_contexts(len(ends))
    zero_has_sign |= lowest + spread == 0
    row, due = 0, FIRST
    for i in range(len(numbers)):
        symbol, coder = take_symbol(words, coder, sums, jump, JUMPS)
        count(counts, symbol)
        rest, coder = take_number(words, coder, copied)
        magnitude = lowest + (symbol << copied) + rest
        if magnitude > largest:
            return TOO_LARGE, coder[0]
        row = row_at(ends, row, indices[i] if len(indices) else i)
        if magnitude or zero_has_sign:
            bit, coder = take_bit(words, coder, signs, row)
            magnitude |= bit << MAGNITUDE
        numbers[i] = magnitude
        if i + 1 == due:
            due = renew(counts, sums, due)
            make_jumps(sums, jump, JUMPS)
    return FINE, coder[0]
