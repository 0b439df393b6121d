"""The contract: every engine agrees with the reference engine, in float64 to rtol 1e-9 over 3 rounds."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cfedavg import Config, Task
from cfedavg.compress import EXAMPLES
from cfedavg.core.errors import Diverged
from cfedavg.simulate.downloads import Downloads
from cfedavg.simulate.engines import choose_engine
from cfedavg.simulate.engines.traffic import CountingThreads
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import Control, State
from cfedavg.simulate.vectorised.recorder import Recorder
from tests.conftest import blobs, half_square, quadratic

ROUNDS = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ENGINES = ["sequential", "batched"]
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes 10 seconds a model; `test_compiled` does it."""
    monkeypatch.setattr(Recorder, "compiling", False)


def play(
    config: Config, task: Task, precision: str = "float64", say: Callable[[str], None] = print
) -> tuple[State, list[dict[str, Any]]]:
    """Three rounds from the start, with evaluation."""
    config = config.replace(clients=len(task.clients), precision=precision, rounds=ROUNDS)
    engine = choose_engine(config, Plan(config, task), task, say=say)
    state, rows = engine.begin(engine.start()), []
    for _ in range(ROUNDS):
        state, finish = engine.round(state)
        rows.append(finish() | engine.evaluate(state))
    engine.close()
    return state, rows


def agree(task: Task, engine: str, device: str, **options: Any) -> list[str]:
    """The engine's states and rows against the reference's; return what the engine says of itself."""
    config, said = Config(device=device, **options), list[str]()
    expected, rows = play(config.replace(engine="reference"), task)
    found, mine = play(config.replace(engine=engine), task, say=said.append)
    torch.testing.assert_close(found.x, expected.x, **CLOSE)
    torch.testing.assert_close(found.b, expected.b, **CLOSE)
    torch.testing.assert_close(found.memory.vectors(), expected.memory.vectors(), **CLOSE)
    torch.testing.assert_close(found.broadcast, expected.broadcast, **CLOSE)
    assert_same_downloads(found.downloads, expected.downloads)
    assert_same_control(found.control, expected.control)
    assert sorted(found.residuals.norms2) == sorted(expected.residuals.norms2)
    for client in expected.residuals.norms2:
        kept = (each.residuals.stored(client, each.residuals.shape(each.x)) for each in (found, expected))
        torch.testing.assert_close(*kept, **CLOSE)
    for row, reference in zip(mine, rows, strict=True):
        assert row.keys() == reference.keys()
        for name, value in reference.items():
            close_to = pytest.approx(value, rel=slack(name, reference)) if isinstance(value, float) else value
            assert row[name] == close_to, name
    return said


def assert_same_downloads(found: Downloads | None, expected: Downloads | None) -> None:
    """The server of each engine knows the same of its clients' copies."""
    assert (found is None) == (expected is None)
    if found and expected:
        assert found.changed.tolist() == expected.changed.tolist()
        assert found.lengths == expected.lengths
        assert found.held == expected.held


def assert_same_control(found: Control | None, expected: Control | None) -> None:
    assert (found is None) == (expected is None)
    if found and expected:
        torch.testing.assert_close((found.c, found.total), (expected.c, expected.total), **CLOSE)
        assert_same_downloads(found.downloads, expected.downloads)


def slack(name: str, reference: dict[str, Any]) -> float:
    """How far a metric may be off, relatively: 1e-9, and more where it measures what a rounding cut off.

    p of two engines differs by some units in the last place of float64, say 2^-48 |p|, and p - C(p) inherits
    that difference whole. So |p - C(p)|^2 is off by 2 * 2^-48 |p| / |p - C(p)|, which is the root of the SNR.
    For fp32, which cuts off less than a unit in the last place of float32, the root is about 2^25: the
    metric is off by up to 2^-22. For coarser compressors 1e-9 is more.
    """
    snr = reference["snr_mean"] if name in ("snr_min", "snr_mean", "error_norm2", "error_norm") else None
    return max(1e-9, 2**-47 * math.sqrt(snr or 0.0))


def images(
    model: nn.Module, m: int = 5, n: int = 12, size: int = 12, channels: int = 2, ragged: int = 0
) -> Task:
    """Small images with labels of three classes; client i has `ragged` * i samples more."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        pixels = torch.randn(count, channels, size, size, generator=generator, dtype=torch.float64)
        return pixels, torch.randint(3, (count,), generator=generator)

    return Task(model, [draw(n + ragged * i) for i in range(m)], test=draw(30))


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module: nn.Module = make()
    return module


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


class Residual(nn.Module):
    """A block of a ResNet, with a stride, between a stem and a head."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False), norm(4)
        self.conv, self.second = nn.Conv2d(4, 8, 3, 2, padding=1, bias=False), norm(8)
        self.short, self.third = nn.Conv2d(4, 8, 1, 2, bias=False), norm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(self.stem(x)))
        x = F.relu(self.second(self.conv(x)) + self.third(self.short(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Reads an image row by row: a linear embedding, one layer of attention, the mean, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(2)
        return self.head(self.layer(self.embed(rows)).mean(1))  # type: ignore[no-any-return]


MODELS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(288, 8), nn.ReLU(), nn.Linear(8, 3)),
    "cnn": cnn,
    "batch norm": lambda: Residual(nn.BatchNorm2d),
    "group norm": lambda: Residual(lambda c: nn.GroupNorm(2, c)),
    "instance norm": lambda: Residual(nn.InstanceNorm2d),
    "transformer": Transformer,
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same", dilation=2), nn.AvgPool2d(2),
        nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(36, 3),
    ),
    "one convolution over time": lambda: nn.Sequential(
        nn.Flatten(2), nn.Conv1d(2, 3, 5, stride=3), nn.Flatten(), nn.Linear(141, 3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, engine: str, device: str) -> None:
    task = images(seeded(MODELS[name]))
    agree(task, engine, device, local_epochs=2, batch_size=5, eta_local=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cnn", "batch norm"])
def test_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and recorded as a graph: two sizes of batches, K_i that differ."""
    monkeypatch.setattr(Recorder, "compiling", True)
    work = {"local_steps": "6,1,2,6,3"}
    agree(images(seeded(MODELS[name])), "batched", "cuda", batch_size=5, eta_local=0.05, **work)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "near"), [("float32", 1e-3), ("bf16", 0.1)])
def test_compiled_batch_norms(precision: str, near: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 and bf16, batch norms, residuals and ReLUs are kernels of our own: near to the reference."""
    monkeypatch.setattr(Recorder, "compiling", True)
    task = images(seeded(MODELS["batch norm"]))
    config = Config(device="cuda", batch_size=5, local_steps="4", eta_local=0.05, compressor="none")
    expected, _ = play(config.replace(engine="reference"), task)
    found, _ = play(config.replace(engine="batched"), task, precision)
    start = torch.nn.utils.parameters_to_vector(task.model.parameters()).detach().to(expected.x)
    assert (found.x - expected.x).norm() < near * (expected.x - start).norm()
    assert (found.b - expected.b).norm() < near * expected.b.norm()


RAGGED = [
    ("cnn", {"local_epochs": 2}),
    ("cnn", {"local_steps": "1..7"}),
    ("batch norm", {"local_epochs": 2}),
    ("batch norm", {"local_steps": "6,1,2,6,3"}),
    ("group norm", {"local_steps": "6,1,2,6,3"}),
    ("transformer", {"local_epochs": 1}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "work"), RAGGED)
def test_ragged_clients(name: str, work: dict[str, Any], engine: str, device: str) -> None:
    """12 to 24 samples: the short batches of epochs come at different times and in different sizes."""
    agree(images(seeded(MODELS[name]), ragged=3), engine, device, batch_size=7, eta_local=0.05, **work)


class Viewed(nn.Module):
    """Reshapes by `view`, which wants channels where PyTorch has them by default."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3), nn.Linear(400, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).view(-1, 400))  # type: ignore[no-any-return]


class Smoothed(nn.Module):
    """Replaces its buffer, shares it, and has a parameter that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(8, 3), nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("again", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_views(engine: str, device: str) -> None:
    agree(images(seeded(Viewed)), engine, device, local_epochs=1, batch_size=5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_that_are_replaced_and_parameters_that_are_not_used(engine: str, device: str) -> None:
    task = Task(seeded(Smoothed), blobs().clients, test=blobs().test)
    agree(
        task,
        engine,
        device,
        local_steps="3",
        batch_size=8,
        local_optimiser="sgd(weight_decay=0.1)",
        compressor="none",
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_mixes_samples_only_once_it_has_learned(engine: str) -> None:
    """All zeros at the start, so that the variance over the batch shows nowhere."""

    def spread(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + logits.var(0).sum()

    model = nn.Linear(8, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    task = Task(model, blobs().clients, test=blobs().test, loss=spread)
    agree(task, engine, "cpu", local_epochs=2, batch_size=9)


@pytest.mark.parametrize("engine", ["reference", *ENGINES])
def test_a_loss_that_is_not_finite_ends_the_run_though_its_update_is(engine: str) -> None:
    """The loss of client 1 has a term that is infinite and does not depend on the model."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return half_square(model, batch) + batch[:, 1].log().mean()

    base = quadratic(torch.tensor([[1.0, 2], [3, 0], [4, 5]]))
    task = replace(base, loss=loss)
    config = Config(engine=engine, device="cpu", local_steps="2")
    with pytest.raises(Diverged) as caught:
        play(config, task)
    assert (caught.value.t, caught.value.clients) == (0, [1])


class Counting(nn.Module):
    """A parameter times the steps that a buffer has counted; a state_dict leaves the buffer out."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2))
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self) -> Tensor:
        self.steps.add_(1)
        return self.x * self.steps


@pytest.mark.parametrize("engine", ["reference", "sequential"])
def test_every_client_starts_from_the_buffers_that_do_not_travel(engine: str) -> None:
    """Equal clients count from 0, each of them, and so end with the same model."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return 0.5 * (model() - batch[0]).square().sum()  # type: ignore[no-any-return]

    def after_a_round(clients: int) -> State:
        task = Task(Counting(), [torch.ones(1, 2)] * clients, loss=loss)
        config = Config(
            clients=clients, engine=engine, device="cpu", local_steps="3", compressor="none", eta_local=0.01
        )
        started = choose_engine(config, Plan(config, task), task)
        return started.round(started.start())[0]

    one, three = after_a_round(1), after_a_round(3)
    assert one.x.abs().min() > 0
    torch.testing.assert_close(three.x, one.x)


SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {"local_optimiser": "sgd(momentum=0.9, weight_decay=0.01)"},
    "partial participation": {"participation": 0.5},
    "lost replies": {"drop_rate": 0.4},
    "weights": {"weighting": "samples"},
    "no error feedback": {"feedback": "none"},
    "deadline": {"deadline": 2.0, "steps_per_second": "0.3..3", "link": "50% up=10kbit..1Mbit; rtt=1s"},
    "decaying": {"schedule": "decaying(a=1)"},
    "iterate": {"sample_iterate": True},
    "bf16 residuals": {"residual_precision": "bf16", "compressor": "topk(0.9) >> bf16"},
    "batches larger than the data": {"batch_size": 100},
    "one client": {"participation": 0.1},
    "control variates": {"local_optimiser": "scaffold >> sgd", "participation": 0.5, "drop_rate": 0.3},
    "control variates without residuals": {
        "local_optimiser": "scaffold >> sgd",
        "feedback": "none",
        "compressor": "none",
        "weighting": "samples",
        "local_steps": "1..5",
        "schedule": "decaying",
        "compressor_down": "topk(0.8) >> bf16",
    },
    "a rotation and lost replies": {"drop_rate": 0.4, "compressor": "eden(1, unbiased=false)"},
    "low rank and lost replies": {"drop_rate": 0.4, "compressor": "lowrank(1) >> bf16"},
    "a bound on what is left": {"compressor": "topk(hold=1.5) >> int2", "feedback": "ef(decay=0.9)"},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, engine: str, device: str) -> None:
    agree(blobs(), engine, device, **{"compressor": "topk(0.9)", "batch_size": 8} | SETTINGS[name])


DOWN = [
    "topk(0.9)", "topk(0.8) >> int3(16)", "rd(0.7) >> bf16", "qsgd(4)", "topk(0.8) >> sign", "sign",
    "topk(chunk=8, k=2) >> int2(4)", "lowrank(2)", "eden(2, unbiased=false, block=16)",
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("compressor", DOWN)
def test_broadcasts(compressor: str, engine: str, device: str) -> None:
    """With lost replies and partial participation, so that clients miss messages."""
    options: dict[str, Any] = {"participation": 0.5, "drop_rate": 0.3, "local_steps": "3", "batch_size": 8}
    agree(blobs(), engine, device, compressor="topk(0.8)", compressor_down=compressor, **options)


# What is left of a message is no part of it: without feedback, one engine shows what both do.
WAYS = [
    ("ef", "sequential"),
    ("ef", "batched"),
    ("none", "sequential"),
    pytest.param("none", "batched", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("feedback", "engine"), WAYS)
@pytest.mark.parametrize("compressor", EXAMPLES)
def test_compressors(compressor: str, feedback: str, engine: str, device: str) -> None:
    agree(blobs(), engine, device, compressor=compressor, feedback=feedback, batch_size=8)


def test_threads_begin_when_told_or_when_asked() -> None:
    threads, begun = CountingThreads(2), threading.Event()

    def fail() -> int:
        begun.set()
        raise ValueError("no length")

    length = threads.submit(lambda: 7)
    failing = threads.submit(fail)
    assert not begun.is_set()
    assert length() == 7
    with pytest.raises(ValueError, match="no length"):
        failing()
    threads.close()
