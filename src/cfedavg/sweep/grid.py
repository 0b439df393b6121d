"""Grids of runs, over p (classes per client), the lines of a figure and seeds; from TOML or options."""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from cfedavg.core.config import EXCLUSIVE, OPTIONS, Config, field_types, parse_toml, refuse_code
from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file
from cfedavg.schedule import SCHEDULES
from cfedavg.simulate.plan import parse_parts
from cfedavg.simulate.run import Observer
from cfedavg.sweep.cells import COLUMNS, SealedCell, Settings, Study, config_settings, train_cell

OVER = ("rounds", "model_sizes_sent", "uplink_bytes", "client_bytes", "simulated_seconds")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # check and rule of each key in TOML
    **dict.fromkeys(("like", "title", "subtitle"), (lambda v: isinstance(v, str), "text")),
    "base": (lambda v: isinstance(v, dict), "a table"),
    "line": (lambda v: isinstance(v, list), "tables, each begun with [[line]]"),
    "seeds": (lambda v: type(v) is int and 1 <= v <= 1000, "a whole number between 1 and 1000"),
    "p": (lambda v: _are_shares(v), "a list of different whole numbers, 1 or more"),
    "columns": (lambda v: _are_some(v, COLUMNS), f"a list of some of {', '.join(COLUMNS)}"),
    "over": (lambda v: _are_some(v, OVER), f"a list of some of {', '.join(OVER)}"),
}


@dataclass(frozen=True)
class Line:
    """One line of a figure: name, label and colour, and the fields that it changes in the configuration."""

    name: str
    label: str
    changes: Mapping[str, Any]
    colour: str = ""


@dataclass(frozen=True)
class Grid(Study):
    """A study whose figure has a row of panels for each p (classes per client), all with the same lines."""

    name: str
    title: str
    base: Mapping[str, Any]
    lines: tuple[Line, ...]
    p: tuple[int | None, ...] = (None,)  # classes per client; None: the value in `base`
    seeds: tuple[int, ...] = (0,)
    columns: tuple[str, ...] = ("test_accuracy",)
    over: tuple[str, ...] = ("rounds",)
    subtitle: str = ""
    prefix: str = ""  # of the cells' names, so that grids of different data sets can share a folder
    rounds: int | None = None  # upper limit on the rounds of a run
    note: str = ""  # a text under the figure

    @classmethod
    def from_table(
        cls,
        name: str,
        table: Mapping[str, Any],
        *,
        typed: Mapping[str, Any] | None = None,
        vary: Sequence[str] = (),
        trust: bool = False,
        **more: Any,
    ) -> Self:
        """Return the grid that a TOML table describes; if the table is empty, `vary` alone gives the lines.

        The user's fields in `typed` and texts in `vary` override the table and need no `trust`.
        """
        where, typed = f"grid {name}", dict(typed or {})
        check_keys(table, where)
        base = put_on_top(_fields(table.get("base", {}), f"{where}: base", trust, typed), typed)
        lines = [_line(each, where, trust) for each in table.get("line", ())]
        if not lines and not vary:
            raise InputError(f"{where} has no [[line]]: give at least one, with name, label and changes")
        lines, seeds = _cross(lines, vary)
        if not seeds:
            seeds = tuple(range(table["seeds"])) if "seeds" in table else (base.get("seed", 0),)
        more |= {"title": name} | {key: table[key] for key in ("title", "subtitle") if key in table}
        more |= {key: tuple(table[key]) for key in ("p", "columns", "over") if key in table}
        prefix = str(base.get("dataset", "embedded")).replace("/", "-") if table else ""
        made = cls(name, base=base, lines=tuple(lines), seeds=seeds, prefix=prefix, **more)
        made._check(where if table else "")
        return made

    def _check(self, where: str) -> None:
        """Refuse a grid with two cells of one name, or with a configuration that cannot run."""
        names = [f"{self.stem(p, line)}-seed{seed}" for p, line in self.pairs() for seed in self.seeds]
        if same := {name for name in names if names.count(name) > 1}:
            raise InputError(f"{where or '`vary`'}: cells must have different names, got {min(same)} twice")
        try:
            for config in self._configs.values():
                parse_parts(config)
                SCHEDULES.parse(config.schedule)
            for seed in self.seeds:
                config.replace(seed=seed)
        except InputError as error:
            raise InputError(f"{where}: {error}" if where else str(error)) from None

    @cached_property
    def _configs(self) -> dict[str, Config]:
        """The configuration of each pair of p and line, by the stem (the first part) of its cells' names."""
        base = Config.from_dict(self.base, self.name, trust=True)
        found = {}
        for p, line in self.pairs():
            config = base if p is None else base.replace(classes_per_client=p)
            config = config.replace(**line.changes)
            rounds = min(config.rounds, self.rounds or config.rounds)
            found[self.stem(p, line)] = config.replace(rounds=rounds)
        return found

    def device(self) -> str:
        """Return the device in the grid's base configuration."""
        return str(self.base.get("device", Config.device))

    def pairs(self) -> Iterator[tuple[int | None, Line]]:
        """Return an iterator over all pairs of a p and a line."""
        return itertools.product(self.p, self.lines)

    def stem(self, p: int | None, line: Line) -> str:
        """Return the name of a line's cells without the seed; grids share the cells of one name."""
        return "-".join(filter(None, [self.prefix, "" if p is None else f"p{p}", line.name]))

    def cells(self, seeds: Iterable[int]) -> dict[str, Settings]:
        """Return the settings of every cell, by name; all cells of the first seed come first."""
        plan = {stem: config_settings(config) for stem, config in self._configs.items()}
        return {
            f"{stem}-seed{seed}": settings | {"seed": seed}
            for seed in seeds
            for stem, settings in plan.items()
        }

    def find_cells(self, found: Mapping[str, SealedCell], p: int | None, line: Line) -> list[SealedCell]:
        """Return the cells in `found` that belong to `p` and `line`, in the order of their seeds."""
        stem = self.stem(p, line)
        mine = [cell for name, cell in found.items() if name.rpartition("-seed")[0] == stem]
        return sorted(mine, key=lambda cell: int(cell.settings["seed"]))

    def measure(self, name: str, settings: Settings, folder: Path, observer: Observer) -> dict[str, Any]:
        """Train a cell in `folder`, resuming a run that is there; return one list over rounds per metric."""
        config = self._configs[name.rpartition("-seed")[0]].replace(seed=settings["seed"])
        if "checkpoint_every" not in self.base:
            # A checkpoint holds every client's residual and is large: write only four in a run.
            config = config.replace(checkpoint_every=max(1, config.rounds // 4))
        return train_cell(config, folder, observer)

    def figure(self, found: Mapping[str, SealedCell], note: str) -> bytes:
        """Return a PNG with a row of panels for each p, and a panel for each metric and x axis."""
        from cfedavg.sweep.figures import draw_grid_figure  # matplotlib takes a while to import

        return draw_grid_figure(self, found, note)

    def table(self, found: Mapping[str, SealedCell]) -> list[list[str]]:
        """Return the rows of a table: a header, then a row for each p and line."""
        from cfedavg.sweep.figures import summarise_cells

        return summarise_cells(self, found)


# Reading a grid


def read_table(path: Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the TOML table of a grid; missing keys come from the grid file that the key `like` names."""
    file = os.path.realpath(path)
    if file in above:
        raise InputError(f"grid {path}: `like` must name other grids, got the grid itself")
    try:
        table = parse_toml(read_file(path).decode(), f"grid {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the grid {path} ({getattr(error, 'strerror', error)})") from None
    check_keys({key: table[key] for key in ("like", "base") if key in table}, f"grid {path.stem}")
    if "like" not in table:
        return table
    model = read_table(path.parent / table.pop("like"), (*above, file))
    for key, value in model.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            table[key] = put_on_top(value, table[key]) if key == "base" else value | table[key]
    return model | table


def put_on_top(below: Mapping[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return both tables joined; a field in `above` replaces the same and exclusive fields in `below`."""
    gone = {name for group in EXCLUSIVE if not above.keys().isdisjoint(group) for name in group}
    return {name: value for name, value in below.items() if name not in gone} | above


def check_keys(table: Mapping[str, Any], where: str) -> None:
    """Refuse an unknown key in the TOML table of a grid, and a value that breaks the rule of its key."""
    for key, value in table.items():
        if key not in _RULES:
            raise InputError(f"{where} has an unknown key {key!r}; known are {', '.join(sorted(_RULES))}")
        is_right, words = _RULES[key]
        if not is_right(value):
            raise InputError(f"{where}: {key} must be {words}, got {value!r}")


def _are_some(value: Any, known: Sequence[str]) -> bool:
    return isinstance(value, list) and bool(value) and all(each in known for each in value)


def _are_shares(value: Any) -> bool:
    right = isinstance(value, list) and bool(value) and all(type(p) is int and p >= 1 for p in value)
    return right and len(set(value)) == len(value)


def _fields(table: Any, where: str, trust: bool, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table after checking the names of its fields; Config checks the values of the fields later."""
    if not isinstance(table, dict):
        raise InputError(f"{where} must be a table of the configuration's fields, got {table!r}")
    if unknown := table.keys() - OPTIONS.keys():
        known = ", ".join(sorted(OPTIONS))
        raise InputError(f"{where} has an unknown key {min(unknown)!r}; known are {known}")
    if not trust:
        left = {key: value for key, value in table.items() if key not in typed}
        refuse_code(left, where, "set `trust` if you trust who wrote it")
    return table


def _line(table: Any, where: str, trust: bool) -> Line:
    if not isinstance(table, dict):
        raise InputError(f"{where}: line must be tables, each begun with [[line]], got {table!r}")
    rest = {"name": None, "label": None, "colour": "#000000", **table}
    name, own = rest.pop("name"), f"{where}: the [[line]] {table.get('name')}"
    rules = {"name": (name, r"[A-Za-z0-9][A-Za-z0-9_.-]*", "letters, digits, dots and dashes"),
             "label": (rest.pop("label"), r"(?s).+", "text"),
             "colour": (rest.pop("colour"), r"#[0-9A-Fa-f]{6}", "like #0072B2")}  # fmt: skip
    for key, (value, pattern, words) in rules.items():
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise InputError(f"{own}: {key} must be {words}, got {value!r}")
    return Line(name, table["label"], _fields(rest, own, trust, {}), table.get("colour", ""))


def _cross(lines: list[Line], vary: Sequence[str]) -> tuple[list[Line], tuple[int, ...]]:
    """Return each line with each combination of values in `vary`, and the seeds in `vary`."""
    seen, seeds = set[str](), ()
    for text in vary:
        left, equals, right = text.partition("=")
        fields = [name.strip().lstrip("-").replace("-", "_") for name in left.split(",")]
        if not equals or any(name not in OPTIONS for name in fields):
            raise InputError(f"`vary` must be field=value|value, with fields of Config, got {text!r}")
        for name in fields:
            if name in seen:
                raise InputError(f"`vary` must name {name} once, got {name} twice; join its values with |")
            seen.add(name)
        values = [_value(part.strip(), field_types()[fields[0]]) for part in right.split("|")]
        if fields == ["seed"]:
            seeds = tuple(values)
        else:
            lines = [_vary(line, fields, value) for line in lines or [Line("", "", {})] for value in values]
    return lines or [Line("run", "run", {})], seeds


def _value(text: str, kind: Any) -> Any:
    """Return the value that a text in TOML stands for; a string may be without quotes."""
    if str in (getattr(kind, "__args__", None) or (kind,)):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _vary(line: Line, fields: list[str], value: Any) -> Line:
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", str(value).replace("(", "").replace(")", "")).strip("-")
    label = str(value)
    if fields[0] != "compressor":
        slug, label = f"{fields[0].replace('_', '-')}{slug}", f"{fields[0].replace('_', ' ')} {value}"
    name, label = f"{line.name}-{slug}".strip("-"), f"{line.label}, {label}".strip(", ")
    return Line(name, label, {**line.changes, **dict.fromkeys(fields, value)}, line.colour)
