"""What each client must download under a compressed broadcast.

Version r of the copy w is the copy after r rounds. A client that takes part in round t trains from version t.
The server knows the version that a client held when its last reply arrived, and sends the shortest of

    the messages that it missed, one for each version;
    the values that w has now at all coordinates that changed since;
    the whole model.

A client that has never replied gets the whole model. Messages are not added up: float addition is not
associative, so the copies would differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

from cfedavg.channel import KEPT, Downlink, choose_download, may_be_shorter
from cfedavg.core.arrays import Array, cast, columns, module_of
from cfedavg.core.payload import Payload
from cfedavg.wire import measure


class Download(NamedTuple):
    """What one client downloads: which of the three, and in how many messages and bytes."""

    kind: str  # "chain", "changes" or "whole"
    messages: int
    bytes: int


Count = Callable[[], Download]
Start = Callable[[Count], Count]  # begins to count; what it returns gives the result


@dataclass(frozen=True)
class Downloads:
    """What the server knows after t rounds of the clients' copies and of what they missed."""

    changed: Array  # int32: of each coordinate, the version in which it changed last
    lengths: tuple[int, ...] = ()  # of the last messages; the last one leads to version t
    held: Mapping[int, int] = field(default_factory=dict)  # client: the version in its last reply

    @classmethod
    def none(cls, w: Array) -> Downloads:
        """Return what is known before the first round: nobody holds a copy."""
        return cls(cast(0 * w, "int32"))

    def after(
        self, t: int, w: Array, w_next: Array, length: int, replied: Iterable[int], most: int
    ) -> Downloads:
        """Return what is known after round t, whose message has this length, with these replies.

        The last messages are kept, up to `most` bytes, which is what a copy takes: a longer chain never pays.
        """
        changed = module_of(w).where(w_next == w, self.changed, t + 1)
        lengths = _last((*self.lengths[1 - KEPT :], length), most)
        return Downloads(cast(changed, "int32"), lengths, {**self.held, **dict.fromkeys(replied, t)})

    def count(
        self, t: int, clients: Iterable[int], w: Array, downlink: Downlink, start: Start
    ) -> dict[int, Count]:
        """Begin to count what each of these clients downloads in round t, in which the copy is w."""
        whole = cache(lambda: Download("whole", 0, _length(downlink.whole(w), downlink)))
        versions = {client: self.held.get(client) for client in clients}
        one = partial(self._download, t, w, downlink, whole)
        counts = {held: start(partial(one, held)) for held in set(versions.values())}
        return {client: counts[held] for client, held in versions.items()}

    def _download(self, t: int, w: Array, downlink: Downlink, whole: Count, held: int | None) -> Download:
        if held is None or t - held > len(self.lengths):
            return whole()
        missed = self.lengths[len(self.lengths) - (t - held) :]
        changed = partial(self._changed, held, w, downlink)
        chain = Download("chain", len(missed), sum(missed))
        return choose_download(len(w), chain, whole, changed, lambda download: download.bytes)

    def _changed(self, held: int, w: Array, downlink: Downlink) -> Download | None:
        """Return the present values of what changed since a version; None if that is most of the model."""
        at = columns((self.changed > held)[None])
        if not may_be_shorter(len(at), len(w)):
            return None
        return Download("changes", 0, _length(downlink.changed(w, at), downlink))


def _last(lengths: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return as many of the last lengths as have `most` bytes together, and at least one.

    >>> _last((5, 3, 4), 8)
    (3, 4)
    """
    total = sum(lengths)
    for first, length in enumerate(lengths):
        if total <= most:
            return lengths[first:]
        total -= length
    return lengths[-1:]


def _length(payload: Payload, downlink: Downlink) -> int:
    return measure(payload.numpy(), downlink.layout, code_floats=True)[0]
