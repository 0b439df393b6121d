"""The splits of the literature: their laws, the definitions beside ours, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.data.splits import SPLITTERS, FlowerDirichlet, NiidClasses, NiidDirichlet, NiidQuantity, Split
from cfedavg.data.tasks import build_task
from tests.data.test_data import check_disjoint, labels_of, same

SIZES = [60, 45, 80, 30]
ALL = ["niid_dirichlet(0.5)", "flower_dirichlet(0.5)", "niid_quantity(2)", "niid_classes(2)"]


@pytest.mark.parametrize("text", ALL)
@settings(max_examples=8)
@given(m=st.integers(2, 8), seed=st.integers(0, 2**63 - 1))
def test_every_sample_has_one_client(text: str, m: int, seed: int) -> None:
    train, test = labels_of(SIZES), labels_of([9, 8, 7, 6])
    parts = SPLITTERS.parse(text).deal((train, test), 4, m, seed)
    held = {int(c) for part in parts.train for c in train[part]}
    assert len(check_disjoint(parts.train, len(train))) == sum(SIZES[c] for c in held) or "quantity" in text
    check_disjoint(parts.test, len(test))
    least = 1 if text.startswith("niid_classes") else 10
    assert min(map(len, parts.train)) >= least
    assert same(parts, SPLITTERS.parse(text).deal((train, test), 4, m, seed))
    if "quantity" in text:
        return
    for mine, its in zip(parts.train, parts.test, strict=True):
        assert {*test[its].tolist()} <= {*train[mine].tolist()}


def test_all_samples_are_used_by_the_dirichlet_splits() -> None:
    train, test = labels_of([500, 400, 300]), labels_of([50, 40, 30])
    for text in ALL[:3]:
        parts = SPLITTERS.parse(text).deal((train, test), 3, 6, 5)
        assert parts.unused == 0
        assert sum(map(len, parts.test)) == 120


def test_shares_of_a_class_follow_the_definition() -> None:
    """The share of one client of one class has mean 1/m and the variance of Dirichlet(alpha)."""
    m, alpha, n = 4, 0.6, 100_000
    shares = np.stack([FlowerDirichlet(alpha, least=1).counts(np.full(8, n), m, seed) for seed in range(120)])
    shares = shares.transpose(0, 2, 1).reshape(-1, m) / n
    assert shares.mean(0) == pytest.approx(np.full(m, 1 / m), abs=0.03)
    expected = (1 / m) * (1 - 1 / m) / (m * alpha + 1)
    assert shares.var(0) == pytest.approx(np.full(m, expected), rel=0.15)


def test_balanced_clients_take_no_more_once_they_are_full() -> None:
    sizes, m = np.full(20, 50), 5
    for seed in range(20):
        balanced = NiidDirichlet(0.3).counts(sizes, m, seed)
        before = np.cumsum(balanced, axis=1) - balanced
        assert not (balanced * (before >= sizes.sum() / m)).any()
    assert str(SPLITTERS.parse("niid_dirichlet(0.3)")) == "niid_dirichlet(0.3)"


@pytest.mark.parametrize(
    ("split", "first"),
    [(NiidDirichlet(0.3), [50, 0, 0]), (FlowerDirichlet(0.3, balanced=True), [50, 10, 0])],
)
def test_a_client_with_just_the_mean(
    split: FlowerDirichlet, first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is full in NIID-Bench; in Flower, a client is full with more than the mean."""
    shares = np.log([[1, 1e-99], [0.4, 0.6], [0.4, 0.6]])
    monkeypatch.setattr("cfedavg.data.splits.log_dirichlet", lambda *_: shares)
    sizes = np.array([50, 25, 25])
    assert split.counts(sizes, 2, 0).tolist() == [first, (sizes - first).tolist()]


def test_sizes_of_quantity_skew() -> None:
    sizes = np.stack([NiidQuantity(0.8, least=1).counts(np.array([50_000]), 5, s)[:, 0] for s in range(400)])
    assert (sizes.sum(1) == 50_000).all()
    assert sizes.var(0) / 50_000**2 == pytest.approx(np.full(5, 0.2 * 0.8 / (5 * 0.8 + 1)), rel=0.2)


def test_classes_of_each_client() -> None:
    counts = NiidClasses(3).counts(np.array([100, 101, 102, 103, 104]), 12, seed=1)
    assert ((counts > 0).sum(1) == 3).all()
    assert (counts[np.arange(12), np.arange(12) % 5] > 0).all()
    assert counts.sum(0).tolist() == [100, 101, 102, 103, 104]
    for column in counts.T:
        held = column[column > 0]
        assert held.max() - held.min() <= 1
        assert (np.diff(held) <= 0).all()  # as numpy.array_split
    rows = np.concatenate([NiidClasses(3).counts(np.full(5, 90), 5, seed) for seed in range(9)])
    others = {tuple(np.flatnonzero(row)) for row in rows}
    assert len(others) == 10  # all ways to choose 3 of 5


def test_the_option_deals_clients() -> None:
    task = build_task(Config(partition="niid_dirichlet(0.3)", clients=20, model="linear"))
    sizes = [len(each) for each in task.clients]
    assert (len(sizes), sum(sizes)) == (20, 10_000)
    assert max(sizes) > 2 * min(sizes)
    assert task.test_parts is not None
    assert sum(map(len, task.test_parts)) == 2000


class Greedy(Split):
    """Not a dataclass."""


@pytest.mark.parametrize(("options", "words"), [
    ({"partition": "dirichlet(0.5)"}, "`partition`: unknown name 'dirichlet'; there are flower_dirichlet"),
    ({"partition": "niid_dirichlet"}, "`partition`: niid_dirichlet has the wrong arguments"),
    ({"partition": "niid_dirichlet(0)"}, "alpha must be above 0, got 0"),
    ({"partition": "flower_dirichlet(1, least=0)"}, "least must be a whole number 1 or more, got 0"),
    ({"partition": "flower_dirichlet(1, balanced=2)"}, "balanced must be true or false, got 2"),
    ({"partition": "niid_classes(11)"}, "needs 11 classes, the data set has 10"),
    ({"partition": "niid_classes(0)"}, "k must be a whole number 1 or more, got 0"),
    ({"partition": "niid_dirichlet(0.5)", "clients": 1001}, "`clients` must be at most 1000 with the `part"),
    ({"partition": "niid_quantity(0.001)", "clients": 50}, "fewer than 10 samples in each of 1,000 draws"),
    ({"partition": "niid_quantity(1)", "iid": True}, "`iid` and `partition` exclude each other"),
    ({"partition": "tests.data.test_splits:Greedy"}, "must be a frozen dataclass"),
    ({"client_column": "role"}, "`client_column`: embedded has no column 'role'; set"),
    ({"label_column": "y"}, "`label_column`: embedded has no column 'y'"),
    ({"dataset": "mnist", "text_column": "t"}, "`text_column`: mnist has no column 't'"),
    ({"client_column": "role", "dirichlet": 1.0}, "`dirichlet` and `client_column` exclude each other"),
])  # fmt: skip
def test_one_sentence_says_what_is_wrong(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_task(Config(**({"model": "linear"} | options)))
