"""The two sections that say what the values are: coded numbers, and what of them is not worth coding.

Of a float the upper 16 bits are coded (all of a bf16) and the rest is copied; of a level, sign and
magnitude are coded, and the scales are copied. Floats of all coordinates are copied whole unless the caller
asks to code them: coding saves a fifth of the bytes and takes many times as long.
"""

from __future__ import annotations

import struct

import numpy as np

from cfedavg.core.payload import Floats, Levels, Payload, blocks
from cfedavg.wire.coder import check_end, to_bytes, to_words
from cfedavg.wire.header import Coding, Header, Kind, Where, WireError, may_be_plain
from cfedavg.wire.numbers import FINE, MAGNITUDE, MASK, decode_numbers, encode_numbers
from cfedavg.wire.tensors import Tensors

Packed = tuple[Coding, bytes, bytes]

SCALES = struct.Struct("<IH")  # block, top
FLOATS = {"fp32": Kind.FP32, "fp64": Kind.FP64, "bf16": Kind.BF16}
LEVELS = {1: Kind.INT8, 2: Kind.INT16}
DTYPES = {Kind.FP32: "<f4", Kind.FP64: "<f8", Kind.BF16: "<i2", Kind.INT8: "<i1", Kind.INT16: "<i2"}
# The largest float by its upper 16 bits, the largest level.
LARGEST = {Kind.FP32: 0x7F7F, Kind.FP64: 0x7FEF, Kind.BF16: 0x7F7F, Kind.INT8: 127, Kind.INT16: 32767}
VALUES_PER_BYTE = 11_354  # at most: a value takes a bit of probability 65504/65536, or more
EVERYWHERE = np.empty(0, np.int64)
NOT_FINITE = "a value is not a finite number"


def kind_of(values: Floats | Levels) -> Kind:
    return FLOATS[values.dtype] if isinstance(values, Floats) else LEVELS[values.levels.itemsize]


def pack_values(payload: Payload, where: Where, tensors: Tensors, code_floats: bool) -> Packed:
    """Return how the values are written, the coded section and the copied one."""
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
    _check_levels(values)
    scales = np.ascontiguousarray(values.scales, "<f4")
    copied = SCALES.pack(values.block, values.top) + scales.tobytes()
    # In 32 bits: int16 has no 32768, which then exceeds any top.
    magnitudes = np.abs(values.levels.astype(np.int32))
    if len(magnitudes) and magnitudes.max() > values.top:
        raise WireError(f"a level exceeds top = {values.top}")
    numbers = (magnitudes | (values.levels < 0).astype(np.int32) << MAGNITUDE).astype(np.uint16)
    return _coded(numbers, kind_of(values), indices, tensors), copied


def _pack_floats(
    data: np.ndarray, kind: Kind, indices: np.ndarray | None, tensors: Tensors
) -> tuple[bytes, bytes]:
    parts = data.view("<u2").reshape(len(data), data.itemsize // 2)
    numbers = np.ascontiguousarray(parts[:, -1])
    return _coded(numbers, kind, indices, tensors), parts[:, :-1].tobytes()


def _check_top(top: int, kind: Kind) -> None:
    if not 0 <= top <= LARGEST[kind]:
        raise WireError(f"top = {top} must be from 0 to {LARGEST[kind]} for levels of {kind.name}")


def _check_levels(values: Levels) -> None:
    _check_top(values.top, kind_of(values))
    if not 0 <= values.block < 2**32:
        raise WireError(f"block = {values.block} must be from 0 to 2^32 - 1")
    if not np.isfinite(values.scales).all():
        raise WireError(NOT_FINITE)


def _coded(numbers: np.ndarray, kind: Kind, indices: np.ndarray | None, tensors: Tensors) -> bytes:
    if not len(numbers):
        return b""
    # A number is a symbol of up to 16 bits, 7 more bits, and a sign of up to 11.
    words = np.empty(len(numbers) * 5 // 4 + 64, np.uint32)
    where = EVERYWHERE if indices is None else indices
    n = encode_numbers(words, numbers, where, tensors.ends, kind in FLOATS.values(), LARGEST[kind])
    if n == 0:
        raise WireError(NOT_FINITE)
    return to_bytes(words, n)


def check_lengths(header: Header, copied: memoryview) -> None:
    """Raises WireError unless both sections have a length that k values can have."""
    k, needed = header.k, _copied_bytes(header, copied)
    if len(copied) != needed:
        raise WireError(f"the section of the copied values has {len(copied)} bytes, k = {k} needs {needed}")
    coded = k if header.coding is Coding.CODED else 0
    if coded > VALUES_PER_BYTE * (header.value_bytes + 8) or (header.value_bytes and not coded):
        raise WireError(f"the section of the coded values has {header.value_bytes} bytes: not {coded} values")


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
    """The values of a message whose lengths have been checked."""
    kind = header.kind
    if kind in LEVELS.values():
        block, top = SCALES.unpack_from(copied)
        _check_top(top, kind)
        scales = np.frombuffer(copied, "<f4", offset=SCALES.size).astype(np.float32)
        if not np.isfinite(scales).all():
            raise WireError("a scale is not a finite number")
        numbers = _decoded(coded, header, indices, tensors, top, f"a level exceeds top = {top}")
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
    parts[:, -1] = _decoded(coded, header, indices, tensors, LARGEST[kind], NOT_FINITE)
    return Floats(parts.reshape(-1).view(DTYPES[kind]), name)


def _decoded(
    coded: memoryview, header: Header, indices: np.ndarray | None, tensors: Tensors, largest: int, wrong: str
) -> np.ndarray:
    numbers = np.empty(header.k, np.uint16)
    if not header.k:
        return numbers
    where = EVERYWHERE if indices is None else indices
    signed = header.kind in FLOATS.values()
    found, words = decode_numbers(to_words(coded), numbers, where, tensors.ends, signed, largest)
    if found != FINE:
        raise WireError(wrong)
    check_end(coded, words, "values")
    return numbers
