"""The commands `cfedavg run`, which trains, and `cfedavg report`, which compares runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from cfedavg.cli.console import PLAIN, OptionConsole
from cfedavg.cli.options import ConfigFile, Out, Resume, Trust, config_from, folder, takes_config
from cfedavg.core.files import exists


@takes_config()
def run(
    given: dict[str, Any],
    out: Out = None,
    resume: Resume = False,
    config: ConfigFile = None,
    trust: Trust = False,
    messages: Annotated[
        Path | None,
        typer.Option(help="folder for every client's message, to be read with `cfedavg inspect`"),
    ] = None,
) -> None:
    """Train, and write a folder with metrics, checkpoint, curves and a page.

    Without options: train on the MNIST subset inside the package with 10 clients of 2 classes each, and send
    3% of the numbers in 3 bits, in both directions.
    """
    from cfedavg.cli.progress import Display
    from cfedavg.simulate.run import run as run_loop

    out = folder(out, resume, "%Y%m%d-%H%M%S")
    if resume and not config and exists(out / "config.toml"):
        config = out / "config.toml"
    given_config = config_from(config, given, trust=trust)
    with Display(OptionConsole(), given_config.rounds, "training") as display:
        run_loop(given_config, out=out, resume=resume, observer=display, messages=messages)
    display.say_total()
    OptionConsole().print(f"\nwritten to {out}: curves.png, report.html, metrics.jsonl", **PLAIN)


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folders that run, sweep or federate up wrote", metavar="RUN...")
    ],
    out: Annotated[Path, typer.Option(help="folder for the page and the pictures")] = Path("runs/report"),
) -> None:
    """Compare runs in pictures and one page: accuracy over rounds, bytes and simulated time, loss, norms."""
    show_report(runs, out)


def show_report(runs: list[Path], out: Path) -> None:
    """Write the page that compares runs, and print its table."""
    from cfedavg.report import write_report

    made = write_report(runs, out)
    console = OptionConsole()
    console.print(_narrow(made.table()))
    console.print(f"{made.headline}\n{made.page}  {made.picture}", **PLAIN)


def _narrow(lines: list[list[str]]) -> Table:
    """Return a report's table for a terminal: fewer columns than on the page, so that labels have room."""
    shown = [i for i, name in enumerate(lines[0]) if name not in ("rounds", "best", "seeds")]
    header, *rows = ([line[i] for i in shown] for line in lines)
    table = Table(Column(header[0], overflow="fold"), box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header[1:], 1):
        texts = [*name.split(), *(row[i] for row in rows)]
        table.add_column(Text(name), justify="right", width=max(map(len, texts)))
    for row in rows:
        table.add_row(*map(Text, row))  # as Text: a label must not act as markup
    return table
