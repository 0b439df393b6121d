"""What the two stages of a compressor have in common."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import ClassVar

import torch
from torch import Tensor

from cfedavg.errors import InputError, NotFinite

INFINITE = math.inf


class Stage:
    """A selector or a quantiser. `str` gives the text that `parse` reads."""

    name: ClassVar[str] = ""

    @classmethod
    def written_name(cls) -> str:
        """The name that stands for the class in a text."""
        return cls.name or f"{cls.__module__}:{cls.__qualname__}"

    def __str__(self) -> str:
        shown = self.name or self.written_name()
        arguments = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                value = value.item() if hasattr(value, "item") else value  # repr of NumPy's is no literal
                text = str(value).lower() if isinstance(value, bool) else repr(value)
                arguments.append(text if field.default is MISSING else f"{field.name}={text}")
        return shown + (f"({', '.join(arguments)})" if arguments else "")


def unit_of(magnitude: Tensor) -> Tensor:
    """In float64 and divided by the largest of the row, so that no square overflows or vanishes."""
    largest = magnitude.amax(-1, keepdim=True).double()
    return magnitude.double() / torch.where(largest > 0, largest, 1.0)


def row_sums(values: Tensor) -> Tensor:
    """Sums over the last axis by folding it in two, at a power of two, until one number is left.

    `Tensor.sum` splits a row by device, number of threads and number of rows, so its last bits differ;
    here every row is added in the same order everywhere, and zeros at its end do not change that.
    """
    while (width := values.shape[-1]) > 1:
        half = 1 << (width - 1).bit_length() - 1
        folded, alone = values[..., : width - half] + values[..., half:], values[..., width - half : half]
        values = torch.cat([folded, alone], -1) if alone.shape[-1] else folded
    return values[..., 0]


def prefix_sums(values: Tensor) -> Tensor:
    """Cumulative sums over the last axis, added in the same order everywhere, for the same reason.

    Those of neighbours taken together are every second one; the others lack just one value.
    """
    if (width := values.shape[-1]) < 2:
        return values
    pairs, sums = prefix_sums(values[..., : width - 1 : 2] + values[..., 1::2]), values.clone()
    sums[..., 1::2] = pairs
    sums[..., 2::2] += pairs[..., : (width - 1) // 2]
    return sums


def offsets_of(counts: Tensor) -> Tensor:
    """Where each client's values start, and where the last one's end."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def client_of_value(offsets: Tensor) -> Tensor:
    """Which client of the block each value belongs to."""
    return torch.repeat_interleave(offsets[1:] - offsets[:-1])


def is_whole(value: object, low: int, high: int) -> bool:
    """Whether a value is a whole number from `low` to `high`; to Python, True is one too."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_comp(comp: float) -> None:
    if isinstance(comp, bool) or not (isinstance(comp, int | float) and 0 <= comp < 1):
        raise InputError(f"comp = {comp} must lie in [0, 1): the fraction NOT sent (0.99 sends 1%)")


def check_block(block: int) -> None:
    if not is_whole(block, 1, 2**31 - 1):
        raise InputError(f"block = {block} must be a whole number from 1 to 2^31 - 1")


def check_finite(p: Tensor) -> None:
    """Raises NotFinite, which names the rows, if p (n, d) holds NaN or Inf."""
    # The extremes tell it, thirty times as fast on a CPU as looking at each number.
    if p.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(p))).all()):
        raise NotFinite((~torch.isfinite(p).all(-1)).nonzero()[:, 0].tolist())
