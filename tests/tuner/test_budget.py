"""Budgets: texts, what a run has spent, and how many rounds a budget pays for."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfedavg import Config, InputError
from cfedavg.core.links import parse_links
from cfedavg.core.units import BYTES, TIMES, parse_quantity
from cfedavg.tuner.budget import Budget, extrapolate_rounds, rounds_within


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("10MB", Budget(10e6)),
        ("1.5 gb", Budget(1.5e9)),
        ("800 kB", Budget(800e3)),
        ("12B", Budget(12)),
        ("30min", Budget(1800, is_time=True)),
        ("2h", Budget(7200, is_time=True)),
        (" 1d ", Budget(86_400, is_time=True)),
    ],
)
def test_texts(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    "text", ["", "10", "MB", "10 MiB", "-1MB", "0MB", "1e999MB", "1.2.3MB", "10MB/s", 5, None]
)
def test_texts_that_are_refused(text: object) -> None:
    with pytest.raises(InputError, match="`budget` must be bytes above 0"):
        Budget.parse(text)


def test_links_read_quantities_as_before() -> None:
    (link,) = parse_links("up=5Mbit/s, down=2e6bit, rtt=40ms, wait=1min")
    assert [link.settings[name].low for name in ("up", "down", "rtt", "wait")] == [5e6, 2e6, 0.04, 60.0]
    with pytest.raises(InputError, match="up must be a rate above 0"):
        parse_links("up=5")


def test_a_quantity_needs_a_known_unit() -> None:
    assert parse_quantity("3 kB", BYTES) == 3000
    assert math.isnan(parse_quantity("3 kB", TIMES))


def test_simulated_time_needs_a_link() -> None:
    budget = Budget.parse("30min")
    budget.check(Config(link="4g"))
    budget.check(Config(steps_per_second="20"))
    Budget.parse("1MB").check(Config())
    with pytest.raises(InputError, match="`budget` 30 min is simulated time, which needs `link`"):
        budget.check(Config())


def test_what_a_run_has_spent() -> None:
    rows = [{"total_bytes": 30, "simulated_seconds": 2.0}, {"total_bytes": 10, "simulated_seconds": 3.0}]
    assert Budget(100).spent(rows) == [30, 40]
    assert Budget(100, is_time=True).spent(rows) == [2.0, 5.0]


def test_few_clients_get_a_part_of_the_bytes_and_all_of_the_time() -> None:
    assert Budget(100).share_of_clients(10, 40) == 25
    assert Budget(100, is_time=True).share_of_clients(10, 40) == 100


rounds = st.lists(st.floats(0.5, 100), min_size=1, max_size=30)


@given(rounds, st.floats(0.5, 3000))
def test_rounds_within_a_limit_do_not_exceed_it(each: list[float], limit: float) -> None:
    spent = list(accumulate(each))
    within = rounds_within(spent, limit)
    assert within == 0 or spent[within - 1] <= limit
    assert within == len(spent) or spent[within] > limit
    assert extrapolate_rounds(spent, limit) >= within


@given(st.integers(1, 30), st.floats(0.5, 100), st.floats(0, 1000), st.integers(1, 200))
def test_equal_rounds_are_extrapolated_exactly(done: int, each: float, first: float, whole: int) -> None:
    spent = [first + each * (t + 1) for t in range(done)]
    if done > 1 or not first:
        assert extrapolate_rounds(spent, first + each * (whole + 0.5)) == whole
