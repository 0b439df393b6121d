"""Three operators of torch: the convolution of a block of clients, and its gradients.

Channels come last: x is (m, N, H, W, C), w is (m, KH, KW, C, O), y is (m, N, OH, OW, O). On a GPU they are
Triton kernels; on a CPU one client is convolved after another, which is what the kernels are tested with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

# `shape` is ten numbers: height and width of the input, of the kernel, stride, padding and dilation.


def out_size(shape: Sequence[int]) -> tuple[int, int]:
    """Height and width of the output."""
    size, kernel, stride, padding, dilation = (shape[i : i + 2] for i in range(0, 10, 2))
    h, w = ((size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    return h, w


@torch.library.custom_op("cfedavg::convolve", mutates_args=())
def forward(x: Tensor, w: Tensor, shape: Sequence[int], dots: str) -> Tensor:
    """y of x and w."""
    if x.is_cuda:
        y: Tensor = _kernels().forward(x, w, shape, dots)
        return y
    each = [torch.conv2d(a, b, **_moves(shape)) for a, b in zip(_images(x), _weights(w), strict=True)]
    return torch.stack(each).permute(0, 1, 3, 4, 2).contiguous()


@forward.register_fake
def _(x: Tensor, w: Tensor, shape: Sequence[int], dots: str) -> Tensor:
    return x.new_empty(*x.shape[:2], *out_size(shape), w.shape[-1])


@torch.library.custom_op("cfedavg::convolve_input_grad", mutates_args=())
def input_grad(dy: Tensor, w: Tensor, shape: Sequence[int], dots: str) -> Tensor:
    """dx of dy and w."""
    if dy.is_cuda:
        dx: Tensor = _kernels().input_grad(dy, w, shape, dots)
        return dx
    size = (dy.shape[1], w.shape[3], shape[0], shape[1])
    pairs = zip(_images(dy), _weights(w), strict=True)
    each = [conv2d_input(size, b, a, **_moves(shape)) for a, b in pairs]  # type: ignore[no-untyped-call]
    return torch.stack(each).permute(0, 1, 3, 4, 2).contiguous()


@input_grad.register_fake
def _(dy: Tensor, w: Tensor, shape: Sequence[int], dots: str) -> Tensor:
    return dy.new_empty(*dy.shape[:2], shape[0], shape[1], w.shape[3])


@torch.library.custom_op("cfedavg::convolve_weight_grad", mutates_args=())
def weight_grad(x: Tensor, dy: Tensor, shape: Sequence[int], dots: str) -> Tensor:
    """dw of x and dy, in float32 at least."""
    if x.is_cuda:
        dw: Tensor = _kernels().weight_grad(x, dy, shape, dots)
        return dw
    size = (dy.shape[-1], x.shape[-1], shape[2], shape[3])
    pairs = zip(_images(x), _images(dy), strict=True)
    each = [conv2d_weight(a, size, b, **_moves(shape)) for a, b in pairs]  # type: ignore[no-untyped-call]
    return torch.stack(each).permute(0, 3, 4, 2, 1).contiguous().to(_at_least_single(x.dtype))


@weight_grad.register_fake
def _(x: Tensor, dy: Tensor, shape: Sequence[int], dots: str) -> Tensor:
    size = (len(x), shape[2], shape[3], x.shape[-1], dy.shape[-1])
    return x.new_empty(size, dtype=_at_least_single(x.dtype))


def _kernels() -> Any:
    from cfedavg.simulate.vectorised import kernels  # Triton comes with torch's CUDA builds only

    return kernels


def _moves(shape: Sequence[int]) -> dict[str, Any]:
    return {"stride": list(shape[4:6]), "padding": list(shape[6:8]), "dilation": list(shape[8:10])}


def _images(x: Tensor) -> Tensor:
    return x.permute(0, 1, 4, 2, 3)


def _weights(w: Tensor) -> Tensor:
    return w.permute(0, 4, 3, 1, 2)


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
