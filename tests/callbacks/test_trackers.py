"""Trackers write what their own libraries read back, and go on after a resume."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cfedavg import Callback, Config, InputError, TensorBoard, Wandb, run
from cfedavg.callbacks import make_trackers
from tests.conftest import Command, blobs

SMALL = Config(rounds=3, local_steps=2, checkpoint_every=0, engine="sequential")


class Break(Callback):
    """Breaks a run off after its second round, without a checkpoint."""

    def on_row(self, row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise RuntimeError("broken")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_curves_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(RuntimeError):  # two rounds are logged, and done again
        run(SMALL, blobs(), out=tmp_path, callbacks=[TensorBoard(), Break()], draw=False)
    run(SMALL, blobs(), out=tmp_path, resume=True, callbacks=[TensorBoard()], draw=False)
    config = SMALL.replace(rounds=5)
    rows = run(config, blobs(), out=tmp_path, resume=True, callbacks=[TensorBoard()], draw=False).rows
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [each.step for each in events.Scalars("test_accuracy")] == [1, 2, 3, 4, 5]
    total = [each.value for each in events.Scalars("cumulative_total_bytes")]
    assert total == [sum(row["total_bytes"] for row in rows[: t + 1]) for t in range(5)]
    assert {"uplink_bytes", "train_loss", "server_test_accuracy"} <= set(events.Tags()["scalars"])
    text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "rounds = 5" in text


def test_tensorboard_needs_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(InputError, match=r"^`callbacks`: TensorBoard needs a `folder`, or a run with `out`"):
        run(SMALL, blobs(), callbacks=[TensorBoard()])
    run(SMALL, blobs(), callbacks=[TensorBoard(tmp_path / "logs")])
    assert list((tmp_path / "logs").glob("events.*"))


def wandb_records(file: Path) -> Iterator[Any]:
    """Return the records of a file that W&B wrote offline: protobufs in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record, whole = wandb_internal_pb2.Record.FromString(whole), b""
            yield record


WANDB = """
import sys
from cfedavg import Config, Wandb, run
from tests.conftest import blobs
config = Config(rounds=int(sys.argv[1]), local_steps=2, checkpoint_every=0)
run(config, blobs(), out="r", resume=True, callbacks=[Wandb(project="mine")], draw=False)
"""


@pytest.mark.slow  # W&B starts a process of its own, twice
def test_wandb_keeps_an_offline_run_and_resumes_it(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    env = os.environ | {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    for rounds in (2, 3):
        subprocess.run([sys.executable, "-c", WANDB, str(rounds)], cwd=tmp_path, env=env, check=True)
    files = sorted((tmp_path / "r" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    ids, steps, total, settings = set(), [], [], {}
    for file in files:
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.project, record.run.run_id))
                settings = {each.key: json.loads(each.value_json) for each in record.run.config.update}
            elif record.WhichOneof("record_type") == "history":
                found = {".".join(each.nested_key): each.value_json for each in record.history.item}
                steps.append(record.history.step.num)
                total.append(int(found["cumulative_total_bytes"]))
    assert ids == {("mine", (tmp_path / "r" / "wandb-id.txt").read_text())}
    assert steps == [1, 2, 3]
    assert (settings["rounds"], settings["local_steps"]) == (3, "2")
    rows = map(json.loads, (tmp_path / "r" / "metrics.jsonl").read_text().splitlines())
    bytes_of = [row["total_bytes"] for row in rows]
    assert total == [sum(bytes_of[: t + 1]) for t in range(3)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_library_is_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, cfedavg: Command, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    words = f'{name} is not installed here: pip install "cfedavg[{name}]"'
    with pytest.raises(InputError) as raised:
        {"tensorboard": TensorBoard, "wandb": Wandb}[name]()
    assert str(raised.value) == words
    for command in ("run",), ("sweep", "--vary", "seed=0|1"), ("federate", "up"):
        outcome = cfedavg(*command, "--track", name, "--out", tmp_path / "r")
        assert (outcome.code, outcome.err) == (2, f"error: {words}")
    assert not (tmp_path / "r").exists()


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(InputError, match=r"^`track` must be tensorboard or wandb, got 'mlflow'$"):
        make_trackers(["tensorboard", "mlflow"])


ONE_ROUND = ["--model", "linear", "--clients", "2", "--rounds", "1", "--track", "tensorboard"]


def test_the_command_tracks_a_run(cfedavg: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr("cfedavg.simulate.run.write_run_pictures", lambda folder: None)
    assert cfedavg("run", *ONE_ROUND, "--out", tmp_path / "a").code == 0
    assert list((tmp_path / "a" / "tensorboard").glob("events.*"))


@pytest.mark.slow  # a sweep draws figures and a report
def test_the_command_tracks_every_cell(cfedavg: Command, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert cfedavg("sweep", *ONE_ROUND, "--vary", "seed=0|1", "--out", tmp_path / "b").code == 0
    assert len(list((tmp_path / "b").glob("run-seed*/tensorboard/events.*"))) == 2
