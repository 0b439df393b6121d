"""Reports of runs: pictures, a summary table and one HTML page.

`runs` reads a run folder and makes curves. `table` groups runs that differ only in their seed, labels the
groups and makes the summary table. `panels` defines what each panel shows and formats its axes; `figures`
draws panels. `heatmaps` draws how many samples of each class each client has, and the outcome of each request
to a federation's nodes; `sizes` how many samples each client has. `page` writes the HTML page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cfedavg.core.errors import InputError
from cfedavg.core.files import make_folder, write_atomic
from cfedavg.core.units import format_bytes
from cfedavg.report.runs import Group, Run, choose_metric, read_run
from cfedavg.report.table import Row, Spread, group_runs, summary, tabulate

if TYPE_CHECKING:
    from cfedavg.report.figures import Frame, as_png, default_settings, draw_grid, make_framed_figure
    from cfedavg.report.heatmaps import plot_partition
    from cfedavg.report.panels import (
        BLUE,
        GREEN,
        INK,
        MUTED,
        PLAIN,
        VERMILION,
        Panel,
        Pen,
        Series,
        style_axes,
    )
    from cfedavg.report.sizes import plot_sizes

__all__ = [
    "BLUE", "GREEN", "INK", "MUTED", "PLAIN", "VERMILION", "Frame", "Group", "Panel", "Pen", "Report", "Row",
    "Run", "Series", "Spread", "as_png", "default_settings", "draw_grid", "format_bytes",
    "import_drawing", "make_framed_figure", "plot_partition", "plot_sizes", "read_run", "style_axes",
    "summary", "write_report", "write_run_pictures",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Importing matplotlib takes most of a second: names that need it are imported when they are first used.
    for module in ("panels", "figures", "heatmaps", "sizes") if name in __all__ else ():
        if hasattr(found := import_module(f"cfedavg.report.{module}"), name):
            return getattr(found, name)
    raise AttributeError(f"module 'cfedavg.report' has no attribute {name!r}")


@dataclass(frozen=True)
class Report:
    """The result of `write_report`: the paths of page and picture, the headline and the summary's rows."""

    page: Path
    picture: Path
    headline: str
    rows: list[Row]

    def table(self) -> list[list[str]]:
        """Return the cells of the summary table as text; the first row is the header."""
        return tabulate(self.rows)


def import_drawing() -> None:
    """Import matplotlib and all that draws, which takes a second or two."""
    for module in ("figures", "page", "panels"):
        import_module(f"cfedavg.report.{module}")


def write_run_pictures(path: Path) -> None:
    """Write `curves.png` and `report.html` into a run folder, and `nodes.png` if the run is a federation."""
    from cfedavg.report import figures, page, panels

    runs = [read_run(path)]
    groups, metric = group_runs(runs), choose_metric(runs)
    made = page.make_page(groups, metric)
    main = panels.choose_panels(groups, metric, main=True)
    write_atomic(path / "curves.png", figures.draw_panels(main, groups))
    for png in made.nodes:
        write_atomic(path / "nodes.png", png)
    write_atomic(path / "report.html", made.html)


def write_report(paths: Sequence[Path], out: Path) -> Report:
    """Compare the runs in the folders `paths`, and write the report to the folder `out`.

    The files are `report.html`, `report.png` with all panels, and a PNG of each panel.
    """
    from cfedavg.report import figures, page, panels

    if not paths:
        raise InputError("`paths` must hold at least one run folder, got none")
    # Two spellings of the same path are one run.
    runs = list({run.path.resolve(): run for run in map(read_run, paths)}.values())
    make_folder(out, "`out`")  # fails before the drawing, which takes seconds
    groups, metric = group_runs(runs), choose_metric(runs)
    made = page.make_page(groups, metric)
    every = figures.draw_panels(panels.choose_panels(groups, metric), groups)
    for name, png in {**made.panels, "report": every}.items():
        write_atomic(out / f"{name}.png", png)
    write_atomic(out / "report.html", made.html)
    return Report(out / "report.html", out / "report.png", page.make_headline(made.rows), made.rows)
