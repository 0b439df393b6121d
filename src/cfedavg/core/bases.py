"""Bases: payloads whose values are coordinates of the vector in another basis.

`Rotation` turns blocks of a vector by a random sign of each number and a Walsh-Hadamard transform. `Factors`
stands for matrices that are sums of a few outer products. The sender's compressor makes the values; `expand`
makes vectors of them, for a sender and a receiver alike.

Sums are in float64 and in a fixed order. So the vectors are the same, bit for bit, for NumPy and torch, and
on a CPU and a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from cfedavg.core.arrays import (
    TILE,
    Array,
    arange,
    by_tiles,
    cast,
    dtype_of,
    module_of,
    place,
    to_numpy,
    to_single,
    zeros,
)
from cfedavg.core.keys import bits53
from cfedavg.core.layout import Layout


@dataclass(frozen=True)
class Rotation:
    """Blocks of each client's vector, rotated: n numbers v become H (s v) / sqrt(n).

    H is the Walsh-Hadamard matrix. The sign s_j of coordinate j is 1 if bits53(key, j) is even, else -1. A
    block has `block` numbers, a power of two. A shorter last block is filled with zeros up to the next power
    of two. `count(d)` is the number of coordinates with these zeros.

    >>> basis = Rotation(np.array([0]), 4)
    >>> values = basis.rotate(np.array([[1.0, 2.0, 3.0, 4.0, 5.0]]))
    >>> values.shape, basis.expand(values, 5).tolist()
    ((1, 5), [[1.0, 2.0, 3.0, 4.0, 5.0]])
    """

    keys: Array  # int64, one for each client
    block: int

    def map(self, convert: Callable[[Array], Array]) -> Rotation:
        """Return the basis with the function `convert` applied to its array."""
        return replace(self, keys=convert(self.keys))

    def of_client(self, c: int) -> Rotation:
        """Return the basis of client c alone."""
        return replace(self, keys=self.keys[c : c + 1])

    def count(self, d: int) -> int:
        """Return the number of values of a vector of length d."""
        rest = d % self.block
        return d - rest + (1 << (rest - 1).bit_length() if rest else 0)

    def spans(self, p: Array) -> list[tuple[int, int]]:
        """Return where to cut the vectors p, of shape (n, d): into few blocks on a CPU, which caches them."""
        n, d = p.shape
        step = self.block * max(1, TILE // (self.block * max(1, n))) if module_of(p) is np else max(1, d)
        return [(start, min(start + step, d)) for start in range(0, d, step)] or [(0, 0)]

    def rotate(self, p: Array, first: int = 0) -> Array:
        """Return the values of the vectors p, of shape (n, d), as float64 numbers of shape (n, count(d)).

        The numbers of p are those of the coordinates `first`, first + 1, ..., a multiple of the block.
        """
        n, d = p.shape
        values = self._signs(first, d) * cast(p, "float64")
        if missing := self.count(d) - d:
            values = module_of(p).concatenate([values, zeros((n, missing), values)], -1)
        return self._turn(values, d)

    def expand(self, values: Array, d: int) -> Array:
        """Return the vectors of length d that have these values, which are of shape (n, count(d))."""
        if module_of(values) is not np and not values.is_cuda:  # NumPy is faster with strided arrays
            vectors: Array = self.map(to_numpy).expand(to_numpy(values), d)
            return place(vectors, values)
        pieces = [self._expand(values, start, stop - start) for start, stop in self.spans(values[:, :d])]
        return module_of(values).concatenate(pieces, -1)

    def _expand(self, values: Array, first: int, d: int) -> Array:
        """Return the d coordinates of the vectors from `first` on."""
        part = cast(values[:, first : first + self.count(d)], "float64")
        return _round_like(self._signs(first, d) * self._turn(part, d)[:, :d], values)

    def _signs(self, first: int, d: int) -> Array:
        """Return the signs s of d coordinates from `first` on, of shape (n, d)."""
        return 1 - 2 * (bits53(self.keys[:, None], first + arange(d, self.keys)) & 1)

    def _turn(self, values: Array, d: int) -> Array:
        """Return H v / sqrt(n) for each block v of the values."""
        whole = d - d % self.block
        parts = [(0, whole, self.block), (whole, values.shape[1], values.shape[1] - whole)]
        turned = [
            transform(values[:, start:stop].reshape(-1, width)).reshape(len(values), stop - start)
            for start, stop, width in parts
            if start < stop
        ]
        return module_of(values).concatenate(turned or [values], -1)


@dataclass(frozen=True)
class Factors:
    """Matrices as sums of `rank` outer products; r = min(rank, rows, columns) of them for each matrix.

    `shapes` holds (rows, columns) of each tensor as a matrix, in the layout's order. The values of a matrix
    are P, of rows x r numbers, then Q, of columns x r numbers, row after row; the matrix is P Q^T. The shape
    (size, 0) stands for a tensor whose `size` numbers are values as they are.

    >>> basis = Factors(1, ((2, 3), (2, 0)))
    >>> basis.expand(np.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]), basis.d).tolist()
    [[3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 6.0, 7.0]]
    """

    rank: int
    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Factors:
        """Return the factors of a layout's tensors.

        The first axis of a tensor gives the rows, all others the columns. A tensor with fewer than 2 axes is
        no matrix. A matrix whose factors are not shorter than itself is sent as it is.
        """
        return cls(rank, tuple(_shape_of(shape, rank) for shape in layout.shapes))

    @property
    def d(self) -> int:
        """The length of the vectors."""
        return sum(rows * columns if columns else rows for rows, columns in self.shapes)

    def map(self, convert: Callable[[Array], Array]) -> Factors:
        """Return the basis: it has no arrays."""
        return self

    def of_client(self, c: int) -> Factors:
        """Return the basis of client c alone: all clients have the same."""
        return self

    def ranks(self) -> list[int]:
        """Return the number of outer products of each tensor; 0 for a tensor that is sent as it is."""
        return [min(self.rank, *shape) for shape in self.shapes]

    def counts(self) -> list[int]:
        """Return the number of values of each tensor."""
        pairs = zip(self.shapes, self.ranks(), strict=True)
        return [(rows + columns) * r if columns else rows for (rows, columns), r in pairs]

    def count(self, d: int) -> int:
        """Return the number of values of a vector; its length d is that of the shapes."""
        return sum(self.counts())

    def expand(self, values: Array, d: int) -> Array:
        """Return the vectors of length d that have these values, which are of shape (n, count(d))."""
        vectors, start, end = zeros((len(values), d), values), 0, 0
        for (rows, columns), r, count in zip(self.shapes, self.ranks(), self.counts(), strict=True):
            part = values[:, start : start + count]
            size = rows * columns if columns else rows
            if columns:
                matrix = add_products(cast(part, "float64"), rows, columns, r)
                part = _round_like(matrix.reshape(len(values), size), values)
            vectors[:, end : end + size] = part
            start, end = start + count, end + size
        return vectors


Basis = Rotation | Factors


def add_products(factors: Array, rows: int, columns: int, r: int) -> Array:
    """Return P Q^T, one outer product after another, for `factors` of shape (n, (rows + columns) r)."""
    n = len(factors)
    P = factors[:, : rows * r].reshape(n, rows, r)
    Q = factors[:, rows * r :].reshape(n, columns, r)
    with np.errstate(over="ignore", invalid="ignore"):
        total = P[:, :, None, 0] * Q[:, None, :, 0]
        for i in range(1, r):
            total = total + P[:, :, None, i] * Q[:, None, :, i]
    return total


def transform(rows: Array) -> Array:
    """Return H v / sqrt(n) for each row v of a matrix with n columns, n a power of two.

    Each stage puts the sums of neighbours into the first half of a row and their differences into the second.
    log2(n) stages give the Walsh-Hadamard transform, since the shuffles cancel.
    """
    # No quotient at the end: a GPU divides by one number in another way.
    return by_tiles(_add_and_subtract, rows) * math.sqrt(1 / rows.shape[1])


def _add_and_subtract(rows: Array) -> Array:
    """Return H v for each row v of a matrix."""
    xp, half = module_of(rows), rows.shape[1] // 2
    spare = [zeros(tuple(rows.shape), rows) for _ in range(2)]
    with np.errstate(over="ignore", invalid="ignore"):
        for stage in range(rows.shape[1].bit_length() - 1):
            mixed = spare[stage % 2]
            xp.add(rows[:, ::2], rows[:, 1::2], out=mixed[:, :half])
            xp.subtract(rows[:, ::2], rows[:, 1::2], out=mixed[:, half:])
            rows = mixed
    return rows


def _shape_of(shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix, or (size, 0) if factors do not make it shorter."""
    rows, columns = shape[0] if shape else 1, math.prod(shape[1:])
    r = min(rank, rows, columns)
    is_shorter = len(shape) >= 2 and (rows + columns) * r < rows * columns
    return (rows, columns) if is_shorter else (rows * columns, 0)


def _round_like(vectors: Array, values: Array) -> Array:
    """Return float64 vectors in the dtype of `values`."""
    return to_single(vectors) if dtype_of(values) == "float32" else vectors
