"""Task: what is learned. A model, a loss, each client's data, and how the result is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, default_collate

from cfedavg.errors import InputError

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


class Samples(Protocol):
    """A data set as the clients read it: its size, and the batch made of the samples at `rows`.

    One whose samples never change may say so by an attribute `fixed = True`: a GPU then keeps them.
    """

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray) -> Batch: ...


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The default loss, for batches (inputs, labels)."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """The default metric: for each sample of (inputs, labels), 1 if the label is right, else 0."""
    inputs, labels = batch
    right: Tensor = model(inputs).argmax(-1) == labels
    return right.float()


@dataclass(frozen=True)
class Task:
    """What is learned, by whom, from what.

    `clients` holds one data set per client, and `test` one for the evaluation, each of them either
    tensors of equal length (one, a tuple, a dict, nested as you like: a batch has the same structure), or
    a torch `Dataset`, or an object with `__len__` and `batch(rows)`.
    `loss(model, batch)` gives the mean loss of a batch; `metric(model, batch)` a number for each sample,
    or one for the batch. The metric is recorded as `test_` and its name.
    `test_parts[i]`, where given, are the rows of `test` that belong to client i; `note` is said as a run
    starts.

    >>> task = Task(nn.Linear(2, 3), clients=[(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]))] * 5)
    >>> len(task.clients), len(task.clients[0])
    (5, 4)
    """

    model: nn.Module
    clients: Sequence[Any]
    test: Any = None
    loss: Loss = cross_entropy
    metric: Callable[[nn.Module, Batch], Tensor] = accuracy
    test_parts: Sequence[np.ndarray] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not len(self.clients):
            raise InputError("Task.clients is empty: give one data set per client")
        samples = [as_samples(data) for data in self.clients]
        object.__setattr__(self, "clients", samples)
        empty = [i for i, data in enumerate(samples) if not len(data)]
        if empty:
            raise InputError(f"Task.clients[{empty[0]}] has no samples: every client needs at least one")
        if self.test is not None:
            object.__setattr__(self, "test", as_samples(self.test))
            if not len(self.test):
                raise InputError("Task.test has no samples: leave it out or give at least one")
        if not any(p.requires_grad for p in self.model.parameters()):
            raise InputError("Task.model has no trainable parameter")

    @property
    def metric_name(self) -> str:
        name: str = getattr(self.metric, "__name__", "metric")
        return name if name.isidentifier() and name != "loss" else "metric"


class Tensors:
    """Tensors with a common first axis, in any nesting of tuples, lists and dicts."""

    fixed = True

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        sizes: set[int] = set()
        tree_map(lambda leaf: sizes.add(len(leaf)), tree)
        if len(sizes) != 1:
            raise InputError(f"the tensors of a data set differ in length: {sorted(sizes)}")
        self._size = sizes.pop()

    def __len__(self) -> int:
        return self._size

    def batch(self, rows: np.ndarray) -> Batch:
        index = torch.from_numpy(np.ascontiguousarray(rows))
        return tree_map(lambda leaf: torch.as_tensor(leaf)[index], self._tree)


class Collated:
    """A map-style torch Dataset, collated as torch's DataLoader would."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def batch(self, rows: np.ndarray) -> Batch:
        return default_collate([self._dataset[int(row)] for row in rows])


def as_samples(data: Any) -> Samples:
    """Any of the forms that Task takes, as Samples."""
    if hasattr(data, "batch") and hasattr(data, "__len__"):
        samples: Samples = data
        return samples
    if isinstance(data, Dataset):
        return Collated(data)
    return Tensors(data)
