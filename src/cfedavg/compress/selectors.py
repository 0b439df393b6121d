"""Selectors: which coordinates are sent. A selector keeps a value as it is or drops it (a projection)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cfedavg.compress.compressor import Selection, Selector
from cfedavg.compress.largest import largest
from cfedavg.compress.sums import check_comp, prefix_sums, row_sums, unit_of
from cfedavg.core import arrays
from cfedavg.core import keys as keyed
from cfedavg.core.arrays import Array, arange, cast, module_of
from cfedavg.core.errors import InputError, NotFinite
from cfedavg.core.keys import draw_coordinates
from cfedavg.core.layout import Layout
from cfedavg.core.parts import check_argument, check_truth
from cfedavg.core.payload import Mask

_LARGE = 1e100  # the largest argument: its square, and its product with any norm, are finite


@dataclass(frozen=True)
class Everything(Selector):
    """Keeps every coordinate."""

    name: ClassVar[str] = "none"

    def select(self, p: Array, keys: Array, layout: Layout, t: int) -> Selection:
        return Selection(arange(len(p) + 1, p) * p.shape[1], None, p.reshape(-1))

    def gamma(self, layout: Layout) -> float:
        return math.inf


@dataclass(frozen=True)
class TopK(Selector):
    """Keeps the coordinates of largest magnitude; ties go to the lowest index.

    `comp` is the fraction not sent: k = max(1, round((1 - comp) * d)), gamma = d / (d - k). `least` is a
    lower bound of k (all d coordinates, if d is smaller): a small model costs little and needs a larger
    share. With `snr` instead of `comp`, k is the fewest coordinates for which |C(p) - p|^2 <= |p|^2 / snr.
    With `per_tensor`, k is chosen for each tensor of the model separately.

    >>> from cfedavg.compress import parse
    >>> payload = parse("topk(0.6)").compress(np.array([3.0, -1.0, 4.0, 1.0, -5.0]), key=0)
    >>> payload.indices.tolist(), payload.values.data.tolist()
    ([2, 4], [4.0, -5.0])
    """

    name: ClassVar[str] = "topk"
    comp: float | None = None
    snr: float | None = None
    per_tensor: bool = False
    least: int = 1

    def __post_init__(self) -> None:
        if (self.comp is None) == (self.snr is None):
            raise InputError("give either comp, as in topk(0.99), or snr, as in topk(snr=1.05)")
        if self.comp is not None:
            check_comp(self.comp)
        else:
            check_argument("snr", self.snr, f"from 1 to {_LARGE:g}", lambda snr: 1 <= snr <= _LARGE)
        check_truth("per_tensor", self.per_tensor)
        check_argument("least", self.least, "from 1 to 2^53", lambda k: 1 <= k <= 2**53, integer=True)
        if self.snr is not None and self.least > 1:
            raise InputError("least needs comp, as in topk(0.97, least=10000); it cannot be given with snr")

    def __str__(self) -> str:
        return super().__str__().replace("comp=", "")

    def _k(self, d: int) -> int:
        assert self.comp is not None
        return max(min(self.least, d), round((1 - self.comp) * d))

    def _by_radix(self, p: Array) -> bool:
        """Return whether the compiled `largest` selects; if not, NumPy or torch does."""
        return self.comp is not None and _on_cpu(p)

    def check(self, p: Array) -> None:
        if not self._by_radix(p):
            super().check(p)

    def select(self, p: Array, keys: Array, layout: Layout, t: int) -> Selection:
        if not self._by_radix(p):
            return super().select(p, keys, layout, t)
        found = [self._largest(row, layout) for row in _rows(p)]
        if bad := [i for i, (_, finite) in enumerate(found) if not finite]:
            raise NotFinite(bad)
        return _pick(p, [indices for indices, _ in found])

    def _largest(self, row: np.ndarray, layout: Layout) -> tuple[np.ndarray, bool]:
        """Return the indices of one vector that `keep` chooses, and whether the vector is finite."""
        if not len(row):
            return np.empty(0, np.int64), True
        if not self.per_tensor:
            return largest(row, self._k(len(row)))
        parts = [part for part in layout.slices() if part.start < part.stop]
        found = [largest(row[part], self._k(part.stop - part.start)) for part in parts]
        indices = [part.start + each for part, (each, _) in zip(parts, found, strict=True)]
        return np.concatenate(indices), all(finite for _, finite in found)

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        if self.per_tensor:
            parts = [p[:, part] for part in layout.slices() if part.start < part.stop]
            return module_of(p).concatenate([self._keep(part) for part in parts], 1)
        return self._keep(p)

    def _keep(self, p: Array) -> Array:
        magnitude = abs(p)
        if self.comp is not None:
            k = self._k(p.shape[1])
            return _keep_largest(magnitude, arrays.kth_largest(magnitude, k), k)
        sorted_ = arrays.sort_rows(magnitude)
        lost = prefix_sums(module_of(p).square(unit_of(sorted_)))
        assert self.snr is not None
        drop = (lost * self.snr <= lost[:, -1:]).sum(-1)[:, None]
        return _keep_largest(
            magnitude, arrays.gather(sorted_, drop.clip(max=p.shape[1] - 1)), p.shape[1] - drop
        )

    def gamma(self, layout: Layout) -> float:
        if self.snr is not None:
            return self.snr
        sizes = layout.sizes if self.per_tensor else (layout.d,)
        return min(math.inf if d == self._k(d) else d / (d - self._k(d)) for d in sizes if d)

    def most(self, layout: Layout) -> int:
        if self.snr is not None:
            return layout.d
        return sum(self._k(d) for d in (layout.sizes if self.per_tensor else (layout.d,)) if d)


@dataclass(frozen=True)
class RandomDropping(Selector):
    """Keeps each coordinate with probability 1 - comp, without scaling its value; gamma = 1 / comp.

    The coordinates are drawn from a key that the receiver knows too, so no indices are sent.
    """

    name: ClassVar[str] = "rd"
    comp: float

    def __post_init__(self) -> None:
        check_comp(self.comp)

    def select(self, p: Array, keys: Array, layout: Layout, t: int) -> Selection:
        keep = round((1 - self.comp) * 2**53)
        if _on_cpu(p):
            found = _pick(p, [draw_coordinates(key, keep, p.shape[1]) for key in keys.tolist()])
        else:
            found = super().select(p, keys, layout, t)
        return found._replace(mask=Mask(keys, keep))

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        return keyed.bits53(keys[:, None], arange(p.shape[1], p)) < round((1 - self.comp) * 2**53)

    def gamma(self, layout: Layout) -> float:
        return 1 / self.comp if self.comp else math.inf


@dataclass(frozen=True)
class Threshold(Selector):
    """Keeps coordinate j if |p_j| >= lam * |p| / sqrt(d), for lam below 1; gamma = 1 / lam^2."""

    name: ClassVar[str] = "threshold"
    lam: float

    def __post_init__(self) -> None:
        check_argument("lam", self.lam, f"from {1 / _LARGE:g} to below 1", lambda lam: 1 / _LARGE <= lam < 1)

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        square = module_of(p).square(unit_of(abs(p)))
        return (square * p.shape[1] >= self.lam**2 * row_sums(square)[:, None]) & (p != 0)

    def gamma(self, layout: Layout) -> float:
        return 1 / self.lam**2


@dataclass(frozen=True)
class Proportional(Selector):
    """Keeps coordinate j with probability q_j = min(1, c |p_j|), so that (1 - comp) * d are kept on average.

    Large coordinates are always sent, small coordinates rarely. Values are not scaled: by Cauchy-Schwarz
    sum q p^2 >= |p|^4 / sum(p^2 / q), so for every p the result is at least as close to p as the unbiased
    values p_j / q_j at their best scale. q_j grows with |p_j|, hence gamma = 1 / comp.
    """

    name: ClassVar[str] = "proportional"
    comp: float

    def __post_init__(self) -> None:
        check_comp(self.comp)

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        draws = keyed.bits53(keys[:, None], arange(p.shape[1], p))
        return draws < self.probabilities(unit_of(abs(p))) * 2.0**53

    def probabilities(self, magnitude: Array) -> Array:
        """Return the probabilities q for magnitudes of shape (n, d).

        The largest magnitudes have q = 1, as few as possible; for the others q is proportional to magnitude.
        """
        (n, d), xp = magnitude.shape, module_of(magnitude)
        descending = xp.flip(arrays.sort_rows(magnitude), (-1,))
        rest = xp.flip(prefix_sums(arrays.sort_rows(magnitude)), (-1,))
        left = (1 - self.comp) * d - cast(arange(d, magnitude), "float64")
        fits = (left * descending <= rest) | (left <= 0)
        certain = cast(fits, "int8").argmax(axis=-1)[:, None]
        budget = arrays.gather(xp.broadcast_to(left, (n, d)), certain).clip(min=0)
        with np.errstate(divide="ignore", invalid="ignore"):  # if the other magnitudes are all 0
            rate = budget / arrays.gather(rest, certain)
            return xp.where(magnitude > 0, (rate * magnitude).clip(max=1), 0.0)

    def gamma(self, layout: Layout) -> float:
        return 1 / self.comp if self.comp else math.inf


def _on_cpu(p: Array) -> bool:
    """Return whether compiled code can read p: not empty, on the CPU, in float32 or float64."""
    return not getattr(p, "is_cuda", False) and arrays.dtype_of(p) in ("float32", "float64") and len(p) > 0


def _rows(p: Array) -> np.ndarray:
    """Return p as a contiguous NumPy array, without a copy if p is contiguous."""
    array: np.ndarray = p if isinstance(p, np.ndarray) else p.detach().numpy()
    return np.ascontiguousarray(array)


def _pick(p: Array, found: list[np.ndarray]) -> Selection:
    """Return the selection of the indices found[i] in each row i of p."""
    values = [row[indices] for row, indices in zip(_rows(p), found, strict=True)]
    joined = (each[0] if len(each) == 1 else np.concatenate(each) for each in (found, values))
    return Selection(
        arrays.place(np.cumsum([0, *map(len, found)]), p), *(arrays.place(each, p) for each in joined)
    )


def _keep_largest(magnitude: Array, smallest: Array, k: int | Array) -> Array:
    """Return booleans: true at the k largest magnitudes of each row; `smallest` is the least of these k.

    Of equal magnitudes, the lowest index is taken.
    """
    above, tied = magnitude > smallest, magnitude == smallest
    wanted = k - above.sum(-1)[:, None]
    if bool((tied.sum(-1)[:, None] == wanted).all()):
        return above | tied  # the usual case; the cumsum below takes eight bytes an entry
    return above | (tied & (tied.cumsum(-1) <= wanted))
