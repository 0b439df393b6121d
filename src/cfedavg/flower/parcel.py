"""What a client sends: its payload as on the wire, what travels whole, and what it says of its round."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cfedavg.errors import NotFinite
from cfedavg.federation.codec import Wire
from cfedavg.federation.protocol import Request
from cfedavg.tensors import norm2
from cfedavg.wire import WireError

_LENGTHS = struct.Struct("<II")  # of the payload, of the facts; what travels whole is the rest
MOST_FACTS = 65_536
MOST_METRICS = MOST_FACTS - 1024  # of the facts that an app may fill


SPIKE = 1024  # times the bound: from what is larger, float32 could not subtract what is sent


class TooLarge(ArithmeticError):
    """So much more than may be sent that it would go on for ever."""


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
    """The codec that the protocol asks for: a client's wire, with the rest of the parcel around it."""

    wire: Wire
    feedback: bool = True
    max_norm: float = math.inf
    facts: dict[str, Any] = field(default_factory=dict)
    whole: bytes = b""

    def shrink(self, p: Tensor, request: Request) -> tuple[bytes, Tensor]:
        """The whole message; it also says how large p and what is left of it are."""
        payload, e = self._bounded(p, request)
        facts = {**self.facts, "p2": norm2(p), "noise2": norm2(e)}
        return pack(Parcel(payload, facts, self.whole)), e if self.feedback else torch.zeros_like(e)

    def _bounded(self, p: Tensor, request: Request) -> tuple[bytes, Tensor]:
        """Not more than may be sent: after a spike, the rest waits in the residual and goes bit by bit."""
        payload, e = self.wire.shrink(p, request)
        if math.sqrt(norm2(p - e)) > SPIKE * self.max_norm:
            raise TooLarge(
                f"it would send {math.sqrt(norm2(p - e)):.3g}, and max_norm is {self.max_norm:.4g}"
            )
        share = 1.0
        while (sent := math.sqrt(norm2(p - e))) > self.max_norm:
            share *= 0.99 * self.max_norm / sent
            payload, left = self.wire.shrink(share * p, request)
            e = left + (p - share * p)
        return payload, e

    def fits(self, e: Tensor, request: Request) -> bool:
        """Whether a residual can be sent, if only bit by bit."""
        try:
            self._bounded(e, request)
        except (TooLarge, NotFinite):
            return False
        return True

    def restored(self, e: Tensor, message: bytes) -> Tensor:
        if not self.feedback:
            return e
        return self.wire.restored(e, unpack(message, len(message), self._whole(message)).payload)

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
