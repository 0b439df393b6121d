"""What a cell of an experiment gave, in one sealed file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cfedavg.core.config import renew
from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file, write_atomic

_PARTS = ("name", "made", "settings", "values")
_NUMBER = (int, float, type(None))  # null where nothing was measured, or it was infinite


@dataclass(frozen=True)
class Entry:
    """A cell: its settings, the values that came out, and by whom, with what and how fast they were made."""

    name: str
    settings: dict[str, Any]
    values: dict[str, Any]
    made: dict[str, Any]


class Damaged(InputError):
    """A file that is not what was once written: nothing in it is to be trusted."""


def write(folder: Path, entry: Entry) -> Path:
    """Puts the cell into the folder, one column a line, so that a change shows in a diff."""
    path = folder / f"{entry.name}.json"
    table = {part: getattr(entry, part) for part in _PARTS}
    lines = [f"  {json.dumps(key)}: {_text(value)}" for key, value in entry.values.items()]
    heads = [f' "{part}": {_text(table[part])}' for part in _PARTS[:-1]]
    seal = f' "seal": "{_seal(table)}"'
    text = ",\n".join([*heads, seal, ' "values": {\n' + ",\n".join(lines) + "\n }"])
    write_atomic(path, f"{{\n{text}\n}}\n".encode())
    return path


def read(path: Path) -> Entry:
    """The cell in a file; Damaged if it is not as it was written."""
    try:
        table = json.loads(read_file(path))
        settings = table["settings"]
        if "dataset" in settings:  # those of a run are options; a small study has names of its own
            settings = renew(settings)
        entry = Entry(table["name"], settings, table["values"], table["made"])
        whole = table["seal"] == _seal({part: table[part] for part in _PARTS}) and entry.name == path.stem
        whole = whole and _usable(entry)
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise Damaged(f"{path} is damaged")
    return entry


def _usable(entry: Entry) -> bool:
    """Whether it holds what figures and claims ask every cell for; a seal does not say that."""
    made, settings = entry.made, entry.settings
    is_value = _is_column if "dataset" in settings else _of_numbers
    return (
        isinstance(made["seconds"], int | float)
        and all(isinstance(made[key], str) for key in ("version", "hardware"))
        and type(settings["seed"]) is int
        and type(settings.get("rounds", 0)) is int
        and all(
            isinstance(value, str) if key == "diverged" else is_value(value)
            for key, value in entry.values.items()
        )
    )


def _is_column(value: Any) -> bool:
    """A run has a number for each round."""
    return isinstance(value, list) and all(isinstance(each, _NUMBER) for each in value)


def _of_numbers(value: Any) -> bool:
    """A small study has numbers, in lists and tables of its own."""
    if isinstance(value, list | dict):
        return all(map(_of_numbers, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _NUMBER)


def read_all(folder: Path) -> dict[str, Entry]:
    """Every cell in a folder, by name."""
    return {entry.name: entry for entry in map(read, sorted(folder.glob("*.json")))}


def rounded(value: float | None) -> float | None:
    """Six digits: more than any figure shows, and half the bytes.

    >>> rounded(0.123456789), rounded(582026), rounded(None)
    (0.123457, 582026, None)
    """
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _seal(table: dict[str, Any]) -> str:
    plain = json.dumps(table, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]
