"""Triton kernels: convolution of a block of clients, each with its own weights, as a product of matrices.

There are m clients with N images each. Channels come last: the images x have shape (m, N, H, W, C), the
weights w (m, KH, KW, C, CO), the results y (m, N, OH, OW, CO). A tap is a position (kh, kw) in the kernel.
The matrix of patches is never written to memory: a Triton program reads the matrix's entries from x. A
program computes one tile of BM x BN entries of one client's result, and adds BK terms of each sum at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from cfedavg.simulate.vectorised import tma_kernels
from cfedavg.simulate.vectorised.convolution import output_size


@triton.jit
def _forward(
    x, w, y, rows,
    H: constexpr, W: constexpr, OH: constexpr, OW: constexpr, C: constexpr, CO: constexpr,
    KH: constexpr, KW: constexpr, SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr,
    DH: constexpr, DW: constexpr, FLAT: constexpr, BM: constexpr, BN: constexpr, BK: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """Compute y[r, o] = sum over (tap, c) of x[r at tap, c] w[tap, c, o].

    A row r is an output pixel (n, oh, ow); "r at tap" is the input pixel that the row reads at the tap.
    """
    client = tl.program_id(1).to(tl.int64)
    pid = tl.program_id(0)
    NB: constexpr = (CO + BN - 1) // BN
    r = (pid // NB) * BM + tl.arange(0, BM)
    o = (pid % NB) * BN + tl.arange(0, BN)
    n, pixel = r // (OH * OW), r % (OH * OW)
    ih, iw = (pixel // OW) * SH - PH, (pixel % OW) * SW - PW
    x += client * (rows // (OH * OW)) * (H * W * C)
    w += client * (KH * KW * C * CO)
    at = (n * H + ih) * (W * C) + iw * C
    inside = r < rows
    acc = tl.zeros((BM, BN), tl.float32)
    if FLAT:
        for k0 in range(0, KH * KW * C, BK):
            k = k0 + tl.arange(0, BK)
            kh, kw, c = k // (KW * C) * DH, k // C % KW * DW, k % C
            mask = inside[:, None] & (k < KH * KW * C)[None, :]
            if PH > 0 or PW > 0:
                h, v = ih[:, None] + kh[None, :], iw[:, None] + kw[None, :]
                mask &= (h >= 0) & (h < H) & (v >= 0) & (v < W)
            a = tl.load(x + at[:, None] + ((kh * W + kw) * C + c)[None, :], mask, other=0.0)
            b = tl.load(
                w + k[:, None] * CO + o[None, :], (k < KH * KW * C)[:, None] & (o < CO)[None, :], other=0.0
            )
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        CB: constexpr = (C + BK - 1) // BK
        for i in range(0, KH * KW * CB):
            tap = i // CB
            kh, kw, c = tap // KW * DH, tap % KW * DW, i % CB * BK + tl.arange(0, BK)
            mask = inside
            if PH > 0 or PW > 0:
                mask = mask & (ih + kh >= 0) & (ih + kh < H) & (iw + kw >= 0) & (iw + kw < W)
            shift = (kh * W + kw) * C
            if C % BK == 0:
                a = tl.load(x + (at + shift)[:, None] + c[None, :], mask[:, None], other=0.0)
            else:
                a = tl.load(
                    x + (at + shift)[:, None] + c[None, :], mask[:, None] & (c < C)[None, :], other=0.0
                )
            b = tl.load(
                w + (tap * C + c)[:, None] * CO + o[None, :], (c < C)[:, None] & (o < CO)[None, :], other=0.0
            )
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    y += client * rows * CO
    tl.store(
        y + r[:, None] * CO + o[None, :], acc.to(y.dtype.element_ty), inside[:, None] & (o < CO)[None, :]
    )


@triton.jit
def _input_grad(
    dy, w, dx, N,
    H: constexpr, W: constexpr, OH: constexpr, OW: constexpr, C: constexpr, CO: constexpr,
    KH: constexpr, KW: constexpr, SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr,
    DH: constexpr, DW: constexpr, BM: constexpr, BN: constexpr, BK: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """Compute dx[r, c] = sum over (tap, o) of dy[output row that read x[r] at tap, o] w[tap, c, o].

    A row r is an input pixel (n, h, w). With a stride, pixels whose positions are equal modulo the stride
    were read at the same taps. The third axis of the grid splits the pixels into such classes (a, b). Each
    class is a matrix product of its own.
    """
    client = tl.program_id(1).to(tl.int64)
    pid = tl.program_id(0)
    NB: constexpr = (C + BN - 1) // BN
    OB: constexpr = (CO + BK - 1) // BK
    CH: constexpr = (H + SH - 1) // SH
    CW: constexpr = (W + SW - 1) // SW
    a, b = 0, 0
    if SH * SW > 1:
        a, b = tl.program_id(2) // SW, tl.program_id(2) % SW
    r = (pid // NB) * BM + tl.arange(0, BM)
    c = (pid % NB) * BN + tl.arange(0, BN)
    n, pixel = r // (CH * CW), r % (CH * CW)
    h0 = (pixel // CW) * SH + (a + SH * PH - PH) % SH
    w0 = (pixel % CW) * SW + (b + SW * PW - PW) % SW
    oh, ow = (h0 + PH - a) // SH, (w0 + PW - b) // SW
    inside = (n < N) & (h0 < H) & (w0 < W)
    dy += client * N * (OH * OW * CO)
    w += client * (KH * KW * C * CO)
    at = (n * OH + oh) * (OW * CO) + ow * CO
    taps_h, taps_w = (KH - a + SH - 1) // SH, (KW - b + SW - 1) // SW
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, taps_h * taps_w * OB):
        j = i // OB
        jh, jw, o = j // taps_w, j % taps_w, i % OB * BK + tl.arange(0, BK)
        h, v = oh - jh * DH, ow - jw * DW
        mask = inside & (h >= 0) & (v >= 0) & (h < OH) & (v < OW)
        shift = (jh * DH * OW + jw * DW) * CO
        if CO % BK == 0:
            d = tl.load(dy + (at - shift)[:, None] + o[None, :], mask[:, None], other=0.0)
        else:
            d = tl.load(dy + (at - shift)[:, None] + o[None, :], mask[:, None] & (o < CO)[None, :], other=0.0)
        tap = (a + SH * jh) * KW + b + SW * jw
        k = tl.load(
            w + (tap * C + c)[None, :] * CO + o[:, None], (o < CO)[:, None] & (c < C)[None, :], other=0.0
        )
        acc = tl.dot(d, k, acc, input_precision=PRECISION)
    dx += client * N * (H * W * C)
    to = ((n * H + h0) * W + w0) * C
    tl.store(dx + to[:, None] + c[None, :], acc.to(dx.dtype.element_ty), inside[:, None] & (c < C)[None, :])


def forward(x: Tensor, w: Tensor, shape: Sequence[int], input_precision: str) -> Tensor:
    """Return y, the convolution of each client's images x with the client's weights w."""
    m, N, _, _, C = x.shape
    h, v = output_size(shape)
    CO, rows = w.shape[-1], N * h * v
    if tma_kernels.fits(x, CO, shape):
        return tma_kernels.convolve(x, w, shape)
    y = x.new_empty(m, N, h, v, CO)
    flat = C < 16
    tile = choose_tile(rows, CO, 32 if flat else C, x)
    grid = (triton.cdiv(rows, tile["BM"]) * triton.cdiv(CO, tile["BN"]), m)
    _forward[grid](x, w, y, rows, **name_sizes(shape, C, CO), FLAT=flat, PRECISION=input_precision, **tile)
    return y


def input_grad(dy: Tensor, w: Tensor, shape: Sequence[int], input_precision: str) -> Tensor:
    """Return dx from dy and w; dx and dy are the gradients of the loss with respect to x and y."""
    m, N, _, _, CO = dy.shape
    C, (SH, SW) = w.shape[3], shape[4:6]
    if tma_kernels.fits(dy, C, shape, grad=True):
        return tma_kernels.convolve(dy, w, shape, grad=True)
    dx = dy.new_empty(m, N, shape[0], shape[1], C)
    rows = N * triton.cdiv(shape[0], SH) * triton.cdiv(shape[1], SW)
    tile = choose_tile(rows, C, CO, dy)
    grid = (triton.cdiv(rows, tile["BM"]) * triton.cdiv(C, tile["BN"]), m, SH * SW)
    _input_grad[grid](dy, w, dx, N, **name_sizes(shape, C, CO), PRECISION=input_precision, **tile)
    return dx


def choose_tile(M: int, N: int, K: int, operand: Tensor) -> dict[str, int]:
    """Return tile sizes for the product of an M x K and a K x N matrix, chosen by timings on an H200."""
    half = operand.dtype == torch.bfloat16
    BM = max(16, min(128, triton.next_power_of_2(M)))
    BN = max(16, min(256 if half else 64, triton.next_power_of_2(N)))
    BK = max(16, min(64 if half else 32, triton.next_power_of_2(K)))
    return {"BM": BM, "BN": BN, "BK": BK, "num_warps": 8 if BM * BN > 8192 else 4, "num_stages": 3}


def name_sizes(shape: Sequence[int], C: int, CO: int) -> dict[str, int]:
    OH, OW = output_size(shape)
    names = ("H", "W", "KH", "KW", "SH", "SW", "PH", "PW", "DH", "DW")
    return dict(zip(names, shape, strict=True)) | {"OH": OH, "OW": OW, "C": C, "CO": CO}
