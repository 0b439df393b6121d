"""Good messages of every selector and quantiser, and the means to spoil them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from cfedavg import Layout, Payload, encode, parse
from cfedavg.wire import read_header
from cfedavg.wire.frame import CHECKSUM, SIZE
from tests.golden_cases import version_3_cases

SHAPES = ((6, 5, 3, 3), (6,), (20, 30), (20,), (7, 20), (7,), ())
MODEL = Layout(tuple("abcdefg"), SHAPES, ("float32",) * len(SHAPES))
FLAT = Layout.flat(600)
WIDE = Layout(("square", "broad"), ((60, 80), (1, 90, 50)), ("float32",) * 2)
SELECTORS = ("none", "topk(0.9)", "topk(0)", "rd(0.9)", "threshold(0.5)", "proportional(0.9)")
QUANTISERS = ("fp64", "fp32", "bf16", "int8(256)", "int4(64)", "sign", "qsgd(16)", "qsgd(500)")


def payload(selector: str, quantiser: str = "fp32", layout: Layout = MODEL, zero: bool = False) -> Payload:
    """What one client sends of a vector that looks like an update: rows and columns differ in size."""
    generator = torch.Generator().manual_seed(1)
    parts = []
    for shape in layout.shapes:
        sides = (shape[0], shape[1], math.prod(shape[2:])) if len(shape) > 1 else (1, 1, math.prod(shape))
        part = torch.randn(sides, generator=generator)
        part *= torch.randn(sides[0], 1, 1, generator=generator).mul(2).exp()
        part *= torch.randn(sides[1], 1, generator=generator).mul(2).exp()
        parts.append(part.flatten())
    vector = torch.cat(parts) * (not zero)
    if quantiser in ("fp64", "fp32"):  # what the vector is: without a quantiser, values stay as they are
        text, vector = selector, vector.double() if quantiser == "fp64" else vector
    else:
        text = f"{selector} >> {quantiser}"
    return parse(text).compress(vector, key=7, layout=layout).numpy()


def good_messages(client: int = 0, sequence: int = 0) -> Iterator[tuple[Layout, bytes]]:
    """Every selector with every quantiser; some of a larger model; some that send nothing; coded models; and
    the golden messages of version 3.
    """
    cases = [(s, q, layout, False) for layout in (MODEL, FLAT) for s in SELECTORS for q in QUANTISERS]
    cases += [("topk(0.9)", q, WIDE, False) for q in QUANTISERS[1:4]]
    cases += [("threshold(0.5)", q, layout, True) for layout in (MODEL, FLAT) for q in QUANTISERS]
    for selector, quantiser, layout, zero in cases:
        sent = payload(selector, quantiser, layout, zero)
        yield layout, encode(sent, layout, client=client, sequence=sequence)
    for layout, quantiser in product((MODEL, FLAT), ("fp64", "fp32")):
        sent = payload("none", quantiser, layout)
        yield layout, encode(sent, layout, client=client, sequence=sequence, code_floats=True)
    for _, layout, sent in version_3_cases():
        yield layout, encode(sent, layout, client=client, sequence=sequence)


def sections(message: bytes) -> tuple[bytes, bytes, bytes]:
    """The coordinates, the coded values, the copied values."""
    header = read_header(message)
    values = SIZE + header.index_bytes
    copied = values + header.value_bytes
    return message[SIZE:values], message[values:copied], message[copied : -CHECKSUM.size]


def sealed(body: bytes) -> bytes:
    """Return the body with its checksum."""
    return body + CHECKSUM.pack(zlib.crc32(body))


def forged(
    message: bytes,
    coordinates: bytes | None = None,
    coded: bytes | None = None,
    copied: bytes | None = None,
    **fields: Any,
) -> bytes:
    """Return the message with other sections and fields, right lengths and a right checksum."""
    given = zip((coordinates, coded, copied), sections(message), strict=True)
    parts = [old if new is None else new for new, old in given]
    lengths = dict(zip(("index_bytes", "value_bytes", "raw_bytes"), map(len, parts), strict=True))
    return sealed(read_header(message)._replace(**lengths | fields).pack() + b"".join(parts))
