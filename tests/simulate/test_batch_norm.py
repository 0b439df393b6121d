"""Batch norm of many clients, with and without a ReLU: against torch's, and its kernels against a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from cfedavg.simulate.vectorised import batch_norm as norms
from cfedavg.simulate.vectorised import norm_operators
from cfedavg.simulate.vectorised.batch_norm import BatchNorm
from cfedavg.simulate.vectorised.replacements import Replacements

Tensors = dict[str, Tensor]

SIZES = (3, 5, 4, 6, 7)  # clients, samples, channels, height, width


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[False, True], ids=["plain", "operators"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Plain torch code, or the operators that are kernels on a GPU."""
    if request.param:
        monkeypatch.setattr(norms, "_takes_kernels", lambda x: x.dim() > 2)
    return bool(request.param)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_many_clients(affine: bool, relu: bool, path: bool) -> None:
    """Values and gradients are those of torch's batch norm of each client, computed in float64."""
    x = 5 + 3 * draws(*SIZES)
    w, b = draws(2, 3, 4, seed=1)
    target = draws(*SIZES, seed=2)
    given = (x, w, b) if affine else (x,)

    def ours(x: Tensor, *affine: Tensor) -> Any:
        y, with_relu = norms.batch_norm(x, None, None, *affine, training=True)
        assert with_relu
        return with_relu() if relu else y

    def torchs(x: Tensor, *affine: Tensor) -> Tensor:
        y = F.batch_norm(x, None, None, *affine, training=True)
        return y.relu() if relu else y

    def objective(norm: Callable[..., Tensor], target: Tensor, *given: Tensor) -> Tensor:
        return (norm(*given) * target).square().sum()

    places = tuple(range(1, 1 + len(given)))
    grads, values = vmap(grad_and_value(partial(objective, ours), places))(target, *given)
    for i in range(len(x)):
        expected, value = grad_and_value(partial(objective, torchs), places)(
            *(each[i].double() for each in (target, *given))
        )
        torch.testing.assert_close(values[i].double(), value, rtol=1e-5, atol=0)
        for mine, theirs in zip(grads, expected, strict=True):
            assert (mine[i].double() - theirs).norm() <= 1e-5 * theirs.norm()


def test_squares_of_large_numbers_do_not_cancel() -> None:
    x = 1e4 + draws(1, 5000, 3)
    mean, variance = (each.double() for each in norm_operators.moments(x[0].T[None]))
    expected, center = torch.var_mean(x[0].double(), 0, correction=0)
    torch.testing.assert_close(variance, expected, rtol=1e-3, atol=0)
    torch.testing.assert_close(mean, center, rtol=1e-6, atol=0)


class Net(nn.Module):
    """A batch norm, and `after` what it gives."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.after = nn.BatchNorm2d(4), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(x))


def changed(y: Tensor) -> Tensor:
    y += 1
    return F.relu(y)


def seen_again(y: Tensor) -> Tensor:
    z = F.relu(y)
    return z + y


def in_place_seen_again(y: Tensor) -> Tensor:
    z = F.relu(y, inplace=True)
    return z + y


AFTER: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # and whether the ReLU is fused
    "functional": (F.relu, True),
    "module": (nn.ReLU(), True),
    "in place": (nn.ReLU(inplace=True), True),
    "in place, seen again": (in_place_seen_again, True),
    "torch": (torch.relu, True),
    "method": (Tensor.relu, True),
    "seen again": (seen_again, True),
    "changed in place": (changed, False),
    "added to": (lambda y: F.relu(y + y.square()), False),
    "another function": (F.gelu, False),
}


@pytest.mark.parametrize("name", AFTER)
def test_relu_is_fused_only_where_it_follows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss, the gradients and the running statistics of each client are torch's in any case."""
    after, fused = AFTER[name]
    calls = []
    forward = BatchNorm.forward
    monkeypatch.setattr(BatchNorm, "forward", lambda *args: (calls.append(args[-1]), forward(*args))[1])
    model = Net(after).double()
    x, target = draws(*SIZES).double(), draws(*SIZES, seed=1).double()

    def objective(parameters: Tensors, buffers: Tensors, x: Tensor, target: Tensor) -> Any:
        y = functional_call(model, {**parameters, **buffers}, x)
        return (y * target).square().sum(), buffers

    def values(buffers: Tensors, x: Tensor, target: Tensor) -> Any:
        parameters = {key: p.detach() for key, p in model.named_parameters()}
        return grad_and_value(objective, has_aux=True)(parameters, buffers, x, target)

    own = [{key: buffer.clone() for key, buffer in model.named_buffers()} for _ in x]
    stacked = {key: torch.stack([each[key] for each in own]) for key in own[0]}
    with Replacements():
        grads, (losses, buffers) = vmap(values)(stacked, x, target)
    assert (True in calls) == fused
    for i in range(len(x)):
        expected, (loss, after_it) = values(own[i], x[i], target[i])
        torch.testing.assert_close(losses[i], loss, rtol=1e-11, atol=0)
        for key, value in {**expected, **after_it}.items():
            found = grads[key] if key in grads else buffers[key]
            torch.testing.assert_close(found[i], value, rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(100, 4, 64, 32, 32), (3, 7, 10, 11, 13), (2, 7, 300, 11), (1, 1, 1, 1), (5, 20, 128, 31, 32)]
)
def test_kernels_agree_with_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, dy = ((3 + 2 * draws(*shape, seed=seed)).to(dtype) for seed in range(2))
    mean = x.float().transpose(1, 2).flatten(2).mean(2)
    scale, shift, one, two = draws(4, *mean.shape, seed=2)
    for operator, given in (
        (norm_operators._moments, (x,)),
        (norm_operators._channel_sums, (dy, x, mean, scale, shift, False)),
        (norm_operators._channel_sums, (dy, x, mean, scale, shift, True)),
        (norm_operators._normalise_relu, (x, mean, scale, shift)),
        (norm_operators._normalise_relu_grad, (dy, x, mean, scale, shift, one, two)),
    ):
        call: Callable[..., Any] = operator
        found = call(*(each.cuda() if isinstance(each, Tensor) else each for each in given))
        expected = call(*given)
        pairs = [(found, expected)] if isinstance(found, Tensor) else list(zip(found, expected, strict=True))
        for mine, theirs in pairs:
            assert mine.stride() == theirs.stride()
            difference = (mine.cpu().double() - theirs.double()).norm()
            # Sums in another order; a ReLU's mask may differ where y is 0 to rounding.
            assert difference <= (2e-3 if dtype == torch.bfloat16 else 1e-4) * theirs.double().norm() + 1e-3
