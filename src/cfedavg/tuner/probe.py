"""What a candidate costs: estimated from a few rounds of the default, before the search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from cfedavg.compress import parse
from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.layout import Layout
from cfedavg.simulate.engines import Partners
from cfedavg.simulate.local import Vectors
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.run import run_beside
from cfedavg.simulate.steps import finish
from cfedavg.task import Task
from cfedavg.tuner.budget import Budget
from cfedavg.tuner.holdout import choose_clients
from cfedavg.tuner.space import Candidate
from cfedavg.wire import measure

ROUNDS = 6  # of the probe; the first one is slower, since it prepares the engine
EVAL_EVERY = 3
EVALUATIONS = 10  # of a candidate in the first rung
MOST_EVALUATIONS = 9 * EVALUATIONS  # of a candidate with the whole budget
CLIENTS = 10  # a round has so many clients in the probe, and at least so many while tuning
BIG = 12.0  # rounds
SLOW = 16.0  # a candidate that takes more than so many times the default's time is not tried


@dataclass(frozen=True)
class Probe:
    """What a few rounds of the default have shown on `clients` clients a round.

    `seconds` are those of a round, and `evaluation` those of an evaluation. `first` is what the first
    downloads take of the budget, and `each` what a later round takes. `update` is how far the model moved:
    messages are about as long as those of it.
    """

    clients: int
    seconds: float
    evaluation: float
    first: float
    each: float
    update: torch.Tensor


def fewest_clients(config: Config, m: int) -> int:
    """Return the number of clients on which the tuner trains at least; all m if options name each client."""
    values = [config.per_client(name) for name in ("local_steps", "steps_per_second")]
    if any(each is not None and each.each for each in values) or "x " in (config.link or ""):
        return m
    return min(m, math.ceil(CLIENTS / config.participation))


def run_probe(config: Config, task: Task, budget: Budget, folder: Path) -> Probe:
    """Train the default for a few rounds on few clients, and return what it took."""
    few = choose_clients(task, fewest_clients(config, len(task.clients)), config.seed)
    config = replace(
        config, clients=len(few.clients), rounds=ROUNDS, eval_every=EVAL_EVERY, checkpoint_every=0
    )
    partners = Partners([(Plan(config, few), few)])
    result = finish(run_beside(config, few, partners, out=folder, resume=False, callbacks=[]))
    first, *others = result.rows
    # The smallest time of several: another process may have slowed down the others.
    seconds = min(row["seconds"] for row in others if "test_loss" not in row)
    evaluated = min(row["seconds"] for row in others if "test_loss" in row)
    before, after = (Vectors(model).read()[0] for model in (task.model, result.server_model))
    spent = budget.spent(result.rows)
    each = spent[-1] - spent[-2]
    downloads = first.get("first_download_bytes") or first["downlink_bytes"]
    return Probe(
        clients=first["clients"],
        seconds=seconds,
        evaluation=max(0.0, evaluated - seconds),
        first=max(0.0, spent[0] - each) if budget.is_time else float(downloads),
        each=each,
        update=(after - before).float(),
    )


@dataclass
class Costs:
    """What candidates are expected to cost, from the probe of the default; `m` is the number of clients."""

    config: Config
    task: Task
    budget: Budget
    probe: Probe
    _lengths: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def m(self) -> int:
        return len(self.task.clients)

    @property
    def few(self) -> int:
        return fewest_clients(self.config, self.m)

    def clients_per_round(self, clients: int) -> int:
        """Return how many of `clients` clients take part in a round."""
        return max(1, round(self.config.participation * clients))

    def whole(self, clients: int) -> float:
        """Return the budget for so many of the clients."""
        return self.budget.share_of_clients(self.clients_per_round(clients), self.clients_per_round(self.m))

    def first(self, clients: int) -> float:
        """Return what the first downloads of the first round take."""
        return self.probe.first * self._factor(clients)

    def _factor(self, clients: int) -> float:
        """Return how much more a round of so many clients takes of the budget than a round of the probe."""
        return 1.0 if self.budget.is_time else self.clients_per_round(clients) / self.probe.clients

    def each(self, candidate: Candidate, clients: int) -> float:
        """Return what a round of a candidate takes of the budget, after the first downloads."""
        mine, usual = (self._amount(each) for each in (candidate, Candidate("default")))
        return self.probe.each * self._factor(clients) * mine / usual

    def _amount(self, candidate: Candidate) -> float:
        """Return what a round takes up to a factor that all candidates share."""
        config = candidate.apply(self.config)
        up, down = self._length("compressor", config), self._length("compressor_down", config)
        if not self.budget.is_time:
            return float(up + down)
        plan = Plan(config, self.task)
        return max(plan.link.seconds(i, plan.steps.at(0, i), up, down) for i in range(plan.m))

    def _length(self, field: str, config: Config) -> int:
        """Return about how many bytes a client's message in one direction has."""
        text = getattr(config, field)
        if (text, field) not in self._lengths:
            payload = parse(text, field).compress(self.probe.update, 0, Layout.of(self.task.model), 1)
            self._lengths[text, field] = measure(payload.numpy(), Layout.of(self.task.model))[0]
        return self._lengths[text, field]

    def rounds(self, candidate: Candidate, clients: int, limit: float) -> float:
        """Return how many rounds of a candidate `limit` pays for."""
        return max(0.0, limit - self.first(clients)) / self.each(candidate, clients)

    def seconds_per_round(self, candidate: Candidate, clients: int) -> float:
        """Return the seconds of a candidate's round: they grow with its local steps."""
        mine, usual = (
            Plan(each.apply(self.config), self.task).steps.mean for each in (candidate, Candidate("default"))
        )
        return self.probe.seconds * mine / usual * self.clients_per_round(clients) / self.probe.clients

    def seconds(self, candidate: Candidate, clients: int) -> float:
        """Return the seconds in which a candidate spends the whole budget."""
        rounds = self.rounds(candidate, clients, self.whole(clients))
        evaluations = min(rounds, MOST_EVALUATIONS)
        return rounds * self.seconds_per_round(candidate, clients) + evaluations * self.probe.evaluation

    def choose(self, candidates: Sequence[Candidate], number: int) -> list[Candidate]:
        """Return the default and the first `number` candidates that fit it: valid, not too slow, not too big.

        A candidate is too big if the budget pays for fewer than `BIG` of its rounds: the first rung could not
        compare it.
        """
        default, *others = candidates
        limit, m = self.whole(self.m), self.m
        fewest = min(BIG, self.rounds(default, m, limit) / 2)
        chosen = [default]
        for each in others:
            try:
                slow = self.seconds(each, m) > SLOW * self.seconds(default, m)
                rounds = self.rounds(each, m, limit)
            except InputError:  # its parts do not go together with the others
                continue
            if not slow and rounds >= fewest:
                chosen.append(each)
            if len(chosen) > number:
                break
        return chosen
