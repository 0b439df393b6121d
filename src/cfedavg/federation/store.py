"""What client and server must not lose, on disk: each state is one file, whole or not there, with a checksum.

A client's state is kept by federation and identity. The identity is the node's key, or what else stays the
same when a node restarts; never a number that the network gave it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfedavg.errors import InputError
from cfedavg.federation.protocol import Client, Server, Stamp
from cfedavg.files import make_folder
from cfedavg.layout import Layout
from cfedavg.tensors import UNREADABLE, checksum, read_tensors, save_tensors

FORMAT = 1
FILE = "state.safetensors"


@dataclass(frozen=True)
class Kept:
    """A client's state and its incarnation: a number drawn when there was none on the disk."""

    client: Client
    incarnation: int


class ClientStore:
    """The state of one client of one federation, for a model of this layout."""

    def __init__(self, root: Path, federation: str, identity: str, layout: Layout) -> None:
        self.folder = root / _short(federation) / _short(identity)
        self.layout, self.about = layout, {"federation": federation, "identity": identity}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time answers for a client."""
        make_folder(self.folder, "the client's state")
        with _locked(self.folder, f"another process answers for this client, in {self.folder}"):
            yield

    def load(self) -> Kept:
        """What is on the disk; a client without anything there starts anew, and says so by its number."""
        path = self.folder / FILE
        if not path.exists():
            return Kept(Client(torch.zeros(self.layout.d)), secrets.randbits(63))
        tensors, about = _read(path, "move it away to go on as a new client, without its residual")
        _check(path, about, self.about | {"kind": "client", "schema": self.layout.schema_hash})
        log = {_stamp(name): tensor.numpy().tobytes() for name, tensor in tensors.items() if name != "e"}
        client = Client(tensors["e"], log, Stamp(*about["seen"]), Stamp(*about["told"]), about["forgotten"])
        return Kept(client, about["incarnation"])

    def save(self, kept: Kept) -> None:
        """Makes the state durable."""
        client = kept.client
        messages = {_name(stamp): _bytes(message) for stamp, message in client.log.items()}
        about = self.about | {
            "kind": "client",
            "schema": self.layout.schema_hash,
            "incarnation": kept.incarnation,
            "seen": client.seen,
            "told": client.told,
            "forgotten": client.forgotten,
        }
        _write(self.folder / FILE, {"e": client.e, **messages}, about)


@dataclass(frozen=True)
class Served:
    """A server's state, and the incarnations of the clients that it has met."""

    server: Server
    met: dict[str, list[int]] = field(default_factory=dict)

    def meets(self, client: str, incarnation: int) -> Served:
        """With this incarnation among those of the client."""
        known = self.met.get(client, [])
        if incarnation in known:
            return self
        return Served(self.server, {**self.met, client: [*known, incarnation]})


class ServerStore:
    """The state of the server of one federation."""

    def __init__(self, folder: Path, federation: str, layout: Layout) -> None:
        self.folder, self.layout, self.about = folder, layout, {"federation": federation}

    @contextmanager
    def locked(self) -> Iterator[None]:
        make_folder(self.folder, "the server's state")
        with _locked(self.folder, f"another server works in {self.folder}"):
            yield

    def load(self) -> Served | None:
        """What is on the disk; None if nothing is."""
        path = self.folder / FILE
        if not path.exists():
            return None
        tensors, about = _read(path, "restore a backup, with a new generation, or start another federation")
        _check(path, about, self.about | {"kind": "server", "schema": self.layout.schema_hash})
        applied = {client: Stamp(*stamp) for client, stamp in about["applied"].items()}
        server = Server(tensors["x"], about["t"], Stamp(*about["stamp"]), applied)
        return Served(server, about["met"])

    def save(self, served: Served) -> None:
        """Makes the state durable."""
        server = served.server
        about = self.about | {
            "kind": "server",
            "schema": self.layout.schema_hash,
            "t": server.t,
            "stamp": server.stamp,
            "applied": dict(server.applied),
            "met": served.met,
        }
        _write(self.folder / FILE, {"x": server.x}, about)


@contextmanager
def _locked(folder: Path, sentence: str) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(sentence) from None
        yield
    finally:
        os.close(handle)


def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    about = {"format": FORMAT, **about}
    save_tensors(tensors, path, {**about, "checksum": checksum(tensors, about)})


def _read(path: Path, remedy: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors, about = read_tensors(path)
        if about.pop("checksum") != checksum(tensors, about):
            raise ValueError("its checksum is wrong")
    except UNREADABLE as error:
        raise InputError(f"{path} is damaged ({error}); {remedy}") from None
    return {name: tensor.clone() for name, tensor in tensors.items()}, about


def _check(path: Path, about: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in {"format": FORMAT, **wanted}.items():
        if about.get(name) != value:
            what = "model" if name == "schema" else name
            raise InputError(f"{path} is of another {what}: {about.get(name)!r}, here {value!r}")


def _short(name: str) -> str:
    """A folder's name for any name: keys are long, and hold characters that mean something to a disk."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _bytes(message: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(message, np.uint8).copy())


def _name(stamp: Stamp) -> str:
    return f"log.{stamp.generation}.{stamp.number}"


def _stamp(name: str) -> Stamp:
    _, generation, number = name.split(".")
    return Stamp(int(generation), int(number))
