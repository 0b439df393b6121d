"""What archived cells say, in the numbers that claims are decided by.

A run that left the finite numbers has failed: its accuracy counts as chance. How large the residuals are,
how a curve zigzags, and what others are measured against, is told by the seeds that did not.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cfedavg.sweep import SealedCell

CHANCE = 0.1  # of guessing one of ten classes
CLOSE = 0.005  # half a point of accuracy
LAST = 5  # rounds that make up the final accuracy
TAIL = 20  # rounds at the end that say how a curve zigzags and how large the residuals are
ROUGHER = 1.6  # times: by less, deviations of 20 rounds each may differ by chance (two standard errors)
STEADY = 1e-4  # no zigzag is less: one image of ten thousand
GROWS = 1.2  # a residual that keeps growing is this much larger at the end than in the middle


class Missing(Exception):
    """A judge asked for a cell that is not there, or for a column that the cell does not have."""


class Undecided(Exception):
    """The cells are there but do not decide; the message says why."""


def column(entry: SealedCell, name: str) -> list[float]:
    """Return what was measured, without the rounds in which nothing was."""
    return [value for value in entry.values.get(name) or () if value is not None]


def diverged(entry: SealedCell) -> bool:
    return "diverged" in entry.values


def sound(entries: Sequence[SealedCell]) -> list[SealedCell]:
    """Return the cells that did not diverge; all of them, if every one did."""
    return [entry for entry in entries if not diverged(entry)] or list(entries)


def final(entry: SealedCell) -> float:
    """Return the accuracy at the end: the mean of the last five rounds."""
    return CHANCE if diverged(entry) else mean(column(entry, "test_accuracy")[-LAST:])


def first(entry: SealedCell) -> float:
    """Return the accuracy after the first round that was evaluated."""
    return (column(entry, "test_accuracy") or [CHANCE])[0]


def curve(entry: SealedCell) -> float:
    """Return the accuracy averaged over all rounds: high if a run is fast, and ends high."""
    return CHANCE if diverged(entry) else mean(column(entry, "test_accuracy"))


def zigzag(entry: SealedCell) -> float:
    """Return how far the accuracy strays from a line through its last 20 rounds (standard deviation).

    From a line, because a curve that still rises steadily does not zigzag.
    """
    if diverged(entry):
        return math.inf
    seen = column(entry, "test_accuracy")[-TAIL:]
    if len(seen) < 3:
        return 0.0
    slope, start = statistics.linear_regression(range(len(seen)), seen)
    return math.sqrt(math.fsum((y - start - slope * x) ** 2 for x, y in enumerate(seen)) / (len(seen) - 2))


def rounds_to(accuracy: float) -> Callable[[SealedCell], float]:
    """Make a measure: the rounds until the accuracy is this high, infinite if it never is.

    A tip of a zigzag is not enough: with the four rounds after it, it has to be so on average.
    """

    def measure(entry: SealedCell) -> float:
        seen = [] if diverged(entry) else entry.values.get("test_accuracy") or []
        known = [(t, each) for t, each in enumerate(seen, 1) if each is not None]
        for i, (t, each) in enumerate(known):
            start = max(0, min(i, len(known) - LAST))  # at the end, with those before it
            if each >= accuracy and mean([near for _, near in known[start : start + LAST]]) >= accuracy:
                return t
        return math.inf

    return measure


def accuracy_at(budget: float) -> Callable[[SealedCell], float]:
    """Make a measure: the accuracy in the round nearest to a budget of model sizes that a client sends."""

    def measure(entry: SealedCell) -> float:
        sizes, seen = (entry.values.get(name) or () for name in ("model_sizes_sent", "test_accuracy"))
        spent = list(itertools.accumulate((size or 0.0 for size in sizes), initial=0.0))
        rounds = min(range(len(spent)), key=lambda t: abs(spent[t] - budget))
        known = [accuracy for accuracy in seen[:rounds] if accuracy is not None]
        return known[-1] if known and not diverged(entry) else CHANCE

    return measure


def sent(entry: SealedCell) -> float:
    """Return the model sizes that a client sends in the whole run."""
    return math.fsum(column(entry, "model_sizes_sent"))


def residual(entry: SealedCell) -> float:
    """Return the clients' mean |e_i| over the last 20 rounds."""
    _stayed_finite(entry)
    return mean(column(entry, "error_norm")[-TAIL:])


def residual_ratio(entry: SealedCell, norm: str = "norm") -> float:
    """Return residuals over updates, both as means of the last 20 rounds; `norm2` takes squared norms."""
    _stayed_finite(entry)
    update = mean(column(entry, f"delta_{norm}")[-TAIL:])
    return mean(column(entry, f"error_{norm}")[-TAIL:]) / update if update else math.inf


def residual_growth(entry: SealedCell) -> float:
    """Return the mean residual of the last fifth of the rounds over that of the fifth in the middle."""
    _stayed_finite(entry)
    seen = column(entry, "error_norm")
    fifth = max(1, len(seen) // 5)
    start = (len(seen) - fifth) // 2
    middle = mean(seen[start : start + fifth])
    return mean(seen[-fifth:]) / middle if middle else 1.0


def residual_peak(entry: SealedCell) -> float:
    """Return the round in which the mean residual is largest."""
    _stayed_finite(entry)
    seen = column(entry, "error_norm")
    return 1 + seen.index(max(seen)) if seen else 0.0


def still_grows(entry: SealedCell) -> float:
    """Return 1 if the residual has grown since the middle and peaks in the last five rounds, else 0."""
    late = len(column(entry, "error_norm")) - residual_peak(entry) < LAST
    return float(late and residual_growth(entry) > GROWS)


def _stayed_finite(entry: SealedCell) -> None:
    """Raise Undecided for a run that diverged: its residuals say nothing about compression."""
    if diverged(entry):
        raise Undecided("diverged")


def mean(values: Sequence[float]) -> float:
    if not values:
        raise Missing
    return statistics.fmean(values)


@dataclass(frozen=True)
class Sample:
    """A measure's value for each seed. `wobble` is the standard error of a seed that is alone."""

    values: tuple[float, ...]
    wobble: float = 0.0
    diverged: int = 0
    left_out: int = 0  # seeds that diverged and are not among the values

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """Return the standard deviation over seeds; 0 where it cannot be told."""
        several = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return statistics.stdev(self.values) if several else 0.0


def standard_error(a: Sample, b: Sample) -> float:
    """Return the standard error of the difference of two means, from the pooled spread of both.

    >>> standard_error(Sample((1.0, 3.0)), Sample((1.0, 3.0))) == math.sqrt(2)
    True
    """
    n, m = len(a.values), len(b.values)
    if n + m == 2:
        return math.hypot(a.wobble, b.wobble)
    pooled = ((n - 1) * a.std**2 + (m - 1) * b.std**2) / (n + m - 2)
    return math.sqrt(pooled * (1 / n + 1 / m))


def above(a: Sample, bar: float) -> int | None:
    """Return 1 if a is above the bar, -1 if below, None within two standard errors of it.

    >>> [above(Sample((0.5,), wobble=w), 0.45) for w in (0.04, 0.01)], above(Sample((0.4, 0.42)), 0.45)
    ([None, 1], -1)
    """
    error = a.std / math.sqrt(len(a.values)) if len(a.values) > 1 else a.wobble
    if abs(a.mean - bar) <= 2 * error:
        return None
    return 1 if a.mean > bar else -1


def rougher(a: Sample, b: Sample) -> int | None:
    """Return 1 if a zigzags more than b, 0 if alike, -1 if less, None if the seeds differ too much to tell.

    They differ by factors, so logarithms are compared.

    >>> one, two = Sample((0.01,)), Sample((0.02,))
    >>> rougher(two, one), rougher(Sample((0.015,)), one), rougher(one, Sample((math.inf,)))
    (1, 0, -1)
    >>> rougher(Sample((0.001, 0.1)), Sample((0.001, 0.001)))
    """
    a, b = (replace(each, values=tuple(map(_log, each.values))) for each in (a, b))
    difference, chance = a.mean - b.mean, 2 * standard_error(a, b)
    if abs(difference) > max(chance, math.log(ROUGHER)):
        return 1 if difference > 0 else -1
    return None if chance > math.log(ROUGHER) else 0


def _log(zigzag: float) -> float:
    return math.log(max(zigzag, STEADY))


def typical(zigzags: Sample) -> float:
    """Return the geometric mean of zigzags.

    >>> round(typical(Sample((0.01, 0.04))), 6)
    0.02
    """
    return math.exp(statistics.fmean(map(_log, zigzags.values)))


def compare(a: Sample, b: Sample) -> int | None:
    """Return 1 if a is ahead of b, -1 if behind, 0 if not ahead, None if that cannot be told.

    >>> compare(Sample((0.99,)), Sample((0.98,))), compare(Sample((0.99,)), Sample((0.987,)))
    (1, 0)
    """
    return ahead(a.mean - b.mean, standard_error(a, b))


def ahead(difference: float, error: float) -> int | None:
    """Return 1 for more than half a point and two standard errors, -1 for as much below zero.

    Otherwise 0 if it surely is less than half a point, None if it may be more.

    >>> [ahead(difference, 0.01) for difference in (0.03, 0.01, -0.016, -0.03)]
    [1, None, 0, -1]
    """
    if abs(difference) > max(CLOSE, 2 * error):
        return 1 if difference > 0 else -1
    return 0 if difference + 2 * error <= CLOSE else None


def as_good(a: Sample, b: Sample) -> int | None:
    """Return 1 if a is at most half a point below b, -1 if behind or diverged, None if that cannot be told.

    >>> as_good(Sample((0.9, 0.94)), Sample((0.94, 0.94))), as_good(Sample((0.9,)), Sample((0.94,)))
    (None, -1)
    """
    if a.diverged or compare(a, b) == -1:
        return -1
    return 1 if a.mean >= b.mean - CLOSE else None


class Results:
    """An archive, asked for lines of figures. It remembers in `shown` which cells it was asked for.

    `planned` is how many rounds the runs should have.
    """

    def __init__(self, found: Mapping[str, SealedCell], planned: Mapping[str, int] | None = None) -> None:
        self.found, self.planned = found, planned or {}
        self.shown: dict[str, None] = {}
        self.lengths: set[int] = set()  # rounds of the runs that were asked for; a judge clears it
        self._by_plan: set[str] = set()  # cells of which only the plan was asked

    def cut(self) -> str:
        """Say of how many rounds a verdict is, where runs are not whole."""
        runs = [
            (self.found[name].settings["rounds"], self.planned[name])
            for name in self.shown
            if name in self.planned and name not in self._by_plan
        ]
        short = sorted({pair for pair in runs if pair[0] < pair[1]})
        part = "in part " if any(done == whole for done, whole in runs) else ""
        return "".join(f", {part}after {done} of {whole} rounds" for done, whole in short)

    def line(self, dataset: str, p: int, name: str) -> list[SealedCell]:
        """Return the cells of a line over seeds; raise Missing if none says anything."""
        if not (cells := self._cells(dataset, p, name)):
            raise Missing
        self.shown |= dict.fromkeys(entry.name for entry in cells)
        self.lengths |= {entry.settings["rounds"] for entry in cells}
        return cells

    def unlike(self) -> str:
        """Say why the runs that were asked for are not compared, if they differ in length."""
        if len(self.lengths) < 2:
            return ""
        return f" (runs of {' and '.join(map(str, sorted(self.lengths)))} rounds are not compared)"

    def has(self, dataset: str, p: int, *names: str) -> bool:
        """Whether all of these lines are there; asking does not show them."""
        return all(self._cells(dataset, p, name) for name in names)

    def _cells(self, dataset: str, p: int, name: str) -> list[SealedCell]:
        stem = f"{dataset}-p{p}-{name}-seed"
        cells = [e for n, e in self.found.items() if n.startswith(stem) and n[len(stem) :].isdigit()]
        return [entry for entry in cells if diverged(entry) or column(entry, "test_accuracy")]

    def plan(self, dataset: str, p: int, name: str) -> tuple[SealedCell, int]:
        """Return the first cell of a line, and the rounds that it should have, run or not."""
        cells = self.line(dataset, p, name)
        self._by_plan |= {entry.name for entry in cells}
        return cells[0], self.planned.get(cells[0].name, cells[0].settings["rounds"])

    def is_cut(self, dataset: str, p: int, name: str) -> bool:
        """Whether a line has runs of fewer rounds than they should have."""
        return any(
            entry.settings["rounds"] < self.planned.get(entry.name, 0)
            for entry in self.line(dataset, p, name)
        )

    def study(self, name: str) -> dict[str, SealedCell]:
        """Return the cells of a small study; raise Missing if there is none."""
        cells = {n: entry for n, entry in self.found.items() if n.startswith(f"{name}-")}
        if not cells:
            raise Missing
        self.shown |= dict.fromkeys(cells)
        return cells

    def sample(self, dataset: str, p: int, name: str, measure: Callable[[SealedCell], float]) -> Sample:
        """Return a measure of a line, for each seed."""
        cells = self.line(dataset, p, name)
        return Sample(tuple(map(measure, cells)), diverged=sum(map(diverged, cells)))

    def residuals(self, dataset: str, p: int, name: str, measure: Callable[[SealedCell], float]) -> float:
        """Return the mean of a measure of residuals; raise Undecided if all seeds diverged."""
        return mean(list(map(measure, sound(self.line(dataset, p, name)))))

    def zigzags(self, dataset: str, p: int, name: str) -> Sample:
        """Return the zigzag of each seed of a line."""
        cells = self.line(dataset, p, name)
        kept = sound(cells)
        return Sample(tuple(map(zigzag, kept)), 0.0, sum(map(diverged, kept)), len(cells) - len(kept))

    def finals(self, dataset: str, p: int, name: str) -> Sample:
        """Return the final accuracies."""
        return self._accuracy(self.line(dataset, p, name), final, LAST)

    def reference(self, dataset: str, p: int, name: str) -> Sample:
        """Return the final accuracies of a line that others are compared with."""
        cells = self.line(dataset, p, name)
        kept = sound(cells)
        return replace(self._accuracy(kept, final, LAST), left_out=len(cells) - len(kept))

    def curves(self, dataset: str, p: int, name: str) -> Sample:
        """Return the accuracies averaged over all rounds."""
        cells = self.line(dataset, p, name)
        return self._accuracy(cells, curve, max(1, len(column(cells[0], "test_accuracy"))))

    def at_budget(self, dataset: str, p: int, name: str, budget: float) -> Sample:
        """Return the accuracies, of one round each, for a budget."""
        return self._accuracy(self.line(dataset, p, name), accuracy_at(budget), 1)

    @staticmethod
    def _accuracy(cells: list[SealedCell], measure: Callable[[SealedCell], float], rounds: int) -> Sample:
        """Measure accuracies; a seed that is alone has its error from its zigzag over so many rounds."""
        wobble = 0.0 if diverged(cells[0]) else zigzag(cells[0]) / math.sqrt(rounds)
        return Sample(tuple(map(measure, cells)), wobble, sum(map(diverged, cells)))

    def bar(self, dataset: str, p: int, reference: str = "none") -> float:
        """Return the accuracy of a run that trains: 3 times chance, and half of the reference's gain."""
        return max(3 * CHANCE, (CHANCE + self.reference(dataset, p, reference).mean) / 2)
