"""Triton kernels: one time step of a recurrent layer of a block of clients, each with its own weights.

A launch computes one time step, since each hidden number depends on all hidden numbers of the step before. A
program computes BN hidden numbers of BM samples of one client. It multiplies with the weights of all gates of
these numbers, and applies the cell before anything is written to memory.

Shapes and names are those of `recurrent`. The gate g of the hidden number j is number g H + j of G H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.language.extra import libdevice

GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}


@triton.jit
def _columns(w, k, j, H: constexpr, size: constexpr, transposed: constexpr):
    """Load w[j, k] as a tile (k, j), or w[k, j] if `transposed`; `size` is the number of terms k."""
    at = k[:, None] * H + j[None, :] if transposed else j[None, :] * H + k[:, None]
    return tl.load(w + at, (k < size)[:, None] & (j < H)[None, :], other=0.0)


@triton.jit
def _step(
    x, w, bias, h, c, h_next, c_next, saved, B,
    H: constexpr, G: constexpr, CELL: constexpr, BM: constexpr, BN: constexpr, BK: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """Compute h and c after a time step, and the numbers that the gradient needs."""
    client = tl.program_id(1).to(tl.int64)
    NB: constexpr = (H + BN - 1) // BN
    b = (tl.program_id(0) // NB) * BM + tl.arange(0, BM)
    j = (tl.program_id(0) % NB) * BN + tl.arange(0, BN)
    w += client * (G * H * H)
    h += client * B * H
    zero = tl.zeros((BM, BN), tl.float32)
    first, second, third, fourth = zero, zero, zero, zero
    for k0 in range(0, H, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(h + b[:, None] * H + k[None, :], (b < B)[:, None] & (k < H)[None, :], other=0.0)
        a = a.to(w.dtype.element_ty)
        first = tl.dot(a, _columns(w, k, j, H, H, False), first, input_precision=PRECISION)
        if G > 1:
            second = tl.dot(a, _columns(w + H * H, k, j, H, H, False), second, input_precision=PRECISION)
            third = tl.dot(a, _columns(w + 2 * H * H, k, j, H, H, False), third, input_precision=PRECISION)
        if G > 3:
            fourth = tl.dot(a, _columns(w + 3 * H * H, k, j, H, H, False), fourth, input_precision=PRECISION)
    inside = (b < B)[:, None] & (j < H)[None, :]
    known = (j < H)[None, :]
    to = b[:, None] * H + j[None, :]
    gate = b[:, None] * (G * H) + j[None, :]
    x += client * B * (G * H)
    bias += client * (G * H) + j[None, :]
    first += tl.load(bias, known, other=0.0)
    x1 = tl.load(x + gate, inside, other=0.0)
    if G == 1:
        if CELL == "tanh":
            after = libdevice.tanh(x1 + first)
        else:  # NaN stays NaN, as in torch, so that a client that diverges is seen
            after = tl.maximum(x1 + first, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(saved + client * B * H + to, after, inside)
    else:
        second += tl.load(bias + H, known, other=0.0)
        third += tl.load(bias + 2 * H, known, other=0.0)
        x2 = tl.load(x + gate + H, inside, other=0.0)
        x3 = tl.load(x + gate + 2 * H, inside, other=0.0)
        one, two = tl.sigmoid(x1 + first), tl.sigmoid(x2 + second)
        if CELL == "gru":
            new = libdevice.tanh(x3 + one * third)
            before = tl.load(h + to, inside, other=0.0)
            after = new + two * (before - new)
            place = saved + client * B * (5 * H) + b[:, None] * (5 * H) + j[None, :]
            tl.store(place + 3 * H, before, inside)
            tl.store(place + 4 * H, third, inside)
        else:
            fourth += tl.load(bias + 3 * H, known, other=0.0)
            x4 = tl.load(x + gate + 3 * H, inside, other=0.0)
            new, four = libdevice.tanh(x3 + third), tl.sigmoid(x4 + fourth)
            state = two * tl.load(c + client * B * H + to, inside, other=0.0) + one * new
            tl.store(c_next + client * B * H + to, state, inside)
            after = four * libdevice.tanh(state)
            place = saved + client * B * (4 * H) + gate
            tl.store(place + 3 * H, four, inside)
        tl.store(place, one, inside)
        tl.store(place + H, two, inside)
        tl.store(place + 2 * H, new, inside)
    tl.store(h_next + client * B * H + to, after, inside)


@triton.jit
def _step_grad(
    dy, later, w, through, dc, saved, c, c_next, inputs, hidden, B,
    H: constexpr, G: constexpr, CELL: constexpr, BM: constexpr, BN: constexpr, BK: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """Compute the gradients by the terms of all gates of a time step from those of the next step, `later`.

    `through` holds the gradient by h of the next step's part that does not pass a gate, and `dc` the gradient
    by c. Both are replaced by those of this step.
    """
    client = tl.program_id(1).to(tl.int64)
    NB: constexpr = (H + BN - 1) // BN
    b = (tl.program_id(0) // NB) * BM + tl.arange(0, BM)
    j = (tl.program_id(0) % NB) * BN + tl.arange(0, BN)
    w += client * (G * H * H)
    later += client * B * (G * H)
    dh = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, G * H, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(
            later + b[:, None] * (G * H) + k[None, :], (b < B)[:, None] & (k < G * H)[None, :], other=0.0
        )
        dh = tl.dot(
            a.to(w.dtype.element_ty), _columns(w, k, j, H, G * H, True), dh, input_precision=PRECISION
        )
    inside = (b < B)[:, None] & (j < H)[None, :]
    to = client * B * H + b[:, None] * H + j[None, :]
    gate = client * B * (G * H) + b[:, None] * (G * H) + j[None, :]
    dh += tl.load(dy + to, inside, other=0.0)
    if CELL == "lstm":
        i = tl.load(saved + gate, inside, other=0.0)
        f = tl.load(saved + gate + H, inside, other=0.0)
        g = tl.load(saved + gate + 2 * H, inside, other=0.0)
        o = tl.load(saved + gate + 3 * H, inside, other=0.0)
        bent = libdevice.tanh(tl.load(c_next + to, inside, other=0.0))
        ds = tl.load(dc + to, inside, other=0.0) + dh * o * (1 - bent * bent)
        tl.store(dc + to, ds * f, inside)
        tl.store(inputs + gate, ds * g * i * (1 - i), inside)
        tl.store(inputs + gate + H, ds * tl.load(c + to, inside, other=0.0) * f * (1 - f), inside)
        tl.store(inputs + gate + 2 * H, ds * i * (1 - g * g), inside)
        tl.store(inputs + gate + 3 * H, dh * bent * o * (1 - o), inside)
    elif CELL == "gru":
        dh += tl.load(through + to, inside, other=0.0)
        place = saved + client * B * (5 * H) + b[:, None] * (5 * H) + j[None, :]
        r = tl.load(place, inside, other=0.0)
        z = tl.load(place + H, inside, other=0.0)
        n = tl.load(place + 2 * H, inside, other=0.0)
        before = tl.load(place + 3 * H, inside, other=0.0)
        hn = tl.load(place + 4 * H, inside, other=0.0)
        dn = dh * (1 - z) * (1 - n * n)
        dr = dn * hn * r * (1 - r)
        dz = dh * (before - n) * z * (1 - z)
        tl.store(through + to, dh * z, inside)
        tl.store(inputs + gate, dr, inside)
        tl.store(inputs + gate + H, dz, inside)
        tl.store(inputs + gate + 2 * H, dn, inside)
        tl.store(hidden + gate, dr, inside)
        tl.store(hidden + gate + H, dz, inside)
        tl.store(hidden + gate + 2 * H, dn * r, inside)
    else:
        after = tl.load(saved + to, inside, other=0.0)
        passed = dh * (1 - after * after) if CELL == "tanh" else tl.where(after > 0, dh, 0.0)
        tl.store(inputs + gate, passed, inside)


def recur(
    x: Tensor, weight: Tensor, bias: Tensor, h: Tensor, c: Tensor, cell: str, input_precision: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h and c of all time steps, and the numbers that the gradient needs."""
    B, H = h.shape[1:]
    hs, cs = x.new_empty(len(x), *h.shape), x.new_empty(len(x), *c.shape)
    saved = x.new_empty(len(x), *h.shape[:-1], {"lstm": 4, "gru": 5}.get(cell, 1) * H)
    grid, sizes = _divide(len(weight), B, H, cell, weight)
    for t in range(len(x)):
        _step[grid](x[t], weight, bias, h, c, hs[t], cs[t], saved[t], B, **sizes, PRECISION=input_precision)
        h, c = hs[t], cs[t]
    return hs, cs, saved


def recur_grad(
    dy: Tensor,
    dc: Tensor,
    weight: Tensor,
    saved: Tensor,
    c_0: Tensor,
    c: Tensor,
    cell: str,
    input_precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients by the terms from the input, by those from h, by h without the gates, and by c.

    The terms from h have a tensor of their own in a GRU only; else it is empty.
    """
    B, H = dy.shape[2:]
    inputs = dy.new_empty(*dy.shape[:-1], weight.shape[1])
    hidden = torch.empty_like(inputs) if cell == "gru" else inputs.new_empty(*dy.shape[:-1], 0)
    terms = hidden if cell == "gru" else inputs
    through, dc, later = torch.zeros_like(dy[0]), dc.clone(), torch.zeros_like(inputs[0])
    grid, sizes = _divide(len(weight), B, H, cell, weight)
    for t in range(len(dy) - 1, -1, -1):
        before = c[t - 1] if t else c_0
        _step_grad[grid](
            dy[t], later, weight, through, dc, saved[t], before, c[t], inputs[t], terms[t], B,
            **sizes, PRECISION=input_precision,
        )  # fmt: skip
        later = terms[t]
    return inputs, hidden, through, dc


def _divide(
    clients: int, B: int, H: int, cell: str, weight: Tensor
) -> tuple[tuple[int, int], dict[str, int | str]]:
    """Return the grid of a time step and the sizes of its tiles, chosen by timings on an H200."""
    half = weight.dtype == torch.bfloat16
    BM = max(16, min(64, triton.next_power_of_2(B)))
    BN = max(16, min(64 if BM == 16 else 32, triton.next_power_of_2(H)))
    BK = max(16, min(64 if half else 32, triton.next_power_of_2(H)))
    grid = triton.cdiv(B, BM) * triton.cdiv(H, BN), clients
    sizes: dict[str, int | str] = {"H": H, "G": GATES[cell], "CELL": cell, "BM": BM, "BN": BN, "BK": BK}
    return grid, sizes | {"num_warps": 4, "num_stages": 3}
