"""Runs with the layers for CPUs: near torch's layers, and the same bits for any number of processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cfedavg import Config, Task
from cfedavg import run as run_and_draw
from cfedavg.models import cnn
from cfedavg.simulate import engines
from cfedavg.simulate.engines import choose_engine, speed
from cfedavg.simulate.engines.blocks import BlockEngine
from cfedavg.simulate.engines.trainers import Sequential
from cfedavg.simulate.plan import Plan
from tests.simulate.test_cpu_layers import batch_of
from tests.simulate.test_workers import assert_same, contents, forked  # noqa: F401

run = partial(run_and_draw, draw=False)
BASE = Config(rounds=2, clients=3, local_steps="2", batch_size=8, device="cpu", engine="sequential")
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the layers are not used"
    ),
]


def task() -> Task:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Task(cnn((1, 16, 16), 3), [batch_of(12 + i, 16) for i in range(3)], test=batch_of(20, 16))


def state_after(config: Config) -> torch.Tensor:
    engine = choose_engine(config, Plan(config, task()), task())
    assert isinstance(engine, BlockEngine)
    assert isinstance(engine.trainer, Sequential)
    state, _ = engine.round(engine.begin(engine.start()))
    engine.evaluate(state)
    return state.x.double()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_round_is_near_a_round_by_torchs_layers(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BASE.replace(precision=precision, compressor="none", compressor_down="none")
    mine = state_after(config)
    monkeypatch.setattr(engines, "takes_fast_layers", lambda *_: False)
    theirs, start = state_after(config), choose_engine(config, Plan(config, task()), task()).start().x
    allowed = {"float32": 1e-5, "bf16": 0.05}[precision]
    assert 0 < (mine - theirs).norm() <= allowed * (theirs - start.double()).norm()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_number_of_processes_and_a_resume_change_no_bit(precision: str, tmp_path: Path) -> None:
    config = BASE.replace(precision=precision)
    run(config, task(), out=tmp_path / "one")
    run(config.replace(rounds=1), task(), out=tmp_path / "resumed")
    run(config, task(), out=tmp_path / "resumed", resume=True)
    run(config.replace(workers=2), task(), out=tmp_path / "two")
    expected = contents(tmp_path / "one")
    assert_same(contents(tmp_path / "resumed"), expected)
    found = contents(tmp_path / "two")
    for row in (*found["rows"], *expected["rows"]):
        row.pop("alpha", None)  # a sum of whole updates, which agrees to rounding
    assert_same(found, expected)


def hint(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float], **options: Any) -> list[str]:
    """What a run says, if its steps take so many seconds."""
    monkeypatch.setattr(speed, "measure_step", lambda plan, task, config, limit: seconds[config.precision])
    config, said = BASE.replace(**options), list[str]()
    choose_engine(config, Plan(config, task()), task(), say=said.append)
    assert said[0].startswith("engine: sequential on cpu")
    return said[1:]


def test_a_run_says_that_the_other_precision_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = {"float32": 1.0, "bf16": 0.58}, {"float32": 1.0, "bf16": 5.0}
    text = "precision {} would take about {} of the time of a step on this processor"
    assert hint(monkeypatch, fast, rounds=1000) == [text.format("bf16", 0.6)]
    assert hint(monkeypatch, slow, rounds=1000) == []
    assert hint(monkeypatch, slow, rounds=1000, precision="bf16") == [text.format("float32", 0.2)]
    assert hint(monkeypatch, fast, rounds=1000, precision="float64") == []
    assert hint(monkeypatch, fast, rounds=10) == []


def test_a_step_is_measured_without_a_trace() -> None:
    config, found = BASE.replace(rounds=1000), task()
    plan, before = Plan(config, found), torch.get_rng_state()
    weights = [p.detach().clone() for p in found.model.parameters()]
    seconds = speed.measure_step(plan, found, config, float("inf"))
    assert 0 < seconds < float("inf")
    assert speed.measure_step(plan, found, config, 0.0) > 0  # too slow: one step must do
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(p, q) for p, q in zip(found.model.parameters(), weights, strict=True))


def test_a_step_that_fails_takes_for_ever() -> None:
    def fails(model: Any, batch: Any) -> Any:
        raise ValueError

    broken = Task(cnn((1, 16, 16), 3), [batch_of(8, 16)], loss=fails)
    config = BASE.replace(clients=1)
    assert speed.measure_step(Plan(config, broken), broken, config, 1.0) == float("inf")
