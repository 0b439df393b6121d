"""Processes that are started and stopped together, with all that they start in turn, and their ports.

Flower's processes start others, some in sessions of their own, which outlive a parent that is killed. So all
of them carry a mark in their environment, which children inherit, and are found by it. A watchdog stops them
if the process that started them is killed: it is this module, run with `python -m`.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from cfedavg.core.errors import InputError
from cfedavg.core.files import open_regular
from cfedavg.core.interrupts import ignore_stops

HOST = "127.0.0.1"
MARK = "CFEDAVG_FEDERATION"  # the federation it belongs to
LAUNCH = "CFEDAVG_LAUNCH"  # which start of that federation: a watchdog must not stop the next one's processes
PATIENCE = 8.0  # seconds that a signal is given to work
PROC = Path("/proc")

# Stopped first, in turn. The ServerApp, or it would end its round without the nodes. Then the nodes: one that
# cannot take its leave of the SuperLink is refused for a minute afterwards.
ORDER = ("flwr-serverapp", "flower-supernode")
LONGEST = 2 * (len(ORDER) + 1) + 1  # times PATIENCE: `end_all` sends two signals to each kind

Process = subprocess.Popen[bytes]


class Processes:
    """All processes of one mark: those started here, and any that an earlier, killed launcher has left."""

    def __init__(self, mark: str, environment: Mapping[str, str]) -> None:
        launch = secrets.token_hex(8)
        self.environment = {**environment, MARK: mark, LAUNCH: launch}
        self._mark, self._launch = f"{MARK}={mark}", f"{LAUNCH}={launch}"
        self._own: list[Process] = []
        self._watchdog: Process | None = None

    def start(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> Process:
        """Start a process out of reach of the terminal's Ctrl-C; append its output to the log."""
        self._watchdog = self._watchdog or _start_watchdog(self._launch)
        try:
            file = open_regular(log, "ab")  # to open a pipe would wait for ever
        except OSError as error:
            raise InputError(f"cannot write {log} ({error.strerror})") from None
        with file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**self.environment, **environment},
                start_new_session=True,
            )
        self._own.append(process)
        assert self._watchdog.stdin is not None
        with suppress(BrokenPipeError):  # somebody has ended the watchdog
            self._watchdog.stdin.write(b"%d\n" % process.pid)
        return process

    def left(self) -> set[int]:
        """Return the pids of those that are alive."""
        return {process.pid for process in self._own if process.poll() is None} | alive(self._mark, ())

    def stop(self) -> None:
        """End all processes: ask first, and kill those that do not end in time."""
        with ignore_stops():
            end_all(self.left)

    def close(self) -> None:
        """End the watchdog, which ends what was started here and is still alive."""
        if self._watchdog is None:
            return
        with ignore_stops():
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
            self._watchdog.send_signal(signal.SIGCONT)  # it may be stopped
            try:
                self._watchdog.wait(LONGEST * PATIENCE)
            except subprocess.TimeoutExpired:
                self._watchdog.kill()
                self._watchdog.wait()
        self._watchdog = None


def _start_watchdog(word: str) -> Process:
    """Start a watchdog that no signal meant for this process reaches."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cfedavg.launch.processes", word],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )


def watch(word: str) -> None:
    """Wait until the launcher ends, and end the processes that have this word in their environment.

    Only the launcher holds the other end of the standard input, so that this closes when the launcher ends,
    in whatever way. Until then the launcher writes the pid of each process that it starts.
    """
    pids = [int(line) for line in sys.stdin]
    time.sleep(0.1)  # a process that was being started has its environment by then
    end_all(lambda: alive(word, pids))


def alive(word: str, pids: Iterable[int]) -> set[int]:
    """Return the other processes that have this word in their environment.

    Where the system does not show environments, return those of `pids` that still lead a session, as all
    that are started here do: a pid may be another process's by now.
    """
    if PROC.is_dir():
        others = {int(path.name) for path in PROC.glob("[0-9]*")} - {os.getpid()}
        return {pid for pid in others if word in _read_words(pid, "environ")}
    found = set()
    for pid in pids:
        with suppress(ProcessLookupError):
            if os.getsid(pid) == pid:
                found.add(pid)
    return found


def end_all(left: Callable[[], set[int]]) -> None:
    """End processes in the right order, and wait until they are gone."""

    def running(command: str) -> set[int]:
        return {pid for pid in left() if any(command in word for word in _read_words(pid, "cmdline"))}

    for command in ORDER:
        _end(partial(running, command))
    _end(left)


def _end(left: Callable[[], set[int]]) -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        end = time.monotonic() + PATIENCE
        while left() and time.monotonic() < end:
            time.sleep(0.05)


def _read_words(pid: int, what: str) -> list[str]:
    """Return the words of a process's `cmdline` or `environ`; none if it has ended or is somebody else's."""
    with suppress(OSError):
        return os.fsdecode((PROC / str(pid) / what).read_bytes()).split("\0")
    return []


class Ports:
    """Ports for processes that listen on `HOST`, each held from the moment it is chosen.

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
        taken = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()  # elsewhere a bound socket would keep our own process out as well
        return taken

    def close(self) -> None:
        """Let all ports go."""
        for holder in self._held:
            holder.close()
        self._held.clear()


if __name__ == "__main__":
    watch(sys.argv[1])
