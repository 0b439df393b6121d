"""The section of a message that says which coordinates are sent.

The section is empty if all coordinates are sent. It holds a key if a key draws the coordinates, and the basis
if the values are coordinates in another basis. Else it holds a coded list: see `indices` for coordinates
anywhere and `chunks` for as many in each chunk. docs/wire.md specifies the format.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cfedavg.core.bases import Factors, Rotation
from cfedavg.core.keys import draw_into
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Mask, Payload
from cfedavg.wire import coder as rc
from cfedavg.wire.chunks import decode_chunks, encode_chunks, find_chunk
from cfedavg.wire.coder import Array
from cfedavg.wire.frame import KEY_AND_BLOCK, KEY_AND_KEEP, RANK, Header, Where, WireError
from cfedavg.wire.indices import decode_indices, encode_indices
from cfedavg.wire.sets import BEYOND, OTHER_NUMBER


class Matrices(NamedTuple):
    """The tensors of a layout as matrices, in the form that the coders need.

    `shapes` holds three integers for each tensor: its number of rows, its number of columns, and its depth.
    The depth is the number of coordinates where a row and a column meet. A 1-D tensor has one row and one
    column. `row_ends` holds, for each row of each tensor, the index in the flat vector at which the row ends.
    """

    shapes: Array
    row_ends: Array

    @staticmethod
    @lru_cache(maxsize=64)
    def of(layout: Layout) -> Matrices:
        """Return the matrices of a layout's tensors; raise WireError if one is too large."""
        shapes = [shape if len(shape) > 1 else (1, 1, *shape) for shape in layout.shapes if math.prod(shape)]
        each = [(rows, columns, math.prod(depth)) for rows, columns, *depth in shapes]
        views = np.array(each, np.int64).reshape(-1, 3)
        if (views[:, :2] >= 2**31).any():
            raise WireError(f"a tensor must have fewer than 2^31 rows and columns, got {views[:, :2].max()}")
        return Matrices(views, np.cumsum(np.repeat(views[:, 1] * views[:, 2], views[:, 0])))

    @staticmethod
    def one_row(k: int) -> Matrices:
        """Return the matrices of k values in another basis: one row and one column."""
        return Matrices(np.array([[1, 1, k]]), np.array([k]))


def where_of(payload: Payload) -> Where:
    """Return which coordinates the payload sends; LISTED also stands for coordinates in chunks."""
    if payload.basis is not None:
        return Where.ROTATED if isinstance(payload.basis, Rotation) else Where.FACTORED
    if payload.indices is None:
        return Where.ALL
    return Where.LISTED if payload.mask is None else Where.DRAWN


def pack_coordinates(payload: Payload, matrices: Matrices) -> tuple[Where, bytes]:
    """Return which coordinates the payload sends, as the header names it, and the section that says so."""
    if isinstance(payload.basis, Rotation):
        return Where.ROTATED, KEY_AND_BLOCK.pack(int(payload.basis.keys[0]), payload.basis.block)
    if isinstance(payload.basis, Factors):
        return Where.FACTORED, RANK.pack(payload.basis.rank)
    if payload.indices is None:
        return Where.ALL, b""
    if payload.mask is not None:
        return Where.DRAWN, KEY_AND_KEEP.pack(int(payload.mask.keys[0]), payload.mask.keep)
    listed = _pack_list(payload.indices, payload.d, matrices.shapes)
    if chunk := find_chunk(payload.indices, payload.d):
        in_chunks = _pack_chunks(payload.indices, payload.d, matrices.shapes, *chunk)
        if len(in_chunks) < len(listed):
            return Where.CHUNKED, in_chunks
    return Where.LISTED, listed


def _pack_list(indices: Array, d: int, shapes: Array) -> bytes:
    k = len(indices)
    # A gap takes at most a symbol of 16 bits, on average a quarter of a symbol more, and the mean gap's bits.
    gaps = k * (24 + (d // max(k, 1)).bit_length()) // 32
    bands_and_counts = int(512 * len(shapes) + 2 * shapes[:, :2].sum())
    words = np.empty(gaps + bands_and_counts + 64, np.uint32)
    return rc.to_bytes(words, encode_indices(words, indices, d, shapes))


def _pack_chunks(indices: Array, d: int, shapes: Array, s: int, n: int) -> bytes:
    # A position takes at most 25 bits, and each bit of a count 11: one for each piece and each coordinate.
    pieces = int(shapes[:, 0].sum()) + (d >> s) + 1
    words = np.empty((36 * len(indices) + 11 * pieces) // 32 + 64, np.uint32)
    return rc.to_bytes(words, encode_chunks(words, indices, d, shapes, s, n))


def unpack_coordinates(
    section: memoryview, header: Header, matrices: Matrices
) -> tuple[Array | None, Mask | None]:
    """Return the indices of the sent coordinates, and the mask.

    The indices are None if all coordinates are sent. The mask is None unless the indices come from a key.
    """
    if header.where is Where.ALL or header.where.is_basis:
        return None, None
    indices = np.empty(header.k, np.int64)
    if header.where is Where.DRAWN:
        key, keep = KEY_AND_KEEP.unpack(section)
        if keep > 2**53 or draw_into(key, keep, header.d, indices) != header.k:
            raise WireError(f"the key of the message does not draw k = {header.k} coordinates")
        return indices, Mask(np.array([key]), keep)
    decode = decode_chunks if header.where is Where.CHUNKED else decode_indices
    fault, words = decode(rc.to_words(section), indices, header.d, matrices.shapes)
    if fault == BEYOND:
        raise WireError(f"an index lies beyond the last coordinate, {header.d - 1}")
    if fault == OTHER_NUMBER:
        raise WireError(f"the message lists more or fewer indices than k = {header.k}")
    rc.check_end(section, words, "indices")
    return indices, None


def unpack_basis(section: memoryview, header: Header, layout: Layout) -> Rotation | Factors | None:
    """Return the basis whose coordinates the values are; None if they are coordinates of the vector."""
    if not header.where.is_basis:
        return None
    basis: Rotation | Factors
    if header.where is Where.ROTATED:
        key, block = KEY_AND_BLOCK.unpack(section)
        basis = Rotation(np.array([key]), block)
    else:
        basis = Factors.of(layout, RANK.unpack(section)[0])
    check_basis(basis, layout, header.k)
    return basis


def check_basis(basis: Rotation | Factors, layout: Layout, k: int) -> None:
    """Raise WireError unless the basis has a place in a message, fits the layout and has k coordinates."""
    if isinstance(basis, Rotation):
        if not 0 < basis.block < 2**32 or basis.block & (basis.block - 1):
            raise WireError(f"`block` of a rotation must be a power of two below 2^32, got {basis.block}")
    elif not 0 < basis.rank < 2**32:
        raise WireError(f"`rank` of factors must be from 1 to 2^32 - 1, got {basis.rank}")
    elif basis.shapes != Factors.of(layout, basis.rank).shapes:
        raise WireError("the factors must be those of the layout: `Factors.of(layout, rank)`")
    if k != (count := basis.count(layout.d)):
        raise WireError(f"the basis of the message has {count} coordinates, got k = {k}")
