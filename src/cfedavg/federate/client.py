"""The client's half of the protocol, without I/O, and its messages: see `protocol` for the rules."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cfedavg.channel import Channel, Outgoing, TooLarge
from cfedavg.core.arrays import Array, norm2
from cfedavg.core.errors import NotFinite
from cfedavg.core.keys import Purpose, key, signed
from cfedavg.federate.protocol import NEVER, Mark, Request, Sender, Stamp, make_mark
from cfedavg.federate.versions import Broadcast, Copy, Replica, follow
from cfedavg.wire import WireError, decode, encode

_LENGTHS = struct.Struct("<II")  # of a message: of its payload, of its facts; what travels whole is the rest
MOST_FACTS = 65_536  # bytes


class LastAnswer(NamedTuple):
    """An answer as it went out."""

    stamp: Stamp
    message: bytes


@dataclass(frozen=True)
class Client:
    """The durable state of a client: its memory, its last answer, and how far it has come."""

    incarnation: int  # drawn anew where there is no state to go on from
    memory: Any  # of its feedback: with `ef` the residual e
    sent: LastAnswer | None = None  # whether it is in the model is not known yet
    seen: Stamp = NEVER  # the last request that it answered
    told: Stamp = NEVER  # the last answer in the model, as the server said then
    forgotten: int = 0  # times that a restored server lacked an answer that it had named before
    # For each generation in which it answered: no model up to this number holds what the client still has.
    agreed: Mapping[int, int] = field(default_factory=dict)
    copy: Copy | None = None  # of the server's w, where broadcasts are compressed


@dataclass(frozen=True)
class Train:
    """Do the local work from the client's copy, then call `make_answer` with its update."""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the client's copy. Store the state before the reply, which tells the copy's version."""


@dataclass(frozen=True)
class Resend:
    """Send the same message again: the request was answered before."""

    message: bytes


@dataclass(frozen=True)
class Refuse:
    """Send nothing, for this reason."""

    why: str


@dataclass(frozen=True)
class NeedWhole:
    """The copy cannot follow the broadcast. Store nothing; the server sends the whole model by this stamp."""


@dataclass(frozen=True)
class Outdated:
    """The model may hold what this state holds: start anew, as another incarnation with an empty memory.

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
    broadcast = request.broadcast
    if broadcast is not None:
        now = request.stamp.generation, request.t
        if broadcast.version[:2] != now:
            why = f"the request is of version {now[0]}.{now[1]}, and leads to {broadcast.version}"
            return client, Refuse(why)
        if why := _object_to_age(client.copy, broadcast):
            return client, Refuse(why)
    if _is_outdated(client, request.mark):
        return client, Outdated()
    return begin_training(client, request, sender, replica)


def begin_training(
    client: Client, request: Request, sender: Sender, replica: Replica | None
) -> tuple[Client, Train | NeedWhole]:
    """Follow the broadcast and settle the last answer, unless the copy cannot follow."""
    copy = client.copy
    if request.broadcast is not None:
        if replica is None:
            raise ValueError("a request with a broadcast needs a replica")
        copy = follow(copy, request.broadcast, replica)
        if copy is None:
            return client, NeedWhole()
    return replace(_settle(client, request, sender), copy=copy), Train()


def catch_up(
    client: Client, broadcast: Broadcast, replica: Replica
) -> tuple[Client, Evaluate | Refuse | NeedWhole]:
    """Return the state after a request to evaluate, and what to do. Nothing but the copy changes.

    Check its generation by `object_to_stamp` first: a client refuses all versions before its own.
    """
    if why := _object_to_age(client.copy, broadcast):
        return client, Refuse(why)
    copy = follow(client.copy, broadcast, replica)
    return (client, NeedWhole()) if copy is None else (replace(client, copy=copy), Evaluate())


def make_answer(client: Client, request: Request, g: Any, sender: Sender) -> tuple[Client, bytes]:
    """Return the state to store after the local work of a request, and the message to send after that."""
    message, memory = sender.send(g, client.memory, request)
    sent = LastAnswer(request.stamp, message)
    return replace(client, memory=memory, sent=sent, seen=request.stamp), message


def _object_to_age(copy: Copy | None, broadcast: Broadcast) -> str:
    """Return why a broadcast is late; empty if it is not. A copy never goes back to an earlier version."""
    if copy is None or broadcast.version[:2] >= copy.version[:2]:
        return ""
    return f"version {broadcast.version} is older than {copy.version}, which this client holds"


def _is_outdated(client: Client, mark: Mark | None) -> bool:
    """Whether a model with this mark may hold what is in the client's residual."""
    if mark is None or client.seen == NEVER:  # a new client has nothing that anyone could have sent
        return False
    if client.sent is not None and mark.stamp == client.sent.stamp:
        # A predecessor's answer holds nothing of this client; the answer of a copy of this client does.
        return mark.incarnation == client.incarnation and mark != _last_mark(client)
    generation, number = mark.stamp
    return generation >= min(client.agreed) and number > client.agreed.get(generation, 0)


def _settle(client: Client, request: Request, sender: Sender) -> Client:
    """Drop the last answer if it is in the model; otherwise put it back into the residual."""
    memory, agreed = client.memory, dict(client.agreed)
    held = NEVER if request.mark is None else request.mark.stamp
    if client.sent is not None:
        if request.mark != _last_mark(client):
            memory = sender.restore(memory, client.sent.message)
        if held == client.sent.stamp:
            agreed[held.generation] = held.number
    # Each model of a generation follows from the one before: what this one lacks, earlier ones lack too.
    agreed[request.stamp.generation] = request.stamp.number - 1
    forgotten = client.forgotten + (held < client.told)
    return replace(client, memory=memory, sent=None, told=held, forgotten=forgotten, agreed=agreed)


def _last_mark(client: Client) -> Mark | None:
    return client.sent and make_mark(client.sent.stamp, client.incarnation, client.sent.message)


class ClientMessage(NamedTuple):
    """The parts of a message: the payload as on the wire, facts of the round, arrays that travel whole."""

    payload: bytes
    facts: dict[str, Any]
    whole: bytes


def pack_message(message: ClientMessage) -> bytes:
    """Return the message as bytes.

    >>> unpack_message(pack_message(ClientMessage(b"abc", {"K": 3}, b"")), most=100, whole=0).facts
    {'K': 3}
    """
    facts = json.dumps(message.facts, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(message.payload), len(facts)) + message.payload + facts + message.whole


def unpack_message(data: bytes, most: int, whole: int) -> ClientMessage:
    """Return the parts. `most` bytes of payload are accepted; `whole` bytes must travel whole."""
    if len(data) < _LENGTHS.size:
        raise WireError(f"a message of {len(data)} bytes is cut short")
    payload, facts = _LENGTHS.unpack_from(data)
    if payload > most:
        raise WireError(f"the payload has {payload} bytes, more than the {most} that are accepted")
    if facts > MOST_FACTS or len(data) != _LENGTHS.size + payload + facts + whole:
        raise WireError("the parts of the message do not add up to its length")
    at = _LENGTHS.size + payload
    try:
        found = json.loads(data[at : at + facts])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise WireError("what the client says of its round is not a JSON object")
    return ClientMessage(data[_LENGTHS.size : at], found, data[at + facts :])


@dataclass(frozen=True)
class Uplink:
    """The sender that the protocol asks for. Its draws go by (seed, round, client), as in a simulation.

    No payload has a larger norm than `max_norm`. `facts` and `whole` are the other parts of a message.
    """

    channel: Channel
    client: int
    seed: int = 0
    max_norm: float = math.inf
    facts: Mapping[str, Any] = field(default_factory=dict)
    whole: bytes = b""

    def _compress(self, g: Array, memory: Array, t: int) -> Outgoing:
        """Do lines 12 to 15 of Algorithm 1; raise NotFinite if NaN or Inf would be sent."""
        word = signed(key(self.seed, t, self.client, Purpose.SELECT))
        return self.channel.send(g, memory, word, t, max_norm=self.max_norm)

    def send(self, g: Array, memory: Array, request: Request) -> tuple[bytes, Array]:
        """Return the message and the memory after it; the facts tell the norms of p and of what is left."""
        made = self._compress(g, memory, request.t)
        facts = {**self.facts, "p2": norm2(made.p), "noise2": norm2(made.left)}
        if made.memory is not made.left:
            facts["memory2"] = norm2(made.memory)
        layout, sequence = self.channel.layout, request.stamp.sequence
        payload = encode(made.payload.numpy(), layout, client=self.client, sequence=sequence, round=request.t)
        return pack_message(ClientMessage(payload, facts, self.whole)), made.memory

    def can_send(self, memory: Array, t: int) -> bool:
        """Whether the memory can be sent, if only in parts."""
        try:
            self._compress(0 * memory, memory, t)
        except (TooLarge, NotFinite):
            return False
        return True

    def restore(self, memory: Array, message: bytes) -> Array:
        """Return the memory after one's own message got lost: with `ef` exact where nothing was rounded."""
        whole = 0  # if the message is cut short, `unpack_message` says so
        if len(message) >= _LENGTHS.size:
            whole = len(message) - _LENGTHS.size - sum(_LENGTHS.unpack_from(message))
        payload = unpack_message(message, len(message), whole).payload
        return self.channel.restore(memory, decode(payload, layout=self.channel.layout))
