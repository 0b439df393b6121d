"""A simulated run: the loop over rounds, with evaluation, metrics, checkpoints and resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from cfedavg.callbacks import Callback, CallbackList, Start
from cfedavg.callbacks.callback import check_callbacks
from cfedavg.callbacks.notebook import is_watched
from cfedavg.core.config import Config
from cfedavg.core.errors import Diverged, InputError, show
from cfedavg.core.files import check_no_file
from cfedavg.core.interrupts import mute_stops
from cfedavg.core.run_files import Record
from cfedavg.core.units import format_bytes
from cfedavg.guard import Guard
from cfedavg.report import check_drawing, import_drawing, write_run_pictures
from cfedavg.simulate.engines import Partners, RankLost, Ranks, choose_engine
from cfedavg.simulate.folder import Folder
from cfedavg.simulate.plan import Plan, broken_conditions
from cfedavg.simulate.residual_files import OnDisk, open_store
from cfedavg.simulate.result import Result
from cfedavg.simulate.state import State
from cfedavg.simulate.steps import Steps, finish
from cfedavg.simulate.vectorised.artifacts import import_compiler
from cfedavg.simulate.vectorised.compiler import running_compiler, start_compiler
from cfedavg.simulate.workers import compile_coders_beside, join_torchrun, serve, start_workers
from cfedavg.task import Task
from cfedavg.wire import needs_compiling

SILENT = 2.0  # seconds of a run from Python before its progress is shown, unless it is asked for


def run(
    config: Config,
    task: Task | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    draw: bool = True,
    messages: str | Path | None = None,
) -> Result:
    """Train a model and return the result. Without `task`, the configuration names data and model.

    With `out`, write the run to that folder; with `resume`, continue the run in that folder. At the end draw
    the run's curves into `out`, unless `draw` is False. With `messages`, write every client's message to that
    folder, for `cfedavg inspect`. The `callbacks` receive each row of metrics and may end the run.

    A run of over two seconds shows its progress in a terminal and in a notebook. With `progress=True` it is
    shown at once and everywhere, as plain lines in a log file; with `progress=False` it is not shown.

    >>> import torch
    >>> clients = [(torch.ones(8, 3) * i, torch.tensor([i % 2] * 8)) for i in range(4)]
    >>> task = Task(torch.nn.Linear(3, 2), clients, test=clients[0])
    >>> result = run(Config(rounds=2, compressor="topk(0.5)"), task)
    >>> len(result.rows), result.final["clients"]
    (2, 4)
    """
    _check_arguments(config, task, out, resume, messages)
    if out is not None and draw:
        check_drawing()
    check_callbacks(callbacks)
    if progress not in (None, True, False):
        raise InputError(f"run: `progress` must be True, False or None, got {show(progress)}")
    own = task is not None
    config, task = _prepare(config, task)
    messages = Path(messages) if messages else None
    if messages:
        check_no_file(messages, "`messages`")
    ranks = join_torchrun(config, task, messages)
    if ranks and ranks.rank > 0:
        with mute_stops():  # rank 0 gets the same interrupts, and decides whether to stop
            engine, last = serve(config, task, ranks, messages)
        model = engine.model_at(last.x, last.b)
        return Result(config, [], model, model, None, None)
    with ExitStack() as stack:  # keeps the folder locked until the pictures are drawn in it
        stack.enter_context(compile_coders_beside())
        every = CallbackList([*_show_progress(progress, config.rounds, stack), *callbacks])
        started = (
            closing(ranks) if ranks else start_workers(config, task, messages, every.on_message, own=own)
        )
        with started as ranks:
            loop = Loop(config, task, every, messages, ranks)
            # The folder is opened only now: a run that cannot start must not create its folder.
            folder = stack.enter_context(Folder.open(Path(out))) if out is not None else None
            if draw and folder and running_compiler():
                import_drawing()  # while the process compiles the first step
            result = finish(loop.steps(folder, resume=resume))
        if draw and folder:
            write_run_pictures(folder.path)
    return result


def _show_progress(wanted: bool | None, rounds: int, stack: ExitStack) -> list[Callback]:
    """Return the callback that shows the progress of a run, if it is wanted, until `stack` ends."""
    if wanted is None:
        wanted, silent = is_watched(), SILENT
    else:
        silent = 0.0
    if not wanted:
        return []
    from cfedavg.callbacks.progress import show_progress  # imports rich, which takes a while

    return [stack.enter_context(show_progress(rounds, silent))]


def _prepare(config: Config, task: Task | None) -> tuple[Config, Task]:
    """Return the configuration and the task of a run; meanwhile, start the process that compiles steps."""
    start_compiler(config.device, config.engine)
    if running_compiler():
        import_compiler()  # a step is listed and loaded with it; meanwhile, another process decodes the data
    if task is None:
        from cfedavg.data.tasks import build_task  # imports packages that only named data sets need

        task = build_task(config)
        return config.with_clients(len(task.clients)), task
    return config.for_task(task.name, type(task.model).__name__, task.prints, len(task.clients)), task


def run_beside(
    config: Config,
    task: Task,
    partners: Partners,
    *,
    out: Path,
    resume: bool,
    callbacks: Sequence[Callback],
) -> Steps[Result]:
    """Train as `run` does, but pause before each round, so that `interleave` lets several runs train at once.

    The run stays in this process and does not draw its curves.
    """
    _check_arguments(config, task, out, resume)
    start_compiler(config.device, config.engine)
    config = config.with_clients(len(task.clients))
    loop = Loop(config, task, CallbackList(callbacks), None, Ranks(), partners)
    with Folder.open(out) as folder:
        return (yield from loop.steps(folder, resume=resume))


def _check_arguments(
    config: object, task: object, out: object, resume: object, messages: object = None
) -> None:
    if not isinstance(config, Config):
        hint = ": write Config(**...)" if isinstance(config, dict) else ""
        raise InputError(f"run: `config` must be a Config, got {type(config).__name__}{hint}")
    if task is not None and not isinstance(task, Task):
        raise InputError(f"run: `task` must be a Task, got {type(task).__name__}")
    for name, folder in (("out", out), ("messages", messages)):
        if folder is not None and not isinstance(folder, str | Path):
            raise InputError(f"run: `{name}` must be the path of a folder, got {show(folder)}")
    if not isinstance(resume, bool):
        raise InputError(f"run: `resume` must be True or False, got {show(resume)}")
    if resume and out is None:
        raise InputError("run: `resume` needs `out`, the folder of the run to continue")
    if config.deadline is not None and config.steps_per_second is None:  # a federation measures time
        raise InputError("`deadline` needs `steps_per_second`, the speed of the simulated clients")


class Loop:
    """One run, from its first round or its checkpoint to its last round."""

    def __init__(
        self,
        config: Config,
        task: Task,
        callbacks: CallbackList,
        messages: Path | None,
        ranks: Ranks,
        partners: Partners | None = None,
    ) -> None:
        self.config, self.callbacks, self.note = config, callbacks, task.note
        self.plan = Plan(config, task)
        self.guard = Guard(config.guard, self.plan.feedback)
        self.rows: list[Record] = []
        self._pending: list[Callable[[], Record]] = []  # functions that give the rows not yet written
        self._engines: list[str] = []  # sentences about the engine that are not yet in engine.txt
        self._done = 0  # number of finished rounds
        self._stopped = False  # whether a callback wants the run to end
        self._unsaved: State | None = None  # a checkpoint is due of it, once its row is written
        self._folder: Folder | None = None
        self.engine = choose_engine(config, self.plan, task, messages, ranks, self._say, partners)
        # A GPU leaves the processor free to write checkpoints. Other ranks hold only their latest residuals.
        self._saves_beside = self.engine.behind == 1 and ranks.size == 1

    def _say(self, text: str) -> None:
        """Pass a sentence to the callbacks; write a sentence about the engine also to engine.txt."""
        self.callbacks.on_message(text)
        if text.startswith("engine: "):
            self._engines.append(text.removeprefix("engine: "))
            self._write_engines()

    def _write_engines(self) -> None:
        if self._folder:
            since = f"after round {self._done}: " if self._done else ""
            self._folder.add_engines("".join(f"{since}{line}\n" for line in self._engines))
            self._engines.clear()

    def steps(self, folder: Folder | None, *, resume: bool) -> Steps[Result]:
        """Run all remaining rounds, with a pause before each; return the rows and models."""
        with self.callbacks:  # they receive the end, whatever ends the run
            state = yield from self._train(folder, resume)
            return self._end(state)

    def _train(self, folder: Folder | None, resume: bool) -> Steps[State]:
        """Run all remaining rounds and return the last state."""
        start = self.engine.start()
        row = self.engine.row
        where = self.config.residuals if row.length else "device"
        each = row.length * (2 if self.config.residual_precision == "bf16" else start.x.element_size())
        path = folder.residuals if folder else None
        with open_store(where, self.plan.m * each, start.x.device, path, row) as residuals:
            try:
                state = replace(start, residuals=residuals)
                if folder:
                    state, self.rows = folder.begin(self.config, self.engine.identity, state, resume=resume)
                    for known in self.rows:
                        self.guard.watch(known)
                    self._folder, self._done = folder, state.t
                    if state.t < self.config.rounds:
                        self._write_engines()
                self._announce(state, resume, each)
                self._ended = time.perf_counter()
                state = yield from self._rounds(self.engine.begin(state))
            finally:
                with suppress(RankLost):  # a lost rank cannot be told to end
                    self.engine.close()
        return state

    def _announce(self, state: State, resume: bool, residual_bytes: int) -> None:
        """Tell the callbacks what the run is about to do."""
        say = self.callbacks.on_message
        self.callbacks.on_begin(
            Start(self.config, self._folder.path if self._folder else None, list(self.rows))
        )
        if self.note:
            say(self.note)
        say(self.plan.in_words(self.engine.layout))
        if isinstance(state.residuals, OnDisk):
            # Residuals of all clients, residuals being replaced, residuals that only the checkpoint needs.
            m, sampled = self.plan.m, self.plan.clients_per_round
            between = min(m, sampled * (self.config.checkpoint_every or self.config.rounds))
            most = (m + sampled + between * (self._folder is not None)) * residual_bytes
            say(f"residuals live on disk, in {state.residuals.folder}, and can grow to {format_bytes(most)}")
        elif not state.residuals.lives_on(state.x.device):
            most = self.plan.m * residual_bytes
            say(f"residuals live in the memory of the host, and can grow to {format_bytes(most)}")
        if needs_compiling():
            say("another process compiles the message coders, once: up to 30 s")
        if state.t:
            say(f"resuming after round {state.t} of {self.config.rounds}")
        elif resume:
            say("nothing to resume: starting with the first round")

    def _rounds(self, state: State) -> Steps[State]:
        """Run the remaining rounds, add a row for each round, and return the last state."""
        try:
            while state.t < self.config.rounds and not self._stopped:
                self._done = state.t
                state = replace(state, doublings=self.guard.doublings(state.t))
                yield partial(self.engine.request, state)
                state_next, finish = self.engine.round(state)
                tested = self._evaluate(state_next)
                # The time of a round starts at the end of the round before.
                began, self._ended = self._ended, time.perf_counter()
                row = partial(self._row, state.t, finish, tested, self._ended - began)
                state = state_next
                self._pending.append(row)
                self._write_rows_and_save(state)
            if self._stopped and state.t < self.config.rounds:
                self.callbacks.on_message(f"a callback ends the run after round {state.t}")
                self._write_rows(0)
                self._save(state)
        except Exception:
            with suppress(KeyboardInterrupt):
                self._write_rows(0)  # the rounds before the error are valid
            raise
        except KeyboardInterrupt:
            with mute_stops():
                self._save_at_stop(state)
            raise
        return state

    def _write_rows_and_save(self, state: State) -> None:
        """Write the rows of rounds whose bytes are counted; save a checkpoint if one is due."""
        every, last = self.config.checkpoint_every, state.t == self.config.rounds
        due = last or bool(self._folder and every and state.t % every == 0)
        if due and (last or not self._saves_beside or isinstance(state.residuals, OnDisk)):
            self._write_rows(0)
            self._save(state)
            return
        self._write_rows(self.engine.behind)
        if self._unsaved:
            self._save(self._unsaved, beside=True)
        self._unsaved = state if due else None

    def _save_at_stop(self, state: State) -> None:
        """Save the state after the last whole round, if every rank can still send its residuals."""
        if not self._folder:
            return
        self.callbacks.on_message(f"stopping after {state.t} rounds: saving, `resume` goes on from here")
        left = state.t - len(self.rows)
        self.rows += [row() for row in self._pending[len(self._pending) - left :]]
        self._folder.rewrite(self.rows)  # the interrupt may have come before a row was written
        try:
            self._save(state)
        except RankLost as error:
            self.callbacks.on_message(f"not saved, {error}: `resume` goes on from the last checkpoint")

    def _write_rows(self, behind: int) -> None:
        """Write the rows of finished rounds, except the last `behind` rows."""
        while len(self._pending) > behind:
            row = self._pending[0]()
            self.rows.append(row)
            self._pending.pop(0)
            if self._folder:
                self._folder.append(row)
            self._stopped |= bool(self.callbacks.on_row(row))
            if sentence := self.guard.report(row, self.plan.compressor):
                self.callbacks.on_message(sentence)

    def _save(self, state: State, *, beside: bool = False) -> None:
        """Save a checkpoint; with `beside`, a thread writes it while the next rounds run."""
        if folder := self._folder:
            self.engine.checkpoint(
                state, lambda whole: folder.checkpoint(whole, self.engine.identity, beside)
            )

    def _evaluate(self, state: State) -> Record:
        """Return the test columns of a row of metrics; none if no evaluation is due after this round.

        With a compressed broadcast, evaluate both the clients' model and the server's model.
        """
        if state.t != self.config.rounds and state.t % self.config.eval_every:
            return {}
        tested: Record = {}
        if state.w is not None:
            found = self.engine.evaluate(replace(state, w=None))
            tested = {f"server_{name}": value for name, value in found.items() if name.startswith("test_")}
        # The clients' model comes last: other ranks return the model that they evaluated last.
        tested = self.engine.evaluate(state) | tested
        if not all(math.isfinite(tested.get(name, 0.0)) for name in ("test_loss", "server_test_loss")):
            raise Diverged(state.t - 1, [], "the test loss")
        return tested

    def _row(self, t: int, finish: Callable[[], Record], tested: Record, seconds: float) -> Record:
        row = finish() | tested
        row["total_bytes"] = row["uplink_bytes"] + row["downlink_bytes"]
        if self.config.smoothness is not None:
            row["rate_conditions"] = self.plan.rate_conditions(t, row)
        return {"round": t, **row, "seconds": seconds}

    def _end(self, state: State) -> Result:
        """Write the models, report broken rate conditions, and return the result."""
        model, server_model = (self.engine.model_at(x, state.b) for x in (state.broadcast, state.x))
        iterate = None if state.z is None else self.engine.model_at(*state.z)
        if self._folder:
            self._folder.save_models(model, None if state.w is None else server_model, iterate)
        for sentence in broken_conditions(self.rows):
            self.callbacks.on_message(sentence)
        path = self._folder.path if self._folder else None
        return Result(self.config, self.rows, model, server_model, iterate, path)
