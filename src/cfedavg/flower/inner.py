"""What a wrapped strategy remembers between rounds: FedAdam's moments, an adaptive clipping norm, and so on.

Flower has no way to ask for it, so it is taken from the strategy's attributes: arrays of numbers, by
themselves or in lists or dicts, and whatever JSON can say that has changed since the strategy was made.
Anything else, such as a generator of random numbers, is not kept.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import reduce
from typing import Any

import numpy as np
import torch
from flwr.serverapp.strategy import Strategy
from torch import Tensor

Memory = tuple[dict[str, Tensor], dict[str, Any]]
_NUMBERS = [np.dtype(kind) for kind in "?bBhHiIqQefd"]  # those that a file of tensors can hold


def name_of(strategy: Strategy) -> str:
    """The names of its class and of those within it, as `Clipping(FedAdam)`."""
    within = [name_of(value) for value in vars(strategy).values() if isinstance(value, Strategy)]
    return type(strategy).__name__ + (f"({', '.join(within)})" if within else "")


def attributes(strategy: Strategy, prefix: str = "") -> dict[str, Any]:
    """Arrays as they are and all else as JSON, by path; strategies within strategies are looked into."""
    found: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            found |= attributes(value, f"{prefix}{name}.")
        elif _one(value) or _several(value):
            found[prefix + name] = value
        else:
            plain = value.item() if isinstance(value, np.generic) else value
            with suppress(TypeError, ValueError):
                if json.loads(text := json.dumps(plain)) == plain:  # not so for tuples, or numbers as keys
                    found[prefix + name] = text
    return found


def _one(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype in _NUMBERS


def _several(value: Any) -> bool:
    if isinstance(value, dict) and {type(key) for key in value} <= {str, int}:
        value = list(value.values())
    return isinstance(value, list) and bool(value) and all(map(_one, value))


def remembered(strategy: Strategy, at_first: dict[str, Any]) -> Memory:
    """What has changed: arrays as tensors by path and place, all else as JSON."""
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    for path, value in attributes(strategy).items():
        if isinstance(value, str):
            if at_first.get(path) != value:
                facts[path] = value
        else:
            keyed = value if isinstance(value, dict) else dict(enumerate([value] if _one(value) else value))
            kind = "dict" if isinstance(value, dict) else "array" if _one(value) else "list"
            facts[path] = [kind, *keyed]
            copies = [torch.from_numpy(np.array(each)) for each in keyed.values()]
            tensors |= {f"{path}/{i}": each for i, each in enumerate(copies)}
    return tensors, facts


def remind(strategy: Strategy, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Puts back what was remembered."""
    for path, value in facts.items():
        *through, name = path.split(".")
        owner = reduce(getattr, through, strategy)
        if isinstance(value, str):
            value = json.loads(value)
        else:
            kind, *keys = value
            arrays = {key: tensors[f"{path}/{i}"].numpy() for i, key in enumerate(keys)}
            value = arrays if kind == "dict" else arrays[0] if kind == "array" else list(arrays.values())
        _put(owner, name, value)


def _put(owner: Any, name: str, value: Any) -> None:
    """A dict is filled, not replaced: it may be of a kind of its own, such as a defaultdict."""
    old = getattr(owner, name, None)
    if isinstance(old, dict) and isinstance(value, dict):
        old.clear()
        old.update(value)
    else:
        setattr(owner, name, value)
