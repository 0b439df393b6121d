"""Fingerprints of models and data: short texts that are equal for the same task, in any process.

Weights do not count, since they may come from the seed. Data are hashed whole where they are small, else some
rows of every client are.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset, Subset, TensorDataset

from cfedavg.layout import Layout

_BYTES = 2**26  # of all data sets together; beyond that, rows are left out
_LEAST = 4  # rows of a data set
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def model_print(model: nn.Module, *functions: Callable[..., Any]) -> str:
    """Hash a model's layout, its printed structure, and the names of functions such as the loss."""
    structure = _ADDRESS.sub("", repr(model))
    return _digest([Layout.of(model).text, structure, *map(_name, functions)])


def data_print(data: Sequence[Any], version: str = "") -> str:
    """Hash data sets (see Samples); where a version is given, only that and their number."""
    if version:
        return _digest([version, str(len(data))])
    return _digest(part for samples in data for part in _parts(samples, _BYTES // len(data)))


def _parts(data: Any, most: int) -> Iterator[str | bytes]:
    """Size, shapes, dtypes and contents of a data set, as far as they are known without side effects."""
    if hasattr(data, "batch"):
        yield f"{type(data).__qualname__} {len(data)}"
        if getattr(data, "fixed", False):  # others may draw at random
            yield from _rows_of(data.batch(_some(len(data), _LEAST)), most)
    elif isinstance(data, Dataset):
        yield f"{len(data)}"  # type: ignore[arg-type]
        yield from _of_dataset(data, most)
    else:
        yield from _rows_of(data, most)


def _of_dataset(dataset: Any, most: int) -> Iterator[str | bytes]:
    yield type(dataset).__qualname__
    if isinstance(dataset, TensorDataset):
        yield from _rows_of(dataset.tensors, most)
    elif isinstance(dataset, Subset):
        yield np.asarray(dataset.indices, np.int64).tobytes()
        yield from _of_dataset(dataset.dataset, most)


def _rows_of(tree: Any, most: int) -> Iterator[str | bytes]:
    leaves, structure = tree_flatten(tree)
    yield str(structure)
    for leaf in leaves:
        if isinstance(leaf, Tensor | np.ndarray):
            tensor = torch.as_tensor(leaf)
            yield f"{tensor.dtype} {list(tensor.shape)}"
            yield _bytes(tensor, most // len(leaves))


def _bytes(tensor: Tensor, most: int) -> bytes:
    """The numbers of a tensor, or of rows spread over it if there are too many."""
    tensor = tensor[None] if not tensor.dim() else tensor
    rows = max(_LEAST, most * len(tensor) // max(1, tensor.nbytes))
    if rows < len(tensor):
        tensor = tensor[torch.from_numpy(_some(len(tensor), rows)).to(tensor.device)]
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _some(n: int, rows: int) -> np.ndarray:
    """Rows from the first to the last, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(n, rows)).astype(np.int64))


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _digest(parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        text = part.encode() if isinstance(part, str) else part
        found.update(f"{len(text)} ".encode() + text)
    return found.hexdigest()[:12]
