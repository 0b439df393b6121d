"""A decoder of the wire format in plain Python: slow, readable, and the oracle of the fast one.

It is written from docs/wire.md alone, without a look at src/cfedavg/wire, and so shows that the page is
enough to write one. It needs the standard library only, and holds everything as Python ints and lists:
floats stay bit patterns, so that they can be compared bit for bit. It makes the checks of that page but for
those of what only a receiver knows: who sends, and how much it accepts.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ALL, DRAWN, LISTED, ROTATED, FACTORED, CHUNKED = range(6)  # where
FP32, FP64, BF16, LEVELS8, LEVELS16, PER_LEVEL, FEW = range(7)  # kind
PLAIN, CODED = range(2)  # coding

HEADER = struct.Struct("<4s4B5QI3Q")
VALUES_A_BYTE = 11_354
MASK64 = 2**64 - 1
FINAL = 2**20  # the lead of one prediction of signs that decides, with kind 6
HIGHEST = {  # magnitudes
    FP32: 0x7F7F, FP64: 0x7FEF, BF16: 0x7F7F, LEVELS8: 2**7 - 1, LEVELS16: 2**15 - 1, PER_LEVEL: 2**7 - 1,
    FEW: 2**7 - 1,
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """The first 76 bytes."""

    magic: bytes
    version: int
    where: int
    kind: int
    coding: int
    schema: int
    d: int
    k: int
    client: int
    sequence: int
    round: int
    lengths: tuple[int, int, int]


@dataclass
class Message:
    """All that a message says."""

    header: Header
    values: list[int]  # levels, or the bit patterns of floats
    indices: list[int] | None = None  # None: all coordinates
    key: int | None = None
    keep: int | None = None
    scales: list[int] = field(default_factory=list)  # bit patterns of fp32
    block: int | None = None
    top: int | None = None
    size: int | None = None  # of a rotated block
    rank: int | None = None  # of factors
    by_tensor: bool | None = None  # listed coordinates: tensor by tensor, or all in one set
    modes: list[int] = field(default_factory=list)  # which bands each tensor that says so has, 0 to 3


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in the vector, and its rows and columns of groups of coordinates."""

    start: int
    rows: int
    columns: int
    group: int

    @property
    def size(self) -> int:
        return self.rows * self.columns * self.group


def decode(
    data: bytes, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]
) -> Message:
    """Read a message for the model whose tensors have these names, shapes and dtypes."""
    header = read_header(data)
    tensors = split(shapes)
    check_model(header, schema_hash(names, shapes, dtypes), sum(tensor.size for tensor in tensors))
    check_sections(header, data)
    places, coded, copied = sections(header, data)
    message = Message(header, [])
    if header.where in (ROTATED, FACTORED):
        read_basis(message, places, shapes)
        tensors = [Tensor(0, 1, 1, header.k)]  # all values are in one row
    else:
        read_coordinates(message, places, tensors)
    if header.coding == CODED:
        if header.kind >= LEVELS8:
            read_scales(message, copied)
        heads = (
            read_levels(message, coded, tensors)
            if header.kind in (PER_LEVEL, FEW)
            else read_heads(message, coded, tensors)
        )
        message.values = join(header.kind, heads, copied)
    else:
        message.values = split_numbers(copied, {FP32: 4, FP64: 8}[header.kind])
        require(all(finite(value, header.kind) for value in message.values), "a value is not finite")
    return message


# The header


def read_header(data: bytes) -> Header:
    require(len(data) >= HEADER.size + 4, "too short for a message")
    *fields, first, second, third = HEADER.unpack_from(data)
    header = Header(*fields, (first, second, third))
    require(header.magic == b"CFAV", "not a message: wrong magic")
    require(header.version in (1, 2, 3), "unknown version")
    require(header.where <= (CHUNKED if header.version == 3 else LISTED), "unknown where")
    require(header.kind <= (FEW if header.version == 3 else LEVELS16), "unknown kind")
    require(header.coding <= CODED, "unknown coding")
    whole_floats = header.where == ALL and header.kind in (FP32, FP64)
    version = 2 if whole_floats and header.coding == CODED else 1
    version = 3 if header.where >= ROTATED or header.kind >= PER_LEVEL else version
    require(header.version == version, "the version does not go with where, kind and coding")
    return header


def check_model(header: Header, schema: int, d: int) -> None:
    require(header.schema == schema, "the schema is that of another model")
    require(header.d == d, "d is that of another model")
    require(header.k <= (2 * d if header.where == ROTATED else d), "k exceeds d")
    require(header.where != ALL or header.k == d, "all coordinates, but k is not d")
    may_be_plain = header.where == ALL and header.kind in (FP32, FP64)
    require(header.coding == CODED or may_be_plain, "the coding does not go with where and kind")


def check_sections(header: Header, data: bytes) -> None:
    places, coded, copied = header.lengths
    require(HEADER.size + places + coded + copied + 4 == len(data), "the section lengths do not add up")
    lengths = {ALL: 0, DRAWN: 16, ROTATED: 12, FACTORED: 4}
    require(places == lengths.get(header.where, places), "section 1 has a wrong length")
    if header.coding == PLAIN:
        require(coded == 0, "section 2 must be empty")
    else:
        require(header.k <= VALUES_A_BYTE * (coded + 8), "section 2 is too short")
    needed = copied_length(header, data[HEADER.size + places + coded : -4])
    require(copied == needed, "section 3 has a wrong length")
    require(zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little"), "wrong checksum")


def copied_length(header: Header, section: bytes) -> int:
    """How long section 3 must be."""
    if header.kind >= LEVELS8:
        require(len(section) >= 6, "section 3 is too short")
        block, top = struct.unpack_from("<IH", section)
        return 6 + 4 * number_of_blocks(header.k, block) * (top if header.kind == PER_LEVEL else 1)
    if header.coding == PLAIN:
        return header.k * {FP32: 4, FP64: 8}[header.kind]
    return header.k * {FP32: 2, FP64: 6, BF16: 0}[header.kind]


def number_of_blocks(k: int, block: int) -> int:
    if block == 0:
        return min(k, 1)
    return -(-k // block)


def sections(header: Header, data: bytes) -> list[bytes]:
    found = []
    start = HEADER.size
    for length in header.lengths:
        found.append(data[start : start + length])
        start += length
    return found


def schema_hash(names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    text = json.dumps([list(names), [list(shape) for shape in shapes], list(dtypes)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def split(shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors one after another, those without elements left out."""
    tensors: list[Tensor] = []
    start = 0
    for shape in shapes:
        size = math.prod(shape)
        if size == 0:
            continue
        if len(shape) < 2:
            tensors.append(Tensor(start, 1, 1, size))
        else:
            tensors.append(Tensor(start, shape[0], shape[1], size // (shape[0] * shape[1])))
        start += size
    return tensors


# The range coder


@dataclass
class Context:
    """The probability of a 1, in units of 2^-16, and the number of bits seen."""

    p: int = 32768
    n: int = 0

    def learn(self, bit: int) -> None:
        rate = 131072 // (2 * self.n + 3)
        if bit:
            self.p = min(self.p + ((65536 - self.p) * rate >> 16), 65504)
        else:
            self.p = max(self.p - (self.p * rate >> 16), 32)
        self.n = min(self.n + 1, 255)


def contexts(number: int) -> list[Context]:
    return [Context() for _ in range(number)]


class Table:
    """How likely each of some symbols is, from how often it came."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts
        self.items = 0
        self.sums = self.make_sums()

    def make_sums(self) -> list[int]:
        symbols = len(self.counts)
        share = ((65536 - symbols) << 32) // sum(self.counts)
        sums = [0]
        for count in self.counts[:-1]:
            sums.append(sums[-1] + 1 + (count * share >> 32))
        return [*sums, 65536]

    def add(self, symbol: int, amount: int) -> None:
        """Count a symbol, where there is such a one."""
        if 0 <= symbol < len(self.counts):
            self.counts[symbol] += amount

    def end_item(self) -> None:
        """Renew the table after 16, 32, 64, 128 and then every 128 items."""
        self.items += 1
        if self.items not in (16, 32, 64) and self.items % 128 != 0:
            return
        self.sums = self.make_sums()
        if self.items >= 128:
            self.counts = [max(count - (count >> 2), 1) for count in self.counts]


class Stream:
    """The decoder of the range coder."""

    def __init__(self, section: bytes) -> None:
        self.section = section
        self.position = 0
        self.span = MASK64
        self.code = self.next_word() << 32
        self.code |= self.next_word()

    def next_word(self) -> int:
        """The next four bytes; past the end there are zeros."""
        word = self.section[self.position : self.position + 4].ljust(4, b"\0")
        self.position += 4
        return int.from_bytes(word, "big")

    def narrow(self, above: int, width: int) -> None:
        """Go on with the part of the interval that begins so much above its lower end and is so wide."""
        self.code -= above
        self.span = width
        if self.span < 2**32:
            self.code = (self.code << 32 | self.next_word()) & MASK64
            self.span <<= 32

    def bit(self, context: Context) -> int:
        one = (self.span >> 16) * context.p
        bit = int(self.code < one)
        if bit:
            self.narrow(0, one)
        else:
            self.narrow(one, self.span - one)
        context.learn(bit)
        return bit

    def number(self, bits: int) -> int:
        """A number of so many bits, 16 at a time, the upper ones first."""
        number = 0
        while bits > 0:
            part = min(bits, 16)
            unit = self.span >> part
            value = min(self.code // unit, 2**part - 1)
            self.narrow(value * unit, unit)
            number = number << part | value
            bits -= part
        return number

    def count(self, contexts: list[Context]) -> int:
        last = len(contexts) - 1
        length = 0
        while self.bit(contexts[length]) == 0 and length < last:
            length += 1
        return 2**length + self.number(length) - 1

    def symbol(self, table: Table) -> int:
        unit = self.span >> 16
        share = min(self.code // unit, 65535)
        symbol = bisect_right(table.sums, share) - 1
        low, high = table.sums[symbol : symbol + 2]
        self.narrow(unit * low, unit * (high - low))
        return symbol

    def end(self) -> None:
        """Zeros are left out of the last two words that were read, and of no others."""
        require(self.position - 8 <= len(self.section) <= self.position, "a section of a wrong length")
        if len(self.section) > self.position - 8:
            require(not self.section.endswith(b"\0"), "a coded section ends with a zero")


# Section 1: coordinates


def read_coordinates(message: Message, section: bytes, tensors: list[Tensor]) -> None:
    if message.header.where == ALL:
        return
    if message.header.where == DRAWN:
        message.key, message.keep = struct.unpack("<qQ", section)
        require(message.keep <= 2**53, "keep exceeds 2^53")
        message.indices = [j for j in range(message.header.d) if bits53(message.key, j) < message.keep]
    else:
        stream = Stream(section)
        read = read_chunks if message.header.where == CHUNKED else read_listed
        message.indices = read(stream, message, tensors)
        stream.end()
    require(len(message.indices) == message.header.k, "not k coordinates")


def bits53(key: int, j: int) -> int:
    """Output j of splitmix64 started at the key, its upper 53 bits."""
    z = (key + (j + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return (z ^ (z >> 31)) >> 11


def read_listed(stream: Stream, message: Message, tensors: list[Tensor]) -> list[int]:
    message.by_tensor = bool(stream.number(1))
    if not message.by_tensor:
        return read_set(stream, message.header.d, message.header.k)
    tensor_counts, block_counts = contexts(48), contexts(48)
    indices = []
    for tensor in tensors:
        n = stream.count(tensor_counts)
        if n == 0:
            continue
        mode = 0
        if tensor.rows > 1 or tensor.columns > 1:
            mode = stream.number(2)
            message.modes.append(mode)
        if mode == 0:
            cells = read_set(stream, tensor.size, n)
        else:
            cells = read_blocks(stream, tensor, mode, block_counts)
        require(len(cells) == n, "the blocks do not add up to their tensor")
        indices += [tensor.start + cell for cell in sorted(cells)]
    return indices


def read_blocks(stream: Stream, tensor: Tensor, mode: int, block_counts: list[Context]) -> list[int]:
    """The chosen coordinates of a tensor in bands, counted from its start, block after block."""
    row_bands = read_bands(stream, tensor.rows) if mode & 1 else [1] * tensor.rows
    column_bands = read_bands(stream, tensor.columns) if mode & 2 else [1] * tensor.columns
    chosen = []
    for x in range(1, 5):
        rows = [row for row in range(tensor.rows) if row_bands[row] == x]
        for y in range(1, 5):
            columns = [column for column in range(tensor.columns) if column_bands[column] == y]
            size = len(rows) * len(columns) * tensor.group
            if size == 0:
                continue
            for cell in read_set(stream, size, stream.count(block_counts)):
                cell, within = divmod(cell, tensor.group)
                row, column = divmod(cell, len(columns))
                place = rows[row] * tensor.columns + columns[column]
                chosen.append(place * tensor.group + within)
    return chosen


def read_bands(stream: Stream, number: int) -> list[int]:
    model = contexts(20)
    bands = []
    before = 0
    for _ in range(number):
        found = 0
        while found < 4 and stream.bit(model[4 * before + found]) == 0:
            found += 1
        bands.append(found)
        before = found
    return bands


def read_set(stream: Stream, size: int, n: int) -> list[int]:
    """The n chosen of so many cells, in increasing order."""
    require(n <= size, "more cells chosen than there are")
    if n == 0:
        return []
    if n == size:
        return list(range(size))
    step = 0
    while size // n >> (step + 2) > 0:
        step += 1
    table = Table(uniform_counts(size, n, step))
    cells = []
    next_cell = 0
    for _ in range(n):
        next_cell += read_gap(stream, table, step)
        require(next_cell < size, "a cell beyond the last")
        cells.append(next_cell)
        next_cell += 1
    return cells


def read_gap(stream: Stream, table: Table, step: int) -> int:
    steps = 0
    symbol = 15
    while symbol == 15:
        symbol = stream.symbol(table)
        table.add(symbol, 32)
        steps += symbol
    table.end_item()
    return (steps << step) + stream.number(step)


def uniform_counts(size: int, n: int, step: int) -> list[int]:
    """How often each symbol comes among 256 gaps of a uniform set, times 32."""
    while size >= 2**31:
        size >>= 1
        n = min((n + 1) >> 1, size)
    empty = ((size - n) << 30) // size
    for _ in range(step):
        empty = empty * empty >> 30
    counts = []
    left = 8192 << 30
    for _ in range(15):
        further = (left >> 30) * empty
        counts.append(max((left - further) >> 30, 1))
        left = further
    return [*counts, max(left >> 30, 1)]


def read_chunks(stream: Stream, message: Message, tensors: list[Tensor]) -> list[int]:
    """Coordinates of which each chunk sends n."""
    d = message.header.d
    s = stream.number(5)
    n = stream.number(s)
    require(6 <= s <= 16 and n > 0, "a chunk of a wrong length, or one that sends nothing")
    chunks, rest = divmod(d, 2**s)
    require(chunks * n + min(n, rest) == message.header.k, "not k coordinates")
    counts = contexts(19 * 32)
    indices: list[int] = []
    at = room = left = 0
    for tensor in tensors:
        width = tensor.columns * tensor.group
        sums = [2 * place for place in range(width + 1)]
        sent = [0] * width
        for row in range(tensor.rows):
            start = at
            while at < start + width:
                if room == 0:
                    room = min(2**s, d - at)
                    left = min(n, room)
                size = min(start + width - at, room)
                count = read_count(stream, counts, left, room, size)
                first = at - start
                for place in read_places(stream, sums, first, first + size, count):
                    indices.append(start + place)
                    sent[place] += 1
                at, left, room = at + size, left - count, room - size
            if row + 1 in (1, 2, 4, 8) or (row + 1) % 16 == 0:
                sums = [0]
                for already in sent:
                    sums.append(sums[-1] + 2 + already)
    return indices


def read_count(stream: Stream, counts: list[Context], left: int, room: int, size: int) -> int:
    """How many coordinates of a piece are sent."""
    row = 32 * min((4 * left * size // room).bit_length(), 18)
    high = min(left, size)
    for i in range(max(left - (room - size), 0), high):
        if stream.bit(counts[row + min(i, 31)]):
            return i
    return high


def read_places(stream: Stream, sums: list[int], first: int, stop: int, count: int) -> list[int]:
    """The places of a piece that are sent, counted from the start of the row."""
    places = []
    for j in range(count, 0, -1):
        place = first if stop - first == j else read_place(stream, sums, first, stop, j)
        require(place + j <= stop, "a position that leaves no place for the others")
        places.append(place)
        first = place + 1
    return places


def read_place(stream: Stream, sums: list[int], first: int, stop: int, j: int) -> int:
    scale = 2**50 // (sums[stop] - sums[first])

    def edge(y: int) -> int:
        if y == first:
            return 0
        share, power, left = (sums[stop] - sums[y]) * scale >> 26, 2**24, j
        while left > 0:
            if left % 2 == 1:
                power = power * share >> 24
            share = share * share >> 24
            left >>= 1
        return y - first + ((2**24 - (stop - first)) * (2**24 - power) >> 24)

    unit = stream.span >> 24
    share = min(stream.code // unit, 2**24 - 1)
    place = max(y for y in range(first, stop) if edge(y) <= share)
    stream.narrow(unit * edge(place), unit * (edge(place + 1) - edge(place)))
    return place


# Section 1: bases


def read_basis(message: Message, section: bytes, shapes: Sequence[Sequence[int]]) -> None:
    header = message.header
    if header.where == ROTATED:
        message.key, message.size = struct.unpack("<qI", section)
        require(message.size.bit_count() == 1, "the size of a block is no power of two")
        count = sum(n for _, n in rotated_blocks(header.d, message.size))
    else:
        (message.rank,) = struct.unpack("<I", section)
        require(message.rank >= 1, "a rank of 0")
        count = sum(length for *_, length in factors(shapes, message.rank))
    require(header.k == count, "k is not the number of coordinates of the basis")


def rotated_blocks(d: int, size: int) -> list[tuple[int, int]]:
    """The numbers of the vector in each block, and its length with zeros."""
    blocks = [(size, size)] * (d // size)
    if rest := d % size:
        blocks.append((rest, 1 << (rest - 1).bit_length()))
    return blocks


def factors(shapes: Sequence[Sequence[int]], rank: int) -> list[tuple[int, int, int, int]]:
    """Rows, columns, rank and number of values of each tensor; rank 0 for one that is sent as it is."""
    found = []
    for shape in shapes:
        rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 0 else (1, 1)
        own = min(rank, rows, columns)
        if len(shape) >= 2 and (rows + columns) * own < rows * columns:
            found.append((rows, columns, own, (rows + columns) * own))
        else:
            found.append((rows, columns, 0, rows * columns))
    return found


# Sections 2 and 3: values


def read_heads(message: Message, section: bytes, tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Sign and magnitude of every coded value."""
    k = message.header.k
    if k == 0:
        require(not section, "section 2 must be empty")
        return []
    levels = message.header.kind >= LEVELS8
    highest = HIGHEST[message.header.kind]
    if message.top is not None:
        highest = min(highest, message.top)
    stream = Stream(section)
    lowest = stream.number(15)
    spread = stream.number(15)
    require(lowest + spread <= highest, "the highest value is not finite, or exceeds top")
    copied = max(spread.bit_length() - 8, 0)
    table = Table([1] * ((spread >> copied) + 1))
    rows = row_contexts(message.indices if message.indices is not None else range(k), tensors)
    heads = []
    for row in rows:
        symbol = stream.symbol(table)
        table.add(symbol, 32)
        table.add(symbol - 1, 16)
        table.add(symbol + 1, 16)
        table.end_item()
        magnitude = lowest + (symbol << copied) + stream.number(copied)
        require(magnitude <= highest, "a value is not finite, or exceeds top")
        signed = not levels or magnitude != 0 or lowest == spread == 0
        heads.append((stream.bit(row) if signed else 0, magnitude))
    stream.end()
    return heads


def read_levels(message: Message, section: bytes, tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Sign and magnitude of every level of the kinds 5 and 6."""
    k, top, is_few = message.header.k, message.top, message.header.kind == FEW
    least = 0 if is_few else 1
    if k == 0:
        require(not section, "section 2 must be empty")
        return []
    assert top is not None
    stream = Stream(section)
    bits = (top - least).bit_length()
    magnitudes, differences = contexts(8 * 2**bits), contexts(17)
    signs: dict[tuple[int, int], Context] = {}
    votes: dict[tuple[str, int, int], int] = {}
    mean, lead, heads = 32768, 0, []
    for number, row, column in lines(message.indices if message.indices is not None else range(k), tensors):
        node = 1
        for _ in range(bits):
            node = 2 * node + stream.bit(magnitudes[(mean >> 13) * 2**bits + node])
        magnitude = node - 2**bits + least
        require(magnitude <= top, "a value exceeds top")
        mean += ((magnitude - least) * (65535 // max(top - least, 1)) >> 3) - (mean >> 3)
        if magnitude == 0:
            heads.append((0, 0))
            continue
        of_row = signs.setdefault((number, row), Context())
        if is_few and lead >= FINAL:
            heads.append((stream.bit(of_row), magnitude))
            continue
        R, C = votes.get(("row", number, row), 0), votes.get(("column", number, column), 0)
        which = expected = 0
        if R != 0 and C != 0:
            which, expected = abs(R).bit_length() + abs(C).bit_length(), int((R < 0) != (C < 0))
        of_votes = differences[which]
        p, q = of_votes.p, of_row.p
        if lead > 0:
            sign = stream.bit(of_row)
            of_votes.learn(sign ^ expected)
        else:
            sign = stream.bit(of_votes) ^ expected
        if not is_few or lead > -FINAL:
            if lead <= 0:
                of_row.learn(sign)
            u = 65536 - p if sign ^ expected else p
            v = 65536 - q if sign else q
            lead += (u * u >> 16) - (v * v >> 16)
        s = -1 if sign else 1
        if R == C == 0:
            R_next, C_next = s, 1
        else:
            R_next, C_next = clip(R + s * clip(C, 8), 255), clip(C + s * clip(R, 8), 255)
        votes["row", number, row], votes["column", number, column] = R_next, C_next
        heads.append((sign, magnitude))
    stream.end()
    return heads


def clip(number: int, most: int) -> int:
    return max(-most, min(number, most))


def lines(indices: Sequence[int], tensors: list[Tensor]) -> Iterator[tuple[int, int, int]]:
    """For every coordinate the number of its tensor, its row and its column."""
    starts = [tensor.start for tensor in tensors]
    for index in indices:
        number = bisect_right(starts, index) - 1
        place = (index - starts[number]) // tensors[number].group
        yield number, *divmod(place, tensors[number].columns)


def row_contexts(indices: Sequence[int], tensors: list[Tensor]) -> list[Context]:
    """For every coordinate the context of the row in which it lies."""
    rows = [contexts(tensor.rows) for tensor in tensors]
    return [rows[number][row] for number, row, _ in lines(indices, tensors)]


def read_scales(message: Message, section: bytes) -> None:
    message.block, message.top = struct.unpack_from("<IH", section)
    message.scales = split_numbers(section[6:], 4)
    require(all(finite(scale, FP32) for scale in message.scales), "a scale is not finite")
    require(
        message.header.kind not in (PER_LEVEL, FEW) or 1 <= message.top <= 127, "top is not from 1 to 127"
    )


def join(kind: int, heads: list[tuple[int, int]], section: bytes) -> list[int]:
    """The values from their signs and magnitudes, and for floats their lower bytes, which are copied."""
    if kind >= LEVELS8:
        return [-magnitude if sign else magnitude for sign, magnitude in heads]
    upper = [sign << 15 | magnitude for sign, magnitude in heads]
    if kind == BF16:
        return upper
    width = {FP32: 2, FP64: 6}[kind]
    lower = split_numbers(section, width)
    return [high << 8 * width | low for high, low in zip(upper, lower, strict=True)]


def finite(pattern: int, kind: int) -> bool:
    magnitude = pattern >> {FP32: 16, FP64: 48}[kind] & 0x7FFF
    return magnitude <= HIGHEST[kind]


def split_numbers(section: bytes, width: int) -> list[int]:
    """Numbers of so many bytes each, little endian."""
    return [int.from_bytes(section[i : i + width], "little") for i in range(0, len(section), width)]


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
