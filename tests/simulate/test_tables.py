"""What is kept of each client, if there are many: immutable tables, sums, draws and means."""

from __future__ import annotations

import math
import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg import Task
from cfedavg.core.keys import Purpose, key, permutation, sample
from cfedavg.core.run_files import ResidualNorms
from cfedavg.simulate.local import EvaluatedBatches, summarise_batches
from cfedavg.simulate.tables import Norms, Table

QUIET = settings(max_examples=100, derandomize=True, database=None)
ENTRIES = st.dictionaries(st.integers(0, 300), st.floats(0, 1e300) | st.just(math.inf), max_size=30)


@QUIET
@given(st.lists(ENTRIES, max_size=6))
def test_a_table_is_a_dict_that_does_not_change(updates: list[dict[int, float]]) -> None:
    table, norms, expected = Table[float](), Norms(), dict[int, float]()
    for new in updates:
        before, copy = table, dict(table)
        table, norms, expected = table.update(new), norms.update(new), {**expected, **new}
        assert before == copy
        assert table == norms == expected
        assert len(table) == len(norms) == len(expected) == len(list(table))
        assert [client in table for client in range(301)] == [client in expected for client in range(301)]
        assert norms.sums == ResidualNorms().add(expected.values()) == Norms(expected).sums
        assert list(Table(table)) == list(table) == list(pickle.loads(pickle.dumps(table)))
        columns, known = norms.sums.columns(301), expected.values()
        assert columns["error_norm2"] == math.fsum(known) / 301
        assert columns["error_norm"] == math.fsum(map(math.sqrt, known)) / 301


def test_an_update_copies_only_what_changes() -> None:
    old = Table({client: client for client in range(1000)})
    new = old.update({5: 0, 700: 0})
    copied = [number for number, part in new._parts.items() if part is not old._parts[number]]
    assert copied == [0, 10]


@QUIET
@given(st.integers(0, 2**63), st.integers(1, 400), st.data())
def test_a_sample_is_the_start_of_a_permutation(t: int, n: int, data: st.DataObject) -> None:
    word, k = key(0, t, 0, Purpose.SAMPLE), data.draw(st.integers(1, n))
    assert sample(word, k, n).tolist() == sorted(permutation(word, n)[:k].tolist())


@QUIET
@given(st.lists(st.lists(st.integers(0, 49), max_size=40), max_size=12), st.integers(0, 2**32 - 1))
def test_means_of_clients_are_those_of_each_client(parts: list[list[int]], seed: int) -> None:
    """Bit for bit: metrics must not depend on how the means are computed."""
    values = np.random.default_rng(seed).normal(size=50)
    test = torch.zeros(50, 1), torch.zeros(50, dtype=torch.int64)
    task = Task(torch.nn.Linear(1, 2), [test], test=test, test_parts=[np.array(p, np.int64) for p in parts])
    row = summarise_batches(task, [EvaluatedBatches([0], [1.0], [values])])
    means = [float(values[rows].mean()) for rows in parts if rows]
    names = ("client_accuracy_mean", "client_accuracy_min")
    expected = {names[0]: float(np.mean(means)), names[1]: min(means)} if means else {}
    assert {name: row[name] for name in names if name in row} == expected
