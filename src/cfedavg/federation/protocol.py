"""The protocol of a federation, as two state machines: states and messages go in and come out, no I/O.

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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from cfedavg.federation.primary import Primary
from cfedavg.federation.table import Table
from cfedavg.federation.versions import Broadcast, Copy, Replica, Version, follow


class Stamp(NamedTuple):
    """A dispatch: the server's generation, which a restored backup raises, and its number in it."""

    generation: int
    number: int

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


# The client


class Sent(NamedTuple):
    """An answer as it went out."""

    stamp: Stamp
    message: bytes


@dataclass(frozen=True)
class Client:
    """What a client keeps, durably: its memory, its last answer, and how far it has come."""

    incarnation: int  # drawn anew where there is no state to go on from
    memory: Any  # of its feedback: with `ef` the residual e
    sent: Sent | None = None  # the last answer, of which the fate is not known
    seen: Stamp = NEVER  # the last request that it answered
    told: Stamp = NEVER  # the last answer in the model, as the server said then
    forgotten: int = 0  # times that a server came back without what it had said it has
    # Of each generation in which it answered, the number up to which no model holds what it still has.
    agreed: Mapping[int, int] = field(default_factory=dict)
    copy: Copy | None = None  # of the server's w, where broadcasts are compressed


@dataclass(frozen=True)
class Train:
    """Do the local work from the client's copy, then call `answer` with its update."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the client's copy. Store the state before the reply, which tells the copy's version."""


@dataclass(frozen=True)
class Resend:
    """The request is one that was answered before: the same message goes out again."""

    message: bytes


@dataclass(frozen=True)
class Refuse:
    """Nothing is to be sent, for this reason."""

    why: str


@dataclass(frozen=True)
class NeedWhole:
    """The copy cannot follow the broadcast. Store nothing; the server sends the whole model by this stamp."""


@dataclass(frozen=True)
class Outdated:
    """What this state holds may be in the model: start anew, as another incarnation with an empty memory.

    Its disk is an older copy, another copy of the client is at work, or the server went back to a model
    that holds what this client has taken back.
    """


def forged(stamp: Stamp, clock: float) -> str:
    """Why no server has given this stamp; empty if one may have. `clock` is the time in seconds.

    A client that has answered a stamp refuses all before it. So that one from a liar does not lock it out
    for good, it must be such that the server can still go beyond it: see `store.new_generation`.
    """
    if not (0 < stamp.generation < 2**32 and 0 < stamp.number < 2**32):
        return f"request {_text(stamp)} is no server's: both of its numbers must have 1 to 32 bits"
    if stamp.generation > clock + AHEAD:
        return f"request {_text(stamp)} is from the future: is this node's clock right?"
    return ""


def receive(
    client: Client, request: Request, sender: Sender, replica: Replica | None = None
) -> tuple[Client, Train | Resend | Refuse | Outdated | NeedWhole]:
    """What to do about a request. The state after it need not be stored unless the client then answers.

    `replica` is needed for requests that carry a broadcast.
    """
    if client.sent is not None and request.stamp == client.sent.stamp:
        return client, Resend(client.sent.message)
    if request.stamp <= client.seen:
        return client, Refuse(f"request {_text(request.stamp)} is older than {_text(client.seen)}, answered")
    if why := _misfit(request) or _stale(client.copy, request.broadcast):
        return client, Refuse(why)
    if _outdated(client, request.mark):
        return client, Outdated()
    return _begin(client, request, sender, replica)


def catch_up(
    client: Client, broadcast: Broadcast, replica: Replica
) -> tuple[Client, Evaluate | Refuse | NeedWhole]:
    """What to do about a request to evaluate, which changes nothing but the copy.

    Check its generation by `forged` first: a client refuses all versions before its own.
    """
    if why := _stale(client.copy, broadcast):
        return client, Refuse(why)
    copy = follow(client.copy, broadcast, replica)
    return (client, NeedWhole()) if copy is None else (replace(client, copy=copy), Evaluate())


def _misfit(request: Request) -> str:
    """Why the broadcast is not that of the request's round; empty if it is."""
    now = request.stamp.generation, request.t
    if request.broadcast is None or request.broadcast.version[:2] == now:
        return ""
    return f"the request is of version {now[0]}.{now[1]}, and leads to {request.broadcast.version}"


def _stale(copy: Copy | None, broadcast: Broadcast | None) -> str:
    """Why a broadcast is late; empty if it is not. A copy that went back would not be what was told."""
    if copy is None or broadcast is None or broadcast.version[:2] >= copy.version[:2]:
        return ""
    return f"version {broadcast.version} is older than {copy.version}, which this client holds"


def _begin(
    client: Client, request: Request, sender: Sender, replica: Replica | None
) -> tuple[Client, Train | NeedWhole]:
    """Follow the broadcast and decide over the last answer, unless the copy cannot follow."""
    copy = client.copy
    if request.broadcast is not None:
        if replica is None:
            raise ValueError("a request with a broadcast needs a replica")
        copy = follow(copy, request.broadcast, replica)
        if copy is None:
            return client, NeedWhole()
    return replace(_resolved(client, request, sender), copy=copy), Train()


def _outdated(client: Client, mark: Mark | None) -> bool:
    """Whether a model with this mark may hold what is in the client's residual."""
    if mark is None or client.seen == NEVER:  # a new client has nothing that anyone could have sent
        return False
    if client.sent is not None and mark.stamp == client.sent.stamp:
        # A predecessor's answer holds nothing of mine; that of a copy of me does.
        return mark.incarnation == client.incarnation and mark != _mark(client)
    generation, number = mark.stamp
    return generation >= min(client.agreed) and number > client.agreed.get(generation, 0)


def _resolved(client: Client, request: Request, sender: Sender) -> Client:
    """The last answer is in the model, or void and back in the residual."""
    memory, agreed = client.memory, dict(client.agreed)
    held = NEVER if request.mark is None else request.mark.stamp
    if client.sent is not None:
        if request.mark != _mark(client):
            memory = sender.restore(memory, client.sent.message)
        if held == client.sent.stamp:
            agreed[held.generation] = held.number
    # A generation's models follow from each other: what is not in this one was not in those before.
    agreed[request.stamp.generation] = request.stamp.number - 1
    forgotten = client.forgotten + (held < client.told)
    return replace(client, memory=memory, sent=None, told=held, forgotten=forgotten, agreed=agreed)


def _mark(client: Client) -> Mark | None:
    """Of its last answer."""
    return client.sent and mark_of(client.sent.stamp, client.incarnation, client.sent.message)


def answer(client: Client, request: Request, g: Any, sender: Sender) -> tuple[Client, bytes]:
    """The state to store, and then the message to send, after the local work of a request to train."""
    message, memory = sender.send(g, client.memory, request)
    return replace(client, memory=memory, sent=Sent(request.stamp, message), seen=request.stamp), message


# The server


@dataclass(frozen=True)
class Server:
    """What a server keeps, durably, in one piece."""

    x: Any
    t: int = 0
    stamp: Stamp = FIRST  # of the present round; no reply to another is taken
    applied: Table[Mark] = field(default_factory=Table)  # of each client, its last answer in x
    primary: Primary | None = None  # the copy that all clients hold, where broadcasts are compressed


def restored(server: Server, generation: int, digest: int | None = None) -> Server:
    """From an old backup, whose numbers have been used since: to be stored before the first dispatch.

    A server with a primary needs the digest of its w. All clients need the whole model then.
    """
    if generation <= server.stamp.generation:
        raise ValueError(f"generation {generation} is not above {server.stamp.generation}")
    if (digest is None) != (server.primary is None):
        raise ValueError("a digest must be given for a server with a primary, and for no other")
    primary = server.primary and server.primary.restart(generation, digest or 0)
    return replace(server, stamp=Stamp(generation, 1), primary=primary)


def request_of(server: Server, client: str, broadcast: Broadcast | None = None) -> Request:
    """What to send to a client in this round."""
    return Request(server.stamp, server.t, server.applied.get(client), broadcast)


def held_version(server: Server, client: str, told: Version | None = None) -> Version | None:
    """Return the newest version that a client is known to hold; None if none in the history is known.

    An answer in the model was durable in one step with the copy that it was made from, and rounds and
    numbers go together in a generation. `told` is what the client last told in a reply; the driver may
    forget it.
    """
    if server.primary is None:
        return None
    mark, known = server.applied.get(client), list[Version]()
    if mark is not None and mark.stamp.generation == server.stamp.generation:
        version = server.primary.at(server.t - server.stamp.number + mark.stamp.number)
        known += [] if version is None else [version]
    if told in server.primary.versions:
        known.append(told)
    return max(known, default=None)


def objection(
    server: Server, asked: Collection[str], taken: Collection[str], client: str, stamp: Stamp
) -> str:
    """Why a reply is not to be taken; empty if it is."""
    if client not in asked:
        return "not asked"
    if stamp != server.stamp:
        return "late"
    return "repeated" if client in taken else ""


def ended(
    server: Server, taken: Mapping[str, Mark], x_next: Any, primary_next: Primary | None = None
) -> Server:
    """After a round, with the answers of `taken` in x_next: to be stored before anything is made from it.

    A client that has answered has dealt with all that was before, so its last answer is all it may hold.
    A server with a primary needs the next one: see `Primary.advance`.
    """
    stamp = Stamp(server.stamp.generation, server.stamp.number + 1)
    found = primary_next and primary_next.version[:2]
    if found != (server.primary and (stamp.generation, server.t + 1)):
        raise ValueError(f"the primary after round {server.t} must be of the round after it, got {found}")
    return Server(x_next, server.t + 1, stamp, server.applied | taken, primary_next)


def _text(stamp: Stamp) -> str:
    return f"{stamp.generation}.{stamp.number}"
