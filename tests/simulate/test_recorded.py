"""Recorded steps: a step of one client on tensors that keep their place gives the bits of the plain step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from inspect import getclosurevars
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from cfedavg import Config, InputError, Task
from cfedavg.simulate import engines
from cfedavg.simulate.engines import choose_engine
from cfedavg.simulate.engines.recorded import MOST, Record, Recorded
from cfedavg.simulate.engines.recording_trial import find_fault_in_recording
from cfedavg.simulate.engines.requests import Request, Trained
from cfedavg.simulate.engines.trainers import Sequential, train_client
from cfedavg.simulate.local import PRECISIONS, Vectors, channels_last, reproducible
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised.graphs import record_graph
from cfedavg.task import Batch
from tests.conftest import blobs
from tests.simulate.test_batched import Augmented, Padded, mlp, resumes
from tests.simulate.test_engines import agree, images, seeded
from tests.simulate.test_modules import MODULES, RANDOM, Do, chain, sentences

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:RNN module weights")

CPU = torch.device("cpu")
same = lambda batch: batch  # noqa: E731
# What a recorded step cannot do, or would do wrongly; and what it must be able to do.
AS_IT_IS = {
    "embedding, sparse", "branch", "item", "nonzero", "step counter in Python", "memory", "LSTM, dropout",
    "LSTM, all dropped", "GRU, all dropped", "RNN, all dropped",
}  # fmt: skip
RECORDED = {
    "LSTM", "LSTM, projected", "GRU", "RNN", "conv2d", "batch norm", "layer norm", "attention", "tied",
    "own function", "checkpoint", "rrelu", "spectral norm", "dropout", "encoder, dropout", "step counter",
    "partly frozen", "returns a dict",
}  # fmt: skip


def repeat(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Stands for a recording where there is no GPU: the work itself."""
    return work


WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Tape(TorchDispatchMode):
    """Stands for a CUDA graph: notes the operators of a step, and runs them again on the same tensors.

    Python code does not run again. As on a GPU, an operator whose result Python code reads is an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = args[1] if func is torch.ops.aten.index.Tensor else []
        if func in WAITS or any(mask is not None and mask.dtype == torch.bool for mask in masks):
            raise RuntimeError("operation not permitted when stream is capturing")
        # Another tensor on the same memory: some operators change the shape of their tensor in place.
        given, options = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, given, options, tree_map_only(Tensor, Tensor.detach, out)))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for mine, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(mine, Tensor) and not shares_memory(mine, new):
                    mine.copy_(new)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def imitate(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Record a step on a tape, without a change of the state of the client or the generator."""
    state = getclosurevars(work).nonlocals["step"].func.__self__
    tensors = [*state.parameters, *tree_leaves(state.state), state.total, *(b for *_, b in state._buffers)]
    kept, generator, tape = [each.detach().clone() for each in tensors], torch.get_rng_state(), Tape()
    try:
        with tape:
            work()
    finally:
        torch.set_rng_state(generator)
        with torch.no_grad():
            for mine, before in zip(tensors, kept, strict=True):
                mine.copy_(before)
    return tape.replay


def rehearse(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """As a recording does, run the Python code now; the numbers are lost, since the step is thrown away."""
    work()
    return lambda: None


def setting(task: Task, device: torch.device = CPU, **options: Any) -> tuple[Plan, Vectors]:
    config = Config(**{"clients": len(task.clients), "batch_size": 5, "local_steps": "5"} | options)
    plan = Plan(config.replace(compressor="none"), task)
    return plan, Vectors(copy.deepcopy(task.model).to(device, PRECISIONS[config.precision]))


def recorded(
    plan: Plan, task: Task, vectors: Vectors, record: Record | None = repeat, said: list[str] | None = None
) -> Recorded:
    said = [] if said is None else said
    device = next(vectors.model.parameters()).device
    return Recorded(plan, task, vectors, device, same, said.append, record)


def round_of(trainer: Any, vectors: Vectors, t: int, clients: list[int]) -> list[Trained]:
    x, b = vectors.read()
    where = trainer.plan, trainer.task, t
    return list(
        trainer.train(Request(*where, lambda clients: x, b, clients, lambda some: corrections(x, some)))
    )


def corrections(x: Tensor, clients: list[int]) -> Tensor:
    """c - c_i of some clients; optimisers without control variates do not use it."""
    return torch.stack([0.1 * (client + 1) * x for client in clients])


def assert_same_bits(found: list[Trained], expected: list[Trained]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.clients, mine.K) == (theirs.clients, theirs.K)
        for name in ("x_K", "b_K", "loss"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name


def assert_like_train_client(
    task: Task, prepare: Any = same, record: Record = repeat, **options: Any
) -> None:
    """Two rounds of all clients, recorded and by the plain steps."""
    plan, vectors = setting(task, **options)
    x, b = vectors.read()
    plain = Vectors(copy.deepcopy(vectors.model))
    trainer = Recorded(plan, task, vectors, CPU, prepare, print, record, strict=True)
    clients = range(len(task.clients))
    with reproducible(CPU):
        for t in range(2):
            found = round_of(trainer, vectors, t, list(clients))
            each = corrections(x, [*clients])
            expected = [train_client(plan, task, plain, t, x, b, i, prepare, each[i]) for i in clients]
            assert_same_bits(found, expected)


@pytest.mark.parametrize("name", [*MODULES, *RANDOM])
def test_a_step_in_place_has_the_bits_of_the_step(name: str) -> None:
    assert_like_train_client(sentences((MODULES | RANDOM)[name]))


@pytest.mark.parametrize(
    "optimiser",
    ["sgd(momentum=0.9, nesterov=true)", "clip(0.5) >> adamw(0.1)", "prox(0.5) >> sgd", "scaffold >> sgd"],
)
@pytest.mark.parametrize("precision", ["float32", "float64", "bf16"])
def test_any_optimiser_and_precision(optimiser: str, precision: str) -> None:
    task = sentences(MODULES["partly frozen"])  # which has unused parameters, too
    options = {"local_optimiser": optimiser, "precision": precision, "eta_local": 0.3, "schedule": "decaying"}
    for record in (repeat, imitate):
        assert_like_train_client(task, record=record, **options)


def test_clients_that_differ() -> None:
    """In their numbers of samples and of steps, with a rate for each round."""
    task = blobs(m=5)
    assert_like_train_client(task, local_steps="1..9", schedule="decaying", rounds=4, batch_size=7)
    assert_like_train_client(task, local_epochs=3, local_steps=None, batch_size=6)
    assert_like_train_client(task, deadline=2.0, steps_per_second="1..5", local_steps=None, batch_size=6)


def test_samples_that_change_are_read_in_the_same_order() -> None:
    clients = [Augmented(torch.ones(n, 8), torch.arange(n) % 3) for n in (12, 9)]
    assert_like_train_client(Task(blobs().model, clients))


def test_images_that_are_prepared() -> None:
    assert_like_train_client(images(seeded(mlp), m=2), channels_last)


class Counts:
    """Counts recordings."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        self.made += 1
        return work


def test_every_round_records_its_own_steps() -> None:
    """One for the full batch and one for the short batch, whatever the rounds before recorded."""
    task, count = sentences(MODULES["layer norm"]), Counts()
    plan, vectors = setting(task)
    trainer = recorded(plan, task, vectors, count)
    for t in range(3):
        round_of(trainer, vectors, t, [0, 1, 2])
        assert count.made == 2 * (t + 1)
        assert not trainer._plays


def test_a_round_that_is_broken_off_leaves_nothing() -> None:
    task = sentences(MODULES["layer norm"])
    plan, vectors = setting(task)
    trainer = recorded(plan, task, vectors)
    x, b = vectors.read()
    blocks = trainer.train(Request(plan, task, 0, lambda clients: x, b, [0, 1, 2]))
    next(blocks)
    assert trainer._plays
    blocks.close()
    assert not trainer._plays


def test_few_shapes_are_recorded() -> None:
    task = Task(seeded(lambda: Do(lambda x, a: a(x).mean(1), nn.Linear(8, 6))), [Padded([*range(1, 30)])])
    plan, vectors = setting(task, batch_size=1, local_steps="80")
    trainer, expected = recorded(plan, task, vectors, count := Counts()), recorded(plan, task, vectors, None)
    assert_same_bits(round_of(trainer, vectors, 0, [0]), round_of(expected, vectors, 0, [0]))
    assert count.made == MOST


class Noted(torch.utils.data.Dataset[Any]):
    """Batches that hold more than tensors."""

    def __len__(self) -> int:
        return 6

    def batch(self, rows: np.ndarray) -> Batch:
        return torch.ones(len(rows), 4, 6), "note", torch.zeros(len(rows), dtype=torch.int64)


def test_batches_of_more_than_tensors_are_not_recorded() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert batch[1] == "note"
        return nn.functional.cross_entropy(model(batch[0]), batch[2])

    task = replace(sentences(MODULES["layer norm"]), clients=[Noted(), Noted()], loss=loss)
    plan, vectors = setting(task)
    round_of(recorded(plan, task, vectors, count := Counts()), vectors, 0, [0, 1])
    assert count.made == 0


def broken(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    work()
    raise RuntimeError("the tools are broken")


def test_a_step_that_cannot_be_recorded_runs_as_it_is() -> None:
    """The attempt may have replaced buffers; it is said once, and tried again in the next round."""
    task, said = sentences(MODULES["step counter"]), list[str]()
    plan, vectors = setting(task)

    def fail(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        kept = [p.detach().clone() for p in trainer.state.parameters]
        counter, total = trainer.state.model.get_buffer("steps").clone(), trainer.state.total.clone()
        try:
            return broken(work, device)
        finally:  # a recording runs nothing
            with torch.no_grad():
                for p, value in zip(trainer.state.parameters, kept, strict=True):
                    p.copy_(value)
            trainer.state.total.copy_(total)
            trainer.state._buffers[0][2].copy_(counter)

    trainer, expected = recorded(plan, task, vectors, fail, said), recorded(plan, task, vectors, None)
    for t in range(2):
        assert_same_bits(round_of(trainer, vectors, t, [0, 1]), round_of(expected, vectors, t, [0, 1]))
    told = "the step cannot be recorded (RuntimeError: the tools are broken): it is launched piece by piece"
    assert said == [told]


def test_recorded_steps_make_room() -> None:
    """A step that does not fit beside the recordings runs without them, and so do all later ones."""
    task, said = sentences(MODULES["layer norm"]), list[str]()
    plan, vectors = setting(task)
    failures = [torch.OutOfMemoryError()]

    def full(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        def replay() -> None:
            if failures and len(trainer._plays) == 2:
                raise failures.pop()
            work()

        return replay

    trainer, expected = recorded(plan, task, vectors, full, said), recorded(plan, task, vectors, None)
    for t in range(2):
        assert_same_bits(round_of(trainer, vectors, t, [0, 1]), round_of(expected, vectors, t, [0, 1]))
    assert not trainer._plays
    assert said == ["recorded steps do not fit into the memory of cpu: going on without them"]
    with pytest.raises(InputError, match="not even one client fits"):
        trainer.shrink()


def test_an_error_names_the_client() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if float(batch[0].sum()) > 1e6:
            raise KeyError("too large")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    task = sentences(MODULES["layer norm"])
    large = (torch.full((8, 4, 6), 1e9), torch.zeros(8, dtype=torch.int64))
    task = replace(task, clients=[task.clients[0], large], loss=loss)
    plan, vectors = setting(task)
    with pytest.raises(InputError, match="fails on a batch of client 1"):
        round_of(recorded(plan, task, vectors), vectors, 0, [1])


# The trial before a run


def fault(task: Task, device: torch.device = CPU, record: Record = repeat, **options: Any) -> str:
    plan, vectors = setting(task, device, **options)
    return find_fault_in_recording(task, plan.config, vectors, device, same, record)


@pytest.mark.parametrize("name", [*MODULES, *RANDOM])
def test_what_can_be_recorded(name: str) -> None:
    """On a tape; and then all rounds have the bits of the plain steps."""
    task = sentences((MODULES | RANDOM)[name])
    reason = fault(task, record=imitate)
    assert bool(reason) == (name in AS_IT_IS), reason
    if not reason:
        assert_like_train_client(task, record=imitate, local_optimiser="sgd(momentum=0.9)")


class Fickle(nn.Linear):
    """Draws from a generator that no seed repeats."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1)) * np.random.default_rng().random()


class Draws(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(1)) * random.random()


class Grows(nn.Module):
    """Has a buffer of another shape after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat((self.seen, x.mean().detach()[None]))
        return self.body(x.mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "record", "reason"),
    [
        (MODULES["embedding, sparse"], repeat, "'parts.0' (Embedding) has a sparse gradient, whose size"),
        (RANDOM["LSTM, dropout"], repeat, "'parts.0' (LSTM) draws dropout from a state of its own, which"),
        (MODULES["step counter in Python"], rehearse, "a step changes the attribute 'steps', which a rec"),
        (Draws, rehearse, "the model draws with Python's or NumPy's generator"),
        (Fickle, repeat, "the model (Fickle) computes other numbers in every run"),
        (Grows, repeat, "a step changes the shape or the dtype of the buffer 'seen'"),
        (MODULES["GRU"], rehearse, "the model (Do) computes other numbers in a recorded step"),
        (MODULES["GRU"], broken, "the model (Do) fails in a recorded step (RuntimeError: the tools are"),
    ],
)
def test_what_cannot_be_recorded(make: Any, record: Record, reason: str) -> None:
    assert fault(sentences(make), record=record).startswith(reason)


def test_the_trial_leaves_generators_as_they_were() -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()  # type: ignore[union-attr]
    assert fault(sentences(RANDOM["dropout"])) == ""
    after = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()  # type: ignore[union-attr]
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])


def test_too_little_memory_for_a_recording() -> None:
    def full(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        raise torch.OutOfMemoryError

    assert fault(sentences(MODULES["GRU"]), record=full) == "the memory is too small for it"


def test_a_batch_of_one_sample_is_explained_by_the_run() -> None:
    clients = [(torch.randn(6, 4, 6), torch.zeros(6, dtype=torch.int64))] * 2
    assert fault(replace(sentences(MODULES["batch norm"]), clients=clients)) == ""


@pytest.mark.parametrize("reason", ["", "the model waits"])
def test_a_gpu_gets_recorded_steps_where_the_trial_allows_it(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "find_fault_in_recording", lambda *_: reason)
    monkeypatch.setattr(engines, "Recorded", lambda *_: "recorded")
    plan, vectors = setting(task := blobs())
    said: list[str] = []
    found = engines._record_or_launch(plan, task, vectors, CUDA, same, said.append)
    assert found == (None if reason else "recorded")
    told = ["the step cannot be recorded (the model waits): it is launched piece by piece"]
    assert said == (told if reason else [])
    assert engines._record_or_launch(plan, task, vectors, CPU, same, said.append) is None


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines record steps on a tape."""

    def tape(plan: Plan, task: Task, vectors: Vectors, device: torch.device, prepare: Any, say: Any) -> Any:
        return Recorded(plan, task, vectors, device, prepare, say, imitate)

    monkeypatch.setattr(engines, "_record_or_launch", tape)


def randomly() -> nn.Module:
    return chain(nn.Linear(6, 6), nn.RReLU(), nn.Dropout(0.2), width=24)


RESUMED = Config(
    engine="sequential", rounds=4, clients=3, local_steps="2..6", batch_size=5, compressor="topk(0.5)",
    local_optimiser="adamw(0.1)", schedule="decaying", sample_iterate=True,
)  # fmt: skip


def test_resume_with_steps_on_a_tape_is_bitwise(taped: None, tmp_path: Path) -> None:
    resumes(RESUMED.replace(device="cpu"), sentences(randomly), tmp_path)
    assert (tmp_path / "whole/engine.txt").read_text().startswith("sequential with recorded steps on cpu")


@pytest.mark.parametrize("name", ["own function", "checkpoint", "spectral norm", "LSTM, projected"])
def test_rounds_on_a_tape_are_those_of_the_reference(name: str, taped: None) -> None:
    work = {"local_steps": "6", "batch_size": 5, "local_optimiser": "sgd(momentum=0.9)"}
    agree(sentences(MODULES[name]), "sequential", "cpu", compressor="none", **work)


# On a GPU

CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, "float32") for name in (*MODULES, *RANDOM)] + [(name, "bf16") for name in sorted(RECORDED)],
)
def test_a_recorded_step_has_the_bits_of_the_step_on_a_gpu(name: str, precision: str) -> None:
    """Where the step itself has the same bits twice: some kernels add up in any order."""
    task = sentences((MODULES | RANDOM)[name])
    reason = fault(task, CUDA, record_graph, precision=precision)
    assert reason if name in AS_IT_IS else not (reason and name in RECORDED), reason
    torch.rand(4, device=CUDA)  # also after a recording that failed
    torch.cuda.empty_cache()
    if reason:
        return
    plan, vectors = setting(task, CUDA, precision=precision)
    x, b = vectors.read()
    plain = Vectors(copy.deepcopy(vectors.model))
    trainer = Recorded(plan, task, vectors, CUDA, same, print, strict=True)
    with reproducible(CUDA, precision):
        for t in range(2):
            found = round_of(trainer, vectors, t, [0, 1, 2])
            expected, again = (
                [train_client(plan, task, plain, t, x, b, i) for i in (0, 1, 2)] for _ in range(2)
            )
            if all(map(torch.equal, *([e.x_K for e in f] for f in (expected, again)))):
                assert_same_bits(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["own function", "checkpoint", "spectral norm", "LSTM, projected", "branch"])
def test_recorded_rounds_are_those_of_the_reference(name: str) -> None:
    task, work = sentences(MODULES[name]), {"local_steps": "6", "batch_size": 5, "compressor": "none"}
    agree(task, "sequential", "cuda", local_optimiser="sgd(momentum=0.9)", **work)


@pytest.mark.gpu
def test_dropout_under_checkpoint_is_not_recorded() -> None:
    """Its second forward pass must draw what the first one drew."""

    def drop(x: Tensor, a: nn.Module) -> Tensor:
        return checkpoint(lambda y: nn.functional.dropout(a(y), 0.5), x.mean(1), use_reentrant=False)  # type: ignore[no-any-return]

    reason = fault(sentences(lambda: Do(drop, nn.Linear(6, 6))), CUDA, record_graph)
    assert reason == "the model (Do) computes other numbers in a recorded step"


@pytest.mark.gpu
def test_a_recording_that_fails_leaves_torch_as_it_was() -> None:
    x, drawn = torch.ones(4, device=CUDA), list[Tensor]()

    def draw() -> None:
        drawn.append(torch.rand(4, device=CUDA) + x)

    def wait() -> None:
        draw()
        x.sum().item()

    draw()
    good = record_graph(draw, CUDA)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            record_graph(wait, CUDA)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.empty_cache()
        torch.cuda.manual_seed(3)
        expected = torch.rand(4, device=CUDA) + x
        torch.cuda.manual_seed(3)
        good()
        assert torch.equal(drawn[1], expected)
        again = record_graph(draw, CUDA)
        again()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_resume_with_recorded_steps_is_bitwise(precision: str, tmp_path: Path) -> None:
    resumes(RESUMED.replace(device="cuda", precision=precision), sentences(randomly), tmp_path)


@pytest.mark.gpu
def test_the_engine_says_what_is_not_recorded() -> None:
    said: list[str] = []
    for name, trainer in (("own function", Recorded), ("branch", Sequential)):
        task = sentences(MODULES[name])
        config = Config(clients=3, device="cuda", engine="sequential", local_steps="4", batch_size=5)
        engine = choose_engine(config, Plan(config, task), task, say=said.append)
        assert isinstance(engine.trainer, trainer)  # type: ignore[attr-defined]
        engine.close()
    (sentence,) = [each for each in said if not each.startswith("engine: ")]
    assert sentence.startswith("the step cannot be recorded (the model (Do) fails in a recorded step")
