"""The policy of a round: how many nodes it asks and which, when it ends, and what a missing reply counts as.

It knows numbers only: it needs neither Flower nor a network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple, Self, TypeVar

from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, key, permutation

LATE, LOST = "late", "lost"
Node = TypeVar("Node")

# Of each number: its kind, its least and its largest value, and both in words.
_RANGES: dict[str, tuple[Any, float, float, str]] = {
    "participation": (Real, math.ulp(0.0), 1.0, "above 0 and at most 1"),
    "over_selection": (Real, 0.0, 1000.0, "from 0 to 1000"),
    "min_nodes": (Integral, 1.0, 2.0**63, "a whole number of 1 or more"),
    "quorum": (Real, 0.0, 1.0, "from 0 to 1"),
}


class Missing(NamedTuple):
    """What a missing reply counts as, LATE or LOST, and why."""

    cause: str
    why: str


@dataclass(frozen=True)
class RoundPolicy:
    """Decide which nodes a round asks, when it ends, and whether it changes the model.

    `participation`: the share of the online nodes whose replies a round needs. `over_selection`: how many
    more nodes the round asks (0.2: 1/5 more). The round ends when it has the replies it needs, and does not
    wait for the others. `min_nodes`: a round starts when this many nodes are online. `quorum`: the share of
    the needed replies below which a round changes nothing; the clients send its updates again later.

    `deadline`: the most seconds that a round waits, first for nodes and then for replies. It is the
    `timeout` of `CFedAvg.start`.

    A subclass may decide otherwise: override the method of the decision.

    >>> policy = RoundPolicy(participation=0.5, over_selection=0.2)
    >>> policy.count_needed(20), policy.count_asked(20), policy.count_quorum(10)
    (10, 12, 5)
    """

    participation: float = 1.0
    over_selection: float = 0.0
    min_nodes: int = 2
    quorum: float = 0.5
    deadline: float = field(default=3600.0, init=False)

    def __post_init__(self) -> None:
        for name, (kind, least, largest, words) in _RANGES.items():
            value: Any = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= largest:
                raise InputError(f"`{name}` must be {words}, got {value!r}.")

    def with_deadline(self, timeout: float) -> Self:
        """Return the same policy with another deadline, in seconds."""
        if not isinstance(timeout, Real) or isinstance(timeout, bool) or not timeout > 0:
            raise InputError(f"`timeout` must be a number of seconds above 0, got {timeout!r}.")
        policy = copy(self)
        object.__setattr__(policy, "deadline", timeout)
        return policy

    def can_start(self, online: int) -> bool:
        """Whether a round can start with this many nodes online."""
        return online >= self.min_nodes

    def count_needed(self, online: int) -> int:
        """Return how many replies a round needs, as many as a simulation has clients in a round."""
        return max(1, round(self.participation * online))

    def count_asked(self, online: int) -> int:
        """Return how many nodes a round asks."""
        return min(online, math.ceil(self.count_needed(online) * (1 + self.over_selection)))

    def choose(self, nodes: Sequence[Node], seed: int, t: int) -> list[Node]:
        """Return the nodes that round t asks: drawn uniformly without replacement, as in a simulation."""
        order = permutation(key(seed, t, 0, Purpose.SAMPLE), len(nodes))
        return [nodes[i] for i in sorted(order[: self.count_asked(len(nodes))].tolist())]

    def has_enough(self, replies: int, needed: int) -> bool:
        """Whether a round with these replies ends before its deadline."""
        return replies >= needed

    def count_quorum(self, needed: int) -> int:
        """Return the fewest replies with which a round changes the model."""
        return math.ceil(self.quorum * needed)

    def has_quorum(self, replies: int, needed: int) -> bool:
        """Whether a round with these replies changes the model."""
        return replies >= self.count_quorum(needed)

    def explain_void(self, replies: int, needed: int) -> str:
        """Return why a round without a quorum changes nothing."""
        return f"{replies} of {needed} replies: less than the quorum"

    def classify_missing(self, *, is_online: bool, has_enough: bool) -> Missing:
        """Return what a missing reply counts as when the round has ended."""
        if not is_online:
            return Missing(LOST, "it is offline")
        if has_enough:
            return Missing(LATE, "it was not waited for")
        return Missing(LATE, f"no reply within {self.deadline:g} s")
