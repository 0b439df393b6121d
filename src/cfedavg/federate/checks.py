"""Checks of numbers that come from a file: a checksum proves that nothing broke, not who wrote it."""

from __future__ import annotations

import json
import reprlib
from typing import Any

import numpy as np

from cfedavg.federate.protocol import Mark, Stamp

_DEEPER = 50  # how much deeper the stack may be when what was read is written again


def whole(name: str, value: Any, least: int, below: int) -> int:
    """Return the value; ValueError unless it is a whole number in this range."""
    if type(value) is not int or not least <= value < below:
        raise ValueError(
            f"{name} must be a whole number from {least} to {below - 1}, got {reprlib.repr(value)}"
        )
    return value


def listed(name: str, value: Any, length: int | None = None) -> list[Any]:
    """Return the value; ValueError unless it is a list, of this length if one is given."""
    if type(value) is not list or (length is not None and len(value) != length):
        of = "" if length is None else f" of {length}"
        raise ValueError(f"{name} must be a list{of}, got {reprlib.repr(value)}")
    return value


def table(name: str, value: Any) -> dict[str, Any]:
    """Return the value; ValueError unless it is a table."""
    if type(value) is not dict:
        raise ValueError(f"{name} must be a table, got {reprlib.repr(value)}")
    return value


def text(name: str, value: Any) -> str:
    """Return the value; ValueError unless it is a text."""
    if type(value) is not str:
        raise ValueError(f"{name} must be a text, got {reprlib.repr(value)}")
    return value


def stamp(name: str, value: Any, least: int = 1) -> Stamp:
    """Return a stamp that was stored as a list; the wire has 32 bits for each of its numbers."""
    generation, number = listed(name, value, 2)
    return Stamp(whole(name, generation, least, 2**32), whole(name, number, least, 2**32))


def mark(name: str, value: Any, before: Stamp) -> Mark:
    """Return the mark of an answer that was given before this stamp."""
    given, incarnation, digest = listed(name, value, 3)
    found = Mark(stamp(name, given), whole(name, incarnation, 0, 2**63), whole(name, digest, 0, 2**64))
    if found.stamp >= before:
        raise ValueError(f"{name} must be before {list(before)}, got {list(found.stamp)}")
    return found


def vector(name: str, array: np.ndarray, dtype: str, length: int | None = None) -> np.ndarray:
    """Return the array; ValueError unless it is a vector of this dtype, and of this length if given."""
    if array.dtype != dtype or array.ndim != 1 or length not in (None, len(array)):
        of = "" if length is None else f" {length}"
        raise ValueError(f"{name} must be a vector of{of} {dtype}, got {list(array.shape)} of {array.dtype}")
    return array


def writable(name: str, value: Any) -> None:
    """Raise ValueError if the value, which could just be read, is too deep to be written again."""
    for _ in range(_DEEPER):
        value = [value]
    try:
        json.dumps(value)
    except RecursionError:
        raise ValueError(f"{name} has too many lists in lists") from None
