"""Trials before a run: does the task train, and do clients get the same results together as one by one?

vmap and make_fx fail on some modules, and silently compute other numbers on some other modules. So the
batched trainer is tried on the device of the run, with real samples.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.fingerprint import restore_generators
from cfedavg.simulate.cpu.replacements import join_layers, quicken
from cfedavg.simulate.engines.batched import Batched
from cfedavg.simulate.engines.requests import Request
from cfedavg.simulate.engines.trainers import is_one_sample, train_client
from cfedavg.simulate.local import (
    PRECISIONS,
    Vectors,
    batches,
    channels_last,
    evaluate_first,
    reproducible,
    seed_generators,
    to_device,
)  # fmt: skip
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.replacements import NoDropout
from cfedavg.task import Batch, Samples, Task, Tensors, check_labels, check_loss, wrap_errors

STEPS = 5  # on a GPU, step 1 runs, step 2 is recorded, later steps replay the recording
# Allowed relative difference of the two results. float64 is strict; lower precisions find only gross errors.
TOLERANCE = {"float64": 1e-6, "float32": 0.02, "tf32": 0.2, "bf16": 0.5}


def try_task(task: Task, config: Config, device: torch.device) -> set[str]:
    """Run the first step of client 0 and evaluate one test batch; raise InputError if one of the two fails.

    Return the names of the trainable parameters that the loss does not use. torch.optim leaves such
    parameters unchanged, so the engines must do so too.
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
    """Return the names of trainable parameters without gradient; raise InputError if none has a gradient."""
    check_labels(task, batch)
    what = "Task.loss(model, batch) fails on a batch of Task.clients[0]"
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
            "Task.loss depends on no trainable parameter of Task.model; it must depend on the model's output"
        )
    return {name for name, used in trained.items() if not used}


def takes_channels_last(task: Task, dtype: torch.dtype) -> bool:
    """Return whether the model takes images in channels-last order; a model that calls `view` may not."""
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


def takes_fast_layers(task: Task, config: Config) -> bool:
    """Return whether our layers for CPUs give the model's loss and gradients, as torch's layers do.

    Our layers were measured on processors with AVX2 or AVX-512. A loss that needs gradients of gradients, for
    example, cannot use them.
    """
    known = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not known or config.precision not in ("float32", "bf16"):
        return False
    cpu, half = torch.device("cpu"), config.precision == "bf16"
    model: Any = copy.deepcopy(task.model).to(cpu, torch.float32)
    model = model.to(memory_format=torch.channels_last)
    rows = np.arange(min(len(task.clients[0]), config.batch_size))
    found = []
    try:
        with restore_generators(cpu):
            batch = channels_last(to_device(task.clients[0].batch(rows), cpu, torch.float32))
            for loss, mine in ((task.loss, copy.deepcopy(model)), (quicken(task.loss), join_layers(model))):
                seed_generators(cpu, config.seed, 0, 0)
                with NoDropout(), torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False):
                    value = loss(mine.train(), batch)
                    value.backward()  # type: ignore[no-untyped-call]
                grads = [p.grad.reshape(-1) for p in mine.parameters() if p.grad is not None]
                found.append(torch.cat([value.detach().reshape(1), *grads]).double())
    except ModuleNotFoundError:  # numba is not installed; the error says what to install
        raise
    except Exception:
        return False
    theirs, mine = found
    allowed = TOLERANCE[config.precision] * theirs.norm() + torch.finfo(torch.float32).eps
    return bool((mine - theirs).norm() <= allowed)


def find_fault_in_batching(
    task: Task,
    config: Config,
    device: torch.device,
    conv_precision: str | None,
    unused: Collection[str],
    wait_for_kernels: Callable[[], None] = lambda: None,
) -> str:
    """Return the reason why clients cannot step together, with the module at fault; "" if they can.

    `wait_for_kernels` is called before our kernels are: another process may be compiling them.
    """
    try:
        with restore_generators(device):
            small, trial = two_clients(task, config)
            changed, draws = _probe(small, trial, device)
            if changed:
                return f"a step changes the attribute {changed!r}, which all clients share"
            for precision in dict.fromkeys(("float64", config.precision)):
                lists, at = precision == config.precision, trial.replace(precision=precision)
                if lists:
                    wait_for_kernels()
                ours = conv_precision if lists else None
                if not _agree(small, at, device, ours, unused, lists=lists, compares=not draws):
                    return f"{_name(task.model)} computes other numbers in a step of many clients"
    except (torch.OutOfMemoryError, MemoryError):
        pass  # the run makes smaller blocks
    except Exception as error:
        return "" if is_one_sample(error) else explain_failure(task.model, error)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return ""


def explain_failure(model: nn.Module, error: Exception) -> str:
    """Return a text that says how a step failed and, if the traceback shows it, in which module."""
    if isinstance(error, InputError):
        return str(error)
    return f"{find_culprit(model, error)} fails in a step of many clients ({summarise_error(error)})"


def find_culprit(model: nn.Module, error: Exception) -> str:
    """Return the name of the innermost module in the traceback; without such a module, that of `model`.

    The traceback may show the modules of a copy of `model`.
    """
    selves: list[Any] = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    root = next((each for each in selves if type(each) is type(model)), model)
    names = {id(module): name for name, module in root.named_modules()}
    inner = [each for each in selves if id(each) in names]
    return _name(inner[-1], names[id(inner[-1])]) if inner else _name(model)


def _name(module: nn.Module, name: str = "") -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"


class _FirstSamples:
    """The first `size` samples of a client. If reading changes them (augmentation), they are read once."""

    def __init__(self, samples: Samples, size: int) -> None:
        self.fixed, self.size = getattr(samples, "fixed", False), size
        self.samples = samples if self.fixed else Tensors(samples.batch(np.arange(size)))

    def __len__(self) -> int:
        return self.size

    def batch(self, rows: np.ndarray) -> Batch:
        return self.samples.batch(rows)


def two_clients(task: Task, config: Config) -> tuple[Task, Config]:
    """Return a trial task and its Config: the smallest and the largest client, and few steps.

    Each client has samples for a full batch and, if its last batch is short, for a short batch.
    """
    sizes = [len(data) for data in task.clients]
    b, last = config.batch_size, len(sizes) - 1
    pair = (0, last) if len(set(sizes)) == 1 else (sizes.index(min(sizes)), sizes.index(max(sizes)))
    parts = [_FirstSamples(task.clients[i], min(sizes[i], b + sizes[i] % b)) for i in pair]
    slow = config.eta_local / 10 or config.eta_local  # a small rate does not amplify rounding
    trial = Config(
        clients=2, rounds=1, local_steps=str(STEPS), batch_size=b, eta_local=slow, compressor="none",
        local_optimiser=config.local_optimiser, precision=config.precision, seed=config.seed,
    )  # fmt: skip

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with NoDropout():
            return task.loss(model, batch)

    return replace(task, clients=parts, loss=loss, test=None, test_parts=None), trial


def _probe(task: Task, config: Config, device: torch.device) -> tuple[str, bool]:
    """Return the name of a plain attribute that the loss changes, or "", and whether the loss is random.

    A plain attribute of a module is a number, text or bool; a recorded step would not change it. Steps with a
    random loss cannot be compared.
    """
    dtype, changed, values = PRECISIONS[config.precision], "", []
    rows = np.arange(min(len(task.clients[0]), config.batch_size))
    for seed in (0, 1):
        model = copy.deepcopy(task.model).to(device, dtype).train()
        batch = to_device(task.clients[0].batch(rows), device, dtype)
        random.seed(seed)
        np.random.seed(seed)
        seed_generators(device, seed, 0, 0)
        before = plain_attributes(model)
        values.append(task.loss(model, batch).detach())
        now = plain_attributes(model)
        changed = changed or next((name for name in now if now[name] != before.get(name)), "")
    return changed, not torch.equal(*values)


def plain_attributes(model: nn.Module) -> dict[str, str]:
    """Return the plain attributes of all modules: numbers, texts and bools, which no engine sends along."""
    return {
        f"{prefix}.{name}".lstrip("."): repr(value)  # as text, since NaN is not equal to itself
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    }


def _agree(
    task: Task,
    config: Config,
    device: torch.device,
    conv_precision: str | None,
    unused: Collection[str],
    *,
    lists: bool,
    compares: bool,
) -> bool:
    """Return whether clients that step together end at the same weights as clients that step one by one.

    Without `compares`, only try to step together, and return True. With `lists`, the operators of the step
    are listed (see `Recorder`).
    """
    dtype, plan = PRECISIONS[config.precision], Plan(config, task)
    vectors = Vectors(copy.deepcopy(task.model).to(device, dtype))
    x, b = vectors.read()
    with reproducible(device, config.precision):
        trainer = Batched(
            plan, task, vectors, device, lambda text: None, conv_precision=conv_precision, unused=unused
        )
        trainer.recorder.simplify(lists=lists)
        together = list(trainer.train(Request(plan, task, 0, lambda clients: x, b, [0, 1])))
        if not compares:
            return True
        apart = [train_client(plan, task, vectors, 0, x, b, client) for client in (0, 1)]
    noise = STEPS * torch.finfo(dtype).eps * float(x.double().norm()) + 1e-12
    for name in ("x_K", "b_K", "loss"):
        mine, theirs = (torch.cat([getattr(each, name) for each in trained]) for trained in (together, apart))
        if name == "x_K":
            mine, theirs = mine - x, theirs - x
        if not bool(torch.isfinite(theirs).all()):
            continue  # the run itself raises an error
        # Each client's vectors are compared as a whole: single numbers may differ by rounding.
        mine, theirs = (each.double().reshape(2, -1) for each in (mine, theirs))
        allowed = TOLERANCE[config.precision] * theirs.norm(dim=1) + noise
        if not bool(((mine - theirs).norm(dim=1) <= allowed).all()):
            return False
    return True
