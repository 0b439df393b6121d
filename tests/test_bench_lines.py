"""The lines that a bench writes as it goes."""

from __future__ import annotations

from pathlib import Path

from bench.lines import Lines


def test_another_call_goes_on_where_one_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out" / "lines.jsonl"
    first = Lines(path)
    assert first.is_due(model="a", n=1)
    first.add({"model": "a", "n": 1, "rounds": [1, 2]})
    again = Lines(path)
    assert again.found == [{"model": "a", "n": 1, "rounds": [1, 2]}]
    assert not again.is_due(model="a", n=1)
    assert again.is_due(model="a", n=2)
    again.add({"model": "a", "n": 2})
    assert [line["n"] for line in Lines(path).found] == [1, 2]


def test_nothing_begins_when_the_time_is_over() -> None:
    lines = Lines(None, minutes=0)
    assert not lines.is_due(model="a")
    lines.add({"model": "a"})
    assert lines.find(model="a")
