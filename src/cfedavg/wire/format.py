"""`encode` and `decode`: a message is a header, a section of coordinates, two sections of values, a checksum.

docs/wire.md specifies the format. The files in tests/golden are messages that must not change.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np

from cfedavg.core.kernels import WAY, Int, can_cache, helper, is_compiled
from cfedavg.core.keys import draw_coordinates
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Levels, Mask, Payload
from cfedavg.wire import frame, library
from cfedavg.wire.coordinates import (
    Matrices,
    check_basis,
    pack_coordinates,
    unpack_basis,
    unpack_coordinates,
    where_of,
)
from cfedavg.wire.frame import Coding, Where, WireError
from cfedavg.wire.indices import are_increasing
from cfedavg.wire.values import kind_of, pack_values, unpack_values

# For each dtype of Floats: the NumPy dtype of the array that holds them.
ARRAYS: dict[str, type[np.generic]] = {"fp32": np.float32, "fp64": np.float64, "bf16": np.int16}
INTEGERS = tuple({np.dtype(letter).type: None for letter in np.typecodes["AllInteger"]})


def encode(
    payload: Payload,
    layout: Layout,
    *,
    client: int = 0,
    sequence: int = 0,
    round: int = 0,
    code_floats: bool = False,
) -> bytes:
    """Encode the payload of one client as a message. The payload must hold NumPy arrays (see Payload.numpy).

    `code_floats` matters only if all coordinates are sent, as fp32 or fp64 values. If it is true, the values
    are entropy-coded when that makes the message shorter. Such a message has format version 2. A payload with
    a basis, with levels of few magnitudes or with scales for each, or with as many coordinates in each chunk
    may get version 3; every other message has version 1. `client`, `sequence` and `round` go into the header.

    >>> import torch
    >>> from cfedavg import parse
    >>> payload = parse("topk(0.5) >> bf16").compress(torch.tensor([1.0, -2.0]), key=0).numpy()
    >>> message = encode(payload, Layout.flat(2))
    >>> decode(message, layout=Layout.flat(2)).indices
    array([1])
    """
    sender = library.Sender(client, sequence, round)
    payload = _check_arrays(payload, layout)
    message = library.encode(payload, layout, sender)
    return _encode_sections(payload, layout, sender, code_floats) if message is None else message


def _encode_sections(payload: Payload, layout: Layout, sender: library.Sender, code_floats: bool) -> bytes:
    """Encode a payload section by section, as `encode` does without the C library."""
    where, coding, sections = _pack_sections(payload, layout, code_floats)
    what = where, kind_of(payload.values), coding
    numbers = layout.schema_hash, payload.d, payload.counts()[0], *sender
    body = b"".join([frame.Header(*what, *numbers, *map(len, sections)).pack(), *sections])
    return body + frame.CHECKSUM.pack(zlib.crc32(body))


def measure(payload: Payload, layout: Layout, code_floats: bool = False) -> list[int]:
    """Return the exact length in bytes that `encode` would give to each client's message."""
    if not code_floats and (length := plain_length(payload)) is not None and payload.d == layout.d:
        return [length] * len(payload)
    return [_measure_client(client, layout, code_floats) for client in payload.clients()]


def _measure_client(payload: Payload, layout: Layout, code_floats: bool) -> int:
    payload = _check_arrays(payload, layout)
    message = library.encode(payload, layout, library.Sender(0, 0, 0))
    if message is not None:
        return len(message)
    *_, sections = _pack_sections(payload, layout, code_floats)
    return frame.LEAST + sum(map(len, sections))


def plain_length(payload: Payload) -> int | None:
    """Return the length in bytes of a client's message if `encode` leaves the values uncoded, else None.

    This is for `encode` without `code_floats`. The length is then the same whatever the values are.
    """
    kind = kind_of(payload.values)
    if not frame.may_be_plain(where_of(payload), kind):
        return None
    return frame.LEAST + payload.d * frame.DTYPES[kind].itemsize


def _pack_sections(
    payload: Payload, layout: Layout, code_floats: bool
) -> tuple[Where, Coding, tuple[bytes, bytes, bytes]]:
    """Return which coordinates are sent, how the values are coded, and the three sections."""
    if payload.indices is not None and not are_increasing(payload.indices, payload.d):
        raise WireError(f"the indices must increase strictly and lie from 0 to {payload.d - 1}")
    matrices = Matrices.of(layout)
    rows = matrices if payload.basis is None else Matrices.one_row(payload.counts()[0])
    coding, coded, copied = pack_values(payload, where_of(payload), rows, code_floats)
    where, coordinates = pack_coordinates(payload, matrices)
    return where, coding, (coordinates, coded, copied)


def _check_arrays(payload: Payload, layout: Layout) -> Payload:
    """Return the payload with int64 indices; raise WireError if an array has a wrong dtype or length.

    The coders rely on this check. It does not check that the payload's mask draws exactly these indices.
    """
    if len(payload) != 1:
        raise WireError(
            f"a message must hold the payload of one client, got {len(payload)}: use `Payload.clients`"
        )
    if payload.d != layout.d:
        raise WireError(f"the payload must have {layout.d} coordinates, as the layout has, got {payload.d}")
    values, indices, k = payload.values, payload.indices, payload.counts()[0]
    if isinstance(values, Floats):
        if values.dtype not in ARRAYS:
            raise WireError(f"the dtype of Floats must be fp32, fp64 or bf16, got {values.dtype!r}")
        _check_array(values.data, f"Floats of dtype {values.dtype!r}", ARRAYS[values.dtype])
        lengths = {len(values.data)}
    else:
        _check_array(values.levels, "Levels", *((np.int8,) if values.per_level else (np.int8, np.int16)))
        _check_array(values.scales, "scales", np.float32)
        lengths, scales = {len(values.levels)}, values.count_scales(k)
        if len(values.scales) != scales:
            rule = f"{k} levels in blocks of {values.block} need {scales} scales"
            raise WireError(f"{rule}, got {len(values.scales)}")
    if payload.basis is not None:
        check_basis(payload.basis, layout, k)
        if indices is not None or payload.mask is not None:
            raise WireError("a payload in another basis must have neither indices nor a mask")
        lengths.add(k)
    else:
        lengths.add(payload.d if indices is None else len(indices))
    if lengths != {k}:
        raise WireError(f"the payload must have {k} indices and {k} values, got lengths {sorted(lengths)}")
    if indices is None:
        return payload
    _check_array(indices, "the indices", *INTEGERS)
    if payload.mask is not None and not 0 <= payload.mask.keep <= 2**53:
        raise WireError(f"`keep` of the mask must be from 0 to 2^53, got {payload.mask.keep}")
    return replace(payload, indices=np.ascontiguousarray(indices, np.int64))


def _check_array(array: np.ndarray, name: str, *types: type[np.generic]) -> None:
    """Raise WireError unless the array is 1-D and holds numbers of one of the types."""
    if array.ndim != 1 or array.dtype.type not in types:
        allowed = "integers" if types == INTEGERS else " or ".join(each.__name__ for each in types)
        raise WireError(f"{name} must be a 1-D array of {allowed}, got {array.ndim}-D {array.dtype.name}")


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

    `kmax` is the largest number of values that is accepted (default: as many as a vector of the layout has).
    One byte of a message can hold up to 11,354 values, so a short message can need much memory: give `kmax`
    if you know it. A message with more values is refused before memory is allocated for them. `max_bytes` is
    the longest message that is accepted (default: longer than any useful payload of this layout). If `client`
    or `sequence` is given, the message's header must hold the same number.
    """
    most = 16 * layout.d + 65536 if max_bytes is None else max_bytes
    given = data, layout, kmax, most, client, sequence
    payload = library.decode(*given)
    return _decode_sections(*given) if payload is None else payload


def _decode_sections(
    data: bytes, layout: Layout, kmax: int | None, most: int, client: int | None, sequence: int | None
) -> Payload:
    """Decode a message section by section, as `decode` does without the C library."""
    if len(data) > most:
        raise WireError(f"the message must have at most {most} bytes, got {len(data)}")
    header = frame.read_header(data)
    if client is not None and header.client != client:
        raise WireError(f"the message is of client {header.client}, not of client {client}")
    if sequence is not None and header.sequence != sequence:
        raise WireError(f"the message has sequence number {header.sequence}, {sequence} was expected")
    frame.check_header(header, layout, kmax)
    coordinates, coded, copied = frame.split_message(data, header)
    matrices, offsets = Matrices.of(layout), np.array([0, header.k])
    indices, mask = unpack_coordinates(coordinates, header, matrices)
    basis = unpack_basis(coordinates, header, layout)
    rows = matrices if basis is None else Matrices.one_row(header.k)
    values = unpack_values(coded, copied, header, indices, rows)
    return Payload(header.d, offsets, indices, values, mask, basis)


@helper
def _mark_ready() -> Int:
    """Return 1. The machine code of this kernel on disk says that `compile_coders` has ended."""
    return 1


def needs_compiling() -> bool:
    """Return whether `compile_coders` has not ended on this machine, and can keep machine code on disk."""
    return can_cache(_mark_ready) and not is_compiled(_mark_ready)


def compile_coders() -> None:
    """Compile all coders and keep their machine code on disk, by coding a small message of every kind.

    There is nothing to compile unless numba runs the kernels.
    """
    if WAY != "numba":
        return
    layout = Layout(("matrix", "vector"), ((20, 20), (112,)), ("float32", "float32"))
    d, indices = layout.d, np.arange(0, layout.d, 5)
    in_chunks = np.flatnonzero(np.arange(d) % 64 < 3)
    mask = Mask(np.zeros(1, np.int64), 2**53 // 5)
    drawn = draw_coordinates(0, mask.keep, d)
    for where, which in ((None, None), (indices, None), (in_chunks, None), (drawn, mask)):
        k = d if where is None else len(where)
        values: list[Floats | Levels] = [Floats(np.ones(k, dtype), name) for name, dtype in ARRAYS.items()]
        for dtype, per_level in ((np.int8, False), (np.int16, False), (np.int8, True)):
            values.append(Levels(np.ones(k, dtype), np.ones(1, np.float32), 0, 1, per_level))
        for each in values:
            payload = Payload(d, np.array([0, k]), where, each, which)
            decode(encode(payload, layout, code_floats=True), layout=layout)
    _mark_ready()
