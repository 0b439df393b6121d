"""Versions of the model that every client trains from, and how a client's copy follows them. No I/O.

The server holds w beside its model x. After a round it broadcasts a message, and everyone adds that to w by
the same operations, so all copies of one version are bitwise equal. A version is named by the generation of
the server, the round, and a hash:

    first version of a generation:  hash = H(generation, round, digest of w)
    each next one:                  hash = H(hash before, message)

Equal versions therefore come from the same messages, and a copy of an equal version is the same copy. A
broadcast leads to one version and lists others from which it can be reached. A client that holds one of them
follows; any other client needs the whole model. `follow` never returns a copy that is not the server's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from cfedavg.wire import WireError

_FIRST = struct.Struct("<IIQ")
_HASH = struct.Struct("<Q")


class Version(NamedTuple):
    """The copy after `round` rounds. Versions of one server are in the order of their fields."""

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
    """What is done to a copy, bit for bit the same on the server and on every client.

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


def digest_of(*parts: Any) -> int:
    """Return the first 64 bits of SHA-256 over these buffers.

    >>> digest_of(b"ab") == digest_of(b"a", b"b")
    True
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "big")


def first_version(generation: int, round: int, digest: int) -> Version:
    """Return the version with which a generation begins; `digest` is that of w."""
    return Version(generation, round, digest_of(_FIRST.pack(generation, round, digest)))


def next_version(version: Version, message: bytes) -> Version:
    """Return the version after the message of one round."""
    return Version(version.generation, version.round + 1, digest_of(_HASH.pack(version.hash), message))


def versions_from(start: Version, messages: Sequence[bytes]) -> tuple[Version, ...]:
    """Return the versions that these messages lead through, oldest first, with the start."""
    return tuple(accumulate(messages, next_version, initial=start))


# What a request carries


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
            return _checked(replica.replace(broadcast.message), broadcast, replica)
        if copy is None:
            return None
        if isinstance(broadcast, Chain):
            return _follow_chain(copy, broadcast, replica)
        if copy.version not in broadcast.since:
            return None
        return _checked(replica.change(copy.w, broadcast.message), broadcast, replica)
    except WireError:
        return None


def _follow_chain(copy: Copy, chain: Chain, replica: Replica) -> Copy | None:
    """Check all hashes before anything is applied: the last one is of all the messages."""
    versions = versions_from(chain.start, chain.messages)
    if versions[-1] != chain.version or copy.version not in versions:
        return None
    missed = chain.messages[versions.index(copy.version) :]
    return Copy(chain.version, replica.apply(copy.w, missed))


def _checked(w: Any, broadcast: Changes | Whole, replica: Replica) -> Copy | None:
    return Copy(broadcast.version, w) if replica.digest(w) == broadcast.digest else None
