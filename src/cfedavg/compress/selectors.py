"""Selectors: which coordinates are sent. A selector keeps a value as it is or drops it (a projection)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from cfedavg.compress.compressor import Selection, Selector, check_finite
from cfedavg.compress.numerics import find_largest, normalise_rows, pick, prefix_sums, row_sums
from cfedavg.core import arrays
from cfedavg.core.arrays import Array, arange, cast, module_of, place
from cfedavg.core.errors import InputError, NotFinite
from cfedavg.core.kernels import is_plain
from cfedavg.core.keys import bits53, draw_coordinates
from cfedavg.core.layout import Layout
from cfedavg.core.parts import argument, check_truth
from cfedavg.core.payload import Mask

_LARGE = 1e100  # the largest argument: its square, and its product with any norm, are finite
_fraction = partial(
    argument, "the fraction NOT sent (0.99 sends 1%), from 0 to below 1", lambda comp: 0 <= comp < 1
)


@dataclass(frozen=True)
class Everything(Selector):
    """Keeps every coordinate."""

    name: ClassVar[str] = "none"

    def select(self, p: Array, keys: Array, layout: Layout, t: int) -> Selection:
        check_finite(p)
        return Selection(arange(len(p) + 1, p) * p.shape[1], None, p.reshape(-1))

    def gamma(self, layout: Layout) -> float:
        return math.inf


@dataclass(frozen=True)
class TopK(Selector):
    """Keeps the k coordinates of largest magnitude; of equal magnitudes, those at lower indices.

    `comp` is the fraction not sent: of d coordinates, k = max(1, round((1 - comp) * d)) are sent, and the SNR
    is gamma = d / (d - k). With `least`, k is at least `least`, or d if d is smaller: a small model costs few
    bytes and needs a larger fraction. With `snr` instead of `comp`, k is the smallest number for which
    |C(p) - p|^2 <= |p|^2 / snr. With `per_tensor`, k is chosen for each tensor of the model separately.

    >>> from cfedavg.compress import parse
    >>> payload = parse("topk(0.6)").compress(np.array([3.0, -1.0, 4.0, 1.0, -5.0]), key=0)
    >>> payload.indices.tolist(), payload.values.data.tolist()
    ([2, 4], [4.0, -5.0])
    """

    name: ClassVar[str] = "topk"
    comp: float | None = _fraction(None)
    snr: float | None = argument(f"from 1 to {_LARGE:g}", lambda snr: 1 <= snr <= _LARGE, None)
    per_tensor: bool = False
    least: int = argument("from 1 to 2^53", lambda least: 1 <= least <= 2**53, 1, integer=True)

    def __post_init__(self) -> None:
        if (self.comp is None) == (self.snr is None):
            raise InputError("topk needs either comp, as in topk(0.99), or snr, as in topk(snr=1.05)")
        super().__post_init__()
        check_truth("per_tensor", self.per_tensor)
        if self.snr is not None and self.least > 1:
            raise InputError("least cannot be given with snr, only with comp, as in topk(0.97, least=10000)")

    def __str__(self) -> str:
        return super().__str__().replace("comp=", "")

    def _parts(self, layout: Layout) -> list[slice]:
        """Return the slices of a vector that are compressed separately: each tensor, or the whole vector."""
        tensors = [part for part in layout.slices() if part.start < part.stop]
        return tensors if self.per_tensor and tensors else [slice(0, layout.d)]

    def _k(self, part: slice) -> int:
        assert self.comp is not None
        d: int = part.stop - part.start
        return max(min(self.least, d), round((1 - self.comp) * d))

    def select(self, p: Array, keys: Array, layout: Layout, t: int) -> Selection:
        if self.comp is None or not _on_cpu(p) or is_plain(pick):
            return super().select(p, keys, layout, t)
        parts = [(part, self._k(part)) for part in self._parts(layout)]
        found = [[(part.start, *find_largest(row[part], k)) for part, k in parts] for row in _rows(p)]
        if bad := [i for i, of_row in enumerate(found) if not all(finite for _, _, finite in of_row)]:
            raise NotFinite(bad)
        return _pick(p, [_join([start + indices for start, indices, _ in of_row]) for of_row in found])

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        return _join([self._keep(p[:, part], part) for part in self._parts(layout)])

    def _keep(self, p: Array, part: slice) -> Array:
        magnitude = abs(p)
        if self.snr is None:
            k = self._k(part)
            return _keep_largest(magnitude, arrays.kth_largest(magnitude, k), k)
        ascending = arrays.sort_rows(magnitude)
        lost = prefix_sums(module_of(p).square(normalise_rows(ascending)))
        drop = (lost * self.snr <= lost[:, -1:]).sum(-1)[:, None]
        smallest = arrays.gather(ascending, drop.clip(max=p.shape[1] - 1))
        return _keep_largest(magnitude, smallest, p.shape[1] - drop)

    def gamma(self, layout: Layout) -> float:
        if self.snr is not None:
            return self.snr
        sizes = [(part.stop - part.start, self._k(part)) for part in self._parts(layout)]
        return min(d / (d - k) if k < d else math.inf for d, k in sizes)

    def most(self, layout: Layout) -> int:
        return layout.d if self.comp is None else sum(map(self._k, self._parts(layout)))

    def denser(self, times: float) -> Selector:
        if self.comp is None:
            assert self.snr is not None
            return replace(self, snr=min(self.snr * times, _LARGE))
        most = 2**53
        least = 1 if self.least == 1 else min(round(self.least * times), most)
        return replace(self, comp=_less_dropped(self.comp, times), least=least)


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
    comp: float = _fraction()

    @property
    def _share(self) -> int:
        return round((1 - self.comp) * 2**53)

    def select(self, p: Array, keys: Array, layout: Layout, t: int) -> Selection:
        if _on_cpu(p):
            check_finite(p)
            found = _pick(p, [draw_coordinates(key, self._share, p.shape[1]) for key in keys.tolist()])
        else:
            found = super().select(p, keys, layout, t)
        return found._replace(mask=Mask(keys, self._share))

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        return bits53(keys[:, None], arange(p.shape[1], p)) < self._share

    def gamma(self, layout: Layout) -> float:
        return 1 / self.comp if self.comp else math.inf

    def denser(self, times: float) -> Selector:
        return replace(self, comp=_less_dropped(self.comp, times))


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
    lam: float = argument(f"from {1 / _LARGE:g} to below 1", lambda lam: 1 / _LARGE <= lam < 1)

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        square = module_of(p).square(normalise_rows(abs(p)))
        return (square * p.shape[1] >= self.lam**2 * row_sums(square)[:, None]) & (p != 0)

    def gamma(self, layout: Layout) -> float:
        return 1 / self.lam**2

    def denser(self, times: float) -> Selector:
        return replace(self, lam=max(self.lam / times, 1 / _LARGE))


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
    comp: float = _fraction()

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        draws = bits53(keys[:, None], arange(p.shape[1], p))
        return draws < self.probabilities(normalise_rows(abs(p))) * 2.0**53

    def denser(self, times: float) -> Selector:
        return replace(self, comp=_less_dropped(self.comp, times))

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


def _less_dropped(comp: float, times: float) -> float:
    """Return the fraction not sent if `times` as many coordinates are sent, to 12 digits."""
    return max(0.0, round(1 - times * (1 - comp), 12))


def _on_cpu(p: Array) -> bool:
    """Return whether compiled code can read p: not empty, on the CPU, in float32 or float64."""
    return not getattr(p, "is_cuda", False) and arrays.dtype_of(p) in ("float32", "float64") and len(p) > 0


def _rows(p: Array) -> np.ndarray:
    """Return p as a contiguous NumPy array, without a copy if p is contiguous."""
    array: np.ndarray = p if isinstance(p, np.ndarray) else p.detach().numpy()
    return np.ascontiguousarray(array)


def _join(pieces: Sequence[Array]) -> Array:
    """Return the pieces joined along their last axis, without a copy if there is one piece."""
    return pieces[0] if len(pieces) == 1 else module_of(pieces[0]).concatenate(pieces, -1)


def _pick(p: Array, found: list[np.ndarray]) -> Selection:
    """Return the selection that keeps the indices found[i] of row i of p, for each i."""
    values = [row[indices] for row, indices in zip(_rows(p), found, strict=True)]
    offsets = np.cumsum([0, *map(len, found)])
    return Selection(place(offsets, p), place(_join(found), p), place(_join(values), p))


def _keep_largest(magnitude: Array, smallest: Array, k: int | Array) -> Array:
    """Return booleans that are true at the k largest magnitudes of each row; `smallest` is the k-th largest.

    Of equal magnitudes, those at lower indices are taken first.
    """
    above, tied = magnitude > smallest, magnitude == smallest
    wanted = k - above.sum(-1)[:, None]
    spare = tied.sum(-1) != wanted[:, 0]
    if bool(spare.any()):  # only in these rows: the cumsum takes eight bytes an entry
        tied[spare] &= tied[spare].cumsum(-1) <= wanted[spare]
    return above | tied
