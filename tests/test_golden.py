"""The bytes of version 1, pinned: a message that changes without a new version fails here."""

from __future__ import annotations

import pytest

from cfedavg.wire import decode, measure, read_header
from cfedavg.wire.header import VERSION, Coding, Kind, Where
from tests.golden_cases import FOLDER, cases, message
from tests.test_payload import assert_same

CASES = {name: (layout, payload) for name, layout, payload in cases()}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    layout, payload = CASES[name]
    pinned = (FOLDER / f"v{VERSION}-{name}.cfa").read_bytes()
    assert message(payload, layout) == pinned
    assert_same(decode(pinned, layout=layout, client=2**40 + 3, sequence=77), payload)
    assert measure(payload, layout) == [len(pinned)]


def test_every_kind_is_pinned() -> None:
    headers = [read_header(path.read_bytes()) for path in FOLDER.glob(f"v{VERSION}-*.cfa")]
    assert len(headers) == len(CASES)
    assert {(h.where, h.kind) for h in headers} == {(w, k) for w in Where for k in Kind}
    assert {h.coding for h in headers} == set(Coding)
