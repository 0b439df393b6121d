"""The three grids of runs: `search` for the rate, then `dense` and `compressed` with the best rate."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cfedavg import InputError
from cfedavg.sweep import Grid, SealedCell
from paper.common import best_so_far

HERE = Path(__file__).parent
NAMES = ("search", "dense", "compressed")
SCALES = ("smoke", "paper")


@cache
def read(name: str) -> dict[str, Any]:
    """Return a TOML file of this folder."""
    return tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))


def load(
    name: str, rates: Mapping[str, float] | None, scale: str = "paper", seeds: int | None = None, **more: Any
) -> Grid:
    """Return a grid; `rates` holds the local rate of each kind of local work, which `search` does not need.

    `more` sets fields of the Grid, and `typed` options of its runs.
    """
    if name not in NAMES:
        raise InputError(f"NAME must be one of {', '.join(NAMES)}, got {name!r}")
    if scale not in SCALES:
        raise InputError(f"`scale` must be smoke or paper, got {scale!r}")
    plan = read("grid")
    base = {**plan["base"], "rounds": plan[name]["rounds"]}
    lines = _search_lines(plan) if name == "search" else _lines(name, plan, rates or {})
    table = {"title": name, "seeds": seeds or plan[name]["seeds"], "base": base, "line": lines}
    typed = (plan["smoke"] if scale == "smoke" else {}) | more.pop("typed", {})
    return Grid.from_table(name, table, typed=typed, **more)


def _search_lines(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": f"search-{work}-{rate:g}", "label": f"{_name(each)}, rate {rate:g}", "eta_local": rate,
         **_fields(each)}
        for work, each in plan["work"].items() for rate in plan["search"]["rates"]
    ]  # fmt: skip


def _lines(name: str, plan: dict[str, Any], rates: Mapping[str, float]) -> list[dict[str, Any]]:
    variants = {key: each for key, each in plan["variant"].items() if (key == "none") == (name == "dense")}
    lines = []
    for work, each in plan["work"].items():
        if work not in rates:
            raise InputError(f"{name} needs the rates that `run search` finds; run the search in this folder")
        for variant, parts in variants.items():
            label = f"{_name(each)}, rate {rates[work]:g}, {_name(parts)}"
            own = {"name": f"{work}-{rates[work]:g}-{variant}", "label": label, "eta_local": rates[work]}
            lines.append({**own, **_fields(each), **_fields(parts)})
    return lines


def _name(table: Mapping[str, Any]) -> str:
    return str(table["name"])


def _fields(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != "name"}


def search_scores(found: Mapping[str, SealedCell], scale: str = "paper") -> dict[str, dict[float, float]]:
    """Return, for each kind of local work, the best accuracy of each rate that the search has run.

    A run that diverged counts as 0.
    """
    plan, grid = read("grid"), load("search", None, scale)
    planned, scores = grid.cells([0]), dict[str, dict[float, float]]()
    for work in plan["work"]:
        for rate in plan["search"]["rates"]:
            name = f"{grid.prefix}-search-{work}-{rate:g}-seed0"
            if name in found and found[name].settings["rounds"] == planned[name]["rounds"]:
                curve = best_so_far(found[name])
                score = 0.0 if found[name].diverged or not curve else curve[-1]
                scores.setdefault(work, {})[rate] = score
    return scores


def choose_rates(found: Mapping[str, SealedCell], scale: str = "paper") -> dict[str, float]:
    """Return the rate with the best accuracy for each kind of local work whose search is complete."""
    every = len(read("grid")["search"]["rates"])
    scores = search_scores(found, scale)
    return {
        work: max(each, key=lambda rate: each[rate]) for work, each in scores.items() if len(each) == every
    }
