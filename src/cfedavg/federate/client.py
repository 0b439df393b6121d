"""The client's half of the protocol, without I/O: see `protocol` for the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cfedavg.federate.protocol import NEVER, Mark, Request, Sender, Stamp, mark_of
from cfedavg.federate.versions import Broadcast, Copy, Replica, follow


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


def receive(
    client: Client, request: Request, sender: Sender, replica: Replica | None = None
) -> tuple[Client, Train | Resend | Refuse | Outdated | NeedWhole]:
    """Return the state after a request to train, and what to do. Store it only if the client then answers.

    `replica` is needed for requests that carry a broadcast.
    """
    if client.sent is not None and request.stamp == client.sent.stamp:
        return client, Resend(client.sent.message)
    if request.stamp <= client.seen:
        return client, Refuse(f"request {request.stamp} is older than {client.seen}, answered")
    if why := _misfit(request) or _stale(client.copy, request.broadcast):
        return client, Refuse(why)
    if _outdated(client, request.mark):
        return client, Outdated()
    return _begin(client, request, sender, replica)


def catch_up(
    client: Client, broadcast: Broadcast, replica: Replica
) -> tuple[Client, Evaluate | Refuse | NeedWhole]:
    """Return the state after a request to evaluate, and what to do. Nothing but the copy changes.

    Check its generation by `forged` first: a client refuses all versions before its own.
    """
    if why := _stale(client.copy, broadcast):
        return client, Refuse(why)
    copy = follow(client.copy, broadcast, replica)
    return (client, NeedWhole()) if copy is None else (replace(client, copy=copy), Evaluate())


def _misfit(request: Request) -> str:
    """Return why the broadcast is not that of the request's round; empty if it is."""
    now = request.stamp.generation, request.t
    if request.broadcast is None or request.broadcast.version[:2] == now:
        return ""
    return f"the request is of version {now[0]}.{now[1]}, and leads to {request.broadcast.version}"


def _stale(copy: Copy | None, broadcast: Broadcast | None) -> str:
    """Return why a broadcast is late; empty if it is not. A copy never goes back behind what was told."""
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
