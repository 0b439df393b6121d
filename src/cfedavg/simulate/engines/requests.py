"""Requests for local work, and how the clients of several requests form blocks that train at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from torch import Tensor

from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.batches import Timetable
from cfedavg.task import Samples, Task

Start = Callable[[list[int]], Tensor]  # gives starting points: one x (d,) for all clients, or a row for each
Correction = Callable[[list[int]], Tensor | None]  # gives c - c_i, a row for each client; None means 0


@dataclass(frozen=True)
class Trained:
    """The result of the local steps of a block of n clients."""

    clients: list[int]
    K: list[int]
    x_0: Tensor  # starting point: (d,), or (n, d) if clients differ
    x_K: Tensor  # (n, d)
    b_K: Tensor  # (n, buffers)
    loss: Tensor  # (n,): each client's mean loss over its steps

    def part(self, start: int, stop: int) -> Trained:
        """Return the results of clients `start` to `stop - 1` of the block."""
        rows = slice(start, stop)
        x_0 = self.x_0 if self.x_0.dim() == 1 else self.x_0[rows]
        return Trained(self.clients[rows], self.K[rows], x_0, self.x_K[rows], self.b_K[rows], self.loss[rows])


@dataclass(frozen=True, eq=False)
class Request:
    """The local work of a run's clients in round t. Client i takes K_i steps.

    `start` gives starting points; `b` are the buffers that all clients start with. `correction` is None if
    clients keep no control variates.
    """

    plan: Plan
    task: Task
    t: int
    start: Start
    b: Tensor
    clients: list[int]
    correction: Correction | None = None

    def rest(self, done: int) -> Request:
        """Return the request without its first `done` clients."""
        return replace(self, clients=self.clients[done:])

    def begin(self, client: int) -> tuple[Tensor, Tensor | None]:
        """Return a client's starting point, and its c - c_i or None."""
        correction = self.correction and self.correction([client])
        return self.start([client]).reshape(-1), None if correction is None else correction[0]


class Row(NamedTuple):
    """A client of a block, and the request that it belongs to."""

    request: Request
    client: int

    @property
    def steps(self) -> int:
        return self.request.plan.steps.at(self.request.t, self.client)

    @property
    def samples(self) -> Samples:
        samples: Samples = self.request.task.clients[self.client]
        return samples


@dataclass(frozen=True, eq=False)
class Block:
    """A block of clients that train at once: `order[i]` is the number of the row at place i.

    Rows with few steps come last. After them come idle copies of the first row, which fill the block up.
    """

    rows: list[Row]
    order: np.ndarray
    timetable: Timetable

    @property
    def placed(self) -> list[Row]:
        """The rows in the order of their places, with the idle copies."""
        return [self.rows[i] for i in self.order]

    def parts(self) -> Iterator[tuple[Request, np.ndarray, np.ndarray]]:
        """Yield each request of the block, the places of its rows with idle copies, and without them.

        The places without idle copies come in the order of the request's clients.
        """
        first, place = 0, np.argsort(self.order[: len(self.rows)])
        owner = np.array([id(row.request) for row in self.placed])
        for request, same in groupby(self.rows, lambda row: row.request):
            last = first + len(list(same))
            yield request, np.flatnonzero(owner == id(request)), place[first:last]
            first = last


@dataclass(eq=False)
class Round:
    """One round of all runs that train together: clients not yet trained, and results not yet taken."""

    requests: list[Request]  # that no run has asked for yet
    left: list[Row] = field(init=False)
    ready: dict[int, list[Trained]] = field(init=False)  # by the id of the request
    error: Exception | None = None  # of the block that has failed

    def __post_init__(self) -> None:
        self.left = [Row(request, i) for request in self.requests for i in request.clients]
        self.ready = {id(request): [] for request in self.requests}
