"""What can be reproduced: experiments, which train, and small numerical studies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from cfedavg.core.errors import InputError
from cfedavg.report.figures import default_settings
from cfedavg.report.panels import Frame
from cfedavg.reproduce import bounds, conditions, experiment, figures, speedup, tables, training, variance
from cfedavg.reproduce.archive import Entry
from cfedavg.reproduce.experiment import MACHINE, Experiment
from cfedavg.simulate.run import Observer

Settings = dict[str, Any]


class Study(Protocol):
    """A grid of cells with a figure and a table."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def paper(self) -> str: ...

    def cells(self, scale: str, seeds: int) -> dict[str, Settings]:
        """The settings of every cell, by name."""

    def measure(self, settings: Settings, work: Path, how: Mapping[str, Any], watch: Observer) -> Settings:
        """What comes out of a cell. `work` is a folder of its own, to go on in after an interruption."""

    def lacks(self, entry: Entry) -> list[str]:
        """The values that figures and claims need and a cell does not have; of another version, it may be."""

    def figure(self, found: Mapping[str, Entry], note: str) -> bytes:
        """A PNG of the cells that there are."""

    def table(self, found: Mapping[str, Entry]) -> list[list[str]]:
        """The numbers behind it, a header first."""


@dataclass(frozen=True)
class Training:
    """An experiment, each cell of which is a run."""

    experiment: Experiment

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def title(self) -> str:
        return self.experiment.title

    @property
    def paper(self) -> str:
        return self.experiment.paper

    def cells(self, scale: str, seeds: int) -> dict[str, Settings]:
        return self.experiment.cells(scale, seeds)

    def measure(self, settings: Settings, work: Path, how: Mapping[str, Any], watch: Observer) -> Settings:
        return training.measure(settings, work, how, watch)

    def lacks(self, entry: Entry) -> list[str]:
        return []  # a column that is missing is not drawn, and decides nothing

    def figure(self, found: Mapping[str, Entry], note: str) -> bytes:
        return figures.draw(self.experiment, found, note)

    def table(self, found: Mapping[str, Entry]) -> list[list[str]]:
        return tables.table(self.experiment, found)


@dataclass(frozen=True)
class Small:
    """A numerical study, whose cells take seconds and are never broken off."""

    name: str
    paper: str
    module: ModuleType

    @property
    def title(self) -> str:
        return str(self.module.TITLE)

    def cells(self, scale: str, seeds: int) -> dict[str, Settings]:
        found: dict[str, Settings] = self.module.cells(scale, seeds)
        return found

    def measure(self, settings: Settings, work: Path, how: Mapping[str, Any], watch: Observer) -> Settings:
        values: Settings = self.module.measure(settings, watch.say)
        return values

    def lacks(self, entry: Entry) -> list[str]:
        return [name for name in self.module.VALUES if name not in entry.values]

    def figure(self, found: Mapping[str, Entry], note: str) -> bytes:
        own = self._own(found)
        seeds = len({entry.settings["seed"] for entry in own.values()})
        frame = Frame(self.title, f"{self.paper} · {seeds} seed{'s' * (seeds != 1)}", (), note)
        picture: bytes = default_settings(self.module.figure)(own, frame)
        return picture

    def table(self, found: Mapping[str, Entry]) -> list[list[str]]:
        rows: list[list[str]] = self.module.table(self._own(found))
        return rows

    def _own(self, found: Mapping[str, Entry]) -> dict[str, Entry]:
        return {name: entry for name, entry in found.items() if name.startswith(f"{self.name}-")}


SMALL = (
    Small("speedup", "Corollary 1; not plotted in the paper", speedup),
    Small("bounds", "Theorems 1 to 3; not plotted in the paper", bounds),
    Small("variance", "Remark 2; not plotted in the paper", variance),
    Small("conditions", "Theorem 1; not plotted in the paper", conditions),
)


def names() -> list[str]:
    """All that come with the package."""
    return experiment.names() + [study.name for study in SMALL]


def find(name: str) -> Study:
    """The study of this name, or the experiment in a TOML file of the user's."""
    for study in SMALL:
        if study.name == name:
            return study
    if not name.endswith(".toml") and name not in experiment.names():
        raise InputError(
            f"there is no experiment {name!r}; there are {', '.join(names())}, and files of your own (*.toml)"
        )
    return Training(experiment.load(name))


def same(found: Settings, wanted: Settings) -> bool:
    """Whether two settings are of one cell: where and how exactly it was computed does not matter."""
    left, right = ({k: v for k, v in each.items() if k not in MACHINE} for each in (found, wanted))
    return left == right


def begins(found: Settings, wanted: Settings) -> bool:
    """Whether they are of one cell, or of a run's beginning."""
    rounds = found.get("rounds", 0)
    cut = {"rounds": rounds} if "dataset" in wanted and rounds <= wanted["rounds"] else {}
    return same(found, wanted | cut)
