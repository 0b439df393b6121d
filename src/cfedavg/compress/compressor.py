"""Compressors: a selector chooses the coordinates to send, and a quantiser encodes their values.

    TopK(0.99) >> BF16()          parse("topk(0.99) >> bf16")

Definition 1 of the paper: a compressor C has the SNR gamma >= 1 if E|C(p) - p|^2 <= |p|^2 / gamma for
all p. Every selector here is a projection: it keeps a value as it is, or drops the value. So the dropped
values are orthogonal to the error of the quantiser, and the SNRs of selector and quantiser compose:

    1/gamma = 1/gamma_s + 1/gamma_q - 1/(gamma_s * gamma_q).

Selector and quantiser work on a block of n clients at once: p has shape (n, d), a vector of length d for each
client, as a NumPy array or a torch tensor. Sums are in float64 and in a fixed order. So the result is the
same, bit for bit, for a block or single vectors, for NumPy or torch, and on a CPU or a GPU.
docs/compressors.md shows how to write your own selector or quantiser.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, NoReturn

import numpy as np

from cfedavg.core import arrays
from cfedavg.core import keys as keyed
from cfedavg.core.arrays import Array, arange, cast, dtype_of, module_of, place, zeros
from cfedavg.core.errors import InputError, NotFinite
from cfedavg.core.keys import Purpose
from cfedavg.core.layout import Layout
from cfedavg.core.parts import Part, Written, describe
from cfedavg.core.payload import Floats, Levels, Mask, Payload

FLOATS = {"float32": "fp32", "float64": "fp64"}  # the dtype of an array, as a payload names it
LARGEST = float(np.finfo(np.float32).max)


class Stage(Part):
    """The base class of selectors and quantisers, the two stages of a compressor."""

    chosen_by: ClassVar[tuple[str, ...]] = ("compressor", "compressor_down")

    def __rrshift__(self, before: object) -> NoReturn:  # of a text or a class
        raise _order_error(before, self)


def _order_error(first: object, second: object) -> InputError:
    """Return the error that `first >> second` is no compressor."""
    return InputError(
        "a compressor must be selector >> quantiser, as in TopK(0.99) >> BF16(), got "
        f"{describe(first)} >> {describe(second)}"
    )


class Selection(NamedTuple):
    """The coordinates and values that a selector keeps, for a block of clients; fields are as in Payload."""

    offsets: Array
    indices: Array | None
    values: Array
    mask: Mask | None = None


class Selector(Stage):
    """The base class of selectors, which choose coordinates. A subclass must define `keep` and `gamma`."""

    def keep(self, p: Array, keys: Array, layout: Layout, t: int) -> Array:
        """Return booleans of the shape of p, true at the coordinates that are kept in round t.

        p has shape (n, d): a vector of length d for each of n clients. Random choices of a client must be
        drawn from its key.
        """
        raise NotImplementedError

    def gamma(self, layout: Layout) -> float:
        """Return the SNR gamma (Definition 1) that the selector guarantees in every round."""
        raise NotImplementedError

    def most(self, layout: Layout) -> int:
        """Return the largest number of coordinates that one client can keep."""
        return layout.d

    def select(self, p: Array, keys: Array, layout: Layout, t: int) -> Selection:
        """Return the coordinates and values of p that `keep` chooses; raise NotFinite if p has NaN or Inf."""
        check_finite(p)
        keep = self.keep(p, keys, layout, t)
        return Selection(offsets_of(keep.sum(-1)), arrays.columns(keep), p[keep])

    def __rshift__(self, quantiser: Quantiser) -> Compressor:
        return Compressor(self, quantiser)


class Quantiser(Stage):
    """The base class of quantisers, which encode values. A subclass must define `quantise` and `gamma`."""

    rounds_values: ClassVar[bool] = True  # whether quantising changes float32 values

    def quantise(self, values: Array, offsets: Array, keys: Array) -> Floats | Levels:
        """Return the values of a block of clients, encoded.

        The values of client c are values[offsets[c]:offsets[c+1]]; its random choices are drawn from keys[c].
        """
        raise NotImplementedError

    def gamma(self, n: int) -> float:
        """Return the SNR gamma (Definition 1) that the quantiser guarantees if a client sends n values."""
        raise NotImplementedError

    def __rshift__(self, following: object) -> NoReturn:
        raise _order_error(self, following)


@dataclass(frozen=True)
class Compressor(Written):
    """A selector followed by a quantiser; if `quantiser` is None, values are sent as float32 or float64."""

    chosen_by: ClassVar[tuple[str, ...]] = Stage.chosen_by
    selector: Selector
    quantiser: Quantiser | None = None

    def __post_init__(self) -> None:
        is_quantiser = self.quantiser is None or isinstance(self.quantiser, Quantiser)
        if not (isinstance(self.selector, Selector) and is_quantiser):
            raise _order_error(self.selector, self.quantiser)

    def __str__(self) -> str:
        return " >> ".join(map(str, self.stages))

    def to_text(self, field: str) -> str:
        return " >> ".join(stage.to_text(field) for stage in self.stages)

    def compress(self, p: Array, key: int | Array, layout: Layout | None = None, t: int = 0) -> Payload:
        """Return C(p), the payload of p in round t.

        p has shape (d,) for one client with one key, or (n, d) for a block of n clients with n keys. Random
        draws depend on the key. Without a layout, a vector counts as one tensor.
        """
        block = p[None] if p.ndim == 1 else p
        keys = np.array([keyed.signed(key)]) if isinstance(key, int) else key.reshape(-1)
        if len(keys) != len(block):
            raise InputError(
                f"`key` must hold one key for each of the {len(block)} vectors, got {len(keys)} keys"
            )
        keys = place(keys, p) if isinstance(keys, np.ndarray) else keys.to(p.device)
        layout = layout or Layout.flat(block.shape[1])
        offsets, indices, kept, mask = self.selector.select(
            block, keyed.derive(keys, Purpose.SELECT), layout, t
        )
        values: Floats | Levels
        if self.quantiser is not None:
            values = self.quantiser.quantise(kept, offsets, keyed.derive(keys, Purpose.ROUND))
        elif dtype_of(p) in FLOATS:
            values = Floats(kept, FLOATS[dtype_of(p)])
        else:
            raise InputError(f"`p` of dtype {p.dtype} needs a quantiser, as in {self} >> bf16")
        return Payload(block.shape[1], offsets, indices, values, mask)

    def gamma(self, layout: Layout) -> float:
        """Return the SNR that selector and quantiser together guarantee, if no value underflows."""
        lost = 1 / self.selector.gamma(layout)
        if self.quantiser is not None:
            rounding = 1 / self.quantiser.gamma(self.selector.most(layout))
            lost = lost + rounding - lost * rounding
        return 1 / lost if lost else math.inf

    @property
    def rounds_values(self) -> bool:
        """Whether there is a quantiser that changes float32 values by rounding them."""
        return self.quantiser is not None and self.quantiser.rounds_values

    @property
    def stages(self) -> list[Stage]:
        """The selector, and the quantiser if there is one."""
        return [self.selector] if self.quantiser is None else [self.selector, self.quantiser]


def values_of(payload: Payload) -> Array:
    """Return a payload's values in floating point, as the receiver decodes them."""
    values = payload.values
    if isinstance(values, Floats):
        return arrays.from_bf16(values.data) if values.dtype == "bf16" else values.data
    scales = Blocks(payload.offsets, values.block).spread(values.scales)
    with np.errstate(over="ignore"):  # the largest float32 number is closer than Inf
        return (cast(values.levels, "float32") * scales).clip(-LARGEST, LARGEST)


def decompress(payload: Payload) -> Array:
    """Return a payload of n clients as dense vectors of shape (n, d), with 0 for what was not sent.

    >>> from cfedavg.compress import parse
    >>> decompress(parse("topk(0.5)").compress(np.array([1.0, -2.0]), key=0)).tolist()
    [[0.0, -2.0]]
    """
    values = values_of(payload)
    if payload.indices is None:
        return values.reshape(len(payload), payload.d)
    dense = zeros((len(payload), payload.d), values)
    dense[client_of_value(payload.offsets), payload.indices] = values
    return dense


def plus(p: Array, payload: Payload, sign: int = 1) -> Array:
    """Return p + sign * payload, where p is one client's vector or a block with a row for each client."""
    values = sign * arrays.cast_like(values_of(payload), p)
    if payload.indices is None:
        return p + values.reshape(p.shape)
    total = arrays.copy(p)
    at = payload.indices if p.ndim == 1 else payload.indices + payload.d * client_of_value(payload.offsets)
    total.reshape(-1)[at] += values
    return total


def minus(p: Array, payload: Payload) -> Array:
    """Return p - payload, where p is one client's vector or a block with a row for each client."""
    return plus(p, payload, -1)


def check_finite(p: Array) -> None:
    """Raise NotFinite if p, of shape (n, d), holds NaN or Inf; the error lists the rows that do."""
    # Looking only at the minimum and maximum is thirty times as fast on a CPU as looking at each number.
    if math.prod(p.shape) and not all(map(math.isfinite, arrays.extremes(p))):
        rows = module_of(p).isfinite(p).all(-1).tolist()
        raise NotFinite([row for row, finite in enumerate(rows) if not finite])


def offsets_of(counts: Array) -> Array:
    """Return the offset of each client's first value, then the total; `counts` are the values per client."""
    return module_of(counts).concatenate([zeros(1, counts), counts.cumsum(0)])


def client_of_value(offsets: Array) -> Array:
    """Return for each value the row of its client, given the offset of each client's first value."""
    return arrays.repeat(offsets[1:] - offsets[:-1])


class Blocks:
    """Blocks: up to `block` consecutive values of a client, which share a scale.

    The values of all clients lie in one 1-D array, client after client. If `block` is 0, each client has one
    block. If all clients have equally many values, as without a selector, the array is reshaped to a matrix;
    otherwise the place of each value is computed.
    """

    def __init__(self, offsets: Array, block: int) -> None:
        self.offsets, self.counts = offsets, offsets[1:] - offsets[:-1]
        least, most = (int(self.counts.min()), int(self.counts.max())) if len(self.counts) else (0, 1)
        most = max(1, most)
        self.width = min(block or most, most)
        self.per_client = (self.counts + self.width - 1) // self.width
        self.total = int(self.per_client.sum())
        self.each = most if least == most else None  # the values of each client, if all have equally many

    def pack(self, values: Array) -> Array:
        """Return the values as a matrix with a row for each block; zeros fill up a short block."""
        if self.each is not None:
            rows = values.reshape(-1, self.each)
            if missing := -self.each % self.width:
                rows = module_of(rows).concatenate([rows, zeros((len(rows), missing), rows)], -1)
            return rows.reshape(self.total, self.width)
        matrix, (_, position, block) = zeros((self.total, self.width), values), self._places
        matrix[block, position % self.width] = values
        return matrix

    def spread(self, of_block: Array) -> Array:
        """Return a 1-D array with an entry for each value: the entry of `of_block` for the value's block."""
        if self.each is not None:
            rows = of_block.reshape(len(self.counts), -1, 1)
            shape = (*rows.shape[:2], self.width)
            spread = module_of(rows).broadcast_to(rows, shape).reshape(len(rows), -1)
            return spread[:, : self.each].reshape(-1)
        return of_block[self._places[2]]

    def draws(self, keys: Array) -> Array:
        """Return a pseudo-random number in [0, 1) for each value, drawn from the key of its client."""
        if self.each is not None:
            drawn = keyed.bits53(keys[:, None], arange(self.each, keys)).reshape(-1)
        else:
            client, position, _ = self._places
            drawn = keyed.bits53(keys[client], position)
        return cast(drawn, "float64") / 2.0**53

    @cached_property
    def _places(self) -> tuple[Array, Array, Array]:
        """For each value: its client, its position among the client's values, and its block (3 arrays)."""
        client = client_of_value(self.offsets)
        position = arange(len(client), client) - self.offsets[client]
        return client, position, offsets_of(self.per_client)[client] + position // self.width
