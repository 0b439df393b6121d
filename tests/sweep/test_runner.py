"""Sweeps: cells are run once, stopped and resumed, sealed and drawn."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from cfedavg import Callback, Config, InputError, Start
from cfedavg.cli.commands import app
from cfedavg.sweep import (
    CELLS,
    DamagedCell,
    Grid,
    SealedCell,
    Sweep,
    read_cell,
    read_cells,
    read_table,
    write_cell,
)
from cfedavg.sweep.cells import COLUMNS

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


MADE = {"seconds": 1.5, "version": "0.4.0", "hardware": "an abacus"}


class Speaker(Callback):
    """Keeps what a run says."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def on_message(self, text: str) -> None:
        self.said.append(text)


def grid_of(name: str, **more: Any) -> Grid:
    return Grid.from_table(Path(name).stem, read_table(Path(name)), **more)


def carried_out(
    name: str,
    out: Path,
    minutes: float = math.inf,
    seeds: int = 1,
    only: list[str] | None = None,
    rounds: int | None = None,
    resume: bool = False,
    **typed: Any,
) -> tuple[Sweep, str]:
    """The sweep after a call, and what the call said."""
    said: list[str] = []
    grid = grid_of(name, typed={"device": "cpu", **typed}, rounds=rounds)
    sweep = Sweep([grid], out, tuple(range(seeds)), only or ("*",), said.append)
    sweep.open(resume=resume)
    try:
        sweep.run(command="a test", minutes=minutes, show=lambda *_: nullcontext(Speaker(said)))
    finally:
        Sweep([dataclasses.replace(grid, rounds=None)], out, say=said.append).draw()
    return sweep, "\n".join(said)


def values(out: Path) -> dict[str, Any]:
    return {name: entry.values for name, entry in read_cells(out / CELLS).items()}


def test_a_grid_from_its_first_cell_to_its_picture(mine: str, tmp_path: Path) -> None:
    grid, said = carried_out(mine, tmp_path / "out", seeds=2)
    assert not grid.missing
    assert "0 of 8 cells are done" in said
    assert "embedded-p1-rd-seed1: done, 8 of 8 cells" in said
    entry = read_cell(tmp_path / "out" / CELLS / "embedded-p2-rd-seed1.json")
    assert entry.settings == grid.cells[entry.name][1]
    assert [len(entry.values[key]) for key in COLUMNS if key in entry.values] == [4] * (len(COLUMNS) - 1)
    assert entry.made["command"] == "a test"
    assert entry.made.keys() == {
        "command", "seconds", "together", "version", "torch", "python", "hardware"
    }  # fmt: skip
    assert (tmp_path / "out" / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "mine.md").read_text().count("\n|") >= 5
    assert {path.name for path in (tmp_path / "out" / entry.name).iterdir()} >= {
        "config.toml",
        "metrics.jsonl",
    }
    assert not list(tmp_path.rglob("checkpoint.*")) + list(tmp_path.rglob("residuals"))
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
    monkeypatch.setattr("cfedavg.sweep.runner.time", SimpleNamespace(monotonic=lambda: next(looks)))
    assert not carried_out(mine, tmp_path / "five", minutes=5)[0].missing
    assert carried_out(mine, tmp_path / "half", minutes=0.5)[0].missing


def test_the_time_of_earlier_calls_counts(mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resumed(grid: Grid, name: str, settings: Any, folder: Path, callback: Callback) -> dict[str, Any]:
        callback.on_begin(Start(Config(), None, [{"seconds": 100.0, "round": 0}]))
        callback.on_row({"seconds": 20.0, "round": 1})
        return {"test_accuracy": [0.1, 0.2]}

    monkeypatch.setattr(Grid, "measure", resumed)
    grid, _ = carried_out(mine, tmp_path, precision="bf16")
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
    measure, calls = Grid.measure, itertools.count()

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(Grid, "measure", interrupted)
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
    with pytest.raises(InputError, match="p3; a cell's name is, for example, embedded-p2-"):
        carried_out(mine, tmp_path, only=["p3"], resume=True)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What stands under the figures."""
    made: list[str] = []
    figure = Grid.figure

    def noted(grid: Grid, found: Any, note: str) -> Any:
        made.append(note.rpartition("cfedavg ")[0])
        return figure(grid, found, note)

    monkeypatch.setattr(Grid, "figure", noted)
    return made


def test_the_beginning_of_runs(mine: str, tmp_path: Path, notes: list[str]) -> None:
    """The figure says so."""
    carried_out(mine, tmp_path / "whole")
    grid, _ = carried_out(mine, tmp_path / "cut", rounds=3)
    assert notes == ["", "the first 3 of 4 rounds; "]
    assert {entry.settings["rounds"] for entry in grid.found.values()} == {3}
    whole = values(tmp_path / "whole")["embedded-p1-rd-seed0"]
    cut = values(tmp_path / "cut")["embedded-p1-rd-seed0"]
    assert cut == {name: column[:3] for name, column in whole.items()}
    with pytest.raises(InputError, match=r"holds the first 3 of 4 rounds, .*; set `rounds` to 3, or choose"):
        carried_out(mine, tmp_path / "cut", resume=True)
    carried_out(mine, tmp_path / "whole", rounds=10)  # no longer than they are: nothing is left to do


def write_cells(out: Path, name: str, seeds: int = 1, **changes: Any) -> dict[str, Any]:
    """Cells of a grid that nobody has run."""
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    cells = grid_of(name).cells(range(seeds))
    for cell, settings in cells.items():
        values = {"test_accuracy": [0.1, 0.2], "uplink_bytes": [10, 10]}
        write_cell(out / CELLS, SealedCell(cell, settings | changes, values, MADE))
    return cells


def test_a_figure_of_runs_that_are_cut_in_part(mine: str, tmp_path: Path, notes: list[str]) -> None:
    cells = write_cells(tmp_path, mine)
    for name, rounds in zip(cells, (3, 2, 3), strict=False):
        entry = read_cell(tmp_path / CELLS / f"{name}.json")
        write_cell(tmp_path / CELLS, dataclasses.replace(entry, settings=cells[name] | {"rounds": rounds}))
    assert drawn(mine, tmp_path).exit_code == 0
    assert notes == ["in part the first 2 of 4 rounds, in part the first 3 of 4 rounds; "]


def test_a_figure_in_other_formats(mine: str, tmp_path: Path) -> None:
    cells = write_cells(tmp_path, mine, seeds=2)
    assert drawn(mine, tmp_path, "--format", "pdf", "--format", "csv").exit_code == 0
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert made.keys() == {"mine.toml", "mine.pdf", "mine.csv", "mine.md"}
    assert b"/MediaBox [ 0 0 505.44" in made["mine.pdf"]  # 7 inches
    head, *points = made["mine.csv"].decode().splitlines()
    assert head == "panel,line,x,y,x_value,mean,lowest,highest"
    assert len(points) == len(cells)  # two rounds of each line, whose two seeds are one line
    assert "test_accuracy,2.0,0.2,0.2,0.2" in points[1]


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
    with pytest.raises(DamagedCell):
        values(tmp_path / "out")
    found = invoked(mine, "--out", str(tmp_path / "out"))
    assert "holds 4 of the 4 cells, done or begun; set `resume`" in str(found.exception)
    assert not found.output
    _, said = carried_out(mine, tmp_path / "out", resume=True)
    assert "embedded-p2-rd-seed0.json is damaged: the cell is done again" in said
    assert values(tmp_path / "out") == good


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "config.toml", "metrics.jsonl"])
def test_a_damaged_folder_of_a_cell_is_begun_again(name: str, mine: str, tmp_path: Path) -> None:
    only = ["*-p2-rd-*"]
    carried_out(mine, tmp_path / "good", only=only)
    carried_out(mine, tmp_path / "out", minutes=1e-9, only=only)
    (tmp_path / "out" / "embedded-p2-rd-seed0" / name).write_bytes(b'{"round": 7}\n')
    _, said = carried_out(mine, tmp_path / "out", resume=True, only=only)
    assert "embedded-p2-rd-seed0 is done again from its first round (cannot resume: " in said
    assert values(tmp_path / "out") == values(tmp_path / "good")


def test_a_begun_cell_is_not_thrown_away(mine: str, tmp_path: Path) -> None:
    """Asked for in another precision, or for fewer rounds than are done, it stays as it is."""
    only = ["*-p2-rd-*"]
    for _ in range(2):
        carried_out(mine, tmp_path, minutes=1e-9, only=only, resume=True)
    work = tmp_path / "embedded-p2-rd-seed0"
    before = (work / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match="cannot resume: `precision` is 'float64', but the run in"):
        carried_out(mine, tmp_path, only=only, resume=True, precision="float64")
    with pytest.raises(InputError, match=r"cannot resume: `rounds` is 1, but the run in .* has done 2"):
        carried_out(mine, tmp_path, only=only, rounds=1, resume=True)
    assert (work / "metrics.jsonl").read_bytes() == before


def test_damaged_cells_are_not_drawn(mine: str, tmp_path: Path) -> None:
    write_cells(tmp_path, mine)
    (tmp_path / CELLS / "embedded-p1-none-seed0.json").write_text("{}")
    found = drawn(mine, tmp_path)
    assert found.exit_code == 0, found.exception
    assert "embedded-p1-none-seed0.json is damaged: it is not drawn" in found.output
    assert "| 1 | none | 0 |" in (tmp_path / "mine.md").read_text()


@pytest.mark.parametrize(
    ("there", "difference"), [("rounds = 5", "rounds is 5, not 4"), ("eta = 2.0", "eta is 2.0, not None")]
)
def test_cells_of_other_settings_are_left_alone(
    there: str, difference: str, mine: str, tmp_path: Path
) -> None:
    key, value = there.split(" = ")
    write_cells(tmp_path, mine, **{key: json.loads(value)})
    before = values(tmp_path)
    with pytest.raises(InputError) as caught:
        carried_out(mine, tmp_path, resume=True)
    assert f"holds a cell with other settings ({difference}); choose another folder" in str(caught.value)
    assert values(tmp_path) == before


def test_cells_of_other_settings_are_not_drawn(mine: str, tmp_path: Path) -> None:
    write_cells(tmp_path, mine, eta=2.0)
    found = drawn(mine, tmp_path)
    assert "holds no cell of this sweep; run the sweep without --draw" in str(found.exception)
    assert (
        "not drawn, for their settings are not those of mine: embedded-p2-none-seed0, "
        "embedded-p2-rd-seed0, embedded-p1-none-seed0 and 1 more"
    ) in found.output
    assert not list(tmp_path.glob("mine.png"))


def test_some_cells_are_drawn(mine: str, tmp_path: Path) -> None:
    write_cells(tmp_path, mine, seeds=3)
    for words, seeds in (
        ([], ["3", "3", "3", "3"]),
        (["--seeds", "2"], ["2", "2", "2", "2"]),
        (["--only", "*-p1-*", "--only", "*-p2-rd-seed1"], ["0", "1", "3", "3"]),
    ):
        assert drawn(mine, tmp_path, *words).exit_code == 0
        lines = (tmp_path / "mine.md").read_text().splitlines()[4:]
        assert [line.split(" | ")[2] for line in lines] == seeds
    assert "`only`: no cell's name matches p3" in str(drawn(mine, tmp_path, "--only", "p3").exception)


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
    """So that a kill does not cost all of it; the grid may say how many."""
    seen = list[int]()
    monkeypatch.setattr(
        "cfedavg.sweep.cells.run",
        lambda config, **_: seen.append(config.checkpoint_every) or SimpleNamespace(rows=[]),
    )
    for typed in ({"rounds": 100}, {"rounds": 100, "checkpoint_every": 3}):
        grid = grid_of(mine, typed=typed)
        ((name, settings), *_) = grid.cells([0]).items()
        assert grid.measure(name, settings, tmp_path, Callback()) == {}
    assert seen == [25, 3]


def test_time_left(mine: str, tmp_path: Path) -> None:
    other = dataclasses.replace(grid_of(mine), name="other", prefix="other")
    sweep = Sweep([dataclasses.replace(grid_of(mine, typed={"rounds": 100})), other], tmp_path)
    assert sweep.seconds_left() is None
    names = list(sweep.cells)
    sweep.found[names[0]] = SealedCell(names[0], {}, {}, {"seconds": 10.0})
    assert sweep.seconds_left() == 10.0 * 7
    sweep.found[names[-1]] = SealedCell(names[-1], {}, {}, {"seconds": 20.0})
    assert sweep.seconds_left() == 10.0 * 3 + 20.0 * 3
    begun = tmp_path / names[1]  # a quarter of its 100 rounds are done
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text("".join(f'{{"round": {t}}}\n' for t in range(25)))
    assert sweep.seconds_left() == 10.0 * 2.75 + 20.0 * 3


# The command


def invoked(*words: str) -> Any:
    return CliRunner().invoke(app, ["sweep", *words], catch_exceptions=True)


def drawn(name: str, out: Path, *words: str) -> Any:
    """What the command says of a folder's cells."""
    return invoked(name, "--draw", "--out", str(out), *words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.toml"], "cannot read the grid nowhere.toml (No such file or directory)"),
        ([], "a sweep needs GRID.toml or --vary"),
        (
            ["MINE", "--config", "c.toml"],
            "--config must not be given with GRID.toml",
        ),
        (["MINE", "--precision", "int8"], "`precision` must be float32, float64, tf32 or bf16, got 'int8'"),
        (
            ["MINE", "--draw", "--resume"],
            "--resume must not be given with --draw, which trains nothing",
        ),
        (["MINE", "--draw", "--minutes", "3"], "--minutes must not be given with --draw"),
        (["MINE", "--draw", "--rounds", "3"], "--rounds must not be given with --draw"),
        (["MINE", "--draw"], "out holds no cell of this sweep; run the sweep without --draw"),
        (["MINE", "--only", "p3"], "`only`: no cell's name matches p3"),
    ],
)
def test_bad_input(words: list[str], sentence: str, mine: str, tmp_path: Path) -> None:
    found = invoked(*(mine if word == "MINE" else word for word in words), "--out", str(tmp_path / "out"))
    assert isinstance(found.exception, InputError)
    assert sentence in str(found.exception)
    assert "draw" not in found.output
    assert not list(tmp_path.glob("out/*.*"))


def test_the_command_of_a_sweep_without_a_file_also_draws_it(tmp_path: Path) -> None:
    """Its --rounds are those of the cells, which are drawn as whole runs."""
    words = ["--model", "linear", "--clients", "2", "--rounds", "2", "--vary", "eta=0.5|1"]
    assert invoked(*words, "--out", str(tmp_path)).exit_code == 0
    found = invoked(*words, "--draw", "--format", "svg", "--out", str(tmp_path))
    assert found.exit_code == 0, found.exception
    assert "the first 2 of" not in (tmp_path / "sweep.svg").read_text()


def test_draw_needs_a_folder(mine: str) -> None:
    assert "--draw needs --out" in str(invoked(mine, "--draw").exception)


def test_a_grid_by_the_command(mine: str, tmp_path: Path) -> None:
    """Options win over the base, the cell says by which command it was made, and a page compares all."""
    out = tmp_path / "out"
    words = [
        mine,
        "--seeds",
        "2",
        "--only",
        "*-p2-*",
        "--clients",
        "3",
        "--rounds",
        "2",
        "--vary",
        "eta=0.5|1",
    ]
    found = invoked(*words, "--out", str(out))
    assert found.exit_code == 0, found.exception
    cells = read_cells(out / CELLS)
    assert len(cells) == 8
    cell = cells["embedded-p2-rd-eta0.5-seed1"]
    assert (cell.settings["clients"], cell.settings["rounds"], cell.settings["eta"]) == (3, 2, 0.5)
    command = "cfedavg sweep mine.toml --vary 'eta=0.5|1' --seeds 2 --rounds 2 --clients 3"
    assert sorted(cell.made["command"].split()) == sorted(command.split())
    assert (out / "report.html").exists()
    assert (out / "mine.png").exists()


def test_drawing_trains_nothing(mine: str, tmp_path: Path) -> None:
    carried_out(mine, tmp_path, only=["*-p2-none-*"])
    (tmp_path / "mine.png").unlink()
    before = (tmp_path / "mine.md").read_bytes()
    found = drawn(mine, tmp_path)
    assert found.exit_code == 0, found.exception
    assert (tmp_path / "mine.png").exists()
    assert (tmp_path / "mine.md").read_bytes() == before
    assert list(values(tmp_path)) == ["embedded-p2-none-seed0"]


def test_cells_hold_json_proper(mine: str, tmp_path: Path) -> None:
    carried_out(mine, tmp_path, only=["*-p2-none-*"])
    (path,) = (tmp_path / CELLS).iterdir()
    table = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(text))
    assert table["values"].keys() <= {*COLUMNS, "diverged"}
