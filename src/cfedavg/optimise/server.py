"""Server optimisers: line 19 of Algorithm 1, x_next = x + eta * delta, and the steps of FedOpt in its place.

Each takes the mean update delta for a gradient, with the opposite sign (Reddi et al., 2021). Its state is a
table of vectors as long as x; it goes in and comes out. Arrays may be of NumPy or of torch.

What error feedback does under them: residuals only delay what is sent. Under every optimiser the sum of all
deltas and the mean residual is the sum of all updates. Under `sgd` x + eta * mean(e) therefore moves as if
nothing had been compressed. `momentum` and `nesterov` are linear too: each delta reaches x in full, later.
`adam`, `adagrad` and `yogi` divide by the size of delta, so a delta that comes later is divided by another
number; what is sent is still all that there was to send.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cfedavg.core.arrays import Array, module_of, sqrt
from cfedavg.core.errors import InputError
from cfedavg.core.parts import Part, Registry

State = Mapping[str, Array]


class ServerOptimiser(Part):
    """Makes the next model from the mean update. A new one needs `step`, and `init` if it has a state."""

    # Whether its steps are as long for a delta twice as large: then delta is scaled by the mean K first
    # where updates were divided by K.
    adapts: ClassVar[bool] = False

    rate: ClassVar[float] = 1.0  # eta for updates that were not divided by K, where nobody gives one

    def default_rate(self, K: float) -> float:
        """Return eta where nobody gives one; K is what the clients' updates were divided by."""
        return self.rate if self.adapts else self.rate * K

    def scale(self, K: float) -> float:
        """Return what delta is multiplied by first: an adaptive step does not heed its size, but tau does."""
        return K if self.adapts else 1.0

    def init(self, x: Array) -> State:
        """Return the state before the first round: vectors like x."""
        return {}

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        """Return x_next and the next state, in round t."""
        raise NotImplementedError


@dataclass(frozen=True)
class ServerSGD(ServerOptimiser):
    """x + eta * delta: FedAvg, and the paper's line 19."""

    name: ClassVar[str] = "sgd"

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        return x + rate * delta, state


@dataclass(frozen=True)
class ServerMomentum(ServerOptimiser):
    """FedAvgM: v = beta v + delta, x + eta v.

    >>> import numpy as np
    >>> x, v = ServerMomentum(0.5).step(np.zeros(1), np.ones(1), {"v": np.ones(1)}, 1.0, t=0)
    >>> x.tolist(), v["v"].tolist()
    ([1.5], [1.5])
    """

    name: ClassVar[str] = "momentum"
    beta: float = 0.9

    def __post_init__(self) -> None:
        check_share("beta", self.beta)

    def init(self, x: Array) -> State:
        return {"v": 0 * x}

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        v = self.beta * state["v"] + delta
        return x + rate * v, {"v": v}


@dataclass(frozen=True)
class ServerNesterov(ServerMomentum):
    """The outer step of DiLoCo: v = beta v + delta, x + eta (delta + beta v)."""

    name: ClassVar[str] = "nesterov"

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        v = self.beta * state["v"] + delta
        return x + rate * (delta + self.beta * v), {"v": v}


@dataclass(frozen=True)
class _Adaptive(ServerOptimiser):
    """m = beta1 m + (1 - beta1) delta, x + eta m / (sqrt(v) + tau); they differ in v.

    tau decides from which size of delta on a step is adapted; below it, steps shrink with delta.
    """

    adapts: ClassVar[bool] = True
    rate: ClassVar[float] = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        check_share("beta1", self.beta1)
        check_share("beta2", self.beta2)
        if isinstance(self.tau, bool) or not (
            isinstance(self.tau, int | float) and 1e-30 <= self.tau <= 1e30
        ):
            raise InputError(f"tau must be from 1e-30 to 1e30, got {self.tau!r:.40}")

    def init(self, x: Array) -> State:
        return {"m": 0 * x, "v": 0 * x}

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        m = self.beta1 * state["m"] + (1 - self.beta1) * delta
        v = self._v(state["v"], delta)
        ahead = m / (sqrt(v) + self.tau)
        return x + self._corrected(rate, t) * ahead, {"m": m, "v": v}

    def _v(self, v: Array, delta: Array) -> Array:
        raise NotImplementedError

    def _corrected(self, rate: float, t: int) -> float:
        """The rate in round t."""
        return rate


@dataclass(frozen=True)
class ServerAdam(_Adaptive):
    """FedAdam: v = beta2 v + (1 - beta2) delta^2; the rate makes up for m and v that start at zero.

    The correction is Kingma and Ba's with t + 2 in the place of their t, as in Flower's FedAdam, so that the
    two go through the same models.
    """

    name: ClassVar[str] = "adam"

    def _v(self, v: Array, delta: Array) -> Array:
        return self.beta2 * v + (1 - self.beta2) * (delta * delta)

    def _corrected(self, rate: float, t: int) -> float:
        return rate * math.sqrt(1 - self.beta2 ** (t + 2)) / (1 - self.beta1 ** (t + 2))


@dataclass(frozen=True)
class ServerYogi(_Adaptive):
    """FedYogi: v moves towards delta^2 by (1 - beta2) delta^2, so it falls more slowly than Adam's."""

    name: ClassVar[str] = "yogi"

    def _v(self, v: Array, delta: Array) -> Array:
        square = delta * delta
        return v - (1 - self.beta2) * square * module_of(v).sign(v - square)


@dataclass(frozen=True)
class ServerAdagrad(_Adaptive):
    """FedAdagrad: v = v + delta^2, so steps only get shorter; beta1 is 0 unless given."""

    name: ClassVar[str] = "adagrad"
    beta1: float = 0.0

    def _v(self, v: Array, delta: Array) -> Array:
        return v + delta * delta


def check_share(name: str, value: object) -> None:
    """Refuse a number that is not in [0, 1)."""
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 <= value < 1):
        raise InputError(f"{name} must be from 0 to below 1, got {value!r}")


SERVER_OPTIMISERS: Registry[ServerOptimiser] = Registry(
    "server_optimiser",
    ServerOptimiser,
    {
        each.name: each
        for each in (ServerSGD, ServerMomentum, ServerNesterov, ServerAdam, ServerYogi, ServerAdagrad)
    },
)
