"""Which engine runs a configuration, and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError, ShapesDiffer
from cfedavg.core.layout import Layout
from cfedavg.simulate.engines.base import Engine, Start, Trained, Trainer, choose_device
from cfedavg.simulate.engines.batched import Batched
from cfedavg.simulate.engines.blocks import BlockEngine
from cfedavg.simulate.engines.probes import try_task
from cfedavg.simulate.engines.ranks import Ranks
from cfedavg.simulate.engines.reference import ReferenceEngine
from cfedavg.simulate.engines.sequential import Sequential
from cfedavg.simulate.engines.trial import cannot_batch, reason
from cfedavg.simulate.local import Vectors
from cfedavg.simulate.plan import Plan
from cfedavg.task import Batch, Task

MEMORY = (torch.OutOfMemoryError, MemoryError)
SMALL = 100_000  # parameters; see `is_small`


def choose_engine(
    config: Config,
    plan: Plan,
    task: Task,
    messages: Path | None = None,
    ranks: Ranks | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Engine:
    """The engine that a configuration names; it says which one that is."""
    ranks = ranks or Ranks()
    device = ranks.device(choose_device(config.device))
    if config.precision == "tf32" and device.type != "cuda":
        raise InputError("`precision` tf32 is for GPUs: take float32, or bf16")
    idle = try_task(task, config, device)
    if config.engine == "reference":
        return _reference(config, plan, task, device, messages, ranks)
    choice = _choose(config, task, device, ranks.size, idle)
    if choice.said:
        say(choice.said)

    def make(vectors: Vectors, prepare: Callable[[Batch], Batch]) -> Trainer:
        one_by_one = partial(Sequential, plan, task, vectors, device, prepare)
        if not choice.batched:
            return one_by_one()
        many = Batched(plan, task, vectors, device, say, dots=choice.dots, unused=idle)
        return Together(many, one_by_one, say, required=config.engine == "batched")

    engine = BlockEngine(plan, task, device, make, messages, ranks)
    name = "batched" if choice.batched else "sequential"
    processes = f", {ranks.size} processes" if ranks.size > 1 else ""
    say(f"engine: {name} on {device}, {config.precision}{processes}: {choice.why}")
    return engine


def _reference(
    config: Config, plan: Plan, task: Task, device: torch.device, messages: Path | None, ranks: Ranks
) -> Engine:
    if ranks.size > 1:
        raise InputError(
            "`engine` reference runs in one process: leave out `workers`, or take another engine"
        )
    if config.precision in ("tf32", "bf16"):
        raise InputError(f"`precision` {config.precision} is not for `engine` reference, which is exact")
    return ReferenceEngine(plan, task, device, messages)


@dataclass(frozen=True)
class _Choice:
    """Whether many clients step at once, why so, in which precision our convolutions multiply."""

    batched: bool
    why: str
    dots: str | None = None
    said: str = ""


def _choose(
    config: Config, task: Task, device: torch.device, processes: int, unused: Collection[str]
) -> _Choice:
    if config.engine == "sequential":
        return _Choice(False, "as asked for")
    if config.engine == "auto" and device.type == "cpu" and not is_small(task.model):
        return _Choice(False, "on a CPU a model of this size is fastest one client after another")
    if config.engine == "auto" and device.type == "cpu" and processes > 1:
        return _Choice(False, "one client after another, the number of processes changes no bit")
    said, dots = "", config.precision if device.type == "cuda" and config.precision != "float64" else None
    problem = cannot_batch(task, config, device, dots=dots, unused=unused)
    if dots and problem:
        said = f"torch's own convolutions, which are slower, since the model does not take ours ({problem})"
        dots, problem = None, cannot_batch(task, config, device, unused=unused)
    if problem and config.engine == "batched":
        raise InputError(f"`engine` batched: {problem}; set `engine` to auto or sequential")
    if problem:
        return _Choice(False, f"clients cannot step together: {problem}")
    if config.engine == "batched":
        return _Choice(True, "as asked for", dots, said)
    what = "a GPU is filled by many clients at once" if device.type == "cuda" else "the model is small"
    return _Choice(True, what, dots, said)


class Together:
    """Steps many clients at once; where that fails, the rest of the round one after another.

    A trial before the run sees two clients; what only others bring about is met here. The next round is
    tried anew: what a round gives must not depend on those before it, which a resumed run has not seen.
    """

    def __init__(
        self, many: Batched, one_by_one: Callable[[], Trainer], say: Callable[[str], None], *, required: bool
    ) -> None:
        self.trainer: Trainer = many  # the one at work
        self._many, self._one_by_one, self._say, self._required = many, cache(one_by_one), say, required
        self._said = False

    def train(self, t: int, start: Start, b: Tensor, clients: list[int]) -> Iterator[Trained]:
        done = 0
        self.trainer = self._many
        try:
            for trained in self.trainer.train(t, start, b, clients):
                yield trained
                done += len(trained.clients)
        except Exception as error:
            clear = isinstance(error, InputError) and not isinstance(error, ShapesDiffer)
            if clear or isinstance(error, MEMORY):
                raise
            self._explain(error)
            self.trainer = self._one_by_one()
            yield from self.trainer.train(t, start, b, clients[done:])

    def _explain(self, error: Exception) -> None:
        why = reason(self._many.model, error)
        if self._required:
            raise InputError(f"`engine` batched: {why}; set `engine` to auto or sequential") from error
        if not self._said:
            self._say(f"engine: sequential where clients of a round cannot step together: {why}")
        self._said = True

    def shrink(self) -> None:
        self.trainer.shrink()


def is_small(model: nn.Module) -> bool:
    """Whether on a CPU many clients at once are faster: where overhead outweighs arithmetic.

    Measured for MLPs, 30 clients: 6 to 8 times at 5,000 parameters, 1.5 to 1.9 at 77,000, about 1 at 150,000.
    vmap makes a convolution a grouped one, for which CPUs have no good kernels.
    """
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    return not convolves and Layout.of(model).d <= SMALL
