"""The commands `cfedavg run` and `cfedavg federate up`, which train, and `report`, which compares runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from cfedavg.cli import console
from cfedavg.cli.console import ConfigFile, Formats, Out, Resume, Track, takes_config, trust_option
from cfedavg.core.config import fields_where
from cfedavg.core.files import exists
from cfedavg.core.run_files import CONFIG
from cfedavg.data.decoder import start_decoder
from cfedavg.launch.app import DEFAULT
from cfedavg.simulate.driver import start_driver
from cfedavg.simulate.vectorised.compiler import start_compiler

federation = typer.Typer(
    no_args_is_help=True, help="Train with Flower: real clients, real messages, faults survived."
)


@takes_config()
def run(
    given: dict[str, Any],
    out: Out = None,
    resume: Resume = False,
    config: ConfigFile = None,
    trust: Annotated[bool, trust_option("the --config file or the resumed run")] = False,
    messages: Annotated[
        Path | None,
        typer.Option(help="folder for every client's message, to be read with `cfedavg inspect`"),
    ] = None,
    track: Track = None,
) -> None:
    """Train, and write a folder with metrics, checkpoint, curves and a page.

    Without options: train on the MNIST subset inside the package, with 10 clients of 2 classes each.
    Both directions send 3% of the numbers in 3 bits.
    """
    out = console.choose_folder(out, resume)
    options = console.config_from(config, out if resume else None, given, trust=trust)
    # These processes and a thread work while this one imports torch, which takes seconds.
    start_compiler(options.device, options.engine)
    start_driver(options.device)
    start_decoder(options.dataset, options.data_dir)
    from cfedavg.callbacks import make_trackers
    from cfedavg.callbacks.progress import Board
    from cfedavg.simulate.run import run as run_loop

    trackers = make_trackers(track or [])

    with Board(console.OptionConsole()).show("training", options.rounds) as display:
        callbacks = [display, *trackers]
        run_loop(options, out=out, resume=resume, callbacks=callbacks, progress=False, messages=messages)
    console.say(f"\nwritten to {out}: curves.png, report.html, metrics.jsonl")


@federation.command("up")
@takes_config(fields_where(lambda known: known.federated), DEFAULT)
def federate_up(
    given: dict[str, Any],
    nodes: Annotated[
        int | None, typer.Option(help="number of clients; each is a SuperNode", show_default="4", min=1)
    ] = None,
    out: Out = None,
    resume: Resume = False,
    trust: Annotated[bool, trust_option("the resumed run")] = False,
    track: Track = None,
    round_timeout: Annotated[
        float, typer.Option(help="seconds after which a round stops waiting for replies", min=1)
    ] = 120,
    quorum: Annotated[
        float,
        typer.Option(help="least share of the replies waited for with which a round counts", min=0, max=1),
    ] = 0.5,
    port: Annotated[
        int | None,
        typer.Option(help="port of the SuperLink on 127.0.0.1", show_default="a free one", min=1, max=65535),
    ] = None,
) -> None:
    """Start a whole federation on this machine, train with it, and stop all its processes.

    The federation has a Flower SuperLink and a SuperNode for each client, all on 127.0.0.1.
    It uses TLS, and a key for every node.
    """
    from cfedavg.callbacks import CallbackList, make_trackers
    from cfedavg.callbacks.progress import Display
    from cfedavg.launch.local_federation import train_federation
    from cfedavg.launch.services import RunFailed

    out, how = console.choose_folder(out, resume), {"round_timeout": round_timeout, "quorum": quorum}
    given |= {"clients": nodes} if nodes else {}
    config = console.config_from(None, out if resume else None, given, trust=trust, base=DEFAULT)
    trackers = make_trackers(track or [])
    try:
        with Display(console.OptionConsole(), config.rounds, "training") as display:
            callback = CallbackList([display, *trackers])
            trained = train_federation(config, out, callback, resume=resume, port=port, **how)
    except KeyboardInterrupt:
        if exists(out / CONFIG):
            console.say(f"stopped: continue with `cfedavg federate up --out {out} --resume`")
        raise
    except RunFailed as error:
        console.fail(str(error))
        raise typer.Exit(1) from None
    if trained:
        display.say_total()
        console.say(f"\nwritten to {out}: curves.png, nodes.png, report.html, metrics.jsonl, nodes.jsonl")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="folders written by run, sweep or federate up", metavar="RUN..."),
    ],
    out: Annotated[Path, typer.Option(help="folder for the page and the pictures")] = Path("runs/report"),
    formats: Formats = None,
    over: Annotated[
        str, typer.Option(help="x axis of losses and norms: rounds, total_bytes or time")
    ] = "rounds",
    width: Annotated[
        float | None,
        typer.Option(help="width of PDF and SVG figures, in inches", show_default="3.4, a column of a paper"),
    ] = None,
) -> None:
    """Compare runs in pictures and a page: accuracy (by rounds, bytes and time), loss, norms."""
    from cfedavg.report import write_report

    made = write_report(runs, out, formats=formats or ("png",), over=over, width=width)
    console.OptionConsole().print(_narrow(made.table()))
    console.say(f"{made.headline}\n{made.page}  {made.picture}")


def _narrow(lines: list[list[str]]) -> Table:
    """Return a report's table for a terminal: fewer columns than on the page, so that labels have room."""
    left_out = {"rounds", "best", "seeds"}
    if any(name.startswith("time to ") for name in lines[0]):
        left_out |= {"time", "first downloads"}
    shown = [i for i, name in enumerate(lines[0]) if name not in left_out]
    header, *rows = ([line[i] for i in shown] for line in lines)
    table = Table(Column(header[0], overflow="fold"), box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header[1:], 1):
        texts = [*name.split(), *(row[i] for row in rows)]
        table.add_column(Text(name), justify="right", width=max(map(len, texts)))
    for row in rows:
        table.add_row(*map(Text, row))  # as Text: a label must not act as markup
    return table
