"""The kernels of the C library in clients/c, called through ctypes.

A wheel holds the library if there was a C compiler where it was built. `find` returns, for the name of a
kernel, a function with the arguments and the result of the Python kernel of that name: it fills the same
arrays and returns the same numbers. It must not be given other arrays than that kernel: the C code checks
that words do not end early, but relies on the lengths that the Python kernels rely on.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

LIBRARY = Path(__file__).with_name("_native.so")
KERNELS = 4  # the number in clients/c/kernels.h; a library with another one is not used
_NO_MEMORY = 3  # a fault of the index decoder in C; the lower ones are those of wire/sets.py
_FORMATS = {"float32": 0, "int8": 1, "int16": 2}
Array = np.ndarray
_RESULT, _INT, _DOUBLE, _ARRAY = ctypes.c_int64, ctypes.c_int, ctypes.c_double, ctypes.c_void_p


class _I64(ctypes.c_int64):
    """An argument of 64 bits. NumPy's integers are taken too; an unsigned one keeps its bits."""

    @classmethod
    def from_param(cls, number: Any) -> ctypes.c_int64:
        return ctypes.c_int64(operator.index(number))


# For each C function: the types of its result and its arguments, in the order of clients/c/kernels.h.
_TYPES: dict[str, tuple[Any, ...]] = {
    "encode_indices": (_RESULT, _ARRAY, _I64, _ARRAY, _I64, _I64, _ARRAY, _I64),
    "decode_indices": (_INT, _ARRAY, _I64, _ARRAY, _I64, _I64, _ARRAY, _I64, _ARRAY),
    "encode_chunks": (_RESULT, _ARRAY, _I64, _ARRAY, _I64, _I64, _ARRAY, _I64, _I64, _I64),
    "decode_chunks": (_INT, _ARRAY, _I64, _ARRAY, _I64, _I64, _ARRAY, _I64, _ARRAY),
    "are_increasing": (_INT, _ARRAY, _I64, _I64),
    "list_ones": (None, _ARRAY, _I64, _ARRAY, _I64),
    "encode_numbers": (_RESULT, _ARRAY, _I64, _ARRAY, _I64, _ARRAY, _ARRAY, _I64, _INT, _I64),
    "decode_numbers": (_RESULT, _ARRAY, _I64, _ARRAY, _I64, _ARRAY, _ARRAY, _I64, _INT, _I64),
    "encode_levels": (_RESULT, _ARRAY, _I64, _ARRAY, _I64, _ARRAY, _ARRAY, _I64, _I64, _I64),
    "decode_levels": (_RESULT, _ARRAY, _I64, _ARRAY, _I64, _ARRAY, _ARRAY, _I64, _I64, _I64),
    "find_bound": (_RESULT, _ARRAY, _INT, _I64, _I64, _I64, _I64, _INT),
    "collect": (_RESULT, _ARRAY, _INT, _I64, _DOUBLE, _ARRAY),
    "pick": (_RESULT, _ARRAY, _INT, _ARRAY, _I64, _INT, _ARRAY, _I64),
    "squares": (_DOUBLE, _ARRAY, _INT, _I64),
    "draw_into": (_RESULT, _I64, _I64, _I64, _ARRAY, _I64),
    "add": (_RESULT, _ARRAY, _ARRAY, _I64, _ARRAY, _INT, _ARRAY, _I64, _I64, _I64),
    "add_to_bf16": (_RESULT, _ARRAY, _ARRAY, _I64, _ARRAY, _INT, _ARRAY, _I64, _I64, _I64),
}


def find(name: str) -> Callable[..., Any] | None:
    """Return the C version of the kernel `name`; None if the library is absent or has no such kernel."""
    call = _CALLS.get(name)
    library = load() if call else None
    return None if call is None or library is None else partial(call, library)


def load() -> Any:
    """Return the C library with the types of its kernels; None if it is absent or of another version."""
    return _load(LIBRARY)


@cache
def _load(path: Path) -> ctypes.CDLL | None:
    """Return the library at `path` with all types set; None if it is absent or of another version."""
    try:
        library = ctypes.CDLL(str(path))
        if library.cfedavg_kernels() != KERNELS:
            return None
        for name, (result, *arguments) in _TYPES.items():
            function = getattr(library, f"cfedavg_{name}")
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return library


def ready(array: Any, dtype: Any = None) -> Array:
    """Return an array that C can read: contiguous, aligned and in `dtype` (None: in its own)."""
    found = np.ascontiguousarray(array, dtype)
    return found if found.flags.aligned else found.copy()


def _filled(array: Array, *dtypes: Any) -> Array:
    """Return an array that C fills; raise TypeError unless it is contiguous and in one of the dtypes."""
    if array.dtype not in dtypes or not array.flags.c_contiguous or not array.flags.writeable:
        raise TypeError(f"C fills contiguous arrays of {dtypes}, got {array.dtype} with {array.flags}")
    return array


def _at(array: Array) -> int:
    """Return the address of an array's first number."""
    address: int = array.ctypes.data
    return address


def _checked(number: int) -> int:
    """Return a kernel's result; raise MemoryError if the kernel had no scratch memory."""
    if number < 0:
        raise MemoryError("the coder has no memory left")
    return number


def _encode_indices(library: Any, words: Array, indices: Array, d: int, shapes: Array) -> int:
    return _encode_places(library.cfedavg_encode_indices, words, indices, d, shapes)


def _encode_chunks(library: Any, words: Array, indices: Array, d: int, shapes: Array, s: int, n: int) -> int:
    return _encode_places(library.cfedavg_encode_chunks, words, indices, d, shapes, s, n)


def _encode_places(encode: Any, words: Array, indices: Array, d: int, shapes: Array, *chunk: int) -> int:
    words, indices, shapes = _filled(words, np.uint32), ready(indices, np.int64), ready(shapes, np.int64)
    n = encode(_at(words), len(words), _at(indices), len(indices), d, _at(shapes), len(shapes), *chunk)
    return _fitting(n, words)


def _fitting(n: int, words: Array) -> int:
    """Return the number of words that an encoder wrote; raise IndexError if they did not fit."""
    if _checked(n) > len(words):
        raise IndexError(f"the section needs {n} words, but there is room for {len(words)}")
    return n


def _decode_indices(library: Any, words: Array, indices: Array, d: int, shapes: Array) -> tuple[int, int]:
    return _decode_places(library.cfedavg_decode_indices, words, indices, d, shapes)


def _decode_chunks(library: Any, words: Array, indices: Array, d: int, shapes: Array) -> tuple[int, int]:
    return _decode_places(library.cfedavg_decode_chunks, words, indices, d, shapes)


def _decode_places(decode: Any, words: Array, indices: Array, d: int, shapes: Array) -> tuple[int, int]:
    words, indices, shapes = ready(words, np.uint32), _filled(indices, np.int64), ready(shapes, np.int64)
    read = ctypes.c_int64()
    fault: int = decode(
        _at(words), len(words), _at(indices), len(indices), d, _at(shapes), len(shapes), ctypes.byref(read)
    )
    return _checked(-1 if fault == _NO_MEMORY else fault), read.value


def _are_increasing(library: Any, indices: Array, d: int) -> bool:
    indices = ready(indices, np.int64)
    return bool(library.cfedavg_are_increasing(_at(indices), len(indices), d))


def _list_ones(library: Any, bits: Array, found: Array) -> None:
    bits, found = ready(bits, np.uint64), _filled(found, np.int64)
    library.cfedavg_list_ones(_at(bits), len(bits), _at(found), len(found))


def _encode_numbers(library: Any, words: Array, numbers: Array, *rest: Any) -> int:
    words, numbers = _filled(words, np.uint32), ready(numbers, np.uint16)
    return _fitting(_code_numbers(library.cfedavg_encode_numbers, words, numbers, *rest), words)


def _decode_numbers(library: Any, words: Array, numbers: Array, *rest: Any) -> int:
    words, numbers = ready(words, np.uint32), _filled(numbers, np.uint16)
    return _checked(_code_numbers(library.cfedavg_decode_numbers, words, numbers, *rest))


def _code_numbers(
    code: Any,
    words: Array,
    numbers: Array,
    indices: Array,
    row_ends: Array,
    zero_has_sign: bool,
    largest: int,
) -> int:
    indices, row_ends = ready(indices, np.int64), ready(row_ends, np.int64)
    n: int = code(
        _at(words), len(words), _at(numbers), len(numbers), _at(indices) if len(indices) else None,
        _at(row_ends), len(row_ends), zero_has_sign, largest,
    )  # fmt: skip
    return n


def _encode_levels(library: Any, words: Array, numbers: Array, *rest: Any) -> int:
    words, numbers = _filled(words, np.uint32), ready(numbers, np.uint16)
    return _fitting(_code_levels(library.cfedavg_encode_levels, words, numbers, *rest), words)


def _decode_levels(library: Any, words: Array, numbers: Array, *rest: Any) -> int:
    words, numbers = ready(words, np.uint32), _filled(numbers, np.uint16)
    return _checked(_code_levels(library.cfedavg_decode_levels, words, numbers, *rest))


def _code_levels(
    code: Any, words: Array, numbers: Array, indices: Array, shapes: Array, least: int, top: int
) -> int:
    indices, shapes = ready(indices, np.int64), ready(shapes, np.int64)
    n: int = code(
        _at(words), len(words), _at(numbers), len(numbers), _at(indices) if len(indices) else None,
        _at(shapes), len(shapes), least, top,
    )  # fmt: skip
    return n


def _find_bound(library: Any, bits: Array, k: int, stride: int, slack: int, width: int) -> int:
    bits = ready(bits)
    found: int = library.cfedavg_find_bound(_at(bits), bits.itemsize, len(bits), k, stride, slack, width)
    return found


def _collect(library: Any, values: Array, bound: float, found: Array) -> int:
    values, found = ready(values), _filled(found, np.int64)
    n: int = library.cfedavg_collect(_at(values), values.itemsize, len(values), bound, _at(found))
    return n


def _pick(library: Any, bits: Array, found: Array, width: int, indices: Array) -> int:
    bits, found, indices = ready(bits), ready(found, np.int64), _filled(indices, np.int64)
    arguments = _at(bits), bits.itemsize, _at(found), len(found), width, _at(indices), len(indices)
    return _checked(library.cfedavg_pick(*arguments))


def _squares(library: Any, v: Array) -> float:
    v = ready(v)
    found: float = library.cfedavg_squares(_at(v), v.itemsize, len(v))
    return found


def _draw(library: Any, key: int, keep: int, d: int, indices: Array) -> int:
    indices = _filled(indices, np.int64)
    n: int = library.cfedavg_draw_into(key, keep, d, _at(indices), len(indices))
    return n


def _add(
    library: Any, w: Array, at: Array, numbers: Array, scales: Array, block: int, i: int, stop: int
) -> int:
    add = library.cfedavg_add if w.dtype == np.float32 else library.cfedavg_add_to_bf16
    w, at, numbers = _filled(w, np.float32, np.int16), ready(at, np.int64), ready(numbers)
    scales, format = ready(scales, np.float32), _FORMATS[numbers.dtype.name]
    n: int = add(_at(w), _at(at), len(at), _at(numbers), format, _at(scales), block, i, min(stop, len(w)))
    return n


_CALLS: dict[str, Callable[..., Any]] = {
    "encode_indices": _encode_indices,
    "decode_indices": _decode_indices,
    "encode_chunks": _encode_chunks,
    "decode_chunks": _decode_chunks,
    "are_increasing": _are_increasing,
    "list_ones": _list_ones,
    "encode_numbers": _encode_numbers,
    "decode_numbers": _decode_numbers,
    "encode_levels": _encode_levels,
    "decode_levels": _decode_levels,
    "find_bound": _find_bound,
    "collect": _collect,
    "pick": _pick,
    "_squares": _squares,
    "_draw": _draw,
    "_add": _add,
    "_add_to_bf16": _add,
}
