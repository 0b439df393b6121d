"""Every claim can hold and can fail; what is missing, diverged or null is no reason to crash."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from cfedavg.compress import parse
from cfedavg.core.layout import Layout
from cfedavg.sweep import SealedCell, read_table
from cfedavg.theory import h
from paper.cfedavg import experiment
from paper.cfedavg.claims import judges_theory
from paper.cfedavg.claims import measures as results
from paper.cfedavg.claims.cases import FAILS, HOLDS, MARKS, PARTLY, UNDECIDED, WHERE_RUN, decide
from paper.cfedavg.claims.measures import Sample, compare
from paper.cfedavg.claims.page import (
    CLAIMS,
    Claim,
    Finding,
    Results,
    as_markdown,
    judge_all,
    overview,
    weak_checks,
)

VERDICTS = {HOLDS, PARTLY, FAILS, UNDECIDED, HOLDS + WHERE_RUN, FAILS + WHERE_RUN, "not run yet"}
DATASETS = ("mnist", "fashion_mnist", "cifar10")
STUDIES = ("speedup", "bounds", "variance", "conditions")
LINES = ("topk0.9", "topk0.99", "rd0.9", "rd0.99")
OTHERS = ("sign", "qsgd4", "proportional0.99")
BY_NAME = {claim.name: claim for claim in CLAIMS}
SMALL = ("linear", "variance", "theorem", "corollary", "h-")  # claims about the small problem


@dataclass(frozen=True)
class Run:
    """A made-up training curve, and what goes with it."""

    final: float
    pace: float = 2.0  # rounds in which the distance to the final accuracy falls by e
    zigzag: float = 0.001
    residual: float = 0.0
    growing: bool = False
    bound: float = 2.0  # what Lemma 1 says with the lowest SNR measured, over what is
    rounds: int = 100
    clients: int = 2
    sent: float = 1.0  # of the coordinates

    def values(self) -> dict[str, Any]:
        t = range(self.rounds)
        rise = [1 - math.exp(-(i + 1) / self.pace) for i in t]
        error = [self.residual * ((i + 1) / self.rounds if self.growing else 1) for i in t]
        share = math.fsum(e * e for e in error) / self.rounds
        gamma = (1 + 1 / math.sqrt(self.bound * share)) ** 2 if share else None
        return {
            "test_accuracy": [0.1 + (self.final - 0.1) * r + self.zigzag * (-1) ** i
                              for i, r in zip(t, rise, strict=True)],
            "uplink_bytes": [round(1e6 * self.sent * 1.2 if self.sent < 1 else 1e6)] * self.rounds,
            "model_sizes_sent": [self.sent] * self.rounds,
            "delta_norm": [1.0] * self.rounds,
            "delta_norm2": [1.0] * self.rounds,
            "error_norm": error,
            "error_norm2": [e * e for e in error],
            "alpha": [3.0] * self.rounds,
            "snr_min": [gamma] * self.rounds,
            "local_steps_mean": [5.0] * self.rounds,
        }  # fmt: skip


@cache
def values_of(run: Run) -> dict[str, Any]:
    return run.values()


Rule = Callable[[str, int, str], Run]
NONE = {10: 0.99, 5: 0.98, 2: 0.95, 1: 0.8}


def as_claimed(dataset: str, p: int, line: str) -> Run:
    """A world as the paper describes it, but for claims that exclude one another."""
    zigzag = {10: 0.001, 5: 0.002, 2: 0.005, 1: 0.03}[p]
    if line in ("none", "one-step"):
        slow = line == "one-step"
        return Run(NONE[p], 200 if slow else 2, zigzag, rounds=500 if slow else 100)
    if line in ("k50", "k5..95", "deadline", *OTHERS):
        return Run(NONE[p])
    gain = 0.07 if p == 1 else 0.0
    final, pace, residual = {
        "topk0.9": (NONE[p] + gain, 2, 2),
        "topk0.99": (NONE[p] + gain - 0.003, 3, 8),
        "rd0.9": (NONE[p] + gain - 0.015, 4, 2.5),
        "rd0.99": (NONE[p] - 0.1, 8, 10),
    }[line.split("-")[0]]
    gap = {10: 0.02, 5: 0.03, 2: 0.05, 1: 0.2}[p]
    if "decaying" in line:
        pace *= 3
    return Run(
        final - (gap if line.endswith("-noef") else 0), pace, zigzag / 3,
        residual * {10: 1, 5: 1.5, 2: 2, 1: 2.5}[p], growing="0.99" in line,
        sent=1 - float(line.split("-")[0].lstrip("topkrd")),
    )  # fmt: skip


def otherwise(dataset: str, p: int, line: str) -> Run:
    """A world in which nothing is as claimed, but for claims that exclude one another."""
    zigzag = {10: 0.03, 5: 0.005, 2: 0.002, 1: 0.001}[p]
    if line in ("none", "k50", "one-step"):
        return Run(NONE[p], zigzag=zigzag, clients=100, rounds=500 if line == "one-step" else 100)
    gap = 0.05 if line.endswith("-noef") else 0
    return Run(0.12 + gap, zigzag=2 * zigzag, residual=100, growing=True, bound=0.5, clients=100, sent=0.3)


def altered(rule: Rule, lines: tuple[str, ...] = LINES, **changes: Any) -> Rule:
    """The same world, with some lines changed."""

    def changed(dataset: str, p: int, line: str) -> Run:
        run = rule(dataset, p, line)
        return replace(run, **changes) if line in lines else run

    return changed


GOOD: dict[str, Rule] = {
    "rd-fails": altered(as_claimed, ("rd0.99",), final=0.2),
    "equal-uplink": altered(as_claimed, ("rd0.9",), final=0.99),
    "loss-is-a-fraction": altered(as_claimed, residual=0.5),
    "rd-unstable": altered(as_claimed, ("rd0.99",), zigzag=0.1),
    "lemma1-useful": altered(as_claimed, residual=150.0, growing=False),
}
BAD: dict[str, Rule] = {
    "rd-fails": as_claimed,
    "rd-unstable": as_claimed,
    "topk-ahead": altered(otherwise, zigzag=0.001),
    "rd-worsens": altered(otherwise, zigzag=0.001),
    "smoother": altered(as_claimed, zigzag=0.05),
    "feedback-gap": altered(otherwise, (*LINES, *(f"{line}-noef" for line in LINES)), zigzag=0.001),
    "residual-keeps-growing": altered(as_claimed, growing=False),
    "decaying-slower": altered(as_claimed, ("topk0.99-decaying1", "topk0.99-decaying25"), pace=3),
    "lemma1-holds": altered(otherwise, residual=1000.0),
    "lemma1-useful": altered(as_claimed, residual=1.0),
}
SLOPES = {"slope_none": -1.0, "slope_topk0.9": -0.9, "slope_rd0.9": -1.1, "slope_m_level": -1.0} | {
    f"slope_{name}_{kind}": slope
    for name, slope in (("K", -0.5), ("m", -1.1), ("sigma", 0.1)) for kind in ("topk", "rd")
} | {
    f"slope_{name}_{kind}": slope
    for name, slope in (
        ("h_theorem1", 0.1), ("rounds_theorem1", -0.7), ("m_theorem1", -0.5), ("m_iid_theorem1", -0.5),
        ("K_theorem1", -0.5), ("rounds_theorem2", -0.5), ("rounds_theorem3", -0.7), ("m_theorem3", -0.48),
    )
    for kind in ("none", "topk", "rd")
}  # fmt: skip


def world(rule: Rule, seeds: int = 1) -> dict[str, SealedCell]:
    """All cells that any claim asks for."""
    lines = ["none", "one-step", *LINES, *(f"{line}-noef" for line in LINES)]
    lines += ["k50", "k5..95", "deadline", "topk0.99-decaying1", "topk0.99-decaying25", *OTHERS]
    return dict(
        cell(f"{dataset}-p{p}-{line}-seed{seed}", rule(dataset, p, line))
        for dataset in DATASETS for p in NONE for line in lines for seed in range(seeds)
    )  # fmt: skip


def cell(name: str, run: Run) -> tuple[str, SealedCell]:
    return name, SealedCell(name, {"rounds": run.rounds, "clients": run.clients}, dict(values_of(run)), {})


def conditions(ratio: float | None) -> dict[str, SealedCell]:
    return {"conditions-x": SealedCell("conditions-x", {}, {"ratios": [ratio] * 3}, {})}


def studies(ratio: float | None) -> dict[str, SealedCell]:
    extra = {"extra": 0.1 * (ratio or 1), "promised": 0.1}
    values = {"level": 1.0, "topk": extra, "rd": extra}
    found = {f"{name}-x": SealedCell(f"{name}-x", {}, values, {}) for name in ("speedup", "variance")}
    return found | bounds(ratio or 1) | conditions(ratio)


def bounds(mean: float, broken: float | None = 0.9) -> dict[str, SealedCell]:
    """A cell for each theorem and compressor; the bound is 1."""
    return {
        (name := f"bounds-{theorem}-{kind}"): SealedCell(
            name,
            {"theorem": theorem, "compressor": kind},
            {"mean": mean, "bound": 1.0, "conditions": [0.1, 0.1, broken]},
            {},
        )
        for theorem, kind in itertools.product((1, 2, 3), ("none", "topk(0.5)", "rd(0.5)"))
    }


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, float]], None]:
    """Puts made-up slopes in place of what the small studies find."""

    def put(numbers: Mapping[str, float]) -> None:
        errors = {f"{key}_se": 0.05 for key in numbers}
        for name in ("speedup", "bounds", "variance"):
            monkeypatch.setitem(judges_theory._STUDIES, name, lambda found: {**numbers, **errors})

    return put


def rule_for(claim: Claim, special: Mapping[str, Rule], rule: Rule) -> Rule:
    return next((each for name, each in special.items() if claim.name.startswith(name)), rule)


def verdict(name: str, found: Mapping[str, SealedCell]) -> str:
    finding = BY_NAME[name].judge(Results(found))
    assert finding is not None
    return finding.verdict


# Verdicts


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_claim_can_hold(claim: Claim, fits: Callable[[Mapping[str, float]], None]) -> None:
    fits(SLOPES)
    found = world(rule_for(claim, GOOD, as_claimed)) | studies(0.5)
    finding = claim.judge(Results(found))
    assert finding is not None
    assert finding.verdict == HOLDS, finding.numbers
    assert finding.numbers
    assert "nan" not in finding.numbers
    assert finding.cells
    assert set(finding.cells) <= set(found)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_every_claim_can_fail(claim: Claim, fits: Callable[[Mapping[str, float]], None]) -> None:
    fits(dict.fromkeys(SLOPES, 0.6))
    finding = claim.judge(Results(world(rule_for(claim, BAD, otherwise)) | studies(2.0)))
    assert finding is not None
    assert finding.verdict == FAILS, finding.numbers


def test_a_claim_can_hold_in_part() -> None:
    half = altered(as_claimed, ("topk0.9",), final=0.5)
    assert verdict("topk-as-good-mnist", world(half)) == PARTLY
    assert verdict("zigzag-grows-mnist", world(altered(as_claimed, ("none",), zigzag=0.01))) == FAILS


@pytest.mark.parametrize(
    ("finals", "mark"),
    [((0.90, 0.96), "?"), ((0.95, 0.9501), "≈"), ((0.92, 0.9201), "✗"), ((0.99, 0.9901), "✓")],
)
def test_a_gap_changes_only_beyond_its_noise(finals: tuple[float, ...], mark: str) -> None:
    """Without feedback the run ends at 0.95: at p = 10, with feedback, as well."""
    at = {"mnist-p10-topk0.9-seed0": 0.95, "mnist-p10-topk0.9-noef-seed0": 0.95} | {
        "mnist-p1-topk0.9-noef-seed0": 0.95, "mnist-p1-topk0.9-noef-seed1": 0.95,
    } | {f"mnist-p1-topk0.9-seed{seed}": final for seed, final in enumerate(finals)}  # fmt: skip
    found = BY_NAME["feedback-gap-grows-mnist"].judge(Results(dict(cell(n, Run(f)) for n, f in at.items())))
    assert found is not None
    assert f"at p=1 {mark}" in found.numbers


def test_zigzag_that_grows_only_from_end_to_end_holds_in_part() -> None:
    found = world(as_claimed)
    found |= [cell("mnist-p5-none-seed0", Run(0.98, zigzag=0.02))]
    assert verdict("zigzag-grows-mnist", found) == PARTLY


def test_seeds_that_zigzag_by_very_different_factors_decide_nothing() -> None:
    """Not even whether the curve is rougher with one class than with ten, nor smoother with compression."""
    found = world(as_claimed, seeds=3)
    assert verdict("smoother-mnist", found) == verdict("zigzag-grows-mnist", found) == HOLDS
    for seed, zigzag in enumerate((0.12, 0.03, 0.0003)):
        found |= [cell(f"mnist-p1-none-seed{seed}", Run(0.95, zigzag=zigzag))]
    assert judged_in("smoother-mnist", found).numbers.count("?") == len(LINES)
    assert verdict("smoother-mnist", found) == verdict("zigzag-grows-mnist", found) == UNDECIDED


def test_a_flat_line_that_does_not_train_is_no_smooth_one() -> None:
    found = world(altered(as_claimed, final=0.1, zigzag=0.0))
    assert verdict("smoother-mnist", found) == UNDECIDED


def test_no_condition_within_its_limit_where_it_is_infinite() -> None:
    assert verdict("rate-conditions", conditions(None)) == FAILS


def test_one_broken_condition_of_three_is_in_part() -> None:
    found = conditions(0.5)
    found["conditions-x"].values["ratios"][2] = 3.0
    assert verdict("rate-conditions", found) == PARTLY


def test_the_small_studies_give_what_is_asked_of_them() -> None:
    from paper.cfedavg.studies import bounds, speedup, variance

    cells = speedup.cells("paper", range(1))
    found = {n: SealedCell(n, s, {"horizon": 1000 / s["m"], "condition3": 0.5}, {}) for n, s in cells.items()}
    for n, s in variance.cells("paper", range(1)).items():
        added = {"extra": 0.1 / s["m"], "promised": 1.0, "h": 1.0}
        found[n] = SealedCell(n, s, {"level": 1 / s["m"], "topk": added, "rd": added}, {})
    for n, s in bounds.cells("paper", range(1)).items():
        mean = 1 / math.sqrt(s["rounds"] * s["m"] * s["K"][0])
        h = 0.0 if s["compressor"] == "none" else 2.0
        found[n] = SealedCell(n, s, {"mean": mean, "bound": 2 * mean, "h": h, "conditions": [0.5] * 3}, {})
    for name in (name for name in BY_NAME if name.startswith(SMALL)):
        finding = BY_NAME[name].judge(Results(found))
        assert finding is not None
        assert finding.verdict == HOLDS
        assert "not run" not in finding.numbers


def test_what_cannot_be_told_from_chance_decides_nothing() -> None:
    """Four points behind, with an uncertainty of as much."""
    noisy = world(altered(as_claimed, ("topk0.9", "none"), zigzag=0.05))
    noisy |= [cell("mnist-p10-topk0.9-seed0", Run(0.95, zigzag=0.05))]
    finding = BY_NAME["topk-as-good-mnist"].judge(Results(noisy))
    assert finding is not None
    assert finding.numbers.startswith("p=10: top-k 0.9 ")
    assert finding.numbers.split(",")[0].endswith("?")


def test_what_is_near_the_bar_may_train_or_not() -> None:
    """As sure as its curve is smooth: 46% with a zigzag of 6 points, where training begins at 42%."""
    for zigzag, marks in ((0.06, "??"), (0.001, "✓✗")):
        found = world(altered(as_claimed, ("rd0.99",), final=0.46, zigzag=zigzag))
        found |= [cell("fashion_mnist-p1-none-seed0", Run(0.74))]
        results = Results(found)
        told = [BY_NAME[name].judge(results) for name in ("converges-fashion", "rd-fails-fashion")]
        assert [each.numbers[-1] for each in told if each] == list(marks)


def test_a_condition_that_is_broken_is_told(fits: Callable[[Mapping[str, float]], None]) -> None:
    fits(SLOPES | {"slope_rd0.9_condition": 34.0})
    finding = BY_NAME["linear-speedup"].judge(Results(studies(0.5)))
    assert finding is not None
    assert finding.numbers.count("condition") == 1
    assert finding.numbers.endswith(
        "-1.10 ± 0.05 (the third condition on the rates: up to 34 times its limit) ✓"
    )


def test_what_is_missing_is_told_of_every_verdict() -> None:
    whole = world(as_claimed)
    part = {name: entry for name, entry in whole.items() if "-p5-" not in name}
    for name in ("zigzag-grows-mnist", "converges-mnist"):
        finding = BY_NAME[name].judge(Results(part))
        assert finding is not None
        assert finding.verdict == HOLDS + WHERE_RUN
        assert finding.numbers.endswith("(not run: p=5)")


def test_uplink_in_bytes_decides_not_coordinates() -> None:
    found = world(as_claimed)
    for p in NONE:
        found[f"mnist-p{p}-topk0.99-seed0"].values["uplink_bytes"] = [20_000] * 100
    assert verdict("uplink-spared-mnist", found) == FAILS


# What is missing, diverged or null


def test_without_cells_nothing_is_judged() -> None:
    judged = judge_all({})
    assert [claim for claim, _ in judged] == list(CLAIMS)
    assert all(finding is None for _, finding in judged)


def test_what_was_not_run_is_said_and_not_judged() -> None:
    found = {name: entry for name, entry in world(as_claimed).items() if "-p5-" not in name}
    del found["mnist-p2-topk0.9-seed0"]
    finding = BY_NAME["topk-as-good-mnist"].judge(Results(found))
    assert finding is not None
    assert finding.verdict == HOLDS + WHERE_RUN
    assert finding.numbers.endswith("(not run: p=5, p=2 top-k 0.9)")
    assert "mnist-p2-topk0.99-seed0" in finding.cells
    assert not any("-p5-" in name for name in finding.cells)
    finding = BY_NAME["rd-worsens-mnist"].judge(Results(flat(found)))
    assert finding is not None
    assert finding.verdict == FAILS + WHERE_RUN


def flat(found: dict[str, SealedCell]) -> dict[str, SealedCell]:
    """All lines end alike."""
    like = found["mnist-p10-none-seed0"].values
    return {name: replace(entry, values=like) for name, entry in found.items()}


@pytest.mark.parametrize("lost", ["none", "topk0.99"])
def test_without_one_end_a_comparison_is_not_judged(lost: str) -> None:
    found = {name: entry for name, entry in world(as_claimed).items() if lost not in name.split("-")}
    assert BY_NAME["uplink-spared-mnist"].judge(Results(found)) is None


@pytest.mark.parametrize("rounds", [0, 1, 7])
def test_diverged_cells_have_failed_and_crash_nothing(
    rounds: int, fits: Callable[[Mapping[str, float]], None]
) -> None:
    fits(SLOPES)
    found = world(as_claimed) | studies(0.5)
    for name, entry in found.items():
        if name.startswith(DATASETS):
            cut = {column: values[:rounds] for column, values in entry.values.items() if rounds}
            found[name] = replace(entry, values=cut | {"diverged": "a loss is NaN"})
    judged = {claim.name: finding for claim, finding in judge_all(found)}
    good = [
        name for name, finding in judged.items()
        if finding and finding.verdict != FAILS and not name.startswith((*SMALL, "rate"))
    ]  # fmt: skip
    undecided = {name for name in good if judged[name].verdict == UNDECIDED}
    assert undecided >= {name for name, found in judged.items() if found and name.startswith("residual")}
    assert set(good) - undecided <= {"rd-fails-fashion", "rd-fails-cifar10", "long-enough"}
    assert judged["converges-mnist"] is not None
    assert "(1 of 1 diverged)" in judged["converges-mnist"].numbers


def test_one_diverged_seed_is_enough_to_fail() -> None:
    found = world(as_claimed, seeds=3)
    found["mnist-p10-topk0.9-seed1"].values["diverged"] = "a loss is NaN"
    finding = BY_NAME["converges-mnist"].judge(Results(found))
    assert finding is not None
    assert finding.verdict == PARTLY
    assert "(1 of 3 diverged)" in finding.numbers


def test_a_reference_of_which_a_seed_diverged_is_that_of_the_others() -> None:
    whole = world(as_claimed, seeds=3)
    hurt = world(as_claimed, seeds=3)
    for p in (10, 5, 2, 1):
        hurt[f"mnist-p{p}-none-seed1"].values["diverged"] = "a loss is NaN"
    before, after = (Results(found) for found in (whole, hurt))
    assert after.bar("mnist", 2) == pytest.approx(before.bar("mnist", 2), abs=0.002)
    assert len(after.zigzags("mnist", 2, "none").values) == 2
    for name in ("topk-as-fast-mnist", "zigzag-grows-mnist", "smoother-mnist"):
        assert verdict(name, whole) == verdict(name, hurt) == HOLDS
    finding = BY_NAME["zigzag-grows-mnist"].judge(after)
    assert finding is not None
    assert finding.numbers.count("(1 of 3 diverged)") == 4


def test_residuals_of_a_seed_that_diverged_say_nothing_and_those_of_the_others_do() -> None:
    whole, hurt = world(as_claimed, seeds=2), world(as_claimed, seeds=2)
    hurt["mnist-p1-rd0.9-seed1"].values.update(error_norm=[1e30] * 50, diverged="a loss is NaN")
    names = ("residual-bounded", "residual-several-times", "residual-larger-at-low-p")
    for name in (f"{each}-mnist" for each in names):
        assert judged_in(name, whole).numbers == judged_in(name, hurt).numbers


@pytest.mark.parametrize("nulls", ["all", "some", "none there"])
def test_null_values_crash_nothing(nulls: str, fits: Callable[[Mapping[str, float]], None]) -> None:
    fits({})
    found = world(as_claimed) | studies(None)
    for entry in found.values():
        for name, values in entry.values.items():
            if isinstance(values, list):
                some = [v if nulls == "some" and i % 5 else None for i, v in enumerate(values)]
                entry.values[name] = [] if nulls == "none there" else some
    judged = judge_all(found)
    sure = [finding for claim, finding in judged if finding and claim.figure not in STUDIES]
    assert bool(sure) == (nulls == "some")


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_short_runs_are_judged_too(rounds: int) -> None:
    def short(dataset: str, p: int, line: str) -> Run:
        return replace(as_claimed(dataset, p, line), rounds=rounds)

    judged = judge_all(world(short, seeds=2))
    assert all(finding for claim, finding in judged if claim.figure not in STUDIES)


# Measures


def entry(**values: Any) -> SealedCell:
    return SealedCell("mnist-p1-none-seed0", {"rounds": 4}, values, {})


def test_a_steady_rise_is_no_zigzag() -> None:
    rising = [0.1 + 0.01 * i for i in range(40)]
    assert results.zigzag(entry(test_accuracy=rising)) == pytest.approx(0, abs=1e-12)
    up_and_down = [0.5 + 0.02 * (-1) ** i for i in range(40)]
    assert results.zigzag(entry(test_accuracy=up_and_down)) == pytest.approx(0.02, rel=0.1)


def test_rounds_are_counted_with_those_not_evaluated() -> None:
    seen = entry(test_accuracy=[None, 0.4, None, 0.8])
    assert results.rounds_to(0.5)(seen) == 4
    assert results.rounds_to(0.9)(seen) == math.inf


def test_the_tip_of_a_zigzag_is_not_there_yet() -> None:
    seen = entry(test_accuracy=[0.1, 0.6, 0.1, 0.1, 0.5, 0.6, 0.5, 0.4, 0.6, 0.7])
    assert results.rounds_to(0.5)(seen) == 5
    assert results.rounds_to(0.52)(seen) == 6
    late = entry(test_accuracy=[0.4] * 99 + [0.6])
    assert results.rounds_to(0.5)(late) == math.inf


def test_a_comparison_over_p_goes_as_far_as_there_are_runs() -> None:
    found = {name: entry for name, entry in world(as_claimed).items() if "-p1-" not in name}
    for name in ("zigzag-grows-cifar10", "feedback-gap-grows-cifar10"):
        finding = judged_in(name, found)
        assert finding.verdict == HOLDS + WHERE_RUN
        assert "p=2" in finding.numbers
        assert finding.numbers.endswith("p=1)")
    found = {name: entry for name, entry in found.items() if "-p10-" in name}
    assert BY_NAME["zigzag-grows-cifar10"].judge(Results(found)) is None


def test_a_budget_is_met_by_the_nearest_round() -> None:
    """Not by the last that is a little above it: a dip would count that comes too late."""
    seen = entry(test_accuracy=[*([0.9] * 100), *([0.1] * 10)], model_sizes_sent=[1.0] * 110)
    assert [results.accuracy_at(budget)(seen) for budget in (99.7, 100.3, 104.0)] == [0.9, 0.9, 0.1]


def test_accuracy_at_a_budget() -> None:
    seen = entry(test_accuracy=[0.4, None, 0.8], model_sizes_sent=[1.0, 1.0, 1.0])
    assert [results.accuracy_at(budget)(seen) for budget in (0.5, 0.99, 2, 3)] == [0.1, 0.4, 0.4, 0.8]


def test_a_diverged_run_is_worth_nothing() -> None:
    seen = entry(test_accuracy=[0.9], model_sizes_sent=[1.0], error_norm=[1.0], delta_norm=[1.0], diverged="")
    assert [results.final(seen), results.curve(seen), results.accuracy_at(1)(seen)] == [0.1] * 3
    assert [measure(seen) for measure in (results.zigzag, results.rounds_to(0.5))] == [math.inf] * 2
    for measure in (results.residual, results.residual_ratio, results.residual_growth):
        with pytest.raises(results.Undecided, match="diverged"):
            measure(seen)


def test_a_single_seed_is_as_sure_as_its_curve_is_smooth() -> None:
    """Two curves of coin flips: what their means differ by says nothing."""
    flips = [[0.3 + 0.5 * (hash((i, j)) % 2) for j in range(100)] for i in range(2)]
    found = {
        f"mnist-p10-rd{comp}-seed0": SealedCell(
            "", {"rounds": 100}, {"test_accuracy": flips[i], "model_sizes_sent": [1.0] * 100}, {}
        )
        for i, comp in enumerate(("0.9", "0.99"))
    }
    a, b = (Results(found).curves("mnist", 10, f"rd{comp}") for comp in ("0.9", "0.99"))
    assert a.wobble == pytest.approx(0.025, rel=0.2)  # 0.25 / sqrt(100)
    at = Results(found).at_budget("mnist", 10, "rd0.9", 50.0)
    assert at.wobble == pytest.approx(0.25, rel=0.2)
    assert 2 * results.standard_error(a, b) > 0.04


def test_growth_and_ratio_of_residuals() -> None:
    line = [float(i + 1) for i in range(100)]
    seen = entry(error_norm=line, delta_norm=[2.0] * 100)
    assert results.residual_growth(seen) == pytest.approx(90.5 / 50.5)
    assert (results.still_grows(seen), results.residual_peak(seen)) == (1.0, 100)
    turned = entry(error_norm=[*line[:90], *([89.0] * 10)], delta_norm=[2.0] * 100)
    assert results.residual_growth(turned) > results.GROWS
    assert (results.still_grows(turned), results.residual_peak(turned)) == (0.0, 90)
    slow = entry(error_norm=[200 + i for i in range(100)], delta_norm=[2.0] * 100)
    assert results.still_grows(slow) == 0.0  # by 16%
    assert results.residual_ratio(seen) == pytest.approx(90.5 / 2)


def test_the_spread_over_seeds_widens_what_is_close() -> None:
    apart = Sample((0.90, 0.96)), Sample((0.86, 0.92))
    assert compare(*apart) is None
    assert compare(Sample((0.93, 0.931)), Sample((0.89, 0.891))) == 1
    assert compare(Sample((0.89,), wobble=0.001), Sample((0.93,), wobble=0.001)) == -1
    assert compare(Sample((0.89,), wobble=0.0155), Sample((0.93,), wobble=0.0155)) == 0  # not ahead
    assert compare(Sample((0.93,), wobble=0.0155), Sample((0.89,), wobble=0.0155)) is None  # may be


def test_lines_are_not_mistaken_for_one_another() -> None:
    found = Results(world(as_claimed, seeds=2))
    assert [e.name for e in found.line("mnist", 1, "topk0.9")] == [
        "mnist-p1-topk0.9-seed0",
        "mnist-p1-topk0.9-seed1",
    ]


def test_the_bound_of_lemma_1_is_that_of_its_definition() -> None:
    from paper.cfedavg.claims.judges_theory import _bound

    seen = entry(alpha=[3.0, 5.0], delta_norm2=[1.0, 2.0], error_norm2=[0.5, 0.25])
    right = math.fsum(h(2.0, a) * d / a for a, d in ((3.0, 1.0), (5.0, 2.0)))
    assert _bound(seen, 2.0) == pytest.approx(right / 0.75)


def test_lemma_1_is_judged_with_the_gamma_that_is_guaranteed() -> None:
    """Not with what was measured, by which it holds in any run. At comp 0.9, h is 341 times alpha."""
    for line in LINES:
        kind, comp = ("topk", line[4:]) if line.startswith("topk") else ("rd", line[2:])
        gamma = parse(f"{kind}({comp})").gamma(Layout.flat(10**6))
        assert judges_theory.guaranteed(line) == pytest.approx(gamma)
    for residual, mark in ((18.4, "✓"), (18.6, "✗")):
        found = dict([cell("mnist-p10-topk0.9-seed0", Run(0.9, residual=residual, bound=3.0))])
        numbers = judged_in("lemma1-holds", found).numbers
        ratio = h(1 / 0.9, 1.0) / residual**2
        text = f"top-k 0.9: the bound is {ratio:.3g} times the sum (3 with the lowest γ measured) {mark}"
        assert numbers.startswith(text)


# The table


def test_names_and_figures() -> None:
    names = [claim.name for claim in CLAIMS]
    assert len(set(names)) == len(names)
    assert {claim.figure for claim in CLAIMS} <= {*experiment.names(), *STUDIES}
    for claim in CLAIMS:
        assert all((claim.text, claim.where, claim.ran, claim.criterion))


def test_every_cell_that_a_claim_asks_for_is_in_an_experiment() -> None:
    tables = [read_table(experiment.FOLDER / f"{name}.toml") for name in experiment.names()]
    there = {
        f"{table['base']['dataset']}-p{p}-{line['name']}-seed0"
        for table in tables for p in table["p"] for line in table["line"]
    }  # fmt: skip
    asked = Results(world(as_claimed))
    used = {n for claim in CLAIMS for n in getattr(claim.judge(asked), "cells", ())}
    assert used
    assert used <= there


def rows(text: str) -> list[list[str]]:
    """The table's cells; a pipe that is escaped does not end one."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [line.replace("\\|", "¦").strip("|").split("|") for line in lines]


def test_markdown_is_a_table(fits: Callable[[Mapping[str, float]], None]) -> None:
    fits(SLOPES)
    strange = {CLAIMS[0].name: "since a | b\nand c"}
    text = as_markdown(judge_all(world(as_claimed, seeds=2) | studies(0.5)), strange)
    table = rows(text)
    assert len(table) == len(CLAIMS) + 2
    assert {len(row) for row in table} == {5}
    assert table[1] == [" --- "] * 5
    assert table[2][4] == " **holds**: since a ¦ b and c "
    assert "±" in table[2][3]
    assert text.endswith("|\n")


def test_markdown_says_what_was_not_run() -> None:
    assert all(row[3:] == [" not run yet "] * 2 for row in rows(as_markdown(judge_all({})))[2:])


def test_the_overview_has_every_verdict_once() -> None:
    judged = judge_all({n: entry for n, entry in world(as_claimed).items() if n.startswith("mnist")})
    table = rows(overview(judged))
    cells = [cell.strip() for row in table for cell in row[1:]]
    assert sum(cell.split(" (")[0] in VERDICTS for cell in cells) == len(CLAIMS)
    assert table[0] == [" claim ", " MNIST ", " Fashion-MNIST ", " CIFAR-10 "]
    assert table[2][1:] == [" holds (16✓) ", " not run yet ", " not run yet "]
    assert table[3][1:] == [" holds (8✓) ", "  ", " not run yet "]  # nothing is claimed of Fashion-MNIST
    asked = [cell for row in table for cell in row if cell.strip() in {c.text for c in CLAIMS if c.asked}]
    assert [row[0] for row in table[-len(asked) :]] == asked


def test_a_finding_of_ones_own_is_written_down() -> None:
    text = as_markdown([(CLAIMS[0], Finding(PARTLY, "1 | 2", ("a",)))])
    assert rows(text)[2][3:] == [" 1 ¦ 2 ", " **holds in part** "]


# What a programmer could get wrong and nobody would see in a table


def judged_in(name: str, found: Mapping[str, SealedCell]) -> Finding:
    finding = BY_NAME[name].judge(Results(found))
    assert finding is not None
    return finding


def test_reaching_the_bar_is_enough() -> None:
    assert results.rounds_to(0.5)(entry(test_accuracy=[0.5] * 6)) == 1


def test_errors_of_samples_of_different_sizes_are_pooled() -> None:
    """By degrees of freedom; of a single seed beside several, the several say how much seeds differ."""
    assert results.standard_error(Sample((1.0, 3.0)), Sample((1.0, 3.0, 5.0))) == pytest.approx(5 / 3)
    assert results.standard_error(Sample((1.0,), wobble=9.0), Sample((1.0, 3.0))) == pytest.approx(
        math.sqrt(3)
    )


def test_a_seed_that_diverged_is_surely_at_chance() -> None:
    found = world(as_claimed)
    found["mnist-p10-topk0.9-seed0"].values["diverged"] = "a loss is NaN"
    assert Results(found).finals("mnist", 10, "topk0.9") == Sample((0.1,), diverged=1)


def test_a_decaying_rate_is_held_against_the_constant_one() -> None:
    """Which may be far behind no compression."""
    lines = ("topk0.99", "topk0.99-decaying1", "topk0.99-decaying25")
    assert verdict("decaying-converges", world(altered(as_claimed, lines, final=0.4))) == HOLDS


def test_whoever_only_falls_does_not_train() -> None:
    found = world(as_claimed)
    found |= [cell("mnist-p10-topk0.9-seed0", Run(0.7))]
    found["mnist-p10-topk0.9-seed0"].values["test_accuracy"] = [0.9] + [0.7] * 99
    assert judged_in("converges-mnist", found).numbers.startswith("p=10: top-k 0.9 70.00 ✗")


def test_half_of_the_gain_is_what_random_dropping_fails_by() -> None:
    found = world(altered(as_claimed, ("rd0.99",), final=0.4))
    assert verdict("rd-fails-fashion", found) == HOLDS  # 30% would be enough, but for 80% without compression


def test_the_growth_of_a_gap_is_as_sure_as_both_gaps() -> None:
    """Either p may be the noisy one; a gap that has grown by five points needs less than half of it."""
    for noisy, zigzag, mark in ((10, 0.05, "?"), (1, 0.05, "?"), (1, 0.03, "✓"), (1, 0.045, "?")):
        found = world(as_claimed)
        for p, gap in ((10, 0.02), (1, 0.07)):
            for line, final in (("rd0.99", 0.7), ("rd0.99-noef", 0.7 - gap)):
                run = Run(final, zigzag=zigzag if p == noisy else 0.0)
                found |= [cell(f"mnist-p{p}-{line}-seed0", run)]
        assert judged_in("feedback-gap-grows-mnist", found).numbers[-1] == mark, (noisy, zigzag)


def test_more_than_nothing_is_much_larger() -> None:
    found = world(as_claimed)
    found |= [cell("mnist-p10-topk0.9-seed0", Run(0.99, residual=0.0))]
    numbers = judged_in("residual-larger-at-low-p-mnist", found).numbers
    assert numbers.startswith("top-k 0.9: 5 against 0 ✓")


@pytest.mark.parametrize(
    ("allowed", "slopes"),
    [
        (judges_theory.FALLS_AS_INVERSE, {-2.0: -1, -1.26: -1, -1.24: 1, -0.76: 1, -0.74: -1, 0.0: -1}),
        (judges_theory.DOES_NOT_GROW, {-2.0: 1, 0.24: 1, 0.26: -1}),
        (judges_theory.FALLS_AS_ROOT, {-2.0: 1, -0.5: 1, -0.38: 1, -0.37: -1, 0.0: -1}),
        (judges_theory.STAYS, {-1.0: -1, -0.24: 1, 0.24: 1, 0.26: -1}),
    ],
)
def test_slopes(allowed: tuple[float, float], slopes: dict[float, int]) -> None:
    assert {slope: judges_theory.inside(slope, 0.001, allowed) for slope in slopes} == slopes


def test_a_slope_within_two_standard_errors_of_its_limit_cannot_be_told(
    fits: Callable[[Mapping[str, float]], None],
) -> None:
    """The error is 0.05, the limits of 1/m are -1.25 and -0.75."""
    slopes = {"slope_none": -0.86, "slope_topk0.9": -0.84, "slope_rd0.9": -0.66}
    for shift, marks in ((0.0, "✓??"), (0.02, "??✗"), (-0.5, "✗??")):
        fits({key: slope + shift for key, slope in slopes.items()})
        numbers = judged_in("linear-speedup", studies(0.5)).numbers
        assert [part[-1] for part in numbers.split("; ")] == list(marks), shift


@pytest.mark.parametrize(
    ("marks", "verdict"),
    [
        ("✓✓✓✓", HOLDS), ("✓✓≈≈", HOLDS), ("✓✓??", HOLDS), ("✓≈≈≈", FAILS), ("✓≈≈?", FAILS),
        ("✓✓✓✗", PARTLY), ("✓✓✗✗", PARTLY), ("✓✗✗✗", FAILS), ("✓≈✗✗", FAILS), ("✓✓✗≈≈", FAILS),
        ("≈≈≈≈", FAILS), ("✗✗??", FAILS), ("✗???", UNDECIDED), ("✓???", UNDECIDED), ("????", UNDECIDED),
    ],
)  # fmt: skip
def test_a_claim_holds_if_half_of_its_cases_go_as_claimed(marks: str, verdict: str) -> None:
    outcome = {mark: number for number, mark in MARKS.items()}
    assert decide([outcome[mark] for mark in marks]) == verdict


def test_one_case_as_claimed_among_many_against_is_not_in_part() -> None:
    found = world(as_claimed)
    for name in found:
        if "-rd0.9-" in name or "-topk0.9-" in name:
            found |= [cell(name, Run(0.9, residual=50.0))]
    found |= [cell("mnist-p1-topk0.9-seed0", Run(0.9, residual=5.0))]
    finding = judged_in("residual-several-times-mnist", found)
    assert [finding.numbers.count(mark) for mark in "✓✗"] == [1, 7]
    assert finding.verdict == FAILS


def test_runs_of_different_lengths_are_not_compared() -> None:
    """Neither between lines nor between seeds; a budget of uplink compares them fairly."""
    found = world(as_claimed)
    found |= [cell("mnist-p10-topk0.99-seed0", replace(as_claimed("mnist", 10, "topk0.99"), rounds=40))]
    found |= [cell("mnist-p2-none-seed1", replace(as_claimed("mnist", 2, "none"), rounds=60))]
    numbers = judged_in("topk-as-good-mnist", found).numbers
    assert numbers.count("?") == 3
    assert "(runs of 40 and 100 rounds are not compared) ?; p=5" in numbers
    assert numbers.count("(runs of 60 and 100 rounds are not compared) ?") == 2
    zigzag = judged_in("zigzag-grows-mnist", found)
    assert zigzag.verdict == UNDECIDED
    assert zigzag.numbers.endswith("(runs of 60 and 100 rounds are not compared)")
    assert verdict("equal-uplink-mnist", world(GOOD["equal-uplink"])) == HOLDS  # 500 rounds beside 100
    assert "not compared" not in judged_in("lemma1-holds", found).numbers


def test_checks_of_little_power_are_listed_with_their_numbers(
    fits: Callable[[Mapping[str, float]], None],
) -> None:
    fits(SLOPES)
    judged = judge_all(world(as_claimed) | bounds(0.5))
    weak = {claim.name for claim, found in judged if found and claim.weak}
    assert weak == {"theorem1-holds", "theorem2-holds", "theorem3-holds", "lemma1-holds"}
    table = rows(weak_checks(judged))
    assert len(table) == 2 + len(weak)
    assert all("2 times what was measured" in row[2] for row in table[2:5])
    assert overview(judged).count("(says little, see below)") == len(weak)
    assert weak_checks(judge_all({})) == ""


def test_a_bound_on_the_extra_variance_is_held_against_all_of_the_variance() -> None:
    """With the level 1, an extra of 0.2 and a bound of 0.1."""
    numbers = judged_in("variance-bound", studies(2.0)).numbers
    assert numbers.startswith(
        "top-k: the bound is 0.5 times the extra variance, and 0.1 times all of |∇f|² ✗"
    )


def test_which_slope_a_claim_asks_for(fits: Callable[[Mapping[str, float]], None]) -> None:
    """All of them as steep as they can be: only what must not grow is fine with that."""
    fits(dict.fromkeys(SLOPES, -2.0))
    good = {name for name in BY_NAME if name.startswith(("linear", "variance", "corollary", "h-"))}
    good = {name for name in good if verdict(name, studies(0.5)) == HOLDS}
    rates = {name for name in BY_NAME if name.startswith("corollary")}
    assert good == {"variance-K", "variance-slight", "variance-bound", "h-bounded"} | rates


def test_a_bound_is_held_against_the_cells_that_its_theorem_speaks_of() -> None:
    found = bounds(0.5)
    assert judged_in("theorem2-holds", found).numbers.count("2 times what was measured, in 1 of 1 cells") == 3
    found["bounds-2-rd(0.5)"].values["mean"] = 1.5
    found["bounds-2-more"] = bounds(0.5)["bounds-2-rd(0.5)"]
    verdicts = [judged_in(f"theorem{number}-holds", found).verdict for number in (1, 2, 3)]
    assert verdicts == [HOLDS, PARTLY, HOLDS]
    found["bounds-2-rd(0.5)"].values["conditions"][1] = 1.01
    finding = judged_in("theorem2-holds", found)
    assert finding.verdict == HOLDS
    assert "random dropping: the bound is 2 times what was measured, in 1 of 2 cells" in finding.numbers
    for broken in (1.1, None):
        assert judged_in("theorem1-holds", bounds(0.5, broken)).verdict == UNDECIDED
    del found["bounds-1-none"]
    assert judged_in("theorem1-holds", found).numbers.endswith("(not run: no compression)")


def test_the_beginning_of_a_run_does_not_say_how_it_ends() -> None:
    """Neither whether residuals stop growing, nor that a line never trains; that it does, it may say."""
    found = world(altered(as_claimed, ("rd0.99",), final=0.2))
    whole, cut = (Results(found, dict.fromkeys(found, rounds)) for rounds in (100, 300))
    at_the_end = ["residual-bounded-mnist", "residual-keeps-growing-mnist", "rd-fails-fashion"]
    for these, wanted in ((whole, HOLDS), (cut, f"{UNDECIDED}, after 100 of 300 rounds")):
        told = [BY_NAME[name].judge(these) for name in at_the_end]
        assert [each.verdict for each in told if each] == [wanted] * 3
    told = [BY_NAME["converges-mnist"].judge(these) for these in (whole, cut)]
    assert [(each.numbers.count("✓"), each.numbers[-1]) for each in told if each] == [(12, "✗"), (12, "?")]


def test_a_slope_that_cannot_be_fitted_decides_nothing(fits: Callable[[Mapping[str, float]], None]) -> None:
    fits({})
    finding = judged_in("linear-speedup", studies(0.5))
    assert finding.verdict == UNDECIDED
    assert finding.numbers.count("cannot be fitted") == 3


def test_the_worst_run_and_the_worst_cell_decide() -> None:
    found = world(as_claimed)
    found |= [cell("cifar10-p1-rd0.9-seed7", Run(0.9, residual=20.0))]
    assert judged_in("lemma1-holds", found).verdict == PARTLY
    worst = conditions(0.5) | {"conditions-y": SealedCell("conditions-y", {}, {"ratios": [2.0] * 3}, {})}
    assert judged_in("rate-conditions", worst).verdict == FAILS


def test_a_run_that_holds_nothing_back_says_nothing_of_the_bound() -> None:
    found = world(as_claimed)
    before = judged_in("lemma1-holds", found).numbers
    found |= [cell("cifar10-p1-rd0.9-seed7", Run(0.9, residual=0.0))]
    assert judged_in("lemma1-holds", found).numbers == before


def test_the_work_of_clients_with_all_classes_is_counted() -> None:
    found = world(as_claimed)
    for name, each in found.items():
        if "-p10-" in name:
            each.values["local_steps_mean"] = [200.0] * 100
    assert "MNIST: T = 100, mK = 400 ✗" in judged_in("long-enough", found).numbers
    cut = BY_NAME["long-enough"].judge(Results(found, {"mnist-p10-none-seed0": 300}))
    assert cut is not None
    assert "MNIST: T = 300, mK = 400 ✗" in cut.numbers
    assert cut.verdict == FAILS  # and says nothing of the rounds that were run


def test_a_finding_names_the_cells_it_is_from_and_no_others() -> None:
    found = world(as_claimed)
    whole = Results(found)
    first = BY_NAME["rd-worsens-mnist"].judge(whole)
    second = BY_NAME["feedback-gap-iid-cifar10"].judge(whole)
    assert first
    assert second
    assert set(first.cells) == {f"mnist-p{p}-rd{comp}-seed0" for p in NONE for comp in ("0.9", "0.99")}
    lines = ("topk0.99", "rd0.99", "topk0.99-noef", "rd0.99-noef")
    assert set(second.cells) == {f"cifar10-p10-{line}-seed0" for line in lines}
    del found["mnist-p5-rd0.99-seed0"]
    assert not [name for name in judged_in("rd-worsens-mnist", found).cells if "-p5-" in name]
