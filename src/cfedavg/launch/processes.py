"""Processes that are started and stopped together with their child processes, and the processes' ports.

Flower's processes start child processes. A child with a session of its own outlives a killed parent. So all
processes have a mark in their environment: children inherit the mark, and each process is found by it.
The launcher is the process that starts the others. If the launcher is killed, a watchdog stops all marked
processes. The watchdog is this module, run with `python -m`.
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
from itertools import product
from pathlib import Path

from cfedavg.core.errors import InputError
from cfedavg.core.files import open_regular
from cfedavg.core.interrupts import ignore_stops

HOST = "127.0.0.1"
MARK = "CFEDAVG_FEDERATION"  # environment variable: the federation that a process belongs to
LAUNCH = "CFEDAVG_LAUNCH"  # environment variable: the launcher, so that its watchdog stops only its processes
PATIENCE = 8.0  # seconds to wait for a process to end after a signal
PROC = Path("/proc")

# Commands that are stopped first, in this order. First the ServerApp: else it would end its round without the
# nodes. Then the nodes: the SuperLink refuses a node for a minute if the node could not sign off.
ORDER = ("flwr-serverapp", "flower-supernode")
LONGEST = 2 * (len(ORDER) + 1) + 1  # in units of PATIENCE: `end_all` sends two signals to each kind

Process = subprocess.Popen[bytes]


class Processes:
    """All processes with one mark: those started here, and those left behind by a killed launcher."""

    def __init__(self, mark: str, environment: Mapping[str, str]) -> None:
        launch = secrets.token_hex(8)
        self.environment = {**environment, MARK: mark, LAUNCH: launch}
        self._mark, self._launch = f"{MARK}={mark}", f"{LAUNCH}={launch}"
        self._own: list[Process] = []
        self._watchdog: Process | None = None

    def start(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> Process:
        """Start a process that does not receive the terminal's Ctrl-C; append its output to `log`."""
        if self._watchdog is None:
            self._watchdog = subprocess.Popen(
                [sys.executable, "-P", "-m", "cfedavg.launch.processes", self._launch],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that it receives no signals meant for this process
                bufsize=0,
            )
        try:
            file = open_regular(log, "ab")  # opening a pipe would wait for ever
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
        """Return the pids of all processes that are alive."""
        return {process.pid for process in self._own if process.poll() is None} | alive(self._mark, ())

    def stop(self) -> None:
        """Ask all processes to end (SIGTERM), and kill those that do not end in time."""
        with ignore_stops():
            end_all(self.left)

    def close(self) -> None:
        """End the watchdog, which first ends all processes that were started here and are alive."""
        if self._watchdog is None:
            return
        with ignore_stops():
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
            self._watchdog.send_signal(signal.SIGCONT)  # the watchdog may be suspended
            try:
                self._watchdog.wait(LONGEST * PATIENCE)
            except subprocess.TimeoutExpired:
                self._watchdog.kill()
                self._watchdog.wait()
        self._watchdog = None


def watch(word: str) -> None:
    """Wait until the launcher ends, then end the processes that have `word` in their environment.

    Only the launcher can write to the standard input. So the input closes when the launcher ends or is
    killed. Until then the launcher writes the pid of each process that it starts.
    """
    pids = [int(line) for line in sys.stdin]
    time.sleep(0.1)  # by then, a process that is just being started has its environment
    end_all(lambda: alive(word, pids))


def alive(word: str, pids: Iterable[int]) -> set[int]:
    """Return the pids of all other processes that have `word` in their environment.

    If the system has no /proc, return those of `pids` that lead a session. Every process started here leads
    a session. The check is needed because another process may have got the pid of an ended process.
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
    """End the processes whose pids `left` returns, the commands in `ORDER` first, and wait for their end."""

    def running(command: str | None) -> set[int]:
        pids = left()
        if command is None:
            return pids
        return {pid for pid in pids if any(command in word for word in _read_words(pid, "cmdline"))}

    for command, signum in product((*ORDER, None), (signal.SIGTERM, signal.SIGKILL)):
        for pid in running(command):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        end = time.monotonic() + PATIENCE
        while running(command) and time.monotonic() < end:
            time.sleep(0.05)


def _read_words(pid: int, what: str) -> list[str]:
    """Return the words in a process's `cmdline` or `environ`; [] if the process has ended or is not ours."""
    with suppress(OSError):
        return os.fsdecode((PROC / str(pid) / what).read_bytes()).split("\0")
    return []


class Ports:
    """Ports on `HOST` for processes that listen, each reserved from the moment it is chosen.

    Flower's processes cannot choose a free port themselves: they pass the given number to their children.
    If a port were only tested, another process could take the port before Flower listens on it. So a socket
    stays bound to each port and never listens. Linux then gives the port to no process that asks for any free
    port. A process that asks for the port by its number can listen on the port (SO_REUSEADDR).
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, port: int = 0) -> int:
        """Reserve `port`, or a free port if `port` is 0, until `close` is called; return the port."""
        holder = socket.socket()
        self._held.append(holder)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((HOST, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(
                f"`port` must be usable on {HOST}, got {port} ({why}); "
                "choose another port, or leave `port` out to get a free port"
            ) from None
        taken = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()  # on other systems a bound socket would keep Flower out as well
        return taken

    def close(self) -> None:
        """Release all ports."""
        for holder in self._held:
            holder.close()
        self._held.clear()


if __name__ == "__main__":
    watch(sys.argv[1])
