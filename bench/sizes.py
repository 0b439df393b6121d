"""The seconds of a step by the size of its block: they say below how many clients a step is no faster.

    python bench/sizes.py --device cuda --precision bf16 --out OUT/sizes.jsonl --minutes 8

Each line of JSON has a model, a number of clients, the milliseconds of a step, and `floor`: the number of
clients whose weights are 2^21, below which blocks shrink no further on a GPU (`_GPU_FLOOR`). A step of
`floor` clients should take about as long as a step of one client. Clients have noise images and take 50 steps
a round; the second round is timed. The first round, which compiles, is not. A line that is in the file
already is left out, and none is begun after --minutes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path

import torch

from cfedavg import Config, Task
from cfedavg.models import build_model
from cfedavg.simulate.engines import choose_engine
from cfedavg.simulate.engines.batched import _GPU_FLOOR
from cfedavg.simulate.plan import Plan
from lines import Lines

BATCH = 64


def image_shape(model: str) -> tuple[int, int, int]:
    return (3, 32, 32) if model == "resnet18" else (1, 28, 28)


def milliseconds(model: str, clients: int, given: argparse.Namespace) -> float:
    """Return the milliseconds of a local step of so many clients at once."""
    shape = image_shape(model)
    data = torch.randn(BATCH, *shape), torch.randint(10, (BATCH,))
    task = Task(build_model(model, shape, 10, 0), [data] * clients, version="1")
    config = Config(
        clients=clients, local_steps=str(given.steps), batch_size=BATCH, device=given.device,
        precision=given.precision, engine="batched", compressor="none", compressor_down="none",
        feedback="none",
    )  # fmt: skip
    engine = choose_engine(config, Plan(config, task), task)
    state = engine.begin(engine.start())
    try:
        for _ in range(2):
            began = time.perf_counter()
            state, finish = engine.round(state)
            finish()
            if given.device == "cuda":
                torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began) / given.steps
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--models", nargs="+", default=["lenet", "cnn", "resnet18"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16, 64, 150])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, help="file for the lines")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no line after so many minutes")
    given = parser.parse_args()
    torch.manual_seed(0)
    lines = Lines(given.out, given.minutes)
    for model, clients in itertools.product(given.models, given.clients):
        line = {"model": model, "clients": clients, "precision": given.precision, "device": given.device}
        if lines.is_due(**line):
            d = sum(p.numel() for p in build_model(model, image_shape(model), 10, 0).parameters())
            found = round(milliseconds(model, clients, given), 3)
            lines.add(line | {"d": d, "floor": _GPU_FLOOR // d, "milliseconds": found})


if __name__ == "__main__":
    main()
