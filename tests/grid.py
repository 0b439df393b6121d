"""A Flower grid within this process: the real client app, mod, stores and strategy, and no network.

Nodes answer when their messages are pushed. A test may hold a reply back, lose it, or put another in its
place, take nodes away, and break off the server at any of its pushes and pulls.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore.task_identity import TaskIdentity

from cfedavg.channel import Channel
from cfedavg.compress import parse
from cfedavg.core.run_files import read_rows
from cfedavg.federate.client import Client, Uplink
from cfedavg.federate.protocol import make_mark
from cfedavg.federate.server import Server
from cfedavg.federate.state_file import FILE
from cfedavg.federate.stores import ClientStore, ServerStore
from cfedavg.feedback import ErrorFeedback
from cfedavg.flower import CFedAvg, compressed
from cfedavg.flower.array_layout import Form

# Outside a task of Flower's no Message can be made.
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

_ids = itertools.count()

Arrays = dict[str, np.ndarray]


class ServerKilled(BaseException):
    """The server's process ends here."""


class NodeKilled(BaseException):
    """The process that answers for a node ends here."""


@dataclass
class LocalNode:
    """A node with its own app, configuration and disk."""

    id: int
    app: ClientApp
    disk: Path
    run_config: dict[str, Any] = field(default_factory=dict)
    partition: int = 0
    online: bool = True

    @property
    def context(self) -> Context:
        config = {"partition-id": self.partition, "state-dir": str(self.disk)}
        return Context(1, self.id, config, RecordDict(), dict(self.run_config))

    @property
    def info(self) -> Any:
        return SimpleNamespace(
            node_id=self.id, public_key=f"key {self.id}".encode(), name=f"node{self.partition}"
        )

    def answer(self, message: Message) -> Message:
        """Return what the node says, as its SuperNode would report it."""
        received = travelled(message)  # the app may change what it gets
        try:
            return travelled(self.app(received, self.context))
        except NodeKilled:
            return error(8, "ClientApp crashed", message)
        except Exception as raised:
            return error(2, f"{type(raised)}:<'{raised}'>", message)


class LocalGrid(Grid):
    """Delivers at once, through Flower's own serialisation.

    `on_request(node, request)` decides what becomes of a request: what the node answers, or None if nothing
    comes back. `on_reply(node, request, reply)` decides likewise about the reply. `stray` are replies that
    nobody has asked for in this round; the next pull brings them.
    """

    def __init__(self, nodes: list[LocalNode]) -> None:
        self.nodes = {node.id: node for node in nodes}
        self.replies: dict[str, Message | None] = {}
        self.requests: list[tuple[int, Message]] = []
        self.stray: list[Message] = []
        self.on_request: Callable[[LocalNode, Message], Message | None] = lambda n, q: n.answer(q)
        self.on_reply: Callable[[LocalNode, Message, Message], Message | None] = lambda n, q, r: r
        self.before_push: Callable[[], None] = lambda: None
        self.before_pull: Callable[[], None] = lambda: None

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node.id for node in self.nodes.values() if node.online]

    def get_nodes(self) -> Iterable[Any]:
        return [node.info for node in self.nodes.values() if node.online]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        self.before_push()
        name = f"message {next(_ids)}"
        message.metadata.__dict__["_message_id"] = name
        message = travelled(message)
        node = self.nodes[message.metadata.dst_node_id]
        self.requests.append((node.id, message))
        reply = self.on_request(node, message) if node.online else error(5, "Node Unavailable", message)
        self.replies[name] = reply and self.on_reply(node, message, reply)
        return name

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.before_pull()
        found = [*self.stray, *(self.replies.get(name) for name in message_ids)]
        self.stray = []
        return [reply for reply in found if reply is not None]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [reply for m in messages if (reply := self.replies[self._push(m)]) is not None]


def travelled(message: Message) -> Message:
    """The message after Flower has written it to bytes and read it back."""
    found: Message = message_from_proto(
        ProtoMessage.FromString(message_to_proto(message).SerializeToString())
    )
    return found


def error(code: int, reason: str, request: Message) -> Message:
    return Message(Error(code, reason), reply_to=request)


# A federation whose clients add whole numbers, so that all sums are exact.

MODEL: Arrays = {"w": np.zeros((4, 3), np.float32), "b": np.arange(5, dtype=np.float32)}


def numbers(partition: int, server_round: int, model: Arrays = MODEL) -> Arrays:
    """The change of a client's model in a round."""
    draw = np.random.default_rng([partition, server_round])
    return {name: draw.integers(-9, 10, array.shape).astype(array.dtype) for name, array in model.items()}


def record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.array(array)) for name, array in arrays.items()})


def arrays_of(found: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in found.items()}


class Adding:
    """A client app that adds `numbers` to the model, and keeps the order of its calls.

    `spoil[partition]` makes another reply of (arrays, metrics, message).
    """

    def __init__(self, mods: list[Any] | None = None, *, metrics: dict[str, Any] | None = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self.trained: list[RecordDict] = []  # what it was given
        self.evaluated: list[RecordDict] = []
        self.spoil: dict[int, Callable[[Arrays, dict[str, Any], Message], Message]] = {}
        self.metrics = metrics or {"num-examples": 10}
        self.app = ClientApp(mods=[compressed] if mods is None else mods)
        self.app.train()(self.train)
        self.app.evaluate()(self.evaluate)

    def train(self, message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        server_round = message.content.config_records["config"]["server-round"]
        self.calls.append((partition, server_round))
        self.trained.append(message.content)
        (found,) = message.content.array_records.values()
        model = arrays_of(found)
        change = numbers(partition, server_round, model)
        arrays = {name: array + change[name] for name, array in model.items()}
        metrics = {**self.metrics, "partition": partition}
        if partition in self.spoil:
            return self.spoil[partition](arrays, metrics, message)
        return reply_with(arrays, metrics, message)

    def evaluate(self, message: Message, context: Context) -> Message:
        self.evaluated.append(message.content)
        (found,) = message.content.array_records.values()
        total = sum(float(array.sum()) for array in arrays_of(found).values())
        metrics = MetricRecord({"num-examples": 1, "total": total})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)


def reply_with(arrays: Arrays, metrics: dict[str, Any], message: Message) -> Message:
    content = RecordDict({"arrays": record(arrays), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


class Summing(Strategy):
    """x + the sum of what the clients changed: whole numbers stay whole."""

    def summary(self) -> None: ...

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.now = arrays_of(arrays)
        config = ConfigRecord({**config, "server-round": server_round})
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, dst_node_id=i, message_type=MessageType.TRAIN) for i in grid.get_node_ids()]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        made = {name: array.copy() for name, array in self.now.items()}
        for reply in replies:
            for name, array in arrays_of(reply.content.array_records["arrays"]).items():
                made[name] = made[name] + (array - self.now[name])
        return record(made), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None


class Federation:
    """Nodes with one app and a server's folder; started as often as one likes, each time as a new process."""

    def __init__(self, folder: Path, app: ClientApp, nodes: int = 3, model: Arrays = MODEL) -> None:
        self.out, self.model = folder / "out", model
        self.nodes = [LocalNode(100 + i, app, folder / f"node{i}", {}, i) for i in range(nodes)]
        self.grid = LocalGrid(self.nodes)

    def start(self, rounds: int, inner: Strategy | None = None, **options: Any) -> Result:
        more = {name: options.pop(name) for name in ("evaluate_fn", "train_config") if name in options}
        timeout = options.pop("timeout", 1e-9)  # everything that comes has come by the first pull
        options = {"compressor": "topk(0.7)", "compressor_down": "none", "out": self.out} | options
        strategy = CFedAvg(inner, **options)
        return strategy.start(self.grid, record(self.model), num_rounds=rounds, timeout=timeout, **more)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.out / "metrics.jsonl")

    @property
    def outcomes(self) -> list[dict[str, int]]:
        return [row["outcomes"] for row in self.rows]

    @property
    def of_nodes(self) -> list[dict[str, Any]]:
        return read_rows(self.out / "nodes.jsonl")

    def lose_disk(self, node: int) -> None:
        shutil.rmtree(self.nodes[node].disk)


def same(a: Arrays | ArrayRecord, b: Arrays | ArrayRecord) -> bool:
    """Bit for bit, in the same order."""
    first, second = (arrays_of(each) if isinstance(each, ArrayRecord) else each for each in (a, b))
    return list(first) == list(second) and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and first[name].tobytes() == second[name].tobytes()
        for name in first
    )


Vector = np.ndarray[Any, Any]


class Disks:
    """Reads the files of all nodes and of the server, which no part of a federation can."""

    def __init__(self, it: Federation, copy_dtype: str = "float32") -> None:
        self.it, self.form, self.copy_dtype = it, Form.of(it.model), copy_dtype

    @property
    def zero(self) -> Vector:
        return np.zeros(self.form.layout.d, np.float32)

    @property
    def federation(self) -> str:
        return (self.it.out / "federation.txt").read_text()

    def identity(self, node: LocalNode) -> str:
        """Return what the server calls a node, online or not."""
        return hashlib.sha256(node.info.public_key).hexdigest()

    def store(self, node: LocalNode) -> ClientStore:
        identity, layout = self.identity(node), self.form.layout
        return ClientStore(node.disk, self.federation, identity, layout, self.copy_dtype)

    def client(self, node: LocalNode) -> Client | None:
        store = self.store(node)
        return store.load() if (store.folder / FILE).exists() else None

    def server(self) -> Server:
        store = ServerStore(self.it.out / "state", self.federation, self.form.layout, self.copy_dtype)
        served = store.load()
        assert served is not None
        return served.server

    def payload(self, message: bytes) -> Vector:
        channel = Channel(parse("none"), ErrorFeedback(), self.form.layout)
        found: Vector = Uplink(channel, 0).restore(self.zero, message)
        return found

    def on_the_way(self, node: LocalNode) -> Vector:
        """U: what a client has sent that is not in the durable model."""
        client = self.client(node)
        if client is None or client.sent is None:
            return self.zero
        mark = make_mark(client.sent.stamp, client.incarnation, client.sent.message)
        there = self.server().applied.get(self.identity(node)) == mark
        return self.zero if there else self.payload(client.sent.message)

    def mass(self, node: LocalNode) -> Vector:
        """e + U."""
        client = self.client(node)
        return self.on_the_way(node) if client is None else client.memory + self.on_the_way(node)

    def masses(self) -> Vector:
        """e + U of all nodes."""
        return np.sum([self.mass(node) for node in self.it.nodes], 0)

    def x(self) -> Vector:
        """What the durable model has gained."""
        found: Vector = self.server().x - self.form.split(self.it.model)[0]
        return found

    def update(self, *calls: tuple[int, int]) -> Vector:
        """The sum of what an app of `Adding` computed in these calls."""
        made = [self.form.split(numbers(*call, self.it.model))[0] for call in calls]
        return np.sum(made, 0)


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows sorted by round and node, without times."""
    rows = sorted(rows, key=lambda row: (row["round"], row.get("number")))
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]
