"""Copies of a real model: how messages change them, and which broadcast is the shortest for a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from cfedavg.channel import Copies, Downlink, choose_download, may_be_shorter
from cfedavg.compress import values_of
from cfedavg.core.arrays import Array, from_bf16, to_bf16
from cfedavg.core.keys import Purpose, key
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Payload
from cfedavg.federate.broadcast_format import pack
from cfedavg.federate.copy_kernels import add_all
from cfedavg.federate.primary import Primary
from cfedavg.federate.protocol import Stamp
from cfedavg.federate.versions import Broadcast, Chain, Changes, Version, Whole, digest_of
from cfedavg.wire import WireError, decode, encode

TOGETHER = 10  # messages that are decoded before they are added: a node has room for these


@dataclass(frozen=True)
class ModelReplica:
    """Copies of models of one layout, as they are kept: on the grid of bf16 as bits, with 2 bytes a number.

    >>> replica = ModelReplica(Layout.flat(2), rounds=True)
    >>> kept = replica.keep(np.array([1.0, 3.0], np.float32))
    >>> kept.dtype, replica.model(kept).tolist()
    (dtype('int16'), [1.0, 3.0])
    """

    layout: Layout
    rounds: bool

    @property
    def dtype(self) -> str:
        """The dtype in which a copy is kept."""
        return "int16" if self.rounds else "float32"

    @property
    def size(self) -> int:
        """The bytes that a copy takes on a disk."""
        return self.layout.d * np.dtype(self.dtype).itemsize

    def keep(self, w: Array) -> Array:
        """Return a copy as it is kept."""
        return to_bf16(w) if self.rounds else w

    def model(self, kept: Array) -> Array:
        """Return the float32 numbers of a copy."""
        return from_bf16(kept) if self.rounds else kept

    @property
    def _copies(self) -> Copies:
        return Copies(self.rounds)

    def apply(self, w: Array, messages: Sequence[bytes]) -> Array:
        """Return the copy after the messages of some rounds."""
        for first in range(0, len(messages), TOGETHER):
            payloads = [decode(each, layout=self.layout) for each in messages[first : first + TOGETHER]]
            for listed, group in groupby(payloads, lambda payload: payload.indices is not None):
                add = add_all if listed else self._add_dense
                w = add(w, list(group))
        return w

    def _add_dense(self, w: Array, payloads: Sequence[Payload]) -> Array:
        """Return the copy after payloads that list no coordinates."""
        for payload in payloads:
            w = self.keep(self._copies.receive(self.model(w), payload))
        return w

    def change(self, w: Array, message: bytes) -> Array:
        """Return the copy with the values that the message holds."""
        return self.keep(self._copies.change(self.model(w), decode(message, layout=self.layout)))

    def replace(self, message: bytes) -> Array:
        """Return the copy that the message holds."""
        payload = decode(message, layout=self.layout)
        if payload.indices is not None:
            raise WireError("a whole model must hold all coordinates")
        return self.keep(self._copies.change(np.zeros(self.layout.d, np.float32), payload))

    def digest(self, w: Array) -> int:
        """Return 64 bits of a hash of the copy."""
        return digest_of(np.ascontiguousarray(w).data)

    def encode(self, payload: Payload, version: Version) -> bytes:
        """Return values of the copy at a version as a message."""
        header = {"sequence": Stamp(version.generation, version.round).sequence, "round": version.round}
        return encode(payload.numpy(), self.layout, code_floats=True, **header)

    def whole(self, primary: Primary) -> Whole:
        """Return a broadcast of all of the server's copy."""
        payload = self._copies.whole(self.model(primary.w))
        return primary.whole(self.encode(payload, primary.version), self.digest(primary.w))

    def changes(self, primary: Primary, chain: Chain) -> Changes | None:
        """Return a broadcast of what a chain changes; None where that is most of the model."""
        changed, w = np.zeros(self.layout.d, bool), self.model(primary.w)
        for message in chain.messages:
            payload = decode(message, layout=self.layout)
            at = slice(None) if payload.indices is None else payload.indices
            changed[at] |= values_of(payload) != 0  # a copy holds no -0, of which a 0 would make 0
        at = np.flatnonzero(changed)
        if not may_be_shorter(len(at), self.layout.d):
            return None
        payload = self._copies.changed(w, at)
        message = self.encode(payload, primary.version)
        return primary.changes(chain.start, message, self.digest(primary.w))


def begin(x: Array, replica: ModelReplica, generation: int, t: int) -> Primary:
    """Return the first copy of a server's model."""
    w = replica.keep(Copies(replica.rounds).first(x))
    return Primary.begin(w, generation, t, replica.digest(w))


def advance(primary: Primary, x_next: Array, downlink: Downlink, seed: int) -> Primary:
    """Return the server's copy after the broadcast that follows a step to x_next.

    Messages are kept until they take as many bytes as a copy: a longer chain is never the shortest.
    """
    replica = ModelReplica(downlink.layout, downlink.rounds)
    t = primary.version.round
    made = downlink.send(x_next, replica.model(primary.w), key(seed, t, 0, Purpose.BROADCAST), t)
    sequence = Stamp(primary.version.generation, t + 1).sequence
    message = encode(made.payload.numpy(), downlink.layout, sequence=sequence, round=t)
    return primary.advance(message, replica.keep(made.memory), most_bytes=replica.size)


class Packed(NamedTuple):
    """A broadcast as it travels: which kind it is, in how many messages, and its bytes."""

    kind: str  # "chain", "changes" or "whole"
    messages: int
    data: bytes


class Broadcaster:
    """The broadcasts that lead to one version: each is made once, however many clients need it."""

    def __init__(self, primary: Primary, replica: ModelReplica) -> None:
        self.primary, self.replica = primary, replica
        self._made: dict[Version | None, Packed] = {}

    def broadcast_to(self, held: Version | None) -> Packed:
        """Return the shortest broadcast for a client that holds this version; None: it may hold any."""
        if held not in self._made:
            chain = None if held is None else self.primary.chain(held)
            self._made[held] = self.whole if chain is None else self._shortest(chain)
        return self._made[held]

    def _shortest(self, chain: Chain) -> Packed:
        packed = self._packed(chain)
        if not chain.messages:  # the client holds the newest version
            return packed
        return choose_download(
            self.replica.layout.d,
            packed,
            lambda: self.whole,
            lambda: self._changes(chain),
            lambda packed: len(packed.data),
        )

    @cached_property
    def whole(self) -> Packed:
        """The whole model."""
        return self._packed(self.replica.whole(self.primary))

    def _changes(self, chain: Chain) -> Packed | None:
        changes = self.replica.changes(self.primary, chain)
        return None if changes is None else self._packed(changes)

    def _packed(self, broadcast: Broadcast) -> Packed:
        messages = len(broadcast.messages) if isinstance(broadcast, Chain) else 0
        return Packed(type(broadcast).__name__.lower(), messages, pack(broadcast))
