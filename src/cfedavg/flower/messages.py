"""The messages between server and client as Flower's records: the order to a client, and the client's reply.

The body of a request is the bytes from which a client makes the model. A short body is a field of the order;
a long body is an array. Flower sends every array in requests of its own, and their signed headers alone are
longer than a client's reply. But Flower stores a long array only once for all nodes that get the same body.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from logging import WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.logger import log
from numpy.typing import NDArray

from cfedavg.core.errors import InputError
from cfedavg.federate.protocol import Broadcast, Mark, Request, Stamp, Version
from cfedavg.wire import WireError

OURS = "cfedavg"  # the name of our record, in both directions
MODS = "mods=[cfedavg.flower.compressed]"

# The error codes of a client that sends no update. Flower's own codes are below 10.
REFUSED, NOT_FINITE, OTHER_MODEL, BAD_STATE, BAD_METRICS, TOO_LARGE, BUSY = range(1001, 1008)
UNKNOWN_PART, FORGED, OTHER_VERSION, NEED_WHOLE = 1008, 1009, 1010, 1011
CAUSES = {
    REFUSED: "out of date",
    NOT_FINITE: "not finite",
    OTHER_MODEL: "another model",
    BAD_STATE: "state",
    BAD_METRICS: "metrics",
    TOO_LARGE: "too large",
    BUSY: "busy",
    UNKNOWN_PART: "unknown part",
    FORGED: "stamp",
    OTHER_VERSION: "another version",
    NEED_WHOLE: "another copy",
}
SHORT = 32_768  # the most bytes of a body that is a field of the order
MOST_TEXT = 300  # the most characters that are kept of a node's text
# A packed body: the CRC-32 of the rest, the broadcast's length, the broadcast, the uncompressed arrays.
_CHECKSUM, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")


def in_a_line(text: str) -> str:
    """Return a node's `text` as one printable line of at most `MOST_TEXT` characters."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])


def read_number(value: Any) -> float | None:
    """Return a client's `value` as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**1000 and math.isfinite(value) else None


def make_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return Flower's ArrayRecord with a copy of each array."""
    return ArrayRecord({name: Array(np.array(array)) for name, array in arrays.items()})


@dataclass(frozen=True)
class Order:
    """The server's instructions to a client, besides the model and the user's own configuration."""

    federation: str
    client: str  # the identity that the node has proved
    number: int  # of the client; it keys the random draws
    generation: int
    stamp: int
    t: int
    mark: list[int]  # of the client's last answer in the model; empty if there is none
    form: str
    arrays: str  # the name of the record with the model
    compressor: str
    feedback: str
    update: str
    seed: int
    max_norm: float  # of a payload; infinite if there is no bound
    copy: str  # the dtype of the clients' model copies; empty if broadcasts are not compressed
    body: bytes  # empty if the body is an array

    @property
    def size(self) -> int:
        """The order's length in bytes without the body: a text counts its characters, a number 8."""
        values = [getattr(self, item.name) for item in fields(self) if item.name != "body"]
        return sum(
            len(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, list) else 8
            for value in values
        )

    def request(self, broadcast: Broadcast | None = None) -> Request:
        """Return the protocol's request that this order and `broadcast` make."""
        mark = Mark(Stamp(*self.mark[:2]), *self.mark[2:]) if self.mark else None
        return Request(Stamp(self.generation, self.stamp), self.t, mark, broadcast)


class Body(NamedTuple):
    """The bytes that give a client the model: the broadcast or the vector x, and the uncompressed arrays."""

    broadcast: bytes
    whole: bytes

    def pack(self) -> bytes:
        """Return the body as bytes, with a checksum and the broadcast's length in front."""
        data = _LENGTH.pack(len(self.broadcast)) + self.broadcast + self.whole
        return _CHECKSUM.pack(zlib.crc32(data)) + data

    @classmethod
    def unpack(cls, data: bytes) -> Body:
        """Return the body in the bytes `data` of `pack`; raise InputError if `data` is damaged."""
        at, start = _CHECKSUM.size, _CHECKSUM.size + _LENGTH.size
        if len(data) < start or _CHECKSUM.unpack_from(data)[0] != zlib.crc32(memoryview(data)[at:]):
            raise InputError("the request is damaged: the checksum of its body is wrong")
        end = start + _LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            raise InputError("the request is damaged: its body is too short for what it lists")
        return cls(data[start:end], data[end:])


class Load:
    """A packed body, made once for all requests that share it: in `within` if short, else in `arrays`."""

    def __init__(self, body: Body) -> None:
        data = body.pack()
        self.size = len(data)
        self.within = data if len(data) <= SHORT else b""
        self.arrays = None if self.within else ArrayRecord({"body": Array(np.frombuffer(data, np.uint8))})


def pack_request(content: RecordDict, load: Load, order: Order) -> RecordDict:
    """Return the strategy's `content` with `load` in place of the model, and with `order` added."""
    made = RecordDict({name: record for name, record in content.items() if name != order.arrays})
    if load.arrays is not None:
        made[order.arrays] = load.arrays
    made[OURS] = ConfigRecord(asdict(order))
    return made


def read_order(message: Message) -> Order | None:
    """Return a message's order, or None if there is none; raise InputError for another version's order."""
    record = message.content.config_records.get(OURS)
    if not record:
        return None
    if record.keys() != {item.name for item in fields(Order)}:
        raise InputError("the server has another version of cfedavg than this node: install the same on both")
    return Order(**dict(record))  # type: ignore[arg-type]


def read_body(content: RecordDict, order: Order) -> Body:
    """Return the body of a request, from the order or from the array; raise InputError if it is damaged."""
    if order.body:
        return Body.unpack(order.body)
    record: Mapping[str, Array] = content.array_records.get(order.arrays, {})
    if set(record) != {"body"}:
        raise InputError("the request is damaged: it has no body")
    return Body.unpack(record["body"].numpy().tobytes())


def take_version(reply: Message) -> Version | None:
    """Remove cfedavg's record from a reply; return the model version in the record, or None."""
    if reply.has_error():
        return None
    record: Mapping[str, Any] = reply.content.config_records.get(OURS, {})
    if OURS in reply.content:
        del reply.content[OURS]
    match record.get("version"):
        case [int(generation), int(round), int(hash)]:
            return Version(generation, round, hash)
    return None


class ReplyRecord(NamedTuple):
    """The record of a client's reply: the request's stamp, the client's incarnation, the message."""

    stamp: Stamp
    incarnation: int
    message: bytes

    @property
    def check(self) -> int:
        """The checksum of all fields. A wrong incarnation would make the client send its update twice."""
        return zlib.crc32(self.message, zlib.crc32(f"{[*self.stamp, self.incarnation]}".encode()))


def pack_reply(reply: ReplyRecord, request: Message) -> Message:
    """Return the Flower message that carries `reply` to the sender of `request`."""
    record = ConfigRecord({**reply._asdict(), "stamp": list(reply.stamp), "check": reply.check})
    return Message(RecordDict({OURS: record}), reply_to=request)


def read_reply(content: RecordDict) -> ReplyRecord:
    """Return the record of a reply; raise ValueError if there is none, WireError if it is damaged."""
    record: Mapping[str, Any] = content.config_records.get(OURS, {})
    match record.get("stamp"), record.get("incarnation"), record.get("message"):
        case [int(generation), int(number)], int(incarnation), bytes(message) if (
            0 <= incarnation < 2**63 and 0 <= min(generation, number) <= max(generation, number) < 2**32
        ):
            found = ReplyRecord(Stamp(generation, number), incarnation, message)
            if record.get("check") != found.check:
                raise WireError("the checksum does not fit: the reply was damaged on its way")
            return found
    raise ValueError(f"the reply is not compressed: the client app needs {MODS}")


def measure_reply(reply: Message) -> int:
    """Return the number of bytes of the client's message in a reply, valid or not; 0 if there is none."""
    record: Mapping[str, Any] = {} if reply.has_error() else reply.content.config_records.get(OURS, {})
    message = record.get("message")
    return len(message) if isinstance(message, bytes) else 0


def refuse(code: int, why: str, request: Message) -> Message:
    """Return a client's error reply with `code` and the reason `why`; log the reason on the node."""
    log(WARNING, "nothing is sent: %s", why)
    return Message(Error(code, why), reply_to=request)
