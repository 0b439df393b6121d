"""Scores and ranks: what a candidate has reached within a limit, and who goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfedavg import Config
from cfedavg.tuner.budget import Budget
from cfedavg.tuner.plan import Entrant
from cfedavg.tuner.race import Race, Racer, score
from tests.conftest import blobs

BYTES = Budget(100)


def rows_of(
    values: list[float | None], each: int = 10, metric: str = "test_accuracy"
) -> list[dict[str, Any]]:
    return [
        {"round": t, "total_bytes": each, "seconds": 1.0}
        | ({} if value is None else {metric: value, "test_loss": 1.0})
        for t, value in enumerate(values)
    ]


def test_a_score_is_the_mean_of_the_last_tenth() -> None:
    rows = rows_of([0.1] * 8 + [0.5, 0.7, 0.9])
    assert score(rows, BYTES, 100) == pytest.approx(0.6)  # at 90 and at 100 bytes; the last exceeds the limit
    assert score(rows, BYTES, 79) == pytest.approx(0.1)


def test_a_score_without_a_late_evaluation_is_the_last_one() -> None:
    assert score(rows_of([0.1, 0.4, None, None, None, None]), BYTES, 60) == 0.4
    assert score(rows_of([None, None]), BYTES, 100) is None
    assert score(rows_of([0.5], each=200), BYTES, 100) is None
    assert score(rows_of([0.5, math.nan]), BYTES, 100) == 0.5


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(10, 300))
def test_later_rounds_do_not_change_a_score(values: list[float], limit: int) -> None:
    within = limit // 10
    assert score(rows_of(values), BYTES, limit) == score(rows_of(values[:within]), BYTES, limit)


def make_race(tmp_path: Path, found: dict[str, list[dict[str, Any]]]) -> Race:
    entrants = [Entrant(name, {}, 1.0, 1) for name in found]
    race = Race(Config(), blobs(), BYTES, tmp_path, entrants)
    for name, rows in found.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return race


def test_the_best_third_and_the_default_go_on(tmp_path: Path) -> None:
    found = {f"c{i}": rows_of([i / 10]) for i in range(1, 7)} | {"default": rows_of([0.05])}
    rung = make_race(tmp_path, found).rank(list(found), 50, last=False)
    assert [entry.name for entry in rung.entries] == ["c6", "c5", "c4", "c3", "c2", "c1", "default"]
    assert [entry.name for entry in rung.entries if entry.stays] == ["c6", "c5", "c4", "default"]
    assert [(entry.place, entry.rounds, entry.spent) for entry in rung.entries][:2] == [
        (1, 1, 10),
        (2, 1, 10),
    ]


def test_in_the_last_rung_one_is_chosen(tmp_path: Path) -> None:
    found = {"a": rows_of([0.4]), "default": rows_of([0.5])}
    rung = make_race(tmp_path, found).rank(list(found), 50, last=True)
    assert [entry.name for entry in rung.entries if entry.stays] == ["default"]


def test_the_default_wins_a_tie(tmp_path: Path) -> None:
    found = {"a": rows_of([0.5]), "default": rows_of([0.5]), "b": rows_of([0.5])}
    rung = make_race(tmp_path, found).rank(list(found), 50, last=True)
    assert [entry.name for entry in rung.entries] == ["default", "a", "b"]


def test_of_an_error_less_is_better(tmp_path: Path) -> None:
    found = {name: rows_of([value], metric="test_mse") for name, value in (("a", 0.2), ("default", 0.1))}
    rung = make_race(tmp_path, found).rank(list(found), 50, last=True)
    assert [entry.name for entry in rung.entries] == ["default", "a"]


def test_what_diverged_or_has_no_score_comes_last(tmp_path: Path) -> None:
    found = {"a": rows_of([0.9]), "b": rows_of([0.5], each=90), "default": rows_of([0.1])}
    race = make_race(tmp_path, found)
    race.notes["a"] = "diverged in round 2"
    rung = race.rank(list(found), 50, last=False)
    assert [(entry.name, entry.note, entry.stays) for entry in rung.entries] == [
        ("default", "", True),
        ("a", "diverged in round 2", False),
        ("b", "no evaluation within the limit", False),
    ]


def test_dropped_candidates_keep_their_metrics_alone(tmp_path: Path) -> None:
    found = {name: rows_of([value]) for name, value in (("a", 0.2), ("default", 0.1), ("b", 0.05))}
    race = make_race(tmp_path, found)
    for name in found:
        (tmp_path / name / "checkpoint.safetensors").touch()
        (tmp_path / name / "model.safetensors").touch()
        (tmp_path / name / "residuals").mkdir()
    race.clear(race.rank(list(found), 50, last=False), list(found))
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["metrics.jsonl"]
    assert len(list((tmp_path / "a").iterdir())) == len(list((tmp_path / "default").iterdir())) == 4


def test_a_racer_ends_after_the_round_that_exceeds_the_limit() -> None:
    racer = Racer(BYTES, 25, math.inf, lambda rows: None)
    assert [racer.on_row(row) for row in rows_of([0.1, 0.2, 0.3])] == [False, False, True]
    assert Racer(BYTES, 1e9, 0.0, lambda rows: None).on_row(rows_of([0.1])[0])  # the time is over
