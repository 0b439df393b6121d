"""The entry point of the command `cfedavg`: signals, output streams and exit codes.

The module `commands` lists the subcommands; `training`, `sweep` and `inspect` define them. `console` holds
the options and the output that they share; `progress` shows a run. A subcommand imports slow modules only
when it runs, so that `--help` is quick. This module imports nothing slow, so that Ctrl-C is handled from the
start.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from cfedavg.core.errors import InputError
from cfedavg.core.extras import explain
from cfedavg.core.interrupts import end_process, handle_stops, leave
from cfedavg.core.system import BROKEN_PIPE

__all__ = ["command", "main"]


def command() -> None:
    """Do what `main` does; in a process that is there for the command alone, also end the process, quickly.

    Under a profiler, a debugger or another program, which may have work left after the command, this
    function raises SystemExit as `main` does.
    """
    caller = sys._getframe(1)
    try:
        main()
    except SystemExit as stop:
        if caller.f_back is None and isinstance(stop.code, int | None):
            end_process(stop.code or 0)
        raise


def main() -> None:
    """Run the typed command and exit with its code, or with 128 + the signal's number after a stop signal."""
    interrupted = 128 + signal.SIGINT  # typer returns this code for every signal
    with handle_stops() as request:
        try:
            with protect_streams(request.stop):
                code = _run_command()
            request.finish()
        except KeyboardInterrupt:
            code = interrupted
    code = request.code if code == interrupted else code
    ranks = sys.modules.get("cfedavg.simulate.engines.ranks")  # no import, which would be slow
    if ranks and ranks.Ranks.under_torchrun:
        leave(code)
    sys.exit(code)


def _run_command() -> int:
    """Run the typed command and return its exit code.

    If a library is missing, or an environment variable is wrong, the import says so in one sentence.
    """
    try:
        from cfedavg.cli.commands import run_command

        return run_command()
    except ModuleNotFoundError as error:
        if sentence := explain(error):
            print(f"error: {sentence}", file=sys.stderr)
            return 2
        raise
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


class SafeStream:
    """A text stream that never raises an error: after a failed write, it discards all further text.

    If the reader of a pipe has closed the pipe, the main thread calls `stop` with the number of SIGPIPE.
    If the terminal is gone or the disk is full, the command continues without output. A character
    that the encoding lacks is written as a question mark.
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
            # From now on the descriptor writes to the null device, also what is still in buffers.
            with suppress(OSError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - a descriptor
                os.dup2(nowhere.fileno(), self._stream.fileno())
        if self._unread and threading.current_thread() is threading.main_thread():
            self._stop(BROKEN_PIPE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def protect_streams(stop: Callable[[int], None]) -> Iterator[None]:
    """Replace stdout and stderr by SafeStreams in the `with` block; flush both at its end."""
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
