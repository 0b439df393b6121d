"""The cells of studies, measured one after another: stopped at any moment, it goes on where it was."""

from __future__ import annotations

import fnmatch
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cfedavg import __version__
from cfedavg.cli.progress import Display
from cfedavg.core.errors import InputError
from cfedavg.core.files import make_folder, write_atomic
from cfedavg.core.run_files import Record
from cfedavg.core.units import format_time
from cfedavg.reproduce import archive
from cfedavg.reproduce.archive import Damaged, Entry
from cfedavg.reproduce.experiment import MACHINE
from cfedavg.reproduce.studies import Settings, Study, begins, same
from cfedavg.reproduce.tables import as_markdown
from cfedavg.reproduce.training import rounds_done

CELLS, WORK = "cells", "work"
MANY = 20  # seeds that a figure shows, if there are as many


class TimeUp(KeyboardInterrupt):
    """The time that was given is over; a run saves its state, as after Ctrl-C."""


class Watch(Display):
    """Shows a cell as it goes, and stops it when the time is over."""

    def __init__(self, console: Console, rounds: int, title: str, until: float) -> None:
        super().__init__(console, rounds, title)
        self.until, self.seconds = until, 0.0

    def begin(self, rows: list[Record]) -> None:
        super().begin(rows)
        self.seconds = math.fsum(row["seconds"] for row in rows)

    def row(self, row: Record) -> None:
        super().row(row)
        self.seconds += row["seconds"]
        if time.monotonic() > self.until and row["round"] + 1 < self.rounds:
            raise TimeUp


def read(path: Path, study: Study) -> Entry:
    """The cell in a file; Damaged if it is not as it was written, or not what the study asks for."""
    entry = archive.read(path)
    if missing := study.lacks(entry):
        raise Damaged(f"{path} lacks {missing[0]}")
    return entry


@dataclass(frozen=True)
class Grid:
    """The cells of some studies at one scale, in a folder; those of other names in it are left alone."""

    studies: Sequence[Study]
    scale: str
    seeds: int
    out: Path
    given: Sequence[str] = ()  # the names of the studies, as they were typed
    only: Sequence[str] = ("*",)  # patterns of names
    rounds: int | None = None  # of a run at most
    found: dict[str, Entry] = field(default_factory=dict)

    @cached_property
    def cells(self) -> dict[str, tuple[Study, Settings]]:
        """Each cell once, whatever number of studies it belongs to."""
        made = {name: (study, each) for study, plan in self._plans for name, each in plan.items()}
        if not made:
            one = next(iter(self.studies[0].cells(self.scale, 1)))
            raise InputError(f"`only`: no cell is named {' or '.join(self.only)}; one is {one}")
        return made

    @cached_property
    def _plans(self) -> list[tuple[Study, dict[str, Settings]]]:
        """Each study with those of its cells that are asked for."""
        return [(study, self._chosen(study)) for study in self.studies]

    def _chosen(self, study: Study) -> dict[str, Settings]:
        return {
            name: self._cut(settings)
            for name, settings in study.cells(self.scale, self.seeds).items()
            if any(fnmatch.fnmatch(name, pattern) for pattern in self.only)
        }

    def _cut(self, settings: Settings) -> Settings:
        """The beginning of a run, where all of it takes too long."""
        if self.rounds is None or "dataset" not in settings:  # a small study's rounds belong to it
            return settings
        return settings | {"rounds": min(self.rounds, settings["rounds"])}

    def look(self) -> list[str]:
        """Finds what is done already, and says what is damaged: not to be trusted, it counts as missing."""
        damaged = []
        for name, (study, settings) in self.cells.items():
            path = self.out / CELLS / f"{name}.json"
            if not path.exists():
                continue
            try:
                entry = read(path, study)
            except Damaged as error:
                damaged.append(str(error))
                continue
            if not same(entry.settings, settings):
                raise InputError(f"`out`: {path} holds {_difference(entry.settings, settings)}")
            self.found[name] = entry
        return damaged

    @property
    def missing(self) -> list[str]:
        return [name for name in self.cells if name not in self.found]

    def started(self, name: str) -> int:
        """How many rounds of a cell are done that is not complete."""
        return rounds_done(self.out / WORK / name)

    def seconds_left(self) -> float | None:
        """From the time that cells of the same study took, or else all cells."""
        took: dict[str, list[float]] = {}
        for name, entry in self.found.items():
            took.setdefault(self.cells[name][0].name, []).append(entry.made["seconds"])
        every = [seconds for each in took.values() for seconds in each]
        if not every:
            return None
        means = {name: sum(each) / len(each) for name, each in took.items()}
        return sum(
            means.get(self.cells[name][0].name, sum(every) / len(every)) * self._to_do(name)
            for name in self.missing
        )

    def _to_do(self, name: str) -> float:
        """The part of a cell that is left."""
        rounds: float = self.cells[name][1].get("rounds", math.inf)
        return 1 - self.started(name) / rounds

    def measure(self, how: Mapping[str, Any], command: str, minutes: float, console: Console) -> bool:
        """Does the missing cells while there is time, but at least a round; whether all are done."""
        until = time.monotonic() + 60 * minutes
        for folder in (CELLS, WORK):
            make_folder(self.out / folder, "`out`")
        for number, name in enumerate(self.missing):
            if number and time.monotonic() > until:
                return False
            try:
                self._cell(name, how, command, until, console)
            except TimeUp:
                return False
            left = self.seconds_left()
            console.print(
                f"{name}: done, {len(self.found)} of {len(self.cells)} cells"
                + (f", about {format_time(left)} left" if self.missing and left else ""),
                highlight=False,
                markup=False,
            )
        return True

    def _cell(self, name: str, how: Mapping[str, Any], command: str, until: float, console: Console) -> None:
        study, settings = self.cells[name]
        work, began = self.out / WORK / name, time.monotonic()
        title = f"{len(self.found) + 1}/{len(self.cells)} {name}"
        if self.scale == "smoke":  # to start processes would take longer than such a cell
            how = {"workers": 1, **how}
        with Watch(console, settings.get("rounds", 1), title, until) as watch:
            values = study.measure(settings, work, how, watch)
        seconds = max(watch.seconds, time.monotonic() - began)  # rounds of earlier calls count
        device = how["device"] if "dataset" in settings else "cpu"  # small studies know no other
        made = {"command": command, "seconds": round(seconds, 1), **machine(device)}
        entry = Entry(name, settings | _precision(how, settings), values, made)
        archive.write(self.out / CELLS, entry)
        self.found[name] = archive.read(self.out / CELLS / f"{name}.json")
        shutil.rmtree(work, ignore_errors=True)

    def draw(self, say: Callable[[str], None]) -> list[Path]:
        """The figure and the table of every study of which something is there; says what is left out."""
        there, made = self._there(say), []
        for study, planned in self._plans:
            found = {name: there[name] for name in planned if name in there}
            if not found:
                continue
            rows = study.table(found)
            note = self._note(study, found, planned)
            write_atomic(self.out / f"{study.name}.png", study.figure(found, note))
            write_atomic(self.out / f"{study.name}.md", f"# {study.title}\n\n{as_markdown(rows)}".encode())
            made.append(self.out / f"{study.name}.png")
        return made

    def _there(self, say: Callable[[str], None]) -> dict[str, Entry]:
        """The cells in the folder, whole or cut, that are of this grid."""
        found, others = {}, []
        for path in sorted((self.out / CELLS).glob("*.json")):
            if path.stem not in self.cells:
                continue
            try:
                entry = read(path, self.cells[path.stem][0])
            except Damaged as error:
                say(f"{error}: it is not drawn")
                continue
            if begins(entry.settings, self.cells[entry.name][1]):
                found[entry.name] = entry
            else:
                others.append(entry.name)
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            names = ", ".join(others[:3]) + more
            say(f"not drawn, for their settings are not those of the scale {self.scale}: {names}")
        return found

    def _note(self, study: Study, found: Mapping[str, Entry], planned: Mapping[str, Settings]) -> str:
        """Where the numbers are from, for under the figure."""
        made = [entry.made for entry in found.values()]
        versions = sorted({each["version"] for each in made})
        hardware = sorted({each["hardware"] for each in made})
        own = {settings.get("dataset") for settings in study.cells("paper", 1).values()}
        cut = _together(_beginning(entry.settings, planned[name]) for name, entry in found.items())
        data = _together(_other_data(entry.settings, own) for entry in found.values())
        return f"scale {self.scale}{cut}{data}; cfedavg {', '.join(versions)} on {', '.join(hardware)}"


def _beginning(done: Settings, whole: Settings) -> str:
    """What to say of a run that was cut."""
    same_length = done.get("rounds") == whole.get("rounds")
    return "" if same_length else f"the first {done['rounds']} of {whole['rounds']} rounds"


def _other_data(settings: Settings, own: set[str | None]) -> str:
    """What to say of a run on other data than the experiment's own, as at the smaller scales."""
    dataset = settings.get("dataset")
    return "" if dataset in own else "on embedded digits" if dataset == "embedded" else f"on {dataset}"


def _together(remarks: Iterable[str]) -> str:
    """Remarks on single cells as one on all; what is not true of all of them is so in part.

    >>> _together(["cut", "cut"]), _together(["", "cut"]), _together([""])
    (', cut', ', in part cut', '')
    """
    different = sorted(set(remarks))
    part = "in part " if len(different) > 1 else ""
    return "".join(f", {part}{remark}" for remark in different if remark)


def machine(device: str) -> dict[str, str]:
    """By what a cell was computed."""
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    index = torch.device(device).index if device != "auto" else None
    hardware = torch.cuda.get_device_name(index) if cuda else processor()
    return {
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": hardware,
    }


def processor() -> str:
    """The processor's name, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.machine()


def _precision(how: Mapping[str, Any], settings: Settings) -> Settings:
    """Of the local steps, where there are any: not part of what a cell is, but worth knowing."""
    return {"precision": how["precision"]} if "precision" in settings and "precision" in how else {}


def _difference(found: Settings, wanted: Settings) -> str:
    """What a cell is that is not the wanted one, and what to do."""
    if begins(found, wanted):
        return (
            f"{_beginning(found, wanted)}, without what it takes to go on; "
            f"set `rounds` to {found['rounds']}, or choose another folder"
        )
    keys = [key for key in {**found, **wanted} if key not in MACHINE]
    name = next(key for key in keys if found.get(key) != wanted.get(key))
    differs = f"{name} is {found.get(name)!r}, here {wanted.get(name)!r}"
    return f"a cell of other settings ({differs}); choose another folder"
