"""What the folders of paper/ share: the options of `run`, the sweep, verdicts and numbers as text."""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from cfedavg import Callback, InputError
from cfedavg.sweep import CELLS, SealedCell, Study, Sweep, is_beginning, read_cells

NOT_RUN = "not run"
TYPED = ("device", "precision", "data_dir")  # options of `run` that are fields of a run's configuration


class Voice(Callback):
    """A callback that prints the messages of a run and the accuracy of each round."""

    def on_message(self, text: str) -> None:
        print(text, flush=True)

    def on_row(self, row: dict[str, Any]) -> bool | None:
        if "test_accuracy" in row:
            print(f"round {row['round'] + 1}: accuracy {row['test_accuracy']:.2%}", flush=True)
        return None


def run_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that every `run` has."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this many minutes")
    parser.add_argument("--resume", action="store_true", help="continue what an earlier call began")
    parser.add_argument("--together", type=int, default=0, help="runs side by side; 0: as many as fill a GPU")
    parser.add_argument("--only", action="append", help="cells of these names; * stands for anything")
    for name in TYPED:
        parser.add_argument(f"--{name.replace('_', '-')}", help="as in `cfedavg run`")
    return parser


def seeds_parser(seeds: int | None) -> argparse.ArgumentParser:
    """Return the parser of the options --seeds, by default `seeds`, and --rounds."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--seeds", type=int, default=seeds, help="run each cell with seeds 0, 1, ...")
    parser.add_argument("--rounds", type=int, help="only the first rounds of each run")
    return parser


def shared_parser(results: Path) -> argparse.ArgumentParser:
    """Return the parser of the options that all commands have; `results` is the default folder."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--scale",
        default="paper",
        help="smoke: minutes on a laptop; paper: as published; cfedavg has small, too",
    )
    parser.add_argument("--out", type=Path, default=results, help="folder of cells")
    return parser


def parse_table(
    words: list[str], module: str, doc: str | None, folder: Path, names: Sequence[str], seeds: int | None
) -> argparse.Namespace:
    """Return the parsed command line of a folder with the commands `run NAME...` and `draw`."""
    parser = argparse.ArgumentParser(f"python -m {module}", description=doc)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = shared_parser(folder / "results")
    parents = [shared, seeds_parser(seeds), run_parser()]
    adder = commands.add_parser("run", parents=parents, help="run the missing cells")
    adder.add_argument("names", nargs="+", metavar="NAME", help=", ".join(names))
    drawer = commands.add_parser("draw", parents=[shared], help="write the page of the finished cells")
    drawer.add_argument("--page", type=Path, default=folder / "table.md")
    return parser.parse_args(words)


def typed_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a run's configuration that the user typed."""
    return {key: value for key in TYPED if (value := getattr(given, key))}


def run_cells(
    studies: Sequence[Study],
    given: argparse.Namespace,
    words: Sequence[str],
    voice: type[Callback] = Voice,
) -> bool:
    """Run the missing cells of the studies; return whether all are done.

    `words` begin the command that the cells note; `voice` is the class of each run's callback.
    """
    sweep = Sweep(studies, given.out, None, given.only or ("*",))
    sweep.open(resume=given.resume)
    command = [*words, "--scale", given.scale]
    for key in ("seeds", "rounds"):
        command += [f"--{key}", str(value)] if (value := getattr(given, key, None)) else []
    for key, value in typed_options(given).items():
        command += ["--" + key.replace("_", "-"), "DIR" if key == "data_dir" else value]
    return sweep.run(
        command=shlex.join(command),
        minutes=given.minutes,
        show=lambda *_: nullcontext(voice()),
        together=given.together,
    )


def read_planned(out: Path, planned: Mapping[str, dict[str, Any]]) -> dict[str, SealedCell]:
    """Return the cells in a folder whose settings are those in `planned`, or their first rounds."""
    found = read_cells(out / CELLS)
    return {n: c for n, c in found.items() if n in planned and is_beginning(c.settings, planned[n])}


def judge_count(good: int, ran: int, planned: int, bar: int) -> str:
    """Return the verdict of a bar on the number of good cells; `ran` of the `planned` cells have a result.

    >>> judge_count(0, 0, 48, 42), judge_count(42, 45, 48, 42)
    ('not run', 'met: 42 good, bar 42 of 48, 3 not run')
    >>> judge_count(30, 37, 48, 42), judge_count(30, 36, 48, 42)
    ('missed: 30 good, bar 42 of 48, 11 not run', 'open: 30 good, bar 42 of 48, 12 not run')
    """
    if not ran:
        return NOT_RUN
    word = "met" if good >= bar else "missed" if good + planned - ran < bar else "open"
    rest = f", {planned - ran} {NOT_RUN}" if ran < planned else ""
    return f"{word}: {good} good, bar {bar} of {planned}{rest}"


def show_mean(values: Sequence[float]) -> str:
    """Return the mean of the seeds and, if there are several, their standard deviation (n - 1).

    >>> show_mean([10.0, 10.0, 81.4]), show_mean([98.5])
    ('33.80 ± 41.22', '98.50')
    """
    if len(values) < 2:
        return f"{values[0]:.2f}"
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"


def best_so_far(cell: SealedCell) -> list[float]:
    """Return the best test accuracy up to each round."""
    known = (value or 0.0 for value in cell.values.get("test_accuracy", []))
    return list(itertools.accumulate(known, max))


def write_page(path: Path, text: str) -> None:
    """Write a page; raise InputError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror})") from None


def exit_code(command: Callable[[], None]) -> int:
    """Run a command and return its exit code; bad input prints one sentence and returns 2."""
    try:
        command()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0
