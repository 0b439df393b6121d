"""Panels: the numbers that each panel shows, its caption, and the scales and ticks of its axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib import ticker
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D

from cfedavg.core.units import format_bytes, format_time, is_share, spell_out, time_unit
from cfedavg.report.runs import Curve, Group, list_metrics, make_curve, prefer_metric

INK, MUTED, GRID = "#1F2328", "#59636E", "#E7EAEE"
LETTERS = 9.0  # points, the usual size
LABEL: dict[str, Any] = {"fontsize": LETTERS, "color": MUTED}  # the style of an axis label
# The places of legends: above all panels, or to the right of one panel's title.
ABOVE: dict[str, Any] = {
    "loc": "outside upper left", "borderaxespad": 0.9, "labelcolor": INK, "columnspacing": 1.6,
}  # fmt: skip
BESIDE_TITLE: dict[str, Any] = {
    "loc": "lower right", "bbox_to_anchor": (1.0, 0.99), "borderaxespad": 0.2, "ncols": 6,
    "labelcolor": MUTED,
}  # fmt: skip

# Okabe and Ito's colours for any colour vision, without their yellow, which is too pale on white.
BLUE, VERMILION, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY = "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY)
PLAIN = "#555555"  # for the uncompressed run, the baseline

STEPS = [1, 2, 5, 10]  # between ticks, times a power of 10
_FAR = 6.0  # if the totals of two runs differ by more than this factor, their axis is logarithmic
_WIDE = 30.0  # if the largest y exceeds this factor of the smallest, the y axis is logarithmic
_TIMES = [1e-3, 1e-2, 0.1, 0.3, 1, 3, 10, 30] + [
    unit * n
    for unit, ns in ((60, (1, 3, 10, 30)), (3600, (1, 3, 10)), (86_400, (1, 3, 10, 30, 100)))
    for n in ns
]
# The axes of amounts: the label, and the function that formats a tick.
_AMOUNTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "total_bytes": ("bytes of all clients so far, up and down", format_bytes),
    "uplink_bytes": ("bytes that all clients have sent so far", format_bytes),
    "client_bytes": ("bytes that a client has sent so far", format_bytes),
    "model_sizes_sent": ("model sizes that a client has sent so far", "{:g}".format),
}
_TIME_NAMES = {"simulated_seconds": "simulated time", "time": "time"}


@dataclass(frozen=True)
class Pen:
    """The style of a line; `crossed` puts a cross at the end, for a run that diverged."""

    colour: str
    dashed: bool = False
    crossed: bool = False


@dataclass(frozen=True)
class Series:
    """The numbers of a line in a panel: a column `key` of the metrics, with its name in the legend."""

    key: str
    name: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram. `name` is its file name without .png; `caption` says how to read the diagram."""

    name: str
    title: str
    series: tuple[Series, ...]
    caption: str
    x: str = "rounds"
    log: bool | None = False  # None: logarithmic only if the values span a large factor
    percent: bool = False
    side: str = ""  # along the y axis
    empty: str = "nothing recorded"  # the text if there are no lines


AXES = ("rounds", "total_bytes", "time")  # what x may be in a report

Lines = Sequence[tuple[Group, Pen]]  # what is drawn in a panel
Curves = Sequence[Curve]


# The panels of the metric, each as: name, x in words, key of x, caption.
_OUTCOMES = (
    (
        "metric-total", "total bytes", "total_bytes",
        "What each byte buys, up or down: at the same height, the line further left sends less "
        "(the axis is logarithmic where runs differ much).",
    ),
    (
        "metric-rounds", "rounds", "rounds",
        "What each round of communication buys: the sooner a line bends, the fewer rounds it needs.",
    ),
    (
        "metric-time", "time", "time",
        "What each second buys, simulated or, in a federation, real: at the same height, "
        "the line further left is faster (the axis is logarithmic where runs differ much).",
    ),
)  # fmt: skip
_CLIENTS = (Series("client_accuracy_mean", "mean"), Series("client_accuracy_min", "worst", dashed=True))
_EXPLANATIONS = (
    Panel(
        "loss", "loss", (Series("train_loss", "train"), Series("test_loss", "test", dashed=True)),
        "Loss on the clients' own data (solid) and on the test set (dashed): where the two part, "
        "the model fits the clients better than data it has not seen.",
        log=None,
    ),
    Panel(
        "clients", "accuracy of the clients", _CLIENTS,
        "The model on each client's own test data: the mean (solid) and the worst-off client (dashed).",
        percent=True,
    ),
    Panel(
        "norms", "squared norms",
        (Series("delta_norm2", "updates ‖g‖²"), Series("error_norm2", "residuals ‖e‖²", dashed=True)),
        "Mean size of the updates (solid) and of the residuals, which are not sent yet (dashed). "
        "A residual that levels off is healthy; one that keeps growing says that too little is sent.",
        log=True,
    ),
    Panel(
        "snr", "smallest signal-to-noise ratio", (Series("snr_min", ""),),
        "The worst client's ‖p‖² / ‖p − C(p)‖² in each round: higher is more faithful, "
        "and 1 would be as good as sending nothing.",
        log=None,
    ),
    Panel(
        "alpha", "disagreement of the clients, α", (Series("alpha", ""),),
        "Mean ‖gᵢ‖² over ‖mean g‖²: 1 if all clients move the same way, "
        "larger the more their updates cancel.",
        log=None,
    ),
)  # fmt: skip
_MAIN = ("metric-total", "metric-rounds", "loss", "norms")


def choose_panels(
    groups: Sequence[Group], metric: str, *, main: bool = False, over: str = "rounds"
) -> list[Panel]:
    """Return the panels for which at least one group has numbers, without series that have no numbers.

    `over` is the x axis of the panels that explain the metric, such as losses and norms: one of `AXES`. If no
    run is a federation, the axis of a panel over time says that time is simulated.

    With `main`, return the 4 main panels instead; a main panel without numbers is drawn empty.
    """
    line, percent = (Series(metric, ""),), is_share(metric)
    panels = [
        Panel(name, f"{spell_out(metric)} over {x_name}", line, caption, x, percent=percent)
        for name, x_name, x, caption in _OUTCOMES
    ]
    panels += [replace(panel, x=over) for panel in _EXPLANATIONS]
    runs = [run for group in groups for run in group.runs]
    known = {metric, *(series.key for series in _CLIENTS)}
    if own := [name for names in list_metrics(runs, "client_") for name in names if name not in known]:
        name = prefer_metric(own)
        caption = "The metric that the clients of a federation evaluate, as its strategy averages it."
        title = f"{spell_out(name)} over rounds"
        clients = Panel("clients-metric", title, (Series(name, ""),), caption, percent=is_share(name))
        panels.insert(4, clients)
    if not any(run.nodes for run in runs):
        panels = [replace(panel, x="simulated_seconds") if panel.x == "time" else panel for panel in panels]

    def has_numbers(series: Series, x: str) -> bool:
        return any(len(make_curve(group, x, series.key).x) for group in groups)

    panels = [replace(p, series=tuple(s for s in p.series if has_numbers(s, p.x))) for p in panels]
    return [panel for panel in panels if (panel.name in _MAIN if main else panel.series)]


# Axes


def finish_axes(axes: Axes, panel: Panel, drawn: Curves, in_column: Curves = (), in_row: Curves = ()) -> None:
    """Set the title, labels, scales and ticks of axes in which the curves `drawn` are drawn.

    `in_column` holds the curves of all axes that share the x axis with `axes`. `in_row` holds the curves of
    all axes that share the y axis.
    """
    set_title(axes, panel.title)
    axes.set_ylabel(replace_missing_glyphs(panel.side), parse_math=False, **LABEL)
    style_axes(axes)
    if not drawn:
        write_instead(axes, panel.empty)
        return
    _set_x(axes, panel.x, in_column or drawn)
    _set_y(axes, panel, [value for line in in_row or drawn for value in line.mean])
    if named := [series for series in panel.series if series.name]:
        styles: list[Any] = [(0, (3, 1.5)) if series.dashed else "solid" for series in named]
        handles = [Line2D([], [], color=MUTED, linewidth=1.6, linestyle=style) for style in styles]
        look = BESIDE_TITLE | {"handlelength": 1.7, "columnspacing": 1.2}
        add_legend(axes, handles, [series.name for series in named], **look)


def replace_missing_glyphs(text: str) -> str:
    """Return the text with `?` for each letter that the font lacks, for which matplotlib draws a box."""
    font = get_font(findfont(FontProperties()))
    return "".join(letter if letter == "\n" or font.get_char_index(ord(letter)) else "?" for letter in text)


def set_title(axes: Axes, text: str, size: float = 10.5) -> None:
    """Write a bold title at the left; a `$` in it begins no formula."""
    text = replace_missing_glyphs(text)
    axes.set_title(text, loc="left", fontsize=size, fontweight="bold", color=INK, parse_math=False)


def add_legend(parent: Axes | Figure, handles: Sequence[Artist], labels: Sequence[str], **look: Any) -> None:
    """Add a legend without a frame; a `$` in a label begins no formula. `look` goes to matplotlib."""
    usual: dict[str, Any] = {"frameon": False, "fontsize": LETTERS, "labelspacing": 0.35, "borderpad": 0.1}
    for text in parent.legend(handles, labels, **usual | look).get_texts():
        text.set_parse_math(False)


def write_instead(axes: Axes, text: str) -> None:
    """Write a text into axes that have no curve to show, and hide the tick labels."""
    axes.grid(False)
    axes.tick_params(labelbottom=False, labelleft=False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", **LABEL)


def style_axes(axes: Axes) -> None:
    """Give axes a bottom line and a faint grid, without tick marks."""
    axes.set_facecolor("white")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#AEB5BD")
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=LETTERS, length=0, which="both")


def _set_x(axes: Axes, x: str, drawn: Curves) -> None:
    low, ends = min(line.x[0] for line in drawn), [line.x[-1] for line in drawn]
    high, is_far = max(ends), max(ends) > _FAR * min(ends)
    if x == "rounds":
        name = "communication rounds"
        axes.set_xlim(0, max(1.03 * high, 2))
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8, steps=STEPS))
    elif x in _AMOUNTS:
        name, text = _AMOUNTS[x]
        if low > 0 and (is_far or x != "total_bytes"):
            axes.set_xscale("log")
            _log_ticks(axes.xaxis, low, high, text)
        else:
            axes.set_xlim(0, max(1.03 * high, 1))
            axes.xaxis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=STEPS))
            _format_ticks(axes.xaxis, text)
    elif low > 0 and is_far:
        name = f"{_TIME_NAMES[x]} so far"
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.FixedLocator([t for t in _TIMES if 0.8 * low < t < 1.25 * high]))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        _format_ticks(axes.xaxis, format_time)
    else:
        size, unit = time_unit(high)
        name = f"{_TIME_NAMES[x]} so far ({unit})"
        ticks = ticker.MaxNLocator(nbins=7, steps=STEPS).tick_values(low / size, high / size)
        axes.xaxis.set_major_locator(ticker.FixedLocator([size * tick for tick in ticks]))
        _format_ticks(axes.xaxis, lambda value: f"{value / size:g}")
    axes.set_xlabel(name, **LABEL)


def _set_y(axes: Axes, panel: Panel, values: list[float]) -> None:
    low, high = min(values), max(values)
    if panel.log or (panel.log is None and low > 0 and high / low > _WIDE):
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, low, high)
        return
    if panel.percent:
        _format_ticks(axes.yaxis, lambda value: f"{100 * value:.6g}%")
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.01))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=STEPS))


def _log_ticks(axis: Axis, low: float, high: float, text: Callable[[float], str] | None = None) -> None:
    """Put ticks at powers of 10; if `high` is below 100 `low`, also at 2 and 5 times powers of 10."""
    few = high / low < 100
    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=8))
    axis.set_minor_locator(ticker.NullLocator())
    if text or few:
        _format_ticks(axis, text or "{:g}".format)
    else:
        axis.set_major_formatter(ticker.LogFormatterMathtext())


def _format_ticks(axis: Axis, text: Callable[[float], str]) -> None:
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: text(value)))
