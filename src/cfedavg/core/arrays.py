"""One set of array functions for NumPy and torch.

Most functions have the same name and arguments in both libraries: `xp = module_of(a)` is NumPy or torch, and
`xp.where`, `xp.concatenate`, `xp.amax` work for both. This module holds the functions that differ. The module
does not import torch (whoever passes a tensor has imported torch), so a client without torch can use it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from cfedavg.core.kernel import kernel

Array = Any  # a numpy.ndarray or a torch.Tensor
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
    return array.to(getattr(sys.modules["torch"], dtype))


def cast_like(array: Array, like: Array) -> Array:
    """Return the array in the dtype of `like`."""
    return cast(array, dtype_of(like))


def place(array: np.ndarray, like: Array) -> Array:
    """Return a NumPy array in the library and on the device of `like`."""
    if module_of(like) is np:
        return array
    return sys.modules["torch"].from_numpy(array).to(like.device)


def zeros(shape: int | tuple[int, ...], like: Array) -> Array:
    """Return zeros of the dtype, library and device of `like`."""
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
    """Return correctly rounded square roots; those of torch on a CPU are not."""
    if module_of(array) is np or array.is_cuda:
        return module_of(array).sqrt(array)
    return place(np.sqrt(array.numpy()), array)


def sort_rows(array: Array) -> Array:
    """Return the array with its last axis sorted in increasing order."""
    return np.sort(array, -1) if module_of(array) is np else array.sort(-1).values


def kth_largest(array: Array, k: int) -> Array:
    """Return the k-th largest number of each row, shape (n, 1)."""
    if module_of(array) is np:
        at = array.shape[-1] - k
        return np.partition(array, at, -1)[..., at : at + 1]
    return sys.modules["torch"].topk(array, k, sorted=False).values.amin(-1, keepdim=True)


def gather(array: Array, at: Array) -> Array:
    """Return, for each row, the entries of `array` at the positions that the same row of `at` lists."""
    return np.take_along_axis(array, at, -1) if module_of(array) is np else array.gather(-1, at)


def columns(mask: Array) -> Array:
    """Return the column of each true entry of a boolean matrix, row after row."""
    return mask.nonzero()[1] if module_of(mask) is np else mask.nonzero()[:, 1]


def repeat(counts: Array) -> Array:
    """Return a 1-D array that holds each i counts[i] times, in increasing order.

    >>> repeat(np.array([2, 0, 1])).tolist()
    [0, 0, 2]
    """
    if module_of(counts) is np:
        return np.repeat(np.arange(len(counts)), counts)
    return sys.modules["torch"].repeat_interleave(counts)


def extremes(array: Array) -> tuple[float, float]:
    """Return the least and the largest number of an array; both are NaN if the array holds NaN."""
    if module_of(array) is np:
        return float(array.min()), float(array.max())
    torch = sys.modules["torch"]
    least, largest = torch.stack(torch.aminmax(array)).tolist()
    return least, largest


def to_bf16(values: Array) -> Array:
    """Return float32 numbers as bf16, correctly rounded (ties to even); int16 holds the bits.

    >>> hex(to_bf16(np.array([1.0], np.float32))[0])
    '0x3f80'
    """
    if module_of(values) is np:
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16).view(np.int16)
    torch = sys.modules["torch"]
    return values.to(torch.bfloat16).view(torch.int16)


def from_bf16(bits: Array) -> Array:
    """Return as float32 the bf16 numbers whose bits an int16 array holds."""
    if module_of(bits) is np:
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits.view(sys.modules["torch"].bfloat16).float()


def round_to_bf16(values: Array) -> Array:
    """Return the values rounded to bf16 numbers, in their own dtype; no finite value becomes infinite.

    >>> round_to_bf16(np.array([1.001, 3.0], np.float32)).tolist()
    [1.0, 3.0]
    """
    single = cast(values.clip(-LARGEST_BF16, LARGEST_BF16), "float32")
    return cast_like(from_bf16(to_bf16(single)), values)


def add_in_order(total: Array, indices: Array, values: Array) -> None:
    """Add values[j] to total[indices[j]], in the order of j if a coordinate occurs more than once."""
    if module_of(total) is np:
        np.add.at(total, indices, values)
    elif total.is_cuda:
        total.index_put_((indices,), values, accumulate=True)  # a stable sort by coordinate: keeps the order
    else:
        total.index_add_(0, indices, values)


def norm2(v: Array) -> float:
    """Return |v|^2, summed in float64."""
    if dtype_of(v) in ("float32", "float64") and not getattr(v, "is_cuda", False):
        flat = v.reshape(-1) if module_of(v) is np else v.detach().reshape(-1).numpy()
        return float(_squares(flat))
    torch = sys.modules["torch"]
    return float(torch.linalg.vector_norm(v, dtype=torch.float64)) ** 2


def norms2(vectors: Iterable[Array]) -> list[float]:
    """Return |v|^2 of each vector; a GPU is waited for only once."""
    vectors = list(vectors)
    if not any(getattr(v, "is_cuda", False) for v in vectors):
        return list(map(norm2, vectors))
    torch = sys.modules["torch"]
    norms = [torch.linalg.vector_norm(v, dtype=torch.float64) for v in vectors]
    return [norm**2 for norm in torch.stack(norms).tolist()]


def rows_norms2(block: Array) -> list[float]:
    """Return |v|^2 of each row v of a block, a matrix with a row for each client."""
    if not getattr(block, "is_cuda", False):
        return list(map(norm2, block))
    torch = sys.modules["torch"]
    return [norm**2 for norm in torch.linalg.vector_norm(block, dim=-1, dtype=torch.float64).tolist()]


@kernel
def _squares(v: np.ndarray) -> float:
    """Return the sum of squares in eight partial sums: fast, and the same for any number of threads."""
    a = b = c = d = e = f = g = h = 0.0
    end = len(v) // 8 * 8
    for i in range(0, end, 8):
        a += np.float64(v[i]) * np.float64(v[i])
        b += np.float64(v[i + 1]) * np.float64(v[i + 1])
        c += np.float64(v[i + 2]) * np.float64(v[i + 2])
        d += np.float64(v[i + 3]) * np.float64(v[i + 3])
        e += np.float64(v[i + 4]) * np.float64(v[i + 4])
        f += np.float64(v[i + 5]) * np.float64(v[i + 5])
        g += np.float64(v[i + 6]) * np.float64(v[i + 6])
        h += np.float64(v[i + 7]) * np.float64(v[i + 7])
    for i in range(end, len(v)):
        a += np.float64(v[i]) * np.float64(v[i])
    return ((a + b) + (c + d)) + ((e + f) + (g + h))
