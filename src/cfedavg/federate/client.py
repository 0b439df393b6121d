"""The state machine of a client, without I/O, and the client's messages.

The docstring of `cfedavg.federate` states the rules.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from cfedavg.channel import Channel, Outgoing, TooLarge
from cfedavg.core.arrays import Array, norm2
from cfedavg.core.errors import NotFinite
from cfedavg.core.keys import Purpose, key, signed
from cfedavg.federate.protocol import NEVER, Broadcast, Copy, Mark, Replica, Request, Stamp, follow, make_mark
from cfedavg.wire import WireError, decode, encode

_LENGTHS = struct.Struct("<II")  # lengths of a message's payload and facts; the rest is `uncompressed`
MOST_FACTS = 65_536  # bytes


class LastAnswer(NamedTuple):
    """The last message that a client sent, and the stamp (the name) of the request that it answers."""

    stamp: Stamp
    message: bytes


@dataclass(frozen=True)
class Client:
    """The stored state of a client: the feedback's memory, the last answer, and the requests it answered."""

    incarnation: int  # random; drawn when a client starts without a stored state
    memory: Any  # the memory of the feedback: with `ef` the residual e
    sent: LastAnswer | None = None  # the last answer, until a request says whether the model holds it
    answered: Stamp = NEVER  # the stamp of the newest request that the client answered
    confirmed: Stamp = NEVER  # the stamp of the answer that the last request named
    forgotten: int = 0  # how often a restored server lacked an answer that it had named before
    # For each generation of the server, a number n. If the client's last answer in a model of the generation
    # has the stamp number n or a lower one, the model holds nothing of the present residual.
    agreed: Mapping[int, int] = field(default_factory=dict)
    copy: Copy | None = None  # the copy of the server's w, if broadcasts are compressed


@dataclass(frozen=True)
class Train:
    """An order to the caller: train from the client's model copy, then call `make_answer` with the update."""


@dataclass(frozen=True)
class Evaluate:
    """An order to the caller: evaluate the model copy, store the state, reply with the copy's version."""


@dataclass(frozen=True)
class Resend:
    """An order to the caller: send the last message again, because the client has answered this request."""

    message: bytes


@dataclass(frozen=True)
class Refuse:
    """An order to the caller: refuse the request, for the reason `why`."""

    why: str


@dataclass(frozen=True)
class NeedWhole:
    """An order to the caller: store nothing, and ask the server for the whole model.

    The client's model copy cannot follow the broadcast. The server repeats the request, with the same stamp,
    and sends the whole model.
    """


@dataclass(frozen=True)
class Outdated:
    """An order to the caller: start anew, with a new incarnation number and an empty memory.

    The model may already hold a part of this client's residual. Possible reasons: somebody restored a backup
    of the client's disk, a duplicate of the client is at work, or the server went back to a model with an
    answer that this client has put back into its residual.
    """


class Sender(Protocol):
    """The interface of the object that makes a client's messages, with a compressor and a feedback."""

    def send(self, g: Any, memory: Any, request: Request) -> tuple[bytes, Any]:
        """Return the message that sends update `g`, and the new memory of the feedback."""

    def restore(self, memory: Any, message: bytes) -> Any:
        """Return the memory of the feedback as if `message` had never been sent."""


def receive(
    client: Client, request: Request, sender: Sender, replica: Replica | None = None
) -> tuple[Client, Train | Resend | Refuse | Outdated | NeedWhole]:
    """Return the client's state after a request to train, and an order: what the caller must do.

    Do not store this state: `make_answer` returns the state to store. If the request has a broadcast,
    `replica` must be given.
    """
    if client.sent is not None and request.stamp == client.sent.stamp:
        return client, Resend(client.sent.message)
    if request.stamp <= client.answered:
        why = f"request {request.stamp} is not newer than {client.answered}, which was answered"
        return client, Refuse(why)
    broadcast = request.broadcast
    if broadcast is not None:
        now = request.stamp.generation, request.t
        if broadcast.version[:2] != now:
            why = f"the request is for version {now[0]}.{now[1]}, its broadcast leads to {broadcast.version}"
            return client, Refuse(why)
        if why := _find_fault_in_version(client.copy, broadcast):
            return client, Refuse(why)
    if _is_outdated(client, request.mark):
        return client, Outdated()
    return begin_training(client, request, sender, replica)


def begin_training(
    client: Client, request: Request, sender: Sender, replica: Replica | None
) -> tuple[Client, Train | NeedWhole]:
    """Update the client's model copy and residual as a request says; return the new state and Train.

    If the server's model lacks the client's last answer, the answer's payload goes back into the residual. If
    the client's model copy cannot follow the broadcast, return the unchanged client and NeedWhole.
    """
    copy = client.copy
    if request.broadcast is not None:
        if replica is None:
            raise ValueError("`replica` must be given for a request with a broadcast, got None")
        copy = follow(copy, request.broadcast, replica)
        if copy is None:
            return client, NeedWhole()
    memory, agreed = client.memory, dict(client.agreed)
    held = NEVER if request.mark is None else request.mark.stamp
    if client.sent is not None:
        if request.mark != _last_mark(client):
            memory = sender.restore(memory, client.sent.message)
        if held == client.sent.stamp:
            agreed[held.generation] = held.number
    # In a generation, each model contains the one before. What this model lacks, the earlier ones lack too.
    agreed[request.stamp.generation] = request.stamp.number - 1
    forgotten = client.forgotten + (held < client.confirmed)
    return Client(client.incarnation, memory, None, client.answered, held, forgotten, agreed, copy), Train()


def catch_up(
    client: Client, broadcast: Broadcast, replica: Replica
) -> tuple[Client, Evaluate | Refuse | NeedWhole]:
    """Return the client's state after a request to evaluate, and an order. Only the model copy changes.

    Call `find_fault_in_stamp` first, to refuse a forged request. Else the client could take a model copy with
    a forged, very high version, and would then refuse the server's broadcasts as older.
    """
    if why := _find_fault_in_version(client.copy, broadcast):
        return client, Refuse(why)
    copy = follow(client.copy, broadcast, replica)
    return (client, NeedWhole()) if copy is None else (replace(client, copy=copy), Evaluate())


def make_answer(client: Client, request: Request, g: Any, sender: Sender) -> tuple[Client, bytes]:
    """Return the client's state with its answer, and the message that sends update `g`.

    Store the state, then send the message.
    """
    message, memory = sender.send(g, client.memory, request)
    sent = LastAnswer(request.stamp, message)
    return replace(client, memory=memory, sent=sent, answered=request.stamp), message


def _find_fault_in_version(copy: Copy | None, broadcast: Broadcast) -> str:
    """Return a reason to refuse a broadcast that is older than the model copy; else an empty text."""
    if copy is None or broadcast.version[:2] >= copy.version[:2]:
        return ""
    return f"version {broadcast.version} is older than version {copy.version}, which this client holds"


def _is_outdated(client: Client, mark: Mark | None) -> bool:
    """Return whether the server's model may already hold a part of the client's residual.

    `mark` names the client's last answer that the model holds; None if the model holds none.
    """
    if mark is None or client.answered == NEVER:  # a client without answers has nothing in any model
        return False
    if client.sent is not None and mark.stamp == client.sent.stamp:
        # An answer of an earlier incarnation holds nothing of this residual. But an answer of a duplicate of
        # this client does.
        return mark.incarnation == client.incarnation and mark != _last_mark(client)
    generation, number = mark.stamp
    return generation >= min(client.agreed) and number > client.agreed.get(generation, 0)


def _last_mark(client: Client) -> Mark | None:
    return client.sent and make_mark(client.sent.stamp, client.incarnation, client.sent.message)


class ClientMessage(NamedTuple):
    """The parts of a client's message: payload, facts (JSON values about the round), uncompressed arrays."""

    payload: bytes
    facts: dict[str, Any]
    uncompressed: bytes


def pack_message(message: ClientMessage) -> bytes:
    """Return the bytes of a client's message.

    >>> unpack_message(pack_message(ClientMessage(b"abc", {"K": 3}, b"")), most=100, uncompressed=0).facts
    {'K': 3}
    """
    facts = json.dumps(message.facts, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(message.payload), len(facts)) + message.payload + facts + message.uncompressed


def unpack_message(data: bytes, most: int, uncompressed: int) -> ClientMessage:
    """Return the parts of a client's message; raise WireError if the bytes are no such message.

    The payload may have at most `most` bytes. The uncompressed arrays must have `uncompressed` bytes.
    """
    if len(data) < _LENGTHS.size:
        raise WireError(f"a message must have at least {_LENGTHS.size} bytes, got {len(data)}")
    payload, facts = _LENGTHS.unpack_from(data)
    if payload > most:
        raise WireError(f"the payload must have at most {most} bytes, got {payload}")
    if facts > MOST_FACTS or len(data) != _LENGTHS.size + payload + facts + uncompressed:
        raise WireError("the lengths in the message do not add up to the length of the message")
    at = _LENGTHS.size + payload
    try:
        found = json.loads(data[at : at + facts])
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise WireError("the facts in the message must be a JSON object")
    return ClientMessage(data[_LENGTHS.size : at], found, data[at + facts :])


@dataclass(frozen=True)
class Uplink:
    """The `Sender` of a real client: it compresses updates and encodes messages.

    Random draws depend on (seed, round, client), as in a simulation. A payload's norm is at most `max_norm`.
    `facts` and `uncompressed` are the other parts of a message: see `ClientMessage`.
    """

    channel: Channel
    client: int
    seed: int = 0
    max_norm: float = math.inf
    facts: Mapping[str, Any] = field(default_factory=dict)
    uncompressed: bytes = b""

    def _compress(self, g: Array, memory: Array, t: int) -> Outgoing:
        """Compress `g` with error feedback (Algorithm 1, lines 12 to 15); raise NotFinite for NaN or Inf."""
        word = signed(key(self.seed, t, self.client, Purpose.SELECT))
        return self.channel.send(g, memory, word, t, max_norm=self.max_norm)

    def send(self, g: Array, memory: Array, request: Request) -> tuple[bytes, Array]:
        """Return the message that sends update `g`, and the new memory of the feedback.

        p is the vector that is compressed (with `ef`: g + memory). The message also reports the squared norms
        of p and of the error, p minus the payload; and of the new memory if it differs from the error.
        """
        made = self._compress(g, memory, request.t)
        facts = {**self.facts, "p2": norm2(made.p), "noise2": norm2(made.left)}
        if made.memory is not made.left:
            facts["memory2"] = norm2(made.memory)
        layout, sequence = self.channel.layout, request.stamp.sequence
        payload = encode(made.payload.numpy(), layout, client=self.client, sequence=sequence, round=request.t)
        return pack_message(ClientMessage(payload, facts, self.uncompressed)), made.memory

    def can_send(self, memory: Array, t: int) -> bool:
        """Return whether the memory, with an update of 0, can be sent, if need be in several rounds."""
        try:
            self._compress(0 * memory, memory, t)
        except (TooLarge, NotFinite):
            return False
        return True

    def restore(self, memory: Array, message: bytes) -> Array:
        """Return the memory of the feedback as if this client had never sent `message`.

        With `ef`, the result is exact, apart from the rounding of sums.
        """
        uncompressed = 0  # `unpack_message` raises an error if the message is cut short
        if len(message) >= _LENGTHS.size:
            uncompressed = len(message) - _LENGTHS.size - sum(_LENGTHS.unpack_from(message))
        payload = unpack_message(message, len(message), uncompressed).payload
        return self.channel.feedback.restore(memory, decode(payload, layout=self.channel.layout))
