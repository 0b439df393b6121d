"""Encode and decode messages of listed coordinates in one call of the C library.

The bytes are those that `format` makes in Python. In one call the interpreter has little to do, which counts
most where its code and data have left the processor's cache. Messages of other coordinates would gain
nothing: NumPy and zlib copy their values faster.

`encode` and `decode` return None where the library is absent, does not handle such messages, or refuses one.
Then the coders in Python do the work, or say in a sentence what is wrong.
"""

from __future__ import annotations

import ctypes as c
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from cfedavg.core import native
from cfedavg.core.kernels import WAY
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Levels, Payload, blocks
from cfedavg.wire.coordinates import where_of
from cfedavg.wire.frame import DTYPES, Kind, Where
from cfedavg.wire.values import kind_of

Array = np.ndarray
U32, U64, I64, INT, SIZE, POINTER = c.c_uint32, c.c_uint64, c.c_int64, c.c_int, c.c_size_t, c.c_void_p
# For each C function: the types of its result and its arguments.
_TYPES: dict[str, tuple[Any, ...]] = {
    "make_layout": (INT, POINTER, SIZE, POINTER),
    "schema": (U64, POINTER),
    "encode": (INT, POINTER, POINTER, POINTER, INT, POINTER, POINTER),
    "decode": (INT, c.c_char_p, SIZE, POINTER, POINTER, POINTER, POINTER),
    "free_layout": (None, POINTER),
    "free_bytes": (None, POINTER),
    "free_payload": (None, POINTER),
}
WHERE = 5  # the place of `where` in a header


# The types of clients/c/cfedavg.h.
class CTensor(c.Structure):
    _fields_ = [("name", c.c_char_p), ("dtype", c.c_char_p), ("shape", c.POINTER(U64)), ("axes", SIZE)]


class CPayload(c.Structure):
    _fields_ = [
        ("d", U64), ("k", U64), ("where", INT), ("kind", INT), ("indices", POINTER), ("key", I64),
        ("keep", U64), ("rotated", U32), ("rank", U32), ("values", POINTER), ("scales", POINTER),
        ("block", U32), ("top", c.c_uint16),
    ]  # fmt: skip


class CSender(c.Structure):
    _fields_ = [("client", U64), ("sequence", U64), ("round", U32)]


class CLimits(c.Structure):
    _fields_ = [
        ("max_bytes", U64), ("max_values", U64), ("knows_sender", INT), ("client", U64), ("sequence", U64),
    ]  # fmt: skip


class CHeader(c.Structure):
    _fields_ = [
        ("version", INT), ("where", INT), ("kind", INT), ("coding", INT), ("schema", U64), ("d", U64),
        ("k", U64), ("sender", CSender), ("lengths", U64 * 3),
    ]  # fmt: skip


class Sender(NamedTuple):
    """Who sends a message, and in which round."""

    client: int
    sequence: int
    round: int


def encode(payload: Payload, layout: Layout, sender: Sender) -> bytes | None:
    """Encode the payload of one client, whose arrays have the right dtypes and lengths."""
    values = payload.values
    scaled = (values.block, values.top) if isinstance(values, Levels) else (0, 0)
    fits = all(map(_fits, (*sender, *scaled), (64, 64, 32, 32, 16)))
    handle = make_layout(layout) if WAY == "c" and fits and where_of(payload) is Where.LISTED else None
    if handle is None:
        return None
    made, _arrays = _to_c(payload)  # `_arrays` keeps alive what `made` points to
    message, length = POINTER(), SIZE()
    results = c.byref(message), c.byref(length)
    if handle.library.cfedavg_encode(handle.layout, c.byref(made), c.byref(CSender(*sender)), 0, *results):
        return None
    try:
        return c.string_at(message, length.value)
    finally:
        handle.library.cfedavg_free_bytes(message)


def decode(
    data: bytes, layout: Layout, kmax: int | None, max_bytes: int, client: int | None, sequence: int | None
) -> Payload | None:
    """Decode a message of a client and with a sequence number (None: of any); see `format.decode`."""
    data, most = bytes(data), (max_bytes, layout.d if kmax is None else kmax)
    is_list = len(data) > WHERE and data[WHERE] in (Where.LISTED, Where.CHUNKED)
    fits = all(_fits(n, 64) and n > 0 for n in most)  # 0 stands for the default in C
    handle = make_layout(layout) if WAY == "c" and is_list and fits else None
    if handle is None:
        return None
    made, header, limits = CPayload(), CHeader(), CLimits(*most)
    if _fits(client, 64) and _fits(sequence, 64):
        limits.knows_sender, limits.client, limits.sequence = 1, client, sequence
    results = c.byref(made), c.byref(header)
    if handle.library.cfedavg_decode(data, len(data), handle.layout, c.byref(limits), *results):
        return None
    try:
        known = client in (None, header.sender.client) and sequence in (None, header.sender.sequence)
        return _from_c(made) if known else None
    finally:
        handle.library.cfedavg_free_payload(c.byref(made))


def _fits(number: Any, bits: int) -> bool:
    """Return whether a number is whole and fits a field of C, which would cut off its upper bits."""
    return isinstance(number, int | np.integer) and 0 <= int(number) < 1 << bits


class Handle:
    """A layout in the C library. It is freed with this object."""

    def __init__(self, library: Any, layout: Any) -> None:
        self.library, self.layout = library, layout

    def __del__(self) -> None:
        self.library.cfedavg_free_layout(self.layout)


@lru_cache(maxsize=64)
def make_layout(layout: Layout) -> Handle | None:
    """Return a layout for C; None if the library is absent or refuses it."""
    library, tensors, made = _load(), list_tensors(layout), POINTER()
    if library is None or library.cfedavg_make_layout(tensors, len(tensors), c.byref(made)):
        return None
    handle = Handle(library, made)  # a name with a zero in it ends there in C, so it has another hash
    return handle if library.cfedavg_schema(made) == layout.schema_hash else None


def list_tensors(layout: Layout) -> Any:
    """Return the tensors of a layout for `cfedavg_make_layout`."""
    tensors = (CTensor * len(layout.names))()
    for tensor, name, shape, dtype in zip(tensors, layout.names, layout.shapes, layout.dtypes, strict=True):
        tensor.name, tensor.dtype = (text.encode("utf-8", "surrogatepass") for text in (name, dtype))
        tensor.shape, tensor.axes = (U64 * len(shape))(*shape), len(shape)
    return tensors


@cache
def _load() -> Any:
    """Return the library with the types of the functions that are called here; None if it is absent."""
    library = native.load()
    for name, (result, *arguments) in _TYPES.items():
        if library:
            function = getattr(library, f"cfedavg_{name}")
            function.restype, function.argtypes = result, arguments
    return library


def _to_c(payload: Payload) -> tuple[CPayload, list[Array]]:
    """Return a payload of listed coordinates for C, and the arrays that it points to."""
    values, kind, k = payload.values, kind_of(payload.values), payload.counts()[0]
    kind = Kind.INT8 if kind is Kind.FEW else kind  # FEW stands in headers only
    data = values.data if isinstance(values, Floats) else values.levels
    arrays = [native.ready(payload.indices, np.int64), native.ready(data, _dtype(kind))]
    made = CPayload(payload.d, k, Where.LISTED, kind)
    if isinstance(values, Levels):
        arrays.append(native.ready(values.scales, np.float32))
        made.scales, made.block, made.top = arrays[-1].ctypes.data, values.block, values.top
    made.indices, made.values = arrays[0].ctypes.data, arrays[1].ctypes.data
    return made, arrays


def _from_c(made: CPayload) -> Payload:
    """Return a payload with copies of the arrays of C's payload."""
    kind, k = Kind(made.kind), made.k
    data, per_level = _copy(made.values, _dtype(kind), k), kind is Kind.PER_LEVEL
    values: Floats | Levels
    if kind.is_float:
        values = Floats(data, kind.name.lower())
    else:
        scales = blocks(k, made.block) * (made.top if per_level else 1)
        values = Levels(data, _copy(made.scales, np.float32, scales), made.block, made.top, per_level)
    return Payload(made.d, np.array([0, k]), _copy(made.indices, np.int64, k), values)


def _dtype(kind: Kind) -> np.dtype[Any]:
    """Return the dtype of values in C: numbers in the order of bytes of this machine."""
    return DTYPES[kind].newbyteorder("=")


def _copy(address: int | None, dtype: Any, n: int) -> Array:
    found = np.empty(n, dtype)
    if address and n:
        c.memmove(found.ctypes.data, address, found.nbytes)
    return found
