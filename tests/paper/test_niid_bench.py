"""NIID-Bench made again: the published numbers, the grid, its own parts, the verdicts and the page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cfedavg import Config, Task
from cfedavg import run as train
from cfedavg.sweep import CELLS, SealedCell, read_cells, write_cell
from paper.niid_bench import __main__ as niid
from paper.niid_bench import experiment, models, table
from paper.niid_bench.splits import PublishedDirichlet, PublishedLabels

MADE = {"seconds": 90.0, "together": 15, "version": "0.5.0", "hardware": "an abacus"}
MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # samples of each class


def test_the_published_table_is_whole() -> None:
    published = experiment.read("published")
    cells = [
        pair
        for name in experiment.names()
        for partition in experiment.read("grid")["partition"]
        for pair in (published[name][partition][method] for method in experiment.METHODS)
    ]
    assert len(cells) == 60
    assert all(0 <= sd < mean <= 100 for mean, sd in cells if mean != 33.8)
    assert published["fashion_mnist"]["labels2"]["scaffold"] == [33.8, 41.22]  # two of three failed
    assert published["cifar10"]["dirichlet"]["fedavg"] == [62.47, 0.43]


@pytest.mark.parametrize("name", experiment.names())
def test_the_grid_is_the_published_one(name: str) -> None:
    cells = experiment.load(name).cells(range(3))
    assert len(cells) == 5 * 7 * 3
    for cell, settings in cells.items():
        config = Config.from_dict(settings, trust=True)
        assert (config.clients, config.participation, config.rounds) == (10, 1.0, 50), cell
        assert (config.local_epochs, config.batch_size, config.eta_local, config.eta) == (10, 64, 0.01, None)
        assert (config.compressor, config.compressor_down, config.weighting) == ("none", "none", "samples")
        assert config.model == f"paper.niid_bench.models:{name}"
        assert "momentum=0.9, weight_decay=1e-05)" in config.local_optimiser
    own = cells[f"{name}-dirichlet-fednova-seed2"]
    assert (own["update"], own["seed"], own["iid"]) == ("fednova", 2, False)
    official = "6000" if name == "fashion_mnist" else ""
    assert own["partition"] == f"paper.niid_bench.splits:PublishedDirichlet({official})"
    assert cells[f"{name}-iid-fedavg-seed0"]["update"] == "sum"
    prox = [cells[f"{name}-labels2-fedprox-{mu}-seed0"]["local_optimiser"] for mu in experiment.MUS]
    assert [text.partition(" ")[0] for text in prox] == [f"prox({mu})" for mu in experiment.MUS]


# The partitions, which the published code draws with lists of samples


def deal_by_dirichlet(labels: np.ndarray) -> np.ndarray:
    """Deal samples to 10 clients as the published code does; return the counts of classes."""
    draws, least = np.random.RandomState(42), 0
    while least < 10:
        clients: list[list[int]] = [[] for _ in range(10)]
        for c in range(10):
            rows = np.where(labels == c)[0]
            draws.shuffle(rows)
            shares = draws.dirichlet(np.repeat(0.5, 10))
            open_ = [len(own) < len(labels) / 10 for own in clients]
            shares = shares * open_ / (shares * open_).sum()
            parts = np.split(rows, (np.cumsum(shares) * len(rows)).astype(int)[:-1])
            clients = [own + part.tolist() for own, part in zip(clients, parts, strict=True)]
        least = min(map(len, clients))
    return np.stack([np.bincount(labels[own], minlength=10) for own in clients])


@pytest.mark.parametrize("sizes", [MNIST, [6000] * 10, [5000] * 10, [40, 31, 77] + [20] * 7])
def test_the_dirichlet_split_is_the_published_draw(sizes: list[int]) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), sizes))
    dealt = deal_by_dirichlet(labels)
    for seed in (0, 7):
        assert PublishedDirichlet().counts(np.array(sizes), 10, seed).tolist() == dealt.tolist()


def test_other_class_sizes_get_the_published_shares() -> None:
    sizes = np.array([5997, 5994, 5987, 5993, 5994, 6000, 5988, 5996, 6000, 5998])
    ours = PublishedDirichlet(6000).counts(sizes, 10, 0)
    assert ours.sum(0).tolist() == sizes.tolist()
    assert np.abs(ours - deal_by_dirichlet(np.repeat(np.arange(10), 6000))).max() <= 14
    assert np.abs(ours - PublishedDirichlet().counts(sizes, 10, 0)).max() > 500  # another draw


@given(st.lists(st.integers(1, 500), min_size=10, max_size=10), st.integers(1, 10))
def test_every_client_holds_k_classes_and_all_samples_are_dealt(sizes: list[int], k: int) -> None:
    counts = PublishedLabels(k).counts(np.array(sizes) * 10, 10, 0)
    assert (counts.sum(0) == np.array(sizes) * 10).all()
    assert ((counts > 0).sum(1) == k).all()
    assert (counts.diagonal() > 0).all()


def test_the_published_holders_of_two_labels() -> None:
    """numpy.random.RandomState(42).randint(0, 10) gives 6, 3, 7, 4, 6, 9, 2, 6, 7, 4, ..."""
    holds = PublishedLabels(2).counts(np.full(10, 6000), 10, 0) > 0
    others = [set(np.flatnonzero(row)) - {i} for i, row in enumerate(holds)]
    assert others == [{6}, {3}, {7}, {4}, {6}, {9}, {2}, {6}, {7}, {4}]


# The network


def test_the_network_sees_numbers_from_0_to_1() -> None:
    pixels = torch.rand(2, 3, 32, 32)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in models.CIFAR)
    torch.testing.assert_close(models.Pixels(*models.CIFAR)((pixels - mean) / std), pixels)


def test_training_images_are_shifted_and_mirrored() -> None:
    images = torch.rand(64, 3, 32, 32)
    padded, shift = nn.functional.pad(images, (4, 4, 4, 4), mode="reflect"), models.Shift()
    moves = [(i, j, flip) for i in range(9) for j in range(9) for flip in (False, True)]
    assert torch.equal(shift.eval()(images), images)
    seen = set()
    for own, image in zip(padded, shift.train()(images), strict=True):
        crops = {(i, j): own[:, i : i + 32, j : j + 32] for i, j, _ in moves}
        seen.add(next(m for m in moves if torch.equal(crops[m[:2]].flip(2) if m[2] else crops[m[:2]], image)))
    assert len(seen) > 40  # of 162
    assert {flip for *_, flip in seen} == {False, True}


def test_random_places_are_uniform() -> None:
    torch.manual_seed(0)
    draws = models._uniform(torch.zeros(20_000, 1, 12, 12))
    assert draws.shape == (20_000, 3)
    counts = torch.bincount((9 * draws[:, 0]).long(), minlength=9)
    assert counts.numel() == 9
    assert (counts / 20_000 - 1 / 9).abs().max() < 0.01


@pytest.mark.parametrize("model", ["mnist", "cifar10"])
def test_clients_train_together(model: str) -> None:
    """Also those whose images are shifted: else the engine's trial would refuse them."""
    config = Config(
        clients=4, rounds=1, local_steps="2", batch_size=8, eta_local=0.01, engine="batched", device="cpu",
        model=f"paper.niid_bench.models:{model}", partition="paper.niid_bench.splits:PublishedLabels(2)",
    )  # fmt: skip
    rows = train(config, draw=False, progress=False).rows
    assert np.isfinite(rows[0]["train_loss"])


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_gpu_trains_cells_side_by_side(method: str, tmp_path: Path) -> None:
    words = ["--scale", "smoke", "--out", str(tmp_path), "--device", "cuda", "--precision", "bf16"]
    only = [f"--only=cifar10-{partition}-{method}-seed*" for partition in ("iid", "labels2")]
    assert niid.main(["run", "cifar10", *words, *only, "--together", "6"]) == 0
    cells = read_cells(tmp_path / CELLS)
    assert len(cells) == 6
    assert max(cell.made["together"] for cell in cells.values()) > 1
    assert all(np.isfinite(cell.values["train_loss"]).all() for cell in cells.values())


# SCAFFOLD with momentum


class Point(nn.Module):
    """A model that is a vector."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(d))

    def forward(self, batch: Any) -> Any:
        return self.x


def half_square(model: nn.Module, batch: Any) -> Any:
    return 0.5 * (batch[1] * (model(batch) - batch[0]).square()).sum(-1).mean()


@pytest.mark.parametrize("engine", ["reference", "sequential", "batched"])
def test_momentum_scaffold_is_the_published_algorithm(engine: str) -> None:
    generator = np.random.default_rng(0)
    centres, scales = generator.normal(size=(3, 4)), generator.uniform(0.5, 2, size=(3, 4))
    sizes, rate, K, rounds = [1, 2, 3], 0.05, 5, 6
    clients = [
        (torch.tensor(a).expand(n, 4), torch.tensor(h).expand(n, 4))
        for a, h, n in zip(centres, scales, sizes, strict=True)
    ]
    config = Config(
        clients=3, rounds=rounds, local_steps=str(K), batch_size=8, eta_local=rate, engine=engine,
        local_optimiser="paper.niid_bench.parts:MomentumScaffold(momentum=0.9, weight_decay=0.01)",
        weighting="samples", update="sum", precision="float64", device="cpu", workers=1,
        compressor="none", compressor_down="none", feedback="none",
    )  # fmt: skip
    result = train(config, Task(Point(4).double(), clients, loss=half_square), draw=False, progress=False)

    x, c, c_i, weights = np.zeros(4), np.zeros(4), np.zeros((3, 4)), np.array(sizes) / 6
    for _ in range(rounds):
        moves, changes = [], []
        for i in range(3):
            y, v = x.copy(), np.zeros(4)
            for _ in range(K):  # a step of SGD, then the correction
                v = 0.9 * v + scales[i] * (y - centres[i]) + 0.01 * y
                y = y - rate * v
                y = y - rate * (c - c_i[i])
            plus = c_i[i] - c + (x - y) / (rate * K)
            moves.append(y - x)
            changes.append(plus - c_i[i])
            c_i[i] = plus
        x, c = x + weights @ moves, c + weights @ changes
    assert result.model.x.detach().numpy() == pytest.approx(x, rel=1e-9)


# Verdicts and the page


@pytest.mark.parametrize(
    ("published", "ours", "verdict"),
    [
        ((99.0, 0.1), (97.5, 97.5, 97.5), "within"),  # 1.5 points
        ((99.0, 0.1), (97.4, 97.5, 97.5), "below"),
        ((62.0, 0.4), (63.6, 63.5, 63.6), "above"),
        ((80.0, 3.0), (86.0, 86.0, 86.0), "within"),  # two deviations
        ((80.0, 3.0), (86.1, 86.0, 86.0), "above"),
        ((80.0, 3.0), (), "not run"),
    ],
)
def test_the_rule(published: tuple[float, float], ours: tuple[float, ...], verdict: str) -> None:
    assert table.Entry("mnist", "iid", "fedavg", published, ours).verdict == verdict


def made_cells(name: str, accuracy: dict[str, float], **changes: Any) -> dict[str, SealedCell]:
    """Return the cells of some lines of a data set that nobody ran; the first round is the best."""
    planned = experiment.load(name).cells(range(3))
    return {
        cell: SealedCell(cell, settings | changes, {"test_accuracy": [best, best / 2]}, MADE)
        for cell, settings in planned.items()
        if (best := accuracy.get(cell.removeprefix(f"{name}-").rpartition("-seed")[0]))
    }


def test_a_page_of_cells() -> None:
    found = made_cells("mnist", {"iid-fedavg": 0.99, "labels1-fedavg": 0.2, "labels2-fednova": 0.9})
    found |= made_cells("mnist", {f"iid-fedprox-{mu}": 0.98 + float(mu) / 100 for mu in experiment.MUS})
    found |= made_cells("mnist", {f"labels3-fedprox-{mu}": 0.98 for mu in experiment.MUS[1:]})
    text = table.page(found)
    assert "| IID | FedAvg | 99.09 ± 0.05 | 99.00 ± 0.00 | within |" in text
    assert "| IID | FedProx, mu = 1 | 99.16 ± 0.04 | 99.00 ± 0.00 | within |" in text
    assert "| 1 label | FedAvg | 19.33 ± 11.82 | 20.00 ± 0.00 | within, no bar |" in text
    assert "| 2 labels | FedNova | 96.65 ± 0.39 | 90.00 ± 0.00 | below |" in text
    assert "| 3 labels | FedProx | 97.85 ± 0.06 | – | not run |" in text  # one mu is missing
    assert text.count(" | not run |") == 60 - 4
    assert "**open: 2 good, bar 42 of 48, 45 not run**" in text
    assert "mnist: 1.0 minutes a seed for 10 runs on an abacus." in text  # 10 times 90 s, 15 at a time
    assert table.page({}).count(" | not run |") == 60
    assert "**not run**" in table.page({})


def test_a_cell_without_all_seeds_or_rounds_is_not_run() -> None:
    found = made_cells("mnist", {"iid-fedavg": 0.99})
    entries = {(e.data, e.partition, e.method): e for e in table.entries(found)}
    assert entries["mnist", "iid", "fedavg"].verdict == "within"
    for change in (
        {n: c for n, c in found.items() if not n.endswith("seed1")},
        made_cells("mnist", {"iid-fedavg": 0.99}, rounds=49),
    ):
        entries = {(e.data, e.partition, e.method): e for e in table.entries(change)}
        assert entries["mnist", "iid", "fedavg"].verdict == "not run"


def test_the_bar_counts_cells_with_more_than_one_label() -> None:
    entries = [dataclasses.replace(entry, ours=(entry.published[0],) * 3) for entry in table.entries({})]
    assert table.verdict(entries) == "met: 48 good, bar 42 of 48"
    worse = [dataclasses.replace(e, ours=(1.0,) * 3) if e.method == "fednova" else e for e in entries]
    assert table.verdict(worse) == "missed: 36 good, bar 42 of 48"
    assert sum(not entry.counts for entry in entries) == 12


def test_the_page_is_made_of_the_cells() -> None:
    found = niid.cells_of_scale(niid.HERE / "results")
    assert found == read_cells(niid.HERE / "results" / CELLS)
    assert (niid.HERE / "table.md").read_text() == table.page(found)


def test_a_cell_is_run_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scale", "smoke", "--out", str(tmp_path)]
    only = [f"--only=cifar10-labels2-{method}-seed0" for method in ("fedavg", "scaffold")]
    assert niid.main(["run", "cifar10", *words, *only, "--device", "cpu"]) == 0
    cells = read_cells(tmp_path / CELLS)
    assert cells.keys() == {"cifar10-labels2-fedavg-seed0", "cifar10-labels2-scaffold-seed0"}
    for cell in cells.values():
        assert len(cell.values["test_accuracy"]) == 2
        assert cell.made["command"].startswith(
            "python -m paper.niid_bench run cifar10 --scale smoke --seeds 3"
        )
    assert niid.main(["draw", *words, "--page", str(tmp_path / "t.md")]) == 0
    assert "cifar10: " in (tmp_path / "t.md").read_text()
    assert niid.main(["run", "svhn", *words]) == 2
    assert "NAME must be one of mnist, fashion_mnist, cifar10, got 'svhn'" in capsys.readouterr().err


def test_cells_of_other_settings_are_left_out(tmp_path: Path) -> None:
    (tmp_path / CELLS).mkdir()
    for rate in (0.01, 0.1):
        (name, cell), *_ = made_cells("mnist", {"iid-fedavg": 0.99}, eta_local=rate).items()
        write_cell(tmp_path / CELLS, cell)
        assert (name in niid.cells_of_scale(tmp_path)) == (rate == 0.01)
