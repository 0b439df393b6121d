"""The options of a server: the rules for a strategy's options, the policy of a round, and default bounds.

This module needs neither Flower nor a network.

If the user sets no bound, an update's norm may be at most 100 times the median norm of the updates that were
aggregated last. The bound does not stop clients who conspire, but one client that sends 1e20 cannot ruin a
model. Honest clients differ in local steps, data and residuals, but their norms differ by a factor below 100.
The server tells every client the bound. A client with a larger update sends a part of it, and the rest in
later rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from statistics import median, median_low
from typing import Any, NamedTuple, Self, TypeVar

from cfedavg.compress import Compressor, parse
from cfedavg.core.config import Config
from cfedavg.core.errors import InputError, show
from cfedavg.core.keys import Purpose, key, permutation
from cfedavg.core.names import QUOTE, NamedArguments, advise, find_name
from cfedavg.feedback import FEEDBACKS, Feedback
from cfedavg.optimise import SERVER_OPTIMISERS, ServerOptimiser

LATE, LOST = "late", "lost"
Node = TypeVar("Node")
Rate = float | Callable[[int], float]  # a number, or a function of the round
MULTIPLE = 100.0
ENOUGH = 3  # the fewest norms for a bound: a median of fewer norms may be that of a bad client
WINDOW = 100  # the number of norms kept, so that a client alone in some rounds cannot raise the bound
LARGEST_NORM = 1e15  # the largest bound: its square, which Adam computes, is far below float32's maximum

# For each field of a policy: its type, its smallest and its largest value, and the range in words.
_RANGES: dict[str, tuple[Any, float, float, str]] = {
    "participation": (Real, math.ulp(0.0), 1.0, "above 0 and at most 1"),
    "over_selection": (Real, 0.0, 1000.0, "from 0 to 1000"),
    "min_nodes": (Integral, 1.0, 2.0**63, "an integer of at least 1"),
    "quorum": (Real, 0.0, 1.0, "from 0 to 1"),
}
_SAMPLING = ("participation", "over_selection", "min_nodes")  # the fields of a policy that choose nodes


class Missing(NamedTuple):
    """Why a reply is missing: the cause, which is LATE or LOST, and the reason in words."""

    cause: str
    why: str


@dataclass(frozen=True)
class RoundPolicy(NamedArguments):
    """The rules of a round: which nodes it asks, when it ends, and whether it changes the model.

    `participation`: the share of the online nodes whose replies a round needs. `over_selection`: the share
    of additional nodes that the round asks (0.2: a fifth more). The round ends when it has the replies it
    needs. `min_nodes`: a round starts when this many nodes are online. `quorum`: the smallest share of the
    needed replies with which a round changes the model. With fewer replies, the round changes nothing, and
    the clients send their updates again later.

    `deadline`: the most seconds that a round waits, first for nodes and then for replies. It is the
    `timeout` of `CFedAvg.start`.

    To change a decision, override its method in a subclass.

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
        """Return a copy of this policy with the deadline `timeout`, in seconds."""
        if not isinstance(timeout, Real) or isinstance(timeout, bool) or not timeout > 0:
            raise InputError(f"`timeout` must be a number of seconds above 0, got {timeout!r}.")
        policy = copy(self)
        object.__setattr__(policy, "deadline", timeout)
        return policy

    def can_start(self, online: int) -> bool:
        """Return whether a round can start with this many nodes online."""
        return online >= self.min_nodes

    def count_needed(self, online: int) -> int:
        """Return how many replies a round needs: `participation` times the online nodes, at least 1."""
        return max(1, round(self.participation * online))

    def count_asked(self, online: int) -> int:
        """Return how many nodes a round asks: those it needs, plus the share `over_selection`."""
        return min(online, math.ceil(self.count_needed(online) * (1 + self.over_selection)))

    def choose(self, nodes: Sequence[Node], seed: int, t: int) -> list[Node]:
        """Return the nodes that round t asks: drawn uniformly without replacement, as in a simulation."""
        order = permutation(key(seed, t, 0, Purpose.SAMPLE), len(nodes))
        return [nodes[i] for i in sorted(order[: self.count_asked(len(nodes))].tolist())]

    def has_enough(self, replies: int, needed: int) -> bool:
        """Return whether a round with this many replies ends at once, before its deadline."""
        return replies >= needed

    def count_quorum(self, needed: int) -> int:
        """Return the fewest replies with which a round changes the model."""
        return math.ceil(self.quorum * needed)

    def has_quorum(self, replies: int, needed: int) -> bool:
        """Return whether a round with this many replies changes the model."""
        return replies >= self.count_quorum(needed)

    def explain_void(self, replies: int, needed: int) -> str:
        """Return why a round without a quorum changes nothing."""
        return f"{replies} of {needed} replies: less than the quorum"

    def classify_missing(self, *, is_online: bool, has_enough: bool) -> Missing:
        """Return why a node has not replied when the round ends."""
        if not is_online:
            return Missing(LOST, "it is offline")
        if has_enough:
            return Missing(LATE, "it was not waited for")
        return Missing(LATE, f"no reply within {self.deadline:g} s")


def bound_norm(norms: Sequence[float]) -> float:
    """Return the largest norm that a new update may have, from the `norms` of earlier updates.

    >>> bound_norm([1.0, 2.0, 1e20])
    200.0
    """
    return min(LARGEST_NORM, MULTIPLE * median(norms)) if len(norms) >= ENOUGH else LARGEST_NORM


def keep_last(new: Iterable[float], before: Sequence[float]) -> list[float]:
    """Return the numbers to remember: all above 0 in `new`, then those in `before`, up to WINDOW in all.

    The numbers are norms of updates, or clients' claims. Newer numbers stand first.
    """
    kept = [norm for norm in new if norm > 0]
    return [*kept, *before][: max(WINDOW, len(kept))]


def cap_claims(claims: Sequence[float], before: Sequence[float]) -> list[float]:
    """Return the clients' claims (local steps or examples), each capped at MULTIPLE times the median.

    The median is the lower median of these claims and the claims `before`, from earlier rounds. So one of two
    clients cannot raise its own cap by a large claim.

    >>> cap_claims([10.0, 2.0**53], [])
    [10.0, 1000.0]
    """
    known = [claim for claim in [*claims, *before] if claim > 0]
    most = MULTIPLE * median_low(known) if known else 0.0
    return [min(claim, most) for claim in claims]


@dataclass(frozen=True)
class Claims:
    """The numbers of local steps and of examples that clients claim; 0 if a client reports no number."""

    steps: Sequence[float] = ()
    samples: Sequence[float] = ()

    def cap(self, before: Claims) -> Claims:
        """Return these claims, each capped by `cap_claims`; `before`: the claims of earlier rounds."""
        return Claims(cap_claims(self.steps, before.steps), cap_claims(self.samples, before.samples))

    def join(self, before: Claims) -> Claims:
        """Return the claims to remember: these, then claims of earlier rounds, as `keep_last` does."""
        return Claims(keep_last(self.steps, before.steps), keep_last(self.samples, before.samples))


@dataclass(frozen=True)
class Parts:
    """The options that select the variant of Algorithm 1. A request tells a client those that it needs."""

    compressor: Compressor
    compressor_down: Compressor
    feedback: Feedback
    server_optimiser: ServerOptimiser
    update: str  # "sum" or "mean", line 10 or line 11 of Algorithm 1, or "fednova"
    seed: int  # of all random draws

    @classmethod
    def of(cls, config: Config) -> Parts:
        """Return the parts that the texts of a configuration name."""
        return cls(
            parse(config.compressor),
            parse(config.compressor_down, "compressor_down"),
            FEEDBACKS.parse(config.feedback),
            SERVER_OPTIMISERS.parse(config.server_optimiser),
            config.update,
            config.seed,
        )


def _check_rules(rules: Mapping[str, bool]) -> None:
    """Raise InputError with the first key of `rules`, which is an error sentence, whose value is false."""
    for sentence, holds in rules.items():
        if not holds:
            raise InputError(sentence)


def check_values(
    policy: RoundPolicy, max_norm: float | None, eta: Rate | None, uncompressed: Sequence[str]
) -> None:
    """Raise InputError if one of these options, which `Config` does not check, has a wrong value."""
    is_norm = max_norm is None or (_is_real(max_norm) and max_norm > 0)
    is_rate = eta is None or callable(eta) or (_is_real(eta) and 0 < eta <= 1e300)
    are_texts = isinstance(uncompressed, list | tuple) and all(isinstance(each, str) for each in uncompressed)
    _check_rules({
        f"`policy` must be a RoundPolicy, got {show(policy)}": isinstance(policy, RoundPolicy),
        f"`max_norm` must be a number above 0, which may be infinite, got {show(max_norm)}": is_norm,
        f"`eta` must be a number above 0, or a function of the round, got {show(eta)}": is_rate,
        f"`uncompressed` must be a list of patterns, such as ['bn.*'], got {show(uncompressed)}": are_texts,
    })  # fmt: skip


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_names(given: Iterable[str], known: Sequence[str]) -> None:
    """Raise InputError if an argument of CFedAvg is not in `known`; say where it belongs."""
    for name in given:
        if name in known:
            continue
        if field := find_name(name, list(_RANGES), near=False):
            raise InputError(f"CFedAvg has no argument {name!r}; write policy=RoundPolicy({field}=...)")
        raise InputError(f"CFedAvg has no argument {name!r}; {advise(name, known, QUOTE)}")


def choose_rate(eta: Rate, t: int) -> float:
    """Return the global rate of round t; raise InputError if the user's function returns no such number."""
    rate: Any = eta(t) if callable(eta) else eta
    if not (_is_real(rate) and 0 <= rate <= 1e300):
        raise InputError(f"`eta` must return a finite number of 0 or more, got {show(rate)} in round {t}")
    return float(rate)  # of NumPy's numbers, some would make x float64


def check_start(*, resume: bool, from_backup: bool, out: str | Path | None) -> None:
    """Raise InputError if `resume`, `from_backup` or `out` is wrong."""
    has_out = out is not None
    _check_rules({
        f"`out` must be the path of a folder, got {show(out)}": isinstance(out, str | Path | None),
        f"`resume` must be true or false, got {show(resume)}": isinstance(resume, bool),
        f"`from_backup` must be true or false, got {show(from_backup)}": isinstance(from_backup, bool),
        "`resume` needs `out`, the folder of the federation to continue": has_out or not resume,
        "`from_backup` continues a federation, so it needs `resume`": resume or not from_backup,
    })  # fmt: skip


def check_parts(
    parts: Parts, policy: RoundPolicy, eta: Rate | None, weighting: str, *, wraps: bool, from_backup: bool
) -> None:
    """Raise InputError for options that do not fit together.

    `wraps`: whether CFedAvg wraps a strategy. `from_backup`: whether the server continues from a backup.
    """
    feedback, optimiser = parts.feedback, str(parts.server_optimiser)
    usual = {"eta": eta is None, "weighting": weighting == "uniform", "server_optimiser": optimiser == "sgd"}
    odd = " and ".join(f"`{name}`" for name, is_usual in usual.items() if not is_usual)
    samples = any(getattr(policy, name) != getattr(RoundPolicy, name) for name in _SAMPLING)
    _check_rules({
        "`update` must be 'sum', or 'mean' or 'fednova' if clients report local-steps, got 'auto'":
            parts.update != "auto",
        f"{odd} must not be given when CFedAvg wraps a strategy, which averages and steps itself. "
        "Remove the options or the strategy.": not (wraps and odd),
        "`participation`, `over_selection` and `min_nodes` of the policy have no effect when CFedAvg wraps a "
        "strategy, which samples the nodes itself. Remove these fields.": not (wraps and samples),
        f"`update` must be 'sum' when CFedAvg wraps a strategy, got {parts.update!r}":
            not wraps or parts.update == "sum",
        f"`feedback` must not broadcast a vector beside the model in a federation, got {feedback}. "
        "Use ef, sapef, ef21 or none.": not feedback.broadcasts,
        f"`feedback` must keep no memory on the server when CFedAvg wraps a strategy, got {feedback}. "
        "Use ef or none.": not (wraps and feedback.keeps_server_memory),
        f"`from_backup` must not be given with the feedback {feedback}: the clients remember updates that "
        "the backup lacks. Start another federation from the backup's model.":
            not (from_backup and feedback.mirrors_clients),
        f"`weighting` must be uniform with the feedback {feedback}, got {weighting}: the server's sum of all "
        "clients' updates needs the same weight for a client in every round.":
            weighting == "uniform" or not feedback.mirrors_clients,
    })  # fmt: skip
