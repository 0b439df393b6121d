"""Convolution of a block of clients at once, each with its own weights: what vmap does with conv2d here.

vmap's own rule makes it a grouped convolution, for which cuDNN has no fast kernels. Ours read the clients'
images and weights channels-last and multiply on the tensor cores; the matrix of patches is never written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cfedavg.simulate.vectorised import ops

# What the operands are, and how Triton multiplies them.
DOTS = {
    "bf16": (torch.bfloat16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "float32": (torch.float32, "tf32x3"),  # three products of halves: as exact as float32
    "float64": (torch.float64, "ieee"),
}


class Shape(NamedTuple):
    """How a convolution moves over its input, each as (height, width)."""

    size: tuple[int, int]  # of the input
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def flat(self) -> list[int]:
        """As an operator of torch takes it; `Shape.of` reads it."""
        return [number for pair in self for number in pair]


def convolve(
    dots: str | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """conv2d by our kernels, multiplying as `dots` says; NotImplemented where torch must do it."""
    size, kernel = input.shape[2:], weight.shape[2:]
    if dots is None or groups != 1 or isinstance(padding, str) or input.dim() != 4:
        return NotImplemented
    if _pair(stride) != (1, 1) != _pair(dilation):
        return NotImplemented
    shape = Shape(_pair(size), _pair(kernel), _pair(stride), _pair(padding), _pair(dilation))
    y = _applied(Convolution)(input, weight, shape, dots)
    return y if bias is None else y + bias.view(-1, 1, 1).to(y.dtype)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class Clients(torch.autograd.Function):
    """A function of tensors with a client in front; one without vmap is a block of one client."""

    @staticmethod
    def block(a: Tensor, b: Tensor, shape: Shape, dots: str) -> Tensor:
        raise NotImplementedError

    @classmethod
    def forward(cls, a: Tensor, b: Tensor, shape: Shape, dots: str) -> Tensor:
        return cls.block(a[None], b[None], shape, dots)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.shape, ctx.dots = inputs[2:]
        ctx.save_for_backward(*inputs[:2])

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, a: Tensor, b: Tensor, shape: Shape, dots: str) -> Any:
        return cls.block(_front(a, in_dims[0], info), _front(b, in_dims[1], info), shape, dots), 0


def _front(tensor: Tensor, dim: int | None, info: Any) -> Tensor:
    """The tensor with the clients' axis in front; one that they share is repeated."""
    return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


class Convolution(Clients):
    """y = conv2d(x, w)."""

    @staticmethod
    def block(a: Tensor, b: Tensor, shape: Shape, dots: str) -> Tensor:
        dtype, how = DOTS[dots]
        return _second(ops.forward(_last(a, dtype), _kernel(b, dtype), shape.flat, how))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        input_grad, weight_grad = _applied(InputGrad), _applied(WeightGrad)
        dx = input_grad(dy, w, ctx.shape, ctx.dots) if ctx.needs_input_grad[0] else None
        dw = weight_grad(x, dy, ctx.shape, ctx.dots) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class InputGrad(Clients):
    """dx, from dy and w."""

    @staticmethod
    def block(a: Tensor, b: Tensor, shape: Shape, dots: str) -> Tensor:
        dtype, how = DOTS[dots]
        return _second(ops.input_grad(_last(a, dtype), _kernel(b, dtype), shape.flat, how))


class WeightGrad(Clients):
    """dw, from x and dy; in float32, as the weights are."""

    @staticmethod
    def block(a: Tensor, b: Tensor, shape: Shape, dots: str) -> Tensor:
        dtype, how = DOTS[dots]
        dw = ops.weight_grad(_last(a, dtype), _last(b, dtype), shape.flat, how)
        return _param(dw)


def _applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    return function.apply


def _last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(m, N, C, H, W) with the channels last in memory, as (m, N, H, W, C)."""
    return x.to(dtype).permute(0, 1, 3, 4, 2).contiguous()


def _second(x: Tensor) -> Tensor:
    """Back to (m, N, C, H, W), the channels still last in memory."""
    return x.permute(0, 1, 4, 2, 3)


def _param(w: Tensor) -> Tensor:
    """Back to (m, O, C, KH, KW)."""
    return w.permute(0, 4, 3, 1, 2)


def _kernel(w: Tensor, dtype: torch.dtype) -> Tensor:
    """(m, O, C, KH, KW) as (m, KH, KW, C, O)."""
    return w.to(dtype).permute(0, 3, 4, 2, 1).contiguous()
