"""Runs as generators that pause before each round, so that several runs can go on side by side.

When all runs have paused, their requests for local work are announced to the trainer that they share. Then
each run goes on with its next round, one after another in one thread: the first of them trains the clients of
all, and the others find their results there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from cfedavg.core.interrupts import mute_stops
from cfedavg.simulate.engines import Partners
from cfedavg.simulate.engines.requests import Request

T = TypeVar("T")
Pause = Callable[[], Request | None]  # gives the local work of the round that comes next
Steps = Generator[Pause, None, T]  # a run that pauses before each round; its value comes at the end


def finish(steps: Steps[T]) -> T:
    """Run all steps of one run; return its value."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        value: T = end.value
        return value
    except KeyboardInterrupt as stop:
        steps.throw(stop)  # the run saves its state, if the stop came between two of its steps
        raise


def interleave(waiting: Iterator[Steps[None]], partners: Partners, most: int) -> None:
    """Run all steps of all runs; `most` runs, or fewer, are under way at any time.

    If a run raises an error, or the user stops, the other runs save their last whole rounds.
    """
    active: list[Steps[None]] = []
    try:
        while True:
            pauses = [pause for steps in list(active) if (pause := _advance(steps, active))]
            # Without a trainer to share, runs come one after another. The first run makes the trainer.
            while len(active) < (most if partners.trainer else 1) and (steps := next(waiting, None)):
                active.append(steps)
                if pause := _advance(steps, active):
                    pauses.append(pause)
            if not active:
                return
            partners.active = len(active)
            if partners.trainer:
                partners.trainer.begin([request for pause in pauses if (request := pause())])
    except BaseException as error:
        with mute_stops():
            failed = [found for steps in active if (found := _stop(steps))]
        if isinstance(error, KeyboardInterrupt) and failed:
            raise failed[0] from error
        raise


def _advance(steps: Steps[None], active: list[Steps[None]]) -> Pause | None:
    """Let a run go on until it pauses; if it has ended, take it out of `active` and return None."""
    try:
        return next(steps)
    except StopIteration:
        active.remove(steps)
        return None


def _stop(steps: Steps[None]) -> Exception | None:
    """Stop a run, which then saves its state; return the error if it cannot save."""
    try:
        steps.throw(KeyboardInterrupt())
    except (KeyboardInterrupt, StopIteration):
        return None
    except Exception as error:
        return error
    return None
