"""Copies of real models: every version follows to the server's w, bit for bit, by the shortest broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfedavg.channel import Downlink, choose_download, make_downlink, may_be_shorter
from cfedavg.compress import decompress, parse
from cfedavg.core.arrays import round_to_bf16
from cfedavg.core.layout import Layout
from cfedavg.federate.protocol import Chain, Changes, Copy, Whole, follow, pack, unpack
from cfedavg.federate.replica import Broadcaster, ModelReplica, PackedBroadcast, advance, begin
from cfedavg.federate.server import Primary
from cfedavg.wire import WireError, decode
from tests.test_without_torch import LIGHT, run_without

DOWN = (
    "topk(0.97)", "topk(0.5)", "rd(0.9)", "topk(0.9) >> bf16", "topk(0.97, least=4) >> int3(256)",
    "rd(0.9) >> int8(64)", "topk(0.8, per_tensor=true) >> int4(16)", "int4(64)", "qsgd(4)", "bf16",
    "topk(chunk=16, k=2) >> int2(8)", "lowrank(1)", "lowrank(2) >> bf16", "eden(2, unbiased=false, block=64)",
)  # fmt: skip
QUIET = settings(max_examples=80, derandomize=True, database=None)
Vector = np.ndarray[Any, Any]


class Trajectory(NamedTuple):
    """A server's model x and its copies, from the first to the last round."""

    downlink: Downlink
    replica: ModelReplica
    xs: list[Vector]
    copies: list[Primary]

    @property
    def last(self) -> Primary:
        return self.copies[-1]

    def missed(self, held: int) -> list[bytes]:
        """The message of each round since, whether or not the server still has it."""
        return [copy.messages[-1] for copy in self.copies[held + 1 :]]


def travel(text: str, seed: int, d: int, rounds: int) -> Trajectory:
    """A model: some of its numbers change in each round, by little or by much."""
    layout = Layout(("a", "b"), ((d // 8, 4), (d - d // 8 * 4,)), ("float32", "float32"))
    downlink = make_downlink(parse(text), layout)
    assert downlink is not None
    draw = np.random.default_rng(seed)
    replica = ModelReplica(layout, downlink.rounds_values)
    xs = [draw.standard_normal(d).astype(np.float32)]
    xs[0][draw.random(d) < 0.1] = draw.choice([0.0, -0.0])
    copies = [begin(xs[0], replica, generation=3, t=5)]
    for _ in range(rounds):
        step = draw.standard_normal(d) * (draw.random(d) < draw.choice([0.05, 1.0])) * draw.choice([1e-3, 1])
        xs.append((xs[-1] + step).astype(np.float32))
        copies.append(advance(copies[-1], xs[-1], downlink, seed=7))
    return Trajectory(downlink, replica, xs, copies)


trajectories = st.builds(
    travel, st.sampled_from(DOWN), st.integers(0, 2**32), st.integers(2, 700), st.integers(0, 12)
)


def bits(w: Vector) -> tuple[str, bytes]:
    return str(w.dtype), w.tobytes()


@given(trajectories)
@QUIET
def test_every_version_follows_to_the_copy_of_the_server(it: Trajectory) -> None:
    """Also a client that is further than the server knows, since a reply of its was lost."""
    broadcaster = Broadcaster(it.last, it.replica)
    wanted = it.last.version, bits(it.last.w)
    for i, held in enumerate(it.copies):
        broadcast = unpack(broadcaster.broadcast_to(held.version).data)
        for ahead in it.copies[i:]:
            found = follow(Copy(ahead.version, ahead.w), broadcast, it.replica)
            assert found is not None
            assert (found.version, bits(found.w)) == wanted
    found = follow(None, unpack(broadcaster.broadcast_to(None).data), it.replica)
    assert found is not None
    assert (found.version, bits(found.w)) == wanted


@given(trajectories)
@QUIET
def test_a_copy_is_the_sum_of_what_was_sent(it: Trajectory) -> None:
    """w + C(x - w), on the grid of bf16 where values are rounded, and in 2 bytes a number then."""
    layout, rounds = it.downlink.layout, it.downlink.rounds_values
    w = (round_to_bf16(it.xs[0]) if rounds else it.xs[0]) + 0  # a copy holds no -0
    assert it.copies[0].version[:2] == (3, 5)
    for copy, message in zip(it.copies, [None, *it.missed(0)], strict=True):
        if message is not None:
            payload = decode(message, layout=layout)
            at = slice(None) if payload.indices is None else payload.indices
            w = w.copy()
            w[at] += decompress(payload)[0][at]
            w = (round_to_bf16(w) if rounds else w) + 0
        assert bits(it.replica.model(copy.w)) == bits(w)
        assert bits(it.replica.keep(w)) == bits(copy.w)
        assert copy.w.nbytes == it.replica.size == layout.d * (2 if rounds else 4)
        assert str(copy.w.dtype) == it.replica.dtype


def expected(it: Trajectory, held: int) -> PackedBroadcast:
    """The shortest broadcast by the rule: all three are made, whether or not they are needed."""
    last, layout, missed = it.last, it.downlink.layout, it.missed(held)
    version, digest = last.version, it.replica.digest(last.w)
    copies = it.downlink
    w = it.replica.model(last.w)

    def message(payload: Any) -> bytes:
        return it.replica.encode(payload, version)

    whole = PackedBroadcast("whole", 0, pack(Whole(message(copies.pack(w)), version, digest)))
    start = it.copies[held].version
    if start not in last.versions:
        return whole
    chain = PackedBroadcast("chain", len(missed), pack(Chain(start, tuple(missed), version)))
    if not missed or 4 * len(chain.data) <= layout.d:
        return chain
    touched = [decompress(decode(each, layout=layout))[0] != 0 for each in missed]
    at = np.flatnonzero(np.any(touched, 0))
    kinds = [chain, whole]
    if len(at) <= 0.75 * layout.d:
        since = tuple(copy.version for copy in it.copies[held:-1])
        kinds.append(
            PackedBroadcast("changes", 0, pack(Changes(since, message(copies.pack(w, at)), version, digest)))
        )
    return min(kinds, key=lambda packed: len(packed.data))


@given(trajectories)
@QUIET
def test_the_shortest_broadcast_is_made(it: Trajectory) -> None:
    broadcaster = Broadcaster(it.last, it.replica)
    for i, held in enumerate(it.copies):
        found = broadcaster.broadcast_to(held.version)
        assert found == expected(it, i)
        assert broadcaster.broadcast_to(held.version) is found  # made once, for however many clients
    assert broadcaster.broadcast_to(None).kind == "whole"


def test_every_kind_is_made() -> None:
    """A long absence makes a chain, then changes, then the whole model; who is up to date gets no message."""
    it = travel("topk(0.95) >> bf16", seed=1, d=4000, rounds=40)
    broadcaster = Broadcaster(it.last, it.replica)
    found = [broadcaster.broadcast_to(copy.version) for copy in it.copies]
    kinds = [packed.kind for packed in found]
    assert kinds == sorted(kinds, key=["whole", "changes", "chain"].index)
    assert set(kinds) == {"whole", "changes", "chain"}
    assert found[-1][:2] == ("chain", 0)
    assert len(found[-1].data) < 50
    assert [packed.messages for packed in found[-3:]] == [2, 1, 0]


@given(trajectories)
@QUIET
def test_messages_are_kept_while_they_are_shorter_than_a_copy(it: Trajectory) -> None:
    last, all_of_them = it.last, it.missed(0)
    assert last.messages == tuple(all_of_them[len(all_of_them) - len(last.messages) :])
    assert sum(map(len, last.messages)) <= it.replica.size or len(last.messages) == 1
    if len(last.messages) < len(all_of_them):
        one_more = all_of_them[-len(last.messages) - 1 :]
        assert sum(map(len, one_more)) > it.replica.size


def test_what_is_no_whole_model() -> None:
    """Neither a part of one nor another model's makes a copy."""
    it = travel("topk(0.9)", seed=0, d=40, rounds=1)
    with pytest.raises(WireError, match="a whole model must hold all 40 coordinates, got 4"):
        it.replica.replace(it.last.messages[0])
    whole = it.replica.whole(it.last)
    other = ModelReplica(Layout.flat(40), rounds_values=False)
    with pytest.raises(WireError):
        other.replace(whole.message)
    assert follow(None, whole, other) is None


# The rule by hand


def choose(d: int, chain: str | None, whole: str, changes: str | None) -> tuple[str, list[str]]:
    """What is chosen among texts, by their lengths, and what was made for it."""
    made = list[str]()

    def make(kind: str, value: Any) -> Any:
        made.append(kind)
        return value

    found = choose_download(d, chain, lambda: make("whole", whole), lambda: make("changes", changes), len)
    return found, made


@pytest.mark.parametrize(
    ("d", "texts", "wanted", "made"),
    [
        (20, ("chain", "w", "c"), "chain", []),  # 2 bits a number, and nothing else is looked at
        (19, ("chain", "w", "cc"), "w", ["whole", "changes"]),
        (19, ("chain", "ww", "c"), "c", ["whole", "changes"]),
        (19, ("chain", "whole", "chang"), "chain", ["whole", "changes"]),  # as short as the others
        (19, ("chain", "ww", None), "ww", ["whole", "changes"]),
        (19, ("chain", "a whole", None), "chain", ["whole", "changes"]),
        (10**6, (None, "whole", None), "whole", ["whole", "changes"]),
        (10**6, (None, "whole", "ch"), "ch", ["whole", "changes"]),
    ],
)
def test_the_rule(d: int, texts: Sequence[Any], wanted: str, made: list[str]) -> None:
    assert choose(d, *texts) == (wanted, made)


def test_which_changes_are_worth_sending() -> None:
    assert [may_be_shorter(n, 400) for n in (0, 300, 301, 400)] == [True, True, False, False]


def test_copies_need_no_torch() -> None:
    found = run_without(
        LIGHT,
        """
import numpy as np
from cfedavg.compress import parse
from cfedavg.channel import Downlink
from cfedavg.federate.protocol import Copy, follow, unpack
from cfedavg.federate.replica import Broadcaster, ModelReplica, advance, begin
from cfedavg.core.layout import Layout

layout = Layout.flat(300)
downlink = Downlink(parse("topk(0.9) >> int3(64)"), layout)
replica = ModelReplica(layout, downlink.rounds_values)
x = np.random.default_rng(0).standard_normal(300).astype(np.float32)
first = begin(x, replica, 1, 0)
last = advance(first, 2 * x, downlink, seed=0)
for copy in (None, Copy(first.version, first.w), Copy(last.version, last.w)):
    packed = Broadcaster(last, replica).broadcast_to(copy and copy.version)
    found = follow(copy, unpack(packed.data), replica)
    assert found.version == last.version and np.array_equal(found.w, last.w)
assert "torch" not in sys.modules
print("done")
""",
    )
    assert found == "done\n"
