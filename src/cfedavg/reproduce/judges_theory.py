"""How the claims of the theory are decided."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from cfedavg.reproduce import results as seen
from cfedavg.reproduce.archive import Entry
from cfedavg.reproduce.cases import (
    COMPRESSORS,
    CONDITIONS,
    DATASETS,
    Outcome,
    Verdict,
    number,
    satisfied,
    span,
    weigh,
    yes,
)
from cfedavg.reproduce.judges import LEVELS, LINES
from cfedavg.reproduce.results import Missing, Results, Undecided, column
from cfedavg.theory import h

NEAR = 0.25  # slopes no further apart than this are the same; of -1/2, this part of it
SLIGHT = 0.1  # of the variance that is there without compression
USEFUL = 10  # times what it bounds


def slopes(study: str, keys: Mapping[str, str], fits: Callable[[float], bool], results: Results) -> Verdict:
    """Slopes that a small study has fitted, by label and by the name that the study gives them."""
    cells = results.study(study)
    numbers = importlib.import_module(f"cfedavg.reproduce.{study}").verdict_numbers(cells)

    def one(label: str) -> Outcome:
        slope, error, ratio = (numbers.get(keys[label] + end) for end in ("", "_se", "_condition"))
        if slope is None:
            raise Undecided("cannot be fitted")
        outside = (
            f" (the third condition on the rates: up to {number(ratio)} times its limit)" if ratio else ""
        )
        return yes(fits(slope)), f"{slope:.2f} ± {error:.2f}{outside}"

    return weigh(results, ((label,) for label in keys), one)


def falls_as_inverse(slope: float) -> bool:
    return abs(slope + 1) <= NEAR


def falls_as_root(slope: float) -> bool:
    """As -1/2, or faster: the theory bounds from above."""
    return slope <= -0.5 * (1 - NEAR)


def does_not_grow(slope: float) -> bool:
    return slope <= NEAR


def stays(slope: float) -> bool:
    return abs(slope) <= NEAR


def variance_is_slight(results: Results) -> Verdict:
    """What compression adds, as a share of the level without."""
    cells = results.study("variance").values()

    def one(kind: str) -> Outcome:
        shares = [entry.values[kind]["extra"] / entry.values["level"] for entry in cells]
        return yes(max(shares) <= SLIGHT), f"{span([100 * share for share in shares])}%"

    return weigh(results, ((kind,) for kind in COMPRESSORS), one)


def variance_bound(results: Results) -> Verdict:
    """What the Remark allows over what was measured; where that is not above 0, the bound is not in doubt."""
    cells = results.study("variance").values()

    def one(kind: str) -> Outcome:
        own = [entry.values[kind] for entry in cells if entry.values[kind]["extra"] > 0]
        ratios = [each["promised"] / each["extra"] for each in own] or [math.inf]
        return yes(min(ratios) >= 1), f"the bound is {span(ratios)} times the extra variance"

    return weigh(results, ((kind,) for kind in COMPRESSORS), one)


def theorem_holds(theorem: int, results: Results) -> Verdict:
    """Its bound over the mean of |∇f|², where the rates satisfy its conditions."""
    own = [entry for entry in results.study("bounds").values() if entry.settings["theorem"] == theorem]

    def one(kind: str) -> Outcome:
        cells = [entry.values for entry in own if entry.settings["compressor"].startswith(kind)]
        if not cells:
            raise Missing
        ratios = [each["bound"] / each["mean"] for each in cells if satisfied(each["conditions"])]
        if not ratios:
            raise Undecided("no rates satisfy the conditions")
        text = f"the bound is {span(ratios)} times what was measured, in {len(ratios)} of {len(cells)} cells"
        return yes(min(ratios) >= 1), text

    return weigh(results, ((kind,) for kind in ("none", *COMPRESSORS)), one)


def lemma_holds(results: Results) -> Verdict:
    """The bound over what it bounds, in every run with error feedback."""

    def one(line: str) -> Outcome:
        ratios = [_bound(entry) for entry in _runs(results, line)]
        return yes(min(ratios) >= 1), f"the bound is {span(ratios)} times the sum"

    return weigh(results, ((line,) for line in LINES), one)


def lemma_is_tight(results: Results) -> Verdict:
    def one(line: str, dataset: str, p: int) -> Outcome:
        ratio = seen.mean([_bound(entry) for entry in _runs(results, line, [dataset], [p])])
        return yes(ratio <= USEFUL), number(ratio)

    return weigh(results, _lines(results), one)


def loss_is_a_fraction(results: Results) -> Verdict:
    def one(line: str, dataset: str, p: int) -> Outcome:
        share = seen.mean([_share(entry) for entry in _runs(results, line, [dataset], [p])])
        return yes(share < 1), number(share)

    return weigh(results, _lines(results), one)


def _lines(results: Results) -> Iterator[tuple[str, str, int]]:
    """Every line with error feedback that was run, at every p."""
    for line, dataset, p in itertools.product(LINES, DATASETS, LEVELS):
        with suppress(Missing):
            _runs(results, line, [dataset], [p])
            yield line, dataset, p


def _runs(
    results: Results, line: str, datasets: Iterable[str] = DATASETS, levels: Iterable[int] = LEVELS
) -> list[Entry]:
    """Those that stayed finite and in which something was held back."""
    found = []
    for dataset, p in itertools.product(datasets, levels):
        with suppress(Missing):
            found += results.line(dataset, p, line)
    whole = [entry for entry in found if not seen.diverged(entry) and sum(column(entry, "error_norm2")) > 0]
    if not whole:
        raise Missing
    return whole


def _gamma(entry: Entry) -> float:
    """The lowest SNR of any client in any round."""
    return min(column(entry, "snr_min"), default=math.inf)


def _share(entry: Entry) -> float:
    """Residuals over updates, both squared, averaged over clients and added up over rounds."""
    updates = math.fsum(column(entry, "delta_norm2"))
    return math.fsum(column(entry, "error_norm2")) / updates if updates else math.inf


def _bound(entry: Entry) -> float:
    """Lemma 1's bound over the residuals. As h is proportional to alpha, alpha |mean g|² is mean |g_i|²."""
    return h(_gamma(entry), 1.0) / _share(entry)


def long_enough(results: Results) -> Verdict:
    """T beside mK, for the first line of each data set; T is the paper's, however many rounds were run."""

    def one(dataset: str) -> Outcome:
        entry, rounds = results.plan(dataset, 10, "none")
        work = entry.settings["clients"] * seen.mean(column(entry, "local_steps_mean"))
        return yes(rounds >= work), f"T = {rounds}, mK = {number(work, '.0f')}"

    return weigh(results, ((dataset,) for dataset in DATASETS), one)


def rate_conditions(results: Results) -> Verdict:
    """Each condition's value over its limit; a cell has the three in `ratios`, null for infinite."""
    cells = [entry.values.get("ratios") or () for entry in results.study("conditions").values()]
    triples = [[math.inf if ratio is None else ratio for ratio in each] for each in cells if each]

    def one(condition: str) -> Outcome:
        ratios = [each[CONDITIONS.index(condition)] for each in triples]
        if not ratios:
            raise Missing
        return yes(max(ratios) <= 1), f"{span(ratios)} times the limit"

    return weigh(results, ((condition,) for condition in CONDITIONS), one)
