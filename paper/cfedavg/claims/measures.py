"""Measures of finished cells: the numbers that decide claims.

If a run diverged, that is, met infinity or NaN, its accuracy counts as chance. Residuals, zigzags and
references are measured on the seeds that did not diverge.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from cfedavg.sweep import SealedCell

CHANCE = 0.1  # the accuracy of guessing one of ten classes
CLOSE = 0.005  # half a point of accuracy
LAST = 5  # rounds that make up the final accuracy
TAIL = 20  # last rounds, in which zigzags and residuals are measured
ROUGHER = 1.6  # the least factor between zigzags of 20 rounds that is not chance (two standard errors)
STEADY = 1e-4  # the least zigzag: one image of ten thousand
GROWS = 1.2  # the least ratio of the last residuals to the middle ones if they keep growing


class Missing(Exception):
    """Raised if a judge needs a cell, or a column of a cell, that does not exist."""


class Undecided(Exception):
    """Raised if the cells exist but do not decide the case; the message says why."""


def column(entry: SealedCell, name: str) -> list[float]:
    """Return a column of a cell's metrics, without the rounds in which nothing was measured."""
    return [value for value in entry.values.get(name) or () if value is not None]


def diverged(entry: SealedCell) -> bool:
    return "diverged" in entry.values


def sound(entries: Sequence[SealedCell]) -> list[SealedCell]:
    """Return the cells that did not diverge; if all diverged, return all."""
    return [entry for entry in entries if not diverged(entry)] or list(entries)


def final(entry: SealedCell) -> float:
    """Return the accuracy at the end: the mean of the last five rounds."""
    return CHANCE if diverged(entry) else mean(column(entry, "test_accuracy")[-LAST:])


def first(entry: SealedCell) -> float:
    """Return the accuracy after the first round that was evaluated."""
    return (column(entry, "test_accuracy") or [CHANCE])[0]


def curve(entry: SealedCell) -> float:
    """Return the mean accuracy over all rounds; a run that learns fast and ends high has a high mean."""
    return CHANCE if diverged(entry) else mean(column(entry, "test_accuracy"))


def zigzag(entry: SealedCell) -> float:
    """Return the standard deviation of the last 20 accuracies from a line fitted through them.

    The line is subtracted because a curve that rises steadily does not zigzag.
    """
    if diverged(entry):
        return math.inf
    seen = column(entry, "test_accuracy")[-TAIL:]
    if len(seen) < 3:
        return 0.0
    slope, start = statistics.linear_regression(range(len(seen)), seen)
    return math.sqrt(math.fsum((y - start - slope * x) ** 2 for x, y in enumerate(seen)) / (len(seen) - 2))


def rounds_to(accuracy: float) -> Callable[[SealedCell], float]:
    """Return a measure: the first round with at least this accuracy, or infinity.

    The mean of this round and the next four must be as high too, so that one peak is not enough.
    """

    def measure(entry: SealedCell) -> float:
        seen = [] if diverged(entry) else entry.values.get("test_accuracy") or []
        known = [(t, each) for t, each in enumerate(seen, 1) if each is not None]
        for i, (t, each) in enumerate(known):
            start = max(0, min(i, len(known) - LAST))  # near the end, the last five rounds
            if each >= accuracy and mean([near for _, near in known[start : start + LAST]]) >= accuracy:
                return t
        return math.inf

    return measure


def accuracy_at(budget: float) -> Callable[[SealedCell], float]:
    """Return a measure: the accuracy in the round in which a client has sent about `budget` model sizes."""

    def measure(entry: SealedCell) -> float:
        sizes, seen = (entry.values.get(name) or () for name in ("model_sizes_sent", "test_accuracy"))
        spent = list(itertools.accumulate((size or 0.0 for size in sizes), initial=0.0))
        rounds = min(range(len(spent)), key=lambda t: abs(spent[t] - budget))
        known = [accuracy for accuracy in seen[:rounds] if accuracy is not None]
        return known[-1] if known and not diverged(entry) else CHANCE

    return measure


def sent(entry: SealedCell) -> float:
    """Return how much a client sends in the whole run, in model sizes."""
    return math.fsum(column(entry, "model_sizes_sent"))


def residual(entry: SealedCell) -> float:
    """Return the mean residual norm |e_i| over clients and the last 20 rounds."""
    _stayed_finite(entry)
    return mean(column(entry, "error_norm")[-TAIL:])


def residual_ratio(entry: SealedCell, norm: str = "norm") -> float:
    """Return mean residual norm / mean update norm over the last 20 rounds; "norm2" takes squared norms."""
    _stayed_finite(entry)
    update = mean(column(entry, f"delta_{norm}")[-TAIL:])
    return mean(column(entry, f"error_{norm}")[-TAIL:]) / update if update else math.inf


def residual_growth(entry: SealedCell) -> float:
    """Return the mean residual of the last fifth of the rounds / that of the middle fifth."""
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
    """Raise Undecided if the run diverged, since its residuals say nothing about compression."""
    if diverged(entry):
        raise Undecided("diverged")


def mean(values: Sequence[float]) -> float:
    if not values:
        raise Missing
    return statistics.fmean(values)


@dataclass(frozen=True)
class Sample:
    """The values of a measure, one for each seed. `wobble` is the standard error if there is one seed."""

    values: tuple[float, ...]
    wobble: float = 0.0
    diverged: int = 0
    left_out: int = 0  # seeds that diverged and are not among the values

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        """Return the standard deviation over seeds; 0 if there is one seed or a value is infinite."""
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
    """Return 1 if the mean of `a` is above `bar`, -1 if below, None if within two standard errors.

    >>> [above(Sample((0.5,), wobble=w), 0.45) for w in (0.04, 0.01)], above(Sample((0.4, 0.42)), 0.45)
    ([None, 1], -1)
    """
    error = a.std / math.sqrt(len(a.values)) if len(a.values) > 1 else a.wobble
    if abs(a.mean - bar) <= 2 * error:
        return None
    return 1 if a.mean > bar else -1


def rougher(a: Sample, b: Sample) -> int | None:
    """Return 1 if `a` zigzags more than `b`, 0 if alike, -1 if less, None if the seeds differ too much.

    The logarithms are compared, since zigzags differ by factors.

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
    """Return 1 if `a` is ahead of `b`, -1 if behind, 0 if not ahead, None if uncertain; see `ahead`.

    >>> compare(Sample((0.99,)), Sample((0.98,))), compare(Sample((0.99,)), Sample((0.987,)))
    (1, 0)
    """
    return ahead(a.mean - b.mean, standard_error(a, b))


def ahead(difference: float, error: float) -> int | None:
    """Return 1 if the difference exceeds half a point and two standard errors, -1 if its negative does.

    Else return 0 if the difference plus two standard errors is at most half a point, else None.

    >>> [ahead(difference, 0.01) for difference in (0.03, 0.01, -0.016, -0.03)]
    [1, None, 0, -1]
    """
    if abs(difference) > max(CLOSE, 2 * error):
        return 1 if difference > 0 else -1
    return 0 if difference + 2 * error <= CLOSE else None


def as_good(a: Sample, b: Sample) -> int | None:
    """Return 1 if `a` is at most half a point below `b`, -1 if behind or diverged, None if uncertain.

    >>> as_good(Sample((0.9, 0.94)), Sample((0.94, 0.94))), as_good(Sample((0.9,)), Sample((0.94,)))
    (None, -1)
    """
    if a.diverged or compare(a, b) == -1:
        return -1
    return 1 if a.mean >= b.mean - CLOSE else None


class Results:
    """The finished cells, looked up by line of a figure. `shown` holds the names of cells looked up.

    `planned` holds how many rounds each run should have, by the cell's name.
    """

    def __init__(self, found: Mapping[str, SealedCell], planned: Mapping[str, int] | None = None) -> None:
        self.found, self.planned = found, planned or {}
        self.shown: dict[str, None] = {}
        self.lengths: set[int] = set()  # rounds of the runs looked up; `weigh` clears this set
        self._by_plan: set[str] = set()  # cells of which only the planned rounds were used

    def cut(self) -> str:
        """Return a text that says how many of the planned rounds were run; "" if all were."""
        runs = [
            (self.found[name].settings["rounds"], self.planned[name])
            for name in self.shown
            if name in self.planned and name not in self._by_plan
        ]
        short = sorted({pair for pair in runs if pair[0] < pair[1]})
        part = "in part " if any(done == whole for done, whole in runs) else ""
        return "".join(f", {part}after {done} of {whole} rounds" for done, whole in short)

    def line(self, dataset: str, p: int, name: str) -> list[SealedCell]:
        """Return the cells of a line, one for each seed; raise Missing if there is no result."""
        if not (cells := self._cells(dataset, p, name)):
            raise Missing
        self.shown |= dict.fromkeys(entry.name for entry in cells)
        self.lengths |= {entry.settings["rounds"] for entry in cells}
        return cells

    def unlike(self) -> str:
        """Return a text that says that the runs looked up differ in rounds; "" if they do not."""
        if len(self.lengths) < 2:
            return ""
        return f" (runs of {' and '.join(map(str, sorted(self.lengths)))} rounds are not compared)"

    def has(self, dataset: str, p: int, *names: str) -> bool:
        """Return whether all of these lines have cells; this does not change `shown`."""
        return all(self._cells(dataset, p, name) for name in names)

    def _cells(self, dataset: str, p: int, name: str) -> list[SealedCell]:
        stem = f"{dataset}-p{p}-{name}-seed"
        cells = [e for n, e in self.found.items() if n.startswith(stem) and n[len(stem) :].isdigit()]
        return [entry for entry in cells if diverged(entry) or column(entry, "test_accuracy")]

    def plan(self, dataset: str, p: int, name: str) -> tuple[SealedCell, int]:
        """Return the first cell of a line, and its planned rounds, even if fewer were run."""
        cells = self.line(dataset, p, name)
        self._by_plan |= {entry.name for entry in cells}
        return cells[0], self.planned.get(cells[0].name, cells[0].settings["rounds"])

    def is_cut(self, dataset: str, p: int, name: str) -> bool:
        """Return whether a line has a run with fewer rounds than planned."""
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
        """Return the values of a measure for each seed of a line."""
        cells = self.line(dataset, p, name)
        return Sample(tuple(map(measure, cells)), diverged=sum(map(diverged, cells)))

    def residuals(self, dataset: str, p: int, name: str, measure: Callable[[SealedCell], float]) -> float:
        """Return the mean of a measure over the seeds that did not diverge; raise Undecided if all did."""
        return mean(list(map(measure, sound(self.line(dataset, p, name)))))

    def zigzags(self, dataset: str, p: int, name: str) -> Sample:
        """Return the zigzag of each seed of a line, without the seeds that diverged (unless all did)."""
        cells = self.line(dataset, p, name)
        kept = sound(cells)
        return Sample(tuple(map(zigzag, kept)), 0.0, sum(map(diverged, kept)), len(cells) - len(kept))

    def finals(self, dataset: str, p: int, name: str) -> Sample:
        """Return the final accuracy of each seed of a line."""
        return self._accuracy(self.line(dataset, p, name), final, LAST)

    def reference(self, dataset: str, p: int, name: str) -> Sample:
        """Return the final accuracies of a line that others are compared with, without diverged seeds."""
        cells = self.line(dataset, p, name)
        kept = sound(cells)
        return replace(self._accuracy(kept, final, LAST), left_out=len(cells) - len(kept))

    def curves(self, dataset: str, p: int, name: str) -> Sample:
        """Return the mean accuracy over all rounds, for each seed of a line."""
        cells = self.line(dataset, p, name)
        return self._accuracy(cells, curve, max(1, len(column(cells[0], "test_accuracy"))))

    def at_budget(self, dataset: str, p: int, name: str, budget: float) -> Sample:
        """Return the accuracy of each seed when a client has sent `budget` model sizes."""
        return self._accuracy(self.line(dataset, p, name), accuracy_at(budget), 1)

    @staticmethod
    def _accuracy(cells: list[SealedCell], measure: Callable[[SealedCell], float], rounds: int) -> Sample:
        """Return accuracies that are means over `rounds`; the first seed's zigzag gives `wobble`."""
        wobble = 0.0 if diverged(cells[0]) else zigzag(cells[0]) / math.sqrt(rounds)
        return Sample(tuple(map(measure, cells)), wobble, sum(map(diverged, cells)))

    def bar(self, dataset: str, p: int, reference: str = "none") -> float:
        """Return the least accuracy of a run that trains: 3 times chance and half of the reference's gain."""
        return max(3 * CHANCE, (CHANCE + self.reference(dataset, p, reference).mean) / 2)
