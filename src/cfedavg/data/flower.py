"""Clients from the package flwr-datasets: each partition becomes the data set of a client of a Task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfedavg.core.errors import InputError, list_names, summarise_error
from cfedavg.data.columns import LABELS

Convert = Callable[[Any], Any]


def from_flwr(
    source: Any,
    split: str = "train",
    *,
    inputs: str | Sequence[str] | None = None,
    labels: str | None = None,
    convert: Convert | None = None,
) -> list[Any]:
    """Return one data set per partition, for `Task(model, clients=from_flwr(...))`.

    `source` is a partitioner of flwr-datasets whose `dataset` is set, or a FederatedDataset with a
    partitioner for `split`. Each partition is converted as `from_dataset` does, or by `convert(partition)`,
    which returns any form of data that Task takes.
    """
    partitioner = source
    if hasattr(source, "partitioners"):
        known = source.partitioners
        if split not in known:
            raise InputError(
                f"from_flwr: `split` must be a split with a partitioner ({', '.join(known)}), got {split!r}"
            )
        source.load_partition(0, split)  # downloads the data set and gives it to the partitioner
        partitioner = known[split]
    if not (hasattr(partitioner, "num_partitions") and hasattr(partitioner, "load_partition")):
        raise InputError(
            "from_flwr: `source` must be a partitioner or a FederatedDataset of flwr-datasets, "
            f"got {type(source).__name__}"
        )
    change = convert or (lambda partition: from_dataset(partition, inputs=inputs, labels=labels))
    try:
        partitions = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
    except Exception as error:  # a partitioner raises many kinds of error
        raise InputError(f"from_flwr: `source` cannot be partitioned ({summarise_error(error)})") from error
    for i, partition in enumerate(partitions):
        if not len(partition):
            raise InputError(
                f"from_flwr: partition {i} has no samples; use another partitioner or fewer partitions"
            )
    return [change(partition) for partition in partitions]


def from_dataset(
    dataset: Any, *, inputs: str | Sequence[str] | None = None, labels: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return a data set of Hugging Face's package `datasets` as two tensors: inputs and labels.

    `inputs` names a column or several columns of numbers, which become a vector; by default it is the only
    other column. Images become numbers from 0 to 1, channels first. `labels` names the column of labels; by
    default it is called label, labels, target, class or y.
    """
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "with_format"):
        raise InputError(
            f"from_dataset: `dataset` must be a Dataset of the package datasets, got {type(dataset).__name__}"
        )
    names = list(dataset.column_names)
    label = labels or _only([name for name in LABELS if name in names], "labels", names)
    rest = [name for name in names if name != label]
    chosen = [inputs] if isinstance(inputs, str) else list(inputs or [_only(rest, "inputs", names)])
    for field, name in [("labels", label), *(("inputs", each) for each in chosen)]:
        if name not in names:
            raise InputError(
                f"from_dataset: `{field}`: there is no column {name!r}; there are {list_names(names)}"
            )
    columns = [_read(dataset, name) for name in chosen]
    return (columns[0] if len(columns) == 1 else _stack(columns, chosen)), _read(dataset, label)


def _only(candidates: Sequence[str], field: str, names: Sequence[str]) -> str:
    """Return the only candidate for a column."""
    if len(candidates) != 1:
        raise InputError(f"from_dataset: set `{field}` to the column to use; there are {list_names(names)}")
    return candidates[0]


def _read(dataset: Any, name: str) -> Tensor:
    """Return a column as a tensor: images as floats with channels first, other numbers in their own type."""
    try:
        values = np.asarray(dataset.with_format("numpy")[name][:])
    except (ValueError, TypeError) as error:  # rows of different shapes
        raise InputError(
            f"from_dataset: the column {name!r} is no array ({summarise_error(error)})"
        ) from None
    if values.dtype.kind not in "biuf":
        raise InputError(
            f"from_dataset: the column {name!r} must hold numbers or images of equal size, "
            f"got {values.dtype}; give `convert` to from_flwr"
        )
    if type(dataset.features[name]).__name__ == "Image":
        pixels = values[:, None] if values.ndim == 3 else values.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(pixels)).float().div_(255)
    if values.dtype.kind == "f":
        return torch.from_numpy(values.astype(np.float32))
    return torch.from_numpy(values.astype(np.int64))


def _stack(columns: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """Return columns of numbers as one tensor, with a vector of floats for each row."""
    if any(column.dim() != 1 for column in columns):
        raise InputError(
            f"from_dataset: `inputs` must be columns of numbers to be joined, got {', '.join(names)}"
        )
    return torch.stack([column.float() for column in columns], 1)
