"""Experiments, the archive of their cells, and the grid that fills it."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from cfedavg import Config, InputError
from cfedavg.cli.commands import app
from cfedavg.core.run_files import Record
from cfedavg.reproduce import archive, experiment, studies, training
from cfedavg.reproduce.archive import Damaged, Entry
from cfedavg.reproduce.claims import CLAIMS
from cfedavg.reproduce.command import carry_out, open_grid
from cfedavg.reproduce.grid import CELLS, WORK, Grid, Watch, processor
from cfedavg.reproduce.training import COLUMNS

# --- the experiments of the package ---------------------------------------------------------------------


@pytest.mark.parametrize("scale", experiment.SCALES)
def test_a_cell_has_one_meaning(scale: str) -> None:
    """Experiments share cells by their names: whoever has one of a name means the same run."""
    seen: dict[str, Any] = {}
    for name in experiment.names():
        for cell, settings in experiment.load(name).cells(scale, 2).items():
            assert seen.setdefault(cell, settings) == settings, (name, cell)
    assert len(seen) > 200


def test_the_paper_scale_is_the_papers() -> None:
    for name in ("fig1-mnist", "fig4-fashion", "fig6-mnist", "fig9-fashion", "fig1-cifar10", "fig3-cifar10"):
        for cell, settings in experiment.load(name).cells("paper", 1).items():
            config = Config.from_dict(settings)
            assert (config.clients, config.batch_size, config.local_epochs) == (100, 64, 10), cell
            assert (config.eta_local, config.eta, config.schedule) == (0.1, 1.0, "constant"), cell
            assert config.rounds == (200 if "cifar" in name else 100), cell
            assert ">>" not in config.compressor, cell  # values in fp32
            assert config.model == ("resnet18" if "cifar" in name else "cnn"), cell


def test_which_cells_there_are() -> None:
    cells = experiment.load("fig1-mnist").cells("paper", 3)
    assert len(cells) == 4 * 5 * 3
    assert list(cells)[:2] == ["mnist-p10-none-seed0", "mnist-p10-topk0.9-seed0"]
    assert cells["mnist-p1-rd0.99-seed2"]["classes_per_client"] == 1
    without = experiment.load("fig6-mnist").cells("paper", 1)["mnist-p5-topk0.99-noef-seed0"]
    assert without["feedback"] == "none"
    one = experiment.load("fig2-mnist").cells("paper", 1)["mnist-p5-one-step-seed0"]
    assert (one["local_steps"], one["rounds"], "local_epochs" in one) == ("1", 500, False)


def test_work_is_equal_where_it_is_compared() -> None:
    cells = experiment.load("steps").cells("paper", 1)
    assert cells["mnist-p2-k50-seed0"]["eta"] == cells["mnist-p2-k5..95-seed0"]["eta"] == 50
    assert Config.from_dict(cells["mnist-p2-k5..95-seed0"]).per_client("local_steps").mean() == 50
    speed = Config.from_dict(cells["mnist-p2-deadline-seed0"]).per_client("steps_per_second")
    assert (speed.low + speed.high - 1) / 2 == pytest.approx(50, abs=0.5)  # rounded down, half a step less


LINE = {"name": "a", "label": "A", "compressor": "none"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"line": [LINE], "colour": "red"}, "unknown key 'colour'"),
    "drawing": ({"line": [LINE], "draw": "pie"}, "draw is 'pie'; it must be curves or budget or norms"),
    "scale": ({"line": [LINE], "scale": {"huge": {}}}, "scale.huge is none of smoke, small, paper"),
    "no line": ({}, "has no \\[\\[line\\]\\]"),
    "no label": ({"line": [{"name": "a"}]}, "a \\[\\[line\\]\\] has no label"),
    "twice": ({"line": [LINE, LINE]}, "two lines have the same name"),
    "field": (
        {"line": [LINE | {"colour": 1}]},
        "the \\[\\[line\\]\\] a has an unknown key 'colour'; known are batch",
    ),
    "base": ({"line": [LINE], "base": {"colour": 1}}, "base has an unknown key 'colour'; known are batch"),
    "scale's field": ({"line": [LINE], "scale": {"small": {"k": 1}}}, "scale.small has an unknown key 'k'"),
    "line's scale's field": ({"line": [LINE | {"small": {"k": 1}}]}, "a.small has an unknown key 'k'"),
    "value": (
        {"line": [LINE], "scale": {"small": {"rounds": 0}}},
        "scale small: `rounds` must be 1 or more, got 0",
    ),
    "compressor": ({"line": [LINE | {"compressor": "zip"}]}, "compressor.*zip"),
    "code": ({"line": [LINE], "base": {"model": "os:system"}}, "base: `model` 'os:system' would import"),
    "scale's code": (
        {"line": [LINE | {"small": {"compressor": "os:system(1)"}}]},
        "a.small: `compressor` 'os:system\\(1\\)' would import Python code; an experiment may name",
    ),
    "line's name": ({"line": [LINE | {"name": "a/b"}]}, "named 'a/b': use letters"),
    "name of a number": ({"line": [LINE | {"name": 5}]}, "named 5: use letters"),
    "label": ({"line": [LINE | {"label": 5}]}, "a has the label 5; it must be text"),
    "title": ({"line": [LINE], "title": 5}, "title is 5; it must be text"),
    "paper": ({"line": [LINE], "paper": 5}, "paper is 5; it must be text"),
    "no table": ({"line": [LINE], "base": 3}, "base is 3; it must be a table"),
    "one line": ({"line": LINE}, "line is {.*}; it must be tables, each begun with \\[\\[line\\]\\]"),
    "line of text": ({"line": ["a"]}, "line holds 'a'; begin each line with"),
    "no scale": ({"line": [LINE], "scale": 1}, "scale is 1; it must be tables"),
    "scale of a number": ({"line": [LINE], "scale": {"small": 1}}, "scale.small is 1; it must be a table"),
    "line's scale": ({"line": [LINE | {"small": 1}]}, "a.small is 1; it must be a table"),
    "no column": ({"line": [LINE], "columns": []}, "columns is \\[\\]; it must hold some of train_loss"),
    "strange column": (
        {"line": [LINE], "columns": ["nonsense"]},
        "columns is \\['nonsense'\\]; it must hold",
    ),
    "column of lists": ({"line": [LINE], "columns": [[]]}, "columns is \\[\\[\\]\\]; it must hold some of"),
    "one column": ({"line": [LINE], "columns": "test_loss"}, "columns is 'test_loss'; it must be a list"),
    "one p": ({"line": [LINE], "p": 5}, "p is 5; it must be a list of whole numbers"),
} | {
    f"p = {p}": ({"line": [LINE], "p": p}, "p is .*; it must hold different whole numbers, 1 or more")
    for p in ([], [0], [2, -1], [2.0], [True], ["2"], [[2]], [2, 2])
}


def test_a_cell_is_one_file_whatever_its_data() -> None:
    made = experiment.from_table("mine", {"line": [LINE], "p": [1], "base": {"dataset": "owner/name"}})
    assert list(made.cells("paper", 1)) == ["owner-name-p1-a-seed0"]


@pytest.mark.parametrize("name", BAD)
def test_bad_experiments(name: str) -> None:
    table, words = BAD[name]
    with pytest.raises(InputError, match=f"experiment mine.*{words}"):
        experiment.from_table("mine", table)


@pytest.mark.parametrize("like", ["a.toml", "./a.toml", "../{folder}/a.toml", "{path}"])
def test_an_experiment_like_itself(like: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'like = "{like.format(path=path, folder=tmp_path.name)}"')
    with pytest.raises(InputError, match="is like itself"):
        studies.find(str(path))


def test_an_experiment_like_another_is_read_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("mine", "mine/models", "elsewhere"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mine/models/base.toml").write_text('like = "fig1-mnist"\ntitle = "Mine"')
    (tmp_path / "mine/own.toml").write_text('like = "models/base.toml"\np = [3]')
    for folder, name in (("elsewhere", "../mine/own.toml"), ("mine", "own.toml")):
        monkeypatch.chdir(tmp_path / folder)
        found = experiment.load(name)
        assert (found.name, found.title, found.p, len(found.lines)) == ("own", "Mine", (3,), 5)


def test_the_nearer_wins(tmp_path: Path) -> None:
    """A scale over the base, one's own over the model's, a line over those, and its scale over itself."""
    text = """
    like = "fig1-mnist"
    p = [1]
    [scale.smoke]
    rounds = 7
    clients = 6
    [[line]]
    name = "a"
    label = "a"
    rounds = 8
    smoke.rounds = 9
    [[line]]
    name = "b"
    label = "b"
    """
    (tmp_path / "own.toml").write_text(text)
    cells = experiment.load(str(tmp_path / "own.toml")).cells("smoke", 1)
    found = [
        (cells[name]["rounds"], cells[name]["clients"]) for name in ("mnist-p1-a-seed0", "mnist-p1-b-seed0")
    ]
    assert found == [(9, 6), (7, 6)]
    assert cells["mnist-p1-b-seed0"]["precision"] == "float32"  # not part of what it is, but recorded


@pytest.mark.parametrize(
    ("text", "words"), [('like = "fig1-mnist"\nbase = 3', "base is 3"), ("like = 3", "like is 3")]
)
def test_an_experiment_is_checked_before_it_is_put_on_another(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=f"experiment mine: {words}; it must be"):
        studies.find(str(path))


def test_an_unknown_experiment_lists_those_that_exist() -> None:
    for name in ("fig99", "../fig1-mnist"):
        with pytest.raises(
            InputError, match=r"no experiment .*; there are fig1-cifar10, fig1-mnist.*speedup"
        ):
            studies.find(name)
    with pytest.raises(InputError, match=r"cannot read the experiment nowhere\.toml \(No such file"):
        studies.find("nowhere.toml")


# --- the archive ----------------------------------------------------------------------------------------

numbers = st.none() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
columns = st.dictionaries(st.text(max_size=8).filter(lambda key: key != "diverged"), st.lists(numbers))
plain = st.dictionaries(st.text(max_size=8), st.lists(numbers, max_size=4) | numbers | st.text(max_size=5))
RUN = {"dataset": "embedded", "rounds": 3, "seed": 0}
MADE = {"seconds": 1.5, "version": "0.4.0", "hardware": "an abacus"}


@given(settings=plain, values=columns)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, settings: Any, values: Any
) -> None:
    entry = Entry("cell-p2-seed0", settings | RUN, values, MADE)
    assert archive.read(archive.write(tmp_path_factory.getbasetemp(), entry)) == entry


def test_every_change_of_a_byte_is_noticed(tmp_path: Path) -> None:
    entry = Entry("cell", RUN, {"test_accuracy": [0.1, 0.25, None], "bytes": [12, 3, 45]}, MADE)
    path = archive.write(tmp_path, entry)
    good = path.read_bytes()
    for place in range(len(good)):
        for bit in (0, 4):
            path.write_bytes(good[:place] + bytes([good[place] ^ (1 << bit)]) + good[place + 1 :])
            with suppress(Damaged):
                assert archive.read(path) == entry  # white space
    path.write_bytes(good[:-20])
    with pytest.raises(Damaged):
        archive.read(path)
    other = tmp_path / "other.json"
    other.write_bytes(good)
    with pytest.raises(Damaged):  # a good cell under another's name
        archive.read(other)


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("made", {}),
        ("made", []),
        ("made", MADE | {"seconds": "long"}),
        ("made", MADE | {"hardware": None}),
        ("settings", {}),
        ("settings", 3),
        ("settings", RUN | {"seed": "0"}),
        ("settings", RUN | {"rounds": "3"}),
        ("values", {"test_accuracy": "high"}),
        ("values", {"test_accuracy": [0.1, "high"]}),
        ("values", {"test_accuracy": 0.5}),
        ("values", {"test_accuracy": {"a": 1}}),
        ("values", {"diverged": [1.0]}),
    ],
)
def test_a_seal_does_not_make_a_cell(part: str, content: Any, tmp_path: Path) -> None:
    good = Entry("cell", RUN, {"test_accuracy": [0.1]}, MADE)
    assert archive.read(archive.write(tmp_path, good)) == good
    path = archive.write(tmp_path, dataclasses.replace(good, **{part: content}))
    with pytest.raises(Damaged, match=r"cell\.json is damaged"):
        archive.read(path)


def test_what_small_studies_keep(tmp_path: Path) -> None:
    small = Entry("cell", {"seed": 0}, {"a": 1.5, "b": {"c": [1, None]}, "d": [[1, 2]]}, MADE)
    assert archive.read(archive.write(tmp_path, small)) == small
    with pytest.raises(Damaged):
        archive.read(archive.write(tmp_path, dataclasses.replace(small, values={"b": {"c": ["much"]}})))


# --- the grid -------------------------------------------------------------------------------------------

MINE = """
title = "Mine"
p = [2, 1]

[base]
model = "linear"
clients = 4
local_steps = "2"
batch_size = 8
rounds = 4

[[line]]
name = "none"
label = "none"
compressor = "none"

[[line]]
name = "rd"
label = "RD"
compressor = "rd(0.9)"
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return str(path)


HOW = {"device": "cpu", "precision": "float32"}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def carried_out(
    name: str, out: Path, minutes: float = math.inf, seeds: int = 1, **more: Any
) -> tuple[Grid, str]:
    """The grid after a call, and what the call said."""
    console = quiet()
    only, rounds, resume = (more.pop(key, None) for key in ("only", "rounds", "resume"))
    grid = open_grid([name], "paper", seeds, out, only, rounds, bool(resume), console)
    carry_out(grid, HOW, minutes, console)
    assert isinstance(console.file, io.StringIO)
    return grid, console.file.getvalue()


def values(out: Path) -> dict[str, Any]:
    return {name: entry.values for name, entry in archive.read_all(out / CELLS).items()}


def test_a_grid_from_its_first_cell_to_its_picture(mine: str, tmp_path: Path) -> None:
    grid, said = carried_out(mine, tmp_path / "out", seeds=2)
    assert not grid.missing
    assert "0 of 8 cells are done" in said
    assert "embedded-p1-rd-seed1: done, 8 of 8 cells" in said
    entry = archive.read(tmp_path / "out" / CELLS / "embedded-p2-rd-seed1.json")
    assert entry.settings == grid.cells[entry.name][1]
    assert [len(entry.values[key]) for key in COLUMNS if key in entry.values] == [4] * (len(COLUMNS) - 1)
    assert entry.made["command"] == (
        "cfedavg reproduce mine.toml --scale paper --seeds 2 --device cpu --precision float32"
    )
    assert entry.made.keys() == {"command", "seconds", "version", "torch", "python", "hardware"}
    assert (tmp_path / "out" / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "mine.md").read_text().count("\n|") >= 5
    assert not list((tmp_path / "out" / WORK).iterdir())
    _, said = carried_out(mine, tmp_path / "out", seeds=2)  # nothing is left to do: it only draws
    assert "8 of 8 cells are done" in said


def test_pieces_come_to_the_same_as_the_whole(mine: str, tmp_path: Path) -> None:
    carried_out(mine, tmp_path / "whole")
    stops = 0
    while True:
        grid, said = carried_out(mine, tmp_path / "pieces", minutes=1e-9, resume=stops > 0)
        if not grid.missing:
            break
        stops += 1
        assert "the time is over: " in said
        assert stops < 40
    assert stops >= 4  # several times within one cell
    assert values(tmp_path / "pieces") == values(tmp_path / "whole")


def test_time_is_given_in_minutes(mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by two seconds whenever somebody looks."""
    looks = itertools.count(step=2.0)
    monkeypatch.setattr("cfedavg.reproduce.grid.time", SimpleNamespace(monotonic=lambda: next(looks)))
    assert not carried_out(mine, tmp_path / "five", minutes=5)[0].missing
    assert carried_out(mine, tmp_path / "half", minutes=0.5)[0].missing


def test_the_time_of_earlier_calls_counts(mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resumed(settings: Any, work: Path, how: Any, watch: Watch) -> dict[str, Any]:
        row = dict.fromkeys(("uplink_bytes", "downlink_bytes", "lost"), 0)
        row |= dict.fromkeys(("snr_min", "delta_norm2", "error_norm2"))
        watch.begin([Record(row | {"seconds": 100.0, "round": 0})])
        watch.row(Record(row | {"seconds": 20.0, "round": 1}))
        return {"test_accuracy": [0.1, 0.2]}

    monkeypatch.setattr("cfedavg.reproduce.training.measure", resumed)
    monkeypatch.setitem(HOW, "precision", "bf16")
    grid, _ = carried_out(mine, tmp_path)
    assert {entry.made["seconds"] for entry in grid.found.values()} == {120.0}
    assert {entry.settings["precision"] for entry in grid.found.values()} == {"bf16"}


def test_a_cell_that_is_begun_is_not_gone_on_with_unasked(mine: str, tmp_path: Path) -> None:
    grid, _ = carried_out(mine, tmp_path, minutes=1e-9)
    assert not grid.found
    with pytest.raises(InputError, match="holds 1 of the 4 cells, done or begun; set `resume`"):
        carried_out(mine, tmp_path)


def test_pictures_of_what_an_interrupted_grid_has(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = studies.Training.measure, itertools.count()

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(studies.Training, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carried_out(mine, tmp_path)
    rows = (tmp_path / "mine.md").read_text().splitlines()[4:]
    assert [row.split(" | ")[2] for row in rows] == ["1", "1", "0", "0"]
    assert (tmp_path / "mine.png").exists()


def test_only_some_cells(mine: str, tmp_path: Path) -> None:
    grid, _ = carried_out(mine, tmp_path, only=["*-p1-*", "*-p2-none-*"])
    assert list(grid.found) == [
        "embedded-p2-none-seed0", "embedded-p1-none-seed0", "embedded-p1-rd-seed0"
    ]  # fmt: skip
    carried_out(mine, tmp_path, only=["*-p2-none-*"], seeds=2, resume=True)
    rows = (tmp_path / "mine.md").read_text().splitlines()[4:]  # of all that is there, whatever was asked for
    assert [row.split(" | ")[2] for row in rows] == ["2", "0", "1", "1"]
    with pytest.raises(InputError, match="`only`: no cell is named p3; one is embedded-p2-none-seed0"):
        carried_out(mine, tmp_path, only=["p3"], resume=True)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What stands under the figures."""
    made: list[str] = []
    figure = studies.Training.figure

    def noted(study: studies.Training, found: Any, note: str) -> bytes:
        made.append(note.partition(";")[0])
        return figure(study, found, note)

    monkeypatch.setattr(studies.Training, "figure", noted)
    return made


def test_the_beginning_of_runs(mine: str, tmp_path: Path, notes: list[str]) -> None:
    """The figure says so."""
    carried_out(mine, tmp_path / "whole")
    grid, _ = carried_out(mine, tmp_path / "cut", rounds=3)
    assert notes == ["scale paper", "scale paper, the first 3 of 4 rounds"]
    assert {entry.settings["rounds"] for entry in grid.found.values()} == {3}
    assert "--rounds 3" in next(iter(grid.found.values())).made["command"]
    whole = values(tmp_path / "whole")["embedded-p1-rd-seed0"]
    cut = values(tmp_path / "cut")["embedded-p1-rd-seed0"]
    assert cut == {name: column[:3] for name, column in whole.items()}
    with pytest.raises(InputError, match=r"holds the first 3 of 4 rounds, .*; set `rounds` to 3, or choose"):
        carried_out(mine, tmp_path / "cut", resume=True)
    carried_out(mine, tmp_path / "whole", rounds=10)  # no longer than they are: nothing is left to do


def write_cells(out: Path, name: str, scale: str, seeds: int = 1, **changes: Any) -> dict[str, Any]:
    """Cells of an experiment that nobody has run."""
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    cells = experiment.load(name).cells(scale, seeds)
    for cell, settings in cells.items():
        values = {"test_accuracy": [0.1, 0.2], "uplink_bytes": [10, 10]}
        archive.write(out / CELLS, Entry(cell, settings | changes, values, MADE))
    return cells


def test_a_figure_of_runs_that_are_cut_in_part(mine: str, tmp_path: Path, notes: list[str]) -> None:
    cells = write_cells(tmp_path, mine, "paper")
    for name, rounds in zip(cells, (3, 2, 3), strict=False):
        entry = archive.read(tmp_path / CELLS / f"{name}.json")
        archive.write(tmp_path / CELLS, dataclasses.replace(entry, settings=cells[name] | {"rounds": rounds}))
    assert drawn(mine, tmp_path).exit_code == 0
    assert notes == ["scale paper, in part the first 2 of 4 rounds, in part the first 3 of 4 rounds"]


def test_a_figure_on_other_data_says_so(tmp_path: Path, notes: list[str]) -> None:
    write_cells(tmp_path, "fig2-cifar10", "smoke")
    assert drawn("fig2-cifar10", tmp_path, "--scale", "smoke").exit_code == 0
    assert notes == ["scale smoke, on embedded digits"]


def damage_cell(out: Path) -> None:
    path = out / CELLS / "embedded-p2-rd-seed0.json"
    path.write_text(path.read_text().replace('"test_accuracy": [0.', '"test_accuracy": [0.9', 1))


def empty_cell(out: Path) -> None:
    (out / CELLS / "embedded-p2-rd-seed0.json").write_text("")


def test_time_that_is_over_after_the_last_round_stops_nothing(mine: str, tmp_path: Path) -> None:
    grid, said = carried_out(mine, tmp_path, minutes=1e-9, only=["*-p2-rd-*"], rounds=1)
    assert not grid.missing
    assert "stopping" not in said


@pytest.mark.parametrize("damage", [damage_cell, empty_cell])
def test_a_damaged_cell_is_done_again(damage: Callable[[Path], None], mine: str, tmp_path: Path) -> None:
    carried_out(mine, tmp_path / "out")
    good = values(tmp_path / "out")
    damage(tmp_path / "out")
    with pytest.raises(Damaged):
        values(tmp_path / "out")
    found = invoked(mine, "--scale", "paper", "--out", str(tmp_path / "out"))
    assert "holds 3 of the 4 cells, done or begun; set `resume`" in str(found.exception)
    assert not found.output
    _, said = carried_out(mine, tmp_path / "out", resume=True)
    assert "embedded-p2-rd-seed0.json is damaged: the cell is done again" in said
    assert values(tmp_path / "out") == good


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "config.toml", "metrics.jsonl"])
def test_a_damaged_folder_of_a_cell_is_begun_again(name: str, mine: str, tmp_path: Path) -> None:
    only = ["*-p2-rd-*"]
    carried_out(mine, tmp_path / "good", only=only)
    carried_out(mine, tmp_path / "out", minutes=1e-9, only=only)
    (tmp_path / "out" / WORK / "embedded-p2-rd-seed0" / name).write_bytes(b'{"round": 7}\n')
    _, said = carried_out(mine, tmp_path / "out", resume=True, only=only)
    assert "embedded-p2-rd-seed0 is done again from its first round (cannot resume: " in said
    assert values(tmp_path / "out") == values(tmp_path / "good")


def test_a_begun_cell_is_not_thrown_away(mine: str, tmp_path: Path) -> None:
    """Asked for in another precision, or for fewer rounds than are done, it stays as it is."""
    only, console = ["*-p2-rd-*"], quiet()
    for _ in range(2):
        carried_out(mine, tmp_path, minutes=1e-9, only=only, resume=True)
    work = tmp_path / WORK / "embedded-p2-rd-seed0"
    before = (work / "metrics.jsonl").read_bytes()
    grid = open_grid([mine], "paper", 1, tmp_path, only, None, True, console)
    with pytest.raises(InputError, match="cannot resume: `precision` is 'float64', but the run in"):
        carry_out(grid, HOW | {"precision": "float64"}, math.inf, console)
    with pytest.raises(InputError, match=r"cannot resume: `rounds` is 1, but the run in .* has done 2"):
        carried_out(mine, tmp_path, only=only, rounds=1, resume=True)
    assert (work / "metrics.jsonl").read_bytes() == before


def test_damaged_cells_are_not_drawn(mine: str, tmp_path: Path) -> None:
    write_cells(tmp_path, mine, "paper")
    (tmp_path / CELLS / "embedded-p1-none-seed0.json").write_text("{}")
    found = drawn(mine, tmp_path)
    assert found.exit_code == 0, found.exception
    assert "embedded-p1-none-seed0.json is damaged: it is not drawn" in found.output
    assert "| 1 | none | 0 |" in (tmp_path / "mine.md").read_text()


def test_a_cell_of_a_version_that_measured_less_is_done_again(tmp_path: Path) -> None:
    """It is as it was written, but figures and claims ask for more."""
    study = studies.find("variance")
    name, settings = next(iter(study.cells("smoke", 1).items()))
    (tmp_path / CELLS).mkdir()
    archive.write(tmp_path / CELLS, Entry(name, settings, {"level": 1.0, "rd": {"extra": 1.0}}, MADE))
    console = quiet()
    grid = open_grid(["variance"], "smoke", 1, tmp_path, None, None, True, console)
    assert name in grid.missing
    assert isinstance(console.file, io.StringIO)
    assert f"{name}.json lacks topk: the cell is done again" in console.file.getvalue()
    found = drawn("variance", tmp_path, "--scale", "smoke")
    assert f"{name}.json lacks topk: it is not drawn" in found.output
    assert f"{tmp_path} holds none of these cells" in str(found.exception)
    found = judged(str(tmp_path), "--scale", "smoke")
    assert str(found.exception) == f"the cell {name} lacks topk: make it again"


@pytest.mark.parametrize(
    ("there", "difference"), [("rounds = 5", "rounds is 5, here 4"), ("eta = 2.0", "eta is 2.0, here None")]
)
def test_cells_of_other_settings_are_left_alone(
    there: str, difference: str, mine: str, tmp_path: Path
) -> None:
    key, value = there.split(" = ")
    write_cells(tmp_path, mine, "paper", **{key: json.loads(value)})
    before = values(tmp_path)
    with pytest.raises(InputError) as caught:
        carried_out(mine, tmp_path, resume=True)
    assert f"holds a cell of other settings ({difference}); choose another folder" in str(caught.value)
    assert values(tmp_path) == before


def test_where_and_how_exactly_a_cell_was_computed_does_not_matter() -> None:
    wanted = experiment.load("fig1-mnist").cells("paper", 1)["mnist-p10-none-seed0"]
    assert wanted["precision"] == "float32"
    assert studies.same(wanted | {"precision": "bf16", "device": "cuda", "workers": 3}, wanted)
    assert not studies.same(wanted | {"eta": 2.0}, wanted)


def test_cells_of_another_scale_are_not_drawn(tmp_path: Path) -> None:
    write_cells(tmp_path, "fig1-mnist", "smoke")
    found = drawn("fig1-mnist", tmp_path)
    assert "holds none of these cells; make some with `cfedavg reproduce NAME" in str(found.exception)
    assert not list(tmp_path.glob("fig1-mnist.*"))
    write_cells(tmp_path, "fig2-mnist", "paper", rounds=2)  # p = 5, cut: these are the paper's
    found = drawn("fig1-mnist", tmp_path)
    assert found.exit_code == 0, found.exception
    assert (
        "not drawn, for their settings are not those of the scale paper: mnist-p1-none-seed0, "
        "mnist-p1-rd0.9-seed0, mnist-p1-rd0.99-seed0 and 12 more\n"
    ) in found.output
    text = (tmp_path / "fig1-mnist.md").read_text()
    assert "| 5 | no compression | 1 |" in text
    assert "| 10 | no compression | 0 |" in text


def test_some_cells_are_drawn(mine: str, tmp_path: Path) -> None:
    write_cells(tmp_path, mine, "paper", seeds=3)
    for words, seeds in (
        ([], ["3", "3", "3", "3"]),
        (["--seeds", "2"], ["2", "2", "2", "2"]),
        (["--only", "*-p1-*", "--only", "*-p2-rd-seed1"], ["0", "1", "3", "3"]),
    ):
        assert drawn(mine, tmp_path, *words).exit_code == 0
        lines = (tmp_path / "mine.md").read_text().splitlines()[4:]
        assert [line.split(" | ")[2] for line in lines] == seeds
    assert "`only`: no cell is named p3" in str(drawn(mine, tmp_path, "--only", "p3").exception)


def test_divergence_is_a_result(mine: str, tmp_path: Path) -> None:
    """The rounds before it are kept."""
    Path(mine).write_text(MINE.replace('"linear"', '"mlp"\neta = 1e8').replace("rounds = 4", "rounds = 9"))
    grid, _ = carried_out(mine, tmp_path / "out", only=["*-p2-none-*"])
    found = dict(grid.found["embedded-p2-none-seed0"].values)
    assert "is NaN or infinite" in found.pop("diverged")
    assert {1 < len(column) < 9 for column in found.values()} == {True}


def test_rounds_that_are_not_evaluated_stay_empty(mine: str, tmp_path: Path) -> None:
    Path(mine).write_text(MINE.replace("rounds = 4", "rounds = 5\neval_every = 2"))
    grid, _ = carried_out(mine, tmp_path / "out", only=["*-p2-none-*"])
    found = grid.found["embedded-p2-none-seed0"].values
    assert [each is None for each in found["test_accuracy"]] == [True, False, True, False, False]
    assert len(found["uplink_bytes"]) == 5


def test_a_long_cell_has_checkpoints(mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kill does not cost all of it."""
    seen = list[int]()
    monkeypatch.setattr(
        "cfedavg.reproduce.training.run",
        lambda config, **_: seen.append(config.checkpoint_every) or SimpleNamespace(rows=[]),
    )
    settings = {"rounds": 100, "local_steps": "1"}
    assert training.measure(settings, tmp_path, {}, Watch(quiet(), 100, "", math.inf)) == {}
    assert seen == [25]


def test_a_small_study_in_the_grid(tmp_path: Path) -> None:
    console = quiet()
    grid = open_grid(["conditions"], "smoke", 1, tmp_path, None, 1, False, console)
    carry_out(grid, HOW | {"device": "cuda"}, math.inf, console)
    assert not grid.missing
    for entry in grid.found.values():  # it knows no other device, and its rounds are its own
        assert entry.made["hardware"] == processor()
        assert entry.settings["rounds"] > 1
    assert (tmp_path / "conditions.png").read_bytes().startswith(b"\x89PNG")


def test_time_left(tmp_path: Path) -> None:
    grid = Grid([studies.find("fig1-mnist"), studies.find("fig4-fashion")], "paper", 1, tmp_path)
    assert grid.seconds_left() is None
    names = list(grid.cells)
    grid.found[names[0]] = Entry(names[0], {}, {}, {"seconds": 10.0})
    assert grid.seconds_left() == 10.0 * 39
    grid.found[names[-1]] = Entry(names[-1], {}, {}, {"seconds": 20.0})
    assert grid.seconds_left() == 10.0 * 19 + 20.0 * 19
    begun = tmp_path / "work" / names[1]  # a quarter of its 100 rounds are done
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text("".join(f'{{"round": {t}}}\n' for t in range(25)))
    assert grid.seconds_left() == 10.0 * 18.75 + 20.0 * 19


# --- the command ----------------------------------------------------------------------------------------


def invoked(*words: str) -> Any:
    return CliRunner().invoke(app, ["reproduce", *words], catch_exceptions=True)


def drawn(name: str, out: Path, *words: str) -> Any:
    """What the command says of a folder's cells, of the paper's scale unless told otherwise."""
    return invoked(name, "--draw", "--scale", "paper", "--out", str(out), *words)


def test_without_a_name_all_are_listed() -> None:
    found = invoked()
    assert found.exit_code == 0
    assert all(name in found.output for name in studies.names())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["fig99"], "there is no experiment 'fig99'; there are fig1-cifar10"),
        (["fig1-mnist", "--scale", "huge"], "`scale` must be smoke, small or paper, got 'huge'"),
        (["fig1-mnist", "--scale", "paper", "--data-dir", "nowhere"], "`data_dir`: nowhere is not a folder"),
        (
            ["fig1-mnist", "--precision", "int8"],
            "`precision` must be float32, float64, tf32 or bf16, got 'int8'",
        ),
        (["--scale", "huge"], "--scale needs a NAME; `cfedavg reproduce` alone lists them"),
        (["--resume"], "--resume needs a NAME"),
        (["--draw", "--scale", "huge"], "`scale` must be smoke, small or paper, got 'huge'"),
        (["--draw", "--resume"], "--resume is for training, and --draw trains nothing: leave one out"),
        (["fig1-mnist", "--draw", "--minutes", "3"], "--minutes is for training"),
        (["fig1-mnist", "--draw", "--rounds", "3"], "--rounds is for training"),
        (["fig1-mnist", "--draw"], "out holds none of these cells; make some with `cfedavg reproduce NAME"),
    ],
)
def test_bad_input(words: list[str], sentence: str, tmp_path: Path) -> None:
    found = invoked(*words, "--out", str(tmp_path / "out"))
    assert isinstance(found.exception, InputError)
    assert sentence in str(found.exception)
    assert "draw" not in found.output
    assert not list(tmp_path.glob("out/*.*"))


def test_everything_is_drawn_without_names(tmp_path: Path) -> None:
    write_cells(tmp_path, "fig2-mnist", "paper")
    found = invoked("--draw", "--scale", "paper", "--out", str(tmp_path))
    assert found.exit_code == 0, found.exception
    # Figures that share cells with it are drawn too.
    assert {"fig1-mnist.png", "fig2-mnist.png", "fig2-mnist.md"} <= {path.name for path in tmp_path.iterdir()}


def test_drawing_trains_nothing(mine: str, tmp_path: Path) -> None:
    carried_out(mine, tmp_path, only=["*-p2-none-*"])
    (tmp_path / "mine.png").unlink()
    before = (tmp_path / "mine.md").read_bytes()
    found = drawn(mine, tmp_path)
    assert found.exit_code == 0, found.exception
    assert (tmp_path / "mine.png").exists()
    assert (tmp_path / "mine.md").read_bytes() == before
    assert list(values(tmp_path)) == ["embedded-p2-none-seed0"]


def judged(*words: str) -> Any:
    return CliRunner().invoke(app, ["claims", *words], catch_exceptions=True)


def test_claims_are_judged_from_cells(tmp_path: Path) -> None:
    """Some lines of the paper's at one p: claims about others are not judged."""
    (tmp_path / "out" / CELLS).mkdir(parents=True)
    cells = experiment.load("fig1-mnist").cells("paper", 1)
    for line, best in (("none", 0.98), ("rd0.9", 0.97), ("rd0.99", 0.6)):
        name, values = f"mnist-p10-{line}-seed0", {"test_accuracy": [0.5, best, best, best, best, best]}
        archive.write(tmp_path / "out" / CELLS, Entry(name, cells[name], values, MADE))
    words = tmp_path / "words.toml"
    words.write_text('title = "Mine"\nintro = "So it is."\n[why]\nrd-worsens-mnist = "it sends less."\n')
    found = judged(str(tmp_path / "out"), "--out", str(tmp_path / "c.md"), "--words", str(words))
    assert found.exit_code == 0, found.exception
    count = len([line for line in (tmp_path / "c.md").read_text().splitlines() if "**" in line])
    assert f"{count} claims judged from 3 cells, {len(CLAIMS) - count} not run yet" in found.output
    text = (tmp_path / "c.md").read_text()
    assert text.startswith("# Mine\n\nSo it is.\n\n")
    (line,) = (line for line in text.splitlines() if "it sends less." in line)
    assert "p=10: from 97.00 to 60.00" in line
    assert "**holds where it was run**: it sends less." in line


def test_claims_of_beginnings_say_so_and_are_not_compared_with_whole_runs(tmp_path: Path) -> None:
    cells = write_cells(tmp_path, "fig1-mnist", "paper", rounds=40)
    write_cells(tmp_path, "fig4-fashion", "paper")
    found = judged(str(tmp_path), "--out", str(tmp_path / "c.md"))
    assert found.exit_code == 0, found.exception
    verdicts = {line.split(" | ")[0]: line for line in (tmp_path / "c.md").read_text().splitlines()}
    row = verdicts["| at the same comp, top-k does better than random dropping."]
    assert row.split(" | ")[1:3] == ["does not hold, after 40 of 100 rounds (8≈)", "does not hold (8≈)"]
    name = "mnist-p1-topk0.9-seed0"
    entry = archive.read(tmp_path / CELLS / f"{name}.json")
    archive.write(tmp_path / CELLS, dataclasses.replace(entry, settings=cells[name]))
    assert judged(str(tmp_path), "--out", str(tmp_path / "c.md")).exit_code == 0
    text = (tmp_path / "c.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith("| MNIST: at the same comp"))
    assert row.count("(runs of 40 and 100 rounds are not compared) ?") == row.count("not compared") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("title = ", "`words`: cannot read"),
        ('[why]\nnone-such = "x"', "there is no claim 'none-such'"),
        ("title = 5", "must hold texts: title, intro and, by claim, [why]"),
        ("intro = 5", "must hold texts"),
        ("why = 5", "must hold texts"),
        ("[why]\nrd-worsens-mnist = 5", "must hold texts"),
        ('titel = "Mine"', "has an unknown key 'titel'; known are title, intro, why"),
        ("[wy]", "has an unknown key 'wy'"),
    ],
)
def test_bad_words(text: str, sentence: str, tmp_path: Path) -> None:
    write_cells(tmp_path, "fig2-mnist", "paper")
    (tmp_path / "words.toml").write_text(text)
    found = judged(str(tmp_path), "--words", str(tmp_path / "words.toml"), "--out", str(tmp_path / "c.md"))
    assert sentence in str(found.exception)
    assert not found.output
    assert not (tmp_path / "c.md").exists()


def test_bad_files_of_claims(tmp_path: Path) -> None:
    write_cells(tmp_path, "fig2-mnist", "paper")
    found = judged(str(tmp_path), "--words", "words.toml")
    assert "`words` needs `out`, the file that the words are for" in str(found.exception)
    found = judged(str(tmp_path), "--out", str(tmp_path / "nowhere" / "c.md"))
    assert "c.md (No such file or directory)" in str(found.exception)
    assert not found.output


def test_help_shows_brackets() -> None:
    assert "[why]" in judged("--help").output


def test_claims_of_nothing(tmp_path: Path) -> None:
    assert "holds no cells of the scale paper; make some with" in str(judged(str(tmp_path)).exception)


def test_cells_of_another_scale_are_not_the_papers(tmp_path: Path) -> None:
    write_cells(tmp_path, "fig2-mnist", "smoke")
    assert "no cells of the scale paper" in str(judged(str(tmp_path)).exception)
    assert judged(str(tmp_path), "--scale", "smoke").exit_code == 0
    write_cells(tmp_path, "fig2-mnist", "smoke", rounds=1000)  # longer than they should be
    assert "no cells of the scale smoke" in str(judged(str(tmp_path), "--scale", "smoke").exception)


def test_cells_hold_json_proper(mine: str, tmp_path: Path) -> None:
    carried_out(mine, tmp_path, only=["*-p2-none-*"])
    (path,) = (tmp_path / CELLS).iterdir()
    table = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(text))
    assert table["values"].keys() <= {*COLUMNS, "diverged"}
