"""Run folders in, pictures and one page out; and files that are whole or not there."""

from __future__ import annotations

import errno
import html.parser
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from cfedavg.core.config import APP, Config
from cfedavg.core.errors import InputError
from cfedavg.core.files import write_atomic
from cfedavg.core.units import format_bytes
from cfedavg.report import heatmaps, plot_partition, read_run, summary, write_report, write_run_pictures
from cfedavg.report.figures import draw_lines, new_figure
from cfedavg.report.heatmaps import OUTCOMES, classify, draw_attendance
from cfedavg.report.page import list_reasons, make_headline, tabulate_nodes
from cfedavg.report.panels import Panel, Pen, Series, choose_panels, finish_axes
from cfedavg.report.runs import make_curve
from cfedavg.report.table import group_runs, tabulate


def row(t: int, **changes: Any) -> dict[str, Any]:
    """A line as a run writes it, after t rounds of plausible training."""
    return {
        "round": t, "test_accuracy": 1 - 0.9 * 0.8**t, "test_loss": 2 * 0.8**t, "train_loss": 2.0 * 0.7**t,
        "uplink_bytes": 1000, "downlink_bytes": 4000, "coordinates_sent": 50, "model_sizes_sent": 0.01,
        "delta_norm2": 3.0 * 0.9**t, "error_norm2": 1.0 + t, "alpha": 4.0, "snr_min": 1.05, "snr_mean": 1.1,
        "local_steps_min": 10, "local_steps_mean": 10.0, "local_steps_max": 10, "clients": 5, "lost": 0,
        "seconds": 0.5, "simulated_seconds": 2.0,
    } | changes  # fmt: skip


SENT = {"compressor": "topk(0.99) >> bf16", "compressor_down": "none"}


def make_run(folder: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(Config(**SENT | config).to_toml(), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return folder


def rounds(count: int, **changes: Any) -> list[dict[str, Any]]:
    return [row(t, **changes) for t in range(count)]


def check_png(path: Path) -> None:
    """Check that a picture is whole, large enough to read and not of one colour."""
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert image.width >= 600
        assert image.height >= 300
        colours = image.convert("RGB").reduce(4).getcolors(maxcolors=2**24)
    assert colours is not None
    assert len(colours) > 20


@pytest.fixture
def one_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw all panels into one picture, but not each again for the page: half the time."""
    monkeypatch.setattr("cfedavg.report.figures.draw_panel", lambda *_: b"a picture")


# Reading


def test_read_run_keeps_the_rows_and_names_the_compressor(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", rounds(3), compressor="rd(0.9)"))
    assert run.label == "rd(0.9)"
    assert [r["round"] for r in run.rows] == [0, 1, 2]


@pytest.mark.parametrize("half", ['{"round": 2, "test_acc', "{", '{"round": 2, "x": "\u00e4'])
def test_a_half_written_last_line_is_ignored(tmp_path: Path, half: str) -> None:
    folder = make_run(tmp_path / "a", rounds(2))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(half.encode()[:-1] if half.endswith("\u00e4") else half.encode())
    assert len(read_run(folder).rows) == 2


def test_a_whole_last_line_counts_without_its_newline(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", rounds(2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(2)))
    assert len(read_run(folder).rows) == 3


def test_a_round_written_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [*rounds(4), row(2, alpha=9.0), row(3)])
    run = read_run(folder)
    assert [r["round"] for r in run.rows] == [0, 1, 2, 3]
    assert run.rows[2]["alpha"] == 9.0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", "line 2 is not a JSON object"),
        ("[1, 2]", "line 2 is not a JSON object"),
        ("{}", "line 2: 'round' must be an integer from 0"),
        ('{"round": 1, "test_accuracy": "high"}', "'test_accuracy' must be a number or null, got 'high'"),
        ('{"round": 1, "uplink_bytes": true}', "'uplink_bytes' must be a number or null, got True"),
        ('{"round": 1, "alpha": 1' + "0" * 400 + "}", "'alpha' must be a number"),
        ("[" * 100_000, "line 2 is not a JSON object"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    folder = make_run(tmp_path / "a", rounds(1))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n" + json.dumps(row(2)) + "\n")
    with pytest.raises(InputError) as error:
        read_run(folder)
    assert words in str(error.value)
    assert str(folder) in str(error.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="it is a file"):
        read_run(tmp_path / "file")
    folder = make_run(tmp_path / "a", [])
    with pytest.raises(
        InputError, match=rf"no config\.toml; give the run folders in it, such as {tmp_path}/a$"
    ):
        read_run(tmp_path)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(InputError, match=r"a is not a run folder: it has no metrics\.jsonl"):
        read_run(folder)
    (folder / "config.toml").unlink()
    with pytest.raises(InputError, match=r"it has no config\.toml"):
        read_run(folder)


def test_a_bad_configuration_names_its_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [])
    (folder / "config.toml").write_text("clients = 0\n")
    with pytest.raises(InputError, match=r"config\.toml: `clients` must be 1 or more, got 0"):
        read_run(folder)
    with pytest.raises(InputError, match="at least one run folder"):
        write_report([], tmp_path / "out")


# Groups, labels and the summary


def test_seeds_are_one_group_with_mean_and_deviation(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"s{seed}", [row(0, test_accuracy=0.5), row(1, test_accuracy=last)], seed=seed)
        for seed, last in enumerate([0.80, 0.90, 0.85])
    ]
    (line,) = summary([read_run(folder) for folder in folders])
    assert line.seeds == (0, 1, 2)
    assert line.final is not None
    assert line.final.mean == pytest.approx(0.85)
    assert line.final.std == pytest.approx(0.05)  # sqrt((0.0025 + 0.0025 + 0) / 2)
    assert line.final.n == 3
    assert (line.uplink_bytes, line.downlink_bytes, line.total_bytes) == (2000, 8000, 10_000)
    assert (line.first_download_bytes, line.time) == (None, 4)
    assert line.rounds == (2, 2)
    (text,) = tabulate([line])[1:]
    assert "85.0 ± 5.0%" in text
    assert "n = 3 (0, 1, 2)" in text


def test_the_curve_is_the_mean_and_the_band_lowest_to_highest(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", [row(t, alpha=1.0 + t, uplink_bytes=10) for t in range(3)], seed=0)
    b = make_run(tmp_path / "b", [row(t, alpha=3.0 + t, uplink_bytes=30) for t in range(2)], seed=1)
    (group,) = group_runs([read_run(a), read_run(b)])
    line = make_curve(group, "rounds", "alpha")
    assert line.x.tolist() == [1, 2]  # the rounds that both have
    assert line.mean.tolist() == [2, 3]
    assert line.low.tolist() == [1, 2]
    assert line.high.tolist() == [3, 4]
    assert make_curve(group, "total_bytes", "alpha").x.tolist() == [4020, 8040]


def test_the_same_seed_twice_is_not_a_second_draw(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name, rounds(2), seed=0)) for name in ("first", "again")]
    lines = summary(runs)
    assert [line.seeds for line in lines] == [(0,), (0,)]
    assert [line.label for line in lines] == ["topk(0.99) >> bf16 · first", "topk(0.99) >> bf16 · again"]


@pytest.mark.usefixtures("one_picture")
def test_one_folder_given_twice_is_one_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [])
    other = make_run(tmp_path / "b", [], compressor="none")
    report = write_report([folder, other, tmp_path / "b" / ".." / "a"], tmp_path / "out")
    assert [line.label for line in report.rows] == ["topk(0.99) >> bf16", "none"]


def test_labels_say_what_differs_and_are_unique(tmp_path: Path) -> None:
    configs: list[dict[str, Any]] = [
        {"compressor": "topk(0.99) >> bf16", "classes_per_client": 2},
        {"compressor": "topk(0.99) >> bf16", "dirichlet": 0.1},
        {"compressor": "topk(0.99) >> bf16", "iid": True},
        {"compressor": "none", "classes_per_client": 2},
        {"compressor": "topk(0.99) >> bf16", "classes_per_client": 2, "feedback": "none"},
        {"compressor": "x:" + "y" * 80, "data_dir": "some/where/data"},
        {"compressor": "x:" + "y" * 90, "data_dir": "else/where/data"},
    ]
    runs = [read_run(make_run(tmp_path / f"run{i}", [], **config)) for i, config in enumerate(configs)]
    labels = [line.label for line in summary(runs)]
    assert labels[:5] == [
        "topk(0.99) >> bf16 · p=2",
        "topk(0.99) >> bf16 · Dir(0.1)",
        "topk(0.99) >> bf16 · iid",
        "none · p=2",
        "topk(0.99) >> bf16 · no feedback · p=2",
    ]
    assert len(set(labels)) == len(labels)
    assert max(map(len, labels)) < 100


def test_bytes_are_compared_with_the_uncompressed_twin(tmp_path: Path) -> None:
    runs = [
        read_run(
            make_run(tmp_path / f"{name}{p}", rounds(2, uplink_bytes=size * p, downlink_bytes=0),
                     compressor=name, classes_per_client=p)
        )
        for name, size in (("rd(0.9)", 10), ("none", 100))
        for p in (1, 2)
    ]  # fmt: skip
    lines = {line.label: line for line in summary(runs)}
    assert lines["rd(0.9) · p=1"].against == "none · p=1"
    assert lines["rd(0.9) · p=2"].against == "none · p=2"
    assert lines["rd(0.9) · p=2"].ratio == 10
    assert lines["none · p=1"].ratio == 1


def test_without_an_uncompressed_run_the_first_is_the_baseline(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", rounds(2, uplink_bytes=46_000), compressor="rd(0.9)")
    b = make_run(tmp_path / "b", rounds(2, uplink_bytes=96_000), compressor="rd(0.8)")
    first, second = summary([read_run(a), read_run(b)])
    assert (first.ratio, second.ratio, second.against) == (1, 0.5, "rd(0.9)")


def test_totals_of_both_directions(tmp_path: Path) -> None:
    """A run of version 0.5 has no total, and its broadcast is whole; both are compared."""
    old = make_run(tmp_path / "old", rounds(2), compressor="none")
    config = (old / "config.toml").read_text().splitlines(keepends=True)
    (old / "config.toml").write_text("".join(line for line in config if "compressor_down" not in line))
    rows = [row(t, downlink_bytes=300 - 200 * t, first_download_bytes=300 - 300 * t) for t in range(2)]
    both = {"compressor": "sign", "compressor_down": "sign"}
    new = make_run(tmp_path / "new", [each | {"total_bytes": 5000} for each in rows], **both)
    plain, signs = summary([read_run(old), read_run(new)])
    assert (plain.total_bytes, plain.first_download_bytes, signs.ratio) == (10_000, None, 1)
    assert tabulate([plain, signs]) == [
        ["run", "test accuracy", "total", "vs. baseline", "up", "down", "first downloads", "rounds", "best",
         "time", "time to 28%", "seeds"],
        ["none", "28.0%", "10 kB", "baseline", "2 kB", "8 kB", "–", "2", "28.0%", "4 s", "4 s", "n = 1 (0)"],
        ["sign", "28.0%", "10 kB", "the same", "2 kB", "400 B", "300 B", "2", "28.0%", "4 s", "4 s",
         "n = 1 (0)"],
    ]  # fmt: skip


@pytest.mark.parametrize(("most", "scale"), [(5000, "linear"), (50_000, "log")])
def test_bytes_have_a_log_axis_where_runs_differ_much(tmp_path: Path, most: int, scale: str) -> None:
    runs = [make_run(tmp_path / f"{n}", rounds(3, uplink_bytes=n), seed=n) for n in (1000, most)]
    groups = [group for run in runs for group in group_runs([read_run(run)])]
    (panel,) = [panel for panel in choose_panels(groups, "test_accuracy") if panel.name == "metric-total"]
    axes = new_figure(4, 3).subplots()
    finish_axes(axes, panel, draw_lines(axes, panel, [(groups[0], Pen("black")), (groups[1], Pen("red"))]))
    assert axes.get_xscale() == scale


@pytest.mark.parametrize(
    ("x", "name"),
    [
        ("uplink_bytes", "bytes that all clients have sent so far"),
        ("simulated_seconds", "simulated time so far (s)"),
        ("time", "time so far (s)"),
    ],
)
def test_an_x_axis_names_its_quantity(tmp_path: Path, x: str, name: str) -> None:
    groups = group_runs([read_run(make_run(tmp_path / "a", rounds(3)))])
    axes = new_figure(4, 3).subplots()
    panel = Panel("", "", (Series("test_accuracy", ""),), "", x)
    finish_axes(axes, panel, draw_lines(axes, panel, [(groups[0], Pen("black"))]))
    assert axes.get_xlabel().startswith(name)


def test_ticks_of_time_are_round_numbers_of_their_unit(tmp_path: Path) -> None:
    """The last round ends after 4 minutes and 25 seconds."""
    groups = group_runs([read_run(make_run(tmp_path / "a", rounds(10, simulated_seconds=26.5)))])
    axes = new_figure(4, 3).subplots()
    panel = Panel("", "", (Series("test_accuracy", ""),), "", "time")
    finish_axes(axes, panel, draw_lines(axes, panel, [(groups[0], Pen("black"))]))
    low, high = axes.get_xlim()
    shown = [
        label.get_text()
        for tick, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        if low <= tick <= high
    ]
    assert shown == ["1", "2", "3", "4"]


def test_the_headline_is_the_outcome_in_words(tmp_path: Path) -> None:
    plain = [row(0, test_accuracy=0.976, downlink_bytes=45_000)]
    near = [row(0, test_accuracy=0.971, downlink_bytes=0)]
    poor = [row(0, test_accuracy=0.5, uplink_bytes=10, downlink_bytes=0)]
    runs = [
        read_run(make_run(tmp_path / "none", plain, compressor="none")),
        read_run(make_run(tmp_path / "topk", near, compressor="topk(0.99)")),
        read_run(make_run(tmp_path / "rd", poor, compressor="rd(0.999)")),
    ]
    assert make_headline(summary(runs)) == "topk(0.99): 97.1% with 46× fewer bytes than none (97.6%)"
    assert make_headline(summary(runs[1:2])) == "topk(0.99): 97.1% after 1 round and 1 kB up and down"
    longer = read_run(make_run(tmp_path / "long", [*plain, row(1, test_accuracy=0.98)], compressor="none"))
    assert make_headline(summary([longer, runs[1]])).endswith("(98.0%), in 1 against 2 rounds")


def test_another_metric_and_the_best_of_a_loss(tmp_path: Path) -> None:
    values = [3.0, 1.0, 2.0]
    rows = [{"round": t, "test_loss": v, "test_perplexity": math.exp(v)} for t, v in enumerate(values)]
    (line,) = summary([read_run(make_run(tmp_path / "a", rows))])
    assert line.metric == "test_perplexity"
    assert line.final is not None
    assert line.best is not None
    assert (line.final.mean, line.best.mean) == (math.exp(2.0), math.exp(1.0))
    assert line.final.std is None


def test_a_total_with_an_unknown_part_is_unknown(tmp_path: Path) -> None:
    (line,) = summary([read_run(make_run(tmp_path / "a", [row(0), row(1, uplink_bytes=None)]))])
    assert (line.uplink_bytes, line.total_bytes) == (None, None)
    assert line.ratio is None


# Pictures and the page


class Page(html.parser.HTMLParser):
    """What a browser would see: attributes that fetch, tags, and whether all tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read_page(path: Path) -> tuple[str, Page]:
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    return text, page


def test_a_report_of_several_runs(tmp_path: Path) -> None:
    folders = [
        make_run(
            tmp_path / f"{i}-{seed}", rounds(12, uplink_bytes=size + seed, downlink_bytes=size),
            compressor=name, seed=seed,
        )
        for i, (name, size) in enumerate([("none", 10_000), ("topk(0.99) >> bf16", 200)])
        for seed in (0, 1)
    ]  # fmt: skip
    out = tmp_path / "deep" / "out"
    report = write_report(folders, out)
    names = {"metric-rounds", "metric-total", "metric-time", "loss", "norms", "snr", "alpha", "report"}
    assert {path.name for path in out.iterdir()} == {f"{name}.png" for name in names} | {"report.html"}
    for name in names:
        check_png(out / f"{name}.png")
    text, page = read_page(report.page)
    assert page.tags.count("img") == len(names) - 1
    assert "50× fewer bytes than none" in text
    assert "cfedavg run --config config.toml" in text
    assert text.count('class="differs"') == 2  # the compressor, in each of two groups
    assert str(tmp_path) not in text
    assert [line[0] for line in report.table()] == ["run", "none", "topk(0.99) >> bf16"]


def test_the_pictures_of_one_run(tmp_path: Path) -> None:
    extra = {"client_accuracy_min": 0.3, "client_accuracy_mean": 0.6, "snr_min": None, "alpha": None}
    folder = make_run(tmp_path / "a", rounds(5, simulated_seconds=None, **extra))
    write_run_pictures(folder)
    check_png(folder / "curves.png")
    text, _ = read_page(folder / "report.html")
    assert "worst-off client" in text
    assert "baseline" not in text


@pytest.mark.usefixtures("one_picture")
def test_a_run_that_has_just_begun_has_pictures(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [])
    write_run_pictures(folder)
    check_png(folder / "curves.png")
    assert "No round has been recorded yet." in read_page(folder / "report.html")[0]


@pytest.mark.usefixtures("one_picture")
def test_what_comes_from_a_configuration_is_escaped(tmp_path: Path) -> None:
    evil = 'my:Comp("<script>alert(1)</script>", "$x$ \u6f22")'
    rows = [{"round": 0, "test_<i>$": 0.5}, {"round": 1, "test_<i>$": 0.6}]
    a = make_run(tmp_path / "<b>", rows, compressor=evil, data_dir="http://example.org/")
    b = make_run(tmp_path / "b", rows, compressor="none")
    report = write_report([a, b], tmp_path / "out")
    text, _ = read_page(report.page)
    assert "&lt;script&gt;" in text
    assert "<b>" not in text
    assert "<i>" not in text


EXTREME = [1.0, 1.7e308, -1e308, 1e300, 1e-320, -5e-324, 2**999, -1, math.inf, 0.5]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        rounds(1),
        [dict.fromkeys(row(0)) | {"round": t} for t in range(3)],
        [
            row(t, test_accuracy=None if t % 3 else 0.9, snr_min=None, train_loss=math.nan, alpha=math.inf)
            for t in range(7)
        ],
        rounds(3, uplink_bytes=0, delta_norm2=0.0, error_norm2=0.0, alpha=0.0, train_loss=0.0),
        [{"round": 0}],
        [dict.fromkeys(row(0), value) | {"round": t} for t, value in enumerate(EXTREME)],
    ],
    ids=["empty", "one", "nulls", "gaps", "zeros", "bare", "extreme"],
)
@pytest.mark.usefixtures("one_picture")
def test_odd_runs_make_pictures_too(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    report = write_report([make_run(tmp_path / "a", rows)], tmp_path / "out")
    check_png(report.picture)
    read_page(report.page)


def test_panels_without_numbers_are_left_out(tmp_path: Path) -> None:
    rows = rounds(2, snr_min=None, simulated_seconds=None)
    names = [
        p.name for p in choose_panels(group_runs([read_run(make_run(tmp_path / "a", rows))]), "test_accuracy")
    ]
    assert names == ["metric-total", "metric-rounds", "loss", "norms", "alpha"]


def test_many_runs_keep_their_own_colours(tmp_path: Path) -> None:
    from cfedavg.report.figures import choose_colours

    runs = [read_run(make_run(tmp_path / str(k), [], local_steps=str(k))) for k in range(1, 15)]
    colours = choose_colours(group_runs(runs))
    assert len(set(colours)) == 14


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    """In a fresh process: reading needs no matplotlib, drawing no pyplot and no global setting."""
    folder = make_run(tmp_path / "a", rounds(2))
    code = f"""
import sys
from pathlib import Path
from cfedavg.report import read_run, summary, write_run_pictures
folder = Path({str(folder)!r})
summary([read_run(folder)])
assert "matplotlib" not in sys.modules
import matplotlib
before = matplotlib.rcParams.copy()
write_run_pictures(folder)
assert "matplotlib.pyplot" not in sys.modules
assert dict.__eq__(matplotlib.rcParams, before)  # without resolving the backend, which imports pyplot
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_settings_of_matplotlib_do_not_count(tmp_path: Path) -> None:
    """A matplotlibrc may ask for LaTeX, which ends in an error where there is none."""
    plain, other = (make_run(tmp_path / name / "run", rounds(2)) for name in "ab")
    write_run_pictures(plain)
    with matplotlib.rc_context({"text.usetex": True, "axes.linewidth": 9}):
        write_run_pictures(other)
    assert (other / "curves.png").read_bytes() == (plain / "curves.png").read_bytes()


# Who has what


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (5, 10), (40, 10), (1000, 10), (2500, 62)])
def test_partitions_of_any_size(tmp_path: Path, clients: int, classes: int) -> None:
    counts = np.zeros((clients, classes), dtype=np.int64)
    counts[np.arange(clients), np.arange(clients) % classes] = 1 + np.arange(clients) % 300
    plot_partition(counts, tmp_path / "who.png", "who has $what$")
    check_png(tmp_path / "who.png")


def test_a_partition_must_be_a_table(tmp_path: Path) -> None:
    for counts in (np.ones(3), np.ones((0, 10)), -np.ones((2, 2))):
        with pytest.raises(InputError, match="clients, classes"):
            plot_partition(counts, tmp_path / "who.png", "who")


def test_a_partition_with_nothing_in_it_is_drawn(tmp_path: Path) -> None:
    plot_partition(np.zeros((3, 4), dtype=int), tmp_path / "who.png", "nobody has anything")
    assert (tmp_path / "who.png").stat().st_size > 1000


# Units


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1234, "1.23 kB"), (9.31e9, "9.31 GB"), (5e18, "5000 PB")],
)
def test_bytes_in_words(value: float, text: str) -> None:
    assert format_bytes(value) == text


# Files


def test_write_atomic_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_write_atomic_keeps_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a.bin"
    write_atomic(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), full)
    with pytest.raises(InputError, match=r"cannot write .*a\.bin \(No space left on device\)"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_write_atomic_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "no" / "a", tmp_path / "file" / "a", tmp_path):
        with pytest.raises(InputError, match="cannot write"):
            write_atomic(path, b"")
    folder = make_run(tmp_path / "run", rounds(1))
    with pytest.raises(InputError, match="file is a file, not a folder"):
        write_report([folder], tmp_path / "file")


# Federations


def node_row(t: int, number: int, outcome: str = "replied", **changes: Any) -> dict[str, Any]:
    """A line of nodes.jsonl."""
    return {
        "round": t, "node": f"node{number}", "number": number, "identity": "0f" * 8, "outcome": outcome,
        "why": "", "applied": outcome == "replied", "seconds": 1.0, "up_bytes": 3700, "K": 10 + t,
        "residual_norm": 1.0 + t, "age": 0, "incarnation": 1,
    } | changes  # fmt: skip


def make_federation(folder: Path, nodes: list[dict[str, Any]], **config: Any) -> Path:
    make_run(folder, rounds(1 + max(row["round"] for row in nodes)), **config)
    (folder / "nodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in nodes), encoding="utf-8")
    return folder


def test_nodes_are_counted_by_what_became_of_each_request() -> None:
    rows = [
        node_row(0, 1), node_row(1, 1, "late", K=None), node_row(2, 1, "lost", K=None, up_bytes=0),
        node_row(3, 1, "norm"), node_row(4, 1, "norm"), node_row(5, 1, "nan"),
        node_row(6, 1, applied=False, incarnation=2, age=6),
        node_row(0, 0, K=None, residual_norm=None, age=None, incarnation=None, up_bytes=None),
    ]  # fmt: skip
    header, first, second = tabulate_nodes(rows)
    assert header[0] == "node"
    assert first == ["node0", "1", "1", "0", "0", "0", "0", "0 B", "not said", "none", "none", "none"]
    assert second == ["node1", "7", "1", "1", "1", "1", "3", "22.2 kB", "10 to 16", "7", "6", "2"]
    assert classify(rows[6]) == "replied, round void"
    assert list_reasons(rows) == [
        "rounds 4 to 5: norm, node1 2 times", "round 2: late, node1", "round 3: lost, node1",
        "round 6: nan, node1", "round 7: round void, node1",
    ]  # fmt: skip


def test_the_last_that_is_known_of_a_node() -> None:
    """The order of the rows does not matter; a node may have changed its name, and done no steps."""
    rows = [node_row(t, 0, "lost", K=None, age=12_345 * t, node="new") for t in (3, 1, 2)]
    header, line = tabulate_nodes([*rows, node_row(0, 0, K=0, age=0)])
    found = dict(zip(header, line, strict=True))
    assert (found["node"], found["lost"], found["K"], found["age"]) == ("new", "3", "0", "37,035")


def test_reasons_are_not_too_many() -> None:
    rows = [node_row(t, t % 3, "norm", why=f"its norm is {t}") for t in range(20)] + [node_row(20, 0)]
    found = list_reasons(rows)
    assert found[0] == "round 1: norm (its norm is 0), node0"
    assert found[-1] == "8 more, for other reasons"
    assert len(found) == 13
    assert list_reasons([node_row(0, 0)]) == []
    away = [node_row(t, n, "lost", why="it is offline") for n in range(100) for t in range(1 + (n == 7))]
    names = "node7 2 times, node0, node1, node2, node3, node4 and 94 more nodes"
    assert list_reasons(away) == [f"rounds 1 to 2: lost (it is offline), {names}"]


def test_a_federation_has_the_time_that_it_took(tmp_path: Path) -> None:
    """A round takes 0.5 real seconds, and 2 simulated ones: both lines are in one panel."""
    nodes = [node_row(t, 0) for t in range(4)]
    real = make_federation(tmp_path / "real", nodes)
    simulated = make_run(tmp_path / "simulated", rounds(4))
    groups = group_runs([read_run(real), read_run(simulated)])
    (panel,) = [panel for panel in choose_panels(groups, "test_accuracy") if panel.name == "metric-time"]
    assert [list(make_curve(group, panel.x, "test_accuracy").x) for group in groups] == [
        [0.5, 1, 1.5, 2], [2, 4, 6, 8],
    ]  # fmt: skip
    assert [(row.time, row.seconds_to_goal) for row in summary([read_run(real)])] == [(2, 2)]
    report = write_report([real], tmp_path / "out")
    assert {"metric-time.png", "report.html"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert "that of a federation is real" in read_page(report.page)[0]


def test_rows_of_nodes_are_in_order(tmp_path: Path) -> None:
    """Of two rows of the same node and round the later one counts."""
    rows = [node_row(1, 0), node_row(0, 1), node_row(0, 0), node_row(0, 0, "late")]
    found = read_run(make_federation(tmp_path / "a", rows)).nodes
    assert [(row["round"], row["number"], row["outcome"]) for row in found] == [
        (0, 0, "late"), (0, 1, "replied"), (1, 0, "replied"),
    ]  # fmt: skip


def drawn(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure that a picture of nodes is made of."""
    made: list[Figure] = []

    def keep(*size: float) -> Figure:
        made.append(new_figure(*size))
        return made[-1]

    monkeypatch.setattr(heatmaps, "new_figure", keep)
    draw_attendance(rows)
    return made[0]


def test_what_the_picture_of_nodes_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        node_row(0, 0, incarnation=0), node_row(1, 0, "late"), node_row(2, 0, "norm", incarnation=2),
        node_row(0, 1, "lost"),
    ]  # fmt: skip
    figure = drawn(rows, monkeypatch)
    above, below = figure.axes
    (birth,) = above.lines
    assert (list(birth.get_xdata()), list(birth.get_ydata())) == ([3], [0])
    (image,) = above.images
    kinds = ["not asked", *OUTCOMES]
    cells = np.asarray(image.get_array()).tolist()
    assert [[kinds[i] for i in line] for line in cells] == [
        ["in the model", "late", "rejected"], ["lost", "not asked", "not asked"],
    ]  # fmt: skip
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "in the model", "late", "lost", "rejected", "not asked", "new incarnation",
    ]  # fmt: skip
    assert list(below.lines[0].get_xdata()) == [1, 2, 3]
    names = below.get_legend().get_texts()  # type: ignore[union-attr]
    assert [text.get_text() for text in names] == ["node0", "node1"]


def test_nothing_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures say so if no node has replied."""
    nobody = [node_row(t, 0, "lost", residual_norm=None) for t in range(3)]
    below = drawn(nobody, monkeypatch).axes[1]
    assert [text.get_text() for text in below.texts] == ["nobody has said anything"]
    folder = make_run(tmp_path / "a", rounds(3, uplink_bytes=0, downlink_bytes=0))
    groups = group_runs([read_run(folder)])
    (panel,) = [panel for panel in choose_panels(groups, "test_accuracy") if panel.name == "metric-total"]
    axes = new_figure(4, 3).subplots()
    finish_axes(axes, panel, draw_lines(axes, panel, [(groups[0], Pen("black"))]))
    assert axes.get_xlim() == (0, 1)


@pytest.mark.parametrize("last", [599, 600, 10**12])
def test_many_rounds_share_a_column(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column shows the worst of its rounds."""
    rows = [node_row(0, 0), node_row(1, 0, "lost"), node_row(2, 0), node_row(last, 0)]
    figure = drawn(rows, monkeypatch)
    cells = np.asarray(figure.axes[0].images[0].get_array())
    assert cells.shape == (1, 600)
    assert cells[0, :3].tolist() == {599: [1, 4, 1], 600: [4, 1, 0]}.get(last, [4, 0, 0])
    assert cells[0, -1] == 1


def test_a_legend_names_what_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without a test set has no test loss."""
    without = [{key: value for key, value in row.items() if key != "test_loss"} for row in rounds(3)]
    for folder, names in (
        (make_run(tmp_path / "a", rounds(3)), ["train", "test"]),
        (make_run(tmp_path / "b", without), ["train"]),
    ):
        groups = group_runs([read_run(folder)])
        (panel,) = [panel for panel in choose_panels(groups, "test_accuracy") if panel.name == "loss"]
        assert [series.name for series in panel.series] == names


def test_a_federation_shows_its_nodes(tmp_path: Path, one_picture: None) -> None:
    rows = [node_row(t, n) for t in range(4) for n in range(3)] + [node_row(4, 0, "late")]
    rows[9] |= {"incarnation": 2}
    folder = make_federation(tmp_path / "a", rows)
    write_run_pictures(folder)
    check_png(folder / "nodes.png")
    page = (folder / "report.html").read_text()
    assert "<h2>Nodes</h2>" in page
    assert page.count('data-name="incarnation"') == 3
    assert "To simulate it" in page
    plain = make_run(tmp_path / "b", rounds(2))
    write_report([folder, plain], tmp_path / "both")
    both = (tmp_path / "both" / "report.html").read_text()
    assert both.count('data-name="incarnation"') == 3


def test_a_simulation_has_no_nodes(tmp_path: Path, one_picture: None) -> None:
    folder = make_run(tmp_path / "a", rounds(2))
    write_run_pictures(folder)
    assert not (folder / "nodes.png").exists()
    assert "Nodes" not in (folder / "report.html").read_text()


def test_of_an_app_only_what_its_server_decides_is_shown(tmp_path: Path, one_picture: None) -> None:
    app = "(a Flower app)"
    folder = make_federation(tmp_path / "a", [node_row(0, 0)], dataset=app, model=app)
    write_run_pictures(folder)
    page = (folder / "report.html").read_text()
    assert "<code>feedback</code>" in page
    assert "batch_size" not in page
    assert "cfedavg run" not in page


def test_labels_of_an_app_say_what_its_server_decides(tmp_path: Path) -> None:
    """They do so beside a simulation, and beside an app with another strategy."""
    apps = [
        make_run(tmp_path / by, rounds(1), dataset=APP, model=f"(a Flower app, averaged by {by})")
        for by in ("FedAvg", "FedAdam")
    ]
    both = summary([read_run(path) for path in apps])
    assert [row.label for row in both] == [
        f"(a Flower app, averaged by {by})" for by in ("FedAvg", "FedAdam")
    ]
    assert {row.against for row in both} == {both[0].label}
    plain = make_run(tmp_path / "plain", rounds(1), batch_size=50, local_steps="7", compressor="none")
    three = summary([read_run(path) for path in [*apps, plain]])
    labels = [row.label for row in three]
    assert labels == ["topk(0.99) >> bf16 · FedAvg", "topk(0.99) >> bf16 · FedAdam", "none · plain"]
    assert [row.against for row in three] == [labels[0], labels[0], labels[2]]  # it is another task


def test_a_federation_beside_its_simulation(tmp_path: Path) -> None:
    one = make_federation(tmp_path / "one", [node_row(0, 0)])
    other = make_run(tmp_path / "other", rounds(1), engine="reference")
    labels = [row.label for row in summary([read_run(one), read_run(other)])]
    assert labels == ["topk(0.99) >> bf16 · federation", "reference"]


@pytest.mark.usefixtures("one_picture")
def test_what_clients_evaluate_is_shown(tmp_path: Path) -> None:
    """They are shown alone, and beside what the server evaluates."""
    rows = [{"round": t, "uplink_bytes": 10, "client_eval_loss": 1.0, "client_eval_acc": 0.3} for t in (0, 1)]
    alone = make_run(tmp_path / "a", rows)
    report = write_report([alone], tmp_path / "out")
    assert report.rows[0].metric == "client_eval_acc"
    assert "30.0%" in report.headline
    beside = make_run(tmp_path / "b", [own | row for own, row in zip(rounds(2), rows, strict=True)])
    panels = choose_panels(group_runs([read_run(beside)]), "test_accuracy")
    assert [panel.series[0].key for panel in panels if panel.name == "clients-metric"] == ["client_eval_acc"]
    runs = [read_run(path) for path in (beside, make_run(tmp_path / "c", rounds(2)), alone)]
    assert summary(runs)[0].metric == "test_accuracy"  # which one of them lacks


def test_a_run_that_has_not_been_evaluated_just_now(tmp_path: Path) -> None:
    """With --eval-every the last row of a run that is going on may hold no metric."""
    *rows, last = rounds(3)
    last = {key: value for key, value in last.items() if not key.startswith("test_")}
    report = write_report([make_run(tmp_path / "a", [*rows, last])], tmp_path / "out")
    assert report.rows[0].metric == "test_accuracy"


def test_a_hundred_nodes_fit_into_the_picture(tmp_path: Path) -> None:
    rows = [node_row(t, n, "late" if (t + n) % 7 == 0 else "replied") for t in range(150) for n in range(100)]
    path = tmp_path / "nodes.png"
    path.write_bytes(draw_attendance(rows))
    check_png(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"number": "0"}, "'number' must be of type int, got '0'"),
        ({"outcome": None}, "'outcome' must be of type str, got None"),
        *(
            ({name: "much"}, f"'{name}' must be a number or null, got 'much'")
            for name in ("residual_norm", "age", "incarnation", "K", "up_bytes")
        ),
        ({"round": -1}, "'round' must be an integer from 0 to .*, got -1"),
        ({"round": 10**400}, "'round' must be an integer"),
    ],
)
def test_a_damaged_row_of_a_node_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = make_federation(tmp_path / "a", [node_row(0, 0)])
    with (folder / "nodes.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(node_row(0, 1) | changes) + "\n")
    with pytest.raises(InputError, match=rf"nodes\.jsonl, line 2: {words}"):
        read_run(folder)


def test_a_half_written_row_of_a_node_is_ignored(tmp_path: Path) -> None:
    folder = make_federation(tmp_path / "a", [node_row(0, 0)])
    with (folder / "nodes.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"round": 1, "number": 0, "no')
    assert [row["round"] for row in read_run(folder).nodes] == [0]
