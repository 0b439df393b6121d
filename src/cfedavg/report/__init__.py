"""Run folders turned into pictures, a summary table and one page to look at.

`read` reads a folder, `groups` joins and labels runs that differ only in their seed, `table` holds what came
out of runs and nodes, `panels` says what to draw in which colours, `figures` draws it on `axes`, with one
legend or in a grid as a paper does, and `page` puts everything into one file. `heatmaps` draws who has which
data, and what became of the requests to a federation's nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from cfedavg.core.errors import InputError
from cfedavg.core.files import make_folder, write_atomic
from cfedavg.report.groups import Group, group_runs
from cfedavg.report.page import make_page
from cfedavg.report.panels import choose_main_panels, choose_panels
from cfedavg.report.read import Run, choose_metric, read_run
from cfedavg.report.table import Row, Spread, make_headline, summarise, summary, tabulate

__all__ = [
    "Report", "Row", "Run", "Spread", "plot_partition", "read_run", "summary", "write_report",
    "write_run_pictures",
]  # fmt: skip

# matplotlib takes a good part of a second to import: the functions that draw do so when they are called.


@dataclass(frozen=True)
class Report:
    """The result of `write_report`: the page, the picture, and the numbers for the command to print."""

    page: Path
    picture: Path
    headline: str
    rows: list[Row]

    def table(self) -> list[list[str]]:
        """Return the summary as text, a header first."""
        return tabulate(self.rows)


def write_run_pictures(path: Path) -> None:
    """Write `curves.png` and `report.html` into the folder of a run; a federation gets `nodes.png` too."""
    from cfedavg.report.figures import choose_colours, draw_panel, draw_panels

    runs = [read_run(path)]
    groups, metric = group_runs(runs), choose_metric(runs)
    pictures = {panel: draw_panel(panel, groups) for panel in choose_panels(groups, metric)}
    federations = _federations(groups)
    page = make_page(groups, summarise(groups, metric), choose_colours(groups), pictures, federations)
    write_atomic(path / "curves.png", draw_panels(choose_main_panels(metric), groups))
    for _, png in federations:
        write_atomic(path / "nodes.png", png)
    write_atomic(path / "report.html", page)


def write_report(paths: Sequence[Path], out: Path) -> Report:
    """Compare runs: write `report.html`, `report.png` with all panels, and a PNG for each panel to `out`."""
    from cfedavg.report.figures import choose_colours, draw_panel, draw_panels

    if not paths:
        raise InputError("a report needs at least one run folder")
    # The same folder, spelt in two ways, is one run.
    runs = list({run.path.resolve(): run for run in map(read_run, paths)}.values())
    make_folder(out, "`out`")  # before the drawing, which takes seconds
    groups, metric = group_runs(runs), choose_metric(runs)
    rows = summarise(groups, metric)
    panels = choose_panels(groups, metric)
    pictures = {panel: draw_panel(panel, groups) for panel in panels}
    for panel, png in pictures.items():
        write_atomic(out / f"{panel.name}.png", png)
    write_atomic(out / "report.png", draw_panels(panels, groups))
    page = make_page(groups, rows, choose_colours(groups), pictures, _federations(groups))
    write_atomic(out / "report.html", page)
    return Report(out / "report.html", out / "report.png", make_headline(rows), rows)


def _federations(groups: Sequence[Group]) -> list[tuple[Run, bytes]]:
    """Return the runs that had nodes, each with a picture of them."""
    from cfedavg.report.heatmaps import draw_attendance

    return [(run, draw_attendance(run.nodes)) for group in groups for run in group.runs if run.nodes]


def plot_partition(counts: NDArray[Any], path: Path, title: str) -> None:
    """Draw who has which data, from the number of samples of each client (row) and class (column)."""
    from cfedavg.report.heatmaps import draw_partition

    draw_partition(counts, path, title)
