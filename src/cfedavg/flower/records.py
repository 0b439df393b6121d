"""What travels through Flower, as its records: the order to a client and the client's answer.

A model goes out as one array of numbers and one of bytes, since every array of a message costs requests of
its own, whose signed headers are longer than what a client sends back.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from logging import WARNING
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.common.logger import log
from numpy.typing import NDArray

from cfedavg.errors import InputError
from cfedavg.federation.protocol import Mark, Request, Stamp
from cfedavg.flower.form import Form
from cfedavg.wire import WireError

OURS = "cfedavg"  # the name of our record, in both directions
MODS = "mods=[cfedavg.flower.compressed]"

# Why a client does not answer. Flower's own codes are below 10.
REFUSED, NOT_FINITE, OTHER_MODEL, BAD_STATE, BAD_METRICS, TOO_LARGE, BUSY = range(1001, 1008)
UNKNOWN_PART, FORGED, OTHER_VERSION = 1008, 1009, 1010
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
}


@dataclass(frozen=True)
class Order:
    """What a client is told besides the model and the user's own configuration."""

    federation: str
    client: str  # whom the node has proved to be
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

    @property
    def size(self) -> int:
        """In bytes: of texts their length, of numbers 8 each."""
        texts = [each if isinstance(each, str | list) else [each] for each in asdict(self).values()]
        return sum(len(each) if isinstance(each, str) else 8 * len(each) for each in texts)

    @property
    def request(self) -> Request:
        """As the protocol has it."""
        mark = Mark(Stamp(*self.mark[:2]), *self.mark[2:]) if self.mark else None
        return Request(Stamp(self.generation, self.stamp), self.t, mark)


def flat(mark: Mark | None) -> list[int]:
    """A mark as a row of whole numbers."""
    return [*mark.stamp, mark.incarnation, mark.digest] if mark else []


def packed(x: NDArray[np.float32], whole: bytes) -> ArrayRecord:
    """The model as it travels."""
    arrays = {"x": Array(x)}
    if whole:
        arrays["whole"] = Array(np.frombuffer(whole, np.uint8))
    return ArrayRecord(arrays)


def ordered(content: RecordDict, model: ArrayRecord, order: Order) -> RecordDict:
    """What goes to a client: all that the user's strategy wanted to send, with the model packed."""
    made = RecordDict({name: model if name == order.arrays else record for name, record in content.items()})
    made[OURS] = ConfigRecord(asdict(order))
    return made


def order_of(message: Message) -> Order | None:
    """The order in a message; None if it is not from our strategy, InputError if of another version."""
    record = message.content.config_records.get(OURS)
    if not record:
        return None
    if record.keys() != {item.name for item in fields(Order)}:
        raise InputError("the server has another version of cfedavg than this node: install the same on both")
    return Order(**dict(record))  # type: ignore[arg-type]


def opened(content: RecordDict, order: Order, form: Form) -> tuple[NDArray[np.float32], bytes]:
    """Puts the model's own arrays where the packed ones were, as the client app knows them."""
    record = content.array_records[order.arrays]
    x = record["x"].numpy()
    whole = record["whole"].numpy().tobytes() if "whole" in record else b""
    arrays = {name: Array(np.array(array)) for name, array in form.join(x, whole).items()}
    content[order.arrays] = ArrayRecord(arrays)
    del content[OURS]
    return x, whole


class Answer(NamedTuple):
    """A client's reply."""

    stamp: Stamp
    incarnation: int
    message: bytes

    @property
    def check(self) -> int:
        """Of all three: with another incarnation, the client would take back what is in the model."""
        return zlib.crc32(self.message, zlib.crc32(f"{[*self.stamp, self.incarnation]}".encode()))


def answered(answer: Answer, request: Message) -> Message:
    """The reply that carries an answer."""
    record = ConfigRecord(
        {
            "stamp": list(answer.stamp),
            "incarnation": answer.incarnation,
            "message": answer.message,
            "check": answer.check,
        }
    )
    return Message(RecordDict({OURS: record}), reply_to=request)


def answer_of(content: RecordDict) -> Answer:
    """The answer in a reply; ValueError if there is none, WireError if it is damaged."""
    record: Mapping[str, Any] = content.config_records.get(OURS, {})
    match record.get("stamp"), record.get("incarnation"), record.get("message"):
        case [int(generation), int(number)], int(incarnation), bytes(message) if (
            0 <= incarnation < 2**63 and 0 <= min(generation, number) <= max(generation, number) < 2**32
        ):
            answer = Answer(Stamp(generation, number), incarnation, message)
            if record.get("check") != answer.check:
                raise WireError("the checksum does not fit: the reply was damaged on its way")
            return answer
    raise ValueError(f"the reply is not compressed: the client app needs {MODS}")


def size_of(reply: Message) -> int:
    """The bytes of the answer in a reply, whatever it is worth."""
    if reply.has_error():
        return 0
    record: Mapping[str, Any] = reply.content.config_records.get(OURS, {})
    message = record.get("message")
    return len(message) if isinstance(message, bytes) else 0


def refused(code: int, why: str, request: Message) -> Message:
    """The reply of a client that sends nothing; the node's own log says so as well."""
    log(WARNING, "nothing is sent: %s", why)
    return Message(Error(code, why), reply_to=request)
