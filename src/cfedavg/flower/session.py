"""The rounds of one start of a server: ask, take, average, evaluate, write down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from logging import INFO, WARNING
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from cfedavg.errors import InputError, first_line
from cfedavg.flower import inner as memory
from cfedavg.flower import norms
from cfedavg.flower.asking import Asking
from cfedavg.flower.averaging import Alone, Round, Through
from cfedavg.flower.books import Books
from cfedavg.flower.form import Form
from cfedavg.flower.nodes import Node, Numbers, exchange, online
from cfedavg.flower.policy import RoundPolicy
from cfedavg.flower.records import CAUSES, MODS, REFUSED, size_of
from cfedavg.flower.rows import Outcome, Residuals, columns_of, node_rows, round_row
from cfedavg.flower.state import FederationState, Note, note_of
from cfedavg.flower.taking import (
    FAILED,
    TOO_LARGE,
    Door,
    Rejected,
    above,
    check_metrics,
    kind_of,
    reason,
    unlike_most,
)
from cfedavg.metrics import Record
from cfedavg.wire import WireError

if TYPE_CHECKING:
    from cfedavg.flower.strategy import CFedAvg


class Session:
    """Goes from the state that it is given to the last round; every round ends durably."""

    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None

    def __init__(
        self,
        options: CFedAvg,
        grid: Grid,
        form: Form,
        books: Books,
        state: FederationState,
        policy: RoundPolicy,
    ) -> None:
        self.options, self.grid, self.form, self.books = options, grid, form, books
        self.state, self.policy, self.result = state, policy, Result()
        by_samples = options.config.weighting == "samples"
        self.door = Door(form, options.compressor, options.max_norm, by_samples)
        notes = {who: note_of(known) for who, known in state.clients.items()}
        self.numbers = Numbers({who: note.number for who, note in notes.items()}, state.lent)
        self.residuals = Residuals(note.residual2 for note in notes.values())
        self.ahead, self.in_step = set[str](), set[str]()  # nodes, by whether they know later rounds
        self.asking = Asking(options, grid, form, books.federation, self.numbers, policy)
        self.averaging = self._averaging()
        if options.inner:
            self._at_first = memory.attributes(options.inner)
            if state.inner is not None:
                memory.remind(options.inner, state.inner)

    def _averaging(self) -> Alone | Through:
        options, config = self.options, self.options.config
        if options.inner is not None:
            return Through(self.form, options.inner, self.result)
        return Alone(self.form, options.eta, config.update == "mean", config.weighting == "samples")

    def run(self, num_rounds: int) -> Result:
        t = self.state.server.t
        if t:
            log(INFO, "resuming after round %d of %d", t, num_rounds)
        else:
            self._evaluated(0, self._arrays())
        while self.state.server.t < num_rounds:
            self._round()
            log(INFO, "round %d/%d: %s", self.state.server.t, num_rounds, _in_words(self.books.rows[-1]))
        self.books.close(self.state)
        self.result.arrays = self._arrays()
        return self.result

    def _arrays(self) -> ArrayRecord:
        """The model as the app knows it."""
        arrays = self.form.join(self.state.server.x.numpy(), self.state.whole)
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
        tested = self._evaluated(now.server_round, self._arrays()) | self._asked_clients(now)
        residuals = self.residuals.columns(max(1, len(self.numbers)))
        row = round_row(t, now.in_order, now.outcomes, self.form.layout.d, residuals)
        row |= {"downlink_bytes": now.down_bytes, **tested, "seconds": time.monotonic() - now.began}
        nodes = node_rows(t, now.nodes.values(), now.outcomes, now.taken, self.state)
        state = replace(self.state, lent=dict(self.numbers.lent))
        self.state = self.books.end_round(state, row, nodes)

    def _max_norm(self) -> float:
        """It is known before anyone is asked, and from what is durable: a restart finds the same."""
        given = self.options.max_norm
        return norms.bound(self.state.norms) if given is None else given

    def _most_whole(self) -> float:
        """Return how large a number that travels whole may be; a whole number of the model may come back."""
        if self.options.max_norm == math.inf:
            return math.inf
        return max(norms.LARGEST, self.form.largest(self.state.whole, "iu"))

    # Asking

    def _messages(self, now: Round) -> list[Message]:
        """The requests of a round. Its number has been durable since the round before ended."""
        inner, grid = self.options.inner, self.grid
        if inner is None:
            wanted: Iterable[Message] = self.asking.own(now, self.train_config)
        else:
            wanted = inner.configure_train(now.server_round, now.arrays, self.train_config, grid)
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
        for node_id, reply in exchange(self.grid, messages, self.policy.deadline):
            node = now.nodes[node_id]
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
        if self.options.inner:
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
        if self.options.max_norm is not None or len(self.state.norms) >= norms.ENOUGH:
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
        """Numbers of an older copy have been used since, and must not be again without a new generation.

        In an older copy, every node that took part later refuses; a node that did not, or is new, replies.
        One node may be wrong, or lie, also under a new name each round. So it takes two nodes that are still
        there, and more than have replied since the start, among those of which something is in the model.
        All nodes are counted in the same way, but only while none of the model has replied: a new name
        proves nothing against it.
        """
        said = {who: outcome.what for who, outcome in now.outcomes.items()}
        self.in_step |= {who for who, what in said.items() if what == "replied"}
        refused = {who for who, what in said.items() if what == CAUSES[REFUSED]}
        self.ahead = (refused | self.ahead & now.online) - self.in_step
        known = {who for who in self.ahead | self.in_step if who in self.state.clients}
        groups = [known] if known & self.in_step else [known, self.ahead | self.in_step]
        least = min(2, len(self.numbers))
        if any(len(group & self.ahead) >= max(least, len(group & self.in_step) + 1) for group in groups):
            raise InputError(
                f"the nodes have answered later rounds than the {now.server_round - 1} of {self.books.out}: "
                "it is an older copy of the federation, to be resumed with from_backup"
            )

    # Averaging

    def _aggregate(self, now: Round) -> None:
        """The state after the round; it becomes durable with the round's rows."""
        x, whole = self.state.server.x, self.state.whole
        if now.taken:
            x, whole = self.averaging.combined(now, x, whole)
        marks = {who: taken.mark for who, taken in now.taken.items()}
        inner = self.options.inner
        self.state = replace(
            self.state.end_round(marks, x, self._notes(now)),
            whole=whole,
            norms=norms.remembered([taken.norm for taken in now.in_order], self.state.norms),
            claims=now.claims.join(now.before),
            inner=memory.remembered(inner, self._at_first) if inner else None,
        )
        self.numbers.settle(now.taken, now.online)

    def _notes(self, now: Round) -> dict[str, Note]:
        """What is kept of those who are in the model now."""
        notes = {}
        for who, taken in now.taken.items():
            known = self.state.clients.get(who)
            residual2 = taken.facts["noise2"] if self.options.config.error_feedback else None
            self.residuals.change(note_of(known).residual2 if known else None, residual2)
            notes[who] = Note(taken.node.number, now.server_round - 1, residual2)
        return notes

    # Evaluating

    def _evaluated(self, server_round: int, arrays: ArrayRecord) -> Record:
        """By the app's own function, on the server."""
        found = self.evaluate_fn(server_round, arrays) if self.evaluate_fn else None
        if found is None:
            return {}
        self.result.evaluate_metrics_serverapp[server_round] = found
        return columns_of(found, "test_", "client_")

    def _asked_clients(self, now: Round) -> Record:
        """By the clients, if the inner strategy wants them to."""
        inner = self.options.inner
        if inner is None:
            return {}
        asked = Round(now.server_round, self._arrays(), now.began, max_norm=now.max_norm)
        wanted = inner.configure_evaluate(now.server_round, asked.arrays, self.evaluate_config, self.grid)
        messages = self.asking.packed(asked, wanted, self.state)
        now.down_bytes += asked.down_bytes
        replies = list(exchange(self.grid, messages, self.policy.deadline)) if messages else []
        alike = _alike([(asked.nodes[node_id], reply) for node_id, reply in replies], asked)
        try:
            found = inner.aggregate_evaluate(now.server_round, alike)
        except Exception as error:  # the round counts all the same
            log(WARNING, "nothing is known of the clients' evaluation: %s", first_line(error))
            return {}
        if found is not None:
            self.result.evaluate_metrics_clientapp[now.server_round] = found
        return columns_of(found, "client_") if found else {}


def _alike(replies: list[tuple[Node, Message]], asked: Round) -> list[Message]:
    """Return the evaluations without those whose metrics are unlike the others, and log what is wrong.

    A strategy may log the reason of an error as it is, so it gets one printable line.
    """
    wrong = {node: why for node, reply in replies if (why := _complaint(reply))}
    good = {node: reply for node, reply in replies if node not in wrong}
    odd = unlike_most(
        {node: kind_of(reply.content.metric_records) for node, reply in good.items()}, asked.server_round
    )
    for node, why in (odd | wrong).items():
        log(WARNING, "%s: left out of the evaluation (%s)", node.name, why)
    return [
        Message(Error(reply.error.code, reason(reply)), reply_to=asked.requests[node.id])
        if reply.has_error()
        else reply
        for node, reply in replies
        if reply.has_error() or node not in odd | wrong
    ]


def _complaint(reply: Message) -> str:
    """What is wrong with an evaluation; empty if nothing is."""
    if reply.has_error():
        return reason(reply) or "it failed"
    try:
        check_metrics(reply.content.metric_records)
    except WireError as error:
        return str(error)
    return ""


def _in_words(row: Record) -> str:
    parts = [f"{row['clients'] - row['lost']} of {row['clients']} taken"]
    parts += [f"{cause} {count}" for cause, count in row["outcomes"].items() if cause != "replied"]
    parts.append(f"{row['uplink_bytes']:,} bytes up")
    if "test_accuracy" in row:
        parts.append(f"accuracy {row['test_accuracy']:.2%}")
    return ", ".join(parts)
