"""Claims and their cases: the outcome of each case, the verdict over all, and the numbers as text.

A case is for instance one p and one compressor. Its outcome is as claimed (1), against the claim (-1), no
difference (0) or uncertain (None). `decide` combines the outcomes into a verdict.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paper.cfedavg.claims.measures import Missing, Results, Sample, Undecided, typical

HOLDS, PARTLY, FAILS, UNDECIDED = "holds", "holds in part", "does not hold", "undecided"
WHERE_RUN = " where it was run"
MARKS = {1: "✓", 0: "≈", -1: "✗", None: "?"}
DATASETS = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
COMPRESSORS = {"topk": "top-k", "rd": "random dropping"}
CONDITIONS = ("η_L ≤ 1/(8LK)", "η η_L < 1/(KL)", "η η_L K (L²h + 1 + L) ≤ 1")  # Theorem 1's, on the rates
_NAMES = {**DATASETS, "none": "no compression"}


@dataclass(frozen=True)
class Finding:
    """A verdict, its numbers, and the cells that the numbers are from."""

    verdict: str
    numbers: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """One statement of the paper, or one of our questions, in our words, and how it is judged."""

    name: str
    text: str
    where: str  # in the paper
    ran: str
    figure: str  # the experiment or study that shows it
    criterion: str
    judge: Callable[[Results], Finding | None]
    asked: bool = False  # our question: the paper does not claim it
    weak: str = ""  # why the check would pass even if the paper were wrong


@dataclass(frozen=True)
class Case:
    """One case of a claim: its group, its label, its numbers as text, and its outcome."""

    group: str
    label: str
    text: str
    outcome: int | None


Outcome = tuple[int | None, str]
Verdict = tuple[str, str]
Judge = Callable[[Results], Verdict]


def finding(judge: Judge, results: Results) -> Finding | None:
    """Return the finding of a judge, or None if its cells are missing."""
    look = Results(results.found, results.planned)
    try:
        verdict, numbers = judge(look)
    except Missing:
        return None
    return Finding(verdict + look.cut(), numbers, tuple(look.shown))


def weigh(
    results: Results, items: Iterable[tuple[Any, ...]], one: Callable[..., Outcome], *, apart: bool = False
) -> Verdict:
    """Judge each item with `one`, and return the verdict and its numbers; raise Missing if no item has cells.

    The runs of an item must have equally many rounds, unless `apart` says that they are not compared.
    """
    cases: list[Case] = []
    absent: list[tuple[str, str]] = []
    for item in items:
        group, label = spell(item[0]), " ".join(map(spell, item[1:]))
        before = dict(results.shown)
        results.lengths.clear()
        try:
            outcome, text = one(*item)
            unlike = "" if apart else results.unlike()
            cases.append(Case(group, label, text + unlike, None if unlike else outcome))
        except Undecided as error:
            cases.append(Case(group, label, str(error), None))
        except Missing:
            results.shown = before
            absent.append((group, label))
    if not cases:
        raise Missing
    there = {case.group for case in cases}
    # If a whole group is missing, only the group is named.
    names = dict.fromkeys(f"{group} {label}".strip() if group in there else group for group, label in absent)
    return where_run(decide([case.outcome for case in cases]), tell(cases), list(names))


def where_run(verdict: str, numbers: str, absent: Sequence[str]) -> Verdict:
    """Return the verdict and the numbers; if cells are missing, add that to both."""
    if not absent:
        return verdict, numbers
    return verdict + WHERE_RUN, f"{numbers} (not run: {', '.join(absent)})"


def decide(outcomes: Iterable[int | None]) -> str:
    """Return the verdict: at least half of the cases must be certain, and half of these go as claimed.

    >>> decide([1, 0, None]), decide([1, -1]), decide([1, -1, -1]), decide([1, 0, 0]), decide([1, None, None])
    ('holds', 'holds in part', 'does not hold', 'does not hold', 'undecided')
    """
    cases = list(outcomes)
    told = [case for case in cases if case is not None]
    if not told or 2 * len(told) < len(cases):
        return UNDECIDED
    if 2 * told.count(1) < len(told):
        return FAILS
    return PARTLY if -1 in told else HOLDS


def tell(cases: Iterable[Case]) -> str:
    """Return the numbers of all cases as text, group by group."""
    return "; ".join(
        f"{group}: " + ", ".join(f"{c.label} {c.text} {MARKS[c.outcome]}".strip() for c in its)
        for group, its in itertools.groupby(cases, key=lambda case: case.group)
    )


def spell(part: Any) -> str:
    """Return a p, line, data set or comp in words.

    >>> spell(10), spell("rd0.99"), spell("cifar10"), spell("0.9"), spell("deadline")
    ('p=10', 'random dropping 0.99', 'CIFAR-10', 'comp 0.9', 'deadline')
    """
    if isinstance(part, int):
        return f"p={part}"
    for short, name in COMPRESSORS.items():
        if part.startswith(short):
            return f"{name} {part.removeprefix(short)}".strip()
    return f"comp {part}" if part[0] == "0" else _NAMES.get(part, part)


def yes(condition: bool) -> int:
    return 1 if condition else -1


def are_satisfied(conditions: Iterable[float | None]) -> bool:
    """Return whether all conditions on the rates hold, each given as value / limit (None for infinity).

    >>> are_satisfied([0.2, 1.0, 0.5]), are_satisfied([0.2, None]), are_satisfied([1.1])
    (True, False, False)
    """
    return all(ratio is not None and ratio <= 1 for ratio in conditions)


def larger(factor: float) -> int:
    """Return 1 if the factor is at least 2, 0 if at least 1, else -1."""
    return 1 if factor >= 2 else 0 if factor >= 1 else -1


# Numbers as text


def percent(sample: Sample) -> str:
    """Return the mean in percent, ± the deviation over seeds, and how many seeds diverged.

    >>> percent(Sample((0.5, 0.1), diverged=1)), percent(Sample((0.9912,), left_out=2))
    ('30.00 ± 28.28 (1 of 2 diverged)', '99.12 (2 of 3 diverged)')
    """
    spread = f" ± {100 * sample.std:.2f}" if len(sample.values) > 1 else ""
    return number(100 * sample.mean, ".2f") + spread + _lost(sample)


def points(zigzags: Sample) -> str:
    """Return zigzags in points of accuracy; for several, the geometric mean, the smallest and the largest.

    >>> points(Sample((0.01, 0.04))), points(Sample((0.01,), left_out=1))
    ('2.00 (1.00 to 4.00)', '1.00 (1 of 2 diverged)')
    """
    low, high = (number(100 * end(zigzags.values), ".2f") for end in (min, max))
    several = len(zigzags.values) > 1
    shown = f"{number(100 * typical(zigzags), '.2f')} ({low} to {high})" if several else low
    return shown + _lost(zigzags)


def _lost(sample: Sample) -> str:
    lost, seeds = sample.diverged + sample.left_out, len(sample.values) + sample.left_out
    return f" ({lost} of {seeds} diverged)" if lost else ""


def number(value: float, form: str = ".3g") -> str:
    """Return a number as text; by default, numbers from 10,000 up have 2 digits.

    >>> number(1234567.0), number(2.0, ".1f"), number(math.inf)
    ('1.2e+06', '2.0', '∞')
    """
    if math.isinf(value):
        return "∞"
    return f"{value:.2g}" if form == ".3g" and abs(value) >= 1e4 else f"{value:{form}}"


def against(a: Sample, b: Sample) -> str:
    return f"{percent(a)} against {percent(b)}"


def span(values: Sequence[float]) -> str:
    """Return the smallest and the largest value as text."""
    low, high = min(values), max(values)
    return number(low) if low == high else f"{number(low)} to {number(high)}"
