"""stdout and stderr that no reader can break: a run's state matters more than its progress."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class Outlet:
    """A stream that writes as long as it can, then nowhere, and never raises.

    A pipe that its reader has closed asks to stop: `stop` is called with the number of SIGPIPE, in the main
    thread. A terminal that is gone or a disk that is full only silences the command. Where the encoding
    lacks a character, a question mark stands for it.
    """

    def __init__(self, stream: TextIO, stop: Callable[[int], None]) -> None:
        self._stream, self._stop, self._unread = stream, stop, False

    def write(self, text: str) -> int:
        try:
            self._attempt(self._stream.write, text)
        except UnicodeEncodeError as error:
            self._attempt(self._stream.write, text.encode(error.encoding, "replace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[..., Any], *arguments: str) -> None:
        try:
            action(*arguments)
        except OSError as error:
            self._unread |= isinstance(error, BrokenPipeError)
            self._silence()
        if self._unread and threading.current_thread() is threading.main_thread():
            self._stop(signal.SIGPIPE)

    def _silence(self) -> None:
        """Let the descriptor lead nowhere: what is still in buffers must go somewhere too."""
        with suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor is needed
            os.dup2(nowhere.fileno(), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def outlets(stop: Callable[[int], None]) -> Iterator[None]:
    """Within it, everyone who prints does so through an Outlet; at its end all is written."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and Outlet(stream, stop) for stream in before)
    try:
        yield
    finally:
        own = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = before
        for stream in own:
            if stream:
                stream.flush()
