"""`lowrank` beside the hook of PyTorch's DistributedDataParallel, which runs in a process of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench.peers.coders.lowrank import run_hook, run_ours

from cfedavg import Layout, decompress, parse

LAYOUT = Layout(("a", "bias", "b"), ((20, 12), (7,), (6, 2, 5, 5)), ("float32",) * 3)


@pytest.mark.parametrize("rank", [1, 3])
def test_lowrank_is_the_hook_with_the_same_start(rank: int) -> None:
    """They differ by the rounding of P to bf16 alone, which moves at most 3 sqrt(r) / 128 of a matrix."""
    draws = np.random.default_rng(rank)
    vectors = torch.from_numpy(draws.standard_normal((4, LAYOUT.d)).astype(np.float32))
    found, _ = run_hook(LAYOUT, vectors[:, None], rank, "ours", feedback=False)
    for t, (p, theirs) in enumerate(zip(vectors, found, strict=True)):
        ours = decompress(parse(f"lowrank({rank})").compress(p, t, LAYOUT))[0]
        a, bias, b = LAYOUT.slices()
        assert torch.equal(ours[bias], theirs[bias])
        for part in (a, b):
            assert (ours[part] - theirs[part]).norm() <= 3 * rank**0.5 / 128 * p[part].norm()
            assert 0 < theirs[part].norm() < p[part].norm()


def test_both_send_an_outer_product_whole_and_keep_no_residual() -> None:
    """M = u v^T with u = (1, 1, 1, 1): P is 1/2 everywhere, a bf16 number, and Q = 2 v."""
    layout, v = Layout(("w",), ((4, 6),), ("float32",)), torch.tensor([1.0, -2.0, 4.0, 0.5, 8.0, -0.25])
    updates = torch.stack([v.repeat(4), 2 * v.repeat(4)])[:, None]
    hook, _ = run_hook(layout, updates, 1, "ours")
    ours, *_ = run_ours(layout, updates, "lowrank(1)")
    assert torch.equal(ours, updates[:, 0])
    torch.testing.assert_close(hook, updates[:, 0], rtol=1e-6, atol=0)
