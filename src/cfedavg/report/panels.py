"""What the pictures show: which number over which, and how to read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cfedavg.core.units import is_share, spell_out
from cfedavg.report.groups import Group, curve
from cfedavg.report.pens import Pen
from cfedavg.report.read import best_of, evaluated

_CLIENTS = ("client_accuracy_mean", "client_accuracy_min")  # of a simulation, which asks each of them


@dataclass(frozen=True)
class Series:
    """One number of the rows and the style of its lines."""

    key: str
    name: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `name` is its file's; `caption` says in one sentence how to read it."""

    name: str
    title: str
    series: tuple[Series, ...]
    caption: str
    x: str = "rounds"
    log: bool | None = False  # None: where the numbers span more than a linear axis shows
    percent: bool = False
    side: str = ""  # along the y axis
    empty: str = "nothing recorded"  # instead of lines


@dataclass(frozen=True)
class Cell:
    """What one pair of axes shows: a pen for each group."""

    panel: Panel
    groups: Sequence[Group]
    pens: Sequence[Pen]


@dataclass(frozen=True)
class Frame:
    """What stands around the panels: two lines and the legend above them, the note below."""

    title: str
    subtitle: str
    legend: Sequence[tuple[str, Pen]]
    note: str = ""


def panels_for(groups: Sequence[Group], metric: str) -> list[Panel]:
    """The panels for which at least one group has numbers."""
    panels = _all(metric)
    runs = [run for group in groups for run in group.runs]
    own = [name for names in evaluated(runs, "client_") for name in names if name not in (metric, *_CLIENTS)]
    if own:
        panels.insert(4, _by_clients(best_of(own)))
    return [panel for panel in panels if any(has_data(panel, group) for group in groups)]


def _by_clients(metric: str) -> Panel:
    return Panel(
        "clients-metric", f"{spell_out(metric)} over rounds", (Series(metric, ""),),
        "What the clients of a federation have evaluated themselves, as its strategy sums it up.",
        percent=is_share(metric),
    )  # fmt: skip


def has_data(panel: Panel, group: Group) -> bool:
    return any(_has(panel, series, group) for series in panel.series)


def with_data(panel: Panel, groups: Sequence[Group]) -> Panel:
    """The panel with those of its series that some group has, or all of them if none has any."""
    found = tuple(each for each in panel.series if any(_has(panel, each, group) for group in groups))
    return replace(panel, series=found or panel.series)


def _has(panel: Panel, series: Series, group: Group) -> bool:
    return len(curve(group, panel.x, series.key).x) > 0


def four_for(metric: str) -> list[Panel]:
    """The four that tell most of one run; those without numbers stay, empty, in their place."""
    wanted = ("metric-total", "metric-rounds", "loss", "norms")
    return [panel for panel in _all(metric) if panel.name in wanted]


def _all(metric: str) -> list[Panel]:
    """Every panel, the outcome first and what explains it after."""
    title, line, percent = spell_out(metric), (Series(metric, ""),), is_share(metric)
    return [
        Panel(
            "metric-total", f"{title} over total bytes", line,
            "What each byte buys, up or down: at the same height, the line further left sends less "
            "(the axis is logarithmic where runs differ much).",
            x="total_bytes", percent=percent,
        ),
        Panel(
            "metric-rounds", f"{title} over rounds", line,
            "What each round of communication buys: the sooner a line bends, the fewer rounds it needs.",
            percent=percent,
        ),
        Panel(
            "metric-time", f"{title} over simulated time", line,
            "What each second of the simulated clients and links buys: at the same height, "
            "the line further left is faster (the axis is logarithmic where runs differ much).",
            x="simulated_seconds", percent=percent,
        ),
        Panel(
            "loss", "loss", (Series("train_loss", "train"), Series("test_loss", "test", dashed=True)),
            "Loss on the clients' own data (solid) and on the test set (dashed): where the two part, "
            "the model fits the clients better than data it has not seen.",
            log=None,
        ),
        Panel(
            "clients", "accuracy of the clients",
            (
                Series(_CLIENTS[0], "mean"),
                Series(_CLIENTS[1], "worst", dashed=True),
            ),
            "The model on each client's own test data: the mean (solid) and the worst-off client (dashed).",
            percent=True,
        ),
        Panel(
            "norms", "squared norms",
            (
                Series("delta_norm2", "updates ‖g‖²"),
                Series("error_norm2", "residuals ‖e‖²", dashed=True),
            ),
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
    ]  # fmt: skip
