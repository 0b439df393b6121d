"""Flower's simulation as the server and the mod see it: at every start, nodes have new ids and new keys.

`tests/launch/test_simulation.py` runs Flower's own simulation engine.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from cfedavg import InputError
from cfedavg.federate.stores import ClientStore
from cfedavg.flower import compressed
from cfedavg.flower.array_layout import Form
from cfedavg.flower.federation_state import Numbers
from cfedavg.flower.nodes import OnlineNodes
from cfedavg.flower.replies import OURS
from tests.grid import (
    MODEL,
    Adding,
    Arrays,
    Disks,
    Federation,
    LocalGrid,
    LocalNode,
    Summing,
    same,
    timeless,
)

pytestmark = pytest.mark.usefixtures("without_waiting")


class SimulatedNode(LocalNode):
    """A node as Flower simulates it: without a name, a key of its own or a disk."""

    @property
    def context(self) -> Context:
        return Context(1, self.id, {"partition-id": self.partition, "num-partitions": 3}, RecordDict(), {})

    @property
    def info(self) -> Any:
        return SimpleNamespace(node_id=self.id, public_key=secrets.token_bytes(32), name="")


class InMemoryGrid(LocalGrid):
    """A grid with the name of the grid in Flower's simulation."""


class Simulation(Federation):
    """A federation whose nodes get new ids and a new order at every start."""

    def __init__(self, folder: Path, app: ClientApp, nodes: int = 3, model: Arrays = MODEL) -> None:
        super().__init__(folder, app, nodes, model)
        self.starts = 0

    def start(self, rounds: int, *args: Any, **options: Any) -> Any:
        self.starts += 1
        parts = [(node.partition, node.app) for node in self.nodes]
        self.nodes = [SimulatedNode(secrets.randbits(62), app, self.out, {}, i) for i, app in parts]
        shuffled = sorted(self.nodes, key=lambda node: node.id)
        hooks = self.grid.on_request, self.grid.on_reply
        self.grid = InMemoryGrid(shuffled)
        self.grid.on_request, self.grid.on_reply = hooks
        return super().start(rounds, *args, **options)

    def residuals(self) -> np.ndarray[Any, Any]:
        """Return the residual of every client, by its number."""
        layout, name = Form.of(self.model).layout, (self.out / "federation.txt").read_text()
        known = OnlineNodes(self.grid, Numbers())
        known.identify(MessageType.TRAIN, 1.0)
        stores = [ClientStore(self.out / "nodes", name, node.identity, layout) for node in known.find()]
        return np.stack([store.load().memory for store in stores])


def test_clients_keep_their_residuals_over_a_resume(tmp_path: Path) -> None:
    whole, broken = (Simulation(tmp_path / name, Adding().app) for name in ("whole", "broken"))
    expected = whole.start(4, Summing()).arrays
    broken.start(2, Summing())
    assert np.abs(broken.residuals()).sum() > 0
    assert same(broken.start(4, Summing(), resume=True).arrays, expected)
    assert np.array_equal(broken.residuals(), whole.residuals())
    assert timeless(broken.of_nodes) == timeless(whole.of_nodes)
    assert {(row["number"], row["node"], row["incarnation"]) for row in broken.of_nodes} == {
        (i, f"node{i}", 1) for i in range(3)
    }


def test_no_update_gets_lost_with_a_reply(tmp_path: Path) -> None:
    """A mod around ours fails after the state is stored, and takes back its own Context.state."""
    app, broken = Adding(mods=[]), {(0, 2), (2, 3)}

    def fail(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        reply = call_next(message, context)
        record = message.content.config_records.get("config", {})
        if (context.node_config["partition-id"], record.get("server-round")) in broken:
            raise RuntimeError("the network is gone")
        return reply

    app.app = ClientApp(mods=[fail, compressed])
    app.app.train()(app.train)
    it = Simulation(tmp_path, app.app)
    it.start(4, Summing(), compressor="topk(0.7)")
    it.start(6, Summing(), compressor="topk(0.7)", resume=True)
    causes = [row["outcomes"] for row in it.rows]
    assert [each.get("app failed", 0) for each in causes] == [0, 1, 1, 0, 0, 0]
    calls = [(i, t) for i in range(3) for t in range(1, 7)]
    assert sorted(app.calls) == calls
    disks = Disks(it)
    assert np.array_equal(disks.x() + it.residuals().sum(0), disks.update(*calls))


def test_two_runs_do_not_mix_their_residuals(tmp_path: Path) -> None:
    alone = Simulation(tmp_path / "alone", Adding().app)
    expected = alone.start(4, Summing(), seed=1).arrays
    one, other = (Simulation(tmp_path / name, Adding().app) for name in ("one", "other"))
    one.start(2, Summing(), seed=1)
    other.start(3, Summing(), seed=1)
    assert same(one.start(4, Summing(), seed=1, resume=True).arrays, expected)


def test_each_start_asks_each_node_once_and_the_ledger_does_not_count_it(tmp_path: Path) -> None:
    simulated = Simulation(tmp_path / "simulated", Adding().app)
    deployed = Federation(tmp_path / "deployed", Adding().app)
    models = [each.start(3).arrays for each in (simulated, deployed)]
    assert same(*models)
    assert len(simulated.grid.requests) == len(deployed.grid.requests) + 3
    for name in ("uplink_bytes", "downlink_bytes", "train_loss", "residual_norm_mean"):
        assert [row.get(name) for row in simulated.rows] == [row.get(name) for row in deployed.rows]


def test_runs_that_start_in_one_second_get_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "runs/flower-now")
    for _ in range(3):
        Simulation(tmp_path, Adding().app).start(1, out=None)
    folders = sorted(path.name for path in Path("runs").iterdir())
    assert folders == ["flower-now", "flower-now-2", "flower-now-3"]
    assert len({Path("runs", name, "federation.txt").read_text() for name in folders}) == 3


class Mine(Summing):
    """Sends messages of a type of its own."""

    def configure_train(self, *args: Any, **more: Any) -> Any:
        return [
            Message(each.content, each.metadata.dst_node_id, "train.mine")
            for each in super().configure_train(*args, **more)
        ]


def test_the_question_has_a_type_that_the_app_handles(tmp_path: Path) -> None:
    app = Adding(mods=[])
    app.app = ClientApp(mods=[compressed])
    app.app.train("mine")(app.train)
    it = Simulation(tmp_path, app.app)
    it.start(2, Mine())
    assert it.outcomes == [{"replied": 3}] * 2


def test_an_app_without_the_mod(tmp_path: Path) -> None:
    it = Simulation(tmp_path, Adding(mods=[]).app)
    with pytest.raises(InputError, match=r"must have mods=\[cfedavg.flower.compressed\], but .*Error: ") as e:
        it.start(2)
    assert "\n" not in str(e.value)
    assert it.rows == []


def test_a_request_does_not_choose_where_a_node_writes(tmp_path: Path) -> None:
    """A server on another machine names a folder, which is not this federation's here."""
    it, elsewhere = Simulation(tmp_path, Adding().app), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "federation.txt").write_text("0" * 32)

    def forge(node: LocalNode, request: Message) -> Message:
        record: ConfigRecord = request.content.config_records[OURS]
        if "folder" in record:
            record["folder"] = str(elsewhere)
        return node.answer(request)

    it.grid.on_request = forge
    it.start(1)
    assert it.outcomes == [{"state": 3}]
    assert "the server's folder must be on this machine, got " in it.of_nodes[0]["why"]
    assert [path.name for path in elsewhere.iterdir()] == ["federation.txt"]
    assert not (it.out / "nodes").exists()


def test_one_may_choose_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFEDAVG_STATE", str(tmp_path / "fast"))
    it = Simulation(tmp_path, Adding().app)
    it.start(1)
    assert len(list((tmp_path / "fast").glob("*/*/state.safetensors"))) == 3
    assert not (it.out / "nodes").exists()
