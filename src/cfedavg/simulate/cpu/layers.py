"""Layers in place of torch's, with their own gradients: convolution and max-pooling in one, and linear.

They are for float32, and for bf16 under autocast. In bf16 the operands of products are rounded to bf16 and
their sums are in float32; so is the gradient of the weights, which torch would round to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cfedavg.core.kernels import import_numba

FEW = 4  # channels of images for which oneDNN's convolutions are slow
LANES = 16  # channels are handled in groups of so many
LARGE = 2**20  # products of a linear layer, below which the call costs more than the arithmetic


@cache
def _kernels() -> ModuleType:
    """Return the compiled loops. To import them takes a third of a second, and many runs need none."""
    import_numba()
    from cfedavg.simulate.cpu import kernels

    return kernels


class Convolution(NamedTuple):
    """The arguments of a convolution whose result may be pooled; strides and dilations are 1."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    padding: tuple[int, int]

    @property
    def sizes(self) -> tuple[int, int]:
        """The height and width of the result."""
        pairs = zip(self.x.shape[2:], self.padding, self.weight.shape[2:], strict=True)
        height, width = (n + 2 * p - k + 1 for n, p, k in pairs)
        return height, width


def read_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Convolution | None:
    """Return the arguments of torch.conv2d if `convolve_and_pool` is for them, else None."""
    plain = _is_pair(stride, 1) and _is_pair(dilation, 1) and groups == 1 and not isinstance(padding, str)
    if not plain or input.dim() != 4 or weight.dtype != torch.float32:
        return None
    if input.dtype != torch.float32 and not (input.dtype == torch.bfloat16 and _autocasts()):
        return None
    out, channels = weight.shape[:2]
    few = channels <= FEW and out % LANES == 0 and not input.requires_grad
    if not (few or channels % LANES == 0):
        return None
    pads = (padding, padding) if isinstance(padding, int) else (*padding, *padding)[:2]
    return Convolution(input, weight, bias, pads)


def is_pooling_by_two(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> bool:
    """Return whether F.max_pool2d, called so, pools windows of 2 x 2 that do not overlap."""
    plain = _is_pair(padding, 0) and _is_pair(dilation, 1) and not ceil_mode and not return_indices
    strides = stride is None or stride == [] or _is_pair(stride, 2)
    return plain and strides and _is_pair(kernel_size, 2)


def _is_pair(value: Any, number: int) -> bool:
    return value == number or (isinstance(value, tuple | list) and all(each == number for each in value))


def _autocasts() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16


def convolve_and_pool(given: Convolution, *, relu: bool, convolved: Tensor | None = None) -> Tensor:
    """Return max_pool2d(relu(conv2d(...)), 2), with windows of 2 x 2; `relu` may be left out.

    `convolved` is the result of convolution and ReLU if it is known already.
    """
    with torch._C.DisableTorchFunction():  # a mode would look at each call inside
        known = None if convolved is None else convolved.detach()
        layer: Callable[..., Tensor] = ConvolveAndPool.apply
        found = layer(*given, relu, known)
    return found


class ConvolveAndPool(torch.autograd.Function):
    """A convolution, ReLU if asked for, and max-pooling by 2."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        padding: tuple[int, int],
        relu: bool,
        convolved: Tensor | None,
    ) -> Tensor:
        dtype = torch.bfloat16 if _autocasts() else torch.float32
        height, width = Convolution(x, weight, bias, padding).sizes
        ctx.padding, ctx.biased, ctx.to = padding, bias is not None, x.dtype
        rounded: list[Any] = [None if each is None else each.to(dtype) for each in (x, weight, bias)]
        if convolved is None and weight.shape[1] > FEW:
            convolved = torch.conv2d(rounded[0], rounded[1], rounded[2], padding=padding)
        y = torch.empty(len(x), height // 2, width // 2, len(weight))
        at = torch.empty(y.shape, dtype=torch.uint8)
        floor = torch.tensor([0.0 if relu else -torch.inf])
        _pool(rounded, padding, convolved, (floor, y, at))
        ctx.save_for_backward(*rounded[:2], at)
        return y.to(dtype).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, at = ctx.saved_tensors
        g, images = dy.permute(0, 2, 3, 1).contiguous(), _images(x, ctx.padding)
        if weight.shape[1] <= FEW:
            dx, (dw, db) = None, _gradient_of_few_channels(images, g, at, weight)
        else:
            needs: bool = ctx.needs_input_grad[0]
            to_images, dw, db = _gradient(images, g, at, weight, needs=needs)
            dx = _unpad(to_images, ctx.padding).to(ctx.to) if needs else None
        return dx, dw, db if ctx.biased else None, None, None, None


def _gradient_of_few_channels(images: Tensor, g: Tensor, at: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weights and the bias, for images of few channels."""
    M, C, K, L = weight.shape
    dw, db = torch.zeros(K, L * C, M), torch.zeros(M)
    x, g = ((each if C == 1 else each.float()) for each in (images.flatten(2), g))
    arrays = _for_kernel(x), _for_kernel(g), at.numpy(), dw.numpy(), db.numpy()
    _kernels().add_few_channels_gradient(*arrays, C)
    return dw.view(K, L, C, M).permute(3, 2, 0, 1), db


def _gradient(
    images: Tensor, g: Tensor, at: Tensor, weight: Tensor, *, needs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the images, which are computed if `needs` is true, the weights and the bias."""
    w = weight.permute(0, 2, 3, 1).contiguous()
    dw, db = torch.zeros(w.shape), torch.zeros(len(weight))
    dx = torch.zeros(images.shape if needs else (0, 0, 0, 0))
    x, g, w = (_for_kernel(each) for each in (images.flatten(2), g, w.flatten(2)))
    _kernels().add_gradient(
        x, g, at.numpy(), w, dw.flatten(2).numpy(), db.numpy(), dx.flatten(2).numpy(), weight.shape[1]
    )
    return dx, dw.permute(0, 3, 1, 2), db


def _for_kernel(tensor: Tensor) -> Any:
    """Return a tensor as an array: the bits of bf16 if the processor multiplies bf16, else in float32."""
    if tensor.dtype == torch.bfloat16 and _kernels().DOTS:
        return tensor.view(torch.int16).numpy()
    return tensor.float().numpy()


def _images(x: Tensor, padding: tuple[int, int]) -> Tensor:
    """Return images (N, H, W, C) with zeros around them."""
    down, right = padding
    padded = F.pad(x, (right, right, down, down)) if down or right else x
    return padded.permute(0, 2, 3, 1).contiguous()


def _unpad(images: Tensor, padding: tuple[int, int]) -> Tensor:
    """Return images (N, C, H, W) without the zeros around them."""
    down, right = padding
    inner = images[:, down : images.shape[1] - down, right : images.shape[2] - right]
    return inner.permute(0, 3, 1, 2)


def _by_tap(weight: Tensor) -> Tensor:
    """Return weights (M, C, K, L) as (K, L C, M) in float32."""
    return weight.permute(2, 3, 1, 0).contiguous().float().flatten(1, 2)


def _pool(
    rounded: list[Any], padding: tuple[int, int], convolved: Tensor | None, to: tuple[Tensor, ...]
) -> None:
    """Compute the pooled values, and which of four pixels each comes from; `to` is (floor, y, at)."""
    x, weight, bias = rounded
    floor, y, at = (each.numpy() for each in to)
    if convolved is None:
        offset = torch.zeros(len(weight)) if bias is None else bias.float()
        arrays = (_images(x, padding).float().flatten(2).numpy(), _by_tap(weight).numpy(), offset.numpy())
        _kernels().convolve_and_pool(*arrays, floor, y, at, weight.shape[1])
    else:
        _kernels().pool(convolved.permute(0, 2, 3, 1).contiguous().float().numpy(), floor, y, at)


def takes_linear(input: Tensor, weight: Tensor) -> bool:
    """Return whether `Linear` is for a call of F.linear."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or _autocasts():
        return False  # without AVX-512, oneDNN is no faster than MKL
    known = input.dtype == weight.dtype == torch.float32 and input.dim() >= 2 and weight.dim() == 2
    return known and input.numel() * len(weight) >= LARGE


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a b^T + bias by oneDNN, which is twice as fast as torch's choice, MKL, on AMD with AVX-512."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return found


class Linear(torch.autograd.Function):
    """F.linear in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return multiply(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, g = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = multiply(g, weight.t()).view_as(x) if ctx.needs_input_grad[0] else None
        dw = multiply(g.t(), rows.t()) if ctx.needs_input_grad[1] else None
        return dx, dw, g.sum(0) if ctx.biased else None
