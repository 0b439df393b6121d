"""Compiled steps: what travels to the compiler process, what is kept on disk, and the process itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from cfedavg.optimise.local import SGD, Fixed
from cfedavg.simulate.vectorised import artifacts, compiler
from cfedavg.simulate.vectorised.artifacts import (
    Compilation,
    Like,
    graph_to_rows,
    lift_constants,
    rows_to_graph,
)
from cfedavg.simulate.vectorised.convolution import IMAGES, from_stored
from cfedavg.simulate.vectorised.recorder import Recorder, _Inputs
from cfedavg.simulate.vectorised.step import Stack, Step

FROZEN = torch.tensor([1.0, 2.0, 3.0])


def step(x: Tensor, eta: Tensor) -> None:
    """Change x in place, as a step of clients does, with a constant and a list of tensors among its nodes."""
    grads = torch.stack([x.sin(), x * FROZEN]).sum(0, keepdim=True)[0]
    x.sub_(eta * grads.to(torch.float32))


def listed() -> Any:
    fake = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)
    return fake(torch.ones(2, 3), torch.tensor(0.1))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFEDAVG_CACHE", str(tmp_path))
    monkeypatch.setattr(artifacts, "_LOADED", {})


def test_a_graph_survives_the_way_to_another_process() -> None:
    graph = lift_constants(listed()).graph
    again = rows_to_graph(graph_to_rows(graph))
    assert graph_to_rows(again) == graph_to_rows(graph)
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)
    graph(a, torch.tensor(0.1), FROZEN)
    again(b, torch.tensor(0.1), FROZEN)
    assert torch.equal(a, b)


def test_constants_become_arguments() -> None:
    found = lift_constants(listed())
    assert [c.tolist() for c in found.constants] == [FROZEN.tolist()]
    x, expected = torch.ones(2, 3), torch.ones(2, 3)
    found(x, torch.tensor(0.1))
    step(expected, torch.tensor(0.1))
    assert torch.equal(x, expected)


def test_a_key_depends_on_all_that_the_compiler_reads() -> None:
    graph, inputs = lift_constants(listed()), [torch.ones(2, 3), torch.tensor(0.1)]
    key = Compilation(graph, inputs).key
    assert Compilation(lift_constants(listed()), [torch.zeros(2, 3), torch.tensor(0.5)]).key == key
    assert Compilation(graph, [torch.ones(2, 4), torch.tensor(0.1)]).key != key
    assert Compilation(graph, [torch.ones(3, 2).T, torch.tensor(0.1)]).key != key  # other strides
    assert Compilation(graph, [torch.ones(2, 3, dtype=torch.float64), torch.tensor(0.1)]).key != key


class Saved:
    """A stand-in for torch's artifact, whose file holds a word."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def __call__(self, *tensors: Tensor) -> None:
        self.graph(*tensors)

    def save(self, *, path: str, format: str) -> None:
        Path(path).write_text("good")


def test_a_second_process_finds_the_step_on_disk_and_a_damaged_one_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, made = lift_constants(listed()), []

    def load(path: Path) -> Any:
        assert path.read_text() == "good"
        return Saved(graph.graph)

    monkeypatch.setattr(artifacts, "compile_step", lambda graph, inputs: made.append(1) or Saved(graph))
    monkeypatch.setattr(artifacts, "load_step", load)
    for process, known in enumerate((False, True, True)):
        artifacts._LOADED.clear()
        compilation = Compilation(graph, [torch.ones(2, 3), torch.tensor(0.1)])
        assert compilation.known == known
        if process == 2:
            compilation.path.write_text("bad")
        x, expected = torch.ones(2, 3), torch.ones(2, 3)
        compilation.finish()(x, torch.tensor(0.1))
        step(expected, torch.tensor(0.1))
        assert torch.equal(x, expected)
        assert len(made) == (2 if process == 2 else 1)
        assert compilation.path.read_text() == "good"
    compilation.discard()
    assert not compilation.path.exists()


def test_the_oldest_artifacts_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "KEPT", 3)
    for i in range(5):
        artifacts.save_step(Saved(None), tmp_path / "steps" / str(i))
        os.utime(tmp_path / "steps" / str(i), (i, i))
    assert sorted(path.name for path in (tmp_path / "steps").iterdir()) == ["2", "3", "4"]


def test_kernels_are_described_for_one_client() -> None:
    def convolve(x: Tensor, w: Tensor) -> Tensor:
        shape = [4, 4, 3, 3, 1, 1, 1, 1, 1, 1]
        return torch.ops.cfedavg.convolve(torch.ops.cfedavg.convolve(x, w, shape, "ieee"), w, shape, "ieee")

    x = from_stored(torch.ones(5, 2, 4, 4, 3), IMAGES)  # in memory as the operator's results are
    arguments = x, torch.ones(5, 3, 3, 3, 3)
    graph = make_fx(convolve, tracing_mode="fake")(*arguments)
    [(name, args)] = artifacts.find_kernels(lift_constants(graph))  # the two calls are alike
    assert name == "convolve"
    assert [arg.shape[0] for arg in args if isinstance(arg, Like)] == [1, 1]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_kernels_of_recurrent_layers_can_be_launched_for_one_client(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients' axis of sequences is the second one."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = artifacts.find_kernels(list_recurrent(kind, both=False)[0])
    assert {name for name, _ in found} == {"recur", "recur_grad"}
    artifacts.launch_kernels(found)


def test_the_compiler_does_not_write_what_arguments_are_computed_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch 2.11 would, for its log; the text of ResNet-18's step would never end."""
    import torch._inductor.standalone_compile
    from torch._inductor.exc import MissingOperatorWithoutDecomp

    class Endless:
        def __str__(self) -> str:
            raise AssertionError

    def standalone_compile(*_: Any, **__: Any) -> str:
        return MissingOperatorWithoutDecomp.operator_str("convolve", [Endless()], {})

    before = MissingOperatorWithoutDecomp.operator_str
    monkeypatch.setattr(torch._inductor, "standalone_compile", standalone_compile)
    assert artifacts.compile_step(listed(), []).split() == ["target:", "convolve"]
    assert MissingOperatorWithoutDecomp.operator_str is before


def list_recurrent(kind: Any, *, both: bool) -> tuple[artifacts.Listed, list[Tensor]]:
    """The listed step of three clients with a recurrent network, and its inputs."""
    m = 3
    model = nn.Sequential(kind(6, 6, 2, batch_first=True, bidirectional=both))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        y = model(batch[0])[0]
        return (y.flatten(0, 1) @ torch.ones(y.shape[-1])).square().mean()

    parameters = [p.detach().expand(m, *p.shape).clone() for p in model.parameters()]
    stack = Stack(parameters, {}, Fixed([], []), [], torch.zeros(m))
    inputs = _Inputs(stack, (torch.randn(m, 4, 5, 6),), None, None, torch.ones(m))
    recorder = Recorder(Step(model, loss, SGD()), torch.device("cpu"), print)
    return lift_constants(recorder._trace(inputs)), tree_leaves(stack) + inputs.given


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("both", [False, True])
def test_the_compiler_can_view_what_a_recurrent_network_gives(kind: Any, both: bool) -> None:
    """Operators that the compiler takes apart must give the strides that are listed."""
    from torch._inductor.decomposition import select_decomp_table

    found, inputs = list_recurrent(kind, both=both)
    compiled = make_fx(found.graph, decomposition_table=select_decomp_table(), tracing_mode="fake")
    compiled(*inputs, *found.constants)


@pytest.fixture
def process() -> Iterator[compiler.Compiler]:
    started = compiler.Compiler()
    yield started
    started.close()


def test_the_process_does_jobs_and_reports_failures(process: compiler.Compiler) -> None:
    good, bad = process.submit("import_compiler"), process.submit("no_such_function")
    unwritable = process.submit("import_compiler", nn.Linear(1, 1).register_forward_hook)
    assert not process.wait(unwritable)
    assert process.wait(good)
    assert not process.wait(bad)
    assert process.alive


def test_a_process_that_is_killed_fails_its_jobs(process: compiler.Compiler) -> None:
    job = process.submit("import_compiler")
    os.killpg(process._process.pid, signal.SIGKILL)
    assert not process.wait(job)
    process._process.wait()
    assert not process.alive
    assert not process.wait(process.submit("import_compiler"))


def test_no_process_starts_without_a_gpu_or_for_an_engine_that_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []
    monkeypatch.setattr(compiler, "_started", [])
    monkeypatch.setattr(compiler, "Compiler", lambda: started.append(1) or object())
    monkeypatch.setattr(compiler.os, "sched_getaffinity", lambda pid: range(16))
    monkeypatch.setattr(compiler, "sees_gpu", lambda: True)
    for device, engine in (("cpu", "auto"), ("cuda", "sequential"), ("auto", "reference")):
        compiler.start_compiler(device, engine)
    monkeypatch.setattr(compiler, "sees_gpu", lambda: False)
    compiler.start_compiler("auto", "auto")
    assert not started
    monkeypatch.setattr(compiler, "sees_gpu", lambda: True)
    compiler.start_compiler("auto", "auto")
    assert started
