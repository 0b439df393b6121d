"""What a wrapped strategy remembers between rounds: FedAdam's moments, an adaptive clipping norm, and so on.

Flower has no way to ask for it, so it is taken from the strategy's attributes: arrays, by themselves or in
lists or dicts, and whatever JSON can say that has changed since the strategy was made. Anything else, such as
a generator of random numbers, is not kept.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from cfedavg.errors import InputError

Memory = tuple[dict[str, Tensor], dict[str, Any]]


def attributes(strategy: Strategy, prefix: str = "") -> dict[str, Any]:
    """Arrays as they are and all else as JSON, by path; strategies within strategies are looked into."""
    found: dict[str, Any] = {}
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            found |= attributes(value, f"{prefix}{name}.")
        elif isinstance(value, np.ndarray) or _arrays(value):
            found[prefix + name] = value
        else:
            plain = value.item() if isinstance(value, np.generic) else value
            with suppress(TypeError, ValueError):
                if json.loads(text := json.dumps(plain)) == plain:  # not so for tuples, or numbers as keys
                    found[prefix + name] = text
    return found


def _arrays(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(values) and all(isinstance(each, np.ndarray) for each in values)


def remembered(strategy: Strategy, at_first: dict[str, Any]) -> Memory:
    """What has changed: arrays as tensors by path and key, all else as JSON."""
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
            tensors |= {f"{path}/{key}": torch.from_numpy(np.array(each)) for key, each in keyed.items()}
    return tensors, facts


def _one(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def remind(strategy: Strategy, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Puts back what was remembered."""
    for path, value in facts.items():
        *through, name = path.split(".")
        owner: Any = strategy
        for each in through:
            owner = getattr(owner, each, None)
        if owner is None:
            raise InputError(f"inner: the federation was begun with another strategy, which has {path!r}")
        if isinstance(value, str):
            value = json.loads(value)
        else:
            kind, *keys = value
            arrays = {key: tensors[f"{path}/{key}"].numpy() for key in keys}
            value = arrays if kind == "dict" else arrays[0] if kind == "array" else list(arrays.values())
        setattr(owner, name, value)
