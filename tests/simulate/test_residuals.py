"""The residual store: the same bits in memory and on disk, whatever breaks off, in bounded room."""

from __future__ import annotations

import errno
import itertools
import math
import pickle
import random
import shutil
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from cfedavg import Config, InputError, Task
from cfedavg import run as run_and_draw
from cfedavg.callbacks import Callback
from cfedavg.core.keys import Purpose, key, signed
from cfedavg.simulate.folder import Folder
from cfedavg.simulate.residual_files import OnDisk, free_memory, open_store
from cfedavg.simulate.residuals import InMemory, stochastic_bf16
from cfedavg.simulate.state import State, load
from tests.conftest import blobs, quadratic
from tests.disk import Disk, Killed
from tests.simulate.test_run import Stop, rows_without_time

run = partial(run_and_draw, draw=False)
QUIET = settings(max_examples=60, derandomize=True, database=None)
FAILURE = 1e-9  # how likely right code fails a statistical test below

LIKE = torch.zeros(5)
FLOATS = arrays(np.float32, 5, elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


def words(n: int) -> Tensor:
    return torch.tensor([signed(key(0, t, 0, Purpose.RESIDUAL)) for t in range(n)])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, dtype and shape; torch.equal would take -0 for 0."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# --- rounding at random ---------------------------------------------------------------------------------


@QUIET
@given(FLOATS, st.integers(0, 2**63 - 1))
def test_rounding_gives_a_neighbour_and_leaves_bf16_alone(values: np.ndarray, word: int) -> None:
    e = torch.from_numpy(values)
    rounded = stochastic_bf16(e, torch.tensor(word))
    pattern = e.view(torch.int32)
    down = (pattern >> 16).to(torch.int16)
    largest = (pattern & 0x7FFFFFFF) >= 0x7F7F0000
    up = torch.where((pattern & 0xFFFF == 0) | largest, down, down + 1)  # next one away from zero
    assert rounded.dtype == torch.bfloat16
    assert bool(((rounded.view(torch.int16) == down) | (rounded.view(torch.int16) == up)).all())
    assert bool(torch.isfinite(rounded).all())
    assert same(stochastic_bf16(rounded.float(), torch.tensor(word ^ 1)), rounded)


@QUIET
@given(st.floats(width=32, min_value=2.0**-100, max_value=2.0**100), st.sampled_from([-1.0, 1.0]))
def test_rounding_is_unbiased(size: float, sign: float) -> None:
    n, d = 64, 256
    v = torch.tensor(sign * size)
    low = int(v.view(torch.int32) & 0xFFFF)
    rounded = stochastic_bf16(v.expand(n, d), words(n))
    down = (v.view(torch.int32) >> 16).to(torch.int16)
    ups = int((rounded.view(torch.int16) != down).sum())
    assert abs(ups - n * d * low / 2**16) <= math.sqrt(n * d * math.log(2 / FAILURE) / 2)  # Hoeffding


def test_small_updates_are_not_swallowed() -> None:
    kept, nearest = torch.ones(400).bfloat16(), torch.ones(400).bfloat16()
    for word in words(1000):
        kept = stochastic_bf16(kept.float() + 2.0**-12, word)
        nearest = (nearest.float() + 2.0**-12).bfloat16()
    assert float(nearest.float().mean()) == 1.0
    assert float(kept.float().mean()) == pytest.approx(1 + 1000 * 2.0**-12, rel=0.01)


def test_rounding_of_a_block_is_that_of_its_rows() -> None:
    e = torch.randn(3, 1000)
    block = stochastic_bf16(e, words(3))
    assert all(same(block[i], stochastic_bf16(e[i], words(3)[i])) for i in range(3))
    assert same(stochastic_bf16(e.double(), words(3)), block)
    assert not same(stochastic_bf16(e[0], words(2)[0]), stochastic_bf16(e[0], words(2)[1]))


def test_nothing_finite_becomes_infinite() -> None:
    top = torch.finfo(torch.bfloat16).max
    for huge in (torch.tensor([3.4028234e38, -3.4028234e38]), torch.tensor([1e300, -1e300]).double() * 1e8):
        for word in words(50):
            assert stochastic_bf16(huge, word).tolist() == [top, -top]


@pytest.mark.gpu
def test_rounding_has_the_same_bits_on_the_gpu() -> None:
    e = torch.randn(7, 10_007)
    assert same(stochastic_bf16(e.cuda(), words(7).cuda()).cpu(), stochastic_bf16(e, words(7)))


# --- the stores -----------------------------------------------------------------------------------------

UPDATES = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, 5), FLOATS, max_size=4),
        st.sampled_from(["go on", "go on", "break off", "checkpoint"]),
    ),
    max_size=8,
)


def files(folder: Path) -> set[Path]:
    return set(folder.iterdir()) if folder.exists() else set()


def assert_same_residuals(a: Any, b: Any, like: Tensor = LIKE) -> None:
    assert dict(a.norms2) == dict(b.norms2)
    assert all(same(a.get(i, like), b.get(i, like)) for i in range(6))


@QUIET
@given(UPDATES, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_disk_equals_memory(updates: list[tuple[dict[int, np.ndarray], str]], dtype: torch.dtype) -> None:
    """Through any updates, broken-off rounds and checkpoints; and a checkpoint's files are never touched."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path) / "residuals"
        memory, disk = InMemory(), OnDisk(folder)
        known, reread = memory, OnDisk(folder)  # what the last checkpoint refers to
        before = disk
        for number, (values, then) in enumerate(updates):
            new = {i: torch.from_numpy(v).clamp(-1e18, 1e18).to(dtype) for i, v in values.items()}
            after = disk.update(new)
            if then == "break off":
                assert_same_residuals(disk, memory)
                assert_same_residuals(reread, known)
                for path in after.paths() - disk.paths():  # as the next start would
                    path.unlink()
                continue
            before, disk, memory = disk, after, memory.update(new)
            if then == "checkpoint":
                disk.flush()
                disk.settle()
                known, reread = memory, OnDisk(folder, disk.versions, norms2=disk.norms2)
                assert files(folder) == disk.paths(), number
            assert_same_residuals(disk, memory)
            assert_same_residuals(reread, known)
            if then != "checkpoint":
                assert_same_residuals(before, before)  # readable still
            assert files(folder) <= disk.paths() | reread.paths() | before.paths()


def test_get_gives_the_dtype_asked_for(tmp_path: Path) -> None:
    e = stochastic_bf16(torch.randn(5), words(1)[0])
    for store in (InMemory(), OnDisk(tmp_path)):
        got = store.update({3: e}).get(3, LIKE.double())
        assert same(got, e.double())
        assert same(store.get(3, LIKE), LIKE)
    (file,) = tmp_path.iterdir()
    assert file.name == "000003-000001.safetensors"
    assert file.stat().st_size < 2 * 5 + 250


def test_parts_and_their_union(tmp_path: Path) -> None:
    new = {i: torch.randn(5) for i in range(6)}
    later = {i: torch.randn(5) for i in range(0, 6, 2)}
    for store in (InMemory(), OnDisk(tmp_path / "r")):
        whole = store.update(new)
        whole.flush()
        whole.settle()
        parts = [whole.select(range(rank, 6, 2)) for rank in range(2)]
        assert [sorted(part.norms2) for part in parts] == [[0, 2, 4], [1, 3, 5]]
        parts[0] = parts[0].update(later)
        together = store.merge([parts[1], parts[0]])
        assert_same_residuals(together, whole.update(later))
        with pytest.raises(ValueError, match="two stores hold a residual"):
            store.merge([whole, parts[0]])
        together.flush()
        together.settle()
        assert_same_residuals(together, InMemory().update(new | later))
    assert files(tmp_path / "r") == together.paths()  # type: ignore[attr-defined]


def test_pickles_small(tmp_path: Path) -> None:
    store = OnDisk(tmp_path).update({i: torch.randn(100_000) for i in range(4)})
    data = pickle.dumps(store.select([1, 2]).update({1: torch.zeros(100_000)}))
    assert len(data) < 1000
    assert same(pickle.loads(data).get(2, torch.zeros(100_000)), store.get(2, torch.zeros(100_000)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_file_is_read_into_given_memory(tmp_path: Path, dtype: torch.dtype, wanted: torch.dtype) -> None:
    """Files are not mapped: they hold no memory of the process and can be deleted at once."""
    e = torch.randn(1000).to(dtype)
    store = OnDisk(tmp_path).update({3: e})
    rows = torch.empty(3, 1000, dtype=wanted)
    store.copy_to(3, rows[1])
    assert same(rows[1], e.to(wanted))
    found = store.stored(3, e.shape)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()
    store.path(3, 1).write_bytes(b"")
    assert same(found, e)


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "missing", "other client", "old", "length"])
def test_a_damaged_file_is_recognised(tmp_path: Path, damage: str) -> None:
    store = OnDisk(tmp_path).update({i: torch.randn(5) for i in range(2)})
    path, other = (store.path(i, 1) for i in range(2))
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[-1] ^= 1
    elif damage == "cut":
        data = data[:-3]
    elif damage == "empty":
        data = bytearray()
    elif damage == "other client":
        data = bytearray(other.read_bytes())
    elif damage == "old":
        store = store.update({0: torch.randn(5)})
        path = store.path(0, 2)
    path.write_bytes(data)
    if damage == "missing":
        path.unlink()
    how = "is missing" if damage == "missing" else r"is damaged \(.*\)"
    with pytest.raises(InputError, match=f"^the residual file {path} {how}; start the run again$"):
        store.get(0, torch.zeros(6) if damage == "length" else LIKE)


def test_any_flipped_bit_is_recognised(tmp_path: Path) -> None:
    store = OnDisk(tmp_path).update({0: torch.randn(5)})
    path, right = store.path(0, 1), store.get(0, LIKE)
    whole = path.read_bytes()
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        try:
            assert same(store.get(0, LIKE), right)  # a space of the header, say
        except InputError:
            continue


def test_where_residuals_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def choose(where: str, size: int, device: torch.device) -> str:
        with open_store(where, size, device, tmp_path) as store:
            return str(store.device) if isinstance(store, InMemory) else "disk"

    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert 2**20 < free_memory(cpu) < 2**50
    free = {cpu: 600, gpu: 300}
    monkeypatch.setattr("cfedavg.simulate.residual_files.free_memory", lambda device: free[device])
    assert [choose("auto", size, cpu) for size in (200, 201)] == ["cpu", "disk"]
    assert [choose("auto", size, gpu) for size in (100, 101, 200, 201)] == ["cuda", "cpu", "cpu", "disk"]
    for device in (cpu, gpu):
        found = [choose(where, 1, device) for where in ("device", "memory", "disk")]
        assert found == [str(device), "cpu", "disk"]
    with pytest.raises(InputError, match="`residuals` must be auto, device, memory or disk, got 'here'"):
        Config(residuals="here")
    with pytest.raises(InputError, match="`residual_precision` must be full or bf16, got 'int8'"):
        Config(residual_precision="int8")


# --- runs -----------------------------------------------------------------------------------------------

BASE = Config(
    rounds=5,
    local_steps="2",
    participation=0.6,
    drop_rate=0.2,
    compressor="topk(0.7)",
    checkpoint_every=2,
    residuals="disk",
    engine="sequential",  # to list steps would take longer than these runs
)


def small(clients: int = 5) -> Task:
    return quadratic(torch.randn(clients, 6, generator=torch.Generator().manual_seed(0)))


def contents(out: Path) -> dict[str, Any]:
    """Everything a run leaves, but the clock's readings and its own configuration."""
    found: dict[str, Any] = {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")
    }
    assert not list(out.rglob(".*"))
    return found | {"rows": rows_without_time(out)}


def state_in(out: Path) -> State:
    """The state in a finished run's checkpoint, whatever kind of store it has."""
    found: list[State] = []
    real = Folder.begin

    def begin(self: Folder, *args: Any, **more: Any) -> Any:
        path, config, identity, start = self.path / "checkpoint.safetensors", *args
        found.append(load(path, identity, start, self.residuals, config.clients)[0])
        return real(self, *args, **more)

    from cfedavg.core.config import read_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "begin", begin)
        run(read_config(out / "config.toml"), blobs(), out=out, resume=True)
    return found[0]


# What is the quickest to run, and has versions that are replaced before a checkpoint, after it, or never.
QUICK = BASE.replace(local_steps="1", checkpoint_every=3)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["telling", "all"])
@pytest.mark.parametrize(
    ("precision", "share", "spared"),
    [("full", 0.0, 0), ("full", 1.0, 0), ("full", 1.0, 1), ("bf16", 0.5, 0)],
    ids=["killed", "power cut", "power cut that spares the last change", "half a power cut"],
)
def test_killed_at_any_step(tmp_path: Path, precision: str, share: float, spared: int, every: bool) -> None:
    """Killed before each thing done to a file, killed again while resuming, then run to its end.

    By default before the first and the last of those that the same line does, called in the same way.
    """
    config = QUICK.replace(residual_precision=precision)
    task, counter = small(clients=3), Disk(math.inf)
    with counter.at_work():
        run(config, task, out=tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    assert counter.steps > 60
    assert any(name.startswith("residuals/") for name in expected)
    for n in range(counter.steps) if every else counter.telling():
        out, draw = tmp_path / f"{n}", random.Random(n)
        for at in (n, draw.randrange(counter.steps // 2)):
            disk = Disk(at)
            with disk.at_work(), suppress(Killed):  # the second time it may be through before
                run(config, task, out=out, resume=True)
            disk.cut_power(share, draw, spared)
        with Disk(math.inf).at_work():  # spares the real disk its syncs
            run(config, task, out=out, resume=True)
        assert contents(out) == expected, n
        shutil.rmtree(out)


@pytest.mark.parametrize("precision", ["full", "bf16"])
def test_disk_and_memory_give_the_same_run(tmp_path: Path, precision: str) -> None:
    """Throughout, or changed on the way, and with Ctrl-C in between."""
    config = BASE.replace(residual_precision=precision)
    expected = None
    for ways in (*itertools.product(("memory", "disk"), repeat=3),):
        out = tmp_path / "-".join(ways)
        for way, at, how in zip(ways, (1, 3), (KeyboardInterrupt, Killed), strict=False):
            with pytest.raises(how):
                run(config.replace(residuals=way), blobs(), out=out, resume=True, callbacks=[Stop(at, how)])
        run(config.replace(residuals=ways[2]), blobs(), out=out, resume=True)
        state = state_in(out)
        assert isinstance(state.residuals, OnDisk if ways[2] == "disk" else InMemory)
        assert (out / "residuals").exists() == (ways[2] == "disk")
        found = (rows_without_time(out), (out / "model.safetensors").read_bytes(), state)
        expected = expected or found
        assert found[:2] == expected[:2]
        assert_same_residuals(state.residuals, expected[2].residuals, state.x)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        assert all(state.residuals.stored(i, state.x.shape).dtype == dtype for i in state.residuals.norms2)


def test_precision_cannot_change(tmp_path: Path) -> None:
    run(BASE, small(), out=tmp_path / "r")
    with pytest.raises(InputError, match="cannot resume: `residual_precision` is 'bf16'"):
        run(BASE.replace(residual_precision="bf16"), small(), out=tmp_path / "r", resume=True)


class Watch(Callback):
    """The most files of residuals at the end of a round, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self.said = folder, 0, list[str]()

    def on_row(self, row: dict[str, Any]) -> None:
        self.most = max(self.most, len(files(self.folder)))

    def on_message(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("every", [0, 1, 3])
def test_room_on_disk_is_bounded_and_announced(tmp_path: Path, every: int) -> None:
    watch = Watch(tmp_path / "r" / "residuals")
    config = BASE.replace(rounds=20, checkpoint_every=every, drop_rate=0.0)
    run(config, small(), out=tmp_path / "r", callbacks=[watch])
    assert watch.most <= 5 + 3 + (min(5, 3 * every) if every else 0)
    most = (5 + 3 + min(5, 3 * (every or 20))) * 6 * 4
    (said,) = (text for text in watch.said if "residuals live on disk" in text)
    assert said == f"residuals live on disk, in {watch.folder}, and can grow to {most} B"
    assert len(files(watch.folder)) == 5


def test_without_out_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = run(BASE, small()).rows
    with pytest.raises(KeyboardInterrupt):
        run(BASE, small(), callbacks=[Stop(2, KeyboardInterrupt)])
    assert list(tmp_path.iterdir()) == []
    memory = run(BASE.replace(residuals="memory"), small()).rows
    assert [r["error_norm2"] for r in rows] == [r["error_norm2"] for r in memory]
    watch = Watch(tmp_path)
    run(BASE.replace(feedback="none"), small(), callbacks=[watch])
    assert not any("disk" in text for text in watch.said)


@pytest.mark.parametrize("place", ["cfedavg.core.tensors.save_file", "os.fsync"])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Whenever the disk fills up, a sentence says what to do, and the run goes on when there is room."""
    run(BASE, small(), out=tmp_path / "whole")
    sentences = 0
    for n in itertools.count(1):
        out, calls = tmp_path / f"{n}", itertools.count(1)
        with monkeypatch.context() as patch:
            real = resolve_name(place)

            def full(*args: Any, n: int = n, calls: Any = calls, real: Any = real, **more: Any) -> None:
                if next(calls) >= n:
                    raise OSError(errno.ENOSPC, "No space left on device")
                real(*args, **more)

            patch.setattr(place, full)
            try:
                run(BASE, small(), out=out)
                break
            except InputError as found:
                text = str(found)
        assert "No space" in text
        if "residuals cannot be kept" in text:
            sentences += 1
            assert f"in {out / 'residuals'} (" in text
            assert "another `out`, or with `residual_precision` bf16" in text
        run(BASE, small(), out=out, resume=True)
        assert contents(out) == contents(tmp_path / "whole"), n
    assert sentences > 5


def test_resume_needs_its_files(tmp_path: Path) -> None:
    out = tmp_path / "r"
    run(BASE, small(), out=out)
    stray = out / "residuals" / "notes.txt"
    stray.write_text("not ours")
    leftovers = [out / "residuals" / name for name in ("000000-000099.safetensors",
                 ".000001-000002.safetensors.77.tmp")]  # fmt: skip
    for path in leftovers:
        path.write_text("of a broken-off round")
    run(BASE, small(), out=out, resume=True)
    assert stray.exists()
    assert not any(path.exists() for path in leftovers)
    gone = min(files(out / "residuals") - {stray})
    gone.rename(tmp_path / "elsewhere")
    before = contents(out)
    with pytest.raises(
        InputError, match=f"cannot resume: the residual file {gone} is missing; start again in another folder"
    ):
        run(BASE.replace(rounds=6), small(), out=out, resume=True)
    assert contents(out) == before


def test_a_moved_run_goes_on(tmp_path: Path) -> None:
    run(BASE.replace(rounds=3), small(), out=tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there")
    run(BASE, small(), out=tmp_path / "there", resume=True)
    run(BASE, small(), out=tmp_path / "whole")
    assert contents(tmp_path / "there") == contents(tmp_path / "whole")
