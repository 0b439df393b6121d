"""How the cost of a round grows: with the clients that exist, with those of a round, with K and with d.

    python bench/growth.py > results/speed/growth.json
    python bench/growth.py --draw results/speed/growth.json --out docs/images/growth.png

One process, one thread; clients of 60 samples each that share one data set, so that 10,000 of them cost
nothing to make. Every point is the median of several rounds after a warm-up; points are taken in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.progress import track
from torch import nn

from cfedavg import Config, Task
from cfedavg.report import BLUE, style_axes
from cfedavg.simulate.engines import choose_engine
from cfedavg.simulate.plan import Plan

FEATURES, CLASSES, SAMPLES, REPEATS = 64, 10, 60, 5
Rounds = Callable[[], None]


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))


def rounds(m: int, a_round: int, K: int, width: int, engine: str, device: str) -> Rounds:
    """A round, ready to run again and again."""
    torch.manual_seed(0)
    data = torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,))
    task = Task(mlp(width), [data] * m)
    config = Config(
        clients=m, participation=a_round / m, local_steps=str(K), batch_size=20, engine=engine, device=device,
        residuals="memory", compressor="topk(0.99)",
    )  # fmt: skip
    made = choose_engine(config, Plan(config, task), task)
    state = [made.begin(made.start())]

    def one() -> None:
        state[0], finish = made.round(state[0])
        finish()

    return one


def curves(device: str) -> dict[str, dict[Any, Rounds]]:
    """By what grows: a round for each of its values."""
    base = {"m": 100, "a_round": 10, "K": 10, "width": 256, "engine": "sequential", "device": device}

    def vary(name: str, values: tuple[int, ...]) -> dict[Any, Rounds]:
        return {value: rounds(**base | {name: value}) for value in values}  # type: ignore[arg-type]

    base_batched = base | {"engine": "batched", "width": 16}
    return {
        "clients that exist, m (10 a round)": vary("m", (10, 100, 1000, 10_000)),
        "clients of a round (m = 100)": vary("a_round", (1, 3, 10, 30, 100)),
        "local steps, K": vary("K", (1, 3, 10, 30, 100)),
        "parameters, d": {
            (FEATURES + 1) * w + (w + 1) * CLASSES: rounds(**base | {"width": w})  # type: ignore[arg-type]
            for w in (16, 64, 256, 1024, 4096)
        },
        "clients of a round, at once": {
            n: rounds(**base_batched | {"a_round": n})
            for n in (1, 3, 10, 30, 100)  # type: ignore[arg-type]
        },
    }


def measure(device: str) -> dict[str, dict[Any, float]]:
    """Return the median seconds of a round, for each value of what grows."""
    work = curves(device)
    seconds: dict[str, dict[Any, list[float]]] = {
        name: {at: [] for at in each} for name, each in work.items()
    }
    for _ in track(range(REPEATS + 1), "measuring", console=Console(stderr=True)):
        for name, each in work.items():
            for at, one in each.items():
                began = time.perf_counter()
                one()
                seconds[name][at].append(time.perf_counter() - began)
    return {
        name: {at: statistics.median(times[1:]) for at, times in each.items()}
        for name, each in seconds.items()
    }


def draw(found: dict[str, dict[Any, float]], out: Path) -> None:
    """Draw a panel for each thing that grows, two in a row."""
    rows = math.ceil(len(found) / 2)
    figure = Figure(figsize=(7.5, 2.5 * rows), layout="constrained")
    for place, (name, points) in enumerate(found.items(), 1):
        axes = figure.add_subplot(rows, 2, place)
        style_axes(axes)
        axes.loglog(list(map(int, points)), list(points.values()), "o-", color=BLUE)
        axes.set(xlabel=name, ylabel="seconds a round", ylim=(0.005, 2))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/growth.png"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw what was printed before instead")
    given = parser.parse_args()
    found = json.loads(given.draw.read_text()) if given.draw else measure(given.device)
    if not given.draw:
        print(json.dumps(found, indent=1))
    draw(found, given.out)


if __name__ == "__main__":
    main()
