"""The pictures of a grid: families of compressors at equal bytes, the frontier, and bytes to the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from cfedavg.report import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    PLAIN,
    VERMILION,
    Frame,
    Lines,
    Panel,
    Pen,
    Series,
    default_settings,
    draw_grid,
    format_bytes,
    make_framed_figure,
    style_axes,
)
from cfedavg.sweep import SealedCell, fill_panel
from paper.feedback import experiment
from paper.feedback.experiment import Experiment
from paper.feedback.measures import Outcome, first_downloads, pareto, rank

COLOURS = {"top-k": BLUE, "low rank": VERMILION, "EDEN": GREEN, "signs": "#CC79A7", "QSGD": "#E69F00"}
SIZES = ("thin", "wide")
_FRONT = (BLUE, VERMILION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933")
_FAINT = "#CDD3D9"  # lines that are not on the frontier
LEAST_DRAWN = 0.75  # share of the target: a curve begins where its accuracy is first as high

Found = Mapping[str, SealedCell]
Outcomes = Mapping[str, Outcome]


def without_first(cell: SealedCell, others: Sequence[SealedCell]) -> SealedCell:
    """Return a cell whose total bytes leave out first downloads."""
    total, first = cell.values["total_bytes"], first_downloads(cell, others)
    later = [a - b for a, b in zip(total, first, strict=True)]
    return dataclasses.replace(cell, values={**cell.values, "total_bytes": later})


def above(cell: SealedCell, least: float) -> SealedCell:
    """Return a cell without the accuracies before the first that is at least `least`."""
    accuracies = list(cell.values["test_accuracy"])
    high = [t for t, each in enumerate(accuracies) if each is not None and each >= least]
    start = high[0] if high else len(accuracies)
    return dataclasses.replace(
        cell, values={**cell.values, "test_accuracy": [None] * start + accuracies[start:]}
    )


def draw_families(grid: Experiment, found: Found, outcomes: Outcomes, target: float, note: str) -> Figure:
    """Return a figure of accuracy over bytes: a row for each size of message, families by colour."""
    rows = []
    for size in SIZES:
        names = [name for name in grid.names_of_size(size) if name in outcomes]
        pens = {name: Pen(COLOURS[grid.about[name]["family"]]) for name in names}
        pens[experiment.PLAIN] = Pen(PLAIN)
        rows.append(_accuracy_row(grid, found, pens, target, f"{size} messages, "))
    legend = [*((name, Pen(colour)) for name, colour in COLOURS.items()), ("no compression", Pen(PLAIN))]
    sizes = ". ".join(filter(None, (describe_sizes(grid, outcomes, size) for size in SIZES)))
    subtitle = f"{grid.words}; the same compressor both ways. {sizes}"
    return draw_grid(rows, Frame("Families of compressors at two sizes of message", subtitle, legend, note))


def describe_sizes(grid: Experiment, outcomes: Outcomes, size: str) -> str:
    """Return the range of the messages up of the families of a size, in words; "" if none was run."""
    names = grid.names_of_size(size)
    ups = sorted(outcomes[name].message_up for name in names if name in outcomes)
    return (
        f"{size.capitalize()} messages take {format_bytes(ups[0])} to {format_bytes(ups[-1])} up"
        if ups
        else ""
    )


def draw_frontier(grid: Experiment, found: Found, outcomes: Outcomes, target: float, note: str) -> Figure:
    """Return a figure of accuracy over bytes: the lines that no other beats in colours, others in grey."""
    front = [each.name for each in pareto(outcomes)][: len(_FRONT)]
    pens = {name: Pen(colour) for name, colour in zip(front, _FRONT, strict=False)}
    if experiment.DEFAULT not in front:
        pens[experiment.DEFAULT] = Pen(INK, dashed=True)
    pens[experiment.PLAIN] = Pen(PLAIN)
    legend = [(grid.label(name), pen) for name, pen in pens.items()] + [("others", Pen(_FAINT))]
    every = pens | {name: Pen(_FAINT) for name in outcomes if name not in pens}
    rows = [_accuracy_row(grid, found, every, target, "")]
    subtitle = f"{grid.words}; in colours, the lines that no other beats in bytes to the target and accuracy"
    return draw_grid(rows, Frame("The frontier", subtitle, legend, note))


def _accuracy_row(
    grid: Experiment, found: Found, pens: Mapping[str, Pen], target: float, title: str
) -> list[tuple[Panel, Lines]]:
    """Return two panels of accuracy over bytes: all bytes, and those without first downloads."""
    cells = {name: grid.of_line(found, name) for name in pens}
    others = [cell for line in grid.lines for cell in grid.find_cells(found, None, line)]
    views: list[tuple[str, Callable[[SealedCell], SealedCell]]] = [
        ("all bytes", lambda cell: cell),
        ("without first downloads", lambda cell: without_first(cell, others)),
    ]
    row = []
    for words, view in views:
        panel = Panel(
            "accuracy", title + words, (Series("test_accuracy", ""),), "",
            "total_bytes", percent=True, side="test accuracy",
        )  # fmt: skip
        lines = [
            (name, [above(view(cell), LEAST_DRAWN * target) for cell in cells[name]], pen)
            for name, pen in pens.items()
        ]
        row.append(fill_panel(panel, lines))
    return row


@default_settings
def draw_target(grid: Experiment, outcomes: Outcomes, target: float, note: str) -> Figure:
    """Return a figure with a row for each line that reaches the target: bytes, and those without first."""
    ranked = rank(outcomes)
    missed = [grid.label(name) for name, each in outcomes.items() if not each.reached]
    subtitle = f"{grid.words}; all bytes (full dots), and without first downloads (rings)"
    if missed:
        note = f"did not reach it: {'; '.join(missed)}; {note}"
    figure = make_framed_figure(
        0.7 + 0.2 * len(ranked), Frame(f"Bytes of all clients to {target:.0%}", subtitle, (), note)
    )
    axes = figure.add_subplot(1, 1, 1)
    _draw_dots(axes, ranked, [grid.label(each.name) for each in ranked])
    return figure


def _draw_dots(axes: Axes, ranked: Sequence[Outcome], labels: Sequence[str]) -> None:
    style_axes(axes)
    for place, each in enumerate(ranked):
        colour = {experiment.DEFAULT: INK, experiment.PLAIN: PLAIN}.get(each.name, BLUE)
        axes.plot([each.cost.later, each.cost.total], [place] * 2, color=colour, linewidth=1)
        axes.plot(each.cost.total, place, "o", color=colour, markersize=6)
        axes.plot(each.cost.later, place, "o", color=colour, markersize=6, markerfacecolor="white")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel("bytes of all clients, up and down", color=MUTED, fontsize=9)
