"""Engines, which run the rounds of a simulation: each round turns a State into the next State."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError, ShapesDiffer
from cfedavg.core.fingerprint import restore_generators
from cfedavg.core.layout import Layout
from cfedavg.simulate.engines.batched import Batched
from cfedavg.simulate.engines.blocks import BlockEngine
from cfedavg.simulate.engines.partners import Partners
from cfedavg.simulate.engines.ranks import RankLost, Ranks, check_same, choose_device, describe_run
from cfedavg.simulate.engines.recorded import Recorded
from cfedavg.simulate.engines.recording_trial import find_fault_in_recording
from cfedavg.simulate.engines.reference import Engine, ReferenceEngine
from cfedavg.simulate.engines.requests import Request, Trained
from cfedavg.simulate.engines.speed import compare_precisions
from cfedavg.simulate.engines.trainers import Sequential, Trainer
from cfedavg.simulate.engines.trial import (
    explain_failure,
    find_fault_in_batching,
    takes_fast_layers,
    try_task,
)
from cfedavg.simulate.local import PRECISIONS, Vectors, channels_last, reproducible
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.compiler import running_compiler
from cfedavg.task import Batch, Task

__all__ = [
    "BlockEngine", "Engine", "Partners", "RankLost", "Ranks", "ReferenceEngine", "check_same",
    "choose_device", "choose_engine", "describe_run", "is_small",
]  # fmt: skip

MEMORY = (torch.OutOfMemoryError, MemoryError)
SMALL = 100_000  # a small model has at most so many parameters; see `is_small`


def choose_engine(
    config: Config,
    plan: Plan,
    task: Task,
    messages: Path | None = None,
    ranks: Ranks | None = None,
    say: Callable[[str], None] = lambda text: None,
    partners: Partners | None = None,
) -> Engine:
    """Return the engine that `config` names or, for auto, a suitable engine; tell `say` which and why.

    With `partners`, the run trains side by side with other runs if its engine is `batched`.
    """
    ranks = ranks or Ranks()
    device = ranks.device(choose_device(config.device))
    if config.precision == "tf32" and device.type != "cuda":
        raise InputError(f"`precision` tf32 needs a GPU, got `device` {device}; take float32 or bf16")
    choice, trainer = _Choice(True, "as its partners"), partners.trainer if partners else None
    if trainer is None:
        unused = try_task(task, config, device)
        if config.engine == "reference":
            _check_reference(config, ranks)
            return ReferenceEngine(plan, task, device, messages)
        tell, runs = (partners.say, partners) if partners else (say, Partners([(plan, task)]))
        choice, trainer = _first_choice(plan, task, device, ranks, unused, tell, runs)
    if choice.note:
        say(choice.note)
    make = partial(_make_trainer, trainer, plan, task, device, say)
    engine = BlockEngine(plan, task, device, make, messages, ranks, trainer.pool.read if trainer else None)
    name = "batched" if choice.batched else "sequential"
    name += " with recorded steps" * isinstance(engine.trainer, Recorded)
    processes = f", {ranks.size} processes" if ranks.size > 1 else ""
    beside = ", side by side with other runs" if partners and partners.trainer else ""
    say(f"engine: {name} on {device}, {config.precision}{processes}{beside}: {choice.why}")
    if device.type == "cpu" and not choice.batched and ranks.rank == 0:
        hint = compare_precisions(plan, task, ranks.size)
        if hint:
            say(hint)
    return engine


def _record_or_launch(
    plan: Plan,
    task: Task,
    vectors: Vectors,
    device: torch.device,
    prepare: Callable[[Batch], Batch],
    say: Callable[[str], None],
) -> Trainer | None:
    """Return a trainer that records the step of one client on a GPU; None if the step cannot be recorded."""
    if device.type == "cpu":
        return None
    problem = find_fault_in_recording(task, plan.config, vectors, device, prepare)
    if problem:
        say(f"the step cannot be recorded ({problem}): it is launched piece by piece")
        return None
    return Recorded(plan, task, vectors, device, prepare, say)


def _make_trainer(
    many: Batched | None,
    plan: Plan,
    task: Task,
    device: torch.device,
    say: Callable[[str], None],
    vectors: Vectors,
    prepare: Callable[[Batch], Batch],
) -> Trainer:
    """Return the trainer of an engine: `many`, which may be shared, or one that trains one by one."""

    @cache
    def one_by_one() -> Trainer:
        fast = prepare is channels_last and device.type == "cpu" and takes_fast_layers(task, plan.config)
        if device.type == "cpu":
            keep_memory()
        return Sequential(vectors, device, prepare, fast=fast)

    if many is None:
        return _record_or_launch(plan, task, vectors, device, prepare, say) or one_by_one()
    return BatchedWithFallback(many, one_by_one, say, required=plan.config.engine == "batched")


def _first_choice(
    plan: Plan,
    task: Task,
    device: torch.device,
    ranks: Ranks,
    unused: Collection[str],
    say: Callable[[str], None],
    partners: Partners,
) -> tuple[_Choice, Batched | None]:
    """Return the choice of a trainer for a run and its partners, and the trainer if clients step together."""
    config = plan.config

    def make(ours: str | None) -> Batched:
        vectors = Vectors(copy.deepcopy(task.model).to(device, PRECISIONS[config.precision]))
        made = Batched(plan, task, vectors, device, say, conv_precision=ours, unused=unused)
        made.choose_sizes(_first_requests(made, partners, ranks))
        return made

    many, ours = None, _conv_precision(config, device)
    if device.type == "cuda" and config.engine != "sequential":
        many = make(ours)
        _begin_compiling(many, _first_requests(many, partners, ranks), config.precision)
    choice = _choose_trainer(config, task, device, ranks.size, unused, many)
    if not choice.batched:
        return choice, None
    if many is None or choice.conv_precision != ours:
        many = make(choice.conv_precision)
    partners.trainer = many
    return choice, many


def _check_reference(config: Config, ranks: Ranks) -> None:
    """Raise InputError if the reference engine cannot run with this precision, or in several processes."""
    if ranks.size > 1:
        raise InputError(
            "the engine `reference` runs in one process: leave out torchrun, or take another engine"
        )
    if config.precision in ("tf32", "bf16"):
        raise InputError(
            f"`precision` must be float32 or float64 with `engine` reference, got {config.precision}"
        )


class _Choice(NamedTuple):
    """The choice of a trainer: whether many clients step at once, why, and a note for the user."""

    batched: bool
    why: str
    conv_precision: str | None = None  # of our convolutions on a GPU; None means torch's convolutions
    note: str = ""


def _conv_precision(config: Config, device: torch.device) -> str | None:
    """Return the precision of our own convolutions, which run on a GPU only; None means torch's."""
    return config.precision if device.type == "cuda" and config.precision != "float64" else None


def _first_requests(many: Batched, partners: Partners, ranks: Ranks) -> list[Request]:
    """Return the requests of round 0 of all runs, with the clients of this rank."""
    requests = partners.first_requests(*many.vectors.read())
    return [replace(each, clients=ranks.own(each.clients)) for each in requests]


def _begin_compiling(many: Batched, requests: list[Request], precision: str) -> None:
    """Let the compiler process compile the steps of `many`, while the trial runs in this process."""
    try:
        with restore_generators(many.device), reproducible(many.device, precision):
            if any(each.clients for each in requests) and running_compiler():
                many.prepare(requests)
    except Exception:  # the trial says why the steps of this model cannot be listed
        many.release()


def _choose_trainer(
    config: Config,
    task: Task,
    device: torch.device,
    processes: int,
    unused: Collection[str],
    many: Batched | None,
) -> _Choice:
    if config.engine == "sequential":
        return _Choice(False, "as asked for")
    if config.engine == "auto" and device.type == "cpu" and not is_small(task.model):
        return _Choice(False, "on a CPU a model of this size is fastest one client after another")
    if config.engine == "auto" and device.type == "cpu" and processes > 1:
        return _Choice(False, "one client after another, the number of processes changes no bit")
    note, ours = "", _conv_precision(config, device)
    wait = many.recorder.wait_for_kernels if many else lambda: None
    problem = find_fault_in_batching(task, config, device, ours, unused, wait)
    if ours and problem:
        note = f"torch's own convolutions, which are slower, since the model does not take ours ({problem})"
        ours, problem = None, find_fault_in_batching(task, config, device, None, unused)
    if problem and config.engine == "batched":
        raise InputError(f"`engine` batched: {problem}; set `engine` to auto or sequential")
    if problem:
        return _Choice(False, f"clients cannot step together: {problem}")
    why = "a GPU is filled by many clients at once" if device.type == "cuda" else "the model is small"
    return _Choice(True, "as asked for" if config.engine == "batched" else why, ours, note)


class BatchedWithFallback:
    """A trainer that steps many clients at once; if a step fails, the round's other clients train one by one.

    The trial before the run covers only two clients, so a step can fail later. The next round starts with
    many clients again: a round must not depend on earlier rounds, which a resumed run has not seen.
    """

    def __init__(
        self, many: Batched, one_by_one: Callable[[], Trainer], say: Callable[[str], None], *, required: bool
    ) -> None:
        self.trainer: Trainer = many  # the trainer in use
        self._many, self._one_by_one, self._say, self._required = many, one_by_one, say, required
        self._said = False

    def train(self, request: Request) -> Iterator[Trained]:
        done = 0
        self.trainer = self._many
        try:
            for trained in self.trainer.train(request):
                yield trained
                done += len(trained.clients)
        except Exception as error:
            clear = isinstance(error, InputError) and not isinstance(error, ShapesDiffer)
            if clear or isinstance(error, MEMORY):
                raise
            self._report(error)
            self.trainer = self._one_by_one()
            yield from self.trainer.train(request.rest(done))

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
    """Return whether a CPU trains many clients of this model faster at once than one by one.

    A small model has at most 100,000 parameters (`SMALL`) and no convolution. Its steps cost more overhead
    than arithmetic. Measured speedup for MLPs and 30 clients: 6 to 8 times at 5,000 parameters, 1.5 to 1.9 at
    77,000, about 1 at 150,000. A model with convolutions is never small: vmap turns a convolution into a
    grouped convolution, for which CPUs have no good kernels.
    """
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    return not convolves and Layout.of(model).d <= SMALL


def keep_memory() -> None:
    """Tell glibc to keep freed memory for later tensors, instead of giving it back to the system.

    A step of the paper's CNN would spend a quarter of its time to get memory from the system again. In
    exchange, the process's memory stays at its peak.
    """
    trim, top, mapped = -1, -2, -3
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mapped, 1 << 30)
        libc.mallopt(trim, 2**31 - 1)
        libc.mallopt(top, 64 << 20)
    except (OSError, AttributeError):
        pass  # another C library: training is only slower
