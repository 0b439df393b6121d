"""Whether a reply is taken: what it must be, and the cause by which it is counted if it is not."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from flwr.app import Message, MetricRecord

from cfedavg.compress import Compressor, values_of
from cfedavg.federation.protocol import Mark, Server, mark_of, objection
from cfedavg.flower.form import Form
from cfedavg.flower.nodes import Node
from cfedavg.flower.parcel import number, unpack
from cfedavg.flower.records import CAUSES, Answer, answer_of
from cfedavg.metrics import Reply
from cfedavg.payload import Payload
from cfedavg.tensors import norm2
from cfedavg.wire import WireError, decode, read_header

# Flower's own errors, of requests and replies whose time is over and of nodes that are not there.
_LATE, _LOST = ("late", "no reply by the deadline"), ("lost", "it is offline")
_FLOWERS = {3: _LATE, 4: _LATE, 5: _LOST}
_RAISED = r"""(?s)^<class '(?:.*\.)?(\w+)'>:<["'](.*)["']>$""", r"\1: \2"
# What a client says of its round, and the least and the most that it may be.
_MOST = 1e100  # above what float32 numbers can come to
_NORM = 0.0, _MOST
_BOUNDS = {"loss": (-_MOST, _MOST), "K": (0.0, 2.0**53), "g2": _NORM, "p2": _NORM, "noise2": _NORM}
SAMPLES = "num-examples"  # the metric by which a client reports how many it has
FAILED = "app failed"  # the cause of which only the app knows more
Who = TypeVar("Who")


class Rejected(Exception):
    """A reply that is not taken: `cause` is counted, the text says more."""

    def __init__(self, cause: str, why: str = "") -> None:
        # A node may say anything: one line of it will do.
        super().__init__("".join(c if c.isprintable() else " " for c in (why or cause)[:300]))
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

    @property
    def K(self) -> float | None:
        return self.facts["K"]

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

    def take(
        self, reply: Message, node: Node, server: Server, asked: Collection[str], taken: Collection[str]
    ) -> Taken:
        """The reply, decoded; Rejected says why not."""
        answer = self._answer(reply)
        if found := objection(server, asked, taken, node.identity, answer.stamp):
            raise Rejected(found, f"its stamp is {answer.stamp}, the round's {server.stamp}")
        try:
            # Values of any kind take 16 bytes at most; the codec has the same bound.
            parcel = unpack(answer.message, 16 * self.form.layout.d + 65_536, self.form.whole_bytes)
            payload = self._payload(parcel.payload, node, answer)
            facts, metrics = facts_in(parcel.facts), metrics_in(parcel.facts)
            if self.samples and samples_in(metrics) is None:
                raise Rejected("metrics", f"weighting = 'samples' needs {SAMPLES!r}")
        except WireError as error:
            raise Rejected("malformed", str(error)) from None
        self._check(payload, parcel.whole)
        mark = mark_of(answer.stamp, answer.incarnation, answer.message)
        name = str(parcel.facts.get("arrays", "arrays"))[:100]
        return Taken(node, mark, payload, parcel.whole, facts, name, metrics, len(answer.message))

    def _answer(self, reply: Message) -> Answer:
        if reply.has_error():
            code = reply.error.code
            raise Rejected(*_FLOWERS.get(code, (CAUSES.get(code, FAILED), reason(reply))))
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
        found = decode(message, layout=layout, kmax=most, client=node.number, sequence=answer.stamp.sequence)
        return found.map(torch.from_numpy)

    def _check(self, payload: Payload, whole: bytes) -> None:
        """That all numbers are finite, and not more than they may be."""
        values = values_of(payload).float()  # as they are added: a float64 may be too large for that
        if not bool(torch.isfinite(values).all()) or not self.form.is_finite(whole):
            raise Rejected("not finite", "it holds NaN or Inf")
        if self.max_norm is not None and norm2(values) ** 0.5 > self.max_norm:
            raise Rejected(
                "too large", f"its norm is {norm2(values) ** 0.5:.4g}, max_norm is {self.max_norm:.4g}"
            )


def reason(reply: Message) -> str:
    """Of a reply that is an error; an exception comes as Python would print it.

    >>> import re
    >>> re.sub(*_RAISED, "<class 'my.Error'>:<'too bad'>")
    'Error: too bad'
    """
    return re.sub(*_RAISED, reply.error.reason or "")[:300]


def facts_in(said: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers that a client reports, None for those that it does not; WireError if one cannot be."""
    found = {name: number(said.get(name)) for name in _BOUNDS}
    for name, value in found.items():
        low, high = _BOUNDS[name]
        if said.get(name) is not None and (value is None or not low <= value <= high):
            raise WireError(f"{name!r} is {said[name]!r:.40}, which it cannot be")
    return found


def metrics_in(said: Mapping[str, Any]) -> dict[str, MetricRecord]:
    """The records of metrics in which an app reports; WireError if they are none."""
    try:
        records = {name: MetricRecord(values) for name, values in said["metrics"].items()}
    except (KeyError, TypeError, AttributeError):
        raise WireError("its metrics are not records of numbers") from None
    for record in records.values():
        found = number(record.get(SAMPLES, 0))
        if found is None or not 0 <= found <= 2**53:
            raise WireError(f"{SAMPLES!r} is {record[SAMPLES]!r:.40}, which it cannot be")
    return records


def samples_in(records: Mapping[str, MetricRecord]) -> float | None:
    """How many examples a client has, by the first record that says so."""
    found = (number(record.get(SAMPLES)) for record in records.values())
    return next((n for n in found if n is not None), None)


def kind_of(metrics: Mapping[str, MetricRecord], arrays: str = "") -> frozenset[str]:
    """What a reply holds: the names of its records, and of what is in them, with the lengths of lists."""
    found = {f"the ArrayRecord {arrays!r}"} if arrays else set()
    for name, record in metrics.items():
        where = "" if name == "metrics" else f" in {name!r}"
        found |= {f"the MetricRecord {name!r}"} | {
            f"the list {key!r} of {len(value)}{where}"
            if isinstance(value, list)
            else f"the number {key!r}{where}"
            for key, value in record.items()
        }
    return frozenset(found)


def unlike_most(kinds: Mapping[Who, frozenset[str]]) -> dict[Who, str]:
    """Those who are not like most, and why: a strategy cannot average what differs."""
    usual = Counter(kinds.values()).most_common(1)  # of several as common, the first
    return {who: _unlike(kind, usual[0][0]) for who, kind in kinds.items() if kind != usual[0][0]}


def _unlike(kind: frozenset[str], usual: frozenset[str]) -> str:
    """The first difference of each sort, in words."""
    less, more = sorted(usual - kind)[:1], sorted(kind - usual)[:1]
    parts = [f"lacks {less[0]}"] if less else []
    parts += [f"has {more[0]}"] if more else []
    return f"it {' and '.join(parts)}, unlike other nodes"
