"""Keyed randomness: the published splitmix64, the same bits in every library, in any order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cfedavg.core.keys import Purpose, bits, bits53, derive, key, permutation, signed, uniform

# The first outputs of splitmix64 from state 0, as its authors publish them.
SPLITMIX64 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)

# Frozen: a change of the generator changes every mask and every batch, and so the format.
GOLDEN = {
    (0, 0, 0, Purpose.INIT): 0x2130748AAAC80268,
    (0, 0, 0, Purpose.SELECT): 0x698DFBA9F1FC1B53,
    (1, 2, 3, Purpose.BATCH): 0xA60FACFA74E65895,
    (42, 1000, 9999, Purpose.ROUND): 0xEE4F93229D4CAA23,
    (-1, 7, 2**40, Purpose.DROPOUT): 0x49DB39E4CAEE5EC1,
}

FAILURE = 1e-9  # how likely a right generator fails one of the statistical tests below
INT64 = st.integers(-(2**63), 2**63 - 1)
INT64S = arrays(np.int64, st.integers(1, 20), elements=INT64)
QUIET = settings(max_examples=100, derandomize=True, database=None)


def words(array: np.ndarray) -> list[int]:
    return [int(z) % 2**64 for z in array]


def mix(z: int) -> int:
    """splitmix64's output for one state, in Python's unbounded integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_bits_are_those_of_splitmix64() -> None:
    assert words(bits(0, np.arange(3))) == list(SPLITMIX64)
    assert words(bits(0, torch.arange(3)).numpy()) == list(SPLITMIX64)


@QUIET
@given(INT64, INT64S)
def test_bits_follow_the_definition_for_any_key_and_coordinate(word: int, coordinates: np.ndarray) -> None:
    expected = [mix((word + (int(j) + 1) * 0x9E3779B97F4A7C15) % 2**64) for j in coordinates]
    assert words(bits(word, coordinates)) == expected


@QUIET
@given(INT64S, st.data())
def test_numpy_and_torch_draw_the_same_bits(keys: np.ndarray, data: st.DataObject) -> None:
    coordinates = data.draw(arrays(np.int64, len(keys), elements=INT64))
    for draw in (bits, bits53):
        in_torch = draw(torch.from_numpy(keys), torch.from_numpy(coordinates)).numpy()
        assert (draw(keys, coordinates) == in_torch).all()
        grid = draw(torch.from_numpy(keys)[:, None], torch.from_numpy(coordinates)).numpy()
        assert (draw(keys[:, None], coordinates) == grid).all()
        one = draw(int(keys[0]), torch.from_numpy(coordinates)).numpy()
        assert (draw(int(keys[0]), coordinates) == one).all()
    for purpose in (Purpose.SELECT, Purpose.ROUND):
        assert (derive(keys, purpose) == derive(torch.from_numpy(keys), purpose).numpy()).all()


@QUIET
@given(INT64, INT64S)
def test_bits53_are_the_upper_bits(word: int, coordinates: np.ndarray) -> None:
    assert bits53(word, coordinates).tolist() == [z >> 11 for z in words(bits(word, coordinates))]


def test_draws_do_not_depend_on_order_or_company() -> None:
    word, order = key(3, 1, 4, Purpose.SELECT), permutation(1, 1000)
    together = bits(signed(word), np.arange(1000))
    assert (bits(signed(word), order) == together[order]).all()
    assert [int(bits(signed(word), np.array([j]))[0]) for j in range(1000)] == together.tolist()


def test_uniform_and_derive_are_draws_of_the_key() -> None:
    word = key(3, 1, 4, Purpose.BATCH)
    draws = uniform(word, 1000)
    assert draws.dtype == np.float64
    assert draws.tolist() == [z / 2**53 for z in bits53(signed(word), np.arange(1000)).tolist()]
    assert uniform(word, 0).shape == (0,)
    keys = np.array([signed(word), 5, -5])
    assert derive(keys, Purpose.ROUND).tolist() == [int(bits(int(k), np.array([4]))[0]) for k in keys]


@given(st.integers(0, 2**64 - 1))
@QUIET
def test_signed_keeps_the_64_bits(word: int) -> None:
    assert -(2**63) <= signed(word) < 2**63
    assert signed(word) % 2**64 == word
    assert signed(signed(word)) == signed(word)


def test_keys_are_frozen() -> None:
    assert {arguments: key(*arguments) for arguments in GOLDEN} == GOLDEN


def test_purposes_are_frozen() -> None:
    names = (
        "INIT SAMPLE BATCH SELECT ROUND STEPS LOSS SPEED UPLINK DOWNLINK LATENCY ITERATE PARTITION DROPOUT"
    )
    assert {p.name: p.value for p in Purpose}.items() >= {n: i for i, n in enumerate(names.split())}.items()


def test_keys_are_distinct() -> None:
    grid = [
        (seed, t, client, purpose)
        for seed in (0, 1, -1, 2**63)
        for t in range(12)
        for client in range(80)
        for purpose in Purpose
    ]
    keys = {key(*arguments) for arguments in grid}
    assert len(keys) == len(grid)
    assert all(0 <= word < 2**64 for word in keys)
    derived = derive(np.array([signed(word) for word in keys]), Purpose.SELECT)
    assert len(set(derived.tolist()) | {signed(word) for word in keys}) == 2 * len(grid)


def test_arguments_of_a_key_do_not_commute() -> None:
    same_numbers = [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1)]
    assert len({key(*numbers, Purpose.INIT) for numbers in same_numbers}) == 6


@pytest.mark.parametrize("n", [0, 1, 2, 3, 100, 1001])
def test_permutation_is_one(n: int) -> None:
    order = permutation(key(0, 0, n, Purpose.BATCH), n)
    assert sorted(order.tolist()) == list(range(n))
    assert n < 100 or order.tolist() != list(range(n))


def test_every_permutation_is_as_likely() -> None:
    orders = [tuple(permutation(key(0, t, 0, Purpose.BATCH), 4).tolist()) for t in range(24 * 200)]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert_uniform(counts)


def assert_uniform(counts: np.ndarray) -> None:
    """Chi-square on both sides: for k degrees of freedom (Laurent and Massart 2000, Lemma 1)
    P(X >= k + 2 sqrt(kx) + 2x) <= exp(-x) and P(X <= k - 2 sqrt(kx)) <= exp(-x). Here x = ln(2/FAILURE).
    """
    expected = counts.sum() / len(counts)
    statistic = ((counts - expected) ** 2).sum() / expected
    k, x = len(counts) - 1, math.log(2 / FAILURE)
    assert k - 2 * math.sqrt(k * x) <= statistic <= k + 2 * math.sqrt(k * x) + 2 * x


@pytest.mark.parametrize("shift", [0, 8, 24, 40, 56])
def test_every_byte_of_one_stream_is_uniform(shift: int) -> None:
    draws = bits(signed(key(0, 0, 0, Purpose.SELECT)), np.arange(2**17))
    assert_uniform(np.bincount((draws >> shift) & 255, minlength=256))


@pytest.mark.parametrize("purpose", [Purpose.SELECT, Purpose.ROUND])
def test_first_draws_of_neighbouring_keys_are_uniform(purpose: Purpose) -> None:
    keys = np.array([signed(key(0, t, c, Purpose.UPLINK)) for t in range(64) for c in range(512)])
    draws = bits53(derive(keys, purpose), np.zeros_like(keys))
    assert_uniform(np.bincount(draws >> 45, minlength=256))


def test_successive_draws_are_independent() -> None:
    draws = bits53(signed(key(0, 0, 1, Purpose.SELECT)), np.arange(2**17)) >> 49
    assert_uniform(np.bincount(draws[:-1:2] * 16 + draws[1::2], minlength=256))


@pytest.mark.gpu
def test_cuda_draws_the_same_bits() -> None:
    keys = np.array(
        [signed(key(0, t, c, Purpose.SELECT)) for t in range(8) for c in range(8)] + [-1, 0, 2**63 - 1]
    )
    coordinates = np.concatenate([np.arange(5000), [2**62, -1, -(2**63), 2**63 - 1]])
    for draw in (bits, bits53):
        on_gpu = draw(torch.from_numpy(keys).cuda()[:, None], torch.from_numpy(coordinates).cuda())
        assert (on_gpu.cpu().numpy() == draw(keys[:, None], coordinates)).all()
    on_gpu = derive(torch.from_numpy(keys).cuda(), Purpose.ROUND)
    assert (on_gpu.cpu().numpy() == derive(keys, Purpose.ROUND)).all()
