"""Residuals that do not live on the device: threads bring them to the device and take them away again.

The clients of a round are known before the round. So their residuals are read while the round trains, and
their new residuals are written while the next round trains. At any time, there are the residuals of one round
that are read and those of one round that are written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from cfedavg.simulate.residuals import Put, Residuals, Writes, gather, spread

Rows = Callable[[Sequence[int]], Tensor]  # gives the residuals of some clients of the round, a row for each
_MOST = 8  # threads that read, and as many that write, beside a GPU
_PIECES = 4  # pieces of work for each thread


class Mover:
    """Threads that read and write residuals, and the memory through which they pass.

    On a GPU, residuals pass through pinned memory of the host, and are copied on streams of their own. On a
    CPU there are no streams, and residuals are written from the memory in which the engine made them.
    """

    def __init__(self, device: torch.device, clients: int, dtype: torch.dtype) -> None:
        """Set up a mover; a round has at most so many `clients`, whose residuals have this dtype."""
        self.device, self.clients, self.dtype = device, clients, dtype
        on_gpu = device.type == "cuda"
        self._size = max(1, min(_MOST, (os.cpu_count() or 1) // 2)) if on_gpu else 1
        self._readers, self._writers = ThreadPoolExecutor(self._size), ThreadPoolExecutor(self._size)
        self._in, self._out = (_stream(device) if on_gpu else None for _ in range(2))
        self._buffers: dict[str, Tensor] = {}
        self._reads: list[Future[None]] = []
        self._writes = Writes({})

    def update(self, residuals: Residuals, new: Mapping[int, Tensor]) -> Residuals:
        """Return a store with the residuals `new`; if they leave the device, threads write them."""
        return residuals.update(new, None if residuals.lives_on(self.device) else self.write)

    def fetch(self, residuals: Residuals, clients: Sequence[int], like: Tensor) -> Rows:
        """Return a function that gives residuals of some of these clients; begin to read them.

        Rows have the dtype and the device of `like`.
        """
        if residuals.lives_on(self.device):
            return lambda some: gather(residuals, some, like)
        known = [i for i in clients if i in residuals.norms2]
        # A thread that waits for a residual which is still being written must not keep others waiting.
        return self._read(residuals, sorted(known, key=residuals.is_being_written), like)

    def _read(self, residuals: Residuals, known: list[int], like: Tensor) -> Rows:
        """Read the residuals of clients that took part, for `fetch`."""
        if not known:
            return lambda some: like.new_zeros(len(some), *like.shape)
        wait(self._reads)  # an interrupted round may have left some, which use the same buffer
        if self._in:
            self._in.synchronize()
        host = self._buffer("in", like.shape)[: len(known)]
        there = self._room(host)

        def read(start: int, stop: int) -> None:
            for row in range(start, stop):
                residuals.copy_to(known[row], host[row])
            if there is not host:
                with self._on(self._in):
                    there[start:stop].copy_(host[start:stop], non_blocking=True)

        pieces = list(self._pieces(len(known)))
        futures = [self._readers.submit(read, *piece) for piece in pieces]
        self._reads = futures
        place = {client: row for row, client in enumerate(known)}
        step = pieces[0][1]

        def rows(some: Sequence[int]) -> Tensor:
            found = [(row, place[i]) for row, i in enumerate(some) if i in place]
            for piece in sorted({at // step for _, at in found}):
                futures[piece].result()
            self._receive(there)
            return _take(found, there, like, len(some))

        return rows

    def _room(self, host: Tensor) -> Tensor:
        """Return memory of the device for these residuals; `host` on a CPU, or if there is too little."""
        if self._in is None:
            return host
        try:
            with self._on(self._in):  # no other stream may still use this memory
                return torch.empty_like(host, device=self.device)
        except torch.OutOfMemoryError:
            return host

    def _receive(self, there: Tensor) -> None:
        """Let the current stream wait for the residuals that are copied to the device."""
        if self._in and there.is_cuda:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._in)
            there.record_stream(current)

    def write(self, new: Mapping[int, Tensor], put: Put, first: Callable[[], None]) -> Writes:
        """Begin to call `first()` and then `put(client, residual on the host)` for each entry of `new`.

        Wait for the residuals of the round before, which pass through the same memory.
        """
        self._writes.wait()
        clients = list(new)
        host, copied = list(new.values()), None
        if self._out and clients:
            host, copied = self._send(host)
        before, futures = self._writers.submit(first), dict[int, Future[None]]()
        self._writes = Writes(futures, before)  # set now: an interrupt may come before the last piece

        def write(start: int, stop: int) -> None:
            before.result()
            if copied:
                copied.synchronize()
            for row in range(start, stop):
                put(clients[row], host[row])

        for start, stop in self._pieces(len(clients)):
            futures |= dict.fromkeys(clients[start:stop], self._writers.submit(write, start, stop))
        return self._writes

    def _send(self, rows: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        """Begin to copy rows to pinned memory; return the copies, and an event that comes after them."""
        assert self._out
        host = self._buffer("out", rows[0].shape, len(rows))
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with self._on(self._out):
            for mine, row in zip(host, rows, strict=False):
                mine.copy_(row, non_blocking=True)
                row.record_stream(self._out)
            copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._out)
        return list(host[: len(rows)]), copied

    def _on(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
        """Inside `with`, use `stream`; on a CPU, do nothing."""
        return torch.cuda.stream(stream) if stream else nullcontext()

    def _buffer(self, name: str, shape: torch.Size, least: int = 0) -> Tensor:
        """Return a buffer on the host for the residuals of a round; it is the same one in every round."""
        n = max(self.clients, least)
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < n:
            pinned = self.device.type == "cuda"
            self._buffers[name] = buffer = torch.empty(n, *shape, dtype=self.dtype, pin_memory=pinned)
        return buffer

    def _pieces(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each piece of n rows; all but the last are equally long."""
        step = max(1, -(-n // (_PIECES * self._size)))
        yield from ((start, min(n, start + step)) for start in range(0, n, step))

    def close(self) -> None:
        """End the threads; work that has not begun is dropped."""
        pools = self._readers, self._writers
        for pool in pools:  # both first: a thread that reads may wait for one that writes
            pool.shutdown(wait=False, cancel_futures=True)
        for pool in pools:
            pool.shutdown()
        self._buffers.clear()


def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _take(found: list[tuple[int, int]], source: Tensor, like: Tensor, n: int) -> Tensor:
    """Return a matrix of n rows: for each pair (row, place), that place of `source`; else zeros."""
    if not found:
        return like.new_zeros(n, *like.shape)
    rows, places = zip(*found, strict=True)
    end = places[0] + len(places)
    some = source[places[0] : end] if places == tuple(range(places[0], end)) else source[list(places)]
    # A buffer of the host is used again in the next round, so it is copied.
    return spread(some.to(like.device, like.dtype, copy=not some.is_cuda), rows, n)
