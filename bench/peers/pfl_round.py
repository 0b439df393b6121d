"""A round of FedAvg in pfl-research 0.6.0 (PyPI: pfl), by its public classes.

The same as in plain_round.py: model, initial weights, samples, their fixed order, the short last batch,
local SGD, the uniform mean, evaluation on the test set after each round, shared between the processes. To
pfl's advantage all samples lie on the device before the first round. pfl compresses nothing.

pfl also evaluates every user before and after training in round 0, which cannot be switched off, and does
not evaluate on the test set then: that round is the warm-up and is not timed. Its reports per round are
switched off. Its processes find each other by PFL_WORKER_RANK and PFL_WORKER_ADDRESSES, which it reads
itself (under torchrun it would give each process a GPU of its own). One thing is changed in it: they talk by
gloo instead of NCCL, which does not serve several processes on one GPU.
"""

from __future__ import annotations

import functools
import os
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from common import (
    EVALUATION_BATCH,
    RATE,
    Settings,
    Work,
    leave,
    memory,
    moved,
    now,
    report,
    settings,
    spread,
)
from common import work as build
from torch import Tensor, nn


class Judged(nn.Module):
    """A model with the two methods that pfl calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return nn.functional.cross_entropy(self.model(inputs), labels)

    @torch.no_grad()
    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        self.eval()
        right = (self.model(inputs).argmax(1) == labels).sum()
        return {"accuracy": Weighted(right.item(), labels.numel())}


def by_gloo() -> None:
    """Lets pfl start its process group with gloo, whatever backend it asks for."""
    start = torch.distributed.init_process_group

    @functools.wraps(start)
    def gloo(*_: object, **rest: Any) -> None:
        start(**rest | {"backend": "gloo"})

    torch.distributed.init_process_group = gloo


def train(given: Settings, task: Work) -> tuple[list[float], list[float]]:
    """When each round ended, and the accuracy after all but the first."""
    # pfl joins the other processes as it is imported.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.model.pytorch import PyTorchModel

    if pytorch_ops.distributed.world_size != given.processes:
        raise SystemExit("pfl did not join the other processes")

    class Clock(TrainingProcessCallback):
        """Notes the end of each round and what the evaluation before it found."""

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
            found = aggregate_metrics.to_simple_dict()
            if central_iteration > 0:
                accuracy.append(float(found["Central val | accuracy"]))
            stamps.append(now(given.device))
            return super().after_central_iteration(
                aggregate_metrics, model, central_iteration=central_iteration
            )

    stamps: list[float] = []
    accuracy: list[float] = []
    np.random.seed(given.seed)
    users = [Dataset(moved(client, given.device), user_id=str(i)) for i, client in enumerate(task.clients)]
    model = Judged(task.model).to(given.device)
    sampler = get_user_sampler("minimize_reuse", list(range(given.clients)))
    federation = FederatedDataset(users.__getitem__, sampler)
    judging = NNEvalHyperParams(local_batch_size=EVALUATION_BATCH)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=1 + given.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=given.clients,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=federation, val_data=federation),
        model=PyTorchModel(
            model=model,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_batch_size=task.batch, local_num_epochs=given.epochs, local_learning_rate=RATE
        ),
        model_eval_params=judging,
        callbacks=[CentralEvaluationCallback(Dataset(moved(task.test, given.device)), judging), Clock()],
        send_metrics_to_platform=False,
    )
    return stamps, accuracy


def main() -> None:
    given = settings(__doc__)
    spread(given)
    by_gloo()
    os.environ["PFL_PYTORCH_DEVICE"] = given.device
    task = build(given)
    steps = task.steps(given.epochs)
    stamps, accuracy = train(given, task)
    peak = memory(given)
    if given.rank == 0:
        report(f"pfl {version('pfl')}", given, steps, stamps, accuracy, peak)


if __name__ == "__main__":
    main()
    leave()
