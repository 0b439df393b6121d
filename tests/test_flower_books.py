"""The disks of a federation: the server's folder, and what a client keeps."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from cfedavg import InputError, tensors
from cfedavg.config import read_config
from cfedavg.federation.store import FILE, ServerStore
from cfedavg.flower.form import Form
from cfedavg.report import write_report, write_run_pictures
from tests.grid import (
    MODEL,
    Adding,
    Disks,
    Federation,
    LocalNode,
    Summing,
    timeless,
)

pytestmark = pytest.mark.usefixtures("without_waiting")


# The client's disk


def test_no_place_to_write(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    (tmp_path / "file").write_text("")
    it.nodes[1].disk = tmp_path / "file" / "below"
    it.start(1)
    assert it.outcomes == [{"replied": 2, "state": 1}]
    assert re.fullmatch(r"the client's state: cannot write to the folder .* \(.*\)", it.of_nodes[1]["why"])


def test_a_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent, and nothing has changed: the next request finds the client as it was."""
    it = Federation(tmp_path, (app := Adding()).app)
    disks, real, full = Disks(it), tensors.save_file, [False]

    def save(found: Any, path: Path, metadata: Any = None) -> None:
        if full[0] and it.nodes[1].disk in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(found, path, metadata)

    monkeypatch.setattr("cfedavg.tensors.save_file", save)
    it.start(2, Summing())
    before, full[0] = disks.client(it.nodes[1]), True
    it.start(3, Summing(), resume=True)
    assert it.outcomes[2] == {"replied": 2, "state": 1}
    assert re.fullmatch(r"cannot write .* \(No space left on device\)", it.of_nodes[-2]["why"])
    after, full[0] = disks.client(it.nodes[1]), False
    assert before is not None and after is not None and torch.equal(before.e, after.e)  # noqa: PT018
    it.start(4, Summing(), resume=True)
    made = disks.update(*(call for call in app.calls if call != (1, 3)))
    assert torch.equal(made, disks.x() + disks.masses())


def test_a_damaged_state(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(1)
    path = Disks(it).store(it.nodes[1]).folder / FILE
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    it.start(2, resume=True)
    assert it.outcomes[1] == {"replied": 2, "state": 1}
    assert re.search("is damaged .*; move it away to go on as a new client", it.of_nodes[-2]["why"])
    path.unlink()
    it.start(3, resume=True)
    assert it.of_nodes[-2]["incarnation"] == 2


def test_two_processes_for_one_client(tmp_path: Path) -> None:
    it = Federation(tmp_path, (app := Adding()).app)
    disks = Disks(it)

    def busy(node: LocalNode, message: Message) -> Message:
        with disks.store(node).locked() if node.partition == 1 else nullcontext():
            return node.answer(message)

    it.grid.on_request = busy
    it.start(1)
    assert it.outcomes == [{"busy": 1, "replied": 2}]
    assert "another process answers for this client" in it.of_nodes[1]["why"]
    assert (1, 1) not in app.calls


# The books


def test_a_folder_that_is_taken(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(2, resume=True)  # there is nothing yet
    with pytest.raises(InputError, match=r"out: .* holds a federation already; resume it, or give another"):
        it.start(2)
    with pytest.raises(InputError, match=r"num_rounds is 1, but the federation in .* has done 2"):
        it.start(1, resume=True)
    for other in (
        {"w": MODEL["w"], "b": MODEL["b"][:4]},
        {"b": MODEL["b"], "w": MODEL["w"]},
        {**MODEL, "n": np.array(0)},
    ):
        with pytest.raises(InputError, match="is of another model"):
            Federation(tmp_path, Adding().app, 3, other).start(3, resume=True)
    with pytest.raises(InputError, match=r"'b' is missing; if the model is the same, `whole` is another"):
        it.start(3, resume=True, whole=["b"])
    before = (it.out / "metrics.jsonl").read_bytes()
    it.start(2, resume=True)
    assert (it.out / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("left", ["simulation", "state gone"])
def test_a_folder_of_others(resume: bool, left: str, tmp_path: Path) -> None:
    """Nothing in it is touched."""
    it = Federation(tmp_path, Adding().app)
    it.start(2)
    shutil.rmtree(it.out / "state")
    if left == "simulation":
        (it.out / "federation.txt").unlink()
        (it.out / "nodes.jsonl").unlink()
    before = {path: path.read_bytes() for path in it.out.iterdir()}
    with pytest.raises(InputError, match=r"metrics.jsonl"):
        it.start(2, resume=resume)
    assert {path: path.read_bytes() for path in it.out.iterdir()} == before


def test_rows_are_missing(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(4)
    lines = (it.out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (it.out / "metrics.jsonl").write_text("".join(lines[:1] + lines[2:]))
    with pytest.raises(InputError, match="does not hold rounds 0 to 3, which the state needs"):
        it.start(5, resume=True)


def test_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that were never synced may be gone; all that the state does not hold itself must have been."""
    it = Federation(tmp_path, Adding().app, 2)
    synced: dict[str, int] = {}
    monkeypatch.setattr(
        "cfedavg.flower.books.sync", lambda path: synced.update({path.name: path.stat().st_size})
    )
    it.start(4)
    wanted = timeless(it.rows), timeless(it.of_nodes)
    for name in ("metrics.jsonl", "nodes.jsonl"):
        os.truncate(it.out / name, synced.get(name, 0))
    it.start(4, resume=True)
    assert (timeless(it.rows), timeless(it.of_nodes)) == wanted


def test_a_full_disk_at_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Federation(tmp_path, (app := Adding()).app, 2)
    real = Path.open

    def opened(path: Path, mode: str = "r", **more: Any) -> Any:
        if mode == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(InputError, match=r"out: cannot write .*metrics.jsonl \(No space left"):
            it.start(2)
    it.start(2, resume=True)
    assert [row["round"] for row in it.rows] == [0, 1]
    assert len(app.calls) == 4


def test_two_servers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Federation(tmp_path, Adding().app, 2)

    def second(t: int, _: Any) -> None:
        with pytest.raises(InputError, match="another server works in"):
            it.start(1, resume=True)

    it.start(1, evaluate_fn=second)
    assert len(it.rows) == 1

    store = ServerStore(it.out / "state", "any", Form.of(MODEL).layout)  # one that is about to end
    monkeypatch.setattr("cfedavg.flower.books.HANDOVER", 100.0)
    with ExitStack() as stack:
        stack.enter_context(store.locked())
        monkeypatch.setattr("cfedavg.flower.books.time.sleep", lambda seconds: stack.close())
        it.start(2, resume=True)
    assert len(it.rows) == 2


def test_what_will_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Federation(tmp_path, Adding().app)
    it.out.mkdir()
    (it.out / "state").write_text("")

    def sleep(seconds: float) -> None:
        raise AssertionError

    monkeypatch.setattr("cfedavg.flower.books.HANDOVER", 100.0)
    monkeypatch.setattr("cfedavg.flower.books.time.sleep", sleep)
    with pytest.raises(InputError, match=r"the server's state: .* is a file, not a folder"):
        it.start(1)


def test_how_many_clients_there_are(tmp_path: Path) -> None:
    """config.toml says what is known of an app, from the first round on."""
    it, seen = Federation(tmp_path, Adding().app, 4), list[int]()
    it.nodes[3].online = False

    def look(t: int, _: Any) -> None:
        it.nodes[3].online = t > 0
        seen.append(read_config(it.out / "config.toml").clients)

    it.start(2, evaluate_fn=look)
    assert seen == [1, 3, 4]
    assert "batch_size" not in (it.out / "config.toml").read_text()
    assert "weighting = " in (it.out / "config.toml").read_text()
    other = Federation(tmp_path / "other", Adding().app)
    other.start(1, FedAvg(fraction_evaluate=0.0))
    text = (other.out / "config.toml").read_text()
    assert 'model = "(a Flower app, averaged by FedAvg)"' in text
    assert "weighting" not in text
    assert "# quorum: 0.5\n# timeout: 1e-09\n" in text
    assert read_config(other.out / "config.toml").clients == 3


def test_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    """Of the server and of a node; a file of the user's stays."""
    it = Federation(tmp_path, Adding().app)
    it.start(1)
    node = Disks(it).store(it.nodes[0]).folder
    left = [
        it.out / ".config.toml.77.tmp",
        it.out / "state" / ".77.probe",
        node / ".state.safetensors.77.tmp",
    ]
    for path in (*left, it.out / ".notes.tmp"):
        path.touch()
    it.start(2, resume=True)
    assert not any(path.exists() for path in left)
    assert (it.out / ".notes.tmp").exists()


def test_the_folder_is_a_run(tmp_path: Path) -> None:
    """What reads and draws runs reads and draws this."""
    it = Federation(tmp_path, Adding(metrics={"local-steps": 4, "train_loss": 0.5, "num-examples": 10}).app)
    it.grid.on_reply = lambda node, request, reply: reply if request.metadata.group_id != "2" else None
    losses = [3.0, 2.0, math.nan, 1.5, 1.0]
    it.start(4, evaluate_fn=lambda t, arrays: MetricRecord({"accuracy": 0.1 * t, "loss": losses[t]}))
    config = read_config(it.out / "config.toml")
    assert (config.rounds, config.compressor) == (4, "topk(0.7)")
    assert [row.get("test_accuracy") for row in it.rows] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert ["test_loss" in row for row in it.rows] == [True, False, True, True]
    write_run_pictures(it.out)
    report = write_report([it.out], tmp_path / "report")
    assert (it.out / "report.html").stat().st_size > 10_000
    assert report.rows[0].final is not None
    assert report.rows[0].final.mean == pytest.approx(0.4)
