"""CFedAvg as a Flower strategy: Algorithm 1, or compression around another strategy."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from logging import INFO, WARNING
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from cfedavg.algorithm import Aggregator, ServerMemory
from cfedavg.compress import parse
from cfedavg.core.config import APP, Config
from cfedavg.core.errors import InputError
from cfedavg.feedback import FEEDBACKS
from cfedavg.flower.array_layout import STATISTICS, Form
from cfedavg.flower.averaging import LARGEST, Averaging, EvaluateFunction, OwnAverage, Rate, WrappedAverage
from cfedavg.flower.dispatch import Channels
from cfedavg.flower.federation_folder import FederationFolder
from cfedavg.flower.federation_state import FixedOptions
from cfedavg.flower.round_policy import RoundPolicy
from cfedavg.flower.session import Session
from cfedavg.flower.strategy_state import name_strategy
from cfedavg.optimise.server import SERVER_OPTIMISERS

_SAMPLING = ("participation", "over_selection", "min_nodes")  # the fields of a policy that choose nodes

# Fields that Config does not check: the largest value, and the rule in words. All values are above 0.
_BOUNDS = {
    "max_norm": (math.inf, "a number above 0, which may be infinite"),
    "eta": (1e300, "a number above 0, or a function of the round"),
}


class CFedAvg(Strategy):
    """Federated averaging of compressed updates, with error feedback that survives faults.

    `inner`: a strategy of Flower's or your own, which samples nodes and aggregates as usual. If `inner` is
    None, CFedAvg averages with `weighting` "uniform" or "samples", and `server_optimiser` steps with the
    global rate `eta`: a number, or a function of the round (from 0). The default is the optimiser's own rate.

    `compressor`, `compressor_down`, `feedback`, `update`, `server_optimiser`, `seed`: as in a simulation. The
    server tells the clients what they need, so the mod needs no options. `whole`: patterns for the names of
    arrays that are not compressed. With a `compressor_down`, every client keeps a model copy. The clients
    train from this copy, and `evaluate_fn` and the result get the same copy. `inner` gets the server's model.

    `policy`: which nodes a round asks, when it ends and which quorum it needs; see `RoundPolicy`. If `inner`
    is given, only the policy's quorum and deadline have an effect, because `inner` samples the nodes.

    `max_norm`: the largest norm of a payload; a client sends the rest later. The default is 100 times the
    median norm of the last 100 payloads in the model. math.inf means no bound.

    `out`: the folder for metrics and state. `resume`: continue the federation in `out`. `from_backup`: `out`
    is an older copy of the folder, and the clients have seen later rounds.
    """

    def __init__(
        self,
        inner: Strategy | None = None,
        *,
        compressor: str = Config.compressor,
        compressor_down: str = Config.compressor_down,
        feedback: str = "ef",
        update: str = "sum",
        server_optimiser: str = "sgd",
        eta: Rate | None = None,
        weighting: str = "uniform",
        policy: RoundPolicy | None = None,
        max_norm: float | None = None,
        whole: Sequence[str] = STATISTICS,
        seed: int = 0,
        out: str | Path | None = None,
        resume: bool = False,
        from_backup: bool = False,
        config: Config | None = None,
    ) -> None:
        self.inner, self.eta, self.max_norm, self.whole = inner, eta, max_norm, whole
        self.policy = RoundPolicy() if policy is None else policy
        self.resume, self.from_backup = resume, from_backup
        self.out = Path(out or time.strftime("runs/flower-%Y%m%d-%H%M%S"))
        self._check(out is not None)
        given: dict[str, Any] = {"compressor": compressor, "compressor_down": compressor_down}
        given |= {"feedback": feedback, "update": update, "server_optimiser": server_optimiser}
        given |= {"weighting": weighting, "seed": seed}
        self.config = self._make_config(config, given)
        down = parse(compressor_down, "compressor_down")
        self.channels = Channels(parse(compressor), down, FEEDBACKS.parse(feedback), update, seed)
        self.aggregator = Aggregator(self.channels.feedback, SERVER_OPTIMISERS.parse(server_optimiser))
        self._check_update()
        self._check_feedback()

    def _check(self, has_out: bool) -> None:
        """Raise InputError for fields that Config does not check."""
        if self.inner is not None and not isinstance(self.inner, Strategy):
            raise InputError(f"`inner` must be a strategy of Flower's, such as FedAvg(), got {self.inner!r}")
        if not isinstance(self.policy, RoundPolicy):
            raise InputError(f"`policy` must be a RoundPolicy, got {self.policy!r}")
        for name in ("resume", "from_backup"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"`{name}` must be true or false, got {getattr(self, name)!r}")
        if self.resume and not has_out:
            raise InputError("`resume` needs `out`, the folder of the federation to continue")
        if self.from_backup and not self.resume:
            raise InputError("`from_backup` continues a federation, so it needs `resume`")
        for name, (most, words) in _BOUNDS.items():
            value: Any = getattr(self, name)
            if value is None or (name == "eta" and callable(value)):
                continue
            if not isinstance(value, Real) or not 0 < value <= most:  # type: ignore[operator]
                raise InputError(f"`{name}` must be {words}, got {value!r}")
        if isinstance(self.whole, str):
            raise InputError(f"`whole` must be a list of patterns, as [{self.whole!r}], got {self.whole!r}")

    def _make_config(self, config: Config | None, given: dict[str, Any]) -> Config:
        """Return `config` with the options `given`; if `config` is None, make one for a user's own app."""
        given = {**given, "participation": float(self.policy.participation)}
        if config is None:
            by = f"{APP[:-1]}, averaged by {name_strategy(self.inner)})" if self.inner else APP
            rate = None if callable(self.eta) else self.eta
            config, given = Config(dataset=APP), {**given, "model": by, "eta": rate}
        return config.replace(**given)

    def _check_update(self) -> None:
        """Raise InputError for `update` 'auto', or for an option without effect around a wrapped strategy."""
        config = self.config
        if config.update == "auto":
            raise InputError("`update` must be 'sum', or 'mean' if clients report local-steps, got 'auto'")
        if self.inner is None:
            return
        usual = {
            "eta": self.eta is None,
            "weighting": config.weighting == "uniform",
            "server_optimiser": str(self.aggregator.optimiser) == "sgd",
        }
        if odd := [f"`{name}`" for name, is_usual in usual.items() if not is_usual]:
            raise InputError(
                f"{' and '.join(odd)} must not be given when CFedAvg wraps a strategy, which averages and "
                "steps itself. Remove the options or the strategy."
            )
        if any(getattr(self.policy, name) != getattr(RoundPolicy, name) for name in _SAMPLING):
            raise InputError(
                "`participation`, `over_selection` and `min_nodes` of the policy have no effect when CFedAvg "
                "wraps a strategy, which samples the nodes itself. Remove these fields."
            )
        if config.update != "sum":
            raise InputError("`update` must be 'sum' when CFedAvg wraps a strategy, got 'mean'")

    def _check_feedback(self) -> None:
        """Raise InputError for a feedback that this federation cannot use."""
        feedback = self.channels.feedback
        if feedback.broadcasts or feedback.moves_start:
            raise InputError(
                f"`feedback` must not change the broadcast model in a federation, got {feedback}. "
                "Use ef, ef21 or none."
            )
        if feedback.keeps_server_memory and self.inner is not None:
            raise InputError(
                f"`feedback` must keep no memory on the server when CFedAvg wraps a strategy, got "
                f"{feedback}. Use ef or none."
            )
        if feedback.mirrors_clients and self.from_backup:
            raise InputError(
                f"`from_backup` must not be given with the feedback {feedback}: the clients remember updates "
                "that the backup lacks. Start another federation from the backup's model."
            )
        if feedback.mirrors_clients and self.config.weighting != "uniform":
            raise InputError(
                f"`weighting` must be uniform with the feedback {feedback}, got {self.config.weighting}: the "
                "server's sum of all clients' updates needs the same weight for a client in every round."
            )

    def summary(self) -> None:
        """Log what the strategy does, and where its metrics are."""
        where = f"{self.out.resolve()} on {socket.gethostname()}"
        parts = f"{self.channels.compressor} up, {self.channels.compressor_down} down"
        parts += f", feedback {self.channels.feedback}"
        parts += "" if self.inner else f", server optimiser {self.aggregator.optimiser}"
        log(INFO, "CFedAvg: %s, update %s; metrics in %s", parts, self.channels.update, where)
        if self.inner is not None:
            self.inner.summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
    ) -> Result:
        """Do the remaining rounds, and return the result. `timeout` is each round's deadline in seconds."""
        policy = self.policy.with_deadline(timeout)
        self.summary()
        arrays = {name: array.numpy() for name, array in initial_arrays.items()}
        form = self._make_form(arrays)
        if not isinstance(num_rounds, int) or num_rounds < 1:
            raise InputError(f"`num_rounds` must be an integer of at least 1, got {num_rounds!r}")
        config, comments = self.config.replace(rounds=num_rounds), self._list_more_options(policy)
        replica = self.channels.replica(form.layout)
        folder = FederationFolder(self.out, config, form, replica, self._fixed_options(), comments)
        with folder.hold():
            x, whole = form.split(arrays)
            whole = form.lengthen(form.shorten(whole)) if replica and replica.rounds_values else whole
            memory = ServerMemory() if self.inner else self.aggregator.init(x)
            state = folder.begin(x, whole, memory, resume=self.resume, from_backup=self.from_backup)
            session = Session(
                grid,
                folder,
                state,
                policy=policy,
                channels=self.channels,
                averaging=self._make_averaging(form),
                inner=self.inner,
                max_norm=self.max_norm,
                train_config=train_config or ConfigRecord(),
                evaluate_config=evaluate_config or ConfigRecord(),
                evaluate_fn=evaluate_fn,
            )
            folder.open(state)  # last: a session that refuses the state changes no file
            return session.run(num_rounds)

    def _make_form(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Form:
        """Return the form of the initial model; raise InputError if a value is not finite or too large."""
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise InputError(f"`initial_arrays` must be finite, but {name!r} holds NaN or Inf")
            if array.dtype == np.float32 and np.abs(array).max(initial=0) > LARGEST:
                raise InputError(f"`initial_arrays`: {name!r} must not hold a number above {LARGEST:g}")
        form = Form.of(arrays, self.whole)
        if form.whole_bytes > 4 * form.layout.d:
            log(WARNING, "most of the model travels whole: only float32 arrays are compressed")
        return form

    def _make_averaging(self, form: Form) -> Averaging:
        if self.inner is not None:
            return WrappedAverage(form, self.inner)
        by_steps, by_samples = self.channels.update == "mean", self.config.weighting == "samples"
        return OwnAverage(form, self.aggregator, self.eta, by_steps, by_samples)

    def _fixed_options(self) -> FixedOptions:
        inner, channels = name_strategy(self.inner) if self.inner else None, self.channels
        up, down = str(channels.compressor), str(channels.compressor_down)
        feedback, optimiser = str(channels.feedback), str(self.aggregator.optimiser)
        return FixedOptions(inner, up, down, feedback, channels.update, optimiser, channels.seed)

    def _list_more_options(self, policy: RoundPolicy) -> dict[str, Any]:
        """Return the options that config.toml has no fields for."""
        names = ["quorum"] if self.inner else ["over_selection", "min_nodes", "quorum"]
        found: dict[str, Any] = {name: getattr(policy, name) for name in names}
        if type(policy) is not RoundPolicy:
            found["policy"] = type(policy).__name__
        if callable(self.eta):
            found["eta"] = "a function of the round"
        return {**found, "max_norm": self.max_norm, "timeout": policy.deadline, "whole": [*self.whole]}

    # These four methods refuse: the `start` of another strategy would not store the state of a round.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        _refuse_wrapping()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        _refuse_wrapping()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        _refuse_wrapping()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        _refuse_wrapping()


def _refuse_wrapping() -> NoReturn:
    raise InputError(
        "CFedAvg cannot be wrapped by another strategy. Pass that strategy as `inner`, and call start()."
    )
