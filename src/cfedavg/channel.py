"""Channels: how clients send updates up and how the server sends models down (Algorithm 1, lines 12 to 15).

A simulation and a Flower federation both use a Channel for updates and a Downlink for models. A Channel
holds a compressor and a feedback. Each call takes the feedback's memory and returns the next memory.

A step takes the server from model x to x_next. The server then sends C(x_next - w), where C is the compressor
and w is the model copy that every client trains from. Server and clients add C(x_next - w) to w by the same
operations, so all model copies are equal bit for bit. The server's residual is x - w, what it has not sent
yet. This is EF21 with the model in the place of an update (EF21-P, Gruntkowska et al., 2023).

If the compressor rounds values, w is rounded to bf16 numbers. A client then stores and downloads w in 2 bytes
a number. The rounding error stays in the server's residual and is sent later. If the compressor does not
round, w has the precision of x. A model copy never holds -0, so model copies that compare equal have equal
bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from cfedavg.compress import FLOATS, Compressor, Everything, minus, plus, sent_values, values_of
from cfedavg.compress.numerics import squared_norms
from cfedavg.core.arrays import Array, arange, cast, cast_like, copy, dtype_of, norm2, round_to_bf16, to_bf16
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Payload
from cfedavg.feedback import Feedback

T = TypeVar("T")
SPIKE = 1024  # the largest norm / `max_norm`; float32 is too coarse to spread a larger vector over rounds
KEPT = 1024  # the most broadcasts that a server keeps; a client that missed an older one gets the whole model


class TooLarge(ArithmeticError):
    """The payload's norm is above 1024 times `max_norm`: too large to be sent, even over several rounds."""


class Outgoing(NamedTuple):
    """The result of sending one vector, or one block of vectors, through a channel."""

    p: Array  # the vector before compression
    payload: Payload  # C(p)
    left: Array  # p - C(p)
    memory: Array  # the feedback's next memory


@dataclass(frozen=True)
class Channel:
    """A compressor with its feedback, for updates of a model with the given layout.

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
        """Compress update `g` in round t; return the payload and the client's next memory (lines 12 to 15).

        `g` has shape (d,) for one client with one key, or (n, d) for a block of n clients with n keys. Random
        draws depend on the key. `shared` is what the server broadcast beside the model. The payload's norm is
        at most `max_norm`, and the rest stays in the memory. `max_norm` is for one client, not for a block.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # the compressor refuses NaN and Inf
            p = cast_like(self.feedback.outgoing(g, memory, shared), g)
        g2 = squared_norms(g.reshape(-1, g.shape[-1])) if self.compressor.selector.needs_update else None
        compress = partial(self.compressor.compress, key=key, layout=self.layout, t=t, g2=g2)
        payload = compress(p)
        if max_norm < math.inf:
            payload = _limit(p, payload, compress, max_norm)
        left = minus(p, payload)
        memory_next = self.feedback.remember(left, payload, memory)
        return Outgoing(p, payload, left, memory_next if memory_next is None else cast_like(memory_next, g))


def _limit(p: Array, payload: Payload, compress: Callable[[Array], Payload], max_norm: float) -> Payload:
    """Return `payload`, or the payload of a fraction of p if the norm of `payload` exceeds `max_norm`."""
    sent, share = math.sqrt(norm2(sent_values(payload))), 1.0
    if sent > SPIKE * max_norm:
        raise TooLarge(f"the payload's norm {sent:.3g} exceeds {SPIKE} times `max_norm` {max_norm:.4g}")
    while sent > max_norm:
        share *= 0.99 * max_norm / sent
        payload = compress(share * p)
        sent = math.sqrt(norm2(sent_values(payload)))
    return payload


class Copies:
    """Operations on a model copy, the model that clients train from; with `rounds_values`, it is in bf16."""

    def __init__(self, rounds_values: bool) -> None:
        self.rounds_values = rounds_values

    def make(self, x: Array) -> Array:
        """Return a model copy of model x: -0 becomes 0 and, with `rounds_values`, numbers are bf16."""
        return (round_to_bf16(x) if self.rounds_values else x) + 0

    def receive(self, w: Array, payload: Payload) -> Array:
        """Return the next model copy: w plus the values of a broadcast's payload."""
        return cast_like(self.make(plus(w, payload)), w)

    def size(self, w: Array) -> int:
        """Return how many bytes model copy w takes on disk."""
        return len(w) * (2 if self.rounds_values else w.dtype.itemsize)

    def pack(self, w: Array, at: Array | None = None) -> Payload:
        """Return a payload with the values of model copy w at the coordinates `at`; None means at all."""
        values = w if at is None else w[at]
        floats = Floats(values, FLOATS[dtype_of(w)])
        if self.rounds_values:
            floats = Floats(to_bf16(cast(values, "float32")), "bf16")
        return Payload(len(w), len(values) * arange(2, w), at, floats)

    def unpack(self, w: Array, payload: Payload) -> Array:
        """Return model copy w after its values are replaced by those in `payload`, which `pack` made."""
        values = cast_like(values_of(payload), w)
        if payload.indices is None:
            return values
        w_next = copy(w)
        w_next[payload.indices] = values
        return w_next


@dataclass(frozen=True)
class Downlink(Copies):
    """The server's compressor for broadcasts of models with the given layout.

    >>> import numpy as np
    >>> from cfedavg.compress import parse
    >>> downlink = Downlink(parse("topk(0.5)"), Layout.flat(2))
    >>> payload, w_next = downlink.send(np.array([1.0, 3.0]), np.array([0.5, 1.0]), key=0)
    >>> w_next.tolist(), downlink.receive(np.array([0.5, 1.0]), payload).tolist()
    ([0.5, 3.0], [0.5, 3.0])
    """

    compressor: Compressor
    layout: Layout

    @property
    def rounds_values(self) -> bool:  # type: ignore[override]
        """Whether the compressor rounds values; if so, model copies are rounded to bf16 numbers."""
        return self.compressor.rounds_values

    def send(self, x: Array, w: Array, key: int | Array, t: int = 0) -> tuple[Payload, Array]:
        """Return C(x - w), the payload that moves model copy w towards model x, and the next model copy."""
        with np.errstate(over="ignore", invalid="ignore"):  # the compressor refuses NaN and Inf
            p = x - w
        payload = self.compressor.compress(p, key, self.layout, t)
        return payload, self.receive(w, payload)


def make_downlink(compressor: Compressor, layout: Layout) -> Downlink | None:
    """Return a downlink; None if the compressor is `none`: the server then broadcasts the model itself."""
    if compressor.quantiser is None and isinstance(compressor.selector, Everything):
        return None
    return Downlink(compressor, layout)


def choose_download(
    d: int, chain: T | None, whole: Callable[[], T], changes: Callable[[], T | None], size: Callable[[T], int]
) -> T:
    """Return the shortest download that brings a client the model: chain, whole model or changed values.

    `chain` holds the broadcasts that the client missed; None if the server no longer has all of them.
    `whole()` and `changes()` make the other two downloads. They are called only if the chain takes more than
    2 bits for each of the model's d numbers. `changes()` may return None. `size` gives a download's bytes.
    """
    if chain is not None and is_short(size(chain), d):
        return chain
    found = (chain, whole(), changes())
    return min((each for each in found if each is not None), key=size)


def is_short(chain: int, d: int) -> bool:
    """Return whether a chain of so many bytes is sent without a look at the other downloads."""
    return 4 * chain <= d


def may_be_shorter(changed: int, d: int) -> bool:
    """Return whether a payload of `changed` values may take fewer bytes than one of all d values."""
    return 4 * changed <= 3 * d
