"""Decode images in parquet files to .npy files with pixels, in one pass and little memory."""

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
_ROWS = 128  # decoded at a time
_MOST_CLASSES = 100_000  # more: the column is an identifier, not a label
_PATIENCE = 2.0  # seconds without a progress bar


class _Coloured(Exception):
    """An image is not grey although the first pass took all for grey."""


def decode(files: Mapping[str, Sequence[Path]], folder: Path, where: str) -> None:
    """Write pixels, labels and meta.json of both splits into the folder; `where` begins error messages."""
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
                    # Plain writes: on a full disk a memory map would kill the process.
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
    """Write to the disk, so that the rename that follows cannot overtake the contents."""
    out.flush()
    os.fsync(out.fileno())


def _save_labels(path: Path, parts: Sequence[np.ndarray], where: str, split: str) -> int:
    """Write the labels, and return how many classes they need."""
    labels = np.concatenate(parts)
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        raise InputError(f"{where}: the {split} split has samples without a label (a label is {low})")
    if high >= _MOST_CLASSES:
        raise InputError(f"{where}: a label is {high}, but labels must be classes 0, 1, 2, ...")
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
    """A reader of batches of decoded images, which must all have one size."""

    def __init__(self, where: str, grey: bool) -> None:
        self.where, self.grey = where, grey
        self.shape: tuple[int, ...] = ()

    def batches(self, paths: Sequence[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield pixels (n, channels, height, width) and labels (n,)."""
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
            raise InputError(
                f"{self.where}: the images have different sizes ({sizes}), and must all have one"
            )
        return pixels


def find_columns(schema: Any, where: str) -> tuple[str, str]:
    """Return the names of the image and of the label column of an Arrow schema."""
    import pyarrow as pa

    images = [
        field.name
        for field in schema
        if pa.types.is_struct(field.type) and {"bytes", "path"} <= {inner.name for inner in field.type}
    ]
    labels = [field.name for field in schema if pa.types.is_integer(field.type)]
    image = _pick(images, ("image", "img"), f"{where} has %s image columns (a struct of bytes and path)")
    # fine_label: CIFAR-100 has the hundred classes there, and twenty groups of them beside.
    label = _pick(labels, ("label", "labels", "fine_label"), f"{where} has %s label columns (whole numbers)")
    return image, label


def _pick(names: Sequence[str], preferred: Sequence[str], complaint: str) -> str:
    for name in (*preferred, *(names if len(names) == 1 else ())):
        if name in names:
            return name
    if not names:
        raise InputError(complaint % "no")
    raise InputError(
        f"{complaint % 'several possible'}: {', '.join(names)}; call the right one {preferred[0]!r}"
    )


@contextmanager
def _progress(total: int, where: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts images; a bar appears after 2 seconds, and only on a terminal."""
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
