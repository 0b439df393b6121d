"""`python -m paper.shakespeare`: search the rate, run to 54%, and write the tables; see README.md."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from cfedavg.sweep import CELLS, SealedCell, read_cells
from paper import common
from paper.shakespeare import table
from paper.shakespeare.experiment import NAMES, choose_rates, load, read

HERE = Path(__file__).parent


class UntilTarget(common.Voice):
    """A callback that ends a run when it has reached the target."""

    def on_row(self, row: dict[str, Any]) -> bool:
        super().on_row(row)
        return bool(row.get("test_accuracy", 0) >= read("published")["target"])


def run(given: argparse.Namespace) -> None:
    """Run the missing cells of the grids; all but the search end at the target."""
    typed, words = common.typed_options(given), ["python", "-m", "paper.shakespeare", "run"]
    for name in given.names:
        rates = (
            None if name == "search" else choose_rates(cells_of_scale(given.out, given.scale), given.scale)
        )
        grid = load(name, rates, given.scale, given.seeds, typed=typed, rounds=given.rounds)
        voice = common.Voice if name == "search" else UntilTarget
        if not common.run_cells([grid], given, [*words, name], voice):
            break


def draw(given: argparse.Namespace) -> None:
    """Write the page from the finished cells; without cells it says that nothing was run."""
    found = cells_of_scale(given.out, given.scale)
    common.write_page(given.page, table.page(found, given.scale))
    print(f"{len(found)} cells: {given.page}")


def cells_of_scale(out: Path, scale: str = "paper") -> dict[str, SealedCell]:
    """Return the cells of a folder whose settings are those of a scale."""
    rates = choose_rates(read_cells(out / CELLS), scale)
    grids = [load("search", None, scale)]
    if len(rates) == len(read("grid")["work"]):
        grids += [load(name, rates, scale) for name in NAMES[1:]]
    planned = {name: settings for grid in grids for name, settings in grid.cells(range(20)).items()}
    return common.read_planned(out, planned)


def main(words: list[str]) -> int:
    """Run the command and return its exit code; bad input prints one sentence and returns 2."""
    given = common.parse_table(words, "paper.shakespeare", __doc__, HERE, NAMES, seeds=None)
    return common.exit_code(partial({"run": run, "draw": draw}[given.command], given))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
