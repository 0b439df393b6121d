"""What clients download of a compressed broadcast: each copy beside a run, and the ledger by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from cfedavg import Config, Layout, parse, run
from cfedavg.channel import Downlink, choose_download
from cfedavg.core.run_files import Record
from cfedavg.simulate.downloads import Count, Download, Downloads
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.state import State
from cfedavg.wire import decode, encode
from tests.algorithm.test_algorithm import engine
from tests.conftest import quadratic

Array = Any


# --- every copy, beside a run -------------------------------------------------------------------------


@dataclass
class Play:
    """The copies of all clients, which see nothing but bytes, and what these come to by the stated rule."""

    downlink: Downlink
    copies: list[np.ndarray]  # the server's, one for each version
    messages: list[bytes] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)  # as the server knows it
    clients: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)  # version and copy

    def pack(self, payload: Any) -> bytes:
        return encode(payload, self.downlink.layout, code_floats=True)

    def unpack(self, message: bytes) -> Any:
        return decode(message, layout=self.downlink.layout)

    def changed_since(self, version: int) -> np.ndarray:
        """The coordinates whose bits changed in some message since."""
        bits = np.stack([w.view(np.uint32) for w in self.copies[version:]])
        return np.flatnonzero((bits[1:] != bits[:-1]).any(0))

    def first_kept(self) -> int:
        """The oldest version from which the server still has all messages: they have the bytes of a copy."""
        first, size = 0, self.downlink.size(self.copies[-1])
        while sum(map(len, self.messages[first:])) > size and first < len(self.messages) - 1:
            first += 1
        return first

    def options(self, client: int) -> dict[str, list[bytes]]:
        """What the rule compares, in its order."""
        d, w = self.downlink.layout.d, self.copies[-1]
        whole = {"whole": [self.pack(self.downlink.pack(w))]}
        if client not in self.held or self.held[client] < self.first_kept():
            return whole
        chain = {"chain": self.messages[self.held[client] :]}
        if sum(map(len, chain["chain"])) <= d / 4:
            return chain
        at = self.changed_since(self.held[client])
        changed = {"changes": [self.pack(self.downlink.pack(w, at))]} if len(at) <= 3 * d / 4 else {}
        return chain | whole | changed

    def download(self, client: int) -> Download:
        """Bring a client's copy up to date, and say what that took."""
        options = self.options(client)
        kind = min(options, key=lambda each: sum(map(len, options[each])))
        messages = options[kind]
        version, w = self.clients.get(client, (0, np.zeros_like(self.copies[0])))
        if kind == "chain":
            for message in self.messages[version:]:  # it may hold more than the server knows
                w = self.downlink.receive(w, self.unpack(message))
        else:
            w = self.downlink.unpack(w, self.unpack(messages[0]))
        self.clients[client] = len(self.messages), w
        return Download(kind, len(messages) if kind == "chain" else 0, sum(map(len, messages)))

    def end(self, plan: Plan, state: State, after: State) -> None:
        """The server's message at the end of a round, and the replies that reached it."""
        payload, _ = self.downlink.send(after.x, state.w, plan.broadcast_key(state.t), state.t)
        self.messages.append(encode(payload.numpy(), self.downlink.layout))
        self.copies.append(after.w.numpy())  # type: ignore[union-attr]
        for client in plan.sampled(state.t):
            if not plan.lost(state.t, client):
                self.held[client] = state.t


def check_row(row: Record, downloads: dict[int, Download], held: dict[int, int]) -> None:
    assert row["downlink_bytes"] == sum(each.bytes for each in downloads.values())
    assert row["downlink_messages"] == sum(each.messages for each in downloads.values())
    assert row["whole_downloads"] == sum(each.kind == "whole" for each in downloads.values())
    firsts = [each.bytes for client, each in downloads.items() if client not in held]
    assert row["first_download_bytes"] == sum(firsts)


@pytest.mark.parametrize(
    ("up", "down"), [("topk(0.9)", "topk(0.99) >> int3(64)"), ("topk(0.9)", "topk(0.9)"), ("none", "rd(0.6)")]
)
def test_every_copy_of_a_hundred_rounds(up: str, down: str) -> None:
    """With 30% of the clients a round and every fifth reply lost."""
    generator = torch.Generator().manual_seed(0)
    task = quadratic(torch.randn(10, 1500, generator=generator))
    config = Config(rounds=100, clients=10, participation=0.3, drop_rate=0.2, local_steps="1",
                    compressor=up, compressor_down=down, batch_size=1)  # fmt: skip
    server, seen = engine(config, task), Counter[str]()
    state = server.start()
    play = Play(Downlink(parse(down), server.layout), [state.w.numpy()])  # type: ignore[union-attr]
    for t in range(100):
        held = dict(play.held)
        downloads = {client: play.download(client) for client in server.plan.sampled(t)}
        for client in downloads:
            assert play.clients[client][1].tobytes() == play.copies[-1].tobytes()
        after, finish = server.round(state)
        check_row(finish(), downloads, held)
        play.end(server.plan, state, after)
        seen.update(each.kind for each in downloads.values())
        state = after
    assert min(seen[kind] for kind in ("chain", "changes", "whole")) > 5


# --- the ledger ---------------------------------------------------------------------------------------

D = 400
DOWNLINK = Downlink(parse("topk(0.9)"), Layout.flat(D))


def ledger(*rounds: tuple[int, list[int]], most: int = 10**6) -> tuple[Downloads, np.ndarray]:
    """What is known after rounds with messages of these lengths and replies of these clients.

    Round t changes coordinate t.
    """
    w = np.arange(1.0, D + 1).astype(np.float32)
    known = Downloads.none(w)
    for t, (length, replied) in enumerate(rounds):
        w_next = w.copy()
        w_next[t] += 1
        known, w = known.after(t, w, w_next, length, replied, most), w_next
    return known, w


def counted(known: Downloads, t: int, client: int, w: np.ndarray) -> Download:
    return known.count(t, [client], w, DOWNLINK, lambda count: count)[client]()


def test_the_ledger_by_hand() -> None:
    """A client that took part in round t holds version t, and misses the messages from round t on."""
    known, w = ledger((10, [0, 1]), (20, [1]), (30, [2]))
    assert known.lengths == (10, 20, 30)
    assert known.held == {0: 0, 1: 1, 2: 2}
    assert known.changed[:4].tolist() == [1, 2, 3, 0]
    assert counted(known, 3, 0, w) == ("chain", 3, 60)
    assert counted(known, 3, 1, w) == ("chain", 2, 50)
    assert counted(known, 3, 2, w) == ("chain", 1, 30)
    whole = len(encode(DOWNLINK.pack(w), DOWNLINK.layout, code_floats=True))
    assert counted(known, 3, 9, w) == ("whole", 0, whole)


def test_a_lost_reply_leaves_the_server_with_the_older_version() -> None:
    """So the next download is longer by the messages that the client has, for all the server knows."""
    arrived, w = ledger((10, [0]), (20, [0]), (30, []))
    lost, _ = ledger((10, [0]), (20, []), (30, []))
    assert counted(arrived, 3, 0, w) == ("chain", 2, 50)
    assert counted(lost, 3, 0, w) == ("chain", 3, 60)


def test_a_long_chain_gives_way_to_what_is_shorter() -> None:
    """The values at the coordinates that changed since the client's version, and at no others."""
    known, w = ledger((5000, [0]), (5000, [1]), (5000, []))
    for client, at in ((0, [0, 1, 2]), (1, [1, 2])):
        message = encode(DOWNLINK.pack(w, np.array(at)), DOWNLINK.layout)
        assert counted(known, 3, client, w) == ("changes", 0, len(message))
    assert decode(message, layout=DOWNLINK.layout).indices.tolist() == [1, 2]


def test_values_that_changed_nearly_everywhere_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Downlink.pack

    def pack(self: Downlink, w: Any, at: Any = None) -> Any:
        assert at is None
        return real(self, w)

    monkeypatch.setattr(Downlink, "pack", pack)
    w = np.ones(D, np.float32)
    w_next = np.where(np.arange(D) <= 3 * D / 4, 2, w).astype(np.float32)
    known = Downloads.none(w).after(0, w, w_next, 5000, [0], most=0)
    assert counted(known, 1, 0, w_next).kind == "whole"


def test_a_client_that_was_away_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps 3 messages; a client that misses more gets the whole model."""
    monkeypatch.setattr("cfedavg.simulate.downloads.KEPT", 3)
    known, w = ledger((10, [0]), (10, [1]), (10, []), (10, []))
    assert known.lengths == (10, 10, 10)
    assert counted(known, 4, 1, w) == ("chain", 3, 30)
    assert counted(known, 4, 0, w).kind == "whole"


def test_messages_are_kept_up_to_the_bytes_of_a_copy() -> None:
    known, w = ledger((10, [0]), (10, [1]), (10, [2]), (10, []), most=29)
    assert known.lengths == (10, 10)
    assert counted(known, 4, 2, w) == ("chain", 2, 20)
    assert counted(known, 4, 1, w).kind == "whole"
    assert ledger((10, []), (50, []), most=29)[0].lengths == (50,)  # the last one stays


def length_of(download: Download) -> int:
    return download.bytes


def made(kind: str, length: int) -> Count:
    return lambda: Download(kind, 0, length)


@pytest.mark.parametrize(
    ("chain", "whole", "changed", "wanted"),
    [
        (101, 300, 200, "chain"),
        (201, 300, 200, "changes"),
        (301, 300, 310, "whole"),
        (500, 300, None, "whole"),
        (None, 300, 299, "changes"),
        (200, 200, 200, "chain"),
        (201, 200, 200, "whole"),
    ],
)
def test_the_shortest_is_chosen(chain: int | None, whole: int, changed: int | None, wanted: str) -> None:
    messages = None if chain is None else Download("chain", 1, chain)
    other: Any = made("changes", changed) if changed is not None else lambda: None
    assert choose_download(D, messages, made("whole", whole), other, length_of).kind == wanted


def test_a_short_chain_is_not_compared() -> None:
    """Up to 2 bits a number: nothing else is encoded."""

    def encoded() -> Any:
        raise AssertionError

    chain = Download("chain", 3, D // 4)
    assert choose_download(D, chain, encoded, encoded, length_of) == chain
    with pytest.raises(AssertionError):
        choose_download(D, chain._replace(bytes=D // 4 + 1), encoded, encoded, length_of)


def test_clients_of_one_version_are_counted_once() -> None:
    known, w = ledger((10, [0, 1, 2]), (10, [2]))
    begun: list[Count] = []

    def start(count: Count) -> Count:
        begun.append(count)
        return count

    counts = known.count(2, [0, 1, 2, 7, 8], w, DOWNLINK, start)
    assert len(begun) == 3
    assert [counts[i]().messages for i in (0, 1, 2, 7, 8)] == [2, 2, 1, 0, 0]


@pytest.mark.parametrize("name", ["reference", "sequential", "batched"])
def test_a_client_that_abstains_is_not_known_to_hold_anything(name: str) -> None:
    """K_0 = 0: it downloads, and never replies, so each of its downloads is whole, and a first one."""
    config = Config(rounds=3, engine=name, deadline=1.0, steps_per_second="0.5,2,2", batch_size=1,
                    compressor="topk(0.5)", compressor_down="topk(0.9)")  # fmt: skip
    rows = run(config, quadratic(torch.eye(3).repeat(1, 100))).rows
    assert [row["local_steps_min"] for row in rows] == [0, 0, 0]
    assert [row["whole_downloads"] for row in rows] == [3, 1, 1]
    assert [row["downlink_messages"] for row in rows] == [0, 2, 2]
    one = rows[0]["first_download_bytes"] // 3
    assert one > 100
    assert all(0 < row["first_download_bytes"] < row["downlink_bytes"] for row in rows[1:])


def test_a_download_takes_time() -> None:
    """The link carries what the client downloads: the whole model first, then a short message."""
    config = Config(rounds=2, local_steps="1", batch_size=1, compressor="topk(0.5)", link="down=8bit",
                    compressor_down="topk(0.99)")  # fmt: skip
    rows = run(config, quadratic(torch.randn(2, 300, generator=torch.Generator().manual_seed(0)))).rows
    assert [row["simulated_seconds"] for row in rows] == [row["downlink_bytes"] / 2 for row in rows]
    assert rows[1]["simulated_seconds"] < rows[0]["simulated_seconds"] / 5
