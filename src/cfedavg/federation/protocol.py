"""The protocol of a federation, as two state machines: states and messages go in and come out, no I/O.

Error feedback is bookkeeping. For every client, at every moment:

    sum of g  =  A + e + U + X

g: updates that it computed; A: what of them is in the server's durable model; e: its residual; U: what it
has logged and is neither in the durable model nor back in e; X: what was thrown away on purpose, by cause.

The server keeps its side by three rules. It makes a number durable before the round that goes by it is
dispatched; a restart repeats that round, with the same model and number, and no other ever has the number.
It takes only replies to the present number, one from each client. It makes the model and the list of what is
in it durable, in one step, before the next dispatch.

The client keeps its side by two. It makes the residual after a round and the payload that it is about to
send durable, in one step, before it sends. And it does not take a payload for delivered before the server
has said so: each request names the client's payloads that are in the model; those that are decided and not
named are void, and go back into the residual. docs/protocol.md draws the faults that this survives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

LIMIT = 8  # payloads of which a client does not know the fate; then it does not train


class Stamp(NamedTuple):
    """A dispatch: the server's generation, which a restored backup raises, and its number in it."""

    generation: int
    number: int


NEVER, FIRST = Stamp(0, 0), Stamp(1, 1)


@dataclass(frozen=True)
class Request:
    """What the server asks of one client: to train from the model of this round."""

    stamp: Stamp
    t: int
    settled: Stamp  # what was dispatched before it is decided
    applied: frozenset[Stamp]  # of the client's payloads, those in the durable model that it may still hold


class Codec(Protocol):
    """A client's compressor and wire."""

    def shrink(self, p: Any, request: Request) -> tuple[bytes, Any]:
        """The message to send of p, and what is left of p."""

    def restored(self, e: Any, message: bytes) -> Any:
        """e with all that the message holds added."""


# The client


@dataclass(frozen=True)
class Client:
    """What a client keeps, durably: its residual, payloads of unknown fate, and how far it has come."""

    e: Any
    log: Mapping[Stamp, bytes] = field(default_factory=dict)
    seen: Stamp = NEVER  # the last request that it answered
    told: Stamp = NEVER  # the last of its payloads that the server said it has
    forgotten: int = 0  # times that a server came back without what it had said it has


@dataclass(frozen=True)
class Train:
    """Do the local work, then call `answer` with its update."""


@dataclass(frozen=True)
class Resend:
    """The request is one that was answered before: the same message goes out again."""

    message: bytes


@dataclass(frozen=True)
class Refuse:
    """Nothing is to be sent, for this reason."""

    why: str


def receive(client: Client, request: Request, codec: Codec) -> tuple[Client, Train | Resend | Refuse]:
    """What to do about a request. The state after it need not be stored unless the client then answers."""
    if request.stamp in client.log:
        return client, Resend(client.log[request.stamp])
    if request.stamp <= client.seen:
        return client, Refuse(f"request {_text(request.stamp)} is older than {_text(client.seen)}, answered")
    client = _resolved(client, request, codec)
    if len(client.log) >= LIMIT:
        return client, Refuse(f"the fate of {len(client.log)} payloads is unknown")
    return client, Train()


def _resolved(client: Client, request: Request, codec: Codec) -> Client:
    """Payloads that are in the model leave the log; void ones go back into the residual."""
    e, log, told = client.e, dict(client.log), client.told
    for stamp in sorted(client.log):
        if stamp in request.applied:
            del log[stamp]
            told = max(told, stamp)
        elif stamp < request.settled:
            e = codec.restored(e, log.pop(stamp))
    # What was said to be in the model, by a server that was lost, and is not in its backup, is lost with it.
    lost = client.told > NEVER and _ahead(client.told, request)
    return replace(
        client,
        e=e,
        log=log,
        told=max(request.applied, default=NEVER) if lost else told,
        forgotten=client.forgotten + lost,
    )


def _ahead(told: Stamp, request: Request) -> bool:
    """Whether a server of a later generation has less than an earlier one had said it has."""
    return request.stamp.generation > told.generation and told > max(request.applied, default=NEVER)


def answer(client: Client, request: Request, g: Any, codec: Codec) -> tuple[Client, bytes]:
    """The state to store, and then the message to send, after the local work of a request to train."""
    message, e = codec.shrink(client.e + g, request)
    log = {**client.log, request.stamp: message}
    return replace(client, e=e, log=log, seen=request.stamp), message


# The server


@dataclass(frozen=True)
class Server:
    """What a server keeps, durably, in one piece."""

    x: Any
    t: int = 0
    stamp: Stamp = FIRST  # of the present round; no reply to another is taken
    applied: Mapping[str, Stamp] = field(default_factory=dict)  # of each client, its last payload in x


def restored(server: Server, generation: int) -> Server:
    """From an old backup, whose numbers have been used since: to be stored before the first dispatch."""
    if generation <= server.stamp.generation:
        raise ValueError(f"generation {generation} is not above {server.stamp.generation}")
    return replace(server, stamp=Stamp(generation, 1))


def request_of(server: Server, client: str) -> Request:
    """What to send to a client in this round."""
    applied = frozenset({server.applied[client]} if client in server.applied else ())
    return Request(server.stamp, server.t, server.stamp, applied)


def objection(
    server: Server, asked: Collection[str], taken: Collection[str], client: str, stamp: Stamp
) -> str:
    """Why a reply is not to be taken; empty if it is."""
    if client not in asked:
        return "not asked"
    if stamp != server.stamp:
        return "late"
    return "repeated" if client in taken else ""


def ended(server: Server, taken: Collection[str], x_next: Any) -> Server:
    """After a round, with the replies of `taken` in x_next: to be stored before the next dispatch.

    A client that has answered has dealt with all that was before, so its last payload is all it may hold.
    """
    applied = {**server.applied, **dict.fromkeys(taken, server.stamp)}
    return Server(x_next, server.t + 1, _after(server.stamp), applied)


def _after(stamp: Stamp) -> Stamp:
    return Stamp(stamp.generation, stamp.number + 1)


def _text(stamp: Stamp) -> str:
    return f"{stamp.generation}.{stamp.number}"
