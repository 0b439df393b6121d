"""Payload: one client of a block, counts, NumPy arrays."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch

from cfedavg.core.bases import Factors, Rotation
from cfedavg.core.payload import Floats, Levels, Mask, Payload, blocks


def parts(payload: Payload) -> dict[str, Any]:
    """Every array and number of a payload by name; arrays as (dtype, shape, bytes), so -0.0 is not 0.0."""
    payload = payload.numpy()
    found: dict[str, Any] = {"offsets": payload.offsets, "indices": payload.indices, "d": payload.d}
    found |= {f"values.{k}": v for k, v in vars(payload.values).items()} | {"type": type(payload.values)}
    found |= {f"mask.{k}": v for k, v in vars(payload.mask).items()} if payload.mask else {"mask": None}
    found |= {f"basis.{k}": v for k, v in vars(payload.basis).items()} if payload.basis else {}
    found["basis"] = type(payload.basis)
    return {k: (v.dtype, v.shape, v.tobytes()) if hasattr(v, "tobytes") else v for k, v in found.items()}


def assert_same(a: Payload, b: Payload) -> None:
    """Bit for bit, types included."""
    a_parts, b_parts = parts(a), parts(b)
    different = [name for name in a_parts | b_parts if a_parts.get(name) != b_parts.get(name)]
    assert not different


def array(values: list[float], dtype: str, library: str) -> Any:
    made = np.array(values, dtype=dtype)
    return torch.from_numpy(made) if library == "torch" else made


def floats(library: str) -> Payload:
    """Three clients of d = 6, of which the second sends nothing."""
    return Payload(
        6,
        array([0, 2, 2, 5], "int64", library),
        array([1, 4, 0, 2, 5], "int64", library),
        Floats(array([1.5, -0.0, 3, 4, 5], "float32", library), "fp32"),
        Mask(array([7, -8, 9], "int64", library), 2**52),
    )


def levels(library: str, block: int) -> Payload:
    """Counts 3, 0 and 2; with a block of 2 that is 2 + 0 + 1 scales, with one a client 1 + 0 + 1."""
    scales = [0.5, 0.25, 2.0] if block else [0.5, 2.0]
    return Payload(
        6,
        array([0, 3, 3, 5], "int64", library),
        array([1, 2, 4, 0, 5], "int64", library),
        Levels(array([1, -2, 3, 4, -5], "int8", library), array(scales, "float32", library), block, 5),
    )


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_clients_of_floats(library: str) -> None:
    payload = floats(library)
    assert len(payload) == 3
    assert payload.counts() == [2, 0, 3]
    first, second, third = payload.clients()
    assert [one.counts() for one in (first, second, third)] == [[2], [0], [3]]
    for one, key, indices, values in (
        (first, 7, [1, 4], [1.5, -0.0]),
        (second, -8, [], []),
        (third, 9, [0, 2, 5], [3, 4, 5]),
    ):
        expected = Payload(
            6,
            array([0, len(indices)], "int64", library),
            array(indices, "int64", library),
            Floats(array(values, "float32", library), "fp32"),
            Mask(array([key], "int64", library), 2**52),
        )
        assert_same(one, expected)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("block", "scales"), [(2, ([0.5, 0.25], [], [2.0])), (0, ([0.5], [], [2.0]))])
def test_clients_of_levels_take_their_own_scales(
    library: str, block: int, scales: tuple[list[float], ...]
) -> None:
    clients = list(levels(library, block).clients())
    assert [one.values.levels.tolist() for one in clients] == [[1, -2, 3], [], [4, -5]]  # type: ignore[union-attr]
    assert [one.values.scales.tolist() for one in clients] == list(scales)  # type: ignore[union-attr]
    assert [one.values.block for one in clients] == [block] * 3  # type: ignore[union-attr]
    assert [one.values.top for one in clients] == [5] * 3  # type: ignore[union-attr]
    assert all(one.mask is None for one in clients)
    for one in clients:
        assert_same(next(one.clients()), one)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_dense_clients_carry_no_indices(library: str) -> None:
    values = Floats(array([1, 2, 3, 4], "int16", library), "bf16")
    payload = Payload(2, array([0, 2, 4], "int64", library), None, values)
    first, second = payload.clients()
    assert first.indices is None
    assert second.values.data.tolist() == [3, 4]  # type: ignore[union-attr]
    assert second.values.dtype == "bf16"  # type: ignore[union-attr]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_clients_take_the_scales_of_their_own_levels(library: str) -> None:
    """Counts 3, 0 and 2 in blocks of 2: 2 + 0 + 1 blocks, with 2 scales each."""
    made = levels(library, 2)
    assert isinstance(made.values, Levels)
    scales = array([1, 2, 3, 4, 5, 6], "float32", library)
    values = replace(made.values, levels=made.values.levels // 3, scales=scales, top=2, per_level=True)
    clients = list(replace(made, values=values).clients())
    assert [one.values.scales.tolist() for one in clients] == [[1, 2, 3, 4], [], [5, 6]]  # type: ignore[union-attr]
    assert all(one.values.per_level for one in clients)  # type: ignore[union-attr]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_clients_take_their_own_keys_of_a_rotation(library: str) -> None:
    values = Floats(array([1, 2, 3, 4], "float32", library), "fp32")
    basis = Rotation(array([7, -8], "int64", library), 4)
    payload = Payload(2, array([0, 2, 4], "int64", library), None, values, basis=basis)
    first, second = payload.clients()
    for one, key, sent in ((first, 7, [1, 2]), (second, -8, [3, 4])):
        basis = Rotation(array([key], "int64", library), 4)
        floats = Floats(array(sent, "float32", library), "fp32")
        assert_same(one, Payload(2, array([0, 2], "int64", library), None, floats, basis=basis))
    assert isinstance(payload.numpy().basis.keys, np.ndarray)  # type: ignore[union-attr]
    factors = Factors(1, ((2, 0),))
    assert all(one.basis == factors for one in replace(payload, basis=factors).numpy().clients())


@pytest.mark.parametrize(
    "make", [floats, lambda library: levels(library, 2), lambda library: levels(library, 0)]
)
def test_numpy_keeps_every_bit(make: Any) -> None:
    converted = make("torch").numpy()
    assert_same(converted, make("numpy"))
    for one in (converted.offsets, converted.indices, *vars(converted.values).values()):
        assert not isinstance(one, torch.Tensor)
    assert_same(converted.numpy(), converted)


def test_a_block_of_no_clients() -> None:
    payload = Payload(4, np.zeros(1, np.int64), None, Floats(np.zeros(0, np.float32), "fp32"))
    assert len(payload) == 0
    assert payload.counts() == []
    assert list(payload.clients()) == []


def test_a_payload_cannot_be_changed() -> None:
    payload = floats("numpy")
    with pytest.raises(FrozenInstanceError):
        payload.d = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("k", "block", "expected"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (1000, 0, 1),
        (0, 4, 0),
        (1, 4, 1),
        (4, 4, 1),
        (5, 4, 2),
        (8, 4, 2),
        (9, 4, 3),
        (3, 1, 3),
    ],
)
def test_blocks(k: int, block: int, expected: int) -> None:
    assert blocks(k, block) == expected
