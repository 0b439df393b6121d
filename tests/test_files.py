"""Files that are whole or not there, and folders that one process at a time works in."""

from __future__ import annotations

from pathlib import Path

import pytest

from cfedavg.errors import Busy
from cfedavg.files import locked, make_folder, tidy


def test_only_who_holds_a_folder_tidies_it(tmp_path: Path) -> None:
    """What another one is writing right now stays, and so does a file of the user's."""
    live, own = tmp_path / ".state.1.tmp", tmp_path / ".keep"
    own.touch()
    with locked(tmp_path, "busy"):
        live.touch()
        with pytest.raises(Busy, match="busy"), locked(tmp_path, "busy"):
            pass
        assert live.exists()
    with locked(tmp_path, "busy"):
        assert list(tmp_path.iterdir()) == [own]


def test_what_cannot_be_removed_stays(tmp_path: Path) -> None:
    (tmp_path / ".a.1.tmp").mkdir()
    with locked(tmp_path, "busy"):
        pass
    assert (tmp_path / ".a.1.tmp").exists()


def test_a_probe_may_be_tidied_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the process that holds the folder, while this one looks whether it can write there."""
    touch = Path.touch

    def and_tidied(path: Path) -> None:
        touch(path)
        tidy(path.parent)

    monkeypatch.setattr(Path, "touch", and_tidied)
    make_folder(tmp_path / "new", "out")
    assert list(tmp_path.rglob("*")) == [tmp_path / "new"]
