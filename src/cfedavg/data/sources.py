"""Sources of images: the MNIST subset in this package, the Hugging Face hub, or a folder of the user."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.files import exists
from cfedavg.data.decode import decode
from cfedavg.data.images import ImageData, Images, cache_folder, histogram, load_cached, mean_std

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
# The hub keeps parquet copies of data sets that were uploaded in another form on this branch.
_BRANCHES = (None, "refs/convert/parquet")
_SECONDS = 10.0  # time limit for the hub's answer


def load(dataset: str, data_dir: str | Path | None = None, cache: Path | None = None) -> ImageData:
    """Return the data set in the folder `data_dir`, or else the data set with the name `dataset`.

    Every data set but `embedded` is decoded once into the folder `cache`, and memory-mapped from there.

    >>> data = load("embedded")
    >>> data.train.pixels.shape, len(data.test), data.classes
    ((10000, 1, 28, 28), 2000, 10)
    """
    cache = cache_folder() if cache is None else cache
    if data_dir is not None:
        return _load_folder(dataset, Path(data_dir).expanduser(), cache)
    if dataset == "embedded":
        return _load_embedded()
    source = HUB.get(dataset, dataset)
    match = _REPO.fullmatch(source)
    if not match:
        raise InputError(
            f"`dataset` must be embedded, {', '.join(HUB)}, "
            f"or owner/name or owner/name@revision of the Hugging Face hub, got {dataset!r}"
        )
    where = f"`dataset`: {dataset}"
    folder = cache / source.replace("/", "--")
    return load_cached(
        dataset, folder, lambda draft: decode(_download(**match.groupdict(), where=where), draft, where)
    )


def _load_embedded() -> ImageData:
    with (
        (resources.files("cfedavg.data") / "mnist_subset.npz").open("rb") as file,
        np.load(file) as arrays,
    ):
        parts = {name: arrays[name] for name in arrays.files}
    for part in parts.values():
        part.flags.writeable = False  # read-only, as a memory-mapped data set is
    train, test = (Images(parts[f"{split}_pixels"], parts[f"{split}_labels"]) for split in ("train", "test"))
    return ImageData("embedded", train, test, 10, *mean_std(histogram(train.pixels)))


def _load_folder(dataset: str, folder: Path, cache: Path) -> ImageData:
    where = f"`data_dir`: {folder}"
    files = _find_files(dataset, folder, where)
    key = _fingerprint(files["train"] + files["test"])
    name = folder.resolve().name if dataset == "embedded" else dataset
    data = load_cached(name, cache / f"folder-{key}", lambda draft: decode(files, draft, where))
    shape = data.train.pixels.shape[1:]
    if shape != _SHAPES.get(dataset, shape):
        raise InputError(
            f"{where} must hold images of {'×'.join(map(str, _SHAPES[dataset]))} for {dataset}, "
            f"got {'×'.join(map(str, shape))}; give another folder, or leave out `dataset`"
        )
    return data


def _find_files(dataset: str, folder: Path, where: str) -> dict[str, list[Path]]:
    """Return each split's parquet files in `folder`, or else in its subfolder with the data set's name."""
    if not (exists(folder) and folder.is_dir()):
        raise InputError(f"{where} is not a folder; give one with train-*.parquet and test-*.parquet files")
    for place in (folder, folder / dataset, folder / Path(dataset).name):
        found = _find_splits([path.name for path in place.glob("*.parquet")], where)
        if found:
            return {split: [place / name for name in names] for split, names in found.items()}
    inside = sorted({path.parent.name for path in folder.glob("*/*.parquet")})
    hint = f"; set `dataset` to a subfolder: {', '.join(inside)}" if inside else ""
    raise InputError(f"{where} must hold train-*.parquet and test-*.parquet files, and does not{hint}")


def _fingerprint(paths: list[Path]) -> str:
    """Return a hash of files that changes when one of the files is moved, replaced or written to."""
    try:
        text = "\n".join(
            f"{path.resolve()} {info.st_size} {info.st_mtime_ns}" for path in paths for info in [path.stat()]
        )
    except OSError as error:
        raise InputError(f"`data_dir`: cannot read {error.filename} ({error.strerror})") from None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _find_splits(names: Iterable[str], where: str) -> dict[str, list[str]] | None:
    """Return the parquet files of the train split and of the test split; None if a split is missing.

    >>> _find_splits(["README.md", "all/test-0.parquet", "all/train-0.parquet"], "")
    {'train': ['all/train-0.parquet'], 'test': ['all/test-0.parquet']}
    >>> _find_splits(["train/0.parquet", "validation/0.parquet"], "")["test"]
    ['validation/0.parquet']
    """
    places: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        match = re.search(r"(?:^|/)(train|test|validation|valid)(?:[-.][^/]*|/.*)$", name)
        if match and name.endswith(".parquet"):
            places.setdefault(name[: match.start()], {}).setdefault(match[1], []).append(name)
    found = {}
    for place, splits in places.items():
        test = splits.get("test") or splits.get("validation") or splits.get("valid")
        if test and "train" in splits:
            found[place] = {"train": splits["train"], "test": test}
    if len(found) > 1:
        raise InputError(
            f"{where} holds several data sets ({', '.join(found)}); "
            "download one and give its folder as `data_dir`"
        )
    return next(iter(found.values()), None)


def _download(repo: str, revision: str | None, where: str) -> dict[str, list[Path]]:
    """Download a data set's parquet files from the hub to the hub's own cache; return the paths by split."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        for branch in [revision] if revision else _BRANCHES:
            found = _download_revision(repo, branch, where)
            if found:
                return found
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
            f"{where} could not be downloaded from the Hugging Face hub ({_reason(error)}): "
            "set `data_dir` to a folder with its parquet files, or run once on a machine with network, "
            "or set `dataset` to embedded"
        ) from None
    raise InputError(f"{where} has no parquet files of a train and a test split on the Hugging Face hub")


def _download_revision(repo: str, revision: str | None, where: str) -> dict[str, list[Path]] | None:
    """Download one revision's parquet files; return the paths by split, or None if a split is missing."""
    from huggingface_hub import HfApi, hf_hub_download

    # Not list_repo_files: without network, that function retries for half a minute.
    info = HfApi().dataset_info(repo, revision=revision, timeout=_SECONDS)
    found = _find_splits([file.rfilename for file in info.siblings or ()], where)
    if not found:
        return None
    # The revision is the commit: a branch could change between the listing and the download.
    return {
        split: [Path(hf_hub_download(repo, n, repo_type="dataset", revision=info.sha)) for n in names]
        for split, names in found.items()
    }


def _reason(error: Exception) -> str:
    """Return the first sentence of an error from the hub; such an error has many sentences."""
    return re.split(r"\.\s|\n", str(error).strip())[0].rstrip(".") or type(error).__name__
