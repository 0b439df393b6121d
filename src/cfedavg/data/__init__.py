"""Data sets of images, and partitions of their samples over clients."""

from cfedavg.core.files import cache_folder
from cfedavg.data.images import ImageData, Images
from cfedavg.data.partition import Partition, by_classes, by_dirichlet, iid
from cfedavg.data.sources import HUB, load
from cfedavg.data.tasks import DataSet, build_task

__all__ = [
    "HUB", "DataSet", "ImageData", "Images", "Partition", "build_task", "by_classes", "by_dirichlet",
    "cache_folder", "iid", "load",
]  # fmt: skip
