"""Local optimisers: a client's step p - eta_L * g (line 8 of Algorithm 1), and other steps in its place.

p are the client's parameters, g is the gradient, and eta_L is the local rate. A step is a pure function of
one client's tensors. The sequential and reference engines and the Flower app call the step for one client;
the batched engine maps it over many clients by `torch.func.vmap`. The state of an optimiser is a dict of
lists with one tensor for each parameter. The state lasts for one round.

    sgd(momentum=0.9)      clip(1.0) >> adamw(0.1)      prox(0.01) >> sgd      scaffold >> sgd

`clip`, `prox` and `scaffold` change gradients. Up to 7 such changes may stand before an optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from cfedavg.core.errors import InputError
from cfedavg.core.parts import Part, Registry, argument, check_truth, describe
from cfedavg.optimise.server import share

Tensors = Sequence[Tensor]
State = Mapping[str, list[Tensor]]
Stepped = tuple[list[Tensor], State]  # the next parameters and the next state
Rate = float | Tensor  # a tensor if the step is recorded (a CUDA graph) and replayed with other rates
LONGEST = 8  # the most parts of a chain
LARGEST = 1e30  # the largest argument, so that float32 holds it
_at_least_0 = partial(argument, "a finite number of 0 or more", lambda number: 0 <= number <= LARGEST)


class Fixed(NamedTuple):
    """What stays the same for a client in all steps of a round: lists with a tensor for each parameter.

    A list is empty if no part of the optimiser needs it.
    """

    start: list[Tensor]  # the parameters at the beginning of the round
    correction: list[Tensor]  # c - c_i, see `Scaffold`

    @classmethod
    def begin(cls, optimiser: LocalOptimiser, params: Tensors, correction: Tensors = ()) -> Fixed:
        """Return what `optimiser` needs in a round that begins with `params`; no correction means zeros."""
        start = [p.detach().clone() for p in params] if optimiser.needs_start else []
        if not optimiser.needs_correction:
            return cls(start, [])
        return cls(start, list(correction) or [torch.zeros_like(p) for p in params])

    def part(self, numbers: Sequence[int]) -> Fixed:
        """Return the tensors of the parameters with these numbers."""
        return Fixed(*([each[i] for i in numbers] if each else [] for each in self))


class LocalPart(Part):
    """The base class of local optimisers, and of the gradient changes that may stand before them."""

    chosen_by: ClassVar[tuple[str, ...]] = ("local_optimiser",)
    needs_start: ClassVar[bool] = False  # whether the part uses the parameters at the beginning of the round
    # Whether the part uses c - c_i; clients and server then keep control variates, see `cfedavg.control`.
    needs_correction: ClassVar[bool] = False

    def __rrshift__(self, before: object) -> NoReturn:  # of a text or a class
        raise _order_error(before, self)


def _order_error(first: object, second: object) -> InputError:
    """Return the error that `first >> second` is no local optimiser."""
    return InputError(
        "a local optimiser must be one optimiser, with changes of the gradient before it, as in "
        f"Clip(1.0) >> SGD(), got {describe(first)} >> {describe(second)}"
    )


class GradientChange(LocalPart):
    """The base class of parts that change gradients before the optimiser; a subclass defines `change`."""

    def change(self, grads: Tensors, params: Tensors, fixed: Fixed) -> list[Tensor]:
        """Return the changed gradients; `fixed` holds what stays the same in all steps of the round."""
        raise NotImplementedError

    def __rshift__(self, following: LocalOptimiser) -> LocalOptimiser:
        return Chain(self, following)


class LocalOptimiser(LocalPart):
    """The base class of local optimisers. A subclass must define `step`, and `init` if it has a state."""

    # Whether K steps move the parameters by -eta_L times the sum of their K gradients.
    sums_gradients: ClassVar[bool] = False

    def init(self, params: Tensors) -> State:
        """Return the state before a round's first step: a dict of lists, with a tensor for each parameter."""
        return {}

    def step(self, params: Tensors, grads: Tensors, state: State, rate: Rate, fixed: Fixed) -> Stepped:
        """Return the next parameters and the next state, without changing the arguments.

        `rate` is eta_L, the local rate; `fixed` holds what stays the same in all steps of the round.
        """
        raise NotImplementedError

    def __rshift__(self, following: object) -> NoReturn:
        raise _order_error(self, following)


@dataclass(frozen=True)
class Chain(LocalOptimiser):
    """A change of the gradients, and the local optimiser that uses the changed gradients."""

    before: GradientChange
    optimiser: LocalOptimiser

    def __post_init__(self) -> None:
        if not (isinstance(self.before, GradientChange) and isinstance(self.optimiser, LocalOptimiser)):
            raise _order_error(self.before, self.optimiser)

    def __str__(self) -> str:
        return f"{self.before} >> {self.optimiser}"

    def to_text(self, field: str) -> str:
        return f"{self.before.to_text(field)} >> {self.optimiser.to_text(field)}"

    @property
    def needs_start(self) -> bool:  # type: ignore[override]
        return self.before.needs_start or self.optimiser.needs_start

    @property
    def needs_correction(self) -> bool:  # type: ignore[override]
        return self.before.needs_correction or self.optimiser.needs_correction

    @property
    def sums_gradients(self) -> bool:  # type: ignore[override]
        return self.optimiser.sums_gradients

    def init(self, params: Tensors) -> State:
        return self.optimiser.init(params)

    def step(self, params: Tensors, grads: Tensors, state: State, rate: Rate, fixed: Fixed) -> Stepped:
        changed = self.before.change(grads, params, fixed)
        return self.optimiser.step(params, changed, state, rate, fixed)


@dataclass(frozen=True)
class SGD(LocalOptimiser):
    """The paper's step, p - eta_L * g; momentum, Nesterov and weight decay are as in torch.optim.SGD."""

    name: ClassVar[str] = "sgd"
    examples: ClassVar[tuple[str, ...]] = ("sgd", "sgd(momentum=0.9)")
    momentum: float = share(0.0)
    weight_decay: float = _at_least_0(0.0)
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_truth("nesterov", self.nesterov)
        if self.nesterov and not self.momentum:
            raise InputError("momentum must be above 0 with nesterov, got 0")

    @property
    def sums_gradients(self) -> bool:  # type: ignore[override]
        return not self.momentum

    def init(self, params: Tensors) -> State:
        return {"momentum": [torch.zeros_like(p) for p in params]} if self.momentum else {}

    def step(self, params: Tensors, grads: Tensors, state: State, rate: Rate, fixed: Fixed) -> Stepped:
        if self.weight_decay:
            grads = [torch.add(g, p, alpha=self.weight_decay) for p, g in zip(params, grads, strict=True)]
        if self.momentum:
            momenta = zip(state["momentum"], grads, strict=True)
            state = {"momentum": [v * self.momentum + g for v, g in momenta]}
            pairs = zip(grads, state["momentum"], strict=True)
            grads = [torch.add(g, v, alpha=self.momentum) if self.nesterov else v for g, v in pairs]
        return [descend(p, g, rate) for p, g in zip(params, grads, strict=True)], state


@dataclass(frozen=True)
class AdamW(LocalOptimiser):
    """Adam with decoupled weight decay, as torch.optim.AdamW; the moments start at 0 in every round."""

    name: ClassVar[str] = "adamw"
    examples: ClassVar[tuple[str, ...]] = ("adamw(0.1)",)
    weight_decay: float = _at_least_0(0.01)
    beta1: float = share(0.9)
    beta2: float = share(0.999)
    eps: float = _at_least_0(1e-8)

    def init(self, params: Tensors) -> State:
        zeros = [torch.zeros_like(p) for p in params]
        # One count for each parameter, since some may get no gradient; a tensor, since vmap batches clients.
        return {"count": [p.new_zeros(()) for p in params], "m": zeros, "v": list(zeros)}

    def step(self, params: Tensors, grads: Tensors, state: State, rate: Rate, fixed: Fixed) -> Stepped:
        count = [n + 1 for n in state["count"]]
        m = [self.beta1 * m + (1 - self.beta1) * g for m, g in zip(state["m"], grads, strict=True)]
        v = [self.beta2 * v + (1 - self.beta2) * g * g for v, g in zip(state["v"], grads, strict=True)]
        rows = zip(params, count, m, v, strict=True)
        return [self._move(*row, rate) for row in rows], {"count": count, "m": m, "v": v}

    def _move(self, p: Tensor, count: Tensor, m: Tensor, v: Tensor, rate: Rate) -> Tensor:
        length = (v / _bias_correction(self.beta2, count)).sqrt() + self.eps
        shrunk = p - rate * self.weight_decay * p
        return shrunk - rate * (m / _bias_correction(self.beta1, count)) / length


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta^count, precise even if beta is near 1."""
    return -torch.expm1(count * math.log(beta)) if beta else torch.ones_like(count)


@dataclass(frozen=True)
class Clip(GradientChange):
    """Scales a client's gradient down to norm c if the gradient's norm, over all parameters, is larger."""

    name: ClassVar[str] = "clip"
    examples: ClassVar[tuple[str, ...]] = ("clip(1.0) >> sgd",)
    c: float = argument("a finite number above 0", lambda c: 0 < c <= LARGEST)

    def change(self, grads: Tensors, params: Tensors, fixed: Fixed) -> list[Tensor]:
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        share = (self.c / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
        return [g * share for g in grads]


@dataclass(frozen=True)
class Prox(GradientChange):
    """FedProx: adds mu (p - start) to the gradient, which pulls a client back to where its round began."""

    name: ClassVar[str] = "prox"
    examples: ClassVar[tuple[str, ...]] = ("prox(0.01) >> sgd",)
    needs_start: ClassVar[bool] = True
    mu: float = _at_least_0()

    def change(self, grads: Tensors, params: Tensors, fixed: Fixed) -> list[Tensor]:
        triples = zip(grads, params, fixed.start, strict=True)
        return [torch.add(g, p - s, alpha=self.mu) for g, p, s in triples]


@dataclass(frozen=True)
class Scaffold(GradientChange):
    """SCAFFOLD: adds c - c_i to the gradient, so that clients do not drift towards their own optima.

    c_i estimates the client's gradient, c is the mean of all c_i. They last from round to round, on the
    client and on the server, and are sent beside update and model; see `cfedavg.control`.
    """

    name: ClassVar[str] = "scaffold"
    examples: ClassVar[tuple[str, ...]] = ("scaffold >> sgd",)
    needs_correction: ClassVar[bool] = True

    def change(self, grads: Tensors, params: Tensors, fixed: Fixed) -> list[Tensor]:
        return [g + c for g, c in zip(grads, fixed.correction, strict=True)]


@lru_cache(256)
def step_lengths(optimiser: LocalOptimiser, rate: float, most: int) -> tuple[float, ...]:
    """Return FedNova's normaliser |a|_1 of 1, 2, ... up to `most` local steps.

    This is how far the steps move a parameter if every gradient is 1, in units of `rate`: K for plain SGD;
    more with momentum, which repeats earlier gradients; less with `prox`, which pulls back.

    >>> step_lengths(SGD(), 0.1, 3), step_lengths(SGD(momentum=0.5), 0.1, 3)
    ((1.0, 2.0, 3.0), (1.0, 2.5, 4.25))
    """
    start = [torch.zeros(1, dtype=torch.float64)]
    fixed = Fixed(start, [torch.zeros_like(start[0])])
    params, state, lengths = list(start), optimiser.init(start), list[float]()
    for _ in range(most):
        params, state = optimiser.step(params, [torch.ones_like(start[0])], state, rate, fixed)
        lengths.append(float(-params[0] / rate))
    return tuple(round(length, 12) for length in lengths)


def descend(p: Tensor, direction: Tensor, rate: Rate) -> Tensor:
    """Return p - rate * direction. If `rate` is a float, the result is rounded once, like torch.optim."""
    if isinstance(rate, Tensor):
        return p - rate * direction
    return torch.add(p, direction, alpha=-rate)


LOCAL_OPTIMISERS: Registry[LocalPart] = Registry(
    "local_optimiser", LocalPart, {each.name: each for each in (SGD, AdamW, Clip, Prox, Scaffold)}
)


def parse_local_optimiser(text: str, *, trust: bool = True) -> LocalOptimiser:
    """Return the local optimiser that a text names: `sgd`, `clip(1.0) >> adamw(0.1)`, `my.module:Mine`.

    >>> str(parse_local_optimiser("prox(0.01)>>sgd(momentum=0.9)"))
    'prox(0.01) >> sgd(momentum=0.9)'
    """
    *changes, made = LOCAL_OPTIMISERS.parse_chain(text, longest=LONGEST, trust=trust)
    if not isinstance(made, LocalOptimiser):
        raise InputError(f"`local_optimiser`: {text!r} must end with an optimiser, as in {made} >> sgd")
    for change in reversed(changes):
        if not isinstance(change, GradientChange):
            raise InputError(
                f"`local_optimiser` must have one optimiser, as its last part, but {change} is an optimiser "
                f"before it, got {text!r}"
            )
        made = change >> made
    return made
