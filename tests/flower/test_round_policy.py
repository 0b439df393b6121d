"""The policy of a round: its numbers, its laws, and that a federation follows it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cfedavg import Config, InputError
from cfedavg.flower.options import LATE, LOST, Node, RoundPolicy
from cfedavg.launch.app import POLICY, policy_of
from cfedavg.simulate.plan import Plan
from tests.conftest import quadratic

shares = st.floats(0, 1)
nodes = st.integers(1, 10_000)
policies = st.builds(
    RoundPolicy,
    participation=st.floats(0, 1, exclude_min=True),
    over_selection=st.floats(0, 1000),
    min_nodes=st.integers(1, 100),
    quorum=shares,
)


# Its numbers


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("participation", 0.0, "above 0 and at most 1"),
        ("participation", 2, "above 0 and at most 1"),
        ("participation", math.nan, "above 0 and at most 1"),
        ("participation", True, "above 0 and at most 1"),
        ("over_selection", -0.1, "from 0 to 1000"),
        ("over_selection", math.nan, "from 0 to 1000"),
        ("over_selection", math.inf, "from 0 to 1000"),
        ("min_nodes", 0, "an integer of at least 1"),
        ("min_nodes", 1.5, "an integer of at least 1"),
        ("min_nodes", None, "an integer of at least 1"),
        ("quorum", 1.1, "from 0 to 1"),
        ("quorum", "half", "from 0 to 1"),
    ],
)
def test_bad_numbers(field: str, value: Any, rule: str) -> None:
    with pytest.raises(InputError) as caught:
        RoundPolicy(**{field: value})
    assert str(caught.value) == f"`{field}` must be {rule}, got {value!r}."


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, "long", None, True])
def test_bad_deadlines(timeout: Any) -> None:
    with pytest.raises(InputError) as caught:
        RoundPolicy().with_deadline(timeout)
    assert str(caught.value) == f"`timeout` must be a number of seconds above 0, got {timeout!r}."


def test_numbers_of_numpy_will_do() -> None:
    policy = RoundPolicy(np.float64(0.5), np.float32(0.5), np.int64(3), np.float32(0.5))
    assert (policy.count_needed(8), policy.count_asked(8), policy.count_quorum(8)) == (4, 6, 4)


def test_a_policy_does_not_change() -> None:
    """Another deadline is another policy, of the same class."""

    class Own(RoundPolicy):
        pass

    before = Own(quorum=0.8)
    after = before.with_deadline(5)
    assert (type(after), after.deadline, after.quorum) == (Own, 5, 0.8)
    assert before.deadline == 3600.0
    with pytest.raises(FrozenInstanceError):
        before.quorum = 0.1  # type: ignore[misc]
    with pytest.raises(InputError, match="no argument 'deadline'"):
        RoundPolicy(deadline=5.0)  # type: ignore[call-arg]


# Its laws


@given(policies, nodes)
def test_a_round_asks_enough_nodes_and_no_more_than_there_are(policy: RoundPolicy, online: int) -> None:
    needed, asked = policy.count_needed(online), policy.count_asked(online)
    assert 1 <= needed <= asked <= online
    assert policy.has_enough(asked, needed)
    assert policy.has_quorum(needed, needed)


@given(policies, nodes, st.integers(0, 2**32), st.integers(0, 10_000))
def test_nodes_are_drawn_without_replacement(policy: RoundPolicy, online: int, seed: int, t: int) -> None:
    chosen = policy.choose(range(online), seed, t)
    assert len(chosen) == policy.count_asked(online)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(online))
    assert chosen == policy.choose(range(online), seed, t)
    more = replace(policy, over_selection=policy.over_selection / 2)
    assert set(more.choose(range(online), seed, t)) <= set(chosen)


@given(policies, nodes, st.data())
def test_a_quorum_is_monotone(policy: RoundPolicy, needed: int, data: st.DataObject) -> None:
    """In the replies, and against the share."""
    replies = data.draw(st.integers(0, needed))
    assert policy.has_quorum(replies, needed) == (replies >= policy.quorum * needed)
    assert policy.has_quorum(replies, needed) == (replies >= policy.count_quorum(needed))
    assume(policy.has_quorum(replies, needed))
    assert policy.has_quorum(replies + 1, needed)
    assert replace(policy, quorum=data.draw(st.floats(0, policy.quorum))).has_quorum(replies, needed)


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 60), st.integers(0, 2**32), st.integers(0, 100))
def test_the_same_nodes_as_a_simulation(participation: float, m: int, seed: int, t: int) -> None:
    config = Config(participation=participation, seed=seed, clients=m, local_steps="1")
    plan = Plan(config, quadratic(torch.zeros(m, 1)))
    policy = RoundPolicy(participation=participation)
    assert policy.count_needed(m) == policy.count_asked(m) == plan.clients_per_round
    assert policy.choose(range(m), seed, t) == plan.sampled(t)


def test_missing_replies() -> None:
    policy = RoundPolicy().with_deadline(2.5)
    assert policy.classify_missing(is_online=True, has_enough=False) == (LATE, "no reply within 2.5 s")
    assert policy.classify_missing(is_online=True, has_enough=True) == (LATE, "it was not waited for")
    for enough in (True, False):
        assert policy.classify_missing(is_online=False, has_enough=enough) == (LOST, "it is offline")
    assert policy.explain_void(1, 4) == "1 of 4 replies: less than the quorum"


# Where it comes from


def test_from_a_run_config() -> None:
    config = Config(participation=0.5)
    assert policy_of(config, {}) == RoundPolicy(participation=0.5)
    assert policy_of(config, {"clients": 7}) == RoundPolicy(participation=0.5, min_nodes=7)
    given = {"clients": 7, "min-nodes": 3, "quorum": 0.25, "over-selection": 1, "round-timeout": 9.0}
    assert policy_of(config, given) == RoundPolicy(0.5, 1, 3, 0.25)
    assert {name.replace("-", "_") for name in POLICY} < {*RoundPolicy.__dataclass_fields__}


def test_it_needs_no_flower() -> None:
    code = "import sys, cfedavg.flower.options; sys.exit('flwr' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# A policy of one's own


class FirstOnly(RoundPolicy):
    """Ask the first two nodes, and be content with the first reply."""

    def choose(self, nodes: Sequence[Node], seed: int, t: int) -> list[Node]:
        return list(nodes[:2])

    def has_enough(self, replies: int, needed: int) -> bool:
        return replies >= 1


@pytest.mark.usefixtures("without_waiting")
def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    from tests.grid import Adding, Federation, Summing

    it = Federation(tmp_path, Adding().app, 5)
    it.start(2, policy=FirstOnly(quorum=0.2))
    assert it.outcomes == [{"late": 1, "replied": 1}] * 2
    assert {row["number"] for row in it.of_nodes} == {0, 1}
    assert "# policy: FirstOnly\n" in (it.out / "config.toml").read_text()
    around = Federation(tmp_path / "around", Adding().app, 5)
    around.start(1, Summing(), policy=FirstOnly(quorum=0.2))
    assert around.outcomes == [{"late": 4, "replied": 1}]
