"""Processes that are started together and stopped together, with all that they start in turn.

Flower's processes start others, some in sessions of their own, which outlive a parent that is killed. So all
of them carry a mark in their environment, which children inherit, and are found by it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from cfedavg.interrupts import deaf

MARK = "CFEDAVG_FEDERATION"
PATIENCE = 8.0  # seconds that a signal is given to work

Process = subprocess.Popen[bytes]


class Processes:
    """All processes of one mark: those started here, and any that an earlier, killed one of us has left."""

    def __init__(self, mark: str, environment: Mapping[str, str]) -> None:
        self.environment = {**environment, MARK: mark}
        self._mark = f"{MARK}={mark}"
        self._own: list[Process] = []

    def start(self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> Process:
        """Starts one, out of reach of the terminal's Ctrl-C; what it says is appended to the log."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**self.environment, **environment},
                start_new_session=True,
            )
        self._own.append(process)
        return process

    def left(self) -> set[int]:
        """Those that are alive."""
        own = {process.pid for process in self._own if process.poll() is None}
        return own | {pid for pid in _everyone() if self._mark in _read(pid, "environ")}

    def stop(self, *order: str) -> None:
        """Ends them all, politely, and after a while by force: those of these commands first, in turn."""
        with deaf():
            for command in order:
                _end(partial(self._of, command))
            _end(self.left)

    def _of(self, command: str) -> set[int]:
        return {pid for pid in self.left() if any(command in word for word in _read(pid, "cmdline"))}


def _end(alive: Callable[[], set[int]]) -> None:
    """Ends processes, and waits until they are gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in alive():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        end = time.monotonic() + PATIENCE
        while alive() and time.monotonic() < end:
            time.sleep(0.05)


def _everyone() -> list[int]:
    """The processes of this machine, where the system has a list of them; but for this one."""
    names = [path.name for path in Path("/proc").glob("[0-9]*")]
    return [int(name) for name in names if name != str(os.getpid())]


def _read(pid: int, what: str) -> list[str]:
    """The words of a process's command line or environment; none if it has ended or is somebody else's."""
    with suppress(OSError):
        return os.fsdecode(Path(f"/proc/{pid}/{what}").read_bytes()).split("\0")
    return []
