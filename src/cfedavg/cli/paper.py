"""`cfedavg reproduce` and `claims`: the paper's figures and what it says, again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cfedavg.cli.console import OptionConsole, ranks
from cfedavg.cli.options import flag
from cfedavg.core.errors import InputError

# What --draw has no use for.
_TRAINING = {"resume", "minutes", "rounds", "data_dir", "device", "precision"}


def reproduce(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="experiments, or TOML files of your own; none: list them", metavar="NAME..."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke: minutes on a laptop; small: an hour or so; paper: its own settings")
    ] = "small",
    seeds: Annotated[
        int | None,
        typer.Option(
            help="runs of each cell, with seeds 0, 1, ...",
            show_default="1; all there are with --draw",
            min=1,
            max=20,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder of cells and figures", show_default="runs/reproduce/SCALE")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on where an earlier call stopped")] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="train nothing: draw what is there; without names, everything")
    ] = False,
    minutes: Annotated[
        float, typer.Option(help="stop after as many, to go on with --resume", show_default="no limit", min=0)
    ] = float("inf"),
    only: Annotated[
        list[str] | None, typer.Option(help="only cells of these names; * stands for anything; repeatable")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="only so many of each run", show_default="all", min=1)
    ] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="a folder with the parquet files of the data sets, or a folder of each")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    precision: Annotated[str, typer.Option(help="of the local steps: float32, tf32 or bf16")] = "float32",
) -> None:
    """Make the paper's figures again: train what is missing, cell by cell, and draw.

    For instance: cfedavg reproduce fig1-mnist --scale smoke
    """
    from cfedavg.reproduce import command

    given = _typed(context)
    how = {"device": device, "precision": precision} | ({"data_dir": data_dir} if data_dir else {})
    console = OptionConsole()
    if draw:
        if idle := _TRAINING.intersection(given):
            raise InputError(f"{flag(min(idle))} is for training, and --draw trains nothing: leave one out")
        command.draw(names, scale, seeds, out, only, console)
        return
    if not names:
        if given:
            raise InputError(f"{flag(given[0])} needs a NAME; `cfedavg reproduce` alone lists them")
        command.show_all(console)
        return
    if ranks() > 1:
        raise InputError("start `cfedavg run` with torchrun; reproduce uses one process")
    grid = command.open_grid(names, scale, seeds or 1, out, only, rounds, resume, console)
    command.carry_out(grid, how, minutes, console)


def _typed(context: typer.Context) -> list[str]:
    """What was given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def claims(
    folder: Annotated[Path, typer.Argument(help="--out of `cfedavg reproduce`", metavar="FOLDER")],
    scale: Annotated[str, typer.Option(help="of which cells are judged: smoke, small or paper")] = "paper",
    out: Annotated[Path | None, typer.Option(help="a Markdown file for the whole table")] = None,
    words: Annotated[
        Path | None, typer.Option(help="a TOML file with title, intro and, by claim, \\[why]; for --out")
    ] = None,
) -> None:
    """Hold the paper's claims against what was reproduced: verdicts with the numbers that decide."""
    from cfedavg.reproduce import command

    command.judge(folder, scale, out, words, OptionConsole())
