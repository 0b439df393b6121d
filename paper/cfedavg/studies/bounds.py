"""A study that compares the bounds of Theorems 1 to 3, and the corollaries' rates, with measurements.

Each cell runs a problem with known constants at a corollary's rates. It measures the mean of |grad f(x_t)|^2
over rounds, weighted by the rates. The proofs bound this mean; in Theorem 2 it is the expectation of
|grad f(z)|^2. Theorems 1 and 3 speak of the minimum, which is at most this mean. The bounds are the smallest
that the theorems allow: c is the largest, epsilon in h is the best, and sigma_G is the root mean square over
clients, where Assumption 3 takes the maximum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cfedavg import Config, Layout, Steps, resolve_rates, run
from cfedavg.compress import parse
from cfedavg.report import MUTED, Frame, Pen, make_framed_figure
from cfedavg.sweep import SealedCell, round_value
from cfedavg.theory import Problem, h, rate_conditions, theorem1, theorem2, theorem3
from paper.cfedavg.claims.cases import are_satisfied
from paper.cfedavg.studies.problem import COLOURS, METRIC, Bowl, Fit, finish_axes, mark, power_law

TITLE = "The theorems' bounds and the corollaries' rates"
VALUES = ("mean", "bound", "alpha", "h", "conditions")  # of a cell

COMPRESSORS = {"none": "none", "topk": "topk(0.5)", "rd": "rd(0.5)"}
# The rates of each theorem's corollary, and the local steps of even and of odd clients. With a = 1024, the
# first rate of Corollary 2 satisfies the theorem's conditions; it is Corollary 1's rate for 1024 rounds.
_RATES = {1: "corollary1", 2: "corollary2(a=1024)", 3: "corollary3(k_min=1)"}
_STEPS = {1: [2, 2], 2: [2, 2], 3: [1, 3]}
# The third condition allows the largest rates at this L.
_FIXED = {"L": 0.2, "sigma_L": 5.0, "start": 2.5, "d": 100, "samples": 64}
_SIGMA_G = 2.5
# One quantity varies at a time. The others are fixed: rounds at the second value, m at the first.
_OVER: dict[str, dict[str, Sequence[int]]] = {
    "smoke": {"rounds": (160, 256, 384), "m": (2, 4), "K": (2, 4)},
    "small": {"rounds": (512, 1024, 2048), "m": (2, 4, 8), "K": (1, 2, 4)},
    "paper": {"rounds": (1024, 2048, 4096, 8192), "m": (2, 4, 8, 16), "K": (1, 2, 4, 8)},
}
_WINDOW = 32  # rounds that share one alpha


def cells(scale: str, seeds: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return a cell for each theorem, compressor and point of a line."""
    return {
        f"bounds-theorem{theorem}-{name}-{_name_point(point)}-seed{seed}": {
            **_FIXED, "theorem": theorem, "schedule": _RATES[theorem], "compressor": compressor, **point,
            "seed": seed,
        }
        for seed in seeds for theorem in _RATES for name, compressor in COMPRESSORS.items()
        for point in _points(theorem, _OVER[scale])
    }  # fmt: skip


def _points(theorem: int, over: Mapping[str, Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield the points over rounds and m; for Theorem 1 also over K, and over m with sigma_G = 0."""
    base = {"rounds": over["rounds"][1], "m": over["m"][0], "K": _STEPS[theorem], "sigma_G": _SIGMA_G}
    for name in ("rounds", "m"):
        yield from ({**base, name: value} for value in over[name])
    if theorem == 1:
        yield from ({**base, "K": [K, K]} for K in over["K"])
        yield from ({**base, "m": m, "sigma_G": 0.0} for m in over["m"])


def _name_point(point: Mapping[str, Any]) -> str:
    steps = "-".join(map(str, dict.fromkeys(point["K"])))
    return f"T{point['rounds']}-m{point['m']}-K{steps}-g{point['sigma_G']:g}"


def measure(settings: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the mean of |grad f|^2, its bound, the mean alpha and h, and the conditions."""
    task, config = Bowl.of(settings).task(), _config(settings)
    rows = run(config, task, draw=False).rows
    rates = resolve_rates(config, Steps(config, [], []), settings["m"])
    eta_L = [rates.eta_local(t) for t in range(len(rows))]
    levels = [task.metric(task.model, None).item(), *(row[METRIC] for row in rows[:-1])]
    mean = math.fsum(map(math.prod, zip(eta_L, levels, strict=True))) / math.fsum(eta_L)
    gamma, alphas = parse(settings["compressor"]).gamma(Layout.of(task.model)), _alphas(rows)
    factor = statistics.fmean(h(gamma, alpha) for alpha in alphas)
    bound = _bound(settings, rates.eta, eta_L, factor)
    say(f"the mean of |grad f|^2 is {mean:.4g}, its bound {bound:.4g}")
    K, L = max(_steps(settings)), settings["L"]
    conditions = (
        rate_conditions(rate, rates.eta, K, L, gamma, alpha, rates.update)
        for rate, alpha in zip(eta_L[::_WINDOW], alphas, strict=True)
    )
    worst = [max(each.value / each.limit for each in of_all) for of_all in zip(*conditions, strict=True)]
    found = {"mean": mean, "bound": bound, "alpha": statistics.fmean(alphas), "h": factor}
    return {name: round_value(value) for name, value in found.items()} | {
        "conditions": [round_value(ratio) for ratio in worst]
    }


def _alphas(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return alpha for each 32 rounds, as a ratio of sums; the alpha of one round is too noisy."""
    found = []
    for start in range(0, len(rows), _WINDOW):
        part = rows[start : start + _WINDOW]
        common = math.fsum(row["delta_norm2"] / row["alpha"] for row in part)
        found.append(math.fsum(row["delta_norm2"] for row in part) / common)
    return found


def _config(settings: Mapping[str, Any]) -> Config:
    return Config(
        rounds=settings["rounds"], schedule=settings["schedule"], smoothness=settings["L"],
        local_steps=",".join(map(str, _steps(settings))), batch_size=1, compressor=settings["compressor"],
        compressor_down="none", seed=settings["seed"], device="cpu", workers=1,
    )  # fmt: skip


def _steps(settings: Mapping[str, Any]) -> list[int]:
    """Return the local steps K_i of every client."""
    return [settings["K"][i % 2] for i in range(settings["m"])]


def _bound(settings: Mapping[str, Any], eta: float, eta_L: Sequence[float], factor: float) -> float:
    """Return the bound of the cell's theorem; `factor` is the mean of h."""
    gap, K, T = Bowl.of(settings).gap(), _steps(settings), len(eta_L)
    problem = Problem(gap, settings["L"], settings["sigma_L"] ** 2, settings["sigma_G"] ** 2, settings["m"])
    if settings["theorem"] == 1:
        return theorem1(problem, eta_L[0], eta, K[0], T, factor)
    if settings["theorem"] == 2:
        return theorem2(problem, eta_L, eta, K[0], factor)
    return theorem3(problem, eta_L[0], eta, K, T, factor)


@dataclass(frozen=True)
class Line:
    """The cells of one theorem and compressor that differ only in the quantity `over`."""

    theorem: int
    name: str
    over: str
    entries: list[SealedCell]

    @property
    def at(self) -> list[int]:
        if self.over == "K":
            return [entry.settings["K"][0] for entry in self.entries]
        return [entry.settings[self.over.removesuffix(_IID)] for entry in self.entries]

    def all(self, key: str) -> list[float]:
        return [entry.values[key] for entry in self.entries]

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """Return the values of the quantity `over`, and the mean of `key` over the seeds at each."""
        found: dict[int, list[float]] = {}
        for at, value in zip(self.at, self.all(key), strict=True):
            found.setdefault(at, []).append(value)
        return sorted(found), [statistics.fmean(found[at]) for at in sorted(found)]

    def fit(self, key: str = "mean") -> Fit | None:
        return power_law(self.at, self.all(key))

    def third(self) -> float:
        """Return the largest value / limit of the third condition."""
        ratios = [entry.values["conditions"][2] for entry in self.entries]
        return math.inf if None in ratios else max(ratios)

    def within(self) -> Line:
        """Return a line with only the cells whose rates satisfy all conditions."""
        return replace(self, entries=[e for e in self.entries if are_satisfied(e.values["conditions"])])


_IID = ", IID"
_KEYS = {"rounds": "rounds", "m": "m", "K": "K", f"m{_IID}": "m_iid"}


def lines(found: Mapping[str, SealedCell]) -> list[Line]:
    """Return all lines that have a cell."""
    made = [
        Line(theorem, name, over, _along(found, theorem, COMPRESSORS[name], over))
        for theorem in _RATES
        for name in COMPRESSORS
        for over in (_KEYS if theorem == 1 else ("rounds", "m"))
    ]
    return [line for line in made if line.entries]


def _along(found: Mapping[str, SealedCell], theorem: int, compressor: str, over: str) -> list[SealedCell]:
    """Return the cells of a line: they have the usual rounds, m and K, except in the quantity `over`."""
    kind = theorem, compressor, 0.0 if over.endswith(_IID) else _SIGMA_G
    own = [
        e
        for e in found.values()
        if (e.settings["theorem"], e.settings["compressor"], e.settings["sigma_G"]) == kind
    ]
    fewest = min((e.settings["m"] for e in own), default=0)
    shared = {e.settings["rounds"] for e in own if e.settings["m"] != fewest}
    varied = over.removesuffix(_IID)

    def as_usual(s: Mapping[str, Any]) -> bool:
        usual = {"rounds": s["rounds"] in shared, "m": s["m"] == fewest, "K": s["K"] == _STEPS[theorem]}
        return all(usual[name] for name in usual if name != varied)

    return [entry for entry in own if as_usual(entry.settings)]


def verdict_numbers(found: Mapping[str, SealedCell]) -> dict[str, float]:
    """Return exponents by name, such as slope_rounds_theorem2_topk; the name with _se has the error.

    The name with _condition has the third condition's value / limit, if broken. slope_h_theorem1_topk is the
    exponent of h over m.
    """
    numbers: dict[str, float] = {}
    for line in lines(found):
        name = f"theorem{line.theorem}_{line.name}"
        if fit := line.fit():
            key = f"slope_{_KEYS[line.over]}_{name}"
            numbers |= {key: fit.slope, f"{key}_se": fit.se}
            if line.third() > 1:
                numbers[f"{key}_condition"] = line.third()
        if line.over == "m" and (fit := line.fit("h")):
            numbers |= {f"slope_h_{name}": fit.slope, f"slope_h_{name}_se": fit.se}
    return numbers


def table(found: Mapping[str, SealedCell]) -> list[list[str]]:
    """Return a row for each line; the corollaries' rate 1/sqrt(mKT) has the exponent -1/2."""
    head = ["theorem", "compressor", "over", "exponent", "mean ‖∇f‖² from", "to", "the bound over it"]
    return [[*head, "condition 3 over its limit, at most"], *map(_row, lines(found))]


def _row(line: Line) -> list[str]:
    _, means = line.points("mean")
    ratios = [b / a for a, b in zip(line.all("mean"), line.all("bound"), strict=True)]
    names = [str(line.theorem), COMPRESSORS[line.name], line.over.replace("rounds", "T")]
    ends = [f"{means[0]:.3g}", f"{means[-1]:.3g}", f"{min(ratios):.3g} to {max(ratios):.3g}"]
    return [*names, str(line.fit() or ""), *ends, f"{line.third():.3g}"]


# Two rows of panels, each panel as: theorem, quantity, title.
_PANELS = (
    (
        (1, "rounds", "Theorem 1"),
        (2, "rounds", "Theorem 2"),
        (3, "rounds", "Theorem 3"),
        (1, "K", "Theorem 1"),
    ),
    ((1, "m", ""), (2, "m", ""), (3, "m", ""), (1, f"m{_IID}", "")),
)
_NAMES = {"rounds": "rounds T", "m": "clients m", "K": "local steps K", f"m{_IID}": "clients m, IID"}
_GUIDE = "#CDD2D9"
_WIDTHS = {"none": 1.0, "topk": 2.0, "rd": 2.6}


def figure(found: Mapping[str, SealedCell], frame: Frame) -> Figure:
    """Return a figure: a column for each theorem, over T and m, and Theorem 1 over K and over m with IID."""
    drawing = make_framed_figure(5.0, replace(frame, legend=_legend()))
    places = drawing.subplots(2, 4, sharey=True)
    drawn = lines(found)
    for row, panels in zip(places, _PANELS, strict=True):
        for axes, (theorem, over, title) in zip(row, panels, strict=True):
            _draw(axes, [line for line in drawn if (line.theorem, line.over) == (theorem, over)])
            side = "mean ‖∇f‖², and its bound" if axes is row[0] else ""
            finish_axes(axes, title, _NAMES[over], side)
    return drawing


def _legend() -> list[tuple[str, Pen]]:
    kinds = [(compressor, Pen(COLOURS[name])) for name, compressor in COMPRESSORS.items()]
    bound = ("the bound, pale where the rates break a condition", Pen(MUTED, dashed=True))
    return [*kinds, bound, ("falling as 1/√(mKT)", Pen(_GUIDE))]


def _draw(axes: Axes, drawn: Sequence[Line]) -> None:
    """Draw the lines; the one without compression is thinnest and in front, since it overlaps the others."""
    for line in reversed(drawn):
        colour, width = COLOURS[line.name], _WIDTHS[line.name]
        axes.plot(*line.points("mean"), color=colour, linewidth=width, marker="o", markersize=width + 1.5)
        for part, alpha in ((line, 0.35), (line.within(), 1.0)):
            dashes = (0, (3.5, 1.8))
            axes.plot(*part.points("bound"), color=colour, linewidth=width, linestyle=dashes, alpha=alpha)
    if drawn:
        x, y = drawn[0].points("mean")
        axes.plot(x, [y[0] * math.sqrt(x[0] / at) for at in x], color=_GUIDE, linewidth=7, zorder=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        mark(axes.xaxis, x)
