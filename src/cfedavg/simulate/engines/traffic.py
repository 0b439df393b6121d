"""The bytes of a round: lengths of encoded messages, headers included, and threads that count them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from cfedavg.compress import Compressor
from cfedavg.core.arrays import round_to_bf16, to_bf16
from cfedavg.core.errors import InputError
from cfedavg.core.files import exists, make_folder, read_file, write_atomic
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Payload
from cfedavg.wire import encode, measure, plain_length

T = TypeVar("T")


class Ledger:
    """Counts the clients' messages. With a folder, it keeps them as files, beside the layout.

    The coders let other threads run, so an engine may count a round while it trains the next.
    """

    def __init__(self, layout: Layout, keep: Path | None = None, *, owner: bool = True) -> None:
        self.layout, self.keep, self.opened = layout, keep, not owner

    def replies(self, t: int, clients: list[int], payload: Payload) -> list[int]:
        """Return the bytes that each client of a block sends in round t."""
        block = payload.numpy()
        if self.keep is None:
            return measure(block, self.layout)
        lengths = []
        for client, one in zip(clients, block.clients(), strict=True):
            message = encode(one, self.layout, client=client, sequence=t, round=t)
            write_atomic(self.keep / f"{t:05}-{client:05}.cfa", message)
            lengths.append(len(message))
        return lengths

    def known(self, payload: Payload) -> list[int] | None:
        """Return the bytes if they do not depend on the values, else None. The values need not move."""
        length = plain_length(payload) if self.keep is None else None
        return None if length is None else [length] * len(payload)

    def open(self, t: int) -> None:
        """Make the folder in the first round; refuse one that holds messages of another run."""
        if self.keep is None or self.opened:
            return
        make_folder(self.keep, "`messages`")
        beside = self.keep / "layout.json"
        try:
            known = read_file(beside) if exists(beside) else self.layout.text.encode()
        except OSError as error:
            raise InputError(f"`messages`: cannot read {beside} ({error.strerror})") from None
        if known != self.layout.text.encode():
            raise InputError(f"`messages`: {self.keep} holds messages of another model; give another folder")
        if t == 0 and next(self.keep.glob("*.cfa"), None) is not None:
            raise InputError(f"`messages`: {self.keep} holds messages of another run; give another folder")
        write_atomic(beside, self.layout.text.encode())
        self.opened = True


def dense_bytes(vector: Tensor, layout: Layout) -> int:
    """Return the bytes of a vector that is sent whole; 0 if it is empty."""
    if not len(vector):
        return 0
    return _whole_bytes(vector, "fp64" if vector.dtype == torch.float64 else "fp32", layout)


def _whole_bytes(values: Tensor, dtype: str, layout: Layout) -> int:
    n = len(values)
    whole = Payload(n, torch.tensor([0, n]), None, Floats(values, dtype))
    return measure(whole.numpy(), layout)[0]


class Statistics:
    """The buffers of a model in one direction: in bf16 if that direction's compressor rounds values.

    Buffers of whole numbers are never rounded.
    """

    def __init__(self, layout: Layout, compressor: Compressor) -> None:
        self.layout, self.rounds = layout, compressor.rounds
        floats = [dtype.startswith(("float", "bfloat")) for dtype in layout.dtypes]
        self._is_float = torch.tensor(
            [yes for yes, n in zip(floats, layout.sizes, strict=True) for _ in range(n)]
        )

    def travel(self, b: Tensor) -> Tensor:
        """Return the buffers as the receiver gets them; a row for each client is allowed."""
        if not self.rounds or not b.shape[-1]:
            return b
        return torch.where(self._is_float.to(b.device), round_to_bf16(b), b)

    def bytes(self, b: Tensor) -> int:
        """Return the bytes of one model's buffers."""
        if not self.rounds or not len(b):
            return dense_bytes(b, self.layout)
        is_float = self._is_float.to(b.device)
        floats, whole_numbers = b[is_float], b[~is_float]
        coded = 0
        if len(floats):
            coded = _whole_bytes(to_bf16(floats.float()), "bf16", Layout.flat(len(floats)))
        return coded + dense_bytes(whole_numbers, Layout.flat(len(whole_numbers)))


class Counters:
    """Threads whose work begins when the next round trains.

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
        """Queue work; return a function that waits for its result and begins the work if needed."""
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

        def finish(future: Future[Any], work: Callable[[], Any]) -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        for future, work in waiting:
            self._pool.submit(finish, future, work)

    def close(self) -> None:
        """End the threads; work that has not begun is left undone."""
        self._pool.shutdown()
