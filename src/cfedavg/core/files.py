"""Files that are whole or not there: written to a temporary name, synced, renamed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from cfedavg.core.errors import Busy, InputError

# `.tmpA1b2C3` is what safetensors calls its own, which versions up to 0.5 left behind when they were killed.
_TEMPORARY = re.compile(r"\.(.+\.\d+\.tmp|\d+\.probe|tmp[A-Za-z0-9]{6})")


@contextmanager
def replace_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give the block a temporary path to write to; it replaces `path` when the block ends well.

    Without `durable`, the file is whole for other processes, but a power cut may undo it until it is synced.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            yield temporary
            if durable:
                sync(temporary)
            temporary.replace(path)
            if durable:
                sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)  # may fail as well, where the folder is not one
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror or error})") from None


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the content of a file: after a crash it holds the old bytes or the new ones."""
    with replace_file(path) as temporary:
        temporary.write_bytes(data)


def append(path: Path, data: bytes) -> None:
    """Append `data` to a file. A crash may leave a part of it: the caller must recognise that."""
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror or error})") from None


def read_file(path: Path) -> bytes:
    """Return what a regular file holds; anything else raises OSError.

    Somebody else's folder may hold a pipe under this name, and opening that would wait for ever.
    """
    with open_regular(path, "rb") as file:
        return file.read()


def open_regular(path: Path, mode: str) -> IO[bytes]:
    """Open a file for bytes as `open` does; anything but a regular file raises OSError."""
    return cast(IO[bytes], open(path, mode, opener=_open_regular))


def check_regular(path: Path) -> None:
    """Raise OSError unless the path is a regular file, for readers that open it by its name."""
    os.close(_open_regular(path, os.O_RDONLY))


def _open_regular(path: str | Path, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return handle


def is_temporary(name: str) -> bool:
    """Return whether a killed process left a file of this name."""
    return _TEMPORARY.fullmatch(name) is not None


def exists(path: Path) -> bool:
    """Return whether the path exists; one that cannot be looked up does not."""
    try:
        return path.exists()
    except OSError:
        return False


def check_no_file(path: Path, option: str) -> None:
    """Refuse a path that exists and is no folder."""
    if exists(path) and not path.is_dir():
        raise InputError(f"{option}: {path} is a file, not a folder")


def make_folder(path: Path, option: str) -> None:
    """Make a folder, durably, and check that files can be written there."""
    check_no_file(path, option)
    try:
        new = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for each in new:  # a power cut would take the folder back, and all that is in it
            sync(each.parent)
        probe = path / f".{os.getpid()}.probe"
        probe.touch()
        probe.unlink(missing_ok=True)  # whoever holds the folder may have tidied up
    except OSError as error:
        raise InputError(f"{option}: cannot write to the folder {path} ({error.strerror or error})") from None


@contextmanager
def lock_folder(folder: Path, sentence: str) -> Iterator[None]:
    """Lock a folder during the block; raise Busy with this sentence if another process holds it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(sentence) from None
        remove_temporaries(folder)
        yield
    finally:
        os.close(handle)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes left while they wrote, as far as it can be removed."""
    for path in folder.glob(".*"):
        if is_temporary(path.name):
            with suppress(OSError):
                path.unlink()


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
