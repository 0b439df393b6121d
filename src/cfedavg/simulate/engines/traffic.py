"""Count the bytes of a round, which are the lengths of encoded messages with their headers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
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
CONTROL = "-control"  # the kind of messages that carry changes of control variates


class Ledger:
    """A counter of the bytes in clients' messages. With `folder`, it also keeps the messages as files there.

    Other threads can run while a message is encoded. So an engine may count one round while it trains the
    next.
    """

    def __init__(self, layout: Layout, folder: Path | None = None, *, opened: bool = False) -> None:
        """Set up the counter; `opened` is True if another rank makes the folder."""
        self.layout, self.folder, self.opened = layout, folder, opened

    def count(self, t: int, client: int, payload: Payload, kind: str = "") -> int:
        """Return how many bytes the message has in which the client sends `payload` in round `t`.

        `kind` is "" for updates, else it ends the name of the message's file.
        """
        if self.folder is None:
            return measure(payload.numpy(), self.layout)[0]
        message = encode(payload.numpy(), self.layout, client=client, sequence=t, round=t)
        write_atomic(self.folder / f"{t:05}-{client:05}{kind}.cfa", message)
        return len(message)

    def known_bytes(self, payload: Payload) -> list[int] | None:
        """Return the length of each client's message if it does not depend on the values, else None.

        Values are not copied from their device. With `folder`, return None: messages must be encoded.
        """
        length = plain_length(payload) if self.folder is None else None
        return None if length is None else [length] * len(payload)

    def open(self, t: int) -> None:
        """Make the folder, once; raise InputError if the folder holds messages of another run or model."""
        if self.folder is None or self.opened:
            return
        make_folder(self.folder, "`messages`")
        path, layout = self.folder / "layout.json", self.layout.text.encode()
        try:
            known = read_file(path) if exists(path) else layout
        except OSError as error:
            raise InputError(f"`messages`: cannot read {path} ({error.strerror})") from None
        other = "model" if known != layout else "run" if t == 0 and any(self.folder.glob("*.cfa")) else ""
        if other:
            raise InputError(
                f"`messages`: {self.folder} holds messages of another {other}; give another folder"
            )
        write_atomic(path, layout)
        self.opened = True


def dense_bytes(values: Tensor, layout: Layout, dtype: str | None = None) -> int:
    """Return the bytes of a vector that is sent uncompressed; 0 if the vector is empty.

    `dtype` is the name in messages of the values' dtype, such as "bf16"; None means "fp64" for float64 values
    and "fp32" for others.
    """
    if not (n := len(values)):
        return 0
    dtype = dtype or ("fp64" if values.dtype == torch.float64 else "fp32")
    payload = Payload(n, torch.tensor([0, n]), None, Floats(values, dtype))
    return measure(payload.numpy(), layout)[0]


class BufferChannel:
    """The channel that carries a model's buffers, to the server (up) or to the clients (down).

    If the compressor of the same direction rounds values, the channel rounds buffers to bf16. It never rounds
    buffers of integers.
    """

    def __init__(self, layout: Layout, compressor: Compressor) -> None:
        self.layout, self.rounds_values = layout, compressor.rounds_values
        floats = [dtype.startswith(("float", "bfloat")) for dtype in layout.dtypes]
        self._is_float = torch.from_numpy(np.repeat(np.array(floats, bool), layout.sizes))

    def transmit(self, b: Tensor) -> Tensor:
        """Return the buffers as the receiver gets them; `b` may have a row for each client."""
        if not self.rounds_values or not b.shape[-1]:
            return b
        return torch.where(self._is_float.to(b.device), round_to_bf16(b), b)

    def bytes(self, b: Tensor) -> int:
        """Return the number of bytes that it takes to send `b`, the buffers of one model."""
        if not self.rounds_values or not len(b):
            return dense_bytes(b, self.layout)
        is_float = self._is_float.to(b.device)
        floats, integers = to_bf16(b[is_float].float()), b[~is_float]
        coded = dense_bytes(floats, Layout.flat(len(floats)), "bf16")
        return coded + dense_bytes(integers, Layout.flat(len(integers)))


class CountingThreads:
    """Threads that count bytes of one round while the next round trains.

    Work waits in a queue until `begin`, which is called when training starts: then Python only waits for the
    GPU. Averaging, broadcast and evaluation run Python code, which the threads would slow down, because only
    one thread at a time can run Python code.

    >>> threads = CountingThreads(1)
    >>> length = threads.submit(lambda: len("abc"))
    >>> threads.begin()
    >>> length()
    3
    >>> threads.close()
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        self._waiting: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], T]) -> Callable[[], T]:
        """Queue `work`; return a function that waits for its result, and starts the queue if needed."""
        begun: list[Future[T]] = []
        self._waiting.append(lambda: begun.append(self._pool.submit(work)))

        def result() -> T:
            if not begun:
                self.begin()
            return begun[0].result()

        return result

    def begin(self) -> None:
        """Start all queued work."""
        waiting, self._waiting = self._waiting, []
        for start in waiting:
            start()

    def close(self) -> None:
        """End the threads; drop work that has not been started."""
        self._pool.shutdown()
