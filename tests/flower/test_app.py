"""The mod within an app, and the options of the strategy, with what becomes of them at the clients."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp.strategy import FedAvg

from cfedavg import InputError
from cfedavg.flower import CFedAvg, RoundPolicy, compressed
from cfedavg.flower.nodes import state_folder
from cfedavg.flower.replies import OURS
from cfedavg.launch.app import TRUST, config_of
from tests.compress.test_compress import EveryNth
from tests.grid import (
    MODEL,
    Adding,
    Federation,
    LocalNode,
    arrays_of,
    numbers,
    record,
    reply_with,
    same,
)

pytestmark = pytest.mark.usefixtures("without_waiting")


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
    """Reply as an app that changes every array but the boolean one."""
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
        return state_folder(Context(1, 7, {**config}, RecordDict(), {}), "some name", "")

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
        ({"compressor": "zip"}, "`compressor`: unknown name 'zip'"),
        ({"compressor": "topk(2)"}, "`compressor`: topk"),
        ({"update": "auto"}, "`update` must be 'sum', .* got 'auto'"),
        ({"update": "all"}, "`update` must be .*, got 'all'"),
        ({"weighting": "all"}, "`weighting` must be .*, got 'all'"),
        ({"max_norm": 0.0}, "`max_norm` must be .*, got 0"),
        ({"max_norm": math.nan}, "`max_norm` must be .*, got nan"),
        ({"max_norm": "large"}, "`max_norm` must be .*, got 'large'"),
        ({"eta": 0.0}, "`eta` must be .*, got 0"),
        ({"eta": math.nan}, "`eta` must be .*, got nan"),
        ({"eta": "fast"}, "`eta` must be .*, got 'fast'"),
        ({"uncompressed": "*bias"}, "`uncompressed` must be .*, got '\\*bias'"),
        ({"seed": -1}, "`seed` must be .*, got -1"),
        ({"feedback": False}, "`feedback` must be .*, got False"),
        ({"resume": True}, "`resume` needs `out`"),
        ({"resume": "yes", "out": "x"}, "`resume` must be .*, got 'yes'"),
        ({"resume": True, "from_backup": 1, "out": "x"}, "`from_backup` must be .*, got 1"),
        ({"from_backup": True, "out": "x"}, "`from_backup` .* needs `resume`"),
        ({"inner": FedAvg(), "update": "mean"}, "`update` must be 'sum' when .* wraps .*, got 'mean'"),
        ({"policy": 0.5}, "`policy` must be a RoundPolicy, got 0.5"),
        ({"inner": FedAvg(), "eta": 2.0}, "`eta` must not be given when CFedAvg wraps a strategy"),
        ({"inner": FedAvg(), "weighting": "samples"}, "`weighting` must not be given"),
        ({"inner": FedAvg(), "server_optimiser": "adam"}, "`server_optimiser` must not be given"),
        ({"inner": FedAvg(), "feedback": "ef21"}, "must keep no memory on the server"),
        ({"feedback": "ef21", "weighting": "samples"}, "`weighting` must be uniform"),
        ({"feedback": "ef(2)"}, "decay must be above 0 and at most 1, got 2"),
        ({"server_optimiser": "adam(beta1=1)"}, "beta1 must be from 0 to below 1, got 1"),
        ({"inner": FedAvg(), "policy": RoundPolicy(participation=0.5)}, "`participation`.* have no effect"),
        ({"inner": FedAvg(), "policy": RoundPolicy(over_selection=0.5)}, "`over_selection`.* have no effect"),
        ({"inner": FedAvg(), "policy": RoundPolicy(min_nodes=3)}, "`min_nodes`.* have no effect"),
    ],
)
def test_bad_options(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        CFedAvg(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["participation", "over_selection", "min_nodes", "quorum"])
def test_the_policy_is_one_object(name: str) -> None:
    """Its numbers are no options of the strategy."""
    with pytest.raises(InputError, match=rf"no argument '{name}'; write policy=RoundPolicy\({name}=\.\.\.\)"):
        CFedAvg(**{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, "long", True])
def test_a_bad_deadline(timeout: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`timeout` must be a number of seconds above 0, got "):
        Federation(tmp_path, Adding().app).start(1, timeout=timeout)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"n": np.array(3)}, "must have a float32 array to compress"),
        ({"bn.running_mean": np.ones(3, np.float32)}, "must have a float32 array to compress"),
        ({"w": np.array([1, math.inf], np.float32)}, "`initial_arrays` must be finite, but 'w' holds NaN"),
        ({"w": np.ones(2, np.float32), "n": np.array(math.nan)}, "must be finite, but 'n' holds NaN or Inf"),
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


OWN = "tests.compress.test_compress:EveryNth(2)"


def test_a_request_imports_and_calls_nothing(tmp_path: Path) -> None:
    """Whatever compressor a request names: the node says what is wrong, and the round goes on."""
    it, ran = Federation(tmp_path, Adding().app, 3), tmp_path / "ran"
    forged = {100: f"os:mkdir({str(ran)!r})", 101: f"pathlib:Path({str(ran)!r})"}

    def forge(node: LocalNode, request: Message) -> Message:
        record = request.content.config_records[OURS]
        record["compressor"] = forged.get(node.id, record["compressor"])
        return node.answer(request)

    it.grid.on_request = forge
    it.start(1, policy=RoundPolicy(quorum=0.3))
    assert it.outcomes == [{"unknown part": 2, "replied": 1}]
    assert "this text may not import a module: 'os:mkdir'" in it.of_nodes[0]["why"]
    assert not ran.exists()


def test_a_node_takes_the_classes_that_its_app_has_given(tmp_path: Path) -> None:
    refusing = Federation(tmp_path / "without", Adding().app, 2)
    refusing.start(1, compressor=OWN)
    assert refusing.outcomes == [{"unknown part": 2}]
    app = Adding(mods=[partial(compressed, own=[EveryNth])])
    taking = Federation(tmp_path / "with", app.app, 2)
    taking.start(1, compressor=OWN)
    assert taking.outcomes == [{"replied": 2}]


@pytest.mark.parametrize("field", ["model", "compressor", "schedule"])
def test_a_run_config_imports_nothing_unless_its_machine_says_so(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {field: "some.module:Thing(1)"}
    with pytest.raises(InputError, match=f"the run config: `{field}` 'some.module:Thing.1.' would import"):
        config_of(given)
    monkeypatch.setenv(TRUST, "1")
    assert getattr(config_of(given), field) == given[field]


def test_steps_must_be_reported(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app, 2)
    it.start(1, update="mean")
    assert it.outcomes == [{"metrics": 2}]
    assert "needs the metric 'local-steps'" in it.of_nodes[0]["why"]


def test_uncompressed_arrays(tmp_path: Path) -> None:
    """It is averaged, by samples if so told, and what is left is compressed."""
    app = Adding()
    for i in range(2):
        app.spoil[i] = lambda arrays, metrics, message: reply_with(
            arrays, {"num-examples": 3 * metrics["partition"]}, message
        )
    for weighting, shares in (("uniform", (0.5, 0.5)), ("samples", (0.0, 1.0))):
        it = Federation(tmp_path / weighting, app.app, 2)
        result = it.start(1, uncompressed=["b*"], weighting=weighting, compressor="topk(0.9)")
        change = sum(share * numbers(i, 1)["b"] for i, share in enumerate(shares))
        np.testing.assert_array_equal(result.arrays["b"].numpy(), MODEL["b"] + change)
        assert {row["coordinates_sent"] for row in it.rows} == {2}
    nobody = Adding(metrics={"num-examples": 0})
    it = Federation(tmp_path / "none", nobody.app)
    assert same(it.start(1, uncompressed=["b"], weighting="samples").arrays, MODEL)
    it = Federation(tmp_path / "unsaid", Adding(metrics={"a": 1}).app)
    it.start(1, weighting="samples")
    assert it.outcomes == [{"metrics": 3}]
    assert it.of_nodes[0]["why"] == "weighting = 'samples' needs the metric 'num-examples'"
