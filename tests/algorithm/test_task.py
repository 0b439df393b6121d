"""A task from Python: what users get wrong is said in a sentence, and two tasks are told apart."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from cfedavg import Config, InputError, Task
from cfedavg import run as run_and_draw
from cfedavg.core.config import read_config
from cfedavg.report import read_run, summary
from cfedavg.task import cross_entropy
from tests.conftest import Command

run = partial(run_and_draw, draw=False)
SHORT = Config(rounds=1, local_steps="2", compressor="none", device="cpu")
X, Y = torch.linspace(-1, 1, 24).reshape(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
PAIR = (X, Y)


def task(**changes: Any) -> Task:
    given = {"model": nn.Linear(4, 3), "clients": [PAIR, PAIR], "test": PAIR}
    return Task(**given | changes)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(X[0], 0)])


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> Any:
        raise OSError("the disk is gone")


def detached(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch).detach()


def constant(model: nn.Module, batch: Any) -> Tensor:
    return torch.ones((), requires_grad=True) * 2


def made(**changes: Any) -> Callable[[], Any]:
    return lambda: task(**changes)


def trained(**changes: Any) -> Callable[[], Any]:
    return lambda: run(SHORT, task(**changes))


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # What is given to run
    "run(dict)": (lambda: run({"rounds": 2}), "`config` must be a Config, got dict: write Config"),
    "run(task)": (lambda: run(task()), "`config` must be a Config, got Task"),
    "a model for a task": (lambda: run(SHORT, nn.Linear(4, 3)), "`task` must be a Task, got Linear"),
    "a number for out": (lambda: run(SHORT, task(), out=3), "`out` must be the path of a folder, got 3"),
    "resume without out": (lambda: run(SHORT, task(), resume=True), "`resume` needs `out`"),
    # The model
    "a class": (made(model=nn.Linear), "Task.model must be a .*, got the class Linear; call it and give"),
    "a factory": (made(model=lambda: nn.Linear(4, 3)), "Task.model must be .* function; call it"),
    "no model": (made(model=None), r"Task.model must be a torch.nn.Module, got None"),
    "a lazy model": (lambda: task(model=nn.LazyLinear(3)), "Task.model has a lazy parameter 'weight'"),
    "a frozen model": (
        made(model=nn.Linear(4, 3).requires_grad_(False)),
        "Task.model must have at least one trainable parameter",
    ),
    "a model without parameters": (made(model=nn.ReLU()), "Task.model must have at least one trainable"),
    "a complex model": (
        made(model=nn.Linear(4, 3, dtype=torch.complex64)),
        "Task.model must have real parameters, got complex 'weight'",
    ),
    "a model on meta": (made(model=nn.Linear(4, 3, device="meta")), "Task.model .* the meta device"),
    "a model of another shape": (
        trained(model=nn.Linear(5, 3)),
        r"Task.loss\(model, batch\) fails on a batch of Task.clients\[0\]",
    ),
    # The clients' data
    "no clients": (made(clients=[]), "Task.clients is empty"),
    "clients: None": (made(clients=None), "Task.clients must be a list .* got None"),
    "clients: a dict": (made(clients={0: PAIR}), "Task.clients must be a list .* of type dict"),
    "clients: a loader": (made(clients=DataLoader(TensorDataset(X, Y))), "Task.clients must be a list"),
    "clients: a generator": (made(clients=(PAIR for _ in range(2))), "Task.clients must be a list"),
    "clients: one data set": (made(clients=TensorDataset(X, Y)), "Task.clients must be a list"),
    "clients: one pair": (trained(clients=PAIR), "Task.clients must hold data of the form"),
    "a loader": (
        made(clients=[PAIR, DataLoader(TensorDataset(X, Y))]),
        r"Task.clients\[1\] must be tensors .* torch Dataset.* got an object of type DataLoader",
    ),
    "an iterable data set": (made(clients=[Stream()]), r"Task.clients\[0\] must be .* Stream"),
    "a client without data": (made(clients=[PAIR, None]), r"Task.clients\[1\] .* it holds None"),
    "a path": (made(clients=["mnist.pt"]), r"Task.clients\[0\] .* it holds an object of type str"),
    "lists of numbers": (made(clients=[([[1.0]], [0])]), r"Task.clients\[0\] .* holds .* type float"),
    "a list of samples": (made(clients=[list(zip(X, Y, strict=True))]), r"Task.clients\[0\] .* it holds a"),
    "an array of objects": (
        made(clients=[(np.array(["a", "b"]), Y[:2])]),
        r"Task.clients\[0\] must hold arrays of numbers, got an array of <U1",
    ),
    "different lengths": (
        made(clients=[PAIR, (X, Y[:3])]),
        r"Task.clients\[1\] .* of equal length, got lengths \[3, 6\]",
    ),
    "an empty client": (made(clients=[PAIR, (X[:0], Y[:0])]), r"Task.clients\[1\] has no samples"),
    "labels of float": (
        trained(clients=[(X, Y.float())]),
        "as labels for the default loss, cross_entropy, got float32",
    ),
    "labels of int32": (trained(clients=[(X, Y.int())]), "as labels .* got int32"),
    "labels as a column": (trained(clients=[(X, Y[:, None])]), r"Task.loss\(model, batch\) fails on"),
    "one client's labels": (
        trained(clients=[PAIR, PAIR, (X, Y + 7)]),
        r"Task.loss fails on a batch of client 2 \(IndexError",
    ),
    "NaN": (trained(clients=[(X * torch.nan, Y)]), "NaN or infinite for client 0"),
    "a data set that fails": (
        trained(clients=[Failing()]),
        r"Task.clients\[0\] gives no batch \(OSError: the disk is gone\)",
    ),
    "one data set that fails": (
        trained(clients=[PAIR, Failing()]),
        r"Task.clients\[1\] gives no batch \(OSError",
    ),
    # The loss
    "a loss without gradient": (trained(loss=detached), "must return a number with a gradient"),
    "a loss of nothing": (trained(loss=constant), "depends on no trainable parameter"),
    "a loss that is no function": (made(loss="mse"), r"Task.loss must be a function of \(model, batch"),
    "a class as loss": (made(loss=nn.CrossEntropyLoss), "must be a function .* got the class CrossEntropyLo"),
    "a loss of torch": (trained(loss=nn.CrossEntropyLoss()), r"Task.loss\(model, batch\) fails on a batch"),
    "a loss of one argument": (trained(loss=lambda model: 0), r"Task.loss\(model, batch\) fails .*TypeError"),
    "a loss that is a number": (
        trained(loss=lambda m, b: cross_entropy(m, b).item()),
        r"Task.loss must .* type float",
    ),
    "a loss that is None": (trained(loss=lambda m, b: None), "Task.loss must .* got None"),
    "a loss for each sample": (
        trained(loss=lambda m, b: m(b[0]).sum(-1)),
        r"Task.loss must .* shape \[6\]",
    ),
    # The evaluation
    "a metric that is no function": (made(metric=3), "Task.metric must be a function"),
    "a metric that is None": (
        trained(metric=lambda m, b: None),
        "Task.metric must return .* got NoneType",
    ),
    "a metric of too many": (
        trained(metric=lambda m, b: m(b[0])),
        r"must return 6 numbers, .* shape \[6, 3\]",
    ),
    "a metric that fails": (
        trained(metric=lambda m, b: b["x"]),
        r"Task.metric fails on a batch of Task.test",
    ),
    "a test set of other shape": (trained(test=(X[:, :2], Y)), "Task.model fails on .* Task.test"),
    "a test loader": (made(test=DataLoader(TensorDataset(X, Y))), "Task.test must be .* of type Data"),
    "an empty test set": (made(test=(X[:0], Y[:0])), "Task.test has no samples"),
    "parts without a test set": (made(test=None, test_parts=[[0]]), "Task.test_parts needs Task.test"),
    "parts beyond the test set": (made(test_parts=[[0], [6]]), r"Task.test_parts\[1\] must hold rows"),
    "parts that are no rows": (made(test_parts=[[0.5]]), r"Task.test_parts\[0\] must be a list"),
    "a name that is no text": (made(name=3), "Task.name must be printable text, got 3"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_sentence(name: str, tmp_path: Path) -> None:
    make, words = MISTAKES[name]
    with pytest.raises(InputError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("engine", ["auto", "sequential", "reference", "batched"])
@pytest.mark.parametrize("loss", [detached, constant])
def test_every_engine_refuses_a_loss_without_gradient(engine: str, loss: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Task\.loss"):
        run(SHORT.replace(engine=engine), task(loss=loss), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_gradient_that_is_zero_is_fine() -> None:
    found = run(SHORT, task(loss=lambda model, batch: 0 * cross_entropy(model, batch)))
    assert found.final["delta_norm2"] == 0


@pytest.mark.parametrize("value", [0.25, 1, np.float32(0.25), True, np.full(6, 0.5), torch.tensor(2)])
def test_a_metric_may_be_any_number(value: Any) -> None:
    def score(model: nn.Module, batch: Any) -> Any:
        return value

    assert run(SHORT, task(metric=score)).final["test_score"] == float(np.mean(np.asarray(value)))


def test_arrays_of_numpy_are_data() -> None:
    arrays = (X.numpy(), Y.numpy())
    found, same = (run(SHORT, task(model=blank(), clients=[each] * 2)) for each in (arrays, PAIR))
    assert torch.equal(found.model.weight, same.model.weight)  # type: ignore[arg-type]


def blank() -> nn.Linear:
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


# Names and fingerprints


class Own:
    """Samples of a user's own class."""

    fixed = True

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, rows: np.ndarray) -> Any:
        return self.x[torch.from_numpy(rows)], Y[torch.from_numpy(rows)]


def subset(rows: list[int]) -> Any:
    return Subset(TensorDataset(X, Y), rows)


def my_loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, batch)


class Pictures(Dataset[Any]):
    """A data set of a user's own class."""

    def __init__(self, x: Tensor, labels: Tensor = Y) -> None:
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], int(self.labels[row])


class Changing(Own):
    """Samples that are fixed but have no attribute `fixed`."""

    fixed = False


class Rarely(Pictures):
    """Samples that change at random, but hardly ever."""

    def __init__(self, x: Tensor, draw: Callable[[], float]) -> None:
        super().__init__(x)
        self.draw = draw

    def __getitem__(self, row: int) -> Any:
        return (-self.x[row] if self.draw() < 1e-9 else self.x[row]), int(Y[row])


def scaled(factor: float) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return factor * cross_entropy(model, batch)

    return loss


def times(model: nn.Module, batch: Any, factor: float) -> Tensor:
    return factor * cross_entropy(model, batch)


OTHERS: dict[str, dict[str, Any]] = {
    "a number": {"clients": [PAIR, (X.index_fill(0, torch.tensor(3), 0.5), Y)]},
    "a label": {"clients": [PAIR, (X, Y.flip(0))]},
    "the order of clients": {"clients": [(X[:2], Y[:2]), (X[2:], Y[2:])]},
    "the structure": {"clients": [{"x": X, "y": Y}] * 2},
    "a dtype": {"clients": [(X.double(), Y)] * 2},
    "rows of a Subset": {"clients": [subset([0, 1]), subset([2, 3])]},
    "other rows of a Subset": {"clients": [subset([0, 1]), subset([2, 4])]},
    "a class of the user's": {"clients": [Own(X), Own(X)]},
    "its numbers": {"clients": [Own(X), Own(X + 1)]},
    "a Dataset of the user's": {"clients": [Pictures(X), Pictures(X)]},
    "numbers of that": {"clients": [Pictures(X), Pictures(X + 1)]},
    "labels of that": {"clients": [Pictures(X), Pictures(X, Y.flip(0))]},
    "a Subset of that": {"clients": [Subset(Pictures(X), [0, 1])] * 2},
    "numbers of a Subset of that": {"clients": [Subset(Pictures(X + 1), [0, 1])] * 2},
    "samples that may change": {"clients": [Changing(X), Changing(X)]},
    "their numbers": {"clients": [Changing(X), Changing(X + 1)]},
    "a lambda": {"loss": lambda model, batch: cross_entropy(model, batch) + 1},
    "another operator": {"loss": lambda model, batch: cross_entropy(model, batch) - 1},
    "another number": {"loss": lambda model, batch: cross_entropy(model, batch) + 2},
    "another name": {"loss": lambda model, batch: my_loss(model, batch) + 1},
    "a lambda in a lambda": {"loss": lambda model, batch: (lambda x: x + 1)(my_loss(model, batch))},
    "another in a lambda": {"loss": lambda model, batch: (lambda x: x + 2)(my_loss(model, batch))},
    "a default": {"loss": lambda model, batch, factor=1: cross_entropy(model, batch) * factor},
    "another default": {"loss": lambda model, batch, factor=2: cross_entropy(model, batch) * factor},
    "a closure": {"loss": scaled(0.5)},
    "another value in it": {"loss": scaled(0.25)},
    "a partial": {"loss": partial(times, factor=0.5)},
    "another argument of it": {"loss": partial(times, factor=0.25)},
    "the test set": {"test": (X + 1, Y)},
    "no test set": {"test": None},
    "the structure of the model": {"model": nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1))},
    "a probability in the model": {"model": nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2))},
    "the layout": {"model": nn.Linear(4, 3, bias=False)},
    "the loss": {"loss": my_loss},
    "a version": {"version": "2"},
}


def test_fingerprints_tell_tasks_apart() -> None:
    found = [task().fingerprint, *(task(**changes).fingerprint for changes in OTHERS.values())]
    assert len(set(found)) == len(found)
    assert all(task(**changes).fingerprint == print_ for changes, print_ in
               zip([{}, *OTHERS.values()], found, strict=True))  # fmt: skip


def test_weights_and_names_are_not_in_the_fingerprint() -> None:
    assert task(name="mine").fingerprint == task().fingerprint
    assert (task(name="mine").name, task().name) == ("mine", "Linear on 2 clients")
    versioned = task(version="digits"), task(version="digits", clients=[(X + 1, Y), PAIR])
    assert versioned[0].fingerprint == versioned[1].fingerprint


def test_a_fingerprint_is_the_same_in_another_process() -> None:
    code = (
        "from tests.algorithm.test_task import OTHERS, task; "
        "print([task(**changes).fingerprint for changes in OTHERS.values()])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str([task(**changes).fingerprint for changes in OTHERS.values()])


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_data_that_draw_at_random_count_by_class_and_size(draw: Callable[[], float]) -> None:
    """Random data do not count in the fingerprint, and reading them does not move the generators."""
    first, other, smaller = (task(clients=[Rarely(x, draw)] * 2) for x in (X, X + 1, X[:5]))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    expected = [draw(), draw()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    assert first.fingerprint == other.fingerprint != smaller.fingerprint
    assert [draw(), draw()] == expected


def test_large_data_are_hashed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = task().fingerprint
    monkeypatch.setattr("cfedavg.core.fingerprint._BYTES", 1)
    assert task().fingerprint != whole  # four of six rows
    assert task(test=(X + 1, Y)).fingerprint != task().fingerprint


def test_named_data_have_the_same_fingerprint_for_every_seed() -> None:
    from cfedavg.data.tasks import build_task

    config = Config(model="linear")
    first, other_seed, other_deal = (
        build_task(each).fingerprint for each in (config, config.replace(seed=1), config.replace(iid=True))
    )
    assert first == other_seed != other_deal


# In the folder, in reports, on resume


def test_what_a_task_overrides_is_not_written_down(tmp_path: Path) -> None:
    mine = task(name="ramps")
    run(SHORT.replace(dataset="mnist", dirichlet=0.3, clients=50), mine, out=tmp_path / "a")
    text = (tmp_path / "a" / "config.toml").read_text()
    of_model, of_data = mine.fingerprint.split("-")
    for name in ("mnist", "cnn", "dirichlet", "classes_per_client", "iid", "data_dir"):
        assert f"\n{name} =" not in text
        assert f"# {name} =" not in text
        assert f'"{name}"' not in text
    config = read_config(tmp_path / "a" / "config.toml")
    assert config.dataset == f"(a task from Python: ramps, {of_data})"
    assert config.model == f"(a task from Python: Linear, {of_model})"
    assert (config.clients, config.names_task) == (2, False)
    engine = (tmp_path / "a" / "engine.txt").read_text()
    assert engine == "batched on cpu, float32: the model is small\n"


def test_runs_of_different_tasks_are_not_seeds_of_one(tmp_path: Path) -> None:
    tasks = {"a": task(), "b": task(clients=[(X + 1, Y), PAIR]), "c": task(model=nn.Linear(4, 3, bias=False))}
    for name, each in tasks.items():
        for seed in (0, 1) if name == "a" else (2,):
            run(SHORT.replace(seed=seed), each, out=tmp_path / f"{name}{seed}")
    paths = [tmp_path / name for name in ("a0", "b2", "a1", "c2")]
    for order in (paths, paths[::-1]):
        rows = summary([read_run(path) for path in order])
        assert sorted(row.seeds for row in rows) == [(0, 1), (2,), (2,)]
        assert len({row.label for row in rows}) == 3
        assert all("Linear" in row.label for row in rows)


def test_a_resume_needs_the_same_task(tmp_path: Path) -> None:
    run(SHORT, task(), out=tmp_path)
    for other, what in ((task(clients=[PAIR, (X + 1, Y)]), "dataset"), (task(loss=my_loss), "model")):
        with pytest.raises(InputError, match=f"cannot resume: the run in .* has another task: its {what} is"):
            run(SHORT.replace(rounds=2), other, out=tmp_path, resume=True)
    assert len(run(SHORT.replace(rounds=2), task(), out=tmp_path, resume=True).rows) == 2


def test_a_resume_needs_the_same_frozen_values(tmp_path: Path) -> None:
    first, other = (nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)) for _ in range(2))
    assert task(model=first).fingerprint == task(model=other).fingerprint
    run(SHORT, task(model=first), out=tmp_path)
    with pytest.raises(
        InputError, match=r"cannot resume: .* holds another model: .* or frozen values differ"
    ):
        run(SHORT.replace(rounds=2), task(model=other), out=tmp_path, resume=True)


def test_a_folder_without_a_fingerprint_reports_and_goes_on(tmp_path: Path) -> None:
    run(SHORT, task(), out=tmp_path)
    old = read_config(tmp_path / "config.toml").replace(dataset="(a task from Python)")
    text = replace(old, model=old.dataset).to_toml() + "iid = true\nclasses_per_client = 0\n"
    (tmp_path / "config.toml").write_text(text.replace("\nclasses_per_client = 0", ""))
    assert summary([read_run(tmp_path)])[0].seeds == (0,)
    assert len(run(SHORT.replace(rounds=2), task(), out=tmp_path, resume=True).rows) == 2


def test_runs_without_a_fingerprint_are_never_seeds_of_one(tmp_path: Path) -> None:
    for seed in range(3):
        run(SHORT.replace(seed=seed), task(), out=tmp_path / f"run{seed}")
        if seed:
            old = replace(
                read_config(tmp_path / f"run{seed}" / "config.toml"), dataset="(a task from Python)"
            )
            (tmp_path / f"run{seed}" / "config.toml").write_text(replace(old, model=old.dataset).to_toml())
    rows = summary([read_run(tmp_path / f"run{seed}") for seed in range(3)])
    assert [row.seeds for row in rows] == [(0,), (1,), (2,)]
    assert [row.label.endswith("task unknown") for row in rows] == [False, True, True]
    assert len({row.label for row in rows}) == 3


def test_the_command_cannot_resume_what_python_made(tmp_path: Path, cfedavg: Command) -> None:
    run(SHORT, task(name="ramps"), out=tmp_path / "a")
    for arguments in (("--resume", "--out", tmp_path / "a"), ("--config", tmp_path / "a" / "config.toml")):
        outcome = cfedavg("run", *arguments)
        assert outcome.code == 2
        assert "(a task from Python: ramps," in outcome.err
        assert "`cfedavg.run(config, task, out=..., resume=True)`" in outcome.err


def test_the_reason_of_an_engine_stays_in_the_folder(tmp_path: Path) -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else super().forward(2 * x)

    run(SHORT, task(model=Branching(4, 3)), out=tmp_path)
    text = (tmp_path / "engine.txt").read_text()
    assert text.startswith("sequential on cpu, float32: clients cannot step together: the model (Branching)")


def test_a_resume_keeps_what_engines_did_before(tmp_path: Path) -> None:
    for rounds in (1, 3, 3):  # the last has nothing left to do
        run(SHORT.replace(rounds=rounds), task(), out=tmp_path, resume=True)
    line = "batched on cpu, float32: the model is small\n"
    assert (tmp_path / "engine.txt").read_text() == f"{line}after round 1: {line}"
    (tmp_path / "engine.txt").unlink()
    run(SHORT.replace(rounds=4), task(), out=tmp_path, resume=True)
    assert (tmp_path / "engine.txt").read_text() == f"after round 3: {line}"
