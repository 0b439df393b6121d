"""The claims of the paper that results can decide, in our words, each with the number that decides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from paper.cfedavg.claims import judges, judges_theory
from paper.cfedavg.claims.cases import DATASETS, Claim, Judge, Verdict, finding
from paper.cfedavg.claims.judges_theory import Interval
from paper.cfedavg.claims.measures import Results

# The figure that shows a claim, by data set.
_CURVES = {"mnist": "fig1-mnist", "fashion_mnist": "fig4-fashion", "cifar10": "fig1-cifar10"}
_FEEDBACK = {"mnist": "fig6-mnist", "fashion_mnist": "fig7-fashion", "cifar10": "fig1-cifar10"}
_NORMS = {"mnist": "fig8-mnist", "fashion_mnist": "fig9-fashion", "cifar10": "fig3-cifar10"}
_BUDGET = {"mnist": "fig2-mnist", "cifar10": "fig2-cifar10"}
_SPEEDUP = {"none": "slope_none", "topk0.9": "slope_topk0.9", "rd0.9": "slope_rd0.9"}
_H = {"topk": "slope_h_theorem1_topk", "rd": "slope_h_theorem1_rd"}
# What was run.
_ALL = "both compressors at comp 0.9 and 0.99 with error feedback, p = 10, 5, 2, 1"
_BESIDE = "top-k 0.9 and 0.99 beside no compression, p = 10, 5, 2, 1"
_BARE = "compressors with and without error feedback, p = 10, 5, 2, 1"
_MILD = "both compressors at comp 0.9 with error feedback, p = 10, 5, 2, 1"
_RATES = "top-k 0.99 on MNIST with a constant rate and with 0.1/sqrt(1 + t/a), a = 1 and 25, p = 10, 2, 1"
_EVERY = "every run of both compressors with error feedback, all data sets and p"
_BOUNDS = (
    "a problem with known constants, without compression and with half of the coordinates sent, at the "
    "corollary's rates"
)
_BOWL = "a problem with known constants, half of the coordinates sent; every K, m and sigma"
# What decides.
_GROWTH = (
    "in most seeds, the mean residual of the last fifth of the rounds is more than 1.2 times that of the "
    "fifth in the middle, and the residual is largest in one of the last five rounds{}."
)
_SMOOTHER = (
    "the zigzag of the last 20 rounds (see above) is more than 1.6 times smaller than without compression; "
    "lines that do not train are left out, as they are flat for another reason."
)
_SUM = (
    "the sum over rounds of the clients' mean |e_i|² (which the proof bounds; the lemma's |mean e_i|² is at "
    "most that)"
)


def _claim(
    name: str, text: str, where: str, ran: str, figure: str, criterion: str, judge: Judge, **more: Any
) -> Claim:
    return Claim(name, text, where, ran, figure, criterion, partial(finding, judge), **more)


def _each(
    name: str,
    text: str,
    where: str,
    ran: str,
    figures: Mapping[str, str],
    criterion: str,
    judge: Callable[[str, Results], Verdict],
) -> Iterator[Claim]:
    """Yield one claim for each data set that has a figure."""
    for dataset, figure in figures.items():
        slug, own = dataset.removesuffix("_mnist"), f"{DATASETS[dataset]}: {text}"
        yield _claim(f"{name}-{slug}", own, where, ran, figure, criterion, partial(judge, dataset))


def _only(figures: Mapping[str, str], *datasets: str) -> dict[str, str]:
    return {dataset: figures[dataset] for dataset in datasets}


def _keeps_growing(dataset: str, lines: tuple[str, ...], named: str, where: str) -> Claim:
    """Return the claim for one data set; the paper names different lines for each data set."""
    (claim,) = _each(
        "residual-keeps-growing",
        f"under {named}, which is too much, the residuals do not stop growing.",
        where,
        "the same with error feedback, p = 10, 5, 2, 1",
        _only(_NORMS, dataset),
        f"{_GROWTH.format('')} The paper does not say at which p: all are judged.",
        partial(judges.keeps_growing, lines),
    )
    return claim


def _variance(varied: str, text: str, criterion: str, allowed: Interval) -> Claim:
    keys = {kind: f"slope_{varied}_{kind}" for kind in ("topk", "rd")}
    return _claim(
        f"variance-{varied}",
        f"The variance that a compressor adds {text}.",
        "Remark 2",
        f"a problem with known constants; what compression adds, at one {varied} after another",
        "variance",
        f"the slope of its logarithm over that of {varied} is {criterion}.",
        partial(judges_theory.slopes, "variance", keys, allowed),
    )


def _theorem(number: int) -> Claim:
    what = "expected squared gradient norm" + (
        " of a round, drawn in proportion to its rate," if number == 2 else " of a run's best round"
    )
    return _claim(
        f"theorem{number}-holds",
        f"The {what} is below Theorem {number}'s bound.",
        f"Theorem {number}",
        _BOUNDS,
        "bounds",
        "where the rates satisfy the theorem's conditions, the mean of |∇f|² over a run, each round in "
        "proportion to its rate, is at most the bound with the guaranteed γ, the measured α and the largest c"
        + ("." if number == 2 else "; the smallest does not exceed the mean."),
        partial(judges_theory.theorem_holds, number),
        weak="the bound is many times what was measured: a gradient norm several times as large would pass "
        "too.",
    )


def _rate(name: str, text: str, where: str, theorem: int, over: str) -> Claim:
    keys = {kind: f"slope_{over}_theorem{theorem}_{kind}" for kind in ("none", "topk", "rd")}
    varied = {"rounds": "T", "m_iid": "m"}.get(over, over)
    alike = ", with clients whose data are alike" if over == "m_iid" else ""
    return _claim(
        name,
        text,
        where,
        f"{_BOUNDS}, at one {varied} after another{alike}",
        "bounds",
        f"the slope of the logarithm of the mean of |∇f|² over that of {varied} is at most -0.375, which is "
        "-1/2 less a quarter.",
        partial(judges_theory.slopes, "bounds", keys, judges_theory.FALLS_AS_ROOT),
    )


CLAIMS: tuple[Claim, ...] = (
    # Accuracy
    *_each(
        "converges",
        "with error feedback, both compressors train at every level of heterogeneity.",
        "Section 5, 2-a; Appendix II",
        _ALL,
        _CURVES,
        "every line trains: no seed diverges, the final accuracy is above that of the first round, at least "
        "30%, and at least half-way from chance to no compression at the same p.",
        judges.converges,
    ),
    *_each(
        "topk-as-good",
        "top-k at 0.9 and at 0.99 ends as high as no compression.",
        "Section 5, 2-a",
        _BESIDE,
        _only(_CURVES, "mnist", "cifar10"),
        "the final accuracy is as good as that of no compression.",
        judges.as_good,
    ),
    *_each(
        "topk-as-fast",
        "top-k at 0.9 and at 0.99 is about as fast as no compression.",
        "Section 5, 2-a",
        _BESIDE,
        _only(_CURVES, "mnist", "cifar10"),
        "the rounds to 95% of the final accuracy of no compression (until a round reaches it and does so "
        "on average with the four after it) are at most 1.5 times those of no compression, plus one.",
        judges.as_fast,
    ),
    *_each(
        "topk-ahead",
        "at the same comp, top-k does better than random dropping.",
        "Appendix II, of Figures 4 and 5",
        _ALL,
        _CURVES,
        "the final accuracy of top-k is ahead.",
        judges.topk_ahead,
    ),
    *_each(
        "lower-comp-faster",
        "of the same compressor, the lower comp converges faster.",
        "Appendix II, of Figures 4 and 5",
        _ALL,
        _CURVES,
        "the accuracy averaged over all rounds is at comp 0.9 ahead of 0.99.",
        judges.lower_comp_faster,
    ),
    *_each(
        "rd-worsens",
        "random dropping loses accuracy from comp 0.9 to comp 0.99.",
        "Section 5, 2-a",
        "random dropping at comp 0.9 and 0.99, p = 10, 5, 2, 1",
        _only(_CURVES, "mnist", "cifar10"),
        "the final accuracy at 0.99 is behind that at 0.9.",
        judges.rd_worsens,
    ),
    *_each(
        "rd-fails",
        "random dropping at comp 0.99 does not train at p = 1.",
        "Appendix II, of Figures 4 and 5",
        "random dropping at comp 0.99 beside no compression, p = 1",
        _only(_CURVES, "fashion_mnist", "cifar10"),
        "the final accuracy is under 30%, or less than half-way from chance to no compression.",
        judges.rd_fails,
    ),
    *_each(
        "zigzag-grows",
        "the fewer classes a client has, the more the accuracy curve zigzags.",
        "Section 5, 2-a; Appendix II",
        "no compression, p = 10, 5, 2, 1",
        _CURVES,
        "the standard deviation of the accuracy around a straight line through the last 20 rounds is at "
        "p = 1 (or at the smallest p that was run) more than 1.6 times that at p = 10 (less may be chance), "
        "and nowhere between does it fall by as much; in part, if it does. A hundredth of a point, an image, "
        "is the least. Of several seeds the geometric mean counts (in brackets the smallest and the "
        "largest); where two standard errors of its logarithm are more, these decide.",
        judges.zigzag_grows,
    ),
    *_each(
        "smoother",
        "at p = 1, compression with error feedback makes the curve smoother.",
        "Section 5, 2-a; Appendix II",
        "both compressors at comp 0.9 and 0.99 beside no compression, p = 1",
        _CURVES,
        _SMOOTHER,
        partial(judges.smoother, (1,)),
    ),
    *_each(
        "smoother-too",
        "with more classes a client, too, compression with error feedback makes the curve smoother.",
        "Section 5, 2-a (“particularly” at p = 1)",
        "both compressors at comp 0.9 and 0.99 beside no compression, p = 10, 5, 2",
        _CURVES,
        _SMOOTHER,
        partial(judges.smoother, (10, 5, 2)),
    ),
    *_each(
        "beats-none",
        "at p = 1, random dropping 0.9 and top-k 0.99 do better than no compression.",
        "Appendix II, of Figures 4 (d) and 5 (d)",
        "random dropping 0.9 and top-k 0.99 beside no compression, p = 1",
        _only(_CURVES, "fashion_mnist", "cifar10"),
        "the accuracy is ahead of that of no compression, at the end and averaged over all rounds. (The "
        "paper says “a better convergence curve”.)",
        judges.beats_none,
    ),
    *_each(
        "rd-unstable",
        "random dropping at 0.99, which is too much, makes the curve unstable.",
        "Appendix II, of Figure 9 (d)",
        "random dropping at comp 0.99 beside no compression, p = 10, 5, 2, 1",
        _only(_CURVES, "fashion_mnist"),
        "the zigzag of the last 20 rounds (see above) is more than 1.6 times that without compression.",
        judges.rd_unstable,
    ),
    # Error feedback
    *_each(
        "feedback-helps",
        "both compressors do better with error feedback than without.",
        "Section 5, 2-b; Appendix II",
        _BARE,
        _FEEDBACK,
        "the final accuracy with feedback is ahead.",
        judges.feedback_helps,
    ),
    *_each(
        "feedback-gap-iid",
        "there is a gap between runs with and without error feedback at p = 10 already.",
        "Section 5, 2-b",
        "compressors with and without error feedback, p = 10",
        _only(_FEEDBACK, "cifar10"),
        "the final accuracy with feedback is ahead at p = 10.",
        partial(judges.feedback_helps, levels=(10,)),
    ),
    *_each(
        "feedback-gap-grows",
        "what a run without error feedback loses grows from p = 10 to p = 1.",
        "Section 5, 2-b, of CIFAR-10",
        _BARE,
        _FEEDBACK,
        "the gap in final accuracy at p = 1 (or at the smallest p that was run) exceeds that at p = 10 by "
        "more than half a point and two standard errors.",
        judges.feedback_gap_grows,
    ),
    # Residuals
    *_each(
        "residual-bounded",
        "under a moderate compressor, taken to be comp 0.9, the residuals stop growing.",
        "Section 5, 2-b; Appendix II",
        _MILD,
        _NORMS,
        _GROWTH.format(": then it has not stopped"),
        judges.bounded,
    ),
    *_each(
        "residual-several-times",
        "under a moderate compressor, the residuals are several times the updates.",
        "Section 5, 2-b; Appendix II",
        _MILD,
        _NORMS,
        "the clients' mean residual norm over their mean update norm, in the last 20 rounds, is between 1 "
        "and 10; not squared, as in Appendix II (Section 5 squares both, and so do the captions).",
        judges.several_times,
    ),
    *_each(
        "residual-larger-at-low-p",
        "the residuals are much larger when the clients' data are very different.",
        "Appendix II, of Figures 8 and 9",
        _ALL,
        _NORMS,
        "the mean residual norm of the last 20 rounds is at p = 1 at least twice that at p = 10 (✗ if it is "
        "smaller).",
        judges.larger_at_low_p,
    ),
    *_each(
        "residual-larger-at-high-comp",
        "the residuals are much larger under more aggressive compression.",
        "Section 5, 2-b",
        _ALL,
        _NORMS,
        "the mean residual norm of the last 20 rounds is at comp 0.99 at least twice that at comp 0.9 (✗ if "
        "it is smaller).",
        judges.larger_at_high_comp,
    ),
    _keeps_growing("mnist", ("topk0.99",), "top-k at 0.99", "Appendix II, of Figure 8 (b)"),
    _keeps_growing("fashion_mnist", ("rd0.99",), "random dropping at 0.99", "Appendix II, of Figure 9 (d)"),
    _keeps_growing("cifar10", judges.HARSH, "either compressor at 0.99", "Section 5, 2-b, of Figure 3"),
    # Communication
    *_each(
        "uplink-spared",
        "top-k 0.99 spares about 99% of the uplink and costs no accuracy to speak of.",
        "Section 1; Section 5, 2-a",
        "top-k 0.99 beside no compression, p = 10, 5, 2, 1",
        _CURVES,
        "at least 98.5% of the measured bytes are saved, and the final accuracy is as good as that of no "
        "compression. (The paper counts coordinates.)",
        judges.spares_uplink,
    ),
    *_each(
        "equal-uplink",
        "compressors and local steps both save communication.",
        "Section 5, 2-a, Figure 2",
        "all compressors, no compression, and no compression with one local step, p = 5",
        _BUDGET,
        "at the uplink, in model sizes, of the whole run of the thriftier one, or as near as whole rounds "
        "come to it: the accuracy of a compressor is ahead of no compression, and that of no compression of "
        "a single local step. (Runs of different lengths are compared here, at the same uplink.)",
        judges.better_at_equal_uplink,
    ),
    # Other compressors, local steps and rates
    _claim(
        "other-compressors",
        "Other compressors that satisfy Definition 1 can be used with error feedback too.",
        "Remark 3",
        "signs, QSGD with 4 levels and dropping in proportion to the magnitudes at comp 0.99 (all biased: "
        "nothing is scaled up), on MNIST, p = 10, 2, 1",
        "compressors",
        "every line trains (see above).",
        judges.others_train,
    ),
    _claim(
        "ragged-steps",
        "Clients may do different numbers of local steps, and it works as well.",
        "Theorem 3, Remark 6",
        "top-k 0.99 on MNIST with K = 50 for all, K from 5..95, and a deadline, p = 10, 2, 1",
        "steps",
        "the final accuracy is as good as that of K = 50 for all, at the same mean K.",
        judges.ragged_steps,
    ),
    _claim(
        "decaying-converges",
        "With a learning rate that falls as 1/sqrt(t), training converges.",
        "Theorem 2",
        _RATES,
        "rates",
        "every line trains, with the constant rate in place of no compression.",
        judges.decaying_converges,
    ),
    _claim(
        "decaying-slower",
        "A falling rate is slower than a constant one.",
        "Remark 5",
        _RATES,
        "rates",
        "the accuracy averaged over all rounds is behind that of the constant rate.",
        judges.decaying_slower,
    ),
    # Theory
    _claim(
        "linear-speedup",
        "The rounds to a given gradient norm fall in inverse proportion to the number of clients, with "
        "compression as without.",
        "Corollary 1, Remark 4",
        "a problem with known constants, 1 to 64 clients, rates of Corollary 1, T above mK",
        "speedup",
        "the slope of log T over log m is within 0.25 of -1. (A condition on the rates is told for the round "
        "in the middle, with the measured γ.)",
        partial(judges_theory.slopes, "speedup", _SPEEDUP, judges_theory.FALLS_AS_INVERSE),
    ),
    *map(_theorem, (1, 2, 3)),
    _rate(
        "corollary1-rounds",
        "At Corollary 1's rates, the squared gradient norm falls as 1/sqrt(T), with compression as without.",
        "Corollary 1, Remark 2",
        1,
        "rounds",
    ),
    _rate(
        "corollary1-clients",
        "At Corollary 1's rates, the squared gradient norm after as many rounds falls as 1/sqrt(m).",
        "Corollary 1, Remark 4",
        1,
        "m",
    ),
    _rate(
        "corollary1-iid",
        "With clients whose data are alike, too, the squared gradient norm falls as 1/sqrt(m).",
        "Remark 4",
        1,
        "m_iid",
    ),
    _rate(
        "corollary1-steps",
        "At Corollary 1's rates, the squared gradient norm after as many rounds falls as 1/sqrt(K).",
        "Corollary 1",
        1,
        "K",
    ),
    _rate(
        "corollary2-rounds",
        "With a rate that falls as 1/sqrt(t), the squared gradient norm falls as 1/sqrt(T), but for a "
        "logarithm.",
        "Corollary 2, Remark 5",
        2,
        "rounds",
    ),
    _rate(
        "corollary3-rounds",
        "With different numbers of local steps, the squared gradient norm falls as 1/sqrt(T).",
        "Corollary 3",
        3,
        "rounds",
    ),
    _rate(
        "corollary3-clients",
        "With different numbers of local steps, the speedup is still linear, and the squared gradient norm "
        "after as many rounds falls as 1/sqrt(m).",
        "Corollary 3, Remark 6",
        3,
        "m",
    ),
    _claim(
        "variance-level",
        "The variance of the samples is the less the more clients there are, as 1/m.",
        "Remark 1",
        "a problem with known constants, without compression, at one m after another",
        "variance",
        "the slope of the logarithm of |∇f|² where it settles, over that of m, is within 0.25 of -1.",
        partial(judges_theory.slopes, "variance", {"none": "slope_m_level"}, judges_theory.FALLS_AS_INVERSE),
    ),
    _claim(
        "variance-slight",
        "Compression adds to the variance only slightly.",
        "Remark 2",
        _BOWL,
        "variance",
        "it adds at most a tenth to the |∇f|² without compression, in every cell.",
        judges_theory.variance_is_slight,
    ),
    _claim(
        "variance-bound",
        "The variance that a compressor adds stays below its part of the bound.",
        "Theorem 1, Remark 2",
        _BOWL,
        "variance",
        "it is at most the difference of the two Φ, with the measured alpha and c = 1/2, in every cell.",
        judges_theory.variance_bound,
        weak="it cannot fail here: the bound on what compression adds is many times all of |∇f|² without "
        "compression, so compression would have to multiply |∇f|² by more than that.",
    ),
    _variance(
        "K", "does not grow with the number of local steps", "at most 0.25", judges_theory.DOES_NOT_GROW
    ),
    _variance("m", "falls as 1/m", "within 0.25 of -1", judges_theory.FALLS_AS_INVERSE),
    _variance(
        "sigma",
        "does not depend on how different the clients' data are",
        "within 0.25 of 0",
        judges_theory.STAYS,
    ),
    _claim(
        "h-bounded",
        "The factor h, which the corollaries take to be bounded, does not grow with the number of clients.",
        "Remarks 4 and 5",
        "a problem with known constants, half of the coordinates sent, at Corollary 1's rates, at one m "
        "after another",
        "bounds",
        "the slope of the logarithm of h over that of m is at most 0.25.",
        partial(judges_theory.slopes, "bounds", _H, judges_theory.DOES_NOT_GROW),
        asked=True,
    ),
    _claim(
        "long-enough",
        "The experiments are in the regime of the linear speedup, T >= mK.",
        "Remark 4 with Section 5, 1-c",
        "no compression, p = 10",
        "conditions",
        "the number of rounds is at least the number of clients times their mean local steps.",
        judges_theory.long_enough,
        asked=True,
    ),
    _claim(
        "rate-conditions",
        "The rates of the experiments satisfy what the theorems ask of them.",
        "Theorem 1 with Section 5, 1-c",
        "the largest curvature at single models (L is at least that) of the CNN, and alpha, measured with 10 "
        "clients, p = 10 and 1, on the embedded digits",
        "conditions",
        "with the paper's K and rates, no condition's value is above its limit.",
        judges_theory.rate_conditions,
        asked=True,
    ),
    _claim(
        "lemma1-holds",
        "What is held back is bounded by h times the updates, added up over all rounds.",
        "Lemma 1",
        _EVERY,
        "fig8-mnist",
        f"{_SUM} is at most that of h(γ, α) |mean g_i|², in every run, with the γ that the compressor "
        "guarantees: 1/comp. (For random dropping, Definition 1 and so the guarantee are about the mean.)",
        judges_theory.lemma_holds,
        weak="it follows from the guarantee of each message, whatever the rates and the problem: this checks "
        "our residuals and the proof's algebra. With the lowest γ that was measured it holds in any run.",
    ),
    _claim(
        "lemma1-useful",
        "The bound tells how large the residuals are.",
        "Lemma 1 with Section 5, 2-b",
        _EVERY,
        "fig8-mnist",
        "the bound, with the guaranteed γ, is at most 10 times what it bounds.",
        judges_theory.lemma_is_tight,
        asked=True,
    ),
    _claim(
        "loss-is-a-fraction",
        "In total, clients hold back only a fraction of what their updates amount to.",
        "after Lemma 1",
        _EVERY,
        "fig8-mnist",
        f"{_SUM} is below that of the clients' mean |g_i|²: the ratio is below 1.",
        judges_theory.loss_is_a_fraction,
    ),
)
