"""Milliseconds of a local step of the paper's CNN on one core, by part: torch's layers and ours, in turns.

    OMP_NUM_THREADS=1 python bench/cpu_step.py
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 NUMBA_CPU_NAME=znver3 \
        NUMBA_CPU_FEATURES=+avx2,+fma,+avx,+sse4.2 OMP_NUM_THREADS=1 python bench/cpu_step.py

The second line computes as on a processor without AVX-512. Times are those of the thread, so that other
programs on the same core do not count. Medians over turns; a part is timed by itself, forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from cfedavg.models import cnn
from cfedavg.optimise.local import parse_local_optimiser
from cfedavg.simulate.cpu.replacements import join_layers, quicken
from cfedavg.simulate.engines import keep_memory
from cfedavg.simulate.local import after, local_steps
from cfedavg.task import cross_entropy

BATCH = 64
Work = Callable[[], Any]


def both_ways(model: nn.Module, x: Tensor, *, half: bool, fast: bool) -> Work:
    """Forward and backward of a part of the model."""
    model, x = copy.deepcopy(model), x.detach().clone().requires_grad_(x.requires_grad)
    if fast:
        join_layers(model)
    wanted = [*([x] if x.requires_grad else []), *model.parameters()]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    run = quicken(loss) if fast else loss
    dy = torch.randn_like(loss(model, x)).to(torch.bfloat16 if half else torch.float32)

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False):
            torch.autograd.grad(run(model, x), wanted, dy)

    return work


def whole_step(model: nn.Module, batch: Any, *, half: bool, fast: bool) -> Work:
    """A local step, with the loss and the update."""
    model, loss = copy.deepcopy(model), quicken(cross_entropy) if fast else cross_entropy
    if fast:
        join_layers(model)
    optimiser = parse_local_optimiser("sgd")

    def work() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False):
            local_steps(model, loss, [batch], optimiser, 1e-4, after(1))

    return work


def parts(*, half: bool, fast: bool) -> dict[str, Work]:
    """What is timed, by name."""
    torch.manual_seed(0)
    model: Any = cnn((1, 28, 28), 10)
    model = model.to(memory_format=torch.channels_last)
    x, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    middle = F.max_pool2d(F.relu(model[0](x)), 2).contiguous(memory_format=torch.channels_last)
    flat = model[:7](x)
    at = {"half": half, "fast": fast}
    return {
        "first convolution, ReLU, pooling": both_ways(model[:3], x, **at),
        "second convolution, ReLU, pooling": both_ways(model[3:6], middle.detach().requires_grad_(), **at),
        "dense layers": both_ways(model[7:], flat.detach().requires_grad_(), **at),
        "whole step": whole_step(model, (x, labels), **at),
    }


def milliseconds(work: Work) -> float:
    start = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    table = Table("precision", "part", "torch, ms", "ours, ms", "ratio")
    for precision in ("float32", "bf16"):
        pair = [parts(half=precision == "bf16", fast=fast) for fast in (False, True)]
        for name in pair[0]:
            turns = [[milliseconds(each[name]) for each in pair] for _ in range(given.turns + 5)][5:]
            theirs, mine = (statistics.median(column) for column in zip(*turns, strict=True))
            ratio = statistics.median(a / b for a, b in turns)
            table.add_row(precision, name, f"{theirs:.2f}", f"{mine:.2f}", f"{ratio:.2f}")
    Console().print(f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}", table)


if __name__ == "__main__":
    main()
