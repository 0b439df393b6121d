"""The envelope in plain Python: slow, readable, and the oracle of the package's and of the C library.

It is written from docs/envelope.md alone, without a look at src/cfedavg, and so shows that the page is enough
to write one. It needs the standard library only. Floats are Python floats that hold fp32 numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REQUEST = {
    "federation", "client", "number", "generation", "stamp", "t", "mark", "form", "arrays", "compressor",
    "feedback", "update", "seed", "max_norm", "copy", "body", "folder",
}  # fmt: skip
ERRORS = range(1001, 1012)
CHAIN, CHANGES, WHOLE = range(3)
MOST_FACTS = MOST_EARLIER = 65_536
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
SIZES = {
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
}
FP32 = (2 - 2.0**-23) * 2.0**127  # the largest finite numbers
BF16 = (2 - 2.0**-7) * 2.0**127
Version = tuple[int, int, int]  # generation, round, hash


def digest(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha256(b"".join(parts)).digest()[:8], "big")


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


# The form


@dataclass(frozen=True)
class Form:
    """The arrays of the model, and which of them are compressed."""

    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    compressed: list[bool]

    @property
    def tensors(self) -> tuple[list[str], list[list[int]], list[str]]:
        """Names, shapes and dtypes of what is compressed: the schema."""
        chosen = [i for i, yes in enumerate(self.compressed) if yes]
        return (
            [self.names[i] for i in chosen],
            [self.shapes[i] for i in chosen],
            [self.dtypes[i] for i in chosen],
        )

    def uncompressed_length(self, rounds: bool) -> int:
        """The bytes of the uncompressed arrays; running statistics take 2 bytes a number if `rounds`."""
        total = 0
        for name, shape, dtype, yes in zip(
            self.names, self.shapes, self.dtypes, self.compressed, strict=True
        ):
            if not yes:
                statistic = dtype == "float32" and name.endswith(STATISTICS)
                total += math.prod(shape) * (2 if statistic and rounds else SIZES[dtype])
        return total


def read_form(text: str) -> Form:
    return Form(*json.loads(text))


# The client's message and the reply


def write_update(payload: bytes, facts: dict[str, Any], uncompressed: bytes) -> bytes:
    text = json.dumps(facts).encode()
    return struct.pack("<II", len(payload), len(text)) + payload + text + uncompressed


def read_update(data: bytes, d: int, uncompressed: int) -> tuple[bytes, dict[str, Any], bytes]:
    require(len(data) >= 8, "too short for a client's message")
    payload, facts = struct.unpack_from("<II", data)
    require(payload <= 16 * d + 65_536, "the payload is too long")
    require(facts <= MOST_FACTS, "the facts are too long")
    require(len(data) == 8 + payload + facts + uncompressed, "the lengths do not add up")
    found = json.loads(data[8 + payload : 8 + payload + facts])
    require(isinstance(found, dict), "the facts are no object")
    return data[8 : 8 + payload], found, data[8 + payload + facts :]


def reply(generation: int, stamp: int, incarnation: int, message: bytes) -> dict[str, Any]:
    check = zlib.crc32(f"[{generation}, {stamp}, {incarnation}]".encode() + message)
    return {"stamp": [generation, stamp], "incarnation": incarnation, "message": message, "check": check}


def mark(sent: dict[str, Any]) -> list[int]:
    return [*sent["stamp"], sent["incarnation"], digest(sent["message"])]


# The body and the broadcast


def write_body(broadcast: bytes, uncompressed: bytes) -> bytes:
    rest = struct.pack("<Q", len(broadcast)) + broadcast + uncompressed
    return struct.pack("<I", zlib.crc32(rest)) + rest


def read_body(data: bytes) -> tuple[bytes, bytes]:
    require(len(data) >= 12, "too short for a body")
    checksum, length = struct.unpack_from("<IQ", data)
    require(checksum == zlib.crc32(data[4:]), "wrong checksum")
    require(length <= len(data) - 12, "the broadcast is cut short")
    return data[12 : 12 + length], data[12 + length :]


@dataclass(frozen=True)
class Broadcast:
    kind: int
    version: Version
    digest: int
    earlier: list[Version]  # from which a client can follow, oldest first; of a chain, only the first
    messages: list[bytes]


def write_broadcast(broadcast: Broadcast) -> bytes:
    numbers = [hash for _, _, hash in broadcast.earlier]
    n = len(numbers)
    if broadcast.kind == CHAIN:
        n = len(broadcast.messages)
        numbers += [len(message) for message in broadcast.messages]
    header = struct.pack("<4sBBIIQQI", b"CFBC", 1, broadcast.kind, *broadcast.version, broadcast.digest, n)
    data = header + b"".join(struct.pack("<Q", number) for number in numbers) + b"".join(broadcast.messages)
    return data + struct.pack("<I", zlib.crc32(data))


def read_broadcast(data: bytes) -> Broadcast:
    require(len(data) >= 38 and data[:4] == b"CFBC", "not a broadcast")
    _, format, kind, generation, round, hash, its_digest, n = struct.unpack_from("<4sBBIIQQI", data)
    require(format == 1 and kind <= WHOLE, "unknown format or kind")
    require(generation > 0 and n <= min(round, MOST_EARLIER), "a wrong number")
    require(kind != CHAIN or its_digest == 0, "a chain with a digest")
    require(kind != WHOLE or n == 0, "a whole model with earlier versions")
    require(zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little"), "wrong checksum")
    listed = n + 1 if kind == CHAIN else n
    require(34 + 8 * listed <= len(data) - 4, "cut short")
    numbers, rest = struct.unpack_from(f"<{listed}Q", data, 34), data[34 + 8 * listed : -4]
    version = (generation, round, hash)
    if kind != CHAIN:
        require(kind == WHOLE or n > 0, "changes since no version")
        earlier = [(generation, round - n + i, each) for i, each in enumerate(numbers)]
        return Broadcast(kind, version, its_digest, earlier, [rest])
    require(n > 0 or numbers[0] == hash, "a chain that leads to another hash")
    return Broadcast(kind, version, 0, [(generation, round - n, numbers[0])], split(rest, numbers[1:]))


def split(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    require(sum(lengths) == len(data), "the lengths of the messages do not add up")
    parts, start = [], 0
    for length in lengths:
        parts.append(data[start : start + length])
        start += length
    return parts


def first_version(generation: int, round: int, copy: bytes) -> Version:
    return generation, round, digest(struct.pack("<IIQ", generation, round, digest(copy)))


def next_version(version: Version, message: bytes) -> Version:
    generation, round, hash = version
    return generation, round + 1, digest(struct.pack("<Q", hash), message)


def missed_messages(held: Version, chain: Broadcast) -> list[bytes] | None:
    """The messages to add to a copy of a version; None if the copy cannot follow the chain."""
    versions = [chain.earlier[0]]
    for message in chain.messages:
        versions.append(next_version(versions[-1], message))
    if versions[-1] != chain.version or held not in versions:
        return None
    return chain.messages[versions.index(held) :]


# Adding to a copy


def single(number: float) -> float:
    """Round to fp32; all results of this page are clipped or small enough to be finite."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def clip(number: float, most: float) -> float:
    return max(-most, min(most, number))


def round_to_bf16(number: float) -> float:
    bits = int.from_bytes(struct.pack("<f", number), "little")
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return float(struct.unpack("<f", bits.to_bytes(4, "little"))[0])


def add(w: float, value: float, rounds: bool) -> float:
    """A number of the copy after the value of a message is added; `value` is a float or level · scale."""
    total = w + clip(value, FP32)  # in double precision, which rounds to the same fp32 number
    total = round_to_bf16(clip(single(clip(total, FP32)), BF16)) if rounds else single(total)
    return total + 0.0  # -0 becomes 0


# Random draws and compression


def bits(key: int, j: int) -> int:
    z = (key + (j + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def keys(seed: int, t: int, number: int) -> tuple[int, int]:
    """The key of a drawn mask and the key of random rounding."""
    word = 0
    for part in (seed, t, number, 3):
        word = bits(word ^ (part % 2**64), 0)
    return bits(word, 3), bits(word, 4)


def top_k(p: Sequence[float], comp: float) -> list[int]:
    """The coordinates of the largest magnitudes."""
    k = max(1, round((1 - comp) * len(p)))
    return sorted(sorted(range(len(p)), key=lambda j: (-abs(p[j]), j))[:k])
