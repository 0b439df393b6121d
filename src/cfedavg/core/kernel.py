"""Kernels: inner loops that numba compiles to machine code. The machine code is cached on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

# numba reads `.numba_config.yaml` in the current folder; the file may be somebody else's. These two settings
# choose the cache, and code in a cache is run. A value in the environment wins over the file.
os.environ.setdefault("NUMBA_CACHE_DIR", "")
os.environ.setdefault("NUMBA_CACHE_LOCATOR_CLASSES", "")

import numba

F = TypeVar("F", bound=Callable[..., Any])
Int = Any  # a machine integer whose width and sign the compiler infers


@cache
def _stamp(folder: Path) -> str:
    """Return a hash of the source of all modules in a folder, and of this module."""
    texts = [path.read_bytes() for path in [Path(__file__), *sorted(folder.glob("*.py"))]]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def kernel(function: F) -> F:
    """Return the compiled version of a function of numbers and NumPy arrays; it runs without the GIL."""
    compile_it = numba.njit(nogil=True, error_model="numpy")
    compiled: Any = compile_it(function)
    # numba recompiles a function when the function's own file has changed. But machine code includes the
    # kernels that it calls, also from other files of the folder: a change in any file must recompile all.
    try:
        compiled.enable_caching()
        compiled._cache._cache_file._source_stamp = _stamp(Path(function.__code__.co_filename).parent)
    except (RuntimeError, AttributeError):
        compiled = compile_it(function)  # no writable cache, or another numba version: no caching
    result: F = compiled
    return result


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether the machine code of a kernel is cached on disk, so that a call need not compile."""
    compiled: Any = function
    try:
        return bool(compiled._cache._cache_file._load_index())
    except AttributeError:
        return False
