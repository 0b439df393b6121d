"""Stop signals: SIGINT (Ctrl-C), SIGTERM (kill) and SIGHUP (a closed terminal; on Windows SIGBREAK).

The first stop signal raises KeyboardInterrupt, so that a run saves its state. The second ends the process,
even if the main thread hangs in a call that never returns to Python.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn

from cfedavg.core.system import STOPS, block_stops, unblock_stops

# Signals within this many seconds count as one: torchrun repeats the Ctrl-C that the terminal has sent too,
# `timeout` signals its command twice, and a shell that is closed repeats the terminal's SIGHUP.
TOGETHER = 1.0


def ignore_stops() -> AbstractContextManager[None]:
    """Ignore all stop signals in the `with` block, even a second one. For short work only."""
    return _handling(dict.fromkeys(STOPS, signal.SIG_IGN))


def mute_stops() -> AbstractContextManager[None]:
    """Let stop signals raise no error in the `with` block; `watch_second_stop` still counts them."""
    heard = (n for n in STOPS if signal.getsignal(n) is not signal.SIG_IGN)
    return _handling(dict.fromkeys(heard, lambda *_: None))


def catch_kills() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt in the `with` block, unless handled or ignored."""
    unheard = [n for n in STOPS[1:] if signal.getsignal(n) is signal.SIG_DFL]
    return _handling(dict.fromkeys(unheard, signal.default_int_handler))


@contextmanager
def defer_stops() -> Iterator[None]:
    """Delay stop signals during the `with` block: handle the first one when the block ends or raises."""
    handlers = {n: handler for n in STOPS if callable(handler := signal.getsignal(n))}
    caught: list[tuple[int, Any]] = []
    try:
        with _handling(dict.fromkeys(handlers, lambda *signal_and_frame: caught.append(signal_and_frame))):
            yield
    finally:
        if caught:
            number, frame = caught[0]
            handlers[signal.Signals(number)](number, frame)


class StopRequest:
    """A user's request to stop a command: only the first stop signal raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._is_over = False

    def stop(self, signal: int, frame: object = None) -> None:
        """Store the first stop signal and raise KeyboardInterrupt; do nothing at later stop signals."""
        if self.signal is None and not self._is_over:
            self.signal = signal
            raise KeyboardInterrupt

    def finish(self) -> None:
        """Let later stop signals raise nothing, since the command has ended."""
        self._is_over = True

    @property
    def code(self) -> int:
        """The exit code after a stop signal, as shells report it: 128 + the signal's number."""
        return 128 + (self.signal or signal.SIGINT)


@contextmanager
def handle_stops() -> Iterator[StopRequest]:
    """Raise KeyboardInterrupt at the first stop signal in the `with` block; end the process at the second.

    After the block, stop signals are ignored until the process ends. A signal that was ignored before the
    block, like SIGHUP under nohup, stays ignored.
    """
    request = StopRequest()
    heard = [n for n in STOPS if signal.getsignal(n) is not signal.SIG_IGN]
    with watch_second_stop(end_at_once):
        _set(dict.fromkeys(heard, request.stop))
        try:
            yield request
        finally:
            request.finish()
            _set(dict.fromkeys(heard, signal.SIG_IGN))


def end_at_once(number: int) -> None:
    """End this process and its workers, even suspended ones, with exit code 128 + `number`; save nothing."""
    try:
        from multiprocessing import active_children  # imported here, so that commands start fast

        for child in active_children():
            child.kill()
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")  # show the cursor, which the progress bar hides
    finally:
        os._exit(128 + number)


def leave(code: int) -> NoReturn:
    """End this process with exit code `code`, without the shutdown of the Python interpreter.

    If threads of torch.distributed are alive, the interpreter's shutdown sometimes aborts ("terminate called
    without an active exception"). The user would see this text, and a launcher would see a failure.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # missing, on a full disk, or closed
            stream.flush()
    os._exit(code)


def end_process(code: int) -> NoReturn:
    """End this process as Python does, but leave its memory to the system.

    Threads are waited for, functions of `atexit` are called, and files that are still open are written. To
    take the interpreter and torch apart would take a second more.
    """
    vars(threading)["_shutdown"]()
    atexit._run_exitfuncs()
    _flush_files()
    leave(code)


def _flush_files() -> None:
    """Write what is in the buffers of open files, such as the log of a user's class that never closes it."""
    kinds = io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom  # text goes into the others first
    files = [each for each in gc.get_objects() if type(each) in kinds]
    for file in sorted(files, key=lambda each: kinds.index(type(each))):
        with suppress(OSError, ValueError):
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a full pipe would keep us waiting
                file.flush()


@contextmanager
def watch_second_stop(end: Callable[[int], None]) -> Iterator[None]:
    """At the second stop signal in the `with` block, call `end` with its number, from another thread.

    Python's signal handlers run in the main thread, which may hang in a call (for example, while it waits for
    a suspended worker). So another thread reads the signals from a pipe, the wakeup descriptor, into which
    Python writes each signal at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set the wakeup descriptor
        return
    reader, writer = os.pipe()
    if sys.platform != "win32":  # Python on Windows accepts a pipe that may block, for few bytes
        os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(reader, before, end), daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")
        listener.join()
        os.close(reader)
        os.close(writer)


def _listen(reader: int, onward: int, end: Callable[[int], None]) -> None:
    """Read signal numbers from the pipe `reader` until a zero byte; call `end` at the second stop signal.

    Write each number also to `onward`, the wakeup descriptor that was set before, unless it is -1 (none).
    """
    first: float | None = None
    while (data := os.read(reader, 1)) != b"\0":
        if onward != -1:
            with suppress(OSError):
                os.write(onward, data)
        if data[0] not in STOPS:
            continue
        now = time.monotonic()
        if first is None:
            first = now
        elif now - first > TOGETHER:
            end(data[0])


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only the main thread is interrupted
        return
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        _set(handlers)
        yield
    finally:
        _set(before)


def _set(handlers: Mapping[signal.Signals, Any]) -> None:
    """Set several signal handlers together: no signal is handled while only some of them are set."""
    before = block_stops()
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    except BaseException:  # another thread received a signal, and the signal's handler raised here
        for number, handler in handlers.items():
            signal.signal(number, handler)
        raise
    finally:
        unblock_stops(before)
