"""What differs between Linux, macOS and Windows: locks, stop signals, cores and free memory.

Windows has no `fcntl`, no signal masks, and no handles of folders. Each function here has its own way there,
chosen by `sys.platform`, so that mypy can check this module for each system.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    # A signal of Windows itself: Ctrl-Break, or the console's window is closed.
    STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGBREAK)
    BROKEN_PIPE = 13  # the number of SIGPIPE elsewhere
    NEVER_WAIT = 0  # Windows keeps pipes apart from files, and child processes inherit no handle
else:
    import fcntl

    STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    BROKEN_PIPE = int(signal.SIGPIPE)
    NEVER_WAIT = os.O_NONBLOCK | os.O_CLOEXEC

LOCK = ".lock"  # on Windows, the file in a locked folder that is locked in the folder's place


def open_lock(folder: Path) -> int:
    """Lock a folder and return a handle; closing the handle unlocks the folder.

    Raise BlockingIOError if another process, or another handle of this process, holds the lock.
    """
    if sys.platform == "win32":
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    else:
        handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
    except OSError:
        os.close(handle)
        raise
    return handle


def _lock(handle: int) -> None:
    if sys.platform == "win32":
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(*error.args) from None
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def block_stops() -> AbstractSet[int]:
    """Hold stop signals back in this thread; return the signals held back before. Windows cannot do so."""
    if sys.platform == "win32":
        return set()
    return signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)


def unblock_stops(before: AbstractSet[int]) -> None:
    """Hold back only the signals in `before`, which `block_stops` returned."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def count_cores() -> int:
    """Return the number of cores that this process may use; macOS and Windows tell all cores."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_host_memory() -> int:
    """Return the free bytes of main memory; macOS tells the size of the memory instead."""
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return int(status.free)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _MemoryStatus(ctypes.Structure):
    """The structure MEMORYSTATUSEX of Windows; `rest` is about the page file and the address space."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("size", ctypes.c_uint64),
        ("free", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 5),
    )
