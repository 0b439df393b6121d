"""Triton kernels for Hopper GPUs: a convolution of stride 1 whose tiles the tensor memory accelerator copies.

Shapes and names are those of `kernels`. The accelerator (TMA) copies a box of pixels and channels to shared
memory and writes zeros where the box leaves the image. So a program computes no addresses and no masks. A box
of pixels is TN images x TH rows x whole rows of TW pixels, and lies in one piece in memory.

The images are the second operand of each product: this operand can stay in shared memory as the box lies
there, while the first would pass through registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from cfedavg.simulate.vectorised.convolution import output_size

PROGRAMS = 1056  # as in `weight_kernels`


class Box(NamedTuple):
    """The pixels of a tile: images, rows and columns."""

    TN: int
    TH: int
    TW: int


@triton.jit
def _convolve(
    images, weights, y, N,
    OH: constexpr, OW: constexpr, C: constexpr, CO: constexpr, KH: constexpr, KW: constexpr,
    TOP: constexpr, LEFT: constexpr, TN: constexpr, TH: constexpr, TW: constexpr,
    BN: constexpr, BK: constexpr, GRAD: constexpr,
):  # fmt: skip
    """Compute y[r, o] = sum over (tap, c) of images[r at tap, c] weights[tap, c, o].

    With GRAD, `images` are the gradients dy, C their channels, and y is dx. Taps are then read from the last
    to the first, and `weights` as [tap, o, c]. TOP and LEFT are the zeros above and left of the images.
    """
    client = tl.program_id(1)
    pid = tl.program_id(0)
    NB: constexpr = CO // BN
    BM: constexpr = TN * TH * TW
    ROWS: constexpr = OH // TH
    CB: constexpr = C // BK
    o0 = (pid % NB) * BN
    n0 = pid // NB // ROWS * TN
    h0 = pid // NB % ROWS * TH
    acc = tl.zeros((BN, BM), tl.float32)
    for i in range(0, KH * KW * CB):
        tap = i // CB
        c0 = i % CB * BK
        box = images.load([client, n0, h0 + tap // KW - TOP, tap % KW - LEFT, c0]).reshape(BM, BK)
        if GRAD:
            w = weights.load([client, (KH * KW - 1 - tap) * CO + o0, c0]).reshape(BN, BK)
        else:
            w = weights.load([client, tap * C + c0, o0]).reshape(BK, BN).T
        acc = tl.dot(w, box.T, acc)
    r = tl.arange(0, BM)
    n = n0 + r // (TH * TW)
    row = ((client.to(tl.int64) * N + n) * OH + h0 + r // TW % TH) * OW + r % TW
    o = o0 + tl.arange(0, BN)
    tl.store(y + row[:, None] * CO + o[None, :], acc.to(y.dtype.element_ty).T, (n < N)[:, None])


@triton.jit
def _weight_grad(
    images, grads, dw, N, chunk,
    OH: constexpr, OW: constexpr, C: constexpr, CO: constexpr, KH: constexpr, KW: constexpr,
    TOP: constexpr, LEFT: constexpr, TN: constexpr, TH: constexpr, TW: constexpr,
    BM: constexpr, BN: constexpr, THREE: constexpr,
):  # fmt: skip
    """Compute dw[tap, c, o] = sum over rows r of images[r at tap, c] grads[r, o].

    A program computes one tap or, with THREE, the three taps of a row of the kernel, which read `grads` once.
    The third axis of the grid splits the boxes into chunks, as in `weight_kernels`.
    """
    client = tl.program_id(1)
    NB: constexpr = CO // BN
    CB: constexpr = C // BM
    BK: constexpr = TN * TH * TW
    ROWS: constexpr = OH // TH
    o0 = (tl.program_id(0) % NB) * BN
    tile = tl.program_id(0) // NB
    c0 = tile % CB * BM
    kh = tile // CB if THREE else tile // CB // KW
    kw = 0 if THREE else tile // CB % KW
    left = tl.zeros((BN, BM), tl.float32)
    middle = tl.zeros((BN, BM), tl.float32)
    right = tl.zeros((BN, BM), tl.float32)
    boxes = (N + TN - 1) // TN * ROWS
    first = tl.program_id(2) * chunk
    for i in range(first, min(first + chunk, boxes)):
        n0 = i // ROWS * TN
        h = i % ROWS * TH + kh - TOP
        d = grads.load([client, i * BK, o0]).reshape(BK, BN).T
        left = tl.dot(d, images.load([client, n0, h, kw - LEFT, c0]).reshape(BK, BM), left)
        if THREE:
            middle = tl.dot(d, images.load([client, n0, h, 1 - LEFT, c0]).reshape(BK, BM), middle)
            right = tl.dot(d, images.load([client, n0, h, 2 - LEFT, c0]).reshape(BK, BM), right)
    k = (kh * KW + kw) * C + c0 + tl.arange(0, BM)
    o = o0 + tl.arange(0, BN)
    dw += (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + client) * (KH * KW * C * CO)
    to = dw + k[:, None] * CO + o[None, :]
    tl.store(to, left.T)
    if THREE:
        tl.store(to + C * CO, middle.T)
        tl.store(to + 2 * C * CO, right.T)


def fits(images: Tensor, CO: int, shape: Sequence[int], *, grad: bool = False) -> bool:
    """Return whether these kernels can compute a convolution or, with `grad`, its input's gradient.

    `images` are those that the product reads, `CO` the channels of the result.
    """
    if images.dtype != torch.bfloat16 or torch.cuda.get_device_capability(images.device)[0] != 9:
        return False
    OH, OW = shape[:2] if grad else output_size(shape)
    TH = choose_box(OH, OW, 64).TH
    whole = OW & (OW - 1) == 0 and 4 <= OW <= 64 and (TH == OH or TH * OW >= 32)
    plain = tuple(shape[4:6]) == tuple(shape[8:10]) == (1, 1)
    return whole and plain and images.shape[-1] % 64 == CO % 64 == 0


def convolve(images: Tensor, weights: Tensor, shape: Sequence[int], *, grad: bool = False) -> Tensor:
    """Return the convolution of each client's images with the client's weights (m, KH, KW, C, CO).

    With `grad`, `images` are the gradients by the convolution's result; return those by its input.
    """
    m, N, _, _, C = images.shape
    KH, KW, CO = *weights.shape[1:3], weights.shape[3 if grad else 4]
    (OH, OW), (PH, PW) = (shape[:2] if grad else output_size(shape)), shape[6:8]
    BN, BK = 64 if CO % 128 else 128, 64
    box = choose_box(OH, OW, 2 * BN)
    y = images.new_empty(m, N, OH, OW, CO)
    grid = triton.cdiv(N, box.TN) * (OH // box.TH) * (CO // BN), m
    _convolve[grid](
        TensorDescriptor.from_tensor(images, [1, *box, BK]),
        TensorDescriptor.from_tensor(weights.flatten(1, 3), [1, BN, BK] if grad else [1, BK, BN]),
        y, N, OH, OW, C, CO, KH, KW, *((KH - 1 - PH, KW - 1 - PW) if grad else (PH, PW)), *box, BN, BK, grad,
        num_warps=8 if BN == 128 else 4, num_stages=3 if BN == 128 else 4,
    )  # fmt: skip
    return y


def weight_grad(x: Tensor, dy: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the gradient by the weights, from x and dy, in float32."""
    (m, N, _, _, C), (OH, OW, CO), (KH, KW) = x.shape, dy.shape[2:], shape[2:4]
    tile: dict[str, Any] = _choose_weight_tile(C, CO, KW)
    box = choose_box(OH, OW, tile.pop("BK"))
    taps = KH if tile["THREE"] else KH * KW
    blocks = taps * (C // tile["BM"]) * (CO // tile["BN"])
    boxes = triton.cdiv(N, box.TN) * (OH // box.TH)
    # Few tiles leave most of the GPU idle: then each sum is taken in several parts.
    splits = max(1, min(PROGRAMS // (blocks * m), boxes // 16))
    dw = x.new_empty(splits, m, KH, KW, C, CO, dtype=torch.float32)
    _weight_grad[(blocks, m, splits)](
        TensorDescriptor.from_tensor(x, [1, *box, tile["BM"]]),
        TensorDescriptor.from_tensor(dy.flatten(1, 3), [1, box.TN * box.TH * box.TW, tile["BN"]]),
        dw, N, triton.cdiv(boxes, splits), OH, OW, C, CO, KH, KW, shape[6], shape[7], *box, **tile,
    )  # fmt: skip
    return dw[0] if splits == 1 else dw.sum(0)


def choose_box(OH: int, OW: int, pixels: int) -> Box:
    """Return a box of so many pixels, or of fewer if rows of one image do not make so many."""
    TH = min(OH & -OH, max(1, pixels // OW))  # a power of two that divides the height
    return Box(max(1, pixels // (OW * TH)) if TH == OH else 1, TH, OW)


def _choose_weight_tile(C: int, CO: int, KW: int) -> dict[str, Any]:
    """Return the sizes of a tile, chosen by timings on an H200."""
    if C % 128 or CO % 128:
        three = KW == 3
        return {"BM": 64, "BN": 64, "BK": 128, "THREE": three, "num_warps": 4, "num_stages": 3}
    if C % 256:
        return {"BM": 128, "BN": 128, "BK": 64, "THREE": False, "num_warps": 8, "num_stages": 4}
    return {"BM": 256, "BN": 128, "BK": 64, "THREE": False, "num_warps": 8, "num_stages": 3}
