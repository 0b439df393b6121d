"""Cells that train side by side: each equals its run alone, and no cell takes the others down."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cfedavg import InputError
from cfedavg.core.run_files import read_rows
from cfedavg.data import tasks
from cfedavg.models import MODELS
from cfedavg.simulate.engines.batched import Batched
from cfedavg.simulate.side_by_side import CLIENTS, WEIGHTS, how_many
from cfedavg.simulate.vectorised.batches import Pool
from cfedavg.simulate.vectorised.recorder import Recorder
from cfedavg.sweep import CELLS, Grid, Sweep, read_cells
from tests.sweep.test_runner import Speaker, invoked

HERE = "tests.sweep.test_together"
BASE = {
    "model": "linear", "clients": 4, "local_steps": "3", "batch_size": 60, "rounds": 3, "device": "cpu",
    "engine": "batched", "precision": "float64", "compressor_down": "none",
}  # fmt: skip
# What cells that share a batch may differ in.
DIFFERENT: dict[str, dict[str, Any]] = {
    "plain": {"compressor": "none"},
    "rate": {"compressor": "topk(0.9)", "eta_local": 0.03, "rounds": 3},
    "ragged": {"dirichlet": 0.5, "local_epochs": 1, "compressor": "rd(0.9)", "feedback": "ef(decay=0.9)"},
    "few": {"iid": True, "local_steps": "1..7", "participation": 0.5, "server_optimiser": "momentum(0.9)"},
    "lost": {"feedback": "ef21", "schedule": "decaying", "drop_rate": 0.3, "compressor_down": "topk(0.5)"},
    "more": {"clients": 7, "classes_per_client": 1, "residual_precision": "bf16", "weighting": "samples"},
}


@pytest.fixture(autouse=True)
def _unlisted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """To list a step costs more than the few steps here; the first test and those on a GPU list them."""
    if request.node.originalname not in LISTED and not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(Recorder, "_list", Recorder._flat)


LISTED = ("test_cells_side_by_side_equal_their_runs_alone",)


def grid_of(lines: dict[str, dict[str, Any]], seeds: int = 1, **base: Any) -> Grid:
    table = [{"name": name, "label": name, **changes} for name, changes in lines.items()]
    usual = {name: value for name, value in BASE.items() if name not in base}
    made = Grid.from_table("together", {"base": usual | base, "line": table, "seeds": seeds}, trust=True)
    return made


Show = Callable[[str, int], Any]


def swept(
    grid: Grid,
    out: Path,
    together: int,
    *,
    said: list[str] | None = None,
    show: Show | None = None,
    minutes: float = math.inf,
    resume: bool = False,
) -> Sweep:
    said = [] if said is None else said
    sweep = Sweep([grid], out, say=said.append)
    sweep.open(resume=resume)
    show = show or (lambda *_: nullcontext(Speaker(said)))
    sweep.run(command="a test", together=together, show=show, minutes=minutes)
    return sweep


def assert_equal_cells(one: Path, other: Path, names: list[str] | None = None) -> None:
    """Rows and models agree to 1e-9, all other columns exactly."""
    names = names or [path.stem for path in sorted((one / CELLS).iterdir())]
    for name in names:
        rows, its = (read_rows(folder / name / "metrics.jsonl") for folder in (one, other))
        assert len(rows) == len(its) > 0
        for mine, theirs in zip(rows, its, strict=True):
            assert mine.keys() == theirs.keys()
            for key in mine.keys() - {"seconds"}:
                wanted = None if theirs[key] is None else pytest.approx(theirs[key], rel=1e-9, abs=1e-12)
                assert mine[key] == wanted, (name, key)
        models = [load_file(folder / name / "model.safetensors") for folder in (one, other)]
        torch.testing.assert_close(*models, rtol=1e-9, atol=1e-12)


def together_of(sweep: Sweep) -> set[int]:
    return {cell.made["together"] for cell in sweep.found.values()}


def test_cells_side_by_side_equal_their_runs_alone(tmp_path: Path) -> None:
    """Cells with other seeds, partitions, compressors, rates, steps, clients and rounds share a batch."""
    lines = {name: DIFFERENT[name] for name in ("rate", "ragged", "few", "lost")}
    grid = grid_of(lines, seeds=2, rounds=2)
    assert together_of(swept(grid, tmp_path / "alone", 1)) == {1}
    assert together_of(swept(grid, tmp_path / "all", 8)) == {8}
    some = swept(grid, tmp_path / "some", 3)  # a cell begins when another has ended
    assert max(together_of(some)) == 3
    for folder in ("all", "some"):
        assert_equal_cells(tmp_path / "alone", tmp_path / folder)
        mine, its = (read_cells(tmp_path / each / CELLS) for each in ("alone", folder))
        assert [cell.values.keys() for cell in mine.values()] == [cell.values.keys() for cell in its.values()]
    for cell in some.found:
        text = (tmp_path / "all" / cell / "engine.txt").read_text()
        assert text.startswith("batched on cpu, float64, side by side with other runs: as ")


class Normed(nn.Module):
    """Batch norm mixes the samples of a batch, so that clients with other sizes take steps of their own."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(features, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Normed(math.prod(shape), classes)


def frozen(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model whose first layer is drawn from the seed and never trained."""
    first = nn.Linear(math.prod(shape), 5).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), nn.Linear(5, classes))


def thin(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 3), nn.ReLU(), nn.Linear(3, classes))


def dropping(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(math.prod(shape), classes))


@pytest.mark.parametrize(
    ("model", "optimiser"),
    [("normed", "sgd(momentum=0.5)"), ("thin", "adamw(0.1)"), ("thin", "scaffold >> sgd")],
)
def test_buffers_and_states_of_optimisers(model: str, optimiser: str, tmp_path: Path) -> None:
    """Each run has buffers and control variates of its own; moments and starts begin anew for each client."""
    lines = {name: DIFFERENT[name] for name in ("plain", "ragged", "few")}
    grid = grid_of(lines, model=f"{HERE}:{model}", local_optimiser=f"prox(0.1) >> {optimiser}", rounds=2)
    for together in (1, 3):
        swept(grid, tmp_path / str(together), together)
    assert_equal_cells(tmp_path / "1", tmp_path / "3")


def test_cells_that_cannot_share_run_all_the_same(tmp_path: Path) -> None:
    """Cells with another model, optimiser or batch size share with their own kind; reference runs alone."""
    lines: dict[str, dict[str, Any]] = {
        "a": {}, "b": {"model": "mlp"}, "c": {"batch_size": 5}, "d": {"engine": "reference"},
        "e": {"local_optimiser": "sgd(momentum=0.5)"}, "f": {"eta": 0.5}, "g": {"model": "mlp", "eta": 0.5},
    }  # fmt: skip
    sweep = swept(grid_of(lines), tmp_path / "7", 7)
    found = {name.split("-")[1]: cell.made["together"] for name, cell in sweep.found.items()}
    assert found == {"a": 2, "b": 2, "c": 1, "d": 1, "e": 1, "f": 2, "g": 2}
    swept(grid_of(lines), tmp_path / "1", 1)
    assert_equal_cells(tmp_path / "1", tmp_path / "7")


def test_frozen_values_of_their_own_are_constants_of_a_step(tmp_path: Path) -> None:
    """The seed draws them: cells with the same seed share, cells with other seeds do not."""
    grid = grid_of({"a": {}, "b": {"eta": 0.5}}, seeds=2, model=f"{HERE}:frozen")
    assert together_of(swept(grid, tmp_path / "4", 4)) == {2}
    swept(grid, tmp_path / "1", 1)
    assert_equal_cells(tmp_path / "1", tmp_path / "4")


def test_dropout_is_the_same_again_with_the_same_partners(tmp_path: Path) -> None:
    grid = grid_of({"a": {}, "b": {"eta": 0.5}}, model=f"{HERE}:dropping")
    for folder in ("one", "two"):
        swept(grid, tmp_path / folder, 2)
    assert_equal_cells(tmp_path / "one", tmp_path / "two")


def test_a_cell_that_diverges_ends_alone(tmp_path: Path) -> None:
    lines: dict[str, dict[str, Any]] = {
        "a": {},
        "wild": {"eta": 1e300, "compressor": "none"},
        "b": {"eta": 0.5},
    }
    grid = grid_of(lines, model=f"{HERE}:thin", rounds=4)
    sweep = swept(grid, tmp_path / "3", 3)
    swept(grid, tmp_path / "1", 1)
    assert [name for name, cell in sweep.found.items() if cell.diverged] == ["embedded-wild-seed0"]
    assert_equal_cells(tmp_path / "1", tmp_path / "3", ["embedded-a-seed0", "embedded-b-seed0"])
    mine, its = (read_cells(tmp_path / each / CELLS)["embedded-wild-seed0"].values for each in "13")
    assert mine == its
    assert "diverged" in its


class Stopper(Speaker):
    """Raises an error at a row."""

    def __init__(self, said: list[str], t: int, error: type[BaseException]) -> None:
        super().__init__(said)
        self.t, self.error = t, error

    def on_row(self, row: dict[str, Any]) -> None:
        if row["round"] == self.t:
            raise self.error("no more")


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError])
@pytest.mark.parametrize("at", [0, 2])
def test_a_stop_and_an_error_save_all_cells(error: type[BaseException], at: int, tmp_path: Path) -> None:
    """The cells after the one that is stopped have not done their last round yet; all resume."""
    names, said = ["plain", "rate", "few"], list[str]()
    grid = grid_of({name: DIFFERENT[name] for name in names})
    swept(grid, tmp_path / "whole", 1)

    def show(title: str, rounds: int) -> Any:
        return nullcontext(Stopper(said, 1, error) if names[at] in title else Speaker(said))

    with pytest.raises(error, match="no more"):
        swept(grid, tmp_path / "stopped", 3, show=show, said=said)
    done = [
        len(read_rows(tmp_path / "stopped" / f"embedded-{name}-seed0" / "metrics.jsonl")) for name in names
    ]
    assert done == ([2, 1, 1] if at == 0 else [2, 2, 2])
    assert sum("saving, `resume` goes on from here" in text for text in said) == 3 - (error is InputError)
    with pytest.raises(InputError, match="set `resume`"):
        swept(grid, tmp_path / "stopped", 3)
    assert together_of(swept(grid, tmp_path / "stopped", 3, resume=True)) == {3}
    assert_equal_cells(tmp_path / "whole", tmp_path / "stopped")


def test_pieces_with_other_partners_come_to_the_same(tmp_path: Path) -> None:
    """Each call does one round of each cell that it begins."""
    grid = grid_of({name: DIFFERENT[name] for name in ("plain", "rate", "lost", "more")})
    swept(grid, tmp_path / "whole", 1)
    said: list[str] = []
    for stops in itertools.count():
        together = (3, 2, 4)[stops % 3]
        resume, pieces = stops > 0, tmp_path / "pieces"
        if not swept(grid, pieces, together, minutes=1e-9, resume=resume, said=said).missing:
            break
        assert stops < 30
    assert stops >= 4
    assert any("the time is over: " in text for text in said)
    assert_equal_cells(tmp_path / "whole", tmp_path / "pieces")


def test_a_block_that_does_not_fit_is_halved_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, said = grid_of({name: DIFFERENT[name] for name in ("plain", "ragged", "few")}), list[str]()
    swept(grid, tmp_path / "1", 1)
    real = Recorder.__call__

    def cramped(self: Recorder, stack: Any, *args: Any) -> None:
        if len(stack.losses) > 3:
            raise torch.OutOfMemoryError
        real(self, stack, *args)

    monkeypatch.setattr(Recorder, "__call__", cramped)
    swept(grid, tmp_path / "3", 3, said=said)
    assert [text for text in said if "do not fit" in text] == [
        "10 clients at once do not fit into the memory of cpu: going on with 5",
        "5 clients at once do not fit into the memory of cpu: going on with 3",
    ]
    assert_equal_cells(tmp_path / "1", tmp_path / "3")


def test_a_step_that_fails_later_is_done_one_by_one_by_each_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = grid_of({"a": {}, "b": {"eta": 0.5}}, engine="auto")
    swept(grid, tmp_path / "1", 1)
    real = Batched._advance

    def broken(self: Batched, now: Any) -> None:
        if now.left and now.left[0].request.t == 1:
            now.error = RuntimeError("broken")
        real(self, now)

    monkeypatch.setattr(Batched, "_advance", broken)
    said: list[str] = []
    swept(grid, tmp_path / "2", 2, said=said)
    told = [text for text in said if "sequential where clients of a round cannot step together" in text]
    assert [text.split(":")[0] for text in told] == ["embedded-a-seed0", "embedded-b-seed0"]
    assert_equal_cells(tmp_path / "1", tmp_path / "2")


def test_a_model_that_cannot_be_batched_runs_one_cell_after_another(tmp_path: Path) -> None:
    grid = grid_of({"a": {}, "b": {"eta": 0.5}}, engine="auto", model=f"{HERE}:asking")
    assert together_of(swept(grid, tmp_path / "2", 2)) == {1}
    swept(grid, tmp_path / "1", 1)
    assert_equal_cells(tmp_path / "1", tmp_path / "2")


class Asking(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x.flatten(1))
        return found if found.sum() > 0 else 2 * found


def asking(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Asking(math.prod(shape), classes)


def test_the_data_set_is_loaded_and_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, pools = [], list[Pool]()
    load = tasks.load_any
    monkeypatch.setattr(tasks, "load_any", lambda *args: loads.append(args) or load(*args))
    made = Pool.__init__

    def watched(self: Pool, *args: Any) -> None:
        made(self, *args)
        pools.append(self)

    monkeypatch.setattr(Pool, "__init__", watched)
    swept(grid_of({name: DIFFERENT[name] for name in ("plain", "ragged", "few")}, seeds=2), tmp_path, 6)
    assert len(loads) == 1
    (shared,) = [pool for pool in pools if any(len(samples) == 10_000 for samples, _ in pool._kept.values())]
    assert len(shared._kept) == 1


def test_a_data_set_that_is_too_large_is_held_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    data = tasks.DataSet("embedded")
    clients = [tasks.ClientSamples(data.train, np.arange(start, 10_000, 2000)) for start in range(2)]
    monkeypatch.setattr("cfedavg.simulate.vectorised.batches.free_memory", lambda device: 2**20)
    pool = Pool(torch.device("cpu"), torch.float32)
    found = pool.block(clients).gather(torch.tensor([[0, 4], [3, 1]]), 2)
    assert [len(samples) for samples, _ in pool._kept.values()] == [5, 5]
    expected = [client.batch(np.array(rows)) for client, rows in zip(clients, ([0, 4], [3, 1]), strict=True)]
    assert torch.equal(found[0], torch.stack([batch[0] for batch in expected]))
    assert torch.equal(found[1], torch.stack([batch[1] for batch in expected]))


@pytest.mark.parametrize(
    ("device", "model", "clients", "most", "expected"),
    [
        ("cpu", "linear", 10, 0, 1),
        ("cpu", "linear", 10, 4, 4),
        ("cpu", "cnn", 10, 4, 1),  # trains one client after another
        ("cuda", "lenet", 10, 0, CLIENTS // 10),
        ("cuda", "cnn", 100, 0, WEIGHTS // (582_026 * 100)),
        ("cuda", "resnet18", 100, 0, 1),
        ("cuda", "resnet18", 100, 3, 3),
    ],
)
def test_how_many_cells_fill_a_device(
    device: str, model: str, clients: int, most: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cfedavg.simulate.side_by_side.choose_device", torch.device)
    config = SimpleNamespace(device=device, engine="auto")
    plan: Any = SimpleNamespace(config=config, clients_per_round=clients)
    task: Any = SimpleNamespace(model=MODELS[model]((1, 28, 28), 10))
    assert how_many(plan, task, most) == expected


def test_the_command_trains_cells_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, more = tmp_path / "out", ["--rounds", "2", "--clients", "3", "--device", "cpu"]
    words = ["--model", "linear", "--vary", "eta=0.5|1", "--seeds", "2", "--together", "4", *more]
    found = invoked(*words, "--out", str(out))
    assert found.exit_code == 0, found.exception
    assert {cell.made["together"] for cell in read_cells(out / CELLS).values()} == {4}
    assert "eta0.5-seed0: engine: batched on cpu, float32, side by side with other runs" in found.output
    assert "eta1-seed1: sent " in found.output
    assert found.output.count("train samples unused") == 1  # what all cells say comes once
    found = invoked("--vary", "eta=1|2", "--draw", "--out", str(out), "--together", "2")
    assert "--together must not be given with --draw" in str(found.exception)


def test_time_left_counts_a_share_of_the_time(tmp_path: Path) -> None:
    sweep = swept(grid_of({"a": {}, "b": {"eta": 0.5}}), tmp_path, 2)
    name, cell = next(iter(sweep.found.items()))
    cell.made.update(seconds=30.0, together=2)
    del sweep.found[next(other for other in sweep.found if other != name)]
    assert sweep.seconds_left() == 0.0  # all rounds of the other cell are done
    (tmp_path / "embedded-b-seed0" / "metrics.jsonl").unlink()
    assert sweep.seconds_left() == 15.0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float64", "float32", "bf16"])
def test_side_by_side_on_a_gpu(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 the models agree closely, in lower precisions roughly."""
    monkeypatch.setattr(Recorder, "compiling", precision != "float64")
    lines = {name: DIFFERENT[name] for name in ("plain", "rate", "few")}
    grid = grid_of(lines, model="lenet", seeds=2, device="cuda", precision=precision, batch_size=16)
    said: list[str] = []
    assert together_of(swept(grid, tmp_path / "0", 0, said=said)) == {6}
    assert not any("cannot be recorded" in text or "cannot be compiled" in text for text in said)
    swept(grid, tmp_path / "1", 1)
    if precision == "float64":
        assert_equal_cells(tmp_path / "1", tmp_path / "0")
    mine, its = (read_cells(tmp_path / each / CELLS) for each in "10")
    for name, cell in mine.items():
        for column, allowed in (("uplink_bytes", 0.01), ("train_loss", 0.05)):
            assert cell.values[column] == pytest.approx(its[name].values[column], rel=allowed)


@pytest.mark.gpu
def test_a_stopped_sweep_goes_on_on_a_gpu(tmp_path: Path) -> None:
    grid = grid_of({"a": {}, "b": {"eta": 0.5}}, model="lenet", device="cuda", precision="float64")
    swept(grid, tmp_path / "whole", 0)
    stops = 0
    while swept(grid, tmp_path / "pieces", 0, minutes=1e-9, resume=stops > 0).missing:
        stops += 1
        assert stops < 10
    assert_equal_cells(tmp_path / "whole", tmp_path / "pieces")
