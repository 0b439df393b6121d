"""The page that lists all tables."""

from __future__ import annotations

from pathlib import Path

from cfedavg.sweep import CELLS
from paper import overview


def test_the_page_is_made_of_the_cells() -> None:
    assert (overview.HERE / "README.md").read_text() == overview.write()


def test_without_cells_nothing_was_run(tmp_path: Path) -> None:
    head, *rows = overview.rows(tmp_path)
    assert head == ["made again", "what is judged", "verdict", "page"]
    assert rows[0][2].endswith(" not run")
    assert rows[0][2].startswith("of 79 claims 79 ")
    assert {row[2] for row in rows[1:]} == {"not run"}
    assert len(rows) == 1 + 1 + 4 + 2


def test_the_grid_of_feedbacks_is_counted(tmp_path: Path) -> None:
    cells = tmp_path / "feedback" / "results" / "cpu" / CELLS
    cells.mkdir(parents=True)
    for name in ("a", "b"):
        (cells / f"{name}.json").touch()
    assert list(overview.rows(tmp_path))[-1][2:] == ["2 runs", "–"]
    (cells.parent / "page.md").touch()
    assert list(overview.rows(tmp_path))[-1][2:] == ["2 runs", "[page](feedback/results/cpu/page.md)"]


def test_it_is_written(tmp_path: Path) -> None:
    assert overview.main(["--page", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text().startswith("# Papers, made again")
    assert overview.main(["--page", str(tmp_path / "nowhere" / "page.md")]) == 2
