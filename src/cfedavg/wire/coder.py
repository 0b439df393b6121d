"""A range coder: functions that turn numbers of known probability into bytes and back, by integer arithmetic.

docs/wire.md specifies the format. The encoder holds an interval [low, low + span) of 64-bit integers and
narrows the interval with every bit. The decoder holds `code`: the number that the message encodes, minus low.
When the span falls below 2^32, the encoder writes a word of 32 bits, or the decoder reads one. `coder` is
the tuple (position, low, span) in the encoder and (position, code, span) in the decoder. The position is that
of the next word. Functions take `coder` and return the next `coder`, so that the compiler keeps the three
numbers in registers.

A bit is coded with the probability that its context has learned. A context is one integer: the probability
of a 1 in units of 2^-16, times 256, plus the number of bits seen so far (at most LIMIT).

A symbol, one of at most 256, is coded with a table of frequencies that is rebuilt from time to time.
counts[s] grows by SEEN each time symbol s is coded. `sums` holds the cumulative frequencies, from 0 to TOTAL:
symbol s has the range from sums[s] to sums[s + 1]. The decoder gets a number from 0 to TOTAL - 1 and searches
for the symbol whose range contains the number. The lookup table `jump` says where the search starts.
"""

from __future__ import annotations

import numpy as np

from cfedavg.core.kernels import WORD64, Int, helper, int64, table, uint32, uint64
from cfedavg.wire.frame import WireError

Array = np.ndarray
Coder = tuple[Int, Int, Int]

LIMIT = 255  # after this many bits, a context gives older bits less weight
CERTAIN = 32  # every probability is at least 32 / 2^16 away from 0 and from 1
EVEN = 32768 << 8  # a context that has seen no bit: probability 1/2
# After n bits, a bit moves the probability by 1 / (n + 1.5) of its distance to that bit.
# The probability of a 1 is then (ones + 1/4) / (bits + 1/2).
RATE = table([131072 // (2 * n + 3) for n in range(LIMIT + 1)])

WORD = uint64(32)
MANY = uint64(1 << 32)
UNIT = uint64(16)
ZERO = uint64(0)
START = int64(0), ZERO, WORD64  # the `coder` of an encoder that has written nothing
COUNT_CONTEXTS = 48

MAGNITUDE = 15  # bits of the magnitude of a coded number; its sign is the bit above them
MASK = (1 << MAGNITUDE) - 1

BITS = 16
TOTAL = 1 << BITS
SEEN = 32  # a symbol adds this to its count each time it is coded; counts begin at 1
FIRST, LONGEST = 16, 128  # a table is rebuilt after FIRST numbers, 2 FIRST, 4 FIRST, ...; then every LONGEST


@helper
def learn(context: Int, bit: Int) -> Int:
    """Update `context`, an adaptive probability, after a coded `bit`; return the new context."""
    p, n = context >> 8, context & 255
    if bit:
        p = min(p + (((65536 - p) * RATE[n]) >> 16), 65536 - CERTAIN)
    else:
        p = max(p - ((p * RATE[n]) >> 16), CERTAIN)
    return (p << 8) | min(n + 1, LIMIT)


@helper
def narrow(words: Array, coder: Coder, above: Int, span: Int) -> Coder:
    """Narrow the encoder's interval to `span` integers from low + above on; write a word if `span` < 2^32."""
    position, low, _ = coder
    end = (low + above) & WORD64
    if end < low:  # overflow past 2^64: carry 1 into the words already written
        back = position - 1
        while words[back] == 0xFFFFFFFF:
            words[back] = 0
            back -= 1
        words[back] += 1
    if span < MANY:
        words[position] = uint32(end >> WORD)
        return position + 1, (end << WORD) & WORD64, span << WORD
    return position, end, span


@helper
def put_bit(words: Array, coder: Coder, contexts: Array, which: Int, bit: Int) -> Coder:
    """Encode a bit with the probability in contexts[which], and update that probability."""
    span = coder[2]
    one = (span >> UNIT) * uint64(contexts[which] >> 8)
    contexts[which] = learn(contexts[which], bit)
    if bit:
        return narrow(words, coder, ZERO, one)
    return narrow(words, coder, one, span - one)


@helper
def put_number(words: Array, coder: Coder, number: Int, bits: Int) -> Coder:
    """Encode a number of `bits` bits, 16 bits at a time, upper bits first; all numbers are equally likely."""
    while bits:
        part = min(bits, 16)
        bits -= part
        span = coder[2] >> uint64(part)
        coder = narrow(words, coder, span * uint64((number >> bits) & ((1 << part) - 1)), span)
    return coder


@helper
def put_count(words: Array, coder: Coder, contexts: Array, number: Int) -> Coder:
    """Encode a number of at least 0.

    First encode the bit length of number + 1. Then encode the bits of number + 1 below its leading 1.
    """
    below = 0
    while (number + 1) >> (below + 1):
        coder = put_bit(words, coder, contexts, below, 0)
        below += 1
    coder = put_bit(words, coder, contexts, below, 1)
    return put_number(words, coder, number + 1 - (1 << below), below)


@helper
def finish(words: Array, coder: Coder) -> Int:
    """Write the last two words; return the number of all words written.

    Any number in the interval would do for the decoder. The one that ends in the most zero bits is written,
    because `to_bytes` leaves out zero bytes at the end.
    """
    position, low, span = coder
    for zeros in range(63, -1, -1):
        mask = (uint64(1) << uint64(zeros)) - uint64(1)
        above = (((low + mask) & ~mask) - low) & WORD64
        if above < span:
            break
    position, low, _ = narrow(words, coder, above, MANY)
    words[position] = uint32(low >> WORD)
    words[position + 1] = uint32(low & (MANY - uint64(1)))
    return position + 2


@helper
def word_at(words: Array, position: Int) -> Int:
    """Return the word at `position`, or 0 if `words` ends before it."""
    return uint64(words[position]) if position < len(words) else uint64(0)


@helper
def start_decoding(words: Array) -> Coder:
    return int64(2), (word_at(words, 0) << WORD) | word_at(words, 1), WORD64


@helper
def widen(words: Array, position: Int, code: Int, span: Int) -> Coder:
    """Return the decoder's next `coder`. If `span` is below 2^32, append the next word to `code` first."""
    if span < MANY:
        return position + 1, ((code << WORD) & WORD64) | word_at(words, position), span << WORD
    return position, code, span


@helper
def take_bit(words: Array, coder: Coder, contexts: Array, which: Int) -> tuple[Int, Coder]:
    """Decode a bit that `put_bit` encoded; return the bit and the next `coder`."""
    position, code, span = coder
    one = (span >> UNIT) * uint64(contexts[which] >> 8)
    bit = 1 if code < one else 0
    contexts[which] = learn(contexts[which], bit)
    if bit:
        return 1, widen(words, position, code, one)
    return 0, widen(words, position, code - one, span - one)


@helper
def take_number(words: Array, coder: Coder, bits: Int) -> tuple[Int, Coder]:
    """Decode a number that `put_number` encoded; return the number and the next `coder`."""
    number = 0
    while bits:
        part = min(bits, 16)
        bits -= part
        position, code, span = coder
        span = span >> uint64(part)
        digit = min(code // span, (uint64(1) << uint64(part)) - uint64(1))
        coder = widen(words, position, (code - digit * span) & WORD64, span)
        number = (number << part) | int64(digit)
    return number, coder


@helper
def take_count(words: Array, coder: Coder, contexts: Array) -> tuple[Int, Coder]:
    """Decode a number (at most 2^48 - 2) that `put_count` encoded; return the number and the next `coder`."""
    below = 0
    bit, coder = take_bit(words, coder, contexts, below)
    while not bit and below < COUNT_CONTEXTS - 1:
        below += 1
        bit, coder = take_bit(words, coder, contexts, below)
    number, coder = take_number(words, coder, below)
    return number + (1 << below) - 1, coder


@helper
def make_sums(counts: Array, sums: Array) -> None:
    """Set `sums` to the cumulative frequencies of the symbols, computed from their counts.

    A symbol's frequency is about proportional to its count, and at least 1. All frequencies add up to TOTAL:
    the last symbol gets what the others leave.
    """
    n = len(counts)
    share = ((TOTAL - n) << 32) // sum(counts)
    sums[0] = 0
    for s in range(n - 1):
        sums[s + 1] = sums[s] + 1 + ((counts[s] * share) >> 32)
    sums[n] = TOTAL


@helper
def make_jumps(sums: Array, jump: Array, bits: Int) -> None:
    """Fill `jump`, the decoder's lookup table of 2^bits entries.

    Entry i is the symbol s whose range, from sums[s] to sums[s + 1], contains the number i * TOTAL / 2^bits.
    """
    shift = BITS - bits
    for i in range(1 << bits):
        jump[i] = 0
    for s in range(len(sums) - 1):  # `part`: the first entry whose number is sums[s] or more
        part = (sums[s] + (1 << shift) - 1) >> shift
        if part < 1 << bits:
            jump[part] = s
    for i in range(1, 1 << bits):
        jump[i] = max(jump[i], jump[i - 1])


@helper
def rebuild(counts: Array, sums: Array, due: Int) -> Int:
    """Rebuild `sums` from `counts`; return how many numbers will have been coded at the next rebuild.

    `due` is how many numbers have been coded so far. From LONGEST on, each rebuild also reduces all counts by
    a quarter.
    """
    make_sums(counts, sums)
    if due < LONGEST:
        return 2 * due
    for s in range(len(counts)):
        counts[s] = max(counts[s] - (counts[s] >> 2), 1)
    return due + LONGEST


@helper
def put_symbol(words: Array, coder: Coder, sums: Array, symbol: Int) -> Coder:
    """Encode a symbol with the frequencies in `sums`."""
    unit = coder[2] >> uint64(BITS)
    below = uint64(sums[symbol])
    return narrow(words, coder, unit * below, unit * (uint64(sums[symbol + 1]) - below))


@helper
def take_symbol(words: Array, coder: Coder, sums: Array, jump: Array, bits: Int) -> tuple[Int, Coder]:
    """Decode a symbol that `put_symbol` encoded; return the symbol and the next `coder`.

    `jump` is the lookup table of `make_jumps`, with 2^bits entries.
    """
    position, code, span = coder
    unit = span >> uint64(BITS)
    share = int64(min(code // unit, uint64(TOTAL - 1)))
    symbol = int64(jump[share >> (BITS - bits)])
    while sums[symbol + 1] <= share:
        symbol += 1
    below = uint64(sums[symbol])
    width = uint64(sums[symbol + 1]) - below
    return symbol, widen(words, position, (code - unit * below) & WORD64, unit * width)


def to_bytes(words: Array, n: int) -> bytes:
    """Return the first n words as big-endian bytes, without zero bytes at the end of the last two words.

    The decoder reads zeros after the last byte, so these bytes are not needed. The zero bytes of earlier
    words stay, so that a decoder detects a section that was cut short.
    """
    data = words[:n].astype(">u4").tobytes()
    return data[:-8] + data[-8:].rstrip(b"\0")


def to_words(section: memoryview) -> Array:
    """Return the bytes of a section as words; zero bytes fill up the last word."""
    data = bytes(section)
    return np.frombuffer(data + bytes(-len(data) % 4), ">u4").astype(np.uint32)


def check_end(section: memoryview, words: int, name: str) -> None:
    """Raise WireError if a section is too short or too long for the `words` words that its decoder read.

    `name` says in the error what the section holds.
    """
    least = 4 * words - 8
    if len(section) < least:
        raise WireError(f"the section of the {name} ends too early")
    if len(section) > 4 * words or (len(section) > least and section[-1] == 0):
        raise WireError(f"the section of the {name} has extra bytes at its end")
