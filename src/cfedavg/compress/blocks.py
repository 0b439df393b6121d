"""Values of many clients in one 1-D array, client after client, and the blocks of them that share a scale."""

from __future__ import annotations

from functools import cached_property

from cfedavg.core import arrays
from cfedavg.core import keys as keyed
from cfedavg.core.arrays import Array, arange, cast, module_of, zeros


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

    def lengths(self) -> Array:
        """Return the number of values in each block."""
        client = arrays.repeat(self.per_client)
        before = arange(self.total, client) - offsets_of(self.per_client)[client]  # blocks of the same client
        return (self.counts[client] - before * self.width).clip(max=self.width)

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

    def unpack(self, matrix: Array) -> Array:
        """Return the values of a matrix that `pack` made."""
        if self.each is not None:
            return matrix.reshape(len(self.counts), -1)[:, : self.each].reshape(-1)
        _, position, block = self._places
        return matrix[block, position % self.width]

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
