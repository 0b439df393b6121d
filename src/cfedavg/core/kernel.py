"""Kernels: inner loops that numba compiles to machine code, once, and keeps on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

# numba reads `.numba_config.yaml` in the current folder, where a stranger's may lie. These two settings say
# which cache it reads, and a cache can run any code. A value in the environment wins over the file.
os.environ.setdefault("NUMBA_CACHE_DIR", "")
os.environ.setdefault("NUMBA_CACHE_LOCATOR_CLASSES", "")

import numba

F = TypeVar("F", bound=Callable[..., Any])
Int = Any  # a machine integer whose width and sign the compiler infers


@cache
def _stamp(folder: Path) -> str:
    """Return a hash of all modules in a folder."""
    texts = [path.read_bytes() for path in [Path(__file__), *sorted(folder.glob("*.py"))]]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def kernel(function: F) -> F:
    """Compile a function of numbers and NumPy arrays; other threads run while it does."""
    compile_it = numba.njit(nogil=True, error_model="numpy")
    compiled: Any = compile_it(function)
    # numba recompiles a function when its own file has changed. But kernels call each other across the files
    # of a folder, and the machine code contains what it calls: a change there must recompile all of them.
    try:
        compiled.enable_caching()
        compiled._cache._cache_file._source_stamp = _stamp(Path(function.__code__.co_filename).parent)
    except (RuntimeError, AttributeError):
        compiled = compile_it(function)  # nowhere to write, or another numba: compiled in every process
    result: F = compiled
    return result


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether the machine code of a kernel is on disk, so that it starts at once."""
    compiled: Any = function
    try:
        return bool(compiled._cache._cache_file._load_index())
    except AttributeError:
        return False
