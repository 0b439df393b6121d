"""The bytes of all versions, pinned: a message that changes without a new version fails here."""

from __future__ import annotations

import pytest

from cfedavg.wire import decode, measure, read_header
from cfedavg.wire.frame import Coding, Kind, Where
from tests.core.test_payload import assert_same
from tests.golden_cases import FOLDER, cases, earlier_cases, message, version_3_cases, whole_float_cases

ALL = {"v1": cases, "v2": whole_float_cases, "v3": version_3_cases}
CASES = {f"{version}-{name}": case for version, found in ALL.items() for name, *case in found()}
EARLIER = {f"v1-{name}": case for name, *case in earlier_cases()}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    layout, payload = CASES[name]
    coded = name.startswith("v2")
    pinned = (FOLDER / f"{name}.cfa").read_bytes()
    assert message(payload, layout, code_floats=coded) == pinned
    assert_same(decode(pinned, layout=layout, client=2**40 + 3, sequence=77), payload)
    assert measure(payload, layout, code_floats=coded) == [len(pinned)]
    assert f"v{pinned[4]}" == name[:2]


@pytest.mark.parametrize("name", EARLIER)
def test_messages_of_an_earlier_encoder_are_read(name: str) -> None:
    layout, payload = EARLIER[name]
    pinned = (FOLDER / f"{name}.cfa").read_bytes()
    assert (pinned[4], read_header(pinned).kind) == (1, Kind.INT8)
    assert_same(decode(pinned, layout=layout, client=2**40 + 3, sequence=77), payload)
    assert read_header(message(payload, layout)).kind is Kind.FEW


def test_every_kind_is_pinned() -> None:
    headers = {path.stem: read_header(path.read_bytes()) for path in FOLDER.glob("v*.cfa")}
    assert headers.keys() == CASES.keys() | EARLIER.keys()
    first = [h for name, h in headers.items() if name.startswith("v1")]
    early = set(Where) - {Where.ROTATED, Where.FACTORED, Where.CHUNKED}
    kinds = set(Kind) - {Kind.PER_LEVEL, Kind.FEW}
    assert {(h.where, h.kind) for h in first} == {(w, k) for w in early for k in kinds}
    assert {h.coding for h in first} == set(Coding)
    second = {(h.where, h.kind, h.coding) for name, h in headers.items() if name.startswith("v2")}
    assert second == {(Where.ALL, kind, Coding.CODED) for kind in (Kind.FP32, Kind.FP64)}
    third = {(h.where, h.kind) for name, h in headers.items() if name.startswith("v3")}
    assert third == {(w, k) for w in Where for k in Kind if w not in early or k not in kinds}
