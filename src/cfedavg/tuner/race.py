"""A rung: its candidates train until they have spent the rung's limit; the best go on."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cfedavg.callbacks import Callback, Start
from cfedavg.core.config import Config
from cfedavg.core.errors import CannotResume, Diverged
from cfedavg.core.run_files import CHECKPOINT, METRICS, RESIDUALS, Record, read_rows
from cfedavg.core.totals import find_metric
from cfedavg.core.units import lower_is_better
from cfedavg.simulate.engines import Partners
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.run import run_beside
from cfedavg.simulate.side_by_side import how_many
from cfedavg.simulate.steps import Steps, interleave
from cfedavg.task import Task
from cfedavg.tuner.budget import Budget, rounds_within
from cfedavg.tuner.plan import KEEP, Entrant
from cfedavg.tuner.record import Entry, Rung

ROUNDS = 10**6  # more than any candidate does: the limit ends it
DIVERGED = "diverged"  # how the note of such a candidate begins
LAST = 0.1  # the score is the mean of the evaluations in this last part of what was spent


@dataclass
class Racer(Callback):
    """Follows the run of a candidate, and ends it after the round that exceeds the limit, or at `until`."""

    budget: Budget
    limit: float
    until: float
    follow: Callable[[list[Record]], None]
    rows: list[Record] = field(default_factory=list)

    def on_begin(self, start: Start) -> None:
        self.rows = list(start.rows)

    def on_row(self, row: Record) -> bool:
        self.rows.append(row)
        self.follow(self.rows)
        return self.is_done or time.monotonic() > self.until

    @property
    def is_done(self) -> bool:
        """Return whether the candidate has spent the limit."""
        return bool(self.rows) and self.budget.spent(self.rows)[-1] > self.limit


def score(rows: Sequence[Record], budget: Budget, limit: float) -> float | None:
    """Return the metric of a run when it has spent `limit`: the mean of the evaluations shortly before."""
    points = curve(rows[: rounds_within(budget.spent(rows), limit)], budget)
    last = [value for amount, value in points if amount >= (1 - LAST) * limit]
    return statistics.fmean(last or [value for _, value in points[-1:]]) if points else None


def curve(rows: Sequence[Record], budget: Budget) -> list[tuple[float, float]]:
    """Return each evaluation of a run: what the run had spent by then, and the metric."""
    name = find_metric(next((row for row in rows if row.get("test_loss") is not None), {}))
    pairs = zip(budget.spent(rows), (row.get(name) if name else None for row in rows), strict=True)
    return [(amount, value) for amount, value in pairs if value is not None and math.isfinite(value)]


@dataclass
class Race:
    """Trains candidates of a task in the folder `runs`, rung by rung.

    On a GPU, candidates with small clients train side by side, as the cells of a sweep do.
    """

    config: Config
    task: Task
    budget: Budget
    runs: Path
    entrants: Sequence[Entrant]
    notes: dict[str, str] = field(default_factory=dict)  # why a candidate was dropped

    def __post_init__(self) -> None:
        plans = [(Plan(self._config(each), self.task), self.task) for each in self.entrants]
        self.size = min(len(plans), how_many(*plans[0]))
        self.partners = Partners(plans[: self.size])

    def _config(self, entrant: Entrant) -> Config:
        """Return the configuration of a candidate's run, which its limit ends."""
        return replace(
            entrant.candidate.apply(self.config),
            rounds=ROUNDS,
            eval_every=entrant.eval_every,
            checkpoint_every=0,
            workers=1,
            clients=len(self.task.clients),
        )

    def rows(self, name: str) -> list[Record]:
        """Return the rows of a candidate's run so far."""
        return read_rows(self.runs / name / METRICS)

    def run(
        self,
        entrants: Iterator[Entrant],
        limit: float,
        until: float,
        follow: Callable[[str, list[Record], bool], None],
    ) -> list[str]:
        """Train candidates to the limit, until the time is over; return the names of those that are done.

        `follow` is told, after each round, the candidate, its rows so far, and whether it is done.
        """
        finished: list[str] = []

        def steps(entrant: Entrant) -> Steps[None]:
            racer = Racer(self.budget, limit, until, lambda rows: follow(entrant.name, rows, False))
            if (yield from self._train(entrant, racer)):
                finished.append(entrant.name)
                follow(entrant.name, self.rows(entrant.name), True)

        interleave((steps(each) for each in entrants), self.partners, self.size)
        return finished

    def _train(self, entrant: Entrant, racer: Racer) -> Steps[bool]:
        """Train a candidate to the limit; return whether it got there, or diverged."""
        folder = self.runs / entrant.name
        racer.rows = self.rows(entrant.name)
        if racer.is_done and (folder / CHECKPOINT).exists():
            return True  # before a stop
        try:
            try:
                yield from self._steps(entrant, racer)
            except CannotResume:
                shutil.rmtree(folder)
                yield from self._steps(entrant, racer)
        except Diverged as error:
            self.notes[entrant.name] = f"{DIVERGED} in round {error.t + 1}"
            return True
        return racer.is_done

    def _steps(self, entrant: Entrant, racer: Racer) -> Steps[None]:
        config, folder = self._config(entrant), self.runs / entrant.name
        yield from run_beside(config, self.task, self.partners, out=folder, resume=True, callbacks=[racer])

    @property
    def metric(self) -> str | None:
        """The name of the metric by which candidates are compared; None before any run."""
        rows = (row for each in self.entrants for row in self.rows(each.name))
        return find_metric(next((row for row in rows if row.get("test_loss") is not None), {}))

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return what a candidate had spent at each evaluation, and the metric."""
        return curve(self.rows(name), self.budget)

    def score(self, name: str, limit: float) -> float | None:
        """Return a candidate's score at a limit; None if it diverged, or if no round fits the limit."""
        return None if name in self.notes else score(self.rows(name), self.budget, limit)

    def rank(self, names: Sequence[str], limit: float, *, last: bool) -> Rung:
        """Return what a rung has found: the best third and the default stay; of the last rung, the best."""
        scores = {name: self.score(name, limit) for name in names}
        sign = 1 if lower_is_better(self.metric or "") else -1
        # The default wins a tie.
        order = sorted(names, key=lambda n: (scores[n] is None, sign * (scores[n] or 0.0), n != "default"))
        stay = 1 if last else -(-len(names) // KEEP)
        entries = []
        for place, name in enumerate(order, 1):
            rows, found = self.rows(name), scores[name]
            spent = self.budget.spent(rows)
            within = rounds_within(spent, limit)
            stays = found is not None and (place <= stay or (name == "default" and not last))
            note = self.notes.get(name, "" if found is not None else "no evaluation within the limit")
            seconds = math.fsum(row["seconds"] for row in rows)
            entries.append(Entry(name, found, within, spent[-1] if spent else 0, seconds, place, stays, note))
        return Rung(limit, entries)

    def clear(self, rung: Rung, names: Collection[str]) -> None:
        """Remove checkpoints and models of those of `names` that a rung has dropped; their metrics stay."""
        for entry in rung.entries:
            if entry.name in names and not entry.stays:
                folder = self.runs / entry.name
                for path in (*folder.glob("*.safetensors"), folder / CHECKPOINT):
                    path.unlink(missing_ok=True)
                shutil.rmtree(folder / RESIDUALS, ignore_errors=True)
