"""Whole messages by the C library are those that Python puts together, section by section."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from bench import fuzz

from cfedavg import Layout, Payload, WireError, decode, encode, parse
from cfedavg.core.kernels import WAY
from cfedavg.core.payload import Floats, Levels
from cfedavg.wire import library
from cfedavg.wire.frame import CHECKSUM, SIZE
from tests.clients.test_messages import draw_layout, draw_payload
from tests.core.test_payload import assert_same
from tests.golden_cases import cases, version_3_cases

pytestmark = pytest.mark.skipif(WAY != "c", reason="kernels do not run by the C library here")
LAYOUT = Layout(("w", "b"), ((30, 20), (30,)), ("float32",) * 2)


def make(text: str = "topk(0.9) >> int3(8)", seed: int = 0) -> Payload:
    p = np.random.default_rng(seed).standard_normal(LAYOUT.d).astype(np.float32)
    return parse(text).compress(p, key=0, layout=LAYOUT)


def by_sections(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(library, "encode", lambda *args: None)
    patch.setattr(library, "decode", lambda *args: None)


def test_messages_have_the_bytes_of_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, payloads = np.random.default_rng(1), [case[1:] for case in (*cases(), *version_3_cases())]
    for _ in range(150):
        layout = draw_layout(rng)
        payloads.append((layout, draw_payload(rng, layout)))
    sender = {"client": 2**63 + 1, "sequence": 2**64 - 1, "round": 2**32 - 1}
    whole = [encode(payload, layout, **sender) for layout, payload in payloads]
    taken = [library.encode(payload, layout, library.Sender(1, 2, 3)) for layout, payload in payloads]
    assert sum(message is not None for message in taken) > 80
    found = [decode(data, layout=layout) for data, (layout, _) in zip(whole, payloads, strict=True)]
    by_sections(monkeypatch)
    for data, read, (layout, payload) in zip(whole, found, payloads, strict=True):
        assert encode(payload, layout, **sender) == data
        assert_same(read, payload)
        assert_same(decode(data, layout=layout), payload)


def test_the_sender_is_checked() -> None:
    data = encode(make(), LAYOUT, client=5, sequence=7, round=9)
    for sender in ({}, {"client": 5}, {"sequence": 7}, {"client": 5, "sequence": 7}):
        assert_same(decode(data, layout=LAYOUT, **sender), make())
    for wrong, words in (
        ({"client": 4}, "of client 5, not of client 4"),
        ({"client": 5, "sequence": 8}, "has sequence number 7, 8 was expected"),
        ({"kmax": 3}, "at most 3"),
        ({"kmax": 0}, "at most 0"),
        ({"max_bytes": 90}, "at most 90 bytes"),
        ({"max_bytes": 0}, "at most 0 bytes"),
        ({"client": 5, "sequence": 7, "max_bytes": 90.0}, "at most 90.0 bytes"),
    ):
        with pytest.raises(WireError, match=words):
            decode(data, layout=LAYOUT, **wrong)


@pytest.mark.parametrize("field", ["client", "sequence", "round"])
@pytest.mark.parametrize("number", [-1, 2**64, 1.5, "7"])
def test_numbers_that_do_not_fit_are_refused(field: str, number: Any) -> None:
    with pytest.raises(WireError, match=f"`{field}`"):
        encode(make(), LAYOUT, **{field: number})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (Floats(np.array([1, np.nan], np.float32), "fp32"), "a value is not"),
        (Levels(np.array([1, 9], np.int8), np.ones(1, np.float32), 0, 5), "a level exceeds"),
        (Levels(np.array([1, 2], np.int8), np.array([np.inf], np.float32), 0, 5), "a scale is not"),
        (Levels(np.array([1, 2], np.int8), np.ones(1, np.float32), 0, 65_541), "`top` must be"),
        (Levels(np.array([1, 2], np.int8), np.ones(1, np.float32), 2**32, 5), "`block` must be"),
    ],
)
def test_what_c_refuses_python_explains(values: Any, words: str) -> None:
    payload = Payload(LAYOUT.d, np.array([0, 2]), np.array([3, 600]), values)
    with pytest.raises(WireError, match=words):
        encode(payload, LAYOUT)


def test_arrays_of_another_form_are_copied() -> None:
    payload = make("topk(0.9) >> bf16")
    assert payload.indices is not None
    assert isinstance(payload.values, Floats)
    wide = np.repeat(payload.values.data, 2)
    strided = Payload(
        payload.d, payload.offsets, payload.indices.astype(np.uint32)[::1], Floats(wide[::2], "bf16")
    )
    assert encode(strided, LAYOUT) == encode(payload, LAYOUT)
    shifted = np.frombuffer(b"\0" + payload.indices.tobytes(), np.int64, offset=1)
    assert not shifted.flags.aligned
    unaligned = Payload(payload.d, payload.offsets, shifted, payload.values)
    assert encode(unaligned, LAYOUT) == encode(payload, LAYOUT)
    big = Payload(
        payload.d, payload.offsets, payload.indices.astype(">i8"), Floats(wide[::2].astype(">i2"), "bf16")
    )
    assert encode(big, LAYOUT) == encode(payload, LAYOUT)


def test_numbers_of_numpy() -> None:
    given = {"client": np.int64(5), "sequence": np.uint32(7), "round": np.int8(9)}
    assert encode(make(), LAYOUT, **given) == encode(make(), LAYOUT, client=5, sequence=7, round=9)  # type: ignore[arg-type]


def test_a_decoded_payload_owns_its_arrays() -> None:
    data = encode(make(), LAYOUT)
    first, second = decode(data, layout=LAYOUT), decode(memoryview(data), layout=LAYOUT)  # type: ignore[arg-type]
    assert first.indices is not None
    assert isinstance(first.values, Levels)
    for array in (first.indices, first.values.levels, first.values.scales):
        array[:] = 0
    assert_same(second, make())


@pytest.mark.parametrize("name", ["a\0b", "\ud800", ""])
def test_any_name_of_a_tensor(name: str) -> None:
    layout = Layout((name,), ((30,),), ("float32",))
    payload = parse("topk(0.9)").compress(np.arange(30, dtype=np.float32), key=0, layout=layout)
    data = encode(payload, layout)
    assert (library.make_layout(layout) is None) == (name != "")
    assert_same(decode(data, layout=layout), payload)
    with pytest.raises(WireError, match="another model"):
        decode(data, layout=Layout(("a",), ((30,),), ("float32",)))


def test_no_memory_is_kept() -> None:
    payload, kept = make("topk(0.1)"), []
    for _ in range(4):
        for _ in range(3000):
            decode(encode(payload, LAYOUT), layout=LAYOUT)
        for i in range(200):
            library.make_layout(Layout((f"w{i}",), ((2000,),), ("float32",)))
        gc.collect()
        kept.append(fuzz.resident())
    assert kept[-1] - kept[0] < 2**20


def test_threads_encode_at_once() -> None:
    payloads = [make(seed=seed) for seed in range(8)]
    expected = [encode(payload, LAYOUT) for payload in payloads]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda payload: encode(payload, LAYOUT), payloads * 50))
    assert found == expected * 50


def test_damaged_messages_are_refused() -> None:
    data = encode(make(), LAYOUT)
    for i in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :], layout=LAYOUT)
    for length in (0, 5, 6, SIZE, len(data) - CHECKSUM.size):
        with pytest.raises(WireError):
            decode(data[:length], layout=LAYOUT)
