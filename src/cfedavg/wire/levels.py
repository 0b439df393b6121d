"""The coder of levels that neighbours predict: kinds PER_LEVEL and FEW. docs/wire.md specifies the format.

Large values stand beside large ones: the magnitudes of neighbours are alike. So the bits of a magnitude have
the contexts of one of eight states, which follow from a running mean of the magnitudes before. A magnitude of
kind PER_LEVEL is at least 1, one of kind FEW at least 0.

A gradient is nearly an outer product, in its signs too: the sign of an entry is that of its row times that of
its column. Each row and each column has a vote, and each sign that is coded moves both. Where their product
is large, the sign agrees with it. In a layer that follows a ReLU, all columns have the same sign, and a
context for each row learns that faster. Of these two predictions, the one is used that has been better so
far, by the sum of squared errors. With kind FEW, a large lead decides for the rest of the message: the other
one then costs no time.
"""

from __future__ import annotations

from cfedavg.core.kernels import Int, helper, int64, integers, kernel, table
from cfedavg.wire import coder as rc
from cfedavg.wire.coder import MAGNITUDE, MASK, Array, Coder

Place = tuple[Int, ...]

STATES = 8
SLOW = 3  # a magnitude moves the running mean by 1 / 2^SLOW of its distance
MEAN = 16  # bits of the running mean; its upper three are the state
CERTAIN = 255  # the largest vote of a row or a column
WEIGHT = 8  # the most by which a sign moves a vote
DIFFERENCES = 17  # contexts for a difference from the votes, by the bits of both
FINAL = (1 << 20, 1 << 62)  # the lead that decides, by the least magnitude: kind PER_LEVEL never decides
BITS = table([vote.bit_length() for vote in range(CERTAIN + 1)])


@helper
def count_bits(number: Int) -> Int:
    """Return the number of bits of a number of at least 0; 0 has none."""
    bits = 0
    while number >> bits:
        bits += 1
    return bits


@helper
def move_mean(mean: Int, above: Int, spread: Int) -> Int:
    """Return the running mean after a number from 0 to `spread`; 65,535 stands for `spread`."""
    share = above * (65535 // max(spread, 1))
    return mean + (share >> SLOW) - (mean >> SLOW)


@helper
def put_magnitude(
    words: Array, coder: Coder, contexts: Array, mean: Int, above: Int, spread: Int, bits: Int
) -> tuple[Int, Coder]:
    """Encode a number from 0 to `spread`, which has `bits` bits; return the next mean and `coder`."""
    first, node = (mean >> (MEAN - 3)) << bits, 1
    for below in range(bits - 1, -1, -1):
        digit = (above >> below) & 1
        coder = rc.put_bit(words, coder, contexts, first + node, digit)
        node = 2 * node + digit
    return move_mean(mean, above, spread), coder


@helper
def take_magnitude(
    words: Array, coder: Coder, contexts: Array, mean: Int, spread: Int, bits: Int
) -> tuple[Int, Int, Coder]:
    """Decode what `put_magnitude` encoded; return it (it may exceed `spread`), the next mean and `coder`."""
    first, node = (mean >> (MEAN - 3)) << bits, 1
    for _ in range(bits):
        digit, coder = rc.take_bit(words, coder, contexts, first + node)
        node = 2 * node + digit
    above = node - (1 << bits)
    return above, move_mean(mean, above, spread), coder


@helper
def move_place(shapes: Array, place: Place, index: Int) -> Place:
    """Return the place of coordinate `index`: the place of the coordinate before, moved on.

    A place is the tensor, its end, the row, its end, the number of rows of all tensors up to this one, the
    first column of the tensor, the coordinates in a row, and the depth. Rows and columns are counted over all
    tensors. `shapes` holds the rows, columns and depth of each.
    """
    tensor, end, row, row_end, rows, column, width, depth = place
    while index >= end:
        tensor, column = tensor + 1, column + width // depth
        depth = shapes[tensor][2]
        width = shapes[tensor][1] * depth
        row, row_end = rows, end + width
        end += shapes[tensor][0] * width
        rows += shapes[tensor][0]
    while index >= row_end:
        row, row_end = row + 1, row_end + width
    return tensor, end, row, row_end, rows, column, width, depth


@helper
def find_column(place: Place, index: Int) -> Int:
    """Return the column of coordinate `index`, counted over all tensors."""
    _, _, _, row_end, _, column, width, depth = place
    offset = index - (row_end - width)
    return column + (offset // depth if depth > 1 else offset)


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


@helper
def put_settled(
    words: Array, coder: Coder, contexts: Array, votes: Array, row: Int, column: Int, bit: Int
) -> Coder:
    """Encode a sign by the votes alone."""
    which, turned = ask_votes(votes[row], votes[column])
    coder = rc.put_bit(words, coder, contexts, which, bit ^ turned)
    move_votes(votes, row, column, bit)
    return coder


@helper
def take_settled(
    words: Array, coder: Coder, contexts: Array, votes: Array, row: Int, column: Int
) -> tuple[Int, Coder]:
    """Decode a sign that `put_settled` encoded."""
    which, turned = ask_votes(votes[row], votes[column])
    differs, coder = rc.take_bit(words, coder, contexts, which)
    move_votes(votes, row, column, differs ^ turned)
    return differs ^ turned, coder


@kernel
def encode_levels(words: Array, numbers: Array, indices: Array, shapes: Array, least: Int, top: Int) -> Int:
    """Encode `numbers` into `words`; return how many words were written.

    A number is a 15-bit magnitude with the sign in the bit above; 0 has no sign. `indices` holds the
    coordinates of the numbers; it is empty if all coordinates are sent. `shapes` holds the rows, columns and
    depth of each tensor. Return 0 unless all magnitudes are from `least` (0 or 1) to `top`.
    """
    bits, (rows, columns) = count_bits(top - least), count_lines(shapes)
    magnitudes, signs = integers(STATES << bits, rc.EVEN), integers(DIFFERENCES + rows, rc.EVEN)
    votes = integers(rows + columns, 0)
    coder: Coder = rc.START
    mean, lead, final = int64(1 << (MEAN - 1)), int64(0), FINAL[least]
    place: Place = (-1, 0, 0, 0, 0, rows, 0, 1)
    for i in range(len(numbers)):
        magnitude = int64(numbers[i] & MASK)
        if magnitude < least or magnitude > top:
            return 0
        mean, coder = put_magnitude(words, coder, magnitudes, mean, magnitude - least, top - least, bits)
        if magnitude:
            index, bit = indices[i] if len(indices) else i, int64(numbers[i] >> MAGNITUDE)
            place = move_place(shapes, place, index)
            row = place[2]
            if lead >= final:
                coder = rc.put_bit(words, coder, signs, DIFFERENCES + row, bit)
                continue
            column = find_column(place, index)
            if lead > -final:
                lead, coder = put_sign(words, coder, signs, votes, row, column, lead, bit)
            else:
                coder = put_settled(words, coder, signs, votes, row, column, bit)
    return rc.finish(words, coder)


@kernel
def decode_levels(words: Array, numbers: Array, indices: Array, shapes: Array, least: Int, top: Int) -> Int:
    """Fill `numbers` with what `encode_levels` encoded; return how many words were read.

    Return 0 if a magnitude exceeds `top`.
    """
    bits, (rows, columns) = count_bits(top - least), count_lines(shapes)
    magnitudes, signs = integers(STATES << bits, rc.EVEN), integers(DIFFERENCES + rows, rc.EVEN)
    votes = integers(rows + columns, 0)
    coder: Coder = rc.start_decoding(words)
    mean, lead, final = int64(1 << (MEAN - 1)), int64(0), FINAL[least]
    place: Place = (-1, 0, 0, 0, 0, rows, 0, 1)
    for i in range(len(numbers)):
        above, mean, coder = take_magnitude(words, coder, magnitudes, mean, top - least, bits)
        magnitude = above + least
        if magnitude > top:
            return 0
        if magnitude:
            index = indices[i] if len(indices) else i
            place = move_place(shapes, place, index)
            row = place[2]
            if lead >= final:
                bit, coder = rc.take_bit(words, coder, signs, DIFFERENCES + row)
            else:
                column = find_column(place, index)
                if lead > -final:
                    bit, lead, coder = take_sign(words, coder, signs, votes, row, column, lead)
                else:
                    bit, coder = take_settled(words, coder, signs, votes, row, column)
            magnitude |= bit << MAGNITUDE
        numbers[i] = magnitude
    return coder[0]
