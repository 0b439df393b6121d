"""A small replica for the tests of versions: a few whole numbers that only the whole history leads to."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence

from cfedavg.federate.protocol import Broadcast, Changes, Version, Whole, compute_digest
from cfedavg.federate.server import Primary
from cfedavg.wire import WireError

D = 5
_ITEM = struct.Struct("<BQ")
W = tuple[int, ...]
ZERO: W = (0,) * D


def pack_items(items: Iterable[tuple[int, int]]) -> bytes:
    return b"".join(_ITEM.pack(index, value % 2**64) for index, value in items)


def unpack_items(message: bytes) -> list[tuple[int, int]]:
    if len(message) % _ITEM.size:
        raise WireError("half a coordinate")
    return list(_ITEM.iter_unpack(message))


class Coordinates:
    """Adds, sets or replaces coordinates."""

    def apply(self, w: W, messages: Sequence[bytes]) -> W:
        after = list(w)
        for message in messages:
            for index, value in unpack_items(message):
                after[index] += value
        return tuple(after)

    def change(self, w: W, message: bytes) -> W:
        after = list(w)
        for index, value in unpack_items(message):
            after[index] = value
        return tuple(after)

    def replace(self, message: bytes) -> W:
        return self.change(ZERO, message)

    def digest(self, w: W) -> int:
        return compute_digest(repr(w).encode())


REPLICA = Coordinates()


def draw_message(chance: random.Random) -> bytes:
    """A change of some coordinates, maybe of none, by numbers that do not come twice."""
    indices = chance.sample(range(D), chance.randint(0, 3))
    return pack_items((index, chance.getrandbits(40) + 1) for index in indices)


def advance(primary: Primary, message: bytes, most: int = 64) -> Primary:
    return primary.advance(message, REPLICA.apply(primary.w, [message]), most=most)


def whole_of(primary: Primary) -> Whole:
    return Whole(pack_items(enumerate(primary.w)), primary.version, REPLICA.digest(primary.w))


def changes_of(primary: Primary, since: Version) -> Changes:
    chain = primary.chain(since)
    assert chain is not None
    indices = {index for message in chain.messages for index, _ in unpack_items(message)}
    message = pack_items((index, primary.w[index]) for index in sorted(indices))
    versions = primary.versions[primary.versions.index(since) : -1]
    return Changes(versions, message, primary.version, REPLICA.digest(primary.w))


def kinds(primary: Primary, since: Version) -> list[Broadcast]:
    """Every broadcast that leads from this version to the last one."""
    chain = primary.chain(since)
    assert chain is not None
    more = [changes_of(primary, since)] if since != primary.version else []
    return [chain, whole_of(primary), *more]
