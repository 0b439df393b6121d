"""alpha, h, rate conditions and bounds, against their definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfedavg.theory import Problem, descent, h, rate_conditions, theorem1, theorem2, theorem3

PROBLEM = Problem(gap=2.0, L=3.0, sigma_L2=0.5, sigma_G2=0.25, m=10)


@given(st.floats(1.001, 1e4), st.floats(1, 1e3), st.floats(0.01, 0.99))
def test_h_is_the_best_over_epsilon(gamma: float, alpha: float, epsilon: float) -> None:
    """Lemma 1 allows any epsilon with gamma * epsilon > 1; ours is the smallest factor of all."""
    if gamma * epsilon <= 1:
        return
    factor = (1 / gamma) * (1 + 1 / (gamma * epsilon - 1)) / (1 - epsilon) * alpha
    assert h(gamma, alpha) <= factor * (1 + 1e-9)


def test_h_is_reached_at_its_epsilon() -> None:
    gamma, alpha = 7.0, 3.0
    epsilon = 1 / math.sqrt(gamma)
    factor = (1 / gamma) * (1 + 1 / (gamma * epsilon - 1)) / (1 - epsilon) * alpha
    assert h(gamma, alpha) == pytest.approx(factor)


def test_bounded_error_lemma_on_a_run() -> None:
    """sum |e_t|^2 <= sum h |Delta_t|^2 with the measured gamma and alpha of the worst round."""
    from cfedavg import Config, run
    from tests.conftest import blobs

    rows = run(Config(rounds=12, local_steps="3", compressor="topk(0.7)"), blobs()).rows
    gamma = min(row["snr_min"] for row in rows)
    left = sum(row["error_norm2"] for row in rows)
    right = sum(h(gamma, row["alpha"]) * row["delta_norm2"] / row["alpha"] for row in rows)
    assert left <= right


def test_rate_conditions_of_line_10_and_11() -> None:
    by_sum = rate_conditions(0.01, 2.0, 5, 3.0, gamma=4.0, alpha=1.5, update="sum")
    assert [c.value for c in by_sum] == pytest.approx([0.01, 0.02, 0.02 * 5 * (9 * 1.5 + 1 + 3)])
    assert [c.limit for c in by_sum] == pytest.approx([1 / 120, 1 / 15, 1])
    assert [c.holds for c in by_sum] == [False, True, False]
    by_mean = rate_conditions(0.01, 2.0, 5, 3.0, gamma=4.0, alpha=1.5, update="mean")
    assert by_mean[2].value == pytest.approx(0.02 * (9 * 1.5 + 1 + 3))
    assert by_mean[1].strict
    assert not rate_conditions(0.1, 2.0, 5, 1.0, 4.0, 1.0, "sum")[
        1
    ].holds  # equal to the limit, which is strict


def test_only_the_second_condition_is_strict() -> None:
    """At their limits, the first and the third hold: 1/(8 L K) = 1/64, and K (L^2 h + 1 + L) / 64 = 1."""
    at_the_limit = rate_conditions(1 / 64, 1.0, 4, 2.0, gamma=4.0, alpha=3.25, update="sum")
    assert [c.value / c.limit for c in at_the_limit] == [1.0, 1 / 8, 1.0]
    assert [c.holds for c in at_the_limit] == [True, True, True]
    assert at_the_limit[2].text == "eta*eta_L*K*(L^2 h + 1 + L) <= 1"
    by_mean = rate_conditions(1 / 64, 1.0, 4, 2.0, gamma=4.0, alpha=3.25, update="mean")
    assert by_mean[2].text == "eta*eta_L*(L^2 h + 1 + L) <= 1"


def test_theorem_1_term_by_term() -> None:
    eta_L, eta, K, T, h_mean = 0.001, 2.0, 5, 100, 1.5
    c = 0.5 - 15 * (eta_L * 3 * K) ** 2
    phi = (9 * h_mean / 2 + 0.5 + 1.5) * eta * eta_L / 10 * 0.5
    phi += 5 * K * eta_L**2 * 9 / 2 * (0.5 + 6 * K * 0.25)
    expected = 2.0 / (c * eta * eta_L * K * T) + phi / c
    assert theorem1(PROBLEM, eta_L, eta, K, T, h_mean) == pytest.approx(expected)


def test_theorem_2_with_a_constant_rate_is_theorem_1() -> None:
    assert theorem2(PROBLEM, [0.001] * 50, 2.0, 5, 1.0) == pytest.approx(
        theorem1(PROBLEM, 0.001, 2.0, 5, 50, 1.0)
    )


def test_theorem_2_term_by_term() -> None:
    eta_L, eta, K, h_mean = [0.004, 0.002, 0.001], 2.0, 5, 1.5
    c, H = 0.5 - 15 * (0.004 * 3 * K) ** 2, 0.007
    phi = (9 * h_mean / 2 + 0.5 + 1.5) * eta / (10 * H) * 0.5 * (16 + 4 + 1) * 1e-6
    phi += 5 * K * 9 / (2 * H) * (0.5 + 6 * K * 0.25) * (64 + 8 + 1) * 1e-9
    expected = 2.0 / (c * eta * K * H) + phi / c
    assert theorem2(PROBLEM, eta_L, eta, K, h_mean) == pytest.approx(expected)


def test_theorem_3_term_by_term() -> None:
    eta_L, eta, K, T, h_mean = 0.001, 2.0, [1, 2, 4, 9] * 2 + [3, 3], 100, 1.5
    c = 0.5 - 15 * (eta_L * 3) ** 2 * (1 + 4 + 16 + 81 + 9) / 5
    phi = (9 * h_mean / 2 + 0.5 + 1.5) * eta * eta_L / 100 * 2 * (1 + 1 / 2 + 1 / 4 + 1 / 9 + 1 / 3) * 0.5
    phi += 5 * eta_L**2 * 9 / 2 * ((1 + 2 + 4 + 9 + 3) / 5 * 0.5 + 6 * (1 + 4 + 16 + 81 + 9) / 5 * 0.25)
    expected = 2.0 / (c * eta * eta_L * T) + phi / c
    assert theorem3(PROBLEM, eta_L, eta, K, T, h_mean) == pytest.approx(expected)


def test_theorem_3_with_equal_steps_is_theorem_1_with_eta_divided_by_K() -> None:
    """Line 11 with eta * K does what line 10 does with eta."""
    found = theorem3(PROBLEM, 0.001, 2.0 * 5, [5] * 10, 50, 1.0)
    assert found == pytest.approx(theorem1(PROBLEM, 0.001, 2.0, 5, 50, 1.0))


def test_bounds_are_infinite_where_the_descent_is_lost() -> None:
    assert descent(1.0, 1.0, 1) < 0
    assert theorem1(PROBLEM, 1.0, 1.0, 5, 10, 1.0) == math.inf
    assert theorem2(PROBLEM, [1.0, 1e-6], 1.0, 5, 1.0) == math.inf  # of the largest rate
    assert theorem3(PROBLEM, 1.0, 1.0, [5] * 10, 10, 1.0) == math.inf


def test_linear_speedup_of_corollary_1() -> None:
    """With the corollary's rates and T >> mK, four times the clients halve the bound."""

    def bound(m: int, K: int, T: int) -> float:
        problem = Problem(2.0, 3.0, 0.5, 0.25, m)
        return theorem1(problem, 1 / (math.sqrt(T) * K * 3.0), math.sqrt(K * m), K, T, 1.0)

    assert bound(4, 5, 10**10) / bound(16, 5, 10**10) == pytest.approx(2, rel=1e-2)
