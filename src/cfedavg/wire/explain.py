"""Tables that explain a message to people: its header, its sections, its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from cfedavg.core.layout import Layout
from cfedavg.core.payload import Payload
from cfedavg.wire.format import sections_of
from cfedavg.wire.header import CHECKSUM, SIZE, Header, Kind, Where, read_header

Rows = Sequence[tuple[str, ...]]

WHERE = {Where.ALL: "all coordinates", Where.DRAWN: "drawn from a key", Where.LISTED: "listed"}
KIND = {
    Kind.FP32: "32-bit floats",
    Kind.FP64: "64-bit floats",
    Kind.BF16: "bf16",
    Kind.INT8: "levels of 8 bits, with scales",
    Kind.INT16: "levels of 16 bits, with scales",
}


def header_rows(header: Header) -> Rows:
    """Return a row (field, value) for each part of the header."""
    return [
        ("version", f"{header.version}"),
        ("sender", f"client {header.client}, message {header.sequence}, round {header.round}"),
        ("model", f"schema {header.schema:016x}, d = {header.d:,}"),
        ("coordinates", f"k = {header.k:,} ({header.k / max(header.d, 1):.3%}), {WHERE[header.where]}"),
        ("values", f"{KIND[header.kind]}, {header.coding.name.lower()}"),
    ]


def entropy_bound(d: int, k: int) -> float:
    """Return log2 C(d, k) / k: the bits per index that a random set of k out of d indices needs.

    >>> round(entropy_bound(582_026, 5820), 2)
    8.08
    """
    if not 0 < k < d:
        return 0.0
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2) / k


def section_rows(data: bytes) -> Rows:
    """Return a row (section, bytes, bits per sent coordinate, remark) for each section of a message.

    Raise WireError if a length or the checksum of the message is wrong.
    """
    header = read_header(data)
    sections_of(data, header)
    k, bound = max(header.k, 1), entropy_bound(header.d, header.k)
    bits = 8 * header.index_bytes / k
    rows = [("header and checksum", SIZE + CHECKSUM.size, ""), ("coordinates", header.index_bytes, "")]
    if header.where is Where.LISTED and bound:
        rows[1] = ("coordinates", header.index_bytes, f"{bits / bound:.3f} of the entropy bound, {bound:.2f}")
    if header.where is Where.DRAWN:
        rows[1] = ("coordinates", header.index_bytes, f"a key; the entropy bound is {bound:.2f}")
    rows += [("values, coded", header.value_bytes, ""), ("values, copied", header.raw_bytes, "")]
    dense = 4 * header.d / len(data)
    rows += [("message", len(data), f"{dense:.3g} times shorter than {4 * header.d:,} bytes of fp32")]
    return [(name, f"{size:,}", f"{8 * size / k:.2f}", remark) for name, size, remark in rows]


def tensor_rows(payload: Payload, layout: Layout) -> Rows:
    """Return a row (name, shape, sent coordinates, sent share) for each tensor."""
    rows = []
    for name, shape, part in zip(layout.names, layout.shapes, layout.slices(), strict=True):
        sent = size = part.stop - part.start
        if payload.indices is not None:
            start, stop = np.searchsorted(payload.indices, [part.start, part.stop])
            sent = int(stop - start)
        share = sent / max(size, 1)
        rows.append((name, " x ".join(map(str, shape)) or "number", f"{sent:,}", f"{share:.2%}"))
    return rows
