"""What a client sends: its payload as on the wire, what travels whole, and what it says of its round."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cfedavg.channel import TooLarge
from cfedavg.core.arrays import Array, norm2
from cfedavg.core.errors import NotFinite
from cfedavg.federate.protocol import Request
from cfedavg.federate.uplink import Uplink
from cfedavg.wire import WireError

_LENGTHS = struct.Struct("<II")  # of the payload, of the facts; what travels whole is the rest
MOST_FACTS = 65_536
MOST_METRICS = MOST_FACTS - 1024  # of the facts that an app may fill


class Parcel(NamedTuple):
    """The parts of a message."""

    payload: bytes
    facts: dict[str, Any]
    whole: bytes


def pack(parcel: Parcel) -> bytes:
    """One row of bytes.

    >>> unpack(pack(Parcel(b"abc", {"K": 3}, b"")), most=100, whole=0).facts
    {'K': 3}
    """
    facts = json.dumps(parcel.facts, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(parcel.payload), len(facts)) + parcel.payload + facts + parcel.whole


def unpack(message: bytes, most: int, whole: int) -> Parcel:
    """The parts; `most` bytes of payload are accepted, and as many whole ones as the model has."""
    if len(message) < _LENGTHS.size:
        raise WireError(f"a message of {len(message)} bytes is cut short")
    payload, facts = _LENGTHS.unpack_from(message)
    if payload > most:
        raise WireError(f"the payload has {payload} bytes, more than the {most} that are accepted")
    if facts > MOST_FACTS or len(message) != _LENGTHS.size + payload + facts + whole:
        raise WireError("the parts of the message do not add up to its length")
    at = _LENGTHS.size + payload
    try:
        said = json.loads(message[at : at + facts])
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise WireError("what the client says of its round is not a JSON object")
    return Parcel(message[_LENGTHS.size : at], said, message[at + facts :])


@dataclass(frozen=True)
class Packing:
    """The sender that the protocol asks for: a client's uplink, with the rest of the parcel around it."""

    uplink: Uplink
    max_norm: float = math.inf
    facts: dict[str, Any] = field(default_factory=dict)
    whole: bytes = b""

    def send(self, g: Array, memory: Array, request: Request) -> tuple[bytes, Array]:
        """The whole message; it also says how large p and what is left of it are."""
        made = self.uplink.outgoing(g, memory, request, max_norm=self.max_norm)
        facts = {**self.facts, "p2": norm2(made.p), "noise2": norm2(made.left)}
        if made.memory is not made.left:
            facts["memory2"] = norm2(made.memory)
        parcel = Parcel(self.uplink.message(made.payload, request), facts, self.whole)
        return pack(parcel), made.memory

    def fits(self, memory: Array, request: Request) -> bool:
        """Whether what is remembered can be sent, if only bit by bit."""
        try:
            self.uplink.outgoing(0 * memory, memory, request, max_norm=self.max_norm)
        except (TooLarge, NotFinite):
            return False
        return True

    def restore(self, memory: Array, message: bytes) -> Array:
        """The memory after the message got lost."""
        return self.uplink.restore(memory, unpack(message, len(message), self._whole(message)).payload)

    @staticmethod
    def _whole(message: bytes) -> int:
        """Of one's own message, as it was stored."""
        if len(message) < _LENGTHS.size:
            return 0  # `unpack` says what is wrong
        payload, facts = _LENGTHS.unpack_from(message)
        return len(message) - _LENGTHS.size - int(payload) - int(facts)


def number(value: Any) -> float | None:
    """A finite number that a client reported, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**1000 and math.isfinite(value) else None
