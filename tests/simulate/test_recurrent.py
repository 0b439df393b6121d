"""The kernels of recurrent layers against the loops that are their oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cfedavg.simulate.vectorised.recurrent import CELLS, recur, recur_grad

SIZES = [(1, 1, 1, 1), (3, 2, 5, 20), (4, 3, 70, 100), (5, 2, 16, 64)]  # T, m, B, H


def draw(cell: str, T: int, m: int, B: int, H: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the arguments of `recur`, and the gradients by h of all time steps and by the last c."""
    generator = torch.Generator().manual_seed(0)
    wide, state = CELLS[cell].gates * H, H if cell == "lstm" else 0
    sizes = [(T, m, B, wide), (m, wide, H), (m, wide), (m, B, H), (m, B, state), (T, m, B, H), (m, B, state)]
    *given, dy, dc = (torch.randn(size, generator=generator, dtype=torch.double) for size in sizes)
    given[1] /= H**0.5  # larger weights amplify each rounding from step to step
    return given, dy, dc


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("precision", ["bf16", "tf32", "float32"])
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels(cell: str, precision: str, sizes: tuple[int, int, int, int]) -> None:
    """The kernels against float64 on the CPU; the tolerance is a few roundings of the products' operands.

    The gradients are those at the states that the loop in float64 has found, so that errors of the forward
    pass do not add up in them.
    """
    how, tolerance = {"bf16": ("ieee", 2e-2), "tf32": ("tf32", 4e-3), "float32": ("tf32x3", 1e-5)}[precision]
    given, dy, dc = draw(cell, *sizes)
    hs, cs, saved = recur(*given, cell, "ieee")
    grads = recur_grad(dy, dc, given[1], saved, given[4], cs, cell, "ieee")
    near = [each.float().cuda() for each in (*given, dy, dc, saved, cs)]
    x, weight, bias, h, c, dy, dc, kept, states = near
    if precision == "bf16":
        weight = weight.bfloat16()
    found = recur(x, weight, bias, h, c, cell, how)
    found += recur_grad(dy, dc, weight, kept, c, states, cell, how)
    for mine, exact in zip(found, (hs, cs, saved, *grads), strict=True):
        assert mine.shape == exact.shape
        assert (mine.cpu().double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS)
def test_kernels_keep_nan(cell: str) -> None:
    """A client that diverges is found by its loss."""
    given, *_ = draw(cell, 3, 2, 5, 20)
    x, *others = (each.float().cuda() for each in given)
    x[0, 1] = torch.nan
    h, *_ = recur(x, *others, cell, "tf32x3")
    assert h[:, 0].isfinite().all()
    assert h[:, 1].isnan().all()
