"""Commands that show things: `data` a partition, `inspect` a message, `parts` the exchangeable parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from cfedavg.cli.console import OptionConsole, flag, say, takes_config
from cfedavg.core.config import DATA, Config, fields_where
from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.files import check_regular, exists, make_folder, read_input

if TYPE_CHECKING:
    from cfedavg.core.layout import Layout
    from cfedavg.core.payload import Payload
    from cfedavg.wire.frame import Rows

PARTITION = {*fields_where(lambda known: known.group == DATA), "seed"}

# The most numbers, and the most rows and columns in all, of a layout. At each limit, decoding takes 1 GB.
_MOST, _MOST_ROWS = 2**33, 2**26


@takes_config(PARTITION)
def data(
    given: dict[str, Any],
    out: Annotated[Path, typer.Option(help="file for the picture, or folder for partition.png")] = Path(
        "partition.png"
    ),
) -> None:
    """Load a data set, divide it among clients, and plot how many samples (of each class) a client has."""
    from cfedavg.data.columns import Columns
    from cfedavg.data.loading import load_any
    from cfedavg.data.tasks import check_given, deal
    from cfedavg.report import plot_partition, plot_sizes

    config = Config().replace(**given)
    picture = out if out.suffix else out / "partition.png"
    if picture.suffix != ".png":
        raise InputError(f"`out` must be a folder or end in .png, got {out}")
    loaded, owners = load_any(config.dataset, config.data_dir, Columns.of(config))
    check_given(config, loaded, owners)
    partition = deal(config, loaded, owners)
    sizes, tests = ([len(rows) for rows in part] for part in (partition.train, partition.test))
    classes, title = getattr(loaded, "classes", 0), f"{loaded.name}: who has what"
    names = owners.names if owners else ()
    make_folder(picture.parent, "`out`")
    if classes:
        counts = partition.counts(loaded.train.labels, classes)  # type: ignore[union-attr]
        plot_partition(counts, picture, title, names, getattr(loaded, "class_names", ()))
    else:
        plot_sizes(sizes, picture, title, names)
    train, test = len(loaded.train), len(loaded.test)
    note = getattr(
        loaded, "note", f"{loaded.name}: {train} train and {test} test images of {classes} classes"
    )
    say(
        f"{note}\n"
        f"{len(sizes)} clients with {min(sizes)} to {max(sizes)} train and {min(tests)} to {max(tests)} "
        f"test samples; {partition.unused} train samples unused\ndrawn in {picture}"
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
    from cfedavg.wire import WireError, decode, read_header
    from cfedavg.wire.frame import header_rows, section_rows, tensor_rows

    console, data, beside = OptionConsole(), read_input(file), file.parent / "layout.json"
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
            f"`dense`: {dense} must have {payload.d} numbers, as many as the model, got {loaded.size}"
        )
    p = loaded.reshape(-1).astype(np.float64)
    noise = ((p - decompress(payload)[0]) ** 2).sum()
    return float((p**2).sum() / noise) if noise else math.inf


def _read_layout(path: Path) -> Layout:
    from cfedavg.core.layout import Layout

    data = read_input(path)
    try:
        layout = Layout.from_text(data.decode())
    except (ValueError, TypeError, RecursionError):
        raise InputError(
            f"`layout`: {path} is not the layout of a model; give the layout.json beside the messages"
        ) from None
    if not all(name.isprintable() for name in layout.names):
        raise InputError(f"`layout`: the names of the tensors in {path} must be printable")
    if layout.d > _MOST or sum(sum(shape[:2]) for shape in layout.shapes) > _MOST_ROWS:
        raise InputError(
            f"`layout`: the model in {path} must have at most {_MOST:,} numbers, and at most "
            f"{_MOST_ROWS:,} rows and columns in all; it has {layout.d:,} numbers"
        )
    return layout


def _table(rows: Rows, *columns: str) -> Table:
    """Return a table of `rows`; a column whose name begins with > is right-aligned, for numbers."""
    table = Table(*(Column(c.lstrip(">"), justify="right" if c.startswith(">") else "left") for c in columns))
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def parts(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="compressor, feedback, local_optimiser, server_optimiser or partition",
            show_default="all of them",
        ),
    ] = None,
    d: Annotated[
        int, typer.Option("--d", help="model size for which guarantees are shown", min=1, max=2**53)
    ] = 582_026,
) -> None:
    """List compressors, feedbacks, optimisers and partitions: what each does, guarantees and remembers.

    A part is written alike on the command line, in TOML, in Python and in Flower. Write a class of your
    own as package.module:Class(arguments). For instance: cfedavg run --server-optimiser "momentum(0.9)"
    """
    tables: dict[str, Callable[[int], Table]] = {
        "compressor": _compressors,
        "feedback": _feedbacks,
        "local_optimiser": _local_optimisers,
        "server_optimiser": _server_optimisers,
        "partition": _partitions,
    }
    kind = kind and kind.removeprefix("--").replace("-", "_")
    if kind is not None and kind not in tables:
        raise InputError(f"KIND must be one of {', '.join(tables)}, got {kind!r}")
    console = OptionConsole()
    for name, table in tables.items():
        if kind in (None, name):
            with console.status("making the table"):
                made = table(d)
            console.print(made)


def _compressors(d: int) -> Table:
    """Return a table of compressors: the guaranteed SNR (gamma), and the size of a message.

    The size is measured on Gaussian noise of at most 2^20 numbers and scaled to the values of a model of `d`
    numbers, most of which are one square matrix. It is that of a late round, after any warm-up.
    """
    import torch

    from cfedavg.compress import EXAMPLES, parse
    from cfedavg.core.units import format_bytes
    from cfedavg.wire import measure

    title = (
        f"{flag('compressor')} (up) and {flag('compressor_down')}: selector >> quantiser, for d = {d:,}; "
        "E|C(p) - p|² <= |p|²/gamma"
    )
    table = _new_table(title, "what it does", "gamma", "message (estimate)")
    p = torch.randn(min(d, 2**20), generator=torch.Generator().manual_seed(0))
    small, layout = _nearly_square(len(p)), _nearly_square(d)
    for text in EXAMPLES:
        compressor = parse(text)
        words = "a composition" if ">>" in text else compressor.stages[-1].summary
        (size,) = measure(compressor.compress(p, 0, small, t=2**31).numpy(), small)
        growth = compressor.selector.most(layout) / compressor.selector.most(small)
        words_of_size = (
            "as the bound needs" if compressor.selector.needs_update else format_bytes(size * growth)
        )
        table.add_row(text, words, f"{compressor.gamma(layout):.6g}", words_of_size)
    return table


def _nearly_square(d: int) -> Layout:
    """Return the layout of a model of d numbers: a square matrix and a vector."""
    from cfedavg.core.layout import Layout

    side = math.isqrt(d)
    return Layout(("matrix", "vector"), ((side, side), (d - side**2,)), ("float32", "float32"))


def _feedbacks(d: int) -> Table:
    from cfedavg.feedback import FEEDBACKS

    table = _new_table(flag("feedback"), "what it does", "law under lost replies", "remembers")
    for text in FEEDBACKS.examples():
        feedback = FEEDBACKS.parse(text)
        memory = ["a vector a client"] * feedback.keeps_client_memory
        memory += ["a vector of the server"] * feedback.keeps_server_memory
        table.add_row(text, _first_line(feedback), feedback.law, ", ".join(memory) or "nothing")
    return table


def _local_optimisers(d: int) -> Table:
    import torch

    from cfedavg.optimise.local import LOCAL_OPTIMISERS, LONGEST, parse_local_optimiser

    rate = f"its rate is {flag('eta_local')}"
    title = f"{flag('local_optimiser')}: any clip, prox or scaffold >> one optimiser; {rate}"
    table, parameter = _new_table(title, "what it does", "remembers for a round", "for good"), torch.zeros(2)
    for text in LOCAL_OPTIMISERS.examples():
        optimiser = parse_local_optimiser(text)
        state = optimiser.init([parameter]).values()
        models = sum(each[0].shape == parameter.shape for each in state) + optimiser.needs_start
        first = LOCAL_OPTIMISERS.parse_chain(text, longest=LONGEST)[0]
        lasting = "c_i of each client, c of the server" if optimiser.needs_correction else "nothing"
        table.add_row(text, _first_line(first), _count(models, "model", " a client"), lasting)
    return table


def _server_optimisers(d: int) -> Table:
    import numpy as np

    from cfedavg.optimise.server import SERVER_OPTIMISERS

    table = _new_table(flag("server_optimiser"), "what it does", f"{flag('eta')} by default", "remembers")
    for text in SERVER_OPTIMISERS.examples():
        optimiser = SERVER_OPTIMISERS.parse(text)
        memory = _count(len(optimiser.init(np.zeros(1))), "vector")
        table.add_row(text, _first_line(optimiser), f"{optimiser.rate:.4g}", memory)
    return table


def _partitions(d: int) -> Table:
    from cfedavg.data.splits import SPLITTERS

    table = _new_table(flag("partition"), "what it does")
    for text in SPLITTERS.examples():
        table.add_row(text, _first_line(SPLITTERS.parse(text)))
    return table


def _count(n: int, noun: str, whose: str = "") -> str:
    return f"{n} {noun}{'s' if n > 1 else ''}{whose}" if n else "nothing"


def _new_table(title: str, *columns: str) -> Table:
    """Return an empty table; its first column `write` is for the text that names a part."""
    return Table(Column("write", max_width=24), *columns, title=title, box=SIMPLE_HEAD, pad_edge=False)


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]
