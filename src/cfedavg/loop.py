"""The loop over rounds: run, evaluate, record, checkpoint, resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from cfedavg.config import Config
from cfedavg.engines import Engine, ReferenceEngine, choose_device
from cfedavg.errors import InputError
from cfedavg.files import replacing
from cfedavg.folder import Folder
from cfedavg.metrics import Record, finite
from cfedavg.plan import Plan
from cfedavg.state import State
from cfedavg.task import Task
from cfedavg.theory import rate_conditions

ENGINES: dict[str, Callable[[Plan, Task, torch.device], Engine]] = {"reference": ReferenceEngine}
OWN = "(a task from Python)"  # stands in config.toml for a model and data that no text names


class Observer:
    """Sees a run as it goes. This one says nothing; the command's shows progress."""

    def say(self, text: str) -> None:
        """Something worth knowing, in a sentence."""

    def row(self, row: Record) -> None:
        """A round is done."""


@dataclass(frozen=True)
class Result:
    """What a run gives: one row of metrics a round, the trained model, and where it was written."""

    config: Config
    rows: list[Record]
    model: nn.Module
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
) -> Result:
    """Trains. Without a task, data and model are those that the configuration names.

    With `out`, the run is written to that folder as it goes, and `resume` goes on where it stopped.

    >>> clients = [(torch.ones(8, 3) * i, torch.tensor([i % 2] * 8)) for i in range(4)]
    >>> task = Task(nn.Linear(3, 2), clients, test=clients[0])
    >>> result = run(Config(rounds=2, compressor="topk(0.5)"), task)
    >>> len(result.rows), result.final["clients"]
    (2, 4)
    """
    if task is None:
        from cfedavg.data.tasks import build_task  # pulls in what only named data sets need

        task = build_task(config)
    else:
        config = config.replace(clients=len(task.clients), dataset=OWN, model=OWN)
    loop = Loop(config, task, Path(out) if out is not None else None, observer or Observer())
    return loop.run(resume)


class Loop:
    """One run from its first round, or from its checkpoint, to its last."""

    def __init__(self, config: Config, task: Task, out: Path | None, observer: Observer) -> None:
        self.config, self.observer = config, observer
        self.plan = Plan(config, task)
        self.engine = choose_engine(config, self.plan, task)
        self.folder = Folder(out) if out else None

    def run(self, resume: bool) -> Result:
        state, rows = self._begin(resume)
        every = self.config.checkpoint_every
        try:
            while state.t < self.config.rounds:
                state_next, row = self._round(state)
                rows.append(row)
                if self.folder:
                    self.folder.append(row)
                state = state_next
                self.observer.row(row)
                if self.folder and every and state.t % every == 0:
                    self.folder.checkpoint(state, self.engine.layout)
        except KeyboardInterrupt:
            if self.folder:  # the interrupt may have come between the row and the state
                self.folder.rewrite(rows[: state.t])
                self.folder.checkpoint(state, self.engine.layout)
                self.observer.say(f"stopped after {state.t} rounds; --resume goes on from here")
            raise
        return self._end(state, rows)

    def _begin(self, resume: bool) -> tuple[State, list[Record]]:
        start = self.engine.start()
        if self.folder is None:
            return start, []
        self.folder.begin(self.config, resume=resume)
        restored = self.folder.restore(self.engine.layout, start.x)
        if restored is None:
            return start, []
        self.observer.say(f"resuming after round {restored[0].t} of {self.config.rounds}")
        return restored

    def _round(self, state: State) -> tuple[State, Record]:
        began = time.perf_counter()
        state_next, record = self.engine.round(state)
        last = state_next.t == self.config.rounds
        if last or state_next.t % self.config.eval_every == 0:
            record |= self.engine.evaluate(state_next)
        if self.config.smoothness is not None:
            record |= self._conditions(state.t, record)
        return state_next, {"round": state.t, **record, "seconds": time.perf_counter() - began}

    def _conditions(self, t: int, record: Record) -> Record:
        """value / limit of each rate condition, with the measured gamma and alpha: above 1 it is broken."""
        rates, K = self.plan.rates, self.plan.steps.bounds[1]
        assert self.config.smoothness is not None
        conditions = rate_conditions(
            rates.eta_local(t),
            rates.eta,
            K,
            self.config.smoothness,
            _or_infinite(record["snr_min"]),
            record["alpha"] or 1.0,
            rates.update,
        )
        ratios = {c.text: c.value / c.limit for c in conditions}
        return {"rate_conditions": {text: finite(ratio) for text, ratio in ratios.items()}}

    def _end(self, state: State, rows: list[Record]) -> Result:
        model = self.engine.model_at(state.x, state.b)
        iterate = None if state.z is None else self.engine.model_at(*state.z)
        if self.folder:
            self.folder.checkpoint(state, self.engine.layout)
            save_model(model, self.folder.path / "model.safetensors")
            if iterate is not None:
                save_model(iterate, self.folder.path / "iterate.safetensors")
        for sentence in broken_conditions(rows):
            self.observer.say(sentence)
        return Result(self.config, rows, model, iterate, self.folder.path if self.folder else None)


def choose_engine(config: Config, plan: Plan, task: Task) -> Engine:
    """The engine that a configuration names."""
    name = "reference" if config.engine == "auto" else config.engine
    if name not in ENGINES:
        raise InputError(f"--engine: unknown engine {name!r}; there are auto, {', '.join(ENGINES)}")
    return ENGINES[name](plan, task, choose_device(config.device))


def save_model(model: nn.Module, path: Path) -> None:
    """The model's state_dict; a tied parameter is written under each of its names."""
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary)


def broken_conditions(rows: list[Record]) -> list[str]:
    """A sentence for each rate condition that some round broke."""
    sentences = []
    measured = [row for row in rows if "rate_conditions" in row]
    for text in measured[0]["rate_conditions"] if measured else ():
        ratios = [_or_infinite(row["rate_conditions"][text]) for row in measured]
        broken = sum(not (ratio <= 1 if "<=" in text else ratio < 1) for ratio in ratios)
        if broken:
            worst = measured[ratios.index(max(ratios))]
            sentences.append(
                f"rate condition {text} is broken in {broken} of {len(measured)} rounds; most in round "
                f"{worst['round']}, {max(ratios):.3g} times the limit "
                f"(measured gamma {_or_infinite(worst['snr_min']):.4g}, alpha {worst['alpha'] or 1:.4g})"
            )
    return sentences


def _or_infinite(value: float | None) -> float:
    """The metrics write infinity as null."""
    return math.inf if value is None else value
