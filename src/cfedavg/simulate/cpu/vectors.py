"""Operations on vectors of `lanes` numbers that numba has not: each emits LLVM code into a compiled loop.

numba cannot keep a vector of sums in registers, and it checks at run time, before each inner loop, whether
arrays overlap; for loops of 32 numbers the checks take longer than the arithmetic. The functions below are
called from kernels. They take arrays with an offset, and touch `lanes` numbers from there on. They check no
bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

DEAD = 4  # the place of a window of four numbers none of which is above the floor

LANES = 16  # numbers in a vector register of AVX-512
# More sums at once hide how long an addition takes, as long as they fit into the registers. Ten of 16 numbers
# do with AVX-512. numba compiles anew for a processor with other features.
_FEATURES = getattr(numba.config, "CPU_FEATURES", None) or get_host_cpu_features().flatten()
WIDEST = 160 if "+avx512f" in _FEATURES else 64

_FLOAT, _BYTE, _INT = ir.FloatType(), ir.IntType(8), types.intp
_HALF = ir.IntType(16)  # the bits of bf16
_PAIRS, _ZERO = ir.VectorType(_HALF, 2 * LANES), ir.Constant(ir.IntType(64), 0)
DOTS = "+avx512bf16" in _FEATURES  # whether the processor has an instruction for products of bf16

# How two rows of so many numbers are interleaved, and how sums of rows of 32 are sorted afterwards.
_INTERLEAVED = {
    32: [[n for lane in range(0, 32, 8) for j in range(4) for n in (lane + h + j, 32 + lane + h + j)]
         for h in (0, 4)],
    16: [[n for j in range(16) for n in (j, 16 + j)]],
}  # fmt: skip
_SORTED = [
    [4 * group + j + 16 * h for group in pair for h in (0, 1) for j in range(4)] for pair in ((0, 1), (2, 3))
]


def operation(emit: Callable[..., None], *kinds: Any) -> Any:
    """Return a function for kernels whose code is emitted by `emit(builder, *arguments)`.

    `kinds` are the numba types of the arguments; None stands for an array, which is passed as a pointer.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        pairs = zip(signature.args, values, strict=True)
        given = [
            context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
            for kind, value in pairs
        ]
        emit(builder, *given)
        return context.get_dummy_value()

    def typing(context: Any, *found: Any) -> Any:
        pairs = zip(kinds, found, strict=True)
        return types.void(*(have if want is None else want for want, have in pairs)), generate

    # numba reads the number of arguments here; it would pass *found as one tuple.
    names = ["context", *(f"a{i}" for i in range(len(kinds)))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    vars(typing)["__signature__"] = Signature(parameters)
    return intrinsic(typing)


def constant(kind: Any, lanes: int, value: float) -> Any:
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def _indices(order: Sequence[int]) -> Any:
    """Return a list of places in the form that `shuffle_vector` takes."""
    word = ir.IntType(32)
    return ir.Constant(ir.VectorType(word, len(order)), [ir.Constant(word, n) for n in order])


def load(builder: Any, pointer: Any, at: Any, lanes: int) -> Any:
    vector = ir.VectorType(pointer.type.pointee, lanes)
    found = builder.load(builder.bitcast(builder.gep(pointer, [at]), vector.as_pointer()))
    found.align = 4 if pointer.type.pointee == _FLOAT else 1
    return found


def store(builder: Any, vector: Any, pointer: Any, at: Any) -> None:
    done = builder.store(vector, builder.bitcast(builder.gep(pointer, [at]), vector.type.as_pointer()))
    done.align = 4 if pointer.type.pointee == _FLOAT else 1


def variable(builder: Any, value: Any) -> Any:
    """Return a pointer to a new variable, which the compiler keeps in registers."""
    made: Callable[..., Any] = cgutils.alloca_once_value
    return made(builder, value)


def spread(builder: Any, pointer: Any, at: Any, lanes: int, align: int | None = None) -> Any:
    """Return a vector with the number at `pointer[at]` in all lanes."""
    number = builder.load(builder.gep(pointer, [at]))
    number.align = align
    empty = ir.Constant(ir.VectorType(pointer.type.pointee, lanes), ir.Undefined)
    first = ir.Constant(ir.IntType(32), 0)
    one = builder.insert_element(empty, number, first)
    return builder.shuffle_vector(one, empty, constant(ir.IntType(32), lanes, 0))


def add_product(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """Return total + x * y, which the compiler may round once."""
    fused = ("contract",)
    return builder.fadd(total, builder.fmul(x, y, flags=fused), flags=fused)


def gather(lanes: int) -> Any:
    """Make gather(out, o, x, i, at, g, f, n): out[o] += sum over f <= k < f + n of g[k] x[i + at[k]].

    x and g hold float32, or the bits of bf16. For bf16, n is even.
    """

    def emit(b: Any, out: Any, o: Any, x: Any, i: Any, at: Any, g: Any, f: Any, n: Any) -> None:
        at, g = b.gep(at, [f]), b.gep(g, [f])
        if x.type.pointee == _HALF:
            _gather_pairs(b, lanes, out, o, x, i, at, g, n)
            return
        places = [ir.Constant(ir.IntType(64), lane) for lane in range(0, lanes, LANES)]
        totals = [variable(b, load(b, out, b.add(o, place), LANES)) for place in places]
        with cgutils.for_range(b, n) as k:
            start, factor = b.add(i, b.load(b.gep(at, [k.index]))), spread(b, g, k.index, LANES)
            for total, place in zip(totals, places, strict=True):
                part = load(b, x, b.add(start, place), LANES)
                b.store(add_product(b, b.load(total), factor, part), total)
        for total, place in zip(totals, places, strict=True):
            store(b, b.load(total), out, b.add(o, place))

    return operation(emit, None, _INT, None, _INT, None, None, _INT, _INT)


def _gather_pairs(b: Any, lanes: int, out: Any, o: Any, x: Any, i: Any, at: Any, g: Any, n: Any) -> None:
    """Emit `gather` for bf16: an instruction adds two products to each sum, of two rows that are interleaved.

    Numbers are interleaved within each 128 bits, which takes one instruction. So a sum of 32 numbers is in
    two vectors, whose groups of four numbers alternate; the sums are sorted at the end.
    """
    blocks = [(lane, min(32, lanes - lane)) for lane in range(0, lanes, 32)]
    zero, two = constant(_FLOAT, LANES, 0.0), ir.Constant(ir.IntType(64), 2)
    totals = [[variable(b, zero) for _ in range(size // LANES)] for _, size in blocks]
    with cgutils.for_range(b, b.udiv(n, two)) as k:
        first = b.mul(k.index, two)
        starts = [b.add(i, b.load(b.gep(at, [b.add(first, ir.Constant(ir.IntType(64), j))]))) for j in (0, 1)]
        factors = _spread_pair(b, g, first)
        for mine, (lane, size) in zip(totals, blocks, strict=True):
            place = ir.Constant(ir.IntType(64), lane)
            rows = [load(b, x, b.add(start, place), size) for start in starts]
            for total, order in zip(mine, _INTERLEAVED[size], strict=True):
                mixed = b.shuffle_vector(*rows, _indices(order))
                b.store(_add_pairs(b, b.load(total), factors, mixed), total)
    for mine, (lane, size) in zip(totals, blocks, strict=True):
        sums = [b.load(total) for total in mine]
        if size == 32:
            sums = [b.shuffle_vector(*sums, _indices(order)) for order in _SORTED]
        for j, total in enumerate(sums):
            place = b.add(o, ir.Constant(ir.IntType(64), lane + LANES * j))
            store(b, b.fadd(load(b, out, place, LANES), total), out, place)


def _add_pairs(b: Any, total: Any, x: Any, y: Any) -> Any:
    """Return total[l] + x[2 l] y[2 l] + x[2 l + 1] y[2 l + 1] for x and y in bf16."""
    words = ir.VectorType(ir.IntType(32), LANES)
    kind = ir.FunctionType(total.type, [total.type, words, words])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return b.call(
        cgutils.get_or_insert_function(b.module, kind, name),
        [total, b.bitcast(x, words), b.bitcast(y, words)],
    )


def add_sum() -> Any:
    """Make add_sum(out, o, g, f, n): out[o] += sum of g[f : f + n], float32 or the bits of bf16."""

    def emit(b: Any, out: Any, o: Any, g: Any, f: Any, n: Any) -> None:
        g = b.gep(g, [f])
        lanes, total = ir.Constant(ir.IntType(64), LANES), variable(b, constant(_FLOAT, LANES, 0.0))
        groups = b.udiv(n, lanes)
        with cgutils.for_range(b, groups) as k:
            part = widen(b, load(b, g, b.mul(k.index, lanes), LANES))
            b.store(b.fadd(b.load(total), part), total)
        rest, last = b.mul(groups, lanes), variable(b, ir.Constant(_FLOAT, 0.0))
        with cgutils.for_range(b, b.sub(n, rest)) as k:
            one = b.extract_element(widen(b, load(b, g, b.add(rest, k.index), 1)), _ZERO)
            b.store(b.fadd(b.load(last), one), last)
        found = b.load(last)
        for lane in range(LANES):
            found = b.fadd(found, b.extract_element(b.load(total), ir.Constant(ir.IntType(32), lane)))
        to = b.gep(out, [o])
        b.store(b.fadd(b.load(to), found), to)

    return operation(emit, None, _INT, None, _INT, _INT)


def widen(b: Any, vector: Any) -> Any:
    """Return a vector of bf16 in float32; a vector in float32 as it is."""
    if vector.type.element != _HALF:
        return vector
    lanes = vector.type.count
    words = b.zext(vector, ir.VectorType(ir.IntType(32), lanes))
    return b.bitcast(b.shl(words, constant(ir.IntType(32), lanes, 16)), ir.VectorType(_FLOAT, lanes))


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
        best, where = b.load(totals[0]), constant(_BYTE, lanes, 0)
        for k in (1, 2, 3):
            value = b.load(totals[k])
            better = b.or_(b.fcmp_ordered(">", value, best), b.fcmp_unordered("uno", value, value))
            best = b.select(better, value, best)
            where = b.select(better, constant(_BYTE, lanes, k), where)
        least = spread(b, floor, ir.Constant(ir.IntType(64), 0), lanes)
        dead = b.fcmp_ordered("<=", best, least)
        store(b, b.select(dead, least, best), y, o)
        store(b, b.select(dead, constant(_BYTE, lanes, DEAD), where), at, o)

    return operation(emit, None, _INT, _INT, _INT, None, _INT, _INT, _INT, _INT, None, None, None, None, _INT)


def window_gradient(lanes: int) -> Any:
    """Make window_gradient(x, i, row, C, g, at, o, dw, c, M, K, T, db), for one pixel after the pooling.

    Add the gradient of weights and bias to dw (K, T, M) and db; the windows are those of `pooled_window`.
    The gradient g[o] belongs to the window at[o]. x and g hold float32, or the bits of bf16 if C is 1.
    """

    def emit(
        b: Any, x: Any, i: Any, row: Any, C: Any, g: Any, at: Any, o: Any, dw: Any, c: Any, M: Any, K: Any,
        T: Any, db: Any,
    ) -> None:  # fmt: skip
        step = LANES if x.type.pointee == _HALF else lanes
        for first in range(0, lanes, step):
            place = ir.Constant(ir.IntType(64), first)
            grad, where = (load(b, each, b.add(o, place), step) for each in (g, at))
            to, add = b.add(c, place), _add_halves if x.type.pointee == _HALF else _add_windows
            _add_bias(b, grad, where, db, to)
            _taps(b, K, T, row, M, add(b, grad, where, x, i, row, C, dw, to))

    return operation(emit, None, _INT, _INT, _INT, None, None, _INT, None, _INT, _INT, _INT, _INT, None)


def _parts(b: Any, grad: Any, where: Any) -> list[Any]:
    """Return the gradient of each of the four windows: zero where it belongs to another."""
    zero = ir.Constant(grad.type, None)
    lanes = where.type.count
    return [b.select(b.icmp_unsigned("==", where, constant(_BYTE, lanes, k)), grad, zero) for k in range(4)]


def _add_bias(b: Any, grad: Any, where: Any, db: Any, to: Any) -> None:
    lanes = where.type.count
    dead = b.icmp_unsigned("==", where, constant(_BYTE, lanes, DEAD))
    alive = b.select(dead, constant(_FLOAT, lanes, 0.0), widen(b, grad))
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
    order = _indices(_INTERLEAVED[LANES][0])
    pairs = [b.shuffle_vector(*rows, order) for rows in ((one, two), (three, four))]

    def visit(pixel: Any, weight: Any) -> None:
        to = b.add(c, weight)
        total, place = load(b, dw, to, LANES), b.add(i, pixel)
        for pair, start in zip(pairs, (place, b.add(place, row)), strict=True):
            total = _add_pairs(b, total, _spread_pair(b, x, start), pair)
        store(b, total, dw, to)

    return visit


def _spread_pair(b: Any, pointer: Any, at: Any) -> Any:
    """Return a vector with the two bf16 numbers from `pointer[at]` on in all lanes."""
    words = b.bitcast(b.gep(pointer, [at]), ir.IntType(32).as_pointer())
    return b.bitcast(spread(b, words, _ZERO, LANES, align=2), _PAIRS)
