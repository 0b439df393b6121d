"""A reply on its way from a client to the server: its record, its error codes, and the rules to accept it."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from cfedavg.compress import Compressor, sent_values
from cfedavg.core.arrays import cast, norm2
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Reply
from cfedavg.federate.client import MOST_FACTS, unpack_message
from cfedavg.federate.protocol import Mark, Stamp, make_mark
from cfedavg.federate.server import Server, find_fault_in_reply
from cfedavg.flower.array_layout import Form
from cfedavg.flower.federation_state import Node
from cfedavg.wire import WireError, decode, read_header

OURS = "cfedavg"  # the name of our record, in both directions
MODS = "mods=[cfedavg.flower.compressed]"

# The error codes of a client that sends no update, and the cause that the metrics name for each. Flower's
# own error codes are below 10: an expired request (3), an expired reply (4), an unavailable node (5).
REFUSED, NOT_FINITE, OTHER_MODEL, BAD_STATE, BAD_METRICS, TOO_LARGE, BUSY = range(1001, 1008)
UNKNOWN_PART, FORGED, OTHER_VERSION, NEED_WHOLE = range(1008, 1012)
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
FAILED = "app failed"  # the cause of an exception in the client app
_LATE, _LOST = ("late", "no reply by the deadline"), ("lost", "it is offline")
_FLOWERS = {3: _LATE, 4: _LATE, 5: _LOST}
_RAISED = re.compile(r"<class '(?:[^'.]*[.])*([^'.]*)'>:<[\"']")
# Where the app's error begins in the long text of Flower's simulation, behind the traces of Ray.
_IN_RAY = "\nException ClientAppException occurred. Message: "
# The error of a node with cfedavg 0.5 that gets an order of this version.
_OLDER = "Order.__init__() got an unexpected keyword"
_INSTALL = "the node has an older version of cfedavg than the server: install the same version on both"

_MOST = 1e100  # above any loss or squared norm of float32 numbers
# The numbers that a client reports about its round, and the smallest and largest value of each.
_BOUNDS = {"loss": (-_MOST, _MOST), "K": (0.0, 2.0**53), "divisor": (0.0, 2.0**53)}
_BOUNDS |= dict.fromkeys(("g2", "p2", "noise2", "memory2"), (0.0, _MOST))
SAMPLES = "num-examples"  # the metric by which a client reports how many examples it has
MOST_NAME = 100  # the most characters of a metric's name
MOST_TEXT = 300  # the most characters that are kept of a node's text


class Rejected(Exception):
    """The error for a rejected reply. `cause` is the category in the metrics; the text is the reason."""

    def __init__(self, cause: str, why: str = "") -> None:
        super().__init__(in_a_line(why or cause))
        self.cause = cause


class ReplyRecord(NamedTuple):
    """What a client's reply holds.

    `stamp`: the name of the request that the client answers. `incarnation`: a random number, which a client
    draws when it starts without a stored state. `message`: the compressed update as bytes.
    """

    stamp: Stamp
    incarnation: int
    message: bytes

    @property
    def check(self) -> int:
        """The checksum of all fields: a damaged `incarnation` would make the client send its update twice."""
        return zlib.crc32(self.message, zlib.crc32(f"{[*self.stamp, self.incarnation]}".encode()))


def pack_reply(reply: ReplyRecord, request: Message) -> Message:
    """Return the Flower message that carries `reply` to the server, which sent `request`."""
    record = ConfigRecord({**reply._asdict(), "stamp": list(reply.stamp), "check": reply.check})
    return Message(RecordDict({OURS: record}), reply_to=request)


def read_reply(content: RecordDict) -> ReplyRecord:
    """Return cfedavg's record in a reply; raise ValueError if there is none, WireError if it is damaged."""
    record: Mapping[str, Any] = content.config_records.get(OURS, {})
    match record.get("stamp"), record.get("incarnation"), record.get("message"):
        case [int(generation), int(number)], int(incarnation), bytes(message) if (
            0 <= incarnation < 2**63 and 0 <= min(generation, number) <= max(generation, number) < 2**32
        ):
            found = ReplyRecord(Stamp(generation, number), incarnation, message)
            if record.get("check") != found.check:
                raise WireError("the checksum does not fit: the reply was damaged on its way")
            return found
    raise ValueError(f"the reply must hold a valid record {OURS!r}")


def measure_reply(reply: Message) -> int:
    """Return how many bytes the client's message in `reply` has, valid or not; 0 if there is no message."""
    record: Mapping[str, Any] = {} if reply.has_error() else reply.content.config_records.get(OURS, {})
    message = record.get("message")
    return len(message) if isinstance(message, bytes) else 0


@dataclass(frozen=True)
class TakenReply:
    """A decoded reply that the server has accepted, to be aggregated at the end of the round."""

    node: Node
    mark: Mark
    payload: Payload
    uncompressed: bytes  # of the arrays that the client sent uncompressed
    facts: Mapping[str, float | None]  # by the names in _BOUNDS
    arrays: str  # the name of the record in which the app replied with its model
    metrics: Mapping[str, MetricRecord]
    bytes: int
    norm: float  # of the payload

    @property
    def K(self) -> float | None:
        return self.facts["K"]

    @property
    def divisor(self) -> float | None:
        """The number by which the client divided its update, if `update` is not "sum"."""
        return self.facts["divisor"] or self.K

    @property
    def memory2(self) -> float | None:
        """The squared norm of the client's feedback memory, or None if unknown.

        If the client does not report it, the memory is the compression error, and this is `noise2`.
        """
        found = self.facts["memory2"]
        return self.facts["noise2"] if found is None else found

    @property
    def samples(self) -> float | None:
        """The number of examples that the client reports, or None if it reports none."""
        return read_samples(self.metrics)

    @property
    def reply(self) -> Reply:
        """What the round's metrics need of this reply; a number that the client did not report is NaN."""
        known = {name: math.nan if value is None else value for name, value in self.facts.items()}
        K, sent = max(1, int(self.K or 1)), sum(self.payload.counts())
        loss, g2, p2, noise2 = (known[name] for name in ("loss", "g2", "p2", "noise2"))
        return Reply(self.node.number, K, loss, g2, p2, noise2, sent, self.bytes, lost=False)


@dataclass(frozen=True)
class ReplyValidator:
    """The rules by which a round accepts or rejects replies."""

    form: Form
    compressor: Compressor
    max_norm: float  # of a payload
    most_uncompressed: float = math.inf  # the largest value of the uncompressed arrays
    by_samples: bool = False  # whether replies are weighted by examples

    def take(
        self, reply: Message, node: Node, server: Server, asked: Collection[str], taken: Collection[str]
    ) -> TakenReply:
        """Return the decoded reply of `node`; raise Rejected if the reply is not valid.

        `asked`: the identities of the nodes asked. `taken`: those whose replies are already accepted.
        """
        # A value takes at most 16 bytes, whatever its encoding; the codec has the same bound.
        most = 16 * self.form.layout.d + 65_536
        record = self._read(reply, most)
        if found := find_fault_in_reply(server, asked, taken, node.identity, record.stamp):
            raise Rejected(
                found, f"the reply is to request {record.stamp}, this round's request is {server.stamp}"
            )
        form, short = self.form, self.compressor.rounds_values
        try:
            message = unpack_message(record.message, most, form.count_bytes(short=short))
            payload = self._decode(message.payload, node, record)
            facts, metrics = read_facts(message.facts), read_metrics(message.facts)
            if self.by_samples and read_samples(metrics) is None:
                raise Rejected("metrics", f"weighting = 'samples' needs the metric {SAMPLES!r}")
        except (WireError, RecursionError) as error:
            raise Rejected("malformed", str(error)) from None
        uncompressed = form.unpack(message.uncompressed, short=short)
        norm = self._check_numbers(payload, uncompressed)
        mark = make_mark(record.stamp, record.incarnation, record.message)
        name = message.facts.get("arrays")
        name = name[:100] if isinstance(name, str) else "arrays"
        return TakenReply(node, mark, payload, uncompressed, facts, name, metrics, len(record.message), norm)

    def _read(self, reply: Message, most: int) -> ReplyRecord:
        if reply.has_error():
            code, why = reply.error.code, shorten_reason(reply.error.reason)
            if code not in CAUSES and _OLDER in why:
                raise Rejected(CAUSES[OTHER_VERSION], _INSTALL)
            raise Rejected(*_FLOWERS.get(code, (CAUSES.get(code, FAILED), why)))
        if (size := measure_reply(reply)) > most + MOST_FACTS + self.form.count_bytes():
            raise Rejected("malformed", f"the message has {size:,} bytes, more than an update of this model")
        try:
            return read_reply(reply.content)
        except WireError as error:
            raise Rejected("malformed", str(error)) from None
        except ValueError:
            raise Rejected(
                "not compressed", f"the reply is not compressed: add {MODS} to the ClientApp of this node"
            ) from None

    def _decode(self, payload: bytes, node: Node, record: ReplyRecord) -> Payload:
        layout = self.form.layout
        if read_header(payload).schema != layout.schema_hash:
            raise Rejected("another model", "names, shapes, dtypes or order of arrays are not the model's")
        most = self.compressor.selector.most(layout)
        return decode(payload, layout=layout, kmax=most, client=node.number, sequence=record.stamp.sequence)

    def _check_numbers(self, payload: Payload, uncompressed: bytes) -> float:
        """Return the payload's norm; raise Rejected if a number is too large or not finite."""
        with np.errstate(over="ignore"):
            values = cast(sent_values(payload), "float32")  # as the server adds them: a float64 may overflow
        if not np.isfinite(values).all() or not self.form.is_finite(uncompressed):
            raise Rejected("not finite", "the update holds NaN or Inf")
        if (norm := math.sqrt(norm2(values))) > self.max_norm:
            raise Rejected(CAUSES[TOO_LARGE], explain_norm(norm, self.max_norm))
        if (largest := self.form.largest(uncompressed)) > self.most_uncompressed:
            most = f"at most {self.most_uncompressed:g} is allowed"
            raise Rejected(CAUSES[TOO_LARGE], f"an uncompressed array holds {largest:.4g}, {most}")
        return norm


def explain_norm(norm: float, most: float) -> str:
    """Return the reason for rejecting a payload whose `norm` exceeds `most`."""
    return f"the payload's norm is {norm:.4g}, max_norm is {most:.4g}"


def in_a_line(text: str) -> str:
    """Return a node's `text` as one printable line of at most `MOST_TEXT` characters."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])


def shorten_reason(reason: str | None) -> str:
    """Return a node's error text as one short line; write an exception as Python prints it.

    >>> shorten_reason("<class 'my.Error'>:<'too bad'>")
    'Error: too bad'
    >>> shorten_reason("<class 'RayTaskError'>:<'a long trace" + _IN_RAY + "too bad'>")
    'too bad'
    """
    _, in_ray, raised = (reason or "").rpartition(_IN_RAY)
    if in_ray:
        return in_a_line(raised.removesuffix("'>"))
    reason = (reason or "")[:1000]
    if found := _RAISED.match(reason):
        what = reason[found.end() :]
        what = what[:-2] if what.endswith(("'>", '">')) else what
        reason = f"{found[1]}: {what}"
    return in_a_line(reason)


def read_number(value: Any) -> float | None:
    """Return a client's `value` as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 2**1000 and math.isfinite(value) else None


def read_facts(reported: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers that a client reports about its round; None for each missing number.

    Raise WireError if a number is out of its range.
    """
    found = {name: read_number(reported.get(name)) for name in _BOUNDS}
    for name, (low, high) in _BOUNDS.items():
        said, value = reported.get(name), found[name]
        if said is not None and (value is None or not low <= value <= high):
            raise WireError(f"the reported {name!r} must be from {low:g} to {high:g}, got {said!r:.40}")
    return found


def read_metrics(reported: Mapping[str, Any]) -> dict[str, MetricRecord]:
    """Return the MetricRecords that an app reports; raise WireError if a record is not valid."""
    try:
        found = {name: MetricRecord(values) for name, values in reported["metrics"].items()}
    except (KeyError, TypeError, AttributeError):
        raise WireError("the reply's metrics must be records of numbers") from None
    check_metrics(found)
    return found


def check_metrics(metrics: Mapping[str, MetricRecord]) -> None:
    """Raise WireError if the metrics are too many, too large to average, or have bad names."""
    items = [(name, as_list(value)) for record in metrics.values() for name, value in record.items()]
    names = [*metrics, *(name for name, _ in items)]
    if sum(map(len, names)) + sum(len(values) for _, values in items) > MOST_FACTS:
        raise WireError(f"the reply's metrics must have at most {MOST_FACTS:,} characters and numbers")
    for name in names:
        if not name.isprintable() or len(name) > MOST_NAME:  # a name may become a column of metrics.jsonl
            raise WireError(
                f"the name of a metric must have at most {MOST_NAME} printable characters, got {name!r:.40}"
            )
    for name, values in items:
        for each in values:
            if _MOST < abs(each) < math.inf:
                raise WireError(f"the metric {name!r:.40} is {each!r:.40}: at most {_MOST:g} is allowed")
    for record in metrics.values():
        found = read_number(record.get(SAMPLES, 0))
        if found is None or not 0 <= found <= 2**53:
            raise WireError(f"the metric {SAMPLES!r} must be from 0 to 2^53, got {record[SAMPLES]!r:.40}")


def as_list(value: Any) -> list[Any]:
    """Return a metric's value as a list: a single number becomes a list with one number."""
    return value if isinstance(value, list) else [value]


def read_samples(metrics: Mapping[str, MetricRecord]) -> float | None:
    """Return the number of examples in the first record that reports it, or None if no record does."""
    found = (read_number(record.get(SAMPLES)) for record in metrics.values())
    return next((n for n in found if n is not None), None)
