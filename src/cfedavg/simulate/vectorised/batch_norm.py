"""Batch norm of many clients at once, with a ReLU behind it or not.

In training, batch norm computes y = (x - mean) * scale + bias for each channel, where scale is weight * rstd
and rstd is 1 / sqrt(var + eps). With s1 the sum of dy and s2 the sum of dy * (x - mean) over a channel of n
values, its gradient is

    dx = scale * (dy - s1 / n - (x - mean) * rstd^2 * s2 / n).

Behind a ReLU, dy is 0 where y <= 0. This is found from x again, so no mask is written or read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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
) -> tuple[Tensor, Callable[[], Tensor] | None]:
    """Compute F.batch_norm; in training, use each channel's mean and variance over the batch.

    In training, return also a function that computes relu(batch_norm(input)) in one go.
    """
    if not training:
        assert running_mean is not None
        assert running_var is not None
        y = _normalise(input, running_mean, torch.rsqrt(running_var + eps), weight, bias)
        return y.to(input.dtype), None
    n = input.numel() // input.shape[1]
    if n == 1:
        raise ValueError("Expected more than 1 value per channel when training")
    mean, var = _find_mean_and_variance(input.detach())
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(mean * momentum)
        running_var.mul_(1 - momentum).add_(var * (momentum * n / (n - 1)))
    norm = partial(apply_of(BatchNorm), input, mean, torch.rsqrt(var + eps), weight, bias)
    return norm(False), partial(norm, True)


class BatchNorm(torch.autograd.Function):
    """Batch norm of a batch with this mean and rstd, with the textbook gradient.

    The gradient of the mean and of rstd with respect to x is part of dx. It needs two sums; the gradient that
    autograd finds needs four.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool
    ) -> Tensor:
        if relu and _takes_kernels(x):
            scale, bias = _scale(rstd, weight), torch.zeros_like(mean) if bias is None else bias
            fused: Tensor = norm_operators.normalise_relu(x, mean, scale, bias)
            return fused
        y = _normalise(x, mean, rstd, weight, bias)
        return (y.relu() if relu else y).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, mean, rstd, weight, bias, ctx.relu = inputs
        ctx.save_for_backward(x, mean, rstd, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        n, scale = x.numel() // x.shape[1], _scale(rstd, weight)
        shift = torch.zeros_like(mean) if bias is None else bias
        if _takes_kernels(x):
            s1, s2 = norm_operators.channel_sums(dy, x, mean, scale, shift, ctx.relu)
        else:
            if ctx.relu:
                dy = torch.where(_normalise(x, mean, rstd, weight, bias) > 0, dy, 0.0)
            s1, s2 = _channel_sums(widen(dy)), _channel_sums(widen(dy) * (widen(x) - channel(mean, x)))
        means = s1 / n, s2 * rstd.square() / n
        if ctx.relu and _takes_kernels(x):
            dx = norm_operators.normalise_relu_grad(dy, x, mean, scale, shift, *means)
        else:
            one, two = (channel(each, x) for each in means)
            dx = (widen(dy) - one - (widen(x) - channel(mean, x)) * two) * channel(scale, x)
        dw, db = None if weight is None else s2 * rstd, None if bias is None else s1
        return dx.to(x.dtype), None, None, dw, db, None


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
