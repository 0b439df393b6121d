"""Low rank: a matrix is sent as two thin factors, found by one power iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from cfedavg.compress.compressor import Selection, Selector, check_finite
from cfedavg.compress.numerics import row_sums, squared_norms
from cfedavg.compress.selectors import in_memory, join
from cfedavg.core.arrays import (
    Array,
    arange,
    by_tiles,
    cast,
    dtype_of,
    from_bf16,
    module_of,
    place,
    power_below,
    sqrt,
    to_bf16_at_random,
    to_single,
    zeros,
)
from cfedavg.core.bases import Factors
from cfedavg.core.keys import bits, normals
from cfedavg.core.layout import Layout
from cfedavg.core.parts import argument

_DEPENDENT = 2.0**-30  # a column that others express up to this share is dropped: what is left is rounding


@dataclass(frozen=True)
class LowRank(Selector):
    """Sends each matrix M as P Q^T with r = `rank` columns, by one power iteration (PowerSGD).

    A tensor is a matrix: its first axis by all others. Tensors with one axis, and those whose factors would
    not be shorter, are sent as they are. From a Gaussian start Q_0, drawn from the key,

        P = orthonormal columns of M Q_0, rounded at random to bf16;    Q = M^T P.

    A random start captures r / k of |M|^2 on average, k = min(rows, columns), and M Q_0 captures no less.
    Rounding moves P around its mean by at most delta = sqrt(r) / 128: (1 - 2 delta - delta^2) of that stays.
    Only fp32 and bf16 may follow. Their errors in Q are nearly in the span of P; with 3 delta instead of
    2 delta + delta^2 for these, 1 / gamma = 1 - (r / k) (1 - 3 delta). The least gamma of a matrix counts.

    >>> from cfedavg.compress import decompress, parse
    >>> layout = Layout(("w",), ((3, 4),), ("float32",))
    >>> p = np.outer([1.0, -2.0, 0.5], [4.0, 0.0, 8.0, 2.0]).reshape(-1)
    >>> payload = parse("lowrank(1)").compress(p, key=0, layout=layout)
    >>> payload.counts(), bool(abs(decompress(payload)[0] - p).max() < 0.1)
    ([7], True)
    """

    name: ClassVar[str] = "lowrank"
    examples: ClassVar[tuple[str, ...]] = ("lowrank(2)",)
    quantisers: ClassVar[tuple[str, ...] | None] = ("fp32", "bf16")
    rank: int = argument("from 1 to 256", lambda rank: 1 <= rank <= 256, integer=True)

    def select(self, p: Array, keys: Array, layout: Layout, t: int, g2: Array | None = None) -> Selection:
        check_finite(p)
        basis = Factors.of(layout, self.rank)
        vectors, words = in_memory(p, keys)
        values = join([zeros((len(p), 0), vectors), *_pieces(vectors, words, basis)])
        values = place(values, p)
        return Selection(arange(len(p) + 1, p) * values.shape[1], None, values.reshape(-1), basis=basis)

    def gamma(self, layout: Layout) -> float:
        basis = Factors.of(layout, self.rank)
        pairs = zip(basis.shapes, basis.ranks(), strict=True)
        kept = [r / min(shape) * (1 - 3 * math.sqrt(r) / 128) for shape, r in pairs if r]
        return 1 / (1 - min(kept)) if kept else math.inf

    def denser(self, times: float) -> Selector:
        return replace(self, rank=min(round(self.rank * times), 256))

    def most(self, layout: Layout) -> int:
        return Factors.of(layout, self.rank).count(layout.d)


def _pieces(p: Array, keys: Array, basis: Factors) -> Iterator[Array]:
    """Yield the values of each tensor of the vectors p; draws are numbered by the values' positions."""
    sent = start = 0
    for (rows, columns), r, count in zip(basis.shapes, basis.ranks(), basis.counts(), strict=True):
        size = rows * columns if columns else rows
        part = p[:, start : start + size]
        if columns:
            places = sent + arange(count, keys)
            part = _factorise(part.reshape(len(p), rows, columns), r, keys[:, None], places)
        yield part
        sent, start = sent + count, start + size


def _factorise(M: Array, r: int, keys: Array, places: Array) -> Array:
    """Return the values of matrices M, of shape (n, rows, columns): P, then Q, row after row."""
    n, rows, columns = M.shape
    Q_0 = normals(keys, places[rows * r :]).reshape(n, columns, r)
    P = orthonormal_columns(multiply(M, Q_0)).reshape(n, rows * r)
    P = from_bf16(to_bf16_at_random(to_single(P), bits(keys, places[: rows * r]) >> 48 & 0xFFFF))
    Q = multiply(M.swapaxes(1, 2), cast(P, "float64").reshape(n, rows, r)).reshape(n, columns * r)
    # P and Q get an equal share of M's size, so that Q does not overflow. A power of two changes no bit.
    top = cast(module_of(M).amax(abs(M.reshape(n, -1)), axis=-1), "float64")
    share = power_below(sqrt(module_of(M).where(top > 0, top, 1.0)))[:, None]
    values = join([cast(P, "float64") * share, Q / share])
    return values if dtype_of(M) == "float64" else to_single(values)


def multiply(A: Array, B: Array) -> Array:
    """Return the products of the matrices A, of shape (n, a, b), and B, of shape (n, b, r).

    Sums have the order of `row_sums`, so that the products have the same bits on every device.
    """
    if module_of(A) is np and len(A):
        return np.stack([by_tiles(partial(_multiply, B=V), M) for M, V in zip(A, B, strict=True)])
    return _multiply(A, B)


def _multiply(A: Array, B: Array) -> Array:
    products = [row_sums(A * B[..., None, :, i]) for i in range(B.shape[-1])]
    return module_of(A).stack(products, -1)


def orthonormal_columns(Y: Array) -> Array:
    """Return matrices with orthonormal columns that span those of Y, of shape (n, rows, r), by Gram-Schmidt.

    A column that depends on those before it becomes 0.
    """
    xp, (n, rows, r) = module_of(Y), Y.shape
    P = zeros((n, r, rows), Y)
    for i in range(r):
        column = Y[:, :, i]
        least, before = _DEPENDENT**2 * squared_norms(column), P[:, :i]
        for _ in range(2 if i else 0):  # twice: once leaves rounding errors of dependent columns
            shares = row_sums(before * column[:, None])
            column = column - row_sums((before * shares[:, :, None]).swapaxes(1, 2))
        size = squared_norms(column)
        P[:, i] = xp.where(
            (size > least)[:, None], column / sqrt(xp.where(size > 0, size, 1.0))[:, None], 0.0
        )
    return P.swapaxes(1, 2)
