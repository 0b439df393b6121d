"""The paper's experiments: grids of runs in `experiments/`, at three scales, drawn in the paper's layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from matplotlib.figure import Figure

from cfedavg import InputError
from cfedavg.report import PLAIN, Lines, Panel, Pen, Series, draw_grid
from cfedavg.sweep import Grid, Line, SealedCell, fill_panel, read_table
from paper.cfedavg import tables

FOLDER = Path(__file__).parent / "experiments"
SCALES = ("smoke", "small", "paper")
DRAWINGS = ("curves", "budget", "norms")
# The colours of the paper's compressors: a hue for each kind, darker for the one that sends less.
COLOURS = {"none": PLAIN, "topk(0.9)": "#56B4E9", "topk(0.99)": "#0072B2", "rd(0.9)": "#E69F00",
           "rd(0.99)": "#D55E00"}  # fmt: skip
_OTHERS = ("#009E73", "#CC79A7", "#882255", "#999933")
# The colour of each p, darker for fewer classes per client.
_SHARES = {10: "#A6A61F", 5: "#35A06F", 2: "#31688E", 1: "#440154"}


@dataclass(frozen=True)
class Experiment(Grid):
    """A grid of runs from the paper; `draw` names the layout of the figure and the kind of table."""

    draw: str = "curves"

    def figure(self, found: Mapping[str, SealedCell], note: str) -> Figure:
        """Return the figure of the finished cells."""
        return _draw_norms(self, found, note) if self.draw == "norms" else super().figure(found, note)

    def panels(self, found: Mapping[str, SealedCell]) -> list[tuple[Panel, Lines]]:
        """Return the panels of the figure."""
        return list(chain(*_arrange_norms(self, found))) if self.draw == "norms" else super().panels(found)

    def table(self, found: Mapping[str, SealedCell]) -> list[list[str]]:
        """Return the table of the numbers behind the figure, the header first."""
        return tables.table(self, found)


def names() -> list[str]:
    """Return the names of the experiments, the paper's figures first."""
    return sorted((path.stem for path in FOLDER.glob("*.toml")), key=lambda name: (name[:3] != "fig", name))


def load(name: str, scale: str = "paper", **more: Any) -> Experiment:
    """Return an experiment at a scale; `more` sets fields of the Grid, and `typed` options of its runs."""
    check_scale(scale)
    return from_table(name, read_table(FOLDER / f"{name}.toml"), scale, **more)


def check_scale(scale: str) -> None:
    """Raise InputError if there is no such scale."""
    if scale not in SCALES:
        raise InputError(f"`scale` must be smoke, small or paper, got {scale!r}")


def from_table(name: str, table: Mapping[str, Any], scale: str, **more: Any) -> Experiment:
    """Return the experiment of a TOML table: the keys of a grid, and `paper`, `draw` and `scale`."""
    rest = dict(table)
    draw, scales, own = rest.pop("draw", "curves"), rest.pop("scale", {}), rest["base"]
    rest["subtitle"] = rest.pop("paper")
    if draw == "budget":
        rest["over"] = ["model_sizes_sent", "client_bytes"]
    rest["line"] = [_line(line, rest, scale) for line in rest["line"]]
    prefix, note = own["dataset"], f"scale {scale}"
    typed = {**scales.get(scale, {}), **more.pop("typed", {})}
    if scale == "smoke":  # starting processes takes longer than a smoke run
        typed.setdefault("workers", 1)
    if (data := typed.get("dataset", prefix)) != prefix:
        note += ", on embedded digits" if data == "embedded" else f", on {data}"
    made = Experiment.from_table(name, rest, typed=typed, note=note, draw=draw, **more)
    # Cells are named after the paper's data set, even if a smaller scale uses another.
    return dataclasses.replace(made, prefix=prefix)


def _line(line: Mapping[str, Any], table: Mapping[str, Any], scale: str) -> dict[str, Any]:
    """Return the table of a line for the grid, with its values at `scale` and a colour."""
    changes = {key: value for key, value in line.items() if key not in SCALES}
    special = _special(changes, table["base"])
    if set(special) == {"compressor"} and special["compressor"] in COLOURS:
        colour = COLOURS[special["compressor"]]
    else:
        kinds = [_special(each, table["base"]) for each in table["line"]]
        others = [each for each in kinds if set(each) != {"compressor"} or each["compressor"] not in COLOURS]
        colour = _OTHERS[others.index(special) % len(_OTHERS)]
    return {"colour": colour, **changes, **line.get(scale, {})}


def _special(line: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compressor of a line, and the other options, without feedback, that differ from the base."""
    names = {"name", "label", "feedback", *SCALES}
    changes = {key: value for key, value in line.items() if key not in names and base.get(key) != value}
    return {"compressor": base.get("compressor"), **changes}


def _draw_norms(grid: Experiment, found: Mapping[str, SealedCell], note: str) -> Figure:
    """Return a figure with a column for each line: squared norms in the upper row, norms in the lower row."""
    legend = [(f"p = {p}", Pen(_SHARES[p])) for p in grid.list_started(found)[0] if p is not None]
    legend += [("updates ‖g‖", Pen(PLAIN)), ("residuals ‖e‖", Pen(PLAIN, dashed=True))]
    return draw_grid(_arrange_norms(grid, found), grid.make_frame(found, legend, note), share_y=True)


def _arrange_norms(grid: Experiment, found: Mapping[str, SealedCell]) -> list[list[tuple[Panel, Lines]]]:
    lines = grid.list_started(found)[1]
    return [
        [fill_panel(_norms_panel(grid, line, square, line == lines[0]), _by_share(grid, found, line))
         for line in lines]
        for square in ("2", "")
    ]  # fmt: skip


def _norms_panel(grid: Experiment, line: Line, square: str, first: bool) -> Panel:
    letter = ascii_lowercase[grid.lines.index(line) % 26]
    title = f"({letter}) {line.label}".replace(", ", "\n") if square else ""
    side = "" if not first else "squared norms" if square else "norms"
    series = (Series(f"delta_norm{square}", ""), Series(f"error_norm{square}", "", dashed=True))
    return Panel("norms", title, series, "", log=True, side=side)


def _by_share(
    grid: Experiment, found: Mapping[str, SealedCell], line: Line
) -> list[tuple[str, list[SealedCell], Pen]]:
    return [(line.label, grid.find_cells(found, p, line), Pen(_SHARES[p])) for p in grid.p if p is not None]
