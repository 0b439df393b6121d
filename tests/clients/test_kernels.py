"""The kernels in C fill the arrays and return the numbers of the kernels in Python."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cfedavg.channel import Copies
from cfedavg.compress import numerics
from cfedavg.core import arrays, kernels, keys, native
from cfedavg.core.payload import Floats, Levels, Payload
from cfedavg.federate import replica
from cfedavg.wire import chunks, indices, levels, values
from cfedavg.wire.coordinates import Matrices
from tests.clients import library as lib
from tests.clients.library import needs_compiler
from tests.clients.test_messages import draw_layout, draw_payload

pytestmark = needs_compiler
Kernel = Callable[..., Any]
# The kernels that Python code calls, by the module that defines them.
MODULES: dict[Any, tuple[str, ...]] = {
    indices: ("encode_indices", "decode_indices", "are_increasing", "list_ones"),
    chunks: ("encode_chunks", "decode_chunks"),
    values: ("encode_numbers", "decode_numbers"),
    levels: ("encode_levels", "decode_levels"),
    numerics: ("find_bound", "collect", "pick"),
    arrays: ("_squares",),
    keys: ("_draw",),
    replica: ("_add", "_add_to_bf16"),
}


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], tuple[Kernel, Kernel]]:
    """Return a function that returns a kernel as its source in Python says, and the same one in C."""
    lib.library()
    monkeypatch.setattr(native, "LIBRARY", lib.path())

    def find(module: Any, name: str) -> tuple[Kernel, Kernel]:
        made = native.find(name)
        assert made is not None
        return of_source(module, name), made

    return find


def of_source(module: Any, name: str) -> Kernel:
    """Return a kernel of Python's source: compiled by numba if this process does so, else as plain Python.

    Those of top-k are always compiled: they are made of NumPy's numbers.
    """
    found: Kernel = getattr(module, name)
    if kernels.WAY == "numba":
        return found
    source = inspect.unwrap(found)
    return kernels.compile_loop(source) if module is numerics else kernels.PlainKernel(source)


Both = Callable[[Any, str], tuple[Kernel, Kernel]]


def same(both: Both, module: Any, name: str, *arguments: Any) -> Any:
    """Call both kernels with copies of the arguments; return the result of both, and the arrays after it."""
    found = []
    for kernel in both(module, name):
        given = [each.copy() if isinstance(each, np.ndarray) else each for each in arguments]
        found.append((kernel(*given), [each for each in given if isinstance(each, np.ndarray)]))
    (result, filled), (other, others) = found
    assert result == other
    assert all(a.tobytes() == b.tobytes() for a, b in zip(filled, others, strict=True))
    return other, others


def test_there_is_one_for_every_kernel_that_python_calls(both: Both) -> None:
    for module, names in MODULES.items():
        for name in names:
            assert native.find(name)
            assert hasattr(module, name)
    assert set(native._CALLS) == {name for names in MODULES.values() for name in names}
    assert native.find("put_gaps") is None


def test_the_package_runs_by_its_library() -> None:
    """Where there is a compiler, `make install` builds the library, anew when its sources have changed."""
    wanted = os.environ.get("CFEDAVG_KERNELS") or "c"
    assert wanted == kernels.WAY, "the C library is of another version: run `make install`"


def test_without_a_library_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "_native.so")
    assert native.find("pick") is None
    other = tmp_path / "other.so"
    other.write_bytes(b"no library")
    monkeypatch.setattr(native, "LIBRARY", other)
    assert native.find("pick") is None
    lib.library()
    monkeypatch.setattr(native, "LIBRARY", lib.path())
    monkeypatch.setattr(native, "KERNELS", native.KERNELS + 1)
    native._load.cache_clear()
    assert native.find("pick") is None
    native._load.cache_clear()


def test_the_number_of_the_kernels_is_that_of_the_header() -> None:
    assert f"#define KERNELS {native.KERNELS} " in (lib.FOLDER / "kernels.h").read_text()


def test_coders_of_indices(both: Both) -> None:
    rng = np.random.default_rng(21)
    for _ in range(150):
        layout = draw_layout(rng)
        shapes, at = Matrices.of(layout).shapes, draw_payload(rng, layout).indices
        if at is None:
            continue
        words = np.zeros(len(at) + 600 * len(shapes) + 200, np.uint32)
        n, (words, *_) = same(both, indices, "encode_indices", words, at, layout.d, shapes)
        empty = np.zeros(len(at), np.int64)
        (fault, read), (_, found, _) = same(
            both, indices, "decode_indices", words[:n], empty, layout.d, shapes
        )
        assert (fault, read) == (0, n)
        assert (found == at).all()
        for _ in range(3):  # words that nobody has encoded; they end early, too
            noise = rng.integers(0, 2**32, rng.integers(0, 20)).astype(np.uint32)
            outcomes = [
                kernel(noise, empty.copy(), layout.d, shapes) for kernel in both(indices, "decode_indices")
            ]
            assert outcomes[0] == outcomes[1]


def test_coders_of_indices_of_a_network(both: Both) -> None:
    """Large enough for bands of rows and of columns, which the encoder chooses by the cost in floats."""
    rng, shapes = np.random.default_rng(28), np.array([[32, 16, 9], [300, 200, 1], [1, 1, 300]])
    for share in (0.01, 0.05, 0.1):
        rows, columns = (np.exp(2 * rng.standard_normal(n)) for n in (300, 200))
        matrix = np.outer(rows, columns).reshape(-1) * rng.random(60_000)
        scores = np.concatenate([rng.random(32 * 16 * 9), matrix, rng.random(300)])
        at = np.flatnonzero(scores > np.quantile(scores, 1 - share))
        words = np.zeros(10_000, np.uint32)
        n, (words, *_) = same(both, indices, "encode_indices", words, at, len(scores), shapes)
        assert n < 10_000
        empty = np.zeros(len(at), np.int64)
        (fault, read), (_, found, _) = same(
            both, indices, "decode_indices", words[:n], empty, len(scores), shapes
        )
        assert (fault, read) == (0, n)
        assert (found == at).all()


def test_coders_of_numbers(both: Both) -> None:
    rng = np.random.default_rng(22)
    ends = np.array([5, 9, 40, 500])
    for _ in range(100):
        at = np.flatnonzero(rng.random(500) < rng.choice([0.02, 0.5, 1.1]))
        numbers = (
            rng.integers(0, rng.choice([1, 3, 200, 2**15]), len(at)) + rng.integers(0, 2, len(at)) * 2**15
        )
        numbers = numbers.astype(np.uint16)
        at = at if len(at) < 500 else values.EVERYWHERE
        words, signed = np.zeros(1000, np.uint32), bool(rng.integers(2))
        n, (words, *_) = same(both, values, "encode_numbers", words, numbers, at, ends, signed, 0x7FFF)
        empty = np.zeros_like(numbers)
        read, (_, found, *_) = same(
            both, values, "decode_numbers", words[:n], empty, at, ends, signed, 0x7FFF
        )
        assert read == n
        assert (found & 0x7FFF == numbers & 0x7FFF).all()
        assert not signed or (found == numbers).all()
        noise = rng.integers(0, 2**32, 30).astype(np.uint32)
        results = [
            kernel(noise, empty.copy(), at, ends, signed, 300) for kernel in both(values, "decode_numbers")
        ]
        assert results[0] == results[1]


def test_coders_of_chunks(both: Both) -> None:
    rng = np.random.default_rng(26)
    for _ in range(150):
        layout, s = draw_layout(rng), int(rng.integers(6, 9))
        n, shapes = int(rng.integers(1, 2**s)), Matrices.of(layout).shapes
        scores = np.repeat(rng.random(layout.d // 3 + 1) ** 4, 3)[: layout.d] * rng.random(layout.d)
        starts = range(0, layout.d, 1 << s)
        parts = [np.sort(np.argsort(scores[at : at + (1 << s)])[-n:]) + at for at in starts]
        at = np.concatenate([np.empty(0, np.int64), *parts])
        words = np.zeros(2 * len(at) + layout.d + 200, np.uint32)
        count, (words, *_) = same(both, chunks, "encode_chunks", words, at, layout.d, shapes, s, n)
        empty = np.zeros(len(at), np.int64)
        (fault, read), (_, found, _) = same(
            both, chunks, "decode_chunks", words[:count], empty, layout.d, shapes
        )
        assert (fault, read) == (0, count)
        assert (found == at).all()
        for _ in range(3):  # the right numbers, and then words that nobody has encoded
            noise = rng.integers(0, 2**32, rng.integers(1, 20)).astype(np.uint32)
            noise[0] = s << 27 | n << 27 - s | noise[0] & ((1 << 27 - s) - 1)
            outcomes = [
                kernel(noise, empty.copy(), layout.d, shapes) for kernel in both(chunks, "decode_chunks")
            ]
            assert outcomes[0] == outcomes[1]


def test_chunks_of_forged_numbers(both: Both) -> None:
    shapes, d = np.array([[1, 1, 200]]), 200
    for s, n, k in ((5, 3, 18), (17, 3, 3), (31, 1, 1), (6, 0, 0), (6, 3, 12), (6, 3, 13)):
        words = np.array([s << 27 | n << 27 - s if s < 27 else s << 27, 0, 0], np.uint32)
        (fault, _), _ = same(both, chunks, "decode_chunks", words, np.zeros(k, np.int64), d, shapes)
        assert fault == (0 if (s, k) == (6, 12) else 2)


def test_coders_of_levels(both: Both) -> None:
    rng = np.random.default_rng(27)
    shapes = np.array([[5, 4, 3], [1, 1, 40], [40, 10, 1]])
    for _ in range(100):
        at = np.flatnonzero(rng.random(500) < rng.choice([0.02, 0.5, 1.1]))
        top, least = int(rng.choice([1, 2, 3, 8, 127])), int(rng.integers(2))
        signs = np.outer(rng.integers(0, 2, 50), rng.integers(0, 2, 10)).reshape(-1)[at]
        numbers = least + rng.integers(0, top, len(at)) // rng.integers(1, 4)
        numbers = (numbers + (signs ^ (rng.random(len(at)) < 0.1)) * 2**15).astype(np.uint16)
        at = at if len(at) < 500 else values.EVERYWHERE
        words = np.zeros(2000, np.uint32)
        n, (words, *_) = same(both, levels, "encode_levels", words, numbers, at, shapes, least, top)
        empty = np.zeros_like(numbers)
        given = words[:n], empty, at, shapes, least, top
        read, (_, found, *_) = same(both, levels, "decode_levels", *given)
        assert read == n
        assert (found == np.where(numbers & 0x7FFF, numbers, 0)).all()
        noise = rng.integers(0, 2**32, 30).astype(np.uint32)
        given = at, shapes, least, top
        results = [kernel(noise, empty.copy(), *given) for kernel in both(levels, "decode_levels")]
        assert results[0] == results[1]


@pytest.mark.parametrize("numbers", [[3, 5], [3, 0], [0x8000, 1]])
def test_levels_out_of_range(both: Both, numbers: list[int]) -> None:
    given = np.zeros(100, np.uint32), np.array(numbers, np.uint16), np.arange(2), np.array([[1, 1, 9]]), 1, 4
    assert same(both, levels, "encode_levels", *given)[0] == 0


def test_numbers_that_are_too_large(both: Both) -> None:
    words, numbers = np.zeros(100, np.uint32), np.array([3, 5], np.uint16)
    assert same(both, values, "encode_numbers", words, numbers, np.arange(2), np.array([2]), True, 4)[0] == 0


def test_are_increasing(both: Both) -> None:
    for at in ([], [0], [0, 5, 9], [0, 0], [3, 2], [-1, 2], [0, 10]):
        same(both, indices, "are_increasing", np.array(at, np.int64), 10)


def test_list_ones(both: Both) -> None:
    rng = np.random.default_rng(23)
    for share in (0.0, 0.01, 0.5, 1.0):
        ones = rng.random((20, 64)) < share
        words = (ones * (1 << np.arange(64, dtype=np.uint64))).sum(1, dtype=np.uint64)
        _, (_, found) = same(both, indices, "list_ones", words, np.zeros(ones.sum(), np.int64))
        assert (found == np.flatnonzero(ones)).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_largest(both: Both, dtype: Any) -> None:
    rng = np.random.default_rng(24)
    width, bits = (31, np.uint32) if dtype == np.float32 else (63, np.uint64)
    for d in (1, 15, 16, 17, 5000, 70_000):
        p = rng.standard_normal(d).astype(dtype)
        p[rng.random(d) < 0.01] = np.nan
        p[rng.random(d) < 0.1] = 0.5
        for k in {1, max(1, d // 50), d}:
            for stride, slack in ((max(d // 256, 16), 1), (max(d // 256, 16), 2), (16, 1)):
                bound, _ = same(both, numerics, "find_bound", p.view(bits), k, stride, slack, width)
            least = np.array(bound, bits).view(dtype)[()]
            python, c = both(numerics, "collect")
            found, expected = np.empty(d + 8, np.int64), np.empty(d + 8, np.int64)
            n = c(p, least, found)
            assert n == python(p, least, expected)
            assert (found[:n] == expected[:n]).all()
            same(both, numerics, "pick", p.view(bits), found[:n], width, np.zeros(k, np.int64))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squares(both: Both, dtype: Any) -> None:
    _, squares = both(arrays, "_squares")
    for n in (0, 1, 7, 8, 9, 1003):
        v = np.random.default_rng(n).standard_normal(2 * n).astype(dtype)[::2]  # C gets a contiguous copy
        each, sums = v.astype(np.float64) ** 2, np.zeros(8)
        for start in range(0, n // 8 * 8, 8):
            sums += each[start : start + 8]
        for square in each[n // 8 * 8 :]:
            sums[0] += square
        a, b, c, d, e, f, g, h = sums
        assert squares(v) == ((a + b) + (c + d)) + ((e + f) + (g + h))


def test_draws(both: Both) -> None:
    for word, keep, room in ((0, 2**52, 100), (-5, 2**53 // 10, 3), (2**63 - 1, 0, 5), (7, 2**53, 1000)):
        _, c = both(keys, "_draw")
        found, expected = np.zeros(room, np.int64), np.zeros(room, np.int64)
        assert c(word, keep, 1000, found) == keys._draw_by_numpy(word, keep, 1000, expected)
        assert (found == expected).all()
        assert c(np.int64(word), np.uint64(keep), np.int32(1000), found) == c(word, keep, 1000, found)
        assert c(np.uint64(word % 2**64), keep, 1000, found) == c(word, keep, 1000, found)


@pytest.mark.parametrize("rounds_values", [False, True])
def test_adding_to_a_copy(both: Both, rounds_values: bool) -> None:
    """The readable path is the oracle here: the Python kernels have tests of their own against it."""
    rng, copies = np.random.default_rng(25), Copies(rounds_values)
    _, add = both(replica, "_add_to_bf16" if rounds_values else "_add")
    for dtype in (np.float32, np.int8, np.int16):
        for block in (1, 7, 1000):
            w = copies.make(
                (rng.standard_normal(1500) * 10.0 ** rng.integers(-44, 39, 1500)).astype(np.float32)
            )
            at = np.flatnonzero(rng.random(1500) < 0.5)
            numbers = (rng.standard_normal(len(at)) * 100).astype(dtype)
            scales = (10.0 ** rng.integers(-44, 38, -(-len(at) // block))).astype(np.float32)
            made: Floats | Levels = Levels(numbers, scales, block, 32767)
            if dtype == np.float32:
                made, scales, block = Floats(numbers, "fp32"), np.ones(1, np.float32), 1000
            expected = copies.receive(w, Payload(1500, np.array([0, len(at)]), at, made))
            found, done = arrays.to_bf16(w) if rounds_values else w.copy(), 0
            for stop in (0, 100, 1450, 2000):
                done = add(found, at, numbers, scales, block, done, stop)
                assert done == (at < stop).sum()
            assert (arrays.from_bf16(found) if rounds_values else found).tobytes() == expected.tobytes()


def test_arrays_that_c_cannot_fill(both: Both) -> None:
    _, pick = both(numerics, "pick")
    for picked in (np.zeros(3, np.int32), np.zeros(6, np.int64)[::2]):
        with pytest.raises(TypeError, match="C fills contiguous arrays"):
            pick(np.zeros(5, np.uint32), np.arange(5), 31, picked)


def test_too_little_room_is_an_error_and_nothing_is_written_beyond(both: Both) -> None:
    words = np.zeros(20, np.uint32)
    _, encode = both(indices, "encode_indices")
    with pytest.raises(IndexError, match="there is room for 3"):
        encode(words[:3], np.arange(0, 4000, 7), 4000, np.array([[1, 1, 4000]]))
    assert not words[3:].any()
