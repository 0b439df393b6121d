"""Reports of runs: pictures, a summary table and one HTML page.

`runs` reads a run folder and makes curves. `table` groups runs that differ only in their seed, labels the
groups and makes the summary table. `panels` defines what each panel shows and formats its axes; `figures`
draws panels, and `exports` writes them for papers, as PDF, SVG and CSV. `heatmaps` draws how many samples of
each class each client has, and the outcome of each request to a federation's nodes; `sizes` how many samples
each client has, `tuning` how a search for a configuration went. `page` writes the HTML page.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.extras import explain_missing
from cfedavg.core.files import make_folder, write_atomic
from cfedavg.core.units import format_bytes
from cfedavg.report.runs import Group, Run, choose_metric, get_column, read_run
from cfedavg.report.table import Row, Spread, group_runs, summary, tabulate

if TYPE_CHECKING:
    from cfedavg.report.exports import FORMATS, draw_panel_as, save_as, write_csv
    from cfedavg.report.figures import Frame, as_png, default_settings, draw_grid, make_framed_figure
    from cfedavg.report.heatmaps import plot_partition
    from cfedavg.report.panels import (
        BLUE,
        GREEN,
        INK,
        MUTED,
        PLAIN,
        VERMILION,
        Lines,
        Panel,
        Pen,
        Series,
        style_axes,
    )
    from cfedavg.report.sizes import plot_sizes
    from cfedavg.report.tuning import draw_search

__all__ = [
    "BLUE", "FORMATS", "GREEN", "INK", "MUTED", "PLAIN", "VERMILION", "Frame", "Group", "Lines", "Panel",
    "Pen", "Report", "Row", "Run", "Series", "Spread", "as_png", "check_drawing", "default_settings",
    "draw_grid", "draw_panel_as", "draw_search", "format_bytes", "import_drawing", "make_framed_figure",
    "plot_partition", "plot_sizes", "read_run", "save_as", "style_axes", "summary", "write_csv",
    "write_report", "write_run_pictures",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Importing matplotlib takes most of a second: names that need it are imported when they are first used.
    for module in ("panels", "figures", "heatmaps", "exports", "sizes", "tuning") if name in __all__ else ():
        with explain_missing(PIL="report"):
            found = import_module(f"cfedavg.report.{module}")
        if hasattr(found, name):
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


def check_drawing() -> None:
    """Raise ModuleNotFoundError if what draws is not installed: before a run, which takes long, not after."""
    with explain_missing(PIL="report"):
        for library in ("matplotlib", "PIL"):
            if find_spec(library) is None:
                raise ModuleNotFoundError(name=library)


def import_drawing() -> None:
    """Import matplotlib and all that draws, which takes a second or two."""
    with explain_missing(PIL="report"):
        for module in ("figures", "page", "panels"):
            import_module(f"cfedavg.report.{module}")


def write_run_pictures(path: Path) -> None:
    """Write `curves.png` and `report.html` into a run folder, and `nodes.png` if the run is a federation."""
    import_drawing()
    from cfedavg.report import figures, page, panels

    runs = [read_run(path)]
    groups, metric = group_runs(runs), choose_metric(runs)
    made = page.make_page(groups, metric)
    main = panels.choose_panels(groups, metric, main=True)
    write_atomic(path / "curves.png", figures.draw_panels(main, groups))
    for png in made.nodes:
        write_atomic(path / "nodes.png", png)
    write_atomic(path / "report.html", made.html)


def write_report(
    paths: Sequence[Path],
    out: Path,
    *,
    formats: Sequence[str] = ("png",),
    over: str = "rounds",
    width: float | None = None,
) -> Report:
    """Compare the runs in the folders `paths`, and write the report to the folder `out`.

    The files are `report.html`, `report.png` with all panels, and each panel in each of `formats`: png, pdf,
    svg or csv. `over` is the x axis of losses and norms: rounds, total_bytes or time. `width` is that of a
    PDF or SVG in inches; the default is a column of a paper.
    """
    import_drawing()
    from cfedavg.report import exports, figures, page, panels

    if not paths:
        raise InputError("`paths` must hold at least one run folder, got none")
    width = exports.COLUMN if width is None else width
    exports.check_formats(formats, width)
    if over not in panels.AXES:
        raise InputError(f"`over` must be {', '.join(panels.AXES[:-1])} or {panels.AXES[-1]}, got {over!r}")
    # Two spellings of the same path are one run.
    runs = list({run.path.resolve(): run for run in map(read_run, paths)}.values())
    make_folder(out, "`out`")  # fails before the drawing, which takes seconds
    groups, metric = group_runs(runs), choose_metric(runs)
    if over != "rounds" and all(np.isnan(get_column(run, over)).all() for run in runs):
        raise InputError(f"`over` is {over}, which no round of these runs has; leave `over` out")
    chosen = panels.choose_panels(groups, metric, over=over)
    made = page.make_page(groups, metric, over)
    write_atomic(out / "report.png", figures.draw_panels(chosen, groups))
    for panel, form in itertools.product(chosen, dict.fromkeys(formats)):
        is_drawn = form == "png"
        data = made.panels[panel.name] if is_drawn else exports.draw_panel_as(form, panel, groups, width)
        write_atomic(out / f"{panel.name}.{form}", data)
    write_atomic(out / "report.html", made.html)
    return Report(out / "report.html", out / "report.png", page.make_headline(made.rows), made.rows)
