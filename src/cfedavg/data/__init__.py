"""Data sets, and the ways to spread them over clients."""

from cfedavg.data.images import ImageData, Images, cache_folder
from cfedavg.data.partition import Partition, by_classes, by_dirichlet, iid
from cfedavg.data.sources import HUB, load

__all__ = [
    "HUB", "ImageData", "Images", "Partition", "by_classes", "by_dirichlet", "cache_folder", "iid", "load",
]  # fmt: skip
