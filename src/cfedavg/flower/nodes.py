"""The nodes of a federation, by what they have proved to be, and messages to them with a deadline."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from logging import INFO

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from cfedavg.errors import InputError
from cfedavg.keys import Purpose, key, permutation

POLL = 0.3  # seconds between two looks for replies
PATIENCE = 1.0  # seconds between two looks for nodes


@dataclass(frozen=True)
class Node:
    """A node that is online: Flower's number for it, its key's fingerprint, our number for it, its name."""

    id: int
    identity: str
    number: int
    name: str


def online(grid: Grid, numbers: dict[str, int]) -> list[Node]:
    """The nodes that are there, by number. `numbers` gets one for each identity that is new.

    Without authentication a node has another key, and so is another node, after every restart.
    """
    found = {}
    for info in grid.get_nodes():
        identity = hashlib.sha256(info.public_key or str(info.node_id).encode()).hexdigest()
        found[identity] = (info.node_id, info.name)
    new = sorted(
        (_natural(name), identity) for identity, (_, name) in found.items() if identity not in numbers
    )
    for _, identity in new:
        numbers[identity] = len(numbers)
    nodes = [Node(node, who, numbers[who], name or who[:8]) for who, (node, name) in found.items()]
    return sorted(nodes, key=lambda node: node.number)


def _natural(name: str) -> list[tuple[int, str]]:
    """So that node 2 comes before node 10.

    >>> sorted(["node10", "node2"], key=_natural)
    ['node2', 'node10']
    """
    return [(int(digits or 0), letters) for letters, digits in re.findall(r"(\D*)(\d*)", name)]


def wait_for(grid: Grid, numbers: dict[str, int], least: int, seconds: float) -> list[Node]:
    """The nodes that are there, once they are as many as needed."""
    end, told = time.monotonic() + seconds, -1
    while len(nodes := online(grid, numbers)) < least:
        if len(nodes) != told:
            log(INFO, "waiting for nodes: %d of %d are online", len(nodes), least)
            told = len(nodes)
        if time.monotonic() > end:
            raise InputError(
                f"min_nodes = {least}, but only {len(nodes)} nodes came online within {seconds:g} s: "
                "start more, or ask for less"
            )
        time.sleep(PATIENCE)
    return nodes


def sampled(nodes: Sequence[Node], count: int, seed: int, t: int) -> list[Node]:
    """Some of the nodes, uniformly without replacement, as a simulation of the same seed draws them."""
    order = permutation(key(seed, t, 0, Purpose.SAMPLE), len(nodes))
    return [nodes[i] for i in sorted(order[:count].tolist())]


def exchange(grid: Grid, messages: Iterable[Message], seconds: float) -> Iterator[tuple[int, Message]]:
    """Sends, and gives each reply with the node that was asked, as they come, until the time is over.

    An error need not say whose it is, so replies are told apart by what they answer. Whoever has enough
    stops asking.
    """
    messages = list(messages)
    ids = list(grid.push_messages(messages))
    waiting = {
        name: message.metadata.dst_node_id for name, message in zip(ids, messages, strict=True) if name
    }
    end = time.monotonic() + seconds
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            asked = waiting.pop(reply.metadata.reply_to_message_id, None)
            if asked is not None:
                yield asked, reply
        if time.monotonic() > end:
            return
        if waiting:
            time.sleep(POLL)
