"""Shakespeare made again: the grids, the chosen rate, when a run reaches the target, verdicts and page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cfedavg import Config
from cfedavg.sweep import CELLS, SealedCell, read_cells, write_cell
from paper.shakespeare import __main__ as shakespeare
from paper.shakespeare import experiment, table
from paper.shakespeare.table import Reached, Row

MADE = {"seconds": 60.0, "together": 2, "version": "0.5.0", "hardware": "an abacus"}
RATES = {"e1": 1.47, "e5": 0.681}


def test_the_published_numbers() -> None:
    published = experiment.read("published")
    assert (published["target"], published["fedsgd"]) == (0.54, 3906)
    assert published["rounds"] == {"e1": 164, "e5": 152}


@pytest.mark.parametrize("name", experiment.NAMES)
def test_the_grids(name: str) -> None:
    cells = experiment.load(name, RATES).cells([0])
    for cell, settings in cells.items():
        config = Config.from_dict(settings)
        assert (config.client_column, config.participation, config.batch_size) == ("play,role", 0.1, 10)
        assert (config.model, config.sequence_length) == ("char_lstm", None), cell  # None: 80
        assert (config.update, config.weighting, config.local_optimiser) == ("sum", "samples", "sgd")
        assert config.local_epochs == (1 if "-e1-" in cell else 5)
        assert (config.compressor == config.compressor_down == "none") == (name != "compressed")
    assert (
        list(cells)[:2]
        == {
            "search": ["shakespeare-search-e1-0.316-seed0", "shakespeare-search-e1-0.681-seed0"],
            "dense": ["shakespeare-e1-1.47-none-seed0", "shakespeare-e5-0.681-none-seed0"],
            "compressed": ["shakespeare-e1-1.47-default-seed0", "shakespeare-e1-1.47-thinner-seed0"],
        }[name]
    )
    assert len(cells) == {"search": 8, "dense": 2, "compressed": 4}[name]


def test_the_default_is_the_packages() -> None:
    variant = experiment.read("grid")["variant"]["default"]
    assert (variant["compressor"], variant["compressor_down"]) == (Config.compressor, Config.compressor_down)


def made(name: str, settings: dict[str, Any], curve: list[float | None], size: int = 100) -> SealedCell:
    values = {"test_accuracy": curve, "total_bytes": [size] * len(curve)}
    return SealedCell(name, settings, values, MADE)


@pytest.mark.parametrize(
    ("curve", "rounds", "count"),
    [
        ([0.2, 0.5, 0.6], 2.4, 3),  # in the third round, 0.4 of the way
        ([0.2, 0.54], 2.0, 2),
        ([0.5, 0.2, 0.58], 2.5, 3),  # a step back does not count
        ([0.5, None, 0.58], 2.5, 3),
        ([0.6], 0.9, 1),  # from 0
        ([0.2, 0.53], math.inf, math.inf),
    ],
)
def test_when_a_run_reaches_the_target(curve: list[float | None], rounds: float, count: float) -> None:
    reached = table.reach(made("a", {"seed": 3}, curve), 0.54)
    assert reached.rounds == pytest.approx(rounds)
    assert (reached.seed, reached.bytes) == (3, 100 * count)


def search_cells(best: dict[str, float]) -> dict[str, SealedCell]:
    """Return the cells of a search in which `best` are the best rates."""
    return {
        name: made(name, each, [0.1, 0.5 if each["eta_local"] == best[name.split("-")[2]] else 0.3])
        for name, each in experiment.load("search", None).cells([0]).items()
    }


def test_the_best_rate_is_chosen() -> None:
    found = search_cells(RATES)
    assert experiment.choose_rates(found) == RATES
    name = "shakespeare-search-e1-1.47-seed0"
    values = found[name].values | {"diverged": "the loss is NaN"}
    lost = found | {name: SealedCell(name, found[name].settings, values, MADE)}
    assert experiment.choose_rates(lost)["e1"] != 1.47
    assert experiment.choose_rates({n: c for n, c in found.items() if n != name}) == {"e5": 0.681}
    short = made(name, found[name].settings | {"rounds": 2}, [0.1])
    assert experiment.choose_rates(found | {name: short}) == {"e5": 0.681}


def whole(rounds: dict[str, int], sizes: dict[str, int], seeds: int = 3) -> dict[str, SealedCell]:
    """Return all cells: a run reaches 54% in `rounds`, by local work; a round sends `sizes`, by variant."""
    found = search_cells(RATES)
    for grid, count in (("dense", seeds), ("compressed", 1)):
        for name, settings in experiment.load(grid, RATES).cells(range(count)).items():
            _, work, _, variant, _ = name.split("-")
            curve: list[float | None] = [0.54 * t / rounds[work] for t in range(1, rounds[work] + 1)]
            found[name] = made(name, settings, curve, sizes[variant])
    return found


def test_a_page_of_cells() -> None:
    sizes = {"none": 1_000_000, "default": 62_500, "thinner": 100_000}
    found = whole({"e1": 180, "e5": 190}, sizes)
    assert table.verdicts(found) == {
        "rounds, E = 1": "met: 180.0 rounds, 1.10 times the published 164, bar 1.2",
        "rounds, E = 5": "missed: 190.0 rounds, 1.25 times the published 152, bar 1.2",
        "bytes, E = 1": "met: 16.0 times fewer bytes with the default, bar 15",
        "bytes, E = 5": "met: 16.0 times fewer bytes with the default, bar 15",
    }
    text = table.page(found)
    assert "| E = 1 | none | 1.47 | 3 | 164 | 180.0, 180.0, 180.0 | 180 MB, 180 MB, 180 MB | – |" in text
    assert "| E = 5 | 2% | 0.681 | 1 | – | 190.0 | 19 MB | 10.0 |" in text
    assert "| E = 1 | 30.00% | 30.00% | 50.00% | 30.00% |" in text
    assert f"All {len(found)} runs took {len(found) / 2:.1f} minutes on an abacus." in text
    assert "edge" not in text


def test_what_is_missing_is_said() -> None:
    assert set(table.verdicts({}).values()) == {"not run"}
    found = whole({"e1": 180, "e5": 190}, {"none": 10, "default": 1, "thinner": 1}, seeds=2)
    verdicts = table.verdicts(found)
    assert verdicts["rounds, E = 1"] == "open: 2 of 3 seeds"
    assert verdicts["bytes, E = 1"] == "missed: 10.0 times fewer bytes with the default, bar 15"
    found = {name: cell for name, cell in found.items() if "thinner" not in name}
    assert table.verdicts(found)["bytes, E = 1"].startswith("open: 10.0 times")
    edge = search_cells({"e1": 0.316, "e5": 3.16})
    assert "E = 1: the best rate, 0.316, is at the edge of the grid." in table.page(edge)
    assert "E = 5: the best rate, 3.16, is at the edge of the grid." in table.page(edge)


def test_a_run_that_does_not_reach_the_target() -> None:
    never = Reached(0, math.inf, math.inf)
    assert table.judge_rounds(Row("e1", "none", 1, 1, (never,))) == "missed: a seed did not reach the target"
    plain = Row("e1", "none", 1, 1, (Reached(0, 100, 1e9),))
    lost = Row("e1", "default", 1, 1, (never,))
    assert table.judge_bytes([plain, lost], "e1") == "missed: no compressed run reached the target"
    assert table.saving(Row("e1", "default", 1, 1, (Reached(1, 100, 1e9),)), plain) == 0  # another seed


def test_the_page_is_made_of_the_cells() -> None:
    found = shakespeare.cells_of_scale(shakespeare.HERE / "results")
    assert found == read_cells(shakespeare.HERE / "results" / CELLS)
    assert (shakespeare.HERE / "table.md").read_text() == table.page(found)


def write_roles(folder: Path) -> None:
    """Write a small folder of texts by role."""
    folder.mkdir()
    for split, lines in (("train", 4), ("test", 1)):
        rows = [
            (f"play{i % 2}", f"role{i}", "to be or not to be: " * 4) for i in range(6) for _ in range(lines)
        ]
        columns = dict(zip(("play", "role", "text"), map(list, zip(*rows, strict=True)), strict=True))
        pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")


def test_a_cell_is_run(tmp_path: Path) -> None:
    write_roles(tmp_path / "shakespeare")
    words = ["--scale", "smoke", "--out", str(tmp_path / "out"), "--device", "cpu", "--only", "*-e1-0.316-*"]
    assert shakespeare.main(["run", "search", *words, "--data-dir", str(tmp_path)]) == 0
    (cell,) = read_cells(tmp_path / "out" / CELLS).values()
    assert cell.values["test_accuracy"][-1] > 0
    assert cell.made["command"] == (
        "python -m paper.shakespeare run search --scale smoke --device cpu --data-dir DIR"
    )


@pytest.mark.slow
def test_a_search_and_a_run_to_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_roles(tmp_path / "shakespeare")
    words = ["--scale", "smoke", "--out", str(tmp_path / "out"), "--device", "cpu"]
    words += ["--data-dir", str(tmp_path), "--seeds", "1"]
    assert shakespeare.main(["run", "dense", *words]) == 2
    assert "dense needs the rates that `run search` finds" in capsys.readouterr().err
    assert shakespeare.main(["run", "search", "compressed", *words]) == 0
    cells = read_cells(tmp_path / "out" / CELLS)
    assert len(cells) == 8 + 4
    assert all(len(cell.values["total_bytes"]) == 3 for name, cell in cells.items() if "search" in name)
    assert any("compressed --scale smoke --seeds 1" in cell.made["command"] for cell in cells.values())
    page = tmp_path / "page.md"
    assert (
        shakespeare.main(["draw", "--scale", "smoke", "--out", str(tmp_path / "out"), "--page", str(page)])
        == 0
    )
    assert page.read_text().count("%") > 8
    assert shakespeare.main(["run", "all", *words]) == 2
    assert "NAME must be one of search, dense, compressed" in capsys.readouterr().err


def test_a_run_ends_at_the_target() -> None:
    stops = [shakespeare.UntilTarget().on_row({"round": 0, "test_accuracy": x}) for x in (0.53, 0.54)]
    assert stops == [False, True]
    assert shakespeare.UntilTarget().on_row({"round": 0}) is False


def test_cells_of_other_settings_are_left_out(tmp_path: Path) -> None:
    (tmp_path / CELLS).mkdir()
    name, cell = next(iter(search_cells(RATES).items()))
    write_cell(tmp_path / CELLS, cell)
    assert list(shakespeare.cells_of_scale(tmp_path)) == [name]
    write_cell(tmp_path / CELLS, made(name, cell.settings | {"batch_size": 20}, [0.1]))
    assert not shakespeare.cells_of_scale(tmp_path)
