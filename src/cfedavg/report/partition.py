"""Who has what: a picture of how the classes are spread over the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from cfedavg.core.errors import InputError
from cfedavg.core.files import write_atomic
from cfedavg.report.axes import INK, MUTED, drawable
from cfedavg.report.figures import as_png, default_settings, new_figure

_BAR = "#B9C1C9"
_WIDEST = 1000  # columns, about as many as there are pixels
_MANY = 60  # from here on a client has no room for its own name
_ROOMY = 16  # up to here its counts fit into the cells


@default_settings
def draw_partition(counts: NDArray[Any], path: Path, title: str) -> None:
    """Clients from left to right, classes from top to bottom, the darker the more samples."""
    counts = np.asarray(counts)
    if counts.ndim != 2 or 0 in counts.shape or (counts < 0).any():
        raise InputError(
            f"counts has the shape {counts.shape}: it must be (clients, classes) and hold numbers from 0 up"
        )
    clients, classes = counts.shape
    if clients > _MANY:
        counts = _binned(_sorted(counts))
    height = 0.26 * min(max(classes, 4), 20)
    figure = new_figure(8.0, 1.5 + height)
    bars, cells = figure.subplots(2, 1, sharex=True, height_ratios=[0.5, height])
    _draw_totals(bars, counts)
    _draw_cells(figure, cells, counts, clients)
    bars.set_title(drawable(title), loc="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)
    write_atomic(path, as_png(figure))


def _sorted(counts: NDArray[Any]) -> NDArray[Any]:
    """Clients with the same main classes side by side: in any other order a thousand are noise."""
    first, second = np.argsort(-counts, axis=1, kind="stable")[:, :2].T[[0, -1]]
    return counts[np.lexsort((-counts.max(1), second, first))]


def _binned(counts: NDArray[Any]) -> NDArray[Any]:
    """No more columns than the picture can show; one of several clients is their mean."""
    if len(counts) <= _WIDEST:
        return counts
    starts = np.arange(_WIDEST) * len(counts) // _WIDEST
    sizes = np.diff(np.append(starts, len(counts)))
    return np.asarray(np.add.reduceat(counts, starts, axis=0) / sizes[:, None])


def _draw_totals(axes: Axes, counts: NDArray[Any]) -> None:
    totals = counts.sum(1)
    most = max(1.0, float(totals.max()))
    if len(totals) > _MANY:
        axes.stairs(totals, np.arange(len(totals) + 1) - 0.5, fill=True, color=_BAR)
    else:
        axes.bar(np.arange(len(totals)), totals, width=0.86, color=_BAR)
    axes.set_ylim(0, most)
    axes.set_yticks([0, most], ["0", f"{most:.0f}"])
    axes.set_ylabel("samples", fontsize=9, color=MUTED, rotation=0, ha="right", va="center")
    _quiet(axes)
    axes.tick_params(labelbottom=False)


def _draw_cells(figure: Figure, axes: Axes, counts: NDArray[Any], clients: int) -> None:
    columns, classes = counts.shape
    most = max(2.0, float(counts.max()))
    image = axes.imshow(
        np.ma.masked_equal(counts.T, 0), aspect="auto", cmap=_blues(), interpolation="nearest",
        norm=PowerNorm(0.5, vmin=min(1.0, most), vmax=most),  # the root keeps a few samples visible
    )  # fmt: skip
    axes.set_ylabel("class", fontsize=9, color=MUTED, rotation=0, ha="right", va="center")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=min(classes, 12), integer=True))
    order = "client" if clients <= _MANY else f"{clients} clients, ordered by their largest classes"
    mean = f"; a column is the mean of about {clients / columns:.0f}" if clients > columns else ""
    axes.set_xlabel(order + mean, fontsize=9, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=min(clients, 20), integer=True))
    _quiet(axes)
    if clients > _MANY:
        axes.set_xticks([])  # a place in the order is not a client's number
    else:
        _separate(axes, counts)
    ticks = {
        1.0,
        *(t for t in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(1, most) if 0.1 * most < t <= most),
    }
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03, aspect=25, ticks=sorted(ticks))
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=8.5, length=0)
    bar.set_label("samples of the class", fontsize=8.5, color=MUTED)


def _separate(axes: Axes, counts: NDArray[Any]) -> None:
    """White lines between the cells and, where there is room, the counts in them."""
    clients, classes = counts.shape
    axes.set_xticks(np.arange(clients + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.grid(True, which="minor", color="#F1F3F5", linewidth=1)
    if clients > _ROOMY or classes > 20:
        return
    for client, label in np.argwhere(counts > 0):
        count = counts[client, label]
        colour = "white" if count > 0.2 * counts.max() else INK
        axes.text(client, label, f"{count:g}", ha="center", va="center", fontsize=8.5, color=colour)


def _quiet(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, which="both")


def _blues() -> Colormap:
    """From a blue that is seen at once to a dark one, so that one sample differs from none."""
    return ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.22, 1.0, 256)))
