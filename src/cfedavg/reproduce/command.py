"""What `cfedavg reproduce` does, and shows."""

from __future__ import annotations

import dataclasses
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file, write_atomic
from cfedavg.core.option import any_of
from cfedavg.core.units import format_time
from cfedavg.reproduce import archive, claims, studies
from cfedavg.reproduce.archive import Entry
from cfedavg.reproduce.experiment import SCALES
from cfedavg.reproduce.grid import CELLS, MANY, Grid


def show_all(console: Console) -> None:
    """A list of what there is."""
    table = Table("name", "in the paper", "what", "cells", title="cfedavg reproduce NAME...")
    for study in map(studies.find, studies.names()):
        table.add_row(study.name, study.paper, study.title, str(len(study.cells("paper", 1))))
    console.print(table)


def open_grid(
    names: list[str],
    scale: str,
    seeds: int,
    out: Path | None,
    only: list[str] | None,
    rounds: int | None,
    resume: bool,
    console: Console,
) -> Grid:
    """The grid with what is done of it; nothing has been written yet."""
    chosen = [studies.find(name) for name in dict.fromkeys(names)]
    grid = Grid(chosen, scale, seeds, _folder(out, scale), names, only or ("*",), rounds)
    damaged = grid.look()
    begun = len(grid.found) + sum(grid.started(name) > 0 for name in grid.missing)
    if begun and grid.missing and not resume:
        raise InputError(
            f"`out`: {grid.out} holds {begun} of the {len(grid.cells)} cells, done or begun; "
            "set `resume` to go on, or choose another folder"
        )
    for sentence in damaged:
        _speaker(console)(f"{sentence}: the cell is done again")
    return grid


def _speaker(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


def _folder(out: Path | None, scale: str) -> Path:
    usual = Path("runs/reproduce") / _known(scale)
    return out or usual


def _known(scale: str) -> str:
    if scale not in SCALES:
        raise InputError(f"`scale` must be {any_of(SCALES)}, got {scale!r}")
    return scale


def draw(
    names: list[str] | None,
    scale: str,
    seeds: int | None,
    out: Path | None,
    only: list[str] | None,
    console: Console,
) -> None:
    """Figures and tables of the cells that are there."""
    chosen = [studies.find(name) for name in dict.fromkeys(names or studies.names())]
    grid = Grid(chosen, scale, seeds or MANY, _folder(out, scale), only=only or ("*",))
    if not _show_pictures(grid, console):
        raise InputError(f"`draw`: {grid.out} holds none of these cells; {_to_make_some(grid.out, scale)}")


def _to_make_some(folder: Path, scale: str) -> str:
    return f"make some with `cfedavg reproduce NAME --scale {scale} --out {folder}`"


def _show_pictures(grid: Grid, console: Console) -> bool:
    """Whether there are any."""
    say = _speaker(console)
    pictures = grid.draw(say)
    for picture in pictures:
        say(f"drawn: {picture}, and its table beside it")
    return bool(pictures)


def carry_out(grid: Grid, how: Mapping[str, Any], minutes: float, console: Console) -> None:
    """Measures what is missing, then draws all there is."""
    _show_state(grid, console)
    try:
        done = grid.measure(how, _command(grid, how), minutes, console)
    finally:
        _show_pictures(dataclasses.replace(grid, seeds=MANY, only=("*",), rounds=None), console)
    if not done:
        console.print(
            f"the time is over: {len(grid.missing)} cells are left; `resume` goes on", highlight=False
        )


def _show_state(grid: Grid, console: Console) -> None:
    """Which cells are done, which are begun, and how long the rest may take."""
    begun = {name: grid.started(name) for name in grid.missing}
    for name, rounds in begun.items():
        if rounds:
            of = grid.cells[name][1].get("rounds", "?")
            console.print(f"{name}: begun, {rounds} of {of} rounds", highlight=False, markup=False)
    left = grid.seconds_left()
    console.print(
        f"{len(grid.found)} of {len(grid.cells)} cells are done"
        + (f"; the others take about {format_time(left)}" if grid.missing and left else ""),
        highlight=False,
    )


def _command(grid: Grid, how: Mapping[str, Any]) -> str:
    """How to make the cell again, wherever the data is."""
    words = ["cfedavg", "reproduce", *(Path(name).name for name in grid.given)]
    words += ["--scale", grid.scale, "--seeds", str(grid.seeds)]
    words += ["--rounds", str(grid.rounds)] if grid.rounds else []
    words += ["--device", str(how["device"]), "--precision", str(how["precision"])]
    return shlex.join(words) + (" --data-dir DIR" if "data_dir" in how else "")


def judge(folder: Path, scale: str, out: Path | None, words: Path | None, console: Console) -> None:
    """Every claim with its verdict; the numbers go into the file."""
    if words and not out:
        raise InputError("`words` needs `out`, the file that the words are for")
    found, planned = of_scale(archive.read_all(folder / CELLS), scale)
    if not found:
        raise InputError(f"{folder} holds no cells of the scale {scale}; {_to_make_some(folder, scale)}")
    judged = claims.judge_all(found, planned)
    if out:
        write_atomic(out, page(judged, words).encode())
    table = Table("claim", "verdict", "what came out")
    for claim, finding in judged:
        if finding:
            table.add_row(*map(Text, (claim.text, finding.verdict, finding.numbers)))
    console.print(table)
    missing = sum(finding is None for _, finding in judged)
    console.print(f"{len(judged) - missing} claims judged from {len(found)} cells, {missing} not run yet")
    if out:
        console.print(f"written to {out}", highlight=False, markup=False)


def of_scale(found: dict[str, Entry], scale: str) -> tuple[dict[str, Entry], dict[str, int]]:
    """The cells that are what their names say at this scale, and how many rounds the runs should have.

    Of a run, the beginning may be all there is.
    """
    every = [(study, study.cells(_known(scale), MANY)) for study in map(studies.find, studies.names())]
    wanted = {name: (study, settings) for study, cells in every for name, settings in cells.items()}
    mine, planned = dict[str, Entry](), dict[str, int]()
    for name, entry in found.items():
        study, settings = wanted.get(name, (None, {}))
        if study is None or not studies.begins(entry.settings, settings):
            continue
        if missing := study.lacks(entry):
            raise InputError(f"the cell {name} lacks {missing[0]}: make it again")
        mine[name] = entry
        if "dataset" in settings:
            planned[name] = settings["rounds"]
    return mine, planned


def page(judged: claims.Judged, words: Path | None) -> str:
    """The claims as Markdown, with words of one's own around them."""
    table = _words(words, {claim.name for claim, _ in judged}) if words else {}
    why = table.get("why", {})
    title, intro = table.get("title", "The claims of the paper"), table.get("intro", "").strip()
    short, long = claims.overview(judged), claims.as_markdown(judged, why)
    weak = claims.weak_checks(judged)
    weak = f"## Checks that say little\n\n{weak}\n" if weak else ""
    return f"# {title}\n\n{intro}\n\n## The verdicts\n\n{short}\n{weak}## The numbers\n\n{long}"


def _words(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(read_file(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"`words`: cannot read {path} ({getattr(error, 'strerror', error)})") from None
    if strange := table.keys() - {"title", "intro", "why"}:
        raise InputError(f"`words`: {path} has an unknown key {min(strange)!r}; known are title, intro, why")
    why = table.get("why", {})
    texts = isinstance(why, dict) and [table.get("title", ""), table.get("intro", ""), *why.values()]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"`words`: {path} must hold texts: title, intro and, by claim, [why]")
    if unknown := why.keys() - known:
        raise InputError(f"`words`: there is no claim {min(unknown)!r} to explain")
    return table
