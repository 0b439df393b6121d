"""The C library makes the bytes of the Python encoder, and reads what the Python decoder reads."""

from __future__ import annotations

import ctypes as c
import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from bench import fuzz

from cfedavg import Layout, Payload, WireError
from cfedavg import decode as python_decode
from cfedavg import encode as python_encode
from cfedavg.compress import BF16, decompress, parse, values_of
from cfedavg.compress.numerics import find_largest
from cfedavg.core import keys
from cfedavg.core.arrays import norm2, to_bf16
from cfedavg.core.bases import Factors, Rotation
from cfedavg.core.payload import Floats, Levels, Mask, blocks
from cfedavg.wire import library
from cfedavg.wire.coordinates import where_of
from cfedavg.wire.library import CTensor
from tests.clients import library as lib
from tests.clients.library import needs_compiler
from tests.core.test_payload import assert_same
from tests.golden_cases import FOLDER, cases, earlier_cases, message, version_3_cases, whole_float_cases

pytestmark = [needs_compiler, pytest.mark.usefixtures("sections_alone")]

# For each code of clients/c/cfedavg.h from 6 on: how the Python decoder begins the sentence of that error.
SENTENCES = [
    "the message must have at most", "not a message", "the message is of version", "the header says where",
    "the header says kind", "the header says coding", r"CODED .* need version 2", "version 2 is for",
    "version 3 is for",
    "the message is of client", "the message has sequence number", "the message is for another model",
    "the message must hold at most", "a message of all coordinates must hold", r".* must be CODED, got PLAIN",
    "the message is cut short", "the message is too long", "the section of the indices must have",
    "the section of copied values must have", "the section of coded values has", "the checksum does not fit",
    "the key of the message", "an index lies beyond", "the message lists", "the section of the indices ends",
    "the section of the indices has extra", "`block` of a rotation", "`rank` of factors",
    "the basis of the message has", "`top` must be", "a scale is", "a value is", "a level exceeds",
    "a level is 0",
    "the section of the values ends", "the section of the values has extra",
]  # fmt: skip


@pytest.fixture
def sections_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package put messages together in Python, also if it has the C library."""
    monkeypatch.setattr(library, "encode", lambda *args: None)
    monkeypatch.setattr(library, "decode", lambda *args: None)


def test_golden_messages() -> None:
    for version, found in ((1, cases()), (2, whole_float_cases()), (3, version_3_cases())):
        for name, layout, payload in found:
            pinned = (FOLDER / f"v{version}-{name}.cfa").read_bytes()
            sender = {"client": 2**40 + 3, "sequence": 77}
            assert lib.encode(payload, layout, **sender, round=12, code_floats=version == 2) == pinned, name
            assert_same(lib.decode(pinned, layout, knows_sender=1, **sender), payload)
            assert message(payload, layout, code_floats=version == 2) == pinned
    for name, layout, payload in earlier_cases():
        assert_same(lib.decode((FOLDER / f"v1-{name}.cfa").read_bytes(), layout), payload)


def draw_layout(rng: np.random.Generator) -> Layout:
    """Return a layout of up to four tensors of up to four axes, some of them empty."""
    shapes = [
        tuple(int(n) for n in rng.integers(0 if rng.random() < 0.1 else 1, 12, rng.integers(0, 5)))
        for _ in range(rng.integers(1, 5))
    ]
    return Layout(tuple(f"a{i}" for i in range(len(shapes))), tuple(shapes), ("float32",) * len(shapes))


def draw_values(rng: np.random.Generator, k: int) -> Floats | Levels:
    kind = rng.integers(6)
    spread = rng.choice([0.0, 1e-3, 1.0, 10.0])
    numbers = (rng.standard_normal(k) * np.exp(spread * rng.standard_normal(k))).astype(np.float32)
    numbers[rng.random(k) < 0.1] *= 0
    if kind < 2:
        return Floats(numbers.astype(("float32", "float64")[kind]), ("fp32", "fp64")[kind])
    if kind == 2:
        return Floats(to_bf16(numbers), "bf16")
    tops = {3: [0, 1, 2, 3, 7, 15, 16, 127], 4: [500, 32767], 5: [1, 2, 5, 8, 127]}[int(kind)]
    top, block = int(rng.choice(tops)), int(rng.choice([0, 1, 7, 256]))
    if kind == 5:
        block = block if top < 3 else 256  # by default a receiver takes no more than 16 bytes a coordinate
        magnitudes = 1 + rng.integers(0, top, k) // np.repeat(rng.integers(1, 4, k // 20 + 1), 20)[:k]
        signs = np.repeat(rng.choice([-1, 1], k // 5 + 1), 5)[:k] * np.where(rng.random(k) < 0.2, -1, 1)
        scales = rng.standard_normal(blocks(k, block) * top).astype(np.float32)
        return Levels((magnitudes * signs).astype(np.int8), scales, block, top, per_level=True)
    levels = rng.integers(-top, top + 1, k).astype(np.int8 if kind == 3 else np.int16)
    return Levels(levels, rng.standard_normal(blocks(k, block)).astype(np.float32), block, top)


def draw_payload(rng: np.random.Generator, layout: Layout) -> Payload:
    """Return a payload whose coordinates crowd in some places, as those of an update do."""
    where, d = rng.integers(6), layout.d
    if where == 0:
        return Payload(d, np.array([0, d]), None, draw_values(rng, d))
    if where in (3, 4):
        basis: Rotation | Factors = Factors.of(layout, int(rng.integers(1, 4)))
        if where == 3:
            basis = Rotation(rng.integers(-(2**63), 2**63 - 1, 1), 2 ** int(rng.integers(0, 12)))
        k = basis.count(d)
        return Payload(d, np.array([0, k]), None, draw_values(rng, k), basis=basis)
    mask, share = None, rng.choice([0.0, 0.01, 0.1, 0.5, 1.0])
    crowd = np.repeat(rng.random(d // 5 + 1), 5)[:d] ** rng.choice([0.0, 1.0, 5.0])
    if where == 1:
        mask = Mask(np.array([int(rng.integers(-(2**63), 2**63 - 1))]), int(share * 2**53))
        indices = keys.draw_coordinates(int(mask.keys[0]), mask.keep, d)
    elif where == 5:
        chunk, n, scores = 2 ** int(rng.integers(6, 9)), int(rng.integers(1, 20)), crowd * rng.random(d)
        parts = [np.argsort(scores[at : at + chunk])[-n:] + at for at in range(0, d, chunk)]
        indices = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
    else:
        indices = np.flatnonzero(rng.random(d) < share * crowd)
    return Payload(d, np.array([0, len(indices)]), indices, draw_values(rng, len(indices)), mask)


def compare(rng: np.random.Generator) -> None:
    layout = draw_layout(rng)
    payload, coded = draw_payload(rng, layout), bool(rng.integers(2))
    sender = {"client": int(rng.integers(2**62)), "sequence": int(rng.integers(2**62)), "round": 7}
    expected = python_encode(payload, layout, **sender, code_floats=coded)
    assert lib.encode(payload, layout, **sender, code_floats=coded) == expected
    assert_same(lib.decode(expected, layout), payload)
    assert int(lib.library().cfedavg_schema(lib.make_layout(layout))) == layout.schema_hash
    basis = payload.basis
    turned, rank = getattr(basis, "block", 0), getattr(basis, "rank", 0)
    count = lib.library().cfedavg_count(lib.make_layout(layout), int(where_of(payload)), turned, rank)
    assert count == (basis.count(layout.d) if basis else layout.d)
    if basis:
        vector = lib.expand(payload, layout)
        assert decompress(vector).tobytes() == decompress(payload).tobytes()


def test_random_payloads_have_the_same_bytes() -> None:
    rng = np.random.default_rng(11)
    for _ in range(400):
        compare(rng)


@pytest.mark.slow
def test_many_random_payloads_have_the_same_bytes() -> None:
    rng = np.random.default_rng(12)
    for _ in range(20_000):
        compare(rng)


@pytest.mark.parametrize(
    "text", ["topk(0.9)", "topk(0.99) >> bf16", "topk(0.95) >> int8(256)", "rd(0.9) >> sign"]
)
def test_updates_of_a_network_have_the_same_bytes(text: str) -> None:
    """Large enough for bands of rows and of columns, which the encoder chooses by the cost in floats."""
    layout = Layout(("conv", "fc", "bias"), ((32, 16, 3, 3), (300, 200), (300,)), ("float32",) * 3)
    rng = np.random.default_rng(3)
    for _ in range(5):
        parts = []
        for shape in layout.shapes:
            rows, columns = shape[0], shape[1] if len(shape) > 1 else 1
            size = np.exp(2 * rng.standard_normal((rows, 1, 1))) * np.exp(
                2 * rng.standard_normal((columns, 1))
            )
            parts.append((size * rng.standard_normal((rows, columns, math.prod(shape[2:])))).reshape(-1))
        p = np.concatenate(parts).astype(np.float32)
        payload = parse(text).compress(p, key=5, layout=layout)
        expected = python_encode(payload, layout)
        assert lib.encode(payload, layout) == expected
        assert_same(lib.decode(expected, layout), payload)


def judge(data: bytes, layout: Layout) -> tuple[str, Payload | None]:
    try:
        return "", python_decode(data, layout=layout, client=fuzz.CLIENT, sequence=fuzz.SEQUENCE)
    except WireError as error:
        return str(error), None


def agree(seed: int, numbers: range) -> Counter[int]:
    """Give mutants to both decoders, which must agree; return how often each code was the reason."""
    corpus, dice, found = fuzz.build_corpus(), fuzz.Dice(), Counter[int]()
    sender: Any = {"knows_sender": 1, "client": fuzz.CLIENT, "sequence": fuzz.SEQUENCE}
    for number in numbers:
        layout, data = fuzz.mutate(seed, number, corpus, dice)
        why, payload = judge(data, layout)
        code, read = lib.try_to_decode(data, layout, **sender)
        found[code] += 1
        if payload is not None:
            assert read is not None, (number, code)
            assert_same(read, payload)
        else:
            assert re.match(SENTENCES[code - 6], why), (number, code, why)
    return found


def test_both_decoders_agree_on_mutants() -> None:
    found = agree(5, range(2_500))
    assert len(found) >= 25
    assert found[0] > 60


@pytest.mark.slow
def test_both_decoders_agree_on_many_mutants() -> None:
    assert len(agree(6, range(200_000))) >= 28


def test_every_code_has_a_sentence_of_its_own() -> None:
    header = (lib.FOLDER / "cfedavg.h").read_text()
    names = [line.strip().rstrip(",") for line in header.splitlines() if line.startswith("    CFEDAVG_")]
    n = names.index("CFEDAVG_ERRORS /* how many codes there are */")
    sentences = [lib.library().cfedavg_explain(code) for code in range(n)]
    assert None not in sentences
    assert len(set(sentences)) == n
    assert lib.library().cfedavg_explain(n) == lib.library().cfedavg_explain(-1) == b"an unknown error"


def test_what_a_receiver_accepts() -> None:
    layout = Layout.flat(100)
    payload = parse("topk(0.9)").compress(np.arange(100, dtype=np.float32), key=0)
    data = lib.encode(payload, layout, client=4, sequence=9)
    for limits, words in (
        ({"max_bytes": len(data) - 1}, "the message is longer"),
        ({"max_values": 9}, "the message holds more values"),
        ({"knows_sender": 1, "client": 5, "sequence": 9}, "the message is of another client"),
        ({"knows_sender": 1, "client": 4, "sequence": 8}, "the message has another sequence"),
    ):
        with pytest.raises(lib.Refused, match=words):
            lib.decode(data, layout, **limits)
    assert_same(lib.decode(data, layout, max_bytes=len(data), max_values=10), payload)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("order", "the indices must increase"),
        ("beyond", "the indices must increase"),
        ("nan", "a value is not"),
        ("length", "the payload has another length"),
        ("level", "a level exceeds"),
        ("top", "`top` exceeds"),
        ("scale", "a scale is not"),
        ("zero", "a level is 0"),
        ("no top", "`top` exceeds"),
        ("rank", "the rank of factors"),
        ("block", "the length of rotated blocks"),
        ("basis", "the basis of the message"),
    ],
)
def test_payloads_that_cannot_be_encoded(fault: str, words: str) -> None:
    indices = {"order": [3, 2], "beyond": [3, 10]}.get(fault, [2, 3])
    floats = Floats(np.array([1, math.nan if fault == "nan" else 2], np.float32), "fp32")
    scale = math.inf if fault == "scale" else 1
    top = 128 if fault == "top" else 5
    levels = Levels(
        np.array([-6 if fault == "level" else 1, 2], np.int8), np.array([scale], np.float32), 0, top
    )
    if fault in ("zero", "no top"):
        levels = Levels(np.array([1, 0], np.int8), np.ones(5, np.float32), 0, 5 * (fault == "zero"), True)
    values = floats if fault in ("order", "beyond", "nan", "length", "rank", "block", "basis") else levels
    bases = {"rank": Factors.of(Layout.flat(10), 0), "block": Rotation(np.array([1]), 3)}
    basis = bases.get(fault, Rotation(np.array([1]), 4) if fault == "basis" else None)
    at = np.array(indices) if basis is None else None
    payload = Payload(11 if fault == "length" else 10, np.array([0, 2]), at, values, basis=basis)
    with pytest.raises(lib.Refused, match=words):
        lib.encode(payload, Layout.flat(10))


@pytest.mark.parametrize("name", ["", "weight", 'a"b\\c\n\r\t\b\f', "\x01\x1f\x7f ~", "ä€𝄞\U0010ffff"])
def test_schema_of_any_name(name: str) -> None:
    layout = Layout((name, "b"), ((2, 3), ()), ("float32", "float64"))
    assert int(lib.library().cfedavg_schema(lib.make_layout(layout))) == layout.schema_hash
    assert int(lib.library().cfedavg_length(lib.make_layout(layout))) == layout.d


@pytest.mark.parametrize(
    "tensor", [(b"\xff", 2), (b"\xc0\x80", 2), (b"\xed\xa0\x80", 2), (b"\xe2\x82", 2), (b"w", 2**57)]
)
def test_layouts_that_are_refused(tensor: tuple[bytes, int]) -> None:
    made, given = lib.POINTER(), CTensor(tensor[0], b"float32", (lib.U64 * 1)(tensor[1]), 1)
    assert lib.library().cfedavg_make_layout(c.byref(given), lib.SIZE(1), c.byref(made)) == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_largest(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    for d, k in ((1, 1), (7, 3), (5000, 50), (100_000, 999), (100_000, 100_000)):
        for ties in (False, True):
            p = rng.standard_normal(d).astype(dtype)
            p = np.round(p) if ties else p
            indices = np.empty(k, np.int64)
            kind = int(dtype == np.float64)
            code = lib.library().cfedavg_find_largest(
                p.ctypes.data_as(lib.POINTER),
                kind,
                lib.U64(d),
                lib.U64(k),
                indices.ctypes.data_as(lib.POINTER),
            )
            assert code == 0
            assert (indices == find_largest(p, k)[0]).all()
    p[7] = np.nan
    arguments = (
        p.ctypes.data_as(lib.POINTER),
        kind,
        lib.U64(d),
        lib.U64(k),
        indices.ctypes.data_as(lib.POINTER),
    )
    assert lib.library().cfedavg_find_largest(*arguments) == 3


def test_keys_and_draws() -> None:
    for seed, t, client, purpose in ((0, 0, 0, 0), (2**64 - 1, 7, 2**40, 3), (12, 10**6, 5, 10)):
        word = keys.key(seed, t, client, keys.Purpose(purpose))
        arguments = [lib.U64(each) for each in (seed, t, client, purpose)]
        assert lib.library().cfedavg_key(*arguments) == keys.signed(word)
        draw = int(lib.library().cfedavg_bits53(lib.I64(keys.signed(word)), lib.U64(77)))
        assert draw == int(keys.bits53(keys.signed(word), np.array([77]))[0])


def test_bf16_and_norms() -> None:
    x = np.random.default_rng(0).standard_normal(1003).astype(np.float32)
    x[:6] = [0, -0.0, 3.4e38, -3.4e38, 1e-40, 1.00390625]  # the last one is halfway between two bf16 numbers
    values = BF16().quantise(x, np.array([0, len(x)]), np.array([0]))
    found = [lib.library().cfedavg_to_bf16(c.c_float(each)) for each in x]
    assert (np.array(found, np.uint16).view(np.int16) == values.data).all()
    assert lib.library().cfedavg_norm2(x.ctypes.data_as(lib.POINTER), lib.U64(len(x))) == norm2(x)


@pytest.mark.parametrize(
    ("text", "top", "block"), [("int8(256)", 127, 256), ("int3(7)", 3, 7), ("int4(1)", 7, 1)]
)
def test_levels(text: str, top: int, block: int) -> None:
    x = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    x[:300] = 0
    x[300:600] *= np.float32(1e-44)  # the scale underflows to 0 or to the smallest number
    made = parse(text).compress(x, key=0).values
    levels, scales = np.empty(1000, np.int8), np.empty(blocks(1000, block), np.float32)
    pointers = [each.ctypes.data_as(lib.POINTER) for each in (x, levels, scales)]
    lib.library().cfedavg_to_levels(pointers[0], lib.U64(1000), block, top, *pointers[1:])
    assert isinstance(made, Levels)
    assert levels.tobytes() == made.levels.tobytes()
    assert scales.tobytes() == made.scales.tobytes()


def test_values_of_a_payload() -> None:
    rng = np.random.default_rng(8)
    for _ in range(30):
        payload = draw_payload(rng, Layout.flat(200))
        made, _arrays = lib.to_c(payload)
        found = [lib.library().cfedavg_value(c.byref(made), lib.U64(i)) for i in range(made.k)]
        assert np.array(found, np.float32).tobytes() == values_of(payload).astype(np.float32).tobytes()
