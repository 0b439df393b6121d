"""One HTML file that needs nothing else: the outcome in words, the table, the pictures, the configuration."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cfedavg import __version__
from cfedavg.core.config import OWN, Config
from cfedavg.report import nodes
from cfedavg.report.groups import Group
from cfedavg.report.labels import differences, task_text
from cfedavg.report.panels import Panel
from cfedavg.report.read import Run
from cfedavg.report.style import CSS
from cfedavg.report.table import Row, as_text, headline

# The browser itself then refuses to fetch anything.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def make_page(
    groups: Sequence[Group],
    rows: Sequence[Row],
    colours: Sequence[str],
    pictures: Mapping[Panel, bytes],
    federations: Sequence[tuple[Run, bytes]] = (),
) -> bytes:
    """The page as UTF-8. Everything that comes from a run goes through `escape`."""
    title = headline(rows)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body>",
        f'<header><div class="kicker">cfedavg report</div><h1>{escape(title)}</h1>',
        f'<p class="muted">{escape(_setting(groups))}</p></header>',
        "<main>",
        _table(rows, colours),
        _pictures(pictures, groups),
        _nodes(federations),
        _configurations(groups),
        "</main>",
        f"<footer>Made by cfedavg {__version__}.</footer></body></html>",
    ]
    return "\n".join(part for part in parts if part).encode(errors="replace")  # JSON may hold half a letter


def _setting(groups: Sequence[Group]) -> str:
    """What all the runs have in common, for a reader who did not start them."""
    differing = differences([group.config for group in groups])
    config, runs = groups[0].config, sum(len(group.runs) for group in groups)
    said = {
        "dataset": f"{'task' if config.dataset.startswith(OWN) else 'dataset'} {task_text(config.dataset)}",
        "model": f"model {task_text(config.model)}",
        "clients": f"{config.clients} client{'s' if config.clients != 1 else ''}",
        "rounds": f"{config.rounds} round{'s' if config.rounds != 1 else ''} planned",
    }
    same = [text for name, text in said.items() if name not in differing]
    return " · ".join([f"{runs} run{'s' if runs > 1 else ''}", *same])


def _table(rows: Sequence[Row], colours: Sequence[str]) -> str:
    dots = [f'<span class="dot" style="background:{colour}"></span>' for colour in colours]
    return f"<section><h2>Summary</h2>{_lines(as_text(rows), dots)}{_table_note(rows)}</section>"


def _lines(text: Sequence[Sequence[str]], marks: Sequence[str]) -> str:
    """A table from a header and rows, each with a mark before its name."""
    header, *lines = text
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f'<tr><th scope="row">{mark}{escape(label)}</th>'
        + "".join(
            f'<td data-name="{escape(name)}">{escape(text)}</td>'
            for name, text in zip(header[1:], cells, strict=True)
        )
        + "</tr>"
        for (label, *cells), mark in zip(lines, marks, strict=True)
    )
    return (
        f'<div class="scroll"><table class="summary"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _table_note(rows: Sequence[Row]) -> str:
    notes = [
        "The metric is that of the last evaluation. Bytes are those of all clients and rounds, up and down."
    ]
    if any(row.first_download_bytes is not None for row in rows):
        notes.append("First downloads are a part of down: a new client downloads the whole model.")
    if any(len(row.seeds) > 1 for row in rows):
        notes.append("With several seeds: mean ± sample standard deviation; bytes and times are means.")
    bases = {row.against for row in rows}
    if len(bases) > 1:
        notes.append("A baseline is the uncompressed run that is otherwise the same, or the first such.")
    elif len(rows) > 1:
        notes.append(f"The baseline is {rows[0].against}.")
    return f'<p class="muted">{escape(" ".join(notes))}</p>'


def _pictures(pictures: Mapping[Panel, bytes], groups: Sequence[Group]) -> str:
    if not pictures:
        return "<section><h2>Curves</h2><p>No round has been recorded yet.</p></section>"
    band = ""
    if any(len(group.runs) > 1 for group in groups):
        band = (
            '<p class="muted">A line is the mean over the seeds of a run, its band reaches from the lowest '
            "seed to the highest; both cover the rounds that all its seeds have.</p>"
        )
    figures = "".join(_figure(panel, png) for panel, png in pictures.items())
    return f'<section><h2>Curves</h2>{band}<div class="panels">{figures}</div></section>'


def _figure(panel: Panel, png: bytes) -> str:
    return (
        f'<figure id="{escape(panel.name)}"><div class="card">{_image(png, panel.title)}</div>'
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>"
    )


def _image(png: bytes, text: str) -> str:
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    return f'<img alt="{escape(text)}" src="{source}">'


def _nodes(federations: Sequence[tuple[Run, bytes]]) -> str:
    parts = [_nodes_of(run, png, titled=len(federations) > 1) for run, png in federations]
    return f"<section><h2>Nodes</h2>{''.join(parts)}</section>" if parts else ""


def _nodes_of(run: Run, png: bytes, *, titled: bool) -> str:
    title = (
        f"<h3>{escape(run.label)}, in <code>{escape(run.path.resolve().name)}</code></h3>" if titled else ""
    )
    text = nodes.as_text(run.nodes)
    return (
        f'{title}<figure><div class="card">{_image(png, "what became of each request")}</div></figure>'
        f"{_lines(text, [''] * (len(text) - 1))}{_reasons(run)}"
        '<p class="muted">The age is for how many rounds nothing of a node has gone into the model; the '
        "incarnation counts how often it came with a new or an older state.</p>"
    )


def _reasons(run: Run) -> str:
    found = nodes.reasons(run.nodes)
    items = "".join(f"<li>{escape(each)}</li>" for each in found)
    return f"<p>What is not in the model, and why:</p><ul>{items}</ul>" if found else ""


def _configurations(groups: Sequence[Group]) -> str:
    differing = differences([group.config for group in groups])
    note = "<p>Every field of each run; highlighted is what differs between them.</p>" if differing else ""
    single = " open" if len(groups) == 1 else ""
    details = "".join(
        f"<details{single}><summary>{escape(group.label)}</summary>{_rerun(group)}"
        f"<table><tbody>{_fields(group, differing)}</tbody></table></details>"
        for group in groups
    )
    return f"<section><h2>Configuration</h2>{note}{details}</section>"


def _rerun(group: Group) -> str:
    if not group.config.is_named:
        return ""
    names = [run.path.resolve().name for run in group.runs]
    folders = ", ".join(f"<code>{escape(name)}</code>" for name in names)
    it = "it" if len(names) == 1 else "one"
    what, command = f"run {it} again", "cfedavg run --config config.toml"
    if any(run.nodes for run in group.runs):  # whose clients have one thread each
        what, command = f"simulate {it}", f"OMP_NUM_THREADS=1 {command} --engine reference"
    return f"<p>To {what}, in its folder ({folders}):</p><pre><code>{command}</code></pre>"


def _fields(group: Group, differing: Sequence[str]) -> str:
    """The fields under the names that the TOML file gives them; what differs comes first."""
    names = [item.name for item in dataclasses.fields(Config) if group.config.says(item.name)]
    names.sort(key=lambda name: name not in differing)
    values: dict[str, Any] = {name: getattr(group.config, name) for name in names}
    texts = {name: "not set" if value is None else _toml(value) for name, value in values.items()}
    texts["seed"] = ", ".join(map(str, group.seeds))
    marks = {name: ' class="differs"' if name in differing else "" for name in names}
    return "".join(
        f'<tr{marks[name]}><th scope="row"><code>{name}</code></th>'
        f"<td><code>{escape(texts[name])}</code></td></tr>"
        for name in names
    )


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
