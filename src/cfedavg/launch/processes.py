"""Processes that are started and stopped together with their child processes, and the processes' ports.

Flower's processes start child processes. A child with a session of its own outlives a killed parent. So all
processes have a mark, which is an environment variable. Children inherit the mark, and a search for the mark
finds all processes. The launcher is the process that starts the others. If the launcher is killed, a watchdog
stops all processes with the mark. The watchdog is this module, run with `python -m`.
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
MARK = "CFEDAVG_FEDERATION"  # environment variable: names the federation of a process
LAUNCH = "CFEDAVG_LAUNCH"  # environment variable: names the launcher; its watchdog stops only its processes
PATIENCE = 8.0  # seconds to wait for a process to end after a signal
PROC = Path("/proc")

# Commands that are stopped first, in this order. First the ServerApp: else it would end its round without the
# nodes. Then the nodes: the SuperLink refuses a node for a minute if the node could not sign off.
ORDER = ("flwr-serverapp", "flower-supernode")
LONGEST = 2 * (len(ORDER) + 1) + 1  # in units of PATIENCE: `end_all` sends two signals to each kind

Process = subprocess.Popen[bytes]


class Processes:
    """All processes of a federation: those started here, and those that a killed launcher has left behind.

    An environment variable (`mark`) tells which processes these are.
    """

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
        """Return the pids of all processes of the federation that are alive."""
        return {process.pid for process in self._own if process.poll() is None} | alive(self._mark, ())

    def stop(self) -> None:
        """Ask all processes of the federation to end (SIGTERM), and kill those that do not end in time."""
        with ignore_stops():
            end_all(self.left)

    def close(self) -> None:
        """End the watchdog. Before it ends, the watchdog ends all processes that were started here."""
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

    `word` is a variable with its value, NAME=value. Only the launcher writes to the standard input of this
    process: the pids of the processes that the launcher starts. So this input ends when the launcher ends or
    is killed.
    """
    pids = [int(line) for line in sys.stdin]
    time.sleep(0.1)  # by then, a process that is just being started has its environment
    end_all(lambda: alive(word, pids))


def alive(word: str, pids: Iterable[int]) -> set[int]:
    """Return the pids of all other processes that have `word` (NAME=value) in their environment.

    If the system has no /proc, return those of `pids` that lead a session. Every process started here leads a
    session. A process that does not lead one is a foreign process that got the pid of an ended process.
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
    """End all processes whose pids `left` returns, and wait; end the commands in `ORDER` before others."""

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
    """Return the words in /proc/PID/cmdline or environ; [] if the process has ended or is another user's."""
    with suppress(OSError):
        return os.fsdecode((PROC / str(pid) / what).read_bytes()).split("\0")
    return []


class Ports:
    """Reserve ports on `HOST` for processes that will listen on them.

    Flower's processes cannot choose a free port themselves: they pass the given number to their children.
    If a port were only tested, another process could take the port before Flower listens on it. So a socket
    stays bound to each port and never listens. Then Linux does not give this port to a process that asks for
    any free port. But a process that asks for the port by its number can listen on it (SO_REUSEADDR).
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
