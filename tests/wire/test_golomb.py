"""STC's Golomb code of positions (bench/peers/coders/formulas.py), with which our messages are compared."""

from __future__ import annotations

import numpy as np
import pytest
from bench.peers.coders.formulas import (
    count_grace,
    count_stc,
    decode_golomb,
    encode_golomb,
    golomb_parameter,
    measure_stc,
)
from hypothesis import given
from hypothesis import strategies as st


@given(
    st.integers(1, 300).flatmap(lambda d: st.tuples(st.just(d), st.sets(st.integers(0, d - 1), min_size=1)))
)
def test_positions_come_back(given: tuple[int, set[int]]) -> None:
    d, chosen = given
    indices = np.array(sorted(chosen))
    bits = encode_golomb(indices, d)
    assert decode_golomb(bits, d, len(indices)).tolist() == indices.tolist()
    assert measure_stc(indices, d) == -(-(len(bits) + len(indices) + 32) // 8)


def test_a_code_word_by_hand() -> None:
    """1 of 10: b = 3. The distance less 1 is 8, the first index: 8 = 1 * 2^3 + 0, so 1, 0 and 000."""
    assert golomb_parameter(10, 1) == 3
    assert encode_golomb(np.array([8]), 10).tolist() == [1, 0, 0, 0, 0]
    assert encode_golomb(np.array([5]), 10).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(("d", "k"), [(50_000, 50), (50_000, 500), (20_000, 6000)])
def test_the_formula_expects_what_random_sets_take(d: int, k: int) -> None:
    draws = np.random.default_rng(k)
    sizes = [measure_stc(np.sort(draws.choice(d, k, replace=False)), d) for _ in range(20)]
    assert np.mean(sizes) == pytest.approx(count_stc(d, k), rel=0.02)


def test_grace_sends_12_bytes_a_coordinate() -> None:
    indices, values = np.zeros(7, np.int64), np.zeros(7, np.float32)
    assert count_grace(7) == indices.nbytes + values.nbytes
