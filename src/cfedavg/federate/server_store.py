"""What a server must not lose, on disk: one file, whole or not there, with a checksum.

What it keeps of each client is in a second file, to which a round adds lines for those who took part; the
first says how many of them count.
"""

from __future__ import annotations

import json
import reprlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.files import lock_folder, make_folder
from cfedavg.core.layout import Layout
from cfedavg.federate import checks, journal
from cfedavg.federate.copy_state import CopyForm
from cfedavg.federate.journal import Place
from cfedavg.federate.primary import Primary
from cfedavg.federate.protocol import AHEAD, Mark, Stamp
from cfedavg.federate.server import Server, ended
from cfedavg.federate.state_file import FILE, as_array, check_owner, name_damage, read_state, write_state
from cfedavg.federate.table import Table

EXTRA = "extra."
GROWTH = 4  # times the length that it began with: then the file of the clients is begun anew
SHORT = 65_536  # bytes: a shorter one is not worth it


class Known(NamedTuple):
    """What is kept of a client besides its mark: how many incarnations were met, and what a driver notes."""

    incarnations: int
    note: Any = None  # what JSON can say


@dataclass(frozen=True)
class Served:
    """A server's state, what it keeps of the clients in its model, and what a driver keeps with it."""

    server: Server
    clients: Table[Known] = field(default_factory=Table)
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what JSON can say

    def ended(
        self,
        taken: Mapping[str, Mark],
        x_next: Any,
        notes: Mapping[str, Any] | None = None,
        primary_next: Primary | None = None,
    ) -> Served:
        """After a round with these answers, and with a note of each client: see `server.ended`."""
        known = {who: Known(self._met(who, mark), (notes or {}).get(who)) for who, mark in taken.items()}
        server = ended(self.server, taken, x_next, primary_next)
        return replace(self, server=server, clients=self.clients | known)

    def _met(self, client: str, mark: Mark) -> int:
        """How many of its incarnations have delivered, with this one."""
        if client not in self.clients:
            return 1
        return self.clients[client].incarnations + (
            mark.incarnation != self.server.applied[client].incarnation
        )


def new_generation(server: Server) -> int:
    """For a server that comes from a backup: above its own, and above all that other restores took before.

    It is the time in seconds, so those were all lower, unless they were in this very second or the clock was
    set back. Until the year 2106 it fits into the 32 bits that the wire has for it.

    Nodes accept a generation up to AHEAD seconds beyond their clocks, and one that has answered a forged one
    refuses all before it. So a federation that was restored less than AHEAD ago, and is restored again, takes
    the largest generation that a node accepts now, which is above all that a node has accepted before. It is
    not the rule for the first restore, as nodes whose clocks are slow would refuse it until they catch up.
    """
    now = int(time.time())
    again = server.stamp.generation > now - AHEAD
    generation = max(server.stamp.generation + 1, now + AHEAD if again else now)
    if generation >= 2**32:
        raise InputError(f"generation {generation} is above 2^32 - 1: start another federation")
    return generation


class ServerStore:
    """The state of the server of one federation; `copy_dtype` is that of the primary's w."""

    def __init__(self, folder: Path, federation: str, layout: Layout, copy_dtype: str = "float32") -> None:
        self.folder, self.layout, self.about = folder, layout, {"federation": federation}
        self.copy_form = CopyForm(layout.d, copy_dtype)
        self._last: tuple[Served, Place] | None = None  # what this store has saved
        self._compact = 0  # the length of the clients' file when it was begun

    @contextmanager
    def locked(self) -> Iterator[None]:
        make_folder(self.folder, "the server's state")
        with lock_folder(
            self.folder, f"another server works in {self.folder}: wait until it ends, or give another `out`"
        ):
            yield

    def load(self) -> Served | None:
        """What is on the disk; None if nothing is."""
        path = self.folder / FILE
        if not path.exists():
            return None
        with self.naming_damage():
            tensors, about = read_state(path)
            check_owner(path, about, self.about | {"kind": "server"}, self.layout)
            t, stamp = checks.whole("t", about["t"], 0, 2**32), checks.stamp("stamp", about["stamp"])
            checks.whole("the number of its stamp", stamp.number, 1, t + 2)
            applied, clients = _clients(journal.read(self.folder, _place(about["clients"])), stamp)
            primary = self.copy_form.read_primary(tensors, about, (stamp.generation, t))
            server = Server(_model(tensors.pop("x"), self.layout.d), t, stamp, applied, primary)
            return Served(server, clients, facts=_facts(tensors.pop("facts")), extra=_extra(tensors))

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Make one sentence of whatever shows that the state is damaged."""
        remedy = "restore a backup of the whole folder, with a new generation, or start another federation"
        with name_damage(self.folder / FILE, remedy):
            yield

    def save(self, served: Served) -> None:
        """Makes the state durable, at the cost of what has changed of the clients since it was last saved."""
        server, place = served.server, self._journalled(served)
        about = self.about | {
            "kind": "server",
            "layout": self.layout.text,
            "t": server.t,
            "stamp": server.stamp,
            "clients": place,
            "primary": self.copy_form.describe_primary(server.primary),
        }
        extra = {EXTRA + name: np.array(tensor) for name, tensor in served.extra.items()}
        facts = as_array(json.dumps(served.facts).encode())  # too much, maybe, for the header
        tensors = {"x": server.x, "facts": facts, **extra, **self.copy_form.tensors(server.primary)}
        write_state(self.folder / FILE, tensors, about)
        journal.sweep(self.folder, place)
        self._last = served, place

    def _journalled(self, served: Served) -> Place:
        """Add what has changed, or begin a file where nothing is known of what has been, or much is old.

        A file is begun after three times its own length was added, so a round's mean cost is the same.
        """
        last, self._last = self._last, None  # if this fails, what it has added must not count later
        follows = last and _follows(served.server.stamp, last[0].server.stamp)
        if last and follows and last[1].length <= GROWTH * max(self._compact, SHORT):
            return journal.add(self.folder, last[1], _lines(served, last[0]))
        place = journal.begin(self.folder, _lines(served, Served(Server(None))))
        self._compact = place.length
        return place


def _follows(now: Stamp, before: Stamp) -> bool:
    """Within a generation each state follows from those before, and has all of their clients."""
    return now.generation == before.generation and now.number >= before.number


def _lines(now: Served, before: Served) -> list[Any]:
    """A line for each client of which something has changed."""
    changed = now.server.applied.since(before.server.applied) | now.clients.since(before.clients)
    return [(who, now.server.applied[who], now.clients[who]) for who in changed]


def _clients(lines: list[Any], before: Stamp) -> tuple[Table[Mark], Table[Known]]:
    """Of each client the last line counts; ValueError unless a server before this stamp wrote them."""
    applied, clients = dict[str, Mark](), dict[str, Known]()
    for line in lines:
        who, mark, known = checks.listed("a client", line, 3)
        met, note = checks.listed("a client", known, 2)
        applied[checks.text("a client's name", who)] = checks.mark("a client's mark", mark, before)
        clients[who] = Known(checks.whole("a client's incarnations", met, 1, 2**53), note)
    return Table(applied), Table(clients)


def _place(value: Any) -> Place:
    return Place(*(checks.whole("clients", each, 0, 2**63) for each in checks.listed("clients", value, 3)))


def _model(x: np.ndarray, d: int) -> np.ndarray:
    if not np.isfinite(checks.vector("x", x, "float32", d)).all():
        raise ValueError("x holds NaN or Inf")
    return x


def _facts(stored: np.ndarray) -> dict[str, Any]:
    found = json.loads(checks.vector("facts", stored, "uint8").tobytes())
    checks.writable("facts", found)
    return checks.table("facts", found)


def _extra(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if foreign := [name for name in tensors if not name.startswith(EXTRA)]:
        raise ValueError(f"it has one tensor too many, {reprlib.repr(min(foreign))}")
    return {name.removeprefix(EXTRA): tensor for name, tensor in tensors.items()}
