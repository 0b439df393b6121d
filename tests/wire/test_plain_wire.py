"""docs/wire.md is complete: a decoder written from it alone reads what the encoder writes, bit for bit."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg import Layout, decode, encode, parse
from cfedavg.compress import decompress
from cfedavg.core.bases import Factors, Rotation
from cfedavg.core.payload import Floats, Levels, Mask, Payload, blocks
from tests import golden_cases, plain_bases, plain_wire
from tests.golden_cases import FOLDER, cases, earlier_cases, version_3_cases, whole_float_cases
from tests.plain_wire import Message

FLAT = Layout.flat(600)
NET = Layout(
    ("conv", "conv.bias", "fc", "fc.bias", "out", "out.bias", "scale"),
    ((6, 5, 3, 3), (6,), (40, 30), (40,), (7, 40), (7,), ()),
    ("float32",) * 7,
)
WIDE = Layout(("weight", "größe"), ((40, 40), (200,)), ("float32", "float64"))
SELECTORS = (
    "none", "topk(0.9)", "topk(0.5)", "topk(0)", "rd(0.9)", "threshold(0.5)", "proportional(0.9)",
    "topk(0.9, per_tensor=true)",
)  # fmt: skip
QUANTISERS = ("none", "bf16", "fp32", "int8(256)", "int4(64)", "int2(3)", "sign", "qsgd(16)", "qsgd(500)")
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
HEADER = {"client": 2**64 - 5, "sequence": 2**63 + 1, "round": 2**32 - 2}


# Vectors


def gaussian(layout: Layout, seed: int = 0) -> torch.Tensor:
    return torch.randn(layout.d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uneven(layout: Layout, rows: float = 1.5, columns: float = 1.5, seed: int = 0) -> torch.Tensor:
    """Return an update of outer products with noise; rows and columns differ by powers of e."""
    p = gaussian(layout, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    for shape, part in zip(layout.shapes, layout.slices(), strict=True):
        if len(shape) > 1:
            heights = torch.exp(rows * torch.randn(shape[0], generator=generator))
            widths = torch.exp(columns * torch.randn(shape[1], generator=generator))
            weights = torch.outer(heights, widths).reshape(*shape[:2], *[1] * len(shape[2:]))
            p[part] *= weights.expand(shape).reshape(-1)
    return p


def spike(layout: Layout) -> torch.Tensor:
    p = torch.zeros(layout.d, dtype=torch.float64)
    p[layout.d // 2] = -3
    return p


def clustered(layout: Layout) -> torch.Tensor:
    """Large values side by side, nothing elsewhere but for a little noise."""
    p = 1e-3 * gaussian(layout, 5)
    p[100:160] += 5
    p[layout.d - 30 :] -= 2
    return p


VECTORS = {
    "gaussian": gaussian,
    "uneven": uneven,
    "zeros": lambda layout: torch.zeros(layout.d, dtype=torch.float64),
    "spike": spike,
    "constant": lambda layout: torch.full((layout.d,), -0.7, dtype=torch.float64),
    "clustered": clustered,
    "huge range": lambda layout: gaussian(layout, 3) * 10.0 ** (6 * gaussian(layout, 4)).clamp(-15, 15),
}


# Comparing


def bits(array: np.ndarray) -> list[int]:
    return array.view(UNSIGNED[array.itemsize]).tolist()


def read(data: bytes, layout: Layout) -> Message:
    return plain_wire.decode(data, layout.names, layout.shapes, layout.dtypes)


def assert_says(message: Message, payload: Payload) -> None:
    header, values, mask, basis = message.header, payload.values, payload.mask, payload.basis
    assert (header.d, [header.k]) == (payload.d, payload.counts())
    assert message.indices == (None if payload.indices is None else payload.indices.tolist())
    where = {0} if payload.indices is None else {1} if mask else {2, 5}
    assert header.where in ({Rotation: {3}, Factors: {4}}[type(basis)] if basis else where)
    key = (int(mask.keys[0]), mask.keep) if mask else (None, None)
    turned = (int(basis.keys[0]), None) if isinstance(basis, Rotation) else key
    assert (message.key, message.keep) == turned
    assert message.size == (basis.block if isinstance(basis, Rotation) else None)
    assert message.rank == (basis.rank if isinstance(basis, Factors) else None)
    if isinstance(values, Floats):
        assert header.kind == ["fp32", "fp64", "bf16"].index(values.dtype)
        assert message.values == bits(values.data)
        assert (message.scales, message.block, message.top) == ([], None, None)
    else:
        few = values.levels.itemsize == 1 and 2 <= values.top <= 15
        kinds = {1: 6 if few else 3, 2: 4}
        assert header.kind == (5 if values.per_level else kinds[values.levels.itemsize])
        assert message.values == values.levels.tolist()
        assert message.scales == bits(values.scales)
        assert (message.block, message.top) == (values.block, values.top)


def round_trip(payload: Payload, layout: Layout, code_floats: bool = False) -> Message:
    message = read(encode(payload, layout, **HEADER, code_floats=code_floats), layout)
    assert {name: getattr(message.header, name) for name in HEADER} == HEADER
    assert_says(message, payload)
    return message


def compressed(text: str, p: torch.Tensor, layout: Layout) -> Payload:
    return parse(text).compress(p, key=-7, layout=layout).numpy()


def listed(d: int, indices: np.ndarray, patterns: np.ndarray) -> Payload:
    values = Floats(patterns.astype(np.uint16).view(np.int16), "bf16")
    return Payload(d, np.array([0, len(indices)]), indices.astype(np.int64), values)


def finite_bf16(rng: np.random.Generator, k: int) -> np.ndarray:
    return rng.integers(0, 0x7F80, k) | rng.integers(0, 2, k) << 15


# What the compressors make


@pytest.mark.parametrize("quantiser", QUANTISERS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_compressors(selector: str, quantiser: str) -> None:
    text = selector if quantiser == "none" else f"{selector} >> {quantiser}"
    for name, vector in VECTORS.items():
        p = vector(NET)
        round_trip(compressed(text, p.float(), NET), NET)
        if name in ("gaussian", "uneven"):
            round_trip(compressed(text, p, NET), NET)
            round_trip(compressed(text, vector(FLAT).float(), FLAT), FLAT)
    round_trip(compressed(text, gaussian(FLAT), FLAT), FLAT)


def test_every_mode() -> None:
    """Classes of rows, of columns, of both and of none, as rows and columns are uneven."""
    for mode in range(4):
        p = uneven(WIDE, rows=2.0 * (mode & 1), columns=mode & 2)
        p[1600:] *= 100  # so that it pays to go tensor by tensor
        for text in ("topk(0.7) >> bf16", "threshold(0.1) >> int4(64)"):
            message = round_trip(compressed(text, p, WIDE), WIDE)
            assert message.by_tensor
            assert message.modes == [mode]


def test_modes_differ_between_the_tensors_of_a_message() -> None:
    message = round_trip(compressed("topk(0.9)", uneven(NET), NET), NET)
    assert message.by_tensor
    assert len(message.modes) == 3  # of conv, fc and out; vectors have none
    assert len(set(message.modes)) > 1


@pytest.mark.parametrize("quantiser", ["fp32", "bf16", "int8(256)", "qsgd(500)", "sign"])
def test_nothing_sent(quantiser: str) -> None:
    for layout in (FLAT, NET):
        zeros = torch.zeros(layout.d)
        message = round_trip(compressed(f"threshold(0.5) >> {quantiser}", zeros, layout), layout)
        assert (message.header.k, message.values, message.indices) == (0, [], [])
        assert message.header.lengths[:2] == (0, 0)


# Payloads by hand: the corners of the format


@pytest.mark.parametrize("d", [2**18, 2**22, 2**31 - 1, 2**31, 2**33 + 7, 2**45])
@pytest.mark.parametrize("k", [1, 2, 7, 200])
def test_long_vectors(d: int, k: int) -> None:
    """Gaps of more than 16 bits, and sizes beyond 2^31."""
    rng = np.random.default_rng(k)
    indices = np.unique(rng.integers(0, d, k))
    indices[-1] = d - 1
    round_trip(listed(d, indices, finite_bf16(rng, len(indices))), Layout.flat(d))


def test_renewal_of_a_table_of_cells() -> None:
    """So many cells that counts are scaled down again and again, and that the density changes on the way."""
    rng = np.random.default_rng(0)
    for share in (0.001, 0.2, 0.9):
        kept = rng.random(6000) < np.where(np.arange(6000) < 3000, share, 0.1)
        indices = np.flatnonzero(kept)
        round_trip(listed(6000, indices, np.full(len(indices), 0x3F80)), Layout.flat(6000))


@pytest.mark.parametrize("shapes", [
    ((0,), (3, 0, 2), (4, 5), (0, 7)), ((5, 1), (1, 7), (1, 1), (1, 1, 9), (1,)), ((2, 3, 0), ()), (),
    ((3, 4, 1, 2),),
])  # fmt: skip
def test_odd_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    layout = Layout(tuple(map(str, shapes)), shapes, ("float32",) * len(shapes))
    rng = np.random.default_rng(0)
    for share in (0, 0.3, 1):
        indices = np.flatnonzero(rng.random(layout.d) < share)
        round_trip(listed(layout.d, indices, finite_bf16(rng, len(indices))), layout)
    everything = Floats(rng.standard_normal(layout.d), "fp64")
    round_trip(Payload(layout.d, np.array([0, layout.d]), None, everything), layout)


@pytest.mark.parametrize("patterns", [
    [0x8000], [0], [0x7F7F], [0xFF7F, 0], [0x3F80, 0x3F80, 0xBF80], [0, 0x00FF], [0, 0x0100],
    [0x8000, 0x7F7F],
])  # fmt: skip
def test_magnitudes_from_the_lowest_to_the_highest(patterns: list[int]) -> None:
    indices = np.arange(len(patterns)) * 5
    round_trip(listed(600, indices, np.array(patterns)), FLAT)


@pytest.mark.parametrize("levels", [[0, 0, 0, 0], [3, 3, -3, 3], [0, 1, -1, 0], [127, -127, 0, 5]])
def test_levels(levels: list[int]) -> None:
    for dtype, factor in ((np.int8, 1), (np.int16, 258)):
        top = max(abs(n) for n in levels) * factor
        for block, scales in ((0, 1), (1, 4), (3, 2), (2**32 - 1, 1)):
            values = Levels(
                np.array(levels, dtype) * dtype(min(factor, 32767)), np.ones(scales, np.float32), block, top
            )
            round_trip(Payload(600, np.array([0, 4]), np.array([0, 1, 300, 599]), values), FLAT)


@pytest.mark.parametrize("key", [0, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("keep", [0, 2**52, 2**53])
def test_keys(key: int, keep: int) -> None:
    indices = np.array([j for j in range(600) if plain_wire.bits53(key, j) < keep], np.int64)
    k = len(indices)
    values = Floats(np.linspace(-1, 1, k).astype(np.float32), "fp32")
    round_trip(Payload(600, np.array([0, k]), indices, values, Mask(np.array([key]), keep)), FLAT)


# Version 3


def assert_expands(message: Message, payload: Payload, layout: Layout) -> None:
    """Both make the same vector of the values, bit for bit."""
    found, expected = np.array(plain_bases.expand(message, layout.shapes)), decompress(payload)[0]
    assert found.astype(expected.dtype).tobytes() == expected.tobytes()


def scaled(rng: np.random.Generator, k: int, top: int, block: int) -> Levels:
    """Return levels with a scale for each magnitude; some have the signs of an outer product."""
    spread = np.repeat(rng.integers(0, 2, k // 30 + 1), 30)[:k] * rng.integers(0, top, k)
    levels = np.clip(1 + spread + (rng.random(k) < 0.2), 1, top) * rng.choice([-1, 1], k)
    scales = rng.standard_normal(blocks(k, block) * top).astype(np.float32)
    return Levels(levels.astype(np.int8), scales, block, top, per_level=True)


@pytest.mark.parametrize("top", [1, 2, 3, 4, 8, 100, 127])
def test_levels_with_scales_of_their_own(top: int) -> None:
    rng = np.random.default_rng(top)
    for layout in (FLAT, NET, WIDE):
        for share, block in ((0.02, 0), (0.3, 1), (0.9, 7), (1.1, 256)):
            at = np.flatnonzero(rng.random(layout.d) < share)
            values, where = scaled(rng, len(at), top, block), at if share < 1 else None
            round_trip(Payload(layout.d, np.array([0, len(at)]), where, values), layout)


@pytest.mark.parametrize("top", [1, 2, 3, 7, 15, 16])
def test_levels_of_few_magnitudes(top: int) -> None:
    rng = np.random.default_rng(top)
    for layout in (FLAT, NET, WIDE):
        for share, block in ((0.02, 0), (0.3, 1), (0.9, 7), (1.1, 256)):
            at = np.flatnonzero(rng.random(layout.d) < share)
            levels = scaled(rng, len(at), top, 0).levels * (rng.random(len(at)) < rng.choice([0.0, 0.5, 1.0]))
            scales = rng.standard_normal(blocks(len(at), block)).astype(np.float32)
            values = Levels(levels.astype(np.int8), scales, block, top)
            where = at if share < 1 else None
            round_trip(Payload(layout.d, np.array([0, len(at)]), where, values), layout)


@pytest.mark.parametrize("name", ["net-all-rows", "net-all-product"])
def test_a_large_lead_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In these messages, the lead of one prediction becomes large: a decoder that goes on is wrong."""
    (_, layout, payload), *_ = (case for case in version_3_cases() if case[0] == name)
    message = encode(payload, layout)
    assert_says(read(message, layout), payload)
    monkeypatch.setattr(plain_wire, "FINAL", 2**62)
    try:
        values = read(message, layout).values
    except ValueError:
        return
    assert isinstance(payload.values, Levels)
    assert values != payload.values.levels.tolist()


def test_signs_of_an_outer_product() -> None:
    """Votes of rows and columns, up to their limits, and signs that turn on the way."""
    signs = np.outer(np.sign(np.sin(np.arange(1, 41) ** 2)), np.sign(np.cos(np.arange(40) ** 2)))
    for turned in (0, 700, 1600):
        vector = np.append(signs.reshape(-1), -np.ones(200))
        vector[turned : turned + 400] *= -1
        values = Levels(vector.astype(np.int8), np.ones(1, np.float32), 0, 1, per_level=True)
        message = round_trip(Payload(1800, np.array([0, 1800]), None, values), WIDE)
        assert 8 * message.header.lengths[1] < 0.5 * 1800


@st.composite
def chunked(draw: st.DrawFn) -> tuple[Layout, np.ndarray]:
    """A layout, and the same number of indices in each chunk, crowded or not."""
    shapes = draw(st.lists(st.lists(st.integers(1, 20), max_size=4).map(tuple), min_size=1, max_size=4))
    shapes.append((draw(st.integers(64, 300)),))
    layout = Layout(("t",) * len(shapes), tuple(shapes), ("float32",) * len(shapes))
    chunk, power = 2 ** draw(st.integers(6, 8)), draw(st.sampled_from([0.0, 1.0, 8.0]))
    n, rng = draw(st.integers(1, chunk - 1)), np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = np.repeat(rng.random(layout.d // 7 + 1) ** power, 7)[: layout.d] * rng.random(layout.d)
    parts = [np.argsort(scores[at : at + chunk])[-n:] + at for at in range(0, layout.d, chunk)]
    return layout, np.sort(np.concatenate(parts))


@given(chunked(), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_any_chunks(found: tuple[Layout, np.ndarray], seed: int) -> None:
    layout, indices = found
    values = scaled(np.random.default_rng(seed), len(indices), 2, 64)
    round_trip(Payload(layout.d, np.array([0, len(indices)]), indices, values), layout)


@pytest.mark.parametrize("n", [4, 16, 40])
@pytest.mark.parametrize(
    "layout", [NET, Layout.flat(20_000), Layout(("a", "b"), ((300, 40), (9, 1000)), ("f",) * 2)]
)
def test_chunks_of_an_update(layout: Layout, n: int) -> None:
    """Coordinates in chunks take fewer bytes so, and are found again."""
    p = abs(uneven(layout, rows=0.7, columns=0.7).numpy())
    parts = [np.argsort(p[at : at + 256])[-n:] + at for at in range(0, layout.d, 256)]
    indices = np.sort(np.concatenate(parts))
    message = round_trip(listed(layout.d, indices, np.full(len(indices), 0x3F80)), layout)
    assert (message.header.where, message.header.version) == (5, 3)


@pytest.mark.parametrize("d", [1, 2, 63, 64, 65, 600])
@pytest.mark.parametrize("size", [1, 2, 64, 4096])
def test_rotations(d: int, size: int) -> None:
    basis, layout, rng = Rotation(np.array([5 - 2**63]), size), Layout.flat(d), np.random.default_rng(d)
    k = basis.count(d)
    offsets, numbers = np.array([0, k]), rng.standard_normal(k) * 10.0 ** rng.integers(-44, 38)
    for values in (
        Floats(numbers.astype(np.float32), "fp32"),
        Floats(numbers, "fp64"),
        scaled(rng, k, 4, size),
    ):
        payload = Payload(d, offsets, None, values, basis=basis)
        assert_expands(round_trip(payload, layout), payload, layout)


@pytest.mark.parametrize("rank", [1, 2, 3, 100, 2**32 - 1])
@pytest.mark.parametrize("layout", [FLAT, NET, WIDE], ids=["flat", "net", "wide"])
def test_factors(rank: int, layout: Layout) -> None:
    basis, rng = Factors.of(layout, rank), np.random.default_rng(rank)
    k = basis.count(layout.d)
    offsets, numbers = np.array([0, k]), rng.standard_normal(k) * 10.0 ** rng.integers(-30, 38)
    bf16 = Floats(
        (rng.standard_normal(k).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.int16),
        "bf16",
    )
    for values in (
        Floats(numbers.astype(np.float32), "fp32"),
        Floats(numbers, "fp64"),
        bf16,
        scaled(rng, k, 2, 0),
    ):
        payload = Payload(layout.d, offsets, None, values, basis=basis)
        assert_expands(round_trip(payload, layout), payload, layout)


BF16 = st.integers(0, 0xFFFF).filter(lambda pattern: pattern & 0x7F80 != 0x7F80)
SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), max_size=4).map(tuple)


@given(SHAPES, st.data())
@settings(max_examples=150)
def test_any_set(shapes: tuple[tuple[int, ...], ...], data: st.DataObject) -> None:
    layout = Layout(("t",) * len(shapes), shapes, ("float32",) * len(shapes))
    sent = st.dictionaries(st.integers(0, layout.d - 1), BF16) if layout.d else st.just({})
    chosen = sorted(data.draw(sent).items())
    indices, patterns = ([pair[i] for pair in chosen] for i in range(2))
    round_trip(listed(layout.d, np.array(indices, np.int64), np.array(patterns, np.int64)), layout)


@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.floats(0, 3), st.floats(0, 3),
    st.floats(0, 0.9), st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=150)
def test_any_uneven_set(r: int, c: int, g: int, rows: float, columns: float, share: float, seed: int) -> None:
    """Sets that crowd in rows and columns, with bit patterns of all kinds."""
    layout = Layout(("t", "b"), ((r, c, g), (r,)), ("float32",) * 2)
    rng = np.random.default_rng(seed)
    chance = np.outer(np.exp(rows * rng.standard_normal(r)), np.exp(columns * rng.standard_normal(c)))
    chance = np.append(np.repeat(share * chance.reshape(-1) / chance.mean(), g), np.full(r, share))
    indices = np.flatnonzero(rng.random(layout.d) < chance)
    round_trip(listed(layout.d, indices, finite_bf16(rng, len(indices))), layout)


@pytest.mark.parametrize("vector", VECTORS)
@pytest.mark.parametrize("layout", [FLAT, NET, WIDE], ids=["flat", "net", "wide"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coded_floats_of_all_coordinates(vector: str, layout: Layout, dtype: torch.dtype) -> None:
    payload = compressed("none", VECTORS[vector](layout).to(dtype), layout)
    assert round_trip(payload, layout, code_floats=True).header.version == 2


# Files and refusals

GOLDEN = [pytest.param(f"v1-{name}", *case, id=f"v1-{name}") for name, *case in cases()]
GOLDEN += [pytest.param(f"v2-{name}", *case, id=f"v2-{name}") for name, *case in whole_float_cases()]
GOLDEN += [pytest.param(f"v3-{name}", *case, id=f"v3-{name}") for name, *case in version_3_cases()]


@pytest.mark.parametrize(("name", "layout", "payload"), list(earlier_cases()))
def test_golden_of_an_earlier_encoder(name: str, layout: Layout, payload: Payload) -> None:
    message = read((FOLDER / f"v1-{name}.cfa").read_bytes(), layout)
    assert (message.header.version, message.header.kind) == (1, 3)
    assert_says(replace(message, header=replace(message.header, kind=6)), payload)


@pytest.mark.parametrize(("name", "layout", "payload"), GOLDEN)
def test_golden(name: str, layout: Layout, payload: Payload) -> None:
    message = read((FOLDER / f"{name}.cfa").read_bytes(), layout)
    assert_says(message, payload)
    header = message.header
    assert (header.client, header.sequence, header.round) == (2**40 + 3, 77, 12)
    if payload.basis is not None:
        assert_expands(message, payload, layout)


def with_checksum(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(4, "little")


@pytest.mark.parametrize(("offset", "what"), [
    (0, "magic"), (4, "version"), (5, "where"), (6, "kind"), (7, "coding"), (8, "schema"), (16, "d is that"),
    (31, "k exceeds d"), (52, "add up"), (60, "add up"), (68, "add up"), (-4, "checksum"), (80, "checksum"),
])  # fmt: skip
def test_refusals(offset: int, what: str) -> None:
    data = bytearray(encode(compressed("topk(0.9) >> bf16", gaussian(NET).float(), NET), NET))
    data[offset] ^= 0x55
    with pytest.raises(ValueError, match=what):
        read(bytes(data), NET)


def test_refuses_a_version_that_does_not_go_with_the_rest() -> None:
    p = gaussian(NET).float()
    plain = encode(compressed("none", p, NET), NET)
    coded = encode(compressed("none", p, NET), NET, code_floats=True)
    listed = encode(compressed("topk(0.9)", p, NET), NET)
    for data in (plain, coded, listed):
        other = data[:4] + bytes([3 - data[4]]) + data[5:-4]
        with pytest.raises(ValueError, match="the version does not go with where, kind and coding"):
            read(with_checksum(other), NET)


def test_refuses_wrong_lengths() -> None:
    data = encode(compressed("topk(0.9)", gaussian(NET).float(), NET), NET)
    for wrong in (b"", data[:79], data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match=r"short|add up"):
            read(wrong, NET)
    lengths = [int.from_bytes(data[at : at + 8], "little") for at in (52, 60, 68)]
    head = b"".join((n + more).to_bytes(8, "little") for n, more in zip(lengths, (0, 1, -1), strict=True))
    with pytest.raises(ValueError, match="section 3 has a wrong length"):
        read(with_checksum(data[:52] + head + data[76:-4]), NET)


def test_refuses_more_than_was_coded() -> None:
    data = encode(compressed("topk(0.9) >> bf16", gaussian(FLAT).float(), FLAT), FLAT)
    length = int.from_bytes(data[60:68], "little")
    for more, what in ((b"\0", "ends with a zero"), (b"\1" * 9, "of a wrong length")):
        head = data[:60] + (length + len(more)).to_bytes(8, "little") + data[68:-4]
        with pytest.raises(ValueError, match=what):
            read(with_checksum(head + more), FLAT)


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a message with bytes of its coded sections changed, removed or added."""
    lengths = [int.from_bytes(data[at : at + 8], "little") for at in (52, 60)]
    which = int(rng.integers(2)) if data[5] in (2, 5) else 1  # a key is not coded
    start, end = (76, 76 + lengths[0]) if which == 0 else (76 + lengths[0], 76 + sum(lengths))
    section = bytearray(data[start:end])
    what = rng.integers(4)
    if what == 0:
        section[rng.integers(len(section))] ^= 1 << int(rng.integers(8))
    elif what == 1:
        section += rng.integers(1, 256, rng.integers(1, 9), np.uint8).tobytes()
    elif what == 2:
        del section[rng.integers(len(section)) :]
    else:
        section[:8] = rng.integers(0, 256, 8, np.uint8).tobytes()
    at = 52 + 8 * which
    head = data[:at] + len(section).to_bytes(8, "little") + data[at + 8 : start]
    return with_checksum(head + bytes(section) + data[end:-4])


@pytest.mark.parametrize(
    "text", ["topk(0.9) >> bf16", "topk(0.95)", "rd(0.9) >> int8(256)", "sign", "qsgd(500)", "none"]
)
def test_agrees_on_damaged_messages(text: str) -> None:
    """Both decoders refuse the same messages and read the others alike."""
    rng = np.random.default_rng(0)
    data = encode(compressed(text, uneven(NET).float(), NET), NET, code_floats=True)
    refused = 0
    for _ in range(60):
        other = damaged(data, rng)
        try:
            payload = decode(other, layout=NET)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError):  # noqa: PT011
                read(other, NET)
        else:
            assert_says(read(other, NET), payload)
    assert 0 < refused < 60


@pytest.mark.parametrize(
    "name",
    ["net-chunked-two", "net-chunked-bf16", "net-listed-eight", "net-rotated-two", "net-factored-fp32"],
)
def test_agrees_on_damaged_messages_of_version_3(name: str) -> None:
    rng = np.random.default_rng(1)
    layout, data = golden_cases.NET, (FOLDER / f"v3-{name}.cfa").read_bytes()
    refused = 0
    for _ in range(150):
        other = damaged(data, rng)
        try:
            payload = decode(other, layout=layout)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError):  # noqa: PT011
                read(other, layout)
        else:
            assert_says(read(other, layout), payload)
    assert 0 < refused < 150
