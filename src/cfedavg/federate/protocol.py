"""The protocol of a federation: its rules, and what client and server say to each other.

`client` and `server` are two state machines: states and messages go in and come out, no I/O.

Error feedback is bookkeeping. For every client, at every moment:

    sum of g  =  A + e + U + X

g: updates that it computed; A: what of them is in the server's durable model; e: its residual; U: its last
payload, while that is neither in the durable model nor back in e; X: what faults of a disk took, by cause.
That is the law of the feedback `ef`; others keep another memory in the place of e and state their own law
(see `cfedavg.feedback`). The protocol needs two functions of them: to send, and to restore what got lost.

The server keeps its side by three rules. It makes a number durable before the round that goes by it is
dispatched; a restart repeats that round, with the same model and number, and no other ever has the number.
It takes only replies to the present number, one from each client. It makes the model and the list of what is
in it durable, in one step, before the next dispatch.

The client keeps its side by three. It makes the residual after a round and the payload that it is about to
send durable, in one step, before it sends. It does not take a payload for delivered before the server has
said so: a request names the client's last answer that is in the model; everything before the request is
decided, so a payload that is not named is void, and goes back into the residual. And a client that hears of
an answer in the model which it did not give, or has taken back, is not what it takes itself for, and starts
anew.

Where the broadcast is compressed too, every client keeps a copy of the server's w, by version. The client
makes its copy durable in one step with its residual and its answer, before it sends. So an answer in the
model says which version its client holds at least, and a request leads from there to the present version. A
client that cannot follow says so, changes nothing, and gets the whole model in the same round. The server
stores its state before it sends anything that was made from it, also requests to evaluate.

docs/protocol.md draws the faults that this survives, and says why.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cfedavg.federate.versions import Broadcast


class Stamp(NamedTuple):
    """A dispatch: the server's generation, which a restored backup raises, and its number in it."""

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.number}"

    @property
    def sequence(self) -> int:
        """Both as one number, for the wire, which has 64 bits for it.

        A number is at most one above the round, for which the wire has 32 bits.
        """
        return self.generation << 32 | self.number


NEVER, FIRST = Stamp(0, 0), Stamp(1, 1)
AHEAD = 2 * 86_400  # seconds that a generation may be ahead of a client's clock


class Mark(NamedTuple):
    """One answer of a client: by stamp, by the incarnation that gave it, and by what was in it."""

    stamp: Stamp
    incarnation: int
    digest: int


def mark_of(stamp: Stamp, incarnation: int, message: bytes) -> Mark:
    """The mark of an answer, the same on both sides."""
    return Mark(stamp, incarnation, int.from_bytes(hashlib.sha256(message).digest()[:8], "big"))


@dataclass(frozen=True)
class Request:
    """What the server asks of one client: to train from the model of this round."""

    stamp: Stamp
    t: int
    mark: Mark | None  # the client's last answer that is in the durable model
    broadcast: Broadcast | None = None  # what leads to the present copy; None: the model travels beside it


class Sender(Protocol):
    """A client's way to the server: compressor, feedback and wire."""

    def send(self, g: Any, memory: Any, request: Request) -> tuple[bytes, Any]:
        """The message to send after an update g, and the memory of the feedback after it."""

    def restore(self, memory: Any, message: bytes) -> Any:
        """The memory as if the message had never been sent."""


def forged(stamp: Stamp, clock: float) -> str:
    """Why no server has given this stamp; empty if one may have. `clock` is the time in seconds.

    A client that has answered a stamp refuses all before it. So that one from a liar does not lock it out
    for good, it must be such that the server can still go beyond it: see `store.new_generation`.
    """
    if not (0 < stamp.generation < 2**32 and 0 < stamp.number < 2**32):
        return f"request {stamp} is no server's: both of its numbers must have 1 to 32 bits"
    if stamp.generation > clock + AHEAD:
        return f"request {stamp} is from the future: is this node's clock right?"
    return ""
