"""The bounds of Theorems 1 to 3, and the rates of their corollaries, beside what runs come to.

Each cell runs a problem with known constants at a corollary's rates, and takes the mean over its rounds of
|grad f(x_t)|^2, each in proportion to its rate: what the proofs bound, and for Theorem 2 the expectation of
|grad f(z)|^2. The minimum, of which Theorems 1 and 3 speak, does not exceed it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes

from cfedavg import Config, run
from cfedavg.compress import parse
from cfedavg.layout import Layout
from cfedavg.report.axes import MUTED
from cfedavg.report.figures import as_png
from cfedavg.report.grid import framed
from cfedavg.report.panels import Frame
from cfedavg.report.pens import Pen
from cfedavg.reproduce.archive import Entry, rounded
from cfedavg.reproduce.problem import COLOURS, METRIC, Bowl, Fit, finish_axes, mark, power_law
from cfedavg.schedule import Steps, resolve_rates
from cfedavg.theory import Problem, h, rate_conditions, theorem1, theorem2, theorem3

TITLE = "The theorems' bounds and the corollaries' rates, over rounds and clients"

COMPRESSORS = {"none": "none", "topk": "topk(0.5)", "rd": "rd(0.5)"}
# The rates of each theorem's corollary, and the local steps of even and of odd clients. With a of Corollary 2
# as large as this, its first rate satisfies the theorem's conditions, and is that of 1024 rounds.
_RATES = {1: "corollary1", 2: "corollary2(a=1024)", 3: "corollary3(k_min=1)"}
_STEPS = {1: [2, 2], 2: [2, 2], 3: [1, 3]}
# L is where the third condition leaves most room.
_FIXED = {"L": 0.2, "sigma_L": 5.0, "sigma_G": 2.5, "start": 2.5, "d": 100, "samples": 64}
# The numbers of rounds, with as few clients as the first below; their numbers, with the second of these.
_OVER: dict[str, dict[str, Sequence[int]]] = {
    "smoke": {"rounds": (160, 256, 384), "m": (2, 4)},
    "small": {"rounds": (512, 1024, 2048), "m": (2, 4, 8)},
    "paper": {"rounds": (1024, 2048, 4096, 8192), "m": (2, 4, 8, 16)},
}


def cells(scale: str, seeds: int) -> dict[str, dict[str, Any]]:
    """A cell for each theorem and compressor, and each point over the rounds and over the clients."""
    over = _OVER[scale]
    points = [(T, over["m"][0]) for T in over["rounds"]] + [(over["rounds"][1], m) for m in over["m"][1:]]
    return {
        f"bounds-theorem{theorem}-{name}-T{T}-m{m}-seed{seed}": {
            **_FIXED, "theorem": theorem, "schedule": _RATES[theorem], "K": _STEPS[theorem],
            "compressor": compressor, "rounds": T, "m": m, "seed": seed,
        }
        for seed in range(seeds) for theorem in _RATES for name, compressor in COMPRESSORS.items()
        for T, m in points
    }  # fmt: skip


def measure(settings: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """The mean of |grad f|^2, its bound, the mean alpha and h that are in it, and the conditions."""
    task, config = Bowl.of(settings).task(), _config(settings)
    rows = run(config, task, draw=False).rows
    rates = resolve_rates(config, Steps(config, [], []), settings["m"])
    eta_L = [rates.eta_local(t) for t in range(len(rows))]
    levels = [task.metric(task.model, None).item(), *(row[METRIC] for row in rows[:-1])]
    mean = math.fsum(map(math.prod, zip(eta_L, levels, strict=True))) / math.fsum(eta_L)
    gamma = parse(settings["compressor"]).gamma(Layout.of(task.model))
    alphas = [row["alpha"] for row in rows]
    factor = statistics.fmean(h(gamma, alpha) for alpha in alphas)
    found = {"mean": mean, "bound": _bound(settings, rates.eta, eta_L, factor)}
    say(f"the mean of |grad f|^2 is {mean:.4g}, its bound {found['bound']:.4g}")
    K, L = max(_steps(settings)), settings["L"]
    conditions = rate_conditions(eta_L[0], rates.eta, K, L, gamma, max(alphas), rates.update)
    found |= {"alpha": statistics.fmean(alphas), "h": factor}
    return {name: rounded(value) for name, value in found.items()} | {
        "conditions": [rounded(each.value / each.limit) for each in conditions]
    }


def _config(settings: Mapping[str, Any]) -> Config:
    return Config(
        rounds=settings["rounds"], schedule=settings["schedule"], smoothness=settings["L"],
        local_steps=",".join(map(str, _steps(settings))), batch_size=1, compressor=settings["compressor"],
        seed=settings["seed"], device="cpu", workers=1,
    )  # fmt: skip


def _steps(settings: Mapping[str, Any]) -> list[int]:
    """K_i of every client."""
    return [settings["K"][i % 2] for i in range(settings["m"])]


def _bound(settings: Mapping[str, Any], eta: float, eta_L: Sequence[float], factor: float) -> float:
    """That of the theorem; `factor` is the mean of h."""
    gap, K, T = Bowl.of(settings).gap(), _steps(settings), len(eta_L)
    problem = Problem(gap, settings["L"], settings["sigma_L"] ** 2, settings["sigma_G"] ** 2, settings["m"])
    if settings["theorem"] == 1:
        return theorem1(problem, eta_L[0], eta, K[0], T, factor)
    if settings["theorem"] == 2:
        return theorem2(problem, eta_L, eta, K[0], factor)
    return theorem3(problem, eta_L[0], eta, K, T, factor)


@dataclass(frozen=True)
class Line:
    """The cells of one theorem and compressor that differ in the rounds, or in the clients, alone."""

    theorem: int
    name: str
    over: str
    entries: list[Entry]

    @property
    def at(self) -> list[int]:
        return [entry.settings[self.over] for entry in self.entries]

    def all(self, key: str) -> list[float]:
        return [entry.values[key] for entry in self.entries]

    def means(self, key: str) -> Iterator[tuple[int, float]]:
        """Over the seeds."""
        for value in sorted(set(self.at)):
            pairs = zip(self.at, self.all(key), strict=True)
            yield value, statistics.fmean(found for at, found in pairs if at == value)

    def fit(self, key: str = "mean") -> Fit | None:
        return power_law(self.at, self.all(key))

    def third(self) -> float:
        """The largest value of the third condition, over its limit."""
        return max(float(entry.values["conditions"][2]) for entry in self.entries)


def lines(found: Mapping[str, Entry]) -> list[Line]:
    """All that have a cell."""
    made = [
        Line(theorem, name, over, _along(found, theorem, COMPRESSORS[name], over))
        for theorem in _RATES
        for name in COMPRESSORS
        for over in ("rounds", "m")
    ]
    return [line for line in made if line.entries]


def _along(found: Mapping[str, Entry], theorem: int, compressor: str, over: str) -> list[Entry]:
    """Over the rounds, those with the fewest clients; over the clients, those with the same rounds."""
    own = [
        e
        for e in found.values()
        if (e.settings["theorem"], e.settings["compressor"]) == (theorem, compressor)
    ]
    fewest = min((e.settings["m"] for e in own), default=0)
    if over == "rounds":
        return [e for e in own if e.settings["m"] == fewest]
    shared = {e.settings["rounds"] for e in own if e.settings["m"] != fewest}
    return [e for e in own if e.settings["rounds"] in shared]


def verdict_numbers(found: Mapping[str, Entry]) -> dict[str, float]:
    """The exponents, slope_rounds_theorem2_topk and the like, with their _se and a _condition if broken.

    slope_h_theorem1_topk is that of h over m.
    """
    numbers: dict[str, float] = {}
    for line in lines(found):
        name = f"theorem{line.theorem}_{line.name}"
        if fit := line.fit():
            key = f"slope_{line.over}_{name}"
            numbers |= {key: fit.slope, f"{key}_se": fit.se}
            if line.third() > 1:
                numbers[f"{key}_condition"] = line.third()
        if line.over == "m" and (fit := line.fit("h")):
            numbers |= {f"slope_h_{name}": fit.slope, f"slope_h_{name}_se": fit.se}
    return numbers


def table(found: Mapping[str, Entry]) -> list[list[str]]:
    """A row for each line; -1/2 is what 1/sqrt(mKT) comes to."""
    head = ["theorem", "compressor", "over", "exponent", "mean ‖∇f‖² from", "to", "the bound over it"]
    head += ["condition 3, at most times its limit"]
    return [head, *map(_row, lines(found))]


def _row(line: Line) -> list[str]:
    means = [mean for _, mean in line.means("mean")]
    ratios = [b / a for a, b in zip(line.all("mean"), line.all("bound"), strict=True)]
    names = [str(line.theorem), COMPRESSORS[line.name], {"rounds": "T", "m": "m"}[line.over]]
    ends = [f"{means[0]:.3g}", f"{means[-1]:.3g}", f"{min(ratios):.3g} to {max(ratios):.3g}"]
    return [*names, str(line.fit() or ""), *ends, f"{line.third():.3g}"]


_TITLES = {1: "Theorem 1: equal steps", 2: "Theorem 2: a falling rate", 3: "Theorem 3: 1 and 3 steps"}
_GUIDE = "#CDD2D9"
_NAMES = {"rounds": "rounds T", "m": "clients m"}


def figure(found: Mapping[str, Entry], frame: Frame) -> bytes:
    """A column for each theorem: over the rounds, and below over the clients."""
    drawing = framed(5.2, replace(frame, legend=_legend()))
    places = drawing.subplots(2, len(_RATES), sharey=True)
    drawn = lines(found)
    for row, over in zip(places, _NAMES, strict=True):
        for axes, theorem in zip(row, _RATES, strict=True):
            own = [line for line in drawn if (line.theorem, line.over) == (theorem, over)]
            _draw(axes, own)
            title, side = (_TITLES[theorem] if over == "rounds" else ""), theorem == 1
            finish_axes(axes, title, _NAMES[over], "mean ‖∇f‖², and its bound" if side else "")
    return as_png(drawing)


def _legend() -> list[tuple[str, Pen]]:
    kinds = [(compressor, Pen(COLOURS[name])) for name, compressor in COMPRESSORS.items()]
    return [*kinds, ("the bound of each", Pen(MUTED, dashed=True)), ("as 1/√T or 1/√m falls", Pen(_GUIDE))]


def _draw(axes: Axes, drawn: Sequence[Line]) -> None:
    for line in drawn:
        colour = COLOURS[line.name]
        axes.plot(line.at, line.all("mean"), "o", color=colour, markersize=3, alpha=0.6, markeredgewidth=0)
        for key, style in (("mean", "solid"), ("bound", (0, (3.5, 1.8)))):
            axes.plot(*zip(*line.means(key), strict=True), color=colour, linewidth=1.4, linestyle=style)
    if drawn:
        points = list(drawn[0].means("mean"))
        (first, level), (last, _) = points[0], points[-1]
        fallen = level * math.sqrt(first / last)
        axes.plot([first, last], [level, fallen], color=_GUIDE, linewidth=5, zorder=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        mark(axes.xaxis, drawn[0].at)
