"""A range coder: numbers of known probability <-> bytes, in integers only. docs/wire.md specifies it.

The encoder holds an interval [low, low + span) of 64-bit integers and narrows it with every bit. The decoder
holds `code`: how far the message lies above low. When the span falls below 2^32, a word of 32 bits is settled
and moves out. `coder` is (position in the words, low or code, span): it goes in and comes out, so that the
compiler keeps it in registers.

A bit is coded with the probability that its context has learned. A context is one integer: the probability
of a 1 in units of 2^-16, times 256, plus the number of bits seen so far (up to LIMIT).

A symbol, one of up to 256, is coded with a table of frequencies that is rebuilt from time to time. `counts`
says how often each symbol has come, in units of SEEN. `sums` are the frequencies added up, from 0 to TOTAL:
symbol s has the share from sums[s] to sums[s + 1]. `jump` says at which symbol a decoder starts to look for a
share.
"""

from __future__ import annotations

import math

import numpy as np

from cfedavg.core.kernel import Int, kernel
from cfedavg.wire.header import WireError

Coder = tuple[Int, Int, Int]

LIMIT = 255  # from here on a context forgets the oldest bits
CERTAIN = 32  # no probability comes closer to 0 or 1 than 32 / 2^16
EVEN = 32768 << 8  # a context that knows nothing
# The n-th bit moves a probability by 1 / (n + 1.5) of the way: the estimate (ones + 1/4) / (bits + 1/2).
RATE = np.array([131072 // (2 * n + 3) for n in range(LIMIT + 1)], np.int64)

WORD = np.uint64(32)
MANY = np.uint64(1 << 32)
UNIT = np.uint64(16)
COUNT_CONTEXTS = 48

BITS = 16
TOTAL = 1 << BITS
SEEN = 32  # what a symbol that has come counts, against 1 for one that has not
FIRST, LONGEST = 16, 128  # symbols until a table is rebuilt: at first; then twice as many, up to LONGEST


@kernel
def learn(context: Int, bit: Int) -> Int:
    """Return the context after it has seen a bit."""
    p, n = context >> 8, context & 255
    if bit:
        p = min(p + (((65536 - p) * RATE[n]) >> 16), 65536 - CERTAIN)
    else:
        p = max(p - ((p * RATE[n]) >> 16), CERTAIN)
    return (p << 8) | min(n + 1, LIMIT)


@kernel
def new_contexts(n: Int) -> np.ndarray:
    """Return contexts that know nothing."""
    contexts = np.empty(n, np.int64)
    for i in range(n):
        contexts[i] = EVEN
    return contexts


@kernel
def start_encoding() -> Coder:
    return np.int64(0), np.uint64(0), ~np.uint64(0)


@kernel
def narrow(words: np.ndarray, coder: Coder, above: Int, span: Int) -> Coder:
    """Keep the part of the interval that begins `above` its lower end and is `span` wide."""
    position, low, _ = coder
    end = low + above
    if end < low:  # past 2^64: one more in the words that have moved out
        back = position - 1
        words[back] += np.uint32(1)
        while words[back] == 0:
            back -= 1
            words[back] += np.uint32(1)
    if span < MANY:
        words[position] = np.uint32(end >> WORD)
        return position + 1, end << WORD, span << WORD
    return position, end, span


@kernel
def put_bit(words: np.ndarray, coder: Coder, contexts: np.ndarray, which: Int, bit: Int) -> Coder:
    """Encode a bit with the probability that contexts[which] gives it."""
    span = coder[2]
    one = (span >> UNIT) * np.uint64(contexts[which] >> 8)
    contexts[which] = learn(contexts[which], bit)
    if bit:
        return narrow(words, coder, np.uint64(0), one)
    return narrow(words, coder, one, span - one)


@kernel
def put_number(words: np.ndarray, coder: Coder, number: Int, bits: Int) -> Coder:
    """Encode a number of `bits` bits, all equally likely: 16 bits at a time, the upper ones first."""
    while bits:
        part = min(bits, 16)
        bits -= part
        span = coder[2] >> np.uint64(part)
        coder = narrow(words, coder, span * np.uint64((number >> bits) & ((1 << part) - 1)), span)
    return coder


@kernel
def put_count(words: np.ndarray, coder: Coder, contexts: np.ndarray, number: Int) -> Coder:
    """Encode a number from 0 up: the length of number + 1, then the bits below its top."""
    below = 0
    while (number + 1) >> (below + 1):
        coder = put_bit(words, coder, contexts, below, 0)
        below += 1
    coder = put_bit(words, coder, contexts, below, 1)
    return put_number(words, coder, number + 1 - (1 << below), below)


@kernel
def bits_so_far(coder: Coder) -> float:
    """Return about how many bits have been encoded."""
    bits: float = 32.0 * coder[0] + 64.0 - math.log2(coder[2])
    return bits


@kernel
def finish(words: np.ndarray, coder: Coder) -> Int:
    """Settle the last two words, on the number with the most zeros; return the number of words."""
    position, low, span = coder
    for zeros in range(63, -1, -1):
        mask = (np.uint64(1) << np.uint64(zeros)) - np.uint64(1)
        above = ((low + mask) & ~mask) - low
        if above < span:
            break
    position, low, _ = narrow(words, coder, above, MANY)
    words[position] = np.uint32(low >> WORD)
    words[position + 1] = np.uint32(low)
    return position + 2


@kernel
def word_at(words: np.ndarray, position: Int) -> Int:
    """Return a word; zeros follow the last one."""
    return np.uint64(words[position]) if position < len(words) else np.uint64(0)


@kernel
def start_decoding(words: np.ndarray) -> Coder:
    return np.int64(2), (word_at(words, 0) << WORD) | word_at(words, 1), ~np.uint64(0)


@kernel
def widen(words: np.ndarray, position: Int, code: Int, span: Int) -> Coder:
    """Read another word when the span has become small."""
    if span < MANY:
        return position + 1, (code << WORD) | word_at(words, position), span << WORD
    return position, code, span


@kernel
def take_bit(words: np.ndarray, coder: Coder, contexts: np.ndarray, which: Int) -> tuple[Int, Coder]:
    """Decode what put_bit has encoded."""
    position, code, span = coder
    one = (span >> UNIT) * np.uint64(contexts[which] >> 8)
    bit = 1 if code < one else 0
    contexts[which] = learn(contexts[which], bit)
    if bit:
        return 1, widen(words, position, code, one)
    return 0, widen(words, position, code - one, span - one)


@kernel
def take_number(words: np.ndarray, coder: Coder, bits: Int) -> tuple[Int, Coder]:
    """Decode what put_number has encoded."""
    number = 0
    while bits:
        part = min(bits, 16)
        bits -= part
        position, code, span = coder
        span = span >> np.uint64(part)
        digit = min(code // span, (np.uint64(1) << np.uint64(part)) - np.uint64(1))
        coder = widen(words, position, code - digit * span, span)
        number = (number << part) | np.int64(digit)
    return number, coder


@kernel
def take_count(words: np.ndarray, coder: Coder, contexts: np.ndarray) -> tuple[Int, Coder]:
    """Decode what put_count has encoded, up to 2^48 - 2."""
    below = 0
    bit, coder = take_bit(words, coder, contexts, below)
    while not bit and below < COUNT_CONTEXTS - 1:
        below += 1
        bit, coder = take_bit(words, coder, contexts, below)
    number, coder = take_number(words, coder, below)
    return number + (1 << below) - 1, coder


@kernel
def make_sums(counts: np.ndarray, sums: np.ndarray) -> None:
    """Set the frequencies: in proportion to the counts, at least 1; the last symbol takes what is left."""
    n, total = len(counts), 0
    for s in range(n):
        total += counts[s]
    share = ((TOTAL - n) << 32) // total
    sums[0] = 0
    for s in range(n - 1):
        sums[s + 1] = sums[s] + 1 + ((counts[s] * share) >> 32)
    sums[n] = TOTAL


@kernel
def make_jumps(sums: np.ndarray, jump: np.ndarray, bits: Int) -> None:
    """Set, for each of 2^bits parts of TOTAL, the symbol in whose share the part begins."""
    shift = BITS - bits
    for i in range(1 << bits):
        jump[i] = 0
    for s in range(len(sums) - 1):  # the first part that begins in the share of s or of a later symbol
        part = (sums[s] + (1 << shift) - 1) >> shift
        if part < 1 << bits:
            jump[part] = s
    for i in range(1, 1 << bits):
        jump[i] = max(jump[i], jump[i - 1])


@kernel
def count_symbol(counts: np.ndarray, symbol: Int) -> None:
    """Count a symbol, and its two neighbours half: they are more likely too."""
    counts[symbol] += SEEN
    if symbol > 0:
        counts[symbol - 1] += SEEN // 2
    if symbol + 1 < len(counts):
        counts[symbol + 1] += SEEN // 2


@kernel
def rebuild(counts: np.ndarray, sums: np.ndarray, due: Int) -> Int:
    """Rebuild the table after `due` symbols, and forget a little; return when to do it again."""
    make_sums(counts, sums)
    if due < LONGEST:
        return 2 * due
    for s in range(len(counts)):
        counts[s] = max(counts[s] - (counts[s] >> 2), 1)
    return due + LONGEST


@kernel
def put_symbol(words: np.ndarray, coder: Coder, sums: np.ndarray, symbol: Int) -> Coder:
    """Encode a symbol."""
    unit = coder[2] >> np.uint64(BITS)
    below = np.uint64(sums[symbol])
    return narrow(words, coder, unit * below, unit * (np.uint64(sums[symbol + 1]) - below))


@kernel
def take_symbol(
    words: np.ndarray, coder: Coder, sums: np.ndarray, jump: np.ndarray, bits: Int
) -> tuple[Int, Coder]:
    """Decode what put_symbol has encoded; `jump` is of 2^bits parts."""
    position, code, span = coder
    unit = span >> np.uint64(BITS)
    share = np.int64(min(code // unit, np.uint64(TOTAL - 1)))
    symbol = np.int64(jump[share >> (BITS - bits)])
    while sums[symbol + 1] <= share:
        symbol += 1
    below = np.uint64(sums[symbol])
    width = np.uint64(sums[symbol + 1]) - below
    return symbol, widen(words, position, code - unit * below, unit * width)


def to_bytes(words: np.ndarray, n: int) -> bytes:
    """Return the first n words, upper byte first, without the zeros at the end of the last two.

    The decoder reads those zeros anyway. Earlier zeros stay, so that a decoder can tell a stream cut short.
    """
    data = words[:n].astype(">u4").tobytes()
    return data[:-8] + data[-8:].rstrip(b"\0")


def to_words(section: memoryview) -> np.ndarray:
    """Return the words of a section, filled up with zeros."""
    data = bytes(section)
    return np.frombuffer(data + bytes(-len(data) % 4), ">u4").astype(np.uint32)


def check_end(section: memoryview, words: int, name: str) -> None:
    """Raise WireError unless a section has a length that a stream of `words` words can have."""
    least = 4 * words - 8
    if len(section) < least:
        raise WireError(f"the section of the {name} ends too early")
    if len(section) > 4 * words or (len(section) > least and section[-1] == 0):
        raise WireError(f"the section of the {name} goes on after its end")
