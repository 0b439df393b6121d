"""The coder of levels with a scale for each magnitude (kind PER_LEVEL). docs/wire.md specifies the format.

Large values stand beside large ones: the magnitudes of neighbours are alike. So the bits of a magnitude have
the contexts of one of eight states, which follow from a running mean of the magnitudes before.

A gradient is nearly an outer product, in its signs too: the sign of an entry is that of its row times that of
its column. Each row and each column has a vote, and each sign that is coded moves both. Where their product
is large, the sign agrees with it. In a layer that follows a ReLU, all columns have the same sign, and a
context for each row learns that faster. Of these two predictions, the one is used that has been better so
far, by the sum of squared errors.
"""

from __future__ import annotations

from cfedavg.core.kernels import Int, helper, int64, integers, kernel, table
from cfedavg.wire import coder as rc
from cfedavg.wire.coder import MAGNITUDE, MASK, Array, Coder

STATES = 8
SLOW = 3  # a magnitude moves the running mean by 1 / 2^SLOW of its distance
MEAN = 16  # bits of the running mean; its upper three are the state
CERTAIN = 255  # the largest vote of a row or a column
WEIGHT = 8  # the most by which a sign moves a vote
DIFFERENCES = 17  # contexts for a difference from the votes, by the bits of both
BITS = table([vote.bit_length() for vote in range(CERTAIN + 1)])


@helper
def count_bits(number: Int) -> Int:
    """Return the number of bits of a number of at least 0; 0 has none."""
    bits = 0
    while number >> bits:
        bits += 1
    return bits


@helper
def move_mean(mean: Int, magnitude: Int, top: Int) -> Int:
    """Return the running mean after a magnitude from 1 to `top`; 0 stands for 1, and 65,535 for `top`."""
    share = (magnitude - 1) * (65535 // max(top - 1, 1))
    return mean + (share >> SLOW) - (mean >> SLOW)


@helper
def move_place(shapes: Array, place: tuple[Int, ...], index: Int) -> tuple[tuple[Int, ...], Int, Int]:
    """Return the place of coordinate `index`, its row and its column, counted over all tensors.

    A place is the tensor, its end, the row, its end, and the numbers of rows and columns of all tensors up to
    this one. `shapes` holds the rows, columns and depth of each tensor; coordinates must increase.
    """
    tensor, end, row, row_end, rows, columns = place
    while index >= end:
        tensor += 1
        row, row_end = rows, end + shapes[tensor][1] * shapes[tensor][2]
        end += shapes[tensor][0] * shapes[tensor][1] * shapes[tensor][2]
        rows, columns = rows + shapes[tensor][0], columns + shapes[tensor][1]
    width, depth = shapes[tensor][1] * shapes[tensor][2], shapes[tensor][2]
    while index >= row_end:
        row, row_end = row + 1, row_end + width
    offset = index - (row_end - width)
    column = columns - shapes[tensor][1] + (offset // depth if depth > 1 else offset)
    return (tensor, end, row, row_end, rows, columns), row, column


@helper
def ask_votes(of_row: Int, of_column: Int) -> tuple[Int, Int]:
    """Return the context for a difference from the votes, and the sign that the votes expect."""
    if of_row == 0 or of_column == 0:
        return 0, 0
    return BITS[abs(of_row)] + BITS[abs(of_column)], 1 if (of_row < 0) != (of_column < 0) else 0


@helper
def clip(number: Int, most: Int) -> Int:
    return min(max(number, -most), most)


@helper
def move_votes(votes: Array, row: Int, column: Int, bit: Int) -> None:
    """Let a row and a column learn the sign of an entry, 1 for negative, each with the other's weight."""
    sign = 1 - 2 * bit
    of_row, of_column = votes[row], votes[column]
    if of_row == 0 and of_column == 0:
        votes[row], votes[column] = sign, 1
    else:
        votes[row] = clip(of_row + sign * clip(of_column, WEIGHT), CERTAIN)
        votes[column] = clip(of_column + sign * clip(of_row, WEIGHT), CERTAIN)


@helper
def compare_errors(of_votes: Int, differs: Int, of_row: Int, bit: Int) -> Int:
    """Return the squared error of the votes minus that of the row's context, for a sign.

    `of_votes` is the probability that the sign differs from the votes, and `of_row` that `bit` is 1, in units
    of 2^-16.
    """
    if differs:
        of_votes = 65536 - of_votes
    if bit:
        of_row = 65536 - of_row
    return ((of_votes * of_votes) >> 16) - ((of_row * of_row) >> 16)


@helper
def count_lines(shapes: Array) -> tuple[Int, Int]:
    """Return the number of rows and of columns of all tensors."""
    rows, columns = 0, 0
    for shape in shapes:
        rows, columns = rows + shape[0], columns + shape[1]
    return rows, columns


@helper
def put_sign(
    words: Array, coder: Coder, contexts: Array, votes: Array, row: Int, column: Int, lead: Int, bit: Int
) -> tuple[Int, Coder]:
    """Encode a sign, 1 for negative; return the next lead and `coder`.

    `contexts` holds those for a difference from the votes, then those of the rows; `votes` those of rows and
    columns. `lead` is by how much the rows' contexts have been better than the votes so far.
    """
    which, turned = ask_votes(votes[row], votes[column])
    of_row, differs = DIFFERENCES + row, bit ^ turned
    better = compare_errors(contexts[which] >> 8, differs, contexts[of_row] >> 8, bit)
    if lead > 0:
        coder = rc.put_bit(words, coder, contexts, of_row, bit)
        contexts[which] = rc.learn(contexts[which], differs)
    else:
        coder = rc.put_bit(words, coder, contexts, which, differs)
        contexts[of_row] = rc.learn(contexts[of_row], bit)
    move_votes(votes, row, column, bit)
    return lead + better, coder


@helper
def take_sign(
    words: Array, coder: Coder, contexts: Array, votes: Array, row: Int, column: Int, lead: Int
) -> tuple[Int, Int, Coder]:
    """Decode a sign that `put_sign` encoded; return the sign, the next lead and the next `coder`."""
    which, turned = ask_votes(votes[row], votes[column])
    of_row = DIFFERENCES + row
    by_votes, by_row = contexts[which] >> 8, contexts[of_row] >> 8
    if lead > 0:
        bit, coder = rc.take_bit(words, coder, contexts, of_row)
        contexts[which] = rc.learn(contexts[which], bit ^ turned)
    else:
        differs, coder = rc.take_bit(words, coder, contexts, which)
        bit = differs ^ turned
        contexts[of_row] = rc.learn(contexts[of_row], bit)
    move_votes(votes, row, column, bit)
    return bit, lead + compare_errors(by_votes, bit ^ turned, by_row, bit), coder


@kernel
def encode_levels(words: Array, numbers: Array, indices: Array, shapes: Array, top: Int) -> Int:
    """Encode `numbers` into `words`; return how many words were written.

    A number is a 15-bit magnitude with the sign in the bit above. `indices` holds the coordinates of the
    numbers; it is empty if all coordinates are sent. `shapes` holds the rows, columns and depth of each
    tensor. Return 0 unless all magnitudes are from 1 to `top`.
    """
    bits, (rows, columns) = count_bits(top - 1), count_lines(shapes)
    magnitudes, signs = integers(STATES << bits, rc.EVEN), integers(DIFFERENCES + rows, rc.EVEN)
    votes = integers(rows + columns, 0)
    coder: Coder = rc.START
    mean, lead, place = int64(1 << (MEAN - 1)), int64(0), (-1, 0, 0, 0, 0, rows)
    for i in range(len(numbers)):
        magnitude = int64(numbers[i] & MASK)
        if magnitude < 1 or magnitude > top:
            return 0
        first, node = (mean >> (MEAN - 3)) << bits, 1
        for below in range(bits - 1, -1, -1):
            digit = ((magnitude - 1) >> below) & 1
            coder = rc.put_bit(words, coder, magnitudes, first + node, digit)
            node = 2 * node + digit
        mean = move_mean(mean, magnitude, top)
        place, row, column = move_place(shapes, place, indices[i] if len(indices) else i)
        bit = int64(numbers[i] >> MAGNITUDE)
        lead, coder = put_sign(words, coder, signs, votes, row, column, lead, bit)
    return rc.finish(words, coder)


@kernel
def decode_levels(words: Array, numbers: Array, indices: Array, shapes: Array, top: Int) -> Int:
    """Fill `numbers` with what `encode_levels` encoded; return how many words were read.

    Return 0 if a magnitude exceeds `top`.
    """
    bits, (rows, columns) = count_bits(top - 1), count_lines(shapes)
    magnitudes, signs = integers(STATES << bits, rc.EVEN), integers(DIFFERENCES + rows, rc.EVEN)
    votes = integers(rows + columns, 0)
    coder: Coder = rc.start_decoding(words)
    mean, lead, place = int64(1 << (MEAN - 1)), int64(0), (-1, 0, 0, 0, 0, rows)
    for i in range(len(numbers)):
        first, node = (mean >> (MEAN - 3)) << bits, 1
        for _ in range(bits):
            digit, coder = rc.take_bit(words, coder, magnitudes, first + node)
            node = 2 * node + digit
        magnitude = node - (1 << bits) + 1
        if magnitude > top:
            return 0
        mean = move_mean(mean, magnitude, top)
        place, row, column = move_place(shapes, place, indices[i] if len(indices) else i)
        bit, lead, coder = take_sign(words, coder, signs, votes, row, column, lead)
        numbers[i] = magnitude | bit << MAGNITUDE
    return coder[0]
