"""Data sets of images, texts and tables, and partitions of their samples over clients."""

from importlib import import_module
from typing import Any

from cfedavg.core.files import cache_folder
from cfedavg.data.images import ImageData, Images
from cfedavg.data.partition import Partition, by_classes, by_dirichlet, iid
from cfedavg.data.sources import HUB, load

__all__ = [
    "HUB", "DataSet", "ImageData", "Images", "Partition", "build_task", "by_classes", "by_dirichlet",
    "cache_folder", "iid", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # These two need torch, whose import takes seconds.
    if name in ("DataSet", "build_task"):
        return getattr(import_module("cfedavg.data.tasks"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
