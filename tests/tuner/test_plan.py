"""The plan of a search: what fits the time, and what candidates are expected to cost."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from cfedavg import Config, InputError
from cfedavg.core.layout import Layout
from cfedavg.tuner.budget import Budget
from cfedavg.tuner.plan import CANDIDATES, KEEP, Ladder, count_survivors, make_ladder
from cfedavg.tuner.probe import Costs, Probe, fewest_clients, run_probe
from cfedavg.tuner.space import Candidate, draw_candidates, list_dimensions
from tests.conftest import blobs

PARTS = (0.7, 3, 5, 8, 13, 18, 60)
DEFAULT = Candidate("default")
CONFIG = Config(local_steps=5, batch_size=5)


def make_costs(seconds: float = 0.1, config: Config = CONFIG, m: int = 40, budget: str = "1MB") -> Costs:
    """A task whose rounds of 10 clients take so many seconds, 2 kB for first downloads and 1 kB more each."""
    task = blobs(m)
    d = Layout.of(task.model).d
    update = torch.randn(d, generator=torch.Generator().manual_seed(0))
    probe = Probe(10, seconds, evaluation=0.0, first=2000.0, each=1000.0, update=update)
    return Costs(config, task, Budget.parse(budget), probe)


def plan(costs: Costs, seconds: float) -> Ladder:
    candidates = list(islice(draw_candidates(list_dimensions(costs.config, ()), 0), 100))
    return make_ladder(costs.budget, costs, candidates, seconds)


def test_with_much_time_all_clients_train_and_the_last_rung_spends_everything() -> None:
    ladder = plan(make_costs(), 1e6)
    assert (ladder.clients, ladder.of_clients, len(ladder.entrants)) == (40, 40, CANDIDATES[0] + 1)
    assert (ladder.whole, ladder.part, ladder.first) == (1e6, 1.0, 8000.0)
    assert ladder.limits == pytest.approx([8000 + 992_000 / 9, 8000 + 992_000 / 3, 1e6])
    assert ladder.entrants[0].candidate == DEFAULT


def test_less_time_means_fewer_clients_then_fewer_candidates_then_a_part_of_the_budget() -> None:
    costs = make_costs()
    enough = plan(costs, 1e6).seconds_left(-1)
    plans = [plan(costs, enough / part) for part in PARTS]
    sizes = [(len(each.entrants) - 1, each.clients, each.limits[-1] / each.whole) for each in plans]
    assert sizes == sorted(sizes, reverse=True)
    assert {number for number, *_ in sizes} == {*CANDIDATES}
    assert any(
        number == 24 and clients < 40 and share == pytest.approx(1) for number, clients, share in sizes
    )
    assert sizes[-1][:2] == (CANDIDATES[-1], 10)
    assert plans[-1].limits[-1] < plans[-1].whole
    for ladder, part in zip(plans, PARTS, strict=True):
        assert ladder.seconds_left(-1) <= enough / part * 1.01
        assert ladder.whole == pytest.approx(1e6 * ladder.clients / 40)


def test_the_minutes_that_the_error_asks_for_suffice() -> None:
    costs = make_costs(seconds=5)
    with pytest.raises(InputError, match=r"`minutes` must be about [\d.e+]+ or more") as error:
        plan(costs, 5)
    asked = float(str(error.value).split("about ")[1].split(" ")[0])
    assert plan(costs, 60 * asked).limits


@pytest.mark.parametrize("budget", ["5kB", "8kB", "15kB"])
def test_a_budget_below_the_first_rounds(budget: str) -> None:
    costs = make_costs(budget=budget)
    with pytest.raises(
        InputError, match=r"`budget` must be 20\.2 kB or more, .*: the first round of 40"
    ) as error:
        plan(costs, 1e6)
    assert "takes 12 kB with the model's first download, and a later round 4 kB" in str(error.value)
    assert plan(make_costs(budget="20.2kB"), 1e6).limits[-1] == pytest.approx(20_200)


def test_few_rounds_mean_few_rungs() -> None:
    assert [len(plan(make_costs(budget=b), 1e6).limits) for b in ("90kB", "40kB", "24kB")] == [3, 2, 1]


def test_costs_follow_the_messages_and_the_steps() -> None:
    costs = make_costs()
    steps, dense = Candidate("a", {"local_steps": "20"}), Candidate("b", {"compressor": "none"})
    assert costs.each(DEFAULT, 40) == 4000
    assert costs.each(steps, 40) == 4000
    assert costs.each(dense, 40) > 2 * 4000  # 32 bits instead of 3 in one direction
    assert costs.seconds_per_round(steps, 10) == pytest.approx(0.4)
    assert costs.seconds(steps, 10) == pytest.approx(4 * costs.seconds(DEFAULT, 10))
    assert costs.rounds(DEFAULT, 40, 48_000) == 10


def test_costs_in_simulated_time() -> None:
    """On a slow link, messages decide the time of a round; the clients' number does not."""
    config = CONFIG.replace(link="up=1kbit, down=1kbit")
    costs = make_costs(config=config, budget="1h")
    dense = Candidate("b", {"compressor": "none", "compressor_down": "none"})
    assert costs.whole(10) == costs.whole(40) == 3600
    assert costs.first(10) == costs.first(40) == 2000
    ratio = costs.each(dense, 10) / costs.each(DEFAULT, 10)
    lengths = [costs._length(name, c.apply(config)) for c in (dense, DEFAULT) for name in ("compressor",)]
    assert ratio == pytest.approx(lengths[0] / lengths[1], rel=0.1)


def test_candidates_that_do_not_fit_are_left_out() -> None:
    costs = make_costs(budget="40kB")
    slow, bad = Candidate("a", {"local_steps": "1000"}), Candidate("b", {"residual_precision": "bf16"})
    config = CONFIG.replace(local_optimiser="scaffold >> sgd")
    assert costs.choose([DEFAULT, slow], 9) == [DEFAULT]
    assert Costs(config, costs.task, costs.budget, costs.probe).choose([DEFAULT, bad], 9) == [DEFAULT]


def test_the_fewest_clients() -> None:
    assert fewest_clients(Config(), 100) == 10
    assert fewest_clients(Config(), 4) == 4
    assert fewest_clients(Config(participation=0.1), 1000) == 100
    named = [Config(local_steps=[1] * 100), Config(link="40x 3g; 4g"), Config(steps_per_second=[1] * 100)]
    assert [fewest_clients(config, 100) for config in named] == [100, 100, 100]


def test_survivors() -> None:
    """A third, and the default if it is not among them."""
    assert [count_survivors(25, rung) for rung in range(3)] == [25, 10, 5]
    assert count_survivors(2, 5) == 2
    assert KEEP == 3


def test_a_probe_measures_what_a_run_does(tmp_path) -> None:  # type: ignore[no-untyped-def]
    task = blobs(12)
    probe = run_probe(CONFIG, task, Budget(1e6), tmp_path / "probe")
    assert (probe.clients, probe.update.shape) == (10, (Layout.of(task.model).d,))
    assert 0 < probe.each < probe.first
    assert probe.seconds > 0
    assert float(probe.update.norm()) > 0
