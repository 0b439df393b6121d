"""The messages through Flower, as its records: the order to a client and the client's reply.

What leads a client to the model goes out as one row of bytes, its body: within the order while it is short,
as an array when it is long. Every array of a message costs requests of its own, whose signed headers are
longer than what a client sends back; but a long row is stored once for all nodes that need the same.
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
from cfedavg.federate.protocol import Mark, Request, Stamp
from cfedavg.federate.versions import Broadcast, Version
from cfedavg.wire import WireError

OURS = "cfedavg"  # the name of our record, in both directions
MODS = "mods=[cfedavg.flower.compressed]"

# Why a client does not answer. Flower's own codes are below 10.
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
SHORT = 32_768  # bytes of a body that travels within the order
MOST_TEXT = 300  # characters of what a node says that are of use to anyone
# Of a body: the CRC-32 of all that follows, and the length of the broadcast; what travels whole is the rest.
_CHECKSUM, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")


def in_a_line(text: str) -> str:
    """Return what a node says as one printable line that is not too long: it may say anything."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])


def read_number(value: Any) -> float | None:
    """Return a finite number that a client reported; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**1000 and math.isfinite(value) else None


def make_record(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return arrays as Flower's record, each a copy."""
    return ArrayRecord({name: Array(np.array(array)) for name, array in arrays.items()})


@dataclass(frozen=True)
class Order:
    """What a client is told besides the model and the user's own configuration."""

    federation: str
    client: str  # the identity that the node has proved
    number: int  # by which its random draws go
    generation: int
    stamp: int
    t: int
    mark: list[int]  # of its last answer that is in the model; empty if none is
    form: str
    arrays: str  # the name of the record with the model
    compressor: str
    feedback: str
    update: str
    seed: int
    max_norm: float  # of what is sent; infinite if there is no bound
    copy: str  # the dtype of the copy of the model that clients keep; empty if the model travels whole
    body: bytes  # empty if it travels as an array

    @property
    def size(self) -> int:
        """The length in bytes, without the body: of texts their length, of numbers 8 each."""
        values = [getattr(self, item.name) for item in fields(self) if item.name != "body"]
        return sum(
            len(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, list) else 8
            for value in values
        )

    def request(self, broadcast: Broadcast | None = None) -> Request:
        """Return the request of the protocol."""
        mark = Mark(Stamp(*self.mark[:2]), *self.mark[2:]) if self.mark else None
        return Request(Stamp(self.generation, self.stamp), self.t, mark, broadcast)


class Body(NamedTuple):
    """What leads a client to the model: the broadcast, or x itself, and what travels whole."""

    broadcast: bytes
    whole: bytes

    def pack(self) -> bytes:
        """Return one row of bytes."""
        data = _LENGTH.pack(len(self.broadcast)) + self.broadcast + self.whole
        return _CHECKSUM.pack(zlib.crc32(data)) + data

    @classmethod
    def unpack(cls, data: bytes) -> Body:
        """Return the parts of a row; raise InputError if it is not as it was sent."""
        at, start = _CHECKSUM.size, _CHECKSUM.size + _LENGTH.size
        if len(data) < start or _CHECKSUM.unpack_from(data)[0] != zlib.crc32(memoryview(data)[at:]):
            raise InputError("the request is damaged: the checksum of its body is wrong")
        end = start + _LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            raise InputError("the request is damaged: its body is too short for what it lists")
        return cls(data[start:end], data[end:])


class Load:
    """The body of requests, made once for all clients that get the same."""

    def __init__(self, body: Body) -> None:
        data = body.pack()
        self.size = len(data)
        self.within = data if len(data) <= SHORT else b""
        self.arrays = None if self.within else ArrayRecord({"body": Array(np.frombuffer(data, np.uint8))})


def pack_request(content: RecordDict, load: Load, order: Order) -> RecordDict:
    """Return the content for a client: all that the user's strategy sends, with a body for the model."""
    made = RecordDict({name: record for name, record in content.items() if name != order.arrays})
    if load.arrays is not None:
        made[order.arrays] = load.arrays
    made[OURS] = ConfigRecord(asdict(order))
    return made


def read_order(message: Message) -> Order | None:
    """Return the order in a message, None if our strategy sent none; InputError if of another version."""
    record = message.content.config_records.get(OURS)
    if not record:
        return None
    if record.keys() != {item.name for item in fields(Order)}:
        raise InputError("the server has another version of cfedavg than this node: install the same on both")
    return Order(**dict(record))  # type: ignore[arg-type]


def read_body(content: RecordDict, order: Order) -> Body:
    """Return the body of a request, wherever it travelled; raise InputError if it is damaged."""
    if order.body:
        return Body.unpack(order.body)
    record: Mapping[str, Array] = content.array_records.get(order.arrays, {})
    if set(record) != {"body"}:
        raise InputError("the request is damaged: it has no body")
    return Body.unpack(record["body"].numpy().tobytes())


def take_version(reply: Message) -> Version | None:
    """Take the version out of a reply, which a strategy does not expect; None if it says none."""
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
    """The record of a client's reply."""

    stamp: Stamp
    incarnation: int
    message: bytes

    @property
    def check(self) -> int:
        """The checksum of all three: with another incarnation, the client would take back what is applied."""
        return zlib.crc32(self.message, zlib.crc32(f"{[*self.stamp, self.incarnation]}".encode()))


def pack_reply(reply: ReplyRecord, request: Message) -> Message:
    """Return the reply to a request."""
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
    """Return the bytes of the message in a reply, valid or not."""
    record: Mapping[str, Any] = {} if reply.has_error() else reply.content.config_records.get(OURS, {})
    message = record.get("message")
    return len(message) if isinstance(message, bytes) else 0


def refuse(code: int, why: str, request: Message) -> Message:
    """Return the reply of a client that sends nothing; the node's own log says so as well."""
    log(WARNING, "nothing is sent: %s", why)
    return Message(Error(code, why), reply_to=request)
