"""The progress of runs: a line for one run, short lines for several, plain lines without a terminal."""

from __future__ import annotations

import io
from contextlib import ExitStack
from typing import Any

import pytest
from rich.console import Console

from cfedavg.callbacks.progress import Board


def row(t: int, accuracy: float = 0.9753) -> dict[str, Any]:
    made = {"round": t, "test_accuracy": accuracy, "uplink_bytes": 4000, "downlink_bytes": 1000}
    return made | {"snr_min": 1.5, "delta_norm2": 1.0, "error_norm2": 2.0, "lost": 0}


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)


def text_of(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_several_runs_fit_into_80_columns() -> None:
    console = terminal()
    board = Board(console)
    names = [f"embedded-p2-a-very-long-name-of-a-line-seed{seed}" for seed in range(3)]
    with ExitStack() as stack:
        shown = [stack.enter_context(board.show(name, 500)) for name in names]
        for display in shown:
            display.on_row(row(99))
        assert board._progress is not None
        lines = console.render_lines(board._progress.get_renderable())
    texts = ["".join(segment.text for segment in line) for line in lines]
    assert [f"seed{seed} " in text for seed, text in enumerate(texts)] == [True] * 3
    assert all("100/500" in text and "accuracy 97.53%" in text for text in texts)
    assert "seed2: sent 4 kB up and 1 kB down, 5 kB in total" in text_of(console)


def test_a_run_that_ends_leaves_the_board_to_the_others() -> None:
    board = Board(terminal())
    with board.show("one", 2):
        with board.show("two", 2):
            assert board._progress is not None
            assert [task.description for task in board._progress.tasks] == ["one", "two"]
        assert [task.description for task in board._progress.tasks] == ["one"]
    with board.show("three", 2):  # a board can be used again
        assert [task.description for task in board._progress.tasks] == ["three"]


def test_plain_lines_name_the_run_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cfedavg.callbacks.progress.PLAIN_EVERY", 0.0)
    console = Console(file=io.StringIO(), width=200)
    board = Board(console)
    with board.show("one", 2) as one:
        one.on_row(row(0))
        with board.show("two", 2) as two:
            one.on_row(row(1))
            two.on_row(row(0))
    lines = text_of(console).splitlines()
    assert [line.split("  ")[0] for line in lines if "round" in line] == [
        "round 1/2", "one: round 2/2", "two: round 1/2"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "shown"), [(40, "accuracy"), (60, "5 kB"), (80, "(4 kB up)"), (200, "|e|²")]
)
def test_a_live_line_fits_and_shows_the_most_important(width: int, shown: str) -> None:
    console = terminal(width)
    board = Board(console)
    with board.show("training", 1000) as display:
        display.on_row(row(998) | {"lost": 123, "snr_min": 1.23456e-9})
        assert board._progress is not None
        (line,) = console.render_lines(board._progress.get_renderable())
    text = "".join(segment.text for segment in line)
    assert len(text.rstrip()) <= width
    assert "999/1000" in text
    assert "…" not in text
    assert (shown in text) == (width > 40)


def test_a_plain_line_fits_into_80_columns() -> None:
    console = Console(file=io.StringIO(), width=200)
    wide = {"lost": 1234, "snr_min": 1.23456e-9, "uplink_bytes": 123_456_789_000, "error_norm2": 1.23e9}
    with Board(console).show("training", 10_000) as display:
        display.on_row(row(9_999) | wide)
    line, total = text_of(console).splitlines()
    assert "accuracy 97.53%  123 GB (123 GB up)  lost 1234  SNR" in line
    assert len(line) <= 80 >= len(total)


def test_plain_lines_of_several_runs_fit_into_80_columns() -> None:
    console = Console(file=io.StringIO(), width=200)
    board = Board(console)
    name = "topk0.97-least-10000-int3256-server-optimiseradam0.001-beta1-0.95-seed{}"
    with board.show(name.format(0), 10) as one, board.show(name.format(1), 10) as two:
        one.on_row(row(9))
        two.on_row(row(9))
    lines = [line for line in text_of(console).splitlines() if "round" in line]
    assert [line.split(": ")[0][-6:] for line in lines] == ["-seed0", "-seed1"]
    assert all(len(line) <= 80 and "accuracy 97.53%" in line for line in lines)


def test_a_metric_of_ones_own_is_shown() -> None:
    """The loss of the training until there is a test, then the last test."""
    console = terminal()
    board = Board(console)
    with board.show("training", 9) as display:
        for values, shown in (
            ({"train_loss": 2.5}, "train loss 2.5"),
            ({"train_loss": 2.0, "test_loss": 1.0, "test_mse": 0.1234}, "mse 0.123"),
            ({"train_loss": 1.5}, "mse 0.123"),
        ):
            display.on_row(row(0) | {"test_accuracy": None} | values)
            assert display._metric == shown
    assert "mse 0.123" in text_of(console)


def test_a_short_run_shows_nothing_and_a_long_one_all() -> None:
    for console in terminal(), Console(file=io.StringIO(), width=80):
        board = Board(console, silent=3600)
        with board.show("training", 2) as display:
            display.on_message("engine: fast")
            display.on_row(row(0))
            assert text_of(console) == ""
            board._from = 0
            display.on_row(row(1))
        text = text_of(console)
        assert text.index("engine: fast") < text.index("2/2") < text.index("in total")
