"""Replies that are not taken: each is counted by its cause, and the model is that of the other nodes."""

from __future__ import annotations

import functools
import math
import re
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg

from cfedavg import InputError
from cfedavg.channel import Channel
from cfedavg.compress import parse
from cfedavg.core.layout import Layout
from cfedavg.federate.client import Uplink, pack_message, unpack_message
from cfedavg.federate.protocol import AHEAD, Request, Stamp, find_fault_in_stamp
from cfedavg.federate.server import Server
from cfedavg.federate.stores import ServerStore
from cfedavg.feedback import ErrorFeedback
from cfedavg.flower import RoundPolicy, replies
from cfedavg.flower.array_layout import Form
from cfedavg.flower.federation_state import Node, Numbers
from cfedavg.flower.nodes import OnlineNodes
from cfedavg.flower.options import bound_norm, cap_claims, keep_last
from cfedavg.flower.replies import (
    OURS,
    REFUSED,
    Rejected,
    ReplyRecord,
    ReplyValidator,
    pack_reply,
    read_reply,
    shorten_reason,
)
from cfedavg.wire import encode
from tests import messages
from tests.grid import (
    MODEL,
    Adding,
    Disks,
    Federation,
    LocalGrid,
    LocalNode,
    Summing,
    arrays_of,
    error,
    numbers,
    record,
    reply_with,
    same,
)

pytestmark = pytest.mark.usefixtures("without_waiting")


# What is not taken

NORMED = {**MODEL, "n": np.array(3), "bn.running_var": np.ones(2, np.float32)}
FORM_NORMED = Form.of(NORMED)


def raising(problem: Exception) -> Any:
    def app(arrays: Any, metrics: Any, message: Message) -> Message:
        raise problem

    return app


def replying(change: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    return lambda arrays, metrics, message: reply_with(*change(arrays, metrics), message)


def twice(arrays: Any, metrics: Any, message: Message) -> Message:
    return Message(RecordDict({"a": record(arrays), "b": record(arrays)}), reply_to=message)


def without(name: str) -> Any:
    return replying(lambda arrays, metrics: ({key: arrays[key] for key in arrays if key != name}, metrics))


def put(name: str, value: Any) -> Any:
    return replying(lambda arrays, metrics: ({**arrays, name: value(arrays.get(name))}, metrics))


SPOILT: dict[str, tuple[Any, str, str]] = {
    "NaN": (put("w", lambda w: w * math.nan), "not finite", "holds NaN or Inf"),
    "Inf": (put("b", lambda b: b + math.inf), "not finite", "holds NaN or Inf"),
    "too large for its own": (put("b", lambda b: b.astype(float) + 1e300), "not finite", "holds NaN or Inf"),
    "NaN, uncompressed": (put("bn.running_var", lambda v: v * math.nan), "not finite", "NaN or Inf"),
    "a large number, uncompressed": (
        put("bn.running_var", lambda v: v * 0 + np.float32(3e38)), "too large", "an uncompressed .* 3e.38"
    ),
    "a large whole number": (put("n", lambda n: n * 0 + (2**63 - 1)), "too large", "an uncompressed .* 9.22"),
    "an array less": (without("b"), "another model", "'b' is missing"),
    "an array more": (put("c", lambda _: np.ones(1)), "another model", "'c' is unexpected"),
    "another shape": (put("w", lambda w: w.T), "another model", r"'w' is of shape \[3, 4\], not \[4, 3\]"),
    "0-d": (put("n", lambda n: n.reshape(1)), "another model", r"'n' is of shape \[1\], not \[\]"),
    "another dtype": (put("w", lambda w: w.astype(int)), "another model", "'w' is of int64, not float32"),
    "no whole number": (put("n", lambda n: n * 1.0), "another model", "'n' is of float64, not int64"),
    "renamed": (replying(lambda a, m: ({f"m.{k}": v for k, v in a.items()}, m)), "another model", "missing"),
    "nothing": (replying(lambda a, m: ({}, m)), "another model", "'w' is missing"),
    "two models": (twice, "another model", "replied with 2 ArrayRecords"),
    "raises": (raising(ZeroDivisionError("by zero")), "app failed", "ZeroDivisionError.*by zero"),
    "raises ours": (raising(InputError("--data-dir: no such")), "app failed", "--data-dir: no such"),
    "an error": (lambda a, m, message: error(6, "some mod", message), "app failed", "some mod"),
    "endless metrics": (replying(lambda a, m: (a, {"all": [0.5] * 20_000})), "metrics", "at most 64,512"),
    "steps": (replying(lambda a, m: (a, {"local-steps": -3})), "malformed", r"'K' must be .* got -3"),
    "samples": (replying(lambda a, m: (a, {"num-examples": -3})), "malformed", r"examples' must be .* -3"),
}  # fmt: skip


@functools.cache
def without_some(rounds: int, lost: tuple[int, ...]) -> tuple[ArrayRecord, list[int]]:
    """The model of a federation in which these replies of round 2 did not come."""
    with tempfile.TemporaryDirectory() as folder:
        it = Federation(Path(folder), Adding().app, 4, NORMED)
        it.grid.on_reply = lambda node, request, reply: (
            None if node.partition in lost and request.metadata.group_id == "2" else reply
        )
        return it.start(rounds, max_norm=100).arrays, [row["lost"] for row in it.rows]


def compared(
    tmp_path: Path, app: Adding, rounds: int, touch: Any = None, lost: tuple[int, ...] = (1,)
) -> Federation:
    """Run a federation, and check that its model is that of the other nodes alone."""
    it = Federation(tmp_path, app.app, 4, NORMED)
    it.grid.on_reply = touch or it.grid.on_reply
    found = it.start(rounds, max_norm=100)
    wanted, missing = without_some(rounds, lost)
    assert same(found.arrays, wanted)
    assert [row["lost"] for row in it.rows] == missing
    return it


@pytest.mark.parametrize("name", SPOILT)
def test_what_an_app_does_wrong(name: str, tmp_path: Path) -> None:
    spoil, cause, why = SPOILT[name]
    bad = Adding()
    bad.spoil[1] = lambda arrays, metrics, message: (
        spoil(arrays, metrics, message) if bad.calls[-1][1] == 2 else reply_with(arrays, metrics, message)
    )
    with np.errstate(over="ignore"):
        it = compared(tmp_path, bad, 2)
    assert it.outcomes == [{"replied": 4}, dict(sorted({"replied": 3, cause: 1}.items()))]
    (row,) = [row for row in it.of_nodes if row["outcome"] != "replied"]
    assert (row["round"], row["node"], row["outcome"], row["applied"]) == (1, "node1", cause, False)
    assert re.search(why, row["why"]), row["why"]
    assert "\n" not in row["why"]


def spiking() -> Adding:
    """In round 2 client 1 makes a leap."""
    app = Adding()
    app.spoil[1] = lambda arrays, metrics, message: (
        put("w", lambda w: w + 1000) if app.calls[-1][1] == 2 else reply_with
    )(arrays, metrics, message)
    return app


def test_a_client_that_heeds_no_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cfedavg.channel._limit", lambda p, payload, *_: payload)
    it = compared(tmp_path, spiking(), 2)
    assert it.outcomes[1] == {"replied": 3, "too large": 1}
    assert re.search(r"the payload's norm is .*, max_norm is 100", it.of_nodes[5]["why"])


def test_a_spike_goes_bit_by_bit(tmp_path: Path) -> None:
    """What is above the bound waits in the residual: nothing is rejected, and in the end all has arrived."""
    it = Federation(tmp_path, (app := spiking()).app)
    it.start(50, Summing(), max_norm=100.0, compressor="none")
    assert it.outcomes == [{"replied": 3}] * 50
    disks = Disks(it)
    made = disks.update(*app.calls) + np.float32([1000.0] * 12 + [0.0] * 5)
    np.testing.assert_allclose(disks.x() + disks.masses(), made, rtol=1e-5, atol=1e-2)
    assert np.linalg.norm(disks.mass(it.nodes[1])) < 1.0  # a spike of 3,464 has gone in 50 rounds


def test_what_clients_say_may_be_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal-to-noise ratio of 1e308 from each of three has no sum, but a mean."""
    monkeypatch.setattr(Uplink, "send", saying(Uplink.send, p2=1e100, noise2=6e-209))
    it = Federation(tmp_path, Adding().app)
    it.start(1)
    assert it.outcomes == [{"replied": 3}]
    assert it.rows[0]["snr_mean"] == pytest.approx(1.6667e308, rel=1e-3)


def saying(send: Any, **facts: float) -> Any:
    """Clients that report these numbers."""

    def made(packing: Uplink, g: Any, memory: Any, request: Request) -> Any:
        message, after = send(packing, g, memory, request)
        parts = unpack_message(message, len(message), 0)
        return pack_message(parts._replace(facts={**parts.facts, **facts})), after

    return made


def test_a_bound_is_used_up() -> None:
    """A share of p is sent whose norm is just below the bound."""
    layout = Layout.flat(1000)
    packing = Uplink(Channel(parse("topk(0.99)"), ErrorFeedback(), layout), 0, max_norm=1.0)
    p = np.full(1000, 100.0, np.float32)  # its norm is 3,162, of which the largest ten have 316
    _, e = packing.send(p, 0 * p, Request(Stamp(1, 1), 0, None))
    assert 0.9 < np.linalg.norm(p - e) <= 1.0


def test_a_node_says_too_much(tmp_path: Path) -> None:
    app = Adding()
    app.spoil[1] = lambda a, m, message: error(2, "long\ncfedavg.errors.InputError: no " * 10_000, message)
    it = Federation(tmp_path, app.app)
    it.start(1)
    assert len(it.of_nodes[1]["why"]) < 400
    assert it.of_nodes[1]["why"].isprintable()


def test_what_a_node_says_is_cut_before_it_is_read() -> None:
    """A regex that looks at all of this takes hours, in which no round ends."""
    text = "<class '" + "a." * 210_000

    def stalled(*_: Any) -> None:
        raise AssertionError("still at it")

    before = signal.signal(signal.SIGALRM, stalled)
    signal.alarm(20)
    try:
        assert len(shorten_reason(text)) == 300
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    long = "<class 'some.app.<locals>.Problem'>:<\"no\nnews" + "x" * 5000
    assert shorten_reason(long).startswith("Problem: no news")
    assert shorten_reason("<class 'E'>:<'x'>") == "E: x"


def test_a_node_has_an_odd_name() -> None:
    """Names are sorted by the numbers in them, and Python reads no number of 5,000 digits."""
    grid = LocalGrid([])
    names = ("9" * 5000, "a\nb", "node2")
    found = [SimpleNamespace(node_id=i, public_key=b"", name=name) for i, name in enumerate(names)]
    grid.get_nodes = lambda: found  # type: ignore[method-assign]
    assert sorted(len(node.name) for node in OnlineNodes(grid, Numbers()).find()) == [3, 5, 300]
    assert all(node.name.isprintable() for node in OnlineNodes(grid, Numbers()).find())


def test_one_node_cannot_say_that_the_server_is_old(tmp_path: Path) -> None:
    """One refusal proves nothing, even if nobody else is asked."""
    app = Adding()

    def older(arrays: Any, metrics: Any, message: Message) -> Message:
        first = app.calls[-1][0] == app.calls[0][0]  # whoever is asked first
        return error(REFUSED, "older", message) if first else reply_with(arrays, metrics, message)

    app.spoil = dict.fromkeys(range(4), older)
    it = Federation(tmp_path, app.app, 4)
    it.start(12, policy=RoundPolicy(participation=0.25))
    assert {tuple(outcomes) for outcomes in it.outcomes} == {("out of date",), ("replied",)}
    assert it.outcomes[0] == {"out of date": 1}


def test_two_can(tmp_path: Path) -> None:
    """Two refusals prove it, even in two rounds, if nobody has replied."""
    app = Adding()
    app.spoil = dict.fromkeys(range(4), lambda a, m, message: error(REFUSED, "older", message))
    it = Federation(tmp_path, app.app, 4)
    with pytest.raises(InputError, match="The folder is an older copy of the federation"):
        it.start(12, policy=RoundPolicy(participation=0.25))
    assert len({row["number"] for row in it.of_nodes}) == 1
    alone = Federation(tmp_path / "alone", app.app, 1)
    with pytest.raises(InputError, match="The folder is an older copy of the federation"):
        alone.start(1, policy=RoundPolicy(min_nodes=1))


def test_nor_can_half_of_them(tmp_path: Path) -> None:
    app = Adding()
    app.spoil[1] = lambda a, m, message: error(REFUSED, "older", message)
    it = Federation(tmp_path, app.app, 2)
    it.start(1)
    assert it.outcomes == [{"out of date": 1, "replied": 1}]


@pytest.mark.parametrize("stays", [False, True], ids=["gone", "still online for Flower"])
def test_nor_can_one_that_comes_back_under_other_names(stays: bool, tmp_path: Path) -> None:
    """Without authentication a node that restarts is another one."""
    app = Adding()
    app.spoil[1] = lambda a, m, message: error(REFUSED, "older", message)
    it = Federation(tmp_path, app.app, 2)

    def again(node: LocalNode, request: Message, reply: Message) -> Message:
        if node.partition == 1 and node.id == max(it.grid.nodes):
            node.online = stays
            it.grid.nodes[node.id + 1] = replace(node, id=node.id + 1, online=True)
        return reply

    it.grid.on_reply = again
    it.start(5, policy=RoundPolicy(quorum=0.1))
    assert [outcomes["replied"] for outcomes in it.outcomes] == [1] * 5
    assert all(outcomes["out of date"] for outcomes in it.outcomes)


def test_an_older_copy_is_noticed_among_new_nodes(tmp_path: Path) -> None:
    """They reply, as they have not seen later rounds."""
    it = Federation(tmp_path, (app := Adding()).app)
    it.start(1)
    shutil.copytree(it.out / "state", tmp_path / "backup")
    it.start(3, resume=True)
    shutil.rmtree(it.out / "state")
    shutil.copytree(tmp_path / "backup", it.out / "state")
    for i in range(3, 8):
        it.grid.nodes[100 + i] = LocalNode(100 + i, app.app, tmp_path / f"node{i}", {}, i)
    with pytest.raises(InputError, match="The folder is an older copy of the federation"):
        it.start(3, resume=True)


def test_a_client_without_the_mod(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short body travels in the order, so the app misses its model; a long one is no model of its own."""
    it = Federation(tmp_path, Adding().app, 4)
    plain = Adding([])
    it.nodes[1].app = plain.app
    it.start(1)
    assert it.outcomes == [{"app failed": 1, "replied": 3}]
    hint = "does the node's ClientApp have mods=[cfedavg.flower.compressed]?"
    assert it.of_nodes[1]["why"].endswith(f"; {hint}")
    assert f"node1: app failed ({it.of_nodes[1]['why']})" in caplog.text
    monkeypatch.setattr("cfedavg.flower.rounds.SHORT", 0)
    it.start(2, resume=True)
    assert it.outcomes[1] == {"not compressed": 1, "replied": 3}
    assert "add mods=[cfedavg.flower.compressed] to the ClientApp" in it.of_nodes[5]["why"]
    it.nodes[2].app = ClientApp()
    it.start(3, resume=True)
    assert it.outcomes[2] == {"app failed": 1, "not compressed": 1, "replied": 2}
    plain.spoil[1] = raising(KeyError("w"))  # it knows nothing of the packed model
    it.start(4, resume=True)
    why = {row["node"]: row["why"] for row in it.of_nodes[-4:]}
    assert why["node1"] == f"KeyError: 'w'; {hint}"
    assert "mods" not in why["node2"]  # which has been heard with it


def changed(reply: Message, **fields: Any) -> Message:
    """The same reply with other fields, and sealed again, as by a client that lies."""
    found = read_reply(reply.content)._replace(**fields)
    made = RecordDict({OURS: seal(found)})
    return Message(metadata=reply.metadata, content=made)  # type: ignore[call-overload, no-any-return]


def seal(answer: ReplyRecord) -> ConfigRecord:
    request = Message(RecordDict(), dst_node_id=1, message_type="train")
    return pack_reply(answer, request).content.config_records[OURS]


def relabelled(reply: Message, **fields: Any) -> Message:
    """With another header of the payload."""
    message = read_reply(reply.content).message
    parts = unpack_message(message, len(message), FORM_NORMED.count_bytes())
    payload = messages.forged(parts.payload, **fields)
    return changed(reply, message=pack_message(parts._replace(payload=payload)))


def doubled(reply: Message) -> Message:
    """With values that only float64 can hold."""
    message, layout = read_reply(reply.content).message, FORM_NORMED.layout
    huge = parse("topk(0.7)").compress(np.full(layout.d, 1e300), key=0)
    made = encode(huge.numpy(), layout, client=1, sequence=Stamp(1, 2).sequence)
    parts = unpack_message(message, len(message), FORM_NORMED.count_bytes())
    return changed(reply, message=pack_message(parts._replace(payload=made)))


def plain(reply: Message, **items: Any) -> Message:
    """With these items instead of ours, unsealed."""
    content = RecordDict({OURS: ConfigRecord({**reply.content.config_records[OURS], **items})})
    return Message(metadata=reply.metadata, content=content)  # type: ignore[call-overload, no-any-return]


def message_in(reply: Message) -> bytes:
    return read_reply(reply.content).message


# Of a reply of round 2 and the one before: what comes instead, and how that is counted.
FORGED: dict[str, tuple[Callable[[Message, Message], Message], str]] = {
    "replayed": (lambda now, old: Message(metadata=now.metadata, content=old.content), "late"),  # type: ignore
    "old under a new stamp": (lambda now, old: changed(now, message=message_in(old)), "malformed"),
    "another stamp": (lambda now, old: changed(now, stamp=Stamp(1, 3)), "late"),
    "another generation": (lambda now, old: changed(now, stamp=Stamp(2, 2)), "late"),
    "another client": (lambda now, old: relabelled(now, client=2), "malformed"),
    "another sequence": (lambda now, old: relabelled(now, sequence=Stamp(1, 1).sequence), "malformed"),
    "doubles": (lambda now, old: doubled(now), "not finite"),
    "another schema": (lambda now, old: relabelled(now, schema=7), "another model"),
    "cut": (lambda now, old: changed(now, message=message_in(now)[:-1]), "malformed"),
    "cut in the header": (lambda now, old: changed(now, message=message_in(now)[:40]), "malformed"),
    "nothing": (lambda now, old: changed(now, message=b""), "malformed"),
    "longer": (lambda now, old: changed(now, message=message_in(now) + b"0"), "malformed"),
    "endless": (lambda now, old: changed(now, message=b"\xff" * 200_000), "malformed"),
    "flipped": (lambda now, old: plain(now, message=flipped(message_in(now), 50, 3)), "malformed"),
    "another incarnation": (lambda now, old: plain(now, incarnation=5), "malformed"),
    "below zero": (lambda now, old: changed(now, incarnation=-5), "not compressed"),
    "text": (lambda now, old: plain(now, message="text"), "not compressed"),
    "no list": (lambda now, old: plain(now, stamp=3), "not compressed"),
    "short list": (lambda now, old: plain(now, stamp=[1]), "not compressed"),
    "floats": (lambda now, old: plain(now, stamp=[1.0, 2.0]), "not compressed"),
    "empty": (lambda now, old: Message(metadata=now.metadata, content=RecordDict()), "not compressed"),  # type: ignore
    "late": (lambda now, old: error(4, "Reply unavailable", now), "late"),
    "lost": (lambda now, old: error(5, "Node unavailable", now), "lost"),
    "crashed": (lambda now, old: error(8, "ClientApp crashed", now), "app failed"),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_the_network_does_wrong(name: str, tmp_path: Path) -> None:
    """What was sent is void, and is sent again in round 3."""
    forge, cause = FORGED[name]
    sent: list[Message] = []

    def touch(node: LocalNode, request: Message, reply: Message) -> Message:
        if node.partition != 1:
            return reply
        sent.append(reply)
        if request.metadata.group_id != "2":
            return reply
        made = forge(reply, sent[0])
        made.metadata.__dict__["_reply_to_message_id"] = request.metadata.message_id
        return made

    it = compared(tmp_path, Adding(), 3, touch)
    assert it.outcomes == [{"replied": 4}, dict(sorted({"replied": 3, cause: 1}.items())), {"replied": 4}]
    assert [row["outcome"] for row in it.of_nodes if row["node"] == "node1"] == ["replied", cause, "replied"]


def test_two_replies_are_swapped(tmp_path: Path) -> None:
    held: list[Message] = []

    def touch(node: LocalNode, request: Message, reply: Message) -> Message | None:
        if request.metadata.group_id != "2" or node.partition > 1:
            return reply
        held.append(reply)
        if node.partition == 0:
            return reply
        contents = [each.content for each in held]
        held[0].content, held[1].content = contents[1], contents[0]
        return reply

    it = compared(tmp_path, Adding(), 3, touch, lost=(0, 1))
    assert it.outcomes == [{"replied": 4}, {"malformed": 2, "replied": 2}, {"replied": 4}]


def flipped(message: bytes, at: int, bit: int) -> bytes:
    return message[:at] + bytes([message[at] ^ 1 << bit]) + message[at + 1 :]


def a_reply(tmp_path: Path) -> tuple[ReplyValidator, Node, Server, Message]:
    """A good reply, and what is needed to judge it."""
    it = Federation(tmp_path, Adding().app, 2, NORMED)
    sent: list[Message] = []
    it.grid.on_reply = lambda node, request, reply: sent.append(reply) or reply
    it.start(1)
    server = Server(FORM_NORMED.split(NORMED)[0])
    node = OnlineNodes(it.grid, Numbers()).find()[0]
    return ReplyValidator(FORM_NORMED, parse("topk(0.7)"), math.inf), node, server, sent[0]


def test_every_bit_counts(tmp_path: Path) -> None:
    validator, node, server, reply = a_reply(tmp_path)
    message = message_in(reply)
    assert validator.take(reply, node, server, {node.identity}, {}).node is node
    for at in range(len(message)):
        for spoilt in (flipped(message, at, at % 8), message[:at]):
            with pytest.raises(Rejected) as caught:
                validator.take(plain(reply, message=spoilt), node, server, {node.identity}, {})
            assert caught.value.cause == "malformed"


LIES: list[Any] = [
    b"[" * 30_000, b'{"a":' * 10_000, b"[]", b"null", b"", b"{", b"\xff\xff",
    {"g2": -1}, {"noise2": -1}, {"p2": -0.5}, {"K": -1}, {"K": "3"}, {"g2": 2**2000}, {"g2": math.inf},
    {"noise2": {"a": 1}}, {"loss": "low"}, {"loss": [1]}, {"metrics": 3}, {"metrics": {"a": 3}},
    {"metrics": {"a": {"b": "c"}}}, {"metrics": {"a": {"b": [1, "c"]}}}, {"metrics": {"a": {"b": None}}},
    {"metrics": {"a": {"num-examples": -1}}}, {"metrics": {"a": {"b": True}}}, {"metrics": None},
    {"metrics": {"a": {"b": 10**4000}}}, {"metrics": {"a": {"b": -1e101}}},
    {"metrics": {"a": {"b": [1, 2**400]}}}, {"metrics": {"a": {"b\n": 1}}}, {"metrics": {"a\x1b": {"b": 1}}},
    {"metrics": {"a": {"b" * 101: 1}}}, {"metrics": {"a": {"\ud800": 1}}},
]  # fmt: skip


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: str(lie)[:30])
def test_a_client_says_something_odd(lie: Any, tmp_path: Path) -> None:
    validator, node, server, reply = a_reply(tmp_path)
    message = message_in(reply)
    parts = unpack_message(message, len(message), FORM_NORMED.count_bytes())
    if isinstance(lie, bytes):
        made = struct.pack("<II", len(parts.payload), len(lie)) + parts.payload + lie + parts.uncompressed
    else:
        made = pack_message(parts._replace(facts={**parts.facts, **lie}))
    assert validator.take(changed(reply, message=pack_message(parts)), node, server, {node.identity}, {})
    with pytest.raises(Rejected) as caught:
        validator.take(changed(reply, message=made), node, server, {node.identity}, {})
    assert caught.value.cause == "malformed"


# One bad node against the others


def lying(**facts: Any) -> Any:
    """A reply with these facts, in which all else is right."""

    def made(reply: Message) -> Message:
        parts = unpack_message(message_in(reply), len(message_in(reply)), 0)
        return changed(reply, message=pack_message(parts._replace(facts={**parts.facts, **facts})))

    return made


def leaping(by: float) -> Any:
    """An app whose node 1 makes a leap in every round."""
    app = Adding()
    app.spoil[1] = put("w", lambda w: w + np.float32(by))
    return app


METRICS = {"num-examples": 10, "partition": 1}
POISON: dict[str, tuple[Adding, Any]] = {
    "a metric": (Adding(), lying(metrics={"metrics": {**METRICS, "partition": 10**4000}})),
    "not a number": (Adding(), lying(metrics={"metrics": {**METRICS, "partition": math.nan}})),
    "1e10": (leaping(1e10), lambda reply: reply),
    "1e20": (leaping(1e20), lambda reply: reply),
    "3e38": (leaping(3e38), lambda reply: reply),
    "a stamp": (Adding(), lambda reply: changed(reply, stamp=[2**62, 2**62])),
    "an incarnation": (Adding(), lambda reply: changed(reply, incarnation=2**64)),
    "a long message": (Adding(), lambda reply: changed(reply, message=b"x" * 10**6)),
}


# Without a strategy nobody averages metrics, and NaN among them harms nobody.
CASES = [(name, inner) for name in POISON for inner in (None, FedAdam) if inner or name != "not a number"]


@pytest.mark.parametrize(("name", "inner"), CASES)
def test_one_bad_node_costs_its_own_reply(
    name: str, inner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round from the first: the model, and all that is remembered, is that of the other nodes."""
    app, poison = POISON[name]
    monkeypatch.setattr("cfedavg.channel._limit", lambda p, payload, *_: payload)
    states = []
    for bad in (True, False):
        it = Federation(tmp_path / str(bad), app.app if bad else Adding().app, 4)
        it.grid.on_reply = lambda node, request, reply, bad=bad: (
            reply if node.partition != 1 else poison(reply) if bad else None
        )
        arrays = it.start(4, inner and inner(fraction_evaluate=0.0)).arrays
        extra = ServerStore(it.out / "state", Disks(it).federation, Form.of(MODEL).layout).load().extra  # type: ignore
        states.append((arrays, {part: each.tolist() for part, each in extra.items()}))
    assert same(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]
    assert not same(states[0][0], MODEL)


def test_a_step_is_not_made_longer_by_one(tmp_path: Path) -> None:
    """With update = "mean" the global rate is the mean K, of which no client's counts for more than 100."""
    app = Adding(metrics={"local-steps": 1})
    it = Federation(tmp_path, app.app, 3)
    it.grid.on_reply = lambda node, request, reply: lying(K=2**53)(reply) if node.partition == 1 else reply
    found = arrays_of(it.start(1, update="mean", compressor="none").arrays)
    mean = np.mean([numbers(i, 1)["w"] for i in range(3)], 0, dtype=np.float32)
    np.testing.assert_allclose(found["w"], mean * np.float32(102 / 3), rtol=1e-6)


def test_steps_are_remembered(tmp_path: Path) -> None:
    """One reply a round, and a restart: the third says 2^53 steps, which count as 100 times the median."""
    assert cap_claims([10.0, 2.0**53], []) == [10.0, 1000.0]
    assert cap_claims([2.0**53], [10.0, 10.0, 2.0**53]) == [1000.0]
    assert cap_claims([0.0, 5.0], []) == [0.0, 5.0]
    it = Federation(tmp_path, Adding(metrics={"local-steps": 10}).app, 6)
    it.grid.on_reply = lambda node, request, reply: (
        lying(K=2**53)(reply) if request.metadata.group_id == "3" else reply
    )
    options = {"update": "mean", "compressor": "none", "max_norm": 100.0}
    options |= {"policy": RoundPolicy(participation=1 / 6)}
    it.start(2, **options)
    found = arrays_of(it.start(3, resume=True, **options).arrays)
    assert 100 < np.abs(found["w"]).max() < 1000


@pytest.mark.parametrize("inner", [None, FedAvg])
def test_one_is_not_the_model_by_its_examples(inner: Any, tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app, 3)
    many = lying(metrics={"metrics": {"num-examples": 2**53, "partition": 1}})
    it.grid.on_reply = lambda node, request, reply: many(reply) if node.partition == 1 else reply
    options = {} if inner else {"weighting": "samples"}
    found = it.start(1, inner and inner(fraction_evaluate=0.0), compressor="none", **options)
    mean = np.average([numbers(i, 1)["w"] for i in range(3)], 0, [10, 1000, 10])
    np.testing.assert_allclose(arrays_of(found.arrays)["w"], mean, rtol=1e-5)


def test_the_mean_of_large_whole_numbers_is_one() -> None:
    """As a float, the largest int64 is 2^63, which as an int64 is -2^63."""
    parts = [FORM_NORMED.split({**NORMED, "n": np.array(n)}) for n in (2**63 - 1, 3)]
    mean = FORM_NORMED.average([uncompressed for _, uncompressed in parts], [1e9, 1e-9])
    assert FORM_NORMED.join(parts[0][0], mean)["n"] == 2**63 - 1
    assert FORM_NORMED.split({**NORMED, "n": np.array(2.0**63)})[1] == parts[0][1]


# The bound that nobody gave


def spiked(first: float, at: int) -> Adding:
    """Node 1 leaps once."""
    app = Adding()
    app.spoil[1] = lambda arrays, metrics, message: (
        put("w", lambda w: w + np.float32(first)) if app.calls[-1][1] == at else reply_with
    )(arrays, metrics, message)
    return app


@pytest.mark.parametrize("at", [1, 3])
def test_a_spike_is_not_taken_at_once_and_not_lost(at: int, tmp_path: Path) -> None:
    """In round 1 nobody knows what is usual, and it is rejected; later it is cut by the client itself."""
    it = Federation(tmp_path, (app := spiked(1e4, at)).app, 4)
    it.start(40, Summing(), compressor="none")
    assert it.outcomes == [
        {"replied": 3, "too large": 1} if at == 1 == t else {"replied": 4} for t in range(1, 41)
    ]
    disks = Disks(it)
    made = disks.update(*app.calls) + np.float32([1e4] * 12 + [0.0] * 5)
    np.testing.assert_allclose(disks.x() + disks.masses(), made, rtol=1e-5, atol=0.1)
    assert np.linalg.norm(disks.mass(it.nodes[1])) < 1.0
    assert max(row["residual_norm"] or 0 for row in it.of_nodes) > 1e4  # most of it had to wait


def test_who_cannot_get_rid_of_a_spike_starts_again(tmp_path: Path) -> None:
    """Rejected in round 1, it is in the residual, and would be too large for ever."""
    it = Federation(tmp_path, spiked(1e12, 1).app, 4)
    it.start(3)
    assert it.outcomes == [{"replied": 3, "too large": 1}, {"replied": 4}, {"replied": 4}]


def test_the_bound_follows_the_updates() -> None:
    assert bound_norm([]) == bound_norm([1e20, 1.0]) == 1e15
    assert bound_norm([1.0, 3.0, 2.0]) == 200.0
    assert bound_norm([1e20] * 3) == 1e15
    assert keep_last([3.0, 0.0], [2.0, 1.0]) == [3.0, 2.0, 1.0]
    assert keep_last([2.0] * 60, [1.0] * 60) == [2.0] * 60 + [1.0] * 40
    assert keep_last([2.0] * 160, [1.0] * 60) == [2.0] * 160


def test_clients_are_told_the_bound_and_a_restart_finds_the_same(tmp_path: Path) -> None:
    """From what is durable, before anyone is asked."""
    told: list[list[float]] = [[], []]
    for stops, seen in zip(((4,), (1, 2, 3, 4)), told, strict=True):
        it = Federation(tmp_path / str(len(stops)), Adding().app)
        it.grid.on_request = lambda node, message, seen=seen: (  # type: ignore[misc]
            seen.append(message.content.config_records[OURS]["max_norm"]) or node.answer(message)
        )
        for rounds in stops:
            it.start(rounds, resume=True)
    assert told[0] == told[1]
    assert told[0][:3] == [1e15] * 3
    assert all(500 < bound < 5000 for bound in told[0][3:])


@pytest.mark.parametrize("bound", [5.0, math.inf])
def test_a_bound_that_is_given_counts(bound: float, tmp_path: Path) -> None:
    it = Federation(tmp_path, Adding().app)
    it.start(3, max_norm=bound)
    assert {request.content.config_records[OURS]["max_norm"] for _, request in it.grid.requests} == {bound}


# A request that is not the server's


@pytest.mark.parametrize(
    ("generation", "number"), [(2**62, 1), (2**62, 2**62), (2**32 - 1, 1), (1, 2**32), (0, 5)]
)
def test_a_forged_stamp_does_not_lock_a_node_out(generation: int, number: int, tmp_path: Path) -> None:
    it = Federation(tmp_path, (app := Adding()).app)
    it.start(1)
    request = it.grid.requests[1][1]
    order = dict(request.content.config_records[OURS]) | {
        "generation": generation,
        "stamp": number,
        "mark": [],
    }
    request.content[OURS] = ConfigRecord(order)
    calls = len(app.calls)
    reply = it.nodes[1].answer(request)
    assert reply.error.code == replies.FORGED
    assert len(app.calls) == calls
    it.start(3, resume=True)
    assert it.outcomes == [{"replied": 3}] * 3


def test_a_stamp_that_could_be_the_servers_can_be_overtaken(tmp_path: Path) -> None:
    """By a new generation, which is a time, as soon as that has passed."""
    now = time.time()
    assert not find_fault_in_stamp(Stamp(1, 1), now)
    assert not find_fault_in_stamp(Stamp(int(now), 7), now)
    assert not find_fault_in_stamp(Stamp(int(now) + AHEAD, 2**32 - 1), now)
    assert find_fault_in_stamp(Stamp(int(now) + AHEAD + 2, 1), now) == (
        f"request {int(now) + AHEAD + 2}.1 is from the future: check this node's clock"
    )
    it = Federation(tmp_path, Adding().app)
    it.start(1)
    request = it.grid.requests[1][1]
    request.content[OURS] = ConfigRecord(dict(request.content.config_records[OURS]) | {"stamp": 2**32 - 1})
    it.nodes[1].answer(request)
    it.start(2, resume=True)
    assert it.outcomes[1] == {"out of date": 1, "replied": 2}
    it.start(3, resume=True, from_backup=True)
    assert it.outcomes[2] == {"replied": 3}


def test_a_generation_from_the_future_can_be_overtaken_at_once(tmp_path: Path) -> None:
    """The largest that a node accepts: by a second restore, and also by those after it."""
    it = Federation(tmp_path, Adding().app)
    it.start(1)
    request = it.grid.requests[1][1]
    order = dict(request.content.config_records[OURS])
    order |= {"generation": int(time.time()) + AHEAD - 1, "stamp": 2**32 - 1, "mark": []}
    request.content[OURS] = ConfigRecord(order)
    assert not it.nodes[1].answer(request).has_error()
    it.start(2, resume=True, from_backup=True)
    assert it.outcomes[1] == {"out of date": 1, "replied": 2}
    for rounds in (3, 4):
        time.sleep(1.1)  # a generation is a second
        it.start(rounds, resume=True, from_backup=True)
        assert it.outcomes[rounds - 1] == {"replied": 3}
