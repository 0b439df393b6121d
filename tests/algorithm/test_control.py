"""Control variates: SCAFFOLD by hand and as its paper defines it, and the law of their channel."""

from __future__ import annotations

import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cfedavg import Config, InputError, Task
from cfedavg import run as run_and_draw
from cfedavg.channel import Downlink
from cfedavg.core.keys import Purpose
from cfedavg.core.layout import Layout
from cfedavg.launch.app.plan import make_plan
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import MemoryRow
from cfedavg.simulate.state import Control, State
from tests.algorithm.test_algorithm import engine as reference
from tests.algorithm.test_algorithm import states
from tests.conftest import Point, blobs, half_square
from tests.simulate.test_run import Stop, forge, holds, refuses

run = partial(run_and_draw, draw=False)
SCAFFOLD = "scaffold >> sgd"
WHOLE: dict[str, Any] = {"compressor": "none", "compressor_down": "none", "precision": "float64"}


def parabolas(curvature: Tensor, centres: Tensor) -> Task:
    """Client i has F_i(x) = sum of h_i (x - a_i)^2 / 2; row i of `curvature` holds h_i, of `centres` a_i."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        h, a = batch
        return 0.5 * (h * (model.x - a).square()).sum()  # type: ignore[operator]

    clients = [(h[None], a[None]) for h, a in zip(curvature, centres, strict=True)]
    return Task(Point(centres.shape[1]), clients, loss=loss)


def drawn(m: int = 6, d: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(m, d, generator=generator, dtype=torch.float64) * 1.8 + 0.2,
            torch.randn(m, d, generator=generator, dtype=torch.float64))  # fmt: skip


def server(state: State) -> Control:
    assert state.control is not None
    return state.control


def c_of(state: State, client: int) -> Tensor:
    row = state.residuals.row
    assert row is not None
    found = row.split(state.residuals.get(client, state.x.new_zeros(row.length)))[1]
    assert found is not None
    return found


def test_two_rounds_by_hand() -> None:
    """F_0 = (x - 4)^2 and F_1 = (x + 4)^2 / 2; K = 2, eta_L = 1/4, a step is x - (gradient + c - c_i) / 4.

    Round 0, from x = 0 and c = c_i = 0: client 0 has the gradients -8, -4 and goes to 2, 3, so c_0 = -6.
    Client 1 has 4, 3 and goes to -1, -1.75, so c_1 = 3.5. x = (3 - 1.75) / 2 and c = (-6 + 3.5) / 2.

    Round 1, from x = 0.625 and c = -1.25: client 0 adds 4.75 to the gradients -6.75, -5.75 and goes to 1.125,
    1.375, so c_0 = -6.25. Client 1 adds -4.75 to 4.625, 4.65625 and goes to 0.65625, 0.6796875, so
    c_1 = 4.640625.
    """
    task = parabolas(torch.tensor([[2.0], [1.0]]), torch.tensor([[4.0], [-4.0]]))
    config = Config(rounds=2, local_steps="2", eta_local=0.25, batch_size=1, local_optimiser=SCAFFOLD,
                    compressor="none", compressor_down="none")  # fmt: skip
    start, first, second = states(config, task)
    assert server(start).c.tolist() == [0]
    assert [first.x.item(), server(first).c.item()] == [0.625, -1.25]
    assert [c_of(first, i).item() for i in (0, 1)] == [-6, 3.5]
    assert [second.x.item(), server(second).c.item()] == [1.02734375, -0.8046875]
    assert [c_of(second, i).item() for i in (0, 1)] == [-6.25, 4.640625]


@pytest.mark.parametrize("update", ["sum", "mean"])
def test_without_compression_it_is_the_papers_algorithm_1(update: str) -> None:
    """With option II, sampled clients and a global rate: x, c and all c_i, over 8 rounds."""
    h, a = drawn()
    config = Config(rounds=8, local_steps="3", eta_local=0.3, eta=0.7 * (3 if update == "mean" else 1),
                    participation=0.5, update=update, local_optimiser=SCAFFOLD, **WHOLE)  # fmt: skip
    plan = Plan(config, parabolas(h, a))
    x, c, c_i = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64), torch.zeros_like(a)
    for t, state in enumerate(states(config, parabolas(h, a))[1:]):
        moves, changes = [], []
        for i in plan.sampled(t):
            y = x.clone()
            for _ in range(3):
                y = y - 0.3 * (h[i] * (y - a[i]) - c_i[i] + c)
            plus = c_i[i] - c + (x - y) / (3 * 0.3)
            moves.append(y - x)
            changes.append(plus - c_i[i])
            c_i[i] = plus
        x = x + 0.7 * sum(moves) / len(moves)
        c = c + sum(changes) / 6
        torch.testing.assert_close(state.x, x)
        torch.testing.assert_close(server(state).c, c)
        torch.testing.assert_close(torch.stack([c_of(state, i) for i in range(6)]), c_i)


RIGHT: dict[str, dict[str, Any]] = {
    "whole": WHOLE,
    "sampled": WHOLE | {"participation": 0.5},
    "replies lost": WHOLE | {"drop_rate": 0.3},
    "compressed both ways": {"compressor": "topk(0.6)", "compressor_down": "topk(0.6)"},
    "server momentum": WHOLE | {"server_optimiser": "momentum(0.5)"},
}


# A case takes 4 seconds; the shortest is in the normal run.
CASES = [pytest.param(name, marks=[] if name == "sampled" else pytest.mark.slow) for name in RIGHT]


@pytest.mark.parametrize("name", CASES)
def test_clients_do_not_drift(name: str) -> None:
    """They reach the minimum of the mean loss, where FedAvg stops elsewhere: its clients' steps differ."""
    h, a = drawn()
    best = (h * a).sum(0) / h.sum(0)
    options = {"rounds": 120, "local_steps": "10", "eta_local": 0.2, "precision": "float64"} | RIGHT[name]
    plain, right = (
        states(Config(**options, local_optimiser=text), parabolas(h, a))[-1].x for text in ("sgd", SCAFFOLD)
    )
    assert (right - best).norm() < 1e-6 < 1e-2 < (plain - best).norm()


LAWS: dict[str, dict[str, Any]] = {
    "lost and sampled": {"compressor": "topk(0.8)"},
    "weights by samples": {"compressor": "topk(0.8)", "weighting": "samples"},
    "random dropping": {"compressor": "rd(0.7) >> bf16", "feedback": "ef(decay=0.9)"},
    "no residuals": {"compressor": "topk(0.8)", "feedback": "none"},
    "two sums": {"compressor": "topk(0.8)", "feedback": "ef21"},
    "steps differ": {"compressor": "qsgd(4)", "local_steps": "1..4"},
}


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("seed", range(3))
def test_c_is_the_mean_of_all_c_i(name: str, seed: int) -> None:
    """After each round, with sampled clients and lost replies, which leave c_i and residual as they were."""
    config = Config(**{"rounds": 6, "local_steps": "2", "drop_rate": 0.4, "participation": 0.6, "seed": seed,
                       "compressor_down": "none", "precision": "float64", "local_optimiser": SCAFFOLD}
                    | LAWS[name])  # fmt: skip
    plan, close = Plan(config, blobs()), {"rtol": 1e-12, "atol": 1e-12}
    found = states(config, blobs())
    lost = 0
    for t, (before, after) in enumerate(pairwise(found)):
        total = sum(plan.weight(i) * c_of(after, i) for i in range(6))
        torch.testing.assert_close(server(after).total, total, **close)
        torch.testing.assert_close(server(after).c, total / plan.everyone, **close)
        for i in plan.sampled(t):
            if plan.lost(t, i):
                torch.testing.assert_close(c_of(after, i), c_of(before, i), **close)
                lost += 1
    assert lost
    assert server(after).c.norm() > 0


def test_clients_use_the_copy_of_c_that_was_broadcast() -> None:
    """It moves towards c by the compressor of the broadcast."""
    config = Config(rounds=4, local_steps="2", local_optimiser=SCAFFOLD, compressor="topk(0.5)",
                    compressor_down="rd(0.7) >> bf16")  # fmt: skip
    it = reference(config, blobs())
    down = Downlink(it.plan.compressor_down, it.layout)
    state = it.start()
    for t in range(4):
        before, (state, _) = server(state), it.round(state)
        after = server(state)
        key = it.plan.broadcast_key(t, Purpose.CONTROL_BROADCAST)
        _, copy = down.send(after.total / 6, before.c, key, t)
        assert torch.equal(after.c, copy)
        assert not torch.equal(after.c, after.total / 6)
    assert it.plan.broadcast_key(0) != it.plan.broadcast_key(0, Purpose.CONTROL_BROADCAST)
    assert it.plan.key(0, 0) != it.plan.key(0, 0, Purpose.CONTROL)


@pytest.mark.parametrize("engine", ["reference", "sequential", "batched"])
def test_bytes_of_both_messages_are_counted(engine: str, tmp_path: Path) -> None:
    """Up: a second message of each client. Down: c of each recipient, as long as the model."""
    config = Config(rounds=2, local_steps="2", participation=0.5, engine=engine, compressor="none",
                    compressor_down="none")  # fmt: skip
    plain, rows = (
        run(config.replace(local_optimiser=text), blobs(), messages=tmp_path / text[:3]).rows
        for text in ("sgd", SCAFFOLD)
    )
    for row, other in zip(rows, plain, strict=True):
        for name in ("uplink_bytes", "downlink_bytes", "total_bytes", "coordinates_sent"):
            assert row[name] == 2 * other[name], name
        assert row["clients"] == other["clients"] == 3
    files = sorted((tmp_path / "sca").glob("*.cfa"))
    assert sum(path.stat().st_size for path in files) == sum(row["uplink_bytes"] for row in rows)
    assert sum(path.name.endswith("-control.cfa") for path in files) == len(files) / 2 == 6


def test_a_compressed_c_is_counted_as_the_model_is() -> None:
    """At first both are downloaded whole, then as messages."""
    config = Config(rounds=4, local_steps="2", compressor="topk(0.9)", compressor_down="topk(0.9)")
    plain, rows = (run(config.replace(local_optimiser=text), blobs()).rows for text in ("sgd", SCAFFOLD))
    d = Layout.of(blobs().model).d
    for t, (row, other) in enumerate(zip(rows, plain, strict=True)):
        extra = row["downlink_bytes"] - other["downlink_bytes"]
        assert row["downlink_messages"] == other["downlink_messages"] == 6 * (t > 0)
        assert 6 * 40 < extra < (6 * 4 * d if t else 6 * (4 * d + 100))
        assert 1.8 < row["uplink_bytes"] / other["uplink_bytes"] < 2.2
    assert rows[0]["first_download_bytes"] == rows[0]["downlink_bytes"]


def test_norms_are_those_of_the_residual() -> None:
    """Without compression it is 0, whatever c_i is; the same if clients keep no residual."""
    config = Config(rounds=2, local_steps="2", local_optimiser=SCAFFOLD, **WHOLE)
    for feedback in ("ef", "none"):
        assert run(config.replace(feedback=feedback), blobs()).final["error_norm"] == 0
    assert c_of(states(config, blobs())[-1], 0).norm() > 0
    config = config.replace(compressor="topk(0.9)")
    it = reference(config, blobs())
    state, finish = it.round(it.start())
    residuals = [state.residuals.stored(i, state.residuals.shape(state.x))[: len(state.x)] for i in range(6)]
    assert finish()["error_norm"] == pytest.approx(sum(e.norm().item() for e in residuals) / 6)


def test_parts_of_a_row() -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    kinds = {MemoryRow(3): [True, False], MemoryRow(0, 3): [False, True], MemoryRow(1, 2): [True, True]}
    for row, kept in kinds.items():
        parts = row.split(rows)
        assert [part is not None for part in parts] == kept
        assert torch.equal(row.join(*parts), rows)  # type: ignore[arg-type]
    assert MemoryRow(0).split(rows[:, :0]) == (None, None)
    assert MemoryRow(0).join(None, None) is None


STORED = Config(rounds=5, local_steps="2", participation=0.6, drop_rate=0.2, compressor="topk(0.7)",
                checkpoint_every=2, local_optimiser=SCAFFOLD, engine="sequential")  # fmt: skip


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "memory"
    run(STORED.replace(residuals="memory"), blobs(), out=out)
    return out


@pytest.mark.parametrize("place", ["device", "memory", "disk"])
@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_stopped_run_goes_on_where_it_was(place: str, engine: str, tmp_path: Path) -> None:
    """Bitwise, wherever residuals and c_i live, and from one place to another."""
    config = STORED.replace(engine=engine)
    run(config, blobs(), out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(config.replace(residuals=place), blobs(), out=tmp_path / "parts",
            callbacks=[Stop(3, KeyboardInterrupt)])  # fmt: skip
    run(config.replace(residuals="memory"), blobs(), out=tmp_path / "parts", resume=True)
    for name in ("checkpoint", "model", "server_model"):
        one, other = (tmp_path / each / f"{name}.safetensors" for each in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes(), name


FORGED = {
    "c is missing": (holds("control.c", lambda c: None), "'control.c' is missing"),
    "c of another length": (holds("control.c", lambda c: c[1:]), "holds another model"),
    "the sum is not finite": (holds("control.total", lambda c: c / 0), "control.total holds NaN or Inf"),
    "c_i is missing": (holds("e.0", lambda e: e[: len(e) // 2]), "holds another model"),
    "a version of the future": (holds("control.downloads.version", lambda v: v + 9), "is impossible after 5"),
    "no table": (holds("control.downloads.length", lambda v: None), "downloads.length' is missing"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_control_variates_are_refused(name: str, kept: Path, tmp_path: Path) -> None:
    change, words = FORGED[name]
    out = Path(shutil.copytree(kept, tmp_path / "forged"))
    forge(out, change)
    refuses(blobs(), out, f"^cannot resume: .*{words}", STORED)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "momentum": ({"local_optimiser": "scaffold >> sgd(momentum=0.9)"}, "must end with sgd without momentum"),
    "adamw": ({"local_optimiser": "scaffold >> adamw"}, "must end with sgd without momentum"),
    "bf16": (
        {"local_optimiser": SCAFFOLD, "residual_precision": "bf16"},
        "`residual_precision` must be full with the local optimiser scaffold >> sgd, got bf16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(InputError, match=words):
        Plan(Config(**options), blobs())


def test_a_federation_refuses_control_variates() -> None:
    config = Config(local_optimiser=SCAFFOLD, clients=6)
    with pytest.raises(InputError, match="`local_optimiser` must need no control variates in a federation"):
        make_plan(config, blobs())
    assert make_plan(config.replace(local_optimiser="sgd"), blobs()).m == 6


def test_a_loss_that_diverges_is_reported() -> None:
    task = Task(Point(2), [torch.ones(1, 2)] * 2, loss=half_square)
    config = Config(clients=2, rounds=300, eta_local=1e6, local_optimiser=SCAFFOLD, compressor="none")
    for engine in ("reference", "sequential", "batched"):
        with pytest.raises(InputError, match="is NaN or infinite"):
            run(config.replace(engine=engine), task)
