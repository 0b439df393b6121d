"""Task: a model, a loss, the data of each client, and a metric for the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from cfedavg.core.arrays import dtype_of
from cfedavg.core.errors import InputError, NotFinite, summarise_error
from cfedavg.core.fingerprint import fingerprint_data, fingerprint_model
from cfedavg.core.names import NamedArguments

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
Given = ParamSpec("Given")
Found = TypeVar("Found")

_FORMS = (
    "tensors of equal length (one, a tuple, a dict), a map-style torch Dataset, "
    "or an object with `__len__` and `batch(rows)`"
)


class Samples(Protocol):
    """The interface of a data set: `len` gives the number of samples, `batch(rows)` the samples at `rows`.

    A data set whose samples never change may have the attribute `fixed = True`: a GPU then keeps the samples.
    If it is a part of a larger one, it may also have the attributes `whole`, the larger data set, and `rows`,
    the numbers of its samples there: a GPU then keeps the larger one, once for all its parts.
    """

    def __len__(self) -> int: ...

    def batch(self, rows: np.ndarray) -> Batch: ...


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of a batch (inputs, labels); this is the default loss.

    The model returns one number per class: the classes are the second axis, as torch has it, or, if every
    label is a sequence, the last axis.
    """
    inputs, labels = batch
    output = model(inputs)
    if labels.dim() == 2 and output.dim() == 3 and output.shape[:2] == labels.shape:
        output = output.transpose(1, 2)
    return nn.functional.cross_entropy(output, labels)


def accuracy(model: nn.Module, batch: Batch) -> Tensor:
    """Return a number for each sample of a batch (inputs, labels): 1 if the model is right, else 0.

    If a label is a sequence, the number is the share of its places where the model is right. This is the
    default metric.
    """
    inputs, labels = batch
    right: Tensor = model(inputs).argmax(-1) == labels
    return right.float().flatten(1).mean(1) if right.dim() > 1 else right.float()


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error of a batch (inputs, numbers); the model returns one number per sample."""
    inputs, numbers = batch
    return nn.functional.mse_loss(model(inputs).squeeze(-1), numbers)


def absolute_error(model: nn.Module, batch: Batch) -> Tensor:
    """Return the absolute error for each sample of a batch (inputs, numbers)."""
    inputs, numbers = batch
    error: Tensor = model(inputs).squeeze(-1) - numbers
    return error.abs()


@dataclass(frozen=True)
class Task(NamedArguments):
    """A learning task: the model, the data of each client, the test data, the loss and the metric.

    `clients` holds one data set per client, and `test` one for the evaluation. A data set is tensors of equal
    length (one, a tuple, a dict, or a nesting of these; a batch has the same structure), or a torch
    `Dataset`, or an object with `__len__` and `batch(rows)`.
    `loss(model, batch)` gives the mean loss of a batch. `metric(model, batch)` gives a number for each
    sample, or one number for the batch. The metric is recorded under `test_` and the function's name.
    `test_parts[i]`, if given, lists the rows of `test` that belong to client i. A run prints `note` at its
    start. `name` is the task's name in reports.

    Two runs have the same task if its fingerprint, a hash of model, loss, metric and data, is the same.
    `version`, if given, is hashed in the place of the data. Give a version if the data depend on the seed:
    reports then group runs that differ in the seed. Also give a version if samples change at random when they
    are read: without one, only the data set's class and size are hashed.

    >>> task = Task(nn.Linear(2, 3), clients=[(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]))] * 5)
    >>> len(task.clients), len(task.clients[0]), task.name
    (5, 4, 'Linear on 5 clients')
    """

    model: nn.Module
    clients: Sequence[Any]
    test: Any = None
    loss: Loss = cross_entropy
    metric: Callable[[nn.Module, Batch], Any] = accuracy
    test_parts: Sequence[np.ndarray] | None = None
    note: str = ""
    name: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        _check_model(self.model)
        for name, function in (("loss", self.loss), ("metric", self.metric)):
            if not callable(function) or isinstance(function, type):
                raise InputError(f"Task.{name} must be a function of (model, batch), got {_kind(function)}")
        object.__setattr__(self, "clients", _read_clients(self.clients))
        if self.test is not None:
            object.__setattr__(self, "test", as_samples(self.test, "Task.test"))
        if self.test_parts is not None:
            _check_parts(self.test_parts, self.test)
        for name, text in (("name", self.name), ("version", self.version)):
            if not isinstance(text, str) or not text.isprintable():
                raise InputError(f"Task.{name} must be printable text, got {text!r}")
        if not self.name:
            object.__setattr__(self, "name", f"{type(self.model).__name__} on {len(self.clients)} clients")

    @property
    def metric_name(self) -> str:
        """The name of the metric's column, without `test_`."""
        name: str = getattr(self.metric, "__name__", "metric")
        return name if name.isidentifier() and name != "loss" else "metric"

    @cached_property
    def test_groups(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """`test_parts` without empty ones, as groups of parts with equally many rows.

        A group holds the places of its parts among all parts, and their rows, one part below the other: one
        call averages over all parts of a group.
        """
        if self.test_parts is None:
            return []
        parts = [np.asarray(rows, np.int64) for rows in self.test_parts if len(rows)]
        sizes = np.array([len(rows) for rows in parts])
        places = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
        return [(each, np.stack([parts[i] for i in each])) for each in places]

    @cached_property
    def prints(self) -> tuple[str, str]:
        """Two fingerprints: that of the model, loss and metric, and that of the data."""
        return fingerprint_model(self.model, self.loss, self.metric), fingerprint_content(self, self.version)

    @property
    def fingerprint(self) -> str:
        """A text that is equal for tasks with the same model, loss, metric and data, whatever the weights."""
        return "-".join(self.prints)


class Tensors:
    """A data set of tensors of equal length, in any nesting of tuples, lists and dicts."""

    fixed = True

    def __init__(self, tree: Any, where: str = "a data set") -> None:
        self.given = tree
        leaves = tree_flatten(tree)[0]
        for leaf in leaves:
            if not isinstance(leaf, Tensor | np.ndarray) or not leaf.ndim:
                raise InputError(f"{where} must be {_FORMS}; it holds {_kind(leaf)}")
            if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biufc":
                raise InputError(f"{where} must hold arrays of numbers, got an array of {leaf.dtype}")
        sizes = {len(leaf) for leaf in leaves}
        if len(sizes) != 1:
            raise InputError(f"{where} must hold tensors of equal length, got lengths {sorted(sizes)}")
        self._size = sizes.pop()

    def __len__(self) -> int:
        return self._size

    def batch(self, rows: np.ndarray) -> Batch:
        index = torch.from_numpy(np.ascontiguousarray(rows))
        return tree_map(lambda leaf: torch.as_tensor(leaf)[index], self.given)


class Collated:
    """A data set over a map-style torch Dataset; batches are collated as torch's DataLoader does."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.given = dataset

    def __len__(self) -> int:
        return len(self.given)  # type: ignore[arg-type]

    def batch(self, rows: np.ndarray) -> Batch:
        return default_collate([self.given[int(row)] for row in rows])


def as_samples(data: Any, where: str) -> Samples:
    """Return a data set with `__len__` and `batch(rows)`, made from data in any form that Task accepts.

    Raise InputError if there are no samples. `where` names the data in an error.
    """
    if hasattr(data, "batch") and hasattr(data, "__len__"):
        samples: Samples = data
    elif isinstance(data, Dataset) and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        samples = Collated(data)
    elif isinstance(data, Dataset | DataLoader):
        raise InputError(f"{where} must be {_FORMS}, got {_kind(data)}")
    else:
        samples = Tensors(data, where)
    if not len(samples):
        raise InputError(f"{where} has no samples: give at least one")
    return samples


def fingerprint_content(task: Task, version: str = "") -> str:
    """Return the fingerprint of a task's data; `version`, if given, is hashed in the place of the data."""
    samples = [*task.clients, *([] if task.test is None else [task.test])]
    given = [each.given if isinstance(each, Tensors | Collated) else each for each in samples]
    return wrap_errors(fingerprint_data, "Task.clients: the data cannot be read")(given, version)


def wrap_errors(call: Callable[Given, Found], what: str) -> Callable[Given, Found]:
    """Return a function that calls `call` and turns its errors into InputErrors that start with `what`."""

    def wrapped(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        try:
            return call(*args, **kwargs)
        except (InputError, NotFinite, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise InputError(f"{what} ({summarise_error(error)})") from error

    return wrapped


def check_number(value: Any) -> None:
    """Raise an InputError if a loss is not one real number, a tensor of shape []."""
    if not isinstance(value, Tensor) or value.dim() or value.is_complex():
        complex_ = " of complex numbers" if isinstance(value, Tensor) and value.is_complex() else ""
        raise InputError(
            "Task.loss must return the mean over the batch as a real tensor of shape [], "
            f"got {_kind(value)}{complex_}"
        )


def check_loss(value: Any) -> None:
    """Raise an InputError if a loss is not one real number, a tensor of shape [], with a gradient."""
    check_number(value)
    if not value.requires_grad:
        raise InputError(
            "Task.loss must return a number with a gradient, got one without; compute the loss from the "
            "model's output, without `detach`, `item` or `torch.no_grad`"
        )


def check_labels(task: Task, batch: Batch) -> None:
    """Raise an InputError if the task has the default loss, cross_entropy, and the batch does not suit it."""
    if task.loss is not cross_entropy:
        return
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise InputError(
            "Task.clients must hold data of the form (inputs, labels) for the default loss, cross_entropy; "
            "give such data, or your own loss as Task.loss"
        )
    labels = batch[1]
    probabilities = labels.is_floating_point() and labels.dim() > 1
    if labels.dtype not in (torch.int64, torch.uint8) and not probabilities:
        raise InputError(
            "Task.clients must hold class numbers (int64) as labels for the default loss, cross_entropy, "
            f"got {dtype_of(labels)}; give `labels.long()`"
        )


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        hint = "; call it and give the result" if callable(model) else ""
        raise InputError(f"Task.model must be a torch.nn.Module, got {_kind(model)}{hint}")
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("Task.model must have at least one trainable parameter, got none")
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise InputError(f"Task.model has a lazy parameter {name!r}; call the model on a batch first")
        if p.is_complex():
            raise InputError(
                f"Task.model must have real parameters, got complex {name!r}; use torch.view_as_real"
            )
        if p.is_meta:
            raise InputError(
                f"Task.model must have values in all parameters, but {name!r} is on the meta device; "
                "make the model on the CPU"
            )


def _read_clients(clients: Any) -> list[Samples]:
    is_one = isinstance(clients, Dataset | DataLoader | dict | str)
    if is_one or not hasattr(clients, "__len__"):
        raise InputError(f"Task.clients must be a list with one data set per client, got {_kind(clients)}")
    if not len(clients):
        raise InputError("Task.clients is empty: give one data set per client")
    return [as_samples(data, f"Task.clients[{i}]") for i, data in enumerate(clients)]


def _check_parts(parts: Sequence[Any], test: Samples | None) -> None:
    if test is None:
        raise InputError("Task.test_parts needs Task.test; give the test data too")
    for i, rows in enumerate(parts):
        found = np.asarray(rows)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise InputError(f"Task.test_parts[{i}] must be a list of whole numbers, the rows of Task.test")
        if found.size and not 0 <= found.min() <= found.max() < len(test):
            raise InputError(
                f"Task.test_parts[{i}] must hold rows of Task.test from 0 to {len(test) - 1}, "
                f"got {found.min()} to {found.max()}"
            )


def _kind(value: Any) -> str:
    """Return a description of a value for an error: "the class Net", "a tensor of shape [2, 3]"."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor | np.ndarray):
        return f"a tensor of shape {list(value.shape)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"
