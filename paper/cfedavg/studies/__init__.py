"""Small numerical studies of the theory. A cell, one measurement, takes seconds and is never interrupted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure

from cfedavg import Callback
from cfedavg.report import Frame, default_settings
from cfedavg.sweep import SealedCell, Settings, Study
from paper.cfedavg.studies import bounds, conditions, speedup, variance


@dataclass(frozen=True)
class SmallStudy(Study):
    """A study whose `cells`, `measure`, `figure` and `table` are functions of `module`."""

    name: str
    subtitle: str
    module: ModuleType
    scale: str = "paper"
    seeds: tuple[int, ...] = (0,)
    title: str = field(init=False)
    note: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", self.module.TITLE)
        object.__setattr__(self, "note", f"scale {self.scale}")

    def cells(self, seeds: Iterable[int]) -> dict[str, Settings]:
        """Return the settings of every cell, by the cell's name."""
        found: dict[str, Settings] = self.module.cells(self.scale, seeds)
        return found

    def measure(self, name: str, settings: Settings, folder: Path, callback: Callback) -> dict[str, Any]:
        """Run the measurement of a cell and return its values."""
        values: dict[str, Any] = self.module.measure(settings, callback.on_message)
        return values

    def missing_values(self, cell: SealedCell) -> list[str]:
        """Return the names of the values that a cell, written by another version, lacks."""
        return [name for name in self.module.VALUES if name not in cell.values]

    def figure(self, found: Mapping[str, SealedCell], note: str) -> Figure:
        """Return the figure of the finished cells."""
        seeds = len({cell.settings["seed"] for cell in found.values()})
        frame = Frame(self.title, f"{self.subtitle} · {seeds} seed{'s' * (seeds != 1)}", (), note)
        picture: Figure = default_settings(self.module.figure)(found, frame)
        return picture

    def table(self, found: Mapping[str, SealedCell]) -> list[list[str]]:
        """Return the table of the numbers behind the figure, the header first."""
        rows: list[list[str]] = self.module.table(found)
        return rows


SMALL = (
    SmallStudy("speedup", "Corollary 1; not plotted in the paper", speedup),
    SmallStudy("bounds", "Theorems 1 to 3; not plotted in the paper", bounds),
    SmallStudy("variance", "Remark 2; not plotted in the paper", variance),
    SmallStudy("conditions", "Theorem 1; not plotted in the paper", conditions),
)
