"""Compiled loops over a convolution that is followed by max-pooling of 2 x 2 windows, for images in float32.

Pooling passes a gradient to one of four pixels, so three quarters of the products of the convolution's
gradient are with zeros. The loops below leave them out.

Shapes: images x (N, H, W C), pooled y and its gradient g (N, h, w, M), and `at` (N, h, w, M), which says
which of the four pixels of a window is the largest: 0 to 3, or DEAD if ReLU lets nothing through.
"""

from __future__ import annotations

import numpy as np

from cfedavg.core.arrays import Array
from cfedavg.core.kernels import Int, compile_loop
from cfedavg.simulate.cpu.vectors import DOTS as DOTS
from cfedavg.simulate.cpu.vectors import WIDEST, gather, make_add_sum
from cfedavg.simulate.cpu.windows import DEAD, pooled_window, window_gradient

gather_widest, gather64, gather32, gather16 = gather(WIDEST), gather(64), gather(32), gather(16)
pooled_window32, pooled_window16 = pooled_window(32), pooled_window(16)
window_gradient32, window_gradient16 = window_gradient(32), window_gradient(16)
add_sum = make_add_sum()


@compile_loop
def convolve_and_pool(x: Array, w: Array, bias: Array, floor: Array, y: Array, at: Array, C: Int) -> None:
    """Convolve images of few channels, add the bias, and pool into `y` and `at`; w has the shape (K, T, M).

    The number M of output channels is a multiple of 16.
    """
    H, row = x.shape[1:]
    K, T, M = w.shape
    N, h, width = y.shape[:3]
    for n in range(N):
        for i in range(h):
            for j in range(width):
                start, out = (n * H + 2 * i) * row + 2 * j * C, ((n * h + i) * width + j) * M
                for c in range(0, M - 31, 32):
                    pooled_window32(x, start, row, C, w, c, M, K, T, bias, floor, y, at, out + c)
                if M % 32:
                    c = M - 16
                    pooled_window16(x, start, row, C, w, c, M, K, T, bias, floor, y, at, out + c)


@compile_loop
def add_few_channels_gradient(x: Array, g: Array, at: Array, dw: Array, db: Array, C: Int) -> None:
    """Add the gradient of `convolve_and_pool` to dw (K, T, M) and db (M,).

    x and g are both in float32 or, if C is 1, both the bits of bf16 (see DOTS).
    """
    H, row = x.shape[1:]
    K, T, M = dw.shape
    N, h, width = g.shape[:3]
    for n in range(N):
        # Each image has a sum of its own, so that long sums round less.
        mine, my_bias = np.zeros_like(dw), np.zeros_like(db)
        for i in range(h):
            for j in range(width):
                start, out = (n * H + 2 * i) * row + 2 * j * C, ((n * h + i) * width + j) * M
                for c in range(0, M - 31, 32):
                    window_gradient32(x, start, row, C, g, at, out + c, mine, c, M, K, T, my_bias)
                if M % 32:
                    c = M - 16
                    window_gradient16(x, start, row, C, g, at, out + c, mine, c, M, K, T, my_bias)
        dw += mine
        db += my_bias


@compile_loop
def pool(x: Array, floor: Array, y: Array, at: Array) -> None:
    """Pool the output x (N, H, W, M) of a convolution into `y` and `at`; no value of y is below the floor."""
    N, h, width, M = y.shape
    for n in range(N):
        for i in range(h):
            for j in range(width):
                a, b = x[n, 2 * i, 2 * j], x[n, 2 * i, 2 * j + 1]
                c, d = x[n, 2 * i + 1, 2 * j], x[n, 2 * i + 1, 2 * j + 1]
                for o in range(M):
                    best, where = a[o], 0
                    if b[o] > best or b[o] != b[o]:
                        best, where = b[o], 1
                    if c[o] > best or c[o] != c[o]:
                        best, where = c[o], 2
                    if d[o] > best or d[o] != d[o]:
                        best, where = d[o], 3
                    if best <= floor[0]:
                        best, where = floor[0], DEAD
                    y[n, i, j, o], at[n, i, j, o] = best, where


@compile_loop
def _list_gradients(
    n: Int, stop: Int, g: Array, at: Array, x: Array, C: Int, counts: Array, starts: Array, values: Array
) -> None:
    """List, for each output channel, the pixels of images n to stop - 1 with a gradient, and the gradients.

    A pixel is the place `starts[channel]` in x of the window from which the convolution computes it.
    """
    _, h, width, M = g.shape
    H, row = x.shape[1:]
    counts[:] = 0
    for image in range(n, stop):
        for i in range(h):
            for j in range(width):
                for o in range(M):
                    k, to = np.int64(at[image, i, j, o]), counts[o]
                    starts[o, to] = (image * H + 2 * i + (k >> 1)) * row + (2 * j + (k & 1)) * C
                    values[o, to] = g[image, i, j, o]
                    counts[o] = to + (k != DEAD)
    _fill_up(counts, starts, values)


@compile_loop
def _list_channels(
    image: Int, g: Array, at: Array, size: Int, counts: Array, starts: Array, values: Array
) -> None:
    """List, for each pixel of one image, the output channels that have a gradient there, and the gradients.

    `starts` holds the places of the channels' weights, which are `size` numbers each.
    """
    _, h, width, M = g.shape
    counts[:] = 0
    for i in range(h):
        for j in range(width):
            for o in range(M):
                k = np.int64(at[image, i, j, o])
                pixel = (2 * i + ((k >> 1) & 1)) * 2 * width + 2 * j + (k & 1)
                to = counts[pixel]
                starts[pixel, to] = o * size
                values[pixel, to] = g[image, i, j, o]
                counts[pixel] = to + (k != DEAD)
    _fill_up(counts, starts, values)


@compile_loop
def _fill_up(counts: Array, starts: Array, values: Array) -> None:
    """In bf16, repeat the last entry of each list of odd length, with a gradient of 0: see `gather`."""
    for i in range(len(counts)):
        if values.itemsize == 2 and counts[i] % 2:
            starts[i, counts[i]], values[i, counts[i]] = starts[i, counts[i] - 1], 0
            counts[i] += 1


@compile_loop
def add_gradient(x: Array, g: Array, at: Array, w: Array, dw: Array, db: Array, dx: Array, C: Int) -> None:
    """Add the gradient of convolution and pooling to dw (M, K, T), db (M,) and dx, which is x's.

    The number C of channels is a multiple of 16, and so is T. An empty dx is left out. x, g and w are all in
    float32, or all the bits of bf16 (see DOTS).
    """
    N, H, row = x.shape
    h, width = g.shape[1:3]
    M, K, T = w.shape
    images, to_images, weights, to_weights = x.reshape(-1), dx.reshape(-1), w.reshape(-1), dw.reshape(-1)
    together = max(1, 64 // (h * width))  # images whose sums reach dw at once
    pixels, longest = 4 * h * width, max(M, together * h * width) + 1  # the entry behind a list is written
    counts = np.empty(max(M, pixels), np.int64)
    starts, values = np.empty((len(counts), longest), np.int64), np.empty((len(counts), longest), g.dtype)
    places, factors = starts.reshape(-1), values.reshape(-1)  # a view of each row would cost a lock
    for n in range(0, N, together):
        _list_gradients(n, min(N, n + together), g, at, x, C, counts, starts, values)
        for o in range(M):
            add_sum(db, o, factors, o * longest, counts[o])
            for u in range(K):
                to = (o * K + u) * T
                _add_rows(to_weights, to, images, u * row, places, factors, o * longest, counts[o], T)
    for n in range(N if dx.size else 0):
        _list_channels(n, g, at, K * T, counts, starts, values)
        for u in range(K):  # one row of all channels' weights stays in the cache
            for p in range(pixels):
                to = (n * H + p // (2 * width) + u) * row + p % (2 * width) * C
                _add_rows(to_images, to, weights, u * T, places, factors, p * longest, counts[p], T)


@compile_loop
def _add_rows(out: Array, o: Int, x: Array, i: Int, at: Array, g: Array, f: Int, k: Int, T: Int) -> None:
    """Add the sum of k rows of T numbers, each times its gradient, to T numbers of `out`.

    The places of the rows and the gradients are entries f to f + k - 1 of `at` and `g`.
    """
    if not k:
        return
    t = 0
    while T - t >= WIDEST:
        gather_widest(out, o + t, x, i + t, at, g, f, k)
        t += WIDEST
    while T - t >= 64:
        gather64(out, o + t, x, i + t, at, g, f, k)
        t += 64
    if T - t >= 32:
        gather32(out, o + t, x, i + t, at, g, f, k)
        t += 32
    if T - t >= 16:
        gather16(out, o + t, x, i + t, at, g, f, k)
