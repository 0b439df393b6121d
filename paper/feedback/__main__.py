"""`python -m paper.feedback`: run the grid of feedbacks and compressors, and draw it; see README.md."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from cfedavg import Callback, InputError
from cfedavg.report import save_as
from cfedavg.sweep import CELLS, SealedCell, Sweep, is_beginning, read_cells
from paper.feedback import experiment, page, pictures
from paper.feedback.experiment import Experiment
from paper.feedback.measures import best_three, close_lines, judge_grid

RESULTS = Path(__file__).parent / "results"
PAGE = "page.md"
PICTURES = ("families", "frontier", "target")  # of each grid
SEEDS = (0, 1, 2)
STAGES = ("lines", "adam", "seeds")
_TYPED = ("device", "precision", "data_dir")  # options that are fields of a run's configuration


class Voice(Callback):
    """A callback that prints the messages of a run and its accuracy."""

    def on_message(self, text: str) -> None:
        print(text, flush=True)

    def on_row(self, row: dict[str, Any]) -> None:
        if "test_accuracy" in row:
            print(f"round {row['round'] + 1}: accuracy {row['test_accuracy']:.2%}", flush=True)


def find(names: list[str], scale: str, **typed: Any) -> list[Experiment]:
    """Return the grids of these names, or all of the scale; `typed` sets fields of all runs."""
    every = {grid.name: grid for grid in experiment.load(scale, **typed)}
    if strange := [name for name in names if name not in every]:
        raise InputError(f"NAME must be one of {', '.join(every)}, got {strange[0]!r}")
    return [every[name] for name in names] if names else list(every.values())


def read_scale(out: Path, grids: list[Experiment]) -> dict[str, SealedCell]:
    """Return the cells in a folder that belong to the grids; cells of other settings are left out."""
    planned = {name: each for grid in grids for name, each in grid.cells(SEEDS).items()}
    found = read_cells(out / CELLS)
    return {n: c for n, c in found.items() if n in planned and is_beginning(c.settings, planned[n])}


def plan(grids: list[Experiment], found: dict[str, SealedCell], stage: str) -> list[Experiment]:
    """Return the grids with the lines and seeds of a stage, which the cells of the stages before choose."""
    if stage == "lines":
        return [dataclasses.replace(grid.without_adam(), seeds=(0,)) for grid in grids]
    planned = []
    for grid in grids:
        _, outcomes = judge_grid(grid, found)
        if len(outcomes) < 2:
            raise InputError(f"`stage` {stage} needs the cells of {grid.name}: run the stage lines first")
        names = best_three(outcomes) if stage == "adam" else close_lines(outcomes)
        kept = grid.only(name + experiment.ADAM * (stage == "adam") for name in names)
        planned.append(dataclasses.replace(kept, seeds=(0,) if stage == "adam" else SEEDS))
    return planned


def run(given: argparse.Namespace) -> None:
    """Run the missing cells of a stage of grids."""
    typed = {key: value for key in _TYPED if (value := getattr(given, key))}
    out, grids = given.out / given.scale, find(given.names, given.scale, **typed)
    sweep = Sweep(plan(grids, read_scale(out, grids), given.stage), out, None, given.only or ("*",))
    sweep.open(resume=given.resume)
    words = ["python", "-m", "paper.feedback", "run", *given.names, "--scale", given.scale]
    words += ["--stage", given.stage]
    for key, value in typed.items():
        words += ["--" + key.replace("_", "-"), "DIR" if key == "data_dir" else value]
    sweep.run(
        command=shlex.join(words), minutes=given.minutes, show=lambda *_: nullcontext(Voice()),
        together=given.together,
    )  # fmt: skip


def draw(given: argparse.Namespace) -> None:
    """Draw the pictures and write the page of each scale that has cells."""
    scales = [given.scale] if given.scale else experiment.SCALES
    if not sum(draw_scale(given.out / scale, scale) for scale in scales):
        raise InputError(
            f"{given.out} holds no cells of the scale {' or '.join(scales)}; make some with `run`"
        )


def draw_scale(out: Path, scale: str) -> bool:
    """Draw the pictures and write the page of a scale; return whether it has cells."""
    grids = find([], scale)
    found = read_scale(out, grids)
    judged = page.judge(grids, found)
    for grid, target, outcomes in judged:
        note = f"scale {scale}; {page.describe_runs(found)}"
        drawn = (
            pictures.draw_families(grid, found, outcomes, target, note),
            pictures.draw_frontier(grid, found, outcomes, target, note),
            pictures.draw_target(grid, outcomes, target, note),
        )
        for kind, figure in zip(PICTURES, drawn, strict=True):
            (out / f"{grid.name}-{kind}.png").write_bytes(save_as("png", figure))
    if judged:
        (out / PAGE).write_text(page.write_page(scale, judged, found), encoding="utf-8")
        print(f"written: {out / PAGE}, and {len(PICTURES) * len(judged)} pictures beside it")
    return bool(judged)


def parse(words: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser("python -m paper.feedback", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    adder = commands.add_parser("run", help="run the missing cells of grids")
    adder.add_argument("names", nargs="*", metavar="NAME", help="grids, such as mnist-10; all of the scale")
    adder.add_argument("--scale", default="full", help="cpu: an hour on a core; full: an hour on a GPU")
    adder.add_argument(
        "--stage", choices=STAGES, default="lines",
        help="lines: every line, seed 0; adam: the best three under the server optimiser adam; "
        "seeds: the close ones with seeds 0, 1, 2",
    )  # fmt: skip
    adder.add_argument("--only", action="append", help="cells of these names; * stands for anything")
    adder.add_argument("--minutes", type=float, default=float("inf"), help="stop after this many minutes")
    adder.add_argument("--resume", action="store_true", help="continue what an earlier call began")
    adder.add_argument("--together", type=int, default=0, help="cells side by side; 0: as many as fill a GPU")
    for name in _TYPED:
        adder.add_argument(f"--{name.replace('_', '-')}", help="as in `cfedavg run`")
    drawer = commands.add_parser("draw", help="draw the pictures and write the page, from cells")
    drawer.add_argument("--scale", help="cpu or full; all that have cells")
    for command in (adder, drawer):
        command.add_argument("--out", type=Path, default=RESULTS, help="folder with a folder for each scale")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run the command and return its exit code; bad input prints one sentence and returns 2."""
    given = parse(words)
    try:
        {"run": run, "draw": draw}[given.command](given)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
