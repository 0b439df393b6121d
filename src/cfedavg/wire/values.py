"""The two sections of the values: entropy-coded numbers, and bytes that are copied uncoded.

The upper 16 bits of a float are coded (for bf16, these are all bits) and the other bits are copied. The sign
and the magnitude of a level are coded; the scales are copied. fp32 and fp64 values of all coordinates are
copied whole unless the caller asks to code them: coding saves a fifth of the bytes and takes many times as
long.

A coded number is a sign and a magnitude of at most 15 bits. In a layer that follows a ReLU, most updates of
one unit have the same sign, so each row of a tensor has a context for its signs. Most magnitudes that top-k
keeps lie just above the smallest one, so the difference to the smallest is coded. The leading bits of the
difference are a symbol of a table of learned frequencies; all values of the other bits are equally likely.
"""

from __future__ import annotations

import struct

import numpy as np

from cfedavg.core.arrays import Int, kernel
from cfedavg.core.payload import Floats, Levels, Payload, blocks
from cfedavg.wire import coder as rc
from cfedavg.wire.coordinates import Tensors
from cfedavg.wire.header import Coding, Header, Kind, Where, WireError, may_be_plain

SCALES = struct.Struct("<IH")  # `block` and `top`, which precede the scales
FLOATS = {"fp32": Kind.FP32, "fp64": Kind.FP64, "bf16": Kind.BF16}
LEVELS = {1: Kind.INT8, 2: Kind.INT16}
DTYPES = {Kind.FP32: "<f4", Kind.FP64: "<f8", Kind.BF16: "<i2", Kind.INT8: "<i1", Kind.INT16: "<i2"}
# The upper 16 bits of the largest finite float, or the largest level.
LARGEST = {Kind.FP32: 0x7F7F, Kind.FP64: 0x7FEF, Kind.BF16: 0x7F7F, Kind.INT8: 127, Kind.INT16: 32767}
VALUES_PER_BYTE = 11_354  # at most: a value takes at least one coded bit of probability 65504/65536
EVERYWHERE = np.empty(0, np.int64)
NOT_FINITE = "a value is not a finite number"

MAGNITUDE = 15  # bits of a magnitude; the sign is the bit above them
MASK = (1 << MAGNITUDE) - 1
LEADING = 8  # the most bits of a symbol
JUMPS = 7  # the decoder's table `jump` has 2^JUMPS entries
FINE, TOO_LARGE = range(2)  # a decoder's result: no fault, or a magnitude too large


def kind_of(values: Floats | Levels) -> Kind:
    """Return the number format of the values, as the header names it."""
    return FLOATS[values.dtype] if isinstance(values, Floats) else LEVELS[values.levels.itemsize]


def pack_values(
    payload: Payload, where: Where, tensors: Tensors, code_floats: bool
) -> tuple[Coding, bytes, bytes]:
    """Return the coding of the values, the section of coded values and the section of copied values."""
    values, indices = payload.values, payload.indices
    if isinstance(values, Levels):
        return Coding.CODED, *_pack_levels(values, indices, tensors)
    kind = kind_of(values)
    data = np.ascontiguousarray(values.data, DTYPES[kind])
    if not may_be_plain(where, kind):
        return Coding.CODED, *_pack_floats(data, kind, indices, tensors)
    if code_floats:
        coded, copied = _pack_floats(data, kind, indices, tensors)
        if len(coded) + len(copied) < data.nbytes:
            return Coding.CODED, coded, copied
    elif not np.isfinite(data).all():
        raise WireError(NOT_FINITE)
    return Coding.PLAIN, b"", data.tobytes()


def _pack_levels(values: Levels, indices: np.ndarray | None, tensors: Tensors) -> tuple[bytes, bytes]:
    _check_top(values.top, kind_of(values))
    if not 0 <= values.block < 2**32:
        raise WireError(f"`block` must be from 0 to 2^32 - 1, got {values.block}")
    if not np.isfinite(values.scales).all():
        raise WireError(NOT_FINITE)
    scales = np.ascontiguousarray(values.scales, "<f4")
    copied = SCALES.pack(values.block, values.top) + scales.tobytes()
    # In 32 bits, since |-32768| does not fit int16. As 32768, it exceeds any `top`.
    magnitudes = np.abs(values.levels.astype(np.int32))
    if len(magnitudes) and magnitudes.max() > values.top:
        raise WireError(f"a level exceeds top = {values.top}")
    numbers = (magnitudes | (values.levels < 0).astype(np.int32) << MAGNITUDE).astype(np.uint16)
    return _encode(numbers, kind_of(values), indices, tensors), copied


def _pack_floats(
    data: np.ndarray, kind: Kind, indices: np.ndarray | None, tensors: Tensors
) -> tuple[bytes, bytes]:
    parts = data.view("<u2").reshape(len(data), data.itemsize // 2)
    numbers = np.ascontiguousarray(parts[:, -1])
    return _encode(numbers, kind, indices, tensors), parts[:, :-1].tobytes()


def _check_top(top: int, kind: Kind) -> None:
    if not 0 <= top <= LARGEST[kind]:
        raise WireError(f"`top` must be from 0 to {LARGEST[kind]} for {kind.name} levels, got {top}")


def _encode(numbers: np.ndarray, kind: Kind, indices: np.ndarray | None, tensors: Tensors) -> bytes:
    if not len(numbers):
        return b""
    # A number takes at most 34 bits: 16 for the symbol, 7 for the other bits, 11 for the sign.
    words = np.empty(len(numbers) * 5 // 4 + 64, np.uint32)
    where = EVERYWHERE if indices is None else indices
    n = encode_numbers(words, numbers, where, tensors.ends, kind in FLOATS.values(), LARGEST[kind])
    if n == 0:
        raise WireError(NOT_FINITE)
    return rc.to_bytes(words, n)


def check_lengths(header: Header, copied: memoryview) -> None:
    """Raise WireError unless the lengths of the coded and the copied section fit k values."""
    k, needed = header.k, _copied_bytes(header, copied)
    if len(copied) != needed:
        raise WireError(f"the copied values must have {needed} bytes for k = {k}, got {len(copied)}")
    coded = k if header.coding is Coding.CODED else 0
    if coded > VALUES_PER_BYTE * (header.value_bytes + 8) or (header.value_bytes and not coded):
        raise WireError(f"the coded values have {header.value_bytes} bytes, which cannot hold {coded} values")


def _copied_bytes(header: Header, copied: memoryview) -> int:
    if header.kind in FLOATS.values():
        coded = 2 if header.coding is Coding.CODED else 0
        return header.k * (np.dtype(DTYPES[header.kind]).itemsize - coded)
    if len(copied) < SCALES.size:
        return SCALES.size
    return SCALES.size + 4 * blocks(header.k, SCALES.unpack_from(copied)[0])


def unpack_values(
    coded: memoryview, copied: memoryview, header: Header, indices: np.ndarray | None, tensors: Tensors
) -> Floats | Levels:
    """Return the values of a message. `check_lengths` must have accepted the sections."""
    kind = header.kind
    if kind in LEVELS.values():
        block, top = SCALES.unpack_from(copied)
        _check_top(top, kind)
        scales = np.frombuffer(copied, "<f4", offset=SCALES.size).astype(np.float32)
        if not np.isfinite(scales).all():
            raise WireError("a scale is not a finite number")
        numbers = _decode(coded, header, indices, tensors, top, f"a level exceeds top = {top}")
        signs = 1 - 2 * (numbers >> MAGNITUDE).astype(np.int16)
        return Levels(((numbers & MASK).astype(np.int16) * signs).astype(DTYPES[kind]), scales, block, top)
    name = next(name for name, each in FLOATS.items() if each is kind)
    if header.coding is Coding.PLAIN:
        data = np.frombuffer(copied, DTYPES[kind]).copy()
        if not np.isfinite(data).all():
            raise WireError(NOT_FINITE)
        return Floats(data, name)
    parts = np.empty((header.k, np.dtype(DTYPES[kind]).itemsize // 2), "<u2")
    parts[:, :-1] = np.frombuffer(copied, "<u2").reshape(header.k, parts.shape[1] - 1)
    parts[:, -1] = _decode(coded, header, indices, tensors, LARGEST[kind], NOT_FINITE)
    return Floats(parts.reshape(-1).view(DTYPES[kind]), name)


def _decode(
    coded: memoryview, header: Header, indices: np.ndarray | None, tensors: Tensors, largest: int, wrong: str
) -> np.ndarray:
    numbers = np.empty(header.k, np.uint16)
    if not header.k:
        return numbers
    where = EVERYWHERE if indices is None else indices
    signed = header.kind in FLOATS.values()
    found, words = decode_numbers(rc.to_words(coded), numbers, where, tensors.ends, signed, largest)
    if found != FINE:
        raise WireError(wrong)
    rc.check_end(coded, words, "values")
    return numbers


@kernel
def row_at(ends: np.ndarray, row: Int, index: Int) -> Int:
    """Return the row of coordinate `index`; search from `row` on. Row i ends before coordinate ends[i]."""
    while index >= ends[row]:
        row += 1
    return row


@kernel
def new_table(spread: Int) -> tuple[Int, np.ndarray, np.ndarray]:
    """Return how many low bits of a number are not in its symbol, and counts and sums of a new table.

    The table is for numbers of at most `spread`. All of its counts are 1.
    """
    copied = 0
    while spread >> (copied + LEADING):
        copied += 1
    symbols = (spread >> copied) + 1
    counts, sums = np.ones(symbols, np.int64), np.empty(symbols + 1, np.int64)
    rc.make_sums(counts, sums)
    return copied, counts, sums


@kernel
def encode_numbers(
    words: np.ndarray,
    numbers: np.ndarray,
    indices: np.ndarray,
    ends: np.ndarray,
    zero_has_sign: bool,
    largest: Int,
) -> Int:
    """Encode `numbers` into `words`; return the number of words, or 0 if a magnitude exceeds `largest`.

    A number is a 15-bit magnitude with the sign in the bit above. `indices` holds the coordinates of the
    numbers; it is empty if all coordinates are sent. The sign of a zero is coded if `zero_has_sign` (for
    floats) or if all numbers are zero.
    """
    lowest, highest = MASK, 0
    for i in range(len(numbers)):
        lowest, highest = min(lowest, numbers[i] & MASK), max(highest, numbers[i] & MASK)
    if highest > largest:
        return 0
    coder = rc.put_number(words, rc.start_encoding(), lowest, MAGNITUDE)
    coder = rc.put_number(words, coder, highest - lowest, MAGNITUDE)
    copied, counts, sums = new_table(highest - lowest)
    signs = rc.new_contexts(len(ends))
    zero_has_sign |= highest == 0
    row, due = 0, rc.FIRST
    for i in range(len(numbers)):
        magnitude: Int = np.int64(numbers[i] & MASK)
        symbol = (magnitude - lowest) >> copied
        coder = rc.put_symbol(words, coder, sums, symbol)
        rc.count_symbol(counts, symbol)
        coder = rc.put_number(words, coder, (magnitude - lowest) & ((1 << copied) - 1), copied)
        row = row_at(ends, row, indices[i] if len(indices) else i)
        if magnitude or zero_has_sign:
            coder = rc.put_bit(words, coder, signs, row, np.int64(numbers[i] >> MAGNITUDE))
        if i + 1 == due:
            due = rc.rebuild(counts, sums, due)
    return rc.finish(words, coder)


@kernel
def decode_numbers(
    words: np.ndarray,
    numbers: np.ndarray,
    indices: np.ndarray,
    ends: np.ndarray,
    zero_has_sign: bool,
    largest: Int,
) -> tuple[Int, Int]:
    """Decode what `encode_numbers` encoded into `numbers`; return a result and the number of words read.

    The result is TOO_LARGE if a magnitude exceeds `largest`, else FINE.
    """
    lowest, coder = rc.take_number(words, rc.start_decoding(words), MAGNITUDE)
    spread, coder = rc.take_number(words, coder, MAGNITUDE)
    if lowest + spread > largest:
        return TOO_LARGE, coder[0]
    copied, counts, sums = new_table(spread)
    jump = np.empty(1 << JUMPS, np.uint8)
    rc.make_jumps(sums, jump, JUMPS)
    signs = rc.new_contexts(len(ends))
    zero_has_sign |= lowest + spread == 0
    row, due = 0, rc.FIRST
    for i in range(len(numbers)):
        symbol, coder = rc.take_symbol(words, coder, sums, jump, JUMPS)
        rc.count_symbol(counts, symbol)
        rest, coder = rc.take_number(words, coder, copied)
        magnitude = lowest + (symbol << copied) + rest
        if magnitude > largest:
            return TOO_LARGE, coder[0]
        row = row_at(ends, row, indices[i] if len(indices) else i)
        if magnitude or zero_has_sign:
            bit, coder = rc.take_bit(words, coder, signs, row)
            magnitude |= bit << MAGNITUDE
        numbers[i] = magnitude
        if i + 1 == due:
            due = rc.rebuild(counts, sums, due)
            rc.make_jumps(sums, jump, JUMPS)
    return FINE, coder[0]
