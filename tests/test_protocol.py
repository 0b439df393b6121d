"""The two state machines: the law under faults, mutants that break it, and each rule by itself."""

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from cfedavg.compress import plus
from cfedavg.federation import protocol
from cfedavg.federation.protocol import (
    NEVER,
    Client,
    Mark,
    Outdated,
    Refuse,
    Request,
    Resend,
    Sent,
    Server,
    Stamp,
    Train,
    answer,
    ended,
    mark_of,
    objection,
    receive,
    request_of,
    restored,
)
from cfedavg.feedback import EF21, FEEDBACKS, ErrorFeedback, Feedback, NoFeedback
from cfedavg.payload import Payload
from tests.faults import RATES, Broken, Digits, Rules, World, mass, read, update
from tests.feedback_faults import FeedbackWorld

FEW, ALL = 300, 10_000


def schedules(count: int) -> Counter[str]:
    """Plays so many, and adds up what happened."""
    total: Counter[str] = Counter()
    for seed in range(count):
        world = World(seed).run()
        assert world.applied > 0, seed
        total += world.faults
    return total


def test_the_law_under_faults() -> None:
    happened = schedules(FEW)
    assert happened.keys() == RATES.keys()
    assert min(happened.values()) > 100
    assert happened.total() > 80 * FEW


@pytest.mark.slow
def test_the_law_under_all_schedules() -> None:
    happened = schedules(ALL)
    assert happened.total() > 80 * ALL


def test_without_a_fault_of_a_disk_nothing_is_lost_and_nobody_starts_anew() -> None:
    rates = RATES | dict.fromkeys(("disk gone", "old disk", "server from backup"), 0.0)
    for seed in range(FEW // 3):
        world = World(seed, rates=rates).run()
        assert world.incarnations == len(world.names)
        assert not any(fate.lost for fate in world.fates.values())


# Other feedbacks, each by its own law.

LAWS: dict[str, tuple[Feedback, float]] = {
    "ef": (ErrorFeedback(), 0.0),
    "ef(decay)": (ErrorFeedback(decay=0.95), 1e-9),  # of sums below 1e5 in float64
    "ef21": (EF21(), 0.0),
    "none": (NoFeedback(), 0.0),
}


def feedback_schedules(count: int, feedback: Feedback, tolerance: float) -> int:
    """How many of the schedules break the law."""
    broken = 0
    for seed in range(count):
        try:
            assert FeedbackWorld(seed, feedback, tolerance).run().applied > 0
        except Broken:
            broken += 1
    return broken


def test_every_feedback_is_tried() -> None:
    assert {type(feedback) for feedback, _ in LAWS.values()} == set(FEEDBACKS.entries.values())


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_each_feedback_under_faults(name: str) -> None:
    assert feedback_schedules(FEW, *LAWS[name]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_each_feedback_under_all_schedules(name: str) -> None:
    assert feedback_schedules(ALL, *LAWS[name]) == 0


@dataclass(frozen=True)
class NeverRestores(ErrorFeedback):
    def restore(self, memory: Any, sent: Payload) -> Any:
        return memory


@dataclass(frozen=True)
class RestoresAsEF(EF21):
    def restore(self, memory: Any, sent: Payload) -> Any:
        return plus(memory, sent)


@dataclass(frozen=True)
class DecaysInSilence(ErrorFeedback):
    def forgone(self, left: Any) -> Any:
        return 0 * left


@pytest.mark.parametrize("mutant", [NeverRestores(), RestoresAsEF(), DecaysInSilence(decay=0.95)])
def test_a_wrong_feedback_is_caught(mutant: Feedback) -> None:
    assert feedback_schedules(50, mutant, 1e-9) >= 49


# Mutants: each must be caught by the same check.


def forgets_without_being_told(client: Client, request: Request, sender: Any) -> Any:
    """The residual counts as right whether or not the payload arrived."""
    if client.sent is not None and client.sent.stamp != request.stamp:
        client = replace(client, sent=None)
    return receive(client, request, sender)


def takes_repeated(server: Server, asked: Any, taken: Any, client: str, stamp: Stamp) -> str:
    return objection(server, asked, (), client, stamp)


def takes_late(server: Server, asked: Any, taken: Any, client: str, stamp: Stamp) -> str:
    return objection(server, asked, taken, client, server.stamp)


def trains_again(client: Client, request: Request, sender: Any) -> Any:
    """A request that was answered is taken for a new one."""
    return protocol._resolved(client, request, sender), Train()


def old_number(before: Server, after: Server) -> Server:
    """Stores the model, but not the number."""
    return replace(after, stamp=before.stamp)


def goes_on(client: Client, request: Request, sender: Any, *, where: Callable[..., bool]) -> Any:
    """Does not start anew, where the answer in the model is newer than its last, or where it is older."""
    after, action = receive(client, request, sender)
    if action == Outdated() and where(request.mark.stamp, client.seen):
        return protocol._resolved(client, request, sender), Train()
    return after, action


def takes_for_its_own(client: Client, request: Request, sender: Any, *, mine: bool) -> Any:
    """Any answer to its last request: that of a copy of itself, or that of a predecessor."""
    mark, sent = request.mark, client.sent
    if mark and sent and mark.stamp == sent.stamp and (mark.incarnation == client.incarnation) == mine:
        request = replace(request, mark=its_mark(client))
    return receive(client, request, sender)


def its_mark(client: Client) -> Mark:
    """Of the client's last answer."""
    assert client.sent is not None
    return mark_of(client.sent.stamp, client.incarnation, client.sent.message)


MUTANTS = {
    "residual updated without an ack": (Rules(receive=forgets_without_being_told), 0.99),
    "no de-duplication at the server": (Rules(objection=takes_repeated), 0.9),
    "no de-duplication at the client": (Rules(receive=trains_again), 0.9),
    "late replies taken": (Rules(objection=takes_late), 0.9),
    "ack before durable": (Rules(store_late=True), 0.9),
    "number not durable": (Rules(stored=old_number), 0.4),
    "old disk not noticed": (Rules(receive=partial(goes_on, where=operator.gt)), 0.8),
    "what was taken back not noticed": (Rules(receive=partial(goes_on, where=operator.lt)), 0.02),
    "digest ignored": (Rules(receive=partial(takes_for_its_own, mine=True)), 0.02),
    "incarnation ignored": (Rules(receive=partial(takes_for_its_own, mine=False)), 0.1),
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


CODEC = Digits(random.Random(0))
S = [Stamp(1, n) for n in range(12)]


def asks(stamp: Stamp, mark: Mark | None = None) -> Request:
    return Request(stamp, stamp.number, mark)


def new(incarnation: int = 1) -> Client:
    return Client(incarnation, 0)


def answered(client: Client, request: Request) -> Client:
    """After an update that no other stamp and incarnation has."""
    n = 100 * (client.incarnation - 1) + 20 * request.stamp.generation + request.stamp.number
    client, action = receive(client, request, CODEC)
    assert action == Train()
    return answer(client, request, update(n), CODEC)[0]


def payload(client: Client) -> int:
    assert client.sent is not None
    return read(client.sent.message)


def test_a_payload_is_dropped_when_it_is_applied_and_returns_when_it_is_void() -> None:
    first = answered(new(), asks(S[1]))
    assert payload(first) > 0 < first.memory
    assert payload(first) + first.memory == update(21)
    told, _ = receive(first, asks(S[2], its_mark(first)), CODEC)
    assert (told.memory, told.sent, told.told) == (first.memory, None, S[1])
    void, _ = receive(first, asks(S[2]), CODEC)
    assert (void.memory, void.sent, void.told) == (update(21), None, NEVER)


def test_a_request_that_comes_twice_gets_the_same_message_and_changes_nothing() -> None:
    client = answered(new(), asks(S[1]))
    assert client.sent is not None
    assert receive(client, asks(S[1]), CODEC) == (client, Resend(client.sent.message))


def test_an_old_request_is_refused() -> None:
    client = answered(answered(new(), asks(S[2])), asks(S[3]))
    for late in (S[1], S[2]):
        same, action = receive(client, asks(late), CODEC)
        assert action == Refuse(f"request 1.{late.number} is older than 1.3, answered")
        assert same is client


def test_whose_reply_is_taken() -> None:
    server = Server(x=0, stamp=S[5])
    assert objection(server, ["a", "b"], [], "a", S[5]) == ""
    assert objection(server, ["a", "b"], ["b"], "a", S[5]) == ""
    assert objection(server, ["a", "b"], ["a"], "a", S[5]) == "repeated"
    assert objection(server, ["b"], [], "a", S[5]) == "not asked"
    assert objection(server, ["a"], [], "a", S[4]) == "late"
    assert objection(server, ["a"], [], "a", Stamp(2, 5)) == "late"


def test_a_round_ends_with_a_new_number_and_a_list_of_what_is_in_the_model() -> None:
    first, second = mark_of(S[1], 7, b"a"), mark_of(S[2], 8, b"b")
    server = ended(ended(Server(x=0), {"a": first, "b": first}, 1), {"b": second}, 2)
    assert (server.x, server.t, server.stamp) == (2, 2, S[3])
    assert request_of(server, "a") == Request(S[3], 2, first)
    assert request_of(server, "b") == Request(S[3], 2, second)
    assert request_of(server, "c") == Request(S[3], 2, None)


def test_a_mark_tells_stamps_incarnations_and_messages_apart() -> None:
    assert mark_of(S[1], 7, b"a") == mark_of(S[1], 7, b"a")
    assert len({mark_of(S[1], 7, b"a"), mark_of(S[2], 7, b"a"), mark_of(S[1], 8, b"a"),
                mark_of(S[1], 7, b"b")}) == 4  # fmt: skip
    assert mark_of(S[1], 7, b"").digest == 0xE3B0C44298FC1C14  # SHA-256 begins with it


def test_a_stamp_as_one_number_keeps_the_order() -> None:
    stamps = [NEVER, S[1], S[2], Stamp(1, 2**32 - 1), Stamp(2, 1), Stamp(2**32 - 1, 2**32 - 1)]
    numbers = [stamp.sequence for stamp in stamps]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 2**64 - 1


# Disks that are gone, or older than they should be


def test_an_older_copy_of_a_client_starts_anew() -> None:
    older = answered(new(), asks(S[1]))
    newer = answered(older, asks(S[2], its_mark(older)))
    assert receive(older, asks(S[3], its_mark(newer)), CODEC) == (older, Outdated())
    assert receive(new(2), asks(S[3], its_mark(newer)), CODEC)[1] == Train()


def test_an_older_copy_of_which_nothing_newer_was_delivered_goes_on() -> None:
    older = answered(new(), asks(S[1]))
    answered(older, asks(S[2], its_mark(older)))
    after, action = receive(older, asks(S[3], its_mark(older)), CODEC)
    assert (action, after.sent, after.memory) == (Train(), None, older.memory)


def test_an_answer_of_a_copy_to_the_same_request_is_noticed_by_its_digest() -> None:
    base = answered(new(), asks(S[1]))
    one = answered(base, asks(S[2], its_mark(base)))
    other = replace(one, sent=Sent(S[2], b"another"))
    assert receive(one, asks(S[3], its_mark(one)), CODEC)[1] == Train()
    assert receive(one, asks(S[3], its_mark(other)), CODEC) == (one, Outdated())


def test_an_answer_of_a_predecessor_to_the_same_request_makes_mine_void() -> None:
    predecessor, mine = answered(new(1), asks(S[4])), answered(new(2), asks(S[4]))
    after, action = receive(mine, asks(S[5], its_mark(predecessor)), CODEC)
    assert (action, after.memory, after.told) == (Train(), update(124), S[4])


def test_a_server_from_a_backup_starts_a_generation_and_clients_count_what_is_lost() -> None:
    """Round 1 is in the backup, round 2 was applied and told after it, round 3 is on the way."""
    first = answered(new(), asks(S[1]))
    backup = ended(Server(x=0), {"a": its_mark(first)}, 1)
    second = answered(first, asks(S[2], its_mark(first)))
    third = answered(second, asks(S[3], its_mark(second)))
    with pytest.raises(ValueError, match="generation 1 is not above 1"):
        restored(backup, 1)
    server = restored(backup, 2)
    assert server.stamp == Stamp(2, 1)
    after, action = receive(third, request_of(server, "a"), CODEC)
    assert (action, after.forgotten, after.told) == (Train(), 1, S[1])
    assert after.memory == mass(third)  # of round 3 nothing is lost
    again, _ = receive(after, request_of(server, "a"), CODEC)
    assert again.forgotten == 1  # it is counted once


def test_a_server_that_goes_back_to_what_a_client_has_taken_back_is_noticed() -> None:
    """From the newer of two backups after the older one: round 2 is in it, and in the client's residual."""
    first = answered(new(), asks(S[1]))
    older = ended(Server(x=0), {"a": its_mark(first)}, 1)
    second = answered(first, request_of(older, "a"))
    newer = ended(older, {"a": its_mark(second)}, 2)
    client = answered(second, request_of(restored(older, 2), "a"))
    assert client.memory + payload(client) == mass(second) + update(41)
    delivered = answered(client, asks(Stamp(2, 2), its_mark(client)))
    for state in (client, delivered):
        assert receive(state, request_of(restored(newer, 3), "a"), CODEC) == (state, Outdated())
        # But to the older one once more, or to one without anything of this client, it may go back.
        for backup in (older, Server(x=0)):
            after, action = receive(state, request_of(restored(backup, 3), "a"), CODEC)
            assert (action, after.memory) == (Train(), mass(state))


def test_what_was_before_a_client_began_is_not_its_own() -> None:
    """A server goes back to an answer of a predecessor, in a generation that this client does not know."""
    predecessor = answered(new(1), asks(S[3]))
    mine = answered(new(2), asks(Stamp(2, 1)))
    mine = answered(mine, asks(Stamp(2, 2), its_mark(mine)))
    after, action = receive(mine, asks(Stamp(3, 1), its_mark(predecessor)), CODEC)
    assert (action, after.memory, after.forgotten) == (Train(), mass(mine), 1)
