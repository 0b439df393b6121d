"""A relay of TCP connections, which counts bytes and can be as slow as a link.

A node reaches the SuperLink through its own relay. All connections of the node share one rate in each
direction, as they would share a modem. Bytes arrive half a round trip after they have left.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress

from cfedavg.launch.processes import HOST

WHOLE, SEGMENT = 65_536, 1_448  # bytes read at once: without a rate, and from an Ethernet segment
BUFFER = 32_768  # bytes that a limited relay takes in before it has sent them on
BURST = 0.05  # seconds that a thread may be late without a loss of rate


class Direction:
    """One direction of a relay: it counts bytes, and says when they arrive at `rate` bit/s after `delay`."""

    def __init__(self, rate: float | None, delay: float) -> None:
        self.rate, self.delay, self.count = rate, delay, 0
        self._free, self._lock = 0.0, threading.Lock()

    def send(self, size: int) -> float:
        """Count `size` bytes, wait until the link has sent them, and return the time at which they arrive."""
        with self._lock:  # a node has several connections
            self.count += size
            now = time.monotonic()
            if self.rate:
                self._free = max(self._free, now - BURST) + 8 * size / self.rate
            sent = max(now, self._free)
        time.sleep(max(0.0, sent - time.monotonic()))
        return sent + self.delay


class Relay:
    """Pass on what comes to `address` to a port of this machine, and back; rates in bit/s, `rtt` in s."""

    def __init__(
        self, port: int, up: float | None = None, down: float | None = None, rtt: float = 0.0
    ) -> None:
        self.target, self.is_limited = (HOST, port), bool(up or down or rtt)
        self.up, self.down = Direction(up, rtt / 2), Direction(down, rtt / 2)
        self._server = socket.socket()
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._limit_buffers(self._server)
        self._server.bind((HOST, 0))
        self._server.listen()
        self.address = f"{HOST}:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _limit_buffers(self, each: socket.socket) -> None:
        # Else the kernel takes megabytes at once on the loopback interface: the sender would believe that
        # all is sent, and wait for the answer with a time limit.
        if self.is_limited:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            server = socket.socket()
            self._limit_buffers(server)
            try:
                server.connect(self.target)
            except OSError:  # the SuperLink may be gone for a while
                client.close()
                continue
            for way, source, sink in ((self.up, client, server), (self.down, server, client)):
                under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._read, args=(way, source, under_way), daemon=True).start()
                threading.Thread(target=self._write, args=(under_way, source, sink), daemon=True).start()

    def _read(self, way: Direction, source: socket.socket, under_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while data := source.recv(SEGMENT if way.rate else WHOLE):
                under_way.put((way.send(len(data)), data))
        under_way.put((time.monotonic() + way.delay, b""))

    def _write(
        self, under_way: queue.SimpleQueue[tuple[float, bytes]], source: socket.socket, sink: socket.socket
    ) -> None:
        with suppress(OSError):
            while True:
                arrival, data = under_way.get()
                time.sleep(max(0.0, arrival - time.monotonic()))
                if not data:
                    break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
