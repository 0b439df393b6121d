"""Threads that count bytes while a GPU trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Counters:
    """Work for threads that begins when the next round trains.

    Training only waits for the GPU. Averaging, the broadcast and evaluation run Python, which the threads
    would slow down: each of them holds the interpreter for a while.

    >>> counters = Counters(1)
    >>> length = counters.hand_in(lambda: len("abc"))
    >>> counters.begin()
    >>> length()
    3
    >>> counters.close()
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def hand_in(self, work: Callable[[], T]) -> Callable[[], T]:
        """Take work; return a function that waits for its result, and begins it if nobody has."""
        future: Future[T] = Future()
        self._waiting.append((future, work))

        def result() -> T:
            if not future.done():
                self.begin()
            return future.result()

        return result

    def begin(self) -> None:
        """Begin all work that was handed in."""
        waiting, self._waiting = self._waiting, []
        for future, work in waiting:
            self._pool.submit(_run, future, work)

    def close(self) -> None:
        """End the threads; work that has not begun is left undone."""
        self._pool.shutdown()


def _run(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
