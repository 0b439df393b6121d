"""What the server of a federation keeps between rounds, and how the store writes it.

The store writes a line for each client, a table of JSON ("facts") and named tensors. Only the methods
`to_served` and `from_served` of FederationState know which field lies where: a new field is one line in
each. A checksum does not prove who wrote a file, so every field is checked when it is read: ValueError or
KeyError says what is wrong.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cfedavg.algorithm import ServerMemory
from cfedavg.core.config import renew
from cfedavg.core.run_files import Record, checksum_rows, is_number
from cfedavg.federate import checks
from cfedavg.federate.primary import Primary
from cfedavg.federate.protocol import Mark
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.server import Server
from cfedavg.federate.server_store import Known, Served
from cfedavg.federate.state_file import as_array
from cfedavg.federate.table import Table
from cfedavg.flower.array_layout import Form
from cfedavg.flower.norms import Claims
from cfedavg.flower.strategy_state import Memory

NODE_NUMBERS = 2**32  # a message says in 64 bits which node sent it; no federation has as many nodes
_WHOLE = "whole"  # the name of an array
_INNER, _SERVER = "inner/", "server/"  # how the names of others begin


class Note(NamedTuple):
    """What the server keeps of a client: its number, its last round in the model, |e|^2 as it said then."""

    number: int
    heard: int
    residual2: float | None


def note_of(known: Known) -> Note:
    """Return the note of a client."""
    return Note(*known.note)


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
    clients: Table[Known] = field(default_factory=Table)  # those in the model, each with a Note
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
        after = Served(self.server, self.clients).ended(taken, x_next, notes, primary_next)
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
            checks.vector(f"the server's memory {name}", vector, "float32", len(wanted[name]))
            if not np.isfinite(vector).all():
                raise ValueError(f"the server's memory {name} holds NaN or Inf")

    def to_served(self) -> Served:
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
        return Served(self.server, self.clients, arrays, facts)

    @classmethod
    def from_served(cls, served: Served) -> FederationState:
        """Return the state that a server stored; raise ValueError or KeyError unless one can have."""
        facts, arrays, t = dict(served.facts), dict(served.extra), served.server.t
        state = cls(
            server=served.server,
            form=checks.text("form", facts.pop("form")),
            options=_read_options(facts.pop("options")),
            whole=checks.vector(_WHOLE, arrays.pop(_WHOLE), "uint8").tobytes(),
            checksums=_read_whole_numbers("the checksum of a file", facts.pop("rows"), 2**32),
            clients=Table({who: _read_known(known, t) for who, known in served.clients.items()}),
            lent=_read_whole_numbers("a node's number", facts.pop("numbers"), NODE_NUMBERS),
            norms=_read_norms("norms", facts.pop("norms")),
            claims=Claims(
                _read_norms("steps", facts.pop("steps")), _read_norms("samples", facts.pop("samples"))
            ),
            inner=_read_memory(facts, arrays),
            memory=ServerMemory.from_vectors(_take(arrays, _SERVER)),
            last=_read_rows(facts.pop("last", None), t),
        )
        if unknown := [*facts, *arrays]:
            raise ValueError(f"it has one field too many, {reprlib.repr(min(unknown))}")
        _check_numbers(state)
        return state


def _read_options(stored: Any) -> FixedOptions:
    table = renew(checks.table("options", stored))
    table.pop("local_optimiser", None)  # of a state that was stored before the server optimiser was an option
    table.setdefault("compressor_down", "none")  # and before the broadcast was compressed
    options = FixedOptions(**{item.name: table.pop(item.name) for item in fields(FixedOptions)})
    if table:
        raise ValueError(f"it has one option too many, {reprlib.repr(min(table))}")
    for name in (item.name for item in fields(FixedOptions) if item.type == "str"):
        checks.text(name, getattr(options, name))
    if options.inner is not None:
        checks.text("inner", options.inner)
    checks.whole("seed", options.seed, 0, 2**63)
    return options


def _read_whole_numbers(name: str, stored: Any, below: int) -> dict[str, int]:
    return {who: checks.whole(name, each, 0, below) for who, each in checks.table(name, stored).items()}


def _read_norms(name: str, stored: Any) -> list[float]:
    for value in checks.listed(name, stored):
        _check_norm(f"one of its {name}", value)
    return list(stored)


def _check_norm(name: str, value: Any) -> None:
    if value is None or not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of 0 or more, got {value!r:.40}")


def _read_memory(facts: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Memory | None:
    """Take what a wrapped strategy remembers out of both; None before its first round ends."""
    if "inner" not in facts:
        return None
    return Memory(_take(arrays, _INNER), checks.table("inner", facts.pop("inner")))


def _take(arrays: dict[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    """Take the arrays out whose names begin with the prefix, which goes."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays.pop(name) for name in names}


def _read_rows(stored: Any, t: int) -> RoundRows | None:
    if (stored is None) != (t == 0):
        raise ValueError(f"the rows of the last round must be there after a round, and t is {t}")
    if stored is None:
        return None
    last = RoundRows(checks.table("last", stored)["row"], checks.listed("nodes", stored["nodes"]))
    for row in (last.row, *last.nodes):
        checks.whole("the round of a row", checks.table("a row", row)["round"], t - 1, t)
    checksum_rows([last.row, *last.nodes])  # ValueError for NaN, which no row can hold
    return last


def _read_known(known: Known, t: int) -> Known:
    note = Note(*checks.listed("a client's note", known.note, 3))
    checks.whole("a client's number", note.number, 0, NODE_NUMBERS)
    checks.whole("a client's last round", note.heard, 0, t)
    if note.residual2 is not None:
        _check_norm("a client's residual", note.residual2)
    return Known(known.incarnations, note)


def _check_numbers(state: FederationState) -> None:
    numbers = [*state.lent.values(), *(note_of(known).number for known in state.clients.values())]
    if len(set(numbers)) < len(numbers):
        raise ValueError("two clients have the same number")
