"""The grids: for each data set and each share of clients a round, a run of every feedback and compressor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cfedavg import InputError
from cfedavg.sweep import Grid, Line, SealedCell, read_table

FOLDER = Path(__file__).parent / "experiments"
DATA = ("mnist", "cifar10")
SCALES = ("smoke", "cpu", "full")
DEFAULT, PLAIN = "default", "none"  # names of lines
ADAM = "-adam"  # how the name of a line under the server optimiser adam ends
_BY_SHARE = ("participation", "rounds", "eval_every")  # lists in a scale, with a value for each grid
_ABOUT = ("family", "size", "bytes")  # keys of a line that say what it is, not how it runs


@dataclass(frozen=True)
class Experiment(Grid):
    """The runs of one data set with one share of clients a round; `about` has what is known of each line."""

    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The data set, and the number of clients a round."""
        clients = self.base["clients"]
        taking_part = round(self.base["participation"] * clients)
        data = "" if self.base["dataset"] in self.name else f" (on {self.base['dataset']} digits)"
        return f"{self.title}{data}, {taking_part if taking_part < clients else 'all'} of {clients} clients"

    def names_of_size(self, size: str) -> list[str]:
        """Return the names of the lines that compare families at this size of message."""
        return [name for name, about in self.about.items() if about.get("size") == size]

    def only(self, names: Iterable[str]) -> Experiment:
        """Return the grid with the lines of these names alone."""
        return dataclasses.replace(self, lines=tuple(map(self.line, names)))

    def without_adam(self) -> Experiment:
        """Return the grid without the lines under the server optimiser adam."""
        return self.only(line.name for line in self.lines if not line.name.endswith(ADAM))

    def line(self, name: str) -> Line:
        """Return the line of a name."""
        return next(line for line in self.lines if line.name == name)

    def label(self, name: str) -> str:
        """Return the label of the line of a name."""
        return self.line(name).label

    def of_line(self, found: Mapping[str, SealedCell], name: str) -> list[SealedCell]:
        """Return the finished cells of a line, in the order of their seeds."""
        return self.find_cells(found, None, self.line(name))


def load(scale: str, **typed: Any) -> list[Experiment]:
    """Return the grids of a scale; `typed` sets fields of all runs, such as `device`."""
    if scale not in SCALES:
        raise InputError(f"`scale` must be smoke, cpu or full, got {scale!r}")
    return [grid for data in DATA for grid in _load_data(data, scale, typed)]


def _load_data(data: str, scale: str, typed: dict[str, Any]) -> Iterator[Experiment]:
    """Yield the grids of a data set, one for each share of clients a round."""
    table = read_table(FOLDER / f"{data}.toml")
    lines = table["line"] + read_table(FOLDER / "common.toml")["line"]
    lines = [_spell_out(line) for line in lines]
    about = {line["name"]: {key: line.pop(key) for key in _ABOUT if key in line} for line in lines}
    lines += [_put_under_adam(line) for line in lines]
    own = dict(table["scale"][scale])
    for each in zip(*(own.pop(key) for key in _BY_SHARE), strict=True):
        base = table["base"] | own | dict(zip(_BY_SHARE, each, strict=True))
        name = f"{data}-{100 * base['participation']:g}"
        shape = {"title": table["title"], "base": base, "line": lines}
        made = Experiment.from_table(name, shape, typed=typed, note=f"scale {scale}", about=about)
        yield dataclasses.replace(made, prefix=name)


def _spell_out(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of a line with `both` written as the compressors of both directions."""
    found = dict(line)
    both = found.pop("both", None)
    return found if both is None else found | {"compressor": both, "compressor_down": both}


def _put_under_adam(line: Mapping[str, Any]) -> dict[str, Any]:
    name, label = line["name"] + ADAM, f"{line['label']}, server adam"
    return {**line, "name": name, "label": label, "server_optimiser": "adam"}
