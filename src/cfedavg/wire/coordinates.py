"""The section that says which coordinates are sent: nothing, a key, or a coded set of indices."""

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
    """What the coders know of a layout.

    `shapes`, int64 (n, 3), holds rows, columns and coordinates of a cell for each tensor; a vector is one
    cell. `ends` says where each row of each tensor ends in the flat vector.
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
            raise WireError("a tensor of 2^31 or more rows or columns cannot be sent")
        return Tensors(views, np.cumsum(np.repeat(views[:, 1] * views[:, 2], views[:, 0])))

    @property
    def overhead(self) -> int:
        """More words than all classes and counts can take."""
        return int(512 * len(self.shapes) + 2 * self.shapes[:, :2].sum())


def where_of(payload: Payload) -> Where:
    """Return how the coordinates of a payload are sent."""
    if payload.indices is None:
        return Where.ALL
    return Where.DRAWN if payload.mask is not None else Where.LISTED


def pack_coordinates(payload: Payload, tensors: Tensors) -> bytes:
    """Return the coordinates that are sent, as bytes."""
    if payload.indices is None:
        return b""
    if payload.mask is not None:
        return KEY_AND_KEEP.pack(int(payload.mask.keys[0]), payload.mask.keep)
    indices = payload.indices
    # A gap is a symbol of up to 16 bits, a quarter of one more, and bits for the mean gap at most.
    bits = 24 + (payload.d // max(len(indices), 1)).bit_length()
    words = np.empty(len(indices) * bits // 32 + tensors.overhead + 64, np.uint32)
    return to_bytes(words, encode_indices(words, indices, payload.d, tensors.shapes))


def unpack_coordinates(
    section: memoryview, header: Header, tensors: Tensors
) -> tuple[np.ndarray | None, Mask | None]:
    """Return the indices of a message, None where all are sent, and the mask if one drew them."""
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
        raise WireError(f"the indices are more or fewer than k = {header.k}")
    check_end(section, words, "indices")
    return indices, None
