"""Compressors: a selector chooses the coordinates to send, and a quantiser encodes their values.

    TopK(0.99) >> BF16()          parse("topk(0.99) >> bf16")

Definition 1 of the paper: a compressor C has the SNR gamma >= 1 if E|C(p) - p|^2 <= |p|^2 / gamma for
all p. Every selector here is a projection: it keeps a value as it is, or drops the value. So the dropped
values are orthogonal to the error of the quantiser, and the SNRs of selector and quantiser compose:

    1/gamma = 1/gamma_s + 1/gamma_q - 1/(gamma_s * gamma_q).

Both stages work on a block of n clients at once: p has shape (n, d), as a NumPy array or a torch tensor. Sums
are in float64 and in a fixed order. So the result is the same, bit for bit, for a block or single vectors,
for NumPy or torch, and on a CPU or a GPU. docs/compressors.md shows how to write your own selector or
quantiser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from cfedavg.compress.sums import Blocks, check_finite, client_of_value, offsets_of
from cfedavg.core import keys as keyed
from cfedavg.core.arrays import Array, cast, cast_like, columns, copy, dtype_of, from_bf16, place, zeros
from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose
from cfedavg.core.layout import Layout
from cfedavg.core.parts import Part
from cfedavg.core.payload import Floats, Levels, Mask, Payload

_FLOATS = {"float32": "fp32", "float64": "fp64"}


class Stage(Part):
    """The base class of selectors and quantisers, the two stages of a compressor."""


class Selection(NamedTuple):
    """The coordinates and values that a block of clients keeps; the fields are as in Payload."""

    offsets: Array
    indices: Array | None
    values: Array
    mask: Mask | None = None


class Selector(Stage):
    """The base class of selectors, which choose coordinates. A subclass must define `keep` and `gamma`."""

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        """Return booleans of shape (n, d): true at the coordinates of p that each client keeps in round t."""
        raise NotImplementedError

    def gamma(self, layout: Layout) -> float:
        """Return the SNR (Definition 1) that the selector guarantees in every round."""
        raise NotImplementedError

    def most(self, layout: Layout) -> int:
        """Return the largest number of coordinates that one client can keep."""
        return layout.d

    def check(self, p: Array) -> None:
        """Raise NotFinite if p holds NaN or Inf; do nothing if `select` checks p already."""
        check_finite(p)

    def select(self, p: Array, keys: Array, layout: Layout, t: int) -> Selection:
        """Return the coordinates of p that `keep` chooses, with their values."""
        keep = self.keep(p, keys, layout, t)
        return Selection(offsets_of(keep.sum(-1)), columns(keep), p[keep])

    def __rshift__(self, quantiser: Quantiser) -> Compressor:
        return Compressor(self, quantiser)


class Quantiser(Stage):
    """The base class of quantisers, which encode values. A subclass must define `quantise` and `gamma`."""

    rounds_values: ClassVar[bool] = True  # whether quantising changes float32 values

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        """Return the encoded values. The values of client c are values[offsets[c]:offsets[c+1]]."""
        raise NotImplementedError

    def gamma(self, n: int) -> float:
        """Return the SNR (Definition 1) that the quantiser guarantees for at most n values of a client."""
        raise NotImplementedError


@dataclass(frozen=True)
class Compressor:
    """A selector followed by a quantiser; if `quantiser` is None, values are sent as float32 or float64."""

    selector: Selector
    quantiser: Quantiser | None = None

    def __str__(self) -> str:
        return " >> ".join(map(str, self.stages))

    def compress(self, p: Array, key: int | Array, layout: Layout | None = None, t: int = 0) -> Payload:
        """Return the payload C(p) in round t, of a vector (d,) with one key or a block (n, d) with n keys."""
        block = p[None] if p.ndim == 1 else p
        n = 1 if isinstance(key, int) else len(key.reshape(-1))
        if n != len(block):
            raise InputError(f"`key` must hold one key for each of the {len(block)} vectors, got {n} keys")
        self.selector.check(block)
        layout = layout or Layout.flat(block.shape[1])
        selection = self.selector.select(block, _derive(key, Purpose.SELECT, p), layout, t)
        values: Floats | Levels
        if self.quantiser is None:
            if dtype_of(p) not in _FLOATS:
                raise InputError(f"`p` of dtype {p.dtype} needs a quantiser, as in {self} >> bf16")
            values = Floats(selection.values, _FLOATS[dtype_of(p)])
        else:
            drawn = _derive(key, Purpose.ROUND, p)
            values = self.quantiser.quantise(selection.values, selection.offsets, drawn)
        return Payload(block.shape[1], selection.offsets, selection.indices, values, selection.mask)

    def gamma(self, layout: Layout) -> float:
        """Return the SNR that both stages together guarantee, if no value underflows."""
        lost = 1 / self.selector.gamma(layout)
        if self.quantiser is not None:
            rounding = 1 / self.quantiser.gamma(self.selector.most(layout))
            lost = lost + rounding - lost * rounding
        return 1 / lost if lost else math.inf

    @property
    def rounds_values(self) -> bool:
        """Whether the quantiser rounds float32 values, that is, changes them."""
        return self.quantiser is not None and self.quantiser.rounds_values

    @property
    def stages(self) -> list[Stage]:
        """The selector, and the quantiser if there is one."""
        return [self.selector] if self.quantiser is None else [self.selector, self.quantiser]


def _derive(key: int | Array, purpose: Purpose, p: Array) -> Array:
    """Return the keys of one purpose, derived from `key`, as an array on the device of p."""
    if isinstance(key, int):
        return place(np.array([keyed.derive(key, purpose)]), p)
    words = key.reshape(-1)
    words = place(words, p) if isinstance(words, np.ndarray) else words.to(p.device)
    return keyed.derive(words, purpose)


def values_of(payload: Payload) -> Array:
    """Return the values of a payload as the receiver decodes them, in floating point."""
    values = payload.values
    if isinstance(values, Floats):
        return from_bf16(values.data) if values.dtype == "bf16" else values.data
    spread = Blocks(payload.offsets, values.block).spread(values.scales)
    # level * scale may overflow near the largest float32 number; that number is closer than Inf.
    top = float(np.finfo(np.float32).max)
    with np.errstate(over="ignore"):
        return (cast(values.levels, "float32") * spread).clip(-top, top)


def decompress(payload: Payload) -> Array:
    """Return the dense vectors that a payload of n clients stands for, shape (n, d).

    >>> from cfedavg.compress import parse
    >>> decompress(parse("topk(0.5)").compress(np.array([1.0, -2.0]), key=0)).tolist()
    [[0.0, -2.0]]
    """
    values = values_of(payload)
    if payload.indices is None:
        return values.reshape(len(payload), payload.d)
    dense = zeros((len(payload), payload.d), values)
    dense[client_of_value(payload.offsets), payload.indices] = values
    return dense


def plus(p: Array, payload: Payload) -> Array:
    """Return p plus the values of `payload`, for a vector or a block p."""
    return _add(p, payload, 1)


def minus(p: Array, payload: Payload) -> Array:
    """Return p minus the values of `payload`, for a vector or a block p."""
    return _add(p, payload, -1)


def _add(p: Array, payload: Payload, sign: int) -> Array:
    values = sign * cast_like(values_of(payload), p)
    if payload.indices is None:
        return p + values.reshape(p.shape)
    total = copy(p)
    at = payload.indices if p.ndim == 1 else payload.indices + payload.d * client_of_value(payload.offsets)
    total.reshape(-1)[at] += values
    return total
