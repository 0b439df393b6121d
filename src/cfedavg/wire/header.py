"""The header of a message: the sender, the model, the coding, and the lengths of the sections."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple, TypeVar

MAGIC = b"CFAV"
CHECKSUM = struct.Struct("<I")  # the CRC-32 of everything before it
# magic, version, then the fields of Header in their order
_STRUCT = struct.Struct("<4sBBBBQQQQQIQQQ")
SIZE = _STRUCT.size
Name = TypeVar("Name", bound=IntEnum)


class WireError(ValueError):
    """The error of a message that cannot be decoded, or of a payload that cannot be encoded."""


class Where(IntEnum):
    """How a message names its coordinates: all of them, drawn from a key, or listed."""

    ALL = 0
    DRAWN = 1
    LISTED = 2


class Kind(IntEnum):
    """The number format of the values: floats, or integer levels with scales."""

    FP32 = 0
    FP64 = 1
    BF16 = 2
    INT8 = 3
    INT16 = 4


class Coding(IntEnum):
    """How the values are written: uncoded, or entropy-coded."""

    PLAIN = 0
    CODED = 1


def may_be_plain(where: Where, kind: Kind) -> bool:
    """Return whether values may stay uncoded: only fp32 and fp64 values of all coordinates may."""
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
        """Return 2 for coded fp32 or fp64 values of all coordinates, 1 for every other message."""
        return 2 if self.coding is Coding.CODED and may_be_plain(self.where, self.kind) else 1

    @property
    def message_bytes(self) -> int:
        """The length of the whole message in bytes."""
        return SIZE + self.index_bytes + self.value_bytes + self.raw_bytes + CHECKSUM.size

    def pack(self) -> bytes:
        """Return the header as bytes."""
        try:
            return _STRUCT.pack(MAGIC, self.version, *self)
        except struct.error:
            found = f"{self.client}, {self.sequence} and {self.round}"
            rule = "`client` and `sequence` must be from 0 to 2^64 - 1, `round` from 0 to 2^32 - 1"
            raise WireError(f"{rule}, got {found}") from None


def read_header(data: bytes) -> Header:
    """Return the header of a message. Only the header is checked.

    >>> from cfedavg import Layout, encode, parse
    >>> import torch
    >>> message = encode(parse("topk(0.5)").compress(torch.ones(4), key=0).numpy(), Layout.flat(4), client=7)
    >>> read_header(message).client, read_header(message).k
    (7, 2)
    """
    if len(data) < SIZE or bytes(data[:4]) != MAGIC:
        raise WireError(f"not a message: it must begin with {MAGIC.decode()} and a header of {SIZE} bytes")
    _, version, where, kind, coding, *numbers = _STRUCT.unpack_from(data)
    if version not in (1, 2):
        raise WireError(f"the message is of version {version}, this program reads versions 1 and 2")
    known = _known(Where, where, version), _known(Kind, kind, version), _known(Coding, coding, version)
    header = Header(*known, *numbers)
    if header.version == version:
        return header
    what = f"{header.coding.name} {header.kind.name} values of {header.where.name} coordinates"
    if version == 1:
        raise WireError(f"{what} need version 2, the message is of version 1")
    raise WireError(f"version 2 is for CODED FP32 or FP64 values of ALL coordinates, not for {what}")


def _known(names: type[Name], value: int, version: int) -> Name:
    try:
        return names(value)
    except ValueError:
        name = names.__name__.lower()
        raise WireError(f"the header says {name} = {value}, which version {version} does not know") from None
