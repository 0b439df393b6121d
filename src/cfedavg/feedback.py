"""Feedback: what clients and server remember so that compression loses little or nothing over time.

A feedback is a set of pure functions. The client calls these around the compressor C, for model x and update
g (the lines are those of Algorithm 1):

    x_0         = start(x, memory, shared)         the model where local steps begin
    p           = outgoing(g, memory, shared)      line 12: the vector to compress
    left        = p - C(p)                         what the compressor did not send
    memory_next = remember(left, C(p), memory)     line 15
    memory      = restore(memory, C(p))            if the reply got lost

The server calls these around the average:

    delta, memory_next = receive(mean of C(p), memory, weights)
    shared             = broadcast(memory)         what the server broadcasts beside the model

`memory` has shape (d,), or (n, d) for a block of n clients; it is None if the feedback keeps no memory.
Arrays may be NumPy arrays or torch tensors. Each feedback states its law: an equation that holds even if
replies get lost. `imbalance` returns the difference of the equation's two sides; tests check that it is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from cfedavg.compress import minus, plus
from cfedavg.core.arrays import Array
from cfedavg.core.parts import Part, Registry, argument
from cfedavg.core.payload import Payload


class Weights(NamedTuple):
    """The weights of a round: the sum over clients whose payloads arrived, and the sum over all clients."""

    arrived: float
    everyone: float


class LawTerms(NamedTuple):
    """The terms of a feedback's law, for one client: sums over all rounds, and the client's memory now."""

    computed: Array  # the sum of the updates g
    applied: Array  # the sum of the decompressed payloads that are in the server's model
    pending: Array  # the last payload, if the client does not know whether the server applied it
    forgone: Array  # the sum of what `remember` dropped for good
    memory: Array


class Feedback(Part):
    """The base class of feedbacks. A method that is not overridden acts as in the feedback `none`."""

    chosen_by: ClassVar[tuple[str, ...]] = ("feedback",)
    law: ClassVar[str] = ""
    # Whether the server's memory is the sum of the clients' memories; if so, no memory may be rounded or lost
    mirrors_clients: ClassVar[bool] = False

    @property
    def moves_start(self) -> bool:
        """Whether clients begin their local steps elsewhere than at the broadcast model."""
        return type(self).start is not Feedback.start

    @property
    def keeps_client_memory(self) -> bool:
        """Whether each client keeps a memory between rounds."""
        return type(self).remember is not Feedback.remember

    @property
    def keeps_server_memory(self) -> bool:
        """Whether the server keeps a memory between rounds."""
        return type(self).receive is not Feedback.receive

    @property
    def broadcasts(self) -> bool:
        """Whether the server broadcasts a vector beside the model."""
        return type(self).broadcast is not Feedback.broadcast

    def start(self, x: Array, memory: Array, shared: Array | None) -> Array:
        """Return the model where a client's local steps begin, given the broadcast model x."""
        return x

    def outgoing(self, g: Array, memory: Array, shared: Array | None) -> Array:
        """Return p, the vector to compress, from a client's update g."""
        return g

    def remember(self, left: Array, sent: Payload, memory: Array) -> Array:
        """Return the client's next memory; `sent` is the payload, `left` is what the compressor left out."""
        return memory

    def restore(self, memory: Array, sent: Payload) -> Array:
        """Return the client's memory as if the lost payload `sent` had not been sent."""
        return memory

    def receive(self, mean_sent: Array, memory: Array | None, weights: Weights) -> tuple[Array, Array | None]:
        """Return the update that the server applies and the server's next memory.

        `mean_sent` is the mean of the payloads that arrived.
        """
        return mean_sent, memory

    def broadcast(self, memory: Array | None) -> Array | None:
        """Return the vector that the server broadcasts beside the model, or None."""
        return None

    def forgone(self, left: Array) -> Array:
        """Return what is never sent of `left`, the values that the compressor left out."""
        return 0 * left

    def imbalance(self, terms: LawTerms) -> Array:
        """Return the difference of the two sides of this feedback's law: zero if the law holds."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """Forgets what the compressor did not send."""

    name: ClassVar[str] = "none"
    law: ClassVar[str] = "nothing is remembered: what is not sent at once, or gets lost, is gone"

    def forgone(self, left: Array) -> Array:
        return left

    def imbalance(self, terms: LawTerms) -> Array:
        return terms.memory


class ResidualFeedback(Feedback):
    """The base class of feedbacks with a residual: clients add what they have not sent to the next update."""

    law: ClassVar[str] = "updates = applied + pending + residual, bitwise"

    def outgoing(self, g: Array, memory: Array, shared: Array | None) -> Array:
        return g + memory

    def remember(self, left: Array, sent: Payload, memory: Array) -> Array:
        return left

    def restore(self, memory: Array, sent: Payload) -> Array:
        return plus(memory, sent)

    def imbalance(self, terms: LawTerms) -> Array:
        return terms.computed - terms.applied - terms.pending - terms.forgone - terms.memory


@dataclass(frozen=True)
class ErrorFeedback(ResidualFeedback):
    """Keeps what was not sent in a residual and adds it to the next update; `decay` shrinks the residual.

    The client adds its residual e to its update g, compresses p = g + e to C(p), and keeps
    e_next = decay * (p - C(p)). With decay = 1 these are lines 12 and 15 of Algorithm 1. A decay below 1
    keeps the residual from growing, but drops (1 - decay) (p - C(p)) for good in every round.
    """

    name: ClassVar[str] = "ef"
    examples: ClassVar[tuple[str, ...]] = ("ef", "ef(decay=0.95)")
    law: ClassVar[str] = "updates = applied + pending + residual + forgone, bitwise for decay = 1"
    decay: float = argument("above 0 and at most 1", lambda decay: 0 < decay <= 1, 1.0)

    def remember(self, left: Array, sent: Payload, memory: Array) -> Array:
        return left if self.decay == 1 else self.decay * left

    def forgone(self, left: Array) -> Array:
        return (1 - self.decay) * left


@dataclass(frozen=True)
class StepAhead(ResidualFeedback):
    """Error feedback whose clients begin their local steps at x + alpha * e: SA-PEF (Redie et al., 2026).

    So gradients are taken nearer to where the model will be once the residual e has arrived. The client sends
    C((x_K - x) + (1 - alpha) * e): the way from the model x holds the share alpha * e already. This is
    C(g + e) for the update g = x_K - (x + alpha * e). alpha = 0 is `ef`.

    >>> import numpy as np
    >>> StepAhead(0.5).start(np.array([1.0, 1.0]), np.array([2.0, 0.0]), None).tolist()
    [2.0, 1.0]
    """

    name: ClassVar[str] = "sapef"
    examples: ClassVar[tuple[str, ...]] = ("sapef", "sapef(alpha=0.9)")
    alpha: float = argument("from 0 to 1", lambda alpha: 0 <= alpha <= 1, 0.5)

    def start(self, x: Array, memory: Array, shared: Array | None) -> Array:
        return x + self.alpha * memory


@dataclass(frozen=True)
class CAFe(Feedback):
    """Sends how a client's update differs from the last mean update, which the server broadcasts.

    The client compresses p = g - u, where u is the update that the server applied in the last round, and the
    server applies u_next = u + mean of C(p). Clients remember nothing, so this suits clients without a disk.
    What the compressor drops is gone. (CAFe; Ortega et al., 2024.)

    >>> import numpy as np
    >>> CAFe().outgoing(np.array([3.0, 1.0]), None, np.array([2.0, 2.0])).tolist()
    [1.0, -1.0]
    """

    name: ClassVar[str] = "cafe"
    law: ClassVar[str] = "nothing is remembered of a client; the server's update is u + mean of C(g - u)"

    def outgoing(self, g: Array, memory: Array, shared: Array | None) -> Array:
        return g if shared is None else g - shared

    def forgone(self, left: Array) -> Array:
        return left

    def receive(self, mean_sent: Array, memory: Array | None, weights: Weights) -> tuple[Array, Array | None]:
        delta = mean_sent if memory is None else memory + mean_sent
        return delta, delta

    def broadcast(self, memory: Array | None) -> Array | None:
        return memory

    def imbalance(self, terms: LawTerms) -> Array:
        return terms.memory


@dataclass(frozen=True)
class EF21(Feedback):
    """Sends how a client's update differs from h, an estimate of it that client and server both keep.

    The client compresses p = g - h, where g is its update, to C(p). Then h_next = h + C(p). The server
    applies the mean of h over all clients, including those that sent nothing in this round. If a payload gets
    lost, the client subtracts the payload from h (Richtarik et al., 2021).

    >>> import numpy as np
    >>> from cfedavg.compress import parse
    >>> from cfedavg.channel import Channel
    >>> from cfedavg.core.layout import Layout
    >>> channel = Channel(parse("topk(0.5)"), EF21(), Layout.flat(2))
    >>> sent = channel.send(np.array([4.0, 1.0]), np.array([3.0, 3.0]), key=0)
    >>> sent.payload.values.data.tolist(), sent.memory.tolist()
    ([-2.0], [3.0, 1.0])
    """

    name: ClassVar[str] = "ef21"
    law: ClassVar[str] = "memory = applied + pending: client and server know the same h"
    mirrors_clients: ClassVar[bool] = True

    def outgoing(self, g: Array, memory: Array, shared: Array | None) -> Array:
        return g - memory

    def remember(self, left: Array, sent: Payload, memory: Array) -> Array:
        return plus(memory, sent)

    def restore(self, memory: Array, sent: Payload) -> Array:
        return minus(memory, sent)

    def receive(self, mean_sent: Array, memory: Array | None, weights: Weights) -> tuple[Array, Array | None]:
        """Return the mean of h over all clients, and the sum of h as the server's next memory.

        The sum, unlike the mean, stays right when a client joins.
        """
        total = weights.arrived * mean_sent
        total = total if memory is None else memory + total
        return total / weights.everyone, total

    def imbalance(self, terms: LawTerms) -> Array:
        return terms.memory - terms.applied - terms.pending


_ALL = (ErrorFeedback, StepAhead, EF21, CAFe, NoFeedback)
FEEDBACKS: Registry[Feedback] = Registry("feedback", Feedback, {each.name: each for each in _ALL})
