"""The loop over rounds: run, evaluate, record, checkpoint, resume."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from cfedavg.core.config import Config
from cfedavg.core.errors import Diverged, InputError
from cfedavg.core.files import check_no_file, read_file, write_atomic
from cfedavg.core.interrupts import mute_stops
from cfedavg.core.run_files import MODEL, SERVER_MODEL, Record, finite
from cfedavg.core.tensors import save_tensors
from cfedavg.core.units import format_bytes
from cfedavg.simulate.engines import RankLost, Ranks, check_same, choose_engine, facts
from cfedavg.simulate.folder import Folder
from cfedavg.simulate.plan import Plan
from cfedavg.simulate.residuals import InMemory, OnDisk, Residuals, choose
from cfedavg.simulate.state import State
from cfedavg.simulate.workers import number, serve, team
from cfedavg.task import Task
from cfedavg.theory import rate_conditions
from cfedavg.wire import is_ready

ENGINE = "engine.txt"  # which engine ran, and why


class Observer:
    """Sees a run as it goes. This one says nothing; the command's shows progress."""

    def begin(self, rows: list[Record]) -> None:
        """A run starts, or goes on after these rows."""

    def say(self, text: str) -> None:
        """Something worth knowing, in a sentence. Of a silent worker it comes from another thread."""

    def now(self, text: str) -> None:
        """What is being waited for, until the next row."""

    def row(self, row: Record) -> None:
        """A round is done."""


@dataclass(frozen=True)
class Result:
    """What a run gives: one row of metrics a round, the trained model, and where it was written.

    `model` is what the clients hold at the end. `server_model` is the server's own; the two differ by what a
    compressed broadcast has not sent yet. Of the ranks of torchrun, only rank 0 knows the server's.
    """

    config: Config
    rows: list[Record]
    model: nn.Module
    server_model: nn.Module
    iterate: nn.Module | None
    path: Path | None

    @property
    def final(self) -> Record:
        """The last row."""
        return self.rows[-1]


def run(
    config: Config,
    task: Task | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    observer: Observer | None = None,
    draw: bool = True,
    messages: str | Path | None = None,
) -> Result:
    """Trains. Without a task, data and model are those that the configuration names.

    With `out`, the run is written to that folder as it goes, and `resume` goes on where it stopped; at the
    end its curves are drawn there, unless `draw` is False. With `messages`, every message that a client
    sends is kept in that folder, for `cfedavg inspect`.

    >>> import torch
    >>> clients = [(torch.ones(8, 3) * i, torch.tensor([i % 2] * 8)) for i in range(4)]
    >>> task = Task(torch.nn.Linear(3, 2), clients, test=clients[0])
    >>> result = run(Config(rounds=2, compressor="topk(0.5)"), task)
    >>> len(result.rows), result.final["clients"]
    (2, 4)
    """
    _check_arguments(config, task, out, resume)
    if config.deadline is not None and config.steps_per_second is None:  # a federation has a clock
        raise InputError("`deadline` needs `steps_per_second`, the speed of the simulated clients")
    own = task is not None
    if task is None:
        from cfedavg.data.tasks import build_task  # pulls in what only named data sets need

        task = build_task(config)
    else:
        kind = type(task.model).__name__
        config = config.for_task(task.name, kind, task.prints, len(task.clients))
    observer, kept = observer or Observer(), Path(messages) if messages else None
    if kept:
        check_no_file(kept, "`messages`")
    ranks = _ranks_of_torchrun(config, task, kept)
    if ranks and ranks.rank > 0:
        with mute_stops():  # rank 0 hears interrupts, and decides
            engine, last = serve(config, task, ranks, kept)
        model = engine.model_at(last.x, last.b)
        return Result(config, [], model, model, None, None)
    with ExitStack() as lock:  # on the folder, until the pictures are drawn: they need temporary files too
        with ExitStack() as stack:
            if ranks is None:
                size = number(config, Plan(config, task), task, own=own)
                ranks = stack.enter_context(team(config, task if own else None, size, kept, observer.say))
            else:
                stack.callback(ranks.close)
            loop = Loop(config, task, observer, kept, ranks)
            # Only now, when all is found to be in order.
            folder = lock.enter_context(Folder(Path(out))) if out is not None else None
            result = loop.run(folder, resume=resume)
        if draw and folder:
            from cfedavg.report import write_run_pictures  # matplotlib, only now

            write_run_pictures(folder.path)
    return result


def _ranks_of_torchrun(config: Config, task: Task, messages: Path | None) -> Ranks | None:
    """The group that torchrun has set up, if it has: its members must agree on what to run."""
    ranks = Ranks.from_environment()
    if ranks is None:
        return None
    try:
        check_same(ranks, facts(config, task) | {"`messages`": "given" if messages else "none"})
        if config.workers > 1:
            raise InputError("`workers`: torchrun has set the number of processes; leave it out")
    except InputError:
        ranks.close()
        raise
    return ranks


def _check_arguments(config: object, task: object, out: object, resume: bool) -> None:
    if not isinstance(config, Config):
        hint = ": write Config(**...)" if isinstance(config, dict) else ""
        raise InputError(f"run: `config` must be a Config, got {type(config).__name__}{hint}")
    if task is not None and not isinstance(task, Task):
        raise InputError(f"run: `task` must be a Task, got {type(task).__name__}")
    if out is not None and not isinstance(out, str | Path):
        raise InputError(f"run: `out` must be the path of a folder, got {type(out).__name__}")
    if resume and out is None:
        raise InputError("run: `resume` needs `out`, the folder to go on with")


class Loop:
    """One run from its first round, or from its checkpoint, to its last."""

    def __init__(
        self, config: Config, task: Task, observer: Observer, messages: Path | None, ranks: Ranks
    ) -> None:
        self.config, self.observer = config, observer
        self.plan = Plan(config, task)
        self._engines = ""  # what was said of them, in lines
        self._done = 0  # rounds
        self._folder: Folder | None = None
        self.engine = choose_engine(config, self.plan, task, messages, ranks, self._say)
        self.note = task.note

    def _say(self, text: str) -> None:
        """Say it, and write down what it says of the engine."""
        self.observer.say(text)
        if text.startswith("engine: "):
            since = f"after round {self._done}: " if self._done else ""
            self._engines += since + text.removeprefix("engine: ") + "\n"
            self._record_engine()

    def _record_engine(self) -> None:
        if self._folder:
            write_atomic(self._folder.path / ENGINE, self._engines.encode())

    def _go_on_recording(self, folder: Folder, done: int) -> None:
        """What engines did before a resume stays in the file."""
        self._folder, self._done = folder, done
        if done:
            since = [f"after round {done}: {line}" for line in self._engines.splitlines(keepends=True)]
            self._engines = _lines(folder.path / ENGINE) + "".join(since)
        if done < self.config.rounds:
            self._record_engine()

    def run(self, folder: Folder | None, *, resume: bool) -> Result:
        start = self.engine.start()
        with self._residuals(folder, start.x) as residuals:
            try:
                state, rows = self._begin(folder, resume, replace(start, residuals=residuals))
                self._ended = time.perf_counter()
                state = self._rounds(folder, self.engine.begin(state), rows)
            finally:
                with suppress(RankLost):  # then nobody is there to be told
                    self.engine.close()
        return self._end(folder, state, rows)

    @contextmanager
    def _residuals(self, folder: Folder | None, x: Tensor) -> Iterator[Residuals]:
        """An empty store; on disk without a folder to write to, one that goes away at the end."""
        size = self.plan.m * self._residual_bytes(x)
        if (
            not self.plan.feedback.keeps_client_memory
            or choose(self.config.residuals, size, x.device) == "memory"
        ):
            yield InMemory()
        elif folder:
            yield OnDisk(folder.residuals)
        else:
            with tempfile.TemporaryDirectory(prefix="cfedavg-residuals-") as path:
                yield OnDisk(Path(path))

    def _residual_bytes(self, x: Tensor) -> int:
        return len(x) * (2 if self.config.residual_precision == "bf16" else x.element_size())

    def _on_disk(self, path: Path, x: Tensor, *, checkpoints: bool) -> str:
        """Where residuals are, and how many: everyone's, those being replaced, those of a checkpoint only."""
        m, r = self.plan.m, self.plan.clients_per_round
        between = r * (self.config.checkpoint_every or self.config.rounds)
        most = (m + r + min(m, between) * checkpoints) * self._residual_bytes(x)
        return f"residuals live on disk, in {path}, and can grow to {format_bytes(most)}"

    def _rounds(self, folder: Folder | None, state: State, rows: list[Record]) -> State:
        """The rounds that are left; the rows grow as they end."""
        every = self.config.checkpoint_every
        unbooked: list[Callable[[], Record]] = []  # rows whose bytes may still be counted
        try:
            while state.t < self.config.rounds:
                self._done = state.t
                state, row = self._round(state)
                unbooked.append(row)
                due = bool(folder and every and state.t % every == 0) or state.t == self.config.rounds
                self._book(folder, rows, unbooked, 0 if due else self.engine.behind)
                if folder and due:
                    self._save(folder, state)
        except Exception:
            with suppress(KeyboardInterrupt):
                self._book(folder, rows, unbooked, 0)  # those rounds were good
            raise
        except KeyboardInterrupt:
            if folder:
                with mute_stops():
                    self._save_at_stop(folder, state, rows, unbooked)
            raise
        return state

    def _save_at_stop(
        self, folder: Folder, state: State, rows: list[Record], unbooked: list[Callable[[], Record]]
    ) -> None:
        """Saves the last whole round, if all processes are still there to give their part."""
        self.observer.say(f"stopping after {state.t} rounds: saving, `resume` goes on from here")
        rows += [row() for row in unbooked[len(unbooked) - (state.t - len(rows)) :]]
        folder.rewrite(rows)  # the interrupt may have come anywhere between row and file
        try:
            self._save(folder, state)
        except RankLost as error:
            self.observer.say(f"not saved, {error}: `resume` goes on from the last checkpoint")

    def _book(
        self, folder: Folder | None, rows: list[Record], unbooked: list[Callable[[], Record]], behind: int
    ) -> None:
        """Writes down the rows of rounds that are done, but for the last few."""
        while len(unbooked) > behind:
            row = unbooked[0]()
            rows.append(row)
            unbooked.pop(0)
            if folder:
                folder.append(row)
            self.observer.row(row)

    def _save(self, folder: Folder, state: State) -> None:
        self.engine.checkpoint(state, lambda whole: folder.checkpoint(whole, self.engine.identity))

    def _begin(self, folder: Folder | None, resume: bool, first: State) -> tuple[State, list[Record]]:
        start: tuple[State, list[Record]] = first, []
        if folder:
            start = folder.begin(self.config, self.engine.identity, first, resume=resume)
            self._go_on_recording(folder, start[0].t)
        self.observer.begin(start[1])
        if self.note:
            self.observer.say(self.note)
        self.observer.say(self.plan.in_words(self.engine.layout))
        residuals = start[0].residuals
        if isinstance(residuals, OnDisk):
            self.observer.say(self._on_disk(residuals.folder, first.x, checkpoints=folder is not None))
        if not is_ready():
            self.observer.say("compiling the coders of messages, once: the first round takes 15 s longer")
        if start[0].t:
            self.observer.say(f"resuming after round {start[0].t} of {self.config.rounds}")
        elif resume:
            self.observer.say("nothing to resume: starting with the first round")
        return start

    def _round(self, state: State) -> tuple[State, Callable[[], Record]]:
        """The next state, and what to call for the row. A round lasts from the end of the one before."""
        state_next, finish = self.engine.round(state)
        last, tested = state_next.t == self.config.rounds, Record()
        if last or state_next.t % self.config.eval_every == 0:
            tested = self._tested(state_next)
        if not all(math.isfinite(tested.get(name, 0.0)) for name in ("test_loss", "server_test_loss")):
            raise Diverged(state.t, [], "the test loss")
        began, self._ended = self._ended, time.perf_counter()
        return state_next, partial(self._row, state.t, finish, tested, self._ended - began)

    def _tested(self, state: State) -> Record:
        """The test columns of the model that clients hold; where the server's is another, of that too.

        The clients' comes last: other ranks end with the model that they evaluated last.
        """
        if state.w is None:
            return self.engine.evaluate(state)
        servers = self.engine.evaluate(replace(state, w=None))
        return self.engine.evaluate(state) | {
            f"server_{name}": value for name, value in servers.items() if name.startswith("test_")
        }

    def _row(self, t: int, finish: Callable[[], Record], tested: Record, seconds: float) -> Record:
        record = finish() | tested
        record["total_bytes"] = record["uplink_bytes"] + record["downlink_bytes"]
        if self.config.smoothness is not None:
            record |= self._conditions(t, record)
        return {"round": t, **record, "seconds": seconds}

    def _conditions(self, t: int, record: Record) -> Record:
        """Each rate condition with the measured gamma and alpha: whether it holds, and value / limit."""
        rates, K = self.plan.rates, self.plan.steps.bounds[1]
        assert self.config.smoothness is not None
        conditions = rate_conditions(
            rates.eta_local(t),
            rates.eta,
            K,
            self.config.smoothness,
            _or_infinite(record["snr_min"]),
            _or_infinite(record["alpha"]) if record["delta_norm2"] else 1.0,
            rates.update,
        )
        return {
            "rate_conditions": {
                c.text: {"holds": c.holds, "ratio": finite(c.value / c.limit)} for c in conditions
            }
        }

    def _end(self, folder: Folder | None, state: State, rows: list[Record]) -> Result:
        model, server_model = (self.engine.model_at(x, state.b) for x in (state.broadcast, state.x))
        iterate = None if state.z is None else self.engine.model_at(*state.z)
        if folder:
            save_model(model, folder.path / MODEL)
            if state.w is not None:
                save_model(server_model, folder.path / SERVER_MODEL)
            if iterate is not None:
                save_model(iterate, folder.path / "iterate.safetensors")
        for sentence in broken_conditions(rows):
            self.observer.say(sentence)
        return Result(self.config, rows, model, server_model, iterate, folder.path if folder else None)


def _lines(path: Path) -> str:
    """What a text file holds; nothing if it cannot be read, since no run depends on it."""
    with suppress(OSError):
        return read_file(path).decode(errors="replace")
    return ""


def save_model(model: nn.Module, path: Path) -> None:
    """The model's state_dict; a tied parameter is written under each of its names."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    save_tensors(tensors, path)


def broken_conditions(rows: list[Record]) -> list[str]:
    """A sentence for each rate condition that some round broke."""
    sentences = []
    measured = [row for row in rows if "rate_conditions" in row]
    for text in measured[0]["rate_conditions"] if measured else ():
        ratios = [_or_infinite(row["rate_conditions"][text]["ratio"]) for row in measured]
        broken = sum(not row["rate_conditions"][text]["holds"] for row in measured)
        if broken:
            worst = measured[ratios.index(max(ratios))]
            sentences.append(
                f"rate condition {text} is broken in {broken} of {len(measured)} rounds; most in round "
                f"{worst['round'] + 1}, {max(ratios):.3g} times the limit "
                f"(measured gamma {_or_infinite(worst['snr_min']):.4g}, "
                f"alpha {_or_infinite(worst['alpha']):.4g})"
            )
    return sentences


def _or_infinite(value: float | None) -> float:
    """The metrics write infinity as null."""
    return math.inf if value is None else value
