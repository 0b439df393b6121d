"""The budget of a training: the bytes of all clients, or simulated seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError, show
from cfedavg.core.run_files import Record
from cfedavg.core.units import BYTES, TIMES, format_bytes, format_time, parse_quantity


@dataclass(frozen=True)
class Budget:
    """What a whole training may spend: `amount` bytes, or `amount` simulated seconds if `is_time`.

    Bytes are those of all clients in both directions, first downloads included.

    >>> str(Budget.parse("10MB")), str(Budget.parse("30min"))
    ('10 MB', '30 min')
    """

    amount: float
    is_time: bool = False

    @classmethod
    def parse(cls, text: object) -> Self:
        """Return the budget in a text such as `10MB` or `30min`."""
        if isinstance(text, str):
            for units, is_time in ((BYTES, False), (TIMES, True)):
                if (amount := parse_quantity(text.strip(), units)) > 0:
                    return cls(amount, is_time)
        raise InputError(
            "`budget` must be bytes above 0 (B, kB, MB, GB or TB) such as 10MB, or simulated time "
            f"(s, min, h or d) such as 30min, got {show(text)}"
        )

    def __str__(self) -> str:
        return self.describe(self.amount)

    def describe(self, amount: float) -> str:
        """Return an amount in words, with its unit."""
        return format_time(amount) if self.is_time else format_bytes(amount)

    def check(self, config: Config) -> None:
        """Raise InputError if the budget is a time, and a run with `config` does not simulate time."""
        if self.is_time and config.link is None and config.steps_per_second is None:
            raise InputError(
                f"`budget` {self} is simulated time, which needs `link` (for example 4g) or "
                "`steps_per_second`; set one of them, or give a budget in bytes"
            )

    def spent(self, rows: Iterable[Record]) -> list[float]:
        """Return what a run has spent up to each of its rounds."""
        total, found = 0.0, list[float]()
        for row in rows:
            total += row["simulated_seconds"] if self.is_time else row["total_bytes"]
            found.append(total)
        return found

    def share_of_clients(self, clients: int, of: int) -> float:
        """Return the part of the budget for `clients` of the `of` clients of a round.

        Each client sends and gets as many bytes as before. Simulated time passes for all clients at once.
        """
        return self.amount if self.is_time else self.amount * clients / of


def rounds_within(spent: Iterable[float], limit: float) -> int:
    """Return how many rounds a run has done before it spends more than `limit`.

    >>> rounds_within([2.0, 4.0, 6.0], 4.0)
    2
    """
    return sum(amount <= limit for amount in spent)


def extrapolate_rounds(spent: list[float], limit: float) -> int:
    """Return how many rounds a run can do within `limit`; if it has not spent that yet, estimate.

    The estimate takes the mean of the last half of the rounds, which has few first downloads.

    >>> extrapolate_rounds([5.0, 6.0, 7.0, 8.0], 10.0)
    6
    """
    if not spent:
        return 0
    within = rounds_within(spent, limit)
    if within < len(spent):
        return within
    middle = (len(spent) - 1) // 2
    steps = len(spent) - 1 - middle
    each = (spent[-1] - spent[middle]) / steps if steps else spent[-1]
    return len(spent) + (math.floor((limit - spent[-1]) / each + 1e-9) if each > 0 else 0)
