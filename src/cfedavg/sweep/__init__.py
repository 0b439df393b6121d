"""Sweeps: grids of runs that can be stopped and resumed, with a sealed file of results for each run.

    from cfedavg.sweep import Grid, Sweep, read_table
    sweep = Sweep([Grid.from_table("mine", read_table(Path("mine.toml")))], Path("runs/mine"))
    sweep.open(resume=True)
    sweep.run(command="my script", minutes=30)
    sweep.draw()

A cell is one run of a sweep. `grid` lists the cells and draws them, `runner` runs the missing cells, and
`cells` writes each cell's results with a checksum (the seal). A study of your own is a subclass of `Study`.
"""

from cfedavg.sweep.cells import (
    CELLS,
    DamagedCell,
    SealedCell,
    Settings,
    Study,
    count_cells,
    count_rounds,
    fill_panel,
    is_beginning,
    read_cell,
    read_cells,
    round_value,
    write_cell,
    write_markdown,
)
from cfedavg.sweep.grid import Grid, Line, read_table
from cfedavg.sweep.runner import MANY, Sweep

__all__ = [
    "CELLS", "MANY", "DamagedCell", "Grid", "Line", "SealedCell", "Settings", "Study", "Sweep",
    "count_cells", "count_rounds", "fill_panel", "is_beginning", "read_cell", "read_cells", "read_table",
    "round_value", "write_cell", "write_markdown",
]  # fmt: skip
