"""Trials before a run: whether the task trains, and whether steps of two clients together match single steps.

vmap and make_fx fail on some modules, and silently compute other numbers on some other modules. So the
batched trainer is tried on the device of the run, with real samples.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.fingerprint import restore_generators
from cfedavg.simulate.engines.batched import Batched
from cfedavg.simulate.engines.trainer import Trained, is_one_sample
from cfedavg.simulate.local import (
    PRECISIONS,
    Vectors,
    after,
    batches,
    channels_last,
    evaluate_first,
    local_steps,
    reproducible,
    seed_generators,
    to_device,
)  # fmt: skip
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.rules import Steady
from cfedavg.task import Batch, Samples, Task, Tensors, check_labels, check_loss, wrap_errors

STEPS = 5  # on a GPU, step 1 runs, step 2 is recorded, later steps replay the recording
# Allowed relative difference of the two results. float64 is strict; lower precisions find only gross errors.
TOLERANCE = {"float64": 1e-6, "float32": 0.02, "tf32": 0.2, "bf16": 0.5}


def try_task(task: Task, config: Config, device: torch.device) -> set[str]:
    """Run the first step of client 0 and evaluate one test batch; raise InputError if one of the two fails.

    Return the trainable parameters that the loss does not use: torch.optim leaves such parameters unchanged.
    """
    dtype = PRECISIONS[config.precision]
    try:
        with restore_generators(device):
            model = copy.deepcopy(task.model).to(device, dtype).train()
            data = batches(task.clients[0], config.batch_size, config.seed, 0, 0)
            first = wrap_errors(
                lambda: to_device(next(data), device, dtype), "Task.clients[0] gives no batch"
            )
            found = _without_gradient(task, model, first())
            evaluate_first(model, task, device, dtype)
    except (torch.OutOfMemoryError, MemoryError):  # the run makes smaller blocks, or raises
        return set()
    return found


def _without_gradient(task: Task, model: nn.Module, batch: Batch) -> set[str]:
    """Return the trainable parameters without gradient; raise InputError if no parameter has a gradient."""
    check_labels(task, batch)
    what = "Task.loss fails on a batch of Task.clients[0]"
    try:
        value = wrap_errors(task.loss, what)(model, batch)
        check_loss(value)
        wrap_errors(value.backward, what)()
    except InputError as error:
        if is_one_sample(error):
            return set()
        raise
    trained = {name: p.grad is not None for name, p in model.named_parameters() if p.requires_grad}
    if not any(trained.values()):
        raise InputError(
            "Task.loss depends on no trainable parameter of Task.model: nothing would be trained"
        )
    return {name for name, used in trained.items() if not used}


def takes_channels_last(task: Task, dtype: torch.dtype) -> bool:
    """Return whether the model takes images in channels-last order; a model that calls `view` may fail."""
    cpu = torch.device("cpu")
    model: Any = copy.deepcopy(task.model).to(cpu, dtype).train()
    rows = np.arange(max(0, len(task.clients[0]) - 2), len(task.clients[0]))
    try:
        with torch.random.fork_rng(devices=[]):
            batch = channels_last(to_device(task.clients[0].batch(rows), cpu, dtype))
            task.loss(model.to(memory_format=torch.channels_last), batch)
    except Exception as error:
        return is_one_sample(error)
    return True


def cannot_batch(
    task: Task,
    config: Config,
    device: torch.device,
    *,
    dots: str | None = None,
    unused: Collection[str] = (),
) -> str | None:
    """Return the reason why clients cannot step together, with the module at fault; None if they can."""
    try:
        with restore_generators(device):
            small, trial = _two_clients(task, config)
            if changed := _changes(small, trial, device):
                return f"a step changes the attribute {changed!r}, which all clients share"
            compares = not _draws(small, trial, device)
            for precision in dict.fromkeys(("float64", config.precision)):
                lists, at = precision == config.precision, trial.replace(precision=precision)
                ours = dots if lists else None
                if not _agree(small, at, device, ours, unused, lists=lists, compares=compares):
                    return f"{_name(task.model)} computes other numbers in a step of many clients"
    except (torch.OutOfMemoryError, MemoryError):
        return None  # the run makes smaller blocks
    except Exception as error:
        return None if is_one_sample(error) else explain_failure(task.model, error)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def explain_failure(model: nn.Module, error: Exception) -> str:
    """Return a text that says which module failed, if the traceback shows the module, and how."""
    if isinstance(error, InputError):
        return str(error)
    return f"{_find_culprit(model, error)} fails in a step of many clients ({summarise_error(error)})"


def _find_culprit(model: nn.Module, error: Exception) -> str:
    """Return the name of the innermost module in the traceback, else of the model.

    The traceback may show a copy of `model`.
    """
    selves, trace = list[Any](), error.__traceback__
    while trace is not None:
        selves.append(trace.tb_frame.f_locals.get("self"))
        trace = trace.tb_next
    root = next((each for each in selves if type(each) is type(model)), model)
    names = {id(module): name for name, module in root.named_modules()}
    inner = [each for each in selves if id(each) in names]
    return _name(inner[-1], names[id(inner[-1])]) if inner else _name(model)


def _name(module: nn.Module, name: str = "") -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


class _Part:
    """The first `size` samples of a client."""

    fixed = True

    def __init__(self, samples: Samples, size: int) -> None:
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        return self.size

    def batch(self, rows: np.ndarray) -> Batch:
        return self.samples.batch(rows)


def _part(samples: Samples, size: int) -> Samples:
    """Return the first samples of a client; samples that may change (augmented samples) are read once."""
    if getattr(samples, "fixed", False):
        return _Part(samples, size)
    part = Tensors(samples.batch(np.arange(size)))
    part.fixed = False
    return part


def _two_clients(task: Task, config: Config) -> tuple[Task, Config]:
    """Return a trial task of the smallest and the largest client, each with a full and a short batch."""
    sizes = [len(data) for data in task.clients]
    b, last = config.batch_size, len(sizes) - 1
    pair = (0, last) if len(set(sizes)) == 1 else (sizes.index(min(sizes)), sizes.index(max(sizes)))
    parts = [_part(task.clients[i], min(sizes[i], b + sizes[i] % b)) for i in pair]
    slow = config.eta_local / 10 or config.eta_local  # a small rate does not amplify rounding
    trial = Config(
        clients=2, rounds=1, local_steps=str(STEPS), batch_size=b, eta_local=slow, compressor="none",
        local_optimiser=config.local_optimiser, precision=config.precision, seed=config.seed,
    )  # fmt: skip

    def steady(model: nn.Module, batch: Batch) -> Tensor:
        with Steady():
            return task.loss(model, batch)

    return replace(task, clients=parts, loss=steady, test=None, test_parts=None), trial


def _changes(task: Task, config: Config, device: torch.device) -> str:
    """Return the first non-tensor attribute that a step changes: a recorded step would not change it."""
    model, batch = _model_and_batch(task, config, device)
    before = _attributes(model)
    task.loss(model, batch)
    now = _attributes(model)
    return next((name for name in now if name not in before or now[name] != before[name]), "")


def _attributes(model: nn.Module) -> dict[str, str]:
    return {
        f"{prefix}.{name}".lstrip("."): repr(value)  # as text, since NaN is not equal to itself
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def _draws(task: Task, config: Config, device: torch.device) -> bool:
    """Return whether a step without dropout draws random numbers, so that two steps cannot be compared."""
    values = []
    for seed in (0, 1):
        model, batch = _model_and_batch(task, config, device)
        random.seed(seed)
        np.random.seed(seed)
        seed_generators(device, seed, 0, 0)
        values.append(task.loss(model, batch).detach())
    return not torch.equal(*values)


def _model_and_batch(task: Task, config: Config, device: torch.device) -> tuple[nn.Module, Batch]:
    dtype = PRECISIONS[config.precision]
    rows = np.arange(min(len(task.clients[0]), config.batch_size))
    batch = to_device(task.clients[0].batch(rows), device, dtype)
    return copy.deepcopy(task.model).to(device, dtype).train(), batch


def _agree(
    task: Task,
    config: Config,
    device: torch.device,
    dots: str | None,
    unused: Collection[str],
    *,
    lists: bool,
    compares: bool,
) -> bool:
    """Return whether clients end at the same weights together and one by one; True without `compares`."""
    dtype, plan = PRECISIONS[config.precision], Plan(config, task)
    vectors = Vectors(copy.deepcopy(task.model).to(device, dtype))
    x, b = vectors.read()
    with reproducible(device, config.precision):
        trainer = Batched(plan, task, vectors, device, lambda text: None, dots=dots, unused=unused)
        trainer.recorder.simplify(lists=lists)
        blocks = list(trainer.train(0, lambda clients: x, b, [0, 1]))
        if not compares:
            return True
        apart = _apart(plan, task, Vectors(copy.deepcopy(task.model).to(device, dtype)), device)
    x_K, b_K, loss = (
        torch.cat([getattr(block, name) for block in blocks]) for name in ("x_K", "b_K", "loss")
    )
    pairs = ((x_K - x, apart.x_K - x), (b_K, apart.b_K), (loss, apart.loss))
    noise = STEPS * torch.finfo(dtype).eps * float(x.double().norm())
    return all(_close(mine, theirs, TOLERANCE[config.precision], noise) for mine, theirs in pairs)


def _apart(plan: Plan, task: Task, vectors: Vectors, device: torch.device) -> Trained:
    """Train two clients one after another, as the reference engine does."""
    config = plan.config
    x, b = vectors.read()
    found = []
    for client in (0, 1):
        vectors.write(x, b)
        data = batches(task.clients[client], config.batch_size, config.seed, 0, client)
        half = config.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            work = local_steps(
                vectors.model,
                task.loss,
                (to_device(batch, device, x.dtype) for batch in data),
                plan.local_optimiser,
                config.eta_local,
                after(STEPS),
            )
        found.append((*vectors.read(), work.loss))
    x_K, b_K, loss = (torch.stack(each) for each in zip(*found, strict=True))
    return Trained([0, 1], [STEPS] * 2, x, x_K, b_K, loss)


def _close(mine: Tensor, theirs: Tensor, tolerance: float, noise: float) -> bool:
    """Return whether each client's vectors are close as a whole: single numbers may differ by rounding."""
    mine, theirs = (each.double().reshape(2, -1) for each in (mine, theirs))
    if not bool(torch.isfinite(theirs).all()):
        return True  # the run itself raises an error
    apart, length = (mine - theirs).norm(dim=1), theirs.norm(dim=1)
    return bool((apart <= tolerance * length + noise + 1e-12).all())
