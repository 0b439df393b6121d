"""The summary table of runs. Runs that differ only in their seed form a group, which has a unique label."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from cfedavg.core import units
from cfedavg.core.config import APP, OWN, Config
from cfedavg.core.units import format_bytes, format_factor
from cfedavg.report.runs import Curve, Group, Run, choose_metric, get_column, make_curve

_UNKNOWN, _AGAINST = "–", "vs. baseline"
_TOTALS = ("total_bytes", "uplink_bytes", "downlink_bytes", "first_download_bytes", "time")

# Labels
_LONGEST = 44  # characters of a part of a label
_MOST_PARTS = 5
_COMPRESSION = ("compressor", "compressor_down", "feedback")
_FORMATS = {
    "clients": "m={}", "classes_per_client": "p={}", "dirichlet": "Dir({:g})", "local_steps": "K={}",
    "local_epochs": "epochs={}", "deadline": "deadline={:g}s", "batch_size": "batch={}",
    "eta_local": "η_L={:g}", "eta": "η={:g}", "rounds": "T={}", "drop_rate": "lost={:g}",
    "smoothness": "L={:g}",
    **dict.fromkeys(("dataset", "model", "schedule", "link", "device", "engine", "precision"), "{}"),
}  # fmt: skip


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group the runs that differ only in their seed, and give each group a unique label.

    Groups come in the order in which their runs first occur in `runs`. Within a group, runs are sorted by
    seed.
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
    first = [group[0] for group in members]
    labels = make_labels([run.config for run in first], [run.path.resolve().name for run in first])
    federations, unknown = [bool(run.nodes) for run in first], list(map(_has_unknown_task, first))
    if any(federations) and not all(federations):
        labels = [x + " · federation" * is_one for x, is_one in zip(labels, federations, strict=True)]
    if sum(unknown) > 1:
        labels = [x + " · task unknown" * is_one for x, is_one in zip(labels, unknown, strict=True)]
    return [
        Group(label, tuple(dataclasses.replace(run, label=label) for run in group))
        for label, group in zip(labels, members, strict=True)
    ]


def _has_unknown_task(run: Run) -> bool:
    """Return whether a run's task came from Python and an older version recorded no fingerprint of it."""
    return run.config.dataset == f"{OWN})"


def find_differences(configs: Sequence[Config]) -> list[str]:
    """Return the options, seed aside, that differ between configurations; those of compression come first."""
    names = [item.name for item in dataclasses.fields(Config) if item.name != "seed"]
    differing = [name for name in names if len({_get_field(config, name) for config in configs}) > 1]
    return sorted(differing, key=lambda name: name not in _COMPRESSION)


def _get_field(config: Config, name: str) -> Any:
    """Return the value of an option, or None if the run does not use this option."""
    return getattr(config, name) if config.uses(name) else None


def make_labels(configs: Sequence[Config], folders: Sequence[str]) -> list[str]:
    """Return a unique label for each configuration: its compressors and the options that differ.

    If labels are equal, the names of the folders are added.

    >>> both = [Config(compressor=text, compressor_down=text) for text in ("none", "rd(0.9)")]
    >>> make_labels([*both, Config(compressor="rd(0.9)", compressor_down="none")], ["a", "b", "c"])
    ['none', 'rd(0.9)', 'rd(0.9) up, none down']
    >>> make_labels([both[1], both[1].replace(feedback="none")], ["a", "b"])
    ['rd(0.9)', 'rd(0.9) · no feedback']
    """
    names, folders = find_differences(configs), list(map(_fit, folders))
    one_way = all(config.compressor_down.strip() == "none" for config in configs)
    pairs = [(_fit(config.compressor), _fit(config.compressor_down)) for config in configs]
    sent = [up if one_way or up == down else f"{up} up, {down} down" for up, down in pairs]
    # The compressor stands before "no feedback", which says too little alone.
    first = [[text] if set(names) & set(_COMPRESSION) else [] for text in sent]
    rest = [name for name in names if name not in ("compressor", "compressor_down")]
    parts = [[*own, *_describe_fields(config, rest)] for own, config in zip(first, configs, strict=True)]
    if max(map(len, parts), default=0) > _MOST_PARTS:  # too many to read: compressors and folder instead
        rest = [name for name in names if name == "feedback"]
        parts = [
            [*own, *_describe_fields(config, rest), folder]
            for own, config, folder in zip(first, configs, folders, strict=True)
        ]
    labels = [" · ".join(own) or text for own, text in zip(parts, sent, strict=True)]
    for endings in ([f" · {folder}" for folder in folders], [f" ({n})" for n, _ in enumerate(labels, 1)]):
        count = Counter(labels)
        labels = [label + end * (count[label] > 1) for label, end in zip(labels, endings, strict=True)]
    return labels


def _describe_fields(config: Config, names: Sequence[str]) -> list[str]:
    texts = [_describe_field(name, _get_field(config, name)) for name in names]
    return [text for text in texts if text]


def _describe_field(name: str, value: Any) -> str:
    """Return the text for an option in a label; "" if the label is clear without this option."""
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
    usual = f"{name}={{:g}}" if isinstance(value, float) else f"{name}={{}}"
    return _fit(_FORMATS.get(name, usual).format(value))


def name_task(value: str) -> str:
    """Return the task's name if `value` describes a task from Python; return any other text as it is.

    >>> name_task("(a task from Python: digits, 77fe)")
    'digits, 77fe'
    """
    return value[len(OWN) + 2 : -1] if value.startswith(f"{OWN}: ") else value


def _fit(text: str) -> str:
    return shorten(" ".join(text.split()), _LONGEST)


def shorten(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters; a shortened text ends with "…"."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


# The table


class Spread(NamedTuple):
    """The mean and the sample standard deviation over `n` seeds; `std` is None if `n` is 1."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """A row of the summary table, for one group. Bytes and times are means over seeds; None means unknown."""

    label: str
    metric: str
    final: Spread | None
    best: Spread | None
    rounds: tuple[int, int]  # the fewest and the most over the seeds
    total_bytes: float | None
    uplink_bytes: float | None
    downlink_bytes: float | None
    first_download_bytes: float | None  # a part of downlink_bytes
    ratio: float | None  # total bytes of `against` / total bytes of this row
    against: str
    time: float | None  # simulated seconds; real seconds of a federation
    goal: float | None  # the highest whole percent of the metric that all rows reach; None if time is unknown
    seconds_to_goal: float | None  # seconds until the mean over the seeds reaches the goal
    seeds: tuple[int, ...]


def summary(runs: Sequence[Run]) -> list[Row]:
    """Return the rows of the summary table, one for each group of runs that differ only in their seed."""
    return summarise(group_runs(runs), choose_metric(runs))


def summarise(groups: Sequence[Group], metric: str) -> list[Row]:
    """Return the rows of the summary table, one for each group."""
    curves = [make_curve(group, "time", metric) for group in groups]
    goal = _choose_goal(curves) if units.is_share(metric) else None
    return [
        _summarise_group(group, find_baseline(group, groups), metric, goal, curve)
        for group, curve in zip(groups, curves, strict=True)
    ]


def _choose_goal(curves: Sequence[Curve]) -> float | None:
    """Return the highest whole percent that all curves reach; None if no curve has points, or it is 0."""
    highest = [curve.mean.max() for curve in curves if len(curve.mean)]
    return math.floor(100 * min(highest) + 1e-9) / 100 or None if highest else None


def find_baseline(group: Group, groups: Sequence[Group]) -> Group:
    """Return the baseline of `group`: another group, or `group` itself, with whose bytes it is compared.

    Of the groups with the same task, the baseline is the uncompressed group that is otherwise equal, else the
    first uncompressed group, else the first group.
    """

    def task(config: Config) -> tuple[str, ...]:
        # The model of a Flower app is unknown: all runs of the app are compared.
        return (config.dataset,) if config.dataset == APP else (config.data_name, config.model)

    def uncompressed(config: Config) -> Config:
        return dataclasses.replace(config, compressor="none", compressor_down="none", feedback="ef", seed=0)

    alike = [other for other in groups if task(other.config) == task(group.config)]
    plain = [other for other in alike if other.is_uncompressed]
    twins = [other for other in plain if uncompressed(other.config) == uncompressed(group.config)]
    return [*twins, *plain, *alike][0]


def _summarise_group(group: Group, base: Group, metric: str, goal: float | None, timed: Curve) -> Row:
    columns = [get_column(run, metric) for run in group.runs]
    values = [known for column in columns if len(known := column[np.isfinite(column)])]
    best = np.min if units.lower_is_better(metric) else np.max
    rounds = [len(run.rows) for run in group.runs]
    base_total, totals = _total(base, "total_bytes"), {key: _total(group, key) for key in _TOTALS}
    total = totals["total_bytes"]
    return Row(
        label=group.label,
        metric=metric,
        final=measure_spread([float(v[-1]) for v in values]),
        best=measure_spread([float(best(v)) for v in values]),
        rounds=(min(rounds), max(rounds)),
        ratio=base_total / total if base_total and total else None,
        against=base.label,
        goal=goal,
        seconds_to_goal=_reach(timed, goal),
        seeds=group.seeds,
        **totals,
    )


def _reach(curve: Curve, goal: float | None) -> float | None:
    """Return the x at which a curve first reaches the goal; None if it does not."""
    if goal is None:
        return None
    reached = curve.x[curve.mean >= goal - 1e-12]
    return float(reached[0]) if len(reached) else None


def measure_spread(values: Sequence[float]) -> Spread | None:
    """Return the mean and the sample standard deviation of values, or None if there are no values."""
    if not values:
        return None
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(float(np.mean(values)), std, len(values))


def _total(group: Group, key: str) -> float | None:
    """Return the sum of a column over all rounds, averaged over seeds; None if any value is unknown."""
    totals = [get_column(run, key).sum() for run in group.runs if run.rows]
    mean = float(np.mean(totals)) if totals else float("nan")
    return mean if np.isfinite(mean) else None


def tabulate(rows: Sequence[Row]) -> list[list[str]]:
    """Return the summary table as text, the header first; leave out columns without any known value."""
    lines = [_format_row(row) for row in rows]
    if len(rows) == 1:  # nothing to compare with
        lines[0][_AGAINST] = _UNKNOWN
    header = list(lines[0])
    header = [*header[:2], *(n for n in header[2:] if any(line[n] != _UNKNOWN for line in lines))]
    return [header, *([line[name] for name in header] for line in lines)]


def _format_row(row: Row) -> dict[str, str]:
    def show(value: Any, form: Any) -> str:
        return _UNKNOWN if value is None else form(value)

    def metric(value: Spread) -> str:
        missing = f" ({value.n} of {len(row.seeds)} seeds)" if value.n < len(row.seeds) else ""
        return units.format_metric(row.metric, value.mean, value.std) + missing

    low, high = row.rounds
    seeds = ", ".join(map(str, row.seeds[:6])) + "…" * (len(row.seeds) > 6)
    ratio = show(row.ratio, format_factor)
    return {
        "run": row.label,
        units.spell_out(row.metric): show(row.final, metric),
        "total": show(row.total_bytes, format_bytes),
        _AGAINST: "baseline" if row.ratio is not None and row.against == row.label else ratio,
        "up": show(row.uplink_bytes, format_bytes),
        "down": show(row.downlink_bytes, format_bytes),
        "first downloads": show(row.first_download_bytes, format_bytes),
        "rounds": str(high) if low == high else f"{low}–{high}",
        "best": show(row.best, metric),
        "time": show(row.time, units.format_time),
        f"time to {row.goal or 0:.0%}": show(row.seconds_to_goal, units.format_time),
        "seeds": f"n = {len(row.seeds)} ({seeds})",
    }
