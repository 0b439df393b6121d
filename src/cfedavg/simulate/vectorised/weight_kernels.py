"""Triton kernels: the gradient of a convolution's weights, for a block of clients.

Shapes and names are those of `kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from cfedavg.simulate.vectorised import tma_kernels
from cfedavg.simulate.vectorised.kernels import choose_tile, name_sizes

PROGRAMS = 1056  # enough for a large GPU: eight programs for each of its 132 processors


@triton.jit
def _weight_grad(
    x, dy, dw, rows, chunk,
    H: constexpr, W: constexpr, OH: constexpr, OW: constexpr, C: constexpr, CO: constexpr,
    KH: constexpr, KW: constexpr, SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr,
    DH: constexpr, DW: constexpr, FLAT: constexpr, BM: constexpr, BN: constexpr, BK: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """Compute dw[tap, c, o] = sum over rows r of x[r at tap, c] dy[r, o], with rows as in `_forward`.

    A tile covers one tap or, if FLAT, many taps. The third axis of the grid splits the rows into chunks; the
    sums of the chunks lie one after another in dw.
    """
    client = tl.program_id(1).to(tl.int64)
    pid = tl.program_id(0)
    NB: constexpr = (CO + BN - 1) // BN
    CB: constexpr = (C + BM - 1) // BM
    o = (pid % NB) * BN + tl.arange(0, BN)
    tile = pid // NB
    if FLAT:
        k = tile * BM + tl.arange(0, BM)
        kh, kw, c = k // (KW * C) * DH, k // C % KW * DW, k % C
        valid = k < KH * KW * C
    else:
        tap = tile // CB
        kh, kw, c = tap // KW * DH, tap % KW * DW, tile % CB * BM + tl.arange(0, BM)
        k = tap * C + c
        valid = c < C
    shift = (kh * W + kw) * C + c
    x += client * (rows // (OH * OW)) * (H * W * C)
    dy += client * rows * CO
    acc = tl.zeros((BM, BN), tl.float32)
    first = tl.program_id(2) * chunk
    for r0 in range(first, min(first + chunk, rows), BK):
        r = r0 + tl.arange(0, BK)
        n, pixel = r // (OH * OW), r % (OH * OW)
        ih, iw = (pixel // OW) * SH - PH, (pixel % OW) * SW - PW
        at = (n * H + ih) * (W * C) + iw * C
        inside = r < rows
        if FLAT:
            mask = inside[None, :] & valid[:, None]
            if PH > 0 or PW > 0:
                h, v = ih[None, :] + kh[:, None], iw[None, :] + kw[:, None]
                mask &= (h >= 0) & (h < H) & (v >= 0) & (v < W)
        else:
            seen = inside
            if PH > 0 or PW > 0:
                seen = seen & (ih + kh >= 0) & (ih + kh < H) & (iw + kw >= 0) & (iw + kw < W)
            mask = seen[None, :] & valid[:, None]
        a = tl.load(x + at[None, :] + shift[:, None], mask, other=0.0)
        b = tl.load(dy + r[:, None] * CO + o[None, :], inside[:, None] & (o < CO)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    dw += (tl.program_id(2) * tl.num_programs(1) + client) * (KH * KW * C * CO)
    tl.store(
        dw + k[:, None] * CO + o[None, :], acc.to(dw.dtype.element_ty), valid[:, None] & (o < CO)[None, :]
    )


@triton.jit
def _weight_grad_of_three(
    x, dy, dw, rows, chunk,
    H: constexpr, W: constexpr, OH: constexpr, OW: constexpr, C: constexpr, CO: constexpr,
    KH: constexpr, KW: constexpr, SH: constexpr, SW: constexpr, PH: constexpr, PW: constexpr,
    DH: constexpr, DW: constexpr, BM: constexpr, BN: constexpr, BK: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Compute dw as `_weight_grad` does, for three taps side by side (KW is 3) that read dy once."""
    client = tl.program_id(1).to(tl.int64)
    pid = tl.program_id(0)
    NB: constexpr = (CO + BN - 1) // BN
    CB: constexpr = (C + BM - 1) // BM
    o = (pid % NB) * BN + tl.arange(0, BN)
    tile = pid // NB
    kh = tile // CB * DH
    c = tile % CB * BM + tl.arange(0, BM)
    valid = (c < C)[:, None]
    shift = (kh * W * C + c)[:, None]
    x += client * (rows // (OH * OW)) * (H * W * C)
    dy += client * rows * CO
    left = tl.zeros((BM, BN), tl.float32)
    middle = tl.zeros((BM, BN), tl.float32)
    right = tl.zeros((BM, BN), tl.float32)
    first = tl.program_id(2) * chunk
    for r0 in range(first, min(first + chunk, rows), BK):
        r = r0 + tl.arange(0, BK)
        n, pixel = r // (OH * OW), r % (OH * OW)
        ih, iw = (pixel // OW) * SH - PH, (pixel % OW) * SW - PW
        at = (n * H + ih) * (W * C) + iw * C
        inside = r < rows
        seen = inside & (ih + kh >= 0) & (ih + kh < H)
        b = tl.load(dy + r[:, None] * CO + o[None, :], inside[:, None] & (o < CO)[None, :], other=0.0)
        one = seen & (iw >= 0) & (iw < W)
        two = seen & (iw + DW >= 0) & (iw + DW < W)
        three = seen & (iw + 2 * DW >= 0) & (iw + 2 * DW < W)
        a = tl.load(x + at[None, :] + shift, one[None, :] & valid, other=0.0)
        d = tl.load(x + (at + DW * C)[None, :] + shift, two[None, :] & valid, other=0.0)
        e = tl.load(x + (at + 2 * DW * C)[None, :] + shift, three[None, :] & valid, other=0.0)
        left = tl.dot(a, b, left, input_precision=PRECISION)
        middle = tl.dot(d, b, middle, input_precision=PRECISION)
        right = tl.dot(e, b, right, input_precision=PRECISION)
    dw += (tl.program_id(2) * tl.num_programs(1) + client) * (KH * KW * C * CO)
    to = (tile // CB * KW * C + c)[:, None] * CO + o[None, :]
    mask = valid & (o < CO)[None, :]
    tl.store(dw + to, left, mask)
    tl.store(dw + to + C * CO, middle, mask)
    tl.store(dw + to + 2 * C * CO, right, mask)


def weight_grad(x: Tensor, dy: Tensor, shape: Sequence[int], input_precision: str) -> Tensor:
    """Return dw, the gradient of the loss with respect to w, from x and dy, in float32."""
    m, N, _, _, C = x.shape
    CO, rows, (KH, KW) = dy.shape[-1], N * dy.shape[2] * dy.shape[3], shape[2:4]
    if tma_kernels.fits(x, CO, shape):
        return tma_kernels.weight_grad(x, dy, shape)
    flat = C < 32 or (shape[6] == shape[7] == 0 and C < 128)
    kernel, tile, taps = _weight_grad, choose_tile(KH * KW * C if flat else C, CO, rows, x), KH * KW
    # Narrow tiles read more than they compute: three taps then share what they read of dy.
    if KW == 3 and not flat and max(C, CO) <= 128 and x.dtype == torch.bfloat16:
        kernel, taps = _weight_grad_of_three, KH
        tile |= {"BM": min(64, tile["BM"]), "BN": min(128, tile["BN"]), "num_warps": 4}
    blocks = triton.cdiv(taps * C, tile["BM"]) if flat else taps * triton.cdiv(C, tile["BM"])
    blocks *= triton.cdiv(CO, tile["BN"])
    # Few tiles leave most of the GPU idle: then each sum is taken in several parts.
    splits = max(1, min(PROGRAMS // (blocks * m), rows // (16 * tile["BK"])))
    chunk = triton.cdiv(triton.cdiv(rows, splits), tile["BK"]) * tile["BK"]
    dw = x.new_empty(splits, m, KH, KW, C, CO, dtype=torch.float32)
    more = {"FLAT": flat} if kernel is _weight_grad else {}
    kernel[(blocks, m, splits)](
        x, dy, dw, rows, chunk, **name_sizes(shape, C, CO), **more, PRECISION=input_precision, **tile
    )
    return dw[0] if splits == 1 else dw.sum(0)
