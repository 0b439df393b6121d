"""The count of what each client downloads when the server compresses its broadcast.

Clients hold a model copy w. Version r is w after r rounds. A client that takes part in round t trains from
version t. The server knows which version a client held at the client's last reply. The server sends the
shortest of

    the messages that the client missed, one for each version;
    the present values of w at all coordinates that changed since the client's version;
    the whole model.

A client that has never replied gets the whole model. The server does not add missed messages up: float
addition is not associative, so the model copies would differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

from cfedavg.channel import KEPT, Downlink, choose_download, is_short, may_be_shorter
from cfedavg.core.arrays import Array, cast, columns, module_of, to_numpy
from cfedavg.core.payload import Payload
from cfedavg.simulate.tables import Table
from cfedavg.wire import measure


class Download(NamedTuple):
    """What one client downloads (missed messages, changed values or the whole model), and how many bytes."""

    kind: str  # "chain" (missed messages), "changes" (changed values) or "whole" (the model)
    messages: int  # in a chain, else 0
    bytes: int


Count = Callable[[], Download]
Start = Callable[[Count], Count]  # starts a count; the returned function gives the count's result


@dataclass(frozen=True)
class Downloads:
    """The server's record after t rounds: the model version each client holds, lengths of recent messages."""

    changed: Array  # int32: for each coordinate, the version in which the coordinate changed last
    lengths: tuple[int, ...] = ()  # bytes of recent messages; the last message leads to version t
    held: Table[int] = field(default_factory=Table)  # client: the version at the client's last reply

    @classmethod
    def none(cls, w: Array) -> Downloads:
        """Return the record before the first round: no client holds a model copy."""
        return cls(cast(0 * w, "int32"))

    def send(
        self, downlink: Downlink, x: Array, w: Array, key: int, t: int, replied: Iterable[int]
    ) -> tuple[Array, Downloads]:
        """Broadcast x to clients that hold w; return their next w, and the record after round `t`.

        Raise NotFinite if x - w overflows.
        """
        payload, w_next = downlink.send(x, w, key, t)
        length, most = measure(payload.numpy(), downlink.layout)[0], downlink.size(w)
        return w_next, self.after(t, w, w_next, length, replied, most)

    def after(
        self, t: int, w: Array, w_next: Array, length: int, replied: Iterable[int], most: int
    ) -> Downloads:
        """Return the record after round `t`, in which the server broadcast a message of `length` bytes.

        `w` and `w_next` are the model copy before and after the broadcast. `replied` are the clients whose
        replies arrived. Forget old messages until the rest has at most `most` bytes, the size of the whole
        model: the server never sends a longer chain of messages.
        """
        changed = module_of(w).where(w_next == w, self.changed, t + 1)
        lengths = _last((*self.lengths[1 - KEPT :], length), most)
        return Downloads(cast(changed, "int32"), lengths, self.held.update(dict.fromkeys(replied, t)))

    def count(
        self, t: int, clients: Iterable[int], w: Array, downlink: Downlink, start: Start
    ) -> dict[int, Count]:
        """Return, for each client, a function that returns the client's download in round `t`.

        `w` is the clients' model copy. `start` starts a count, for example in a thread. Threads use main
        memory alone.
        """
        versions = {client: self.held.get(client) for client in clients}
        chains = {held: self._chain(t, held) for held in set(versions.values())}
        record = self
        if not all(chain and is_short(chain.bytes, len(w)) for chain in chains.values()):
            # Copied to the host once, and now: a thread would wait until the GPU has trained the next round.
            record, w = replace(self, changed=to_numpy(self.changed)), to_numpy(w)
        whole = cache(lambda: Download("whole", 0, _length(downlink.pack(w), downlink)))
        one = partial(record._download, w, downlink, whole)
        counts = {held: start(partial(one, held, chain)) for held, chain in chains.items()}
        return {client: counts[held] for client, held in versions.items()}

    def _chain(self, t: int, held: int | None) -> Download | None:
        """Return the chain of messages after version `held`; None if the server does not have all of them."""
        if held is None or t - held > len(self.lengths):
            return None
        missed = self.lengths[len(self.lengths) - (t - held) :]
        return Download("chain", len(missed), sum(missed))

    def _download(
        self, w: Array, downlink: Downlink, whole: Count, held: int | None, chain: Download | None
    ) -> Download:
        if held is None or chain is None:
            return whole()
        changed = partial(self._changed, held, w, downlink)
        return choose_download(len(w), chain, whole, changed, lambda download: download.bytes)

    def _changed(self, held: int, w: Array, downlink: Downlink) -> Download | None:
        """Return a download of the values that changed since version `held`; None if most values changed."""
        at = columns((self.changed > held)[None])
        if not may_be_shorter(len(at), len(w)):
            return None
        return Download("changes", 0, _length(downlink.pack(w, at), downlink))


def _last(lengths: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the longest tail of `lengths` with a sum of at most `most`; always keep the last length.

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
