"""A federation in which everything goes wrong, driven by the machines of the protocol, with the law checked.

All that is computed can be told apart wherever it goes: a mass is one whole number in base 4, with a digit
for each update and coordinate, and the n-th update of the world is a 1 in each of its coordinates. So what is
in the model, in a residual or on the way is exact, and shows what is there twice, as a 2, and what is
nowhere. A schedule is drawn from its seed.

The other direction is played along: requests to train and to evaluate carry broadcasts, of a kind that is
drawn. The copy of the model is a few numbers that only its whole history leads to, so that a wrong one shows.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

from cfedavg.federate.client import (
    Client,
    Evaluate,
    NeedWhole,
    Outdated,
    Resend,
    Train,
    catch_up,
    make_answer,
    receive,
)
from cfedavg.federate.protocol import (
    NEVER,
    Broadcast,
    Chain,
    Copy,
    Mark,
    Request,
    Stamp,
    Version,
    Whole,
    follow,
    make_mark,
    pack,
    unpack,
)
from cfedavg.federate.server import (
    Primary,
    Server,
    end_round,
    find_fault_in_reply,
    find_held_version,
    make_request,
    restore_backup,
)
from tests.copies import REPLICA, ZERO, advance, changes_of, draw_message, pack_items, whole_of

D, KEPT = 6, 2
ROUNDS, CLIENTS = 25, 4
LATE = 5  # rounds
HISTORY = 3  # messages that a server keeps
# How often each of these happens: to a message, to a client's work on a request, to a server's round.
RATES = {
    "request lost": 0.15, "request twice": 0.15, "request late": 0.15,
    "reply lost": 0.3, "reply twice": 0.3, "reply late": 0.2, "reply broken": 0.05, "not finite": 0.05,
    "client killed before it stored": 0.05, "client killed before it sent": 0.05,
    "disk gone": 0.03, "old disk": 0.08,
    "server killed before it dispatched": 0.03, "server killed while it waited": 0.05,
    "server killed before it stored": 0.05, "no quorum": 0.1, "server from backup": 0.05,
    "broadcast broken": 0.03, "told version forgotten": 0.1,
}  # fmt: skip

UPDATES = 200  # in a world, at most
ONES = (4 ** (UPDATES * D) - 1) // 3  # a 1 in every digit
TWOS = 2 * ONES
EACH = (4**D - 1) // 3  # a 1 in every coordinate of the first update
COLUMN = 3 * (ONES // EACH)  # all digits of the first coordinate


def update(n: int) -> int:
    return EACH << 2 * D * n


def places(mass: int) -> int:
    """A 1 for every digit that is not 0."""
    return (mass | mass >> 1) & ONES


def read(message: bytes) -> int:
    return int.from_bytes(message, "little")


class Digits:
    """Selects some coordinates, by chance."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def send(self, g: int, memory: int, request: Request) -> tuple[bytes, int]:
        p = memory + g
        kept = sum(p & COLUMN << 2 * i for i in self.chance.sample(range(D), KEPT))
        return kept.to_bytes(UPDATES * D // 4, "little"), p - kept

    def restore(self, memory: int, message: bytes) -> int:
        return memory + read(message)


class Reply(NamedTuple):
    """An answer under way, with the round in which it arrives."""

    due: int
    name: str
    incarnation: int
    stamp: Stamp
    message: bytes
    version: Version | None = None  # that the client holds

    @property
    def mark(self) -> Mark:
        return make_mark(self.stamp, self.incarnation, self.message)


class Dispatch(NamedTuple):
    """A request under way, with the round in which it arrives; one to evaluate has a broadcast only."""

    due: int
    name: str
    request: Request | None
    broadcast: bytes | None
    oldest: int  # the first round of the server's history
    broken: bool = False


@dataclass(frozen=True)
class Model:
    """What is in it, by client: the sum of its payloads, and the marks of all of them."""

    sums: dict[str, int]
    holds: frozenset[tuple[str, Mark]] = frozenset()

    def with_(self, taken: list[Reply]) -> Model:
        sums = dict(self.sums)
        for reply in taken:
            sums[reply.name] += read(reply.message)
        return Model(sums, self.holds | {(reply.name, reply.mark) for reply in taken})


@dataclass
class Rules:
    """The machines and the order in which the server stores; mutants replace one of them."""

    receive: Callable[..., Any] = receive
    objection: Callable[..., str] = find_fault_in_reply
    stored: Callable[[Server, Server], Server] = lambda before, after: after
    store_late: bool = False
    # Of copies
    follow: Callable[..., Copy | None] = follow
    catch_up: Callable[..., Any] = catch_up
    broadcast: Callable[[Broadcast], Broadcast] = lambda broadcast: broadcast
    tell_early: bool = False
    store_copy_later: bool = False
    evaluate_early: bool = False


class Broken(AssertionError):
    """The law does not hold."""


@dataclass
class Fate:
    """What only an observer of everything knows of a client."""

    made: int = 0  # the sum of all g
    lost: Counter[str] = field(default_factory=Counter)  # what may be nowhere, by cause: X is in it
    doubt: bool = False  # whether its disk, or the model, is not what came last
    last: Stamp = NEVER  # the last request that any of its incarnations and copies answered
    states: list[Client] = field(default_factory=list)  # all that were ever on its disk
    held: Version | None = None  # the newest version that was ever on its disk
    went_back: bool = False  # whether its disk does not hold that version because of a fault of the disk

    def may_lose(self, mass: int, cause: str) -> None:
        self.lost[cause] += mass & ~self.lost.total()


@dataclass
class World:
    """The disks of all, the network, and the fates."""

    seed: int
    rules: Rules = field(default_factory=Rules)
    rates: dict[str, float] = field(default_factory=lambda: dict(RATES))
    compressed: bool = True  # whether requests carry broadcasts; else the model travels beside them

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.sender = Digits(self.chance)
        self.names = [f"client {i}" for i in range(CLIENTS)]
        self.fates = {name: Fate() for name in self.names}
        self.incarnations, self.updates, self.generation = 0, 0, 1
        self.clients = {name: self.fresh() for name in self.names}  # on their disks
        primary = Primary.begin(ZERO, 1, 0, REPLICA.digest(ZERO))
        self.copies = {primary.version: ZERO}  # w of every version that was ever durable
        first = Model(dict.fromkeys(self.names, 0))
        self.disk = Server(first, primary=primary if self.compressed else None)
        self.told: dict[str, Version] = {}  # what the server was told, in its memory
        self.causes: Counter[str] = Counter()  # for which clients needed the whole model
        self.followed: Counter[str] = Counter()  # broadcasts, by kind
        self.backups = [self.disk]
        self.server = self.disk
        self.faults: Counter[str] = Counter()
        self.requests: list[Dispatch] = []
        self.replies: list[Reply] = []
        self.tellings: list[tuple[int, str, Version]] = []  # replies to requests to evaluate
        self.now, self.applied = 0, 0

    def happens(self, fault: str) -> bool:
        found = self.chance.random() < self.rates[fault]
        self.faults[fault] += found
        return found

    def fresh(self) -> Client:
        self.incarnations += 1
        return Client(self.incarnations, 0)

    def run(self) -> World:
        with mock.patch("cfedavg.federate.client.follow", self.rules.follow):
            for self.now in range(ROUNDS):
                self.round()
            self.settle()
        return self

    def settle(self) -> None:
        """Rounds without a fault, after which everything is quiet: all that was sent is delivered."""
        self.rates = dict.fromkeys(self.rates, 0.0)
        for _ in range(LATE + 3):
            self.now += 1
            self.round(everyone=True)
        for name in self.names:
            fate = self.fates[name]
            whole = fate.made == self.total(name) + fate.lost.total()  # with X as it is, no more and no less
            if self.on_the_way(name) or fate.doubt or not whole:
                raise Broken(f"seed {self.seed}: {name} is not quiet")
            copy = self.clients[name].copy
            if self.compressed and (copy is None or copy.version.round < self.disk.t - 1):
                raise Broken(f"seed {self.seed}: {name} does not hold the last version")

    def round(self, *, everyone: bool = False) -> None:
        if self.happens("server from backup"):
            self.restore()
        if self.happens("server killed before it dispatched"):
            self.restart()
        asked = self.names if everyone else self.chance.sample(self.names, 3)
        for name in asked:
            self.send_request(name, make_request(self.server, name))
        self.clients_work()
        if self.happens("server killed while it waited"):
            self.restart()
            return
        if self.rules.store_late:
            self.store(self.server)
        taken = self.collect(asked)
        if self.happens("no quorum"):
            taken = []
        self.end(taken)

    def end(self, taken: list[Reply]) -> None:
        """Aggregates, stores, and goes on from there."""
        marks = {reply.name: reply.mark for reply in taken}
        primary = self.server.primary and advance(self.server.primary, draw_message(self.chance), HISTORY)
        after = end_round(self.server, marks, self.server.x.with_(taken), primary)
        if self.rules.evaluate_early:
            self.evaluate(after)
        if self.happens("server killed before it stored"):
            self.restart()
            return
        if not self.rules.store_late:
            self.store(self.rules.stored(self.disk, after))
        self.server = after
        self.applied += len(taken)
        if not self.rules.evaluate_early:
            self.evaluate(after)

    def store(self, server: Server) -> None:
        self.disk = server
        self.backups.append(server)
        if server.primary is not None:
            w = self.copies.setdefault(server.primary.version, server.primary.w)
            if w != server.primary.w:
                raise Broken(f"seed {self.seed}, round {self.now}: one version of two copies")
        for name in self.names:
            self.check(name)

    def restart(self) -> None:
        """The server comes back with what is on its disk, and repeats the round."""
        self.server = self.disk
        self.told = {}

    def restore(self) -> None:
        """The server comes back with any state that was ever on its disk, in a new generation."""
        backup = self.chance.choice(self.backups)
        more = backup.x.holds - self.disk.x.holds
        for name, fate in self.fates.items():
            fate.may_lose(self.disk.x.sums[name] & ~backup.x.sums[name], "server from backup")
            # A model that did not lead to the last one: the client may have taken back what it holds.
            fate.doubt |= any(its == name for its, _ in more)
        self.generation += 1
        digest = backup.primary and REPLICA.digest(backup.primary.w)
        self.store(restore_backup(backup, self.generation, digest))
        self.restart()

    def send_request(self, name: str, request: Request) -> None:
        self.send(self.server, name, request, self.draw_broadcast(self.server, name))

    def evaluate(self, server: Server) -> None:
        """Some clients are asked to evaluate the model after a round."""
        for name in self.names:
            broadcast = self.draw_broadcast(server, name)
            if broadcast is not None and self.chance.random() < 0.5:
                self.send(server, name, None, broadcast)

    def draw_broadcast(self, server: Server, name: str) -> Broadcast | None:
        """Draw a kind that the server may send; mostly the whole model if it knows nothing of the client."""
        primary = server.primary
        if primary is None:
            return None
        if self.happens("told version forgotten"):
            self.told.pop(name, None)
        known = find_held_version(server, name, self.told.get(name))
        if known is None and self.chance.random() < 0.8:
            return whole_of(primary)
        start = known or primary.versions[0]
        kind = self.chance.choices(["chain", "changes", "whole"], [6, 3, 1])[0]
        if kind == "whole":
            return whole_of(primary)
        if kind == "changes" and start != primary.version:
            return changes_of(primary, start)
        return self.rules.broadcast(primary.chain(start) or whole_of(primary))

    def send(self, server: Server, name: str, request: Request | None, broadcast: Broadcast | None) -> None:
        if self.happens("request lost"):
            return
        oldest = server.primary.versions[0].round if server.primary else 0
        for _ in range(1 + self.happens("request twice")):
            late = self.chance.randint(1, LATE) if self.happens("request late") else 0
            broken = broadcast is not None and self.happens("broadcast broken")
            sent = self.damage(broadcast) if broken and broadcast else broadcast
            data = pack(sent) if sent else None
            self.requests.append(Dispatch(self.now + late, name, request, data, oldest, broken))

    def damage(self, broadcast: Broadcast) -> Broadcast:
        """Replace one message by another that is well formed, so that no checksum of a network shows it."""
        other = pack_items([(self.chance.randrange(5), self.chance.getrandbits(40))])
        if not isinstance(broadcast, Chain):
            return replace(broadcast, message=other)
        messages = list(broadcast.messages)
        if messages:
            messages[self.chance.randrange(len(messages))] = other
        return replace(broadcast, messages=tuple(messages))

    def send_reply(self, name: str, stamp: Stamp, message: bytes) -> None:
        if self.happens("reply lost"):
            return
        for _ in range(1 + self.happens("reply twice")):
            late = self.chance.randint(1, LATE) if self.happens("reply late") else 0
            client = self.clients[name]
            version = client.copy and client.copy.version
            self.replies.append(Reply(self.now + late, name, client.incarnation, stamp, message, version))

    def tell(self, name: str, version: Version) -> None:
        """The reply to a request to evaluate."""
        if not self.happens("reply lost"):
            late = self.chance.randint(1, LATE) if self.happens("reply late") else 0
            self.tellings.append((self.now + late, name, version))

    def clients_work(self) -> None:
        due = [each for each in self.requests if each.due <= self.now]
        self.requests = [each for each in self.requests if each.due > self.now]
        self.chance.shuffle(due)
        for each in due:
            self.disk_fails(each.name)
            if each.request is None:
                self.client_evaluates(each)
            else:
                self.client_works(each, each.request)
            self.check(each.name)
            self.check_copy(each.name, self.clients[each.name].copy)

    def disk_fails(self, name: str) -> None:
        if self.happens("disk gone"):
            self.put_disk(name, self.fresh(), "disk gone")
        if self.fates[name].states and self.happens("old disk"):
            self.put_disk(name, self.chance.choice(self.fates[name].states), "old disk")

    def put_disk(self, name: str, client: Client, cause: str) -> None:
        fate = self.fates[name]
        # What was sent before may have gone into a model that is no more.
        fate.may_lose(mass(self.clients[name]) & ~client.memory, cause)
        fate.doubt = True
        fate.went_back = fate.held is not None and (client.copy is None or client.copy.version < fate.held)
        self.clients[name] = client
        self.check(name)

    def client_works(self, dispatch: Dispatch, request: Request) -> None:
        name = dispatch.name
        if dispatch.broadcast is not None:
            request = replace(request, broadcast=unpack(dispatch.broadcast))
        client, action = self.rules.receive(self.clients[name], request, self.sender, REPLICA)
        if isinstance(action, Outdated):
            client, action = self.start_anew(name, request)
        if isinstance(action, NeedWhole):
            client, action = self.send_whole(dispatch, request)
        if isinstance(action, Resend):
            self.send_reply(name, request.stamp, action.message)
        if not isinstance(action, Train) or self.happens("not finite"):
            return
        self.check_copy(name, client.copy)
        g = self.make_update()
        after, message = make_answer(client, request, g, self.sender)
        if self.happens("client killed before it stored"):
            return
        self.updates += 1
        if self.rules.store_copy_later:
            self.answered(name, replace(after, copy=self.clients[name].copy), g)
            if self.happens("client killed before it stored"):
                return
            self.store_client(name, after)
        else:
            self.answered(name, after, g)
        if not self.happens("client killed before it sent"):
            self.send_reply(name, request.stamp, message)

    def client_evaluates(self, dispatch: Dispatch) -> None:
        assert dispatch.broadcast is not None
        name, before = dispatch.name, self.clients[dispatch.name]
        broadcast = unpack(dispatch.broadcast)
        client, action = self.rules.catch_up(before, broadcast, REPLICA)
        if isinstance(action, NeedWhole):
            self.causes[self.cause_of(dispatch, broadcast)] += 1
            client, action = self.rules.catch_up(before, self.whole_at(broadcast.version), REPLICA)
            if not isinstance(action, Evaluate):
                raise Broken(f"seed {self.seed}, round {self.now}: {name} does not take the whole model")
        if not isinstance(action, Evaluate):
            return
        self.check_copy(name, client.copy)
        if self.rules.tell_early:
            self.tell(name, broadcast.version)
        if self.happens("client killed before it stored"):
            return
        self.store_client(name, client)
        if not self.happens("client killed before it sent"):
            self.tell(name, broadcast.version)

    def send_whole(self, dispatch: Dispatch, request: Request) -> Any:
        """The server's answer to a refusal: the same stamp again, with the whole model."""
        assert request.broadcast is not None
        self.causes[self.cause_of(dispatch, request.broadcast)] += 1
        request = replace(request, broadcast=self.whole_at(request.broadcast.version))
        client, action = self.rules.receive(self.clients[dispatch.name], request, self.sender, REPLICA)
        if isinstance(action, Outdated):
            client, action = self.start_anew(dispatch.name, request)
        if not isinstance(action, Train):
            raise Broken(f"seed {self.seed}, round {self.now}: {dispatch.name} does not take the whole model")
        return (client, action) if not self.happens("request lost") else (client, None)

    def whole_at(self, version: Version) -> Whole:
        if version not in self.copies:
            raise Broken(f"seed {self.seed}, round {self.now}: {version} was never durable")
        w = self.copies[version]
        return Whole(pack_items(enumerate(w)), version, REPLICA.digest(w))

    def cause_of(self, dispatch: Dispatch, broadcast: Broadcast) -> str:
        """Return why a client needs the whole model; raise Broken without a cause."""
        client, fate = self.clients[dispatch.name], self.fates[dispatch.name]
        causes = {
            "new": fate.held is None,
            "went back": fate.went_back,
            "broken": dispatch.broken,
            "backup": fate.held and fate.held.generation != broadcast.version.generation,
            "away": client.copy and client.copy.version.round < dispatch.oldest,
        }
        found = next((cause for cause, holds in causes.items() if holds), None)
        if found is None:
            raise Broken(f"seed {self.seed}, round {self.now}: {dispatch.name} needs the whole model")
        return found

    def check_copy(self, name: str, copy: Copy | None) -> None:
        """Check the second half of the law: a copy is that of its version, whichever server made it."""
        if copy is not None and self.copies.get(copy.version) != copy.w:
            raise Broken(f"seed {self.seed}, round {self.now}: {name} has a wrong copy of {copy.version}")

    def store_client(self, name: str, after: Client) -> None:
        fate, version = self.fates[name], after.copy and after.copy.version
        if version is not None and version >= (fate.held or version):
            fate.held, fate.went_back = version, False
        if fate.held is not None and not fate.went_back and version != fate.held:
            raise Broken(f"seed {self.seed}, round {self.now}: the copy of {name} went back")
        self.clients[name] = after
        fate.states.append(after)

    def make_update(self) -> Any:
        return update(self.updates)

    def read(self, message: bytes) -> Any:
        return read(message)

    def nothing(self) -> Any:
        return 0

    def start_anew(self, name: str, request: Request) -> Any:
        fate = self.fates[name]
        if not fate.doubt:
            raise Broken(f"seed {self.seed}, round {self.now}: {name} has to start anew without a cause")
        fate.may_lose(mass(self.clients[name]), "started anew")
        fresh = replace(self.fresh(), copy=self.clients[name].copy)
        return self.rules.receive(fresh, request, self.sender, REPLICA)

    def answered(self, name: str, after: Client, g: int) -> None:
        """Store an answer. Who answers the present server first is past all doubt."""
        fate = self.fates[name]
        self.store_client(name, after)
        fate.made += g
        if after.answered > fate.last and after.answered.generation == self.disk.stamp.generation:
            fate.doubt = False
            there = places(self.total(name))  # and safe from what has been
            fate.lost = Counter({cause: lost & ~there for cause, lost in fate.lost.items()})
        fate.last = max(fate.last, after.answered)

    def hear(self) -> None:
        """What replies tell of the versions that clients hold, also replies that are not taken."""
        told = [each for each in self.tellings if each[0] <= self.now]
        self.tellings = [each for each in self.tellings if each[0] > self.now]
        told += [(each.due, each.name, each.version) for each in self.replies
                 if each.due <= self.now and each.version]  # fmt: skip
        for _, name, version in told:
            self.told[name] = max(version, self.told.get(name, version))

    def collect(self, asked: list[str]) -> list[Reply]:
        """The replies that arrive in this round and are taken."""
        self.hear()
        due = [reply for reply in self.replies if reply.due <= self.now]
        self.replies = [reply for reply in self.replies if reply.due > self.now]
        self.chance.shuffle(due)
        taken: list[Reply] = []
        for reply in due:
            names = [each.name for each in taken]
            why = self.rules.objection(self.server, asked, names, reply.name, reply.stamp)
            if not why and not self.happens("reply broken"):
                taken.append(reply)
        return taken

    def on_the_way(self, name: str) -> int:
        """U: what was sent and is not in the durable model."""
        client = self.clients[name]
        if client.sent is None:
            return self.nothing()
        mark = make_mark(client.sent.stamp, client.incarnation, client.sent.message)
        return self.nothing() if (name, mark) in self.disk.x.holds else self.read(client.sent.message)

    def total(self, name: str) -> int:
        """A + e + U."""
        return self.disk.x.sums[name] + self.clients[name].memory + self.on_the_way(name)

    def check(self, name: str) -> None:
        """Check the law bit for bit: each part of what was computed is in one place, or lost by a fault."""
        fate, total = self.fates[name], self.total(name)
        wrong = {
            "twice in the model": self.disk.x.sums[name] & TWOS,
            "twice": not fate.doubt and total & TWOS,
            "never computed": places(total) & ~fate.made,
            "lost": fate.made & ~places(total) & ~fate.lost.total(),
        }
        if any(wrong.values()):
            raise Broken(f"seed {self.seed}, round {self.now}: {name}, {[w for w in wrong if wrong[w]]}")


def mass(client: Client) -> int:
    """What is on a client's disk."""
    return client.memory + (read(client.sent.message) if client.sent else 0)
