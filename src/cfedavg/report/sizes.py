"""A picture of how many samples each client has, largest first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from cfedavg.core.errors import InputError
from cfedavg.core.files import write_atomic
from cfedavg.report.figures import as_png, default_settings, new_figure
from cfedavg.report.panels import BLUE, INK, LABEL, MUTED, replace_missing_glyphs, set_title, style_axes
from cfedavg.report.table import shorten

_NAMED = 40  # with more clients, there is no room for names
_FAR = 30  # from this ratio of the largest to the median on, sizes are on a log scale
_LONGEST = 28  # characters of a name


@default_settings
def plot_sizes(sizes: Sequence[int], path: Path, title: str, names: Sequence[str] = ()) -> None:
    """Write a PNG of the clients' sizes: a bar with its name for each of few clients, else a curve."""
    if not len(sizes) or min(sizes) < 0:
        raise InputError("`sizes` must hold a number of samples for each client, none below 0")
    values = np.asarray(sizes)
    order = np.argsort(-values, kind="stable")
    few = len(values) <= _NAMED
    figure = new_figure(8.0, 0.9 + 0.21 * len(values) if few else 3.2)
    axes = figure.add_subplot()
    style_axes(axes)
    if few:
        _draw_bars(axes, values[order], [names[i] if names else f"client {i}" for i in order])
        axes.set_xlabel("training samples", **LABEL)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    else:
        _draw_curve(axes, values[order])
    set_title(axes, title, 11)
    write_atomic(path, as_png(figure))


def _draw_bars(axes: Axes, sizes: np.ndarray, names: Sequence[str]) -> None:
    places = np.arange(len(sizes))
    axes.barh(places, sizes, height=0.78, color=BLUE)
    labels = [replace_missing_glyphs(shorten(name, _LONGEST)) for name in names]
    axes.set_yticks(places, labels, parse_math=False)
    axes.set_ylim(len(sizes) - 0.4, -0.6)
    axes.set_xlim(0, 1.09 * max(1, sizes.max()))
    axes.grid(False, axis="y")
    for place, size in enumerate(sizes):
        axes.annotate(
            f"{size:,}", (size, place), (3, 0), textcoords="offset points", va="center", fontsize=8, color=INK
        )


def _draw_curve(axes: Axes, sizes: np.ndarray) -> None:
    axes.stairs(sizes, np.arange(len(sizes) + 1), fill=True, color=BLUE, alpha=0.85)
    median = float(np.median(sizes))
    axes.axhline(median, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"median {median:,.0f}", (len(sizes), median), (-2, 3), textcoords="offset points", ha="right",
        fontsize=8.5, color=INK,
    )  # fmt: skip
    if sizes.max() > _FAR * max(1.0, median) and sizes.min() > 0:
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.8 * sizes.min())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    else:
        axes.set_ylim(0, 1.05 * max(1, sizes.max()))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlim(0, len(sizes))
    axes.set_ylabel("training samples", **LABEL)
    axes.set_xlabel(f"{len(sizes):,} clients, the largest first", **LABEL)
