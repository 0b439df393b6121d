"""Convolution of a block of clients at once, each with its own weights: our vmap rule for conv2d.

vmap's own rule makes a grouped convolution, for which cuDNN has no fast kernels. Our kernels read images and
weights with channels last in memory and multiply on the tensor cores; the matrix of patches is never written.

Three torch operators do the work, for m clients with N images each. The axes are torch's: the images x have
shape (m, N, C, H, W), the weights w (m, O, C, KH, KW), the results y (m, N, O, OH, OW). In memory, channels
come last. The operators take tensors and not views with other axes, since torch's compiler copies a view
once for each operator that reads it. On a GPU the operators are Triton kernels. On a CPU the operators
convolve one client after another; tests compare the kernels with the operators on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

# For each precision: the dtype of the operands, and Triton's `input_precision`.
OPERANDS = {
    "bf16": (torch.bfloat16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "float32": (torch.float32, "tf32x3"),  # three TF32 products: as exact as float32
    "float64": (torch.float64, "ieee"),
}
# The order of axes in memory: images as (m, N, H, W, C), weights as (m, KH, KW, C, O).
IMAGES, WEIGHTS = (0, 1, 3, 4, 2), (0, 3, 4, 2, 1)


def output_size(shape: Sequence[int]) -> tuple[int, int]:
    """Return height and width of a convolution's output.

    `shape` holds ten numbers: height and width of input, kernel, stride, padding and dilation.
    """
    size, kernel, stride, padding, dilation = (shape[i : i + 2] for i in range(0, 10, 2))
    h, w = ((size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    return h, w


@torch.library.custom_op("cfedavg::convolve", mutates_args=())
def forward(x: Tensor, w: Tensor, shape: Sequence[int], input_precision: str) -> Tensor:
    """Return y, the convolution of each client's images x with the client's weights w."""
    if x.is_cuda:
        x, w = (as_stored(each, order) for each, order in ((x, IMAGES), (w, WEIGHTS)))
        return from_stored(_kernels().forward(x, w, shape, input_precision), IMAGES)
    return _each_client(torch.conv2d, x, w, shape, IMAGES)


@forward.register_fake
def _(x: Tensor, w: Tensor, shape: Sequence[int], input_precision: str) -> Tensor:
    return from_stored(x.new_empty(*x.shape[:2], *output_size(shape), w.shape[1]), IMAGES)


@torch.library.custom_op("cfedavg::convolve_input_grad", mutates_args=())
def input_grad(dy: Tensor, w: Tensor, shape: Sequence[int], input_precision: str) -> Tensor:
    """Return dx from dy and w; dx and dy are the gradients of the loss with respect to x and y."""
    if dy.is_cuda:
        dy, w = (as_stored(each, order) for each, order in ((dy, IMAGES), (w, WEIGHTS)))
        return from_stored(_kernels().input_grad(dy, w, shape, input_precision), IMAGES)
    grad = partial(conv2d_input, (dy.shape[1], w.shape[2], shape[0], shape[1]))
    return _each_client(grad, w, dy, shape, IMAGES)


@input_grad.register_fake
def _(dy: Tensor, w: Tensor, shape: Sequence[int], input_precision: str) -> Tensor:
    return from_stored(dy.new_empty(*dy.shape[:2], shape[0], shape[1], w.shape[2]), IMAGES)


@torch.library.custom_op("cfedavg::convolve_weight_grad", mutates_args=())
def weight_grad(x: Tensor, dy: Tensor, shape: Sequence[int], input_precision: str) -> Tensor:
    """Return dw, the gradient of the loss with respect to w, from x and dy, in float32 or float64."""
    if x.is_cuda:
        x, dy = as_stored(x, IMAGES), as_stored(dy, IMAGES)
        return from_stored(_weight_kernels().weight_grad(x, dy, shape, input_precision), WEIGHTS)
    size = (dy.shape[2], x.shape[2], shape[2], shape[3])
    grad = lambda a, b, **moves: conv2d_weight(a, size, b, **moves)  # type: ignore[no-untyped-call] # noqa: E731
    dw = _each_client(grad, x, dy, shape, WEIGHTS)
    return dw.to(torch.promote_types(x.dtype, torch.float32))


@weight_grad.register_fake
def _(x: Tensor, dy: Tensor, shape: Sequence[int], input_precision: str) -> Tensor:
    size = (len(x), shape[2], shape[3], x.shape[2], dy.shape[2])
    return from_stored(x.new_empty(size, dtype=torch.promote_types(x.dtype, torch.float32)), WEIGHTS)


def as_stored(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return a contiguous tensor with the axes of `tensor` in another order; copy only if it has to."""
    return tensor.permute(order).contiguous()


def from_stored(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the tensor from which `as_stored` makes `tensor`, in the same memory."""
    return tensor.permute([order.index(axis) for axis in range(len(order))])


def store(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `tensor`, or a copy whose axes lie in memory in this order."""
    stored = tensor.permute(order)
    return tensor if stored.is_contiguous() else from_stored(stored.contiguous(), order)


def _kernels() -> Any:
    from cfedavg.simulate.vectorised import kernels  # Triton comes with torch's CUDA builds only

    return kernels


def _weight_kernels() -> Any:
    from cfedavg.simulate.vectorised import weight_kernels

    return weight_kernels


def _each_client(
    function: Callable[..., Tensor], a: Tensor, b: Tensor, shape: Sequence[int], order: tuple[int, ...]
) -> Tensor:
    moves = {"stride": list(shape[4:6]), "padding": list(shape[6:8]), "dilation": list(shape[8:10])}
    each = [function(first, second, **moves) for first, second in zip(a, b, strict=True)]
    return store(torch.stack(each), order)


def convolve(
    precision: str | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Compute conv2d by our kernels in `precision`; return NotImplemented if our kernels cannot."""
    if precision is None or groups != 1 or isinstance(padding, str) or input.dim() != 4:
        return NotImplemented
    if _pair(stride) != (1, 1) != _pair(dilation):
        return NotImplemented
    pairs = (input.shape[2:], weight.shape[2:], stride, padding, dilation)
    shape = tuple(number for each in pairs for number in _pair(each))
    rounded = weight.detach().to(OPERANDS[precision][0])  # once, for both directions
    y = apply_of(Convolution)(input, rounded, shape, precision, weight)
    return y if bias is None else y + bias.view(-1, 1, 1).to(y.dtype)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class OfClients(torch.autograd.Function):
    """The base of autograd functions that compute all clients of a vmap at once; without vmap, one client."""

    operator: Any  # one of the three operators above
    orders: tuple[tuple[int, ...], ...]  # the orders in memory of the two tensors

    @classmethod
    def block(cls, a: Tensor, b: Tensor, shape: Sequence[int], precision: str) -> Tensor:
        """Return the value for a block of clients."""
        dtype, input_precision = OPERANDS[precision]
        a, b = (store(each.to(dtype), order) for each, order in zip((a, b), cls.orders, strict=True))
        value: Tensor = cls.operator(a, b, shape, input_precision)
        return value

    @classmethod
    def forward(cls, a: Tensor, b: Tensor, shape: Sequence[int], precision: str, *_: Tensor) -> Tensor:
        return cls.block(a[None], b[None], shape, precision)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.shape, ctx.precision = inputs[2:4]
        ctx.save_for_backward(*inputs[:2])

    @classmethod
    def vmap(
        cls, info: Any, in_dims: Any, a: Tensor, b: Tensor, shape: Sequence[int], precision: str, *_: Tensor
    ) -> Any:
        a, b = (clients_first(each, dim, info) for each, dim in zip((a, b), in_dims, strict=False))
        return cls.block(a, b, shape, precision), 0


def clients_first(tensor: Tensor, dim: int | None, info: Any) -> Tensor:
    """Return the tensor with the clients' axis in front; a tensor that clients share is repeated."""
    return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


class InputGrad(OfClients):
    """For each client, the gradient dx of the loss with respect to x, from dy and w."""

    operator, orders = input_grad, (IMAGES, WEIGHTS)


class WeightGrad(OfClients):
    """For each client, the gradient dw of the loss with respect to w, from x and dy."""

    operator, orders = weight_grad, (IMAGES, IMAGES)


class Convolution(OfClients):
    """The convolution y = conv2d(x, w) of each client.

    w is given twice: rounded to the precision of the products, and as it is, to get the gradient.
    """

    operator, orders = forward, (IMAGES, WEIGHTS)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = apply_of(InputGrad)(dy, w, ctx.shape, ctx.precision) if ctx.needs_input_grad[0] else None
        dw = apply_of(WeightGrad)(x, dy, ctx.shape, ctx.precision) if ctx.needs_input_grad[4] else None
        return dx, None, None, None, dw


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    return function.apply
