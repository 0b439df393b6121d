"""Quantisers: how the selected values are written. Rounding happens here, so error feedback takes it too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from cfedavg import keys as keyed
from cfedavg.compress.stages import (
    Stage,
    check_block,
    client_of_value,
    is_whole,
    offsets_of,
    row_sums,
    unit_of,
)
from cfedavg.errors import InputError
from cfedavg.payload import Floats, Levels

# A single value is its scale, which float32 rounds; 2 bits to spare for the arithmetic around it.
ONE_SCALE = 2.0**46


class Quantiser(Stage):
    """Writes values. A new one needs `quantise` and `gamma`."""

    def quantise(self, values: Tensor, offsets: Tensor, keys: Tensor) -> Floats | Levels:
        """`values` of all clients in a row, client c's at offsets[c]:offsets[c+1]."""
        raise NotImplementedError

    def gamma(self, n: int) -> float:
        """The guaranteed SNR for up to n values of one client."""
        raise NotImplementedError


@dataclass(frozen=True)
class FP32(Quantiser):
    """32-bit floating point: exact for a float32 model, half an ulp off for a float64 one."""

    name: ClassVar[str] = "fp32"

    def quantise(self, values: Tensor, offsets: Tensor, keys: Tensor) -> Floats | Levels:
        return Floats(_single(values), "fp32")

    def gamma(self, n: int) -> float:
        return 2.0**48


@dataclass(frozen=True)
class BF16(Quantiser):
    """The upper half of a float32, rounded to nearest even: off by at most one part in 2^8."""

    name: ClassVar[str] = "bf16"

    def quantise(self, values: Tensor, offsets: Tensor, keys: Tensor) -> Floats | Levels:
        # The largest float32 numbers would round to infinity: keep them at the largest bf16.
        top = torch.finfo(torch.bfloat16).max
        rounded = values.float().clamp(-top, top).to(torch.bfloat16)
        return Floats(rounded.view(torch.int16), "bf16")

    def gamma(self, n: int) -> float:
        return 2.0**16


@dataclass(frozen=True)
class IntBlocks(Quantiser):
    """b-bit integers, with a float32 scale for each block of values: top = 2^(b-1) - 1 levels on each side.

    Rounding to nearest is never off by more than the value itself nor by more than half a step, so the
    worst block is one spike among values of half a step: gamma = 1 + 4 top^2 / (block - 1).
    """

    bits: int
    block: int = 256

    def __post_init__(self) -> None:
        if not is_whole(self.bits, 2, 8):
            raise InputError(f"bits = {self.bits} must be a whole number from 2 to 8")
        check_block(self.block)

    def __str__(self) -> str:
        return f"int{self.bits}({self.block})"

    @property
    def top(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def quantise(self, values: Tensor, offsets: Tensor, keys: Tensor) -> Floats | Levels:
        grid = Blocks(offsets, self.block)
        scales = _single(grid.pack(values.double()).abs().amax(-1) / self.top)
        steps = values.double() / grid.spread(scales.double())
        levels = steps.nan_to_num(0.0).round().clamp(-self.top, self.top)
        return Levels(levels.to(torch.int8), scales, self.block, self.top)

    def gamma(self, n: int) -> float:
        others = min(n, self.block) - 1
        return 1 + 4 * self.top**2 / others if others > 0 else ONE_SCALE


@dataclass(frozen=True)
class Sign(Quantiser):
    """Signs, and one scale a client: the mean magnitude. gamma = n / (n - 1)."""

    name: ClassVar[str] = "sign"

    def quantise(self, values: Tensor, offsets: Tensor, keys: Tensor) -> Floats | Levels:
        grid = Blocks(offsets, 0)
        scales = row_sums(grid.pack(values.double().abs())) / grid.counts[grid.counts > 0]
        levels = torch.where(values < 0, -1, 1).to(torch.int8)
        return Levels(levels, _single(scales), 0, 1)

    def gamma(self, n: int) -> float:
        return n / (n - 1) if n > 1 else ONE_SCALE


@dataclass(frozen=True)
class QSGD(Quantiser):
    """Stochastic rounding to s levels of each block's norm.

    Unbiased QSGD has E|C(v)|^2 = beta |v|^2, which breaks Definition 1 for beta > 2; scaled by 1/beta it
    is as close to v as it can be, E|C(v)/beta - v|^2 = (1 - 1/beta) |v|^2. beta is that of the block at
    hand and goes into the transmitted scale; gamma is for the worst, beta - 1 <= min(n / 4s^2, sqrt(n) / s).
    """

    name: ClassVar[str] = "qsgd"
    s: int
    block: int = 256

    def __post_init__(self) -> None:
        if not is_whole(self.s, 1, 32767):
            raise InputError(f"s = {self.s} must be a whole number from 1 to 32767")
        check_block(self.block)

    def quantise(self, values: Tensor, offsets: Tensor, keys: Tensor) -> Floats | Levels:
        grid = Blocks(offsets, self.block)
        packed = grid.pack(values.double().abs())
        norm = packed.amax(-1) * row_sums(unit_of(packed).square()).sqrt()
        ratio = (self.s * values.double().abs() / grid.spread(norm)).nan_to_num(0.0).clamp(max=self.s)
        levels = (ratio + grid.draws(keys)).floor().clamp(max=self.s)
        fraction = ratio - ratio.floor()
        beta_s2 = self.s**2 + row_sums(grid.pack(fraction * (1 - fraction)))
        levels = torch.where(values < 0, -levels, levels)
        dtype = torch.int8 if self.s <= 127 else torch.int16
        return Levels(levels.to(dtype), _single(self.s * norm / beta_s2), self.block, self.s)

    def gamma(self, n: int) -> float:
        n = min(n, self.block)
        return 1 + 1 / min(n / (4 * self.s**2), math.sqrt(n) / self.s) if n > 1 else ONE_SCALE


def _single(values: Tensor) -> Tensor:
    """In float32, where what is beyond its range becomes its largest number and not Inf."""
    top = torch.finfo(torch.float32).max
    return (values.clamp(-top, top) if values.dtype == torch.float64 else values).float()


class Blocks:
    """The blocks of each client's values, which lie in one row, client after client.

    Where all clients have as many, as without a selector, the row is a matrix and needs no indices.
    """

    def __init__(self, offsets: Tensor, block: int) -> None:
        self.offsets, self.counts = offsets, offsets[1:] - offsets[:-1]
        least, most = torch.stack(torch.aminmax(self.counts)).tolist() if len(self.counts) else (0, 1)
        most = max(1, most)
        self.width = min(block, most) if block else most
        self.per_client = (self.counts + self.width - 1) // self.width
        self.total = int(self.per_client.sum())
        self.each = most if least == most else None  # values of a client, where all have as many

    def pack(self, values: Tensor) -> Tensor:
        """(blocks, width), zeros where a block is not full."""
        if self.each is not None:
            rows = values.view(-1, self.each)
            return nn.functional.pad(rows, (0, -self.each % self.width)).view(self.total, self.width)
        matrix = values.new_zeros(self.total * self.width)
        matrix[self._of_value * self.width + self._position % self.width] = values
        return matrix.view(self.total, self.width)

    def spread(self, of_block: Tensor) -> Tensor:
        """A number of each block, for each of its values."""
        if self.each is not None:
            rows = of_block.view(len(self.counts), -1).repeat_interleave(self.width, 1)
            return rows[:, : self.each].reshape(-1)
        return of_block[self._of_value]

    def draws(self, keys: Tensor) -> Tensor:
        """Keyed draws in [0, 1), one for each value."""
        if self.each is not None:
            drawn = keyed.bits53(keys[:, None], torch.arange(self.each, device=keys.device)).view(-1)
        else:
            drawn = keyed.bits53(keys[self._client], self._position)
        numbers: Tensor = drawn.double() / 2.0**53
        return numbers

    @cached_property
    def _client(self) -> Tensor:
        return client_of_value(self.offsets)

    @cached_property
    def _position(self) -> Tensor:
        return torch.arange(len(self._client), device=self.offsets.device) - self.offsets[self._client]

    @cached_property
    def _of_value(self) -> Tensor:
        return offsets_of(self.per_client)[self._client] + self._position // self.width
