"""Channels: what each direction does with a vector. Lines 12 to 15 of Algorithm 1 are written here, once.

Simulation, protocol and Flower send updates up through a Channel and models down through a Downlink. A
Channel holds a compressor and a feedback; the memory of the feedback goes in and comes out.

After its step the server sends C(x_next - w), where w is the copy of the model that every client trains from.
Server and clients add it to w by the same operations, so all copies are equal bit for bit, and x - w is the
server's residual. This is EF21 with the model x in the place of an update (EF21-P, Gruntkowska et al., 2023),
so a Channel sends it.

A compressor that rounds values keeps w on the grid of bf16. A client then stores and downloads w in 2 bytes
a number; the rounding stays in x - w and is sent later. Where no value is rounded, w has the precision of x.
A copy never holds -0: copies that compare equal then have equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from cfedavg.compress import Compressor, Everything, minus, plus, values_of
from cfedavg.core import arrays
from cfedavg.core.arrays import Array, arange, cast_like, dtype_of, norm2
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Payload
from cfedavg.feedback import EF21, Feedback

T = TypeVar("T")
SPIKE = 1024  # times the bound: float32 cannot subtract what is sent from a larger vector
KEPT = 1024  # the most broadcasts that a server keeps; a client that missed older ones gets the whole model
FLOATS = {"float32": "fp32", "float64": "fp64"}  # the dtype of an array, as a payload names it


class TooLarge(ArithmeticError):
    """The vector is so far above the bound that sending it in shares would never end."""


class Outgoing(NamedTuple):
    """What a channel makes of one vector."""

    p: Array  # what was to be sent
    payload: Payload  # C(p)
    left: Array  # p - C(p)
    memory: Array  # of the feedback, after it


@dataclass(frozen=True)
class Channel:
    """A compressor with its feedback, for vectors of one layout.

    >>> import numpy as np
    >>> from cfedavg.compress import parse
    >>> from cfedavg.feedback import FEEDBACKS
    >>> channel = Channel(parse("topk(0.6)"), FEEDBACKS.parse("ef"), Layout.flat(3))
    >>> sent = channel.send(np.array([1.0, -3.0, 0.5]), np.array([0.5, 0.0, 0.0]), key=0)
    >>> sent.payload.indices.tolist(), sent.payload.values.data.tolist(), sent.memory.tolist()
    ([1], [-3.0], [1.5, 0.0, 0.5])
    """

    compressor: Compressor
    feedback: Feedback
    layout: Layout

    def send(
        self,
        g: Array,
        memory: Array,
        key: int | Array,
        t: int = 0,
        *,
        shared: Array | None = None,
        max_norm: float = math.inf,
    ) -> Outgoing:
        """Do lines 12 to 15 for one client, (d,), or for a block, (n, d), with a key for each.

        With `max_norm`, for one client only, no more than that norm is sent; the rest waits in its memory.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # the compressor refuses what is not finite
            p = cast_like(self.feedback.outgoing(g, memory, shared), g)
        payload = self.compressor.compress(p, key, self.layout, t)
        if max_norm < math.inf:
            payload = self._limit(p, payload, key, t, max_norm)
        left = minus(p, payload)
        memory_next = self.feedback.remember(left, payload, memory)
        return Outgoing(p, payload, left, memory_next if memory_next is None else cast_like(memory_next, g))

    def _limit(self, p: Array, payload: Payload, key: int | Array, t: int, max_norm: float) -> Payload:
        """Return the payload, or after a spike that of a share of p whose norm is at most `max_norm`."""
        sent, share = math.sqrt(norm2(values_of(payload))), 1.0
        if sent > SPIKE * max_norm:
            raise TooLarge(f"it would send {sent:.3g}, and max_norm is {max_norm:.4g}")
        while sent > max_norm:
            share *= 0.99 * max_norm / sent
            payload = self.compressor.compress(share * p, key, self.layout, t)
            sent = math.sqrt(norm2(values_of(payload)))
        return payload

    def restore(self, memory: Array, payload: Payload) -> Array:
        """Return the memory after a payload got lost."""
        return self.feedback.restore(memory, payload)


@dataclass(frozen=True)
class _CopyFeedback(EF21):
    """EF21 whose memory is the copy of a model; `rounds` keeps it on the grid of bf16."""

    rounds: bool = False

    def remember(self, left: Array, sent: Payload, memory: Array) -> Array:
        return _to_grid(plus(memory, sent), self.rounds)


def _to_grid(w: Array, rounds: bool) -> Array:
    """Return w, rounded to bf16 if asked for, with 0 in the place of -0."""
    return (arrays.round_to_bf16(w) if rounds else w) + 0


class Copies:
    """What server and clients do to a copy of the model. `rounds` keeps it on the grid of bf16."""

    def __init__(self, rounds: bool) -> None:
        self.rounds = rounds

    def first(self, x: Array) -> Array:
        """Return the first copy of a model, which every client downloads whole."""
        return _to_grid(x, self.rounds)

    def size(self, w: Array) -> int:
        """Return the bytes that a copy takes on a disk."""
        return len(w) * (2 if self.rounds else w.dtype.itemsize)

    def receive(self, w: Array, payload: Payload) -> Array:
        """Return the next copy, after a broadcast."""
        return cast_like(_to_grid(plus(w, payload), self.rounds), w)

    def whole(self, w: Array) -> Payload:
        """Return the copy as a payload of all coordinates."""
        return Payload(len(w), len(w) * arange(2, w), None, self._values(w))

    def changed(self, w: Array, at: Array) -> Payload:
        """Return the values that the copy has at these coordinates."""
        return Payload(len(w), len(at) * arange(2, w), at, self._values(w[at]))

    def _values(self, w: Array) -> Floats:
        if self.rounds:
            return Floats(arrays.to_bf16(arrays.cast(w, "float32")), "bf16")
        return Floats(w, FLOATS[dtype_of(w)])

    def change(self, w: Array, payload: Payload) -> Array:
        """Return the copy with the values of a payload that `whole` or `changed` made."""
        values = cast_like(values_of(payload), w)
        if payload.indices is None:
            return values
        w_next = arrays.copy(w)
        w_next[payload.indices] = values
        return w_next


@dataclass(frozen=True)
class Downlink(Copies):
    """A compressor for the broadcast of models of one layout.

    >>> import numpy as np
    >>> from cfedavg.compress import parse
    >>> downlink = Downlink(parse("topk(0.5)"), Layout.flat(2))
    >>> made = downlink.send(np.array([1.0, 3.0]), np.array([0.5, 1.0]), key=0)
    >>> made.memory.tolist(), downlink.receive(np.array([0.5, 1.0]), made.payload).tolist()
    ([0.5, 3.0], [0.5, 3.0])
    """

    compressor: Compressor
    layout: Layout

    @property
    def rounds(self) -> bool:  # type: ignore[override]
        """Whether the compressor rounds values, and so the copy lies on the grid of bf16."""
        return self.compressor.rounds

    def send(self, x: Array, w: Array, key: int | Array, t: int = 0) -> Outgoing:
        """Compress x - w; the memory of the result is the next copy."""
        return Channel(self.compressor, _CopyFeedback(self.rounds), self.layout).send(x, w, key, t)


def make_downlink(compressor: Compressor, layout: Layout) -> Downlink | None:
    """Return the downlink with this compressor; None for `none`: x itself is broadcast, without a copy."""
    if compressor.quantiser is None and isinstance(compressor.selector, Everything):
        return None
    return Downlink(compressor, layout)


def choose_download(
    d: int,
    chain: T | None,
    whole: Callable[[], T],
    changes: Callable[[], T | None],
    length: Callable[[T], int],
) -> T:
    """Return the shortest download of a model of d numbers.

    `chain` holds the missed broadcasts, if the server has all of them. The whole model and the changed values
    are made only if the chain takes more than 2 bits a number.
    """
    if chain is not None and 4 * length(chain) <= d:
        return chain
    found = (chain, whole(), changes())
    return min((each for each in found if each is not None), key=length)


def may_be_shorter(changed: int, d: int) -> bool:
    """Return whether `changed` of d values may take fewer bytes than the whole model."""
    return 4 * changed <= 3 * d
