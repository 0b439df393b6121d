"""The parts of the fast engines: timetable, rules, convolution, recorder, pool, and what to fall back on."""

from __future__ import annotations

import copy
import platform
import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from cfedavg import Config, InputError, Task
from cfedavg import run as run_and_draw
from cfedavg.channel import Channel
from cfedavg.core.keys import Purpose, key, keys, signed
from cfedavg.optimise.local import SGD, Fixed
from cfedavg.simulate import engines
from cfedavg.simulate.engines import Partners, blocks, choose_engine
from cfedavg.simulate.engines.batched import Batched
from cfedavg.simulate.local import after, batches, channels_last, local_steps
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.vectorised import artifacts, convolution, layers, replacements
from cfedavg.simulate.vectorised import batches as batches_module
from cfedavg.simulate.vectorised import recorder as recorder_module
from cfedavg.simulate.vectorised.batches import Hosted, Pool, Resident, Rows, Timetable, Turn
from cfedavg.simulate.vectorised.convolution import IMAGES, OPERANDS, convolve, from_stored
from cfedavg.simulate.vectorised.recorder import Recorder, _Inputs
from cfedavg.simulate.vectorised.replacements import NoDropout, Replacements, masks_hold
from cfedavg.simulate.vectorised.sizes import MOST, WORTH, busy_times, choose_sizes, fit, halve
from cfedavg.simulate.vectorised.step import Stack, Step
from cfedavg.task import Tensors
from tests.conftest import blobs
from tests.simulate.test_engines import MODELS, Transformer, agree, images, play, seeded
from tests.simulate.test_run import Stop, assert_same_run, rows_without_time

run = partial(run_and_draw, draw=False)
CPU = torch.device("cpu")
DOUBLE = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "compiling", False)


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


# Timetable


class Numbers:
    """Samples whose batch is the rows themselves."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def batch(self, rows: np.ndarray) -> np.ndarray:
        return rows


@st.composite
def timetables(draw: st.DrawFn) -> Timetable:
    n = draw(st.integers(1, 7))
    alike = draw(st.booleans())
    samples = (
        [draw(st.integers(1, 12))] * n
        if alike
        else draw(st.lists(st.integers(1, 12), min_size=n, max_size=n))
    )
    steps = sorted(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), reverse=True)
    clients = draw(st.lists(st.integers(0, 10_000), min_size=n, max_size=n))
    seeds = draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=n, max_size=n))
    rounds = draw(st.lists(st.integers(0, 1000), min_size=n, max_size=n))
    return timetable_of(clients, samples, steps, draw(st.integers(1, 9)), seeds, rounds)


def timetable_of(
    clients: list[int],
    samples: list[int],
    steps: list[int],
    batch_size: int,
    seeds: list[int] | None = None,
    rounds: list[int] | None = None,
) -> Timetable:
    each = [np.array(numbers or [0] * len(clients)) for numbers in (samples, steps, seeds, rounds)]
    return Timetable(clients, each[0], each[1], batch_size, each[2], each[3])


def taken(timetable: Timetable, turns: Iterator[Turn], length: int) -> list[list[list[int]]]:
    """The rows that count, of every step of every client."""
    found: list[list[list[int]]] = [[] for _ in timetable.clients]
    rows = Rows(timetable, CPU)
    rows.length = length
    for turn in turns:
        at = rows.at(turn)
        who: Any = turn.clients
        if isinstance(turn.clients, int):
            who = range(turn.clients if turn.active is None else turn.active)
            if turn.active is not None:
                assert rows.active(turn).tolist() == [c < turn.active for c in range(turn.clients)]
        valid = rows.valid(turn).sum(1).tolist() if turn.masked else None
        assert at.shape == (turn.clients if isinstance(turn.clients, int) else len(turn.clients), turn.width)
        for place, client in enumerate(who):
            size = turn.width if valid is None else valid[place]
            assert turn.k[place] == len(found[client])
            found[client].append(at[place, :size].tolist())
        assert all(row < timetable.samples[c] for c, r in zip(who, at.tolist(), strict=False) for row in r)
    return found


@given(timetables(), st.integers(1, 5), st.booleans())
@settings(max_examples=120)
def test_every_client_goes_through_its_own_batches(timetable: Timetable, length: int, together: bool) -> None:
    sizes = halve(len(timetable.clients))
    turns = timetable.together(sizes) if together else timetable.apart()
    found = taken(timetable, turns, length)
    for i, client in enumerate(timetable.clients):
        key = int(timetable.seeds[i]), int(timetable.rounds[i]), client
        own = batches(Numbers(int(timetable.samples[i])), timetable.batch_size, *key)
        assert found[i] == [rows.tolist() for rows in islice(own, int(timetable.steps[i]))]


def test_rows_are_made_in_stretches_that_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the table of batches nor the orders have more than 2**24 entries, or they are of one step."""
    timetable = timetable_of([0, 1], [2**22, 3], [50, 9], 4)
    assert Rows(timetable, CPU).length == 2
    assert Rows(timetable_of([0], [2**25], [1], 4), CPU).length == 2**22
    made = []
    monkeypatch.setattr(
        Rows, "_table", lambda self, start, stop: made.append((start, stop)) or torch.zeros(4, 2, 4)
    )
    small = timetable_of([0, 1], [2**21, 4], [9, 9], 4)
    rows = Rows(small, CPU)
    for turn in small.together([2]):
        rows.at(turn)
    assert made == [(0, 4), (4, 8), (8, 9)]


@given(st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=4), st.integers(1, 50))
def test_sizes_of_blocks_are_few_and_save_steps(blocks: list[list[int]], floor: int) -> None:
    times = busy_times(blocks)
    assert times.sum() == sum(max(steps, default=0) for steps in blocks)
    assert times @ np.arange(len(times)) == sum(map(sum, blocks))
    sizes = choose_sizes(times, floor)
    assert sizes[0] == len(times) - 1
    assert sizes == tuple(sorted(set(sizes), reverse=True))
    assert len(sizes) <= MOST

    def cost(some: Sequence[int]) -> int:
        return sum(int(n) * max(fit(a, some), floor) for a, n in enumerate(times))

    for size in sizes[1:]:
        assert cost([each for each in sizes if each != size]) > cost(sizes)
    if sizes[0] > 0 and len(sizes) < MOST:  # no further size is worth a compilation
        others = [cost(sorted({*sizes, a}, reverse=True)) for a in range(1, len(times))]
        assert min(others) >= (1 - WORTH) * cost(sizes)


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_block_that_begins_smaller_is_filled_up(busy: int, n: int) -> None:
    n = max(busy, n)
    assert busy <= fit(busy, halve(n)) < 2 * busy or n == busy
    assert len(halve(n)) <= n.bit_length() + 1


@given(timetables())
def test_clients_that_differ_ask_for_one_kind_of_step_in_each_size(timetable: Timetable) -> None:
    sizes = choose_sizes(busy_times([timetable.steps.tolist()]), 1)
    turns = list(timetable.together(sizes))
    kinds = {(turn.clients, turn.width, turn.masked, turn.active is None) for turn in turns}
    assert len(kinds) <= len(sizes) * (2 if timetable.uniform else 1)


@pytest.mark.parametrize("options", [{"local_epochs": 3}, {"local_steps": "1..9"}])
def test_every_kind_of_step_is_prepared_before_the_first_round(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients have other numbers of samples and of steps; no round asks for a step of another kind."""
    generator = torch.Generator().manual_seed(0)
    sizes = [9, 200, 31, 40, 70, 12, 12, 90, 100, 55, 20, 3]
    each = [
        (torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]
    task = Task(nn.Linear(4, 3), each)
    config = Config(rounds=3, batch_size=8, engine="batched", clients=len(each), **options)
    plan, asked = Plan(config, task), [list[Any](), list[Any]()]
    call = Recorder.__call__
    monkeypatch.setattr(Recorder, "prepare", lambda self, *args: asked[0].append(_Inputs(*args).kind))
    monkeypatch.setattr(
        Recorder, "__call__", lambda self, *args: asked[1].append(_Inputs(*args).kind) or call(self, *args)
    )
    partners = Partners([(plan, task)])
    engine = choose_engine(config, plan, task, partners=partners)
    many, state = partners.trainer, engine.start()
    assert many is not None
    asked[1].clear()
    many.prepare(partners.first_requests(*many.vectors.read()))
    for _ in range(3):
        state, _ = engine.round(state)
    prepared, used = (set(map(repr, kinds)) for kinds in asked)
    assert used <= prepared
    assert 1 < len(prepared) == len(asked[0]) <= MOST


WORDS = st.integers(-(2**63), 2**63 - 1)


@given(
    st.integers(-(2**63), 2**64 - 1), WORDS, st.lists(WORDS, min_size=1, max_size=5), st.sampled_from(Purpose)
)
def test_keys_of_arrays_are_keys(seed: int, t: int, clients: list[int], purpose: Purpose) -> None:
    found = keys(seed, t, np.array(clients, np.int64), int(purpose))
    assert found.tolist() == [signed(key(seed, t, client, purpose)) for client in clients]


# Replacements: the same values and gradients as torch's own functions


def differentiated(function: Any, tensors: tuple[Tensor, ...], mode: Any) -> list[Tensor]:
    """The value of a function under a mode, and the gradients of a sum over it with uneven weights."""

    def total(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        with mode():
            out = function(*leaves)
        uneven = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape).sin()
        return (out * uneven).sum(), out

    grads, (_, out) = grad_and_value(total, argnums=tuple(range(len(tensors))), has_aux=True)(*tensors)
    return [out, *grads]


def check_rule(function: Any, *shapes: tuple[int, ...]) -> None:
    """A function of tensors: alone, and for three clients at once with tensors of their own."""
    tensors = tuple(draws(3, *shape, seed=i) for i, shape in enumerate(shapes))
    each = [differentiated(function, one, nullcontext) for one in zip(*tensors, strict=True)]
    mine = differentiated(function, tuple(t[0] for t in tensors), Replacements)
    torch.testing.assert_close(mine, each[0], **EXACT)
    at_once = vmap(lambda *one: tuple(differentiated(function, one, Replacements)))(*tensors)
    for found, expected in zip(at_once, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(expected), **EXACT)


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a rule, whether it did the work itself."""
    found: list[bool] = []

    def watched(rule: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(*args, **kwargs)
        found.append(out is not NotImplemented)
        return out

    for function, rule in replacements.LAYERS.items():
        monkeypatch.setitem(replacements.LAYERS, function, partial(watched, rule))
    monkeypatch.setattr(replacements, "batch_norm", partial(watched, replacements.batch_norm))
    return found


MEAN = draws(4, seed=7)
NORMS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), [(5, 4, 3, 2)]),
    "2d": (lambda x: F.batch_norm(x, None, None, training=True), [(5, 4)]),
    "3d, eps": (lambda x: F.batch_norm(x, None, None, training=True, eps=0.3), [(5, 4, 3)]),
    "affine": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(5, 4, 3, 2), (4,), (4,)]),
    "large images": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(3, 2, 17, 16), (2,), (2,)]),
    "weight only": (lambda x, w: F.batch_norm(x, None, None, w, None, True), [(5, 4, 3, 2), (4,)]),
    "bias only": (lambda x, b: F.batch_norm(x, None, None, None, b, True), [(5, 4), (4,)]),
    "eval": (lambda x, w, b: F.batch_norm(x, MEAN, MEAN.exp(), w, b, False), [(5, 4, 2, 2), (4,), (4,)]),
    "group norm": (lambda x: F.group_norm(x, 2), [(3, 6, 2, 3)]),
    "group norm, affine": (lambda x, w, b: F.group_norm(x, 3, w, b, 0.1), [(3, 6, 4), (6,), (6,)]),
    "group norm, 2d": (lambda x, w: F.group_norm(x, 2, w), [(3, 6), (6,)]),
    "layer norm": (lambda x, w: F.layer_norm(x, (4,), w), [(3, 4), (4,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, caught: list[bool]) -> None:
    function, shapes = NORMS[name]
    check_rule(function, *shapes)
    assert all(caught)
    assert bool(caught) == (name != "layer norm")


@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_running_statistics(momentum: float) -> None:
    """Two batches in training, then evaluation: the same statistics as torch's."""
    mine, its = (nn.BatchNorm2d(3, momentum=momentum).double() for _ in range(2))
    for seed in range(2):
        x = 2 * draws(4, 3, 2, 2, seed=seed) + 1
        with Replacements():
            mine(x)
        its(x)
    torch.testing.assert_close(dict(mine.named_buffers()), dict(its.named_buffers()), **EXACT)
    with Replacements():
        found = mine.eval()(x)
    torch.testing.assert_close(found, its.eval()(x), **EXACT)


def test_a_batch_of_one_value_has_no_variance() -> None:
    with Replacements(), pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(3)(torch.zeros(1, 3))


POOLS: list[tuple[dict[str, Any], tuple[int, ...], bool]] = [
    ({"kernel_size": 2}, (2, 3, 4, 6), True),
    ({"kernel_size": 3}, (2, 3, 6, 9), True),
    ({"kernel_size": (2, 2), "stride": (2, 2)}, (2, 3, 5, 7), True),
    ({"kernel_size": 3, "stride": 3}, (2, 1, 8, 7), True),
    ({"kernel_size": 2}, (3, 4, 5), True),
    ({"kernel_size": 2, "stride": 1}, (2, 3, 4, 4), False),
    ({"kernel_size": 3, "stride": 2, "padding": 1}, (2, 3, 6, 6), False),
    ({"kernel_size": 2, "dilation": 2}, (2, 3, 6, 6), False),
    ({"kernel_size": 2, "ceil_mode": True}, (2, 3, 5, 5), False),
    ({"kernel_size": (2, 3)}, (2, 3, 6, 6), False),
    ({"kernel_size": 4}, (2, 3, 8, 8), False),
]


@pytest.mark.parametrize(("window", "shape", "ours"), POOLS)
def test_max_pool(window: dict[str, Any], shape: tuple[int, ...], ours: bool, caught: list[bool]) -> None:
    check_rule(lambda x: F.max_pool2d(x, **window), shape)
    assert set(caught) == {ours}


@pytest.mark.parametrize("k", [2, 3])
def test_max_pool_takes_the_first_among_equals_and_nan(k: int) -> None:
    """Few different values, so that most windows have ties; gradients show which one was taken."""
    x = draws(2, 3, 7, 8).sign() * (draws(2, 3, 7, 8, seed=1) > 0)
    check = partial(differentiated, lambda x: F.max_pool2d(x, k))
    torch.testing.assert_close(check((x,), Replacements), check((x,), nullcontext), **EXACT)
    x[0, 0, 0, 0] = x[0, 1, 1, 1] = x[1, 2, 0, 1] = x[1, 2, 1, 0] = torch.nan
    mine, its = check((x,), Replacements), check((x,), nullcontext)
    assert its[0].isnan().any()
    torch.testing.assert_close(mine, its, **EXACT, equal_nan=True)


def test_max_pool_with_indices_is_left_to_torch() -> None:
    x = draws(1, 1, 4, 4)
    with Replacements():
        found = F.max_pool2d(x, 2, return_indices=True)
    torch.testing.assert_close(found, F.max_pool2d(x, 2, return_indices=True))


@pytest.mark.parametrize(("size", "ours"), [(1, True), ((1, 1), True), (2, False), ((1, 3), False)])
def test_adaptive_pool(size: Any, ours: bool, caught: list[bool]) -> None:
    check_rule(lambda x: F.adaptive_avg_pool2d(x, size), (2, 3, 5, 6))
    assert set(caught) == {ours}


MASK = draws(3, 4, seed=9) > 0
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"attn_mask": MASK | torch.eye(3, 4, dtype=torch.bool)},
    "one may attend to nothing": {"attn_mask": MASK & torch.tensor([[True], [False], [True]])},
    "added mask": {"attn_mask": draws(3, 4, seed=8)},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, caught: list[bool]) -> None:
    attend = partial(F.scaled_dot_product_attention, **ATTENTION[name])
    check_rule(attend, (2, 2, 3, 5), (2, 2, 4, 5), (2, 2, 4, 6))
    assert all(caught)


def test_attention_of_groups_of_heads_is_left_to_torch() -> None:
    assert layers.attention(*[torch.zeros(1, 2, 3, 4)] * 3, enable_gqa=True) is NotImplemented


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [None, MASK[:, :3] | torch.eye(3, dtype=torch.bool)])
def test_multi_head_attention(need_weights: bool, mask: Tensor | None, caught: list[bool]) -> None:
    module = seeded(lambda: nn.MultiheadAttention(4, 2, batch_first=True)).double()
    hidden = None if mask is None else ~mask

    def attend(x: Tensor) -> Tensor:
        out, weights = module(x, x, x, need_weights=need_weights, attn_mask=hidden)
        assert (weights is not None) == need_weights
        return out if weights is None else torch.cat([out, weights], -1)

    check_rule(attend, (2, 3, 4))
    assert all(caught)


def test_steady_attention_drops_nothing() -> None:
    module = seeded(lambda: nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)).double()
    x = draws(2, 3, 4)
    for need_weights in (True, False):
        with NoDropout(), Replacements():
            found = module.train()(x, x, x, need_weights=need_weights)[0]
            dropped = F.scaled_dot_product_attention(x, x, x, None, 0.5)
        torch.testing.assert_close(found, module.eval()(x, x, x)[0], **EXACT)
        torch.testing.assert_close(dropped, F.scaled_dot_product_attention(x, x, x), **EXACT)


# Replacements: means over the rows that count

N, C, L = 6, 4, 3
VALID = torch.tensor([True, False, True, True, False, True])
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=DOUBLE)


def classes(*shape: int) -> Tensor:
    return torch.randint(C, shape, generator=torch.Generator().manual_seed(3))


def some_ignored(labels: Tensor, value: int) -> Tensor:
    return labels.index_fill(0, torch.tensor([0, 1]), value)


def probabilities(*shape: int) -> Tensor:
    return draws(*shape, seed=4).softmax(1)


ENTROPY: dict[str, tuple[tuple[int, ...], Tensor, dict[str, Any]]] = {
    "plain": ((N, C), classes(N), {}),
    "weights": ((N, C), classes(N), {"weight": WEIGHTS}),
    "ignored": ((N, C), some_ignored(classes(N), -100), {}),
    "ignored class": ((N, C), classes(N), {"ignore_index": 1, "weight": WEIGHTS}),
    "smoothing": ((N, C), classes(N), {"label_smoothing": 0.2}),
    "smoothing and weights": ((N, C), classes(N), {"label_smoothing": 0.2, "weight": WEIGHTS}),
    "all at once": (
        (N, C),
        some_ignored(classes(N), 2),
        {"label_smoothing": 0.2, "weight": WEIGHTS, "ignore_index": 2},
    ),
    "probabilities": ((N, C), probabilities(N, C), {}),
    "probabilities and weights": ((N, C), probabilities(N, C), {"weight": WEIGHTS, "label_smoothing": 0.1}),
    "sequences": ((N, C, L), classes(N, L), {}),
    "sequences with all": (
        (N, C, L),
        some_ignored(classes(N, L), -100),
        {"weight": WEIGHTS, "label_smoothing": 0.1},
    ),
    "sequences of probabilities": ((N, C, L), probabilities(N, C, L), {"weight": WEIGHTS}),
    "images": ((N, C, L, 2), classes(N, L, 2), {"weight": WEIGHTS}),
}


def check_mean(function: Any, x: Tensor, *targets: Tensor) -> None:
    """The mean over the rows that count: alone and under vmap, where clients differ in which rows do."""
    masks = torch.stack([VALID, VALID.flip(0), torch.ones(N, dtype=torch.bool)])

    def graded(x: Tensor, valid: Tensor | None, *targets: Tensor) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor) -> Tensor:
            with Replacements(valid) if valid is not None else nullcontext():
                return function(x, *targets)  # type: ignore[no-any-return]

        grad, value = grad_and_value(loss)(x)
        return value, grad

    xs = torch.stack([x, 2 * x, -x])
    values, grads = vmap(lambda x, valid: graded(x, valid, *targets))(xs, masks)
    for i, valid in enumerate(masks):
        value, grad = graded(xs[i][valid], None, *(target[valid] for target in targets))
        padded = torch.zeros_like(x).index_put((valid,), grad)
        torch.testing.assert_close((values[i], grads[i]), (value, padded), **EXACT)
        torch.testing.assert_close(graded(xs[i], valid, *targets), (value, padded), **EXACT)


@pytest.mark.parametrize("name", ENTROPY)
def test_cross_entropy_of_the_rows_that_count(name: str) -> None:
    shape, target, options = ENTROPY[name]
    check_mean(partial(F.cross_entropy, **options), draws(*shape), target)
    if not target.is_floating_point() and "label_smoothing" not in options:
        check_mean(lambda x, y: F.nll_loss(x.log_softmax(1), y, **options), draws(*shape), target)


MEANS: dict[str, Any] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": partial(F.smooth_l1_loss, beta=0.5),
    "huber": partial(F.huber_loss, delta=0.7),
    "bce with logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=WEIGHTS),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), weight=WEIGHTS),
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "poisson": lambda x, y: F.poisson_nll_loss(x, y.exp()),
    "module": nn.MSELoss(),
    "method": lambda x, y: (x - y).square().mean(),
    "function": lambda x, y: torch.mean((x - y).cos()),
    "one axis first": lambda x, y: (x * y).mean(1).mean(),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the engine hides it from its users
@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("shape", [(N, C), (N, L, C)])
def test_means_of_the_rows_that_count(name: str, shape: tuple[int, ...]) -> None:
    check_mean(MEANS[name], draws(*shape), draws(*shape, seed=1))


def test_means_of_one_number_a_sample() -> None:
    check_mean(F.mse_loss, draws(N), draws(N, seed=1))


UNTOUCHED: dict[str, Any] = {
    "sum": lambda x: F.mse_loss(x, 2 * x, reduction="sum"),
    "none": lambda x: F.cross_entropy(x, classes(N), reduction="none"),
    "entropy sum": lambda x: F.cross_entropy(x, classes(N), reduction="sum"),
    "axis": lambda x: x.mean(0),
    "named axis": lambda x: torch.mean(x, dim=1),
    "other rows": lambda x: x.T.mean(),
    "other loss": lambda x: F.l1_loss(x.T, 2 * x.T),
    "one number": lambda x: x[0, 0].mean() + F.mse_loss(x[0, 0], x[1, 0]),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_is_no_mean_over_the_batch_is_left_alone(name: str) -> None:
    x = draws(N, C)
    with Replacements(VALID):
        found = UNTOUCHED[name](x)
    torch.testing.assert_close(found, UNTOUCHED[name](x), rtol=0, atol=0)


# Whether rows that do not count leave a step as it is


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    """Every sample against every other."""
    z = F.normalize(model(batch[0]))
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def seventh(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 7


def entropy_and_weights(model: nn.Module, batch: Any) -> Tensor:
    """A mean over a weight of as many rows as a batch has samples."""
    return F.cross_entropy(model(batch[0]), batch[1]) + next(iter(model.parameters())).mean()


def weighted(model: nn.Module, batch: Any) -> Tensor:
    """Weights of classes that the loss brings along."""
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS[:3], label_smoothing=0.1)


def dropping() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    model = Transformer()
    model.layer = layer
    return model


def mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(288, 8), nn.ReLU(), *more, nn.Linear(8, 3))


HOLDS: dict[str, tuple[Any, Any, bool]] = {
    "cnn": (MODELS["cnn"], None, True),
    "group norm": (MODELS["group norm"], None, True),
    "transformer": (Transformer, None, True),
    "dropout": (lambda: mlp(nn.Dropout(0.5)), None, True),
    "dropout in attention": (dropping, None, True),
    "weights of classes": (mlp, weighted, True),
    "batch norm": (MODELS["batch norm"], None, False),
    "contrastive": (mlp, contrastive, False),
    "a sum over seven": (mlp, seventh, False),
    "a mean over weights": (mlp, entropy_and_weights, False),
}


@pytest.mark.parametrize("name", HOLDS)
def test_whether_masks_hold(name: str) -> None:
    make, loss, holds = HOLDS[name]
    task = images(seeded(make), m=1, n=8)
    task = Task(task.model, task.clients, loss=loss or task.loss)
    batch = task.clients[0].batch(np.arange(8))
    assert masks_hold(task.model, task.loss, batch, 8) == holds


def test_masks_do_not_hold_where_a_batch_is_not_made_of_rows() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"]) * batch["scale"]

    batch = {"x": draws(4, 288), "y": classes(4) % 3, "scale": torch.tensor(2.0)}
    assert not masks_hold(mlp(), loss, batch, 4)
    two = (draws(2, 2, 12, 12), torch.tensor([0, 1]))  # one sample fewer is too few for BatchNorm
    assert not masks_hold(mlp(nn.BatchNorm1d(8)), images(mlp(), m=1).loss, two, 2)


@pytest.mark.parametrize("loss", [contrastive, seventh, entropy_and_weights, weighted])
def test_any_loss_is_right_with_ragged_clients(loss: Any) -> None:
    """The batches of 8 are as many as the rows of the first weight."""
    small = images(seeded(mlp), m=3, n=9, ragged=2)
    task = Task(small.model, small.clients, test=small.test, loss=loss)
    agree(task, "batched", "cpu", local_steps="4,2,3", batch_size=8, eta_local=0.05)


def test_frozen_parameters() -> None:
    task = images(seeded(mlp), m=3)
    task.model[1].weight.requires_grad_(False)
    agree(task, "batched", "cpu", local_epochs=1, batch_size=6)


def test_steps_with_tensors_from_elsewhere_are_written_down() -> None:
    """Frozen parameters, and weights that the loss brings along: nothing runs slower than it could."""
    small = images(seeded(mlp), m=2, n=4)
    small.model[1].weight.requires_grad_(False)
    said: list[str] = []
    trained(Config(precision="float64"), Task(small.model, small.clients, loss=weighted), said)
    assert said == ["engine: batched on cpu, float64: as asked for"]


# Convolution

MOVES: list[dict[str, Any]] = [
    {},
    {"stride": 2},
    {"stride": (1, 2), "padding": 1},
    {"padding": (2, 0)},
    {"dilation": 2, "padding": 2},
    {"stride": 3, "padding": 2},
    {"dilation": (1, 2)},
]


def convolved(moves: dict[str, Any], x: Tensor, w: Tensor, b: Tensor | None, ours: bool) -> Any:
    """Values and gradients of three clients at once."""

    def total(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
        y = convolve("float64", x, w, b, **moves) if ours else torch.conv2d(x, w, b, **moves)
        return (y * torch.arange(y[0].numel(), dtype=DOUBLE).view(y.shape[1:]).sin()).sum(), y

    inputs = (x, w) if b is None else (x, w, b)
    function = grad_and_value(
        lambda *a: total(*a, *[None] * (3 - len(a))), tuple(range(len(inputs))), has_aux=True
    )
    grads, (_, y) = vmap(function)(*inputs)
    return y, grads


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("moves", MOVES)
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (3, 2), (5, 5)])
def test_convolution(kernel: tuple[int, int], moves: dict[str, Any]) -> None:
    x, w, b = draws(3, 2, 3, 10, 9), draws(3, 4, 3, *kernel, seed=1), draws(3, 4, seed=2)
    found, expected = (convolved(moves, x, w, b, ours) for ours in (True, False))
    torch.testing.assert_close(found, expected, **EXACT)
    found, expected = (convolved(moves, x, w, None, ours) for ours in (True, False))
    torch.testing.assert_close(found, expected, **EXACT)


def test_the_first_layer_needs_no_gradient_of_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(convolution.InputGrad, "operator", refused)
    x, w = draws(3, 2, 3, 6, 6), draws(3, 4, 3, 3, 3, seed=1)
    found = vmap(grad_and_value(lambda w, x: convolve("float64", x, w).sum()))(w, x)
    expected = [grad_and_value(lambda w, x=x: torch.conv2d(x, w).sum())(w) for x, w in zip(x, w, strict=True)]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*expected, strict=True))), **EXACT)


def test_a_kernel_that_clients_share() -> None:
    x, w = draws(3, 2, 3, 6, 6), draws(4, 3, 3, 3, seed=1)
    found = vmap(lambda x: convolve("float64", x, w))(x)
    torch.testing.assert_close(found, torch.stack([torch.conv2d(each, w) for each in x]), **EXACT)


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"padding": "same"},
        {"stride": 2, "dilation": 2},
        {"precision": None},
        {"shape": (2, 8, 8)},
    ],
)
def test_what_convolutions_are_left_to_torch(options: dict[str, Any]) -> None:
    moves = {name: value for name, value in options.items() if name not in ("precision", "shape")}
    x = draws(*options.get("shape", (3, 2, 8, 8)))
    w = draws(4, 2 // options.get("groups", 1), 3, 3)
    assert convolve(options.get("precision", "float64"), x, w, None, **moves) is NotImplemented


@pytest.mark.parametrize("name", ["cnn", "batch norm"])
def test_steps_with_our_convolutions(name: str) -> None:
    """A step by our operators, listed by make_fx, is the step by torch's."""
    task = images(seeded(MODELS[name]).double(), m=3)
    batch = tree_stack([client.batch(np.arange(4)) for client in task.clients])
    after_step = []
    for precision in (None, "float64"):
        stack = stacked(task.model, 3, momentum=True)
        Recorder(Step(task.model, task.loss, SGD(0.9), conv_precision=precision), CPU, print)(
            stack, batch, None, None, ETA.expand(len(stack.losses))
        )
        after_step.append(tree_leaves(stack))
    torch.testing.assert_close(*after_step, **EXACT)


ETA = torch.tensor(0.1, dtype=DOUBLE)


def tree_stack(trees: list[Any]) -> Any:
    return tree_map(lambda *leaves: torch.stack(leaves), *trees)


def stacked(model: nn.Module, n: int, *, momentum: bool = False) -> Stack:
    parameters = [torch.stack([p.detach()] * n) for p in model.parameters() if p.requires_grad]
    buffers = [torch.stack([b] * n) for b in model.buffers()]
    state = {"momentum": [torch.zeros_like(p) for p in parameters]}
    return Stack(parameters, state if momentum else {}, Fixed([], []), buffers, torch.zeros(n, dtype=DOUBLE))


SIZES = [  # m, N, C, CO, size, kernel, stride, padding, dilation
    (1, 1, 1, 1, (5, 5), (1, 1), (1, 1), (0, 0), (1, 1)),
    (3, 2, 1, 16, (28, 28), (5, 5), (1, 1), (0, 0), (1, 1)),
    (2, 3, 3, 17, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 5, 16, 3, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
    (4, 7, 17, 33, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 3, 32, 64, (8, 8), (5, 5), (1, 1), (2, 2), (1, 1)),
    (2, 3, 64, 32, (7, 7), (1, 1), (2, 2), (0, 0), (1, 1)),
    (3, 2, 64, 64, (9, 9), (3, 3), (3, 3), (2, 2), (1, 1)),
    (2, 2, 32, 16, (10, 9), (3, 2), (1, 2), (0, 1), (1, 1)),
    (2, 2, 16, 32, (10, 9), (3, 3), (1, 1), (2, 2), (2, 2)),
    (1, 3, 3, 8, (12, 11), (5, 3), (3, 2), (2, 1), (1, 1)),
    (1, 64, 3, 16, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1)),  # 65,536 rows: weight_grad splits the sums
    (2, 64, 32, 32, (16, 16), (3, 3), (1, 1), (1, 1), (1, 1)),
    (1, 130, 130, 20, (3, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 3, 96, 128, (9, 7), (3, 3), (2, 2), (1, 1), (1, 1)),  # in bf16, a tile of weight_grad has three taps
    (2, 3, 64, 48, (9, 11), (2, 3), (1, 1), (1, 2), (1, 2)),
    # In bf16, by `tma_kernels`:
    (2, 5, 64, 64, (32, 32), (3, 3), (1, 1), (1, 1), (1, 1)),  # boxes are parts of an image
    (
        3,
        13,
        128,
        256,
        (4, 4),
        (3, 3),
        (1, 1),
        (1, 1),
        (1, 1),
    ),  # boxes of several images; the last is not full
    (2, 3, 256, 64, (8, 8), (1, 1), (1, 1), (0, 0), (1, 1)),
    (2, 3, 64, 128, (10, 10), (3, 3), (1, 1), (0, 0), (1, 1)),  # the input's gradient does not fit
    (1, 3, 256, 256, (24, 8), (5, 2), (1, 1), (2, 1), (1, 1)),
    (1, 5, 64, 64, (12, 8), (3, 3), (1, 1), (1, 1), (1, 1)),  # boxes of four rows of twelve
    (2, 70, 64, 64, (16, 16), (3, 3), (1, 1), (2, 2), (1, 1)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "tf32", "float32"])
@pytest.mark.parametrize("sizes", SIZES)
def test_kernels(sizes: tuple[Any, ...], precision: str) -> None:
    """Each kernel against the CPU in float64, with the operands rounded as the kernel rounds them.

    Products of bf16 and TF32 numbers are exact in float32. A sum of n of them, in any order, is off by less
    than n 2^-22 times the sum of their sizes (tensor cores cut off bits where others round). Operands cut
    to TF32, which has 10 bits, put 2^-10 each on top, and a result in bf16 is rounded by 2^-9 of itself.
    """
    m, n, c, co, *moves = sizes
    shape = [number for pair in moves for number in pair]
    dtype, how = OPERANDS[precision]
    h, w = convolution.output_size(shape)
    x = from_stored(draws(m, n, *moves[0], c).to(dtype), IMAGES)
    k = from_stored(draws(m, *moves[1], c, co, seed=1).to(dtype), convolution.WEIGHTS)
    dy = from_stored(draws(m, n, h, w, co, seed=2).to(dtype), IMAGES)
    for operator, a, b in (
        (convolution.forward, x, k),
        (convolution.input_grad, dy, k),
        (convolution.weight_grad, x, dy),
    ):
        found = operator(a.cuda(), b.cuda(), shape, how)
        exact = operator(a.double(), b.double(), shape, how)
        mass = operator(a.double().abs(), b.double().abs(), shape, how)
        assert found.dtype == (torch.float32 if operator is convolution.weight_grad else dtype)
        terms = {
            convolution.forward: k[0, 0].numel(),
            convolution.input_grad: k[0, :, 0].numel(),
        }.get(operator, n * h * w)
        share = terms * 2**-22 + {"bf16": 0.0, "tf32": 2**-9 + 2**-19, "float32": 2**-20}[precision]
        rounding = 2**-8 if found.dtype == torch.bfloat16 else 0.0
        bound = share * mass + rounding * exact.abs() + 1e-30
        assert ((found.cpu().double() - exact).abs() <= bound).all(), operator


@pytest.mark.gpu
def test_weight_grad_splits_long_sums() -> None:
    """Few tiles and many rows: the sums are taken in parts; as on the CPU, and the same bits every time."""
    shape = [32, 32, 3, 3, 1, 1, 1, 1, 1, 1]
    x, dy = draws(1, 128, 3, 32, 32).float(), draws(1, 128, 16, 32, 32, seed=1).float()
    found = [convolution.weight_grad(x.cuda(), dy.cuda(), shape, "tf32x3").cpu() for _ in range(2)]
    assert torch.equal(*found)
    exact = convolution.weight_grad(x.double(), dy.double(), shape, "ieee")
    assert (found[0] - exact).abs().max() < 2**-16 * exact.abs().max()


@pytest.mark.gpu
def test_other_threads_use_the_gpu_while_a_step_is_recorded() -> None:
    """The engine counts downloads in threads, which wait for the GPU while the next round is recorded."""
    said: list[str] = []
    recorder = Recorder(Step(mlp(), F.cross_entropy, SGD()), torch.device("cuda"), said.append)
    mask = torch.tensor([True, False, True], device="cuda")
    total = torch.zeros(1, device="cuda")
    counts: list[int] = []

    def step(inputs: list[Tensor]) -> None:
        total.add_(inputs[0])
        with ThreadPoolExecutor(1) as pool:
            counts.append(pool.submit(lambda: len(mask.nonzero())).result())

    play = recorder._record(step, [torch.ones(1, device="cuda")])
    for _ in range(3):
        play([torch.full((1,), 2.0, device="cuda")])
    assert (total.item(), counts, said) == (6.0, [2], [])


# What the engines fall back on


class Branching(nn.Module):
    """Does one thing or another, as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x) if x.sum() > 0 else self.other(x)
        return out


class Scaling(Branching):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x) * x.abs().max().item()
        return out


def averaging() -> nn.Module:
    """BatchNorm without momentum asks for the number of batches as a Python number."""
    return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("make", "module"),
    [
        (Branching, "the model (Branching)"),
        (Scaling, "the model (Scaling)"),
        (averaging, "'1' (BatchNorm1d)"),
    ],
)
def test_what_vmap_cannot_handle_runs_one_client_after_another(make: Any, module: str) -> None:
    small = blobs(m=3)
    task = Task(seeded(make), small.clients, test=small.test)
    config = Config(clients=3, device="cpu")
    said: list[str] = []
    choose_engine(config, Plan(config, task), task, say=said.append)
    assert len(said) == 1
    assert said[0].startswith("engine: sequential on cpu")
    assert f"clients cannot step together: {module} fails in a step of many clients (" in said[0]
    agree(task, "auto", "cpu", batch_size=8)
    asked = config.replace(engine="batched")
    with pytest.raises(InputError, match=f"`engine` batched: {re.escape(module)} fails"):
        choose_engine(asked, Plan(asked, task), task)


def test_small_models_step_together_on_a_cpu() -> None:
    said: list[str] = []
    config = Config(clients=6, device="cpu")
    choose_engine(config, Plan(config, blobs()), blobs(), say=said.append)
    assert said == ["engine: batched on cpu, float32: the model is small"]


def trained(config: Config, task: Task, said: list[str]) -> Tensor:
    """x after one round of the batched engine."""
    config = config.replace(clients=len(task.clients), engine="batched", device="cpu")
    engine = choose_engine(config, Plan(config, task), task, say=said.append)
    return engine.round(engine.start())[0].x


def test_blocks_that_do_not_fit_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    task, config, said, sizes = blobs(m=7), Config(local_steps="1..4", precision="float64"), [], []
    expected = trained(config, task, [])
    real, fits = Recorder.__call__, 2

    def cramped(self: Recorder, stack: Stack, *args: Any) -> None:
        sizes.append(len(stack.losses))
        if len(stack.losses) > fits:
            raise torch.OutOfMemoryError
        real(self, stack, *args)

    monkeypatch.setattr(Recorder, "__call__", cramped)
    torch.testing.assert_close(trained(config, task, said), expected, rtol=1e-12, atol=1e-14)
    assert said[1:] == [
        "7 clients at once do not fit into the memory of cpu: going on with 4",
        "4 clients at once do not fit into the memory of cpu: going on with 2",
    ]
    assert max(sizes[sizes.index(4) + 1 :]) == 2
    fits = 0
    with pytest.raises(InputError, match="not even one client fits into its memory"):
        trained(config, task, said)


def test_updates_that_do_not_fit_are_compressed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(compressor="topk(0.9)", compressor_down="none", drop_rate=0.3)
    task, said, pieces = blobs(m=7), [], []
    expected = trained(config, task, [])
    real = Channel.send

    def cramped(self: Channel, g: Tensor, *args: Any, **options: Any) -> Any:
        pieces.append(len(g))
        if len(g) > 3:
            raise torch.OutOfMemoryError
        return real(self, g, *args, **options)

    monkeypatch.setattr(Channel, "send", cramped)
    assert torch.equal(trained(config, task, said), expected)
    assert pieces == [7, 4, 2, 2, 2, 1]
    assert len(said) == 1  # which engine; training was not disturbed


def test_residuals_that_do_not_fit_take_their_room_from_training(monkeypatch: pytest.MonkeyPatch) -> None:
    task, config, said = blobs(m=7), Config(precision="float64"), []
    expected = trained(config, task, [])
    real, fits = blocks.BlockEngine._kept, 2

    def cramped(self: Any, *args: Any, **options: Any) -> Any:
        if self.trainer.trainer.block > fits:
            raise torch.OutOfMemoryError
        return real(self, *args, **options)

    monkeypatch.setattr(blocks.BlockEngine, "_kept", cramped)
    torch.testing.assert_close(trained(config, task, said), expected, rtol=1e-12, atol=1e-14)
    assert said[1:] == [
        "7 clients at once do not fit into the memory of cpu: going on with 4",
        "4 clients at once do not fit into the memory of cpu: going on with 2",
    ]
    fits = 0
    with pytest.raises(InputError, match="keep `residuals` on disk"):
        trained(config, task, said)


def one_step(recorder: Recorder, task: Task, stack: Stack) -> None:
    batch = tree_stack([client.batch(np.arange(4)) for client in task.clients])
    recorder(stack, batch, None, None, ETA.expand(len(stack.losses)))


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the tools are broken\nin detail")


def late(*_: Any, **__: Any) -> Any:
    return broken


@pytest.mark.parametrize("compiler", [broken, late])
def test_a_step_that_cannot_be_compiled_runs_as_it_is(
    compiler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task, said = images(seeded(mlp).double(), m=2), []
    expected, found = stacked(task.model, 2), stacked(task.model, 2)
    step = Step(task.model, task.loss, SGD())
    recorder = Recorder(step, CPU, said.append)
    recorder.compiles = True
    monkeypatch.setenv("CFEDAVG_CACHE", str(tmp_path))
    monkeypatch.setattr(artifacts, "compile_step", compiler)
    for _ in range(2):
        one_step(recorder, task, found)
        one_step(Recorder(step, CPU, print), task, expected)
    torch.testing.assert_close(tree_leaves(found), tree_leaves(expected), **EXACT)
    assert [re.sub("about [0-9]+ s", "about N s", text) for text in said] == [
        "compiling the step of 2 clients on batches of 4, once: about N s",
        "the step cannot be compiled (RuntimeError: the tools are broken): it runs as it is, slower",
    ]
    assert not recorder.compiles


def test_a_step_is_compiled_once_in_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs that differ in what is sent, in data or in frozen values share it; other steps do not."""
    compiled: list[Any] = []
    monkeypatch.setenv("CFEDAVG_CACHE", str(tmp_path))
    monkeypatch.setattr(artifacts, "_LOADED", {})
    monkeypatch.setattr(artifacts, "compile_step", lambda graph, inputs: compiled.append(graph) or graph)

    def play(model: nn.Module, sgd: SGD, n: int = 2, compiles: bool = True) -> Stack:
        task, stack = images(model.double(), m=n), stacked(model, n)
        recorder = Recorder(Step(model, task.loss, sgd), CPU, lambda text: None)
        recorder.compiles = compiles
        one_step(recorder, task, stack)
        return stack

    found = [play(seeded(mlp), SGD()) for _ in range(3)]
    assert len(compiled) == 1
    torch.testing.assert_close(tree_leaves(found[2]), tree_leaves(found[0]), **EXACT)
    play(seeded(mlp), SGD(weight_decay=0.1))
    play(seeded(mlp), SGD(), n=3)
    assert len(compiled) == 3
    for scale in (1.0, 2.0):  # a frozen parameter is an argument of the compiled step
        model = seeded(mlp)
        first = next(model.parameters())
        first.data.mul_(scale)
        first.requires_grad_(False)
        stacks = [play(copy.deepcopy(model), SGD(), compiles=compiles) for compiles in (True, False)]
        torch.testing.assert_close(*map(tree_leaves, stacks), **EXACT)
    assert len(compiled) == 4


def test_a_step_that_cannot_be_recorded_is_launched_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    task, said = images(seeded(mlp).double(), m=2), []
    expected, found = stacked(task.model, 2), stacked(task.model, 2)
    step = Step(task.model, task.loss, SGD())
    recorder = Recorder(step, CPU, said.append)
    recorder.records = True
    monkeypatch.setattr(recorder_module, "record_graph", broken)
    for _ in range(4):
        for n in (2, 1):  # two kinds of steps: it is said once
            one_step(recorder, Task(task.model, task.clients[:n]), found.part(n))
            one_step(Recorder(step, CPU, print), Task(task.model, task.clients[:n]), expected.part(n))
    torch.testing.assert_close(tree_leaves(found), tree_leaves(expected), **EXACT)
    told = "the step cannot be recorded (RuntimeError: the tools are broken): it is launched piece by piece"
    assert said == [told]


def test_a_step_that_cannot_be_written_down_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    expected = trained(Config(precision="float64"), blobs(), [])
    monkeypatch.setattr(recorder_module, "make_fx", broken)
    torch.testing.assert_close(trained(Config(precision="float64"), blobs(), said), expected, **EXACT)
    assert "the step cannot be listed (RuntimeError: the tools are broken)" in said[1]


# Pool


def nested(n: int, seed: int) -> dict[str, Any]:
    """Samples as a dict of a tensor and a pair; one tensor holds whole numbers."""
    return {"x": draws(n, 3, seed=seed).float(), "more": [classes(n) + seed, draws(n, 2, 2, seed=-seed)]}


def test_resident_samples_are_the_samples() -> None:
    clients = [Tensors(nested(n, seed)) for seed, n in enumerate((5, 3, 8))]
    block = Pool(CPU, DOUBLE).block([clients[i] for i in (2, 0, 1)])
    assert isinstance(block, Resident)
    rows = np.array([[7, 0, 3], [4, 4, 1], [2, 0, 1]])
    for some in (None, np.array([2, 0])):
        order = [2, 0, 1] if some is None else [1, 2]
        at = rows if some is None else rows[[2, 0]]
        found = block.gather(torch.from_numpy(at), len(at) if some is None else some)
        expected = tree_stack([clients[i].batch(each) for i, each in zip(order, at, strict=True)])
        assert found["x"].dtype == DOUBLE
        assert found["more"][0].dtype == torch.int64
        torch.testing.assert_close(found["x"], expected["x"].double(), rtol=0, atol=0)
        torch.testing.assert_close(found["more"], expected["more"], rtol=0, atol=0)


class Augmented(Dataset[Any]):
    """Adds noise to a sample every time that it is asked for, and counts."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.asked = x, y, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.x[row] + torch.randn(self.x.shape[1:]), self.y[row]


def test_augmented_samples_are_made_anew_for_every_batch() -> None:
    data = [Augmented(torch.zeros(4, 2), torch.arange(4) + 10 * i) for i in range(3)]
    source = Pool(CPU, DOUBLE).block(Task(nn.Linear(2, 3), data).clients[1:])
    assert isinstance(source, Hosted)
    rows = torch.tensor([[0, 3, 2], [1, 1, 0]])
    first, second = source.gather(rows, 2), source.gather(rows, 2)
    assert first[0].dtype == DOUBLE
    assert first[0].shape == (2, 3, 2)
    assert first[1].tolist() == [[10, 13, 12], [21, 21, 20]]
    assert len(torch.cat([first[0], second[0]]).unique()) == 24
    assert source.gather(rows[:1], np.array([1]))[1].tolist() == [[20, 23, 22]]
    assert [each.asked for each in data] == [0, 6, 9]


def test_augmented_clients_train_and_do_so_again() -> None:
    """torch's generators are keyed by the round, so the noise is the same again."""
    small = blobs(m=4)
    data = [Augmented(*client.batch(np.arange(len(client)))) for client in small.clients]
    task = Task(small.model, data, test=small.test)
    config = Config(local_steps="1..4", batch_size=8)
    first = trained(config, task, [])
    asked = [each.asked for each in data]
    assert torch.equal(trained(config, task, []), first)
    assert all(count > 0 for count in asked)
    assert not torch.equal(trained(config, small, []), first)


def test_samples_leave_the_device_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Watched(Tensors):
        def __init__(self, i: int) -> None:
            super().__init__(torch.full((4, 2), float(i), dtype=DOUBLE))  # 64 bytes
            self.i = i

        def batch(self, rows: np.ndarray) -> Tensor:
            read.append(self.i)
            return super().batch(rows)  # type: ignore[no-any-return]

    clients = [Watched(i) for i in range(4)]
    monkeypatch.setattr(batches_module, "free_memory", lambda device: 4 * 128)  # room for two clients
    short = Pool(CPU, DOUBLE)
    for block in ([0, 1], [0, 1], [1, 2], [1], [0], [2, 3]):
        source = short.block([clients[i] for i in block])
        found = source.gather(torch.zeros(len(block), 1, dtype=torch.int64), len(block))
        assert found[:, 0, 0].tolist() == block
    # 0 and 1 are read; 2 drives 0 out; 1 is used again; 0 drives 2 out; 2 and 3 drive the others out.
    assert read == [0, 1, 2, 0, 2, 3]
    short.clear()
    short.block([clients[3]])
    assert read[-1] == 3
    assert len(read) == 7


def test_batches_of_any_structure() -> None:
    """Dicts and lists, a loss of one's own, ragged clients."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        guess = model(batch["x"])
        return F.mse_loss(guess, batch["more"][1].flatten(1)) + F.cross_entropy(guess, batch["more"][0] % 4)

    def metric(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = model(batch["x"])[:, 0]
        return found

    clients = [nested(5 + 2 * seed, seed) for seed in range(3)]
    task = Task(seeded(lambda: nn.Linear(3, 4)), clients, test=nested(6, 5), loss=loss, metric=metric)
    agree(task, "batched", "cpu", local_epochs=2, batch_size=4)


# One client after another


def test_channels_last_steps_are_plain_steps() -> None:
    task = images(seeded(MODELS["batch norm"]).double(), m=1)
    last = copy.deepcopy(task.model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sgd = SGD(momentum=0.9, weight_decay=0.01)
    data = [task.clients[0].batch(np.arange(i, i + 4)) for i in range(3)]
    plain = local_steps(task.model, task.loss, data, sgd, 0.1, after(3))
    moved = [channels_last(batch) for batch in data]
    assert moved[0][0].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(local_steps(last, task.loss, moved, sgd, 0.1, after(3)), plain, **EXACT)
    torch.testing.assert_close(last.state_dict(), task.model.state_dict(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_half_precision_on_a_cpu_stays_near_single(engine: str) -> None:
    """Products of bf16 numbers: each is off by 2^-8, their sums by less; the weights stay in float32."""
    task = blobs(m=3)
    config = Config(clients=3, engine=engine, device="cpu", local_steps="5", batch_size=8, compressor="none",
                    compressor_down="none")  # fmt: skip
    change = []
    for precision in ("float32", "bf16"):
        one = config.replace(precision=precision)
        runner = choose_engine(one, Plan(one, task), task)
        start = runner.start()
        change.append(runner.round(start)[0].x - start.x)
        assert start.x.dtype == torch.float32
    full, half = change
    assert 0 < (half - full).norm() < 2**-6 * full.norm()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_memory_is_kept_where_the_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc answers 1 to each setting that it takes; the numbers are those of its malloc.h."""
    real, answers = engines.ctypes.CDLL("libc.so.6"), dict[int, tuple[int, int]]()

    def mallopt(setting: int, value: int) -> None:
        answers[setting] = value, real.mallopt(setting, value)

    monkeypatch.setattr(engines.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    engines.keep_memory()
    assert answers == {-3: (1 << 30, 1), -1: (2**31 - 1, 1), -2: (64 << 20, 1)}


def test_another_c_library_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing(name: str) -> Any:
        asked.append(name)
        raise OSError(name)

    def without_mallopt(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace()

    for library in (missing, without_mallopt):
        monkeypatch.setattr(engines.ctypes, "CDLL", library)
        engines.keep_memory()
    assert asked == ["libc.so.6"] * 2


# The same again: resumed, and with dropout


def resumes(config: Config, task: Task, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "broken"
    run(config, task, out=whole)
    with pytest.raises(KeyboardInterrupt):
        run(config, task, out=out, callbacks=[Stop(1, KeyboardInterrupt)])
    assert rows_without_time(out)[-1]["round"] < config.rounds - 1
    assert (out / "checkpoint.safetensors").exists()
    run(config, task, out=out, resume=True)
    assert_same_run(whole, out)


RESUMED = Config(
    rounds=4,
    local_steps="1..4",
    participation=0.7,
    drop_rate=0.2,
    compressor="topk(0.8) >> qsgd(4)",
    sample_iterate=True,
    batch_size=8,
)


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


class Mixing(nn.Module):
    """Attention with dropout over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x.view(-1, 2, 4)).flatten(1))
        return out


@pytest.mark.parametrize("engine", ["batched", "sequential"])
@pytest.mark.parametrize("make", [None, dropout_mlp])
def test_resume_is_bitwise(engine: str, make: Any, tmp_path: Path) -> None:
    small = blobs()
    task = small if make is None else Task(seeded(make), small.clients, test=small.test)
    resumes(RESUMED.replace(engine=engine, device="cpu", clients=6), task, tmp_path)


def test_resume_is_bitwise_with_augmented_samples(tmp_path: Path) -> None:
    """What the engine tries out when it starts draws nothing from the round."""
    small = blobs(m=4)
    data = [Augmented(*client.batch(np.arange(len(client)))) for client in small.clients]
    task = Task(small.model, data, test=small.test)
    resumes(RESUMED.replace(engine="batched", device="cpu", clients=4), task, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_resume_is_bitwise_on_a_gpu(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and recorded: the resumed run compiles again, and takes its first steps unrecorded."""
    monkeypatch.setattr(Recorder, "compiling", True)
    task = images(seeded(MODELS["cnn"]), ragged=3)
    config = RESUMED.replace(engine="batched", device="cuda", clients=5, precision=precision)
    resumes(config, task, tmp_path)


@pytest.mark.parametrize("engine", ["batched", "sequential"])
@pytest.mark.parametrize("make", [dropout_mlp, Mixing])
def test_dropout_is_the_same_again_and_leaves_the_users_generator(make: Any, engine: str) -> None:
    small = blobs(m=3)
    task = Task(seeded(make), small.clients, test=small.test)
    config = Config(engine=engine, device="cpu", batch_size=8, local_steps="3")
    before = torch.get_rng_state()
    first, rows = play(config, task)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    again, same_rows = play(config, task)
    assert torch.equal(again.x, first.x)
    assert same_rows == rows
    steady = Task(seeded(make), small.clients, test=small.test)
    for module in steady.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert not torch.equal(play(config, steady)[0].x, first.x)


def test_clients_of_a_block_drop_differently() -> None:
    """Two clients with one sample, many times over: without dropout they would come to the same."""
    data = blobs(m=1).clients[0].batch(np.zeros(16, np.int64))
    task = Task(seeded(dropout_mlp), [data, data])
    config = Config(clients=2, device="cpu", engine="batched", batch_size=16)
    engine = choose_engine(config, Plan(config, task), task)
    start = engine.start()
    (block,) = engine.trainer.train(engine.request(start))  # type: ignore[attr-defined]
    assert isinstance(engine.trainer.trainer, Batched)  # type: ignore[attr-defined]
    assert not torch.equal(block.x_K[0], block.x_K[1])


class Coin(nn.Module):
    """Uses its second layer in half of its steps, as Python's generator says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return self.second(y) if random.random() < 0.5 else y


def test_a_model_that_draws_with_pythons_generator_is_asked_every_step() -> None:
    said: list[str] = []
    task = Task(seeded(Coin), [blobs().clients[0]] * 2)
    config = Config(clients=2, engine="batched", device="cpu", local_steps="20", batch_size=8)
    engine = choose_engine(config, Plan(config, task), task, say=said.append)
    engine.round(engine.start())
    assert any("draws with Python's or NumPy's generator" in sentence for sentence in said)
    random.seed(0)
    drawn = [random.random() for _ in range(40)]
    random.seed(0)
    engine.round(engine.start())
    assert drawn.index(random.random()) == 20  # one draw a step; all clients of a block share it


class Padded(Dataset[Any]):
    """Sentences of different lengths: a batch is as wide as its longest."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        width = max(self.lengths[row] for row in rows)
        return torch.ones(len(rows), width, 8), torch.zeros(len(rows), dtype=torch.int64)


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([[3, 4, 2], [5, 7, 6]], id="seen by the trial"),
        pytest.param([[4, 4, 4], [4, 4, 4, 4], [9, 4, 4], [4, 4]], id="met in the first round"),
    ],
)
def test_batches_of_different_shapes_are_for_one_client_after_another(lengths: list[list[int]]) -> None:
    task = Task(nn.Sequential(Mean(), nn.Linear(8, 3)), [Padded(each) for each in lengths])
    said: list[str] = []
    config = Config(clients=len(lengths), device="cpu", local_epochs=1, batch_size=4, compressor="none")
    engine = choose_engine(config, Plan(config, task), task, say=said.append)
    engine.round(engine.start())
    assert "engine: sequential" in said[-1]
    assert "cannot step together: the clients' batches differ in shape" in said[-1]
    with pytest.raises(InputError, match=r"`engine` batched: .* batches differ in shape .* sequential"):
        run(config.replace(engine="batched"), task)


def test_tensors_of_different_shapes_are_for_one_client_after_another() -> None:
    clients = [(torch.ones(4, width, 8), torch.zeros(4, dtype=torch.int64)) for width in (3, 5, 3)]
    agree(Task(nn.Sequential(Mean(), nn.Linear(8, 3)), clients), "auto", "cpu")


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
