"""Figures in the formats of papers: PDF and SVG with their fonts, as wide as a column, and CSV.

The same figure gives the same bytes: no file holds a date. Text stays text, which can be searched and edited.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import matplotlib
from fontTools import subset  # type: ignore[import-untyped]
from fontTools.ttLib import TTFont  # type: ignore[import-untyped]
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.text import Text

from cfedavg.core.errors import InputError
from cfedavg.report.figures import as_png, default_settings, draw_panel, list_curves, make_figure
from cfedavg.report.panels import LETTERS, Panel
from cfedavg.report.runs import Group

FORMATS = ("png", "pdf", "svg", "csv")
COLUMN = 3.4  # inches: a column of a paper in two columns
_NARROWEST, _WIDEST = 2.0, 12.0
PAGE = 0.78  # shrinks the figure of a grid, 9 inches wide, to both columns of such a paper
_SHRINK = 7.5 / LETTERS  # letters of 7.5 points suit a column of a paper
# Type 42 embeds fonts as TrueType; matplotlib's default, type 3, is refused by some publishers.
_SETTINGS: dict[Any, Any] = {"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "cfedavg"}


def check_formats(formats: Sequence[str], width: float = COLUMN) -> None:
    """Raise InputError if a format is unknown, or if `width` is no width of a figure in inches."""
    for name in formats:
        if name not in FORMATS:
            raise InputError(f"`formats` must be png, pdf, svg or csv, got {name!r:.40}")
    if not _NARROWEST <= width <= _WIDEST:
        raise InputError(f"`width` must be from {_NARROWEST:g} to {_WIDEST:g} inches, got {width:g}")


def draw_panel_as(form: str, panel: Panel, groups: Sequence[Group], width: float = COLUMN) -> bytes:
    """Return a panel in a format of `FORMATS`.

    A PDF or SVG is `width` inches wide. It has no title, since a paper has captions; its y axis has a label.
    """
    if form == "csv":
        return write_csv([(panel, groups)])
    if form == "png":
        return draw_panel(panel, groups)
    usual = width / _SHRINK  # the width if letters had their usual size
    panel = dataclasses.replace(panel, title="", side=panel.side or panel.title.partition(" over ")[0])
    figure = make_figure([panel], groups, 1, usual, 0.62 * usual)
    return save_as(form, shrink(figure, _SHRINK))


def shrink(figure: Figure, factor: float) -> Figure:
    """Make a figure smaller, its letters and lines too; return it."""
    figure.set_size_inches(*(factor * size for size in figure.get_size_inches()))
    for text in figure.findobj(Text):
        text.set_fontsize(factor * float(text.get_fontsize()))
    for axes in figure.axes:
        axes.tick_params(labelsize=factor * LETTERS)  # later ticks too
        for line in axes.lines:
            line.set_linewidth(factor * line.get_linewidth())
    return figure


@default_settings
def save_as(form: str, figure: Figure) -> bytes:
    """Return a figure as PNG, PDF or SVG."""
    if form == "png":
        return as_png(figure)
    buffer = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        if form == "pdf":
            FigureCanvasPdf(figure).print_pdf(buffer, metadata={"CreationDate": None})  # type: ignore[no-untyped-call]
            return buffer.getvalue()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return _embed_font(buffer.getvalue().decode()).encode()


def write_csv(panels: Sequence[tuple[Panel, Sequence[Group]]]) -> bytes:
    """Return the numbers of panels: of each point of each line the mean over the seeds, and its band."""
    file = io.StringIO(newline="")
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["panel", "line", "x", "y", "x_value", "mean", "lowest", "highest"])
    for panel, groups in panels:
        for series, order, curve in list_curves(panel, groups):
            head = [panel.title or panel.name, groups[order].label, panel.x, series.key]
            table.writerows([*head, *map(float, point)] for point in zip(*curve, strict=True))
    return file.getvalue().encode(errors="replace")  # for lone surrogates


@cache
def _font_file() -> str:
    return str(findfont(FontProperties()))


def _embed_font(svg: str) -> str:
    """Put the letters that an SVG needs into it as a font, so that it looks alike on every machine."""
    options = subset.Options(recalc_timestamp=False, layout_features=[], name_IDs=[], notdef_outline=True)
    options.drop_tables += ["FFTM"]  # of the font's editor
    with TTFont(_font_file(), recalcTimestamp=False) as font:
        chosen = subset.Subsetter(options)
        chosen.populate(text=svg)  # also has the letters of the markup, which are few
        chosen.subset(font)
        buffer = io.BytesIO()
        font.save(buffer)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    face = f"@font-face{{font-family:'DejaVu Sans';src:url(data:font/ttf;base64,{data})}}"
    return svg.replace('<style type="text/css">', f'<style type="text/css">{face}', 1)
