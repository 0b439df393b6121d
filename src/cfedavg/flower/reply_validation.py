"""The validation of replies: the rules for a valid reply, and the cause of a rejection."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from flwr.app import Message, MetricRecord

from cfedavg.compress import Compressor, values_of
from cfedavg.core.arrays import cast, norm2
from cfedavg.core.payload import Payload
from cfedavg.core.run_files import Reply
from cfedavg.federate.client import MOST_FACTS, unpack_message
from cfedavg.federate.protocol import Mark, make_mark
from cfedavg.federate.server import Server, object_to_reply
from cfedavg.flower import messages
from cfedavg.flower.array_layout import Form
from cfedavg.flower.federation_state import Node
from cfedavg.flower.messages import CAUSES, ReplyRecord, in_a_line, measure_reply, read_number, read_reply
from cfedavg.wire import WireError, decode, read_header

# Flower's own error codes: an expired request (3), an expired reply (4), an unavailable node (5).
_LATE, _LOST = ("late", "no reply by the deadline"), ("lost", "it is offline")
_FLOWERS = {3: _LATE, 4: _LATE, 5: _LOST}
_RAISED = re.compile(r"<class '(?:[^'.]*[.])*([^'.]*)'>:<[\"']")
_MOST = 1e100  # above any loss or squared norm of float32 numbers
# The numbers that a client reports of its round, and the smallest and largest value of each.
_BOUNDS = {"loss": (-_MOST, _MOST), "K": (0.0, 2.0**53)}
_BOUNDS |= dict.fromkeys(("g2", "p2", "noise2", "memory2"), (0.0, _MOST))
MOST_NAME = 100  # the most characters of a metric's name
SAMPLES = "num-examples"  # the metric by which a client reports how many examples it has
# The error of a node with cfedavg 0.5 that reads a present order.
_OLDER = "Order.__init__() got an unexpected keyword"
_INSTALL = "the node has an older version of cfedavg than the server: install the same on both"
FAILED = "app failed"  # the cause of an exception in the client app
TOO_LARGE = CAUSES[messages.TOO_LARGE]
Who = TypeVar("Who")


class Rejected(Exception):
    """The error for a rejected reply: rounds count rejections by `cause`, and the text explains this one."""

    def __init__(self, cause: str, why: str = "") -> None:
        super().__init__(in_a_line(why or cause))
        self.cause = cause


@dataclass(frozen=True)
class TakenReply:
    """A valid, decoded reply, whose update goes into the model."""

    node: Node
    mark: Mark
    payload: Payload
    whole: bytes
    facts: Mapping[str, float | None]  # by the names in _BOUNDS
    arrays: str  # the name of the record in which the app replied with its model
    metrics: Mapping[str, MetricRecord]
    bytes: int
    norm: float  # of the payload

    @property
    def K(self) -> float | None:
        return self.facts["K"]

    @property
    def memory2(self) -> float | None:
        """|memory|^2 of the client's feedback; if not reported, it equals `noise2`, which is |p - C(p)|^2."""
        found = self.facts["memory2"]
        return self.facts["noise2"] if found is None else found

    @property
    def samples(self) -> float | None:
        """The number of examples that the client reports, or None."""
        return read_samples(self.metrics)

    @property
    def reply(self) -> Reply:
        """The reply in the form for a round's metrics; a number that the client did not report is NaN."""
        known = {name: math.nan if value is None else value for name, value in self.facts.items()}
        K, sent = max(1, int(self.K or 1)), sum(self.payload.counts())
        loss, g2, p2, noise2 = (known[name] for name in ("loss", "g2", "p2", "noise2"))
        return Reply(self.node.number, K, loss, g2, p2, noise2, sent, self.bytes, lost=False)


@dataclass(frozen=True)
class ReplyValidator:
    """The rules for replies: the model's form, the compressor, and the largest norm of a payload."""

    form: Form
    compressor: Compressor
    max_norm: float | None
    samples: bool = False  # whether replies are weighted by examples
    most_whole: float = math.inf  # the largest value of the uncompressed arrays

    def take(
        self, reply: Message, node: Node, server: Server, asked: Collection[str], taken: Collection[str]
    ) -> TakenReply:
        """Return the decoded reply; raise Rejected if the reply is not valid."""
        # A value takes at most 16 bytes, whatever its encoding; the codec has the same bound.
        most = 16 * self.form.layout.d + 65_536
        record = self._read(reply, most)
        if found := object_to_reply(server, asked, taken, node.identity, record.stamp):
            raise Rejected(found, f"its stamp is {record.stamp}, the round's {server.stamp}")
        form, rounds = self.form, self.compressor.rounds_values
        try:
            message = unpack_message(record.message, most, form.short_bytes if rounds else form.whole_bytes)
            payload = self._decode(message.payload, node, record)
            facts, metrics = read_facts(message.facts), read_metrics(message.facts)
            if self.samples and read_samples(metrics) is None:
                raise Rejected("metrics", f"weighting = 'samples' needs {SAMPLES!r}")
        except (WireError, RecursionError) as error:
            raise Rejected("malformed", str(error)) from None
        whole = form.lengthen(message.whole) if rounds else message.whole
        norm = self._check_numbers(payload, whole)
        mark = make_mark(record.stamp, record.incarnation, record.message)
        name = message.facts.get("arrays")
        name = name[:100] if isinstance(name, str) else "arrays"
        return TakenReply(node, mark, payload, whole, facts, name, metrics, len(record.message), norm)

    def _read(self, reply: Message, most: int) -> ReplyRecord:
        if reply.has_error():
            code, why = reply.error.code, read_reason(reply)
            if code not in CAUSES and _OLDER in why:
                raise Rejected(CAUSES[messages.OTHER_VERSION], _INSTALL)
            raise Rejected(*_FLOWERS.get(code, (CAUSES.get(code, FAILED), why)))
        if (size := measure_reply(reply)) > most + MOST_FACTS + self.form.whole_bytes:
            raise Rejected("malformed", f"a message of {size:,} bytes is longer than any of this model")
        try:
            return read_reply(reply.content)
        except WireError as error:
            raise Rejected("malformed", str(error)) from None
        except ValueError as error:
            raise Rejected("not compressed", str(error)) from None

    def _decode(self, payload: bytes, node: Node, record: ReplyRecord) -> Payload:
        layout = self.form.layout
        if read_header(payload).schema != layout.schema_hash:
            raise Rejected("another model", "names, shapes, dtypes or order of its arrays differ")
        most = self.compressor.selector.most(layout)
        return decode(payload, layout=layout, kmax=most, client=node.number, sequence=record.stamp.sequence)

    def _check_numbers(self, payload: Payload, whole: bytes) -> float:
        """Return the payload's norm; raise Rejected if `payload` or `whole` is too large or not finite."""
        with np.errstate(over="ignore"):
            values = cast(values_of(payload), "float32")  # as the server adds them: a float64 may overflow
        if not np.isfinite(values).all() or not self.form.is_finite(whole):
            raise Rejected("not finite", "it holds NaN or Inf")
        norm = math.sqrt(norm2(values))
        if self.max_norm is not None and norm > self.max_norm:
            raise Rejected(TOO_LARGE, explain_norm(norm, self.max_norm))
        if (largest := self.form.largest(whole)) > self.most_whole:
            why = f"what travels whole holds {largest:.4g}, at most {self.most_whole:g} is taken"
            raise Rejected(TOO_LARGE, why)
        return norm


def explain_norm(norm: float, most: float) -> str:
    """Return the reason for rejecting a payload whose `norm` exceeds `most`."""
    return f"its norm is {norm:.4g}, max_norm is {most:.4g}"


def read_reason(reply: Message) -> str:
    """Return the reason of an error reply, as one printable line."""
    return shorten_reason(reply.error.reason or "")


def shorten_reason(said: str) -> str:
    """Return a node's error text as one short line, with an exception written as Python prints it.

    >>> shorten_reason("<class 'my.Error'>:<'too bad'>")
    'Error: too bad'
    """
    said = said[:1000]
    if raised := _RAISED.match(said):
        what = said[raised.end() :]
        what = what[:-2] if what.endswith(("'>", '">')) else what
        said = f"{raised[1]}: {what}"
    return in_a_line(said)


def read_facts(said: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers that a client reports, None for a missing one; raise WireError for a wrong one."""
    found = {name: read_number(said.get(name)) for name in _BOUNDS}
    for name, value in found.items():
        low, high = _BOUNDS[name]
        if said.get(name) is not None and (value is None or not low <= value <= high):
            raise WireError(f"{name!r} must be a number from {low:g} to {high:g}, got {said[name]!r:.40}")
    return found


def read_metrics(said: Mapping[str, Any]) -> dict[str, MetricRecord]:
    """Return the MetricRecords that an app reports; raise WireError if a record is not valid."""
    try:
        found = {name: MetricRecord(values) for name, values in said["metrics"].items()}
    except (KeyError, TypeError, AttributeError):
        raise WireError("its metrics are not records of numbers") from None
    check_metrics(found)
    return found


def check_metrics(metrics: Mapping[str, MetricRecord]) -> None:
    """Raise WireError if the metrics are too many, too large to average, or have bad names."""
    size, names = 0, list(metrics)
    for record in metrics.values():
        size += sum(len(value) if isinstance(value, list) else 1 for value in record.values())
        names += record
    if size + sum(map(len, names)) > MOST_FACTS:
        raise WireError(f"its metrics have more than {MOST_FACTS:,} characters and numbers")
    for name in names:
        if not name.isprintable() or len(name) > MOST_NAME:  # a name may become a column of metrics.jsonl
            raise WireError(
                f"the name of a metric must have at most {MOST_NAME} printable characters, got {name!r:.40}"
            )
    for record in metrics.values():
        for name, value in record.items():
            for each in value if isinstance(value, list) else [value]:
                if _MOST < abs(each) < math.inf:
                    raise WireError(f"the metric {name!r:.40} is {each!r:.40}: at most {_MOST:g} is taken")
        found = read_number(record.get(SAMPLES, 0))
        if found is None or not 0 <= found <= 2**53:
            raise WireError(f"{SAMPLES!r} must be a number from 0 to 2^53, got {record[SAMPLES]!r:.40}")


def read_samples(records: Mapping[str, MetricRecord]) -> float | None:
    """Return the number of examples in the first record that reports one, or None."""
    found = (read_number(record.get(SAMPLES)) for record in records.values())
    return next((n for n in found if n is not None), None)


def cap_samples(records: Mapping[str, MetricRecord], most: float) -> dict[str, MetricRecord]:
    """Return the records with each number of examples capped at `most`; a strategy may weight by it."""
    found = dict(records)
    for name, record in records.items():
        said = record.get(SAMPLES)
        if isinstance(said, int | float) and said > most:
            found[name] = MetricRecord({**record, SAMPLES: int(most) if isinstance(said, int) else most})
    return found


def describe_kind(metrics: Mapping[str, MetricRecord], arrays: str = "") -> frozenset[str]:
    """Return the kind of a reply: the names of its records and metrics, with the lengths of lists.

    A metric that is not finite changes the kind, since the mean of all replies would not be finite.
    """
    found = {f"the ArrayRecord {arrays!r}"} if arrays else set()
    for name, record in metrics.items():
        where = "" if name == "metrics" else f" in {name!r}"
        found.add(f"the MetricRecord {name!r}")
        for key, value in record.items():
            values = value if isinstance(value, list) else [value]
            kind = f"the list {key!r} of {len(values)}" if isinstance(value, list) else f"the number {key!r}"
            found.add(kind + ("" if all(map(math.isfinite, values)) else " (not finite)") + where)
    return frozenset(found)


def find_odd_ones(kinds: Mapping[Who, frozenset[str]], turn: int) -> dict[Who, str]:
    """Return the nodes whose kind of reply differs from the most common kind, and how each differs.

    A strategy cannot average replies of different kinds. Among equally common kinds, `turn` selects one.
    """
    counted = Counter(kinds.values())
    most = max(counted.values(), default=0)
    common = sorted((kind for kind, count in counted.items() if count == most), key=sorted)
    usual = common[turn % len(common)] if common else frozenset()
    found = {}
    for who, kind in kinds.items():
        if kind != usual:
            parts = [f"lacks {each}" for each in sorted(usual - kind)[:1]]
            parts += [f"has {each}" for each in sorted(kind - usual)[:1]]
            found[who] = in_a_line(f"it {' and '.join(parts)}, unlike other nodes")
    return found
