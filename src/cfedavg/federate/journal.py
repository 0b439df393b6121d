"""Lines that are only ever added to, so that what a round stores does not grow with what was stored before.

Which of the lines count is said by a Place, and that is stored elsewhere, in one step with what the lines
belong to. Lines that were added in vain, by a process that was killed before it stored the Place, do not
count; nor is that file ever written to again, as every process begins one of its own. It begins another
when most of the lines are old; the file before stays until nothing durable refers to it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cfedavg.core.files import append, read_file, sync, write_atomic

_NAME = re.compile(r"clients\.(\d+)\.jsonl")


class Place(NamedTuple):
    """How much of which file counts, and the checksum of that."""

    number: int
    length: int
    checksum: int


def begin(folder: Path, lines: Iterable[Any]) -> Place:
    """Makes a file of these lines, durably. All that others refer to stays as it is."""
    data = _encoded(lines)
    number = 1 + max(_numbers(folder).values(), default=0)
    write_atomic(_path(folder, number), data)
    return Place(number, len(data), zlib.crc32(data))


def add(folder: Path, place: Place, lines: Iterable[Any]) -> Place:
    """Adds lines, durably, to a file that ends at the place."""
    if not (data := _encoded(lines)):
        return place
    path = _path(folder, place.number)
    append(path, data)
    sync(path)
    return Place(place.number, place.length + len(data), zlib.crc32(data, place.checksum))


def read(folder: Path, place: Place) -> list[Any]:
    """The lines that count; ValueError or OSError if they are not there, or not as they were written."""
    path = _path(folder, place.number)
    data = read_file(path)[: place.length]
    if len(data) != place.length or zlib.crc32(data) != place.checksum:
        raise ValueError(f"{path.name} does not fit to it")
    return [json.loads(line) for line in data.splitlines()]


def sweep(folder: Path, place: Place) -> None:
    """Removes all other files, once nothing durable refers to them."""
    for path, number in _numbers(folder).items():
        if number != place.number:
            with suppress(OSError):
                path.unlink()


def _encoded(lines: Iterable[Any]) -> bytes:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()


def _path(folder: Path, number: int) -> Path:
    return folder / f"clients.{number}.jsonl"


def _numbers(folder: Path) -> dict[Path, int]:
    found = {path: _NAME.fullmatch(path.name) for path in folder.glob("clients.*.jsonl")}
    return {path: int(match[1]) for path, match in found.items() if match}
