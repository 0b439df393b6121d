"""What a line of the grid costs and reaches: accuracies, rounds and bytes, from its cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cfedavg.sweep import SealedCell
from paper.feedback.experiment import ADAM, DEFAULT, PLAIN, Experiment

_FIRST = "first_download_bytes"
WINDOW = 3  # evaluations whose mean counts as an accuracy: a single one jumps from round to round
TARGET = 0.95  # the share of the accuracy of no compression that a line has to reach
BETTER = 0.95  # at most this share of the default's bytes is worth a change of the default
LOSS = 0.005  # what counts as a loss of accuracy
CLOSE = 1.25  # one seed cannot tell lines apart whose bytes differ by less than this factor
NEAR = 0.015  # a line with about the default's bytes or fewer, and so near to it, deserves more seeds


class Cost(NamedTuple):
    """What a run had sent when it reached the target: rounds, and bytes of all clients, up and down."""

    rounds: float
    total: float
    later: float  # the total without first downloads of the whole model


_NEVER = Cost(math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Outcome:
    """A line's means over its seeds; `cost` is infinite if a seed did not reach the target."""

    name: str
    seeds: int
    final: float
    message_up: float  # bytes
    message_down: float
    cost: Cost

    @property
    def reached(self) -> bool:
        """Whether all seeds reached the target."""
        return self.cost.total < math.inf


def evaluations(cell: SealedCell) -> list[tuple[int, float]]:
    """Return the number of rounds and the mean of the last `WINDOW` test accuracies, at each evaluation.

    The first `WINDOW` - 1 evaluations have no such mean and are left out.
    """
    known = [(t, a) for t, a in enumerate(cell.values.get("test_accuracy", ()), 1) if a is not None]
    windows = (known[i - WINDOW + 1 : i + 1] for i in range(WINDOW - 1, len(known)))
    return [(window[-1][0], statistics.fmean(a for _, a in window)) for window in windows]


def final_accuracy(cell: SealedCell) -> float:
    """Return the mean of the last `WINDOW` test accuracies; 0 if the run diverged or was too short."""
    found = evaluations(cell)
    return found[-1][1] if found and not cell.diverged else 0.0


def choose_target(plain: Sequence[SealedCell]) -> float | None:
    """Return the target in whole percent, rounded down: `TARGET` times what no compression reaches."""
    if not plain:
        return None
    mean = statistics.fmean(map(final_accuracy, plain))
    return math.floor(100 * TARGET * mean + 1e-9) / 100


def count_clients(cell: SealedCell) -> int:
    """Return the number of clients that take part in a round."""
    share, clients = float(cell.settings["participation"]), int(cell.settings["clients"])
    return max(1, round(share * clients))


def first_downloads(cell: SealedCell, others: Sequence[SealedCell]) -> list[int]:
    """Return the bytes of the first downloads in each round.

    A run that broadcasts the whole model does not record them. The clients of a round depend on the seed
    alone, so another cell of the seed in `others`, which records them, tells how many clients are new.
    """
    if own := cell.values.get(_FIRST):
        return list(own)
    clients, down = count_clients(cell), downloads(cell)
    recorded = max((other.values[_FIRST] for other in _partners(cell, others)), key=len)
    whole = recorded[0] / clients  # in the first round all clients are new
    return [round(first / whole) * down[t] // clients for t, first in enumerate(recorded[: len(down)])]


def _partners(cell: SealedCell, others: Sequence[SealedCell]) -> list[SealedCell]:
    """Return the cells of the same seed that record first downloads."""
    return [o for o in others if o.settings["seed"] == cell.settings["seed"] and _FIRST in o.values]


def downloads(cell: SealedCell) -> list[int]:
    """Return the bytes that all clients download in each round."""
    columns = (cell.values.get(name, ()) for name in ("total_bytes", "uplink_bytes"))
    return [total - up for total, up in zip(*columns, strict=True)]


def cost(cell: SealedCell, target: float, others: Sequence[SealedCell]) -> Cost:
    """Return what a run had sent when its accuracy first reached the target; infinite if it never did."""
    reached = [t for t, accuracy in evaluations(cell) if accuracy >= target]
    if not reached:
        return _NEVER
    total = sum(cell.values["total_bytes"][: reached[0]])
    return Cost(reached[0], total, total - sum(first_downloads(cell, others)[: reached[0]]))


def message_sizes(cell: SealedCell) -> tuple[float, float]:
    """Return the mean bytes that a client sends in a round, and downloads without first downloads."""
    up, first = cell.values.get("uplink_bytes", ()), cell.values.get(_FIRST, ())
    messages = count_clients(cell) * max(1, len(up))
    return sum(up) / messages, (sum(downloads(cell)) - sum(first)) / messages


def judge_line(
    name: str, cells: Sequence[SealedCell], target: float, others: Sequence[SealedCell]
) -> Outcome:
    """Return the outcome of a line from its finished cells, of which there is at least one."""
    costs = zip(*(cost(cell, target, others) for cell in cells), strict=True)
    sizes = zip(*map(message_sizes, cells), strict=True)
    up, down = map(statistics.fmean, sizes)
    final = statistics.fmean(map(final_accuracy, cells))
    return Outcome(name, len(cells), final, up, down, Cost(*map(statistics.fmean, costs)))


def judge_grid(grid: Experiment, found: Mapping[str, SealedCell]) -> tuple[float | None, dict[str, Outcome]]:
    """Return the target of a grid and the outcomes of its lines with cells; no outcome without a target."""
    others = [cell for line in grid.lines for cell in grid.find_cells(found, None, line)]
    # Without a partner, the first downloads of a cell are not known.
    countable = {cell.name: cell for cell in others if _partners(cell, others)}
    target = choose_target(grid.of_line(countable, PLAIN))
    if target is None:
        return None, {}
    own = {line.name: cells for line in grid.lines if (cells := grid.find_cells(countable, None, line))}
    return target, {name: judge_line(name, cells, target, others) for name, cells in own.items()}


def rank(outcomes: Mapping[str, Outcome]) -> list[Outcome]:
    """Return the outcomes that reach the target, the fewest total bytes first."""
    return sorted((each for each in outcomes.values() if each.reached), key=lambda each: each.cost.total)


def best_three(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the names of the three lines under the server optimiser sgd that need the fewest bytes."""
    return [each.name for each in rank(outcomes) if not each.name.endswith(ADAM)][:3]


def close_lines(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the names of the references, and of the lines that are close to the default or beat it."""
    ranked, names = rank(outcomes), [PLAIN, DEFAULT]
    if (default := outcomes.get(DEFAULT)) and default.reached:
        cheap = (each for each in ranked if each.cost.total <= CLOSE * default.cost.total)
        names += [each.name for each in cheap if each.final >= default.final - NEAR]
    return list(dict.fromkeys(names))


def pareto(outcomes: Mapping[str, Outcome]) -> list[Outcome]:
    """Return the outcomes that no other beats in both bytes to the target and final accuracy."""
    front = list[Outcome]()
    for each in rank(outcomes):
        if not front or each.final > front[-1].final:
            front.append(each)
    return front
