"""Rates, local steps and the corollaries' presets."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from cfedavg import Config, InputError
from cfedavg.core.keys import Purpose, key, uniform
from cfedavg.schedule import Steps, resolve_rates

SAMPLES = [50, 60, 70]


def rates(clients_per_round: int = 3, **options: object):  # type: ignore[no-untyped-def]
    config = Config(clients=3, **options)  # type: ignore[arg-type]
    return resolve_rates(config, Steps(config, SAMPLES, [1.0, 2.0, 3.0]), clients_per_round)


def test_constant_and_decaying() -> None:
    assert [rates(eta_local=0.3).eta_local(t) for t in (0, 5, 99)] == [0.3, 0.3, 0.3]
    decaying = rates(eta_local=0.3, schedule="decaying(a=4)")
    assert decaying.eta_local(0) == 0.3
    assert decaying.eta_local(12) == pytest.approx(0.15)
    assert all(decaying.eta_local(t) > decaying.eta_local(t + 1) for t in range(20))


def test_corollary_1() -> None:
    found = rates(schedule="corollary1", rounds=400, local_steps="5", smoothness=2.0)
    assert found.eta_local(0) == found.eta_local(399) == pytest.approx(1 / (20 * 5 * 2))
    assert found.eta == pytest.approx(math.sqrt(5 * 3))
    assert found.update == "sum"


def test_corollary_2() -> None:
    found = rates(schedule="corollary2(a=9)", rounds=400, local_steps="5", smoothness=2.0)
    assert found.eta_local(0) == pytest.approx(1 / (3 * 5 * 2))
    assert found.eta_local(16) == pytest.approx(1 / (5 * 5 * 2))
    assert found.eta == pytest.approx(math.sqrt(5 * 3))


def test_corollary_3() -> None:
    found = rates(schedule="corollary3(k_min=4)", rounds=100, local_steps="4..9", smoothness=2.0)
    assert found.eta_local(7) == pytest.approx(1 / (10 * 2))
    assert found.eta == pytest.approx(math.sqrt(4 * 3))
    assert found.update == "mean"


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"local_steps": "4..9"}, 4),
        ({"local_steps": "5"}, 5),
        ({"local_steps": "8,6,7"}, 6),
        ({"local_epochs": 2, "batch_size": 25}, 4),  # of 50, 60 and 70 samples
        ({"deadline": 3.0, "steps_per_second": "1"}, 3),  # at 1, 2 and 3 steps a second
        ({"deadline": 0.5, "steps_per_second": "1"}, 1),  # the first client does no step
        ({"local_steps": "4..9", "schedule": "corollary3(k_min=2)"}, 2),
    ],
)
def test_corollary_3_takes_the_least_K_of_the_plan(options: dict[str, object], least: int) -> None:
    found = rates(**{"schedule": "corollary3", "smoothness": 2.0} | options)  # type: ignore[arg-type]
    assert found.eta == pytest.approx(math.sqrt(least * 3))


def test_corollary_3_asks_for_what_no_plan_knows() -> None:
    """With a deadline and no speed, K_min of a real client is not known."""
    for schedule, eta in (("corollary3", None), ("corollary3(k_min=5)", math.sqrt(5 * 3))):
        config = Config(clients=3, schedule=schedule, smoothness=2.0, deadline=30.0)
        steps = Steps(config, SAMPLES, [math.inf] * 3)
        assert (steps.least, steps.equal) == (None, None)
        if eta is None:
            with pytest.raises(InputError, match=r"needs k_min, the smallest .* corollary3\(k_min=5\)"):
                resolve_rates(config, steps, 3)
        else:
            assert resolve_rates(config, steps, 3).eta == pytest.approx(eta)


def test_corollaries_count_the_clients_of_a_round() -> None:
    assert rates(2, schedule="corollary1", local_steps="5", smoothness=2.0).eta == pytest.approx(
        math.sqrt(10)
    )


@pytest.mark.parametrize(
    ("options", "update", "eta"),
    [
        ({"local_steps": "5"}, "sum", 1.0),
        ({"local_steps": "2..8"}, "mean", 5.0),  # the mean K makes up for the division by K
        ({"local_steps": "5", "update": "mean"}, "mean", 5.0),
        ({"local_steps": "2..8", "update": "sum"}, "sum", 1.0),
        ({"local_steps": "2..8", "eta": 0.5}, "mean", 0.5),
        ({"local_steps": "5", "eta": 0.5, "schedule": "corollary1", "smoothness": 2.0}, "sum", 0.5),
    ],
)
def test_line_and_global_rate(options: dict[str, object], update: str, eta: float) -> None:
    found = rates(**options)  # type: ignore[arg-type]
    assert (found.update, found.eta) == (update, eta)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "corollary1"}, "corollary1 needs `smoothness`"),
        ({"schedule": "corollary1", "smoothness": 1.0, "local_steps": "1..5"}, "needs the same number"),
        (
            {"schedule": "corollary1", "smoothness": 1.0, "update": "mean"},
            "`update` must be sum, since `schedule` corollary1 assumes it, got mean",
        ),
        (
            {"schedule": "corollary3", "smoothness": 1.0, "update": "sum"},
            "`update` must be mean, since `schedule` corollary3 assumes it, got sum",
        ),
        ({"schedule": "corollary3(k_min=0)"}, "k_min must be a whole number of 1 or more, got 0"),
        (
            {"schedule": "corollary3(k_min=5)", "smoothness": 1.0, "local_steps": "4..9"},
            "k_min must be at most 4, the smallest number of local steps of a client, got 5",
        ),
        ({"schedule": "decaying(a=0)"}, "a must be a finite number above 0, got 0"),
        ({"schedule": "decaying(a=1e999)"}, "a must be a finite number above 0, got inf"),
        ({"schedule": "cosine"}, "unknown name 'cosine'; there are constant, corollary1"),
        ({"schedule": "decaying(b=1)"}, "no argument 'b'; known are a"),
        ({"deadline": 0.1, "steps_per_second": "1"}, "`deadline` must give at least one client time"),
    ],
)
def test_errors(options: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        rates(**options)  # type: ignore[arg-type]


def steps(**options: object) -> Steps:
    return Steps(Config(clients=3, **options), SAMPLES, [1.0, 2.5, 4.0])  # type: ignore[arg-type]


def test_steps_of_each_kind() -> None:
    assert [steps(local_steps="7").at(3, i) for i in range(3)] == [7, 7, 7]
    assert [steps(local_steps="1,2,3").at(3, i) for i in range(3)] == [1, 2, 3]
    assert [steps(local_epochs=2, batch_size=25).at(0, i) for i in range(3)] == [4, 6, 6]
    deadline = steps(deadline=2.0, steps_per_second="1")
    assert [deadline.at(0, i) for i in range(3)] == [2, 5, 8]
    assert deadline.bounds == (2, 8)
    assert deadline.mean == 5
    assert deadline.equal is None
    assert steps(local_steps="7").equal == 7
    assert Steps(Config(clients=1, deadline=0.29, steps_per_second="1"), [9], [100.0]).at(0, 0) == 29
    some_idle = Steps(Config(clients=3, deadline=2.0, steps_per_second="1"), SAMPLES, [0.1, 1.0, 4.0])
    assert (some_idle.at(0, 0), some_idle.mean) == (0, 5.0)


def test_a_range_is_drawn_per_client_and_round_over_all_its_values() -> None:
    drawn = steps(local_steps="2..4")
    seen = [[drawn.at(t, i) for i in range(3)] for t in range(60)]
    assert {k for row in seen for k in row} == {2, 3, 4}
    assert any(a != b for a, b in pairwise(seen))
    assert drawn.mean == 3
    draw = float(uniform(key(0, 5, 1, Purpose.STEPS), 1)[0])  # of its own: not that of who is lost
    assert drawn.at(5, 1) == 2 + math.floor(3 * draw)
    others = [uniform(key(0, t, 1, Purpose.LOSS), 1)[0] for t in range(60)]
    assert [row[1] for row in seen] != [2 + math.floor(3 * float(u)) for u in others]
    assert [drawn.at(5, 1), drawn.at(5, 1)] == [drawn.at(5, 1)] * 2
