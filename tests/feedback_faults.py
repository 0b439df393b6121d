"""The same faulty federation with real feedbacks and a real channel: vectors in the place of digits.

Updates are whole numbers and the compressor only selects, so all sums are exact unless a feedback rounds.
Faults of disks are left out: what they take is no business of a feedback.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cfedavg.algorithm import Aggregator, ServerMemory
from cfedavg.channel import Channel
from cfedavg.compress import Everything
from cfedavg.control import ControlVariates
from cfedavg.core.layout import Layout
from cfedavg.core.payload import Floats, Payload
from cfedavg.federate.client import Client
from cfedavg.federate.protocol import Request
from cfedavg.federate.server import Server
from cfedavg.feedback import EF21, Feedback, LawTerms
from cfedavg.optimise.server import ServerSGD
from tests.faults import CLIENTS, KEPT, RATES, Broken, D, Fate, Model, World

OF_DISKS = ("disk gone", "old disk", "server from backup")
_ITEM = np.dtype([("index", "<i8"), ("value", "<f8")])


class Picking:
    """A compressor that sends some coordinates, by chance."""

    selector = Everything()

    def __init__(self, world: World) -> None:
        self.world = world

    def compress(self, p: np.ndarray, key: int, layout: Layout, t: int, g2: object = None) -> Payload:
        indices = np.array(sorted(self.world.chance.sample(range(D), KEPT)))
        return Payload(D, np.array([0, KEPT]), indices, Floats(p[indices], "fp64"))


def pack(payload: Payload) -> bytes:
    items = np.empty(KEPT, _ITEM)
    items["index"], items["value"] = payload.indices, payload.values.data  # type: ignore[union-attr]
    return items.tobytes()


def unpack(message: bytes) -> Payload:
    items = np.frombuffer(message, _ITEM)
    return Payload(D, np.array([0, KEPT]), items["index"], Floats(items["value"], "fp64"))


def read_vector(message: bytes) -> np.ndarray:
    items, dense = np.frombuffer(message, _ITEM), np.zeros(D)
    dense[items["index"]] = items["value"]
    return dense


class Sender:
    """A client's way to the server: the channel of the package, and messages that are quick to make."""

    def __init__(self, world: World, feedback: Feedback) -> None:
        self.channel = Channel(Picking(world), feedback, Layout.flat(D))  # type: ignore[arg-type]
        self.forgone = np.zeros(D)  # in the last answer

    def send(self, g: np.ndarray, memory: np.ndarray, request: Request) -> tuple[bytes, np.ndarray]:
        made = self.channel.send(g, memory, key=0, t=request.t)
        self.forgone = self.channel.feedback.forgone(made.left)
        return pack(made.payload), made.memory

    def restore(self, memory: np.ndarray, message: bytes) -> np.ndarray:
        return self.channel.feedback.restore(memory, unpack(message))


class FeedbackWorld(World):
    """A World in which clients keep the memory of a feedback, and its law is what is checked."""

    def __init__(self, seed: int, feedback: Feedback, tolerance: float = 0.0) -> None:
        self.feedback, self.tolerance = feedback, tolerance
        super().__init__(seed, rates=RATES | dict.fromkeys(OF_DISKS, 0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sender: Any = Sender(self, self.feedback)
        zero = np.zeros(D)
        self.fates = {name: Fate(made=zero) for name in self.names}  # type: ignore[arg-type]
        self.forgone = dict.fromkeys(self.names, zero)
        aggregator = Aggregator(self.feedback, ServerSGD())
        first = Vectors(dict.fromkeys(self.names, zero), frozenset(), aggregator, aggregator.init(zero))  # type: ignore[arg-type]
        self.disk = self.server = Server(first)

    def fresh(self) -> Client:
        self.incarnations += 1
        return Client(self.incarnations, np.zeros(D))

    def make_update(self) -> np.ndarray:
        return np.array([self.chance.randint(-1000, 1000) for _ in range(D)], float)

    def answered(self, name: str, after: Client, g: Any) -> None:
        self.clients[name] = after
        self.fates[name].made = self.fates[name].made + g
        self.forgone[name] = self.forgone[name] + self.sender.forgone

    def read(self, message: bytes) -> Any:
        return read_vector(message)

    def nothing(self) -> Any:
        return np.zeros(D)

    def settle(self) -> None:
        """After rounds without a fault nothing is on the way."""
        self.rates = dict.fromkeys(self.rates, 0.0)
        for _ in range(8):
            self.now += 1
            self.round(everyone=True)
        if any(self.on_the_way(name).any() for name in self.names):
            raise Broken(f"seed {self.seed}: something is still on the way")

    def check(self, name: str) -> None:
        terms = LawTerms(
            self.fates[name].made,
            self.disk.x.sums[name],
            self.on_the_way(name),
            self.forgone[name],
            self.clients[name].memory,
        )
        if abs(self.feedback.imbalance(terms)).max() > self.tolerance:
            raise Broken(f"seed {self.seed}, round {self.now}: {name}")
        if self.feedback.mirrors_clients:
            applied = sum(self.disk.x.sums.values())
            if abs(self.disk.x.memory.feedback - applied).max() > 1e-9:
                raise Broken(f"seed {self.seed}, round {self.now}: the server")


class ControlSender(Sender):
    """The way of a client's c_i to the server; an update g is the gradient of its only local step."""

    def __init__(self, world: World) -> None:
        super().__init__(world, EF21())
        self.world = world
        self.control = ControlVariates(Picking(world), Layout.flat(D))  # type: ignore[arg-type]

    def send(self, g: np.ndarray, memory: np.ndarray, request: Request) -> tuple[bytes, np.ndarray]:
        c, x_0 = self.world.server.x.memory.feedback / CLIENTS, np.zeros(D)
        x_K = x_0 - (g + c - memory)
        made = self.control.send(memory, c, x_0, x_K, K=1, eta_L=1.0, key=0, t=request.t)
        if (made.p + memory != g).any():
            raise Broken(f"seed {self.world.seed}: the target is not the gradient")
        return pack(made.payload), made.memory


class ControlWorld(FeedbackWorld):
    """A FeedbackWorld in which clients send control variates, and c must stay their mean."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, EF21())

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sender = ControlSender(self)


@dataclass(frozen=True)
class Vectors(Model):
    """A model whose sums are vectors, made by the server's half of the feedback too."""

    aggregator: Aggregator | None = None
    memory: ServerMemory = field(default_factory=ServerMemory)

    def with_(self, taken: list[Any]) -> Model:
        sums = dict(self.sums)
        for reply in taken:
            sums[reply.name] = sums[reply.name] + read_vector(reply.message)
        assert self.aggregator is not None
        payloads = [(unpack(reply.message), [1.0]) for reply in taken]
        _, memory = self.aggregator.step(np.zeros(D), self.memory, payloads, everyone=CLIENTS, eta=1.0)
        holds = self.holds | {(reply.name, reply.mark) for reply in taken}
        return Vectors(sums, holds, self.aggregator, memory)
