"""Batch norm of many clients at once, alone or together with the addition and the ReLU behind it.

In training, batch norm computes y = (x - mean) * scale + bias for each channel, where scale is weight * rstd
and rstd is 1 / sqrt(var + eps). With s1 the sum of dy and s2 the sum of dy * (x - mean) over a channel of n
values, its gradient is

    dx = scale * (dy - s1 / n - (x - mean) * rstd^2 * s2 / n).

Behind a ReLU, dy is 0 where y <= 0. This is found from x again, so no mask is written or read.

A model calls batch norm, addition and ReLU one by one. So batch norm leaves a note on its result, and so does
an addition of a residual. A ReLU that finds a note computes all in one go; what was computed before is then
unused, and is dropped when the operators of a step are listed. As in autograd, a note holds only as long as
no tensor that it needs was changed in place, which torch counts in the tensor's version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cfedavg.simulate.vectorised import norm_operators
from cfedavg.simulate.vectorised.convolution import apply_of

LARGE_CHANNEL = 256  # numbers; if a sample's channel has at least so many, each sample is summed first


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute F.batch_norm; in training, use each channel's mean and variance over the batch."""
    if not training:
        assert running_mean is not None
        assert running_var is not None
        return _normalise(input, running_mean, torch.rsqrt(running_var + eps), weight, bias).to(input.dtype)
    n = input.numel() // input.shape[1]
    if n == 1:
        raise ValueError("Expected more than 1 value per channel when training")
    mean, var = _find_mean_and_variance(input.detach())
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(mean * momentum)
        running_var.mul_(1 - momentum).add_(var * (momentum * n / (n - 1)))
    norm = partial(apply_of(BatchNorm), input, mean, torch.rsqrt(var + eps), weight, bias)
    y: Tensor = norm(None, False)
    _leave(y, Note(norm, None, *_versions(input)))
    return y


def add(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Add two tensors by `function`; leave a note if one of them comes from batch norm."""
    note = residual = None
    if len(args) == 2 and not kwargs and all(isinstance(arg, Tensor) for arg in args):
        one, other = args
        if one.shape == other.shape and one.dtype == other.dtype:
            notes = [(found, rest) for found, rest in ((_find(one), other), (_find(other), one)) if found]
            note, residual = next((each for each in notes if each[0].residual is None), (None, None))
    # An addition in place gives the residual another version: then the note does not hold.
    seen = _versions(*note.needs, residual) if note else None
    total = function(*args, **kwargs)
    if note and seen:
        _leave(total, Note(note.norm, residual, *seen))
    return total


def relu(input: Tensor, inplace: bool = False) -> Any:
    """Compute relu together with the batch norm before it; return NotImplemented if there is none."""
    note = _find(input)
    if note is None:
        return NotImplemented
    y = note.norm(note.residual, True)
    return input.copy_(y) if inplace else y


class Note(NamedTuple):
    """How a tensor was computed: by batch norm, and perhaps by the addition of a residual."""

    norm: Callable[[Tensor | None, bool], Tensor]  # batch norm, with a residual and a ReLU or without
    residual: Tensor | None
    needs: tuple[Tensor, ...]  # tensors from which it was computed, and their versions then
    versions: tuple[int, ...]
    version: int = 0  # of the tensor itself


def _versions(*tensors: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tensors, tuple(tensor._version for tensor in tensors)


def _leave(tensor: Any, note: Note) -> None:
    tensor.cfedavg_note = note._replace(version=tensor._version)


def _find(tensor: Any) -> Note | None:
    """Return the note on a tensor if there is one that still holds."""
    note: Note | None = getattr(tensor, "cfedavg_note", None)
    if note is None or note.version != tensor._version or _versions(*note.needs)[1] != note.versions:
        return None
    return note


class BatchNorm(torch.autograd.Function):
    """Batch norm of a batch with this mean and rstd, with the textbook gradient.

    The gradient of the mean and of rstd with respect to x is part of dx. It needs two sums; the gradient that
    autograd finds needs four. The function can add a residual and compute a ReLU in the same go.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        relu: bool,
    ) -> Tensor:
        if relu and _takes_kernels(x):
            shift = torch.zeros_like(mean) if bias is None else bias
            fused: Tensor = norm_operators.normalise_relu(x, mean, _scale(rstd, weight), shift, residual)
            return fused
        y = _normalise(x, mean, rstd, weight, bias)
        if residual is not None:
            y = y + residual
        return (y.relu() if relu else y).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *kept, residual, ctx.relu = inputs
        ctx.save_for_backward(*kept, None if residual is None else output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, mean, rstd, weight, bias, y = ctx.saved_tensors
        n, scale, relu = x.numel() // x.shape[1], _scale(rstd, weight), ctx.relu
        if y is not None and relu:  # with a residual, the ReLU's mask is found from y
            dy, relu = torch.where(y > 0, dy, 0.0), False
        d_residual = None if y is None else dy
        if _takes_kernels(x):
            given = dy, x, mean, scale, torch.zeros_like(mean) if bias is None else bias
            s1, s2 = norm_operators.channel_sums(*given, relu)
            dx = norm_operators.normalise_grad(*given, s1 / n, s2 * rstd.square() / n, relu)
        else:
            if relu:
                dy = torch.where(_normalise(x, mean, rstd, weight, bias) > 0, dy, 0.0)
            dy, centered = widen(dy), widen(x) - channel(mean, x)
            s1, s2 = _channel_sums(dy), _channel_sums(dy * centered)
            first, second = channel(s1 / n, x), channel(s2 * rstd.square() / n, x)
            dx = ((dy - first - centered * second) * channel(scale, x)).to(x.dtype)
        dw, db = None if weight is None else s2 * rstd, None if bias is None else s1
        return dx, None, None, dw, db, d_residual, None


def _normalise(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = (widen(x) - channel(mean, x)) * channel(_scale(rstd, weight), x)
    return y if bias is None else y + channel(bias, x)


def _scale(rstd: Tensor, weight: Tensor | None) -> Tensor:
    return rstd if weight is None else rstd * weight


def channel(values: Tensor, x: Tensor) -> Tensor:
    """Return `values`, one for each channel, reshaped so that they broadcast along axis 1 of `x`."""
    return values.view(-1, *[1] * (x.dim() - 2))


def _takes_kernels(x: Tensor) -> bool:
    """Return whether our kernels norm x: images of at most float32 on a GPU."""
    return x.is_cuda and x.dim() > 2 and x.dtype != torch.float64


def _channel_sums(x: Tensor) -> Tensor:
    """Return the sum of each channel (axis 1) over all other axes.

    If samples are large, sum each sample first: these many sums run in parallel.
    """
    if x.dim() > 2 and x[0, 0].numel() >= LARGE_CHANNEL:
        return x.flatten(2).sum(2).sum(0)
    return x.sum([0, *range(2, x.dim())])


def _find_mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of each channel (axis 1) over all other axes.

    If samples are large, compute them from the variance and the mean of each sample.
    """
    if _takes_kernels(x):
        found: tuple[Tensor, Tensor] = norm_operators.moments(x)
        return found
    x = widen(x)
    if x.dim() == 2 or x[0, 0].numel() < LARGE_CHANNEL:
        var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        return mean, var
    within, means = torch.var_mean(x.flatten(2), 2, correction=0)
    between, mean = torch.var_mean(means, 0, correction=0)
    return mean, within.mean(0) + between


def widen(x: Tensor) -> Tensor:
    """Return bf16 and float16 numbers as float32, for accurate sums; other numbers unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
