"""A grid of configurations from texts like `seed=0|1|2` and `compressor,compressor_down=none|sign`."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from cfedavg.core.config import Config, field_types
from cfedavg.core.errors import InputError
from cfedavg.schedule import build_schedule
from cfedavg.simulate.plan import parse_parts


def cells(base: Config, vary: Sequence[str]) -> dict[str, Config]:
    """Every combination, under a name that can be a folder's.

    >>> grid = cells(Config(), ["compressor,compressor_down=none|topk(0.99) >> bf16", "seed=0|1"])
    >>> list(grid)
    ['none-seed0', 'none-seed1', 'topk0.99-bf16-seed0', 'topk0.99-bf16-seed1']
    >>> grid["none-seed0"].compressor_down
    'none'
    """
    axes = [_axis(text) for text in vary]
    every = [name for names, _ in axes for name in names]
    for name in every:
        if every.count(name) > 1:
            raise InputError(f"`vary`: {name} is given twice; put all its values into one")
    grid: dict[str, Config] = {}
    for choice in itertools.product(*(values for _, values in axes)):
        chosen = [(names, value) for (names, _), value in zip(axes, choice, strict=True)]
        changes = {name: value for names, value in chosen for name in names}
        name = "-".join(_slug(names[0], value) for names, value in chosen)
        if name in grid:
            raise InputError(f"`vary`: two cells of the grid would be named {name!r}")
        grid[name] = base.replace(**changes)
        # Bad texts show before the first cell is trained, not after.
        parse_parts(grid[name])
        build_schedule(grid[name].schedule)
    return grid


def _axis(text: str) -> tuple[list[str], list[Any]]:
    """The fields that get one value in each cell, and their values."""
    left, equals, values = text.partition("=")
    names = [name.strip().lstrip("-").replace("-", "_") for name in left.split(",")]
    known = field_types()
    if not equals or any(name not in known for name in names):
        raise InputError(f"`vary`: {text!r} must be field=value|value, with fields of the configuration")
    return names, [_value(part.strip(), known[names[0]]) for part in values.split("|")]


def _value(text: str, kind: Any) -> Any:
    """As the TOML file would have it, with the quotes of a text left out."""
    if str in (getattr(kind, "__args__", None) or (kind,)):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _slug(field: str, value: Any) -> str:
    text = re.sub(r"[^A-Za-z0-9.]+", "-", str(value).replace("(", "").replace(")", "")).strip("-")
    return text if field == "compressor" else f"{field.replace('_', '-')}{text}"
