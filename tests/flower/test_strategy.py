"""CFedAvg on Flower where nothing breaks: equal to a simulation, with nodes that come and go."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file
from torch import nn

import cfedavg
from cfedavg import InputError
from cfedavg.core.config import Config, read_config
from cfedavg.core.run_files import ResidualNorms, read_rows
from cfedavg.data.tasks import build_task
from cfedavg.federate.stores import ServerStore
from cfedavg.flower import CFedAvg, RoundPolicy
from cfedavg.flower.federation_state import FederationState, Numbers
from cfedavg.flower.nodes import OnlineNodes
from cfedavg.launch.app import TRUST, client, config_of, run_config_of, server
from tests.grid import (
    MODEL,
    Adding,
    Disks,
    Federation,
    LocalGrid,
    LocalNode,
    ServerKilled,
    Summing,
    arrays_of,
    numbers,
    reply_with,
    same,
)

pytestmark = pytest.mark.usefixtures("without_waiting")


# A federation and a simulation


def with_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.BatchNorm1d(8), nn.Linear(8, classes)
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "everyone": {},
    "the whole model down": {"compressor_down": "none"},
    "a copy in float32": {"compressor_down": "topk(0.9)"},
    "keyed masks down": {"compressor_down": "rd(0.9) >> bf16", "clients": 6, "participation": 0.5},
    "half of them": {"clients": 6, "participation": 0.5, "rounds": 4},
    "keyed masks": {"compressor": "rd(0.9)"},
    "bf16": {"compressor": "topk(0.95) >> bf16", "model": "mlp"},
    "random rounding": {"compressor": "qsgd(16)"},
    "in chunks": {
        "compressor": "topk(chunk=4096, k=64) >> int2",
        "compressor_down": "topk(chunk=64, k=8) >> int2(64)",
    },
    "a warm-up": {"compressor": "topk(0.99, warmup=2)"},
    "a bound": {"compressor": "topk(hold=1.5)", "compressor_down": "none", "rounds": 4},
    "low rank": {"compressor": "lowrank(2) >> bf16", "compressor_down": "lowrank(8)", "model": "mlp"},
    "a rotation": {"compressor": "eden(1, unbiased=false)", "compressor_down": "eden(4, unbiased=false)"},
    "by tensor": {"compressor": "topk(0.99, per_tensor=true) >> int4(64)", "model": "mlp"},
    "without feedback": {"feedback": "none"},
    "K by chance": {"local_steps": "5..9"},
    "K by client": {"local_steps": "1,2,3,4", "eta": 2.0},
    "momentum": {"local_optimiser": "sgd(momentum=0.9, weight_decay=0.01)"},
    "nesterov, local": {"local_optimiser": "prox(0.1) >> clip(1.0) >> sgd(momentum=0.9, nesterov=true)"},
    "local adamw": {"local_optimiser": "adamw(0.1)", "eta_local": 0.01},
    "an optimiser of one's own": {"local_optimiser": "tests.own_parts:Halve >> tests.own_parts:SignDescent"},
    "adam": {"server_optimiser": "adam"},
    "nesterov": {"server_optimiser": "nesterov(0.5)"},
    "a server of one's own": {"server_optimiser": "tests.own_parts:Lookahead"},
    "decay": {"feedback": "ef(decay=0.9)"},
    "ef21": {"feedback": "ef21", "rounds": 4},
    "step ahead": {"feedback": "sapef(0.5)", "rounds": 4},
    "FedNova": {"update": "fednova", "local_steps": "1,2,3,4", "local_optimiser": "sgd(momentum=0.9)"},
    "FedNova by samples": {
        "update": "fednova",
        "weighting": "samples",
        "dirichlet": 0.5,
        "local_steps": "2..5",
    },
    "ef21, half of them": {"feedback": "ef21", "clients": 6, "participation": 0.5, "rounds": 4},
    "by samples": {"weighting": "samples", "dirichlet": 0.5, "schedule": "decaying(2)"},
    "batch norm": {"model": "tests.flower.test_strategy:with_norm"},
    "a selector of one's own": {"compressor": "tests.compress.test_compress:EveryNth(2) >> bf16"},
}
# What a server can know; it does not see the updates themselves, nor how long a message is in a simulation.
ALIKE = {
    "round", "train_loss", "coordinates_sent", "model_sizes_sent", "delta_norm2", "delta_norm", "snr_min",
    "snr_mean", "left_norm", "local_steps_min", "local_steps_mean", "local_steps_max", "clients", "lost",
    "error_norm2", "error_norm", "simulated_seconds", "test_loss", "test_accuracy", "client_accuracy_mean",
    "client_accuracy_min", "copy_gap_norm2", "downlink_messages", "whole_downloads",
}  # fmt: skip
# What differs by the order that goes with every request, by the clock, and what only a simulation measures.
UNLIKE = {
    "alpha", "uplink_bytes", "downlink_bytes", "total_bytes", "first_download_bytes", "seconds",
    "server_test_loss", "server_test_accuracy",
}  # fmt: skip


def federated(config: Config, folder: Path, nodes: int | None = None, **more: Any) -> Path:
    """The app's own server and clients."""
    given = run_config_of(config) | {"out": str(folder / "out")} | more
    numbers = range(config.clients if nodes is None else nodes)
    here = [LocalNode(100 + i, client.app, folder / f"n{i}", given, i) for i in numbers]
    server.main(LocalGrid(here), Context(1, 1, {}, RecordDict(), given))
    return folder / "out"


@pytest.mark.parametrize("name", SETTINGS)
def test_as_simulated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "build_task", functools.cache(build_task))
    settings = {"clients": 4, "rounds": 3, "model": "linear", "local_steps": "3"} | SETTINGS[name]
    if "dirichlet" not in settings:
        settings["classes_per_client"] = 2
    config = Config(eval_every=settings["rounds"], **settings)
    if config.names_code:
        monkeypatch.setenv(TRUST, "1")
    assert config_of(run_config_of(config)) == config
    out = federated(config, tmp_path)
    simulated = cfedavg.run(config.replace(engine="reference"), out=tmp_path / "sim", draw=False)
    one, other = load_file(out / "model.safetensors"), load_file(tmp_path / "sim" / "model.safetensors")
    assert one.keys() == other.keys()
    for part in one:
        assert one[part].dtype == other[part].dtype
        if "running" in part:  # averaged in another precision
            torch.testing.assert_close(one[part], other[part], rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(one[part], other[part]), part
    for row, wanted in zip(read_rows(out / "metrics.jsonl"), simulated.rows, strict=True):
        assert set(wanted) - ALIKE <= UNLIKE
        found = {column: row.get(column) for column in ALIKE & set(wanted)}
        inexact = pytest.approx if "batch norm" in name else lambda value: value
        assert found == {column: inexact(wanted[column]) for column in found}
        assert 0 < row["uplink_bytes"] - wanted["uplink_bytes"] < 2000 * row["clients"]
        assert 0 < row["downlink_bytes"] - wanted["downlink_bytes"] < 2000 * row["clients"]


def test_a_configuration_counts_those_who_did_not_come(tmp_path: Path) -> None:
    config = Config(clients=4, rounds=1, model="linear", local_steps="1", classes_per_client=2)
    out = federated(config, tmp_path, nodes=3, **{"min-nodes": 3})
    assert read_config(out / "config.toml").clients == 4


# Who takes part


def test_over_selection(tmp_path: Path) -> None:
    """The last are not waited for, and what they sent is sent again."""
    it = Federation(tmp_path, (app := Adding()).app, 6)
    disks = Disks(it)
    it.start(12, policy=RoundPolicy(participation=0.3, over_selection=0.5))
    for row in it.rows:
        assert sum(t == row["round"] + 1 for _, t in app.calls) == row["clients"] == 3
        assert row["outcomes"] == {"late": 1, "replied": 2}
    asked = [frozenset(i for i, t in app.calls if t == row["round"] + 1) for row in it.rows]
    assert len(set(asked)) > 5
    assert {row["outcome"] for row in it.of_nodes if not row["applied"]} == {"late"}
    # A round takes two: their mean is half of their sum, exactly.
    total = 2 * disks.x() + disks.masses()
    assert np.array_equal(total, disks.update(*app.calls))


@pytest.mark.parametrize(("more", "asked"), [(0.0, 2), (0.1, 3)])
def test_how_many_are_asked(more: float, asked: int, tmp_path: Path) -> None:
    """Of 7 a share of 0.3 is 2; of those that are asked besides, a part is one as well."""
    it = Federation(tmp_path, Adding().app, 7)
    it.start(1, policy=RoundPolicy(participation=0.3, over_selection=more))
    (row,) = it.rows
    assert (row["clients"], row["clients"] - row["lost"]) == (asked, 2)
    late = [row["why"] for row in it.of_nodes if row["outcome"] == "late"]
    assert late == ["it was not waited for"] * (asked - 2)


def test_a_round_ends_when_all_is_there(tmp_path: Path) -> None:
    """A reply may take its time, until the deadline; a message that could not be sent is not waited for."""
    it = Federation(tmp_path, Adding().app, 3)
    held: list[Message] = []
    pulls: list[int] = []

    def pull() -> None:
        pulls.append(len(held))
        if len(pulls) == 5:
            it.grid.stray = held[:1]

    it.grid.on_reply = lambda node, request, reply: held.append(reply) if node.partition == 1 else reply
    it.grid.before_pull = pull
    it.start(1, timeout=1000.0)
    assert pulls == [1] * 5
    assert it.outcomes == [{"replied": 3}]
    assert {request.metadata.ttl for _, request in it.grid.requests} == {1000.0}

    it.grid.on_reply, real = lambda node, request, reply: reply, it.grid.push_messages
    it.grid.push_messages = lambda messages: ["", *real(messages)[1:]]  # type: ignore[method-assign]
    it.start(2, timeout=1000.0, resume=True)
    assert it.outcomes[1] == {"late": 1, "replied": 2}


def test_a_quorum_fails(tmp_path: Path) -> None:
    """The round changes nothing, and nothing of it is lost."""
    it = Federation(tmp_path, (app := Adding()).app, 4)
    heard: dict[int, int] = {0: 4, 1: 1, 2: 2, 3: 0}
    it.grid.on_reply = lambda node, request, reply: (
        reply if node.partition < heard.get(int(request.metadata.group_id) - 1, 4) else None
    )
    models = []
    it.start(5, compressor="none", evaluate_fn=lambda t, arrays: models.append(arrays_of(arrays)))
    assert it.outcomes == [
        {"replied": 4}, {"late": 3, "replied": 1}, {"late": 2, "replied": 2}, {"late": 4}, {"replied": 4},
    ]  # fmt: skip
    assert same(models[1], models[2])
    assert same(models[3], models[4])
    assert [row["lost"] for row in it.rows] == [0, 4, 2, 4, 0]
    assert not any(row["applied"] for row in it.of_nodes if row["round"] in (1, 3))
    steps = [b["w"] - a["w"] for a, b in itertools.pairwise(models)]
    total = sum(numbers(*call)["w"] for call in app.calls)
    np.testing.assert_array_equal(4 * steps[0] + 2 * steps[2] + 4 * steps[4], total)
    assert [row["age"] for row in it.of_nodes if row["node"] == "node3"] == [0, 1, 2, 3, 0]


def test_a_quorum_is_of_those_needed(tmp_path: Path) -> None:
    """Not of those asked besides; and who did not reply in time is not told that the round was void."""
    it = Federation(tmp_path, Adding().app, 4)
    it.grid.on_reply = lambda node, request, reply: reply if node.partition == 0 else None
    it.start(1, policy=RoundPolicy(participation=0.5, over_selection=1.0))
    assert it.outcomes == [{"late": 3, "replied": 1}]
    assert it.of_nodes[0]["applied"]
    it.start(2, resume=True)
    assert it.outcomes[1] == it.outcomes[0]
    assert not it.of_nodes[4]["applied"]
    late = ["no reply within 1e-09 s"] * 3
    assert [row["why"] for row in it.of_nodes[4:]] == ["1 of 4 replies: less than the quorum", *late]


def dropping(it: Federation, rate: float) -> None:
    """This share of requests is lost: the node dies before or after it trains."""
    draw, each = random.Random(7), 1 - math.sqrt(1 - rate)

    def request(node: LocalNode, message: Message) -> Message | None:
        before, after = (draw.random() < each for _ in range(2))
        reply = None if before else node.answer(message)
        return None if after else reply

    it.grid.on_request = request


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_nodes_drop_out_all_the_time(rate: float, tmp_path: Path) -> None:
    """Every round ends, with a quorum or void, and at the end nothing of what was trained is missing."""
    it = Federation(tmp_path, (app := Adding()).app, 10)
    disks = Disks(it)
    dropping(it, rate)
    it.start(100, Summing(), policy=RoundPolicy(quorum=0.75))
    assert [row["round"] for row in it.rows] == list(range(100))
    replied = [row["outcomes"].get("replied", 0) for row in it.rows]
    assert sum(replied) == pytest.approx(1000 * (1 - rate), abs=50)
    void = sum(row["lost"] == 10 for row in it.rows)
    assert void == sum(count < 7.5 for count in replied)
    assert (void > 10) is (rate > 0.2)
    assert np.array_equal(disks.update(*app.calls), disks.x() + disks.masses())


def test_over_selection_makes_up_for_drop_outs(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app, 10)
    dropping(it, 0.3)
    it.start(40, policy=RoundPolicy(participation=0.5, over_selection=1.0))
    full = sum(row["clients"] - row["lost"] == 5 for row in it.rows)
    assert full >= 34  # 38 are expected; if only five were asked, 7


def test_clocks_may_be_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at a clock is wrong by up to a day: only durations count."""
    first, second = (Federation(tmp_path / name, Adding().app) for name in ("right", "wrong"))
    wanted = first.start(5)
    draw, right, pull, pulls = random.Random(0), time.time, second.grid.pull_messages, itertools.count()
    second.grid.pull_messages = lambda ids: pull(ids) if next(pulls) % 4 == 3 else []  # type: ignore[method-assign]
    monkeypatch.setattr(time, "time", lambda: right() + draw.uniform(-86_400, 86_400))
    assert same(second.start(5, timeout=1000.0).arrays, wanted.arrays)
    assert first.outcomes == second.outcomes == [{"replied": 3}] * 5


@pytest.mark.parametrize("feedback", ["ef", "none"])
def test_what_is_lost(feedback: str, tmp_path: Path) -> None:
    """Without feedback nothing is kept, so that a lost reply is."""
    it = Federation(tmp_path, (app := Adding()).app, 2)
    disks = Disks(it)
    it.grid.on_reply = lambda node, request, reply: (
        None if node.partition and request.metadata.group_id == "2" else reply
    )
    models: list[Any] = []
    it.start(
        3,
        compressor="none",
        feedback=feedback,
        evaluate_fn=lambda t, arrays: models.append(arrays_of(arrays)["w"]),
    )
    steps = [b - a for a, b in itertools.pairwise(models)]
    missing = 0 if feedback == "ef" else numbers(1, 2)["w"]
    total = sum(numbers(*call)["w"] for call in app.calls)
    np.testing.assert_array_equal(2 * steps[0] + steps[1] + 2 * steps[2], total - missing)
    assert not any(disks.mass(node).any() for node in it.nodes)
    assert {(row["local_steps_min"], row["train_loss"]) for row in it.rows} == {(None, None)}  # unsaid


def test_nodes_come_and_go(tmp_path: Path) -> None:
    it = Federation(tmp_path, (app := Adding()).app, 4)
    gone = it.nodes[2]

    def at(t: int, _: Any) -> None:
        gone.online = t not in (1, 2)

    it.start(2, evaluate_fn=at)
    assert it.outcomes == [{"replied": 4}, {"replied": 3}]
    gone.online = True
    it.grid.before_push = lambda: setattr(gone, "online", False)  # between sampling and sending
    it.start(3, resume=True)
    assert it.outcomes[2] == {"lost": 1, "replied": 3}
    it.grid.before_push = lambda: None
    gone.online = True

    def dies(node: LocalNode, message: Message) -> Message | None:
        node.online = node is not gone
        return node.answer(message) if node.online else None

    it.grid.on_request = dies  # without a word
    it.start(4, resume=True)
    assert it.outcomes[3] == {"lost": 1, "replied": 3}
    it.grid.on_request = lambda node, message: node.answer(message)
    gone.online = True
    it.start(5, resume=True)
    assert it.outcomes[4] == {"replied": 4}
    last = it.of_nodes[-2]
    assert (last["node"], last["number"], last["incarnation"], last["age"]) == ("node2", 2, 1, 0)
    assert app.calls.count((2, 2)) == app.calls.count((2, 3)) == 0


def test_numbers_stay(tmp_path: Path) -> None:
    """A client that comes later gets the next number, and each keeps its own after a restart."""
    it = Federation(tmp_path, Adding().app, 12)
    for node in it.nodes[:3]:
        node.online = False
    it.start(1)
    for node in it.nodes:
        node.online = not node.online
    it.start(2, resume=True)
    for node in it.nodes:
        node.online = True
    it.start(3, resume=True)
    found = {row["node"]: row["number"] for row in it.of_nodes if row["round"] == 2}
    assert found == {f"node{i}": i - 3 if i > 2 else 9 + i for i in range(12)}
    for row in it.of_nodes:
        assert row["number"] == found[row["node"]]


def test_who_never_delivered_leaves_nothing_behind(tmp_path: Path) -> None:
    """A node without a key is new after every restart; the numbers of those that are gone are given again."""
    it = Federation(tmp_path, Adding().app, 3)

    def restart(t: int, _: Any) -> None:
        silent = LocalNode(500 + t, Adding().app, tmp_path / "silent", {}, 9)
        it.grid.nodes = {node.id: node for node in (*it.nodes, silent)}

    it.grid.on_request = lambda node, message: None if node.partition == 9 else node.answer(message)
    it.start(6, evaluate_fn=restart)
    assert len({row["identity"] for row in it.of_nodes}) == 9
    assert {row["number"] for row in it.of_nodes} == {0, 1, 2, 3, 4}
    served = ServerStore(it.out / "state", Disks(it).federation, Disks(it).form.layout).load()
    assert served is not None
    assert len(served.clients) == len(served.server.applied) == 3
    assert len(FederationState.from_stored(served).lent) <= 1
    assert read_config(it.out / "config.toml").clients <= 5


def test_lent_numbers() -> None:
    """The lowest that are free, in the order of asking, whatever was lent before."""
    numbers = Numbers({"a": 1, "b": 4}, {"c": 0})
    assert [numbers.of(who) for who in "abcdefg"] == [1, 4, 0, 2, 3, 5, 6]
    numbers.settle(["e"], {"c", "g"})
    assert numbers.kept == {"a": 1, "b": 4, "e": 3}
    assert numbers.lent == {"c": 0, "g": 6}
    assert [numbers.of(who) for who in "fdh"] == [2, 5, 7]
    assert len(numbers) == 8


def test_residuals_are_added_up_exactly() -> None:
    """What a client said before is taken out again: the means are those of a sum that is made anew."""
    draw = random.Random(0)
    said: dict[int, float | None] = {}
    residuals = ResidualNorms()
    for _ in range(500):
        who, value = (
            draw.randrange(40),
            draw.choice([None, 0.0, draw.random() * 10.0 ** draw.randint(-300, 99)]),
        )
        residuals = residuals.add([said.get(who)], -1).add([value])
        said[who] = value
        known = [each for each in said.values() if each is not None]
        sums = math.fsum(known), math.fsum(map(math.sqrt, known))
        assert residuals.columns(50) == {"error_norm2": sums[0] / 50, "error_norm": sums[1] / 50}
    assert ResidualNorms().add(said.values()) == residuals


def test_numbers_outlive_a_kill(tmp_path: Path) -> None:
    """They are durable before anyone is told: what a client has answered, it answered by its number."""
    it = Federation(tmp_path, (app := Adding()).app, 3)
    it.nodes[0].online = False

    def die() -> None:
        raise ServerKilled

    it.grid.before_pull = die
    with pytest.raises(ServerKilled):
        it.start(1)
    it.nodes[0].online, it.grid.before_pull = True, lambda: None
    it.start(1, resume=True)
    assert {row["node"]: row["number"] for row in it.of_nodes} == {"node0": 2, "node1": 0, "node2": 1}
    assert it.outcomes == [{"replied": 3}]
    assert len(app.calls) == 3


def test_numbers_of_those_who_come_later_outlive_a_kill(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app, 4)
    late, other = it.nodes[0], it.nodes[1]
    late.online = other.online = False

    def die() -> None:
        raise ServerKilled

    def at(t: int, _: Any) -> None:
        late.online = t == 1
        it.grid.before_pull = die if t == 1 else lambda: None

    with pytest.raises(ServerKilled):
        it.start(2, evaluate_fn=at)
    it.grid.before_pull = lambda: None
    late.online, other.online = False, True
    it.start(2, resume=True)
    assert {row["node"]: row["number"] for row in it.of_nodes} == {"node2": 0, "node3": 1, "node1": 3}


@pytest.mark.parametrize("rounds", [0, -1, 1.5])
def test_rounds_are_counted(rounds: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"`num_rounds` must be an integer of at least 1, got {rounds}"):
        Federation(tmp_path, Adding().app).start(rounds)


def test_one_node_is_too_few(tmp_path: Path) -> None:
    """One node is enough only if `min_nodes` says so."""
    it = Federation(tmp_path, Adding().app, 1)
    with pytest.raises(InputError, match="`min_nodes` is 2, but only 1"):
        it.start(1)
    it.start(1, resume=True, policy=RoundPolicy(min_nodes=1))


def test_too_few_nodes(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app, 2)
    with pytest.raises(InputError, match=r"`min_nodes` is 3, but only 2 nodes came online within 0.01 s"):
        it.start(1, timeout=0.01, policy=RoundPolicy(min_nodes=3))
    it.start(1, resume=True, policy=RoundPolicy(min_nodes=2))


@pytest.mark.parametrize("quorum", [0.0, 0.5])
def test_nobody_answers(quorum: float, tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.grid.on_request = lambda node, message: None
    result = it.start(3, policy=RoundPolicy(quorum=quorum))
    assert same(result.arrays, MODEL)
    assert it.outcomes == [{"late": 3}] * 3
    assert {row["age"] for row in it.of_nodes} == {None}


def test_nobody_is_asked(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    result = it.start(2, FedAvg(fraction_train=0.0, fraction_evaluate=0.0))
    assert same(result.arrays, MODEL)
    assert it.outcomes == [{}, {}]


def test_who_a_node_is() -> None:
    """By its key, whatever number Flower gives it; without one it is new after every restart."""
    grid, known = LocalGrid([]), Numbers()

    def seen(*nodes: tuple[int, bytes]) -> list[tuple[int, int]]:
        found = [SimpleNamespace(node_id=i, public_key=key, name="") for i, key in nodes]
        grid.get_nodes = lambda: found  # type: ignore[method-assign]
        return [(node.id, node.number) for node in OnlineNodes(grid, known).find()]

    assert [n for _, n in seen((5, b"a"), (6, b"b"), (7, b""))] == [0, 1, 2]
    again = dict(seen((8, b"b"), (9, b"a"), (10, b"")))
    assert {again[8], again[9]} | {again[10]} == {*(n for _, n in seen((5, b"a"), (6, b"b"))), 3}


def test_training_diverges(tmp_path: Path) -> None:
    """Without a bound the round is void, and the next one begins from the same model; with one nobody gets
    that far, and a client whose residual could never be sent starts again without it."""
    app = Adding()
    for i in (0, 1):
        app.spoil[i] = lambda arrays, metrics, message: reply_with(
            {**arrays, "b": np.full(5, 3e38, np.float32)}, metrics, message
        )
    it = Federation(tmp_path, app.app)
    assert same(it.start(1, compressor="none", max_norm=math.inf).arrays, MODEL)
    assert {row["why"] for row in it.of_nodes} == {
        "the model made from the replies is NaN or infinite: lower the rate, or set max_norm"
    }
    assert same(it.start(2, compressor="none", resume=True).arrays, MODEL)
    app.spoil = {}
    it.start(4, compressor="none", resume=True)
    assert it.outcomes == [{"replied": 3}, {"replied": 1, "too large": 2}, {"replied": 3}, {"replied": 3}]
    assert all(row["applied"] for row in it.of_nodes[-6:])


def test_uncompressed_arrays_diverge(tmp_path: Path) -> None:
    """Each is finite, and so is their mean, though their sum is not."""
    app = Adding()
    app.spoil = dict.fromkeys(
        range(3), lambda arrays, metrics, message: reply_with({**arrays, "d": near}, metrics, message)
    )
    near = np.array([1.7e308, 1.0])
    it = Federation(tmp_path, app.app, 3, {**MODEL, "d": np.zeros(2)})
    app.spoil[0] = lambda arrays, metrics, message: reply_with({**arrays, "d": near / 2}, metrics, message)
    found = it.start(1, max_norm=math.inf).arrays["d"].numpy()
    np.testing.assert_allclose(found, [1.7e308 / 6 * 5, 5 / 6])
    it.start(2, resume=True)
    assert it.outcomes[1] == {"too large": 3}
    assert it.of_nodes[-1]["why"] == "an uncompressed array holds 1.7e+308, at most 1e+15 is allowed"


def test_evaluation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The model at the start is evaluated once."""
    it, seen = Federation(tmp_path, Adding().app), list[int]()
    for rounds in (1, 2):
        it.start(rounds, resume=True, evaluate_fn=lambda t, _: seen.append(t))
    assert seen == [0, 1, 2]


def test_a_rate_of_numpys(tmp_path: Path) -> None:
    """A function of the round that gives float64 must not make the model float64."""
    it = Federation(tmp_path, Adding().app)
    it.start(3, eta=lambda t: 1 / np.sqrt(1 + t))
    it.start(5, eta=np.float64(0.5), resume=True)
    assert it.outcomes == [{"replied": 3}] * 5
    assert Disks(it).server().x.dtype == np.float32


def sum_of_memories(it: Federation) -> tuple[np.ndarray, np.ndarray]:
    """What the server knows of ef21, and what its clients do."""
    disks = Disks(it)
    served = ServerStore(it.out / "state", disks.federation, disks.form.layout).load()
    assert served is not None
    clients = [disks.client(node) for node in it.nodes]
    return served.extra["server/feedback"], np.sum([client.memory for client in clients if client], 0)


def test_ef21_through_losses_resumes_and_bounds(tmp_path: Path) -> None:
    """Server and clients know the same after lost replies, void rounds, a resume and a smaller max_norm."""
    it = Federation(tmp_path, Adding().app, 4)
    it.grid.on_reply = lambda node, request, reply: (
        None if (int(request.metadata.group_id) + node.partition) % 3 == 0 else reply
    )
    it.start(5, feedback="ef21", compressor="topk(0.7)", timeout=0.01)
    it.start(8, feedback="ef21", compressor="topk(0.7)", timeout=0.01, resume=True, max_norm=1e-3)
    it.grid.on_reply = lambda node, request, reply: reply
    it.start(9, feedback="ef21", compressor="topk(0.7)", resume=True, max_norm=math.inf)
    assert it.outcomes[-1] == {"replied": 4}
    np.testing.assert_allclose(*sum_of_memories(it), rtol=1e-5, atol=1e-4)


def test_ef21_and_a_backup(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`from_backup` must not be given with the feedback ef21"):
        CFedAvg(feedback="ef21", out=tmp_path, resume=True, from_backup=True)
