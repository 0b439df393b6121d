"""Sweeps: grids of runs that stop and resume, seal what each run gave in a file, and draw it.

    from cfedavg.sweep import Grid, Sweep, read_table
    sweep = Sweep([Grid.from_table("mine", read_table(Path("mine.toml")))], Path("runs/mine"))
    sweep.open(resume=True)
    sweep.run(command="my script", minutes=30)
    sweep.draw()

`grid` says which cells there are, `runner` runs those that are missing, `cells` seals them, and `figures`
draws. A study of your own is a subclass of `Study`.
"""

from cfedavg.core.units import format_bytes
from cfedavg.report.axes import INK, MUTED, frame
from cfedavg.report.figures import as_png, default_settings
from cfedavg.report.grid import draw_grid, framed
from cfedavg.report.panels import Frame, Panel, Series
from cfedavg.report.pens import BLUE, GREEN, PLAIN, VERMILION, Pen
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
)  # fmt: skip
from cfedavg.sweep.figures import (
    count_cells,
    count_rounds,
    fill_panel,
    frame_of,
    pen_of,
    started_lines,
    started_shares,
    write_markdown,
)  # fmt: skip
from cfedavg.sweep.grid import Grid, Line, read_table
from cfedavg.sweep.runner import MANY, Sweep

__all__ = [
    "BLUE",
    "CELLS",
    "GREEN",
    "INK",
    "MANY",
    "MUTED",
    "PLAIN",
    "VERMILION",
    "DamagedCell",
    "Frame",
    "Grid",
    "Line",
    "Observer",
    "Panel",
    "Pen",
    "SealedCell",
    "Series",
    "Settings",
    "Study",
    "Sweep",
    "as_png",
    "count_cells",
    "count_rounds",
    "default_settings",
    "draw_grid",
    "fill_panel",
    "format_bytes",
    "frame",
    "frame_of",
    "framed",
    "is_beginning",
    "pen_of",
    "read_cell",
    "read_cells",
    "read_table",
    "round_value",
    "started_lines",
    "started_shares",
    "write_cell",
    "write_markdown",
]  # fmt: skip
