"""Processes that are started together and stopped together, with all that they start in turn.

Flower's processes start others, some in sessions of their own, which outlive a parent that is killed. So all
of them carry a mark in their environment, which children inherit, and are found by it. A watchdog, which is
one more process, stops them if the process that started them is killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from cfedavg.core.errors import InputError
from cfedavg.core.files import open_regular
from cfedavg.core.interrupts import ignore_stops

MARK = "CFEDAVG_FEDERATION"  # the federation it belongs to
LAUNCH = "CFEDAVG_LAUNCH"  # which start of that federation: a watchdog must not stop the next one's processes
PATIENCE = 8.0  # seconds that a signal is given to work
PROC = Path("/proc")

# Stopped first, in turn. The ServerApp, or it would end its round without the nodes. Then these: one that
# cannot take its leave of the SuperLink is refused for a minute afterwards.
ORDER = ("flwr-serverapp", "flower-supernode")
LONGEST = 2 * (len(ORDER) + 1) + 1  # times PATIENCE: `end_all` sends two signals to each kind

Process = subprocess.Popen[bytes]


class Processes:
    """All processes of one mark: those started here, and any that an earlier, killed one of us has left."""

    def __init__(self, mark: str, environment: Mapping[str, str]) -> None:
        launch = secrets.token_hex(8)
        self.environment = {**environment, MARK: mark, LAUNCH: launch}
        self._mark, self._launch = f"{MARK}={mark}", f"{LAUNCH}={launch}"
        self._own: list[Process] = []
        self._watchdog: Process | None = None

    def start(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> Process:
        """Starts one, out of reach of the terminal's Ctrl-C; what it says is appended to the log."""
        self._watchdog = self._watchdog or _start_watchdog(self._launch)
        with _opened(log) as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**self.environment, **environment},
                start_new_session=True,
            )
        self._own.append(process)
        with suppress(BrokenPipeError):  # somebody has ended the watchdog
            _pipe(self._watchdog).write(b"%d\n" % process.pid)
        return process

    def left(self) -> set[int]:
        """Those that are alive."""
        return {process.pid for process in self._own if process.poll() is None} | alive(self._mark, ())

    def stop(self) -> None:
        """Ends them all, politely, and after a while by force."""
        with ignore_stops():
            end_all(self.left)

    def close(self) -> None:
        """Ends the watchdog, which ends what was started here and is still alive."""
        if self._watchdog is not None:
            with ignore_stops():
                _pipe(self._watchdog).close()
                _bury(self._watchdog)
            self._watchdog = None


def _opened(log: Path) -> IO[bytes]:
    """Open a log to append to; to open a pipe would wait for ever."""
    try:
        return open_regular(log, "ab")
    except OSError as error:
        raise InputError(f"cannot write {log} ({error.strerror})") from None


def _start_watchdog(word: str) -> Process:
    """Starts one that nothing meant for this process reaches; it waits until its pipe is closed."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cfedavg.launch.watchdog", word],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )


def _bury(watchdog: Process) -> None:
    """Wait until it has ended what is left, and kill it if it takes too long: it may be stopped."""
    watchdog.send_signal(signal.SIGCONT)
    try:
        watchdog.wait(LONGEST * PATIENCE)
    except subprocess.TimeoutExpired:
        watchdog.kill()
        watchdog.wait()


def _pipe(process: Process) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def alive(word: str, told: Iterable[int]) -> set[int]:
    """The processes that have this word in their environment, but for this one.

    Where the system does not show environments, return the pids in `told` that still lead a session.
    """
    if not PROC.is_dir():
        return {pid for pid in told if _leads(pid)}
    pids = {int(path.name) for path in PROC.glob("[0-9]*")} - {os.getpid()}
    return {pid for pid in pids if word in _read(pid, "environ")}


def end_all(left: Callable[[], set[int]]) -> None:
    """Ends processes in the right order, and waits until they are gone."""
    for command in ORDER:
        _end(partial(_of, command, left))
    _end(left)


def _of(command: str, left: Callable[[], set[int]]) -> set[int]:
    return {pid for pid in left() if any(command in word for word in _read(pid, "cmdline"))}


def _end(left: Callable[[], set[int]]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + PATIENCE
        while left() and time.monotonic() < end:
            time.sleep(0.05)


def _leads(pid: int) -> bool:
    """Whether it leads a session, as all that are started here do: its pid may be another's by now."""
    with suppress(ProcessLookupError):
        return os.getsid(pid) == pid
    return False


def _read(pid: int, what: str) -> list[str]:
    """The words of a process's command line or environment; none if it has ended or is somebody else's."""
    with suppress(OSError):
        return os.fsdecode((PROC / str(pid) / what).read_bytes()).split("\0")
    return []
