"""Norms: what is summed up, and that rows, lists and single vectors come to the same."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cfedavg.tensors import norm2, norms2, rows_norms2

NUMBERS = st.floats(-(2.0**60), 2.0**60, width=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(st.lists(NUMBERS, max_size=40))
def test_norm_is_the_sum_of_squares(dtype: torch.dtype, numbers: list[float]) -> None:
    v = torch.tensor(numbers, dtype=dtype)
    exact = math.fsum(x * x for x in v.double().tolist())
    assert norm2(v) == pytest.approx(exact, rel=1e-14)


@given(st.integers(1, 4), st.integers(0, 30), st.integers(0, 99))
def test_rows_and_lists_have_the_norms_of_their_vectors(n: int, d: int, seed: int) -> None:
    """To the bit, so that engines agree; also where the numbers do not lie side by side."""
    block = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    alone = [norm2(row.clone()) for row in block]
    assert rows_norms2(block) == norms2(block) == alone
    assert rows_norms2(block.T.contiguous().T) == alone


def test_norms_of_nothing_of_parameters_and_of_what_is_not_finite() -> None:
    assert norms2([]) == []
    assert norm2(torch.full((9,), 2.0, requires_grad=True)) == 36.0
    assert norm2(torch.tensor([1.0, math.inf])) == math.inf
    assert math.isnan(norm2(torch.tensor([1.0, math.nan])))
    assert norm2(torch.full((2,), 3e38)) == pytest.approx(1.8e77, rel=1e-6)


def test_many_numbers_lose_no_digits_to_speak_of() -> None:
    v = torch.randn(200_003, generator=torch.Generator().manual_seed(0))
    assert norm2(v) == pytest.approx(math.fsum(x * x for x in v.double().tolist()), rel=1e-12)
