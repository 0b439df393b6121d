"""Result: what a run leaves in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.run_files import Record
from cfedavg.core.totals import Totals, find_metric, numbers_of
from cfedavg.core.units import format_metric, format_time, spell_out

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run: one row of metrics for each round, the trained models, and the run's folder.

    `model` is the clients' model at the end, `server_model` the server's model. The two models differ by what
    a compressed broadcast has not sent yet. Under torchrun, only rank 0 has the rows and the server's model.
    """

    config: Config
    rows: list[Record]
    model: nn.Module
    server_model: nn.Module
    iterate: nn.Module | None
    path: Path | None

    @property
    def final(self) -> Record:
        """Return the row of the last round."""
        return self.rows[-1]

    @property
    def totals(self) -> Totals:
        """Return the bytes that all rounds have sent: `up`, `down` and `total`."""
        totals = Totals()
        for row in self.rows:
            totals.add(row)
        return totals

    def __repr__(self) -> str:
        """Return a few lines: the last test metric, rounds, seconds, bytes up and down, and the folder.

        >>> empty = nn.Module()
        >>> row = {"test_accuracy": 0.97, "uplink_bytes": 4000, "downlink_bytes": 1000, "seconds": 90.0}
        >>> Result(Config(), [row], empty, empty, None, Path("runs/a"))
        Result: test accuracy 97.0% after 1 round, in 1.5 min
          sent 4 kB up and 1 kB down, 5 kB in total
          written to runs/a
        """
        if not self.rows:
            return "Result: the rows are on rank 0"
        rounds = f"{len(self.rows)} round{'s' if len(self.rows) > 1 else ''}"
        took = format_time(math.fsum(row["seconds"] for row in self.rows))
        lines = [f"Result: {self._describe_metric()}after {rounds}, in {took}", f"  {self.totals}"]
        return "\n".join([*lines, f"  written to {self.path}"] if self.path else lines)

    def _describe_metric(self) -> str:
        """Return the last value of the metric that tells most; not all rows have those of the test."""
        last = {name: value for row in self.rows for name, value in row.items() if value is not None}
        name = find_metric(last)
        return f"{spell_out(name)} {format_metric(name, last[name])} " if name else ""

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a pandas table, indexed by round, with the bytes sent up to each round.

        The columns are those of metrics.jsonl, and `cumulative_uplink_bytes`, `cumulative_downlink_bytes`,
        `cumulative_total_bytes`. Rounds count from 0.
        """
        try:
            import pandas
        except ImportError:
            raise InputError(
                "`frame` needs pandas, which is not installed here: pip install pandas"
            ) from None
        totals, lines = Totals(), []
        for row in self.rows:
            totals.add(row)
            lines.append({"round": row["round"]} | numbers_of(row) | totals.columns())
        return pandas.DataFrame(lines).set_index("round")
