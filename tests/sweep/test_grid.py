"""Grids: from TOML and from --vary, which cells they have, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cfedavg import InputError
from cfedavg.sweep import Grid, read_table

LINE = {"name": "a", "label": "A", "compressor": "none"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "key": ({"line": [LINE], "colour": "red"}, "unknown key 'colour'"),
    "no line": ({"title": "x"}, "has no \\[\\[line\\]\\]"),
    "no name": ({"line": [{"label": "a"}]}, "name must be letters, digits, dots and dashes, got None"),
    "no label": ({"line": [{"name": "a"}]}, "the \\[\\[line\\]\\] a: label must be text, got None"),
    "twice": ({"line": [LINE, LINE]}, "cells must have different names, got embedded-a-seed0 twice"),
    "field": ({"line": [LINE | {"k": 1}]}, "the \\[\\[line\\]\\] a has an unknown key 'k'; `cfedavg run -"),
    "base": ({"line": [LINE], "base": {"colour": 1}}, "base has an unknown key 'colour'; `cfedavg run -"),
    "value": ({"line": [LINE | {"rounds": 0}]}, "`rounds` must be 1 or more, got 0"),
    "compressor": ({"line": [LINE | {"compressor": "zip"}]}, "compressor.*zip"),
    "schedule": ({"line": [LINE | {"schedule": "falling"}]}, "schedule.*falling"),
    "code": ({"line": [LINE], "base": {"model": "os:system"}}, "base: `model` 'os:system' would import"),
    "line's code": (
        {"line": [LINE | {"compressor": "os:system(1)"}]},
        "a: `compressor` 'os:system\\(1\\)' would import Python code; set `trust`",
    ),
    "line's name": ({"line": [LINE | {"name": "a/b"}]}, "name must be letters, .*, got 'a/b'"),
    "name of a number": ({"line": [LINE | {"name": 5}]}, "name must be letters, .*, got 5"),
    "label": ({"line": [LINE | {"label": 5}]}, "a: label must be text, got 5"),
    "colour": ({"line": [LINE | {"colour": "red"}]}, "a: colour must be like #0072B2, got 'red'"),
    "title": ({"line": [LINE], "title": 5}, "title must be text, got 5"),
    "no table": ({"line": [LINE], "base": 3}, "base must be a table, got 3"),
    "one line": ({"line": LINE}, "line must be tables, each begun with \\[\\[line\\]\\], got {"),
    "line of text": ({"line": ["a"]}, "line must be tables, .*, got \\['a'\\]"),
} | {
    f"{key} = {value}": ({"line": [LINE], key: value}, f"{key} must be {words}")
    for key, words, values in (
        ("p", "a list of different whole numbers, 1 or more",
         (5, [], [0], [2, -1], [2.0], [True], ["2"], [[2]], [2, 2])),
        ("columns", "a list of some of train_loss", ([], ["nonsense"], [[]], "test_loss")),
        ("over", "a list of some of rounds", ([], ["time"], "rounds")),
        ("seeds", "a whole number between 1 and 1000", (0, 1001, 2.0, True, [1])),
    )
    for value in values
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_grids(name: str) -> None:
    table, words = BAD[name]
    with pytest.raises(InputError, match=f"grid mine.*{words}"):
        Grid.from_table("mine", table)


def test_a_cell_is_one_file_whatever_its_data() -> None:
    made = Grid.from_table("mine", {"line": [LINE], "p": [1], "base": {"dataset": "owner/name"}})
    assert list(made.cells(made.seeds)) == ["owner-name-p1-a-seed0"]


@pytest.mark.parametrize(
    ("table", "seeds"), [({}, (0,)), ({"seeds": 3}, (0, 1, 2)), ({"base": {"seed": 7}}, (7,))]
)
def test_seeds(table: dict[str, Any], seeds: tuple[int, ...]) -> None:
    assert Grid.from_table("mine", {"line": [LINE], **table}).seeds == seeds


def test_vary_is_the_same_grid_from_the_command_line() -> None:
    texts = ["compressor,compressor-down=none|topk(0.99) >> bf16", "seed=0|1"]
    grid = Grid.from_table("sweep", {}, vary=texts)
    cells = grid.cells(grid.seeds)
    assert list(cells) == ["none-seed0", "topk0.99-bf16-seed0", "none-seed1", "topk0.99-bf16-seed1"]
    assert cells["none-seed0"]["compressor_down"] == "none"
    assert [line.label for line in grid.lines] == ["none", "topk(0.99) >> bf16"]
    both = Grid.from_table("mine", {"line": [LINE], "p": [2]}, vary=["clients=5|10"])
    assert list(both.cells([0])) == ["embedded-p2-a-clients5-seed0", "embedded-p2-a-clients10-seed0"]
    assert both.lines[1].label == "A, clients 10"
    assert list(Grid.from_table("sweep", {}, vary=["seed=3|4"]).cells([3])) == ["run-seed3"]


@pytest.mark.parametrize("text", ["seed", "speed=1", "seed=0|0", "compressor=none|topk(1.5)", "seed=a"])
def test_bad_vary(text: str) -> None:
    with pytest.raises(InputError, match=r"`vary`|`compressor`: topk\(1.5\)|`seed`"):
        Grid.from_table("sweep", {}, vary=[text])
    with pytest.raises(InputError, match="`vary` must name seed once, got seed twice"):
        Grid.from_table("sweep", {}, vary=["seed=0|1", "seed=2|3"])
    with pytest.raises(InputError, match=r"^`vary`: 'compress' is not a field; write 'compressor'$"):
        Grid.from_table("sweep", {}, vary=["compressor,compress=none"])


def test_what_is_typed_wins_over_the_base_and_needs_no_trust() -> None:
    table = {"line": [{"name": "a", "label": "A"}], "base": {"local_epochs": 3, "compressor": "os:system"}}
    made = Grid.from_table("mine", table, typed={"local_steps": "2", "compressor": "sign"})
    settings = made.cells([0])["embedded-a-seed0"]
    assert (settings["local_steps"], settings["compressor"]) == ("2", "sign")
    assert "local_epochs" not in settings
    assert settings["precision"] == "float32"  # not part of what a cell is, but recorded


@pytest.mark.parametrize("like", ["a.toml", "./a.toml", "../{folder}/a.toml", "{path}"])
def test_a_grid_like_itself(like: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'like = "{like.format(path=path, folder=tmp_path.name)}"')
    with pytest.raises(InputError, match="`like` must name other grids, but it leads back to this grid"):
        read_table(path)


def test_a_grid_like_another_is_read_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("mine", "mine/models", "elsewhere"):
        (tmp_path / folder).mkdir()
    line = '[base]\nlocal_epochs = 2\nclients = 5\n[[line]]\nname = "a"\nlabel = "a"\n'
    (tmp_path / "mine/models/base.toml").write_text(f'title = "Mine"\n{line}')
    (tmp_path / "mine/own.toml").write_text('like = "models/base.toml"\np = [3]\n[base]\nlocal_steps = "4"\n')
    for folder, name in (("elsewhere", "../mine/own.toml"), ("mine", "own.toml")):
        monkeypatch.chdir(tmp_path / folder)
        found = Grid.from_table("own", read_table(Path(name)))
        assert (found.title, found.p, len(found.lines)) == ("Mine", (3,), 1)
        assert found.base == {"clients": 5, "local_steps": "4"}  # which excludes the epochs


@pytest.mark.parametrize(("text", "words"), [("base = 3", "base must be a table"), ("like = 3", "like must")])
def test_a_grid_is_checked_before_it_is_put_on_another(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text("[base]\nclients = 4\n")
    path = tmp_path / "mine.toml"
    path.write_text(text if "like" in text else f'like = "model.toml"\n{text}')
    with pytest.raises(InputError, match=f"grid mine: {words}"):
        read_table(path)


def test_a_grid_that_is_not_there() -> None:
    with pytest.raises(InputError, match=r"cannot read the grid nowhere\.toml \(No such file"):
        read_table(Path("nowhere.toml"))


def test_lines_have_colours_of_their_own_or_the_next() -> None:
    names = {"none": {"compressor": "none"}, "a": {}, "b": {"colour": "#123456"}, "c": {"feedback": "none"}}
    table = {
        "line": [{"name": name, "label": name, "compressor": "sign", **own} for name, own in names.items()]
    }
    grid = Grid.from_table("mine", table)
    pens = [grid.choose_pen(line) for line in grid.lines]
    assert [pen.colour for pen in pens] == ["#555555", "#0072B2", "#123456", "#D55E00"]
    assert [pen.dashed for pen in pens] == [False, False, False, True]
