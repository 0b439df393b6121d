"""A grid of configurations from texts like `seed=0|1|2`."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from cfedavg.config import Config, kinds
from cfedavg.errors import InputError
from cfedavg.plan import parse_parts
from cfedavg.schedule import build_schedule


def cells(base: Config, vary: Sequence[str]) -> dict[str, Config]:
    """Every combination, under a name that can be a folder's.

    >>> list(cells(Config(), ["compressor=none|topk(0.99) >> bf16", "seed=0|1"]))
    ['none-seed0', 'none-seed1', 'topk0.99-bf16-seed0', 'topk0.99-bf16-seed1']
    """
    axes = [_axis(text) for text in vary]
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"`vary`: {name} is given twice; put all its values into one")
    grid: dict[str, Config] = {}
    for choice in itertools.product(*(values for _, values in axes)):
        changes = dict(zip(names, choice, strict=True))
        name = "-".join(_slug(field, value) for field, value in changes.items())
        if name in grid:
            raise InputError(f"`vary`: two cells of the grid would be named {name!r}")
        grid[name] = base.replace(**changes)
        # Bad texts show before the first cell is trained, not after.
        parse_parts(grid[name])
        build_schedule(grid[name].schedule)
    return grid


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    known = kinds()
    if not equals or name not in known:
        raise InputError(f"`vary`: {text!r} must be field=value|value, with a field of the configuration")
    return name, [_value(part.strip(), known[name]) for part in values.split("|")]


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
