"""The server's half of the protocol, without I/O: see `protocol` for the rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cfedavg.federate.primary import Primary
from cfedavg.federate.protocol import FIRST, Mark, Request, Stamp
from cfedavg.federate.table import Table
from cfedavg.federate.versions import Broadcast, Version


@dataclass(frozen=True)
class Server:
    """What a server keeps, durably, in one piece."""

    x: Any
    t: int = 0
    stamp: Stamp = FIRST  # of the present round; no reply to another is taken
    applied: Table[Mark] = field(default_factory=Table)  # of each client, its last answer in x
    primary: Primary | None = None  # the copy that all clients hold, where broadcasts are compressed


def restored(server: Server, generation: int, digest: int | None = None) -> Server:
    """From an old backup, whose numbers have been used since: to be stored before the first dispatch.

    A server with a primary needs the digest of its w. All clients need the whole model then.
    """
    if generation <= server.stamp.generation:
        raise ValueError(f"generation {generation} is not above {server.stamp.generation}")
    if (digest is None) != (server.primary is None):
        raise ValueError("a digest must be given for a server with a primary, and for no other")
    primary = server.primary and server.primary.restart(generation, digest or 0)
    return replace(server, stamp=Stamp(generation, 1), primary=primary)


def request_of(server: Server, client: str, broadcast: Broadcast | None = None) -> Request:
    """What to send to a client in this round."""
    return Request(server.stamp, server.t, server.applied.get(client), broadcast)


def held_version(server: Server, client: str, told: Version | None = None) -> Version | None:
    """Return the newest version that a client is known to hold; None if none in the history is known.

    An answer in the model was durable in one step with the copy that it was made from, and rounds and
    numbers go together in a generation. `told` is what the client last told in a reply; the driver may
    forget it.
    """
    if server.primary is None:
        return None
    mark, known = server.applied.get(client), list[Version]()
    if mark is not None and mark.stamp.generation == server.stamp.generation:
        version = server.primary.at(server.t - server.stamp.number + mark.stamp.number)
        known += [] if version is None else [version]
    if told in server.primary.versions:
        known.append(told)
    return max(known, default=None)


def objection(
    server: Server, asked: Collection[str], taken: Collection[str], client: str, stamp: Stamp
) -> str:
    """Why a reply is not to be taken; empty if it is."""
    if client not in asked:
        return "not asked"
    if stamp != server.stamp:
        return "late"
    return "repeated" if client in taken else ""


def ended(
    server: Server, taken: Mapping[str, Mark], x_next: Any, primary_next: Primary | None = None
) -> Server:
    """After a round, with the answers of `taken` in x_next: to be stored before anything is made from it.

    A client that has answered has dealt with all that was before, so its last answer is all it may hold.
    A server with a primary needs the next one: see `Primary.advance`.
    """
    stamp = Stamp(server.stamp.generation, server.stamp.number + 1)
    found = primary_next and primary_next.version[:2]
    if found != (server.primary and (stamp.generation, server.t + 1)):
        raise ValueError(f"the primary after round {server.t} must be of the round after it, got {found}")
    return Server(x_next, server.t + 1, stamp, server.applied | taken, primary_next)
