"""The rules of a federation, and what client and server say to each other.

`client` and `server` are two state machines: states and messages go in and come out, no I/O.

Error feedback is bookkeeping. For every client, at every moment:

    sum of g  =  A + e + U + X

g: the updates that the client computed; A: their part in the server's durable model; e: the client's
residual; U: its last payload, while that is neither in the durable model nor back in e; X: what faults of a
disk took, by cause. This is the law of the feedback `ef`. Another feedback keeps another memory in the place
of e and states its own law (see `cfedavg.feedback`). The protocol needs two functions of a feedback: one
that sends, one that restores what got lost.

The server keeps three rules. It makes a number durable before it dispatches the round of that number; a
restart repeats the round with the same model and number, and no other round ever has that number. It takes
only replies to the present number, one from each client. It makes the model and the list of the answers in
it durable, in one step, before the next dispatch.

The client keeps three rules. It makes its new residual and its payload durable, in one step, before it
sends. It counts a payload as delivered only when the server says so: a request names the client's last
answer that is in the model. Everything before the request is decided, so a payload that is not named is
void and goes back into the residual. A client that hears of an answer in the model which it did not give,
or has taken back, holds stale state and must restart with an empty residual.

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
    """The name of a dispatch: the server's generation, which a restored backup raises, and a number in it."""

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.number}"

    @property
    def sequence(self) -> int:
        """Both parts as one number of 64 bits, for the wire. The number is at most the round plus 1."""
        return self.generation << 32 | self.number


NEVER, FIRST = Stamp(0, 0), Stamp(1, 1)
AHEAD = 2 * 86_400  # seconds that a generation may be ahead of a client's clock


class Mark(NamedTuple):
    """The name of one answer: its stamp, the incarnation that gave it, and the digest of its message."""

    stamp: Stamp
    incarnation: int
    digest: int


def make_mark(stamp: Stamp, incarnation: int, message: bytes) -> Mark:
    """Return the mark of an answer. Client and server compute the same."""
    return Mark(stamp, incarnation, int.from_bytes(hashlib.sha256(message).digest()[:8], "big"))


@dataclass(frozen=True)
class Request:
    """What the server asks of one client: to train from the model of this round."""

    stamp: Stamp
    t: int
    mark: Mark | None  # the client's last answer that is in the durable model
    broadcast: Broadcast | None = None  # leads to the present copy; None: the model travels beside it


class Sender(Protocol):
    """A client's way to the server: compressor, feedback and wire."""

    def send(self, g: Any, memory: Any, request: Request) -> tuple[bytes, Any]:
        """Return the message to send after an update g, and the memory of the feedback after it."""

    def restore(self, memory: Any, message: bytes) -> Any:
        """Return the memory as if the message had never been sent."""


def object_to_stamp(stamp: Stamp, clock: float) -> str:
    """Return why no server has given this stamp; empty if one may have. `clock` is the time in seconds.

    A client that has answered a stamp refuses all earlier ones. A forged stamp must not lock it out for
    good, so the client accepts only stamps that the server can still exceed: see `new_generation`.
    """
    if not (0 < stamp.generation < 2**32 and 0 < stamp.number < 2**32):
        return f"request {stamp} is no server's: both of its numbers must have 1 to 32 bits"
    if stamp.generation > clock + AHEAD:
        return f"request {stamp} is from the future: is this node's clock right?"
    return ""
