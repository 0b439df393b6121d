"""The vectors of messages with a basis, in plain Python and from docs/wire.md alone."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from tests.plain_wire import BF16, FP32, FP64, PER_LEVEL, ROTATED, Message, bits53, factors, rotated_blocks

LARGEST32 = (2 - 2**-23) * 2.0**127


def expand(message: Message, shapes: Sequence[Sequence[int]]) -> list[float]:
    """The vector whose coordinates in a basis a message holds; Python's floats are of double precision."""
    values = numbers(message)
    if message.header.where == ROTATED:
        vector = turn_back(values, message)
    else:
        assert message.rank is not None
        vector = multiply(values, factors(shapes, message.rank))
    return vector if message.header.kind == FP64 else [to_single(number) for number in vector]


def turn_back(values: list[float], message: Message) -> list[float]:
    assert message.key is not None
    assert message.size is not None
    vector: list[float] = []
    start = 0
    for length, n in rotated_blocks(message.header.d, message.size):
        block = values[start : start + n]
        step = 1
        while step < n:
            for i in range(n):
                if i // step % 2 == 0:
                    a, b = block[i], block[i + step]
                    block[i], block[i + step] = a + b, a - b
            step *= 2
        for number in block[:length]:
            sign = -1 if bits53(message.key, len(vector)) % 2 else 1
            vector.append(number * math.sqrt(1 / n) * sign)
        start += n
    return vector


def multiply(values: list[float], tensors: list[tuple[int, int, int, int]]) -> list[float]:
    vector: list[float] = []
    start = 0
    for rows, columns, rank, length in tensors:
        part = values[start : start + length]
        start += length
        if rank == 0:
            vector += part
            continue
        for a in range(rows):
            for b in range(columns):
                p, q = part[a * rank :], part[(rows + b) * rank :]
                total = p[0] * q[0]
                for i in range(1, rank):
                    total += p[i] * q[i]
                vector.append(total)
    return vector


def to_single(number: float) -> float:
    number = max(-LARGEST32, min(LARGEST32, number))
    (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    return float(rounded)


def numbers(message: Message) -> list[float]:
    """The values as floats."""
    kind, values = message.header.kind, message.values
    if kind == FP64:
        return [struct.unpack("<d", value.to_bytes(8, "little"))[0] for value in values]
    if kind in (FP32, BF16):
        shift = 16 if kind == BF16 else 0
        return [single(value << shift) for value in values]
    assert message.block is not None
    assert message.top is not None
    found = []
    for j, level in enumerate(values):
        block = j // message.block if message.block else 0
        if kind == PER_LEVEL:
            scale = single(message.scales[block * message.top + abs(level) - 1])
            found.append(-scale if level < 0 else scale)
        else:
            found.append(to_single(level * single(message.scales[block])))
    return found


def single(pattern: int) -> float:
    return float(struct.unpack("<f", pattern.to_bytes(4, "little"))[0])
