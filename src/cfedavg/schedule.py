"""Schedules: eta_L at round t, eta, and K_i of each client and round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cfedavg.core.config import Config
from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, key, uniform
from cfedavg.core.option import Range
from cfedavg.core.parts import build, check_argument
from cfedavg.optimise.server import SERVER_OPTIMISERS, ServerSGD


@dataclass(frozen=True)
class Setting:
    """What a schedule may use: the user's eta_L, T, K, K_min, clients a round, L.

    K is None where clients differ. K_min, the least K_i, is None where it is not known beforehand.
    """

    eta_local: float
    T: int
    K: int | None
    K_min: int | None
    m: int
    L: float | None


class Schedule:
    """The rates of a run. A new one needs `eta_local`."""

    update: str | None = None  # the value of `update` that the rates are stated for

    def eta_local(self, t: int, s: Setting) -> float:
        """Return eta_L at round t."""
        raise NotImplementedError

    def eta(self, s: Setting) -> float | None:
        """Return the global rate that goes with eta_L, if any."""
        return None


@dataclass(frozen=True)
class Constant(Schedule):
    """eta_L at every round."""

    def eta_local(self, t: int, s: Setting) -> float:
        return s.eta_local


@dataclass(frozen=True)
class Decaying(Schedule):
    """eta_L / sqrt(1 + t/a)."""

    a: float = 1.0

    def __post_init__(self) -> None:
        _check_offset(self.a)

    def eta_local(self, t: int, s: Setting) -> float:
        return s.eta_local / math.sqrt(1 + t / self.a)


@dataclass(frozen=True)
class Corollary1(Schedule):
    """eta_L = 1/(sqrt(T) K L), eta = sqrt(K m): linear speedup with a constant rate."""

    update = "sum"

    def eta_local(self, t: int, s: Setting) -> float:
        return 1 / (math.sqrt(s.T) * _equal_K(s, self) * _smoothness(s, self))

    def eta(self, s: Setting) -> float | None:
        return math.sqrt(_equal_K(s, self) * s.m)


@dataclass(frozen=True)
class Corollary2(Corollary1):
    """eta_L = 1/(sqrt(t + a) K L), eta = sqrt(K m): anytime, T need not be known."""

    a: float = 1.0

    def __post_init__(self) -> None:
        _check_offset(self.a)

    def eta_local(self, t: int, s: Setting) -> float:
        return 1 / (math.sqrt(t + self.a) * _equal_K(s, self) * _smoothness(s, self))


@dataclass(frozen=True)
class Corollary3(Schedule):
    """eta_L = 1/(sqrt(T) L), eta = sqrt(K_min m): clients do different K_i, and K_min is the least.

    K_min comes from the plan; k_min gives it where the plan does not know it, or sets a lower one.
    """

    update = "mean"
    k_min: int | None = None

    def __post_init__(self) -> None:
        if self.k_min is not None:
            check_argument("k_min", self.k_min, "of 1 or more", lambda k_min: k_min >= 1, whole=True)

    def eta_local(self, t: int, s: Setting) -> float:
        return 1 / (math.sqrt(s.T) * _smoothness(s, self))

    def eta(self, s: Setting) -> float | None:
        k_min = self.k_min or s.K_min
        if k_min is None:
            raise InputError(
                "`schedule` corollary3 must name the least number of local steps of a client, as in "
                "corollary3(k_min=5): with `deadline` and no `steps_per_second` it is not known"
            )
        if s.K_min is not None and k_min > s.K_min:
            raise InputError(
                f"`schedule` corollary3: k_min must be at most {s.K_min}, the least number of local steps "
                f"of a client, got {k_min}"
            )
        return math.sqrt(k_min * s.m)


_ALL = (Constant, Decaying, Corollary1, Corollary2, Corollary3)
SCHEDULES: dict[str, Any] = {each.__name__.lower(): each for each in _ALL}


def build_schedule(text: str) -> Schedule:
    """Return the schedule that the text of a configuration names."""
    made: Schedule = build(text, SCHEDULES, Schedule, "schedule", trust=True)
    return made


def _check_offset(a: float) -> None:
    check_argument("a", a, "a finite number above 0", lambda a: 0 < a < math.inf)


def _smoothness(s: Setting, schedule: Schedule) -> float:
    if s.L is None:
        raise InputError(f"`schedule` {type(schedule).__name__.lower()} needs `smoothness`, the constant L")
    return s.L


def _equal_K(s: Setting, schedule: Schedule) -> int:
    if s.K is None:
        raise InputError(
            f"`schedule` {type(schedule).__name__.lower()} needs the same K for all clients; "
            "for different ones use corollary3"
        )
    return s.K


UNKNOWN = 2**53  # K of a real client with a deadline, whose speed is not known beforehand


class Steps:
    """K_i for each client and round: fixed, drawn from a range, one per client, by epochs or by a deadline.

    `samples` are the sizes of the clients' data sets; `speed[i]` is in steps per second.
    """

    def __init__(self, config: Config, samples: list[int], speed: list[float]) -> None:
        self._seed = config.seed
        self._range: Range | None = config.per_client("local_steps")
        self._fixed: list[int] = []
        if config.local_epochs is not None:
            per_epoch = [math.ceil(n / config.batch_size) for n in samples]
            self._fixed = [config.local_epochs * steps for steps in per_epoch]
        elif config.deadline is not None:
            # A hair more, since 0.29 s at 100 steps a second is 28.999999999999996 in floating point.
            self._fixed = [math.floor(min(config.deadline * s * (1 + 1e-12), UNKNOWN)) for s in speed]
        elif self._range is not None and self._range.each:
            self._fixed = [int(k) for k in self._range.each]

    def at(self, t: int, client: int) -> int:
        """Return K_i of a client in round t."""
        if self._fixed:
            return self._fixed[client]
        assert self._range is not None
        u = float(uniform(key(self._seed, t, client, Purpose.STEPS), 1)[0])
        return int(self._range.at(client, u))

    @property
    def equal(self) -> int | None:
        """K, where all clients do the same number of steps by construction; else None."""
        low, high = self.bounds
        return low if low == high < UNKNOWN else None

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest K_i that there can be."""
        if self._fixed:
            return min(self._fixed), max(self._fixed)
        assert self._range is not None
        return int(self._range.low), int(self._range.high)

    @property
    def least(self) -> int | None:
        """The least K_i of the clients that do any steps; None if it is not known beforehand."""
        low = min((K for K in self._fixed if K > 0), default=self.bounds[0])
        return low if low < UNKNOWN else None

    @property
    def mean(self) -> float:
        """The mean K of the clients that do any steps."""
        if self._fixed:
            busy = [K for K in self._fixed if K > 0]
            return sum(busy) / len(busy)
        assert self._range is not None
        return self._range.mean()


@dataclass(frozen=True)
class Rates:
    """The schedule, the update and the global rate of a configuration.

    The mean update is multiplied by `scale` before the server optimiser sees it.
    """

    schedule: Schedule
    setting: Setting
    update: str
    eta: float
    scale: float = 1.0

    def eta_local(self, t: int) -> float:
        """Return eta_L at round t."""
        return self.schedule.eta_local(t, self.setting)


def resolve_rates(config: Config, steps: Steps, clients_per_round: int) -> Rates:
    """Return the rates: line 10 where all K are equal, else line 11, whose eta undoes the division by K."""
    optimiser = SERVER_OPTIMISERS.parse(config.server_optimiser)
    schedule = build_schedule(config.schedule)
    if steps.bounds[1] == 0:
        raise InputError("`deadline` leaves no client time for one step: make it longer")
    setting = Setting(
        config.eta_local, config.rounds, steps.equal, steps.least, clients_per_round, config.smoothness
    )
    update = config.update
    if update == "auto":
        update = schedule.update or ("sum" if steps.equal is not None else "mean")
    if schedule.update not in (None, update):
        raise InputError(
            f"`update` must be {schedule.update}, for which `schedule` {config.schedule} states its rates, "
            f"got {update}"
        )
    schedule.eta_local(0, setting)  # says at once what a corollary is missing
    if schedule.eta(setting) and not isinstance(optimiser, ServerSGD):
        raise InputError(
            f"`server_optimiser` must be sgd with `schedule` {config.schedule}, which sets its rate, "
            f"got {optimiser}"
        )
    K = 1.0 if update == "sum" else steps.mean
    eta = config.eta or schedule.eta(setting) or optimiser.default_rate(K)
    return Rates(schedule, setting, update, eta, optimiser.scale(K))
