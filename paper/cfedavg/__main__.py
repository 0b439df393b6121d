"""`python -m paper.cfedavg`: run the paper's experiments, draw them and judge its claims; see README.md."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from cfedavg import Callback, InputError
from cfedavg.sweep import CELLS, MANY, SealedCell, Study, Sweep, is_beginning, read_cells
from paper.cfedavg import experiment
from paper.cfedavg.claims.page import judge_all, write_page
from paper.cfedavg.studies import SMALL

HERE = Path(__file__).parent
RESULTS = HERE / "results"


class Voice(Callback):
    """A callback that prints the messages of a run and the accuracy of each round."""

    def on_message(self, text: str) -> None:
        print(text, flush=True)

    def on_row(self, row: dict[str, Any]) -> None:
        if "test_accuracy" in row:
            print(f"round {row['round'] + 1}: accuracy {row['test_accuracy']:.2%}", flush=True)


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
    typed = {key: value for key in ("device", "precision", "data_dir") if (value := getattr(given, key))}
    chosen = [find(name, given.scale, given.seeds, typed=typed, rounds=given.rounds) for name in given.names]
    sweep = Sweep(chosen, given.out, None, given.only or ("*",))
    sweep.open(resume=given.resume)
    words = ["python", "-m", "paper.cfedavg", "run", *given.names, "--scale", given.scale]
    words += ["--seeds", str(given.seeds)] + (["--rounds", str(given.rounds)] if given.rounds else [])
    for key, value in typed.items():
        words += ["--" + key.replace("_", "-"), "DIR" if key == "data_dir" else value]
    try:
        sweep.run(command=shlex.join(words), minutes=given.minutes, show=lambda *_: nullcontext(Voice()))
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
    try:
        given.page.write_text(text)
    except OSError as error:
        raise InputError(f"cannot write {given.page} ({error.strerror})") from None
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
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--scale", default="paper", help="smoke: minutes on a laptop; small: an hour; paper")
    shared.add_argument("--out", type=Path, default=RESULTS, help="folder of cells and figures")
    some = argparse.ArgumentParser(add_help=False)
    some.add_argument("--only", action="append", help="cells of these names; * stands for anything")
    adder = commands.add_parser("run", parents=[shared, some], help="run the missing cells, and draw")
    adder.add_argument("names", nargs="+", metavar="NAME", help=", ".join(names()))
    adder.add_argument("--seeds", type=int, default=1, help="run each cell with seeds 0, 1, ...")
    adder.add_argument("--rounds", type=int, help="only the first rounds of each run")
    adder.add_argument("--minutes", type=float, default=float("inf"), help="stop after this many minutes")
    adder.add_argument("--resume", action="store_true", help="continue what an earlier call began")
    for name in ("device", "precision", "data-dir"):
        adder.add_argument(f"--{name}", help="as in `cfedavg run`")
    drawer = commands.add_parser("draw", parents=[shared, some], help="draw figures and tables from cells")
    drawer.add_argument("names", nargs="*", metavar="NAME")
    drawer.add_argument("--seeds", type=int, help="seeds 0, 1, ... only")
    judging = commands.add_parser("claims", parents=[shared], help="judge the claims, and write their page")
    judging.add_argument("--page", type=Path, default=HERE / "claims.md")
    judging.add_argument("--words", type=Path, default=HERE / "claims.toml", help="title, intro and [why]")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run the command and return its exit code; bad input prints one sentence and returns 2."""
    given = parse(words)
    try:
        {"run": run, "draw": draw, "claims": judge}[given.command](given)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
