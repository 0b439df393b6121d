"""Which engine runs a configuration, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from cfedavg.config import Config
from cfedavg.engines.base import Engine, Trainer, choose_device
from cfedavg.engines.batched import Batched
from cfedavg.engines.blocks import BlockEngine
from cfedavg.engines.common import PRECISIONS
from cfedavg.engines.probes import cannot_batch
from cfedavg.engines.ranks import Ranks
from cfedavg.engines.reference import ReferenceEngine
from cfedavg.engines.sequential import Sequential
from cfedavg.errors import InputError
from cfedavg.layout import Layout
from cfedavg.local import Vectors
from cfedavg.plan import Plan
from cfedavg.task import Batch, Task

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
        raise InputError("--precision tf32 is for GPUs: take float32, or bf16")
    if config.engine == "reference":
        return _reference(config, plan, task, device, messages, ranks)
    batched, why = _trainer(config, task, device, ranks.size)

    def make(vectors: Vectors, prepare: Callable[[Batch], Batch]) -> Trainer:
        if batched:
            return Batched(plan, task, vectors, device, say)
        return Sequential(plan, task, vectors, device, prepare)

    engine = BlockEngine(plan, task, device, make, messages, ranks)
    name = "batched" if batched else "sequential"
    processes = f", {ranks.size} processes" if ranks.size > 1 else ""
    say(f"engine: {name} on {device}, {config.precision}{processes}: {why}")
    return engine


def _reference(
    config: Config, plan: Plan, task: Task, device: torch.device, messages: Path | None, ranks: Ranks
) -> Engine:
    if ranks.size > 1:
        raise InputError(
            "--engine reference runs in one process: leave out --workers, or take another engine"
        )
    if config.precision in ("tf32", "bf16"):
        raise InputError(f"--precision {config.precision} is not for --engine reference, which is exact")
    return ReferenceEngine(plan, task, device, messages)


def _trainer(config: Config, task: Task, device: torch.device, processes: int) -> tuple[bool, str]:
    """Whether many clients step at once, and why so."""
    if config.engine == "sequential":
        return False, "as asked for"
    if config.engine == "auto" and device.type == "cpu" and not is_small(task.model):
        return False, "on a CPU a model of this size is fastest one client after another"
    if config.engine == "auto" and device.type == "cpu" and processes > 1:
        return False, "one client after another, the number of processes changes no bit"
    if (problem := cannot_batch(task, PRECISIONS[config.precision])) is not None:
        return (
            False,
            f"clients cannot step together, for torch.func.vmap does not handle the task ({problem})",
        )
    if config.engine == "batched":
        return True, "as asked for"
    what = "a GPU is filled by many clients at once" if device.type == "cuda" else "the model is small"
    return True, what


def is_small(model: nn.Module) -> bool:
    """Whether on a CPU many clients at once are faster: where overhead outweighs arithmetic.

    Measured for MLPs, 30 clients: 6 to 8 times at 5,000 parameters, 1.5 to 1.9 at 77,000, about 1 at 150,000.
    vmap makes a convolution a grouped one, for which CPUs have no good kernels.
    """
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
    return not convolves and Layout.of(model).d <= SMALL
