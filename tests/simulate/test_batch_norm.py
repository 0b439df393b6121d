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
        y = norms.batch_norm(x, None, None, *affine, training=True)
        return norms.relu(y) if relu else y

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
    """A batch norm, and `after` what it gives; `after` also gets the input."""

    def __init__(self, after: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.after = nn.BatchNorm2d(4), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(x), x)


def changed(y: Tensor, x: Tensor) -> Tensor:
    y *= 2
    return F.relu(y)


def changed_view(y: Tensor, x: Tensor) -> Tensor:
    y.view(-1).sub_(0.5)
    return F.relu(y)


def seen_again(y: Tensor, x: Tensor) -> Tensor:
    z = F.relu(y)
    return z + y


def in_place_seen_again(y: Tensor, x: Tensor) -> Tensor:
    z = F.relu(y, inplace=True)
    return z + 2 * y


def later(y: Tensor, x: Tensor) -> Tensor:
    z = torch.sigmoid(x)
    return F.relu(y) * z


def added_in_place(y: Tensor, x: Tensor) -> Tensor:
    y += x
    return nn.ReLU(inplace=True)(y)


def added_to_residual(y: Tensor, x: Tensor) -> Tensor:
    z = x.clone()
    z += y
    return F.relu(z)


def residual_changed(y: Tensor, x: Tensor) -> Tensor:
    z = x.clone()
    total = y + z
    z += 1
    return F.relu(total)


def added_twice(y: Tensor, x: Tensor) -> Tensor:
    return F.relu(y + x + x.square())


AFTER: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {  # and whether the ReLU is fused
    "functional": (lambda y, x: F.relu(y), True),
    "module": (lambda y, x: nn.ReLU()(y), True),
    "in place": (lambda y, x: nn.ReLU(inplace=True)(y), True),
    "in place, seen again": (in_place_seen_again, True),
    "torch": (lambda y, x: torch.relu(y), True),
    "method": (lambda y, x: y.relu(), True),
    "method in place": (lambda y, x: y.relu_(), True),
    "seen again": (seen_again, True),
    "later": (later, True),
    "residual": (lambda y, x: F.relu(y + x), True),
    "residual before": (lambda y, x: F.relu(x + y), True),
    "residual in place": (added_in_place, True),
    "two norms": (lambda y, x: F.relu(y + F.batch_norm(x, None, None, training=True)), True),
    "itself": (lambda y, x: F.relu(y + y), True),
    "function": (lambda y, x: F.relu(torch.add(y, x)), True),
    "into the residual": (added_to_residual, False),
    "changed residual": (residual_changed, False),
    "added twice": (added_twice, False),
    "scaled": (lambda y, x: F.relu(torch.add(y, x, alpha=2)), False),
    "number": (lambda y, x: F.relu(y + 1), False),
    "broadcast": (lambda y, x: F.relu(y + x[:1]), False),
    "changed": (changed, False),
    "changed view": (changed_view, False),
    "another function": (lambda y, x: F.gelu(y), False),
}


@pytest.mark.parametrize("name", AFTER)
def test_relu_is_fused_where_nothing_changed(name: str, path: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss, the gradients and the running statistics of each client are torch's in any case."""
    check_fused(*AFTER[name], 1e-5 if path else 1e-11, monkeypatch)  # the operators compute in float32


@pytest.mark.gpu
@pytest.mark.parametrize("name", AFTER)
def test_relu_is_fused_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fused(*AFTER[name], 1e-4, monkeypatch, "cuda", torch.float32)


def check_fused(
    after: Callable[[Tensor, Tensor], Tensor],
    fused: bool,
    exact: float,
    monkeypatch: pytest.MonkeyPatch,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> None:
    """Compare the clients of a vmap on `device` in `dtype` with each of them alone on the CPU in float64."""
    calls = []
    forward = BatchNorm.forward
    monkeypatch.setattr(BatchNorm, "forward", lambda *args: (calls.append(args[-1]), forward(*args))[1])
    model = Net(after).double()
    x, target = draws(*SIZES).double(), draws(*SIZES, seed=1).double()

    def objective(parameters: Tensors, buffers: Tensors, x: Tensor, target: Tensor) -> Any:
        y = functional_call(model, {**parameters, **buffers}, x)
        return (y * target).square().sum(), buffers

    def values(parameters: Tensors, buffers: Tensors, x: Tensor, target: Tensor) -> Any:
        return grad_and_value(objective, has_aux=True)(parameters, buffers, x, target)

    def moved(tensors: Tensors) -> Tensors:
        return {k: t.to(device, dtype if t.is_floating_point() else None) for k, t in tensors.items()}

    parameters = {key: p.detach() for key, p in model.named_parameters()}
    own = [{key: buffer.clone() for key, buffer in model.named_buffers()} for _ in x]
    stacked = moved({key: torch.stack([each[key] for each in own]) for key in own[0]})
    with Replacements():
        batch = (each.to(device, dtype) for each in (x, target))
        grads, (losses, buffers) = vmap(partial(values, moved(parameters)))(stacked, *batch)
    assert (True in calls) == fused
    for i in range(len(x)):
        expected, (loss, after_it) = values(parameters, own[i], x[i], target[i])
        torch.testing.assert_close(losses[i].cpu().to(loss), loss, rtol=exact, atol=0)
        for key, value in {**expected, **after_it}.items():
            found = (grads[key] if key in grads else buffers[key])[i].cpu().to(value)
            torch.testing.assert_close(found, value, rtol=10 * exact, atol=10 * exact)


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
        (norm_operators._normalise_relu, (x, mean, scale, shift, None)),
        (norm_operators._normalise_relu, (x, mean, scale, shift, dy)),
        (norm_operators._normalise_grad, (dy, x, mean, scale, shift, one, two, False)),
        (norm_operators._normalise_grad, (dy, x, mean, scale, shift, one, two, True)),
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


@pytest.mark.gpu
def test_a_kernel_keeps_nan() -> None:
    """A client that diverges is found by its loss."""
    x, (mean, scale, shift) = draws(2, 3, 4, 5, 6), draws(3, 2, 4, seed=1)
    x[1, 0, 2] = torch.nan
    given = x, mean, scale, shift
    expected = norm_operators._normalise_relu(*given, None).isnan()
    assert expected.any()
    found = norm_operators._normalise_relu(*(each.cuda() for each in given), None)
    assert torch.equal(found.cpu().isnan(), expected)
