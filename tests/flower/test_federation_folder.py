"""The disks of a federation: the server's folder, and what a client keeps."""

from __future__ import annotations

import errno
import inspect
import json
import math
import os
import random
import re
import shutil
import sys
import zlib
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MetricRecord
from flwr.serverapp.strategy import FedAvg

from cfedavg import InputError
from cfedavg.core import run_files, tensors
from cfedavg.core.config import read_config
from cfedavg.federate.state_file import FILE, as_array
from cfedavg.federate.stores import ServerStore
from cfedavg.flower.array_layout import Form
from cfedavg.flower.replies import FAILED
from cfedavg.report import write_report, write_run_pictures
from tests.federate.test_store import GONE, forge
from tests.grid import (
    MODEL,
    Adding,
    Disks,
    Federation,
    LocalNode,
    Summing,
    timeless,
)
from tests.simulate.test_bad_files import NO_FILE, mutated, put, text
from tests.test_docs import explained_in

pytestmark = pytest.mark.usefixtures("without_waiting")

NO_NAME = {
    "nothing": text(b""),
    "half a letter": text(b"\xff\xfe"),
    "a path": text(b"../x"),
    "zeros": text(b"\0" * 32),
}


def test_every_column_is_explained(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(1, compressor_down="bf16")
    assert {*it.rows[0]} - explained_in("reference/metrics.md") == set()
    assert {*it.of_nodes[0]} - explained_in("flower.md") == set()


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

    monkeypatch.setattr("cfedavg.core.tensors.save_file", save)
    it.start(2, Summing())
    before, full[0] = disks.client(it.nodes[1]), True
    it.start(3, Summing(), resume=True)
    assert it.outcomes[2] == {"replied": 2, "state": 1}
    assert re.fullmatch(r"cannot write .* \(No space left on device\)", it.of_nodes[-2]["why"])
    after, full[0] = disks.client(it.nodes[1]), False
    assert before is not None and after is not None and np.array_equal(before.memory, after.memory)  # noqa: PT018
    it.start(4, Summing(), resume=True)
    made = disks.update(*(call for call in app.calls if call != (1, 3)))
    assert np.array_equal(made, disks.x() + disks.masses())


def test_a_damaged_state(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(1)
    path = Disks(it).store(it.nodes[1]).folder / FILE
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    it.start(2, resume=True)
    assert it.outcomes[1] == {"replied": 2, "state": 1}
    assert re.search("is damaged .*; move the file away to go on as a new client", it.of_nodes[-2]["why"])
    path.unlink()
    it.start(3, resume=True)
    assert it.of_nodes[-2]["incarnation"] == 2


def test_two_processes_for_one_client(tmp_path: Path) -> None:
    it = Federation(tmp_path, (app := Adding()).app)
    disks = Disks(it)

    def busy(node: LocalNode, message: Message) -> Message:
        with disks.store(node).lock() if node.partition == 1 else nullcontext():
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
    with pytest.raises(InputError, match=r"`out`: .* holds a federation\. Set `resume`, or give another"):
        it.start(2)
    with pytest.raises(InputError, match=r"`num_rounds` is 1, but the federation in .* has done 2"):
        it.start(1, resume=True)
    for other in (
        {"w": MODEL["w"], "b": MODEL["b"][:4]},
        {"b": MODEL["b"], "w": MODEL["w"]},
        {**MODEL, "n": np.array(0)},
    ):
        with pytest.raises(InputError, match="is of another model"):
            Federation(tmp_path, Adding().app, 3, other).start(3, resume=True)
    with pytest.raises(InputError, match=r"'b' is missing; if the model is the same, `uncompressed` differs"):
        it.start(3, resume=True, uncompressed=["b"])
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
        "cfedavg.flower.federation_folder.sync", lambda path: synced.update({path.name: path.stat().st_size})
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
        with pytest.raises(InputError, match=r"`out`: cannot write .*metrics.jsonl \(No space left"):
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
    monkeypatch.setattr("cfedavg.flower.federation_folder.HANDOVER", 100.0)
    with ExitStack() as stack:
        stack.enter_context(store.lock())
        monkeypatch.setattr("cfedavg.flower.federation_folder.time.sleep", lambda seconds: stack.close())
        it.start(2, resume=True)
    assert len(it.rows) == 2


def test_what_will_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Federation(tmp_path, Adding().app)
    it.out.mkdir()
    (it.out / "state").write_text("")

    def sleep(seconds: float) -> None:
        raise AssertionError

    monkeypatch.setattr("cfedavg.flower.federation_folder.HANDOVER", 100.0)
    monkeypatch.setattr("cfedavg.flower.federation_folder.time.sleep", sleep)
    with pytest.raises(InputError, match=r"the server's state: .* is a file, not a folder"):
        it.start(1)


# Files that somebody else made, or that a disk has damaged


def contents(out: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.stat().st_size < 10**6
    }


def refuses(it: Federation, words: str, rounds: int = 3, **options: Any) -> None:
    """One sentence, and all files are as they were."""
    before = contents(it.out)
    with pytest.raises(InputError, match=words) as caught:
        it.start(rounds, resume=True, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert contents(it.out) == before


@pytest.mark.parametrize("name", [*NO_FILE, *NO_NAME])
def test_no_name(tmp_path: Path, name: str) -> None:
    """Damage the name of a federation with a state, and of one without."""
    it, make = Federation(tmp_path, Adding().app), (NO_FILE | NO_NAME)[name]
    it.out.mkdir()
    put(it.out / "federation.txt", make)
    refuses(it, r"`out`: .*federation\.txt")
    (it.out / "federation.txt").rmdir() if name == "a folder" else (it.out / "federation.txt").unlink()
    it.start(2)
    put(it.out / "federation.txt", make)
    refuses(it, r"`out`: .*federation\.txt")


def test_a_state_without_its_name(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(2)
    (it.out / "federation.txt").unlink()
    refuses(it, r"federation\.txt is missing, but the federation needs it\. Put the file back")


@pytest.mark.parametrize("name", ["a pipe", "a folder", "a device"])
@pytest.mark.parametrize("file", ["metrics.jsonl", "nodes.jsonl", "state/state.safetensors"])
def test_no_file(tmp_path: Path, file: str, name: str) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(2)
    put(it.out / file, NO_FILE[name])
    refuses(it, file)


@pytest.mark.parametrize("file", ["metrics.jsonl", "nodes.jsonl"])
def test_changed_rows(tmp_path: Path, file: str) -> None:
    """A digit of any row before the last round, a row less, more or elsewhere; but not the clock."""
    it = Federation(tmp_path, Adding().app)
    it.start(3)
    it.start(4, resume=True)
    lines = (it.out / file).read_text().splitlines(keepends=True)
    first = json.loads(lines[0])
    for changed in (
        [json.dumps(first | {"up_bytes": 1, "uplink_bytes": 1}) + "\n", *lines[1:]],
        [json.dumps(first | {"round": "0"}) + "\n", *lines[1:]],
        [json.dumps(first | {"round": True}) + "\n", *lines[1:]],
        ["nonsense\n", *lines],
        [lines[0], *lines],
        [lines[1], lines[0], *lines[2:]],
        lines[1:],
        [],
    ):
        (it.out / file).write_text("".join(changed))
        refuses(it, rf"{file} (was changed after the state was written|does not hold rounds)", 5)
    (it.out / file).write_text("".join([json.dumps(first | {"seconds": 77}) + "\n", *lines[1:]]))
    it.start(5, resume=True)
    assert json.loads((it.out / file).read_text().splitlines()[0])["seconds"] == 77


@pytest.mark.parametrize("file", ["metrics.jsonl", "nodes.jsonl"])
def test_rows_nested_as_deep_as_python_can_read(tmp_path: Path, file: str) -> None:
    """Some depths can be read and not written; which ones depends on how deep the caller is."""
    it = Federation(tmp_path, Adding().app)
    it.start(3)
    lines = (it.out / file).read_text().splitlines(keepends=True)
    left = sys.getrecursionlimit() - len(inspect.stack(0))
    for depth in range(left - 30, left):
        nested = '{"round": 0, "a": ' + "[" * depth + "]" * depth + "}\n"
        (it.out / file).write_text("".join([nested, *lines[1:]]))
        refuses(it, rf"{file} (was changed after the state was written|does not hold rounds)", 5)


def test_the_cost_of_a_round_does_not_grow_with_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is summed up in a round are its own rows."""
    it, sums, real = Federation(tmp_path, Adding().app), list[int](), run_files.checksum_rows
    monkeypatch.setattr(
        "cfedavg.flower.federation_folder.checksum_rows",
        lambda rows, before=0: sums.append(len(rows)) or real(rows, before),
    )
    it.start(5)
    assert sums == [0, 0] * 2 + [1, 3] * 5


def forge_facts(out: Path, **changes: Any) -> None:
    """Other facts, with a right checksum."""
    found, _ = tensors.read_tensors(out / "state" / FILE)
    facts = json.loads(found["facts"].numpy().tobytes()) | changes
    facts = {name: value for name, value in facts.items() if value is not GONE}
    forge(out / "state" / FILE, {"facts": as_array(json.dumps(facts).encode())})


ROW = {"round": 1}
NO_FACTS: dict[str, list[Any]] = {
    "form": [GONE, None, 3],
    "options": [GONE, None, [], {}],
    "numbers": [GONE, None, [], {"a": "1"}, {"a": -1}, {"a": 2.5}, {"a": 10**12}, {"a": True}, {"a": 0}],
    "norms": [GONE, None, {}, ["1"], [math.nan], [math.inf], [-1], [None], [[]], [10**400], [True]],
    "steps": [GONE, None, {}, ["1"], [math.inf], [-1]],
    "samples": [GONE, None, {}, ["1"], [math.nan], [-1]],
    "rows": [GONE, None, [], {}, {"metrics.jsonl": 1.5}, {"metrics.jsonl": 0, "nodes.jsonl": 0}],
    "inner": [None, [], 3],
    "last": [
        GONE, None, [], {}, {"row": ROW}, {"nodes": [ROW]}, {"row": 3, "nodes": []}, {"row": {}, "nodes": []},
        {"row": {"round": 2}, "nodes": []}, {"row": ROW, "nodes": {}}, {"row": ROW, "nodes": [3]},
        {"row": ROW, "nodes": [{"round": 0}]}, {"row": {"round": True}, "nodes": []},
        {"row": ROW, "nodes": []}, {"row": {**ROW, "loss": math.nan}, "nodes": []},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", NO_FACTS)
def test_forged_facts(tmp_path: Path, name: str) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(2)
    good = (it.out / "state" / FILE).read_bytes()
    for value in NO_FACTS[name]:
        (it.out / "state" / FILE).write_bytes(good)
        forge_facts(it.out, **{name: value})
        refuses(it, "state")


@pytest.mark.parametrize("t", [10**9, 2**32 - 1, 3, 1, 0])
def test_a_forged_round(tmp_path: Path, t: int) -> None:
    """A forged round is refused, and a large one costs no memory."""
    it = Federation(tmp_path, Adding().app)
    it.start(2)
    forge(it.out / "state" / FILE, t=t)
    forge_facts(it.out, last={"row": {"round": t - 1}, "nodes": []})
    refuses(it, "state|metrics.jsonl", t + 1)


NO_NOTES: list[Any] = [
    None, [], 3, [0, 0], ["0", 0, None], [-1, 0, None], [10**12, 0, None], [0, 2, None], [0, -1, None],
    [0, 0, "1"], [0, 0, -1.0], [0, 0, math.inf], [0, 0, math.nan], [0, 0, [1]], [1, 1, 0.0],
]  # fmt: skip


@pytest.mark.parametrize("note", NO_NOTES, ids=str)
def test_forged_notes(tmp_path: Path, note: Any) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(2)
    forge_notes(it.out, note)
    refuses(it, "state.safetensors is damaged")


def forge_notes(out: Path, note: Any) -> None:
    """Another note of the first client."""
    _, about = tensors.read_tensors(out / "state" / FILE)
    number, length, _ = about["clients"]
    path = out / "state" / f"clients.{number}.jsonl"
    lines = [json.loads(line) for line in path.read_bytes()[:length].splitlines()]
    last = max(n for n, line in enumerate(lines) if line[0] == lines[0][0])
    lines[last][2][1] = note
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(data)
    forge(out / "state" / FILE, clients=[number, len(data), zlib.crc32(data)])


def test_a_large_number_of_a_node_costs_nothing(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(2)
    forge_notes(it.out, [2**32 - 1, 1, None])
    it.start(3, resume=True)
    assert {row["number"] for row in it.of_nodes[-3:]} == {2**32 - 1, 1, 2}


WHOLE_MODEL = {**MODEL, "bn.running_mean": np.ones(2, np.float32)}


@pytest.mark.parametrize(
    "whole",
    [np.zeros(7, np.uint8), np.zeros(2, np.float32), np.full(8, 255, np.uint8)],
    ids=["length", "dtype", "NaN"],
)
def test_forged_statistics(tmp_path: Path, whole: Any) -> None:
    it = Federation(tmp_path, Adding().app, 3, WHOLE_MODEL)
    it.start(1)
    forge(it.out / "state" / FILE, {"extra.whole": whole})
    refuses(it, "is damaged .*; restore a backup of the whole folder")


NO_MEMORY: list[dict[str, Any]] = [
    {"m": {"array": 7}}, {"m": {"set": []}}, {"m": {}}, {"m": {"dict": 3}}, {"m": {"dict": [[1]]}},
    {"m": {"dict": [[[], 1]]}}, {"m": {"tuple": None}}, {"aggregate_train": 3}, {"__class__": 3},
    {"__dict__": {"dict": []}}, {"summary.x": 3}, {"m": {"array": [0]}},
]  # fmt: skip


@pytest.mark.parametrize("memory", NO_MEMORY, ids=str)
def test_forged_memory(tmp_path: Path, memory: dict[str, Any]) -> None:
    """What a wrapped strategy is said to have remembered."""
    it = Federation(tmp_path, Adding().app)
    it.start(2, Summing())
    forge_facts(it.out, inner=memory)
    refuses(it, "`inner`(:| must be the federation.s strategy)", inner=Summing())


def test_a_forged_answer(tmp_path: Path) -> None:
    """A node's last answer is decoded when it is void: its message says what is wrong."""
    it = Federation(tmp_path, Adding().app)
    it.grid.on_reply = lambda node, request, reply: None if node.partition == 1 else reply
    it.start(1)
    it.grid.on_reply = lambda node, request, reply: reply
    path = Disks(it).store(it.nodes[1]).folder / FILE
    good = path.read_bytes()
    for n, message in enumerate((b"", b"abc", b"\xff" * 200, b"\0" * 200)):
        path.write_bytes(good)
        forge(path, {"sent": as_array(message)})
        it.start(n + 2, resume=True)
        assert it.outcomes[-1] == {"replied": 2, "state": 1}
        assert "move the file away to go on as a new client" in it.of_nodes[-2]["why"]


def test_any_damage_is_taken_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of the server and of a node, changed at random; what is forged has a right checksum."""
    monkeypatch.setattr("cfedavg.core.files.sync", lambda path: None)
    monkeypatch.setattr("cfedavg.flower.federation_folder.sync", lambda path: None)
    monkeypatch.setattr("cfedavg.report.write_run_pictures", lambda path: None)
    whole, draw = Federation(tmp_path / "whole", Adding().app, 2, WHOLE_MODEL), random.Random(0)
    whole.start(2, Summing())
    files = [
        path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*") if path.is_file()
    ]
    files = sorted(
        path for path in files if path.suffix not in (".html", ".png") and path.name != "model.safetensors"
    )
    for _ in range(25):
        for file in files:
            shutil.copytree(tmp_path / "whole", tmp_path / "copy")
            path = tmp_path / "copy" / file
            if file.name == FILE and draw.random() < 0.5:
                damage_with_checksum(path, draw)
            else:
                path.write_bytes(data := mutated(path.read_bytes(), draw))
            if file.name.startswith("clients.") and draw.random() < 0.8:
                forge(path.with_name(FILE), clients=[1, len(data), zlib.crc32(data)])
            with suppress(InputError):
                it = Federation(tmp_path / "copy", Adding().app, 2, WHOLE_MODEL)
                it.start(3, Summing(), resume=True)
                assert FAILED not in it.outcomes[-1], it.of_nodes[-2:]
            shutil.rmtree(tmp_path / "copy")


def damage_with_checksum(path: Path, draw: random.Random) -> None:
    """A value of the header or of the facts is another, and the checksum right."""
    found, about = tensors.read_tensors(path)
    if "facts" in found and draw.random() < 0.5:
        data = mutated(found["facts"].numpy().tobytes(), draw)
        return forge(path, {"facts": as_array(data)})
    name = draw.choice([name for name in about if name != "checksum"])
    return forge(path, **{name: draw.choice([None, 0, 1, 2.5, "a", [], {}, [1, 1], [2, 1], 2**40, [[1, 1]]])})


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
