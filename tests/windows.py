"""Let the package see Windows in this process: call `install` before anything of cfedavg is imported.

Modules of cfedavg get views of `os`, `signal`, `sys` and others that lack what Windows lacks. Every other
module sees the real system, so that the standard library and torch go on working.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import os
import signal
import stat
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

NO_MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "posix", "readline", "curses"}
ABSENT = {
    "os": {
        "fork", "forkpty", "getuid", "geteuid", "getgid", "getsid", "setsid", "getpgid", "setpgid", "killpg",
        "sched_getaffinity", "sched_setaffinity", "sysconf", "statvfs", "mkfifo", "chown", "fchmod", "nice",
        "wait", "waitid", "WNOHANG", "O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY", "O_SYNC",
        "set_blocking", "getloadavg", "pread", "pwrite", "uname", "register_at_fork", "sendfile", "pipe2",
    },
    "signal": {
        "SIGHUP", "SIGPIPE", "SIGKILL", "SIGCONT", "SIGSTOP", "SIGALRM", "SIGCHLD", "SIGQUIT", "SIGUSR1",
        "alarm", "setitimer", "pause", "sigwait", "pthread_sigmask", "pthread_kill", "SIG_BLOCK",
        "SIG_SETMASK", "SIG_UNBLOCK",
    },
}  # fmt: skip


class View(ModuleType):
    """A module as Windows has it: some names are absent, others are replaced."""

    def __init__(self, real: ModuleType, **others: Any) -> None:
        self.__dict__.update(_real=real, _absent=ABSENT.get(real.__name__, set()) - others.keys(), **others)

    def __getattr__(self, name: str) -> Any:
        if name in self._absent:
            raise AttributeError(f"Windows has no {self._real.__name__}.{name}")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)


def open_file(path: Any, *args: Any, **options: Any) -> int:
    """Windows opens no folders."""
    if Path(path).is_dir():
        raise PermissionError(13, "Permission denied", str(path))
    return os.open(path, *args, **options)


def fsync(handle: int) -> None:
    """Windows syncs what is open for writing."""
    if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor")
    os.fsync(handle)


def locking(handle: int, mode: int, count: int) -> None:
    """Lock a file, as `msvcrt.locking` does; a second lock is a PermissionError there."""
    assert (mode, count) == (2, 1)
    assert stat.S_ISREG(os.fstat(handle).st_mode)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise PermissionError(13, "Permission denied") from None


def memory_status(status: Any) -> int:
    found = status._obj
    assert (found.length, type(found).free.offset, ctypes.sizeof(found)) == (64, 16, 64)
    found.free = 1 << 33
    return 1


def set_wakeup_fd(handle: int, **options: Any) -> int:
    """Windows takes a handle that may block."""
    if handle != -1:
        os.set_blocking(handle, False)
    return signal.set_wakeup_fd(handle, **options)


KERNEL = SimpleNamespace(GlobalMemoryStatusEx=memory_status)
VIEWS = {
    "os": View(os, open=open_file, fsync=fsync, name="nt"),
    "signal": View(signal, SIGBREAK=signal.SIGUSR1, set_wakeup_fd=set_wakeup_fd),
    "sys": View(sys, platform="win32"),
    "ctypes": View(ctypes, windll=SimpleNamespace(kernel32=KERNEL)),
    "msvcrt": SimpleNamespace(locking=locking, LK_NBLCK=2),
}


def install() -> None:
    """Give the views to all modules of cfedavg that are imported from now on."""
    real = builtins.__import__

    def look_up(name: str, scope: Any = None, *args: Any, **options: Any) -> Any:
        if str((scope or {}).get("__name__")).split(".")[0] == "cfedavg":
            if name.split(".")[0] in NO_MODULES:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in VIEWS:
                return VIEWS[name]
        return real(name, scope, *args, **options)

    builtins.__import__ = look_up
