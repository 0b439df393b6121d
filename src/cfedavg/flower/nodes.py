"""The nodes of a federation, by what they have proved to be, and messages to them with a deadline."""

from __future__ import annotations

import hashlib
import heapq
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from logging import INFO

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from cfedavg.core.errors import InputError
from cfedavg.flower.round_policy import RoundPolicy

POLL = 0.3  # seconds between two looks for replies
PATIENCE = 1.0  # seconds between two looks for nodes
MOST_TEXT = 300  # characters of what a node says that are of use to anyone


@dataclass(frozen=True)
class Node:
    """A node that is online: Flower's number for it, its key's fingerprint, our number for it, its name."""

    id: int
    identity: str
    number: int
    name: str


def in_a_line(text: str) -> str:
    """What a node says, as one line that is not too long: it may say anything."""
    return "".join(c if c.isprintable() else " " for c in text[:MOST_TEXT])


class Numbers:
    """The numbers of clients. Who has delivered keeps its own; others have the lowest that are free.

    `lent` are those of nodes that have not delivered yet. They are given back when such a node goes away,
    so that it leaves nothing behind.
    """

    def __init__(self, kept: Mapping[str, int] | None = None, lent: Mapping[str, int] | None = None) -> None:
        self.kept, self.lent = dict(kept or {}), dict(lent or {})
        self._used = {*self.kept.values(), *self.lent.values()}
        # All below `_next` are used, or given back and in the heap: nothing grows with the largest number.
        self._next, self._back = 0, list[int]()

    def __len__(self) -> int:
        return len(self.kept) + len(self.lent)

    def __contains__(self, identity: str) -> bool:
        return identity in self.kept or identity in self.lent

    def of(self, identity: str) -> int:
        """That of a node; one that is new gets one."""
        if identity in self.kept:
            return self.kept[identity]
        if identity not in self.lent:
            self.lent[identity] = self._lowest()
        return self.lent[identity]

    def _lowest(self) -> int:
        """Return the lowest number that is free, which is used from now on."""
        if self._back:
            number = heapq.heappop(self._back)
        else:
            while self._next in self._used:
                self._next += 1
            number = self._next
        self._used.add(number)
        return number

    def settle(self, delivered: Iterable[str], online: Collection[str]) -> None:
        """Those who have delivered keep their numbers; those who are gone give theirs back."""
        self.kept |= {who: self.lent.pop(who) for who in delivered if who in self.lent}
        for who in [who for who in self.lent if who not in online]:
            number = self.lent.pop(who)
            self._used.discard(number)
            if number < self._next:
                heapq.heappush(self._back, number)


def online(grid: Grid, numbers: Numbers) -> list[Node]:
    """The nodes that are there, by number. Each identity that is new gets one, in the order of names.

    Without authentication a node has another key, and so is another node, after every restart.
    """
    found = {}
    for info in grid.get_nodes():
        identity = hashlib.sha256(info.public_key or str(info.node_id).encode()).hexdigest()
        found[identity] = (info.node_id, in_a_line(info.name))
    new = sorted(
        (_natural(name), identity) for identity, (_, name) in found.items() if identity not in numbers
    )
    for _, identity in new:
        numbers.of(identity)
    nodes = [Node(node, who, numbers.of(who), name or who[:8]) for who, (node, name) in found.items()]
    return sorted(nodes, key=lambda node: node.number)


def _natural(name: str) -> list[tuple[int, str]]:
    """So that node 2 comes before node 10.

    >>> sorted(["node10", "node2"], key=_natural)
    ['node2', 'node10']
    """
    return [(int(digits or 0), letters) for letters, digits in re.findall(r"(\D*)(\d*)", name)]


def wait_for(grid: Grid, numbers: Numbers, policy: RoundPolicy) -> list[Node]:
    """Return the nodes that are online, once the policy lets a round start with them."""
    end, told, least = time.monotonic() + policy.deadline, -1, policy.min_nodes
    while not policy.can_start(len(nodes := online(grid, numbers))):
        if len(nodes) != told:
            log(INFO, "waiting for nodes: %d of %d are online", len(nodes), least)
            told = len(nodes)
        if time.monotonic() > end:
            raise InputError(
                f"`min_nodes` is {least}, but only {len(nodes)} nodes came online within "
                f"{policy.deadline:g} s: start more, or ask for less"
            )
        time.sleep(PATIENCE)
    return nodes


class Exchange:
    """Messages under way to nodes, and their replies, until the time is over."""

    def __init__(self, grid: Grid, messages: Iterable[Message], seconds: float) -> None:
        self.grid, self._end = grid, time.monotonic() + seconds
        self._waiting: dict[str, int] = {}  # the nodes asked, by the message's name
        self.send(messages)

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages, also while others are under way."""
        sent = list(messages)
        names = list(self.grid.push_messages(sent)) if sent else []
        self._waiting |= {
            name: message.metadata.dst_node_id for name, message in zip(names, sent, strict=True) if name
        }

    def replies(self) -> Iterator[tuple[int, Message]]:
        """Yield each reply with the node that was asked, as they come; whoever has enough stops asking.

        An error need not say whose it is, so replies are told apart by what they answer.
        """
        while self._waiting:
            for reply in self.grid.pull_messages(list(self._waiting)):
                asked = self._waiting.pop(reply.metadata.reply_to_message_id, None)
                if asked is not None:
                    yield asked, reply
            if time.monotonic() > self._end:
                return
            if self._waiting:
                time.sleep(POLL)
