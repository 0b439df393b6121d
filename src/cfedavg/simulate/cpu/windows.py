"""Operations on the four windows that are pooled into one pixel: their convolution, and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from cfedavg.simulate.cpu.vectors import (
    BYTE,
    FLOAT,
    HALF,
    INT,
    INTERLEAVED,
    LANES,
    add_pairs,
    add_product,
    constant,
    indices,
    load,
    operation,
    spread,
    spread_pair,
    store,
    variable,
    widen,
)

DEAD = 4  # the place of a window of four numbers none of which is above the floor


def _windows(b: Any, i: Any, row: Any, C: Any) -> tuple[Any, ...]:
    """Return the places of one tap in the four windows that are pooled."""
    below = b.add(i, row)
    return i, b.add(i, C), below, b.add(below, C)


def _taps(b: Any, K: Any, T: Any, row: Any, M: Any, visit: Callable[[Any, Any], None]) -> None:
    """Emit a loop over K rows of T taps; `visit` gets a tap's place in the image and in the weights."""
    with cgutils.for_range(b, K) as u:
        image, weights = b.mul(u.index, row), b.mul(b.mul(u.index, T), M)
        with cgutils.for_range(b, T) as v:
            visit(b.add(image, v.index), b.add(weights, b.mul(v.index, M)))


def pooled_window(lanes: int) -> Any:
    """Make pooled_window(x, i, row, C, w, c, M, K, T, bias, floor, y, at, o), one pixel after the pooling.

    Convolve the four windows of the image x that begin at i, i + C, i + row, i + row + C with output
    channels c to c + lanes - 1 of the weights w (K, T, M), and add the bias. y[o] is the largest of the four
    and the floor, and at[o] says which it is: 0 to 3, or DEAD.
    """

    def emit(
        b: Any, x: Any, i: Any, row: Any, C: Any, w: Any, c: Any, M: Any, K: Any, T: Any, bias: Any,
        floor: Any, y: Any, at: Any, o: Any,
    ) -> None:  # fmt: skip
        first = load(b, bias, c, lanes)
        totals = [variable(b, first) for _ in range(4)]

        def visit(pixel: Any, weight: Any) -> None:
            part = load(b, w, b.add(c, weight), lanes)
            for total, place in zip(totals, _windows(b, b.add(i, pixel), row, C), strict=True):
                b.store(add_product(b, b.load(total), spread(b, x, place, lanes), part), total)

        _taps(b, K, T, row, M, visit)
        best, where = b.load(totals[0]), constant(BYTE, lanes, 0)
        for k in (1, 2, 3):
            value = b.load(totals[k])
            better = b.or_(b.fcmp_ordered(">", value, best), b.fcmp_unordered("uno", value, value))
            best = b.select(better, value, best)
            where = b.select(better, constant(BYTE, lanes, k), where)
        least = spread(b, floor, ir.Constant(ir.IntType(64), 0), lanes)
        dead = b.fcmp_ordered("<=", best, least)
        store(b, b.select(dead, least, best), y, o)
        store(b, b.select(dead, constant(BYTE, lanes, DEAD), where), at, o)

    return operation(emit, None, INT, INT, INT, None, INT, INT, INT, INT, None, None, None, None, INT)


def window_gradient(lanes: int) -> Any:
    """Make window_gradient(x, i, row, C, g, at, o, dw, c, M, K, T, db), for one pixel after the pooling.

    Add the gradient of weights and bias to dw (K, T, M) and db; the windows are those of `pooled_window`.
    The gradient g[o] belongs to the window at[o]. x and g hold float32, or the bits of bf16 if C is 1.
    """

    def emit(
        b: Any, x: Any, i: Any, row: Any, C: Any, g: Any, at: Any, o: Any, dw: Any, c: Any, M: Any, K: Any,
        T: Any, db: Any,
    ) -> None:  # fmt: skip
        step = LANES if x.type.pointee == HALF else lanes
        for first in range(0, lanes, step):
            place = ir.Constant(ir.IntType(64), first)
            grad, where = (load(b, each, b.add(o, place), step) for each in (g, at))
            to, add = b.add(c, place), _add_halves if x.type.pointee == HALF else _add_windows
            _add_bias(b, grad, where, db, to)
            _taps(b, K, T, row, M, add(b, grad, where, x, i, row, C, dw, to))

    return operation(emit, None, INT, INT, INT, None, None, INT, None, INT, INT, INT, INT, None)


def _parts(b: Any, grad: Any, where: Any) -> list[Any]:
    """Return the gradient of each of the four windows: zero where it belongs to another."""
    zero = ir.Constant(grad.type, None)
    lanes = where.type.count
    return [b.select(b.icmp_unsigned("==", where, constant(BYTE, lanes, k)), grad, zero) for k in range(4)]


def _add_bias(b: Any, grad: Any, where: Any, db: Any, to: Any) -> None:
    lanes = where.type.count
    dead = b.icmp_unsigned("==", where, constant(BYTE, lanes, DEAD))
    alive = b.select(dead, constant(FLOAT, lanes, 0.0), widen(b, grad))
    store(b, b.fadd(load(b, db, to, lanes), alive), db, to)


def _add_windows(
    b: Any, grad: Any, where: Any, x: Any, i: Any, row: Any, C: Any, dw: Any, c: Any
) -> Callable[[Any, Any], None]:
    """Return what `window_gradient` does with one tap, in float32."""
    parts, lanes = _parts(b, grad, where), where.type.count

    def visit(pixel: Any, weight: Any) -> None:
        to = b.add(c, weight)
        total = load(b, dw, to, lanes)
        for part, place in zip(parts, _windows(b, b.add(i, pixel), row, C), strict=True):
            total = add_product(b, total, spread(b, x, place, lanes), part)
        store(b, total, dw, to)

    return visit


def _add_halves(
    b: Any, grad: Any, where: Any, x: Any, i: Any, row: Any, C: Any, dw: Any, c: Any
) -> Callable[[Any, Any], None]:
    """Return what `window_gradient` does with one tap, in bf16: two windows lie side by side in x."""
    one, two, three, four = _parts(b, grad, where)
    order = indices(INTERLEAVED[LANES][0])
    pairs = [b.shuffle_vector(*rows, order) for rows in ((one, two), (three, four))]

    def visit(pixel: Any, weight: Any) -> None:
        to = b.add(c, weight)
        total, place = load(b, dw, to, LANES), b.add(i, pixel)
        for pair, start in zip(pairs, (place, b.add(place, row)), strict=True):
            total = add_pairs(b, total, spread_pair(b, x, start), pair)
        store(b, total, dw, to)

    return visit
