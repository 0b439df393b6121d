"""A round of cfedavg on the peers' task, for models that `cfedavg run` does not know by name.

The environment names the ENGINE and the PRECISION. Both directions are compressed by the default.
"""

from __future__ import annotations

import os
from itertools import accumulate

import torch
from common import leave, memory, report, settings, spread, work
from torch.nn import functional as F

from cfedavg import Config, Task, __version__, run


def main() -> None:
    given = settings(__doc__)
    spread(given)
    made = work(given)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def accuracy(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]).argmax(1) == batch[1]).float().mean()

    task = Task(made.model, made.clients, test=made.test, loss=loss, metric=accuracy)
    engine, precision = os.environ.get("ENGINE", "auto"), os.environ.get("PRECISION", "float32")
    config = Config(
        clients=given.clients, rounds=1 + given.rounds, local_epochs=given.epochs, batch_size=made.batch,
        eta_local=0.1, device=given.device, engine=engine, precision=precision, seed=given.seed,
    )  # fmt: skip
    rows = run(config, task).rows
    stamps = list(accumulate(row["seconds"] for row in rows))
    found = [row["test_accuracy"] for row in rows[1:]]
    who = f"cfedavg {__version__}, {engine}, {precision}"
    report(who, given, made.steps(given.epochs), stamps, found, memory(given))


if __name__ == "__main__":
    main()
    leave()
