"""Selectors, quantisers and their composition; Definition 1."""

from cfedavg.compress.compressor import (
    Compressor,
    Quantiser,
    Selection,
    Selector,
    Stage,
    decompress,
    minus,
    plus,
    values_of,
)
from cfedavg.compress.quantisers import BF16, FP32, QSGD, IntBlocks, Sign
from cfedavg.compress.registry import EXAMPLES, QUANTISERS, SELECTORS, parse
from cfedavg.compress.selectors import Everything, Proportional, RandomDropping, Threshold, TopK
from cfedavg.compress.sums import client_of_value

__all__ = [
    "BF16",
    "EXAMPLES",
    "FP32",
    "QSGD",
    "QUANTISERS",
    "SELECTORS",
    "Compressor",
    "Everything",
    "IntBlocks",
    "Proportional",
    "Quantiser",
    "RandomDropping",
    "Selection",
    "Selector",
    "Sign",
    "Stage",
    "Threshold",
    "TopK",
    "client_of_value",
    "decompress",
    "minus",
    "parse",
    "plus",
    "values_of",
]
