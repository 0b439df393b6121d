"""Decoded once, then memory-mapped: a cache folder that is complete or not there."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.files import check_regular, read_file
from cfedavg.data.decode import VERSION
from cfedavg.data.images import ImageData, Images

_DAY = 86_400.0


def cache_folder() -> Path:
    """`$CFEDAVG_CACHE`, or `~/.cache/cfedavg`."""
    return Path(os.environ.get("CFEDAVG_CACHE") or Path.home() / ".cache" / "cfedavg").expanduser()


def cached(name: str, folder: Path, make: Callable[[Path], None]) -> ImageData:
    """The data set in the folder; where it is missing or damaged, `make` writes it first.

    `make` gets a folder of its own, which is renamed when it is complete. So a killed run leaves no half
    data set behind, and two runs at once each write their own: the first one to finish is kept.
    """
    data = _opened(name, folder)
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
        data = _opened(name, folder)
        if data is not None:
            return data
        time.sleep(0.01)
    raise InputError(f"the data cache {folder} was damaged right after it was written; is its disk sound?")


def _write(folder: Path, make: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    draft = _beside(folder)
    draft.mkdir()
    try:
        make(draft)
        _publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-{uuid4().hex}")


def _sweep(folder: Path) -> None:
    """Removes what runs that were killed a day or longer ago left of their drafts."""
    for draft in folder.parent.glob(f".{folder.name}-*"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > _DAY:
                shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, folder: Path) -> None:
    """Renames the draft; a complete folder that is there already stays, a damaged one goes."""
    for attempt in range(10):
        try:
            draft.rename(folder)
            return
        except OSError:
            if _opened("", folder) is not None:
                return
            if attempt == 9:
                raise
        damaged = _beside(folder)
        with contextlib.suppress(OSError):  # another run may have moved it first
            folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _opened(name: str, folder: Path) -> ImageData | None:
    """The data set in the folder, memory-mapped, or None when anything about it is wrong."""
    try:
        meta = json.loads(read_file(folder / "meta.json"))
        if meta["version"] != VERSION:
            return None
        classes, mean, std = int(meta["classes"]), tuple(meta["mean"]), tuple(meta["std"])
        train, test = (_split(folder, split, meta["shapes"][split], classes) for split in ("train", "test"))
        if not _are_sound(classes, mean, std, train, test):
            return None
        return ImageData(name, train, test, classes, mean, std)
    except Exception:  # whatever is wrong with a cache, decoding again mends it
        return None


def _are_sound(
    classes: int, mean: tuple[float, ...], std: tuple[float, ...], train: Images, test: Images
) -> bool:
    """Whether what meta.json says of both splits is true of them: a model is made of as many classes."""
    channels = train.pixels.shape[1]
    return (
        classes == max(int(split.labels.max()) for split in (train, test)) + 1
        and train.pixels.shape[1:] == test.pixels.shape[1:]
        and len(mean) == len(std) == channels
        and all(math.isfinite(number) for number in (*mean, *std))
        and all(number > 0 for number in std)
    )


def _split(folder: Path, split: str, shape: list[int], classes: int) -> Images:
    """Memory-mapped: NumPy compares the size in the header with that of the file."""
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
