"""The judges of claims about the theory: each returns a verdict and its numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from cfedavg.sweep import SealedCell
from cfedavg.theory import h
from paper.cfedavg.claims import measures as seen
from paper.cfedavg.claims.cases import (
    COMPRESSORS,
    CONDITIONS,
    DATASETS,
    Outcome,
    Verdict,
    are_satisfied,
    number,
    span,
    weigh,
    yes,
)
from paper.cfedavg.claims.judges import LEVELS, LINES
from paper.cfedavg.claims.measures import Missing, Results, Undecided, column
from paper.cfedavg.studies import bounds, speedup, variance

_STUDIES = {
    "speedup": speedup.verdict_numbers,
    "bounds": bounds.verdict_numbers,
    "variance": variance.verdict_numbers,
}
NEAR = 0.25  # slopes that differ by at most this are the same; for -1/2, by this share of it
Interval = tuple[float, float]
FALLS_AS_INVERSE: Interval = (-1 - NEAR, -1 + NEAR)
FALLS_AS_ROOT: Interval = (-math.inf, -0.5 * (1 - NEAR))  # or faster: the theory bounds from above
DOES_NOT_GROW: Interval = (-math.inf, NEAR)
STAYS: Interval = (-NEAR, NEAR)
SLIGHT = 0.1  # as a share of the variance without compression
USEFUL = 10  # the most that a bound may be, in units of what it bounds


def slopes(study: str, keys: Mapping[str, str], allowed: Interval, results: Results) -> Verdict:
    """Judge whether fitted slopes of a small study are allowed; `keys` maps labels to the study's names."""
    cells = results.study(study)
    numbers = _STUDIES[study](cells)

    def one(label: str) -> Outcome:
        slope, error, ratio = (numbers.get(keys[label] + end) for end in ("", "_se", "_condition"))
        if slope is None or error is None:
            raise Undecided("cannot be fitted")
        outside = (
            f" (the third condition on the rates: up to {number(ratio)} times its limit)" if ratio else ""
        )
        return inside(slope, error, allowed), f"{slope:.2f} ± {error:.2f}{outside}"

    return weigh(results, ((label,) for label in keys), one)


def inside(slope: float, error: float, allowed: Interval) -> int | None:
    """Return 1 if a slope is in the interval, -1 if outside, None if within two standard errors of an end.

    >>> [inside(slope, 0.02, STAYS) for slope in (-0.3, -0.22, 0.0, 0.2, 0.28)]
    [-1, None, 1, 1, None]
    """
    low, high = allowed
    if min(abs(slope - low), abs(slope - high)) < 2 * error:
        return None
    return yes(low <= slope <= high)


def variance_is_slight(results: Results) -> Verdict:
    """Judge whether compression adds at most a tenth of the variance without compression."""
    cells = results.study("variance").values()

    def one(kind: str) -> Outcome:
        shares = [entry.values[kind]["extra"] / entry.values["level"] for entry in cells]
        return yes(max(shares) <= SLIGHT), f"{span([100 * share for share in shares])}%"

    return weigh(results, ((kind,) for kind in COMPRESSORS), one)


def variance_bound(results: Results) -> Verdict:
    """Judge whether the Remark's bound exceeds every measured extra variance that is above 0."""
    cells = results.study("variance").values()

    def one(kind: str) -> Outcome:
        own = [entry.values[kind] for entry in cells if entry.values[kind]["extra"] > 0]
        ratios = [each["promised"] / each["extra"] for each in own] or [math.inf]
        whole = [entry.values[kind]["promised"] / entry.values["level"] for entry in cells]
        text = f"the bound is {span(ratios)} times the extra variance, and {span(whole)} times all of |∇f|²"
        return yes(min(ratios) >= 1), text

    return weigh(results, ((kind,) for kind in COMPRESSORS), one)


def theorem_holds(theorem: int, results: Results) -> Verdict:
    """Judge whether a theorem's bound exceeds the mean of |∇f|² where the rates satisfy its conditions."""
    own = [entry for entry in results.study("bounds").values() if entry.settings["theorem"] == theorem]

    def one(kind: str) -> Outcome:
        cells = [entry.values for entry in own if entry.settings["compressor"].startswith(kind)]
        if not cells:
            raise Missing
        ratios = [each["bound"] / each["mean"] for each in cells if are_satisfied(each["conditions"])]
        if not ratios:
            raise Undecided("no rates satisfy the conditions")
        text = f"the bound is {span(ratios)} times what was measured, in {len(ratios)} of {len(cells)} cells"
        return yes(min(ratios) >= 1), text

    return weigh(results, ((kind,) for kind in ("none", *COMPRESSORS)), one)


def lemma_holds(results: Results) -> Verdict:
    """Judge whether Lemma 1's bound exceeds the residuals in every run with error feedback."""

    def one(line: str) -> Outcome:
        runs, gamma = _runs(results, line), guaranteed(line)
        ratios = [_bound(entry, gamma) for entry in runs]
        measured = [_bound(entry, _measured(entry)) for entry in runs]
        text = f"the bound is {span(ratios)} times the sum ({span(measured)} with the lowest γ measured)"
        return yes(min(ratios) >= 1), text

    return weigh(results, ((line,) for line in LINES), one, apart=True)


def lemma_is_tight(results: Results) -> Verdict:
    def one(line: str, dataset: str, p: int) -> Outcome:
        gamma = guaranteed(line)
        ratio = seen.mean([_bound(entry, gamma) for entry in _runs(results, line, [dataset], [p])])
        return yes(ratio <= USEFUL), number(ratio)

    return weigh(results, _lines(results), one, apart=True)


def loss_is_a_fraction(results: Results) -> Verdict:
    def one(line: str, dataset: str, p: int) -> Outcome:
        share = seen.mean([_share(entry) for entry in _runs(results, line, [dataset], [p])])
        return yes(share < 1), number(share)

    return weigh(results, _lines(results), one, apart=True)


def _lines(results: Results) -> Iterator[tuple[str, str, int]]:
    """Yield line, data set and p of all runs with error feedback that exist."""
    for line, dataset, p in itertools.product(LINES, DATASETS, LEVELS):
        with suppress(Missing):
            _runs(results, line, [dataset], [p])
            yield line, dataset, p


def _runs(
    results: Results, line: str, datasets: Iterable[str] = DATASETS, levels: Iterable[int] = LEVELS
) -> list[SealedCell]:
    """Return the runs that did not diverge and have residuals; raise Missing if there is none."""
    found = []
    for dataset, p in itertools.product(datasets, levels):
        with suppress(Missing):
            found += results.line(dataset, p, line)
    whole = [entry for entry in found if not seen.diverged(entry) and sum(column(entry, "error_norm2")) > 0]
    if not whole:
        raise Missing
    return whole


def guaranteed(line: str) -> float:
    """Return the SNR of Definition 1: top-k drops at most a share comp of |p|², random dropping on average.

    >>> guaranteed("topk0.9") == guaranteed("rd0.9") == 1 / 0.9
    True
    """
    return 1 / float(line.removeprefix("topk").removeprefix("rd"))


def _measured(entry: SealedCell) -> float:
    """Return the lowest SNR of any client in any round."""
    return min(column(entry, "snr_min"), default=math.inf)


def _share(entry: SealedCell) -> float:
    """Return Σ|e|² / Σ|g|² over rounds; |e|² and |g|² are means over clients."""
    updates = math.fsum(column(entry, "delta_norm2"))
    return math.fsum(column(entry, "error_norm2")) / updates if updates else math.inf


def _bound(entry: SealedCell, gamma: float) -> float:
    """Return Lemma 1's bound / the residuals; h is linear in alpha, and alpha |mean g|² is mean |g_i|²."""
    return h(gamma, 1.0) / _share(entry)


def long_enough(results: Results) -> Verdict:
    """Judge whether T ≥ mK for each data set; T is the paper's, even if fewer rounds were run."""

    def one(dataset: str) -> Outcome:
        entry, rounds = results.plan(dataset, 10, "none")
        work = entry.settings["clients"] * seen.mean(column(entry, "local_steps_mean"))
        return yes(rounds >= work), f"T = {rounds}, mK = {number(work, '.0f')}"

    return weigh(results, ((dataset,) for dataset in DATASETS), one, apart=True)


def rate_conditions(results: Results) -> Verdict:
    """Judge whether each condition holds in all cells; `ratios` holds value / limit, None for infinity."""
    cells = [entry.values.get("ratios") or () for entry in results.study("conditions").values()]
    triples = [[math.inf if ratio is None else ratio for ratio in each] for each in cells if each]

    def one(condition: str) -> Outcome:
        ratios = [each[CONDITIONS.index(condition)] for each in triples]
        if not ratios:
            raise Missing
        return yes(max(ratios) <= 1), f"{span(ratios)} times the limit"

    return weigh(results, ((condition,) for condition in CONDITIONS), one)
