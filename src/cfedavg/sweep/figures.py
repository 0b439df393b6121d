"""Figures and tables of a grid's cells: means over seeds, with bands from the lowest to the highest value."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from cfedavg.core.config import Config
from cfedavg.core.units import format_bytes, format_metric, is_share, spell_out
from cfedavg.report.figures import Frame, draw_grid
from cfedavg.report.panels import COLOURS, PLAIN, Lines, Panel, Pen, Series
from cfedavg.report.runs import Group, Run
from cfedavg.sweep.cells import SealedCell
from cfedavg.sweep.grid import Grid, Line

Found = Mapping[str, SealedCell]
NOTHING = "–"


def draw_grid_figure(grid: Grid, found: Found, note: str) -> bytes:
    """Return a PNG with a row of panels for each p (classes per client) and a panel per metric and x axis."""
    lines = started_lines(grid, found)
    rows = [
        [_panel(grid, found, p, key, x) for x in grid.over for key in grid.columns]
        for p in started_shares(grid, found)
    ]
    legend = [(line.label, pen_of(grid, line)) for line in lines]
    return draw_grid(rows, frame_of(grid, found, legend, note))


def frame_of(grid: Grid, found: Found, legend: Sequence[tuple[str, Pen]], note: str) -> Frame:
    """Return the frame around a grid's panels: title, number of seeds, legend, and note on missing cells."""
    counts = [grid.find_cells(found, *pair) for pair in grid.pairs()]
    crosses = "× where a seed diverged" if any(cell.diverged for cell in itertools.chain(*counts)) else ""
    subtitle = " · ".join(filter(None, [grid.subtitle, _count_seeds(map(len, counts)), crosses]))
    return Frame(grid.title, subtitle, legend, "; ".join(filter(None, [note, _name_missing(grid, found)])))


def started_shares(grid: Grid, found: Found) -> Sequence[int | None]:
    """Return each p (classes per client) with a cell in `found`; if there is no cell, return every p."""
    return [p for p in grid.p if any(grid.find_cells(found, p, line) for line in grid.lines)] or grid.p


def started_lines(grid: Grid, found: Found) -> Sequence[Line]:
    """Return each line with a cell in `found`; if there is no cell, return every line."""
    return [line for line in grid.lines if any(grid.find_cells(found, p, line) for p in grid.p)] or grid.lines


def _panel(grid: Grid, found: Found, p: int | None, key: str, x: str) -> tuple[Panel, Lines]:
    panel = Panel(
        key, "" if p is None else f"p = {p}", (Series(key, ""),), "", x,
        log=key.endswith("loss"), percent=is_share(key), side=spell_out(key),
    )  # fmt: skip
    return fill_panel(
        panel, [(line.label, grid.find_cells(found, p, line), pen_of(grid, line)) for line in grid.lines]
    )


def fill_panel(panel: Panel, lines: Sequence[tuple[str, Sequence[SealedCell], Pen]]) -> tuple[Panel, Lines]:
    """Return a panel with its lines: a mean over seeds, and each diverged seed alone, ending with a cross."""
    drawn: list[tuple[Group, Pen]] = []
    for label, cells, pen in lines:
        runs = [(_as_run(cell, label), cell.diverged) for cell in cells]
        if whole := tuple(run for run, diverged in runs if not diverged):
            drawn.append((Group(label, whole), pen))
        crossed = dataclasses.replace(pen, crossed=True)
        drawn += [(Group(label, (run,)), crossed) for run, diverged in runs if diverged]
    return (panel if drawn else dataclasses.replace(panel, empty="not run yet")), drawn


def _as_run(cell: SealedCell, label: str) -> Run:
    """Return a cell as a Run of the report: rows instead of columns, and the mean uplink bytes per client."""
    config = Config.from_dict(cell.settings, cell.name, trust=True)  # safe: drawing imports no class
    columns = {key: values for key, values in cell.values.items() if isinstance(values, list)}
    sent = columns.get("uplink_bytes", [])
    columns["client_bytes"] = [None if each is None else each / config.clients for each in sent]
    lines = itertools.zip_longest(*columns.values())
    rows = [{"round": t} | dict(zip(columns, values, strict=True)) for t, values in enumerate(lines)]
    return Run(Path(cell.name), config, rows, label)


def pen_of(grid: Grid, line: Line) -> Pen:
    """Return a line's pen: its own colour if set, else grey if not compressed, else the next free colour."""
    told = {each.name: {**grid.base, **each.changes} for each in grid.lines}
    plain = [name for name, settings in told.items() if settings.get("compressor") == "none"]
    free = [each.name for each in grid.lines if not each.colour and each.name not in plain]
    usual = COLOURS[free.index(line.name) % len(COLOURS)] if line.name in free else PLAIN
    return Pen(line.colour or usual, dashed=told[line.name].get("feedback") == "none")


def _name_missing(grid: Grid, found: Found) -> str:
    """Return a note that names each p and line without any cell, and each other pair without a cell."""
    shares, lines = started_shares(grid, found), started_lines(grid, found)
    names = [f"p = {p}" for p in grid.p if p not in shares]
    names += [line.label for line in grid.lines if line not in lines]
    names += [
        line.label if p is None else f"{line.label} at p = {p}"
        for p, line in itertools.product(shares, lines)
        if found and not grid.find_cells(found, p, line)
    ]
    return f"not run yet: {'; '.join(names)}" if names else ""


def _count_seeds(counts: Iterable[int]) -> str:
    """Return the words of a subtitle for the numbers of seeds of all lines.

    >>> _count_seeds([3, 0, 2]), _count_seeds([1, 1]), _count_seeds([0])
    ('mean of 2 to 3 seeds, shaded from the lowest to the highest', 'one seed', '')
    """
    some = sorted(filter(None, counts))
    if not some or some[-1] == 1:
        return "one seed" if some else ""
    count = f"{some[-1]}" if some[0] == some[-1] else f"{some[0]} to {some[-1]}"
    return f"mean of {count} seeds, shaded from the lowest to the highest"


# Tables


def summarise_cells(grid: Grid, found: Found) -> list[list[str]]:
    """Return a table, header first, with a row per p and line: last values (mean ± spread) and bytes."""
    names = [f"{spell_out(name)} after the last round" for name in grid.columns]
    rows = [["p", "line", "seeds", "rounds", *names, "uplink of a client"]]
    for p, line in grid.pairs():
        cells = grid.find_cells(found, p, line)
        rounds = count_rounds(cells) if cells else NOTHING
        values = [_mean_text(name, [_last(cell, name) for cell in cells]) for name in grid.columns]
        sent = format_bytes(statistics.fmean(map(_client_bytes, cells))) if cells else NOTHING
        share = NOTHING if p is None else str(p)
        rows.append([share, line.label, count_cells(cells), rounds, *values, sent])
    return rows


def count_rounds(cells: Sequence[SealedCell]) -> str:
    """Return the cells' number of rounds as text, or "A to B" for the fewest and the most if they differ."""
    counts = sorted({len(cell.values.get("uplink_bytes") or ()) for cell in cells})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _client_bytes(cell: SealedCell) -> float:
    return math.fsum(filter(None, cell.values.get("uplink_bytes") or ())) / int(cell.settings["clients"])


def count_cells(cells: Sequence[SealedCell]) -> str:
    """Return the number of cells (seeds) as text, and the number of diverged cells if there are any."""
    diverged = sum(cell.diverged for cell in cells)
    return f"{len(cells)}" + (f", {diverged} diverged" if diverged else "")


def _last(cell: SealedCell, name: str) -> float | None:
    return next((value for value in reversed(cell.values.get(name, ())) if value is not None), None)


def _mean_text(name: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    return format_metric(name, statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)


def write_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown.

    >>> print(write_markdown([["p", "line", "seeds"], ["10", "a|b", "3"]]), end="")
    | p | line | seeds |
    | ---: | :--- | ---: |
    | 10 | a\\|b | 3 |
    """
    rule = [":---" if name == "line" else "---:" for name in rows[0]]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [cells[0], rule, *cells[1:]])
