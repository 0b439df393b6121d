"""Samples held out of the clients' data: nobody trains on them, and the test set is not used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cfedavg import Config, InputError, Task
from cfedavg.data.tasks import build_task
from cfedavg.task import Samples
from cfedavg.tuner import holdout
from cfedavg.tuner.holdout import Part, choose_clients, hold_out


def numbered(sizes: list[int]) -> Task:
    """A task in which no two samples are equal: sample j of client i is the pair (i, j)."""
    clients = [
        (torch.tensor([[i, j] for j in range(n)]).float(), torch.zeros(n).long()) for i, n in enumerate(sizes)
    ]
    return Task(nn.Linear(2, 2), clients, test=(torch.full((3, 2), -1.0), torch.zeros(3).long()))


def samples_of(data: Samples) -> list[tuple[float, float]]:
    inputs = data.batch(np.arange(len(data)))[0]
    return [(float(i), float(j)) for i, j in inputs]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8).filter(lambda sizes: max(sizes) > 1),
    st.integers(0, 99),
)
def test_each_sample_is_trained_on_or_held_out(sizes: list[int], seed: int) -> None:
    task = numbered(sizes)
    split = hold_out(task, seed)
    held = samples_of(split.test)
    trained = [sample for data in split.clients for sample in samples_of(data)]
    assert sorted(held + trained) == sorted(sample for data in task.clients for sample in samples_of(data))
    for data, n in zip(split.clients, sizes, strict=True):
        assert n - len(data) == min(n - 1, max(1, round(0.1 * n)))
    assert samples_of(hold_out(task, seed).test) == held


def test_large_data_hold_out_only_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdout, "MOST", 7)
    monkeypatch.setattr(holdout, "FEWEST", 7)
    split = hold_out(numbered([100, 50, 20]), 0)
    assert len(split.test) == 7
    assert sum(map(len, split.clients)) == 163


def test_samples_with_many_labels_count_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdout, "LABELS", 100)
    monkeypatch.setattr(holdout, "FEWEST", 5)
    texts = [(torch.zeros(90, 20).long(), torch.zeros(90, 20).long()) for _ in range(3)]
    assert len(hold_out(Task(nn.Linear(1, 1), texts), 0).test) == 5


def test_a_validation_set_of_ones_own() -> None:
    task = numbered([10, 10])
    split = hold_out(task, 0, task.clients[0])
    assert split.test is task.clients[0]
    assert list(map(len, split.clients)) == [10, 10]


def test_clients_of_one_sample_each() -> None:
    with pytest.raises(InputError, match=r"every client has only one sample.*give `validation`"):
        hold_out(numbered([1, 1]), 0)


class Ragged:
    """A data set whose batches have the width of their first sample."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __len__(self) -> int:
        return 10

    def batch(self, rows: np.ndarray) -> Any:
        return torch.zeros(len(rows), self._width), torch.zeros(len(rows)).long()


def test_samples_that_cannot_be_joined() -> None:
    with pytest.raises(InputError, match=r"cannot be joined into one validation set .*give `validation`"):
        hold_out(Task(nn.Linear(2, 2), [Ragged(2), Ragged(3)]), 0)


def test_a_part_of_a_part_names_the_whole() -> None:
    """A GPU keeps the whole data set once: the rows of a part must be those of the whole."""
    task = build_task(Config(clients=3, model="linear"))
    data: Any = task.clients[0]
    part: Any = Part(data, np.array([5, 2]))
    assert part.fixed
    assert part.whole is data.whole
    found, wanted = part.batch(np.array([1])), part.whole.batch(part.rows[[1]])
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[0], data.batch(np.array([2]))[0])


def test_some_clients() -> None:
    task = hold_out(numbered([10] * 8), 0)
    few = choose_clients(task, 3, 0)
    assert len(few.clients) == 3
    assert all(data in task.clients for data in few.clients)
    assert few.test is task.test
    assert len(choose_clients(task, 8, 0).clients) == 8
