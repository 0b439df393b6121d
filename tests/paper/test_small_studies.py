"""The small studies: a problem with known constants, the search for T, fits, and what they draw."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cfedavg import Config, run
from cfedavg.report import Frame, as_png
from cfedavg.simulate.local import batches
from cfedavg.sweep import SealedCell
from cfedavg.task import Tensors
from paper.cfedavg.studies import bounds, conditions, speedup, variance
from paper.cfedavg.studies.problem import Bowl, Point, gradient_norm2, power_law, tilt_loss

STUDIES = (speedup, bounds, variance, conditions)
FRAME = Frame("A title", "a subtitle", (), "a note")
PNG = b"\x89PNG\r\n\x1a\n"


def bowl(**changes: Any) -> Bowl:
    given_by = {"m": 6, "L": 3.0, "sigma_L": 4.0, "sigma_G": 2.0, "start": 1.0, "d": 20, "samples": 30}
    return Bowl(**{**given_by, "seed": 0, **changes})


def ignore(text: str) -> None:
    pass


# The problem


@given(st.lists(st.floats(-8, 8), min_size=1, max_size=6), st.floats(0.01, 10))
def test_gradient_in_closed_form_is_autograds(at: list[float], L: float) -> None:
    model = Point(torch.tensor(at, dtype=torch.float64), L)
    (automatic,) = torch.autograd.grad(tilt_loss(model, torch.zeros(1, len(at))), [model.x])
    assert torch.allclose(model.gradient(), automatic, rtol=1e-9, atol=1e-9)
    assert gradient_norm2(model, None).item() == pytest.approx(automatic.square().sum().item())


@given(st.floats(-20, 20), st.floats(-20, 20), st.floats(0.01, 10))
def test_gradient_is_lipschitz_with_L(x: float, y: float, L: float) -> None:
    slopes = [Point(torch.tensor([at], dtype=torch.float64), L).gradient().item() for at in (x, y)]
    assert abs(slopes[0] - slopes[1]) <= L * abs(x - y) * (1 + 1e-9) + 1e-12


def test_no_smaller_L_would_do_and_the_bowl_is_not_convex() -> None:
    model = Point(torch.tensor([0.0, math.pi], dtype=torch.float64), 3.0)
    curvature = torch.autograd.functional.hessian(
        lambda x: (x.square() / 2 + 2 * (1 - x.cos())).sum(), model.x.detach()
    )
    (slope,) = torch.autograd.grad(model.gradient().sum(), [model.x])
    assert torch.allclose(slope, curvature.diagonal())
    assert slope.tolist() == pytest.approx([3.0, -1.0])


@settings(max_examples=20)
@given(st.integers(2, 9), st.floats(0.1, 50), st.floats(0.1, 50), st.integers(0, 99))
def test_sigmas_are_exact(m: int, sigma_L: float, sigma_G: float, seed: int) -> None:
    pulls = bowl(m=m, sigma_L=sigma_L, sigma_G=sigma_G, seed=seed).pulls().double()
    apart = pulls.mean(1)
    inside = (pulls - apart[:, None]).square().sum(-1).mean(1)
    assert inside.sqrt().tolist() == pytest.approx([sigma_L] * m, rel=1e-4)
    assert math.sqrt(apart.square().sum(-1).mean()) == pytest.approx(sigma_G, rel=1e-4)
    assert apart.mean(0).norm() < 1e-5 * (sigma_L + sigma_G)


def test_global_gradient_is_the_mean_of_the_clients() -> None:
    task = bowl().task()
    losses = [task.loss(task.model, client.batch(np.arange(len(client)))) for client in task.clients]
    (automatic,) = torch.autograd.grad(torch.stack(losses).mean(), list(task.model.parameters()))
    assert isinstance(task.model, Point)
    assert torch.allclose(task.model.gradient(), automatic, atol=1e-4)


def test_client_alone_is_not_pulled_aside() -> None:
    assert bowl(m=1).pulls().mean(1).norm() < 1e-5


# The search and the fits


@given(st.floats(1, 1000), st.floats(0, 1000), st.floats(0.05, 20), st.integers(1, 2000))
def test_search_finds_the_horizon(c1: float, c2: float, target: float, first: int) -> None:
    def level(T: int) -> float:
        return c1 / math.sqrt(T) + c2 / T

    right = float(speedup.solve(c1, c2, np.array([1.0]), target)[0])
    found = speedup.horizon(level, target, first)
    if right > 8:  # below, T is rounded too coarsely
        assert found == pytest.approx(right, rel=0.06)
    else:
        assert found <= 12


def test_search_tries_few() -> None:
    tried: list[int] = []
    assert speedup.horizon(lambda T: tried.append(T) or 100 / T, 1.5, 50) == pytest.approx(200 / 3)
    assert tried == [50, 100]


def test_search_ends_where_one_round_is_enough() -> None:
    assert speedup.horizon(lambda T: 1 / T, 2.0, 8) == 1.0


@given(st.floats(-3, 3), st.floats(0.1, 10))
def test_power_law_is_found(slope: float, factor: float) -> None:
    x = [1.0, 2.0, 4.0, 16.0]
    fit = power_law(x, [factor * at**slope for at in x])
    assert fit is not None
    assert fit.slope == pytest.approx(slope, abs=1e-9)
    assert fit.se < 1e-6


def test_standard_error_covers_the_truth() -> None:
    generator, x = np.random.default_rng(0), 2.0 ** np.arange(7)
    fits = [power_law(x, np.exp(0.1 * generator.standard_normal(7)) / x) for _ in range(400)]
    off = [(fit.slope + 1) / fit.se for fit in fits if fit is not None]
    assert np.mean(np.abs(off) < 2.571) == pytest.approx(0.95, abs=0.03)  # t of 5 degrees of freedom


@pytest.mark.parametrize(
    ("x", "y"), [([1, 2], [1, 2]), ([2, 2, 2], [1, 2, 3]), ([1, 2, 3], [1, 0, 2]), ([], [])]
)
def test_no_power_law_without_enough_to_fit(x: list[float], y: list[float]) -> None:
    assert power_law(x, y) is None


@given(st.floats(1, 1e4), st.floats(0, 1e5))
def test_rate_is_found_again(c1: float, c2: float) -> None:
    m = [2**i for i in range(7)]
    T = speedup.solve(c1, c2, 2.0 * np.array(m), 20.0)
    found = speedup.Line("none", m, T.tolist(), [2] * 7, 20.0, 0.5).rate()
    assert found == (pytest.approx(c1, rel=1e-3, abs=0.1), pytest.approx(c2, rel=1e-3, abs=1.0))


@pytest.mark.parametrize("curvature", [[1.0, -7.0, 2.0], [7.0, -7.0, 1.0]])
def test_largest_eigenvalue_of_a_quadratic(curvature: list[float]) -> None:
    def loss(model: nn.Module, batch: None) -> torch.Tensor:
        (weights,) = model.parameters()
        return (torch.tensor(curvature) * weights.square()).sum() / 2

    model = nn.Linear(3, 1, bias=False)
    found = [conditions.largest_eigenvalue(model, loss, None, n) for n in (1, 2, 3, 30)]
    assert found[-1] == (pytest.approx(7.0, rel=1e-5), pytest.approx(0.0, abs=1e-5))
    assert [value for value, _ in found] == sorted(value for value, _ in found)
    assert found[2][1] == pytest.approx(1 - found[1][0] / found[2][0])


# The studies


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_cells(study: ModuleType, scale: str) -> None:
    one, two = study.cells(scale, range(1)), study.cells(scale, range(2))
    prefix = study.__name__.split(".")[-1]
    assert all(name.startswith(f"{prefix}-") and "/" not in name for name in two)
    assert len(two) == 2 * len(one)
    assert {name: two[name] for name in one} == one
    assert len({repr(sorted(each.items())) for each in two.values()}) == len(two)


def test_enough_clients_and_no_horizon_below_mK_to_begin_with() -> None:
    first = [(s["first"], s["m"] * s["K"]) for s in speedup.cells("paper", range(1)).values()]
    assert {mK for _, mK in first} == {2 * 2**i for i in range(7)}
    assert all(mK <= T for T, mK in first)


def entries(study: ModuleType, fake: Any) -> dict[str, SealedCell]:
    return {name: SealedCell(name, s, fake(s), {}) for name, s in study.cells("paper", range(2)).items()}


def fake_speedup(s: dict[str, Any]) -> dict[str, Any]:
    broken = {"none": 0.5, "topk(0.9)": 2.0 * s["m"], "rd(0.9)": None if s["m"] > 2 else 1.0}
    horizon = 6000 / s["m"] * (1.01 if s["seed"] else 0.99)
    return {"horizon": horizon, "condition3": broken[s["compressor"]]}


def fake_variance(s: dict[str, Any]) -> dict[str, Any]:
    extra = s["K"] * (1 + s["sigma_G"] ** 2) / s["m"] * (1.01 if s["seed"] else 0.99)
    compressed = {name: {"extra": extra, "promised": 1.0} for name in variance.COMPRESSORS}
    return {"level": 3 * extra / s["K"], **compressed}


def fake_bounds(s: dict[str, Any]) -> dict[str, Any]:
    mean = s["theorem"] / math.sqrt(s["rounds"] * s["m"]) / s["K"][0] * (1.01 if s["seed"] else 0.99)
    compressed = s["compressor"] != "none"
    third = 0.1 if not compressed else None if s["m"] == 16 else s["m"] / 4
    return {"mean": mean, "bound": 5 * mean, "h": s["m"] ** 2 * compressed, "conditions": [0.1, 0.1, third]}


def fake_conditions(s: dict[str, Any]) -> dict[str, Any]:
    return {"L": 5.0, "ratios": [400.0, 50.0, None if s["at"] == "start" else 1000.0]}


FAKES = [
    (speedup, fake_speedup), (bounds, fake_bounds), (variance, fake_variance), (conditions, fake_conditions)
]  # fmt: skip


@pytest.mark.parametrize(("study", "fake"), FAKES)
def test_figure_and_table_of_all_some_and_none(study: ModuleType, fake: Any) -> None:
    found = entries(study, fake)
    pictures, rows = set(), []
    for size in (len(found), len(found) // 3, 1, 0):
        part = dict(list(found.items())[:size])
        picture, table = as_png(study.figure(part, FRAME)), study.table(part)
        assert picture.startswith(PNG)
        assert all(len(row) == len(table[0]) for row in table)
        pictures.add(picture)
        rows.append(len(table))
    assert len(pictures) == 3 + (study is not speedup)  # which has no line with one number of clients
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] == 1


def test_speedup_verdict() -> None:
    numbers = speedup.verdict_numbers(entries(speedup, fake_speedup))
    assert numbers["slope_none"] == pytest.approx(-1, abs=0.01)
    assert 0 < numbers["slope_rd0.9_se"] < 0.01
    broken = {name: ratio for name, ratio in numbers.items() if name.endswith("_condition")}
    most = 2.0 * max(s["m"] for s in speedup.cells("paper", range(1)).values())
    assert broken == {"slope_topk0.9_condition": most, "slope_rd0.9_condition": math.inf}


def test_variance_verdict() -> None:
    numbers = variance.verdict_numbers(entries(variance, fake_variance))
    assert numbers["slope_K_topk"] == pytest.approx(1)
    assert numbers["slope_K_iid_rd"] == pytest.approx(1)
    assert numbers["slope_m_rd"] == pytest.approx(-1)
    assert 1 < numbers["slope_sigma_topk"] < 2
    assert numbers["slope_m_level"] == pytest.approx(-1)
    least = {row[0]: row[-1] for row in variance.table(entries(variance, fake_variance))}
    assert least["m"] == f"{2 / (4 * 7.25):.3g}"  # where the extra variance is largest, at two clients


def test_bounds_verdict() -> None:
    found = entries(bounds, fake_bounds)
    numbers = bounds.verdict_numbers(found)
    slopes = {key: numbers[key] for key in numbers if not key.endswith(("_se", "_condition"))}
    wanted = {key: 2.0 if "_h_" in key else -1.0 if "_K_" in key else -0.5 for key in slopes}
    assert slopes == pytest.approx(wanted)
    assert len(slopes) == 3 * 2 * 3 + 3 * 2 + 3 * 2  # over T and m, h over m, and of Theorem 1 two more
    broken = {key: numbers[key] for key in numbers if key.endswith("_condition")}
    over_m = ("m_theorem1", "m_iid_theorem1", "m_theorem2", "m_theorem3")
    named = [f"slope_{key}_{kind}_condition" for key in over_m for kind in ("topk", "rd")]
    assert broken == dict.fromkeys(named, math.inf)
    table = {tuple(row[:3]): row[3:] for row in bounds.table(found)}
    assert table["3", "rd(0.5)", "m"] == ["-0.50 ± 0.01", "0.0469", "0.0166", "5 to 5", "inf"]
    assert table["1", "none", "K"][:3] == ["-1.00 ± 0.01", "0.0156", "0.00195"]


def test_a_line_varies_one_thing_and_has_every_seed() -> None:
    for line in bounds.lines(entries(bounds, fake_bounds)):
        varied = line.over.removesuffix(", IID")
        for other in {"rounds", "m", "K", "sigma_G"} - {varied}:
            assert len({str(entry.settings[other]) for entry in line.entries}) == 1
        assert len(set(line.at)) == 4
        assert len(line.entries) == 2 * 4
        most = 4 if line.name != "none" else 16  # clients whose rates satisfy the conditions
        assert line.within().entries == [entry for entry in line.entries if entry.settings["m"] <= most]


def test_conditions_table_says_how_far_over() -> None:
    head, first, *_ = conditions.table(entries(conditions, fake_conditions))
    assert dict(zip(head, first, strict=True))["largest η_L"] == "0.00025"
    assert first[-1] == "infinitely"


@pytest.mark.parametrize(
    ("study", "name", "shorter"),
    [
        (speedup, "speedup-m4-topk0.9-seed0", {"first": 16, "target": 600.0}),
        (bounds, "bounds-theorem3-rd-T256-m2-K1-3-g2.5-seed0", {"rounds": 160}),
        (variance, "variance-K4-m4-g2.5-seed0", {"rounds": 8}),
        (conditions, "conditions-p1-trained-seed0", {"steps": 2, "iterations": 2}),
    ],
)
def test_measure_twice_is_the_same(study: ModuleType, name: str, shorter: dict[str, Any]) -> None:
    cell = study.cells("smoke", range(2))[name] | shorter
    first = study.measure(cell, ignore)
    assert study.measure(cell, ignore) == first
    assert study.measure({**cell, "seed": 1}, ignore) != first


def test_more_clients_need_fewer_rounds() -> None:
    found = [
        speedup.measure(speedup.cells("smoke", range(1))[f"speedup-m{m}-none-seed0"], ignore) for m in (1, 4)
    ]
    assert found[0]["horizon"] > 2 * found[1]["horizon"]


@pytest.mark.parametrize(("theorem", "m"), [(1, 2), (1, 4), (2, 2), (3, 2), (3, 4)])
def test_bounds_are_of_the_rates_and_steps_that_were_run(theorem: int, m: int) -> None:
    """What a cell says, computed again from its settings, a run of its own and the theorem as it stands."""
    T, L, sL2, sG2 = 200, 0.2, 25.0, 6.25
    K = {1: [2, 2], 2: [2, 2], 3: [1, 3]}[theorem] * (m // 2)
    s = bounds.cells("smoke", range(1))[
        f"bounds-theorem{theorem}-topk-T256-m{m}-K{'1-3' if theorem == 3 else 2}-g2.5-seed0"
    ]
    s |= {"rounds": T}
    eta_L = 1 / (L * {1: 2 * math.sqrt(T), 2: 2 * math.sqrt(1024), 3: math.sqrt(T)}[theorem])
    eta = math.sqrt(m if theorem == 3 else 2 * m)
    task = Bowl.of(s).task()
    config = Config(
        rounds=T, local_steps=",".join(map(str, K)), batch_size=1, eta_local=eta_L, eta=eta,
        compressor="topk(0.5)", compressor_down="none", update="mean" if theorem == 3 else "sum", seed=0,
        schedule="decaying(a=1024)" if theorem == 2 else "constant", device="cpu", workers=1,
    )  # fmt: skip
    rows = run(config, task, draw=False).rows
    rates = [eta_L / math.sqrt(1 + t / 1024) if theorem == 2 else eta_L for t in range(T)]
    levels = [gradient_norm2(task.model, None).item()] + [row["test_gradient_norm2"] for row in rows[:-1]]
    norms = np.array([[row["delta_norm2"], row["delta_norm2"] / row["alpha"]] for row in rows])
    alphas = [float(np.divide(*norms[at : at + 32].sum(0))) for at in range(0, T, 32)]
    hs = [alpha / (math.sqrt(2) - 1) ** 2 for alpha in alphas]
    found = bounds.measure(s, ignore)
    assert found["mean"] == pytest.approx(np.average(levels, weights=rates), rel=1e-4)
    assert found["alpha"] == pytest.approx(np.mean(alphas), rel=1e-4)
    assert found["h"] == pytest.approx(np.mean(hs), rel=1e-4)

    noise, drift = (L**2 * np.mean(hs) / 2 + 0.5 + L / 2) * eta / m * sL2, 2.5 * L**2
    c = 0.5 - 15 * (eta_L * L) ** 2 * float(np.mean(np.square(K)))
    gap = 100 * L / 3 * (2.5**2 / 2 + 2 * (1 - math.cos(2.5)))
    sums = [sum(rate**power for rate in rates) for power in (1, 2, 3)]
    if theorem == 3:
        parts = [gap / (eta * sums[0]), noise * eta_L * np.mean([1 / k for k in K])]
        parts += [drift * eta_L**2 * np.mean([k * (sL2 + 6 * k * sG2) for k in K])]
    else:
        parts = [gap / (eta * 2 * sums[0]), noise * sums[1] / sums[0]]
        parts += [drift * 2 * (sL2 + 12 * sG2) * sums[2] / sums[0]]
    assert found["bound"] == pytest.approx(sum(parts) / c, rel=1e-4)

    most = max(K)
    third = [eta * rate * (L**2 * factor + 1 + L) for rate, factor in zip(rates[::32], hs, strict=True)]
    limits = [8 * L * most * eta_L, eta * eta_L * most * L, max(third) * (1 if theorem == 3 else 2)]
    assert found["conditions"] == pytest.approx(limits, rel=1e-4)


def test_a_bound_that_is_infinite_is_written_as_null() -> None:
    """Where a client does so many steps that the descent is lost."""
    s = bounds.cells("smoke", range(1))["bounds-theorem3-none-T160-m2-K1-3-g2.5-seed0"] | {"rounds": 32}
    assert bounds.measure(s, ignore)["bound"] is None


def test_variance_promises_what_the_remark_says() -> None:
    s = variance.cells("smoke", range(1))["variance-K4-m4-g2.5-seed0"] | {"rounds": 12}
    found = variance.measure(s, ignore)
    for name in variance.COMPRESSORS:
        own = found[name]
        assert own["gamma"] == 2.0
        factor = own["alpha"] / (math.sqrt(2) - 1) ** 2
        assert own["h"] == pytest.approx(factor, rel=1e-4)
        assert own["promised"] == pytest.approx((0.05**2 * factor + 1) * 0.08 * 25 / 4, rel=1e-4)
        first, second = 0.08 * 8 * 0.05 * 4, 0.08 * 4 * 0.05
        third = 0.08 * 4 * (0.05**2 * factor + 1 + 0.05)
        assert own["conditions"] == pytest.approx([first, second, third], rel=1e-4)


def test_a_horizon_comes_with_what_its_last_run_was_like() -> None:
    s = speedup.cells("smoke", range(1))["speedup-m4-topk0.9-seed0"] | {"first": 16, "target": 600.0}
    found = speedup.measure(s, ignore)
    (T, level), (before, _) = found["tried"][-1], found["tried"][-2]
    assert min(T, before) <= found["horizon"] <= max(T, before)
    again, result = speedup.mean_level(s, T)
    assert level == pytest.approx(again, rel=1e-5)
    assert found["alpha"] == pytest.approx(np.mean([row["alpha"] for row in result.rows]), rel=1e-5)
    ratios = [list(row["rate_conditions"].values())[2]["ratio"] for row in result.rows]
    assert found["condition3"] == pytest.approx(np.median(ratios), rel=1e-5)


def test_samples_of_a_round_are_drawn_without_replacement_as_the_page_says() -> None:
    """With the variance of K steps that this leaves, and what it does to a slope over K."""
    page = (Path(__file__).parents[2] / "paper" / "cfedavg" / "claims.toml").read_text()
    n, most = bounds._FIXED["samples"], bounds._OVER["paper"]["K"]
    drawn = islice(batches(Tensors(torch.arange(float(n))[:, None]), 1, seed=0, t=3, client=1), int(n))
    assert len({float(batch) for batch in drawn}) == n

    def less(K: int, samples: float) -> float:
        return (K - 1) / (samples - 1)

    assert f"n = {n} samples a client ({variance._FIXED['samples']} in `variance`)" in page
    assert speedup._BOWL["samples"] == n
    assert f"{100 * less(2, n):.1f}% less at K = 2 and {100 * less(8, n):.0f}% less at K = 8" in page
    assert f"({100 * less(8, variance._FIXED['samples']):.1f}% in `variance`)" in page
    steeper = power_law(most, [1 - less(K, n) for K in most])
    assert steeper is not None
    assert f"slopes over K up to {-steeper.slope:.2f} steeper" in page
