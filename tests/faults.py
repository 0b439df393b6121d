"""A federation in which everything goes wrong, driven by the machines of `protocol`, with the law checked.

Updates are whole numbers and payloads pure selections, so that every sum is exact and the law is checked
bit for bit, for every client, after everything that happens. A schedule is drawn from its seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cfedavg.federation import protocol
from cfedavg.federation.protocol import Client, Request, Resend, Server, Stamp, Train

D, KEPT = 6, 2
ROUNDS, CLIENTS = 25, 4
LATE = 5  # rounds
# How often each of these happens: to a message, to a client's round, to a server's round.
RATES = {
    "request lost": 0.15, "request twice": 0.15, "request late": 0.15,
    "reply lost": 0.3, "reply twice": 0.3, "reply late": 0.2, "reply broken": 0.05, "not finite": 0.05,
    "client killed before it stored": 0.05, "client killed before it sent": 0.05,
    "server killed before it dispatched": 0.03, "server killed while it waited": 0.05,
    "server killed before it stored": 0.05, "no quorum": 0.1,
}  # fmt: skip


class Whole:
    """Selects the largest of some whole numbers."""

    def shrink(self, p: np.ndarray, request: Request) -> tuple[bytes, np.ndarray]:
        kept = np.zeros_like(p)
        places = np.argsort(-np.abs(p), kind="stable")[:KEPT]
        kept[places] = p[places]
        return kept.tobytes(), p - kept

    def restored(self, e: np.ndarray, message: bytes) -> np.ndarray:
        return e + np.frombuffer(message, np.int64)


@dataclass(frozen=True)
class Model:
    """What is in it, by client: the sum of its payloads, and the stamps of all of them."""

    sums: dict[str, np.ndarray]
    holds: frozenset[tuple[str, Stamp]] = frozenset()

    def with_(self, taken: list[tuple[str, Stamp, bytes]]) -> Model:
        sums, holds = dict(self.sums), set(self.holds)
        for name, stamp, message in taken:
            sums[name] = sums[name] + np.frombuffer(message, np.int64)
            holds.add((name, stamp))
        return Model(sums, frozenset(holds))


@dataclass
class Rules:
    """The machines and the order in which the server stores; mutants replace one of them."""

    receive: Callable[..., Any] = protocol.receive
    objection: Callable[..., str] = protocol.objection
    stored: Callable[[Server, Server], Server] = lambda before, after: after
    store_late: bool = False


class Broken(AssertionError):
    """The law does not hold."""


@dataclass
class World:
    """The disks of all, the network, and what only an observer of everything knows."""

    seed: int
    rules: Rules = field(default_factory=Rules)
    rates: dict[str, float] = field(default_factory=lambda: dict(RATES))

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.names = [f"client {i}" for i in range(CLIENTS)]
        zero = {name: np.zeros(D, np.int64) for name in self.names}
        self.clients = {name: Client(zero[name]) for name in self.names}  # on their disks
        self.disk = Server(Model(zero))
        self.server = self.disk
        self.made = dict(zero)  # the sum of all g
        self.faults: Counter[str] = Counter()
        self.requests: list[tuple[int, str, Request]] = []  # under way, with the round in which they arrive
        self.replies: list[tuple[int, str, Stamp, bytes]] = []
        self.now, self.applied = 0, 0

    def happens(self, fault: str) -> bool:
        found = self.chance.random() < self.rates[fault]
        self.faults[fault] += found
        return found

    def run(self) -> World:
        for self.now in range(ROUNDS):
            self.round()
        self.settle()
        return self

    def settle(self) -> None:
        """Rounds without a fault, after which everything is quiet: all logs are empty or delivered."""
        self.rates = dict.fromkeys(self.rates, 0.0)
        for _ in range(LATE + 3):
            self.now += 1
            self.round(everyone=True)
        for name, client in self.clients.items():
            undelivered = [stamp for stamp in client.log if (name, stamp) not in self.disk.x.holds]
            if undelivered:
                raise Broken(f"{name} still does not know of {undelivered}")

    def round(self, *, everyone: bool = False) -> None:
        if self.happens("server killed before it dispatched"):
            self.restart()
        asked = self.names if everyone else self.chance.sample(self.names, 3)
        for name in asked:
            self.send_request(name, protocol.request_of(self.server, name))
        if self.rules.store_late:
            self.disk = self.server
        self.clients_work()
        if self.happens("server killed while it waited"):
            self.restart()
            return
        taken = self.collect(asked)
        if self.happens("no quorum"):
            taken = []
        self.end(taken)

    def end(self, taken: list[tuple[str, Stamp, bytes]]) -> None:
        """Aggregates, stores, and goes on from there."""
        x_next = self.server.x.with_(taken)
        after = protocol.ended(self.server, [name for name, _, _ in taken], x_next)
        if self.happens("server killed before it stored"):
            self.restart()
            return
        if not self.rules.store_late:
            self.disk = self.rules.stored(self.disk, after)
        self.server = after
        self.applied += len(taken)
        self.check()

    def restart(self) -> None:
        """The server comes back with what is on its disk, and repeats the round."""
        self.server = self.disk

    def send_request(self, name: str, request: Request) -> None:
        if self.happens("request lost"):
            return
        for _ in range(1 + self.happens("request twice")):
            late = self.chance.randint(1, LATE) if self.happens("request late") else 0
            self.requests.append((self.now + late, name, request))

    def send_reply(self, name: str, stamp: Stamp, message: bytes) -> None:
        if self.happens("reply lost"):
            return
        for _ in range(1 + self.happens("reply twice")):
            late = self.chance.randint(1, LATE) if self.happens("reply late") else 0
            self.replies.append((self.now + late, name, stamp, message))

    def clients_work(self) -> None:
        due = [each for each in self.requests if each[0] <= self.now]
        self.requests = [each for each in self.requests if each[0] > self.now]
        self.chance.shuffle(due)
        for _, name, request in due:
            self.client_works(name, request)
            self.check()

    def client_works(self, name: str, request: Request) -> None:
        client, action = self.rules.receive(self.clients[name], request, Whole())
        if isinstance(action, Resend):
            self.send_reply(name, request.stamp, action.message)
        if not isinstance(action, Train) or self.happens("not finite"):
            return
        g = np.array([self.chance.randint(-50, 50) for _ in range(D)])
        after, message = protocol.answer(client, request, g, Whole())
        if self.happens("client killed before it stored"):
            return
        self.clients[name] = after
        self.made[name] = self.made[name] + g
        if not self.happens("client killed before it sent"):
            self.send_reply(name, request.stamp, message)

    def collect(self, asked: list[str]) -> list[tuple[str, Stamp, bytes]]:
        """The replies that arrive in this round and are taken."""
        due = [each for each in self.replies if each[0] <= self.now]
        self.replies = [each for each in self.replies if each[0] > self.now]
        self.chance.shuffle(due)
        taken: list[tuple[str, Stamp, bytes]] = []
        for _, name, stamp, message in due:
            names = [each[0] for each in taken]
            objection = self.rules.objection(self.server, asked, names, name, stamp)
            if not objection and not self.happens("reply broken"):
                taken.append((name, stamp, message))
        return taken

    def check(self) -> None:
        """The law, bit for bit."""
        holds = self.disk.x.holds
        for name, client in self.clients.items():
            on_the_way = [m for stamp, m in client.log.items() if (name, stamp) not in holds]
            U = sum((np.frombuffer(m, np.int64) for m in on_the_way), np.zeros(D, np.int64))
            if not np.array_equal(self.made[name], self.disk.x.sums[name] + client.e + U):
                raise Broken(f"seed {self.seed}, round {self.now}: {name}")
