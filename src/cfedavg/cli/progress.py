"""The progress of runs: a live line for each run in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from cfedavg.cli.console import PLAIN, OptionConsole
from cfedavg.core.run_files import Record
from cfedavg.core.units import format_bytes
from cfedavg.simulate.run import Observer

PLAIN_EVERY = 2.0  # seconds between plain lines
TITLE = 36  # characters of a run's title, so that a line fits into 80 columns


def make_progress(console: Console) -> Progress | None:
    """Return the live lines of the runs in a terminal; None elsewhere."""
    if not console.is_terminal:
        return None
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}", markup=False),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=console)


class Display(Observer):
    """An observer that shows accuracy, bytes, SNR, the ratio of residual to update, and the time left.

    Inside `with`, the run has a line in `board`; without a board, it has the only line of a board of its own.
    """

    def __init__(self, console: Console, rounds: int, title: str, board: Board | None = None) -> None:
        self.console, self.rounds, self.title = console, rounds, title
        self.board = board or Board(console)
        self._up, self._down, self._first, self._metric = 0, 0, 0, ""

    def __enter__(self) -> Self:
        self._bar = self.board.add(self.title, self.rounds)
        return self

    def __exit__(self, *_: object) -> None:
        self.board.remove(self._bar)

    def begin(self, rows: list[Record]) -> None:
        self._up, self._down, self._first = 0, 0, 0
        for row in rows:
            self._count(row)

    def say(self, text: str) -> None:
        self.console.print(text, **PLAIN)

    def now(self, text: str) -> None:
        """Show `text`, which says what the run waits for, until the next row of metrics."""
        if not self.board.update(self._bar, line=text):
            self.say(text)

    def row(self, row: Record) -> None:
        self._count(row)
        if "test_accuracy" in row:  # not in every row: the last known accuracy stays visible
            self._metric = f"accuracy {row['test_accuracy']:.2%}"
        line, done = self._describe(row), row["round"] + 1
        if self.board.update(self._bar, completed=done, line=self._metric if self.board.several else line):
            return
        if self.board.is_due() or done == self.rounds:
            self.say(f"{self._name()}round {done}/{self.rounds}  {line}")

    def say_total(self) -> None:
        """Print how many bytes all rounds have sent."""
        up, down, total, first = map(format_bytes, (self._up, self._down, self._up + self._down, self._first))
        downloads = f", of which {first} are the clients' first downloads" if self._first else ""
        self.say(f"{self._name()}sent {up} up and {down} down, {total} in total{downloads}")

    def _name(self) -> str:
        """Return the beginning of a line: the run's title, if several runs share the board."""
        return f"{self.title}: " if self.board.several else ""

    def _count(self, row: Record) -> None:
        self._up += row["uplink_bytes"]
        self._down += row["downlink_bytes"]
        self._first += row.get("first_download_bytes") or 0

    def _describe(self, row: Record) -> str:
        total = f"{format_bytes(self._up + self._down)} ({format_bytes(self._up)} up)"
        parts = [self._metric] * bool(self._metric) + [total]
        if row["snr_min"] is not None:
            parts.append(f"SNR {row['snr_min']:.3g}")
        if row["delta_norm2"] and row["error_norm2"]:
            parts.append(f"|e|²/|g|² {row['error_norm2'] / row['delta_norm2']:.3g}")
        if row["lost"]:
            parts.append(f"lost {row['lost']}")
        return "  ".join(parts)


class Board:
    """The live lines of the runs that are under way, one for each run; short ones if there are `several`."""

    def __init__(self, console: Console) -> None:
        self.console, self.shown, self.several = console, 0, False
        self._progress, self._printed_at = make_progress(console), 0.0

    @contextmanager
    def show(self, title: str, rounds: int) -> Iterator[Display]:
        """Give the `with` block a Display; if the block raises no error, print how many bytes were sent."""
        with Display(self.console, rounds, title, self) as display:
            yield display
        display.say_total()

    def add(self, title: str, rounds: int) -> TaskID:
        """Add a line for a run, and return its number; of a long title, show the end."""
        self.shown += 1
        self.several |= self.shown > 1
        if not self._progress:
            return TaskID(0)
        self._progress.start()
        short = title if len(title) <= TITLE else f"…{title[1 - TITLE :]}"
        return self._progress.add_task(short, total=rounds, line="")

    def remove(self, bar: TaskID) -> None:
        """Remove a run's line; the last line stays on the screen."""
        self.shown -= 1
        if self._progress and self.shown:
            self._progress.remove_task(bar)
        elif self._progress:
            self._progress.stop()
            self._progress = make_progress(self.console)

    def update(self, bar: TaskID, **fields: Any) -> bool:
        """Change a run's line; return False if there are no live lines."""
        if self._progress:
            self._progress.update(bar, **fields)
        return self._progress is not None

    def is_due(self) -> bool:
        """Return whether it is time for the next plain line."""
        now = time.monotonic()
        due = now - self._printed_at >= PLAIN_EVERY
        self._printed_at = now if due else self._printed_at
        return due


@contextmanager
def show_progress(title: str, rounds: int) -> Iterator[Display]:
    """Give the `with` block a Display; if the block raises no error, print how many bytes were sent."""
    with Board(OptionConsole()).show(title, rounds) as display:
        yield display
