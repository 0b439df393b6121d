"""A sweep: it runs the cells (runs) of studies, writes them to a folder, and draws them.

Cells run one after another, or side by side if they can share a trainer (see `side_by_side`).
"""

from __future__ import annotations

import fnmatch
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from cfedavg import __version__
from cfedavg.callbacks import Callback, Start
from cfedavg.core.errors import InputError
from cfedavg.core.files import make_folder, write_atomic
from cfedavg.core.run_files import CHECKPOINT, METRICS, RESIDUALS, Record, read_rows
from cfedavg.core.units import format_time
from cfedavg.report import exports
from cfedavg.simulate.engines import Partners, choose_device
from cfedavg.simulate.side_by_side import Group, shared_fields
from cfedavg.simulate.steps import Steps, interleave
from cfedavg.simulate.workers import compile_coders_beside
from cfedavg.sweep import cells as archive
from cfedavg.sweep.cells import CELLS, DamagedCell, Found, SealedCell, Settings, Study

MANY = range(20)  # a figure shows the cells with these seeds that are in the folder
Show = Callable[[str, int], AbstractContextManager[Callback]]  # from a cell's title and rounds


class TimeUp(KeyboardInterrupt):
    """An interrupt when the sweep's minutes are over; the run saves its state, as after Ctrl-C."""


class _Timer(Callback):
    """A callback that passes calls to `inner`, adds up the rounds' seconds, and stops the run at `until`."""

    def __init__(self, inner: Callback, rounds: int, until: float) -> None:
        self.inner, self.rounds, self.until, self.seconds = inner, rounds, until, 0.0

    def on_message(self, text: str) -> None:
        self.inner.on_message(text)

    def on_wait(self, text: str) -> None:
        self.inner.on_wait(text)

    def on_begin(self, start: Start) -> None:
        self.inner.on_begin(start)
        self.seconds = math.fsum(row["seconds"] for row in start.rows)

    def on_end(self, error: BaseException | None) -> None:
        self.inner.on_end(error)

    def on_row(self, row: Record) -> bool | None:
        stop = self.inner.on_row(row)
        self.seconds += row["seconds"]
        if time.monotonic() > self.until and row["round"] + 1 < self.rounds:
            raise TimeUp
        return stop


class _GroupTimer(_Timer):
    """A timer of a cell that runs side by side with others; `said` holds what these have said."""

    def __init__(
        self, inner: Callback, rounds: int, until: float, name: str, partners: Partners, said: set[str]
    ) -> None:
        super().__init__(inner, rounds, until)
        self.name, self.partners, self.said = name, partners, said
        self.together = 1  # the most cells that were under way at once

    def on_message(self, text: str) -> None:
        """Pass on a text with the name of the cell; what cells say of the same kind of run comes once."""
        if self.seconds or text not in self.said:
            self.inner.on_message(f"{self.name}: {text}")
        self.said.add(text)

    def on_row(self, row: Record) -> bool | None:
        self.together = max(self.together, self.partners.active)
        return super().on_row(row)


@dataclass(frozen=True)
class _Call:
    """How a call of `Sweep.run` trains its cells."""

    command: str
    until: float
    show: Show


@dataclass(frozen=True)
class Sweep:
    """The cells (runs) of some studies, in the folder `out`; other cells in that folder are not touched."""

    studies: Sequence[Study]
    out: Path
    seeds: tuple[int, ...] | None = None  # None: the seeds of each study
    only: Sequence[str] = ("*",)  # patterns for cells' names, such as *-seed0
    say: Callable[[str], None] = print
    found: dict[str, SealedCell] = field(default_factory=dict)

    @cached_property
    def cells(self) -> dict[str, tuple[Study, Settings]]:
        """The study and the settings of each cell, by name; a cell that studies share is listed once."""
        return {name: (study, each) for study in self.studies for name, each in self._plan(study).items()}

    def _plan(self, study: Study, seeds: Iterable[int] | None = None) -> dict[str, Settings]:
        """Return, by name, the settings of those cells of a study whose names match `only`."""
        every = study.cells(self.seeds or seeds or study.seeds)
        if chosen := {n: s for n, s in every.items() if any(fnmatch.fnmatch(n, one) for one in self.only)}:
            return chosen
        one = next(iter(every))
        raise InputError(
            f"`only`: no cell's name matches {' or '.join(self.only)}; a cell's name is, for example, {one}"
        )

    def open(self, *, resume: bool) -> None:
        """Read the finished cells in `out`; a damaged cell counts as missing.

        Raise InputError if a cell has other settings than in this sweep, or if the sweep was begun but
        not finished, and `resume` is not set.
        """
        found, damaged = self._read(self.cells)
        for name, cell in found.items():
            if not archive.is_same(cell.settings, wanted := self.cells[name][1]):
                path = self.out / CELLS / f"{name}.json"
                raise InputError(f"`out`: {path} holds {_difference(cell.settings, wanted)}")
        self.found.update(found)
        begun = len(found) + sum(self._rounds_done(name) > 0 for name in self.missing)
        if begun and self.missing and not resume:
            raise InputError(
                f"`out`: {self.out} already holds {begun} of the {len(self.cells)} cells, done or begun; "
                "set `resume` to continue, or choose another folder"
            )
        for error in damaged:
            self.say(f"{error}: the cell is done again")

    def _read(
        self, cells: Mapping[str, tuple[Study, Settings]]
    ) -> tuple[dict[str, SealedCell], list[DamagedCell]]:
        """Return the cells that have a good file in the folder, and an error for each damaged file."""
        found, damaged = {}, []
        for name, (study, _) in cells.items():
            if not os.path.lexists(path := self.out / CELLS / f"{name}.json"):
                continue
            try:
                cell = archive.read_cell(path)
                if missing := study.missing_values(cell):
                    raise DamagedCell(f"{path} lacks the value {missing[0]}")
                found[name] = cell
            except DamagedCell as error:
                damaged.append(error)
        return found, damaged

    @property
    def missing(self) -> list[str]:
        return [name for name in self.cells if name not in self.found]

    def _rounds_done(self, name: str) -> int:
        return len(read_rows(self.out / name / METRICS))

    def seconds_left(self) -> float | None:
        """Return the estimated seconds that the missing cells will take, or None if no cell is finished.

        The estimate comes from finished cells of the same study, or else of all studies. A cell that ran side
        by side with others counts with its share of the time.
        """
        took: dict[str, list[float]] = {}
        for name, cell in self.found.items():
            seconds = cell.made["seconds"] / cell.made.get("together", 1)
            took.setdefault(self.cells[name][0].name, []).append(seconds)
        if not (every := [seconds for each in took.values() for seconds in each]):
            return None
        total = 0.0
        for name in self.missing:
            study, settings = self.cells[name]
            part = 1 - self._rounds_done(name) / settings.get("rounds", math.inf)
            total += part * sum(own := took.get(study.name, every)) / len(own)
        return total

    def run(
        self, *, command: str, minutes: float = math.inf, show: Show | None = None, together: int = 0
    ) -> bool:
        """Run the missing cells for `minutes`, but at least for one round; return whether all are done.

        Up to `together` cells run side by side; 0 means as many as fill a GPU, and on a CPU one.
        """
        call = _Call(command, time.monotonic() + 60 * minutes, show or (lambda *_: nullcontext(Callback())))
        make_folder(self.out / CELLS, "`out`")
        for name in self.missing:
            if rounds := self._rounds_done(name):
                self.say(f"{name}: begun, {rounds} of {self.cells[name][1].get('rounds', '?')} rounds")
        self.say(f"{len(self.found)} of {len(self.cells)} cells are done{self._time_left()}")
        is_first = True
        while self.missing and (is_first or time.monotonic() <= call.until):
            is_first = False
            try:
                if group := self._choose_group(together):
                    with compile_coders_beside():
                        interleave(self._cells_of(group, call), group.partners, group.size)
                else:
                    self._run_cell(self.missing[0], call)
            except TimeUp:
                break
        if self.missing:
            self.say(f"the time is over: {len(self.missing)} cells are left; continue with `resume`")
        return not self.missing

    def _choose_group(self, together: int) -> Group | None:
        """Return the first missing cell and those that can run beside it; None if it must run alone."""
        configs = {}
        for name in self.missing if together != 1 else ():
            study, settings = self.cells[name]
            if (config := study.config(name, settings)) and shared_fields(config):
                configs[name] = config
        first = configs.get(self.missing[0])
        if not first or (not together and choose_device(first.device).type == "cpu"):
            return None
        fields = shared_fields(first)
        same = {name: config for name, config in configs.items() if shared_fields(config) == fields}
        group = Group(same, together, self.say) if len(same) > 1 else None
        return group if group and group.size > 1 else None

    def _cells_of(self, group: Group, call: _Call) -> Iterator[Steps[None]]:
        """Yield the cells of a group, which begin one by one; none begins when the time is over."""
        said = set[str]()
        for number, name in enumerate(group.names()):
            if number and time.monotonic() > call.until:
                return
            yield self._steps_of_cell(name, group, call, said)

    def _steps_of_cell(self, name: str, group: Group, call: _Call, said: set[str]) -> Steps[None]:
        """Run a cell side by side with others; if the time is over, leave it to a later call."""
        began, config = time.monotonic(), group.configs[name]
        try:
            with call.show(name, config.rounds) as callback:
                timer = _GroupTimer(callback, config.rounds, call.until, name, group.partners, said)
                beside = partial(group.run, name)
                values = yield from archive.steps_of_cell(config, self.out / name, timer, beside)
        except TimeUp:
            return
        seconds = max(timer.seconds, time.monotonic() - began)
        self._seal(name, values, call.command, seconds, timer.together)

    def _time_left(self) -> str:
        left = self.seconds_left()
        return f"; the others take about {format_time(left)}" if self.missing and left else ""

    def _run_cell(self, name: str, call: _Call) -> None:
        """Run a cell alone."""
        study, settings = self.cells[name]
        began, rounds = time.monotonic(), settings.get("rounds", 1)
        with call.show(f"{len(self.found) + 1}/{len(self.cells)} {name}", rounds) as callback:
            timer = _Timer(callback, rounds, call.until)
            values = study.measure(name, settings, self.out / name, timer)
        self._seal(name, values, call.command, max(timer.seconds, time.monotonic() - began), 1)

    def _seal(self, name: str, values: dict[str, Any], command: str, seconds: float, together: int) -> None:
        """Write the file of a finished cell; `seconds` are those of all calls that ran the cell."""
        (study, settings), folder = self.cells[name], self.out / name
        made: dict[str, Any] = {"command": command, "seconds": round(seconds, 1), "together": together}
        made |= describe_machine(study.device())
        path = archive.write_cell(self.out / CELLS, SealedCell(name, settings, values, made))
        self.found[name] = archive.read_cell(path)
        # A finished cell is not resumed: remove its checkpoint and residuals, which may be gigabytes.
        (folder / CHECKPOINT).unlink(missing_ok=True)
        shutil.rmtree(folder / RESIDUALS, ignore_errors=True)
        self.say(f"{name}: done, {len(self.found)} of {len(self.cells)} cells{self._time_left()}")

    def draw(self, formats: Sequence[str] = ("png",)) -> list[Path]:
        """Write the figure and the table of each study that has cells; return the paths of the figures.

        Each figure is written in each of `formats`: png, pdf, svg, or csv for its numbers.
        """
        pictures = []
        exports.check_formats(formats)
        for study in self.studies:
            planned = self._plan(study, sorted({*MANY, *study.seeds}))
            if not (found := self._drawable(study, planned)):
                continue
            note = _note(study, found, planned)
            for form in dict.fromkeys(formats):
                picture = self.out / f"{study.name}.{form}"
                write_atomic(picture, _export(study, found, note, form))
                self.say(f"drawn: {picture}, and its table beside it")
                pictures.append(picture)
            table = f"# {study.title}\n\n{archive.write_markdown(study.table(found))}"
            write_atomic(self.out / f"{study.name}.md", table.encode())
        return pictures

    def _drawable(self, study: Study, planned: Mapping[str, Settings]) -> dict[str, SealedCell]:
        """Return the study's cells in the folder, also those with fewer rounds; say which are left out."""
        found, damaged = self._read({name: (study, settings) for name, settings in planned.items()})
        for error in damaged:
            self.say(f"{error}: it is not drawn")
        others = [n for n, cell in found.items() if not archive.is_beginning(cell.settings, planned[n])]
        if others:
            names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
            self.say(f"not drawn, for their settings are not those of {study.name}: {names}")
        return {name: cell for name, cell in found.items() if name not in others}


def _export(study: Study, found: Found, note: str, form: str) -> bytes:
    """Return a study's figure in a format; a PDF or SVG is as wide as a page of a paper."""
    if form == "csv":
        if not (panels := study.panels(found)):
            raise InputError(f"`formats`: the figure of {study.name} has no lines for a csv; choose another")
        return exports.write_csv([(panel, [group for group, _ in lines]) for panel, lines in panels])
    figure = study.figure(found, note)
    return exports.save_as(form, figure if form == "png" else exports.shrink(figure, exports.PAGE))


def _note(study: Study, found: Found, planned: Mapping[str, Settings]) -> str:
    """Return the text under a figure: versions, hardware, and the number of rounds if some are missing."""
    versions, hardware = (sorted({c.made[key] for c in found.values()}) for key in ("version", "hardware"))
    cuts = sorted({_cut(cell.settings, planned[name]) for name, cell in found.items()})
    part = "in part " if len(cuts) > 1 else ""
    about = [study.note, *(part + cut for cut in cuts if cut)]
    made = f"cfedavg {', '.join(versions)} on {', '.join(hardware)}"
    return "; ".join(filter(None, [", ".join(filter(None, about)), made]))


def _cut(done: Settings, whole: Settings) -> str:
    same = done.get("rounds") == whole.get("rounds")
    return "" if same else f"the first {done['rounds']} of {whole['rounds']} rounds"


def _difference(found: Settings, wanted: Settings) -> str:
    """Return words for an error: how the cell in the folder differs from the wanted cell, and what to do."""
    if archive.is_beginning(found, wanted):
        return (
            f"{_cut(found, wanted)}, without a checkpoint to continue from; "
            f"set `rounds` to {found['rounds']}, or choose another folder"
        )
    keys = [key for key in {**found, **wanted} if key not in archive.MACHINE]
    name = next(key for key in keys if found.get(key) != wanted.get(key))
    differs = f"{name} is {found.get(name)!r}, not {wanted.get(name)!r}"
    return f"a cell with other settings ({differs}); choose another folder"


def describe_machine(device: str) -> dict[str, str]:
    """Return the versions of the software and the name of the hardware, to store with a cell."""
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    index = torch.device(device).index if device != "auto" else None
    return {
        "version": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": torch.cuda.get_device_name(index) if cuda else _processor(),
    }


def _processor() -> str:
    """Return the processor's name as Linux gives it, or else the machine type, such as x86_64."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.machine()
