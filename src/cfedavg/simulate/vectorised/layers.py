"""Norms, pooling and attention from plain operators, which vmap supports and a compiler can fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cfedavg.simulate.vectorised.channel_sums import sums_with, variance_and_mean

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
        return _normalise(input, running_mean, running_var, weight, bias, eps)
    n = input.numel() // input.shape[1]
    if n == 1:
        raise ValueError("Expected more than 1 value per channel when training")
    norm: Callable[..., tuple[Tensor, Tensor, Tensor]] = BatchNorm.apply
    y, mean, var = norm(input, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(mean * momentum)
        running_var.mul_(1 - momentum).add_(var * (momentum * n / (n - 1)))
    return y


class BatchNorm(torch.autograd.Function):
    """Batch norm with the textbook gradient, which needs two sums; autograd's gradient needs four sums."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        var, mean = variance_and_mean(x) if _takes_kernels(x) else _variance_and_mean(_widen(x))
        return _normalise(x, mean, var, weight, bias, eps), mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, ctx.eps = inputs
        ctx.biased = bias is not None
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        scale = torch.rsqrt(var + ctx.eps)
        normal = (_widen(x) - _channel(mean, x)) * _channel(scale, x)
        if _takes_kernels(x):
            db, dw = sums_with(dy, x, mean)
            dw = dw * scale
        else:
            db, dw = _channel_sums(_widen(dy)), _channel_sums(_widen(dy) * normal)
        dy = _widen(dy)
        dx = (dy - _channel(db / n, x) - normal * _channel(dw / n, x)) * _channel(scale, x)
        if weight is None:
            return dx.to(x.dtype), None, db if ctx.biased else None, None
        return (dx * _channel(weight, x)).to(x.dtype), dw, db if ctx.biased else None, None


def max_pool(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Compute max_pool2d if windows are 2 x 2 or 3 x 3 and do not overlap; else return NotImplemented."""
    k = kernel_size if isinstance(kernel_size, int) else kernel_size[0]
    plain = padding in (0, (0, 0)) and dilation in (1, (1, 1)) and not ceil_mode and not return_indices
    square = kernel_size in (k, (k, k)) and stride in (None, [], k, (k, k))
    if not (plain and square and 2 <= k <= 3 and min(input.shape[-2:]) >= k):
        return NotImplemented
    pool: Callable[..., tuple[Tensor, Tensor]] = MaxPool.apply
    return pool(input, k)[0]


class MaxPool(torch.autograd.Function):
    """The largest value of each window; of equal values, the first. A compiler can fuse its operators."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, k: int) -> Any:
        h, w = x.shape[-2] // k * k, x.shape[-1] // k * k
        best, at = x[..., 0:h:k, 0:w:k], torch.zeros((), dtype=torch.int8, device=x.device)
        for place in range(1, k * k):
            part = x[..., place // k : h : k, place % k : w : k]
            better = (part > best) | part.isnan()
            best, at = torch.where(better, part, best), torch.where(better, place, at)
        return best, at.to(torch.int8)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.k, ctx.size = inputs[1], inputs[0].shape[-2:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        (at,), k = ctx.saved_tensors, ctx.k
        place = torch.arange(k * k, device=dy.device, dtype=torch.int8).view(k, 1, k)
        spread = torch.where(at[..., :, None, :, None] == place, dy[..., :, None, :, None], 0.0)
        dx = spread.flatten(-4, -3).flatten(-2, -1)
        missing = ctx.size[1] - dx.shape[-1], ctx.size[0] - dx.shape[-2]
        return F.pad(dx, (0, missing[0], 0, missing[1])) if any(missing) else dx, None


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Compute F.group_norm: normalise each group of channels of each sample."""
    n, channels, *rest = input.shape
    grouped = _widen(input).reshape(n, num_groups, channels // num_groups, *rest)
    var, mean = torch.var_mean(grouped, list(range(2, grouped.dim())), correction=0, keepdim=True)
    normal = ((grouped - mean) * torch.rsqrt(var + eps)).flatten(1, 2)
    return _affine(normal, weight, bias).to(input.dtype)


def _normalise(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    normal = (_widen(x) - _channel(mean, x)) * torch.rsqrt(_channel(var, x) + eps)
    return _affine(normal, weight, bias).to(x.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * _channel(weight, x)
    return x if bias is None else x + _channel(bias, x)


def _channel(values: Tensor, x: Tensor) -> Tensor:
    """Return `values`, one for each channel, reshaped so that they broadcast along axis 1 of `x`."""
    return values.view(-1, *[1] * (x.dim() - 2))


def _takes_kernels(x: Tensor) -> bool:
    """Return whether our kernels sum the channels of x: images of at most float32 on a GPU."""
    return x.is_cuda and x.dim() > 2 and x.dtype != torch.float64


def _channel_sums(x: Tensor) -> Tensor:
    """Return the sum of each channel (axis 1) over all other axes.

    If samples are large, sum each sample first: these many sums run in parallel.
    """
    if x.dim() > 2 and x[0, 0].numel() >= LARGE_CHANNEL:
        return x.flatten(2).sum(2).sum(0)
    return x.sum([0, *range(2, x.dim())])


def _variance_and_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean of each channel (axis 1) over all other axes.

    If samples are large, compute them from the variance and the mean of each sample.
    """
    if x.dim() == 2 or x[0, 0].numel() < LARGE_CHANNEL:
        return torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    within, means = torch.var_mean(x.flatten(2), 2, correction=0)
    between, mean = torch.var_mean(means, 0, correction=0)
    return within.mean(0) + between, mean


def _widen(x: Tensor) -> Tensor:
    """Return bf16 and float16 numbers as float32, for accurate sums; other numbers unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def mean_pool(input: Tensor, output_size: Any) -> Any:
    """Compute adaptive_avg_pool2d if its output is one pixel; else return NotImplemented."""
    return input.mean((-2, -1), keepdim=True) if output_size in (1, (1, 1)) else NotImplemented


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute scaled_dot_product_attention by its formula: vmap has no rule for the fused kernels."""
    if enable_gqa:
        return NotImplemented
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = torch.where(attn_mask, scores, -torch.inf) if masked else scores + attn_mask
    weights = scores.softmax(-1) if attn_mask is None else _softmax(scores)
    return F.dropout(weights, dropout_p, training=dropout_p > 0) @ value


def _softmax(scores: Tensor) -> Tensor:
    """Return the softmax over the last axis; a row of only -inf (nothing to attend to) is 0, as in torch."""
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.where(nothing, 0.0, torch.where(nothing, 0.0, scores).softmax(-1))


def multi_head(*args: Any, **kwargs: Any) -> Any:
    """Compute F.multi_head_attention_forward with need_weights=True, which avoids the fused kernels."""
    out, weights = F.multi_head_attention_forward(*args, **kwargs | {"need_weights": True})
    return out, weights if kwargs.get("need_weights", True) else None
