"""Copies that follow broadcasts: from every version, never to a wrong copy; the bytes of a broadcast."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfedavg.federate.protocol import (
    Broadcast,
    Chain,
    Changes,
    Copy,
    Stamp,
    Version,
    Whole,
    compute_digest,
    follow,
    list_versions,
    make_first_version,
    make_next_version,
    pack,
    unpack,
)
from cfedavg.federate.server import Primary, Server, restore_backup
from cfedavg.wire import WireError
from tests.copies import REPLICA, ZERO, W, advance, changes_of, draw_message, kinds, whole_of

ROUNDS = 8


def begun(w: W = ZERO, generation: int = 1, round: int = 0) -> Primary:
    return Primary.begin(w, generation, round, REPLICA.digest(w))


def history(seed: int = 0, rounds: int = ROUNDS) -> list[Primary]:
    """A server's copies from its first to its last round."""
    chance, found = random.Random(seed), [begun()]
    for _ in range(rounds):
        found.append(advance(found[-1], draw_message(chance)))
    return found


def copy_of(primary: Primary) -> Copy:
    return Copy(primary.version, primary.w)


def test_a_version_names_all_that_led_to_it() -> None:
    first = make_first_version(1, 0, 5)
    versions = {first, make_first_version(2, 0, 5), make_first_version(1, 1, 5), make_first_version(1, 0, 6)}
    versions |= {make_next_version(first, message) for message in (b"", b"a", b"b")}
    versions |= {list_versions(first, [b"a", b"b"])[-1], list_versions(first, [b"b", b"a"])[-1]}
    assert len({version.hash for version in versions}) == len(versions) == 9
    assert make_next_version(first, b"a")[:2] == (1, 1)
    assert compute_digest(b"") == 0xE3B0C44298FC1C14  # SHA-256 begins with it
    assert str(first) == "1.0"


def test_a_copy_follows_from_every_version_that_is_listed() -> None:
    states = history()
    last = states[-1]
    for told in states:
        for broadcast in kinds(last, told.version):
            assert unpack(pack(broadcast)) == broadcast
            for held in states:
                found = follow(copy_of(held), broadcast, REPLICA)
                listed = held.version.round >= told.version.round or isinstance(broadcast, Whole)
                assert found == (copy_of(last) if listed else None)
            assert follow(None, broadcast, REPLICA) == (
                copy_of(last) if isinstance(broadcast, Whole) else None
            )


class Untouched:
    """A replica that must not be asked for anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def test_a_copy_of_the_last_version_is_left_as_it_is() -> None:
    last = history()[-1]
    for broadcast in kinds(last, last.versions[0]):
        copy = copy_of(last)
        assert follow(copy, broadcast, Untouched()) is copy


def test_what_was_applied_is_not_applied_again() -> None:
    class Counting(type(REPLICA)):  # type: ignore[misc]
        applied = 0

        def apply(self, w: W, messages: Sequence[bytes]) -> W:
            self.applied += len(messages)
            return REPLICA.apply(w, messages)

    states, replica = history(), Counting()
    chain = states[-1].chain(states[1].version)
    assert chain is not None
    follow(copy_of(states[5]), chain, replica)
    assert replica.applied == ROUNDS - 5


def damage(broadcast: Broadcast, chance: random.Random) -> Broadcast:
    """Replace one message by another that is well formed."""
    other = draw_message(chance)
    if not isinstance(broadcast, Chain):
        return replace(broadcast, message=other)
    messages = list(broadcast.messages)
    messages[chance.randrange(len(messages))] = other
    return replace(broadcast, messages=tuple(messages))


def test_a_damaged_broadcast_is_never_followed() -> None:
    chance = random.Random(1)
    for seed in range(50):
        states = history(seed)
        for broadcast in kinds(states[-1], states[2].version):
            wrong = damage(broadcast, chance)
            for held in states[:-1]:
                found = follow(copy_of(held), wrong, REPLICA)
                assert found is None or found == copy_of(states[-1]), seed


def test_a_message_that_cannot_be_decoded_is_not_followed() -> None:
    last = history()[-1]
    assert follow(None, replace(whole_of(last), message=b"x"), REPLICA) is None
    changes = replace(changes_of(last, last.versions[0]), message=b"x")
    assert follow(copy_of(history()[0]), changes, REPLICA) is None


def test_a_version_with_another_past_is_not_followed() -> None:
    """Of the same generation and round: a server was put back without a new generation."""
    one, other = history(0), history(1)
    for broadcast in kinds(one[-1], one[3].version):
        found = follow(copy_of(other[5]), broadcast, REPLICA)
        assert found == (copy_of(one[-1]) if isinstance(broadcast, Whole) else None)


def test_the_history_is_bounded_by_count_and_by_bytes() -> None:
    primary = begun()
    for n in range(10):
        primary = primary.advance(bytes(n), ZERO, most=4)
    assert [len(message) for message in primary.messages] == [6, 7, 8, 9]
    assert [version.round for version in primary.versions] == [6, 7, 8, 9, 10]
    assert list_versions(primary.versions[0], primary.messages) == primary.versions
    assert len(primary.advance(bytes(10), ZERO, most_bytes=19).messages) == 2
    assert len(primary.advance(bytes(10), ZERO, most_bytes=18).messages) == 1
    assert len(primary.advance(bytes(10), ZERO, most_bytes=0).messages) == 1  # the last one stays
    assert len(primary.advance(bytes(10), ZERO, most=0).messages) == 1


def test_what_was_missed_is_found_by_the_whole_version() -> None:
    last = history()[-1]
    for n, version in enumerate(last.versions):
        assert last.chain(version) == Chain(version, last.messages[n:], last.version)
        assert last.at(n) == version
        for other in (version._replace(generation=2), version._replace(hash=version.hash ^ 1)):
            assert last.chain(other) is None
    assert last.at(-1) is None
    assert last.at(ROUNDS + 1) is None


def test_after_a_restore_nobody_follows_but_by_the_whole_model() -> None:
    before = history()
    server = Server(0, t=4, stamp=Stamp(1, 5), primary=before[4])
    again = restore_backup(server, 2, REPLICA.digest(before[4].w)).primary
    assert again is not None
    assert (again.w, again.version[:2], again.messages) == (
        before[4].w,
        (2, 4),
        (),
    )
    after = advance(again, b"")
    for held in before:
        assert after.chain(held.version) is None
        for broadcast in kinds(after, again.version):
            found = follow(copy_of(held), broadcast, REPLICA)
            assert found == (copy_of(after) if isinstance(broadcast, Whole) else None)


# Bytes

hashes = st.integers(0, 2**64 - 1)
messages = st.binary(max_size=20)


@st.composite
def broadcasts(draw: st.DrawFn) -> Broadcast:
    generation, first = draw(st.integers(1, 2**32 - 1)), draw(st.integers(0, 2**32 - 9))
    n = draw(st.integers(0, 6))
    versions = [Version(generation, first + i, draw(hashes)) for i in range(n + 1)]
    kind = draw(st.sampled_from([Chain, Changes, Whole]))
    if kind is Chain:
        return Chain(versions[0], tuple(draw(messages) for _ in range(n)), versions[-1])
    if kind is Changes and n:
        return Changes(tuple(versions[:-1]), draw(messages), versions[-1], draw(hashes))
    return Whole(draw(messages), versions[-1], draw(hashes))


@given(broadcasts())
def test_bytes_and_back(broadcast: Broadcast) -> None:
    data = pack(broadcast)
    assert unpack(data) == broadcast


@given(broadcasts(), st.data())
def test_any_mutation_is_refused_or_is_another_broadcast(broadcast: Broadcast, data: st.DataObject) -> None:
    """With a right checksum: only WireError, and what is taken is packed to the same bytes."""
    body = bytearray(pack(broadcast)[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        change = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if change == "set":
            body[place] = data.draw(st.integers(0, 255))
        elif change == "cut" and len(body) > 1:
            del body[place : place + data.draw(st.integers(1, 9))]
        else:
            body[place:place] = data.draw(st.binary(max_size=9))
        if not body:
            break
    mutant = bytes(body) + struct.pack("<I", zlib.crc32(body))
    found = None
    with suppress(WireError):
        found = unpack(mutant)
    assert found is None or pack(found) == mutant


@given(st.binary(max_size=80))
def test_any_bytes_are_refused(data: bytes) -> None:
    for each in (data, b"CFBC\x01" + data):
        with pytest.raises(WireError):
            unpack(each)


@given(broadcasts(), st.data())
def test_a_flipped_bit_shows(broadcast: Broadcast, data: st.DataObject) -> None:
    packed = bytearray(pack(broadcast))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError):
        unpack(bytes(packed))


def test_a_long_list_is_refused_before_it_is_read() -> None:
    header = struct.pack("<4sBBIIQQI", b"CFBC", 1, 0, 1, 2**32 - 1, 0, 0, 2**16 + 1)
    with pytest.raises(WireError, match="must list at most 65536 versions, got 65537"):
        unpack(header + struct.pack("<I", zlib.crc32(header)))


def test_versions_that_no_server_has() -> None:
    v = [Version(1, n, n) for n in range(4)]
    for make in (
        lambda: Chain(v[0], (b"", b""), v[1]),
        lambda: Chain(v[0], (b"",), v[1]._replace(generation=2)),
        lambda: Chain(v[1]._replace(hash=7), (), v[1]),
        lambda: Changes((v[0], v[0]), b"", v[2], 0),
        lambda: Changes((), b"", v[2], 0),
        lambda: pack(Whole(b"", Version(0, 1, 1), 0)),
        lambda: pack(Whole(b"", Version(1, 1, 2**64), 0)),
    ):
        with pytest.raises(WireError):
            make()
