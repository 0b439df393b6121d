"""The rounds of a server from its start to its end: send requests, take replies, average, evaluate, store."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from logging import INFO, WARNING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from cfedavg.core.arrays import norm2
from cfedavg.core.errors import InputError
from cfedavg.core.run_files import Record
from cfedavg.federate.replica import advance
from cfedavg.flower import reply_validation, round_policy, strategy_state
from cfedavg.flower.averaging import Averaging, EvaluateFunction, Evaluation, Model
from cfedavg.flower.dispatch import Channels, Dispatcher, list_online
from cfedavg.flower.federation_folder import FederationFolder
from cfedavg.flower.federation_state import FederationState, Note, Numbers, RoundRows
from cfedavg.flower.messages import CAUSES, MODS, REFUSED, make_record, measure_reply
from cfedavg.flower.reply_validation import Rejected, ReplyValidator
from cfedavg.flower.round_policy import RoundPolicy
from cfedavg.flower.rounds import Outcome, Residuals, Round, make_node_row, make_round_row


@dataclass
class Session:
    """A run of the server from a given state to the last round; the end of every round is stored durably."""

    grid: Grid
    folder: FederationFolder
    state: FederationState
    policy: RoundPolicy
    channels: Channels
    averaging: Averaging
    inner: Strategy | None
    max_norm: float | None
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFunction | None

    def __post_init__(self) -> None:
        self.form, self.result, self.age = self.folder.form, Result(), ServerAge()
        self.downlink = self.channels.downlink(self.form.layout)
        by_samples = self.averaging.by_samples
        self.validator = ReplyValidator(self.form, self.channels.compressor, self.max_norm, by_samples)
        notes = {who: known.note for who, known in self.state.clients.items()}
        self.numbers = Numbers({who: note.number for who, note in notes.items()}, self.state.lent)
        self.residuals = Residuals(note.residual2 for note in notes.values())
        federation = self.folder.federation
        self.dispatcher = Dispatcher(
            self.grid, self.form, federation, self.numbers, self.policy, self.channels
        )
        self.evaluation = Evaluation(self.evaluate_fn, self.evaluate_config, self.dispatcher, self.result)
        self._at_first = strategy_state.read_attributes(self.inner) if self.inner else {}
        if self.inner and self.state.inner is not None:
            strategy_state.restore_memory(self.inner, self.state.inner)

    def run(self, num_rounds: int) -> Result:
        """Do the remaining rounds up to `num_rounds`, and return Flower's Result."""
        t = self.state.server.t
        if t:
            log(INFO, "resuming after round %d of %d", t, num_rounds)
        else:
            self.evaluation.evaluate_here(0, self._held_arrays())
        while self.state.server.t < num_rounds:
            self._do_round()
            log(INFO, "round %d/%d: %s", self.state.server.t, num_rounds, _describe(self.folder.rows[-1]))
        self.folder.close(self.state)
        self.result.arrays = self._held_arrays()
        return self.result

    def _arrays(self, x: NDArray[np.float32]) -> ArrayRecord:
        """Return the model with the vector `x` as the ArrayRecord that the app expects."""
        return make_record(self.form.join(x, self.state.whole))

    def _held_arrays(self) -> ArrayRecord:
        """Return the model that the clients hold, as the ArrayRecord that the app expects."""
        return self._arrays(self.folder.held_model(self.state))

    def _do_round(self) -> None:
        # The bound is computed from stored state before any request, so a restart finds the same bound.
        bound = round_policy.bound_norm(self.state.norms) if self.max_norm is None else self.max_norm
        arrays, claims = self._arrays(self.state.server.x), self.state.claims
        now = Round(self.state.server.t + 1, arrays, time.monotonic(), max_norm=bound, before=claims)
        self._collect(now, self._make_requests(now))
        if self.age.is_older(now.outcomes, now.online, self.state.clients, len(self.numbers)):
            # The nodes have seen these round numbers: only a new generation may use them again.
            raise InputError(
                f"{self.folder.out} holds {now.server_round - 1} rounds, but nodes have answered later ones. "
                "The folder is an older copy of the federation: resume with `from_backup`."
            )
        if not self.policy.has_quorum(len(now.taken), now.needed):
            now.make_void(self.policy.explain_void(len(now.taken), now.needed))
        self._aggregate(now)
        tested = self.evaluation.evaluate_here(now.server_round, self._held_arrays())
        state = replace(self.state, lent=dict(self.numbers.lent))
        if self.inner:
            # Store the model before clients evaluate it: a restart would make another model.
            self.folder.store_round(state, *self._make_rows(now, tested))
            arrays = self._arrays(self.state.server.x)
            tested |= self.evaluation.ask_clients(self.inner, now, arrays, self.state)
        self.state = self.folder.end_round(state, *self._make_rows(now, tested))

    def _make_rows(self, now: Round, tested: Record) -> RoundRows:
        """Return the rows of a round that has ended; `tested` holds the evaluation results so far."""
        residuals, state = self.residuals.columns(max(1, len(self.numbers))), self.state
        gap2 = None
        if state.server.primary is not None:
            gap2 = norm2(state.server.x - self.folder.held_model(state))
        row = make_round_row(now, self.form.layout.d, residuals, gap2)
        row |= {**tested, "seconds": time.monotonic() - now.began}
        find = self.dispatcher.find_version
        nodes = now.nodes.values()
        return RoundRows(row, [make_node_row(each, now, find(state, each.identity), state) for each in nodes])

    def _make_requests(self, now: Round) -> list[Message]:
        """Return the requests of a round. The round's number was stored at the end of the round before."""
        if self.inner is None:
            wanted: Iterable[Message] = self.dispatcher.sample(now, self.train_config)
        else:
            wanted = self.inner.configure_train(now.server_round, now.arrays, self.train_config, self.grid)
        messages = self.dispatcher.pack(now, wanted, self.state)
        now.needed = now.needed or len(now.nodes)  # a strategy may ask one node twice
        if self.numbers.lent != self.state.lent:  # numbers key random draws: store them first
            self.state = replace(self.state, lent=dict(self.numbers.lent))
            self.folder.store_state(self.state)
        return messages

    def _collect(self, now: Round, messages: list[Message]) -> None:
        """Take replies until the round has enough or the deadline passes, and note the outcomes."""
        asked = {node.identity for node in now.nodes.values()}
        # `most` bounds the values of uncompressed arrays; integers as large as the model's own are allowed.
        most = math.inf
        if self.max_norm != math.inf:
            most = max(round_policy.LARGEST_NORM, self.form.largest(self.state.whole, "iu"))
        validator = replace(self.validator, max_norm=now.max_norm, most_whole=most)
        for node, reply in self.dispatcher.exchange(now, messages, self.state):
            facts = time.monotonic() - now.began, measure_reply(reply)
            try:
                taken = validator.take(reply, node, self.state.server, asked, now.taken)
                now.taken[node.identity] = taken
                now.outcomes[node.identity] = Outcome("replied", "", *facts)
            except Rejected as rejected:
                why = str(rejected)
                if rejected.cause == reply_validation.FAILED and node.identity not in self.state.clients:
                    why += f"; has its client app {MODS}?"
                if node.identity not in now.taken:  # else the node was asked twice, and has replied
                    now.outcomes[node.identity] = Outcome(rejected.cause, why, *facts)
                log(WARNING, "%s: %s (%s)", node.name, rejected.cause, why)
            if self.policy.has_enough(len(now.taken), now.needed):
                break
        self._note_missing(now)
        self._leave_out(now)

    def _note_missing(self, now: Round) -> None:
        """Note an outcome for each node that has not replied."""
        now.online = {node.identity for node in list_online(self.grid, self.numbers)}
        enough = self.policy.has_enough(len(now.taken), now.needed)
        for node in now.nodes.values():
            here = node.identity in now.online
            missing = self.policy.classify_missing(is_online=here, has_enough=enough)
            now.outcomes.setdefault(node.identity, Outcome(*missing, None, 0))

    def _leave_out(self, now: Round) -> None:
        """Reject replies that are too large compared with the others, or that `inner` cannot average."""
        if self.max_norm is None and len(self.state.norms) < round_policy.ENOUGH:
            most = round_policy.bound_norm([each.norm for each in now.taken.values() if each.norm > 0])
            for who, each in list(now.taken.items()):
                if each.norm > most:
                    why = reply_validation.explain_norm(each.norm, most)
                    now.leave_out(who, reply_validation.TOO_LARGE, why)
        if self.inner:
            kind = reply_validation.describe_kind
            kinds = {who: kind(each.metrics, each.arrays) for who, each in now.taken.items()}
            for who, why in reply_validation.find_odd_ones(kinds, now.server_round).items():
                now.leave_out(who, "metrics", why)

    def _aggregate(self, now: Round) -> None:
        """Set `state` to the state after the round; the caller stores it with the round's rows."""
        server = self.state.server
        model = Model(server.x, self.state.whole, self.state.memory)
        if now.taken:
            model = self.averaging.combine(now, model, everyone=len(self.numbers))
        if now.train_metrics is not None:
            self.result.train_metrics_clientapp[now.server_round] = now.train_metrics
        marks = {who: taken.mark for who, taken in now.taken.items()}
        primary, whole = None, model.whole
        if server.primary is not None and self.downlink is not None:
            primary = advance(server.primary, model.x, self.downlink, self.channels.seed)
        if self.downlink is not None and self.downlink.rounds_values:  # round statistics like the model copy
            whole = self.form.lengthen(self.form.shorten(whole))
        self.state = replace(
            self.state.end_round(marks, model.x, self._make_notes(now), primary),
            whole=whole,
            memory=model.memory,
            norms=round_policy.keep_last([taken.norm for taken in now.in_order], self.state.norms),
            claims=now.claims.join(now.before),
            inner=strategy_state.read_memory(self.inner, self._at_first) if self.inner else None,
        )
        self.numbers.settle(now.taken, now.online)

    def _make_notes(self, now: Round) -> dict[str, Note]:
        """Return a note on each client whose reply goes into the model, and update the residual norms."""
        notes = {}
        for who, taken in now.taken.items():
            known = self.state.clients.get(who)
            residual2 = taken.memory2 if self.channels.feedback.keeps_client_memory else None
            self.residuals.change(known.note.residual2 if known else None, residual2)
            notes[who] = Note(taken.node.number, now.server_round - 1, residual2)
        return notes


class ServerAge:
    """The evidence from nodes, since the start, that the server's state is an older copy."""

    def __init__(self) -> None:
        self.ahead, self.in_step = set[str](), set[str]()  # nodes that have refused; that have replied

    def is_older(
        self, outcomes: Mapping[str, Outcome], online: set[str], in_model: Collection[str], everyone: int
    ) -> bool:
        """Return whether enough nodes have refused the server because they have answered later rounds.

        If the server is an older copy, every node that took part in later rounds refuses; other nodes reply.
        One node may be wrong, or may lie under a new name in each round. So at least two nodes that are still
        online must have refused, and more nodes than have replied since the start. If a node in the model
        has replied, only nodes in the model count. Otherwise, all nodes together may also give the proof.
        """
        self.in_step |= {who for who, outcome in outcomes.items() if outcome.what == "replied"}
        refused = {who for who, outcome in outcomes.items() if outcome.what == CAUSES[REFUSED]}
        self.ahead = (refused | self.ahead & online) - self.in_step
        known = {who for who in self.ahead | self.in_step if who in in_model}
        groups = [known] if known & self.in_step else [known, self.ahead | self.in_step]
        least = min(2, everyone)
        return any(len(group & self.ahead) >= max(least, len(group & self.in_step) + 1) for group in groups)


def _describe(row: Record) -> str:
    """Return a summary of a round's row in words."""
    parts = [f"{row['clients'] - row['lost']} of {row['clients']} taken"]
    parts += [f"{cause} {count}" for cause, count in row["outcomes"].items() if cause != "replied"]
    parts.append(f"{row['uplink_bytes']:,} bytes up, {row['downlink_bytes']:,} down")
    if "test_accuracy" in row:
        parts.append(f"accuracy {row['test_accuracy']:.2%}")
    return ", ".join(parts)
