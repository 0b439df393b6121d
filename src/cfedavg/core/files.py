"""Atomic writes: a file is written under a temporary name, synced and renamed, so nobody sees half a file."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, cast

from cfedavg.core.errors import Busy, InputError
from cfedavg.core.system import NEVER_WAIT, open_lock

# `.tmpA1b2C3` is a temporary file of safetensors; version 0.5 left such files behind when it was killed.
_TEMPORARY = re.compile(r"\.(.+\.\d+\.tmp|\d+\.probe|tmp[A-Za-z0-9]{6})")


@contextmanager
def report_failure(sentence: str) -> Iterator[None]:
    """Raise InputError with `sentence` and the system's reason if the `with` block raises OSError.

    >>> with report_failure("cannot read nowhere.toml"):
    ...     Path("nowhere.toml").read_text()
    Traceback (most recent call last):
    cfedavg.core.errors.InputError: cannot read nowhere.toml (No such file or directory)
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{sentence} ({error.strerror or error})") from None


@contextmanager
def replace_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give the `with` block a temporary file to write; if the block succeeds, rename the file to `path`.

    Without `durable`, the file is not synced: processes see a complete file, but a power cut may undo it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with report_failure(f"cannot write {path}"):
        try:
            yield temporary
            if durable:
                sync(temporary)
            temporary.replace(path)
            if durable:
                sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)  # may raise OSError too, if the parent is not a folder


def cache_folder() -> Path:
    """Return the folder of what can be made again: `$CFEDAVG_CACHE` if set, else `~/.cache/cfedavg`."""
    return Path(os.environ.get("CFEDAVG_CACHE") or Path.home() / ".cache" / "cfedavg").expanduser()


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the content of a file; after a crash the file holds either the old bytes or the new bytes."""
    with replace_file(path) as temporary:
        temporary.write_bytes(data)


def append(path: Path, data: bytes) -> None:
    """Append `data` to a file. After a crash the file may end with a part of `data`: readers must check."""
    with report_failure(f"cannot write {path}"), path.open("ab") as file:
        file.write(data)


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file; raise OSError if the path is anything else.

    Another user's folder may hold a pipe under this name; opening a pipe would wait for ever.
    """
    with open_regular(path, "rb") as file:
        return file.read()


def read_input(path: Path) -> bytes:
    """Return the bytes of a regular file; raise InputError if it cannot be read."""
    with report_failure(f"cannot read {path}"):
        return read_file(path)


def open_regular(path: Path, mode: str) -> IO[bytes]:
    """Open a regular file for bytes, in `mode`; raise OSError if the path is anything else."""
    return cast(IO[bytes], open(path, mode, opener=_open_regular))


def check_regular(path: Path) -> None:
    """Raise OSError if the path is not a regular file. Call this before a library opens the path."""
    os.close(_open_regular(path, os.O_RDONLY))


def _open_regular(path: str | Path, flags: int) -> int:
    handle = os.open(path, flags | NEVER_WAIT, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def is_temporary(name: str) -> bool:
    """Return whether `name` is the name of a temporary file, which a killed process leaves behind."""
    return _TEMPORARY.fullmatch(name) is not None


def exists(path: Path) -> bool:
    """Return whether the path exists; False if the system cannot look it up."""
    return os.path.exists(path)  # noqa: PTH110 - Path.exists raises some errors of the system


def check_no_file(path: Path, option: str) -> None:
    """Raise InputError if the path exists and is not a folder; `option` is the option that gave the path."""
    if exists(path) and not path.is_dir():
        raise InputError(f"{option}: {path} is a file, not a folder")


def make_folder(path: Path, option: str) -> None:
    """Make a folder that survives a power cut, and check that files can be written to it."""
    check_no_file(path, option)
    with report_failure(f"{option}: cannot write to the folder {path}"):
        new = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for each in new:  # else a power cut may undo the folder with its content
            sync(each.parent)
        probe = path / f".{os.getpid()}.probe"
        probe.touch()
        probe.unlink(missing_ok=True)  # the process that has locked the folder may have removed it


def make_new_folder(named: Path) -> Path:
    """Make the folder `named`, or `named`-2, `named`-3, ... if another run has it; return its path."""
    with report_failure(f"`out`: cannot make the folder {named}"):
        for i in count(1):
            path = named if i == 1 else named.with_name(f"{named.name}-{i}")
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
    return path


@contextmanager
def lock_folder(folder: Path, sentence: str) -> Iterator[None]:
    """Lock a folder during the `with` block; raise Busy with `sentence` if another process has locked it."""
    try:
        handle = open_lock(folder)
    except BlockingIOError:
        raise Busy(sentence) from None
    try:
        remove_temporaries(folder)
        yield
    finally:
        os.close(handle)


def remove_temporaries(folder: Path) -> None:
    """Remove the temporary files that killed processes left in a folder; ignore errors."""
    for path in folder.glob(".*"):
        if is_temporary(path.name):
            with suppress(OSError):
                path.unlink()


def sync(path: Path) -> None:
    """Write a file's content, or a folder's list of names, to the disk, so that it survives a power cut.

    Windows syncs files that are open for writing, and no folders.
    """
    if sys.platform == "win32" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
