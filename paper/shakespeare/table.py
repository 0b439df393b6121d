"""The tables: rounds and bytes to the target, a verdict for each bar, and the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from cfedavg.report import format_bytes
from cfedavg.sweep import SealedCell, write_markdown
from paper.common import NOT_RUN, best_so_far
from paper.shakespeare.experiment import choose_rates, load, read, search_scores

ROUNDS_BAR = 1.2  # times the published rounds, at most
BYTES_BAR = 15.0  # times fewer bytes in total, at least


@dataclass(frozen=True)
class Reached:
    """When one run reached the target: in which round, between rounds interpolated, and after how many bytes.

    Both are infinite if the run ended before.
    """

    seed: int
    rounds: float
    bytes: float


def reach(cell: SealedCell, target: float) -> Reached:
    """Return when a run reached the target, on the curve of the best accuracy so far."""
    curve, seed = best_so_far(cell), int(cell.settings["seed"])
    at = next((t for t, value in enumerate(curve) if value >= target), None)
    if at is None:
        return Reached(seed, math.inf, math.inf)
    below = curve[at - 1] if at else 0.0
    rounds = at + (target - below) / (curve[at] - below)
    return Reached(seed, rounds, math.fsum(cell.values["total_bytes"][: at + 1]))


@dataclass(frozen=True)
class Row:
    """The runs of one kind of local work and one compressor."""

    work: str
    variant: str
    rate: float
    planned: int  # seeds
    reached: tuple[Reached, ...]

    @property
    def rounds(self) -> float:
        """The mean rounds to the target; infinite if a seed did not reach it."""
        return statistics.fmean(each.rounds for each in self.reached)


def rows(found: Mapping[str, SealedCell], scale: str = "paper") -> list[Row]:
    """Return a row for each kind of local work and each compressor, also for those that were not run."""
    plan, target = read("grid"), read("published")["target"]
    rates, made = choose_rates(found, scale), []
    for work in plan["work"]:
        for variant in plan["variant"]:
            name = "dense" if variant == "none" else "compressed"
            rate, seeds, reached = rates.get(work, math.nan), plan[name]["seeds"], []
            planned = load(name, rates, scale).cells(range(seeds)) if len(rates) == len(plan["work"]) else {}
            for cell, settings in planned.items():
                mine = f"-{work}-{rate:g}-{variant}-seed" in cell and cell in found
                if mine and found[cell].settings["rounds"] == settings["rounds"]:
                    reached.append(reach(found[cell], target))
            made.append(Row(work, variant, rate, seeds, tuple(reached)))
    return made


def judge_rounds(row: Row) -> str:
    """Return the verdict on the rounds of a row without compression.

    >>> judge_rounds(Row("e1", "none", 1.47, 1, (Reached(0, 190.5, 1e9),)))
    'met: 190.5 rounds, 1.16 times the published 164, bar 1.2'
    """
    if len(row.reached) < row.planned:
        return f"open: {len(row.reached)} of {row.planned} seeds" if row.reached else NOT_RUN
    published = read("published")["rounds"][row.work]
    if math.isinf(row.rounds):
        return "missed: a seed did not reach the target"
    ratio = row.rounds / published
    word = "met" if ratio <= ROUNDS_BAR else "missed"
    return f"{word}: {row.rounds:.1f} rounds, {ratio:.2f} times the published {published}, bar {ROUNDS_BAR}"


def saving(row: Row, dense: Row) -> float:
    """Return how many times fewer bytes a row needs than the runs of the same seeds without compression."""
    plain = {each.seed: each.bytes for each in dense.reached}
    both = [(plain[each.seed], each.bytes) for each in row.reached if each.seed in plain]
    if not both or any(math.isinf(bytes) for _, bytes in both):
        return 0.0
    return statistics.fmean(before for before, _ in both) / statistics.fmean(after for _, after in both)


def judge_bytes(table: list[Row], work: str) -> str:
    """Return the verdict on the bytes: of the compressors, the one that saves most counts."""
    mine = {row.variant: row for row in table if row.work == work}
    dense, others = mine.pop("none"), list(mine.values())
    if not dense.reached or not any(row.reached for row in others):
        return NOT_RUN
    best = max(others, key=lambda row: saving(row, dense))
    factor, name = saving(best, dense), read("grid")["variant"][best.variant]["name"]
    if not factor:
        return "missed: no compressed run reached the target"
    word = "met" if factor >= BYTES_BAR else "missed"
    if word == "missed" and any(len(row.reached) < row.planned for row in others):
        word = "open"
    return f"{word}: {factor:.1f} times fewer bytes with {name}, bar {BYTES_BAR:g}"


def verdicts(found: Mapping[str, SealedCell], scale: str = "paper") -> dict[str, str]:
    """Return the verdict of each bar, by what it is about."""
    table, plan = rows(found, scale), read("grid")
    about = {
        f"rounds, {plan['work'][row.work]['name']}": judge_rounds(row)
        for row in table
        if row.variant == "none"
    }
    return about | {f"bytes, {each['name']}": judge_bytes(table, work) for work, each in plan["work"].items()}


def page(found: Mapping[str, SealedCell], scale: str = "paper") -> str:
    """Return the page: the verdicts, the runs to the target and the search of the rate."""
    published, table = read("published"), rows(found, scale)
    share = f"{published['target']:.0%}"
    bars = [["bar", "verdict"], *([about, text] for about, text in verdicts(found, scale).items())]
    head = [
        "# Shakespeare, made again", "", f"Published: {published['source']}.", "",
        f"Rounds to {share} test accuracy, on the curve of the best accuracy so far, between rounds "
        f"interpolated. Bars: at most {ROUNDS_BAR} times the published rounds; with both directions "
        f"compressed at least {BYTES_BAR:g} times fewer bytes in total, first downloads included.", "",
        write_markdown(bars),
    ]  # fmt: skip
    parts = [f"## Rounds and bytes to {share}", "", write_markdown(_runs(table))]
    parts += ["## The search of the rate", "", *_search(found, scale), *_time(found)]
    return "\n".join([*head, *parts]) + "\n"


def _runs(table: list[Row]) -> list[list[str]]:
    plan, published = read("grid"), read("published")["rounds"]
    lines = [["local work", "both directions", "rate", "seeds", "published rounds", "rounds, by seed",
              "total bytes, by seed", "times fewer"]]  # fmt: skip
    dense = {row.work: row for row in table if row.variant == "none"}
    for row in table:
        names = [plan["work"][row.work]["name"], plan["variant"][row.variant]["name"]]
        there = str(published[row.work]) if row.variant == "none" else "–"
        if not row.reached:
            lines.append([*names, "–", NOT_RUN, there, "–", "–", "–"])
            continue
        rounds = ", ".join(_or_never(each.rounds, f"{each.rounds:.1f}") for each in row.reached)
        sent = ", ".join(_or_never(each.bytes, format_bytes(each.bytes)) for each in row.reached)
        factor = 0.0 if row.variant == "none" else saving(row, dense[row.work])
        times = f"{factor:.1f}" if factor else "–"
        lines.append([*names, f"{row.rate:g}", str(len(row.reached)), there, rounds, sent, times])
    return lines


def _or_never(value: float, text: str) -> str:
    return "not reached" if math.isinf(value) else text


def _search(found: Mapping[str, SealedCell], scale: str) -> list[str]:
    """Return the best accuracy of each rate, and a sentence if the best rate is at the edge of the grid."""
    plan, scores = read("grid"), search_scores(found, scale)
    rates, rounds = plan["search"]["rates"], plan["search"]["rounds"]
    lines, edges = [["best accuracy", *(f"rate {rate:g}" for rate in rates)]], []
    for work, each in plan["work"].items():
        mine = scores.get(work, {})
        lines.append([each["name"], *(f"{mine[r]:.2%}" if r in mine else NOT_RUN for r in rates)])
        if (best := choose_rates(found, scale).get(work)) in (rates[0], rates[-1]):
            edges.append(f"{each['name']}: the best rate, {best:g}, is at the edge of the grid.")
    return [
        f"One seed, {rounds} rounds; the rate with the best accuracy is taken.",
        "",
        write_markdown(lines),
        *edges,
    ]


def _time(found: Mapping[str, SealedCell]) -> list[str]:
    """Return a line with the minutes that all cells took."""
    if not found:
        return []
    minutes = sum(cell.made["seconds"] / cell.made.get("together", 1) for cell in found.values()) / 60
    hardware = ", ".join(sorted({cell.made["hardware"] for cell in found.values()}))
    return [f"All {len(found)} runs took {minutes:.1f} minutes on {hardware}."]
