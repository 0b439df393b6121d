"""The report as one self-contained HTML file: headline, summary table, pictures and configurations."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

from cfedavg import __version__
from cfedavg.core import units
from cfedavg.core.config import OWN, Config
from cfedavg.core.run_files import Record
from cfedavg.core.units import format_bytes, format_factor
from cfedavg.report import figures
from cfedavg.report.heatmaps import OUTCOMES, classify, draw_attendance, group_by_node
from cfedavg.report.panels import Panel, choose_panels
from cfedavg.report.runs import Group, Run
from cfedavg.report.table import Row, find_differences, name_task, summarise, tabulate

# Tells the browser to load nothing from outside the page.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_CSS = files("cfedavg.report").joinpath("page.css").read_text(encoding="utf-8")
_NODE_HEADER = ["node", "asked", *OUTCOMES, "uplink", "K", "residual", "age", "incarnation"]
_MOST_REASONS, _MOST_NAMES = 12, 6


class Page(NamedTuple):
    """A report page, with the rows of its summary table and its pictures as PNG."""

    html: bytes
    rows: list[Row]
    panels: dict[str, bytes]  # by the name of the panel
    nodes: list[bytes]  # a picture for each run that is a federation


def make_page(groups: Sequence[Group], metric: str, over: str = "rounds") -> Page:
    """Draw every picture and return the page; its HTML is in UTF-8, and texts from runs are escaped.

    `over` is the x axis of the panels that explain the metric.
    """
    rows, panels = summarise(groups, metric), choose_panels(groups, metric, over=over)
    pictures = {panel.name: figures.draw_panel(panel, groups) for panel in panels}
    federations = [(run, draw_attendance(run.nodes)) for group in groups for run in group.runs if run.nodes]
    title = make_headline(rows)
    colours = figures.choose_colours(groups)
    dots = [f'<span class="dot" style="background:{colour}"></span>' for colour in colours]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>\n{_CSS}</style></head><body>",
        f'<header><div class="kicker">cfedavg report</div><h1>{escape(title)}</h1>',
        f'<p class="muted">{escape(_setting(groups))}</p></header>',
        "<main>",
        f"<section><h2>Summary</h2>{_table(tabulate(rows), dots)}{_table_note(rows)}</section>",
        _curves([(panel, pictures[panel.name]) for panel in panels], groups),
        _nodes(federations),
        _configurations(groups),
        "</main>",
        f"<footer>Made by cfedavg {__version__}.</footer></body></html>",
    ]
    html = "\n".join(part for part in parts if part).encode(errors="replace")  # for lone surrogates
    return Page(html, rows, pictures, [png for _, png in federations])


# The headline


def make_headline(rows: Sequence[Row]) -> str:
    """Return one sentence about the best row of the summary.

    The best row saves most bytes among the rows whose final metric is at most 1% worse than the baseline's.
    If every row is worse by more than 1%, the best row is the one that is worse by least.
    """
    by_label = {row.label: row for row in rows}
    declines = {
        row: _measure_decline(row, by_label[row.against])
        for row in rows
        if row.final and row.ratio and row.against != row.label
    }
    if not declines:
        return _describe_first(rows)
    near = [row for row, decline in declines.items() if decline <= 0.01]
    row = max(near, key=lambda row: row.ratio or 0) if near else min(declines, key=declines.__getitem__)
    base, sent = by_label[row.against], format_factor(row.ratio or 1)
    sent = "as many bytes as" if sent == units.SAME else f"{sent} bytes than"
    theirs = f" ({_describe_final(base)})" if base.final else ""
    rounds = "" if row.rounds == base.rounds else f", in {row.rounds[1]} against {base.rounds[1]} rounds"
    return f"{row.label}: {_describe_final(row)} with {sent} {base.label}{theirs}{rounds}"


def _measure_decline(row: Row, base: Row) -> float:
    """Return how much worse the final metric of `row` is than that of its baseline.

    For an accuracy this is the difference, for any other metric the relative difference.
    """
    if row.final is None or base.final is None:
        return float("inf")
    worse = base.final.mean - row.final.mean
    worse = -worse if units.lower_is_better(row.metric) else worse
    return worse if units.is_share(row.metric) else worse / (abs(base.final.mean) or 1)


def _describe_first(rows: Sequence[Row]) -> str:
    row = next((row for row in rows if row.final), None)
    if row is None:
        return "Nothing has been evaluated yet"
    sent = f" and {format_bytes(row.total_bytes)} up and down" if row.total_bytes is not None else ""
    rounds = f"{row.rounds[1]} round{'s' if row.rounds[1] != 1 else ''}"
    return f"{row.label}: {_describe_final(row)} after {rounds}{sent}"


def _describe_final(row: Row) -> str:
    assert row.final is not None
    text = units.format_metric(row.metric, row.final.mean)
    return text if units.is_share(row.metric) else f"{units.spell_out(row.metric)} {text}"


# Sections of the page


def _setting(groups: Sequence[Group]) -> str:
    """Return a line of text: the number of runs, and their task, model, clients and rounds where equal."""
    differing = find_differences([group.config for group in groups])
    config, runs = groups[0].config, sum(len(group.runs) for group in groups)
    said = {
        "dataset": f"{'task' if config.dataset.startswith(OWN) else 'dataset'} {name_task(config.data_name)}",
        "model": f"model {name_task(config.model)}",
        "clients": f"{config.clients} client{'s' if config.clients != 1 else ''}",
        "rounds": f"{config.rounds} round{'s' if config.rounds != 1 else ''} planned",
    }
    differing = [*differing, "dataset"] if "data_dir" in differing else differing
    same = [text for name, text in said.items() if name not in differing]
    return " · ".join([f"{runs} run{'s' if runs > 1 else ''}", *same])


def _table(lines: Sequence[Sequence[str]], marks: Sequence[str]) -> str:
    """Return an HTML table of lines of text, the header first.

    `marks` holds the HTML that stands before each line's first cell, its name.
    """
    header, *lines = lines
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = ""
    for (label, *cells), mark in zip(lines, marks, strict=True):
        named = zip(header[1:], cells, strict=True)
        texts = [f'<td data-name="{escape(name)}">{escape(text)}</td>' for name, text in named]
        body += f'<tr><th scope="row">{mark}{escape(label)}</th>{"".join(texts)}</tr>'
    return (
        f'<div class="scroll"><table class="summary"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _table_note(rows: Sequence[Row]) -> str:
    notes = ["The metric comes from the last evaluation. Bytes count all clients and rounds, up and down."]
    if any(row.first_download_bytes is not None for row in rows):
        notes.append("First downloads are a part of down: a new client downloads the whole model.")
    if any(row.time is not None for row in rows):
        notes.append("Time is simulated; that of a federation is real.")
    if any(len(row.seeds) > 1 for row in rows):
        notes.append("With several seeds: mean ± sample standard deviation; bytes and times are means.")
    bases = {row.against for row in rows}
    if len(bases) > 1:
        notes.append("A baseline is the uncompressed run whose other options are equal, or else the first.")
    elif len(rows) > 1:
        notes.append(f"The baseline is {rows[0].against}.")
    return f'<p class="muted">{escape(" ".join(notes))}</p>'


def _curves(pictures: Sequence[tuple[Panel, bytes]], groups: Sequence[Group]) -> str:
    if not pictures:
        return "<section><h2>Curves</h2><p>No round has been recorded yet.</p></section>"
    band = ""
    if any(len(group.runs) > 1 for group in groups):
        band = (
            '<p class="muted">A line is the mean over the seeds. Its band reaches from the lowest seed to '
            "the highest. Both cover the rounds that all seeds have.</p>"
        )
    items = "".join(
        f'<figure id="{escape(panel.name)}"><div class="card">{_image(png, panel.title)}</div>'
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>"
        for panel, png in pictures
    )
    return f'<section><h2>Curves</h2>{band}<div class="panels">{items}</div></section>'


def _image(png: bytes, text: str) -> str:
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    return f'<img alt="{escape(text)}" src="{source}">'


def _nodes(federations: Sequence[tuple[Run, bytes]]) -> str:
    parts = ""
    for run, png in federations:
        if len(federations) > 1:
            folder = escape(run.path.resolve().name)
            parts += f"<h3>{escape(run.label)}, in <code>{folder}</code></h3>"
        lines, reasons = tabulate_nodes(run.nodes), list_reasons(run.nodes)
        items = "".join(f"<li>{escape(each)}</li>" for each in reasons)
        why = f"<p>What is not in the model, and why:</p><ul>{items}</ul>" if reasons else ""
        parts += (
            f'<figure><div class="card wide">{_image(png, "what became of each request")}</div></figure>'
            f"{_table(lines, [''] * (len(lines) - 1))}{why}"
            '<p class="muted">Age: the rounds since an update of the node went into the model. '
            "Incarnation: how often the node came with a new or an older state.</p>"
        )
    return f"<section><h2>Nodes</h2>{parts}</section>" if parts else ""


def _configurations(groups: Sequence[Group]) -> str:
    differing = find_differences([group.config for group in groups])
    note = "<p>All options of each run; highlighted options differ between runs.</p>" if differing else ""
    single = " open" if len(groups) == 1 else ""
    details = "".join(
        f"<details{single}><summary>{escape(group.label)}</summary>{_rerun(group)}"
        f"<table><tbody>{_fields(group, differing)}</tbody></table></details>"
        for group in groups
    )
    return f"<section><h2>Configuration</h2>{note}{details}</section>"


def _rerun(group: Group) -> str:
    if not group.config.names_task:
        return ""
    names = [run.path.resolve().name for run in group.runs]
    folders = ", ".join(f"<code>{escape(name)}</code>" for name in names)
    it = "it" if len(names) == 1 else "one"
    what, command = f"run {it} again", "cfedavg run --config config.toml"
    if any(run.nodes for run in group.runs):  # the clients of a federation have one thread each
        what, command = f"simulate {it}", f"OMP_NUM_THREADS=1 {command} --engine reference"
    return f"<p>To {what}, in its folder ({folders}):</p><pre><code>{command}</code></pre>"


def _fields(group: Group, differing: Sequence[str]) -> str:
    """Return an HTML table row for each option of a group; those in `differing` are first and highlighted."""
    names = [item.name for item in dataclasses.fields(Config) if group.config.uses(item.name)]
    rows = ""
    for name in sorted(names, key=lambda name: name not in differing):
        value = getattr(group.config, name)
        text = "not set" if value is None else str(value)
        if name == "seed":
            text = ", ".join(map(str, group.seeds))
        elif isinstance(value, str | bool):
            text = json.dumps(value, ensure_ascii=False)
        mark = ' class="differs"' if name in differing else ""
        rows += f'<tr{mark}><th scope="row"><code>{name}</code></th><td><code>{escape(text)}</code></td></tr>'
    return rows


# Tables of nodes


def tabulate_nodes(rows: Sequence[Record]) -> list[list[str]]:
    """Return the table of nodes as text: the header, then a row for each node.

    `rows` are those of nodes.jsonl. Residual, age and incarnation are the last known values.
    """
    return [_NODE_HEADER, *(_node_cells(own) for own in group_by_node(rows).values())]


def _node_cells(own: Sequence[Record]) -> list[str]:
    def last(name: str, form: str) -> str:
        values = [row[name] for row in own if row.get(name) is not None]
        return format(values[-1], form) if values else "none"

    counts = Counter(map(classify, own))
    steps = sorted({row["K"] for row in own if row.get("K") is not None})
    return [
        own[-1]["node"],
        str(len(own)),
        *(str(counts[name]) for name in OUTCOMES),
        format_bytes(sum(row.get("up_bytes") or 0 for row in own)),
        " to ".join(f"{K:g}" for K in dict.fromkeys((steps[0], steps[-1]))) if steps else "not said",
        last("residual_norm", ".4g"),
        last("age", ",.0f"),
        last("incarnation", ",.0f"),
    ]


def list_reasons(rows: Sequence[Record]) -> list[str]:
    """Return a line for each reason why updates of nodes are not in the model, the most frequent first.

    `rows` are those of nodes.jsonl.
    """
    found: dict[str, list[Record]] = {}
    for row in rows:
        if not row.get("applied"):
            what = "round void" if row["outcome"] == "replied" else row["outcome"]
            found.setdefault(f"{what} ({row['why']})" if row.get("why") else str(what), []).append(row)
    in_order = sorted(found.items(), key=lambda item: -len(item[1]))
    reasons = [_describe_reason(why, own) for why, own in in_order[:_MOST_REASONS]]
    more = sum(len(own) for _, own in in_order[_MOST_REASONS:])
    return reasons + ([f"{more} more, for other reasons"] if more else [])


def _describe_reason(why: str, own: Sequence[Record]) -> str:
    """Return a text such as `rounds 1 to 2: lost, node2 3 times, node1`; the first round is round 1."""
    first, last = (each(row["round"] for row in own) + 1 for each in (min, max))
    when = f"round {first}" if first == last else f"rounds {first} to {last}"
    nodes = Counter(row["node"] for row in own)
    names = [name if n == 1 else f"{name} {n} times" for name, n in nodes.most_common(_MOST_NAMES)]
    more = len(nodes) - len(names)
    others = f" and {more} more node{'s' if more > 1 else ''}" if more else ""
    return f"{when}: {why}, {', '.join(names)}{others}"
