"""The tuner's data: clients that train, and samples held out of the clients' data to compare candidates on.

The test set is not used: a setting that was chosen on it would look better than it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from cfedavg.core.errors import InputError, summarise_error
from cfedavg.core.keys import Purpose, key, permutation, sample
from cfedavg.task import Samples, Task

SHARE = 0.1  # of each client's samples are held out,
MOST, FEWEST = 2000, 500  # but in total at most so many; if a sample has many labels, at most FEWEST
LABELS = 40_000  # and with at most so many labels


class Part:
    """Some samples of a data set: those at the indices `rows` of `given`."""

    def __init__(self, given: Samples, rows: np.ndarray) -> None:
        self._given, self._rows = given, rows
        if getattr(given, "fixed", False):
            self.fixed = True
        if hasattr(given, "whole"):  # a GPU then keeps the whole data set once, for all its parts
            self.whole, self.rows = given.whole, given.rows[rows]  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: np.ndarray) -> Any:
        return self._given.batch(self._rows[rows])


def hold_out(task: Task, seed: int, validation: Any = None) -> Task:
    """Return the task with a part of the clients' samples as its test set, in which no client trains.

    If `validation` is given, it becomes the test set instead, and clients keep all their samples.
    """
    if validation is not None:
        return replace(task, test=validation, test_parts=None)
    held = _draw_rows(task, seed)
    batches = [task.clients[i].batch(rows) for i, rows in held.items()]
    try:
        joined = tree_map(lambda *parts: torch.cat([torch.as_tensor(part) for part in parts]), *batches)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            "the samples of several clients cannot be joined into one validation set "
            f"({summarise_error(error)}); give `validation`, a data set of your own"
        ) from None
    clients = [
        Part(data, np.setdiff1d(np.arange(len(data)), held[i])) if i in held else data
        for i, data in enumerate(task.clients)
    ]
    return replace(task, clients=clients, test=joined, test_parts=None)


def _draw_rows(task: Task, seed: int) -> dict[int, np.ndarray]:
    """Return the rows that are held out of each client's samples; a client with one sample keeps it."""
    found: list[tuple[int, int]] = []
    for i, data in enumerate(task.clients):
        number = min(len(data) - 1, max(1, round(SHARE * len(data))))
        rows = permutation(key(seed, 0, i, Purpose.HELD_OUT), len(data))[:number]
        found += [(i, int(row)) for row in rows]
    if not found:
        raise InputError(
            "every client has only one sample, so none can be held out; give `validation`, a data set of "
            "your own"
        )
    most = _count_most(task)
    if len(found) > most:
        found = [found[i] for i in sample(key(seed, 1, 0, Purpose.HELD_OUT), most, len(found))]
    held: dict[int, list[int]] = {}
    for i, row in found:
        held.setdefault(i, []).append(row)
    return {i: np.sort(np.array(rows, np.int64)) for i, rows in held.items()}


def _count_most(task: Task) -> int:
    """Return how many samples are held out at most, so that an evaluation is quick."""
    leaves = tree_flatten(task.clients[0].batch(np.arange(1)))[0]
    labels = leaves[-1].numel() if leaves and isinstance(leaves[-1], Tensor) else 1
    return min(MOST, max(FEWEST, LABELS // max(1, labels)))


def choose_clients(task: Task, clients: int, seed: int) -> Task:
    """Return the task with `clients` of its clients, drawn without replacement; the test set stays."""
    of = len(task.clients)
    chosen = sample(key(seed, 2, 0, Purpose.HELD_OUT), clients, of) if clients < of else range(of)
    return replace(task, clients=[task.clients[i] for i in chosen], note="")
