"""A relay of TCP connections, which counts bytes and can be as slow as a link.

A node reaches the SuperLink through its own relay. All connections of the node share one rate in each
direction, as they would share a modem. Bytes arrive half a round trip after they have left.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

from cfedavg.launch.processes import HOST

SEGMENT = 1_448  # bytes of an Ethernet segment, the most that a slow relay reads at once
BUFFER = 8_192  # bytes that a slow relay takes in before it has sent them on
WHOLE = 65_536  # bytes that a fast relay reads at once
BURST = 0.05  # seconds that a thread may be late without a loss of rate

Pipe = SimpleQueue[tuple[float, bytes]]  # when bytes arrive, and the bytes; empty at the end


class Direction:
    """One direction of a relay: it counts bytes, and delays them as `rate` (bit/s) and `delay` (s) say."""

    def __init__(self) -> None:
        self.rate, self.delay, self.count = math.inf, 0.0, 0
        self._free, self._lock = 0.0, threading.Lock()

    def send(self, size: int) -> float:
        """Count `size` bytes, wait until the link has sent them, and return the time at which they arrive."""
        with self._lock:  # a node has several connections
            self.count += size
            self._free = max(self._free, time.monotonic() - BURST) + 8 * size / self.rate
            sent = self._free
        time.sleep(max(0.0, sent - time.monotonic()))
        return max(sent, time.monotonic()) + self.delay


class Relay:
    """Pass on to a port of this machine what comes to `address`, and back."""

    def __init__(self, port: int, *, slow: bool = False) -> None:
        self.target, self.slow, self.up, self.down = (HOST, port), slow, Direction(), Direction()
        self._open: list[socket.socket] = []
        self._server = socket.socket()
        self._set_buffers(self._server)
        self._server.bind((HOST, 0))
        self._server.listen()
        self.address = f"{HOST}:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def limit(self, up: float = math.inf, down: float = math.inf, rtt: float = 0.0) -> None:
        """Set the rates (bit/s) and the round-trip time (s) from now on; the relay must be `slow`.

        Open connections end: their senders' buffers may have grown on a faster link.
        """
        assert self.slow
        self.up.rate, self.down.rate = up, down
        self.up.delay = self.down.delay = rtt / 2
        while self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def _set_buffers(self, each: socket.socket) -> None:
        # The kernel takes megabytes at once on the loopback interface. A sender would then believe that all
        # is sent, and give up on a reply that is not due for a minute.
        if self.slow:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            server = socket.socket()
            self._set_buffers(server)
            try:
                server.connect(self.target)
            except OSError:  # the SuperLink may be gone for a while
                client.close()
                continue
            self._open += [client, server]
            for way, source, sink in ((self.up, client, server), (self.down, server, client)):
                pipe: Pipe = SimpleQueue()
                threading.Thread(target=self._read, args=(way, source, pipe), daemon=True).start()
                threading.Thread(target=self._write, args=(pipe, source, sink), daemon=True).start()

    def _read(self, way: Direction, source: socket.socket, pipe: Pipe) -> None:
        with suppress(OSError):
            while data := source.recv(SEGMENT if self.slow else WHOLE):
                pipe.put((way.send(len(data)), data))
        pipe.put((time.monotonic() + way.delay, b""))

    def _write(self, pipe: Pipe, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while True:
                arrival, data = pipe.get()
                time.sleep(max(0.0, arrival - time.monotonic()))
                if not data:
                    break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
