"""The payloads behind the files in tests/golden: made of keyed integers, so the same everywhere.

`cases` has those of version 1, `whole_float_cases` those of version 2, `version_3_cases` those of version 3.
`earlier_cases` has messages of version 1 that are read, but not made any more.

`python -m tests.golden_cases` writes the files that are missing. A file that is there stays as it is: other
bytes for the same payload need a new version of the format, and new files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cfedavg.core import keys
from cfedavg.core.bases import Factors, Rotation
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Levels, Mask, Payload, blocks
from cfedavg.wire import encode

FOLDER = Path(__file__).parent / "golden"
FLAT = Layout.flat(500)
NET = Layout(
    ("conv", "conv.bias", "fc", "fc.bias", "scale"),
    ((8, 4, 3, 3), (8,), (40, 50), (40,), ()),
    ("float32",) * 5,
)


def draw(name: str, n: int, below: int) -> np.ndarray:
    """n numbers from 0 to below - 1 that depend on the name alone."""
    seed = int.from_bytes(name.encode(), "little") % 2**62
    return keys.bits53(seed, np.arange(n, dtype=np.int64)) % below


def uneven(layout: Layout) -> np.ndarray:
    """Indices that crowd in a few rows and columns, as those of an update do."""
    kept = np.zeros(layout.d, bool)
    for name, shape, part in zip(layout.names, layout.shapes, layout.slices(), strict=True):
        if len(shape) < 2:
            kept[part] = draw(name, part.stop - part.start, 100) < 9
            continue
        rows = 2 ** draw(name + "rows", shape[0], 6)
        columns = 2 ** draw(name + "columns", shape[1], 6)
        group = (part.stop - part.start) // (shape[0] * shape[1])
        chance = np.repeat(np.outer(rows, columns).reshape(-1), group)
        kept[part] = draw(name, part.stop - part.start, 300) < chance
    return np.flatnonzero(kept)


def floats(dtype: str, k: int) -> Floats:
    """Numbers that crowd above a smallest one, of both signs; made as bit patterns, so nothing is rounded."""
    upper = 0x3C00 + draw("small", k, 30) + draw("large", k, 2) * draw("wide", k, 200)
    upper |= (draw("sign", k, 3) == 0) << 15
    if dtype == "bf16":
        return Floats(upper.astype(np.uint16).view(np.int16), dtype)
    if dtype == "fp32":
        return Floats((upper << 16 | draw("low", k, 1 << 16)).astype(np.uint32).view(np.float32), dtype)
    return Floats(
        (upper.astype(np.uint64) << 48 | draw("low", k, 1 << 48).astype(np.uint64)).view(np.float64), dtype
    )


def levels(top: int, block: int, k: int) -> Levels:
    signed = draw("level", k, 2 * top + 1) - top
    scales = (0x3F800000 + draw("scale", blocks(k, block), 1 << 20)).astype(np.uint32).view(np.float32)
    return Levels(signed.astype(np.int8 if top < 128 else np.int16), scales, block, top)


def per_level(top: int, block: int, k: int) -> Levels:
    """Levels of which large ones stand beside large ones, with signs that change in runs."""
    tall = draw("tall", k // 40 + 1, 2).repeat(40)[:k]
    magnitudes = 1 + (draw("level", k, 2 * top) + tall * top) * top // (3 * top)
    turned = (draw("runs", k // 30 + 1, 2).repeat(30)[:k] + (draw("turned", k, 5) == 0)) % 2
    scales = (0x3F800000 + draw("scale", blocks(k, block) * top, 1 << 20)).astype(np.uint32).view(np.float32)
    return Levels(np.where(turned, -magnitudes, magnitudes).astype(np.int8), scales, block, top, True)


def few(top: int, block: int, k: int) -> Levels:
    """Levels like those of `per_level`, from 0 on and with one scale for each block."""
    made, scales = per_level(top + 1, 0, k).levels, levels(top, block, k).scales
    return Levels(made - np.sign(made), scales, block, top)


def settled(k: int) -> dict[str, Levels]:
    """Levels of all coordinates of NET whose signs follow rows until one prediction wins, then the product of
    rows and columns; and the other way round.
    """
    rows, columns = 1 - 2 * draw("rows of fc", 40, 2), 1 - 2 * draw("columns of fc", 50, 2)
    by_row, product = rows.repeat(50), np.outer(rows, columns).reshape(-1)
    made, fc, signs = few(3, 64, k), list(NET.slices())[2], np.ones(k, np.int64)
    found = {}
    for kind, first, then, cut in (("rows", by_row, product, 350), ("product", product, by_row, 1000)):
        signs[fc] = np.append(first[:cut], then[cut:])
        turned = np.where(draw("noise", k, 100) < 20, -signs, signs)
        found[kind] = Levels((abs(made.levels) * turned).astype(np.int8), made.scales, 64, 3)
    return found


def in_chunks(layout: Layout, chunk: int, n: int) -> np.ndarray:
    """Return n indices of each chunk, which crowd in some rows and columns."""
    crowd = np.zeros(layout.d, np.int64)
    crowd[uneven(layout)] = 60
    scores = crowd + draw("score", layout.d, 100)
    parts = [np.argsort(-scores[at : at + chunk], kind="stable")[:n] + at for at in range(0, layout.d, chunk)]
    return np.sort(np.concatenate(parts))


def signs(k: int) -> Levels:
    scale = np.full(min(k, 1), 0.25, np.float32)
    return Levels((1 - 2 * draw("sign", k, 2)).astype(np.int8), scale, 0, 1)


def cases() -> Iterator[tuple[str, Layout, Payload]]:
    """Name, layout and payload of every golden message: each way to say where, with each kind of values."""
    key, keep = 1234567890123456789, 2**53 // 10
    for net, layout in (("flat", FLAT), ("net", NET)):
        everything = np.arange(layout.d)
        sets = {
            "all": (None, None),
            "drawn": (np.flatnonzero(keys.bits53(key, everything) < keep), Mask(np.array([key]), keep)),
            "listed": (uneven(layout) if layout is NET else np.flatnonzero(draw("flat", 500, 10) == 0), None),
        }
        for where, (indices, mask) in sets.items():
            k = layout.d if indices is None else len(indices)
            kinds = {
                "fp32": floats("fp32", k),
                "fp64": floats("fp64", k),
                "bf16": floats("bf16", k),
                "int8": levels(127, 64, k),
                "int2": levels(1, 256, k),
                "qsgd500": levels(500, 256, k),
                "sign": signs(k),
            }
            for kind, values in kinds.items():
                yield (
                    f"{net}-{where}-{kind}",
                    layout,
                    Payload(layout.d, np.array([0, k]), indices, values, mask),
                )
    nothing = np.empty(0, np.int64)
    yield "net-nothing-bf16", NET, Payload(NET.d, np.array([0, 0]), nothing, floats("bf16", 0))
    yield "net-nothing-sign", NET, Payload(NET.d, np.array([0, 0]), nothing, signs(0))
    every = np.arange(FLAT.d)
    yield "flat-every-bf16", FLAT, Payload(FLAT.d, np.array([0, FLAT.d]), every, floats("bf16", FLAT.d))


def whole_float_cases() -> Iterator[tuple[str, Layout, Payload]]:
    """Name, layout and payload of every golden message of version 2: coded floats of all coordinates."""
    for dtype in ("fp32", "fp64"):
        yield f"flat-all-{dtype}", FLAT, whole(floats(dtype, FLAT.d))
        yield f"net-all-{dtype}", NET, whole(floats(dtype, NET.d))
        yield f"flat-extremes-{dtype}", FLAT, whole(extremes(dtype))
        minus_zero = Floats(-np.zeros(1, {"fp32": np.float32, "fp64": np.float64}[dtype]), dtype)
        yield f"one-all-{dtype}", Layout.flat(1), whole(minus_zero)  # its coded section is empty


def version_3_cases() -> Iterator[tuple[str, Layout, Payload]]:
    """Name, layout and payload of every golden message of version 3."""
    key, keep = -987654321987654321, 2**53 // 7
    for net, layout in (("flat", FLAT), ("net", NET)):
        drawn = keys.draw_coordinates(key, keep, layout.d)
        mask, listed = Mask(np.array([key]), keep), uneven(layout) if layout is NET else np.arange(3, 500, 7)
        turned, factors = Rotation(np.array([key]), 256), Factors.of(layout, 2)
        for where, indices, drawn_by in (
            ("all", None, None),
            ("drawn", drawn, mask),
            ("listed", listed, None),
        ):
            k = layout.d if indices is None else len(indices)
            for kind, values in (kinds_per_level(k) | kinds_of_few(k)).items():
                offsets = np.array([0, k])
                yield f"{net}-{where}-{kind}", layout, Payload(layout.d, offsets, indices, values, drawn_by)
        indices = in_chunks(layout, 64, 5)
        for kind, values in every_kind(len(indices)).items():
            offsets = np.array([0, len(indices)])
            yield f"{net}-chunked-{kind}", layout, Payload(layout.d, offsets, indices, values)
        for where, basis in (("rotated", turned), ("factored", factors)):
            k = basis.count(layout.d)
            for kind, values in every_kind(k).items():
                offsets = np.array([0, k])
                yield f"{net}-{where}-{kind}", layout, Payload(layout.d, offsets, None, values, None, basis)
    for kind, of_net in settled(NET.d).items():
        yield f"net-all-{kind}", NET, Payload(NET.d, np.array([0, NET.d]), None, of_net)
    nothing = Payload(NET.d, np.array([0, 0]), np.empty(0, np.int64), per_level(2, 64, 0))
    yield "net-nothing-two", NET, nothing


def kinds_per_level(k: int) -> dict[str, Floats | Levels]:
    """Return levels with 1, 2 and 8 magnitudes, each with a scale of its own."""
    return {"one": per_level(1, 256, k), "two": per_level(2, 64, k), "eight": per_level(8, 0, k)}


def kinds_of_few(k: int) -> dict[str, Floats | Levels]:
    """Return levels of the least and the most magnitudes that count as few, and those of int3."""
    return {"qsgd2": few(2, 256, k), "int3": few(3, 64, k), "int5": few(15, 0, k)}


def earlier_cases() -> Iterator[tuple[str, Layout, Payload]]:
    """Name, layout and payload of messages of version 1 with values that are sent as kind FEW now.

    The encoder before kind FEW has made them.
    """
    for name, layout, payload in version_3_cases():
        _, where, kind = name.split("-")
        if where in ("all", "drawn", "listed") and kind in ("qsgd2", "int3", "int5"):
            yield name, layout, payload


def every_kind(k: int) -> dict[str, Floats | Levels]:
    """Return k values of every kind."""
    found: dict[str, Floats | Levels] = {dtype: floats(dtype, k) for dtype in ("fp32", "fp64", "bf16")}
    found |= {"int8": levels(127, 64, k), "qsgd500": levels(500, 256, k), "two": per_level(2, 64, k)}
    return found | {"int3": few(3, 64, k)}


def whole(values: Floats) -> Payload:
    """All coordinates of a vector."""
    d = len(values.data)
    return Payload(d, np.array([0, d]), None, values)


def extremes(dtype: str) -> Floats:
    """Both zeros, the least and the largest of the subnormal and normal numbers; else those of `floats`."""
    data = floats(dtype, FLAT.d).data.copy()
    limits = np.finfo(data.dtype)
    ends = [0, limits.smallest_subnormal, np.nextafter(limits.tiny, 0), limits.tiny, limits.max]
    data[100:110] = np.array([*ends, *(-end for end in ends)], data.dtype)
    data[105] = -0.0
    return Floats(data, dtype)


def message(payload: Payload, layout: Layout, code_floats: bool = False) -> bytes:
    return encode(payload, layout, client=2**40 + 3, sequence=77, round=12, code_floats=code_floats)


def write_missing(version: int, cases: Iterator[tuple[str, Layout, Payload]]) -> None:
    for name, layout, payload in cases:
        path = FOLDER / f"v{version}-{name}.cfa"
        if not path.exists():
            path.write_bytes(message(payload, layout, code_floats=version == 2))


if __name__ == "__main__":
    write_missing(1, cases())
    write_missing(2, whole_float_cases())
    write_missing(3, version_3_cases())
