"""Compressors: a selector says which coordinates travel, a quantiser says how their values are written.

    TopK(0.99) >> BF16()          parse("topk(0.99) >> bf16")

Definition 1 of the paper: C is constrained by the SNR gamma >= 1 if E|C(p) - p|^2 <= |p|^2 / gamma for
all p. Every selector here is a projection (what it keeps, it keeps as it is), so what it drops is
orthogonal to what the quantiser then gets wrong, and the two guarantees compose:

    1/gamma = 1/gamma_s + 1/gamma_q - 1/(gamma_s * gamma_q).

Both stages work on a block of clients at once, p of shape (n, d). Whatever has to be summed is summed
in float64 and in a fixed order, so that a block, a single vector, a CPU and a GPU give the same bits.
A selector or quantiser of your own is one small class: see docs/compressors.md.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfedavg import keys as keyed
from cfedavg.compress.quantisers import BF16, FP32, QSGD, Blocks, IntBlocks, Quantiser, Sign
from cfedavg.compress.selectors import Everything, Proportional, RandomDropping, Selector, Threshold, TopK
from cfedavg.compress.stages import INFINITE, Stage, client_of_value
from cfedavg.errors import InputError
from cfedavg.keys import Purpose
from cfedavg.layout import Layout
from cfedavg.payload import Floats, Levels, Payload
from cfedavg.spec import build, check_length, parse_call

_FLOATS = {torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Compressor:
    """A selector followed by a quantiser; without one, values keep their own float type."""

    selector: Selector
    quantiser: Quantiser | None = None

    def __str__(self) -> str:
        if self.quantiser is None:
            return str(self.selector)
        return f"{self.selector} >> {self.quantiser}"

    def compress(self, p: Tensor, key: int | Tensor, layout: Layout | None = None) -> Payload:
        """What is sent of p: one vector (d,) with one key, or a block (n, d) with n keys as int64."""
        block = p[None] if p.dim() == 1 else p
        n = 1 if isinstance(key, int) else key.numel()
        if n != len(block):
            raise InputError(f"a block of {len(block)} vectors needs as many keys, not {n}")
        self.selector.check(block)
        layout = layout or Layout.flat(block.shape[1])
        selection = self.selector.select(block, _derive(key, Purpose.SELECT, p), layout)
        values: Floats | Levels
        if self.quantiser is None:
            if p.dtype not in _FLOATS:
                raise InputError(f"vectors of {p.dtype} need a quantiser, as in {self} >> bf16")
            values = Floats(selection.values, _FLOATS[p.dtype])
        else:
            drawn = _derive(key, Purpose.ROUND, p)
            values = self.quantiser.quantise(selection.values, selection.offsets, drawn)
        return Payload(block.shape[1], selection.offsets, selection.indices, values, selection.mask)

    def gamma(self, layout: Layout) -> float:
        """The guaranteed SNR of the two stages together, up to underflow of the value type."""
        lost = 1 / self.selector.gamma(layout)
        if self.quantiser is not None:
            rounding = 1 / self.quantiser.gamma(self.selector.most(layout))
            lost = lost + rounding - lost * rounding
        return 1 / lost if lost else INFINITE


def _derive(key: int | Tensor, purpose: Purpose, p: Tensor) -> Tensor:
    """The keys of one purpose, as a tensor where p is. A single one is derived as a number: quicker."""
    if isinstance(key, int):
        return torch.from_numpy(np.array([keyed.derive(key, purpose)])).to(p.device)
    derived: Tensor = keyed.derive(key.reshape(-1).to(p.device), purpose)
    return derived


def values_of(payload: Payload) -> Tensor:
    """The values that the receiver reads, as floating point numbers."""
    values = payload.values
    if isinstance(values, Levels):
        grid = Blocks(payload.offsets, values.block)
        scaled: Tensor = values.levels.float() * grid.spread(values.scales)
        # Next to the largest float32 a level may round past it; the largest is then closer than Inf.
        top = torch.finfo(torch.float32).max
        return scaled.clamp(-top, top)
    data: Tensor = values.data.view(torch.bfloat16).float() if values.dtype == "bf16" else values.data
    return data


def decompress(payload: Payload) -> Tensor:
    """C(p) as dense vectors, shape (n, d).

    >>> decompress(parse("topk(0.5)").compress(torch.tensor([1.0, -2.0]), key=0)).tolist()
    [[0.0, -2.0]]
    """
    values = values_of(payload)
    if payload.indices is None:
        return values.view(len(payload), payload.d)
    dense = values.new_zeros(len(payload), payload.d)
    dense[client_of_value(payload.offsets), payload.indices] = values
    return dense


SELECTORS: dict[str, Any] = {c.name: c for c in (Everything, TopK, RandomDropping, Threshold, Proportional)}
QUANTISERS: dict[str, Any] = {c.name: c for c in (FP32, BF16, Sign, QSGD)}
QUANTISERS |= {f"int{bits}": partial(IntBlocks, bits) for bits in range(2, 9)}

# One of each, for `cfedavg compressors` and the docs.
EXAMPLES = (
    "none", "topk(0.99)", "topk(snr=1.05)", "topk(0.99, per_tensor=true)", "rd(0.9)", "threshold(0.9)",
    "proportional(0.99)", "fp32", "bf16", "int8(256)", "int4(64)", "sign", "qsgd(16)",
    "topk(0.99) >> bf16", "topk(0.99) >> int8(256)", "topk(0.99) >> sign", "topk(0.99) >> qsgd(16)",
)  # fmt: skip


def parse(
    text: str, field: str = "compressor", *, trust: bool = True, own: Collection[type[Stage]] = ()
) -> Compressor:
    """The compressor that a text names: `none`, `topk(0.99) >> bf16`, `qsgd(16)`, `my.module:MySelector(3)`.

    A text that you did not write yourself may name any module: with `trust=False` none is imported, and the
    text may only name the stages of this package and the classes in `own`.

    >>> str(parse("topk(0.99, per_tensor=true)>>int8(64)"))
    'topk(0.99, per_tensor=true) >> int8(64)'
    """
    check_length(text, field)
    table = {stage.written_name(): stage for stage in own} | SELECTORS | QUANTISERS
    stages = [build(part, table, Stage, field, trust=trust) for part in text.split(">>")]
    if len(stages) == 1 and isinstance(stages[0], Quantiser):
        stages.insert(0, Everything())
    if len(stages) > 2 or not isinstance(stages[0], Selector):
        raise InputError(f"`{field}`: {text!r} must be a selector, a quantiser, or selector >> quantiser")
    if len(stages) == 2 and not isinstance(stages[1], Quantiser):
        raise InputError(f"`{field}`: {parse_call(text.split('>>')[1], field)[0]!r} is not a quantiser")
    return Compressor(*stages)
