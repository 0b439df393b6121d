"""What a trainer is, and the trainer that runs the local steps of one client after another.

On a CPU, one client after another is the fastest for all but the smallest models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from cfedavg.core.errors import InputError
from cfedavg.simulate.cpu.replacements import join_layers, quicken
from cfedavg.simulate.engines.requests import Request, Trained
from cfedavg.simulate.local import Vectors, after, batches, local_steps, seed_generators, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.task import Batch, Task, wrap_errors


class Trainer(Protocol):
    """A trainer runs the local steps of clients, one block of clients after another."""

    def train(self, request: Request) -> Iterator[Trained]:
        """Train the clients; yield the results of one block after another, in the order of the clients."""

    def shrink(self) -> None:
        """Train fewer clients at once from now on; raise InputError if a block is already one client."""


def too_large(device: torch.device) -> InputError:
    """Return the error that the device has too little memory to train even one client."""
    return InputError(
        f"`device` {device}: not even one client fits into its memory; "
        "lower `batch_size`, keep `residuals` on disk, or take a smaller model"
    )


def is_one_sample(error: Exception) -> bool:
    """Return whether BatchNorm raised the error, because a batch has only one sample."""
    return "more than 1 value per channel" in str(error)


def explain_one_sample(error: ValueError, client: int) -> ValueError:
    """Return a clear error if BatchNorm raised `error` for a batch of one sample, else `error`."""
    if not is_one_sample(error):
        return error
    return InputError(
        f"`batch_size` leaves client {client} a last batch of one sample, from which BatchNorm "
        "cannot compute a variance: choose another `batch_size`, or a model with GroupNorm"
    )


def train_client(
    plan: Plan,
    task: Task,
    vectors: Vectors,
    t: int,
    x: Tensor,
    b: Tensor,
    client: int,
    prepare: Callable[[Batch], Batch] = lambda batch: batch,
    correction: Tensor | None = None,
) -> Trained:
    """Train one client from parameters `x` and buffers `b` (lines 5 to 9 of Algorithm 1).

    The client trains in `vectors.model`, which is overwritten. `prepare` converts a batch for the model.
    `correction` is c - c_i, with control variates. An error in the user's loss or data names the client.
    """
    config, like = plan.config, next(p for p in vectors.model.parameters() if p.requires_grad)
    vectors.write(x, b)
    seed_generators(like.device, config.seed, t, client)
    data = batches(task.clients[client], config.batch_size, config.seed, t, client)
    take = wrap_errors(lambda: next(data), f"Task.clients[{client}] gives no batch")
    half = config.precision == "bf16"
    try:
        # Autocast's cache would reuse the bf16 weights of the first step in all steps.
        with torch.autocast(like.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            work = local_steps(
                vectors.model,
                wrap_errors(task.loss, f"Task.loss fails on a batch of client {client}"),
                (prepare(to_device(take(), like.device, like.dtype)) for _ in count()),
                plan.local_optimiser,
                plan.rates.eta_local(t),
                after(plan.steps.at(t, client)),
                () if correction is None else vectors.split(correction),
            )
    except ValueError as error:
        raise explain_one_sample(error, client) from error.__cause__
    x_K, b_K = vectors.read()
    return Trained([client], [work.K], x, x_K[None], b_K[None], work.loss[None])


class Sequential:
    """A trainer that trains one client after another; `prepare` converts a batch for the model.

    With `fast`, the model is computed by our layers for CPUs.
    """

    def __init__(
        self,
        vectors: Vectors,
        device: torch.device,
        prepare: Callable[[Batch], Batch],
        *,
        fast: bool = False,
    ) -> None:
        self.device, self.prepare, self.fast = device, prepare, fast
        self.vectors = Vectors(copy.deepcopy(vectors.model))
        if fast:
            join_layers(self.vectors.model)
        self._tasks: dict[int, tuple[Task, Task]] = {}  # by id: a task, and the task with our layers

    def train(self, request: Request) -> Iterator[Trained]:
        run = request.plan, self._quick(request.task), self.vectors, request.t
        for client in request.clients:
            x, correction = request.begin(client)
            yield train_client(*run, x, request.b, client, self.prepare, correction)

    def _quick(self, task: Task) -> Task:
        """Return the task; with `fast`, its loss computes the model by our layers."""
        if not self.fast:
            return task
        if id(task) not in self._tasks:
            self._tasks[id(task)] = task, replace(task, loss=quicken(task.loss))
        return self._tasks[id(task)][1]

    def shrink(self) -> None:
        raise too_large(self.device)
