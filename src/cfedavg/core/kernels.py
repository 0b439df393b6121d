"""Loops over arrays, as fast as this machine can run them: the decorators `kernel` and `helper`.

Each loop is written once, in Python that numba can compile. It runs in one of three ways:

    c         as the function of the same name in the C library
    numba     compiled by numba when it is first called
    python    as plain Python, many times slower

The first way that this machine has is used. The environment variable CFEDAVG_KERNELS forces one of them.

Plain Python runs the same source with Python's integers, which have no fixed width. So a kernel makes its
integers with `int64`, `uint32` and `uint64`, and its arrays with `integers` and `table`. Where a uint64 may
wrap around, the kernel takes the result `& WORD64`, which costs nothing in machine code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cache, update_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from cfedavg.core import native
from cfedavg.core.errors import InputError
from cfedavg.core.extras import explain_missing

Int = Any  # an integer in compiled code; the compiler infers its width and sign
F = TypeVar("F", bound=Callable[..., Any])


@cache
def import_numba() -> ModuleType:
    """Import numba with safe settings. Nothing in the package may import it before this has been called."""
    # numba reads `.numba_config.yaml` in the current folder; the file may be somebody else's. These two
    # settings choose the cache, and code in a cache is run. A value in the environment wins over the file.
    os.environ.setdefault("NUMBA_CACHE_DIR", "")
    os.environ.setdefault("NUMBA_CACHE_LOCATOR_CLASSES", "")
    with explain_missing():
        import numba
    found: ModuleType = numba
    return found


def choose_way(wanted: str) -> str:
    """Return the way in which kernels run: `wanted`, or if that is empty, the fastest on this machine."""
    if wanted not in ("", "numba", "c", "python"):
        raise InputError(
            f"the environment variable CFEDAVG_KERNELS must be numba, c or python, got {wanted!r}"
        )
    if wanted in ("", "c"):
        if native.find("encode_numbers"):
            return "c"
        if wanted:
            raise InputError(
                "the environment variable CFEDAVG_KERNELS is c, but cfedavg has no C library here, or one of "
                "another version"
            )
    if wanted in ("", "numba"):
        try:
            import_numba()
        except ImportError:  # not installed, or not for this version of NumPy
            if wanted:
                raise
        else:
            return "numba"
    return "python"


WAY = choose_way(os.environ.get("CFEDAVG_KERNELS", ""))

int64: Any
uint32: Any
uint64: Any
if WAY == "numba":
    int64, uint32, uint64 = np.int64, np.uint32, np.uint64
else:
    int64 = uint32 = uint64 = int
WORD64 = uint64(2**64 - 1)


def table(numbers: Sequence[int]) -> Any:
    """Return numbers that kernels look up and never change."""
    return np.array(numbers, np.int64) if WAY == "numba" else list(numbers)


@cache
def _hash_sources(folder: Path) -> str:
    texts = [path.read_bytes() for path in [Path(__file__), *sorted(folder.glob("*.py"))]]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def compile_loop(function: F) -> F:
    """Compile a function of numbers and NumPy arrays with numba; cache the machine code on disk.

    The compiled function runs without Python's global lock.
    """
    compile_it = import_numba().njit(nogil=True, error_model="numpy")
    compiled: Any = compile_it(function)
    # numba recompiles a function when the function's own file has changed. But machine code includes the
    # kernels that it calls, also from other files of the folder: a change in any file must recompile all.
    try:
        compiled.enable_caching()
        file, stamp = compiled._cache._cache_file, _hash_sources(Path(function.__code__.co_filename).parent)
        file._source_stamp = stamp
        # numba writes an index and then a data file, without a lock. With names of their own, data files of
        # another source or another process are never taken for this one's.
        names = f"{stamp[:8]}-{os.getpid()}-{{"
        file._data_name_pattern = file._data_name_pattern.replace("{", names, 1)
    except (RuntimeError, AttributeError):
        compiled = compile_it(function)  # no writable cache, or another numba version: no caching
    result: F = compiled
    return result


def kernel(function: F) -> F:
    """Make a loop that Python code calls fast, in the way that was chosen for this process."""
    if WAY == "numba":
        return compile_loop(function)
    made: Any = native.find(function.__name__) if WAY == "c" else None
    return update_wrapper(made, function) if made else PlainKernel(function)  # type: ignore[return-value]


def helper(function: F) -> F:
    """Make a function that only kernels call fast. The C library has no such functions."""
    return compile_loop(function) if WAY == "numba" else function


class PlainKernel:
    """A kernel as plain Python. It takes arrays as memoryviews, whose items are Python numbers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        update_wrapper(self, function)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*map(_unpack, arguments))


def _unpack(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        return argument.data if argument.ndim == 1 else argument.tolist()
    return argument.item() if isinstance(argument, np.generic) else argument


def is_plain(kernel: Any) -> bool:
    """Return whether a kernel runs as plain Python. Functions of NumPy that do the same are then faster."""
    return isinstance(kernel, PlainKernel)


def is_compiled(function: Any) -> bool:
    """Return whether the machine code of a kernel is cached on disk, so that a call need not compile."""
    try:
        return bool(function._cache._cache_file._load_index())
    except AttributeError:
        return False


def can_cache(function: Any) -> bool:
    """Return whether numba can keep the machine code of a kernel on disk; not if no folder is writable."""
    return hasattr(getattr(function, "_cache", None), "_cache_file")


def _fill(n: Int, value: Int) -> Any:
    return np.full(n, value, np.int64)


def _zeros(n: Int) -> Any:
    return np.zeros(n, np.uint64)


# In kernels: `integers(n, value)` makes n integers with that value, and `zero_words(n)` n words of 64 bits 0.
integers: Callable[[Int, Int], Any]
zero_words: Callable[[Int], Any]
if WAY == "numba":
    integers, zero_words = compile_loop(_fill), compile_loop(_zeros)
else:
    integers, zero_words = (lambda n, value: [value] * n), (lambda n: [0] * n)
