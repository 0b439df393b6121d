"""Selectors: which coordinates are sent. A selector keeps a value as it is or drops it (a projection)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from cfedavg.compress.compressor import Selection, Selector, check_finite
from cfedavg.compress.numerics import normalise_rows, prefix_sums, row_sums
from cfedavg.core import arrays
from cfedavg.core.arrays import Array, arange, cast, module_of, place
from cfedavg.core.keys import bits53, draw_coordinates
from cfedavg.core.layout import Layout
from cfedavg.core.parts import argument
from cfedavg.core.payload import Mask

LARGE = 1e100  # the largest argument: its square, and its product with any norm, are finite
fraction = partial(
    argument, "the fraction NOT sent (0.99 sends 1%), from 0 to below 1", lambda comp: 0 <= comp < 1
)


@dataclass(frozen=True)
class Everything(Selector):
    """Keeps every coordinate."""

    name: ClassVar[str] = "none"

    def select(self, p: Array, keys: Array, layout: Layout, t: int, g2: Array | None = None) -> Selection:
        check_finite(p)
        return Selection(arange(len(p) + 1, p) * p.shape[1], None, p.reshape(-1))

    def gamma(self, layout: Layout) -> float:
        return math.inf


@dataclass(frozen=True)
class RandomDropping(Selector):
    """Keeps each coordinate with probability 1 - comp, without scaling its value; the SNR is 1 / comp.

    The coordinates are drawn from a key that the receiver knows too, so no indices are sent.

    >>> from cfedavg.compress import Compressor
    >>> payload = Compressor(RandomDropping(0.5)).compress(np.array([3.0, -1.0, 4.0, 1.0, -5.0]), key=1)
    >>> payload.indices.tolist()
    [0, 2]
    """

    name: ClassVar[str] = "rd"
    comp: float = fraction()

    @property
    def _share(self) -> int:
        return round((1 - self.comp) * 2**53)

    def select(self, p: Array, keys: Array, layout: Layout, t: int, g2: Array | None = None) -> Selection:
        if can_compile(p):
            check_finite(p)
            found = select_found(p, [draw_coordinates(key, self._share, p.shape[1]) for key in keys.tolist()])
        else:
            found = super().select(p, keys, layout, t)
        return found._replace(mask=Mask(keys, self._share))

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        return bits53(keys[:, None], arange(p.shape[1], p)) < self._share

    def gamma(self, layout: Layout) -> float:
        return 1 / self.comp if self.comp else math.inf

    def denser(self, times: float) -> Selector:
        return replace(self, comp=less_dropped(self.comp, times))


@dataclass(frozen=True)
class Threshold(Selector):
    """Keeps the coordinates of at least `lam` times the root mean square; the SNR is 1 / lam^2.

    Coordinate j of a vector p of length d is kept if |p_j| >= lam * |p| / sqrt(d). `lam` is below 1.

    >>> from cfedavg.compress import Compressor
    >>> payload = Compressor(Threshold(0.9)).compress(np.array([3.0, -1.0, 4.0, 1.0, -5.0]), key=0)
    >>> payload.indices.tolist()  # magnitudes of at least 0.9 * 3.2
    [0, 2, 4]
    """

    name: ClassVar[str] = "threshold"
    lam: float = argument(f"from {1 / LARGE:g} to below 1", lambda lam: 1 / LARGE <= lam < 1)

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        square = module_of(p).square(normalise_rows(abs(p)))
        return (square * p.shape[1] >= self.lam**2 * row_sums(square)[:, None]) & (p != 0)

    def gamma(self, layout: Layout) -> float:
        return 1 / self.lam**2

    def denser(self, times: float) -> Selector:
        return replace(self, lam=max(self.lam / times, 1 / LARGE))


@dataclass(frozen=True)
class Proportional(Selector):
    """Keeps each coordinate with a probability proportional to its magnitude, but at most 1.

    Coordinate j of a vector p is kept with probability q_j = min(1, c |p_j|). The factor c is such that
    (1 - comp) * d of d coordinates are kept on average. Values are not scaled. So the mean squared error is
    at most that of the unbiased values p_j / q_j at their best scale: sum(q p^2) >= |p|^4 / sum(p^2 / q) by
    Cauchy-Schwarz. Since q_j grows with |p_j|, the SNR is at least that of random dropping, 1 / comp.

    >>> from cfedavg.compress import Compressor
    >>> payload = Compressor(Proportional(0.5)).compress(np.array([3.0, -1.0, 4.0, 1.0, -5.0]), key=1)
    >>> payload.indices.tolist()
    [0, 2, 4]
    """

    name: ClassVar[str] = "proportional"
    comp: float = fraction()

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        draws = bits53(keys[:, None], arange(p.shape[1], p))
        return draws < self.probabilities(normalise_rows(abs(p))) * 2.0**53

    def denser(self, times: float) -> Selector:
        return replace(self, comp=less_dropped(self.comp, times))

    def probabilities(self, magnitude: Array) -> Array:
        """Return the probability of each coordinate, for magnitudes of shape (n, d), a row for each client.

        As few as possible of the largest magnitudes have probability 1. The probabilities of the others are
        proportional to their magnitudes.
        """
        (n, d), xp = magnitude.shape, module_of(magnitude)
        ascending = arrays.sort_rows(magnitude)
        descending, rest = xp.flip(ascending, (-1,)), xp.flip(prefix_sums(ascending), (-1,))
        left = (1 - self.comp) * d - cast(arange(d, magnitude), "float64")
        fits = (left * descending <= rest) | (left <= 0)
        certain = cast(fits, "int8").argmax(axis=-1)[:, None]
        budget = arrays.gather(xp.broadcast_to(left, (n, d)), certain).clip(min=0)
        with np.errstate(divide="ignore", invalid="ignore"):  # if the other magnitudes are all 0
            rate = budget / arrays.gather(rest, certain)
            return xp.where(magnitude > 0, (rate * magnitude).clip(max=1), 0.0)

    def gamma(self, layout: Layout) -> float:
        return 1 / self.comp if self.comp else math.inf


def less_dropped(comp: float, times: float) -> float:
    """Return the fraction not sent if `times` as many coordinates are sent, to 12 digits."""
    return max(0.0, round(1 - times * (1 - comp), 12))


def can_compile(p: Array) -> bool:
    """Return whether compiled code can read p: not empty, on the CPU, in float32 or float64."""
    return not getattr(p, "is_cuda", False) and arrays.dtype_of(p) in ("float32", "float64") and len(p) > 0


def rows_in_memory(p: Array) -> np.ndarray:
    """Return p as a contiguous NumPy array, without a copy if p is contiguous."""
    array: np.ndarray = p if isinstance(p, np.ndarray) else p.detach().numpy()
    return np.ascontiguousarray(array)


def in_memory(p: Array, keys: Array) -> tuple[Array, Array]:
    """Return p and keys as NumPy arrays if they are on the CPU, where NumPy is faster with strided arrays."""
    return (rows_in_memory(p), rows_in_memory(keys)) if can_compile(p) else (p, keys)


def join(pieces: Sequence[Array]) -> Array:
    """Return the pieces joined along their last axis, without a copy if there is one piece."""
    return pieces[0] if len(pieces) == 1 else module_of(pieces[0]).concatenate(pieces, -1)


def select_found(p: Array, found: list[np.ndarray]) -> Selection:
    """Return the selection that keeps the indices found[i] of row i of p, for each i."""
    values = [row[indices] for row, indices in zip(rows_in_memory(p), found, strict=True)]
    offsets = np.cumsum([0, *map(len, found)])
    return Selection(place(offsets, p), place(join(found), p), place(join(values), p))
