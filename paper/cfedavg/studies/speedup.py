"""A study of linear speedup: whether the rounds fall as 1/m, as Corollary 1 says, also with a compressor.

Each cell searches for the horizon: the smallest T for which a run of T rounds, at the corollary's rates,
has a mean of |grad f(x_t)|^2 that is at most the target. The study uses the mean, which the proof bounds. The
minimum of T noisy values falls with T even if nothing is learned.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cfedavg import Config, Result, run
from cfedavg.report import MUTED, Frame, make_framed_figure
from cfedavg.sweep import SealedCell, round_value
from paper.cfedavg.studies.problem import COLOURS, METRIC, Bowl, Fit, finish_axes, mark, power_law

TITLE = "Linear speedup: rounds to a fixed gradient norm, over the number of clients"
VALUES = ("horizon", "tried", "alpha", "condition3")  # of a cell

COMPRESSORS = ("none", "topk(0.9)", "rd(0.9)")
FEW = 8  # up to so many clients, T is far above mK and the term in 1/T is small
# The run starts where the curvature is negative; half of the error is the noise of samples.
_BOWL = {"L": 3.0, "sigma_L": 32.0, "sigma_G": 6.0, "start": 2.5, "d": 100, "samples": 64}
_K = 2
# The most clients, and the number of samples m*K*T at which every search begins. About so many samples reach
# the target, so that T >= m*K for all m.
_SCALES = {"smoke": (4, 64), "small": (16, 4096), "paper": (64, 16384)}
_TARGET = 22.0  # with 16384 samples; proportional to 1/sqrt(samples)
_LOOKS = 1000  # evaluations in a run


def cells(scale: str, seeds: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return a cell, which is one search, for each number of clients, compressor and seed."""
    most, samples = _SCALES[scale]
    clients = [2**i for i in range(int(math.log2(most)) + 1)]
    target = round_value(_TARGET * math.sqrt(16384 / samples))
    return {
        f"speedup-m{m}-{short(compressor)}-seed{seed}": {
            **_BOWL, "m": m, "K": _K, "compressor": compressor, "target": target,
            "first": samples // (m * _K), "seed": seed,
        }
        for seed in seeds for compressor in COMPRESSORS for m in clients
    }  # fmt: skip


def short(compressor: str) -> str:
    """Return a compressor's text without brackets, for the name of a cell.

    >>> short("topk(0.9)")
    'topk0.9'
    """
    return compressor.replace("(", "").replace(")", "")


def measure(settings: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the horizon, every tried T with its mean level, and alpha and condition 3 of the last run."""
    runs: list[tuple[int, float, Result]] = []

    def level(T: int) -> float:
        found, result = mean_level(settings, T)
        say(f"T = {T}: the mean of |grad f|^2 is {found:.4g}, to be {settings['target']:.4g}")
        runs.append((T, found, result))
        return found

    T = horizon(level, settings["target"], settings["first"])
    tried = [[T, round_value(found)] for T, found, _ in runs]
    return {"horizon": round_value(T), "tried": tried, **_measured(runs[-1][2])}


def _measured(result: Result) -> dict[str, Any]:
    """Return the mean alpha_t, and the median value / limit of condition 3 (None if infinite)."""
    ratios = [list(row["rate_conditions"].values())[2]["ratio"] for row in result.rows]
    worst = statistics.median(math.inf if ratio is None else ratio for ratio in ratios)
    alphas = [row["alpha"] for row in result.rows if row["alpha"] is not None]
    return {"alpha": round_value(statistics.fmean(alphas)), "condition3": round_value(worst)}


def mean_level(settings: Mapping[str, Any], T: int) -> tuple[float, Result]:
    """Return the mean of |grad f(x_t)|^2 over the rounds of a run of T rounds, and the run's result."""
    task = Bowl.of(settings).task()
    config = Config(
        rounds=T, schedule="corollary1", smoothness=settings["L"], local_steps=str(settings["K"]),
        batch_size=1, compressor=settings["compressor"], eval_every=max(1, T // _LOOKS),
        compressor_down="none", seed=settings["seed"], device="cpu", workers=1,
    )  # fmt: skip
    result = run(config, task, draw=False)
    looks = [(row["round"] + 1, row[METRIC]) for row in result.rows if METRIC in row]
    at, levels = zip((0, task.metric(task.model, None).item()), *looks, strict=True)
    return float(np.interp(np.arange(T), at, levels).mean()), result


def horizon(level: Callable[[int], float], target: float, first: int) -> float:
    """Return the T at which the falling function `level` equals the target.

    T is `first` times powers of 2 until the target is passed; between the last two, a power law is assumed.

    >>> round(horizon(lambda T: 100 / math.sqrt(T), target=2.0, first=64))
    2500
    """
    T, found = first, level(first)
    step = 2.0 if found > target else 0.5
    while T > 1 or step > 1:
        beyond = round(T * step)
        found_beyond = level(beyond)
        if (found > target) != (found_beyond > target):
            share = math.log(found / target) / math.log(found / found_beyond)
            return float(T * math.pow(beyond / T, share))
        T, found = beyond, found_beyond
    return 1.0


@dataclass(frozen=True)
class Line:
    """The horizons of one compressor: m, T and K of each of its cells."""

    compressor: str
    m: list[int]
    T: list[float]
    K: list[int]
    target: float
    condition: float  # the largest value / limit of Theorem 1's third condition

    def fit(self, most: float = math.inf) -> Fit | None:
        """Return the slope of log T over log m, for m up to `most`."""
        some = [(m, T) for m, T in zip(self.m, self.T, strict=True) if m <= most]
        return power_law([m for m, _ in some], [T for _, T in some])

    def over_mK(self) -> list[float]:
        return [T / (m * K) for m, T, K in zip(self.m, self.T, self.K, strict=True)]

    def rate(self) -> tuple[float, float]:
        """Return C1 and C2 of Corollary 1's rate, fitted so that C1 / sqrt(mKT) + C2 / T is the target."""
        m, T, K = (np.array(column, dtype=float) for column in (self.m, self.T, self.K))
        terms = np.stack([1 / np.sqrt(m * K * T), 1 / T], 1) / self.target
        found = np.linalg.lstsq(terms, np.ones(len(T)), rcond=None)[0]
        return float(found[0]), float(found[1])


def lines(found: Mapping[str, SealedCell]) -> list[Line]:
    """Return a line for each compressor with cells for at least two values of m."""
    made = []
    for compressor in COMPRESSORS:
        own = [e for e in found.values() if e.settings["compressor"] == compressor]
        if len({e.settings["m"] for e in own}) > 1:
            m, K = ([int(e.settings[name]) for e in own] for name in ("m", "K"))
            horizons = [float(e.values["horizon"]) for e in own]
            conditions = [e.values["condition3"] for e in own]
            worst = math.inf if None in conditions else max(conditions)
            made.append(Line(compressor, m, horizons, K, own[0].settings["target"], worst))
    return made


def verdict_numbers(found: Mapping[str, SealedCell]) -> dict[str, float]:
    """Return slopes over all m, such as slope_none, their errors as _se, broken conditions as _condition."""
    numbers: dict[str, float] = {}
    for line in lines(found):
        if fit := line.fit():
            key = f"slope_{short(line.compressor)}"
            numbers |= {key: fit.slope, f"{key}_se": fit.se}
            if line.condition > 1:
                numbers[f"{key}_condition"] = line.condition
    return numbers


def table(found: Mapping[str, SealedCell]) -> list[list[str]]:
    """Return a header, then a row of slopes and constants for each compressor."""
    slopes = ["slope, all m", f"slope, m up to {FEW}"]
    more = ["C1", "C2", "C2/T is the less from T =", "least T found", "condition 3, at most times its limit"]
    head = ["compressor", *slopes, *more]
    return [head, *map(_row, lines(found))]


def _row(line: Line) -> list[str]:
    c1, c2 = line.rate()
    slopes = [str(fit or "") for fit in (line.fit(), line.fit(FEW))]
    equal = f"{(c2 / c1) ** 2:.3g} mK" if c1 > 0 else ""
    least, worst = f"{min(line.over_mK()):.3g} mK", f"{line.condition:.3g}"
    return [line.compressor, *slopes, f"{c1:.4g}", f"{c2:.4g}", equal, least, worst]


def figure(found: Mapping[str, SealedCell], frame: Frame) -> Figure:
    """Return a figure of T over m, with the fitted rate and a line of slope -1."""
    drawing = make_framed_figure(4.4, frame)
    axes = drawing.add_subplot()
    drawn = lines(found)
    for line in drawn:
        _draw(axes, line)
    if drawn:
        _guides(axes, drawn)
    title = "rounds T until the mean of ‖∇f‖² is small enough"
    finish_axes(axes, title, "clients m", "T, at the rates of Corollary 1")
    return drawing


def _draw(axes: Axes, line: Line) -> None:
    """Draw the cells as dots, and the T at which C1 / sqrt(mKT) + C2 / T equals the target as a line."""
    colour, fit = COLOURS[line.compressor.split("(")[0]], line.fit()
    label = f"{line.compressor}: slope {fit}" if fit else line.compressor
    axes.plot(line.m, line.T, "o", color=colour, markersize=5, alpha=0.75, markeredgewidth=0, label=label)
    m = np.geomspace(min(line.m), max(line.m), 100)
    axes.plot(m, solve(*line.rate(), m * line.K[0], line.target), color=colour, linewidth=1.5)


def solve(c1: float, c2: float, mK: np.ndarray, target: float) -> np.ndarray:
    """Return the T at which c1 / sqrt(mK T) + c2 / T equals the target (quadratic in 1 / sqrt(T))."""
    half = c1 / np.sqrt(mK) / 2
    root: np.ndarray = (half + np.sqrt(half**2 + c2 * target)) / target
    return root**2


def _guides(axes: Axes, drawn: Sequence[Line]) -> None:
    first, clients = drawn[0], sorted({m for line in drawn for m in line.m})
    ends = np.array([clients[0], clients[-1]], dtype=float)
    scaled = statistics.fmean(T * m for m, T in zip(first.m, first.T, strict=True) if m == min(first.m))
    axes.plot([], [], color=MUTED, linewidth=1.5, label="lines: C₁/√(mKT) + C₂/T is the target")
    axes.plot(ends, scaled / ends, color=MUTED, linestyle=(0, (3, 2)), label="slope −1")
    axes.plot(ends, ends * first.K[0], color=MUTED, linestyle=(0, (1, 1.5)), label="T = mK")
    axes.set_xscale("log")
    axes.set_yscale("log")
    mark(axes.xaxis, clients)
    axes.set_ylim(bottom=min(min(line.T) for line in drawn) / 3)
    axes.legend(frameon=False, fontsize=9, labelcolor=MUTED)
