"""Algorithm 1 (CFedAvg) on one page. Read this module first, then `channel.py`.

In round t the server broadcasts the model x. Client i does K_i local steps from x and ends at x_K (lines 5
to 9, `optimise/local.py`). Then, with its residual e, the compressor C and the server's rate eta:

    g           = x_K - x   or   (x_K - x) / K_i          lines 10, 11   local_update
    p           = g + e                                   line 12        Channel.send
    payload     = C(p)                                    lines 13, 14   Channel.send
    e_next      = p - C(p)                                line 15        Channel.send
    delta_tilde = mean of C(p) over the clients           lines 17, 18   average
    x_next      = x + eta * delta_tilde                   line 19        Aggregator.step

What C drops stays in the client's residual e and is sent later. So x + eta * mean(e), the model with all
residuals added, moves as it would without compression (the paper's Iterative Step lemma).

One round of two clients, in which C sends one of two numbers:

    >>> from cfedavg import Channel, Layout, parse
    >>> from cfedavg.feedback import ErrorFeedback
    >>> from cfedavg.optimise.server import ServerSGD
    >>> channel = Channel(parse("topk(0.5)"), ErrorFeedback(), Layout.flat(2))
    >>> server = Aggregator(ErrorFeedback(), ServerSGD())
    >>> x, e = np.zeros(2), np.zeros((2, 2))  # the model, and a residual for each client
    >>> x_K = np.array([[2.0, 4.0], [6.0, 0.0]])  # the model of each client after its local steps
    >>> sent = channel.send(local_update(x, x_K, None), e, key=np.arange(2))
    >>> x_next, _ = server.step(x, server.init(x), [(sent.payload, [1.0, 1.0])], everyone=2.0, eta=1.0)
    >>> x_next.tolist(), sent.memory.tolist()
    ([3.0, 2.0], [[2.0, 0.0], [0.0, 0.0]])

Four parts can be exchanged: the compressor C, the feedback (lines 12 and 15), the local optimiser (line 8)
and the server optimiser (line 19). A simulation uses torch tensors; a client without torch uses NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cfedavg.compress import client_of_value, rows_of, values_of
from cfedavg.core.arrays import Array, add_in_order, cast_like, place, zeros
from cfedavg.core.payload import Payload
from cfedavg.feedback import Feedback, Weights
from cfedavg.optimise import ServerOptimiser

Weighted = tuple[Payload, Sequence[float]]  # the payload of a block of clients, and a weight for each client


def local_update(x: Array, x_K: Array, divisor: float | Array | None) -> Array:
    """Return a client's update g: x_K - x (line 10), or (x_K - x) / divisor (line 11).

    x is the broadcast model, a vector of length d. x_K is the client's model after K local steps; in line 11
    the divisor is K, and FedNova divides by the length of the steps. For a block of n clients, x_K has shape
    (n, d) and the divisor shape (n, 1).
    """
    with np.errstate(over="ignore", invalid="ignore"):  # the compressor refuses NaN and Inf
        return x_K - x if divisor is None else (x_K - x) / divisor


def average(like: Array, payloads: Iterable[Weighted]) -> tuple[Array, float]:
    """Return delta_tilde, the weighted mean of the payloads (lines 17 and 18), and the sum of the weights.

    A weight of 0 leaves a client out. The time grows with the number of coordinates received. Payloads are
    added in the order given, so the same payloads in the same order give the same mean, bit for bit. The
    mean has the length, dtype and device of `like`.
    """
    total, weight = zeros(like.shape, like), 0.0
    for payload, weights in payloads:
        shares = cast_like(place(np.array(weights, np.float64), like), total)
        if payload.indices is None:
            for row, share in zip(cast_like(rows_of(payload), total), shares, strict=True):
                total += row * share
        else:
            values = cast_like(values_of(payload), total)
            add_in_order(total, payload.indices, values * shares[client_of_value(payload.offsets)])
        weight += sum(weights)
    return total / weight if weight else total, weight


@dataclass(frozen=True)
class Aggregator:
    """The server's part of Algorithm 1 (lines 17 to 19): it makes the next model from a round's payloads."""

    feedback: Feedback
    optimiser: ServerOptimiser

    def init(self, x: Array) -> ServerMemory:
        """Return the server's memory before the first round."""
        return ServerMemory(0 * x if self.feedback.keeps_server_memory else None, self.optimiser.init(x))

    def step(
        self,
        x: Array,
        memory: ServerMemory,
        payloads: Iterable[Weighted],
        *,
        everyone: float,
        eta: float,
        scale: float = 1.0,
        t: int = 0,
    ) -> tuple[Array, ServerMemory]:
        """Return the model and the server's memory after round t; nothing changes if all weights are 0.

        `everyone` is the sum of the weights of all clients, also of those that sent nothing. `eta` is the
        server's rate. The mean update is multiplied by `scale`, to undo the division by K_i in line 11.
        """
        delta_tilde, arrived = average(x, payloads)
        if not arrived:
            return x, memory
        delta, feedback = self.feedback.receive(delta_tilde, memory.feedback, Weights(arrived, everyone))
        delta = delta if scale == 1 else scale * delta
        x_next, state = self.optimiser.step(x, delta, memory.optimiser, eta, t)
        # A user's feedback or optimiser may compute in another dtype; clients and files need the dtype of x.
        state = {name: cast_like(vector, x) for name, vector in state.items()}
        return cast_like(x_next, x), ServerMemory(None if feedback is None else cast_like(feedback, x), state)


@dataclass(frozen=True)
class ServerMemory:
    """The vectors that the server keeps between rounds beside the model x, each as long as x."""

    feedback: Array | None = None
    optimiser: Mapping[str, Array] = field(default_factory=dict)

    def vectors(self) -> dict[str, Array]:
        """Return all vectors by their names in files, such as `feedback` and `optimiser.m`."""
        found = {f"optimiser.{name}": each for name, each in self.optimiser.items()}
        return found if self.feedback is None else {"feedback": self.feedback, **found}

    @classmethod
    def from_vectors(cls, vectors: Mapping[str, Array]) -> ServerMemory:
        """Return the memory that holds these vectors; their names are as in the result of `vectors`."""
        rest = {name.removeprefix("optimiser."): each for name, each in vectors.items() if name != "feedback"}
        return cls(vectors.get("feedback"), rest)
