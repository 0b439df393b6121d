"""Sums over each channel of the images of many clients, for the batch norms of a step on a GPU.

Torch's compiler sums the channels of channels-last images at a quarter of the memory's bandwidth. The two
operators of this module read images of m clients as a tensor of shape (m, R, C): R rows (the pixels of all
images) and C channels. The rows are split into chunks, so that a few clients fill a GPU too; a result has
shape (chunks, m, C). On a GPU the operators are Triton kernels. On a CPU they are plain sums, and tests
compare the kernels with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cfedavg.simulate.vectorised.convolution import apply_of, clients_first

ROWS = 256  # a chunk is a multiple of so many rows
CHANNELS = 64  # channels of a program
PROGRAMS = 2112  # enough for a large GPU: sixteen programs for each of its 132 processors


def variance_and_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean of each channel (axis 1) over all other axes, in float32."""
    rows = _rows(x)
    means, squares = apply_of(_Moments)(rows)
    R, length = len(rows), chunk_rows(len(rows), len(means))
    starts = torch.arange(0, R, length, device=x.device)
    counts = (R - starts).clamp(max=length).to(means.dtype)[:, None]
    mean = (means * counts).sum(0) / R
    variance = (squares + counts * (means - mean).square()).sum(0) / R
    return variance, mean


def sums_with(dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each channel (axis 1) the sum of dy and the sum of dy * (x - mean), in float32."""
    sums, products = apply_of(_ChannelSums)(_rows(dy), _rows(x), mean)
    return sums.sum(0), products.sum(0)


def _rows(x: Tensor) -> Tensor:
    """Return one client's images (N, C, H, W) as rows (N H W, C)."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def chunk_rows(R: int, chunks: int) -> int:
    """Return the number of rows in a chunk, if R rows are split into so many chunks; the last is shorter."""
    return -(-R // (chunks * ROWS)) * ROWS


def count_chunks(m: int, R: int, C: int) -> int:
    """Return the number of chunks into which the rows are split."""
    wanted = max(1, PROGRAMS // (m * -(-C // CHANNELS)))
    return -(-R // chunk_rows(R, wanted))


@torch.library.custom_op("cfedavg::moments", mutates_args=())
def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each chunk, client and channel, the mean of x and the sum of (x - mean)^2."""
    chunks = count_chunks(*x.shape)
    if x.is_cuda:
        found: tuple[Tensor, Tensor] = _kernels().moments(x.contiguous(), chunks)
        return found
    parts = torch.split(x.float(), chunk_rows(x.shape[1], chunks), 1)
    means = torch.stack([part.mean(1) for part in parts])
    pairs = zip(parts, means, strict=True)
    return means, torch.stack([(part - mean[:, None]).square().sum(1) for part, mean in pairs])


@torch.library.custom_op("cfedavg::channel_sums", mutates_args=())
def channel_sums(dy: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each chunk, client and channel, the sums of dy and of dy * (x - mean).

    `mean` has shape (m, C).
    """
    chunks = count_chunks(*x.shape)
    if x.is_cuda:
        found: tuple[Tensor, Tensor]
        found = _kernels().channel_sums(dy.contiguous(), x.contiguous(), mean.contiguous(), chunks)
        return found
    length = chunk_rows(x.shape[1], chunks)
    terms = dy.float(), dy.float() * (x.float() - mean[:, None])
    sums, products = (torch.stack([part.sum(1) for part in torch.split(each, length, 1)]) for each in terms)
    return sums, products


def _fake(x: Tensor) -> tuple[Tensor, Tensor]:
    m, R, C = x.shape
    shape = count_chunks(m, R, C), m, C
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


moments.register_fake(_fake)
channel_sums.register_fake(lambda dy, x, mean: _fake(x))


class _OfClients(torch.autograd.Function):
    """The base of functions that call an operator for all clients of a vmap; without vmap, for one client."""

    operator: Any

    @classmethod
    def forward(cls, *args: Tensor) -> Any:
        return tuple(each[:, 0] for each in cls.operator(*(arg[None] for arg in args)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *args: Tensor) -> Any:
        pairs = zip(args, in_dims, strict=True)
        return cls.operator(*(clients_first(arg, dim, info) for arg, dim in pairs)), (1, 1)


class _Moments(_OfClients):
    operator = moments


class _ChannelSums(_OfClients):
    operator = channel_sums


def _kernels() -> Any:
    from cfedavg.simulate.vectorised import sum_kernels  # Triton comes with torch's CUDA builds only

    return sum_kernels
