"""A short trial on a CPU: would the other precision make the steps of this run faster?"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfedavg.core.config import Config
from cfedavg.core.fingerprint import restore_generators
from cfedavg.simulate.cpu.replacements import join_layers, quicken
from cfedavg.simulate.engines.trial import takes_fast_layers
from cfedavg.simulate.local import Vectors, after, channels_last, local_steps, to_device
from cfedavg.simulate.plan import Plan
from cfedavg.task import Task

OTHER = {"float32": "bf16", "bf16": "float32"}
STEPS = 3  # timed for each precision, after one that warms up
# The trial takes 13 steps, or 25 where bf16 takes five times as long: at most 2% of so many steps.
SHORTEST = 1500
FASTER = 0.9  # of the time, from which on the other precision is worth a sentence


def compare_precisions(plan: Plan, task: Task, processes: int) -> str:
    """Return a sentence if a step in the other precision takes at most 0.9 of the time, else "".

    Short runs are not delayed by a trial.
    """
    config = plan.config
    steps = sum(plan.steps.at(0, i) for i in plan.sampled(0)) * config.rounds / processes
    if config.precision not in OTHER or steps < SHORTEST:
        return ""
    other = OTHER[config.precision]
    mine = measure_step(plan, task, config, np.inf)
    share = measure_step(plan, task, config.replace(precision=other), mine) / mine
    if share > FASTER:
        return ""
    return f"precision {other} would take about {share:.1g} of the time of a step on this processor"


def measure_step(plan: Plan, task: Task, config: Config, limit: float) -> float:
    """Return the seconds of a step of client 0 in `config.precision`, the least of a few steps.

    Return infinity if the step fails, or if the first step takes longer than three times `limit`.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with restore_generators(torch.device("cpu")):
            step = _prepare(plan, task, config)
            first = _time(step)
            return first if first > 3 * limit else min(_time(step) for _ in range(STEPS))
    except Exception:
        return float("inf")
    finally:
        torch.set_num_threads(threads)


def _time(step: Callable[[], Any]) -> float:
    """Return the seconds that this thread computes; other programs on the same core do not count."""
    start = time.thread_time()
    step()
    return time.thread_time() - start


def _prepare(plan: Plan, task: Task, config: Config) -> Callable[[], Any]:
    """Return a function that takes a step."""
    cpu, half, loss = torch.device("cpu"), config.precision == "bf16", task.loss
    model: Any = copy.deepcopy(task.model).to(cpu, torch.float32)
    rows = np.arange(min(len(task.clients[0]), config.batch_size))
    batch = to_device(task.clients[0].batch(rows), cpu, torch.float32)
    if takes_fast_layers(task, config):
        model, loss, batch = model.to(memory_format=torch.channels_last), quicken(loss), channels_last(batch)
        join_layers(model)
    vectors = Vectors(model)
    x, b = vectors.read()

    def step() -> Tensor:
        vectors.write(x, b)  # so that the weights stay finite
        with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=False):
            return local_steps(model, loss, [batch], plan.local_optimiser, 0.0, after(1)).loss

    return step
