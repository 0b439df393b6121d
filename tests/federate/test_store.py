"""States on disk: kept, refused, and the law after a crash at any step of a federation of files."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cfedavg import InputError, parse
from cfedavg.algorithm import average
from cfedavg.channel import Channel
from cfedavg.compress import plus
from cfedavg.core.errors import NotFinite
from cfedavg.core.layout import Layout
from cfedavg.core.tensors import checksum, read_tensors, save_tensors
from cfedavg.federate.client import (
    Client,
    LastAnswer,
    NeedWhole,
    Outdated,
    Resend,
    Uplink,
    make_answer,
    receive,
    unpack_message,
)
from cfedavg.federate.protocol import (
    NEVER,
    Copy,
    Mark,
    Request,
    Stamp,
    Version,
    Whole,
    compute_digest,
    make_mark,
)
from cfedavg.federate.server import (
    KnownClient,
    Primary,
    Server,
    ServerState,
    Table,
    find_held_version,
    make_request,
    new_generation,
    restore_backup,
)
from cfedavg.federate.state_file import FILE, as_array
from cfedavg.federate.stores import ClientStore, ServerStore
from cfedavg.feedback import EF21, ErrorFeedback
from cfedavg.wire import decode, encode, read_header
from tests.disk import Disk, Killed

D = 40
LAYOUT = Layout.flat(D)
NAMES = ("north", "south")


def wire(number: int, compressor: str = "topk(0.9)") -> Uplink:
    return Uplink(Channel(parse(compressor), ErrorFeedback(), LAYOUT), number)


def payload_of(message: bytes) -> bytes:
    return unpack_message(message, len(message), 0).payload


def update(number: int, t: int) -> np.ndarray:
    """Whole numbers, so that sums are exact."""
    return np.random.default_rng([number, t]).integers(-50, 50, D).astype(np.float32)


# --- a federation of files ------------------------------------------------------------------------------


DOWN = Channel(parse("topk(0.8)"), EF21(), LAYOUT)


class Vector:
    """Copies as vectors, changed by messages of the wire."""

    def apply(self, w: np.ndarray, messages: Sequence[bytes]) -> np.ndarray:
        for message in messages:
            w = np.asarray(plus(w, decode(message, layout=LAYOUT)))
        return w

    def change(self, w: np.ndarray, message: bytes) -> np.ndarray:
        raise NotImplementedError

    def replace(self, message: bytes) -> np.ndarray:
        return np.frombuffer(message, np.float32)

    def digest(self, w: np.ndarray) -> int:
        return compute_digest(w.data)


VECTOR = Vector()


def begun(x: np.ndarray) -> Server:
    """A server whose broadcasts are compressed."""
    return Server(x, primary=Primary.begin(x, 1, 0, VECTOR.digest(x)))


def advanced(server: Server, x_next: np.ndarray) -> Primary:
    """The server's copy after C(x_next - w)."""
    assert server.primary is not None
    made = DOWN.send(x_next, server.primary.w, key=server.t, t=server.t)
    return server.primary.advance(encode(made.payload, LAYOUT), np.asarray(made.memory))


def request_to(server: Server, name: str, *, whole: bool = False) -> Request:
    primary = server.primary
    assert primary is not None
    known = find_held_version(server, name)
    if known is None or whole:
        broadcast = Whole(primary.w.tobytes(), primary.version, VECTOR.digest(primary.w))
        return make_request(server, name, broadcast)
    return make_request(server, name, primary.chain(known))


def stores(root: Path) -> tuple[ServerStore, dict[str, ClientStore]]:
    return ServerStore(root / "server", "f", LAYOUT), {n: ClientStore(root, "f", n, LAYOUT) for n in NAMES}


def client_round(store: ClientStore, number: int, request: Request) -> tuple[int, bytes] | None:
    """Let a client answer a request and store that; None if it needs the whole model."""
    before = store.load()
    client, action = receive(before, request, wire(number), VECTOR)
    if isinstance(action, Outdated):
        client, action = receive(store.fresh(before.copy), request, wire(number), VECTOR)
    if isinstance(action, NeedWhole):
        return None
    if isinstance(action, Resend):
        return client.incarnation, action.message
    client, message = make_answer(client, request, update(number, request.t), wire(number))
    store.save(client)
    return client.incarnation, message


def play(root: Path, rounds: int) -> int:
    """The rounds that are left. It may end anywhere, and be called again. How many refusals there were."""
    server_store, client_stores = stores(root)
    refusals = 0
    with server_store.lock():
        served = server_store.load()
        if served is None:
            served = ServerState(begun(np.zeros(D, np.float32)))
            server_store.save(served)
        while served.server.t < rounds:
            served, refused = server_round(served, server_store, client_stores)
            refusals += refused
    return refusals


def server_round(
    served: ServerState, store: ServerStore, clients: dict[str, ClientStore]
) -> tuple[ServerState, int]:
    server, taken, payloads, refusals = served.server, {}, [], 0
    for number, (name, its) in enumerate(clients.items()):
        with its.lock():
            reply = client_round(its, number, request_to(server, name))
            if reply is None:
                refusals += 1
                reply = client_round(its, number, request_to(server, name, whole=True))
        assert reply is not None
        taken[name] = make_mark(server.stamp, *reply)
        payloads.append(decode(payload_of(reply[1]), layout=LAYOUT))
    # The sum, not the mean: exact.
    mean, weight = average(server.x, [(payload, [1.0]) for payload in payloads])
    x_next = server.x + mean * np.float32(weight)
    after = served.end_round(taken, x_next, primary_next=advanced(server, x_next))
    store.save(after)
    return after, refusals


def assert_law(root: Path) -> None:
    """Over all clients: what was computed is in the model, in residuals, or sent and not yet applied.

    And the copies of the server's version, or of the one before it, are the server's.
    """
    server_store, client_stores = stores(root)
    served = server_store.load()
    assert served is not None
    primary = served.server.primary
    assert primary is not None
    made, owed = np.zeros(D, np.float32), np.zeros(D, np.float32)
    for number, (name, store) in enumerate(client_stores.items()):
        client = store.load()
        rounds = 0 if client.answered == NEVER else client.answered.number
        made += sum((update(number, t) for t in range(rounds)), np.zeros(D, np.float32))
        owed += client.memory
        if client.sent is not None:
            mark = make_mark(client.sent.stamp, client.incarnation, client.sent.message)
            if mark != served.server.applied.get(name):
                owed = wire(number).restore(owed, client.sent.message)
        if client.copy is not None:
            assert client.copy.version.round + 1 == rounds
            w = client.copy.w
            chain = primary.chain(client.copy.version)
            assert chain is not None
            for message in chain.messages:
                w = VECTOR.apply(w, [message])
            assert np.array_equal(w, primary.w)
    assert np.array_equal(made, served.server.x + owed)


ROUNDS = 4


@pytest.mark.parametrize(
    ("share", "growth"),
    [(0.0, 4), (1.0, 4), (0.5, 4), (0.5, 0)],
    ids=["killed", "power cut", "half a power cut", "a file of clients each round"],
)
def test_a_crash_at_any_step(
    tmp_path: Path, share: float, growth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill it before each file operation, and again later; the final state is the same."""
    monkeypatch.setattr("cfedavg.federate.stores.GROWTH", growth)
    counter = Disk(math.inf)
    with counter.at_work():
        play(tmp_path / "whole", ROUNDS)
    expected = contents(tmp_path / "whole")
    assert counter.steps > 40
    for n in range(counter.steps):
        root, draw = tmp_path / f"{n}", random.Random(n)
        for at in (n, draw.randrange(counter.steps)):
            disk = Disk(at)
            with disk.at_work(), suppress(Killed):
                play(root, ROUNDS)
            disk.cut_power(share, draw)
            if (root / "server" / FILE).exists():
                assert_law(root)
        assert play(root, ROUNDS) == 0  # no copy was lost
        assert_law(root)
        assert contents(root) == expected, n


def contents(root: Path) -> Any:
    """Model, residuals, last answers and copies, and how far all have come."""
    server_store, client_stores = stores(root)
    served = server_store.load()
    assert served is not None
    primary = served.server.primary
    assert primary is not None
    clients = [store.load() for store in client_stores.values()]
    return (
        served.server.x.tolist(),
        served.server.stamp,
        [(c.memory.tolist(), c.sent, c.answered, listed_copy(c)) for c in clients],
        (primary.w.tolist(), primary.versions, primary.messages),
    )


def listed_copy(client: Client) -> Any:
    return client.copy and (client.copy.version, client.copy.w.dtype, client.copy.w.tolist())


def bare(client: Client) -> Client:
    """Without its arrays."""
    return replace(client, memory=None, copy=None)


def killed_while_it_plays(root: Path, *, ends_a_round: bool, after: float) -> None:
    """A process that plays, and SIGKILL after some seconds, or as long after it has first stored a state."""
    before = stored_at(root)
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            play(root, 10**6)
        os._exit(0)
    limit = time.monotonic() + 60
    while ends_a_round and stored_at(root) == before:
        assert time.monotonic() < limit, "no round ends"
        time.sleep(0.001)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def stored_at(root: Path) -> int:
    """When the server's state was last stored."""
    file = root / "server" / FILE
    return file.stat().st_mtime_ns if file.exists() else 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_again_and_again(tmp_path: Path, kills: int) -> None:
    draw = random.Random(0)
    play(tmp_path / "before", 1)  # loads the coders: whoever loads them himself is killed before a round
    began = time.monotonic()
    play(tmp_path / "before", 11)
    ten_rounds = time.monotonic() - began
    progress = []
    for _ in range(kills):
        killed_while_it_plays(
            tmp_path, ends_a_round=draw.random() < 0.5, after=draw.uniform(0.0, ten_rounds / 2)
        )
        if (tmp_path / "server" / FILE).exists():
            assert_law(tmp_path)
            progress.append(contents(tmp_path)[1].number)
    assert len(set(progress)) > kills / 4  # it was killed in the midst of work
    last = progress[-1]
    play(tmp_path, last + 3)
    play(tmp_path / "undisturbed", last + 3)
    assert contents(tmp_path) == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("fault", ["old", "gone"])
def test_a_client_whose_file_is_old_or_gone_starts_anew(tmp_path: Path, fault: str) -> None:
    """It loses its residual, and nothing comes into the model twice."""
    server_store, client_stores = stores(tmp_path)
    play(tmp_path, 2)
    path = client_stores["north"].folder / FILE
    old = path.read_bytes()
    play(tmp_path, 4)
    lost = client_stores["north"].load().memory
    if fault == "old":
        path.write_bytes(old)
    else:
        path.unlink()
    assert play(tmp_path, 6) == 1  # it needs the whole model, once
    served = server_store.load()
    assert served is not None
    assert [served.clients[name].incarnations for name in NAMES] == [2, 1]
    made = sum((update(number, t) for number in range(2) for t in range(6)), np.zeros(D, np.float32))
    left = sum((store.load().memory for store in client_stores.values()), np.zeros(D, np.float32))
    assert np.array_equal(made, served.server.x + left + lost)


def test_a_server_from_a_backup_goes_on(tmp_path: Path) -> None:
    """What clients were told that it has is lost with it; they go on as they are, and count it."""
    server_store, client_stores = stores(tmp_path)
    play(tmp_path, 2)
    backup = server_store.load()
    assert backup is not None
    play(tmp_path, 4)
    generation = new_generation(backup.server)
    assert backup.server.primary is not None
    digest = VECTOR.digest(backup.server.primary.w)
    server_store.save(replace(backup, server=restore_backup(backup.server, generation, digest)))
    assert play(tmp_path, 6) == 0  # the server knows of no copy, and sends the whole model at once
    served = server_store.load()
    assert served is not None
    assert served.server.stamp == Stamp(generation, 5)
    for name, store in client_stores.items():
        assert store.load().forgotten == 1
        assert served.clients[name].incarnations == 1


# --- what is kept, and what is refused ------------------------------------------------------------------


def saved(tmp_path: Path) -> tuple[ClientStore, Client]:
    store = ClientStore(tmp_path, "fed/1", "node ü", LAYOUT)
    client = Client(
        incarnation=2**63 - 1,
        memory=np.arange(D, dtype=np.float32),
        sent=LastAnswer(Stamp(2, 1), b"\x00\xff"),
        answered=Stamp(2, 1),
        confirmed=Stamp(1, 2),
        forgotten=1,
        agreed={9: 3, 10: 0},
        copy=Copy(Version(2, 7, 2**64 - 1), np.arange(D, dtype=np.float32) + np.float32(0.1)),
    )
    with store.lock():
        store.save(client)
    return store, client


def test_a_client_comes_back_as_it_was(tmp_path: Path) -> None:
    store, client = saved(tmp_path)
    for each in (client, replace(client, sent=None), replace(client, copy=None)):
        store.save(each)
        found = store.load()
        assert np.array_equal(found.memory, each.memory)
        assert bare(found) == bare(each)
        assert listed_copy(found) == listed_copy(each)
    assert not list(store.folder.glob(".*"))


def test_without_a_file_it_is_a_new_incarnation(tmp_path: Path) -> None:
    store, old = saved(tmp_path)
    path = store.folder / FILE
    path.unlink()
    found = [store.load(), store.load(), store.fresh(), old]
    assert len({client.incarnation for client in found}) == 4
    for client in found[:3]:
        assert np.array_equal(client.memory, np.zeros(D, np.float32))
        assert replace(client, memory=None) == Client(client.incarnation, None)
    assert not path.exists()  # nothing is kept before it has answered
    served = ServerState(Server(np.zeros(D, np.float32)))
    for incarnation, count in ((1, 1), (1, 1), (2, 2)):
        served = served.end_round({"a": make_mark(served.server.stamp, incarnation, b"")}, served.server.x)
        assert served.clients == {"a": KnownClient(count)}


def history() -> Primary:
    """A primary of generation 2 after 8 rounds, 3 of them in its history."""
    w = np.arange(D, dtype=np.float32)
    primary = Primary.begin(w, 2, 5, VECTOR.digest(w))
    for message in (b"one", b"", b"three"):
        primary = primary.advance(message, primary.w + np.float32(0.1))
    return primary


def listed_primary(server: Server) -> Any:
    primary = server.primary
    return primary and (primary.w.dtype, primary.w.tolist(), primary.versions, primary.messages)


def test_a_server_comes_back_as_it_was(tmp_path: Path) -> None:
    store = ServerStore(tmp_path, "f", LAYOUT)
    assert store.load() is None
    applied = {"a": Mark(Stamp(2, 8), 5, 2**64 - 1), "b": make_mark(Stamp(1, 4), 2**63 - 1, b"")}
    server = Server(np.arange(D, dtype=np.float32), 8, Stamp(2, 9), Table(applied), history())
    clients = Table({"a": KnownClient(2, [3, None, 0.1]), "b": KnownClient(1)})
    with store.lock():
        store.save(ServerState(server, clients))
    found = store.load()
    assert found is not None
    assert np.array_equal(found.server.x, server.x)
    assert replace(found.server, x=None, primary=None) == replace(server, x=None, primary=None)
    assert listed_primary(found.server) == listed_primary(server)
    assert (found.clients, found.extra, found.facts) == (clients, {}, {})


def test_a_server_keeps_what_a_driver_gives_it(tmp_path: Path) -> None:
    """np.ndarrays of any shape, also those that share memory or have gaps, and facts."""
    store, x = ServerStore(tmp_path, "f", LAYOUT), np.arange(D, dtype=np.float32)
    extra = {
        "m.weight": np.arange(6.0).reshape(2, 3).T,
        "x": x,  # names of its own
        "extra.v": x[::2],
        "counter": np.array(3),
        "empty": np.zeros((0, 2), np.float32),
        "half": np.ones(3, np.float16),
    }
    facts = {"optimiser": "FedAdam", "beta": 0.9, "best": None, "rounds": {2: [1, 2], 10: []}}
    served = ServerState(Server(x), extra=extra, facts=facts)
    with store.lock():
        store.save(served)
    found = store.load()
    assert found is not None
    assert found.extra.keys() == extra.keys()
    assert all(np.array_equal(found.extra[name], tensor) for name, tensor in extra.items())
    assert all(found.extra[name].dtype == tensor.dtype for name, tensor in extra.items())
    assert found.facts == facts | {"rounds": {"2": [1, 2], "10": []}}  # as JSON has it
    assert np.array_equal(found.server.x, x)


def many(count: int) -> ServerState:
    """A server that has heard so many clients."""
    marks = {f"client {i}": Mark(Stamp(1, 1), 2**62 + i, i) for i in range(count)}
    server, x_next = begun(np.zeros(D, np.float32)), np.ones(D, np.float32)
    notes = {who: [7, 0, 0.5] for who in marks}
    return ServerState(server).end_round(marks, x_next, notes, advanced(server, x_next))


def after(served: ServerState, taken: dict[str, Mark], x_next: np.ndarray) -> ServerState:
    return served.end_round(taken, x_next, primary_next=advanced(served.server, x_next))


def of_clients(store: ServerStore) -> Path:
    (found,) = store.folder.glob("clients.*.jsonl")
    return found


def test_a_round_costs_what_it_hears(tmp_path: Path) -> None:
    """However many clients there are: lines for those who took part, and a state of the same size."""
    sizes = []
    for count in (10, 3000):
        store = ServerStore(tmp_path / str(count), "f", LAYOUT)
        with store.lock():
            store.save(served := many(count))
            before = of_clients(store).stat().st_size
            taken = {f"client {i}": make_mark(served.server.stamp, 1, b"") for i in (3, 4)}
            store.save(now := after(served, taken, np.zeros(D, np.float32)))
        added = of_clients(store).read_bytes()[before:].splitlines()
        assert [json.loads(line)[0] for line in added] == ["client 3", "client 4"]
        sizes.append((store.folder / FILE).stat().st_size)
        found = ServerStore(tmp_path / str(count), "f", LAYOUT).load()
        assert found is not None
        assert found.server.applied == now.server.applied
        assert {who: tuple(known) for who, known in found.clients.items()} == now.clients
    assert abs(sizes[0] - sizes[1]) < 64


def test_the_file_of_clients_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one start: it is begun anew when it is four times as long as it must be, and not before."""
    monkeypatch.setattr("cfedavg.federate.stores.SHORT", 0)
    store, lengths = ServerStore(tmp_path, "f", LAYOUT), list[int]()
    with store.lock():
        store.save(served := many(50))
        compact = of_clients(store).stat().st_size
        for _ in range(40):
            taken = {who: make_mark(served.server.stamp, 1, b"") for who in list(served.clients)[:25]}
            store.save(served := after(served, taken, np.zeros(D, np.float32)))
            lengths.append(of_clients(store).stat().st_size)
    assert 4 * compact < max(lengths) < 5 * compact
    assert 4 <= sum(after < before for before, after in pairwise(lengths)) <= 8
    found = ServerStore(tmp_path, "f", LAYOUT).load()
    assert found is not None
    assert found.server.applied == served.server.applied


def test_facts_of_any_length(tmp_path: Path) -> None:
    """They are not in the header of the file, which holds 100 MB: the rows of many nodes are more."""
    store = ServerStore(tmp_path, "f", LAYOUT)
    served = ServerState(Server(np.zeros(D, np.float32)), facts={"last": ["x" * 100] * 1000})
    with store.lock():
        store.save(served)
    found = store.load()
    assert found is not None
    assert found.facts == served.facts
    assert int.from_bytes((tmp_path / FILE).read_bytes()[:8], "little") < 2000


def test_lines_that_were_added_in_vain_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the model is stored, and then the round ends without those clients."""
    store = ServerStore(tmp_path, "f", LAYOUT)
    with store.lock():
        store.save(served := many(3))
        taken = {"late": make_mark(served.server.stamp, 1, b"")}
        with monkeypatch.context() as patch:
            patch.setattr("cfedavg.core.tensors.save_file", raise_full)
            with pytest.raises(InputError, match="No space left"):
                store.save(after(served, taken, np.ones(D, np.float32)))
        assert b"late" in of_clients(store).read_bytes()
        unchanged = store.load()
        assert unchanged is not None
        assert unchanged.server.applied == served.server.applied
        store.save(now := after(served, {}, np.ones(D, np.float32)))
    found = store.load()
    assert found is not None
    assert found.server.applied == now.server.applied
    assert b"late" not in of_clients(store).read_bytes()


def raise_full(*_: Any, **more: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_older_state_through_the_same_store(tmp_path: Path) -> None:
    """What came after it is not in it, and must not come back."""
    store = ServerStore(tmp_path, "f", LAYOUT)
    with store.lock():
        store.save(older := many(2))
        store.save(after(older, {"new": make_mark(older.server.stamp, 1, b"")}, np.ones(D, np.float32)))
        for state in (older, replace(older, server=restore_backup(older.server, 7, digest=1))):
            store.save(state)
            found = store.load()
            assert found is not None
            assert found.server.applied == older.server.applied


def test_a_state_without_its_clients_is_refused(tmp_path: Path) -> None:
    store = ServerStore(tmp_path, "f", LAYOUT)
    with store.lock():
        store.save(many(3))
    path = of_clients(store)
    good = path.read_bytes()
    for data in (good[:-1], good.replace(b"client 1", b"client 9"), b"", None):
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        with pytest.raises(InputError, match=r"is damaged .*; restore a backup of the whole folder"):
            store.load()
    path.write_bytes(good + b'["half a li')  # what a killed process left
    assert store.load() is not None


def test_a_server_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    store = ServerStore(tmp_path, "f", LAYOUT)
    about = {"format": 3, "federation": "f", "kind": "server", "layout": LAYOUT.text, "applied": {}}
    tensors = {"x": np.zeros(D, np.float32)}
    save_tensors(tensors, tmp_path / FILE, {**about, "checksum": checksum(tensors, about)})
    with pytest.raises(InputError, match="must be 4 or 5, got 3; go on with the version"):
        store.load()


def test_tables_are_like_dicts() -> None:
    """And what was made of one does not change it."""
    draw = random.Random(0)
    table: Table[int] = Table()
    plain: dict[str, int] = {}
    past = [(table, plain)]
    for n in range(400):
        more = {f"{draw.randrange(300)}": n for _ in range(draw.choice([0, 1, 1, 5, 40]))}
        table, plain = table | more, plain | more
        past.append((table, plain))
        assert table.since(past[-2][0]) == more
    for found, wanted in past:
        assert dict(found) == wanted
        assert len(found) == len(wanted)
        assert table.since(found) == {who: n for who, n in plain.items() if wanted.get(who) != n}
    assert len(table._layers) < 10


def test_a_new_generation_is_above_all_before(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(np.zeros(D, np.float32))
    first = new_generation(server)
    assert first > 1_700_000_000
    assert Stamp(first, 1).sequence < 2**64
    monkeypatch.setattr(time, "time", lambda: first + 1.5)
    assert new_generation(server) == first + 1  # the same backup again, later
    monkeypatch.setattr(time, "time", lambda: 0.0)  # a clock that was set back
    assert new_generation(restore_backup(server, first)) == first + 1


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    store, _ = saved(tmp_path)
    forge(store.folder / FILE, format=1)
    with pytest.raises(InputError, match="must be 3 or 4, got 1; go on with the version"):
        store.load()


def test_states_of_others_are_refused(tmp_path: Path) -> None:
    store, _ = saved(tmp_path)
    for other, words in (
        (
            ClientStore(tmp_path, "fed/1", "node ü", Layout.flat(D + 1)),
            rf"is of another model: in the present model '' is of shape \[{D + 1}\], not \[{D}\]",
        ),
        (ClientStore(tmp_path, "fed/2", "node ü", LAYOUT), "the federation must be 'fed/2', got 'fed/1'"),
        (ClientStore(tmp_path, "fed/1", "node 2", LAYOUT), "the identity must be 'node 2', got 'node ü'"),
    ):
        other.folder = store.folder  # a folder that was copied
        with pytest.raises(InputError, match=words):
            other.load()
    server = ServerStore(store.folder, "fed/1", LAYOUT)
    with pytest.raises(InputError, match="is of another kind: the kind must be 'server', got 'client'"):
        server.load()


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    names = ("../../etc", "/etc", "a/b", ".", "..", "", "k" * 300, "ü")
    folders = [ClientStore(tmp_path, name, name, LAYOUT).folder for name in names]
    assert all(folder.parent.parent == tmp_path for folder in folders)
    assert len(set(folders)) == len(names)
    with ClientStore(tmp_path, "k" * 300, "..", LAYOUT).lock():
        pass


def test_damage_is_never_taken_for_a_state(tmp_path: Path) -> None:
    store, _ = saved(tmp_path)
    path = store.folder / FILE
    good = path.read_bytes()
    draw = random.Random(0)
    damaged = [good[:100], b"", good + b"x"]
    for _ in range(60):
        place = draw.randrange(len(good))
        damaged.append(good[:place] + bytes([good[place] ^ (1 << draw.randrange(8))]) + good[place + 1 :])
    for data in damaged:
        path.write_bytes(data)
        if is_damaged_in_copy(data, good):
            continue
        with pytest.raises(InputError, match=r"is damaged .*; move the file away to go on as a new client"):
            store.load()


def is_damaged_in_copy(data: bytes, good: bytes) -> bool:
    """Whether nothing but the bytes of the copy differs: they lie where the header says."""
    size = int.from_bytes(good[:8], "little")
    start, end = (8 + size + n for n in json.loads(good[8 : 8 + size])["copy"]["data_offsets"])
    return len(data) == len(good) and data[:start] + data[end:] == good[:start] + good[end:]


def test_a_damaged_copy_is_dropped_and_the_residual_stays(tmp_path: Path) -> None:
    store, client = saved(tmp_path)
    path = store.folder / FILE
    good, dropped = path.read_bytes(), 0
    for place in range(len(good)):
        data = good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :]
        if is_damaged_in_copy(data, good):
            path.write_bytes(data)
            found = store.load()
            assert found.copy is None
            assert np.array_equal(found.memory, client.memory)
            assert bare(found) == bare(client)
            dropped += 1
    assert dropped == 4 * D


@pytest.mark.parametrize(
    "w", [np.zeros(D, np.int16), np.zeros(D + 1, np.float32), np.zeros((1, D), np.float32)]
)
def test_a_copy_of_another_form_is_dropped(tmp_path: Path, w: np.ndarray) -> None:
    store, client = saved(tmp_path)
    digest = compute_digest(np.ascontiguousarray(w).data)
    forge(store.folder / FILE, {"copy": w}, copy=[2, 7, 1, digest])
    assert store.load().copy is None
    with pytest.raises(ValueError, match="w must be a vector of 40 float32"):
        store.save(replace(client, copy=Copy(Version(2, 7, 1), w)))


def test_a_copy_in_two_bytes_a_number(tmp_path: Path) -> None:
    """The bits of bf16."""
    bits = (np.arange(D, dtype=np.float32).view(np.int32) >> 16).astype(np.int16)
    client = ClientStore(tmp_path, "f", "a", LAYOUT, copy_dtype="int16")
    with client.lock():
        client.save(client.fresh(Copy(Version(1, 2, 3), bits)))
    found = client.load().copy
    assert found is not None
    assert (found.w.dtype, found.w.tolist()) == (np.int16, bits.tolist())
    assert ClientStore(tmp_path, "f", "a", LAYOUT).load().copy is None
    server = ServerStore(tmp_path / "s", "f", LAYOUT, copy_dtype="int16")
    primary = Primary.begin(bits, 1, 0, 5)
    with server.lock():
        server.save(ServerState(Server(np.zeros(D, np.float32), primary=primary)))
    again = server.load()
    assert again is not None
    assert again.server.primary is not None
    assert again.server.primary.w.tolist() == bits.tolist()
    with pytest.raises(InputError, match="w must be a vector of 40 float32"):
        ServerStore(tmp_path / "s", "f", LAYOUT).load()


def test_a_full_disk_leaves_copy_and_residual_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, client = saved(tmp_path)
    before = (store.folder / FILE).read_bytes()
    newer = Copy(Version(2, 8, 1), np.zeros(D, np.float32))
    with monkeypatch.context() as patch:
        patch.setattr("cfedavg.core.tensors.save_file", raise_full)
        with pytest.raises(InputError, match="No space left") as caught:
            store.save(replace(client, copy=newer, memory=np.zeros(D, np.float32)))
    assert "\n" not in str(caught.value)
    assert [path.name for path in store.folder.iterdir()] == [FILE]
    assert (store.folder / FILE).read_bytes() == before
    store.save(replace(client, copy=newer))
    assert store.load().copy is not None


GOLDEN = Path(__file__).parents[1] / "golden" / "states"  # each by its format


def golden_client(number: int) -> ClientStore:
    store = ClientStore(GOLDEN, "f", "node", Layout.flat(6))
    store.folder = GOLDEN / f"client-{number}"
    return store


def golden_states() -> tuple[Client, ServerState]:
    """What is in the newest files, which `write_golden` wrote."""
    x, w = np.arange(6, dtype=np.float32), np.arange(6, dtype=np.float32) / 2
    client = Client(7, x, LastAnswer(Stamp(1, 3), b"\x01\x02"), Stamp(1, 3), Stamp(1, 2), 0, {1: 2})
    server = Server(0 * x, primary=Primary.begin(0 * w, 1, 0, VECTOR.digest(0 * w)))
    assert server.primary is not None
    marks = {"node": make_mark(Stamp(1, 1), 7, b"\x01")}
    notes = {"node": [0, 0, 0.5]}
    served = ServerState(server).end_round(marks, x, notes, server.primary.advance(b"down", w))
    assert served.server.primary is not None
    return replace(client, copy=Copy(served.server.primary.version, w)), served


@pytest.mark.parametrize("number", [3, 4])
def test_states_of_clients_of_every_format_are_read(number: int) -> None:
    wanted, found = golden_states()[0], golden_client(number).load()
    assert found.memory.tolist() == wanted.memory.tolist()
    assert bare(found) == bare(wanted)
    assert listed_copy(found) == (listed_copy(wanted) if number > 3 else None)


@pytest.mark.parametrize("number", [4, 5])
def test_states_of_servers_of_every_format_are_read(number: int) -> None:
    wanted, found = golden_states()[1], ServerStore(GOLDEN / f"server-{number}", "f", Layout.flat(6)).load()
    assert found is not None
    assert found.server.x.tolist() == wanted.server.x.tolist()
    assert replace(found.server, x=None, primary=None) == replace(wanted.server, x=None, primary=None)
    assert listed_primary(found.server) == (listed_primary(wanted.server) if number > 4 else None)
    assert {who: tuple(known) for who, known in found.clients.items()} == wanted.clients


def write_golden(root: Path) -> None:
    client, served = golden_states()
    store, server = golden_client(4), ServerStore(root / "server-5", "f", Layout.flat(6))
    store.folder = root / "client-4"
    for each in (store, server):
        each.folder.mkdir(parents=True)
    store.save(client)
    server.save(served)


def test_the_newest_formats_are_written_to_the_byte(tmp_path: Path) -> None:
    write_golden(tmp_path)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert path.read_bytes() == (GOLDEN / path.relative_to(tmp_path)).read_bytes(), path.name


def forge(path: Path, tensors: dict[str, np.ndarray] | None = None, **changes: Any) -> None:
    """Another state in the place of one, with a right checksum: GONE takes a field away."""
    found, about = read_tensors(path)
    found = {name: each.clone() for name, each in found.items()} | (tensors or {})
    about = {name: value for name, value in (about | changes).items() if value is not GONE}
    del about["checksum"]
    vectors = {name: each.reshape(each.shape or (1,)) for name, each in found.items() if name != "copy"}
    save_tensors(found, path, about | {"checksum": checksum(vectors, about)})


GONE = object()
NO_WHOLE = [GONE, None, True, -1, 2.5, "7", [], {}, math.nan, 2**64, 10**400]
NO_STAMP = [*NO_WHOLE, 3, [1], [1, 2, 3], [0, 1], [1, 2**32], [1.0, 1], [True, 1], [[1], 1], ["a", "b"]]
OF_A_CLIENT = {
    "incarnation": NO_WHOLE,
    "forgotten": NO_WHOLE,
    "seen": [each for each in NO_STAMP if each != [0, 1]],
    "told": [each for each in NO_STAMP if each != [0, 1]],
    "sent": [each for each in NO_STAMP if each is not None],
    "agreed": [each for each in NO_STAMP if each != []] + [[], [[1, -1]], [[0, 1]], [[1, 2, 3]], [["1", 1]]],
    "copy": [GONE, None, 3, "", [], [1, 2, 3], [0, 2, 3, 4], [1, -1, 3, 4], [1, 2, 2**64, 4], [1, 2, 3, -1]],
    "layout": [GONE, None, 3, "", "[]", "3", "[" * 900 + "]" * 900],
    "format": [GONE, None, "3", 2, {}],
    "kind": [GONE, "server", []],
    "federation": [GONE, None, ["x" * 10**5]],
}
OF_A_SERVER = {
    "t": NO_WHOLE,
    "stamp": [*NO_STAMP, [1, 3], [1, 1]],  # t is 1, so that the number is at most 2; a mark has 1
    "clients": [*NO_STAMP, [1, 2, 3], ["../x", 1, 1], [1, 10**18, 0], [1, 2**63, 0], [-1, 1, 1], [1, 1.5, 1]],
    "primary": [
        GONE,
        None,
        3,
        [],
        {},
        {"start": 1, "version": 1, "lengths": 1},
        *(
            {"start": [1, 0, 5], "version": [1, 1, 5], "lengths": n}
            for n in ([], [0], [-1], [2**70], [1] * 9)
        ),
    ],
    **{name: OF_A_CLIENT[name] for name in ("layout", "federation")},
    "kind": [GONE, "client", []],
    "format": [GONE, None, "4", 3, {}],
}


def stored(folder: Path, count: int = 3) -> ServerStore:
    store = ServerStore(folder, "f", LAYOUT)
    with store.lock():
        store.save(many(count))
    return store


def unchanged(folder: Path, action: Any) -> None:
    """The state is refused in one sentence, and no file changes."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError) as caught:
        action()
    assert FILE in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", OF_A_CLIENT)
def test_a_forged_client(tmp_path: Path, name: str) -> None:
    store, _ = saved(tmp_path)
    good = (store.folder / FILE).read_bytes()
    for value in OF_A_CLIENT[name]:
        (store.folder / FILE).write_bytes(good)
        forge(store.folder / FILE, **{name: value})
        unchanged(tmp_path, store.load)


@pytest.mark.parametrize("name", OF_A_SERVER)
def test_a_forged_server(tmp_path: Path, name: str) -> None:
    store = stored(tmp_path)
    good = (tmp_path / FILE).read_bytes()
    for value in OF_A_SERVER[name]:
        (tmp_path / FILE).write_bytes(good)
        forge(tmp_path / FILE, **{name: value})
        unchanged(tmp_path, store.load)


NO_TENSORS = {
    "another length": np.zeros(D + 1, np.float32),
    "another shape": np.zeros((D, 1), np.float32),
    "another dtype": np.zeros(D),
    "no dimension": np.array(1.0, np.float32),
}


@pytest.mark.parametrize("kind", NO_TENSORS)
def test_forged_tensors(tmp_path: Path, kind: str) -> None:
    client, _ = saved(tmp_path / "client")
    server = stored(tmp_path / "server")
    stores: list[tuple[Any, list[str]]] = [
        (client, ["e", "sent", "other"]),
        (server, ["x", "facts", "w", "messages", "other"]),
    ]
    for store, names in stores:
        for name in names:
            saved(tmp_path / "client")
            server.save(many(3))
            forge(store.folder / FILE, {name: NO_TENSORS[kind]})
            unchanged(tmp_path, store.load)


@pytest.mark.parametrize(
    "tensors",
    [{"x": np.full(D, math.nan, np.float32)}, {"w": np.full(D, math.inf, np.float32)}]
    + [{"messages": as_array(data)} for data in (b"", b"another message")]
    + [{"facts": as_array(data)} for data in (b"", b"3", b"[]", b"\xff", b"[" * 10**5)],
    ids=str,
)
def test_forged_models_and_facts(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    store = stored(tmp_path)
    forge(tmp_path / FILE, tensors)
    unchanged(tmp_path, store.load)


def test_facts_that_can_be_read_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists in lists are a matter of the stack, which is deeper when a round is stored."""

    def save(found: ServerState, frames: int) -> None:
        store.save(found) if frames == 0 else save(found, frames - 1)

    monkeypatch.setattr("cfedavg.core.files.sync", lambda path: None)
    store = stored(tmp_path)
    for depth in range(750, 1000, 5):
        forge(tmp_path / FILE, {"facts": as_array(b'{"a":' + b"[" * depth + b"]" * depth + b"}")})
        with suppress(InputError):
            found = store.load()
            assert found is not None
            save(found, 20)


NO_LINES = [
    "3", "{}", "[]", '["a"]', "[" * 10**5, "nonsense",
    '[3,[[1,1],1,1],[1,null]]', '["a",[[1,1],1,1],[0,null]]',
    '["a",[[1,1],1,1],[1.5,null]]', '["a",[[1,1],1,1],3]', '["a",[[1,1],1],[1,null]]',
    '["a",[[1,2],1,1],[1,null]]', '["a",[[2,1],1,1],[1,null]]', '["a",[[1,1],-1,1],[1,null]]',
    '["a",[[1,1],9223372036854775808,1],[1,null]]', '["a",[[1,1],1,18446744073709551616],[1,null]]',
    '["a",[[true,1],1,1],[1,null]]', '["a",null,[1,null]]',
]  # fmt: skip


@pytest.mark.parametrize("line", NO_LINES)
def test_forged_lines_of_clients(tmp_path: Path, line: str) -> None:
    store, data = stored(tmp_path), line.encode() + b"\n"
    of_clients(store).write_bytes(data)
    forge(tmp_path / FILE, clients=[1, len(data), zlib.crc32(data)])
    unchanged(tmp_path, store.load)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file(tmp_path: Path, make: Any) -> None:
    """Opening a pipe would wait for ever, and so would reading a device."""
    client, _ = saved(tmp_path / "client")
    server = stored(tmp_path / "server", 1)
    for store, path in (
        (client, client.folder / FILE),
        (server, of_clients(server)),
        (server, server.folder / FILE),
    ):
        path.unlink()
        make(path)
        with pytest.raises(InputError, match="is damaged"):
            store.load()


def test_no_generation_is_left(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="start another federation"):
        new_generation(Server(np.zeros(D, np.float32), stamp=Stamp(2**32 - 1, 1)))


VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2,
    2.5,
    "",
    "a",
    [],
    {},
    [[1, 1]],
    [1, 1],
    [0, 0],
    2**31,
    2**63,
    -(2**70),
    1e308,
]


def test_any_forged_state_is_taken_or_refused(tmp_path: Path) -> None:
    """Fields at random, with a right checksum; what is taken can be stored and goes on."""
    draw, (client, _) = random.Random(0), saved(tmp_path / "client")
    server, again = stored(tmp_path / "server"), stored(tmp_path / "again")
    for path, store in ((client.folder / FILE, client), (server.folder / FILE, server)):
        good = path.read_bytes()
        names = [name for name in read_tensors(path)[1] if name != "checksum"]
        for _ in range(150):
            path.write_bytes(good)
            forge(path, **{draw.choice(names): draw.choice(VALUES) for _ in range(draw.choice([1, 1, 2]))})
            with suppress(InputError):
                found: Any = store.load()
                if store is client:
                    receive(found, Request(Stamp(3, 9), 8, Mark(Stamp(2, 1), 1, 1)), Anything())
                    client.save(found)
                else:
                    again.save(found)


class Anything:
    """A sender of messages that are none."""

    def send(self, g: np.ndarray, memory: np.ndarray, request: Request) -> tuple[bytes, np.ndarray]:
        return b"", g

    def restore(self, memory: np.ndarray, message: bytes) -> np.ndarray:
        return memory


def test_one_process_at_a_time(tmp_path: Path) -> None:
    client, server = ClientStore(tmp_path, "f", "a", LAYOUT), ServerStore(tmp_path / "s", "f", LAYOUT)
    with (
        client.lock(),
        pytest.raises(InputError, match="another process answers for this client"),
        client.lock(),
    ):
        pass
    with server.lock(), pytest.raises(InputError, match="another server works in"), server.lock():
        pass
    with client.lock():  # free again
        pass


# --- the uplink -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compressor",
    ["none", "topk(0.9)", "rd(0.7)", "topk(0.5) >> bf16", "qsgd(16)", "topk(0.5) >> int2(8)"],
)
def test_what_is_sent_and_what_is_left_make_up_the_whole(compressor: str) -> None:
    p, zero = np.random.default_rng(1).standard_normal(D).astype(np.float32), np.zeros(D, np.float32)
    uplink, request = wire(3, compressor), Request(Stamp(7, 2), 5, None)
    message, e = uplink.send(p, zero, request)
    header = read_header(payload_of(message))
    assert (header.client, header.sequence, header.round) == (3, 7 * 2**32 + 2, 5)
    np.testing.assert_allclose(uplink.restore(e, message), p, rtol=1e-5, atol=1e-6)
    if ">>" not in compressor and "qsgd" not in compressor:
        assert np.array_equal(uplink.restore(e, message), p)
    assert uplink.send(p, zero, request)[0] == message  # drawn from the round, not from a stream
    with pytest.raises(NotFinite):
        uplink.send(p * np.float32(math.nan), zero, request)
