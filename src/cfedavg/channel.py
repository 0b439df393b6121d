"""A channel: what one direction does with a vector. Lines 12 to 15 of Algorithm 1 are written here, once.

Simulation, protocol and Flower send through a Channel. It holds a compressor and a feedback; the memory of
the feedback goes in and comes out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cfedavg.compress import Compressor, minus, values_of
from cfedavg.core.arrays import Array, cast_like, norm2
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Payload
from cfedavg.feedback import Feedback

SPIKE = 1024  # times the bound: from what is larger, float32 could not subtract what is sent


class TooLarge(ArithmeticError):
    """So much more than may be sent that it would go on for ever."""


class Outgoing(NamedTuple):
    """What one round of a channel comes to."""

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
        """Lines 12 to 15, for one client, (d,), or for a block, (n, d), with a key for each.

        One client may be bound: no more than `max_norm` is sent, and the rest waits in its memory.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # the compressor refuses what is not finite
            p = cast_like(self.feedback.outgoing(g, memory, shared), g)
        payload = self.compressor.compress(p, key, self.layout, t)
        if max_norm < math.inf:
            payload = self._bounded(p, payload, key, t, max_norm)
        left = minus(p, payload)
        after = self.feedback.remember(left, payload, memory)
        return Outgoing(p, payload, left, after if after is None else cast_like(after, g))

    def _bounded(self, p: Array, payload: Payload, key: int | Array, t: int, max_norm: float) -> Payload:
        """After a spike the vector goes bit by bit: a share of it that fits."""
        sent, share = _norm(payload), 1.0
        if sent > SPIKE * max_norm:
            raise TooLarge(f"it would send {sent:.3g}, and max_norm is {max_norm:.4g}")
        while sent > max_norm:
            share *= 0.99 * max_norm / sent
            payload = self.compressor.compress(share * p, key, self.layout, t)
            sent = _norm(payload)
        return payload

    def restore(self, memory: Array, payload: Payload) -> Array:
        """The memory after a payload got lost."""
        return self.feedback.restore(memory, payload)


def _norm(payload: Payload) -> float:
    return math.sqrt(norm2(values_of(payload)))
