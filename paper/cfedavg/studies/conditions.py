"""Do the paper's own settings satisfy the conditions that its theorems put on the rates?

The conditions need L, the largest curvature anywhere. The curvature at one model, the largest eigenvalue of
the Hessian there, bounds it from below: if a condition is broken with that, it is broken with L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import nn

from cfedavg import Config, Task, run
from cfedavg.data import build_task
from cfedavg.sweep import (
    BLUE,
    GREEN,
    MUTED,
    VERMILION,
    Frame,
    Pen,
    SealedCell,
    as_png,
    make_framed_figure,
    round_value,
)
from cfedavg.theory import Condition, rate_conditions
from paper.cfedavg.claims.cases import CONDITIONS
from paper.cfedavg.studies.problem import finish_axes

TITLE = "The theorems' rate conditions at the paper's own settings"
VALUES = ("gamma", "alpha", "global", "global_residual", "client", "client_residual", "L", "ratios")

# The paper's setting for 600 samples a client: 10 epochs in batches of 64.
_PAPER = {"eta_local": 0.1, "eta": 1.0, "batch_size": 64, "K": 100, "compressor": "topk(0.9)"}
# What is done here, to get at a trained model, gamma and alpha: fewer clients, fewer steps, few rounds.
_SCALES: dict[str, dict[str, Any]] = {
    "smoke": {"model": "mlp", "clients": 10, "rounds": 2, "steps": 5, "samples": 200, "iterations": 8},
    "small": {"model": "cnn", "clients": 10, "rounds": 2, "steps": 5, "samples": 200, "iterations": 8},
    "paper": {"model": "cnn", "clients": 10, "rounds": 6, "steps": 10, "samples": 500, "iterations": 12},
}
_COLOURS = (BLUE, GREEN, VERMILION)


def cells(scale: str, seeds: Iterable[int]) -> dict[str, dict[str, Any]]:
    """Return cells of the first model and of a trained one, for clients with all digits and with one."""
    return {
        f"conditions-p{p}-{at}-seed{seed}": {**_PAPER, **_SCALES[scale], "p": p, "at": at, "seed": seed}
        for seed in seeds
        for p in (10, 1)
        for at in ("start", "trained")
    }


def measure(settings: dict[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the largest eigenvalue for f and a client, gamma and alpha of a short run, the conditions."""
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
    """Return the conditions at the paper's rates and K, with what was measured."""
    rates = settings["eta_local"], settings["eta"], settings["K"]
    return rate_conditions(*rates, values["L"], values["gamma"], values["alpha"], "sum")


def _everyone(task: Task, samples: int) -> Any:
    """Return samples of every client, equally many, whose loss estimates f."""
    rows = np.arange(samples // len(task.clients))
    images, labels = zip(*(client.batch(rows) for client in task.clients), strict=True)
    return torch.cat(images), torch.cat(labels)


def _first(task: Task, settings: Mapping[str, Any]) -> Any:
    """Return samples of the first client, whose loss is its F_i."""
    return task.clients[0].batch(np.arange(settings["samples"]))


def largest_eigenvalue(
    model: nn.Module, loss: Callable[..., Any], batch: Any, iterations: int
) -> tuple[float, float]:
    """Return the Hessian's largest eigenvalue in magnitude, and how much of it the last iteration added.

    Power iteration: |Hv| of a unit vector v never exceeds it and never falls, so it may stop at any time,
    also where the largest two are of opposite sign, between which v itself would waver.
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
    """Return a row for each cell: L, the largest eta_L by condition 1, and value / limit of each."""
    head = ["p", "model", "L at least", "largest η_L", *(f"times over: {name}" for name in CONDITIONS)]
    return [head, *(_row(entry) for entry in found.values())]


def _row(entry: SealedCell) -> list[str]:
    s, v = entry.settings, entry.values
    allowed = s["eta_local"] / v["ratios"][0]
    where = f"{s['model']}, {s['at']}, seed {s['seed']}"
    return [str(s["p"]), where, f"{v['L']:.3g}", f"{allowed:.2g}", *map(_times, v["ratios"])]


def _times(ratio: float | None) -> str:
    return "infinitely" if ratio is None else f"{ratio:.3g}"


def figure(found: Mapping[str, SealedCell], frame: Frame) -> bytes:
    """Draw a dot for each condition and cell, at value / limit; all seeds are in one row."""
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
    return as_png(drawing)


def _where(entry: SealedCell) -> str:
    return f"p = {entry.settings['p']}, {entry.settings['at']}"


def _finish(axes: Axes, rows: list[str]) -> None:
    axes.set_xscale("log")
    axes.axvline(1, color=MUTED, linestyle=(0, (3, 2)), linewidth=1.2)
    finish_axes(axes, r"$\eta_L$ = 0.1, $\eta$ = 1, K = 100", "value / limit", "")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)  # the first on top
    axes.set_xlim(left=0.3)
