"""The form of a model: which arrays are compressed as one vector, and which are sent as plain bytes."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cfedavg.core.arrays import from_bf16, to_bf16
from cfedavg.core.errors import InputError
from cfedavg.core.layout import Layout

Arrays = Mapping[str, NDArray[Any]]

# Running statistics are not compressed: each is already an average, to which no residual may be added.
STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")
LARGEST = 1e36  # the largest value in a model: model copies, and differences of two models, stay finite
# A packed body: the CRC-32 of the rest, the broadcast's length, the broadcast, the uncompressed arrays.
_CHECKSUM, _LENGTH = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class Form:
    """The form of a model: its arrays' names, shapes and dtypes in order, and whether each is compressed.

    >>> form = Form.of({"w": np.ones((2, 2), np.float32), "n": np.array(3)})
    >>> x, uncompressed = form.split({"w": np.full((2, 2), 5, np.float32), "n": np.array(4)})
    >>> x, len(uncompressed)
    (array([5., 5., 5., 5.], dtype=float32), 8)
    >>> form.join(x, uncompressed)["n"]
    array(4)
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    compressed: tuple[bool, ...]

    @classmethod
    def of(cls, arrays: Arrays, uncompressed: Sequence[str] = STATISTICS) -> Form:
        """Return the form of `arrays`.

        Float32 arrays are compressed, except those whose names match a pattern in `uncompressed`.
        """
        chosen = tuple(
            array.dtype == np.float32 and not _matches(name, uncompressed) for name, array in arrays.items()
        )
        if not any(array.size for array, yes in zip(arrays.values(), chosen, strict=True) if yes):
            raise InputError(f"the model must have a float32 array to compress{_suggest(arrays)}")
        layout = _layout_of(arrays)
        return cls(layout.names, layout.shapes, layout.dtypes, chosen)

    @property
    def text(self) -> str:
        return json.dumps([self.names, self.shapes, self.dtypes, self.compressed], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Form:
        names, shapes, dtypes, compressed = json.loads(text)
        return cls(tuple(names), tuple(map(tuple, shapes)), tuple(dtypes), tuple(compressed))

    @cached_property
    def layout(self) -> Layout:
        """The layout of the vector to compress: names, shapes and dtypes of the arrays in it."""
        rows = zip(self.names, self.shapes, self.dtypes, self.compressed, strict=True)
        names, shapes, dtypes = zip(*(row for *row, yes in rows if yes), strict=True)
        return Layout(names, shapes, dtypes)

    @cached_property
    def _apart(self) -> list[tuple[tuple[int, ...], str, bool]]:
        """For each uncompressed array: shape, dtype, and whether it is a float32 running statistic."""
        rows = zip(self.names, self.shapes, self.dtypes, self.compressed, strict=True)
        return [
            (shape, dtype, dtype == "float32" and _matches(name, STATISTICS))
            for name, shape, dtype, yes in rows
            if not yes
        ]

    def count_bytes(self, *, short: bool = False) -> int:
        """Return how many bytes the uncompressed arrays take; with `short`, after `pack(short=True)`."""
        return sum(
            math.prod(shape) * (2 if short and is_statistic else np.dtype(dtype).itemsize)
            for shape, dtype, is_statistic in self._apart
        )

    def difference(self, arrays: Arrays, *, kinds: bool = True) -> str:
        """Return how `arrays` differ from this form, or an empty string if they do not differ.

        Two dtypes of the same kind, such as float32 and float64, count as equal. If `kinds` is false, dtypes
        are not compared.
        """
        return Layout(self.names, self.shapes, self.dtypes).difference(
            _layout_of(arrays), lambda a, b: not kinds or np.dtype(a).kind == np.dtype(b).kind
        )

    def split(self, arrays: Arrays) -> tuple[NDArray[np.float32], bytes]:
        """Convert `arrays` to the dtypes of this form, and split them.

        Return the vector to compress, and the bytes of the uncompressed arrays.
        """
        parts, uncompressed = [], []
        for name, dtype, yes in zip(self.names, self.dtypes, self.compressed, strict=True):
            array = _convert(arrays[name], dtype)
            if yes:
                parts.append(array.reshape(-1))
            else:
                uncompressed.append(array.tobytes())
        return np.concatenate(parts), b"".join(uncompressed)

    def join(self, x: NDArray[np.float32], uncompressed: bytes) -> dict[str, NDArray[Any]]:
        """Undo `split`: return the model's arrays, made from the vector `x` and the bytes `uncompressed`."""
        arrays: dict[str, NDArray[Any]] = {}
        apart, at = self._read(uncompressed), 0
        for name, shape, yes in zip(self.names, self.shapes, self.compressed, strict=True):
            arrays[name] = x[at : at + math.prod(shape)].reshape(shape) if yes else next(apart)
            at += arrays[name].size if yes else 0
        return arrays

    def _read(self, uncompressed: bytes, *, short: bool = False) -> Iterator[NDArray[Any]]:
        """Yield the arrays in the bytes `uncompressed`; with `short`, running statistics are in bf16."""
        at = 0
        for shape, dtype, is_statistic in self._apart:
            is_short = short and is_statistic
            array = np.frombuffer(uncompressed, "int16" if is_short else dtype, math.prod(shape), at)
            at += array.nbytes
            yield (from_bf16(array) if is_short else array).reshape(shape)

    def pack(self, uncompressed: bytes, *, short: bool) -> bytes:
        """Return the uncompressed arrays as bytes to send; with `short`, running statistics are in bf16.

        >>> form = Form.of({"w": np.ones(2, np.float32), "n.running_mean": np.ones(3, np.float32)})
        >>> _, kept = form.split({"w": np.ones(2), "n.running_mean": np.full(3, 1.001)})
        >>> sent = form.pack(kept, short=True)
        >>> len(sent), np.frombuffer(form.unpack(sent, short=True), np.float32).tolist()
        (6, [1.0, 1.0, 1.0])
        """
        if not short:
            return uncompressed
        pairs = zip(self._read(uncompressed), self._apart, strict=True)
        return b"".join((to_bf16(each) if halves else each).tobytes() for each, (_, _, halves) in pairs)

    def unpack(self, sent: bytes, *, short: bool) -> bytes:
        """Undo `pack`: return the bytes in `sent` with running statistics in float32 again."""
        return b"".join(each.tobytes() for each in self._read(sent, short=True)) if short else sent

    def is_finite(self, uncompressed: bytes) -> bool:
        """Return whether the uncompressed arrays hold no NaN or Inf."""
        arrays = self._read(uncompressed)
        return all(bool(np.isfinite(array).all()) for array in arrays if array.dtype.kind == "f")

    def largest(self, uncompressed: bytes, kinds: str = "iuf") -> float:
        """Return the largest absolute value in the uncompressed arrays.

        Only arrays whose dtype kind, such as "f" for floats, is in `kinds` count.
        """
        numbers = [array for array in self._read(uncompressed) if array.dtype.kind in kinds]
        ends = (end for each in numbers for end in (each.max(initial=0), each.min(initial=0)))
        return max((abs(float(end)) for end in ends), default=0.0)

    def average(self, parts: Sequence[bytes], weights: Sequence[float]) -> bytes:
        """Return the weighted mean of the clients' uncompressed arrays; means of integers are rounded."""
        if len(set(parts)) == 1:  # a float64 mean would round large integers
            return parts[0]
        made = b""
        for (_, dtype, _), *arrays in zip(self._apart, *map(self._read, parts), strict=True):
            mean = _mean([np.asarray(array, np.float64) for array in arrays], weights)
            made += _convert(mean if np.dtype(dtype).kind == "f" else np.rint(mean), dtype).tobytes()
        return made

    def find_fault_in_model(self, x: NDArray[np.float32], uncompressed: bytes) -> str:
        """Return why `x` and `uncompressed` cannot be the next model, or an empty string if they can."""
        remedy = "lower the rate, or set max_norm"
        if not np.isfinite(x).all() or not self.is_finite(uncompressed):
            return f"the model made from the replies is NaN or infinite: {remedy}"
        if (largest := float(np.abs(x).max(initial=0))) > LARGEST:
            return f"the model made from the replies holds {largest:.3g}, above {LARGEST:g}: {remedy}"
        return ""


class Body(NamedTuple):
    """The bytes from which a client makes the model.

    `broadcast`: the compressed broadcast, or the vector x if broadcasts are not compressed. `uncompressed`:
    the arrays that are never compressed.
    """

    broadcast: bytes
    uncompressed: bytes

    def pack(self) -> bytes:
        """Return the body as bytes, with a checksum and the broadcast's length in front."""
        data = _LENGTH.pack(len(self.broadcast)) + self.broadcast + self.uncompressed
        return _CHECKSUM.pack(zlib.crc32(data)) + data

    @classmethod
    def unpack(cls, data: bytes) -> Body:
        """Undo `pack`: return the body in `data`; raise InputError if `data` is damaged."""
        at, start = _CHECKSUM.size, _CHECKSUM.size + _LENGTH.size
        if len(data) < start or _CHECKSUM.unpack_from(data)[0] != zlib.crc32(memoryview(data)[at:]):
            raise InputError("the request is damaged: the checksum of its body is wrong")
        end = start + _LENGTH.unpack_from(data, at)[0]
        if end > len(data):
            raise InputError("the request is damaged: its body is shorter than the length that it states")
        return cls(data[start:end], data[end:])


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _layout_of(arrays: Arrays) -> Layout:
    given = arrays.values()
    return Layout(tuple(arrays), tuple(a.shape for a in given), tuple(a.dtype.name for a in given))


def _convert(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return `array` converted to `dtype`.

    If `dtype` is an integer, floats are rounded, because a mean of tens may be 9.999999999. They are also
    clipped to the range of `dtype`: otherwise the float 2^63 would become -2^63 as int64.
    """
    if array.dtype.kind != "f" or np.dtype(dtype).kind not in "iu":
        return np.ascontiguousarray(array, dtype)
    with np.errstate(invalid="ignore"):
        made = np.rint(array).astype(dtype)
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
    """Return a hint for the user of a model without a float32 array to compress."""
    for name, array in arrays.items():
        if array.dtype.kind == "f" and array.dtype != np.float32:
            return f": {name!r} is {array.dtype}; convert it, here and on clients, with astype('float32')"
    return ", whose name matches no pattern in `uncompressed`"
