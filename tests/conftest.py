"""What the tests share: small problems, and the command."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

# No test reaches further than this machine; set before anything reads it.
os.environ |= {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*"}

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from cfedavg import Task
from cfedavg.cli import main

# No test is timed: a first call may compile a kernel.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell ignores Ctrl-C for a job in the background, nohup a closed terminal; what tests start would, too.
for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.default_int_handler if ignored == signal.SIGINT else signal.SIG_DFL)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare all collections of garbage the 600,000 objects that imports and tests are: 0.3 s each."""
    gc.collect()
    gc.freeze()


class Point(nn.Module):
    """A model that is nothing but its parameters: the loss 1/2 |x - c|^2 pulls x to the client's c."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(d))


def half_square(model: nn.Module, batch: Tensor) -> Tensor:
    return 0.5 * (model.x - batch[0]).square().sum()  # type: ignore[operator, union-attr]


def quadratic(centres: Tensor) -> Task:
    """One client for each row of `centres`, which holds that one sample."""
    return Task(Point(centres.shape[1]), [c[None] for c in centres], loss=half_square)


def blobs(m: int = 6, n: int = 20, features: int = 8, classes: int = 3, seed: int = 0) -> Task:
    """Classification of Gaussian blobs with a small MLP; client i sees mostly class i % classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, features, generator=generator)

    def draw(labels: Tensor) -> tuple[Tensor, Tensor]:
        return centres[labels] + torch.randn(len(labels), features, generator=generator), labels

    def client(i: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(classes, (n + i,), generator=generator)
        labels[: n // 2] = i % classes
        return draw(labels)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, classes))
    clients = [client(i) for i in range(m)]
    return Task(model, clients, test=draw(torch.randint(classes, (60,), generator=generator)))


@pytest.fixture
def task() -> Task:
    return blobs()


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def cfedavg(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process; the texts come back on one line each."""
    monkeypatch.setattr("cfedavg.cli.signal.signal", lambda *_: None)

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["cfedavg", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return Outcome(code, " ".join(out.split()), " ".join(err.split()))

    return run


@pytest.fixture
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a federation nobody sleeps or draws, and files that no power cut threatens are not synced."""
    for place in ("requests.POLL", "nodes.POLL", "requests.PATIENCE", "federation_folder.HANDOVER"):
        monkeypatch.setattr(f"cfedavg.flower.{place}", 0.0)
    for place in ("report.write_run_pictures", "core.files.sync", "flower.federation_folder.sync"):
        monkeypatch.setattr(f"cfedavg.{place}", lambda path: None)
