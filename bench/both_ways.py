"""Accuracy and bytes with both directions compressed: the grid from which the default was chosen, and more.

    python bench/both_ways.py GRID --data DIR --out cells.jsonl [--minutes 9] [--only REGEX]

GRID is one of GRIDS below. DIR holds folders mnist and cifar10 of parquet files. Each cell is one run; it
becomes one line of the file when it is done, so that a broken-off grid goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cfedavg
from cfedavg import Config
from cfedavg.data.tasks import build_task

COLUMNS = (
    "test_accuracy", "server_test_accuracy", "uplink_bytes", "downlink_bytes", "first_download_bytes",
    "copy_gap_norm2", "error_norm2", "delta_norm2", "seconds",
)  # fmt: skip
Cell = tuple[str, dict[str, Any]]

NONE = ("none", "none")
METHODS = {
    "none": NONE,
    "97-int4": ("topk(0.97) >> int4(256)",) * 2,
    "98-int4": ("topk(0.98) >> int4(256)",) * 2,
    "95-int4": ("topk(0.95) >> int4(256)",) * 2,
    "97-int3": ("topk(0.97) >> int3(256)",) * 2,
    "97-int2": ("topk(0.97) >> int2(256)",) * 2,
    "98-bf16": ("topk(0.98) >> bf16",) * 2,
    "99-98-bf16": ("topk(0.99) >> bf16", "topk(0.98) >> bf16"),
    "up-99-bf16": ("topk(0.99) >> bf16", "none"),
}
# Whether the copy on the grid of bf16 costs accuracy: the same selection, with the copy in float32.
GRIDS_OF_THE_COPY = {
    "97-fp32-copy": ("topk(0.97) >> int4(256)", "topk(0.97)"),
    "97-bf16-copy": ("topk(0.97) >> int4(256)", "topk(0.97) >> bf16"),
}


class SmallNet(nn.Module):
    """Two 5 x 5 convolutions and three dense layers: 62,006 parameters on CIFAR-10."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(shape[0], 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


def mnist(
    p: int, work: dict[str, int], rounds: int, methods: dict[str, Any], seeds: int = 1
) -> Iterator[Cell]:
    kind = next(iter(work)).removeprefix("local_")
    for seed in range(seeds):
        for name, (up, down) in methods.items():
            options = {
                "dataset": "mnist",
                "clients": 100,
                "classes_per_client": p,
                "batch_size": 64,
                "seed": seed,
            }
            options |= {"rounds": rounds, "compressor": up, "compressor_down": down, **work}
            yield f"mnist p{p} {kind} T{rounds} {name} s{seed}", options


def default_grid() -> Iterator[Cell]:
    for p in (2, 5, 10, 1):
        yield from mnist(p, {"local_epochs": 10}, 40, METHODS)
        yield from mnist(p, {"local_steps": 10}, 40, METHODS)
    yield from mnist(2, {"local_epochs": 10}, 40, GRIDS_OF_THE_COPY)
    yield from mnist(2, {"local_steps": 10}, 40, GRIDS_OF_THE_COPY)


def small_grid(ways: dict[str, Any] | None = None, seeds: int = 3) -> Iterator[Cell]:
    """A small net: in few rounds as in Flower's quickstart, and in more with unlike clients."""
    comps = (0.97, 0.95, 0.93, 0.9, 0.87, 0.8)
    ways = ways or {"none": NONE} | {f"{comp}-int4": (f"topk({comp}) >> int4(256)",) * 2 for comp in comps}
    base = {"dataset": "cifar10", "model": "bench.both_ways:SmallNet", "batch_size": 32}
    quick = {"clients": 4, "iid": True, "local_epochs": 1, "rounds": 8, "eta_local": 0.01}
    quick["local_optimiser"] = "sgd(momentum=0.9)"
    unlike = {"clients": 20, "dirichlet": 0.5, "local_steps": 50, "rounds": 60, "eta_local": 0.05}
    for seed in range(seeds):
        for name, (up, down) in ways.items():
            both = {"compressor": up, "compressor_down": down, "seed": seed}
            yield f"small quick {name} s{seed}", base | both | quick
            if seed == 0:
                yield f"small dirichlet {name} s{seed}", base | both | unlike


DEFAULT = ("topk(0.97, least=10000) >> int3(256)",) * 2


def totals_grid() -> Iterator[Cell]:
    """The default beside FedAvg over three seeds, and other ways to send less beside both."""
    for p in (2, 5):
        yield from mnist(p, {"local_epochs": 10}, 100, {"none": NONE, "default": DEFAULT}, seeds=3)
    others = {"bf16": ("bf16",) * 2, "int8": ("int8(256)",) * 2, "up only": (DEFAULT[0], "none")}
    yield from mnist(2, {"local_epochs": 10}, 100, others)
    yield from mnist(2, {"local_epochs": 30}, 33, {"none": NONE})


def partial_grid() -> Iterator[Cell]:
    """10 clients a round, of 100 and of 1,000."""
    for clients, rounds in ((100, 250), (1000, 500)):
        for name, options in mnist(2, {"local_epochs": 10}, rounds, {"none": NONE, "default": DEFAULT}):
            few = {"clients": clients, "participation": 10 / clients}
            yield f"{name} of {clients}", options | few


def quick_grid() -> Iterator[Cell]:
    """Flower's quickstart, simulated: five seeded pairs."""
    for name, options in small_grid({"none": NONE, "default": DEFAULT}, seeds=5):
        if "quick" in name:
            yield name, options


GRIDS = {
    "default": default_grid,
    "small": small_grid,
    "totals": totals_grid,
    "partial": partial_grid,
    "quick": quick_grid,
}


def run_cell(options: dict[str, Any], data: Path) -> dict[str, list[Any]]:
    where = {"data_dir": str(data / options["dataset"])}
    on_gpu = {"device": "cuda", "precision": "bf16"} if torch.cuda.is_available() else {}
    config = Config(**options, **where, **on_gpu)
    rows = cfedavg.run(config, replace(build_task(config))).rows
    return {name: [row.get(name) for row in rows] for name in COLUMNS if name in rows[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    done = (
        [json.loads(line)["cell"] for line in given.out.read_text().splitlines()]
        if given.out.exists()
        else []
    )
    end = time.monotonic() + 60 * given.minutes
    about = {"torch": torch.__version__, "cfedavg": cfedavg.__version__, "machine": platform.machine()}
    about["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    for cell, options in GRIDS[given.grid]():
        if cell in done or not re.search(given.only, cell) or time.monotonic() > end:
            continue
        began = time.monotonic()
        columns = run_cell(options, given.data)
        with given.out.open("a") as file:
            file.write(json.dumps({"cell": cell, "options": options, **about, "columns": columns}) + "\n")
        took, last = time.monotonic() - began, columns["test_accuracy"][-5:]
        print(f"{cell}: {100 * sum(last) / len(last):.2f}%, {took:.1f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
