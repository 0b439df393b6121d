"""Scales, ticks, titles and frames for the axes of a panel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D

from cfedavg.core.units import format_bytes, format_time, time_unit
from cfedavg.report.groups import Curve
from cfedavg.report.panels import Panel

INK, MUTED, GRID = "#1F2328", "#59636E", "#E7EAEE"
_AMOUNTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "total_bytes": ("bytes of all clients so far, up and down", format_bytes),
    "client_bytes": ("bytes that a client has sent so far", format_bytes),
    "model_sizes_sent": ("model sizes that a client has sent so far", "{:g}".format),
}
_STEPS = [1, 2, 5, 10]
_FAR = 6.0  # if the totals of two runs differ by more than this factor, their axis is logarithmic
_TIMES = [1e-3, 1e-2, 0.1, 0.3, 1, 3, 10, 30] + [
    unit * n
    for unit, ns in ((60, (1, 3, 10, 30)), (3600, (1, 3, 10)), (86_400, (1, 3, 10, 30, 100)))
    for n in ns
]
_WIDE = 30.0  # if the largest y exceeds this factor of the smallest, the y axis is logarithmic


def replace_missing_glyphs(text: str) -> str:
    """Return the text with `?` for each letter that the font lacks; matplotlib would draw a box and warn."""
    font = get_font(findfont(FontProperties()))
    return "".join(letter if letter == "\n" or font.get_char_index(ord(letter)) else "?" for letter in text)


def finish_axes(
    axes: Axes,
    panel: Panel,
    drawn: Sequence[Curve],
    in_column: Sequence[Curve] = (),
    in_row: Sequence[Curve] = (),
) -> None:
    """Set the title, scales, ticks and names of axes whose curves are drawn.

    `in_column` holds the curves of all axes that share x with `axes`; `in_row` of all that share y.
    """
    set_title(axes, panel.title)
    axes.set_ylabel(replace_missing_glyphs(panel.side), fontsize=9, color=MUTED, parse_math=False)
    style_axes(axes)
    if not drawn:
        write_instead(axes, panel.empty)
        return
    _set_x(axes, panel.x, in_column or drawn)
    _set_y(axes, panel, [value for line in in_row or drawn for value in line.mean])
    _name_styles(axes, panel)


def set_title(axes: Axes, text: str, size: float = 10.5) -> None:
    """Write a bold title at the left; a `$` is written as it is."""
    text = replace_missing_glyphs(text)
    axes.set_title(text, loc="left", fontsize=size, fontweight="bold", color=INK, parse_math=False)


def write_instead(axes: Axes, text: str) -> None:
    """Write a text into axes without lines, and hide the labels of their ticks."""
    axes.grid(False)
    axes.tick_params(labelbottom=False, labelleft=False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=MUTED, fontsize=9)


def style_axes(axes: Axes) -> None:
    """Give axes a bottom line and a faint grid, without tick marks."""
    axes.set_facecolor("white")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#AEB5BD")
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, which="both")


def _set_x(axes: Axes, x: str, drawn: Sequence[Curve]) -> None:
    low, high = min(line.x[0] for line in drawn), max(line.x[-1] for line in drawn)
    if x == "rounds":
        name = "communication rounds"
        axes.set_xlim(0, max(1.03 * high, 2))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8, steps=_STEPS))
    elif x in _AMOUNTS:
        name, text = _AMOUNTS[x]
        if low > 0 and (x != "total_bytes" or _is_far(drawn)):
            axes.set_xscale("log")
            _log_ticks(axes.xaxis, low, high, text)
        else:
            axes.set_xlim(0, max(1.03 * high, 1))
            axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=_STEPS))
            axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))
    else:
        name = f"simulated time so far{_time_ticks(axes, drawn)}"
    axes.set_xlabel(name, fontsize=9, color=MUTED)


def _is_far(drawn: Sequence[Curve]) -> bool:
    """Return whether the final x of two curves differ too much for a linear axis."""
    totals = [line.x[-1] for line in drawn]
    return bool(max(totals) > _FAR * min(totals))


def _time_ticks(axes: Axes, drawn: Sequence[Curve]) -> str:
    """Set the ticks of a time axis; return the unit for its name, "" if each tick label has a unit."""
    low, high = min(line.x[0] for line in drawn), max(line.x[-1] for line in drawn)
    if low > 0 and _is_far(drawn):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.FixedLocator([t for t in _TIMES if 0.8 * low < t < 1.25 * high]))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: format_time(value)))
        return ""
    size, unit = time_unit(high)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=7, steps=_STEPS))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value / size:g}"))
    return f" ({unit})"


def _set_y(axes: Axes, panel: Panel, values: list[float]) -> None:
    low, high = min(values), max(values)
    if panel.log or (panel.log is None and low > 0 and high / low > _WIDE):
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, low, high, None)
    elif panel.percent:
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{100 * value:.6g}%"))
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.01))
    if axes.get_yscale() != "log":
        axes.yaxis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=_STEPS))


def _log_ticks(axis: Axis, low: float, high: float, text: Callable[[float], str] | None) -> None:
    """Put ticks at powers of 10, and at 2 and 5 times these if the axis spans less than two decades."""
    few = high / low < 100
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=8))
    axis.set_minor_locator(ticker.NullLocator())
    if text is not None:
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))
    elif few:
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axis.set_major_formatter(ticker.LogFormatterMathtext())


def _name_styles(axes: Axes, panel: Panel) -> None:
    """Add a legend of solid and dashed series to the right of the title."""
    named = [series for series in panel.series if series.name]
    if not named:
        return
    handles: list[Any] = [
        Line2D([], [], color=MUTED, linewidth=1.6, linestyle=(0, (3, 1.5)) if series.dashed else "solid")
        for series in named
    ]
    axes.legend(
        handles, [series.name for series in named], loc="lower right", bbox_to_anchor=(1.0, 0.99),
        ncols=len(named), frameon=False, fontsize=9, labelcolor=MUTED, handlelength=1.7,
        columnspacing=1.2, borderpad=0.1, borderaxespad=0.2,
    )  # fmt: skip
