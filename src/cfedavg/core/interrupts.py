"""Signals that ask a process to stop: Ctrl-C, a polite kill, a terminal that is closed.

The first one raises KeyboardInterrupt, so that a run saves its state. A second one ends the process, even
if the main thread hangs in a call that never returns to Python.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds in which signals count as one: torchrun passes on the Ctrl-C that the terminal has sent already,
# `timeout` signals its command twice, and a shell that is closed repeats the terminal's SIGHUP.
TOGETHER = 1.0
_SHOW_CURSOR = b"\x1b[?25h"


def ignore_stops() -> AbstractContextManager[None]:
    """Ignore all stop signals in the block, a second one too: for work that ends soon by itself."""
    return _handling(dict.fromkeys(STOPS, signal.SIG_IGN))


def mute_stops() -> AbstractContextManager[None]:
    """Raise nothing in the block. Unlike in `ignore_stops`, `watch_second_stop` hears a second one."""
    heard = (n for n in STOPS if signal.getsignal(n) is not signal.SIG_IGN)
    return _handling(dict.fromkeys(heard, lambda *_: None))


def catch_kills() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP where they would end the process."""
    unheard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    return _handling(dict.fromkeys(unheard, signal.default_int_handler))


@contextmanager
def defer_stops() -> Iterator[None]:
    """Handle signals that come in the block when it ends, also by an exception."""
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
    """The signal that has asked a command to stop. Only the first request raises."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._is_over = False

    def stop(self, signal: int, frame: object = None) -> None:
        """Note a signal and raise KeyboardInterrupt, if it is the first."""
        if self.signal is None and not self._is_over:
            self.signal = signal
            raise KeyboardInterrupt

    def finish(self) -> None:
        """Raise no more: nothing is left to stop."""
        self._is_over = True

    @property
    def code(self) -> int:
        """The exit code that shells give to a process that a signal ended."""
        return 128 + (self.signal or signal.SIGINT)


@contextmanager
def handle_stops() -> Iterator[StopRequest]:
    """Handle stop signals for a command. After the block, where its process ends, they are ignored.

    A signal that was ignored before, like SIGHUP under nohup, stays ignored.
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
    """End this process and its workers, a stopped one too, without saving or tidying up."""
    try:
        from multiprocessing import active_children  # not needed before, and a command should start at once

        for child in active_children():
            child.kill()
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)  # the progress bar hides it
    finally:
        os._exit(128 + number)


def leave(code: int) -> NoReturn:
    """End this process without the interpreter's own shutdown.

    With threads of torch.distributed alive, that end aborts now and then ("terminate called without an active
    exception"). A user would read this, and a launcher would take it for a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def watch_second_stop(end: Callable[[int], None]) -> Iterator[None]:
    """Call `end` with the number of the second signal, from a thread of its own.

    Python's handlers wait for the main thread, which may hang in a call (it waits for a stopped worker, say).
    The wakeup descriptor is written to at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set it
        return
    reader, writer = os.pipe()
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
    """Count signals until a zero comes, and pass them on to the previous descriptor."""
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
        yield  # only the main thread may set handlers, and only it is interrupted
        return
    before = {number: signal.getsignal(number) for number in handlers}
    try:
        _set(handlers)
        yield
    finally:
        _set(before)


def _set(handlers: Mapping[signal.Signals, Any]) -> None:
    """Set handlers as one: a signal finds all of them or none."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    except BaseException:  # a signal that another thread received: its handler has raised here
        for number, handler in handlers.items():
            signal.signal(number, handler)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
