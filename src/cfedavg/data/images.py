"""Data sets of images, and a decoder that turns parquet files into .npy files of pixels in little memory."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.extras import explain_missing
from cfedavg.core.files import check_regular, sync
from cfedavg.data.files import SPLITS

VERSION = 1  # of the format of a cache folder; a data set in another format is decoded again
_ROWS = 128  # images decoded at a time
_MOST_CLASSES = 100_000  # a column with larger numbers holds identifiers, not labels


@dataclass(frozen=True)
class Images:
    """The images and labels of one split. Both arrays are read-only; a large data set is memory-mapped."""

    pixels: np.ndarray  # uint8 (n, channels, height, width)
    labels: np.ndarray  # int64 (n,)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ImageData:
    """A data set of images. `mean` and `std` describe the train pixels / 255: one number for each channel."""

    name: str
    train: Images
    test: Images
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def histogram(pixels: np.ndarray) -> np.ndarray:
    """Return an array of shape (channels, 256): how often each pixel value occurs in each channel."""
    channels = pixels.swapaxes(0, 1).reshape(pixels.shape[1], -1)
    return np.stack([np.bincount(channel, minlength=256) for channel in channels])


def mean_std(counts: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of pixels / 255 for each channel, from a `histogram`.

    >>> mean_std(histogram(np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)))
    ((0.5,), (0.5,))
    """
    means, stds = [], []
    for row in counts.tolist():
        n, total, squares = (sum(count * value**i for value, count in enumerate(row)) for i in range(3))
        means.append(total / n / 255)
        # The integers keep the difference exact. A constant channel gets std 1: normalising divides by std.
        stds.append((n * squares - total * total) ** 0.5 / n / 255 or 1.0)
    return tuple(means), tuple(stds)


class _Coloured(Exception):
    """Raised in the first pass, which decodes all images as grey, if an image has colours."""


def decode(files: Mapping[str, Sequence[Path]], folder: Path, where: str, label: str | None = None) -> None:
    """Decode the parquet files of both splits; write pixels, labels and meta.json to `folder`.

    Every InputError begins with `where`, which names the data set. `label` names the column of labels.
    """
    try:
        _decode(files, folder, where, label, grey=True)
    except _Coloured:
        _decode(files, folder, where, label, grey=False)


def _decode(
    files: Mapping[str, Sequence[Path]], folder: Path, where: str, label: str | None, *, grey: bool
) -> None:
    with explain_missing(rich="data"):
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress

    rows = {split: _count_rows(files[split], split, where) for split in SPLITS}
    labels: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    shapes, counts = {}, np.zeros((1 if grey else 3, 256), np.int64)
    quiet = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(escape(f"decoding {where.partition(': ')[2]}"), total=sum(rows.values()))
        for split, pixels, some in _read_images(files, where, label, grey):
            # No memory map: on a full disk, a memory map would kill the process.
            with (folder / f"{split}_pixels.npy").open("ab" if labels[split] else "wb") as out:
                if not labels[split]:
                    shapes[split] = (rows[split], *pixels.shape[1:])
                    header = {"descr": "|u1", "fortran_order": False, "shape": shapes[split]}
                    np.lib.format.write_array_header_1_0(out, header)
                out.write(pixels.data)
            labels[split].append(some)
            if split == "train":
                counts += histogram(pixels)
            bar.advance(task, len(some))
    classes = max(_save_labels(folder, split, np.concatenate(labels[split]), where) for split in SPLITS)
    mean, std = mean_std(counts)
    meta = {"version": VERSION, "classes": classes, "mean": mean, "std": std, "shapes": shapes}
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    for path in folder.iterdir():  # else a power cut could leave a complete folder of incomplete files
        sync(path)


def _count_rows(paths: Sequence[Path], split: str, where: str) -> int:
    rows = 0
    for path in paths:
        with open_parquet(path, where) as file:
            rows += file.metadata.num_rows
    if not rows:
        raise InputError(f"{where}: the {split} split is empty")
    return rows


def _save_labels(folder: Path, split: str, labels: np.ndarray, where: str) -> int:
    """Write the labels of a split and return the number of classes, which is the highest label plus 1."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        raise InputError(f"{where}: labels of the {split} split must be 0 or more, got {low}")
    if high >= _MOST_CLASSES:
        raise InputError(f"{where}: labels must be below {_MOST_CLASSES}, got {high}")
    np.save(folder / f"{split}_labels.npy", labels)
    return high + 1


@contextmanager
def open_parquet(path: Path, where: str) -> Iterator[Any]:
    """Open a parquet file inside `with`; raise InputError if it is damaged."""
    with explain_missing():
        import pyarrow as pa
        import pyarrow.parquet as pq

    try:
        check_regular(path)
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        what = f"cannot read {path.name} as a parquet file"
        raise InputError(f"{where}: {what} ({summarise_error(error)})") from None


def _read_images(
    files: Mapping[str, Sequence[Path]], where: str, wanted: str | None, grey: bool
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield batches of n images: the split's name, pixels (n, channels, height, width), and n labels."""
    shape: tuple[int, ...] = ()
    paths = [(split, path) for split in SPLITS for path in files[split]]
    for split, path in paths:
        name = f"{where}: {path.name}"
        with open_parquet(path, where) as file:
            image, label = _find_columns(file.schema_arrow, name, wanted)
            for batch in file.iter_batches(_ROWS, columns=[f"{image}.bytes", label]):
                labels, encoded = batch.column(label), batch.column(image).field("bytes").to_pylist()
                if labels.null_count:
                    raise InputError(f"{name} has samples without a label; remove these samples")
                decoded = [_decode_image(data, name, grey) for data in encoded]
                for pixels in decoded:
                    shape = shape or pixels.shape
                    if pixels.shape != shape:
                        sizes = " and ".join(f"{each[1]}x{each[0]}" for each in (shape, pixels.shape))
                        raise InputError(f"{where}: all images must have the same size, got {sizes}")
                channels_first = np.ascontiguousarray(np.stack(decoded).transpose(0, 3, 1, 2))
                yield split, channels_first, labels.to_numpy().astype(np.int64)


def _decode_image(data: bytes | None, name: str, grey: bool) -> np.ndarray:
    """Return an image's pixels as an array of shape (height, width, channels)."""
    with explain_missing():
        from PIL import Image

    if data is None:
        raise InputError(
            f"{name} holds paths of images but not the images; use parquet files that contain the images"
        )
    try:
        with Image.open(io.BytesIO(data)) as image:
            if grey and image.mode == "L":
                return np.asarray(image)[..., None]
            pixels = np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow raises many kinds of error on a damaged image
        why = summarise_error(error)
        raise InputError(f"{name} holds an image that cannot be decoded ({why})") from None
    if grey:
        raise _Coloured
    return pixels


def is_image(field: Any) -> bool:
    """Return whether a column, an Arrow field, holds images."""
    import pyarrow as pa

    return pa.types.is_struct(field.type) and {"bytes", "path"} <= {inner.name for inner in field.type}


def _find_columns(schema: Any, where: str, wanted: str | None) -> list[str]:
    """Return the name of the image column and the name of the label column of an Arrow schema."""
    import pyarrow as pa

    images = [field.name for field in schema if is_image(field)]
    labels = [field.name for field in schema if pa.types.is_integer(field.type)]
    # fine_label: CIFAR-100 has its 100 classes in this column, and 20 groups of classes in another column.
    known_labels = (wanted,) if wanted is not None else ("label", "labels", "fine_label")
    if wanted is not None and wanted not in labels:
        raise InputError(
            f"`label_column`: {where} has no column {wanted!r} of integers; it has {', '.join(labels)}"
        )
    found: list[str] = []
    for names, known, what, remedy in (
        (images, ("image", "img"), "image columns (structs with `bytes` and `path`)",
         "rename the one to use to 'image'"),
        (labels, known_labels, "label columns (of integers)", "set `label_column` to the one to use"),
    ):  # fmt: skip
        candidates = [name for name in known if name in names][:1] or names
        if not candidates:
            raise InputError(f"{where} has no {what}")
        if len(candidates) > 1:
            raise InputError(f"{where} has several possible {what}: {', '.join(names)}; {remedy}")
        found += candidates
    return found
