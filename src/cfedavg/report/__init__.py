"""Reports of runs: pictures, a summary table and one HTML page.

`read` reads a run folder. `groups` joins and labels the runs that differ only in their seed. `table` makes
the tables of runs and nodes. `panels` defines what each panel shows. `figures` draws panels, with one legend
or in a grid, and `axes` formats their axes. `page` writes the HTML page. `heatmaps` draws the samples of each
client and the outcome of each request to a federation's nodes.
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

# Importing matplotlib takes most of a second: only the functions that draw import it, when they are called.


@dataclass(frozen=True)
class Report:
    """The result of `write_report`: the paths of the page and the picture, and the numbers to print."""

    page: Path
    picture: Path
    headline: str
    rows: list[Row]

    def table(self) -> list[list[str]]:
        """Return the cells of the summary table as text; the first row is the header."""
        return tabulate(self.rows)


def write_run_pictures(path: Path) -> None:
    """Write `curves.png` and `report.html` into a run folder, and `nodes.png` if the run is a federation."""
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
    """Write `report.html`, `report.png` with all panels, and a PNG of each panel to the folder `out`."""
    from cfedavg.report.figures import choose_colours, draw_panel, draw_panels

    if not paths:
        raise InputError("`paths` must hold at least one run folder, got none")
    # Two spellings of the same path are one run.
    runs = list({run.path.resolve(): run for run in map(read_run, paths)}.values())
    make_folder(out, "`out`")  # fails before the drawing, which takes seconds
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
    """Return the runs that are federations, each with the picture of its nodes as PNG."""
    from cfedavg.report.heatmaps import draw_attendance

    return [(run, draw_attendance(run.nodes)) for group in groups for run in group.runs if run.nodes]


def plot_partition(counts: NDArray[Any], path: Path, title: str) -> None:
    """Write a picture of `counts`, the number of samples of each client (row) and class (column)."""
    from cfedavg.report.heatmaps import draw_partition

    draw_partition(counts, path, title)
