"""The judges of claims about training: each returns a verdict and its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from paper.cfedavg.claims import measures as seen
from paper.cfedavg.claims.cases import (
    COMPRESSORS,
    FAILS,
    HOLDS,
    PARTLY,
    UNDECIDED,
    WHERE_RUN,
    Outcome,
    Verdict,
    against,
    larger,
    number,
    percent,
    points,
    spell,
    weigh,
    where_run,
    yes,
)
from paper.cfedavg.claims.measures import GROWS, Missing, Results, Undecided, column, compare

LEVELS: tuple[int, ...] = (10, 5, 2, 1)  # p
MILD, HARSH = ("topk0.9", "rd0.9"), ("topk0.99", "rd0.99")
LINES = ("topk0.9", "topk0.99", "rd0.9", "rd0.99")
OTHERS = ("sign", "qsgd4", "proportional0.99")
DECAYING = ("topk0.99-decaying1", "topk0.99-decaying25")
BARE = {"cifar10": HARSH}  # the lines also run without error feedback; for other data sets, all
SLOW = 1.5  # "as fast" allows this many times the rounds
SAVED = 0.985  # about 99%


# Accuracy


def converges(dataset: str, results: Results) -> Verdict:
    return weigh(
        results, itertools.product(LEVELS, LINES), partial(_trains, results, dataset, reference="none")
    )


def _trains(results: Results, dataset: str, p: int, line: str, reference: str) -> Outcome:
    """Judge whether no seed diverges and the final accuracy exceeds the bar and the first accuracy."""
    ends, start = results.finals(dataset, p, line), results.sample(dataset, p, line, seen.first)
    if ends.diverged:
        return -1, percent(ends)
    trains = -1 if ends.mean <= start.mean else seen.above(ends, results.bar(dataset, p, reference))
    return trains if trains == 1 else _if_whole(results, dataset, p, line, trains), percent(ends)


def _if_whole(results: Results, dataset: str, p: int, line: str, outcome: int | None) -> int | None:
    """Return the outcome, or None if runs have fewer rounds than planned, since their end is unknown."""
    return None if results.is_cut(dataset, p, line) else outcome


def as_good(dataset: str, results: Results) -> Verdict:
    """Judge whether top-k is as accurate at the end as no compression."""

    def one(p: int, line: str) -> Outcome:
        a, b = results.finals(dataset, p, line), results.reference(dataset, p, "none")
        return seen.as_good(a, b), against(a, b)

    return weigh(results, itertools.product(LEVELS, ("topk0.9", "topk0.99")), one)


def as_fast(dataset: str, results: Results) -> Verdict:
    """Judge whether top-k reaches 95% of the final accuracy without compression in few enough rounds."""

    def one(p: int, line: str) -> Outcome:
        reach = seen.rounds_to(0.95 * results.reference(dataset, p, "none").mean)
        a = results.sample(dataset, p, line, reach).mean
        b = seen.mean(list(map(reach, seen.sound(results.line(dataset, p, "none")))))
        return yes(math.isfinite(a) and a <= SLOW * b + 1), f"{number(a)} against {number(b)}"

    return weigh(results, itertools.product(LEVELS, ("topk0.9", "topk0.99")), one)


def topk_ahead(dataset: str, results: Results) -> Verdict:
    def one(p: int, comp: str) -> Outcome:
        a, b = (results.finals(dataset, p, kind + comp) for kind in COMPRESSORS)
        return compare(a, b), against(a, b)

    return weigh(results, itertools.product(LEVELS, ("0.9", "0.99")), one)


def lower_comp_faster(dataset: str, results: Results) -> Verdict:
    def one(p: int, kind: str) -> Outcome:
        a, b = (results.curves(dataset, p, kind + comp) for comp in ("0.9", "0.99"))
        return compare(a, b), against(a, b)

    return weigh(results, itertools.product(LEVELS, COMPRESSORS), one)


def rd_worsens(dataset: str, results: Results) -> Verdict:
    def one(p: int) -> Outcome:
        a, b = (results.finals(dataset, p, line) for line in ("rd0.9", "rd0.99"))
        return compare(a, b), f"from {percent(a)} to {percent(b)}"

    return weigh(results, ((p,) for p in LEVELS), one)


def rd_fails(dataset: str, results: Results) -> Verdict:
    def one(p: int) -> Outcome:
        ends, bar = results.finals(dataset, p, "rd0.99"), results.bar(dataset, p)
        trains = seen.above(ends, bar)
        fails = -1 if trains == 1 else _if_whole(results, dataset, p, "rd0.99", trains and -trains)
        return fails, f"{percent(ends)}, training begins at {100 * bar:.2f}"

    return weigh(results, [(1,)], one)


def zigzag_grows(dataset: str, results: Results) -> Verdict:
    """Judge whether zigzags without compression grow from p = 10 to the smallest p that was run."""
    size = {10: results.zigzags(dataset, 10, "none")}
    for p in LEVELS[1:]:
        with suppress(Missing):
            size[p] = results.zigzags(dataset, p, "none")
    if len(size) == 1:
        raise Missing
    unlike = results.unlike()
    grows = None if unlike else seen.rougher(size[min(size)], size[10])
    falls = any(seen.rougher(a, b) == 1 for a, b in itertools.pairwise(size.values()))
    verdict = (PARTLY if falls else HOLDS) if grows == 1 else UNDECIDED if grows is None else FAILS
    numbers = "; ".join(f"p={p}: {points(each)}" for p, each in size.items()) + unlike
    return where_run(verdict, numbers, [f"p={p}" for p in LEVELS if p not in size])


def smoother(levels: Iterable[int], dataset: str, results: Results) -> Verdict:
    """Judge whether compression makes zigzags smaller; a line that does not train is not judged."""

    def one(p: int, line: str) -> Outcome:
        a, b = (results.zigzags(dataset, p, name) for name in (line, "none"))
        if results.finals(dataset, p, line).mean < results.bar(dataset, p):
            return None, f"{points(a)} (does not train)"
        return seen.rougher(b, a), f"{points(a)} against {points(b)}"

    return weigh(results, itertools.product(levels, LINES), one)


def rd_unstable(dataset: str, results: Results) -> Verdict:
    """Judge whether random dropping at 0.99 zigzags more than no compression."""

    def one(p: int) -> Outcome:
        a, b = (results.zigzags(dataset, p, name) for name in ("rd0.99", "none"))
        return seen.rougher(a, b), f"{points(a)} against {points(b)}"

    return weigh(results, ((p,) for p in LEVELS), one)


def beats_none(dataset: str, results: Results) -> Verdict:
    measures = {
        "at the end": (results.finals, results.reference),
        "over all rounds": (results.curves, results.curves),
    }

    def one(p: int, line: str, when: str) -> Outcome:
        of_line, of_none = measures[when]
        a, b = of_line(dataset, p, line), of_none(dataset, p, "none")
        return compare(a, b), against(a, b)

    return weigh(results, itertools.product([1], ("rd0.9", "topk0.99"), measures), one)


# Error feedback


def feedback_helps(dataset: str, results: Results, levels: Iterable[int] = LEVELS) -> Verdict:
    def one(p: int, line: str) -> Outcome:
        a, b = (results.finals(dataset, p, name) for name in (line, f"{line}-noef"))
        return compare(a, b), against(a, b)

    return weigh(results, itertools.product(levels, BARE.get(dataset, LINES)), one)


def feedback_gap_grows(dataset: str, results: Results) -> Verdict:
    """Judge whether the gain by error feedback is larger at the smallest p that was run than at p = 10."""
    lowest = set[int]()

    def one(line: str) -> Outcome:
        low = min(p for p in LEVELS if p == 10 or results.has(dataset, p, line, f"{line}-noef"))
        if low == 10:
            raise Missing
        pairs = {p: [results.finals(dataset, p, line + end) for end in ("", "-noef")] for p in (10, low)}
        gaps = {p: a.mean - b.mean for p, (a, b) in pairs.items()}
        error = math.hypot(*(seen.standard_error(a, b) for a, b in pairs.values()))
        lowest.add(low)
        text = ", ".join(f"{100 * gap:.2f} at p={p}" for p, gap in gaps.items())
        return seen.ahead(gaps[low] - gaps[10], error), text

    verdict, numbers = weigh(results, ((line,) for line in BARE.get(dataset, LINES)), one)
    whole = lowest == {1} or WHERE_RUN in verdict
    return (verdict, numbers) if whole else where_run(verdict, numbers, ["p=1"])


# Residuals


def bounded(dataset: str, results: Results) -> Verdict:
    def one(p: int, line: str) -> Outcome:
        grows, text = _growth(results, dataset, p, line)
        return _if_whole(results, dataset, p, line, yes(not grows)), text

    return weigh(results, itertools.product(LEVELS, MILD), one)


def _growth(results: Results, dataset: str, p: int, line: str) -> tuple[bool, str]:
    """Return whether the residuals of most seeds still grow at the end, and the growth as text."""
    growth, share, peak = (
        results.residuals(dataset, p, line, measure)
        for measure in (seen.residual_growth, seen.still_grows, seen.residual_peak)
    )
    turned = f" until round {number(peak, '.0f')}" if growth > GROWS and share <= 0.5 else ""
    return share > 0.5, f"×{number(growth, '.2f')}{turned}"


def several_times(dataset: str, results: Results) -> Verdict:
    def one(p: int, line: str) -> Outcome:
        plain = results.residuals(dataset, p, line, seen.residual_ratio)
        squared = results.residuals(dataset, p, line, partial(seen.residual_ratio, norm="norm2"))
        return yes(1 <= plain <= 10), f"{number(plain, '.2f')} (squared {number(squared, '.2f')})"

    return weigh(results, itertools.product(LEVELS, MILD), one)


def larger_at_low_p(dataset: str, results: Results) -> Verdict:
    def one(line: str) -> Outcome:
        return _factor(*(results.residuals(dataset, p, line, seen.residual) for p in (1, 10)))

    return weigh(results, ((line,) for line in LINES), one)


def larger_at_high_comp(dataset: str, results: Results) -> Verdict:
    def one(p: int, kind: str) -> Outcome:
        return _factor(*(results.residuals(dataset, p, kind + c, seen.residual) for c in ("0.99", "0.9")))

    return weigh(results, itertools.product(LEVELS, COMPRESSORS), one)


def _factor(a: float, b: float) -> Outcome:
    """Judge whether `a` is at least twice `b`."""
    factor = 1.0 if a == b else a / b if b else math.inf
    return larger(factor), f"{number(a)} against {number(b)}"


def keeps_growing(lines: Iterable[str], dataset: str, results: Results) -> Verdict:
    """Judge whether the residuals of `lines` keep growing, and list other lines whose residuals do."""

    def one(p: int, line: str) -> Outcome:
        grows, text = _growth(results, dataset, p, line)
        return _if_whole(results, dataset, p, line, yes(grows)), text

    verdict, numbers = weigh(results, itertools.product(LEVELS, lines := tuple(lines)), one)
    others = _growing(dataset, results, [line for line in LINES if line not in lines])
    return verdict, numbers + (f"; also growing: {', '.join(others)}" if others else "")


def _growing(dataset: str, results: Results, lines: Iterable[str]) -> list[str]:
    found = []
    for p, line in itertools.product(LEVELS, lines):
        try:
            grows, text = _growth(results, dataset, p, line)
        except (Missing, Undecided):
            continue
        if grows:
            found.append(f"p={p} {spell(line)} {text}")
    return found


# Communication


def spares_uplink(dataset: str, results: Results) -> Verdict:
    def mean_of(p: int, line: str, name: str) -> float:
        return results.sample(dataset, p, line, lambda entry: seen.mean(column(entry, name))).mean

    def one(p: int) -> Outcome:
        a, b = results.finals(dataset, p, "topk0.99"), results.reference(dataset, p, "none")
        saved = 1 - mean_of(p, "topk0.99", "uplink_bytes") / mean_of(p, "none", "uplink_bytes")
        left_out = 1 - mean_of(p, "topk0.99", "model_sizes_sent")
        text = f"{100 * saved:.2f}% of bytes and {100 * left_out:.2f}% of coordinates saved, {against(a, b)}"
        return seen.as_good(a, b) if saved >= SAVED else -1, text

    return weigh(results, ((p,) for p in LEVELS), one)


def better_at_equal_uplink(dataset: str, results: Results) -> Verdict:
    """Compare accuracies at equal uplink, p = 5: compressors with none, and none with a single local step."""

    def one(line: str) -> Outcome:
        pair = (line, "one-step" if line == "none" else "none")
        budget = min(results.sample(dataset, 5, name, seen.sent).mean for name in pair)
        a, b = (results.at_budget(dataset, 5, name, budget) for name in pair)
        return compare(a, b), f"{against(a, b)} for {number(budget)} times the model's size"

    return weigh(results, ((line,) for line in (*LINES, "none")), one, apart=True)


# Other compressors, local steps and rates


def others_train(results: Results) -> Verdict:
    return weigh(
        results, itertools.product((10, 2, 1), OTHERS), partial(_trains, results, "mnist", reference="none")
    )


def ragged_steps(results: Results) -> Verdict:
    def one(p: int, line: str) -> Outcome:
        a, b = (results.finals("mnist", p, name) for name in (line, "k50"))
        steps = results.sample("mnist", p, line, lambda e: seen.mean(column(e, "local_steps_mean"))).mean
        return seen.as_good(a, b), f"{against(a, b)} (K is {steps:.1f} on average)"

    return weigh(results, itertools.product((10, 2, 1), ("k5..95", "deadline")), one)


def decaying_converges(results: Results) -> Verdict:
    return weigh(
        results,
        itertools.product((10, 2, 1), DECAYING),
        partial(_trains, results, "mnist", reference="topk0.99"),
    )


def decaying_slower(results: Results) -> Verdict:
    def one(p: int, line: str) -> Outcome:
        a, b = (results.curves("mnist", p, name) for name in (line, "topk0.99"))
        return compare(b, a), against(a, b)

    return weigh(results, itertools.product((10, 2, 1), DECAYING), one)
