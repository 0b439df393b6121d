"""What a search tells its user: sentences, and a line that says what it does now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cfedavg.callbacks.progress import Board
from cfedavg.core.units import format_time


class Progress:
    """Shows a search on a board; without a board, nothing. `left` returns the seconds that are left."""

    def __init__(self, board: Board | None, left: Callable[[], float]) -> None:
        self._board, self._left = board, left
        self._title, self._total = "", 0

    def say(self, text: str) -> None:
        """Show a sentence."""
        if self._board:
            self._board.say(text)

    @contextmanager
    def rung(self, title: str, total: int) -> Iterator[None]:
        """Show a line during the `with` block, in which `total` candidates train."""
        self._title, self._total = title, total
        if not self._board:
            yield
            return
        self._bar = self._board.add(title, total)
        try:
            yield
        finally:
            self._board.remove(self._bar)

    def update(self, done: int, text: str, *, is_done: bool = False) -> None:
        """Say in the line what happens now, or, where there is no live line, which candidate is done."""
        if not self._board:
            return
        ends = f"the search ends in {format_time(max(0.0, self._left()))} at the latest"
        live = self._board.update(self._bar, completed=done, line=f"{text}; {ends}")
        if not live and is_done:
            self._board.say(f"{self._title}, {done} of {self._total}: {text}; {ends}")
