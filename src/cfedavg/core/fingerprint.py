"""Fingerprints of models and data: short texts that are equal for the same task, in any process.

A model's weights are not hashed, since they may depend on the seed. Small tensors are hashed completely. If
a tensor is large, or if data are not tensors, only some rows of every client are hashed. Rows that change at
random when they are read (augmented data) are not hashed.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset, Subset, TensorDataset

from cfedavg.core.layout import Layout

_BYTES = 2**26  # about how many bytes of all data sets together are hashed
_LEAST = 4  # the least number of rows hashed of a data set
_PLAIN = bool | int | float | complex | str | bytes
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def fingerprint_model(model: nn.Module, *functions: Callable[..., Any]) -> str:
    """Return a hash of a model's layout, its printed structure, and the names of `functions`."""
    structure = _ADDRESS.sub("", repr(model))
    return _digest([Layout.of(model).text, structure, *map(_name, functions)])


def fingerprint_data(data: Sequence[Any], version: str = "") -> str:
    """Return a hash of data sets; with a `version`, hash only the version and the number of data sets."""
    if version:
        return _digest([version, str(len(data))])
    return _digest(part for samples in data for part in _parts(samples, _BYTES // len(data)))


def _parts(data: Any, most: int) -> Iterator[str | bytes]:
    """Yield what to hash of a data set: its size, shapes, dtypes, and about `most` bytes of rows at most."""
    if hasattr(data, "batch"):
        yield f"{type(data).__qualname__} {len(data)}"
        rows = _some(len(data), _LEAST)
        if getattr(data, "fixed", False):
            yield from _rows_of(data.batch(rows), most)
        else:
            yield from _unless_drawn(lambda: data.batch(rows), most)
    elif isinstance(data, Dataset):
        inner: Any = data
        rows = _some(len(inner), _LEAST)
        yield f"{len(inner)}"
        yield type(inner).__qualname__
        while isinstance(inner, Subset):
            yield np.asarray(inner.indices, np.int64).tobytes()
            inner = inner.dataset
            yield type(inner).__qualname__
        if isinstance(inner, TensorDataset):
            yield from _rows_of(inner.tensors, most)
        else:
            yield from _unless_drawn(lambda: [data[int(row)] for row in rows], most)
    else:
        yield from _rows_of(data, most)


def _unless_drawn(read: Callable[[], Any], most: int) -> list[str | bytes]:
    """Return what to hash of the rows that `read` returns; return [] if reading changes them at random.

    Reading is random if two reads differ, or if a read used a random generator. The first test alone is not
    enough: a rare random change may happen in neither read.
    """
    with restore_generators(torch.device("cpu")):
        try:
            before = _generator_state()
            first, second = (list(_rows_of(read(), most)) for _ in range(2))
            drawn = _generator_state() != before
        except Exception:  # the run will raise it too, and name the client
            return []
    return [] if drawn or first != second else first


def _rows_of(tree: Any, most: int) -> Iterator[str | bytes]:
    leaves, structure = tree_flatten(tree)
    yield str(structure)
    for leaf in leaves:
        if isinstance(leaf, _PLAIN):
            yield repr(leaf)
        elif isinstance(leaf, Tensor | np.ndarray | np.generic):
            tensor = torch.as_tensor(leaf)
            yield f"{tensor.dtype} {list(tensor.shape)}"
            yield _bytes(tensor, most // len(leaves))


def _bytes(tensor: Tensor, most: int) -> bytes:
    """Return the bytes of a tensor, or only of evenly spread rows if it has more than `most` bytes."""
    tensor = tensor[None] if not tensor.dim() else tensor
    rows = max(_LEAST, most * len(tensor) // max(1, tensor.nbytes))
    if rows < len(tensor):
        tensor = tensor[torch.from_numpy(_some(len(tensor), rows)).to(tensor.device)]
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _some(n: int, rows: int) -> np.ndarray:
    """Return at most `rows` evenly spread integers from 0 to n - 1."""
    return np.unique(np.linspace(0, n - 1, min(n, rows)).astype(np.int64))


def _name(function: Callable[..., Any]) -> str:
    """Return a function's name, its defaults and captured values, and for a lambda a hash of its code."""
    if isinstance(function, partial):
        return f"partial {_name(function.func)} {_plain(function.args)} {_plain(function.keywords.items())}"
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return name
    if "<lambda>" in name:
        name += " " + _digest(_code(code))
    keywords = getattr(function, "__kwdefaults__", None) or {}
    bound = [*(getattr(function, "__defaults__", None) or ()), *keywords.items()]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            bound.append(cell.cell_contents)
        except ValueError:  # the variable has no value yet
            bound.append(None)
    return f"{name} {_plain(bound)}" if bound else name


def _plain(values: Iterable[Any]) -> str:
    """Return values as a text: numbers and texts by their repr, other values by the name of their type."""
    texts = []
    for value in values:
        if value is None or isinstance(value, _PLAIN):
            texts.append(repr(value))
        else:
            is_list = isinstance(value, tuple | list)
            texts.append(f"({_plain(value)})" if is_list else type(value).__qualname__)
    return ", ".join(texts)


def _code(code: CodeType) -> Iterator[str | bytes]:
    """Yield a function's bytecode, names and constants, which depend on the version of Python."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount))
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _code(value)
        else:
            yield repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _digest(parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        text = part.encode() if isinstance(part, str) else part
        found.update(f"{len(text)} ".encode() + text)
    return found.hexdigest()[:12]


@contextmanager
def restore_generators(device: torch.device) -> Iterator[None]:
    """Restore the states of Python's, NumPy's and torch's random generators after the `with` block."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _generator_state() -> tuple[Any, ...]:
    _, words, *rest = np.random.get_state()
    return random.getstate(), np.asarray(words).tobytes(), rest, torch.get_rng_state().numpy().tobytes()
