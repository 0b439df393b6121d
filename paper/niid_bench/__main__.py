"""`python -m paper.niid_bench`: run the grid of NIID-Bench and write its table; see README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from cfedavg import InputError
from cfedavg.sweep import CELLS, SealedCell, is_beginning, read_cells
from paper import common
from paper.niid_bench import table
from paper.niid_bench.experiment import load, names, read

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def run(given: argparse.Namespace) -> None:
    """Run the missing cells of data sets."""
    typed = common.typed_options(given)
    grids = [load(name, given.scale, given.seeds, typed=typed, rounds=given.rounds) for name in given.names]
    common.run_cells(grids, given, ["python", "-m", "paper.niid_bench", "run", *given.names])


def draw(given: argparse.Namespace) -> None:
    """Write the page of the table from the finished cells."""
    if not (found := cells_of_scale(given.out, given.scale)):
        raise InputError(f"{given.out} holds no cells of the scale {given.scale}; make some with `run`")
    common.write_page(given.page, table.page(found, given.scale))
    print(f"{table.verdict(table.entries(found, given.scale))}: {given.page}")


def cells_of_scale(out: Path, scale: str = "paper") -> dict[str, SealedCell]:
    """Return the cells of a folder whose settings are those of a scale."""
    planned = {k: v for name in names() for k, v in load(name, scale).cells(range(read("grid")["seeds"])).items()}
    found = read_cells(out / CELLS)
    return {
        name: cell
        for name, cell in found.items()
        if name in planned and is_beginning(cell.settings, planned[name])
    }


def parse(words: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser("python -m paper.niid_bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = common.shared_parser(RESULTS)
    runner = [shared, common.run_parser(seeds=read("grid")["seeds"])]
    adder = commands.add_parser("run", parents=runner, help="run the missing cells")
    adder.add_argument("names", nargs="+", metavar="NAME", help=", ".join(names()))
    drawer = commands.add_parser("draw", parents=[shared], help="write the page of the finished cells")
    drawer.add_argument("--page", type=Path, default=HERE / "table.md")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Run the command and return its exit code; bad input prints one sentence and returns 2."""
    given = parse(words)
    return common.exit_code(partial({"run": run, "draw": draw}[given.command], given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
