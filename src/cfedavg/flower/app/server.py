"""The server: CFedAvg with the rates of a Config, and the test set of its data."""

from __future__ import annotations

from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from cfedavg.data.tasks import build_task
from cfedavg.engines.common import reproducible
from cfedavg.evaluate import evaluate
from cfedavg.flower.app.settings import config_of
from cfedavg.flower.strategy import CFedAvg
from cfedavg.plan import Plan
from cfedavg.task import Task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds of the run configuration."""
    given = context.run_config
    config = config_of(given)
    task = build_task(config)
    # By the clock every client does its own number of steps, so line 11 is the one that holds.
    update = "mean" if config.deadline is not None else Plan(config, task).rates.update
    eta = config.eta if config.deadline is not None else Plan(config, task).rates.eta
    strategy = CFedAvg(
        compressor=config.compressor,
        error_feedback=config.error_feedback,
        update=update,
        eta=eta,
        weighting=config.weighting,
        participation=config.participation,
        over_selection=float(given.get("over-selection", 0.0)),
        min_nodes=int(given.get("min-nodes", config.clients)),
        quorum=float(given.get("quorum", 0.5)),
        max_norm=float(given["max-norm"]) if "max-norm" in given else None,
        seed=config.seed,
        out=str(given["out"]) if given.get("out") else None,
        resume=bool(given.get("resume", False)),
        from_backup=bool(given.get("from-backup", False)),
        config=config,
    )
    strategy.start(
        grid,
        ArrayRecord(task.model.state_dict()),
        num_rounds=config.rounds,
        timeout=float(given.get("round-timeout", 120.0)),
        evaluate_fn=tested(task, config.eval_every, config.rounds),
    )


def tested(task: Task, every: int, rounds: int) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Evaluates as a simulation does, every so many rounds and at the end."""

    def judge(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if not server_round or (server_round % every and server_round != rounds):
            return None
        task.model.load_state_dict(arrays.to_torch_state_dict())
        cpu = torch.device("cpu")
        with reproducible(cpu):
            return MetricRecord(evaluate(task.model, task, cpu, torch.float32))

    return judge
