"""The rounds of one start of a server: ask, take, average, evaluate, write down."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from logging import INFO, WARNING
from typing import NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from cfedavg.core.arrays import norm2
from cfedavg.core.errors import InputError
from cfedavg.core.run_files import Record
from cfedavg.federate.primary import Primary
from cfedavg.federate.replica import advance
from cfedavg.flower import norms
from cfedavg.flower import strategy_state as memory
from cfedavg.flower.averaging import Averaging, Model, Outcome, Round
from cfedavg.flower.channels import Channels
from cfedavg.flower.dispatch import Asking
from cfedavg.flower.evaluation import EvaluateFunction, Evaluation
from cfedavg.flower.federation_folder import Books
from cfedavg.flower.federation_state import FederationState, Note, RoundRows, note_of
from cfedavg.flower.nodes import Numbers, online
from cfedavg.flower.records import MODS, size_of
from cfedavg.flower.reply_validation import FAILED, TOO_LARGE, Door, Rejected, above, kind_of, unlike_most
from cfedavg.flower.round_policy import RoundPolicy
from cfedavg.flower.rows import Residuals, download_columns, node_rows, round_row
from cfedavg.flower.server_age import ServerAge


class AppConfig(NamedTuple):
    """What an app passes to `start`: configurations for its clients, and its own evaluation."""

    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFunction | None


class Session:
    """Goes from the state that it is given to the last round; every round ends durably."""

    def __init__(
        self,
        grid: Grid,
        books: Books,
        state: FederationState,
        *,
        policy: RoundPolicy,
        channels: Channels,
        averaging: Averaging,
        inner: Strategy | None,
        max_norm: float | None,
        app: AppConfig,
    ) -> None:
        self.grid, self.books, self.form, self.state = grid, books, books.form, state
        self.policy, self.channels, self.averaging, self.inner = policy, channels, averaging, inner
        self.downlink = channels.downlink(self.form.layout)
        self.max_norm, self.train_config, self.result = max_norm, app.train_config, Result()
        self.door = Door(self.form, channels.compressor, max_norm, averaging.by_samples)
        notes = {who: note_of(known) for who, known in state.clients.items()}
        self.numbers = Numbers({who: note.number for who, note in notes.items()}, state.lent)
        self.residuals = Residuals(note.residual2 for note in notes.values())
        self.age = ServerAge()
        self.asking = Asking(grid, self.form, books.federation, self.numbers, policy, channels)
        self.evaluation = Evaluation(app.evaluate_fn, app.evaluate_config, self.asking, self.result)
        self._at_first = memory.attributes(inner) if inner else {}
        if inner and state.inner is not None:
            memory.remind(inner, state.inner)

    def run(self, num_rounds: int) -> Result:
        t = self.state.server.t
        if t:
            log(INFO, "resuming after round %d of %d", t, num_rounds)
        else:
            self.evaluation.evaluate_here(0, self._held_arrays())
        while self.state.server.t < num_rounds:
            self._round()
            log(INFO, "round %d/%d: %s", self.state.server.t, num_rounds, _in_words(self.books.rows[-1]))
        self.books.close(self.state)
        self.result.arrays = self._held_arrays()
        return self.result

    def _arrays(self) -> ArrayRecord:
        """The server's model, which a strategy works with, as the app knows it."""
        return self._as_app_knows(self.state.server.x)

    def _held_arrays(self) -> ArrayRecord:
        """The model that the clients hold."""
        return self._as_app_knows(self.books.held_model(self.state))

    def _as_app_knows(self, x: NDArray[np.float32]) -> ArrayRecord:
        arrays = self.form.join(x, self.state.whole)
        return ArrayRecord({name: Array(np.array(array)) for name, array in arrays.items()})

    def _round(self) -> None:
        t = self.state.server.t
        now = Round(
            t + 1, self._arrays(), time.monotonic(), max_norm=self._max_norm(), before=self.state.claims
        )
        self._collect(now, self._messages(now))
        self._check_age(now)
        if not self.policy.has_quorum(len(now.taken), now.needed):
            now.is_void(self.policy.explain_void(len(now.taken), now.needed))
        self._aggregate(now)
        tested = self.evaluation.evaluate_here(now.server_round, self._held_arrays())
        state = replace(self.state, lent=dict(self.numbers.lent))
        if self.inner:
            # What clients are asked to evaluate must not be lost: a restart would make another model.
            self.books.store_round(state, *self._rows(now, tested))
            tested |= self.evaluation.ask_clients(self.inner, now, self._arrays(), self.state)
        self.state = self.books.end_round(state, *self._rows(now, tested))

    def _rows(self, now: Round, tested: Record) -> RoundRows:
        """The rows of a round that has ended, as far as it is known what came of it."""
        t, residuals = now.server_round - 1, self.residuals.columns(max(1, len(self.numbers)))
        row = round_row(t, now.in_order, now.outcomes, self.form.layout.d, residuals)
        downloads = [each for of_node in now.downloads.values() for each in of_node]
        row |= download_columns(downloads, row["uplink_bytes"], self._gap2())
        row |= {**tested, "seconds": time.monotonic() - now.began}
        versions = {who.identity: self.asking.held(self.state, who.identity) for who in now.nodes.values()}
        return RoundRows(row, node_rows(t, now, versions, self.state))

    def _gap2(self) -> float | None:
        """|x - w|^2, where clients hold a copy."""
        if self.state.server.primary is None:
            return None
        return norm2(self.state.server.x - self.books.held_model(self.state))

    def _max_norm(self) -> float:
        """It is known before anyone is asked, and from what is durable: a restart finds the same."""
        return norms.bound(self.state.norms) if self.max_norm is None else self.max_norm

    def _most_whole(self) -> float:
        """Return how large a number that travels whole may be; a whole number of the model may come back."""
        if self.max_norm == math.inf:
            return math.inf
        return max(norms.LARGEST, self.form.largest(self.state.whole, "iu"))

    # Asking

    def _messages(self, now: Round) -> list[Message]:
        """The requests of a round. Its number has been durable since the round before ended."""
        if self.inner is None:
            wanted: Iterable[Message] = self.asking.own(now, self.train_config)
        else:
            wanted = self.inner.configure_train(now.server_round, now.arrays, self.train_config, self.grid)
        messages = self.asking.packed(now, wanted, self.state)
        now.needed = now.needed or len(now.nodes)  # a strategy may ask one twice
        if self.numbers.lent != self.state.lent:  # an answer goes by its number
            self.state = replace(self.state, lent=dict(self.numbers.lent))
            self.books.meet(self.state)
        return messages

    # Taking

    def _collect(self, now: Round, messages: list[Message]) -> None:
        """Takes what comes before the deadline, until there is enough."""
        asked = {node.identity for node in now.nodes.values()}
        door = replace(self.door, max_norm=now.max_norm, most_whole=self._most_whole())
        for node, reply in self.asking.answers(now, messages, self.state):
            facts = time.monotonic() - now.began, size_of(reply)
            try:
                taken = door.take(reply, node, self.state.server, asked, now.taken)
                now.taken[node.identity] = taken
                now.outcomes[node.identity] = Outcome("replied", "", *facts)
            except Rejected as rejected:
                why = str(rejected)
                if rejected.cause == FAILED and node.identity not in self.state.clients:
                    why += f"; has its client app {MODS}?"
                if node.identity not in now.taken:  # else it was asked twice, and has replied
                    now.outcomes[node.identity] = Outcome(rejected.cause, why, *facts)
                log(WARNING, "%s: %s (%s)", node.name, rejected.cause, why)
            if self.policy.has_enough(len(now.taken), now.needed):
                break
        self._note_missing(now)
        self._leave_out_too_large(now)
        if self.inner:
            self._leave_out_odd_ones(now)

    def _note_missing(self, now: Round) -> None:
        """Those of whom nothing has come."""
        now.online = {node.identity for node in online(self.grid, self.numbers)}
        enough = self.policy.has_enough(len(now.taken), now.needed)
        for node in now.nodes.values():
            here = node.identity in now.online
            missing = self.policy.classify_missing(is_online=here, has_enough=enough)
            now.outcomes.setdefault(node.identity, Outcome(*missing, None, 0))

    def _leave_out_too_large(self, now: Round) -> None:
        """While nothing is known of earlier updates, those of the round are held against each other."""
        if self.max_norm is not None or len(self.state.norms) >= norms.ENOUGH:
            return
        most = norms.bound([each.norm for each in now.taken.values() if each.norm > 0])
        for who, each in list(now.taken.items()):
            if each.norm > most:
                now.leave_out(who, TOO_LARGE, above(each.norm, most))

    def _leave_out_odd_ones(self, now: Round) -> None:
        """A single client's metrics must not keep the inner strategy from averaging."""
        kinds = {who: kind_of(each.metrics, each.arrays) for who, each in now.taken.items()}
        for who, why in unlike_most(kinds, now.server_round).items():
            now.leave_out(who, "metrics", why)

    def _check_age(self, now: Round) -> None:
        """Numbers of an older copy have been used since, and must not be again without a new generation."""
        if self.age.is_older(now.outcomes, now.online, self.state.clients, len(self.numbers)):
            raise InputError(
                f"the nodes have answered later rounds than the {now.server_round - 1} of {self.books.out}: "
                "it is an older copy of the federation, to be resumed with from_backup"
            )

    # Averaging

    def _aggregate(self, now: Round) -> None:
        """The state after the round; it becomes durable with the round's rows."""
        model = Model(self.state.server.x, self.state.whole, self.state.memory)
        if now.taken:
            model = self.averaging.combined(now, model, everyone=len(self.numbers))
        if now.train_metrics is not None:
            self.result.train_metrics_clientapp[now.server_round] = now.train_metrics
        marks = {who: taken.mark for who, taken in now.taken.items()}
        self.state = replace(
            self.state.end_round(marks, model.x, self._notes(now), self._primary_after(model)),
            whole=self._whole_after(model),
            memory=model.memory,
            norms=norms.remembered([taken.norm for taken in now.in_order], self.state.norms),
            claims=now.claims.join(now.before),
            inner=memory.remembered(self.inner, self._at_first) if self.inner else None,
        )
        self.numbers.settle(now.taken, now.online)

    def _primary_after(self, model: Model) -> Primary | None:
        """The copy that clients will hold, after the broadcast that ends a round."""
        primary = self.state.server.primary
        if primary is None or self.downlink is None:
            return None
        return advance(primary, model.x, self.downlink, self.channels.seed)

    def _whole_after(self, model: Model) -> bytes:
        """What travels whole, as clients will have it: running statistics are rounded as the copy is."""
        rounds = self.downlink is not None and self.downlink.rounds
        return self.form.lengthen(self.form.shorten(model.whole)) if rounds else model.whole

    def _notes(self, now: Round) -> dict[str, Note]:
        """What is kept of those who are in the model now."""
        notes = {}
        for who, taken in now.taken.items():
            known = self.state.clients.get(who)
            residual2 = taken.memory2 if self.channels.feedback.keeps_client_memory else None
            self.residuals.change(note_of(known).residual2 if known else None, residual2)
            notes[who] = Note(taken.node.number, now.server_round - 1, residual2)
        return notes


def _in_words(row: Record) -> str:
    parts = [f"{row['clients'] - row['lost']} of {row['clients']} taken"]
    parts += [f"{cause} {count}" for cause, count in row["outcomes"].items() if cause != "replied"]
    parts.append(f"{row['uplink_bytes']:,} bytes up, {row['downlink_bytes']:,} down")
    if "test_accuracy" in row:
        parts.append(f"accuracy {row['test_accuracy']:.2%}")
    return ", ".join(parts)
