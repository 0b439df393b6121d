"""A picture of a federation's nodes: what became of every request, and what each node holds back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from cfedavg.report.axes import INK, MUTED, drawable, frame, say_empty
from cfedavg.report.figures import add_legend, as_png, default_settings, legend_columns, new_figure
from cfedavg.report.labels import shortened
from cfedavg.report.nodes import OUTCOMES, Record, by_node, outcome
from cfedavg.report.pens import BLUE, COLOURS

_WIDTH = 8.0
_NAMED = 40  # nodes up to which each has room for its name
_LETTERS = 10  # of a name beside a line
_LATTICE = 120  # rounds up to which a line between two can be seen
_COLUMNS = 600  # above so many rounds, several share one, and the worst of them shows
_KINDS = {"not asked": "#F0F1F3", **OUTCOMES}  # the worse, the later


@default_settings
def draw_attendance(rows: Sequence[Record]) -> bytes:
    """Nodes from top to bottom, rounds from left to right, as PNG."""
    nodes = by_node(rows)
    last = max(row["round"] for row in rows)
    cells = _cells(nodes, last)
    order = list(_KINDS)
    legend = {name: _KINDS[name] for name in (*OUTCOMES, order[0]) if (cells == order.index(name)).any()}
    columns = legend_columns([*legend, "new incarnation"], _WIDTH)
    height = float(np.clip(0.24 * len(nodes), 0.9, 6.0))
    figure = new_figure(_WIDTH, height + 2.6 + 0.24 * (1 + len(legend) // columns))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[height, 1.6])
    _draw_outcomes(above, nodes, cells, last)
    _draw_residuals(below, nodes)
    handles: list[Artist] = [Patch(facecolor=colour, linewidth=0) for colour in legend.values()]
    names = list(legend)
    if _draw_births(above, nodes):
        handles.append(_birth())
        names.append("new incarnation")
    add_legend(figure, handles, names, columns, loc="outside upper left", borderaxespad=0.9)
    return as_png(figure)


def _cells(nodes: dict[int, list[Record]], last: int) -> NDArray[np.int64]:
    """For each node and column which of _KINDS is shown."""
    columns = min(last + 1, _COLUMNS)
    cells = np.zeros((len(nodes), columns), np.int64)
    for i, own in enumerate(nodes.values()):
        for row in own:
            at = row["round"] * columns // (last + 1)
            cells[i, at] = max(cells[i, at], list(_KINDS).index(outcome(row)))
    return cells


def _draw_outcomes(axes: Axes, nodes: dict[int, list[Record]], cells: NDArray[np.int64], last: int) -> None:
    axes.imshow(
        cells, aspect="auto", interpolation="nearest", vmin=0, vmax=len(_KINDS) - 1,
        cmap=ListedColormap(list(_KINDS.values())), extent=(0.5, last + 1.5, len(nodes) - 0.5, -0.5),
    )  # fmt: skip
    _title(axes, "what became of each request")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=9, length=0, which="both", labelbottom=False)
    if len(nodes) <= _NAMED:
        names = [drawable(shortened(own[-1]["node"], 24)) for own in nodes.values()]
        axes.set_yticks(range(len(nodes)), names, parse_math=False)
        axes.set_yticks(np.arange(len(nodes) + 1) - 0.5, minor=True)
        axes.grid(True, axis="y", which="minor", color="white", linewidth=2)
        axes.set_ylim(len(nodes) - 0.52, -0.48)  # half of the outer lines would leave a sliver
    else:
        axes.set_ylabel(f"{len(nodes)} nodes", fontsize=9, color=MUTED)
        axes.set_yticks([])
    if last < _LATTICE:
        axes.set_xticks(np.arange(last + 2) + 0.5, minor=True)
        axes.grid(True, axis="x", which="minor", color="white", linewidth=1)


def _draw_births(axes: Axes, nodes: dict[int, list[Record]]) -> bool:
    """Marks the rounds in which the server met a node that had lost its state; whether there are any."""
    found = [
        (row["round"] + 1, i)
        for i, own in enumerate(nodes.values())
        for before, row in pairwise(own)
        if (row.get("incarnation") or 0) > (before.get("incarnation") or 0) > 0
    ]
    for x, y in found:
        axes.add_line(_birth(x, y))
    return bool(found)


def _birth(*at: float) -> Line2D:
    x, y = ([at[0]], [at[1]]) if at else ([], [])
    return Line2D(
        x, y, marker="D", markersize=5, color="white", markeredgecolor=INK, mew=0.8, linestyle="none"
    )


def _draw_residuals(axes: Axes, nodes: dict[int, list[Record]]) -> None:
    """A line for each node: few have colours and names; of many, the one that leaves the others is named."""
    frame(axes)
    few = len(nodes) <= len(COLOURS)
    pens = COLOURS if few else [BLUE] * len(nodes)
    faint = 1.0 if few else max(0.15, 0.8 - len(nodes) / 60)
    ends: list[tuple[float, int, str]] = []
    for own, colour in zip(nodes.values(), pens, strict=False):
        rows = [row for row in own if row.get("residual_norm") is not None]
        x, y = [row["round"] + 1 for row in rows], [row["residual_norm"] for row in rows]
        name = drawable(shortened(own[-1]["node"], _LETTERS))
        axes.plot(
            x, y, color=colour, linewidth=1.2, alpha=faint, marker="." if len(rows) == 1 else None, label=name
        )
        ends += [(y[-1], x[-1], name)] if rows else []
    if not ends:
        say_empty(axes, "nobody has said anything")
    elif few:
        _name_lines(axes)
    else:
        y_end, x_end, name = max(ends)
        axes.annotate(
            name, (x_end, y_end), xytext=(0, 3), textcoords="offset points", va="bottom", fontsize=8,
            ha="right" if 2 * x_end > max(x for _, x, _ in ends) else "left", color=MUTED, parse_math=False,
        )  # fmt: skip
    _title(axes, "norm of what each node holds back")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("communication rounds", fontsize=9, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))


def _name_lines(axes: Axes) -> None:
    """Right of the title, where no line runs."""
    legend = axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=len(COLOURS), frameon=False, fontsize=8,
        labelcolor=MUTED, handlelength=1.2, columnspacing=1.0, borderpad=0.1, borderaxespad=0.2,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10.5, fontweight="bold", color=INK)
