"""Runs side by side: small clients leave a GPU idle, so several runs train their clients in one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cfedavg.core.config import Config
from cfedavg.data.columns import Columns
from cfedavg.data.tasks import DataSet, build_task
from cfedavg.simulate.engines import Partners, choose_device, is_small
from cfedavg.simulate.local import Vectors
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.result import Result
from cfedavg.simulate.run import run_beside
from cfedavg.simulate.steps import Steps
from cfedavg.task import Task

# Runs that differ in these fields of Config have different steps or samples, and cannot share a trainer.
EQUAL = (
    "dataset", "data_dir", "text_column", "label_column", "client_column", "sequence_length", "tokens",
    "model", "local_optimiser", "precision", "batch_size", "device", "engine",
)  # fmt: skip
CLIENTS = 512  # in each round, runs that fill a GPU train so many clients together, or fewer
WEIGHTS = 2**27  # and these clients have so many parameters in total, or fewer


def shared_fields(config: Config) -> tuple[Any, ...] | None:
    """Return what runs must have in common to train side by side; None if the run must train alone."""
    if config.engine not in ("auto", "batched") or config.workers > 1:
        return None
    return tuple(getattr(config, name) for name in EQUAL)


class Group:
    """Runs that can train side by side, by name; they share a data set and a trainer.

    `size` is the number of runs that are under way at the same time.
    """

    def __init__(
        self, configs: Mapping[str, Config], most: int, say: Callable[[str], None] = lambda text: None
    ) -> None:
        """Build the tasks of the runs that begin; `most` is 0 for as many runs as fill the device."""
        self.configs = configs
        self._built: dict[str, tuple[Plan, Task]] = {}
        self._identity: int | None = None
        first = next(iter(configs.values()))
        self._loaded = DataSet(first.dataset, first.data_dir, Columns.of(first))
        self.size = 1
        for name in configs:
            if self._build(name) and len(self._built) == 1:
                self.size = min(len(configs), how_many(*self._built[name], most))
            if len(self._built) >= self.size:
                break
        self.partners = Partners(list(self._built.values()), say)

    def _build(self, name: str) -> bool:
        """Build the task of a run; return whether the run can share the group's trainer.

        It cannot if its model has frozen values of its own, since they are constants of a step.
        """
        config = self.configs[name]
        task = build_task(config, self._loaded)
        identity = Vectors(task.model).identity()
        if self._identity not in (None, identity):
            return False
        self._identity, self._built[name] = identity, (Plan(config, task), task)
        return True

    def run(self, name: str, config: Config, **how: Any) -> Steps[Result]:
        """Run `name`, with pauses; the other arguments are those of `run_beside`."""
        return run_beside(config, self._built[name][1], self.partners, **how)

    def names(self) -> Iterator[str]:
        """Yield the names of the runs of the group; build the task of each run when the run begins."""
        for name in self.configs:
            if name in self._built or self._build(name):
                yield name
                del self._built[name]


def how_many(plan: Plan, task: Task, most: int = 0) -> int:
    """Return how many runs like this one train side by side: `most`, or if 0 as many as fill a GPU.

    It is 1 if the run trains one client after another. If `most` is 0, it is also 1 on a CPU.
    """
    config, clients = plan.config, plan.clients_per_round
    if choose_device(config.device).type == "cpu":
        return (most or 1) if config.engine == "batched" or is_small(task.model) else 1
    d = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    return most or max(1, min(CLIENTS // clients, WEIGHTS // (d * clients)))
