"""Residuals that threads move: the same bits as without threads, errors that come up, and no thread left."""

from __future__ import annotations

import errno
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cfedavg import InputError
from cfedavg import run as run_and_draw
from cfedavg.core.errors import Diverged
from cfedavg.simulate.mover import Mover
from cfedavg.simulate.residual_files import OnDisk
from cfedavg.simulate.residuals import InMemory, Residuals, gather
from tests.conftest import blobs
from tests.disk import Disk, Killed
from tests.simulate.test_residuals import BASE, QUICK, contents, same, small
from tests.simulate.test_run import Stop

run = partial(run_and_draw, draw=False)
QUIET = settings(max_examples=40, derandomize=True, database=None)
CPU, LIKE = torch.device("cpu"), torch.zeros(5)


class OnHost(InMemory):
    """Residuals in the memory of the host, moved as beside a GPU, though the engine is on a CPU."""

    def lives_on(self, device: torch.device) -> bool:
        return False


@contextmanager
def moving(device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Iterator[Mover]:
    mover = Mover(device, 4, dtype)
    mover._size, mover._writers = 4, ThreadPoolExecutor(4)  # pieces of one client
    try:
        yield mover
    finally:
        mover.close()


# --- the same bits --------------------------------------------------------------------------------------


@QUIET
@given(
    st.lists(st.lists(st.integers(0, 6), max_size=4, unique=True), max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from(["host", "disk"]),
)
def test_threads_move_the_same_bits(rounds: list[list[int]], dtype: torch.dtype, where: str) -> None:
    """Rounds as an engine runs them: rows are asked for in any order, also twice."""
    generator = torch.Generator().manual_seed(len(rounds))
    with tempfile.TemporaryDirectory() as path, moving(dtype=dtype) as mover:
        store: Residuals = OnHost() if where == "host" else OnDisk(Path(path) / "r")
        plain = InMemory()
        for clients in rounds:
            rows = mover.fetch(store, clients, LIKE)
            for some in (clients, clients[::-1], clients[:1] * 3, clients[1:]):
                assert same(rows(some), gather(plain, some, LIKE))
            new = dict(zip(clients, torch.randn(len(clients), 5, generator=generator).to(dtype), strict=True))
            plain = plain.update({i: e.clone() for i, e in new.items()})
            store = mover.update(store, new)
        store.flush()
        store.settle()
        assert store.norms2 == plain.norms2
        assert all(same(store.get(i, LIKE), plain.get(i, LIKE)) for i in range(7))
        assert len(list((Path(path) / "r").glob("*"))) == (len(plain.norms2) if where == "disk" else 0)


def test_what_is_not_copied_is_not_changed(tmp_path: Path) -> None:
    """An old store stays readable, and rows stay as they were, while later rounds use the buffers."""
    with moving() as mover:
        first = mover.update(OnDisk(tmp_path), {i: torch.full((5,), float(i)) for i in range(4)})
        rows = mover.fetch(first, [0, 1, 2, 3], LIKE)([0, 1, 2, 3])
        second = mover.update(first, {i: torch.full((5,), 9.0) for i in range(4)})
        assert bool((mover.fetch(second, [0, 1, 2, 3], LIKE)([0, 1, 2, 3]) == 9).all())
        assert rows[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert first.get(2, LIKE).tolist() == [2.0] * 5


def test_a_client_that_never_took_part_costs_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    with moving() as mover:
        store = OnDisk(tmp_path / "r")
        rows = mover.fetch(store, [0, 1, 2], LIKE)
        assert same(rows([0, 2]), torch.zeros(2, 5))
        assert not mover._buffers
        assert threading.active_count() == before
        after = mover.update(store, {1: torch.ones(5)})
        rows = mover.fetch(after, [0, 1, 2], LIKE)
        assert same(rows([0, 1]), torch.stack([torch.zeros(5), torch.ones(5)]))
        assert [path.name for path in (tmp_path / "r").iterdir()] == ["000001-000001.safetensors"]


# --- waiting, and errors --------------------------------------------------------------------------------


class Gate:
    """Holds the threads that write a client's residual until it is opened, or lets them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, client: int) -> None:
        self.open, self.error = threading.Event(), False
        real = OnDisk._save

        def save(store: OnDisk, who: int, version: int, e: Tensor) -> None:
            if who == client:
                self.open.wait(60)
                if self.error:
                    with store._naming_folder():
                        raise OSError(errno.ENOSPC, "No space left on device")
            real(store, who, version, e)

        monkeypatch.setattr(OnDisk, "_save", save)


def waits(call: Callable[[], Any], gate: Gate) -> Any:
    """Return the result of a call that waits for the gate, which is opened only later."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        time.sleep(0.05)
        assert not future.done()
        gate.open.set()
        return future.result()


def four(value: float = 1.0) -> dict[int, Tensor]:
    return {i: torch.full((5,), value + i) for i in range(4)}


def test_only_readers_of_a_residual_wait_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, 2)
    with moving() as mover:
        store = mover.update(OnDisk(tmp_path), four())
        for client in (0, 1, 3):
            store.get(client, LIKE)
        assert [store.is_being_written(client) for client in range(5)] == [False, False, True, False, False]
        rows = mover.fetch(store, [0, 1, 2, 3], LIKE)
        assert rows([1, 0, 3])[:, 0].tolist() == [2.0, 1.0, 4.0]
        assert waits(lambda: rows([2]), gate)[0, 0] == 3.0


@pytest.mark.parametrize("what", ["update", "flush", "pickle"])
def test_who_needs_all_residuals_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The next update does too: residuals of one round are being written at a time, not of more."""
    gate = Gate(monkeypatch, 2)
    with moving() as mover:
        store = mover.update(OnDisk(tmp_path), four())
        needs = {"update": lambda: mover.update(store, four(9.0)), "flush": store.flush,
                 "pickle": store.__getstate__}  # fmt: skip
        waits(needs[what], gate)


@pytest.mark.parametrize("what", ["update", "flush", "read", "get"])
def test_errors_of_threads_come_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    gate = Gate(monkeypatch, 2)
    gate.error = True
    gate.open.set()
    with moving() as mover:
        store = mover.update(OnDisk(tmp_path), four())
        needs: dict[str, Callable[[], Any]] = {
            "update": lambda: mover.update(store, four(9.0)),
            "flush": store.flush,
            "read": lambda: mover.fetch(store, [2], LIKE)([2]),
            "get": lambda: store.get(2, LIKE),
        }
        with pytest.raises(InputError, match=r"^the residuals cannot be kept in .* No space left"):
            needs[what]()
        assert store.get(0, LIKE)[0] == 1.0


def test_closing_ends_threads_that_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader waits for a residual whose turn to be written never comes."""
    before, gate = set(threading.enumerate()), Gate(monkeypatch, 0)
    with moving() as mover:
        store = mover.update(OnDisk(tmp_path), four())
        mover.fetch(store, [3], LIKE)
        threading.Timer(0.05, gate.open.set).start()
    assert {each for each in threading.enumerate() if not isinstance(each, threading.Timer)} == before


# --- runs -----------------------------------------------------------------------------------------------

MOVED = BASE.replace(engine="auto", rounds=6, checkpoint_every=4)  # which steps together


def late(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Let files be written and read late, by some milliseconds or not at all."""
    draw = random.Random(seed)
    for name in ("_save", "_read"):
        real = getattr(OnDisk, name)

        def wait(*args: Any, real: Any = real) -> Any:
            time.sleep(draw.choice([0, 0, 0.002, 0.006]))
            return real(*args)

        monkeypatch.setattr(OnDisk, name, wait)


@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("feedback", ["ef", "ef21"])
def test_a_run_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, feedback: str
) -> None:
    """The engine with residuals that threads move in memory, against the engine that keeps its own."""
    if feedback == "ef21":
        precision = "full"
    config = MOVED.replace(residuals="memory", residual_precision=precision, feedback=feedback)
    run(config, blobs(), out=tmp_path / "device")
    monkeypatch.setattr(InMemory, "lives_on", OnHost.lives_on)
    run(config, blobs(), out=tmp_path / "host")
    assert contents(tmp_path / "host") == contents(tmp_path / "device")
    run(config.replace(rounds=3), blobs(), out=tmp_path / "resumed")
    run(config, blobs(), out=tmp_path / "resumed", resume=True)
    assert contents(tmp_path / "resumed") == contents(tmp_path / "device")


def test_the_three_places_are_one_on_a_cpu_or_give_the_same_run(tmp_path: Path) -> None:
    for where in ("device", "memory", "disk"):
        run(MOVED.replace(residuals=where), blobs(), out=tmp_path / where)
    assert contents(tmp_path / "device") == contents(tmp_path / "memory")
    models = {(tmp_path / where / "model.safetensors").read_bytes() for where in ("device", "disk")}
    assert len(models) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_the_three_places_give_the_same_run_on_a_gpu(tmp_path: Path, precision: str, engine: str) -> None:
    config = MOVED.replace(device="cuda", residual_precision=precision, engine=engine, rounds=12)
    for where in ("device", "memory", "disk"):
        run(config.replace(residuals=where), blobs(), out=tmp_path / where)
        config_half = config.replace(residuals=where, rounds=5)
        run(config_half, blobs(), out=tmp_path / f"{where} resumed")
    for where, then in (("device", "memory"), ("memory", "disk"), ("disk", "device")):
        run(config.replace(residuals=then), blobs(), out=tmp_path / f"{where} resumed", resume=True)
        whole, resumed = contents(tmp_path / then), contents(tmp_path / f"{where} resumed")
        if then == "disk":  # residuals that come to the disk later have lower version numbers
            names = ("rows", "model.safetensors")
            whole, resumed = ({name: each[name] for name in names} for each in (whole, resumed))
        assert whole == resumed
    found = [contents(tmp_path / where) for where in ("device", "memory", "disk")]
    assert found[0] == found[1]
    assert found[0]["rows"] == found[2]["rows"]
    assert found[0]["model.safetensors"] == found[2]["model.safetensors"]


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["host", "disk"])
def test_pinned_copies_on_streams(tmp_path: Path, where: str) -> None:
    """Many rounds without a wait for the GPU between them; the GPU is busy when rows are copied."""
    device, d = torch.device("cuda"), 300_001
    like, busy = torch.zeros(d, device=device), torch.randn(2000, 2000, device=device)
    mover = Mover(device, 16, torch.float32)
    store: Residuals = InMemory(device=CPU) if where == "host" else OnDisk(tmp_path / "r")
    plain = InMemory()
    draw = random.Random(0)
    try:
        for t in range(30):
            clients = sorted(draw.sample(range(40), 16))
            rows = mover.fetch(store, clients, like)
            for _ in range(10):
                busy = (busy @ busy).tanh()
            e = 0.5 * rows(clients) + torch.randn(16, d, device=device) + busy[0, 0]
            plain = plain.update({i: row.clone() for i, row in zip(clients, e, strict=True)})
            store = mover.update(store, dict(zip(clients, e, strict=True)))
            del e
            if t % 7 == 0:
                store.flush()
                store.settle()
        assert all(same(store.get(i, like), plain.get(i, like)) for i in range(40))
        assert not any(e.is_cuda for e in getattr(store, "vectors", {}).values())
    finally:
        mover.close()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("share", [0.0, 1.0], ids=["killed", "power cut"])
def test_killed_while_threads_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, share: float
) -> None:
    """Killed anywhere, with files that are written early or late, again and again, then run to its end."""
    task, draw, out = small(clients=4), random.Random(seed), tmp_path / "r"
    run(QUICK, task, out=tmp_path / "whole")
    late(monkeypatch, seed)
    for _ in range(4):
        disk = Disk(draw.randrange(90))
        with disk.at_work(), suppress(Killed):
            run(QUICK, task, out=out, resume=True)
        disk.cut_power(share, draw)
    run(QUICK, task, out=out, resume=True)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_while_threads_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Ctrl-C after a round, whose residuals are still being written, or in the middle of an update."""
    task, out = blobs(), tmp_path / "r"
    run(MOVED, task, out=tmp_path / "whole")
    late(monkeypatch, seed)
    with pytest.raises(KeyboardInterrupt):
        run(MOVED, task, out=out, resume=True, callbacks=[Stop(1, KeyboardInterrupt)])
    real = Mover.update

    def update(self: Mover, residuals: Residuals, new: Any) -> Any:
        real(self, residuals, new)
        if residuals.norms2 and residuals.norms2.keys() >= new.keys():
            raise KeyboardInterrupt
        return real(self, residuals, new)  # an update that is made again, after one that nobody uses

    with monkeypatch.context() as patch:
        patch.setattr(Mover, "update", update)
        with pytest.raises(KeyboardInterrupt):
            run(MOVED, task, out=out, resume=True)
    run(MOVED, task, out=out, resume=True)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("ends", ["well", "Ctrl-C", "killed", "diverged", "disk full", "damaged"])
def test_no_thread_outlives_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    late(monkeypatch, 0)
    before = set(threading.enumerate())
    started = list[str]()
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread.name)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    config, callbacks = MOVED, list[Stop]()
    errors: dict[str, type[BaseException]] = {
        "Ctrl-C": KeyboardInterrupt, "killed": Killed, "diverged": Diverged, "disk full": InputError,
        "damaged": ZeroDivisionError,
    }  # fmt: skip
    if ends in ("Ctrl-C", "killed"):
        callbacks = [Stop(2, errors[ends])]
    elif ends == "diverged":
        config = MOVED.replace(eta_local=1e12)
    elif ends == "disk full":

        def full(*args: Any, **more: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("cfedavg.core.tensors.save_file", full)
    elif ends == "damaged":
        monkeypatch.setattr(OnDisk, "_read", lambda *args: 1 / 0)
    with pytest.raises(errors[ends]) if ends in errors else nullcontext():
        run(config, blobs(), out=tmp_path / "r", callbacks=callbacks)
    assert any("ThreadPoolExecutor" in name for name in started)
    assert set(threading.enumerate()) == before
