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
from cfedavg.core.payload import Payload
from cfedavg.federate.client import (
    Client,
    Evaluate,
    LastAnswer,
    NeedWhole,
    Outdated,
    Refuse,
    Resend,
    Train,
    begin_training,
    catch_up,
    make_answer,
    receive,
)
from cfedavg.federate.protocol import (
    NEVER,
    Broadcast,
    Chain,
    Changes,
    Copy,
    Mark,
    Replica,
    Request,
    Stamp,
    Whole,
    follow,
    list_versions,
    make_mark,
    make_next_version,
)
from cfedavg.federate.server import (
    Primary,
    Server,
    end_round,
    find_fault_in_reply,
    find_held_version,
    make_request,
    restore_backup,
)
from cfedavg.feedback import EF21, FEEDBACKS, CAFe, ErrorFeedback, Feedback, NoFeedback, StepAhead
from tests.copies import REPLICA, ZERO, advance, pack_items, whole_of
from tests.faults import RATES, Broken, Digits, Rules, World, mass, read, update
from tests.feedback_faults import ControlWorld, FeedbackWorld

FEW, ALL = 300, 10_000


def schedules(count: int, *, compressed: bool = True) -> tuple[Counter[str], Counter[str]]:
    """Play so many schedules; count the faults, and why clients needed the whole model."""
    faults, causes = Counter[str](), Counter[str]()
    for seed in range(count):
        world = World(seed, compressed=compressed).run()
        assert world.applied > 0, seed
        faults += world.faults
        causes += world.causes
    return faults, causes


def test_the_law_under_faults() -> None:
    faults, causes = schedules(FEW)
    assert faults.keys() == RATES.keys()
    assert min(faults.values()) > 100
    assert faults.total() > 120 * FEW
    assert causes.keys() == {"new", "went back", "broken", "backup", "away"}
    assert min(causes.values()) > 20


def test_the_law_without_compressed_broadcasts() -> None:
    faults, causes = schedules(FEW, compressed=False)
    assert faults.total() > 80 * FEW
    assert not causes


@pytest.mark.slow
def test_the_law_under_all_schedules() -> None:
    faults, _ = schedules(ALL)
    assert faults.total() > 120 * ALL


OF_DISKS = ("disk gone", "old disk", "server from backup")


def test_without_a_fault_of_a_disk_nothing_is_lost_and_nobody_starts_anew() -> None:
    rates = RATES | dict.fromkeys(OF_DISKS, 0.0)
    for seed in range(FEW // 3):
        world = World(seed, rates=rates).run()
        assert world.incarnations == len(world.names)
        assert not any(fate.lost for fate in world.fates.values())


def test_losses_delays_doubles_and_kills_cost_no_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a history that is long enough, only a client that never had a copy needs the whole model."""
    monkeypatch.setattr("tests.faults.HISTORY", 100)
    rates = RATES | dict.fromkeys((*OF_DISKS, "broadcast broken"), 0.0)
    for seed in range(FEW // 3):
        world = World(seed, rates=rates).run()
        assert world.causes.keys() <= {"new"}


# Other feedbacks, each by its own law.

LAWS: dict[str, tuple[Feedback, float]] = {
    "ef": (ErrorFeedback(), 0.0),
    "ef(decay)": (ErrorFeedback(decay=0.95), 1e-9),  # of sums below 1e5 in float64
    "sapef": (StepAhead(0.5), 0.0),
    "ef21": (EF21(), 0.0),
    "cafe": (CAFe(), 0.0),
    "none": (NoFeedback(), 0.0),
}


def feedback_schedules(count: int, feedback: Feedback, tolerance: float) -> int:
    """Return how many of the schedules break the law."""
    broken = 0
    for seed in range(count):
        try:
            assert FeedbackWorld(seed, feedback, tolerance).run().applied > 0
        except Broken:
            broken += 1
    return broken


def test_control_variates_keep_their_law_under_faults() -> None:
    for seed in range(FEW // 3):
        assert ControlWorld(seed).run().applied > 0


def test_every_feedback_is_tried() -> None:
    assert {type(feedback) for feedback, _ in LAWS.values()} == set(FEEDBACKS.entries.values())


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_each_feedback_under_faults(name: str) -> None:
    """A wrong one breaks its law in nearly all schedules: see `test_a_wrong_feedback_is_caught`."""
    assert feedback_schedules(FEW // 3, *LAWS[name]) == 0


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


def forgets_without_being_told(client: Client, request: Request, sender: Any, replica: Any) -> Any:
    """The residual counts as right whether or not the payload arrived."""
    if client.sent is not None and client.sent.stamp != request.stamp:
        client = replace(client, sent=None)
    return receive(client, request, sender, replica)


def takes_repeated(server: Server, asked: Any, taken: Any, client: str, stamp: Stamp) -> str:
    return find_fault_in_reply(server, asked, (), client, stamp)


def takes_late(server: Server, asked: Any, taken: Any, client: str, stamp: Stamp) -> str:
    return find_fault_in_reply(server, asked, taken, client, server.stamp)


def trains_again(client: Client, request: Request, sender: Any, replica: Any) -> Any:
    """A request that was answered is taken for a new one."""
    return begin_training(client, request, sender, replica)


def old_number(before: Server, after: Server) -> Server:
    """Stores the model, but not the number."""
    return replace(after, stamp=before.stamp)


def goes_on(client: Client, request: Request, *ways: Any, where: Callable[..., bool]) -> Any:
    """Does not start anew, where the answer in the model is newer than its last, or where it is older."""
    after, action = receive(client, request, *ways)
    if action == Outdated() and where(request.mark.stamp, client.answered):
        return begin_training(client, request, *ways)
    return after, action


def takes_for_its_own(client: Client, request: Request, *ways: Any, mine: bool) -> Any:
    """Any answer to its last request: that of a copy of itself, or that of a predecessor."""
    mark, sent = request.mark, client.sent
    if mark and sent and mark.stamp == sent.stamp and (mark.incarnation == client.incarnation) == mine:
        request = replace(request, mark=its_mark(client))
    return receive(client, request, *ways)


def its_mark(client: Client) -> Mark:
    """Return the mark of the client's last answer."""
    assert client.sent is not None
    return make_mark(client.sent.stamp, client.incarnation, client.sent.message)


# Mutants of the other direction


def follows_unchecked(copy: Copy | None, broadcast: Broadcast, replica: Replica) -> Copy | None:
    """By generation and round alone: no hash and no digest is looked at."""
    version = broadcast.version
    if copy is not None and copy.version[:2] == version[:2]:
        return copy
    if isinstance(broadcast, Whole):
        return Copy(version, replica.replace(broadcast.message))
    first = broadcast.start if isinstance(broadcast, Chain) else broadcast.since[0]
    if copy is None or not first[:2] <= copy.version[:2] < version[:2]:
        return None
    if isinstance(broadcast, Changes):
        return Copy(version, replica.change(copy.w, broadcast.message))
    missed = broadcast.messages[copy.version.round - first.round :]
    return Copy(version, replica.apply(copy.w, missed))


def follows_in_any_generation(copy: Copy | None, broadcast: Broadcast, replica: Replica) -> Copy | None:
    """A version of another generation passes for that of the same round in this one."""
    listed = [broadcast.version]
    if isinstance(broadcast, Chain):
        listed = [*list_versions(broadcast.start, broadcast.messages)]
    elif isinstance(broadcast, Changes):
        listed += broadcast.since
    for version in listed:
        if copy is not None and version.round == copy.version.round:
            copy = Copy(version, copy.w)
    return follow(copy, broadcast, replica)


def leaves_a_gap(broadcast: Broadcast) -> Broadcast:
    """A chain begins one message after the version that the client holds."""
    if not isinstance(broadcast, Chain) or not broadcast.messages:
        return broadcast
    start = make_next_version(broadcast.start, broadcast.messages[0])
    return replace(broadcast, start=start, messages=broadcast.messages[1:])


def repeats_a_message(broadcast: Broadcast) -> Broadcast:
    """A chain has the right length, but holds one message twice and another not at all."""
    if not isinstance(broadcast, Chain) or len(broadcast.messages) < 2:
        return broadcast
    return replace(broadcast, messages=(broadcast.messages[1], *broadcast.messages[1:]))


def goes_back(client: Client, broadcast: Broadcast, replica: Replica) -> Any:
    """A late request to evaluate is not refused."""
    copy = follow(client.copy, broadcast, replica)
    return (client, NeedWhole()) if copy is None else (replace(client, copy=copy), Evaluate())


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
COPY_MUTANTS = {
    "hash ignored": (Rules(follow=follows_unchecked), 0.5),
    "generation ignored": (Rules(follow=follows_in_any_generation), 0.2),
    "chain with a gap": (Rules(broadcast=leaves_a_gap), 0.9),
    "message repeated": (Rules(broadcast=repeats_a_message), 0.9),
    "version told before it is durable": (Rules(tell_early=True), 0.1),
    "copy stored after the residual": (Rules(store_copy_later=True), 0.04),
    "copy goes back": (Rules(catch_up=goes_back), 0.9),
    "evaluated before it is durable": (Rules(evaluate_early=True), 0.5),
}


@pytest.mark.parametrize("name", MUTANTS | COPY_MUTANTS)
def test_mutants_are_caught(name: str) -> None:
    rules, share = (MUTANTS | COPY_MUTANTS)[name]
    caught = 0
    for seed in range(FEW):
        try:
            World(seed, rules, compressed=name in COPY_MUTANTS).run()
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
    return make_answer(client, request, update(n), CODEC)[0]


def payload(client: Client) -> int:
    assert client.sent is not None
    return read(client.sent.message)


def test_a_payload_is_dropped_when_it_is_applied_and_returns_when_it_is_void() -> None:
    first = answered(new(), asks(S[1]))
    assert payload(first) > 0 < first.memory
    assert payload(first) + first.memory == update(21)
    told, _ = receive(first, asks(S[2], its_mark(first)), CODEC)
    assert (told.memory, told.sent, told.confirmed) == (first.memory, None, S[1])
    void, _ = receive(first, asks(S[2]), CODEC)
    assert (void.memory, void.sent, void.confirmed) == (update(21), None, NEVER)


def test_a_request_that_comes_twice_gets_the_same_message_and_changes_nothing() -> None:
    client = answered(new(), asks(S[1]))
    assert client.sent is not None
    assert receive(client, asks(S[1]), CODEC) == (client, Resend(client.sent.message))


def test_an_old_request_is_refused() -> None:
    client = answered(answered(new(), asks(S[2])), asks(S[3]))
    for late in (S[1], S[2]):
        same, action = receive(client, asks(late), CODEC)
        assert action == Refuse(f"request 1.{late.number} is not newer than 1.3, which was answered")
        assert same is client


def test_whose_reply_is_taken() -> None:
    server = Server(x=0, stamp=S[5])
    assert find_fault_in_reply(server, ["a", "b"], [], "a", S[5]) == ""
    assert find_fault_in_reply(server, ["a", "b"], ["b"], "a", S[5]) == ""
    assert find_fault_in_reply(server, ["a", "b"], ["a"], "a", S[5]) == "repeated"
    assert find_fault_in_reply(server, ["b"], [], "a", S[5]) == "not asked"
    assert find_fault_in_reply(server, ["a"], [], "a", S[4]) == "late"
    assert find_fault_in_reply(server, ["a"], [], "a", Stamp(2, 5)) == "late"


def test_a_round_ends_with_a_new_number_and_a_list_of_what_is_in_the_model() -> None:
    first, second = make_mark(S[1], 7, b"a"), make_mark(S[2], 8, b"b")
    server = end_round(end_round(Server(x=0), {"a": first, "b": first}, 1), {"b": second}, 2)
    assert (server.x, server.t, server.stamp) == (2, 2, S[3])
    assert make_request(server, "a") == Request(S[3], 2, first)
    assert make_request(server, "b") == Request(S[3], 2, second)
    assert make_request(server, "c") == Request(S[3], 2, None)


def test_a_mark_tells_stamps_incarnations_and_messages_apart() -> None:
    assert make_mark(S[1], 7, b"a") == make_mark(S[1], 7, b"a")
    assert len({make_mark(S[1], 7, b"a"), make_mark(S[2], 7, b"a"), make_mark(S[1], 8, b"a"),
                make_mark(S[1], 7, b"b")}) == 4  # fmt: skip
    assert make_mark(S[1], 7, b"").digest == 0xE3B0C44298FC1C14  # SHA-256 begins with it


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
    other = replace(one, sent=LastAnswer(S[2], b"another"))
    assert receive(one, asks(S[3], its_mark(one)), CODEC)[1] == Train()
    assert receive(one, asks(S[3], its_mark(other)), CODEC) == (one, Outdated())


def test_an_answer_of_a_predecessor_to_the_same_request_makes_mine_void() -> None:
    predecessor, mine = answered(new(1), asks(S[4])), answered(new(2), asks(S[4]))
    after, action = receive(mine, asks(S[5], its_mark(predecessor)), CODEC)
    assert (action, after.memory, after.confirmed) == (Train(), update(124), S[4])


def test_a_server_from_a_backup_starts_a_generation_and_clients_count_what_is_lost() -> None:
    """Round 1 is in the backup, round 2 was applied and told after it, round 3 is on the way."""
    first = answered(new(), asks(S[1]))
    backup = end_round(Server(x=0), {"a": its_mark(first)}, 1)
    second = answered(first, asks(S[2], its_mark(first)))
    third = answered(second, asks(S[3], its_mark(second)))
    with pytest.raises(ValueError, match="`generation` must be above 1, got 1"):
        restore_backup(backup, 1)
    server = restore_backup(backup, 2)
    assert server.stamp == Stamp(2, 1)
    after, action = receive(third, make_request(server, "a"), CODEC)
    assert (action, after.forgotten, after.confirmed) == (Train(), 1, S[1])
    assert after.memory == mass(third)  # of round 3 nothing is lost
    again, _ = receive(after, make_request(server, "a"), CODEC)
    assert again.forgotten == 1  # it is counted once


def test_a_server_that_goes_back_to_what_a_client_has_taken_back_is_noticed() -> None:
    """From the newer of two backups after the older one: round 2 is in it, and in the client's residual."""
    first = answered(new(), asks(S[1]))
    older = end_round(Server(x=0), {"a": its_mark(first)}, 1)
    second = answered(first, make_request(older, "a"))
    newer = end_round(older, {"a": its_mark(second)}, 2)
    client = answered(second, make_request(restore_backup(older, 2), "a"))
    assert client.memory + payload(client) == mass(second) + update(41)
    delivered = answered(client, asks(Stamp(2, 2), its_mark(client)))
    for state in (client, delivered):
        assert receive(state, make_request(restore_backup(newer, 3), "a"), CODEC) == (state, Outdated())
        # But to the older one once more, or to one without anything of this client, it may go back.
        for backup in (older, Server(x=0)):
            after, action = receive(state, make_request(restore_backup(backup, 3), "a"), CODEC)
            assert (action, after.memory) == (Train(), mass(state))


def test_what_was_before_a_client_began_is_not_its_own() -> None:
    """A server goes back to an answer of a predecessor, in a generation that this client does not know."""
    predecessor = answered(new(1), asks(S[3]))
    mine = answered(new(2), asks(Stamp(2, 1)))
    mine = answered(mine, asks(Stamp(2, 2), its_mark(mine)))
    after, action = receive(mine, asks(Stamp(3, 1), its_mark(predecessor)), CODEC)
    assert (action, after.memory, after.forgotten) == (Train(), mass(mine), 1)


# Copies of the server's w


def begun(t: int = 0, generation: int = 1) -> Server:
    primary = Primary.begin(ZERO, generation, t, REPLICA.digest(ZERO))
    return Server(x=0, t=t, stamp=Stamp(generation, 1), primary=primary)


def from_backup(server: Server, generation: int) -> Server:
    return restore_backup(server, generation, REPLICA.digest(primary_of(server).w))


def after_rounds(server: Server, rounds: int) -> Server:
    for n in range(rounds):
        assert server.primary is not None
        message = pack_items([(n % 5, 10**n)])
        server = end_round(server, {}, server.x + 1, advance(server.primary, message))
    return server


def primary_of(server: Server) -> Primary:
    assert server.primary is not None
    return server.primary


def whole_request(server: Server, client: str = "a") -> Request:
    return make_request(server, client, whole_of(primary_of(server)))


def with_copy(client: Client, server: Server) -> Client:
    after, action = catch_up(client, whole_of(primary_of(server)), REPLICA)
    assert action == Evaluate()
    return after


def test_a_copy_follows_a_request_and_is_stored_with_the_answer() -> None:
    server = after_rounds(begun(), 2)
    client, action = receive(new(), whole_request(server), CODEC, REPLICA)
    assert action == Train()
    client, _ = make_answer(client, whole_request(server), update(1), CODEC)
    assert client.copy == Copy(primary_of(server).version, primary_of(server).w)
    later = after_rounds(server, 2)
    request = make_request(later, "a", primary_of(later).chain(client.copy.version))
    after, action = receive(client, request, CODEC, REPLICA)
    assert (action, after.copy) == (Train(), Copy(primary_of(later).version, primary_of(later).w))


def test_a_copy_that_cannot_follow_changes_nothing_and_takes_the_whole_model_by_the_same_stamp() -> None:
    server = after_rounds(begun(), 3)
    chain = primary_of(server).chain(primary_of(server).versions[2])
    assert chain is not None
    for client in (new(), with_copy(new(), after_rounds(begun(), 1))):
        same, action = receive(client, make_request(server, "a", chain), CODEC, REPLICA)
        assert (action, same) == (NeedWhole(), client)
        same, other = catch_up(client, chain, REPLICA)
        assert (other, same) == (NeedWhole(), client)
        after, action = receive(client, whole_request(server), CODEC, REPLICA)
        assert action == Train()
        assert after.copy is not None
        assert after.copy.w == primary_of(server).w


def test_to_evaluate_changes_nothing_but_the_copy() -> None:
    server = after_rounds(begun(), 1)
    client = answered(new(), asks(S[1]))
    after = with_copy(client, server)
    assert after.copy == Copy(primary_of(server).version, primary_of(server).w)
    assert replace(after, copy=None) == client


def test_a_copy_does_not_go_back() -> None:
    """A request that was under way while the client evaluated a later version."""
    early, late = after_rounds(begun(), 2), after_rounds(begun(), 4)
    client = with_copy(new(), late)
    why = Refuse("version 1.2 is older than version 1.4, which this client holds")
    assert receive(client, whole_request(early), CODEC, REPLICA) == (client, why)
    assert catch_up(client, whole_of(primary_of(early)), REPLICA) == (client, why)
    newer = restore_backup(early, 2, digest=0)
    after, action = receive(
        client, whole_request(replace(newer, primary=begun(2, 2).primary)), CODEC, REPLICA
    )
    assert action == Train()
    assert after.copy is not None
    assert after.copy.version[:2] == (2, 2)


def test_a_broadcast_of_another_round_is_refused() -> None:
    server = after_rounds(begun(), 2)
    for other in (replace(whole_request(server), t=1), replace(whole_request(server), stamp=Stamp(2, 3))):
        same, action = receive(new(), other, CODEC, REPLICA)
        assert isinstance(action, Refuse)
        assert "leads to 1.2" in action.why
        assert same == new()
    with pytest.raises(ValueError, match="`replica` must be given"):
        receive(new(), whole_request(server), CODEC)


def test_without_a_broadcast_a_copy_stays_as_it_is() -> None:
    client = with_copy(new(), after_rounds(begun(), 1))
    after = answered(client, asks(S[9]))
    assert after.copy == client.copy


def test_an_answer_in_the_model_says_which_version_its_client_holds() -> None:
    """Also after a restore, where the numbers begin again and the rounds do not."""
    for server in (begun(), from_backup(after_rounds(begun(), 5), 2)):
        generation, first = server.stamp.generation, server.t
        one = after_rounds(server, 2)
        mark = make_mark(one.stamp, 1, b"")
        two = end_round(one, {"a": mark}, 0, advance(primary_of(one), b""))
        three = after_rounds(two, 2)
        found = find_held_version(three, "a")
        assert found == primary_of(one).version
        assert found[:2] == (generation, first + 2)
        assert find_held_version(three, "b") is None
        told = primary_of(two).version
        assert find_held_version(three, "a", told) == find_held_version(three, "b", told) == told
        assert find_held_version(three, "a", primary_of(server).version) == found
        assert find_held_version(three, "b", told._replace(hash=0)) is None
        assert find_held_version(from_backup(three, 9), "a", told) is None
    assert find_held_version(Server(x=0), "a", told) is None


def test_a_version_that_is_out_of_the_history_is_not_known() -> None:
    server = after_rounds(begun(), 1)
    server = end_round(server, {"a": make_mark(server.stamp, 1, b"")}, 0, advance(primary_of(server), b""))
    assert find_held_version(server, "a") is not None
    for _ in range(3):
        server = end_round(server, {}, 0, advance(primary_of(server), b"", most=3))
    assert find_held_version(server, "a") is None


def test_a_server_advances_its_primary_with_every_round() -> None:
    server = begun()
    wrong = [None, server.primary, advance(advance(primary_of(server), b""), b""), begun(1, 2).primary]
    for primary in wrong:
        with pytest.raises(
            ValueError, match="`primary_next` must be a model copy of generation 1 and round 1, got "
        ):
            end_round(server, {}, 0, primary)
    with pytest.raises(
        ValueError, match="`primary_next` must be None for a server without a model copy, got "
    ):
        end_round(Server(x=0), {}, 0, advance(primary_of(server), b""))
    with pytest.raises(ValueError, match="`digest` must be given"):
        restore_backup(server, 2)
    with pytest.raises(ValueError, match="`digest` must be given"):
        restore_backup(Server(x=0), 2, 0)
