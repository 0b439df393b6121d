"""A study of the variance that compression adds, over K, m and sigma_G, compared with the paper's Remark.

The Remark, after Theorem 1, says that this variance does not depend on K, falls as 1/m, and does not depend
on sigma_G, the heterogeneity of the clients' data. Each cell runs the same rounds with the same samples,
without and with each compressor, and compares the final levels of |grad f(x_t)|^2. All runs start at the
minimum of f, and the rates satisfy the theorem's conditions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cfedavg import Config, Layout, Result, run
from cfedavg.compress import parse
from cfedavg.report import MUTED, Frame, Pen, make_framed_figure
from cfedavg.sweep import SealedCell, round_value
from cfedavg.theory import h, rate_conditions
from paper.cfedavg.studies.problem import COLOURS, METRIC, Bowl, Fit, finish_axes, mark, power_law

TITLE = "The variance that compression adds, over local steps, clients and heterogeneity"
VALUES = ("level", "topk", "rd")  # of a cell

COMPRESSORS = {"topk": "topk(0.5)", "rd": "rd(0.5)"}
# Half of the numbers are sent: with a tenth, the third rate condition allows only tiny rates.
_FIXED = {"L": 0.05, "sigma_L": 5.0, "start": 0.0, "d": 100, "samples": 256, "eta_local": 0.08, "eta": 1.0}
_BASE = {"K": 4, "m": 8, "sigma_G": 2.5}
_OVER = {"K": (1, 2, 4, 8), "m": (2, 4, 8, 16, 32), "sigma_G": (0.0, 1.25, 2.5, 5.0, 10.0)}
_FEW = {"K": (2, 4), "m": (4, 8), "sigma_G": (0.0, 2.5)}
# The length of a run in units of 1 / (eta eta_L K L) rounds; measures leave out the first quarter.
_TIMES = {"smoke": 1, "small": 4, "paper": 10}


def cells(scale: str, seeds: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return a cell for each point of four lines: over K, m and sigma_G, and over K with sigma_G = 0."""
    return {
        f"variance-K{point['K']}-m{point['m']}-g{point['sigma_G']:g}-seed{seed}": {
            **_FIXED, **point, "rounds": _rounds(point["K"], _TIMES[scale]), "seed": seed
        }
        for seed in seeds for point in _points(_FEW if scale == "smoke" else _OVER)
    }  # fmt: skip


def _points(over: Mapping[str, tuple[float, ...]]) -> Iterator[dict[str, Any]]:
    for name, values in over.items():
        for value in values:
            yield {**_BASE, name: value}
    for K in over["K"]:
        yield {**_BASE, "K": K, "sigma_G": 0.0}


def _rounds(K: float, times: int) -> int:
    return round(times / (_FIXED["eta"] * _FIXED["eta_local"] * K * _FIXED["L"]))


def measure(settings: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the level without a compressor; for each compressor, what it adds, alpha, h and the bound."""
    plain = level(_run(settings, "none"))
    values: dict[str, Any] = {"level": round_value(plain)}
    for name, compressor in COMPRESSORS.items():
        result = _run(settings, compressor)
        added = level(result) - plain
        say(f"{compressor} adds {added:.3g} to {plain:.3g}")
        values[name] = {"extra": round_value(added), **_theory(settings, compressor, result)}
    return values


def _run(settings: Mapping[str, Any], compressor: str) -> Result:
    task = Bowl.of(settings).task()
    own = {name: settings[name] for name in ("rounds", "eta_local", "eta", "seed")}
    config = Config(
        **own,
        local_steps=str(settings["K"]),
        batch_size=1,
        compressor=compressor,
        compressor_down="none",
        device="cpu",
        workers=1,
    )
    return run(config, task, draw=False)


def level(result: Result) -> float:
    """Return the mean of |grad f(x_t)|^2 over the rounds after the first quarter."""
    return statistics.fmean(row[METRIC] for row in result.rows[len(result.rows) // 4 :])


def _theory(settings: Mapping[str, Any], compressor: str, result: Result) -> dict[str, Any]:
    """Return the mean alpha_t, h with the guaranteed gamma, the bound's extra term, and the conditions."""
    alpha = statistics.fmean(row["alpha"] for row in result.rows[len(result.rows) // 4 :])
    gamma = parse(compressor).gamma(Layout.of(result.model))
    L, rate, factor = settings["L"], settings["eta"] * settings["eta_local"], h(gamma, alpha)
    # The Remark's difference of the two Phi, with the largest c, 1/2.
    promised = (L**2 * factor + 1) * rate * settings["sigma_L"] ** 2 / settings["m"]
    conditions = rate_conditions(
        settings["eta_local"], settings["eta"], settings["K"], L, gamma, alpha, "sum"
    )
    named = {"gamma": gamma, "alpha": alpha, "h": factor, "promised": promised}
    return {name: round_value(value) for name, value in named.items()} | {
        "conditions": [round_value(each.value / each.limit) for each in conditions]
    }


@dataclass(frozen=True)
class Line:
    """The extra variance of one compressor over one quantity, `over`.

    `each` holds, for every cell, the quantity, the measured extra variance and the bound's extra variance.
    """

    over: str
    name: str
    each: list[tuple[float, float, float]]

    def points(self, column: int = 1) -> Iterator[tuple[float, float, float]]:
        """Yield each value of the quantity, the mean of a column of `each` there, and its standard error."""
        for value in sorted({cell[0] for cell in self.each}):
            extras = [cell[column] for cell in self.each if cell[0] == value]
            spread = statistics.stdev(extras) if len(extras) > 1 else 0.0
            yield value, statistics.fmean(extras), spread / math.sqrt(len(extras))

    def fit(self) -> Fit | None:
        """Return the exponent of the measured means; a single measurement near 0 may be negative."""
        return self._power_law(1)

    def promise(self) -> Fit | None:
        """Return the exponent of the theorem's bound, with the measured alpha."""
        return self._power_law(2)

    def _power_law(self, column: int) -> Fit | None:
        some = [(value, mean) for value, mean, _ in self.points(column) if value > 0]
        return power_law([value for value, _ in some], [mean for _, mean in some])


def lines(found: Mapping[str, SealedCell]) -> list[Line]:
    """Return all lines that have a cell; "K, IID" is the line over K with sigma_G = 0."""
    bases = dict.fromkeys(_OVER, _BASE) | {"K, IID": _BASE | {"sigma_G": 0.0}}
    made = [
        Line(over, name, _along(found, over.removesuffix(", IID"), base, name))
        for over, base in bases.items()
        for name in COMPRESSORS
    ]
    return [line for line in made if line.each]


def _along(
    found: Mapping[str, SealedCell], over: str, base: Mapping[str, float], name: str
) -> list[tuple[float, float, float]]:
    """Return the entries of `Line.each` for the cells that differ from `base` in the quantity `over` only."""
    others = [other for other in base if other != over]
    return [
        (e.settings[over], e.values[name]["extra"], e.values[name]["promised"])
        for e in found.values()
        if all(e.settings[other] == base[other] for other in others)
    ]


_CLAIMED = {"K": "0", "K, IID": "0", "m": "-1", "sigma_G": "0"}
_KEYS = {"K": "K", "K, IID": "K_iid", "m": "m", "sigma_G": "sigma"}


def verdict_numbers(found: Mapping[str, SealedCell]) -> dict[str, float]:
    """Return exponents such as slope_K_topk, their errors as _se; slope_m_level is without compressor."""
    fits = {f"slope_{_KEYS[line.over]}_{line.name}": line.fit() for line in lines(found)}
    fits["slope_m_level"] = _level_over_m(found)
    return {
        f"{key}{end}": value
        for key, fit in fits.items()
        if fit
        for end, value in (("", fit.slope), ("_se", fit.se))
    }


def _level_over_m(found: Mapping[str, SealedCell]) -> Fit | None:
    """Return the exponent over m of the level without compression."""
    own = [e for e in found.values() if all(e.settings[name] == _BASE[name] for name in ("K", "sigma_G"))]
    return power_law([e.settings["m"] for e in own], [e.values["level"] for e in own])


def table(found: Mapping[str, SealedCell]) -> list[list[str]]:
    """Return a row for each line: the claimed exponent, the measured one, and the bound's with measured h."""
    head = ["over", "compressor", "claimed", "exponent found", "the bound's, with measured h", "from", "to"]
    head += ["the bound over it, at least"]
    rows = []
    for line in lines(found):
        ends = [f"{extra:.3g} ± {se:.1g}" for _, extra, se in line.points()]
        fits = [str(fit or "") for fit in (line.fit(), line.promise())]
        # Ratios of means over seeds, since a single extra variance near 0 may be negative.
        ratios = [b[1] / a[1] for a, b in zip(line.points(1), line.points(2), strict=True) if a[1] > 0]
        least = f"{min(ratios):.3g}" if ratios else ""
        rows.append([line.over, COMPRESSORS[line.name], _CLAIMED[line.over], *fits, ends[0], ends[-1], least])
    return [head, *rows]


_NAMES = {"K": "local steps K", "m": "clients m", "sigma_G": r"heterogeneity $\sigma_G / \sigma_L$"}
_PROMISES = {"K": "does not grow with K", "m": "falls as 1/m", "sigma_G": r"does not depend on $\sigma_G$"}


def figure(found: Mapping[str, SealedCell], frame: Frame) -> Figure:
    """Return three panels; grey dashed lines show the Remark from the first point of each line."""
    drawing = make_framed_figure(3.2, replace(frame, legend=_legend()))
    drawn = lines(found)
    panels = {over: drawing.add_subplot(1, 3, place) for place, over in enumerate(_NAMES, 1)}
    for line in drawn:
        _draw(panels[line.over.removesuffix(", IID")], line)
    for over, axes in panels.items():
        _finish(axes, over, [line for line in drawn if line.over == over])
    return drawing


def _legend() -> list[tuple[str, Pen]]:
    kinds = [(compressor, Pen(COLOURS[name])) for name, compressor in COMPRESSORS.items()]
    dotted = [(f"{label}, IID", replace(pen, dashed=True)) for label, pen in kinds]
    return [*kinds, *dotted, ("as the Remark says", Pen(MUTED, dashed=True))]


def _draw(axes: Axes, line: Line) -> None:
    points = list(line.points())
    iid = line.over == "K, IID"
    axes.errorbar(
        [_x(line.over, value) for value, _, _ in points], [extra for _, extra, _ in points],
        yerr=[se for _, _, se in points], color=COLOURS[line.name], marker="o", markersize=5, capsize=2,
        linewidth=1.5, linestyle=(0, (3.5, 1.8)) if iid else "solid",
        markerfacecolor="white" if iid else None,
    )  # fmt: skip


def _x(over: str, value: float) -> float:
    return value / _FIXED["sigma_L"] if over == "sigma_G" else value


def _finish(axes: Axes, over: str, drawn: list[Line]) -> None:
    values = sorted({_x(over, value) for line in drawn for value, _, _ in line.each})
    for line in drawn:
        _promise(axes, over, [_x(over, value) for value, _, _ in line.points()], next(line.points())[1])
    if values:
        axes.set_yscale("log")
        if over != "sigma_G":  # which may be 0
            axes.set_xscale("log")
        mark(axes.xaxis, values)
    finish_axes(
        axes, f"“{_PROMISES[over]}”", _NAMES[over], "extra ‖∇f‖², ± standard error" if over == "K" else ""
    )


def _promise(axes: Axes, over: str, values: list[float], start: float) -> None:
    """Draw the line that the Remark predicts from the first point of a measured line."""
    ends = [values[0], values[-1]]
    heights = [start, start * ends[0] / ends[1] if over == "m" else start]
    axes.plot(ends, heights, color=MUTED, linestyle=(0, (3, 2)), linewidth=1.2)
