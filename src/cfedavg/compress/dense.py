"""Payloads as dense vectors: their values, decompression, and sums of a vector and a payload."""

from __future__ import annotations

import numpy as np

from cfedavg.compress.blocks import Blocks, client_of_value
from cfedavg.core import arrays
from cfedavg.core.arrays import LARGEST, Array, arange, cast, module_of, zeros
from cfedavg.core.payload import Floats, Payload


def values_of(payload: Payload) -> Array:
    """Return a payload's values in floating point, as the receiver decodes them."""
    values = payload.values
    if isinstance(values, Floats):
        return arrays.from_bf16(values.data) if values.dtype == "bf16" else values.data
    grid = Blocks(payload.offsets, values.block)
    if values.per_level:
        block, levels = grid.spread(arange(grid.total, payload.offsets)), cast(values.levels, "int64")
        scales = values.scales[block * values.top + abs(levels) - 1]
        return module_of(levels).where(levels < 0, -scales, scales)
    with np.errstate(over="ignore"):  # the largest float32 number is closer than Inf
        return (cast(values.levels, "float32") * grid.spread(values.scales)).clip(-LARGEST, LARGEST)


def rows_of(payload: Payload) -> Array:
    """Return a payload without indices as vectors of shape (n, d); a basis is expanded."""
    values = values_of(payload)
    if payload.basis is None:
        return values.reshape(len(payload), payload.d)
    return payload.basis.expand(values.reshape(len(payload), payload.basis.count(payload.d)), payload.d)


def sent_values(payload: Payload) -> Array:
    """Return the numbers of the vectors that a payload sets; all other numbers are 0."""
    return values_of(payload) if payload.basis is None else rows_of(payload).reshape(-1)


def decompress(payload: Payload) -> Array:
    """Return a payload of n clients as dense vectors of shape (n, d), with 0 for what was not sent.

    >>> from cfedavg.compress import parse
    >>> decompress(parse("topk(0.5)").compress(np.array([1.0, -2.0]), key=0)).tolist()
    [[0.0, -2.0]]
    """
    if payload.indices is None:
        return rows_of(payload)
    values = values_of(payload)
    dense = zeros((len(payload), payload.d), values)
    dense[client_of_value(payload.offsets), payload.indices] = values
    return dense


def plus(p: Array, payload: Payload, sign: int = 1) -> Array:
    """Return p + sign * payload, where p is one client's vector or a block with a row for each client."""
    if payload.indices is None:
        return p + sign * arrays.cast_like(rows_of(payload), p).reshape(p.shape)
    values = sign * arrays.cast_like(values_of(payload), p)
    total = arrays.copy(p)
    at = payload.indices if p.ndim == 1 else payload.indices + payload.d * client_of_value(payload.offsets)
    total.reshape(-1)[at] += values
    return total


def minus(p: Array, payload: Payload) -> Array:
    """Return p - payload, where p is one client's vector or a block with a row for each client."""
    return plus(p, payload, -1)
