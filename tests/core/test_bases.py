"""Bases: rotations and factors by hand, their inverses, and the same bits in NumPy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg.compress import decompress, minus, plus, rows_of, values_of
from cfedavg.core.arrays import LARGEST
from cfedavg.core.bases import Factors, Rotation, _add_and_subtract
from cfedavg.core.keys import bits53
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Levels, Payload

QUIET = settings(max_examples=80, derandomize=True, database=None)
NET = Layout(
    ("conv", "bias", "empty", "thin", "scalar"),
    ((6, 2, 3), (5,), (0, 3), (4, 1), ()),
    ("float32",) * 5,
)


def hadamard(n: int) -> np.ndarray:
    """Return the matrix by its definition: entry i, j is -1 to the number of ones in i & j."""
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)])


def signs(key: int, d: int) -> np.ndarray:
    return np.array([1.0 if bits53(key, j) % 2 == 0 else -1.0 for j in range(d)])


def vectors(n: int, d: int, scale: float = 1) -> np.ndarray:
    return scale * np.random.default_rng(d).standard_normal((n, d))


@pytest.mark.parametrize(
    ("d", "count", "cuts"),
    [(8, 8, [8]), (3, 4, [4]), (1, 1, [1]), (16, 16, [8, 8]), (21, 24, [8, 8, 8]), (18, 18, [8, 8, 2])],
)
def test_a_rotation_by_its_definition(d: int, count: int, cuts: list[int]) -> None:
    basis, p = Rotation(np.array([3, -5]), 8), vectors(2, d)
    assert basis.count(d) == count
    for row, key, values in zip(p, [3, -5], basis.rotate(p), strict=True):
        filled, start = np.append(signs(key, d) * row, np.zeros(count - d)), 0
        for n in cuts:
            expected = hadamard(n) @ filled[start : start + n] / np.sqrt(n)
            np.testing.assert_allclose(values[start : start + n], expected, rtol=1e-12, atol=1e-12)
            start += n
        assert start == count


def test_a_rotation_by_hand() -> None:
    s = signs(0, 4)
    values = Rotation(np.array([0]), 4).rotate(s[None] * [[3.0, 5.0, -2.0, 8.0]])
    assert values.tolist() == [[14 / 2, -12 / 2, 2 / 2, 8 / 2]]
    halves = Rotation(np.array([0]), 2).rotate(s[None, :2] * [[3.0, 5.0]])
    assert halves.tolist() == [[8 * 0.5**0.5, -2 * 0.5**0.5]]


@QUIET
@given(st.integers(0, 70), st.integers(0, 3), st.sampled_from([1, 2, 16, 64]))
def test_a_rotation_keeps_norms_and_has_an_inverse(d: int, n: int, block: int) -> None:
    basis, p = Rotation(np.arange(n), block), vectors(n, d)
    values = basis.rotate(p)
    assert values.shape == (n, basis.count(d))
    assert basis.count(d) < d + block
    np.testing.assert_allclose(np.square(values).sum(1), np.square(p).sum(1), rtol=1e-12)
    np.testing.assert_allclose(basis.expand(values, d), p, rtol=0, atol=1e-13)


def test_signs_of_clients_differ() -> None:
    p = np.repeat(vectors(1, 64), 2, axis=0)
    first, second = Rotation(np.array([0, 1]), 64).rotate(p)
    assert not np.allclose(first, second)


@pytest.mark.parametrize("block", [8, 4096, 2**18])  # one row of a tile, many rows, and a row beyond a tile
def test_a_block_of_clients_is_rotated_one_by_one(block: int) -> None:
    keys, p = np.array([4, 5, 6]), vectors(3, 2**17 + 5)
    together = Rotation(keys, block).rotate(p)
    for i in range(3):
        assert np.array_equal(Rotation(keys[i : i + 1], block).rotate(p[i : i + 1])[0], together[i])


@pytest.mark.parametrize("width", [1, 2, 4, 64, 4096])
def test_butterflies_of_tensors_are_those_of_arrays(width: int) -> None:
    rows = vectors(5, width)
    assert np.array_equal(_add_and_subtract(torch.from_numpy(rows)).numpy(), _add_and_subtract(rows))


def test_factors_of_a_layout() -> None:
    """conv is 6 x 6, thin's factors would be longer than itself, and the others are no matrices."""
    assert Factors.of(NET, 2).shapes == ((6, 6), (5, 0), (0, 0), (4, 0), (1, 0))
    assert Factors.of(NET, 2).counts() == [24, 5, 0, 4, 1]
    assert (Factors.of(NET, 2).count(NET.d), Factors.of(NET, 2).d) == (34, NET.d)
    assert Factors.of(NET, 3).shapes[0] == (36, 0)  # 12 * 3 = 36: not shorter
    assert Factors.of(Layout(("w",), ((2, 100),), ("float32",)), 9).ranks() == [0]  # 102 * 2 >= 200
    assert Factors.of(Layout(("w",), ((3, 100),), ("float32",)), 2).ranks() == [2]


def test_factors_by_hand() -> None:
    """P = [[1, 2], [3, 4], [5, 6]], Q = [[7, 8], ..., [13, 14]] and the tensor 9, 9: P Q^T, then 9, 9."""
    basis = Factors(2, ((3, 4), (2, 0)))
    assert basis.counts() == [14, 2]
    values = np.array([[*range(1, 15), 9.0, 9.0]], np.float32)
    expected = [7 + 16, 9 + 20, 11 + 24, 13 + 28, 21 + 32, 27 + 40, 33 + 48, 39 + 56]
    expected += [35 + 48, 45 + 60, 55 + 72, 65 + 84, 9, 9]
    assert basis.expand(values, basis.d).tolist() == [expected]


@pytest.mark.parametrize("scale", [1e-44, 1, 1e38, LARGEST])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("basis", [Rotation(np.array([1, -2]), 16), Factors.of(NET, 2)], ids=["H", "PQ"])
def test_numpy_and_torch_give_the_same_bits(basis: Rotation | Factors, dtype: Any, scale: float) -> None:
    values = vectors(2, basis.count(NET.d)).clip(-1, 1).astype(dtype) * dtype(scale)
    of_numpy = basis.expand(values, NET.d)
    of_torch = basis.map(torch.from_numpy).expand(torch.from_numpy(values), NET.d)
    assert (of_numpy.dtype, of_numpy.shape) == (dtype, (2, NET.d))
    assert of_torch.numpy().tobytes() == of_numpy.tobytes()
    assert np.isfinite(of_numpy).all() or dtype is np.float64
    if isinstance(basis, Rotation):
        p = vectors(2, NET.d).astype(dtype)
        rotated = basis.map(torch.from_numpy).rotate(torch.from_numpy(p))
        assert rotated.numpy().tobytes() == basis.rotate(p).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cuda_gives_the_same_bits(dtype: Any) -> None:
    layout = Layout(("a", "b", "c"), ((60, 5, 9), (70,), (300, 100)), ("float32",) * 3)
    for basis in (Rotation(np.arange(3), 4096), Rotation(np.arange(3), 2048), Factors.of(layout, 4)):
        values, there = vectors(3, basis.count(layout.d)).astype(dtype), basis.map(to_cuda)
        found = there.expand(to_cuda(values), layout.d).cpu().numpy()
        assert found.tobytes() == basis.expand(values, layout.d).tobytes()
        if isinstance(basis, Rotation) and isinstance(there, Rotation):
            p = vectors(3, layout.d).astype(dtype)
            assert there.rotate(to_cuda(p)).cpu().numpy().tobytes() == basis.rotate(p).tobytes()


def to_cuda(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).cuda()


def payload_of(values: Floats | Levels, basis: Rotation | Factors, d: int, n: int) -> Payload:
    return Payload(d, np.arange(n + 1) * basis.count(d), None, values, basis=basis)


def test_a_payload_with_a_basis_is_its_vectors() -> None:
    basis = Factors(1, ((2, 3), (2, 0)))
    payload = payload_of(Floats(np.arange(14, dtype=np.float32), "fp32"), basis, 8, 2)
    first = [0, 0, 0, 2, 3, 4, 5, 6]
    assert decompress(payload)[0].tolist() == first
    assert values_of(payload).tolist() == list(range(14))
    p = vectors(2, 8)
    assert np.array_equal(plus(p, payload), p + rows_of(payload))
    assert np.array_equal(minus(p[0], next(payload.clients())), p[0] - first)
    second = list(payload.clients())[1]
    assert np.array_equal(decompress(second)[0], decompress(payload)[1])
    empty = Payload(8, np.zeros(1, np.int64), None, Floats(np.zeros(0, np.float32), "fp32"), basis=basis)
    assert decompress(empty).shape == (0, 8)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_scales_for_each_level(convert: Any) -> None:
    """Counts 3, 0 and 2 in blocks of 2, with scales 1 and 2, 3 and 4, 5 and 6."""
    levels, scales = np.array([1, -2, 2, -1, 2], np.int8), np.arange(1, 7, dtype=np.float32)
    values = Levels(convert(levels), convert(scales), 2, 2, per_level=True)
    payload = Payload(4, convert(np.array([0, 3, 3, 5])), convert(np.array([0, 1, 3, 1, 2])), values)
    assert values_of(payload).tolist() == [1, -2, 4, -5, 6]
    assert [values_of(one).tolist() for one in payload.clients()] == [[1, -2, 4], [], [-5, 6]]
    assert decompress(payload).tolist() == [[1, -2, 0, 4], [0] * 4, [0, -5, 6, 0]]
