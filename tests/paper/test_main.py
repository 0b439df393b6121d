"""The paper's experiments, and `python -m paper.cfedavg`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from cfedavg import Config
from cfedavg.sweep import CELLS, SealedCell, read_cell, read_cells, write_cell
from paper.cfedavg import __main__ as paper
from paper.cfedavg import experiment
from paper.cfedavg.claims.catalogue import CLAIMS

MADE = {"seconds": 1.5, "version": "0.4.0", "hardware": "an abacus"}


@pytest.mark.parametrize("scale", experiment.SCALES)
def test_a_cell_has_one_meaning(scale: str) -> None:
    """Experiments share cells by their names: whoever has one of a name means the same run."""
    seen: dict[str, Any] = {}
    for name in experiment.names():
        for cell, settings in experiment.load(name, scale).cells(range(2)).items():
            assert seen.setdefault(cell, settings) == settings, (name, cell)
    assert len(seen) > 200


def test_the_paper_scale_is_the_papers() -> None:
    for name in ("fig1-mnist", "fig4-fashion", "fig6-mnist", "fig9-fashion", "fig1-cifar10", "fig3-cifar10"):
        for cell, settings in experiment.load(name).cells([0]).items():
            config = Config.from_dict(settings)
            assert (config.clients, config.batch_size, config.local_epochs) == (100, 64, 10), cell
            assert (config.eta_local, config.eta, config.schedule) == (0.1, 1.0, "constant"), cell
            assert config.rounds == (200 if "cifar" in name else 100), cell
            assert ">>" not in config.compressor, cell  # values in fp32
            assert config.model == ("resnet18" if "cifar" in name else "cnn"), cell


def test_which_cells_there_are() -> None:
    cells = experiment.load("fig1-mnist").cells(range(3))
    assert len(cells) == 4 * 5 * 3
    assert list(cells)[:2] == ["mnist-p10-none-seed0", "mnist-p10-topk0.9-seed0"]
    assert cells["mnist-p1-rd0.99-seed2"]["classes_per_client"] == 1
    without = experiment.load("fig6-mnist").cells([0])["mnist-p5-topk0.99-noef-seed0"]
    assert without["feedback"] == "none"
    one = experiment.load("fig2-mnist").cells([0])["mnist-p5-one-step-seed0"]
    assert (one["local_steps"], one["rounds"], "local_epochs" in one) == ("1", 500, False)
    one = experiment.load("fig2-mnist", "smoke").cells([0])["mnist-p5-one-step-seed0"]
    assert (one["rounds"], one["dataset"], one["clients"]) == (25, "embedded", 10)


def test_work_is_equal_where_it_is_compared() -> None:
    cells = experiment.load("steps").cells([0])
    assert cells["mnist-p2-k50-seed0"]["eta"] == cells["mnist-p2-k5..95-seed0"]["eta"] == 50
    steps = Config.from_dict(cells["mnist-p2-k5..95-seed0"]).per_client("local_steps")
    assert steps is not None
    assert steps.mean() == 50
    speed = Config.from_dict(cells["mnist-p2-deadline-seed0"]).per_client("steps_per_second")
    assert speed is not None
    assert (speed.low + speed.high - 1) / 2 == pytest.approx(50, abs=0.5)  # rounded down, half a step less


def write_cells(out: Path, name: str, scale: str = "paper", **changes: Any) -> dict[str, Any]:
    """Cells of an experiment that nobody has run."""
    (out / CELLS).mkdir(parents=True, exist_ok=True)
    cells = paper.find(name, scale).cells([0])
    for cell, settings in cells.items():
        values = {"test_accuracy": [0.1, 0.2], "uplink_bytes": [10, 10]}
        write_cell(out / CELLS, SealedCell(cell, settings | changes, values, MADE))
    return cells


Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "fig99"], "NAME must be one of fig1-cifar10"),
        (["run", "../fig1-mnist"], ", got '../fig1-mnist'"),
        (["run", "fig1-mnist", "--scale", "huge"], "`scale` must be smoke, small or paper, got 'huge'"),
        (["draw", "--scale", "huge"], "`scale` must be"),
        (["run", "fig1-mnist", "--data-dir", "nowhere"], "`data_dir`: nowhere is not a folder"),
        (["draw", "fig1-mnist"], "holds no cells of the scale paper; make some with `run`"),
        (["claims"], "holds no cells of the scale paper; make some with `run`"),
    ],
)
def test_bad_input(words: list[str], sentence: str, tmp_path: Path, capsys: Capture) -> None:
    assert paper.main([*words, "--out", str(tmp_path / "out")]) == 2
    assert sentence in capsys.readouterr().err


def test_everything_is_drawn_without_names(tmp_path: Path) -> None:
    write_cells(tmp_path, "fig2-mnist")
    assert paper.main(["draw", "--out", str(tmp_path)]) == 0
    # Figures that share cells with it are drawn too.
    assert {"fig1-mnist.png", "fig2-mnist.png", "fig2-mnist.md"} <= {path.name for path in tmp_path.iterdir()}


def test_a_figure_on_other_data_says_so() -> None:
    assert paper.find("fig2-cifar10", "smoke").note == "scale smoke, on embedded digits"
    assert paper.find("fig2-cifar10").note == paper.find("bounds").note == "scale paper"


def test_a_small_study_is_run_resumed_and_drawn(tmp_path: Path, capsys: Capture) -> None:
    words = ["run", "conditions", "--scale", "smoke", "--out", str(tmp_path)]
    assert paper.main([*words, "--only", "*-start-*", "--rounds", "1"]) == 0
    assert paper.main(words) == 2
    assert "set `resume`" in capsys.readouterr().err
    assert paper.main([*words, "--resume"]) == 0
    cells = read_cells(tmp_path / CELLS)
    assert len(cells) == 4
    for cell in cells.values():
        assert cell.settings["rounds"] > 1  # which are the study's own
        assert cell.made["command"].startswith(
            "python -m paper.cfedavg run conditions --scale smoke --seeds 1"
        )
    assert (tmp_path / "conditions.png").read_bytes().startswith(b"\x89PNG")


def test_an_experiment_is_run(tmp_path: Path, capsys: Capture) -> None:
    words = [
        "run",
        "fig2-mnist",
        "--scale",
        "smoke",
        "--only",
        "*-rd0.9-*",
        "--rounds",
        "2",
        "--device",
        "cpu",
    ]
    assert paper.main([*words, "--out", str(tmp_path)]) == 0
    ((name, cell),) = read_cells(tmp_path / CELLS).items()
    assert (name, cell.settings["rounds"]) == ("mnist-p5-rd0.9-seed0", 2)
    assert "round 2: accuracy" in capsys.readouterr().out
    assert (tmp_path / "fig2-mnist.md").exists()


def test_a_cell_of_a_version_that_measured_less_is_done_again(tmp_path: Path, capsys: Capture) -> None:
    """It is as it was written, but figures and claims ask for more."""
    name, settings = next(iter(paper.find("variance", "smoke").cells([0]).items()))
    (tmp_path / CELLS).mkdir()
    write_cell(tmp_path / CELLS, SealedCell(name, settings, {"level": 1.0, "rd": {"extra": 1.0}}, MADE))
    assert paper.main(["draw", "variance", "--scale", "smoke", "--out", str(tmp_path)]) == 2
    assert f"{name}.json lacks the value topk: it is not drawn" in capsys.readouterr().out
    assert paper.main(["claims", "--scale", "smoke", "--out", str(tmp_path)]) == 2
    assert f"the cell {name} lacks the value topk: run this cell again" in capsys.readouterr().err


# Claims


def judged(out: Path, page: Path, *words: str) -> int:
    return paper.main(["claims", "--out", str(out), "--page", str(page), *words])


def test_claims_are_judged_from_cells(tmp_path: Path, capsys: Capture) -> None:
    """Some lines of the paper's at one p: claims about others are not judged."""
    (tmp_path / "out" / CELLS).mkdir(parents=True)
    cells = experiment.load("fig1-mnist").cells([0])
    for line, best in (("none", 0.98), ("rd0.9", 0.97), ("rd0.99", 0.6)):
        name, values = f"mnist-p10-{line}-seed0", {"test_accuracy": [0.5, best, best, best, best, best]}
        write_cell(tmp_path / "out" / CELLS, SealedCell(name, cells[name], values, MADE))
    words, page = tmp_path / "words.toml", tmp_path / "c.md"
    words.write_text('title = "Mine"\nintro = "So it is."\n[why]\nrd-worsens-mnist = "it sends less."\n')
    assert judged(tmp_path / "out", page, "--words", str(words)) == 0
    count = len([line for line in page.read_text().splitlines() if "**" in line])
    said = capsys.readouterr().out
    assert f"{count} claims judged from 3 cells, {len(CLAIMS) - count} not run yet" in said
    assert page.read_text().startswith("# Mine\n\nSo it is.\n\n")
    (line,) = (line for line in page.read_text().splitlines() if "it sends less." in line)
    assert "p=10: from 97.00 to 60.00" in line
    assert "**holds where it was run**: it sends less." in line


def test_claims_of_beginnings_say_so_and_are_not_compared_with_whole_runs(tmp_path: Path) -> None:
    cells = write_cells(tmp_path, "fig1-mnist", rounds=40)
    write_cells(tmp_path, "fig4-fashion")
    page = tmp_path / "c.md"
    assert judged(tmp_path, page) == 0
    verdicts = {line.split(" | ")[0]: line for line in page.read_text().splitlines()}
    row = verdicts["| at the same comp, top-k does better than random dropping."]
    assert row.split(" | ")[1:3] == ["does not hold, after 40 of 100 rounds (8≈)", "does not hold (8≈)"]
    name = "mnist-p1-topk0.9-seed0"
    cell = read_cell(tmp_path / CELLS / f"{name}.json")
    write_cell(tmp_path / CELLS, dataclasses.replace(cell, settings=cells[name]))
    assert judged(tmp_path, page) == 0
    (row,) = (line for line in page.read_text().splitlines() if line.startswith("| MNIST: at the same comp"))
    assert row.count("(runs of 40 and 100 rounds are not compared) ?") == row.count("not compared") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("title = ", "`words`: cannot read"),
        ('[why]\nnone-such = "x"', "[why] must name claims of the catalogue, got 'none-such'"),
        ("title = 5", "title, intro and every entry of [why] must be texts"),
        ("intro = 5", "must be texts"),
        ("why = 5", "must be texts"),
        ("[why]\nrd-worsens-mnist = 5", "must be texts"),
        ('titel = "Mine"', "has an unknown key 'titel'; known are title, intro, why"),
        ("[wy]", "has an unknown key 'wy'"),
    ],
)
def test_bad_words(text: str, sentence: str, tmp_path: Path, capsys: Capture) -> None:
    write_cells(tmp_path, "fig2-mnist")
    (tmp_path / "words.toml").write_text(text)
    assert judged(tmp_path, tmp_path / "c.md", "--words", str(tmp_path / "words.toml")) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "c.md").exists()


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: Capture) -> None:
    write_cells(tmp_path, "fig2-mnist")
    assert judged(tmp_path, tmp_path / "nowhere" / "c.md") == 2
    assert "c.md (No such file or directory)" in capsys.readouterr().err


def test_cells_of_another_scale_are_not_the_papers(tmp_path: Path, capsys: Capture) -> None:
    write_cells(tmp_path, "fig2-mnist", "smoke")
    page = tmp_path / "c.md"
    assert judged(tmp_path, page) == 2
    assert "no cells of the scale paper" in capsys.readouterr().err
    assert judged(tmp_path, page, "--scale", "smoke") == 0
    write_cells(tmp_path, "fig2-mnist", "smoke", rounds=1000)  # longer than they should be
    assert judged(tmp_path, page, "--scale", "smoke") == 2
