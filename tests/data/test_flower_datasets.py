"""Partitions of flwr-datasets as clients: the real partitioners, on data sets in memory."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from cfedavg import Config, InputError, Task, run
from cfedavg.data import from_dataset, from_flwr
from cfedavg.data.partition import log_dirichlet
from cfedavg.data.splits import _FIRST, _STREAMS, FlowerDirichlet

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # read when the package is imported
datasets = pytest.importorskip("datasets")
flwr_datasets: Any = pytest.importorskip("flwr_datasets")
partitioners: Any = pytest.importorskip("flwr_datasets.partitioner")


def rows(n: int = 120) -> Any:
    """A table of two numbers, a class that depends on them, and an owner."""
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, n))
    columns = {"a": a, "b": b, "label": (a + b > 0).astype(int), "owner": [f"o{i % 3}" for i in range(n)]}
    return datasets.Dataset.from_dict(columns)


KINDS = {
    "iid": lambda: partitioners.IidPartitioner(4),
    "dirichlet": lambda: partitioners.DirichletPartitioner(4, "label", alpha=0.5, min_partition_size=5),
    "natural": lambda: partitioners.NaturalIdPartitioner("owner"),
    "pathological": lambda: partitioners.PathologicalPartitioner(4, "label", 1),
    "exponential": lambda: partitioners.ExponentialPartitioner(4),
    "shards": lambda: partitioners.ShardPartitioner(4, "label", num_shards_per_partition=2),
}


@pytest.mark.filterwarnings("ignore")  # of the package itself
@pytest.mark.parametrize("kind", KINDS)
def test_partitions_become_clients(kind: str) -> None:
    partitioner, data = KINDS[kind](), rows()
    partitioner.dataset = data
    clients = from_flwr(partitioner, inputs=["a", "b"])
    assert len(clients) == partitioner.num_partitions
    for i, (x, y) in enumerate(clients):
        its = partitioner.load_partition(i)
        assert x.dtype == torch.float32
        assert np.array_equal(x.numpy(), np.column_stack([its["a"][:], its["b"][:]]).astype(np.float32))
        assert y.tolist() == list(its["label"])
    task = Task(torch.nn.Linear(2, 2), clients, test=from_dataset(data, inputs=["a", "b"]))
    result = run(Config(rounds=2, compressor="none", compressor_down="none", engine="sequential"), task)
    assert result.config.clients == len(clients)
    assert result.final["test_accuracy"] > 0.6


def test_images_are_read(tmp_path: Any) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    images = {"image": [Image.fromarray(each) for each in pixels], "label": [0, 1] * 3}
    x, y = from_dataset(datasets.Dataset.from_dict(images, features=features))
    assert torch.equal(x, torch.from_numpy(pixels.transpose(0, 3, 1, 2) / np.float32(255)))
    assert y.tolist() == [0, 1] * 3


@pytest.mark.filterwarnings("ignore")
def test_a_federated_dataset_gives_its_partitioner(tmp_path: Any) -> None:
    """The real class, on a local file: no network."""
    (tmp_path / "rows.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(9)))
    source = flwr_datasets.FederatedDataset(
        dataset="csv", partitioners={"train": partitioners.IidPartitioner(3)}, shuffle=False,
        data_files={"train": str(tmp_path / "rows.csv")}, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    clients = from_flwr(source)
    assert [x.tolist() for x, _ in clients] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [x.tolist() for x in from_flwr(source, convert=lambda part: torch.tensor(part["y"][:]))] == [
        y.tolist() for _, y in clients
    ]
    with pytest.raises(InputError, match=r"`split` must be a split with a partitioner \(train\), got 'test'"):
        from_flwr(source, "test")


def test_one_sentence_says_what_is_wrong() -> None:
    partitioner = partitioners.IidPartitioner(3)
    with pytest.raises(
        InputError, match=r"`source` must be a partitioner or a FederatedDataset .*, got Dataset"
    ):
        from_flwr(rows())
    with pytest.raises(InputError, match="`source` cannot be partitioned"):
        from_flwr(partitioner)  # without a data set
    partitioner.dataset = rows(9)
    with pytest.raises(InputError, match="set `inputs` to the column to use; there are a, b, label, owner"):
        from_flwr(partitioner)
    with pytest.raises(InputError, match="`inputs`: there is no column 'c'; there are a, b"):
        from_flwr(partitioner, inputs="c")
    with pytest.raises(InputError, match=r"'owner' must hold numbers or images .* give `convert`"):
        from_flwr(partitioner, inputs="owner")
    few = SimpleNamespace(num_partitions=2, load_partition=lambda i: rows(9).select(range(9 * (1 - i))))
    with pytest.raises(InputError, match="partition 1 has no samples"):
        from_flwr(few, inputs="a")
    with pytest.raises(InputError, match="`dataset` must be a Dataset of the package datasets, got list"):
        from_dataset([1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("balanced", [False, True])
def test_our_dirichlet_split_is_theirs_with_the_same_draws(balanced: bool) -> None:
    m, classes, tries = 4, 3, 0
    labels = np.repeat(np.arange(classes), [80, 60, 60])
    for seed in range(12):
        tables = (log_dirichlet(m, classes, 0.4, seed, _FIRST + _STREAMS * i) for i in range(10))
        shares = iter([row for table in tables for row in np.exp(table)])
        partitioner = partitioners.DirichletPartitioner(m, "label", 0.4, 10, balanced, shuffle=False)
        partitioner._rng = SimpleNamespace(dirichlet=lambda alpha, shares=shares: next(shares))
        partitioner.dataset = datasets.Dataset.from_dict({"label": labels})
        parts = [partitioner.load_partition(i)["label"][:] for i in range(m)]
        theirs = np.stack([np.bincount(part, minlength=classes) for part in parts])
        assert np.array_equal(theirs, FlowerDirichlet(0.4, 10, balanced).counts(np.bincount(labels), m, seed))
        tries += 10 - sum(1 for _ in shares) // classes
    assert tries > 12  # some draws gave a client too few samples, and were repeated


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("balanced", [False, True])
def test_our_dirichlet_split_is_theirs_in_distribution(balanced: bool) -> None:
    """Sorted client sizes, and the largest share of a class at a client: means over 300 seeds."""
    m, sizes = 4, np.array([80, 60, 60])
    labels = np.repeat(np.arange(3), sizes)
    whole = datasets.Dataset.from_dict({"label": labels})

    def measure(counts: np.ndarray) -> np.ndarray:
        return np.array([*np.sort(counts.sum(1)), (counts / sizes).max()])

    theirs, ours = [], []
    for seed in range(300):
        partitioner = partitioners.DirichletPartitioner(m, "label", 0.4, 10, balanced, seed=seed)
        partitioner.dataset = whole
        parts = [partitioner.load_partition(i)["label"][:] for i in range(m)]
        theirs.append(measure(np.stack([np.bincount(part, minlength=3) for part in parts])))
        ours.append(measure(FlowerDirichlet(0.4, 10, balanced).counts(sizes, m, seed)))
    error = np.sqrt((np.var(theirs, 0) + np.var(ours, 0)) / 300)
    assert (abs(np.mean(theirs, 0) - np.mean(ours, 0)) < 4 * error + 0.3 / 100).all()
