"""Ctrl-C and polite kills: when they are heard, and when not."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


def deaf() -> AbstractContextManager[None]:
    """Lets no second Ctrl-C break off what the first one asked to save."""
    return _handling(signal.SIG_IGN, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))


def polite() -> AbstractContextManager[None]:
    """Makes a polite kill, or a terminal that is closed, a KeyboardInterrupt, where it would just end us."""
    unheard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    return _handling(signal.default_int_handler, unheard)


@contextmanager
def _handling(handler: Any, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it is interrupted
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
