"""CFedAvg as a Flower strategy: the paper's Algorithm 1, or compression around another strategy."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from cfedavg.algorithm import Aggregator, ServerMemory
from cfedavg.channel import Downlink, make_downlink
from cfedavg.core.arrays import norm2
from cfedavg.core.config import APP, Config
from cfedavg.core.errors import InputError, show
from cfedavg.core.files import check_no_file, make_new_folder
from cfedavg.core.names import list_arguments
from cfedavg.core.parts import Written
from cfedavg.core.run_files import Record, ResidualNorms
from cfedavg.federate.replica import ModelReplica, advance
from cfedavg.federate.server import ServerState
from cfedavg.flower import options, rounds
from cfedavg.flower.array_layout import LARGEST, STATISTICS, Arrays, Form
from cfedavg.flower.federation_folder import FederationFolder
from cfedavg.flower.federation_state import FederationState, FixedOptions, Note, Numbers, RoundRows
from cfedavg.flower.nodes import OnlineNodes
from cfedavg.flower.options import Parts, Rate, RoundPolicy, bound_norm, keep_last
from cfedavg.flower.replies import CAUSES, TOO_LARGE, ReplyValidator, explain_norm
from cfedavg.flower.requests import Dispatcher, make_record
from cfedavg.flower.rounds import Loads, Round, ServerAge, make_columns
from cfedavg.flower.wrapped_strategy import WrappedStrategy, name_strategy
from cfedavg.guard import Guard

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
Averaged = tuple[NDArray[np.float32], bytes, ServerMemory]  # x, the uncompressed arrays, the memory


class CFedAvg(Strategy):
    """Federated averaging of compressed updates, with error feedback that survives faults.

    `inner`: a strategy of Flower's or your own, which samples nodes and aggregates as usual. If `inner` is
    None, CFedAvg averages with `weighting` "uniform" or "samples", and `server_optimiser` steps with the
    global rate `eta`: a number, or a function of the round (from 0). The default is the optimiser's own rate.

    `compressor`, `compressor_down`, `feedback`, `guard`, `update`, `server_optimiser`, `seed`: as in a
    simulation, as texts or objects. The server tells the clients what they need, so the mod needs no options.
    `uncompressed`: patterns for the names of arrays that are sent uncompressed.

    With a `compressor_down`, every client keeps a model copy, which can differ from the server's exact
    model. The clients train from the copy. `evaluate_fn` evaluates the copy, and `start` returns the copy.
    `inner` gets the server's exact model.

    `policy`: which nodes a round asks, when it ends and which quorum it needs; see `RoundPolicy`. If `inner`
    is given, only the policy's quorum and deadline have an effect, because `inner` samples the nodes.

    `max_norm`: the largest norm of a payload. A client sends only a part of a larger one, and the rest in
    later rounds. The default is 100 times the median norm of the last 100 payloads that were aggregated.
    math.inf means no bound.

    `out`: the folder for metrics and state. `resume`: continue the federation in `out`. `from_backup`: `out`
    is an older copy of the federation's folder, and the clients have taken part in later rounds.
    """

    if not TYPE_CHECKING:  # type checkers know the arguments

        def __new__(cls, *values: object, **named: object) -> Self:
            """Refuse an argument that CFedAvg does not have, in one sentence with a hint."""
            options.check_names(named, list_arguments(cls) or list(named))
            return super().__new__(cls)

    def __init__(
        self,
        inner: Strategy | None = None,
        *,
        compressor: str | Written = Config.compressor,
        compressor_down: str | Written = Config.compressor_down,
        feedback: str | Written = "ef",
        guard: str = Config.guard,
        update: str = "sum",
        server_optimiser: str | Written = "sgd",
        eta: Rate | None = None,
        weighting: str = "uniform",
        policy: RoundPolicy | None = None,
        max_norm: float | None = None,
        uncompressed: Sequence[str] = STATISTICS,
        seed: int = 0,
        out: str | Path | None = None,
        resume: bool = False,
        from_backup: bool = False,
        config: Config | None = None,
    ) -> None:
        self.inner, self.eta, self.max_norm, self.uncompressed = inner, eta, max_norm, uncompressed
        self.policy = RoundPolicy() if policy is None else policy
        self.resume, self.from_backup, self.weighting = resume, from_backup, weighting
        if inner is not None and not isinstance(inner, Strategy):
            raise InputError(f"`inner` must be a strategy of Flower's, such as FedAvg(), got {show(inner)}")
        if config is not None and not isinstance(config, Config):
            raise InputError(f"`config` must be a Config, got {show(config)}")
        options.check_values(self.policy, max_norm, eta, uncompressed)
        options.check_start(resume=resume, from_backup=from_backup, out=out)
        self.out = Path(out or time.strftime("runs/flower-%Y%m%d-%H%M%S"))
        given: dict[str, Any] = {"compressor": compressor, "compressor_down": compressor_down}
        given |= {
            "feedback": feedback,
            "guard": guard,
            "update": update,
            "server_optimiser": server_optimiser,
        }
        given |= {"weighting": weighting, "seed": seed, "participation": float(self.policy.participation)}
        if config is None:  # for a user's own app
            by = f"{APP[:-1]}, averaged by {name_strategy(inner)})" if inner else APP
            config, given = Config(dataset=APP), {**given, "model": by, "eta": None if callable(eta) else eta}
        self.config, self._has_out = config.replace(**given), bool(out)
        self.parts = Parts.of(self.config)
        self.aggregator = Aggregator(self.parts.feedback, self.parts.server_optimiser)
        wraps = inner is not None
        options.check_parts(self.parts, self.policy, eta, weighting, wraps=wraps, from_backup=from_backup)

    def summary(self) -> None:
        """Log the strategy's options, and the folder of its metrics."""
        parts = self.parts
        text = f"{parts.compressor} up, {parts.compressor_down} down, feedback {parts.feedback}"
        text += "" if self.inner else f", server optimiser {parts.server_optimiser}"
        where = f"{self.out.resolve()} on {socket.gethostname()}"
        log(INFO, "CFedAvg: %s, update %s; metrics in %s", text, parts.update, where)
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
        """Do all rounds up to `num_rounds`; return the result. `timeout`: a round's deadline in seconds."""
        policy = self.policy.with_deadline(timeout)
        _check_start(initial_arrays, num_rounds, evaluate_fn)
        check_no_file(self.out, "`out`")
        arrays = {name: array.numpy() for name, array in initial_arrays.items()}
        form = self._make_form(arrays)
        self.out = self.out if self._has_out else make_new_folder(self.out)
        self.summary()
        fixed = FixedOptions.of(name_strategy(self.inner) if self.inner else None, self.parts)
        config, comments = self.config.replace(rounds=num_rounds), self._list_more_options(policy)
        downlink = make_downlink(self.parts.compressor_down, form.layout)
        replica = ModelReplica(form.layout, downlink.rounds_values) if downlink else None
        folder = FederationFolder(self.out, config, form, replica, fixed, comments)
        with folder.hold():
            x, uncompressed = form.split(arrays)
            memory = ServerMemory() if self.inner else self.aggregator.init(x)
            first = x, folder.round_statistics(uncompressed), memory
            state = folder.begin(*first, resume=self.resume, from_backup=self.from_backup)
            configs = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
            session = Session(self, grid, folder, state, policy, downlink, *configs, evaluate_fn)
            folder.open(state)  # last: a session that refuses the state changes no file
            return session.run(num_rounds)

    def _make_form(self, arrays: Arrays) -> Form:
        """Return the form of the initial model; raise InputError if a value is NaN, Inf or too large."""
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise InputError(f"`initial_arrays` must be finite, but {name!r} holds NaN or Inf")
            if array.dtype == np.float32 and np.abs(array).max(initial=0) > LARGEST:
                raise InputError(f"`initial_arrays`: {name!r} must not hold a number above {LARGEST:g}")
        try:
            form = Form.of(arrays, self.uncompressed)
        except InputError as error:
            raise InputError(f"`initial_arrays`: {error}") from None
        if form.count_bytes() > 4 * form.layout.d:
            log(WARNING, "most of the model is sent uncompressed: only float32 arrays are compressed")
        return form

    def _list_more_options(self, policy: RoundPolicy) -> dict[str, Any]:
        """Return the options that are not fields of config.toml, where they are written as comments."""
        names = ["quorum"] if self.inner else ["over_selection", "min_nodes", "quorum"]
        found: dict[str, Any] = {name: getattr(policy, name) for name in names}
        if type(policy) is not RoundPolicy:
            found["policy"] = type(policy).__name__
        if callable(self.eta):
            found["eta"] = "a function of the round"
        more = {"max_norm": self.max_norm, "timeout": policy.deadline}
        return {**found, **more, "uncompressed": [*self.uncompressed]}

    def _refuse_wrapping(self, *_: Any, **__: Any) -> NoReturn:
        """Raise InputError, because the `start` of another strategy would not store the server's state."""
        raise InputError(
            "CFedAvg cannot be wrapped by another strategy. Pass that strategy to CFedAvg as `inner`."
        )

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _refuse_wrapping


def _check_start(initial_arrays: object, num_rounds: object, evaluate_fn: object) -> None:
    """Raise InputError if one of these arguments of `CFedAvg.start` is wrong."""
    if not isinstance(initial_arrays, ArrayRecord):
        raise InputError(
            "`initial_arrays` must be an ArrayRecord, such as ArrayRecord(model.state_dict()), "
            f"got {show(initial_arrays)}"
        )
    if not isinstance(num_rounds, int) or isinstance(num_rounds, bool) or num_rounds < 1:
        raise InputError(f"`num_rounds` must be an integer of at least 1, got {show(num_rounds)}")
    if evaluate_fn is not None and not callable(evaluate_fn):
        raise InputError(
            f"`evaluate_fn` must be a function of the round and the arrays, got {show(evaluate_fn)}"
        )


@dataclass
class Session:
    """A run of the server from a given state to the last round. The state is stored after every round."""

    strategy: CFedAvg
    grid: Grid
    folder: FederationFolder
    state: FederationState
    policy: RoundPolicy
    downlink: Downlink | None
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFunction | None

    def __post_init__(self) -> None:
        folder, self.parts, self.inner = self.folder, self.strategy.parts, self.strategy.inner
        self.form, self.result, self.age = folder.form, Result(), ServerAge()
        notes = {who: known.note for who, known in self.state.clients.items()}
        self.numbers = Numbers({who: note.number for who, note in notes.items()}, self.state.lent)
        self.guard = Guard(self.strategy.config.guard, self.parts.feedback)
        for row in folder.rows:
            self.guard.watch(row)
        self.residuals = ResidualNorms().add(note.residual2 for note in notes.values())
        nodes, where = OnlineNodes(self.grid, self.numbers), str(folder.out.resolve())
        model = folder.form, folder.replica, folder.federation
        self.dispatcher = Dispatcher(self.grid, nodes, where, *model, self.policy, self.parts)
        self.wrapped: WrappedStrategy | None = None
        if self.inner:
            self.wrapped = WrappedStrategy(self.inner, self.form, self.result, self.state.inner)

    def run(self, num_rounds: int) -> Result:
        """Do the remaining rounds up to `num_rounds`, and return Flower's Result."""
        t = self.state.server.t
        if t:
            log(INFO, "resuming after round %d of %d", t, num_rounds)
        else:
            self._evaluate(0)
        while self.state.server.t < num_rounds:
            self._do_round()
            row = rounds.describe_row(self.folder.rows[-1])
            log(INFO, "round %d/%d: %s", self.state.server.t, num_rounds, row)
            if sentence := self.guard.report(self.folder.rows[-1], self.parts.compressor):
                log(WARNING, sentence)
        self.folder.close(self.state)
        self.result.arrays = self._arrays(self.folder.held_model(self.state))
        return self.result

    def _arrays(self, x: NDArray[np.float32]) -> ArrayRecord:
        return make_record(self.form.join(x, self.state.uncompressed))

    def _evaluate(self, server_round: int) -> Record:
        """Evaluate the model that clients hold by `evaluate_fn`; return the metrics as columns of a row."""
        if self.evaluate_fn is None:
            return {}
        found = self.evaluate_fn(server_round, self._arrays(self.folder.held_model(self.state)))
        if found is None:
            return {}
        if not isinstance(found, MetricRecord):
            raise InputError(f"`evaluate_fn` must return a MetricRecord or None, got {show(found)}")
        self.result.evaluate_metrics_serverapp[server_round] = found
        return make_columns(found, "test_", "client_")

    def _do_round(self) -> None:
        state, bound = self.state, self.strategy.max_norm
        # The bound is computed from stored state before any request, so a restart finds the same bound.
        bound = bound_norm(state.norms) if bound is None else bound
        arrays, loads = self._arrays(state.server.x), Loads(self.form, self.folder.replica, state)
        compressor = self.parts.compressor.denser(2 ** self.guard.doublings(state.server.t))
        now = Round(state.server.t + 1, arrays, loads, time.monotonic(), bound, compressor, state.claims)
        requests = self._make_requests(now)
        self.dispatcher.collect(now, requests, self.state, self._make_validator(now))
        self._leave_out(now)
        if self.age.is_older(now, self.state.clients, len(self.numbers)):
            # Nodes refuse round numbers that they have seen, until `from_backup` begins a new generation.
            raise InputError(
                f"{self.folder.out} holds {now.server_round - 1} rounds, but nodes took part in later "
                "rounds. The folder is an older copy of the federation: resume with `from_backup`."
            )
        if not self.policy.has_quorum(len(now.taken), now.needed):
            now.make_void(self.policy.explain_void(len(now.taken), now.needed))
        self._end(now)
        tested = self._evaluate(now.server_round)
        state = replace(self.state, lent=dict(self.numbers.lent))
        if self.wrapped:
            # Store the model before clients evaluate it: a restart would make another model.
            self.folder.store_round(state, *self._make_rows(now, tested))
            arrays, config = self._arrays(self.state.server.x), self.evaluate_config
            tested |= self.wrapped.evaluate(now, arrays, config, self.dispatcher, self.state)
        self.state = self.folder.end_round(state, *self._make_rows(now, tested))

    def _make_requests(self, now: Round) -> list[Message]:
        """Return the requests of a round; first store the client numbers of new nodes.

        The stamp that names these requests was stored at the end of the previous round.
        """
        if self.inner is None:
            wanted: Iterable[Message] = self.dispatcher.sample(now, self.train_config)
        else:
            wanted = self.inner.configure_train(now.server_round, now.arrays, self.train_config, self.grid)
        messages = self.dispatcher.pack(now, wanted, self.state)
        if self.numbers.lent != self.state.lent:  # numbers determine random draws: store them before sending
            self.state = replace(self.state, lent=dict(self.numbers.lent))
            self.folder.store_state(self.state)
        return messages

    def _make_validator(self, now: Round) -> ReplyValidator:
        most = math.inf
        if self.strategy.max_norm != math.inf:  # integers as large as the model's own are allowed
            most = max(options.LARGEST_NORM, self.form.largest(self.state.uncompressed, "iu"))
        by_samples = self.strategy.weighting == "samples"
        return ReplyValidator(self.form, now.compressor, now.max_norm, most, by_samples)

    def _leave_out(self, now: Round) -> None:
        """Reject accepted replies that are much larger than the others, or that `inner` cannot average."""
        if self.strategy.max_norm is None and len(self.state.norms) < options.ENOUGH:
            most = bound_norm([each.norm for each in now.taken.values() if each.norm > 0])
            for who, each in list(now.taken.items()):
                if each.norm > most:
                    now.leave_out(who, CAUSES[TOO_LARGE], explain_norm(each.norm, most))
        if self.wrapped:
            self.wrapped.leave_out_odd_ones(now)

    def _average(self, now: Round) -> Averaged | None:
        """Return the next x, uncompressed arrays and server memory: lines 17 to 19 of Algorithm 1.

        If a value would not be finite or would be too large, make the round void, and return None.
        """
        taken, claims, state, t = now.in_order, now.claims, self.state, now.server_round - 1
        weights = claims.samples if self.strategy.weighting == "samples" else [1.0] * len(taken)
        if not any(weights):
            now.make_void("no client has an example, so weighting = 'samples' gives no mean")
            return None
        rate, scale = self._choose_rate(t, claims.steps, weights)
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked below
            x, memory = self.strategy.aggregator.step(
                state.server.x,
                state.memory,
                ((each.payload, [weight]) for each, weight in zip(taken, weights, strict=True)),
                everyone=float(len(self.numbers)),
                eta=rate,
                scale=scale,
                t=t,
            )
        uncompressed = self.form.average([each.uncompressed for each in taken], weights)
        why = self.form.find_fault_in_model(x, uncompressed)
        if not why and not all(np.isfinite(each).all() for each in memory.vectors().values()):
            why = "the server optimiser or the feedback would remember NaN or Inf"
        if why:
            now.make_void(why)
            return None
        return x, uncompressed, memory

    def _choose_rate(
        self, t: int, divisors: Sequence[float], weights: Sequence[float]
    ) -> tuple[float, float]:
        """Return the server's rate in round t, and the factor of the mean update.

        They make up for the numbers by which clients divided their updates.
        """
        optimiser, eta, steps = self.parts.server_optimiser, self.strategy.eta, [d or 1.0 for d in divisors]
        K = sum(steps) / len(steps) if self.parts.update == "mean" else 1.0
        scale = optimiser.scale(K)
        if self.parts.update == "fednova":
            scale = sum(w * d for w, d in zip(weights, steps, strict=True)) / sum(weights)
        return optimiser.default_rate(K) if eta is None else options.choose_rate(eta, t), scale

    def _end(self, now: Round) -> None:
        """Set `self.state` to the state after the round. The caller stores it with the rows of metrics."""
        state, primary = self.state, self.state.server.primary
        x, uncompressed, memory = state.server.x, state.uncompressed, state.memory
        if now.taken and self.wrapped:
            x, uncompressed = self.wrapped.average(now, x) or (x, uncompressed)
        elif now.taken:
            x, uncompressed, memory = self._average(now) or (x, uncompressed, memory)
        if primary and self.downlink:
            primary = advance(primary, x, self.downlink, self.parts.seed)
        marks = {who: taken.mark for who, taken in now.taken.items()}
        ended = ServerState(state.server, state.clients).end_round(marks, x, self._make_notes(now), primary)
        self.state = replace(
            state,
            server=ended.server,
            clients=ended.clients,
            uncompressed=self.folder.round_statistics(uncompressed),
            memory=memory,
            norms=keep_last([taken.norm for taken in now.in_order], state.norms),
            claims=now.claims.join(now.before),
            inner=self.wrapped.read_memory() if self.wrapped else None,
        )
        self.numbers.settle(now.taken, now.online)

    def _make_notes(self, now: Round) -> dict[str, Note]:
        """Return what the server will store about each client whose reply was aggregated in this round.

        Also put their residual norms into `self.residuals`.
        """
        notes = {}
        for who, taken in now.taken.items():
            known = self.state.clients.get(who)
            residual2 = taken.memory2 if self.parts.feedback.keeps_client_memory else None
            before = known.note.residual2 if known else None
            self.residuals = self.residuals.add([before], -1).add([residual2])
            notes[who] = Note(taken.node.number, now.server_round - 1, residual2)
        return notes

    def _make_rows(self, now: Round, tested: Record) -> RoundRows:
        """Return the rows of metrics of an ended round; `tested`: the columns with evaluation results."""
        state, residuals, gap2 = self.state, self.residuals.columns(max(1, len(self.numbers))), None
        if state.server.primary is not None:
            gap2 = norm2(state.server.x - self.folder.held_model(state))
        row = rounds.make_round_row(now, self.form.layout.d, residuals, gap2)
        row |= {**tested, "seconds": time.monotonic() - now.began}
        nodes = [
            rounds.make_node_row(node, now, self.dispatcher.find_version(state, node.identity), state)
            for node in now.nodes.values()
        ]
        return RoundRows(row, nodes)
