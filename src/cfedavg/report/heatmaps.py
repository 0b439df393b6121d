"""Heatmaps: the samples of each class that clients have, and the outcomes of requests to nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from cfedavg.core.errors import InputError
from cfedavg.core.files import write_atomic
from cfedavg.core.run_files import Record
from cfedavg.report import panels
from cfedavg.report.figures import as_png, count_legend_columns, default_settings, new_figure
from cfedavg.report.panels import INK, LABEL, MUTED, STEPS, add_legend, replace_missing_glyphs
from cfedavg.report.table import shorten

_WIDTH = 8.0

# For a partition
_BAR = "#B9C1C9"
_MOST_COLUMNS = 1000  # about the pixels of the width
_MOST_CLIENTS = 60  # with more, clients are sorted by class and have no numbers
_ROOMY = 16  # with more clients, counts do not fit into the cells, and names not below them
_ROW_LETTERS = 96  # of all clients' names together
_CLASS_LETTERS = 16  # of a class's name

# For nodes
_MOST_NODES = 40  # with more, nodes have no names
_LETTERS = 10  # of a node's name beside a line
_LATTICE = 120  # with more rounds, no lines are drawn between them
_MOST_ROUNDS = 600  # with more, several rounds share a column, which shows the worst outcome
# The outcomes of a request to a node, each with its colour, from best to worst.
OUTCOMES = {
    "in the model": panels.BLUE, "replied, round void": panels.SKY, "late": panels.ORANGE,
    "lost": panels.PLAIN, "rejected": panels.VERMILION,
}  # fmt: skip
_KINDS = {"not asked": "#F0F1F3", **OUTCOMES}

Nodes = dict[int, list[Record]]  # the rows of each node, sorted by round


@default_settings
def plot_partition(
    counts: NDArray[Any],
    path: Path,
    title: str,
    client_names: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> None:
    """Write a heatmap as PNG: clients from left to right, classes from top to bottom; darker is more.

    `counts` has shape (clients, classes) and holds the number of samples. Names, if given, are written if
    there are few.
    """
    counts = np.asarray(counts)
    if counts.ndim != 2 or 0 in counts.shape or (counts < 0).any():
        raise InputError(
            "`counts` must be an array of shape (clients, classes), not empty and without numbers below 0, "
            f"got shape {counts.shape}"
        )
    clients, classes = counts.shape
    if clients > _MOST_CLIENTS:
        counts = _sort_and_average(counts)
    height = 0.26 * min(max(classes, 4), 20)
    figure = new_figure(_WIDTH, 1.5 + height)
    bars, cells = figure.subplots(2, 1, sharex=True, height_ratios=[0.5, height])
    _draw_totals(bars, counts.sum(1))
    _draw_counts(figure, cells, counts, clients)
    if client_names and clients <= _ROOMY:
        cells.set_xticks(range(clients), _fit(client_names, _ROW_LETTERS // clients), parse_math=False)
    if class_names and classes <= _ROOMY:
        cells.set_yticks(range(classes), _fit(class_names, _CLASS_LETTERS), parse_math=False)
    panels.set_title(bars, title, 11)
    write_atomic(path, as_png(figure))


def _fit(names: Sequence[str], longest: int) -> list[str]:
    return [replace_missing_glyphs(shorten(name, longest)) for name in names]


def _sort_and_average(counts: NDArray[Any]) -> NDArray[Any]:
    """Sort clients by the class of which they have most samples, then by the next; return their counts.

    If there are more clients than `_MOST_COLUMNS`, each row is the mean of several neighbours.
    """
    first, second = np.argsort(-counts, axis=1, kind="stable")[:, :2].T[[0, -1]]
    counts = counts[np.lexsort((-counts.max(1), second, first))]
    if len(counts) <= _MOST_COLUMNS:
        return counts
    starts = np.arange(_MOST_COLUMNS) * len(counts) // _MOST_COLUMNS
    sizes = np.diff(np.append(starts, len(counts)))
    return np.asarray(np.add.reduceat(counts, starts, axis=0) / sizes[:, None])


def _draw_totals(axes: Axes, totals: NDArray[Any]) -> None:
    most = max(1.0, float(totals.max()))
    if len(totals) > _MOST_CLIENTS:
        axes.stairs(totals, np.arange(len(totals) + 1) - 0.5, fill=True, color=_BAR)
    else:
        axes.bar(np.arange(len(totals)), totals, width=0.86, color=_BAR)
    axes.set_ylim(0, most)
    axes.set_yticks([0, most], ["0", f"{most:.0f}"])
    axes.set_ylabel("samples", rotation=0, ha="right", va="center", **LABEL)
    _hide_frame(axes)
    axes.tick_params(labelbottom=False)


def _draw_counts(figure: Figure, axes: Axes, counts: NDArray[Any], clients: int) -> None:
    columns, classes = counts.shape
    most = max(2.0, float(counts.max()))
    # The palest blue is clearly not white, so that one sample differs from none.
    blues = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.22, 1.0, 256)))
    image = axes.imshow(
        np.ma.masked_equal(counts.T, 0), aspect="auto", cmap=blues, interpolation="nearest",
        norm=PowerNorm(0.5, vmin=1.0, vmax=most),  # the square root keeps small counts visible
    )  # fmt: skip
    axes.set_ylabel("class", rotation=0, ha="right", va="center", **LABEL)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=min(classes, 12), integer=True, min_n_ticks=1))
    order = "client" if clients <= _MOST_CLIENTS else f"{clients} clients, ordered by their largest classes"
    mean = f"; a column is the mean of about {clients / columns:.0f}" if clients > columns else ""
    axes.set_xlabel(order + mean, **LABEL)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=min(clients, 20), integer=True, min_n_ticks=1))
    _hide_frame(axes)
    if clients > _MOST_CLIENTS:
        axes.set_xticks([])  # sorted clients have no numbers
    else:
        _separate(axes, counts)
    steps = MaxNLocator(5, steps=STEPS).tick_values(1, most)
    ticks = sorted({1.0, *(t for t in steps if 0.1 * most < t <= most)})
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03, aspect=25, ticks=ticks)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=8.5, length=0)
    bar.set_label("samples of the class", fontsize=8.5, color=MUTED)


def _separate(axes: Axes, counts: NDArray[Any]) -> None:
    """Draw lines between the heatmap's cells; if these are few, write the counts into them."""
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


def _hide_frame(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, which="both")


# Nodes


def group_by_node(rows: Sequence[Record]) -> Nodes:
    """Group rows of nodes.jsonl by node number, in increasing order; a node's rows are sorted by round."""
    found: Nodes = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["number"], row["round"])):
        found[row["number"]].append(row)
    return found


def classify(row: Record) -> str:
    """Return the outcome of a request, one of `OUTCOMES`; an unknown outcome counts as rejected.

    `row` is the request's row in nodes.jsonl.
    """
    if row.get("applied"):
        return "in the model"
    words = {"replied": "replied, round void", "late": "late", "lost": "lost"}
    return words.get(row["outcome"], "rejected")


@default_settings
def draw_attendance(rows: Sequence[Record]) -> bytes:
    """Return a PNG of the outcomes of all requests: nodes from top to bottom, rounds from left to right.

    Below, it shows the norms of the nodes' residuals. `rows` are those of nodes.jsonl.
    """
    nodes = group_by_node(rows)
    last, kinds = max(row["round"] for row in rows), list(_KINDS)
    # Each cell holds the index in `_KINDS` of the worst outcome in its rounds.
    cells = np.zeros((len(nodes), min(last + 1, _MOST_ROUNDS)), np.int64)
    for own, line in zip(nodes.values(), cells, strict=True):
        for row in own:
            at = row["round"] * len(line) // (last + 1)
            line[at] = max(line[at], kinds.index(classify(row)))
    shown = [name for name in (*OUTCOMES, kinds[0]) if (cells == kinds.index(name)).any()]
    columns = count_legend_columns([*shown, "new incarnation"], _WIDTH)
    height = float(np.clip(0.24 * len(nodes), 0.9, 6.0))
    figure = new_figure(_WIDTH, height + 2.6 + 0.24 * (1 + len(shown) // columns))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[height, 1.6])
    _draw_outcomes(above, nodes, cells, last)
    _draw_residuals(below, nodes)
    handles: list[Artist] = [Patch(facecolor=_KINDS[name], linewidth=0) for name in shown]
    if points := _locate_new_incarnations(nodes):
        marker = Line2D(*zip(*points, strict=True), marker="D", markersize=5, color="white", linestyle="none")
        marker.set(markeredgecolor=INK, markeredgewidth=0.8)
        handles.append(above.add_line(marker))
        shown.append("new incarnation")
    add_legend(figure, handles, shown, ncols=columns, **panels.ABOVE)
    return as_png(figure)


def _locate_new_incarnations(nodes: Nodes) -> list[tuple[int, int]]:
    """Return a point (round, line of the node) for each time that a node came with a new or older state."""
    return [
        (row["round"] + 1, i)
        for i, own in enumerate(nodes.values())
        for before, row in pairwise(own)
        if (row.get("incarnation") or 0) > (before.get("incarnation") or 0) > 0
    ]


def _draw_outcomes(axes: Axes, nodes: Nodes, cells: NDArray[np.int64], last: int) -> None:
    axes.imshow(
        cells, aspect="auto", interpolation="nearest", vmin=0, vmax=len(_KINDS) - 1,
        cmap=ListedColormap(list(_KINDS.values())), extent=(0.5, last + 1.5, len(nodes) - 0.5, -0.5),
    )  # fmt: skip
    panels.set_title(axes, "what became of each request")
    _hide_frame(axes)
    axes.tick_params(which="both", labelbottom=False)
    if len(nodes) <= _MOST_NODES:
        axes.set_yticks(range(len(nodes)), [_name(own, 24) for own in nodes.values()], parse_math=False)
        axes.set_yticks(np.arange(len(nodes) + 1) - 0.5, minor=True)
        axes.grid(True, axis="y", which="minor", color="white", linewidth=2)
        axes.set_ylim(len(nodes) - 0.52, -0.48)  # cuts off the outermost lines
    else:
        axes.set_ylabel(f"{len(nodes)} nodes", **LABEL)
        axes.set_yticks([])
    if last < _LATTICE:
        axes.set_xticks(np.arange(last + 2) + 0.5, minor=True)
        axes.grid(True, axis="x", which="minor", color="white", linewidth=1)


def _name(own: Sequence[Record], longest: int) -> str:
    return replace_missing_glyphs(shorten(own[-1]["node"], longest))


def _draw_residuals(axes: Axes, nodes: Nodes) -> None:
    """Draw the norm of each node's residual over rounds; if there are few nodes, each has its own colour."""
    panels.style_axes(axes)
    few = len(nodes) <= len(panels.COLOURS)
    pens = panels.COLOURS if few else [panels.BLUE] * len(nodes)
    faint = 1.0 if few else max(0.15, 0.8 - len(nodes) / 60)
    ends: list[tuple[float, int, str]] = []
    for own, colour in zip(nodes.values(), pens, strict=False):
        rows = [row for row in own if row.get("residual_norm") is not None]
        x, y = [row["round"] + 1 for row in rows], [row["residual_norm"] for row in rows]
        marker, name = "." if len(rows) == 1 else None, _name(own, _LETTERS)
        axes.plot(x, y, color=colour, linewidth=1.2, alpha=faint, marker=marker, label=name)
        ends += [(y[-1], x[-1], name)] if rows else []
    if not ends:
        panels.write_instead(axes, "nobody has said anything")
    elif few:
        names = [str(line.get_label()) for line in axes.lines]
        look = panels.BESIDE_TITLE | {"fontsize": 8, "handlelength": 1.2, "columnspacing": 1.0}
        add_legend(axes, axes.lines, names, **look)
    else:  # too many to name: only the line that ends highest
        y_end, x_end, name = max(ends)
        axes.annotate(
            name, (x_end, y_end), xytext=(0, 3), textcoords="offset points", va="bottom", fontsize=8,
            ha="right" if 2 * x_end > max(x for _, x, _ in ends) else "left", color=MUTED, parse_math=False,
        )  # fmt: skip
    panels.set_title(axes, "norm of what each node holds back")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("communication rounds", **LABEL)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
