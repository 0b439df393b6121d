"""Rank 0 and the others: it tells, they do."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from cfedavg.algorithm import ServerMemory
from cfedavg.core.errors import InputError
from cfedavg.simulate.engines.ranks import Ranks
from cfedavg.simulate.residuals import InMemory, Residuals
from cfedavg.simulate.state import State

Answer = Callable[[str, State], tuple[Any, Residuals]]


class Crew:
    """The other ranks, as rank 0 talks to them. Alone, nobody is told, and the only answer is one's own."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._waiting = False  # for answers

    def begin(self, state: State, m: int) -> State:
        """Gives each rank the residuals of its clients, and gives the state with one's own back."""
        size = self.ranks.size
        if size == 1:
            return state
        parts = [state.residuals.only(range(rank, m, size)) for rank in range(size)]
        with self.ranks.together():
            self.tell("begin", state)
            self.ranks.deal(parts)
        return replace(state, residuals=parts[0])

    def tell(self, command: str, state: State | None) -> None:
        """Has the others do something; for `round`, `evaluate` and `collect` their answers must be heard."""
        if self.ranks.size == 1:
            return
        with self.ranks.together():
            if self._waiting:  # a round was broken off: the answers are still to come, and nobody needs them
                self.answers(None)
            self.ranks.share((command, state and state.t))
            if command in ("round", "evaluate"):
                assert state is not None
                for tensor in _travelling(state):
                    self.ranks.share_tensor(tensor)
            self._waiting = command in ("round", "evaluate", "collect")

    def answers(self, mine: Any) -> list[Any]:
        """Everybody's, beginning with one's own."""
        with self.ranks.together():
            found = self.ranks.gather(None)  # one's own need not travel, and may hold what cannot
            self._waiting = False
        return [mine, *found[1:]]

    def dismiss(self) -> None:
        """Sends them home."""
        with self.ranks.together():
            self.tell("stop", None)
            self.answers(None)  # everyone has heard it, so that connections may be closed


def serve(ranks: Ranks, state: State, answer: Answer) -> State:
    """A rank other than 0: does what it is told until it is sent home; the last state that it saw.

    Residuals of this round and of the last one are kept, since a round that is broken off goes back.
    """
    residuals = dict[int, Residuals]()
    while True:
        command, t = ranks.share()
        if command == "stop":
            ranks.gather(None)
            return state
        if command == "begin":
            residuals = {t: ranks.deal()}
        elif command == "collect":
            ranks.gather(residuals[t])
        elif command == "settled":
            residuals[t].settled()
        else:
            x, b, *feedback = [ranks.share_tensor(tensor.clone()) for tensor in _travelling(state)]
            memory = ServerMemory(feedback[0] if feedback else None)
            state = State(t, x, b, residuals.get(t, InMemory()), memory=memory)
            try:
                found, after = answer(command, state)
                if command == "round":
                    residuals[t + 1] = after
                    residuals.pop(t - 1, None)
            except Exception as error:  # it is an answer too
                found = _portable(error)
            ranks.gather(found)


def _travelling(state: State) -> list[Tensor]:
    """What every rank needs of a state: the broadcast model, its buffers, and what the feedback may share."""
    return [state.broadcast, state.b] + ([] if state.memory.feedback is None else [state.memory.feedback])


def _portable(error: Exception) -> Exception:
    """The error, fit to be sent: itself if pickle gives it back, else its words; a bug with where it was."""
    if not isinstance(error, InputError) or error.__cause__:  # in the user's code, say
        error.add_note("on another rank: " + "".join(traceback.format_exception(error)))
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # whatever a class of somebody else's does
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
