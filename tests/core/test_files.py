"""Files that are whole or not there, and folders that one process at a time works in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cfedavg.core.errors import Busy
from cfedavg.core.files import check_regular, lock_folder, make_folder, read_file, remove_temporaries
from cfedavg.simulate.residual_files import sweep
from cfedavg.simulate.residuals import InMemory


def test_only_who_holds_a_folder_tidies_it(tmp_path: Path) -> None:
    """A file that another process is writing stays, and so does a file of the user's."""
    live, own = tmp_path / ".state.1.tmp", tmp_path / ".keep"
    own.touch()
    with lock_folder(tmp_path, "busy"):
        live.touch()
        with pytest.raises(Busy, match="busy"), lock_folder(tmp_path, "busy"):
            pass
        assert live.exists()
    with lock_folder(tmp_path, "busy"):
        assert list(tmp_path.iterdir()) == [own]


def test_what_older_versions_left_is_swept(tmp_path: Path) -> None:
    """Temporary files of safetensors, each a whole checkpoint, lie in a run's folder and beside residuals."""
    (folder := tmp_path / "residuals").mkdir()
    for left in (".tmpA1b2C3", ".000001-000002.safetensors.77.tmp", "000001-000002.safetensors"):
        (folder / left).touch()
    (tmp_path / ".tmpYEFxwI").touch()
    (tmp_path / ".tmp-of-mine").touch()
    sweep(folder, InMemory())
    with lock_folder(tmp_path, "busy"):
        assert list(tmp_path.iterdir()) == [tmp_path / ".tmp-of-mine"]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Opening a pipe would wait for a writer that may never come."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_file(tmp_path / "link") == b"text"
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path)
        with pytest.raises(OSError, match="not a regular file"):
            check_regular(path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "nothing")


def test_what_cannot_be_removed_stays(tmp_path: Path) -> None:
    (tmp_path / ".a.1.tmp").mkdir()
    with lock_folder(tmp_path, "busy"):
        pass
    assert (tmp_path / ".a.1.tmp").exists()


def test_a_probe_may_be_tidied_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that holds the folder may remove the probe while this one checks the folder."""
    touch = Path.touch

    def and_tidied(path: Path) -> None:
        touch(path)
        remove_temporaries(path.parent)

    monkeypatch.setattr(Path, "touch", and_tidied)
    make_folder(tmp_path / "new", "out")
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]
