"""Local work of one client after another: what is fastest on a CPU for all but the smallest models."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cfedavg.simulate.engines.base import Start, Trained, too_large
from cfedavg.simulate.engines.common import explained, guarded_batches, guarded_loss, seed_generators
from cfedavg.simulate.local import Vectors, after, batches, local_steps, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.task import Batch, Task


class Sequential:
    """Trains each client in one model; `prepare` lays out a batch as the model's weights are."""

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
                raise explained(error, client) from error.__cause__

    def shrink(self) -> None:
        raise too_large(self.device)

    def _train(self, t: int, x: Tensor, b: Tensor, client: int) -> Trained:
        config = self.plan.config
        self.vectors.write(x, b)
        seed_generators(self.device, config.seed, t, client)
        data = batches(self.task.clients[client], config.batch_size, config.seed, t, client)
        # A cache would keep the halves of the first step's weights for all steps.
        half = torch.autocast(self.device.type, torch.bfloat16, enabled=self.half, cache_enabled=False)
        with half:
            work = local_steps(
                self.vectors.model,
                guarded_loss(self.task, client),
                (
                    self.prepare(to_device(batch, self.device, self.dtype))
                    for batch in guarded_batches(data, client)
                ),
                self.plan.local_optimiser,
                self.plan.rates.eta_local(t),
                after(self.plan.steps.at(t, client)),
            )
        x_K, b_K = self.vectors.read()
        return Trained([client], [work.K], x, x_K[None], b_K[None], work.loss[None])


def keep_memory() -> None:
    """Tells glibc to keep freed memory: without it every large tensor is mapped and unmapped anew.

    That costs a step of the paper's CNN a quarter of its time. The process's memory stays at its peak.
    """
    trim, top, mapped = -1, -2, -3
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mapped, 1 << 30)
        libc.mallopt(trim, 2**31 - 1)
        libc.mallopt(top, 64 << 20)
    except (OSError, AttributeError):
        pass  # another C library: slower, that is all
