"""A trial before a run: does a recorded step of one client give the same numbers as the step itself?

Many models that cannot train many clients at once cannot be recorded either: Python code that looks at
numbers waits for the GPU, and Python code with a state of its own runs only once.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.fingerprint import restore_generators
from cfedavg.simulate.engines.recorded import CannotRecord, Record, Recorded
from cfedavg.simulate.engines.requests import Request
from cfedavg.simulate.engines.trainers import is_one_sample
from cfedavg.simulate.engines.trial import find_culprit, two_clients
from cfedavg.simulate.local import Vectors, reproducible
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.graphs import record_graph
from cfedavg.task import Batch, Task

NOISE = 4  # how many times the difference of two equal runs a recorded run may differ
ROUNDING = 0.02  # the largest relative difference of two equal runs: kernels may add up in any order


def find_fault_in_recording(
    task: Task,
    config: Config,
    vectors: Vectors,
    device: torch.device,
    prepare: Callable[[Batch], Batch],
    record: Record = record_graph,
) -> str:
    """Return the reason why the step of one client cannot be recorded; "" if it can.

    Two clients take five steps each, with a full and a short batch, dropout included: as they are, then
    forbidden to wait for the GPU, then recorded. The results must be equal bit for bit. If the first two
    differ slightly, since kernels add up in any order, the third may differ slightly too.
    """
    if known := _known_obstacle(vectors.model):
        return known
    small, trial = two_clients(task, config)
    small = replace(small, loss=task.loss)
    try:
        with restore_generators(device), reproducible(device, config.precision):
            eager, again, recorded = (
                _results(small, trial, vectors, device, prepare, each)
                for each in (None, _run_without_waiting, record)
            )
    except CannotRecord as error:
        return str(error)
    except (torch.OutOfMemoryError, MemoryError):
        return "the memory is too small for it"
    except Exception as error:
        return "" if is_one_sample(error) else _explain(task.model, error)
    return _compare(task.model, eager, again, recorded)


def _known_obstacle(model: nn.Module) -> str:
    """Return why the model's step cannot be recorded, if its modules show it."""
    for name, module in model.named_modules():
        at = f"{name!r} ({type(module).__name__})"
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            return f"{at} draws dropout from a state of its own, which moves in memory"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{at} has a sparse gradient, whose size depends on the batch"
    return ""


def _explain(model: nn.Module, error: Exception) -> str:
    """Return a text that says how a recorded step failed and in which module."""
    while isinstance(error, InputError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return f"{find_culprit(model, error)} fails in a recorded step ({summarise_error(error)})"


def _results(
    task: Task,
    config: Config,
    vectors: Vectors,
    device: torch.device,
    prepare: Callable[[Batch], Batch],
    record: Record | None,
) -> list[Tensor]:
    """Return the updates, buffers and losses of two clients."""
    random.seed(0)
    np.random.seed(0)
    plan = Plan(config, task)
    trainer = Recorded(plan, task, vectors, device, prepare, lambda text: None, record, strict=True)
    x, b = vectors.read()
    trained = list(trainer.train(Request(plan, task, 0, lambda clients: x, b, [0, 1])))
    found = [(each.x_K - x, each.b_K, each.loss) for each in trained]
    return [torch.cat(some) for some in zip(*found, strict=True)]


def _run_without_waiting(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that runs `work` and raises an error if `work` waits for the GPU."""
    if device.type != "cuda":
        return work

    def run() -> None:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # torch says that it does not notice all of them
            torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return run


def _compare(model: nn.Module, *runs: list[Tensor]) -> str:
    """Return how the results of two equal runs and a recorded run differ by more than rounding, or ""."""
    name = f"the model ({type(model).__name__})"
    for eager, again, recorded in zip(*runs, strict=True):
        if not bool(torch.isfinite(eager).all()):
            continue  # the run itself raises an error
        noise, difference = (float((each - eager).double().norm()) for each in (again, recorded))
        if not noise <= ROUNDING * float(eager.double().norm()):
            return f"{name} computes other numbers in every run"
        if not difference <= NOISE * noise:
            return f"{name} computes other numbers in a recorded step"
    return ""
