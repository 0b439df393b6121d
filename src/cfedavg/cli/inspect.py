"""The commands `cfedavg data`, which shows a partition, and `cfedavg inspect`, which shows a message."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cfedavg.cli.console import PLAIN, OptionConsole
from cfedavg.cli.options import takes_config
from cfedavg.core.config import DATA, Config, fields_where
from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.files import check_regular, exists, read_file

if TYPE_CHECKING:
    from cfedavg.core.layout import Layout
    from cfedavg.core.payload import Payload
    from cfedavg.wire.frame import Rows

PARTITION = {*fields_where(lambda known: known.group == DATA), "seed"}

# Limits of a layout: numbers, and rows and columns. A decoder allocates 1 GB at each limit.
_MOST, _MOST_ROWS = 2**33, 2**26


@takes_config(PARTITION)
def data(
    given: dict[str, Any],
    picture: Annotated[Path, typer.Option(help="PNG file for the picture")] = Path("partition.png"),
) -> None:
    """Load a data set, divide it among clients, and draw how many samples of each class a client has."""
    from cfedavg.data import load
    from cfedavg.data.tasks import deal
    from cfedavg.report import plot_partition

    config = Config().replace(**given)
    if picture.suffix != ".png":
        raise InputError(f"--picture must end in .png, got {picture}")
    images = load(config.dataset, config.data_dir)
    partition = deal(config, images)
    sizes, tests = ([len(rows) for rows in part] for part in (partition.train, partition.test))
    counts = partition.counts(images.train.labels, images.classes)
    plot_partition(counts, picture, f"{images.name}: who has what")
    OptionConsole().print(
        f"{images.name}: {len(images.train)} train and {len(images.test)} test images of "
        f"{images.classes} classes\n"
        f"{config.clients} clients with {min(sizes)} to {max(sizes)} train and {min(tests)} to {max(tests)} "
        f"test samples; {partition.unused} train samples unused\ndrawn in {picture}",
        **PLAIN,
    )


def inspect_message(
    file: Annotated[Path, typer.Argument(help="a message from the folder of `cfedavg run --messages`")],
    layout: Annotated[
        Path | None, typer.Option(help="layout.json of the model", show_default="the one beside FILE")
    ] = None,
    dense: Annotated[
        Path | None, typer.Option(help=".npy file with the vector that was compressed, for the SNR")
    ] = None,
) -> None:
    """Explain a message: header, sections, bits per index against the entropy bound, bits per value, SNR."""
    show_message(OptionConsole(), file, layout, dense)


def show_message(console: Console, file: Path, layout: Path | None, dense: Path | None) -> None:
    """Print a message's header and sections; with the model's layout, also the share sent of each tensor."""
    from cfedavg.wire import WireError, decode, read_header
    from cfedavg.wire.frame import header_rows, section_rows, tensor_rows

    data, beside = _read(file), file.parent / "layout.json"
    if layout is None and exists(beside):
        layout = beside
    if layout is None and dense is not None:
        raise InputError("`dense` needs `layout`, the layout.json of the model")
    try:
        console.print(_table(header_rows(read_header(data)), "header", ""))
        console.print(_table(section_rows(data), "section", ">bytes", ">bits per coordinate", ""))
        if layout is None:
            console.print("not decoded: decoding needs `layout`, the layout.json of the model")
            return
        known = _read_layout(layout)
        payload = decode(data, layout=known)
    except WireError as error:
        raise InputError(f"{file}: {error}") from None
    console.print(_table(tensor_rows(payload, known), "tensor", "shape", ">sent", ">share"))
    if dense is not None:
        console.print(f"SNR |p|² / |p - C(p)|² = {_measure_snr(payload, dense):.6g}", highlight=False)


def _measure_snr(payload: Payload, dense: Path) -> float:
    """Return the SNR of a payload against the uncompressed vector in the .npy file `dense`."""
    import torch

    from cfedavg.compress import decompress

    try:
        check_regular(dense)
        with np.errstate(over="ignore"):  # a damaged header may give a huge size
            loaded = np.lib.format.open_memmap(dense, mode="r")  # compares header and file size
    except Exception as error:  # NumPy raises many kinds of error on a damaged header
        raise InputError(
            f"`dense`: cannot read {dense} as a NumPy array ({summarise_error(error)})"
        ) from None
    if loaded.dtype.kind not in "fiu":
        raise InputError(f"`dense`: {dense} must hold one array of real numbers, as numpy.save writes it")
    if loaded.size != payload.d:
        raise InputError(
            f"`dense`: {dense} must have {payload.d} numbers, as many as the message, got {loaded.size}"
        )
    p = loaded.reshape(-1).astype(np.float64)
    noise = ((p - decompress(payload.map(torch.from_numpy))[0].double().numpy()) ** 2).sum()
    return float((p**2).sum() / noise) if noise else math.inf


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from None


def _read_layout(path: Path) -> Layout:
    from cfedavg.core.layout import Layout

    data = _read(path)
    try:
        layout = Layout.from_text(data.decode())
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"`layout`: {path} is not the layout of a model") from None
    if not all(name.isprintable() for name in layout.names):
        raise InputError(f"`layout`: {path} names a tensor with characters that cannot be printed")
    if layout.d > _MOST or sum(sum(shape[:2]) for shape in layout.shapes) > _MOST_ROWS:
        raise InputError(
            f"`layout`: the model in {path} must have at most {_MOST:,} numbers and {_MOST_ROWS:,} rows and "
            f"columns, got {layout.d:,} numbers"
        )
    return layout


def _table(rows: Rows, *columns: str) -> Table:
    """Return a table of `rows`; a column whose name begins with > is right-aligned, for numbers."""
    table = Table(*(Column(c.lstrip(">"), justify="right" if c.startswith(">") else "left") for c in columns))
    for row in rows:
        table.add_row(*map(escape, row))
    return table
