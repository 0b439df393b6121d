"""The paper's figures, from the cells that have been run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from cfedavg.core.config import Config
from cfedavg.core.units import in_words, is_share
from cfedavg.report.groups import Group
from cfedavg.report.panels import (
    BLUE,
    COLOURS,
    GREEN,
    ORANGE,
    PINK,
    PLAIN,
    SKY,
    VERMILION,
    Cell,
    Frame,
    Panel,
    Pen,
    Series,
)
from cfedavg.report.read import Run
from cfedavg.reproduce.archive import Entry
from cfedavg.reproduce.experiment import Experiment, Found, Line
from cfedavg.reproduce.results import diverged

Pair = tuple[int | None, Line]

# The compressors of the paper: a hue for each kind, the darker shade for what sends less.
_COMPRESSORS = {
    "none": PLAIN, "topk(0.9)": SKY, "topk(0.99)": BLUE, "rd(0.9)": ORANGE, "rd(0.99)": VERMILION,
}  # fmt: skip
_PAPERS = [{"compressor": name} for name in _COMPRESSORS]
_OTHERS = (GREEN, PINK, "#882255", "#999933")
# From light to dark, as the clients' data grow more different.
_SHARES = {10: "#A6A61F", 5: "#35A06F", 2: "#31688E", 1: "#440154"}

_ACCURACY = "test_accuracy"


# Cells and groups


def pieces(experiment: Experiment, found: Found, pair: Pair, pen: Pen) -> Iterator[tuple[Group, Pen]]:
    """The mean of a line's seeds; each that diverged is drawn for itself, up to a cross."""
    label, entries = pair[1].label, experiment.entries(found, *pair)
    whole = tuple(_run(entry, label) for entry in entries if not diverged(entry))
    if whole:
        yield Group(label, whole), pen
    for entry in filter(diverged, entries):
        yield Group(label, (_run(entry, label),)), dataclasses.replace(pen, crossed=True)


def _run(entry: Entry, label: str) -> Run:
    """A cell as the report takes it: rows instead of columns, with the bytes of one client besides."""
    config = Config.from_dict(entry.settings, entry.name)
    columns = {key: values for key, values in entry.values.items() if isinstance(values, list)}
    sent = columns.get("uplink_bytes", [])
    columns["client_bytes"] = [None if each is None else each / config.clients for each in sent]
    lines = itertools.zip_longest(*columns.values())
    rows = [{"round": t} | dict(zip(columns, values, strict=True)) for t, values in enumerate(lines)]
    return Run(Path(entry.name), config, rows, label)


# Pictures


def draw(experiment: Experiment, found: Found, note: str = "") -> bytes:
    """A PNG in the paper's layout."""
    from cfedavg.report.figures import draw_grid  # matplotlib takes a while to import

    rows = {"curves": _curves, "budget": _budget, "norms": _norms}[experiment.draw](experiment, found)
    legend = _norms_legend if experiment.draw == "norms" else _legend
    note = "; ".join(filter(None, [note, _left_out(experiment, found)]))
    frame = Frame(experiment.title, _subtitle(experiment, found), legend(experiment, found), note)
    return draw_grid(rows, frame, share_y=experiment.draw == "norms")


def _curves(experiment: Experiment, found: Found) -> list[list[Cell]]:
    """A row for each p, a column for each number."""
    return [
        [_all_lines(experiment, found, p, key, "rounds") for key in experiment.columns]
        for p in _shares(experiment, found)
    ]


def _budget(experiment: Experiment, found: Found) -> list[list[Cell]]:
    """What a client has sent, in the paper's unit and beside it in bytes."""
    units = ("model_sizes_sent", "client_bytes")
    return [
        [_all_lines(experiment, found, p, _ACCURACY, x) for x in units] for p in _shares(experiment, found)
    ]


def _shares(experiment: Experiment, found: Found) -> Sequence[int | None]:
    """Each p of which something has been run; all of them before anything is."""
    run = [p for p in experiment.p if any(experiment.entries(found, p, line) for line in experiment.lines)]
    return run or experiment.p


def _all_lines(experiment: Experiment, found: Found, p: int | None, key: str, x: str) -> Cell:
    """One number of all lines at one p."""
    panel = Panel(
        key, "" if p is None else f"p = {p}", (Series(key, ""),), "", x,
        log=key.endswith("loss"), percent=is_share(key), side=in_words(key),
    )  # fmt: skip
    pens = [((p, line), pen_of(experiment, line)) for line in experiment.lines]
    return _cell(experiment, found, panel, pens)


def _norms(experiment: Experiment, found: Found) -> list[list[Cell]]:
    """A column for each line; the squared norms of the paper's captions above those of its text."""
    lines = _lines(experiment, found)
    return [
        [_all_shares(experiment, found, line, square, line == lines[0]) for line in lines]
        for square in ("2", "")
    ]


def _lines(experiment: Experiment, found: Found) -> Sequence[Line]:
    """Each line of which something has been run; all of them before anything is."""
    run = [line for line in experiment.lines if any(experiment.entries(found, p, line) for p in experiment.p)]
    return run or experiment.lines


def _all_shares(experiment: Experiment, found: Found, line: Line, square: str, first: bool) -> Cell:
    """The norms of one line at every p."""
    letter = ascii_lowercase[experiment.lines.index(line) % 26]
    title = f"({letter}) {line.label}".replace(", ", "\n") if square else ""
    side = "" if not first else "squared norms" if square else "norms"
    series = (Series(f"delta_norm{square}", ""), Series(f"error_norm{square}", "", dashed=True))
    pens = [((p, line), _share_pen(experiment, p)) for p in experiment.p]
    return _cell(experiment, found, Panel("norms", title, series, "", log=True, side=side), pens)


def _cell(experiment: Experiment, found: Found, panel: Panel, pens: Sequence[tuple[Pair, Pen]]) -> Cell:
    drawn = [piece for pair, pen in pens for piece in pieces(experiment, found, pair, pen)]
    if not drawn:
        panel = dataclasses.replace(panel, empty="not run yet")
    return Cell(panel, [group for group, _ in drawn], [pen for _, pen in drawn])


# Colours


def pen_of(experiment: Experiment, line: Line) -> Pen:
    """The same for the same line in every experiment, whatever has been run; dashed without feedback."""
    feedback = {**experiment.base, **line.changes}.get("feedback", "ef")
    return Pen(_colour(experiment, line), dashed=feedback == "none")


def _colour(experiment: Experiment, line: Line) -> str:
    """By the compressor where nothing else is special; other lines take theirs in the experiment's order."""
    special = _special(experiment, line)
    if special in _PAPERS:
        return _COMPRESSORS[special["compressor"]]
    others = [other for each in experiment.lines if (other := _special(experiment, each)) not in _PAPERS]
    return _OTHERS[others.index(special) % len(_OTHERS)]


def _special(experiment: Experiment, line: Line) -> dict[str, Any]:
    """The compressor, and what else, feedback aside, the line does in another way than the experiment."""
    changes = {key: value for key, value in line.changes.items() if experiment.base.get(key) != value}
    changes.pop("feedback", None)
    return {"compressor": experiment.base.get("compressor")} | changes


# Words around the panels


def _legend(experiment: Experiment, found: Found) -> list[tuple[str, Pen]]:
    return [(line.label, pen_of(experiment, line)) for line in _lines(experiment, found)]


def _norms_legend(experiment: Experiment, found: Found) -> list[tuple[str, Pen]]:
    shares = [(f"p = {p}", _share_pen(experiment, p)) for p in _shares(experiment, found) if p is not None]
    kinds = [("updates ‖g‖", Pen(PLAIN)), ("residuals ‖e‖", Pen(PLAIN, dashed=True))]
    return [*shares, *kinds]


def _share_pen(experiment: Experiment, p: int | None) -> Pen:
    """The paper's four have their own; others take theirs in the experiment's order."""
    free = COLOURS[experiment.p.index(p) % len(COLOURS)]
    return Pen(PLAIN if p is None else _SHARES.get(p, free))


def _subtitle(experiment: Experiment, found: Found) -> str:
    """Where it stands in the paper, and how to read bands and crosses."""
    entries = [experiment.entries(found, *pair) for pair in experiment.pairs()]
    crosses = any(map(diverged, itertools.chain.from_iterable(entries)))
    seeds = _seeds(map(len, entries))
    return " · ".join(filter(None, [experiment.paper, seeds, "× where a seed diverged" if crosses else ""]))


def _left_out(experiment: Experiment, found: Found) -> str:
    """What has not been run: each p and each line of which there is nothing, and what is missing besides."""
    shares, lines = _shares(experiment, found), _lines(experiment, found)
    names = [f"p = {p}" for p in experiment.p if p not in shares]
    names += [line.label for line in experiment.lines if line not in lines]
    names += [
        f"{line.label} at p = {p}"
        for p, line in itertools.product(shares, lines)
        if found and not experiment.entries(found, p, line)
    ]
    return f"not run yet: {'; '.join(names)}" if names else ""


def _seeds(counts: Iterable[int]) -> str:
    """
    >>> _seeds([3, 0, 2]), _seeds([1, 1]), _seeds([0])
    ('mean of 2 to 3 seeds, shaded from the lowest to the highest', 'one seed', '')
    """
    some = sorted(filter(None, counts))
    if not some or some[-1] == 1:
        return "one seed" if some else ""
    count = f"{some[-1]}" if some[0] == some[-1] else f"{some[0]} to {some[-1]}"
    return f"mean of {count} seeds, shaded from the lowest to the highest"
