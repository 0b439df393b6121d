"""The downlink: what the server broadcasts, and the copy w of the model that every client trains from.

After its step the server sends C(x_next - w). Server and clients add it to w by the same operations, so all
copies are equal bit for bit, and x - w is what could not be sent: the server's residual. This is EF21 with
the model x in the place of an update, so a Channel sends it (Gruntkowska et al., 2023, call it EF21-P).

A compressor that rounds values keeps w on the grid of bf16. A client then stores and downloads w in 2 bytes
a number; the rounding stays in x - w, and so is sent later. Where no value is rounded, w has the precision
of x. A copy never holds -0: copies that compare equal then have equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cfedavg.channel import Channel, Outgoing
from cfedavg.compress import Compressor, Everything, plus, values_of
from cfedavg.core.arrays import Array, arange, cast, cast_like, copy, dtype_of, round_to_bf16, to_bf16
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Payload
from cfedavg.feedback import EF21

_FLOATS, _BYTES = {"float32": "fp32", "float64": "fp64"}, {"float32": 4, "float64": 8}
T = TypeVar("T")
KEPT = 1024  # messages that a server keeps, at the most; who has missed others gets the whole model


@dataclass(frozen=True)
class Copying(EF21):
    """EF21 whose memory is the copy of a model; `rounds` keeps it on the grid of bf16."""

    rounds: bool = False

    def remember(self, left: Array, sent: Payload, memory: Array) -> Array:
        return _on_grid(plus(memory, sent), self.rounds)


def _on_grid(w: Array, rounds: bool) -> Array:
    """Return w, rounded to bf16 if asked for, with 0 in the place of -0."""
    return (round_to_bf16(w) if rounds else w) + 0


class Copies:
    """What server and clients do to a copy. `rounds` keeps it on the grid of bf16."""

    def __init__(self, rounds: bool) -> None:
        self.rounds = rounds

    def first(self, x: Array) -> Array:
        """Return the first copy of a model, which every client downloads whole."""
        return _on_grid(x, self.rounds)

    def size(self, w: Array) -> int:
        """Return the bytes that a copy takes on a disk."""
        return len(w) * (2 if self.rounds else _BYTES[dtype_of(w)])

    def receive(self, w: Array, payload: Payload) -> Array:
        """Return the next copy, after a broadcast."""
        return cast_like(Copying(self.rounds).remember(None, payload, w), w)

    def whole(self, w: Array) -> Payload:
        """Return the copy as a payload of all coordinates."""
        return Payload(len(w), len(w) * arange(2, w), None, self._values(w))

    def changed(self, w: Array, at: Array) -> Payload:
        """Return the values that the copy has at these coordinates."""
        return Payload(len(w), len(at) * arange(2, w), at, self._values(w[at]))

    def _values(self, w: Array) -> Floats:
        return Floats(to_bf16(cast(w, "float32")), "bf16") if self.rounds else Floats(w, _FLOATS[dtype_of(w)])

    def change(self, w: Array, payload: Payload) -> Array:
        """Return the copy with the values of a payload that `whole` or `changed` made."""
        values = cast_like(values_of(payload), w)
        if payload.indices is None:
            return values
        w_next = copy(w)
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
        return Channel(self.compressor, Copying(self.rounds), self.layout).send(x, w, key, t)


def downlink_of(compressor: Compressor, layout: Layout) -> Downlink | None:
    """Return the downlink with this compressor; None for `none`: x itself is broadcast, without a copy."""
    if compressor.quantiser is None and isinstance(compressor.selector, Everything):
        return None
    return Downlink(compressor, layout)


def shortest(
    d: int,
    chain: T | None,
    whole: Callable[[], T],
    changes: Callable[[], T | None],
    length: Callable[[T], int],
) -> T:
    """Return the shortest download of a model of d numbers.

    `chain` is what was missed, message by message, if that is known. The whole model and the changed values
    are made only if the chain takes more than 2 bits a number.
    """
    if chain is not None and 4 * length(chain) <= d:
        return chain
    found = (chain, whole(), changes())
    return min((each for each in found if each is not None), key=length)


def worth_sending(changed: int, d: int) -> bool:
    """Whether so few of d coordinates changed that their values may be shorter than the whole model."""
    return 4 * changed <= 3 * d
