"""Blocks of values: groups of a client's values that share a scale."""

from __future__ import annotations

from functools import cached_property

from cfedavg.compress.sums import client_of_value, offsets_of
from cfedavg.core import keys as keyed
from cfedavg.core.arrays import Array, arange, cast, module_of, zeros


class Blocks:
    """The blocks of each client's values, which lie in one row, client after client.

    Where all clients have as many, as without a selector, the row is a matrix and needs no indices.
    """

    def __init__(self, offsets: Array, block: int) -> None:
        self.offsets, self.counts = offsets, offsets[1:] - offsets[:-1]
        least, most = (int(self.counts.min()), int(self.counts.max())) if len(self.counts) else (0, 1)
        most = max(1, most)
        self.width = min(block, most) if block else most
        self.per_client = (self.counts + self.width - 1) // self.width
        self.total = int(self.per_client.sum())
        self.each = most if least == most else None  # values of a client, where all have as many

    def pack(self, values: Array) -> Array:
        """(blocks, width), zeros where a block is not full."""
        if self.each is not None:
            return self._padded(values.reshape(-1, self.each)).reshape(self.total, self.width)
        matrix = zeros(self.total * self.width, values)
        matrix[self._of_value * self.width + self._position % self.width] = values
        return matrix.reshape(self.total, self.width)

    def _padded(self, rows: Array) -> Array:
        """The rows with zeros behind them, so that a client's blocks are all full."""
        assert self.each is not None
        missing = -self.each % self.width
        if not missing:
            return rows
        return module_of(rows).concatenate([rows, zeros((len(rows), missing), rows)], -1)

    def spread(self, of_block: Array) -> Array:
        """A number of each block, for each of its values."""
        if self.each is not None:
            rows = of_block.reshape(len(self.counts), -1, 1)
            shape = (*rows.shape[:2], self.width)
            spread = module_of(rows).broadcast_to(rows, shape).reshape(len(rows), -1)
            return spread[:, : self.each].reshape(-1)
        return of_block[self._of_value]

    def draws(self, keys: Array) -> Array:
        """Keyed draws in [0, 1), one for each value."""
        if self.each is not None:
            drawn = keyed.bits53(keys[:, None], arange(self.each, keys)).reshape(-1)
        else:
            drawn = keyed.bits53(keys[self._client], self._position)
        return cast(drawn, "float64") / 2.0**53

    @cached_property
    def _client(self) -> Array:
        return client_of_value(self.offsets)

    @cached_property
    def _position(self) -> Array:
        return arange(len(self._client), self.offsets) - self.offsets[self._client]

    @cached_property
    def _of_value(self) -> Array:
        return offsets_of(self.per_client)[self._client] + self._position // self.width
