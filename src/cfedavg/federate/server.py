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

MOST_BYTES = 2**26  # the most bytes that all messages in a history have
V = TypeVar("V")


class Table(Mapping[str, V], Generic[V]):
    """An immutable mapping that is cheap to extend: a server knows many clients, and few answer in a round.

    `table | more` makes a new table. Its mean cost depends on the length of `more`, not on that of `table`. A
    table is a stack of dicts, in which an upper dict overrides the lower ones. The new table shares dicts
    with the old table. Each dict is more than twice as large as the dict above it. So an entry is copied
    only once each time the table doubles.

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
        """Return the entries that are new or changed since `before`, a table that this one extends."""
        shared = {id(layer) for layer in before._layers}
        new = [name for layer in self._layers if id(layer) not in shared for name in layer]
        return {name: self[name] for name in new if name not in before or before[name] != self[name]}


@dataclass(frozen=True)
class Primary:
    """The server's model copy w, which the clients' model copies follow, and its history.

    The history is a list of versions and of messages. messages[i] changed the model copy from versions[i] to
    versions[i + 1].
    """

    w: Any
    versions: tuple[Version, ...]  # oldest first; the last is the version of w
    messages: tuple[bytes, ...] = ()

    @classmethod
    def begin(cls, w: Any, generation: int, round: int, digest: int) -> Primary:
        """Return a Primary of model copy `w`, with no messages yet; `digest` is the digest of `w`."""
        return cls(w, (make_first_version(generation, round, digest),))

    @property
    def version(self) -> Version:
        """The version of w."""
        return self.versions[-1]

    def advance(
        self, message: bytes, w_next: Any, *, most: int = KEPT, most_bytes: int = MOST_BYTES
    ) -> Primary:
        """Return the Primary after a round, in which `message` changed the model copy to `w_next`.

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
        """Return the version of the model copy after `round` rounds; None if the history lacks it."""
        index = round - self.versions[0].round
        return self.versions[index] if 0 <= index < len(self.versions) else None

    def chain(self, version: Version | None) -> Chain | None:
        """Return a broadcast of all messages since `version`; None if the history lacks `version`."""
        if version not in self.versions:
            return None
        return Chain(version, self.messages[self.versions.index(version) :], self.version)


@dataclass(frozen=True)
class Server:
    """The state of a server. It is stored in one step, so that a restarted server can continue."""

    x: Any  # the model
    t: int = 0  # rounds done
    stamp: Stamp = FIRST  # names the requests of the present round; replies to other stamps are refused
    applied: Table[Mark] = field(default_factory=Table)  # each client's last answer that x holds
    primary: Primary | None = None  # the model copy that clients follow, if broadcasts are compressed


def new_generation(server: Server) -> int:
    """Return the generation of a server that restores a backup: a number above all generations used before.

    The generation is the present time in seconds. So it is above the generations of all earlier restores,
    unless one was in the same second or the clock was set back. A message has 32 bits for the generation,
    which is enough until the year 2106.

    A node accepts a generation that is at most AHEAD seconds above the node's clock, and then refuses all
    lower ones. So a node that has accepted a forged generation may refuse the present time. A second restore
    within AHEAD seconds helps: it takes the present time plus AHEAD, which is above all generations that a
    node can have accepted. A first restore does not do so, because nodes with slow clocks would refuse it.
    """
    now = int(time.time())
    again = server.stamp.generation > now - AHEAD
    generation = max(server.stamp.generation + 1, now + AHEAD if again else now)
    if generation >= 2**32:
        raise InputError(
            f"the generation (a time) must be below 2^32, got {generation}: start another federation"
        )
    return generation


def restore_backup(server: Server, generation: int, digest: int | None = None) -> Server:
    """Return the state with which a server continues from a backup. Store it before you send any request.

    The stamps of the rounds after the backup were used already. So the server needs a higher generation. If
    the server keeps a model copy w (`server.primary`), `digest` must be the digest of w, and all clients will
    need the whole model.
    """
    if generation <= server.stamp.generation:
        raise ValueError(f"`generation` must be above {server.stamp.generation}, got {generation}")
    if (digest is None) != (server.primary is None):
        raise ValueError("`digest` must be given if the server keeps a model copy, else it must be None")
    primary = server.primary and Primary.begin(server.primary.w, generation, server.t, digest or 0)
    return replace(server, stamp=Stamp(generation, 1), primary=primary)


def make_request(server: Server, client: str, broadcast: Broadcast | None = None) -> Request:
    """Return the request to a client to train in the present round."""
    return Request(server.stamp, server.t, server.applied.get(client), broadcast)


def find_held_version(server: Server, client: str, reported: Version | None = None) -> Version | None:
    """Return the newest version of the model copy that a client is known to hold; None if none is known.

    There are two sources. The first is `reported`: the version in the client's last reply, None if the caller
    does not know it. The second is the client's last answer that the model holds. A client stores each answer
    in one step with the model copy from which it trained. So the client holds the version of that round, or a
    newer one. The number in the answer's stamp tells the round, because number and round rise together.
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
    """Return why the server refuses a reply to the request `stamp`; an empty text if it accepts the reply.

    `asked` are the clients that got a request in this round, `taken` those whose replies were accepted.
    """
    if client not in asked:
        return "not asked"
    if stamp != server.stamp:
        return "late"
    return "repeated" if client in taken else ""


def end_round(
    server: Server, taken: Mapping[str, Mark], x_next: Any, primary_next: Primary | None = None
) -> Server:
    """Return the server's state after a round, with model `x_next`, which holds the answers in `taken`.

    Store the state before you send anything made from it. The state lists only the last answer of each
    client, because a client answers only after it has settled its earlier answers. If the server keeps a
    model copy, `primary_next` is the model copy after the round: see `Primary.advance`.
    """
    stamp = Stamp(server.stamp.generation, server.stamp.number + 1)
    found = primary_next and primary_next.version[:2]
    if found != (server.primary and (stamp.generation, server.t + 1)):
        rule = "None for a server without a model copy"
        if server.primary:
            rule = f"a model copy of generation {stamp.generation} and round {server.t + 1}"
        raise ValueError(f"`primary_next` must be {rule}, got {found}")
    return Server(x_next, server.t + 1, stamp, server.applied | taken, primary_next)


class KnownClient(NamedTuple):
    """What a server stores about a client: how many of its incarnations have answered, and the caller's note.

    A client begins a new incarnation when it has lost its state or must start anew.
    """

    incarnations: int
    note: Any = None  # a JSON value that the caller gave in the client's last round


@dataclass(frozen=True)
class ServerState:
    """All that a server stores: its state, a record of each client that answered, and data of the caller."""

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
        """Return the state after a round with the answers `taken` and the caller's notes on their clients."""
        known = {}
        for who, mark in taken.items():
            last, met = self.server.applied.get(who), self.clients.get(who, KnownClient(0)).incarnations
            is_new = last is None or mark.incarnation != last.incarnation
            known[who] = KnownClient(met + is_new, (notes or {}).get(who))
        server = end_round(self.server, taken, x_next, primary_next)
        return replace(self, server=server, clients=self.clients | known)
