"""What the coders know of a layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cfedavg.core.layout import Layout
from cfedavg.wire.header import WireError


@dataclass(frozen=True)
class Tensors:
    """Rows, columns and group of each tensor, as int64 (n, 3); and where each row of each of them ends."""

    shapes: np.ndarray
    ends: np.ndarray

    @staticmethod
    @lru_cache(maxsize=64)
    def of(layout: Layout) -> Tensors:
        each = [_view(shape) for shape in layout.shapes if math.prod(shape)]
        views = np.array(each, np.int64).reshape(-1, 3)
        if (views[:, :2] >= 2**31).any():
            raise WireError("a tensor of 2^31 or more rows or columns cannot be sent")
        return Tensors(views, np.cumsum(np.repeat(views[:, 1] * views[:, 2], views[:, 0])))

    @property
    def overhead(self) -> int:
        """More words than all classes and counts can take."""
        return int(512 * len(self.shapes) + 2 * self.shapes[:, :2].sum())


def _view(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A tensor as a matrix of cells: (rows, columns, coordinates of a cell). A vector is one cell."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    return shape[0], shape[1], math.prod(shape[2:])
