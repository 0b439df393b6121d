"""A client's way to the server: updates go in, messages come out.

A message holds the payload as on the wire, the arrays that travel whole, and the facts of the client's round.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cfedavg.channel import Channel, Outgoing, TooLarge
from cfedavg.core.arrays import Array, norm2
from cfedavg.core.errors import NotFinite
from cfedavg.core.keys import Purpose, key, signed
from cfedavg.core.payload import Payload
from cfedavg.federate.protocol import Request
from cfedavg.wire import WireError, decode, encode

_LENGTHS = struct.Struct("<II")  # of the payload, of the facts; what travels whole is the rest
MOST_FACTS = 65_536  # bytes


class ClientMessage(NamedTuple):
    """The parts of a message."""

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
    """A client's channel to the server. Its draws go by (seed, round, client), as in a simulation."""

    channel: Channel
    client: int
    seed: int = 0

    def compress(self, g: Array, memory: Array, request: Request, max_norm: float = math.inf) -> Outgoing:
        """Do lines 12 to 15 of Algorithm 1; raise NotFinite if NaN or Inf would be sent."""
        word = signed(key(self.seed, request.t, self.client, Purpose.SELECT))
        return self.channel.send(g, memory, word, request.t, max_norm=max_norm)

    def encode(self, payload: Payload, request: Request) -> bytes:
        """Return the payload as on the wire."""
        layout, sequence = self.channel.layout, request.stamp.sequence
        return encode(payload.numpy(), layout, client=self.client, sequence=sequence, round=request.t)

    def send(self, g: Array, memory: Array, request: Request) -> tuple[bytes, Array]:
        """Return the payload to send as on the wire, and the memory after it."""
        made = self.compress(g, memory, request)
        return self.encode(made.payload, request), made.memory

    def restore(self, memory: Array, message: bytes) -> Array:
        """Return the memory after a payload got lost: with `ef` exact where values were not rounded."""
        return self.channel.restore(memory, decode(message, layout=self.channel.layout))


@dataclass(frozen=True)
class MessageSender:
    """The sender that the protocol asks for: an uplink, with the rest of the message around the payload."""

    uplink: Uplink
    max_norm: float = math.inf
    facts: dict[str, Any] = field(default_factory=dict)
    whole: bytes = b""

    def send(self, g: Array, memory: Array, request: Request) -> tuple[bytes, Array]:
        """Return the message and the memory after it; the facts tell the norms of p and of what is left."""
        made = self.uplink.compress(g, memory, request, self.max_norm)
        facts = {**self.facts, "p2": norm2(made.p), "noise2": norm2(made.left)}
        if made.memory is not made.left:
            facts["memory2"] = norm2(made.memory)
        message = ClientMessage(self.uplink.encode(made.payload, request), facts, self.whole)
        return pack_message(message), made.memory

    def can_send(self, memory: Array, request: Request) -> bool:
        """Whether the memory can be sent, if only in parts."""
        try:
            self.uplink.compress(0 * memory, memory, request, self.max_norm)
        except (TooLarge, NotFinite):
            return False
        return True

    def restore(self, memory: Array, message: bytes) -> Array:
        """Return the memory after one's own message, as it was stored, got lost."""
        whole = 0  # if the message is cut short, `unpack_message` says so
        if len(message) >= _LENGTHS.size:
            whole = len(message) - _LENGTHS.size - sum(_LENGTHS.unpack_from(message))
        return self.uplink.restore(memory, unpack_message(message, len(message), whole).payload)
