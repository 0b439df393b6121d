"""Feedback: what clients and server remember so that compression loses little or nothing over time.

A feedback is a set of pure functions. Those of the client, around the compressor C:

    x_0    = start(x, memory, shared)              where its local steps begin
    p      = outgoing(g, memory, shared)           line 12: what it wants to send
    left   = p - C(p)                              what the compressor could not send
    memory_next = remember(left, C(p), memory)     line 15
    memory = restore(memory, C(p))                 if the reply gets lost after all

and those of the server, around the average:

    delta, memory_next = receive(mean of C(p), memory, weights)
    shared = broadcast(memory)                     what travels to the clients beside the model

`memory` is one vector, or a block of vectors with a client in front; None where a feedback keeps none.
Arrays may be of NumPy or of torch. Each feedback states its law: an equation that holds however many replies
get lost. `imbalance` is the difference that is zero by the law; the tests of faults compute it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from cfedavg.compress import minus, plus
from cfedavg.core.arrays import Array
from cfedavg.core.parts import Part, Registry, check_argument
from cfedavg.core.payload import Payload


class Weights(NamedTuple):
    """The weights of a round: of the clients whose payloads arrived, and of all clients."""

    arrived: float
    everyone: float


class Books(NamedTuple):
    """The terms of a law, for one client: sums over all of its rounds, and its present memory."""

    computed: Array  # updates g
    applied: Array  # decompressed payloads that are in the server's model
    pending: Array  # its last payload, while nobody knows whether that is in the model
    forgone: Array  # what `remember` gave up for good
    memory: Array


class Feedback(Part):
    """What is remembered around a compressor. A new one overrides what it does differently from `none`."""

    law: ClassVar[str] = ""
    # Whether the server's memory is the sum of the clients' memories: then none may be rounded or lost.
    mirrors_clients: ClassVar[bool] = False

    @property
    def moves_start(self) -> bool:
        """Whether clients begin elsewhere than at the broadcast model."""
        return type(self).start is not Feedback.start

    @property
    def keeps_client_memory(self) -> bool:
        """Whether each client has a memory."""
        return type(self).remember is not Feedback.remember

    @property
    def keeps_server_memory(self) -> bool:
        """Whether the server has a memory."""
        return type(self).receive is not Feedback.receive

    @property
    def broadcasts(self) -> bool:
        """Whether the broadcast carries more than the model."""
        return type(self).broadcast is not Feedback.broadcast

    def start(self, x: Array, memory: Array, shared: Array | None) -> Array:
        """Return where the local steps begin, given the model x that was broadcast."""
        return x

    def outgoing(self, g: Array, memory: Array, shared: Array | None) -> Array:
        """Return p, which is to be compressed, from the local update g."""
        return g

    def remember(self, left: Array, sent: Payload, memory: Array) -> Array:
        """Return the client's next memory, after C(p) = `sent` with `left` = p - C(p)."""
        return memory

    def restore(self, memory: Array, sent: Payload) -> Array:
        """Return the client's memory as if `sent`, which got lost, had not been sent."""
        return memory

    def receive(self, mean_sent: Array, memory: Array | None, weights: Weights) -> tuple[Array, Array | None]:
        """Return the server's update and its next memory, from the mean of what arrived."""
        return mean_sent, memory

    def broadcast(self, memory: Array | None) -> Array | None:
        """Return what the broadcast carries beside the model; None for nothing."""
        return None

    def forgone(self, left: Array) -> Array:
        """Return the part of p - C(p) that is given up for good."""
        return 0 * left

    def imbalance(self, books: Books) -> Array:
        """Return the vector that is zero by this feedback's law."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """Forgets what could not be sent."""

    name: ClassVar[str] = "none"
    law: ClassVar[str] = "nothing is remembered: what is not sent at once, or gets lost, is gone"

    def forgone(self, left: Array) -> Array:
        return left

    def imbalance(self, books: Books) -> Array:
        return books.memory


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Adds what could not be sent to the next update; with `decay` below 1 it fades.

    p = g + e and e_next = decay * (p - C(p)), lines 12 and 15 of Algorithm 1 for decay = 1. A decay keeps a
    residual from growing, and books (1 - decay) (p - C(p)) as forgone in every round. Channel has an example.
    """

    name: ClassVar[str] = "ef"
    examples: ClassVar[tuple[str, ...]] = ("ef", "ef(decay=0.95)")
    law: ClassVar[str] = "updates = applied + pending + residual + forgone, bitwise for decay = 1"
    decay: float = 1.0

    def __post_init__(self) -> None:
        check_argument("decay", self.decay, "above 0 and at most 1", lambda decay: 0 < decay <= 1)

    def outgoing(self, g: Array, memory: Array, shared: Array | None) -> Array:
        return g + memory

    def remember(self, left: Array, sent: Payload, memory: Array) -> Array:
        return left if self.decay == 1 else self.decay * left

    def restore(self, memory: Array, sent: Payload) -> Array:
        return plus(memory, sent)

    def forgone(self, left: Array) -> Array:
        return (1 - self.decay) * left

    def imbalance(self, books: Books) -> Array:
        return books.computed - books.applied - books.pending - books.forgone - books.memory


@dataclass(frozen=True)
class EF21(Feedback):
    """Sends the change of the update: client and server both keep h, the last update as the server knows it.

    p = g - h, h_next = h + C(p); the server's update is the mean of all clients' h, also of those that were
    silent in this round. A payload that gets lost is subtracted again (Richtarik et al., 2021).

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
        """Return the mean of all h, and their sum: a mean in memory would be wrong after a client joins."""
        total = weights.arrived * mean_sent
        total = total if memory is None else memory + total
        return total / weights.everyone, total

    def imbalance(self, books: Books) -> Array:
        return books.memory - books.applied - books.pending


_ALL = (ErrorFeedback, EF21, NoFeedback)
FEEDBACKS: Registry[Feedback] = Registry("feedback", Feedback, {each.name: each for each in _ALL})
