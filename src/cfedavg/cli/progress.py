"""The progress of a run: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cfedavg.cli.console import PLAIN, OptionConsole
from cfedavg.core.run_files import Record
from cfedavg.core.units import format_bytes
from cfedavg.simulate.run import Observer

PLAIN_EVERY = 2.0  # seconds between plain lines


class Display(Observer):
    """An observer that shows accuracy, bytes, SNR, the ratio of residual to update, and the time left."""

    def __init__(self, console: Console, rounds: int, title: str) -> None:
        self.console, self.rounds = console, rounds
        self._up, self._down, self._first, self._printed_at, self._metric = 0, 0, 0, 0.0, ""
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[line]}", markup=False),
                TimeRemainingColumn(compact=True),
            )
            self._progress = Progress(*columns, console=console)
            self._bar = self._progress.add_task(title, total=rounds, line="")

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def begin(self, rows: list[Record]) -> None:
        self._up, self._down, self._first = 0, 0, 0
        for row in rows:
            self._count(row)

    def say(self, text: str) -> None:
        self.console.print(text, **PLAIN)

    def now(self, text: str) -> None:
        """Show `text`, which says what the run waits for, until the next row of metrics."""
        if self._progress:
            self._progress.update(self._bar, line=text)
        else:
            self.say(text)

    def row(self, row: Record) -> None:
        self._count(row)
        if "test_accuracy" in row:  # not in every row: the last known accuracy stays visible
            self._metric = f"accuracy {row['test_accuracy']:.2%}"
        line, done = self._describe(row), row["round"] + 1
        if self._progress:
            self._progress.update(self._bar, completed=done, line=line)
        elif done == self.rounds or time.monotonic() - self._printed_at >= PLAIN_EVERY:
            self._printed_at = time.monotonic()
            self.say(f"round {done}/{self.rounds}  {line}")

    def say_total(self) -> None:
        """Print how many bytes all rounds have sent."""
        up, down, total, first = map(format_bytes, (self._up, self._down, self._up + self._down, self._first))
        downloads = f", of which {first} are the clients' first downloads" if self._first else ""
        self.say(f"sent {up} up and {down} down, {total} in total{downloads}")

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


@contextmanager
def show_progress(title: str, rounds: int) -> Iterator[Display]:
    """Give the `with` block a Display; if the block raises no error, print how many bytes were sent."""
    with Display(OptionConsole(), rounds, title) as display:
        yield display
    display.say_total()
