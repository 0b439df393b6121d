"""The radix select: exactly the k largest magnitudes, ties to the lowest index, NaN found on the way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cfedavg.compress.numerics import find_largest


def oracle(values: np.ndarray, k: int) -> np.ndarray:
    """Return the largest by sorting everything."""
    return np.sort(np.lexsort((np.arange(len(values)), -np.abs(values)))[:k])


@st.composite
def vectors(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    width = 8 * np.dtype(dtype).itemsize
    few = st.sampled_from(
        [0.0, -0.0, 1.0, -1.0, 2.0, float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)]
    )
    elements = draw(st.sampled_from([few, st.floats(width=width, allow_nan=False, allow_infinity=False)]))
    values = draw(hnp.arrays(dtype, draw(st.integers(1, 200)), elements=elements))
    return values, draw(st.integers(1, len(values)))


@given(vectors())
@settings(max_examples=200)
def test_any_vector(drawn: tuple[np.ndarray, int]) -> None:
    values, k = drawn
    indices, finite = find_largest(values, k)
    assert finite
    np.testing.assert_array_equal(indices, oracle(values, k))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", [5000, 100_003])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["normal", "rounded", "sparse", "zero", "sorted", "one block", "periodic"])
def test_large_vectors(dtype: type, d: int, share: float, kind: str) -> None:
    """Vectors for which a sample of a few lines misleads: then all entries are counted."""
    draws = np.random.default_rng(d)
    values = draws.standard_normal(d)
    if kind == "rounded":
        values = values.round()
    elif kind == "sparse":
        values[draws.random(d) > 0.001] = 0
    elif kind == "zero":
        values[:] = 0
    elif kind == "sorted":
        values.sort()
    elif kind == "one block":
        values[: d // 3] *= 1e3
    elif kind == "periodic":
        values[:: max(d // 256, 16)] *= 1e6  # just where the sample looks first
    values, k = values.astype(dtype), max(1, round(share * d))
    indices, finite = find_largest(values, k)
    assert finite
    np.testing.assert_array_equal(indices, oracle(values, k))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_finds_what_is_not_finite(bad: float, dtype: type) -> None:
    for d in (1, 15, 1000, 50_000):
        values = np.random.default_rng(d).standard_normal(d).astype(dtype)
        for k in {1, d // 100 or 1, d}:
            assert find_largest(values, k)[1]
            for place in {0, d // 2, d - 1}:
                wrong = values.copy()
                wrong[place] = bad
                assert not find_largest(wrong, k)[1]
