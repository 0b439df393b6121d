"""Broadcast <-> bytes. Whatever the bytes are, `unpack` raises nothing but WireError.

A broadcast is a header, a list of 64-bit numbers, the messages, and the CRC-32 of all that. All numbers are
little-endian.

    magic CFBC, format, kind                     6 bytes
    generation, round                            32 bits each   of the version that it leads to
    hash, digest                                 64 bits each   a chain has no digest: 0
    number n of versions before it               32 bits        that lead there
    chain:    hash of its start, then the length of each of n messages
    changes:  hashes of the n versions, oldest first
    whole:    nothing, and n is 0
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

from cfedavg.federate.versions import Broadcast, Chain, Changes, Version, Whole
from cfedavg.wire import WireError

MAGIC, FORMAT = b"CFBC", 1
MOST = 2**16  # versions or messages in a broadcast
_HEADER = struct.Struct("<4sBBIIQQI")
_CHECKSUM = struct.Struct("<I")


class _Kind(IntEnum):
    CHAIN = 0
    CHANGES = 1
    WHOLE = 2


class _Header(NamedTuple):
    magic: bytes
    format: int
    kind: int
    generation: int
    round: int
    hash: int
    digest: int
    earlier: int

    @property
    def version(self) -> Version:
        return Version(self.generation, self.round, self.hash)

    def before(self, hashes: Sequence[int]) -> tuple[Version, ...]:
        """Return versions with these hashes, the last of them one round before this one."""
        first = self.round - len(hashes)
        return tuple(Version(self.generation, first + i, hash) for i, hash in enumerate(hashes))


def measure(broadcast: Broadcast) -> int:
    """Return the length of a broadcast in bytes, without packing it."""
    _, _, numbers, messages = _parts(broadcast)
    return _HEADER.size + 8 * len(numbers) + sum(map(len, messages)) + _CHECKSUM.size


def pack(broadcast: Broadcast) -> bytes:
    """Return the bytes of a broadcast; raise WireError if its numbers do not fit."""
    kind, digest, numbers, messages = _parts(broadcast)
    earlier = len(numbers) - (kind == _Kind.CHAIN)
    header = _Header(MAGIC, FORMAT, kind, *broadcast.version, digest, earlier)
    _check(header)
    try:
        parts = [_HEADER.pack(*header), struct.pack(f"<{len(numbers)}Q", *numbers), *messages]
    except struct.error:
        raise WireError("a broadcast has 32 bits for generation and round, 64 for hashes") from None
    data = b"".join(parts)
    return data + _CHECKSUM.pack(zlib.crc32(data))


def _parts(broadcast: Broadcast) -> tuple[_Kind, int, Sequence[int], Sequence[bytes]]:
    """Return the kind of a broadcast, its digest, its list of numbers and its messages."""
    if isinstance(broadcast, Chain):
        return _Kind.CHAIN, 0, [broadcast.start.hash, *map(len, broadcast.messages)], broadcast.messages
    if isinstance(broadcast, Changes):
        return _Kind.CHANGES, broadcast.digest, [v.hash for v in broadcast.since], [broadcast.message]
    return _Kind.WHOLE, broadcast.digest, [], [broadcast.message]


def unpack(data: bytes) -> Broadcast:
    """Return the broadcast of these bytes; raise WireError unless `pack` can have made them."""
    header, numbers, body = _read(data)
    if header.kind == _Kind.WHOLE:
        return Whole(body, header.version, header.digest)
    if header.kind == _Kind.CHANGES:
        return Changes(header.before(numbers), body, header.version, header.digest)
    start, *lengths = numbers
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(body):
        raise WireError(f"the messages of the broadcast take {ends[-1]} bytes, and {len(body)} are there")
    messages = tuple(body[one:other] for one, other in pairwise(ends))
    version = Version(header.generation, header.round - header.earlier, start)
    return Chain(version, messages, header.version)


def _read(data: bytes) -> tuple[_Header, tuple[int, ...], bytes]:
    """Return the header, the list of numbers, and what follows it, all checked."""
    end = len(data) - _CHECKSUM.size
    if end < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise WireError(f"not a broadcast: it must begin with {MAGIC.decode()} and a header")
    header = _Header(*_HEADER.unpack_from(data))
    _check(header)
    if _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
        raise WireError("the checksum of the broadcast is wrong")
    listed = header.earlier + (header.kind == _Kind.CHAIN)
    start = _HEADER.size + 8 * listed
    if start > end:
        raise WireError(f"the broadcast lists {listed} numbers, and is too short for them")
    return header, struct.unpack_from(f"<{listed}Q", data, _HEADER.size), data[start:end]


def _check(header: _Header) -> None:
    """Raise WireError unless a header can be one of ours."""
    if header.format != FORMAT:
        raise WireError(f"the broadcast is of format {header.format}, this program reads format {FORMAT}")
    if header.kind not in list(_Kind):
        raise WireError(f"the broadcast is of kind {header.kind}, which format {FORMAT} does not know")
    if header.generation == 0:
        raise WireError("the generation of a broadcast must be above 0")
    if header.earlier > min(MOST, header.round):
        raise WireError(
            f"a broadcast to round {header.round} lists at most {min(MOST, header.round)} versions before, "
            f"got {header.earlier}"
        )
    if header.kind == _Kind.CHAIN and header.digest:
        raise WireError("a chain has no digest")
    if header.kind == _Kind.WHOLE and header.earlier:
        raise WireError("a whole model lists no versions before its own")
