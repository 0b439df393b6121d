"""The quantities of the paper's theorems: h, the conditions on the learning rates, and the bounds.

gamma is the SNR of the compressor (Definition 1). alpha = mean|g_i|^2 / |mean g_i|^2 measures how much the
updates g_i of the clients differ. h is a bound on |residual|^2 / |update|^2 (Lemma 1). The constants of
Assumptions 1 to 3 are L, the smoothness of the loss f; sigma_L^2, a bound on the variance of a client's
stochastic gradient; and sigma_G^2, a bound on |grad f_i - grad f|^2, where f_i is the loss of client i.
eta_L is the local rate, eta the server's rate, and K_i the number of local steps of client i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Condition", "Problem", "descent", "h", "rate_conditions", "theorem1", "theorem2", "theorem3",
]  # fmt: skip


def h(gamma: float, alpha: float) -> float:
    """Return h = alpha / (sqrt(gamma) - 1)^2, Lemma 1's bound on |residual|^2 / |update|^2.

    gamma is the SNR of the compressor; alpha measures how much the clients' updates differ. The lemma has a
    free constant epsilon, which here has its best value, 1/sqrt(gamma).

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

    K is the number of local steps; if `update` is "mean", it is the largest number of any client.

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
    """Return c = 1/2 - 15 eta_L^2 L^2 mean_K2, which must be above 0 for the theorems to hold.

    eta_L is the local rate, L the smoothness constant. `mean_K2` is the mean of K_i^2 over the clients.
    """
    return 0.5 - 15 * (eta_L * L) ** 2 * mean_K2


@dataclass(frozen=True)
class Problem:
    """The constants of a learning problem that are in the theorems' bounds."""

    gap: float  # f(x_0) - min f, for the loss f and the first model x_0
    L: float  # the smoothness constant
    sigma_L2: float  # a bound on the variance of a client's stochastic gradient
    sigma_G2: float  # a bound on |grad f_i - grad f|^2, where f_i is the loss of client i
    m: int  # the number of clients


def theorem1(problem: Problem, eta_L: float, eta: float, K: int, T: int, h_mean: float) -> float:
    """Return Theorem 1's bound on min_t E|grad f(x_t)|^2 after T rounds with constant rates.

    Every client does K local steps. `h_mean` is the mean of `h` over all rounds.
    """
    return _bound(problem, eta_L, (T * eta_L, T * eta_L**2, T * eta_L**3), eta, K, h_mean)


def theorem2(problem: Problem, eta_L: Sequence[float], eta: float, K: int, h_mean: float) -> float:
    """Return Theorem 2's bound on E|grad f(z)|^2; the local rate of round t is eta_L[t].

    z is the model of a random round; the probability of round t is proportional to eta_L[t]. Every client
    does K local steps. `h_mean` is the mean of `h` over all rounds.
    """
    powers = (sum(eta_L), sum(r**2 for r in eta_L), sum(r**3 for r in eta_L))
    return _bound(problem, max(eta_L), powers, eta, K, h_mean)


def _bound(
    problem: Problem, largest: float, powers: tuple[float, float, float], eta: float, K: int, h_mean: float
) -> float:
    """Return the bound of Theorems 1 and 2; `largest` is the largest eta_L over all rounds.

    `powers` are the sums of eta_L, of eta_L^2 and of eta_L^3 over all rounds.
    """
    L = problem.L
    c = descent(largest, L, K**2)
    if c <= 0:
        return math.inf
    local = (L**2 * h_mean + 1 + L) / 2 * eta / problem.m * problem.sigma_L2 * powers[1]
    drift = 5 * K * L**2 / 2 * (problem.sigma_L2 + 6 * K * problem.sigma_G2) * powers[2]
    return (problem.gap / (eta * K) + local + drift) / (c * powers[0])


def theorem3(problem: Problem, eta_L: float, eta: float, K: Sequence[int], T: int, h_mean: float) -> float:
    """Return Theorem 3's bound on min_t E|grad f(x_t)|^2 after T rounds with constant rates.

    Client i does K[i] local steps and divides its update by K[i]. `h_mean` is the mean of `h` over rounds.
    """
    L, m = problem.L, len(K)
    c = descent(eta_L, L, sum(k**2 for k in K) / m)
    if c <= 0:
        return math.inf
    local = (L**2 * h_mean + 1 + L) / 2 * eta * eta_L / m**2 * sum(1 / k for k in K) * problem.sigma_L2
    drift = 5 * (eta_L * L) ** 2 / 2 * sum(k * (problem.sigma_L2 + 6 * k * problem.sigma_G2) for k in K) / m
    return (problem.gap / (eta * eta_L * T) + local + drift) / c
