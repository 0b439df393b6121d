"""An experiment: a grid of runs over p, lines of a figure and seeds, as a TOML file describes it."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from cfedavg.core.config import EXCLUSIVE, Config, refuse_code
from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file
from cfedavg.reproduce.archive import Entry
from cfedavg.reproduce.training import COLUMNS
from cfedavg.simulate.plan import parse_parts

SCALES = ("smoke", "small", "paper")
DRAWINGS = ("curves", "budget", "norms")
# How and where a cell is run; whatever these are, it is the same cell.
MACHINE = {"data_dir", "device", "engine", "workers", "precision", "residuals", "checkpoint_every"}
# What an experiment's TOML may hold.
_KEYS: dict[str, tuple[type, str]] = {
    "like": (str, "text"), "title": (str, "text"), "paper": (str, "text"), "draw": (str, "text"),
    "columns": (list, "a list of names"), "p": (list, "a list of whole numbers"), "base": (dict, "a table"),
    "line": (list, "tables, each begun with [[line]]"), "scale": (dict, "tables: [scale.smoke] and so on"),
}  # fmt: skip
_FIELDS = {field.name for field in dataclasses.fields(Config)}


Found = Mapping[str, Entry]


@dataclass(frozen=True)
class Line:
    """One line of a figure: what it changes, and what it changes besides at one of the scales."""

    name: str
    label: str
    changes: Mapping[str, Any]
    at: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """What is run for a figure and how it is drawn; without p, all clients get what `base` says."""

    name: str
    title: str
    paper: str  # where it stands there
    draw: str
    columns: tuple[str, ...]
    base: Mapping[str, Any]
    p: tuple[int | None, ...]
    lines: tuple[Line, ...]
    scales: Mapping[str, Mapping[str, Any]]

    def cells(self, scale: str, seeds: int) -> dict[str, dict[str, Any]]:
        """The settings of every cell, by name; all of the first seed come first."""
        # Checked once for all seeds: there may be hundreds of cells.
        plan = {self.stem(p, line): settings_of(self._config(scale, p, line)) for p, line in self.pairs()}
        return {
            f"{stem}-seed{seed}": settings | {"seed": seed}
            for seed in range(seeds)
            for stem, settings in plan.items()
        }

    def pairs(self) -> Iterator[tuple[int | None, Line]]:
        return ((p, line) for p in self.p for line in self.lines)

    def stem(self, p: int | None, line: Line) -> str:
        """What the names of a line's cells begin with; experiments share the cells that agree in it."""
        share = "" if p is None else f"-p{p}"
        dataset = str(self.base.get("dataset", "embedded")).replace("/", "-")  # owner/name of the hub
        return f"{dataset}{share}-{line.name}"

    def entries(self, found: Found, p: int | None, line: Line) -> list[Entry]:
        """The cells of a line that are there, in the order of their seeds."""
        stem = self.stem(p, line)
        mine = [entry for name, entry in found.items() if name.rpartition("-seed")[0] == stem]
        return sorted(mine, key=lambda entry: int(entry.settings["seed"]))

    def _config(self, scale: str, p: int | None, line: Line) -> Config:
        made = Config.from_dict(self.base, self.name).replace(**self.scales.get(scale, {}))
        if p is not None:
            made = made.replace(classes_per_client=p)
        return made.replace(**{**line.changes, **line.at.get(scale, {})})


def settings_of(config: Config) -> dict[str, Any]:
    """A configuration as a cell keeps it: what decides the result, and the precision."""
    table = dataclasses.asdict(config)
    left_out = MACHINE - {"precision"}
    return {name: value for name, value in table.items() if value is not None and name not in left_out}


def names() -> list[str]:
    """The experiments that come with the package, the paper's figures first."""
    found = [path.stem for path in _folder().iterdir() if path.name.endswith(".toml")]
    return sorted(found, key=lambda name: (not name.startswith("fig"), name))


def load(name: str) -> Experiment:
    """The experiment of this name, or the one in a file of the user's."""
    return from_table(Path(name).stem, _table(name))


def from_table(name: str, table: Mapping[str, Any]) -> Experiment:
    """From TOML; one sentence says what is wrong."""
    where = f"experiment {name}"
    _check_keys(table, where)
    draw = table.get("draw", "curves")
    if draw not in DRAWINGS:
        raise InputError(f"{where}: draw is {draw!r}; it must be {' or '.join(DRAWINGS)}")
    if not table.get("line"):
        raise InputError(f"{where} has no [[line]]: give at least one, with name, label and what it changes")
    made = Experiment(
        name,
        table.get("title", name),
        table.get("paper", ""),
        draw,
        _columns(table.get("columns", ["test_accuracy"]), where),
        _fields(table.get("base", {}), f"{where}: base"),
        _shares(table["p"], where) if "p" in table else (None,),
        tuple(_line(each, where) for each in table["line"]),
        _scales(table.get("scale", {}), f"{where}: scale"),
    )
    _check(made, where)
    return made


def _check_keys(table: Mapping[str, Any], where: str) -> None:
    for key, value in table.items():
        if key not in _KEYS:
            raise InputError(f"{where} has an unknown key {key!r}; known are {', '.join(sorted(_KEYS))}")
        kind, words = _KEYS[key]
        if not isinstance(value, kind):
            raise InputError(f"{where}: {key} is {value!r}; it must be {words}")


def _columns(names: list[Any], where: str) -> tuple[str, ...]:
    if not names or any(name not in COLUMNS for name in names):
        raise InputError(f"{where}: columns is {names!r}; it must hold some of {', '.join(COLUMNS)}")
    return tuple(names)


def _shares(p: list[Any], where: str) -> tuple[int, ...]:
    if not p or any(type(each) is not int or each < 1 for each in p) or len(set(p)) < len(p):
        raise InputError(f"{where}: p is {p!r}; it must hold different whole numbers, 1 or more")
    return tuple(p)


def _fields(table: Any, where: str) -> dict[str, Any]:
    """Some of the configuration; whether the values are right shows when all of it is put together."""
    if not isinstance(table, dict):
        raise InputError(f"{where} is {table!r}; it must be a table of the configuration's fields")
    if strange := table.keys() - _FIELDS:
        raise InputError(
            f"{where} has an unknown key {min(strange)!r}; known are {', '.join(sorted(_FIELDS))}"
        )
    refuse_code(table, where, "an experiment may name registered parts only")
    return table


def _scales(table: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    if strange := table.keys() - set(SCALES):
        raise InputError(f"{where}.{min(strange)} is none of {', '.join(SCALES)}")
    return {scale: _fields(fields, f"{where}.{scale}") for scale, fields in table.items()}


def _line(table: Any, where: str) -> Line:
    if not isinstance(table, dict):
        raise InputError(f"{where}: line holds {table!r}; begin each line with [[line]]")
    rest = dict(table)
    try:
        name, label = rest.pop("name"), rest.pop("label")
    except KeyError as error:
        raise InputError(f"{where}: a [[line]] has no {error.args[0]}") from None
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise InputError(f"{where}: a [[line]] is named {name!r}: use letters, digits, dots and dashes")
    own = f"{where}: the [[line]] {name}"
    if not isinstance(label, str):
        raise InputError(f"{own} has the label {label!r}; it must be text")
    scales = _scales({scale: rest.pop(scale) for scale in SCALES if scale in rest}, own)
    return Line(name, label, _fields(rest, own), scales)


def _check(experiment: Experiment, where: str) -> None:
    """Every cell of every scale is a configuration, and no two have one name."""
    stems = [experiment.stem(p, line) for p, line in experiment.pairs()]
    if len(set(stems)) < len(stems):
        raise InputError(f"{where}: two lines have the same name")
    for scale in SCALES:
        try:
            for settings in experiment.cells(scale, 1).values():
                parse_parts(Config.from_dict(settings), trust=False)
        except InputError as error:
            raise InputError(f"{where}, scale {scale}: {error}") from None


def _table(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The TOML of an experiment, on top of that of the experiment it is `like`."""
    own = Path(name).suffix == ".toml"
    if not own and name not in names():
        raise InputError(f"there is no experiment {name!r}; there are {', '.join(names())}")
    file = Path(os.path.realpath(name)) if own else _folder() / f"{name}.toml"
    if str(file) in above:
        raise InputError(f"experiment {name} is like itself")
    try:
        table = tomllib.loads((read_file(file) if own else file.read_bytes()).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read the experiment {name} ({getattr(error, 'strerror', error)})") from None
    _check_keys(table, f"experiment {Path(name).stem}")
    if "like" not in table:
        return table
    like = table.pop("like")
    if own and Path(like).suffix == ".toml":  # as seen from the file that names it
        like = str(Path(name).parent / like)
    model = _table(like, (*above, str(file)))
    table["base"] = _on_top(model.get("base", {}), table.get("base", {}))
    table["scale"] = model.get("scale", {}) | table.get("scale", {})
    return model | table


def _on_top(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, those above winning, and taking back what they exclude."""
    gone = {name for group in EXCLUSIVE if not above.keys().isdisjoint(group) for name in group}
    return {name: value for name, value in below.items() if name not in gone} | above


def _folder() -> Any:
    return resources.files("cfedavg") / "experiments"
