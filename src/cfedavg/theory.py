"""The quantities of the paper's theorems: h, the conditions on the learning rates, and the bounds.

gamma is the SNR of the compressor (Definition 1). alpha = mean|g_i|^2 / |mean g_i|^2 measures how much the
clients' updates differ. h is a bound on |residual|^2 / |update|^2 (Lemma 1). L, sigma_L and sigma_G are the
constants of Assumptions 1 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Condition", "Problem", "descent", "h", "rate_conditions", "theorem1", "theorem2", "theorem3",
]  # fmt: skip


def h(gamma: float, alpha: float) -> float:
    """Return the factor h of Lemma 1, alpha / (sqrt(gamma) - 1)^2, for the best epsilon, 1/sqrt(gamma).

    >>> h(4.0, 1.0), h(math.inf, 3.0), h(1.0, 1.0)
    (1.0, 0.0, inf)
    """
    if gamma <= 1:
        return math.inf
    return alpha / (math.sqrt(gamma) - 1) ** 2


@dataclass(frozen=True)
class Condition:
    """One condition on the learning rates: value <= limit, or value < limit if `strict`."""

    text: str
    value: float
    limit: float
    strict: bool = False

    @property
    def holds(self) -> bool:
        """Whether the condition holds."""
        return self.value < self.limit if self.strict else self.value <= self.limit


def rate_conditions(
    eta_L: float, eta: float, K: float, L: float, gamma: float, alpha: float, update: str
) -> tuple[Condition, Condition, Condition]:
    """Return the three conditions on the rates: of Theorems 1 and 2 if `update` is "sum", else of Theorem 3.

    If `update` is "mean", K is the largest K_i.

    >>> [c.holds for c in rate_conditions(0.001, 1.0, 10, 1.0, gamma=4.0, alpha=1.0, update="sum")]
    [True, True, True]
    """
    steps = K if update == "sum" else 1.0
    noise = L * L * h(gamma, alpha) + 1 + L
    factor = "K*" if update == "sum" else ""
    return (
        Condition("eta_L <= 1/(8 L K)", eta_L, 1 / (8 * L * K)),
        Condition("eta*eta_L < 1/(K L)", eta * eta_L, 1 / (K * L), strict=True),
        Condition(f"eta*eta_L*{factor}(L^2 h + 1 + L) <= 1", eta * eta_L * steps * noise, 1.0),
    )


def descent(eta_L: float, L: float, mean_K2: float) -> float:
    """Return c of the theorems, 1/2 - 15 eta_L^2 L^2 mean(K_i^2); the theorems hold only if c > 0."""
    return 0.5 - 15 * (eta_L * L) ** 2 * mean_K2


@dataclass(frozen=True)
class Problem:
    """The constants in the bounds: gap = f(x_0) - min f, L, sigma_L^2, sigma_G^2, and m clients."""

    gap: float
    L: float
    sigma_L2: float
    sigma_G2: float
    m: int


def theorem1(problem: Problem, eta_L: float, eta: float, K: int, T: int, h_mean: float) -> float:
    """Return the bound on min_t E|grad f(x_t)|^2 for constant rates and equal K.

    `h_mean` is the mean of h over all rounds.
    """
    return _bound(problem, eta_L, (T * eta_L, T * eta_L**2, T * eta_L**3), eta, K, h_mean)


def theorem2(problem: Problem, eta_L: Sequence[float], eta: float, K: int, h_mean: float) -> float:
    """Return the bound on E|grad f(z)|^2 for local rates eta_L[t].

    z is the model of a random round; round t has a probability in proportion to eta_L[t].
    """
    powers = (sum(eta_L), sum(r**2 for r in eta_L), sum(r**3 for r in eta_L))
    return _bound(problem, max(eta_L), powers, eta, K, h_mean)


def _bound(
    problem: Problem, largest: float, powers: tuple[float, float, float], eta: float, K: int, h_mean: float
) -> float:
    """Return the bound of Theorems 1 and 2; `powers` are the sums over t of eta_L, eta_L^2 and eta_L^3."""
    L = problem.L
    c = descent(largest, L, K**2)
    if c <= 0:
        return math.inf
    local = (L**2 * h_mean + 1 + L) / 2 * eta / problem.m * problem.sigma_L2 * powers[1]
    drift = 5 * K * L**2 / 2 * (problem.sigma_L2 + 6 * K * problem.sigma_G2) * powers[2]
    return (problem.gap / (eta * K) + local + drift) / (c * powers[0])


def theorem3(problem: Problem, eta_L: float, eta: float, K: Sequence[int], T: int, h_mean: float) -> float:
    """Return the bound on min_t E|grad f(x_t)|^2 for constant rates; client i divides its update by K[i]."""
    L, m = problem.L, len(K)
    c = descent(eta_L, L, sum(k**2 for k in K) / m)
    if c <= 0:
        return math.inf
    local = (L**2 * h_mean + 1 + L) / 2 * eta * eta_L / m**2 * sum(1 / k for k in K) * problem.sigma_L2
    drift = 5 * (eta_L * L) ** 2 / 2 * sum(k * (problem.sigma_L2 + 6 * k * problem.sigma_G2) for k in K) / m
    return (problem.gap / (eta * eta_L * T) + local + drift) / c
