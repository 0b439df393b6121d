"""A study of whether the paper's own settings satisfy its theorems' conditions on the rates.

The conditions need L, the largest curvature of the loss at any model. The study measures a lower bound of
L: the largest eigenvalue of the Hessian at one model. A condition broken with this value is broken with L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from cfedavg import Config, Task, run
from cfedavg.data import build_task
from cfedavg.report import BLUE, GREEN, MUTED, VERMILION, Frame, Pen, make_framed_figure
from cfedavg.sweep import SealedCell, round_value
from cfedavg.theory import Condition, rate_conditions
from paper.cfedavg.claims.cases import CONDITIONS
from paper.cfedavg.studies.problem import finish_axes

TITLE = "The theorems' rate conditions at the paper's own settings"
VALUES = ("gamma", "alpha", "global", "global_residual", "client", "client_residual", "L", "ratios")

# The paper's settings: 10 epochs in batches of 64 for 600 samples a client.
_PAPER = {"eta_local": 0.1, "eta": 1.0, "batch_size": 64, "K": 100, "compressor": "topk(0.9)"}
# The shorter runs that give a trained model, gamma and alpha: fewer clients, steps and rounds.
_SCALES: dict[str, dict[str, Any]] = {
    "smoke": {"model": "mlp", "clients": 10, "rounds": 2, "steps": 5, "samples": 200, "iterations": 8},
    "small": {"model": "cnn", "clients": 10, "rounds": 2, "steps": 5, "samples": 200, "iterations": 8},
    "paper": {"model": "cnn", "clients": 10, "rounds": 6, "steps": 10, "samples": 500, "iterations": 12},
}
_COLOURS = (BLUE, GREEN, VERMILION)


def cells(scale: str, seeds: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return cells for the initial and a trained model, each with 10 digits and with 1 digit a client."""
    return {
        f"conditions-p{p}-{at}-seed{seed}": {**_PAPER, **_SCALES[scale], "p": p, "at": at, "seed": seed}
        for seed in seeds
        for p in (10, 1)
        for at in ("start", "trained")
    }


def measure(settings: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the largest eigenvalues for f and a client, gamma and alpha of a short run, the conditions."""
    start = settings["at"] == "start"
    task = build_task(_config(settings))
    result = run(_config(settings).replace(rounds=1 if start else settings["rounds"]), task, draw=False)
    model, row = task.model if start else result.model, result.final
    values: dict[str, Any] = {"gamma": row["snr_min"], "alpha": row["alpha"]}
    for name, batch in (("global", _everyone(task, settings["samples"])), ("client", _first(task, settings))):
        eigenvalue, added = largest_eigenvalue(model, task.loss, batch, settings["iterations"])
        say(f"{name}: L is at least {eigenvalue:.4g}; the last iteration added {added:.2g} of it")
        values |= {name: eigenvalue, f"{name}_residual": added}
    values["L"] = max(values["global"], values["client"])
    conditions = _conditions(settings, values)
    return {name: round_value(value) for name, value in values.items()} | {
        "ratios": [round_value(each.value / each.limit) for each in conditions]
    }


def _config(settings: Mapping[str, Any]) -> Config:
    same = ("model", "clients", "batch_size", "eta_local", "eta", "compressor", "seed")
    return Config(
        **{name: settings[name] for name in same}, classes_per_client=settings["p"],
        local_steps=str(settings["steps"]), rounds=settings["rounds"], eval_every=settings["rounds"],
        compressor_down="none", device="cpu", workers=1,
    )  # fmt: skip


def _conditions(settings: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[Condition, ...]:
    """Return the conditions at the paper's rates and K, with the measured L, gamma and alpha."""
    rates = settings["eta_local"], settings["eta"], settings["K"]
    return rate_conditions(*rates, values["L"], values["gamma"], values["alpha"], "sum")


def _everyone(task: Task, samples: int) -> Any:
    """Return a batch with equally many samples of every client; its loss estimates f."""
    rows = np.arange(samples // len(task.clients))
    images, labels = zip(*(client.batch(rows) for client in task.clients), strict=True)
    return torch.cat(images), torch.cat(labels)


def _first(task: Task, settings: Mapping[str, Any]) -> Any:
    """Return a batch of samples of the first client; its loss estimates F_1."""
    return task.clients[0].batch(np.arange(settings["samples"]))


def largest_eigenvalue(
    model: nn.Module, loss: Callable[..., Any], batch: Any, iterations: int
) -> tuple[float, float]:
    """Return the Hessian's largest eigenvalue in magnitude, and how much of it the last iteration added.

    Power iteration: |Hv| of a unit vector v never exceeds this magnitude and never falls, so that every
    iteration gives a lower bound, even if the two largest eigenvalues have opposite signs.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss(model, batch), parameters, create_graph=True)
    gradient = torch.cat([slope.reshape(-1) for slope in slopes])
    v = torch.randn(len(gradient), generator=torch.Generator().manual_seed(0))
    before, found = 0.0, float(v.norm())
    for _ in range(iterations):
        parts = torch.autograd.grad(gradient, parameters, v / v.norm(), retain_graph=True)
        v = torch.cat([part.reshape(-1) for part in parts])
        before, found = found, float(v.norm())
    return found, 1 - before / found


def table(found: Mapping[str, SealedCell]) -> list[list[str]]:
    """Return a row for each cell: L, the largest eta_L by condition 1, value / limit of each condition."""
    head = ["p", "model", "L at least", "largest η_L", *(f"times over: {name}" for name in CONDITIONS)]
    return [head, *(_row(entry) for entry in found.values())]


def _row(entry: SealedCell) -> list[str]:
    s, v = entry.settings, entry.values
    allowed = s["eta_local"] / v["ratios"][0]
    where = f"{s['model']}, {s['at']}, seed {s['seed']}"
    return [str(s["p"]), where, f"{v['L']:.3g}", f"{allowed:.2g}", *map(_times, v["ratios"])]


def _times(ratio: float | None) -> str:
    return "infinitely" if ratio is None else f"{ratio:.3g}"


def figure(found: Mapping[str, SealedCell], frame: Frame) -> Figure:
    """Return a figure with a dot at value / limit for each condition and cell; all seeds share a row."""
    rows = list(dict.fromkeys(map(_where, found.values())))
    legend = [(name, Pen(colour)) for name, colour in zip(CONDITIONS, _COLOURS, strict=True)]
    legend.append(("the limit", Pen(MUTED, dashed=True)))
    drawing = make_framed_figure(0.8 + 0.32 * max(2, len(rows)), replace(frame, legend=legend))
    axes = drawing.add_subplot()
    for number, colour in enumerate(_COLOURS):
        dots = [(e.values["ratios"][number], rows.index(_where(e))) for e in found.values()]
        drawn = [(ratio, row) for ratio, row in dots if ratio is not None]
        axes.plot(*zip(*drawn, strict=True) if drawn else ([], []), "o", color=colour)
    _finish(axes, rows)
    return drawing


def _where(entry: SealedCell) -> str:
    return f"p = {entry.settings['p']}, {entry.settings['at']}"


def _finish(axes: Axes, rows: list[str]) -> None:
    axes.set_xscale("log")
    axes.axvline(1, color=MUTED, linestyle=(0, (3, 2)), linewidth=1.2)
    finish_axes(axes, r"$\eta_L$ = 0.1, $\eta$ = 1, K = 100", "value / limit", "")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)  # the first on top
    axes.set_xlim(left=0.3)
