"""Versions of the model copy w that clients train from, the broadcasts that lead to them, and their bytes.

The server holds a model copy w beside its model x. After a round, the server broadcasts a message. The server
and all clients add the message to w by the same operations, so all copies of one version are bitwise equal.
A version is the generation of the server, the round, and a hash:

    first version of a generation:  hash = H(generation, round, digest of w)
    each next one:                  hash = H(hash before, message)

So equal versions come from the same messages, and copies of equal versions are equal. A broadcast leads to
one version and lists earlier versions from which a client can follow. A client that holds none of these
versions needs the whole model. `follow` never returns a copy that differs from the server's.

The bytes of a broadcast are a header, a list of 64-bit numbers, the messages, and the CRC-32 of all bytes
before. All numbers are little-endian. If the bytes are wrong, `unpack` raises WireError and no other error.

    magic CFBC, format, kind                     6 bytes
    generation, round                            32 bits each   of the version to which the broadcast leads
    hash, digest                                 64 bits each   a chain has no digest: 0
    number n of earlier versions                 32 bits        from which a client can follow
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
    """The name of the model copy after `round` rounds. A later version of a server compares as greater."""

    generation: int
    round: int
    hash: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.round}"


class Copy(NamedTuple):
    """The model copy from which a client trains, with its version."""

    version: Version
    w: Any


class Replica(Protocol):
    """The operations on a model copy w, bit for bit the same on the server and on every client.

    A message that cannot be decoded raises WireError.
    """

    def apply(self, w: Any, messages: Sequence[bytes]) -> Any:
        """Return w after the messages of consecutive rounds are added."""

    def change(self, w: Any, message: bytes) -> Any:
        """Return w with some values replaced by those in the message."""

    def replace(self, message: bytes) -> Any:
        """Return the w that a message of all coordinates holds."""

    def digest(self, w: Any) -> int:
        """Return a 64-bit hash of w."""


def compute_digest(*parts: Any) -> int:
    """Return the first 64 bits of the SHA-256 hash of the joined buffers.

    >>> compute_digest(b"ab") == compute_digest(b"a", b"b")
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "big")


def make_first_version(generation: int, round: int, digest: int) -> Version:
    """Return the first version of a generation; `digest` is the digest of w."""
    return Version(generation, round, compute_digest(_FIRST.pack(generation, round, digest)))


def make_next_version(version: Version, message: bytes) -> Version:
    """Return the version after the message of one round."""
    return Version(version.generation, version.round + 1, compute_digest(_HASH.pack(version.hash), message))


def list_versions(start: Version, messages: Sequence[bytes]) -> tuple[Version, ...]:
    """Return `start` and the version after each message, oldest first."""
    return tuple(accumulate(messages, make_next_version, initial=start))


@dataclass(frozen=True)
class Chain:
    """A broadcast of the messages that lead from `start` to `version`, oldest first; possibly none."""

    start: Version
    messages: tuple[bytes, ...]
    version: Version

    def __post_init__(self) -> None:
        _check_distance(self.start, self.version, len(self.messages))


@dataclass(frozen=True)
class Changes:
    """A broadcast of the new values of all coordinates that changed since the oldest version in `since`."""

    since: tuple[Version, ...]  # oldest first, one for each round before `version`
    message: bytes
    version: Version
    digest: int  # of w at `version`

    def __post_init__(self) -> None:
        if not self.since:
            raise WireError("a broadcast of changes must list at least one earlier version")
        for i, version in enumerate(self.since):
            _check_distance(version, self.version, len(self.since) - i)


@dataclass(frozen=True)
class Whole:
    """A broadcast of the whole model copy w."""

    message: bytes
    version: Version
    digest: int


Broadcast = Chain | Changes | Whole


def _check_distance(start: Version, end: Version, rounds: int) -> None:
    """Raise WireError unless `end` can be `rounds` rounds after `start`."""
    apart = (end.generation - start.generation, end.round - start.round)
    if apart != (0, rounds) or (rounds == 0 and start != end):
        raise WireError(f"version {start} must be {rounds} rounds before {end}")


def follow(copy: Copy | None, broadcast: Broadcast, replica: Replica) -> Copy | None:
    """Return the model copy to which the broadcast leads; None if the client needs the whole model.

    If a reply got lost, the client may hold a newer version than the server knows. So a client can follow
    from any version that the broadcast lists. Messages that the copy already contains are not applied again.
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
    """Return the bytes of a broadcast; raise WireError if a number is too large for its field."""
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
        raise WireError("generation and round must fit in 32 bits, hashes in 64 bits") from None
    return data + _CHECKSUM.pack(zlib.crc32(data))


def unpack(data: bytes) -> Broadcast:
    """Return the broadcast of the bytes; raise WireError if `pack` cannot have made the bytes."""
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
        raise WireError(f"the messages of the broadcast must have {ends[-1]} bytes, got {len(body)}")
    messages = tuple(body[one:other] for one, other in pairwise(ends))
    return Chain(Version(header.generation, before, start), messages, version)


def _read(data: bytes) -> tuple[_Header, tuple[int, ...], bytes]:
    """Return header, list of numbers, and the bytes after the list; raise WireError if one is wrong."""
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
        raise WireError(f"the broadcast is too short for the {listed} numbers that it lists")
    return header, struct.unpack_from(f"<{listed}Q", data, _HEADER.size), data[start:end]


def _check_header(header: _Header) -> None:
    """Raise WireError if `pack` cannot have made the header."""
    most = min(MOST, header.round)
    rules = {
        f"the broadcast is of format {header.format}, this program reads format {FORMAT}":
            header.format == FORMAT,
        f"the broadcast is of kind {header.kind}, which format {FORMAT} does not know":
            header.kind in (_CHAIN, _CHANGES, _WHOLE),
        f"the generation of a broadcast must be above 0, got {header.generation}": header.generation > 0,
        f"a broadcast to round {header.round} must list at most {most} versions, got {header.earlier}":
            header.earlier <= most,
        f"the digest of a chain must be 0, got {header.digest}": header.kind != _CHAIN or not header.digest,
        f"a whole model must list 0 earlier versions, got {header.earlier}":
            header.kind != _WHOLE or not header.earlier,
    }  # fmt: skip
    for rule, holds in rules.items():
        if not holds:
            raise WireError(rule)
