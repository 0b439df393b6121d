"""Every malformation has its own words, and is refused before anything large is allocated."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from cfedavg import Layout, Payload, WireError, decode, encode
from cfedavg.core.payload import Floats, Levels, Mask
from cfedavg.wire import measure, read_header
from cfedavg.wire.coder import to_bytes
from cfedavg.wire.coordinates import Matrices
from cfedavg.wire.frame import SIZE, Coding, Header, Kind, Where
from cfedavg.wire.indices import encode_indices
from cfedavg.wire.values import encode_numbers
from tests.messages import FLAT, MODEL, forged, payload, sealed, sections

NOT_A_MESSAGE = f"not a message: it must have a header of {SIZE} bytes that begins with CFAV"
ANOTHER_MODEL = "the message is for another model: names, shapes, dtypes or order of its tensors differ"
DAMAGED = "the checksum does not fit: the message was damaged on its way"
NOT_FINITE = "a value is not a finite number"
UNORDERED = f"the indices must increase strictly and lie from 0 to {FLAT.d - 1}"


def refused(words: str) -> Any:
    return pytest.raises(WireError, match=f"^{re.escape(words)}$")


def message(
    selector: str = "topk(0.9)", quantiser: str = "fp32", layout: Layout = FLAT, **sender: int
) -> bytes:
    return encode(payload(selector, quantiser, layout), layout, **sender)


def coded_model(quantiser: str = "fp32") -> bytes:
    """A message of version 2."""
    data = encode(payload("none", quantiser, FLAT), FLAT, code_floats=True)
    assert read_header(data).version == 2
    return data


def with_bytes(data: bytes, start: int, new: bytes) -> bytes:
    """A message with some bytes replaced and the checksum repaired."""
    return sealed(data[:start] + new + data[start + len(new) : -4])


def coded(numbers: list[int], zero_has_sign: bool) -> bytes:
    """Return a coded section with these numbers for the first coordinates of FLAT."""
    words = np.empty(len(numbers) + 64, np.uint32)
    where, ends = np.arange(len(numbers)), Matrices.of(FLAT).row_ends
    n = encode_numbers(words, np.array(numbers, np.uint16), where, ends, zero_has_sign, 0x7FFF)
    return to_bytes(words, n)


def coded_indices(indices: list[int], layout: Layout) -> bytes:
    """Return a section of indices, unchecked."""
    words = np.empty(4096, np.uint32)
    n = encode_indices(words, np.array(indices, np.int64), layout.d, Matrices.of(layout).shapes)
    return to_bytes(words, n)


def first_of_flat(values: Floats | Levels, k: int) -> Payload:
    return Payload(FLAT.d, np.array([0, k]), np.arange(k), values)


# ---------------------------------------------------------------------------- the header


def test_not_a_message() -> None:
    good = message()
    for data in (b"", b"CFAV", b"PK\3\4" + bytes(200), good[: SIZE - 1], b"\0" + good):
        with refused(NOT_A_MESSAGE):
            decode(data, layout=FLAT)
        with refused(NOT_A_MESSAGE):
            read_header(data)


@pytest.mark.parametrize("version", [0, 4, 255])
def test_another_version(version: int) -> None:
    with refused(f"the message is of version {version}, but this program reads only 1 to 3"):
        decode(with_bytes(message(), 4, bytes([version])), layout=FLAT)


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [("where", 3, 2), ("where", 5, 2), ("kind", 5, 4), ("coding", 2, 1), ("kind", 255, 4)],
)
@pytest.mark.parametrize("version", [1, 2])
def test_unknown_in_the_header(name: str, value: int, most: int, version: int) -> None:
    data = with_bytes(forged(message(), **{name: value}), 4, bytes([version]))
    with refused(f"the header says {name} = {value}, but version {version} has only 0 to {most}"):
        decode(data, layout=FLAT)


@pytest.mark.parametrize(("name", "value", "most"), [("where", 6, 5), ("kind", 7, 6), ("coding", 2, 1)])
def test_unknown_in_the_header_of_version_3(name: str, value: int, most: int) -> None:
    data = with_bytes(forged(message(), **{name: value}), 4, b"\3")
    with refused(f"the header says {name} = {value}, but version 3 has only 0 to {most}"):
        decode(data, layout=FLAT)


@pytest.mark.parametrize(
    ("selector", "quantiser", "what"),
    [
        ("none", "fp32", "PLAIN FP32 values of ALL coordinates"),
        ("none", "int8(256)", "CODED INT8 values of ALL coordinates"),
        ("topk(0.9)", "bf16", "CODED BF16 values of LISTED coordinates"),
        ("rd(0.9)", "qsgd(500)", "CODED INT16 values of DRAWN coordinates"),
    ],
)
def test_version_3_is_for_what_the_others_cannot_say(selector: str, quantiser: str, what: str) -> None:
    rule = "version 3 is for PER_LEVEL or FEW values, or for ROTATED, FACTORED or CHUNKED coordinates"
    with refused(f"{rule}, not for {what}"):
        decode(with_bytes(message(selector, quantiser), 4, b"\3"), layout=FLAT)


@pytest.mark.parametrize("quantiser", ["fp32", "fp64"])
def test_version_1_does_not_code_floats_of_all_coordinates(quantiser: str) -> None:
    words = (
        f"CODED {quantiser.upper()} values of ALL coordinates need version 2, but the message is of version 1"
    )
    data = with_bytes(coded_model(quantiser), 4, b"\1")
    for read in (read_header, lambda m: decode(m, layout=FLAT)):
        with refused(words):
            read(data)


@pytest.mark.parametrize(
    ("selector", "quantiser", "what"),
    [
        ("none", "fp32", "PLAIN FP32 values of ALL coordinates"),
        ("none", "fp64", "PLAIN FP64 values of ALL coordinates"),
        ("none", "bf16", "CODED BF16 values of ALL coordinates"),
        ("none", "int8(256)", "CODED INT8 values of ALL coordinates"),
        ("none", "qsgd(500)", "CODED INT16 values of ALL coordinates"),
        ("topk(0.9)", "fp32", "CODED FP32 values of LISTED coordinates"),
        ("rd(0.9)", "fp64", "CODED FP64 values of DRAWN coordinates"),
    ],
)
def test_version_2_is_for_coded_floats_of_all_coordinates(selector: str, quantiser: str, what: str) -> None:
    data = with_bytes(message(selector, quantiser), 4, b"\2")
    for read in (read_header, lambda m: decode(m, layout=FLAT)):
        with refused(f"version 2 is for CODED FP32 or FP64 values of ALL coordinates, not for {what}"):
            read(data)


def test_another_client_or_sequence_number() -> None:
    data = message(client=4, sequence=9)
    assert decode(data, layout=FLAT, client=4, sequence=9).d == FLAT.d
    with refused("the message is of client 4, not of client 5"):
        decode(data, layout=FLAT, client=5)
    with refused("the message has sequence number 9, 8 was expected"):
        decode(data, layout=FLAT, sequence=8)
    with refused("the message has sequence number 9, 0 was expected"):
        decode(data, layout=FLAT, client=4, sequence=0)


@pytest.mark.parametrize(
    "other",
    [
        Layout(("x", *MODEL.names[1:]), MODEL.shapes, MODEL.dtypes),
        Layout(MODEL.names, ((5, 6, 3, 3), *MODEL.shapes[1:]), MODEL.dtypes),
        Layout(MODEL.names, MODEL.shapes, ("float64", *MODEL.dtypes[1:])),
        Layout(MODEL.names[::-1], MODEL.shapes[::-1], MODEL.dtypes),
        Layout(MODEL.names[:-1], MODEL.shapes[:-1], MODEL.dtypes[:-1]),
        Layout.flat(MODEL.d),
    ],
    ids=["names", "shapes", "dtypes", "order", "fewer", "flat"],
)
def test_another_model(other: Layout) -> None:
    with refused(ANOTHER_MODEL):
        decode(message(layout=MODEL), layout=other)


def test_another_d_under_the_same_schema() -> None:
    for d in (0, FLAT.d - 1, FLAT.d + 1, 2**64 - 1):
        with refused(ANOTHER_MODEL):
            decode(forged(message(), d=d), layout=FLAT)


def test_too_many_coordinates() -> None:
    data = message()  # k = 60
    for k in (601, 2**63, 2**64 - 1):
        with refused(f"the message must hold at most 600 values, got k = {k}"):
            decode(forged(data, k=k), layout=FLAT)
    with refused("the message must hold at most 59 values, got k = 60"):
        decode(data, layout=FLAT, kmax=59)
    assert decode(data, layout=FLAT, kmax=60).counts() == [60]
    with refused("the message must hold at most 600 values, got k = 601"):
        decode(forged(data, k=601), layout=FLAT, kmax=10_000)


def test_all_coordinates_are_d() -> None:
    with refused("a message of all coordinates must hold 600 values, got k = 599"):
        decode(forged(message("none"), k=599), layout=FLAT)


@pytest.mark.parametrize(
    ("selector", "quantiser", "coding", "words"),
    [
        ("none", "bf16", Coding.PLAIN, "BF16 values of ALL coordinates must be CODED, got PLAIN"),
        ("topk(0.9)", "fp32", Coding.PLAIN, "FP32 values of LISTED coordinates must be CODED, got PLAIN"),
        ("rd(0.9)", "int8(256)", Coding.PLAIN, "INT8 values of DRAWN coordinates must be CODED, got PLAIN"),
    ],
)
def test_a_coding_that_does_not_go_with_the_kind(
    selector: str, quantiser: str, coding: Coding, words: str
) -> None:
    with refused(words):
        decode(forged(message(selector, quantiser), coding=coding), layout=FLAT)


# ---------------------------------------------------------------------------- lengths


def test_truncated_and_extended() -> None:
    data = message()
    n = len(data)
    for cut in (SIZE, n - 5, n - 1):
        with refused(f"the message is cut short: it must have {n} bytes, got {cut}"):
            decode(data[:cut], layout=FLAT)
    for more in (b"\0", data):
        with refused(f"the message is too long: it must have {n} bytes, got {n + len(more)}"):
            decode(data + more, layout=FLAT)


def test_over_the_length_cap() -> None:
    data = message()
    n, most = len(data), 16 * FLAT.d + 65536
    assert decode(data, layout=FLAT, max_bytes=n).d == FLAT.d
    with refused(f"the message must have at most {n - 1} bytes, got {n}"):
        decode(data, layout=FLAT, max_bytes=n - 1)
    with refused(f"the message must have at most {most} bytes, got {most + 1}"):
        decode(data + bytes(most + 1 - n), layout=FLAT)
    with refused(f"the message is too long: it must have {n} bytes, got {most}"):
        decode(data + bytes(most - n), layout=FLAT)


def test_index_section_of_the_wrong_length() -> None:
    drawn, everything = message("rd(0.9)"), message("none")
    for n in (0, 15, 17):
        with refused(f"the section of the indices must have 16 bytes, got {n}"):
            decode(forged(drawn, coordinates=bytes(n)), layout=FLAT)
    with refused("the section of the indices must have 0 bytes, got 1"):
        decode(forged(everything, coordinates=b"\1"), layout=FLAT)


def test_copied_section_of_the_wrong_length() -> None:
    def words(n: int, k: int, needed: int) -> str:
        return f"the section of copied values must have {needed} bytes for k = {k}, got {n}"

    for selector, quantiser, k, needed in (
        ("none", "fp32", 600, 2400),
        ("none", "fp64", 600, 4800),
        ("topk(0.9)", "fp32", 60, 120),
        ("topk(0.9)", "fp64", 60, 360),
        ("topk(0.9)", "bf16", 60, 0),
        ("topk(0.9)", "int4(64)", 60, 6 + 4),
        ("none", "int4(64)", 600, 6 + 4 * 10),
        ("none", "sign", 600, 6 + 4),
    ):
        data = message(selector, quantiser)
        copied = sections(data)[2]
        assert len(copied) == needed
        for other in (copied[:-1], copied + b"\0"):
            if other != copied:
                with refused(words(len(other), k, needed)):
                    decode(forged(data, copied=other), layout=FLAT)
    levels = message("topk(0.9)", "int8(256)")
    with refused(words(5, 60, 6)):  # not even room for block and top
        decode(forged(levels, copied=bytes(5)), layout=FLAT)
    with refused(words(10, 60, 6 + 4 * 60)):  # a block of one value needs a scale for each
        decode(forged(levels, copied=struct.pack("<I", 1) + sections(levels)[2][4:]), layout=FLAT)


@pytest.mark.parametrize(("quantiser", "width"), [("fp32", 2), ("fp64", 6)])
def test_copied_section_of_a_coded_model(quantiser: str, width: int) -> None:
    data, needed = coded_model(quantiser), 600 * width
    copied = sections(data)[2]
    for other in (b"", copied[:-1], copied + b"\0", bytes(600 * (width + 2))):
        words = f"the section of copied values must have {needed} bytes for k = 600, got {len(other)}"
        with refused(words):
            decode(forged(data, copied=other), layout=FLAT)


def test_coded_section_of_a_coded_model() -> None:
    data, large = coded_model(), Layout.flat(200_000)
    claim = {"d": large.d, "k": large.d, "schema": large.schema_hash}
    with refused("the section of coded values has 0 bytes, which does not fit 200000 values"):
        decode(forged(data, coded=b"", copied=bytes(2 * large.d), **claim), layout=large)
    values = sections(data)[1]
    with refused("the section of the values ends too early"):
        decode(forged(data, coded=values[: len(values) // 2]), layout=FLAT)
    for extra in (b"\0", bytes(9), b"\xff" * 12):
        with refused("the section of the values has extra bytes at its end"):
            decode(forged(data, coded=values + extra), layout=FLAT)
    with refused("the section of the indices must have 0 bytes, got 1"):
        decode(forged(data, coordinates=b"\1"), layout=FLAT)
    empty = Layout.flat(0)
    nothing = {"d": 0, "k": 0, "schema": empty.schema_hash, "copied": b""}
    assert decode(forged(data, coded=b"", **nothing), layout=empty).counts() == [0]
    with refused("the section of coded values has 1 bytes, which does not fit 0 values"):
        decode(forged(data, coded=b"\1", **nothing), layout=empty)


def test_coded_section_of_the_wrong_length() -> None:
    large = Layout.flat(200_000)
    short = forged(message("none", "bf16"), coded=b"", d=large.d, k=large.d, schema=large.schema_hash)
    with refused("the section of coded values has 0 bytes, which does not fit 200000 values"):
        decode(short, layout=large)
    with refused("the section of coded values has 1 bytes, which does not fit 0 values"):
        decode(forged(message("none"), coded=b"\1"), layout=FLAT)
    nothing = encode(payload("threshold(0.5)", "bf16", FLAT, zero=True), FLAT)
    with refused("the section of coded values has 3 bytes, which does not fit 0 values"):
        decode(forged(nothing, coded=b"\1\2\3"), layout=FLAT)


def test_swapped_sections() -> None:
    data = message("topk(0.9)", "fp32")
    coordinates, values, copied = sections(data)
    with refused(f"the section of copied values must have 120 bytes for k = 60, got {len(values)}"):
        decode(forged(data, coordinates, copied, values), layout=FLAT)
    with refused("the section of the indices has extra bytes at its end"):
        decode(forged(data, values, coordinates), layout=FLAT)


# ---------------------------------------------------------------------------- the checksum


def test_every_flipped_bit_is_noticed() -> None:
    """The checksum detects damage past the header; within it, another check may come first."""
    data = message("rd(0.9)", "sign")
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with refused(DAMAGED) if bit >= 8 * (SIZE + 16 + 16) else pytest.raises(WireError):
            decode(bytes(damaged), layout=FLAT)


# ---------------------------------------------------------------------------- the decoders


def test_an_index_beyond_the_last_coordinate() -> None:
    data = message()
    indices = decode(data, layout=FLAT).indices
    assert indices is not None
    for last in (600, 650, 2000):
        beyond = coded_indices([*indices[:-1].tolist(), last], FLAT)
        with refused("an index lies beyond the last coordinate, 599"):
            decode(forged(data, coordinates=beyond), layout=FLAT)


@pytest.mark.parametrize("k", [19, 21])
def test_more_or_fewer_indices_than_k(k: int) -> None:
    start = 270 + 6 + 600  # the third tensor's 20 rows each have a bias: all of them, and nothing else
    dense = coded_indices(list(range(start, start + 20)), MODEL)
    assert dense[0] >> 7 == 1  # tensor by tensor
    values = Floats(np.arange(k, dtype=np.int16), "bf16")
    listed = Payload(MODEL.d, np.array([0, k]), np.arange(start, start + k), values)
    with refused(f"the message lists more or fewer indices than k = {k}"):
        decode(forged(encode(listed, MODEL), coordinates=dense), layout=MODEL)


def test_a_key_that_does_not_draw_k() -> None:
    data = message("rd(0.9)")
    k = read_header(data).k
    key, keep = struct.unpack("<qQ", sections(data)[0])
    for forgery in ((key + 1, keep), (key, 0), (key, 2**53), (key, 2**53 + 1), (key, 2**64 - 1)):
        with refused(f"the key of the message does not draw k = {k} coordinates"):
            decode(forged(data, coordinates=struct.pack("<qQ", *forgery)), layout=FLAT)


def test_keep_above_one_is_refused_even_where_it_draws_k() -> None:
    """2^53 draws all; anything above would too, but is no probability."""
    data = message("rd(0)")
    key, keep = struct.unpack("<qQ", sections(data)[0])
    assert (keep, read_header(data).k) == (2**53, 600)
    with refused("the key of the message does not draw k = 600 coordinates"):
        decode(forged(data, coordinates=struct.pack("<qQ", key, 2**53 + 1)), layout=FLAT)


@pytest.mark.parametrize("quantiser", ["fp32", "fp64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_plain_values_that_are_not_finite(quantiser: str, bad: float) -> None:
    data = message("none", quantiser)
    for place in (0, 599):
        values = np.frombuffer(sections(data)[2], "<f4" if quantiser == "fp32" else "<f8").copy()
        values[place] = bad
        with refused(NOT_FINITE):
            decode(forged(data, copied=values.tobytes()), layout=FLAT)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("sign", [0, 0x8000])
@pytest.mark.parametrize("bad", ["infinity", "nan"])
def test_coded_values_that_are_not_finite(dtype: str, sign: int, bad: str) -> None:
    infinity = 0x7FF0 if dtype == "fp64" else 0x7F80  # upper 16 bits; NaN has more of them set
    upper = [0x3F80, infinity + (bad == "nan") | sign, 0x3F81]
    array = {"bf16": np.int16, "fp32": np.float32, "fp64": np.float64}[dtype]
    data = encode(first_of_flat(Floats(np.zeros(3, array), dtype), 3), FLAT)
    fine = forged(data, coded=coded([0x3F80, infinity - 1 | sign, 0x3F81], True))
    assert decode(fine, layout=FLAT).counts() == [3]
    with refused(NOT_FINITE):
        decode(forged(data, coded=coded(upper, True)), layout=FLAT)


@pytest.mark.parametrize(("quantiser", "infinity"), [("fp32", 0x7F80), ("fp64", 0x7FF0)])
def test_a_coded_model_that_is_not_finite(quantiser: str, infinity: int) -> None:
    data = coded_model(quantiser)
    fine = forged(data, coded=coded([0x3F80] * 599 + [infinity - 1], True))
    assert decode(fine, layout=FLAT).counts() == [600]
    for bad in (infinity, infinity + 1, infinity | 0x8000):
        with refused(NOT_FINITE):
            decode(forged(data, coded=coded([0x3F80] * 599 + [bad], True)), layout=FLAT)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite(bad: float) -> None:
    data = message("none", "int4(64)")
    copied = sections(data)[2]
    for block in (0, 9):
        place = 6 + 4 * block
        forgery = copied[:place] + struct.pack("<f", bad) + copied[place + 4 :]
        with refused("a scale is not a finite number"):
            decode(forged(data, copied=forgery), layout=FLAT)


@pytest.mark.parametrize("numbers", [[0, 32, 1], [32, 32, 32], [0x8020, 0, 0], [1, 32767, 2]])
def test_a_level_above_top(numbers: list[int]) -> None:
    values = Levels(np.array([1, -31, 0], np.int8), np.ones(1, np.float32), 0, 31)
    data = encode(first_of_flat(values, 3), FLAT)
    assert sections(data)[1] == coded([1, 0x801F, 0], False)
    with refused("a level exceeds the largest magnitude, `top` = 31"):
        decode(forged(data, coded=coded(numbers, False)), layout=FLAT)


@pytest.mark.parametrize(("dtype", "top", "largest"), [("int8", 128, 127), ("int16", 32768, 32767)])
def test_a_top_that_the_levels_cannot_hold(dtype: str, top: int, largest: int) -> None:
    words = f"`top` must be from 0 to {largest} for {dtype.upper()} levels, got {top}"
    values = Levels(np.array([1, -7, 0], dtype), np.ones(1, np.float32), 0, largest)
    data = encode(first_of_flat(values, 3), FLAT)
    assert decode(data, layout=FLAT).counts() == [3]
    with refused(words):
        decode(forged(data, copied=struct.pack("<IHf", 0, top, 1.0)), layout=FLAT)
    with refused(words):
        encode(first_of_flat(replace(values, top=top), 3), FLAT)


@pytest.mark.parametrize("extra", [b"\0", bytes(9), bytes(11) + b"\1", b"\xff" * 12])
def test_a_section_that_goes_on(extra: bytes) -> None:
    """A zero at the end is never written; and past the words that are read, nothing may follow."""
    data = message()
    coordinates, values, _ = sections(data)
    with refused("the section of the indices has extra bytes at its end"):
        decode(forged(data, coordinates=coordinates + extra), layout=FLAT)
    with refused("the section of the values has extra bytes at its end"):
        decode(forged(data, coded=values + extra), layout=FLAT)


def test_no_coordinate_and_yet_a_section() -> None:
    nothing = encode(payload("threshold(0.5)", "fp32", FLAT, zero=True), FLAT)
    for section in (b"\0", b"\0" * 8 + b"\1"):
        with refused("the section of the indices has extra bytes at its end"):
            decode(forged(nothing, coordinates=section), layout=FLAT)


# ---------------------------------------------------------------------------- bombs

HUGE = Layout.flat(2**27)
RANDOM = np.random.default_rng(0).bytes(1000)
EVERY = struct.pack("<qQ", 1, 2**53)
SCALE = struct.pack("<IHf", 0, 1, 1.0)
MANY, TURNED = struct.pack("<IHf", 1, 127, 1.0), struct.pack("<qI", 1, 2**20)
COPIED = "the section of copied values must have {1} bytes for k = 134217728, got {0}"
CODED = "the section of coded values has {} bytes, which does not fit 134217728 values"


@pytest.mark.parametrize(
    ("where", "kind", "coding", "parts", "words"),
    [
        (Where.LISTED, Kind.BF16, Coding.CODED, (RANDOM[:100], RANDOM[:900], b""), CODED.format(900)),
        (Where.LISTED, Kind.INT8, Coding.CODED, (RANDOM[:500], RANDOM[:500], SCALE), CODED.format(500)),
        (Where.LISTED, Kind.INT16, Coding.CODED, (b"", b"", SCALE), CODED.format(0)),
        (Where.LISTED, Kind.FP32, Coding.CODED, (b"", RANDOM, b""), COPIED.format(0, 2**28)),
        (Where.DRAWN, Kind.BF16, Coding.CODED, (EVERY, RANDOM, b""), CODED.format(1000)),
        (Where.ALL, Kind.FP64, Coding.PLAIN, (b"", b"", RANDOM), COPIED.format(1000, 2**30)),
        (Where.ALL, Kind.INT8, Coding.CODED, (b"", RANDOM, SCALE), CODED.format(1000)),
        (Where.ALL, Kind.FP32, Coding.CODED, (b"", RANDOM, b""), COPIED.format(0, 2**28)),
        (Where.ALL, Kind.FP64, Coding.CODED, (b"", b"", RANDOM), COPIED.format(1000, 6 * 2**27)),
        (Where.ALL, Kind.PER_LEVEL, Coding.CODED, (b"", RANDOM, SCALE), CODED.format(1000)),
        (Where.CHUNKED, Kind.BF16, Coding.CODED, (RANDOM, RANDOM, b""), CODED.format(1000)),
        (Where.ROTATED, Kind.PER_LEVEL, Coding.CODED, (TURNED, RANDOM, SCALE), CODED.format(1000)),
        (Where.FACTORED, Kind.BF16, Coding.CODED, (bytes(4), RANDOM, b""), CODED.format(1000)),
        (Where.LISTED, Kind.PER_LEVEL, Coding.CODED, (b"", b"", MANY), COPIED.format(10, 6 + 508 * 2**27)),
    ],
)  # fmt: skip
def test_a_bomb_allocates_nothing(
    where: Where, kind: Kind, coding: Coding, parts: tuple[bytes, bytes, bytes], words: str
) -> None:
    """About 1 kB that claims 2^27 values."""
    header = Header(where, kind, coding, HUGE.schema_hash, HUGE.d, HUGE.d, 0, 0, 0, *map(len, parts))
    bomb = sealed(header.pack() + b"".join(parts))
    tracemalloc.start()
    try:
        with refused(words):
            decode(bomb, layout=HUGE)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------- the order of the checks

Spoil = Callable[[bytes], bytes]
LADDER: list[tuple[str, Spoil, dict[str, Any]]] = [
    ("the message must have at most 100 bytes, got ", lambda m: m, {"max_bytes": 100}),
    ("not a message: ", lambda m: b"XXXX" + m[4:], {}),
    ("the message is of version 9", lambda m: with_bytes(m, 4, b"\x09"), {}),
    ("the header says where = 9", lambda m: with_bytes(m, 5, b"\x09"), {}),
    ("the header says kind = 9", lambda m: with_bytes(m, 6, b"\x09"), {}),
    ("the header says coding = 9", lambda m: with_bytes(m, 7, b"\x09"), {}),
    ("version 2 is for CODED FP32", lambda m: with_bytes(m, 4, b"\x02"), {}),
    ("the message is of client 0, not of client 1", lambda m: m, {"client": 1}),
    ("the message has sequence number 0", lambda m: m, {"sequence": 1}),
    ("the message is for another model", lambda m: with_bytes(m, 8, bytes(8)), {}),
    ("the message must hold at most 5 values, got k = 60", lambda m: m, {"kmax": 5}),
    ("the message is cut short", lambda m: m[:-1], {}),
    ("the section of copied values must have", lambda m: forged(m, copied=sections(m)[2] + b"\0"), {}),
    ("the checksum does not fit", lambda m: m[:-1] + bytes([m[-1] ^ 1]), {}),
    ("the section of the indices has extra", lambda m: forged(m, sections(m)[0] + b"\0"), {}),
    (NOT_FINITE, lambda m: forged(m, coded=coded([0x7F80] * 60, True)), {}),
]


@pytest.mark.parametrize(("earlier", "later"), list(combinations(range(len(LADDER)), 2)))
def test_the_earlier_check_speaks(earlier: int, later: int) -> None:
    """Return a message with two faults. The later fault is made first, since forging needs a sound header."""
    (first, spoil, options), (second, spoil_too, more) = LADDER[earlier], LADDER[later]
    with pytest.raises(WireError, match=f"^{second}"):
        decode(spoil_too(message()), layout=FLAT, **more)
    # The other way round for the checksum, which forging would repair.
    both = spoil_too(spoil(message())) if "checksum" in second else spoil(spoil_too(message()))
    with pytest.raises(WireError, match=f"^{first}"):
        decode(both, layout=FLAT, **more | options)


# ---------------------------------------------------------------------------- what is not encoded


def listed(indices: list[int]) -> Payload:
    k = len(indices)
    return Payload(FLAT.d, np.array([0, k]), np.array(indices), Floats(np.ones(k, np.float32), "fp32"))


@pytest.mark.parametrize("indices", [[2, 1], [1, 1], [0, 600], [-1, 3], [0, 5, 4, 10], [2**62]])
def test_indices_that_are_not_encoded(indices: list[int]) -> None:
    for write in (encode, measure):
        with refused(UNORDERED):
            write(listed(indices), FLAT)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("selector", ["none", "topk(0)"])
@pytest.mark.parametrize("quantiser", ["fp32", "fp64", "bf16"])
def test_values_that_are_not_encoded(selector: str, quantiser: str, bad: float) -> None:
    good = payload(selector, quantiser, FLAT)
    assert isinstance(good.values, Floats)
    data = good.values.data.copy()
    data[300] = np.float32(bad).view(np.int32) >> 16 if quantiser == "bf16" else bad
    for code_floats in (False, True):
        with refused(NOT_FINITE):
            encode(replace(good, values=replace(good.values, data=data)), FLAT, code_floats=code_floats)


def test_levels_that_are_not_encoded() -> None:
    for level in (8, -8):
        values = Levels(np.array([1, level], np.int8), np.ones(1, np.float32), 0, 7)
        with refused("a level exceeds the largest magnitude, `top` = 7"):
            encode(first_of_flat(values, 2), FLAT)
    for bad in (np.nan, np.inf):
        values = Levels(np.array([1, 2], np.int8), np.array([bad], np.float32), 0, 7)
        with refused("a scale is not a finite number"):
            encode(first_of_flat(values, 2), FLAT)


def test_payloads_that_are_not_encoded() -> None:
    one = listed([1, 2])
    with refused("a message must hold the payload of one client, got 2: use `Payload.clients`"):
        encode(replace(one, offsets=np.array([0, 1, 2])), FLAT)
    with refused("the payload must have 599 coordinates, as the layout has, got 600"):
        encode(one, Layout.flat(599))


def floats(k: int) -> Floats:
    return Floats(np.ones(k, np.float32), "fp32")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            Payload(600, np.array([0, 2]), np.array([0, 1]), floats(300)),
            "must have 2 indices and 2 values, got ",
        ),
        (
            Payload(600, np.array([0, 2]), np.array([0, 1, 2]), floats(2)),
            "must have 2 indices and 2 values, got ",
        ),
        (Payload(600, np.array([0, 2]), None, floats(2)), "must have 2 indices and 2 values, got "),
        (
            Payload(600, np.array([0, 2]), np.array([5, 700]), floats(2), Mask(np.array([1]), 2**50)),
            "increase strictly and lie from 0 to 599",
        ),
        (first_of_flat(Levels(np.ones(2, np.int8), np.ones(3, np.float32), 2, 1), 2), "need 1 scales, got 3"),
        (
            first_of_flat(Levels(np.ones(2, np.int8), np.ones(1, np.float32), 2, -1), 2),
            "`top` must be from 0 to 127 for INT8 levels, got -1",
        ),
        (
            first_of_flat(Levels(np.ones(2, np.int32), np.ones(1, np.float32), 2, 1), 2),
            "1-D array of int8 or int16, got ",
        ),
        (
            first_of_flat(Levels(np.ones(2, np.int8), np.ones(1), 2, 1), 2),
            "1-D array of float32, got 1-D float64",
        ),
        (first_of_flat(Floats(np.ones(2, np.float32), "bf16"), 2), "1-D array of int16, got 1-D float32"),
        (
            first_of_flat(Floats(np.ones(2, np.float16), "fp16"), 2),
            "the dtype of Floats must be fp32, fp64 or bf16, got 'fp16'",
        ),
        (Payload(600, np.array([0, 2]), np.array([1.5, 5.2]), floats(2)), "1-D array of integers, got "),
        (Payload(600, np.array([0, 2]), np.ones((2, 1), int), floats(2)), "1-D array of integers, got "),
        (
            Payload(600, np.array([0, 2]), np.array([5, 7]), floats(2), Mask(np.array([1]), -1)),
            "`keep` of the mask must be from 0 to 2\\^53, got -1",
        ),
        (
            first_of_flat(Levels(np.full(2, -32768, np.int16), np.ones(1, np.float32), 2, 32767), 2),
            "a level exceeds the largest magnitude, `top` = 32767",
        ),
        (
            first_of_flat(Levels(np.ones(2, np.int8), np.ones(1, np.float32), 2**32, 1), 2),
            "`block` must be .*, got 42949",
        ),
    ],
)
def test_encode_looks_whether_the_arrays_fit(bad: Payload, words: str) -> None:
    """The coders do not check indices and would read and write out of bounds."""
    with pytest.raises(WireError, match=words):
        encode(bad, FLAT)


@pytest.mark.parametrize("sender", [{"client": -1}, {"sequence": 2**64}, {"round": 2**32}])
def test_encode_refuses_a_sender_that_has_no_place(sender: dict[str, int]) -> None:
    with pytest.raises(WireError, match="must be from 0 to"):
        encode(first_of_flat(floats(2), 2), FLAT, **sender)
