"""Callbacks: what they receive and when, how they end a run, and what becomes of their errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from cfedavg import Callback, Config, InputError, Start, run
from tests.conftest import blobs
from tests.simulate.test_workers import assert_same, contents, forked  # noqa: F401 - forked is a fixture

SMALL = Config(rounds=4, local_steps=2, eta_local=0.05, checkpoint_every=0, engine="sequential")


class Log(Callback):
    """Keeps what it receives; ends or breaks the run at the row, or the end, that `how` says."""

    def __init__(self, at: int = -1, how: type[BaseException] | None = None, at_end: bool = False) -> None:
        self.at, self.how, self.at_end = at, how, at_end
        self.events: list[Any] = []

    def on_begin(self, start: Start) -> None:
        self.start = start
        self.events.append("begin")

    def on_row(self, row: dict[str, Any]) -> bool | None:
        self.events.append(row["round"])
        if row["round"] == self.at and self.how:
            raise self.how("broken")
        return row["round"] == self.at

    def on_end(self, error: BaseException | None) -> None:
        self.events.append(error)
        if self.at_end and self.how:
            raise self.how("broken")


def test_a_callback_receives_begin_rows_and_end(tmp_path: Path) -> None:
    one, other = Log(), Log()
    result = run(SMALL, blobs(), out=tmp_path / "r", callbacks=[one, other], draw=False)
    assert one.events == other.events == ["begin", 0, 1, 2, 3, None]
    assert one.start == Start(result.config, tmp_path / "r", [])
    resumed = Log()
    run(SMALL.replace(rounds=5), blobs(), out=tmp_path / "r", resume=True, callbacks=[resumed], draw=False)
    assert resumed.events == ["begin", 4, None]
    assert resumed.start.rows == result.rows


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_callback_ends_a_run_which_can_be_resumed(workers: int, tmp_path: Path) -> None:
    config = SMALL.replace(workers=workers)
    said: list[str] = []
    log = Log(at=1)
    log.on_message = said.append  # type: ignore[method-assign]
    stopped = run(config, blobs(), out=tmp_path / "a", callbacks=[log], draw=False)
    assert log.events == ["begin", 0, 1, None]
    assert len(stopped.rows) == 2
    assert "a callback ends the run after round 2" in said
    assert (tmp_path / "a" / "model.safetensors").exists()
    run(config, blobs(), out=tmp_path / "a", resume=True, draw=False)
    run(config, blobs(), out=tmp_path / "b", draw=False)
    assert_same(contents(tmp_path / "a"), contents(tmp_path / "b"))


@pytest.mark.parametrize("how", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_callback_ends_the_run_and_reaches_all(
    how: type[BaseException], tmp_path: Path
) -> None:
    broken, other = Log(at=2, how=how), Log()
    with pytest.raises(how, match="broken") as raised:
        run(SMALL, blobs(), out=tmp_path, callbacks=[other, broken], draw=False)
    assert broken.events == ["begin", 0, 1, 2, raised.value]
    assert other.events == ["begin", 0, 1, 2, raised.value]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert len(run(SMALL, blobs(), out=tmp_path, resume=True, draw=False).rows) == 4


def test_an_error_at_the_end_keeps_no_end_from_the_others() -> None:
    logs = Log(), Log(how=RuntimeError, at_end=True), Log()
    with pytest.raises(RuntimeError, match="broken"):
        run(SMALL, blobs(), callbacks=logs)
    assert all(log.events[-1] is None for log in logs)


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (Log(), "run: `callbacks` must be a list of Callback objects, got Log; write callbacks=[...]"),
        ([Log], "run: `callbacks` must hold objects, got the class Log; write Log()"),
        ([print], "run: `callbacks` must hold Callback objects, got builtin_function_or_method"),
    ],
)
def test_other_things_are_no_callbacks(callbacks: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        run(SMALL, blobs(), out=tmp_path / "r", callbacks=callbacks)
    assert str(raised.value) == words
    assert not (tmp_path / "r").exists()


def test_progress_is_shown_where_it_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    run(SMALL, blobs())
    run(SMALL, blobs(), progress=False)
    assert capsys.readouterr() == ("", "")
    run(SMALL, blobs(), progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith("round 4/4  accuracy ")


def test_a_result_is_a_few_lines_and_a_table(tmp_path: Path) -> None:
    result = run(SMALL, blobs(), out=tmp_path, draw=False)
    first, second, third = repr(result).splitlines()
    accuracy = f"{result.final['test_accuracy']:.1%}"
    assert first.startswith(f"Result: test accuracy {accuracy} after 4 rounds, in ")
    assert second == f"  {result.totals}"
    assert third == f"  written to {tmp_path}"
    pandas = pytest.importorskip("pandas")
    frame = result.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == [0, 1, 2, 3]
    total = [row["total_bytes"] for row in result.rows]
    assert frame["total_bytes"].cumsum().tolist() == frame["cumulative_total_bytes"].tolist()
    assert frame["cumulative_total_bytes"].iloc[-1] == sum(total) == result.totals.total
    assert (frame["uplink_bytes"] + frame["downlink_bytes"]).tolist() == total


def test_without_pandas_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(SMALL.replace(rounds=1), blobs())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"^`frame` needs pandas, .*: pip install pandas$"):
        result.frame()
