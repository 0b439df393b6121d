"""Compressors: Definition 1 for every one of them, oracles, blocks of clients, the texts that name them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cfedavg.channel import Channel
from cfedavg.compress import (
    BF16,
    EXAMPLES,
    FP32,
    QSGD,
    QUANTISERS,
    SELECTORS,
    Compressor,
    Eden,
    Everything,
    IntBlocks,
    LowRank,
    Proportional,
    Quantiser,
    RandomDropping,
    Selector,
    Sign,
    Threshold,
    TopK,
    TwoLevels,
    decompress,
    minus,
    parse,
    plus,
    sent_values,
    values_of,
)
from cfedavg.compress.blocks import Blocks
from cfedavg.compress.numerics import prefix_sums, row_sums
from cfedavg.core import keys as keyed
from cfedavg.core.arrays import arange, from_bf16, module_of, to_bf16
from cfedavg.core.errors import InputError, NotFinite
from cfedavg.core.keys import Purpose
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Levels, Payload
from cfedavg.feedback import ErrorFeedback
from tests.core.test_payload import assert_same


class Row(NamedTuple):
    """A compressor under test; `paired` ones are also tested in every selector >> quantiser."""

    spec: str
    random: bool = False
    paired: bool = False


SELECT = [
    Row("none"),
    Row("topk(0)"),
    Row("topk(0.5)"),
    Row("topk(0.9)", paired=True),
    Row("topk(0.99)"),
    Row("topk(0.999)"),
    Row("topk(snr=1)"),
    Row("topk(snr=1.05)"),
    Row("topk(snr=4)", paired=True),
    Row("topk(0.9, per_tensor=true)", paired=True),
    Row("topk(0.9, least=7)", paired=True),
    Row("topk(0.9, per_tensor=true, least=3)"),
    Row("topk(snr=2, per_tensor=true)"),
    Row("topk(0.9, warmup=3)"),
    Row("topk(chunk=8, k=2)", paired=True),
    Row("topk(chunk=7, k=3)"),
    Row("topk(chunk=4096, k=64)"),
    Row("topk(hold=0.5)"),
    Row("rd(0)", random=True),
    Row("rd(0.5)", random=True, paired=True),
    Row("rd(0.9)", random=True),
    Row("rd(0.99)", random=True),
    Row("rd(0.999)", random=True),
    Row("threshold(0.5)", paired=True),
    Row("threshold(0.95)"),
    Row("proportional(0)", random=True),
    Row("proportional(0.5)", random=True),
    Row("proportional(0.9)", random=True, paired=True),
    Row("proportional(0.999)", random=True),
]
QUANTISE = [
    Row("fp32", paired=True),
    Row("bf16", paired=True),
    Row("int2", paired=True),
    Row("int2(7)"),
    Row("int3(7)"),
    Row("int4(16)"),
    Row("int5"),
    Row("int6(1)"),
    Row("int7(2)"),
    Row("int8(16)", paired=True),
    Row("sign", paired=True),
    Row("qsgd(1)", random=True, paired=True),
    Row("qsgd(4, block=16)", random=True),
    Row("qsgd(16)", random=True, paired=True),
    Row("qsgd(127, block=1)", random=True),
    Row("qsgd(300, block=8)", random=True),
    Row("qsgd(32767)", random=True),
]
BASES = [
    Row("lowrank(1)", random=True),
    Row("lowrank(3)", random=True),
    Row("lowrank(1) >> fp32", random=True),
    Row("lowrank(2) >> bf16", random=True),
    *(Row(f"eden({bits}{which})", random=True) for bits in range(1, 5) for which in ("", ", unbiased=false")),
    Row("eden(2, block=8)", random=True),
]
PAIRS = [
    Row(f"{s.spec} >> {q.spec}", s.random or q.random)
    for s in SELECT
    for q in QUANTISE
    if s.paired and q.paired
]
TABLE = SELECT + QUANTISE + BASES + PAIRS

every_row = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.spec)
every_quantiser = pytest.mark.parametrize("spec", [row.spec for row in QUANTISE])
QUIET = settings(max_examples=120, derandomize=True, database=None)

FLOAT32_MAX = torch.finfo(torch.float32).max
SUBNORMAL = 2.0**-149  # the smallest float32
D = 32


def test_every_compressor_has_a_row() -> None:
    names = {row.spec.split("(")[0] for row in SELECT + QUANTISE + BASES}
    assert names == SELECTORS.keys() | QUANTISERS.keys()
    assert {parse(text).selector.name for text in EXAMPLES} == SELECTORS.keys()


@cache
def keys_of(n: int) -> Tensor:
    words = [keyed.signed(keyed.key(0, 0, i, Purpose.UPLINK)) for i in range(n)]
    return torch.tensor(words, dtype=torch.int64)


def layout_of(d: int) -> Layout:
    """Two tensors with an empty one between them, as near to square as their sizes allow."""
    return Layout(("a", "empty", "b"), (square(d // 2), (0, 3), square(d - d // 2)), ("float32",) * 3)


def square(n: int) -> tuple[int, int]:
    rows = max((r for r in range(1, math.isqrt(n) + 1) if n % r == 0), default=1)
    return rows, n // rows


def signs(rng: np.random.Generator, d: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], d)


FAMILIES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "gaussian": lambda rng, d: rng.standard_normal(d),
    "heavy-tailed": lambda rng, d: rng.standard_cauchy(d),
    "sparse": lambda rng, d: rng.standard_normal(d) * (rng.random(d) < 0.1),
    "constant": lambda rng, d: np.full(d, -0.3),
    "tied": lambda rng, d: rng.integers(1, 4, d) * signs(rng, d),
    "zero": lambda rng, d: np.zeros(d),
    "spike": lambda rng, d: np.eye(d)[d // 3] * -7,
    "half steps": lambda rng, d: np.where(np.arange(d) == d // 2, 127, 0.5),
    "denormal": lambda rng, d: rng.integers(-9, 10, d) * SUBNORMAL,
    "nearly denormal": lambda rng, d: rng.integers(-(2**24), 2**24, d) * SUBNORMAL,
    "huge": lambda rng, d: rng.choice([0.1, 0.9, 1.0], d) * signs(rng, d) * FLOAT32_MAX,
    "largest": lambda rng, d: np.full(d, FLOAT32_MAX),
    "mixed magnitudes": lambda rng, d: 10 ** rng.uniform(-40, 38, d) * signs(rng, d),
    "d = 1": lambda rng, d: rng.standard_normal(1),
    "d = 2": lambda rng, d: rng.standard_normal(2),
}


def vector(family: str, d: int = D) -> Tensor:
    return torch.from_numpy(np.float32(FAMILIES[family](np.random.default_rng(1), d)))


def block(d: int, *families: str) -> Tensor:
    return torch.stack([vector(family, d) for family in families or WIDE])


WIDE = [family for family in FAMILIES if not family.startswith("d = ")]


# --- Definition 1: E|C(p) - p|^2 <= |p|^2 / gamma -----------------------------------------------------

DRAWS = 1000
FAILURE = (
    1e-9  # how likely a right compressor fails a test on averages; the keys are fixed, so it never flickers
)


def excess(mean: float, draws: int) -> float:
    """How far an average of `draws` relative errors X may lie above their mean, but for FAILURE.

    One draw's X = |C(p) - p|^2 / |p|^2 satisfies E exp(lX) <= exp((e^l - 1) EX), as if it were Poisson:
    - If X lies in [0, 1], since e^(lx) <= 1 + (e^l - 1) x there. So it does for lowrank and eden, alone.
    - Random selectors and QSGD decide each coordinate by itself, so X is a sum of independent terms, each
      in [0, 1]. For a dropped coordinate the term is p_j^2 / |p|^2.
      For QSGD a value of a block of norm N is off by at most N/(s beta) + (1 - 1/beta) |v| <= N.
    - Together X = a + (1 - a) Y with a what the selector drops; the exponential is convex in a, so a may be
      taken to be 0 or 1, and (1 - a) e^(bx) + a (1 + x) <= e^((a + (1 - a) b) x) for a, b in [0, 1], x >= 0.
    Chernoff's bound, in Bernstein's form: P(average >= mean + t) <= exp(-draws t^2 / (2 mean + 2 t / 3)).
    """
    l_n = math.log(1 / FAILURE) / draws
    return l_n / 3 + math.sqrt((l_n / 3) ** 2 + 2 * mean * l_n)


def rounding(payload: Payload) -> tuple[float, float]:
    """What the value type may add to |C(p) - p|: a share of |p|, and an amount for each value sent.

    bf16's and fp32's relative rounding is in gamma; below their smallest normal number it is half of their
    smallest spacing, 2^-133 or 2^-149. (float32 vectors are exact in fp32.)
    A level times a scale is rounded twice, the scale and the product, by 2^-24 each; what is sent is no
    longer than |p| + |C(p) - p| <= 2|p|, so this is less than 2^-22 |p|. A scale near or below the smallest
    normal number is off by up to 2^-150, which the level multiplies, unless each level has its scale. A
    vector that is computed from coordinates in another basis is rounded once more, factors also before.
    """
    if payload.basis is not None:
        is_bf16 = isinstance(payload.values, Floats) and payload.values.dtype == "bf16"
        return 2.0**-22, 2.0**-133 if is_bf16 else 2.0**-149
    if isinstance(payload.values, Levels):
        return 2.0**-22, (1 if payload.values.per_level else payload.values.top) * 2.0**-150
    return 0.0, {"bf16": 2.0**-134, "fp32": 2.0**-150, "fp64": 0.0}[payload.values.dtype]


def satisfies_definition_1(row: Row, p: Tensor) -> bool:
    compressor, layout, draws = parse(row.spec), layout_of(len(p)), DRAWS if row.random else 1
    payload = compressor.compress(p.repeat(draws, 1), keys_of(draws), layout)
    # In float64 no square of a float32 overflows or vanishes.
    error = (decompress(payload).double() - p.double()).square().sum(-1).mean().sqrt().item()
    norm = p.double().square().sum().sqrt().item()
    lost = 1 / compressor.gamma(layout)
    lost += excess(lost, draws) if row.random else 0.0
    share, amount = rounding(payload)
    bound = (math.sqrt(lost) + share) * norm + amount * math.sqrt(max(payload.counts()))
    return error <= bound * (1 + 1e-12)  # d roundings of 2^-53 here, and in the sums of the selectors


@every_row
def test_definition_1(row: Row) -> None:
    assert [family for family in FAMILIES if not satisfies_definition_1(row, vector(family))] == []


float32s = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
vectors = st.lists(float32s, min_size=1, max_size=40).map(torch.tensor)


@settings(QUIET, max_examples=400)
@given(st.sampled_from([row for row in TABLE if not row.random]), vectors)
def test_definition_1_for_any_vector(row: Row, p: Tensor) -> None:
    assert satisfies_definition_1(row, p)


def test_several_blocks_of_several_tensors() -> None:
    """More values than a default block of 256, and a last block that is not full."""
    p = torch.cat([vector("gaussian", 500), 100 * vector("heavy-tailed", 177)])
    assert [row.spec for row in SELECT + QUANTISE + BASES if not satisfies_definition_1(row, p)] == []


@pytest.mark.parametrize(
    ("spec", "p"),
    [
        ("topk(0.75)", torch.ones(8)),
        ("topk(0.5, per_tensor=true)", torch.ones(8)),
        ("topk(snr=4)", torch.ones(8)),
        ("sign", torch.eye(8)[3]),
        ("topk(chunk=4, k=1)", torch.ones(12)),
        ("eden(1)", torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])),
        ("eden(1, unbiased=false)", torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])),
        ("int4", torch.tensor([7, *[0.5] * 7])),
        ("int8(4)", torch.tensor([127, 0.5, 0.5, 0.5, -127, -0.5, 0.5, 0.5])),
        ("topk(0.5) >> int3", torch.tensor([3.0, *[0.5] * 3, *[0.5] * 4])),
        ("topk(0.5) >> sign", torch.ones(4)),
    ],
)
def test_gamma_is_reached(spec: str, p: Tensor) -> None:
    """On the worst input the loss reaches the bound: no larger gamma would hold."""
    compressor = parse(spec)
    lost = (decompress(compressor.compress(p, 0, layout_of(len(p)))) - p).square().sum() / p.square().sum()
    if spec == "topk(0.5) >> sign":  # all alike, so that the signs lose nothing of what is kept
        assert lost.item() == 0.5
    elif spec == "topk(0.5) >> int3":  # 4 halves dropped, 3 of those kept rounded to 0
        assert lost.item() == pytest.approx(1.75 / 10.75, rel=1e-6)
    else:
        assert lost.item() == pytest.approx(1 / compressor.gamma(layout_of(len(p))), rel=1e-6)


@pytest.mark.parametrize("comp", [0.5, 0.9])
@pytest.mark.parametrize("name", ["rd", "proportional"])
def test_gamma_of_random_selectors_is_reached(name: str, comp: float) -> None:
    p = torch.ones(D)
    payload = parse(f"{name}({comp})").compress(p.repeat(DRAWS, 1), keys_of(DRAWS))
    lost = 1 - sum(payload.counts()) / (D * DRAWS)
    # Of D * DRAWS independent coordinates with a share of comp dropped: Hoeffding.
    assert abs(lost - comp) <= math.sqrt(math.log(2 / FAILURE) / (2 * D * DRAWS))


@pytest.mark.parametrize(
    ("spec", "gamma"),
    [
        ("none", math.inf),
        ("topk(0)", math.inf),
        ("rd(0)", math.inf),
        ("proportional(0)", math.inf),
        ("topk(0.75)", 100 / 75),
        ("topk(0.999)", 100 / 99),
        ("topk(0.999, least=20)", 100 / 80),
        ("topk(0.999, least=1000)", math.inf),
        ("topk(0.6, per_tensor=true)", 50 / 30),
        ("topk(0.75, warmup=9)", 100 / 75),
        ("topk(chunk=30, k=3)", 30 / 27),
        ("topk(chunk=4096, k=64)", 100 / 36),
        ("topk(chunk=4096, k=100)", math.inf),
        ("topk(hold=5)", 1),
        ("lowrank(1)", 1 / (1 - 1 / 5 * (1 - 3 / 128))),
        ("lowrank(2) >> bf16", 1 / (1 - 2 / 5 * (1 - 3 * 2**0.5 / 128) * (1 - 2**-16))),
        ("lowrank(256)", math.inf),
        ("eden(1)", 1),
        ("eden(1, unbiased=false)", 2),
        ("eden(4, unbiased=false)", 1 / (((2.73258957 - 2.06901723) / 2) ** 2 + 3 / 16 / 2.73258957**2)),
        ("int2", 1 + 4 / math.log(399 / 3)),
        ("int2(2)", 2**46),
        ("topk(snr=1.05)", 1.05),
        ("rd(0.8)", 1.25),
        ("proportional(0.8)", 1.25),
        ("threshold(0.5)", 4),
        ("fp32", 2**48),
        ("bf16", 2**16),
        ("sign", 100 / 99),
        ("int8", 1 + 4 * 127**2 / 99),
        ("int4(16)", 1 + 4 * 7**2 / 15),
        ("qsgd(16)", 1 + 1 / (100 / 1024)),
        ("qsgd(1)", 1 + 1 / 10),
        ("topk(0.75) >> sign", 1 / (0.75 + 0.25 * 24 / 25)),
        ("topk(0.75) >> bf16", 1 / (0.75 + 0.25 / 2**16)),
        ("rd(0.5) >> qsgd(1)", 1 / (0.5 + 0.5 / 1.1)),
    ],
)
def test_gamma(spec: str, gamma: float) -> None:
    assert parse(spec).gamma(layout_of(100)) == pytest.approx(gamma, rel=1e-12)


@every_quantiser
def test_a_single_value_is_its_scale(spec: str) -> None:
    """Off by two roundings of float32, or by bf16's one: within gamma, with nothing added to it."""
    p = torch.cat([vector("gaussian", 200), vector("huge", 50), vector("mixed magnitudes", 50)])
    p = p[p.abs() > 2.0**-100][:, None]
    payload = parse(spec).compress(p, keys_of(len(p)))
    relative = (decompress(payload).double() / p.double() - 1).abs().max().item()
    assert relative**2 <= 1 / parse(spec).gamma(Layout.flat(1))


# --- selectors against naive ones ---------------------------------------------------------------------


def naive_top(p: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(p)), key=lambda j: (-abs(p[j]), j))[:k])


def kept(spec: str, p: Tensor, layout: Layout | None = None) -> list[int]:
    indices = parse(spec).compress(p, 0, layout).indices
    assert indices is not None
    return indices.tolist()


tied_vectors = st.lists(st.sampled_from([0.0, -0.0, 0.5, -1.0, 1.0, 2.0, -3.0]), min_size=1, max_size=30)


@QUIET
@given(vectors | tied_vectors.map(torch.tensor), st.sampled_from([0, 0.1, 0.5, 0.9, 0.99]))
def test_topk_is_the_naive_one(p: Tensor, comp: float) -> None:
    k = max(1, round((1 - comp) * len(p)))
    found = kept(f"topk({comp})", p)
    assert len(found) == k
    assert found == naive_top(p.tolist(), k)


def test_topk_ties_go_to_the_lowest_index() -> None:
    assert kept("topk(0.5)", torch.tensor([1.0, -2.0, 2.0, -1.0, 2.0, 1.0])) == [1, 2, 4]
    assert kept("topk(0.5)", torch.tensor([1.0, -1.0, 1.0, -1.0])) == [0, 1]
    assert kept("topk(0.5)", torch.tensor([0.0, -0.0, 0.0, 0.0])) == [0, 1]


def fewest(p: list[float], snr: float) -> range:
    """Return the numbers of coordinates that count as fewest, with a tolerance of 1e-12 on either side."""
    squares = sorted((Fraction(v) ** 2 for v in p), reverse=True)
    total = sum(squares)
    lost = [sum(squares[k:]) * Fraction(snr) for k in range(len(p) + 1)]
    low = next(k for k, share in enumerate(lost) if share <= total * (1 + Fraction(1, 10**12)))
    high = next(k for k, share in enumerate(lost) if share <= total * (1 - Fraction(1, 10**12)) or not total)
    return range(low, high + 1)


@QUIET
@given(vectors | tied_vectors.map(torch.tensor), st.sampled_from([1.05, 2, 4, 1000]))
def test_snr_target_keeps_the_fewest(p: Tensor, snr: float) -> None:
    found = kept(f"topk(snr={snr})", p)
    assert len(found) in fewest(p.tolist(), snr)
    assert found == naive_top(p.tolist(), len(found))


@pytest.mark.parametrize(
    ("p", "snr", "expected"),
    [
        ([1.0] * 8, 4, [0, 1, 2, 3, 4, 5]),  # drops exactly a quarter
        ([1.0] * 8, 8 / 3, [0, 1, 2, 3, 4]),
        ([0.0, 3.0, 0.0], 1e30, [1]),
        ([0.0, 0.0], 2, []),
        ([1.0, 2.0], 1, []),
        ([1.0, -2.0, 2.0, -1.0], 5, [1, 2]),
        ([1.0, -2.0, 2.0, -1.0], 6, [0, 1, 2]),
    ],
)
def test_snr_target_by_hand(p: list[float], snr: float, expected: list[int]) -> None:
    assert kept(f"topk(snr={snr!r})", torch.tensor(p)) == expected


@QUIET
@given(st.lists(float32s, min_size=4, max_size=24).map(torch.tensor), st.integers(0, 4))
def test_per_tensor_is_topk_of_each_tensor(p: Tensor, first: int) -> None:
    sizes = (first, 0, len(p) - first)
    layout = Layout(("a", "b", "c"), tuple((n,) for n in sizes), ("float32",) * 3)
    for spec in ("topk(0.7)", "topk(snr=3)"):
        expected = []
        for part in layout.slices():
            if part.stop > part.start:
                expected += [part.start + j for j in kept(spec, p[part])]
        assert kept(spec.replace(")", ", per_tensor=true)"), p, layout) == expected


@QUIET
@given(vectors | tied_vectors.map(torch.tensor), st.sampled_from([0.1, 0.5, 0.95]))
def test_threshold_follows_its_formula(p: Tensor, lam: float) -> None:
    squares = [Fraction(v) ** 2 for v in p.tolist()]
    floor = Fraction(lam) ** 2 * sum(squares) / len(p)
    margin = floor / 10**12
    found = set(kept(f"threshold({lam})", p))
    assert found >= {j for j, s in enumerate(squares) if s > floor + margin}
    assert found <= {j for j, s in enumerate(squares) if s >= floor - margin and s > 0}


def test_threshold_keeps_what_lies_on_it() -> None:
    assert kept("threshold(0.5)", torch.tensor([1.0, 0.99, 1.0, -1.0, 4.0])) == [0, 2, 3, 4]
    assert kept("threshold(0.5)", torch.tensor([1.0, 1.0, 1.0, -1.0, 4.0])) == [
        0,
        1,
        2,
        3,
        4,
    ]  # |p| = sqrt(20)
    assert kept("threshold(0.5)", torch.tensor([1.0, 1.01, 1.0, -1.0, 4.0])) == [1, 4]


# --- random selectors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("comp", [0, 0.5, 0.9, 0.99, 0.999])
def test_random_dropping_keeps_what_the_mask_says(comp: float) -> None:
    n, d = 100, 1000
    payload = parse(f"rd({comp})").compress(torch.ones(n, d), keys_of(n)).numpy()
    assert payload.mask is not None
    assert (payload.mask.keys == keyed.derive(keys_of(n).numpy(), Purpose.SELECT)).all()
    mask = keyed.bits53(payload.mask.keys[:, None], np.arange(d)) < payload.mask.keep
    assert payload.indices is not None
    assert (payload.indices == mask.nonzero()[1]).all()
    assert payload.counts() == mask.sum(1).tolist()
    # n*d independent coordinates, each kept with probability q: Bernstein, to both sides.
    q, log = 1 - comp, math.log(2 / FAILURE)
    spread = log / 3 + math.sqrt((log / 3) ** 2 + 2 * n * d * q * (1 - q) * log)
    assert abs(mask.sum() - n * d * q) <= (spread if comp else 0)


@pytest.mark.parametrize("name", ["rd", "proportional"])
def test_comp_0_keeps_everything(name: str) -> None:
    p = block(300)
    sent_of = decompress(parse(f"{name}(0)").compress(p, keys_of(len(p))))
    assert torch.equal(sent_of, p)


@pytest.mark.parametrize("comp", [0, 0.3, 0.5, 0.9, 0.99])
def test_proportional_probabilities(comp: float) -> None:
    p = block(200).double().abs()
    magnitude = p / p.amax(-1, keepdim=True).clamp(min=SUBNORMAL)
    q = Proportional(comp).probabilities(magnitude)
    k, nonzero = (1 - comp) * 200, (p > 0).sum(-1)
    assert ((q >= 0) & (q <= 1)).all()
    assert (q[p == 0] == 0).all()
    assert torch.allclose(q.sum(-1), nonzero.clamp(max=k).double(), rtol=1e-9)
    assert (q.gather(-1, p.argsort(-1)).diff(dim=-1) >= 0).all()
    uncapped = (q < 1) & (p > 0)
    for row, free, one in zip(magnitude, uncapped, q, strict=True):
        rate = one[free] / row[free]  # q = c |p| where it is not 1
        assert torch.allclose(rate, rate[:1].expand_as(rate), rtol=1e-9)


def test_proportional_probabilities_are_the_best() -> None:
    """No other q with the same sum has a smaller variance sum p^2 / q of the unbiased estimate."""
    rng, comp = np.random.default_rng(0), 0.8
    p = block(100, "gaussian", "heavy-tailed", "constant", "tied", "half steps").double()
    q = Proportional(comp).probabilities(p.abs() / p.abs().amax(-1, keepdim=True))
    best = (p.square() / q).sum(-1)
    others = [torch.full_like(q, 1 - comp)]  # uniform, and every other way to share out the same sum
    for _ in range(50):
        weights = torch.from_numpy(rng.dirichlet(np.full(100, rng.uniform(0.5, 20)), len(p)))
        others += [(share * q + (1 - share) * (20 * weights)) for share in (0, 0.9, 0.99)]
    for other in others:
        fair = (other > 0) & (other <= 1)
        value = torch.where(fair.all(-1), (p.square() / other).sum(-1), math.inf)
        assert (best <= value * (1 + 1e-9)).all()


def test_proportional_draws_with_its_probabilities() -> None:
    p = vector("heavy-tailed")
    payload = parse("proportional(0.8)").compress(p.repeat(DRAWS, 1), keys_of(DRAWS))
    q = Proportional(0.8).probabilities(p.abs().double()[None] / p.abs().max())[0]
    assert payload.indices is not None
    share = torch.bincount(payload.indices, minlength=D) / DRAWS
    # Hoeffding for each of D coordinates.
    assert ((share - q).abs() <= math.sqrt(math.log(2 * D / FAILURE) / (2 * DRAWS))).all()


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 20), st.integers(0, 2**62))
def test_blocks_of_clients_with_as_many_values_are_those_of_any(
    n: int, k: int, block: int, seed: int
) -> None:
    """Blocks packed without indices equal those packed with indices."""
    fast, slow = (Blocks(torch.arange(n + 1) * k, block) for _ in range(2))
    assert fast.each == k
    slow.each = None
    words, values = torch.arange(n) + seed, torch.arange(1.0, n * k + 1)
    assert torch.equal(fast.pack(values), slow.pack(values))
    assert torch.equal(fast.spread(torch.arange(fast.total)), slow.spread(torch.arange(slow.total)))
    assert torch.equal(fast.draws(words), slow.draws(words))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(st.integers(0, 5), st.integers(1, 300), st.floats(0, 0.999), st.integers(0, 2**62))
def test_compiled_dropping_is_the_readable_one(
    dtype: torch.dtype, n: int, d: int, comp: float, seed: int
) -> None:
    p = torch.randn(n, d, generator=torch.Generator().manual_seed(seed)).to(dtype)
    words, layout, rd = torch.arange(n) + seed, Layout.flat(d), RandomDropping(comp)
    fast, slow = rd.select(p, words, layout, 0), Selector.select(rd, p, words, layout, 0)
    for one, other in zip(fast[:3], slow[:3], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("spec", ["rd(0.5)", "proportional(0.5)", "qsgd(2)"])
def test_another_key_is_another_draw(spec: str) -> None:
    p = vector("gaussian")
    one, other = (decompress(parse(spec).compress(p, key)) for key in (1, 2))
    assert not torch.equal(one, other)


# --- quantisers ---------------------------------------------------------------------------------------


def payload_of(spec: str, p: Tensor, key: int = 0) -> Payload:
    return parse(spec).compress(p, key)


@QUIET
@given(vectors)
def test_bf16_rounds_as_torch_does(p: Tensor) -> None:
    values = values_of(payload_of("bf16", p))
    assert values.isfinite().all()
    top = torch.finfo(torch.bfloat16).max
    expected = p.to(torch.bfloat16).float()
    assert torch.equal(values, torch.where(expected.isinf(), p.sign() * top, expected))
    assert torch.equal(values.signbit(), p.signbit())


def test_bf16_of_the_largest_numbers_is_finite() -> None:
    p = torch.tensor([FLOAT32_MAX, -FLOAT32_MAX, 3.3961e38, 3.39e38])
    assert (
        values_of(payload_of("bf16", p)).tolist()
        == [3.3895313892515355e38, -3.3895313892515355e38] + [3.3895313892515355e38] * 2
    )


@pytest.mark.parametrize("spec", [row.spec for row in QUANTISE if row.spec[:4] in ("int3", "int4", "int8")])
def test_integers_stay_in_range_and_are_stable(spec: str) -> None:
    for family in WIDE:
        if "denormal" in family:  # there a scale has few bits, and rounding it moves the levels
            continue
        p = vector(family, 100)
        first = payload_of(spec, p).values
        assert isinstance(first, Levels)
        assert first.top == 2 ** (int(spec[3]) - 1) - 1
        assert first.levels.abs().max() <= first.top
        again = payload_of(spec, values_of(payload_of(spec, p))).values
        assert isinstance(again, Levels)
        normal = first.scales > 2.0**-126
        assert torch.equal(first.levels, again.levels) or not normal.all()
        # The scale went through a product and a division, each rounded.
        assert torch.allclose(first.scales[normal], again.scales[normal], rtol=2.0**-22, atol=0)


def test_integers_by_hand() -> None:
    values = payload_of("int4(2)", torch.tensor([7.0, -3.4, 0.0, 0.0, -2.0])).values
    assert isinstance(values, Levels)
    assert values.levels.tolist() == [7, -3, 0, 0, -7]
    assert values.scales.tolist() == [1, 0, np.float32(2 / 7)]


@QUIET
@given(vectors)
def test_sign_sends_the_mean_magnitude(p: Tensor) -> None:
    values = payload_of("sign", p).values
    assert isinstance(values, Levels)
    mean = math.fsum(abs(v) for v in p.tolist()) / len(p)
    assert values.scales.tolist() == pytest.approx([mean], rel=2.0**-23, abs=SUBNORMAL)
    assert values.levels.tolist() == [-1 if v < 0 else 1 for v in p.tolist()]


def naive_beta(p: np.ndarray, s: int) -> float:
    """E|u|^2 / |p|^2 for u the unbiased rounding of p to multiples of |p| / s."""
    norm = math.sqrt(math.fsum(p**2))
    steps = np.abs(p) * s / norm
    low = np.floor(steps)
    second_moment = (steps - low) * (low + 1) ** 2 + (low + 1 - steps) * low**2
    return float(second_moment.sum() / s**2)


@pytest.mark.parametrize(("s", "width"), [(1, 256), (4, 16), (300, 8)])
@pytest.mark.parametrize("family", ["gaussian", "heavy-tailed", "tied", "constant"])
def test_qsgd_is_unbiased_up_to_beta(s: int, width: int, family: str) -> None:
    p = vector(family)
    payload = parse(f"qsgd({s}, block={width})").compress(p.repeat(DRAWS, 1), keys_of(DRAWS))
    average = decompress(payload).double().mean(0).numpy()
    for start in range(0, D, width):
        v = p[start : start + width].double().numpy()
        beta, norm = naive_beta(v, s), math.sqrt((v**2).sum())
        # A value is one of two multiples of norm / (s beta): Hoeffding for each of D, and float32's rounding.
        spread = norm / (s * beta) * math.sqrt(math.log(2 * D / FAILURE) / (2 * DRAWS)) + 2.0**-22 * norm
        assert (np.abs(average[start : start + width] - v / beta) <= spread).all()


@pytest.mark.parametrize(("s", "width"), [(1, 256), (4, 16), (300, 8)])
def test_qsgd_is_the_naive_one(s: int, width: int) -> None:
    """Rounds up where the draw for the value's place among those sent says so, by a key of its own."""
    p, key = vector("heavy-tailed"), keys_of(1)
    payload = parse(f"rd(0.3) >> qsgd({s}, block={width})").compress(p, key).numpy()
    draws = keyed.bits53(keyed.derive(key.numpy(), Purpose.ROUND), np.arange(D)) / 2.0**53
    v, levels, scales = p.double().numpy()[payload.indices], [], []
    for start in range(0, len(v), width):
        part = v[start : start + width]
        norm = math.sqrt(math.fsum(part**2))
        levels += np.floor(np.abs(part) * s / norm + draws[start : start + len(part)]).tolist()
        scales.append(norm / (s * naive_beta(part, s)))
    assert isinstance(payload.values, Levels)
    assert payload.values.levels.tolist() == (np.sign(v) * levels).tolist()
    assert payload.values.scales.tolist() == pytest.approx(scales, rel=2.0**-23)


def test_qsgd_levels_fit_their_type() -> None:
    for s, dtype in ((1, torch.int8), (127, torch.int8), (128, torch.int16), (32767, torch.int16)):
        values = payload_of(f"qsgd({s})", vector("spike")).values
        assert isinstance(values, Levels)
        assert values.levels.dtype == dtype
        assert values.levels.min() == -s


@every_quantiser
@pytest.mark.parametrize("scale", [1e30, 1e39, 1e300])
def test_nothing_finite_becomes_infinite(spec: str, scale: float) -> None:
    """float64 vectors beyond float32 are cut to its largest number, so that error feedback keeps the rest."""
    p = vector("gaussian", 300).double() * scale
    values = values_of(payload_of(spec, p))
    assert values.isfinite().all()
    assert values_of(payload_of(spec, vector("largest", 300))).isfinite().all()


def test_quantisers_need_a_sane_width() -> None:
    for make in (lambda: IntBlocks(2), lambda: IntBlocks(9), lambda: IntBlocks(8, 0), lambda: QSGD(0)):
        with pytest.raises(InputError):
            make()


# --- blocks of clients --------------------------------------------------------------------------------


def assert_block_is_one_by_one(row: Row, p: Tensor) -> None:
    compressor, layout, keys = parse(row.spec), layout_of(p.shape[1]), keys_of(len(p))
    together = compressor.compress(p, keys, layout)
    assert len(together) == len(p)
    for one, vector_of_one, key in zip(together.clients(), p, keys.tolist(), strict=True):
        assert_same(one, compressor.compress(vector_of_one, key % 2**64, layout))
    order = torch.arange(len(p)).flip(0)
    for one, other in zip(
        together.clients(),
        reversed(list(compressor.compress(p[order], keys[order], layout).clients())),
        strict=True,
    ):
        assert_same(one, other)


@every_row
def test_error_feedback_keeps_exactly_what_was_not_sent(row: Row) -> None:
    """Line 15: the residual is p - C(p), number by number, and C(p) and the residual add up to p."""
    small = [family for family in WIDE if family not in ("huge", "largest", "mixed magnitudes")]
    channel, e = Channel(parse(row.spec), ErrorFeedback(), layout_of(300)), block(300, *small[::-1]) / 3
    made = channel.send(block(300, *small), e, keys_of(len(e)), t=1)
    dense = decompress(made.payload)
    assert torch.equal(made.memory, made.p - dense)
    assert torch.equal(made.left, minus(made.p, made.payload))
    again, size = plus(made.left, made.payload), made.left.abs() + made.p.abs()
    assert ((again.double() - made.p.double()).abs() <= 2.0**-23 * size.double()).all()


@every_row
def test_a_block_is_one_client_after_the_other(row: Row) -> None:
    assert_block_is_one_by_one(row, block(300))
    assert_block_is_one_by_one(row, block(300, "zero", "gaussian", "sparse").double() / 3)


@every_row
def test_a_block_of_one_number_or_no_client(row: Row) -> None:
    assert_block_is_one_by_one(row, torch.tensor([[1.5], [0.0], [-2.0]]))
    for layout in (None, layout_of(8)):
        empty = parse(row.spec).compress(torch.zeros(0, 8), keys_of(0), layout)
        assert decompress(empty).shape == (0, 8)


def nearly_halfway(seed: int, d: int) -> Tensor:
    """Positive numbers whose mean lies a hair from the middle between two float32."""
    p = np.float32(10 ** np.random.default_rng(seed).uniform(-6, 0, d))
    mean = np.float32(p.mean(dtype=np.float64))
    middle = Fraction(float(mean)) + Fraction(float(np.spacing(mean))) / 2
    rest = int((p[3:].astype(np.float64) * 2**44).astype(np.int64).sum())  # exact: 10^-6 > 2^-20
    missing = middle * d - Fraction(rest, 2**44)
    for j in range(3):  # each holds what the one before could not
        p[j] = np.nextafter(np.float32(float(missing)), np.float32(0))
        missing -= Fraction(float(p[j]))
    return torch.from_numpy(p)


def test_sums_are_rounded_the_same_alone_and_in_a_block() -> None:
    """Where the order of a float64 sum decides about the float32 scale; torch splits 32,768 and more."""
    d = 40_000
    p = torch.stack([nearly_halfway(seed, d) for seed in range(16)])
    for spec in ("sign", "threshold(0.9) >> sign"):
        together = parse(spec).compress(p, keys_of(len(p)))
        for one, vector_of_one, key in zip(together.clients(), p, keys_of(len(p)).tolist(), strict=True):
            assert_same(one, parse(spec).compress(vector_of_one, key))


def naive_prefixes(values: list[float]) -> list[float]:
    """The order of the additions, which is the same everywhere: neighbours first."""
    if len(values) < 2:
        return values
    pairs = naive_prefixes([a + b for a, b in zip(values[::2], values[1::2], strict=False)])
    odd = [pairs[j // 2 - 1] + v for j, v in enumerate(values) if j % 2 == 0 and j]
    return [values[0], *(v for pair in zip_longest(pairs, odd) for v in pair if v is not None)]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257])
def test_sums_in_a_fixed_order(width: int) -> None:
    values = torch.from_numpy(np.random.default_rng(width).standard_normal((3, width)))
    totals = row_sums(values)
    assert totals.tolist() == pytest.approx([math.fsum(row) for row in values.tolist()], abs=1e-13)
    prefixes = prefix_sums(values)
    expected = [[math.fsum(row[: j + 1]) for j in range(width)] for row in values.tolist()]
    assert np.allclose(prefixes.numpy(), expected, rtol=0, atol=1e-13)
    assert prefixes.tolist() == [naive_prefixes(row) for row in values.tolist()]
    padded = torch.nn.functional.pad(values, (0, 37))
    assert torch.equal(row_sums(padded), totals)
    assert torch.equal(prefix_sums(padded)[:, :width], prefixes)
    assert torch.equal(row_sums(values[1:2]), totals[1:2])
    assert torch.equal(prefix_sums(values[1]), prefixes[1])


@pytest.mark.parametrize("selector", ["threshold(0.5)", "topk(snr=2)", "rd(0.999)"])
@pytest.mark.parametrize("quantiser", ["", *(f" >> {row.spec}" for row in QUANTISE)])
def test_empty_selections(selector: str, quantiser: str) -> None:
    p = torch.zeros(3, 10)
    payload = parse(selector + quantiser).compress(p, keys_of(3))
    assert torch.equal(decompress(payload), p)
    assert payload.counts() == [0, 0, 0]
    p[1, 4] = 2.0  # one client between two who send nothing
    payload = parse(selector + quantiser).compress(p, keys_of(3))
    assert payload.counts() == ([0, 0, 0] if selector.startswith("rd") else [0, 1, 0])
    assert decompress(payload).sum() == sum(payload.counts()) * 2.0


@every_row
def test_decompress_and_values_agree(row: Row) -> None:
    p = block(300)
    payload = parse(row.spec).compress(p, keys_of(len(p)), layout_of(300))
    dense, values = decompress(payload), values_of(payload)
    assert dense.shape == p.shape
    assert len(values) == sum(payload.counts())
    ones = list(payload.clients())
    assert torch.equal(torch.cat([values_of(one) for one in ones]), values)
    for one, whole in zip(ones, dense, strict=True):
        assert torch.equal(decompress(one)[0], whole)
        again = torch.zeros_like(whole)
        again[slice(None) if one.indices is None else one.indices] = sent_values(one)
        assert torch.equal(again, whole)
        assert one.indices is None or (one.indices.diff() > 0).all()  # in increasing order, none twice


@pytest.mark.parametrize("row", SELECT, ids=lambda row: row.spec)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_quantiser_values_stay_as_they_are(row: Row, dtype: torch.dtype) -> None:
    p = block(300).to(dtype) / 3
    payload = parse(row.spec).compress(p, keys_of(len(p)), layout_of(300))
    assert isinstance(payload.values, Floats)
    assert payload.values.dtype == {torch.float32: "fp32", torch.float64: "fp64"}[dtype]
    dense = decompress(payload)
    assert dense.dtype == dtype
    assert ((dense == p) | (dense == 0)).all()


def test_half_precision_needs_a_quantiser() -> None:
    p = vector("gaussian").half()
    with pytest.raises(InputError, match="float16"):
        parse("topk(0.5)").compress(p, 0)
    assert torch.equal(decompress(parse("fp32").compress(p, 0))[0], p.float())


@pytest.mark.parametrize(("n", "keys"), [(3, 2), (3, 4), (1, 0)])
def test_there_must_be_a_key_for_each_client(n: int, keys: int) -> None:
    with pytest.raises(InputError, match=f"for each of the {n} vectors, got {keys} keys"):
        parse("proportional(0.5)").compress(torch.ones(n, 5), keys_of(keys))
    with pytest.raises(InputError, match="each of the 2 vectors"):
        parse("none").compress(torch.ones(2, 5), 7)


@pytest.mark.parametrize("spec", ["none", "topk(0.5)", "rd(0.5) >> qsgd(4)"])
def test_not_finite_names_the_rows(spec: str) -> None:
    p = block(20, "gaussian", "tied", "huge", "zero", "sparse")
    p[1, 3], p[3, 0], p[4, 19] = math.nan, math.inf, -math.inf
    with pytest.raises(NotFinite) as raised:
        parse(spec).compress(p, keys_of(5))
    assert raised.value.rows == [1, 3, 4]
    with pytest.raises(NotFinite, match="row 0 holds NaN or Inf") as raised:
        parse(spec).compress(p[1], 0)
    assert raised.value.rows == [0]


# --- texts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [*(row.spec for row in TABLE), *EXAMPLES])
def test_a_text_is_read_back(spec: str) -> None:
    compressor = parse(spec)
    assert parse(str(compressor)) == compressor
    assert str(parse(str(compressor))) == str(compressor)
    assert hash(parse(spec)) == hash(compressor)


@pytest.mark.parametrize(
    ("spec", "compressor"),
    [
        ("none", Compressor(Everything())),
        (" topk( 0.99 ) ", Compressor(TopK(0.99))),
        ("topk(comp=0.99)", Compressor(TopK(0.99))),
        ("topk(snr=1.05)", Compressor(TopK(snr=1.05))),
        ("topk(0.99, per_tensor=true)>>int8(64)", TopK(0.99, per_tensor=True) >> IntBlocks(8, 64)),
        ("topk(0.99) >> bf16", TopK(0.99) >> BF16()),
        ("rd(0.9) >> sign", RandomDropping(0.9) >> Sign()),
        ("threshold(lam=0.5) >> int4", Threshold(0.5) >> IntBlocks(4)),
        ("proportional(0.5)>>qsgd(s=16, block=8)", Proportional(0.5) >> QSGD(16, 8)),
        ("topk(0.99, warmup=10)", Compressor(TopK(0.99, warmup=10))),
        ("topk(chunk=4096, k=64) >> int2", TopK(chunk=4096, k=64) >> TwoLevels()),
        ("topk(hold=5)", Compressor(TopK(hold=5))),
        ("int2(64)", Everything() >> TwoLevels(64)),
        ("lowrank(2) >> bf16", LowRank(2) >> BF16()),
        ("eden(1, unbiased=false)", Compressor(Eden(1, unbiased=False))),
        ("fp32", Everything() >> FP32()),
        ("none >> fp32()", Everything() >> FP32()),
    ],
)
def test_python_and_text_mean_the_same(spec: str, compressor: Compressor) -> None:
    assert parse(spec) == compressor
    assert parse(str(compressor)) == compressor


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    assert str(TopK(np.float64(0.9)) >> QSGD(4, 16)) == "topk(0.9) >> qsgd(4, block=16)"


def test_least_by_hand() -> None:
    """3 of 10 where 10% would be 1; with `per_tensor` 3 of each tensor, or all of a smaller one."""
    p = np.array([5.0, 1, -4, 0, 3, 2, -6, 1, 0, 7], np.float32)
    layout = Layout(("a", "b", "c"), ((4,), (2,), (4,)), ("float32",) * 3)
    assert parse("topk(0.9)").compress(p, 0, layout).indices.tolist() == [9]
    assert parse("topk(0.9, least=3)").compress(p, 0, layout).indices.tolist() == [0, 6, 9]
    assert parse("topk(0.4, least=3)").compress(p, 0, layout).indices.tolist() == [0, 2, 4, 5, 6, 9]
    assert parse("topk(0.9, least=99)").compress(p, 0, layout).indices.tolist() == list(range(10))
    each = parse("topk(0.9, per_tensor=true, least=3)")
    assert each.compress(p, 0, layout).indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 9]
    assert each.gamma(layout) == 4 / (4 - 3)
    assert each.selector.most(layout) == 3 + 2 + 3


@given(st.integers(1, 60), st.integers(1, 80), st.floats(0, 0.99))
def test_least_changes_k_and_nothing_else(d: int, least: int, comp: float) -> None:
    p = np.random.default_rng(d).standard_normal(d)
    k = max(min(least, d), round((1 - comp) * d))
    payload = TopK(comp, least=least).select(p[None], np.zeros(1), Layout.flat(d), 0)
    assert payload.indices.tolist() == np.sort(np.argsort(-abs(p), kind="stable")[:k]).tolist()  # type: ignore[union-attr]
    assert TopK(comp, least=least).most(Layout.flat(d)) == k


BAD_STAGES = [
    "what(1)", "topk", "topk()", "topk(1)", "topk(1.0)", "topk(-0.1)", "topk(1.5)", "topk('x')",
    "topk(comp='x')", "topk(0.9, snr=2)", "topk(snr=0.5)", "topk(snr='x')", "topk(snr=1e999)",
    "topk(0.9, None, true, 4, 5, 6, 7, 8, 9)", "topk(0.9, per_tensor='false')", "topk(0.9, per_tensors=true)",
    "topk(__import__('os'))", "topk(os.getcwd())", "topk(0.9", "topk 0.9)", "topk(0.9))", "topk(0.9)(0.5)",
    "topk(comp=0.9, comp=0.5)", "topk(*[0.9])", "rd", "rd(1)", "rd(-1)", "rd(None)", "threshold(0)",
    "threshold(1)", "threshold('x')", "proportional(1)", "none(1)", "fp32(1)", "bf16(3)", "sign(2)",
    "int8(0)", "int8(-1)", "int8(2.5)", "int8(16, 3)", "int8(bits=4)", "int1", "int9", "qsgd", "qsgd(0)",
    "qsgd(1.5)", "qsgd(40000)", "qsgd(16, 0)", "qsgd(16, 1, 2)", "math:pi", "math:sqrt(4)",
    "no_such_module_:Thing(1)", "math:no_such_thing", "", ">>", "topk(0.9) >>", ">> bf16",
    "qsgd(1, true)", "int8(true)", "threshold(1e-320)", f"topk(snr={10**400})", "topk(true)",
    "topk(0.9, least=0)", "topk(0.9, least=-3)", "topk(0.9, least=2.5)", "topk(0.9, least=true)",
    "topk(0.9, least='x')", "topk(0.9, least=None)", f"topk(0.9, least={2**53 + 1})", "topk(least=5)",
    "topk(snr=2, least=5)", "topk(chunk=9)", "topk(k=9)", "topk(0.9, k=9)", "topk(0.9, chunk=9)",
    "topk(chunk=9, k=9)", "topk(chunk=1, k=0)", "topk(chunk=9, k=0)", "topk(chunk=9.0, k=1)",
    "topk(0.9, hold=5)", "topk(hold=-1)", "topk(hold=5, least=3)", "topk(hold=5, per_tensor=true)",
    "topk(chunk=9, k=1, per_tensor=true)", "topk(snr=2, warmup=3)", "topk(0.9, warmup=-1)",
    "topk(0.9, warmup=1.5)", "int2(0)", "int2(8, 2)", "lowrank", "lowrank(0)", "lowrank(257)", "lowrank(1.5)",
    "eden", "eden(0)", "eden(5)", "eden(1, 0)", "eden(1, block=3)", "eden(1, block=0)", "eden(1, true, 8, 9)",
    "eden(true)",
]  # fmt: skip
BAD_ORDERS = [
    "bf16 >> topk(0.9)", "bf16 >> sign", "topk(0.9) >> topk(0.9)", "topk(0.9) >> none",
    "topk(0.9) >> bf16 >> sign", "topk(0.9) > bf16", "topk(0.9) bf16", "lowrank(1) >> int8",
    "lowrank(1) >> sign", "eden(1) >> bf16", "topk(0.9) >> eden(1)", "topk(0.9) >> lowrank(1)",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_STAGES + BAD_ORDERS)
def test_malformed_texts_name_the_field(text: str) -> None:
    with pytest.raises(InputError, match=r"^`downlink`:? "):
        parse(text, "downlink")


@pytest.mark.parametrize("text", [text for text in BAD_STAGES if "(" in text])
def test_malformed_texts_name_the_field_in_a_pair(text: str) -> None:
    with pytest.raises(InputError, match=r"^`downlink`:? "):
        parse(f"topk(0.9) >> {text}", "downlink")


def test_no_code_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (
        "topk(print('run'))",
        "topk(0.9 or print('run'))",
        "topk([print('run')])",
        "topk(f'{print(1)}')",
    ):
        with pytest.raises(InputError):
            parse(text)
    assert not capsys.readouterr().out


def test_a_text_of_a_stranger_names_registered_stages_only(capsys: pytest.CaptureFixture[str]) -> None:
    """An untrusted text calls and imports nothing, not even modules that exist."""
    own = f"{__name__}:EveryNth(2)"
    for text in (
        "builtins:print('run')",
        "this:Zen",
        own,
        f"topk(0.5) >> {__name__}:Halves",
        f"{own} >> bf16",
    ):
        with pytest.raises(InputError, match=r"^`x`: this text may not import a module: "):
            parse(text, "x", trust=False)
    assert parse(own, trust=False, own=[EveryNth]) == parse(own)
    assert parse("topk(0.5) >> bf16", trust=False, own=[EveryNth]) == parse("topk(0.5) >> bf16")
    with pytest.raises(InputError, match="must be a subclass of"):
        parse("builtins:print('run')")
    assert not capsys.readouterr().out
    assert "this" not in sys.modules


# --- a user's own -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EveryNth(Selector):
    """Keeps every n-th coordinate."""

    n: int
    start: int = 0

    def keep(self, p: Tensor, keys: Tensor, layout: Layout, t: int) -> Tensor:
        return (torch.arange(p.shape[1]) % self.n == self.start).expand(p.shape)

    def gamma(self, layout: Layout) -> float:
        return 1.0


@dataclass(frozen=True)
class Halves(Quantiser):
    """Rounds towards 0, to a multiple of 1/2."""

    def quantise(self, values: Tensor, offsets: Tensor, keys: Tensor) -> Floats | Levels:
        return Floats((values * 2).trunc().float() / 2, "fp32")

    def gamma(self, n: int) -> float:
        return 1.0


def test_a_selector_and_a_quantiser_of_ones_own() -> None:
    p = torch.tensor([1.2, 2.2, -3.3, 4.4, 0.3])
    own = EveryNth(2) >> Halves()
    assert decompress(own.compress(p, 0)).tolist() == [[1.0, 0, -3.0, 0, 0]]
    assert own.gamma(Layout.flat(5)) == 1
    assert parse(f"{__name__}:EveryNth(2) >> {__name__}:Halves") == own
    assert str(own) == f"{__name__}:EveryNth(2) >> {__name__}:Halves"
    for text in (
        f"{__name__}:EveryNth(3, start=1)",
        f"{__name__}:Halves()",
        f"topk(0.5) >> {__name__}:Halves",
    ):
        assert parse(str(parse(text))) == parse(text)
        assert satisfies_definition_1(Row(text), p)
        assert_block_is_one_by_one(Row(text), block(30))
    for row in QUANTISE:
        assert_block_is_one_by_one(Row(f"{__name__}:EveryNth(2) >> {row.spec}"), block(30))
    with pytest.raises(InputError, match="`x`: "):
        parse(f"{__name__}:EveryNth", "x")


# --- the same on a GPU --------------------------------------------------------------------------------


def assert_same_on(device: str, row: Row, p: Tensor) -> None:
    compressor, layout, keys = parse(row.spec), layout_of(p.shape[1]), keys_of(len(p))
    here = compressor.compress(p, keys, layout)
    there = compressor.compress(p.to(device), keys.to(device), layout)
    assert_same(here, there)
    assert torch.equal(decompress(here), decompress(there).cpu())
    for one, vector_of_one, key in zip(here.clients(), p, keys.tolist(), strict=True):
        assert_same(one, compressor.compress(vector_of_one.to(device), key, layout))


TRIPLES = [
    ("gaussian", "heavy-tailed", "sparse"),
    ("tied", "constant", "half steps"),
    ("zero", "spike", "mixed magnitudes"),
    ("denormal", "nearly denormal", "huge"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("families", TRIPLES, ids=", ".join)
@every_row
def test_cuda_gives_the_same_bits(row: Row, families: tuple[str, ...]) -> None:
    assert_same_on("cuda", row, block(5000, *families))
    assert_same_on("cuda", row, block(5000, *families).double() / 3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "spec", ["sign", "qsgd(16, block=40000)", "threshold(0.9) >> sign", "topk(snr=2) >> sign"]
)
def test_cuda_rounds_sums_the_same(spec: str) -> None:
    assert_same_on("cuda", Row(spec), torch.stack([nearly_halfway(seed, 40_000) for seed in range(3)]))


# --- NumPy and torch by the same code -----------------------------------------------------------------


def arrays_of(payload: Payload) -> list[Any]:
    values = payload.values
    parts = [values.data] if isinstance(values, Floats) else [values.levels, values.scales]
    keys = [part.keys for part in (payload.mask, payload.basis) if hasattr(part, "keys")]
    return [payload.offsets, payload.indices, *parts, *keys]


@every_row
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_and_torch_give_the_same_bits(row: Row, dtype: Any) -> None:
    compressor, layout = parse(row.spec), layout_of(D)
    p = block(D).numpy().astype(dtype)
    of_torch = compressor.compress(torch.from_numpy(p), keys_of(len(p)), layout)
    of_numpy = compressor.compress(p, keys_of(len(p)).numpy(), layout)
    assert all(each is None or isinstance(each, np.ndarray) for each in arrays_of(of_numpy))
    assert_same(of_torch.numpy(), of_numpy)
    for convert in (decompress, lambda payload: values_of(payload)):
        assert np.array_equal(convert(of_torch).numpy(), convert(of_numpy))
    for change in (plus, minus):
        with np.errstate(over="ignore"):  # of which torch says nothing
            assert np.array_equal(change(torch.from_numpy(p), of_torch).numpy(), change(p, of_numpy))


@QUIET
@given(st.lists(float32s, min_size=1, max_size=40))
def test_bf16_rounds_alike(numbers: list[float]) -> None:
    array = np.float32(numbers).clip(-(2.0**127), 2.0**127)
    bits = to_bf16(torch.from_numpy(array)).numpy()
    assert np.array_equal(to_bf16(array), bits)
    assert np.array_equal(from_bf16(bits), from_bf16(torch.from_numpy(bits)).numpy())


@dataclass(frozen=True)
class WarmingUp(Selector):
    """All coordinates in the first round, every tenth later: a density that changes over rounds."""

    def keep(self, p: Any, keys: Any, layout: Layout, t: int) -> Any:
        kept = arange(p.shape[1], p) % (1 if t == 0 else 10) == 0
        return module_of(p).broadcast_to(kept, p.shape)

    def gamma(self, layout: Layout) -> float:
        return 1.0


def test_a_density_may_change_over_rounds() -> None:
    compressor = Compressor(WarmingUp(), BF16())
    for p in (torch.ones(100), np.ones(100, np.float32)):
        assert [sum(compressor.compress(p, 0, None, t).counts()) for t in (0, 1, 5)] == [100, 10, 10]
