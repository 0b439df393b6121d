"""EDEN: a rotated vector, each number of which is one of a few magnitudes of the normal distribution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np

from cfedavg.compress.blocks import Blocks
from cfedavg.compress.compressor import Selection, Selector, check_finite
from cfedavg.compress.numerics import normalise_rows, row_sums
from cfedavg.compress.selectors import in_memory, join
from cfedavg.core.arrays import Array, arange, cast, module_of, place, sqrt, to_single
from cfedavg.core.bases import Rotation
from cfedavg.core.layout import Layout
from cfedavg.core.parts import argument, check_truth
from cfedavg.core.payload import Levels, blocks

# For 1 to 4 bits, the magnitudes with the least mean squared error for a standard normal number (Lloyd-Max).
_CENTROIDS = (
    (0.79788456,),
    (0.45278003, 1.51041761),
    (0.24509418, 0.75600528, 1.34390928, 2.1519457),
    (0.12839503, 0.3880483, 0.65675912, 0.94234046, 1.2562312, 1.61804639, 2.06901723, 2.73258957),
)


@dataclass(frozen=True)
class Eden(Selector):
    """Rotates blocks of the vector and sends `bits` bits of each number, and one factor for each block.

    A block v of n numbers is rotated to y, whose numbers are nearly normal with variance |v|^2 / n. Each is
    sent as the nearest of 2^bits numbers that are best for a normal number. With q for these, the factor is
    |y|^2 / <y, q> if `unbiased`, so that the mean of C(p) over all rotations is p (nearly: the rotation of a
    short block is not uniform). Otherwise the factor is <y, q> / |q|^2, which has the least error.

    Let z = y sqrt(n) / |y|. The least error, over |v|^2, is at most the mean of (|z| - |q|)^2 over the block.
    A number z is a sum of random signs, so E z^2 = 1, E z^4 <= 3 and E|z| >= 1 / sqrt(2) (Szarek): for 1 bit
    and the best q, gamma = 2. For more bits, |z| is at most w from |q| up to the largest magnitude c; beyond,
    (|z| - c)^2 <= z^4 / (16 c^2). So 1 / gamma = w^2 + 3 / (16 c^2). If the least error is e, the unbiased
    error is e / (1 - e) <= 2 e for e <= 1/2; a block with a larger e takes the other factor. So gamma halves.

    >>> from cfedavg.compress import decompress, parse
    >>> payload = parse("eden(1, unbiased=false)").compress(np.array([3.0, 0.0, 0.0, 0.0]), key=0)
    >>> payload.values.scales.tolist(), abs(decompress(payload)).tolist()
    ([1.5], [[3.0, 0.0, 0.0, 0.0]])
    """

    name: ClassVar[str] = "eden"
    examples: ClassVar[tuple[str, ...]] = ("eden(1)", "eden(1, unbiased=false)")
    quantisers: ClassVar[tuple[str, ...] | None] = ()
    rounds_values: ClassVar[bool] = True
    bits: int = argument("from 1 to 4", lambda bits: 1 <= bits <= 4, integer=True)
    unbiased: bool = True
    block: int = argument(
        "a power of 2 up to 2^30",
        lambda block: 1 <= block <= 2**30 and block & (block - 1) == 0,
        4096,
        integer=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truth("unbiased", self.unbiased)

    def select(self, p: Array, keys: Array, layout: Layout, t: int, g2: Array | None = None) -> Selection:
        check_finite(p)
        vectors, words = in_memory(p, keys)
        rotation = Rotation(words, self.block)
        rounded = [
            self._round(rotation.rotate(vectors[:, start:stop], start))
            for start, stop in rotation.spans(vectors)
        ]
        levels, scales = (join(pieces) for pieces in zip(*rounded, strict=True))
        made = Levels(levels.reshape(-1), scales.reshape(-1), self.block, self._top, per_level=True)
        offsets = arange(len(p) + 1, p) * levels.shape[1]
        return Selection(
            offsets, None, made.map(lambda array: place(array, p)), basis=Rotation(keys, self.block)
        )

    @property
    def _top(self) -> int:
        return len(_CENTROIDS[self.bits - 1])

    def _round(self, values: Array) -> tuple[Array, Array]:
        """Return the levels of rotated values, of shape (n, count), and the scales of their blocks."""
        xp, width = module_of(values), values.shape[1]
        grid = Blocks(arange(len(values) + 1, values) * width, self.block)
        packed = abs(grid.pack(values.reshape(-1)))
        ratio, n = normalise_rows(packed), grid.lengths()
        norm2 = row_sums(xp.square(ratio))
        rms = sqrt(norm2 / xp.where(n > 0, n, 1))
        level, q = self._nearest(ratio, rms)
        q = xp.where(arange(grid.width, n) < n[:, None], q, 0.0)
        dot, q2 = row_sums(ratio * q), row_sums(xp.square(q))
        factor = dot / xp.where(q2 > 0, q2, 1.0)
        if self.unbiased:
            is_near = (2 * xp.square(dot) >= norm2 * q2) & (dot > 0)
            factor = xp.where(is_near, norm2 / xp.where(dot > 0, dot, 1.0), factor)
        scales = (factor * cast(xp.amax(packed, axis=-1), "float64"))[:, None] * self._centroids(values)
        levels = grid.unpack(level).reshape(values.shape)
        levels = cast(xp.where(values < 0, -levels, levels), "int8")
        return levels, to_single(scales).reshape(len(values), blocks(width, self.block) * self._top)

    def _nearest(self, ratio: Array, rms: Array) -> tuple[Array, Array]:
        """Return the level, from 1, and the magnitude nearest to each number of a block over its rms."""
        centroids = self._centroids(ratio)
        level = cast(0 * ratio, "int64") + 1
        for middle in ((centroids[1:] + centroids[:-1]) / 2).tolist():
            level = level + cast(ratio >= middle * rms[:, None], "int64")
        return level, centroids[level - 1]

    def _centroids(self, like: Array) -> Array:
        return place(np.array(_CENTROIDS[self.bits - 1]), like)

    def gamma(self, layout: Layout) -> float:
        magnitudes = (-_CENTROIDS[self.bits - 1][0], *_CENTROIDS[self.bits - 1])
        widest = max(high - low for low, high in pairwise(magnitudes)) / 2
        best = 2.0 if self.bits == 1 else 1 / (widest**2 + 3 / (16 * magnitudes[-1] ** 2))
        return best / 2 if self.unbiased else best

    def denser(self, times: float) -> Selector:
        return replace(self, bits=min(round(self.bits * times), 4))

    def most(self, layout: Layout) -> int:
        return Rotation(np.zeros(0, np.int64), self.block).count(layout.d)
