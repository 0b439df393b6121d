"""Real federations on this machine: SuperLink, SuperNodes, TLS, keys, kills. Nothing is faked here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cfedavg import Config, InputError, run
from cfedavg.algorithm import average
from cfedavg.channel import Downlink
from cfedavg.compress import decompress, parse
from cfedavg.core.layout import Layout
from cfedavg.core.run_files import read_rows
from cfedavg.core.tensors import read_tensors
from cfedavg.data.tasks import build_task
from cfedavg.federate.client import unpack_message
from cfedavg.federate.replica import ModelReplica, advance, begin
from cfedavg.federate.stores import ClientStore
from cfedavg.launch import local_federation
from cfedavg.launch.local_federation import LocalFederation
from cfedavg.wire import decode

ROOT = Path(__file__).parents[2]
LIMIT = 240.0  # seconds for a run; the slow one has more


class Federation:
    """A local federation, the folder of its server, and the records of its witnesses."""

    def __init__(self, folder: Path, config: Config, nodes: int, **settings: Any) -> None:
        self.out, self.config, self.settings = folder / "out", config, settings
        self.app = folder / "app"
        self.app.mkdir()
        self.layout = Layout.of(build_task(config).model)
        self.machine = LocalFederation(folder / "machine", nodes, more={"PYTHONPATH": str(ROOT)})

    def run(self, *, resume: bool = False) -> Any:
        text = local_federation.format_app(self.config, out=str(self.out), resume=resume, **self.settings)
        (self.app / "pyproject.toml").write_text(text)
        return self.machine.run(self.app)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the whole lines of a file: the server may be writing one."""
        return read_rows(self.out / name)

    def await_round(self, t: int, seconds: float = LIMIT) -> None:
        end = time.monotonic() + seconds
        while len(self.lines("metrics.jsonl")) <= t:
            assert time.monotonic() < end, f"round {t} does not end"
            time.sleep(0.2)

    @property
    def model(self) -> torch.Tensor:
        """The model that the clients hold."""
        return self._read_model("model.safetensors")

    @property
    def server_model(self) -> torch.Tensor:
        """The server's own model, from which broadcasts are made."""
        return self._read_model("server_model.safetensors")

    def _read_model(self, name: str) -> torch.Tensor:
        found = load_file(self.out / name)
        return torch.cat([found[name].reshape(-1) for name in self.layout.names])

    def sent(self, node: int, t: int) -> Any:
        """The payload that a node sent in a round."""
        message = (self.machine.folder / "nodes" / str(node) / "witness" / f"{t}.message").read_bytes()
        payload = unpack_message(message, len(message), 0).payload
        return decode(payload, layout=self.layout)

    def applied(self) -> list[tuple[int, int]]:
        """Rounds and nodes, in order."""
        rows = [row for row in self.lines("nodes.jsonl") if row["applied"]]
        return sorted((row["round"], row["number"]) for row in rows)

    def check_law(self, node: int) -> None:
        """Sum of g = A + e + U, up to the rounding of a sum g + e in each round."""
        folder = self.machine.folder / "nodes" / str(node)
        computed = [np.load(path) for path in (folder / "witness").glob("[0-9]*.npy")]
        client = self._client(folder / "state")
        rounds = {t for t, number in self.applied() if number == node}
        assert rounds
        delivered = [np.float64(decompress(self.sent(node, t))[0]) for t in rounds]
        last = max(int(path.stem) for path in (folder / "witness").glob("*.message"))
        if last not in rounds:
            delivered.append(np.float64(decompress(self.sent(node, last))[0]))
        left = np.sum(computed, 0, dtype=np.float64)
        right = np.sum(delivered, 0) + client.memory
        largest = max(np.abs(each).max() for each in (*computed, *delivered, client.memory))
        tolerance = 2 * (len(computed) + len(delivered)) * 2.0**-24 * largest
        assert np.abs(left - right).max() <= tolerance

    def _client(self, root: Path) -> Any:
        """Return the node's state, the only one in its folder, and check its owner."""
        (state,) = root.glob("*/*/state.safetensors")
        _, about = read_tensors(state)
        assert about["federation"] == (self.out / "federation.txt").read_text()
        dtype = self.replica.dtype
        return ClientStore(root, about["federation"], about["identity"], self.layout, dtype).load()

    @property
    def replica(self) -> ModelReplica:
        return ModelReplica(self.layout, parse(self.config.compressor_down).rounds_values)

    def check_copies(self) -> None:
        """Every node's copy is the server's w of its version, bit for bit.

        The server keeps only its last w. The payloads that are in the model lead to all of them again.
        """
        vectors = [p.detach().reshape(-1) for p in build_task(self.config).model.parameters()]
        x = torch.cat(vectors).numpy()
        downlink = Downlink(parse(self.config.compressor_down), self.layout)
        copies = [begin(x, self.replica, generation=1, t=0)]
        for t in range(self.config.rounds):
            of_round = [self.sent(node, each) for each, node in self.applied() if each == t]
            x = x + average(x, ((payload, [1.0]) for payload in of_round))[0] if of_round else x
            copies.append(advance(copies[-1], x, downlink, self.config.seed))
        assert np.array_equal(self.replica.model(copies[-1].w), self.model.numpy())
        for node in range(len(self.machine.nodes)):
            copy = self._client(self.machine.folder / "nodes" / str(node) / "state").copy
            server = copies[copy.version.round]
            assert copy.version == server.version
            assert copy.w.tobytes() == server.w.tobytes()

    def check_model(self) -> None:
        """Check that the applied payloads lead from the first model to the server's, bit for bit."""
        vectors = [p.detach().reshape(-1) for p in build_task(self.config).model.parameters()]
        x = torch.cat(vectors).numpy()
        for t in range(self.config.rounds):
            of_round = [self.sent(node, each) for each, node in self.applied() if each == t]
            x = x + average(x, ((payload, [1.0]) for payload in of_round))[0]
        assert np.array_equal(x, self.server_model.numpy())


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Federation]]:
    """Make a federation, and check at the end that nothing of it is left."""
    monkeypatch.setitem(local_federation.COMPONENTS, "clientapp", "tests.witness:app")
    made: list[Federation] = []

    def make(config: Config, nodes: int, **settings: Any) -> Federation:
        made.append(Federation(tmp_path, config, nodes, **settings))
        made[0].machine.__enter__()
        return made[0]

    yield make
    for each in made:
        each.machine.close()
        assert not each.machine.processes.left()


def simulated(config: Config) -> list[torch.Tensor]:
    """Return both models of the same run simulated with one thread, as the nodes have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = run(config.replace(engine="reference", device="cpu"))
    finally:
        torch.set_num_threads(threads)
    models = (made.model, made.server_model)
    return [torch.cat([each.reshape(-1) for each in model.state_dict().values()]) for model in models]


def test_a_federation_is_what_a_simulation_says(federation: Callable[..., Federation]) -> None:
    """Two nodes with keys train; a third, whose key nobody has registered, is refused."""
    config = Config(clients=2, rounds=2, model="linear", compressor="topk(0.9)", local_steps="5")
    expected = simulated(config)  # and the coders are compiled, which takes a busy machine a minute
    it = federation(config, 3, min_nodes=2, round_timeout=LIMIT)
    machine = it.machine
    machine.link.start()
    machine.link.register(machine.nodes[:2])
    for node in machine.nodes[:2]:
        node.start()
    training = it.run()
    with pytest.raises(InputError, match="is not registered at the SuperLink"):
        machine.nodes[2].start(limit=3.0)
    assert training.wait(2 * LIMIT).text == "finished:completed"
    assert [row["outcomes"] for row in it.lines("metrics.jsonl")] == [{"replied": 2}] * 2
    w, x = expected
    assert torch.equal(it.model, w)
    assert torch.equal(it.server_model, x)
    assert not torch.equal(w, x)
    it.check_model()
    for node in range(2):
        it.check_law(node)


def stay_away(it: Federation, node: int, rounds: int) -> None:
    """Kill a node and start it again some rounds later."""
    it.machine.nodes[node].kill()
    it.await_round(len(it.lines("metrics.jsonl")) + rounds)
    it.machine.nodes[node].start()


@pytest.mark.slow
def test_a_federation_survives(federation: Callable[..., Federation]) -> None:
    """Two nodes are killed, one of them for several rounds; one is too slow; the SuperLink is killed.

    The run is resumed. Both directions are compressed, and all copies are the server's at the end.
    """
    config = Config(
        clients=4,
        rounds=12,
        compressor="topk(0.99)",
        compressor_down="topk(0.97) >> bf16",
        classes_per_client=5,
        local_steps="25",
        seed=1,
    )
    it = federation(config, 4, min_nodes=2, round_timeout=50.0, quorum=0.5)
    machine = it.machine
    machine.start()
    training = it.run()
    it.await_round(1)
    machine.nodes[1].kill()
    back = threading.Thread(target=machine.nodes[1].start)
    away = threading.Thread(target=stay_away, args=(it, 3, 3))
    back.start()
    away.start()
    it.await_round(3)
    slow = machine.folder / "nodes" / "2" / "witness" / "slow"
    slow.touch()
    it.await_round(4)
    slow.unlink()
    back.join(120)
    away.join(240)
    assert machine.nodes[1].running
    assert machine.nodes[3].running
    it.await_round(7)
    machine.link.kill()
    machine.link.start()
    training = it.run(resume=True)
    assert training.wait(4 * LIMIT).text == "finished:completed"
    rows = it.lines("metrics.jsonl")
    assert [row["round"] for row in rows] == list(range(12))
    nodes = it.lines("nodes.jsonl")
    fates = {(row["node"], row["outcome"]) for row in nodes}
    assert {("node1", "replied"), ("node2", "late"), ("node3", "replied")} <= fates
    assert fates & {("node1", "lost"), ("node1", "late")}
    # Nobody lost a disk: each node downloaded the whole model once, and after that what it missed.
    later = [row["download"] for row in nodes if row["round"] > 0]
    assert set(later) <= {"chain", "changes"}
    it.check_model()
    it.check_copies()
    for node in range(4):
        it.check_law(node)
    quiet = run(config).final["test_accuracy"]
    assert rows[-1]["test_accuracy"] > quiet - 0.03
