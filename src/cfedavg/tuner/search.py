"""A search for the configuration that is best for a budget: successive halving, within a stated time."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from cfedavg.callbacks.progress import Board
from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.units import format_time
from cfedavg.task import Task
from cfedavg.tuner.budget import extrapolate_rounds
from cfedavg.tuner.holdout import choose_clients
from cfedavg.tuner.plan import Ladder, make_ladder
from cfedavg.tuner.probe import Costs, run_probe
from cfedavg.tuner.progress import Progress
from cfedavg.tuner.race import DIVERGED, Race
from cfedavg.tuner.record import Record
from cfedavg.tuner.refine import Refinement
from cfedavg.tuner.result import Tuned
from cfedavg.tuner.rung import ADMITTED, RungInProgress
from cfedavg.tuner.space import draw_candidates, list_dimensions

PROBE, RUNS = "probe", "runs"


@dataclass
class Search:
    """A search in a folder, from its probe or its record to its result; `task` has the held-out samples."""

    config: Config
    task: Task
    folder: Path
    record: Record
    began: float  # on the clock time.monotonic()
    board: Board | None = None

    def __post_init__(self) -> None:
        self._before = self.record.seconds
        self._until = self.began + 60 * self.record.minutes - self._before
        self.progress = Progress(self.board, self._left)

    def run(self) -> Tuned:
        """Run all rungs that are left, as far as the time allows, and return the result."""
        try:
            ladder = self.record.ladder or self._plan()
            race = self._open_race(ladder)
            for number in range(len(self.record.rungs), len(ladder.limits)):
                if not self._run_rung(race, ladder, number):
                    self.progress.say(
                        f"the time is over in rung {number + 1} of {len(ladder.limits)}: "
                        "continue with `resume` and more `minutes`"
                    )
                    break
            else:
                Refinement(self.config, self.record, race, self.progress, self._until, self._save).run()
            return self._finish(race, ladder)
        finally:
            self._save()

    def _save(self) -> None:
        self.record.seconds = self._before + time.monotonic() - self.began
        self.record.write(self.folder)

    def _plan(self) -> Ladder:
        """Train the default for a few rounds; return the plan that fits the time, and record it."""
        budget, keep = self.record.budget, self.record.keep
        candidates = list(draw_candidates(list_dimensions(self.config, keep), self.config.seed))
        self.progress.say(f"budget {budget}: measuring a few rounds of the default")
        shutil.rmtree(self.folder / PROBE, ignore_errors=True)
        try:
            probe = run_probe(self.config, self.task, budget, self.folder / PROBE)
        finally:
            shutil.rmtree(self.folder / PROBE, ignore_errors=True)
        costs = Costs(self.config, self.task, budget, probe)
        ladder = make_ladder(budget, costs, candidates, self._left())
        self.record.ladder = ladder
        self._save()
        self.progress.say(self._describe(ladder))
        return ladder

    def _describe(self, ladder: Ladder) -> str:
        """Return the plan in words."""
        budget = self.record.budget
        steps = ", ".join(budget.describe(ladder.in_budget(limit)) for limit in ladder.limits)
        few = ladder.clients < ladder.of_clients
        clients = f"{ladder.clients} of {ladder.of_clients}" if few else f"all {ladder.clients}"
        scaled = f", which get {ladder.part:.2g} of each amount" if few and not budget.is_time else ""
        whole = "" if ladder.limits[-1] >= 0.99 * ladder.whole else "there is no time for the whole budget; "
        return (
            f"the plan: the default and {len(ladder.entrants) - 1} candidates train on {clients} clients"
            f"{scaled}, until each has spent {steps}; after each of these rungs the best third goes on; "
            f"{whole}about {format_time(ladder.seconds_left(-1))}, at most {format_time(self._left())}"
        )

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _open_race(self, ladder: Ladder) -> Race:
        task = choose_clients(self.task, ladder.clients, self.config.seed)
        entries = [entry for rung in self.record.rungs for entry in rung.entries]
        notes = {entry.name: entry.note for entry in entries if entry.note.startswith(DIVERGED)}
        return Race(self.config, task, self.record.budget, self.folder / RUNS, ladder.entrants, notes)

    # Rungs

    def _run_rung(self, race: Race, ladder: Ladder, number: int) -> bool:
        """Run a rung and record what it found; return False if the time is over first."""
        rung = RungInProgress(self.progress, race, ladder, number, self._until)
        entrants = rung.choose(self._survivors(), self._left())
        if not entrants:
            return False
        with self.progress.rung(f"rung {number + 1}/{len(ladder.limits)}", len(entrants)):
            done = race.run(rung.admit(entrants), rung.limit, self._until, rung.follow)
        least = ADMITTED if number == 0 else len(entrants)
        if len(done) < min(least, len(entrants)):
            return False
        found = race.rank(done, rung.limit, last=number + 1 == len(ladder.limits))
        if all(entry.score is None for entry in found.entries):
            notes = "; ".join(dict.fromkeys(entry.note for entry in found.entries))
            raise InputError(f"no candidate can be compared ({notes}); lower `eta_local`, or raise `budget`")
        self.record.rungs.append(found)
        self.record.metric = race.metric or ""
        self._save()
        race.clear(found, done)
        self.progress.say(rung.describe(found))
        return True

    def _survivors(self) -> list[str]:
        """Return the names of the candidates that are still in the search, the best first."""
        assert self.record.ladder is not None
        if not self.record.rungs:
            return [each.name for each in self.record.ladder.entrants]
        return [entry.name for entry in self.record.rungs[-1].entries if entry.stays]

    def _finish(self, race: Race, ladder: Ladder) -> Tuned:
        """Return the result: the best candidate of the last finished rung."""
        if not self.record.rungs:
            raise InputError(
                "`minutes` are over before the first rung has compared candidates; "
                "continue with `resume` and more `minutes`"
            )
        rungs, best = self.record.rungs, self.record.rungs[-1].entries[0]
        candidates = {each.name: each.candidate for each in ladder.entrants}
        chosen = candidates[best.name]
        spent = self.record.budget.spent(race.rows(best.name))
        rounds = extrapolate_rounds(spent, ladder.whole)
        config = chosen.apply(self.config).replace(rounds=max(1, rounds))
        curves = {name: race.curve(name) for name in {e.name for rung in rungs for e in rung.entries}}
        budget, metric = self.record.budget, self.record.metric
        return Tuned(config, budget, metric, chosen, candidates, ladder, rungs, curves, self.folder)
