"""The documentation's code runs, and its numbers are those of the results."""

from __future__ import annotations

import json
import re
import runpy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import adapters, both_ways_tables, coders_tables, footprint, guard_table, modules, tune
from scripts import try_docs

from cfedavg import run
from cfedavg.core.config import Config, read_config
from cfedavg.core.units import format_bytes
from cfedavg.tuner.budget import Budget

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(
        page
        for folder in (".", "cfedavg", "niid_bench", "shakespeare")
        for page in sorted((ROOT / "paper" / folder).glob("*.md"))
    ),
    *sorted((ROOT / "paper/feedback").rglob("*.md")),
]
README = ROOT / "README.md"
SNIPPETS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    if page != README
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_python_in_the_docs_runs(code: str, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(code)
    runpy.run_path(str(tmp_path / "snippet.py"))


def test_the_readme_needs_10_lines_and_says_what_they_send(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 10
    (tmp_path / "snippet.py").write_text(code)
    made = runpy.run_path(str(tmp_path / "snippet.py"))
    config = Config(rounds=20, compressor="none", compressor_down="none")
    found = re.findall(r"([\d.]+) MB in total. Without compression, .* ([\d.]+) MB", README.read_text())
    for number, result in zip(found[0], (made["result"], run(config, made["task"])), strict=True):
        assert result.totals.total == pytest.approx(1e6 * float(number), rel=0.01)


def test_links_pictures_and_anchors_exist() -> None:
    """As a code host resolves them; tests/test_site.py tests the site's."""
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            if ":" in target:
                continue  # another site's
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in headings(file), f"{page.name}: {target}#{anchor}"


def headings(page: Path) -> set[str]:
    """Return the anchors of a page as code hosts make them of its headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_column_of_a_run_is_explained() -> None:
    config = Config(rounds=1, clients=2, model="linear", local_steps="1", smoothness=1.0)
    assert set(run(config, draw=False).final) | {"outcomes"} == explained_in("reference/metrics.md")


def explained_in(page: str) -> set[str]:
    """Return the names in the first columns of a page's tables."""
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall("`(.*?)`", row)}


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.toml")), ids=lambda f: f.stem)
def test_configs_are_valid(file: Path) -> None:
    assert isinstance(read_config(file), Config)


@pytest.mark.parametrize(("p", "cell", "name", "feedback"), [
    (5, "none", "none", "–"), (5, "topk", "topk(0.99)", "yes"), (5, "topk-noef", "topk(0.99)", "no"),
    (2, "none", "none", "–"), (2, "topk", "topk(0.99)", "yes"), (2, "topk-noef", "topk(0.99)", "no"),
    (2, "topk-bf16", "topk(0.99) >> bf16", "yes"),
])  # fmt: skip
def test_table_of_the_error_feedback_runs(p: int, cell: str, name: str, feedback: str) -> None:
    last, total = [], []
    for seed in range(3):
        folder = ROOT / "results" / "error-feedback" / f"p{p}-{cell}-seed{seed}"
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        config = read_config(folder / "config.toml")
        assert (len(rows), config.classes_per_client, config.seed, config.clients) == (40, p, seed, 100)
        assert (config.compressor, config.feedback) == (name, "none" if feedback == "no" else "ef")
        last.append(rows[-1])
        total.append(sum(row["uplink_bytes"] for row in rows))
    accuracy = [100 * row["test_accuracy"] for row in last]
    worst = statistics.mean(100 * row["client_accuracy_min"] for row in last)
    line = (
        f"| {p} | {name} | {feedback} | {statistics.mean(accuracy):.2f} ± {statistics.stdev(accuracy):.2f} "
        f"| {worst:.1f} | {format_bytes(statistics.mean(total))} |"
    )
    assert line in (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize(
    "name",
    [
        "cfedavg, none",
        "cfedavg, topk(0.99)",
        "cfedavg, topk(0.99), bf16",
        "plain PyTorch",
        "pfl-research 0.6.0",
    ],
)
def test_table_of_the_peers_on_a_cpu(name: str) -> None:
    lines = [json.loads(line) for line in (ROOT / "results/speed/cpu.jsonl").read_text().splitlines()]
    seconds = {
        who: [statistics.median(line["seconds_per_round"]) for line in lines if line["contender"] == who]
        for who in (name, "pfl-research 0.6.0")
    }
    ratios = [
        theirs / mine for mine, theirs in zip(seconds[name], seconds["pfl-research 0.6.0"], strict=True)
    ]
    row = next(
        line
        for line in (ROOT / "docs/benchmarks.md").read_text().splitlines()
        if line.startswith(f"| {name} |")
    )
    assert f"| {statistics.median(seconds[name]):.2f} |" in row
    assert name.startswith("pfl") or f"{statistics.median(ratios):.2f}" in row


def read_lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()]


@pytest.mark.parametrize("line", read_lines("results/speed/gpu.jsonl"), ids=lambda line: line["part"])
def test_tables_of_a_gpu(line: dict[str, Any]) -> None:
    if "seconds_per_round" in line:
        seconds = statistics.median(line["seconds_per_round"])
        cells = [f"{seconds:.3g}", f"{line['steps_per_second']:,.0f}"]
    else:
        cells = [
            f"{line['first_round_seconds']:.1f} s", f"{line['median_seconds']:.3g} s",
            f"{line['longest_later_seconds']:.3g} s", f"{line['seconds_in_all']:.1f} s",
        ]  # fmt: skip
    row = " | ".join([line["part"], *cells])
    assert f"| {row} |" in (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize(
    "line",
    read_lines("results/speed/many-h200.jsonl"),
    ids=lambda line: f"{line['clients']}-{line['residuals']}",
)
def test_table_of_many_clients_on_a_gpu(line: dict[str, Any]) -> None:
    name = "none (no feedback)" if line["residuals"] == "none" else line["residuals"]
    numbers = [f"{line['seconds_first']:.3f}", f"{line['seconds_second']:.3f}"]
    numbers += [f"{line['times_without_feedback']:.2f}", f"{line['waiting']:.1%}"]
    row = f"| {line['clients']:,} | {name} | {' | '.join(numbers)} |"
    assert row in (ROOT / "docs" / "benchmarks.md").read_text()


def test_table_of_modules() -> None:
    rows, *_ = modules.table(read_lines("results/modules.jsonl")).partition("\n\n")
    assert rows.strip() in (ROOT / "docs" / "engines.md").read_text()


@pytest.mark.parametrize("name", both_ways_tables.TABLES)
def test_tables_of_both_directions(name: str) -> None:
    assert both_ways_tables.TABLES[name]() in (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.parametrize("name", coders_tables.TABLES)
def test_tables_of_other_coders(name: str) -> None:
    assert coders_tables.TABLES[name]() in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_readme_has_the_totals() -> None:
    """Of its first table: up, down and total, and the accuracy of what clients hold."""
    readme = README.read_text()
    _, _, accuracy, *_ = both_ways_tables.accuracy_table().splitlines()
    percents = accuracy.split(" | ")[2:4]
    _, _, *sent = both_ways_tables.bytes_table().splitlines()
    for line, percent in zip(sent[:2], percents, strict=True):
        up, down, _, total, ratio, _, later = line.removesuffix(" |").split(" | ")[2:]
        assert f"| {up} | {down} | {total} | {percent}% |" in readme
        assert (ratio, later) == ("1", "1") or f"{ratio} of the bytes, and {later} without" in readme


def test_tables_of_the_parts() -> None:
    """Every number of the three tables is one that was measured, by its row."""
    page = (ROOT / "docs" / "parts.md").read_text()
    files = [(ROOT / f"results/parts/{name}.jsonl").read_text() for name in ("h200", "drift")]
    lines = [json.loads(line) for file in files for line in file.splitlines()]
    for line in lines[-6:]:
        sent = f"{line['uplink_mb']:.2f} | {line['downlink_mb']:.2f}"
        assert f"| `{line['change']['local_optimiser']}` | {sent} |" in page
    known = {" | ".join(f"{mean:.2f}" for mean in line["mean"].values()) for line in lines}
    for line in lines:
        for t, mean in line["mean"].items():
            assert mean == pytest.approx(statistics.mean(seed[t] for seed in line["seeds"]), abs=0.006)
    cells = [json.loads(line) for line in (ROOT / "results/parts/cpu.jsonl").read_text().splitlines()]
    known |= {" | ".join(f"{value:.2f}" for value in cell["accuracy"].values()) for cell in cells}
    rows = [row for row in page.splitlines() if re.search(r"\d\d\.\d\d \|$", row)]
    assert len(rows) == 26
    assert [row for row in rows if not any(row.endswith(f"| {numbers} |") for numbers in known)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "results/links").glob("*.json")), ids=lambda path: path.stem)
def test_table_of_the_links(path: Path) -> None:
    """Its row, and the tolerance: where a round takes a minute, the prediction is right to 10%."""
    found = json.loads(path.read_text())
    names = "transfer", "predicted", "measured"
    means = {name: statistics.fmean(row[name] for row in found["rounds"]) for name in names}
    ratio = means["predicted"] / means["measured"]
    row = f"| {found['base']:.1f} s | {found['trips']:.1f} | {found['wait']:.1f} s |"
    row += "".join(f" {means[name]:.1f} s |" for name in names) + f" {ratio:.2f} |"
    assert row in (ROOT / "docs/links.md").read_text()
    assert abs(ratio - 1) < 0.1


@pytest.mark.parametrize("path", sorted(ROOT.glob("results/tune/**/*.jsonl")), ids=str)
def test_tables_of_the_tuner(path: Path) -> None:
    """The page has them; the chosen configuration beats the default with every seed, at no more bytes."""
    page = (ROOT / "docs/tune.md").read_text()
    assert tune.table(path.parent, path.stem) in page
    assert tune.about(path.parent, path.stem) in page
    search, *lines = tune.read(path)
    assert search["search_seconds"] < 60 * search["minutes"]
    budget = Budget.parse(search["budget"]).amount
    assert all(line["total_bytes"] <= budget for line in lines)
    reached = {(line["arm"], line["seed"]): line["test_accuracy"] for line in lines}
    assert len(reached) == 9
    assert all(reached["tuned", seed] > reached["default", seed] for seed in range(3))


def test_table_of_the_guard() -> None:
    assert guard_table.table() in (ROOT / "docs" / "parts.md").read_text()


def test_table_of_adapters() -> None:
    assert adapters.table(ROOT / "results/adapters.jsonl") in (ROOT / "docs/benchmarks.md").read_text()


@pytest.mark.parametrize(
    ("name", "format_row"), [("footprint", footprint.format_row), ("start", try_docs.format_row)]
)
def test_tables_of_installations(name: str, format_row: Callable[[Any], str]) -> None:
    page = (ROOT / "docs/install.md").read_text()
    lines = json.loads((ROOT / f"results/{name}.json").read_text())
    assert len(lines) >= 6
    assert [format_row(line) for line in lines if format_row(line) not in page] == []


def test_a_client_is_light() -> None:
    lines = json.loads((ROOT / "results/footprint.json").read_text())
    (client,) = [line for line in lines if line["installation"] == "cfedavg[client]"]
    assert client["disk_mb"] <= 350
    assert client["import_mb"] <= 150


def test_a_first_result_takes_minutes() -> None:
    """At most 3 of the machine, and 10 of a person who reads 100 words and copies 2 blocks a minute."""
    for line in json.loads((ROOT / "results/start.json").read_text()):
        assert line["first_seconds"] <= 180, line["page"]
        assert line["words"] / 100 + line["blocks"] / 2 <= 10, line["page"]
