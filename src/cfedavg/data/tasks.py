"""Tasks made from configurations: a data set dealt to clients, and a model to train on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfedavg.core.config import OWN, Config
from cfedavg.core.errors import InputError
from cfedavg.data.columns import Columns, Kind, Owners
from cfedavg.data.images import ImageData, Images
from cfedavg.data.loading import AnyData, load_any
from cfedavg.data.partition import Partition, by_classes, by_dirichlet, by_owner, iid
from cfedavg.data.splits import SPLITTERS
from cfedavg.data.tables import Rows, TableData
from cfedavg.data.text import Sequences, TextData
from cfedavg.models import build_model
from cfedavg.task import Task, absolute_error, squared_error

# The fields of Config that decide the data of a task, besides the seed.
FIELDS = (
    "dataset", "data_dir", "clients", "classes_per_client", "dirichlet", "iid", "partition", "client_column",
    "text_column", "label_column", "sequence_length", "tokens",
)  # fmt: skip


class SplitSamples:
    """The samples of a split: `read(rows)` makes a batch, a pair (inputs, labels)."""

    fixed = True

    def __init__(self, size: int, read: Callable[[np.ndarray], tuple[Tensor, Tensor]]) -> None:
        self._size, self.batch = size, read

    def __len__(self) -> int:
        return self._size


class ClientSamples:
    """A client's samples: those at the indices `rows` of the split `whole`."""

    fixed = True

    def __init__(self, whole: SplitSamples, rows: np.ndarray) -> None:
        self.whole, self.rows = whole, rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.whole.batch(self.rows[rows])


def _images_at(data: ImageData, images: Images, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    mean, std = (255 * torch.tensor(each).view(-1, 1, 1) for each in (data.mean, data.std))
    pixels = torch.from_numpy(np.ascontiguousarray(images.pixels[rows])).float()
    labels = torch.from_numpy(np.ascontiguousarray(images.labels[rows]))
    return pixels.sub_(mean).div_(std), labels


def _sequences_at(sequences: Sequences, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(sequences.at(rows).astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def _rows_at(table: Rows, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(table.inputs[rows]), torch.from_numpy(table.labels[rows])


class DataSet:
    """A loaded data set and its two splits. Tasks that are built from the same object share the samples."""

    kind: Kind

    def __init__(self, dataset: str, data_dir: str | None = None, columns: Columns | None = None) -> None:
        data, self.owners = load_any(dataset, data_dir, columns)
        self.data, self.kind = data, "images"
        if isinstance(data, TextData):
            self.kind, self.shape, self.outputs = "text", (data.train.length,), data.outputs
            reads = [partial(_sequences_at, each) for each in (data.train, data.test)]
        elif isinstance(data, TableData):
            self.kind, self.shape, self.outputs = "table", data.train.inputs.shape[1:], data.outputs
            reads = [partial(_rows_at, each) for each in (data.train, data.test)]
        else:
            self.shape, self.outputs = data.train.pixels.shape[1:], data.classes
            reads = [partial(_images_at, data, each) for each in (data.train, data.test)]
        self.train, self.test = (
            SplitSamples(len(data.train), reads[0]),
            SplitSamples(len(data.test), reads[1]),
        )


def deal(config: Config, data: AnyData, owners: Owners | None = None) -> Partition:
    """Deal the data set's samples to clients in the way that the configuration names."""
    if config.client_column is not None:
        assert owners is not None
        return by_owner(owners.train, owners.test, len(owners.names))
    classes, what = 0, "a text has none"
    labels = np.zeros(len(data.train), np.int64), np.zeros(len(data.test), np.int64)
    if not isinstance(data, TextData):
        classes, what = data.classes, "the label is a number"
        labels = (data.train.labels, data.test.labels) if classes else labels
    m, seed = config.clients, config.seed
    if config.iid:
        return iid(*labels, m, seed)
    split = None if config.partition is None else SPLITTERS.parse(config.partition)
    if not classes and (split is None or split.by_class):
        given = next(
            n for n in ("partition", "dirichlet", "classes_per_client") if getattr(config, n) is not None
        )
        raise InputError(
            f"`{given}` needs classes, and {what}; "
            "set `client_column`, `iid` or `partition` niid_quantity(0.5)"
        )
    if split is not None:
        return split.deal(labels, classes, m, seed)
    if config.dirichlet is not None:
        return by_dirichlet(*labels, classes, m, config.dirichlet, seed)
    assert config.classes_per_client is not None
    return by_classes(*labels, classes, m, config.classes_per_client, seed)


def build_task(config: Config, loaded: DataSet | None = None) -> Task:
    """Build the task from the data set, the partition and the model that a configuration names.

    `loaded` is the data set, if it is loaded already.
    """
    if not config.names_task:
        hint = "only the app has the model and the data; start the app again"
        if config.dataset.startswith(OWN):
            hint = (
                "the run was started from Python with its own model and data; "
                "continue there with `cfedavg.run(config, task, out=..., resume=True)`"
            )
        raise InputError(f"`dataset` is {config.dataset!r}: {hint}")
    loaded = loaded or DataSet(config.dataset, config.data_dir, Columns.of(config))
    data = loaded.data
    check_given(config, data, loaded.owners)
    partition = deal(config, data, loaded.owners)
    model = build_model(config.model, loaded.shape, loaded.outputs, config.seed, loaded.kind)
    judges: dict[str, Any] = {}
    if isinstance(data, TableData) and not data.classes:
        judges = {"loss": squared_error, "metric": absolute_error}
    return Task(
        model,
        [ClientSamples(loaded.train, rows) for rows in partition.train],
        test=loaded.test,
        test_parts=partition.test,
        note=describe(data, partition),
        name=data.name,
        # Without the seed: runs that differ only in the seed have the same version.
        version=", ".join(f"{name} = {getattr(config, name)!r}" for name in FIELDS) + _vocabulary(data),
        **judges,
    )


def check_given(config: Config, data: AnyData, owners: Owners | None) -> None:
    """Raise InputError if `clients`, `sequence_length` or `tokens` is given and does not suit the data."""
    for name in ("sequence_length", "tokens") if not isinstance(data, TextData) else ():
        if getattr(config, name) is not None:
            raise InputError(f"`{name}` is for texts, and {data.name} holds none; leave it out")
    if owners is not None and config.clients not in (Config.clients, len(owners.names)):
        raise InputError(
            f"`clients` must be left out with `client_column`, which gives {len(owners.names):,} clients, "
            f"got {config.clients}"
        )


def describe(data: AnyData, partition: Partition) -> str:
    """Return a sentence about a data set and its partition."""
    sizes = [len(rows) for rows in partition.train]
    if isinstance(data, ImageData):
        return f"{data.name}: {partition.unused} of {len(data.train)} train samples unused"
    return f"{data.note}; {len(sizes):,} clients with {min(sizes):,} to {max(sizes):,} samples"


def _vocabulary(data: AnyData) -> str:
    return f", vocabulary = {data.vocabulary!r}" if isinstance(data, TextData) else ""
