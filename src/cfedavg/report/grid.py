"""Panels in rows and columns that share their axes, under one heading and one legend."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cfedavg.report import figures
from cfedavg.report.axes import INK, MUTED, finish_axes, replace_missing_glyphs
from cfedavg.report.figures import as_png, default_settings
from cfedavg.report.panels import Cell, Frame

_WIDTH, _ROW, _AXIS = 9.0, 1.85, 0.35  # inches; the last is for what stands below the lowest axes
_MARGIN = 0.1
_LEGEND_LINE = 0.175


@default_settings
def draw_grid(rows: Sequence[Sequence[Cell]], frame: Frame, *, share_y: bool = False) -> bytes:
    """Draw cells as PNG; a column shares x, and a row shares y with `share_y`."""
    figure = make_framed_figure(len(rows) * _ROW + _AXIS, frame)
    _draw_cells(figure, rows, share_y)
    return as_png(figure)


def make_framed_figure(height: float, frame: Frame) -> Figure:
    """Return a figure with a heading, a legend and a note, and `height` inches for axes between them."""
    title, subtitle, note = (
        _wrap(frame.title, 11, 0.68),
        _wrap(frame.subtitle, 9, 0.58),
        _wrap(frame.note, 8, 0.58),
    )
    labels = [replace_missing_glyphs(label) for label, _ in frame.legend]
    abreast = figures.count_legend_columns([label for label, _ in frame.legend], _WIDTH)
    # All in one line if they fit, else two columns that are read downwards.
    abreast = abreast if abreast >= len(labels) else min(2, abreast)
    top = 2 * _MARGIN + (_text_height(title, 11) + _text_height(subtitle, 9))
    top += _LEGEND_LINE * math.ceil(len(labels) / abreast)
    bottom = _text_height(note, 8) + (_MARGIN if note else 0)
    total = top + height + bottom
    figure = figures.new_figure(_WIDTH, total, top, bottom)
    y = _write(figure, total - _MARGIN, title, size=11, color=INK, weight="bold")
    y = _write(figure, y, subtitle, size=9, color=MUTED)
    _write(figure, bottom, note, size=8, color=MUTED)
    if labels:
        figures.add_legend(
            figure, [figures.make_handle(pen) for _, pen in frame.legend], labels, abreast, loc="upper left",
            bbox_to_anchor=(_MARGIN / _WIDTH, (y - _MARGIN / 2) / figure.get_figheight()),
            borderaxespad=0.1, handlelength=2.8,
        )  # fmt: skip
    return figure


def _wrap(text: str, size: float, em: float) -> list[str]:
    """Break a text where the figure ends; `em` is a letter's mean width, rather too much than too little."""
    return textwrap.wrap(replace_missing_glyphs(text), int((_WIDTH - 2 * _MARGIN) * 72 / (size * em)))


def _text_height(lines: Sequence[str], size: float) -> float:
    return len(lines) * size / 72 * 1.4


def _write(figure: Figure, y: float, lines: Sequence[str], *, size: float, **look: Any) -> float:
    """Write lines below the height y, in inches, and return the height below them."""
    place = _MARGIN / _WIDTH, y / figure.get_figheight()
    figure.text(*place, "\n".join(lines), va="top", fontsize=size, parse_math=False, **look)
    return y - _text_height(lines, size)


def _draw_cells(figure: Figure, rows: Sequence[Sequence[Cell]], share_y: bool) -> None:
    places = figure.subplots(
        len(rows), len(rows[0]), squeeze=False, sharex="col", sharey="row" if share_y else False
    )
    drawn = [
        [figures.draw_lines(axes, c.panel, c.groups, c.pens) for axes, c in zip(*pair, strict=True)]
        for pair in zip(places, rows, strict=True)
    ]
    for (i, j), axes in np.ndenumerate(places):
        in_column = [line for row in drawn for line in row[j]]
        in_row = [line for cell in drawn[i] for line in cell] if share_y else ()
        finish_axes(axes, rows[i][j].panel, drawn[i][j], in_column, in_row)
    for j, column in enumerate(places.T):
        _label_lowest([axes for axes, row in zip(column, drawn, strict=True) if row[j]])
    if share_y:
        for row, lines in zip(places, drawn, strict=True):
            for axes in [axes for axes, own in zip(row, lines, strict=True) if own][:1]:
                axes.tick_params(labelleft=True)
    figure.align_ylabels()


def _label_lowest(column: Sequence[Axes]) -> None:
    """Write the numbers and the name of x once, under the last axes that have lines."""
    for axes in column[:-1]:
        axes.set_xlabel("")
    for axes in column[-1:]:
        axes.tick_params(labelbottom=True)
