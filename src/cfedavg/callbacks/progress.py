"""The progress of runs: a live line for each run in a terminal or a notebook, plain lines elsewhere."""

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

from cfedavg.callbacks.callback import Callback, Start
from cfedavg.callbacks.notebook import NotebookLines, in_notebook
from cfedavg.core.run_files import Record
from cfedavg.core.totals import Totals, find_metric
from cfedavg.core.units import format_bytes, is_share, spell_out

PLAIN_EVERY = 2.0  # seconds between plain lines
TITLE = 36  # characters of a run's title, so that a line fits into 80 columns
WIDTH = 80  # columns of a plain line
BAR = 10


def make_progress(console: Console) -> Progress | NotebookLines | None:
    """Return the live lines of the runs in a terminal or a notebook; None elsewhere."""
    if console.is_jupyter:
        return NotebookLines()
    if not console.is_terminal:
        return None
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=BAR),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}", markup=False),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=console)


class Display(Callback):
    """A callback that shows the metric, bytes, SNR, the ratio of residual to update, and the time left.

    Inside `with`, the run has a line in `board`; without a board, it has the only line of a board of its own.
    """

    def __init__(self, console: Console, rounds: int, title: str, board: Board | None = None) -> None:
        self.rounds, self.title = rounds, title
        self.board = board or Board(console)
        self._totals, self._metric, self._tested = Totals(), "", False

    def __enter__(self) -> Self:
        self._bar = self.board.add(self.title, self.rounds)
        return self

    def __exit__(self, *_: object) -> None:
        self.board.remove(self._bar)

    def on_begin(self, start: Start) -> None:
        self._totals = Totals()
        for row in start.rows:
            self._totals.add(row)

    def on_message(self, text: str) -> None:
        self.board.say(text)

    def on_wait(self, text: str) -> None:
        """Show `text`, which says what the run waits for, until the next row of metrics."""
        if not self.board.update(self._bar, line=text):
            self.board.say(text)

    def on_row(self, row: Record) -> bool | None:
        self._totals.add(row)
        name = find_metric(row)
        if name and (name.startswith("test_") or not self._tested):  # not in every row: the last one stays
            self._metric, self._tested = _format_metric(name, row[name]), name.startswith("test_")
        done = row["round"] + 1
        room = self.board.room(self.title, self.rounds)
        line = self._metric if self.board.several else self._describe(row, room)
        if not self.board.update(self._bar, completed=done, line=line) and (
            self.board.is_due() or done == self.rounds
        ):
            begins = f"{self._name()}round {done}/{self.rounds}"
            self.board.say(f"{begins}  {self._describe(row, WIDTH - len(begins) - 2)}")
        return None

    def say_total(self) -> None:
        """Print how many bytes all rounds have sent."""
        self.board.say(f"{self._name()}{self._totals}")

    def _name(self) -> str:
        """Return the beginning of a line: the run's title, if several runs share the board."""
        return f"{_shorten(self.title)}: " if self.board.several else ""

    def _describe(self, row: Record, room: int) -> str:
        """Return the state of the run in at most `room` characters; the most important comes first."""
        up, total = self._totals.up, format_bytes(self._totals.total)
        lost = f"lost {row['lost']}" if row["lost"] else ""
        snr = f"SNR {row['snr_min']:.3g}" if row["snr_min"] is not None else ""
        memory = ""
        if row["delta_norm2"] and row["error_norm2"]:
            memory = f"|e|²/|g|² {row['error_norm2'] / row['delta_norm2']:.3g}"
        line = ""
        for text in (self._metric, total, f"({format_bytes(up)} up)", lost, snr, memory):
            gap = "" if not line else " " if text.startswith("(") else "  "
            if text and len(line) + len(gap) + len(text) <= room:
                line += gap + text
        return line


def _shorten(title: str) -> str:
    """Return the title of a run, or its end if it is long."""
    return title if len(title) <= TITLE else f"…{title[1 - TITLE :]}"


def _format_metric(name: str, value: float) -> str:
    """Return a metric for a line, such as `accuracy 97.53%`."""
    text = f"{value:.2%}" if is_share(name) else f"{value:.3g}"
    return f"{spell_out(name.removeprefix('test_'))} {text}"


class Board:
    """The live lines of the runs that are under way, one for each run; short ones if there are `several`.

    Nothing is shown in the first `silent` seconds; what is said then is shown after them.
    """

    def __init__(self, console: Console, silent: float = 0.0) -> None:
        self.console, self.shown, self.several = console, 0, False
        self._progress, self._printed_at = make_progress(console), 0.0
        self._from, self._held = time.monotonic() + silent, list[str]()
        self._started = False

    @contextmanager
    def show(self, title: str, rounds: int) -> Iterator[Display]:
        """Give the `with` block a Display; if the block raises no error, print how many bytes were sent."""
        with Display(self.console, rounds, title, self) as display:
            yield display
        display.say_total()

    def say(self, text: str) -> None:
        """Print a text without colours; do not wrap its lines."""
        self._held.append(text)
        self._show_held()

    def _show_held(self) -> None:
        """If the silent seconds are over, print what was said, and start the live lines."""
        if time.monotonic() < self._from:
            return
        for each in self._held:
            if self.console.is_jupyter:
                print(each, flush=True)  # rich would make an output of each line
            else:
                self.console.print(each, highlight=False, markup=False, soft_wrap=True)
        self._held.clear()
        if self._progress and not self._started and self.shown:
            self._progress.start()
            self._started = True

    def room(self, title: str, rounds: int) -> int:
        """Return how many characters a live line has for the state of its run, beside the bar."""
        shown = min(len(title), TITLE) + BAR + 2 * len(str(rounds)) + 1 + len("00:00")
        return self.console.width - shown - 4 - 1  # four gaps, and a column that some terminals need

    def add(self, title: str, rounds: int) -> TaskID:
        """Add a line for a run, and return its number."""
        self.shown += 1
        self.several |= self.shown > 1
        if not self._progress:
            return TaskID(0)
        self._show_held()
        return self._progress.add_task(_shorten(title), total=rounds, line="")

    def remove(self, bar: TaskID) -> None:
        """Remove a run's line; the last line stays on the screen."""
        self.shown -= 1
        if self._progress and self.shown:
            self._progress.remove_task(bar)
        elif self._progress:
            self._progress.stop()
            self._progress, self._started = make_progress(self.console), False

    def update(self, bar: TaskID, **fields: Any) -> bool:
        """Change a run's line; return False if there are no live lines."""
        if self._progress:
            self._show_held()
            self._progress.update(bar, **fields)
        return self._progress is not None

    def is_due(self) -> bool:
        """Return whether it is time for the next plain line."""
        now = time.monotonic()
        due = now - self._printed_at >= PLAIN_EVERY
        self._printed_at = now if due else self._printed_at
        return due


def make_console() -> Console:
    """Return the console of a run from Python: stderr, or the output of the cell of a notebook."""
    return Console(force_jupyter=True) if in_notebook() else Console(stderr=True)


@contextmanager
def show_progress(rounds: int, silent: float) -> Iterator[Display]:
    """Give the `with` block the Display of a run from Python, which shows nothing for `silent` seconds."""
    console = make_console()
    with Display(console, rounds, "training", Board(console, silent)) as display:
        yield display  # without a total: the Result says it
