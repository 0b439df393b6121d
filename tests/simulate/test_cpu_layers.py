"""Layers for CPUs beside torch's own: values, gradients, and which calls of a model they replace."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cfedavg import Config, Task
from cfedavg.models import cnn
from cfedavg.simulate.cpu import layers
from cfedavg.simulate.cpu.layers import Linear, convolve_and_pool, read_convolution
from cfedavg.simulate.cpu.replacements import join_layers, quicken
from cfedavg.simulate.engines.trial import takes_fast_layers

ROOT = Path(__file__).parents[2]
Case = tuple[int, int, tuple[int, int], tuple[int, int], tuple[int, int]]


def images(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last)


def exact(x: Tensor, w: Tensor, b: Tensor | None, padding: Any, *, relu: bool) -> Tensor:
    """The oracle: torch's own layers, in float64."""
    y = F.conv2d(x, w, b, padding=padding)
    return F.max_pool2d(F.relu(y) if relu else y, 2)


def assert_close(mine: Tensor, theirs: Tensor, tolerance: float = 3e-6) -> None:
    assert mine.shape == theirs.shape
    assert (mine.double() - theirs).norm() <= tolerance * theirs.norm() + 1e-12


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        (1, 32, (5, 5), (0, 0), (28, 28)),
        (3, 48, (3, 3), (1, 1), (9, 11)),
        (4, 16, (2, 5), (0, 2), (6, 5)),
        (32, 64, (5, 5), (0, 0), (12, 12)),
        (16, 10, (3, 3), (1, 1), (7, 8)),
        (48, 5, (1, 3), (2, 0), (5, 4)),
    ],
)
def test_pooled_convolution(case: Case, biased: bool, relu: bool) -> None:
    C, M, kernel, padding, size = case
    x, w = images(3, C, *size), images(M, C, *kernel, seed=1)
    x.requires_grad_(C > layers.FEW)
    b = torch.linspace(-1, 1, M).requires_grad_() if biased else None
    w.requires_grad_()
    given = read_convolution(x, w, b, padding=padding)
    assert given is not None
    theirs = [each.detach().double().requires_grad_(each.requires_grad) for each in (x, w)]
    offset = None if b is None else b.detach().double().requires_grad_()
    y, expected = convolve_and_pool(given, relu=relu), exact(*theirs, offset, padding, relu=relu)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_close(y, expected)
    dy = images(*y.shape, seed=2)
    pairs = zip((x, w, b), (*theirs, offset), strict=True)
    wanted = [
        (mine, its) for mine, its in pairs if mine is not None and its is not None and its.requires_grad
    ]
    found = torch.autograd.grad(y, [mine for mine, _ in wanted], dy)
    for mine, its in zip(
        found, torch.autograd.grad(expected, [its for _, its in wanted], dy.double()), strict=True
    ):
        assert_close(mine, its)


def test_equal_values_and_nan_go_where_torch_sends_them() -> None:
    """Of equal values the first gets the gradient; behind ReLU zeros get none; NaN stays NaN."""
    x, w = torch.ones(1, 1, 4, 4), torch.zeros(16, 1, 1, 1)
    w[1], w[2] = 1.0, -1.0
    x[0, 0, 3, 3] = float("nan")
    for relu in (True, False):
        weights = [w.clone().requires_grad_() for _ in range(2)]
        given = read_convolution(x, weights[0])
        assert given is not None
        pair = convolve_and_pool(given, relu=relu), exact(x, weights[1], None, 0, relu=relu)
        torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
        grads = [torch.autograd.grad(y[..., 0, 0].sum(), v)[0] for y, v in zip(pair, weights, strict=True)]
        mine, theirs = (torch.nan_to_num(each, 0.0) for each in grads)
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("C", [1, 32])
def test_pooled_convolution_in_bf16(C: int) -> None:
    """Operands are rounded to bf16 and sums are not: only the result is rounded once more."""
    x, w, b = images(4, C, 8, 8), images(32, C, 3, 3, seed=1), torch.linspace(-1, 1, 32)
    given = [each.clone().requires_grad_(C > layers.FEW or each is not x) for each in (x, w, b)]
    rounded = [each.bfloat16().double().requires_grad_(each is not x or C > layers.FEW) for each in (x, w, b)]
    with torch.autocast("cpu", torch.bfloat16):
        read = read_convolution(*given)
        assert read is not None
        y = convolve_and_pool(read, relu=True)
    expected = exact(*rounded, 0, relu=True)
    assert y.dtype == torch.bfloat16
    assert_close(y, expected, 2**-8)
    if C == 1:  # the convolution of more channels is torch's, which rounds before it pools
        dy = images(*y.shape, seed=2).bfloat16()
        mine = torch.autograd.grad(y, given[1:], dy)
        for found, its in zip(mine, torch.autograd.grad(expected, rounded[1:], dy.double()), strict=True):
            assert found.dtype == torch.float32
            assert_close(found, its)


AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "NUMBA_CPU_NAME": "znver3",
    "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx,+sse4.2",
}  # fmt: skip


@pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability(), reason="not an x86 processor")
def test_pooled_convolution_with_the_instructions_of_an_older_processor() -> None:
    """Without AVX-512 fewer sums fit into the registers, so the loops have other steps."""
    call = "test_pooled_convolution((32, 64, (5, 5), (0, 0), (12, 12)), True, True)"
    program = f"import tests.simulate.test_cpu_layers as module; module.{call}"
    environment = {**os.environ, **AVX2}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=ROOT)


DOTS = layers._kernels().DOTS


@pytest.mark.skipif(not DOTS, reason="the processor has no instruction for products of bf16")
@pytest.mark.parametrize(
    ("C", "M", "kernel", "size"),
    [
        (32, 64, (5, 5), (12, 12)),
        (16, 10, (3, 3), (7, 8)),
        (48, 5, (1, 3), (5, 4)),
        (64, 3, (2, 2), (21, 19)),
        (1, 32, (5, 5), (12, 12)),
        (1, 48, (2, 3), (7, 8)),
    ],
)
def test_products_of_bf16(
    C: int, M: int, kernel: tuple[int, int], size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instruction for bf16 gives what float32 gives, but for the order of the sums."""
    x, *given = images(5, C, *size), images(M, C, *kernel, seed=1), torch.linspace(-1, 1, M)
    given = [each.requires_grad_() for each in ([x, *given] if C > layers.FEW else given)]
    grads = []
    for dots in (False, True):
        monkeypatch.setattr(layers._kernels(), "DOTS", dots)
        with torch.autocast("cpu", torch.bfloat16):
            read = read_convolution(x, *given[-2:])
            assert read is not None
            y = convolve_and_pool(read, relu=True)
        grads.append(torch.autograd.grad(y, given, images(*y.shape, seed=2).bfloat16()))
    for found, its in zip(grads[1], grads[0], strict=True):
        assert found.dtype == torch.float32
        assert_close(found, its.double(), 1e-4 if found.shape == x.shape else 1e-6)  # dx is rounded


@pytest.mark.parametrize("shape", [(64, 512), (2, 32, 512)])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(shape: tuple[int, ...], biased: bool) -> None:
    x, w = (torch.randn(each, requires_grad=True) for each in (shape, (256, 512)))
    b = torch.randn(256, requires_grad=True) if biased else None
    linear: Callable[..., Tensor] = Linear.apply
    y, g = linear(x, w, b), torch.randn(*shape[:-1], 256)
    wanted = [each for each in (x, w, b) if each is not None]
    doubles = [each.detach().double().requires_grad_() for each in wanted]
    expected = F.linear(*doubles)
    assert_close(y, expected)
    pairs = zip(
        torch.autograd.grad(y, wanted, g), torch.autograd.grad(expected, doubles, g.double()), strict=True
    )
    for mine, theirs in pairs:
        assert_close(mine, theirs)


class Functional(nn.Module):
    """A model that calls functions; `kind` says how it pools."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv, self.out, self.kind = nn.Conv2d(1, 16, 3), nn.Linear(16 * 25, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.kind == "relu after":
            y = F.relu(F.max_pool2d(y, 2))
        elif self.kind == "in place":
            y = F.max_pool2d(F.relu(y, inplace=True), (2, 2), stride=2)
        elif self.kind == "changed":
            y = F.max_pool2d(F.relu(y.mul_(2.0)), 2)
        elif self.kind == "overlapping":
            y = F.max_pool2d(F.relu(y), 2, 1)[..., ::2, ::2][..., :5, :5]
        else:
            y = F.max_pool2d(F.relu(y), 2)
        return self.out(torch.flatten(y, 1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def gradients(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> Tensor:
    value = loss(model, batch)
    value.backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).double()


def batch_of(n: int, size: int = 12, channels: int = 1) -> tuple[Tensor, Tensor]:
    return images(n, channels, size, size), torch.arange(n) % 3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the pooled convolution had ReLU in it."""
    found: list[bool] = []
    forward = layers.ConvolveAndPool.forward

    def counted(ctx: Any, *given: Any) -> Tensor:
        found.append(given[4])
        return forward(ctx, *given)

    monkeypatch.setattr(layers.ConvolveAndPool, "forward", staticmethod(counted))
    return found


@pytest.mark.parametrize(
    ("kind", "replaced"),
    [("plain", [True]), ("relu after", [False]), ("in place", [True]), ("changed", []), ("overlapping", [])],
)
def test_calls_of_functions(kind: str, replaced: list[bool], calls: list[bool]) -> None:
    model = Functional(kind)
    theirs = gradients(copy.deepcopy(model).double(), loss, (batch_of(6)[0].double(), batch_of(6)[1]))
    assert_close(gradients(model, quicken(loss), batch_of(6)), theirs)
    assert calls == replaced


@pytest.mark.parametrize(
    ("middle", "replaced"),
    [
        ([nn.ReLU(), nn.MaxPool2d(2)], [True]),
        ([nn.ReLU(inplace=True), nn.MaxPool2d(2, 2)], [True]),
        ([nn.MaxPool2d(2), nn.ReLU()], [False]),
        ([nn.Tanh(), nn.MaxPool2d(2)], []),
        ([nn.ReLU(), nn.MaxPool2d(2, padding=1), nn.AvgPool2d(2, 1)], []),
        ([nn.ReLU(), nn.MaxPool2d(3, 2)], []),
    ],
)
def test_chains_of_modules(middle: list[nn.Module], replaced: list[bool], calls: list[bool]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 3), *middle, nn.Flatten(), nn.LazyLinear(3))
    model(batch_of(2)[0])
    theirs = gradients(copy.deepcopy(model).double(), loss, (batch_of(6)[0].double(), batch_of(6)[1]))
    assert_close(gradients(join_layers(copy.deepcopy(model)), loss, batch_of(6)), theirs)
    assert calls == replaced


def test_a_chain_with_a_hook_is_left_to_torch(calls: list[bool]) -> None:
    model = cnn((1, 28, 28), 3)
    seen = []
    model[1].register_forward_hook(lambda *given: seen.append(1))  # type: ignore[index, operator]
    join_layers(model)(batch_of(2, 28)[0])
    assert seen == [1]
    assert calls == [True]  # the second convolution


class Rough(nn.Module):
    """A model whose loss needs the gradient of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cnn((1, 16, 16), 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        (slope,) = torch.autograd.grad(y.sum(), [self.net[0].weight], create_graph=True)
        return y + slope.square().sum()


@pytest.mark.parametrize(("model", "takes"), [(cnn((1, 16, 16), 3), True), (Rough(), False)])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_trial(model: nn.Module, takes: bool, precision: str) -> None:
    known = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    task = Task(model, [batch_of(8, 16)])
    assert takes_fast_layers(task, Config(precision=precision)) == (takes and known)
    assert not takes_fast_layers(task, Config(precision="float64"))
