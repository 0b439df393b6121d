"""`python -m paper.feedback`: run the grid of feedbacks and compressors, and draw it; see README.md."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cfedavg import InputError
from cfedavg.report import save_as
from cfedavg.sweep import SealedCell
from paper import common
from paper.feedback import experiment, page, pictures
from paper.feedback.experiment import Experiment
from paper.feedback.measures import best_three, close_lines, judge_grid

RESULTS = Path(__file__).parent / "results"
PAGE = "page.md"
PICTURES = ("families", "frontier", "target")  # of each grid
SEEDS = (0, 1, 2)
STAGES = ("lines", "adam", "seeds")


def find(names: list[str], scale: str, **typed: Any) -> list[Experiment]:
    """Return the grids of these names, or all of the scale; `typed` sets fields of all runs."""
    every = {grid.name: grid for grid in experiment.load(scale, **typed)}
    if strange := [name for name in names if name not in every]:
        raise InputError(f"NAME must be one of {', '.join(every)}, got {strange[0]!r}")
    return [every[name] for name in names] if names else list(every.values())


def read_scale(out: Path, grids: list[Experiment]) -> dict[str, SealedCell]:
    """Return the cells in a folder that belong to the grids; cells of other settings are left out."""
    planned = {name: each for grid in grids for name, each in grid.cells(SEEDS).items()}
    return common.read_planned(out, planned)


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
    given.out /= given.scale
    grids = find(given.names, given.scale, **common.typed_options(given))
    words = ["python", "-m", "paper.feedback", "run", *given.names, "--stage", given.stage]
    common.run_cells(plan(grids, read_scale(given.out, grids), given.stage), given, words)


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
    adder = commands.add_parser("run", parents=[common.run_parser()], help="run the missing cells of grids")
    adder.add_argument("names", nargs="*", metavar="NAME", help="grids, such as mnist-10; all of the scale")
    adder.add_argument("--scale", default="full", help="cpu: an hour on a core; full: an hour on a GPU")
    adder.add_argument(
        "--stage", choices=STAGES, default="lines",
        help="lines: every line, seed 0; adam: the best three under the server optimiser adam; "
        "seeds: the close ones with seeds 0, 1, 2",
    )  # fmt: skip
    drawer = commands.add_parser("draw", help="draw the pictures and write the page, from cells")
    drawer.add_argument("--scale", help="cpu or full; all that have cells")
    for command in (adder, drawer):
        command.add_argument("--out", type=Path, default=RESULTS, help="folder with a folder for each scale")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run the command and return its exit code; bad input prints one sentence and returns 2."""
    given = parse(words)
    return common.exit_code(partial({"run": run, "draw": draw}[given.command], given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
