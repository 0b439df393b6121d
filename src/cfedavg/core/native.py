"""The kernels of the C library, called through ctypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def find(name: str) -> Callable[..., Any] | None:
    """Return the C version of the kernel `name`; None if the library is absent or has no such kernel."""
    return None
