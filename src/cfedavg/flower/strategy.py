"""CFedAvg as a Flower strategy. Alone it is Algorithm 1; around another one it compresses what travels."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from cfedavg.compress import parse
from cfedavg.config import APP, Config
from cfedavg.errors import InputError
from cfedavg.flower.averaging import Rate
from cfedavg.flower.books import Books
from cfedavg.flower.form import STATISTICS, Form
from cfedavg.flower.inner import name_of
from cfedavg.flower.session import Session

# Of what Config does not look at: the kind, the least and the most that it may be, in words as well.
_ABOVE_0 = math.ulp(0.0)
_BOUNDS: dict[str, tuple[Any, float, float, str]] = {
    "over_selection": (Real, 0.0, 1000.0, "a number from 0 to 1000"),
    "min_nodes": (Integral, 1.0, 2.0**63, "a whole number of 1 or more"),
    "quorum": (Real, 0.0, 1.0, "a number from 0 to 1"),
    "max_norm": (Real, _ABOVE_0, math.inf, "a number above 0, which may be infinite"),
    "eta": (Real, _ABOVE_0, 1e300, "a number above 0, or a function of the round"),
}


class CFedAvg(Strategy):
    """Federated averaging of compressed updates, with error feedback that survives faults.

    `inner`: a strategy of Flower's or of your own that samples and aggregates as it always does. Without
    one, CFedAvg averages, `weighting` "uniform" or by "samples", and steps with the global rate `eta`: a
    number, or a function of the round, counted from 0; by default 1, or the mean K with update = "mean".

    `compressor`, `error_feedback`, `update`, `seed`: as in a simulation. The clients are told, so the mod
    needs no options. `whole`: patterns of the names of arrays that are not compressed.

    `participation`: the share of the nodes that a round needs; `over_selection`: how many more are asked
    (0.2: a fifth), of whom the last are not waited for. `min_nodes`: with fewer online no round starts
    (2; a strategy within has its own).
    `quorum`: the share of the needed replies without which a round changes nothing; its updates are not
    lost, but sent again. `max_norm`: no client sends a payload of a larger norm; the rest waits. By default
    that is 100 times the median norm of the last 100 payloads in the model; math.inf is no bound.

    `out`: the folder of metrics and state; `resume`: go on with what is in it; `from_backup`: what is in it
    is an older copy, and the clients have seen later rounds.
    """

    def __init__(
        self,
        inner: Strategy | None = None,
        *,
        compressor: str = "topk(0.99) >> bf16",
        error_feedback: bool = True,
        update: str = "sum",
        eta: Rate | None = None,
        weighting: str = "uniform",
        participation: float = 1.0,
        over_selection: float = 0.0,
        min_nodes: int | None = None,
        quorum: float = 0.5,
        max_norm: float | None = None,
        whole: Sequence[str] = STATISTICS,
        seed: int = 0,
        out: str | Path | None = None,
        resume: bool = False,
        from_backup: bool = False,
        config: Config | None = None,
    ) -> None:
        self.inner, self.eta, self.min_nodes = inner, eta, min_nodes
        self.over_selection, self.quorum, self.max_norm = over_selection, quorum, max_norm
        self.whole, self.resume, self.from_backup = whole, resume, from_backup
        self.out = Path(out or time.strftime("runs/flower-%Y%m%d-%H%M%S"))
        self._check(out is not None)
        self.compressor = parse(compressor)
        given = {
            "compressor": compressor,
            "error_feedback": error_feedback,
            "update": update,
            "weighting": weighting,
            "participation": participation,
            "seed": seed,
        }
        self.config = self._configured(config, given)
        self._check_update()

    def _check(self, placed: bool) -> None:
        """What Config does not look at."""
        if self.inner is not None and not isinstance(self.inner, Strategy):
            raise InputError(f"`inner` must be a strategy of Flower's, such as FedAvg(), got {self.inner!r}")
        for name in ("resume", "from_backup"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"`{name}` must be true or false, got {getattr(self, name)!r}")
        if self.resume and not placed:
            raise InputError("`resume` needs `out`, the folder of the federation to go on with")
        if self.from_backup and not self.resume:
            raise InputError("`from_backup` is for a federation that goes on: it needs `resume` as well")
        for name, (kind, low, high, words) in _BOUNDS.items():
            value: Any = getattr(self, name)
            if (name in ("max_norm", "eta", "min_nodes") and value is None) or (
                name == "eta" and callable(value)
            ):
                continue
            if not isinstance(value, kind) or not low <= value <= high:
                raise InputError(f"`{name}` must be {words}, got {value!r}")
        if isinstance(self.whole, str):
            raise InputError(f"`whole` must be a list of patterns, as [{self.whole!r}], got {self.whole!r}")

    def _configured(self, config: Config | None, given: dict[str, Any]) -> Config:
        """What the server decides, for its folder; around an app of the user's, no more is known."""
        if config is None:
            by = f"{APP[:-1]}, averaged by {name_of(self.inner)})" if self.inner else APP
            rate = None if callable(self.eta) else self.eta
            config, given = Config(dataset=APP), {**given, "model": by, "eta": rate}
        return config.replace(**given)

    def _check_update(self) -> None:
        """How updates are averaged: what a strategy within would not heed is refused."""
        if self.config.update == "auto":
            raise InputError("`update` is 'auto': say 'sum', or 'mean' where the clients report local-steps")
        if self.inner is None:
            return
        if self.eta is not None or self.config.weighting != "uniform":
            raise InputError(
                "`eta` and `weighting` have no effect when CFedAvg wraps a strategy: remove them"
            )
        if self.config.participation != 1 or self.over_selection or self.min_nodes is not None:
            raise InputError(
                "`participation`, `over_selection` and `min_nodes` have no effect when CFedAvg "
                "wraps a strategy: remove them"
            )
        if self.config.update != "sum":
            raise InputError("`update` must be 'sum' around a strategy, which gets whole models, got 'mean'")

    def summary(self) -> None:
        where = f"{self.out.resolve()} on {socket.gethostname()}"
        log(INFO, "CFedAvg: %s, update %s; metrics in %s", self.compressor, self.config.update, where)
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
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """All rounds, or those that are left. `timeout` is the deadline of each, in seconds."""
        if not isinstance(timeout, Real) or not timeout > 0:
            raise InputError(f"`timeout` must be a number of seconds above 0, got {timeout!r}")
        self.summary()
        arrays = {name: array.numpy() for name, array in initial_arrays.items()}
        _check_finite(arrays)
        form = Form.of(arrays, self.whole)
        if form.whole_bytes > 4 * form.layout.d:
            log(WARNING, "most of the model travels whole: only float32 arrays are compressed")
        if not isinstance(num_rounds, int) or num_rounds < 1:
            raise InputError(f"`num_rounds` must be a whole number of 1 or more, got {num_rounds!r}")
        config = self.config.replace(rounds=num_rounds)
        books = Books(self.out, config, form, self._stays, self._also(timeout))
        with books.kept():
            served = books.begin(*form.split(arrays), resume=self.resume, from_backup=self.from_backup)
            session = Session(self, grid, form, books, served, timeout)
            session.train_config = train_config or ConfigRecord()
            session.evaluate_config = evaluate_config or ConfigRecord()
            session.evaluate_fn = evaluate_fn
            books.open(served)  # a session that refuses the state leaves everything as it was
            return session.run(num_rounds)

    @property
    def _stays(self) -> dict[str, Any]:
        config = self.config
        return {
            "inner": name_of(self.inner) if self.inner else None,
            "compressor": str(self.compressor),
            "update": config.update,
            "error_feedback": config.error_feedback,
            "seed": config.seed,
        }

    def _also(self, timeout: float) -> dict[str, Any]:
        """What config.toml has no fields for."""
        names = (
            ["quorum", "max_norm"] if self.inner else ["over_selection", "min_nodes", "quorum", "max_norm"]
        )
        found = {name: getattr(self, name) for name in names}
        if callable(self.eta):
            found["eta"] = "a function of the round"
        return {**found, "timeout": timeout, "whole": [*self.whole]}

    # A round is only right if its books are kept, so that the rounds of another's `start` will not do.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        _not_inside()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        _not_inside()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        _not_inside()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        _not_inside()


def _check_finite(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(f"initial_arrays: {name!r} holds NaN or Inf, from which no client can train")


def _not_inside() -> NoReturn:
    raise InputError("CFedAvg runs its rounds itself, by start(): put others into it, not it into others")
