"""Several processes: the same bits as one, whatever ends them, and nothing of them is left.

Most workers here are forked from the test's process: that takes no time, and what a test patches reaches
them. Those of the commands at the end are spawned, as they always are outside of tests.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cfedavg import Config, InputError, Task, TopK
from cfedavg import run as run_and_draw
from cfedavg.callbacks import Callback
from cfedavg.cli import main
from cfedavg.core.config import read_config
from cfedavg.core.errors import Diverged
from cfedavg.launch.processes import Ports
from cfedavg.simulate import workers
from cfedavg.simulate.engines import RankLost, Ranks, check_same, describe_run
from cfedavg.simulate.plan import Plan
from tests.conftest import blobs
from tests.disk import Killed
from tests.simulate.test_run import WAITING, Stop, rows_without_time

run = partial(run_and_draw, draw=False)
HERE = os.getpid()
LIMIT = 300.0  # seconds after which a test's workers are killed, so that it fails instead of waiting

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

BASE = Config(
    rounds=6,
    local_steps="1..4",
    batch_size=9,
    participation=0.7,
    drop_rate=0.2,
    local_optimiser="sgd(momentum=0.9)",
    weighting="samples",
    compressor="topk(0.8) >> qsgd(4)",
    compressor_down="topk(0.9) >> int3(16)",
    schedule="decaying(a=2)",
    sample_iterate=True,
    checkpoint_every=2,
    steps_per_second="5..50",
    link="up=10kbit..1Mbit",
    engine="sequential",
    residuals="memory",
)


def task(m: int = 7) -> Task:
    """Clients of different sizes, BatchNorm, and a test set of three batches."""
    base, test = blobs(m), blobs(1, n=1100, seed=1).clients[0]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return Task(model, base.clients, test=test, version="blobs")


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No worker outlives its run, and none keeps a test waiting; on a GPU they compile first."""
    limit = LIMIT * (10 if request.node.get_closest_marker("gpu") else 1)
    timer = threading.Timer(limit, lambda: [child.kill() for child in multiprocessing.active_children()])
    timer.start()
    yield
    late = not timer.is_alive()
    timer.cancel()
    timer.join()
    assert not multiprocessing.active_children()
    assert not late, "the workers had to be killed"


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fork = multiprocessing.get_context("fork")

    def context(kind: str) -> Any:
        """No worker may collect what it inherits of a former run's connections: it lacks their threads."""
        gc.collect()
        gc.disable()
        return fork

    monkeypatch.setattr("cfedavg.simulate.workers.multiprocessing.get_context", context)
    as_it_is = SimpleNamespace(dumps=lambda job: job, loads=lambda job: job)  # a fork has everything
    monkeypatch.setattr("cfedavg.simulate.workers.pickle", as_it_is)
    yield
    gc.enable()


def contents(out: Path) -> dict[str, Any]:
    """What a run leaves: checkpoint, models, residuals, rows; not the clock's readings, nor its config."""
    assert not list(out.rglob(".*"))
    files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.safetensors")}
    return files | {"rows": rows_without_time(out)}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["rows"] == expected["rows"]
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Config], dict[str, Any]]:
    """What a configuration gives in one process."""

    @cache
    def play(config: Config) -> dict[str, Any]:
        out = tmp_path_factory.mktemp("alone") / "run"
        run(config.replace(workers=1), task(), out=out)
        return contents(out)

    return play


Alone = Callable[[Config], dict[str, Any]]

# --- the same bits --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_change_no_bit(ranks: int, where: str, precision: str, alone: Alone, tmp_path: Path) -> None:
    config = BASE.replace(residuals=where, residual_precision=precision)
    result = run(config.replace(workers=ranks), task(), out=tmp_path / "r")
    assert_same(contents(tmp_path / "r"), alone(config))
    assert {row["lost"] for row in result.rows} > {0}
    assert len({row["clients"] for row in result.rows}) == 1
    assert result.rows[0]["local_steps_min"] < result.rows[0]["local_steps_max"]


@pytest.mark.usefixtures("forked")
def test_more_ranks_than_clients(alone: Alone, tmp_path: Path) -> None:
    run(BASE.replace(workers=9), task(), out=tmp_path / "r")
    assert_same(contents(tmp_path / "r"), alone(BASE))


@pytest.mark.usefixtures("forked")
def test_ranks_change_no_bit_without_error_feedback(alone: Alone, tmp_path: Path) -> None:
    config = BASE.replace(feedback="none", eval_every=4, checkpoint_every=0, update="sum")
    run(config.replace(workers=2), task(), out=tmp_path / "r")
    assert_same(contents(tmp_path / "r"), alone(config))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("lowrank(2) >> bf16", "eden(2, unbiased=false)"),
        ("eden(1)", "lowrank(2)"),
        ("topk(hold=1)", "int2(16)"),
    ],
)
def test_ranks_change_no_bit_in_another_basis(up: str, down: str, alone: Alone, tmp_path: Path) -> None:
    config = BASE.replace(compressor=up, compressor_down=down, rounds=4)
    run(config.replace(workers=3), task(), out=tmp_path / "r")
    assert_same(contents(tmp_path / "r"), alone(config))


@pytest.mark.usefixtures("forked")
def test_ranks_change_no_bit_in_float64() -> None:
    """Where no sum of updates is exact: alpha, for which ranks add up whole updates, may be rounded."""
    config = BASE.replace(precision="float64", compressor="topk(0.8)", participation=1.0, rounds=8)
    one, two = (run(config.replace(workers=n), blobs(20)).rows for n in (1, 2))
    for row, expected in zip(two, one, strict=True):
        assert row.pop("alpha") == pytest.approx(expected.pop("alpha"), rel=1e-13)
        assert {**row, "seconds": 0.0} == {**expected, "seconds": 0.0}


@pytest.mark.usefixtures("forked")
def test_blocks_agree_closely() -> None:
    """Many clients at once: how they are cut into blocks shows in the last bits, and nowhere else."""
    assert_close_rows(BASE.replace(device="cpu"))


@pytest.mark.gpu
def test_two_ranks_share_a_gpu() -> None:
    """Real processes: what is forked cannot use CUDA."""
    assert_close_rows(BASE.replace(device="cuda"))


def assert_close_rows(config: Config) -> None:
    config = config.replace(engine="batched", precision="float64", rounds=3, compressor="topk(0.8)")
    one, two = (run(config.replace(workers=n), blobs()).rows for n in (1, 2))
    for row, expected in zip(two, one, strict=True):
        for name in expected.keys() - {"seconds"}:
            value = expected[name]
            assert row[name] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), name


@pytest.mark.usefixtures("forked")
def test_messages_are_kept(tmp_path: Path) -> None:
    kept = []
    for ranks in (1, 2):
        folder = tmp_path / f"messages-{ranks}"
        run(BASE.replace(rounds=2, workers=ranks), task(), messages=folder)
        kept.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2 * 5 + 1


class Homely:
    """A metric that only the process which made it can read, like one defined in a notebook."""

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.zeros(())

    def __reduce__(self) -> Any:
        return _home, ()


def _home() -> Homely:
    if multiprocessing.parent_process() is not None:
        raise AttributeError("Can't get attribute 'Homely' on <module '__main__'>")
    return Homely()


def test_a_task_that_another_process_cannot_read() -> None:
    with pytest.raises(InputError, match=r"another process cannot read the task .*Homely.*can be imported"):
        run(BASE.replace(workers=2, rounds=1), dataclasses.replace(blobs(), metric=Homely()))


# --- stop and go on -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("where", [("memory",) * 3, ("disk",) * 3, ("memory", "disk", "memory")])
@pytest.mark.parametrize("ranks", [(2, 3, 1), (1, 2, 4)])
def test_resume_on_other_ranks(
    ranks: tuple[int, ...], where: tuple[str, ...], alone: Alone, tmp_path: Path
) -> None:
    """Interrupted in one number of processes, killed in another, finished in a third."""
    stops: list[tuple[int, type[BaseException]]] = [(0, KeyboardInterrupt), (3, Killed)]
    configs = [BASE.replace(workers=n, residuals=place) for n, place in zip(ranks, where, strict=True)]
    for config, (at, how) in zip(configs, stops, strict=False):
        with pytest.raises(how):
            run(config, task(), out=tmp_path / "r", resume=True, callbacks=[Stop(at, how)])
    run(configs[-1], task(), out=tmp_path / "r", resume=True)
    found, expected = contents(tmp_path / "r"), alone(BASE.replace(residuals=where[-1]))
    assert_same(found, expected)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("word", "at", "late"),
    [
        ("broadcast_object_list", 1, True),  # begin
        ("scatter_object_list", 1, False),
        ("broadcast_object_list", 4, False),  # a round
        ("broadcast_object_list", 4, True),
        ("broadcast", 9, True),
        ("gather_object", 1, False),
        ("gather_object", 1, True),
        ("gather_object", 5, True),  # a checkpoint
    ],
)
def test_interrupt_while_ranks_talk(
    word: str, at: int, late: bool, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C or a polite kill, just before or after any of rank 0's words to the others."""
    real, calls = getattr(torch.distributed, word), 0
    number = signal.SIGTERM if late else signal.SIGINT

    def interrupted(*args: Any, **more: Any) -> None:
        nonlocal calls
        calls += os.getpid() == HERE
        hit = calls == at and os.getpid() == HERE
        if hit and not late:
            signal.raise_signal(number)
        real(*args, **more)
        if hit and late:
            signal.raise_signal(number)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command does
    try:
        monkeypatch.setattr(torch.distributed, word, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(BASE.replace(workers=2), task(), out=tmp_path / "r")
        monkeypatch.setattr(torch.distributed, word, real)
    finally:
        signal.signal(signal.SIGTERM, before)
    run(BASE.replace(workers=3), task(), out=tmp_path / "r", resume=True)
    assert_same(contents(tmp_path / "r"), alone(BASE))


# --- a rank is lost -------------------------------------------------------------------------------------


class Trap:
    """Samples of a client that do something, once, after a few reads outside of this process."""

    def __init__(self, samples: Any, times: int, act: Callable[[], Any]) -> None:
        self.samples, self.left, self.act = samples, times, act

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, rows: np.ndarray) -> Any:
        self.left -= os.getpid() != HERE
        if self.left < 0:
            self.act()
            self.left = sys.maxsize
        return self.samples.batch(rows)


def trapped(act: Callable[[], Any], client: int = 1, times: int = 4) -> Task:
    base = task()
    clients = list(base.clients)
    clients[client] = Trap(clients[client], times, act)
    return Task(base.model, clients, test=base.test, version=base.version)  # the same data, with a trap


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_dies_in_a_round(ranks: int, where: str, alone: Alone, tmp_path: Path) -> None:
    config = BASE.replace(workers=ranks, residuals=where, checkpoint_every=1)
    die = trapped(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RankLost, match=r"^lost rank 1 \(process \d+, exit status -9\): the run stops\. .*"):
        run(config, die, out=tmp_path / "r")
    assert not multiprocessing.active_children()
    assert 0 < len(rows_without_time(tmp_path / "r")) < 6
    run(config.replace(workers=5 - ranks), trapped(lambda: None), out=tmp_path / "r", resume=True)
    assert_same(contents(tmp_path / "r"), alone(BASE.replace(residuals=where, checkpoint_every=1)))


@pytest.mark.usefixtures("forked")
def test_a_worker_that_stops_while_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection shows that it stopped; the run still ends."""
    real = workers._join

    def joined(rank: int, size: int, folder: Path) -> Ranks:
        if rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(rank, size, folder)

    monkeypatch.setattr(workers, "_join", joined)
    monkeypatch.setattr(workers, "KNOWN", 0.1)
    monkeypatch.setattr("cfedavg.simulate.engines.ranks.JOIN", timedelta(seconds=1))
    with pytest.raises(RankLost, match="a process of the run is gone"):
        run(BASE.replace(workers=2), task())


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_round_may_take_longer_than_to_join(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cfedavg.simulate.engines.ranks.JOIN", timedelta(seconds=10))
    run(BASE.replace(workers=2), trapped(lambda: time.sleep(12)), out=tmp_path / "r")
    assert_same(contents(tmp_path / "r"), alone(BASE))


def test_a_lost_rank_whose_end_is_known_later() -> None:
    """A busy machine closes its connection, and only later says how it ended."""

    class Slow:
        name, pid = "rank 1", 7

        def __init__(self) -> None:
            self.looks = iter([None, None, -9])

        @property
        def exitcode(self) -> int | None:
            return next(self.looks, -9)

    slow: Any = Slow()
    named = workers._name_lost(RankLost("somebody"), [slow])
    assert str(named).startswith("lost rank 1 (process 7, exit status -9): the run stops.")


class Heard(Callback):
    """Does something when a worker is said to be silent, once."""

    def __init__(self, act: Callable[[int], Any]) -> None:
        self.act, self.said = act, list[str]()

    def on_message(self, text: str) -> None:
        if found := re.match(r"rank 1 \(process (\d+)\) has been silent for 0.2 s: stopped, or hung", text):
            self.act(int(found[1]))
        self.said.append(text)


@pytest.fixture
def _quick_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PULSE", 0.02)
    monkeypatch.setattr(workers, "SILENCE", 0.2)


def stopped() -> Task:
    """Rank 1 stops in a round, with all its threads."""
    return trapped(lambda: os.kill(os.getpid(), signal.SIGSTOP))


@pytest.mark.usefixtures("forked", "_quick_pulse")
def test_a_stopped_worker_is_named_and_may_go_on(alone: Alone, tmp_path: Path) -> None:
    heard = Heard(lambda pid: os.kill(pid, signal.SIGCONT))
    run(BASE.replace(workers=2), stopped(), out=tmp_path / "r", callbacks=[heard])
    assert any(re.match(r"rank 1 \(process \d+\) is there again, after", text) for text in heard.said)
    assert_same(contents(tmp_path / "r"), alone(BASE))


@pytest.mark.usefixtures("forked", "_quick_pulse")
def test_a_second_signal_ends_a_run_with_a_stopped_worker(
    alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for it in a call that Ctrl-C does not break off, and saves nothing."""
    monkeypatch.setattr("cfedavg.core.interrupts.TOGETHER", -1.0)
    config = BASE.replace(workers=2, checkpoint_every=1)

    def press_twice(worker: int) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)

    heard = Heard(press_twice)
    with pytest.raises(KeyboardInterrupt):
        run(config, stopped(), out=tmp_path / "r", callbacks=[heard])
    assert any("not saved, a process of the run is gone" in text for text in heard.said)
    run(config, task(), out=tmp_path / "r", resume=True)
    assert_same(contents(tmp_path / "r"), alone(BASE.replace(checkpoint_every=1)))


@pytest.mark.usefixtures("forked")
def test_workers_end_after_rank_0(tmp_path: Path) -> None:
    leader = os.fork()
    if not leader:
        try:
            os.setsid()
            torch.set_num_threads(1)  # those of OpenMP did not come along, and would be waited for
            run(BASE.replace(workers=3, rounds=10**6), task(), out=tmp_path / "r")
        finally:
            os._exit(1)
    until = time.monotonic() + LIMIT
    while rows(tmp_path / "r") < 3 and time.monotonic() < until:
        time.sleep(0.01)
    team = processes(leader)
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    left = not gone(leader)
    for pid in processes(leader):
        os.kill(pid, signal.SIGKILL)
    assert len(team) >= 3  # and one that Python itself starts
    assert not left


@pytest.mark.usefixtures("forked")
def test_ctrl_c_while_a_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun, and ends with the run: the fixture looks for what is left."""
    real = BaseProcess.start

    def start(self: BaseProcess) -> None:
        real(self)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(BaseProcess, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run(BASE.replace(workers=2), task())
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("forked")
def test_a_rank_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = workers._work
    monkeypatch.setattr(workers, "_work", lambda parent, rank, *rest: rank == 1 and real(parent, rank, *rest))
    with pytest.raises(RankLost, match=r"lost rank 2 \(process \d+, exit status 0\)"):
        run(BASE.replace(workers=3), task())


@pytest.mark.usefixtures("forked")
def test_a_script_without_a_guard(tmp_path: Path) -> None:
    """One that trains at its top level, as everyone's first script does."""
    script = tmp_path / "script.py"
    script.write_text(
        "import cfedavg\n"
        "config = cfedavg.Config(model='linear', clients=4, rounds=2, workers=2, engine='sequential')\n"
        "print('rounds', len(cfedavg.run(config).rows))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=2 * LIMIT)
    assert (done.returncode, done.stdout) == (0, "rounds 2\n"), done.stderr


SCRIPT = """
from dataclasses import dataclass

import cfedavg
from cfedavg import BF16, Config, Selector


@dataclass(frozen=True)
class Every(Selector):
    n: int = 2

    def keep(self, p, keys, layout, t):
        keep = p != p
        keep[:, t % self.n :: self.n] = True
        return keep

    def gamma(self, layout):
        return 1.0


if __name__ == "__main__":
    config = Config(compressor=Every(4) >> BF16(), model="linear", clients=4, rounds=2, engine="sequential")
    alone, shared = (cfedavg.run(config.replace(workers=n)).rows[1] for n in (1, 2))
    print(alone["test_loss"] == shared["test_loss"])
"""


def test_a_compressor_of_the_script_itself(tmp_path: Path) -> None:
    """Workers import the script; what is typed cannot be imported."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=2 * LIMIT)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    command = [sys.executable, "-c", SCRIPT]  # as in a notebook, without a file
    typed = subprocess.run(command, capture_output=True, text=True, timeout=2 * LIMIT)
    assert "another process cannot read the task or the configuration" in typed.stderr
    assert "no attribute 'Every'): define" in typed.stderr


def test_one_run_after_another() -> None:
    """The first ends with an error; connections and settings of it are gone when the next one starts."""
    with pytest.raises(Diverged):
        run(BASE.replace(workers=2, eta_local=1e30), task())
    alone, shared = (run(BASE.replace(workers=n, rounds=2), task()).rows for n in (1, 2))
    assert alone[1]["train_loss"] == shared[1]["train_loss"]


# --- errors on another rank -----------------------------------------------------------------------------


def sentences(config: Config, make: Callable[[], Task], **more: Any) -> list[str]:
    """The error of a run in one process and in two."""
    found = []
    for ranks in (1, 2):
        with pytest.raises(InputError) as caught:
            run(config.replace(workers=ranks), make(), **more)
        found.append(str(caught.value))
    return found


@pytest.mark.usefixtures("forked")
def test_divergence_names_the_clients_of_all_ranks() -> None:
    one, two = sentences(BASE.replace(eta_local=1e30, participation=1.0), task)
    assert one == two
    assert "is NaN or infinite for clients 0, 2, 4, 5, 6; lower `eta_local`" in two


@pytest.mark.usefixtures("forked")
def test_divergence_of_the_model_names_the_clients_in_order() -> None:
    config = BASE.replace(eta=1e39, rounds=1, schedule="constant", drop_rate=0.0, participation=1.0)
    one, two = sentences(config, task)
    assert one == two


@pytest.mark.usefixtures("forked")
def test_a_batch_of_one_sample() -> None:
    """Client 3 has 23 samples, and lives on rank 1."""
    one, two = sentences(BASE.replace(batch_size=11, local_epochs=1), task)
    assert one == two
    assert "`batch_size` leaves client 3 a last batch of one sample" in two


@pytest.mark.usefixtures("forked")
def test_a_full_disk(alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BASE.replace(residuals="disk", workers=2)

    def full(tensors: Any, path: Path, **more: Any) -> None:
        if os.getpid() != HERE and "-000002." in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, **more)

    monkeypatch.setattr("cfedavg.core.tensors.save_file", full)
    with pytest.raises(InputError, match=r"^the residuals cannot be kept in .* \(.*No space left on device"):
        run(config, task(), out=tmp_path / "r")
    monkeypatch.undo()
    run(config.replace(workers=1), task(), out=tmp_path / "r", resume=True)
    assert_same(contents(tmp_path / "r"), alone(BASE.replace(residuals="disk")))


class Odd(Exception):
    """Pickle cannot bring it back."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (InputError("no such picture"), "^no such picture$"),
        (KeyError("picture"), r"^Task.clients\[1\] gives no batch \(KeyError: 'picture'\)"),
        (Odd(3, 4), r"^Task.clients\[1\] gives no batch \(Odd: 3 and 4\)"),
    ],
)
def test_an_error_of_the_data(error: Exception, words: str) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(InputError, match=words) as caught:
        run(BASE.replace(workers=2), trapped(fail))
    assert not isinstance(caught.value, RankLost)
    assert isinstance(error, InputError) or "in fail" in caught.value.__notes__[0]  # a bug: it says where


# --- what is refused ------------------------------------------------------------------------------------

NAMELESS: Callable[..., Any] = lambda model, batch: model(batch[0]).sum()  # noqa: E731


@pytest.mark.parametrize("local", [False, True])
def test_a_task_that_cannot_be_sent(local: bool) -> None:
    loss = (lambda model, batch: NAMELESS(model, batch)) if local else NAMELESS
    base = blobs()
    with pytest.raises(InputError, match=r"^`workers`: the task cannot be sent to another process \(Can't"):
        run(Config(workers=2, rounds=1), Task(base.model, base.clients, loss=loss))


def test_the_reference_engine_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_start", lambda *_: pytest.fail("nobody is to be started"))
    with pytest.raises(InputError, match="the engine `reference` runs in one process: leave out `workers`"):
        run(Config(workers=2, engine="reference"), blobs())
    assert len(run(Config(workers=1, engine="reference", rounds=1), blobs()).rows) == 1


# --- how many -------------------------------------------------------------------------------------------


def wide() -> Task:
    """A model that is not small."""
    base = blobs()
    return Task(nn.Sequential(nn.Linear(8, 20_000), nn.Linear(20_000, 3)), base.clients)


NUMBERS: dict[str, tuple[dict[str, Any], Callable[[], Task], bool, int, float, int]] = {
    # options, task, made in Python, cores, seconds a step, how many processes
    "as asked for": ({"workers": 5}, blobs, True, 2, 0.0, 5),
    "one, as asked for": ({"workers": 1}, wide, False, 4, 9.0, 1),
    "a task from Python": ({}, wide, True, 4, 9.0, 1),
    "a class of the script": ({"compressor": "__main__:Every(0.5)"}, wide, False, 4, 9.0, 1),
    "a long run": ({}, wide, False, 4, 9.0, 4),
    "a short run": ({}, wide, False, 4, 1e-6, 1),
    "one core": ({}, wide, False, 1, 9.0, 1),
    "no more than clients": ({"participation": 0.5}, wide, False, 4, 9.0, 3),
    "no more than eight": ({}, partial(blobs, 20), False, 64, 9.0, 8),
    "a small model": ({"engine": "auto"}, blobs, False, 4, 9.0, 1),
    "batched": ({"engine": "batched"}, wide, False, 4, 9.0, 1),
    "reference": ({"engine": "reference"}, wide, False, 4, 9.0, 1),
    "auto": ({"engine": "auto"}, wide, False, 4, 9.0, 4),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, make, own, cores, seconds, expected = NUMBERS[name]
    monkeypatch.setattr("cfedavg.simulate.workers.os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(workers, "_seconds_a_step", lambda config, task: seconds)
    monkeypatch.setattr(sys.modules["__main__"], "Every", TopK, raising=False)
    it = make()
    config = Config(**{"engine": "sequential", "device": "cpu", "clients": len(it.clients)} | options)
    assert workers.choose_size(config, Plan(config, it), it, own=own) == expected


def test_a_step_is_timed_and_leaves_no_trace() -> None:
    it = task()
    before = {name: value.clone() for name, value in it.model.state_dict().items()}
    assert workers._seconds_a_step(BASE, it) > 0
    assert all(torch.equal(value, before[name]) for name, value in it.model.state_dict().items())


# --- the command ----------------------------------------------------------------------------------------

OPTIONS = [
    "--rounds", "40", "--clients", "6", "--model", "linear", "--local-steps", "2..4", "--drop-rate", "0.2",
    "--compressor", "topk(0.9)", "--participation", "0.7", "--sample-iterate", "--engine", "sequential",
    "--checkpoint-every", "3", "--residuals", "disk",
]  # fmt: skip
COMMAND = str(Path(sys.executable).parent / "cfedavg")


def processes(session: int) -> dict[int, int]:
    """The processes of a session, each with its parent; not those that are dead and unburied."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == session and state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


def gone(session: int) -> bool:
    """Wait until no process of a session is left; return whether that happened."""
    until = time.monotonic() + LIMIT
    while processes(session) and time.monotonic() < until:
        time.sleep(0.05)
    return not processes(session)


class Started:
    """The command in a session of its own, which nothing outlives."""

    def __init__(self, *arguments: object, **environment: object) -> None:
        more = {name: str(value) for name, value in environment.items()}
        self.process = subprocess.Popen(
            [*map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in processes(self.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def wait_for(self, done: Callable[[], Any]) -> None:
        until = time.monotonic() + LIMIT
        while not done():
            assert time.monotonic() < until, "it takes too long"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.005)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, out, err

    def worker(self) -> int | None:
        """The process of rank 1, when it has begun to train."""
        ours = [pid for pid, parent in processes(self.pid).items() if parent == self.pid]
        spawned = [pid for pid in ours if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return spawned[0] if spawned else None


def rows(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the command, in one process."""
    out = tmp_path_factory.mktemp("command") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cfedavg", "run", *OPTIONS, "--workers", "1", "--out", str(out)])
        patch.setattr("cfedavg.cli.signal.signal", lambda *_: None)
        with pytest.raises(SystemExit) as stop:
            main()
    assert not stop.value.code
    return out


def assert_goes_on(out: Path, finished: Path, **options: Any) -> None:
    """What a stopped command left becomes what one that was never stopped gives."""
    assert 0 < rows(out) < 40
    run(read_config(finished / "config.toml").replace(**options), out=out, resume=True)
    assert_same(contents(out), contents(finished))


def waiting(out: Path) -> Started:
    """The command in two processes, waiting in its fourth round, until there is a file `go on` beside it."""
    it = Started(
        sys.executable, "-c", WAITING, "run", *OPTIONS, "--workers", 2, "--out", out,
        WAIT_AT=4, GO_ON=out.with_name("go on"),
    )  # fmt: skip
    it.wait_for(lambda: rows(out) >= 4)
    return it


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("number", "everyone"),
    [
        (signal.SIGINT, True),  # Ctrl-C
        (signal.SIGHUP, True),  # a terminal that is closed
        pytest.param(signal.SIGTERM, True, marks=SLOW),  # the end of a batch job
        pytest.param(signal.SIGTERM, False, marks=SLOW),  # kill PID
    ],
)
def test_a_stopped_command(number: signal.Signals, everyone: bool, finished: Path, tmp_path: Path) -> None:
    """Most signals go to all processes of a run, some to the first alone."""
    out = tmp_path / "r"
    with waiting(out) as it:
        (os.killpg if everyone else os.kill)(it.pid, number)
        code, text, errors = it.end()
        assert gone(it.pid)
    assert (code, errors) == (128 + number, "")
    assert f"stopping after {rows(out)} rounds: saving, --resume goes on from here" in text
    assert_goes_on(out, finished)


def test_a_command_that_waits_for_a_stopped_worker(finished: Path, tmp_path: Path) -> None:
    """The first signal asks it to save, which it cannot without the worker; the second ends it."""
    out = tmp_path / "r"
    with waiting(out) as it:
        worker = it.worker()
        assert worker
        os.kill(worker, signal.SIGSTOP)
        os.kill(it.pid, signal.SIGINT)
        while it.process.poll() is None:
            time.sleep(0.3)
            it.process.send_signal(signal.SIGTERM)
        code, _, errors = it.end()
        assert gone(it.pid)
    assert (code, errors) == (143, "")
    assert_goes_on(out, finished)


def test_a_command_stopped_while_it_starts(tmp_path: Path) -> None:
    with Started(COMMAND, "run", *OPTIONS, "--workers", 2, "--out", tmp_path / "r") as it:
        it.wait_for(it.worker)
        os.killpg(it.pid, signal.SIGINT)
        code, _, errors = it.end()
        assert gone(it.pid)
    assert (code, errors) == (130, "")


@pytest.mark.slow
def test_a_command_whose_worker_is_killed(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    with waiting(out) as it:
        worker = it.worker()
        assert worker
        os.kill(worker, signal.SIGKILL)
        out.with_name("go on").touch()
        code, _, errors = it.end()
        assert gone(it.pid)
    assert code == 2
    sentence = f"error: lost rank 1 (process {worker}, exit status -9): the run stops. "
    assert errors.startswith(sentence)
    assert len(errors.splitlines()) == 1
    assert_goes_on(out, finished)


@pytest.mark.slow
def test_workers_end_after_the_command(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    with waiting(out) as it:
        it.process.kill()
        assert gone(it.pid)
        _, _, errors = it.end()
    assert "Traceback" not in errors
    assert_goes_on(out, finished)


def torchrun(*arguments: object) -> Started:
    """On a port that torchrun binds itself: one that was probed here could be another's by then."""
    place = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", 2, "--no-python"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *place, COMMAND]
    return Started(*launcher, *arguments, GLOO_SOCKET_IFNAME="lo")


def test_torchrun(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "r"
    with torchrun("run", *OPTIONS, "--out", out) as it:
        code, text, errors = it.end()
        assert gone(it.pid)
    assert code == 0, errors
    assert_same(contents(out), contents(finished))
    assert text.count("written to") == text.count("engine: sequential") == text.count("round 40/40") == 1


def test_ranks_with_other_options_refuse_to_train(tmp_path: Path) -> None:
    """Two ranks as torchrun starts them; the first one says what is different, and both end with 2."""
    ports = Ports()
    port = ports.take()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": 2}
    common = ["run", "--model", "linear", "--clients", 4, "--rounds", 2, "--out", tmp_path / "r"]
    other = ["--eta-local", 0.3, "--seed", 5, "--compressor", "none"]
    with (
        Started(COMMAND, *common, **place, RANK=0) as first,
        Started(COMMAND, *common, *other, **place, RANK=1) as second,
    ):
        ends = [it.end() for it in (first, second)]
    ports.close()
    assert [code for code, _, _ in ends] == [2, 2]
    assert ends[0][2].startswith(
        'error: rank 1 differs from rank 0: --eta-local is 0.3 instead of 0.1, --compressor is "none" '
        'instead of "topk(0.97, least=10000) >> int3(256)", --seed is 5 instead of 0, '
    )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("config", "other", "words"),
    [
        (
            Config(),
            dataclasses.replace(blobs(), test=None),
            "the number of test samples is none instead of 60,",
        ),
        (Config(), blobs(n=21), "the number of samples is 141 instead of 135, the hash of the data is"),
        (Config(), task(6), ".*the hash of layout and frozen values is"),
        (Config(data_dir="elsewhere"), blobs(seed=1), "the hash of the data is"),
        (Config(eta=0.1), blobs(), "`eta` is 0.1 instead of none;"),
        (Config(data_dir="elsewhere"), dataclasses.replace(blobs(), model=blobs(seed=1).model), ""),
    ],
)
def test_what_ranks_must_agree_on(config: Config, other: Task, words: str) -> None:
    """Not on where their data lie, nor on the weights: all start from those of rank 0."""
    mine = describe_run(Config(), blobs())
    group: Any = SimpleNamespace(gather=lambda fact: [mine, mine, fact], share=lambda thing: thing)
    with pytest.raises(InputError, match=f"^rank 2 differs from rank 0: {words}") if words else nullcontext():
        check_same(group, describe_run(config, other))


def test_sweep_and_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused in every rank; the first one says why."""
    monkeypatch.setattr("cfedavg.cli.signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["cfedavg", "sweep", "--vary", "seed=0|1"])
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            main()
        said.append(capsys.readouterr().err)
    assert said == ["error: torchrun must not start a sweep; leave torchrun out and set --workers\n", ""]


@pytest.mark.parametrize("ready", [False, True])
def test_coders_that_are_not_ready_compile_in_another_process(
    ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*args, **options))
        return started[-1]

    monkeypatch.setenv("CFEDAVG_KERNELS", "numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(workers, "needs_compiling", lambda: not ready)
    monkeypatch.setattr(workers, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
    with workers.compile_coders_beside():
        assert len(started) == (not ready)
        until = time.monotonic() + 60
        while started and not any(tmp_path.iterdir()) and time.monotonic() < until:
            time.sleep(0.05)
        assert any(tmp_path.iterdir()) != ready  # it has begun to fill the cache
    assert all(process.returncode is not None for process in started)
