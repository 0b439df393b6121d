"""Parts of a user's own, one of each kind, in a module that is not the package's.

Lookout uses what few feedbacks need: a memory of the server that is broadcast, and clients that begin their
local steps elsewhere than at the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cfedavg import Feedback, GradientChange, LocalOptimiser, ServerOptimiser
from cfedavg.feedback import Weights
from cfedavg.optimise.local import Fixed, State, Tensors, descend


@dataclass(frozen=True)
class Lookout(Feedback):
    """Clients begin at x plus a share of the last update of the model, which the broadcast carries."""

    law: ClassVar[str] = "nothing is remembered of a client"
    share: float = 0.5

    def start(self, x: Any, memory: Any, shared: Any) -> Any:
        return x + self.share * shared

    def receive(self, mean_sent: Any, memory: Any, weights: Weights) -> tuple[Any, Any]:
        return mean_sent, mean_sent

    def broadcast(self, memory: Any) -> Any:
        return memory


@dataclass(frozen=True)
class SignDescent(LocalOptimiser):
    """Steps along the sign of a running mean of gradients; the mean starts at 1, not at 0."""

    beta: float = 0.5

    def init(self, params: Tensors) -> State:
        return {"mean": [torch.ones_like(p) for p in params]}

    def step(self, params: Any, grads: Any, state: State, rate: Any, fixed: Fixed) -> Any:
        mean = [self.beta * m + (1 - self.beta) * g for m, g in zip(state["mean"], grads, strict=True)]
        return [descend(p, m.tanh(), rate) for p, m in zip(params, mean, strict=True)], {"mean": mean}


@dataclass(frozen=True)
class Halve(GradientChange):
    """Takes half of each gradient."""

    def change(self, grads: Tensors, params: Tensors, fixed: Fixed) -> list[torch.Tensor]:
        return [g / 2 for g in grads]


@dataclass(frozen=True)
class Lookahead(ServerOptimiser):
    """Keeps the first model as an anchor and goes half of the way back to it."""

    def init(self, x: Any) -> Any:
        return {"anchor": x + 0}

    def step(self, x: Any, delta: Any, state: Any, rate: float, t: int) -> Any:
        return (x + rate * delta + state["anchor"]) / 2, state
