"""Plan: what a configuration and a task fix before a run, as pure functions of round and client."""

from __future__ import annotations

import math
from functools import lru_cache

from cfedavg.algorithm import Aggregator
from cfedavg.channel import Channel, Downlink, make_downlink
from cfedavg.compress import Compressor, parse
from cfedavg.control import ControlVariates
from cfedavg.core.config import PER_CLIENT, Config
from cfedavg.core.errors import InputError
from cfedavg.core.keys import Purpose, key, sample, uniform
from cfedavg.core.layout import Layout
from cfedavg.core.run_files import Record, finite
from cfedavg.feedback import FEEDBACKS, Feedback
from cfedavg.optimise import SERVER_OPTIMISERS, ServerOptimiser
from cfedavg.optimise.local import LocalOptimiser, parse_local_optimiser, step_lengths
from cfedavg.schedule import Rates, Steps, resolve_rates
from cfedavg.simulate.links import draw_speeds
from cfedavg.task import Task
from cfedavg.theory import rate_conditions


def parse_parts(config: Config) -> tuple[Compressor, Compressor, Feedback, LocalOptimiser, ServerOptimiser]:
    """Return the parts that `config` names: compressors up and down, feedback, local and server optimiser."""
    return (
        parse(config.compressor),
        parse(config.compressor_down, "compressor_down"),
        FEEDBACKS.parse(config.feedback),
        parse_local_optimiser(config.local_optimiser),
        SERVER_OPTIMISERS.parse(config.server_optimiser),
    )


class Plan:
    """The plan of a run, fixed before the run.

    For each round: its clients, the lost replies, the local steps K_i, the rates. For the whole run: the
    compressors, the feedback, the optimisers, and the clients' speeds.
    """

    def __init__(self, config: Config, task: Task) -> None:
        self.config = config
        self.samples = [len(data) for data in task.clients]
        self.m = len(self.samples)
        self.clients_per_round = max(1, round(config.participation * self.m))
        parts = parse_parts(config)
        self.compressor, self.compressor_down, self.feedback, self.local_optimiser, server = parts
        self.aggregator = Aggregator(self.feedback, server)
        self._sample = lru_cache(4)(self._draw_clients)  # engines ask for a round's clients more than once
        self._check()
        self._check_memories()
        self.link = draw_speeds(config, self.m)
        self.steps = Steps(config, self.samples, self.link.speed)
        self.rates: Rates = resolve_rates(config, self.steps, self.clients_per_round)
        self.everyone = sum(self.weight(i) for i in range(self.m))

    def _check(self) -> None:
        """Raise InputError if a per-client list has the wrong length."""
        for name in PER_CLIENT:
            values = self.config.per_client(name)
            if values is not None and values.each and len(values.each) != self.m:
                raise InputError(
                    f"`{name}` must have one value for each of {self.m} clients, got {len(values.each)}"
                )

    def _check_memories(self) -> None:
        """Raise InputError if parts do not fit what clients remember with them."""
        feedback, optimiser = self.feedback, self.local_optimiser
        if optimiser.needs_correction and not optimiser.sums_gradients:
            raise InputError(
                f"`local_optimiser` must end with sgd without momentum after scaffold, got {optimiser}: a "
                "client's control variate is the mean gradient that its local steps show"
            )
        mirror = f"the feedback {feedback}" if feedback.mirrors_clients else ""
        mirror = f"the local optimiser {optimiser}" if optimiser.needs_correction else mirror
        if mirror and self.config.residual_precision != "full":
            raise InputError(
                f"`residual_precision` must be full with {mirror}, got {self.config.residual_precision}: the "
                "server keeps the sum of the clients' memories, so no client may round its memory"
            )

    def channel(self, layout: Layout, doublings: int = 0) -> Channel:
        """Return the channel from the clients to the server, for vectors of this layout.

        `doublings` is how often the guard has doubled the number of coordinates.
        """
        return Channel(self.compressor.denser(2**doublings), self.feedback, layout)

    def downlink(self, layout: Layout) -> Downlink | None:
        """Return the channel from server to clients; None if the server broadcasts the whole model."""
        return make_downlink(self.compressor_down, layout)

    def control(self, layout: Layout) -> ControlVariates | None:
        """Return the control variates of vectors of this layout; None if the local optimiser uses none."""
        return ControlVariates(self.compressor, layout) if self.local_optimiser.needs_correction else None

    def in_words(self, layout: Layout) -> str:
        """Return a sentence that describes the run, with the rates that follow from options and defaults."""
        low, high = self.steps.bounds
        compressors = (self.compressor, self.compressor_down)
        up, down = (f"{each} (gamma {each.gamma(layout):.5g})" for each in compressors)
        sent = f"{up} both ways" if up == down else f"{up} up, {down} down"
        steps = f"{low}" if low == high else f"{low} to {high}"
        names = ("feedback", "local_optimiser", "server_optimiser")
        unusual = [name for name in names if getattr(self.config, name) != getattr(Config, name)]
        return (
            f"{self.clients_per_round} of {self.m} clients a round, {steps} local steps, "
            f"update {self.rates.update}, eta_local {self.rates.eta_local(0):.4g}, eta {self.rates.eta:.4g}; "
            f"{layout.d:,} parameters, {sent}"
            + "".join(f", {name.replace('_', ' ')} {getattr(self.config, name)}" for name in unusual)
        )

    @property
    def timed(self) -> bool:
        """Return whether the run simulates time."""
        return self.config.steps_per_second is not None or self.config.link is not None

    def sampled(self, t: int) -> list[int]:
        """Return the clients of round t in increasing order, drawn uniformly without replacement."""
        return list(self._sample(t))

    def _draw_clients(self, t: int) -> list[int]:
        word = key(self.config.seed, t, 0, Purpose.SAMPLE)
        return [int(i) for i in sample(word, self.clients_per_round, self.m)]

    def lost(self, t: int, client: int) -> bool:
        """Return whether the client's reply in round `t` is lost."""
        rate = self.config.drop_rate
        return bool(rate and uniform(key(self.config.seed, t, client, Purpose.LOSS), 1)[0] < rate)

    def divisor(self, t: int, K: int) -> float | None:
        """Return the number by which a client divides its update after K steps in round t; None: by none."""
        if self.rates.update == "sum":
            return None
        return float(K) if self.rates.update == "mean" else self._step_length(t, K)

    def _step_length(self, t: int, K: int) -> float:
        most = 1 << (K - 1).bit_length()  # so that few different tables are made
        return step_lengths(self.local_optimiser, self.rates.eta_local(t), most)[K - 1]

    def scale(self, t: int, clients: list[int]) -> float:
        """Return the factor of the mean update of round t, to which the replies of `clients` arrived.

        With FedNova it is the weighted mean of the numbers by which these clients divided their updates.
        """
        total = sum(self.weight(i) for i in clients)
        if self.rates.update != "fednova" or not total:
            return self.rates.scale
        return sum(self.weight(i) * self._step_length(t, self.steps.at(t, i)) for i in clients) / total

    def weight(self, client: int) -> float:
        """Return the client's weight in the average."""
        return float(self.samples[client]) if self.config.weighting == "samples" else 1.0

    def key(self, t: int, client: int, purpose: Purpose = Purpose.SELECT) -> int:
        """Return the random key with which the client compresses its update or c_i in round `t`."""
        return key(self.config.seed, t, client, purpose)

    def broadcast_key(self, t: int, purpose: Purpose = Purpose.BROADCAST) -> int:
        """Return the random key with which the server compresses x or c for the broadcast after round `t`."""
        return key(self.config.seed, t, 0, purpose)

    def keeps_iterate(self, t: int, eta_sum: float) -> bool:
        """Return whether reservoir sampling takes x_t as the random iterate z of Theorem 2.

        `eta_sum` is the sum of the local rates of rounds 0 to `t`.
        """
        draw = uniform(key(self.config.seed, t, 0, Purpose.ITERATE), 1)[0]
        return bool(draw * eta_sum < self.rates.eta_local(t))

    def rate_conditions(self, t: int, row: Record) -> Record:
        """Return, for each rate condition of the theory, whether it holds, and the ratio value / limit.

        gamma and alpha (see `theory`) are those that `row` has measured in round `t`.
        """
        assert self.config.smoothness is not None
        gamma, alpha = or_infinite(row["snr_min"]), or_infinite(row["alpha"]) if row["delta_norm2"] else 1.0
        rates, K, L = self.rates, self.steps.bounds[1], self.config.smoothness
        conditions = rate_conditions(rates.eta_local(t), rates.eta, K, L, gamma, alpha, rates.update)
        return {c.text: {"holds": c.holds, "ratio": finite(c.value / c.limit)} for c in conditions}


def broken_conditions(rows: list[Record]) -> list[str]:
    """Return a sentence for each rate condition that did not hold in some round."""
    sentences = []
    measured = [row for row in rows if "rate_conditions" in row]
    for text in measured[0]["rate_conditions"] if measured else ():
        ratios = [or_infinite(row["rate_conditions"][text]["ratio"]) for row in measured]
        broken = sum(not row["rate_conditions"][text]["holds"] for row in measured)
        if broken:
            worst = measured[ratios.index(max(ratios))]
            sentences.append(
                f"rate condition {text} is broken in {broken} of {len(measured)} rounds; most in round "
                f"{worst['round'] + 1}, {max(ratios):.3g} times the limit "
                f"(measured gamma {or_infinite(worst['snr_min']):.4g}, "
                f"alpha {or_infinite(worst['alpha']):.4g})"
            )
    return sentences


def or_infinite(value: float | None) -> float:
    """Return the value, or infinity for None: the metrics write infinity as null."""
    return math.inf if value is None else value
