"""The grid of feedbacks and compressors: its plan, its measures, and its pages, made of the cells."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cfedavg import Callback, Config, Layout, encode, parse
from cfedavg.models import build_model
from cfedavg.sweep import CELLS, SealedCell, read_cell, read_cells, write_cell
from paper.feedback import __main__ as feedback
from paper.feedback import experiment, measures, page, pictures
from paper.feedback.experiment import Experiment
from paper.feedback.measures import Cost, Outcome

HERE = Path(feedback.__file__).parent
REAL = Path(os.environ.get("CFEDAVG_DATA") or Path(__file__).parents[3] / "shared" / "data")
Capture = pytest.CaptureFixture[str]
SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32)}


def grids(scale: str) -> dict[str, Experiment]:
    return {grid.name: grid for grid in experiment.load(scale)}


# The plan


def test_each_scale_has_every_line() -> None:
    """All feedbacks with the default compressor, and at least one of each kind of compressor."""
    for scale in experiment.SCALES:
        for grid in grids(scale).values():
            configs = {name: Config.from_dict(each) for name, each in grid.cells([0]).items()}
            default = {str(c.feedback).partition("(")[0] for c in configs.values()
                       if c.compressor == Config.compressor}  # fmt: skip
            assert default == {"ef", "sapef", "ef21", "cafe", "none"}
            kinds = {c.compressor.partition("(")[0].partition(" ")[0] for c in configs.values()}
            assert kinds >= {"topk", "lowrank", "eden", "sign", "qsgd", "rd", "proportional", "threshold"}
            adam = [name for name, c in configs.items() if c.server_optimiser == "adam"]
            assert len(adam) == len(configs) / 2
    assert [grid.base["participation"] for grid in grids("full").values()] == [1.0, 0.1, 0.01] * 2


def test_a_feedback_line_differs_from_the_default_in_its_feedback_alone() -> None:
    for grid in grids("full").values():
        own = grid.line(experiment.DEFAULT).changes
        for name, text in page.FEEDBACKS.items():
            assert {"feedback": "ef", **grid.line(name).changes} == {**own, "feedback": text}, name


@pytest.mark.parametrize("data", experiment.DATA)
def test_the_bytes_of_the_experiments_are_those_of_gaussian_messages(data: str) -> None:
    """And those of one size are nearly equal, but for QSGD: its coder is newer than the archive."""
    grid = grids("cpu")["mnist-10" if data == "mnist" else "cifar10-100"]
    layout = Layout.of(build_model(grid.base["model"], SHAPES[data], 10, 0))
    p = np.random.default_rng(0).standard_normal(layout.d).astype(np.float32)
    for name, about in grid.about.items():
        if "bytes" in about:
            payload = parse(grid.line(name).changes["compressor"]).compress(p, key=7, layout=layout)
            assert len(encode(payload.numpy(), layout)) == about["bytes"], name
    for size in pictures.SIZES:
        names = grid.names_of_size(size)
        assert len(names) >= 4
        own = [grid.about[name]["bytes"] for name in names if not name.startswith("qsgd")]
        assert max(own) <= 1.2 * min(own)


# The measures


def cell(name: str = "mnist-10-x-seed0", **values: Any) -> SealedCell:
    """A cell of 4 rounds with 2 of 4 clients; each sends 1 byte and downloads 9."""
    settings = {"participation": 0.5, "clients": 4, "seed": 0, "rounds": 4}
    usual = {"test_accuracy": [0.1, 0.2, 0.3, 0.4], "uplink_bytes": [2] * 4, "total_bytes": [20] * 4}
    return SealedCell(name, settings, usual | values, {})


def test_an_accuracy_is_the_mean_of_three_evaluations() -> None:
    found = measures.evaluations(cell(test_accuracy=[0.1, None, 0.2, 0.6, None, 0.4]))
    assert found == [(4, pytest.approx(0.3)), (6, pytest.approx(0.4))]
    assert measures.evaluations(cell(test_accuracy=[0.1, 0.2])) == []
    assert measures.final_accuracy(cell(test_accuracy=[0.1, 0.2])) == 0
    assert measures.final_accuracy(cell()) == pytest.approx(0.3)
    assert measures.final_accuracy(cell(diverged="not finite in round 5")) == 0


def test_the_target_is_a_share_of_no_compression() -> None:
    assert measures.choose_target([cell(test_accuracy=[0.8, 0.8, 0.8])]) == 0.76
    assert measures.choose_target([cell(test_accuracy=[0.8] * 3), cell(test_accuracy=[0.9] * 3)]) == 0.80
    assert measures.choose_target([]) is None


def test_the_cost_is_what_was_sent_until_the_target() -> None:
    own = cell(first_download_bytes=[18, 9, 0, 9])
    assert measures.cost(own, 0.2 - 1e-9, []) == Cost(3, 60, 33)
    assert measures.cost(own, 0.3 - 1e-9, []) == Cost(4, 80, 44)
    assert measures.cost(own, 0.31, []) == Cost(math.inf, math.inf, math.inf)


def test_first_downloads_without_compression_are_counted_by_another_cell_of_the_seed() -> None:
    """2, 1, 0 and 1 new clients; their compressed first downloads differ a little."""
    other = cell(first_download_bytes=[1000, 497, 0, 503])
    strange = dataclasses.replace(other, settings=other.settings | {"seed": 1},
                                  values=other.values | {"first_download_bytes": [1000] * 4})  # fmt: skip
    assert measures.first_downloads(cell(), [cell(), strange, other]) == [18, 9, 0, 9]
    assert measures.first_downloads(other, []) == [1000, 497, 0, 503]


def test_first_downloads_of_a_real_run(tmp_path: Path) -> None:
    """Of 4 clients, 2 a round: as many whole models as there are clients that ever took part."""
    grid = grids("smoke")["mnist-50"]
    names = [f"mnist-50-{name}-seed0" for name in ("none", "default")]
    found = {}
    for name in names:
        settings = grid.cells([0])[name]
        found[name] = SealedCell(
            name, settings, grid.measure(name, settings, tmp_path / name, Callback()), {}
        )
    plain, other = (found[name] for name in names)
    whole = plain.values["uplink_bytes"][0] // 2
    first = measures.first_downloads(plain, [plain, other])
    assert first[0] == 2 * whole
    assert sum(first) in (3 * whole, 4 * whole)
    assert measures.message_sizes(plain) == (whole, whole)
    up, down = measures.message_sizes(other)
    assert 0 < up < whole / 50
    assert 0 < down < whole / 50


def outcome(name: str, total: float, final: float = 0.5) -> Outcome:
    return Outcome(name, 1, final, 1.0, 1.0, Cost(10, total, total))


def of(*each: Outcome) -> dict[str, Outcome]:
    return {own.name: own for own in each}


def test_who_is_best_close_and_on_the_frontier() -> None:
    found = of(outcome("a", 100, 0.4), outcome("b", 120, 0.6), outcome("c", 130, 0.5), outcome("d", 140, 0.7),
               outcome("e", math.inf, 0.9), outcome("a-adam", 50, 0.3))  # fmt: skip
    assert [each.name for each in measures.rank(found)] == ["a-adam", "a", "b", "c", "d"]
    assert measures.best_three(found) == ["a", "b", "c"]
    del found["a-adam"]
    assert [each.name for each in measures.pareto(found)] == ["a", "b", "d"]


def test_which_lines_deserve_more_seeds() -> None:
    """Those with at most 1.25 times the default's bytes that end at most 1.5 points behind it."""
    default = outcome("default", 100, 0.5)
    found = of(default, outcome("a", 125, 0.485), outcome("b", 126, 0.9), outcome("c", 10, 0.484),
               outcome("d", 10, 0.6), outcome("e", math.inf, 0.9), outcome("none", 900))  # fmt: skip
    assert measures.close_lines(found) == ["none", "default", "d", "a"]
    assert measures.close_lines(of(outcome("default", math.inf), outcome("a", 10))) == ["none", "default"]


def test_a_line_reaches_the_target_if_all_seeds_do() -> None:
    good, bad = cell(first_download_bytes=[0] * 4), cell(test_accuracy=[0.1] * 4)
    assert measures.judge_line("x", [good, good], 0.3 - 1e-9, []).cost == Cost(4, 80, 80)
    assert not measures.judge_line("x", [good, bad], 0.3 - 1e-9, []).reached


@pytest.mark.parametrize(
    ("total", "final", "beats"),
    [(95, 0.5, True), (96, 0.9, False), (50, 0.495, True), (50, 0.494, False), (math.inf, 0.9, False)],
)
def test_when_a_line_beats_the_default(total: float, final: float, beats: bool) -> None:
    own, default = outcome("x", total, final), outcome("default", 100, 0.5)
    assert page.beats_default(own, default, "total") is beats
    half = dataclasses.replace(own, cost=own.cost._replace(later=own.cost.total / 2))
    assert page.beats_default(half, default, "later") is (total < math.inf and final >= 0.495)


def test_verdicts_name_who_misses_the_target() -> None:
    grid = grids("cpu")["mnist-10"]
    lost = outcome("ef21", math.inf, 0.3)
    found = of(outcome("default", 100), outcome("sapef", 90, 0.6), lost, outcome("eden", 70))
    assert page.feedback_verdict(found) == (
        "Feedbacks with the default compressor, fewest bytes first: `sapef(0.5)` (90 B, 60.0%), "
        "`ef` (100 B, 50.0%); not reached by `ef21` (30.0%)."
    )
    doubt = "default, feedback sapef(0.5) (0.9 of them, +10.0 points, one seed cannot tell)."
    text = f"In all bytes, the default is beaten by EDEN, 1 bit (0.7 of them, +0.0 points); {doubt}"
    assert page.default_verdict(grid, found).startswith(text)
    del found["sapef"], found["eden"]
    assert page.default_verdict(grid, found).startswith("In all bytes, the default is beaten by no line.")
    assert page.family_verdict(grid, found, "wide") == "No wide messages were run."
    assert page.family_verdict(grid, found, "thin").endswith("final accuracy: top-k (100 B, 50.0%).")


def test_a_wish_is_granted_by_a_line_that_reaches_the_target() -> None:
    grid = grids("cpu")["mnist-10"]
    found = of(
        outcome("none", 90, 0.9), outcome("default", 100), outcome("cafe", 300), outcome("eden", math.inf)
    )
    wishes = {wish: page._choose(grid, found, may, want).partition(":")[0] for wish, may, want in page.WISHES}
    assert wishes["the fewest bytes, up and down"] == "no compression"
    assert wishes["the highest final accuracy"] == wishes["the fewest rounds"] == grid.label("default")
    assert wishes["no memory on clients"] == "default, feedback cafe"


# The command


def write_cells(out: Path, grid: Experiment, *names: str) -> dict[str, SealedCell]:
    """Cells that nobody has run: each line needs 10 bytes a round more than the line before."""
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    made = {"seconds": 1.5, "version": "0.4.0", "hardware": "an abacus"}
    for place, name in enumerate(names):
        full = f"{grid.name}-{name}-seed0"
        values = {"test_accuracy": [0.5] * 4, "uplink_bytes": [10] * 4, "total_bytes": [20 + 10 * place] * 4}
        if name != experiment.PLAIN:
            values["first_download_bytes"] = [5] * 4
        write_cell(out / CELLS, SealedCell(full, grid.cells([0])[full], values, made))
    return read_cells(out / CELLS)


def test_later_stages_follow_from_the_first(tmp_path: Path) -> None:
    grid = grids("smoke")["mnist-50"]
    found = write_cells(tmp_path, grid, "default", "sign", "ef21", "eden", "none")
    (first,) = feedback.plan([grid], {}, "lines")
    assert len(first.cells(first.seeds)) == len(grid.lines) / 2
    (adam,) = feedback.plan([grid], found, "adam")
    assert [name.removeprefix("mnist-50-") for name in adam.cells(adam.seeds)] == [
        "default-adam-seed0", "sign-adam-seed0", "ef21-adam-seed0",
    ]  # fmt: skip
    (seeds,) = feedback.plan([grid], found, "seeds")
    assert [line.name for line in seeds.lines] == ["none", "default"]  # sign takes 1.5 times the bytes
    assert len(seeds.cells(seeds.seeds)) == 6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "mnist-7"], "NAME must be one of mnist-100, mnist-10, mnist-1, cifar10-100"),
        (["run", "--scale", "huge"], "`scale` must be smoke, cpu or full, got 'huge'"),
        (["draw", "--scale", "huge"], "`scale` must be"),
        (["draw"], "holds no cells of the scale smoke or cpu or full; make some with `run`"),
        (["run", "mnist-10", "--stage", "adam"], "needs the cells of mnist-10: run the stage lines first"),
        (["run", "mnist-10", "--data-dir", "nowhere"], "`data_dir`: nowhere is not a folder"),
    ],
)
def test_bad_input(words: list[str], sentence: str, tmp_path: Path, capsys: Capture) -> None:
    assert feedback.main([*words, "--out", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


def test_lines_are_run_resumed_and_drawn(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", "cifar10-100", "--scale", "smoke", "--out", str(tmp_path), "--device", "cpu"]
    assert feedback.main([*words, "--only", "*-none-seed0"]) == 0
    more = [*words, "--only", "*-none-seed0", "--only", "*0-default-seed0"]
    assert feedback.main(more) == 2
    assert "set `resume`" in capsys.readouterr().err
    assert feedback.main([*more, "--resume"]) == 0
    found = read_cells(tmp_path / "smoke" / CELLS)
    assert [name.removeprefix("cifar10-100-") for name in found] == ["default-seed0", "none-seed0"]
    command = "python -m paper.feedback run cifar10-100 --stage lines --scale smoke --device cpu"
    assert {own.made["command"] for own in found.values()} == {command}
    assert feedback.main(["draw", "--out", str(tmp_path)]) == 0
    assert {path.name for path in (tmp_path / "smoke").glob("*.*")} == {
        "page.md", *(f"cifar10-100-{kind}.png" for kind in ("families", "frontier", "target")),
    }  # fmt: skip


# The archive


@pytest.mark.parametrize("scale", experiment.SCALES)
def test_the_page_is_made_of_the_cells(scale: str) -> None:
    """`make paper` again would change no number."""
    out, every = feedback.RESULTS / scale, list(grids(scale).values())
    found = feedback.read_scale(out, every)
    assert found == read_cells(out / CELLS)
    judged = page.judge(every, found)
    drawn = {f"{grid.name}-{kind}.png" for grid, _, _ in judged for kind in feedback.PICTURES}
    assert {path.name for path in out.glob("*.png")} == drawn
    assert (out / feedback.PAGE).exists() == bool(judged)
    if judged:
        assert (out / feedback.PAGE).read_text(encoding="utf-8") == page.write_page(scale, judged, found)


@pytest.mark.parametrize(
    ("doc", "table"), [("compressors", page.family_table), ("parts", page.feedback_table)]
)
def test_the_docs_have_the_tables_of_the_cells(doc: str, table: Callable[[page.Judged], str]) -> None:
    every = list(grids("cpu").values())
    judged = page.judge(every, feedback.read_scale(feedback.RESULTS / "cpu", every))
    assert table(judged) in (HERE.parents[1] / "docs" / f"{doc}.md").read_text(encoding="utf-8")


def test_cells_say_how_they_were_made() -> None:
    for own in (each for scale in experiment.SCALES for each in
                read_cells(feedback.RESULTS / scale / CELLS).values()):  # fmt: skip
        assert own.made["command"].startswith("python -m paper.feedback run ")
        assert "/" not in own.made["command"]


@pytest.mark.skipif(not (REAL / "cifar10").is_dir(), reason="no data sets in $CFEDAVG_DATA or ../shared/data")
def test_a_cell_comes_out_again(tmp_path: Path) -> None:
    """Its first two rounds, to the digits that rounding on another processor leaves alone."""
    name = "cifar10-100-default-seed0"
    old = read_cell(feedback.RESULTS / "cpu" / CELLS / f"{name}.json")
    (grid,) = feedback.find(["cifar10-100"], "cpu", data_dir=str(REAL), device="cpu")
    short = dataclasses.replace(grid, rounds=2)
    again = short.measure(name, short.cells([0])[name], tmp_path / name, Callback())
    for column in ("first_download_bytes", "delta_norm"):
        assert again[column] == pytest.approx(old.values[column][:2], rel=0.01), column
    for column in ("uplink_bytes", "total_bytes"):  # the coder of few levels is newer than the archive
        for now, then in zip(again[column], old.values[column], strict=False):
            assert 0.75 * then < now < 1.01 * then, column
