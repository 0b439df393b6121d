"""`cfedavg run`, `sweep` and `report`: train, once or in a grid, and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from cfedavg.cli.console import PLAIN, OptionConsole, ranks
from cfedavg.cli.options import ConfigFile, Out, Resume, Trust, config_from, folder, takes_config
from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
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
    out = folder(out, resume, "%Y%m%d-%H%M%S")
    if resume and not config and exists(out / "config.toml"):
        config = out / "config.toml"
    train(config_from(config, given, trust=trust), out, resume=resume, messages=messages)
    OptionConsole().print(f"\nwritten to {out}: curves.png, report.html, metrics.jsonl", **PLAIN)


def train(
    config: Config, out: Path, *, resume: bool, title: str = "training", messages: Path | None = None
) -> None:
    """Run a configuration and show its progress."""
    from cfedavg.cli.progress import Display
    from cfedavg.simulate.run import run as run_loop

    with Display(OptionConsole(), config.rounds, title) as display:
        run_loop(config, out=out, resume=resume, observer=display, messages=messages)
    display.say_total()


@takes_config()
def sweep(
    given: dict[str, Any],
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            help='field=value|value|..., for instance "seed=0|1|2"; field,field=... gives fields one value; '
            "repeatable",
        ),
    ],
    out: Out = None,
    resume: Resume = False,
    config: ConfigFile = None,
    trust: Trust = False,
) -> None:
    """Run a small grid and compare: mean and spread over the seeds, and one page.

    For instance: cfedavg sweep --vary "compressor,compressor_down=none|topk(0.9) >> int4" --vary "seed=0|1|2"
    """
    from cfedavg.simulate.sweep import cells

    if ranks() > 1:
        raise InputError("start `cfedavg run` with torchrun; sweep uses --workers")
    out = folder(out, resume, "sweep-%Y%m%d-%H%M%S")
    grid = cells(config_from(config, given, trust=trust), vary)
    for number, (name, cell) in enumerate(grid.items(), 1):
        train(cell, out / name, resume=resume, title=f"{number}/{len(grid)} {name}")
    _report([out / name for name in grid], out)


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folders that run, sweep or federate up wrote", metavar="RUN...")
    ],
    out: Annotated[Path, typer.Option(help="folder for the page and the pictures")] = Path("runs/report"),
) -> None:
    """Compare runs in pictures and one page: accuracy over rounds, bytes and simulated time, loss, norms."""
    _report(runs, out)


def _report(runs: list[Path], out: Path) -> None:
    from cfedavg.report import write_report

    made = write_report(runs, out)
    console = OptionConsole()
    console.print(_narrow(made.table()))
    console.print(f"{made.headline}\n{made.page}  {made.picture}", **PLAIN)


def _narrow(lines: list[list[str]]) -> Table:
    """The table for a terminal: without what the page alone has room for, and with room for labels."""
    shown = [i for i, name in enumerate(lines[0]) if name not in ("rounds", "best", "seeds")]
    header, *rows = ([line[i] for i in shown] for line in lines)
    table = Table(Column(header[0], overflow="fold"), box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header[1:], 1):
        texts = [*name.split(), *(row[i] for row in rows)]
        table.add_column(Text(name), justify="right", width=max(map(len, texts)))
    for row in rows:
        table.add_row(*map(Text, row))  # labels hold what a configuration says: no markup
    return table
