"""A first, plain encoding: a fixed header, then indices as uint32 and values as they lie in memory."""

from __future__ import annotations

import struct

import numpy as np

from cfedavg import keys as keyed
from cfedavg.layout import Layout
from cfedavg.payload import Floats, Levels, Mask, Payload, blocks

MAGIC = b"CFA0"
# magic, where, what, level bytes, schema hash, d, k, block, top, mask key, mask keep
HEADER = struct.Struct("<4sBBBxQQQQHxxqQ")
ALL, INDEXED, DRAWN = range(3)
WHAT = ("fp32", "fp64", "bf16", "levels")
DTYPES = {"fp32": "<f4", "fp64": "<f8", "bf16": "<i2", 1: "<i1", 2: "<i2"}


class WireError(ValueError):
    """A message that cannot be decoded; says what is wrong with it."""


def encode(payload: Payload, layout: Layout) -> bytes:
    """The message of one client, whose payload holds NumPy arrays (see Payload.numpy)."""
    if len(payload) != 1:
        raise ValueError("encode takes the payload of one client: see Payload.clients")
    values, k = payload.values, payload.counts()[0]
    sections = []
    if payload.indices is not None and payload.mask is None:
        sections.append(payload.indices.astype("<u4"))
    if isinstance(values, Floats):
        what, width, block, top = WHAT.index(values.dtype), 0, 0, 0
        sections.append(values.data.astype(DTYPES[values.dtype]))
    else:
        what, width, block, top = WHAT.index("levels"), values.levels.itemsize, values.block, values.top
        sections += [values.levels.astype(DTYPES[width]), values.scales.astype("<f4")]
    where = DRAWN if payload.mask else ALL if payload.indices is None else INDEXED
    key, keep = (int(payload.mask.keys[0]), payload.mask.keep) if payload.mask else (0, 0)
    head = HEADER.pack(MAGIC, where, what, width, layout.schema_hash, payload.d, k, block, top, key, keep)
    return head + b"".join(section.tobytes() for section in sections)


def decode(data: bytes, *, layout: Layout) -> Payload:
    """The payload of a message; raises only WireError."""
    if len(data) < HEADER.size or data[:4] != MAGIC:
        raise WireError("not a message of this format")
    _, where, what, width, schema, d, k, block, top, key, keep = HEADER.unpack_from(data)
    if schema != layout.schema_hash or d != layout.d:
        raise WireError("the message is for another model: names, shapes, dtypes or order differ")
    if where > DRAWN or what >= len(WHAT) or k > d or (where == ALL and k != d):
        raise WireError("the header contradicts itself")
    sizes = _section_sizes(where, what, width, k, block)
    if len(data) != HEADER.size + sum(n * np.dtype(dtype).itemsize for n, dtype in sizes):
        raise WireError("the message is cut short or too long")
    sections, start = [], HEADER.size
    for n, dtype in sizes:
        sections.append(np.frombuffer(data, dtype, n, start))
        start += sections[-1].nbytes
    indices = _indices(where, sections, d, k, key, keep)
    values: Floats | Levels
    if WHAT[what] == "levels":
        values = Levels(sections[-2], sections[-1], block, top)
    else:
        values = Floats(sections[-1], WHAT[what])
    mask = Mask(np.array([key]), keep) if where == DRAWN else None
    return Payload(d, np.array([0, k]), indices, values, mask)


def _section_sizes(where: int, what: int, width: int, k: int, block: int) -> list[tuple[int, str]]:
    sizes = [(k, "<u4")] if where == INDEXED else []
    if WHAT[what] != "levels":
        return [*sizes, (k, DTYPES[WHAT[what]])]
    if width not in (1, 2):
        raise WireError(f"levels of {width} bytes do not exist")
    return [*sizes, (k, DTYPES[width]), (blocks(k, block), "<f4")]


def _indices(
    where: int, sections: list[np.ndarray], d: int, k: int, key: int, keep: int
) -> np.ndarray | None:
    if where == ALL:
        return None
    if where == DRAWN:
        drawn = np.flatnonzero(keyed.bits53(key, np.arange(d, dtype=np.int64)) < keep)
        if len(drawn) != k:
            raise WireError(f"the mask keeps {len(drawn)} coordinates, the message says {k}")
        return drawn
    indices = sections[0].astype(np.int64)
    if k and (indices[-1] >= d or (np.diff(indices) <= 0).any()):
        raise WireError("the indices are not increasing below d")
    return indices
