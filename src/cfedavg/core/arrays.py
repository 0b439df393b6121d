"""Array functions for NumPy and torch alike.

Most functions have the same name and arguments in both libraries: `xp = module_of(a)` is NumPy or torch, and
`xp.where`, `xp.concatenate`, `xp.amax` work for both. This module holds the functions that differ. It does
not import torch, so a client without torch can use it; whoever passes a tensor has imported torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from cfedavg.core.kernels import is_plain, kernel

Array = Any  # a numpy.ndarray or a torch.Tensor
TILE = 2**16  # numbers that are computed with at once on a CPU, so that they stay in its cache
ROWS = 4096  # rows of 8 numbers that are squared at once
LARGEST = float(np.finfo(np.float32).max)
LARGEST_BF16 = (2 - 2.0**-7) * 2.0**127


def module_of(array: Array) -> Any:
    """Return the module of an array's library: numpy or torch."""
    return np if isinstance(array, np.ndarray | np.generic) else sys.modules["torch"]


def dtype_of(array: Array) -> str:
    """Return the name of an array's dtype; NumPy and torch have the same names.

    >>> dtype_of(np.zeros(2, np.float32))
    'float32'
    """
    return str(array.dtype).removeprefix("torch.")


def cast(array: Array, dtype: str) -> Array:
    """Return the array in `dtype`, without a copy if it has that dtype already."""
    if module_of(array) is np:
        return array.astype(dtype, copy=False)
    return array.to(getattr(module_of(array), dtype))


def cast_like(array: Array, like: Array) -> Array:
    """Return the array in the dtype of `like`."""
    return cast(array, dtype_of(like))


def place(array: Array, like: Array) -> Array:
    """Return a NumPy array in the library and on the device of `like`; return a tensor as it is."""
    if module_of(like) is np or module_of(array) is not np:
        return array
    return sys.modules["torch"].from_numpy(array).to(like.device)


def to_numpy(array: Array) -> np.ndarray:
    """Return an array as a NumPy array in main memory; copy a GPU's through pinned memory, which is fast."""
    if module_of(array) is np:
        return np.asarray(array)
    if array.is_cuda:
        pinned = module_of(array).empty(array.shape, dtype=array.dtype, pin_memory=True)
        array = pinned.copy_(array)
    found: np.ndarray = array.numpy()
    return found


def zeros(shape: int | tuple[int, ...], like: Array) -> Array:
    """Return an array of zeros with the dtype, library and device of `like`."""
    return np.zeros(shape, like.dtype) if module_of(like) is np else like.new_zeros(shape)


def arange(n: int, like: Array) -> Array:
    """Return the integers 0 .. n-1 as int64, in the library and on the device of `like`."""
    if module_of(like) is np:
        return np.arange(n, dtype=np.int64)
    return sys.modules["torch"].arange(n, device=like.device)


def copy(array: Array) -> Array:
    """Return a copy of an array."""
    return array.copy() if module_of(array) is np else array.clone()


def sqrt(array: Array) -> Array:
    """Return correctly rounded square roots; on a CPU, torch's own `sqrt` rounds some of them wrongly."""
    if module_of(array) is np or array.is_cuda:
        return module_of(array).sqrt(array)
    return place(np.sqrt(array.numpy()), array)


def power_below(array: Array) -> Array:
    """Return the largest power of two that is not above each positive float64 number.

    >>> power_below(np.array([1.0, 7.5, 0.3])).tolist()
    [1.0, 4.0, 0.25]
    """
    xp = module_of(array)
    return (array.view(xp.int64) & (0x7FF << 52)).view(xp.float64)


def sort_rows(array: Array) -> Array:
    """Return the array with its last axis sorted in increasing order."""
    return np.sort(array, -1) if module_of(array) is np else array.sort(-1).values


def kth_largest(array: Array, k: int) -> Array:
    """Return the k-th largest number of each row; the last axis of the result has length 1."""
    if module_of(array) is np:
        at = array.shape[-1] - k
        return np.partition(array, at, -1)[..., at : at + 1]
    return sys.modules["torch"].topk(array, k, sorted=False).values.amin(-1, keepdim=True)


def gather(array: Array, at: Array) -> Array:
    """Take from each row of `array` the entries at the positions that the same row of `at` lists."""
    return np.take_along_axis(array, at, -1) if module_of(array) is np else array.gather(-1, at)


def columns(mask: Array) -> Array:
    """Return the column number of each true entry of a boolean matrix, row after row."""
    return mask.nonzero()[1] if module_of(mask) is np else mask.nonzero()[:, 1]


def repeat(counts: Array) -> Array:
    """Return a sorted 1-D array that contains the integer i exactly counts[i] times.

    >>> repeat(np.array([2, 0, 1])).tolist()
    [0, 0, 2]
    """
    if module_of(counts) is np:
        return np.repeat(np.arange(len(counts)), counts)
    return sys.modules["torch"].repeat_interleave(counts)


def by_tiles(function: Callable[..., Array], *matrices: Array) -> Array:
    """Return `function(*matrices)`, which maps rows to rows; NumPy's in parts that stay in a CPU's cache."""
    n, width = matrices[0].shape[:2]
    step = max(1, TILE // max(1, width))
    if module_of(matrices[0]) is not np or n <= step:
        return function(*matrices)
    parts = [function(*(each[i : i + step] for each in matrices)) for i in range(0, n, step)]
    return np.concatenate(parts)


def extremes(array: Array) -> tuple[float, float]:
    """Return the smallest and the largest number of an array; both are NaN if the array contains NaN."""
    if module_of(array) is np:
        return float(array.min()), float(array.max())
    least, largest = module_of(array).stack(array.aminmax()).tolist()
    return least, largest


def to_single(values: Array) -> Array:
    """Return the values in float32; a value out of range becomes the largest float32 number, not Inf."""
    return cast(values.clip(-LARGEST, LARGEST) if dtype_of(values) == "float64" else values, "float32")


def to_bf16(values: Array) -> Array:
    """Round float32 numbers to bf16 (ties to even); return their bit patterns as int16.

    >>> hex(to_bf16(np.array([1.0], np.float32))[0])
    '0x3f80'
    """
    if module_of(values) is np:
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16).view(np.int16)
    return cast(values, "bfloat16").view(module_of(values).int16)


def to_bf16_at_random(values: Array, draws: Array) -> Array:
    """Round float32 numbers up or down to bf16 so that the mean is kept; return bit patterns as int16.

    `draws` holds a random integer from 0 to 2^16 - 1 for each number. It is added to the 16 bits that bf16
    drops: a carry rounds the number up, with the right probability. A bf16 number stays as it is.
    """
    xp = module_of(values)
    values = values.clip(-LARGEST_BF16, LARGEST_BF16)  # a larger number could be rounded up only to infinity
    pattern = np.ascontiguousarray(values) if xp is np else values.contiguous()
    return cast(pattern.view(xp.int32) + cast(draws, "int32") >> 16, "int16")


def from_bf16(bits: Array) -> Array:
    """Return bf16 numbers as float32; `bits` holds their bit patterns as int16."""
    if module_of(bits) is np:
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits.view(sys.modules["torch"].bfloat16).float()


def round_to_bf16(values: Array) -> Array:
    """Round each value to the nearest bf16 number; keep the dtype. No finite value becomes infinite.

    >>> round_to_bf16(np.array([1.001, 3.0], np.float32)).tolist()
    [1.0, 3.0]
    """
    single = cast(values.clip(-LARGEST_BF16, LARGEST_BF16), "float32")
    return cast_like(from_bf16(to_bf16(single)), values)


def add_in_order(total: Array, indices: Array, values: Array) -> None:
    """Add values[j] to total[indices[j]] for j = 0, 1, ... in this order, which matters if indices repeat."""
    if module_of(total) is np:
        np.add.at(total, indices, values)
    elif total.is_cuda:
        total.index_put_((indices,), values, accumulate=True)  # a stable sort by coordinate: keeps the order
    else:
        total.index_add_(0, indices, values)


def norm2(v: Array) -> float:
    """Return the squared norm |v|^2, summed in float64."""
    if dtype_of(v) in ("float32", "float64") and not getattr(v, "is_cuda", False):
        flat = v.reshape(-1) if module_of(v) is np else v.detach().reshape(-1).numpy()
        return float(_squares_by_rows(flat) if is_plain(_squares) else _squares(flat))
    torch = module_of(v)
    return float(torch.linalg.vector_norm(v, dtype=torch.float64)) ** 2


def norms2(vectors: Iterable[Array]) -> list[float]:
    """Return the squared norm of each vector, or of each row of a matrix; wait for the GPU only once."""
    is_matrix_on_gpu = getattr(vectors, "is_cuda", False)
    vectors = vectors if is_matrix_on_gpu else list(vectors)
    if not is_matrix_on_gpu and not any(getattr(v, "is_cuda", False) for v in vectors):
        return list(map(norm2, vectors))
    torch = sys.modules["torch"]
    take = partial(torch.linalg.vector_norm, dtype=torch.float64)
    norms = take(vectors, dim=-1) if is_matrix_on_gpu else torch.stack(list(map(take, vectors)))
    return [norm**2 for norm in norms.tolist()]


@kernel
def _squares(v: np.ndarray) -> float:
    """Return the sum of squares; unlike a BLAS, give the same bits for any number of threads."""
    sums = np.zeros(8)
    end = len(v) // 8 * 8
    for i in range(0, end, 8):
        for j in range(8):
            sums[j] += np.float64(v[i + j]) * np.float64(v[i + j])
    for i in range(end, len(v)):
        sums[0] += np.float64(v[i]) * np.float64(v[i])
    a, b, c, d, e, f, g, h = sums
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


def _squares_by_rows(v: np.ndarray) -> float:
    """Do what `_squares` does, 8 columns at once: NumPy adds the rows of a matrix one after another."""
    rows, sums = v[: len(v) // 8 * 8].reshape(-1, 8), np.zeros((1, 8))
    for start in range(0, len(rows), ROWS):
        squares = np.square(rows[start : start + ROWS], dtype=np.float64)
        sums = np.add.reduce(np.concatenate([sums, squares]), axis=0, keepdims=True)
    a, b, c, d, e, f, g, h = sums[0].tolist()
    for rest in v[8 * len(rows) :].tolist():
        a += rest * rest
    total: float = ((a + b) + (c + d)) + ((e + f) + (g + h))
    return total
