"""A run's folder: complete, resumable bit for bit, never half-written."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cfedavg import Config, InputError, Task
from cfedavg import run as run_and_draw
from cfedavg.callbacks import Callback
from cfedavg.core.config import read_config
from cfedavg.core.errors import Busy, Diverged
from cfedavg.core.tensors import checksum, read_tensors, save_tensors
from cfedavg.simulate.folder import Folder
from tests.conftest import blobs
from tests.disk import Killed

run = partial(run_and_draw, draw=False)  # the pictures would take longer than these runs
BASE = Config(
    rounds=7,
    local_steps="1..4",
    participation=0.7,
    drop_rate=0.2,
    compressor="topk(0.8) >> qsgd(4)",
    compressor_down="topk(0.9) >> int3(16)",
    checkpoint_every=3,
    schedule="decaying(a=2)",
    sample_iterate=True,
    engine="sequential",  # to list steps would take longer than these runs; `test_batched` resumes such
)


def rows_without_time(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def assert_same_run(a: Path, b: Path) -> None:
    """Bitwise: the checkpoint's bytes, the model's bytes, every metric but the clock's."""
    for name in ("checkpoint", "model", "server_model", "iterate"):
        name += ".safetensors"
        assert (a / name).read_bytes() == (b / name).read_bytes(), name
    assert rows_without_time(a) == rows_without_time(b)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(BASE, blobs(), out=out)
    return out


@pytest.fixture
def whole(uninterrupted: Path, tmp_path: Path) -> Path:
    """A finished run, to compare with or to damage."""
    return Path(shutil.copytree(uninterrupted, tmp_path / "whole"))


class Stop(Callback):
    """Breaks a run off after a round."""

    def __init__(self, at: int, how: type[BaseException]) -> None:
        self.at, self.how = at, how

    def on_row(self, row: dict[str, Any]) -> None:
        if row["round"] == self.at:
            raise self.how


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed])
def test_resume_is_bitwise(whole: Path, tmp_path: Path, at: int, how: type[BaseException]) -> None:
    out = tmp_path / "broken"
    with pytest.raises(how):
        run(BASE, blobs(), out=out, callbacks=[Stop(at, how)])
    run(BASE, blobs(), out=out, resume=True)
    assert_same_run(whole, out)


@pytest.mark.parametrize("place", ["append", "checkpoint", "rewrite"])
def test_interrupt_inside_the_bookkeeping(
    whole: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before or after any write of the folder: the rows and the checkpoint stay in step."""
    real = getattr(Folder, place)
    for late in (False, True):
        calls = 0

        def interrupted(self: Folder, *args: Any, late: bool = late) -> None:
            nonlocal calls
            calls += 1
            if calls == 2 and not late:
                raise KeyboardInterrupt
            real(self, *args)
            if calls == 2:
                raise KeyboardInterrupt

        out = tmp_path / f"{place}-{late}"
        monkeypatch.setattr(Folder, place, interrupted)
        if place != "rewrite":
            with pytest.raises(KeyboardInterrupt):
                run(BASE, blobs(), out=out)
        else:
            with pytest.raises(KeyboardInterrupt):
                run(BASE, blobs(), out=out, callbacks=[Stop(4, KeyboardInterrupt)])
        monkeypatch.setattr(Folder, place, real)
        run(BASE, blobs(), out=out, resume=True)
        assert_same_run(whole, out)


def test_half_written_row_and_rows_after_the_checkpoint_are_dropped(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "broken"
    with pytest.raises(Killed):
        run(BASE, blobs(), out=out, callbacks=[Stop(4, Killed)])
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "train_lo')
    run(BASE, blobs(), out=out, resume=True)
    assert_same_run(whole, out)


def test_more_rounds_later_equal_as_many_at_once(tmp_path: Path) -> None:
    run(BASE.replace(rounds=4), blobs(), out=tmp_path / "a")
    run(BASE, blobs(), out=tmp_path / "a", resume=True)
    run(BASE, blobs(), out=tmp_path / "b")
    # Evaluation happens in the same rounds of both, since eval_every is 1.
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_finished_run_resumes_to_itself(whole: Path) -> None:
    before = rows_without_time(whole)
    result = run(BASE, blobs(), out=whole, resume=True)
    assert rows_without_time(whole) == before
    assert len(result.rows) == 7


def test_folder_holds_what_it_promises(tmp_path: Path) -> None:
    config = Config(rounds=2, clients=4, model="linear", compressor="topk(0.9)", local_steps="2")
    result = run(config, out=tmp_path / "r")
    assert read_config(tmp_path / "r" / "config.toml") == config
    again = run(read_config(tmp_path / "r" / "config.toml"), out=tmp_path / "s")
    assert rows_without_time(tmp_path / "r") == rows_without_time(tmp_path / "s")
    assert all(torch.equal(a, b) for a, b in zip(
        result.model.state_dict().values(), again.model.state_dict().values(), strict=True))  # fmt: skip
    assert load_file(tmp_path / "r" / "model.safetensors").keys() == result.model.state_dict().keys()
    row = rows_without_time(tmp_path / "r")[0]
    promised = {
        "round", "test_accuracy", "test_loss", "train_loss", "uplink_bytes", "downlink_bytes",
        "total_bytes", "coordinates_sent", "model_sizes_sent", "delta_norm2", "error_norm2", "delta_norm",
        "error_norm", "alpha", "snr_min", "snr_mean",
        "local_steps_min", "local_steps_mean", "local_steps_max", "clients", "lost", "simulated_seconds",
    }  # fmt: skip
    promised |= {
        "total_bytes", "first_download_bytes", "downlink_messages", "whole_downloads", "copy_gap_norm2",
        "server_test_accuracy", "server_test_loss",
    }  # fmt: skip
    assert promised <= set(row)
    saved = load_file(tmp_path / "r" / "server_model.safetensors")
    assert all(torch.equal(saved[name], each) for name, each in result.server_model.state_dict().items())
    assert not list((tmp_path / "r").glob(".*"))


def test_eval_every(tmp_path: Path) -> None:
    rows = run(BASE.replace(rounds=5, eval_every=2), blobs()).rows
    assert [("test_loss" in row) for row in rows] == [False, True, False, True, True]


def refuses(task: Task, out: Path, words: str, config: Config = BASE) -> None:
    with pytest.raises(InputError, match=words):
        run(config, task, out=out, resume=True)


def test_resume_refuses_what_does_not_fit(whole: Path) -> None:
    refuses(blobs(), whole, "cannot resume: `seed` is 1, but the run in .* has 0", BASE.replace(seed=1))
    refuses(blobs(features=9), whole, "has another task: its dataset is")
    other = Task(torch.nn.Linear(8, 3), blobs().clients, test=blobs().test, name=blobs().name)
    refuses(other, whole, "has another task: its model is")
    with pytest.raises(InputError, match="holds a run already; set `resume`"):
        run(BASE, blobs(), out=whole)
    metrics = whole / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:5]))
    refuses(blobs(), whole, "does not hold rounds 0 to 6")


@pytest.mark.parametrize("damage", ["cut", "header", "data", "empty", "other"])
def test_resume_refuses_a_damaged_checkpoint(whole: Path, damage: str) -> None:
    checkpoint = whole / "checkpoint.safetensors"
    data = bytearray(checkpoint.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "header":
        data[10] ^= 0xFF
    elif damage == "data":
        data[-1] ^= 1
    elif damage == "empty":
        data = bytearray()
    else:
        data = bytearray((whole / "model.safetensors").read_bytes())
    checkpoint.write_bytes(data)
    refuses(blobs(), whole, "cannot resume: the checkpoint .* is damaged")


def forge(out: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """Changes a checkpoint and puts the right checksum under it."""
    path = out / "checkpoint.safetensors"
    tensors, about = read_tensors(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors, about)
    about.pop("checksum", None)
    save_tensors(tensors, path, {**about, "checksum": checksum(tensors, about)})


def says(**changes: Any) -> Any:
    return lambda tensors, about: about.update(changes)


def holds(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Another tensor of this name, or none."""

    def put(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
        found = change(tensors.pop(name))
        if found is not None:
            tensors[name] = found

    return put


FORGED = {
    "t is large": (says(t=10**9), "does not hold rounds 0 to 999999999, which the checkpoint needs"),
    "t is huge": (says(t=10**30), "t must be an integer of at least 0 and below 2\\^53"),
    "t is a fraction": (says(t=2.5), "t must be an integer .* got 2.5"),
    "t is a truth": (says(t=True), "t must be an integer .* got True"),
    "t is negative": (says(t=-1), "t must be an integer .* got -1"),
    "t is text": (says(t="7"), "t must be an integer .* got '7'"),
    "t is too small": (says(t=3), "tables of downloads is impossible after 3 rounds"),
    "rates are not known": (says(eta_sum="nan"), "eta_sum must be finite"),
    "rates are infinite": (says(eta_sum="0x1p+9999"), "is damaged"),
    "rates are negative": (says(eta_sum="-0x1p+0"), "eta_sum must be finite and at least 0"),
    "rates are a number": (says(eta_sum=1.0), "is damaged"),
    "rows are text": (says(rows="1"), "rows must be an integer"),
    "options are a list": (says(options=[]), "rows must be an integer and options a table"),
    "another format": (says(format=["[red]"]), "written by another version"),
    "no format": (lambda tensors, about: about.pop("format"), "is damaged"),
    "a vector is missing": (holds("x", lambda x: None), "'x' is missing or unknown"),
    "a buffer is missing": (holds("b", lambda x: None), "'b' is missing or unknown"),
    "half an iterate": (holds("z.b", lambda x: None), "'z.b' is missing or unknown"),
    "a residual is missing": (holds("e.0", lambda x: None), "'e.0' is missing or unknown"),
    "a vector is a number": (holds("x", lambda x: x[0]), "holds another model"),
    "a vector of doubles": (holds("x", lambda x: x.double()), "holds another model"),
    "no clients": (holds("residuals.client", lambda x: None), "is damaged"),
    "clients are floats": (holds("residuals.client", lambda x: x.double()), "version must be int64"),
    "clients are one number": (holds("residuals.client", lambda x: x[0]), "1-D tensors of equal length"),
    "clients are negative": (holds("residuals.client", lambda x: x - 1), "increasing numbers from 0 to 5"),
    "clients are too many": (holds("residuals.client", lambda x: x + 9), "increasing numbers from 0 to 5"),
    "clients are the same": (holds("residuals.client", lambda x: 0 * x), "increasing numbers from 0 to 5"),
    "a norm is missing": (holds("residuals.norm2", lambda x: x[1:]), "1-D tensors of equal length"),
    "a norm is negative": (holds("residuals.norm2", lambda x: -x), "norm2 must be finite"),
    "a norm is NaN": (holds("residuals.norm2", lambda x: x * math.nan), "norm2 must be finite"),
}


@pytest.mark.parametrize("name", FORGED)
def test_resume_refuses_a_forged_checkpoint(whole: Path, name: str) -> None:
    """Its checksum is right; nothing is believed before it was looked at, and nothing is allocated."""
    change, words = FORGED[name]
    forge(whole, change)
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    refuses(blobs(), whole, f"^cannot resume: .*{words}")
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_resume_refuses_changed_rows(whole: Path) -> None:
    """One digit, anywhere but in the clock's readings, is not taken for what the run measured."""
    metrics = whole / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    for n, name in ((0, "test_accuracy"), (3, "uplink_bytes"), (6, "snr_mean")):
        row = json.loads(lines[n])
        changed = [*lines[:n], json.dumps(row | {name: row[name] + 1}), *lines[n + 1 :]]
        metrics.write_text("\n".join(changed) + "\n")
        refuses(blobs(), whole, "cannot resume: .*metrics.jsonl was changed after the checkpoint was written")
    metrics.write_text("\n".join(lines) + "\n")
    run(BASE, blobs(), out=whole, resume=True)


NO_ROWS = [
    {"uplink_bytes": "many"}, {"uplink_bytes": None}, {"uplink_bytes": 10**400}, {"seconds": True},
    {"downlink_bytes": None}, {"first_download_bytes": "few"},
    {"rate_conditions": []}, {"rate_conditions": {"a": {}}}, {"rate_conditions": {"a": {"holds": 1}}},
]  # fmt: skip


def older(tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    """As version 0.5 wrote checkpoints."""
    del about["rows"], about["options"]


@pytest.mark.parametrize("change", NO_ROWS, ids=map(str, range(len(NO_ROWS))))
def test_rows_of_an_older_run_are_looked_at_too(whole: Path, change: dict[str, Any]) -> None:
    forge(whole, older)
    run(BASE, blobs(), out=whole, resume=True)
    metrics = whole / "metrics.jsonl"
    first, *rest = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(json.dumps(json.loads(first) | change) + "\n" + "".join(rest))
    refuses(blobs(), whole, "cannot resume: .*metrics.jsonl was changed")


@pytest.mark.parametrize("line", ['{"round": 0, "x": 1e999}', '{"round": 0, "x": NaN}', "[" * 200_000])
def test_rows_that_are_no_json_end_the_rows(whole: Path, line: str) -> None:
    (whole / "metrics.jsonl").write_text(line + "\n")
    refuses(blobs(), whole, "does not hold rounds 0 to 6")


def test_resume_refuses_an_edited_configuration(whole: Path) -> None:
    """Also where nothing is said on the command line, and so the edited file alone speaks."""
    file = whole / "config.toml"
    file.write_text(file.read_text().replace("eta_local = 0.1 ", "eta_local = 0.2 "))
    refuses(blobs(), whole, "config.toml was changed .*: eta_local is 0.2, and was 0.1", read_config(file))
    file.write_text(file.read_text().replace("eta_local = 0.2 ", "eta_local = 0.1 "))
    file.write_text(file.read_text().replace("rounds = 7 ", "rounds = 8 "))
    assert len(run(read_config(file), blobs(), out=whole, resume=True).rows) == 8


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "checkpoint.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_resume_refuses_what_is_no_file(whole: Path, name: str, make: Callable[[Path], None]) -> None:
    """A pipe would be waited for."""
    (whole / name).unlink()
    make(whole / name)
    refuses(blobs(), whole, f"{name}.*not a regular file")


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch])
def test_resume_refuses_residuals_that_are_no_folder(whole: Path, make: Callable[[Path], None]) -> None:
    make(whole / "residuals")
    refuses(blobs(), whole, "residuals must be a folder, got a file")


def test_resume_with_other_rounds_when_they_decide_the_rate(tmp_path: Path) -> None:
    config = Config(rounds=3, local_steps="2", schedule="corollary1", smoothness=5.0)
    run(config, blobs(), out=tmp_path / "r")
    refuses(blobs(), tmp_path / "r", "cannot resume: `rounds` is 5", config.replace(rounds=5))


def test_resume_needs_the_configuration(whole: Path) -> None:
    (whole / "config.toml").unlink()
    refuses(blobs(), whole, "config.toml is missing")
    with pytest.raises(InputError, match="holds a run already"):
        run(BASE, blobs(), out=whole)


def test_a_refused_resume_changes_nothing(whole: Path) -> None:
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    refuses(blobs(), whole, "`rounds` is 3, but the run in .* has done 7", BASE.replace(rounds=3))
    refuses(blobs(), whole, "cannot resume: `eta` is 0.3", BASE.replace(eta=0.3))
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with Folder.open(tmp_path / "r"), pytest.raises(InputError, match="another run is writing to"):
        run(BASE, blobs(), out=tmp_path / "r")
    run(BASE, blobs(), out=tmp_path / "r")


def test_a_run_that_diverged_at_once_may_be_tried_again(tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        run(BASE.replace(eta_local=1e30), blobs(), out=tmp_path / "r")
    run(BASE, blobs(), out=tmp_path / "r")


def test_a_model_that_leaves_the_numbers_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="round 1: the model made from the updates"):
        run(BASE.replace(rounds=1, eta=1e39, schedule="constant", drop_rate=0.0), blobs(), out=tmp_path / "r")
    assert (tmp_path / "r" / "metrics.jsonl").read_text() == ""


def test_frozen_statistics_do_not_break_resume(tmp_path: Path) -> None:
    """A frozen BatchNorm's statistics change while a client trains; the next client starts from the old."""

    def task(seed: int = 0) -> Task:
        base = blobs()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            frozen = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).requires_grad_(False)
            return Task(torch.nn.Sequential(frozen, torch.nn.Linear(8, 3)), base.clients, test=base.test)

    config = BASE.replace(batch_size=9)
    run(config, task(), out=tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        run(config, task(), out=tmp_path / "b", callbacks=[Stop(3, KeyboardInterrupt)])
    with pytest.raises(InputError, match=r"holds another model: .* frozen values differ"):
        run(config, task(seed=1), out=tmp_path / "b", resume=True)
    run(config, task(), out=tmp_path / "b", resume=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_a_run_from_python_draws_too(tmp_path: Path) -> None:
    run_and_draw(BASE.replace(rounds=1), blobs(), out=tmp_path / "r")
    assert (tmp_path / "r" / "curves.png").stat().st_size > 0
    assert (tmp_path / "r" / "report.html").stat().st_size > 0


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("cfedavg.core.tensors.save_file", full)
    with pytest.raises(InputError, match=r"cannot write .*checkpoint.safetensors \(No space left"):
        run(BASE, blobs(), out=tmp_path / "r")
    monkeypatch.undo()
    run(BASE, blobs(), out=tmp_path / "r", resume=True)


def test_without_its_checkpoint_a_run_is_not_begun_again(whole: Path) -> None:
    """It would lose what it has."""
    (whole / "checkpoint.safetensors").unlink()
    before = {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()}
    refuses(blobs(), whole, r"checkpoint\.safetensors is missing, so the run of 7 rounds cannot go on")
    (whole / "model.safetensors").unlink()
    refuses(blobs(), whole, r"checkpoint\.safetensors is missing, so the run of 7 rounds cannot go on")
    del before["model.safetensors"]
    assert {path.name: path.read_bytes() for path in whole.iterdir() if path.is_file()} == before


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"`out`: .*file is a file, not a folder"):
        run(BASE, blobs(), out=tmp_path / "file")
    with pytest.raises(InputError, match=r"`messages`: .*file is a file, not a folder"):
        run(BASE, blobs(), out=tmp_path / "run", messages=tmp_path / "file")
    assert not (tmp_path / "run").exists()


def test_out_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="`out`: cannot write to the folder"):
        run(BASE, blobs(), out=tmp_path / "file" / "run")


COMMAND = [
    "run", "--rounds", "40", "--clients", "6", "--model", "linear", "--local-steps", "2",
    "--checkpoint-every", "1", "--compressor", "topk(0.9)", "--participation", "0.5", "--sample-iterate",
    "--engine", "sequential",
]  # fmt: skip


# The command, but it waits for a signal when so many rows are in the file: however late the signal comes on
# a busy machine, it finds the run there.
WAITING = """
import os, time
from cfedavg.cli import main
from cfedavg.simulate.folder import Folder

def wait(self, row, append=Folder.append):
    append(self, row)
    if row["round"] + 1 == int(os.environ["WAIT_AT"]):
        until = time.monotonic() + 300
        while time.monotonic() < until and not os.path.exists(os.environ.get("GO_ON", "")):
            time.sleep(0.05)

Folder.append = wait
main()
"""


ENDS = {signal.SIGKILL: -signal.SIGKILL, signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


# `test_a_stopped_command` sends SIGINT and SIGHUP in any case.
@pytest.mark.parametrize(
    "signals",
    [
        pytest.param((signal.SIGKILL, signal.SIGTERM), id="two"),
        pytest.param((*ENDS,), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_resumes_bitwise(signals: tuple[signal.Signals, ...], tmp_path: Path) -> None:
    """A real process and real signals, one after another on the same run; then to the end."""
    command = [sys.executable, "-c", WAITING, *COMMAND]
    out, metrics = tmp_path / "killed", tmp_path / "killed" / "metrics.jsonl"
    codes = []
    for wanted, number in zip(range(3, 13, 3), signals, strict=False):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WAIT_AT": str(wanted)}
        process = subprocess.Popen(
            [*command, "--out", str(out), "--resume"], env=environment, stdout=subprocess.DEVNULL
        )
        while process.poll() is None and not (
            metrics.exists() and metrics.read_bytes().count(b"\n") == wanted
        ):
            time.sleep(0.005)
        process.send_signal(number)
        codes.append(process.wait(60))
        assert len(rows_without_time(out)) == wanted
    assert codes == [ENDS[number] for number in signals]
    config = read_config(out / "config.toml")
    run(config, out=out, resume=True)
    run(config, out=tmp_path / "whole")
    assert_same_run(tmp_path / "whole", out)


def test_pictures_are_drawn_while_the_folder_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the lock removes temporary files, which those of pictures are at first."""
    drawn: list[Path] = []

    def draw(path: Path) -> None:
        with pytest.raises(Busy, match="another run is writing to"), Folder.open(path):
            pass
        drawn.append(path)

    monkeypatch.setattr("cfedavg.simulate.run.write_run_pictures", draw)
    run_and_draw(BASE.replace(rounds=1), blobs(), out=tmp_path / "r")
    assert drawn == [tmp_path / "r"]


@pytest.mark.gpu
def test_resume_on_the_gpu_is_bitwise(tmp_path: Path) -> None:
    """Convolutions, pooling, lost replies and sampling on CUDA: stopped twice and resumed, or never."""
    config = BASE.replace(clients=6, local_steps="2..5", device="cuda")
    run(config, out=tmp_path / "whole")
    for at in (2, 4):
        with pytest.raises(KeyboardInterrupt):
            run(config, out=tmp_path / "broken", resume=True, callbacks=[Stop(at, KeyboardInterrupt)])
    run(config, out=tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def test_a_run_without_what_draws_is_refused_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        raise ModuleNotFoundError("matplotlib is not installed here")

    monkeypatch.setattr("cfedavg.simulate.run.check_drawing", check)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        run(Config(rounds=1), blobs(), out=tmp_path / "r", draw=True)
    assert not (tmp_path / "r").exists()
