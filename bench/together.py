"""Runs of a small model, all at once and one after another: seconds, and whether their accuracies agree.

    python bench/together.py --data DIR --rounds 50 --device cuda --precision bf16 --minutes 8 \
        --out OUT/together.jsonl

A LeNet on MNIST, 10 clients, 10 local epochs in batches of 64: 3 seeds x 5 partitions (IID, Dirichlet(0.5),
1, 2 and 3 classes a client). DIR holds MNIST as parquet files; without it, the embedded subset is used. The
script writes one line of JSON for the runs at once, one for each run by itself, and prints one that compares
them. With `--alone N` only the first N of the 15 run by themselves (5 are all partitions of seed 0), all
rounds of each; the last line gives the mean of a run and 15 times this mean. What is in the file already is
not run again, and nothing begins after --minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import cfedavg
from cfedavg import Callback
from cfedavg.sweep import Grid, SealedCell, Sweep
from lines import Line, Lines

PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"iid": True},
    "dirichlet": {"dirichlet": 0.5},
    "one": {"classes_per_client": 1},
    "two": {"classes_per_client": 2},
    "three": {"classes_per_client": 3},
}
SEEDS = 3


class Watch(Callback):
    """A callback that prints what a run says, and the time at which each of its rounds ends."""

    def __init__(self, ends: list[float]) -> None:
        self.ends = ends

    def on_message(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def on_row(self, row: dict[str, Any]) -> None:
        self.ends.append(time.perf_counter())


def grid_of(given: argparse.Namespace) -> Grid:
    base: dict[str, Any] = {
        "dataset": "mnist" if given.data else "embedded", "clients": 10, "model": "lenet",
        "local_epochs": given.epochs, "batch_size": 64, "rounds": given.rounds,
        "device": given.device, "precision": given.precision,
        "compressor": given.compressor, "compressor_down": "none", "eta_local": given.eta_local,
        "engine": given.engine,
    }  # fmt: skip
    if given.data:
        base["data_dir"] = str(given.data)
    lines = [{"name": name, "label": name, **changes} for name, changes in PARTITIONS.items()]
    return Grid.from_table("together", {"base": base, "line": lines, "seeds": SEEDS})


def run_cells(
    grid: Grid, out: Path, together: int, only: list[str]
) -> tuple[dict[str, SealedCell], dict[str, Any]]:
    """Run the cells called `only`; return them, and what was measured."""
    ends: list[float] = []

    @contextmanager
    def show(title: str, rounds: int) -> Iterator[Callback]:
        yield Watch(ends)

    sweep = Sweep([grid], out, only=only, say=lambda text: print(text, file=sys.stderr, flush=True))
    sweep.open(resume=False)
    began = time.perf_counter()
    sweep.run(command="bench/together.py", together=together, show=show)
    seconds = time.perf_counter() - began
    at_once = max(cell.made["together"] for cell in sweep.found.values())
    measured: dict[str, Any] = {"runs": len(only), "at_once": at_once, "seconds": round(seconds, 2)}
    if at_once == len(only) < len(ends):  # without the first round, which compiles
        measured["seconds_after_first_round"] = round(ends[-1] - ends[at_once - 1], 2)
    return dict(sweep.found), measured


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with MNIST as parquet files")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=10, help="local epochs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32", help="float32, bf16, tf32 or float64")
    parser.add_argument("--engine", default="auto", help="on a CPU, batched is needed to train at once")
    parser.add_argument("--compressor", default="topk(0.9)")
    parser.add_argument("--eta-local", type=float, default=0.05)
    parser.add_argument("--together", type=int, default=15, help="how many runs train at once")
    parser.add_argument("--alone", type=int, default=15, help="how many of the 15 run by themselves")
    parser.add_argument("--out", type=Path, help="file for the lines")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after so many minutes")
    return parser.parse_args()


def compare(lines: Lines, alone: list[Line]) -> Line:
    """Return a line about the times and accuracies of the runs at once and by themselves."""
    together = lines.find(how="at once")
    assert together
    last = {line["run"]: [together["final"][line["run"]], *line["final"].values()] for line in alone}
    gap = max(abs(one - other) for one, other in last.values())
    mean = abs(sum(one - other for one, other in last.values())) / len(last)
    seconds = sum(line["seconds"] for line in alone) / len(alone)
    return {
        "how": "compared", "runs_alone": len(alone), "seconds_a_run": round(seconds, 2),
        "seconds_of_15": round(15 * seconds, 1), "largest_gap": round(gap, 5), "gap_of_means": round(mean, 5),
        "final": last,
    }  # fmt: skip


def main() -> None:
    given = read_options()
    grid, lines = grid_of(given), Lines(given.out, given.minutes)
    names = list(grid.cells(range(SEEDS)))
    about = {"rounds": given.rounds, "precision": given.precision, "device": given.device}
    versions = {"cfedavg": cfedavg.__version__, "torch": torch.__version__}
    work = [({"how": "at once"}, given.together, names)]
    work += [({"how": "by itself", "run": name}, 1, [name]) for name in names[: given.alone]]
    for what, together, some in work:
        if lines.is_due(**what, **about):
            with tempfile.TemporaryDirectory(prefix="together-") as folder:
                found, measured = run_cells(grid, Path(folder) / "runs", together, some)
            final = {name: cell.values["test_accuracy"][-1] for name, cell in found.items()}
            lines.add(what | about | measured | versions | {"final": final})
    alone = [line for line in lines.found if line["how"] == "by itself"]
    if alone:
        line = compare(lines, alone)
        print(json.dumps(line), flush=True)
        # bf16 and float32 round differently in blocks of another size, and training amplifies it.
        if line["gap_of_means"] > 0.01:
            sys.exit("the mean accuracies differ by more than a point")


if __name__ == "__main__":
    main()
