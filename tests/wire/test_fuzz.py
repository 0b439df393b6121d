"""Spoilt messages by the thousand: nothing but WireError comes of them. bench/fuzz.py does millions."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bench import fuzz

from cfedavg.core import native
from cfedavg.core.kernels import WAY
from cfedavg.wire import coordinates, format, frame, library, values
from cfedavg.wire.frame import Kind

ROOT = Path(__file__).parents[2]
VERSION_2 = "version # is for CODED FP# or FP# values of ALL coordinates"


@pytest.fixture(scope="module")
def corpus() -> list[fuzz.Sample]:
    return fuzz.build_corpus()


def test_every_version_is_in_the_corpus(corpus: list[fuzz.Sample]) -> None:
    versions = Counter(good.parts[0][4] for good in corpus)
    assert versions[2] == 4
    assert versions[3] == 95
    assert set(versions) == {1, 2, 3}


def test_good_messages_are_accepted(corpus: list[fuzz.Sample]) -> None:
    for good in corpus:
        assert fuzz.check(b"".join(good.parts) + good.checksum, good.layout) == fuzz.ACCEPTED


def test_only_wire_errors_and_no_memory(corpus: list[fuzz.Sample]) -> None:
    fuzz.fuzz(1, range(4_000), corpus)  # loads the kernels and lets the memory settle
    before = fuzz.resident()
    outcome = fuzz.fuzz(0, range(30_000), corpus)
    assert fuzz.resident() - before < fuzz.GROWTH
    assert not outcome.failures, outcome.failures[0]
    assert outcome.words.total() == 30_000
    # It reaches every decoder, and past them.
    for words in (
        "an index lies beyond the last coordinate, #",
        "the message lists more or fewer indices than k = #",
        "the section of the indices has extra bytes at its end",
        "the section of the values has extra bytes at its end",
        "the key of the message does not draw k = # coordinates",
        "a level exceeds the largest magnitude, `top` = #",
        "CODED FP# values of ALL coordinates need version #, but the message is of version #",
        f"{VERSION_2}, not for CODED INT# values of LISTED coordinates",
        "`top` must be from # to # for INT# levels, got #",
        "a value is not a finite number",
        "a scale is not a finite number",
        "version # is for PER_LEVEL or FEW values, or for ROTATED, FACTORED or CHUNKED coordinates, "
        "not for CODED FP# values of LISTED coordinates",
        "the basis of the message has # coordinates, got k = #",
        "`block` of a rotation must be a power of two below #^#, got #",
        fuzz.ACCEPTED,
    ):
        assert outcome.words[words] >= 10, words


def test_a_mutation_depends_on_seed_and_number_alone(corpus: list[fuzz.Sample]) -> None:
    dice = fuzz.Dice()
    first = [fuzz.mutate(3, number, corpus, dice) for number in range(100)]
    assert first == [fuzz.mutate(3, number, corpus) for number in range(100)]
    assert first != [fuzz.mutate(4, number, corpus) for number in range(100)]


def no_check_of_lengths(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(frame, "check_lengths", lambda *_: None)


def values_may_be_nan(patch: pytest.MonkeyPatch) -> None:
    for kind in (Kind.FP32, Kind.FP64, Kind.BF16):
        patch.setitem(values.LARGEST, kind, 0xFFFF)


def levels_may_exceed_top(patch: pytest.MonkeyPatch) -> None:
    decode_numbers = values.decode_numbers
    patch.setattr(values, "decode_numbers", lambda *args: decode_numbers(*args[:-1], 1000))


def an_index_twice(patch: pytest.MonkeyPatch) -> None:
    def draw(key: int, keep: int, d: int, found: np.ndarray) -> int:
        n: int = drawn(key, keep, d, found)
        found[-1:] = found[-2:-1]
        return n

    drawn = coordinates.draw_into
    patch.setattr(coordinates, "draw_into", draw)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_check_of_lengths, "error: unpack_from requires a buffer"),
        (no_check_of_lengths, "ValueError: cannot reshape array"),
        (values_may_be_nan, "Broken: a value that is not finite"),
        (levels_may_exceed_top, "Broken: a level above top"),
        (an_index_twice, "Broken: indices that do not increase"),
    ],
)
def test_it_notices_a_decoder_that_is_wrong(
    spoil: Callable[[pytest.MonkeyPatch], None],
    words: str,
    corpus: list[fuzz.Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "decode", lambda *args: None)
    spoil(monkeypatch)
    failures = fuzz.fuzz(0, range(20_000), corpus).failures
    found = [failure for failure in failures if re.search(words, failure.splitlines()[-1])]
    assert found
    # What it prints is enough to see it again.
    number = int(found[0].split("--first ")[1].split()[0])
    layout, message = fuzz.mutate(0, number, corpus)
    assert message.hex() in found[0]
    with pytest.raises(Exception, match=words.split(": ")[1]):
        fuzz.check(message, layout)


def test_it_notices_memory_that_is_kept(corpus: list[fuzz.Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[mmap.mmap] = []

    def decode(*args: object, **options: object) -> object:
        kept.append(mmap.mmap(-1, 8192))  # memory of its own, which no earlier test has left behind
        kept[-1].write(bytes(8192))
        return format.decode(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fuzz, "decode", decode)
    before = fuzz.resident()
    fuzz.fuzz(0, range(5_000), corpus)
    assert fuzz.resident() - before >= fuzz.GROWTH


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in ("c", "numba", "python") if way != WAY])
def test_kernels_of_other_ways_refuse_damage_by_wire_errors_alone(way: str) -> None:
    if way == "c" and not native.find("decode_numbers"):
        pytest.skip("no C library")
    command = [sys.executable, "bench/fuzz.py", "--messages", "4000", "--workers", "1"]
    environment = os.environ | {"CFEDAVG_KERNELS": way}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_no_kernel_leaves_its_arrays(tmp_path: Path) -> None:
    """With kernels compiled to check every index, an access outside raises IndexError."""
    checked = {"CFEDAVG_KERNELS": "numba", "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "bench/fuzz.py", "--messages", "8000", "--workers", "1"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | checked, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
