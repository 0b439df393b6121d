"""Data sets of images, texts and tables, and partitions of their samples over clients."""

from importlib import import_module
from typing import Any

from cfedavg.core.extras import explain_missing
from cfedavg.core.files import cache_folder
from cfedavg.data.columns import Columns
from cfedavg.data.images import ImageData, Images
from cfedavg.data.partition import Partition, by_classes, by_dirichlet, iid
from cfedavg.data.sources import HUB, load
from cfedavg.data.splits import FlowerDirichlet, NiidClasses, NiidDirichlet, NiidQuantity, Split

__all__ = [
    "HUB", "Columns", "DataSet", "FlowerDirichlet", "ImageData", "Images", "NiidClasses", "NiidDirichlet",
    "NiidQuantity", "Partition", "Split", "build_task", "by_classes", "by_dirichlet", "cache_folder",
    "from_dataset", "from_flwr", "iid", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # These need torch, whose import takes seconds.
    for module, names in (("tasks", ("DataSet", "build_task")), ("flower", ("from_dataset", "from_flwr"))):
        if name in names:
            with explain_missing():
                return getattr(import_module(f"cfedavg.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
