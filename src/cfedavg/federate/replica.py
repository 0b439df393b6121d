"""Model copies on real nodes: how messages change a copy, and which broadcast is the shortest for a client.

Compiled code adds the values of a message to a copy. The result is bitwise equal to the result of
`channel.Copies.receive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from cfedavg.channel import Copies, Downlink, choose_download, may_be_shorter
from cfedavg.compress import sent_values, values_of
from cfedavg.core.arrays import LARGEST_BF16, Array, from_bf16, to_bf16
from cfedavg.core.kernels import Int, helper, is_plain, kernel
from cfedavg.core.keys import Purpose, key
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Levels, Payload
from cfedavg.federate.protocol import Broadcast, Chain, Changes, Stamp, Version, Whole, compute_digest, pack
from cfedavg.federate.server import Primary
from cfedavg.wire import WireError, decode, encode

TOGETHER = 10  # messages that are decoded at once and then added; more would take too much memory
TILE = 1 << 20  # coordinates to which all messages are added in turn: 2 MB in bf16, which caches hold
_TOP, _TOP_BF16 = np.float32(np.finfo(np.float32).max), np.float32(LARGEST_BF16)
_ONE = np.ones(1, np.float32)
_HALF = np.uint32(16)  # bits
_MOST = 1 << 16  # values of one scale that are added at once


@dataclass(frozen=True)
class ModelReplica:
    """The operations on copies of one model. With `rounds_values`, a copy is kept as bits of bf16 numbers.

    >>> replica = ModelReplica(Layout.flat(2), rounds_values=True)
    >>> kept = replica.keep(np.array([1.0, 3.0], np.float32))
    >>> kept.dtype, replica.model(kept).tolist()
    (dtype('int16'), [1.0, 3.0])
    """

    layout: Layout
    rounds_values: bool

    @property
    def dtype(self) -> str:
        """The dtype in which a model copy is kept."""
        return "int16" if self.rounds_values else "float32"

    @property
    def size(self) -> int:
        """The number of bytes that a model copy takes on disk."""
        return self.layout.d * np.dtype(self.dtype).itemsize

    def keep(self, w: Array) -> Array:
        """Return model copy `w` in the dtype in which copies are kept."""
        return to_bf16(w) if self.rounds_values else w

    def model(self, kept: Array) -> Array:
        """Return a model copy that `keep` made as float32 numbers."""
        return from_bf16(kept) if self.rounds_values else kept

    def apply(self, w: Array, messages: Sequence[bytes]) -> Array:
        """Return model copy `w` plus the messages of consecutive rounds."""
        for first in range(0, len(messages), TOGETHER):
            payloads = [decode(each, layout=self.layout) for each in messages[first : first + TOGETHER]]
            for listed, group in groupby(payloads, lambda payload: payload.indices is not None):
                if listed and not is_plain(_add):
                    w = _add_listed(w, list(group))
                    continue
                for payload in group:
                    w = self.keep(Copies(self.rounds_values).receive(self.model(w), payload))
        return w

    def change(self, w: Array, message: bytes) -> Array:
        """Return model copy `w` with some values replaced by those in the message."""
        payload = decode(message, layout=self.layout)
        return self.keep(Copies(self.rounds_values).unpack(self.model(w), payload))

    def replace(self, message: bytes) -> Array:
        """Return the model copy in a message that holds the values of all coordinates."""
        payload = decode(message, layout=self.layout)
        if payload.indices is not None:
            n = len(payload.indices)
            raise WireError(f"a whole model must hold all {self.layout.d} coordinates, got {n}")
        return self.keep(Copies(self.rounds_values).unpack(np.zeros(self.layout.d, np.float32), payload))

    def digest(self, w: Array) -> int:
        """Return a 64-bit hash of model copy `w`."""
        return compute_digest(np.ascontiguousarray(w).data)

    def encode(self, payload: Payload, version: Version) -> bytes:
        """Return the message for a payload of values (not differences) of the model copy at `version`."""
        header = {"sequence": Stamp(version.generation, version.round).sequence, "round": version.round}
        return encode(payload.numpy(), self.layout, code_floats=True, **header)

    def whole(self, primary: Primary) -> Whole:
        """Return a broadcast of the server's whole model copy."""
        payload = Copies(self.rounds_values).pack(self.model(primary.w))
        return Whole(self.encode(payload, primary.version), primary.version, self.digest(primary.w))

    def changes(self, primary: Primary, chain: Chain) -> Changes | None:
        """Return a broadcast of the values that the messages of a chain changed; None if most changed."""
        changed = np.zeros(self.layout.d, bool)
        for message in chain.messages:
            payload = decode(message, layout=self.layout)
            at = slice(None) if payload.indices is None else payload.indices
            changed[at] |= sent_values(payload) != 0  # adding 0 changes nothing, since a copy holds no -0
        at = np.flatnonzero(changed)
        if not may_be_shorter(len(at), self.layout.d):
            return None
        payload = Copies(self.rounds_values).pack(self.model(primary.w), at)
        since = primary.versions[-1 - len(chain.messages) : -1]
        message = self.encode(payload, primary.version)
        return Changes(since, message, primary.version, self.digest(primary.w))


def begin(x: Array, replica: ModelReplica, generation: int, t: int) -> Primary:
    """Return the server's first model copy, made from its model `x` after `t` rounds."""
    w = replica.keep(Copies(replica.rounds_values).make(x))
    return Primary.begin(w, generation, t, replica.digest(w))


def advance(primary: Primary, x_next: Array, downlink: Downlink, seed: int) -> Primary:
    """Compress the step to the server's model `x_next`; return the model copy with this step added.

    The messages in the history have at most as many bytes as a model copy: with more bytes, a broadcast of
    the whole model is shorter.
    """
    replica = ModelReplica(downlink.layout, downlink.rounds_values)
    t = primary.version.round
    payload, w_next = downlink.send(x_next, replica.model(primary.w), key(seed, t, 0, Purpose.BROADCAST), t)
    sequence = Stamp(primary.version.generation, t + 1).sequence
    message = encode(payload.numpy(), downlink.layout, sequence=sequence, round=t)
    return primary.advance(message, replica.keep(w_next), most_bytes=replica.size)


class PackedBroadcast(NamedTuple):
    """The bytes of a broadcast, with a word for its kind."""

    kind: str  # "chain", "changes" or "whole"
    messages: int  # the number of messages in a chain; else 0
    data: bytes


class Broadcaster:
    """Make the broadcasts that lead clients to the server's version; make each only once for all clients."""

    def __init__(self, primary: Primary, replica: ModelReplica) -> None:
        self.primary, self.replica = primary, replica
        self._made: dict[Version | None, PackedBroadcast] = {}

    def broadcast_to(self, held: Version | None) -> PackedBroadcast:
        """Return the shortest broadcast for a client that holds version `held` (None if unknown)."""
        if held not in self._made:
            chain = self.primary.chain(held)
            self._made[held] = self.whole if chain is None else self._pick_shortest(chain)
        return self._made[held]

    def _pick_shortest(self, chain: Chain) -> PackedBroadcast:
        packed = _pack(chain)
        if not chain.messages:  # the client holds the newest version
            return packed

        def pack_changes() -> PackedBroadcast | None:
            changes = self.replica.changes(self.primary, chain)
            return None if changes is None else _pack(changes)

        d = self.replica.layout.d
        return choose_download(d, packed, lambda: self.whole, pack_changes, lambda packed: len(packed.data))

    @cached_property
    def whole(self) -> PackedBroadcast:
        """The broadcast of the whole model."""
        return _pack(self.replica.whole(self.primary))


def _pack(broadcast: Broadcast) -> PackedBroadcast:
    messages = len(broadcast.messages) if isinstance(broadcast, Chain) else 0
    return PackedBroadcast(type(broadcast).__name__.lower(), messages, pack(broadcast))


def _add_listed(w: np.ndarray, payloads: Sequence[Payload]) -> np.ndarray:
    """Return model copy `w` (float32, or bf16 bits in int16) plus payloads that list their coordinates."""
    add = _add_to_bf16 if w.dtype == np.int16 else _add
    scaled = [_split(payload) for payload in payloads]
    done, w_next = [0] * len(scaled), np.empty_like(w)
    for start in range(0, len(w), TILE):
        w_next[start : start + TILE] = w[start : start + TILE]
        for i, message in enumerate(scaled):
            done[i] = add(w_next, *message, done[i], start + TILE)
    return w_next


def _split(payload: Payload) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return the payload's coordinates, its numbers, the scale of each block, and the length of a block."""
    at, values = np.asarray(payload.indices), payload.values
    if isinstance(values, Levels) and not values.per_level:
        return at, values.levels, values.scales, values.block or max(1, len(at))
    return at, np.asarray(values_of(payload), np.float32), _ONE, max(1, len(at))


@kernel
def _add(
    w: np.ndarray, at: np.ndarray, numbers: np.ndarray, scales: np.ndarray, block: Int, i: Int, stop: Int
) -> Int:
    """Add to `w` the values from position `i` on whose coordinates `at` are below `stop`.

    A value is a number times the scale of its block of `block` numbers. Return the position of the first
    value that was not added.
    """
    while i < len(at) and at[i] < stop:
        value = np.float32(numbers[i]) * scales[i // block]
        total = w[at[i]] + min(max(value, -_TOP), _TOP)
        w[at[i]] = total if total != 0 else np.float32(0)  # no -0
        i += 1
    return i


@kernel
def _add_to_bf16(
    bits: np.ndarray, at: np.ndarray, numbers: np.ndarray, scales: np.ndarray, block: Int, i: Int, stop: Int
) -> Int:
    """Do what `_add` does for bf16 numbers, given as bits: round each sum to the nearest, ties to even."""
    words = np.empty(min(block, _MOST), np.uint32)
    while i < len(at) and at[i] < stop:
        end = min(len(at), (i // block + 1) * block, i + len(words))
        while at[end - 1] >= stop:
            end -= 1
        _add_some(bits, at[i:end], numbers[i:end], scales[i // block], words, words.view(np.float32))
        i = end
    return i


@helper
def _add_some(
    bits: np.ndarray,
    at: np.ndarray,
    numbers: np.ndarray,
    scale: np.float32,
    words: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add values that have one scale to bf16 numbers, given as bits.

    `words` is scratch memory, and `sums` is a float32 view of it. The two loops in the middle use neither
    `bits` nor `at`, so that the compiler can do 8 numbers at once.
    """
    for k in range(len(at)):
        words[k] = np.uint32(np.uint16(bits[np.uint64(at[k])])) << _HALF
    for k in range(len(at)):
        value = np.float32(numbers[k]) * scale
        sums[k] = min(max(sums[k] + min(max(value, -_TOP), _TOP), -_TOP_BF16), _TOP_BF16)
    for k in range(len(at)):
        upper = (words[k] + ((words[k] >> _HALF) & np.uint32(1)) + np.uint32(0x7FFF)) >> _HALF
        words[k] = upper if upper != np.uint32(0x8000) else np.uint32(0)  # no -0
    for k in range(len(at)):
        bits[np.uint64(at[k])] = np.int16(words[k])
