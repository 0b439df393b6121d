"""A disk that fails: killed before any step, and what was not synced taken back."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import cfedavg
from cfedavg.simulate.folder import Folder

SOURCE = str(Path(cfedavg.__file__).parent)
Place = tuple[tuple[str, int], ...]  # lines of the package, each called by the next


_numbers = itertools.count(1)


class Killed(BaseException):
    """Like SIGKILL: nothing after it runs."""


class Disk:
    """Counts what a run does to its files and dies before step `n`, or in the midst of it.

    A power cut then takes back a share of what was not synced: names in a folder, bytes in a file.
    """

    def __init__(self, n: float) -> None:
        self.n, self.steps, self.number = n, 0, next(_numbers)
        self._lock = threading.Lock()  # threads write residuals
        self.places: list[Place] = []  # where each step was taken
        self.undo: list[tuple[Path, Callable[[], None]]] = []  # the folder whose sync makes it final
        self.synced: dict[Path, int] = {}  # bytes of the file that are safe
        self.dirty: set[Path] = set()

    def step(self) -> None:
        with self._lock:
            self.steps += 1
            if self.steps > self.n:
                raise Killed
            self.places.append(_place())

    def dying(self) -> bool:
        return self.steps == self.n

    def save_file(self, real: Any, tensors: Any, path: Path, metadata: Any = None) -> None:
        self.step()
        real(tensors, path, metadata)
        self._written(path)

    def write_bytes(self, real: Any, path: Path, data: bytes) -> None:
        self.step()
        real(path, data)
        self._written(path)

    def append(self, real: Any, folder: Folder, row: Any) -> None:
        self.step()
        real(folder, row)
        self.dirty.add(folder.path / "metrics.jsonl")

    def append_bytes(self, real: Any, path: Path, data: bytes) -> None:
        self.step()
        self.synced.setdefault(path, path.stat().st_size)
        real(path, data[: len(data) // 2] if self.dying() else data)
        self.dirty.add(path)

    def _written(self, path: Path) -> None:
        self.dirty.add(path)
        self.synced[path] = 0
        if self.dying():  # the kill came while it was being written
            os.truncate(path, path.stat().st_size // 2)

    def replace(self, real: Any, path: Path, target: Path) -> None:
        self.step()
        self.undo.append((target.parent, partial(self._put, target, _bytes(target))))
        real(path, target)
        self.synced[target] = self.synced.pop(path, 0)
        self.dirty.discard(target)
        if path in self.dirty:
            self.dirty.remove(path)
            self.dirty.add(target)

    def unlink(self, real: Any, path: Path, missing_ok: bool = False) -> None:
        self.step()
        if path.exists():
            self.undo.append((path.parent, partial(self._put, path, _bytes(path))))
        real(path, missing_ok=missing_ok)

    def fsync(self, real: Any, handle: int) -> None:
        self.step()
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.is_dir():
            self.undo = [(folder, back) for folder, back in self.undo if folder != path]
        else:
            self.dirty.discard(path)
            self.synced[path] = path.stat().st_size

    def mkdir(self, real: Any, path: Path, *args: Any, **more: Any) -> None:
        self.step()
        if not path.exists():
            self.undo.append((path.parent, partial(shutil.rmtree, path, ignore_errors=True)))
        real(path, *args, **more)

    @staticmethod
    def _put(path: Path, data: bytes | None) -> None:
        if data is None:
            path.unlink(missing_ok=True)
        elif path.parent.exists():
            path.write_bytes(data)

    def cut_power(self, share: float, draw: random.Random, spared: int = 0) -> None:
        """Lose each change with this probability, except the newest: a disk may keep any order."""
        for path in sorted(self.dirty):
            if path.exists() and draw.random() < share:
                os.truncate(path, max(self.synced.get(path, 0), path.stat().st_size // 2))
        for _, back in reversed(self.undo[: len(self.undo) - spared]):
            if draw.random() < share:
                back()

    def telling(self) -> list[int]:
        """Return the first and the last of the steps taken at each place."""
        last = {place: n for n, place in enumerate(self.places)}
        first = {place: n for n, place in reversed([*enumerate(self.places)])}
        return sorted({*first.values(), *last.values()})

    @contextmanager
    def at_work(self) -> Iterator[None]:
        places = [("cfedavg.core.tensors.save_file", self.save_file), ("os.fsync", self.fsync)]
        places += [(f"pathlib.Path.{name}", getattr(self, name)) for name in
                   ("write_bytes", "replace", "unlink", "mkdir")]  # fmt: skip
        places += [("cfedavg.simulate.folder.Folder.append", self.append)]
        places += [("cfedavg.federate.stores.append", self.append_bytes)]
        places += [("os.getpid", lambda real: real() + self.number)]  # no process is another
        with pytest.MonkeyPatch.context() as patch:
            for place, mine in places:
                real = resolve_name(place)
                patch.setattr(
                    place, lambda *args, _mine=mine, _real=real, **more: _mine(_real, *args, **more)
                )
            yield


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _place() -> Place:
    found, frame = [], sys._getframe().f_back
    while frame:
        if frame.f_code.co_filename.startswith(SOURCE):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)
