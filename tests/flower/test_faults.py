"""CFedAvg on Flower where everything breaks: the law on the real driver, and servers killed anywhere."""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import FedAdam

from cfedavg import InputError
from cfedavg.federate.client import Client
from cfedavg.federate.protocol import Copy, Stamp
from cfedavg.federate.state_file import FILE
from cfedavg.federate.stores import ClientStore, ServerStore
from cfedavg.flower.array_layout import Form
from cfedavg.flower.replies import read_reply
from tests.grid import (
    MODEL,
    Adding,
    Disks,
    Federation,
    LocalNode,
    NodeKilled,
    ServerKilled,
    Summing,
    arrays_of,
    reply_with,
    same,
    timeless,
)

pytestmark = pytest.mark.usefixtures("without_waiting")

FORM = Form.of(MODEL)


# The law


RATES = {
    "request lost": 0.1, "request late": 0.1, "request twice": 0.1, "reply lost": 0.15, "reply late": 0.15,
    "node away": 0.05, "not finite": 0.05, "app raises": 0.05, "disk lost": 0.02,
    "client killed before it stored": 0.05, "client killed after it stored": 0.05,
    "server killed at a push": 0.02, "server killed at a pull": 0.05, "server killed after aggregating": 0.05,
    "server killed before it stored": 0.05, "server killed after it stored": 0.05,
}  # fmt: skip


class Schedule:
    """A federation in which all of this happens, as its seed says, and every update is accounted for."""

    def __init__(self, seed: int, down: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.down = down
        self.chance, self.rates, self.faults = random.Random(seed), dict(RATES), Counter[str]()
        self.app = Adding()
        self.app.spoil = dict.fromkeys(range(4), self.works)
        self.it = Federation(folder, self.app.app, 4)
        self.disks = Disks(self.it)
        self.made = self.lost = np.zeros(FORM.layout.d, np.float32)
        self.g = self.gone = self.made
        self.answered: set[tuple[Path, Stamp, int]] = set()
        self.requests: list[tuple[int, LocalNode, Message]] = []
        self.replies: list[tuple[int, Message]] = []
        self.now = 0
        grid = self.it.grid
        grid.on_request, grid.on_reply = self.on_request, self.on_reply
        grid.before_push = lambda: self.kill("server killed at a push")
        grid.before_pull = self.before_pull
        patch.setattr(ClientStore, "save", self.around(ClientStore.save, self.client_saves))
        patch.setattr(ClientStore, "fresh", self.around(ClientStore.fresh, self.client_starts))
        patch.setattr(ServerStore, "save", self.around(ServerStore.save, self.server_saves))

    def around(self, real: Any, mine: Any) -> Any:
        return lambda *args: mine(real, *args)

    def happens(self, fault: str) -> bool:
        found = self.chance.random() < self.rates[fault]
        self.faults[fault] += found
        return found

    def kill(self, fault: str) -> None:
        if self.happens(fault):
            raise ServerKilled

    # The network

    def on_request(self, node: LocalNode, message: Message) -> Message | None:
        self.now = int(message.metadata.group_id)
        due = [each for each in self.requests if each[0] <= self.now and each[1] is node]
        self.requests = [each for each in self.requests if each not in due]
        for _, _, old in due:
            self.replies.append((self.now, self.answer(node, old)))
        if self.happens("request lost"):
            return None
        if self.happens("request late"):
            self.requests.append((self.now + self.chance.randint(1, 3), node, message))
            return None
        reply = self.answer(node, message)
        if self.happens("request twice") and not reply.has_error():
            assert node.answer(message).content == reply.content
        return reply

    def answer(self, node: LocalNode, message: Message) -> Message:
        if self.disks.client(node) and self.happens("disk lost"):
            self.lost = self.lost + self.disks.mass(node)
            shutil.rmtree(node.disk)
        self.node = node
        self.g = self.gone = np.zeros(FORM.layout.d, np.float32)
        return node.answer(message)

    def on_reply(self, node: LocalNode, request: Message, reply: Message) -> Message | None:
        if self.happens("reply lost"):
            return None
        if self.happens("reply late"):
            self.replies.append((self.now + self.chance.randint(1, 3), reply))
            return None
        return reply

    def before_pull(self) -> None:
        self.it.grid.stray = [reply for due, reply in self.replies if due <= self.now]
        self.replies = [each for each in self.replies if each[0] > self.now]
        self.kill("server killed at a pull")

    # Clients

    def works(self, arrays: Any, metrics: Any, message: Message) -> Message:
        if self.happens("app raises"):
            raise ZeroDivisionError("in the app")
        if self.happens("not finite"):
            return reply_with({**arrays, "b": arrays["b"] * math.nan}, metrics, message)
        before = arrays_of(message.content.array_records["arrays"])
        draw = np.random.default_rng(self.chance.randrange(2**32))
        g = {name: draw.integers(-9, 10, each.shape).astype(np.float32) for name, each in before.items()}
        self.g = FORM.split(g)[0]
        return reply_with({name: before[name] + g[name] for name in g}, metrics, message)

    def client_saves(self, real: Any, store: ClientStore, client: Client) -> None:
        if self.happens("client killed before it stored"):
            raise NodeKilled
        real(store, client)
        self.made, self.lost = self.made + self.g, self.lost + self.gone
        assert client.sent is not None
        name = (store.folder, client.sent.stamp, client.incarnation)
        assert name not in self.answered, "trained twice"
        self.answered.add(name)
        if self.happens("client killed after it stored"):
            raise NodeKilled

    def client_starts(self, real: Any, store: ClientStore, copy: Copy | None = None) -> Client:
        """Begin a client without a past. What it had before is lost once the new state is stored."""
        self.gone = self.disks.mass(self.node)
        found: Client = real(store, copy)
        return found

    # The server

    def server_saves(self, real: Any, store: ServerStore, served: Any) -> None:
        self.kill("server killed before it stored")
        real(store, served)
        self.kill("server killed after it stored")

    def aggregated(self, t: int, _: ArrayRecord) -> None:
        self.kill("server killed after aggregating")
        for node in self.it.nodes:
            node.online = not self.happens("node away")

    def run(self, rounds: int) -> None:
        while True:
            try:
                options = {"resume": True, "compressor_down": self.down, "timeout": 0.002}
                self.it.start(rounds, Summing(), evaluate_fn=self.aggregated, **options)
                return self.check()
            except ServerKilled:
                self.check()

    def check(self) -> None:
        """The law, bit for bit."""
        for node in self.it.nodes:
            node.online = True
        if not (self.it.out / "state" / FILE).exists():
            return
        total = self.disks.x() + self.disks.masses() + self.lost
        assert np.array_equal(total, self.made)

    def settle(self, rounds: int) -> None:
        """Rounds in which nothing breaks, after which nothing is on its way."""
        self.rates = dict.fromkeys(RATES, 0.0)
        self.run(rounds)
        for node in self.it.nodes:
            assert not self.disks.on_the_way(node).any()
        assert self.it.outcomes[-1] == {"replied": 4}
        assert [row["round"] for row in self.it.rows] == list(range(rounds))


@pytest.mark.parametrize("down", ["none", "topk(0.8)"])
def test_the_law_on_the_real_driver(down: str, tmp_path: Path) -> None:
    """Broadcasts that select whole numbers and do not round them keep every sum exact."""
    happened: Counter[str] = Counter()
    for seed in range(6):
        with pytest.MonkeyPatch.context() as patch:
            it = Schedule(seed, down, tmp_path / str(seed), patch)
            it.run(14)
            it.settle(19)
            happened += it.faults
            incarnations = {row["node"]: row["incarnation"] for row in it.it.of_nodes}
            assert sum(incarnations.values()) <= 4 + it.faults["disk lost"] * 2
    assert happened.keys() == RATES.keys()
    assert happened.total() > 200


def test_a_disk_is_lost(tmp_path: Path) -> None:
    """A new incarnation, counted; all but its residual is in the model."""
    it = Federation(tmp_path, (app := Adding()).app)
    disks = Disks(it)
    it.start(4, Summing())
    lost = disks.mass(it.nodes[1])
    assert lost.any()
    it.lose_disk(1)
    it.start(6, Summing(), resume=True)
    assert np.array_equal(disks.update(*app.calls), disks.x() + disks.masses() + lost)
    assert [row["incarnation"] for row in it.of_nodes if row["node"] == "node1"] == [1, 1, 1, 1, 2, 2]
    assert {row["incarnation"] for row in it.of_nodes if row["node"] != "node1"} == {1}
    assert it.outcomes == [{"replied": 3}] * 6


def test_an_old_disk_comes_back(tmp_path: Path) -> None:
    """What it holds is in the model already: it starts again without, and nothing is there twice."""
    it = Federation(tmp_path, (app := Adding()).app)
    disks = Disks(it)
    it.start(2, Summing())
    shutil.copytree(it.nodes[1].disk, tmp_path / "copy")
    it.start(5, Summing(), resume=True)
    lost = disks.mass(it.nodes[1])
    it.lose_disk(1)
    shutil.copytree(tmp_path / "copy", it.nodes[1].disk)
    it.start(7, Summing(), resume=True)
    assert np.array_equal(disks.update(*app.calls), disks.x() + disks.masses() + lost)
    assert [row["incarnation"] for row in it.of_nodes if row["node"] == "node1"][-3:] == [1, 2, 2]


def test_a_server_from_a_backup(tmp_path: Path) -> None:
    it = Federation(tmp_path, (app := Adding()).app)
    disks, sent = Disks(it), dict[tuple[int, int], bytes]()

    def note(node: LocalNode, request: Message, reply: Message) -> Message:
        if not reply.has_error():
            sent[node.partition, int(request.metadata.group_id)] = read_reply(reply.content).message
        return reply

    it.grid.on_reply = note
    it.start(2, Summing())
    shutil.copytree(it.out / "state", tmp_path / "backup")
    it.start(5, Summing(), resume=True)
    later = sum(disks.payload(sent[i, t]) for i in range(3) for t in (3, 4))  # and told; 5 is still known
    shutil.rmtree(it.out / "state")
    shutil.copytree(tmp_path / "backup", it.out / "state")
    with pytest.raises(InputError, match=r"took part in later rounds.* older copy .* `from_backup`"):
        it.start(5, Summing(), resume=True)
    assert disks.server().t == 2
    assert len(app.calls) == 15
    it.start(6, Summing(), resume=True, from_backup=True)
    assert len(app.calls) == 15 + 12
    assert np.array_equal(disks.update(*app.calls), disks.x() + disks.masses() + later)
    assert disks.server().stamp.generation > 1
    assert [disks.client(node).forgotten for node in it.nodes] == [1, 1, 1]  # type: ignore[union-attr]
    assert [row["round"] for row in it.rows] == list(range(6))
    asked = [(row["round"], row["number"]) for row in it.of_nodes]
    assert asked == [(t, i) for t in range(6) for i in range(3)]
    assert {row["age"] for row in it.of_nodes} == {0}
    assert it.outcomes == [{"replied": 3}] * 6


def test_one_node_is_ahead(tmp_path: Path) -> None:
    """That of one node is no proof: the others go on, and it is counted."""
    it = Federation(tmp_path, Adding().app)
    it.start(1)
    store = Disks(it).store(it.nodes[1])
    store.save(replace(store.load(), answered=Stamp(1, 3)))
    it.start(4, resume=True)
    assert it.outcomes[1:] == [{"out of date": 1, "replied": 2}] * 2 + [{"replied": 3}]
    assert it.of_nodes[4]["why"] == "request 1.2 is not newer than 1.3, which was answered"


# The server is killed


class Points:
    """Kills the server at the n-th of the moments at which it does something that others can see."""

    def __init__(self, n: float = math.inf) -> None:
        self.n, self.count = n, 0

    def reach(self) -> None:
        self.count += 1
        if self.count == self.n:
            raise ServerKilled

    def evaluate(self, t: int, arrays: ArrayRecord) -> None:
        self.reach()

    @contextmanager
    def at(self, it: Federation) -> Iterator[None]:
        real_save, real_open = ServerStore.save, Path.open

        def save(store: ServerStore, served: Any) -> None:
            self.reach()
            real_save(store, served)
            self.reach()

        def opened(path: Path, mode: str = "r", **more: Any) -> Any:
            file = real_open(path, mode, **more)
            return Slow(file, self.reach) if mode in ("a", "ab") else file

        it.grid.before_push = it.grid.before_pull = self.reach
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ServerStore, "save", save)
            patch.setattr(Path, "open", opened)
            yield
        it.grid.before_push = it.grid.before_pull = lambda: None


class Slow:
    """A file that fails after half of the bytes."""

    def __init__(self, file: Any, reach: Callable[[], None]) -> None:
        self.file, self.reach = file, reach

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, text: Any) -> None:
        self.reach()
        self.file.write(text[: len(text) // 2])
        self.file.flush()
        self.reach()
        self.file.write(text[len(text) // 2 :])
        self.file.flush()
        self.reach()


Rows = list[dict[str, Any]]
# What clients download to evaluate, in a row and in the lines of its nodes.
DOWNLOADS = {
    "downlink_bytes", "total_bytes", "downlink_messages", "whole_downloads", "down_bytes", "download",
    "version",
}  # fmt: skip


def without_lost_evaluations(found: Federation, calm: Federation) -> tuple[list[Rows], int]:
    """The rows of both files of both federations, and how many evaluations by clients the first has lost.

    Of a round whose evaluation was lost, its columns are left out. With a compressed broadcast, what clients
    told in evaluations is forgotten after a kill, so the next requests may be longer, and are left out too.
    """
    forgets = "copy_gap_norm2" in calm.rows[0] and "client_total" in calm.rows[0]
    lost = {
        row["round"]
        for row, wanted in zip(found.rows, calm.rows, strict=True)
        if "client_total" in wanted and "client_total" not in row
    }

    def known(row: dict[str, Any]) -> dict[str, Any]:
        unknown = DOWNLOADS if forgets or row["round"] in lost else set()
        unknown = unknown | {"client_total"} if row["round"] in lost else unknown
        return {name: value for name, value in row.items() if name not in unknown}

    files = [found.rows, calm.rows, found.of_nodes, calm.of_nodes]
    return [[known(row) for row in timeless(rows)] for rows in files], len(lost)


@pytest.mark.parametrize("down", ["none", "topk(0.7) >> bf16"])
@pytest.mark.parametrize("inner", [Summing, FedAdam, None])
def test_the_server_is_killed_anywhere(inner: Any, down: str, tmp_path: Path) -> None:
    """Model and rows are those of an undisturbed federation; nobody trains twice.

    A kill while clients evaluate costs that evaluation and nothing else: the round is stored before.
    """

    def play(name: str, *points: Points) -> tuple[Any, Federation]:
        app = Adding()
        it = Federation(tmp_path / name, app.app, 2)
        options = {"resume": True, "compressor_down": down}
        for each in points:
            with each.at(it), suppress(ServerKilled):
                it.start(2, inner and inner(), evaluate_fn=each.evaluate, **options)
        found = it.start(2, inner and inner(), **options)
        assert sorted(app.calls) == [(0, 1), (0, 2), (1, 1), (1, 2)]
        return found.arrays, it

    counting = Points()
    wanted, calm = play("calm", counting)
    assert counting.count > 25
    evaluations_lost = 0
    for n in range(1, counting.count + 1, 1 if inner is Summing else 4):
        points = [Points(n), Points(n)]  # and again, at another moment of what is left
        arrays, it = play(f"killed {n}", *points)
        assert points[0].count == n
        assert same(arrays, wanted)
        (rows, calm_rows, nodes, calm_nodes), lost = without_lost_evaluations(it, calm)
        assert rows == calm_rows
        assert nodes == calm_nodes
        assert lost <= len(points)
        evaluations_lost += lost
    assert (evaluations_lost > 0) is (inner is FedAdam)
