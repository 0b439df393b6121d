"""The report as one self-contained HTML file: headline, summary table, pictures and configurations."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from cfedavg import __version__
from cfedavg.core.config import OWN, Config
from cfedavg.report import table
from cfedavg.report.groups import Group, find_differences, name_task
from cfedavg.report.panels import Panel
from cfedavg.report.read import Run

# Tells the browser to load nothing from outside the page.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

# For light and dark mode and for any width; refers to no other file.
_CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --muted: #59636e; --line: #d9dee3; --paper: #ffffff;
  --shade: #f5f7f9; --mark: #fff3c4; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --muted: #9aa5b1; --line: #323a44; --paper: #12161c; --shade: #1b2129;
    --mark: #4a3d0c; --accent: #6cb8e6; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 3rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere; -webkit-text-size-adjust: 100%; }
h1 { font-size: clamp(1.4rem, 1rem + 2vw, 2.1rem); line-height: 1.2; margin: .2rem 0 .6rem; max-width: 32em;
  text-wrap: balance; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .8rem; }
p { margin: .4rem 0 .8rem; max-width: 56em; }
.kicker { color: var(--accent); font-weight: 600; font-size: .9rem; }
.muted, figcaption, footer { color: var(--muted); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
.scroll > table { min-width: 100%; overflow-wrap: normal; }
th, td { text-align: left; padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { color: var(--muted); font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 600; }
.summary td { white-space: nowrap; }
.summary tbody th { min-width: 11rem; }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em;
  outline: 1px solid var(--line); }
.panels { display: grid; gap: 1.4rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .6rem; }
img { display: block; width: 100%; height: auto; }
figcaption { margin: .45rem .1rem 0; }
details { border: 1px solid var(--line); border-radius: 8px; margin: .6rem 0; padding: .1rem .9rem; }
summary { cursor: pointer; padding: .5rem 0; font-weight: 600; }
details table { width: 100%; margin-bottom: .8rem; }
details th { font-weight: 400; color: var(--muted); width: 13rem; }
.differs > * { background: var(--mark); color: var(--ink); padding-left: .4rem; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: .88em; }
pre { background: var(--shade); border-radius: 8px; padding: .7rem .9rem; overflow-x: auto; margin: .5rem 0; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: .8rem; }
@media (max-width: 44rem) { /* a row of the summary becomes a card of its own */
  details th { width: 52%; }
  .summary thead { display: none; }
  .summary, .summary tbody, .summary tr, .summary th, .summary td { display: block; }
  .summary tr { border: 1px solid var(--line); border-radius: 8px; padding: .4rem .9rem; margin: .6rem 0; }
  .summary th, .summary td { border: 0; padding: .15rem 0; }
  .summary td { display: flex; justify-content: space-between; gap: 1rem; }
  .summary td::before { content: attr(data-name); color: var(--muted); } }
"""


def make_page(
    groups: Sequence[Group],
    rows: Sequence[table.Row],
    colours: Sequence[str],
    pictures: Mapping[Panel, bytes],
    federations: Sequence[tuple[Run, bytes]] = (),
) -> bytes:
    """Return the HTML page as UTF-8 bytes. All texts of a run are escaped."""
    title = table.make_headline(rows)
    dots = [f'<span class="dot" style="background:{colour}"></span>' for colour in colours]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body>",
        f'<header><div class="kicker">cfedavg report</div><h1>{escape(title)}</h1>',
        f'<p class="muted">{escape(_setting(groups))}</p></header>',
        "<main>",
        f"<section><h2>Summary</h2>{_table(table.tabulate(rows), dots)}{_table_note(rows)}</section>",
        _pictures(pictures, groups),
        _nodes(federations),
        _configurations(groups),
        "</main>",
        f"<footer>Made by cfedavg {__version__}.</footer></body></html>",
    ]
    return "\n".join(part for part in parts if part).encode(errors="replace")  # for lone surrogates


def _setting(groups: Sequence[Group]) -> str:
    """Return a line with the number of runs, and the task, model, clients and rounds that all runs share."""
    differing = find_differences([group.config for group in groups])
    config, runs = groups[0].config, sum(len(group.runs) for group in groups)
    said = {
        "dataset": f"{'task' if config.dataset.startswith(OWN) else 'dataset'} {name_task(config.dataset)}",
        "model": f"model {name_task(config.model)}",
        "clients": f"{config.clients} client{'s' if config.clients != 1 else ''}",
        "rounds": f"{config.rounds} round{'s' if config.rounds != 1 else ''} planned",
    }
    same = [text for name, text in said.items() if name not in differing]
    return " · ".join([f"{runs} run{'s' if runs > 1 else ''}", *same])


def _table(text: Sequence[Sequence[str]], marks: Sequence[str]) -> str:
    """Return an HTML table of a header and rows; `marks` holds the HTML before each row's name."""
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


def _table_note(rows: Sequence[table.Row]) -> str:
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
    figures = "".join(
        f'<figure id="{escape(panel.name)}"><div class="card">{_image(png, panel.title)}</div>'
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>"
        for panel, png in pictures.items()
    )
    return f'<section><h2>Curves</h2>{band}<div class="panels">{figures}</div></section>'


def _image(png: bytes, text: str) -> str:
    source = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    return f'<img alt="{escape(text)}" src="{source}">'


def _nodes(federations: Sequence[tuple[Run, bytes]]) -> str:
    parts = [_nodes_of_run(run, png, titled=len(federations) > 1) for run, png in federations]
    return f"<section><h2>Nodes</h2>{''.join(parts)}</section>" if parts else ""


def _nodes_of_run(run: Run, png: bytes, *, titled: bool) -> str:
    title = (
        f"<h3>{escape(run.label)}, in <code>{escape(run.path.resolve().name)}</code></h3>" if titled else ""
    )
    text, reasons = table.tabulate_nodes(run.nodes), table.list_reasons(run.nodes)
    items = "".join(f"<li>{escape(each)}</li>" for each in reasons)
    why = f"<p>What is not in the model, and why:</p><ul>{items}</ul>" if reasons else ""
    return (
        f'{title}<figure><div class="card">{_image(png, "what became of each request")}</div></figure>'
        f"{_table(text, [''] * (len(text) - 1))}{why}"
        '<p class="muted">The age is for how many rounds nothing of a node has gone into the model; the '
        "incarnation counts how often it came with a new or an older state.</p>"
    )


def _configurations(groups: Sequence[Group]) -> str:
    differing = find_differences([group.config for group in groups])
    note = "<p>Every field of each run; highlighted is what differs between them.</p>" if differing else ""
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
    """Return HTML rows of the configuration's fields; the fields in `differing` come first, highlighted."""

    def text(value: Any) -> str:
        if isinstance(value, str | bool):
            return json.dumps(value, ensure_ascii=False)
        return "not set" if value is None else str(value)

    names = [item.name for item in dataclasses.fields(Config) if group.config.uses(item.name)]
    names.sort(key=lambda name: name not in differing)
    texts = {name: text(getattr(group.config, name)) for name in names}
    texts["seed"] = ", ".join(map(str, group.seeds))
    marks = {name: ' class="differs"' if name in differing else "" for name in names}
    return "".join(
        f'<tr{marks[name]}><th scope="row"><code>{name}</code></th>'
        f"<td><code>{escape(texts[name])}</code></td></tr>"
        for name in names
    )
