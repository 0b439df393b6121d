"""`python -m paper.overview`: write README.md of this folder, which lists all tables with their verdicts."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cfedavg.sweep import CELLS, read_cells
from paper import common
from paper.cfedavg import __main__ as cfedavg
from paper.cfedavg.claims.cases import FAILS, HOLDS, PARTLY, UNDECIDED
from paper.cfedavg.claims.page import judge_all
from paper.common import NOT_RUN
from paper.niid_bench import __main__ as niid_bench
from paper.niid_bench import table as niid_table
from paper.shakespeare import __main__ as shakespeare
from paper.shakespeare import table as shakespeare_table

HERE = Path(__file__).parent
HEAD = """\
# Papers, made again

Each folder here makes a table of a paper again, or a grid of our own, on the package's public API. Its cells
lie in `results`, a sealed file for each run, and a program judges them: no verdict is written by hand.
`make paper` makes this page and the others again and trains nothing.

"""
TAIL = """
*Met*, *missed* and *open* are about the bars of a folder's page; *open* says that runs are missing. The
claims of the CFedAvg paper have verdicts of their own, which its page explains. Where nothing was run, the
table says *not run*.
"""
FEEDBACK = ("full", "cpu")  # the scales of the grid of feedbacks: a GPU's, and one for a laptop


def rows(folder: Path = HERE) -> Iterator[list[str]]:
    """Yield the rows of the table: what is made again, what of it is judged, the verdict, and where."""
    yield ["made again", "what is judged", "verdict", "page"]
    yield [
        "The CFedAvg paper: Figures 1 to 9 and studies of its theory", "its claims",
        judge_claims(folder / "cfedavg" / "results"), "[claims](cfedavg/claims.md)",
    ]  # fmt: skip
    cells = niid_bench.cells_of_scale(folder / "niid_bench" / "results")
    yield [
        "NIID-Bench, Table 3, as in Flower's baseline", "cells near the published mean",
        niid_table.verdict(niid_table.entries(cells)), "[table](niid_bench/table.md)",
    ]  # fmt: skip
    found = shakespeare.cells_of_scale(folder / "shakespeare" / "results")
    for about, verdict in shakespeare_table.verdicts(found).items():
        page = "[table](shakespeare/table.md)"
        yield ["Shakespeare, McMahan et al. (2017), Table 2", about, verdict, page]
    for scale in FEEDBACK:
        results = folder / "feedback" / "results" / scale
        count = len(list((results / CELLS).glob("*.json")))
        page = f"[page](feedback/results/{scale}/page.md)" if (results / "page.md").exists() else "–"
        yield ["All feedbacks and compressors", f"our own grid, scale {scale}: no bar", runs(count), page]


def runs(count: int) -> str:
    """Return how many runs there are, in words.

    >>> runs(0), runs(1), runs(12)
    ('not run', '1 run', '12 runs')
    """
    return f"{count} run{'s' * (count != 1)}" if count else NOT_RUN


def judge_claims(results: Path) -> str:
    """Return how many claims of the CFedAvg paper hold, hold in part, and so on."""
    found, planned = cfedavg.cells_of_scale(read_cells(results / CELLS), "paper")
    verdicts = Counter[str]()
    for claim, finding in judge_all(found, planned):
        if not claim.asked:
            known = (PARTLY, HOLDS, FAILS, UNDECIDED)  # one verdict begins with another
            text = finding.verdict if finding else NOT_RUN
            verdicts[next((each for each in known if text.startswith(each)), NOT_RUN)] += 1
    words = {
        HOLDS: "hold",
        PARTLY: "hold in part",
        FAILS: "do not hold",
        UNDECIDED: UNDECIDED,
        NOT_RUN: NOT_RUN,
    }
    told = [f"{verdicts[each]} {text}" for each, text in words.items() if verdicts[each]]
    return f"of {verdicts.total()} claims " + ", ".join(told)


def write(folder: Path = HERE) -> str:
    """Return the page as Markdown."""
    lines = list(rows(folder))
    lines.insert(1, ["---"] * len(lines[0]))
    return HEAD + "".join(f"| {' | '.join(line)} |\n" for line in lines) + TAIL


def main(words: list[str]) -> int:
    """Write the page and return the exit code."""
    parser = argparse.ArgumentParser("python -m paper.overview", description=__doc__)
    parser.add_argument("--page", type=Path, default=HERE / "README.md")
    given = parser.parse_args(words)
    return common.exit_code(lambda: common.write_page(given.page, write()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
