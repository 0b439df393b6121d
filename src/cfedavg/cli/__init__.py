"""The command `cfedavg`: how it begins and how it ends.

`commands` lists the commands; `training`, `federate`, `inspect`, `parts` and `paper` hold them. `options`
holds the options that they share, `console` and `progress` their output. A command imports what it needs
beyond its options when it runs, so that `--help` is quick. Nothing slow is imported here, so that Ctrl-C is
handled from the start.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from cfedavg.core.interrupts import handle_stops, leave

__all__ = ["main"]


def main() -> None:
    """Run the command; after a request to stop, exit with 128 plus the number of the signal."""
    interrupted = 128 + signal.SIGINT  # typer's code too, whatever the signal was
    with handle_stops() as request:
        try:
            with protect_streams(request.stop):
                from cfedavg.cli.commands import run_command

                code = run_command()
            request.finish()
        except KeyboardInterrupt:
            code = interrupted
    code = request.code if code == interrupted else code
    ranks = sys.modules.get("cfedavg.simulate.engines.ranks")  # not imported for this: it takes long
    if ranks and ranks.Ranks.under_torchrun:
        leave(code)
    sys.exit(code)


class SafeStream:
    """A stream that writes as long as it can, then nowhere, and never raises: a run's state matters more.

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
            # The descriptor leads nowhere from now on: buffers that are not empty must go somewhere too.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor
                os.dup2(nowhere.fileno(), self._stream.fileno())
        if self._unread and threading.current_thread() is threading.main_thread():
            self._stop(signal.SIGPIPE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def protect_streams(stop: Callable[[int], None]) -> Iterator[None]:
    """Make stdout and stderr SafeStreams in the block, and flush them at its end."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and SafeStream(stream, stop) for stream in before)
    try:
        yield
    finally:
        own = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = before
        for stream in own:
            if stream:
                stream.flush()
