"""Data sets of images, and partitions of their samples over clients."""

from typing import Any

from cfedavg.core.files import cache_folder
from cfedavg.data.images import ImageData, Images
from cfedavg.data.partition import Partition, by_classes, by_dirichlet, iid
from cfedavg.data.sources import HUB, load

__all__ = [
    "HUB", "ImageData", "Images", "Partition", "build_task", "by_classes", "by_dirichlet", "cache_folder",
    "iid", "load",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import `build_task` when it is used: it needs torch."""
    if name == "build_task":
        from cfedavg.data.tasks import build_task

        return build_task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
