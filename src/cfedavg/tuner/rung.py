"""A rung in progress: which candidates there is time for, and what the user is told."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cfedavg.core.run_files import Record as Row
from cfedavg.core.units import format_metric, format_time
from cfedavg.tuner.plan import Entrant, Ladder
from cfedavg.tuner.progress import Progress
from cfedavg.tuner.race import Race
from cfedavg.tuner.record import Rung

SHORTEST = 0.1  # of a rung; for less, it is not begun
ADMITTED = 4  # candidates, at least, train in the first rung, however slow


@dataclass
class RungInProgress:
    """A rung of a search that must end at the time `until`."""

    progress: Progress
    race: Race
    ladder: Ladder
    number: int
    until: float
    _measured: float = 0.0  # seconds of the candidates that are done, and
    _expected: float = 0.0  # what was expected of them
    _done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limit = self.ladder.limits[self.number]
        self._entrants = {each.name: each for each in self.ladder.entrants}

    def choose(self, names: Sequence[str], left: float) -> list[Entrant]:
        """Return the candidates that train in this rung, given that `left` seconds are left.

        If there is no time for all, the best and the default remain. If there is none for these two, the
        limit is lower, or no candidate remains.
        """
        if self.number == 0:
            return [self._entrants[name] for name in names]
        needed = {name: self._expect(name) for name in names}
        later = self.ladder.seconds_left(self.number)
        if sum(needed.values()) + later > left:
            share = sum(needed.values()) / (sum(needed.values()) + later)
            names = _fit(names, needed, left * share)
        total = sum(needed[name] for name in names)
        part = min(1.0, 0.9 * left / total) if total else 1.0
        if part < SHORTEST:
            return []
        before = self.ladder.limits[self.number - 1]
        self.limit = before + part * (self.limit - before)
        return [self._entrants[name] for name in names]

    def _expect(self, name: str) -> float:
        """Return the seconds in which a candidate is expected to reach the limit."""
        rows, budget = self.race.rows(name), self.race.budget
        if len(rows) < 3:
            return self._correction * self.ladder.seconds_until(self._entrants[name], self.limit)
        spent = budget.spent(rows)
        return self._seconds(rows) * max(0.0, self.limit - spent[-1]) / (spent[-1] - spent[0])

    def _seconds(self, rows: list[Row]) -> float:
        """Return the seconds that a run took, without the first round, which prepares the engine.

        Runs that train side by side share the time.
        """
        return math.fsum(row["seconds"] for row in rows[1:]) / self.race.size

    @property
    def _correction(self) -> float:
        """Return how much longer candidates took than planned."""
        return self._measured / self._expected if self._expected else 1.0

    def admit(self, entrants: Sequence[Entrant]) -> Iterator[Entrant]:
        """Yield the candidates one by one; in the first rung, leave out those for which there is no time."""
        left_out, now = 0, time.monotonic()
        left = [self.ladder.seconds_left(rung) for rung in (self.number - 1, self.number)]
        ends = now + (self.until - now) * (left[0] - left[1]) / left[0]  # the rung's share of the time
        for place, entrant in enumerate(entrants):
            is_free = self.number > 0 or place < ADMITTED
            if is_free or time.monotonic() + self._expect(entrant.name) <= ends:
                yield entrant
            else:
                left_out += 1
        if left_out:
            self.progress.say(
                f"left out, since there is no time for them: {left_out} of {len(entrants)} candidates"
            )

    def follow(self, name: str, rows: list[Row], done: bool) -> None:
        """Show what a candidate has reached."""
        spent = self.race.budget.spent(rows)
        share = min(1.0, spent[-1] / self.limit) if rows else 0.0
        unit = "time" if self.race.budget.is_time else "bytes"
        if not done:
            self.progress.update(len(self._done), f"{name} round {len(rows)}, {share:.0%} of its {unit}")
            return
        self._done.append(name)
        self._measured += self._seconds(rows)
        reached = max([self.ladder.first, *spent[-1:]])
        self._expected += self.ladder.seconds_until(self._entrants[name], reached)
        score = self.race.score(name, self.limit)
        found = self.race.notes.get(name) or "no evaluation within the limit"
        if score is not None:
            found = f"{format_metric(self.race.metric or '', score)} after {len(rows)} rounds"
        self.progress.update(len(self._done), f"{name} {found}", is_done=True)

    def describe(self, found: Rung) -> str:
        """Return what the rung has found, in words."""
        budget, metric = self.race.budget, self.race.metric or ""
        best = next(entry for entry in found.entries if entry.score is not None)
        usual = next((e.score for e in found.entries if e.name == "default"), None)
        stay = sum(entry.stays for entry in found.entries)
        beside = "" if usual is None else f", the default {format_metric(metric, usual)}"
        ends, spent = format_time(max(0.0, self.until - time.monotonic())), self.ladder.in_budget(found.limit)
        is_last = self.number + 1 == len(self.ladder.limits)
        after = "" if is_last else f"; {stay} of {len(found.entries)} go on"
        return (
            f"rung {self.number + 1} of {len(self.ladder.limits)}, at {budget.describe(spent)}: best is "
            f"{best.name} with {format_metric(metric, best.score or 0.0)}{beside}{after}; {ends} left"
        )


def _fit(names: Sequence[str], needed: dict[str, float], seconds: float) -> list[str]:
    """Return the best of `names` that fit the seconds together; always the best one and the default."""
    chosen = list(dict.fromkeys([names[0], "default"] if "default" in names else names[:2]))
    for name in names:
        if name not in chosen and sum(needed[each] for each in [*chosen, name]) <= seconds:
            chosen.append(name)
    return [name for name in names if name in chosen]
