"""Signals: handlers are set and restored together, the first one raises, the second one ends the process."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cfedavg.cli import SafeStream
from cfedavg.core import interrupts
from cfedavg.core.interrupts import (
    STOPS,
    StopRequest,
    defer_stops,
    handle_stops,
    ignore_stops,
    mute_stops,
    watch_second_stop,
)
from cfedavg.core.run_files import read_rows
from cfedavg.core.tensors import read_tensors

LIMIT = 120.0  # seconds after which a test fails instead of waiting


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    """Restore the handlers after each test."""
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    found = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert found == before


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Collect the signals that reach the handlers that a program has set before."""
    numbers: list[int] = []
    before = {n: signal.signal(n, lambda number, frame: numbers.append(number)) for n in STOPS}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("block", [ignore_stops, mute_stops, defer_stops])
def test_handlers_change_while_signals_wait(
    block: Callable[[], Any], heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal arrives while only some handlers are set, at the beginning of a block or at its end."""
    real, masks = signal.signal, list[set[int]]()

    def watched(number: int, handler: Any) -> Any:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return real(number, handler)

    monkeypatch.setattr(signal, "signal", watched)
    with block():
        pass
    assert len(masks) == 2 * len(STOPS)
    assert all(mask >= set(STOPS) for mask in masks)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOPS)


def test_a_signal_waits_for_the_end_of_a_block(heard: list[int]) -> None:
    inside: list[int] = []

    def fail() -> None:
        signal.raise_signal(signal.SIGHUP)
        inside.extend(heard)
        raise ValueError("an error")

    with pytest.raises(ValueError, match="an error"), defer_stops():
        fail()
    assert (inside, heard) == ([], [signal.SIGHUP])
    with mute_stops():
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGHUP]


def test_a_command_hears_one_signal_and_leaves_ignored_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(interrupts, "end_at_once", ended.append)
    before = {number: signal.getsignal(number) for number in STOPS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with handle_stops() as request:
        signal.raise_signal(signal.SIGHUP)
        assert request.signal is None
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        for _ in range(4):
            signal.raise_signal(signal.SIGINT)  # too soon to insist
    assert request.code == 143
    assert ended == []
    assert [signal.getsignal(number) for number in STOPS] == [signal.SIG_IGN] * 3
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_signal_is_heard_by_everyone_who_listens(
    heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "TOGETHER", -1.0)
    inner, outer = threading.Event(), threading.Event()
    with watch_second_stop(lambda number: outer.set()), watch_second_stop(lambda number: inner.set()):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert inner.wait(LIMIT)
        assert outer.wait(LIMIT)
    assert signal.set_wakeup_fd(-1) == -1


# --- the streams ----------------------------------------------------------------------------------------


class Broken:
    """A stream whose writes fail."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def fileno(self) -> int:
        raise OSError("no descriptor")


def test_a_closed_pipe_asks_to_stop_and_another_failure_does_not() -> None:
    request = StopRequest()
    full: Any = Broken(OSError(28, "No space left on device"))
    assert SafeStream(full, request.stop).write("text") == 4
    piped: Any = SafeStream(Broken(BrokenPipeError()), request.stop)
    thread = threading.Thread(target=piped.write, args=("text",))
    thread.start()
    thread.join()
    assert request.signal is None  # a thread cannot stop a command
    with pytest.raises(KeyboardInterrupt):
        piped.write("text")
    assert request.code == 128 + signal.SIGPIPE
    assert piped.write("text") == 4


def test_a_stream_that_lacks_a_character_gets_a_question_mark() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    assert SafeStream(stream, StopRequest().stop).write("|e|² \udcff") == 6
    assert raw.getvalue() == b"|e|? ?"


# --- the command ----------------------------------------------------------------------------------------

RUN = ["run", "--model", "linear", "--clients", "4", "--local-steps", "2", "--engine", "sequential"]

# Ctrl-C five times, from the moment on that the command imports a module, or saves.
PRESSING = """
import os, signal, sys, threading, time

def press():
    for _ in range(5):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)

def wait(*_):
    threading.Thread(target=press).start()  # the process does not end before the fifth
    time.sleep(60)

class Finder:
    def find_spec(self, name, *_):
        if name == at:
            wait()

at = sys.argv.pop(1)
sys.meta_path.insert(0, Finder())
from cfedavg.cli import main
if at == "save":
    from cfedavg.simulate.folder import Folder
    Folder.checkpoint = wait
main()
"""


@pytest.mark.parametrize("at", ["typer", "save", pytest.param("matplotlib", marks=pytest.mark.slow)])
def test_ctrl_c_five_times(at: str, tmp_path: Path) -> None:
    """Signals come while the command starts, saves and draws."""
    command = [sys.executable, "-c", PRESSING, at, *RUN, "--rounds", "1", "--out", str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_closed_pipe_ends_a_run_with_its_state_saved(tmp_path: Path) -> None:
    """The reader ends as in `cfedavg run | head -1`, when rounds have begun."""
    out = tmp_path / "r"
    imports = "from cfedavg.callbacks import progress; from cfedavg.cli import main"
    program = f"{imports}; progress.PLAIN_EVERY = 0; main()"
    command = [sys.executable, "-c", program, *RUN, "--rounds", "1000000", "--checkpoint-every", "0"]
    process = subprocess.Popen([*command, "--out", out], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stderr
    while not process.stdout.readline().startswith(b"round"):
        assert process.poll() is None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(LIMIT) == 128 + signal.SIGPIPE
    process.stderr.close()
    done = len(read_rows(out / "metrics.jsonl"))
    assert done > 0
    assert read_tensors(out / "checkpoint.safetensors")[1]["t"] == done
