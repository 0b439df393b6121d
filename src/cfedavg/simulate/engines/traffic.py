"""The bytes of a round: lengths of encoded messages with headers, and threads that count the bytes."""

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
    """A counter of the bytes of clients' messages. With a folder, messages and layout are kept as files.

    The message coders let other threads run, so an engine may count one round while it trains the next.
    """

    def __init__(self, layout: Layout, keep: Path | None = None, *, owner: bool = True) -> None:
        self.layout, self.keep, self.opened = layout, keep, not owner

    def replies(self, t: int, clients: list[int], payload: Payload) -> list[int]:
        """Return the bytes that each of `clients` sends in round `t`; `payload` holds all their updates."""
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
        """Return each client's bytes if they do not depend on the payload's values, else None.

        The values stay on their device.
        """
        length = plain_length(payload) if self.keep is None else None
        return None if length is None else [length] * len(payload)

    def open(self, t: int) -> None:
        """Make the folder in the first round; raise InputError if it holds messages of another run."""
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
    """Return the bytes of a vector that is sent uncompressed; 0 if the vector is empty."""
    if not len(vector):
        return 0
    return _whole_bytes(vector, "fp64" if vector.dtype == torch.float64 else "fp32", layout)


def _whole_bytes(values: Tensor, dtype: str, layout: Layout) -> int:
    n = len(values)
    whole = Payload(n, torch.tensor([0, n]), None, Floats(values, dtype))
    return measure(whole.numpy(), layout)[0]


class Statistics:
    """How buffers are sent up or down: rounded to bf16 if the compressor of that direction rounds values.

    Buffers of integers are never rounded.
    """

    def __init__(self, layout: Layout, compressor: Compressor) -> None:
        self.layout, self.rounds_values = layout, compressor.rounds_values
        floats = [dtype.startswith(("float", "bfloat")) for dtype in layout.dtypes]
        self._is_float = torch.tensor(
            [yes for yes, n in zip(floats, layout.sizes, strict=True) for _ in range(n)]
        )

    def travel(self, b: Tensor) -> Tensor:
        """Return the buffers as the receiver gets them; `b` may have a row for each client."""
        if not self.rounds_values or not b.shape[-1]:
            return b
        return torch.where(self._is_float.to(b.device), round_to_bf16(b), b)

    def bytes(self, b: Tensor) -> int:
        """Return the bytes in which the buffers of one model are sent."""
        if not self.rounds_values or not len(b):
            return dense_bytes(b, self.layout)
        is_float = self._is_float.to(b.device)
        floats, whole_numbers = b[is_float], b[~is_float]
        coded = 0
        if len(floats):
            coded = _whole_bytes(to_bf16(floats.float()), "bf16", Layout.flat(len(floats)))
        return coded + dense_bytes(whole_numbers, Layout.flat(len(whole_numbers)))


class Counters:
    """Threads whose work begins when the next round trains.

    During training, Python only waits for the GPU. Averaging, broadcast and evaluation run Python code, which
    the threads would slow down: each thread holds the interpreter for a while.

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
        """Queue `work`; return a function that starts the work if needed and waits for the result."""
        future: Future[T] = Future()
        self._waiting.append((future, work))

        def result() -> T:
            if not future.done():
                self.begin()
            return future.result()

        return result

    def begin(self) -> None:
        """Start all queued work."""
        waiting, self._waiting = self._waiting, []

        def finish(future: Future[Any], work: Callable[[], Any]) -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        for future, work in waiting:
            self._pool.submit(finish, future, work)

    def close(self) -> None:
        """End the threads; queued work is not done."""
        self._pool.shutdown()
