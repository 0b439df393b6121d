"""Methods of papers by hand: DGC's warm-up, SparseLoCo's chunks, STC, two levels, PowerSGD, DRIVE, EDEN."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg.channel import Channel
from cfedavg.compress import TwoLevels, decompress, parse, selectors, values_of
from cfedavg.compress.compressor import Selector
from cfedavg.compress.lowrank import multiply, orthonormal_columns
from cfedavg.compress.quantisers import two_means
from cfedavg.compress.topk import TopK
from cfedavg.core import keys as keyed
from cfedavg.core.arrays import from_bf16, to_bf16
from cfedavg.core.bases import Rotation
from cfedavg.core.errors import InputError, NotFinite
from cfedavg.core.keys import Purpose
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Levels
from cfedavg.feedback import FEEDBACKS, ErrorFeedback
from tests.compress.test_compress import naive_top
from tests.core.test_payload import assert_same

QUIET = settings(max_examples=100, derandomize=True, database=None)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
rough = st.sampled_from([0.0, -0.0, 0.5, -1.0, 1.0, 2.0, -3.0])
LEVELS = {
    1: [0.7979],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}  # Max (1960), Table I: half of the symmetric output levels for 2 to 16 levels


def gaussian(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape)


# --- topk over rounds, in chunks and within a bound ----------------------------------------------------


def test_warm_up_is_that_of_dgc() -> None:
    """Deep Gradient Compression: 4 rounds at sparsities of 75%, 93.75%, 98.4375% and 99.6%, then 99.9%."""
    compressor, p = parse("topk(0.99902343750, warmup=4)"), gaussian(4096)  # 1/1024 = 4^-5 is sent in the end
    counts = [compressor.compress(p, 0, t=t).counts()[0] for t in range(7)]
    assert counts == [1024, 256, 64, 16, 4, 4, 4]
    layout = Layout.flat(4096)
    assert compressor.selector.most(layout) == 1024
    assert compressor.gamma(layout) == parse("topk(0.99902343750)").gamma(layout) == 4096 / 4092
    for spec, other in (
        ("topk(0.9, warmup=3, least=50)", "topk(0.9, least=50)"),
        ("topk(0.9, warmup=3)", "topk(0.9)"),
    ):
        late = parse(spec).compress(p, 0, t=3)
        assert late.indices.tolist() == parse(other).compress(p, 0).indices.tolist()


def naive_chunks(p: list[float], chunk: int, k: int) -> list[int]:
    found = []
    for start in range(0, len(p), chunk):
        part = p[start : start + chunk]
        found += [start + j for j in naive_top(part, min(k, len(part)))]
    return found


@QUIET
@given(
    st.lists(float32s | rough, min_size=1, max_size=60), st.integers(2, 20), st.integers(1, 19), st.booleans()
)
def test_chunks_are_the_naive_ones(numbers: list[float], chunk: int, k: int, is_double: bool) -> None:
    k = min(k, chunk - 1)
    p = np.array([numbers, numbers[::-1]], np.float64 if is_double else np.float32)
    selector, keys = TopK(chunk=chunk, k=k), np.zeros(2, np.int64)
    payload = selector.select(p, keys, Layout.flat(len(numbers)), 0)
    by_masks = Selector.select(
        selector, torch.from_numpy(p), torch.from_numpy(keys), Layout.flat(len(numbers)), 0
    )
    first, second = (naive_chunks(row.tolist(), chunk, k) for row in p)
    assert payload.indices is not None
    assert payload.indices.tolist() == first + second
    assert [len(first), len(second)] == [selector.most(Layout.flat(len(numbers)))] * 2
    for one, other in zip(payload[:3], by_masks[:3], strict=True):
        assert np.array_equal(one, other)


def test_chunks_by_hand() -> None:
    """The 2 largest of coordinates 0 to 3, of 4 to 7, and both of the rest."""
    p = np.array([9.0, 8, 7, 6, 0, -1, 2, 3, 0.5, 0.25])
    payload = parse("topk(chunk=4, k=2)").compress(p, 0)
    assert payload.indices.tolist() == [0, 1, 6, 7, 8, 9]  # type: ignore[union-attr]
    with pytest.raises(NotFinite):
        parse("topk(chunk=4, k=2)").compress(np.append(p, np.nan), 0)


def test_a_tile_of_chunks_is_cut_between_chunks() -> None:
    p = np.float32(gaussian(200_001))
    payload = parse("topk(chunk=3000, k=20)").compress(p, 0)
    assert payload.indices.tolist() == naive_chunks(p.tolist(), 3000, 20)  # type: ignore[union-attr]


def test_hold_sends_what_exceeds_a_multiple_of_the_update() -> None:
    """g = (0, 3, 4) has the norm 5; of p = (6, 8, 24) with a bound of 10, the 24 must go, and no more."""
    g, e = np.array([0.0, 3.0, 4.0]), np.array([6.0, 5.0, 20.0])
    sent = [
        Channel(parse(f"topk(hold={hold})"), ErrorFeedback(), Layout.flat(3)).send(g, e, key=0)
        for hold in (2, 1.999, 0, 6)
    ]
    assert [each.payload.indices.tolist() for each in sent] == [[2], [1, 2], [0, 1, 2], []]  # type: ignore[union-attr]
    assert sent[0].memory.tolist() == [6, 8, 0]


@QUIET
@given(
    st.lists(st.tuples(float32s | rough, float32s | rough), min_size=1, max_size=30),
    st.sampled_from([0.5, 1, 5.0]),
)
def test_hold_keeps_the_fewest(pairs: list[tuple[float, float]], hold: float) -> None:
    g, e = (np.array(numbers, np.float32) for numbers in zip(*pairs, strict=True))
    g, e = g.clip(-1e37, 1e37), e.clip(-1e37, 1e37)
    channel = Channel(parse(f"topk(hold={hold})"), ErrorFeedback(), Layout.flat(len(g)))
    made = channel.send(g, e, key=0)
    bound = Fraction(hold) ** 2 * sum(Fraction(float(v)) ** 2 for v in g)
    squares = sorted((Fraction(float(v)) ** 2 for v in made.p), reverse=True)
    k, margin = made.payload.counts()[0], 1 + Fraction(1, 10**12)
    assert sum(squares[k:]) <= bound * margin
    assert k == 0 or sum(squares[k - 1 :]) * margin >= bound
    assert made.payload.indices.tolist() == naive_top(made.p.tolist(), k)  # type: ignore[union-attr]
    of_torch = channel.send(torch.from_numpy(g), torch.from_numpy(e), key=0)
    assert of_torch.payload.indices.tolist() == made.payload.indices.tolist()  # type: ignore[union-attr]


def test_hold_bounds_the_residual_of_each_client_of_a_block() -> None:
    channel = Channel(parse("topk(hold=2) >> bf16"), FEEDBACKS.parse("ef"), Layout.flat(50))
    e = torch.zeros(3, 50)
    for t in range(8):
        g = torch.from_numpy(gaussian(8, 3, 50)[t]) * torch.tensor([[1.0], [10.0], [0.1]])
        made = channel.send(g.float(), e, key=torch.arange(3), t=t)
        e = made.memory
        assert (e.norm(dim=1) <= 2.001 * g.norm(dim=1)).all()
    assert len(set(made.payload.counts())) > 1


def test_a_broadcast_cannot_hold() -> None:
    with pytest.raises(InputError, match=r"^`compressor_down`: topk\(hold=5\) .* a broadcast has none"):
        parse("topk(hold=5)", "compressor_down")


# --- sparse ternary compression ------------------------------------------------------------------------


def test_topk_with_signs_is_stc() -> None:
    """STC: of the k = 3 largest, mu = (4 + 9 + 5) / 3 = 6 with their signs; the residual keeps the rest."""
    channel = Channel(parse("topk(0.5) >> sign"), ErrorFeedback(), Layout.flat(6))
    g, e = np.array([1.0, -3.0, 9.0, 0.5, 0.0, 2.0]), np.array([0.0, -1.0, 0.0, 0.0, 5.0, -1.0])
    made = channel.send(g, e, key=0)
    assert decompress(made.payload).tolist() == [[0, -6, 6, 0, 6, 0]]
    assert made.memory.tolist() == [1, 2, 3, 0.5, -1, 1]


# --- two levels ----------------------------------------------------------------------------------------


def error_of(magnitudes: list[Fraction]) -> Fraction:
    mean = sum(magnitudes) / Fraction(max(1, len(magnitudes)))
    return sum(((m - mean) ** 2 for m in magnitudes), Fraction(0))


def least_error(v: list[float]) -> Fraction:
    """Of every set of magnitudes as the smaller ones, not only of those that a cut makes."""
    exact = [abs(Fraction(x)) for x in v]
    return min(
        error_of([exact[j] for j in chosen]) + error_of([exact[j] for j in set(range(len(v))) - set(chosen)])
        for size in range(len(v) + 1)
        for chosen in combinations(range(len(v)), size)
    )


@QUIET
@given(st.lists(st.floats(-8, 8, width=16) | rough, min_size=1, max_size=7))
def test_two_levels_have_the_least_error(v: list[float]) -> None:
    sent = decompress(parse("int2").compress(np.array(v, np.float32), 0))[0].tolist()
    found = sum(((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(v, sent, strict=True)), Fraction(0))
    rounding = sum(Fraction(x) ** 2 for x in v) / 2**40
    assert found <= least_error(v) * (1 + Fraction(1, 2**20)) + rounding


def test_two_levels_by_hand() -> None:
    """Blocks of 4: the means of 1, 2 and of 8, 9; then twice 3; then 5 alone."""
    payload = parse("int2(4)").compress(np.array([1.0, -9, 8, 2, -3, 3, 3, 3, 5]), 0)
    assert isinstance(payload.values, Levels)
    assert values_of(payload).tolist() == [1.5, -8.5, 8.5, 1.5, -3, 3, 3, 3, 5]
    assert payload.values.scales.tolist() == [1.5, 8.5, 3, 3, 5, 5]
    assert payload.values.levels.tolist()[:4] == [1, -2, 2, 1]
    assert (payload.values.top, payload.values.per_level) == (2, True)
    zero = parse("int2").compress(np.zeros(3), 0)
    assert (values_of(zero).tolist(), abs(zero.values.levels).min()) == ([0, 0, 0], 1)  # type: ignore[union-attr]


def test_zeros_that_fill_a_block_do_not_count() -> None:
    means = two_means(np.array([[4.0, 2.0, 0, 0], [4.0, 2.0, 0, 0]]), np.array([[2], [4]]))
    assert means.tolist() == [[2, 4], [0, 3]]


@pytest.mark.parametrize("n", [3, 10, 256])
def test_the_proof_of_two_levels_at_its_worst(n: int) -> None:
    """a_i = sqrt(i) - sqrt(i - 1), whose (a_1 + ... + a_k)^2 / k is 1 for all k: the proof's comparison."""
    a = np.array([math.sqrt(i) - math.sqrt(i - 1) for i in range(1, n + 1)])
    assert (a**2).sum() <= 1 + math.log((4 * n - 1) / 3) / 4
    lost = np.square(decompress(parse("int2").compress(a, 0))[0] - a).sum() / np.square(a).sum()
    assert lost <= 1 / TwoLevels().gamma(n) <= 3 * lost + 0.3


# --- PowerSGD --------------------------------------------------------------------------------------------


def power_sgd(M: np.ndarray, Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 of Vogels et al. (2019) for one worker: P = M Q, orthonormal columns of P, Q = M^T P."""
    P = M @ Q
    for i in range(P.shape[1]):
        for j in range(i):
            P[:, i] -= (P[:, i] @ P[:, j]) * P[:, j]
        P[:, i] /= np.linalg.norm(P[:, i])
    return P, M.T @ P


@pytest.mark.parametrize(("rank", "shape"), [(1, (7, 9)), (2, (20, 5)), (3, (6, 2, 3, 4))])
def test_lowrank_is_power_sgd(rank: int, shape: tuple[int, ...]) -> None:
    layout = Layout(("bias", "w"), ((3,), shape), ("float64",) * 2)
    p, key = gaussian(layout.d), keyed.key(0, 0, 0, Purpose.UPLINK)
    payload = parse(f"lowrank({rank})").compress(p, key, layout)
    M = p[3:].reshape(shape[0], -1)
    (rows, columns), sent = M.shape, values_of(payload)
    word, places = keyed.derive(keyed.signed(key), Purpose.SELECT), np.arange(3 + rows * rank, len(sent))
    P, Q = power_sgd(M, keyed.normals(word, places).reshape(columns, rank))
    found_P, found_Q = (
        sent[3 : 3 + rows * rank].reshape(rows, rank),
        sent[3 + rows * rank :].reshape(columns, rank),
    )
    size = found_P.max() / from_bf16(to_bf16(np.float32(found_P)))[found_P == found_P.max()][0]
    assert size == 1  # P holds bf16 numbers
    share = 2.0 ** round(math.log2(np.linalg.norm(found_P[:, 0])))  # of M's size, a power of two
    np.testing.assert_allclose(found_P / share, P, rtol=2.0**-7, atol=1e-12)
    np.testing.assert_allclose(found_Q, M.T @ found_P / share**2, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found_Q * share, Q, rtol=0, atol=2.0**-6 * np.linalg.norm(M))
    assert sent[:3].tolist() == p[:3].tolist()
    dense = decompress(payload)[0]
    np.testing.assert_allclose(dense[3:].reshape(M.shape), found_P @ found_Q.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_matrix_of_low_rank_arrives_whole(rank: int) -> None:
    """Up to the rounding of P, which changes its span by 2^-8; dependent columns of P are 0."""
    M = np.float32(gaussian(30, 2) @ gaussian(2, 40))
    layout = Layout(("w",), ((30, 40),), ("float32",))
    lost = decompress(parse(f"lowrank({rank})").compress(M.reshape(-1), 3, layout))[0] - M.reshape(-1)
    share = np.linalg.norm(lost) / np.linalg.norm(M)
    assert share < 2.0**-6 if rank >= 2 else share > 0.1


def test_columns_that_depend_on_others_become_zero() -> None:
    Y = gaussian(1, 8, 2)
    Y = np.concatenate([Y, Y @ [[1.0], [2.0]], np.zeros((1, 8, 1)), gaussian(1, 8, 1)], -1)
    P = orthonormal_columns(Y)[0]
    np.testing.assert_allclose(P.T @ P, np.diag([1.0, 1, 0, 0, 1]), atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 900, 300), (1, 1, 1), (1, 70_000, 2)])
def test_products_in_parts_are_those_of_the_whole(shape: tuple[int, int, int]) -> None:
    A, B = gaussian(*shape), gaussian(shape[0], shape[2], 2)
    of_torch = multiply(torch.from_numpy(A), torch.from_numpy(B))
    assert np.array_equal(multiply(A, B), of_torch.numpy())
    np.testing.assert_allclose(of_torch.numpy(), A @ B, rtol=1e-11, atol=1e-11)
    turned = multiply(A.swapaxes(1, 2), gaussian(shape[0], shape[1], 1))
    np.testing.assert_allclose(
        turned, A.swapaxes(1, 2) @ gaussian(shape[0], shape[1], 1), rtol=1e-10, atol=1e-10
    )


def test_a_random_start_captures_its_share() -> None:
    """All singular values are equal, so that the bound is reached: r / k of the energy, whatever the draw."""
    M, layout = np.float32(np.eye(12)), Layout(("w",), ((12, 12),), ("float32",))
    for key in range(20):
        lost = np.square(
            decompress(parse("lowrank(3)").compress(M.reshape(-1), key, layout))[0] - M.reshape(-1)
        )
        assert lost.sum() / 12 == pytest.approx(1 - 3 / 12, abs=0.01)


# --- DRIVE and EDEN --------------------------------------------------------------------------------------


def hadamard(n: int) -> np.ndarray:
    return np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]) / math.sqrt(n)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("unbiased", [True, False])
def test_eden_by_its_definition(bits: int, unbiased: bool) -> None:
    """Rotate, take the nearest of the normal distribution's levels, scale by |x|^2 / <Rx, Q>, rotate back."""
    d, key = 64, 5
    x = gaussian(d)
    payload = parse(f"eden({bits}, unbiased={str(unbiased).lower()})").compress(x, key)
    assert isinstance(payload.basis, Rotation)
    signs = 1 - 2 * (keyed.bits53(payload.basis.keys[0], np.arange(d)) & 1)
    R = hadamard(d) * signs
    z = R @ x * math.sqrt(d) / np.linalg.norm(x)
    centroids = np.array([-level for level in LEVELS[bits]][::-1] + LEVELS[bits])
    Q = centroids[abs(z[:, None] - centroids).argmin(1)]
    scale = x @ x / (R @ x @ Q) if unbiased else (R @ x @ Q) / (Q @ Q)
    np.testing.assert_allclose(decompress(payload)[0], R.T @ (scale * Q), rtol=1e-3, atol=2e-3)


def test_one_bit_is_drive() -> None:
    """DRIVE: signs and |x|^2 / |Rx|_1; its biased variant: |Rx|_1 / d. Two equal numbers are the worst."""
    x = np.array([2.0, 0, 2.0, 0])
    for spec, scale in (("eden(1)", 2.0), ("eden(1, unbiased=false)", 1.0)):  # Rx: two times 2, two times 0
        payload = parse(spec).compress(x, 0)
        assert payload.values.scales.tolist() == [scale]  # type: ignore[union-attr]


def test_eden_is_nearly_unbiased() -> None:
    """The mean over 4,000 rotations of 256 numbers; each error has about the standard deviation 0.76 / 63."""
    x = gaussian(256)
    mean = decompress(parse("eden(1)").compress(np.tile(x, (4000, 1)), np.arange(4000))).mean(0)
    assert np.linalg.norm(mean - x) / np.linalg.norm(x) < 0.03
    biased = decompress(
        parse("eden(1, unbiased=false)").compress(np.tile(x, (4000, 1)), np.arange(4000))
    ).mean(0)
    assert (biased @ x) / (x @ x) == pytest.approx(2 / math.pi, abs=0.02)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_the_error_is_that_of_the_normal_distribution(bits: int, error: float) -> None:
    """Max (1960), Table I: the mean squared error of 2, 4, 8 and 16 levels."""
    x = gaussian(40_000)
    lost = np.square(decompress(parse(f"eden({bits}, unbiased=false)").compress(x, 1))[0] - x)
    assert lost.sum() / (x @ x) == pytest.approx(error, rel=0.03)


def test_a_block_that_would_be_worse_than_nothing_is_not_unbiased() -> None:
    """Four equal numbers turn to one number or to four equal ones: |y|^2 / |y|_1 would have an error of 3."""
    x, errors = np.ones(4), set()
    for key in range(30):
        errors.add(round(float(np.square(decompress(parse("eden(1)").compress(x, key))[0] - x).sum()), 5))
    assert errors == {0.0, 3.0}  # of |x|^2 = 4: 0, or 1 - 1/4 from the other factor


@pytest.mark.parametrize("spec", ["eden(2)", "eden(4, block=64)", "lowrank(3)", "lowrank(2) >> bf16"])
def test_tensors_stay_tensors_where_numpy_cannot_read_them(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's tensors take this way: here those of the CPU do, with the same bits as NumPy's arrays."""
    layout, p = Layout(("v", "w"), ((20,), (30, 25)), ("float32",) * 2), np.float32(gaussian(3, 770))
    expected = parse(spec).compress(p, np.arange(3), layout)
    monkeypatch.setattr(selectors, "can_compile", lambda p: False)
    found = parse(spec).compress(torch.from_numpy(p), torch.arange(3), layout)
    assert_same(found.numpy(), expected)


@pytest.mark.parametrize("spec", ["eden(2)", "lowrank(2)", "topk(chunk=64, k=4)", "topk(0.9) >> int2"])
def test_a_bad_row_is_named(spec: str) -> None:
    p: Any = gaussian(3, 100)
    p[1, 7] = np.inf
    with pytest.raises(NotFinite) as caught:
        parse(spec).compress(p, np.arange(3), Layout(("w",), ((10, 10),), ("float32",)))
    assert caught.value.rows == [1]
