"""Sources of images: the MNIST subset in this package, the Hugging Face hub, or a folder of the user.

A data set is decoded once into a cache folder and then memory-mapped. A cache folder is never half-written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.extras import explain_missing
from cfedavg.core.files import cache_folder, check_regular, read_file, write_atomic
from cfedavg.data.decoder import wait_for_decoder
from cfedavg.data.files import SPLITS, find_files, find_splits, find_train
from cfedavg.data.images import VERSION, ImageData, Images, decode, histogram, mean_std

# Data sets on the hub, by name. Each revision is a commit, so the files cannot change.
HUB = {
    "mnist": "ylecun/mnist@77f3279092a1c1579b2250db8eafed0ad422088c",
    "fashion_mnist": "zalando-datasets/fashion_mnist@531be5e2ccc9dba0c201ad3ae567a4f3d16ecdd2",
    "cifar10": "uoft-cs/cifar10@0b2714987fa478483af9968de7c934580d0bb9a2",
}
_SHAPES = {"mnist": (1, 28, 28), "fashion_mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
_REPO = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII
)
# If a data set was uploaded in another format, the hub keeps a parquet copy of it on the second branch.
_BRANCHES = (None, "refs/convert/parquet")
_SECONDS = 10.0  # time limit for the hub's answer
_DAY = 86_400.0  # seconds


def load(
    dataset: str, data_dir: str | Path | None = None, cache: Path | None = None, label: str | None = None
) -> ImageData:
    """Return the images in the folder `data_dir`; if no folder is given, the data set named `dataset`.

    `embedded` is the MNIST subset in this package. Every other data set is decoded once into the folder
    `cache` (default: `cache_folder()`), and memory-mapped from there. `label` names the column of labels.

    >>> data = load("embedded")
    >>> data.train.pixels.shape, len(data.test), data.classes
    ((10000, 1, 28, 28), 2000, 10)
    """
    wait_for_decoder()
    folder = cached_folder(dataset, data_dir, cache, label)
    if folder is None:
        return _load_embedded()
    if data_dir is not None:
        return _load_folder(dataset, Path(data_dir).expanduser(), folder, label)
    where, download = f"`dataset`: {dataset}", partial(_download, **_parse_name(dataset), both=True)
    return _load_cached(dataset, folder, lambda draft: decode(download(where=where), draft, where, label))


def locate(dataset: str, data_dir: str | Path | None = None) -> dict[str, list[Path]]:
    """Return the files of each split: those in `data_dir`, or else those of the hub, which are downloaded.

    The cache keeps the places of downloaded files, so that a second run needs no network.
    """
    if data_dir is not None:
        folder = Path(data_dir).expanduser()
        return find_files(dataset, folder, f"`data_dir`: {folder}")
    name, places = _parse_name(dataset), cache_folder() / f"{dataset.replace('/', '--')}.files.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # nothing or nothing usable is cached
        table = json.loads(read_file(places))
        found = {split: [Path(path) for path in table[split]] for split in SPLITS}
        if found["train"] and all(path.is_file() for paths in found.values() for path in paths):
            return found
    found = _download(**name, where=f"`dataset`: {dataset}")
    with contextlib.suppress(OSError, InputError):  # then the next run downloads again
        places.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            places, json.dumps({split: [str(path) for path in found[split]] for split in SPLITS}).encode()
        )
    return found


def _parse_name(dataset: str) -> dict[str, Any]:
    """Return the repository and the revision (None: the newest) of a data set on the hub."""
    match = _REPO.fullmatch(HUB.get(dataset, dataset))
    if not match:
        raise InputError(
            f"`dataset` must be one of embedded, {', '.join(HUB)}, or a data set of the Hugging Face hub "
            f"(owner/name or owner/name@revision), got {dataset!r}"
        )
    return match.groupdict()


def cached_folder(
    dataset: str, data_dir: str | Path | None = None, cache: Path | None = None, label: str | None = None
) -> Path | None:
    """Return the folder of the decoded images in the cache; None for `embedded`, which needs none."""
    cache = cache_folder() if cache is None else cache
    more = "" if label is None else f"--{hashlib.sha256(label.encode()).hexdigest()[:8]}"
    if data_dir is None:
        name = HUB.get(dataset, dataset).replace("/", "--")
        return None if dataset == "embedded" else cache / f"{name}{more}"
    files = locate(dataset, data_dir)
    try:
        stats = [(path, path.stat()) for path in files["train"] + files["test"]]
    except OSError as error:
        raise InputError(f"`data_dir`: cannot read {error.filename} ({error.strerror})") from None
    # The key changes when a file is moved, replaced or written to.
    text = "\n".join(f"{path.resolve()} {info.st_size} {info.st_mtime_ns}" for path, info in stats)
    return cache / f"folder-{hashlib.sha256(text.encode()).hexdigest()[:16]}{more}"


def _load_embedded() -> ImageData:
    with (
        (resources.files("cfedavg.data") / "mnist_subset.npz").open("rb") as file,
        np.load(file) as arrays,
    ):
        parts = {name: arrays[name] for name in arrays.files}
    for part in parts.values():
        part.flags.writeable = False  # read-only, as a memory-mapped data set is
    train, test = (Images(parts[f"{split}_pixels"], parts[f"{split}_labels"]) for split in SPLITS)
    return ImageData("embedded", train, test, 10, *mean_std(histogram(train.pixels)))


def _load_folder(dataset: str, folder: Path, cached: Path, label: str | None) -> ImageData:
    where, files = f"`data_dir`: {folder}", locate(dataset, folder)
    if not files["test"]:
        raise InputError(
            f"{where} must hold train-*.parquet and test-*.parquet files: images need both splits"
        )
    name = folder.resolve().name if dataset == "embedded" else dataset
    data = _load_cached(name, cached, lambda draft: decode(files, draft, where, label))
    shape = data.train.pixels.shape[1:]
    if shape != _SHAPES.get(dataset, shape):
        raise InputError(
            f"{where} must hold images of {'×'.join(map(str, _SHAPES[dataset]))} for {dataset}, "
            f"got {'×'.join(map(str, shape))}; give another folder, or leave out `dataset`"
        )
    return data


def _download(repo: str, revision: str | None, where: str, both: bool = False) -> dict[str, list[Path]]:
    """Download a data set's files to the cache of `huggingface_hub`; return the paths by split.

    With `both`, there must be files of a test split.
    """
    with explain_missing():
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        for branch in [revision] if revision else _BRANCHES:
            # Not list_repo_files: without network, that function retries for half a minute.
            info = HfApi().dataset_info(repo, revision=branch, timeout=_SECONDS)
            names = [file.rfilename for file in info.siblings or ()]
            found = find_splits(names, where) or {"train": find_train(names), "test": []}
            if found["train"] and (found["test"] or not both):
                # The revision is the commit: a branch could change between the listing and the download.
                get = partial(hf_hub_download, repo, repo_type="dataset", revision=info.sha)
                return {split: [Path(get(name)) for name in names] for split, names in found.items()}
    except InputError:
        raise
    except RevisionNotFoundError:
        if revision:
            raise InputError(f"{where}: the Hugging Face hub has no revision {revision} of {repo}") from None
    except RepositoryNotFoundError:
        raise InputError(
            f"{where} is not on the Hugging Face hub, or you are not allowed to read it; "
            "check the spelling, or log in with `hf auth login`"
        ) from None
    except Exception as error:  # from the HTTP library, the hub's library or the disk
        raise InputError(
            f"{where} could not be downloaded from the Hugging Face hub ({summarise_error(error)}): "
            "set `data_dir` to a folder with its parquet files, or run once on a machine with network, "
            "or set `dataset` to embedded"
        ) from None
    raise InputError(
        f"{where} has no parquet files of a train and a test split on the Hugging Face hub; "
        "use another data set, or set `data_dir` to a folder with such files"
    )


def _load_cached(name: str, folder: Path, make: Callable[[Path], None]) -> ImageData:
    """Return the data set in `folder`; if the data set is missing or damaged, call `make` to write it first.

    `make` writes to a draft folder, which is renamed to `folder` when complete. So a killed run leaves no
    half-written data set behind. If two runs write at once, one complete folder is kept.
    """
    if data := _open(name, folder):
        return data
    draft, damaged = (folder.with_name(f".{folder.name}-{uuid4().hex}") for _ in range(2))
    try:
        draft.mkdir(parents=True)
        for old in folder.parent.glob(f".{folder.name}-*"):  # drafts of runs that were killed a day ago
            with contextlib.suppress(OSError):
                if time.time() - old.stat().st_mtime > _DAY:
                    shutil.rmtree(old, ignore_errors=True)
        make(draft)
        for _ in range(100):
            with contextlib.suppress(OSError):  # there is a damaged folder, or another run's folder
                draft.rename(folder)
            if data := _open(name, folder):
                return data
            with contextlib.suppress(OSError):  # another run may have moved the damaged folder first
                folder.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
            time.sleep(0.01)
    except OSError as error:
        raise InputError(
            f"cannot write the data cache {folder} ({error.strerror or error}); "
            "set CFEDAVG_CACHE to a folder where you may write"
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    raise InputError(f"the data cache {folder} was damaged right after it was written; check the disk")


def _open(name: str, folder: Path) -> ImageData | None:
    """Return the memory-mapped data set in `folder`, or None if a file is missing or damaged."""
    try:
        meta = json.loads(read_file(folder / "meta.json"))
        train, test = (_map_split(folder, split, tuple(meta["shapes"][split])) for split in SPLITS)
        classes = 1 + max(int(split.labels.max()) for split in (train, test))
        mean, std = tuple(meta["mean"]), tuple(meta["std"])
        sound = (
            (meta["version"], meta["classes"]) == (VERSION, classes)
            and train.pixels.shape[1:] == test.pixels.shape[1:]
            and len(mean) == len(std) == train.pixels.shape[1]
            and all(map(math.isfinite, mean + std))
            and min(std) > 0
        )
        return ImageData(name, train, test, classes, mean, std) if sound else None
    except Exception:  # whatever is wrong with a cache, decoding again repairs it
        return None


def _map_split(folder: Path, split: str, shape: tuple[int, ...]) -> Images:
    """Return a memory-mapped split; raise ValueError if its files are damaged or do not fit `shape`."""
    paths = [folder / f"{split}_{part}.npy" for part in ("pixels", "labels")]
    for path in paths:
        check_regular(path)
    pixels, labels = (np.lib.format.open_memmap(path, mode="r") for path in paths)
    kinds = [(array.dtype.name, *array.shape) for array in (pixels, labels)]
    if kinds != [("uint8", *shape), ("int64", shape[0])] or len(shape) != 4 or labels.min() < 0:
        raise ValueError(f"{folder} is damaged: the files of its {split} split do not fit its meta.json")
    return Images(pixels, labels)
