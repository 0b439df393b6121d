"""A model's arrays, of any framework, as one vector that is compressed and bytes that travel whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cfedavg.core.arrays import from_bf16, to_bf16
from cfedavg.core.errors import InputError
from cfedavg.core.layout import Layout

Arrays = Mapping[str, NDArray[Any]]

# Running statistics: each is an average already. What of them is left unsent would add up, round by round.
STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")


@dataclass(frozen=True)
class Form:
    """Names, shapes and dtypes in order, and which of the arrays are compressed.

    >>> form = Form.of({"w": np.ones((2, 2), np.float32), "n": np.array(3)})
    >>> x, whole = form.split({"w": np.full((2, 2), 5, np.float32), "n": np.array(4)})
    >>> x, len(whole)
    (array([5., 5., 5., 5.], dtype=float32), 8)
    >>> form.join(x, whole)["n"]
    array(4)
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    compressed: tuple[bool, ...]

    @classmethod
    def of(cls, arrays: Arrays, whole: Sequence[str] = STATISTICS) -> Form:
        """Arrays of float32 are compressed, but for those whose names are like one of `whole`."""
        chosen = [
            array.dtype == np.float32 and not any(fnmatchcase(name, pattern) for pattern in whole)
            for name, array in arrays.items()
        ]
        if not any(array.size for array, yes in zip(arrays.values(), chosen, strict=True) if yes):
            raise InputError(f"the model has no float32 array to compress{_instead(arrays)}")
        return cls(
            tuple(arrays),
            tuple(array.shape for array in arrays.values()),
            tuple(array.dtype.name for array in arrays.values()),
            tuple(chosen),
        )

    @property
    def text(self) -> str:
        return json.dumps([self.names, self.shapes, self.dtypes, self.compressed], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Form:
        names, shapes, dtypes, compressed = json.loads(text)
        return cls(tuple(names), tuple(map(tuple, shapes)), tuple(dtypes), tuple(compressed))

    @cached_property
    def layout(self) -> Layout:
        """Of the vector that is compressed."""
        rows = [row for row, yes in zip(self._rows(), self.compressed, strict=True) if yes]
        names, shapes, dtypes = zip(*rows, strict=True)
        return Layout(names, shapes, dtypes)

    @cached_property
    def whole_bytes(self) -> int:
        """The length of what travels whole."""
        return sum(size for size, _ in self._whole_parts())

    @cached_property
    def short_bytes(self) -> int:
        """The length of what travels whole, with running statistics in bf16."""
        return sum(size // 2 if is_statistic else size for size, is_statistic in self._whole_parts())

    def _rows(self) -> Iterable[tuple[str, tuple[int, ...], str]]:
        return zip(self.names, self.shapes, self.dtypes, strict=True)

    def difference(self, arrays: Arrays, *, kinds: bool = True) -> str:
        """In what these arrays are not of this form; empty if they are. Floats of another width pass.

        Without `kinds`, so does everything that is a mean of such arrays.
        """
        given = arrays.values()
        found = Layout(tuple(arrays), tuple(a.shape for a in given), tuple(a.dtype.name for a in given))
        return Layout(self.names, self.shapes, self.dtypes).difference(
            found, lambda a, b: not kinds or np.dtype(a).kind == np.dtype(b).kind
        )

    def split(self, arrays: Arrays) -> tuple[NDArray[np.float32], bytes]:
        """The vector and the bytes; arrays in another precision are brought back to the model's own."""
        parts, whole = [], []
        for (name, _, dtype), yes in zip(self._rows(), self.compressed, strict=True):
            given = arrays[name]
            if given.dtype.kind == "f" and np.dtype(dtype).kind in "iu":
                given = _rounded(given, dtype)  # the mean of seven times 10 may come as 9.999999999999998
            array = np.ascontiguousarray(given, dtype)
            if yes:
                parts.append(array.reshape(-1))
            else:
                whole.append(array.tobytes())
        return np.concatenate(parts), b"".join(whole)

    def join(self, x: NDArray[np.float32], whole: bytes) -> dict[str, NDArray[Any]]:
        """The arrays again."""
        arrays: dict[str, NDArray[Any]] = {}
        at = byte = 0
        for (name, shape, dtype), yes in zip(self._rows(), self.compressed, strict=True):
            size = math.prod(shape)
            if yes:
                arrays[name] = x[at : at + size].reshape(shape)
                at += size
            else:
                arrays[name] = np.frombuffer(whole, dtype, size, byte).reshape(shape)
                byte += arrays[name].nbytes
        return arrays

    def shorten(self, whole: bytes) -> bytes:
        """Return what travels whole with its running statistics in bf16; `lengthen` makes it long again.

        >>> form = Form.of({"w": np.ones(2, np.float32), "n.running_mean": np.ones(3, np.float32)})
        >>> _, whole = form.split({"w": np.ones(2), "n.running_mean": np.full(3, 1.001)})
        >>> len(form.shorten(whole)), np.frombuffer(form.lengthen(form.shorten(whole)), np.float32).tolist()
        (6, [1.0, 1.0, 1.0])
        """
        parts, at = [], 0
        for size, is_statistic in self._whole_parts():
            part, at = whole[at : at + size], at + size
            rounded = to_bf16(np.frombuffer(part, np.float32)).tobytes() if is_statistic else part
            parts.append(rounded)
        return b"".join(parts)

    def lengthen(self, short: bytes) -> bytes:
        """Return what travels whole, from what `shorten` made of it."""
        parts, at = [], 0
        for size, is_statistic in self._whole_parts():
            length = size // 2 if is_statistic else size
            part, at = short[at : at + length], at + length
            parts.append(from_bf16(np.frombuffer(part, np.int16)).tobytes() if is_statistic else part)
        return b"".join(parts)

    def _whole_parts(self) -> Iterator[tuple[int, bool]]:
        """Yield the bytes of each array that travels whole, and whether it is a running statistic."""
        for (name, shape, dtype), compressed in zip(self._rows(), self.compressed, strict=True):
            if not compressed:
                known = any(fnmatchcase(name, pattern) for pattern in STATISTICS)
                yield math.prod(shape) * np.dtype(dtype).itemsize, known and dtype == "float32"

    def is_finite(self, whole: bytes) -> bool:
        """Whether what travels whole holds no NaN or Inf."""
        arrays = self.join(np.zeros(self.layout.d, np.float32), whole).values()
        return all(bool(np.isfinite(array).all()) for array in arrays if array.dtype.kind == "f")

    def largest(self, whole: bytes, kinds: str = "iuf") -> float:
        """Return the largest number of these kinds in what travels whole, whatever its sign."""
        arrays = self.join(np.zeros(self.layout.d, np.float32), whole).values()
        numbers = [array for array in arrays if array.dtype.kind in kinds]
        ends = (end for each in numbers for end in (each.max(initial=0), each.min(initial=0)))
        return max((abs(float(end)) for end in ends), default=0.0)

    def mean_whole(self, parts: Sequence[bytes], weights: Sequence[float]) -> bytes:
        """The weighted mean of what travels whole; whole numbers are rounded to whole numbers."""
        if len(set(parts)) == 1:  # large whole numbers would be rounded
            return parts[0]
        x = np.zeros(self.layout.d, np.float32)
        each = [self.join(x, part) for part in parts]
        made = b""
        for (name, _, dtype), yes in zip(self._rows(), self.compressed, strict=True):
            if not yes:
                mean = _mean([np.asarray(arrays[name], np.float64) for arrays in each], weights)
                made += (
                    mean.astype(dtype) if np.dtype(dtype).kind == "f" else _rounded(mean, dtype)
                ).tobytes()
        return made


def _rounded(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return whole numbers; 2^63, to which a float rounds the largest of an int64, would become -2^63."""
    with np.errstate(invalid="ignore"):
        made: NDArray[Any] = np.rint(array).astype(dtype)
    if np.dtype(dtype).kind not in "iu":
        return made
    limits = np.iinfo(dtype)
    made = np.where(array >= limits.max, limits.max, made)
    return np.where(array <= limits.min, limits.min, made).astype(dtype)


def _mean(arrays: Sequence[NDArray[np.float64]], weights: Sequence[float]) -> NDArray[np.float64]:
    """Weighted; where the sum is too large for a number, it is made of shares, which add up to less."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean: NDArray[np.float64] = np.average(arrays, 0, weights)
    if np.isfinite(mean).all():
        return mean
    total = sum(weights)
    shares = [array * (weight / total) for array, weight in zip(arrays, weights, strict=True)]
    return np.asarray(np.sum(shares, 0))


def _instead(arrays: Arrays) -> str:
    """What there is, for whoever trains in NumPy, whose numbers are float64 unless one says otherwise."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and array.dtype != np.float32:
            return f": {name!r} is {array.dtype}; convert it, and what clients send, with astype('float32')"
    return ", or all are named in `whole`"
