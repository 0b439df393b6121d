"""What a client must not lose, on disk: one file, whole or not there, with a checksum.

A client's state is kept by federation and identity. The identity is the node's key, or what else stays the
same when a node restarts; never a number that the network gave it.
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cfedavg.core.files import lock_folder, make_folder
from cfedavg.core.layout import Layout
from cfedavg.federate import checks
from cfedavg.federate.client import Client, Sent
from cfedavg.federate.copy_state import CopyForm
from cfedavg.federate.protocol import NEVER
from cfedavg.federate.state_file import (
    FILE,
    as_array,
    check_owner,
    name_damage,
    read_state,
    shorten,
    write_state,
)
from cfedavg.federate.versions import Copy


class ClientStore:
    """The state of one client of one federation, for a model of this layout.

    `copy_dtype` is how a copy lies on the disk: "int16" for the bits of bf16, with 2 bytes a number.
    """

    def __init__(
        self, root: Path, federation: str, identity: str, layout: Layout, copy_dtype: str = "float32"
    ) -> None:
        self.folder = root / shorten(federation) / shorten(identity)
        self.layout, self.about = layout, {"federation": federation, "identity": identity}
        self.copy_form = CopyForm(layout.d, copy_dtype)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time answers for a client."""
        make_folder(self.folder, "the client's state")
        with lock_folder(self.folder, f"another process answers for this client, in {self.folder}"):
            yield

    def load(self) -> Client:
        """What is on the disk; a client without anything there starts anew, and says so by its number."""
        path = self.folder / FILE
        if not path.exists():
            return self.fresh()
        with self.naming_damage():
            tensors, about = read_state(path)
            check_owner(path, about, self.about | {"kind": "client"}, self.layout)
            copy = self.copy_form.read_copy(tensors, about)
            return replace(_client(tensors, about, self.layout.d), copy=copy)

    @contextmanager
    def naming_damage(self) -> Iterator[None]:
        """Make one sentence of whatever shows that the state is damaged."""
        with name_damage(self.folder / FILE, "move it away to go on as a new client, without its residual"):
            yield

    def fresh(self, copy: Copy | None = None) -> Client:
        """A client without a past: its number was never drawn before.

        It may keep the copy of the client before it, since the version of a copy says all about it.
        """
        return Client(secrets.randbits(63), np.zeros(self.layout.d, np.float32), copy=copy)

    def save(self, client: Client) -> None:
        """Makes the state durable."""
        tensors = {"e": client.memory}
        if client.sent is not None:
            tensors["sent"] = as_array(client.sent.message)
        about = self.about | {
            "kind": "client",
            "layout": self.layout.text,
            "incarnation": client.incarnation,
            "sent": client.sent and client.sent.stamp,
            "seen": client.seen,
            "told": client.told,
            "forgotten": client.forgotten,
            "agreed": list(client.agreed.items()),
            "copy": self.copy_form.describe_copy(client.copy),
        }
        write_state(self.folder / FILE, tensors | self.copy_form.tensors(client.copy), about)


def _client(tensors: dict[str, np.ndarray], about: dict[str, Any], d: int) -> Client:
    """What `ClientStore.save` stored; ValueError unless it can have."""
    e, sent = checks.vector("e", tensors.pop("e"), "float32", d), None
    if about["sent"] is not None:
        message = checks.vector("sent", tensors.pop("sent"), "uint8").tobytes()
        sent = Sent(checks.stamp("sent", about["sent"]), message)
    if tensors:
        raise ValueError(f"it has one tensor too many, {reprlib.repr(min(tensors))}")
    seen, told = (checks.stamp(name, about[name], least=0) for name in ("seen", "told"))
    pairs = [checks.listed("agreed", pair, 2) for pair in checks.listed("agreed", about["agreed"])]
    agreed = {
        checks.whole("agreed", generation, 1, 2**32): checks.whole("agreed", number, 0, 2**32)
        for generation, number in pairs
    }
    if not agreed and (seen, sent) != (NEVER, None):
        raise ValueError("agreed must not be empty after an answer")
    incarnation = checks.whole("incarnation", about["incarnation"], 0, 2**63)
    forgotten = checks.whole("forgotten", about["forgotten"], 0, 2**53)
    return Client(incarnation, e, sent, seen, told, forgotten, agreed)
