"""Control variates, which keep clients with other data from drifting apart (SCAFFOLD).

Client i keeps c_i, an estimate of its gradient. The server keeps c, the mean of all c_i, and broadcasts it
beside the model. In its local steps, the client adds c - c_i to each gradient (`optimise.local.Scaffold`), so
that it steps along an estimate of everyone's mean gradient. After K steps from x_0 to x_K at the rate eta_L,

    target   = c_i - c + (x_0 - x_K) / (K eta_L)     the mean of the client's K gradients
    payload  = C(target - c_i)                       sent beside the update
    c_i_next = c_i + payload

This is option II of Karimireddy et al. (2020). The target goes through a channel with the feedback EF21: the
server adds what it receives to the sum of all c_i. So c is the mean of all c_i, whatever the compressor C
drops. A client that does not take part, or whose reply gets lost, counts with its old c_i.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cfedavg.algorithm import Weighted, average
from cfedavg.channel import Channel, Outgoing
from cfedavg.compress import Compressor
from cfedavg.core.arrays import Array
from cfedavg.core.layout import Layout
from cfedavg.feedback import EF21, Weights


@dataclass(frozen=True)
class ControlVariates:
    """What clients and server compute with control variates, for models of one layout.

    Two clients take one step from x_0 = 0 at the rate 0.5; their gradients are 4 and -2:

    >>> from cfedavg import parse
    >>> control = ControlVariates(parse("none"), Layout.flat(1))
    >>> c_i, c, x_0, x_K = np.zeros((2, 1)), np.zeros(1), np.zeros(1), np.array([[-2.0], [1.0]])
    >>> sent = control.send(c_i, c, x_0, x_K, K=1, eta_L=0.5, key=np.arange(2))
    >>> c_next, total = control.receive(0 * c, [(sent.payload, [1.0, 1.0])], everyone=2.0)
    >>> sent.memory.tolist(), c_next.tolist()
    ([[4.0], [-2.0]], [1.0])
    """

    compressor: Compressor
    layout: Layout

    @cached_property
    def channel(self) -> Channel:
        """The channel from the clients to the server; its memory is c_i."""
        return Channel(self.compressor, EF21(), self.layout)

    def send(
        self,
        c_i: Array,
        c: Array,
        x_0: Array,
        x_K: Array,
        K: int | Array,
        eta_L: float,
        key: int | Array,
        t: int = 0,
    ) -> Outgoing:
        """Compress the change of c_i after K local steps from x_0 to x_K; the memory returned is c_i_next.

        c_i and x_K have shape (d,) for one client, or (n, d) for a block of n clients with n keys and K of
        shape (n, 1).
        """
        with np.errstate(over="ignore", invalid="ignore"):  # the compressor refuses NaN and Inf
            target = c_i - c + (x_0 - x_K) / K / eta_L
        return self.channel.send(target, c_i, key, t)

    def receive(self, total: Array, payloads: Iterable[Weighted], everyone: float) -> tuple[Array, Array]:
        """Return the next c, and the next sum of all clients' c_i; `total` is the sum before the round.

        `everyone` is the sum of the weights of all clients, also of those that sent nothing.
        """
        mean_sent, arrived = average(total, payloads)
        return self.channel.feedback.receive(mean_sent, total, Weights(arrived, everyone))
