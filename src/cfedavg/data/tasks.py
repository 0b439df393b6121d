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


class ImageSamples:
    """The samples at the indices `rows` of a split. A batch is a pair (standardised images, labels)."""

    fixed = True

    def __init__(self, images: Images, rows: np.ndarray, mean: Tensor, std: Tensor) -> None:
        self.images, self.rows = images, rows
        self._mean, self._std = mean, std

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        at = self.rows[rows]
        pixels = torch.from_numpy(np.ascontiguousarray(self.images.pixels[at])).float()
        labels = torch.from_numpy(np.ascontiguousarray(self.images.labels[at]))
        return pixels.sub_(self._mean).div_(self._std), labels


def deal(config: Config, data: ImageData) -> Partition:
    """Deal the data set's samples to clients in the way that the configuration names."""
    labels = data.train.labels, data.test.labels
    if config.iid:
        return iid(*labels, config.clients, config.seed)
    if config.dirichlet is not None:
        return by_dirichlet(*labels, data.classes, config.clients, config.dirichlet, config.seed)
    assert config.classes_per_client is not None
    return by_classes(*labels, data.classes, config.clients, config.classes_per_client, config.seed)


def build_task(config: Config) -> Task:
    """Build the task from the data set, the partition and the model that a configuration names."""
    if not config.names_task:
        hint = "only the app has the model and the data; start the app again"
        if config.dataset.startswith(OWN):
            hint = (
                "the run was started from Python with its own model and data; "
                "continue there with `cfedavg.run(config, task, out=..., resume=True)`"
            )
        raise InputError(f"`dataset` is {config.dataset!r}: {hint}")
    data = load(config.dataset, config.data_dir)
    partition = deal(config, data)
    model = build_model(config.model, data.train.pixels.shape[1:], data.classes, config.seed)
    mean = 255 * torch.tensor(data.mean).view(-1, 1, 1)
    std = 255 * torch.tensor(data.std).view(-1, 1, 1)
    version = ("dataset", "data_dir", "clients", "classes_per_client", "dirichlet", "iid")
    return Task(
        model,
        [ImageSamples(data.train, rows, mean, std) for rows in partition.train],
        test=ImageSamples(data.test, np.arange(len(data.test)), mean, std),
        test_parts=partition.test,
        note=f"{data.name}: {partition.unused} of {len(data.train)} train samples unused",
        name=data.name,
        # Without the seed: runs that differ only in the seed have the same version.
        version=", ".join(f"{name} = {getattr(config, name)!r}" for name in version),
    )
