"""The C library of clients/c, built with make and called through ctypes: the types of clients/c/cfedavg.h."""

from __future__ import annotations

import ctypes as c
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cfedavg import Layout, Payload
from cfedavg.core.bases import Factors, Rotation
from cfedavg.core.payload import Floats, Levels, Mask
from cfedavg.wire.coordinates import where_of
from cfedavg.wire.frame import DTYPES, Kind, Where
from cfedavg.wire.library import CLimits, CPayload, CSender, list_tensors
from cfedavg.wire.values import kind_of

FOLDER = Path(__file__).parents[2] / "clients" / "c"
U64, I64, SIZE, POINTER = c.c_uint64, c.c_int64, c.c_size_t, c.c_void_p
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("make") is None, reason="needs a C compiler and make"
)


class Update(c.Structure):
    _fields_ = [
        ("payload", POINTER), ("payload_length", SIZE), ("facts", POINTER), ("facts_length", SIZE),
        ("uncompressed", POINTER), ("uncompressed_length", SIZE),
    ]  # fmt: skip


class Body(c.Structure):
    _fields_ = [
        ("broadcast", POINTER), ("broadcast_length", SIZE), ("uncompressed", POINTER),
        ("uncompressed_length", SIZE),
    ]  # fmt: skip


class CBroadcast(c.Structure):
    _fields_ = [
        ("kind", c.c_int), ("generation", c.c_uint32), ("round", c.c_uint32), ("hash", U64), ("digest", U64),
        ("earlier", c.c_uint32), ("list", POINTER), ("messages", POINTER), ("length", SIZE),
    ]  # fmt: skip


class Refused(Exception):
    """The error of a call that returned a code; `code` is its number, the text its sentence."""

    def __init__(self, code: int) -> None:
        super().__init__(library().cfedavg_explain(code).decode())
        self.code = code


def make(*targets: str) -> str:
    """Run make in clients/c and return what it prints."""
    done = subprocess.run(["make", "--silent", "-C", str(FOLDER), *targets], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@cache
def library() -> Any:
    """Return the library, built anew if its sources have changed."""
    make("library")
    found = c.CDLL(str(path()))
    found.cfedavg_explain.restype = c.c_char_p
    for name in ("schema", "length", "digest", "first_version", "next_version", "bits53", "draw", "listed",
                 "count"):  # fmt: skip
        getattr(found, f"cfedavg_{name}").restype = U64
    found.cfedavg_key.restype, found.cfedavg_norm2.restype = I64, c.c_double
    found.cfedavg_check_reply.restype, found.cfedavg_to_bf16.restype = c.c_uint32, c.c_uint16
    found.cfedavg_value.restype = found.cfedavg_from_bf16.restype = c.c_float
    return found


def path() -> Path:
    return FOLDER / "build" / "libcfedavg.so"


def check(code: int) -> None:
    if code:
        raise Refused(code)


@cache
def make_layout(layout: Layout) -> Any:
    """Return the C library's layout, which lives as long as the tests do."""
    tensors, made = list_tensors(layout), POINTER()
    check(library().cfedavg_make_layout(tensors, SIZE(len(tensors)), c.byref(made)))
    return made


def to_c(payload: Payload) -> tuple[CPayload, list[np.ndarray]]:
    """Return a payload for C, and the arrays that it points to."""
    k, values, mask = payload.counts()[0], payload.values, payload.mask
    kind = kind_of(values)
    kind = Kind.INT8 if kind is Kind.FEW else kind  # FEW stands in headers only
    made = CPayload(payload.d, k, where_of(payload), kind)
    data = values.data if isinstance(values, Floats) else values.levels
    arrays = [np.ascontiguousarray(data)]
    made.values = arrays[0].ctypes.data
    if payload.indices is not None:
        arrays.append(np.ascontiguousarray(payload.indices, np.int64))
        made.indices = arrays[-1].ctypes.data
    if mask is not None:
        made.key, made.keep = int(mask.keys[0]), mask.keep
    if isinstance(payload.basis, Rotation):
        made.key, made.rotated = int(payload.basis.keys[0]), payload.basis.block
    if isinstance(payload.basis, Factors):
        made.rank = payload.basis.rank
    if isinstance(values, Levels):
        arrays.append(np.ascontiguousarray(values.scales, np.float32))
        made.scales, made.block, made.top = arrays[-1].ctypes.data, values.block, values.top
    return made, arrays


def from_c(made: CPayload, layout: Layout) -> Payload:
    """Return C's payload as one of the package."""
    kind, k = Kind(made.kind), made.k

    def array(address: int | None, dtype: Any, n: int) -> np.ndarray:
        size = n * np.dtype(dtype).itemsize
        return np.frombuffer(c.string_at(address, size) if n and address else b"", dtype)

    data = array(made.values, DTYPES[kind], k)
    values: Floats | Levels = Floats(data, kind.name.lower())
    if not kind.is_float:
        values = Levels(data, data[:0], made.block, made.top, per_level=kind is Kind.PER_LEVEL)
        values = replace(values, scales=array(made.scales, np.float32, values.count_scales(k)))
    where = Where(made.where)
    indices = array(made.indices, np.int64, k) if where in (Where.DRAWN, Where.LISTED) else None
    mask = Mask(np.array([made.key]), made.keep) if where is Where.DRAWN else None
    bases = {
        Where.ROTATED: Rotation(np.array([made.key]), made.rotated),
        Where.FACTORED: Factors.of(layout, made.rank),
    }
    return Payload(made.d, np.array([0, k]), indices, values, mask, bases.get(where))


def encode(payload: Payload, layout: Layout, client: int = 0, sequence: int = 0, round: int = 0,
           code_floats: bool = False) -> bytes:  # fmt: skip
    """Return the message that the C library makes."""
    made, _arrays = to_c(payload)
    message, length, sender = POINTER(), SIZE(), CSender(client, sequence, round)
    arguments = c.byref(made), c.byref(sender), code_floats, c.byref(message), c.byref(length)
    check(library().cfedavg_encode(make_layout(layout), *arguments))
    return take(message, length)


def take(data: Any, length: Any) -> bytes:
    """Return bytes that C has allocated, and free them."""
    found = c.string_at(data, length.value)
    library().cfedavg_free_bytes(data)
    return found


def decode(message: bytes, layout: Layout, **limits: int) -> Payload:
    """Return the payload that the C library reads; raise Refused with its code."""
    code, payload = try_to_decode(message, layout, **limits)
    check(code)
    assert payload is not None
    return payload


def try_to_decode(message: bytes, layout: Layout, **limits: int) -> tuple[int, Payload | None]:
    """Return the code of the C library, and the payload if the code is 0."""
    made, bounds = CPayload(), CLimits(**limits)
    arguments = make_layout(layout), c.byref(bounds), c.byref(made), None
    code: int = library().cfedavg_decode(message, SIZE(len(message)), *arguments)
    payload = from_c(made, layout) if code == 0 else None
    library().cfedavg_free_payload(c.byref(made))
    return code, payload


def expand(payload: Payload, layout: Layout) -> Payload:
    """Return the payload of all coordinates that the C library makes of one with a basis."""
    given, _arrays = to_c(payload)
    made = CPayload()
    check(library().cfedavg_expand(make_layout(layout), c.byref(given), c.byref(made)))
    expanded = from_c(made, layout)
    library().cfedavg_free_payload(c.byref(made))
    return expanded


def receive(w: np.ndarray, message: bytes, layout: Layout) -> np.ndarray:
    """Return a model copy, of float32 numbers or of bf16 bits in int16, plus a message."""
    payload = decode(message, layout)
    made, _arrays = to_c(payload if payload.basis is None else expand(payload, layout))
    w_next = w.copy()
    add = library().cfedavg_receive_bf16 if w.dtype == np.int16 else library().cfedavg_receive
    add(w_next.ctypes.data_as(POINTER), c.byref(made))
    return w_next


def find_largest(p: np.ndarray, k: int) -> np.ndarray:
    """Return the coordinates of the k largest magnitudes of a float32 vector."""
    indices = np.empty(k, np.int64)
    pointers = p.ctypes.data_as(POINTER), indices.ctypes.data_as(POINTER)
    check(library().cfedavg_find_largest(pointers[0], 0, U64(len(p)), U64(k), pointers[1]))
    return indices


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Return the bits of each value, rounded to bf16, as int16."""
    round_one = library().cfedavg_to_bf16
    return np.array([round_one(c.c_float(value)) for value in values], np.uint16).view(np.int16)


def pack_update(payload: bytes, facts: bytes, uncompressed: bytes) -> bytes:
    message, length, update = POINTER(), SIZE(), Update()
    for name, part in (("payload", payload), ("facts", facts), ("uncompressed", uncompressed)):
        setattr(update, name, c.cast(c.c_char_p(part), POINTER))
        setattr(update, f"{name}_length", len(part))
    check(library().cfedavg_pack_update(c.byref(update), c.byref(message), c.byref(length)))
    return take(message, length)


def unpack_update(data: bytes, most: int, uncompressed: int) -> tuple[bytes, bytes, bytes]:
    update = Update()
    lengths = SIZE(len(data)), U64(most), U64(uncompressed)
    check(library().cfedavg_unpack_update(data, *lengths, c.byref(update)))
    return (
        c.string_at(update.payload, update.payload_length),
        c.string_at(update.facts, update.facts_length),
        c.string_at(update.uncompressed, update.uncompressed_length),
    )


def pack_body(broadcast: bytes, uncompressed: bytes) -> bytes:
    data, length = POINTER(), SIZE()
    pointers = [c.cast(c.c_char_p(part), POINTER) for part in (broadcast, uncompressed)]
    body = Body(pointers[0], len(broadcast), pointers[1], len(uncompressed))
    check(library().cfedavg_pack_body(c.byref(body), c.byref(data), c.byref(length)))
    return take(data, length)


def unpack_body(data: bytes) -> tuple[bytes, bytes]:
    body = Body()
    check(library().cfedavg_unpack_body(data, SIZE(len(data)), c.byref(body)))
    return (
        c.string_at(body.broadcast, body.broadcast_length),
        c.string_at(body.uncompressed, body.uncompressed_length),
    )


def try_to_unpack(data: bytes) -> int:
    """Return the code for a broadcast."""
    code: int = library().cfedavg_unpack_broadcast(data, SIZE(len(data)), c.byref(CBroadcast()))
    return code


def unpack_broadcast(data: bytes) -> CBroadcast:
    """Return the broadcast in `data`, to which it points."""
    found = CBroadcast()
    check(library().cfedavg_unpack_broadcast(data, SIZE(len(data)), c.byref(found)))
    return found


def digest(data: bytes) -> int:
    found: int = library().cfedavg_digest(data, SIZE(len(data)))
    return found
