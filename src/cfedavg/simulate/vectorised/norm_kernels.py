"""Triton kernels for batch norm: sums over channels, and batch norm with a ReLU and its gradient.

Images have shape (m, R, C): m clients, R rows (pixels) and C channels, last in memory. Values of channels
have shape (m, C). A program works on a chunk of the rows of one client, for BC channels, BR rows at once.
The sums of chunks are added in a second kernel, in the order of the chunks, so that equal inputs give equal
bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

CHANNELS = 64  # channels of a program
ROWS = 128  # rows that a program reads at once
PROGRAMS = 2112  # enough for a large GPU: sixteen programs for each of its 132 processors


@triton.jit
def _chunk_moments(x, means, squares, R, chunk, C: constexpr, BR: constexpr, BC: constexpr):
    """Store the mean of each channel of a chunk, and the sum of the squares of the differences to it."""
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


# One client is enough to compile the kernels for any number of clients: see `artifacts.find_kernels`.
@triton.jit(do_not_specialize=["chunks", "values"])
def _join_moments(means, squares, mean, var, R, chunk, chunks, values, B: constexpr):
    """Store the mean and the variance of all chunks together; `values` is the number of means of a chunk."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for i in range(0, chunks):
        count = min(chunk, R - i * chunk).to(tl.float32)
        total += count * tl.load(means + i * values + at, at < values, other=0.0)
    center = total / R
    spread = tl.zeros((B,), tl.float32)
    for i in range(0, chunks):
        count = min(chunk, R - i * chunk).to(tl.float32)
        away = tl.load(means + i * values + at, at < values, other=0.0) - center
        spread += tl.load(squares + i * values + at, at < values, other=0.0) + count * away * away
    tl.store(mean + at, center, at < values)
    tl.store(var + at, spread / R, at < values)


@triton.jit
def _chunk_sums(
    dy, x, mean, scale, shift, sums_out, products_out, R, chunk,
    RELU: constexpr, C: constexpr, BR: constexpr, BC: constexpr,
):  # fmt: skip
    """Store the sums of dy and of dy * (x - mean) of each channel of a chunk."""
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * chunk
    last = min(first + chunk, R)
    x += client * R * C
    dy += client * R * C
    center = tl.load(mean + client * C + c, c < C, other=0.0)[None, :]
    if RELU:
        times = tl.load(scale + client * C + c, c < C, other=0.0)[None, :]
        plus = tl.load(shift + client * C + c, c < C, other=0.0)[None, :]
    sums = tl.zeros((BR, BC), tl.float32)
    products = tl.zeros((BR, BC), tl.float32)
    for r0 in range(first, last, BR):
        r = r0 + tl.arange(0, BR)
        inside = (r < last)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        grad = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, inside, other=0.0).to(tl.float32) - center
        if RELU:
            grad = tl.where(value * times + plus > 0, grad, 0.0)
        sums += grad
        products += grad * value
    to = (tl.program_id(0) * tl.num_programs(1) + client) * C + c
    tl.store(sums_out + to, tl.sum(sums, 0), c < C)
    tl.store(products_out + to, tl.sum(products, 0), c < C)


@triton.jit(do_not_specialize=["chunks", "values"])
def _join_sums(sums, products, sum_out, product_out, chunks, values, B: constexpr):
    """Store the sums over all chunks."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    one = tl.zeros((B,), tl.float32)
    two = tl.zeros((B,), tl.float32)
    for i in range(0, chunks):
        one += tl.load(sums + i * values + at, at < values, other=0.0)
        two += tl.load(products + i * values + at, at < values, other=0.0)
    tl.store(sum_out + at, one, at < values)
    tl.store(product_out + at, two, at < values)


@triton.jit
def _normalise_relu(
    x, mean, scale, shift, residual, y, R, chunk,
    ADDS: constexpr, C: constexpr, BR: constexpr, BC: constexpr,
):  # fmt: skip
    """Store relu((x - mean) * scale + shift + residual); without ADDS, there is no residual."""
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * chunk
    x += client * R * C
    y += client * R * C
    residual += client * R * C
    center = tl.load(mean + client * C + c, c < C, other=0.0)[None, :]
    times = tl.load(scale + client * C + c, c < C, other=0.0)[None, :]
    plus = tl.load(shift + client * C + c, c < C, other=0.0)[None, :]
    for r0 in range(first, min(first + chunk, R), BR):
        r = r0 + tl.arange(0, BR)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        value = tl.load(x + at, inside, other=0.0).to(tl.float32) - center
        value = value * times + plus
        if ADDS:
            value += tl.load(residual + at, inside, other=0.0).to(tl.float32)
        # NaN stays NaN, as in torch, so that a client that diverges is seen.
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + at, value.to(y.dtype.element_ty), inside)


@triton.jit
def _normalise_grad(
    dy, x, mean, scale, shift, first_term, second_term, dx, R, chunk,
    RELU: constexpr, C: constexpr, BR: constexpr, BC: constexpr,
):  # fmt: skip
    """Store scale * (dy - first_term - (x - mean) * second_term), behind a ReLU for the dy that passes it."""
    client = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    first = tl.program_id(0) * chunk
    x += client * R * C
    dy += client * R * C
    dx += client * R * C
    center = tl.load(mean + client * C + c, c < C, other=0.0)[None, :]
    times = tl.load(scale + client * C + c, c < C, other=0.0)[None, :]
    plus = tl.load(shift + client * C + c, c < C, other=0.0)[None, :]
    one = tl.load(first_term + client * C + c, c < C, other=0.0)[None, :]
    two = tl.load(second_term + client * C + c, c < C, other=0.0)[None, :]
    for r0 in range(first, min(first + chunk, R), BR):
        r = r0 + tl.arange(0, BR)
        inside = (r < R)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        grad = tl.load(dy + at, inside, other=0.0).to(tl.float32)
        value = tl.load(x + at, inside, other=0.0).to(tl.float32) - center
        if RELU:
            grad = tl.where(value * times + plus > 0, grad, 0.0)
        tl.store(dx + at, ((grad - one - value * two) * times).to(dx.dtype.element_ty), inside)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of each channel."""
    grid, sizes, chunk = _plan_sums(x)
    chunks, (m, R, C) = grid[0], x.shape
    means, squares = _floats(x, chunks, m, C), _floats(x, chunks, m, C)
    _chunk_moments[grid](x, means, squares, R, chunk, **sizes)
    mean, var = _floats(x, m, C), _floats(x, m, C)
    _join_moments[(triton.cdiv(m * C, 256),)](means, squares, mean, var, R, chunk, chunks, m * C, B=256)
    return mean, var


def channel_sums(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Return the sums of dy and of dy * (x - mean) of each channel; behind a ReLU, of the dy that passes."""
    grid, sizes, chunk = _plan_sums(x)
    chunks, (m, R, C) = grid[0], x.shape
    sums, products = _floats(x, chunks, m, C), _floats(x, chunks, m, C)
    values = [each.contiguous() for each in (mean, scale, shift)]
    _chunk_sums[grid](dy, x, *values, sums, products, R, chunk, RELU=relu, **sizes)
    one, two = _floats(x, m, C), _floats(x, m, C)
    _join_sums[(triton.cdiv(m * C, 256),)](sums, products, one, two, chunks, m * C, B=256)
    return one, two


def normalise_relu(x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None) -> Tensor:
    """Return relu((x - mean) * scale + shift + residual)."""
    y = torch.empty_like(x)
    grid, sizes, chunk = _plan(x, 4 * ROWS)
    values = [each.contiguous() for each in (mean, scale, shift)]
    adds, other = residual is not None, x if residual is None else residual
    _normalise_relu[grid](x, *values, other, y, x.shape[1], chunk, ADDS=adds, **sizes)
    return y


def normalise_grad(dy: Tensor, x: Tensor, *values: Any) -> Tensor:
    """Return the gradient; `values` are mean, scale, shift, the two terms, and whether there is a ReLU."""
    dx = torch.empty_like(x)
    grid, sizes, chunk = _plan(x, 4 * ROWS)
    *tensors, relu = values
    vectors = [each.contiguous() for each in tensors]
    _normalise_grad[grid](dy, x, *vectors, dx, x.shape[1], chunk, RELU=relu, **sizes)
    return dx


def _floats(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _plan_sums(x: Tensor) -> tuple[tuple[int, int, int], dict[str, Any], int]:
    """Return `_plan` with few long chunks, since every chunk has sums of its own."""
    m, R, C = x.shape
    chunks = max(1, PROGRAMS // (m * triton.cdiv(C, CHANNELS)))
    return _plan(x, triton.cdiv(R, chunks * 2 * ROWS) * 2 * ROWS)


def _plan(x: Tensor, chunk: int) -> tuple[tuple[int, int, int], dict[str, Any], int]:
    """Return the grid, the sizes of a tile and the number of rows in a chunk."""
    m, R, C = x.shape
    BC = min(CHANNELS, max(16, triton.next_power_of_2(C)))
    return (
        (triton.cdiv(R, chunk), m, triton.cdiv(C, BC)),
        {"C": C, "BR": ROWS, "BC": BC, "num_warps": 8},
        chunk,
    )
