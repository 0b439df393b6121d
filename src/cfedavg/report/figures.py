"""Panels drawn with matplotlib, under one legend or in a grid, without the user's matplotlib settings."""

from __future__ import annotations

import dataclasses
import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Figure  # the sweep names it too
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from cfedavg.report import panels
from cfedavg.report.panels import INK, MUTED, Lines, Panel, Pen, Series, add_legend, replace_missing_glyphs
from cfedavg.report.runs import Curve, Group, make_curve
from cfedavg.report.table import shorten

# Ignores the user's matplotlibrc, which may ask for LaTeX or for fonts that are not installed.
default_settings = matplotlib.rc_context(
    {name: value for name, value in dict.items(matplotlib.rcParamsDefault) if name != "backend"}
)

_DPI = 180
_LETTERS_PER_INCH = 13

# Sizes of a grid in inches; the x axis height is the room for labels below the lowest row
_GRID_WIDTH, _ROW_HEIGHT, _X_AXIS_HEIGHT = 9.0, 1.85, 0.35
_MARGIN, _LEGEND_LINE = 0.1, 0.175


@dataclass(frozen=True)
class Frame:
    """The text around panels: title, subtitle and legend above the panels, `note` below."""

    title: str
    subtitle: str
    legend: Sequence[tuple[str, Pen]]
    note: str = ""


def draw_panel(panel: Panel, groups: Sequence[Group]) -> bytes:
    """Return a PNG of one panel with its own legend."""
    return as_png(make_figure([panel], groups, 1, 5.0, 3.1))


def draw_panels(chosen: Sequence[Panel], groups: Sequence[Group]) -> bytes:
    """Return a PNG of the chosen panels in 2 columns, under one legend."""
    return as_png(make_figure(chosen, groups, 2, 10.0, 2.9))


@default_settings
def make_figure(
    chosen: Sequence[Panel], groups: Sequence[Group], columns: int, width: float, height: float
) -> Figure:
    """Return a figure of the chosen panels, under one legend.

    `width` is that of the figure and `height` that of a panel, in inches.
    """
    lines = choose_lines(groups)
    pens = [pen for _, pen in lines]
    handles: list[Artist] = list(map(make_handle, pens))
    longest = int(width * _LETTERS_PER_INCH) - 5
    labels = [replace_missing_glyphs(shorten(group.label, longest)) for group in groups]
    if any(len(group.runs) > 1 for group in groups):
        handles.append(Patch(facecolor="#BBBBBB", linewidth=0))
        labels.append("lowest to highest seed")
    abreast = count_legend_columns(labels, width)
    rows = max(1, math.ceil(len(chosen) / columns))
    figure = new_figure(width, rows * height + 0.24 * math.ceil(len(labels) / abreast))
    for place, panel in enumerate(chosen, 1):
        axes = figure.add_subplot(rows, columns, place)
        panels.finish_axes(axes, panel, draw_lines(axes, panel, lines))
    if not chosen:
        figure.text(0.5, 0.4, "no rounds recorded yet", ha="center", color=MUTED, fontsize=10)
    add_legend(figure, handles, labels, ncols=abreast, handlelength=1.6, **panels.ABOVE)
    return figure


@default_settings
def draw_grid(
    rows: Sequence[Sequence[tuple[Panel, Lines]]], frame: Frame, *, share_y: bool = False
) -> Figure:
    """Return a grid of panels. Panels in a column share the x axis; with `share_y`, rows share y."""
    figure = make_framed_figure(len(rows) * _ROW_HEIGHT + _X_AXIS_HEIGHT, frame)
    places = figure.subplots(
        len(rows), len(rows[0]), squeeze=False, sharex="col", sharey="row" if share_y else False
    )
    drawn = [
        [draw_lines(axes, *cell) for axes, cell in zip(*pair, strict=True)]
        for pair in zip(places, rows, strict=True)
    ]
    for (i, j), axes in np.ndenumerate(places):
        in_column = [line for row in drawn for line in row[j]]
        in_row = [line for cell in drawn[i] for line in cell] if share_y else ()
        panels.finish_axes(axes, rows[i][j][0], drawn[i][j], in_column, in_row)
    # Labels stand only under the lowest axes with lines, and, if y is shared, left of the first.
    is_drawn = np.array([[bool(lines) for lines in row] for row in drawn])
    for column, has_lines in zip(places.T, is_drawn.T, strict=True):
        for axes in column[has_lines][:-1]:
            axes.set_xlabel("")
        for axes in column[has_lines][-1:]:
            axes.tick_params(labelbottom=True)
    for row, has_lines in zip(places, is_drawn, strict=True):
        for axes in row[has_lines][: int(share_y)]:
            axes.tick_params(labelleft=True)
    figure.align_ylabels()
    return figure


def make_framed_figure(height: float, frame: Frame) -> Figure:
    """Return a figure with the title, legend and note of `frame`, and `height` inches for axes between."""
    title, subtitle = _wrap(frame.title, 11, 0.68), _wrap(frame.subtitle, 9, 0.58)
    note = _wrap(frame.note, 8, 0.58)
    labels = [replace_missing_glyphs(label) for label, _ in frame.legend]
    abreast = count_legend_columns([label for label, _ in frame.legend], _GRID_WIDTH)
    # All entries in one line if they fit, else two columns.
    abreast = abreast if abreast >= len(labels) else min(2, abreast)
    top = 2 * _MARGIN + (_text_height(title, 11) + _text_height(subtitle, 9))
    top += _LEGEND_LINE * math.ceil(len(labels) / abreast)
    bottom = _text_height(note, 8) + (_MARGIN if note else 0)
    total = top + height + bottom
    figure = new_figure(_GRID_WIDTH, total, top, bottom)
    y = _write(figure, total - _MARGIN, title, size=11, color=INK, weight="bold")
    y = _write(figure, y, subtitle, size=9, color=MUTED)
    _write(figure, bottom, note, size=8, color=MUTED)
    if labels:
        place = _MARGIN / _GRID_WIDTH, (y - _MARGIN / 2) / figure.get_figheight()
        look = panels.ABOVE | {"loc": "upper left", "bbox_to_anchor": place, "borderaxespad": 0.1}
        handles = [make_handle(pen) for _, pen in frame.legend]
        add_legend(figure, handles, labels, ncols=abreast, handlelength=2.8, **look)
    return figure


def _wrap(text: str, size: float, em: float) -> list[str]:
    """Break a text into lines as wide as the figure.

    `size` is the font size in points; a letter is `em` times `size` wide on average.
    """
    return textwrap.wrap(replace_missing_glyphs(text), int((_GRID_WIDTH - 2 * _MARGIN) * 72 / (size * em)))


def _text_height(lines: Sequence[str], size: float) -> float:
    return len(lines) * size / 72 * 1.4


def _write(figure: Figure, y: float, lines: Sequence[str], *, size: float, **look: Any) -> float:
    """Write lines of text from the height `y` (inches) downwards; return the height where they end."""
    place = _MARGIN / _GRID_WIDTH, y / figure.get_figheight()
    figure.text(*place, "\n".join(lines), va="top", fontsize=size, parse_math=False, **look)
    return y - _text_height(lines, size)


def draw_lines(axes: Axes, panel: Panel, lines: Lines) -> list[Curve]:
    """Draw and return a panel's curves; the first group is in front, uncompressed groups are behind."""
    drawn: list[Curve] = []
    for series, order, curve in list_curves(panel, [group for group, _ in lines]):
        group, pen = lines[order]
        depth = len(lines) if group.is_uncompressed else order
        pen = dataclasses.replace(pen, dashed=pen.dashed or series.dashed)
        _draw_curve(axes, curve, pen, banded=len(group.runs) > 1, depth=depth)
        drawn.append(curve)
    return drawn


def list_curves(panel: Panel, groups: Sequence[Group]) -> list[tuple[Series, int, Curve]]:
    """Return the curves of a panel, each with its series and the index of its group."""
    found = []
    for series in panel.series:
        for order, group in enumerate(groups):
            curve = make_curve(group, panel.x, series.key)
            if panel.log:
                curve = Curve(*(part[curve.mean > 0] for part in curve))
            if len(curve.x):
                found.append((series, order, curve))
    return found


def _draw_curve(axes: Axes, line: Curve, pen: Pen, *, banded: bool, depth: int) -> None:
    marker = "o" if len(line.x) == 1 else ""  # a line through one point would be invisible
    axes.plot(
        line.x, line.mean, color=pen.colour, linestyle=_stroke(pen), linewidth=1.7, marker=marker,
        markersize=5, markerfacecolor="white" if pen.dashed else pen.colour, solid_capstyle="round",
        zorder=4 - depth / 1000,
    )  # fmt: skip
    if banded:
        axes.fill_between(line.x, line.low, line.high, color=pen.colour, alpha=0.18, linewidth=0, zorder=2)
    if pen.crossed:
        axes.plot(line.x[-1], line.mean[-1], "x", color=pen.colour, markersize=7, mew=1.8, zorder=5)


def make_handle(pen: Pen) -> Line2D:
    """Return the short line that a legend shows for a pen."""
    return Line2D([], [], color=pen.colour, linestyle=_stroke(pen), linewidth=2.4)


def _stroke(pen: Pen) -> Any:
    return (0, (3.5, 1.8)) if pen.dashed else "solid"


def choose_lines(groups: Sequence[Group]) -> list[tuple[Group, Pen]]:
    """Return each group with its pen, the same in all panels."""
    return [(group, Pen(colour)) for group, colour in zip(groups, choose_colours(groups), strict=True)]


def choose_colours(groups: Sequence[Group]) -> list[str]:
    """Return a colour for each group, the same in all panels."""
    lone_plain = len(groups) > 1 and sum(group.is_uncompressed for group in groups) == 1
    others = len(groups) - lone_plain
    if others <= len(panels.COLOURS):
        free = iter(panels.COLOURS)
    else:  # more groups than distinct colours: a colour scale shows their order
        viridis = matplotlib.colormaps["viridis"]
        free = iter([to_hex(viridis(0.9 * i / (others - 1))) for i in range(others)])
    return [panels.PLAIN if lone_plain and group.is_uncompressed else next(free) for group in groups]


def count_legend_columns(labels: Sequence[str], width: float) -> int:
    """Return how many columns a legend of `width` inches has room for, given its longest label."""
    longest = max(map(len, labels), default=0) + 5
    return max(1, min(len(labels), int(width * _LETTERS_PER_INCH / longest)))


def new_figure(width: float, height: float, top: float = 0.0, bottom: float = 0.0) -> Figure:
    """Return an empty figure that keeps `top` and `bottom` inches free of axes."""
    rect = (0.0, bottom / height, 1.0, 1 - (top + bottom) / height)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, wspace=0.03, hspace=0.04, rect=rect)
    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white", layout=layout)


@default_settings
def as_png(figure: Figure) -> bytes:
    """Return a figure as PNG with 256 colours, which takes a third of the bytes of a PNG with all colours."""
    canvas, buffer = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()  # type: ignore[no-untyped-call]  # savefig would compute the layout twice
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    picture = Image.fromarray(pixels).convert("RGB")
    picture = picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    picture.save(buffer, "PNG", dpi=(_DPI, _DPI))
    return buffer.getvalue()
