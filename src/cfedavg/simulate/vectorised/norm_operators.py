"""The operators of batch norm on a GPU: sums over channels, and what a ReLU fuses with.

Torch's compiler sums the channels of channels-last images at a quarter of the memory's bandwidth, and passes
the mask of a ReLU through memory. The four operators of this module take the images of m clients as a tensor
(m, N, C, ...) with channels last in memory, and channels' values as (m, C). On a GPU they are Triton kernels.
On a CPU they are plain torch code, and tests compare the kernels with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cfedavg.simulate.vectorised.convolution import apply_of, as_stored, clients_first, from_stored, store


def _order(x: Tensor) -> tuple[int, ...]:
    """Return the order of axes in memory: channels, which are axis 2, come last."""
    return (0, 1, *range(3, x.dim()), 2)


def _rows(x: Tensor) -> Tensor:
    """Return images as rows (m, R, C): R rows (the pixels of all images) and C channels."""
    return as_stored(x, _order(x)).flatten(1, -2)


def _images(rows: Tensor, x: Tensor) -> Tensor:
    """Return rows as images of the shape of `x`, in the same memory."""
    order = _order(x)
    return from_stored(rows.view([x.shape[axis] for axis in order]), order)


@torch.library.custom_op("cfedavg::moments", mutates_args=())
def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of each channel, in float32."""
    if x.is_cuda:
        found: tuple[Tensor, Tensor] = _kernels().moments(_rows(x))
        return found
    var, mean = torch.var_mean(_rows(x).float(), 1, correction=0)
    return mean, var


@_moments.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _of_channels(x), _of_channels(x)


@torch.library.custom_op("cfedavg::channel_sums", mutates_args=())
def _channel_sums(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return the sums of dy and of dy * (x - mean), in float32; behind a ReLU, of the dy that passes it."""
    if x.is_cuda:
        found: tuple[Tensor, Tensor]
        found = _kernels().channel_sums(_rows(dy), _rows(x), mean, scale, shift, relu)
        return found
    centered, dy = _masked(_rows(dy), _rows(x), mean, scale, shift, relu)
    return dy.sum(1), (dy * centered).sum(1)


@_channel_sums.register_fake
def _(dy: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _of_channels(x), _of_channels(x)


@torch.library.custom_op("cfedavg::normalise_relu", mutates_args=())
def _normalise_relu(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    """Return relu((x - mean) * scale + shift + residual)."""
    if x.is_cuda:
        other = None if residual is None else _rows(residual)
        return _images(_kernels().normalise_relu(_rows(x), mean, scale, shift, other), x)
    y = (_rows(x).float() - mean[:, None]) * scale[:, None] + shift[:, None]
    if residual is not None:
        y += _rows(residual).float()
    return _images(y.relu().to(x.dtype), x)


@_normalise_relu.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return _like(x)


@torch.library.custom_op("cfedavg::normalise_grad", mutates_args=())
def _normalise_grad(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    scale: Tensor,
    shift: Tensor,
    first: Tensor,
    second: Tensor,
    relu: bool,
) -> Tensor:
    """Return scale * (dy - first - (x - mean) * second); behind a ReLU, for the dy that passes it."""
    if x.is_cuda:
        rows = _kernels().normalise_grad(_rows(dy), _rows(x), mean, scale, shift, first, second, relu)
        return _images(rows, x)
    centered, masked = _masked(_rows(dy), _rows(x), mean, scale, shift, relu)
    dx = (masked - first[:, None] - centered * second[:, None]) * scale[:, None]
    return _images(dx.to(x.dtype), x)


@_normalise_grad.register_fake
def _(dy: Tensor, x: Tensor, *_: Any) -> Tensor:
    return _like(x)


def _of_channels(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]), dtype=torch.float32)


def _like(x: Tensor) -> Tensor:
    """Return a new tensor of the shape of x, with channels last in memory."""
    order = _order(x)
    return from_stored(x.new_empty([x.shape[axis] for axis in order]), order)


def _masked(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return x - mean and the dy that passes the ReLU, as float32."""
    centered = x.float() - mean[:, None]
    passes = centered * scale[:, None] + shift[:, None] > 0
    return centered, torch.where(passes, dy.float(), 0.0) if relu else dy.float()


class _OfClients(torch.autograd.Function):
    """The base of functions that call an operator for all clients of a vmap; without vmap, for one client."""

    operator: Any

    @classmethod
    def call(cls, *args: Any) -> Any:
        """Call the operator; its images have channels last in memory."""
        stored = (store(arg, _order(arg)) if _is_images(arg) else arg for arg in args)
        return cls.operator(*stored)

    @classmethod
    def forward(cls, *args: Any) -> Any:
        found = cls.call(*(arg[None] if isinstance(arg, Tensor) else arg for arg in args))
        return found[0] if isinstance(found, Tensor) else tuple(each[0] for each in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Any) -> Any:
        pairs = zip(args, in_dims, strict=True)
        found = cls.call(
            *(clients_first(arg, dim, info) if isinstance(arg, Tensor) else arg for arg, dim in pairs)
        )
        return found, 0 if isinstance(found, Tensor) else (0,) * len(found)


def _is_images(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.dim() > 2


class _Moments(_OfClients):
    operator = _moments


class _ChannelSums(_OfClients):
    operator = _channel_sums


class _NormaliseRelu(_OfClients):
    operator = _normalise_relu


class _NormaliseGrad(_OfClients):
    operator = _normalise_grad


# For one client of a vmap: the axes of images are (N, C, ...), and a channel's values have one axis.
moments, channel_sums = apply_of(_Moments), apply_of(_ChannelSums)
normalise_relu, normalise_grad = apply_of(_NormaliseRelu), apply_of(_NormaliseGrad)


def _kernels() -> Any:
    from cfedavg.simulate.vectorised import norm_kernels  # Triton comes with torch's CUDA builds only

    return norm_kernels
