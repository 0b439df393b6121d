"""The decoder of data sets: from images in parquet files to .npy files of pixels, with little memory."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cfedavg.core.errors import InputError
from cfedavg.core.files import check_regular
from cfedavg.data.images import VERSION, histogram, mean_std

SPLITS = ("train", "test")
_ROWS = 128  # images decoded at a time
_MOST_CLASSES = 100_000  # a column with larger numbers holds identifiers, not labels
_PATIENCE = 2.0  # seconds until a progress bar appears


class _Coloured(Exception):
    """An error: an image has colours, but the first pass decodes all images as grey."""


def decode(files: Mapping[str, Sequence[Path]], folder: Path, where: str) -> None:
    """Write pixels and labels of both splits, and meta.json, to `folder`; errors begin with `where`."""
    try:
        _decode(files, folder, where, grey=True)
    except _Coloured:
        _decode(files, folder, where, grey=False)


def _decode(files: Mapping[str, Sequence[Path]], folder: Path, where: str, *, grey: bool) -> None:
    rows = {split: sum(_count_rows(path, where) for path in files[split]) for split in SPLITS}
    reader = _Reader(where, grey)
    shapes, classes, counts = {}, 0, np.zeros((1 if grey else 3, 256), np.int64)
    with _progress(sum(rows.values()), where) as advance:
        for split in SPLITS:
            if not rows[split]:
                raise InputError(f"{where}: the {split} split is empty")
            labels: list[np.ndarray] = []
            with (folder / f"{split}_pixels.npy").open("wb") as out:
                for pixels, part in reader.batches(files[split]):
                    if not labels:
                        shapes[split] = (rows[split], *pixels.shape[1:])
                        header = {"descr": "|u1", "fortran_order": False, "shape": shapes[split]}
                        np.lib.format.write_array_header_1_0(out, header)
                    # No memory map: on a full disk, a memory map would kill the process.
                    out.write(pixels.data)
                    labels.append(part)
                    if split == "train":
                        counts += histogram(pixels)
                    advance(len(part))
                _flush(out)
            classes = max(classes, _save_labels(folder / f"{split}_labels.npy", labels, where, split))
    mean, std = mean_std(counts)
    meta = {"version": VERSION, "classes": classes, "mean": mean, "std": std, "shapes": shapes}
    with (folder / "meta.json").open("w", encoding="utf-8") as text:
        json.dump(meta, text)
        _flush(text)


def _flush(out: Any) -> None:
    """Force a file's contents to the disk, so that they are there before a later rename of the folder."""
    out.flush()
    os.fsync(out.fileno())


def _save_labels(path: Path, parts: Sequence[np.ndarray], where: str, split: str) -> int:
    """Write the labels to `path` and return the number of classes, which is the highest label plus 1."""
    labels = np.concatenate(parts)
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        raise InputError(f"{where}: labels of the {split} split must be 0 or more, got {low}")
    if high >= _MOST_CLASSES:
        raise InputError(f"{where}: labels must be below {_MOST_CLASSES}, got {high}")
    with path.open("wb") as out:
        np.save(out, labels)
        _flush(out)
    return high + 1


def _count_rows(path: Path, where: str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(path)
        return int(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(where, path, error) from None


def _unreadable(where: str, path: Path, error: Exception) -> InputError:
    return InputError(f"{where}: cannot read {path.name} as a parquet file ({_first_line(error)})")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")


class _Reader:
    """A reader of batches of decoded images, which must all have the same size."""

    def __init__(self, where: str, grey: bool) -> None:
        self.where, self.grey = where, grey
        self.shape: tuple[int, ...] = ()

    def batches(self, paths: Sequence[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield batches of pixels, of shape (n, channels, height, width), and labels, of shape (n,)."""
        for path in paths:
            for images, labels in self._read_encoded(path):
                pixels = np.stack([self._decode_image(image, path) for image in images])
                pixels = pixels[..., None] if self.grey else pixels
                yield np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), labels

    def _read_encoded(self, path: Path) -> Iterator[tuple[list[bytes | None], np.ndarray]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                image, label = find_columns(file.schema_arrow, f"{self.where}: {path.name}")
                for batch in file.iter_batches(_ROWS, columns=[f"{image}.bytes", label]):
                    labels = batch.column(label)
                    if labels.null_count:
                        raise InputError(f"{self.where}: {path.name} has samples without a label")
                    yield batch.column(image).field("bytes").to_pylist(), labels.to_numpy().astype(np.int64)
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(self.where, path, error) from None

    def _decode_image(self, data: bytes | None, path: Path) -> np.ndarray:
        from PIL import Image

        if data is None:
            raise InputError(f"{self.where}: {path.name} holds the paths of its images but not their bytes")
        try:
            with Image.open(io.BytesIO(data)) as image:
                mode = image.mode
                pixels = np.asarray(image if mode == "L" and self.grey else image.convert("RGB"))
        except Exception as error:  # Pillow raises many kinds of error on a damaged image
            raise InputError(
                f"{self.where}: {path.name} holds an image that cannot be decoded ({_first_line(error)})"
            ) from None
        if self.grey and mode != "L":
            raise _Coloured
        self.shape = self.shape or pixels.shape
        if pixels.shape != self.shape:
            sizes = " and ".join(f"{width}x{height}" for height, width, *_ in (self.shape, pixels.shape))
            raise InputError(f"{self.where}: all images must have the same size, got {sizes}")
        return pixels


def find_columns(schema: Any, where: str) -> tuple[str, str]:
    """Return the name of the image column and the name of the label column of an Arrow schema."""
    import pyarrow as pa

    images = [
        field.name
        for field in schema
        if pa.types.is_struct(field.type) and {"bytes", "path"} <= {inner.name for inner in field.type}
    ]
    labels = [field.name for field in schema if pa.types.is_integer(field.type)]
    image = _pick(images, ("image", "img"), f"{where} has %s image columns (a struct of bytes and path)")
    # fine_label: CIFAR-100 has its 100 classes in this column, and 20 groups of classes in another column.
    label = _pick(labels, ("label", "labels", "fine_label"), f"{where} has %s label columns (whole numbers)")
    return image, label


def _pick(names: Sequence[str], preferred: Sequence[str], complaint: str) -> str:
    for name in (*preferred, *(names if len(names) == 1 else ())):
        if name in names:
            return name
    if not names:
        raise InputError(complaint % "no")
    raise InputError(
        f"{complaint % 'several possible'}: {', '.join(names)}; rename the right column to {preferred[0]!r}"
    )


@contextmanager
def _progress(total: int, where: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts decoded images; on a terminal, a progress bar appears after 2 seconds."""
    with ExitStack() as stack:
        begin, done = time.monotonic(), 0
        update: Callable[[int], None] | None = None

        def advance(n: int) -> None:
            nonlocal done, update
            done += n
            if update is None and sys.stderr.isatty() and time.monotonic() - begin > _PATIENCE:
                from rich.console import Console
                from rich.markup import escape
                from rich.progress import Progress

                bar = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
                task = bar.add_task(escape(f"decoding {where.partition(': ')[2]}"), total=total)
                update = lambda done: bar.update(task, completed=done)  # noqa: E731
            if update:
                update(done)

        yield advance
