"""Compressors (Definition 1): selectors, quantisers, and `parse`, which makes a compressor from a text."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from cfedavg.compress.blocks import client_of_value
from cfedavg.compress.compressor import FLOATS, Compressor, Quantiser, Selection, Selector, Stage
from cfedavg.compress.dense import decompress, minus, plus, rows_of, sent_values, values_of
from cfedavg.compress.eden import Eden
from cfedavg.compress.lowrank import LowRank
from cfedavg.compress.quantisers import BF16, FP32, QSGD, IntBlocks, Sign, TwoLevels
from cfedavg.compress.selectors import Everything, Proportional, RandomDropping, Threshold
from cfedavg.compress.topk import TopK
from cfedavg.core.errors import InputError
from cfedavg.core.parts import Registry

__all__ = [
    "BF16", "EXAMPLES", "FLOATS", "FP32", "QSGD", "QUANTISERS", "SELECTORS", "Compressor", "Eden",
    "Everything", "IntBlocks", "LowRank", "Proportional", "Quantiser", "RandomDropping", "Selection",
    "Selector", "Sign", "Stage", "Threshold", "TopK", "TwoLevels", "client_of_value", "decompress", "minus",
    "parse", "plus", "rows_of", "sent_values", "values_of",
]  # fmt: skip

_SELECTORS = (Everything, TopK, RandomDropping, Threshold, Proportional, LowRank, Eden)
SELECTORS: dict[str, Any] = {c.name: c for c in _SELECTORS}
QUANTISERS: dict[str, Any] = {c.name: c for c in (FP32, BF16, TwoLevels, Sign, QSGD)}
QUANTISERS |= {f"int{bits}": partial(IntBlocks, bits) for bits in range(3, 9)}

# At least one example of each compressor, for `cfedavg parts` and the docs.
EXAMPLES = (
    "none", "topk(0.99)", "topk(snr=1.05)", "topk(0.99, per_tensor=true)",
    "topk(0.97, least=10000)", "topk(0.99, warmup=10)", "topk(chunk=4096, k=64)", "topk(hold=5)", "rd(0.9)",
    "threshold(0.9)", "proportional(0.99)", "lowrank(2)", "eden(1)", "eden(1, unbiased=false)",
    "fp32", "bf16", "int8(256)", "int4(64)", "int2(256)", "sign", "qsgd(16)",
    "topk(0.99) >> bf16", "topk(0.99) >> int8(256)", "topk(0.99) >> sign", "topk(0.99) >> qsgd(16)",
    "topk(0.97, least=10000) >> int3(256)", "topk(chunk=4096, k=64) >> int2(256)", "lowrank(2) >> bf16",
)  # fmt: skip


def parse(
    text: str, field: str = "compressor", *, trust: bool = True, own: Collection[type[Stage]] = ()
) -> Compressor:
    """Return the compressor that a text names: `none`, `topk(0.99) >> bf16`, `qsgd(16)`, `my.module:Mine(3)`.

    A text may name any module, which is then imported. Give `trust=False` for a text from somebody else: the
    text may then name only selectors and quantisers of this package and the classes in `own`, and nothing is
    imported. Errors call the text `field`.

    >>> str(parse("topk(0.99, per_tensor=true)>>int8(64)"))
    'topk(0.99, per_tensor=true) >> int8(64)'
    """
    registry = Registry(field, Stage, SELECTORS | QUANTISERS)
    stages = registry.parse_chain(text, longest=2, trust=trust, own=own)
    if isinstance(stages[0], Quantiser):
        stages.insert(0, Everything())
    match stages:
        case [Selector() as selector]:
            made = Compressor(selector)
        case [Selector() as selector, Quantiser() as quantiser]:
            try:
                made = Compressor(selector, quantiser)
            except InputError as error:
                raise InputError(f"`{field}`: {error}") from None
        case _:
            raise InputError(
                f"`{field}`: {text!r} must be a selector, a quantiser, or selector >> quantiser, as in "
                "topk(0.99) >> bf16"
            )
    if field == "compressor_down" and made.selector.needs_update:
        raise InputError(
            f"`{field}`: {made.selector} bounds what is left by a client's update, and a broadcast has none"
        )
    return made
