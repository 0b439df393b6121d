"""Messages for people: one shown as tables, and about how long one will be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.files import check_regular, exists, read_file
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Payload
from cfedavg.wire import WireError, decode, measure, read_header
from cfedavg.wire.explain import Rows, header_rows, section_rows, tensor_rows

if TYPE_CHECKING:
    from cfedavg.compress import Compressor


# What a decoder allocates grows with the layout, of which the message says nothing: 1 GB for each of these.
_MOST, _MOST_ROWS = 2**33, 2**26


def show(console: Console, file: Path, layout: Path | None, dense: Path | None) -> None:
    """Prints what a message says; with the layout of its model also what is sent of each tensor."""
    data, beside = _read(file), file.parent / "layout.json"
    if layout is None and exists(beside):
        layout = beside
    if layout is None and dense is not None:
        raise InputError("`dense` needs `layout`, the layout.json of the model")
    try:
        console.print(_table(header_rows(read_header(data)), "header", ""))
        console.print(_table(section_rows(data), "section", ">bytes", ">bits per coordinate", ""))
        if layout is None:
            console.print("not decoded: that needs `layout`, the layout.json of the model")
            return
        known = _layout(layout)
        payload = decode(data, layout=known)
    except WireError as error:
        raise InputError(f"{file}: {error}") from None
    console.print(_table(tensor_rows(payload, known), "tensor", "shape", ">sent", ">share"))
    if dense is not None:
        console.print(f"SNR |p|² / |p - C(p)|² = {snr(payload, dense):.6g}", highlight=False)


def estimated_bytes(compressor: Compressor, d: int) -> float:
    """About how long a message is: of Gaussian noise, which has no structure, and of a part if d is large."""
    import torch

    n = min(d, 2**20)
    p = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return measure(compressor.compress(p, 0).numpy(), Layout.flat(n))[0] * d / n


def snr(payload: Payload, dense: Path) -> float:
    """How much of the vector in a .npy file the message carries."""
    import torch

    from cfedavg.compress import decompress

    try:
        check_regular(dense)
        with np.errstate(over="ignore"):  # of a size that no file has
            loaded = np.lib.format.open_memmap(dense, mode="r")  # holds the header against the file's size
    except Exception as error:  # NumPy raises many kinds of error on a damaged header
        raise InputError(
            f"`dense`: cannot read {dense} as a NumPy array ({summarise_error(error)})"
        ) from None
    if loaded.dtype.kind not in "fiu":
        raise InputError(f"`dense`: {dense} must hold one array of real numbers, as numpy.save writes it")
    if loaded.size != payload.d:
        raise InputError(f"`dense`: {dense} has {loaded.size} numbers, the message is of {payload.d}")
    p = loaded.reshape(-1).astype(np.float64)
    noise = ((p - decompress(payload.map(torch.from_numpy))[0].double().numpy()) ** 2).sum()
    return float((p**2).sum() / noise) if noise else math.inf


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from None


def _layout(path: Path) -> Layout:
    data = _read(path)
    try:
        layout = Layout.from_text(data.decode())
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"`layout`: {path} is not the layout of a model") from None
    if not all(name.isprintable() for name in layout.names):
        raise InputError(f"`layout`: {path} names a tensor with characters that cannot be printed")
    if layout.d > _MOST or sum(sum(shape[:2]) for shape in layout.shapes) > _MOST_ROWS:
        raise InputError(
            f"`layout`: {path} is of a model with {layout.d:,} numbers; messages of up to {_MOST:,}, and "
            f"{_MOST_ROWS:,} rows and columns, can be inspected"
        )
    return layout


def _table(rows: Rows, *columns: str) -> Table:
    """A column whose name begins with > holds numbers."""
    table = Table(*(Column(c.lstrip(">"), justify="right" if c.startswith(">") else "left") for c in columns))
    for row in rows:
        table.add_row(*map(escape, row))
    return table
