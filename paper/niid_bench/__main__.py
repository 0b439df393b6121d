"""`python -m paper.niid_bench`: run the grid of NIID-Bench and write its table; see README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from cfedavg.sweep import SealedCell
from paper import common
from paper.niid_bench import table
from paper.niid_bench.experiment import load, names, read

HERE = Path(__file__).parent


def run(given: argparse.Namespace) -> None:
    """Run the missing cells of data sets."""
    typed = common.typed_options(given)
    grids = [load(name, given.scale, given.seeds, typed=typed, rounds=given.rounds) for name in given.names]
    common.run_cells(grids, given, ["python", "-m", "paper.niid_bench", "run", *given.names])


def draw(given: argparse.Namespace) -> None:
    """Write the page from the finished cells; without cells it says that nothing was run."""
    found = cells_of_scale(given.out, given.scale)
    common.write_page(given.page, table.page(found, given.scale))
    print(f"{table.verdict(table.entries(found, given.scale))}: {given.page}")


def cells_of_scale(out: Path, scale: str = "paper") -> dict[str, SealedCell]:
    """Return the cells of a folder whose settings are those of a scale."""
    planned = {
        k: v for name in names() for k, v in load(name, scale).cells(range(read("grid")["seeds"])).items()
    }
    return common.read_planned(out, planned)


def main(words: list[str]) -> int:
    """Run the command and return its exit code; bad input prints one sentence and returns 2."""
    seeds = read("grid")["seeds"]
    given = common.parse_table(words, "paper.niid_bench", __doc__, HERE, names(), seeds)
    return common.exit_code(partial({"run": run, "draw": draw}[given.command], given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
