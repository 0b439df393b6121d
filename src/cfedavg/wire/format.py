"""`encode` and `decode`: a message is a header, a section of coordinates, two of values, and a checksum.

docs/wire.md specifies the format. The files in tests/golden are messages that must not change.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np

from cfedavg.core.arrays import is_compiled
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Levels, Payload, blocks
from cfedavg.wire.coordinates import KEY_AND_KEEP, Tensors, pack_coordinates, unpack_coordinates, where_of
from cfedavg.wire.header import CHECKSUM, SIZE, Coding, Header, Where, WireError, may_be_plain, read_header
from cfedavg.wire.indices import are_increasing, encode_indices
from cfedavg.wire.values import DTYPES, check_lengths, kind_of, pack_values, unpack_values


def encode(
    payload: Payload,
    layout: Layout,
    *,
    client: int = 0,
    sequence: int = 0,
    round: int = 0,
    code_floats: bool = False,
) -> bytes:
    """Return one client's message as bytes. The payload must hold NumPy arrays (see Payload.numpy).

    If `code_floats`, fp32 and fp64 values of all coordinates are entropy-coded if that makes the message
    shorter. Such a message is of version 2; every other message is of version 1.

    >>> import torch
    >>> from cfedavg import parse
    >>> payload = parse("topk(0.5) >> bf16").compress(torch.tensor([1.0, -2.0]), key=0).numpy()
    >>> message = encode(payload, Layout.flat(2))
    >>> decode(message, layout=Layout.flat(2)).indices
    array([1])
    """
    coding, sections = _sections(payload, layout, code_floats)
    what = where_of(payload), kind_of(payload.values), coding
    numbers = layout.schema_hash, payload.d, payload.counts()[0], client, sequence, round
    header = Header(*what, *numbers, *map(len, sections))
    body = header.pack() + b"".join(sections)
    return body + CHECKSUM.pack(zlib.crc32(body))


def measure(payload: Payload, layout: Layout, code_floats: bool = False) -> list[int]:
    """Return the exact length in bytes of each client's message, without building the message."""
    if not code_floats and (length := plain_length(payload)) is not None and payload.d == layout.d:
        return [length] * len(payload)
    one_by_one = (_sections(client, layout, code_floats) for client in payload.clients())
    return [SIZE + sum(map(len, sections)) + CHECKSUM.size for _, sections in one_by_one]


def plain_length(payload: Payload) -> int | None:
    """Return the length in bytes of the payload's message if its values stay uncoded; None if they are coded.

    The length is that of `encode` without `code_floats`. It depends on no value.
    """
    kind = kind_of(payload.values)
    if not may_be_plain(where_of(payload), kind):
        return None
    return SIZE + payload.d * np.dtype(DTYPES[kind]).itemsize + CHECKSUM.size


def is_ready() -> bool:
    """Return whether the coders are compiled. If not, the first message takes about 15 s longer."""
    return is_compiled(encode_indices)


def _sections(
    payload: Payload, layout: Layout, code_floats: bool
) -> tuple[Coding, tuple[bytes, bytes, bytes]]:
    """Return the coding of the values, and three sections: coordinates, coded values, copied values."""
    if len(payload) != 1:
        raise WireError(
            f"a message must hold the payload of one client, got {len(payload)}: see Payload.clients"
        )
    if payload.d != layout.d:
        raise WireError(f"the payload must have the layout's d = {layout.d}, got {payload.d}")
    payload = _check(payload)
    tensors = Tensors.of(layout)
    coding, coded, copied = pack_values(payload, where_of(payload), tensors, code_floats)
    return coding, (pack_coordinates(payload, tensors), coded, copied)


def _check(payload: Payload) -> Payload:
    """Return the payload with int64 indices; raise WireError unless its arrays fit each other.

    The coders themselves check nothing. Nothing checks that a mask draws exactly these indices.
    """
    values, k = payload.values, payload.counts()[0]
    if isinstance(values, Floats):
        right = {"fp32": ["float32"], "fp64": ["float64"], "bf16": ["int16"]}.get(values.dtype, [])
        numbers, found = values.data, [(values.data, right, f"Floats of dtype {values.dtype!r}")]
    else:
        found = [(values.levels, ["int8", "int16"], "Levels"), (values.scales, ["float32"], "scales")]
        numbers = values.levels
    for array, right, name in found:
        if array.ndim != 1 or array.dtype.name not in right:
            rule = " or ".join(right) or "fp32, fp64 or bf16"
            raise WireError(f"{name} must be a 1-D array of {rule}, got {array.ndim}-D {array.dtype.name}")
    lengths = {len(numbers), payload.d if payload.indices is None else len(payload.indices)}
    if lengths != {k}:
        raise WireError(f"the payload must have k = {k} indices and values, got lengths {sorted(lengths)}")
    if isinstance(values, Levels) and len(values.scales) != blocks(k, values.block):
        rule = f"{k} levels in blocks of {values.block} need {blocks(k, values.block)} scales"
        raise WireError(f"{rule}, got {len(values.scales)}")
    if payload.indices is None:
        return payload
    if payload.indices.ndim != 1 or payload.indices.dtype.kind not in "iu":
        array = payload.indices
        raise WireError(f"the indices must be a 1-D array of integers, got {array.ndim}-D {array.dtype.name}")
    indices = np.ascontiguousarray(payload.indices, np.int64)
    if not are_increasing(indices, payload.d):
        raise WireError(f"the indices must increase strictly and lie from 0 to {payload.d - 1}")
    if payload.mask is not None and not 0 <= payload.mask.keep <= 2**53:
        raise WireError(f"`keep` must be from 0 to 2^53, got {payload.mask.keep}")
    return replace(payload, indices=indices)


def decode(
    data: bytes,
    *,
    layout: Layout,
    kmax: int | None = None,
    max_bytes: int | None = None,
    client: int | None = None,
    sequence: int | None = None,
) -> Payload:
    """Return the payload of a message. If the message is wrong, raise WireError and no other error.

    `kmax` is the largest k that is accepted (default: d). A byte can hold up to 11,354 values, so a short
    message can need much memory: give `kmax` if you know it. `max_bytes` is the largest length that is
    accepted (default: more than any payload of this layout needs). If `client` or `sequence` is given, the
    message must have the same. WireError is raised before any array of more than k values is allocated.
    """
    most = 16 * layout.d + 65536 if max_bytes is None else max_bytes
    if len(data) > most:
        raise WireError(f"the message must have at most {most} bytes, got {len(data)}")
    header = read_header(data)
    if client is not None and header.client != client:
        raise WireError(f"the message is of client {header.client}, not of client {client}")
    if sequence is not None and header.sequence != sequence:
        raise WireError(f"the message has sequence number {header.sequence}, {sequence} was expected")
    _check_header(header, layout, layout.d if kmax is None else kmax)
    coordinates, coded, copied = sections_of(data, header)
    tensors = Tensors.of(layout)
    indices, mask = unpack_coordinates(coordinates, header, tensors)
    values = unpack_values(coded, copied, header, indices, tensors)
    return Payload(header.d, np.array([0, header.k]), indices, values, mask)


def _check_header(header: Header, layout: Layout, kmax: int) -> None:
    """Raise WireError unless the header is for this layout, has k of at most `kmax`, and is consistent."""
    if header.schema != layout.schema_hash or header.d != layout.d:
        raise WireError(
            "the message is for another model: names, shapes, dtypes or order of its tensors differ"
        )
    if header.k > min(kmax, header.d):
        raise WireError(f"the message must have k of at most {min(kmax, header.d)}, got {header.k}")
    if header.where is Where.ALL and header.k != header.d:
        raise WireError(f"a message of all coordinates must have k = d = {header.d}, got k = {header.k}")
    if header.coding is Coding.PLAIN and not may_be_plain(header.where, header.kind):
        raise WireError(
            f"{header.kind.name} values of {header.where.name} coordinates must be CODED, got PLAIN"
        )


def sections_of(data: bytes, header: Header) -> tuple[memoryview, memoryview, memoryview]:
    """Return the three sections of a message: coordinates, coded values, copied values.

    Raise WireError if a length or the checksum is wrong.
    """
    view, needed = memoryview(data), header.message_bytes
    if len(data) < needed:
        raise WireError(f"the message is cut short: it must have {needed} bytes, got {len(data)}")
    if len(data) > needed:
        raise WireError(f"the message is too long: it must have {needed} bytes, got {len(data)}")
    fixed = {Where.ALL: 0, Where.DRAWN: KEY_AND_KEEP.size}.get(header.where, header.index_bytes)
    if header.index_bytes != fixed:
        raise WireError(f"the section of the indices must have {fixed} bytes, got {header.index_bytes}")
    values = SIZE + header.index_bytes
    copied = view[values + header.value_bytes : -CHECKSUM.size]
    check_lengths(header, copied)
    if zlib.crc32(view[: -CHECKSUM.size]) != CHECKSUM.unpack(view[-CHECKSUM.size :])[0]:
        raise WireError("the checksum does not fit: the message was damaged on its way")
    return view[SIZE:values], view[values : values + header.value_bytes], copied
