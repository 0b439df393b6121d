"""A range coder: numbers of known probability <-> bytes, in integers only. docs/wire.md specifies it.

The encoder holds an interval [low, low + span) of 64-bit integers and narrows it with every bit; the
decoder holds `code`, how far the message lies above low. When the span falls below 2^32, a word of 32
bits is settled and moves out. `coder` is (position in the words, low or code, span): it goes in and
comes out, so that the compiler keeps it in registers.

A bit is coded with the probability that its context has learned. A context is one integer: the
probability of a 1 in units of 2^-16, times 256, plus the number of bits seen so far (up to LIMIT).
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


@kernel
def learned(context: Int, bit: Int) -> Int:
    """The context after it has seen a bit."""
    p, n = context >> 8, context & 255
    if bit:
        p = min(p + (((65536 - p) * RATE[n]) >> 16), 65536 - CERTAIN)
    else:
        p = max(p - ((p * RATE[n]) >> 16), CERTAIN)
    return (p << 8) | min(n + 1, LIMIT)


@kernel
def new_contexts(n: Int) -> np.ndarray:
    """Contexts that know nothing."""
    contexts = np.empty(n, np.int64)
    for i in range(n):
        contexts[i] = EVEN
    return contexts


@kernel
def start_encoding() -> Coder:
    return np.int64(0), np.uint64(0), ~np.uint64(0)


@kernel
def narrow(words: np.ndarray, coder: Coder, above: Int, span: Int) -> Coder:
    """The part of the interval that begins `above` its lower end and is `span` wide."""
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
    """Encodes a bit with the probability that contexts[which] gives it."""
    span = coder[2]
    one = (span >> UNIT) * np.uint64(contexts[which] >> 8)
    contexts[which] = learned(contexts[which], bit)
    if bit:
        return narrow(words, coder, np.uint64(0), one)
    return narrow(words, coder, one, span - one)


@kernel
def put_number(words: np.ndarray, coder: Coder, number: Int, bits: Int) -> Coder:
    """Encodes a number of so many bits, all equally likely; 16 bits at a time, the upper ones first."""
    while bits:
        part = min(bits, 16)
        bits -= part
        span = coder[2] >> np.uint64(part)
        coder = narrow(words, coder, span * np.uint64((number >> bits) & ((1 << part) - 1)), span)
    return coder


@kernel
def put_count(words: np.ndarray, coder: Coder, contexts: np.ndarray, number: Int) -> Coder:
    """A number from 0 up, small ones shorter: the length of number + 1, then the bits below its top."""
    below = 0
    while (number + 1) >> (below + 1):
        coder = put_bit(words, coder, contexts, below, 0)
        below += 1
    coder = put_bit(words, coder, contexts, below, 1)
    return put_number(words, coder, number + 1 - (1 << below), below)


@kernel
def spent(coder: Coder) -> float:
    """About how many bits have been encoded."""
    bits: float = 32.0 * coder[0] + 64.0 - math.log2(coder[2])
    return bits


@kernel
def finish(words: np.ndarray, coder: Coder) -> Int:
    """Settles the last two words, on the number with the most zeros; how many words there are."""
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
    """Zeros follow the last word."""
    return np.uint64(words[position]) if position < len(words) else np.uint64(0)


@kernel
def start_decoding(words: np.ndarray) -> Coder:
    return np.int64(2), (word_at(words, 0) << WORD) | word_at(words, 1), ~np.uint64(0)


@kernel
def widen(words: np.ndarray, position: Int, code: Int, span: Int) -> Coder:
    """Reads another word when the span has become small."""
    if span < MANY:
        return position + 1, (code << WORD) | word_at(words, position), span << WORD
    return position, code, span


@kernel
def take_bit(words: np.ndarray, coder: Coder, contexts: np.ndarray, which: Int) -> tuple[Int, Coder]:
    """Decodes what put_bit has encoded."""
    position, code, span = coder
    one = (span >> UNIT) * np.uint64(contexts[which] >> 8)
    bit = 1 if code < one else 0
    contexts[which] = learned(contexts[which], bit)
    if bit:
        return 1, widen(words, position, code, one)
    return 0, widen(words, position, code - one, span - one)


@kernel
def take_number(words: np.ndarray, coder: Coder, bits: Int) -> tuple[Int, Coder]:
    """Decodes what put_number has encoded."""
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
    """Decodes what put_count has encoded, up to 2^48 - 2."""
    below = 0
    bit, coder = take_bit(words, coder, contexts, below)
    while not bit and below < COUNT_CONTEXTS - 1:
        below += 1
        bit, coder = take_bit(words, coder, contexts, below)
    number, coder = take_number(words, coder, below)
    return number + (1 << below) - 1, coder


def to_bytes(words: np.ndarray, n: int) -> bytes:
    """The first n words, upper byte first. Zeros at the end of the last two, which `finish` settles, are left
    out: the decoder reads them anyway. Not those before, so that no stream is shorter than what it says."""
    data = words[:n].astype(">u4").tobytes()
    return data[:-8] + data[-8:].rstrip(b"\0")


def to_words(section: memoryview) -> np.ndarray:
    """The words of a section, filled up with zeros."""
    data = bytes(section)
    return np.frombuffer(data + bytes(-len(data) % 4), ">u4").astype(np.uint32)


def check_end(section: memoryview, words: int, name: str) -> None:
    """Raises WireError unless a section is as long as a stream of so many words can be."""
    least = 4 * words - 8
    if len(section) < least:
        raise WireError(f"the section of the {name} ends too early")
    if len(section) > 4 * words or (len(section) > least and section[-1] == 0):
        raise WireError(f"the section of the {name} goes on after its end")
