"""Refinement: with the time that is left after the last rung, try neighbours of the best candidate.

A neighbour differs in one field: half or twice the local work or the rate, or the next compressor. It trains
rung by rung, as long as it is among the best third of all candidates at that rung. If it ends as the best,
its own neighbours come next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from cfedavg.core.config import Config
from cfedavg.core.run_files import Record as Row
from cfedavg.core.units import format_metric
from cfedavg.tuner.plan import Entrant
from cfedavg.tuner.progress import Progress
from cfedavg.tuner.race import Race
from cfedavg.tuner.record import Record, Rung
from cfedavg.tuner.space import list_neighbours

MOST = 16  # neighbours in one search


@dataclass
class Refinement:
    """The refinement of a search whose rungs are done; `until` is when its time is over.

    `save` writes the record after each neighbour. What comes next follows from the record, so that a resumed
    search tries the same neighbours.
    """

    config: Config
    record: Record
    race: Race
    progress: Progress
    until: float
    save: Callable[[], None]

    def run(self) -> None:
        """Try neighbours until the time is over, or until none of the best candidate's is left."""
        with self.progress.rung("refining", MOST):
            while (entrant := self._next()) and self._try(entrant):
                self.save()

    @property
    def _entrants(self) -> list[Entrant]:
        assert self.record.ladder is not None
        return self.record.ladder.entrants

    @property
    def _tried(self) -> int:
        return sum(each.name.startswith("r") for each in self._entrants)

    def _next(self) -> Entrant | None:
        """Return the first neighbour that was not tried; None if there is none, or no time for it."""
        name = self.record.rungs[-1].entries[0].name
        best = next(each for each in self._entrants if each.name == name)
        known = [each.changes for each in self._entrants]
        neighbours = list_neighbours(self.config, best.changes, self.record.keep)
        new = [(changes, cost) for changes, cost in neighbours if changes not in known]
        if not new or self._tried >= MOST:
            return None
        changes, cost = new[0]
        seconds = cost * math.fsum(row["seconds"] for row in self.race.rows(name)) / self.race.size
        if time.monotonic() + seconds > self.until:
            return None
        return Entrant(f"r{self._tried + 1:02d}", changes, best.seconds * cost, best.eval_every)

    def _try(self, entrant: Entrant) -> bool:
        """Train a neighbour through the rungs and add it to them; return False if the time is over first."""
        rungs, found = self.record.rungs, list[Rung]()
        for number, rung in enumerate(rungs):
            if not self.race.run(iter([entrant]), rung.limit, self.until, self._follow):
                return False
            names = [*(entry.name for entry in rung.entries), entrant.name]
            found.append(self.race.rank(names, rung.limit, last=number + 1 == len(rungs)))
            if not any(entry.stays for entry in found[-1].entries if entry.name == entrant.name):
                break
        rungs[: len(found)] = found
        self._entrants.append(entrant)
        self.race.clear(found[-1], [entrant.name])
        self._report(entrant, len(found))
        return True

    def _follow(self, name: str, rows: list[Row], done: bool) -> None:
        self.progress.update(self._tried, f"{name} round {len(rows)}")

    def _report(self, entrant: Entrant, reached: int) -> None:
        """Say what a neighbour reached, and in which rung."""
        rungs, metric = self.record.rungs, self.race.metric or ""
        (entry,) = [each for each in rungs[reached - 1].entries if each.name == entrant.name]
        score = entry.note if entry.score is None else format_metric(metric, entry.score)
        end = "the new best" if reached == len(rungs) and entry.stays else "not better"
        text = f"{entrant.name} ({entrant.candidate}) {score} in rung {reached}: {end}"
        self.progress.update(self._tried, text, is_done=True)
