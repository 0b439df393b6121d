"""Whole searches on small tasks: what they return, write, resume and refuse."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cfedavg import Config, InputError, Tuned, run, tune
from cfedavg.core.config import read_config
from cfedavg.tuner import plan, race, refine, rung, search, tuner
from cfedavg.tuner.race import Race, Racer
from tests.conftest import Command, blobs, half_square, quadratic

CONFIG = Config(local_steps=5, batch_size=5, eta_local=0.02)
BUDGET = "90kB"


def shorten_searches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "CANDIDATES", (4,))
    patch.setattr(refine, "MOST", 2)


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_searches(monkeypatch)


def searched(out: Path | None, **how: Any) -> Tuned:
    return tune(CONFIG, blobs(12), **{"budget": BUDGET, "minutes": 60, "out": out} | how)


def found(tuned: Tuned) -> list[Any]:
    """Return what the rungs of a search found, without the seconds."""
    return [asdict(each) | {"entries": [timeless(entry) for entry in each.entries]} for each in tuned.rungs]


def timeless(entry: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(entry).items() if name != "seconds"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """A search that nothing interrupts."""
    with pytest.MonkeyPatch.context() as patch:
        shorten_searches(patch)
        return searched(tmp_path_factory.mktemp("whole") / "tune")


def test_the_default_stays_to_the_end_and_is_not_beaten_by_what_is_returned(whole: Tuned) -> None:
    drawn = [[entry.name for entry in each.entries if entry.name[0] != "r"] for each in whole.rungs]
    assert [len(names) for names in drawn] == [5, 2, 2]  # the default is one of the best two
    for each in whole.rungs:
        assert "default" in [entry.name for entry in each.entries]
        assert each.entries == sorted(each.entries, key=lambda entry: -(entry.score or 0))
    assert whole.default_score is not None
    assert whole.score == whole.rungs[-1].entries[0].score >= whole.default_score
    assert whole.config == whole.chosen.apply(CONFIG).replace(rounds=whole.config.rounds, clients=12)


def test_the_chosen_configuration_spends_the_budget(whole: Tuned) -> None:
    result = run(whole.config, blobs(12), draw=False, progress=False)
    assert 0.8 * 90e3 < result.totals.total < 1.05 * 90e3


def test_the_folder_holds_the_configuration_the_table_and_the_picture(whole: Tuned) -> None:
    assert whole.path is not None
    config = read_config(whole.path / "tuned.toml")
    assert all(getattr(config, name) == value for name, value in whole.chosen.changes.items())
    assert config.rounds == whole.config.rounds
    assert (whole.path / "tuned.toml").read_text().startswith(f"# {whole.summary}\n")
    assert (whole.path / "tune.png").read_bytes().startswith(b"\x89PNG")
    table = (whole.path / "rungs.md").read_text()
    assert table.startswith("# Validation accuracy after each rung, for a budget of 90 kB\n")
    assert [table.count(f"\n| {begin}") for begin in ("c", "default", "r")] == [4, 1, 2]
    assert table.count("| chosen |") == 1
    assert not (whole.path / "probe").exists()
    assert repr(whole).splitlines()[-1] == f"  written to {whole.path}"


def test_a_task_from_python_is_not_mistaken_for_named_data(whole: Tuned, cfedavg: Command) -> None:
    assert whole.path is not None
    outcome = cfedavg("run", "--config", whole.path / "tuned.toml")
    assert outcome.code == 2
    assert "its own model and data" in outcome.err


def test_a_finished_search_says_the_same_again(whole: Tuned) -> None:
    again = searched(whole.path, budget=None, minutes=None, resume=True)
    assert found(again) == found(whole)
    assert again.config == whole.config


@pytest.mark.parametrize("rounds", [1, 30, 60])
def test_a_search_that_is_stopped_and_resumed_finds_the_same(
    rounds: int, whole: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after so many rounds of all candidates together."""
    left, on_row = [rounds], Racer.on_row

    def stop(self: Racer, row: dict[str, Any]) -> bool:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return on_row(self, row)

    monkeypatch.setattr(Racer, "on_row", stop)
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "tune")
    assert left[0] == 0
    resumed = searched(tmp_path / "tune", budget=None, minutes=None, resume=True)
    assert found(resumed) == found(whole)
    assert resumed.config == whole.config
    assert whole.path is not None
    texts = [(path / "tuned.toml").read_text() for path in (tmp_path / "tune", whole.path)]
    assert texts[0] == texts[1]


class Clock:
    """A clock that somebody else moves, in the place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_when_the_time_is_over_the_last_whole_rung_decides(
    whole: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, clear = Clock(), Race.clear

    def wait_an_hour(self: Race, done: Any, names: list[str]) -> None:
        clear(self, done, names)
        clock.now += 3600

    with monkeypatch.context() as patch:
        for module in (tuner, search, rung, race, refine):
            patch.setattr(module, "time", clock)
        patch.setattr(Race, "clear", wait_an_hour)
        part = searched(tmp_path / "tune", progress=True)
    drawn = [entry for entry in whole.rungs[0].entries if not entry.name.startswith("r")]
    (only,) = part.rungs
    assert [(e.name, e.score) for e in only.entries] == [(e.name, e.score) for e in drawn]
    assert part.chosen.name == part.rungs[0].entries[0].name
    assert "the time is over in rung 2 of 3: continue with `resume`" in capsys.readouterr().err
    assert 0.5 < part.config.rounds / run_rounds(part) < 1.5
    more = searched(tmp_path / "tune", budget=None, minutes=600, resume=True)
    assert found(more) == found(whole)


def run_rounds(tuned: Tuned) -> int:
    """Return how many rounds of a configuration the budget pays for."""
    rows = run(tuned.config.replace(rounds=60), blobs(12), draw=False, progress=False).rows
    spent = 0
    return sum((spent := spent + row["total_bytes"]) <= 90e3 for row in rows)


def test_candidates_that_train_side_by_side_find_the_same(
    whole: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(race, "how_many", lambda *_: 3)
    assert found(searched(tmp_path / "tune")) == found(whole)


def test_the_time_that_is_left_goes_to_neighbours_of_the_best(whole: Tuned) -> None:
    first = whole.rungs[0]
    assert sum(entry.name.startswith("r") for entry in first.entries) == 2
    for each in whole.rungs:
        assert [entry.place for entry in each.entries] == list(range(1, len(each.entries) + 1))
    tried = [str(candidate) for candidate in whole.candidates.values()]
    assert len(set(tried)) == len(tried) == 7


def mean_error(model: Any, batch: Tensor) -> Tensor:
    return 0.5 * (model.x - batch).square().sum(1)


def test_candidates_that_diverge_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate above 2 every step on this task goes further away; an error is better if it is lower."""
    centres = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
    task = replace(quadratic(centres), loss=half_square, metric=mean_error)
    monkeypatch.setattr(plan, "CANDIDATES", (8,))
    config = Config(eta_local=1.0, local_steps=40, batch_size=1)
    keep = ["compressor", "compressor_down", "server_optimiser", "local_steps"]
    tuned = tune(config, task, budget="60kB", minutes=60, out=tmp_path, keep=keep, validation=centres)
    last = tuned.rungs[0].entries[-1]
    assert last.note.startswith("diverged in round ")
    assert (last.score, last.stays) == (None, False)
    scores = [entry.score for entry in tuned.rungs[-1].entries if entry.score is not None]
    assert scores == sorted(scores)
    assert tuned.metric == "test_mean_error"
    assert f"| {last.note} |" in (tmp_path / "rungs.md").read_text()


def test_a_default_that_diverges_is_no_obstacle(tmp_path: Path) -> None:
    centres = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
    task = replace(quadratic(centres), loss=half_square, metric=mean_error)
    config = Config(eta_local=2.2, local_steps=40, batch_size=1)
    keep = ["compressor", "compressor_down", "server_optimiser", "local_steps"]
    tuned = tune(config, task, budget="60kB", minutes=60, keep=keep, validation=centres)
    assert tuned.default_score is None
    assert "the default diverges" in tuned.summary


def test_simulated_time(tmp_path: Path) -> None:
    config = CONFIG.replace(link="nb-iot", steps_per_second="10")
    tuned = tune(config, blobs(12), budget="40s", minutes=60, keep=["server_optimiser"])
    assert tuned.path is None
    result = run(tuned.config, blobs(12), draw=False, progress=False)
    assert 32 < math.fsum(row["simulated_seconds"] for row in result.rows) < 42
    assert "at 40 s" in tuned.summary


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"budget": None}, "a search needs a `budget`"),
        ({"budget": "1kB"}, r"`budget` must be .* or more, got 1 kB: the first round of 12 clients"),
        ({"budget": "5min"}, "`budget` 5 min is simulated time, which needs `link`"),
        ({"minutes": 0}, "`minutes` must be a number above 0, got 0"),
        ({"minutes": "5"}, "`minutes` must be a number above 0, got '5'"),
        ({"minutes": math.inf}, "`minutes` must be a number above 0, got inf"),
        ({"keep": "compressor"}, "`keep` must list some of"),
        ({"out": None, "resume": True}, "`resume` needs `out`"),
        ({"out": 5}, "`out` must be the path of a folder"),
        ({"resume": 1}, "`resume` must be True or False"),
        ({"progress": "yes"}, "`progress` must be True, False or None"),
    ],
)
def test_bad_input(how: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        searched(**{"out": tmp_path / "tune"} | how)
    assert "\n" not in str(error.value)


def test_bad_tasks(tmp_path: Path) -> None:
    for config, task in ((CONFIG, "a task"), ({"rounds": 5}, None)):
        with pytest.raises(InputError, match="must be a"):
            tune(config, task, budget=BUDGET, out=tmp_path / "tune")  # type: ignore[arg-type]
    assert not (tmp_path / "tune").exists()


def test_another_search_is_not_resumed(whole: Tuned, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds a search already; set `resume`"):
        searched(whole.path)
    with pytest.raises(InputError, match=r"cannot resume: `budget` is 1 MB, but the search in .* has 90 kB"):
        searched(whole.path, budget="1MB", resume=True)
    with pytest.raises(
        InputError, match=r"cannot resume: `keep` is compressor, but the search in .* has none"
    ):
        searched(whole.path, keep=["compressor"], resume=True)
    with pytest.raises(InputError, match=r"cannot resume: `batch_size` is 7, but the run in .* has 5"):
        tune(CONFIG.replace(batch_size=7), blobs(12), budget=BUDGET, out=whole.path, resume=True)
    with pytest.raises(InputError, match=r"cannot resume: the run in .* has another task"):
        tune(CONFIG, blobs(12, seed=1), budget=BUDGET, out=whole.path, resume=True)
    run(CONFIG.replace(rounds=1), blobs(), out=tmp_path, draw=False)
    with pytest.raises(InputError, match="holds a run already; choose another folder"):
        searched(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "cfedavg tune 1"}', '{"format": "other"}'])
def test_a_damaged_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text(text)
    with pytest.raises(InputError, match=r"cannot resume: .*tune\.json cannot be read"):
        searched(tmp_path, resume=True)


SMALL = ["--model", "linear", "--clients", "4", "--local-steps", "2"]


def test_the_command(cfedavg: Command, tmp_path: Path) -> None:
    out = tmp_path / "tune"
    outcome = cfedavg("tune", *SMALL, "--budget", "250kB", "--minutes", "30", "--out", out)
    assert outcome.code == 0, outcome.err
    assert "the plan: the default and 4 candidates train on all 4 clients" in outcome.out
    assert "rung 1/" in outcome.out
    assert "validation accuracy" in outcome.out
    assert f"cfedavg run --config {out / 'tuned.toml'}" in outcome.out
    config = read_config(out / "tuned.toml")
    assert (config.local_steps, config.model, config.clients) == ("2", "linear", 4)  # what was typed is kept
    trained = cfedavg("run", "--config", out / "tuned.toml", "--workers", "1", "--out", tmp_path / "run")
    assert trained.code == 0
    again = cfedavg("tune", "--out", out, "--resume")
    assert again.code == 0
    assert outcome.out[outcome.out.index("changes to the default") :] in again.out


def test_the_command_says_how_to_continue(
    cfedavg: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Racer, row: dict[str, Any]) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Racer, "on_row", stop)
    outcome = cfedavg("tune", *SMALL, "--budget", "1MB", "--out", tmp_path / "tune")
    assert outcome.code == 130
    assert f"stopped: continue with `cfedavg tune --out {tmp_path / 'tune'} --resume`" in outcome.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budget", "10"], "--budget must be bytes above 0"),
        ([], "a search needs a --budget"),
        (["--budget", "1MB", "--keep", "rounds"], "--keep must list some of compressor"),
        (["--budget", "1MB", "--rounds", "5"], "does not have this option of another command"),
        (["--budget", "1MB", "--resume"], "--resume needs --out"),
        (["--budget", "30min"], "which needs --link"),
    ],
)
def test_bad_input_of_the_command(
    words: list[str], sentence: str, cfedavg: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cfedavg("tune", *SMALL, *words)
    assert outcome.code == 2
    assert sentence in outcome.err
    assert "Traceback" not in outcome.err
    assert not list(tmp_path.iterdir())


def test_torchrun_starts_no_search(cfedavg: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = cfedavg("tune", *SMALL, "--budget", "1MB")
    assert (outcome.code, outcome.out) == (2, "")
    assert "torchrun must not start a search" in outcome.err
