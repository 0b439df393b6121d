"""The encoding: lossless, and refused with a WireError when it does not fit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from cfedavg import Layout, decode, encode, parse
from cfedavg.compress import EXAMPLES
from cfedavg.payload import Payload

LAYOUT = Layout.flat(600)


def payloads(text: str, dtype: torch.dtype = torch.float32) -> list[Payload]:
    generator = torch.Generator().manual_seed(1)
    p = torch.randn(3, 600, generator=generator).to(dtype)
    p[1] = 0  # a client with nothing to say
    block = parse(text).compress(p, torch.tensor([5, -6, 7]), LAYOUT)
    return [client.numpy() for client in block.clients()]


def assert_same(a: Payload, b: Payload) -> None:
    assert a.d == b.d
    assert a.counts() == b.counts()
    assert (a.indices is None) == (b.indices is None)
    if a.indices is not None:
        np.testing.assert_array_equal(a.indices, b.indices)
    assert (a.mask is None) == (b.mask is None)
    if a.mask is not None and b.mask is not None:
        assert (int(a.mask.keys[0]), a.mask.keep) == (int(b.mask.keys[0]), b.mask.keep)
    assert type(a.values) is type(b.values)
    for name, value in vars(a.values).items():
        other = getattr(b.values, name)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype
            assert value.tobytes() == other.tobytes()
        else:
            assert value == other


@pytest.mark.parametrize(
    "text", [*EXAMPLES, "rd(0.9) >> sign", "threshold(0.5) >> qsgd(500)", "rd(0.5) >> bf16"]
)
def test_lossless(text: str) -> None:
    for payload in payloads(text):
        assert_same(decode(encode(payload, LAYOUT), layout=LAYOUT), payload)


def test_lossless_in_float64() -> None:
    for payload in payloads("topk(0.9)", torch.float64):
        assert_same(decode(encode(payload, LAYOUT), layout=LAYOUT), payload)


def test_random_dropping_sends_no_indices() -> None:
    payload = payloads("rd(0.9)")[0]
    assert len(encode(payload, LAYOUT)) < 100 + 4 * payload.counts()[0]


def test_needs_no_torch() -> None:
    code = "import sys, cfedavg.wire; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
