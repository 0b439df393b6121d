"""`cfedavg run`, `sweep` and `report`: train, once or in a grid, and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from cfedavg.cli.options import ConfigFile, Out, Resume, Trust, config_from, folder, takes_config
from cfedavg.cli.voice import PLAIN, OptionConsole, ranks
from cfedavg.config import Config
from cfedavg.errors import InputError
from cfedavg.files import exists


@takes_config()
def run(
    given: dict[str, Any],
    out: Out = None,
    resume: Resume = False,
    config: ConfigFile = None,
    trust: Trust = False,
    messages: Annotated[
        Path | None,
        typer.Option(help="folder to keep every client's message in, for `cfedavg inspect`"),
    ] = None,
) -> None:
    """Train, and write a folder with metrics, checkpoint, curves and a page.

    With no options: the MNIST subset inside the package, 10 clients of 2 classes each, top-k 0.99.
    """
    out = folder(out, resume, "%Y%m%d-%H%M%S")
    if resume and not config and exists(out / "config.toml"):
        config = out / "config.toml"
    train(config_from(config, given, trust=trust), out, resume=resume, messages=messages)
    OptionConsole().print(f"\nwritten to {out}: curves.png, report.html, metrics.jsonl", **PLAIN)


def train(
    config: Config, out: Path, *, resume: bool, title: str = "training", messages: Path | None = None
) -> None:
    """One run with its display."""
    from cfedavg.display import Display
    from cfedavg.loop import run as run_loop

    with Display(OptionConsole(), config.rounds, title) as display:
        run_loop(config, out=out, resume=resume, observer=display, messages=messages)


@takes_config()
def sweep(
    given: dict[str, Any],
    vary: Annotated[
        list[str], typer.Option("--vary", help='field=value|value|..., for instance "seed=0|1|2"; repeatable')
    ],
    out: Out = None,
    resume: Resume = False,
    config: ConfigFile = None,
    trust: Trust = False,
) -> None:
    """Run a small grid and compare: mean and spread over the seeds, and one page.

    For instance: cfedavg sweep --vary "compressor=none|topk(0.99) >> bf16" --vary "seed=0|1|2"
    """
    from cfedavg.sweep import cells

    if ranks() > 1:
        raise InputError("start `cfedavg run` with torchrun; sweep uses --workers")
    out = folder(out, resume, "sweep-%Y%m%d-%H%M%S")
    grid = cells(config_from(config, given, trust=trust), vary)
    for number, (name, cell) in enumerate(grid.items(), 1):
        train(cell, out / name, resume=resume, title=f"{number}/{len(grid)} {name}")
    _report([out / name for name in grid], out)


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of runs, made by run or sweep", metavar="RUN...")
    ],
    out: Annotated[Path, typer.Option(help="folder for the page and the pictures")] = Path("runs/report"),
) -> None:
    """Compare runs: accuracy over rounds, bytes and simulated time, loss, norms; pictures and one page."""
    _report(runs, out)


def _report(runs: list[Path], out: Path) -> None:
    from cfedavg.report import write_report

    made = write_report(runs, out)
    console = OptionConsole()
    header, *rows = made.table()
    shown = [i for i, name in enumerate(header) if name not in ("best", "downlink", "seeds")]
    table = Table(*(Column(Text(header[i]), overflow="fold") for i in shown))
    for row in rows:
        table.add_row(*(Text(row[i]) for i in shown))  # labels hold what a configuration says: no markup
    console.print(table)
    console.print(f"{made.headline}\n{made.page}  {made.picture}", **PLAIN)
