"""Compressed broadcasts through Flower: every copy is the server's, whatever is lost, and bytes count."""

from __future__ import annotations

import errno
import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType
from flwr.serverapp.strategy import FedAvg
from safetensors.numpy import load_file

from cfedavg import InputError
from cfedavg.core import tensors
from cfedavg.core.arrays import round_to_bf16
from cfedavg.federate.protocol import Chain, Copy, Whole, unpack
from cfedavg.federate.replica import ModelReplica
from cfedavg.federate.state_file import FILE
from cfedavg.flower import RoundPolicy
from cfedavg.flower.array_layout import Body, Form
from cfedavg.flower.replies import read_reply
from cfedavg.flower.requests import read_body, read_order
from cfedavg.flower.rounds import Load
from tests.flower.test_federation_folder import refuses
from tests.flower.test_strategy_state import INNER, Misshapen, sized
from tests.grid import (
    Adding,
    Arrays,
    Disks,
    Federation,
    LocalNode,
    Summing,
    arrays_of,
    error,
    record,
    reply_with,
    same,
    travelled,
)

pytestmark = pytest.mark.usefixtures("without_waiting")

# Large enough that a message of a round is shorter than the model.
LARGE: Arrays = {"w": np.zeros((40, 50), np.float32), "b": np.arange(24, dtype=np.float32)}
DOWN = "topk(0.95) >> bf16"
ROUNDED = {"compressor": "topk(0.9)", "compressor_down": DOWN, "timeout": 5.0}
Vector = np.ndarray[Any, Any]


class Watched(Federation):
    """A federation that broadcasts compressed; it notes w after each round, and looks at every disk then."""

    def __init__(
        self, folder: Path, app: Adding, nodes: int = 3, model: Arrays = LARGE, dtype: str = "int16"
    ) -> None:
        super().__init__(folder, app.app, nodes, model)
        self.disks = Disks(self, dtype)
        self.replica = ModelReplica(self.disks.form.layout, dtype == "int16")
        self.w: dict[int, Vector] = {}
        self.compared = 0

    def run(self, rounds: int, inner: Any = None, **options: Any) -> Any:
        given = ROUNDED | {"resume": True, "evaluate_fn": self.look} | options
        return self.start(rounds, inner, **given)

    def look(self, t: int, arrays: ArrayRecord) -> None:
        self.w[t] = self.disks.form.split(arrays_of(arrays))[0]
        self.check_copies()

    def copy(self, node: LocalNode) -> Copy | None:
        client = self.disks.client(node)
        return None if client is None else client.copy

    def check_copies(self) -> None:
        """Every copy on a disk is the server's w of the version that it names, bit for bit."""
        for node in self.nodes:
            if (node.disk).exists() and (copy := self.copy(node)) is not None:
                assert self.replica.model(copy.w).tobytes() == self.w[copy.version.round].tobytes()
                self.compared += 1

    def downloads(self, t: int) -> dict[str, str]:
        return {row["node"]: row["download"] for row in self.of_nodes if row["round"] == t}


def drop_out(it: Federation, rate: float) -> Counter[str]:
    """Lose requests and replies, and let apps fail, each at this rate."""
    draw, happened = random.Random(3), Counter[str]()

    def request(node: LocalNode, message: Message) -> Message | None:
        fate = draw.choices(["well", "lost", "reply lost", "error"], [1 - 3 * rate, rate, rate, rate])[0]
        happened[fate] += 1
        if fate == "lost":
            return None
        reply = node.answer(message)
        return {"well": reply, "error": error(2, "it broke off", message)}.get(fate)

    it.grid.on_request = request
    return happened


@pytest.mark.parametrize(("down", "dtype"), [(DOWN, "int16"), ("topk(0.9)", "float32")])
def test_copies_through_a_hundred_rounds_of_drop_outs(down: str, dtype: str, tmp_path: Path) -> None:
    """30% of ten nodes take part and a third of what is sent gets lost. No copy ever fails to follow."""
    it = Watched(tmp_path, Adding(), 10, dtype=dtype)
    happened = drop_out(it, 0.1)
    policy = RoundPolicy(participation=0.3, quorum=0.3)
    it.run(100, policy=policy, compressor_down=down, timeout=1e-9)
    assert happened.keys() == {"well", "lost", "reply lost", "error"}
    assert it.compared > 500
    assert len({w.tobytes() for w in it.w.values()}) > 80
    kinds = Counter(row["download"] for row in it.of_nodes)
    assert kinds.keys() <= {"chain", "changes", "whole"}
    assert kinds["chain"] > kinds["whole"] > 9
    assert {cause for outcomes in it.outcomes for cause in outcomes} == {"app failed", "late", "replied"}


def test_a_node_that_was_away(tmp_path: Path) -> None:
    """For some rounds: what it missed; for more: what changed; for longer than the history: all of it."""
    it = Watched(tmp_path, Adding())
    away, found, t, options = it.nodes[2], [], 1, {"compressor_down": "topk(0.99) >> bf16"}
    it.run(t, **options)
    for rounds in (1, 2, 20, 60):
        away.online = False
        it.run(t + rounds, **options)
        away.online = True
        t += rounds + 1
        it.run(t, **options)  # another start of the server, which knows from its state what the node has
        found.append(it.downloads(t - 1))
        assert it.outcomes[-1] == {"replied": 3}
    assert [each["node2"] for each in found] == ["chain", "chain", "changes", "whole"]
    assert {each["node0"] for each in found} == {"chain"}
    assert [row["downlink_messages"] for row in it.rows[1:6]] == [2, 2 + 2, 2, 2, 2 + 3]


# Disks


def lose(it: Watched, node: LocalNode) -> None:
    shutil.rmtree(node.disk)


def go_back(it: Watched, node: LocalNode) -> None:
    shutil.rmtree(node.disk)
    shutil.copytree(node.disk.with_suffix(".old"), node.disk)


def damage(it: Watched, node: LocalNode) -> None:
    copy = it.copy(node)
    assert copy is not None
    path, w = it.disks.store(node).folder / FILE, copy.w.tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(w) + len(w) // 2] ^= 1
    path.write_bytes(data)
    assert it.copy(node) is None


@pytest.mark.parametrize(("fault", "incarnation"), [(lose, 2), (go_back, 2), (damage, 1)])
def test_a_copy_that_cannot_follow(fault: Any, incarnation: int, tmp_path: Path) -> None:
    """The node gets the whole model in the same round, trains once from it, and its reply counts."""
    it = Watched(tmp_path, app := Adding())
    it.run(2)
    shutil.copytree(it.nodes[1].disk, it.nodes[1].disk.with_suffix(".old"))
    it.run(4)
    fault(it, it.nodes[1])
    it.run(6)
    assert it.downloads(4) == {"node0": "chain", "node1": "chain + whole", "node2": "chain"}
    assert set(it.downloads(5).values()) == {"chain"}
    assert it.outcomes == [{"replied": 3}] * 6
    assert app.calls.count((1, 5)) == 1
    row = next(row for row in it.of_nodes if (row["round"], row["node"]) == (4, "node1"))
    assert (row["applied"], row["incarnation"], row["version"]) == (True, incarnation, "1.4")
    assert it.rows[4]["whole_downloads"] == 1
    assert it.rows[4]["first_download_bytes"] == 0


def test_a_node_that_can_never_follow(tmp_path: Path) -> None:
    """It gets the whole model at most once in a round."""
    it = Watched(tmp_path, Adding())
    it.run(1)
    it.grid.on_request = lambda node, message: (
        error(1011, "no", message) if node.partition == 1 else node.answer(message)
    )
    it.run(2)
    assert it.outcomes[1] == {"another copy": 1, "replied": 2}
    assert it.downloads(1)["node1"] == "chain + whole"
    assert len(it.grid.requests) == 3 + 4


def test_a_server_from_a_backup(tmp_path: Path) -> None:
    """A new generation begins without a history: everyone gets the whole model, once."""
    it = Watched(tmp_path, Adding())
    it.run(2)
    shutil.copytree(it.out / "state", tmp_path / "backup")
    it.run(4)
    shutil.rmtree(it.out / "state")
    shutil.copytree(tmp_path / "backup", it.out / "state")
    it.run(3, from_backup=True)
    assert it.downloads(2) == dict.fromkeys(["node0", "node1", "node2"], "whole")
    assert it.rows[2]["first_download_bytes"] == 0
    it.run(5)
    assert set(it.downloads(4).values()) == {"chain"}
    assert it.outcomes == [{"replied": 3}] * 5


# Around a strategy


class Watching(FedAvg):
    """Notes all models that it sees and makes, and what clients replied."""

    def __init__(self) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1)
        self.seen: dict[str, list[Arrays]] = {"train": [], "evaluate": [], "replies": []}

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
        self.seen["train"].append(arrays_of(arrays))
        return super().configure_train(server_round, arrays, config, grid)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
        self.seen["evaluate"].append(arrays_of(arrays))
        return super().configure_evaluate(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        found = list(replies)
        self.seen["replies"] += [arrays_of(reply.content["arrays"]) for reply in found]  # type: ignore[arg-type]
        return super().aggregate_train(server_round, found)


def test_a_strategy_sees_the_servers_model_and_clients_the_copy(tmp_path: Path) -> None:
    it = Watched(tmp_path, app := Adding())
    form, sent, stored = it.disks.form, list[tuple[int, int, Vector]](), list[tuple[Vector, Vector]]()

    def note(node: LocalNode, request: Message, reply: Message) -> Message:
        if request.metadata.message_type == MessageType.TRAIN:
            payload = it.disks.payload(read_reply(reply.content).message)
            sent.append((int(request.metadata.group_id), node.partition, payload))
        else:  # the state is durable before clients evaluate it
            server = it.disks.server()
            assert server.primary is not None
            stored.append((server.x, it.replica.model(server.primary.w)))
        return reply

    it.grid.on_reply = note
    result = it.run(4, inner := Watching())
    x = [form.split(each)[0] for each in inner.seen["train"]]
    assert [form.split(each)[0].tobytes() for each in inner.seen["evaluate"]] == [
        each.tobytes() for each, _ in stored[::3]
    ]
    assert [each.tobytes() for each in x[1:]] == [each.tobytes() for each, _ in stored[:-3:3]]
    replies = [form.split(each)[0] for each in inner.seen["replies"]]
    wanted = [x[t - 1] + payload for t, _, payload in sorted(sent, key=lambda each: each[:2])]
    assert [each.tobytes() for each in replies] == [each.tobytes() for each in wanted]
    # The clients train and evaluate w, which is not x.
    for t, seen in enumerate(app.trained):
        assert form.split(arrays_of(seen["arrays"]))[0].tobytes() == it.w[t // 3].tobytes()  # type: ignore[arg-type]
    for (server_x, w), seen in zip(stored, app.evaluated, strict=True):
        assert form.split(arrays_of(seen["arrays"]))[0].tobytes() == w.tobytes()  # type: ignore[arg-type]
        assert server_x.tobytes() != w.tobytes()
    last_x, last_w = stored[-1]
    assert it.w[4].tobytes() == last_w.tobytes()
    assert same(result.arrays, form.join(last_w, b""))
    assert same(load_file(it.out / "model.safetensors") | {}, _sorted(form.join(last_w, b"")))
    assert same(load_file(it.out / "server_model.safetensors") | {}, _sorted(form.join(last_x, b"")))
    assert it.rows[-1]["copy_gap_norm2"] == pytest.approx(np.square(last_x - last_w).sum(dtype=np.float64))


def _sorted(arrays: Arrays) -> Arrays:
    return {name: arrays[name] for name in sorted(arrays)}


def test_nothing_travels_twice(tmp_path: Path) -> None:
    """Who has evaluated the model of a round is asked to train it without a message."""
    it = Watched(tmp_path, Adding())
    it.run(4, FedAvg())
    for node, message in it.grid.requests:
        order, kind = read_order(message), message.metadata.message_type
        assert order is not None
        broadcast = unpack(read_body(message.content, order).broadcast)
        if order.t == 0:
            assert isinstance(broadcast, Whole) is (kind == MessageType.TRAIN)
        elif isinstance(broadcast, Chain):
            assert len(broadcast.messages) == (kind != MessageType.TRAIN)
            assert kind != MessageType.TRAIN or len(order.body) < 80, node
    assert set(it.downloads(3).values()) == {"chain + chain"}
    assert [row["version"] for row in it.of_nodes] == [f"1.{t + 1}" for t in range(4) for _ in range(3)]
    it.run(5, FedAvg())  # a new start forgets what was told: one message each
    assert it.rows[4]["downlink_messages"] == 3 + 3


@pytest.mark.parametrize("short", [32_768, 0])
def test_a_load_is_made_once_for_all_who_need_it(
    short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five nodes have the same gap and one another: two loads, as one array each where they are long."""
    monkeypatch.setattr("cfedavg.flower.rounds.SHORT", short)
    made, bodies, real = list[Load](), list[Any](), Load.__init__

    def count(load: Load, *parts: Any) -> None:
        made.append(load)
        real(load, *parts)

    it = Watched(tmp_path, Adding(), 6)
    it.run(1)
    it.nodes[0].online = False
    it.run(2)
    it.nodes[0].online = True
    push = it.grid.push_messages

    def note(messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        bodies.extend(
            each.content.config_records["cfedavg"]["body"] or each.content["arrays"] for each in sent
        )
        return push(sent)

    it.grid.push_messages = note  # type: ignore[method-assign]
    monkeypatch.setattr(Load, "__init__", count)
    it.run(3)
    assert len(made) == 2
    assert len(bodies) == 6
    assert len({id(body) for body in bodies}) == 2
    assert all(isinstance(body, ArrayRecord) is (short == 0) for body in bodies)
    assert it.outcomes[-1] == {"replied": 6}


# Rows


class Ledger:
    """What was in the requests of a round, and which nodes the server has heard of."""

    def __init__(self, it: Watched) -> None:
        self.it, self.known = it, set[int]()

    def read(self, row: dict[str, Any], delivered: set[str]) -> None:
        """Read the requests of the round of a row; those to evaluate come after those to train."""
        self.kinds, self.sizes = dict[int, list[str]](), Counter[int]()
        self.messages = self.first = 0
        nodes = [each for each in self.it.of_nodes if each["round"] == row["round"]]
        applied = {self.id_of(each) for each in nodes if each["applied"]}
        asked = [each for each in self.it.grid.requests if each[1].metadata.group_id == str(row["round"] + 1)]
        for node, message in sorted(asked, key=lambda each: _is_evaluation(each[1])):
            self.known |= applied if _is_evaluation(message) else set()
            self._count(node, message)
            if _is_evaluation(message) and message.metadata.message_id in delivered:
                self.known.add(node)
        self.known |= applied

    def _count(self, node: int, message: Message) -> None:
        order = read_order(message)
        assert order is not None
        body = read_body(message.content, order)
        broadcast, size = unpack(body.broadcast), len(body.pack()) + order.size
        self.kinds.setdefault(node, []).append(type(broadcast).__name__.lower())
        self.sizes[node] += size
        self.messages += len(broadcast.messages) if isinstance(broadcast, Chain) else 0
        self.first += 0 if node in self.known else size

    def id_of(self, row: dict[str, Any]) -> int:
        return self.it.nodes[int(row["node"].removeprefix("node"))].id


def _is_evaluation(message: Message) -> bool:
    return message.metadata.message_type == MessageType.EVALUATE


@pytest.mark.parametrize("inner", [None, FedAvg])
def test_rows_count_what_was_in_the_messages(inner: Any, tmp_path: Path) -> None:
    it = Watched(tmp_path, Adding(), 6)
    drop_out(it, 0.08)
    options: dict[str, Any] = {} if inner else {"policy": RoundPolicy(participation=0.5, quorum=0.1)}
    it.run(25, inner and inner(min_train_nodes=1), timeout=1e-9, **options)
    delivered = {name for name, reply in it.grid.replies.items() if reply and not reply.has_error()}
    ledger = Ledger(it)
    for row in it.rows:
        ledger.read(row, delivered)
        nodes = [each for each in it.of_nodes if each["round"] == row["round"]]
        for each in nodes:
            found, node = (each["down_bytes"], each["download"]), ledger.id_of(each)
            assert found == (ledger.sizes[node], " + ".join(ledger.kinds[node]))
        assert row["downlink_bytes"] == ledger.sizes.total()
        assert row["uplink_bytes"] == sum(each["up_bytes"] for each in nodes)
        assert row["total_bytes"] == row["uplink_bytes"] + row["downlink_bytes"]
        assert row["downlink_messages"] == ledger.messages
        assert row["whole_downloads"] == sum(each.count("whole") for each in ledger.kinds.values())
        assert row["first_download_bytes"] == ledger.first
    assert it.rows[0]["first_download_bytes"] > 0
    assert it.rows[-1]["first_download_bytes"] == 0
    assert sum(row["downlink_messages"] for row in it.rows) > 20


def test_the_version_of_a_node(tmp_path: Path) -> None:
    """The newest that it is known to hold: of its last reply in the model."""
    it = Watched(tmp_path, Adding())
    it.grid.on_reply = lambda node, request, reply: (
        None if (node.partition, request.metadata.group_id) == (1, "2") else reply
    )
    it.run(3, timeout=1e-9)
    found = {(row["round"], row["node"]): row["version"] for row in it.of_nodes}
    assert [found[t, "node0"] for t in range(3)] == ["1.0", "1.1", "1.2"]
    assert [found[t, "node1"] for t in range(3)] == ["1.0", "1.0", "1.2"]
    messages = {row["node"]: row["download"] for row in it.of_nodes if row["round"] == 2}
    assert set(messages.values()) == {"chain"}


# Statistics


def count_up(arrays: Arrays, metrics: dict[str, Any], message: Message) -> Message:
    """A client whose running mean lies between two numbers of bf16, and who has seen three batches."""
    before = arrays_of(message.content["arrays"])  # type: ignore[arg-type]
    mean = before["n.running_mean"] + np.float32(0.001)
    count = before["n.num_batches_tracked"] + 3
    return reply_with(arrays | {"n.running_mean": mean, "n.num_batches_tracked": count}, metrics, message)


def test_statistics_travel_in_bf16_and_counters_exactly(tmp_path: Path) -> None:
    mean = {"n.running_mean": np.full(6, 0.1, np.float32)}
    model = LARGE | mean | {"n.num_batches_tracked": np.array(2**40 + 1), "half": np.full(3, 0.1)}
    app, sent = Adding(), list[bytes]()
    app.spoil = dict.fromkeys(range(2), count_up)
    it, form = Watched(tmp_path, app, 2, model), Form.of(model)
    assert (form.count_bytes(), form.count_bytes(short=True)) == (24 + 8 + 24, 12 + 8 + 24)

    def note(node: LocalNode, request: Message, reply: Message) -> Message:
        order = read_order(request)
        assert order is not None
        assert len(read_body(request.content, order).uncompressed) == form.count_bytes(short=True)
        sent.append(read_reply(reply.content).message[-form.count_bytes(short=True) :])
        return reply

    it.grid.on_reply = note
    result = arrays_of(it.run(3, compressor="topk(0.9) >> bf16").arrays)
    seen = [arrays_of(each["arrays"]) for each in app.trained]  # type: ignore[arg-type]
    rounded = round_to_bf16(model["n.running_mean"])
    for arrays, t in ((seen[0], 0), (seen[2], 1), (seen[4], 2), (result, 3)):
        assert np.array_equal(arrays["n.running_mean"], rounded)
        assert arrays["n.num_batches_tracked"] == 2**40 + 1 + 3 * t
        assert arrays["n.num_batches_tracked"].dtype == np.int64
        rounded = round_to_bf16(rounded + np.float32(0.001))
    assert np.array_equal(seen[0]["half"], model["half"])
    replies = [form.join(it.disks.zero, form.unpack(each, short=True)) for each in sent]
    assert [int(each["n.num_batches_tracked"]) - 2**40 for each in replies] == [4, 4, 7, 7, 10, 10]
    assert np.array_equal(replies[-1]["n.running_mean"], result["n.running_mean"])


# Other strategies


@pytest.mark.parametrize("name", INNER)
def test_around_a_strategy(name: str, tmp_path: Path) -> None:
    """It trains, and makes of the replies what the same strategy makes of them outside of any federation."""
    calls = list[tuple[int, ArrayRecord, list[Message], Any]]()
    inner = INNER[name]()
    configure, aggregate, models = inner.configure_train, inner.aggregate_train, list[ArrayRecord]()

    def configure_train(t: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
        models.append(record(arrays_of(arrays)))
        return configure(t, arrays, config, grid)

    def aggregate_train(t: int, replies: Iterable[Message]) -> Any:
        kept = [travelled(reply) for reply in replies]
        made = aggregate(t, [travelled(reply) for reply in kept])
        calls.append((t, models[-1], kept, record(arrays_of(made[0]))))
        return made

    inner.configure_train, inner.aggregate_train = configure_train, aggregate_train
    it = Watched(tmp_path, sized(), 4)
    it.run(4, inner)
    assert it.outcomes == [{"replied": 4}] * 4
    assert set(it.downloads(3).values()) == {"chain + chain"}
    again = INNER[name]()
    for t, arrays, replies, wanted in calls:
        again.configure_train(t, arrays, ConfigRecord(), it.grid)
        found, _ = again.aggregate_train(t, replies)
        assert found is not None
        assert same(found, wanted)
    last, _ = it.disks.form.split(arrays_of(calls[-1][3]))  # some strategies compute in float64
    assert last.tobytes() == it.disks.server().x.tobytes()
    assert not same(calls[0][3], calls[-1][3])
    assert not same(it.model, it.disks.form.join(it.w[4], b""))


# Bad input: one sentence each, and nothing is lost


def test_a_compressor_that_does_not_parse(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="compressor_down") as caught:
        Watched(tmp_path, Adding()).run(1, compressor_down="topk(0.9) >> nonsense")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("before", [DOWN, "topk(0.8)", "none"])
@pytest.mark.parametrize("other", ["none", "topk(0.9) >> bf16", "topk(0.95)"])
def test_a_resume_with_another_compressor(before: str, other: str, tmp_path: Path) -> None:
    if before == other:
        return
    it = Watched(tmp_path, Adding())
    it.start(2, compressor_down=before, compressor="topk(0.9)")
    words = rf"`compressor_down` is '{re.escape(other)}', but"
    refuses(it, words, compressor_down=other, compressor="topk(0.9)")
    it.start(3, resume=True, compressor_down=before, compressor="topk(0.9)")
    assert it.outcomes == [{"replied": 3}] * 3


def meddle(it: Watched, change: Callable[[Message], None], at: int = 2) -> None:
    """Change what node 1 gets in a round."""

    def request(node: LocalNode, message: Message) -> Message | None:
        if node.partition == 1 and message.metadata.group_id == str(at):
            change(message)
        return node.answer(message)

    it.grid.on_request = request


def disk(node: LocalNode) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in node.disk.rglob("*.safetensors")}


def check_one_request_lost(it: Watched, app: Adding, cause: str, why: str) -> None:
    """Node 1 says why in one sentence and keeps its disk; in the next round it takes part as before."""
    before = disk(it.nodes[1])
    it.run(2, Summing())
    row = next(row for row in it.of_nodes if (row["round"], row["node"]) == (1, "node1"))
    assert (row["outcome"], row["why"]) == (cause, why)
    assert disk(it.nodes[1]) == before
    it.run(3, Summing())
    assert it.outcomes[2] == {"replied": 3}
    assert it.of_nodes[-1]["incarnation"] == 1
    assert it.downloads(2)["node1"] in ("chain", "changes")


def remove_fields(message: Message) -> None:
    for name in ("copy", "body"):
        del message.content.config_records["cfedavg"][name]


def add_field(message: Message) -> None:
    message.content.config_records["cfedavg"]["later"] = 1


@pytest.mark.parametrize("change", [remove_fields, add_field])
def test_a_server_of_another_version(change: Any, tmp_path: Path) -> None:
    it = Watched(tmp_path, app := Adding())
    it.run(1, Summing())
    meddle(it, change)
    why = "server and node have different cfedavg versions: install the same version on both"
    check_one_request_lost(it, app, "another version", why)


class Order:
    """An order as version 0.5 had it."""

    def __init__(
        self, federation: Any, client: Any, number: Any, generation: Any, stamp: Any, t: Any, mark: Any,
        form: Any, arrays: Any, compressor: Any, feedback: Any, update: Any, seed: Any,
    ) -> None: ...  # fmt: skip


Order.__init__.__qualname__ = "Order.__init__"


def test_a_node_of_version_05(tmp_path: Path) -> None:
    it = Watched(tmp_path, app := Adding())
    it.run(1, Summing())
    meddle(it, lambda message: None)
    real = it.grid.on_request

    def old(node: LocalNode, message: Message) -> Message | None:
        if node.partition != 1 or message.metadata.group_id != "2":
            return real(node, message)
        try:
            Order(**message.content.config_records["cfedavg"])
        except TypeError as raised:
            return error(2, f"{type(raised)}:<'{raised}'>", message)
        raise AssertionError

    it.grid.on_request = old
    why = "the node has an older version of cfedavg than the server: install the same version on both"
    check_one_request_lost(it, app, "another version", why)


@pytest.mark.parametrize("short", [32_768, 0])
def test_a_damaged_body(short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere or with any bit changed, in the order or in an array, for a model and for statistics."""
    model = LARGE | {"n.running_mean": np.ones(6, np.float32)}
    monkeypatch.setattr("cfedavg.flower.rounds.SHORT", short)
    it = Watched(tmp_path, app := Adding(), model=model)
    it.run(1, Summing())
    before, draw, answers = disk(it.nodes[1]), random.Random(0), list[Message]()

    def damage_body(node: LocalNode, message: Message) -> Message | None:
        if node.partition != 1 or message.metadata.group_id != "2":
            return node.answer(message)
        for i in range(40):
            broken = travelled(message)
            spoil_body(broken, cut=i % 2 == 0, draw=draw)
            answers.append(node.answer(broken))
            assert disk(node) == before
        return answers[-1]

    it.grid.on_request = damage_body
    it.run(2, Summing())
    assert len(answers) == 40
    assert {reply.has_error() for reply in answers} == {True}
    assert all(reply.error.reason.startswith("the request is damaged: ") for reply in answers)
    assert it.outcomes[1] == {"replied": 2, "state": 1}
    assert (1, 2) not in app.calls
    it.run(3, Summing())
    assert it.outcomes[2] == {"replied": 3}


def spoil_body(message: Message, *, cut: bool, draw: random.Random) -> None:
    """Cut the body of a request short, or change one of its bits."""
    config = message.content.config_records["cfedavg"]
    within = config["body"]
    data = bytearray(within or message.content["arrays"]["body"].numpy().tobytes())
    if cut:
        del data[draw.randrange(len(data)) :]
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    if within:
        config["body"] = bytes(data)
    else:
        message.content["arrays"] = record({"body": np.frombuffer(bytes(data), np.uint8)})


@pytest.mark.parametrize(
    ("down", "more", "why"),
    [
        (DOWN, Body(b"", b"12"), "its uncompressed arrays must have 0 bytes, got 2"),
        ("none", Body(b"1234", b""), "its vector x must have 2024 float32 values"),
    ],
)
def test_a_body_of_another_length(down: str, more: Body, why: str, tmp_path: Path) -> None:
    """It is well formed, but the uncompressed statistics or the model are those of another model."""
    it = Watched(tmp_path, Adding(), dtype="float32" if down == "none" else "int16")

    def lengthen(message: Message) -> None:
        config = message.content.config_records["cfedavg"]
        body = Body.unpack(bytes(config["body"]))  # type: ignore[arg-type]
        config["body"] = Body(body.broadcast + more.broadcast, body.uncompressed + more.uncompressed).pack()

    meddle(it, lengthen)
    it.start(2, Summing(), **ROUNDED | {"compressor_down": down})
    assert it.outcomes == [{"replied": 3}, {"replied": 2, "state": 1}]
    assert it.of_nodes[4]["why"] == f"the request is damaged: {why}"


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_disk_is_full(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent, and the copy is as it was: the next broadcast brings it up to date."""
    it = Watched(tmp_path, Adding())
    real, full = tensors.save_file, [False]

    def save(found: Any, path: Path, metadata: Any = None) -> None:
        if full[0] and it.nodes[1].disk in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(found, path, metadata)

    def request(node: LocalNode, message: Message) -> Message | None:
        order = (message.metadata.message_type, message.metadata.group_id)
        before, full[0] = disk(node), order == (kind, "2")
        reply = node.answer(message)
        assert not (full[0] and node.partition == 1) or disk(node) == before
        refused = reply.has_error() and "No space left on device" in reply.error.reason
        assert refused is (full[0] and node.partition == 1)
        full[0] = False
        return reply

    it.grid.on_request = request
    monkeypatch.setattr("cfedavg.core.tensors.save_file", save)
    it.run(3, FedAvg())
    lost = {"replied": 2, "state": 1} if kind == "train" else {"replied": 3}
    assert it.outcomes == [{"replied": 3}, lost, {"replied": 3}]
    versions = {(row["round"], row["node"]): row["version"] for row in it.of_nodes}
    assert versions[1, "node1"] == ("1.2" if kind == "train" else "1.1")
    assert versions[1, "node0"] == "1.2"
    assert set(it.downloads(2).values()) == {"chain + chain"}
    assert all("client_total" in row for row in it.rows)


@pytest.mark.parametrize("down", [DOWN, "topk(0.9)", "int4(64)"])
def test_a_model_too_large_to_broadcast(down: str, tmp_path: Path) -> None:
    """It is finite, but its copy or the way to it is not: the round is void, and the run goes on."""
    signs = iter((1, -1, 1))
    inner = Misshapen(lambda arrays: {**arrays, "b": np.full(24, next(signs) * 3.4e38, np.float32)})
    it = Watched(tmp_path, Adding())
    found = it.start(3, inner, compressor="topk(0.9)", compressor_down=down, max_norm=math.inf)
    assert same(found.arrays, it.model)
    why = "the model made from the replies holds 3.4e+38, above 1e+36: lower the rate, or set max_norm"
    assert {row["why"] for row in it.of_nodes} == {why}


def test_a_first_model_too_large_to_broadcast(tmp_path: Path) -> None:
    it = Watched(tmp_path, Adding(), model=LARGE | {"b": np.full(24, -3.4e38, np.float32)})
    with pytest.raises(InputError, match=r"`initial_arrays`: 'b' must not hold a number above 1e\+36"):
        it.run(1)
