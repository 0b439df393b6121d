"""The command `cfedavg tune`: choose compressors, local work and rates for a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from cfedavg.cli import console
from cfedavg.cli.console import ConfigFile, takes_config, trust_option
from cfedavg.core.config import OPTIONS
from cfedavg.core.errors import InputError
from cfedavg.core.files import exists

FIELDS = tuple(name for name in OPTIONS if name != "rounds")  # the budget decides the rounds

Budget = Annotated[
    str | None,
    typer.Option(
        help="what the whole training may spend: bytes of all clients, up and down, such as 10MB; or "
        "simulated time such as 30min, with --link",
        metavar="AMOUNT",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(help="end the search after about so many minutes, or before", show_default="10"),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        help="a field of --config to leave as it is: compressor, compressor_down, local_steps, local_epochs, "
        "eta_local or server_optimiser; repeatable. A field that you type is kept anyway",
        metavar="FIELD",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="folder to write to", show_default="runs/tune-DATE-TIME")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="continue the search in --out; with --minutes, for so many more")
]


@takes_config(FIELDS)
def tune(
    given: dict[str, Any],
    budget: Budget = None,
    minutes: Minutes = None,
    keep: Keep = None,
    out: Out = None,
    resume: Resume = False,
    config: ConfigFile = None,
    trust: Annotated[bool, trust_option("the --config file or the resumed search")] = False,
) -> None:
    """Choose compressors, local work and rates that get the most out of a budget of bytes or time.

    Candidates train on a small part of the budget. The best third goes on to a larger part, and so on.
    The default, which is what your options say, stays to the end and is beaten or kept.
    Candidates are compared on samples held out of the clients' data, not on the test set.
    The result is a file for `cfedavg run --config`.

    For instance: cfedavg tune --budget 10MB --minutes 5 --dataset mnist --clients 100 --model mlp
    """
    if console.ranks() > 1:
        raise InputError("torchrun must not start a search; leave torchrun out")
    folder = console.choose_folder(out, resume, "tune-%Y%m%d-%H%M%S")
    options = console.config_from(config, folder if resume else None, given, trust=trust)
    from cfedavg.callbacks.progress import Board
    from cfedavg.tuner.space import TUNED
    from cfedavg.tuner.tuner import tune_with

    kept = {*(keep or ()), *(name for name in given if name in TUNED)}
    board = Board(console.OptionConsole())
    try:
        tuned = tune_with(
            board, options, None, budget=budget, minutes=minutes, out=folder, resume=resume,
            keep=sorted(kept) if kept or not resume else None,
        )  # fmt: skip
    except KeyboardInterrupt:
        if exists(folder / "tune.json"):
            console.say(f"stopped: continue with `cfedavg tune --out {folder} --resume`")
        raise
    console.OptionConsole().print(_show(tuned.table()))
    console.say(f"{tuned.summary}\n{tuned.config.rounds} rounds spend about {tuned.budget}:\n")
    console.say(f"  cfedavg run --config {folder / 'tuned.toml'}\n\nalso in {folder}: rungs.md, tune.png")


def _show(lines: list[list[str]]) -> Table:
    """Return the table of a search for a terminal: the column of changes takes the room that is left."""
    header, *rows = lines
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        score = name.startswith("at ")
        table.add_column(Text(name), justify="right" if score else "left", overflow="fold", no_wrap=i != 1)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
