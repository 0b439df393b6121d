"""Convolution of a block of clients at once, each with its own weights: our vmap rule for conv2d.

vmap's own rule makes a grouped convolution, for which cuDNN has no fast kernels. Our kernels read images and
weights in channels-last order and multiply on the tensor cores; the matrix of patches is never written.

Three torch operators do the work. Channels come last: x is (m, N, H, W, C), w is (m, KH, KW, C, O), y is
(m, N, OH, OW, O). On a GPU the operators are Triton kernels. On a CPU the operators convolve one client after
another; tests compare the kernels with these operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

# For each precision: the dtype of the operands, and how Triton multiplies the operands.
DOTS = {
    "bf16": (torch.bfloat16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "float32": (torch.float32, "tf32x3"),  # three TF32 products: as exact as float32
    "float64": (torch.float64, "ieee"),
}
# `shape` below is ten numbers: height and width of input, kernel, stride, padding and dilation.


def out_size(shape: Sequence[int]) -> tuple[int, int]:
    """Return height and width of a convolution's output."""
    size, kernel, stride, padding, dilation = (shape[i : i + 2] for i in range(0, 10, 2))
    h, w = ((size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    return h, w


@torch.library.custom_op("cfedavg::convolve", mutates_args=())
def forward(x: Tensor, w: Tensor, shape: Sequence[int], dots: str) -> Tensor:
    """Return the convolution y of x with w."""
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
    """Return dx, the gradient of the loss by x, from dy and w."""
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
    """Return dw, the gradient of the loss by w, from x and dy, in float32 or float64."""
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
    """Return a view of (m, N, H, W, C) as (m, N, C, H, W); in memory the channels stay last."""
    return x.permute(0, 1, 4, 2, 3)


def _weights(w: Tensor) -> Tensor:
    """Return a view of (m, KH, KW, C, O) as (m, O, C, KH, KW)."""
    return w.permute(0, 4, 3, 1, 2)


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


class Shape(NamedTuple):
    """The sizes of a convolution: for each property, height and width."""

    size: tuple[int, int]  # of the input
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def flat(self) -> list[int]:
        """Return the ten numbers that the torch operators above take as `shape`."""
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
    """Compute conv2d by our kernels in precision `dots`; return NotImplemented if torch must compute it."""
    size, kernel = input.shape[2:], weight.shape[2:]
    if dots is None or groups != 1 or isinstance(padding, str) or input.dim() != 4:
        return NotImplemented
    if _pair(stride) != (1, 1) != _pair(dilation):
        return NotImplemented
    shape = Shape(_pair(size), _pair(kernel), _pair(stride), _pair(padding), _pair(dilation))
    y = _apply(Convolution)(input, weight, shape, dots)
    return y if bias is None else y + bias.view(-1, 1, 1).to(y.dtype)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class Clients(torch.autograd.Function):
    """An autograd function of tensors whose first axis is the client; without vmap, there is one client."""

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
    """Return the tensor with the clients' axis in front; a tensor that clients share is repeated."""
    return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


class Convolution(Clients):
    """The convolution y = conv2d(x, w) of each client."""

    @staticmethod
    def block(a: Tensor, b: Tensor, shape: Shape, dots: str) -> Tensor:
        dtype, how = DOTS[dots]
        return _images(forward(_last(a, dtype), _kernel(b, dtype), shape.flat, how))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = _apply(InputGrad)(dy, w, ctx.shape, ctx.dots) if ctx.needs_input_grad[0] else None
        dw = _apply(WeightGrad)(x, dy, ctx.shape, ctx.dots) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class InputGrad(Clients):
    """The gradient dx of each client, from dy and w."""

    @staticmethod
    def block(a: Tensor, b: Tensor, shape: Shape, dots: str) -> Tensor:
        dtype, how = DOTS[dots]
        return _images(input_grad(_last(a, dtype), _kernel(b, dtype), shape.flat, how))


class WeightGrad(Clients):
    """The gradient dw of each client, from x and dy, in the precision of the weights."""

    @staticmethod
    def block(a: Tensor, b: Tensor, shape: Shape, dots: str) -> Tensor:
        dtype, how = DOTS[dots]
        return _weights(weight_grad(_last(a, dtype), _last(b, dtype), shape.flat, how))


def _apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    return function.apply


def _last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (m, N, C, H, W) as a contiguous (m, N, H, W, C)."""
    return x.to(dtype).permute(0, 1, 3, 4, 2).contiguous()


def _kernel(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (m, O, C, KH, KW) as a contiguous (m, KH, KW, C, O)."""
    return w.to(dtype).permute(0, 3, 4, 2, 1).contiguous()
