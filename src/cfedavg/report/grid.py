"""Panels in rows and columns that share their axes, under one heading and one legend."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cfedavg.report.axes import INK, MUTED, drawable, finish_axes
from cfedavg.report.figures import (
    add_legend,
    as_png,
    default_settings,
    draw_lines,
    legend_columns,
    new_figure,
    pen_handle,
)
from cfedavg.report.groups import Curve
from cfedavg.report.panels import Cell, Frame
from cfedavg.report.pens import Pen

_WIDTH, _ROW, _AXIS = 9.0, 1.85, 0.35  # inches; the last is for what stands below the lowest axes
_MARGIN = 0.1
_LEGEND_LINE = 0.175


@dataclass(frozen=True)
class _Text:
    """Lines of one look, broken where the figure ends."""

    lines: list[str]
    size: float
    colour: str
    weight: str = "normal"

    @property
    def height(self) -> float:
        return len(self.lines) * self.size / 72 * 1.4


@default_settings
def draw_grid(rows: Sequence[Sequence[Cell]], frame: Frame, *, share_y: bool = False) -> bytes:
    """As PNG; a column shares x, and a row shares y if that is wished."""
    figure = framed(len(rows) * _ROW + _AXIS, frame)
    _draw_cells(figure, rows, share_y)
    return as_png(figure)


def framed(height: float, frame: Frame) -> Figure:
    """A figure with a heading, a legend and a note, and so many inches for axes between them."""
    head = [_text(frame.title, 11, INK, "bold"), _text(frame.subtitle, 9, MUTED)]
    foot = _text(frame.note, 8, MUTED)
    abreast = _abreast(frame.legend)
    top = 2 * _MARGIN + sum(text.height for text in head)
    top += _LEGEND_LINE * math.ceil(len(frame.legend) / abreast)
    bottom = foot.height + (_MARGIN if foot.lines else 0)
    figure = new_figure(_WIDTH, top + height + bottom, top, bottom)
    below = _write(figure, top + height + bottom - _MARGIN, head)
    _write(figure, bottom, [foot])
    if frame.legend:
        _add_legend(figure, frame.legend, abreast, below - _MARGIN / 2)
    return figure


def _draw_cells(figure: Figure, rows: Sequence[Sequence[Cell]], share_y: bool) -> None:
    places = figure.subplots(
        len(rows), len(rows[0]), squeeze=False, sharex="col", sharey="row" if share_y else False
    )
    drawn = [
        [draw_lines(axes, cell.panel, cell.groups, cell.pens) for axes, cell in zip(*pair, strict=True)]
        for pair in zip(places, rows, strict=True)
    ]
    for (i, j), axes in np.ndenumerate(places):
        in_column = _joined([row[j] for row in drawn])
        in_row = _joined(drawn[i]) if share_y else ()
        finish_axes(axes, rows[i][j].panel, drawn[i][j], in_column, in_row)
    for j, column in enumerate(places.T):
        _label_lowest([axes for axes, row in zip(column, drawn, strict=True) if row[j]])
    if share_y:
        _label_leftmost(places, drawn)
    figure.align_ylabels()


def _joined(parts: Sequence[Sequence[Curve]]) -> list[Curve]:
    return [line for part in parts for line in part]


def _label_lowest(column: Sequence[Axes]) -> None:
    """Numbers and name of x once, under the last axes that have lines."""
    for axes in column[:-1]:
        axes.set_xlabel("")
    for axes in column[-1:]:
        axes.tick_params(labelbottom=True)


def _label_leftmost(places: np.ndarray, drawn: Sequence[Sequence[Sequence[Curve]]]) -> None:
    for row, lines in zip(places, drawn, strict=True):
        for axes in [axes for axes, own in zip(row, lines, strict=True) if own][:1]:
            axes.tick_params(labelleft=True)


def _text(text: str, size: float, colour: str, weight: str = "normal") -> _Text:
    em = 0.68 if weight == "bold" else 0.58  # a letter's mean width, rather too much than too little
    longest = int((_WIDTH - 2 * _MARGIN) * 72 / (size * em))
    return _Text(textwrap.wrap(drawable(text), longest), size, colour, weight)


def _write(figure: Figure, y: float, texts: Sequence[_Text]) -> float:
    """Writes below the height y, in inches, and says where it ended."""
    height = figure.get_figheight()
    for text in texts:
        figure.text(
            _MARGIN / _WIDTH, y / height, "\n".join(text.lines), va="top", fontsize=text.size,
            color=text.colour, fontweight=text.weight, parse_math=False,
        )  # fmt: skip
        y -= text.height
    return y


def _abreast(legend: Sequence[tuple[str, Pen]]) -> int:
    """All in one line if they fit, else two columns that are read downwards."""
    labels = [label for label, _ in legend]
    fit = legend_columns(labels, _WIDTH)
    return fit if fit >= len(labels) else min(2, fit)


def _add_legend(figure: Figure, legend: Sequence[tuple[str, Pen]], columns: int, y: float) -> None:
    labels, pens = zip(*legend, strict=True)
    add_legend(
        figure, [pen_handle(pen) for pen in pens], list(map(drawable, labels)), columns, loc="upper left",
        bbox_to_anchor=(_MARGIN / _WIDTH, y / figure.get_figheight()), borderaxespad=0.1, handlelength=2.8,
    )  # fmt: skip
