"""What the server of a federation keeps between rounds, and how the store writes it.

The store writes a line for each client, a table of JSON ("facts") and named tensors. Only the methods
`to_stored` and `from_stored` of FederationState know which field lies where: a new field is one line in
each. A checksum does not prove who wrote a file, so every field is checked when it is read: ValueError or
KeyError says what is wrong.
"""

from __future__ import annotations

import heapq
import math
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cfedavg.algorithm import ServerMemory
from cfedavg.core.config import renew
from cfedavg.core.run_files import Record, checksum_rows, is_number
from cfedavg.federate.protocol import Mark
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.server import Primary, Server, Table
from cfedavg.federate.server_store import KnownClient, ServerState
from cfedavg.federate.state_file import (
    as_array,
    check_integer,
    check_list,
    check_table,
    check_text,
    check_vector,
)
from cfedavg.flower.array_layout import Form
from cfedavg.flower.round_policy import Claims
from cfedavg.flower.strategy_state import Memory

NODE_NUMBERS = 2**32  # a message says in 64 bits which node sent it; no federation has as many nodes
_WHOLE = "whole"  # the name of an array
_INNER, _SERVER = "inner/", "server/"  # how the names of others begin


@dataclass(frozen=True)
class Node:
    """A node that is online: Flower's id, the fingerprint of its key, our number for it, its name."""

    id: int
    identity: str
    number: int
    name: str


class Numbers:
    """The numbers of clients. A client that has delivered keeps its own; others have the lowest free ones.

    `lent` are those of nodes that have not delivered yet. They are given back when such a node goes away,
    so that it leaves nothing behind.
    """

    def __init__(self, kept: Mapping[str, int] | None = None, lent: Mapping[str, int] | None = None) -> None:
        self.kept, self.lent = dict(kept or {}), dict(lent or {})
        self._used = {*self.kept.values(), *self.lent.values()}
        # All below `_next` are used, or given back and in the heap: nothing grows with the largest number.
        self._next, self._back = 0, list[int]()

    def __len__(self) -> int:
        return len(self.kept) + len(self.lent)

    def __contains__(self, identity: str) -> bool:
        return identity in self.kept or identity in self.lent

    def of(self, identity: str) -> int:
        """Return the number of a node; a new node gets the lowest that is free."""
        if identity in self.kept:
            return self.kept[identity]
        if identity not in self.lent:
            if self._back:
                number = heapq.heappop(self._back)
            else:
                while self._next in self._used:
                    self._next += 1
                number = self._next
            self._used.add(number)
            self.lent[identity] = number
        return self.lent[identity]

    def settle(self, delivered: Iterable[str], online: Collection[str]) -> None:
        """Let those who have delivered keep their numbers, and take back those of nodes that are gone."""
        self.kept |= {who: self.lent.pop(who) for who in delivered if who in self.lent}
        for who in [who for who in self.lent if who not in online]:
            number = self.lent.pop(who)
            self._used.discard(number)
            if number < self._next:
                heapq.heappush(self._back, number)


class Note(NamedTuple):
    """What the server keeps of a client: its number, its last round in the model, |e|^2 as it said then."""

    number: int
    heard: int
    residual2: float | None


class RoundRows(NamedTuple):
    """The rows that a round writes: its own, and one for each node that it asked."""

    row: Record
    nodes: list[Record]


@dataclass(frozen=True)
class FixedOptions:
    """The options that a resume must not change.

    Residuals are in the units of the update, draws are keyed by the seed, and curves are of one run.
    """

    inner: str | None  # the names of the classes of a wrapped strategy
    compressor: str
    compressor_down: str
    feedback: str
    update: str
    server_optimiser: str
    seed: int


@dataclass(frozen=True)
class FederationState:
    """All that a server needs to go on after the last round that ended."""

    server: Server
    form: str  # the hash of the model's form
    options: FixedOptions
    whole: bytes  # the part of the model that travels whole
    checksums: Mapping[str, int]  # of the rows in each file
    clients: Table[KnownClient] = field(default_factory=Table)  # those in the model, each with a Note
    lent: Mapping[str, int] = field(default_factory=dict)  # the numbers of nodes that are not in the model
    norms: Sequence[float] = ()  # of the last payloads in the model
    claims: Claims = field(default_factory=Claims)  # of the last replies
    inner: Memory | None = None  # what a wrapped strategy remembers
    memory: ServerMemory = field(default_factory=ServerMemory)  # of the feedback and the server optimiser
    last: RoundRows | None = None  # None before the first round ends

    def end_round(
        self,
        taken: Mapping[str, Mark],
        x_next: NDArray[np.float32],
        notes: Mapping[str, Note],
        primary_next: Primary | None = None,
    ) -> FederationState:
        """Return the state after a round with these answers in x_next; each of their clients has a note.

        With a compressed broadcast, `primary_next` is the copy that it leads to.
        """
        after = ServerState(self.server, self.clients).end_round(taken, x_next, notes, primary_next)
        return replace(self, server=after.server, clients=after.clients)

    def check_whole(self, form: Form) -> None:
        """Raise ValueError unless the part that travels whole is of a model of this form."""
        if len(self.whole) != form.whole_bytes:
            raise ValueError(f"what travels whole must have {form.whole_bytes} bytes, got {len(self.whole)}")
        if not form.is_finite(self.whole):
            raise ValueError("what travels whole holds NaN or Inf")

    def check_copy(self, replica: ModelReplica | None) -> None:
        """Raise ValueError unless there is a copy where broadcasts are compressed, and it is finite."""
        primary = self.server.primary
        if (primary is None) != (replica is None):
            raise ValueError("the copy of the model is missing or one too many")
        if primary and replica and not np.isfinite(replica.model(primary.w)).all():
            raise ValueError("the copy of the model holds NaN or Inf")

    def check_memory(self, like: ServerMemory) -> None:
        """Raise ValueError unless the server remembers what a server of these options does."""
        found, wanted = self.memory.vectors(), like.vectors()
        if odd := sorted(found.keys() ^ wanted.keys()):
            raise ValueError(f"the server's memory {reprlib.repr(odd[0])} is missing or one too many")
        for name, vector in found.items():
            check_vector(f"the server's memory {name}", vector, "float32", len(wanted[name]))
            if not np.isfinite(vector).all():
                raise ValueError(f"the server's memory {name} holds NaN or Inf")

    def to_stored(self) -> ServerState:
        """Return the state as the store writes it."""
        facts: dict[str, Any] = {
            "form": self.form,
            "options": asdict(self.options),
            "numbers": dict(self.lent),
            "rows": dict(self.checksums),
            "norms": list(self.norms),
            "steps": list(self.claims.steps),
            "samples": list(self.claims.samples),
        }
        arrays = {_WHOLE: as_array(self.whole)}
        arrays |= {_SERVER + name: vector for name, vector in self.memory.vectors().items()}
        if self.inner is not None:
            facts["inner"] = self.inner.codes
            arrays |= {_INNER + name: array for name, array in self.inner.arrays.items()}
        if self.last is not None:
            facts["last"] = self.last._asdict()
        return ServerState(self.server, self.clients, arrays, facts)

    @classmethod
    def from_stored(cls, stored: ServerState) -> FederationState:
        """Return the state that a server stored; raise ValueError or KeyError unless one can have."""
        facts, arrays, t = dict(stored.facts), dict(stored.extra), stored.server.t
        state = cls(
            server=stored.server,
            form=check_text("form", facts.pop("form")),
            options=_read_options(facts.pop("options")),
            whole=check_vector(_WHOLE, arrays.pop(_WHOLE), "uint8").tobytes(),
            checksums=_read_integers("the checksum of a file", facts.pop("rows"), 2**32),
            clients=Table({who: _read_client(known, t) for who, known in stored.clients.items()}),
            lent=_read_integers("a node's number", facts.pop("numbers"), NODE_NUMBERS),
            norms=_read_norms("norms", facts.pop("norms")),
            claims=Claims(*(_read_norms(name, facts.pop(name)) for name in ("steps", "samples"))),
            inner=Memory(_take(arrays, _INNER), check_table("inner", facts.pop("inner")))
            if "inner" in facts
            else None,
            memory=ServerMemory.from_vectors(_take(arrays, _SERVER)),
            last=_read_rows(facts.pop("last", None), t),
        )
        if unknown := [*facts, *arrays]:
            raise ValueError(f"it has one field too many, {reprlib.repr(min(unknown))}")
        numbers = [*state.lent.values(), *(known.note.number for known in state.clients.values())]
        if len(set(numbers)) < len(numbers):
            raise ValueError("two clients have the same number")
        return state


def _read_options(stored: Any) -> FixedOptions:
    table = renew(check_table("options", stored))
    table.pop("local_optimiser", None)  # of a state that was stored before the server optimiser was an option
    table.setdefault("compressor_down", "none")  # and before the broadcast was compressed
    options = FixedOptions(**{item.name: table.pop(item.name) for item in fields(FixedOptions)})
    if table:
        raise ValueError(f"it has one option too many, {reprlib.repr(min(table))}")
    for item in fields(FixedOptions):
        if item.type == "str" or (item.name == "inner" and options.inner is not None):
            check_text(item.name, getattr(options, item.name))
    check_integer("seed", options.seed, 0, 2**63)
    return options


def _read_integers(name: str, stored: Any, below: int) -> dict[str, int]:
    return {who: check_integer(name, each, 0, below) for who, each in check_table(name, stored).items()}


def _read_norms(name: str, stored: Any) -> list[float]:
    return [_check_norm(f"one of its {name}", value) for value in check_list(name, stored)]


def _check_norm(name: str, value: Any) -> float:
    if value is None or not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of 0 or more, got {value!r:.40}")
    return value  # type: ignore[no-any-return]


def _take(arrays: dict[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Take out the arrays whose names begin with the prefix, and drop the prefix."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays.pop(name) for name in names}


def _read_rows(stored: Any, t: int) -> RoundRows | None:
    if (stored is None) != (t == 0):
        raise ValueError(f"the rows of the last round must be there after a round, and t is {t}")
    if stored is None:
        return None
    last = RoundRows(check_table("last", stored)["row"], check_list("nodes", stored["nodes"]))
    for row in (last.row, *last.nodes):
        check_integer("the round of a row", check_table("a row", row)["round"], t - 1, t)
    checksum_rows([last.row, *last.nodes])  # ValueError for NaN, which no row can hold
    return last


def _read_client(known: KnownClient, t: int) -> KnownClient:
    note = Note(*check_list("a client's note", known.note, 3))
    check_integer("a client's number", note.number, 0, NODE_NUMBERS)
    check_integer("a client's last round", note.heard, 0, t)
    if note.residual2 is not None:
        _check_norm("a client's residual", note.residual2)
    return KnownClient(known.incarnations, note)
