"""`python -m paper.cfedavg`: run the paper's experiments, draw them and judge its claims; see README.md."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cfedavg import InputError
from cfedavg.sweep import CELLS, MANY, SealedCell, Study, Sweep, is_beginning, read_cells
from paper import common
from paper.cfedavg import experiment
from paper.cfedavg.claims.page import judge_all, write_page
from paper.cfedavg.studies import SMALL

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def names() -> list[str]:
    """Return the names of all experiments and studies."""
    return experiment.names() + [study.name for study in SMALL]


def find(name: str, scale: str = "paper", seeds: int = 1, **more: Any) -> Study:
    """Return the experiment or study called `name`; `more` goes to `experiment.load`."""
    experiment.check_scale(scale)
    own = {study.name: study for study in SMALL}
    if name in own:
        return dataclasses.replace(own[name], scale=scale, seeds=tuple(range(seeds)))
    if name not in experiment.names():
        raise InputError(f"NAME must be one of {', '.join(names())}, got {name!r}")
    return dataclasses.replace(experiment.load(name, scale, **more), seeds=tuple(range(seeds)))


def run(given: argparse.Namespace) -> None:
    """Run the missing cells of experiments and studies, then draw all finished cells."""
    typed = common.typed_options(given)
    chosen = [find(name, given.scale, given.seeds, typed=typed, rounds=given.rounds) for name in given.names]
    try:
        common.run_cells(chosen, given, ["python", "-m", "paper.cfedavg", "run", *given.names])
    finally:
        Sweep([find(name, given.scale) for name in given.names], given.out).draw()


def draw(given: argparse.Namespace) -> None:
    """Draw figures and write tables of the finished cells."""
    chosen = [find(name, given.scale) for name in given.names or names()]
    seeds = tuple(range(given.seeds)) if given.seeds else None
    if not Sweep(chosen, given.out, seeds, given.only or ("*",)).draw():
        raise InputError(f"{given.out} holds no cells of the scale {given.scale}; make some with `run`")


def judge(given: argparse.Namespace) -> None:
    """Judge every claim and write the page of claims."""
    found, planned = cells_of_scale(read_cells(given.out / CELLS), given.scale)
    if not found:
        raise InputError(f"{given.out} holds no cells of the scale {given.scale}; make some with `run`")
    judged = judge_all(found, planned)
    text = write_page(judged, given.words)
    common.write_page(given.page, text)
    missing = sum(finding is None for _, finding in judged)
    print(
        f"{len(judged) - missing} claims judged from {len(found)} cells, {missing} not run yet: {given.page}"
    )


def cells_of_scale(found: dict[str, SealedCell], scale: str) -> tuple[dict[str, SealedCell], dict[str, int]]:
    """Return the cells whose settings fit a scale, and the planned rounds of each cell that is a run."""
    mine, planned = dict[str, SealedCell](), dict[str, int]()
    for study in [find(name, scale) for name in names()]:
        for name, settings in study.cells(MANY).items():
            if name not in found or not is_beginning(found[name].settings, settings):
                continue
            if missing := study.missing_values(found[name]):
                raise InputError(f"the cell {name} lacks the value {missing[0]}: run this cell again")
            mine[name] = found[name]
            if "dataset" in settings:
                planned[name] = settings["rounds"]
    return {name: found[name] for name in found if name in mine}, planned


def parse(words: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser("python -m paper.cfedavg", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = common.shared_parser(RESULTS)
    runner = [shared, common.seeds_parser(1), common.run_parser()]
    adder = commands.add_parser("run", parents=runner, help="run the missing cells, and draw")
    adder.add_argument("names", nargs="+", metavar="NAME", help=", ".join(names()))
    drawer = commands.add_parser("draw", parents=[shared], help="draw figures and tables from cells")
    drawer.add_argument("names", nargs="*", metavar="NAME")
    drawer.add_argument("--only", action="append", help="cells of these names; * stands for anything")
    drawer.add_argument("--seeds", type=int, help="seeds 0, 1, ... only")
    judging = commands.add_parser("claims", parents=[shared], help="judge the claims, and write their page")
    judging.add_argument("--page", type=Path, default=HERE / "claims.md")
    judging.add_argument("--words", type=Path, default=HERE / "claims.toml", help="title, intro and [why]")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run the command and return its exit code; bad input prints one sentence and returns 2."""
    given = parse(words)
    return common.exit_code(partial({"run": run, "draw": draw, "claims": judge}[given.command], given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
