"""Tables of the numbers behind the figures; the claims use the same measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from cfedavg.report import format_bytes
from cfedavg.sweep import SealedCell, count_cells, count_rounds
from paper.cfedavg.claims import measures as results
from paper.cfedavg.claims.cases import number, percent, points
from paper.cfedavg.claims.measures import Missing, Sample, Undecided

if TYPE_CHECKING:
    from paper.cfedavg.experiment import Experiment

_BUDGETS = (0.1, 1.0, 10.0, 100.0)
_NOTHING = "–"

Measure = Callable[[SealedCell], float]


def table(experiment: Experiment, found: Mapping[str, SealedCell]) -> list[list[str]]:
    """Return a header, then a row for each p and line; accuracies are in percent, ± over seeds."""
    columns = _TABLES[experiment.draw]
    rows = [["p", "line", "seeds", *columns]]
    for p, line in experiment.pairs():
        entries = experiment.find_cells(found, p, line)
        cells = [column(entries) if entries else _NOTHING for column in columns.values()]
        rows.append([_NOTHING if p is None else str(p), line.label, count_cells(entries), *cells])
    return rows


def _mean(measure: Measure, text: Callable[[float], str] = number) -> Callable[[Sequence[SealedCell]], str]:
    """Return the function of a column: the mean of a measure over the seeds, as text."""

    def column(entries: Sequence[SealedCell]) -> str:
        try:
            return text(results.mean([measure(entry) for entry in entries]))
        except (Missing, Undecided):
            return _NOTHING

    return column


def _accuracy(measure: Measure) -> Callable[[Sequence[SealedCell]], str]:
    """Return the function of a column: an accuracy with its spread over the seeds, as text."""

    def column(entries: Sequence[SealedCell]) -> str:
        try:
            return percent(Sample(tuple(map(measure, entries))))
        except Missing:
            return _NOTHING

    return column


def _last(name: str) -> Measure:
    """Return a measure: the last known number of a column of metrics."""
    return lambda entry: results.mean(results.column(entry, name)[-1:])


def _client_bytes(entry: SealedCell) -> float:
    clients: int = entry.settings["clients"]
    return math.fsum(results.column(entry, "uplink_bytes")) / clients


def _zigzag(entries: Sequence[SealedCell]) -> str:
    return points(Sample(tuple(map(results.zigzag, results.sound(entries)))))


def _at(budget: float) -> Measure:
    """Return a measure: the accuracy at a budget of model sizes; it raises Missing if the run sends less."""

    def measure(entry: SealedCell) -> float:
        sizes = results.column(entry, "model_sizes_sent")
        if not sizes or not 0.99 * sizes[0] <= budget <= 1.01 * math.fsum(sizes):
            raise Missing
        return results.accuracy_at(budget)(entry)

    return measure


_GROWN = _mean(results.still_grows, lambda share: "yes" if share > 0.5 else "no")


_TABLES: dict[str, dict[str, Callable[[Sequence[SealedCell]], str]]] = {
    "curves": {
        "rounds": count_rounds,
        "accuracy after the last round": _accuracy(_last("test_accuracy")),
        "mean of the last 5": _accuracy(results.final),
        "zigzag of the last 20, points": _zigzag,
        "uplink of a client": _mean(_client_bytes, format_bytes),
        "model sizes sent": _mean(results.sent, lambda sizes: number(sizes, ".4g")),
    },
    "budget": {f"accuracy at {budget:g} model sizes": _accuracy(_at(budget)) for budget in _BUDGETS},
    "norms": {
        "last ‖g‖²": _mean(_last("delta_norm2")),
        "last ‖e‖²": _mean(_last("error_norm2")),
        "‖e‖/‖g‖, last 20 rounds": _mean(results.residual_ratio),
        "‖e‖, last fifth/middle fifth": _mean(results.residual_growth),
        "still grows": _GROWN,
    },
}
