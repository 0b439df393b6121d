"""The two sections of a message that hold its values: entropy-coded numbers, and bytes copied uncoded.

The upper 16 bits of a float are coded (for bf16, these are all bits) and the other bits are copied. The sign
and the magnitude of a level are coded; the scales are copied. If all coordinates are sent, all bits of fp32
and fp64 values are copied unless the caller asks to code them: coding saves a fifth of the bytes and takes
many times as long.

Levels of few magnitudes, and those with a scale for each, have a coder of their own, in `levels`. That of all
other numbers is here.

A coded number is a sign and a magnitude of at most 15 bits. In a layer that follows a ReLU, most updates of
one unit have the same sign, so each row of a tensor has a context for its signs. Most magnitudes that top-k
keeps lie just above the smallest one, so the difference to the smallest is coded. The leading bits of the
difference are coded as a symbol with a learned frequency; the other bits are coded as equally likely.
"""

from __future__ import annotations

import numpy as np

from cfedavg.core.kernels import Int, helper, int64, integers, kernel
from cfedavg.core.payload import Floats, Levels, Payload
from cfedavg.wire import coder as rc
from cfedavg.wire.coder import MAGNITUDE, MASK, Array
from cfedavg.wire.coordinates import Matrices
from cfedavg.wire.frame import (
    DTYPES,
    LEAST_LEVEL,
    SCALES,
    Coding,
    Header,
    Kind,
    Where,
    WireError,
    may_be_plain,
)
from cfedavg.wire.levels import decode_levels, encode_levels

# The upper 16 bits of the largest finite float, or the largest level.
LARGEST = {
    Kind.FP32: 0x7F7F, Kind.FP64: 0x7FEF, Kind.BF16: 0x7F7F, Kind.INT8: 127, Kind.INT16: 32767,
    Kind.PER_LEVEL: 127, Kind.FEW: 127,
}  # fmt: skip
EVERYWHERE = np.empty(0, np.int64)  # stands for the indices of all coordinates

FEW = range(2, 16)  # `top` of levels that are sent as kind FEW: int3, int4 and int5 have 3, 7 and 15
LEADING = 8  # a symbol has at most this many bits
JUMPS = 7  # the decoder's table `jump` has 2^JUMPS entries


def kind_of(values: Floats | Levels) -> Kind:
    """Return the number format of the values, as the header names it."""
    if isinstance(values, Floats):
        return Kind[values.dtype.upper()]
    if values.per_level:
        return Kind.PER_LEVEL
    if values.levels.itemsize != 1:  # NumPy and torch name dtypes differently
        return Kind.INT16
    return Kind.FEW if values.top in FEW else Kind.INT8


def pack_values(
    payload: Payload, where: Where, matrices: Matrices, code_floats: bool
) -> tuple[Coding, bytes, bytes]:
    """Return how the values are coded, the section of coded values, and the section of copied values."""
    values, kind = payload.values, kind_of(payload.values)
    if isinstance(values, Levels):
        numbers, copied = _split_levels(values, kind)
        return Coding.CODED, _encode(numbers, kind, payload.indices, matrices, values.top), copied
    data, plain = np.ascontiguousarray(values.data, DTYPES[kind]), may_be_plain(where, kind)
    if not plain or code_floats:
        parts = data.view("<u2").reshape(len(data), data.itemsize // 2)
        upper = np.ascontiguousarray(parts[:, -1])
        coded = _encode(upper, kind, payload.indices, matrices, LARGEST[kind])
        copied = parts[:, :-1].tobytes()
        if not plain or len(coded) + len(copied) < data.nbytes:
            return Coding.CODED, coded, copied
    _check_finite(data, "value")
    return Coding.PLAIN, b"", data.tobytes()


def _split_levels(values: Levels, kind: Kind) -> tuple[Array, bytes]:
    """Return the levels as numbers to code, and the bytes to copy: `block`, `top` and the scales."""
    _check_top(values.top, kind)
    if not 0 <= values.block < 2**32:
        raise WireError(f"`block` must be from 0 to 2^32 - 1, got {values.block}")
    _check_finite(values.scales, "scale")
    # In 32 bits, since |-32768| does not fit int16. As 32768, it exceeds any `top`.
    magnitudes = np.abs(values.levels.astype(np.int32))
    if len(magnitudes) and magnitudes.max() > values.top:
        raise WireError(f"a level exceeds the largest magnitude, `top` = {values.top}")
    if values.per_level and not magnitudes.all():
        raise WireError("a level is 0, but each level must have one of the scales of its block")
    numbers = (magnitudes | (values.levels < 0).astype(np.int32) << MAGNITUDE).astype(np.uint16)
    return numbers, SCALES.pack(values.block, values.top) + values.scales.astype("<f4").tobytes()


def _check_top(top: int, kind: Kind) -> None:
    least = 1 if kind in LEAST_LEVEL else 0
    if not least <= top <= LARGEST[kind]:
        raise WireError(f"`top` must be from {least} to {LARGEST[kind]} for {kind.name} levels, got {top}")


def _check_finite(numbers: Array, name: str) -> None:
    if not np.isfinite(numbers).all():
        raise WireError(f"a {name} is not a finite number")


def _encode(numbers: Array, kind: Kind, indices: Array | None, matrices: Matrices, largest: int) -> bytes:
    if not len(numbers):
        return b""
    where = EVERYWHERE if indices is None else indices
    if kind in LEAST_LEVEL:  # a sign and each bit of a magnitude take at most 11 bits
        words = np.empty(len(numbers) * (1 + largest.bit_length()) * 11 // 32 + 64, np.uint32)
        n = encode_levels(words, numbers, where, matrices.shapes, LEAST_LEVEL[kind], largest)
    else:
        # A number takes at most 34 bits: 16 for the symbol, 7 for the other bits, 11 for the sign.
        words = np.empty(len(numbers) * 5 // 4 + 64, np.uint32)
        n = encode_numbers(words, numbers, where, matrices.row_ends, kind.is_float, largest)
    if n == 0:
        raise WireError("a value is not a finite number")
    return rc.to_bytes(words, n)


def unpack_values(
    coded: memoryview, copied: memoryview, header: Header, indices: Array | None, matrices: Matrices
) -> Floats | Levels:
    """Return the values of a message. The sections must come from `split_message`, which checks lengths."""
    kind = header.kind
    if not kind.is_float:
        block, top = SCALES.unpack_from(copied)
        _check_top(top, kind)
        scales = np.frombuffer(copied, "<f4", offset=SCALES.size).astype(np.float32)
        _check_finite(scales, "scale")
        numbers = _decode(coded, header, indices, matrices, top)
        signs = 1 - 2 * (numbers >> MAGNITUDE).astype(np.int16)
        levels = ((numbers & MASK).astype(np.int16) * signs).astype(DTYPES[kind])
        return Levels(levels, scales, block, top, per_level=kind is Kind.PER_LEVEL)
    if header.coding is Coding.PLAIN:
        data = np.frombuffer(copied, DTYPES[kind]).copy()
        _check_finite(data, "value")
    else:
        parts = np.empty((header.k, DTYPES[kind].itemsize // 2), "<u2")
        parts[:, :-1] = np.frombuffer(copied, "<u2").reshape(header.k, parts.shape[1] - 1)
        parts[:, -1] = _decode(coded, header, indices, matrices, LARGEST[kind])
        data = parts.reshape(-1).view(DTYPES[kind])
    return Floats(data, kind.name.lower())


def _decode(
    coded: memoryview, header: Header, indices: Array | None, matrices: Matrices, largest: int
) -> Array:
    numbers, is_float = np.empty(header.k, np.uint16), header.kind.is_float
    if not header.k:
        return numbers
    where = EVERYWHERE if indices is None else indices
    if header.kind in LEAST_LEVEL:
        least = LEAST_LEVEL[header.kind]
        words = decode_levels(rc.to_words(coded), numbers, where, matrices.shapes, least, largest)
    else:
        ends = matrices.row_ends
        words = decode_numbers(rc.to_words(coded), numbers, where, ends, is_float, largest)
    if words == 0:
        too_large = f"a level exceeds the largest magnitude, `top` = {largest}"
        raise WireError("a value is not a finite number" if is_float else too_large)
    rc.check_end(coded, words, "values")
    return numbers


@helper
def new_table(spread: Int) -> tuple[Int, Array, Array]:
    """Return a new frequency table for numbers from 0 to `spread`.

    A number's symbol is the number without its lowest bits. Return how many bits these are, a count for each
    symbol (all are 1), and the running sums of the counts.
    """
    copied = 0
    while spread >> (copied + LEADING):
        copied += 1
    symbols = (spread >> copied) + 1
    counts, sums = integers(symbols, 1), integers(symbols + 1, 0)
    rc.make_sums(counts, sums)
    return copied, counts, sums


@helper
def count_symbol(counts: Array, symbol: Int) -> None:
    """Add SEEN to the count of a symbol, and half of SEEN to the counts of the symbols next to it."""
    counts[symbol] += rc.SEEN
    if symbol > 0:
        counts[symbol - 1] += rc.SEEN // 2
    if symbol + 1 < len(counts):
        counts[symbol + 1] += rc.SEEN // 2


@kernel
def encode_numbers(
    words: Array, numbers: Array, indices: Array, row_ends: Array, zero_has_sign: bool, largest: Int
) -> Int:
    """Encode `numbers` into `words`; return how many words were written.

    A number is a 15-bit magnitude with the sign in the bit above. `indices` holds the coordinates of the
    numbers; it is empty if all coordinates are sent. Row i ends before coordinate row_ends[i]. The sign of a
    zero is coded if `zero_has_sign` (for floats) or if all numbers are zero. Return 0 if a magnitude exceeds
    `largest`.
    """
    lowest, highest = MASK, 0
    for i in range(len(numbers)):
        lowest, highest = min(lowest, numbers[i] & MASK), max(highest, numbers[i] & MASK)
    if highest > largest:
        return 0
    coder = rc.put_number(words, rc.START, lowest, MAGNITUDE)
    coder = rc.put_number(words, coder, highest - lowest, MAGNITUDE)
    copied, counts, sums = new_table(highest - lowest)
    signs = integers(len(row_ends), rc.EVEN)
    zero_has_sign |= highest == 0
    row, due = 0, rc.FIRST
    for i in range(len(numbers)):
        magnitude: Int = int64(numbers[i] & MASK)
        symbol = (magnitude - lowest) >> copied
        coder = rc.put_symbol(words, coder, sums, symbol)
        count_symbol(counts, symbol)
        coder = rc.put_number(words, coder, (magnitude - lowest) & ((1 << copied) - 1), copied)
        index = indices[i] if len(indices) else i
        while index >= row_ends[row]:
            row += 1
        if magnitude or zero_has_sign:
            coder = rc.put_bit(words, coder, signs, row, int64(numbers[i] >> MAGNITUDE))
        if i + 1 == due:
            due = rc.rebuild(counts, sums, due)
    return rc.finish(words, coder)


@kernel
def decode_numbers(
    words: Array, numbers: Array, indices: Array, row_ends: Array, zero_has_sign: bool, largest: Int
) -> Int:
    """Fill `numbers` with what `encode_numbers` encoded; return how many words were read.

    Return 0 if a magnitude exceeds `largest`.
    """
    lowest, coder = rc.take_number(words, rc.start_decoding(words), MAGNITUDE)
    spread, coder = rc.take_number(words, coder, MAGNITUDE)
    if lowest + spread > largest:
        return 0
    copied, counts, sums = new_table(spread)
    jump = integers(1 << JUMPS, 0)
    rc.make_jumps(sums, jump, JUMPS)
    signs = integers(len(row_ends), rc.EVEN)
    zero_has_sign |= lowest + spread == 0
    row, due = 0, rc.FIRST
    for i in range(len(numbers)):
        symbol, coder = rc.take_symbol(words, coder, sums, jump, JUMPS)
        count_symbol(counts, symbol)
        rest, coder = rc.take_number(words, coder, copied)
        magnitude = lowest + (symbol << copied) + rest
        if magnitude > largest:
            return 0
        index = indices[i] if len(indices) else i
        while index >= row_ends[row]:
            row += 1
        if magnitude or zero_has_sign:
            bit, coder = rc.take_bit(words, coder, signs, row)
            magnitude |= bit << MAGNITUDE
        numbers[i] = magnitude
        if i + 1 == due:
            due = rc.rebuild(counts, sums, due)
            rc.make_jumps(sums, jump, JUMPS)
    return coder[0]
