"""Top-k: the coordinates of largest magnitude, in a fixed number or as many as a target needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from cfedavg.compress.compressor import Selection, Selector, check_finite, select_where
from cfedavg.compress.numerics import find_largest, normalise_rows, pick, prefix_sums, squared_norms
from cfedavg.compress.selectors import (
    LARGE,
    can_compile,
    fraction,
    join,
    less_dropped,
    rows_in_memory,
    select_found,
)
from cfedavg.core import arrays
from cfedavg.core.arrays import Array, cast, module_of
from cfedavg.core.errors import InputError, NotFinite
from cfedavg.core.kernels import is_plain
from cfedavg.core.layout import Layout
from cfedavg.core.parts import argument, check_truth

_TILE = 2**16  # the entries of chunks that are searched at once on a CPU; they stay in its cache


@dataclass(frozen=True)
class TopK(Selector):
    """Keeps the k coordinates of largest magnitude; of equal magnitudes, those at lower indices.

    `comp` is the fraction not sent: of d coordinates, k = max(1, round((1 - comp) * d)) are sent, and the SNR
    is gamma = d / (d - k), since the d - k smallest squares have at most the mean of all. With `least`, k is
    at least `least`, or d if d is smaller: a small model costs few bytes and needs a larger fraction. With
    `warmup`, the share of rounds t = 0 to warmup - 1 is larger: (1 - comp)^((t + 1) / (warmup + 1)).

    With `snr` instead of `comp`, k is the smallest number for which |C(p) - p|^2 <= |p|^2 / snr. With
    `per_tensor`, k is chosen for each tensor of the model separately.

    With `chunk`, the vector is cut into chunks of `chunk` coordinates, and the `k` largest of each chunk are
    kept; a shorter last chunk keeps min(k, its length). The SNR is that of the chunks, chunk / (chunk - k).

    With `hold`, k is the smallest number for which |C(p) - p| <= hold * |g|, where g is the client's update:
    with error feedback, the residual stays within `hold` times the update. The SNR may be as low as 1.

    >>> from cfedavg.compress import parse
    >>> p = np.array([3.0, -1.0, 4.0, 1.0, -5.0])
    >>> payload = parse("topk(0.6)").compress(p, key=0)
    >>> payload.indices.tolist(), payload.values.data.tolist()
    ([2, 4], [4.0, -5.0])
    >>> parse("topk(chunk=3, k=1)").compress(p, key=0).indices.tolist()
    [2, 4]
    """

    name: ClassVar[str] = "topk"
    comp: float | None = fraction(None)
    snr: float | None = argument(f"from 1 to {LARGE:g}", lambda snr: 1 <= snr <= LARGE, None)
    per_tensor: bool = False
    least: int = argument("from 1 to 2^53", lambda least: 1 <= least <= 2**53, 1, integer=True)
    warmup: int = argument("from 0 to 2^31 - 1", lambda warmup: 0 <= warmup < 2**31, 0, integer=True)
    chunk: int | None = argument("from 2 to 2^31 - 1", lambda chunk: 2 <= chunk < 2**31, None, integer=True)
    k: int | None = argument("of 1 or more", lambda k: k >= 1, None, integer=True)
    hold: float | None = argument(f"from 0 to {LARGE:g}", lambda hold: 0 <= hold <= LARGE, None)

    def __post_init__(self) -> None:
        if sum(rule is not None for rule in (self.comp, self.snr, self.chunk, self.hold)) != 1:
            raise InputError(
                "topk needs one of comp, as in topk(0.99), snr, as in topk(snr=1.05), chunk, as in "
                "topk(chunk=4096, k=64), and hold, as in topk(hold=5)"
            )
        super().__post_init__()
        check_truth("per_tensor", self.per_tensor)
        if (self.chunk is None) != (self.k is None):
            raise InputError("chunk and k must be given together, as in topk(chunk=4096, k=64)")
        if self.chunk is not None and self.k is not None and self.k >= self.chunk:
            raise InputError(f"k must be below chunk, {self.chunk}, got {self.k}")
        for name in ("least", "warmup"):
            if self.comp is None and getattr(self, name) != getattr(type(self), name):
                raise InputError(f"{name} can be given with comp only, as in topk(0.97, {name}=10)")
        if self.per_tensor and self.comp is None and self.snr is None:
            raise InputError(
                "per_tensor can be given with comp or snr only, as in topk(snr=2, per_tensor=true)"
            )

    def __str__(self) -> str:
        return super().__str__().replace("comp=", "")

    @property
    def summary(self) -> str:
        if self.hold is not None:
            return f"Keeps the fewest coordinates that leave at most {self.hold:g} times the update."
        if self.chunk is not None:
            return f"Keeps the {self.k} largest of each {self.chunk:,} coordinates."
        if self.snr is not None:
            return f"Keeps the fewest coordinates of largest magnitude with the SNR {self.snr:g}."
        if self.warmup:
            return f"Keeps fewer coordinates in each of the first {self.warmup} rounds, then the same share."
        return super().summary

    @property
    def needs_update(self) -> bool:
        return self.hold is not None

    @property
    def _chunks(self) -> Chunks | None:
        return None if self.chunk is None or self.k is None else Chunks(self.chunk, self.k)

    def _parts(self, layout: Layout) -> list[slice]:
        """Return the slices of a vector that are compressed separately: each tensor, or the whole vector."""
        tensors = [part for part in layout.slices() if part.start < part.stop]
        return tensors if self.per_tensor and tensors else [slice(0, layout.d)]

    def _k(self, part: slice, t: int) -> int:
        d: int = part.stop - part.start
        share: float = (1 - (self.comp or 0)) ** min(1.0, (t + 1) / (self.warmup + 1))
        return max(min(self.least, d), round(share * d))

    def select(self, p: Array, keys: Array, layout: Layout, t: int, g2: Array | None = None) -> Selection:
        if self.hold is not None:
            check_finite(p)
            return select_where(p, self._keep_within(p, squared_norms(p) if g2 is None else g2))
        if self._chunks and can_compile(p):
            check_finite(p)
            return select_found(p, list(map(self._chunks.find, rows_in_memory(p))))
        if self.comp is None or not can_compile(p) or is_plain(pick):
            return super().select(p, keys, layout, t)
        parts = [(part, self._k(part, t)) for part in self._parts(layout)]
        found = [
            [(part.start, *find_largest(row[part], k)) for part, k in parts] for row in rows_in_memory(p)
        ]
        if bad := [i for i, of_row in enumerate(found) if not all(finite for _, _, finite in of_row)]:
            raise NotFinite(bad)
        return select_found(p, [join([start + indices for start, indices, _ in of_row]) for of_row in found])

    def denser(self, times: float) -> Selector:
        if self.snr is not None:
            return replace(self, snr=min(self.snr * times, LARGE))
        if self.hold is not None:
            return replace(self, hold=self.hold / times)
        if self.chunk is not None and self.k is not None:
            return replace(self, k=min(round(self.k * times), self.chunk - 1))
        least = 1 if self.least == 1 else min(round(self.least * times), 2**53)
        return replace(self, comp=less_dropped(self.comp or 0, times), least=least)

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        if self.hold is not None:
            return self._keep_within(p, squared_norms(p))
        if self._chunks:
            return self._chunks.keep(p)
        return join([self._keep(p[:, part], part, t) for part in self._parts(layout)])

    def _keep(self, p: Array, part: slice, t: int) -> Array:
        if self.snr is None:
            return _keep_k(abs(p), self._k(part, t))
        return _keep_fewest(p, lambda lost: lost * self.snr <= lost[:, -1:])

    def _keep_within(self, p: Array, g2: Array) -> Array:
        """Keep the fewest coordinates so that what is left has at most the norm hold * sqrt(g2)."""
        assert self.hold is not None
        top = module_of(p).amax(abs(p), axis=-1)
        most = self.hold * arrays.sqrt(g2) / module_of(p).where(top > 0, cast(top, "float64"), 1.0)
        return _keep_fewest(p, lambda lost: lost <= module_of(p).square(most)[:, None])

    def gamma(self, layout: Layout) -> float:
        if self.hold is not None:
            return 1.0
        if self.snr is not None:
            return self.snr
        sizes = [(part.stop - part.start, self._k(part, self.warmup)) for part in self._parts(layout)]
        if self._chunks:
            sizes = [(length, k) for _, _, length, k in self._chunks.runs(layout.d)]
        return min((d / (d - k) if k < d else math.inf for d, k in sizes), default=math.inf)

    def most(self, layout: Layout) -> int:
        if self._chunks:
            return sum((stop - start) // length * k for start, stop, length, k in self._chunks.runs(layout.d))
        return layout.d if self.comp is None else sum(self._k(part, 0) for part in self._parts(layout))


class Chunks(NamedTuple):
    """Chunks of `length` consecutive coordinates, of which the `k` largest are kept."""

    length: int
    k: int

    def runs(self, d: int) -> list[tuple[int, int, int, int]]:
        """Return (start, stop, length, k) of the full chunks, and of a shorter last chunk."""
        whole = d - d % self.length
        cuts = [(0, whole, self.length), (whole, d, d - whole)]
        return [(*cut, min(self.k, cut[2])) for cut in cuts if cut[0] < cut[1]]

    def keep(self, p: Array) -> Array:
        """Return booleans of the shape of p, true at the coordinates that are kept."""
        found = [
            _keep_k(abs(p[:, start:stop]).reshape(-1, length), k).reshape(len(p), stop - start)
            for start, stop, length, k in self.runs(p.shape[1])
        ]
        return join(found) if found else p != p

    def find(self, row: np.ndarray) -> np.ndarray:
        """Return the coordinates of a vector that are kept, in increasing order."""
        found, step = [np.empty(0, np.int64)], max(1, _TILE // self.length) * self.length
        for start, stop, length, k in self.runs(len(row)):
            for first in range(start, stop, step):
                chunks = row[first : min(first + step, stop)].reshape(-1, length)
                found.append(first + _find_k(chunks, k))
        return np.concatenate(found)


def _keep_fewest(p: Array, may_lose: Callable[[Array], Array]) -> Array:
    """Return booleans that are true at the fewest coordinates of each row; the largest are kept.

    `may_lose` says which sums of squares may be lost; it gets the sums of the 1, 2, ... smallest squares of
    each row, divided by the row's largest.
    """
    magnitude = abs(p)
    ascending = arrays.sort_rows(magnitude)
    drop = may_lose(prefix_sums(module_of(p).square(normalise_rows(ascending)))).sum(-1)[:, None]
    smallest = arrays.gather(ascending, drop.clip(max=p.shape[1] - 1))
    return _keep_largest(magnitude, smallest, p.shape[1] - drop)


def _keep_k(magnitude: Array, k: int) -> Array:
    """Return booleans that are true at the k largest magnitudes of each row."""
    return _keep_largest(magnitude, arrays.kth_largest(magnitude, k), k)


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


def _find_k(rows: np.ndarray, k: int) -> np.ndarray:
    """Return where the k largest magnitudes of each row are, as positions in the whole matrix."""
    magnitude = np.abs(rows)
    smallest = arrays.kth_largest(magnitude, k)
    found = np.flatnonzero(magnitude >= smallest)
    if len(found) > k * len(rows):  # magnitudes are tied
        found = np.flatnonzero(_keep_largest(magnitude, smallest, k))
    return found
