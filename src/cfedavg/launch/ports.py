"""Ports on this machine, each held from the moment it is chosen, so that nobody else gets it meanwhile."""

from __future__ import annotations

import socket
import sys

from cfedavg.core.errors import InputError

HOST = "127.0.0.1"


class Ports:
    """Ports for processes that listen on `HOST`.

    Flower's processes cannot choose a port themselves: they tell their children the number they were given.
    A port that is probed and let go may be taken before the process listens on it. So a socket stays bound
    to each port and never listens: Linux gives such a port to nobody who asks for a free one or connects
    from one, but lets a process that asks for this very port listen on it, as servers do (SO_REUSEADDR).
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, port: int = 0) -> int:
        """Hold a port until `close`, a free one unless it is given, and return it."""
        holder = socket.socket()
        self._held.append(holder)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((HOST, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(
                f"`port` {port} cannot be used on {HOST} ({why}): "
                "give another one, or none to have a free one chosen"
            ) from None
        number = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()  # elsewhere a bound socket would keep our own process out as well
        return number

    def close(self) -> None:
        """Let all ports go."""
        for holder in self._held:
            holder.close()
        self._held.clear()
