"""Add messages to a copy in machine code: the same bits as `downlink.Copies.receive`, at the cost of k."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cfedavg.core.arrays import LARGEST_BF16, from_bf16
from cfedavg.core.kernel import Int, kernel
from cfedavg.core.payload import Levels, Payload

TILE = 1 << 18  # coordinates to which all messages are added before the next ones: they stay in the cache

_TOP, _TOP_BF16 = np.float32(np.finfo(np.float32).max), np.float32(LARGEST_BF16)
_ONE = np.ones(1, np.float32)
_HALF = np.uint32(16)  # bits
_MOST = 1 << 16  # values of one scale that are added at once


def add_all(w: np.ndarray, payloads: Sequence[Payload]) -> np.ndarray:
    """Return w plus payloads of listed coordinates: float32 numbers, or the bits of bf16 in int16."""
    add = _add_to_bf16 if w.dtype == np.int16 else _add
    scaled = [_scaled(payload) for payload in payloads]
    done, w_next = [0] * len(scaled), np.empty_like(w)
    for start in range(0, len(w), TILE):
        w_next[start : start + TILE] = w[start : start + TILE]
        for i, message in enumerate(scaled):
            done[i] = add(w_next, *message, done[i], start + TILE)
    return w_next


def _scaled(payload: Payload) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return coordinates, their numbers, the scale of each block, and how many numbers a block has."""
    at, values = np.asarray(payload.indices), payload.values
    if isinstance(values, Levels):
        return at, values.levels, values.scales, values.block or max(1, len(at))
    numbers = from_bf16(values.data) if values.dtype == "bf16" else np.asarray(values.data, np.float32)
    return at, numbers, _ONE, max(1, len(at))


@kernel
def _add(
    w: np.ndarray, at: np.ndarray, numbers: np.ndarray, scales: np.ndarray, block: Int, i: Int, stop: Int
) -> Int:
    """Add the values from the i-th on to the coordinates below `stop`; return where the rest begins."""
    while i < len(at) and at[i] < stop:
        value = np.float32(numbers[i]) * scales[i // block]
        total = w[at[i]] + min(max(value, -_TOP), _TOP)
        w[at[i]] = total if total != 0 else np.float32(0)  # no -0
        i += 1
    return i


@kernel
def _add_to_bf16(
    bits: np.ndarray, at: np.ndarray, numbers: np.ndarray, scales: np.ndarray, block: Int, i: Int, stop: Int
) -> Int:
    """Do the same where w lies on the grid of bf16: round each sum to the nearest, ties to even."""
    words = np.empty(min(block, _MOST), np.uint32)
    while i < len(at) and at[i] < stop:
        end = min(len(at), (i // block + 1) * block, i + len(words))
        while at[end - 1] >= stop:
            end -= 1
        _add_some(bits, at[i:end], numbers[i:end], scales[i // block], words, words.view(np.float32))
        i = end
    return i


@kernel
def _add_some(
    bits: np.ndarray,
    at: np.ndarray,
    numbers: np.ndarray,
    scale: np.float32,
    words: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Add values of one scale. `sums` are the float32 numbers of `words`.

    The two loops in the middle touch neither `bits` nor `at`, so that the compiler can do 8 numbers at once.
    """
    for k in range(len(at)):
        words[k] = np.uint32(np.uint16(bits[np.uint64(at[k])])) << _HALF
    for k in range(len(at)):
        value = np.float32(numbers[k]) * scale
        sums[k] = min(max(sums[k] + min(max(value, -_TOP), _TOP), -_TOP_BF16), _TOP_BF16)
    for k in range(len(at)):
        upper = (words[k] + ((words[k] >> _HALF) & np.uint32(1)) + np.uint32(0x7FFF)) >> _HALF
        words[k] = upper if upper != np.uint32(0x8000) else np.uint32(0)  # no -0
    for k in range(len(at)):
        bits[np.uint64(at[k])] = np.int16(words[k])
