"""The section that says which coordinates are sent: nothing, a key, or a coded set of indices."""

from __future__ import annotations

import struct

import numpy as np

from cfedavg.core.keys import draw_into
from cfedavg.core.payload import Mask, Payload
from cfedavg.wire.coder import check_end, to_bytes, to_words
from cfedavg.wire.header import Header, Where, WireError
from cfedavg.wire.indices import BEYOND, OTHER_NUMBER, decode_indices, encode_indices
from cfedavg.wire.tensors import Tensors

KEY_AND_KEEP = struct.Struct("<qQ")


def where_of(payload: Payload) -> Where:
    if payload.indices is None:
        return Where.ALL
    return Where.DRAWN if payload.mask is not None else Where.LISTED


def pack_coordinates(payload: Payload, tensors: Tensors) -> bytes:
    """Which coordinates are sent, as bytes."""
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
    """The indices of a message, None where all are sent; and the mask that drew them, if one did."""
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
