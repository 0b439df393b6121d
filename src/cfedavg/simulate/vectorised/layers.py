"""Group norm, pooling and attention from plain operators, which vmap supports and a compiler can fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cfedavg.simulate.vectorised.batch_norm import channel, widen


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
    grouped = widen(input).reshape(n, num_groups, channels // num_groups, *rest)
    var, mean = torch.var_mean(grouped, list(range(2, grouped.dim())), correction=0, keepdim=True)
    normal = ((grouped - mean) * torch.rsqrt(var + eps)).flatten(1, 2)
    return _affine(normal, weight, bias).to(input.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * channel(weight, x)
    return x if bias is None else x + channel(bias, x)


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
