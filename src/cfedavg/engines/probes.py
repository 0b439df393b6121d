"""What a task's model and loss can take, found by trying it on a few real samples."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cfedavg.errors import first_line
from cfedavg.local import channels_last, to_device
from cfedavg.stack import Rules, Sgd, Stack, Step
from cfedavg.task import Batch, Loss, Task

CPU = torch.device("cpu")


def cannot_batch(task: Task, dtype: torch.dtype | None = None, dots: str | None = None) -> str | None:
    """Why vmap cannot take the task's steps, found by taking one with two clients; None if it can.

    With `dots` convolutions give images that lie channels-last, as our kernels do on a GPU.
    """
    model, dtype = _copied(task, dtype)
    step = Step(model, task.loss, Sgd(), dots=dots)
    try:
        with torch.random.fork_rng(devices=[]):  # dropout must not draw from the user's generator
            first, last = (_few(task, i, dtype) for i in (0, -1))
            batch = tree_map(lambda *leaves: torch.stack(leaves), first, last)
            step(_twice(model, dtype), batch, None, None, torch.tensor(0.0, dtype=dtype))
    except Exception as error:
        return None if _one_sample(error) else first_line(error)
    return None


def takes_channels_last(task: Task, dtype: torch.dtype) -> bool:
    """Whether the model works on images that lie channels-last; one that uses `view` after them may not."""
    model: Any = _copied(task, dtype)[0]
    try:
        with torch.random.fork_rng(devices=[]):
            task.loss(model.to(memory_format=torch.channels_last), channels_last(_few(task, 0, dtype)))
    except Exception as error:
        return _one_sample(error)
    return True


def unused(task: Task, dtype: torch.dtype) -> set[str]:
    """The trainable parameters that the loss does not depend on: torch.optim leaves those alone."""
    model = _copied(task, dtype)[0]
    try:
        with torch.random.fork_rng(devices=[]):
            task.loss(model, _few(task, 0, dtype)).backward()  # type: ignore[no-untyped-call]
    except Exception:  # whatever it is, the run itself will meet it and say so
        return set()
    return {name for name, p in model.named_parameters() if p.requires_grad and p.grad is None}


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
    rules = Rules(torch.ones(n, dtype=torch.bool, device=next(model.parameters()).device), steady=True)
    with rules, torch.no_grad():
        loss(copy.deepcopy(model), batch)
    return rules.means


def _few(task: Task, client: int, dtype: torch.dtype) -> Batch:
    """A batch of two samples, the last of a client, or of the one that it has."""
    n = len(task.clients[client])
    return to_device(task.clients[client].batch(np.arange(max(0, n - 2), n)), CPU, dtype)


def _copied(task: Task, dtype: torch.dtype | None) -> tuple[nn.Module, torch.dtype]:
    """The model to try things on, in training, on the CPU; and its precision, its own if none is given."""
    dtype = dtype or next(p.dtype for p in task.model.parameters() if p.requires_grad)
    return copy.deepcopy(task.model).to(CPU, dtype).train(), dtype


def _one_sample(error: Exception) -> bool:
    """BatchNorm's complaint: the run itself will say so, if it comes to that."""
    return "more than 1 value per channel" in str(error)


def _twice(model: nn.Module, dtype: torch.dtype) -> Stack:
    """The stack of two equal clients."""
    trained = [torch.stack([p.detach(), p.detach()]) for p in model.parameters() if p.requires_grad]
    return Stack(trained, [], [torch.stack([b, b]) for b in model.buffers()], torch.zeros(2, dtype=dtype))


def _with_noise(model: nn.Module, scale: float) -> nn.Module:
    noisy, generator = copy.deepcopy(model).double().cpu(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=scale)
    return noisy


def _after(model: nn.Module, loss: Loss, batch: Batch, valid: Tensor | None) -> list[Tensor]:
    """The loss, the gradients and the buffers after a step without dropout."""
    trained = copy.deepcopy(model)
    with Rules(valid, steady=True):
        value = loss(trained, batch)
    value.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in trained.parameters() if p.grad is not None]
    return [each.detach().double() for each in (value, *grads, *trained.buffers())]
