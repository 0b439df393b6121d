"""Ten or a hundred thousand clients: time and memory of each round, and what moving residuals costs.

    python bench/many.py --device cuda --clients 10000 --minutes 8 --out OUT/many
    python bench/many.py --device cuda --clients 100000 --minutes 8 --out OUT/many \
        --residuals none device disk

Each run prints one line of JSON: medians of the first and the second half of its rounds (without the first 5,
in which steps are compiled and memory grows to its size), the share of the time that the run waits for
residuals, and every round. `none` is a run with `--feedback none`, with which the other runs are compared.
A run whose line is in OUT.jsonl already is left out, and no run begins after --minutes.

Clients do one local step on 20 of 60,000 noise images; the images of a batch are read when it is needed.
Residuals on disk are in a temporary folder, which TMPDIR chooses.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from cfedavg import Config, Task, run
from cfedavg.callbacks import Callback
from cfedavg.models import build_model
from cfedavg.simulate.engines import blocks
from cfedavg.simulate.mover import Mover, Rows
from cfedavg.simulate.residuals import Put, Residuals, Writes
from lines import Lines

IMAGES, EACH = 60_000, 20  # images in all, and images of a client
SKIPPED = 5  # rounds that the summary leaves out


class Client:
    """A client's samples: images that it shares with others, taken when a batch is read."""

    def __init__(self, images: Tensor, labels: Tensor, first: int) -> None:
        self.images, self.labels, self.first = images, labels, first

    def __len__(self) -> int:
        return EACH

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        at = torch.from_numpy((self.first + rows) % IMAGES)
        return self.images[at], self.labels[at]


def make_task(model: str, clients: int) -> Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (IMAGES,), generator=generator)
    parts = [Client(images, labels, EACH * i) for i in range(clients)]
    return Task(
        build_model(model, (1, 28, 28), 10, 0), parts, test=(images[:1000], labels[:1000]), version="1"
    )


class Watch:
    """The seconds that runs have waited for residuals, and how many residuals the last run holds."""

    def __init__(self) -> None:
        self.seconds, self.held = 0.0, 0

    def timed(self, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.seconds += time.perf_counter() - began


WATCH = Watch()


class WatchedMover(Mover):
    """A mover that reports to WATCH the time in which its run can do nothing else."""

    def fetch(self, residuals: Residuals, clients: Sequence[int], like: Tensor) -> Rows:
        rows: Rows = WATCH.timed(lambda: super(WatchedMover, self).fetch(residuals, clients, like))
        return lambda some: WATCH.timed(lambda: rows(some))

    def write(self, new: Mapping[int, Tensor], put: Put, first: Callable[[], None]) -> Writes:
        writes: Writes = WATCH.timed(lambda: super(WatchedMover, self).write(new, put, first))
        return writes

    def update(self, residuals: Residuals, new: Mapping[int, Tensor]) -> Residuals:
        after = super().update(residuals, new)
        WATCH.held = len(after.norms2)
        return after


class Meter(Callback):
    """Time and memory of each round; the host's memory is the most since the last round."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rows, self._most = device, list[dict[str, Any]](), 0
        self._waited, self._used = 0.0, used_disk()
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self._most = max(self._most, resident(os.getpid()))

    def on_row(self, row: dict[str, Any]) -> None:
        found = {"seconds": row["seconds"], "waited": WATCH.seconds - self._waited, "held": WATCH.held}
        found |= {"host": max(self._most, resident(os.getpid())), "disk": used_disk() - self._used}
        if self.device.type == "cuda":
            found["gpu"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self.rows.append(found)
        self._most, self._waited = 0, WATCH.seconds

    def close(self) -> list[dict[str, Any]]:
        self._over.set()
        return self.rows


def resident(pid: int) -> int:
    """Bytes of memory of a process; pages of files in the cache are not among them."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def release() -> None:
    """Give the memory of the run before back to the system, so that this run's memory is seen."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def used_disk() -> int:
    """Bytes in use on the disk of temporary folders."""
    return shutil.disk_usage(tempfile.gettempdir()).used


def measure(given: argparse.Namespace, model: str, clients: int, a_round: int, where: str) -> dict[str, Any]:
    """Run once and return the line that is printed."""
    release()
    began = time.perf_counter()
    task = make_task(model, clients)
    d, device = sum(p.numel() for p in task.model.parameters()), torch.device(given.device)
    config = Config(
        clients=clients, local_steps="1", batch_size=EACH, participation=a_round / clients,
        rounds=given.rounds, compressor=given.compressor, device=given.device,
        eval_every=given.rounds, feedback="none" if where == "none" else "ef", engine=given.engine,
        residuals="auto" if where == "none" else where,
    )  # fmt: skip
    meter, WATCH.held = Meter(device), 0
    try:
        run(config, task, callbacks=[meter], draw=False)
    finally:
        rows = meter.close()
    about = {"model": model, "d": d, "clients": clients, "a_round": a_round, "residuals": where}
    about |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    about |= {"torch": torch.__version__, "seconds_in_all": round(time.perf_counter() - began, 1)}
    return about | summary(rows, 4 * d, where) | {"rounds": rows}


def summary(rows: list[dict[str, Any]], size: int, where: str) -> dict[str, Any]:
    """Return medians of both halves of the rounds; a residual has `size` bytes, and they live at `where`.

    Memory is counted without the residuals that are held in it: those grow until all clients took part.
    """
    left = rows[SKIPPED:-1]  # the model is evaluated after the last round
    holds = {"gpu": ("device",), "host": ("memory",)} if "gpu" in rows[0] else {"host": ("device", "memory")}
    found: dict[str, Any] = {}
    for name, half in (("first", left[: len(left) // 2]), ("second", left[len(left) // 2 :])):
        found[f"seconds_{name}"] = statistics.median(row["seconds"] for row in half)
        for place, held_here in holds.items():
            held = size if where in held_here else 0
            found[f"{place}_{name}"] = statistics.median(row[place] - held * row["held"] for row in half)
    seconds = sum(row["seconds"] for row in left)
    return found | {"waiting": sum(row["waited"] for row in left) / seconds, "held": size * rows[-1]["held"]}


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw seconds and memory of each round, a line for each run."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for line in lines:
        label = f"{line['a_round']:,} of {line['clients']:,}, {line['model']}, {line['residuals']}"
        rows = line["rounds"][SKIPPED:-1]
        for ax, name, scale in zip(axes, ("seconds", "gpu", "host"), (1, 1e9, 1e9), strict=True):
            if name in rows[0]:
                numbers = range(SKIPPED + 1, SKIPPED + 1 + len(rows))
                ax.plot(numbers, [row[name] / scale for row in rows], label=label)
    titles = ("seconds", "GB of GPU memory", "GB of host memory")
    for ax, title in zip(axes, titles, strict=True):
        ax.set(xlabel="round", title=title, ylim=(0, None))
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=6)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", nargs="+", default=["cnn"], help="cnn (582,026 numbers), mlp (50,890)")
    parser.add_argument("--clients", nargs="+", type=int, default=[10_000])
    parser.add_argument("--per-round", nargs="+", type=int, default=[100])
    parser.add_argument("--residuals", nargs="+", default=["none", "device", "memory", "disk"])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--compressor", default="topk(0.99)")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--out", type=Path, help="write the lines to OUT.jsonl and a picture to OUT.png")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many minutes")
    given = parser.parse_args()
    blocks.Mover = WatchedMover  # type: ignore[misc]
    lines = Lines(given.out and given.out.with_suffix(".jsonl"), given.minutes)
    names = ("model", "clients", "a_round", "residuals")
    for values in itertools.product(given.model, given.clients, given.per_round, given.residuals):
        setting = dict(zip(names, values, strict=True))
        if lines.is_due(**setting):
            line = measure(given, *values)
            alone = line if values[-1] == "none" else lines.find(**setting | {"residuals": "none"})
            if alone:
                line["times_without_feedback"] = line["seconds_second"] / alone["seconds_second"]
            lines.add(line, "rounds")
    if given.out and lines.found:
        draw(lines.found, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
