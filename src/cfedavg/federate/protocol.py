"""The rules of a federation, and the requests and names that client and server exchange.

`client` and `server` are two state machines without I/O: functions from states and messages to new ones.

Error feedback is bookkeeping. For every client, at every moment:

    sum of g  =  A + e + U + X

g: the updates that the client computed. A: their part in the server's durable model. e: the client's
residual. U: the client's last payload, if it is neither in the durable model nor back in e. X: what was lost
by disk faults, by cause. This is the law of the feedback `ef`. Another feedback keeps another memory in the
place of e and states its own law (see `cfedavg.feedback`). The protocol needs two functions of a feedback:
one sends an update, the other restores the memory after a message got lost.

The server keeps three rules.
1. Each round has a number. The server stores the number before it dispatches the round. A restarted server
   repeats the round with the same model and number. No other round ever has that number.
2. The server accepts only replies to the present number, one from each client.
3. Before the next dispatch, the server stores the model and the list of the answers that the model holds, in
   one step.

The client keeps three rules.
1. Before it sends, the client stores its new residual and its payload, in one step.
2. A payload counts as delivered only if the server says so: a request names the client's last answer that is
   in the model. A request decides about all earlier answers. So a payload that the request does not name goes
   back into the residual.
3. If the model holds an answer that the client did not give, or has put back into its residual, the client's
   state is stale. The client then restarts with an empty residual.

If the broadcast is compressed too, every client keeps a model copy: a copy of the server's w, with a version.
Before it sends, the client stores its copy in one step with its residual and its answer. So an answer in the
model tells the server a version that the client has reached. The next request leads from that version to the
present one. A client whose copy cannot follow says so, changes nothing, and gets the whole model in the same
round. The server stores its state before it sends anything made from the state, also requests to evaluate.

docs/protocol.md draws the faults that this protocol survives, and says why.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cfedavg.federate.versions import Broadcast


class Stamp(NamedTuple):
    """The name of a dispatch: the server's generation, and a number within the generation.

    A server that restores a backup takes a higher generation.
    """

    generation: int
    number: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.number}"

    @property
    def sequence(self) -> int:
        """Generation and number as one 64-bit integer, for the wire. `number` is at most the round plus 1."""
        return self.generation << 32 | self.number


NEVER, FIRST = Stamp(0, 0), Stamp(1, 1)
AHEAD = 2 * 86_400  # seconds by which a generation (a time) may be ahead of a client's clock


class Mark(NamedTuple):
    """The name of one answer: the request's stamp, the client's incarnation, and the message's digest."""

    stamp: Stamp
    incarnation: int
    digest: int


def make_mark(stamp: Stamp, incarnation: int, message: bytes) -> Mark:
    """Return the mark of an answer. Client and server compute the same mark."""
    return Mark(stamp, incarnation, int.from_bytes(hashlib.sha256(message).digest()[:8], "big"))


@dataclass(frozen=True)
class Request:
    """The server's request to one client: train from the model of round `t`."""

    stamp: Stamp
    t: int
    mark: Mark | None  # the client's last answer that is in the durable model
    broadcast: Broadcast | None = None  # leads to the present model copy; None: the model is sent apart


class Sender(Protocol):
    """The interface that makes a client's messages: compressor, feedback and wire format."""

    def send(self, g: Any, memory: Any, request: Request) -> tuple[bytes, Any]:
        """Return the message for update `g`, and the memory of the feedback after the message."""

    def restore(self, memory: Any, message: bytes) -> Any:
        """Return the memory of the feedback as if `message` had never been sent."""


def find_fault_in_stamp(stamp: Stamp, clock: float) -> str:
    """Return why no server can have sent a request with this stamp; an empty text if one can.

    `clock` is the client's time in seconds. A client that has answered a stamp refuses all earlier stamps. A
    forged stamp must not lock out a client forever, so a client accepts only stamps that the server can still
    exceed: see `new_generation`.
    """
    if not (0 < stamp.generation < 2**32 and 0 < stamp.number < 2**32):
        return f"generation and number of request {stamp} must be from 1 to 2^32 - 1"
    if stamp.generation > clock + AHEAD:
        return f"request {stamp} is from the future: check this node's clock"
    return ""
