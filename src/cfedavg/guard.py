"""The guard: it watches the clients' residuals, says if the compression is too strong, and can weaken it.

The paper compares the residual e with the update g: under a good compressor the norm of e levels off at
several times the norm of g, and under one that sends too little it continues to grow. The guard reads this
from the metrics, so a resumed run decides as the run that it continues. It raises an alarm in round t if

    mean |e| > LIMIT * mean |g|  over the last WINDOW rounds   and   |e|_t > GROWTH * |e|_(t - WINDOW).

After an alarm in round t, `guard` "adapt" sends twice as many coordinates from round t + 2 on. (The metrics
of a round may be ready only while the next round trains.) The guard then judges only rounds from t + 2 on,
and raises the next alarm also if |e| stays: if |e|_t > |e|_(t - WINDOW) / GROWTH. So it doubles what is sent
until the residuals are at most LIMIT times the updates, or shrink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cfedavg.compress import Compressor
from cfedavg.core.run_files import Record
from cfedavg.feedback import Feedback, ResidualFeedback

# In the archived runs of the paper's experiments (paper/cfedavg/results/cells), these values give an alarm in
# every run with random dropping 0.99 or with signs at p = 1 and 2, and in no other run.
LIMIT = 10.0
WINDOW = 5
GROWTH = 1.1
DELAY = 2  # rounds from an alarm to the first round with another density


class Alarm(NamedTuple):
    """A round in which the residuals were large and grew."""

    t: int
    ratio: float  # mean |e| / mean |g| over the window
    growth: float  # |e|_t / |e|_(t - WINDOW)


class Guard:
    """The alarms of a run, found by `watch` from its rows of metrics in order.

    >>> from cfedavg.feedback import ErrorFeedback
    >>> guard = Guard("adapt", ErrorFeedback())
    >>> rows = [{"round": t, "left_norm": 2.0**t, "delta_norm": 1.0} for t in range(9)]
    >>> [guard.watch(row) is not None for row in rows]
    [False, False, False, False, False, True, False, False, False]
    >>> [guard.doublings(t) for t in range(6, 9)]
    [0, 1, 1]
    """

    def __init__(self, mode: str, feedback: Feedback) -> None:
        """Start to guard a run; without a residual there is nothing to guard."""
        self.mode = mode if isinstance(feedback, ResidualFeedback) else "off"
        self.alarms: list[Alarm] = []
        self._norms: list[tuple[float, float]] = []  # of |e| and |g|, of rounds with the present density
        self._first = 0  # the first of these rounds

    def watch(self, row: Record) -> Alarm | None:
        """Take the next row of metrics; return an alarm if the residuals are large and grow."""
        if self.mode == "off" or row["round"] < self._first:
            return None
        left, delta = row.get("left_norm"), row.get("delta_norm")
        self._norms = [*self._norms[-WINDOW:], (left or 0.0, delta or 0.0)]
        alarm = find_alarm(row["round"], self._norms, 1 / GROWTH if self.alarms else GROWTH)
        if alarm:
            self.alarms.append(alarm)
            self._norms, self._first = [], alarm.t + DELAY
        return alarm

    def doublings(self, t: int) -> int:
        """Return how often the number of coordinates has been doubled for round t."""
        return sum(alarm.t + DELAY <= t for alarm in self.alarms) if self.mode == "adapt" else 0

    def report(self, row: Record, compressor: Compressor) -> str | None:
        """Take the next row of metrics; return a sentence if the run's `compressor` sends too little."""
        alarm = self.watch(row)
        return self._explain(alarm, compressor) if alarm else None

    def _explain(self, alarm: Alarm, compressor: Compressor) -> str | None:
        """Return a sentence about an alarm under the run's `compressor`; None if it needs none."""
        before = self.alarms.index(alarm)
        adapts = self.mode == "adapt"
        if before and not adapts:
            return None  # the first sentence says it
        now, then = (compressor.denser(2**n) for n in (adapts * before, adapts * before + 1))
        grew = f"{'grew' if alarm.growth >= 1 else 'shrank'} by {abs(alarm.growth - 1):.0%}"
        found = (
            f"after round {alarm.t + 1} the residuals are {alarm.ratio:.0f} times the updates, "
            f"and {grew} in {WINDOW} rounds: `compressor` {now} sends too little"
        )
        if now == then:
            return None if before else f"{found}, and cannot send more; try another"
        if adapts:
            return f"{found}; from round {alarm.t + DELAY + 1} on it is {then}"
        return f"{found}; try {then}, or `guard` adapt, which sends more when it is needed"


def find_alarm(t: int, norms: Sequence[tuple[float, float]], growth: float = GROWTH) -> Alarm | None:
    """Return the alarm of round t, given (|e|, |g|) of round t and the WINDOW rounds before it.

    There is an alarm only if |e| has become more than `growth` times as large.

    >>> find_alarm(9, [(10.0, 1.0), (12.0, 1.0), (14.0, 1.0), (16.0, 1.0), (18.0, 1.0), (20.0, 1.0)])
    Alarm(t=9, ratio=16.0, growth=2.0)
    """
    if len(norms) <= WINDOW:
        return None
    (first, _), *rest = norms
    left, update, last = (math.fsum(e for e, _ in rest), math.fsum(g for _, g in rest), rest[-1][0])
    if not (first > 0 and update > 0 and left > LIMIT * update and last > growth * first):
        return None
    return Alarm(t, left / update, last / first)
