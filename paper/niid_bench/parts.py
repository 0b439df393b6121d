"""SCAFFOLD with momentum, as the published code computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cfedavg import LocalOptimiser


@dataclass(frozen=True)
class MomentumScaffold(LocalOptimiser):
    """Steps p - eta_L (v + c - c_i), where v is SGD's momentum with weight decay.

    The package's `scaffold` adds c - c_i to the gradient and refuses momentum. NIID-Bench and Flower's
    baseline add it to the direction v. Their c_i is (x_0 - x_K) / (K eta_L) without the corrections: the mean
    of the K directions, of the same scale as what it corrects.
    """

    name: ClassVar[str] = "momentum_scaffold"
    needs_correction: ClassVar[bool] = True
    sums_gradients: ClassVar[bool] = True  # the steps are -eta_L times the sum of what c_i is the mean of
    momentum: float
    weight_decay: float

    def init(self, params: Any) -> Mapping[str, list[Tensor]]:
        """Return the momentum before a round's first step, 0."""
        return {"momentum": [0 * p.detach() for p in params]}

    def step(self, params: Any, grads: Any, state: Any, rate: Any, fixed: Any) -> Any:
        """Return the next parameters and the next momentum."""
        rows = list(zip(params, grads, state["momentum"], fixed.correction, strict=True))
        momenta = [self.momentum * v + g + self.weight_decay * p for p, g, v, _ in rows]
        moved = [p - rate * (v + c) for (p, _, _, c), v in zip(rows, momenta, strict=True)]
        return moved, {"momentum": momenta}
