"""The state that a federation's server keeps between rounds, and its conversion to the stored form.

The stored form has three parts: a line for each client, a JSON object (the "facts"), and named tensors. Only
`FederationState.to_stored` and `from_stored` know which field is in which part: a new field needs one line in
each method. A file with a right checksum may still be forged. So `from_stored` checks every field, and raises
ValueError or KeyError if a field is wrong.
"""

from __future__ import annotations

import heapq
import math
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cfedavg.algorithm import ServerMemory
from cfedavg.core.config import renew
from cfedavg.core.run_files import Record, checksum_rows, is_number
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.server import KnownClient, Server, ServerState, Table
from cfedavg.federate.state_file import (
    as_array,
    check_integer,
    check_list,
    check_table,
    check_text,
    check_vector,
)
from cfedavg.flower.array_layout import Form
from cfedavg.flower.options import Claims, Parts

NODE_NUMBERS = 2**32  # every node number is below this bound; a message has 64 bits for a node number
_WHOLE = "whole"  # the name of the stored tensor of uncompressed arrays
_INNER, _SERVER = "inner/", "server/"  # prefixes of the names of the other tensors


@dataclass(frozen=True)
class Node:
    """An online node: Flower's id, its identity (the hash of its public key), its client number, its name."""

    id: int
    identity: str
    number: int
    name: str


class Numbers:
    """The client number of each node, by the node's identity. A new node gets the lowest free number.

    `kept`: the permanent numbers, of nodes whose updates were aggregated. `lent`: the numbers of the other
    nodes. A lent number becomes free when its node goes offline.
    """

    def __init__(self, kept: Mapping[str, int] | None = None, lent: Mapping[str, int] | None = None) -> None:
        self.kept, self.lent = dict(kept or {}), dict(lent or {})
        self._used = {*self.kept.values(), *self.lent.values()}
        # Every number below `_next` is used, or is free and in the heap `_back`. So the size of these fields
        # does not grow with the largest number.
        self._next, self._back = 0, list[int]()

    def __len__(self) -> int:
        return len(self.kept) + len(self.lent)

    def __contains__(self, identity: str) -> bool:
        return identity in self.kept or identity in self.lent

    def of(self, identity: str) -> int:
        """Return the client number of the node `identity`; a new node gets the lowest free number."""
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
        """Make the numbers of `delivered` permanent, and free the lent numbers of nodes not in `online`.

        `delivered`: the identities of nodes whose updates were aggregated.
        """
        self.kept |= {who: self.lent.pop(who) for who in delivered if who in self.lent}
        for who in [who for who in self.lent if who not in online]:
            number = self.lent.pop(who)
            self._used.discard(number)
            if number < self._next:
                heapq.heappush(self._back, number)


class Note(NamedTuple):
    """What the server stores about a client: number, round of the last aggregated update, |residual|^2."""

    number: int
    heard: int
    residual2: float | None  # as reported in round `heard`


class StrategyMemory(NamedTuple):
    """The attributes of a wrapped strategy that must survive a restart.

    `codes`: the values as JSON, by attribute path, such as `moments`. `arrays`: the arrays in these values,
    by attribute path and index, such as `moments/0`.
    """

    arrays: dict[str, NDArray[Any]]
    codes: dict[str, Any]


class RoundRows(NamedTuple):
    """The rows of metrics of a round: one for the round, and one for each node that the round asked."""

    row: Record
    nodes: list[Record]


@dataclass(frozen=True)
class FixedOptions:
    """The options that must not change when a federation resumes.

    Residuals are in the units of `update`, and `seed` determines the random draws. The other options stay the
    same so that one setting explains all rounds of a run.
    """

    inner: str | None  # the names of the classes of a wrapped strategy
    compressor: str
    compressor_down: str
    feedback: str
    update: str
    server_optimiser: str
    seed: int

    @classmethod
    def of(cls, inner: str | None, parts: Parts) -> FixedOptions:
        """Return the fixed options in `parts`, with the name of the wrapped strategy (None: no strategy)."""
        up, down, feedback = str(parts.compressor), str(parts.compressor_down), str(parts.feedback)
        return cls(inner, up, down, feedback, parts.update, str(parts.server_optimiser), parts.seed)


@dataclass(frozen=True)
class FederationState:
    """All that a server needs to continue after the last completed round."""

    server: Server
    form: str  # the hash of the model's form
    options: FixedOptions
    uncompressed: bytes  # the bytes of the model's uncompressed arrays
    checksums: Mapping[str, int]  # of the rows of metrics, by file name
    clients: Table[KnownClient] = field(default_factory=Table)  # those whose updates were aggregated
    lent: Mapping[str, int] = field(default_factory=dict)  # the numbers of all other nodes
    norms: Sequence[float] = ()  # of the last payloads that were aggregated
    claims: Claims = field(default_factory=Claims)  # local steps and examples of the last replies
    inner: StrategyMemory | None = None  # of a wrapped strategy
    memory: ServerMemory = field(default_factory=ServerMemory)  # of the feedback and the server optimiser
    last: RoundRows | None = None  # the rows of the last round; None before the first round ends

    def check(self, form: Form, replica: ModelReplica | None, memory: ServerMemory) -> None:
        """Raise ValueError if an array of the state is missing, unknown, of a wrong size or not finite.

        `replica` is None if broadcasts are not compressed. `memory` is the memory of a new server: the
        state's memory must have the same vectors.
        """
        if len(self.uncompressed) != form.count_bytes():
            raise ValueError(
                f"`whole` (the uncompressed arrays) must have {form.count_bytes()} bytes, "
                f"got {len(self.uncompressed)}"
            )
        found, wanted, primary = self.memory.vectors(), memory.vectors(), self.server.primary
        if odd := sorted(found.keys() ^ wanted.keys()):
            raise ValueError(f"the server's memory vector {reprlib.repr(odd[0])} is missing or unknown")
        if (primary is None) != (replica is None):
            raise ValueError("the state must hold a model copy if broadcasts are compressed, else none")
        finite = {"`whole`": form.is_finite(self.uncompressed)}
        for name, vector in found.items():
            check_vector(f"the server's memory {name}", vector, "float32", len(wanted[name]))
            finite[f"the server's memory {name}"] = bool(np.isfinite(vector).all())
        if primary and replica:
            finite["the model copy"] = bool(np.isfinite(replica.model(primary.w)).all())
        for name, is_finite in finite.items():
            if not is_finite:
                raise ValueError(f"{name} must be finite, but holds NaN or Inf")

    def to_stored(self) -> ServerState:
        """Return the state in the form that the store writes to disk."""
        facts: dict[str, Any] = {
            "form": self.form,
            "options": asdict(self.options),
            "numbers": dict(self.lent),
            "rows": dict(self.checksums),
            "norms": list(self.norms),
            "steps": list(self.claims.steps),
            "samples": list(self.claims.samples),
        }
        arrays = {_WHOLE: as_array(self.uncompressed)}
        arrays |= {_SERVER + name: vector for name, vector in self.memory.vectors().items()}
        if self.inner is not None:
            facts["inner"] = self.inner.codes
            arrays |= {_INNER + name: array for name, array in self.inner.arrays.items()}
        if self.last is not None:
            facts["last"] = self.last._asdict()
        return ServerState(self.server, self.clients, arrays, facts)

    @classmethod
    def from_stored(cls, stored: ServerState) -> FederationState:
        """Return the state in `stored`; raise ValueError or KeyError for a wrong, missing or extra field."""
        facts, arrays, t = dict(stored.facts), dict(stored.extra), stored.server.t
        state = cls(
            server=stored.server,
            form=check_text("form", facts.pop("form")),
            options=_read_options(facts.pop("options")),
            uncompressed=check_vector(_WHOLE, arrays.pop(_WHOLE), "uint8").tobytes(),
            checksums=_read_integers("the checksum of a file", facts.pop("rows"), 2**32),
            clients=Table({who: _read_client(known, t) for who, known in stored.clients.items()}),
            lent=_read_integers("a node's number", facts.pop("numbers"), NODE_NUMBERS),
            norms=_read_norms("norms", facts.pop("norms")),
            claims=Claims(*(_read_norms(name, facts.pop(name)) for name in ("steps", "samples"))),
            inner=StrategyMemory(_take(arrays, _INNER), check_table("inner", facts.pop("inner")))
            if "inner" in facts
            else None,
            memory=ServerMemory.from_vectors(_take(arrays, _SERVER)),
            last=_read_rows(facts.pop("last", None), t),
        )
        if unknown := [*facts, *arrays]:
            raise ValueError(f"the state has the unknown field {reprlib.repr(min(unknown))}")
        numbers = [*state.lent.values(), *(known.note.number for known in state.clients.values())]
        if len(set(numbers)) < len(numbers):
            raise ValueError("two clients have the same number")
        return state


def _read_options(stored: Any) -> FixedOptions:
    table = renew(check_table("options", stored))
    table.pop("local_optimiser", None)  # older versions have this option
    table.setdefault("compressor_down", "none")  # older versions lack this option
    options = FixedOptions(**{item.name: table.pop(item.name) for item in fields(FixedOptions)})
    if table:
        raise ValueError(f"the state has the unknown option {reprlib.repr(min(table))}")
    for item in fields(FixedOptions):
        if item.type == "str" or (item.name == "inner" and options.inner is not None):
            check_text(item.name, getattr(options, item.name))
    check_integer("seed", options.seed, 0, 2**63)
    return options


def _read_integers(name: str, stored: Any, below: int) -> dict[str, int]:
    return {who: check_integer(name, each, 0, below) for who, each in check_table(name, stored).items()}


def _read_norms(name: str, stored: Any) -> list[float]:
    return [_check_norm(f"each of the {name}", value) for value in check_list(name, stored)]


def _check_norm(name: str, value: Any) -> float:
    if value is None or not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r:.40}")
    return value  # type: ignore[no-any-return]


def _take(arrays: dict[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Remove the arrays whose names begin with `prefix`; return them by their names without the prefix."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays.pop(name) for name in names}


def _read_rows(stored: Any, t: int) -> RoundRows | None:
    if (stored is None) != (t == 0):
        raise ValueError(
            f"`t` is {t}: the state must hold the last round's rows if `t` is above 0, else no rows"
        )
    if stored is None:
        return None
    last = RoundRows(check_table("last", stored)["row"], check_list("nodes", stored["nodes"]))
    for row in (last.row, *last.nodes):
        check_integer("the round of a row", check_table("a row", row)["round"], t - 1, t)
    checksum_rows([last.row, *last.nodes])  # raises ValueError for NaN
    return last


def _read_client(known: KnownClient, t: int) -> KnownClient:
    note = Note(*check_list("a client's note", known.note, 3))
    check_integer("a client's number", note.number, 0, NODE_NUMBERS)
    check_integer("a client's last round", note.heard, 0, t)
    if note.residual2 is not None:
        _check_norm("a client's residual", note.residual2)
    return KnownClient(known.incarnations, note)
