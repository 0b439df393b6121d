"""Groups of runs that differ only in their seed. A group is one line of a picture and one row of a table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cfedavg.core.config import APP, OWN, Config
from cfedavg.report.read import Run, get_column

_LONGEST = 44  # characters of a part of a label
_MOST_PARTS = 5
_COMPRESSION = ("compressor", "compressor_down", "feedback")
_PARTS = {
    "clients": "m={}",
    "classes_per_client": "p={}",
    "dirichlet": "Dir({:g})",
    "local_steps": "K={}",
    "local_epochs": "epochs={}",
    "deadline": "deadline={:g}s",
    "batch_size": "batch={}",
    "eta_local": "η_L={:g}",
    "eta": "η={:g}",
    "rounds": "T={}",
    "drop_rate": "lost={:g}",
    "smoothness": "L={:g}",
    **dict.fromkeys(("dataset", "model", "schedule", "device", "engine", "precision"), "{}"),
}


@dataclass(frozen=True)
class Group:
    """The runs of one configuration, with one or more seeds."""

    label: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.config.seed for run in self.runs)

    def is_plain(self) -> bool:
        """Return whether the group compresses neither updates nor broadcasts."""
        return self.config.compressor.strip() == self.config.compressor_down.strip() == "none"


class Curve(NamedTuple):
    """A curve: at each x the mean, the lowest and the highest value over the seeds."""

    x: NDArray[np.float64]
    mean: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Return the groups of runs with equal configurations, seed aside, each with a unique label.

    Groups come in the order of their first runs. The order of `runs` does not change a group's runs.
    """
    seen: Counter[tuple[object, ...]] = Counter()
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.config.seed, str(run.path.resolve()))):
        # A run whose task is unknown is a group of its own.
        kind = bool(run.nodes), str(run.path.resolve()) if _has_unknown_task(run) else ""
        # A second run with the same seed is a repetition, not another sample: it goes into another group.
        repetition = seen[run.config, kind]
        seen[run.config, kind] += 1
        found.setdefault((dataclasses.replace(run.config, seed=0), kind, repetition), []).append(run)
    place = {id(run): n for n, run in enumerate(runs)}
    members = sorted(found.values(), key=lambda group: min(place[id(run)] for run in group))
    labels = _label_groups([group[0] for group in members])
    return [
        Group(label, tuple(dataclasses.replace(run, label=label) for run in group))
        for label, group in zip(labels, members, strict=True)
    ]


def _label_groups(runs: Sequence[Run]) -> list[str]:
    """Return a label for the first run of each group; mark federations and runs whose task is unknown."""
    labels = make_labels([run.config for run in runs], [run.path.resolve().name for run in runs])
    federations, unknown = [bool(run.nodes) for run in runs], [_has_unknown_task(run) for run in runs]
    if any(federations) and not all(federations):
        labels = [x + " · federation" * is_one for x, is_one in zip(labels, federations, strict=True)]
    if sum(unknown) > 1:
        labels = [x + " · task unknown" * is_one for x, is_one in zip(labels, unknown, strict=True)]
    return labels


def _has_unknown_task(run: Run) -> bool:
    """Return whether a run's task is from Python and has no fingerprint, as older versions wrote it."""
    return run.config.dataset == f"{OWN})"


def find_baseline(group: Group, groups: Sequence[Group]) -> Group:
    """Return the group whose bytes are the baseline for `group`.

    The baseline has the same task. It is the uncompressed group that is otherwise equal, else the first
    uncompressed group, else the first group.
    """

    def task(config: Config) -> tuple[str, ...]:
        # The model of a Flower app is unknown: all runs of the app are compared.
        return (config.dataset,) if config.dataset == APP else (config.dataset, config.model)

    def uncompressed(config: Config) -> Config:
        return dataclasses.replace(config, compressor="none", compressor_down="none", feedback="ef", seed=0)

    alike = [other for other in groups if task(other.config) == task(group.config)]
    plain = [other for other in alike if other.is_plain()]
    twins = [other for other in plain if uncompressed(other.config) == uncompressed(group.config)]
    return [*twins, *plain, *alike][0]


def make_curve(group: Group, x: str, y: str) -> Curve:
    """Return `y` over `x` at the rounds that all seeds have; `x` is "rounds" or a column to add up."""
    tables = [table for run in group.runs if (table := _points(run, x, y))]
    shared = sorted(set.intersection(*map(set, tables))) if tables else []
    if not shared:
        return Curve(*np.empty((4, 0)))
    values = np.array([[table[t] for t in shared] for table in tables])
    ys = values[:, :, 1]
    return Curve(values[:, :, 0].mean(0), ys.mean(0), ys.min(0), ys.max(0))


def _points(run: Run, x: str, y: str) -> dict[int, tuple[float, float]]:
    """Return (x, y) by round, without the rounds in which x or y is unknown."""
    rounds = get_column(run, "round")
    # After an unknown number (NaN), all later sums are unknown.
    xs = rounds + 1 if x == "rounds" else np.cumsum(get_column(run, x))
    ys = get_column(run, y)
    known = np.isfinite(xs) & np.isfinite(ys)
    return {int(t): (a, b) for t, a, b in zip(rounds[known], xs[known], ys[known], strict=True)}


def find_differences(configs: Sequence[Config]) -> list[str]:
    """Return the fields, seed aside, that differ between configurations; those of compression come first."""
    names = [item.name for item in dataclasses.fields(Config) if item.name != "seed"]
    differing = [name for name in names if len({_known(config, name) for config in configs}) > 1]
    return sorted(differing, key=lambda name: name not in _COMPRESSION)


def _known(config: Config, name: str) -> Any:
    """Return the value of a field, or None if the configuration leaves it to a Flower app."""
    return getattr(config, name) if config.uses(name) else None


def make_labels(configs: Sequence[Config], folders: Sequence[str]) -> list[str]:
    """Return a unique label for each configuration: its compressors and the fields that differ.

    Equal labels get the folder's name added.

    >>> both = [Config(compressor=text, compressor_down=text) for text in ("none", "rd(0.9)")]
    >>> make_labels([*both, Config(compressor="rd(0.9)", compressor_down="none")], ["a", "b", "c"])
    ['none', 'rd(0.9)', 'rd(0.9) up, none down']
    >>> make_labels([both[1], both[1].replace(feedback="none")], ["a", "b"])
    ['rd(0.9)', 'rd(0.9) · no feedback']
    """
    names, sent = find_differences(configs), _describe_compressors(configs)
    # The compressor stands before "no feedback", which says too little alone.
    first = [[text] if set(names) & set(_COMPRESSION) else [] for text in sent]
    rest = [name for name in names if name not in ("compressor", "compressor_down")]
    parts = [[*own, *_parts(config, rest)] for own, config in zip(first, configs, strict=True)]
    if max(map(len, parts), default=0) > _MOST_PARTS:  # too many to read: compressors and folder instead
        rest = [name for name in names if name == "feedback"]
        parts = [
            [*own, *_parts(config, rest), _fit(name)]
            for own, config, name in zip(first, configs, folders, strict=True)
        ]
    labels = [" · ".join(own) or text for own, text in zip(parts, sent, strict=True)]
    for endings in (
        [f" · {_fit(folder)}" for folder in folders],
        [f" ({n})" for n in range(1, len(labels) + 1)],
    ):
        count = Counter(labels)
        labels = [label + end * (count[label] > 1) for label, end in zip(labels, endings, strict=True)]
    return labels


def _describe_compressors(configs: Sequence[Config]) -> list[str]:
    """Return each run's compressors: only the uplink's if both are equal or no run compresses broadcasts."""
    whole = all(config.compressor_down.strip() == "none" for config in configs)
    texts = [(_fit(config.compressor), _fit(config.compressor_down)) for config in configs]
    return [up if whole or up == down else f"{up} up, {down} down" for up, down in texts]


def _parts(config: Config, names: Sequence[str]) -> list[str]:
    return [part for name in names if (part := _describe_field(name, _known(config, name)))]


def _describe_field(name: str, value: Any) -> str:
    """Return the text for a field in a label; "" if the label is clear without it."""
    if name == "feedback":
        return {"ef": "", "none": "no feedback"}.get(value, str(value))
    if value is None or value is False or (name, value) == ("engine", "auto"):
        return ""
    if value is True:
        return name.replace("_", " ")
    if name == "data_dir":
        value = PurePath(value).name
    if name in ("dataset", "model"):
        value = name_task(value)
    if isinstance(value, float) and name not in _PARTS:
        value = f"{value:g}"
    return _fit(_PARTS.get(name, name + "={}").format(value))


def name_task(value: str) -> str:
    """Return the name in the text that describes a task from Python; return other texts as they are.

    >>> name_task("(a task from Python: digits, 77fe)")
    'digits, 77fe'
    """
    return value[len(OWN) + 2 : -1] if value.startswith(f"{OWN}: ") else value


def _fit(text: str) -> str:
    return shorten(" ".join(text.split()), _LONGEST)


def shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
