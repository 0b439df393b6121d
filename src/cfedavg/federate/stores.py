"""The states of clients and servers on disk.

A client's state is one file. A server's state is a state file and a journal. The journal is a file of lines
about clients, and the last line about a client is the valid one. After a round, the server adds a line for
each client that took part. So the cost of a round does not grow with the number of clients known before.

The state file holds a Place: it says which journal is valid, and how many bytes of the journal count. If a
process is killed before it stores the Place, the lines that it wrote last do not count. No other process
writes to that journal again, because every process begins its own journal. A process also begins a new
journal when most lines are outdated. It removes the old journal after the state file refers to the new one.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import secrets
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cfedavg.core.files import append, read_file, sync, write_atomic
from cfedavg.core.layout import Layout
from cfedavg.federate.client import Client, LastAnswer
from cfedavg.federate.protocol import (
    NEVER,
    Copy,
    Mark,
    Stamp,
    Version,
    compute_digest,
    list_versions,
    split_messages,
)
from cfedavg.federate.server import KnownClient, Primary, Server, ServerState, Table
from cfedavg.federate.state_file import (
    COPY,
    OtherCopy,
    StateStore,
    as_array,
    check_integer,
    check_integers,
    check_list,
    check_table,
    check_text,
    check_vector,
)

EXTRA = "extra."  # the prefix of the names of the caller's tensors
GROWTH = 4  # the server begins a new journal when the journal is this many times as long as at first
SHORT = 65_536  # bytes: a journal that was shorter at first counts as this long
_JOURNAL = re.compile(r"clients\.(\d+)\.jsonl")
_DTYPES = ("float32", "int16")  # of a model copy: numbers, or the bits of bf16
_DEEPER = 50  # levels by which the call stack may be deeper when facts are written than when they are read
_POSITIVE, _32_BITS, _63_BITS, _64_BITS = range(1, 2**32), range(2**32), range(2**63), range(2**64)
_STAMP, _VERSION = (_POSITIVE, _POSITIVE), (_POSITIVE, _32_BITS, _64_BITS)


class ClientStore(StateStore):
    """The folder that stores the state of one client of one federation.

    `identity` names the client. It must stay the same when the client's node restarts: the node's key will
    do, but a number that the network assigned to the node will not.
    """

    busy = "another process answers for this client, in {}"
    remedy = "move the file away to go on as a new client with an empty residual"

    def __init__(
        self, root: Path, federation: str, identity: str, layout: Layout, copy_dtype: str = "float32"
    ) -> None:
        # Names are hashed, because keys are long and hold characters that some file systems change.
        names = [hashlib.sha256(name.encode()).hexdigest()[:32] for name in (federation, identity)]
        owner = {"federation": federation, "identity": identity, "kind": "client"}
        super().__init__(root.joinpath(*names), owner, layout, copy_dtype)

    def fresh(self, copy: Copy | None = None) -> Client:
        """Return a new client with an empty residual and a random incarnation number.

        `copy` is the model copy of the client that this one replaces. The new client can keep that copy,
        because all copies of one version are equal.
        """
        return Client(secrets.randbits(63), np.zeros(self.layout.d, np.float32), copy=copy)

    def load(self) -> Client:
        """Return the stored client; a new client if none is stored."""
        if not self.path.exists():
            return self.fresh()
        with self.naming_damage():
            tensors, about = self._read()
            incarnation = check_integer("incarnation", about["incarnation"], 0, 2**63)
            forgotten = check_integer("forgotten", about["forgotten"], 0, 2**53)
            answered, confirmed = (
                Stamp(*check_integers(name, about[name], _32_BITS, _32_BITS)) for name in ("seen", "told")
            )
            pairs = check_list("agreed", about["agreed"])
            checked = (check_integers("agreed", pair, _POSITIVE, _32_BITS) for pair in pairs)
            agreed = {generation: number for generation, number in checked}  # noqa: C416 - pairs are lists
            memory, sent = check_vector("e", tensors.pop("e"), "float32", self.layout.d), None
            if about["sent"] is not None:
                message = check_vector("sent", tensors.pop("sent"), "uint8").tobytes()
                sent = LastAnswer(Stamp(*check_integers("sent", about["sent"], *_STAMP)), message)
            copy = self._take_copy(tensors, about["copy"])
            if tensors:
                raise ValueError(f"the file has an unknown tensor {reprlib.repr(min(tensors))}")
            if not agreed and (answered, sent) != (NEVER, None):
                raise ValueError("`agreed` must not be empty for a client that has answered a request")
            return Client(incarnation, memory, sent, answered, confirmed, forgotten, agreed, copy)

    def _take_copy(self, tensors: dict[str, np.ndarray], stored: Any) -> Copy | None:
        """Remove the model copy from `tensors` and return it; return None if it is missing or damaged.

        A client without a model copy keeps its residual, and needs the whole model.
        """
        if stored is None:
            return None
        *version, digest = check_integers(COPY, stored, *_VERSION, _64_BITS)
        w = tensors.pop(COPY)
        fits = w.dtype == self.copy_dtype and w.shape == (self.layout.d,) and compute_digest(w.data) == digest
        return Copy(Version(*version), w) if fits else None

    def save(self, client: Client) -> None:
        """Store the client's state durably, in one step."""
        tensors, copy = {"e": client.memory}, None
        if client.sent is not None:
            tensors["sent"] = as_array(client.sent.message)
        if client.copy is not None:
            tensors[COPY] = self._check_copy(client.copy.w)
            copy = [*client.copy.version, compute_digest(tensors[COPY].data)]
        about = {
            "incarnation": client.incarnation,
            "sent": client.sent and client.sent.stamp,
            "seen": client.answered,
            "told": client.confirmed,
            "forgotten": client.forgotten,
            "agreed": list(client.agreed.items()),
            "copy": copy,
        }
        self._write(tensors, about)


class Place(NamedTuple):
    """Which journal is valid (its number), how many of its bytes count, and the checksum of these bytes."""

    number: int
    length: int
    checksum: int


class ServerStore(StateStore):
    """The folder that stores the state of the server of one federation."""

    busy = "another server works in {}: wait until it ends, or give another `out`"
    remedy = "restore a backup of the whole folder and resume with `from_backup`, or start another federation"

    def __init__(self, folder: Path, federation: str, layout: Layout, copy_dtype: str = "float32") -> None:
        super().__init__(folder, {"federation": federation, "kind": "server"}, layout, copy_dtype)
        self._last: tuple[ServerState, Place] | None = None  # the state that this store saved last
        self._compact = 0  # the length of the journal in bytes when this store began it

    def load(self) -> ServerState | None:
        """Return the stored state; None if no state is stored."""
        if not self.path.exists():
            return None
        with self.naming_damage():
            tensors, about = self._read()
            t = check_integer("t", about["t"], 0, 2**32)
            numbers = range(1, min(t + 2, 2**32))
            stamp = Stamp(*check_integers("stamp", about["stamp"], _POSITIVE, numbers))
            place = Place(*check_integers("clients", about["clients"], _63_BITS, _63_BITS, _63_BITS))
            applied, clients = self._read_journal(place, stamp)
            primary = self._take_primary(tensors, about["primary"])
            if primary and primary.version[:2] != (stamp.generation, t):
                raise ValueError(
                    f"the model copy w must be of version {stamp.generation}.{t}, got {primary.version}"
                )
            x = check_vector("x", tensors.pop("x"), "float32", self.layout.d)
            for name, vector in {"x": x, "w": primary.w if primary else x}.items():
                if not np.isfinite(vector).all():
                    raise ValueError(f"{name} must be finite, but holds NaN or Inf")
            facts = _read_facts(check_vector("facts", tensors.pop("facts"), "uint8").tobytes())
            if foreign := [name for name in tensors if not name.startswith(EXTRA)]:
                raise ValueError(f"the file has an unknown tensor {reprlib.repr(min(foreign))}")
            extra = {name.removeprefix(EXTRA): tensor for name, tensor in tensors.items()}
            return ServerState(Server(x, t, stamp, applied, primary), clients, extra, facts)

    def _take_primary(self, tensors: dict[str, np.ndarray], stored: Any) -> Primary | None:
        """Remove the model copy and its messages from `tensors`; return both, or None if there is no copy."""
        if stored is None:
            return None
        check_table("primary", stored)
        w = tensors.pop("w")
        if w.dtype in _DTYPES and w.dtype != self.copy_dtype:
            raise OtherCopy(
                f"model copy w must be a vector of {self.layout.d} {self.copy_dtype} values, got {w.dtype}"
            )
        data = check_vector("messages", tensors.pop("messages"), "uint8").tobytes()
        lengths = check_list("lengths", stored["lengths"])
        messages = split_messages(data, check_integers("lengths", lengths, *len(lengths) * [_63_BITS]))
        start, last = (Version(*check_integers(key, stored[key], *_VERSION)) for key in ("start", "version"))
        versions = list_versions(start, messages)
        if versions[-1] != last:
            raise ValueError("the stored messages do not lead to the stored version of the model copy")
        return Primary(self._check_copy(w), versions, messages)

    def save(self, state: ServerState) -> None:
        """Store the state durably. Of the clients, write only those that changed since the last save."""
        server, place, primary = state.server, self._write_journal(state), None
        facts = as_array(json.dumps(state.facts).encode())  # too long for the file's header
        extra = {EXTRA + name: np.array(tensor) for name, tensor in state.extra.items()}
        tensors = {"x": server.x, "facts": facts, **extra}
        if held := server.primary:
            tensors |= {"w": self._check_copy(held.w), "messages": as_array(b"".join(held.messages))}
            lengths = [len(message) for message in held.messages]
            primary = {"start": held.versions[0], "version": held.version, "lengths": lengths}
        self._write(tensors, {"t": server.t, "stamp": server.stamp, "clients": place, "primary": primary})
        for number, path in self._find_journals().items():  # the stored state refers to none of the others
            if number != place.number:
                with suppress(OSError):
                    path.unlink()
        self._last = state, place

    def _write_journal(self, state: ServerState) -> Place:
        """Write the clients that changed to the journal, or all clients to a new journal; return the Place.

        Begin a new journal if this store has begun none, or if the journal is more than GROWTH times as long
        as at first. So the mean cost of a round does not grow.
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
                path = self._journal(place.number)
                append(path, data)
                sync(path)
                return Place(place.number, place.length + len(data), zlib.crc32(data, place.checksum))
        data = _encode_clients(state, ServerState(Server(None)))
        number, self._compact = 1 + max(self._find_journals(), default=0), len(data)
        write_atomic(self._journal(number), data)
        return Place(number, len(data), zlib.crc32(data))

    def _read_journal(self, place: Place, before: Stamp) -> tuple[Table[Mark], Table[KnownClient]]:
        """Return the mark (the name of the last answer) and the record of each client.

        `before` is the stamp of the present round. Raise ValueError or OSError if the journal is damaged, or
        if it names an answer that is not older than `before`.
        """
        path = self._journal(place.number)
        data = read_file(path)[: place.length]
        if len(data) != place.length or zlib.crc32(data) != place.checksum:
            raise ValueError(f"the journal {path.name} is too short or has a wrong checksum")
        applied, clients = dict[str, Mark](), dict[str, KnownClient]()
        for line in data.splitlines():
            who, mark, known = check_list("a client", json.loads(line), 3)
            check_text("a client's name", who)
            stamp, *numbers = check_list("a client's mark", mark, 3)
            found = Stamp(*check_integers("a client's stamp", stamp, *_STAMP))
            if found >= before:
                raise ValueError(f"the stamp of a client's answer must be before {before}, got {found}")
            applied[who] = Mark(found, *check_integers("a client's mark", numbers, _63_BITS, _64_BITS))
            met, note = check_list("a client", known, 2)
            clients[who] = KnownClient(check_integer("a client's incarnations", met, 1, 2**53), note)
        return Table(applied), Table(clients)

    def _journal(self, number: int) -> Path:
        return self.folder / f"clients.{number}.jsonl"

    def _find_journals(self) -> dict[int, Path]:
        found = ((_JOURNAL.fullmatch(path.name), path) for path in self.folder.glob("clients.*.jsonl"))
        return {int(match[1]): path for match, path in found if match}


def _encode_clients(now: ServerState, before: ServerState) -> bytes:
    """Return a journal line for each client that changed between the states `before` and `now`."""
    changed = now.server.applied.since(before.server.applied) | now.clients.since(before.clients)
    lines = [(who, now.server.applied[who], now.clients[who]) for who in changed]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def _read_facts(data: bytes) -> dict[str, Any]:
    """Return the caller's facts from JSON text; raise ValueError if they are nested too deeply."""
    facts = value = json.loads(data)
    for _ in range(_DEEPER):
        value = [value]
    try:
        json.dumps(value)
    except RecursionError:
        raise ValueError("the stored facts are nested too deeply") from None
    return check_table("facts", facts)
