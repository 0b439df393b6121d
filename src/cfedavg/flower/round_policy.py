"""The policy of a round: which nodes it asks, when it ends, and how large an update and a claim may be.

It knows numbers only: it needs neither Flower nor a network.

Where nobody sets a bound, an update may have 100 times the median norm of the last updates in the model. This
is no defence against clients who conspire, but one that sends 1e20 must not ruin a model. Honest clients
differ less: by their local steps, their data, and what their residuals have gathered. A client above the
bound is told the bound, and sends the rest later, so nobody is locked out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from statistics import median, median_low
from typing import Any, NamedTuple, Self, TypeVar

from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, key, permutation

LATE, LOST = "late", "lost"
Node = TypeVar("Node")
MULTIPLE = 100.0
ENOUGH = 3  # norms: of fewer, the median may be the one that is wrong
WINDOW = 100  # updates that are remembered: a client that is alone for a while cannot raise the bound
LARGEST_NORM = 1e15  # in any case: its square, which Adam and the like take, is far from float32's end

# Of each field: its kind, its least and its largest value, and both in words.
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


def bound_norm(norms: Sequence[float]) -> float:
    """Return the largest norm that is taken after updates of these norms.

    >>> bound_norm([1.0, 2.0, 1e20])
    200.0
    """
    return min(LARGEST_NORM, MULTIPLE * median(norms)) if len(norms) >= ENOUGH else LARGEST_NORM


def keep_last(new: Iterable[float], before: Sequence[float]) -> list[float]:
    """Return the last norms, or claims, all of a round at least; a zero says nothing."""
    kept = [norm for norm in new if norm > 0]
    return [*kept, *before][: max(WINDOW, len(kept))]


def cap_claims(claims: Sequence[float], before: Sequence[float]) -> list[float]:
    """Return what clients claim (local steps, examples), each at most MULTIPLE times the median.

    The median is over these claims and those before, the lower one of two: a single client's claim, however
    large, is no measure of itself.

    >>> cap_claims([10.0, 2.0**53], [])
    [10.0, 1000.0]
    """
    known = [claim for claim in [*claims, *before] if claim > 0]
    most = MULTIPLE * median_low(known) if known else 0.0
    return [min(claim, most) for claim in claims]


@dataclass(frozen=True)
class Claims:
    """What clients say of their work: local steps and examples; 0 for what a client does not say."""

    steps: Sequence[float] = ()
    samples: Sequence[float] = ()

    def cap(self, before: Claims) -> Claims:
        """Return these claims, capped by the medians of them and of those before."""
        return Claims(cap_claims(self.steps, before.steps), cap_claims(self.samples, before.samples))

    def join(self, before: Claims) -> Claims:
        """Return the last claims: these, and then those before."""
        return Claims(keep_last(self.steps, before.steps), keep_last(self.samples, before.samples))
