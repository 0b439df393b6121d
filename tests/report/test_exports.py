"""Figures for papers: whole files with their fonts, the same bytes each time, and the numbers drawn."""

from __future__ import annotations

import csv
import io
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from cfedavg.core.errors import InputError
from cfedavg.report import draw_panel_as, read_run, write_report
from cfedavg.report.exports import FORMATS
from cfedavg.report.figures import choose_lines, draw_lines, new_figure
from cfedavg.report.panels import Panel, Series, choose_panels
from cfedavg.report.runs import Group
from cfedavg.report.table import group_runs, summarise
from tests.conftest import Command
from tests.report.test_report import make_run, rounds

NORMS = Panel("norms", "squared $norms$", (Series("delta_norm2", "‖g‖²"),), "", log=True)


@pytest.fixture
def groups(tmp_path: Path) -> list[Group]:
    """Two seeds of one setting, and one seed of another, whose first norms cannot be drawn on a log axis."""
    for seed in (0, 1):
        make_run(tmp_path / f"a{seed}", rounds(4, delta_norm2=1.0 + seed), seed=seed)
    rows = rounds(4, simulated_seconds=0.5)
    make_run(tmp_path / "b", [row | {"delta_norm2": max(0.0, row["round"] - 1.0)} for row in rows], eta=0.5)
    return group_runs([read_run(tmp_path / name) for name in ("a0", "a1", "b")])


def page_width(form: str, data: bytes) -> float:
    """The width in inches that a PDF or SVG has."""
    pattern = rb"/MediaBox \[ 0 0 ([\d.]+)" if form == "pdf" else rb'width="([\d.]+)pt"'
    found = re.search(pattern, data)
    assert found
    return float(found[1]) / 72


@pytest.mark.parametrize("form", ["pdf", "svg"])
def test_a_figure_is_as_wide_as_a_column_and_has_its_font(form: str, groups: list[Group]) -> None:
    data = draw_panel_as(form, NORMS, groups)
    assert data == draw_panel_as(form, NORMS, groups)
    assert page_width(form, data) == pytest.approx(3.4)
    assert page_width(form, draw_panel_as(form, NORMS, groups, 5.5)) == pytest.approx(5.5)
    assert b"Date" not in data
    assert b"<dc:date" not in data
    if form == "pdf":
        streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", data, re.DOTALL)
        shown = [zlib.decompress(each) for each in streams if each[:1] == b"x"]
        assert any(re.search(rb"T[jJ]\b", each) for each in shown)  # text, not outlines
        assert b"/FontFile2" in data
        assert b"/Type3" not in data
    else:
        text = data.decode()
        assert "squared $norms$</text>" in text  # no formula
        assert "@font-face{font-family:'DejaVu Sans';src:url(data:font/ttf;base64," in text
        assert len(data) < 100_000


def test_a_csv_has_the_numbers_that_are_drawn(groups: list[Group]) -> None:
    table = list(csv.DictReader(io.StringIO(draw_panel_as("csv", NORMS, groups).decode())))
    drawn = draw_lines(new_figure(5, 3).add_subplot(), NORMS, choose_lines(groups))
    written = [[float(row[name]) for name in ("x_value", "mean", "lowest", "highest")] for row in table]
    assert np.array_equal(np.array(written), np.concatenate([np.stack(curve, 1) for curve in drawn]))
    assert [row["line"] for row in table] == [groups[0].label] * 4 + [groups[1].label] * 2
    assert [row["mean"] for row in table] == ["1.5"] * 4 + ["1.0", "2.0"]
    assert {(row["panel"], row["x"], row["y"]) for row in table} == {
        ("squared $norms$", "rounds", "delta_norm2")
    }


@pytest.mark.usefixtures("groups")
def test_a_report_has_each_panel_in_each_format(
    tmp_path: Path, cfedavg: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cfedavg.report.figures.draw_panel", lambda *_: b"a picture of the page")
    monkeypatch.setattr("cfedavg.report.figures.draw_panels", lambda *_: b"the picture of all")
    formats = [word for form in ("csv", "png", "csv") for word in ("--format", form)]
    out = tmp_path / "out"
    done = cfedavg("report", tmp_path / "a0", tmp_path / "b", "--out", out, *formats, "--over", "total_bytes")
    assert done.code == 0, done.err
    names = {"metric-total", "metric-rounds", "metric-time", "loss", "norms", "snr", "alpha"}
    files = {f"{name}.{form}" for name in names for form in ("csv", "png")}
    assert {path.name for path in out.iterdir()} == files | {"report.html", "report.png"}
    assert "total_bytes,train_loss" in (out / "loss.csv").read_text()
    assert "time to 53%" in (out / "report.html").read_text()


def test_the_time_to_a_goal_that_all_reach(groups: list[Group]) -> None:
    one, other = summarise(groups, "test_accuracy")
    assert (one.goal, one.seconds_to_goal, other.seconds_to_goal) == (0.53, 8.0, 2.0)  # after the last round
    lost = summarise(groups, "test_loss")[0]
    assert (lost.goal, lost.seconds_to_goal) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"formats": ["pdf", "jpg"]}, "`formats` must be png, pdf, svg or csv, got 'jpg'"),
        ({"width": 0.5}, "`width` must be from 2 to 12 inches, got 0.5"),
        ({"width": float("nan")}, "`width` must be from 2 to 12 inches, got nan"),
        ({"over": "bytes"}, "`over` must be rounds, total_bytes or time, got 'bytes'"),
        ({"over": "time"}, "`over` is time, which no round of these runs has"),
    ],
)
def test_bad_figures(tmp_path: Path, arguments: dict[str, object], sentence: str) -> None:
    folder = make_run(tmp_path / "a", rounds(2, simulated_seconds=None))
    with pytest.raises(InputError, match=re.escape(sentence)):
        write_report([folder], tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.glob("out/*"))


def test_every_format_draws_every_panel_with_a_band(groups: list[Group]) -> None:
    panel = choose_panels(groups, "test_accuracy")[0]
    heads = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml", "csv": b"panel,line"}
    assert heads.keys() == set(FORMATS)
    for form, head in heads.items():
        assert draw_panel_as(form, panel, groups).startswith(head)
