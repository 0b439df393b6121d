"""The memory of a wrapped strategy between rounds: FedAdam's moments, an adaptive clipping norm, and so on.

Flower has no interface for this memory. So this module reads the attributes that have changed since the start
of the server: numbers, texts and arrays of numbers, also in lists, tuples and dicts. Other attributes, such
as a generator of random numbers, are not kept.
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

_NUMBERS = [np.dtype(kind) for kind in "?bBhHiIqQefd"]  # the dtypes that a tensor file can hold


class Memory(NamedTuple):
    """The memory of a strategy: arrays by path and index, and other values as JSON by attribute path."""

    arrays: dict[str, NDArray[Any]]
    codes: dict[str, Any]


class Value(NamedTuple):
    """The value of an attribute: JSON in `code`, where an index into `arrays` stands for each array."""

    code: Any
    arrays: list[NDArray[Any]]

    def equals(self, other: Value | None) -> bool:
        """Return whether both values are equal; NaN equals NaN."""
        if other is None or repr(self.code) != repr(other.code) or len(self.arrays) != len(other.arrays):
            return False
        pairs = zip(self.arrays, other.arrays, strict=True)
        return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True) for a, b in pairs)

    @property
    def is_finite(self) -> bool:
        """Whether the value is not NaN or Inf, and none of its arrays holds NaN or Inf."""
        if isinstance(self.code, float) and not math.isfinite(self.code):
            return False
        return all(bool(np.isfinite(each).all()) for each in self.arrays)

    def place_arrays(self, path: str) -> dict[str, NDArray[Any]]:
        """Return the value's arrays by path and index, as in `moments/0`."""
        return {f"{path}/{i}": each for i, each in enumerate(self.arrays)}


def name_strategy(strategy: Strategy) -> str:
    """Return the class name of a strategy and of the strategies within it, as `Clipping(FedAdam)`."""
    within = [type(each).__name__ for path, each in _find_strategies(strategy).items() if path]
    return type(strategy).__name__ + (f"({', '.join(within)})" if within else "")


def _find_strategies(strategy: Strategy) -> dict[str, Strategy]:
    """Return the strategy and the strategies within it, each once, by attribute path."""
    found, new = dict[str, Strategy](), [("", strategy)]
    while new:
        path, each = new.pop()
        if all(each is not known for known in found.values()):
            found[path] = each
            parts = [(name, part) for name, part in vars(each).items() if isinstance(part, Strategy)]
            new += [(f"{path}{name}.", part) for name, part in reversed(parts)]
    return found


def read_attributes(strategy: Strategy) -> dict[str, Value]:
    """Return the attributes that can be kept, by path, also of strategies within the strategy."""
    found = {}
    for path, each in _find_strategies(strategy).items():
        for name, value in vars(each).items():
            with suppress(TypeError, RecursionError):
                arrays: list[NDArray[Any]] = []
                found[path + name] = Value(_encode(value, arrays), arrays)
    return found


def _encode(value: Any, arrays: list[NDArray[Any]]) -> Any:
    """Return `value` as JSON, and append its arrays to `arrays`; raise TypeError if it cannot be kept."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and value.dtype in _NUMBERS:
        arrays.append(np.array(value).view(value.dtype.str))  # turns `ulonglong` into `uint64`
        return {"array": len(arrays) - 1}
    if isinstance(value, dict):
        return {"dict": [[_encode(key, arrays), _encode(each, arrays)] for key, each in value.items()]}
    if type(value) is tuple:
        return {"tuple": [_encode(each, arrays) for each in value]}
    if isinstance(value, list):
        return [_encode(each, arrays) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(type(value))


def _decode(code: Any, arrays: dict[str, NDArray[Any]], path: str) -> Any:
    if isinstance(code, list):
        return [_decode(each, arrays, path) for each in code]
    if not isinstance(code, dict):
        return code
    ((kind, held),) = code.items()
    if kind == "array":
        return arrays[f"{path}/{held}"]
    if kind not in ("dict", "tuple") or not isinstance(held, list):
        raise ValueError(f"an object must be a dict, tuple or array, got {kind!r:.40}")
    parts = _decode(held, arrays, path)
    return dict(parts) if kind == "dict" else tuple(parts)


def read_memory(strategy: Strategy, at_first: dict[str, Value]) -> Memory:
    """Return the attributes whose values differ from `at_first`, the values at the start."""
    memory = Memory({}, {})
    for path, value in read_attributes(strategy).items():
        if not value.equals(at_first.get(path)):
            memory.codes[path] = value.code
            memory.arrays.update(value.place_arrays(path))
    return memory


class Snapshot(NamedTuple):
    """The attributes of a strategy that can be kept, at one moment, and the paths of all attributes."""

    values: dict[str, Value]
    paths: set[str]


def take_snapshot(strategy: Strategy) -> Snapshot:
    """Return a snapshot of the strategy's attributes as they are now."""
    paths = {path + name for path, each in _find_strategies(strategy).items() for name in vars(each)}
    return Snapshot(read_attributes(strategy), paths)


def find_spoilt(strategy: Strategy, before: Snapshot) -> str:
    """Return the path of a value that has become NaN or Inf since `before`, or an empty string."""
    for path, value in read_attributes(strategy).items():
        if not value.is_finite and (path not in before.values or before.values[path].is_finite):
            return path
    return ""


def roll_back(strategy: Strategy, before: Snapshot) -> None:
    """Set the strategy's attributes to their values in `before`, and delete new attributes."""
    now = take_snapshot(strategy)
    for path, value in before.values.items():
        if not value.equals(now.values.get(path)):
            _put(*_find_owner(strategy, path), _decode(value.code, value.place_arrays(path), path))
    for path in now.paths - before.paths:
        delattr(*_find_owner(strategy, path))


def restore_memory(strategy: Strategy, memory: Memory) -> None:
    """Set the attributes in `memory`; if they do not fit the strategy, raise InputError and set none."""
    found, owners = [], _find_strategies(strategy)
    for path, code in memory.codes.items():
        within, _, name = path.rpartition(".")
        owner = owners.get(within and f"{within}.")
        if owner is None or name.startswith("__") or callable(getattr(owner, name, None)):
            raise InputError(
                f"`inner` must be the federation's strategy, but it has no attribute {path!r:.80}"
            )
        try:
            found.append((owner, name, _decode(code, memory.arrays, path)))
        except UNREADABLE as error:
            raise InputError(
                f"`inner`: the stored value of the attribute {path!r:.80} is damaged ({error!r:.80})"
            ) from None
    for each in found:
        _put(*each)


def _find_owner(strategy: Strategy, path: str) -> tuple[Any, str]:
    """Return the object that has the attribute at `path`, and the attribute's name."""
    *through, name = path.split(".")
    return reduce(getattr, through, strategy), name


def _put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute. Keep an old dict and replace its items, since it may be a defaultdict."""
    old = getattr(owner, name, None)
    if isinstance(old, dict) and isinstance(value, dict):
        old.clear()
        old.update(value)
    else:
        setattr(owner, name, value)
