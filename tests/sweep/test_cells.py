"""Sealed cells: what is written is read, and every damage is noticed."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfedavg.sweep import DamagedCell, SealedCell, read_cell, write_cell
from cfedavg.sweep.cells import is_same

numbers = st.none() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
columns = st.dictionaries(st.text(max_size=8).filter(lambda key: key != "diverged"), st.lists(numbers))
plain = st.dictionaries(st.text(max_size=8), st.lists(numbers, max_size=4) | numbers | st.text(max_size=5))
RUN = {"dataset": "embedded", "rounds": 3, "seed": 0}
MADE = {"seconds": 1.5, "version": "0.4.0", "hardware": "an abacus"}


@given(settings=plain, values=columns)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, settings: Any, values: Any
) -> None:
    cell = SealedCell("cell-p2-seed0", settings | RUN, values, MADE)
    assert read_cell(write_cell(tmp_path_factory.getbasetemp(), cell)) == cell


def test_every_change_of_a_byte_is_noticed(tmp_path: Path) -> None:
    cell = SealedCell("cell", RUN, {"test_accuracy": [0.1, 0.25, None], "bytes": [12, 3, 45]}, MADE)
    path = write_cell(tmp_path, cell)
    good = path.read_bytes()
    for place in range(len(good)):
        for bit in (0, 4):
            path.write_bytes(good[:place] + bytes([good[place] ^ (1 << bit)]) + good[place + 1 :])
            with suppress(DamagedCell):
                assert read_cell(path) == cell  # white space
    path.write_bytes(good[:-20])
    with pytest.raises(DamagedCell):
        read_cell(path)
    other = tmp_path / "other.json"
    other.write_bytes(good)
    with pytest.raises(DamagedCell):  # a good cell under another's name
        read_cell(other)


@pytest.mark.parametrize(
    ("part", "content"),
    [
        ("made", {}),
        ("made", []),
        ("made", MADE | {"seconds": "long"}),
        ("made", MADE | {"hardware": None}),
        ("settings", {}),
        ("settings", 3),
        ("settings", RUN | {"seed": "0"}),
        ("settings", RUN | {"rounds": "3"}),
        ("values", {"test_accuracy": "high"}),
        ("values", {"test_accuracy": [0.1, "high"]}),
        ("values", {"test_accuracy": 0.5}),
        ("values", {"test_accuracy": {"a": 1}}),
        ("values", {"diverged": [1.0]}),
    ],
)
def test_a_seal_does_not_make_a_cell(part: str, content: Any, tmp_path: Path) -> None:
    good = SealedCell("cell", RUN, {"test_accuracy": [0.1]}, MADE)
    assert read_cell(write_cell(tmp_path, good)) == good
    path = write_cell(tmp_path, dataclasses.replace(good, **{part: content}))
    with pytest.raises(DamagedCell, match=r"cell\.json is damaged"):
        read_cell(path)


def test_a_study_of_its_own_keeps_numbers_of_any_shape(tmp_path: Path) -> None:
    small = SealedCell("cell", {"seed": 0}, {"a": 1.5, "b": {"c": [1, None]}, "d": [[1, 2]]}, MADE)
    assert read_cell(write_cell(tmp_path, small)) == small
    with pytest.raises(DamagedCell):
        read_cell(write_cell(tmp_path, dataclasses.replace(small, values={"b": {"c": ["much"]}})))


def test_where_and_how_a_cell_was_computed_does_not_matter() -> None:
    wanted = RUN | {"precision": "float32"}
    assert is_same(wanted | {"precision": "bf16", "device": "cuda", "workers": 3}, wanted)
    assert not is_same(wanted | {"eta": 2.0}, wanted)
