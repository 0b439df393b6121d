"""The coder of coordinates of which each chunk of the vector sends equally many, as `topk(chunk=, k=)` does.

docs/wire.md specifies the format. A piece is the part of a tensor's row that lies in one chunk. For each
piece comes the number of its sent coordinates, in contexts for the mean to expect, which is what the chunk
has left, spread evenly over the rest of the chunk. So the rows of a chunk may differ widely. Then come the
positions in the piece, one after another. A column that has sent more coordinates in the rows before has a
larger weight. The next of j positions lies beyond a place with the probability that all j do, if each falls
on a column by its weight: the share of the weights beyond that place to the power of j.
"""

from __future__ import annotations

import numpy as np

from cfedavg.core.kernels import WORD64, Int, helper, integers, kernel, uint64
from cfedavg.wire import coder as rc
from cfedavg.wire.coder import Array, Coder
from cfedavg.wire.sets import BEYOND, FINE, OTHER_NUMBER

SHORTEST, LONGEST = 6, 16  # a chunk has 2^6 to 2^16 coordinates
LENGTH = 5  # bits of the exponent
CLASSES, COUNTS = 19, 32  # contexts of a piece's count: by the mean to expect, and by the count itself
WEIGHT = 2  # of a column that has sent nothing yet
PRECISE = 24  # bits of a probability of a position
RENEWAL = 16  # weights are renewed after 1, 2, 4, 8, 16 rows of a tensor, then after every 16


def find_chunk(indices: Array, d: int) -> tuple[int, int] | None:
    """Return (s, n) if each chunk of 2^s coordinates sends n, and a shorter last one n or all; else None.

    There must be two chunks or more. Of several s, the smallest is returned.

    >>> find_chunk(np.array([3, 60, 64, 100, 128]), 129), find_chunk(np.array([3, 60, 64, 100, 101]), 129)
    ((6, 2), None)
    """
    for s in range(SHORTEST, LONGEST + 1):
        chunks, rest = d >> s, d & ((1 << s) - 1)
        if chunks < 2:
            return None
        n = int(np.searchsorted(indices, 1 << s))
        if not 0 < n < 1 << s or len(indices) != chunks * n + min(n, rest):
            continue
        chunk = indices >> s
        if (chunk == np.repeat(np.arange(chunks + 1), [n] * chunks + [min(n, rest)])).all():
            return s, n
    return None


@helper
def share_beyond(before: Array, place: Int, stop: Int, scale: Int, j: Int) -> Int:
    """Return the probability that j positions of a piece lie at `place` or beyond, in units of 2^-PRECISE."""
    share = ((sum_before(before, stop) - sum_before(before, place)) * scale) >> (50 - PRECISE)
    power = 1 << PRECISE
    while j:
        if j & 1:
            power = (power * share) >> PRECISE
        share = (share * share) >> PRECISE
        j >>= 1
    return power


@helper
def sum_before(before: Array, place: Int) -> Int:
    """Return the sum of the weights before a place in the row; without an array all weights are equal."""
    if len(before) == 0:
        return WEIGHT * place
    return before[place]


@helper
def edge(before: Array, place: Int, first: Int, stop: Int, scale: Int, j: Int) -> Int:
    """Return where the part of the interval begins that stands for a position, in units of 2^-PRECISE.

    The next of j positions lies from `first` to before `stop`. Each has at least one unit.
    """
    if place == first:
        return 0
    likely = (1 << PRECISE) - (stop - first)
    within = (1 << PRECISE) - share_beyond(before, place, stop, scale, j)
    return (place - first) + ((likely * within) >> PRECISE)


@helper
def put_positions(
    words: Array, coder: Coder, before: Array, positions: Array, start: Int, first: Int, stop: Int
) -> Coder:
    """Encode increasing positions in the row that begins at `start`.

    They lie from `first` to before `stop`, which count from the start of the row.
    """
    for i in range(len(positions)):
        j, place = len(positions) - i, positions[i] - start
        if stop - first > j:
            scale = (1 << 50) // (sum_before(before, stop) - sum_before(before, first))
            above = edge(before, place, first, stop, scale, j)
            beyond = edge(before, place + 1, first, stop, scale, j)
            unit = coder[2] >> uint64(PRECISE)
            coder = rc.narrow(words, coder, unit * uint64(above), unit * uint64(beyond - above))
        first = place + 1
    return coder


@helper
def take_positions(
    words: Array, coder: Coder, before: Array, positions: Array, start: Int, first: Int, stop: Int
) -> tuple[Int, Coder]:
    """Fill `positions` with what `put_positions` encoded; return FINE or BEYOND, and the next `coder`."""
    for i in range(len(positions)):
        j, low, high = len(positions) - i, first, stop
        above, beyond = 0, 1 << PRECISE
        if stop - first > j:
            scale = (1 << 50) // (sum_before(before, stop) - sum_before(before, first))
            unit = coder[2] >> uint64(PRECISE)
            share = min(coder[1] // unit, uint64((1 << PRECISE) - 1))
            while high - low > 1:
                middle = (low + high) >> 1
                found = edge(before, middle, first, stop, scale, j)
                if uint64(found) <= share:
                    low, above = middle, found
                else:
                    high, beyond = middle, found
            code = (coder[1] - unit * uint64(above)) & WORD64
            coder = rc.widen(words, coder[0], code, unit * uint64(beyond - above))
        if low + j > stop:
            return BEYOND, coder
        positions[i] = start + low
        first = low + 1
    return FINE, coder


@helper
def first_context(left: Int, room: Int, size: Int) -> Int:
    """Return the first of the COUNTS contexts for the count of a piece of `size` coordinates."""
    mean = (4 * left * size) // room
    which = 0
    while mean >> which:
        which += 1
    return min(which, CLASSES - 1) * COUNTS


@helper
def renew_weights(before: Array, sent: Array, due: Int) -> Int:
    """Set the sums of the weights from the number of coordinates that each column has sent, after `due` rows.

    Return after how many rows the next renewal is due.
    """
    for c in range(len(sent)):
        before[c + 1] = before[c] + WEIGHT + sent[c]
    return 2 * due if due < RENEWAL else due + RENEWAL


@helper
def new_weights(rows: Int, width: Int) -> tuple[Array, Array]:
    """Return the sums of the weights and how many coordinates each column has sent.

    Both are empty if there is a single row.
    """
    sent = integers(width if rows > 1 else 0, 0)
    before = integers(width + 1 if rows > 1 else 0, 0)
    renew_weights(before, sent, 1)
    return before, sent


@helper
def start_piece(at: Int, end: Int, left: Int, room: Int, d: Int, s: Int, n: Int) -> tuple[Int, Int, Int]:
    """Return what the chunk has still to send and its room from `at` on, and the size of the piece at `at`.

    The row ends at `end`. If the chunk before has no room left, a new one starts.
    """
    if room == 0:
        room = min(1 << s, d - at)
        left = min(n, room)
    return left, room, min(end - at, room)


@helper
def put_count(
    words: Array, coder: Coder, contexts: Array, left: Int, room: Int, size: Int, count: Int
) -> Coder:
    """Encode how many coordinates a piece of `size` sends, of `left` that its chunk has for `room`."""
    first = first_context(left, room, size)
    for i in range(max(left - (room - size), 0), min(left, size, count + 1)):
        coder = rc.put_bit(words, coder, contexts, first + min(i, COUNTS - 1), 1 if i == count else 0)
    return coder


@helper
def take_count(
    words: Array, coder: Coder, contexts: Array, left: Int, room: Int, size: Int
) -> tuple[Int, Coder]:
    """Decode a count that `put_count` encoded; return the count and the next `coder`."""
    first, most = first_context(left, room, size), min(left, size)
    count, found = max(left - (room - size), 0), 0
    while count < most and not found:
        found, coder = rc.take_bit(words, coder, contexts, first + min(count, COUNTS - 1))
        count += 1 - found
    return count, coder


@helper
def count_sent(sent: Array, positions: Array, start: Int) -> None:
    """Count the sent coordinates of each column of the row that begins at `start`."""
    if len(sent):
        for i in range(len(positions)):
            sent[positions[i] - start] += 1


@kernel
def encode_chunks(words: Array, indices: Array, d: Int, shapes: Array, s: Int, n: Int) -> Int:
    """Encode increasing indices below d, n of each chunk of 2^s, into `words`; return the number of words.

    `shapes` holds the rows, columns and depth of each tensor.
    """
    coder = rc.put_number(words, rc.START, s, LENGTH)
    coder = rc.put_number(words, coder, n, s)
    contexts = integers(CLASSES * COUNTS, rc.EVEN)
    at, left, room, a = 0, 0, 0, 0
    for shape in shapes:
        width, due = shape[1] * shape[2], 1
        before, sent = new_weights(shape[0], width)
        for row in range(shape[0]):
            start, end = at, at + width
            while at < end:
                left, room, size = start_piece(at, end, left, room, d, s, n)
                b = a
                while b < len(indices) and indices[b] < at + size:
                    b += 1
                coder = put_count(words, coder, contexts, left, room, size, b - a)
                first = at - start
                coder = put_positions(words, coder, before, indices[a:b], start, first, first + size)
                count_sent(sent, indices[a:b], start)
                at, left, room, a = at + size, left - (b - a), room - size, b
            if row + 1 == due:
                due = renew_weights(before, sent, due)
    return rc.finish(words, coder)


@kernel
def decode_chunks(words: Array, indices: Array, d: Int, shapes: Array) -> tuple[Int, Int]:
    """Fill `indices` with what `encode_chunks` encoded.

    Return FINE or a fault (BEYOND or OTHER_NUMBER), and the number of words read.
    """
    s, coder = rc.take_number(words, rc.start_decoding(words), LENGTH)
    n, coder = rc.take_number(words, coder, s)
    is_known = SHORTEST <= s <= LONGEST and n > 0
    if not is_known or (d >> s) * n + min(n, d & ((1 << s) - 1)) != len(indices):
        return OTHER_NUMBER, coder[0]
    contexts = integers(CLASSES * COUNTS, rc.EVEN)
    at, left, room, a = 0, 0, 0, 0
    for shape in shapes:
        width, due = shape[1] * shape[2], 1
        before, sent = new_weights(shape[0], width)
        for row in range(shape[0]):
            start, end = at, at + width
            while at < end:
                left, room, size = start_piece(at, end, left, room, d, s, n)
                count, coder = take_count(words, coder, contexts, left, room, size)
                piece, first = indices[a : a + count], at - start
                fault, coder = take_positions(words, coder, before, piece, start, first, first + size)
                if fault:
                    return fault, coder[0]
                count_sent(sent, piece, start)
                at, left, room, a = at + size, left - count, room - size, a + count
            if row + 1 == due:
                due = renew_weights(before, sent, due)
    return FINE, coder[0]
