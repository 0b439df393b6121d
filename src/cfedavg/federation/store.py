"""What client and server must not lose, on disk: each state is one file, whole or not there, with a checksum.

What a server keeps of each client is in a second file, to which a round adds lines for those who took part;
the first says how many of them count.

A client's state is kept by federation and identity. The identity is the node's key, or what else stays the
same when a node restarts; never a number that the network gave it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cfedavg.errors import InputError
from cfedavg.federation import journal
from cfedavg.federation.journal import Place
from cfedavg.federation.protocol import Client, Mark, Sent, Server, Stamp, ended
from cfedavg.federation.table import Table
from cfedavg.files import locked, make_folder
from cfedavg.layout import Layout
from cfedavg.tensors import UNREADABLE, checksum, read_tensors, save_tensors

FORMATS = {"client": 3, "server": 4}
FILE = "state.safetensors"
EXTRA = "extra."


class OtherModel(InputError):
    """A state that is of another model."""


class ClientStore:
    """The state of one client of one federation, for a model of this layout."""

    def __init__(self, root: Path, federation: str, identity: str, layout: Layout) -> None:
        self.folder = root / _short(federation) / _short(identity)
        self.layout, self.about = layout, {"federation": federation, "identity": identity}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time answers for a client."""
        make_folder(self.folder, "the client's state")
        with locked(self.folder, f"another process answers for this client, in {self.folder}"):
            yield

    def load(self) -> Client:
        """What is on the disk; a client without anything there starts anew, and says so by its number."""
        path = self.folder / FILE
        if not path.exists():
            return self.fresh()
        tensors, about = _read(path, "move it away to go on as a new client, without its residual")
        _check(path, about, self.about | {"kind": "client"}, self.layout)
        sent = about["sent"] and Sent(Stamp(*about["sent"]), tensors["sent"].numpy().tobytes())
        return Client(
            about["incarnation"],
            tensors["e"],
            sent,
            Stamp(*about["seen"]),
            Stamp(*about["told"]),
            about["forgotten"],
            dict(about["agreed"]),
        )

    def fresh(self) -> Client:
        """A client without a past: its number was never drawn before."""
        return Client(secrets.randbits(63), torch.zeros(self.layout.d))

    def save(self, client: Client) -> None:
        """Makes the state durable."""
        tensors = {"e": client.e}
        if client.sent is not None:
            tensors["sent"] = as_tensor(client.sent.message)
        about = self.about | {
            "kind": "client",
            "layout": self.layout.text,
            "incarnation": client.incarnation,
            "sent": client.sent and client.sent.stamp,
            "seen": client.seen,
            "told": client.told,
            "forgotten": client.forgotten,
            "agreed": list(client.agreed.items()),
        }
        _write(self.folder / FILE, tensors, about)


class Known(NamedTuple):
    """What is kept of a client besides its mark: how many incarnations were met, and what a driver notes."""

    incarnations: int
    note: Any = None  # what JSON can say


@dataclass(frozen=True)
class Served:
    """A server's state, what it keeps of the clients in its model, and what a driver keeps with it."""

    server: Server
    clients: Table[Known] = field(default_factory=Table)
    extra: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what JSON can say

    def ended(self, taken: Mapping[str, Mark], x_next: Any, notes: Mapping[str, Any] | None = None) -> Served:
        """After a round with these answers, and with a note of each client: see `protocol.ended`."""
        known = {who: Known(self._met(who, mark), (notes or {}).get(who)) for who, mark in taken.items()}
        return replace(self, server=ended(self.server, taken, x_next), clients=self.clients | known)

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
    """
    return max(server.stamp.generation + 1, int(time.time()))


class ServerStore:
    """The state of the server of one federation."""

    def __init__(self, folder: Path, federation: str, layout: Layout) -> None:
        self.folder, self.layout, self.about = folder, layout, {"federation": federation}
        self._last: tuple[Served, Place] | None = None  # what this store has saved

    @contextmanager
    def locked(self) -> Iterator[None]:
        make_folder(self.folder, "the server's state")
        with locked(
            self.folder, f"another server works in {self.folder}: wait until it ends, or give another `out`"
        ):
            yield

    def load(self) -> Served | None:
        """What is on the disk; None if nothing is."""
        path = self.folder / FILE
        if not path.exists():
            return None
        remedy = "restore a backup of the whole folder, with a new generation, or start another federation"
        tensors, about = _read(path, remedy)
        _check(path, about, self.about | {"kind": "server"}, self.layout)
        try:
            applied, clients = _clients(journal.read(self.folder, Place(*about["clients"])))
        except UNREADABLE as error:
            raise InputError(f"{path} is damaged ({error}); {remedy}") from None
        server = Server(tensors.pop("x"), about["t"], Stamp(*about["stamp"]), applied)
        facts = json.loads(tensors.pop("facts").numpy().tobytes())
        extra = {name.removeprefix(EXTRA): tensor for name, tensor in tensors.items()}
        return Served(server, clients, extra, facts)

    def save(self, served: Served) -> None:
        """Makes the state durable, at the cost of what has changed of the clients since it was last saved."""
        server, place = served.server, self._journalled(served)
        about = self.about | {
            "kind": "server",
            "layout": self.layout.text,
            "t": server.t,
            "stamp": server.stamp,
            "clients": place,
        }
        # Copies: a file takes neither views of one memory nor tensors with gaps.
        extra = {EXTRA + name: tensor.contiguous().clone() for name, tensor in served.extra.items()}
        facts = as_tensor(json.dumps(served.facts).encode())  # too much, maybe, for the header
        _write(self.folder / FILE, {"x": server.x, "facts": facts, **extra}, about)
        journal.sweep(self.folder, place)
        self._last = served, place

    def _journalled(self, served: Served) -> Place:
        """Adds what has changed, or begins anew where nothing is known of what has been."""
        last, self._last = self._last, None  # if this fails, what it has added must not count later
        if last and _follows(served.server.stamp, last[0].server.stamp):
            return journal.add(self.folder, last[1], _lines(served, last[0]))
        return journal.begin(self.folder, _lines(served, Served(Server(None))))


def _follows(now: Stamp, before: Stamp) -> bool:
    """Within a generation each state follows from those before, and has all of their clients."""
    return now.generation == before.generation and now.number >= before.number


def _lines(now: Served, before: Served) -> list[Any]:
    """A line for each client of which something has changed."""
    changed = now.server.applied.since(before.server.applied) | now.clients.since(before.clients)
    return [(who, now.server.applied[who], now.clients[who]) for who in changed]


def _clients(lines: list[Any]) -> tuple[Table[Mark], Table[Known]]:
    """Of each client the last line counts."""
    applied = {who: Mark(Stamp(*stamp), *rest) for who, (stamp, *rest), _ in lines}
    return Table(applied), Table({who: Known(*known) for who, _, known in lines})


def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    about = {"format": FORMATS[about["kind"]], **about}
    about = json.loads(json.dumps(about))  # as it will be read, names as text
    save_tensors(tensors, path, {**about, "checksum": _checksum(tensors, about)})


def _read(path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors, about = read_tensors(path)
        if about.pop("checksum") != _checksum(tensors, about):
            raise ValueError("its checksum is wrong")
    except UNREADABLE as error:
        raise InputError(f"{path} is damaged ({error}); {remedy}") from None
    return {name: tensor.clone() for name, tensor in tensors.items()}, about


def _checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> int:
    """A single number, such as BatchNorm's counter, has no bytes to look at before it is a vector."""
    return checksum({name: tensor.reshape(tensor.shape or (1,)) for name, tensor in tensors.items()}, about)


def _check(path: Path, about: dict[str, Any], wanted: dict[str, Any], layout: Layout) -> None:
    for name, value in wanted.items():
        if about.get(name) != value:
            raise InputError(f"{path} is of another {name}: {about.get(name)!r}, here {value!r}")
    if about.get("format") != FORMATS[wanted["kind"]]:
        raise InputError(
            f"{path} is of another format: {about.get('format')}, here {FORMATS[wanted['kind']]}; "
            "go on with the version of cfedavg that wrote it, or start another federation"
        )
    if about["layout"] != layout.text:
        found = Layout.from_text(about["layout"]).difference(layout) or "the arrays are in another order"
        raise OtherModel(f"{path} is of another model: in that of now {found}")


def _short(name: str) -> str:
    """A folder's name for any name: keys are long, and hold characters that mean something to a disk."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def as_tensor(message: bytes) -> Tensor:
    """Bytes, as they lie in a file of tensors."""
    return torch.from_numpy(np.frombuffer(message, np.uint8).copy())
