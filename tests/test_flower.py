"""CFedAvg on Flower where nothing breaks: equal to a simulation, in any app, with any nodes."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load_file
from torch import nn

import cfedavg
from cfedavg import InputError
from cfedavg.config import Config
from cfedavg.data.tasks import build_task
from cfedavg.flower import CFedAvg, compressed
from cfedavg.flower.app import client, server
from cfedavg.flower.app.settings import config_of, run_config_of
from cfedavg.flower.mod import state_folder
from cfedavg.flower.nodes import online
from cfedavg.folder import read_rows
from tests.grid import (
    MODEL,
    Adding,
    Disks,
    Federation,
    LocalGrid,
    LocalNode,
    ServerKilled,
    arrays_of,
    numbers,
    record,
    reply_with,
    same,
    without_waiting,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_waiting(monkeypatch)


# A federation and a simulation


def with_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.BatchNorm1d(8), nn.Linear(8, classes)
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "everyone": {},
    "half of them": {"clients": 6, "participation": 0.5, "rounds": 4},
    "keyed masks": {"compressor": "rd(0.9)"},
    "bf16": {"compressor": "topk(0.95) >> bf16", "model": "mlp"},
    "random rounding": {"compressor": "qsgd(16)"},
    "by tensor": {"compressor": "topk(0.99, per_tensor=true) >> int4(64)", "model": "mlp"},
    "without feedback": {"error_feedback": False},
    "K by chance": {"local_steps": "5..9"},
    "K by client": {"local_steps": "1,2,3,4", "eta": 2.0},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "by samples": {"weighting": "samples", "dirichlet": 0.5, "schedule": "decaying(2)"},
    "batch norm": {"model": "tests.test_flower:with_norm"},
}
# What a server can know; it does not see the updates themselves, nor how long a message is in a simulation.
ALIKE = {
    "round", "train_loss", "coordinates_sent", "model_sizes_sent", "delta_norm2", "delta_norm", "snr_min",
    "snr_mean", "local_steps_min", "local_steps_mean", "local_steps_max", "clients", "lost", "error_norm2",
    "error_norm", "simulated_seconds", "test_loss", "test_accuracy", "client_accuracy_mean",
    "client_accuracy_min",
}  # fmt: skip


def federated(config: Config, folder: Path, **more: Any) -> Path:
    """The app's own server and clients."""
    given = run_config_of(config) | {"out": str(folder / "out")} | more
    nodes = [LocalNode(100 + i, client.app, folder / f"n{i}", given, i) for i in range(config.clients)]
    server.main(LocalGrid(nodes), Context(1, 1, {}, RecordDict(), given))
    return folder / "out"


@pytest.mark.parametrize("name", SETTINGS)
def test_as_simulated(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "build_task", functools.cache(build_task))
    settings = {"clients": 4, "rounds": 3, "model": "linear", "local_steps": "3"} | SETTINGS[name]
    if "dirichlet" not in settings:
        settings["classes_per_client"] = 2
    config = Config(eval_every=settings["rounds"], **settings)
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
        assert set(wanted) - ALIKE <= {"alpha", "uplink_bytes", "downlink_bytes", "seconds"}
        found = {column: row.get(column) for column in ALIKE & set(wanted)}
        inexact = pytest.approx if "batch norm" in name else lambda value: value
        assert found == {column: inexact(wanted[column]) for column in found}
        assert 0 < row["uplink_bytes"] - wanted["uplink_bytes"] < 400 * row["clients"]
        assert 0 < row["downlink_bytes"] - wanted["downlink_bytes"] < 400 * row["clients"]


# Who takes part


def test_over_selection(tmp_path: Path) -> None:
    """The last are not waited for, and what they sent is sent again."""
    it = Federation(tmp_path, (app := Adding()).app, 6)
    disks = Disks(it)
    it.start(12, participation=0.3, over_selection=0.5)
    for row in it.rows:
        assert sum(t == row["round"] + 1 for _, t in app.calls) == row["clients"] == 3
        assert row["outcomes"] == {"late": 1, "replied": 2}
    asked = [frozenset(i for i, t in app.calls if t == row["round"] + 1) for row in it.rows]
    assert len(set(asked)) > 5
    assert {row["outcome"] for row in it.of_nodes if not row["applied"]} == {"late"}
    # A round takes two: their mean is half of their sum, exactly.
    total = 2 * disks.x() + torch.stack([disks.mass(node) for node in it.nodes]).sum(0)
    assert torch.equal(total, disks.update(*app.calls))


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
    steps = [b["w"] - a["w"] for a, b in pairwise(models)]
    total = sum(numbers(*call)["w"] for call in app.calls)
    np.testing.assert_array_equal(4 * steps[0] + 2 * steps[2] + 4 * steps[4], total)
    assert [row["age"] for row in it.of_nodes if row["node"] == "node3"] == [0, 1, 2, 3, 0]


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
    it.start(4, resume=True)
    assert it.outcomes[3] == {"replied": 4}
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


def test_too_few_nodes(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app, 2)
    with pytest.raises(InputError, match=r"min_nodes = 3, but only 2 nodes came online within 0.01 s"):
        it.start(1, min_nodes=3, timeout=0.01)
    it.start(1, min_nodes=2, resume=True)


@pytest.mark.parametrize("quorum", [0.0, 0.5])
def test_nobody_answers(quorum: float, tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.grid.on_request = lambda node, message: None
    result = it.start(3, quorum=quorum)
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
    grid, known = LocalGrid([]), dict[str, int]()

    def seen(*nodes: tuple[int, bytes]) -> list[tuple[int, int]]:
        found = [SimpleNamespace(node_id=i, public_key=key, name="") for i, key in nodes]
        grid.get_nodes = lambda: found  # type: ignore[method-assign]
        return [(node.id, node.number) for node in online(grid, known)]

    assert [n for _, n in seen((5, b"a"), (6, b"b"), (7, b""))] == [0, 1, 2]
    again = dict(seen((8, b"b"), (9, b"a"), (10, b"")))
    assert {again[8], again[9]} | {again[10]} == {*(n for _, n in seen((5, b"a"), (6, b"b"))), 3}


def test_training_diverges(tmp_path: Path) -> None:
    """A sentence says which nodes and what helps; what helps does."""
    app = Adding()
    for i in (0, 1):
        app.spoil[i] = lambda arrays, metrics, message: reply_with(
            {**arrays, "b": np.full(5, 3e38, np.float32)}, metrics, message
        )
    it = Federation(tmp_path, app.app)
    for _ in range(2):
        with pytest.raises(InputError, match=r"round 0: .* clients 0, 1.* infinite.*max_norm"):
            it.start(2, compressor="none", resume=True)
    app.spoil = {}
    it.start(2, compressor="none", resume=True, max_norm=1e6, quorum=0.3)
    assert it.outcomes == [{"replied": 1, "too large": 2}] * 2


# The mod


ODD = {
    "0-d": np.array(1.5, np.float32),
    "matrix": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "none": np.zeros((0, 3), np.float32),
    "nothing": np.zeros(0, np.int64),
    "count": np.array(7),
    "double": np.array([0.1, 0.2]),
    "half": np.array([0.5], np.float16),
    "bytes": np.arange(4, dtype=np.uint8),
    "yes": np.array([True, False]),
    "bn.running_mean": np.array([0.25], np.float32),
    "last": np.zeros((0, 2)),
}


def kept(arrays: Any, metrics: dict[str, Any], message: Message) -> Message:
    """As an app does that changes what it can."""
    (found,) = message.content.array_records.values()
    changed = {name: array + array.dtype.type(1) for name, array in arrays_of(found).items()}
    return reply_with({**changed, "yes": ODD["yes"]}, metrics, message)


@pytest.mark.parametrize("inner", [None, FedAvg])
def test_the_app_sees_what_it_always_sees(inner: Any, tmp_path: Path) -> None:
    plain, ours = Adding([]), Adding()
    plain.spoil = ours.spoil = {0: kept, 1: kept}
    wanted = FedAvg(fraction_evaluate=0.0).start(
        Federation(tmp_path / "plain", plain.app, 2, ODD).grid, record(ODD), num_rounds=1,
        train_config=ConfigRecord({"lr": 0.5}),
    )  # fmt: skip
    it = Federation(tmp_path / "ours", ours.app, 2, ODD)
    found = it.start(
        1, inner and inner(fraction_evaluate=0.0), compressor="none", train_config=ConfigRecord({"lr": 0.5})
    )
    for one, other in zip(ours.trained, plain.trained, strict=True):
        assert same(one.array_records["arrays"], other.array_records["arrays"])
        assert dict(one.config_records["config"]) == dict(other.config_records["config"])
        assert one.keys() == other.keys()
    for name, array in arrays_of(found.arrays).items():
        assert (array.dtype, array.shape) == (ODD[name].dtype, ODD[name].shape)
        np.testing.assert_array_equal(array, arrays_of(wanted.arrays)[name].astype(array.dtype))


def test_any_precision_will_do(tmp_path: Path) -> None:
    """Arrays come back to the model's own dtype and order."""
    models = []
    for change in (
        lambda array: array,
        lambda array: array.astype(float),
        lambda array: np.asfortranarray(array.astype(">f4")),
        lambda array: array.astype(np.float16),
    ):
        app = Adding(metrics={"num-examples": 10, "train_loss": math.nan, "far": -math.inf})
        app.spoil[0] = lambda arrays, metrics, message, change=change: reply_with(
            {name: change(arrays[name]) for name in reversed(arrays)}, metrics, message
        )
        it = Federation(tmp_path / str(len(models)), app.app, 2)
        models.append(it.start(3).arrays)
        assert {row["train_loss"] for row in it.rows} == {None}
    assert all(same(model, models[0]) for model in models)


def message_of(content: RecordDict, kind: str = MessageType.TRAIN) -> Message:
    return Message(content, dst_node_id=7, message_type=kind)


@pytest.mark.parametrize("kind", ["train", "train.mine", "evaluate", "query"])
def test_foreign_messages_pass(kind: str, tmp_path: Path) -> None:
    content = RecordDict({"arrays": record(MODEL), "config": ConfigRecord({"lr": 0.1})})
    sent = message_of(content, kind)
    context = LocalNode(7, Adding().app, tmp_path / "disk").context
    reply = reply_with(MODEL, {"a": 1}, sent)

    def app(message: Message, inside: Context) -> Message:
        assert message is sent
        assert message.content is content
        assert inside is context
        return reply

    assert compressed(sent, context, app) is reply
    assert list(content) == ["arrays", "config"]
    assert not (tmp_path / "disk").exists()


def test_where_the_residual_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(**config: str) -> Path:
        return state_folder(Context(1, 7, {**config}, RecordDict(), {}))

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("FLWR_HOME", "CFEDAVG_STATE"):
        monkeypatch.delenv(name, raising=False)
    assert place() == tmp_path / "home" / ".flwr" / "cfedavg"
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    assert place() == tmp_path / "flwr" / "cfedavg"
    monkeypatch.setenv("CFEDAVG_STATE", str(tmp_path / "state"))
    assert place() == tmp_path / "state"
    assert place(**{"state-dir": str(tmp_path / "own")}) == tmp_path / "own"


# Options


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"compressor": "zip"}, "compressor: unknown name 'zip'"),
        ({"compressor": "topk(2)"}, "compressor: topk"),
        ({"update": "auto"}, "update is 'auto'"),
        ({"update": "all"}, "update is 'all'"),
        ({"weighting": "all"}, "weighting is 'all'"),
        ({"participation": 0.0}, "participation is 0.0"),
        ({"participation": 2}, "participation is 2"),
        ({"participation": math.nan}, "participation is "),
        ({"over_selection": -0.1}, "over_selection is -0.1"),
        ({"over_selection": math.nan}, "over_selection is nan"),
        ({"over_selection": math.inf}, "over_selection is inf"),
        ({"min_nodes": 0}, "min_nodes is 0"),
        ({"min_nodes": 1.5}, "min_nodes is 1.5"),
        ({"quorum": 1.1}, "quorum is 1.1"),
        ({"quorum": "half"}, "quorum is 'half'"),
        ({"max_norm": 0.0}, "max_norm is 0"),
        ({"max_norm": math.nan}, "max_norm is nan"),
        ({"max_norm": "large"}, "max_norm is 'large'"),
        ({"eta": 0.0}, "eta is 0"),
        ({"eta": math.nan}, "eta is nan"),
        ({"eta": "fast"}, "eta is 'fast'"),
        ({"whole": "*bias"}, "whole is '\\*bias'"),
        ({"seed": -1}, "seed is -1"),
        ({"error_feedback": "no"}, "error.feedback is 'no'"),
        ({"resume": True}, "resume needs out"),
        ({"from_backup": True, "out": "x"}, "from_backup"),
        ({"inner": FedAvg(), "eta": 2.0}, "eta and weighting are for CFedAvg alone"),
        ({"inner": FedAvg(), "weighting": "samples"}, "eta and weighting are for CFedAvg alone"),
        ({"inner": FedAvg(), "participation": 0.5}, "participation and over_selection are for CFedAvg alone"),
        (
            {"inner": FedAvg(), "over_selection": 0.5},
            "participation and over_selection are for CFedAvg alone",
        ),
        ({"inner": FedAvg(), "update": "mean"}, "update is 'mean'"),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        CFedAvg(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"n": np.array(3)}, "no float32 array to compress"),
        ({"bn.running_mean": np.ones(3, np.float32)}, "no float32 array to compress"),
        ({"w": np.array([1, math.inf], np.float32)}, "initial_arrays: 'w' holds NaN or Inf"),
        ({"w": np.ones(2, np.float32), "n": np.array(math.nan)}, "initial_arrays: 'n' holds NaN or Inf"),
    ],
)
def test_bad_models(model: dict[str, np.ndarray], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation(tmp_path, Adding().app, 2, model).start(1)


def test_options_reach_the_clients(tmp_path: Path) -> None:
    """K is what the clients report; eta is its mean, or a number, or a function of the round."""
    for eta, used in ((None, [4, 4]), (8, [8, 8]), (lambda t: 2.0**t, [1, 2])):
        app = Adding()
        for i, K in enumerate((2, 6)):
            app.spoil[i] = lambda arrays, metrics, message, K=K: reply_with(
                arrays, {"local-steps": K, "train_loss": 0.5 * K}, message
            )
        it = Federation(tmp_path / f"{used}", app.app, 2)
        models: list[Any] = []
        it.start(
            2,
            compressor="none",
            update="mean",
            eta=eta,
            evaluate_fn=lambda t, x, models=models: models.append(arrays_of(x)),
        )
        for t in (0, 1):
            g = {name: (numbers(0, t + 1)[name] / 2 + numbers(1, t + 1)[name] / 6) / 2 for name in MODEL}
            for name in MODEL:
                wanted = models[t][name] + used[t] * g[name]
                np.testing.assert_allclose(models[t + 1][name], wanted, rtol=1e-6, atol=1e-6)
        row = it.rows[-1]
        assert (row["local_steps_min"], row["local_steps_mean"], row["local_steps_max"]) == (2, 4, 6)
        assert row["train_loss"] == pytest.approx((2 * 1 + 6 * 3) / 8)
        assert [row["K"] for row in it.of_nodes] == [2, 6, 2, 6]


def test_steps_must_be_reported(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app, 2)
    it.start(1, update="mean")
    assert it.outcomes == [{"metrics": 2}]
    assert "needs the metric 'local-steps'" in it.of_nodes[0]["why"]


def test_what_travels_whole(tmp_path: Path) -> None:
    """It is averaged, by samples if so told, and what is left is compressed."""
    app = Adding()
    for i in range(2):
        app.spoil[i] = lambda arrays, metrics, message: reply_with(
            arrays, {"num-examples": 3 * metrics["partition"]}, message
        )
    for weighting, shares in (("uniform", (0.5, 0.5)), ("samples", (0.0, 1.0))):
        it = Federation(tmp_path / weighting, app.app, 2)
        result = it.start(1, whole=["b*"], weighting=weighting, compressor="topk(0.9)")
        change = sum(share * numbers(i, 1)["b"] for i, share in enumerate(shares))
        np.testing.assert_array_equal(result.arrays["b"].numpy(), MODEL["b"] + change)
        assert {row["coordinates_sent"] for row in it.rows} == {2}
    nobody = Adding(metrics={"num-examples": 0})
    assert same(
        Federation(tmp_path / "none", nobody.app).start(1, whole=["b"], weighting="samples").arrays, MODEL
    )
    with pytest.raises(InputError, match="weighting = 'samples' needs the metric 'num-examples'"):
        Federation(tmp_path / "unsaid", Adding(metrics={"a": 1}).app).start(1, weighting="samples")
