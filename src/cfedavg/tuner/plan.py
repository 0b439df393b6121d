"""The plan of a search: how many clients, candidates and rungs fit the stated time.

A rung trains the candidates that are left until they have spent a share of the budget. Then it keeps the best
third. The default stays to the end, so that the result is compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cfedavg.core.errors import InputError
from cfedavg.core.units import format_time
from cfedavg.tuner.budget import Budget
from cfedavg.tuner.probe import EVALUATIONS, Costs
from cfedavg.tuner.space import Candidate, Changes

KEEP = 3  # of so many candidates, one goes on to the next rung
# How many candidates are tried beside the default: 48 if there is time for them on all clients, 24 or 12 if
# there is time for them on fewer clients, otherwise 6.
CANDIDATES = (48, 24, 12, 6)
RUNGS = 3
ROUNDS = 2  # of the default, at least, in the first rung
SAFETY = 0.8  # of the time is planned for; the rest is for estimates that are too low


@dataclass(frozen=True)
class Entrant:
    """A candidate of the plan: `seconds` are those that the whole budget is expected to take."""

    name: str
    changes: Changes
    seconds: float
    eval_every: int

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.name, self.changes)


@dataclass(frozen=True)
class Ladder:
    """How the search goes: on how many clients, with which candidates, and the limit of each rung.

    `limits` are what a candidate may have spent at the end of each rung. The last one is `whole`, the budget
    for so few clients, or less if there is no time for that. `part` is `whole` as a share of the user's
    budget. The first downloads take `first`.
    """

    clients: int
    of_clients: int
    whole: float
    part: float
    first: float
    limits: list[float]
    entrants: list[Entrant] = field(default_factory=list)

    def in_budget(self, amount: float) -> float:
        """Return an amount that so few clients spend as the amount that all clients would."""
        return amount / self.part

    def seconds_until(self, entrant: Entrant, limit: float) -> float:
        """Return the seconds in which a candidate is expected to spend `limit`, from its first round on."""
        return entrant.seconds * (limit - self.first) / (self.whole - self.first)

    def seconds_left(self, rung: int) -> float:
        """Return the expected seconds of all rungs after `rung`; -1 stands for the time before the first."""
        ends = [self.first, *self.limits]
        each = [sum(self.seconds_until(entrant, end) for entrant in self.entrants) for end in ends]
        n = len(self.entrants)
        return sum(
            count_survivors(n, later) / n * (each[later + 1] - each[later])
            for later in range(rung + 1, len(self.limits))
        )


def count_survivors(entrants: int, rung: int) -> int:
    """Return how many candidates train in a rung, counted from 0; the default is one of them, or one more.

    >>> [count_survivors(25, rung) for rung in range(3)]
    [25, 10, 5]
    """
    for _ in range(rung):
        entrants = max(2, -(-entrants // KEEP) + 1)
    return entrants


def make_ladder(budget: Budget, costs: Costs, candidates: Sequence[Candidate], seconds: float) -> Ladder:
    """Return the plan for a search of so many seconds."""
    m, few, available = costs.m, costs.few, SAFETY * seconds
    check_budget(budget, costs)
    for number in CANDIDATES:
        chosen = costs.choose(candidates, number)
        for rungs in range(RUNGS, 0, -1):
            total = _total(costs, chosen, rungs)
            share = min(1.0, available / (total * few / m))
            rounds = costs.rounds(chosen[0], m, share * costs.whole(m))
            needed = total * (m if number == CANDIDATES[0] else few) / m
            is_short = needed > available and number != CANDIDATES[-1]
            if is_short or rounds / KEEP ** (rungs - 1) < ROUNDS:
                continue
            clients = max(few, min(m, int(m * available / total)))
            return _ladder(costs, chosen, clients, [share / KEEP**i for i in reversed(range(rungs))])
    least = seconds * ROUNDS / max(rounds, 1e-9)
    raise InputError(
        f"`minutes` must be about {1.2 * least / 60:.2g} or more for this budget, model and data: a round of "
        f"the default takes {format_time(costs.seconds_per_round(chosen[0], few))} on the fewest clients"
    )


def check_budget(budget: Budget, costs: Costs) -> None:
    """Raise InputError if the budget does not pay for a few rounds of the default."""
    m = costs.m
    first, each = costs.first(m), costs.each(Candidate("default"), m)
    least = first + (ROUNDS + 1) * each
    if budget.amount < least:
        what = (
            f"the first round of {costs.clients_per_round(m)} clients takes {budget.describe(first + each)} "
            f"with the model's first download, and a later round {budget.describe(each)}"
        )
        raise InputError(f"`budget` must be {budget.describe(1.01 * least)} or more, got {budget}: {what}")


def _total(costs: Costs, chosen: Sequence[Candidate], rungs: int) -> float:
    """Return the expected seconds of all rungs on all clients."""
    m = costs.m
    each = [costs.seconds(candidate, m) for candidate in chosen]
    mean, before, total = sum(each) / len(each), 0.0, 0.0
    for rung in range(rungs):
        share = KEEP ** (rung + 1 - rungs)
        total += count_survivors(len(chosen), rung) * mean * (share - before)
        before = share
    return total


def _ladder(costs: Costs, chosen: Sequence[Candidate], clients: int, shares: Sequence[float]) -> Ladder:
    whole, first = costs.whole(clients), costs.first(clients)
    limits = [first + share * (whole - first) for share in shares]
    entrants = [
        Entrant(
            candidate.name,
            candidate.changes,
            costs.seconds(candidate, clients),
            max(1, int(costs.rounds(candidate, clients, limits[0]) / EVALUATIONS)),
        )
        for candidate in chosen
    ]
    return Ladder(clients, costs.m, whole, whole / costs.whole(costs.m), first, limits, entrants)
