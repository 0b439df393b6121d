"""Triton kernels: sums over each channel of the rows of many clients.

The arguments have shape (m, R, C), with the channels last in memory. A program adds up one chunk of the rows
of one client, for BC channels. It reads BR rows at once and sums them at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from cfedavg.simulate.vectorised.channel_sums import CHANNELS, ROWS, chunk_rows


@triton.jit
def _moments(x, means, squares, R, chunk, C: constexpr, BR: constexpr, BC: constexpr):
    """Store the mean of each channel, and the sum of the squares of the differences to the mean."""
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * chunk
    last = min(first + chunk, R)
    x += client * R * C
    # Numbers near the first row leave little to cancel in the sum of squares.
    near = tl.load(x + first * C + c, c < C, other=0.0)
    shift = near.to(tl.float32)[None, :]
    sums = tl.zeros((BR, BC), tl.float32)
    products = tl.zeros((BR, BC), tl.float32)
    for r0 in range(first, last, 2 * BR):
        r = r0 + tl.arange(0, BR)
        at = r[:, None] * C + c[None, :]
        # Two loads under way at once keep the memory busy. Rows outside count as 0.
        one = tl.load(x + at, (r < last)[:, None] & (c < C)[None, :], other=near[None, :])
        two = tl.load(x + at + BR * C, (r + BR < last)[:, None] & (c < C)[None, :], other=near[None, :])
        one = one.to(tl.float32) - shift
        two = two.to(tl.float32) - shift
        sums += one + two
        products += one * one + two * two
    count = (last - first).to(tl.float32)
    total = tl.sum(sums, 0)
    to = (tl.program_id(0) * tl.num_programs(1) + client) * C + c
    tl.store(means + to, near.to(tl.float32) + total / count, c < C)
    tl.store(squares + to, tl.sum(products, 0) - total * total / count, c < C)


@triton.jit
def _channel_sums(dy, x, mean, sums_out, products_out, R, chunk, C: constexpr, BR: constexpr, BC: constexpr):
    """Store the sums of dy and of dy * (x - mean) of each channel."""
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * chunk
    last = min(first + chunk, R)
    x += client * R * C
    dy += client * R * C
    center = tl.load(mean + client * C + c, c < C, other=0.0)
    sums = tl.zeros((BR, BC), tl.float32)
    products = tl.zeros((BR, BC), tl.float32)
    for r0 in range(first, last, BR):
        r = r0 + tl.arange(0, BR)
        inside = (r < last)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        grad = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, inside, other=0.0).to(tl.float32) - center[None, :]
        sums += grad
        products += grad * value
    to = (tl.program_id(0) * tl.num_programs(1) + client) * C + c
    tl.store(sums_out + to, tl.sum(sums, 0), c < C)
    tl.store(products_out + to, tl.sum(products, 0), c < C)


def moments(x: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return the means and the sums of squared differences, each of shape (chunks, m, C)."""
    means, squares = (x.new_empty(chunks, len(x), x.shape[2], dtype=torch.float32) for _ in range(2))
    grid, sizes = _grid(x, chunks)
    _moments[grid](x, means, squares, x.shape[1], chunk_rows(x.shape[1], chunks), **sizes)
    return means, squares


def channel_sums(dy: Tensor, x: Tensor, mean: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return the sums of dy and of dy * (x - mean), each of shape (chunks, m, C)."""
    sums, products = (x.new_empty(chunks, len(x), x.shape[2], dtype=torch.float32) for _ in range(2))
    grid, sizes = _grid(x, chunks)
    _channel_sums[grid](dy, x, mean, sums, products, x.shape[1], chunk_rows(x.shape[1], chunks), **sizes)
    return sums, products


def _grid(x: Tensor, chunks: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    m, _, C = x.shape
    BC = min(CHANNELS, max(16, triton.next_power_of_2(C)))
    return (chunks, m, triton.cdiv(C, BC)), {"C": C, "BR": ROWS // 2, "BC": BC, "num_warps": 8}
