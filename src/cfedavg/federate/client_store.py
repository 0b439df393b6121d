"""The client's state on disk: one file with a checksum, which is replaced in one step.

Each federation and identity has its own folder. The identity is the node's key, or another name that stays
the same when the node restarts. It must not be a number that the network gave the node.
"""

from __future__ import annotations

import hashlib
import reprlib
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from cfedavg.core.layout import Layout
from cfedavg.federate.client import Client, LastAnswer
from cfedavg.federate.protocol import NEVER
from cfedavg.federate.state_file import (
    StateStore,
    as_array,
    check_integer,
    check_list,
    check_stamp,
    check_vector,
)
from cfedavg.federate.versions import Copy


class ClientStore(StateStore):
    """The folder that stores the state of one client of one federation."""

    busy = "another process answers for this client, in {}"
    remedy = "move the file away to go on as a new client with an empty residual"

    def __init__(
        self, root: Path, federation: str, identity: str, layout: Layout, copy_dtype: str = "float32"
    ) -> None:
        # Names are hashed, because keys are long and hold characters that some file systems change.
        names = [hashlib.sha256(name.encode()).hexdigest()[:32] for name in (federation, identity)]
        owner = {"federation": federation, "identity": identity, "kind": "client"}
        super().__init__(root.joinpath(*names), owner, layout, copy_dtype)

    def load(self) -> Client:
        """Return the stored client; a new client if none is stored."""
        if not self.path.exists():
            return self.fresh()
        with self.naming_damage():
            tensors, about = self._read()
            copy = self.copy_form.read_copy(tensors, about)
            return _read_client(tensors, about, self.layout.d, copy)

    def fresh(self, copy: Copy | None = None) -> Client:
        """Return a new client with an empty residual and a random incarnation number.

        The new client may keep the model copy of the client before, since copies of one version are equal.
        """
        return Client(secrets.randbits(63), np.zeros(self.layout.d, np.float32), copy=copy)

    def save(self, client: Client) -> None:
        """Store the client's state durably, in one step."""
        tensors = {"e": client.memory}
        if client.sent is not None:
            tensors["sent"] = as_array(client.sent.message)
        about = {
            "incarnation": client.incarnation,
            "sent": client.sent and client.sent.stamp,
            "seen": client.answered,
            "told": client.confirmed,
            "forgotten": client.forgotten,
            "agreed": list(client.agreed.items()),
            "copy": self.copy_form.describe_copy(client.copy),
        }
        self._write(tensors | self.copy_form.tensors(client.copy), about)


def _read_client(tensors: dict[str, np.ndarray], about: dict[str, Any], d: int, copy: Copy | None) -> Client:
    """Return the client that a file holds; raise ValueError if `ClientStore.save` cannot have made it."""
    e, sent = check_vector("e", tensors.pop("e"), "float32", d), None
    if about["sent"] is not None:
        message = check_vector("sent", tensors.pop("sent"), "uint8").tobytes()
        sent = LastAnswer(check_stamp("sent", about["sent"]), message)
    if tensors:
        raise ValueError(f"it has an unknown tensor {reprlib.repr(min(tensors))}")
    seen, told = (check_stamp(name, about[name], least=0) for name in ("seen", "told"))
    pairs = [check_list("agreed", pair, 2) for pair in check_list("agreed", about["agreed"])]
    agreed = {
        check_integer("agreed", generation, 1, 2**32): check_integer("agreed", number, 0, 2**32)
        for generation, number in pairs
    }
    if not agreed and (seen, sent) != (NEVER, None):
        raise ValueError("agreed must not be empty for a client that has answered")
    incarnation = check_integer("incarnation", about["incarnation"], 0, 2**63)
    forgotten = check_integer("forgotten", about["forgotten"], 0, 2**53)
    return Client(incarnation, e, sent, seen, told, forgotten, agreed, copy)
