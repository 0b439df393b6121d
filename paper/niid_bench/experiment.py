"""The grid of runs: a `Grid` for each data set, with a line for each partition and method."""

from __future__ import annotations

import dataclasses
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from cfedavg import InputError
from cfedavg.sweep import Grid

HERE = Path(__file__).parent
SCALES = ("smoke", "paper")
MUS = ("0.001", "0.01", "0.1", "1")
# The methods of the table and the lines of the grid that each one takes the best of.
METHODS = {
    "fedavg": ("fedavg",),
    "fedprox": tuple(f"fedprox-{mu}" for mu in MUS),
    "scaffold": ("scaffold",),
    "fednova": ("fednova",),
}


@cache
def read(name: str) -> dict[str, Any]:
    """Return a TOML file of this folder."""
    return tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Return the names of the data sets."""
    return list(read("grid")["dataset"])


def load(name: str, scale: str = "paper", seeds: int | None = None, **more: Any) -> Grid:
    """Return the grid of a data set; `more` sets fields of the Grid, and `typed` options of its runs."""
    if name not in names():
        raise InputError(f"NAME must be one of {', '.join(names())}, got {name!r}")
    if scale not in SCALES:
        raise InputError(f"`scale` must be smoke or paper, got {scale!r}")
    plan = read("grid")
    data = plan["dataset"][name]
    lines = [_line(name, *pair) for pair in _pairs(plan)]
    table = {"title": f"NIID-Bench on {data['name']}", "seeds": seeds or plan["seeds"]}
    table |= {"base": {**plan["base"], "dataset": name, "model": data["model"]}, "line": lines}
    typed = (plan["smoke"] if scale == "smoke" else {}) | more.pop("typed", {})
    made = Grid.from_table(name, table, typed=typed, trust=True, **more)
    # Cells are named after the published data set, even if a smoke run uses another.
    return dataclasses.replace(made, prefix=name)


def _pairs(plan: dict[str, Any]) -> list[tuple[str, dict[str, Any], str, dict[str, Any]]]:
    return [
        (partition, split, method, changes)
        for partition, split in plan["partition"].items()
        for method, changes in plan["method"].items()
    ]


def _line(
    data: str, partition: str, split: dict[str, Any], method: str, changes: dict[str, Any]
) -> dict[str, Any]:
    """Return a line of the grid: its name, its label and what differs from the base."""
    fields = {key: value for key, value in {**split, **changes}.items() if key != "name"}
    if data == "fashion_mnist" and partition == "dirichlet":
        # Our files lack a few images of the official 6,000 of each class, which decide the published draw.
        fields["partition"] = fields["partition"].replace("()", "(6000)")
    label = f"{split['name']}, {changes['name']}"
    return {"name": f"{partition}-{method}", "label": label, **fields}


def cells_of(name: str, partition: str, line: str, seeds: int) -> list[str]:
    """Return the names of the cells of one line of the grid.

    >>> cells_of("mnist", "iid", "fedavg", 2)
    ['mnist-iid-fedavg-seed0', 'mnist-iid-fedavg-seed1']
    """
    return [f"{name}-{partition}-{line}-seed{seed}" for seed in range(seeds)]
