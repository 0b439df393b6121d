"""Algorithm 1: one example by hand, then its laws over real runs."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from cfedavg import Aggregator, Channel, Config, Task, average, parse, run
from cfedavg.algorithm import ServerMemory
from cfedavg.core.keys import Purpose, key, permutation
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Payload
from cfedavg.feedback import ErrorFeedback
from cfedavg.optimise.server import ServerSGD
from cfedavg.simulate.engines import ReferenceEngine
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import State
from tests.conftest import blobs, quadratic

CPU = torch.device("cpu")
COMPRESSORS = [
    "none",
    "topk(0.9)",
    "topk(snr=1.5) >> int4(16)",
    "rd(0.7)",
    "topk(0.8) >> bf16",
    "qsgd(4)",
    "sign",
]


def engine(config: Config, task: Task) -> ReferenceEngine:
    config = config.replace(clients=len(task.clients))
    return ReferenceEngine(Plan(config, task), task, CPU)


def states(config: Config, task: Task) -> list[State]:
    e = engine(config, task)
    found = [e.start()]
    for _ in range(config.rounds):
        found.append(e.round(found[-1])[0])
    return found


def stepped(x: Tensor, payload: Payload, eta: float) -> Tensor:
    """Lines 17 to 19 for payloads of equal weight."""
    weights, n = [1.0] * len(payload), float(len(payload))
    aggregator = Aggregator(ErrorFeedback(), ServerSGD())
    return aggregator.step(x, ServerMemory(), [(payload, weights)], everyone=n, eta=eta)[0]


def test_two_rounds_by_hand() -> None:
    """3 clients, 5 parameters, F_i(x) = |x - c_i|^2 / 2, K = 1, eta_L = 1/2: so g_i = (c_i - x) / 2.

    Top-k 0.6 sends 2 of 5; eta = 3 makes x_next = x + the sum of what was sent.
    """
    centres = torch.tensor([[4.0, -2, 8, 0, 6], [-4, 2, 0, 8, 2], [0, 0, 4, -4, 2]])
    config = Config(rounds=2, local_steps="1", eta_local=0.5, eta=3.0, compressor="topk(0.6)", batch_size=1,
                    compressor_down="none")  # fmt: skip
    channel = Channel(parse("topk(0.6)"), ErrorFeedback(), Layout.flat(5))
    keys = torch.zeros(3, dtype=torch.int64)

    # Round 0, from x = 0 and e = 0.
    x = torch.zeros(5)
    e = torch.zeros(3, 5)
    g = torch.tensor([[2.0, -1, 4, 0, 3], [-2, 1, 0, 4, 1], [0, 0, 2, -2, 1]])
    assert torch.equal((centres - x) / 2, g)
    _, payload, left, e = channel.send(g, e, keys)
    assert torch.equal(left, e)
    assert payload.indices.tolist() == [2, 4, 0, 3, 2, 3]
    assert payload.values.data.tolist() == [4, 3, -2, 4, 2, -2]
    assert e.tolist() == [[2, -1, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 0, 0, 1]]
    delta_tilde, weight = average(x, [(payload, [1.0] * len(payload))])
    assert weight == 3
    torch.testing.assert_close(delta_tilde, torch.tensor([-2.0, 0, 6, 2, 3]) / 3)
    x = stepped(x, payload, 3.0)
    torch.testing.assert_close(x, torch.tensor([-2.0, 0, 6, 2, 3]))
    after_1 = x, e

    # Round 1, from x = (-2, 0, 6, 2, 3). The third client has a tie of 1 at coordinates 0 and 2: 0 wins.
    g = torch.tensor([[3.0, -1, 1, -1, 1.5], [-1, 1, -3, 3, -0.5], [1, 0, -1, -3, -0.5]])
    torch.testing.assert_close((centres - x) / 2, g)
    _, payload, left, e = channel.send(g, e, keys)
    assert torch.equal(left, e)
    p = torch.tensor([[5.0, -2, 1, -1, 1.5], [-1, 2, -3, 3, 0.5], [1, 0, -1, -3, 0.5]])
    assert payload.indices.tolist() == [0, 1, 2, 3, 0, 3]
    assert payload.values.data.tolist() == [5, -2, -3, 3, 1, -3]
    assert e.tolist() == [[0, 0, 1, -1, 1.5], [-1, 2, 0, 0, 0.5], [0, 0, -1, 0, 0.5]]
    x = stepped(x, payload, 3.0)
    torch.testing.assert_close(x, torch.tensor([4.0, -2, 3, 2, 3]))

    # The engine, from nothing but the configuration and the data, goes through the same numbers.
    _, first, second = states(config, quadratic(centres))
    for state, (x_, e_) in ((first, after_1), (second, (x, e))):
        torch.testing.assert_close(state.x, x_)
        torch.testing.assert_close(torch.stack([state.residuals.vectors[i] for i in range(3)]), e_)
    row = run(config, quadratic(centres)).rows[1]
    assert row["coordinates_sent"] == 6
    assert row["model_sizes_sent"] == pytest.approx(0.4)
    assert row["delta_norm2"] == pytest.approx((g**2).sum().item() / 3)
    assert row["alpha"] == pytest.approx((g**2).sum().item() / 3 / (g.mean(0) ** 2).sum().item())
    assert row["error_norm2"] == pytest.approx((e**2).sum().item() / 3)
    assert row["delta_norm"] == pytest.approx(g.norm(dim=1).sum().item() / 3)
    assert row["error_norm"] == pytest.approx(e.norm(dim=1).sum().item() / 3)
    snr = (p**2).sum(1) / (e**2).sum(1)
    assert row["snr_min"] == pytest.approx(snr.min().item())
    assert row["snr_mean"] == pytest.approx(snr.mean().item())


def virtual(state: State, eta: float, clients: int) -> Tensor:
    """x + (eta / clients of a round) * sum of all residuals."""
    return state.x + eta / clients * sum(state.residuals.vectors.values(), torch.zeros_like(state.x))


def mean_update(config: Config, task: Task, state: State) -> Tensor:
    """Delta_t, made by an engine whose clients send everything and remember nothing."""
    plain = config.replace(compressor="none", feedback="none", eta=1.0, drop_rate=0.0)
    return engine(plain, task).round(State(state.t, state.x, state.b))[0].x - state.x


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_iterative_step_lemma(compressor: str, participation: float) -> None:
    """x_hat moves as if nothing were compressed, with all clients and with a sampled part of fixed number."""
    task = blobs()
    config = Config(rounds=4, local_steps="3", eta=0.7, compressor=compressor, precision="float64",
                    participation=participation, clients=6, compressor_down="none")  # fmt: skip
    n = round(participation * 6)
    found = states(config, task)
    for now, following in pairwise(found):
        expected = virtual(now, 0.7, n) + 0.7 * mean_update(config, task, now)
        torch.testing.assert_close(virtual(following, 0.7, n), expected, rtol=0, atol=1e-13)


def test_lost_replies_go_back_into_the_residual() -> None:
    """A lost update stays in the residual, bit for bit: e_next = g + e."""
    task = blobs()
    config = Config(rounds=6, local_steps="2", eta=1.0, drop_rate=0.5, precision="float64", clients=6,
                    compressor="topk(0.9)", compressor_down="none", checkpoint_every=0)  # fmt: skip
    plan = Plan(config, task)
    found = states(config, task)
    for now, following in pairwise(found):
        for i in range(6):
            if plan.lost(now.t, i):
                e, e_next = (s.residuals.get(i, s.x) for s in (now, following))
                alone = engine(config.replace(compressor="none", feedback="none", drop_rate=0.0), task)
                g = alone._client(State(now.t, now.x, now.b), i).g
                assert torch.equal(e_next, g + e)
    assert sum(plan.lost(t, i) for t in range(6) for i in range(6)) > 5


def test_all_replies_lost_leaves_the_model_as_it_is() -> None:
    config = Config(rounds=1, local_steps="2", drop_rate=0.999999)
    before, after = states(config, blobs())
    assert torch.equal(before.x, after.x)


def fedavg(task: Task, rounds: int, K: int, eta_L: float, eta: float, batch_size: int) -> Tensor:
    """Plain FedAvg, x + eta * mean(x_i - x), with SGD spelled out."""
    model = copy.deepcopy(task.model)
    parameters = list(model.parameters())

    def flat() -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in parameters])

    def put(x: Tensor) -> None:
        torch.nn.utils.vector_to_parameters(x, parameters)

    x = flat()
    for t in range(rounds):
        total = torch.zeros_like(x)
        for i, data in enumerate(task.clients):
            put(x.clone())
            rows: list[np.ndarray] = []
            for epoch in range(K):
                order = permutation(key(key(0, t, i, Purpose.BATCH), epoch, 0, Purpose.BATCH), len(data))
                rows += [order[s : s + batch_size] for s in range(0, len(data), batch_size)]
            for at in rows[:K]:
                loss = task.loss(model, data.batch(at))
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    for p, gradient in zip(parameters, gradients, strict=True):
                        p.sub_(gradient, alpha=eta_L)
            total += flat() - x
        x = x + eta * (total / len(task.clients))
    return x


@pytest.mark.parametrize("eta", [1.0, 0.5])
def test_no_compression_is_fedavg_bitwise(eta: float) -> None:
    config = Config(rounds=3, local_steps="4", eta=eta, eta_local=0.1, compressor="none", batch_size=7,
                    compressor_down="none")  # fmt: skip
    assert torch.equal(states(config, blobs())[-1].x, fedavg(blobs(), 3, 4, 0.1, eta, 7))


@pytest.mark.parametrize("compressor", ["none", "topk(0.9)", "rd(0.7)"])
def test_mean_with_equal_K_is_sum_with_eta_divided(compressor: str) -> None:
    """g / K is compressed to C(g) / K by compressors that only select; so eta * K makes up for it."""
    base = Config(rounds=3, local_steps="4", compressor=compressor, precision="float64",
                  compressor_down="none")  # fmt: skip
    by_sum = states(base.replace(update="sum", eta=2.0 / 4), blobs())[-1]
    by_mean = states(base.replace(update="mean", eta=2.0), blobs())[-1]
    torch.testing.assert_close(by_sum.x, by_mean.x, rtol=1e-12, atol=1e-14)


def test_without_error_feedback_e_stays_zero() -> None:
    config = Config(rounds=2, local_steps="2", feedback="none")
    last = states(config, blobs())[-1]
    assert last.residuals.vectors == {}
    rows = run(config, blobs()).rows
    assert all(row["error_norm2"] == 0 for row in rows)
    assert rows[0]["snr_min"] is not None


def test_client_not_sampled_keeps_its_residual() -> None:
    config = Config(rounds=5, local_steps="2", participation=0.34, clients=6)
    task = blobs()
    plan = Plan(config, task)
    found = states(config, task)
    for now, following in pairwise(found):
        sampled = plan.sampled(now.t)
        assert len(sampled) == len(set(sampled)) == 2
        for i in set(range(6)) - set(sampled):
            assert torch.equal(now.residuals.get(i, now.x), following.residuals.get(i, now.x))


def test_average_of_nothing_is_zero_and_weights_count() -> None:
    x = torch.zeros(4)
    assert torch.equal(average(x, [])[0], x)
    one = parse("topk(0.5)").compress(torch.tensor([4.0, 0, 0, 8]), key=0)
    two = parse("none").compress(torch.tensor([0.0, 0, 0, 4]), key=0)
    assert average(x, [(one, [3.0]), (two, [1.0])])[0].tolist() == [3, 0, 0, 7]


def test_a_block_is_sent_as_its_clients_are() -> None:
    generator = torch.Generator().manual_seed(0)
    g, e = torch.randn(4, 30, generator=generator), torch.randn(4, 30, generator=generator)
    keys = torch.arange(4)
    for text in COMPRESSORS:
        channel = Channel(parse(text), ErrorFeedback(), Layout.flat(30))
        block = channel.send(g, e, keys)
        for i, alone in enumerate(block.payload.clients()):
            made = channel.send(g[i], e[i], int(keys[i]))
            assert torch.equal(block.memory[i], made.memory), text
            assert made.payload.counts() == alone.counts()
