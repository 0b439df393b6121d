"""The ServerApp: it runs the strategy CFedAvg as a Config says, and evaluates the model on the test set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from cfedavg.data.tasks import build_task
from cfedavg.flower.strategy import CFedAvg
from cfedavg.launch.app import config_of, policy_of
from cfedavg.launch.app.plan import make_plan
from cfedavg.simulate.local import evaluate, reproducible
from cfedavg.task import Task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for all rounds, with the settings in the run configuration."""
    given: Mapping[str, Any] = context.run_config
    config = config_of(given)
    task = build_task(config)
    rates = make_plan(config, task).rates
    by_clock = config.deadline is not None  # then K differs between clients: see line 11 of Algorithm 1
    only_federated = ("resume", "max-norm", "from-backup")
    strategy = CFedAvg(
        compressor=config.compressor,
        compressor_down=config.compressor_down,
        feedback=config.feedback,
        guard=config.guard,
        server_optimiser=config.server_optimiser,
        update="mean" if by_clock and config.update != "fednova" else rates.update,
        eta=config.eta if by_clock else rates.eta,
        weighting=config.weighting,
        seed=config.seed,
        out=given.get("out") or None,
        policy=policy_of(config, given),
        config=config,
        **{name.replace("-", "_"): given[name] for name in only_federated if name in given},
    )
    strategy.start(
        grid,
        ArrayRecord(task.model.state_dict()),
        num_rounds=config.rounds,
        timeout=given.get("round-timeout", 120.0),
        evaluate_fn=make_evaluation(task, config.eval_every, config.rounds),
    )


def make_evaluation(task: Task, every: int, rounds: int) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Return a function that evaluates the model in every `every`-th round and in the last round."""

    def evaluate_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if not server_round or (server_round % every and server_round != rounds):
            return None
        task.model.load_state_dict(arrays.to_torch_state_dict())
        cpu = torch.device("cpu")
        with reproducible(cpu):
            return MetricRecord(evaluate(task.model, task, cpu, torch.float32))

    return evaluate_round
