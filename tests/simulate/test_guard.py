"""The guard: which runs it warns of, and that it decides alike in every engine and after a resume."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfedavg import Config, Layout, parse
from cfedavg import run as run_and_draw
from cfedavg.callbacks import Callback
from cfedavg.compress import EXAMPLES
from cfedavg.feedback import FEEDBACKS
from cfedavg.guard import DELAY, GROWTH, LIMIT, WINDOW, Guard, find_alarm
from tests.conftest import blobs
from tests.simulate.test_run import Stop, assert_same_run

CELLS = Path(__file__).parents[2] / "paper" / "cfedavg" / "results" / "cells"
run = partial(run_and_draw, draw=False)
# Residuals grow from the first round on, and soon exceed a low limit.
BASE = Config(
    rounds=14, local_steps=2, compressor="rd(0.99)", compressor_down="none", guard="adapt",
    checkpoint_every=3, precision="float64", engine="sequential",
)  # fmt: skip


class Listen(Callback):
    """Keeps what a run says about its residuals."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_message(self, text: str) -> None:
        if "the residuals are" in text:
            self.heard.append(text)


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cfedavg.guard.LIMIT", 1.0)


def archived_alarms() -> dict[str, bool]:
    """For each archived run of the paper's experiments with a residual: whether the guard warns."""
    found = {}
    for path in CELLS.glob("*.json"):
        values: dict[str, Any] = json.loads(path.read_text())["values"]
        errors, deltas = values.get("error_norm"), values.get("delta_norm")
        if not path.name.startswith(("mnist", "fashion", "cifar")) or not errors or not errors[-1]:
            continue
        guard = Guard("warn", FEEDBACKS.parse("ef"))
        for t, (left, delta) in enumerate(zip(errors, deltas, strict=True)):
            guard.watch({"round": t, "left_norm": left, "delta_norm": delta})
        found[path.stem] = bool(guard.alarms)
    return found


def test_archived_runs_that_send_too_little_raise_an_alarm_and_no_others() -> None:
    """All clients took part in these runs, so that `error_norm` is what `left_norm` would have been."""
    found = archived_alarms()
    assert len(found) > 100
    too_strong = re.compile(r"-rd0\.99-|p[12]-sign-")
    assert not {name for name, alarm in found.items() if alarm != bool(too_strong.search(name))}


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=WINDOW + 1, max_size=WINDOW + 1))
def test_an_alarm_is_what_the_definition_says(norms: list[tuple[float, float]]) -> None:
    alarm = find_alarm(7, norms)
    left, update = (sum(each[i] for each in norms[1:]) for i in (0, 1))
    first, last = norms[0][0], norms[-1][0]
    if min(abs(left - LIMIT * update), abs(last - GROWTH * first)) > 1e-6 * (1 + left + last):
        assert (alarm is not None) == (
            first > 0 and update > 0 and left > LIMIT * update and last > GROWTH * first
        )


@pytest.mark.parametrize("text", EXAMPLES)
def test_denser(text: str) -> None:
    """Twice as many coordinates, up to all: gamma does not fall, and the text makes an equal compressor."""
    compressor, layout = parse(text), Layout.flat(100_000)
    for times in (2, 4, 1024):
        denser = compressor.denser(times)
        assert parse(str(denser)) == denser
        assert denser.gamma(layout) >= compressor.gamma(layout) * (1 - 1e-12)
        if text.startswith(("topk(0", "rd", "proportional")):
            comp = denser.selector.comp  # type: ignore[attr-defined]
            assert comp == pytest.approx(max(0, 1 - times * (1 - compressor.selector.comp)))  # type: ignore[attr-defined]
    assert compressor.denser(1) is compressor


@pytest.mark.usefixtures("low_limit")
def test_adapt_sends_more_until_residuals_are_bounded() -> None:
    listen = Listen()
    rows = run(BASE.replace(rounds=40), blobs(), callbacks=[listen]).rows
    ratio = [row["left_norm"] / row["delta_norm"] for row in rows]
    assert max(ratio[:10]) > 1.0
    assert "from round 8 on it is rd(0.98)" in listen.heard[0]
    assert len(listen.heard) > 2
    sent = [row["coordinates_sent"] / row["clients"] for row in rows]
    assert sum(sent[30:]) > 8 * sum(sent[:10])
    last = 40 - 2 * WINDOW  # the residuals are at most the limit, or shrink
    assert sum(ratio[-WINDOW:]) <= WINDOW or rows[-1]["left_norm"] < rows[last]["left_norm"]


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_every_engine_adapts_alike(engine: str) -> None:
    expected, found = (run(BASE.replace(engine=each), blobs()).rows for each in ("reference", engine))
    for row, reference in zip(found, expected, strict=True):
        assert row["coordinates_sent"] == reference["coordinates_sent"]
        assert row["left_norm"] == pytest.approx(reference["left_norm"], rel=1e-9)
    assert expected[-1]["coordinates_sent"] > 1.5 * expected[0]["coordinates_sent"]


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("at", [4, 6, 9])
def test_a_resumed_run_adapts_as_the_whole(at: int, tmp_path: Path) -> None:
    config = BASE.replace(compressor_down="topk(0.9)", sample_iterate=True)
    run(config, blobs(), out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config, blobs(), out=tmp_path / "part", callbacks=[Stop(at, KeyboardInterrupt)])
    run(config, blobs(), out=tmp_path / "part", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "part")


@pytest.mark.usefixtures("low_limit")
def test_workers_adapt_alike() -> None:
    alone, shared = (run(BASE.replace(engine="sequential", workers=n), blobs()).rows for n in (1, 2))
    for name in ("coordinates_sent", "left_norm", "test_loss"):
        assert [row[name] for row in alone] == [row[name] for row in shared]


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize(
    ("changes", "heard"),
    [
        ({"guard": "warn"}, ["`compressor` rd(0.99) sends too little; try rd(0.98), or `guard` adapt"]),
        ({"guard": "warn", "compressor": "sign"}, ["`compressor` none >> sign sends too little, and cannot"]),
        ({"guard": "off"}, []),
        ({"feedback": "none"}, []),
        ({"feedback": "ef21"}, []),
        ({"compressor": "none"}, []),
    ],
)
def test_what_it_says(changes: dict[str, Any], heard: list[str]) -> None:
    listen = Listen()
    rows = run(BASE.replace(**changes), blobs(), callbacks=[listen]).rows
    if changes.get("compressor") == "sign":  # it may keep residuals small
        heard = heard[: len(listen.heard)]
    assert len(listen.heard) == len(heard)
    assert all(part in text for part, text in zip(heard, listen.heard, strict=True))
    assert rows[-1]["coordinates_sent"] < 3 * max(1, rows[0]["coordinates_sent"])


def test_rows_without_norms_raise_no_alarm() -> None:
    """Rows of older versions lack `left_norm`, and a round may have no reply."""
    guard = Guard("adapt", FEEDBACKS.parse("ef"))
    for t in range(20):
        assert guard.watch({"round": t, "delta_norm": 1.0, "error_norm": 2.0**t}) is None
        assert guard.watch({"round": t, "left_norm": None, "delta_norm": None}) is None
    assert guard.doublings(10**6) == 0


def test_alarms_count_from_two_rounds_later_on() -> None:
    guard = Guard("adapt", FEEDBACKS.parse("ef"))
    for t in range(WINDOW + 1):
        alarm = guard.watch({"round": t, "left_norm": 100.0 * 2**t, "delta_norm": 1.0})
    assert alarm is not None
    assert [guard.doublings(t) for t in (alarm.t, alarm.t + DELAY - 1, alarm.t + DELAY)] == [0, 0, 1]
