"""Two tools to code the set of coordinates that a tensor sends: gaps, and density bands.

Coded gaps take about as many bits as a random set of the same size needs. But sent coordinates are not
random: some rows and columns of a tensor send many coordinates, others none. So the rows and the columns are
sorted into density bands, and the coordinates of each band are coded on their own.

A line is a row or a column. Its density band depends on how many coordinates the line sends, compared with m.
Here m is the mean over all lines that send at least one coordinate.

    band    0       1              2          3            4
    sends   none    below m / 2    below m    below 2 m    2 m or more
"""

from __future__ import annotations

import math

from cfedavg.core.kernels import Int, helper, integers
from cfedavg.wire import coder as rc
from cfedavg.wire.coder import Array, Coder

STEPS = 16  # symbols: 0 to 14 end a gap after that many steps; 15 means 15 steps, and the gap goes on
JUMPS = 4  # the decoder's table `jump` has 2^JUMPS entries
TRUST = 256  # the first table has the weight of this many coded gaps
FINE, BEYOND, OTHER_NUMBER = range(3)  # a decoder's result: no fault, a position too large, too many or few

BANDS = 5
BAND_CONTEXTS = BANDS * (BANDS - 1)
BY_ROWS, BY_COLUMNS = 1, 2  # modes of a tensor: its rows or its columns have bands; 3 for both, 0 for none


@helper
def start_gaps(size: Int, n: Int) -> tuple[Int, Array, Array]:
    """Return `step`, counts and sums of a new frequency table for the gaps between n of `size` positions.

    A gap is counted in steps of 2^step positions. A step is a quarter to a half of the mean gap, and at least
    one position. The counts are those that TRUST gaps between random positions would give on average.
    """
    step = 0
    while (size // n) >> (step + 2):
        step += 1
    while size >> 31:  # keeps the products below 2^63
        size = size >> 1
        n = min((n + 1) >> 1, size)
    empty = ((size - n) << 30) // size
    for _ in range(step):
        empty = (empty * empty) >> 30
    counts, sums = integers(STEPS, 0), integers(STEPS + 1, 0)
    left = TRUST * rc.SEEN << 30
    for s in range(STEPS - 1):
        further = (left >> 30) * empty
        counts[s] = max((left - further) >> 30, 1)
        left = further
    counts[STEPS - 1] = max(left >> 30, 1)
    rc.make_sums(counts, sums)
    return step, counts, sums


@helper
def put_gaps(words: Array, coder: Coder, positions: Array, start: Int, size: Int) -> Coder:
    """Encode increasing `positions` as gaps. The decoder must know how many positions there are.

    All positions lie from `start` to start + size - 1.
    """
    n = len(positions)
    if n == 0 or n == size:
        return coder
    step, counts, sums = start_gaps(size, n)
    following, due = start, rc.FIRST
    for i in range(n):
        gap = positions[i] - following
        following = positions[i] + 1
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


@helper
def take_gaps(words: Array, coder: Coder, positions: Array, size: Int) -> tuple[Int, Coder]:
    """Fill `positions` with what `put_gaps` encoded. Here the positions count from 0.

    Return BEYOND if a position is `size` or more, else FINE; and the next `coder`.
    """
    n = len(positions)
    if n == 0 or n == size:
        for i in range(n):
            positions[i] = i
        return FINE, coder
    step, counts, sums = start_gaps(size, n)
    jump = integers(1 << JUMPS, 0)
    rc.make_jumps(sums, jump, JUMPS)
    following, due = 0, rc.FIRST
    for i in range(n):
        symbol, coder = rc.take_symbol(words, coder, sums, jump, JUMPS)
        counts[symbol] += rc.SEEN
        while symbol == STEPS - 1:
            following += (STEPS - 1) << step
            if following >= size:
                return BEYOND, coder
            symbol, coder = rc.take_symbol(words, coder, sums, jump, JUMPS)
            counts[symbol] += rc.SEEN
        rest, coder = rc.take_number(words, coder, step)
        positions[i] = following + (symbol << step) + rest
        following = positions[i] + 1
        if following > size:
            return BEYOND, coder
        if i + 1 == due:
            due = rc.rebuild(counts, sums, due)
            rc.make_jumps(sums, jump, JUMPS)
    return FINE, coder


@helper
def assign_bands(line: Array, n: Int) -> tuple[Array, Array]:
    """Return the density band of each of n lines (rows or columns), and the number of lines in each band.

    `line` holds, for each sent coordinate, the number of its line.
    """
    sent, bands, sizes = integers(n, 0), integers(n, 0), integers(BANDS, 0)
    used, total = 0, len(line)
    for i in range(total):
        used += sent[line[i]] == 0
        sent[line[i]] += 1
    for i in range(n):
        share = sent[i] * used  # share / total is what line i sends, divided by the mean m
        bands[i] = 0 if share == 0 else 1 + (2 * share >= total) + (share >= total) + (share >= 2 * total)
        sizes[bands[i]] += 1
    return bands, sizes


@helper
def find_starts(sizes: Array) -> Array:
    """Return the sum of all sizes before each one: where each part starts if the parts follow each other."""
    starts: Array = integers(len(sizes), 0)
    for i in range(1, len(sizes)):
        starts[i] = starts[i - 1] + sizes[i - 1]
    return starts


@helper
def sort_lines(bands: Array) -> tuple[Array, Array, Array, Array]:
    """Sort lines (rows or columns) by density band.

    Return the sorted lines, the size of each band, the position at which each band starts in the sorted
    lines, and the rank of each line in its band.
    """
    sizes, ranks, order = integers(BANDS, 0), integers(len(bands), 0), integers(len(bands), 0)
    for line in range(len(bands)):
        ranks[line] = sizes[bands[line]]
        sizes[bands[line]] += 1
    starts = find_starts(sizes)
    for line in range(len(bands)):
        order[starts[bands[line]] + ranks[line]] = line
    return order, sizes, starts, ranks


@helper
def cost_of_set(size: Int, n: Int) -> float:
    """Return the approximate number of bits that a set of n out of `size` positions takes."""
    if n <= 0 or n >= size:
        return 0.0
    rest = size - n
    bits: float = n * math.log2(size / n) + rest * math.log2(size / rest)
    return bits


@helper
def cost_of_bands(sizes: Array) -> float:
    """Return the approximate number of bits that `put_bands` takes if band i has sizes[i] lines."""
    total, bits = sum(sizes), 16.0
    for size in sizes:
        if size:
            bits += size * math.log2(total / size)
    return bits


@helper
def choose_mode(rows: Array, columns: Array, sent: Array, depth: Int) -> Int:
    """Return which bands take the fewest bits: BY_ROWS, BY_COLUMNS, their sum for both, or 0 for none.

    `rows` and `columns` hold the number of rows and columns in each band. `sent` holds the number of sent
    coordinates for each pair of a row band and a column band. A row and a column meet in `depth` coordinates.
    """
    all_rows, all_columns, n = sum(rows), sum(columns), sum(sent)
    by_rows, by_columns = cost_of_bands(rows), cost_of_bands(columns)
    both = by_rows + by_columns
    for x in range(1, BANDS):
        in_rows, in_columns = 0, 0
        for y in range(1, BANDS):
            both += 8 + cost_of_set(rows[x] * columns[y] * depth, sent[x * BANDS + y])
            in_rows += sent[x * BANDS + y]
            in_columns += sent[y * BANDS + x]
        by_rows += 8 + cost_of_set(rows[x] * all_columns * depth, in_rows)
        by_columns += 8 + cost_of_set(all_rows * columns[x] * depth, in_columns)
    best = min(cost_of_set(all_rows * all_columns * depth, n), by_rows, by_columns, both)
    if best == both:
        return BY_ROWS | BY_COLUMNS
    return BY_ROWS if best == by_rows else BY_COLUMNS if best == by_columns else 0


@helper
def put_bands(words: Array, coder: Coder, bands: Array) -> Coder:
    """Encode the density band of each line (row or column).

    The bits of a band answer: is it 0? If not, is it 1? If not, is it 2? If not, is it 3? The probabilities
    of the bits depend on the band of the previous line.
    """
    contexts, before = integers(BAND_CONTEXTS, rc.EVEN), 0
    for band in bands:
        for i in range(min(band + 1, BANDS - 1)):
            coder = rc.put_bit(words, coder, contexts, before * (BANDS - 1) + i, 1 if i == band else 0)
        before = band
    return coder


@helper
def take_bands(words: Array, coder: Coder, n: Int) -> tuple[Array, Coder]:
    """Decode the density bands of n lines that `put_bands` encoded; return the bands and the next `coder`."""
    bands, contexts, before = integers(n, 0), integers(BAND_CONTEXTS, rc.EVEN), 0
    for line in range(n):
        band, bit = -1, 0
        while not bit and band < BANDS - 2:
            band += 1
            bit, coder = rc.take_bit(words, coder, contexts, before * (BANDS - 1) + band)
        before = band if bit else BANDS - 1
        bands[line] = before
    return bands, coder
