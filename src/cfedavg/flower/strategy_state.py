"""What a wrapped strategy remembers between rounds: FedAdam's moments, an adaptive clipping norm, and so on.

Flower has no way to ask for it, so it is taken from the strategy's attributes: numbers, texts and arrays of
numbers, in lists, tuples and dicts if need be, that have changed since the strategy was made. Anything else,
such as a generator of random numbers, is not kept.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from cfedavg.core.errors import InputError
from cfedavg.core.tensors import UNREADABLE

_NUMBERS = [np.dtype(kind) for kind in "?bBhHiIqQefd"]  # those that a file of tensors can hold


class Memory(NamedTuple):
    """What a strategy remembers: arrays by path and place, and all else as JSON by path."""

    arrays: dict[str, NDArray[Any]]
    codes: dict[str, Any]


class Value(NamedTuple):
    """What an attribute holds: JSON, in which an array is the number of its place among `arrays`."""

    code: Any
    arrays: list[NDArray[Any]]

    def same(self, other: Value | None) -> bool:
        """Whether nothing has changed; NaN is NaN."""
        if other is None or repr(self.code) != repr(other.code) or len(self.arrays) != len(other.arrays):
            return False
        pairs = zip(self.arrays, other.arrays, strict=True)
        return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in pairs)

    @property
    def finite(self) -> bool:
        """Whether it is no array with NaN or Inf, and no such number; what else it says is its own affair."""
        if isinstance(self.code, float) and not math.isfinite(self.code):
            return False
        return all(bool(np.isfinite(each).all()) for each in self.arrays)

    def decoded(self, path: str) -> Any:
        """The attribute again."""
        return _decoded(self.code, self.placed(path), path)

    def placed(self, path: str) -> dict[str, NDArray[Any]]:
        """Its arrays, by path and place."""
        return {f"{path}/{i}": each for i, each in enumerate(self.arrays)}


def name_of(strategy: Strategy) -> str:
    """The names of its class and of those within it, as `Clipping(FedAdam)`."""
    within = [type(each).__name__ for path, each in _strategies(strategy).items() if path]
    return type(strategy).__name__ + (f"({', '.join(within)})" if within else "")


def _strategies(strategy: Strategy) -> dict[str, Strategy]:
    """The strategy and those within it, each once, by the path to it."""
    found, new = dict[str, Strategy](), [("", strategy)]
    while new:
        path, each = new.pop()
        if all(each is not known for known in found.values()):
            found[path] = each
            parts = [(name, part) for name, part in vars(each).items() if isinstance(part, Strategy)]
            new += [(f"{path}{name}.", part) for name, part in reversed(parts)]
    return found


def attributes(strategy: Strategy) -> dict[str, Value]:
    """All that can be kept, by path; strategies within strategies are looked into."""
    found = {}
    for path, each in _strategies(strategy).items():
        for name, value in vars(each).items():
            with suppress(TypeError, RecursionError):
                arrays: list[NDArray[Any]] = []
                found[path + name] = Value(_encoded(value, arrays), arrays)
    return found


def _encoded(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """As JSON; TypeError if it cannot be kept. Objects of JSON stand for what JSON has not."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype in _NUMBERS:
        arrays.append(np.array(value).view(value.dtype.str))  # `ulonglong` is `uint64` then
        return {"array": len(arrays) - 1}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key, arrays), _encoded(each, arrays)] for key, each in value.items()]}
    if type(value) is tuple:
        return {"tuple": [_encoded(each, arrays) for each in value]}
    if isinstance(value, list):
        return [_encoded(each, arrays) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(type(value))


def _decoded(code: Any, arrays: dict[str, NDArray[Any]], path: str) -> Any:
    if isinstance(code, list):
        return [_decoded(each, arrays, path) for each in code]
    if not isinstance(code, dict):
        return code
    ((kind, held),) = code.items()
    if kind == "array":
        return arrays[f"{path}/{held}"]
    if kind not in ("dict", "tuple") or not isinstance(held, list):
        raise ValueError("it is no dict, tuple or array")
    parts = _decoded(held, arrays, path)
    return dict(parts) if kind == "dict" else tuple(parts)


def remembered(strategy: Strategy, at_first: dict[str, Value]) -> Memory:
    """Return what has changed."""
    memory = Memory({}, {})
    for path, value in attributes(strategy).items():
        if not value.same(at_first.get(path)):
            memory.codes[path] = value.code
            memory.arrays.update(value.placed(path))
    return memory


class Snapshot(NamedTuple):
    """What a strategy remembers at a moment, and the paths of all its attributes."""

    values: dict[str, Value]
    paths: set[str]


def snapshot(strategy: Strategy) -> Snapshot:
    """All that can be kept."""
    paths = {path + name for path, each in _strategies(strategy).items() for name in vars(each)}
    return Snapshot(attributes(strategy), paths)


def spoilt(strategy: Strategy, before: Snapshot) -> str:
    """The path of what is NaN or Inf, and was not before; empty if there is none."""
    for path, value in attributes(strategy).items():
        if not value.finite and (path not in before.values or before.values[path].finite):
            return path
    return ""


def put_back(strategy: Strategy, before: Snapshot) -> None:
    """Makes all that can be kept what it was; an attribute that is new goes."""
    now = snapshot(strategy)
    for path, value in before.values.items():
        if not value.same(now.values.get(path)):
            _put(*_owner(strategy, path), value.decoded(path))
    for path in now.paths - before.paths:
        delattr(*_owner(strategy, path))


def remind(strategy: Strategy, memory: Memory) -> None:
    """Put back what was remembered; InputError, and nothing is changed, if it is not of such a strategy."""
    found = []
    owners = _strategies(strategy)
    for path, code in memory.codes.items():
        within, _, name = path.rpartition(".")
        owner = owners.get(within and f"{within}.")
        if owner is None or name.startswith("__") or callable(getattr(owner, name, None)):
            raise InputError(f"`inner`: the federation began with another strategy, which has {path!r:.80}")
        try:
            found.append((owner, name, _decoded(code, memory.arrays, path)))
        except UNREADABLE as error:
            raise InputError(
                f"`inner`: what the strategy remembered in {path!r:.80} is damaged ({error!r:.80})"
            ) from None
    for each in found:
        _put(*each)


def _owner(strategy: Strategy, path: str) -> tuple[Any, str]:
    """Whose attribute it is, and its name there."""
    *through, name = path.split(".")
    return reduce(getattr, through, strategy), name


def _put(owner: Any, name: str, value: Any) -> None:
    """A dict is filled, not replaced: it may be of a kind of its own, such as a defaultdict."""
    old = getattr(owner, name, None)
    if isinstance(old, dict) and isinstance(value, dict):
        old.clear()
        old.update(value)
    else:
        setattr(owner, name, value)
