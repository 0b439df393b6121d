"""The record of a search, tune.json: its question, its plan, and what each rung found."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from cfedavg.core.errors import CannotResume, InputError
from cfedavg.core.files import read_file, write_atomic
from cfedavg.tuner.budget import Budget
from cfedavg.tuner.plan import Entrant, Ladder

FORMAT = "cfedavg tune 1"
NAME = "tune.json"


@dataclass(frozen=True)
class Entry:
    """A candidate in a rung: its score there, its rounds, what it has spent and how many seconds it took.

    `score` is None if the candidate diverged or was not evaluated; `note` then says why. The best entry has
    `place` 1. `stays` says whether the candidate goes on to the next rung, or, in the last one, was chosen.
    """

    name: str
    score: float | None
    rounds: int
    spent: float
    seconds: float
    place: int
    stays: bool
    note: str = ""


@dataclass(frozen=True)
class Rung:
    """What a rung found: its limit, and the candidates in it, the best first."""

    limit: float
    entries: list[Entry]


@dataclass
class Record:
    """Everything that a resumed search needs, besides the runs of the candidates."""

    budget: Budget
    minutes: float
    keep: list[str]
    metric: str = ""
    seconds: float = 0.0  # that the search has taken so far
    ladder: Ladder | None = None
    rungs: list[Rung] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the record into the folder of the search."""
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1, allow_nan=False)
        write_atomic(folder / NAME, f"{text}\n".encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the record in the folder of a search; raise CannotResume if it is damaged."""
        try:
            table = json.loads(read_file(folder / NAME))
            if table.pop("format") != FORMAT:
                raise ValueError("another format")
            return cls._from_table(table)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CannotResume(
                f"{folder / NAME} cannot be read ({error}); start again in another folder"
            ) from None

    @classmethod
    def _from_table(cls, table: dict[str, Any]) -> Self:
        ladder = table["ladder"]
        if ladder:
            ladder = Ladder(**ladder | {"entrants": [Entrant(**each) for each in ladder["entrants"]]})
        rungs = [
            Rung(each["limit"], [Entry(**entry) for entry in each["entries"]]) for each in table["rungs"]
        ]
        return cls(**table | {"budget": Budget(**table["budget"]), "ladder": ladder, "rungs": rungs})

    def check_same(self, budget: Budget | None, keep: list[str] | None, folder: Path) -> None:
        """Raise InputError if a resumed search is asked for another budget or other fields to keep."""
        for name, now, before in (("budget", budget, self.budget), ("keep", keep, self.keep)):
            if now is not None and now != before:
                got, had = (
                    ", ".join(each) if isinstance(each, list) else str(each) for each in (now, before)
                )
                raise InputError(
                    f"cannot resume: `{name}` is {got}, but the search in {folder} has {had or 'none'}; "
                    "leave it out or start another search"
                )
