"""CFedAvg around other strategies of Flower: what they give, what they see, what they remember."""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
)

from cfedavg import InputError
from cfedavg.core.config import read_config
from cfedavg.flower import CFedAvg, compressed
from tests.grid import (
    MODEL,
    Adding,
    Disks,
    Federation,
    LocalGrid,
    Summing,
    arrays_of,
    error,
    record,
    reply_with,
    same,
)

pytestmark = pytest.mark.usefixtures("without_waiting")


# Other strategies within


def examples(arrays: Any, metrics: dict[str, Any], message: Message) -> Message:
    """Clients of different sizes."""
    return reply_with(arrays, {"num-examples": 1 + 3 * metrics["partition"], "loss": 0.5}, message)


def sized(mods: list[Any] | None = None, nodes: int = 4) -> Adding:
    app = Adding(mods)
    app.spoil = dict.fromkeys(range(nodes), examples)
    return app


INNER: dict[str, Any] = {
    "FedAvg": FedAvg,
    "FedAdam": lambda: FedAdam(eta=0.5),
    "FedAvgM": lambda: FedAvgM(server_momentum=0.9, server_learning_rate=0.7),
    "FedTrimmedAvg": lambda: FedTrimmedAvg(beta=0.3),
    "FedMedian": FedMedian,
    "FedProx": lambda: FedProx(proximal_mu=0.1),
    "FedAdam, clipped": lambda: DifferentialPrivacyServerSideAdaptiveClipping(
        FedAdam(eta=0.5), 0.0, 4, clipped_count_stddev=0.0
    ),
}


@pytest.mark.parametrize("name", INNER)
def test_around_a_strategy(name: str, tmp_path: Path) -> None:
    """Uncompressed it is what that strategy gives by itself; compressed, a resume changes nothing."""
    make = INNER[name]
    alone = Federation(tmp_path / "alone", sized([]).app, 4)
    wanted = make().start(alone.grid, record(MODEL), num_rounds=4)
    around = Federation(tmp_path / "around", (app := sized()).app, 4)
    found = around.start(4, make(), compressor="none")
    for part, array in arrays_of(wanted.arrays).items():
        np.testing.assert_allclose(found.arrays[part].numpy(), array, rtol=1e-5, atol=1e-4)
        assert found.arrays[part].numpy().dtype == np.float32
    for column in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        one, other = getattr(found, column), getattr(wanted, column)
        near = {t: pytest.approx(dict(metrics), abs=1e-3) for t, metrics in other.items()}
        assert {t: dict(metrics) for t, metrics in one.items()} == near
    if name == "FedProx":
        assert [seen.config_records["config"]["proximal-mu"] for seen in app.trained] == [0.1] * 16

    whole = Federation(tmp_path / "whole", sized().app, 4).start(4, make())
    broken = Federation(tmp_path / "broken", sized().app, 4)
    broken.start(2, make())
    again = broken.start(4, make(), resume=True)
    assert same(again.arrays, whole.arrays)
    assert not same(again.arrays, found.arrays)


def test_clients_evaluate_the_model_itself(tmp_path: Path) -> None:
    model = {"n": np.array(3), "w": np.ones((2, 3), np.float32)}
    it = Federation(tmp_path, (app := Adding()).app, 2, model)
    result = it.start(2, FedAvg())
    seen = app.evaluated[-1]
    assert set(seen) == {"arrays", "config"}
    assert same(seen.array_records["arrays"], result.arrays)
    total = sum(float(array.sum()) for array in arrays_of(result.arrays).values())
    assert (
        it.rows[-1]["client_total"] == result.evaluate_metrics_clientapp[2]["total"] == pytest.approx(total)
    )


@pytest.mark.parametrize("inner", [None, FedAvg])
@pytest.mark.parametrize(("counts", "mean"), [((7, 7, 7), 7), ((7, 8, 8), 8)])
def test_whole_numbers_stay_whole(inner: Any, counts: tuple[int, ...], mean: int, tmp_path: Path) -> None:
    """The mean of three times 7 is 7, though in floating point three thirds of it are less."""
    counting = Adding()
    for i, n in enumerate(counts):
        counting.spoil[i] = lambda arrays, metrics, message, n=n: reply_with(
            {**arrays, "n": np.array(n)}, metrics, message
        )
    model = {"w": MODEL["w"], "n": np.array(0)}
    result = Federation(tmp_path, counting.app, 3, model).start(1, inner and inner())
    assert result.arrays["n"].numpy() == mean
    assert result.arrays["n"].numpy().dtype == np.int64


class Watching(FedAvg):
    """Sees what a strategy of Flower's would."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.replies = list(replies)
        return super().aggregate_train(server_round, self.replies)


def test_a_strategy_sees_the_names_of_the_app(tmp_path: Path) -> None:
    app = Adding()

    def reply(arrays: Any, metrics: Any, message: Message) -> Message:
        content = reply_with(arrays, metrics, message).content
        return Message(RecordDict({"model": record(arrays), "metrics": content["metrics"]}), reply_to=message)

    app.spoil = dict.fromkeys(range(3), reply)
    Federation(tmp_path, app.app).start(1, inner := Watching(fraction_evaluate=0.0))
    assert [list(seen.content.array_records) for seen in inner.replies] == [["model"]] * 3


def test_a_strategy_sees_who_replied(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding(metrics={"num-examples": 10, "many": [1.5, 2.5]}).app)
    it.start(1, inner := Watching())
    assert [reply.metadata.src_node_id for reply in inner.replies] == [node.id for node in it.nodes]
    metrics = [dict(reply.content.metric_records["metrics"]) for reply in inner.replies]
    assert metrics == [{"num-examples": 10, "many": [1.5, 2.5], "partition": i} for i in range(3)]


class Misshapen(FedAvg):
    """Gives back a model that is none of ours."""

    def __init__(self, made: Any) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.made = made

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        return record(self.made(arrays_of(arrays))), metrics


@pytest.mark.parametrize(
    "made",
    [
        lambda arrays: {"w": arrays["w"]},
        lambda arrays: {**arrays, "more": arrays["b"]},
        lambda arrays: {**arrays, "w": arrays["w"][:2]},
        lambda arrays: {"w": arrays["b"], "b": arrays["w"]},
    ],
)
def test_a_strategy_must_give_the_same_model(made: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the inner strategy .*'(w|b|more)'"):
        Federation(tmp_path, Adding().app).start(1, Misshapen(made))


@pytest.mark.parametrize("name", ["w", "d"])
def test_a_strategy_must_give_numbers(name: str, tmp_path: Path) -> None:
    """In what is compressed, and in uncompressed arrays."""
    it = Federation(tmp_path, Adding().app, 3, {**MODEL, "d": np.zeros(1)})
    found = it.start(2, Misshapen(lambda arrays: {**arrays, name: arrays[name] * np.nan}))
    assert same(found.arrays, it.model)
    assert all(re.match("the model .* is NaN or infinite", row["why"]) for row in it.of_nodes)


class Repeating(Summing):
    """Asks everyone twice."""

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        made = [super(Repeating, self).configure_train(server_round, arrays, config, grid) for _ in range(2)]
        return [message for messages in made for message in messages]


def test_asked_twice(tmp_path: Path) -> None:
    """A client trains once, and counts once."""
    it = Federation(tmp_path, (app := Adding()).app)
    disks = Disks(it)
    it.start(2, Repeating())
    assert len(app.calls) == 6
    assert np.array_equal(disks.update(*app.calls), disks.x() + disks.masses())
    assert it.outcomes == [{"replied": 3}] * 2


class Without(FedAvg):
    """Sends something else than the model."""

    def __init__(self, sent: Any) -> None:
        super().__init__()
        self.sent = sent

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        return super().configure_train(server_round, record(self.sent), config, grid)


@pytest.mark.parametrize("sent", [{"z": MODEL["w"]}, {**MODEL, "more": np.ones(1, np.float32)}])
def test_a_strategy_must_send_the_model(sent: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the inner strategy must send each client the model"):
        Federation(tmp_path, Adding().app).start(1, Without(sent))


class Overflowing(Summing):
    """In round 2 what it remembers overflows, though its model does not."""

    def __init__(self) -> None:
        self.v, self.rate, self.seen = {"w": np.ones(3, np.float32)}, 1.0, list[int]()

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.seen.append(server_round)
        if server_round == 2:
            self.v["w"] = self.v["w"] * np.float32(math.inf)
            self.new = 1
        return super().aggregate_train(server_round, replies)


def test_what_a_strategy_would_remember_is_looked_at(tmp_path: Path) -> None:
    """The round is void, with nothing lost, and the strategy is as it was."""
    it = Federation(tmp_path, (app := Adding()).app)
    it.start(3, inner := Overflowing())
    assert (inner.v["w"].tolist(), inner.seen, hasattr(inner, "new")) == ([1, 1, 1], [1, 3], False)
    why = "the inner strategy would remember NaN or Inf, in 'v'"
    assert [(row["applied"], row["why"]) for row in it.of_nodes[::3]] == [
        (True, ""),
        (False, why),
        (True, ""),
    ]
    disks = Disks(it)
    assert np.array_equal(disks.update(*app.calls), disks.x() + disks.masses())
    it.start(3, again := Overflowing(), resume=True)
    assert (again.v["w"].tolist(), again.seen) == ([1, 1, 1], [1, 3])


def test_one_update_does_not_spoil_fed_adam(tmp_path: Path) -> None:
    """Of two nodes nobody can say which is right, and no bound is asked for: the round is void."""
    app = Adding()
    app.spoil[1] = lambda arrays, metrics, message: reply_with(
        {**arrays, "w": arrays["w"] + np.float32(1e20) * (app.calls[-1][1] == 2)}, metrics, message
    )
    it = Federation(tmp_path, app.app, 2)
    with np.errstate(over="ignore"):
        it.start(3, inner := FedAdam(fraction_evaluate=0.0), max_norm=math.inf)
    assert inner.v_t is not None
    assert all(np.isfinite(each).all() for each in inner.v_t.values())
    assert not it.of_nodes[2]["applied"]


class Half(Summing):
    """Fails after it has changed what it remembers."""

    def __init__(self) -> None:
        self.kept = 0

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.kept = server_round
        raise ValueError("no more")


def test_a_strategy_that_fails_is_as_it_was(tmp_path: Path) -> None:
    Federation(tmp_path, Adding().app).start(2, inner := Half())
    assert inner.kept == 0


class Silent(Summing):
    """Makes no model."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return None, None


def test_a_strategy_that_makes_nothing(tmp_path: Path) -> None:
    it = Federation(tmp_path, (app := Adding()).app)
    assert same(it.start(2, Silent()).arrays, it.model)
    disks = Disks(it)
    assert np.array_equal(disks.update(*app.calls), disks.masses())
    why = "the inner strategy made no model of 3 replies"
    assert {(row["applied"], row["why"]) for row in it.of_nodes} == {(False, why)}


def evaluating(app: Adding, evaluate: Any) -> ClientApp:
    """The same app, which evaluates in another way."""
    made = ClientApp(mods=[compressed])
    made.train()(app.train)
    made.evaluate()(evaluate)
    return made


def test_a_client_evaluates_in_its_own_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FedAvg cannot average metrics that are not those of the others, so these are left out."""
    it = Federation(tmp_path, (app := Adding()).app, 4)

    def odd(message: Message, context: Any) -> Message:
        reply = app.evaluate(message, context)
        reply.content["metrics"]["more"] = 1.0
        return reply

    def fails(message: Message, context: Any) -> Message:
        raise ValueError("no data")

    it.nodes[1].app, it.nodes[2].app = evaluating(app, odd), evaluating(app, fails)
    it.start(2, FedAvg())
    assert it.outcomes == [{"replied": 4}] * 2
    assert all("client_total" in row and "client_more" not in row for row in it.rows)
    assert "node1: left out of the evaluation (it has the number 'more', unlike other nodes)" in caplog.text
    assert "node2: left out of the evaluation (ValueError: no data)" in caplog.text


class Clumsy(FedAvg):
    """Cannot sum up an evaluation."""

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        raise ZeroDivisionError("by zero")


def test_a_strategy_that_cannot_evaluate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(2, Clumsy())
    assert it.outcomes == [{"replied": 3}] * 2
    assert "the inner strategy cannot average the evaluations: ZeroDivisionError: by zero" in caplog.text


def test_who_has_evaluated(tmp_path: Path) -> None:
    """What clients report is theirs, whatever they call it."""
    it = Federation(tmp_path, (app := Adding()).app)
    found = MetricRecord({"num-examples": 1, "test_accuracy": 0.25})
    for node in it.nodes:
        node.app = evaluating(
            app, lambda message, _: Message(RecordDict({"metrics": found}), reply_to=message)
        )
    it.start(1, FedAvg(), evaluate_fn=lambda t, arrays: MetricRecord({"accuracy": 0.9}))
    assert (it.rows[0]["test_accuracy"], it.rows[0]["client_test_accuracy"]) == (0.9, 0.25)


def test_evaluation_by_clients_is_counted(tmp_path: Path) -> None:
    """They get the model once more."""
    down = []
    for share in (0.0, 1.0):
        it = Federation(tmp_path / str(share), Adding().app)
        it.start(1, FedAvg(fraction_evaluate=share))
        down.append(it.rows[0]["downlink_bytes"])
    assert down[1] == pytest.approx(2 * down[0], rel=0.2)


def test_not_within_others() -> None:
    outer = DifferentialPrivacyServerSideAdaptiveClipping(CFedAvg(), 0.0, 4, clipped_count_stddev=0.0)
    with pytest.raises(InputError, match="Pass that strategy to CFedAvg as `inner`"):
        outer.configure_train(1, record(MODEL), ConfigRecord(), LocalGrid([]))


ODD: dict[str, Any] = {
    "one more": ({"num-examples": 10, "partition": 1, "more": 1.0}, "has the number 'more'"),
    "one less": ({"partition": 1}, "lacks the number 'num-examples'"),
    "a list": (
        {"num-examples": 10, "partition": [1, 2]},
        "lacks the number 'partition' and has the list 'partition' of 2",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_metrics_that_are_not_those_of_the_others(name: str, tmp_path: Path) -> None:
    """Flower's strategies would end the run; the reply is left out, and its update comes later."""
    app, (found, why) = Adding(), ODD[name]
    app.spoil[1] = lambda arrays, metrics, message: reply_with(arrays, found, message)
    it = Federation(tmp_path, app.app)
    it.start(2, FedAvg(fraction_evaluate=0.0))
    assert it.outcomes == [{"metrics": 1, "replied": 2}] * 2
    odd = {(row["node"], row["why"]) for row in it.of_nodes if row["outcome"] == "metrics"}
    assert odd == {("node1", f"it {why}, unlike other nodes")}


@pytest.mark.parametrize("clients", [2, 4])
def test_metrics_of_which_none_are_more_common_take_turns(clients: int, tmp_path: Path) -> None:
    """Whatever the numbers of their nodes, all get into the model."""
    app = Adding()
    for i in range(clients // 2):
        app.spoil[i] = lambda arrays, metrics, message: reply_with(arrays, {**metrics, "more": 1.0}, message)
    it = Federation(tmp_path, app.app, clients)
    it.start(6, FedAvg(fraction_evaluate=0.0))
    taken = [{row["number"] < clients // 2 for row in it.of_nodes if row["round"] == t and row["applied"]}
             for t in range(6)]  # fmt: skip
    assert taken in ([{True}, {False}] * 3, [{False}, {True}] * 3)
    assert {row["age"] for row in it.of_nodes} <= {None, 0, 1}


BAD_EVALUATIONS: dict[str, tuple[Any, str]] = {
    "unprintable": ({"num-examples": 1, "x\x1b[31m": 1.0}, "at most 100 printable characters, got 'x"),
    "long": ({"num-examples": 1, "x" * 101: 1.0}, "at most 100 printable characters, got 'xxx"),
    "negative": (
        {"num-examples": -2, "total": 1.0},
        "the metric 'num-examples' must be from 0 to 2^53, got -2",
    ),
    "large": ({"num-examples": 1, "total": 1e200}, "the metric 'total' is 1e+200: at most 1e+100 is allowed"),
    "infinite": (
        {"num-examples": 1, "total": math.inf},
        "lacks the number 'total' and has the number 'total' ",
    ),
    "endless": ({"num-examples": 1, "total": 1.0, "all": [0.5] * 70_000}, "at most 65,536 characters"),
}


@pytest.mark.parametrize("name", BAD_EVALUATIONS)
def test_one_bad_evaluation(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The mean is that of the other nodes; two examples and minus two have none."""
    found, why = BAD_EVALUATIONS[name]
    means = []
    for bad in (True, False):
        it = Federation(tmp_path / str(bad), (app := Adding()).app, 3)

        def evaluate(message: Message, context: Any, bad: bool = bad) -> Message:
            if not bad:
                raise ValueError("a line\nand another" + "x" * 1000)
            return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=message)

        it.nodes[1].app = evaluating(app, evaluate)
        it.start(2, FedAvg())
        means.append([row.get("client_total") for row in it.rows])
    assert means[0] == means[1]
    assert None not in means[0]
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 4
    assert all("node1: left out of the evaluation" in line for line in said)
    assert why in said[0]
    assert all(line.isprintable() and len(line) < 400 for line in said)


def test_names_that_cannot_be_printed_are_no_columns(tmp_path: Path) -> None:
    """A report would refuse them, after the last round; here all nodes, or the app's own function, say so."""
    it = Federation(tmp_path, Adding().app)
    it.start(1, evaluate_fn=lambda server_round, arrays: MetricRecord({"x\x1b[31m": 1.0, "loss": 2.0}))
    assert [name for name in it.rows[0] if name.startswith("test_")] == ["test_loss"]


def test_an_error_reaches_the_strategy_as_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """FedAvg logs the reason of an error as it is, and the launcher reads that log."""
    it = Federation(tmp_path, (app := Adding()).app, 3)

    def evaluate(message: Message, context: Any) -> Message:
        return error(2, "no\ncfedavg.errors.InputError: forged \x1b[31m" * 10_000, message)

    it.nodes[1].app = evaluating(app, evaluate)
    it.start(1, FedAvg())
    said = [line.getMessage() for line in caplog.records if "forged" in line.getMessage()]
    assert len(said) == 2  # ours, and that of FedAvg
    assert max(map(len, said)) < 500
    assert not any("\ncfedavg" in line or "\x1b" in line for line in said)


def test_a_strategy_that_fails(tmp_path: Path) -> None:
    """Nobody has an example, so FedAvg divides by zero: the round is void, and nothing is lost."""
    app = Adding(metrics={"num-examples": 0})
    it = Federation(tmp_path, app.app)
    found = it.start(2, FedAvg(fraction_evaluate=0.0))
    assert same(found.arrays, it.model)
    assert not any(row["applied"] for row in it.of_nodes)
    assert all(row["why"].startswith("the inner strategy failed: ZeroDivisionError") for row in it.of_nodes)
    disks = Disks(it)
    assert np.array_equal(disks.update(*app.calls), disks.masses())


def test_nobody_has_an_example(tmp_path: Path) -> None:
    app = Adding(metrics={"num-examples": 0})
    it = Federation(tmp_path, app.app)
    assert same(it.start(2, weighting="samples").arrays, it.model)
    disks = Disks(it)
    assert np.array_equal(disks.update(*app.calls), disks.masses())


def test_weights_that_one_client_does_not_give(tmp_path: Path) -> None:
    app = Adding()
    app.spoil[1] = lambda arrays, metrics, message: reply_with(arrays, {"partition": 1}, message)
    it = Federation(tmp_path, app.app)
    it.start(1, weighting="samples")
    assert it.outcomes == [{"metrics": 1, "replied": 2}]


class Shifting(Summing):
    """Sends the clients another model than it was given, and remembers a list."""

    def __init__(self, by: float) -> None:
        self.by, self.seen = by, list[int]()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.seen.append(server_round)
        found = {name: array + np.float32(self.by) for name, array in arrays_of(arrays).items()}
        return super().configure_train(server_round, record(found), config, grid)


def test_a_strategy_that_sends_another_model(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    with pytest.raises(InputError, match="must send each client the model in one ArrayRecord, got"):
        it.start(1, Shifting(7))


def test_lists_are_remembered(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(2, Shifting(0))
    it.start(3, again := Shifting(0), resume=True)
    assert again.seen == [1, 2, 3]


class Keeping(Summing):
    """Remembers this and that."""

    def __init__(self, value: Any = None, rate: float = 0.5) -> None:
        self.kept, self.later, self.rate, self.first = None, value, rate, 0
        self.pair, self.by_round, self.best = (0, 0), dict[int, int](), np.float32(0.0)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.first = self.first or server_round
        self.pair, self.best, self.kept = (server_round, server_round), np.float32(server_round), self.later
        self.by_round[server_round] = 1
        return super().aggregate_train(server_round, replies)


def test_what_is_remembered(tmp_path: Path) -> None:
    """What was changed; an option that is given anew counts."""
    it = Federation(tmp_path, Adding().app)
    for rounds in (1, 2, 3):
        it.start(rounds, last := Keeping(rate=0.5 / rounds), resume=True)
    assert (last.first, last.rate) == (1, 0.5 / 3)
    it.start(3, again := Keeping(), resume=True)
    assert (again.pair, again.by_round, again.best) == ((3, 3), {1: 1, 2: 1, 3: 1}, 3.0)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
MEMORIES: dict[str, tuple[Any, bool]] = {
    "numbers": (np.arange(3, dtype=np.uint32), True),
    "by number": ({1: np.zeros(2), 7: np.ones(())}, True),
    "by name": ({"1": np.zeros(2), "a/b": np.ones(3, bool)}, True),
    "several": ([np.zeros(2), np.ones((2, 2), np.float16)], True),
    "by pair": ({(0, 1): np.zeros(2)}, True),
    "mixed": ({"step": 3, "w": np.ones(2), "past": [(1.5, None), ("a", math.nan)]}, True),
    "none of it": ([np.array([]), {}, [], ()], True),
    "long": (np.array([1], np.ulonglong), True),
    "texts": (np.array(["a"]), False),
    "objects": (np.array([None]), False),
    "by bytes": ({b"a": np.zeros(1)}, False),
    "complex": (np.ones(2, complex), False),
    "within itself": (ENDLESS, False),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_arrays_are_remembered(name: str, tmp_path: Path) -> None:
    value, kept = MEMORIES[name]
    it = Federation(tmp_path, Adding().app)
    it.start(1, Keeping(value))
    it.start(1, again := Keeping(), resume=True)
    assert repr(again.kept) == repr(value if kept else None)


class Counting(Summing):
    """Remembers in a dict that makes its own values."""

    def __init__(self) -> None:
        self.seen = defaultdict[str, list[int]](list)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.seen["all"].append(server_round)
        return super().aggregate_train(server_round, replies)


class Becoming(Summing):
    """What it was made with becomes something else."""

    def __init__(self, first: Any = None) -> None:
        self.buffer, self.table = first, np.zeros(3)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.buffer = None if self.buffer is not None else 1.5
        return super().aggregate_train(server_round, replies)


def test_an_array_becomes_something_else(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(1, Becoming(np.zeros(3)))
    other = Becoming(np.zeros(3))
    other.table = np.ones(3)  # given anew, as an option is
    it.start(2, other, resume=True)
    assert other.buffer == 1.5
    assert other.table.tolist() == [1, 1, 1]


class Itself(Summing):
    """Refers to itself, and to another one twice."""

    def __init__(self, name: str = "other") -> None:
        self.me = self
        self.__dict__[name] = self.__dict__[f"{name}_again"] = Keeping()

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        self.other.best = server_round
        return super().aggregate_train(server_round, replies)


def test_strategies_that_refer_to_each_other(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(1, Itself())
    assert read_config(it.out / "config.toml").model.endswith("by Itself(Keeping))")
    it.start(1, again := Itself(), resume=True)
    assert again.other_again.best == 1
    with pytest.raises(InputError, match=r"`inner` must be .*, but `inner` has no attribute 'other\.best'"):
        it.start(2, Itself("another"), resume=True)


def test_a_dict_of_its_own_kind_stays_one(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(1, Counting())
    it.start(2, again := Counting(), resume=True)
    assert again.seen == {"all": [1, 2]}
    assert again.seen["new"] == []


def test_resumed_with_another_strategy(tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    clipping = functools.partial(
        DifferentialPrivacyServerSideAdaptiveClipping,
        noise_multiplier=0.0,
        num_sampled_clients=3,
        clipped_count_stddev=0.0,
    )
    it.start(1, clipping(FedAdam()))
    config = read_config(it.out / "config.toml")
    name = "DifferentialPrivacyServerSideAdaptiveClipping(FedAdam)"
    assert config.model == f"(a Flower app, averaged by {name})"
    for other, words in ((FedAvg(), "'FedAvg'"), (clipping(FedAvg()), r"'.*\(FedAvg\)'"), (None, "None")):
        with pytest.raises(InputError, match=rf"`inner` is {words}, but the federation in .* has '.*FedAdam"):
            it.start(2, other, resume=True)


@pytest.mark.parametrize("inner", [FedAvg, "FedAvg"])
def test_within_is_a_strategy(inner: Any) -> None:
    with pytest.raises(
        InputError, match=r"`inner` must be a strategy of Flower's, such as FedAvg\(\), got .*FedAvg"
    ):
        CFedAvg(inner)


@pytest.mark.parametrize(
    ("name", "value"), [("update", "mean"), ("feedback", "none"), ("seed", 1), ("compressor", "none")]
)
def test_what_must_stay(name: str, value: Any, tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(1)
    with pytest.raises(InputError, match=f"`{name}` is {value!r}, but the federation in .* has"):
        it.start(2, resume=True, **{name: value})


# Our server optimisers beside Flower's own, on the same replies

FLOWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (lambda: FedAdam(eta=0.5, beta_1=0.8, beta_2=0.95, tau=0.01),
             {"server_optimiser": "adam(beta1=0.8, beta2=0.95, tau=0.01)", "eta": 0.5}),
    "yogi": (lambda: FedYogi(eta=0.3), {"server_optimiser": "yogi", "eta": 0.3}),
    "adagrad": (lambda: FedAdagrad(eta=0.2), {"server_optimiser": "adagrad", "eta": 0.2}),
    "momentum": (lambda: FedAvgM(server_momentum=0.7, server_learning_rate=0.6),
                 {"server_optimiser": "momentum(0.7)", "eta": 0.6}),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOWERS)
def test_our_server_optimisers_are_flowers(name: str, tmp_path: Path) -> None:
    """Equal to rounding: theirs go from models to updates and back, in float32.

    An update is off by 2^-23 |model|, some 1e-5 of an update here, and a step m / (sqrt(v) + tau) is as much.
    """
    flowers, ours = FLOWERS[name]
    found = []
    for folder, strategy, options in (("theirs", flowers(), {}), ("ours", None, ours)):
        it = Federation(tmp_path / folder, Adding(metrics={"num-examples": 10}).app, 4)
        result = it.start(6, strategy, compressor="none", **options)  # ties could be broken in another way
        assert it.outcomes == [{"replied": 4}] * 6
        found.append({part: array.numpy() for part, array in result.arrays.items()})
    assert any(abs(found[0][part] - MODEL[part]).max() > 0.1 for part in MODEL)
    for part in MODEL:
        np.testing.assert_allclose(found[1][part], found[0][part], rtol=2e-5, atol=2e-5)
