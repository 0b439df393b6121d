"""Grids: a run for each p (classes per client), each line of a figure and each seed; read, run and drawn."""

from __future__ import annotations

import itertools
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, get_args

from cfedavg.callbacks import Callback
from cfedavg.core.config import (
    EXCLUSIVE,
    FIELD_TYPES,
    OPTIONS,
    Config,
    advise_field,
    parse_toml,
    refuse_code,
)
from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file
from cfedavg.core.names import QUOTE, advise
from cfedavg.core.units import is_share, spell_out
from cfedavg.report.figures import Figure, Frame, draw_grid
from cfedavg.report.panels import COLOURS, PLAIN, Lines, Panel, Pen, Series
from cfedavg.schedule import SCHEDULES
from cfedavg.simulate.plan import parse_parts
from cfedavg.sweep import cells as sealed
from cfedavg.sweep.cells import COLUMNS, NOTHING, Found, SealedCell, Settings, Study

OVER = (
    "rounds", "model_sizes_sent", "uplink_bytes", "client_bytes", "total_bytes", "simulated_seconds"
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of a figure: its name, label and colour, and its changes to the grid's base configuration."""

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
    prefix: str = ""  # how the cells' names begin, so that grids of different data sets can share a folder
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
        """Return the grid that a TOML table describes; if the table is empty, `vary` alone makes the lines.

        `typed` (fields of Config) and `vary` (texts such as `eta=0.5|1`) come from the user. Both override
        the table. Without `trust`, only these two may name a class to import.
        """
        where, typed = f"grid {name}", dict(typed or {})
        _check_keys(table, where, _KEYS)
        base = {key: value for key, value in table.get("base", {}).items() if key not in typed}
        _check_fields(base, f"{where}: base", trust)
        base = _put_on_top(base, typed)
        lines = [_parse_line(each, where, trust) for each in table.get("line", ())]
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
        """Refuse a grid if two of its cells have the same name, or if a configuration cannot run."""
        names = [f"{self.stem(p, line)}-seed{seed}" for p, line in self.pairs() for seed in self.seeds]
        if same := {name for name in names if names.count(name) > 1}:
            raise InputError(f"{where or '`vary`'}: cells must have different names, got {min(same)} twice")
        try:
            for config in self._configs.values():
                parse_parts(config)
                SCHEDULES.parse(config.schedule)
                if config.client_column and config.clients == Config.clients and "client_bytes" in self.over:
                    raise InputError(
                        "`over` client_bytes needs `clients`, the number that `client_column` gives"
                    )
            for seed in self.seeds:
                config.replace(seed=seed)
        except InputError as error:
            raise InputError(f"{where}: {error}" if where else str(error)) from None

    @cached_property
    def _configs(self) -> dict[str, Config]:
        """The configuration of each p and line, by the name that its cells have without the seed."""
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
        """Return an iterator over all pairs of a p (classes per client) and a line."""
        return itertools.product(self.p, self.lines)

    def stem(self, p: int | None, line: Line) -> str:
        """Return the name that the cells of `p` and `line` have without the seed.

        Two grids in one folder share the cells that have the same name.
        """
        return "-".join(filter(None, [self.prefix, "" if p is None else f"p{p}", line.name]))

    def cells(self, seeds: Iterable[int]) -> dict[str, Settings]:
        """Return the settings of every cell, by name; all cells of the first seed come first."""
        plan = {stem: sealed.config_settings(config) for stem, config in self._configs.items()}
        return {
            f"{stem}-seed{seed}": settings | {"seed": seed}
            for seed in seeds
            for stem, settings in plan.items()
        }

    def find_cells(self, found: Found, p: int | None, line: Line) -> list[SealedCell]:
        """Return the cells in `found` that belong to `p` and `line`, in the order of their seeds."""
        stem = self.stem(p, line)
        mine = [cell for name, cell in found.items() if name.rpartition("-seed")[0] == stem]
        return sorted(mine, key=lambda cell: int(cell.settings["seed"]))

    def config(self, name: str, settings: Settings) -> Config:
        """Return the configuration of a cell's run."""
        config = self._configs[name.rpartition("-seed")[0]].replace(seed=settings["seed"])
        if "checkpoint_every" not in self.base:
            # A checkpoint holds every client's residual and is large: write only four in a run.
            config = config.replace(checkpoint_every=max(1, config.rounds // 4))
        return config

    def measure(self, name: str, settings: Settings, folder: Path, callback: Callback) -> dict[str, Any]:
        """Train a cell in `folder`, or resume the run there; return a list of values for each metric."""
        return sealed.train_cell(self.config(name, settings), folder, callback)

    def figure(self, found: Found, note: str) -> Figure:
        """Return a figure: for each p (classes per client) a row, with a panel for each metric and x axis."""
        lines = self.list_started(found)[1]
        panels, width = self.panels(found), len(self.over) * len(self.columns)
        rows = [panels[i : i + width] for i in range(0, len(panels), width)]
        legend = [(line.label, self.choose_pen(line)) for line in lines]
        return draw_grid(rows, self.make_frame(found, legend, note))

    def panels(self, found: Found) -> list[tuple[Panel, Lines]]:
        """Return the panels of the figure, row by row."""
        every = itertools.product(self.list_started(found)[0], self.over, self.columns)
        return [self._fill_panel(found, p, key, x) for p, x, key in every]

    def _fill_panel(self, found: Found, p: int | None, key: str, x: str) -> tuple[Panel, Lines]:
        panel = Panel(
            key, "" if p is None else f"p = {p}", (Series(key, ""),), "", x,
            log=key.endswith("loss"), percent=is_share(key), side=spell_out(key),
        )  # fmt: skip
        lines = [(line.label, self.find_cells(found, p, line), self.choose_pen(line)) for line in self.lines]
        return sealed.fill_panel(panel, lines)

    def choose_pen(self, line: Line) -> Pen:
        """Return a line's pen: its own colour if set, grey if uncompressed, or else the next free colour."""
        settings = {each.name: {**self.base, **each.changes} for each in self.lines}
        plain = [name for name, own in settings.items() if own.get("compressor") == "none"]
        free = [each.name for each in self.lines if not each.colour and each.name not in plain]
        usual = COLOURS[free.index(line.name) % len(COLOURS)] if line.name in free else PLAIN
        return Pen(line.colour or usual, dashed=settings[line.name].get("feedback") == "none")

    def list_started(self, found: Found) -> tuple[list[int | None], list[Line]]:
        """Return each p (classes per client) and each line that has cells in `found`; all, if none has."""
        pairs = [pair for pair in self.pairs() if self.find_cells(found, *pair)] or list(self.pairs())
        started = [line for _, line in pairs]
        return list(dict.fromkeys(p for p, _ in pairs)), [line for line in self.lines if line in started]

    def make_frame(self, found: Found, legend: Sequence[tuple[str, Pen]], note: str) -> Frame:
        """Return the frame around the panels: title, number of seeds, legend, and note on missing cells."""
        every = [self.find_cells(found, *pair) for pair in self.pairs()]
        crosses = "× where a seed diverged" if any(cell.diverged for own in every for cell in own) else ""
        subtitle = " · ".join(filter(None, [self.subtitle, sealed.describe_seeds(map(len, every)), crosses]))
        return Frame(self.title, subtitle, legend, "; ".join(filter(None, [note, self._name_missing(found)])))

    def _name_missing(self, found: Found) -> str:
        """Return a note that names each p and each line without cells, and each other pair without cells."""
        started_p, started = self.list_started(found)
        names = [f"p = {p}" for p in self.p if p not in started_p]
        names += [line.label for line in self.lines if line not in started]
        names += [
            line.label if p is None else f"{line.label} at p = {p}"
            for p, line in itertools.product(started_p, started)
            if found and not self.find_cells(found, p, line)
        ]
        return f"not run yet: {'; '.join(names)}" if names else ""

    def table(self, found: Found) -> list[list[str]]:
        """Return a header and, for each p and line of the grid, the last metrics and the bytes sent."""
        names = [f"{spell_out(name)} after the last round" for name in self.columns]
        rows = [["p", "line", "seeds", "rounds", *names, "uplink of a client"]]
        for p, line in self.pairs():
            own = self.find_cells(found, p, line)
            texts = sealed.summarise_cells(own, self.columns)
            rows.append([NOTHING if p is None else str(p), line.label, sealed.count_cells(own), *texts])
        return rows


# Reading a grid


def read_table(path: Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the TOML table of a grid; missing keys come from the grid file that the key `like` names.

    `above` lists the grid files that led to this one by their key `like`.
    """
    file = os.path.realpath(path)
    if file in above:
        raise InputError(f"grid {path}: `like` must name other grids, but it leads back to this grid")
    try:
        table = parse_toml(read_file(path).decode(), f"grid {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the grid {path} ({getattr(error, 'strerror', error)})") from None
    _check_keys({key: table[key] for key in ("like", "base") if key in table}, f"grid {path.stem}", _KEYS)
    if "like" not in table:
        return table
    model = read_table(path.parent / table.pop("like"), (*above, file))
    for key, value in model.items():
        if isinstance(value, dict) and isinstance(table.get(key), dict):
            table[key] = _put_on_top(value, table[key]) if key == "base" else value | table[key]
    return model | table


def _put_on_top(below: Mapping[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Join two tables; a field in `above` replaces the same field in `below`, and all that it excludes."""
    gone = {name for group in EXCLUSIVE if not above.keys().isdisjoint(group) for name in group}
    return {name: value for name, value in below.items() if name not in gone} | above


_Check = Callable[[Any], object]
_Rules = Mapping[str, tuple[_Check, str]]  # the check of each key's value, and the rule in words


def _is_text(pattern: str) -> _Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value)


def _is_list(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, list) and value and all(map(is_right, value))


_are_counts = _is_list(lambda p: type(p) is int and p >= 1)
_KEYS: _Rules = {
    **dict.fromkeys(("like", "title", "subtitle"), (_is_text("(?s).*"), "text")),
    "base": (lambda v: isinstance(v, dict), "a table"),
    "line": (_is_list(lambda v: isinstance(v, dict)), "tables, each begun with [[line]]"),
    "seeds": (lambda v: type(v) is int and 1 <= v <= 1000, "a whole number between 1 and 1000"),
    "p": (
        lambda v: _are_counts(v) and len(set(v)) == len(v),
        "a list of different whole numbers, 1 or more",
    ),
    "columns": (_is_list(lambda v: v in COLUMNS), f"a list of some of {', '.join(COLUMNS)}"),
    "over": (_is_list(lambda v: v in OVER), f"a list of some of {', '.join(OVER)}"),
}
_LINE_KEYS: _Rules = {
    "name": (_is_text(r"[A-Za-z0-9][A-Za-z0-9_.-]*"), "letters, digits, dots and dashes"),
    "label": (_is_text("(?s).+"), "text"),
    "colour": (_is_text("#[0-9A-Fa-f]{6}"), "like #0072B2"),
}
_FIELDS: _Rules = dict.fromkeys(OPTIONS, (lambda value: True, ""))  # Config checks the values


def _check_keys(table: Mapping[str, Any], where: str, rules: _Rules) -> None:
    """Refuse an unknown key, and a value that breaks its key's rule."""
    for key, value in table.items():
        if key not in rules:
            remedy = advise_field(key, QUOTE) if rules is _FIELDS else advise(key, rules, QUOTE)
            raise InputError(f"{where} has an unknown key {key!r}; {remedy}")
        is_right, rule = rules[key]
        if not is_right(value):
            raise InputError(f"{where}: {key} must be {rule}, got {value!r}")


def _check_fields(table: Mapping[str, Any], where: str, trust: bool) -> None:
    """Refuse unknown fields of Config, and, without `trust`, values that would import Python code."""
    _check_keys(table, where, _FIELDS)
    if not trust:
        refuse_code(table, where, "set `trust` if you trust who wrote it")


def _parse_line(table: Mapping[str, Any], where: str, trust: bool) -> Line:
    where = f"{where}: the [[line]] {table.get('name')}"
    own = {"name": None, "label": None} | {key: table[key] for key in _LINE_KEYS if key in table}
    _check_keys(own, where, _LINE_KEYS)
    changes = {key: value for key, value in table.items() if key not in _LINE_KEYS}
    _check_fields(changes, where, trust)
    return Line(changes=changes, **own)


def _cross(lines: list[Line], vary: Sequence[str]) -> tuple[list[Line], tuple[int, ...]]:
    """Return each line with each combination of the values in `vary`; return also the seeds in `vary`."""
    seen, seeds = set[str](), ()
    for text in vary:
        left, equals, right = text.partition("=")
        fields = [name.strip().lstrip("-").replace("-", "_") for name in left.split(",")]
        if not equals:
            raise InputError(f"`vary` must be field=value|value, such as seed=0|1|2, got {text!r}")
        for name in fields:
            if name not in OPTIONS:
                raise InputError(f"`vary`: {name!r} is not a field; {advise_field(name, QUOTE)}")
        for name in fields:
            if name in seen:
                raise InputError(f"`vary` must name {name} once, got {name} twice; join its values with |")
            seen.add(name)
        values = [_parse_value(part.strip(), FIELD_TYPES[fields[0]]) for part in right.split("|")]
        if fields == ["seed"]:
            seeds = tuple(values)
        else:
            lines = [_vary(line, fields, value) for line in lines or [Line("", "", {})] for value in values]
    return lines or [Line("run", "run", {})], seeds


def _parse_value(text: str, kind: Any) -> Any:
    """Return the value of a text in TOML syntax; a string needs no quotes."""
    if str in (get_args(kind) or (kind,)):
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
