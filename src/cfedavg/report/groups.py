"""Runs that differ only in their seed are one line in a picture and one row in a table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cfedavg.core.config import APP, OWN, Config
from cfedavg.report.labels import make_labels
from cfedavg.report.read import Run, column


@dataclass(frozen=True)
class Group:
    """One configuration, run with one or more seeds."""

    label: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.config.seed for run in self.runs)

    def is_plain(self) -> bool:
        """Whether it sends everything, and so is what others are measured against."""
        return self.config.compressor.strip() == self.config.compressor_down.strip() == "none"


class Curve(NamedTuple):
    """The mean over the seeds at each x, and the lowest and highest of them."""

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups with labels that are unique, in the order in which their first runs came.

    Who is in a group does not depend on that order.
    """
    seen: Counter[_Kind] = Counter()
    found: dict[tuple[_Kind, int], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.config.seed, str(run.path.resolve()))):
        # The same seed twice is a repetition, not a second draw: it starts a group of its own.
        kind = _kind(run)
        key = (kind._replace(config=dataclasses.replace(run.config, seed=0)), seen[kind])
        seen[kind] += 1
        found.setdefault(key, []).append(run)
    place = {id(run): n for n, run in enumerate(runs)}
    members = sorted(found.values(), key=lambda group: min(place[id(run)] for run in group))
    labels = make_labels(
        [group[0].config for group in members], [group[0].path.resolve().name for group in members]
    )
    if any(group[0].nodes for group in members) and not all(group[0].nodes for group in members):
        labels = [
            f"{label} · federation" if group[0].nodes else label
            for label, group in zip(labels, members, strict=True)
        ]
    if sum(_task_unknown(group[0]) for group in members) > 1:  # somebody may wonder why they are not one
        labels = [
            f"{label} · task unknown" if _task_unknown(group[0]) else label
            for label, group in zip(labels, members, strict=True)
        ]
    return [
        Group(label, tuple(dataclasses.replace(run, label=label) for run in group))
        for label, group in zip(labels, members, strict=True)
    ]


class _Kind(NamedTuple):
    """What runs of one group share, the seed aside; Config holds the fingerprints of a task from Python."""

    config: Config
    federation: bool
    folder: str  # of a run whose task nobody knows: it shares a group with no other


def _kind(run: Run) -> _Kind:
    return _Kind(run.config, bool(run.nodes), str(run.path.resolve()) if _task_unknown(run) else "")


def _task_unknown(run: Run) -> bool:
    """Whether it is a task from Python, written before tasks had fingerprints."""
    return run.config.dataset == f"{OWN})"


def baseline(group: Group, groups: Sequence[Group]) -> Group:
    """What a group's bytes are compared with: its own uncompressed twin, else any, else the first.

    Whoever trains another model, or on other data, is left aside.
    """
    alike = [other for other in groups if _task(other.config) == _task(group.config)]
    plain = [other for other in alike if other.is_plain()]
    twins = [other for other in plain if _uncompressed(other.config) == _uncompressed(group.config)]
    return [*twins, *plain, *alike][0]


def _task(config: Config) -> tuple[str, ...]:
    """Of Flower apps nobody knows more than that they are; strategies of one can be compared."""
    return (config.dataset,) if config.dataset == APP else (config.dataset, config.model)


def _uncompressed(config: Config) -> Config:
    return dataclasses.replace(config, compressor="none", compressor_down="none", feedback="ef", seed=0)


def curve(group: Group, x: str, y: str) -> Curve:
    """`y` over `x` ("rounds", or a number whose running total is meant), where all its seeds have both."""
    tables = [table for run in group.runs if (table := _points(run, x, y))]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    values = np.array([[table[t] for t in shared] for table in tables]).reshape(len(tables), len(shared), 2)
    if not shared:
        return Curve(*np.empty((4, 0)))
    ys = values[:, :, 1]
    return Curve(values[:, :, 0].mean(0), ys.mean(0), ys.min(0), ys.max(0))


def _points(run: Run, x: str, y: str) -> dict[int, tuple[float, float]]:
    """(x, y) by round, without the rounds that lack either."""
    rounds = column(run, "round")
    # A total with an unknown part is unknown: cumsum carries the NaN on.
    xs = rounds + 1 if x == "rounds" else np.cumsum(column(run, x))
    ys = column(run, y)
    known = np.isfinite(xs) & np.isfinite(ys)
    return {int(t): (a, b) for t, a, b in zip(rounds[known], xs[known], ys[known], strict=True)}
