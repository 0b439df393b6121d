"""The table: our accuracy beside the published one, a verdict for each cell, and the page."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cfedavg.sweep import SealedCell, write_markdown
from paper.common import NOT_RUN, best_so_far, judge_count, show_mean
from paper.niid_bench.experiment import METHODS, cells_of, load, names, read

POINTS, DEVIATIONS = 1.5, 2.0  # how far from the published mean a cell may be
BAR, BARRED = 42, 48  # so many of the cells with more than one label must be within
WITHIN, ABOVE, BELOW = "within", "above", "below"


@dataclass(frozen=True)
class Entry:
    """One cell of the table: accuracies in percent, ours one for each seed (empty: not run)."""

    data: str
    partition: str
    method: str
    published: tuple[float, float]
    ours: tuple[float, ...] = ()
    line: str = ""  # of the grid: for FedProx that of the best mu

    @property
    def counts(self) -> bool:
        """Whether the bar counts the cell: clients have more than one label."""
        return self.partition != "labels1"

    @property
    def verdict(self) -> str:
        """The verdict of the rule: within, above, below, or not run.

        >>> Entry("mnist", "iid", "fedavg", (99.0, 0.1), (97.4, 97.6)).verdict
        'within'
        >>> Entry("mnist", "iid", "fedavg", (99.0, 0.1), (97.3, 97.5)).verdict
        'below'
        """
        if not self.ours:
            return NOT_RUN
        mean, sd = self.published
        apart = statistics.fmean(self.ours) - mean
        if abs(apart) <= max(POINTS, DEVIATIONS * sd) + 1e-9:
            return WITHIN
        return ABOVE if apart > 0 else BELOW


def entries(found: Mapping[str, SealedCell], scale: str = "paper") -> list[Entry]:
    """Return all cells of the table, 60 of them; a cell is run if all its seeds ran all their rounds."""
    return [entry for name in names() for entry in _of_data_set(name, found, scale)]


def _of_data_set(name: str, found: Mapping[str, SealedCell], scale: str) -> Iterator[Entry]:
    seeds = read("grid")["seeds"]
    planned = load(name, scale).cells(range(seeds))
    whole = {
        cell: each
        for cell, each in found.items()
        if cell in planned and each.settings["rounds"] == planned[cell]["rounds"]
    }
    for partition, methods in read("published")[name].items():
        for method, lines in METHODS.items():
            ours, line = _best(name, partition, lines, whole, seeds)
            yield Entry(name, partition, method, tuple(methods[method]), ours, line)


def _best(
    name: str, partition: str, lines: tuple[str, ...], whole: Mapping[str, SealedCell], seeds: int
) -> tuple[tuple[float, ...], str]:
    """Return the accuracies of the line with the best mean, and its name; nothing if a seed is missing."""
    ran = {}
    for line in lines:
        cells = [whole.get(cell) for cell in cells_of(name, partition, line, seeds)]
        ran[line] = tuple(best_accuracy(cell) for cell in cells if cell is not None)
    if any(len(each) < seeds for each in ran.values()):
        return (), ""
    line = max(ran, key=lambda each: statistics.fmean(ran[each]))
    return ran[line], line


def best_accuracy(cell: SealedCell) -> float:
    """Return the best test accuracy over the rounds, in percent, also of a run that diverged later."""
    return 100 * max(best_so_far(cell), default=0.0)


def verdict(table: list[Entry]) -> str:
    """Return the verdict over the cells with more than one label."""
    counted = [entry for entry in table if entry.counts]
    within = sum(entry.verdict == WITHIN for entry in counted)
    ran = sum(entry.verdict != NOT_RUN for entry in counted)
    return judge_count(within, ran, BARRED, BAR)


def page(found: Mapping[str, SealedCell], scale: str = "paper") -> str:
    """Return the page: the verdict, a table for each data set, and the time on the GPU."""
    table, published = entries(found, scale), read("published")
    rule = (
        f"A cell is within if our mean lies within {DEVIATIONS:g} published standard deviations or {POINTS} "
        f"points of the published mean. Bar: {BAR} of the {BARRED} cells with more than one label."
    )
    head = ["# NIID-Bench, made again", "", f"Published: {published['source']}.", "", rule, ""]
    head += [f"**{verdict(table)}**", "", *_time(found, published["hours"]), ""]
    parts = [_part(name, [entry for entry in table if entry.data == name]) for name in names()]
    return "\n".join(head) + "\n" + "\n".join(parts)


def _part(name: str, table: list[Entry]) -> str:
    plan = read("grid")
    rows = [["clients hold", "method", "published", "ours", "verdict"]]
    for entry in table:
        label = plan["method"][entry.line]["name"] if entry.line else _method(entry.method)
        ours = show_mean(entry.ours) if entry.ours else "–"
        beside = "" if entry.counts or entry.verdict == NOT_RUN else ", no bar"
        cells = [
            plan["partition"][entry.partition]["name"],
            label,
            "{:.2f} ± {:.2f}".format(*entry.published),
        ]
        rows.append([*cells, ours, entry.verdict + beside])
    return f"## {plan['dataset'][name]['name']}\n\n{write_markdown(rows)}"


def _method(name: str) -> str:
    return {"fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD", "fednova": "FedNova"}[name]


def _time(found: Mapping[str, SealedCell], hours: float) -> list[str]:
    """Return a line with the minutes of a seed of each data set, all cells of a seed together."""
    rows = []
    for name in names():
        mine = [cell for cell in found.values() if cell.name.startswith(f"{name}-")]
        seeds = {cell.settings["seed"] for cell in mine}
        minutes = sum(cell.made["seconds"] / cell.made.get("together", 1) for cell in mine) / 60
        if mine:
            hardware = ", ".join(sorted({cell.made["hardware"] for cell in mine}))
            count, each = len(mine) // len(seeds), minutes / len(seeds)
            rows.append(f"{name}: {each:.1f} minutes a seed for {count} runs on {hardware}.")
    return [*rows, f"The published table took {hours} hours a seed on 56 threads."]
