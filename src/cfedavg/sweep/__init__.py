"""Sweeps: grids of runs that can be stopped and resumed, with a sealed file of results for each run.

    from cfedavg.sweep import Grid, Sweep, read_table
    sweep = Sweep([Grid.from_table("mine", read_table(Path("mine.toml")))], Path("runs/mine"))
    sweep.open(resume=True)
    sweep.run(command="my script", minutes=30)
    sweep.draw()

A cell is one run of a sweep. `grid` lists the cells, `runner` runs the missing cells, `cells` writes each
cell's results with a checksum (the seal), and `figures` draws. A study of your own is a subclass of `Study`.
"""

from cfedavg.core.units import format_bytes
from cfedavg.report.figures import Frame, as_png, default_settings, draw_grid, make_framed_figure
from cfedavg.report.panels import BLUE, GREEN, INK, MUTED, PLAIN, VERMILION, Panel, Pen, Series, style_axes
from cfedavg.simulate.run import Observer
from cfedavg.sweep.cells import (
    CELLS,
    DamagedCell,
    SealedCell,
    Settings,
    Study,
    is_beginning,
    read_cell,
    read_cells,
    round_value,
    write_cell,
)
from cfedavg.sweep.figures import (
    count_cells,
    count_rounds,
    fill_panel,
    frame_of,
    pen_of,
    started_lines,
    started_shares,
    write_markdown,
)
from cfedavg.sweep.grid import Grid, Line, read_table
from cfedavg.sweep.runner import MANY, Sweep

__all__ = [
    "BLUE", "CELLS", "GREEN", "INK", "MANY", "MUTED", "PLAIN", "VERMILION", "DamagedCell", "Frame", "Grid",
    "Line", "Observer", "Panel", "Pen", "SealedCell", "Series", "Settings", "Study", "Sweep", "as_png",
    "count_cells", "count_rounds", "default_settings", "draw_grid", "fill_panel", "format_bytes",
    "frame_of", "is_beginning", "make_framed_figure", "pen_of", "read_cell", "read_cells", "read_table",
    "round_value", "started_lines", "started_shares", "style_axes", "write_cell", "write_markdown",
]  # fmt: skip
