"""What server and clients exchange: requests, their stamps and marks, and broadcasts of the model copy.

The server holds a model copy w beside its model x. After a round, the server broadcasts a message. The server
and all clients add the message to w by the same operations, so all copies of one version are bitwise equal.
A version is the generation of the server, the round, and a hash:

    first version of a generation:  hash = H(generation, round, digest of w)
    each next one:                  hash = H(hash before, message)

So equal versions come from the same messages, and copies of equal versions are equal. A broadcast leads to
one version and lists earlier versions from which a client can follow. A client that holds none of these
versions needs the whole model. `follow` never returns a copy that differs from the server's. docs/protocol.md
specifies the bytes of a broadcast.
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

AHEAD = 2 * 86_400  # seconds by which a generation (a time) may be ahead of a client's clock
MAGIC, FORMAT = b"CFBC", 1
MOST = 2**16  # versions or messages in a broadcast
_CHAIN, _CHANGES, _WHOLE = range(3)  # kinds of broadcasts
_HEADER = struct.Struct("<4sBBIIQQI")
_CHECKSUM = struct.Struct("<I")
_FIRST = struct.Struct("<IIQ")
_HASH = struct.Struct("<Q")


class Stamp(NamedTuple):
    """The name of a dispatch: the server's generation, and a number within the generation.

    A server that restores a backup takes a higher generation.
    """

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.number}"

    @property
    def sequence(self) -> int:
        """Generation and number as one 64-bit integer, for the wire. `number` is at most the round plus 1."""
        return self.generation << 32 | self.number


NEVER, FIRST = Stamp(0, 0), Stamp(1, 1)


def find_fault_in_stamp(stamp: Stamp, clock: float) -> str:
    """Return why no server can have sent a request with this stamp; an empty text if one can.

    `clock` is the client's time in seconds. A client that has answered a stamp refuses all earlier stamps. A
    forged stamp must not lock out a client forever, so a client accepts only stamps that the server can still
    exceed: see `new_generation`.
    """
    if not (0 < stamp.generation < 2**32 and 0 < stamp.number < 2**32):
        return f"generation and number of request {stamp} must be from 1 to 2^32 - 1"
    if stamp.generation > clock + AHEAD:
        return f"request {stamp} is from the future: check this node's clock"
    return ""


class Mark(NamedTuple):
    """The name of one answer: the request's stamp, the client's incarnation, and the message's digest."""

    stamp: Stamp
    incarnation: int
    digest: int


def make_mark(stamp: Stamp, incarnation: int, message: bytes) -> Mark:
    """Return the mark of an answer. Client and server compute the same mark."""
    return Mark(stamp, incarnation, compute_digest(message))


class Version(NamedTuple):
    """The name of the model copy after `round` rounds. A later version of a server compares as greater."""

    generation: int
    round: int
    hash: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.round}"


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


@dataclass(frozen=True)
class Request:
    """The server's request to one client: train from the model of round `t`."""

    stamp: Stamp
    t: int
    mark: Mark | None  # the client's last answer that is in the durable model
    broadcast: Broadcast | None = None  # leads to the present model copy; None: the model is sent apart


class _Header(NamedTuple):
    magic: bytes
    format: int
    kind: int
    generation: int
    round: int
    hash: int
    digest: int
    earlier: int  # the number of versions from which a client can follow

    def check(self) -> None:
        """Raise WireError if `pack` cannot have made the header."""
        most = min(MOST, self.round)
        rules = {
            f"the broadcast is of format {self.format}, this program reads format {FORMAT}":
                self.format == FORMAT,
            f"the broadcast is of kind {self.kind}, which format {FORMAT} does not know":
                self.kind in (_CHAIN, _CHANGES, _WHOLE),
            f"the generation of a broadcast must be above 0, got {self.generation}": self.generation > 0,
            f"a broadcast to round {self.round} must list at most {most} versions, got {self.earlier}":
                self.earlier <= most,
            f"the digest of a chain must be 0, got {self.digest}": self.kind != _CHAIN or not self.digest,
            f"a whole model must list 0 earlier versions, got {self.earlier}":
                self.kind != _WHOLE or not self.earlier,
        }  # fmt: skip
        for rule, holds in rules.items():
            if not holds:
                raise WireError(rule)


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
    header.check()
    try:
        data = b"".join([_HEADER.pack(*header), struct.pack(f"<{len(numbers)}Q", *numbers), *messages])
    except struct.error:
        raise WireError("generation and round must fit in 32 bits, hashes in 64 bits") from None
    return data + _CHECKSUM.pack(zlib.crc32(data))


def unpack(data: bytes) -> Broadcast:
    """Return the broadcast of the bytes; raise WireError if `pack` cannot have made the bytes."""
    end = len(data) - _CHECKSUM.size
    if end < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise WireError(f"not a broadcast: it must begin with {MAGIC.decode()} and a header")
    header = _Header(*_HEADER.unpack_from(data))
    header.check()
    if _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
        raise WireError("the checksum of the broadcast is wrong")
    listed = header.earlier + (header.kind == _CHAIN)
    start = _HEADER.size + 8 * listed
    if start > end:
        raise WireError(f"the broadcast is too short for the {listed} numbers that it lists")
    numbers, body = struct.unpack_from(f"<{listed}Q", data, _HEADER.size), data[start:end]
    version, first = Version(header.generation, header.round, header.hash), header.round - header.earlier
    if header.kind == _WHOLE:
        return Whole(body, version, header.digest)
    if header.kind == _CHANGES:
        since = (Version(header.generation, first + i, hash) for i, hash in enumerate(numbers))
        return Changes(tuple(since), body, version, header.digest)
    return Chain(Version(header.generation, first, numbers[0]), split_messages(body, numbers[1:]), version)


def split_messages(data: bytes, lengths: Sequence[int]) -> tuple[bytes, ...]:
    """Return the messages in `data`, by their lengths; raise WireError if the lengths do not add up."""
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(data):
        raise WireError(f"the messages must have {ends[-1]} bytes, got {len(data)}")
    return tuple(data[start:end] for start, end in pairwise(ends))
