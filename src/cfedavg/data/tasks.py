"""Tasks made from configurations: images dealt to clients, and a model to train on the images."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cfedavg.core.config import OWN, Config
from cfedavg.core.errors import InputError
from cfedavg.data.images import ImageData, Images
from cfedavg.data.partition import Partition, by_classes, by_dirichlet, iid
from cfedavg.data.sources import load
from cfedavg.models import build_model
from cfedavg.task import Task


class Split:
    """The samples of a split. A batch is a pair (standardised images, labels)."""

    fixed = True

    def __init__(self, images: Images, mean: Tensor, std: Tensor) -> None:
        self.images, self._mean, self._std = images, mean, std

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(np.ascontiguousarray(self.images.pixels[rows])).float()
        labels = torch.from_numpy(np.ascontiguousarray(self.images.labels[rows]))
        return pixels.sub_(self._mean).div_(self._std), labels


class ImageSamples:
    """A client's samples: those at the indices `rows` of the split `whole`."""

    fixed = True

    def __init__(self, whole: Split, rows: np.ndarray) -> None:
        self.whole, self.rows = whole, rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        return self.whole.batch(self.rows[rows])


class DataSet:
    """A loaded data set and its two splits. Tasks that are built from the same object share the samples."""

    def __init__(self, dataset: str, data_dir: str | None = None) -> None:
        self.data = load(dataset, data_dir)
        mean, std = (255 * torch.tensor(each).view(-1, 1, 1) for each in (self.data.mean, self.data.std))
        self.train, self.test = (Split(each, mean, std) for each in (self.data.train, self.data.test))


def deal(config: Config, data: ImageData) -> Partition:
    """Deal the data set's samples to clients in the way that the configuration names."""
    labels = data.train.labels, data.test.labels
    if config.iid:
        return iid(*labels, config.clients, config.seed)
    if config.dirichlet is not None:
        return by_dirichlet(*labels, data.classes, config.clients, config.dirichlet, config.seed)
    assert config.classes_per_client is not None
    return by_classes(*labels, data.classes, config.clients, config.classes_per_client, config.seed)


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
    loaded = loaded or DataSet(config.dataset, config.data_dir)
    data = loaded.data
    partition = deal(config, data)
    model = build_model(config.model, data.train.pixels.shape[1:], data.classes, config.seed)
    version = ("dataset", "data_dir", "clients", "classes_per_client", "dirichlet", "iid")
    return Task(
        model,
        [ImageSamples(loaded.train, rows) for rows in partition.train],
        test=loaded.test,
        test_parts=partition.test,
        note=f"{data.name}: {partition.unused} of {len(data.train)} train samples unused",
        name=data.name,
        # Without the seed: runs that differ only in the seed have the same version.
        version=", ".join(f"{name} = {getattr(config, name)!r}" for name in version),
    )
