"""The form of a model, which splits the arrays into a vector to compress and bytes to send uncompressed."""

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

# Running statistics are not compressed: each is already an average, and unsent rests would add up.
STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")


@dataclass(frozen=True)
class Form:
    """The form of a model: its arrays' names, shapes and dtypes in order, and whether each is compressed.

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
        """Return the form of `arrays`: compress float32 arrays whose names match no pattern in `whole`."""
        chosen = [
            array.dtype == np.float32 and not any(fnmatchcase(name, pattern) for pattern in whole)
            for name, array in arrays.items()
        ]
        if not any(array.size for array, yes in zip(arrays.values(), chosen, strict=True) if yes):
            raise InputError(f"the model must have a float32 array to compress{_suggest(arrays)}")
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
        """The layout of the vector to compress: names, shapes and dtypes of its arrays."""
        names, shapes, dtypes = zip(*(row for *row, yes in self._rows() if yes), strict=True)
        return Layout(names, shapes, dtypes)

    @cached_property
    def whole_bytes(self) -> int:
        """The number of bytes of all uncompressed arrays."""
        return sum(size for size, _ in self._whole_parts())

    @cached_property
    def short_bytes(self) -> int:
        """The number of bytes of all uncompressed arrays, with float32 running statistics in bf16."""
        return sum(size // 2 if is_statistic else size for size, is_statistic in self._whole_parts())

    def _rows(self) -> Iterable[tuple[str, tuple[int, ...], str, bool]]:
        return zip(self.names, self.shapes, self.dtypes, self.compressed, strict=True)

    def difference(self, arrays: Arrays, *, kinds: bool = True) -> str:
        """Return how `arrays` differ from this form, or an empty string if they do not differ.

        Dtypes of one kind, such as float32 and float64, are equal. If `kinds` is false, all dtypes are equal.
        """
        given = arrays.values()
        found = Layout(tuple(arrays), tuple(a.shape for a in given), tuple(a.dtype.name for a in given))
        return Layout(self.names, self.shapes, self.dtypes).difference(
            found, lambda a, b: not kinds or np.dtype(a).kind == np.dtype(b).kind
        )

    def split(self, arrays: Arrays) -> tuple[NDArray[np.float32], bytes]:
        """Return the vector to compress and the bytes of the other arrays, in the dtypes of this form."""
        parts, whole = [], []
        for name, _, dtype, yes in self._rows():
            given = arrays[name]
            if given.dtype.kind == "f" and np.dtype(dtype).kind in "iu":
                given = _round(given, dtype)  # the mean of seven tens may be 9.999999999999998
            array = np.ascontiguousarray(given, dtype)
            if yes:
                parts.append(array.reshape(-1))
            else:
                whole.append(array.tobytes())
        return np.concatenate(parts), b"".join(whole)

    def join(self, x: NDArray[np.float32], whole: bytes) -> dict[str, NDArray[Any]]:
        """Return the model's arrays from the vector `x` and the bytes `whole` that `split` made."""
        arrays: dict[str, NDArray[Any]] = {}
        at = byte = 0
        for name, shape, dtype, yes in self._rows():
            size = math.prod(shape)
            if yes:
                arrays[name] = x[at : at + size].reshape(shape)
                at += size
            else:
                arrays[name] = np.frombuffer(whole, dtype, size, byte).reshape(shape)
                byte += arrays[name].nbytes
        return arrays

    def shorten(self, whole: bytes) -> bytes:
        """Return the bytes `whole` with running statistics rounded to bf16; `lengthen` restores the dtypes.

        >>> form = Form.of({"w": np.ones(2, np.float32), "n.running_mean": np.ones(3, np.float32)})
        >>> _, whole = form.split({"w": np.ones(2), "n.running_mean": np.full(3, 1.001)})
        >>> len(form.shorten(whole)), np.frombuffer(form.lengthen(form.shorten(whole)), np.float32).tolist()
        (6, [1.0, 1.0, 1.0])
        """
        parts, at = [], 0
        for size, is_statistic in self._whole_parts():
            part, at = whole[at : at + size], at + size
            parts.append(to_bf16(np.frombuffer(part, np.float32)).tobytes() if is_statistic else part)
        return b"".join(parts)

    def lengthen(self, short: bytes) -> bytes:
        """Return the bytes that `shorten` made, with running statistics in float32 again."""
        parts, at = [], 0
        for size, is_statistic in self._whole_parts():
            length = size // 2 if is_statistic else size
            part, at = short[at : at + length], at + length
            parts.append(from_bf16(np.frombuffer(part, np.int16)).tobytes() if is_statistic else part)
        return b"".join(parts)

    def _whole_parts(self) -> Iterator[tuple[int, bool]]:
        """Yield each uncompressed array's number of bytes, and whether it is a float32 running statistic."""
        for name, shape, dtype, yes in self._rows():
            if not yes:
                known = any(fnmatchcase(name, pattern) for pattern in STATISTICS)
                yield math.prod(shape) * np.dtype(dtype).itemsize, known and dtype == "float32"

    def _whole_arrays(self, whole: bytes) -> dict[str, NDArray[Any]]:
        arrays = self.join(np.zeros(self.layout.d, np.float32), whole)
        return {name: arrays[name] for name, _, _, yes in self._rows() if not yes}

    def is_finite(self, whole: bytes) -> bool:
        """Return whether the uncompressed arrays in `whole` hold no NaN or Inf."""
        arrays = self._whole_arrays(whole).values()
        return all(bool(np.isfinite(array).all()) for array in arrays if array.dtype.kind == "f")

    def largest(self, whole: bytes, kinds: str = "iuf") -> float:
        """Return the largest absolute value in the uncompressed arrays whose dtype kinds are in `kinds`."""
        numbers = [array for array in self._whole_arrays(whole).values() if array.dtype.kind in kinds]
        ends = (end for each in numbers for end in (each.max(initial=0), each.min(initial=0)))
        return max((abs(float(end)) for end in ends), default=0.0)

    def mean_whole(self, parts: Sequence[bytes], weights: Sequence[float]) -> bytes:
        """Return the weighted mean of the clients' uncompressed arrays; means of integers are rounded."""
        if len(set(parts)) == 1:  # a float64 mean would round large integers
            return parts[0]
        clients, made = [self._whole_arrays(part) for part in parts], b""
        for name, array in clients[0].items():
            mean = _mean([np.asarray(arrays[name], np.float64) for arrays in clients], weights)
            is_float = array.dtype.kind == "f"
            made += (mean.astype(array.dtype) if is_float else _round(mean, array.dtype.name)).tobytes()
        return made


def _round(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return `array` rounded to `dtype`. Integers are clipped: the float 2^63 as int64 would become -2^63."""
    with np.errstate(invalid="ignore"):
        made: NDArray[Any] = np.rint(array).astype(dtype)
    if np.dtype(dtype).kind not in "iu":
        return made
    limits = np.iinfo(dtype)
    made = np.where(array >= limits.max, limits.max, made)
    return np.where(array <= limits.min, limits.min, made).astype(dtype)


def _mean(arrays: Sequence[NDArray[np.float64]], weights: Sequence[float]) -> NDArray[np.float64]:
    """Return the weighted mean; if the weighted sum overflows, divide the weights by their total first."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean: NDArray[np.float64] = np.average(arrays, 0, weights)
    if np.isfinite(mean).all():
        return mean
    total = sum(weights)
    shares = [array * (weight / total) for array, weight in zip(arrays, weights, strict=True)]
    return np.asarray(np.sum(shares, 0))


def _suggest(arrays: Arrays) -> str:
    """Return a hint if no array is float32: the arrays may be float64, NumPy's default."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and array.dtype != np.float32:
            return f": {name!r} is {array.dtype}; convert it, here and on clients, with astype('float32')"
    return ", whose name matches no pattern in `whole`"
