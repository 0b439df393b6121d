"""Versions of the model that every client trains from, the broadcasts that lead to them, and their bytes.

The server holds w beside its model x. After a round it broadcasts a message, and everyone adds that to w by
the same operations, so all copies of one version are bitwise equal. A version is named by the generation of
the server, the round, and a hash:

    first version of a generation:  hash = H(generation, round, digest of w)
    each next one:                  hash = H(hash before, message)

Equal versions therefore come from the same messages, and a copy of an equal version is the same copy. A
broadcast leads to one version and lists others from which it can be reached. A client that holds one of them
follows; any other client needs the whole model. `follow` never returns a copy that is not the server's.

A broadcast travels as a header, a list of 64-bit numbers, the messages, and the CRC-32 of all that. All
numbers are little-endian. Whatever the bytes are, `unpack` raises nothing but WireError.

    magic CFBC, format, kind                     6 bytes
    generation, round                            32 bits each   of the version that it leads to
    hash, digest                                 64 bits each   a chain has no digest: 0
    number n of versions before it               32 bits        that lead there
    chain:    hash of its start, then the length of each of n messages
    changes:  hashes of the n versions, oldest first
    whole:    nothing, and n is 0
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

from cfedavg.wire import WireError

MAGIC, FORMAT = b"CFBC", 1
MOST = 2**16  # versions or messages in a broadcast
_CHAIN, _CHANGES, _WHOLE = range(3)  # kinds
_HEADER = struct.Struct("<4sBBIIQQI")
_CHECKSUM = struct.Struct("<I")
_FIRST = struct.Struct("<IIQ")
_HASH = struct.Struct("<Q")


class Version(NamedTuple):
    """The name of the copy after `round` rounds. Versions of one server are in the order of their fields."""

    generation: int
    round: int
    hash: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.round}"


class Copy(NamedTuple):
    """The model that a client trains from, with its version."""

    version: Version
    w: Any


class Replica(Protocol):
    """The operations on a copy, bit for bit the same on the server and on every client.

    A message that cannot be decoded raises WireError.
    """

    def apply(self, w: Any, messages: Sequence[bytes]) -> Any:
        """Return w after the messages of some rounds."""

    def change(self, w: Any, message: bytes) -> Any:
        """Return w with the values that the message holds in place of its own."""

    def replace(self, message: bytes) -> Any:
        """Return the w that the message holds."""

    def digest(self, w: Any) -> int:
        """Return 64 bits of a hash of w."""


def compute_digest(*parts: Any) -> int:
    """Return the first 64 bits of SHA-256 over these buffers.

    >>> compute_digest(b"ab") == compute_digest(b"a", b"b")
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "big")


def make_first_version(generation: int, round: int, digest: int) -> Version:
    """Return the version with which a generation begins; `digest` is that of w."""
    return Version(generation, round, compute_digest(_FIRST.pack(generation, round, digest)))


def make_next_version(version: Version, message: bytes) -> Version:
    """Return the version after the message of one round."""
    return Version(version.generation, version.round + 1, compute_digest(_HASH.pack(version.hash), message))


def list_versions(start: Version, messages: Sequence[bytes]) -> tuple[Version, ...]:
    """Return the versions that these messages lead through, oldest first, with the start."""
    return tuple(accumulate(messages, make_next_version, initial=start))


@dataclass(frozen=True)
class Chain:
    """The messages that lead from `start` to `version`, oldest first. There may be none."""

    start: Version
    messages: tuple[bytes, ...]
    version: Version

    def __post_init__(self) -> None:
        _check_distance(self.start, self.version, len(self.messages))


@dataclass(frozen=True)
class Changes:
    """The present values of all coordinates that changed since the oldest of `since`."""

    since: tuple[Version, ...]  # oldest first, each one round before the next, up to `version`
    message: bytes
    version: Version
    digest: int  # of w at `version`

    def __post_init__(self) -> None:
        if not self.since:
            raise WireError("changes must list a version before their own")
        for i, version in enumerate(self.since):
            _check_distance(version, self.version, len(self.since) - i)


@dataclass(frozen=True)
class Whole:
    """All of w."""

    message: bytes
    version: Version
    digest: int


Broadcast = Chain | Changes | Whole


def _check_distance(start: Version, end: Version, rounds: int) -> None:
    """Raise WireError unless the versions can be so many rounds apart."""
    apart = (end.generation - start.generation, end.round - start.round)
    if apart != (0, rounds) or (rounds == 0 and start != end):
        raise WireError(f"version {start} must be {rounds} rounds before {end}")


def follow(copy: Copy | None, broadcast: Broadcast, replica: Replica) -> Copy | None:
    """Return the copy that the broadcast leads to; None if this client needs the whole model.

    The server may know an older version of this client than it holds, because a reply got lost. So a
    broadcast can be used from any version that it lists. What has been applied before is not applied again.
    """
    if copy is not None and copy.version == broadcast.version:
        return copy
    try:
        if isinstance(broadcast, Whole):
            w = replica.replace(broadcast.message)
        elif copy is None:
            return None
        elif isinstance(broadcast, Chain):  # all hashes are checked before anything is applied
            versions = list_versions(broadcast.start, broadcast.messages)
            if versions[-1] != broadcast.version or copy.version not in versions:
                return None
            missed = broadcast.messages[versions.index(copy.version) :]
            return Copy(broadcast.version, replica.apply(copy.w, missed))
        elif copy.version not in broadcast.since:
            return None
        else:
            w = replica.change(copy.w, broadcast.message)
        return Copy(broadcast.version, w) if replica.digest(w) == broadcast.digest else None
    except WireError:
        return None


class _Header(NamedTuple):
    magic: bytes
    format: int
    kind: int
    generation: int
    round: int
    hash: int
    digest: int
    earlier: int


def pack(broadcast: Broadcast) -> bytes:
    """Return the bytes of a broadcast; raise WireError if its numbers do not fit."""
    digest, numbers, messages = 0, list[int](), list[bytes]()
    if isinstance(broadcast, Chain):
        kind, messages = _CHAIN, [*broadcast.messages]
        numbers = [broadcast.start.hash, *map(len, messages)]
    else:
        kind, digest, messages = _WHOLE, broadcast.digest, [broadcast.message]
        if isinstance(broadcast, Changes):
            kind, numbers = _CHANGES, [version.hash for version in broadcast.since]
    header = _Header(MAGIC, FORMAT, kind, *broadcast.version, digest, len(numbers) - (kind == _CHAIN))
    _check_header(header)
    try:
        data = b"".join([_HEADER.pack(*header), struct.pack(f"<{len(numbers)}Q", *numbers), *messages])
    except struct.error:
        raise WireError("a broadcast has 32 bits for generation and round, 64 for hashes") from None
    return data + _CHECKSUM.pack(zlib.crc32(data))


def unpack(data: bytes) -> Broadcast:
    """Return the broadcast of these bytes; raise WireError unless `pack` can have made them."""
    header, numbers, body = _read(data)
    version, before = Version(header.generation, header.round, header.hash), header.round - header.earlier
    if header.kind == _WHOLE:
        return Whole(body, version, header.digest)
    if header.kind == _CHANGES:
        since = (Version(header.generation, before + i, hash) for i, hash in enumerate(numbers))
        return Changes(tuple(since), body, version, header.digest)
    start, *lengths = numbers
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(body):
        raise WireError(f"the messages of the broadcast take {ends[-1]} bytes, and {len(body)} are there")
    messages = tuple(body[one:other] for one, other in pairwise(ends))
    return Chain(Version(header.generation, before, start), messages, version)


def _read(data: bytes) -> tuple[_Header, tuple[int, ...], bytes]:
    """Return the header, the list of numbers, and what follows it, all checked."""
    end = len(data) - _CHECKSUM.size
    if end < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise WireError(f"not a broadcast: it must begin with {MAGIC.decode()} and a header")
    header = _Header(*_HEADER.unpack_from(data))
    _check_header(header)
    if _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
        raise WireError("the checksum of the broadcast is wrong")
    listed = header.earlier + (header.kind == _CHAIN)
    start = _HEADER.size + 8 * listed
    if start > end:
        raise WireError(f"the broadcast lists {listed} numbers, and is too short for them")
    return header, struct.unpack_from(f"<{listed}Q", data, _HEADER.size), data[start:end]


def _check_header(header: _Header) -> None:
    """Raise WireError unless `pack` can have made the header."""
    most = min(MOST, header.round)
    rules = {
        f"the broadcast is of format {header.format}, this program reads format {FORMAT}":
            header.format == FORMAT,
        f"the broadcast is of kind {header.kind}, which format {FORMAT} does not know":
            header.kind in (_CHAIN, _CHANGES, _WHOLE),
        "the generation of a broadcast must be above 0": header.generation > 0,
        f"a broadcast to round {header.round} lists at most {most} versions before, got {header.earlier}":
            header.earlier <= most,
        "a chain has no digest": header.kind != _CHAIN or not header.digest,
        "a whole model lists no versions before its own": header.kind != _WHOLE or not header.earlier,
    }  # fmt: skip
    for rule, holds in rules.items():
        if not holds:
            raise WireError(rule)
