"""Messages added to a copy in machine code give the bits of the readable way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cfedavg.channel import Copies
from cfedavg.compress import parse
from cfedavg.core.layout import Layout
from cfedavg.federate import replica as replicas
from cfedavg.federate.replica import TOGETHER, ModelReplica
from cfedavg.wire import encode

D = 12
LAYOUT = Layout.flat(D)
floats = st.floats(-(2.0**120), 2.0**120, width=32)
vectors = st.lists(floats, min_size=D, max_size=D).map(lambda values: np.array(values, np.float32))
TEXTS = [
    "topk(0.5)",
    "topk(0.5) >> bf16",
    "topk(0.5) >> int3(4)",
    "rd(0.5) >> sign",
    "int8(5)",
    "topk(0) >> fp32",
]


@pytest.mark.parametrize("rounds_values", [False, True])
@pytest.mark.parametrize("text", TEXTS)
@settings(max_examples=60)
@given(vectors, vectors)
@example(np.full(D, 1e-40, np.float32), np.full(D, -1e-40 - 1e-45, np.float32))  # rounds to -0
@example(np.zeros(D, np.float32), np.full(D, -1e-45, np.float32))
def test_the_kernels_add_as_copies_do(text: str, rounds_values: bool, x: np.ndarray, p: np.ndarray) -> None:
    replica, copies = ModelReplica(LAYOUT, rounds_values), Copies(rounds_values)
    w, payload = copies.make(x), parse(text).compress(p, key=3, layout=LAYOUT)
    kept = replica.keep(w)
    before = kept.copy()
    found = replica.apply(kept, [encode(payload, LAYOUT)])
    assert found.tobytes() == replica.keep(copies.receive(w, payload)).tobytes()
    assert kept.tobytes() == before.tobytes()
    twice = replica.apply(kept, [encode(payload, LAYOUT)] * 2)
    again = copies.receive(copies.receive(w, payload), payload)
    assert twice.tobytes() == replica.keep(again).tobytes()


@pytest.mark.parametrize("rounds_values", [False, True])
def test_a_chain_is_added_tile_by_tile(monkeypatch: pytest.MonkeyPatch, rounds_values: bool) -> None:
    """Tiles that end inside blocks of a scale, and more messages than are decoded at once."""
    monkeypatch.setattr(replicas, "TILE", 7)
    rng, layout, copies = np.random.default_rng(5), Layout.flat(100), Copies(rounds_values)
    replica, texts = (
        ModelReplica(layout, rounds_values),
        ["topk(0.6) >> int3(16)", "int8(32)", "topk(0.9) >> bf16"],
    )
    payloads = [
        parse(texts[i % 3 if i < 6 else 0]).compress(rng.normal(size=100).astype(np.float32), i, layout)
        for i in range(TOGETHER + 5)
    ]
    w = expected = copies.make(rng.normal(size=100).astype(np.float32))
    for payload in payloads:
        expected = copies.receive(expected, payload)
    found = replica.apply(replica.keep(w), [encode(payload, layout) for payload in payloads])
    assert found.tobytes() == replica.keep(expected).tobytes()
