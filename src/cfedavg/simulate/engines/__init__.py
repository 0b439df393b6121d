"""Engines: who runs the clients' local work. Each turns a State into the next one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError, ShapesDiffer
from cfedavg.core.layout import Layout
from cfedavg.core.run_files import Record
from cfedavg.simulate.engines.batched import Batched
from cfedavg.simulate.engines.blocks import BlockEngine
from cfedavg.simulate.engines.ranks import RankLost, Ranks, check_same, choose_device, facts
from cfedavg.simulate.engines.reference import ReferenceEngine
from cfedavg.simulate.engines.trainer import Sequential, Start, Trained, Trainer
from cfedavg.simulate.engines.trial import cannot_batch, explain_failure, try_task
from cfedavg.simulate.local import Vectors
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import State
from cfedavg.task import Batch, Task

__all__ = [
    "BlockEngine", "Engine", "RankLost", "Ranks", "ReferenceEngine", "check_same", "choose_device",
    "choose_engine", "facts", "is_small",
]  # fmt: skip

MEMORY = (torch.OutOfMemoryError, MemoryError)
SMALL = 100_000  # parameters; see `is_small`


class Engine(Protocol):
    """Runs rounds: a state goes in; a new one comes out, with the round's row of metrics."""

    layout: Layout
    identity: int  # a checksum of the model, which a checkpoint must match
    behind: int  # rounds by which a row of metrics may be late, so that nobody waits for it

    def start(self) -> State:
        """Return the state before the first round."""

    def round(self, state: State) -> tuple[State, Callable[[], Record]]:
        """Run a round of Algorithm 1; return a function for its row, since bytes may still be counted."""

    def evaluate(self, state: State) -> Record:
        """Evaluate the model that clients hold on the test set."""

    def begin(self, state: State) -> State:
        """Take the state that a run starts from; return it as the engine keeps it."""

    def checkpoint(self, state: State, save: Callable[[State], None]) -> None:
        """Collect the parts of a state from all ranks and save it."""

    def close(self) -> None:
        """Release what the engine holds; the run is over."""

    def model_at(self, x: Tensor, b: Tensor) -> nn.Module:
        """Return the user's model, on the CPU, with these parameters and buffers."""


def choose_engine(
    config: Config,
    plan: Plan,
    task: Task,
    messages: Path | None = None,
    ranks: Ranks | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Engine:
    """Return the engine that a configuration names or that suits it; say which, and why."""
    ranks = ranks or Ranks()
    device = ranks.device(choose_device(config.device))
    if config.precision == "tf32" and device.type != "cuda":
        raise InputError("`precision` tf32 is for GPUs: take float32, or bf16")
    idle = try_task(task, config, device)
    if config.engine == "reference":
        if ranks.size > 1:
            raise InputError(
                "`engine` reference runs in one process: leave out `workers`, or take another engine"
            )
        if config.precision in ("tf32", "bf16"):
            raise InputError(f"`precision` {config.precision} is not for `engine` reference, which is exact")
        return ReferenceEngine(plan, task, device, messages)
    choice = _choose_trainer(config, task, device, ranks.size, idle)
    if choice.note:
        say(choice.note)

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


class _Choice(NamedTuple):
    """Whether many clients step at once, why, and the precision in which our convolutions multiply."""

    batched: bool
    why: str
    dots: str | None = None
    note: str = ""


def _choose_trainer(
    config: Config, task: Task, device: torch.device, processes: int, unused: Collection[str]
) -> _Choice:
    if config.engine == "sequential":
        return _Choice(False, "as asked for")
    if config.engine == "auto" and device.type == "cpu" and not is_small(task.model):
        return _Choice(False, "on a CPU a model of this size is fastest one client after another")
    if config.engine == "auto" and device.type == "cpu" and processes > 1:
        return _Choice(False, "one client after another, the number of processes changes no bit")
    note, dots = "", config.precision if device.type == "cuda" and config.precision != "float64" else None
    problem = cannot_batch(task, config, device, dots=dots, unused=unused)
    if dots and problem:
        note = f"torch's own convolutions, which are slower, since the model does not take ours ({problem})"
        dots, problem = None, cannot_batch(task, config, device, unused=unused)
    if problem and config.engine == "batched":
        raise InputError(f"`engine` batched: {problem}; set `engine` to auto or sequential")
    if problem:
        return _Choice(False, f"clients cannot step together: {problem}")
    if config.engine == "batched":
        return _Choice(True, "as asked for", dots, note)
    what = "a GPU is filled by many clients at once" if device.type == "cuda" else "the model is small"
    return _Choice(True, what, dots, note)


class Together:
    """Steps many clients at once; if that fails, trains the rest of the round one after another.

    The trial before the run sees two clients only. The next round is tried anew: a round must not depend on
    earlier ones, which a resumed run has not seen.
    """

    def __init__(
        self, many: Batched, one_by_one: Callable[[], Trainer], say: Callable[[str], None], *, required: bool
    ) -> None:
        self.trainer: Trainer = many  # the one in use
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
            self._report(error)
            self.trainer = self._one_by_one()
            yield from self.trainer.train(t, start, b, clients[done:])

    def _report(self, error: Exception) -> None:
        why = explain_failure(self._many.model, error)
        if self._required:
            raise InputError(f"`engine` batched: {why}; set `engine` to auto or sequential") from error
        if not self._said:
            self._say(f"engine: sequential where clients of a round cannot step together: {why}")
        self._said = True

    def shrink(self) -> None:
        self.trainer.shrink()


def is_small(model: nn.Module) -> bool:
    """Return whether many clients at once are faster on a CPU: where overhead outweighs arithmetic.

    Measured for MLPs, 30 clients: 6 to 8 times at 5,000 parameters, 1.5 to 1.9 at 77,000, about 1 at 150,000.
    vmap makes a convolution a grouped one, for which CPUs have no good kernels.
    """
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    return not convolves and Layout.of(model).d <= SMALL
