"""What a task's model and loss can take, found by trying it on a few real samples."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.fingerprint import restore_generators
from cfedavg.simulate.engines.common import PRECISIONS
from cfedavg.simulate.evaluate import evaluate_first
from cfedavg.simulate.local import batches, channels_last, to_device
from cfedavg.simulate.vectorised import Rules, Steady
from cfedavg.task import Batch, Loss, Task, check_labels, check_loss, wrap_errors

CPU = torch.device("cpu")


def try_task(task: Task, config: Config, device: torch.device) -> set[str]:
    """Take the first step of client 0 and evaluate one batch; an InputError names what fails.

    Returns the trainable parameters that the loss does not depend on: torch.optim leaves those alone.
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
    except (torch.OutOfMemoryError, MemoryError):  # the run makes smaller blocks, or says so
        return set()
    return found


def _without_gradient(task: Task, model: nn.Module, batch: Batch) -> set[str]:
    """The names of the trainable parameters to which the loss gives no gradient; not all may be so."""
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
    """Whether the model works on images that lie channels-last; one that uses `view` after them may not."""
    model: Any = copy.deepcopy(task.model).to(CPU, dtype).train()
    try:
        with torch.random.fork_rng(devices=[]):
            task.loss(model.to(memory_format=torch.channels_last), channels_last(_few(task, 0, dtype)))
    except Exception as error:
        return is_one_sample(error)
    return True


def masks_hold(model: nn.Module, loss: Loss, batch: Batch, n: int) -> bool:
    """Whether a batch of n samples, of which some do not count, trains like one without them.

    Tried with the weights as they are and with noise on them: at its start a model may give zeros, which
    hide what mixes samples.
    """
    kept = max(1, n - 2)
    batch = to_device(batch, CPU, torch.float64)
    try:
        fewer = tree_map(lambda leaf: leaf[:kept], batch)
        for noise in (0.0, 0.1, 1.0):
            noisy = _with_noise(model, noise)
            after = [_after(noisy, loss, fewer, None), _after(noisy, loss, batch, torch.arange(n) < kept)]
            if not all(torch.allclose(a, b, 1e-9, 1e-12) for a, b in zip(*after, strict=True)):
                return False
    except Exception:  # not a batch of rows, or one sample is too few
        return False
    return True


def means(model: nn.Module, loss: Loss, batch: Batch, n: int) -> int:
    """How many means over n rows a step takes."""
    rules = Rules(torch.ones(n, dtype=torch.bool, device=next(model.parameters()).device))
    with Steady(), rules, torch.no_grad():
        loss(copy.deepcopy(model), batch)
    return rules.means


def _few(task: Task, client: int, dtype: torch.dtype) -> Batch:
    """A batch of two samples, the last of a client, or of the one that it has."""
    n = len(task.clients[client])
    return to_device(task.clients[client].batch(np.arange(max(0, n - 2), n)), CPU, dtype)


def is_one_sample(error: Exception) -> bool:
    """BatchNorm's complaint: the run itself will say so, if it comes to that."""
    return "more than 1 value per channel" in str(error)


def _with_noise(model: nn.Module, scale: float) -> nn.Module:
    noisy, generator = copy.deepcopy(model).double().cpu(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=scale)
    return noisy


def _after(model: nn.Module, loss: Loss, batch: Batch, valid: Tensor | None) -> list[Tensor]:
    """The loss, the gradients and the buffers after a step without dropout."""
    trained = copy.deepcopy(model)
    with Steady(), Rules(valid):
        value = loss(trained, batch)
    value.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in trained.parameters() if p.grad is not None]
    return [each.detach().double() for each in (value, *grads, *trained.buffers())]
