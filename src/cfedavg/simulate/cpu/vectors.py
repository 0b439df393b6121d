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

LANES = 16  # numbers in a vector register of AVX-512
# More sums at once hide how long an addition takes, as long as they fit into the registers. Ten of 16 numbers
# do with AVX-512. numba compiles anew for a processor with other features.
_FEATURES = getattr(numba.config, "CPU_FEATURES", None) or get_host_cpu_features().flatten()
WIDEST = 160 if "+avx512f" in _FEATURES else 64

FLOAT, BYTE, INT = ir.FloatType(), ir.IntType(8), types.intp
HALF = ir.IntType(16)  # the bits of bf16
_PAIRS, ZERO = ir.VectorType(HALF, 2 * LANES), ir.Constant(ir.IntType(64), 0)
DOTS = "+avx512bf16" in _FEATURES  # whether the processor has an instruction for products of bf16

# How two rows of so many numbers are interleaved, and how sums of rows of 32 are sorted afterwards.
INTERLEAVED = {
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


def indices(order: Sequence[int]) -> Any:
    """Return a list of places in the form that `shuffle_vector` takes."""
    word = ir.IntType(32)
    return ir.Constant(ir.VectorType(word, len(order)), [ir.Constant(word, n) for n in order])


def load(builder: Any, pointer: Any, at: Any, lanes: int) -> Any:
    vector = ir.VectorType(pointer.type.pointee, lanes)
    found = builder.load(builder.bitcast(builder.gep(pointer, [at]), vector.as_pointer()))
    found.align = 4 if pointer.type.pointee == FLOAT else 1
    return found


def store(builder: Any, vector: Any, pointer: Any, at: Any) -> None:
    done = builder.store(vector, builder.bitcast(builder.gep(pointer, [at]), vector.type.as_pointer()))
    done.align = 4 if pointer.type.pointee == FLOAT else 1


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


def spread_pair(b: Any, pointer: Any, at: Any) -> Any:
    """Return a vector with the two bf16 numbers from `pointer[at]` on in all lanes."""
    words = b.bitcast(b.gep(pointer, [at]), ir.IntType(32).as_pointer())
    return b.bitcast(spread(b, words, ZERO, LANES, align=2), _PAIRS)


def widen(b: Any, vector: Any) -> Any:
    """Return a vector of bf16 in float32; a vector in float32 as it is."""
    if vector.type.element != HALF:
        return vector
    lanes = vector.type.count
    words = b.zext(vector, ir.VectorType(ir.IntType(32), lanes))
    return b.bitcast(b.shl(words, constant(ir.IntType(32), lanes, 16)), ir.VectorType(FLOAT, lanes))


def add_product(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """Return total + x * y, which the compiler may round once."""
    fused = ("contract",)
    return builder.fadd(total, builder.fmul(x, y, flags=fused), flags=fused)


def add_pairs(b: Any, total: Any, x: Any, y: Any) -> Any:
    """Return total[l] + x[2 l] y[2 l] + x[2 l + 1] y[2 l + 1] for x and y in bf16."""
    words = ir.VectorType(ir.IntType(32), LANES)
    kind = ir.FunctionType(total.type, [total.type, words, words])
    declare: Callable[..., Any] = cgutils.get_or_insert_function
    dot = declare(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return b.call(dot, [total, b.bitcast(x, words), b.bitcast(y, words)])


def gather(lanes: int) -> Any:
    """Make gather(out, o, x, i, at, g, f, n): out[o] += sum over f <= k < f + n of g[k] x[i + at[k]].

    x and g hold float32, or the bits of bf16. For bf16, n is even.
    """

    def emit(b: Any, out: Any, o: Any, x: Any, i: Any, at: Any, g: Any, f: Any, n: Any) -> None:
        at, g = b.gep(at, [f]), b.gep(g, [f])
        if x.type.pointee == HALF:
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

    return operation(emit, None, INT, None, INT, None, None, INT, INT)


def _gather_pairs(b: Any, lanes: int, out: Any, o: Any, x: Any, i: Any, at: Any, g: Any, n: Any) -> None:
    """Emit `gather` for bf16: an instruction adds two products to each sum, of two rows that are interleaved.

    Numbers are interleaved within each 128 bits, which takes one instruction. So a sum of 32 numbers is in
    two vectors, whose groups of four numbers alternate; the sums are sorted at the end.
    """
    blocks = [(lane, min(32, lanes - lane)) for lane in range(0, lanes, 32)]
    zero, two = constant(FLOAT, LANES, 0.0), ir.Constant(ir.IntType(64), 2)
    totals = [[variable(b, zero) for _ in range(size // LANES)] for _, size in blocks]
    with cgutils.for_range(b, b.udiv(n, two)) as k:
        first = b.mul(k.index, two)
        starts = [b.add(i, b.load(b.gep(at, [b.add(first, ir.Constant(ir.IntType(64), j))]))) for j in (0, 1)]
        factors = spread_pair(b, g, first)
        for mine, (lane, size) in zip(totals, blocks, strict=True):
            place = ir.Constant(ir.IntType(64), lane)
            rows = [load(b, x, b.add(start, place), size) for start in starts]
            for total, order in zip(mine, INTERLEAVED[size], strict=True):
                mixed = b.shuffle_vector(*rows, indices(order))
                b.store(add_pairs(b, b.load(total), factors, mixed), total)
    for mine, (lane, size) in zip(totals, blocks, strict=True):
        sums = [b.load(total) for total in mine]
        if size == 32:
            sums = [b.shuffle_vector(*sums, indices(order)) for order in _SORTED]
        for j, total in enumerate(sums):
            place = b.add(o, ir.Constant(ir.IntType(64), lane + LANES * j))
            store(b, b.fadd(load(b, out, place, LANES), total), out, place)


def make_add_sum() -> Any:
    """Make add_sum(out, o, g, f, n): out[o] += sum of g[f : f + n], float32 or the bits of bf16."""

    def emit(b: Any, out: Any, o: Any, g: Any, f: Any, n: Any) -> None:
        g = b.gep(g, [f])
        lanes, total = ir.Constant(ir.IntType(64), LANES), variable(b, constant(FLOAT, LANES, 0.0))
        groups = b.udiv(n, lanes)
        with cgutils.for_range(b, groups) as k:
            part = widen(b, load(b, g, b.mul(k.index, lanes), LANES))
            b.store(b.fadd(b.load(total), part), total)
        rest, last = b.mul(groups, lanes), variable(b, ir.Constant(FLOAT, 0.0))
        with cgutils.for_range(b, b.sub(n, rest)) as k:
            one = b.extract_element(widen(b, load(b, g, b.add(rest, k.index), 1)), ZERO)
            b.store(b.fadd(b.load(last), one), last)
        found = b.load(last)
        for lane in range(LANES):
            found = b.fadd(found, b.extract_element(b.load(total), ir.Constant(ir.IntType(32), lane)))
        to = b.gep(out, [o])
        b.store(b.fadd(b.load(to), found), to)

    return operation(emit, None, INT, None, INT, INT)
