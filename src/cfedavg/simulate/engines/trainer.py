"""Trainers, which do the local work of blocks of clients; here a trainer of one client after another.

On a CPU, this trainer is the fastest for all but the smallest models.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cfedavg.core.errors import InputError
from cfedavg.simulate.local import Vectors, after, batches, local_steps, seed_generators, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.task import Batch, Loss, Task, wrap_errors

Start = Callable[[list[int]], Tensor]  # gives starting points: one x (d,) for all clients, or a row for each


@dataclass(frozen=True)
class Trained:
    """The result of the local work of a block of n clients."""

    clients: list[int]
    K: list[int]
    x_0: Tensor  # starting point: (d,), or (n, d) if clients differ
    x_K: Tensor  # (n, d)
    b_K: Tensor  # (n, buffers)
    loss: Tensor  # (n,): each client's mean loss over its steps

    def part(self, start: int, stop: int) -> Trained:
        """Return the results of clients `start` to `stop - 1` of the block."""
        rows = slice(start, stop)
        x_0 = self.x_0 if self.x_0.dim() == 1 else self.x_0[rows]
        return Trained(self.clients[rows], self.K[rows], x_0, self.x_K[rows], self.b_K[rows], self.loss[rows])


class Trainer(Protocol):
    """A trainer does the local work of clients, block after block."""

    def train(self, t: int, start: Start, b: Tensor, clients: list[int]) -> Iterator[Trained]:
        """Yield trained blocks of clients in order; client i takes K_i steps from `start` and buffers `b`."""

    def shrink(self) -> None:
        """Train fewer clients at once to save memory; raise InputError if a block is already one client."""


def too_large(device: torch.device) -> InputError:
    """Return the error for a model so large that not even one client can be trained."""
    return InputError(
        f"`device` {device}: not even one client fits into its memory; "
        "lower `batch_size`, keep `residuals` on disk, or take a smaller model"
    )


def is_one_sample(error: Exception) -> bool:
    """Return whether the error is that BatchNorm refuses a batch of one sample."""
    return "more than 1 value per channel" in str(error)


def explain_one_sample(error: ValueError, client: int) -> ValueError:
    """Return a clear error if BatchNorm refuses a batch of one sample, else the same error."""
    if not is_one_sample(error):
        return error
    return InputError(
        f"`batch_size` leaves client {client} a last batch of one sample, from which BatchNorm "
        "cannot compute a variance: choose another size, or a model with GroupNorm"
    )


def guard_loss(task: Task, client: int) -> Loss:
    """Return the task's loss as a function whose errors name the client."""
    return wrap_errors(task.loss, f"Task.loss fails on a batch of client {client}")


def guard_batches(data: Iterator[Batch], client: int) -> Iterator[Batch]:
    """Yield the batches of `data`; an error while a batch is read names the client."""
    take = wrap_errors(lambda: next(data), f"Task.clients[{client}] gives no batch")
    while True:
        yield take()


class Sequential:
    """A trainer of one client after another in one model; `prepare` converts a batch for the model."""

    def __init__(
        self,
        plan: Plan,
        task: Task,
        vectors: Vectors,
        device: torch.device,
        prepare: Callable[[Batch], Batch],
    ) -> None:
        self.plan, self.task, self.device, self.prepare = plan, task, device, prepare
        self.vectors = Vectors(copy.deepcopy(vectors.model))
        self.dtype = next(p.dtype for p in self.vectors.model.parameters() if p.requires_grad)
        self.half = plan.config.precision == "bf16"
        if device.type == "cpu":
            keep_memory()

    def train(self, t: int, start: Start, b: Tensor, clients: list[int]) -> Iterator[Trained]:
        for client in clients:
            try:
                yield self._train(t, start([client]).reshape(-1), b, client)
            except ValueError as error:
                raise explain_one_sample(error, client) from error.__cause__

    def shrink(self) -> None:
        raise too_large(self.device)

    def _train(self, t: int, x: Tensor, b: Tensor, client: int) -> Trained:
        config = self.plan.config
        self.vectors.write(x, b)
        seed_generators(self.device, config.seed, t, client)
        data = batches(self.task.clients[client], config.batch_size, config.seed, t, client)
        guarded_data = guard_batches(data, client)
        # Autocast's cache would reuse the bf16 weights of the first step in all steps.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False):
            work = local_steps(
                self.vectors.model,
                guard_loss(self.task, client),
                (self.prepare(to_device(batch, self.device, self.dtype)) for batch in guarded_data),
                self.plan.local_optimiser,
                self.plan.rates.eta_local(t),
                after(self.plan.steps.at(t, client)),
            )
        x_K, b_K = self.vectors.read()
        return Trained([client], [work.K], x, x_K[None], b_K[None], work.loss[None])


def keep_memory() -> None:
    """Tell glibc to keep freed memory; otherwise glibc maps and unmaps every large tensor anew.

    The mapping takes a quarter of the time of a step of the paper's CNN. In exchange, the process's memory
    stays at its peak.
    """
    trim, top, mapped = -1, -2, -3
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mapped, 1 << 30)
        libc.mallopt(trim, 2**31 - 1)
        libc.mallopt(top, 64 << 20)
    except (OSError, AttributeError):
        pass  # another C library: training is only slower
