"""The compressors by name, and the text that composes them."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from cfedavg.compress.compressor import Compressor, Quantiser, Selector, Stage
from cfedavg.compress.quantisers import BF16, FP32, QSGD, IntBlocks, Sign
from cfedavg.compress.selectors import Everything, Proportional, RandomDropping, Threshold, TopK
from cfedavg.core.errors import InputError
from cfedavg.core.parts import Registry

SELECTORS: dict[str, Any] = {c.name: c for c in (Everything, TopK, RandomDropping, Threshold, Proportional)}
QUANTISERS: dict[str, Any] = {c.name: c for c in (FP32, BF16, Sign, QSGD)}
QUANTISERS |= {f"int{bits}": partial(IntBlocks, bits) for bits in range(2, 9)}

# One of each, for `cfedavg parts` and the docs.
EXAMPLES = (
    "none", "topk(0.99)", "topk(snr=1.05)", "topk(0.99, per_tensor=true)",
    "topk(0.97, least=10000)", "rd(0.9)", "threshold(0.9)",
    "proportional(0.99)", "fp32", "bf16", "int8(256)", "int4(64)", "sign", "qsgd(16)",
    "topk(0.99) >> bf16", "topk(0.99) >> int8(256)", "topk(0.99) >> sign", "topk(0.99) >> qsgd(16)",
    "topk(0.97, least=10000) >> int3(256)",
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
    registry = Registry(field, Stage, SELECTORS | QUANTISERS)
    stages = registry.parse_chain(text, longest=2, trust=trust, own=own)
    if len(stages) == 1 and isinstance(stages[0], Quantiser):
        stages.insert(0, Everything())
    match stages:
        case [Selector() as selector]:
            return Compressor(selector)
        case [Selector() as selector, Quantiser() as quantiser]:
            return Compressor(selector, quantiser)
    raise InputError(f"`{field}`: {text!r} must be a selector, a quantiser, or selector >> quantiser")
