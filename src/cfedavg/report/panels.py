"""Definitions of panels: which numbers are drawn over which x, in which style, with which caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cfedavg.core.units import is_share, spell_out
from cfedavg.report.groups import Group, make_curve
from cfedavg.report.read import list_metrics, prefer_metric

# Okabe and Ito's colours for any colour vision, without their yellow, which is too pale on white.
BLUE, VERMILION, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY = "#E69F00", "#56B4E9"
COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY)
PLAIN = "#555555"  # for the uncompressed run, the baseline


@dataclass(frozen=True)
class Pen:
    """The style of a line; `crossed` puts a cross at the end, for a run that diverged."""

    colour: str
    dashed: bool = False
    crossed: bool = False


@dataclass(frozen=True)
class Series:
    """A column of the metrics, `key`, with its name in the legend and its line style."""

    key: str
    name: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `name` is the file name without .png; `caption` says how to read the panel."""

    name: str
    title: str
    series: tuple[Series, ...]
    caption: str
    x: str = "rounds"
    log: bool | None = False  # None: logarithmic only if the values span a large factor
    percent: bool = False
    side: str = ""  # along the y axis
    empty: str = "nothing recorded"  # the text if there are no lines


@dataclass(frozen=True)
class Cell:
    """One place of a grid: a panel, the groups to draw in the panel, and a pen for each group."""

    panel: Panel
    groups: Sequence[Group]
    pens: Sequence[Pen]


@dataclass(frozen=True)
class Frame:
    """The text around panels: title, subtitle and legend above the panels, `note` below."""

    title: str
    subtitle: str
    legend: Sequence[tuple[str, Pen]]
    note: str = ""


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
        "metric-time", "simulated time", "simulated_seconds",
        "What each second of the simulated clients and links buys: at the same height, "
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
        "Mean size of the updates (solid) and of what error feedback still owes the server (dashed): "
        "a residual that levels off is healthy, one that keeps climbing says too little is sent.",
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


def _list_panels(metric: str) -> list[Panel]:
    """Return every panel: first those of the metric, then loss, clients, norms, SNR and alpha."""
    line, percent = (Series(metric, ""),), is_share(metric)
    outcomes = [
        Panel(name, f"{spell_out(metric)} over {over}", line, caption, x=x, percent=percent)
        for name, over, x, caption in _OUTCOMES
    ]
    return [*outcomes, *_EXPLANATIONS]


def choose_panels(groups: Sequence[Group], metric: str) -> list[Panel]:
    """Return the panels for which at least one group has numbers."""
    panels = _list_panels(metric)
    runs = [run for group in groups for run in group.runs]
    known = {metric, *(series.key for series in _CLIENTS)}
    own = [name for names in list_metrics(runs, "client_") for name in names if name not in known]
    if own:
        name = prefer_metric(own)
        caption = "What the clients of a federation have evaluated themselves, as its strategy sums it up."
        title = f"{spell_out(name)} over rounds"
        clients = Panel("clients-metric", title, (Series(name, ""),), caption, percent=is_share(name))
        panels.insert(4, clients)
    return [p for p in panels if any(_has_data(p, series, g) for series in p.series for g in groups)]


def choose_main_panels(metric: str) -> list[Panel]:
    """Return the 4 main panels of one run; panels without numbers are drawn empty."""
    wanted = ("metric-total", "metric-rounds", "loss", "norms")
    return [panel for panel in _list_panels(metric) if panel.name in wanted]


def drop_empty_series(panel: Panel, groups: Sequence[Group]) -> Panel:
    """Return the panel without the series that no group has; if no group has any, return the whole panel."""
    found = tuple(each for each in panel.series if any(_has_data(panel, each, group) for group in groups))
    return replace(panel, series=found or panel.series)


def _has_data(panel: Panel, series: Series, group: Group) -> bool:
    return len(make_curve(group, panel.x, series.key).x) > 0
