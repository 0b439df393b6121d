"""docs/envelope.md is complete: a client written from it takes part in a federation. C reads the bytes."""

from __future__ import annotations

import ctypes as c
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg.channel import Copies
from cfedavg.compress import parse
from cfedavg.core import keys
from cfedavg.core.arrays import from_bf16, to_bf16
from cfedavg.core.errors import InputError
from cfedavg.core.layout import Layout
from cfedavg.federate import protocol
from cfedavg.federate.client import ClientMessage, pack_message, unpack_message
from cfedavg.flower import replies
from cfedavg.flower.array_layout import Body, Form
from cfedavg.flower.requests import Order
from cfedavg.wire import WireError
from tests import plain_envelope as plain
from tests.clients import library as lib
from tests.clients.library import needs_compiler
from tests.clients.plain_client import Arrays, PlainClient
from tests.grid import Adding, Federation, LocalNode, numbers, same

U32, U64 = st.integers(1, 2**32 - 1), st.integers(0, 2**64 - 1)


# ---------------------------------------------------------------------------- the page and the package


def test_fields_and_codes() -> None:
    page = (lib.FOLDER.parents[1] / "docs" / "envelope.md").read_text()
    assert set(Order.__dataclass_fields__) == plain.REQUEST
    assert all(f"`{name}`" in page for name in plain.REQUEST)
    assert set(replies.CAUSES) == set(plain.ERRORS)
    assert all(f"| {code} |" in page for code in plain.ERRORS)
    assert set(replies.ReplyRecord._fields) | {"check"} == plain.reply(1, 1, 1, b"").keys()
    assert all(f"`{name}`" in page for name in [*replies._BOUNDS, "metrics", "arrays", replies.SAMPLES])


@given(st.binary(max_size=50), st.integers(0, 9), st.binary(max_size=20), U32, U32, st.integers(0, 2**63 - 1))
def test_replies(
    payload: bytes, K: int, apart: bytes, generation: int, number: int, incarnation: int
) -> None:
    facts = {"K": K, "metrics": {"ü": {"a": [1, 2.5]}}}
    stamp = protocol.Stamp(generation, number)
    for message in (
        plain.write_update(payload, facts, apart),
        pack_message(ClientMessage(payload, facts, apart)),
    ):
        assert plain.read_update(message, 10, len(apart)) == (payload, facts, apart)
        assert unpack_message(message, 100, len(apart)) == (payload, facts, apart)
        sent = plain.reply(generation, number, incarnation, message)
        assert replies.ReplyRecord(stamp, incarnation, message).check == sent["check"]
        mark = protocol.make_mark(stamp, incarnation, message)
        assert [*mark.stamp, *mark[1:]] == plain.mark(sent)


broadcasts = st.builds(
    lambda start, messages, kind, digest: make_broadcast(start, messages, kind, digest),
    st.builds(protocol.Version, U32, st.integers(0, 100), U64),
    st.lists(st.binary(max_size=9), max_size=4),
    st.integers(0, 2),
    U64,
)


def make_broadcast(
    start: protocol.Version, messages: list[bytes], kind: int, digest: int
) -> protocol.Broadcast:
    versions = protocol.list_versions(start, messages)
    if kind == plain.CHAIN:
        return protocol.Chain(start, tuple(messages), versions[-1])
    if kind == plain.CHANGES and messages:
        return protocol.Changes(versions[:-1], b"new", versions[-1], digest)
    return protocol.Whole(b"all", versions[-1], digest)


def plain_of(broadcast: protocol.Broadcast) -> plain.Broadcast:
    version = tuple(broadcast.version)
    if isinstance(broadcast, protocol.Chain):
        return plain.Broadcast(plain.CHAIN, version, 0, [tuple(broadcast.start)], [*broadcast.messages])
    earlier = [tuple(each) for each in getattr(broadcast, "since", ())]
    kind = plain.CHANGES if earlier else plain.WHOLE
    return plain.Broadcast(kind, version, broadcast.digest, earlier, [broadcast.message])


@given(broadcasts, st.binary(max_size=9))
def test_bodies_and_broadcasts(broadcast: protocol.Broadcast, apart: bytes) -> None:
    data = protocol.pack(broadcast)
    assert plain.read_broadcast(data) == plain_of(broadcast)
    assert plain.write_broadcast(plain_of(broadcast)) == data
    assert plain.write_body(data, apart) == Body(data, apart).pack()
    assert plain.read_body(Body(data, apart).pack()) == (data, apart)


@given(broadcasts, st.data())
def test_damaged_broadcasts_are_refused_by_both(broadcast: protocol.Broadcast, data: st.DataObject) -> None:
    damaged = bytearray(protocol.pack(broadcast))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        damaged[-4:] = protocol.zlib.crc32(damaged[:-4]).to_bytes(4, "little")
    verdicts = []
    for read, error in ((protocol.unpack, WireError), (plain.read_broadcast, ValueError)):
        try:
            read(bytes(damaged))
            verdicts.append(True)
        except error:
            verdicts.append(False)
    if lib.shutil.which("cc"):
        verdicts.append(lib.try_to_unpack(bytes(damaged)) == 0)
    assert len(set(verdicts)) == 1


def test_versions() -> None:
    first = protocol.make_first_version(3, 7, protocol.compute_digest(b"copy"))
    assert plain.first_version(3, 7, b"copy") == tuple(first)
    assert plain.next_version(tuple(first), b"m") == tuple(protocol.make_next_version(first, b"m"))


floats = st.floats(-(2.0**126), 2.0**126, width=32)


@settings(max_examples=40)
@given(st.lists(floats, min_size=6, max_size=6), st.lists(floats, min_size=6, max_size=6), st.booleans())
def test_adding_to_a_copy(x: list[float], p: list[float], rounds: bool) -> None:
    copies = Copies(rounds)
    w = copies.make(np.array(x, np.float32))
    payload = parse("topk(0.4)").compress(np.array(p, np.float32), key=0)
    expected = copies.receive(w, payload)
    found = w.tolist()
    for j, value in zip(payload.indices, payload.values.data.tolist(), strict=True):
        found[j] = plain.add(found[j], value, rounds)
    assert np.array(found, np.float32).tobytes() == expected.tobytes()


def test_draws_and_the_largest() -> None:
    word = keys.signed(keys.key(9, 4, 2, keys.Purpose.SELECT))
    assert [keys.signed(each) for each in plain.keys(9, 4, 2)] == [
        keys.derive(word, keys.Purpose.SELECT), keys.derive(word, keys.Purpose.ROUND)
    ]  # fmt: skip
    p = np.array([3, -1, 4, 1, -5, 9, 2, -6, 5, 3, 5], np.float32)
    for comp in (0.0, 0.5, 0.6, 0.99):
        assert plain.top_k(p.tolist(), comp) == parse(f"topk({comp})").compress(p, key=0).indices.tolist()


def test_forms() -> None:
    made = {
        "w": np.ones((2, 3), np.float32),
        "a.running_var": np.ones(4, np.float32),
        "n": np.ones(2, np.int64),
    }
    form = Form.of(made)
    found = plain.read_form(form.text)
    assert found.tensors == (["w"], [[2, 3]], ["float32"])
    for rounds in (False, True):
        assert found.uncompressed_length(rounds) == form.count_bytes(short=rounds)


# ---------------------------------------------------------------------------- a federation

NET: Arrays = {
    "w": np.zeros((12, 9), np.float32),
    "b": np.arange(5, dtype=np.float32),
    "bn.running_mean": np.array([0.25, -1], np.float32),
    "steps": np.array(3),
}


def train(arrays: Arrays, request: Message) -> Arrays:
    """What tests.grid.Adding does for the first node."""
    change = numbers(0, request.content.config_records["config"]["server-round"], arrays)
    return {name: array + change[name] for name, array in arrays.items()}


def run(folder: Path, client: PlainClient | None, **options: Any) -> tuple[Federation, Any]:
    """Run a federation in which replies are lost; node 0 is the plain client if one is given."""
    it, chance = Federation(folder, Adding().app, 3, NET), random.Random(4)

    def on_request(node: LocalNode, request: Message) -> Message | None:
        missed = (
            chance.random() < 0.1
        )  # drawn for every request, so that both federations see the same faults
        lost = chance.random() < 0.2
        answer = client.answer if client and node.id == 100 else node.answer
        reply = None if missed else answer(request)
        return None if lost else reply

    it.grid.on_request = on_request
    return it, it.start(8, **options)


@needs_compiler
@pytest.mark.usefixtures("without_waiting")
@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("topk(0.7)", "none"),
        ("topk(0.9) >> bf16", "topk(0.8) >> int4(16)"),
        ("topk(0.7)", "topk(0.5)"),
    ],
)
def test_a_client_written_from_the_pages_takes_part(up: str, down: str, tmp_path: Path) -> None:
    options = {"compressor": up, "compressor_down": down}
    ours, expected = run(tmp_path / "ours", None, **options)
    client = PlainClient(train)
    theirs, found = run(tmp_path / "theirs", client, **options)
    assert same(found.arrays, expected.arrays)
    assert theirs.outcomes == ours.outcomes
    applied = [row["applied"] for row in theirs.of_nodes if row["node"] == "node0"]
    assert 3 <= sum(applied) < len(applied)
    assert client.started == 1  # its residual has never been outdated
    if down != "none":
        assert {plain.CHAIN, plain.WHOLE} <= set(client.kinds)


# ---------------------------------------------------------------------------- the C library


@needs_compiler
@given(st.binary(max_size=40), st.binary(max_size=20), st.binary(max_size=9), U32, U32)
def test_replies_in_c(payload: bytes, text: bytes, apart: bytes, generation: int, number: int) -> None:
    message = lib.pack_update(payload, text, apart)
    assert message == plain.struct.pack("<II", len(payload), len(text)) + payload + text + apart
    assert lib.unpack_update(message, len(payload), len(apart)) == (payload, text, apart)
    for most, uncompressed in ((len(payload) - 1, len(apart)), (len(payload), len(apart) + 1)):
        if most >= 0:
            with pytest.raises(lib.Refused, match=r"payload is longer|lengths in the message"):
                lib.unpack_update(message, most, uncompressed)
    with pytest.raises(lib.Refused, match="at least 8 bytes"):
        lib.unpack_update(message[:7], 100, 0)
    check = lib.library().cfedavg_check_reply(
        generation, number, c.c_uint64(2**63 - 1), message, lib.SIZE(len(message))
    )
    assert check == plain.reply(generation, number, 2**63 - 1, message)["check"]
    assert lib.digest(message) == plain.digest(message)


@needs_compiler
@settings(max_examples=50)
@given(broadcasts, st.binary(max_size=9))
def test_bodies_and_broadcasts_in_c(broadcast: protocol.Broadcast, apart: bytes) -> None:
    packed = protocol.pack(broadcast)  # what C returns points into it
    data = plain.write_body(packed, apart)
    assert lib.pack_body(packed, apart) == data
    assert lib.unpack_body(data) == (packed, apart)
    for damaged in (data[:11], data[:-1], data + b"\0"):
        with pytest.raises(lib.Refused, match="the body of the request is damaged"):
            lib.unpack_body(damaged)
        with pytest.raises(InputError):
            Body.unpack(damaged)
    found = lib.unpack_broadcast(packed)
    expected = plain_of(broadcast)
    n = len(expected.messages) if expected.kind == plain.CHAIN else len(expected.earlier)
    assert (found.kind, found.generation, found.round, found.hash) == (expected.kind, *expected.version)
    assert (found.digest, found.earlier) == (expected.digest, n)
    numbers = [each[2] for each in expected.earlier]
    numbers += [len(each) for each in expected.messages] if expected.kind == plain.CHAIN else []
    listed = [lib.library().cfedavg_listed(c.byref(found), i) for i in range(len(numbers))]
    assert listed == numbers
    assert found.length == sum(map(len, expected.messages))


@needs_compiler
def test_versions_in_c() -> None:
    version = plain.first_version(3, 7, b"copy")
    assert lib.library().cfedavg_first_version(3, 7, c.c_uint64(plain.digest(b"copy"))) == version[2]
    message = bytes(range(200))
    found = lib.library().cfedavg_next_version(c.c_uint64(version[2]), message, lib.SIZE(200))
    assert found == plain.next_version(version, message)[2]


@needs_compiler
@pytest.mark.parametrize("n", [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000])
def test_sha256_of_every_length(n: int) -> None:
    assert lib.digest(bytes(range(250)) * 4 if n == 1000 else bytes(n)) == plain.digest(
        bytes(range(250)) * 4 if n == 1000 else bytes(n)
    )


@needs_compiler
@settings(max_examples=20)
@given(st.lists(floats, min_size=8, max_size=8), st.lists(floats, min_size=8, max_size=8), st.booleans())
def test_adding_to_a_copy_in_c(x: list[float], p: list[float], rounds: bool) -> None:
    copies, layout = Copies(rounds), Layout.flat(8)
    w = copies.make(np.array(x, np.float32))
    for text in ("topk(0.5)", "topk(0.5) >> bf16", "int3(4)", "none", "rd(0.3) >> sign", "qsgd(500)"):
        payload = parse(text).compress(np.array(p, np.float32), key=3)
        found = lib.receive(to_bf16(w) if rounds else w, lib.encode(payload, layout), layout)
        found = from_bf16(found) if rounds else found
        assert found.tobytes() == copies.receive(w, payload).tobytes()
