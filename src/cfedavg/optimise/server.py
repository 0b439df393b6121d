"""Server optimisers: line 19 of Algorithm 1, x_next = x + eta * delta, and the steps of FedOpt in its place.

x is the model and eta the server's rate. A server optimiser uses the mean update delta as a gradient with the
opposite sign (Reddi et al., 2021). Its state is a dict of vectors as long as x. Each step takes the state as
an argument and returns the next state. Arrays may be NumPy arrays or torch tensors.

Error feedback works with every server optimiser: a residual e only delays what a client sends. So the sum of
all deltas, plus the mean residual, is the sum of all mean updates. With `sgd`, x + eta * mean(e) therefore
moves as it would without compression. `momentum` and `nesterov` are linear too: what is delayed still reaches
x in full. `adam`, `adagrad` and `yogi` divide delta by its recent size: what is delayed is divided by another
size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from cfedavg.core.arrays import Array, module_of, sqrt
from cfedavg.core.parts import Part, Registry, argument

State = Mapping[str, Array]
share = partial(argument, "from 0 to below 1", lambda number: 0 <= number < 1)


class ServerOptimiser(Part):
    """The base class of server optimisers. A subclass must define `step`, and `init` if it has a state."""

    chosen_by: ClassVar[tuple[str, ...]] = ("server_optimiser",)
    # Whether the length of a step does not depend on the size of delta. If so, and if updates were divided
    # by K, delta is multiplied by the mean K before the step, so that delta keeps its size relative to tau.
    adapts: ClassVar[bool] = False
    rate: ClassVar[float] = 1.0  # the default eta for updates that were not divided by K

    def default_rate(self, K: float) -> float:
        """Return the default of eta, the server's rate, if clients divide their updates by K local steps."""
        return self.rate if self.adapts else self.rate * K

    def scale(self, K: float) -> float:
        """Return the factor of the mean update before the step, if clients divide updates by K steps."""
        return K if self.adapts else 1.0

    def init(self, x: Array) -> State:
        """Return the state before the first round: vectors of the length and dtype of x."""
        return {}

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        """Return the model after round t and the next state, given the model x and the mean update delta."""
        raise NotImplementedError


@dataclass(frozen=True)
class ServerSGD(ServerOptimiser):
    """FedAvg, and the paper's line 19: x = x + eta * delta."""

    name: ClassVar[str] = "sgd"

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        return x + rate * delta, state


@dataclass(frozen=True)
class Momentum(ServerOptimiser):
    """FedAvgM: v = beta v + delta, then x = x + eta v.

    >>> import numpy as np
    >>> x, v = Momentum(0.5).step(np.zeros(1), np.ones(1), {"v": np.ones(1)}, 1.0, t=0)
    >>> x.tolist(), v["v"].tolist()
    ([1.5], [1.5])
    """

    name: ClassVar[str] = "momentum"
    beta: float = share(0.9)

    def init(self, x: Array) -> State:
        return {"v": 0 * x}

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        v = self.beta * state["v"] + delta
        return x + rate * v, {"v": v}


@dataclass(frozen=True)
class Nesterov(Momentum):
    """The outer step of DiLoCo: v = beta v + delta, then x = x + eta (delta + beta v)."""

    name: ClassVar[str] = "nesterov"

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        v = self.beta * state["v"] + delta
        return x + rate * (delta + self.beta * v), {"v": v}


@dataclass(frozen=True)
class _Adaptive(ServerOptimiser):
    """m = beta1 m + (1 - beta1) delta, then x = x + eta m / (sqrt(v) + tau); subclasses differ in v.

    If delta is much larger than tau, the length of a step does not depend on the size of delta. If delta is
    smaller, the step shrinks with delta. `rate` is eta, unless the option `eta` is given.
    """

    adapts: ClassVar[bool] = True
    rate: float = argument(  # type: ignore[misc] # here an argument sets it
        "a finite number above 0", lambda rate: 0 < rate < math.inf, 0.01
    )
    beta1: float = share(0.9)
    beta2: float = share(0.99)
    tau: float = argument("from 1e-30 to 1e30", lambda tau: 1e-30 <= tau <= 1e30, 1e-3)

    def init(self, x: Array) -> State:
        return {"m": 0 * x, "v": 0 * x}

    def step(self, x: Array, delta: Array, state: State, rate: float, t: int) -> tuple[Array, State]:
        m = self.beta1 * state["m"] + (1 - self.beta1) * delta
        v = self._next_v(state["v"], delta)
        ahead = m / (sqrt(v) + self.tau)
        return x + self._correct(rate, t) * ahead, {"m": m, "v": v}

    def _next_v(self, v: Array, delta: Array) -> Array:
        raise NotImplementedError

    def _correct(self, rate: float, t: int) -> float:
        return rate


@dataclass(frozen=True)
class Adam(_Adaptive):
    """FedAdam: v = beta2 v + (1 - beta2) delta^2, with a bias correction, since m and v start at zero.

    The correction is that of Kingma and Ba, with t + 2 in the place of t, for rounds t that count from 0.
    Flower's FedAdam does the same, so it computes the same models.
    """

    name: ClassVar[str] = "adam"

    def _next_v(self, v: Array, delta: Array) -> Array:
        return self.beta2 * v + (1 - self.beta2) * (delta * delta)

    def _correct(self, rate: float, t: int) -> float:
        return rate * math.sqrt(1 - self.beta2 ** (t + 2)) / (1 - self.beta1 ** (t + 2))


@dataclass(frozen=True)
class Yogi(_Adaptive):
    """FedYogi: v moves towards delta^2 by (1 - beta2) delta^2, so v falls more slowly than in FedAdam."""

    name: ClassVar[str] = "yogi"

    def _next_v(self, v: Array, delta: Array) -> Array:
        square = delta * delta
        return v - (1 - self.beta2) * square * module_of(v).sign(v - square)


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """FedAdagrad: v = v + delta^2, so steps get shorter from round to round; beta1 is 0 by default."""

    name: ClassVar[str] = "adagrad"
    beta1: float = share(0.0)

    def _next_v(self, v: Array, delta: Array) -> Array:
        return v + delta * delta


_ALL = (ServerSGD, Momentum, Nesterov, Adam, Yogi, Adagrad)
SERVER_OPTIMISERS: Registry[ServerOptimiser] = Registry(
    "server_optimiser", ServerOptimiser, {each.name: each for each in _ALL}
)
