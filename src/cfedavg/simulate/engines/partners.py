"""Partners: runs that train side by side, their clients in the same blocks of one trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from cfedavg.simulate.engines.batched import Batched
from cfedavg.simulate.engines.requests import Request
from cfedavg.simulate.plan import Plan
from cfedavg.task import Task


@dataclass
class Partners:
    """The runs that share a trainer.

    They have the same model, loss, local optimiser, precision, batch size and device, and samples of the same
    shapes. The first run chooses its engine as a run alone does; if clients can step together, it leaves its
    trainer here for the others.
    """

    runs: Sequence[tuple[Plan, Task]]  # those that are known when the first run chooses its engine
    say: Callable[[str], None] = lambda text: None  # told what concerns the trainer
    trainer: Batched | None = None
    active: int = 1  # how many runs are under way

    def first_requests(self, x: Tensor, b: Tensor) -> list[Request]:
        """Return the requests of round 0 of all runs; all clients start with x and b."""
        return [
            Request(plan, task, 0, lambda clients: x, b, busy_clients(plan, 0)) for plan, task in self.runs
        ]


def busy_clients(plan: Plan, t: int) -> list[int]:
    """Return the clients that take part in round t and do at least one step."""
    return [i for i in plan.sampled(t) if plan.steps.at(t, i) > 0]
