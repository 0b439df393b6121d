"""What client and server must not lose, on disk: each state is one file, whole or not there, with a checksum.

A client's state is kept by federation and identity. The identity is the node's key, or what else stays the
same when a node restarts; never a number that the network gave it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfedavg.errors import InputError
from cfedavg.federation.protocol import Client, Mark, Sent, Server, Stamp
from cfedavg.files import locked, make_folder
from cfedavg.layout import Layout
from cfedavg.tensors import UNREADABLE, checksum, read_tensors, save_tensors

FORMAT = 3
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


@dataclass(frozen=True)
class Served:
    """A server's state, the incarnations of the clients that it has met, and what a driver keeps with it."""

    server: Server
    met: dict[str, list[int]] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # what JSON can say

    def meets(self, client: str, incarnation: int) -> Served:
        """With this incarnation among those of the client."""
        known = self.met.get(client, [])
        if incarnation in known:
            return self
        return replace(self, met={**self.met, client: [*known, incarnation]})


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
        tensors, about = _read(path, "restore a backup, with a new generation, or start another federation")
        _check(path, about, self.about | {"kind": "server"}, self.layout)
        applied = {client: Mark(Stamp(*stamp), *rest) for client, (stamp, *rest) in about["applied"].items()}
        server = Server(tensors.pop("x"), about["t"], Stamp(*about["stamp"]), applied)
        extra = {name.removeprefix(EXTRA): tensor for name, tensor in tensors.items()}
        return Served(server, about["met"], extra, about["facts"])

    def save(self, served: Served) -> None:
        """Makes the state durable."""
        server = served.server
        about = self.about | {
            "kind": "server",
            "layout": self.layout.text,
            "t": server.t,
            "stamp": server.stamp,
            "applied": dict(server.applied),
            "met": served.met,
            "facts": served.facts,
        }
        # Copies: a file takes neither views of one memory nor tensors with gaps.
        extra = {EXTRA + name: tensor.contiguous().clone() for name, tensor in served.extra.items()}
        _write(self.folder / FILE, {"x": server.x, **extra}, about)


def _write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    about = json.loads(json.dumps({"format": FORMAT, **about}))  # as it will be read, names as text
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
    for name, value in {"format": FORMAT, **wanted}.items():
        if about.get(name) != value:
            raise InputError(f"{path} is of another {name}: {about.get(name)!r}, here {value!r}")
    if about["layout"] != layout.text:
        found = Layout.from_text(about["layout"]).difference(layout) or "the arrays are in another order"
        raise OtherModel(f"{path} is of another model: in that of now {found}")


def _short(name: str) -> str:
    """A folder's name for any name: keys are long, and hold characters that mean something to a disk."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def as_tensor(message: bytes) -> Tensor:
    """Bytes, as they lie in a file of tensors."""
    return torch.from_numpy(np.frombuffer(message, np.uint8).copy())
