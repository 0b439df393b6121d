"""The section of a message that says which coordinates are sent.

If all coordinates are sent, the section is empty. Else the section holds a key that draws the coordinates, or
a coded set of indices.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cfedavg.core.keys import draw_into
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Mask, Payload
from cfedavg.wire.coder import check_end, to_bytes, to_words
from cfedavg.wire.header import Header, Where, WireError
from cfedavg.wire.indices import BEYOND, OTHER_NUMBER, decode_indices, encode_indices

KEY_AND_KEEP = struct.Struct("<qQ")


@dataclass(frozen=True)
class Tensors:
    """The shapes of a layout's tensors, in the form that the coders need.

    `shapes`, int64 (n, 3), holds rows, columns and coordinates per cell of each tensor. A cell is where a row
    and a column meet; a 1-D tensor is one cell. `ends` holds the index in the flat vector at which each row
    of each tensor ends.
    """

    shapes: np.ndarray
    ends: np.ndarray

    @staticmethod
    @lru_cache(maxsize=64)
    def of(layout: Layout) -> Tensors:
        shapes = [shape if len(shape) > 1 else (1, 1, *shape) for shape in layout.shapes if math.prod(shape)]
        each = [(rows, columns, math.prod(group)) for rows, columns, *group in shapes]
        views = np.array(each, np.int64).reshape(-1, 3)
        if (views[:, :2] >= 2**31).any():
            raise WireError(f"a tensor must have fewer than 2^31 rows and columns, got {views[:, :2].max()}")
        return Tensors(views, np.cumsum(np.repeat(views[:, 1] * views[:, 2], views[:, 0])))

    @property
    def overhead(self) -> int:
        """An upper bound of the 32-bit words that all classes of density and all counts take."""
        return int(512 * len(self.shapes) + 2 * self.shapes[:, :2].sum())


def where_of(payload: Payload) -> Where:
    """Return how a message names the payload's coordinates: all, drawn from a key, or listed."""
    if payload.indices is None:
        return Where.ALL
    return Where.DRAWN if payload.mask is not None else Where.LISTED


def pack_coordinates(payload: Payload, tensors: Tensors) -> bytes:
    """Return the bytes of the section that names the payload's coordinates."""
    if payload.indices is None:
        return b""
    if payload.mask is not None:
        return KEY_AND_KEEP.pack(int(payload.mask.keys[0]), payload.mask.keep)
    indices = payload.indices
    # A gap takes at most a symbol of 16 bits, on average a quarter of a symbol more, and the mean gap's bits.
    bits = 24 + (payload.d // max(len(indices), 1)).bit_length()
    words = np.empty(len(indices) * bits // 32 + tensors.overhead + 64, np.uint32)
    return to_bytes(words, encode_indices(words, indices, payload.d, tensors.shapes))


def unpack_coordinates(
    section: memoryview, header: Header, tensors: Tensors
) -> tuple[np.ndarray | None, Mask | None]:
    """Return the indices (None if all coordinates are sent) and the mask that drew the indices, or None."""
    if header.where is Where.ALL:
        return None, None
    indices = np.empty(header.k, np.int64)
    if header.where is Where.DRAWN:
        key, keep = KEY_AND_KEEP.unpack(section)
        if keep > 2**53 or draw_into(key, keep, header.d, indices) != header.k:
            raise WireError(f"the key of the message does not draw k = {header.k} coordinates")
        return indices, Mask(np.array([key]), keep)
    found, words = decode_indices(to_words(section), indices, header.d, tensors.shapes)
    if found == BEYOND:
        raise WireError(f"an index lies beyond the last coordinate, {header.d - 1}")
    if found == OTHER_NUMBER:
        raise WireError(f"the message lists more or fewer indices than k = {header.k}")
    check_end(section, words, "indices")
    return indices, None
