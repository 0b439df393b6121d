"""Decoded data sets: pixels and labels of a train and a test split, and the cache that holds them.

A data set is decoded once and then memory-mapped. Its cache folder is either complete or missing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.files import check_regular, read_file

VERSION = 1  # of the format of a cache folder; a data set in another format is decoded again
_DAY = 86_400.0


@dataclass(frozen=True)
class Images:
    """The images and labels of one split. Both arrays are read-only; a large data set is memory-mapped."""

    pixels: np.ndarray  # uint8 (n, channels, height, width)
    labels: np.ndarray  # int64 (n,)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageData:
    """A data set. `mean` and `std` hold one number per channel, for the train split's pixels / 255."""

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def histogram(pixels: np.ndarray) -> np.ndarray:
    """Return how often each pixel value from 0 to 255 occurs in each channel, of shape (channels, 256)."""
    channels = pixels.swapaxes(0, 1).reshape(pixels.shape[1], -1)
    return np.stack([np.bincount(channel, minlength=256) for channel in channels])


def mean_std(counts: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of pixels / 255 for each channel, from a histogram.

    >>> mean_std(histogram(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)))
    ((0.5,), (0.5,))
    """
    means, stds = [], []
    for row in counts.tolist():
        n = sum(row)
        total = sum(value * count for value, count in enumerate(row))
        squares = sum(value * value * count for value, count in enumerate(row))
        means.append(total / n / 255)
        # The integers keep the difference exact. A constant channel gets std 1: normalising divides by std.
        stds.append((n * squares - total * total) ** 0.5 / n / 255 or 1.0)
    return tuple(means), tuple(stds)


def cache_folder() -> Path:
    """Return the folder of decoded data sets: `$CFEDAVG_CACHE` if set, else `~/.cache/cfedavg`."""
    return Path(os.environ.get("CFEDAVG_CACHE") or Path.home() / ".cache" / "cfedavg").expanduser()


def load_cached(name: str, folder: Path, make: Callable[[Path], None]) -> ImageData:
    """Return the data set in `folder`; if the data set is missing or damaged, call `make` to write it first.

    `make` writes to a draft folder, which is renamed to `folder` when complete. So a killed run leaves no
    half-written data set behind. If two runs write at once, the folder of the first to finish is kept.
    """
    data = _open(name, folder)
    if data is not None:
        return data
    try:
        _write(folder, make)
    except OSError as error:
        raise InputError(
            f"cannot write the data cache {folder} ({error.strerror or error}); "
            "set CFEDAVG_CACHE to a folder that can be written"
        ) from None
    for _ in range(100):  # another run may be replacing the folder just now
        data = _open(name, folder)
        if data is not None:
            return data
        time.sleep(0.01)
    raise InputError(f"the data cache {folder} was damaged right after it was written; check the disk")


def _write(folder: Path, make: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for old in folder.parent.glob(f".{folder.name}-*"):  # drafts of runs that were killed a day ago
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _DAY:
                shutil.rmtree(old, ignore_errors=True)
    draft = _name_draft(folder)
    draft.mkdir()
    try:
        make(draft)
        _publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _name_draft(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-{uuid4().hex}")


def _publish(draft: Path, folder: Path) -> None:
    """Rename `draft` to `folder`. If `folder` exists, keep it if it is complete, else remove it first."""
    for attempt in range(10):
        try:
            draft.rename(folder)
            return
        except OSError:
            if _open("", folder) is not None:
                return
            if attempt == 9:
                raise
        damaged = _name_draft(folder)
        with contextlib.suppress(OSError):  # another run may have moved it first
            folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _open(name: str, folder: Path) -> ImageData | None:
    """Return the memory-mapped data set in `folder`, or None if a file is missing or damaged."""
    try:
        meta = json.loads(read_file(folder / "meta.json"))
        if meta["version"] != VERSION:
            return None
        classes, mean, std = int(meta["classes"]), tuple(meta["mean"]), tuple(meta["std"])
        train, test = (_map_split(folder, each, meta["shapes"][each], classes) for each in ("train", "test"))
        data = ImageData(name, train, test, classes, mean, std)
        return data if _is_sound(data) else None
    except Exception:  # whatever is wrong with a cache, decoding again repairs it
        return None


def _is_sound(data: ImageData) -> bool:
    """Return whether the classes, mean and std in meta.json fit the arrays of both splits."""
    shape, scales = data.train.pixels.shape[1:], (data.mean, data.std)
    return (
        data.classes == max(int(split.labels.max()) for split in (data.train, data.test)) + 1
        and shape == data.test.pixels.shape[1:]
        and all(len(scale) == shape[0] and all(map(math.isfinite, scale)) for scale in scales)
        and min(data.std) > 0
    )


def _map_split(folder: Path, split: str, shape: list[int], classes: int) -> Images:
    """Return a memory-mapped split; raise ValueError if its files are damaged or do not fit `shape`."""
    paths = [folder / f"{split}_{part}.npy" for part in ("pixels", "labels")]
    for path in paths:
        check_regular(path)
    pixels, labels = (np.lib.format.open_memmap(path, mode="r") for path in paths)
    sound = (
        pixels.shape == tuple(shape)
        and pixels.ndim == 4
        and pixels.dtype == np.uint8
        and labels.shape == (shape[0],)
        and labels.dtype == np.int64
        and 0 <= labels.min() <= labels.max() < classes
    )
    if not sound:
        raise ValueError(f"{folder} is damaged")
    return Images(pixels, labels)
