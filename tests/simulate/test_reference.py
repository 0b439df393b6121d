"""The reference engine beyond the algorithm: buffers, frozen parameters, local steps, time, the iterate z."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cfedavg import Config, InputError, Task, run
from cfedavg.callbacks import Callback
from cfedavg.core.errors import Diverged
from cfedavg.optimise.local import SGD
from cfedavg.simulate.engines import ReferenceEngine
from cfedavg.simulate.local import Vectors, after, clock, local_steps
from cfedavg.simulate.plan import Plan, broken_conditions
from cfedavg.simulate.state import State
from cfedavg.theory import rate_conditions
from tests.conftest import blobs, half_square, quadratic

CPU = torch.device("cpu")


def make(config: Config, task: Task) -> ReferenceEngine:
    config = config.replace(clients=len(task.clients))
    return ReferenceEngine(Plan(config, task), task, CPU)


def with_model(model: nn.Module, task: Task) -> Task:
    return Task(model, task.clients, test=task.test)


def test_batchnorm_buffers_travel_and_are_averaged() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    task = with_model(model, blobs(m=3))
    config = Config(rounds=1, local_steps="2", batch_size=8, compressor="topk(0.9)", compressor_down="none")
    engine = make(config, task)
    start = engine.start()
    sent = [engine._client(start, i) for i in range(3)]
    after, finish = engine.round(start)
    row = finish()
    assert len(start.b) == 4 + 4 + 1
    torch.testing.assert_close(after.b, sum(s.b for s in sent) / 3)  # type: ignore[arg-type]
    trained = engine.model_at(after.x, after.b)
    assert int(trained[1].num_batches_tracked) == 2  # type: ignore[index]
    plain = make(config, with_model(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3)), task))
    assert row["uplink_bytes"] > plain.round(plain.start())[1]()["uplink_bytes"] + 3 * 9 * 4


def test_batchnorm_and_a_last_batch_of_one_sample() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(InputError, match="`batch_size` leaves client 1 a last batch of one sample"):
        run(Config(rounds=1, local_steps="2", batch_size=20), with_model(model, blobs(m=3)))


def test_frozen_parameters_neither_train_nor_travel() -> None:
    """A low-rank adapter on a frozen base."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3)).requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 3, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.base(inputs) + self.up(self.down(inputs))  # type: ignore[no-any-return]

    model = Adapted()
    base = {name: value.clone() for name, value in model.base.state_dict().items()}
    config = Config(rounds=2, local_steps="3", compressor="none", eta_local=0.5, batch_size=9)
    result = run(config, with_model(model, blobs()))
    assert result.final["coordinates_sent"] == 6 * (8 * 2 + 2 * 3)
    for name, value in base.items():  # the statistics of a frozen BatchNorm too
        assert torch.equal(result.model.base.state_dict()[name], value), name  # type: ignore[union-attr]
    assert not torch.equal(result.model.up.weight, model.up.weight)  # type: ignore[union-attr, arg-type]


def test_writing_puts_back_the_buffers_that_do_not_travel() -> None:
    """Those of a frozen module, and those that a state_dict leaves out."""
    model = nn.Sequential(nn.BatchNorm1d(3).requires_grad_(False), nn.Linear(3, 2))
    model.register_buffer("seen", torch.tensor([1.0, 2.0]), persistent=False)
    vectors = Vectors(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, b = vectors.read()
    assert len(b) == 0
    model(torch.randn(5, 3))
    model.seen += 1
    assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    vectors.write(x, b)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    model[2].weight = model[0].weight
    vectors = Vectors(model)
    assert vectors.layout.d == 64 + 8 + 8 + 24 + 3
    x, b = vectors.read()
    vectors.write(x + 1, b)
    assert torch.equal(vectors.read()[0], x + 1)
    assert model[2].weight is model[0].weight
    run(Config(rounds=1, local_steps="1"), with_model(model, blobs()))


def test_dropout_is_the_same_every_time_and_leaves_the_users_generator_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    before = torch.random.get_rng_state()
    first = run(Config(rounds=2, local_steps="3"), with_model(model, blobs()))
    assert torch.equal(before, torch.random.get_rng_state())
    again = run(Config(rounds=2, local_steps="3"), with_model(model, blobs()))
    other = run(Config(rounds=2, local_steps="3", seed=1), with_model(model, blobs()))
    assert [r["train_loss"] for r in first.rows] == [r["train_loss"] for r in again.rows]
    assert first.final["train_loss"] != other.final["train_loss"]


@pytest.mark.parametrize(
    ("options", "low", "high"),
    [
        ({"local_steps": "4"}, 4, 4),
        ({"local_steps": "2..6"}, 2, 6),
        ({"local_steps": "1,2,3,4,5,6"}, 1, 6),
        ({"local_epochs": 2, "batch_size": 10}, 4, 6),  # 20 to 25 samples: 2 or 3 batches an epoch
        ({"deadline": 2.0, "steps_per_second": "1..3"}, 2, 6),
    ],
)
def test_local_steps(options: dict[str, object], low: int, high: int) -> None:
    rows = run(Config(rounds=4, **options), blobs()).rows  # type: ignore[arg-type]
    assert low <= min(r["local_steps_min"] for r in rows)
    assert max(r["local_steps_max"] for r in rows) <= high
    if options.get("local_steps") == "2..6":  # drawn anew each round
        assert len({r["local_steps_mean"] for r in rows}) > 1


def test_update_and_eta_follow_the_local_steps() -> None:
    task = blobs()
    equal = Plan(Config(clients=6, local_steps="4"), task).rates
    assert (equal.update, equal.eta) == ("sum", 1.0)
    drawn = Plan(Config(clients=6, local_steps="2..6"), task).rates
    assert (drawn.update, drawn.eta) == ("mean", 4.0)
    assert Plan(Config(clients=6, local_steps="2..6", eta=0.5), task).rates.eta == 0.5


def test_a_client_without_time_for_a_step_abstains() -> None:
    task = quadratic(torch.eye(3))
    config = Config(rounds=1, deadline=1.0, steps_per_second="0.5,1,2", eta=1.0, compressor="none",
                    batch_size=1, clients=3)  # fmt: skip
    engine = make(config, task)
    after, finish = engine.round(engine.start())
    row = finish()
    assert (row["clients"], row["local_steps_min"], row["local_steps_max"]) == (3, 0, 2)
    assert sorted(after.residuals.vectors) == [1, 2]
    assert after.x[0] == 0  # client 0 pulls coordinate 0, and took no part
    assert row["coordinates_sent"] == 2 * 3
    assert row["model_sizes_sent"] == pytest.approx(2 / 3)
    nobody = Config(rounds=1, deadline=0.1, steps_per_second="1", clients=3)
    with pytest.raises(InputError, match="`deadline` must give at least one client time"):
        make(nobody, task)


def test_a_round_in_which_all_abstain_changes_nothing() -> None:
    config = Config(rounds=1, deadline=1.0, steps_per_second="0.5,0.5,1", participation=0.34)
    engine = make(config, quadratic(torch.eye(3)))
    t = next(t for t in range(99) if engine.plan.sampled(t) != [2])
    start = engine.start()
    after, finish = engine.round(replace(start, t=t))
    row = finish()
    assert torch.equal(after.x, start.x)
    assert torch.equal(after.broadcast, start.broadcast)
    assert row["train_loss"] is None
    assert row["delta_norm2"] is None


def test_a_clock_stops_a_real_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is looked at after every step: at least one is done, and none after it has passed."""
    ticks = iter([0.0, 0.4, 0.8, 1.2, 1.6])
    monkeypatch.setattr("cfedavg.simulate.local.time.monotonic", lambda: next(ticks))
    task = quadratic(torch.ones(1, 2))
    batch = torch.ones(1, 2)
    work = local_steps(task.model, half_square, iter([batch] * 100), SGD(), 0.1, clock(1.0))
    assert work.K == 3


def test_plain_sgd_steps_in_place_to_the_bit() -> None:
    """An optimiser of another class makes new tensors, which are copied into the model."""

    class Copied(SGD):
        pass

    task, found = blobs(m=1), []
    for optimiser in (SGD(), Copied()):
        model = copy.deepcopy(task.model)
        batch = task.clients[0].batch(np.arange(7))
        local_steps(model, task.loss, [batch] * 3, optimiser, 0.1, after(3))
        found.append(Vectors(model).read()[0])
    assert torch.equal(*found)
    assert not torch.equal(found[0], Vectors(task.model).read()[0])


def test_simulated_seconds_are_those_of_the_slowest_client() -> None:
    link = "2x up=1kbit, down=1Mbit, rtt=500ms; up=8bit, down=1Mbit, rtt=0.4s, wait=3s"
    config = Config(rounds=1, local_steps="4", steps_per_second="2,4,8", link=link, compressor="none",
                    clients=3)  # fmt: skip
    engine = make(config, quadratic(torch.eye(3)))
    row = engine.round(engine.start())[1]()
    up, down = row["uplink_bytes"] // 3, row["downlink_bytes"] // 3
    clients = (2, 1000, 0.5), (4, 1000, 0.5), (8, 8, 3.4)
    each = [4 / speed + 8 * up / rate + 8 * down / 1e6 + waits for speed, rate, waits in clients]
    assert row["simulated_seconds"] == pytest.approx(max(each))
    untimed = make(Config(rounds=1, local_steps="4"), quadratic(torch.eye(3)))
    assert untimed.round(untimed.start())[1]()["simulated_seconds"] is None


def test_sample_weighting() -> None:
    """Clients of 1 and 3 samples pull to 0 and 4: the mean is 2 by client, 3 by sample."""
    task = Task(nn.Linear(1, 1, bias=False), [torch.zeros(1, 1), 4 * torch.ones(3, 1)], loss=_pull)
    nn.init.zeros_(task.model.weight)  # type: ignore[arg-type]
    for weighting, expected in (("uniform", 2.0), ("samples", 3.0)):
        config = Config(rounds=1, local_steps="1", eta_local=1.0, compressor="none", weighting=weighting)
        result = run(config, task)
        assert result.model.weight.item() == pytest.approx(expected)  # type: ignore[union-attr, operator]


def _pull(model: nn.Module, batch: Tensor) -> Tensor:
    return 0.5 * (model.weight - batch).square().mean()  # type: ignore[operator, union-attr]


def test_iterate_is_drawn_in_proportion_to_the_rates() -> None:
    """Over many seeds, z = x_t with probability eta_L,t / sum: checked at 4 standard deviations."""
    T, seeds = 4, 400
    counts = [0] * T
    task = quadratic(torch.ones(1, 2))
    rates = [1 / math.sqrt(1 + t) for t in range(T)]
    for seed in range(seeds):
        config = Config(clients=1, rounds=T, schedule="decaying(a=1)", sample_iterate=True, seed=seed)
        plan = Plan(config, task)
        chosen, total = 0, 0.0
        for t in range(T):
            total += plan.rates.eta_local(t)
            if plan.keeps_iterate(t, total):
                chosen = t
        counts[chosen] += 1
    for t in range(T):
        share = rates[t] / sum(rates)
        assert abs(counts[t] / seeds - share) < 4 * math.sqrt(share * (1 - share) / seeds)


def test_iterate_is_one_of_the_iterates() -> None:
    config = Config(rounds=5, local_steps="2", sample_iterate=True)
    engine = make(config, blobs())
    state, seen = engine.start(), []
    for _ in range(5):
        seen.append(state.x)
        state = engine.round(state)[0]
    assert state.z is not None
    assert any(torch.equal(state.z[0], x) for x in seen)
    assert run(config, blobs()).iterate is not None


def test_divergence_names_round_and_clients() -> None:
    config = Config(rounds=30, local_steps="5", eta_local=1e6)
    with pytest.raises(Diverged, match=r"round \d+: .* for clients? .*; lower `eta_local`"):
        run(config, blobs())


def test_divergence_of_one_client() -> None:
    task = quadratic(torch.tensor([[1.0, 2], [math.nan, 0], [3, 4]]))
    engine = make(Config(rounds=1, local_steps="1"), task)
    with pytest.raises(Diverged) as caught:
        engine.round(engine.start())
    assert (caught.value.t, caught.value.clients) == (0, [1])


def test_rate_conditions_are_reported_with_measured_gamma_and_alpha() -> None:
    said: list[str] = []

    class Listener(Callback):
        def on_message(self, text: str) -> None:
            if "rate condition" in text:
                said.append(text)

    result = run(Config(rounds=2, local_steps="3", smoothness=10.0), blobs(), callbacks=[Listener()])
    assert len(said) == 3
    assert all("is broken in 2 of 2 rounds" in s and "measured gamma" in s and "alpha" in s for s in said)
    assert len(result.final["rate_conditions"]) == 3
    said.clear()
    run(Config(rounds=2, local_steps="3", smoothness=1e-3, compressor="none", eta_local=0.01), blobs(),
        callbacks=[Listener()])  # fmt: skip
    assert said == []


@pytest.mark.parametrize("steps", ["1..4", "4,2,3,1,2,2"])
def test_rate_conditions_take_the_largest_K(steps: str) -> None:
    """Theorem 3 asks eta_L <= 1/(8 L K_i) and eta eta_L < 1/(K_i L) of every client: of the largest K_i."""
    config = Config(rounds=1, local_steps=steps, smoothness=0.5, eta_local=0.02, eta=3.0)
    found = run(config, blobs()).final["rate_conditions"]
    assert found["eta_L <= 1/(8 L K)"]["ratio"] == pytest.approx(0.02 * 8 * 0.5 * 4)
    assert found["eta*eta_L < 1/(K L)"]["ratio"] == pytest.approx(3.0 * 0.02 * 4 * 0.5)


@pytest.mark.parametrize("update", ["sum", "mean"])
def test_rate_conditions_take_what_the_round_measured(update: str) -> None:
    """The lowest SNR of any client, the round's alpha, and the line that the rates are for."""
    config = Config(rounds=2, local_steps="3", smoothness=0.5, update=update, compressor="topk(0.5)")
    result = run(config, blobs())
    eta = Plan(config.replace(clients=6), blobs()).rates.eta
    for row in result.rows:
        assert row["snr_min"] < row["snr_mean"]
        wanted = rate_conditions(0.1, eta, 3, 0.5, row["snr_min"], row["alpha"], update)
        found = row["rate_conditions"]
        assert list(found) == [each.text for each in wanted]
        ratios = [each["ratio"] for each in found.values()]
        assert ratios == pytest.approx([c.value / c.limit for c in wanted])
        assert [each["holds"] for each in found.values()] == [c.holds for c in wanted]


def test_rate_conditions_of_a_round_without_an_update() -> None:
    """Clients that are at their optimum agree: alpha is 1."""
    config = Config(rounds=1, local_steps="1", smoothness=1.0, eta_local=0.01, compressor="topk(0.5)")
    row = run(config, quadratic(torch.zeros(2, 4))).final
    assert row["delta_norm2"] == 0
    third = list(row["rate_conditions"].values())[2]
    assert (third["holds"], third["ratio"]) == (True, pytest.approx(0.01 * (0 + 1 + 1)))


def test_the_sentence_on_a_broken_condition_names_the_worst_round() -> None:
    rows = [
        {"round": t, "snr_min": snr, "alpha": alpha, "rate_conditions": {"a <= b": {"holds": h, "ratio": r}}}
        for t, (snr, alpha, h, r) in enumerate(
            [(9.0, 3.0, True, 0.5), (4.0, 2.0, False, 7.25), (5.0, None, False, 2.0)]
        )
    ]
    assert broken_conditions(rows) == [
        "rate condition a <= b is broken in 2 of 3 rounds; most in round 2, 7.25 times the limit "
        "(measured gamma 4, alpha 2)"
    ]
    rows[2]["rate_conditions"]["a <= b"]["ratio"] = None  # infinite
    assert "most in round 3, inf times the limit (measured gamma 5, alpha inf)" in broken_conditions(rows)[0]


def test_rate_conditions_follow_the_rate_of_the_round() -> None:
    config = Config(rounds=4, local_steps="2", smoothness=0.5, eta_local=0.02, schedule="decaying(a=1)")
    rows = run(config, blobs()).rows
    ratios = [row["rate_conditions"]["eta_L <= 1/(8 L K)"]["ratio"] for row in rows]
    assert ratios == pytest.approx([0.02 / math.sqrt(1 + t) * 8 * 0.5 * 2 for t in range(4)])


def test_momentum_and_weight_decay_change_the_run() -> None:
    losses = [
        run(Config(rounds=1, local_steps="5", local_optimiser=text), blobs()).final["train_loss"]
        for text in ("sgd", "sgd(momentum=0.9)", "sgd(weight_decay=0.1)")
    ]
    assert len(set(losses)) == 3


def test_user_data_of_other_structure_and_metric() -> None:
    """Dict batches, a torch Dataset, a scalar metric with a name of its own."""

    class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"x": torch.full((4,), float(i)), "y": torch.tensor(2.0 * i)}

    def mse(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        error: Tensor = model(batch["x"] / 10).squeeze(-1) - batch["y"] / 10
        return error.square().mean()

    tensors = {"x": torch.rand(12, 4), "y": torch.rand(12)}
    task = Task(nn.Linear(4, 1), [Rows(), tensors, tensors], test=Rows(), loss=mse, metric=mse)
    result = run(Config(rounds=8, local_steps="5", eta_local=0.05), task)
    assert result.final["test_mse"] == pytest.approx(result.final["test_loss"], rel=1e-5)
    assert result.final["test_mse"] < result.rows[0]["test_mse"]


def test_task_says_what_is_wrong() -> None:
    with pytest.raises(InputError, match=r"Task.clients is empty"):
        Task(nn.Linear(2, 2), [])
    with pytest.raises(InputError, match=r"Task.clients\[1\] has no samples"):
        Task(nn.Linear(2, 2), [torch.zeros(1, 2), torch.zeros(0, 2)])
    with pytest.raises(InputError, match="must hold tensors of equal length"):
        Task(nn.Linear(2, 2), [(torch.zeros(3, 2), torch.zeros(2))])
    with pytest.raises(InputError, match=r"Task.test has no samples"):
        Task(nn.Linear(2, 2), [torch.zeros(3, 2)], test=torch.zeros(0, 2))
    with pytest.raises(InputError, match="must have at least one trainable parameter"):
        Task(nn.Linear(2, 2).requires_grad_(False), [torch.zeros(3, 2)])


@pytest.mark.gpu
@pytest.mark.parametrize("compressor", ["none", "topk(0.99) >> bf16", "rd(0.9)", "qsgd(16)"])
def test_gpu_is_reproducible_and_close_to_the_cpu(compressor: str) -> None:
    """On the GPU two runs agree bitwise; with the CPU they agree in float64."""
    base = Config(rounds=3, clients=4, local_steps="5", compressor=compressor, precision="float32")
    first, again = (run(base.replace(device="cuda")).model.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    exact = base.replace(precision="float64")
    cuda, cpu = (run(exact.replace(device=device)).model.state_dict() for device in ("cuda", "cpu"))
    for name in cpu:
        torch.testing.assert_close(cuda[name], cpu[name], rtol=1e-9, atol=1e-12)


def test_state_is_never_changed_in_place() -> None:
    engine = make(Config(rounds=2, local_steps="2"), blobs())
    first = engine.start()
    second, _ = engine.round(first)
    kept = State(second.t, second.x.clone(), second.b.clone(), second.residuals)
    vectors = {i: e.clone() for i, e in second.residuals.vectors.items()}
    engine.round(second)
    assert torch.equal(second.x, kept.x)
    assert all(torch.equal(second.residuals.vectors[i], vectors[i]) for i in vectors)
