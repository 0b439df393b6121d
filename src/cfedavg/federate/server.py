"""The state machine of the server, without I/O. The docstring of `cfedavg.federate` states the rules."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from cfedavg.channel import KEPT
from cfedavg.core.errors import InputError
from cfedavg.federate.protocol import (
    AHEAD,
    FIRST,
    Broadcast,
    Chain,
    Mark,
    Request,
    Stamp,
    Version,
    make_first_version,
    make_next_version,
)

MOST_BYTES = 2**26  # of the messages in a history
V = TypeVar("V")


class Table(Mapping[str, V], Generic[V]):
    """An immutable mapping that is cheap to extend: a server knows many clients, and few answer in a round.

    `table | more` is a new table, at a cost that depends on `more` alone. A table is a stack of dicts,
    which tables share. Each dict is more than twice as large as the next one. An entry is copied once for
    every doubling.

    >>> first = Table({"a": 1, "b": 2})
    >>> second = first | {"b": 3}
    >>> first["b"], second["b"], len(second), second.since(first)
    (2, 3, 2, {'b': 3})
    """

    def __init__(self, entries: Mapping[str, V] | None = None) -> None:
        self._layers: tuple[dict[str, V], ...] = (dict(entries),) if entries else ()
        self._length = len(entries or {})

    def __or__(self, more: Mapping[str, V]) -> Table[V]:
        layers = [*self._layers, dict(more)]
        while len(layers) > 1 and len(layers[-2]) <= 2 * len(layers[-1]):
            upper = layers.pop()
            layers[-1] = layers[-1] | upper
        made: Table[V] = Table()
        made._layers = tuple(layers)
        made._length = self._length + sum(name not in self for name in more)
        return made

    def __getitem__(self, name: str) -> V:
        for layer in reversed(self._layers):
            if name in layer:
                return layer[name]
        raise KeyError(name)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for layer in self._layers for name in layer))

    def since(self, before: Table[V]) -> dict[str, V]:
        """Return the entries that are new or changed since table `before`, from which this table was made."""
        shared = {id(layer) for layer in before._layers}
        new = [name for layer in self._layers if id(layer) not in shared for name in layer]
        return {name: self[name] for name in new if name not in before or before[name] != self[name]}


@dataclass(frozen=True)
class Primary:
    """The server's model copy w, which all clients' copies follow, and its history.

    messages[i] leads from versions[i] to versions[i + 1].
    """

    w: Any
    versions: tuple[Version, ...]  # oldest first; the last is the version of w
    messages: tuple[bytes, ...] = ()

    @classmethod
    def begin(cls, w: Any, generation: int, round: int, digest: int) -> Primary:
        """Return model copy `w` without a history; `digest` is the digest of `w`."""
        return cls(w, (make_first_version(generation, round, digest),))

    @property
    def version(self) -> Version:
        """The version of w."""
        return self.versions[-1]

    def advance(
        self, message: bytes, w_next: Any, *, most: int = KEPT, most_bytes: int = MOST_BYTES
    ) -> Primary:
        """Return the model copy after the message of a round, which leads to `w_next`.

        Drop the oldest messages while there are more than `most`, or while they have more than `most_bytes`
        bytes in all. The newest message always stays.
        """
        messages = (*self.messages, message)
        versions = (*self.versions, make_next_version(self.version, message))
        first, size = 0, sum(map(len, messages))
        while len(messages) - first > max(1, most) or (size > most_bytes and first < len(messages) - 1):
            size -= len(messages[first])
            first += 1
        return Primary(w_next, versions[first:], messages[first:])

    def at(self, round: int) -> Version | None:
        """Return the version after `round` rounds; None if the history lacks that version."""
        index = round - self.versions[0].round
        return self.versions[index] if 0 <= index < len(self.versions) else None

    def chain(self, version: Version | None) -> Chain | None:
        """Return the messages from `version` to the present version; None if the history lacks `version`."""
        if version not in self.versions:
            return None
        return Chain(version, self.messages[self.versions.index(version) :], self.version)


@dataclass(frozen=True)
class Server:
    """The durable state of a server, stored in one step."""

    x: Any  # the model
    t: int = 0  # rounds done
    stamp: Stamp = FIRST  # of the present round; replies to other stamps are refused
    applied: Table[Mark] = field(default_factory=Table)  # each client's last answer in x
    primary: Primary | None = None  # the model copy that clients follow, if broadcasts are compressed


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


def restore_backup(server: Server, generation: int, digest: int | None = None) -> Server:
    """Return the state of a server that restores a backup. Store the state before the first dispatch.

    The stamp numbers after the backup were used already, so the server needs a higher generation. If the
    server has a primary (a model copy w), `digest` is the digest of w. All clients then need the whole model.
    """
    if generation <= server.stamp.generation:
        raise ValueError(f"`generation` must be above {server.stamp.generation}, got {generation}")
    if (digest is None) != (server.primary is None):
        raise ValueError("`digest` must be given if the server has a primary, and only then")
    primary = server.primary and Primary.begin(server.primary.w, generation, server.t, digest or 0)
    return replace(server, stamp=Stamp(generation, 1), primary=primary)


def make_request(server: Server, client: str, broadcast: Broadcast | None = None) -> Request:
    """Return the request to a client in the present round."""
    return Request(server.stamp, server.t, server.applied.get(client), broadcast)


def find_held_version(server: Server, client: str, reported: Version | None = None) -> Version | None:
    """Return the newest version of the history that a client is known to hold; None if none is known.

    A client stores its answer in one step with the model copy from which the answer was made. Within a
    generation, rounds and numbers rise together. So an answer in the model tells a version. `reported` is the
    version in the client's last reply; None if the caller does not know that version.
    """
    if server.primary is None:
        return None
    mark, known = server.applied.get(client), list[Version]()
    if mark is not None and mark.stamp.generation == server.stamp.generation:
        version = server.primary.at(server.t - server.stamp.number + mark.stamp.number)
        known += [] if version is None else [version]
    if reported in server.primary.versions:
        known.append(reported)
    return max(known, default=None)


def find_fault_in_reply(
    server: Server, asked: Collection[str], taken: Collection[str], client: str, stamp: Stamp
) -> str:
    """Return why the server refuses a reply; an empty text if it accepts the reply.

    `asked` are the clients that the round asked, `taken` those whose replies were accepted.
    """
    if client not in asked:
        return "not asked"
    if stamp != server.stamp:
        return "late"
    return "repeated" if client in taken else ""


def end_round(
    server: Server, taken: Mapping[str, Mark], x_next: Any, primary_next: Primary | None = None
) -> Server:
    """Return the server's state after a round. Model `x_next` holds the answers in `taken`.

    Store the state before sending anything made from it. A client that answered has settled all earlier
    answers, so the server keeps only the last answer of each client. A server with a primary needs
    `primary_next`: see `Primary.advance`.
    """
    stamp = Stamp(server.stamp.generation, server.stamp.number + 1)
    found = primary_next and primary_next.version[:2]
    if found != (server.primary and (stamp.generation, server.t + 1)):
        rule = f"of generation {stamp.generation} and round {server.t + 1}" if server.primary else "None"
        raise ValueError(f"`primary_next` must be {rule}, got {found}")
    return Server(x_next, server.t + 1, stamp, server.applied | taken, primary_next)


class KnownClient(NamedTuple):
    """A server's record of a client: how many incarnations of it have answered, and the caller's note."""

    incarnations: int
    note: Any = None  # a JSON value


@dataclass(frozen=True)
class ServerState:
    """A server, its records of the clients in its model, and the caller's tensors and facts."""

    server: Server
    clients: Table[KnownClient] = field(default_factory=Table)
    extra: dict[str, Any] = field(default_factory=dict)  # NumPy arrays
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
            last, met = self.server.applied.get(who), self.clients.get(who, KnownClient(0)).incarnations
            is_new = last is None or mark.incarnation != last.incarnation
            known[who] = KnownClient(met + is_new, (notes or {}).get(who))
        server = end_round(self.server, taken, x_next, primary_next)
        return replace(self, server=server, clients=self.clients | known)
