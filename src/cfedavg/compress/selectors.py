"""Selectors: which coordinates travel. Each is a projection: what it keeps, it keeps as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cfedavg import keys as keyed
from cfedavg.compress.largest import largest
from cfedavg.compress.stages import (
    INFINITE,
    Stage,
    check_comp,
    check_finite,
    offsets_of,
    prefix_sums,
    row_sums,
    unit_of,
)
from cfedavg.draws import drawn
from cfedavg.errors import InputError, NotFinite
from cfedavg.layout import Layout
from cfedavg.payload import Mask

if TYPE_CHECKING:
    from cfedavg.compress.compressor import Compressor
    from cfedavg.compress.quantisers import Quantiser

_LARGE = 1e100  # its square, and the product with any norm, are still finite


class Selection(NamedTuple):
    """The coordinates that a block of clients keeps; the fields are those of Payload."""

    offsets: Tensor
    indices: Tensor | None
    values: Tensor
    mask: Mask | None = None


class Selector(Stage):
    """Chooses coordinates. A new one needs `keep` and `gamma`."""

    def keep(self, p: Tensor, keys: Tensor, layout: Layout) -> Tensor:
        """For p of shape (n, d): which coordinates each client keeps, as booleans of the same shape."""
        raise NotImplementedError

    def gamma(self, layout: Layout) -> float:
        """The guaranteed SNR of Definition 1."""
        raise NotImplementedError

    def most(self, layout: Layout) -> int:
        """The largest number of coordinates that one client can keep."""
        return layout.d

    def check(self, p: Tensor) -> None:
        """Raises NotFinite if p holds NaN or Inf; nothing to do for a selector that finds them on its way."""
        check_finite(p)

    def select(self, p: Tensor, keys: Tensor, layout: Layout) -> Selection:
        keep = self.keep(p, keys, layout)
        return Selection(offsets_of(keep.sum(-1)), keep.nonzero()[:, 1], p[keep])

    def __rshift__(self, quantiser: Quantiser) -> Compressor:
        from cfedavg.compress.compressor import Compressor

        return Compressor(self, quantiser)


@dataclass(frozen=True)
class Everything(Selector):
    """Keeps every coordinate."""

    name: ClassVar[str] = "none"

    def select(self, p: Tensor, keys: Tensor, layout: Layout) -> Selection:
        counts = torch.full((len(p),), p.shape[1], device=p.device)
        return Selection(offsets_of(counts), None, p.reshape(-1))

    def gamma(self, layout: Layout) -> float:
        return INFINITE


@dataclass(frozen=True)
class TopK(Selector):
    """Keeps the coordinates of largest magnitude; ties go to the lowest index.

    `comp` is the fraction not sent: k = max(1, round((1 - comp) * d)), gamma = d / (d - k). With `snr`
    instead, k is the fewest coordinates for which |C(p) - p|^2 <= |p|^2 / snr. With `per_tensor`, both
    hold for each tensor of the model by itself.

    >>> from cfedavg.compress import parse
    >>> payload = parse("topk(0.6)").compress(torch.tensor([3.0, -1.0, 4.0, 1.0, -5.0]), key=0)
    >>> payload.indices.tolist(), payload.values.data.tolist()
    ([2, 4], [4.0, -5.0])
    """

    name: ClassVar[str] = "topk"
    comp: float | None = None
    snr: float | None = None
    per_tensor: bool = False

    def __post_init__(self) -> None:
        if (self.comp is None) == (self.snr is None):
            raise InputError("give either comp, as in topk(0.99), or an SNR target, as in topk(snr=1.05)")
        if self.comp is not None:
            check_comp(self.comp)
        if self.snr is not None and not 1 <= self.snr <= _LARGE:
            raise InputError(f"snr = {self.snr!r:.40} must be a number from 1 to {_LARGE:g}")
        if not isinstance(self.per_tensor, bool):
            raise InputError(f"per_tensor = {self.per_tensor!r} must be true or false")

    def __str__(self) -> str:
        return super().__str__().replace("comp=", "")

    def _k(self, d: int) -> int:
        assert self.comp is not None
        return max(1, round((1 - self.comp) * d))

    def _by_radix(self, p: Tensor) -> bool:
        """Whether `largest` does the work; torch's own selection else."""
        return self.comp is not None and _as_arrays(p)

    def check(self, p: Tensor) -> None:
        if not self._by_radix(p):
            super().check(p)

    def select(self, p: Tensor, keys: Tensor, layout: Layout) -> Selection:
        if not self._by_radix(p):
            return super().select(p, keys, layout)
        found = [self._largest(row, layout) for row in p.detach().contiguous().numpy()]
        if bad := [i for i, (_, finite) in enumerate(found) if not finite]:
            raise NotFinite(bad)
        return _picked(p, [indices for indices, _ in found])

    def _largest(self, row: np.ndarray, layout: Layout) -> tuple[np.ndarray, bool]:
        """What `keep` keeps of one vector on the CPU, as indices; and whether the vector is finite."""
        if not len(row):
            return np.empty(0, np.int64), True
        if not self.per_tensor:
            return largest(row, self._k(len(row)))
        parts = [part for part in layout.slices() if part.start < part.stop]
        found = [largest(row[part], self._k(part.stop - part.start)) for part in parts]
        indices = [part.start + each for part, (each, _) in zip(parts, found, strict=True)]
        return np.concatenate(indices), all(finite for _, finite in found)

    def keep(self, p: Tensor, keys: Tensor, layout: Layout) -> Tensor:
        if self.per_tensor:
            parts = [p[:, part] for part in layout.slices() if part.start < part.stop]
            return torch.cat([self._keep(part) for part in parts], dim=1)
        return self._keep(p)

    def _keep(self, p: Tensor) -> Tensor:
        magnitude = p.abs()
        if self.comp is not None:
            k = self._k(p.shape[1])
            smallest = torch.topk(magnitude, k, sorted=False).values.amin(-1, keepdim=True)
            return _at_least(magnitude, smallest, torch.full_like(smallest, k, dtype=torch.int64))
        ascending = magnitude.sort(-1).values
        lost = prefix_sums(unit_of(ascending).square())
        assert self.snr is not None
        drop = (lost * self.snr <= lost[:, -1:]).sum(-1, keepdim=True)
        smallest = ascending.gather(-1, drop.clamp(max=p.shape[1] - 1))
        return _at_least(magnitude, smallest, p.shape[1] - drop)

    def gamma(self, layout: Layout) -> float:
        if self.snr is not None:
            return self.snr
        sizes = layout.sizes if self.per_tensor else (layout.d,)
        return min(INFINITE if d == self._k(d) else d / (d - self._k(d)) for d in sizes if d)

    def most(self, layout: Layout) -> int:
        if self.snr is not None:
            return layout.d
        return sum(self._k(d) for d in (layout.sizes if self.per_tensor else (layout.d,)) if d)


@dataclass(frozen=True)
class RandomDropping(Selector):
    """Keeps each coordinate with probability 1 - comp, unscaled; gamma = 1 / comp.

    The mask is drawn from a key that the receiver knows too, so no index travels.
    """

    name: ClassVar[str] = "rd"
    comp: float

    def __post_init__(self) -> None:
        check_comp(self.comp)

    def select(self, p: Tensor, keys: Tensor, layout: Layout) -> Selection:
        keep = self._keep_53()
        if _as_arrays(p):
            found = _picked(p, [drawn(key, keep, p.shape[1]) for key in keys.tolist()])
        else:
            found = super().select(p, keys, layout)
        return found._replace(mask=Mask(keys, keep))

    def keep(self, p: Tensor, keys: Tensor, layout: Layout) -> Tensor:
        keep: Tensor = keyed.bits53(keys[:, None], _arange(p)) < self._keep_53()
        return keep

    def _keep_53(self) -> int:
        return round((1 - self.comp) * 2**53)

    def gamma(self, layout: Layout) -> float:
        return 1 / self.comp if self.comp else INFINITE


@dataclass(frozen=True)
class Threshold(Selector):
    """Keeps |p_j| >= lam * |p| / sqrt(d), lam below 1: drops at most lam^2 |p|^2, so gamma = 1 / lam^2."""

    name: ClassVar[str] = "threshold"
    lam: float

    def __post_init__(self) -> None:
        if not 1 / _LARGE <= self.lam < 1:
            raise InputError(f"lam = {self.lam} must lie between {1 / _LARGE:g} and 1")

    def keep(self, p: Tensor, keys: Tensor, layout: Layout) -> Tensor:
        square = unit_of(p.abs()).square()
        return (square * p.shape[1] >= self.lam**2 * row_sums(square)[:, None]) & (p != 0)

    def gamma(self, layout: Layout) -> float:
        return 1 / self.lam**2


@dataclass(frozen=True)
class Proportional(Selector):
    """Keeps coordinate j with probability q_j = min(1, c |p_j|), so that (1 - comp) * d are kept on average.

    Large coordinates are sure to travel, small ones do so now and then. Kept unscaled: by Cauchy-Schwarz
    sum q p^2 >= |p|^4 / sum(p^2 / q), so on every input this is at least as close to p as the unbiased
    version (p_j / q_j) at its best scale. q grows with |p_j|, hence gamma = 1 / comp.
    """

    name: ClassVar[str] = "proportional"
    comp: float

    def __post_init__(self) -> None:
        check_comp(self.comp)

    def keep(self, p: Tensor, keys: Tensor, layout: Layout) -> Tensor:
        draws = keyed.bits53(keys[:, None], _arange(p))
        keep: Tensor = draws < self.probabilities(unit_of(p.abs())) * 2.0**53
        return keep

    def probabilities(self, magnitude: Tensor) -> Tensor:
        """q for magnitudes (n, d): the c largest are certain, for the smallest c at which the rest fits."""
        n, d = magnitude.shape
        k = (1 - self.comp) * d
        descending = magnitude.sort(-1, descending=True).values
        rest = prefix_sums(descending.flip(-1)).flip(-1)
        left = k - torch.arange(d, device=magnitude.device, dtype=torch.float64)
        fits = (left * descending <= rest) | (left <= 0)
        certain = fits.to(torch.int8).argmax(-1, keepdim=True)
        rate = left.expand(n, d).gather(-1, certain).clamp(min=0) / rest.gather(-1, certain)
        return torch.where(magnitude > 0, (rate * magnitude).clamp(max=1), 0.0)

    def gamma(self, layout: Layout) -> float:
        return 1 / self.comp if self.comp else INFINITE


def _as_arrays(p: Tensor) -> bool:
    """Whether compiled code can do the work, which needs NumPy's arrays."""
    return p.device.type == "cpu" and p.dtype in (torch.float32, torch.float64) and len(p) > 0


def _picked(p: Tensor, found: list[np.ndarray]) -> Selection:
    """Each row's values at the indices found for it."""
    rows = p.detach().contiguous().numpy()
    offsets = torch.from_numpy(np.cumsum([0, *map(len, found)]))
    values = _joined([row[indices] for row, indices in zip(rows, found, strict=True)])
    return Selection(offsets, torch.from_numpy(_joined(found)), torch.from_numpy(values))


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _at_least(magnitude: Tensor, smallest: Tensor, k: Tensor) -> Tensor:
    """The k largest of each row, whose smallest is given; ties at it go to the lowest index."""
    above, tied = magnitude > smallest, magnitude == smallest
    wanted = k - above.sum(-1, keepdim=True)
    if bool((tied.sum(-1, keepdim=True) == wanted).all()):
        return above | tied  # as nearly always; the numbering below takes eight bytes an entry
    return above | (tied & (tied.cumsum(-1) <= wanted))


def _arange(p: Tensor) -> Tensor:
    return torch.arange(p.shape[1], device=p.device)
