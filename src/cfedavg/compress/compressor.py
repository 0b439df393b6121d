"""Compressors: a selector says which coordinates travel, a quantiser says how their values are written.

    TopK(0.99) >> BF16()          parse("topk(0.99) >> bf16")

Definition 1 of the paper: C is constrained by the SNR gamma >= 1 if E|C(p) - p|^2 <= |p|^2 / gamma for
all p. Every selector here is a projection (it keeps a value as it is, or drops it), so what it drops is
orthogonal to the error of the quantiser, and the two guarantees compose:

    1/gamma = 1/gamma_s + 1/gamma_q - 1/(gamma_s * gamma_q).

Both stages work on a block of clients at once: p of shape (n, d), an array of NumPy or of torch. Sums are in
float64 and in a fixed order, so that a block, a single vector, NumPy, torch, a CPU and a GPU give the same
bits. A selector or quantiser of your own is one small class: see docs/compressors.md.
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
    """One half of a compressor: a selector or a quantiser."""


class Selection(NamedTuple):
    """The coordinates that a block of clients keeps; the fields are those of Payload."""

    offsets: Array
    indices: Array | None
    values: Array
    mask: Mask | None = None


class Selector(Stage):
    """Chooses coordinates. A new one needs `keep` and `gamma`."""

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        """Return, as booleans of shape (n, d), which coordinates of p each client keeps in round t."""
        raise NotImplementedError

    def gamma(self, layout: Layout) -> float:
        """Return the SNR of Definition 1 that is guaranteed in every round."""
        raise NotImplementedError

    def most(self, layout: Layout) -> int:
        """Return the largest number of coordinates that one client can keep."""
        return layout.d

    def check(self, p: Array) -> None:
        """Raise NotFinite if p holds NaN or Inf; a selector whose `select` does so need not."""
        check_finite(p)

    def select(self, p: Array, keys: Array, layout: Layout, t: int) -> Selection:
        """Return the coordinates that `keep` keeps."""
        keep = self.keep(p, keys, layout, t)
        return Selection(offsets_of(keep.sum(-1)), columns(keep), p[keep])

    def __rshift__(self, quantiser: Quantiser) -> Compressor:
        return Compressor(self, quantiser)


class Quantiser(Stage):
    """Writes values. A new one needs `quantise` and `gamma`."""

    rounds: ClassVar[bool] = True  # whether float32 values change

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        """Return the rounded values. Those of client c are at offsets[c]:offsets[c+1]."""
        raise NotImplementedError

    def gamma(self, n: int) -> float:
        """Return the SNR that is guaranteed for up to n values of one client."""
        raise NotImplementedError


@dataclass(frozen=True)
class Compressor:
    """A selector followed by a quantiser; without one, values keep their own float type."""

    selector: Selector
    quantiser: Quantiser | None = None

    def __str__(self) -> str:
        return " >> ".join(map(str, self.stages))

    def compress(self, p: Array, key: int | Array, layout: Layout | None = None, t: int = 0) -> Payload:
        """Return C(p) in round t, for a vector (d,) with one key or a block (n, d) with n keys."""
        block = p[None] if p.ndim == 1 else p
        n = 1 if isinstance(key, int) else len(key.reshape(-1))
        if n != len(block):
            raise InputError(f"a block of {len(block)} vectors needs as many keys, not {n}")
        self.selector.check(block)
        layout = layout or Layout.flat(block.shape[1])
        selection = self.selector.select(block, _derive(key, Purpose.SELECT, p), layout, t)
        values: Floats | Levels
        if self.quantiser is None:
            if dtype_of(p) not in _FLOATS:
                raise InputError(f"vectors of {p.dtype} need a quantiser, as in {self} >> bf16")
            values = Floats(selection.values, _FLOATS[dtype_of(p)])
        else:
            drawn = _derive(key, Purpose.ROUND, p)
            values = self.quantiser.quantise(selection.values, selection.offsets, drawn)
        return Payload(block.shape[1], selection.offsets, selection.indices, values, selection.mask)

    def gamma(self, layout: Layout) -> float:
        """Return the SNR that both stages together guarantee, up to underflow of the value type."""
        lost = 1 / self.selector.gamma(layout)
        if self.quantiser is not None:
            rounding = 1 / self.quantiser.gamma(self.selector.most(layout))
            lost = lost + rounding - lost * rounding
        return 1 / lost if lost else math.inf

    @property
    def rounds(self) -> bool:
        """Whether float32 values that are sent change."""
        return self.quantiser is not None and self.quantiser.rounds

    @property
    def stages(self) -> list[Stage]:
        """The selector, and the quantiser if there is one."""
        return [self.selector] if self.quantiser is None else [self.selector, self.quantiser]


def _derive(key: int | Array, purpose: Purpose, p: Array) -> Array:
    """Return the keys of one purpose, where p is. A single one is derived as a number, which is quicker."""
    if isinstance(key, int):
        return place(np.array([keyed.derive(key, purpose)]), p)
    words = key.reshape(-1)
    words = place(words, p) if isinstance(words, np.ndarray) else words.to(p.device)
    return keyed.derive(words, purpose)


def values_of(payload: Payload) -> Array:
    """Return the values that the receiver reads, as floating point numbers."""
    values = payload.values
    if isinstance(values, Floats):
        return from_bf16(values.data) if values.dtype == "bf16" else values.data
    spread = Blocks(payload.offsets, values.block).spread(values.scales)
    # Next to the largest float32 a level may round past it; the largest is then closer than Inf.
    top = float(np.finfo(np.float32).max)
    with np.errstate(over="ignore"):
        return (cast(values.levels, "float32") * spread).clip(-top, top)


def decompress(payload: Payload) -> Array:
    """Return C(p) as dense vectors, shape (n, d).

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
    """Return p + C for a vector or a block and its payload, at the cost of what was sent."""
    return _add(p, payload, 1)


def minus(p: Array, payload: Payload) -> Array:
    """Return p - C for a vector or a block and its payload, at the cost of what was sent."""
    return _add(p, payload, -1)


def _add(p: Array, payload: Payload, sign: int) -> Array:
    values = sign * cast_like(values_of(payload), p)
    if payload.indices is None:
        return p + values.reshape(p.shape)
    total = copy(p)
    at = payload.indices if p.ndim == 1 else payload.indices + payload.d * client_of_value(payload.offsets)
    total.reshape(-1)[at] += values
    return total
