"""Schedules: the local rate eta_L of each round, the global rate eta, and each client's local steps K_i."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, key, uniform
from cfedavg.core.parts import Part, Range, Registry, argument
from cfedavg.optimise.server import SERVER_OPTIMISERS, ServerSGD

Fact = TypeVar("Fact")
UNKNOWN = 2**53  # stands for the local steps of a real client with a deadline: its speed is not known yet
_above_0 = partial(argument, "a finite number above 0", lambda number: 0 < number < math.inf)


@dataclass(frozen=True)
class Setting:
    """What a schedule may use: the option `eta_local`, T rounds, m clients a round, K, K_min and L.

    K is the number of local steps of every client; None if clients differ. K_min is the smallest number of
    local steps of any client; None if it is not known before the run. L is the smoothness constant; None if
    it is not given.
    """

    eta_local: float
    T: int
    K: int | None
    K_min: int | None
    m: int
    L: float | None


class Schedule(Part):
    """The base class of schedules. A subclass must define `eta_local`."""

    chosen_by: ClassVar[tuple[str, ...]] = ("schedule",)
    update: ClassVar[str | None] = None  # the value of the option `update` that the schedule's rates assume

    def eta_local(self, t: int, s: Setting) -> float:
        """Return eta_L, the local rate, in round t."""
        raise NotImplementedError

    def eta(self, s: Setting) -> float | None:
        """Return eta, the server's rate, if the schedule sets it, else None."""
        return None

    def _need(self, fact: Fact | None, what: str) -> Fact:
        if fact is None:
            raise InputError(f"`schedule` {self} needs {what}")
        return fact

    def _L(self, s: Setting) -> float:
        return self._need(s.L, "`smoothness`, the constant L; set it")


@dataclass(frozen=True)
class Constant(Schedule):
    """The same local rate eta_L in every round."""

    name: ClassVar[str] = "constant"

    def eta_local(self, t: int, s: Setting) -> float:
        return s.eta_local


@dataclass(frozen=True)
class Decaying(Schedule):
    """A local rate that falls with the round t: the option `eta_local` / sqrt(1 + t/a)."""

    name: ClassVar[str] = "decaying"
    a: float = _above_0(1.0)

    def eta_local(self, t: int, s: Setting) -> float:
        return s.eta_local / math.sqrt(1 + t / self.a)


@dataclass(frozen=True)
class Corollary1(Schedule):
    """The rates of Corollary 1, equal in all T rounds: eta_L = 1/(sqrt(T) K L), eta = sqrt(K m).

    Every client does K local steps, m clients take part in a round, and L is the smoothness constant.
    """

    name: ClassVar[str] = "corollary1"
    update: ClassVar[str | None] = "sum"

    def _K(self, s: Setting) -> int:
        words = "the same number of local steps for all clients; if clients differ, use corollary3"
        return self._need(s.K, words)

    def eta_local(self, t: int, s: Setting) -> float:
        return 1 / (math.sqrt(s.T) * self._K(s) * self._L(s))

    def eta(self, s: Setting) -> float | None:
        return math.sqrt(self._K(s) * s.m)


@dataclass(frozen=True)
class Corollary2(Corollary1):
    """The rates of Corollary 2, which fall with round t: eta_L = 1/(sqrt(t + a) K L), eta = sqrt(K m).

    They do not depend on the number of rounds. K, m and L are as in Corollary 1.
    """

    name: ClassVar[str] = "corollary2"
    a: float = _above_0(1.0)

    def eta_local(self, t: int, s: Setting) -> float:
        return 1 / (math.sqrt(t + self.a) * self._K(s) * self._L(s))


@dataclass(frozen=True)
class Corollary3(Schedule):
    """The rates of Corollary 3 for clients that differ in K_i: eta_L = 1/(sqrt(T) L), eta = sqrt(K_min m).

    Client i does K_i local steps, and K_min is the smallest K_i. The argument `k_min` replaces K_min. It is
    needed if K_min is not known before the run, and must be at most K_min. T, m and L are as in Corollary 1.
    """

    name: ClassVar[str] = "corollary3"
    update: ClassVar[str | None] = "mean"
    k_min: int | None = argument("of 1 or more", lambda k_min: k_min >= 1, None, integer=True)

    def eta_local(self, t: int, s: Setting) -> float:
        return 1 / (math.sqrt(s.T) * self._L(s))

    def eta(self, s: Setting) -> float | None:
        k_min = self.k_min or s.K_min
        if k_min is None:
            raise InputError(
                "`schedule` corollary3 needs k_min, the smallest number of local steps of a client, since a "
                "`deadline` without `steps_per_second` does not tell it; write, for example, "
                "corollary3(k_min=5)"
            )
        if s.K_min is not None and k_min > s.K_min:
            raise InputError(
                f"`schedule` corollary3: k_min must be at most {s.K_min}, the smallest number of local steps "
                f"of a client, got {k_min}"
            )
        return math.sqrt(k_min * s.m)


_ALL = (Constant, Decaying, Corollary1, Corollary2, Corollary3)
SCHEDULES: Registry[Schedule] = Registry("schedule", Schedule, {each.name: each for each in _ALL})


class Steps:
    """The number of local steps K_i of each client i in each round, as the configuration says.

    K_i is the same for all, given per client, drawn from a range in each round, or it follows from epochs or
    from a deadline. `samples[i]` is the size of client i's data set, `speed[i]` its local steps per second.
    """

    def __init__(self, config: Config, samples: list[int], speed: list[float]) -> None:
        self._seed = config.seed
        if config.local_epochs is not None:
            each = [config.local_epochs * math.ceil(n / config.batch_size) for n in samples]
        elif config.deadline is not None:
            # The factor makes up for rounding: 0.29 s at 100 steps a second is 28.999999999999996 steps.
            each = [math.floor(min(config.deadline * s * (1 + 1e-12), UNKNOWN)) for s in speed]
        else:
            each = []
        given = Range(min(each), max(each), tuple(each)) if each else config.per_client("local_steps")
        assert given is not None  # Config sees to it that one of the three options is given
        self._range: Range = given

    def at(self, t: int, client: int) -> int:
        """Return the number of local steps that a client does in round t."""
        drawn = 0.0 if self._range.each else uniform(key(self._seed, t, client, Purpose.STEPS), 1)[0]
        return int(self._range.at(client, float(drawn)))

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of local steps that any client can do in any round."""
        return int(self._range.low), int(self._range.high)

    @property
    def equal(self) -> int | None:
        """The number of local steps if all clients do the same number in every round, else None."""
        low, high = self.bounds
        return low if low == high < UNKNOWN else None

    @property
    def _busy(self) -> list[int]:
        """The clients' numbers of local steps, without zeros; empty if they are not fixed per client."""
        return [int(K) for K in self._range.each if K > 0]

    @property
    def least(self) -> int | None:
        """The smallest number of local steps of a client, zeros aside; None if not known before the run."""
        low = min(self._busy, default=self.bounds[0])
        return low if low < UNKNOWN else None

    @property
    def mean(self) -> float:
        """The mean number of local steps of a client, over the clients that do at least one step."""
        busy = self._busy
        return sum(busy) / len(busy) if busy else self._range.mean()


@dataclass(frozen=True)
class Rates:
    """The learning rates of a run: a schedule of local rates with its setting, and the server's rate eta.

    `update` is "sum" or "mean", line 10 or 11 of Algorithm 1, or "fednova". The server multiplies the mean
    update by `scale` before the step of its optimiser.
    """

    schedule: Schedule
    setting: Setting
    update: str
    eta: float
    scale: float = 1.0

    def eta_local(self, t: int) -> float:
        """Return eta_L, the local rate, in round t."""
        return self.schedule.eta_local(t, self.setting)


def resolve_rates(config: Config, steps: Steps, clients_per_round: int) -> Rates:
    """Return the learning rates of a run; raise InputError if options contradict each other.

    If the option `update` is auto, the schedule decides. If the schedule allows both, `update` becomes sum
    (line 10) if all clients do equally many local steps, else mean (line 11). With mean, clients divide their
    updates by their local steps; the default eta, or `scale`, makes up for this.
    """
    optimiser = SERVER_OPTIMISERS.parse(config.server_optimiser)
    schedule = SCHEDULES.parse(config.schedule)
    if steps.bounds[1] == 0:
        raise InputError("`deadline` must give at least one client time for one local step; make it longer")
    setting = Setting(
        config.eta_local, config.rounds, steps.equal, steps.least, clients_per_round, config.smoothness
    )
    update = config.update
    if update == "auto":
        update = schedule.update or ("sum" if steps.equal is not None else "mean")
    if schedule.update not in (None, update):
        raise InputError(
            f"`update` must be {schedule.update}, since `schedule` {config.schedule} assumes it, got {update}"
        )
    schedule.eta_local(0, setting)  # raises now if the schedule needs an option that is not given
    if schedule.eta(setting) and not isinstance(optimiser, ServerSGD):
        raise InputError(
            f"`server_optimiser` must be sgd, since `schedule` {config.schedule} sets the rate of sgd, "
            f"got {optimiser}"
        )
    if update == "fednova" and config.smoothness is not None:
        raise InputError(
            "`smoothness` must not be given with `update` fednova: the paper's rate conditions are for the "
            "updates sum and mean"
        )
    K = steps.mean if update == "mean" else 1.0
    eta = config.eta or schedule.eta(setting) or optimiser.default_rate(K)
    return Rates(schedule, setting, update, eta, optimiser.scale(K))
