"""Whether a reply is taken: what it must be, and the cause by which it is counted if it is not."""

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
from cfedavg.federate.protocol import Mark, mark_of
from cfedavg.federate.server import Server, objection
from cfedavg.flower import records
from cfedavg.flower.array_layout import Form
from cfedavg.flower.client_message import MOST_FACTS, Parcel, number, unpack
from cfedavg.flower.nodes import Node, in_a_line
from cfedavg.flower.records import CAUSES, Answer, answer_of, size_of
from cfedavg.wire import WireError, decode, read_header

# Flower's own errors, of requests and replies whose time is over and of nodes that are not there.
_LATE, _LOST = ("late", "no reply by the deadline"), ("lost", "it is offline")
_FLOWERS = {3: _LATE, 4: _LATE, 5: _LOST}
_RAISED = re.compile(r"<class '(?:[^'.]*[.])*([^'.]*)'>:<[\"']")
_ENDS = "'>", '">'
# What a client says of its round, and the least and the most that it may be.
_MOST = 1e100  # above what float32 numbers can come to
_NORM = 0.0, _MOST
_BOUNDS = {
    "loss": (-_MOST, _MOST),
    "K": (0.0, 2.0**53),
    "g2": _NORM,
    "p2": _NORM,
    "noise2": _NORM,
    "memory2": _NORM,
}
MOST_NAME = 100  # characters of the name of a metric
SAMPLES = "num-examples"  # the metric by which a client reports how many it has
# How a node of version 0.5 fails at an order of now.
_OLDER = "Order.__init__() got an unexpected keyword"
_INSTALL = "the node has an older version of cfedavg than the server: install the same on both"
FAILED = "app failed"  # the cause of which only the app knows more
TOO_LARGE = CAUSES[records.TOO_LARGE]
Who = TypeVar("Who")


class Rejected(Exception):
    """A reply that is not taken: `cause` is counted, the text says more."""

    def __init__(self, cause: str, why: str = "") -> None:
        super().__init__(in_a_line(why or cause))
        self.cause = cause


@dataclass(frozen=True)
class Taken:
    """A reply that goes into the model."""

    node: Node
    mark: Mark
    payload: Payload
    whole: bytes
    facts: Mapping[str, float | None]  # those of _BOUNDS
    arrays: str  # under which the app replied with its model
    metrics: Mapping[str, MetricRecord]
    bytes: int
    norm: float  # of the payload

    @property
    def K(self) -> float | None:
        return self.facts["K"]

    @property
    def memory2(self) -> float | None:
        """|memory|^2 of the client's feedback; where it is what could not be sent, that is said once."""
        found = self.facts["memory2"]
        return self.facts["noise2"] if found is None else found

    @property
    def samples(self) -> float | None:
        """How many examples the client reports that it has."""
        return samples_in(self.metrics)

    @property
    def reply(self) -> Reply:
        """As metrics are made of; what the client did not report is NaN."""
        known = {name: math.nan if value is None else value for name, value in self.facts.items()}
        return Reply(
            self.node.number,
            max(1, int(self.K or 1)),
            known["loss"],
            known["g2"],
            known["p2"],
            known["noise2"],
            sum(self.payload.counts()),
            self.bytes,
            lost=False,
        )


@dataclass(frozen=True)
class Door:
    """Who decides: what model, which compressor, and how large a payload may be at most."""

    form: Form
    compressor: Compressor
    max_norm: float | None
    samples: bool = False  # whether replies are weighted by them
    most_whole: float = math.inf  # a number of what travels whole

    def take(
        self, reply: Message, node: Node, server: Server, asked: Collection[str], taken: Collection[str]
    ) -> Taken:
        """The reply, decoded; Rejected says why not."""
        # Values of any kind take 16 bytes at most; the codec has the same bound.
        most = 16 * self.form.layout.d + 65_536
        answer = self._answer(reply, most)
        if found := objection(server, asked, taken, node.identity, answer.stamp):
            raise Rejected(found, f"its stamp is {answer.stamp}, the round's {server.stamp}")
        try:
            parcel = self._unpack(answer.message, most)
            payload = self._payload(parcel.payload, node, answer)
            facts, metrics = facts_in(parcel.facts), metrics_in(parcel.facts)
            if self.samples and samples_in(metrics) is None:
                raise Rejected("metrics", f"weighting = 'samples' needs {SAMPLES!r}")
        except (WireError, RecursionError) as error:
            raise Rejected("malformed", str(error)) from None
        norm = self._checked(payload, parcel.whole)
        mark = mark_of(answer.stamp, answer.incarnation, answer.message)
        name = parcel.facts.get("arrays")
        name = name[:100] if isinstance(name, str) else "arrays"
        return Taken(node, mark, payload, parcel.whole, facts, name, metrics, len(answer.message), norm)

    def _unpack(self, message: bytes, most: int) -> Parcel:
        """Return the parts of a message, with running statistics as long as the model has them."""
        if not self.compressor.rounds:
            return unpack(message, most, self.form.whole_bytes)
        parcel = unpack(message, most, self.form.short_bytes)
        return parcel._replace(whole=self.form.lengthen(parcel.whole))

    def _answer(self, reply: Message, most: int) -> Answer:
        if reply.has_error():
            code, why = reply.error.code, reason(reply)
            if code not in CAUSES and _OLDER in why:
                raise Rejected(CAUSES[records.OTHER_VERSION], _INSTALL)
            raise Rejected(*_FLOWERS.get(code, (CAUSES.get(code, FAILED), why)))
        if (size := size_of(reply)) > most + MOST_FACTS + self.form.whole_bytes:
            raise Rejected("malformed", f"a message of {size:,} bytes is longer than any of this model")
        try:
            return answer_of(reply.content)
        except WireError as error:
            raise Rejected("malformed", str(error)) from None
        except ValueError as error:
            raise Rejected("not compressed", str(error)) from None

    def _payload(self, message: bytes, node: Node, answer: Answer) -> Payload:
        layout = self.form.layout
        if read_header(message).schema != layout.schema_hash:
            raise Rejected("another model", "names, shapes, dtypes or order of its arrays differ")
        most = self.compressor.selector.most(layout)
        return decode(message, layout=layout, kmax=most, client=node.number, sequence=answer.stamp.sequence)

    def _checked(self, payload: Payload, whole: bytes) -> float:
        """Its norm, once all numbers are known to be finite, and not more than they may be."""
        with np.errstate(over="ignore"):
            values = cast(values_of(payload), "float32")  # as they are added: a float64 may be too large
        if not np.isfinite(values).all() or not self.form.is_finite(whole):
            raise Rejected("not finite", "it holds NaN or Inf")
        norm = math.sqrt(norm2(values))
        if self.max_norm is not None and norm > self.max_norm:
            raise Rejected(TOO_LARGE, above(norm, self.max_norm))
        if (largest := self.form.largest(whole)) > self.most_whole:
            why = f"what travels whole holds {largest:.4g}, at most {self.most_whole:g} is taken"
            raise Rejected(TOO_LARGE, why)
        return norm


def above(norm: float, most: float) -> str:
    """Why a reply is too large."""
    return f"its norm is {norm:.4g}, max_norm is {most:.4g}"


def reason(reply: Message) -> str:
    """Of a reply that is an error, in one line."""
    return in_words(reply.error.reason or "")


def in_words(said: str) -> str:
    """What a node says of an error, cut before anything looks at it; an exception as Python would print it.

    >>> in_words("<class 'my.Error'>:<'too bad'>")
    'Error: too bad'
    """
    said = said[:1000]
    if raised := _RAISED.match(said):
        what = said[raised.end() :]
        said = f"{raised[1]}: {what[:-2] if what.endswith(_ENDS) else what}"
    return in_a_line(said)


def facts_in(said: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers that a client reports, None for those that it does not; WireError if one cannot be."""
    found = {name: number(said.get(name)) for name in _BOUNDS}
    for name, value in found.items():
        low, high = _BOUNDS[name]
        if said.get(name) is not None and (value is None or not low <= value <= high):
            raise WireError(f"{name!r} must be a number from {low:g} to {high:g}, got {said[name]!r:.40}")
    return found


def metrics_in(said: Mapping[str, Any]) -> dict[str, MetricRecord]:
    """The records of metrics in which an app reports; WireError if they are none."""
    try:
        found = {name: MetricRecord(values) for name, values in said["metrics"].items()}
    except (KeyError, TypeError, AttributeError):
        raise WireError("its metrics are not records of numbers") from None
    check_metrics(found)
    return found


def check_metrics(metrics: Mapping[str, MetricRecord]) -> None:
    """Check their number, their names, and that no strategy's arithmetic fails at one; WireError if not."""
    if sum(map(len, metrics)) + sum(map(_length, metrics.values())) > MOST_FACTS:
        raise WireError(f"its metrics have more than {MOST_FACTS:,} characters and numbers")
    for name in (each for within in (metrics, *metrics.values()) for each in within):
        if not name.isprintable() or len(name) > MOST_NAME:  # it is a column of metrics.jsonl, maybe
            raise WireError(
                f"the name of a metric must have at most {MOST_NAME} printable characters, got {name!r:.40}"
            )
    for record in metrics.values():
        for name, value in record.items():
            for each in value if isinstance(value, list) else [value]:
                if _MOST < abs(each) < math.inf:
                    raise WireError(f"the metric {name!r:.40} is {each!r:.40}: at most {_MOST:g} is taken")
        found = number(record.get(SAMPLES, 0))
        if found is None or not 0 <= found <= 2**53:
            raise WireError(f"{SAMPLES!r} must be a number from 0 to 2^53, got {record[SAMPLES]!r:.40}")


def _length(record: MetricRecord) -> int:
    """Of names in characters, of metrics in numbers."""
    return sum(len(name) + (len(value) if isinstance(value, list) else 1) for name, value in record.items())


def samples_in(records: Mapping[str, MetricRecord]) -> float | None:
    """How many examples a client has, by the first record that says so."""
    found = (number(record.get(SAMPLES)) for record in records.values())
    return next((n for n in found if n is not None), None)


def with_samples(records: Mapping[str, MetricRecord], most: float) -> dict[str, MetricRecord]:
    """Return the records with at most so many examples; a strategy may weigh by them."""
    found = dict(records)
    for name, record in records.items():
        said = record.get(SAMPLES)
        if isinstance(said, int | float) and said > most:
            found[name] = MetricRecord({**record, SAMPLES: int(most) if isinstance(said, int) else most})
    return found


def kind_of(metrics: Mapping[str, MetricRecord], arrays: str = "") -> frozenset[str]:
    """What a reply holds: the names of its records, and of what is in them, with the lengths of lists."""
    found = {f"the ArrayRecord {arrays!r}"} if arrays else set()
    for name, record in metrics.items():
        where = "" if name == "metrics" else f" in {name!r}"
        found |= {f"the MetricRecord {name!r}"} | {_sort(key, value) + where for key, value in record.items()}
    return frozenset(found)


def _sort(key: str, value: int | float | list[int] | list[float]) -> str:
    """Of a metric, in words; if it is not finite for one client, the mean of all is not."""
    values = value if isinstance(value, list) else [value]
    sort = f"the list {key!r} of {len(values)}" if isinstance(value, list) else f"the number {key!r}"
    return sort if all(map(math.isfinite, values)) else f"{sort} (not finite)"


def unlike_most(kinds: Mapping[Who, frozenset[str]], turn: int) -> dict[Who, str]:
    """Those who are not like most, and why: a strategy cannot average what differs.

    Kinds that are equally common take turns, so that none loses for ever.
    """
    counted = Counter(kinds.values())
    most = max(counted.values(), default=0)
    common = sorted((kind for kind, count in counted.items() if count == most), key=sorted)
    usual = common[turn % len(common)] if common else frozenset()
    return {who: _unlike(kind, usual) for who, kind in kinds.items() if kind != usual}


def _unlike(kind: frozenset[str], usual: frozenset[str]) -> str:
    """The first difference of each sort, in words."""
    less, more = sorted(usual - kind)[:1], sorted(kind - usual)[:1]
    parts = [f"lacks {less[0]}"] if less else []
    parts += [f"has {more[0]}"] if more else []
    return in_a_line(f"it {' and '.join(parts)}, unlike other nodes")
