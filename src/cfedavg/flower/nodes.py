"""The nodes of a federation: who they are, and where they keep their states.

In a deployment a node proves its identity with a key. In Flower's simulation the nodes get new ids and new
keys at every start, and only the clients know which part of the data they have. So the server asks each
simulated node once for its `partition-id`, which is the same after a restart. The mod answers.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from cfedavg.core.errors import InputError
from cfedavg.core.files import read_file
from cfedavg.core.run_files import FEDERATION
from cfedavg.flower.federation_state import Node, Numbers
from cfedavg.flower.replies import MODS, OURS, in_a_line, shorten_reason

PARTITION = "partition-id"  # Flower's name for the number of a client's part of the data
POLL = 0.1  # seconds between two checks for answers


def is_question(message: Message) -> bool:
    """Return whether a message asks the node for its `partition-id`, and nothing else."""
    record = message.content.config_records.get(OURS)
    return record is not None and list(record) == [PARTITION]


def answer_question(message: Message, context: Context) -> Message:
    """Return the reply with the node's `partition-id`."""
    record = ConfigRecord({PARTITION: context.node_config.get(PARTITION, "")})
    return Message(RecordDict({OURS: record}), reply_to=message)


def state_folder(context: Context, federation: str, folder: str) -> Path:
    """Return the folder in which a node keeps its residuals and model copies.

    `folder`: empty, or the server's own folder, which a simulation uses. Raise InputError if that folder is
    not on this machine or not of this `federation`: a request must not choose any other folder.
    """
    named = context.node_config.get("state-dir") or os.environ.get("CFEDAVG_STATE")
    if named:
        return Path(str(named))
    if not folder:
        return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "cfedavg"
    with suppress(OSError):
        if read_file(Path(folder) / FEDERATION) == federation.encode():
            return Path(folder) / "nodes"
    raise InputError(f"the server's folder must be on this machine, got {folder!r:.300}")


def is_simulated(grid: Grid) -> bool:
    """Return whether the nodes of `grid` run in Flower's simulation.

    The class is known by its name, because its module changes between versions of Flower.
    """
    return any(kind.__name__ == "InMemoryGrid" for kind in type(grid).__mro__)


@dataclass
class OnlineNodes:
    """The online nodes of a federation. `numbers` gives each node a client number."""

    grid: Grid
    numbers: Numbers
    _partitions: dict[int, int] = field(default_factory=dict)  # of simulated nodes, by Flower's id

    def __post_init__(self) -> None:
        self.simulated = is_simulated(self.grid)

    def find(self) -> list[Node]:
        """Return the online nodes by client number. New nodes get numbers in the order of their names.

        Without authentication, a node has a new key after every restart, and so counts as a new node. Of a
        simulation, return only the nodes that have answered `identify`.
        """
        found = {}
        for info in self.grid.get_nodes():
            key, name = info.public_key or str(info.node_id).encode(), in_a_line(info.name)
            if self.simulated:
                if info.node_id not in self._partitions:
                    continue
                name = f"node{self._partitions[info.node_id]}"
                key = name.encode()
            found[hashlib.sha256(key).hexdigest()] = (info.node_id, name)
        numbers = self.numbers
        for _, identity in sorted((_sort_key(name), who) for who, (_, name) in found.items()):
            numbers.of(identity)
        nodes = [Node(node, who, numbers.of(who), name or who[:8]) for who, (node, name) in found.items()]
        return sorted(nodes, key=lambda node: node.number)

    def identify(self, message_type: str, seconds: float) -> None:
        """Ask the new nodes of a simulation for their partitions, and wait at most `seconds` for answers.

        The question has the type of a message that the client app handles, because Flower calls no mod for
        another type.
        """
        if not self.simulated:
            return
        new = [node for node in self.grid.get_node_ids() if node not in self._partitions]
        question = RecordDict({OURS: ConfigRecord({PARTITION: ""})})
        messages = [Message(question, node, message_type, ttl=seconds) for node in new]
        waiting = dict(zip(self.grid.push_messages(messages), new, strict=True))
        end = time.monotonic() + seconds
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                self._partitions[node] = _read_partition(reply)
            if time.monotonic() > end:
                return
            if waiting:
                time.sleep(POLL)


def _read_partition(reply: Message) -> int:
    """Return the `partition-id` in a simulated node's answer; raise InputError if there is none."""
    why = shorten_reason(reply.error.reason) if reply.has_error() else "its reply lacks a partition-id"
    record: Mapping[str, Any] = {} if reply.has_error() else reply.content.config_records.get(OURS, {})
    match record.get(PARTITION):
        case int(partition):
            return partition
    raise InputError(f"the ClientApp must have {MODS}, but a node of the simulation cannot answer: {why}")


def _sort_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "node2" before "node10".

    >>> sorted(["node10", "node2"], key=_sort_key)
    ['node2', 'node10']
    """
    return [(int(digits or 0), letters) for letters, digits in re.findall(r"(\D*)(\d*)", name)]
