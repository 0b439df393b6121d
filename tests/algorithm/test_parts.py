"""Every exchangeable part goes through the same tests: one row of the table is all that a new one needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cfedavg import Aggregator, Channel, Config, InputError, Task, parse
from cfedavg import run as run_and_draw
from cfedavg.algorithm import ServerMemory
from cfedavg.core.layout import Layout
from cfedavg.feedback import EF21, FEEDBACKS, ErrorFeedback, Feedback, NoFeedback, Weights
from cfedavg.optimise.local import (
    LOCAL_OPTIMISERS,
    SGD,
    AdamW,
    Clip,
    Fixed,
    Prox,
    parse_local_optimiser,
    step_lengths,
)
from cfedavg.optimise.server import SERVER_OPTIMISERS, Adam, ServerOptimiser, ServerSGD
from cfedavg.simulate.plan import Plan
from tests.algorithm.test_algorithm import engine as reference
from tests.algorithm.test_algorithm import states
from tests.conftest import blobs, quadratic
from tests.simulate.test_engines import DEVICES, ENGINES, agree
from tests.simulate.test_workers import assert_same, contents, forked, task  # noqa: F401 - forked is a fixture

run = partial(run_and_draw, draw=False)  # the pictures would take longer than these runs


class Row(NamedTuple):
    field: str
    text: str
    written: str = ""  # how the part writes itself, if not as the text


OWN = "tests.own_parts"
TABLE = [
    Row("local_optimiser", "sgd"),
    Row("local_optimiser", "sgd(0.9)", "sgd(momentum=0.9)"),
    Row("local_optimiser", "sgd(momentum=0.9, weight_decay=0.01, nesterov=true)"),
    Row("local_optimiser", "adamw"),
    Row("local_optimiser", "clip(0.1) >> sgd(momentum=0.9)"),
    Row("local_optimiser", "prox(0.5) >> sgd"),
    Row("local_optimiser", "prox(0.5) >> clip(0.1) >> adamw(weight_decay=0.1)"),
    Row("local_optimiser", "scaffold >> sgd"),
    Row("local_optimiser", "prox(0.5) >> scaffold >> sgd(weight_decay=0.01)"),
    Row("local_optimiser", f"{OWN}:Halve >> {OWN}:SignDescent(beta=0.7)"),
    Row("server_optimiser", "sgd"),
    Row("server_optimiser", "momentum(0.8)", "momentum(beta=0.8)"),
    Row("server_optimiser", "nesterov"),
    Row("server_optimiser", "adam"),
    Row("server_optimiser", "adagrad"),
    Row("server_optimiser", "yogi(beta2=0.9)"),
    Row("server_optimiser", f"{OWN}:Lookahead"),
    Row("feedback", "ef"),
    Row("feedback", "ef(decay=0.9)"),
    Row("feedback", "ef21"),
    Row("feedback", "none"),
    Row("feedback", "sapef(0.7)", "sapef(alpha=0.7)"),
    Row("feedback", "cafe"),
    Row("feedback", f"{OWN}:Lookout(share=0.3)"),
]
PARSERS: dict[str, Callable[[str], Any]] = {
    "local_optimiser": parse_local_optimiser,
    "server_optimiser": SERVER_OPTIMISERS.parse,
    "feedback": FEEDBACKS.parse,
}
every_part = pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.field} {row.text}")


def test_every_registered_part_has_a_row() -> None:
    for registry in (LOCAL_OPTIMISERS, SERVER_OPTIMISERS, FEEDBACKS):
        texts = [row.text for row in TABLE if row.field == registry.field]
        named = {piece.split("(")[0].strip() for text in texts for piece in text.split(">>")}
        assert {name for name in named if ":" not in name} == registry.entries.keys()


@every_part
def test_a_part_writes_the_text_that_names_it(row: Row) -> None:
    made = PARSERS[row.field](row.text)
    assert str(made) == (row.written or row.text)
    assert PARSERS[row.field](str(made)) == made


@every_part
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree(row: Row, engine: str, device: str) -> None:
    """With lost replies, partial participation and clients of different sizes."""
    options: dict[str, Any] = {row.field: row.text}
    agree(blobs(), engine, device, compressor="topk(0.8)", batch_size=8, local_epochs=2, drop_rate=0.3,
          participation=0.7, **options)  # fmt: skip


@every_part
def test_a_resume_is_bitwise(row: Row, tmp_path: Path) -> None:
    options: dict[str, Any] = {"engine": "sequential", row.field: row.text}
    config = Config(rounds=5, local_steps="1..4", batch_size=8, drop_rate=0.3, checkpoint_every=2, **options)
    run(config, blobs(), out=tmp_path / "whole")
    run(config.replace(rounds=3), blobs(), out=tmp_path / "parts")
    run(config, blobs(), out=tmp_path / "parts", resume=True)
    assert_same(contents(tmp_path / "parts"), contents(tmp_path / "whole"))


@pytest.mark.usefixtures("forked")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@every_part
def test_workers_change_no_bit(row: Row, tmp_path: Path) -> None:
    options: dict[str, Any] = {row.field: row.text}
    config = Config(rounds=3, local_steps="2", batch_size=9, drop_rate=0.2, engine="sequential", **options)
    for workers in (1, 2):
        run(config.replace(workers=workers), task(), out=tmp_path / str(workers))
    assert_same(contents(tmp_path / "2"), contents(tmp_path / "1"))


@every_part
def test_nothing_of_what_goes_in_is_changed(row: Row) -> None:
    rng, part = np.random.default_rng(0), PARSERS[row.field](row.text)
    g, memory, x = (rng.standard_normal(12) for _ in range(3))
    if row.field == "feedback":
        sent = parse("topk(0.5)").compress(g, 0)
        given = [g, memory, x]
        before = [each.copy() for each in given]
        part.start(x, memory, x)
        part.outgoing(g, memory, x)
        part.remember(g, sent, memory)
        part.restore(memory, sent)
        part.receive(g, memory, Weights(2.0, 3.0))
    elif row.field == "server_optimiser":
        state = {name: abs(rng.standard_normal(12)) for name in part.init(x)}
        given = [x, g, *state.values()]
        before = [each.copy() for each in given]
        part.step(x, g, state, 0.1, t=3)
    else:
        tensors = [torch.from_numpy(each) for each in (x, g, memory)]
        start = part.init([tensors[0]])
        given = [x, g, memory, *(each[0].numpy() for each in start.values())]
        before = [each.copy() for each in given]
        part.step([tensors[0]], [tensors[1]], start, 0.1, Fixed([tensors[2]], [tensors[2]]))
    assert all(map(np.array_equal, given, before))


@pytest.mark.parametrize("row", [row for row in TABLE if row.field == "server_optimiser"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_servers_step_alike_in_numpy_and_torch(row: Row, dtype: Any) -> None:
    optimiser, rng = SERVER_OPTIMISERS.parse(row.text), np.random.default_rng(0)
    x = rng.standard_normal(50).astype(dtype)
    mine, its = (x, optimiser.init(x)), (torch.from_numpy(x), optimiser.init(torch.from_numpy(x)))
    for t in range(5):
        delta = rng.standard_normal(50).astype(dtype)
        mine = optimiser.step(*_args(mine, delta), 0.1, t)
        its = optimiser.step(*_args(its, torch.from_numpy(delta)), 0.1, t)
        assert mine[0].dtype == dtype
        assert np.array_equal(mine[0], its[0].numpy())
        assert all(np.array_equal(mine[1][name], its[1][name].numpy()) for name in mine[1])


def _args(at: Any, delta: Any) -> Any:
    return at[0], delta, at[1]


# --- local optimisers against torch's -----------------------------------------------------------------


def steps_of(optimiser: Any, step: Callable[[list[nn.Parameter], int], None], count: int = 6) -> float:
    """Return how far our steps are from those of another optimiser, on three tensors."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (7,), (2, 3, 3)]
    mine: list[Tensor] = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    theirs = [nn.Parameter(p.clone()) for p in mine]
    fixed, state = Fixed([p.clone() for p in mine], []), optimiser.init(mine)
    for k in range(count):
        grads = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        mine, state = optimiser.step(mine, grads, state, 0.1, fixed)
        step(theirs, k)
    return max((a - b).detach().abs().max().item() for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.01},
    ],
    ids=str,
)
def test_sgd_is_torchs_bit_for_bit(options: dict[str, Any]) -> None:
    made: list[torch.optim.SGD] = []

    def step(parameters: list[nn.Parameter], k: int) -> None:
        if not made:
            made.append(torch.optim.SGD(parameters, lr=0.1, **options))
        made[0].step()

    assert steps_of(SGD(**options), step) == 0


def test_adamw_is_torchs() -> None:
    made: list[torch.optim.AdamW] = []

    def step(parameters: list[nn.Parameter], k: int) -> None:
        if not made:
            made.append(torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.05, betas=(0.8, 0.99), eps=1e-6))
        made[0].step()

    assert steps_of(AdamW(0.05, 0.8, 0.99, 1e-6), step) < 1e-14


def test_adamw_is_torchs_in_float32() -> None:
    """AdamW agrees with torch's, also where 1 - beta^k is small."""
    p, g = torch.ones(4), torch.tensor([1.0, -0.1, 1e-3, 5.0])
    theirs, mine = nn.Parameter(p.clone()), p
    optimiser, ours = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.99999)), AdamW(beta2=0.99999)
    state = ours.init([p])
    for _ in range(3):
        theirs.grad = g.clone()
        optimiser.step()
        (mine,), state = ours.step([mine], [g], state, 0.1, [])
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=0)


def test_a_part_in_float64_changes_no_dtype() -> None:
    """Results keep the dtype of x, also where NumPy's numbers or a user's part change it."""
    x = np.ones(3, np.float32)
    aggregator = Aggregator(EF21(), SERVER_OPTIMISERS.parse("adam"))
    payload = parse("none").compress(x, 0)
    x_next, memory = aggregator.step(
        x, aggregator.init(x), [(payload, [1.0])], everyone=2.0, eta=np.float64(0.5)
    )
    assert {each.dtype for each in (x_next, *memory.vectors().values())} == {np.dtype(np.float32)}
    made = Channel(parse("none"), ErrorFeedback(np.float64(0.9)), Layout.flat(3)).send(x, x, 0)
    assert made.p.dtype == made.memory.dtype == np.float32


def test_clip_is_torchs() -> None:
    def step(parameters: list[nn.Parameter], k: int) -> None:
        nn.utils.clip_grad_norm_(parameters, 3.0)
        torch.optim.SGD(parameters, lr=0.1).step()

    assert steps_of(Clip(3.0) >> SGD(), step) < 1e-6  # torch adds 1e-6 to the norm
    assert steps_of(Clip(1e9) >> SGD(), lambda p, k: torch.optim.SGD(p, lr=0.1).step()) == 0


def test_prox_pulls_back_to_the_start() -> None:
    start, p, g = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0]), torch.tensor([0.5, 0.5])
    ((found,), _) = (Prox(0.25) >> SGD()).step([p], [g], {}, 0.1, Fixed([start], []))
    torch.testing.assert_close(found, p - 0.1 * (g + 0.25 * (p - start)))


def test_a_parameter_without_a_gradient_stays() -> None:
    """Also in an optimiser with weight decay and a state, in some steps and in none."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))

    def loss(model: Any, batch: Tensor) -> Tensor:
        value: Tensor = (model.used * batch).sum() + (model.other.sum() if batch[0, 0] > 0 else 0.0)
        return value

    from cfedavg.simulate.local import after, local_steps

    model, plain = Sometimes(), Sometimes()
    data = [torch.full((1, 2), value, dtype=torch.float64) for value in (1.0, -1.0, 1.0)]
    local_steps(model, loss, data, AdamW(0.1), 0.05, after(3))
    optimiser = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
    for batch in data:
        optimiser.zero_grad(set_to_none=True)
        loss(plain, batch).backward()
        optimiser.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=0)


# --- feedback ------------------------------------------------------------------------------------------


def test_two_rounds_of_ef21_by_hand() -> None:
    """2 clients, F_i(x) = |x - c_i|^2 / 2, K = 1, eta_L = 1/2, so g_i = (c_i - x) / 2; one of two is sent.

    Round 0, from x = 0 and h = 0: g = (2, 1) and (-1, 3); sent are 2 and 3, so h = (2, 0) and (0, 3), their
    mean is (1, 1.5), and x = (1, 1.5). Round 1: g = (1.5, 0.25) and (-1.5, 2.25), g - h = (-0.5, 0.25) and
    (-1.5, -0.75); sent are -0.5 and -1.5, so h = (1.5, 0) and (-1.5, 3), their mean is (0, 1.5).
    """
    config = Config(rounds=2, local_steps="1", eta_local=0.5, compressor="topk(0.5)", feedback="ef21",
                    batch_size=1)  # fmt: skip
    _, first, second = states(config, quadratic(torch.tensor([[4.0, 2.0], [-2.0, 6.0]])))
    assert first.x.tolist() == [1, 1.5]
    assert [first.residuals.vectors[i].tolist() for i in (0, 1)] == [[2, 0], [0, 3]]
    assert second.x.tolist() == [1, 3]
    assert [second.residuals.vectors[i].tolist() for i in (0, 1)] == [[1.5, 0], [-1.5, 3]]
    assert second.memory.feedback.tolist() == [0, 3]


def test_the_server_knows_the_sum_of_what_ef21_clients_know() -> None:
    """The law holds with sampled clients, lost replies and weights by samples."""
    config = Config(rounds=6, local_steps="2", feedback="ef21", compressor="topk(0.8)", drop_rate=0.4,
                    participation=0.5, precision="float64", weighting="samples", clients=6)  # fmt: skip
    plan = Plan(config, blobs())
    for state in states(config, blobs())[1:]:
        total = sum(plan.weight(i) * state.residuals.get(i, state.x) for i in range(6))
        torch.testing.assert_close(state.memory.feedback, total, rtol=1e-12, atol=1e-12)


def test_ef21_memories_may_not_be_rounded() -> None:
    with pytest.raises(InputError, match="`residual_precision` must be full with the feedback ef21"):
        Plan(Config(feedback="ef21", residual_precision="bf16"), blobs())


def test_what_a_feedback_shares_is_counted() -> None:
    """CAFe's broadcast is twice as long as that of the model alone."""
    down = {
        text: run(Config(rounds=1, feedback=text, compressor_down="none"), blobs()).final["downlink_bytes"]
        for text in ("none", "cafe")
    }
    assert down["cafe"] == 2 * down["none"]


def test_cafe_without_compression_is_fedavg() -> None:
    for text in ("none", "topk(0.5)"):
        plain, cafe = (
            states(Config(rounds=4, local_steps="2", feedback=feedback, compressor=text, precision="float64"),
                   blobs())[-1].x for feedback in ("none", "cafe")
        )  # fmt: skip
        assert torch.allclose(plain, cafe, rtol=1e-12, atol=1e-14) == (text == "none")


def test_cafe_by_hand() -> None:
    """Two clients, centres (8, 0) and (0, 4), rate 1/2, one step: g is half of the way to the centre."""
    config = Config(rounds=2, local_steps="1", eta_local=0.5, compressor="topk(0.5)", batch_size=1,
                    compressor_down="none", feedback="cafe")  # fmt: skip
    _, first, second = states(config, quadratic(torch.tensor([[8.0, 0.0], [0.0, 4.0]])))
    # g = (4, 0) and (0, 2); the server has u = 0 and applies their mean.
    assert first.x.tolist() == first.memory.feedback.tolist() == [2, 1]
    # From (2, 1): g = (3, -1/2) and (-1, 3/2), less u: (1, -3/2) and (-3, 1/2), of which -3/2 and -3 travel.
    assert second.memory.feedback.tolist() == [2 - 1.5, 1 - 0.75]
    assert second.x.tolist() == [2.5, 1.25]


FEDNOVA: Any = {"rounds": 1, "batch_size": 1, "compressor": "none", "compressor_down": "none",
                "precision": "float64", "update": "fednova"}  # fmt: skip


def test_fednova_by_hand() -> None:
    """Centres 8 and 4 from x = 0, rate 1/2, 1 and 2 steps: x_K = 4 and 3, a = 1 and 2."""
    config = Config(local_steps="1,2", eta_local=0.5, **FEDNOVA)
    _, state = states(config, quadratic(torch.tensor([[8.0], [4.0]])))
    # tau_eff is the mean of 1 and 2, and the normalised updates are 4 / 1 and 3 / 2.
    assert state.x.tolist() == [1.5 * (4 + 1.5) / 2]


@pytest.mark.parametrize("rate", [0.1, 0.01])
@pytest.mark.parametrize("K", [1, 2, 7, 40])
def test_step_lengths_are_those_of_fednova(K: int, rate: float) -> None:
    """Wang et al. (2020): |a|_1 with momentum rho, and with a proximal term mu."""
    rho, mu = 0.9, 0.5
    momentum = (K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho)
    proximal = (1 - (1 - rate * mu) ** K) / (rate * mu)
    for optimiser, length in (
        (SGD(), K), (SGD(momentum=rho), momentum), (Prox(mu) >> SGD(), proximal),
    ):  # fmt: skip
        assert step_lengths(optimiser, rate, 64)[K - 1] == pytest.approx(length, rel=1e-9)


def test_fednova_is_right_where_averaging_is_not() -> None:
    """Clients with 2 and 20 steps: FedAvg stops near the second centre, FedNova at the mean of both."""
    centres = torch.tensor([[0.0], [1.0]])

    def end(update: str, optimiser: str) -> float:
        config = Config(local_steps="2,20", eta_local=0.002, local_optimiser=optimiser,
                        **FEDNOVA | {"rounds": 200, "update": update})  # fmt: skip
        return float(states(config, quadratic(centres))[-1].x)

    assert end("sum", "sgd") > 0.85
    assert end("fednova", "sgd") == pytest.approx(0.5, abs=0.02)
    assert end("fednova", "sgd(momentum=0.5)") == pytest.approx(0.5, abs=0.03)
    assert end("mean", "sgd(momentum=0.5)") > 0.58


def test_fednova_has_no_rate_conditions() -> None:
    with pytest.raises(InputError, match="`smoothness` must not be given with `update` fednova"):
        Plan(Config(update="fednova", smoothness=1.0), blobs())


def test_a_start_ahead_is_where_the_update_is_measured_from() -> None:
    """With alpha = 1 and one local step on a quadratic, g is the gradient at x + e."""
    centres = torch.tensor([[8.0, 4.0]])
    config = Config(rounds=2, local_steps="1", eta_local=0.5, compressor="topk(0.5)", batch_size=1,
                    feedback="sapef(1.0)")  # fmt: skip
    _, first, second = states(config, quadratic(centres))
    assert (first.x.tolist(), first.residuals.vectors[0].tolist()) == ([4, 0], [0, 2])
    # From (4, 2): g = (2, 1), p = (2, 3), of which 3 is sent.
    assert (second.x.tolist(), second.residuals.vectors[0].tolist()) == ([4, 3], [2, 0])


# --- error feedback under server optimisers -------------------------------------------------------------


def flushed(optimiser: ServerOptimiser, compressor: str) -> np.ndarray:
    """Three clients with updates that do not depend on the model; at the end all residuals are sent."""
    rng, d = np.random.default_rng(0), 40
    x, memories = np.zeros(d), [np.zeros(d) for _ in range(3)]
    aggregator = Aggregator(ErrorFeedback(), optimiser)
    memory, layout = aggregator.init(x), Layout.flat(d)
    for t in range(200):
        last = t >= 20
        channel = Channel(parse("none" if last else compressor), ErrorFeedback(), layout)
        payloads = []
        for i in range(3):
            g = np.zeros(d) if last else rng.standard_normal(d)
            made = channel.send(g, memories[i], key=3 * t + i, t=t)
            memories[i] = made.memory
            payloads.append((made.payload, [1.0]))
        x, memory = aggregator.step(x, memory, payloads, everyone=3.0, eta=0.1, t=t)
    assert not any(each.any() for each in memories)
    return x


@pytest.mark.parametrize("name", SERVER_OPTIMISERS.entries)
def test_linear_servers_lose_nothing_of_what_comes_late(name: str) -> None:
    """After the residuals are flushed a linear server is where it would be without compression."""
    optimiser = SERVER_OPTIMISERS.parse(name)
    plain, compressed = (flushed(optimiser, text) for text in ("none", "topk(0.9)"))
    distance = np.linalg.norm(plain - compressed) / np.linalg.norm(plain)
    # 0.9^180 of a delta has not arrived yet under momentum.
    assert distance < 1e-7 if not optimiser.adapts else distance > 1e-3


class Recording(ServerOptimiser):
    """An optimiser that steps as another one and records its arguments."""

    def __init__(self, inner: ServerOptimiser) -> None:
        self.inner, self.deltas = inner, list[Tensor]()

    def init(self, x: Any) -> Any:
        return self.inner.init(x)

    def step(self, x: Any, delta: Any, state: Any, rate: float, t: int) -> Any:
        self.deltas.append(delta)
        return self.inner.step(x, delta, state, rate, t)


@pytest.mark.parametrize("name", SERVER_OPTIMISERS.entries)
def test_all_that_was_computed_is_sent_or_owed(name: str) -> None:
    """Sum of deltas + mean residual = sum of mean updates, under every server optimiser."""
    config = Config(rounds=5, local_steps="2", compressor="topk(0.9)", precision="float64", clients=6)
    config = config.replace(server_optimiser=name)
    it = reference(config, blobs())
    recording = Recording(it.plan.aggregator.optimiser)
    it.plan.aggregator = Aggregator(it.plan.feedback, recording)
    plain = reference(
        config.replace(compressor="none", feedback="none", server_optimiser="sgd", eta=1.0), blobs()
    )
    state, computed = it.start(), 0
    for _ in range(5):
        bare = replace(state, residuals=type(state.residuals)(), memory=ServerMemory())
        computed = computed + plain.round(bare)[0].x - state.x
        state, _ = it.round(state)
    owed = sum(state.residuals.vectors.values()) / 6
    torch.testing.assert_close(sum(recording.deltas) + owed, computed, rtol=1e-10, atol=1e-12)


def test_adam_by_hand() -> None:
    """m = 0.1 * 2, v = 0.01 * 4, the rate corrected for round 0 as if it were Kingma and Ba's second."""
    x, state = Adam(tau=0.5).step(np.zeros(1), np.array([2.0]), Adam().init(np.zeros(1)), 0.1, t=0)
    rate = 0.1 * math.sqrt(1 - 0.99**2) / (1 - 0.9**2)
    assert x[0] == pytest.approx(rate * 0.2 / (math.sqrt(0.04) + 0.5))
    assert (state["m"][0], state["v"][0]) == pytest.approx((0.2, 0.04))


@pytest.mark.parametrize(
    ("options", "eta", "scale"),
    [
        ({}, 1.0, 1.0),
        ({"local_steps": "1..3"}, 2.0, 1.0),
        ({"server_optimiser": "momentum(0.5)"}, 1.0, 1.0),
        ({"server_optimiser": "nesterov(0.5)", "local_steps": "1..3"}, 2.0, 1.0),
        ({"server_optimiser": "adam"}, 0.01, 1.0),
        ({"server_optimiser": "adam", "local_steps": "1..3"}, 0.01, 2.0),
        ({"server_optimiser": "adagrad", "local_steps": "1..3", "eta": 0.3}, 0.3, 2.0),
    ],
)
def test_rates(options: dict[str, Any], eta: float, scale: float) -> None:
    """For updates divided by K, a linear server multiplies its rate by K, an adaptive one its delta."""
    rates = Plan(Config(**{"local_steps": "2", **options}), blobs()).rates
    assert (rates.eta, rates.scale) == pytest.approx((eta, scale))


def test_a_corollary_sets_the_rate_of_sgd_alone() -> None:
    config = Config(schedule="corollary1", smoothness=1.0, server_optimiser="adam")
    with pytest.raises(InputError, match="`server_optimiser` must be sgd, since `schedule` corollary1"):
        Plan(config, blobs())


def test_a_round_without_replies_leaves_the_servers_memory() -> None:
    x, memory = np.ones(3), ServerMemory(None, {"v": np.ones(3)})
    aggregator = Aggregator(NoFeedback(), SERVER_OPTIMISERS.parse("momentum"))
    assert aggregator.step(x, memory, [], everyone=2.0, eta=1.0) == (x, memory)


@pytest.mark.parametrize(
    ("field", "text", "sentence"),
    [
        ("local_optimiser", "sgd(momentum=1)", "momentum must be from 0 to below 1, got 1"),
        ("local_optimiser", "sgd(nesterov=true)", "momentum must be above 0 with nesterov"),
        (
            "local_optimiser",
            "sgd(weight_decay=-1)",
            "weight_decay must be a finite number of 0 or more, got -1",
        ),
        ("local_optimiser", "clip(0) >> sgd", "c must be a finite number above 0, got 0"),
        ("local_optimiser", "clip(1)", "must end with an optimiser, as in clip\\(1\\) >> sgd"),
        ("local_optimiser", "sgd >> clip(1) >> sgd", "must have one optimiser, as its last part, but sgd is"),
        ("local_optimiser", "rmsprop", "unknown name 'rmsprop'; there are adamw, clip, prox, scaffold, sgd"),
        (
            "local_optimiser",
            "tests.own_parts:Lookout",
            "must be a subclass of cfedavg.optimise.local.LocalPart",
        ),
        ("local_optimiser", " >> ".join(["clip(1)"] * 8 + ["sgd"]), "must have at most 8 names"),
        ("server_optimiser", "momentum(-1)", "beta must be from 0 to below 1, got -1"),
        ("server_optimiser", "adam(tau=0)", "tau must be from 1e-30 to 1e30, got 0"),
        ("server_optimiser", "sgd >> adam", "must have one name"),
        ("server_optimiser", "adam(tau=1e-50)", "tau must be from 1e-30 to 1e30, got 1e-50"),
        ("server_optimiser", "cfedavg.optimise.server:ServerOptimiser", "must be a frozen dataclass"),
        ("local_optimiser", f"prox({10**400}) >> sgd", "mu must be a finite number of 0 or more, got 1000"),
        ("feedback", "cfedavg.feedback:Feedback", "must be a frozen dataclass; write @dataclass"),
        ("feedback", "ef(decay=0)", "decay must be above 0 and at most 1, got 0"),
        ("feedback", "ef(decay=true)", "decay must be above 0 and at most 1, got True"),
        ("feedback", "os:system", "must be a subclass of cfedavg.feedback.Feedback"),
    ],
)
def test_a_mistake_is_a_sentence(field: str, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=f"`{field}`:? .*{sentence}"):
        PARSERS[field](text)


def test_laws_are_stated() -> None:
    for kind in FEEDBACKS.entries.values():
        assert issubclass(kind, Feedback)  # type: ignore[arg-type]
        assert kind.law  # type: ignore[attr-defined]
    assert isinstance(SERVER_OPTIMISERS.parse("sgd"), ServerSGD)
    assert EF21().mirrors_clients


# --- they train ----------------------------------------------------------------------------------------


def transformer() -> Task:
    """Which of three kinds a sequence of 12 symbols is: they differ in how often each symbol occurs."""
    generator = torch.Generator().manual_seed(0)

    def draw(kind: int, n: int) -> tuple[Tensor, Tensor]:
        return torch.randint(5, (n, 12), generator=generator) + kind, torch.full((n,), kind)

    def client(i: int) -> tuple[Tensor, Tensor]:
        pairs = [draw(kind, 12) for kind in (i % 3, (i + 1) % 3)]
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 16), nn.Linear(16, 3)
            self.place = nn.Parameter(0.1 * torch.randn(12, 16))
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.head(self.layer(self.embed(x) + self.place).mean(1))
            return found

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    test = [draw(kind, 40) for kind in range(3)]
    together = torch.cat([x for x, _ in test]), torch.cat([y for _, y in test])
    return Task(model, [client(i) for i in range(6)], test=together)


TRAINS: dict[str, dict[str, Any]] = {
    "FedAdam": {"server_optimiser": "adam(tau=0.01)"},
    "FedAvgM": {"server_optimiser": "momentum(0.5)"},
    "FedProx": {"local_optimiser": "prox(0.01) >> sgd"},
    "SCAFFOLD": {"local_optimiser": "scaffold >> sgd"},
    "local AdamW": {"local_optimiser": "clip(1.0) >> adamw", "eta_local": 0.01},
}


# `test_engines_agree` shows that the others do the same, which takes them three times as long.
TRAINING = ["batched", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sequential", "reference"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", TRAINING)
@pytest.mark.parametrize("name", TRAINS)
def test_a_small_transformer_trains(name: str, engine: str, device: str) -> None:
    config = Config(rounds=20, local_steps="10", batch_size=8, compressor="topk(0.9) >> bf16", engine=engine,
                    device=device, eval_every=20, **{"eta_local": 0.2, **TRAINS[name]})  # fmt: skip
    result = run(config, transformer())
    assert result.final["test_accuracy"] > 0.7  # by chance 0.33
