"""Callback: the base class of what follows a run, and a list of callbacks as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.run_files import Record


@dataclass(frozen=True)
class Start:
    """What a callback learns when a run starts.

    `config` is the configuration, `folder` the folder of the run (None if the run writes none), and `rows`
    holds the metrics of the rounds that were done before a resume.
    """

    config: Config
    folder: Path | None
    rows: list[Record]


class Callback:
    """The base class of callbacks. Its methods do nothing; a subclass overrides those that it needs.

    A run calls them in its own process, between rounds, so a slow callback makes the run slow. If a callback
    raises an error, the run ends with this error; the rows so far are in the run's folder, and `resume`
    continues from the last checkpoint.

    >>> class Printer(Callback):
    ...     def on_row(self, row):
    ...         print(row["round"], row["total_bytes"])
    """

    def on_begin(self, start: Start) -> None:
        """Receive the start of the run: its configuration, its folder, and the rows before a resume."""

    def on_row(self, row: Record) -> bool | None:
        """Receive the metrics of a finished round. Return True to end the run after this round.

        On a GPU the next round has begun by then; it is finished first.
        """
        return None

    def on_end(self, error: BaseException | None) -> None:
        """Receive the end of the run; `error` is None unless an error or an interrupt ended it.

        Every callback whose `on_begin` was called receives the end.
        """

    def on_message(self, text: str) -> None:
        """Receive a sentence for the user, perhaps before `on_begin`.

        Another thread may call this, to report a worker that hangs.
        """

    def on_wait(self, text: str) -> None:
        """Receive a text that says what the run waits for; the text is valid until the next row."""


class CallbackList(Callback):
    """Several callbacks as one. At the end of its `with` block, those that have begun receive the end."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._all, self._begun = list(callbacks), list[Callback]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_end(error)

    def on_begin(self, start: Start) -> None:
        for each in self._all:
            self._begun.append(each)
            each.on_begin(start)

    def on_end(self, error: BaseException | None) -> None:
        while self._begun:
            try:
                self._begun.pop().on_end(error)
            except BaseException:
                self.on_end(error)  # the others receive the end too
                raise

    def on_row(self, row: Record) -> bool:
        stops = [each.on_row(row) for each in self._all]
        return any(stops)

    def on_message(self, text: str) -> None:
        for each in self._all:
            each.on_message(text)

    def on_wait(self, text: str) -> None:
        for each in self._all:
            each.on_wait(text)


def check_callbacks(callbacks: object) -> None:
    """Raise InputError unless `callbacks` is a list or tuple of callbacks."""
    if not isinstance(callbacks, list | tuple):
        raise InputError(
            f"run: `callbacks` must be a list of Callback objects, got {type(callbacks).__name__}; "
            "write callbacks=[...]"
        )
    for each in callbacks:
        if isinstance(each, type):
            raise InputError(
                f"run: `callbacks` must hold objects, got the class {each.__name__}; write {each.__name__}()"
            )
        if not isinstance(each, Callback):
            raise InputError(f"run: `callbacks` must hold Callback objects, got {type(each).__name__}")
