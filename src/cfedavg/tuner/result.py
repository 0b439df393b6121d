"""Tuned: what a search has found, as a configuration, a table and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cfedavg.core.config import Config
from cfedavg.core.files import write_atomic
from cfedavg.core.units import format_metric, spell_out
from cfedavg.report import draw_search
from cfedavg.tuner.budget import Budget
from cfedavg.tuner.plan import Ladder
from cfedavg.tuner.record import Entry, Rung
from cfedavg.tuner.space import Candidate

TUNED, TABLE, PICTURE = "tuned.toml", "rungs.md", "tune.png"


@dataclass(frozen=True, repr=False)
class Tuned:
    """The result of a search.

    `config` is the chosen configuration: `rounds` is how many rounds the budget pays for. `chosen` names the
    candidate, and `rungs` holds what each rung found, the best candidate first. `curves` holds each
    candidate's evaluations, as pairs of what it had spent and the metric. `path` is the search's folder.
    """

    config: Config
    budget: Budget
    metric: str
    chosen: Candidate
    candidates: Mapping[str, Candidate]
    ladder: Ladder
    rungs: Sequence[Rung]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    path: Path | None

    @property
    def score(self) -> float:
        """The validation metric of the chosen configuration at the end of the last rung."""
        return self._score("score of the chosen", self.chosen.name)

    @property
    def default_score(self) -> float | None:
        """The validation metric of the default there; None if the default diverged."""
        found = [entry.score for entry in self.rungs[-1].entries if entry.name == "default"]
        return found[0] if found else None

    def _score(self, what: str, name: str) -> float:
        (found,) = [entry.score for entry in self.rungs[-1].entries if entry.name == name]
        assert found is not None, what
        return found

    def table(self) -> list[list[str]]:
        """Return the cells of a table as text: a line for each candidate, the best first; a header first.

        A candidate has a score for each rung in which it trained.
        """
        limits = [self.budget.describe(self.ladder.in_budget(rung.limit)) for rung in self.rungs]
        header = ["", "changes to the default", *(f"at {limit}" for limit in limits), ""]
        return [header, *(self._line(name) for name in self._order())]

    def _order(self) -> list[str]:
        """Return the candidates: those of the last rung first, in each rung the best first."""
        return list(dict.fromkeys(entry.name for rung in reversed(self.rungs) for entry in rung.entries))

    def _line(self, name: str) -> list[str]:
        found: list[Entry | None] = [
            next((entry for entry in rung.entries if entry.name == name), None) for rung in self.rungs
        ]
        scores = [
            "" if entry is None else "–" if entry.score is None else format_metric(self.metric, entry.score)
            for entry in found
        ]
        last = [entry for entry in found if entry is not None][-1]
        end = "chosen" if name == self.chosen.name else last.note or ("" if found[-1] else "dropped")
        return [name, "" if name == "default" else str(self.candidates[name]), *scores, end]

    @property
    def summary(self) -> str:
        """A sentence that says what the chosen configuration reaches, and what the default does."""
        limit = self.budget.describe(self.ladder.in_budget(self.rungs[-1].limit))
        name = spell_out(self.metric).replace("test ", "validation ")
        score = format_metric(self.metric, self.score)
        if self.chosen.name == "default":
            return f"nothing beat the default: {name} {score} at {limit}"
        usual = self.default_score
        beside = "diverges" if usual is None else f"reaches {format_metric(self.metric, usual)}"
        return f"chosen: {self.chosen}; {name} {score} at {limit}, where the default {beside}"

    def __repr__(self) -> str:
        """Return the summary, the number of rounds and the folder."""
        lines = [self.summary, f"  {self.config.rounds} rounds spend about {self.budget}"]
        return "\n".join([*lines, f"  written to {self.path}"] if self.path else lines)

    def write(self, folder: Path, config: Config) -> None:
        """Write the chosen configuration, `config`, and the table into a folder."""
        head = f"# {self.summary}\n# {config.rounds} rounds spend about {self.budget}.\n\n"
        write_atomic(folder / TUNED, (head + config.to_toml()).encode())
        header, *lines = ([cell.replace("|", "\\|") for cell in line] for line in self.table())
        rows = [header, ["---"] * len(header), *lines]
        text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        name = spell_out(self.metric).replace("test ", "validation ")
        title = f"# {name[:1].upper()}{name[1:]} after each rung, for a budget of {self.budget}"
        write_atomic(folder / TABLE, f"{title}\n\n{text}\n".encode())
        write_atomic(folder / PICTURE, self.draw())

    def draw(self) -> bytes:
        """Return a PNG of the curve of each candidate over what it has spent."""
        full = self.ladder.in_budget
        named = {"default": "the default", self.chosen.name: f"chosen: {self.chosen}"}
        return draw_search(
            {name: [(full(spent), value) for spent, value in self.curves[name]] for name in self._order()},
            named if self.chosen.name != "default" else {"default": "the default, chosen"},
            [full(rung.limit) for rung in self.rungs],
            self.metric,
            is_time=self.budget.is_time,
        )
