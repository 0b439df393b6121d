"""Checkpoints of runs with a compressed broadcast, and of runs that send the model whole."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cfedavg import run as run_and_draw
from cfedavg.core.config import read_config
from cfedavg.core.tensors import read_tensors
from tests.conftest import Command, blobs
from tests.simulate.test_run import BASE, forge, holds, older, refuses, says
from tests.simulate.test_run import uninterrupted as _uninterrupted
from tests.simulate.test_run import whole as _whole

run = partial(run_and_draw, draw=False)
NONE = BASE.replace(compressor_down="none")
uninterrupted, whole = _uninterrupted, _whole  # fixtures: a run with a compressed broadcast


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "none"
    run(NONE, blobs(), out=out)
    return out


@pytest.fixture
def without_copy(finished: Path, tmp_path: Path) -> Path:
    """A run that sends the model whole."""
    return Path(shutil.copytree(finished, tmp_path / "none"))


def downloads(name: str, change: Any) -> Any:
    return holds(f"downloads.{name}", change)


RANGE = "a version or length in the tables of downloads is impossible after 7 rounds"
LENGTH = "must have equal lengths, and downloads.length 1 to "
DTYPE = "the tables of downloads must be 1-D tensors of int64"
CLIENTS = "downloads.client must hold different numbers from 0 to 5"
FORGED = {
    "no copy": (holds("w", lambda w: None), "checkpoint.safetensors is from a run without a compressed"),
    "a copy of another length": (holds("w", lambda w: w[1:]), "holds another model"),
    "a copy of doubles": (holds("w", lambda w: w.double()), "holds another model"),
    "a copy with NaN": (holds("w", lambda w: w * math.nan), "w holds NaN or Inf"),
    "an infinite copy": (holds("w", lambda w: w / 0), "w holds NaN or Inf"),
    "no table": (downloads("version", lambda v: None), "'downloads.version' is missing"),
    "clients are floats": (downloads("client", lambda v: v.double()), DTYPE),
    "versions are floats": (downloads("version", lambda v: v.double()), DTYPE),
    "lengths are floats": (downloads("length", lambda v: v.double()), DTYPE),
    "changes are of 64 bits": (downloads("changed", lambda v: v.long()), "holds another model"),
    "changes are too few": (downloads("changed", lambda v: v[1:]), "holds another model"),
    "clients in two dimensions": (downloads("client", lambda v: v[None]), DTYPE),
    "one client is a number": (downloads("client", lambda v: v[0]), DTYPE),
    "a version is missing": (downloads("version", lambda v: v[1:]), LENGTH),
    "all lengths are missing": (downloads("length", lambda v: v[:0]), LENGTH),
    "a length too many": (downloads("length", lambda v: v.repeat(100)), LENGTH),
    "lengths in two dimensions": (downloads("length", lambda v: v[None]), LENGTH),
    "a client too many": (downloads("client", lambda v: v + 1), CLIENTS),
    "a negative client": (downloads("client", lambda v: v - 1), CLIENTS),
    "a client twice": (downloads("client", lambda v: 0 * v), CLIENTS),
    "a version of the future": (downloads("version", lambda v: 0 * v + 7), RANGE),
    "a negative version": (downloads("version", lambda v: -1 - v), RANGE),
    "a change in the future": (downloads("changed", lambda v: 0 * v + 8), RANGE),
    "a negative change": (downloads("changed", lambda v: -1 - v), RANGE),
    "a negative length": (downloads("length", lambda v: -1 - v), RANGE),
    "a huge length": (downloads("length", lambda v: v + 2**53), RANGE),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_tables_of_downloads_are_refused(whole: Path, name: str) -> None:
    change, words = FORGED[name]
    forge(whole, change)
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    refuses(blobs(), whole, f"^cannot resume: .*{words}")
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


@pytest.mark.parametrize("name", ["version", "changed"])
def test_the_latest_version_that_is_possible_is_taken(whole: Path, name: str) -> None:
    """After 7 rounds a client can hold version 6, and a coordinate can have changed in version 7."""
    largest = {"version": 6, "changed": 7}[name]
    forge(whole, downloads(name, lambda v: 0 * v + largest))
    run(BASE, blobs(), out=whole, resume=True)


TIMES = {
    "t is large": (10**9, "does not hold rounds 0 to 999999999"),
    "t is too small": (3, "metrics.jsonl was changed after the checkpoint"),
}


@pytest.mark.parametrize("name", TIMES)
def test_another_time_shows_in_the_rows_without_a_copy(without_copy: Path, name: str) -> None:
    t, words = TIMES[name]
    forge(without_copy, says(t=t))
    refuses(blobs(), without_copy, f"^cannot resume: .*{words}", NONE)


def test_a_run_cannot_change_how_it_broadcasts(whole: Path, without_copy: Path) -> None:
    refuses(blobs(), without_copy, "`compressor_down` is 'topk.*', but the run in .* has 'none'", BASE)
    refuses(blobs(), whole, "`compressor_down` is 'none', but the run in .* has 'topk", NONE)


def test_an_edited_file_cannot_change_how_a_run_broadcasts(whole: Path, without_copy: Path) -> None:
    """The checkpoint shows it, also one of before checkpoints held options."""
    holds_none = "checkpoint.safetensors is from a run without a compressed broadcast; `compressor_down`"
    holds_one = "checkpoint.safetensors is from a run with a compressed broadcast; `compressor_down` must"
    for out, config, words in ((whole, NONE, holds_one), (without_copy, BASE, holds_none)):
        own = config.for_task(blobs().name, "Sequential", blobs().prints, 6)
        (out / "config.toml").write_text(own.to_toml())
        refuses(blobs(), out, f"^cannot resume: .*{words}", config)
        forge(out, older)
        refuses(blobs(), out, f"^cannot resume: .*{words}", config)


def test_an_edited_compressor_of_the_broadcast_is_refused(whole: Path) -> None:
    other = BASE.replace(compressor_down="topk(0.5)")
    own = other.for_task(blobs().name, "Sequential", blobs().prints, 6)
    (whole / "config.toml").write_text(own.to_toml())
    refuses(blobs(), whole, "config.toml was changed .*: compressor_down is 'topk.0.5.', and was", other)


def test_a_run_of_version_0_5_goes_on_with_the_whole_model(finished: Path, tmp_path: Path) -> None:
    """Its files do not know `compressor_down`."""
    out = tmp_path / "old"
    run(NONE.replace(rounds=4), blobs(), out=out)
    forge(out, lambda tensors, about: about["options"].pop("compressor_down"))
    file = out / "config.toml"
    kept = [line for line in file.read_text().splitlines(keepends=True) if "compressor_down" not in line]
    file.write_text("".join(kept))
    old = read_config(file)
    assert old.compressor_down == "none"
    refuses(blobs(), out, "`compressor_down` is .* but the run in .* has 'none'", BASE)
    run(old.replace(rounds=7), blobs(), out=out, resume=True)
    assert_same_files(out, finished, "model", "iterate")
    assert not (out / "server_model.safetensors").exists()


def test_more_rounds_later_equal_as_many_at_once_without_a_copy(finished: Path, tmp_path: Path) -> None:
    run(NONE.replace(rounds=4), blobs(), out=tmp_path / "a")
    run(NONE, blobs(), out=tmp_path / "a", resume=True)
    assert_same_files(tmp_path / "a", finished, "checkpoint", "model", "iterate")


def assert_same_files(a: Path, b: Path, *names: str) -> None:
    for name in names:
        assert (a / f"{name}.safetensors").read_bytes() == (b / f"{name}.safetensors").read_bytes(), name


def test_the_checkpoint_holds_the_copy_and_its_tables(whole: Path, without_copy: Path) -> None:
    tensors, _ = read_tensors(whole / "checkpoint.safetensors")
    tables = {"downloads.changed", "downloads.length", "downloads.client", "downloads.version"}
    assert {"w", *tables} <= tensors.keys()
    assert tensors["downloads.changed"].dtype == torch.int32
    assert not {"w", *tables} & read_tensors(without_copy / "checkpoint.safetensors")[0].keys()


@pytest.mark.parametrize("text", ["topk(", "what(1)", "bf16 >> topk(0.9)", "topk(0.9, least=0)", ""])
def test_a_compressor_of_the_broadcast_that_does_not_parse(
    cfedavg: Command, tmp_path: Path, text: str
) -> None:
    outcome = cfedavg("run", "--compressor-down", text, "--out", tmp_path / "out")
    assert outcome.code == 2
    assert outcome.err.startswith("error: --compressor-down")
    assert not (tmp_path / "out").exists()
