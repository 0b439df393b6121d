"""The server's state on disk: one file, whole or not there, with a checksum, and a journal of its clients.

The journal holds lines that are only ever added to, so what a round stores does not grow with what was
stored before: a round adds lines for those who took part. The state file says, by a Place, how much of which
journal counts. Lines of a process that was killed before it stored the Place do not count; that journal is
never written to again, as every process begins one of its own. It begins another when most of the lines are
old; the journal before stays until nothing durable refers to it.
"""

from __future__ import annotations

import json
import re
import reprlib
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.files import append, read_file, sync, write_atomic
from cfedavg.core.layout import Layout
from cfedavg.federate import state_file
from cfedavg.federate.protocol import AHEAD, Mark, Stamp
from cfedavg.federate.server import Primary, Server, Table, end_round
from cfedavg.federate.state_file import check_integer, check_list, check_vector

EXTRA = "extra."
GROWTH = 4  # times the length that it began with: then the journal of the clients is begun anew
SHORT = 65_536  # bytes: a shorter journal is not begun anew
_JOURNAL = re.compile(r"clients\.(\d+)\.jsonl")


class Place(NamedTuple):
    """How much of which journal counts, and the checksum of that."""

    number: int
    length: int
    checksum: int


class KnownClient(NamedTuple):
    """What is kept of a client besides its mark: how many incarnations delivered, and the caller's note."""

    incarnations: int
    note: Any = None  # what JSON can say


@dataclass(frozen=True)
class ServerState:
    """A server, what it keeps of the clients in its model, and what the caller keeps with it."""

    server: Server
    clients: Table[KnownClient] = field(default_factory=Table)
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what JSON can say

    def end_round(
        self,
        taken: Mapping[str, Mark],
        x_next: Any,
        notes: Mapping[str, Any] | None = None,
        primary_next: Primary | None = None,
    ) -> ServerState:
        """Return the state after a round with these answers, and with a note of each client."""
        known = {}
        for who, mark in taken.items():
            met = 1
            if who in self.clients:
                is_new = mark.incarnation != self.server.applied[who].incarnation
                met = self.clients[who].incarnations + is_new
            known[who] = KnownClient(met, (notes or {}).get(who))
        server = end_round(self.server, taken, x_next, primary_next)
        return replace(self, server=server, clients=self.clients | known)


def new_generation(server: Server) -> int:
    """Return the generation of a server that comes from a backup: above all that were ever used.

    It is the time in seconds, so the generations of earlier restores are lower, unless they were in this
    very second or the clock was set back. Until the year 2106 it fits into the 32 bits of the wire.

    Nodes accept a generation up to AHEAD seconds beyond their clocks, and a node that has answered a forged
    one refuses all before it. So a federation that was restored less than AHEAD ago, and is restored again,
    takes the largest generation that a node accepts now, which is above all that a node has accepted before.
    The first restore does not, as nodes whose clocks are slow would refuse it until they catch up.
    """
    now = int(time.time())
    again = server.stamp.generation > now - AHEAD
    generation = max(server.stamp.generation + 1, now + AHEAD if again else now)
    if generation >= 2**32:
        raise InputError(f"generation {generation} is above 2^32 - 1: start another federation")
    return generation


class ServerStore(state_file.StateStore):
    """The state of the server of one federation."""

    busy = "another server works in {}: wait until it ends, or give another `out`"
    remedy = "restore a backup of the whole folder, with a new generation, or start another federation"

    def __init__(self, folder: Path, federation: str, layout: Layout, copy_dtype: str = "float32") -> None:
        super().__init__(folder, {"federation": federation, "kind": "server"}, layout, copy_dtype)
        self._last: tuple[ServerState, Place] | None = None  # what this store has saved
        self._compact = 0  # the length of the journal when it was begun

    def load(self) -> ServerState | None:
        """Return the stored state; None if there is none."""
        if not self.path.exists():
            return None
        with self.naming_damage():
            tensors, about = self._read()
            t = check_integer("t", about["t"], 0, 2**32)
            stamp = state_file.check_stamp("stamp", about["stamp"])
            check_integer("the number of its stamp", stamp.number, 1, t + 2)
            numbers = check_list("clients", about["clients"], 3)
            place = Place(*(check_integer("clients", number, 0, 2**63) for number in numbers))
            applied, clients = _read_clients(self.folder, place, stamp)
            primary = self.copy_form.read_primary(tensors, about, (stamp.generation, t))
            x = check_vector("x", tensors.pop("x"), "float32", self.layout.d)
            if not np.isfinite(x).all():
                raise ValueError("x holds NaN or Inf")
            facts = json.loads(check_vector("facts", tensors.pop("facts"), "uint8").tobytes())
            state_file.check_depth("facts", facts)
            state_file.check_table("facts", facts)
            if foreign := [name for name in tensors if not name.startswith(EXTRA)]:
                raise ValueError(f"it has one tensor too many, {reprlib.repr(min(foreign))}")
            extra = {name.removeprefix(EXTRA): tensor for name, tensor in tensors.items()}
            return ServerState(Server(x, t, stamp, applied, primary), clients, extra, facts)

    def save(self, state: ServerState) -> None:
        """Make the state durable, at the cost of what has changed of the clients since it was last saved."""
        server, place = state.server, self._write_journal(state)
        about = {
            "t": server.t,
            "stamp": server.stamp,
            "clients": place,
            "primary": self.copy_form.describe_primary(server.primary),
        }
        extra = {EXTRA + name: np.array(tensor) for name, tensor in state.extra.items()}
        facts = state_file.as_array(json.dumps(state.facts).encode())  # the header may be too short for them
        tensors = {"x": server.x, "facts": facts, **extra, **self.copy_form.tensors(server.primary)}
        self._write(tensors, about)
        for path, number in _journals(self.folder).items():  # nothing durable refers to the others now
            if number != place.number:
                with suppress(OSError):
                    path.unlink()
        self._last = state, place

    def _write_journal(self, state: ServerState) -> Place:
        """Add what has changed, or begin a journal where nothing is known of the last, or much is old.

        A journal is begun after three times its own length was added, so a round's mean cost is the same.
        """
        last, self._last = self._last, None  # if this fails, what it has added must not count later
        if last is not None:
            before, place = last
            now, then = state.server.stamp, before.server.stamp
            # Within a generation each state follows from those before, and has all of their clients.
            follows = now.generation == then.generation and now.number >= then.number
            if follows and place.length <= GROWTH * max(self._compact, SHORT):
                if not (data := _encode_clients(state, before)):
                    return place
                path = _journal(self.folder, place.number)
                append(path, data)
                sync(path)
                return Place(place.number, place.length + len(data), zlib.crc32(data, place.checksum))
        data = _encode_clients(state, ServerState(Server(None)))
        number, self._compact = 1 + max(_journals(self.folder).values(), default=0), len(data)
        write_atomic(_journal(self.folder, number), data)
        return Place(number, len(data), zlib.crc32(data))


def _encode_clients(now: ServerState, before: ServerState) -> bytes:
    """Return a line for each client of which something has changed."""
    changed = now.server.applied.since(before.server.applied) | now.clients.since(before.clients)
    lines = [(who, now.server.applied[who], now.clients[who]) for who in changed]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def _read_clients(folder: Path, place: Place, before: Stamp) -> tuple[Table[Mark], Table[KnownClient]]:
    """Return the clients by the last of their lines that count.

    Raise ValueError or OSError unless a server before this stamp wrote them as they are.
    """
    path = _journal(folder, place.number)
    data = read_file(path)[: place.length]
    if len(data) != place.length or zlib.crc32(data) != place.checksum:
        raise ValueError(f"{path.name} does not fit to it")
    applied, clients = dict[str, Mark](), dict[str, KnownClient]()
    for line in data.splitlines():
        who, mark, known = check_list("a client", json.loads(line), 3)
        met, note = check_list("a client", known, 2)
        state_file.check_text("a client's name", who)
        applied[who] = state_file.check_mark("a client's mark", mark, before)
        clients[who] = KnownClient(check_integer("a client's incarnations", met, 1, 2**53), note)
    return Table(applied), Table(clients)


def _journal(folder: Path, number: int) -> Path:
    return folder / f"clients.{number}.jsonl"


def _journals(folder: Path) -> dict[Path, int]:
    found = {path: _JOURNAL.fullmatch(path.name) for path in folder.glob("clients.*.jsonl")}
    return {path: int(match[1]) for path, match in found.items() if match}
