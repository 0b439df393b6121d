"""What version 3 adds to the refusals: bases, scales for each level, and chunks."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from cfedavg import Layout, WireError, decode, encode
from cfedavg.core.bases import Factors, Rotation
from cfedavg.core.payload import Floats, Levels, Mask
from cfedavg.wire.coder import to_bytes
from cfedavg.wire.coordinates import Matrices
from cfedavg.wire.frame import Coding
from cfedavg.wire.levels import encode_levels
from tests.golden_cases import version_3_cases
from tests.messages import FLAT, forged, sections
from tests.wire.test_refusals import Spoil, first_of_flat, refused

GOLDEN = {name: (layout, sent) for name, layout, sent in version_3_cases()}


def golden(name: str) -> tuple[Layout, bytes]:
    layout, sent = GOLDEN[name]
    return layout, encode(sent, layout)


def coded_levels(numbers: list[int], top: int, least: int = 1) -> bytes:
    """Return a coded section with these levels of the first coordinates of FLAT."""
    words = np.empty(len(numbers) * 8 + 64, np.uint32)
    at = np.arange(len(numbers))
    n = encode_levels(words, np.array(numbers, np.uint16), at, FLAT_SHAPES, least, top)
    assert n
    return to_bytes(words, n)


FLAT_SHAPES = Matrices.of(FLAT).shapes


@pytest.mark.parametrize(
    ("name", "length"), [("flat-rotated-two", 12), ("net-rotated-fp32", 12), ("net-factored-bf16", 4)]
)
def test_a_basis_of_the_wrong_length(name: str, length: int) -> None:
    layout, data = golden(name)
    for n in (0, length - 1, length + 1):
        with refused(f"the section of the indices must have {length} bytes, got {n}"):
            decode(forged(data, coordinates=bytes(n)), layout=layout)


@pytest.mark.parametrize("size", [0, 3, 255, 2**32 - 1])
def test_a_rotation_of_a_size_that_is_no_power_of_two(size: int) -> None:
    layout, data = golden("flat-rotated-two")
    with refused(f"`block` of a rotation must be a power of two below 2^32, got {size}"):
        decode(forged(data, coordinates=struct.pack("<qI", 1, size)), layout=layout)
    sent = replace(GOLDEN["flat-rotated-two"][1], basis=Rotation(np.array([1]), size))
    with refused(f"`block` of a rotation must be a power of two below 2^32, got {size}"):
        encode(sent, layout)


@pytest.mark.parametrize("size", [1, 64, 2**31])
def test_a_rotation_with_another_number_of_coordinates(size: int) -> None:
    layout, data = golden("net-rotated-two")  # d = 2337: 2368 = 9 * 256 + 64 with blocks of 256
    count = Rotation(np.array([1]), size).count(layout.d)
    assert count == {1: 2337, 64: 2368, 2**31: 4096}[size]
    other = forged(data, coordinates=struct.pack("<qI", 1, size))
    if count == 2368:
        assert decode(other, layout=layout).basis is not None
        return
    with refused(f"the basis of the message has {count} coordinates, got k = 2368"):
        decode(other, layout=layout)


def test_factors_of_a_forged_rank() -> None:
    layout, data = golden("net-factored-two")  # rank 2: 317 values
    with refused("`rank` of factors must be from 1 to 2^32 - 1, got 0"):
        decode(forged(data, coordinates=bytes(4)), layout=layout)
    for rank, count in ((1, 183), (3, 451), (30, 2337), (2**32 - 1, 2337)):
        assert Factors.of(layout, rank).count(layout.d) == count
        with refused(f"the basis of the message has {count} coordinates, got k = 317"):
            decode(forged(data, coordinates=struct.pack("<I", rank)), layout=layout)


def test_more_values_than_a_basis_may_have() -> None:
    layout, data = golden("flat-rotated-two")
    with refused("the message must hold at most 1000 values, got k = 1001"):
        decode(forged(data, k=1001), layout=layout)
    with refused("the message must hold at most 511 values, got k = 512"):
        decode(data, layout=layout, kmax=511)
    assert decode(data, layout=layout, kmax=512).counts() == [512]
    layout, data = golden("flat-factored-two")
    with refused("the message must hold at most 500 values, got k = 501"):
        decode(forged(data, k=501), layout=layout)


def test_a_basis_is_coded() -> None:
    layout, data = golden("flat-rotated-fp32")
    with refused("FP32 values of ROTATED coordinates must be CODED, got PLAIN"):
        decode(forged(data, coding=Coding.PLAIN), layout=layout)


def test_scales_of_each_level_of_the_wrong_length() -> None:
    layout, data = golden("flat-listed-two")  # 71 levels in blocks of 64: 2 blocks of 2 scales
    copied = sections(data)[2]
    for block, top, needed in ((64, 3, 30), (64, 0, 6), (1, 2, 574), (64, 65535, 524286), (0, 1, 10)):
        words = f"the section of copied values must have {needed} bytes for k = 71, got 22"
        with refused(words):
            decode(forged(data, copied=struct.pack("<IH", block, top) + copied[6:]), layout=layout)


@pytest.mark.parametrize("top", [0, 128, 65535])
def test_a_top_that_few_levels_cannot_have(top: int) -> None:
    layout, data = golden("flat-listed-int5")
    with refused(f"`top` must be from 1 to 127 for FEW levels, got {top}"):
        decode(forged(data, copied=struct.pack("<IHf", 0, top, 1.0)), layout=layout)


def test_one_of_few_levels_above_top() -> None:
    """Magnitudes from 0 to 4 take three bits, which may say 7."""
    values = Levels(np.array([0, -4, 2], np.int8), np.ones(1, np.float32), 0, 4)
    data = encode(first_of_flat(values, 3), FLAT)
    assert sections(data)[1] == coded_levels([0, 0x8004, 2], 4, least=0)
    for numbers in ([5, 1, 0], [0, 0x8007, 2], [1, 0, 5]):
        with refused("a level exceeds the largest magnitude, `top` = 4"):
            decode(forged(data, coded=coded_levels(numbers, 7, least=0)), layout=FLAT)
    with refused("a level exceeds the largest magnitude, `top` = 4"):
        encode(first_of_flat(replace(values, levels=np.array([1, -5, 2], np.int8)), 3), FLAT)


def test_few_levels_need_version_3() -> None:
    _, data = golden("flat-listed-int3")
    for version in (1, 2):
        other = data[:4] + bytes([version]) + data[5:]
        with refused(f"the header says kind = 6, but version {version} has only 0 to 4"):
            decode(other, layout=FLAT)


@pytest.mark.parametrize("top", [0, 128, 65535])
def test_a_top_that_levels_with_their_own_scales_cannot_have(top: int) -> None:
    layout, data = golden("net-nothing-two")
    words = f"`top` must be from 1 to 127 for PER_LEVEL levels, got {top}"
    with refused(words):
        decode(forged(data, copied=struct.pack("<IH", 64, top)), layout=layout)
    sent = replace(GOLDEN["net-nothing-two"][1], values=Levels(*EMPTY, 64, top, per_level=True))
    with refused(words):
        encode(sent, layout)


EMPTY = np.empty(0, np.int8), np.empty(0, np.float32)


def test_a_level_above_its_scales() -> None:
    """Three magnitudes take two bits, which may say 4."""
    values = Levels(np.array([1, -3, 2], np.int8), np.ones(3, np.float32), 0, 3, per_level=True)
    data = encode(first_of_flat(values, 3), FLAT)
    assert sections(data)[1] == coded_levels([1, 0x8003, 2], 3)
    for numbers in ([4, 1, 1], [1, 0x8004, 2], [1, 1, 4]):
        with refused("a level exceeds the largest magnitude, `top` = 3"):
            decode(forged(data, coded=coded_levels(numbers, 4)), layout=FLAT)
    with refused("a level exceeds the largest magnitude, `top` = 3"):
        encode(first_of_flat(replace(values, levels=np.array([1, -4, 2], np.int8)), 3), FLAT)


def test_levels_that_have_no_scale_are_not_encoded() -> None:
    ones = np.ones(2, np.float32)
    with refused("a level is 0, but each level must have one of the scales of its block"):
        encode(first_of_flat(Levels(np.array([1, 0], np.int8), ones, 0, 2, per_level=True), 2), FLAT)
    with refused("2 levels in blocks of 1 need 4 scales, got 2"):
        encode(first_of_flat(Levels(np.array([1, 2], np.int8), ones, 1, 2, per_level=True), 2), FLAT)
    with refused("Levels must be a 1-D array of int8, got 1-D int16"):
        encode(first_of_flat(Levels(np.array([1, 2], np.int16), ones, 0, 2, per_level=True), 2), FLAT)


def test_bases_that_are_not_encoded() -> None:
    values, turned = Floats(np.ones(512, np.float32), "fp32"), Rotation(np.array([1]), 256)
    layout, sent = GOLDEN["flat-rotated-fp32"]
    with refused("the basis of the message has 512 coordinates, got k = 500"):
        encode(replace(sent, offsets=np.array([0, 500])), layout)
    with refused("the payload must have 512 indices and 512 values, got lengths [500, 512]"):
        encode(replace(sent, values=replace(values, data=values.data[:500])), layout)
    for more in ({"indices": np.arange(500)}, {"mask": Mask(np.array([1]), 2**53)}):
        with refused("a payload in another basis must have neither indices nor a mask"):
            encode(replace(sent, basis=turned, **more), layout)
    layout, sent = GOLDEN["net-factored-fp32"]
    with refused("`rank` of factors must be from 1 to 2^32 - 1, got 0"):
        encode(replace(sent, basis=replace(sent.basis, rank=0)), layout)
    with refused("the factors must be those of the layout: `Factors.of(layout, rank)`"):
        encode(replace(sent, basis=Factors.of(FLAT, 2)), layout)


def test_chunks_of_another_number() -> None:
    layout, data = golden("net-chunked-bf16")  # 37 chunks of 64, of which each sends 5
    section = sections(data)[0]
    start = int.from_bytes(section[:4], "big")
    assert (start >> 27, start >> 21 & 63) == (6, 5)
    for s, n in ((6, 6), (6, 0), (5, 5), (7, 5), (17, 5), (31, 5), (0, 0)):
        number = s << 27 | n << (27 - s) if s < 27 else s << 27
        other = number.to_bytes(4, "big") + section[4:]
        with refused("the message lists more or fewer indices than k = 185"):
            decode(forged(data, coordinates=other), layout=layout)


def test_positions_beyond_a_piece() -> None:
    """A position must leave places for the others of its piece; some random streams leave none."""
    layout, data = golden("flat-chunked-bf16")
    section, words = sections(data)[0], set()
    for seed in range(300):
        noise = np.random.default_rng(seed).bytes(30)
        try:
            decode(forged(data, coordinates=section[:2] + noise), layout=layout)
        except WireError as error:
            words.add(str(error))
    assert "an index lies beyond the last coordinate, 499" in words


def test_a_section_of_chunks_that_goes_on_or_ends() -> None:
    layout, data = golden("net-chunked-two")
    coordinates, values, _ = sections(data)
    for extra in (b"\0", bytes(9), b"\xff" * 12):
        with refused("the section of the indices has extra bytes at its end"):
            decode(forged(data, coordinates=coordinates + extra), layout=layout)
        with refused("the section of the values has extra bytes at its end"):
            decode(forged(data, coded=values + extra), layout=layout)
    with refused("the section of the values ends too early"):
        decode(forged(data, coded=values[: len(values) // 2]), layout=layout)


# The same for a message with a basis.
TURNED_LADDER: list[tuple[str, Spoil]] = [
    ("the message must hold at most 1000 values, got k = 1001", lambda m: forged(m, k=1001)),
    ("the section of the indices must have 12 bytes, got 11", lambda m: forged(m, bytes(11))),
    ("`block` of a rotation must be", lambda m: forged(m, struct.pack("<qI", 1, 3))),
    ("`top` must be from 1 to 127", lambda m: forged(m, copied=struct.pack("<IH", 0, 128) + bytes(512))),
]


@pytest.mark.parametrize(("earlier", "later"), list(combinations(range(len(TURNED_LADDER)), 2)))
def test_the_earlier_check_of_a_basis_speaks(earlier: int, later: int) -> None:
    layout, data = golden("flat-rotated-two")
    (first, spoil), (second, spoil_too) = TURNED_LADDER[earlier], TURNED_LADDER[later]
    with pytest.raises(WireError, match=f"^{re.escape(second)}"):
        decode(spoil_too(data), layout=layout)
    with pytest.raises(WireError, match=f"^{re.escape(first)}"):
        decode(spoil(spoil_too(data)), layout=layout)
