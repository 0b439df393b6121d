"""The encoding: lossless for every selector >> quantiser, as short as promised, without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg import Layout, decode, encode, parse
from cfedavg.compress import EXAMPLES
from cfedavg.core import keys
from cfedavg.core.keys import draw_coordinates, draw_into
from cfedavg.core.payload import Floats, Levels, Payload
from cfedavg.models import cnn
from cfedavg.wire import measure, read_header
from cfedavg.wire.chunks import find_chunk
from cfedavg.wire.frame import (
    Coding,
    Kind,
    Where,
    entropy_bound,
    header_rows,
    section_rows,
    tensor_rows,
)  # fmt: skip
from tests.core.test_payload import assert_same

FLAT = Layout.flat(2000)
NET = Layout(("a", "b", "c", "d"), ((10, 6, 3, 3), (10,), (30, 47), (50,)), ("float32",) * 4)
SELECTORS = ("none", "topk(0.9)", "topk(0.9, per_tensor=true)", "topk(snr=2)", "rd(0.9)", "threshold(0.9)",
             "proportional(0.9)")  # fmt: skip
QUANTISERS = ("fp32", "bf16", "int8(256)", "int2(7)", "sign", "qsgd(16)", "qsgd(500)")
RECORDED = Path(__file__).parents[2] / "results" / "wire"


def block(text: str, layout: Layout, dtype: torch.dtype = torch.float32) -> Payload:
    """What four clients send: of noise, of nothing, of an outer product, of numbers of all sizes."""
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(4, layout.d, generator=generator).to(dtype)
    p[1] = 0
    p[2] *= torch.linspace(-9, 2, layout.d).exp()
    p[3] = p[3] ** 21
    return parse(text).compress(p, torch.tensor([5, -6, 7, 2**62]), layout).numpy()


@pytest.mark.parametrize("layout", [FLAT, NET], ids=["flat", "net"])
@pytest.mark.parametrize("text", [*EXAMPLES, *(f"{s} >> {q}" for s, q in product(SELECTORS, QUANTISERS))])
def test_lossless(text: str, layout: Layout) -> None:
    whole = block(text, layout)
    lengths = []
    for payload in whole.clients():
        message = encode(payload, layout)
        assert_same(decode(message, layout=layout), payload)
        lengths.append(len(message))
    assert measure(whole, layout) == lengths


@pytest.mark.parametrize("text", ["none", "topk(0.9)", "rd(0.9)"])
def test_lossless_in_float64(text: str) -> None:
    for payload in block(text, NET, torch.float64).clients():
        assert_same(decode(encode(payload, NET), layout=NET), payload)


@st.composite
def sets(draw: st.DrawFn) -> tuple[Layout, np.ndarray]:
    """A layout of any shapes, and indices that crowd or do not."""
    shapes = draw(st.lists(st.lists(st.integers(0, 12), max_size=4).map(tuple), min_size=1, max_size=5))
    layout = Layout(tuple(map(str, range(len(shapes)))), tuple(shapes), ("float32",) * len(shapes))
    chance = draw(st.sampled_from([0.01, 0.2, 0.5, 0.99]))
    run = draw(st.integers(1, 40))
    draws = np.random.default_rng(draw(st.integers(0, 2**32)))
    kept = np.repeat(draws.random(layout.d // run + 1) < chance, run)[: layout.d]
    return layout, np.flatnonzero(kept)


@pytest.mark.parametrize("moved", [0, 1, 3])
def test_coordinates_that_are_nearly_in_chunks(moved: int) -> None:
    """Ten in each of 31 chunks, the last of which has 30 coordinates; then some in the chunk before."""
    layout = Layout(("a", "b"), ((60, 30), (150,)), ("float32",) * 2)
    indices = np.flatnonzero(np.arange(layout.d) % 64 < 10)
    indices[-moved or len(indices) :] = np.arange(1900, 1900 + moved)
    indices = np.sort(indices)
    assert find_chunk(indices, layout.d) == (None if moved else (6, 10))
    ones = Floats(np.ones(len(indices), np.float32), "fp32")
    payload = Payload(layout.d, np.array([0, len(indices)]), indices, ones)
    message = encode(payload, layout)
    assert read_header(message).where is (Where.LISTED if moved else Where.CHUNKED)
    assert_same(decode(message, layout=layout), payload)


def test_levels_of_the_default_are_few() -> None:
    """Magnitudes that come in runs take less than their entropy, and signs of rows little."""
    rng, layout = np.random.default_rng(5), Layout(("w",), ((100, 40),), ("float32",))
    magnitudes = np.repeat(rng.integers(0, 2, 100), 40) + rng.integers(1, 3, layout.d)
    levels = (magnitudes * np.repeat(rng.choice([-1, 1], 100), 40)).astype(np.int8)
    entropy = -sum(share * np.log2(share) for share in np.bincount(magnitudes)[1:] / layout.d)
    sent = Levels(levels, np.ones(1, np.float32), 0, 3)
    message = encode(Payload(layout.d, np.array([0, layout.d]), None, sent), layout)
    header, rows = read_header(message), dict(header_rows(read_header(message)))
    assert (header.version, header.kind) == (3, Kind.FEW)
    assert rows["values"] == "levels of 8 bits and few magnitudes, with scales, coded"
    assert 8 * header.value_bytes / layout.d < entropy


@pytest.mark.parametrize("d", [127, 128, 129, 191, 192, 4096, 5000])
def test_chunks_are_found(d: int) -> None:
    """The shortest chunk of which two fit, whatever the last one holds."""
    for n in (1, 5, 63):
        indices = np.flatnonzero(np.arange(d) % 64 < n)
        assert find_chunk(indices, d) == ((6, n) if d >= 128 else None)
        assert find_chunk(indices[1:], d) is None
    assert find_chunk(np.arange(d), d) is None
    assert find_chunk(np.empty(0, np.int64), d) is None


def test_chunks_of_top_k() -> None:
    """What `topk(chunk=, k=)` sends takes less than a random set of as many in each chunk."""
    compressor = parse("topk(chunk=128, k=9) >> int2(64)")
    layout = Layout(("w",), ((128, 64),), ("float32",))
    spread = np.outer(np.exp(np.sin(np.arange(128))), np.exp(np.cos(np.arange(64))))
    noise = np.random.default_rng(4).standard_normal(layout.d)
    payload = compressor.compress((spread.reshape(-1) * noise).astype(np.float32), 1, layout)
    message = encode(payload, layout)
    header, rows = read_header(message), dict(header_rows(read_header(message)))
    assert (header.version, header.where, header.kind) == (3, Where.CHUNKED, Kind.PER_LEVEL)
    assert 8 * header.index_bytes / header.k < entropy_bound(128, 9)
    assert rows["coordinates"].endswith("listed, as many in each chunk")
    assert rows["values"] == "levels of 8 bits, with a scale for each magnitude, coded"


@pytest.mark.parametrize(
    ("text", "words", "sent"),
    [
        ("lowrank(2) >> bf16", "factors of matrices", [128, 10, 154, 50]),
        ("eden(2)", "of the rotated vector", [540, 10, 1410, 50]),
    ],
)
def test_values_in_another_basis_are_explained(text: str, words: str, sent: list[int]) -> None:
    payload = next(block(text, NET).clients())
    message = encode(payload, NET)
    assert dict(header_rows(read_header(message)))["coordinates"].endswith(words)
    assert section_rows(message)[1][3] == "the basis"
    assert [row[0] for row in tensor_rows(payload, NET)] == list(NET.names)
    counts = [int(row[2].replace(",", "")) for row in tensor_rows(payload, NET)]
    assert counts == sent


@given(sets())
@settings(max_examples=150)
def test_any_set_of_any_layout(draw_coordinates: tuple[Layout, np.ndarray]) -> None:
    layout, indices = draw_coordinates
    values = Floats((np.arange(len(indices)) % 0x7F80).astype(np.int16), "bf16")  # 0x7F80 is infinite
    payload = Payload(layout.d, np.array([0, len(indices)]), indices, values)
    assert_same(decode(encode(payload, layout), layout=layout), payload)


def any_floats(dtype: str) -> st.SearchStrategy[np.ndarray]:
    """Finite floats of any size: zeros of both signs, subnormal numbers, or all close together."""
    width = 32 if dtype == "fp32" else 64
    number = st.one_of(
        st.floats(allow_nan=False, allow_infinity=False, width=width),
        st.sampled_from([0.0, -0.0, float(np.finfo(f"float{width}").smallest_subnormal)]),
        st.floats(0.5, 1, width=width),
    )
    return st.lists(number, max_size=40).map(lambda numbers: np.array(numbers, f"float{width}"))


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@given(st.data(), st.integers(1, 30))
@settings(max_examples=150)
def test_any_floats_of_all_coordinates(dtype: str, data: st.DataObject, copies: int) -> None:
    """Coded or plain, whichever is shorter: the same bits come back, and `measure` knows the length."""
    numbers = np.tile(data.draw(any_floats(dtype)), copies)
    d, layout = len(numbers), Layout.flat(len(numbers))
    payload = Payload(d, np.array([0, d]), None, Floats(numbers, dtype))
    message, plain = encode(payload, layout, code_floats=True), encode(payload, layout)
    assert_same(decode(message, layout=layout), payload)
    assert measure(payload, layout, code_floats=True) == [len(message)]
    header = read_header(message)
    assert len(message) < len(plain) if header.coding is Coding.CODED else message == plain
    assert header.version == 1 + header.coding


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize(
    ("numbers", "version"), [([], 1), ([0.0], 1), ([-0.0], 2), ([-1.5], 1), ([2.0] * 9, 2)]
)
def test_few_floats_of_all_coordinates(dtype: str, numbers: list[float], version: int) -> None:
    d = len(numbers)
    values = Floats(np.array(numbers, {"fp32": "float32", "fp64": "float64"}[dtype]), dtype)
    payload, layout = Payload(d, np.array([0, d]), None, values), Layout.flat(d)
    message = encode(payload, layout, code_floats=True)
    assert read_header(message).version == version
    assert_same(decode(message, layout=layout), payload)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_random_bits_stay_plain(dtype: str) -> None:
    width = 32 if dtype == "fp32" else 64
    bits = np.random.default_rng(0).integers(0, 2**width, 5000, f"uint{width}")
    numbers = bits.view(f"float{width}")
    numbers = numbers[np.isfinite(numbers)]
    d = len(numbers)
    payload, layout = Payload(d, np.array([0, d]), None, Floats(numbers, dtype)), Layout.flat(d)
    assert encode(payload, layout, code_floats=True) == encode(payload, layout)


def test_weights_take_their_entropy() -> None:
    """A model as torch draws it: 26.1 of 32 bits a number, within 0.5% of the entropy of its upper bits."""
    torch.manual_seed(0)
    tensors = list(cnn((1, 28, 28), 10).parameters())
    x = torch.cat([tensor.detach().flatten() for tensor in tensors])
    layout = Layout(tuple(map(str, range(len(tensors)))), tuple(map(np.shape, tensors)), ("float32",) * 8)
    payload = parse("none").compress(x, key=0, layout=layout).numpy()
    message = encode(payload, layout, code_floats=True)
    assert_same(decode(message, layout=layout), payload)
    counts = np.unique(x.numpy().view(np.uint32) >> 16, return_counts=True)[1]
    entropy = 16 + np.log2(layout.d) - (counts * np.log2(counts)).sum() / layout.d
    assert 8 * len(message) / layout.d <= 1.005 * entropy
    assert len(message) <= 0.82 * len(encode(payload, layout))


def test_only_floats_of_all_coordinates_heed_code_floats() -> None:
    for text in ("bf16", "sign", "int8(256)", "topk(0.9)", "rd(0.9)"):
        for payload in block(text, NET).clients():
            assert encode(payload, NET, code_floats=True) == encode(payload, NET)


@pytest.mark.parametrize(
    "text", ["bf16", "sign", "qsgd(16)", "int8(256)", "topk(0.5) >> sign", "topk(0.5)", "none"]
)
@pytest.mark.parametrize("kind", ["negative", "zero tail", "minus zero"])
def test_many_values_that_cost_next_to_nothing(text: str, kind: str) -> None:
    """A decoder takes no more values than a stream of this length can hold: these are the cheapest."""
    layout = Layout.flat(300_000)
    p = -torch.ones(layout.d) if kind == "negative" else torch.full((layout.d,), -0.0)
    if kind == "zero tail":
        p[:20] = torch.arange(20) - 9.5
    payload = parse(text).compress(p, 3, layout).numpy()
    assert_same(decode(encode(payload, layout, code_floats=True), layout=layout), payload)


@pytest.mark.parametrize(("code_floats", "version", "words"), [(False, 1, "plain"), (True, 2, "coded")])
def test_floats_of_all_coordinates_are_explained(code_floats: bool, version: int, words: str) -> None:
    message = encode(next(block("none", NET).clients()), NET, code_floats=code_floats)
    rows, header = dict(header_rows(read_header(message))), read_header(message)
    assert rows["version"] == f"{version}"
    assert rows["values"] == f"32-bit floats, {words}"
    assert rows["coordinates"] == f"k = {NET.d:,} (100.000%), all coordinates"
    sizes = {name: size for name, size, *_ in section_rows(message)}
    assert sizes["values, coded"] == f"{header.value_bytes:,}"
    assert sizes["values, copied"] == f"{(2 if code_floats else 4) * NET.d:,}"


def test_a_header_says_who_sends_what() -> None:
    payload = next(block("topk(0.9) >> bf16", NET).clients())
    header = read_header(encode(payload, NET, client=2**64 - 1, sequence=5, round=7))
    assert (header.client, header.sequence, header.round) == (2**64 - 1, 5, 7)
    assert (header.d, header.k, header.schema) == (NET.d, payload.counts()[0], NET.schema_hash)


@pytest.mark.parametrize("key", [0, -1, 1234567890123456789, -(2**63)])
def test_the_mask_is_that_of_the_keys(key: int) -> None:
    """The compiled draw and `bits53` give the same coordinates."""
    for keep in (0, 1, 2**53 // 7, 2**53 - 1, 2**53):
        expected = np.flatnonzero(keys.bits53(key, np.arange(5000)) < keep)
        indices = np.empty(5000, np.int64)
        assert draw_into(key, keep, 5000, indices) == len(expected)
        np.testing.assert_array_equal(indices[: len(expected)], expected)
        np.testing.assert_array_equal(draw_coordinates(key, keep, 5000), expected)


def test_a_mask_that_is_larger_than_expected() -> None:
    """Both of two coordinates are drawn at 1% once in 10,000 keys: more than the room foreseen."""
    keep = 2**53 // 100
    lucky = [key for key in range(20_000) if all(keys.bits53(key, np.arange(2)) < keep)]
    assert lucky
    assert [draw_coordinates(key, keep, 2).tolist() for key in lucky] == [[0, 1]] * len(lucky)


def test_random_dropping_sends_no_indices() -> None:
    for payload in block("rd(0.9)", NET).clients():
        assert read_header(encode(payload, NET)).index_bytes == 16


@pytest.mark.parametrize(
    "layout", [Layout.flat(582_026), Layout.flat(5000), NET], ids=["wide", "short", "net"]
)
@pytest.mark.parametrize("k", [500, 1000, 1900])
def test_uniform_sets_cost_their_entropy(layout: Layout, k: int) -> None:
    """At most 1.01 of the bound, and 2 bytes: a bit to say how, the end of the stream, whole bytes."""
    bound = k * entropy_bound(layout.d, k)
    for seed in range(5):
        indices = np.sort(np.random.default_rng(seed).choice(layout.d, k, replace=False))
        payload = Payload(layout.d, np.array([0, k]), indices, Floats(np.zeros(k, np.int16), "bf16"))
        assert 8 * read_header(encode(payload, layout)).index_bytes <= 1.01 * bound + 16


@pytest.mark.parametrize(("run", "share", "length"), [("cnn-steps", 0.75, 9000), ("cnn-epochs", 0.80, 9000)])
def test_sets_of_error_feedback_cost_less(run: str, share: float, length: int) -> None:
    """Messages that real runs have sent: the same bytes again, below the entropy of uniform sets."""
    layout = Layout.from_text((RECORDED / run / "layout.json").read_text())
    messages = [file.read_bytes() for file in sorted((RECORDED / run).glob("*.cfa"))]
    bits = []
    for message in messages:
        header = read_header(message)
        payload = decode(message, layout=layout)
        sender = {"client": header.client, "sequence": header.sequence, "round": header.round}
        assert encode(payload, layout, **sender) == message
        bits.append(8 * header.index_bytes / header.k / entropy_bound(header.d, header.k))
    assert len(messages) == 25
    assert np.mean(bits) <= share
    assert np.mean([len(message) for message in messages]) <= length


def test_chunks_of_a_transformer() -> None:
    """A client of a small GPT sends 2-bit values in rounds 2, 5 and 10: at most 8.7 bits each."""
    layout = Layout.from_text((RECORDED / "gpt" / "layout.json").read_text())
    files = sorted((RECORDED / "gpt").glob("*.cfa"))
    assert len(files) == 3
    for file in files:
        message = file.read_bytes()
        header, payload = read_header(message), decode(message, layout=layout)
        assert encode(payload, layout, round=header.round) == message
        assert (header.where, header.kind) == (Where.CHUNKED, Kind.PER_LEVEL)
        assert 8 * len(message) / header.k <= 8.7
        assert 8 * header.index_bytes / header.k < 0.96 * entropy_bound(4096, 64)


def test_threads_do_not_disturb_each_other() -> None:
    """The coders run without the interpreter's lock."""
    clients = list(block("topk(0.9) >> bf16", NET).clients()) * 20
    alone = [encode(payload, NET) for payload in clients]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda payload: encode(payload, NET), clients)) == alone


def test_needs_no_torch() -> None:
    """Importing, encoding and decoding need no torch."""
    code = (
        "import sys; from tests.golden_cases import cases, message; from cfedavg.wire import decode\n"
        "name, layout, payload = next(iter(cases())); decode(message(payload, layout), layout=layout)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CODE_ALL = """
from cfedavg.wire import chunks, coder, coordinates, decode, encode, format, indices, levels, sets, values
from tests.golden_cases import cases, version_3_cases, whole_float_cases

for _, layout, payload in (*cases(), *whole_float_cases(), *version_3_cases()):
    for code_floats in (False, True):
        decode(encode(payload, layout, code_floats=code_floats), layout=layout)
for module in (chunks, coder, coordinates, format, indices, levels, sets, values):
    for name, each in vars(module).items():
        assert not getattr(getattr(each, "stats", None), "cache_misses", {}), f"{name} was compiled anew"
"""


@pytest.mark.slow
def test_coders_compiled_beforehand_are_not_compiled_again(tmp_path: Path) -> None:
    environment = os.environ | {"CFEDAVG_KERNELS": "numba", "NUMBA_CACHE_DIR": str(tmp_path)}
    for code in ("from cfedavg.wire import compile_coders; compile_coders()", CODE_ALL):
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
