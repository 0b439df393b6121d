"""The two state machines: the law under faults, mutants that break it, and each rule by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cfedavg.federation import protocol
from cfedavg.federation.protocol import (
    LIMIT,
    Client,
    Refuse,
    Request,
    Resend,
    Server,
    Stamp,
    Train,
    answer,
    ended,
    objection,
    receive,
    request_of,
    restored,
)
from tests.faults import RATES, Broken, Rules, Whole, World

FEW, ALL = 300, 10_000


def schedules(count: int) -> dict[str, int]:
    """Plays so many, and adds up what happened."""
    total: dict[str, int] = {}
    for seed in range(count):
        world = World(seed).run()
        assert world.applied > 0, seed
        for fault, times in world.faults.items():
            total[fault] = total.get(fault, 0) + times
    return total


def test_the_law_under_faults() -> None:
    happened = schedules(FEW)
    assert happened.keys() == RATES.keys()
    assert min(happened.values()) > 100
    assert sum(happened.values()) > 20 * FEW


@pytest.mark.slow
def test_the_law_under_all_schedules() -> None:
    happened = schedules(ALL)
    assert sum(happened.values()) > 400_000


# Mutants: each must be caught by the same check.


def forgets_without_being_told(client: Client, request: Request, codec: Any) -> Any:
    """The residual counts as right whether or not the payload arrived."""
    log = {stamp: message for stamp, message in client.log.items() if stamp == request.stamp}
    return receive(replace(client, log=log), request, codec)


def takes_repeated(server: Server, asked: Any, taken: Any, client: str, stamp: Stamp) -> str:
    return objection(server, asked, (), client, stamp)


def takes_late(server: Server, asked: Any, taken: Any, client: str, stamp: Stamp) -> str:
    return objection(server, asked, taken, client, server.stamp)


def trains_again(client: Client, request: Request, codec: Any) -> Any:
    """A request that was answered is taken for a new one."""
    return protocol._resolved(client, request, codec), Train()


def old_number(before: Server, after: Server) -> Server:
    """Stores the model, but not the number."""
    return replace(after, stamp=before.stamp)


MUTANTS = {
    "residual updated without an ack": (Rules(receive=forgets_without_being_told), 0.99),
    "no de-duplication at the server": (Rules(objection=takes_repeated), 0.9),
    "no de-duplication at the client": (Rules(receive=trains_again), 0.9),
    "late replies taken": (Rules(objection=takes_late), 0.9),
    "ack before durable": (Rules(store_late=True), 0.5),
    "number not durable": (Rules(stored=old_number), 0.15),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    rules, share = MUTANTS[name]
    caught = 0
    for seed in range(FEW):
        try:
            World(seed, rules).run()
        except Broken:
            caught += 1
    assert caught > share * FEW, f"{caught} of {FEW}"


# Each rule by itself


def zero() -> np.ndarray:
    return np.zeros(6, np.int64)


G = np.array([5, -4, 3, -2, 1, 0])
S = [Stamp(1, n) for n in range(12)]


def asks(stamp: Stamp, *applied: Stamp, settled: Stamp | None = None) -> Request:
    return Request(stamp, stamp.number, settled or stamp, frozenset(applied))


def answered(client: Client, request: Request) -> tuple[Client, bytes]:
    client, action = receive(client, request, Whole())
    assert action == Train()
    return answer(client, request, G, Whole())


def test_a_payload_leaves_the_log_when_it_is_applied_and_returns_when_it_is_void() -> None:
    first, message = answered(Client(zero()), asks(S[1]))
    assert first.e.tolist() == [0, 0, 3, -2, 1, 0]
    assert np.frombuffer(message, np.int64).tolist() == [5, -4, 0, 0, 0, 0]
    told, _ = receive(first, asks(S[2], S[1]), Whole())
    assert (told.e.tolist(), told.log, told.told) == ([0, 0, 3, -2, 1, 0], {}, S[1])
    void, _ = receive(first, asks(S[2]), Whole())
    assert (void.e.tolist(), void.log, void.told) == (G.tolist(), {}, protocol.NEVER)


def test_a_request_that_comes_twice_gets_the_same_message_and_changes_nothing() -> None:
    client, message = answered(Client(zero()), asks(S[1]))
    assert receive(client, asks(S[1]), Whole()) == (client, Resend(message))


def test_an_old_request_is_refused() -> None:
    client, _ = answered(Client(zero()), asks(S[2]))
    after, _ = receive(client, asks(S[3], S[2]), Whole())
    for late in (S[1], S[2]):
        same, action = receive(after, asks(late), Whole())
        assert action == Refuse(f"request 1.{late.number} is older than 1.2, answered")
        assert same is after


def test_a_client_that_is_told_nothing_stops_after_a_while() -> None:
    """Where the server does not say what is decided, payloads of unknown fate add up."""
    client, messages = Client(zero()), []
    for stamp in S[1 : LIMIT + 1]:
        client, message = answered(client, asks(stamp, settled=S[0]))
        messages.append(np.frombuffer(message, np.int64))
    _, action = receive(client, asks(S[10], settled=S[0]), Whole())
    assert action == Refuse("the fate of 8 payloads is unknown")
    client, action = receive(client, asks(S[10], S[8]), Whole())  # told at last: one of them is applied
    assert action == Train()
    assert (client.e + messages[-1]).tolist() == (LIMIT * G).tolist()


def test_whose_reply_is_taken() -> None:
    server = Server(x=0, stamp=S[5])
    assert objection(server, ["a", "b"], [], "a", S[5]) == ""
    assert objection(server, ["a", "b"], ["b"], "a", S[5]) == ""
    assert objection(server, ["a", "b"], ["a"], "a", S[5]) == "repeated"
    assert objection(server, ["b"], [], "a", S[5]) == "not asked"
    assert objection(server, ["a"], [], "a", S[4]) == "late"
    assert objection(server, ["a"], [], "a", Stamp(2, 5)) == "late"


def test_a_round_ends_with_a_new_number_and_a_list_of_what_is_in_the_model() -> None:
    server = ended(ended(Server(x=0), ["a", "b"], 1), ["b"], 2)
    assert (server.x, server.t, server.stamp) == (2, 2, S[3])
    assert request_of(server, "a").applied == {S[1]}
    assert request_of(server, "b").applied == {S[2]}
    assert request_of(server, "c").applied == frozenset()
    assert request_of(server, "a").settled == S[3]


def test_a_server_from_a_backup_starts_a_generation_and_clients_count_what_is_lost() -> None:
    """Round 1 is in the backup, round 2 was applied and told after it, round 3 is in the log."""
    backup = ended(Server(x=0), ["a"], 1)
    client, _ = answered(Client(zero()), asks(S[1]))
    client, _ = answered(client, asks(S[2], S[1]))
    client, _ = answered(client, asks(S[3], S[2]))
    with pytest.raises(ValueError, match="generation 1 is not above 1"):
        restored(backup, 1)
    server = restored(backup, 2)
    assert server.stamp == Stamp(2, 1)
    after, action = receive(client, request_of(server, "a"), Whole())
    assert action == Train()
    assert (after.forgotten, after.told, after.log) == (1, S[1], {})
    sent = np.frombuffer(client.log[S[3]], np.int64)
    assert after.e.tolist() == (client.e + sent).tolist()  # of round 3 nothing is lost
    again, _ = receive(after, request_of(server, "a"), Whole())
    assert again.forgotten == 1  # it is counted once
