"""The command `cfedavg sweep`: run a grid of configurations, resume it after a stop, and draw its results."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cfedavg.cli import console
from cfedavg.cli.console import ConfigFile, Formats, Resume, Track, flag, takes_config, trust_option
from cfedavg.cli.training import report
from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.simulate.vectorised.compiler import start_compiler

if TYPE_CHECKING:
    from cfedavg.callbacks import CallbackList
    from cfedavg.callbacks.progress import Board
    from cfedavg.sweep import Grid, Sweep
    from cfedavg.sweep.runner import Show


GridFile = Annotated[
    Path | None,
    typer.Argument(help="TOML file of the grid; see docs/runs.md", metavar="GRID.toml"),
]
Vary = Annotated[
    list[str] | None,
    typer.Option(
        help='field=value|value|..., for instance "seed=0|1|2"; field,field=... varies them together; '
        "repeatable",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(help="number of seeds for each setting: 0, 1, ...; --seed is ignored", min=1, max=1000),
]
Only = Annotated[
    list[str] | None, typer.Option(help="only cells of these names; * stands for anything; repeatable")
]
Minutes = Annotated[float, typer.Option(help="stop after this many minutes; continue with --resume", min=0)]
Together = Annotated[
    int,
    typer.Option(
        help="how many runs train at once; 0: as many as fill a GPU, and one on a CPU", min=0, max=1000
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="folder to write to", show_default="runs/sweep-DATE-TIME")
]
Draw = Annotated[bool, typer.Option("--draw", help="train nothing; plot the finished cells in --out")]


@takes_config()
def sweep(
    given: dict[str, Any],
    grid: GridFile = None,
    vary: Vary = None,
    seeds: Seeds = None,
    only: Only = None,
    minutes: Minutes = math.inf,
    together: Together = 0,
    draw: Draw = False,
    formats: Formats = None,
    out: Out = None,
    resume: Resume = False,
    track: Track = None,
    config: ConfigFile = None,
    trust: Annotated[bool, trust_option("GRID.toml or the --config file")] = False,
) -> None:
    """Run a grid of configurations and compare: mean and spread over seeds, in a figure, a table and a page.

    For instance: cfedavg sweep --vary "compressor,compressor_down=none|topk(0.9) >> int4" --vary "seed=0|1|2"
    """
    if not draw:
        start_compiler(given.get("device", "auto"), given.get("engine", "auto"))  # before slow imports
    from cfedavg.callbacks.progress import Board
    from cfedavg.report.exports import check_formats
    from cfedavg.sweep import Sweep

    check_formats(formats or ())  # before anything is trained

    if console.ranks() > 1:
        raise InputError("torchrun must not start a sweep; leave torchrun out and set --workers")
    made = _grid(grid, vary or [], config, given, trust)
    chosen = Sweep([made], out or Path(), tuple(range(seeds)) if seeds else None, only or ("*",), console.say)
    if draw:
        idle = {"resume": resume, "minutes": minutes < math.inf, "together": together > 0}
        cuts = grid is not None and "rounds" in given  # without a file, --rounds belongs to the settings
        _draw(chosen, idle | {"rounds": cuts}, out, formats or ("png",))
        return
    show = _track(Board(console.OptionConsole()), track or [])
    chosen = dataclasses.replace(chosen, out=console.choose_folder(out, resume, "sweep-%Y%m%d-%H%M%S"))
    chosen.open(resume=resume)
    try:
        command = _command(grid, {"vary": vary, "seeds": seeds, **given})
        chosen.run(command=command, minutes=minutes, show=show, together=together)
    finally:  # draw all cells in the folder, also after Ctrl-C
        every_cell = dataclasses.replace(made, rounds=None)
        dataclasses.replace(chosen, studies=[every_cell], seeds=None, only=("*",)).draw(formats or ("png",))
    if runs := [chosen.out / name for name in chosen.found if (chosen.out / name).is_dir()]:
        report(runs, chosen.out, formats)


def _track(board: Board, names: list[str]) -> Show:
    """Return a function that follows a run: on the screen, and by a tracker for each name."""
    from cfedavg.callbacks import CallbackList, make_trackers

    make_trackers(names)  # raises now if a library is missing

    @contextmanager
    def show(title: str, rounds: int) -> Iterator[CallbackList]:
        with board.show(title, rounds) as display:
            yield CallbackList([display, *make_trackers(names)])

    return show


def _draw(chosen: Sweep, idle: dict[str, bool], out: Path | None, formats: Sequence[str]) -> None:
    """Draw the finished cells in `out`; refuse the options in `idle`, which only training uses, if given."""
    for name, is_given in idle.items():
        if is_given:
            raise InputError(f"{flag(name)} must not be given with --draw, which trains nothing")
    if not out:
        raise InputError("--draw needs --out, the folder of the cells")
    if not chosen.draw(formats):
        raise InputError(f"`draw`: {out} holds no cell of this sweep; run the sweep without --draw first")


def _grid(
    path: Path | None, vary: list[str], config: Path | None, given: dict[str, Any], trust: bool
) -> Grid:
    """Return the grid in the file `path`; without a file, the grid that --vary and other options describe."""
    from cfedavg.sweep import Grid, read_table

    if path:
        if config:
            raise InputError("--config must not be given with GRID.toml, which has its own [base]")
        typed = {name: value for name, value in given.items() if name != "rounds"}
        table, rounds = read_table(path), given.get("rounds")
        return Grid.from_table(path.stem, table, typed=typed, vary=vary, trust=trust, rounds=rounds)
    if not vary:
        raise InputError("a sweep needs GRID.toml or --vary")
    usual = dataclasses.asdict(Config())
    fields = dataclasses.asdict(console.config_from(config, None, given, trust=trust))
    typed = {name: value for name, value in fields.items() if value is not None and value != usual[name]}
    return Grid.from_table("sweep", {}, typed=typed, vary=vary)


def _command(grid: Path | None, typed: dict[str, Any]) -> str:
    """Return the command that runs a cell again; leave out the folders of the grid file and of the data."""
    words = ["cfedavg", "sweep", *([grid.name] if grid else [])]
    for name, value in typed.items():
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            words += [flag(name), "DIR" if name == "data_dir" else str(each)]
    return shlex.join(words)
