"""The evaluation of the model after a round: by the app's function, and by clients that a strategy asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp.strategy import Result, Strategy

from cfedavg.core.errors import summarise_error
from cfedavg.core.run_files import Record
from cfedavg.flower.averaging import Round
from cfedavg.flower.dispatch import Asking
from cfedavg.flower.federation_state import FederationState
from cfedavg.flower.nodes import Node
from cfedavg.flower.records import take_version
from cfedavg.flower.reply_validation import check_metrics, kind_of, reason, unlike_most
from cfedavg.flower.rows import columns_of
from cfedavg.wire import WireError

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True)
class Evaluation:
    """Evaluates models, notes the metrics in `result`, and returns them as columns of a row."""

    function: EvaluateFunction | None
    config: ConfigRecord  # for the clients
    asking: Asking
    result: Result

    def evaluate_here(self, server_round: int, arrays: ArrayRecord) -> Record:
        """Evaluate on the server, by the app's own function."""
        found = self.function(server_round, arrays) if self.function else None
        if found is None:
            return {}
        self.result.evaluate_metrics_serverapp[server_round] = found
        return columns_of(found, "test_", "client_")

    def ask_clients(self, inner: Strategy, now: Round, arrays: ArrayRecord, state: FederationState) -> Record:
        """Let those clients evaluate that the inner strategy asks."""
        asked = Round(now.server_round, arrays, now.began, max_norm=now.max_norm)
        wanted = inner.configure_evaluate(now.server_round, arrays, self.config, self.asking.grid)
        messages = self.asking.packed(asked, wanted, state)
        replies = list(self.asking.answers(asked, messages, state)) if messages else []
        now.join_downloads(asked)
        for node, reply in replies:
            if (version := take_version(reply)) is not None:
                self.asking.told[node.identity] = version
        alike = _alike(replies, asked)
        try:
            found = inner.aggregate_evaluate(now.server_round, alike)
        except Exception as error:  # the round counts all the same
            log(WARNING, "nothing is known of the clients' evaluation: %s", summarise_error(error))
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
