"""Sums over channels, for the batch norms of a step: against torch's batch norm, and on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from cfedavg.simulate.vectorised import channel_sums, layers
from cfedavg.simulate.vectorised.channel_sums import channel_sums as sums_of
from cfedavg.simulate.vectorised.channel_sums import chunk_rows, count_chunks, moments


@given(st.integers(1, 200), st.integers(1, 10**6), st.integers(1, 600))
def test_chunks_cover_the_rows(m: int, R: int, C: int) -> None:
    chunks = count_chunks(m, R, C)
    length = chunk_rows(R, chunks)
    assert length % channel_sums.ROWS == 0
    assert (chunks - 1) * length < R <= chunks * length


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_many_clients(affine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are those of torch's batch norm of each client, computed in float64."""
    monkeypatch.setattr(layers, "_takes_kernels", lambda x: x.dim() > 2)
    monkeypatch.setattr(channel_sums, "ROWS", 8)
    monkeypatch.setattr(channel_sums, "PROGRAMS", 6)  # several chunks, the last one shorter
    generator = torch.Generator().manual_seed(0)
    m, N, C, H, W = 3, 5, 4, 6, 7
    x = 5 + 3 * torch.randn(m, N, H, W, C, generator=generator).permute(0, 1, 4, 2, 3)
    w, b = torch.randn(2, m, C, generator=generator)
    target = torch.randn(m, N, C, H, W, generator=generator)
    given = (x, w, b) if affine else (x,)

    def objective(norm: object, target: Tensor, x: Tensor, *affine: Tensor) -> Tensor:
        y = norm(x, None, None, *affine, training=True)  # type: ignore[operator]
        return (y * target).square().sum()

    places = tuple(range(1, 1 + len(given)))
    ours = vmap(grad_and_value(partial(objective, layers.batch_norm), places))
    torchs = grad_and_value(partial(objective, F.batch_norm), places)
    grads, values = ours(target, *given)
    for i in range(m):
        expected, value = torchs(*(each[i].double() for each in (target, *given)))
        torch.testing.assert_close(values[i].double(), value, rtol=1e-5, atol=0)
        for mine, theirs in zip(grads, expected, strict=True):
            assert (mine[i].double() - theirs).norm() <= 1e-5 * theirs.norm()


def test_squares_of_large_numbers_do_not_cancel() -> None:
    x = 1e4 + torch.randn(1, 5000, 3, generator=torch.Generator().manual_seed(0))
    variance, mean = (each.double() for each in channel_sums.variance_and_mean(x[0].T[None]))
    expected, center = torch.var_mean(x[0].double(), 0, correction=0)
    torch.testing.assert_close(variance, expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(mean, center, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(100, 4096, 64), (3, 1001, 10), (2, 77, 300), (1, 1, 1), (5, 20000, 128)])
def test_kernels_sum_as_a_cpu_does(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = ((3 + 2 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(2))
    mean = x.float().mean(1)
    pairs = [
        (moments(x.cuda()), moments(x)),
        (sums_of(dy.cuda(), x.cuda(), mean.cuda()), sums_of(dy, x, mean)),
    ]
    for found, expected in pairs:
        for mine, theirs in zip(found, expected, strict=True):
            # Sums of up to 4096 terms of about 10, in another order.
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-4, atol=0.05)
