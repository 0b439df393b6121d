"""What the two stages of a compressor have in common."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import ClassVar

import torch
from torch import Tensor

from cfedavg.errors import InputError

INFINITE = math.inf


class Stage:
    """A selector or a quantiser. `str` gives the text that `parse` reads."""

    name: ClassVar[str] = ""

    def __str__(self) -> str:
        shown = self.name or f"{type(self).__module__}:{type(self).__qualname__}"
        arguments = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                text = str(value).lower() if isinstance(value, bool) else repr(value)
                arguments.append(text if field.default is MISSING else f"{field.name}={text}")
        return shown + (f"({', '.join(arguments)})" if arguments else "")


def unit_of(magnitude: Tensor) -> Tensor:
    """In float64 and divided by the largest of the row, so that no square overflows or vanishes."""
    largest = magnitude.amax(-1, keepdim=True).double()
    return magnitude.double() / torch.where(largest > 0, largest, 1.0)


def offsets_of(counts: Tensor) -> Tensor:
    """Where each client's values start, and where the last one's end."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def check_comp(comp: float) -> None:
    if not (isinstance(comp, int | float) and 0 <= comp < 1):
        raise InputError(f"comp = {comp} must lie in [0, 1): the fraction NOT sent (0.99 sends 1%)")


def check_block(block: int) -> None:
    if not (isinstance(block, int) and block >= 1):
        raise InputError(f"block = {block} must be a whole number of 1 or more")
