"""A picture of a search for a configuration: the curve of each candidate over what it has spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from cfedavg.core.units import format_bytes, format_time, is_share, spell_out
from cfedavg.report.figures import as_png, default_settings, make_handle, new_figure
from cfedavg.report.panels import (
    ABOVE,
    BLUE,
    GRID,
    LABEL,
    MUTED,
    PLAIN,
    Pen,
    add_legend,
    replace_missing_glyphs,
    style_axes,
)
from cfedavg.report.table import shorten

_OTHERS = Pen("#B9C0C8")
_PENS = (Pen(PLAIN, dashed=True), Pen(BLUE))
_LETTERS = 90  # of a name in the legend

Curves = Mapping[str, Sequence[tuple[float, float]]]


@default_settings
def draw_search(
    curves: Curves, named: Mapping[str, str], limits: Sequence[float], metric: str, *, is_time: bool
) -> bytes:
    """Return a PNG of the candidates' curves; each is a list of pairs of what was spent and the metric.

    `named` holds the texts of the legend for the default and the chosen candidate, in this order. All other
    candidates are grey. `limits` are the ends of the rungs.
    """
    pens = dict(zip(named, _PENS if len(named) > 1 else _PENS[1:], strict=False))
    figure = new_figure(8.0, 3.6 + 0.24 * (len(named) + 1))
    axes = figure.add_subplot()
    style_axes(axes)
    for name in sorted(curves, key=lambda name: name in pens):
        _draw_curve(axes, curves[name], pens.get(name, _OTHERS), front=name in pens)
    for number, limit in enumerate(limits, 1):
        axes.axvline(limit, color=GRID, linewidth=1.2, zorder=0)
        axes.annotate(
            f"rung {number}", (limit, 1), (-2, 2), xycoords=axes.get_xaxis_transform(), ha="right",
            textcoords="offset points", fontsize=8, color=MUTED,
        )  # fmt: skip
    _set_axes(axes, metric, is_time)
    shown = [*pens.values(), _OTHERS]
    handles: list[Artist] = [make_handle(pen) for pen in shown]
    texts = [*named.values(), "other candidates"]
    labels = [replace_missing_glyphs(shorten(text, _LETTERS)) for text in texts]
    add_legend(figure, handles, labels, ncols=1, handlelength=2.4, **ABOVE)
    return as_png(figure)


def _draw_curve(axes: Axes, curve: Sequence[tuple[float, float]], pen: Pen, *, front: bool) -> None:
    x, y = [spent for spent, _ in curve], [value for _, value in curve]
    axes.plot(
        x, y, color=pen.colour, linestyle=(0, (3.5, 1.8)) if pen.dashed else "solid",
        linewidth=2.0 if front else 1.0, marker="o" if len(x) == 1 else "", markersize=3,
        zorder=4 if front else 2,
    )  # fmt: skip


def _set_axes(axes: Axes, metric: str, is_time: bool) -> None:
    axes.set_xscale("log")
    text = format_time if is_time else format_bytes
    low, high = axes.get_xlim()
    ticks = [n * 10.0**e for e in range(-3, 18) for n in (1, 2, 5) if low <= n * 10.0**e <= high]
    axes.set_xticks(ticks, [text(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("simulated time" if is_time else "bytes of all clients so far, up and down", **LABEL)
    if is_share(metric):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.set_ylabel(spell_out(metric).replace("test ", "validation "), **LABEL)
