"""Adding messages to a copy in machine code: the same bits as `downlink.Copies.receive`, at the cost of k."""

from __future__ import annotations

import numpy as np

from cfedavg.arrays import LARGEST_BF16
from cfedavg.kernel import kernel
from cfedavg.payload import Floats, Levels, Payload

_TOP, _TOP_BF16 = np.float32(np.finfo(np.float32).max), np.float32(LARGEST_BF16)


def add_to(w: np.ndarray, payload: Payload) -> None:
    """Add a payload of listed coordinates to w, in place: float32 numbers, or the bits of bf16 in int16."""
    add = _add_to_bf16 if w.dtype == np.int16 else _add
    add(w, np.asarray(payload.indices), _values(payload.values))


def _values(values: Floats | Levels) -> np.ndarray:
    """Return the float32 values of a payload."""
    if isinstance(values, Levels):
        made = np.empty(len(values.levels), np.float32)
        _scale(values.levels, values.scales, values.block or max(1, len(made)), made)
        return made
    if values.dtype == "bf16":
        made = np.empty(len(values.data), np.float32)
        _widen(values.data, made.view(np.uint32))
        return made
    return np.asarray(values.data, np.float32)


@kernel
def _scale(levels: np.ndarray, scales: np.ndarray, block: int, made: np.ndarray) -> None:
    for i in range(len(levels)):
        made[i] = min(max(np.float32(levels[i]) * scales[i // block], -_TOP), _TOP)


@kernel
def _widen(bits: np.ndarray, made: np.ndarray) -> None:
    for i in range(len(bits)):
        made[i] = np.uint32(np.uint16(bits[i])) << np.uint32(16)


@kernel
def _add(w: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
    for i in range(len(at)):
        total = w[at[i]] + values[i]
        w[at[i]] = total if total != 0 else np.float32(0)  # no -0


@kernel
def _add_to_bf16(bits: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
    """Round each sum to the nearest number of bf16, ties to even."""
    word = np.empty(1, np.uint32)
    number = word.view(np.float32)
    for i in range(len(at)):
        word[0] = np.uint32(np.uint16(bits[at[i]])) << np.uint32(16)
        number[0] = min(max(number[0] + values[i], -_TOP_BF16), _TOP_BF16)
        upper = word[0] + ((word[0] >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        rounded = np.uint16(upper >> np.uint32(16))
        bits[at[i]] = np.int16(rounded if rounded != 0x8000 else 0)  # no -0
