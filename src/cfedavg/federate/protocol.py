"""What server and clients exchange: requests and broadcasts, with the names of requests and answers.

The name of a request is a stamp, the name of a client's answer is a mark. Both contain the server's
generation: a number that rises when the server restores a backup.

The server holds a model copy w beside its model x. After a round, the server broadcasts a message. The server
and all clients add the message to their copies by the same operations. So all copies of one version are
bitwise equal. A version is the generation, the round, and a hash H:

    first version of a generation:  hash = H(generation, round, digest of w)
    each later version:             hash = H(hash of the version before, message)

So if two copies have the same version, they come from the same messages and are equal. A broadcast leads to
one version and lists the earlier versions from which a client can follow. A client that holds none of these
versions needs the whole model. `follow` never returns a copy that differs from the server's. docs/envelope.md
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

AHEAD = 2 * 86_400  # a generation is a time in seconds: by so much it may be ahead of a client's clock
MAGIC, FORMAT = b"CFBC", 1
MOST = 2**16  # the most versions or messages in a broadcast
_CHAIN, _CHANGES, _WHOLE = range(3)  # kinds of broadcasts
_HEADER = struct.Struct("<4sBBIIQQI")
_CHECKSUM = struct.Struct("<I")
_FIRST = struct.Struct("<IIQ")
_HASH = struct.Struct("<Q")


class Stamp(NamedTuple):
    """The name of a round's requests: the server's generation, and a number that rises with each round.

    The generation is 1 at first. It rises when the server restores a backup; the number is then 1 again.
    """

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.number}"

    @property
    def sequence(self) -> int:
        """The stamp as one 64-bit integer for messages: the generation, then the number, 32 bits each."""
        return self.generation << 32 | self.number


NEVER, FIRST = Stamp(0, 0), Stamp(1, 1)


def find_fault_in_stamp(stamp: Stamp, clock: float) -> str:
    """Return why no server can have sent a request with this stamp; an empty text if one can.

    `clock` is the client's time in seconds. A client that has answered a stamp refuses all earlier stamps. So
    a forged stamp could lock the client out for ever. Therefore a client accepts only stamps that the server
    can exceed later: see `new_generation`.
    """
    if not (0 < stamp.generation < 2**32 and 0 < stamp.number < 2**32):
        return f"generation and number of request {stamp} must be from 1 to 2^32 - 1"
    if stamp.generation > clock + AHEAD:
        return f"request {stamp} is from the future: check this node's clock"
    return ""


class Mark(NamedTuple):
    """The name of one answer: the stamp of its request, the client's incarnation, and the message's digest.

    `incarnation` is a random number that a client draws when it starts without a stored state.
    """

    stamp: Stamp
    incarnation: int
    digest: int


def make_mark(stamp: Stamp, incarnation: int, message: bytes) -> Mark:
    """Return the mark (the name) of a client's answer. The client and the server compute the same mark."""
    return Mark(stamp, incarnation, compute_digest(message))


class Version(NamedTuple):
    """The name of the model copy after `round` rounds. The later of two versions compares as greater."""

    generation: int
    round: int
    hash: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.round}"


def compute_digest(*parts: Any) -> int:
    """Return the first 64 bits of the SHA-256 hash of all `parts`, joined.

    >>> compute_digest(b"ab") == compute_digest(b"a", b"b")
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "big")


def make_first_version(generation: int, round: int, digest: int) -> Version:
    """Return the version of the first model copy after a server's start or restore, number `generation`."""
    return Version(generation, round, compute_digest(_FIRST.pack(generation, round, digest)))


def make_next_version(version: Version, message: bytes) -> Version:
    """Return the version that follows `version` when a model copy gets the message of one round."""
    return Version(version.generation, version.round + 1, compute_digest(_HASH.pack(version.hash), message))


def list_versions(start: Version, messages: Sequence[bytes]) -> tuple[Version, ...]:
    """Return `start` and the version of the model copy after each message, oldest first."""
    return tuple(accumulate(messages, make_next_version, initial=start))


@dataclass(frozen=True)
class Chain:
    """A broadcast of messages: those of all rounds from version `start` to `version`, oldest first.

    If `start` equals `version`, there are no messages.
    """

    start: Version
    messages: tuple[bytes, ...]
    version: Version

    def __post_init__(self) -> None:
        _check_distance(self.start, self.version, len(self.messages))


@dataclass(frozen=True)
class Changes:
    """A broadcast of new values: of all coordinates that changed since the oldest version in `since`.

    A client that holds any version in `since` can follow.
    """

    since: tuple[Version, ...]  # oldest first, one for each round before `version`
    message: bytes
    version: Version
    digest: int  # the digest of the model copy at `version`

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
    """Raise WireError unless version `end` can be `rounds` rounds after version `start`."""
    apart = (end.generation - start.generation, end.round - start.round)
    if apart != (0, rounds) or (rounds == 0 and start != end):
        raise WireError(f"version {start} in a broadcast must be {rounds} rounds before version {end}")


class Copy(NamedTuple):
    """The model copy from which a client trains, with its version."""

    version: Version
    w: Any


class Replica(Protocol):
    """The interface of the operations on a model copy w, with bitwise equal results on all machines.

    A message that cannot be decoded raises WireError.
    """

    def apply(self, w: Any, messages: Sequence[bytes]) -> Any:
        """Return model copy w plus the messages of consecutive rounds."""

    def change(self, w: Any, message: bytes) -> Any:
        """Return model copy w with some values replaced by those in the message."""

    def replace(self, message: bytes) -> Any:
        """Return the model copy in a message that holds the values of all coordinates."""

    def digest(self, w: Any) -> int:
        """Return a 64-bit hash of model copy w."""


def follow(copy: Copy | None, broadcast: Broadcast, replica: Replica) -> Copy | None:
    """Return the client's model copy after the broadcast; None if the client needs the whole model.

    If a reply got lost, the client may hold a newer version than the server believes. So a client can follow
    from any version that the broadcast lists, and skips the messages that its copy already contains.
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
    """The server's request to one client: train from the model after `t` rounds."""

    stamp: Stamp
    t: int
    mark: Mark | None  # names the client's last answer that the server's stored model holds
    broadcast: Broadcast | None = None  # leads to the present model copy; None if the model itself is sent


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
        """Raise WireError if `pack` cannot have made a broadcast with this header."""
        most = min(MOST, self.round)
        rules = {
            f"a broadcast must have format {FORMAT}, got {self.format}: use the same cfedavg on all nodes":
                self.format == FORMAT,
            f"the kind of a broadcast must be {_CHAIN}, {_CHANGES} or {_WHOLE}, got {self.kind}":
                self.kind in (_CHAIN, _CHANGES, _WHOLE),
            f"the generation of a broadcast must be above 0, got {self.generation}": self.generation > 0,
            f"a broadcast to round {self.round} must list at most {most} versions, got {self.earlier}":
                self.earlier <= most,
            f"the digest of a broadcast of messages must be 0, got {self.digest}":
                self.kind != _CHAIN or not self.digest,
            f"a broadcast of the whole model must list 0 earlier versions, got {self.earlier}":
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
        raise WireError(
            "generation and round of a broadcast must fit in 32 bits, its hashes in 64 bits"
        ) from None
    return data + _CHECKSUM.pack(zlib.crc32(data))


def unpack(data: bytes) -> Broadcast:
    """Return the broadcast in these bytes; raise WireError if `pack` cannot have made the bytes."""
    end = len(data) - _CHECKSUM.size
    if end < _HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise WireError(f"a broadcast must begin with {MAGIC.decode()} and a header, got other bytes")
    header = _Header(*_HEADER.unpack_from(data))
    header.check()
    if _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(memoryview(data)[:end]):
        raise WireError("the checksum of the broadcast is wrong")
    listed = header.earlier + (header.kind == _CHAIN)
    start = _HEADER.size + 8 * listed
    if start > end:
        raise WireError(f"the broadcast is too short for the {listed} numbers that its header announces")
    numbers, body = struct.unpack_from(f"<{listed}Q", data, _HEADER.size), data[start:end]
    version, first = Version(header.generation, header.round, header.hash), header.round - header.earlier
    if header.kind == _WHOLE:
        return Whole(body, version, header.digest)
    if header.kind == _CHANGES:
        since = (Version(header.generation, first + i, hash) for i, hash in enumerate(numbers))
        return Changes(tuple(since), body, version, header.digest)
    return Chain(Version(header.generation, first, numbers[0]), split_messages(body, numbers[1:]), version)


def split_messages(data: bytes, lengths: Sequence[int]) -> tuple[bytes, ...]:
    """Split `data` into messages of these lengths; raise WireError if the lengths do not fit `data`."""
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(data):
        raise WireError(f"the messages must have {ends[-1]} bytes in all, got {len(data)}")
    return tuple(data[start:end] for start, end in pairwise(ends))
