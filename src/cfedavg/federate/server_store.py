"""The server's state on disk: a file with a checksum, replaced in one step, and a journal of the clients.

A round adds one line to the journal for each client that took part. So the cost of a round does not grow with
the number of clients known before. The state file holds a Place: which journal is valid, and how many of its
bytes count. If a process is killed before it stores the Place, its last lines do not count. No other process
writes to that journal again, because every process begins its own. A process begins another journal when most
lines are old. The old journal stays until no stored state refers to it.
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
GROWTH = 4  # a journal that is this many times as long as at its beginning is begun anew
SHORT = 65_536  # bytes: a journal counts as at least this long at its beginning
_JOURNAL = re.compile(r"clients\.(\d+)\.jsonl")


class Place(NamedTuple):
    """The number of the valid journal, how many of its bytes count, and the checksum of these bytes."""

    number: int
    length: int
    checksum: int


class KnownClient(NamedTuple):
    """A server's record of a client: how many of its incarnations have answered, and the caller's note."""

    incarnations: int
    note: Any = None  # a JSON value


@dataclass(frozen=True)
class ServerState:
    """A server, its records of the clients in its model, and the caller's tensors and facts."""

    server: Server
    clients: Table[KnownClient] = field(default_factory=Table)
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # JSON values

    def end_round(
        self,
        taken: Mapping[str, Mark],
        x_next: Any,
        notes: Mapping[str, Any] | None = None,
        primary_next: Primary | None = None,
    ) -> ServerState:
        """Return the state after a round. `taken` holds the clients' answers, `notes` their new notes."""
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
    """Return a generation for a server that restores a backup: above all generations used before.

    The generation is the time in seconds. So the generations of earlier restores are lower, unless they were
    in the same second or the clock was set back. The time fits the wire's 32 bits until the year 2106.

    A node accepts a generation at most AHEAD seconds above its clock. A node that has answered a forged
    generation refuses all lower ones. So if the last restore was less than AHEAD seconds ago, the next
    restore takes the largest generation that a node accepts now. That generation is above all that a node has
    accepted before. A first restore takes the time, because nodes with slow clocks refuse higher generations.
    """
    now = int(time.time())
    again = server.stamp.generation > now - AHEAD
    generation = max(server.stamp.generation + 1, now + AHEAD if again else now)
    if generation >= 2**32:
        raise InputError(f"the generation must be below 2^32, got {generation}: start another federation")
    return generation


class ServerStore(state_file.StateStore):
    """The folder that stores the state of the server of one federation."""

    busy = "another server works in {}: wait until it ends, or give another `out`"
    remedy = "restore a backup of the whole folder, with a new generation, or start another federation"

    def __init__(self, folder: Path, federation: str, layout: Layout, copy_dtype: str = "float32") -> None:
        super().__init__(folder, {"federation": federation, "kind": "server"}, layout, copy_dtype)
        self._last: tuple[ServerState, Place] | None = None  # the state that this store saved last
        self._compact = 0  # the length of the journal at its beginning

    def load(self) -> ServerState | None:
        """Return the stored state; None if no state is stored."""
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
                raise ValueError(f"it has an unknown tensor {reprlib.repr(min(foreign))}")
            extra = {name.removeprefix(EXTRA): tensor for name, tensor in tensors.items()}
            return ServerState(Server(x, t, stamp, applied, primary), clients, extra, facts)

    def save(self, state: ServerState) -> None:
        """Store the state durably. Write only the clients that changed since the last save."""
        server, place = state.server, self._write_journal(state)
        about = {
            "t": server.t,
            "stamp": server.stamp,
            "clients": place,
            "primary": self.copy_form.describe_primary(server.primary),
        }
        extra = {EXTRA + name: np.array(tensor) for name, tensor in state.extra.items()}
        facts = state_file.as_array(json.dumps(state.facts).encode())  # too long for the header
        tensors = {"x": server.x, "facts": facts, **extra, **self.copy_form.tensors(server.primary)}
        self._write(tensors, about)
        for path, number in _journals(self.folder).items():  # no stored state refers to the others now
            if number != place.number:
                with suppress(OSError):
                    path.unlink()
        self._last = state, place

    def _write_journal(self, state: ServerState) -> Place:
        """Add lines for changed clients to the journal, or begin a new journal; return its place.

        A new journal is begun if this store has none, or if the journal has grown GROWTH times. So the mean
        cost of a round does not grow.
        """
        last, self._last = self._last, None  # if writing fails, the added lines must not count later
        if last is not None:
            before, place = last
            now, then = state.server.stamp, before.server.stamp
            # Within a generation, a later state has all clients of the earlier states.
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
    """Return a journal line for each client that changed between the states `before` and `now`."""
    changed = now.server.applied.since(before.server.applied) | now.clients.since(before.clients)
    lines = [(who, now.server.applied[who], now.clients[who]) for who in changed]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def _read_clients(folder: Path, place: Place, before: Stamp) -> tuple[Table[Mark], Table[KnownClient]]:
    """Return the marks and the records of all clients, from the last line of each client in the journal.

    Raise ValueError or OSError if the journal is damaged, or an answer is not older than the stamp `before`.
    """
    path = _journal(folder, place.number)
    data = read_file(path)[: place.length]
    if len(data) != place.length or zlib.crc32(data) != place.checksum:
        raise ValueError(f"{path.name} is too short or has a wrong checksum")
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
