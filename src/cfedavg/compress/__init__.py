"""Selectors, quantisers and their composition; Definition 1."""

from cfedavg.compress.compressor import (
    EXAMPLES,
    QUANTISERS,
    SELECTORS,
    Compressor,
    decompress,
    parse,
    values_of,
)
from cfedavg.compress.quantisers import BF16, FP32, QSGD, IntBlocks, Quantiser, Sign
from cfedavg.compress.selectors import (
    Everything,
    Proportional,
    RandomDropping,
    Selection,
    Selector,
    Threshold,
    TopK,
)
from cfedavg.compress.stages import Stage, client_of_value

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
    "parse",
    "values_of",
]
