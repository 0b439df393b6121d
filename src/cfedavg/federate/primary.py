"""The server's own copy, and the last messages that led to it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cfedavg.channel import KEPT
from cfedavg.federate.versions import Chain, Changes, Version, Whole, first_version, next_version

MOST_BYTES = 2**26


@dataclass(frozen=True)
class Primary:
    """The copy that all others follow, and its history: message i leads from version i to the next one."""

    w: Any
    versions: tuple[Version, ...]  # oldest first; the last is that of w
    messages: tuple[bytes, ...] = ()

    @classmethod
    def begin(cls, w: Any, generation: int, round: int, digest: int) -> Primary:
        """Return a copy without a history; `digest` is that of w."""
        return cls(w, (first_version(generation, round, digest),))

    @property
    def version(self) -> Version:
        """The version of w."""
        return self.versions[-1]

    def advance(
        self, message: bytes, w_next: Any, *, most: int = KEPT, most_bytes: int = MOST_BYTES
    ) -> Primary:
        """Return the copy after a round's message, which leads to w_next.

        The oldest messages go while there are more than `most` of them, or more than `most_bytes` in all.
        The last one stays.
        """
        messages, versions = (*self.messages, message), (*self.versions, next_version(self.version, message))
        first, size = 0, sum(map(len, messages))
        while len(messages) - first > max(1, most) or (size > most_bytes and first < len(messages) - 1):
            size -= len(messages[first])
            first += 1
        return Primary(w_next, versions[first:], messages[first:])

    def restart(self, generation: int, digest: int) -> Primary:
        """Return the copy of a server that comes from a backup: nobody is known to follow it."""
        return Primary.begin(self.w, generation, self.version.round, digest)

    def at(self, round: int) -> Version | None:
        """Return the version after so many rounds; None if it is not in the history."""
        index = round - self.versions[0].round
        return self.versions[index] if 0 <= index < len(self.versions) else None

    def chain(self, version: Version) -> Chain | None:
        """Return the messages that a copy of this version has missed; None if they are not in the history."""
        if version not in self.versions:
            return None
        return Chain(version, self.messages[self.versions.index(version) :], self.version)

    def changes(self, version: Version, message: bytes, digest: int) -> Changes:
        """Return a broadcast of the values that changed since a version of the history."""
        since = self.versions[self.versions.index(version) : -1]
        return Changes(since, message, self.version, digest)

    def whole(self, message: bytes, digest: int) -> Whole:
        """Return a broadcast of all of w."""
        return Whole(message, self.version, digest)
