"""`cfedavg parts`: list the exchangeable parts of the algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from cfedavg.cli.console import OptionConsole
from cfedavg.cli.options import flag
from cfedavg.core.errors import InputError

if TYPE_CHECKING:
    from cfedavg.compress import Compressor


def parts(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="compressor, feedback, local_optimiser or server_optimiser", show_default="all of them"
        ),
    ] = None,
    d: Annotated[
        int, typer.Option("--d", help="model size for which guarantees are shown", min=1, max=2**53)
    ] = 582_026,
) -> None:
    """List the exchangeable parts: what each does, what it guarantees, what it remembers.

    The same text names a part on the command line, in TOML, in Python and in Flower. A class of your own is
    package.module:Class(arguments). For instance: cfedavg run --server-optimiser "momentum(0.9)"
    """
    tables: dict[str, Callable[[Console, int], Table]] = {
        "compressor": _compressors,
        "feedback": _feedbacks,
        "local_optimiser": _local_optimisers,
        "server_optimiser": _server_optimisers,
    }
    kind = kind and kind.removeprefix("--").replace("-", "_")
    if kind is not None and kind not in tables:
        raise InputError(f"KIND must be {', '.join(tables)}, got {kind!r}")
    console = OptionConsole()
    for name, table in tables.items():
        if kind in (None, name):
            console.print(table(console, d))


def _compressors(console: Console, d: int) -> Table:
    """Return a table of compressors: the guaranteed SNR, and the bytes of a message of Gaussian noise."""
    from cfedavg.compress import EXAMPLES, parse
    from cfedavg.core.layout import Layout
    from cfedavg.core.units import format_bytes

    title = (
        f"{flag('compressor')} (up) and {flag('compressor_down')}: selector >> quantiser, for d = {d:,}; "
        "E|C(p) - p|² <= |p|²/gamma"
    )
    table = _new_table(title, "what it does", "gamma", "bytes of a message, up or down (estimate)")
    with console.status("encoding a message with each"):
        for text in EXAMPLES:
            compressor = parse(text)
            words = "a composition" if ">>" in text else first_sentence(compressor.stages[-1])
            gamma = f"{compressor.gamma(Layout.flat(d)):.6g}"
            table.add_row(text, words, gamma, format_bytes(_estimate_bytes(compressor, d)))
    return table


def _estimate_bytes(compressor: Compressor, d: int) -> float:
    """Return a message's estimated bytes, from Gaussian noise of at most 2^20 numbers, scaled to `d`."""
    import torch

    from cfedavg.core.layout import Layout
    from cfedavg.wire import measure

    n = min(d, 2**20)
    p = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return measure(compressor.compress(p, 0).numpy(), Layout.flat(n))[0] * d / n


def _feedbacks(console: Console, d: int) -> Table:
    from cfedavg.feedback import FEEDBACKS

    table = _new_table(flag("feedback"), "what it does", "law under lost replies", "remembers")
    for text in FEEDBACKS.examples():
        feedback = FEEDBACKS.parse(text)
        memory = ["a vector a client"] * feedback.keeps_client_memory
        memory += ["a vector of the server"] * feedback.keeps_server_memory
        table.add_row(text, first_sentence(feedback), feedback.law, ", ".join(memory) or "nothing")
    return table


def _local_optimisers(console: Console, d: int) -> Table:
    import torch

    from cfedavg.optimise.local import LOCAL_OPTIMISERS, parse_local_optimiser

    title = f"{flag('local_optimiser')}: any clip or prox >> one optimiser; its rate is {flag('eta_local')}"
    table, parameter = _new_table(title, "what it does", "remembers for a round"), torch.zeros(2)
    for text in LOCAL_OPTIMISERS.examples():
        optimiser = parse_local_optimiser(text)
        state = optimiser.init([parameter]).values()
        models = sum(each[0].shape == parameter.shape for each in state) + optimiser.needs_start
        words = first_sentence(LOCAL_OPTIMISERS.entries[text.split("(")[0]])
        table.add_row(text, words, _count(models, "model", " a client"))
    return table


def _server_optimisers(console: Console, d: int) -> Table:
    import numpy as np

    from cfedavg.optimise.server import SERVER_OPTIMISERS

    table = _new_table(flag("server_optimiser"), "what it does", f"{flag('eta')} by default", "remembers")
    for text in SERVER_OPTIMISERS.examples():
        optimiser = SERVER_OPTIMISERS.parse(text)
        memory = _count(len(optimiser.init(np.zeros(1))), "vector")
        table.add_row(text, first_sentence(optimiser), f"{optimiser.rate:.4g}", memory)
    return table


def _count(n: int, noun: str, whose: str = "") -> str:
    return f"{n} {noun}{'s' if n > 1 else ''}{whose}" if n else "nothing"


def _new_table(title: str, *columns: str) -> Table:
    """Return an empty table; its first column `write` is for the text that names a part."""
    return Table(Column("write", no_wrap=True), *columns, title=title)


def first_sentence(thing: Any) -> str:
    """Return the first line of the docstring of `thing`."""
    return (thing.__doc__ or "").strip().split("\n")[0]
