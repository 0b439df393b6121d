"""The frame of a message: header, lengths of the sections, checksum; and tables that describe a message."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from cfedavg.core.bases import Factors
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Payload, blocks

MAGIC = b"CFAV"
CHECKSUM = struct.Struct("<I")  # the CRC-32 of everything before it
# magic, version, then the fields of Header in their order
_STRUCT = struct.Struct("<4sBBBBQQQQQIQQQ")
SIZE = _STRUCT.size  # bytes of a header
LEAST = SIZE + CHECKSUM.size  # bytes of a message whose sections are empty
KEY_AND_KEEP = struct.Struct("<qQ")  # the section of coordinates that are drawn from a key
KEY_AND_BLOCK = struct.Struct("<qI")  # the section of coordinates of a rotated vector
RANK = struct.Struct("<I")  # the section of coordinates that are factors of matrices
SCALES = struct.Struct("<IH")  # `block` and `top`, which precede the scales of levels
VALUES_PER_BYTE = 11_354  # at most: a value takes at least one coded bit of probability 65504/65536
# For each version: the largest `where`, `kind` and `coding` in its headers.
KNOWN = {1: (2, 4, 1), 2: (2, 4, 1), 3: (5, 6, 1)}
PURPOSES = {
    2: "CODED FP32 or FP64 values of ALL coordinates",
    3: "PER_LEVEL or FEW values, or for ROTATED, FACTORED or CHUNKED coordinates",
}
Rows = Sequence[tuple[str, ...]]


class WireError(ValueError):
    """The error of a message that cannot be decoded, or of a payload that cannot be encoded."""


class Where(IntEnum):
    """Which coordinates a message sends: all, drawn from a key, listed, or in another basis."""

    ALL = 0
    DRAWN = 1
    LISTED = 2
    ROTATED = 3
    FACTORED = 4
    CHUNKED = 5  # listed, as many in each chunk

    @property
    def is_basis(self) -> bool:
        """Whether the values are coordinates in another basis, which section 1 describes."""
        return self in (Where.ROTATED, Where.FACTORED)


class Kind(IntEnum):
    """The number format of the values: floats, or integer levels with scales."""

    FP32 = 0
    FP64 = 1
    BF16 = 2
    INT8 = 3
    INT16 = 4
    PER_LEVEL = 5  # levels of 8 bits; a block has a scale for each magnitude
    FEW = 6  # levels of 8 bits of few magnitudes, which neighbours predict

    @property
    def is_float(self) -> bool:
        """Whether the values are floats; if not, they are integer levels."""
        return self <= Kind.BF16


# The bytes of section 1, where they do not depend on the coordinates.
FIXED = {
    Where.ALL: 0, Where.DRAWN: KEY_AND_KEEP.size, Where.ROTATED: KEY_AND_BLOCK.size, Where.FACTORED: RANK.size
}  # fmt: skip
DTYPES: dict[Kind, np.dtype[Any]] = dict(
    zip(Kind, map(np.dtype, ("<f4", "<f8", "<i2", "<i1", "<i2", "<i1", "<i1")), strict=True)
)


LEAST_LEVEL = {Kind.PER_LEVEL: 1, Kind.FEW: 0}  # magnitude, of the kinds that neighbours predict


class Coding(IntEnum):
    """How the values are written: uncoded, or entropy-coded."""

    PLAIN = 0
    CODED = 1


def may_be_plain(where: Where, kind: Kind) -> bool:
    """Return whether values may stay uncoded: only if they are fp32 or fp64 and all coordinates are sent."""
    return where is Where.ALL and kind in (Kind.FP32, Kind.FP64)


class Header(NamedTuple):
    """The fields of a message's header. The last three are the lengths of the sections in bytes."""

    where: Where
    kind: Kind
    coding: Coding
    schema: int
    d: int
    k: int
    client: int
    sequence: int
    round: int
    index_bytes: int
    value_bytes: int
    raw_bytes: int

    @property
    def version(self) -> int:
        """Return the lowest format version that has this where, kind and coding."""
        if self.where >= Where.ROTATED or self.kind in LEAST_LEVEL:
            return 3
        return 2 if self.coding is Coding.CODED and may_be_plain(self.where, self.kind) else 1

    def pack(self) -> bytes:
        """Return the header as bytes."""
        try:
            return _STRUCT.pack(MAGIC, self.version, *self)
        except struct.error:
            found = f"{self.client}, {self.sequence} and {self.round}"
            rule = "`client` and `sequence` must be from 0 to 2^64 - 1, `round` from 0 to 2^32 - 1"
            raise WireError(f"{rule}, got {found}") from None


def read_header(data: bytes) -> Header:
    """Return the header of a message, after a check of the header alone.

    >>> from cfedavg import Layout, encode, parse
    >>> import torch
    >>> message = encode(parse("topk(0.5)").compress(torch.ones(4), key=0).numpy(), Layout.flat(4), client=7)
    >>> read_header(message).client, read_header(message).k
    (7, 2)
    """
    if len(data) < SIZE or bytes(data[:4]) != MAGIC:
        raise WireError(
            f"not a message: it must have a header of {SIZE} bytes that begins with {MAGIC.decode()}"
        )
    _, version, where, kind, coding, *numbers = _STRUCT.unpack_from(data)
    if version not in KNOWN:
        raise WireError(f"the message is of version {version}, but this program reads only 1 to {max(KNOWN)}")
    for name, value, most in zip(
        ("where", "kind", "coding"), (where, kind, coding), KNOWN[version], strict=True
    ):
        if value > most:
            raise WireError(f"the header says {name} = {value}, but version {version} has only 0 to {most}")
    header = Header(Where(where), Kind(kind), Coding(coding), *numbers)
    if header.version == version:
        return header
    what = f"{header.coding.name} {header.kind.name} values of {header.where.name} coordinates"
    if header.version > version:
        raise WireError(f"{what} need version {header.version}, but the message is of version {version}")
    raise WireError(f"version {version} is for {PURPOSES[version]}, not for {what}")


def check_header(header: Header, layout: Layout, kmax: int | None) -> None:
    """Raise WireError unless the header fits this layout, has at most `kmax` values, and is consistent."""
    if header.schema != layout.schema_hash or header.d != layout.d:
        raise WireError(
            "the message is for another model: names, shapes, dtypes or order of its tensors differ"
        )
    # A rotation fills the vector with zeros up to less than twice its length.
    most = 2 * header.d if header.where is Where.ROTATED else header.d
    most = most if kmax is None else min(kmax, most)
    if header.k > most:
        raise WireError(f"the message must hold at most {most} values, got k = {header.k}")
    if header.where is Where.ALL and header.k != header.d:
        raise WireError(f"a message of all coordinates must hold {header.d} values, got k = {header.k}")
    if header.coding is Coding.PLAIN and not may_be_plain(header.where, header.kind):
        what = f"{header.kind.name} values of {header.where.name} coordinates"
        raise WireError(f"{what} must be CODED, got PLAIN")


def split_message(data: bytes, header: Header) -> tuple[memoryview, memoryview, memoryview]:
    """Return the three sections of a message: coordinates, coded values, copied values.

    Raise WireError if a length or the checksum is wrong.
    """
    view, coded = memoryview(data), SIZE + header.index_bytes
    copied = coded + header.value_bytes
    needed = copied + header.raw_bytes + CHECKSUM.size
    if len(data) != needed:
        fault = "cut short" if len(data) < needed else "too long"
        raise WireError(f"the message is {fault}: it must have {needed} bytes, got {len(data)}")
    check_lengths(header, view[copied : -CHECKSUM.size])
    if zlib.crc32(view[: -CHECKSUM.size]) != CHECKSUM.unpack(view[-CHECKSUM.size :])[0]:
        raise WireError("the checksum does not fit: the message was damaged on its way")
    return view[SIZE:coded], view[coded:copied], view[copied : -CHECKSUM.size]


def check_lengths(header: Header, copied: memoryview) -> None:
    """Raise WireError unless the length of each section fits the number of values in the header."""
    k, indices, values = header.k, header.index_bytes, header.value_bytes
    needed = FIXED.get(header.where, indices)
    if indices != needed:
        raise WireError(f"the section of the indices must have {needed} bytes, got {indices}")
    coded = k if header.coding is Coding.CODED else 0
    if header.kind.is_float:
        needed = k * DTYPES[header.kind].itemsize - 2 * coded  # coding takes the upper two bytes of a float
    elif len(copied) < SCALES.size:
        needed = SCALES.size
    else:
        block, top = SCALES.unpack_from(copied)
        needed = SCALES.size + 4 * blocks(k, block) * (top if header.kind is Kind.PER_LEVEL else 1)
    if len(copied) != needed:
        raise WireError(
            f"the section of copied values must have {needed} bytes for k = {k}, got {len(copied)}"
        )
    if coded > VALUES_PER_BYTE * (values + 8) or (values and not coded):
        raise WireError(f"the section of coded values has {values} bytes, which does not fit {coded} values")


def header_rows(header: Header) -> Rows:
    """Return a table of the header for people to read, with rows (field, value)."""
    words = ("all coordinates", "drawn from a key", "listed", "of the rotated vector", "factors of matrices",
             "listed, as many in each chunk")  # fmt: skip
    where, bits = words[header.where], 8 * DTYPES[header.kind].itemsize
    values = f"{bits}-bit floats" if header.kind.is_float else f"levels of {bits} bits, with scales"
    values = {
        Kind.BF16: "bf16",
        Kind.PER_LEVEL: "levels of 8 bits, with a scale for each magnitude",
        Kind.FEW: "levels of 8 bits and few magnitudes, with scales",
    }.get(header.kind, values)
    return [
        ("version", f"{header.version}"),
        ("sender", f"client {header.client}, message {header.sequence}, round {header.round}"),
        ("model", f"schema {header.schema:016x}, d = {header.d:,}"),
        ("coordinates", f"k = {header.k:,} ({header.k / max(header.d, 1):.3%}), {where}"),
        ("values", f"{values}, {header.coding.name.lower()}"),
    ]


def entropy_bound(d: int, k: int) -> float:
    """Return log2 C(d, k) / k: the bits per index that a random set of k out of d indices needs.

    >>> round(entropy_bound(582_026, 5820), 2)
    8.08
    """
    if not 0 < k < d:
        return 0.0
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2) / k


def section_rows(data: bytes) -> Rows:
    """Return a table of a message's sections, with rows (section, bytes, bits per sent coordinate, remark).

    Raise WireError if a length or the checksum of the message is wrong.
    """
    header = read_header(data)
    coordinates, coded, copied = map(len, split_message(data, header))
    k, bound, remark = max(header.k, 1), entropy_bound(header.d, header.k), ""
    if header.where in (Where.LISTED, Where.CHUNKED) and bound:
        remark = f"{8 * coordinates / k / bound:.3f} of the entropy bound, {bound:.2f}"
    if header.where is Where.DRAWN:
        remark = f"a key; the entropy bound is {bound:.2f}"
    if header.where.is_basis:
        remark = "the basis"
    dense = 4 * header.d
    rows = [
        ("header and checksum", LEAST, ""),
        ("coordinates", coordinates, remark),
        ("values, coded", coded, ""),
        ("values, copied", copied, ""),
        ("message", len(data), f"{dense / len(data):.3g} times shorter than {dense:,} bytes of fp32"),
    ]
    return [(name, f"{size:,}", f"{8 * size / k:.2f}", remark) for name, size, remark in rows]


def tensor_rows(payload: Payload, layout: Layout) -> Rows:
    """Return a table with a row for each tensor: name, shape, number and share of the values sent for it.

    A rotation mixes all coordinates: each tensor then counts as sent.
    """
    rows, counts = [], payload.basis.counts() if isinstance(payload.basis, Factors) else None
    parts = zip(layout.names, layout.shapes, layout.slices(), strict=True)
    for i, (name, shape, part) in enumerate(parts):
        sent = size = part.stop - part.start
        if payload.indices is not None:
            start, stop = np.searchsorted(payload.indices, [part.start, part.stop])
            sent = int(stop - start)
        elif counts is not None:
            sent = counts[i]
        share = sent / max(size, 1)
        rows.append((name, " x ".join(map(str, shape)) or "number", f"{sent:,}", f"{share:.2%}"))
    return rows
