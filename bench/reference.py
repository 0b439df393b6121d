"""How much of a round is local SGD? The reference engine against plain PyTorch, in one run on this machine.

Both do the same steps on the same batches of the paper's CNN. Plain PyTorch does nothing else; the engine
also writes and reads the model, adds the residual, compresses, encodes and averages. Ratios are what
counts: absolute times depend on the machine.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from itertools import islice

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cfedavg import Config, Task
from cfedavg.data.tasks import build_task
from cfedavg.simulate.engines import ReferenceEngine
from cfedavg.simulate.local import batches
from cfedavg.simulate.plan import Plan

CLIENTS, K, BATCH, REPEATS = 4, 10, 64, 9
FLOOR = "plain PyTorch"


def plain(task: Task) -> None:
    """K steps of each client, one model after another, nothing else."""
    for client in range(CLIENTS):
        optimiser = torch.optim.SGD(task.model.parameters(), lr=0.01)
        for batch in islice(batches(task.clients[client], BATCH, 0, 0, client), K):
            optimiser.zero_grad()
            task.loss(task.model, batch).backward()
            optimiser.step()


def rounds(task: Task, base: Config, compressor: str) -> Callable[[], object]:
    """A round of the reference engine, ready to run."""
    engine = ReferenceEngine(Plan(base.replace(compressor=compressor), task), task, torch.device("cpu"))
    start = engine.start()
    return lambda: engine.round(start)


def measure(contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each contender, in turns: a machine that slows down does so for all of them."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in track(range(REPEATS + 1), "measuring", transient=True):
        for name, work in contenders.items():
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    return {name: found[1:] for name, found in times.items()}  # the first turn warmed up


def main() -> None:
    base = Config(clients=CLIENTS, local_steps=str(K), batch_size=BATCH, eta_local=0.01, model="cnn")
    task = build_task(base)
    texts = ("none", "topk(0.99)", "topk(0.99) >> bf16", "rd(0.99)", "qsgd(16)")
    times = measure({FLOOR: lambda: plain(task)} | {text: rounds(task, base, text) for text in texts})
    table = Table("who", "s a round", "steps/s", "against plain PyTorch: median", "least", "most")
    for name, found in times.items():
        ratios = sorted(mine / floor for mine, floor in zip(found, times[FLOOR], strict=True))
        middle = statistics.median(found)
        shown = f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"
        table.add_row(name, f"{middle:.3f}", f"{CLIENTS * K / middle:.1f}", *shown)
    Console().print(table)
    Console().print(
        f"{CLIENTS} clients x {K} steps of {BATCH}, the paper's CNN; {REPEATS} turns; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    )


if __name__ == "__main__":
    main()
